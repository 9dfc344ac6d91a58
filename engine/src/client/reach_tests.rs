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

fn only_a(wanted: &[(&str, IpAddr)], _: Option<&str>) -> Found {
    let one = |(_, remote): &(&str, IpAddr)| match remote.to_string().as_str() {
        "10.9.0.1" => Ok(("rxe0c".into(), "10.9.0.2".parse().unwrap())),
        _ => Err("no device".into()),
    };
    Found { ways: wanted.iter().map(one).collect(), skipped: vec!["device rxe9 port 1: the port is down".into()] }
}

/// A device of its own for each.
fn every(wanted: &[(&str, IpAddr)], device: Option<&str>) -> Found {
    let one = |(_, remote): &(&str, IpAddr)| Ok((device.map_or(format!("dev{remote}"), str::to_owned), *remote));
    Found { ways: wanted.iter().map(one).collect(), skipped: Vec::new() }
}

fn ids(reached: &Reached) -> Vec<(u32, &'static str)> {
    reached.ways.iter().map(|(listener, way)| (listener.id, way.transport())).collect()
}

fn by_hand(text: &str) -> Vec<ManualRail> {
    ManualRail::list(text).unwrap()
}

#[test]
fn i11_rdma_where_it_reaches_tcp_elsewhere_and_the_reason() {
    let offered = offered();
    let found = reach(&offered, Rdma::Auto, &[], &only_a);
    assert_eq!(ids(&found), [(1, "rdma"), (2, "tcp")]);
    assert_eq!(found.reasons, ["fabric b: no device"]);
    assert_eq!(found.skipped, ["device rxe9 port 1: the port is down"]);
    let found = reach(&offered, Rdma::Off, &[], &only_a);
    assert_eq!((ids(&found), found.reasons.len(), found.skipped.len()), (vec![(0, "tcp"), (2, "tcp")], 0, 0));
    let found = reach(&offered, Rdma::Required, &[], &only_a);
    assert_eq!((ids(&found), found.reasons.len()), (vec![(1, "rdma")], 1));
    // A server without RDMA: no device is looked at.
    let found = reach(&offered[..1], Rdma::Auto, &[], &|_, _| panic!("nobody asked"));
    assert_eq!(ids(&found), [(0, "tcp")]);
}

#[test]
fn i6_the_plan_counts_every_rdma_rail() {
    let offered = offered();
    let memlock = Memlock { limit: Some(1 << 20), lifted: false };
    let found = reach(&offered, Rdma::Auto, &[], &every);
    let error = plan(&found.ways, 32 << 20, memlock).unwrap().unwrap_err().to_string();
    assert!(error.contains("dev10.9.0.1: arena 32 MiB") && error.contains("dev10.9.1.1: arena 32 MiB"), "{error}");
    let found = reach(&offered, Rdma::Off, &[], &every);
    assert_eq!(plan(&found.ways, 32 << 20, memlock), None);
}

#[test]
fn i11_without_rdma_a_server_of_rdma_rails_only_is_a_reason_at_once() {
    let offered = offered();
    let rdma: Vec<Listener> = offered.iter().filter(|of| matches!(of.transport, Transport::Rdma(_))).cloned().collect();
    let found = reach(&rdma, Rdma::Off, &[], &|_, _| panic!("nobody asked"));
    assert!(found.ways.is_empty() && found.reasons.len() == 1, "{:?}", found.reasons);
    assert!(
        found.reasons[0].contains("RDMA rails only") && found.reasons[0].contains("no_rdma"),
        "{:?}",
        found.reasons
    );
}

#[test]
#[cfg(feature = "rdma")]
fn i11_a_device_that_is_not_there_is_named_beside_those_that_are() {
    let none = crate::verbs::no_device("nosuch", &[]);
    assert_eq!(none, "there is no RDMA device nosuch, nor any other");
    let there = ["rxe0".to_owned(), "rxe1".to_owned()];
    assert!(crate::verbs::no_device("nosuch", &there).ends_with("(there are: rxe0, rxe1)"));
}

#[test]
fn required_and_not_offered_is_a_reason() {
    let tcp = [listener(0, "a", Transport::Tcp("10.9.0.1:7421".parse().unwrap()))];
    let found = reach(&tcp, Rdma::Required, &[], &only_a);
    assert_eq!((found.ways, found.reasons), (vec![], vec!["the server offers no RDMA rail".to_owned()]));
    // What a newer server offers beside it is named and left alone.
    let newer = [listener(0, "a", Transport::Other { name: "verbs9".into(), address: "x".into() })];
    assert!(reach(&newer, Rdma::Auto, &[], &only_a).reasons[0].contains("verbs9"));
}

#[test]
fn i6_one_read_uses_32_rails_at_most_and_the_rest_is_said() {
    let at = |n: u32| -> IpAddr { IpAddr::from([10, 9, 0, u8::try_from(n).unwrap()]) };
    let mut many: Vec<Listener> = (0..40).map(|n| listener(n, "t", Transport::Tcp((at(n), 7421).into()))).collect();
    many.extend((40..45).map(|n| listener(n, "r", Transport::Rdma(at(n)))));
    let found = reach(&many, Rdma::Auto, &[], &every);
    assert_eq!(found.ways.len(), MAX_RAILS);
    assert_eq!(ids(&found)[..6], [(40, "rdma"), (41, "rdma"), (42, "rdma"), (43, "rdma"), (44, "rdma"), (0, "tcp")]);
    assert!(found.reasons[0].starts_with("45 rails are there: 32 are used"), "{:?}", found.reasons);
    let found = reach(&many[..MAX_RAILS], Rdma::Auto, &[], &every);
    assert_eq!((found.ways.len(), found.reasons.len()), (MAX_RAILS, 0));
    // One is enough.
    assert_eq!(ids(&reach(&many[..1], Rdma::Auto, &[], &every)), [(0, "tcp")]);
}

#[test]
fn a_list_by_hand_is_all_there_is() {
    let offered = offered();
    let found = reach(&offered, Rdma::Auto, &by_hand("rxe0c@10.9.0.2~10.9.0.1"), &every);
    assert_eq!(ids(&found), [(1, "rdma")]);
    let way =
        Way::Verbs { remote: "10.9.0.1".parse().unwrap(), device: "rxe0c".into(), local: "10.9.0.2".parse().unwrap() };
    assert_eq!(found.ways[0].1, way);
    // By fabric, the device's address being found; two devices may lead to one listener.
    let found = reach(&offered, Rdma::Auto, &by_hand("rxe7~b+rxe8~b+tcp@10.9.1.9~b"), &every);
    assert_eq!(ids(&found), [(3, "rdma"), (3, "rdma"), (2, "tcp")]);
    assert!(matches!(&found.ways[0].1, Way::Verbs { device, .. } if device == "rxe7"));
    assert!(matches!(&found.ways[2].1, Way::Tcp { local: Some(local), .. } if local.to_string() == "10.9.1.9"));
    // What is not wanted, or not there, is a reason.
    let found = reach(&offered, Rdma::Required, &by_hand("tcp~10.9.0.1:7421+rxe0~c+rxe0~10.9.7.1"), &every);
    assert_eq!(found.ways, vec![]);
    assert!(found.reasons[0].contains("only RDMA"), "{:?}", found.reasons);
    assert!(found.reasons[1].contains("no RDMA rail of fabric c") && found.reasons[1].contains("rdma 10.9.1.1 in b"));
    assert!(found.reasons[2].contains("say its number as well"), "{:?}", found.reasons);
    // With its number it is believed: the server may be reached by an address that it does not know.
    assert_eq!(ids(&reach(&offered, Rdma::Auto, &by_hand("rxe0~10.9.7.1#3"), &every)), [(3, "rdma")]);
    // But not where the server knows the address by another number.
    assert_eq!(ids(&reach(&offered, Rdma::Auto, &by_hand("rxe0~10.9.1.1#3"), &every)), [(3, "rdma")]);
    let found = reach(&offered, Rdma::Auto, &by_hand("rxe0~10.9.1.1#1"), &every);
    assert_eq!(found.ways, vec![]);
    assert!(found.reasons[0].contains("announces it as number 3, not 1: leave #1 out"), "{:?}", found.reasons);
}

#[test]
fn i12_a_server_that_announces_nothing_needs_a_list() {
    let found = reach(&[], Rdma::Auto, &by_hand("tcp~10.9.0.1:7421+rxe0c@10.9.0.2~10.9.0.1+rxe1c~10.9.1.1#7"), &every);
    assert_eq!(ids(&found), [(0, "tcp"), (1, "rdma"), (7, "rdma")]);
    assert_eq!(refusal(&[], &by_hand("tcp~10.9.0.1:7421")), None);
    assert_eq!(refusal(&offered(), &[]), None);
    for asks in [vec![], by_hand("rxe0~a")] {
        let why = refusal(&[], &asks).unwrap();
        assert!(why.contains("announces no rails") && why.contains("-o rails="), "{why}");
    }
    let found = reach(&[], Rdma::Auto, &by_hand("rxe0~a"), &every);
    assert!(found.ways.is_empty() && found.reasons[0].contains("it announces none"), "{:?}", found.reasons);
}
