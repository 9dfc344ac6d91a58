//! Which rails a session gets: TCP and RDMA listeners, matched to what this machine has, or those that were named by hand.
//!
//! Guarantees: an RDMA listener is used where a device reaches it; the TCP listeners of the same fabric are then left alone.
//! Where none does, TCP is used and that is said once, with the reason for each listener (I11); with [`Rdma::Required`] there
//! are no TCP rails. A list made by hand is all there is then. Never more than [`MAX_RAILS`].

use super::Rdma;
use super::manual::{ManualRail, To, Via};
use crate::memory::plan::{Memlock, Registration, Shortage, check};
use railfs_proto::hello::{Listener, Transport};
use railfs_proto::limits::MAX_RAILS;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

/// How a listener is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Tcp {
        remote: SocketAddr,
        /// `None`: the kernel chooses.
        local: Option<IpAddr>,
    },
    /// The listener's address; the local device and its address.
    Verbs { remote: IpAddr, device: String, local: IpAddr },
}

impl Way {
    pub(super) fn address(&self) -> String {
        match self {
            Way::Tcp { remote, .. } => remote.to_string(),
            Way::Verbs { remote, .. } => remote.to_string(),
        }
    }
    pub(super) fn transport(&self) -> &'static str {
        match self {
            Way::Tcp { .. } => "tcp",
            Way::Verbs { .. } => "rdma",
        }
    }
    pub(super) fn is_rdma(&self) -> bool {
        matches!(self, Way::Verbs { .. })
    }
}

/// Devices for listeners.
#[derive(Clone, Debug, Default)]
pub(super) struct Found {
    /// For each listener asked for: a device and its address, or why there is none.
    pub(super) ways: Vec<Result<(String, IpAddr), String>>,
    /// Ports that are good for none of them, with the reason.
    pub(super) skipped: Vec<String>,
}

/// Gives devices for listeners, by fabric and address; where a device is named, that one only.
pub(super) type Find<'a> = &'a dyn Fn(&[(&str, IpAddr)], Option<&str>) -> Found;

/// See [`reach`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reached {
    /// The rails to have.
    pub(super) ways: Vec<(Listener, Way)>,
    /// Why others cannot be had.
    pub(super) reasons: Vec<String>,
    /// Ports of this machine's devices that are not used, with the reason.
    pub(super) skipped: Vec<String>,
}

/// The rails to have: those named by hand, else what discovery finds.
pub(super) fn reach(listeners: &[Listener], rdma: Rdma, rails: &[ManualRail], find: Find<'_>) -> Reached {
    let mut reached =
        if rails.is_empty() { discover(listeners, rdma, find) } else { named(listeners, rdma, rails, find) };
    let there = reached.ways.len();
    if there > MAX_RAILS {
        // RDMA first, in the server's order: a TCP rail beside 32 of RDMA would bring nothing.
        reached.ways.sort_by_key(|(_, way)| !way.is_rdma());
        reached.ways.truncate(MAX_RAILS);
        let text = format!(
            "{there} rails are there: {MAX_RAILS} are used, the most that one read uses; the others have nothing to do"
        );
        reached.reasons.push(text);
    }
    reached
}

/// Why there can be no rail, where that is clear from the server's list: what needs discovery needs a server that has it.
pub(super) fn refusal(listeners: &[Listener], rails: &[ManualRail]) -> Option<String> {
    let asks = |rail: &ManualRail| matches!(rail.to, To::Fabric(_));
    if !listeners.is_empty() || !rails.iter().all(asks) {
        return None;
    }
    let what = "the server announces no rails, so none can be discovered (it is too old for that, or its rails say `announce = false`)";
    Some(format!("{what}: name them, for example with -o rails=tcp~HOST:7421"))
}

fn discover(listeners: &[Listener], rdma: Rdma, find: Find<'_>) -> Reached {
    let (mut ways, mut reasons, mut fabrics) = (Vec::new(), Vec::new(), BTreeSet::new());
    let offered = |listener: &Listener| match listener.transport {
        Transport::Rdma(remote) if rdma != Rdma::Off => Some(remote),
        _ => None,
    };
    let wanted: Vec<(&str, IpAddr)> =
        listeners.iter().filter_map(|listener| Some((listener.fabric.as_str(), offered(listener)?))).collect();
    // Devices are not even looked at where no listener is for them.
    let found = if wanted.is_empty() { Found::default() } else { find(&wanted, None) };
    let mut answers = found.ways.into_iter();
    for listener in listeners {
        match (&listener.transport, offered(listener)) {
            (_, Some(remote)) => match answers.next() {
                Some(Ok((device, local))) => {
                    fabrics.insert(listener.fabric.as_str());
                    ways.push((listener.clone(), Way::Verbs { remote, device, local }));
                }
                Some(Err(why)) => reasons.push(format!("fabric {}: {why}", listener.fabric)),
                None => reasons.push(format!("fabric {}: nobody looked for a device", listener.fabric)),
            },
            (Transport::Other { name, address }, _) => {
                reasons.push(format!("{name} rail at {address}: not known here"));
            }
            (Transport::Tcp(_) | Transport::Rdma(_), None) => {}
        }
    }
    if rdma == Rdma::Required {
        if ways.is_empty() && reasons.is_empty() {
            reasons.push("the server offers no RDMA rail".to_owned());
        }
        return Reached { ways, reasons, skipped: found.skipped };
    }
    for listener in listeners {
        if let Transport::Tcp(remote) = listener.transport
            && !fabrics.contains(listener.fabric.as_str())
        {
            ways.push((listener.clone(), Way::Tcp { remote, local: None }));
        }
    }
    if rdma == Rdma::Off && ways.is_empty() && reasons.is_empty() && !listeners.is_empty() {
        reasons.push("the server offers RDMA rails only, and RDMA is not wanted (no_rdma)".to_owned());
    }
    Reached { ways, reasons, skipped: found.skipped }
}

/// What was named by hand, and nothing else.
fn named(listeners: &[Listener], rdma: Rdma, rails: &[ManualRail], find: Find<'_>) -> Reached {
    let mut reached = Reached::default();
    for (place, rail) in (0u32..).zip(rails) {
        match (&rail.via, rdma) {
            (Via::Tcp, Rdma::Required) => reached.reasons.push(format!("{rail}: only RDMA rails are wanted")),
            (Via::Device(_), Rdma::Off) => reached.reasons.push(format!("{rail}: RDMA rails are not wanted")),
            _ => match one(listeners, place, rail, find) {
                Ok(mut ways) => {
                    ways.retain(|way| !reached.ways.contains(way));
                    reached.ways.append(&mut ways);
                }
                Err(why) => reached.reasons.push(format!("{rail}: {why}")),
            },
        }
    }
    reached
}

fn one(listeners: &[Listener], place: u32, rail: &ManualRail, find: Find<'_>) -> Result<Vec<(Listener, Way)>, String> {
    let way = |fabric: &str, transport: &Transport| match (transport, &rail.via) {
        (Transport::Tcp(remote), Via::Tcp) => Ok(Way::Tcp { remote: *remote, local: rail.local }),
        (Transport::Rdma(remote), Via::Device(device)) => {
            let (device, local) = match rail.local {
                Some(local) => (device.clone(), local),
                None => {
                    let found = find(&[(fabric, *remote)], Some(device)).ways.pop();
                    found.unwrap_or_else(|| Err("nobody looked for a device".to_owned()))?
                }
            };
            Ok(Way::Verbs { remote: *remote, device, local })
        }
        _ => Err("not of that kind".to_owned()),
    };
    let transport = match &rail.to {
        To::Tcp(address) => Transport::Tcp(*address),
        To::Device(address) => Transport::Rdma(*address),
        To::Fabric(fabric) => {
            let is_tcp = rail.via == Via::Tcp;
            let fits = |listener: &&Listener| {
                listener.fabric == *fabric
                    && match listener.transport {
                        Transport::Tcp(_) => is_tcp,
                        Transport::Rdma(_) => !is_tcp,
                        Transport::Other { .. } => false,
                    }
            };
            let all: Vec<&Listener> = listeners.iter().filter(fits).collect();
            if all.is_empty() {
                let kind = if is_tcp { "TCP" } else { "RDMA" };
                return Err(format!(
                    "the server announces no {kind} rail of fabric {fabric} ({})",
                    announced(listeners)
                ));
            }
            let each = |listener: &&Listener| Ok(((*listener).clone(), way(fabric, &listener.transport)?));
            return all.iter().map(each).collect();
        }
    };
    let known = listeners.iter().find(|listener| match rail.listener {
        Some(number) => listener.id == number && listener.transport == transport,
        None => listener.transport == transport,
    });
    let listener = match (known, rail.listener) {
        (Some(known), _) => known.clone(),
        (None, Some(number)) if let Some(other) = listeners.iter().find(|listener| listener.transport == transport) => {
            return Err(format!("the server announces it as number {}, not {number}: leave #{number} out", other.id));
        }
        // By hand it is known where the server says nothing, or not this.
        (None, None) if !listeners.is_empty() => {
            return Err(format!(
                "the server announces no such rail ({}): say its number as well, with #N",
                announced(listeners)
            ));
        }
        (None, number) => Listener {
            id: number.unwrap_or(place),
            fabric: "by-hand".to_owned(),
            transport,
            speed_mbps: 0,
            capabilities: Vec::new(),
        },
    };
    let way = way(&listener.fabric, &listener.transport)?;
    Ok(vec![(listener, way)])
}

fn announced(listeners: &[Listener]) -> String {
    let one = |listener: &Listener| match &listener.transport {
        Transport::Tcp(address) => format!("tcp {address} in {}", listener.fabric),
        Transport::Rdma(address) => format!("rdma {address} in {}", listener.fabric),
        Transport::Other { name, address } => format!("{name} {address} in {}", listener.fabric),
    };
    if listeners.is_empty() {
        return "it announces none".to_owned();
    }
    format!("it announces {}", listeners.iter().map(one).collect::<Vec<_>>().join(", "))
}

/// The plan of what these rails register, checked against the memlock limit; `None`: none of them is RDMA.
pub(super) fn plan(ways: &[(Listener, Way)], arena: u64, memlock: Memlock) -> Option<Result<String, Shortage>> {
    let registration = |(_, way): &(Listener, Way)| match way {
        Way::Tcp { .. } => None,
        Way::Verbs { device, .. } => {
            let parts = vec![("arena", arena), ("messages", MESSAGES)];
            Some(Registration { device: device.clone(), parts })
        }
    };
    let all: Vec<Registration> = ways.iter().filter_map(registration).collect();
    (!all.is_empty()).then(|| check(&all, ("arena", arena), memlock))
}

/// Bytes of a rail's messages.
#[cfg(feature = "rdma")]
const MESSAGES: u64 = crate::rail::verbs::MESSAGES;
#[cfg(not(feature = "rdma"))]
const MESSAGES: u64 = 0;

/// See [`MESSAGES`].
#[cfg(test)]
pub(super) fn messages() -> u64 {
    MESSAGES
}

/// Devices of this machine that reach listeners.
#[cfg(feature = "rdma")]
pub(super) fn find(wanted: &[(&str, IpAddr)], device: Option<&str>) -> Found {
    use crate::rail::verbs::{Wanted, candidates, match_devices};
    use crate::verbs::no_device;
    // What the kernel would send from; nothing is sent.
    let routed = |remote: IpAddr| {
        let any: SocketAddr = if remote.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0u16; 8], 0).into() };
        let socket = std::net::UdpSocket::bind(any).ok()?;
        socket.connect((remote, 4791)).ok()?;
        socket.local_addr().ok().map(|address| address.ip())
    };
    let mut all = match candidates() {
        Ok(all) => all,
        Err(why) => {
            let none = |_: &(&str, IpAddr)| Err(why.clone());
            return Found { ways: wanted.iter().map(none).collect(), skipped: Vec::new() };
        }
    };
    if let Some(device) = device {
        let there: BTreeSet<String> = all.iter().map(|candidate| candidate.device.clone()).collect();
        if !there.contains(device) {
            let none = no_device(device, &there.into_iter().collect::<Vec<_>>());
            return Found { ways: wanted.iter().map(|_| Err(none.clone())).collect(), skipped: Vec::new() };
        }
        all.retain(|candidate| candidate.device == device);
    }
    let wanted: Vec<Wanted<'_>> = wanted.iter().map(|&(fabric, address)| Wanted { fabric, address }).collect();
    let matched = match_devices(&all, &wanted, &routed);
    Found { ways: matched.ways, skipped: matched.skipped }
}

/// Without RDMA there are none.
#[cfg(not(feature = "rdma"))]
pub(super) fn find(wanted: &[(&str, IpAddr)], _: Option<&str>) -> Found {
    let none = |_: &(&str, IpAddr)| Err("this program was built without RDMA (the Cargo feature `rdma`)".to_owned());
    Found { ways: wanted.iter().map(none).collect(), skipped: Vec::new() }
}

#[cfg(test)]
#[path = "reach_tests.rs"]
mod tests;
