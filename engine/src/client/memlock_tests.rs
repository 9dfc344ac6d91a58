//! Four reads at once under a memlock limit that has room for two, over real devices and a real server.
//!
//! `RAILFS_MEMLOCK_STORE` says which server, as HOST:PORT (the lab's, by `make test-rdma`): it has the object `lab/small` of
//! 4 MiB. `RAILFS_MEMLOCK_ROOM` says how many of the reads have room: `two` or `all`. The limit itself is set by who runs this.

use super::{Client, Config, Found, Freshness, Rdma};
use crate::error::Error;
use crate::memory::plan::Memlock;
use railfs_proto::name::ObjectName;
use std::io::Write;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

const NAME: &str = "i6_four_reads_where_memlock_has_room_for_two";
const MIB: u64 = 1 << 20;

fn skip(why: &str) {
    eprintln!("SKIPPED {NAME}: {why}");
    if let Some(path) = std::env::var_os("RAILFS_SKIP_LOG") {
        let mut log = std::fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
        writeln!(log, "SKIPPED {NAME}: {why}").unwrap();
    }
}

/// The largest arena that one rail may register under the limit.
fn arena_under(limit: u64) -> u64 {
    (limit / 5 * 4).saturating_sub(super::reach::messages()) / MIB * MIB
}

fn connect(address: &str, arena: u64, refuse_reads: bool) -> Result<Arc<Client>, Error> {
    Client::connect(Config {
        addresses: vec![address.to_owned()],
        arena,
        readahead: 0,
        rdma: Rdma::Required,
        refuse_reads,
        refuse_shortage: true,
        connect_deadline: Duration::from_secs(60),
        read_deadline: Duration::from_secs(60),
        ..Config::default()
    })
}

/// Four MiB at once: how each of the four reads ended.
fn four(client: &Client) -> Vec<Result<(), Error>> {
    let name = ObjectName::new("lab", b"small".to_vec()).unwrap();
    let Found::Object(object) = Client::wait(|done| client.lookup(&name, done)).unwrap() else {
        panic!("no such object")
    };
    let (send, receive) = channel();
    for n in 0..4u64 {
        let send = send.clone();
        let reply = Box::new(move |bytes: Result<&[u8], Error>| {
            let _ = send.send(bytes.map(|bytes| assert_eq!(bytes.len() as u64, MIB)));
        });
        client.read_as(&object, n, n * MIB, 1 << 20, Freshness::Current, reply);
    }
    (0..4).map(|_| receive.recv_timeout(Duration::from_secs(90)).unwrap()).collect()
}

#[test]
fn i6_four_reads_where_memlock_has_room_for_two() {
    let Ok(address) = std::env::var("RAILFS_MEMLOCK_STORE") else {
        return skip("RAILFS_MEMLOCK_STORE names no server (make test-rdma runs it)");
    };
    let room = std::env::var("RAILFS_MEMLOCK_ROOM").unwrap();
    let memlock = Memlock::now();
    assert!(!memlock.lifted, "CAP_IPC_LOCK must be dropped for this");
    let limit = memlock.limit.unwrap();
    let arena = arena_under(limit);
    eprintln!("limit {limit}, arena {arena}");

    // More than the limit allows is refused before anything is registered.
    let error = connect(&address, arena + 2 * MIB, false).unwrap_err().to_string();
    assert!(error.contains("LimitMEMLOCK") && error.contains("four fifths"), "{error}");

    // Waiting: all are served, some after others.
    let client = connect(&address, arena, false).unwrap();
    let ended = four(&client);
    assert!(ended.iter().all(Result::is_ok), "{ended:?}");
    let waited = client.status().admission.served_large;
    eprintln!("{waited} of four waited");
    assert_eq!(waited > 0, room == "two", "{waited}");
    client.close();

    // Refusing: those beyond the memory fail at once, and nothing was sent for them.
    let client = connect(&address, arena, true).unwrap();
    let before = client.status().rails.iter().map(|rail| rail.counters.bulk_received).sum::<u64>();
    let ended = four(&client);
    let served = ended.iter().filter(|end| end.is_ok()).count() as u64;
    for error in ended.iter().filter_map(|end| end.as_ref().err()) {
        assert!(matches!(error, Error::OverBudget { need: MIB, .. }), "{error}");
        assert!(error.to_string().contains("memlock"), "{error}");
    }
    let received = client.status().rails.iter().map(|rail| rail.counters.bulk_received).sum::<u64>() - before;
    assert_eq!(received, served * MIB);
    match room.as_str() {
        "two" => assert!((2..4).contains(&served), "{served} of four were served"),
        _ => assert_eq!(served, 4),
    }
    client.close();
}
