//! A server whose every answer a test can change: right by default, so that one lie at a time is told.
//!
//! Guarantees: it serves any object whose name begins with 'f', of [`SIZE`] bytes that follow from the name; what it is told to
//! say is in force for what is asked from then on.

use prost::Message;
use railfs_proto::checksum::page_checksums;
use railfs_proto::descriptor::{Attributes, Descriptor, Id, Proof, Replica};
use railfs_proto::frame::{FrameKind, HEADER, Header, TRAILER, Trailer};
use railfs_proto::layout::Striping;
use railfs_proto::reply::{Refusal, ok_outcome};
use railfs_proto::v1::control_server::{Control, ControlServer};
use railfs_proto::v1::{self, Code, rail_reply, rail_request};
use railfs_proto::{PROTOCOL_MAX, PROTOCOL_MIN};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tonic::codegen::tokio_stream::{self, Stream};
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

/// Bytes of every object.
pub const SIZE: usize = 200_000;
/// The one name that is listed.
pub const KEY: &str = "f";
const PAGE: u32 = 4096;
const INCARNATION: u64 = 77;
const STORE: Id = Id([7; 16]);
const DIRECTORY: Id = Id([9; 16]);

/// The version of the object of this name.
pub fn version_of(name: &str) -> u64 {
    let hash = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    5000 + (hash >> 24)
}

fn bytes_of(version: u64) -> Vec<u8> {
    (0..SIZE as u64).map(|at| (version.wrapping_mul(at | 1) >> 7).to_le_bytes()[0]).collect()
}

/// The bytes of the object of this name.
pub fn contents(name: &str) -> Vec<u8> {
    bytes_of(version_of(name))
}

/// What is true of the object of this name.
pub fn descriptor(name: &str) -> Descriptor {
    let replica = Replica { node: "n1".to_owned(), directory: DIRECTORY };
    Descriptor {
        version: version_of(name),
        attributes: Attributes { mode: 0o644, mtime_seconds: 5, mtime_nanoseconds: 0, owner: None },
        striping: Striping::new(SIZE as u64, PAGE, 65536, 1).unwrap(),
        components: vec![vec![replica]],
    }
}

/// A message of a watch with one delete of this number.
pub fn change(sequence: u64) -> v1::WatchReply {
    let change =
        v1::Change { sequence, key: b"f"[..].into(), version: 9000, deleted: true, before: 8000, ..Default::default() };
    v1::WatchReply {
        outcome: Some(ok_outcome()),
        changes: vec![change],
        next: sequence + 1,
        oldest: 1,
        latest: sequence,
    }
}

/// How the rail behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rail {
    /// As it should.
    Honest,
    /// Sends answers that nobody asked for before each that somebody did.
    Unasked,
    /// Answers in the name of another session.
    OtherSession,
    /// Sends what is no frame.
    Garbage,
    /// Sends headers of more than any frame carries.
    Endless,
    /// Takes requests and answers none.
    Silent,
    /// Answers by a byte a second.
    Dribble,
    /// Ends at the first request, and at the first byte of a join.
    Closed,
    /// Asks the client for what it does not have, and answers.
    Asking,
    /// The same, and begins puts which it never finishes.
    Pulling,
}

type Change<T> = Arc<dyn Fn(&mut T) + Send + Sync>;
type Of<Q, R> = Arc<dyn Fn(&Q, &mut R) + Send + Sync>;
type Fetched = Arc<dyn Fn(&v1::FetchRequest, &mut Vec<u8>, &mut v1::RailReply) + Send + Sync>;

/// What is made of right answers.
#[derive(Clone)]
pub struct Script {
    /// Of hello's.
    pub hello: Change<v1::HelloReply>,
    /// Of a list's.
    pub list: Of<v1::ListRequest, v1::ListReply>,
    /// A list is an error of gRPC with these words.
    pub list_status: Option<&'static str>,
    /// Of a lookup's, by either way.
    pub lookup: Change<v1::LookupReply>,
    /// Of a status.
    pub status: Change<v1::StatusReply>,
    /// The messages of a watch, by number.
    pub watch: Arc<dyn Fn(u64) -> v1::WatchReply + Send + Sync>,
    /// Of a fetch's, and its bytes.
    pub fetch: Fetched,
    /// See there.
    pub rail: Rail,
    /// No call of the control plane is answered.
    pub silent: bool,
}

impl Default for Script {
    fn default() -> Script {
        Script {
            hello: Arc::new(|_| {}),
            list: Arc::new(|_, _| {}),
            list_status: None,
            lookup: Arc::new(|_| {}),
            status: Arc::new(|_| {}),
            watch: Arc::new(change),
            fetch: Arc::new(|_, _, _| {}),
            rail: Rail::Honest,
            silent: false,
        }
    }
}

fn looked_up(name: Option<&v1::Name>, script: &Script) -> v1::LookupReply {
    let name = name.map(|name| String::from_utf8_lossy(&name.key).into_owned()).unwrap_or_default();
    let proof = Proof { node: "n1".to_owned(), incarnation: INCARNATION, slot: 3, value: 2, name_tag: 1 };
    let mut reply =
        v1::LookupReply { outcome: Some(ok_outcome()), proof: Some(proof.to_message()), ..Default::default() };
    if name.starts_with('f') {
        reply.descriptor = Some(descriptor(&name).to_message());
    }
    (script.lookup)(&mut reply);
    reply
}

/// The server. Its threads end with the test's process.
pub struct Hostile {
    script: Arc<Mutex<Script>>,
    control: SocketAddr,
    _runtime: tokio::runtime::Runtime,
}

impl Hostile {
    /// An honest one, so far.
    pub fn start() -> Hostile {
        let script = Arc::new(Mutex::new(Script::default()));
        let rail = TcpListener::bind("127.0.0.1:0").unwrap();
        let place = rail.local_addr().unwrap();
        let said = script.clone();
        std::thread::spawn(move || {
            for stream in rail.incoming().flatten() {
                let said = said.clone();
                // It ends with the connection, whichever side ends that.
                std::thread::spawn(move || drop(serve(stream, &said)));
            }
        });
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let socket = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let control = socket.local_addr().unwrap();
        let liar = ControlServer::new(Liar { script: script.clone(), rail: place });
        runtime.spawn(
            tonic::transport::Server::builder().add_service(liar).serve_with_incoming(TcpIncoming::from(socket)),
        );
        Hostile { script, control, _runtime: runtime }
    }

    /// Of a key in the namespace of the tests.
    pub fn url(&self, key: &str) -> String {
        format!("railfs://{}/ns/{key}", self.control)
    }

    /// What it says from now on.
    pub fn change(&self, change: impl FnOnce(&mut Script)) {
        change(&mut self.script.lock().unwrap());
    }
}

fn send(stream: &mut TcpStream, kind: FrameKind, session: u64, id: u64, bulk: &[u8], message: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bulk.len()).unwrap();
    let mut frame = Header { kind, bulk: length, session, id }.encode().to_vec();
    frame.extend_from_slice(bulk);
    frame.extend_from_slice(&Trailer::of(message).encode());
    frame.extend_from_slice(message);
    stream.write_all(&frame)
}

/// Header and message of the next frame; its bulk is dropped.
fn receive(stream: &mut TcpStream) -> io::Result<(Header, Vec<u8>)> {
    let mut header = [0; HEADER];
    stream.read_exact(&mut header)?;
    let header = Header::decode(&header).map_err(io::Error::other)?;
    stream.read_exact(&mut vec![0; header.bulk as usize])?;
    let mut trailer = [0; TRAILER];
    stream.read_exact(&mut trailer)?;
    let trailer = Trailer::decode(&trailer).map_err(io::Error::other)?;
    let mut message = vec![0; trailer.message as usize];
    stream.read_exact(&mut message)?;
    Ok((header, message))
}

fn serve(mut stream: TcpStream, script: &Mutex<Script>) -> io::Result<()> {
    let now = || script.lock().unwrap().clone();
    let (join, _) = receive(&mut stream)?;
    if now().rail == Rail::Closed {
        return Ok(());
    }
    let joined = v1::JoinReply { outcome: Some(ok_outcome()) }.encode_to_vec();
    send(&mut stream, FrameKind::Joined, join.session, join.id, &[], &joined)?;
    if now().rail == Rail::Pulling {
        ask(&mut stream, join.session)?;
    }
    loop {
        let (header, message) = receive(&mut stream)?;
        match header.kind {
            FrameKind::Ping if now().rail != Rail::Silent => {
                send(&mut stream, FrameKind::Pong, header.session, header.id, &[], &[])?;
            }
            FrameKind::Request => {
                let request = v1::RailRequest::decode(message.as_slice()).map_err(io::Error::other)?;
                answer(&mut stream, &header, request, &now(), script)?;
            }
            _ => {}
        }
    }
}

/// Requests that no client has an answer to.
fn ask(stream: &mut TcpStream, session: u64) -> io::Result<()> {
    let scope = Some(v1::Scope { store: STORE.to_bytes(), node: "n1".to_owned(), incarnation: INCARNATION });
    let pull = |put, offset, length| rail_request::Body::Pull(v1::PullRequest { put, offset, length });
    let bodies = [
        Some(pull(1, 0, 4096)),
        Some(pull(PUT, u64::MAX, u32::MAX)),
        Some(pull(PUT, 1, 1)),
        Some(pull(PUT, 1 << 40, 4096)),
        Some(rail_request::Body::Fetch(v1::FetchRequest::default())),
        None,
    ];
    for (id, body) in (1_000_000..).zip(bodies) {
        let request = v1::RailRequest { scope: scope.clone(), time_left_microseconds: 9_000_000, body };
        send(stream, FrameKind::Request, session, id, &[], &request.encode_to_vec())?;
    }
    send(stream, FrameKind::Request, session, 2_000_000, &[], &[0xff; 100])
}

/// The number of a put that is begun.
const PUT: u64 = 7777;

fn answer(
    stream: &mut TcpStream,
    header: &Header,
    request: v1::RailRequest,
    now: &Script,
    script: &Mutex<Script>,
) -> io::Result<()> {
    let mut bulk = Vec::new();
    let mut reply = v1::RailReply { outcome: Some(ok_outcome()), body: None };
    let current = |proof: &v1::SlotProof| v1::CheckResult { current: true, value: proof.value };
    match request.body {
        Some(rail_request::Body::Lookup(request)) => {
            reply.body = Some(rail_reply::Body::Lookup(looked_up(request.name.as_ref(), now)));
        }
        Some(rail_request::Body::Check(request)) => {
            let results = request.proofs.iter().map(current).collect();
            reply.body = Some(rail_reply::Body::Check(v1::CheckReply { results }));
        }
        Some(rail_request::Body::Lease(_)) => {
            reply.body = Some(rail_reply::Body::Lease(v1::LeaseReply { lease_milliseconds: 2000 }));
        }
        Some(rail_request::Body::Fetch(request)) => {
            let start = usize::try_from(request.offset).unwrap_or(SIZE).min(SIZE);
            let end = start.saturating_add(request.length as usize).min(SIZE);
            bulk = bytes_of(request.version)[start..end].to_vec();
            let first = request.offset / u64::from(PAGE);
            let checksums = page_checksums(request.version, request.component, first, PAGE, &bulk);
            reply.body = Some(rail_reply::Body::Fetch(v1::FetchReply {
                version: request.version,
                component: request.component,
                offset: request.offset,
                length: request.length,
                checksums,
                check: request.proof.as_ref().map(current),
            }));
            (now.fetch)(&request, &mut bulk, &mut reply);
        }
        _ => reply.outcome = Some(Refusal::new(Code::Invalid, "not here").to_outcome()),
    }
    let message = reply.encode_to_vec();
    match now.rail {
        Rail::Silent => return Ok(()),
        Rail::Closed => return Err(io::Error::other("closed")),
        Rail::Garbage => return stream.write_all(&[0x5a; 4096]),
        Rail::Endless => {
            let mut endless =
                Header { kind: FrameKind::Reply, bulk: 1 << 20, session: header.session, id: header.id }.encode();
            endless[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
            return stream.write_all(&endless);
        }
        Rail::Unasked => send(stream, FrameKind::Reply, header.session, header.id ^ (1 << 50), &[1; 4096], &message)?,
        Rail::OtherSession => {
            return send(stream, FrameKind::Reply, header.session ^ 1, header.id, &bulk, &message);
        }
        Rail::Dribble => {
            let slow = Header { kind: FrameKind::Reply, bulk: 4096, session: header.session, id: header.id };
            for byte in slow.encode() {
                stream.write_all(&[byte])?;
                // What it is: a byte a second, until it is told otherwise.
                std::thread::sleep(Duration::from_secs(1));
                if script.lock().unwrap().rail != Rail::Dribble {
                    return Err(io::Error::other("honest again"));
                }
            }
        }
        Rail::Asking | Rail::Pulling => ask(stream, header.session)?,
        Rail::Honest => {}
    }
    send(stream, FrameKind::Reply, header.session, header.id, &bulk, &message)
}

struct Liar {
    script: Arc<Mutex<Script>>,
    rail: SocketAddr,
}

impl Liar {
    /// What it says now; never comes back while it is to say nothing.
    async fn now(&self) -> Script {
        let script = self.script.lock().unwrap().clone();
        if script.silent {
            std::future::pending::<()>().await;
        }
        script
    }
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Control for Liar {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::WatchReply, Status>> + Send>>;

    async fn watch(&self, _: Request<Streaming<v1::WatchRequest>>) -> Answer<Self::WatchStream> {
        let watch = self.now().await.watch;
        let replies = (0u64..).map(move |number| Ok(watch(number)));
        Ok(Response::new(Box::pin(tokio_stream::iter(replies))))
    }
    async fn hello(&self, request: Request<v1::HelloRequest>) -> Answer<v1::HelloReply> {
        let request = request.into_inner();
        let listener = v1::Listener {
            fabric: "f0".to_owned(),
            transport: "tcp".to_owned(),
            address: self.rail.to_string(),
            ..Default::default()
        };
        let mut reply = v1::HelloReply {
            outcome: Some(ok_outcome()),
            protocol: PROTOCOL_MAX,
            protocol_min: PROTOCOL_MIN,
            protocol_max: PROTOCOL_MAX,
            software: "railfsd 0.1.0".to_owned(),
            store: STORE.to_bytes(),
            node: "n1".to_owned(),
            incarnation: INCARNATION,
            session: if request.session == 0 { 5 } else { request.session },
            tickets: vec![vec![3; 16].into(); request.tickets.min(64) as usize],
            listeners: vec![listener],
            lease_milliseconds: 2000,
            max_fetch_bytes: 1 << 20,
            ..Default::default()
        };
        (self.now().await.hello)(&mut reply);
        Ok(Response::new(reply))
    }
    async fn lookup_object(&self, request: Request<v1::LookupRequest>) -> Answer<v1::LookupReply> {
        let now = self.now().await;
        Ok(Response::new(looked_up(request.into_inner().name.as_ref(), &now)))
    }
    async fn list(&self, request: Request<v1::ListRequest>) -> Answer<v1::ListReply> {
        let (now, request) = (self.now().await, request.into_inner());
        if let Some(words) = now.list_status {
            return Err(Status::invalid_argument(words));
        }
        let entry = v1::ListEntry {
            key: KEY.as_bytes().into(),
            directory: false,
            descriptor: Some(descriptor(KEY).to_message()),
        };
        let entries = if *KEY.as_bytes() > *request.after { vec![entry] } else { Vec::new() };
        let mut reply = v1::ListReply { outcome: Some(ok_outcome()), entries, ..Default::default() };
        (now.list)(&request, &mut reply);
        Ok(Response::new(reply))
    }
    async fn begin_put(&self, request: Request<v1::BeginPutRequest>) -> Answer<v1::BeginPutReply> {
        let (_, request) = (self.now().await, request.into_inner());
        let size = request.attributes.map_or(0, |attributes| attributes.size);
        let object = Descriptor { striping: Striping::new(size, PAGE, 65536, 1).unwrap(), ..descriptor(KEY) };
        Ok(Response::new(v1::BeginPutReply {
            outcome: Some(ok_outcome()),
            put: PUT,
            descriptor: Some(object.to_message()),
        }))
    }
    async fn commit_put(&self, _: Request<v1::CommitPutRequest>) -> Answer<v1::CommitPutReply> {
        self.now().await;
        let outcome = Some(Refusal::new(Code::Aborted, "no such put").to_outcome());
        Ok(Response::new(v1::CommitPutReply { outcome, ..Default::default() }))
    }
    async fn abort_put(&self, _: Request<v1::AbortPutRequest>) -> Answer<v1::AbortPutReply> {
        self.now().await;
        Ok(Response::new(v1::AbortPutReply { outcome: Some(ok_outcome()) }))
    }
    async fn delete(&self, _: Request<v1::DeleteRequest>) -> Answer<v1::DeleteReply> {
        Err(Status::unimplemented("not here"))
    }
    async fn bye(&self, _: Request<v1::ByeRequest>) -> Answer<v1::ByeReply> {
        self.now().await;
        Ok(Response::new(v1::ByeReply { outcome: Some(ok_outcome()) }))
    }
    async fn join_verbs(&self, _: Request<v1::JoinVerbsRequest>) -> Answer<v1::JoinVerbsReply> {
        Err(Status::unimplemented("not here"))
    }
    async fn status(&self, _: Request<v1::StatusRequest>) -> Answer<v1::StatusReply> {
        let mut reply = v1::StatusReply {
            outcome: Some(ok_outcome()),
            store: STORE.to_bytes(),
            node: "n1".to_owned(),
            incarnation: INCARNATION,
            publishing: "ok".to_owned(),
            ..Default::default()
        };
        (self.now().await.status)(&mut reply);
        Ok(Response::new(reply))
    }
}
