//! Puts and reads over rails, against a server in this process.

mod common;

use common::{TestClient, TestServer, options, pattern};
use railfs_engine::client::PutOptions;
use railfs_engine::error::Error;
use railfs_engine::rail::{Rail, State};
use railfs_proto::reply::Lookup;
use railfs_proto::v1;

#[test]
fn objects_of_every_size_come_back_as_they_were_put() {
    let server = TestServer::start(3, 2, "");
    let client = TestClient::connect(&server);
    let (page, stripe) = (4096usize, 16384usize);
    let around = |n: usize| [n - 1, n, n + 1];
    let sizes = [0, 1]
        .into_iter()
        .chain(around(page))
        .chain(around(stripe))
        .chain(around(3 * stripe))
        .chain([9 * stripe + 5, 300_000]);
    for size in sizes {
        for width in [0, 1, 2] {
            let bytes = pattern(size, size as u64);
            let layout = PutOptions { stripe_size: stripe as u32, page_size: page as u32, width, ..options() };
            let key = format!("size/{size}.{width}");
            let done = client.put_with(&key, &bytes, layout).unwrap();
            let (descriptor, proof) = client.object(&key);
            assert_eq!((descriptor.version, done.superseded), (done.version, false));
            assert_eq!(descriptor.striping.size(), size as u64);
            assert_eq!(descriptor.attributes, options().attributes);
            assert_eq!(client.get(&descriptor, &proof), bytes, "{size}");
        }
    }
    // With the defaults: several extents per stripe directory.
    let bytes = pattern((7 << 20) + 12345, 1);
    client.put("large", &bytes).unwrap();
    assert!(client.read("large") == bytes);
    let counters = server.server().node.counters.list();
    assert_eq!(server.counter("pulls_repeated") + server.counter("pulls_bad"), 0, "{counters:?}");
    client.assert_quiet();
    server.assert_quiet();
}

#[test]
fn every_rail_carries_a_share_of_a_put() {
    let server = TestServer::start(2, 2, "");
    let client = TestClient::connect(&server);
    client.put("large", &pattern(32 << 20, 3)).unwrap();
    for rail in &client.rails {
        let sent = railfs_engine::rail::Rail::counters(&*rail.rail).bulk_sent;
        assert!(sent >= 8 << 20, "{sent}");
    }
    server.assert_quiet();
}

#[test]
fn all_rails_of_a_client_join_one_session_after_a_restart() {
    let mut server = TestServer::start(2, 4, "");
    let client = TestClient::connect(&server);
    for round in 0..6 {
        server.stop();
        server.serve().unwrap();
        // At once, while rails and control connection come back in any order.
        client.put("k", &pattern(300_000, round)).unwrap();
        common::until("every lane of every rail has joined", || {
            common::sessions(&server).1 == 8 && client.rails.iter().all(|rail| rail.rail.state() == State::Up)
        });
        assert_eq!(common::sessions(&server).0, 1, "one client is one session");
    }
    client.assert_quiet();
    server.assert_quiet();
}

#[test]
fn i8_objects_survive_a_restart_and_a_crash() {
    let mut server = TestServer::start(2, 1, "");
    let bytes = pattern(3 << 20, 5);
    let first = TestClient::connect(&server).put("a/b", &bytes).unwrap().version;
    server.stop();
    server.serve().unwrap();
    assert!(server.daemon().recovered().previous.unwrap().stopped);
    let client = TestClient::connect(&server);
    assert!(client.read("a/b") == bytes);
    let second = client.put("a/b", b"new").unwrap().version;
    assert!(second > first);
    drop(client);
    server.crash();
    server.serve().unwrap();
    assert!(!server.daemon().recovered().previous.unwrap().stopped);
    let client = TestClient::connect(&server);
    assert_eq!(client.read("a/b"), b"new");
    assert!(client.put("c", b"x").unwrap().version > second);
    server.assert_quiet();
}

#[test]
fn a_name_cannot_be_a_file_and_a_directory() {
    let server = TestServer::start(1, 1, "");
    let client = TestClient::connect(&server);
    client.put("a/b", b"1").unwrap();
    assert!(matches!(client.put("a", b"2"), Err(Error::Conflict { .. })));
    assert!(matches!(client.put("a/b/c", b"2"), Err(Error::Conflict { .. })));
    assert!(matches!(client.lookup("a"), Lookup::Directory { .. }));
    assert!(matches!(client.lookup("z"), Lookup::Absent(_)));
    assert_eq!(server.components().len(), 1);
    client.delete("a/b").unwrap();
    client.put("a", b"2").unwrap();
    assert_eq!(client.read("a"), b"2");
    server.assert_quiet();
}

#[test]
fn conditions_hold_or_nothing_happens() {
    let server = TestServer::start(1, 1, "");
    let client = TestClient::connect(&server);
    let with = |if_version| PutOptions { if_version, ..options() };
    let first = client.put_with("a", b"1", with(Some(0))).unwrap().version;
    assert!(matches!(client.put_with("a", b"2", with(Some(0))), Err(Error::Conflict { .. })));
    assert!(matches!(client.put_with("a", b"2", with(Some(first + 1))), Err(Error::Conflict { .. })));
    assert_eq!(client.read("a"), b"1");
    let second = client.put_with("a", b"2", with(Some(first))).unwrap().version;
    assert!(second > first);
    assert!(matches!(
        client.runtime.block_on(client.control.delete(&common::name("a"), [1; 16], Some(first))),
        Err(Error::Conflict { .. })
    ));
    assert_eq!(
        client.runtime.block_on(client.control.delete(&common::name("a"), [2; 16], Some(second))).unwrap(),
        second
    );
    // The same request again, and another one.
    assert_eq!(
        client.runtime.block_on(client.control.delete(&common::name("a"), [2; 16], Some(second))).unwrap(),
        second
    );
    assert!(matches!(client.delete("a"), Err(Error::NotFound(_))));
    server.assert_quiet();
}

#[test]
fn i3_a_check_says_current_until_the_name_is_published_again() {
    let server = TestServer::start(2, 2, "");
    let client = TestClient::connect(&server);
    client.put("a", b"1").unwrap();
    let (old, proof) = client.object("a");
    assert!(client.check(0, &proof).current && client.check(1, &proof).current);
    let Lookup::Absent(absent) = client.lookup("b") else { panic!() };
    assert!(client.check(0, &absent).current);
    client.put("a", b"2").unwrap();
    client.put("b", b"3").unwrap();
    assert!(!client.check(1, &proof).current && !client.check(0, &absent).current);
    // The old version stays readable, and its fetch says that it is not current.
    let request = v1::FetchRequest {
        version: old.version,
        component: 0,
        offset: 0,
        length: 1,
        directory: old.components[0][0].directory.to_bytes(),
        proof: Some(proof.to_slot()),
        fresh: false,
    };
    let fetched = client.fetch(0, request);
    assert_eq!(fetched.bytes, b"1");
    assert!(!fetched.reply.unwrap().check.unwrap().current);
    server.assert_quiet();
}

#[test]
fn i8_superseded_versions_stay_for_their_time_and_go_then() {
    let mut server = TestServer::start(2, 1, "[retention]\nsuperseded = \"1 h\"\n");
    let client = TestClient::connect(&server);
    for version in 0..5u8 {
        client
            .put_with(
                "a",
                &pattern(50_000, u64::from(version)),
                PutOptions { stripe_size: 16384, page_size: 4096, ..options() },
            )
            .unwrap();
    }
    client.put("gone", b"x").unwrap();
    let (gone, _) = client.object("gone");
    client.delete("gone").unwrap();
    assert_eq!(server.components().len(), 5 * 2 + 1);
    let bytes = client.read("a");
    drop(client);
    server.stop();
    server.config.retention = std::time::Duration::ZERO;
    server.serve().unwrap();
    common::until("superseded versions are reclaimed", || server.components().len() == 2);
    let client = TestClient::connect(&server);
    assert!(client.read("a") == bytes);
    let request = v1::FetchRequest {
        version: gone.version,
        component: 0,
        offset: 0,
        length: 1,
        directory: gone.components[0][0].directory.to_bytes(),
        proof: None,
        fresh: false,
    };
    assert_eq!(client.fetch(0, request).outcome.code, v1::Code::Stale as i32);
    // Also while serving, and the record of it survives.
    client.put("a", b"z").unwrap();
    common::until("the version before is reclaimed", || server.components().len() == 1);
    common::until("it is recorded", || server.counter("versions_reclaimed") == 6);
    server.assert_quiet();
    drop(client);
    server.crash();
    server.serve().unwrap();
    assert_eq!(server.daemon().found().kept, 1);
    assert_eq!(TestClient::connect(&server).read("a"), b"z");
}

#[test]
fn i8_a_pinned_version_stays_over_a_restart_until_its_pin_is_taken_back() {
    use railfs_proto::v1::{PinReply, PinRequest, rail_reply, rail_request};
    let mut server = TestServer::start(2, 1, "[retention]\nsuperseded = \"0 s\"\n");
    let mut client = TestClient::connect(&server);
    let pin = |client: &TestClient, sequence, add: &[u64], remove: &[u64]| -> PinReply {
        let request = PinRequest { lease: 7, sequence, add: add.to_vec(), remove: remove.to_vec() };
        let reply = client.reply(0, client.request(rail_request::Body::Pin(request)));
        let Some(rail_reply::Body::Pin(reply)) = reply.body else { panic!("{reply:?}") };
        reply
    };
    let first = client.put("a", &pattern(50_000, 1)).unwrap().version;
    let (descriptor, proof) = client.object("a");
    let pinned = pin(&client, 1, &[first, 1 << 40], &[]);
    assert!(pinned.fresh && pinned.refused.is_empty() && pinned.lease_milliseconds == 1000);
    assert_eq!(pinned.gone, [1 << 40], "a version that never was");
    client.put("a", b"b").unwrap();
    client.put("a", b"c").unwrap();
    common::until("what is not pinned is reclaimed", || server.counter("versions_reclaimed") == 1);
    assert!(!pin(&client, 2, &[], &[]).fresh);
    drop(client);
    server.crash();
    server.serve().unwrap();
    client = TestClient::connect(&server);
    assert!(pin(&client, 3, &[], &[]).fresh, "the new run knows no lease");
    assert_eq!(pin(&client, 4, &[first], &[]).gone, [0; 0]);
    let fetch = v1::FetchRequest {
        version: first,
        component: 0,
        offset: 0,
        length: 50_000,
        directory: descriptor.components[0][0].directory.to_bytes(),
        proof: Some(v1::SlotProof { incarnation: proof.incarnation + 1, ..proof.to_slot() }),
        fresh: false,
    };
    // Renewed by these very requests, for longer than the lease and the wait after a start.
    let mut sequence = 4;
    let started = std::time::Instant::now();
    common::until("a lease has passed and another version is reclaimed", || {
        sequence += 1;
        assert_eq!(pin(&client, sequence, &[], &[]).gone, [0; 0]);
        client.put("a", b"d").unwrap();
        started.elapsed() > std::time::Duration::from_millis(1500) && server.counter("versions_reclaimed") > 0
    });
    assert_eq!(client.fetch(0, fetch.clone()).bytes, pattern(50_000, 1));
    assert!(!pin(&client, sequence + 1, &[], &[first]).fresh);
    common::until("it is reclaimed", || client.fetch(0, fetch.clone()).outcome.code == v1::Code::Stale as i32);
    // Nonsense is refused by its name and keeps nothing.
    for (request, word) in [
        (PinRequest { lease: 0, sequence: 1, ..Default::default() }, "no lease"),
        (PinRequest { lease: 9, sequence: 1, add: vec![5], remove: vec![] }, "no version can be"),
        (PinRequest { lease: 9, sequence: 1, add: (2000..4000).collect(), remove: vec![] }, "more than 1024"),
    ] {
        let outcome = client.reply(0, client.request(rail_request::Body::Pin(request))).outcome.unwrap();
        assert!(outcome.code == v1::Code::Invalid as i32 && outcome.message.contains(word), "{outcome:?}");
    }
    assert_eq!((server.server().pins.counts().pins, server.server().pins.counts().leases), (0, 0));
    common::until("all is reclaimed", || server.components().len() == 1);
    server.assert_quiet();
}

#[test]
fn concurrent_puts_of_one_key_leave_one_whole_winner() {
    let server = TestServer::start(2, 2, "");
    let client = TestClient::connect(&server);
    let done: Vec<_> = std::thread::scope(|scope| {
        let client = &client;
        let puts: Vec<_> =
            (0..8u8).map(|i| scope.spawn(move || (i, client.put("k", &vec![i; 3 << 20]).unwrap()))).collect();
        puts.into_iter().map(|put| put.join().unwrap()).collect()
    });
    let winner = done.iter().max_by_key(|(_, done)| done.version).unwrap();
    assert!(!winner.1.superseded);
    let (descriptor, proof) = client.object("k");
    assert_eq!(descriptor.version, winner.1.version);
    assert!(client.get(&descriptor, &proof) == vec![winner.0; 3 << 20]);
    let visible = done.iter().filter(|(_, done)| !done.superseded).count();
    assert_eq!(server.counter("puts_committed"), visible as u64);
    assert_eq!(server.components().len(), visible * 2);
    client.assert_quiet();
    server.assert_quiet();
}

#[test]
fn lists_are_paged_folded_and_complete() {
    let server = TestServer::start(1, 1, "");
    let client = TestClient::connect(&server);
    let list = |prefix: &str, delimited, limit| {
        let (mut keys, mut after) = (Vec::new(), Vec::new());
        loop {
            let query = railfs_engine::client::ListQuery {
                namespace: "ns".into(),
                prefix: prefix.into(),
                delimited,
                after,
                limit,
                within: None,
            };
            let page = client.runtime.block_on(client.control.list(&query)).unwrap();
            for entry in page.entries {
                let key = String::from_utf8(entry.key).unwrap();
                keys.push(if entry.object.is_some() { key } else { key + "/" });
            }
            match page.next {
                Some(next) => after = next,
                None => return keys,
            }
        }
    };
    let missing = client.runtime.block_on(client.control.list(&railfs_engine::client::ListQuery {
        namespace: "none".into(),
        prefix: vec![],
        delimited: true,
        after: vec![],
        limit: 0,
        within: None,
    }));
    assert!(matches!(missing, Err(Error::NotFound(_))));
    for key in ["a", "b/1", "b/2", "b/c/3", "b-", "z"] {
        client.put(key, b"x").unwrap();
    }
    for limit in [0, 1, 2] {
        assert_eq!(list("", true, limit), ["a", "b-", "b/", "z"]);
        assert_eq!(list("b/", true, limit), ["b/1", "b/2", "b/c/"]);
        assert_eq!(list("", false, limit), ["a", "b-", "b/1", "b/2", "b/c/3", "z"]);
    }
    server.assert_quiet();
}

#[test]
fn status_tells_what_is_there() {
    let server = TestServer::start(2, 2, "[memory]\nmax_registered = \"8 MiB\"\n");
    let client = TestClient::connect(&server);
    client.put("a", &pattern(5 << 20, 1)).unwrap();
    client.read("a");
    let status = client.runtime.block_on(client.control.status()).unwrap();
    assert_eq!((status.node.as_str(), status.objects, status.sessions, status.puts), ("n1", 1, 1, 0));
    assert_eq!((status.memory_limit_bytes, status.memory_used_bytes), (8 << 20, 0));
    assert_eq!(status.publishing, "ok");
    assert_eq!(status.directories.len(), 2);
    assert!(
        status.directories.iter().all(|d| d.state == "ok" && d.total_bytes > 0 && d.available_bytes > 0 && d.holds_log)
    );
    assert_eq!(status.listeners.iter().map(|l| l.bytes_received).sum::<u64>(), 5 << 20);
    assert_eq!(status.listeners.iter().map(|l| l.bytes_sent).sum::<u64>(), 5 << 20);
    assert!(status.listeners.iter().all(|l| l.connections == 2));
    server.assert_quiet();
}
