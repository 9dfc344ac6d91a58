//! Old client, new server and the reverse: the messages that the first release wrote are committed (proto/tests/golden), and
//! are replayed here with the ids of a live server in the place of theirs. And a server that announces no rails.

mod common;

use common::{Memory, TestServer, name, options, pattern};
use prost::Message;
use railfs_engine::client::{Client, Config, Done, Freshness, ManualRail, Object, Rdma};
use railfs_engine::control::WatchQuery;
use railfs_engine::error::Error;
use railfs_proto::hello::{Hello, Transport};
use railfs_proto::reply::{Lookup, check_list_reply};
use railfs_proto::v1::control_client::ControlClient;
use railfs_proto::v1::{self, Code};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tonic::transport::Channel;

/// What the first release wrote.
fn golden<M: Message + Default>(file: &str) -> M {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../proto/tests/golden").join(format!("{file}.bin"));
    M::decode(&std::fs::read(path).unwrap()[..]).unwrap()
}

/// The listener as the first release knew it: what came later is not read.
#[derive(Clone, PartialEq, Message)]
struct FirstListener {
    #[prost(uint32, tag = "1")]
    id: u32,
    #[prost(string, tag = "2")]
    fabric: String,
    #[prost(string, tag = "3")]
    transport: String,
    #[prost(string, tag = "4")]
    address: String,
    #[prost(uint64, tag = "5")]
    speed_mbps: u64,
    #[prost(string, repeated, tag = "6")]
    capabilities: Vec<String>,
}

/// Its hello, as far as it went on with it.
#[derive(Clone, PartialEq, Message)]
struct FirstHello {
    #[prost(uint32, tag = "2")]
    protocol: u32,
    #[prost(bytes = "vec", tag = "6")]
    store: Vec<u8>,
    #[prost(uint64, tag = "9")]
    session: u64,
    #[prost(message, repeated, tag = "11")]
    listeners: Vec<FirstListener>,
    #[prost(uint32, tag = "13")]
    lease_milliseconds: u32,
    #[prost(uint32, tag = "15")]
    max_fetch_bytes: u32,
}

fn code(outcome: Option<&v1::Outcome>) -> Code {
    outcome.map_or(Code::Ok, |outcome| Code::try_from(outcome.code).unwrap())
}

struct OldClient {
    runtime: tokio::runtime::Runtime,
    client: ControlClient<Channel>,
}

impl OldClient {
    fn connect(address: SocketAddr) -> OldClient {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let client = runtime.block_on(ControlClient::connect(format!("http://{address}"))).unwrap();
        OldClient { runtime, client }
    }
}

#[test]
fn i12_the_first_releases_messages_are_answered_by_this_server() {
    let server = TestServer::start(2, 2, "");
    let mut old = OldClient::connect(server.control());
    let (runtime, client) = (&old.runtime, &mut old.client);
    // As they lie there they are for another store: a refusal that says so.
    let reply = runtime.block_on(client.hello(golden::<v1::HelloRequest>("HelloRequest"))).unwrap().into_inner();
    assert_eq!(code(reply.outcome.as_ref()), Code::WrongStore);
    let refused = runtime.block_on(client.list(golden::<v1::ListRequest>("ListRequest"))).unwrap().into_inner();
    assert_eq!(code(refused.outcome.as_ref()), Code::WrongStore);
    let refused = runtime.block_on(client.delete(golden::<v1::DeleteRequest>("DeleteRequest"))).unwrap().into_inner();
    assert_eq!(code(refused.outcome.as_ref()), Code::WrongStore);

    // Its session is of a run that is over: it gets a new one.
    let store = server.server().node.store.id();
    let request = v1::HelloRequest { store: store.to_bytes(), ..golden("HelloRequest") };
    let reply = runtime.block_on(client.hello(request.clone())).unwrap().into_inner();
    let hello = Hello::check(&request, &reply).unwrap();
    let first = FirstHello::decode(&reply.encode_to_vec()[..]).unwrap();
    assert_eq!((first.protocol, first.session, &first.store[..]), (1, hello.session, &store.to_bytes()[..]));
    assert!(first.lease_milliseconds > 0 && first.max_fetch_bytes >= 4096);
    let tcp = first.listeners.iter().all(|l| l.transport == "tcp" && l.address.parse::<SocketAddr>().is_ok());
    assert!(tcp && first.listeners.len() == 2, "{first:?}");

    let scope = || Some(server.server().node.scope());
    let listed = v1::ListRequest { scope: scope(), ..golden("ListRequest") };
    let reply = runtime.block_on(client.list(listed)).unwrap().into_inner();
    assert_eq!(code(reply.outcome.as_ref()), Code::NotFound);
    let looked = v1::LookupRequest { scope: scope(), ..golden("LookupRequest") };
    let reply = runtime.block_on(client.lookup_object(looked)).unwrap().into_inner();
    assert_eq!(code(reply.outcome.as_ref()), Code::Ok, "{reply:?}");
    let begin = v1::BeginPutRequest { scope: scope(), session: hello.session, ..golden("BeginPutRequest") };
    let reply = runtime.block_on(client.begin_put(begin)).unwrap().into_inner();
    // It asked for three components where there are two directories, or got them as they are: an answer in either case.
    assert!(matches!(code(reply.outcome.as_ref()), Code::Ok | Code::Invalid), "{reply:?}");
    if reply.put != 0 {
        let abort = v1::AbortPutRequest { scope: scope(), session: hello.session, put: reply.put };
        let reply = runtime.block_on(client.abort_put(abort)).unwrap().into_inner();
        assert_eq!(code(reply.outcome.as_ref()), Code::Ok);
    }
    let commit = v1::CommitPutRequest { scope: scope(), session: hello.session, ..golden("CommitPutRequest") };
    let reply = runtime.block_on(client.commit_put(commit)).unwrap().into_inner();
    assert_ne!(code(reply.outcome.as_ref()), Code::Ok, "nobody began it");
    let delete = v1::DeleteRequest { scope: scope(), ..golden("DeleteRequest") };
    let reply = runtime.block_on(client.delete(delete)).unwrap().into_inner();
    assert!(matches!(code(reply.outcome.as_ref()), Code::NotFound | Code::Conflict), "{reply:?}");
    let status = v1::StatusRequest { scope: scope() };
    let reply = runtime.block_on(client.status(status)).unwrap().into_inner();
    assert_eq!(code(reply.outcome.as_ref()), Code::Ok);
    server.assert_quiet();
}

#[test]
fn i12_the_first_releases_answers_are_taken_by_this_client() {
    let hello = Hello::from_message(&golden("HelloReply")).unwrap();
    assert!(hello.listeners.iter().all(|listener| matches!(listener.transport, Transport::Tcp(_))));
    let lookup = |file| Lookup::from_message(&golden::<v1::LookupReply>(file));
    for (file, object) in
        [("LookupReply-object", true), ("LookupReply-absent", false), ("LookupReply-directory", false)]
    {
        let found = lookup(file).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert_eq!(matches!(found, Lookup::Object(..)), object, "{file}");
    }
    let request: v1::ListRequest = golden("ListRequest");
    check_list_reply(&request, &golden("ListReply")).unwrap();
    // What a server announces beside it now is, for the first release, a transport that it leaves alone by its name.
    let listener: v1::Listener = golden("Listener-verbs");
    let first = FirstListener::decode(&listener.encode_to_vec()[..]).unwrap();
    assert_eq!((first.transport.as_str(), first.address.as_str()), ("rdma", "10.0.0.9"));
}

/// A server whose second rail is one of an RDMA device that cannot be had now; and one that can be.
#[cfg(feature = "rdma")]
#[test]
fn i12_a_client_of_the_first_release_finds_its_way_where_there_are_rdma_rails() {
    let ip = common::own_address();
    let rdma = format!(
        "[[rail]]\nfabric = \"f0\"\ntransport = \"rdma\"\nlisten = \"{ip}\"\ndevice = \"nosuch0\"\n[memory]\nmax_registered = \"64MiB\"\n"
    );
    let server = TestServer::start(1, 1, &rdma);
    let mut old = OldClient::connect(server.control());
    let (runtime, client) = (&old.runtime, &mut old.client);
    let store = server.server().node.store.id();
    let request = v1::HelloRequest { store: store.to_bytes(), ..golden("HelloRequest") };
    let mut reply = runtime.block_on(client.hello(request)).unwrap().into_inner();
    let of = |reply: &v1::HelloReply| -> Vec<(u32, String)> {
        let first = FirstHello::decode(&reply.encode_to_vec()[..]).unwrap();
        first.listeners.into_iter().map(|listener| (listener.id, listener.transport)).collect()
    };
    assert_eq!(of(&reply), [(0, "tcp".to_owned())], "nobody is told of what cannot be had");
    let status = v1::StatusRequest { scope: Some(server.server().node.scope()) };
    let status = runtime.block_on(client.status(status)).unwrap().into_inner();
    let named = |line: &String| line.contains("rail 1") && line.contains("nosuch0") && line.contains("opened again");
    assert!(status.degraded.iter().any(named), "{:?}", status.degraded);
    assert!(server.counter("denied") == 0);
    // A client of now reads and puts over the other one meanwhile.
    let now = connect(&server, "", Rdma::Auto).unwrap();
    round_trip(&now);
    now.close();
    // As it is where the device is there: what the first release does not know does not keep it from what it does.
    reply.listeners.push(golden("Listener-verbs"));
    assert_eq!(of(&reply)[0], (0, "tcp".to_owned()));
    assert_eq!(of(&reply)[1].1, "rdma", "left alone by its name");
}

/// The control plane of the first release, in front of a server of now: what came later it does not say, and does not know.
struct FirstServer(ControlClient<Channel>);

type Answer<T> = Result<tonic::Response<T>, tonic::Status>;

fn unknown<T>() -> Answer<T> {
    Err(tonic::Status::unimplemented(""))
}

#[tonic::async_trait]
impl v1::control_server::Control for FirstServer {
    async fn hello(&self, request: tonic::Request<v1::HelloRequest>) -> Answer<v1::HelloReply> {
        let mut reply = self.0.clone().hello(request.into_inner()).await?;
        let said = reply.get_mut();
        // Else its clients would go round this one.
        said.control_addresses.clear();
        said.capabilities.clear();
        said.listeners.retain(|listener| listener.transport == "tcp");
        for listener in &mut said.listeners {
            listener.capabilities.clear();
            listener.gid = Default::default();
        }
        Ok(reply)
    }
    async fn lookup_object(&self, request: tonic::Request<v1::LookupRequest>) -> Answer<v1::LookupReply> {
        self.0.clone().lookup_object(request.into_inner()).await
    }
    async fn list(&self, request: tonic::Request<v1::ListRequest>) -> Answer<v1::ListReply> {
        self.0.clone().list(request.into_inner()).await
    }
    async fn begin_put(&self, request: tonic::Request<v1::BeginPutRequest>) -> Answer<v1::BeginPutReply> {
        self.0.clone().begin_put(request.into_inner()).await
    }
    async fn commit_put(&self, request: tonic::Request<v1::CommitPutRequest>) -> Answer<v1::CommitPutReply> {
        self.0.clone().commit_put(request.into_inner()).await
    }
    async fn abort_put(&self, request: tonic::Request<v1::AbortPutRequest>) -> Answer<v1::AbortPutReply> {
        self.0.clone().abort_put(request.into_inner()).await
    }
    async fn delete(&self, request: tonic::Request<v1::DeleteRequest>) -> Answer<v1::DeleteReply> {
        self.0.clone().delete(request.into_inner()).await
    }
    async fn status(&self, request: tonic::Request<v1::StatusRequest>) -> Answer<v1::StatusReply> {
        self.0.clone().status(request.into_inner()).await
    }
    async fn join_verbs(&self, _: tonic::Request<v1::JoinVerbsRequest>) -> Answer<v1::JoinVerbsReply> {
        unknown()
    }
    async fn bye(&self, _: tonic::Request<v1::ByeRequest>) -> Answer<v1::ByeReply> {
        unknown()
    }
    type WatchStream = tonic::codegen::tokio_stream::Empty<Result<v1::WatchReply, tonic::Status>>;
    async fn watch(&self, _: tonic::Request<tonic::Streaming<v1::WatchRequest>>) -> Answer<Self::WatchStream> {
        unknown()
    }
}

#[test]
fn i12_a_client_finds_its_way_at_a_server_of_the_first_release() {
    let server = TestServer::start(2, 2, "");
    let old = OldClient::connect(server.control());
    let listener = old.runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let at = listener.local_addr().unwrap();
    let incoming = tonic::transport::server::TcpIncoming::from(listener);
    let service = v1::control_server::ControlServer::new(FirstServer(old.client.clone()));
    old.runtime.spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));

    let client = connect_to(at, "", Rdma::Auto).unwrap();
    round_trip(&client);
    assert!(!client.server_pins(), "it does not say that it keeps what is pinned");
    assert_eq!(client.status().rails.len(), 2);
    client.delete(&name("a"), None).unwrap();
    let query = WatchQuery { namespace: name("a").namespace, prefix: Vec::new(), from: 1 };
    let began = Instant::now();
    let refused = client.watch(&query).map(drop).unwrap_err().to_string();
    assert!(refused.contains("watch"), "{refused}");
    client.close();
    let refused = connect_to(at, "", Rdma::Required).map(drop).unwrap_err().to_string();
    assert!(refused.contains("RDMA is required"), "{refused}");
    assert!(began.elapsed() < Duration::from_secs(10), "refusals, not time-outs");
    server.assert_quiet();
}

fn connect(server: &TestServer, rails: &str, rdma: Rdma) -> Result<Arc<Client>, Error> {
    connect_to(server.control(), rails, rdma)
}

fn connect_to(control: SocketAddr, rails: &str, rdma: Rdma) -> Result<Arc<Client>, Error> {
    let rails = if rails.is_empty() { Vec::new() } else { ManualRail::list(rails).unwrap() };
    let addresses = vec![control.to_string()];
    Client::connect(Config { addresses, arena: 16 << 20, rails, rdma, ..Config::default() })
}

fn round_trip(client: &Client) {
    let bytes = pattern(300_000, 7);
    client.put(&name("a"), Arc::new(Memory(bytes.clone())), options()).unwrap();
    let found = Client::wait(|done| client.lookup(&name("a"), done)).unwrap();
    let railfs_engine::client::Found::Object(object) = found else { panic!("{found:?}") };
    let read = |client: &Client, object: &Arc<Object>, done: Done<Vec<u8>>| {
        let reply = Box::new(move |bytes: Result<&[u8], Error>| done(bytes.map(<[u8]>::to_vec)));
        client.read_as(object, 1, 0, 300_000, Freshness::Current, reply);
    };
    assert_eq!(Client::wait(|done| read(client, &object, done)).unwrap(), bytes);
}

#[test]
fn i12_rails_by_hand_work_with_a_server_that_announces_none() {
    let server = TestServer::start(1, 1, "announce = false\n");
    let began = Instant::now();
    let error = connect(&server, "", Rdma::Auto).unwrap_err().to_string();
    assert!(error.contains("announces no rails") && error.contains("-o rails="), "{error}");
    let error = connect(&server, "mlx5_0~blue", Rdma::Auto).unwrap_err().to_string();
    assert!(error.contains("announces no rails"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(3), "a refusal, not a time-out");
    let at = server.daemon().rail_addresses()[0];
    let client = connect(&server, &format!("tcp~{at}"), Rdma::Auto).unwrap();
    round_trip(&client);
    assert_eq!(client.status().rails.len(), 1);
    client.close();
    let error = connect(&server, &format!("tcp~{at}"), Rdma::Required).unwrap_err().to_string();
    assert!(error.contains("RDMA is required") && error.contains("only RDMA rails are wanted"), "{error}");
}

#[test]
fn rails_by_hand_are_all_there_is_and_may_begin_at_an_address() {
    let server = TestServer::start(1, 2, "");
    let local = server.control().ip();
    let client = connect(&server, &format!("tcp@{local}~f1"), Rdma::Auto).unwrap();
    round_trip(&client);
    let rails = client.status().rails;
    assert_eq!(rails.iter().map(|rail| rail.fabric.as_str()).collect::<Vec<_>>(), ["f1"]);
    client.close();
    let error = connect(&server, "tcp~f7", Rdma::Auto).unwrap_err().to_string();
    assert!(error.contains("there is no rail") && error.contains("no TCP rail of fabric f7"), "{error}");
    // One rail of two is enough, whichever.
    let client = connect(&server, &format!("tcp~{}", server.daemon().rail_addresses()[0]), Rdma::Off).unwrap();
    round_trip(&client);
    client.close();
}
