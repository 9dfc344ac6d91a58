//! What a server refuses, and what it says: bad peers, bad requests, bad bytes. None of them harms the others.

mod common;

use common::{LONG, TestClient, TestServer, options, pattern};
use railfs_engine::client::PutOptions;
use railfs_engine::control::{Control, ControlConfig};
use railfs_engine::error::Error;
use railfs_engine::rail::Lane;
use railfs_engine::rail::tcp::Tickets;
use railfs_proto::frame::{FrameKind, HEADER, Header, TRAILER, Trailer};
use railfs_proto::v1::control_client::ControlClient;
use railfs_proto::v1::{self, Code, JoinRequest, rail_request};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

/// Joins by hand; the outcome the server sent.
fn join(address: SocketAddr, request: &JoinRequest) -> v1::Outcome {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let message = prost::Message::encode_to_vec(request);
    let header = Header { kind: FrameKind::Join, bulk: 0, session: request.session, id: 1 };
    stream.write_all(&header.encode()).unwrap();
    stream.write_all(&Trailer::of(&message).encode()).unwrap();
    stream.write_all(&message).unwrap();
    let mut head = [0u8; HEADER];
    stream.read_exact(&mut head).unwrap();
    assert_eq!(Header::decode(&head).unwrap().kind, FrameKind::Joined);
    let mut trailer = [0u8; TRAILER];
    stream.read_exact(&mut trailer).unwrap();
    let mut message = vec![0; Trailer::decode(&trailer).unwrap().message as usize];
    stream.read_exact(&mut message).unwrap();
    let reply: v1::JoinReply = prost::Message::decode(&message[..]).unwrap();
    reply.outcome.unwrap()
}

#[test]
fn a_rail_joins_only_with_a_ticket_of_its_own_session_and_run() {
    let server = TestServer::start(1, 2, "");
    let client = TestClient::connect(&server);
    let rails = server.daemon().rail_addresses();
    let control = Arc::clone(&client.control);
    let good = || control.join(Lane::Small, 0).unwrap();
    let code = |outcome: v1::Outcome| Code::try_from(outcome.code).unwrap();
    assert_eq!(code(join(rails[0], &good())), Code::Ok);
    let used = good();
    assert_eq!(code(join(rails[0], &used)), Code::Ok);
    assert_eq!(code(join(rails[0], &used)), Code::Denied);
    let mut bad = good();
    bad.ticket = vec![7; 16].into();
    assert_eq!(code(join(rails[0], &bad)), Code::Denied);
    bad.ticket = vec![7; 3].into();
    assert_eq!(code(join(rails[0], &bad)), Code::Denied);
    let mut bad = good();
    bad.session ^= 1;
    assert_eq!(code(join(rails[0], &bad)), Code::Denied);
    let mut bad = good();
    bad.protocol = 99;
    let outcome = join(rails[0], &bad);
    assert!(outcome.message.contains("protocol 99") && outcome.message.contains("1 to 1"), "{outcome:?}");
    assert_eq!(code(outcome), Code::Protocol);
    let mut bad = good();
    bad.scope.as_mut().unwrap().incarnation += 1;
    assert_eq!(code(join(rails[0], &bad)), Code::WrongIncarnation);
    let mut bad = good();
    bad.scope.as_mut().unwrap().store = vec![0; 16].into();
    assert_eq!(code(join(rails[0], &bad)), Code::WrongStore);
    let mut bad = good();
    bad.scope = None;
    assert_eq!(code(join(rails[0], &bad)), Code::Invalid);
    let mut bad = good();
    bad.lane = 9;
    assert_eq!(code(join(rails[0], &bad)), Code::Invalid);
    assert_eq!(code(join(rails[1], &good())), Code::Invalid);
    // The rail itself refuses a lane that it does not know.
    assert!(server.counter("joins_refused") >= 9);
    client.put("a", b"1").unwrap();
    assert_eq!(client.read("a"), b"1");
}

#[test]
fn garbage_on_both_ports_harms_nobody() {
    let server = TestServer::start(1, 1, "");
    let client = TestClient::connect(&server);
    let mut held = Vec::new();
    for address in [server.control(), server.daemon().rail_addresses()[0]] {
        for seed in 0..50 {
            let mut stream = TcpStream::connect(address).unwrap();
            // The server may have closed it already.
            let _ = stream.write_all(&pattern(3000, seed));
            if seed % 2 == 0 {
                held.push(stream);
            }
        }
        // And some that say nothing.
        held.extend((0..20).map(|_| TcpStream::connect(address).unwrap()));
    }
    client.put("a", &pattern(2 << 20, 1)).unwrap();
    assert!(client.read("a") == pattern(2 << 20, 1));
    assert!(TestClient::connect(&server).read("a") == pattern(2 << 20, 1));
    drop(held);
    server.assert_quiet();
}

#[test]
fn i12_a_peer_without_a_common_protocol_is_told_both_versions() {
    let server = TestServer::start(1, 1, "");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let reply = runtime.block_on(async {
        let mut client = ControlClient::connect(format!("http://{}", server.control())).await.unwrap();
        let request = v1::HelloRequest { protocol_min: 7, protocol_max: 9, ..Default::default() };
        client.hello(request).await.unwrap().into_inner()
    });
    let outcome = reply.outcome.unwrap();
    assert_eq!(outcome.code, Code::Protocol as i32);
    assert!(outcome.message.contains("7 to 9") && outcome.message.contains("1 to 1"), "{outcome:?}");
}

#[test]
fn i12_every_call_names_store_node_and_incarnation() {
    let mut server = TestServer::start(1, 1, "");
    let client = TestClient::connect(&server);
    client.put("a", b"1").unwrap();
    let old = client.scope();
    let session = client.control.session().unwrap().id;
    let mut wrong_store = old.clone();
    wrong_store.store = vec![1; 16].into();
    let mut wrong_node = old.clone();
    wrong_node.node = "other".into();
    let mut wrong_run = old.clone();
    wrong_run.incarnation += 1;
    let codes = |scope: Option<v1::Scope>| {
        let address = server.control();
        client.runtime.block_on(async move {
            let mut raw = ControlClient::connect(format!("http://{address}")).await.unwrap();
            let name = Some(common::name("a").to_message());
            let request = bytes::Bytes::from(vec![1; 16]);
            let lookup = v1::LookupRequest { scope: scope.clone(), name: name.clone() };
            let list = v1::ListRequest { scope: scope.clone(), namespace: "ns".into(), ..Default::default() };
            let begin = v1::BeginPutRequest { scope: scope.clone(), session, name: name.clone(), ..Default::default() };
            let commit = v1::CommitPutRequest {
                scope: scope.clone(),
                session,
                put: 1,
                request: request.clone(),
                if_version: None,
            };
            let abort = v1::AbortPutRequest { scope: scope.clone(), session, put: 1 };
            let delete = v1::DeleteRequest { scope: scope.clone(), name, request, if_version: None };
            let outcomes = [
                raw.lookup_object(lookup).await.unwrap().into_inner().outcome,
                raw.list(list).await.unwrap().into_inner().outcome,
                raw.begin_put(begin).await.unwrap().into_inner().outcome,
                raw.commit_put(commit).await.unwrap().into_inner().outcome,
                raw.abort_put(abort).await.unwrap().into_inner().outcome,
                raw.delete(delete).await.unwrap().into_inner().outcome,
            ];
            outcomes.map(|outcome| Code::try_from(outcome.unwrap().code).unwrap())
        })
    };
    assert_eq!(codes(None), [Code::Invalid; 6]);
    assert_eq!(codes(Some(wrong_store)), [Code::WrongStore; 6]);
    assert_eq!(codes(Some(wrong_node)), [Code::WrongIncarnation; 6]);
    assert_eq!(codes(Some(wrong_run)), [Code::WrongIncarnation; 6]);
    assert_eq!(client.read("a"), b"1");
    // A client of the run before finds its way to the next by itself.
    let (_, proof) = client.object("a");
    server.crash();
    server.serve().unwrap();
    let (_, newer) = client.object("a");
    assert!(newer.incarnation > proof.incarnation);
    client.wait_up();
    let stale = v1::CheckRequest { proofs: vec![proof.to_slot()] };
    let reply = client.reply(0, client.request(rail_request::Body::Check(stale)));
    assert_eq!(reply.outcome.unwrap().code, Code::WrongIncarnation as i32);
    let mut late = client.request(rail_request::Body::Check(v1::CheckRequest { proofs: vec![newer.to_slot()] }));
    late.scope = Some(old);
    assert_eq!(client.reply(0, late).outcome.unwrap().code, Code::WrongIncarnation as i32);
    assert!(client.check(0, &newer).current);
}

#[test]
fn i1_fetches_outside_the_component_are_refused() {
    let server = TestServer::start(2, 1, "");
    let client = TestClient::connect(&server);
    let layout = PutOptions { stripe_size: 16384, page_size: 4096, ..options() };
    client.put_with("a", &pattern(40_000, 1), layout).unwrap();
    let (descriptor, _) = client.object("a");
    let good = v1::FetchRequest {
        version: descriptor.version,
        component: 0,
        offset: 0,
        length: 4096,
        directory: descriptor.components[0][0].directory.to_bytes(),
        proof: None,
        fresh: false,
    };
    let code = |request: v1::FetchRequest| Code::try_from(client.fetch(0, request).outcome.code).unwrap();
    assert_eq!(code(good.clone()), Code::Ok);
    let with = |change: &dyn Fn(&mut v1::FetchRequest)| {
        let mut request = good.clone();
        change(&mut request);
        code(request)
    };
    assert_eq!(with(&|r| r.length = 0), Code::Invalid);
    assert_eq!(with(&|r| r.length = (1 << 20) + 1), Code::Invalid);
    assert_eq!(with(&|r| r.length = u32::MAX), Code::Invalid);
    assert_eq!(with(&|r| r.length = 100), Code::Invalid);
    assert_eq!(with(&|r| r.offset = 100), Code::Invalid);
    assert_eq!(with(&|r| r.offset = u64::MAX - 4095), Code::Invalid);
    assert_eq!(with(&|r| r.offset = 1 << 20), Code::Invalid);
    assert_eq!(with(&|r| r.length = 20480), Code::Invalid);
    assert_eq!(with(&|r| r.component = 1), Code::Invalid);
    assert_eq!(with(&|r| r.component = 9), Code::Invalid);
    assert_eq!(with(&|r| r.directory = vec![9; 16].into()), Code::Invalid);
    assert_eq!(with(&|r| r.directory = vec![9; 3].into()), Code::Invalid);
    assert_eq!(with(&|r| r.version += 1), Code::Stale);
    let mut late = client.request(rail_request::Body::Fetch(good));
    late.time_left_microseconds = 0;
    assert_eq!(client.reply(0, late).outcome.unwrap().code, Code::Expired as i32);
    let none = v1::RailRequest { body: None, ..client.request(rail_request::Body::Check(Default::default())) };
    assert_eq!(client.reply(0, none).outcome.unwrap().code, Code::Invalid as i32);
    let empty = client.request(rail_request::Body::Check(Default::default()));
    assert_eq!(client.reply(0, empty).outcome.unwrap().code, Code::Invalid as i32);
    client.assert_quiet();
}

#[test]
fn i1_a_short_missing_or_damaged_component_is_damage_and_named() {
    let server = TestServer::start(2, 1, "");
    let client = TestClient::connect(&server);
    let layout = PutOptions { stripe_size: 65536, page_size: 4096, ..options() };
    let fetch = |descriptor: &railfs_proto::descriptor::Descriptor| {
        client.fetch(
            0,
            v1::FetchRequest {
                version: descriptor.version,
                component: 1,
                offset: 0,
                length: 65536,
                directory: descriptor.components[1][0].directory.to_bytes(),
                proof: None,
                fresh: false,
            },
        )
    };
    type Harm = fn(&std::path::Path);
    let cut: Harm = |path| std::fs::File::options().write(true).open(path).unwrap().set_len(10_000).unwrap();
    let remove: Harm = |path| std::fs::remove_file(path).unwrap();
    let header: Harm = |path| {
        use std::os::unix::fs::FileExt;
        std::fs::File::options().write(true).open(path).unwrap().write_all_at(&[1; 64], 16).unwrap();
    };
    let table: Harm = |path| {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::options().write(true).open(path).unwrap();
        file.write_all_at(&[1; 64], file.metadata().unwrap().len() - 4096).unwrap();
    };
    for (what, harm, warm) in [
        ("cut", cut, false),
        ("cut", cut, true),
        ("gone", remove, false),
        ("header", header, false),
        ("table", table, false),
    ] {
        let key = format!("{what}.{warm}");
        client.put_with(&key, &pattern(200_000, 1), layout).unwrap();
        let (descriptor, _) = client.object(&key);
        if warm {
            // Open and checked: it is found while sending.
            assert_eq!(fetch(&descriptor).outcome.code, Code::Ok as i32);
        }
        let path = server.path(&descriptor, 1);
        harm(&path);
        let fetched = fetch(&descriptor);
        assert_eq!(fetched.outcome.code, Code::Damaged as i32, "{what} {warm}: {:?}", fetched.outcome);
        let directory = path.parent().unwrap().parent().unwrap().display().to_string();
        let said = &fetched.outcome.message;
        assert!(said.contains("component 1") && said.contains(&directory), "{said}");
    }
    // The connection goes on.
    client.put("fine", b"1").unwrap();
    assert_eq!(client.read("fine"), b"1");
    assert_eq!(client.rails[0].rail_connects(), 1);
}

impl common::TestRail {
    fn rail_connects(&self) -> u64 {
        railfs_engine::rail::Rail::counters(&*self.rail).connects
    }
}

#[test]
fn what_answers_and_is_no_railfsd_is_called_so() {
    // Something that speaks HTTP/2, and knows nothing of this path.
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let address = {
        let _inside = runtime.enter();
        let incoming = tonic::transport::server::TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = incoming.local_addr().unwrap();
        let (_, health) = tonic_health::server::health_reporter();
        runtime.spawn(tonic::transport::Server::builder().add_service(health).serve_with_incoming(incoming));
        address
    };
    let config = ControlConfig {
        addresses: vec![address.to_string()],
        store: None,
        connect_deadline: Duration::from_secs(3),
        metadata_deadline: Duration::from_secs(5),
        software: "test".into(),
        tls: None,
    };
    let control = Control::new(config, runtime.handle().clone(), Box::new(|_| {}));
    let said = runtime.block_on(control.connect()).unwrap_err().to_string();
    assert!(said.contains("not railfsd") && said.contains(&address.to_string()), "{said}");
}

#[test]
fn another_store_at_the_address_is_named() {
    let server = TestServer::start(1, 1, "");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let config = ControlConfig {
        addresses: vec![server.control().to_string()],
        store: Some(railfs_proto::descriptor::Id([9; 16])),
        connect_deadline: Duration::from_secs(3),
        metadata_deadline: Duration::from_secs(5),
        software: "test".into(),
        tls: None,
    };
    let control = Control::new(config.clone(), runtime.handle().clone(), Box::new(|_| {}));
    let error = runtime.block_on(control.connect()).unwrap_err();
    assert!(matches!(error, Error::WrongStore { .. }), "{error:?}");
    // Nobody there: every address is named.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let addresses = vec![port.to_string(), "127.0.0.1:1".into()];
    let control =
        Control::new(ControlConfig { addresses, store: None, ..config }, runtime.handle().clone(), Box::new(|_| {}));
    let said = runtime.block_on(control.connect()).unwrap_err().to_string();
    assert!(said.contains(&port.to_string()) && said.contains("127.0.0.1:1:"), "{said}");
}

#[test]
fn i9_control_connections_and_watches_that_do_not_begin_end() {
    let server = TestServer::start(1, 1, "");
    let client = TestClient::connect(&server);
    // Not a byte of what every client says first, and all of it but the last.
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    for said in [&b""[..], &preface[..23]] {
        let mut silent = TcpStream::connect(server.control()).unwrap();
        silent.set_read_timeout(Some(LONG)).unwrap();
        silent.write_all(said).unwrap();
        // By an end or a reset: a server that waits on is an error of the time-out's kind.
        let ended = silent.read_to_end(&mut Vec::new()).map_err(|error| error.kind());
        assert!(!matches!(ended, Err(std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut)), "{ended:?}");
    }
    let address = format!("http://{}", server.control());
    let watched = client.runtime.block_on(async {
        let channel = tonic::transport::Endpoint::from_shared(address).unwrap().connect().await.unwrap();
        let nothing = tokio_stream::pending::<v1::WatchRequest>();
        tokio::time::timeout(LONG, ControlClient::new(channel).watch(nothing)).await
    });
    let refused = watched.expect("it waits for ever").unwrap_err();
    assert_eq!(refused.code(), tonic::Code::DeadlineExceeded, "{refused}");
    client.put("a", &pattern(1000, 1)).unwrap();
    client.assert_quiet();
}
