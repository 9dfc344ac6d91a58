//! Which device and which GID: pure, over what devices say.
//!
//! Guarantees: RoCE version 2 only, by address, never by index; never link-local to routed; a device that is the listener's
//! own is chosen only when there is no other; what is left out is left out with a reason.

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

/// The device and address for a listener at `remote`: one in its network, else the one that `routed` (the address that the
/// kernel would send from) belongs to.
///
/// # Errors
/// No device reaches it; the message says of each why not.
pub fn match_device(
    candidates: &[Candidate],
    remote: IpAddr,
    routed: Option<IpAddr>,
) -> Result<(String, IpAddr), String> {
    let mut reasons = Vec::new();
    let mut own = None;
    let mut by_route = None;
    for candidate in candidates {
        if let Err(why) = &candidate.usable {
            reasons.push(format!("{} port {}: {why}", candidate.device, candidate.port));
            continue;
        }
        let mut reaches = false;
        for gid in candidate.gids.iter().filter(|gid| gid.port == candidate.port && gid.kind == GidKind::RoceV2) {
            let address = gid.address();
            if link_local(address) != link_local(remote) {
                continue;
            }
            let found = (candidate.device.clone(), address);
            if address == remote {
                own.get_or_insert(found);
                continue;
            }
            let bits = candidate.networks.iter().find(|(of, _)| *of == address).map(|(_, bits)| *bits);
            if bits.is_some_and(|bits| same_network(address, remote, bits)) {
                return Ok(found);
            }
            if routed == Some(address) {
                by_route.get_or_insert(found);
            }
            reaches = true;
        }
        let what = if reaches { "none of its addresses is in that network" } else { "it has no RoCE v2 address" };
        reasons.push(format!("{} port {}: {what}", candidate.device, candidate.port));
    }
    by_route.or(own).ok_or_else(|| {
        let reasons = if reasons.is_empty() { "there is no RDMA device".to_owned() } else { reasons.join("; ") };
        format!("no RDMA device reaches {remote}: {reasons}")
    })
}

#[cfg(test)]
#[path = "choose_tests.rs"]
mod tests;
