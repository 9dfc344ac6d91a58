//! What this machine's RDMA devices are.
//!
//! Guarantees: a device that cannot be opened, or a port that cannot be used, is in the list with its reason.

use super::choose::Candidate;
use super::prepare::usable;
use crate::verbs::{Context, devices};
use std::net::IpAddr;

/// Address and prefix of every network interface.
fn networks() -> Vec<(IpAddr, u8)> {
    let Ok(all) = nix::ifaddrs::getifaddrs() else { return Vec::new() };
    let ip = |storage: nix::sys::socket::SockaddrStorage| {
        let v4 = storage.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        v4.or_else(|| storage.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
    };
    let bits = |mask: IpAddr| match mask {
        IpAddr::V4(mask) => u32::from(mask).count_ones(),
        IpAddr::V6(mask) => u128::from(mask).count_ones(),
    };
    all.filter_map(|interface| {
        let address = ip(interface.address?)?;
        Some((address, u8::try_from(bits(ip(interface.netmask?)?)).ok()?))
    })
    .collect()
}

/// Every port of every device.
///
/// # Errors
/// There can be none: no library, no kernel support.
pub fn candidates() -> Result<Vec<Candidate>, String> {
    let networks = networks();
    let mut found = Vec::new();
    for device in devices()? {
        let unusable = |why: String| Candidate {
            device: device.clone(),
            port: 1,
            usable: Err(why),
            gids: vec![],
            networks: vec![],
        };
        let context = match Context::open(&device) {
            Ok(context) => context,
            Err(why) => {
                found.push(unusable(why));
                continue;
            }
        };
        let (facts, gids) = match (context.facts(), context.gids()) {
            (Ok(facts), Ok(gids)) => (facts, gids),
            (Err(error), _) | (_, Err(error)) => {
                found.push(unusable(error.to_string()));
                continue;
            }
        };
        for number in 1..=facts.ports {
            let usable = context.port(number).map_err(|error| error.to_string()).and_then(|port| usable(&port));
            let (device, gids, networks) = (device.clone(), gids.clone(), networks.clone());
            found.push(Candidate { device, port: number, usable, gids, networks });
        }
    }
    Ok(found)
}
