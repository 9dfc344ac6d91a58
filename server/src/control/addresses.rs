//! What hello announces: under which addresses the listeners can be reached.
//!
//! Guarantees: no wildcard is announced. Where one is bound, a client is told the address by which it came (for rails),
//! and all addresses of the machine (for the control plane).

use crate::config::RailConfig;
use railfs_proto::limits::MAX_CONTROL_ADDRESSES;
use railfs_proto::v1;
use std::net::{IpAddr, SocketAddr};

/// The addresses that are bound, with the ports the kernel chose.
#[derive(Clone, Debug)]
pub struct Announced {
    control: Vec<SocketAddr>,
    /// None: one whose device could not be had.
    rails: Vec<Option<(RailConfig, SocketAddr)>>,
    /// Of the rails' ports, megabits per second, where known.
    speeds: Vec<u64>,
}

/// RoCE version 2: the GID of an address is the address.
fn gid(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// `::ffff:a.b.c.d` is `a.b.c.d`.
fn plain(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(ip, IpAddr::V4),
        IpAddr::V4(_) => ip,
    }
}

/// The machine's addresses that others can connect to: no loopback, nothing that needs a scope.
fn machine() -> Vec<IpAddr> {
    let Ok(all) = nix::ifaddrs::getifaddrs() else { return Vec::new() };
    let ip = |address: nix::ifaddrs::InterfaceAddress| {
        let storage = address.address?;
        let v4 = storage.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        v4.or_else(|| storage.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
    };
    let usable = |ip: &IpAddr| match ip {
        IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local() && !v4.is_unspecified(),
        IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local() && !v6.is_unspecified(),
    };
    let mut ips: Vec<IpAddr> = Vec::new();
    for ip in all.filter_map(ip).filter(usable) {
        if !ips.contains(&ip) {
            ips.push(ip);
        }
    }
    ips
}

/// Whether an interface of this machine has the address now: whether it can be bound without leave.
pub(crate) fn is_here(ip: IpAddr) -> bool {
    let bound = std::net::UdpSocket::bind((ip, 0));
    !bound.is_err_and(|error| error.kind() == std::io::ErrorKind::AddrNotAvailable)
}

/// Pure: a bound address as seen by a client that reached the server by `reached`.
fn seen(bound: SocketAddr, reached: Option<SocketAddr>, machine: &[IpAddr]) -> Vec<SocketAddr> {
    if !bound.ip().is_unspecified() {
        return vec![bound];
    }
    let fits = |ip: &IpAddr| bound.is_ipv6() || ip.is_ipv4();
    let reached = reached.map(|address| plain(address.ip()));
    let others = machine.iter().copied().filter(|ip| Some(*ip) != reached);
    reached.into_iter().chain(others).filter(fits).map(|ip| SocketAddr::new(ip, bound.port())).collect()
}

impl Announced {
    /// `rails` in the order of the configuration; `None` where one could not be had.
    pub fn new(control: Vec<SocketAddr>, rails: Vec<Option<(RailConfig, SocketAddr)>>) -> Announced {
        Announced { control, rails, speeds: Vec::new() }
    }

    /// The same, with what is known of the ports' speeds, in the same order; 0: not known.
    #[must_use]
    pub fn with_speeds(self, speeds: Vec<u64>) -> Announced {
        Announced { speeds, ..self }
    }

    /// The rail listeners, for a client that reached the control plane by `reached`.
    pub fn listeners(&self, reached: Option<SocketAddr>) -> Vec<v1::Listener> {
        let listener = |(id, (rail, bound)): (u32, &(RailConfig, SocketAddr))| {
            let address = if bound.ip().is_unspecified() {
                // One address each: a rail is one path.
                seen(*bound, reached, &machine()).first().copied()?
            } else {
                *bound
            };
            let is_rdma = rail.is_rdma();
            Some(v1::Listener {
                id,
                fabric: rail.fabric.clone(),
                transport: rail.transport.clone(),
                address: if is_rdma { address.ip().to_string() } else { address.to_string() },
                speed_mbps: usize::try_from(id).ok().and_then(|id| self.speeds.get(id)).copied().unwrap_or(0),
                capabilities: Vec::new(),
                gid: if is_rdma { gid(address.ip()).to_vec().into() } else { Default::default() },
            })
        };
        // Ids are places in the configuration: what is left out keeps its number.
        let announced = |rail: &&(RailConfig, SocketAddr)| rail.0.announce;
        let there =
            |(id, rail): (u32, &Option<(RailConfig, SocketAddr)>)| listener((id, rail.as_ref().filter(announced)?));
        (0u32..).zip(&self.rails).filter_map(there).collect()
    }

    /// The rails that nobody can reach because no interface has their address now, one line each.
    pub fn absent(&self) -> Vec<String> {
        let absent = self.rails.iter().flatten().filter(|(_, bound)| !is_here(bound.ip()));
        let line = |(rail, bound): &(RailConfig, SocketAddr)| {
            format!(
                "rail {} ({bound}): no interface of this machine has that address; it is used once one has",
                rail.fabric
            )
        };
        absent.map(line).collect()
    }

    /// Where the control plane can be reached.
    pub fn control(&self, reached: Option<SocketAddr>) -> Vec<String> {
        let machine = if self.control.iter().any(|bound| bound.ip().is_unspecified()) { machine() } else { Vec::new() };
        let mut all: Vec<SocketAddr> = Vec::new();
        for address in self.control.iter().flat_map(|bound| seen(*bound, reached, &machine)) {
            if !all.contains(&address) && all.len() < MAX_CONTROL_ADDRESSES {
                all.push(address);
            }
        }
        all.into_iter().map(|address| address.to_string()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wildcard_is_announced_as_real_addresses() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let machine: Vec<IpAddr> = vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()];
        let mapped = Some(at("[::ffff:10.0.0.2]:7420"));
        assert_eq!(seen(at("10.0.0.9:5"), mapped, &machine), [at("10.0.0.9:5")]);
        assert_eq!(seen(at("[::]:5"), mapped, &machine), [at("10.0.0.2:5"), at("10.0.0.1:5"), at("[fd00::1]:5")]);
        assert_eq!(seen(at("0.0.0.0:5"), None, &machine), [at("10.0.0.1:5")]);
        let rail = RailConfig {
            fabric: "f".into(),
            transport: "tcp".into(),
            listen: at("[::]:0"),
            device: None,
            announce: true,
        };
        let announced = Announced::new(
            vec![at("[::]:1")],
            vec![Some((rail.clone(), at("[::]:2"))), None, Some((rail, at("10.1.0.1:3")))],
        );
        let addresses: Vec<_> = announced.listeners(mapped).into_iter().map(|l| (l.id, l.address)).collect();
        assert_eq!(addresses, [(0, "10.0.0.2:2".to_owned()), (2, "10.1.0.1:3".to_owned())]);
        assert_eq!(announced.control(mapped)[0], "10.0.0.2:1");
        assert!(machine.len() == 2);
    }
}
