//! Tables written from what people and vendors published (`show_gids` and sysfs listings in manuals and bug reports), with
//! other addresses, and what the lab's devices show.

use super::*;
use std::net::Ipv6Addr;

/// One entry a line: `PORT INDEX GID [IPV4] v1|v2|ib [INTERFACE]`.
fn gids(text: &str) -> Vec<Gid> {
    let entry = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (port, index) = (words.first()?.parse().ok()?, words.get(1)?.parse().ok()?);
        let raw = words.get(2)?.parse::<Ipv6Addr>().ok()?.octets();
        let kind = words.iter().skip(3).find_map(|word| match *word {
            "v1" => Some(GidKind::RoceV1),
            "v2" => Some(GidKind::RoceV2),
            "ib" => Some(GidKind::InfiniBand),
            _ => None,
        })?;
        Some(Gid { port, index, kind, raw, interface: 0 })
    };
    text.lines().filter_map(entry).collect()
}

fn candidate(device: &str, table: &str, networks: &[(&str, u8)]) -> Candidate {
    let networks = networks.iter().map(|(address, bits)| (address.parse().unwrap(), *bits)).collect();
    Candidate { device: device.into(), port: 1, usable: Ok(()), gids: gids(table), networks }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// As `show_gids` lists a two-entry-per-address adapter: v1 before v2, link-local first.
const PAIRS: &str = "
1 0 fe80:0000:0000:0000:0e42:a1ff:fe11:2233 v1 eth0
1 1 fe80:0000:0000:0000:0e42:a1ff:fe11:2233 v2 eth0
1 2 0000:0000:0000:0000:0000:ffff:c0a8:010a 192.168.1.10 v1 eth0
1 3 0000:0000:0000:0000:0000:ffff:c0a8:010a 192.168.1.10 v2 eth0
";
/// With a VLAN interface on top.
const VLAN: &str = "
1 0 fe80::e42:a1ff:fe11:2233 v1 eth0
1 1 fe80::e42:a1ff:fe11:2233 v2 eth0
1 2 ::ffff:192.168.1.10 192.168.1.10 v1 eth0
1 3 ::ffff:192.168.1.10 192.168.1.10 v2 eth0
1 4 ::ffff:10.20.0.10 10.20.0.10 v1 eth0.20
1 5 ::ffff:10.20.0.10 10.20.0.10 v2 eth0.20
";
/// A bond: one device, the bond's address.
const BOND: &str = "
1 0 fe80::e42:a1ff:fe11:2233 v1 bond0
1 1 fe80::e42:a1ff:fe11:2233 v2 bond0
1 2 ::ffff:172.16.5.1 172.16.5.1 v1 bond0
1 3 ::ffff:172.16.5.1 172.16.5.1 v2 bond0
";
/// An adapter that lists v2 only, and no link-local entry after its address.
const V2_ONLY: &str = "
1 0 fe80::4e52:62ff:fe0e:30dc v2 eth2
1 1 ::ffff:10.1.1.7 10.1.1.7 v2 eth2
";
const IPV6: &str = "
1 0 fe80::1 v2 eth0
1 1 fd00:5::1 v2 eth0
";
/// The lab's Soft-RoCE device.
const LAB: &str = "
1 0 fe80::b4:5fff:fe12:3456 v2 rail0c
1 1 ::ffff:10.9.0.2 10.9.0.2 v2 rail0c
";

#[test]
fn a_gid_is_found_by_its_address_and_only_version_2() {
    for (table, address, index) in [
        (PAIRS, "192.168.1.10", 3),
        (VLAN, "10.20.0.10", 5),
        (BOND, "172.16.5.1", 3),
        (V2_ONLY, "10.1.1.7", 1),
        (IPV6, "fd00:5::1", 1),
        (LAB, "10.9.0.2", 1),
    ] {
        assert_eq!(choose_gid(&gids(table), 1, ip(address)).unwrap().index, index, "{table}");
    }
    let error = choose_gid(&gids(PAIRS), 1, ip("192.168.1.11")).unwrap_err();
    assert!(error.contains("192.168.1.10") && error.contains("192.168.1.11"), "{error}");
    assert!(choose_gid(&gids(PAIRS), 2, ip("192.168.1.10")).unwrap_err().contains("none"));
    // The index moves when addresses change.
    let moved = PAIRS.replace("1 3 ", "1 7 ");
    assert_eq!(choose_gid(&gids(&moved), 1, ip("192.168.1.10")).unwrap().index, 7);
}

#[test]
fn a_device_is_matched_by_its_network_then_by_the_route() {
    let one = candidate("mlx5_0", PAIRS, &[("192.168.1.10", 24)]);
    let two = candidate("bnxt_re0", V2_ONLY, &[("10.1.1.7", 16)]);
    let six = candidate("irdma0", IPV6, &[("fd00:5::1", 64)]);
    let all = [one, two, six];
    let of = |remote: &str, routed: Option<&str>| match_device(&all, ip(remote), routed.map(ip));
    assert_eq!(of("192.168.1.99", None), Ok(("mlx5_0".into(), ip("192.168.1.10"))));
    assert_eq!(of("10.1.200.3", None), Ok(("bnxt_re0".into(), ip("10.1.1.7"))));
    assert_eq!(of("fd00:5::77", None), Ok(("irdma0".into(), ip("fd00:5::1"))));
    // Another network: only where the kernel would go there from one of them.
    assert_eq!(of("10.99.0.1", Some("10.1.1.7")), Ok(("bnxt_re0".into(), ip("10.1.1.7"))));
    let error = of("10.99.0.1", Some("10.77.0.1")).unwrap_err();
    assert!(error.contains("10.99.0.1") && error.contains("mlx5_0") && error.contains("irdma0"), "{error}");
    // Never from a routed address to a link-local one.
    assert!(of("fe80::9", Some("192.168.1.10")).is_err());
}

#[test]
fn ports_that_cannot_be_used_are_left_out_and_named() {
    let mut down = candidate("mlx5_0", PAIRS, &[("192.168.1.10", 24)]);
    down.usable = Err("the port is down".into());
    let error = match_device(&[down], ip("192.168.1.1"), None).unwrap_err();
    assert!(error.contains("mlx5_0 port 1: the port is down"), "{error}");
    assert!(match_device(&[], ip("192.168.1.1"), None).unwrap_err().contains("there is no RDMA device"));
}

#[test]
fn the_listeners_own_device_is_the_last_choice() {
    let server = candidate("rxe0s", &LAB.replace("10.9.0.2", "10.9.0.1"), &[("10.9.0.1", 24)]);
    let client = candidate("rxe0c", LAB, &[("10.9.0.2", 24)]);
    let both = [server.clone(), client];
    assert_eq!(match_device(&both, ip("10.9.0.1"), Some(ip("10.9.0.1"))), Ok(("rxe0c".into(), ip("10.9.0.2"))));
    assert_eq!(match_device(&[server], ip("10.9.0.1"), None), Ok(("rxe0s".into(), ip("10.9.0.1"))));
}
