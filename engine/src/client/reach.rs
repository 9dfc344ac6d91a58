//! Which rails a session gets: TCP and RDMA listeners, matched to what this machine has.
//!
//! Guarantees: an RDMA listener is used where a device reaches it; the TCP listeners of the same fabric are then left alone.
//! Where none does, TCP is used and that is said once, with the reason for each listener (I11); with [`Rdma::Required`] there
//! are no TCP rails.

use super::Rdma;
use crate::memory::plan::{Memlock, Registration, check};
use railfs_proto::hello::{Listener, Transport};
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

/// How a listener is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Tcp(SocketAddr),
    /// The listener's address; the local device and its address.
    Verbs {
        remote: IpAddr,
        device: String,
        local: IpAddr,
    },
}

impl Way {
    pub(super) fn address(&self) -> String {
        match self {
            Way::Tcp(address) => address.to_string(),
            Way::Verbs { remote, .. } => remote.to_string(),
        }
    }
    pub(super) fn transport(&self) -> &'static str {
        match self {
            Way::Tcp(_) => "tcp",
            Way::Verbs { .. } => "rdma",
        }
    }
}

/// The rails to have, and why others cannot be had. `find` gives a device for a listener's address.
pub(super) fn ways<'a>(
    listeners: &'a [Listener],
    rdma: Rdma,
    find: &dyn Fn(IpAddr) -> Result<(String, IpAddr), String>,
) -> (Vec<(&'a Listener, Way)>, Vec<String>) {
    let (mut ways, mut reasons, mut fabrics) = (Vec::new(), Vec::new(), BTreeSet::new());
    for listener in listeners {
        match &listener.transport {
            Transport::Rdma(_) if rdma == Rdma::Off => {}
            Transport::Rdma(remote) => match find(*remote) {
                Ok((device, local)) => {
                    fabrics.insert(listener.fabric.as_str());
                    ways.push((listener, Way::Verbs { remote: *remote, device, local }));
                }
                Err(why) => reasons.push(format!("fabric {}: {why}", listener.fabric)),
            },
            Transport::Other { name, address } => reasons.push(format!("{name} rail at {address}: not known here")),
            Transport::Tcp(_) => {}
        }
    }
    if rdma == Rdma::Required {
        if ways.is_empty() && reasons.is_empty() {
            reasons.push("the server offers no RDMA rail".to_owned());
        }
        return (ways, reasons);
    }
    for listener in listeners {
        if let Transport::Tcp(address) = listener.transport
            && !fabrics.contains(listener.fabric.as_str())
        {
            ways.push((listener, Way::Tcp(address)));
        }
    }
    (ways, reasons)
}

/// The plan of what these rails register, checked against the memlock limit; `None`: none of them is RDMA.
pub(super) fn plan(ways: &[(&Listener, Way)], arena: u64, memlock: Memlock) -> Option<Result<String, String>> {
    let registration = |(_, way): &(&Listener, Way)| match way {
        Way::Tcp(_) => None,
        Way::Verbs { device, .. } => {
            let parts = vec![("arena", arena), ("messages", MESSAGES)];
            Some(Registration { device: device.clone(), parts })
        }
    };
    let all: Vec<Registration> = ways.iter().filter_map(registration).collect();
    (!all.is_empty()).then(|| check(&all, memlock))
}

/// Bytes of a rail's messages.
#[cfg(feature = "rdma")]
const MESSAGES: u64 = crate::rail::verbs::MESSAGES;
#[cfg(not(feature = "rdma"))]
const MESSAGES: u64 = 0;

/// A device of this machine that reaches a listener.
#[cfg(feature = "rdma")]
pub(super) fn find(remote: IpAddr) -> Result<(String, IpAddr), String> {
    use crate::rail::verbs::{candidates, match_device};
    // What the kernel would send from; nothing is sent.
    let any: SocketAddr = if remote.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0u16; 8], 0).into() };
    let routed = std::net::UdpSocket::bind(any)
        .and_then(|socket| socket.connect((remote, 4791)).and_then(|()| socket.local_addr()))
        .map(|address| address.ip());
    match_device(&candidates()?, remote, routed.ok())
}

/// Without RDMA there is none.
#[cfg(not(feature = "rdma"))]
pub(super) fn find(_: IpAddr) -> Result<(String, IpAddr), String> {
    Err("this program was built without RDMA (the Cargo feature `rdma`)".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listener(id: u32, fabric: &str, transport: Transport) -> Listener {
        Listener { id, fabric: fabric.into(), transport, speed_mbps: 0, capabilities: Vec::new() }
    }

    fn offered() -> Vec<Listener> {
        vec![
            listener(0, "a", Transport::Tcp("10.9.0.1:7421".parse().unwrap())),
            listener(1, "a", Transport::Rdma("10.9.0.1".parse().unwrap())),
            listener(2, "b", Transport::Tcp("10.9.1.1:7421".parse().unwrap())),
            listener(3, "b", Transport::Rdma("10.9.1.1".parse().unwrap())),
        ]
    }

    fn only_a(remote: IpAddr) -> Result<(String, IpAddr), String> {
        match remote.to_string().as_str() {
            "10.9.0.1" => Ok(("rxe0c".into(), "10.9.0.2".parse().unwrap())),
            _ => Err("no device".into()),
        }
    }

    fn ids(ways: &[(&Listener, Way)]) -> Vec<(u32, &'static str)> {
        ways.iter().map(|(listener, way)| (listener.id, way.transport())).collect()
    }

    #[test]
    fn i11_rdma_where_it_reaches_tcp_elsewhere_and_the_reason() {
        let offered = offered();
        let (found, reasons) = ways(&offered, Rdma::Auto, &only_a);
        assert_eq!(ids(&found), [(1, "rdma"), (2, "tcp")]);
        assert_eq!(reasons, ["fabric b: no device"]);
        let (found, reasons) = ways(&offered, Rdma::Off, &only_a);
        assert_eq!((ids(&found), reasons.len()), (vec![(0, "tcp"), (2, "tcp")], 0));
        let (found, reasons) = ways(&offered, Rdma::Required, &only_a);
        assert_eq!((ids(&found), reasons.len()), (vec![(1, "rdma")], 1));
    }

    #[test]
    fn i6_the_plan_counts_every_rdma_rail() {
        let offered = offered();
        let memlock = Memlock { limit: Some(1 << 20), lifted: false };
        let all = |remote: IpAddr| Ok((format!("dev{remote}"), remote));
        let (found, _) = ways(&offered, Rdma::Auto, &all);
        let error = plan(&found, 32 << 20, memlock).unwrap().unwrap_err();
        assert!(error.contains("dev10.9.0.1: arena 32 MiB") && error.contains("dev10.9.1.1: arena 32 MiB"), "{error}");
        let (found, _) = ways(&offered, Rdma::Off, &all);
        assert_eq!(plan(&found, 32 << 20, memlock), None);
    }

    #[test]
    fn required_and_not_offered_is_a_reason() {
        let tcp = [listener(0, "a", Transport::Tcp("10.9.0.1:7421".parse().unwrap()))];
        assert_eq!(ways(&tcp, Rdma::Required, &only_a), (vec![], vec!["the server offers no RDMA rail".to_owned()]));
        // What a newer server offers beside it is named and left alone.
        let newer = [listener(0, "a", Transport::Other { name: "verbs9".into(), address: "x".into() })];
        assert!(ways(&newer, Rdma::Auto, &only_a).1[0].contains("verbs9"));
    }
}
