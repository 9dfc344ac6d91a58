//! Which device and which GID: pure, over what devices say.
//!
//! Guarantees: RoCE version 2 only, by address, never by index; never link-local to routed; rails never cross fabrics that have
//! a name; a device that is the listener's own is chosen only when there is no other; what is left out is left out with a
//! reason.

use crate::verbs::{Gid, GidKind};
use std::net::IpAddr;

/// A local device's port with what its addresses are good for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The device.
    pub device: String,
    /// Its port, from 1.
    pub port: u8,
    /// Whether it can be used, else why not.
    pub usable: Result<(), String>,
    /// Its GIDs.
    pub gids: Vec<Gid>,
    /// Address and bits of prefix of its network interfaces.
    pub networks: Vec<(IpAddr, u8)>,
}

fn link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(four) => four.is_link_local(),
        IpAddr::V6(six) => six.is_unicast_link_local(),
    }
}

/// The RoCE version 2 GID of this address on a port.
///
/// # Errors
/// There is none; the message lists the addresses there are.
pub fn choose_gid(gids: &[Gid], port: u8, address: IpAddr) -> Result<Gid, String> {
    let wanted = Gid::of(address);
    let usable = |gid: &&Gid| gid.port == port && gid.kind == GidKind::RoceV2;
    if let Some(gid) = gids.iter().filter(usable).find(|gid| gid.raw == wanted) {
        return Ok(*gid);
    }
    let there: Vec<String> = gids.iter().filter(usable).map(|gid| gid.address().to_string()).collect();
    let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
    Err(format!(
        "port {port} has no RoCE v2 GID of {address} (it has {there}): give the device that address, or name another"
    ))
}

/// Whether two addresses lie in one network.
fn same_network(one: IpAddr, other: IpAddr, bits: u8) -> bool {
    match (one, other) {
        (IpAddr::V4(one), IpAddr::V4(other)) => {
            let shift = 32u32.saturating_sub(u32::from(bits));
            shift >= 32 || u32::from(one) >> shift == u32::from(other) >> shift
        }
        (IpAddr::V6(one), IpAddr::V6(other)) => {
            let shift = 128u32.saturating_sub(u32::from(bits));
            shift >= 128 || u128::from(one) >> shift == u128::from(other) >> shift
        }
        _ => false,
    }
}

/// A listener to reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted<'a> {
    /// Its fabric; "" and "default" say nothing of which devices are in it.
    pub fabric: &'a str,
    /// Its address.
    pub address: IpAddr,
}

/// What [`match_devices`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matched {
    /// For each listener, in order: device and its address, or why there is none (of each port why not).
    pub ways: Vec<Result<(String, IpAddr), String>>,
    /// Ports that are used for no listener, one line each: device, port, reason.
    pub skipped: Vec<String>,
}

/// One address of one port.
struct Place<'a> {
    device: &'a str,
    port: u8,
    address: IpAddr,
    /// Bits of the network's prefix; none: no interface has the address.
    bits: Option<u8>,
}

impl Place<'_> {
    fn reaches(&self, remote: IpAddr) -> bool {
        self.address != remote
            && link_local(self.address) == link_local(remote)
            && self.bits.is_some_and(|bits| same_network(self.address, remote, bits))
    }
}

/// Whether a fabric's name says that its listeners reach every device in it: one that somebody has written.
fn named(fabric: &str) -> bool {
    !matches!(fabric, "" | "default")
}

/// A device and address for each listener: one in its network (of several the one with the longest prefix, then the one that
/// has fewest rails); else one that reaches another listener of the same named fabric; else the one that the kernel would
/// send from (`routed`), unless that is in another named fabric: rails never cross fabrics. The listener's own device is the last
/// choice.
pub fn match_devices(
    candidates: &[Candidate],
    wanted: &[Wanted<'_>],
    routed: &dyn Fn(IpAddr) -> Option<IpAddr>,
) -> Matched {
    let mut places: Vec<Place<'_>> = Vec::new();
    for candidate in candidates.iter().filter(|candidate| candidate.usable.is_ok()) {
        for gid in candidate.gids.iter().filter(|gid| gid.port == candidate.port && gid.kind == GidKind::RoceV2) {
            let address = gid.address();
            let bits = candidate.networks.iter().find(|(of, _)| *of == address).map(|(_, bits)| *bits);
            places.push(Place { device: &candidate.device, port: candidate.port, address, bits });
        }
    }
    let mut rails = vec![0usize; places.len()];
    let mut chosen: Vec<Option<usize>> = vec![None; wanted.len()];
    let fewest = |rails: &[usize], fits: &dyn Fn(usize, &Place<'_>) -> bool| {
        let all = places.iter().enumerate().filter(|(index, place)| fits(*index, place));
        all.min_by_key(|(index, place)| {
            let device = |other: &usize| (places[*other].device, places[*other].port) == (place.device, place.port);
            let of_port: usize = (0..places.len()).filter(device).map(|other| rails[other]).sum();
            (std::cmp::Reverse(place.bits), of_port, *index)
        })
        .map(|(index, _)| index)
    };
    for (listener, choice) in wanted.iter().zip(&mut chosen) {
        *choice = fewest(&rails, &|_, place| place.reaches(listener.address));
        if let Some(index) = *choice {
            rails[index] += 1;
        }
    }
    // Fabrics of places, as the networks have shown.
    let mut fabrics: Vec<(usize, &str)> = Vec::new();
    for (listener, choice) in wanted.iter().zip(&chosen) {
        fabrics.extend(choice.filter(|_| named(listener.fabric)).map(|index| (index, listener.fabric)));
    }
    for (listener, choice) in wanted.iter().zip(&mut chosen).filter(|(_, choice)| choice.is_none()) {
        let kind = |place: &Place<'_>| {
            place.address != listener.address
                && place.address.is_ipv4() == listener.address.is_ipv4()
                && link_local(place.address) == link_local(listener.address)
        };
        let in_fabric = |index: usize| fabrics.contains(&(index, listener.fabric));
        let elsewhere = |index: usize| fabrics.iter().any(|(of, _)| *of == index) && !in_fabric(index);
        let route = routed(listener.address);
        *choice = fewest(&rails, &|index, place| in_fabric(index) && kind(place))
            .or_else(|| {
                fewest(&rails, &|index, place| {
                    Some(place.address) == route && kind(place) && !(named(listener.fabric) && elsewhere(index))
                })
            })
            .or_else(|| fewest(&rails, &|_, place| place.address == listener.address));
        if let Some(index) = *choice {
            rails[index] += 1;
        }
    }
    let reason = |candidate: &Candidate| match &candidate.usable {
        Err(why) => why.clone(),
        Ok(()) => {
            let of_port =
                |place: &&Place<'_>| (place.device, place.port) == (candidate.device.as_str(), candidate.port);
            let addresses: Vec<String> = places.iter().filter(of_port).map(|place| place.address.to_string()).collect();
            match addresses.is_empty() {
                true => "it has no RoCE v2 address".to_owned(),
                false => format!("none of its addresses ({}) is in that network", addresses.join(", ")),
            }
        }
    };
    let line = |candidate: &Candidate| format!("{} port {}: {}", candidate.device, candidate.port, reason(candidate));
    let ways = wanted.iter().zip(&chosen).map(|(listener, choice)| match choice {
        Some(index) => Ok((places[*index].device.to_owned(), places[*index].address)),
        None => {
            let all: Vec<String> = candidates.iter().map(line).collect();
            let all = if all.is_empty() { "there is no RDMA device".to_owned() } else { all.join("; ") };
            Err(format!("no RDMA device reaches {}: {all}", listener.address))
        }
    });
    let ways = ways.collect();
    // A port whose network has a listener is no stranger there, even where another one was preferred.
    let near = |candidate: &&Candidate| {
        places.iter().enumerate().any(|(index, place)| {
            (place.device, place.port) == (candidate.device.as_str(), candidate.port)
                && (rails[index] > 0
                    || wanted.iter().any(|wanted| place.address == wanted.address || place.reaches(wanted.address)))
        })
    };
    let skipped = candidates.iter().filter(|candidate| !near(candidate)).map(|candidate| match &candidate.usable {
        Err(why) => format!("device {} port {}: {why}", candidate.device, candidate.port),
        Ok(()) => {
            let listeners: Vec<String> = wanted.iter().map(|wanted| wanted.address.to_string()).collect();
            let (device, port) = (&candidate.device, candidate.port);
            format!(
                "device {device} port {port}: {} (the server's listeners: {})",
                reason(candidate),
                listeners.join(", ")
            )
        }
    });
    Matched { ways, skipped: skipped.collect() }
}

#[cfg(test)]
#[path = "choose_tests.rs"]
mod tests;
