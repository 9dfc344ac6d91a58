//! Tables written from public documents and bug reports, each named where it stands, and what the lab's devices show. Where the source
//! has words and no table, the table is written after them and says so; its addresses are ours.

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

/// IBM/SpectrumScale_NETWORK_READINESS, pull request 4: a ConnectX-6 with two link-local addresses, so that the one that is routed has
/// index 5, not the 3 that programs like to assume.
const TWO_LINK_LOCALS: &str = "
1 0 fe80:0000:0000:0000:0e42:a1ff:fe5d:4db8 v1 ens1f0
1 1 fe80:0000:0000:0000:0e42:a1ff:fe5d:4db8 v2 ens1f0
1 2 fe80:0000:0000:0000:1186:a6b1:3f0b:c441 v1 ens1f0
1 3 fe80:0000:0000:0000:1186:a6b1:3f0b:c441 v2 ens1f0
1 4 0000:0000:0000:0000:0000:ffff:ac13:003c 172.19.0.60 v1 ens1f0
1 5 0000:0000:0000:0000:0000:ffff:ac13:003c 172.19.0.60 v2 ens1f0
";
/// openucx/ucx, issue 10420: two bonds (RoCE LAG), each one device, with the bond's address.
const BOND_0: &str = "
1 0 fe80:0000:0000:0000:a288:c2ff:feb4:87d6 v1 bond0
1 1 fe80:0000:0000:0000:a288:c2ff:feb4:87d6 v2 bond0
1 2 0000:0000:0000:0000:0000:ffff:0a10:1d0d 10.16.29.13 v1 bond0
1 3 0000:0000:0000:0000:0000:ffff:0a10:1d0d 10.16.29.13 v2 bond0
";
const BOND_1: &str = "
1 0 fe80:0000:0000:0000:a288:c2ff:feb4:b04a v1 bond1
1 1 fe80:0000:0000:0000:a288:c2ff:feb4:b04a v2 bond1
1 2 0000:0000:0000:0000:0000:ffff:0a10:270d 10.16.39.13 v1 bond1
1 3 0000:0000:0000:0000:0000:ffff:0a10:270d 10.16.39.13 v2 bond1
";
/// NVIDIA/nccl, issue 769: the same layout as `ibv_devinfo -v` lists it; index 1, the link-local one, times out.
const BOND_NCCL: &str = "
1 0 fe80:0000:0000:0000:0ac0:ebff:feda:1cfb v1
1 1 fe80::ac0:ebff:feda:1cfb v2
1 2 0000:0000:0000:0000:0000:ffff:c800:d106 v1
1 3 ::ffff:200.0.209.6 v2
";
/// The RoCE page of NVIDIA's MLNX_OFED manual: each address of the interface, of VLAN interfaces on it, and of aliases, in two entries;
/// the default link-local ones first. Written after its words.
const VLAN: &str = "
1 0 fe80::e42:a1ff:fe11:2233 v1 eth0
1 1 fe80::e42:a1ff:fe11:2233 v2 eth0
1 2 ::ffff:192.168.1.10 192.168.1.10 v1 eth0
1 3 ::ffff:192.168.1.10 192.168.1.10 v2 eth0
1 4 ::ffff:10.20.0.10 10.20.0.10 v1 eth0.20
1 5 ::ffff:10.20.0.10 10.20.0.10 v2 eth0.20
";
/// linux-rdma/rdma-core, pull request 828 (the query of the whole table): entries by port. Written after its words:
/// one device with two ports, as a ConnectX-3 is.
const TWO_PORTS: &str = "
1 0 fe80::202:c9ff:fe11:2233 v1 eth2
1 1 fe80::202:c9ff:fe11:2233 v2 eth2
1 2 ::ffff:192.168.1.10 192.168.1.10 v1 eth2
1 3 ::ffff:192.168.1.10 192.168.1.10 v2 eth2
2 0 fe80::202:c9ff:fe11:2234 v1 eth3
2 1 fe80::202:c9ff:fe11:2234 v2 eth3
2 2 ::ffff:192.168.2.10 192.168.2.10 v1 eth3
2 3 ::ffff:192.168.2.10 192.168.2.10 v2 eth3
";
/// uccl-project/uccl, pull request 803: bnxt_re (Thor 2) in a cluster without IPv4: link-local and unique local addresses only.
/// Written after its words.
const IPV6_ONLY: &str = "
1 0 fe80::5e25:73ff:fe11:2233 v1 ens6np0
1 1 fe80::5e25:73ff:fe11:2233 v2 ens6np0
1 2 fd93:16d3:59b6:12::1 v1 ens6np0
1 3 fd93:16d3:59b6:12::1 v2 ens6np0
";
/// Linux, drivers/infiniband/hw/irdma/verbs.c (Intel E810): `irdma_roce_port_immutable` says RoCE with UDP and nothing else, so that the
/// table has version 2 alone, one entry an address. Written after it.
const V2_ALONE: &str = "
1 0 fe80::6a05:caff:fe11:2233 v2 ens2f0
1 1 ::ffff:10.1.1.7 10.1.1.7 v2 ens2f0
";
/// Mellanox/k8s-rdma-sriov-dev-plugin, issue 30: a container whose network device is elsewhere: `n_gids_found=0`.
const NO_GIDS: &str = "";
/// The lab's Soft-RoCE device.
const LAB: &str = "
1 0 fe80::b4:5fff:fe12:3456 v2 rail0c
1 1 ::ffff:10.9.0.2 10.9.0.2 v2 rail0c
";

#[test]
fn a_gid_is_found_by_its_address_and_only_version_2() {
    for (table, port, address, index) in [
        (TWO_LINK_LOCALS, 1, "172.19.0.60", 5),
        (BOND_0, 1, "10.16.29.13", 3),
        (BOND_NCCL, 1, "200.0.209.6", 3),
        (VLAN, 1, "192.168.1.10", 3),
        (VLAN, 1, "10.20.0.10", 5),
        (TWO_PORTS, 2, "192.168.2.10", 3),
        (V2_ALONE, 1, "10.1.1.7", 1),
        (IPV6_ONLY, 1, "fd93:16d3:59b6:12::1", 3),
        (LAB, 1, "10.9.0.2", 1),
    ] {
        let gid = choose_gid(&gids(table), port, ip(address)).unwrap();
        assert_eq!((gid.port, gid.index), (port, index), "{table}");
    }
    let error = choose_gid(&gids(VLAN), 1, ip("192.168.1.11")).unwrap_err();
    assert!(error.contains("192.168.1.10") && error.contains("192.168.1.11"), "{error}");
    assert!(choose_gid(&gids(TWO_PORTS), 1, ip("192.168.2.10")).is_err(), "it is the other port's");
    assert!(choose_gid(&gids(NO_GIDS), 1, ip("10.1.1.7")).unwrap_err().contains("none"));
    // The index moves when addresses change.
    let moved = VLAN.replace("1 3 ", "1 7 ");
    assert_eq!(choose_gid(&gids(&moved), 1, ip("192.168.1.10")).unwrap().index, 7);
}

/// What each listener gets, as "device address" or the reason.
fn found(
    all: &[Candidate],
    wanted: &[(&str, &str)],
    routed: &dyn Fn(IpAddr) -> Option<IpAddr>,
) -> (Vec<String>, Vec<String>) {
    let wanted: Vec<Wanted<'_>> =
        wanted.iter().map(|&(fabric, address)| Wanted { fabric, address: ip(address) }).collect();
    let matched = match_devices(all, &wanted, routed);
    let text =
        |way: Result<(String, IpAddr), String>| way.map_or_else(|why| why, |(device, at)| format!("{device} {at}"));
    (matched.ways.into_iter().map(text).collect(), matched.skipped)
}

fn no_route(_: IpAddr) -> Option<IpAddr> {
    None
}

#[test]
fn a_device_is_matched_by_its_network_then_by_the_route() {
    let one = candidate("mlx5_0", VLAN, &[("192.168.1.10", 24), ("10.20.0.10", 24)]);
    let two = candidate("irdma0", V2_ALONE, &[("10.1.1.7", 16)]);
    let six = candidate("bnxt_re0", IPV6_ONLY, &[("fd93:16d3:59b6:12::1", 64)]);
    let all = [one, two, six];
    let of = |remote: &str, routed: Option<&str>| {
        let routed = routed.map(ip);
        found(&all, &[("", remote)], &|_| routed).0.remove(0)
    };
    assert_eq!(of("192.168.1.99", None), "mlx5_0 192.168.1.10");
    assert_eq!(of("10.20.0.99", None), "mlx5_0 10.20.0.10", "by the VLAN's address");
    assert_eq!(of("10.1.200.3", None), "irdma0 10.1.1.7");
    assert_eq!(of("fd93:16d3:59b6:12::77", None), "bnxt_re0 fd93:16d3:59b6:12::1");
    // Another network: only where the kernel would go there from one of them.
    assert_eq!(of("10.99.0.1", Some("10.1.1.7")), "irdma0 10.1.1.7");
    let error = of("10.99.0.1", Some("10.77.0.1"));
    assert!(error.contains("10.99.0.1") && error.contains("mlx5_0") && error.contains("bnxt_re0"), "{error}");
    // Never from a routed address to a link-local one.
    assert!(of("fe80::9", Some("192.168.1.10")).starts_with("no RDMA device reaches"));
    assert!(found(&[], &[("", "192.168.1.1")], &no_route).0[0].contains("there is no RDMA device"));
}

#[test]
fn bonds_and_ports_each_serve_the_fabric_they_are_in() {
    let bonds = [
        candidate("mlx5_bond_0", BOND_0, &[("10.16.29.13", 24)]),
        candidate("mlx5_bond_1", BOND_1, &[("10.16.39.13", 24)]),
    ];
    let (ways, skipped) = found(&bonds, &[("a", "10.16.29.1"), ("b", "10.16.39.1")], &no_route);
    assert_eq!((ways, skipped.len()), (vec!["mlx5_bond_0 10.16.29.13".into(), "mlx5_bond_1 10.16.39.13".into()], 0));
    let networks = [("192.168.1.10", 24), ("192.168.2.10", 24)];
    let port = |port| Candidate { port, ..candidate("mlx4_0", TWO_PORTS, &networks) };
    let (ways, _) = found(&[port(1), port(2)], &[("a", "192.168.1.1"), ("b", "192.168.2.1")], &no_route);
    assert_eq!(ways, ["mlx4_0 192.168.1.10", "mlx4_0 192.168.2.10"]);
    // All in one network: each port gets its share.
    let flat = [
        candidate("mlx5_bond_0", BOND_0, &[("10.16.29.13", 16)]),
        candidate("mlx5_bond_1", BOND_1, &[("10.16.39.13", 16)]),
    ];
    let (ways, _) = found(&flat, &[("a", "10.16.0.1"), ("b", "10.16.0.2")], &no_route);
    assert_eq!(ways, ["mlx5_bond_0 10.16.29.13", "mlx5_bond_1 10.16.39.13"]);
    // The longer prefix is the nearer network.
    let near = [
        candidate("mlx5_bond_0", BOND_0, &[("10.16.29.13", 8)]),
        candidate("mlx5_bond_1", BOND_1, &[("10.16.39.13", 16)]),
    ];
    assert_eq!(found(&near, &[("", "10.16.29.1")], &no_route).0, ["mlx5_bond_1 10.16.39.13"]);
}

#[test]
fn a_fabric_with_a_name_reaches_its_devices_and_rails_never_cross_it() {
    let bonds = [
        candidate("mlx5_bond_0", BOND_0, &[("10.16.29.13", 24)]),
        candidate("mlx5_bond_1", BOND_1, &[("10.16.39.13", 24)]),
    ];
    let by_default = |_: IpAddr| Some(ip("10.16.29.13"));
    // Both listeners of "a" are reached by what reaches one of them; the default route does not make it two fabrics.
    let wanted = [("a", "10.99.0.1"), ("a", "10.16.39.1")];
    assert_eq!(found(&bonds, &wanted, &by_default).0, ["mlx5_bond_1 10.16.39.13"; 2]);
    // "b" is reached by nothing but the device of "a".
    let (ways, _) = found(&bonds, &[("a", "10.16.29.1"), ("b", "10.99.0.1")], &by_default);
    assert_eq!(ways[0], "mlx5_bond_0 10.16.29.13");
    assert!(ways[1].starts_with("no RDMA device reaches 10.99.0.1"), "{ways:?}");
    // Fabrics that nobody has named say nothing.
    let (ways, _) = found(&bonds, &[("default", "10.16.29.1"), ("default", "10.99.0.1")], &by_default);
    assert_eq!(ways, ["mlx5_bond_0 10.16.29.13"; 2]);
    let (ways, _) = found(&bonds, &[("default", "10.16.29.1"), ("default", "10.99.0.1")], &no_route);
    assert!(ways[1].starts_with("no RDMA device reaches 10.99.0.1"), "{ways:?}");
}

#[test]
fn i11_ports_that_cannot_be_used_are_left_out_and_named_each_once() {
    let mut down = candidate("mlx5_0", VLAN, &[("192.168.1.10", 24)]);
    down.usable = Err("the port is not active (state 1)".into());
    let mut closed = candidate("mlx5_1", NO_GIDS, &[]);
    closed.usable = Err("ibv_open_device on mlx5_1 failed: Permission denied".into());
    let elsewhere = candidate("irdma0", V2_ALONE, &[("10.1.1.7", 24)]);
    let bare = candidate("mlx5_2", NO_GIDS, &[]);
    let good = candidate("mlx5_bond_0", BOND_0, &[("10.16.29.13", 24)]);
    let all = [down, closed, elsewhere, bare, good];
    let (ways, skipped) = found(&all, &[("a", "10.16.29.1")], &no_route);
    assert_eq!(ways, ["mlx5_bond_0 10.16.29.13"]);
    assert_eq!(
        skipped,
        [
            "device mlx5_0 port 1: the port is not active (state 1)",
            "device mlx5_1 port 1: ibv_open_device on mlx5_1 failed: Permission denied",
            "device irdma0 port 1: none of its addresses (fe80::6a05:caff:fe11:2233, 10.1.1.7) is in that network (the server's \
             listeners: 10.16.29.1)",
            "device mlx5_2 port 1: it has no RoCE v2 address (the server's listeners: 10.16.29.1)",
        ]
    );
    let (ways, skipped) = found(&all[..2], &[("a", "192.168.1.1")], &no_route);
    assert!(ways[0].contains("mlx5_0 port 1: the port is not active") && skipped.len() == 2, "{ways:?}");
}

#[test]
fn the_listeners_own_device_is_the_last_choice() {
    let server = candidate("rxe0s", &LAB.replace("10.9.0.2", "10.9.0.1"), &[("10.9.0.1", 24)]);
    let client = candidate("rxe0c", LAB, &[("10.9.0.2", 24)]);
    let both = [server.clone(), client];
    let (ways, skipped) = found(&both, &[("f0", "10.9.0.1")], &|_| Some(ip("10.9.0.1")));
    assert_eq!((ways, skipped.len()), (vec!["rxe0c 10.9.0.2".to_owned()], 0));
    assert_eq!(found(&[server], &[("f0", "10.9.0.1")], &no_route).0, ["rxe0s 10.9.0.1"]);
}
