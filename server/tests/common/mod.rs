//! A server in this process, and the least client that can put, look up and fetch by rails.
#![allow(dead_code)]

use railfs_engine::client::{PutDone, PutOptions, Source};
use railfs_engine::clock::Clock;
use railfs_engine::control::{Control, ControlConfig};
use railfs_engine::error::Result;
use railfs_engine::memory::Arena;
use railfs_engine::put::{Puts, put};
use railfs_engine::rail::tcp::{Limits, RailConfig, TcpRail};
use railfs_engine::rail::{Event, Events, Handler, Landing, Lane, Rail, State, Submission};
use railfs_proto::checksum::page_checksums;
use railfs_proto::descriptor::{Attributes, Descriptor, Proof};
use railfs_proto::hello::Transport;
use railfs_proto::name::ObjectName;
use railfs_proto::reply::{Lookup, check_fetch_reply};
use railfs_proto::v1::{self, rail_reply, rail_request};
use railfs_server::config::{self, Config};
use railfs_server::daemon::{Daemon, StartError};
use railfs_server::store;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

pub const LONG: Duration = Duration::from_secs(20);

/// Waits for a condition that something else brings about.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !condition() {
        assert!(Instant::now() < end, "not within {LONG:?}: {what}");
        std::thread::yield_now();
    }
}

/// The stripe directories of a store and what serves them.
pub struct TestServer {
    pub root: tempfile::TempDir,
    pub config: Config,
    daemon: Option<Daemon>,
    crashed: bool,
}

/// A loopback address of this process alone: a port that is given up in a restart is not taken by another test's
/// connection meanwhile.
pub fn own_address() -> std::net::Ipv4Addr {
    let [_, a, b, c] = std::process::id().to_be_bytes();
    std::net::Ipv4Addr::new(127, 1 + a % 250, b, c.clamp(2, 250))
}

/// `directories` stripe directories and `rails` rails on loopback, all ports chosen by the kernel.
pub fn configured(root: &Path, directories: usize, rails: usize, more: &str) -> Config {
    let dirs: Vec<PathBuf> = (0..directories).map(|i| root.join(format!("d{i}"))).collect();
    let ip = own_address();
    let rails: String = (0..rails).map(|i| format!("[[rail]]\nfabric = \"f{i}\"\nlisten = \"{ip}:0\"\n")).collect();
    let text = format!(
        "node = \"n1\"\nstate_dir = {:?}\nstripe_dirs = {dirs:?}\n[control]\nlisten = \"{ip}:0\"\n{rails}{more}",
        root.join("state")
    );
    let parsed = config::parse(&text, "test", "n1").unwrap_or_else(|error| panic!("{error}")).0;
    // After a restart nothing is reclaimed for one pin lease: tests do not wait for the usual one.
    config::Config { pin_lease: Duration::from_secs(1), ..parsed }
}

impl TestServer {
    pub fn start(directories: usize, rails: usize, more: &str) -> TestServer {
        let root = tempfile::tempdir().unwrap();
        let config = configured(root.path(), directories, rails, more);
        for directory in &config.stripe_dirs {
            std::fs::create_dir(directory).unwrap();
        }
        store::init(&config.stripe_dirs).unwrap();
        Self::over(root, config)
    }

    /// Over directories that are there.
    pub fn over(root: tempfile::TempDir, config: Config) -> TestServer {
        let mut server = TestServer { root, config, daemon: None, crashed: false };
        server.serve().unwrap();
        server
    }

    pub fn serve(&mut self) -> std::result::Result<(), StartError> {
        // A crash within a process leaves threads and sockets that end a moment later, which a real one does not.
        let end = Instant::now() + if std::mem::take(&mut self.crashed) { LONG } else { Duration::ZERO };
        let daemon = loop {
            match Daemon::start(&self.config) {
                Err(_) if Instant::now() < end => std::thread::yield_now(),
                other => break other?,
            }
        };
        // The same ports after a restart: clients come back.
        self.config.control = daemon.control_addresses().to_vec();
        for (rail, address) in self.config.rails.iter_mut().zip(daemon.rail_addresses()) {
            rail.listen = address;
        }
        self.daemon = Some(daemon);
        Ok(())
    }

    pub fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().unwrap()
    }
    pub fn server(&self) -> &Arc<railfs_server::serve::Server> {
        self.daemon().server().unwrap()
    }
    pub fn counter(&self, name: &str) -> u64 {
        let all = self.server().node.counters.list();
        all.iter().find(|(other, _)| *other == name).unwrap_or_else(|| panic!("no counter {name}")).1
    }
    pub fn stop(&mut self) {
        self.daemon.take().unwrap().stop().unwrap();
    }
    pub fn crash(&mut self) {
        self.crashed = true;
        self.daemon.take().unwrap().crash();
    }
    pub fn control(&self) -> SocketAddr {
        self.config.control[0]
    }

    /// Component files, by directory number and name.
    pub fn components(&self) -> Vec<(usize, String)> {
        let list = |(number, directory): (usize, &PathBuf)| {
            let names = std::fs::read_dir(directory.join("components")).unwrap();
            names.map(move |entry| (number, entry.unwrap().file_name().into_string().unwrap())).collect::<Vec<_>>()
        };
        let mut all: Vec<_> = self.config.stripe_dirs.iter().enumerate().flat_map(list).collect();
        all.sort();
        all
    }

    pub fn path(&self, descriptor: &Descriptor, component: u32) -> PathBuf {
        let id = descriptor.components[component as usize][0].directory;
        let directory = self.server().node.store.directory(id).unwrap();
        directory.components().join(format!("{}.{component}", descriptor.version))
    }

    /// Nothing in flight, nothing held, nothing on disk that no record names.
    pub fn assert_quiet(&self) {
        let server = self.server();
        until("no put is under way", || server.puts.is_empty());
        until("landing memory is free", || {
            let memory = server.puts.memory();
            memory.free == memory.total
        });
        assert_eq!(server.puts.memory().quarantined, 0);
        until("no name is being published", || server.node.publisher.slots().busy_names() == 0);
    }
}

/// Sessions, and connections in all of them.
pub fn sessions(server: &TestServer) -> (usize, usize) {
    let sessions = server.server().node.sessions.lock().unwrap();
    (sessions.len(), sessions.connections())
}

/// A small file system of its own, where that is allowed.
pub struct SmallDisk(pub std::path::PathBuf);
impl SmallDisk {
    pub fn mount(at: &std::path::Path, bytes: u64) -> std::result::Result<SmallDisk, String> {
        let options = std::ffi::CString::new(format!("size={bytes}")).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("railfs-test", at, "tmpfs", flags, options.as_c_str())
            .map_err(|error| error.to_string())?;
        Ok(SmallDisk(at.to_owned()))
    }
}
impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

pub fn skipped(test: &str, why: &str) {
    eprintln!("SKIPPED {test}: {why}");
    if let Some(log) = std::env::var_os("RAILFS_SKIP_LOG") {
        use std::io::Write;
        let mut file = std::fs::File::options().append(true).create(true).open(log).unwrap();
        writeln!(file, "SKIPPED {test}: {why}").unwrap();
    }
}

/// What a test of invariants has tried, for the table that `make test` ends with.
pub fn tally(invariants: &str, kind: &str, count: u64, test: &str) {
    if let Some(log) = std::env::var_os("RAILFS_TALLY_LOG") {
        let mut file = std::fs::File::options().append(true).create(true).open(log).unwrap();
        std::io::Write::write_all(&mut file, format!("{invariants} {kind} {count} {test}\n").as_bytes()).unwrap();
    }
}

/// Bytes that differ everywhere.
pub fn pattern(size: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(size + 8);
    while bytes.len() < size {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(size);
    bytes
}

pub struct Memory(pub Vec<u8>);
impl Source for Memory {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }
    fn read_exact_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        let from = self.0.get(offset as usize..).and_then(|rest| rest.get(..buffer.len()));
        buffer.copy_from_slice(from.ok_or(std::io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

pub fn options() -> PutOptions {
    PutOptions {
        attributes: Attributes { mode: 0o644, mtime_seconds: 1, mtime_nanoseconds: 2, owner: None },
        stripe_size: 0,
        page_size: 0,
        width: 0,
        if_version: None,
    }
}

pub fn name(key: &str) -> ObjectName {
    ObjectName::new("ns", key.as_bytes().to_vec()).unwrap()
}

#[derive(Default)]
struct Answers {
    waiting: Mutex<HashMap<u64, Sender<Event>>>,
    up: Mutex<bool>,
}
impl Events for Answers {
    fn event(&self, event: Event) {
        let id = match &event {
            Event::Replied { id, .. } | Event::Failed { id, .. } => *id,
            Event::Released { .. } | Event::Looked { .. } | Event::Slots(_) => return,
            Event::State(state) => {
                *self.up.lock().unwrap() = *state == State::Up;
                return;
            }
        };
        if let Some(sender) = self.waiting.lock().unwrap().remove(&id) {
            let _ = sender.send(event);
        }
    }
}

/// What a fetch brought.
pub struct Fetched {
    pub outcome: v1::Outcome,
    pub reply: Option<v1::FetchReply>,
    pub bytes: Vec<u8>,
}

pub struct TestRail {
    pub rail: Arc<TcpRail>,
    answers: Arc<Answers>,
}

pub struct TestClient {
    pub runtime: Runtime,
    pub control: Arc<Control>,
    pub puts: Arc<Puts>,
    pub rails: Vec<TestRail>,
    pub arena: Arena,
    clock: Clock,
    next: AtomicU64,
}

impl TestClient {
    /// Says hello and brings up a rail to every listener.
    pub fn connect(server: &TestServer) -> TestClient {
        Self::connect_to(server.control().to_string()).unwrap()
    }

    pub fn connect_to(address: String) -> Result<TestClient> {
        Self::connect_with(address, |puts| puts as Arc<dyn Handler>)
    }

    /// With something between the rails and what answers pulls.
    pub fn connect_with(address: String, wrap: impl FnOnce(Arc<Puts>) -> Arc<dyn Handler>) -> Result<TestClient> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let config = ControlConfig {
            addresses: vec![address],
            store: None,
            connect_deadline: Duration::from_secs(3),
            metadata_deadline: Duration::from_secs(5),
            software: "test 1".to_owned(),
            tls: None,
        };
        let control = Control::new(config, runtime.handle().clone(), Box::new(|_| {}));
        let session = runtime.block_on(control.connect())?;
        let clock = Clock::start();
        let puts = Puts::new();
        let handler = wrap(Arc::clone(&puts));
        let rail = |listener: &railfs_proto::hello::Listener| {
            let Transport::Tcp(remote) = listener.transport else { panic!("not tcp") };
            let answers = Arc::new(Answers::default());
            let config = RailConfig {
                name: format!("t{}", listener.id),
                remote,
                local: None,
                listener: listener.id,
                limits: Limits::default(),
                seed: 1,
            };
            let (tickets, handler) = (Arc::clone(&control) as _, Arc::clone(&handler));
            let rail = TcpRail::start(config, clock, tickets, handler, Arc::clone(&answers) as _).unwrap();
            TestRail { rail, answers }
        };
        let rails: Vec<TestRail> = session.listeners.iter().map(rail).collect();
        let arena = Arena::new(64 << 20).unwrap();
        let client = TestClient { runtime, control, puts, rails, arena, clock, next: AtomicU64::new(1) };
        client.wait_up();
        Ok(client)
    }

    pub fn wait_up(&self) {
        until("rails are up", || self.rails.iter().all(|rail| rail.rail.state() == State::Up));
    }

    pub fn scope(&self) -> v1::Scope {
        self.control.session().unwrap().scope()
    }

    pub fn put(&self, key: &str, bytes: &[u8]) -> Result<PutDone> {
        self.put_with(key, bytes, options())
    }

    pub fn put_with(&self, key: &str, bytes: &[u8], options: PutOptions) -> Result<PutDone> {
        let source = Arc::new(Memory(bytes.to_vec()));
        self.runtime.block_on(put(&self.control, &self.puts, &name(key), source, options))
    }

    pub fn lookup(&self, key: &str) -> Lookup {
        self.runtime.block_on(self.control.lookup(&name(key))).unwrap()
    }

    pub fn object(&self, key: &str) -> (Descriptor, Proof) {
        match self.lookup(key) {
            Lookup::Object(descriptor, proof) => (descriptor, proof),
            other => panic!("{key}: {other:?}"),
        }
    }

    pub fn delete(&self, key: &str) -> Result<u64> {
        let mut request = [0u8; 16];
        getrandom::fill(&mut request).unwrap();
        self.runtime.block_on(self.control.delete(&name(key), request, None))
    }

    /// Any request by a rail.
    pub fn ask(&self, rail: usize, lane: Lane, request: v1::RailRequest, landing: Option<u32>) -> Event {
        let (sender, receiver): (_, Receiver<Event>) = channel();
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let rail = &self.rails[rail];
        rail.answers.waiting.lock().unwrap().insert(id, sender);
        let landing = landing.map(|length| Landing {
            extent: self.arena.allocate(length.next_power_of_two().max(4096)).unwrap(),
            length,
        });
        rail.rail.submit(Submission {
            id,
            lane,
            message: prost::Message::encode_to_vec(&request).into(),
            landing,
            deadline: self.clock.now().after(Duration::from_secs(10)),
        });
        receiver.recv_timeout(LONG).expect("a rail answers in time")
    }

    pub fn request(&self, body: rail_request::Body) -> v1::RailRequest {
        v1::RailRequest { scope: Some(self.scope()), time_left_microseconds: 5_000_000, body: Some(body) }
    }

    pub fn reply(&self, rail: usize, request: v1::RailRequest) -> v1::RailReply {
        match self.ask(rail, Lane::Small, request, None) {
            Event::Replied { message, .. } => prost::Message::decode(message).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    pub fn check(&self, rail: usize, proof: &Proof) -> v1::CheckResult {
        let check = v1::CheckRequest { proofs: vec![proof.to_slot()] };
        let reply = self.reply(rail, self.request(rail_request::Body::Check(check)));
        let Some(rail_reply::Body::Check(check)) = reply.body else { panic!("{reply:?}") };
        check.results[0]
    }

    pub fn fetch(&self, rail: usize, request: v1::FetchRequest) -> Fetched {
        let length = request.length;
        match self.ask(
            rail,
            Lane::Bulk,
            self.request(rail_request::Body::Fetch(request)),
            Some(length.clamp(1, 1 << 20)),
        ) {
            Event::Replied { message, bulk, extent, .. } => {
                let reply: v1::RailReply = prost::Message::decode(message).unwrap();
                let bytes = extent.map(|extent| extent.bytes()[..bulk as usize].to_vec()).unwrap_or_default();
                let fetch = match reply.body {
                    Some(rail_reply::Body::Fetch(fetch)) => Some(fetch),
                    _ => None,
                };
                Fetched { outcome: reply.outcome.unwrap(), reply: fetch, bytes }
            }
            other => panic!("{other:?}"),
        }
    }

    /// The whole object, fetched extent by extent over all rails, every page verified; or why not.
    pub fn try_get(&self, descriptor: &Descriptor, proof: &Proof) -> std::result::Result<Vec<u8>, String> {
        let striping = &descriptor.striping;
        let (mut bytes, mut rail) = (Vec::new(), 0);
        while (bytes.len() as u64) < striping.size() {
            let offset = bytes.len() as u64;
            let place = striping.place(offset);
            let length = u64::from(striping.extent_size()).min(striping.size() - offset) as u32;
            let request = v1::FetchRequest {
                version: descriptor.version,
                component: place.component,
                offset: place.offset,
                length,
                directory: descriptor.components[place.component as usize][0].directory.to_bytes(),
                proof: Some(proof.to_slot()),
                fresh: false,
            };
            let fetched = self.fetch(rail, request.clone());
            if fetched.outcome.code != v1::Code::Ok as i32 {
                return Err(fetched.outcome.message);
            }
            let reply = fetched.reply.ok_or("no reply")?;
            let page = striping.page_size();
            let sums = check_fetch_reply(&request, &reply, fetched.bytes.len() as u32, page)
                .map_err(|error| error.to_string())?;
            let first = place.offset / u64::from(page);
            let computed = page_checksums(descriptor.version, place.component, first, page, &fetched.bytes);
            if computed != sums {
                return Err(format!("component {} at {}: checksum", place.component, place.offset));
            }
            assert!(reply.check.unwrap().current);
            bytes.extend_from_slice(&fetched.bytes);
            rail = (rail + 1) % self.rails.len();
        }
        Ok(bytes)
    }

    /// The same, which must be there.
    pub fn get(&self, descriptor: &Descriptor, proof: &Proof) -> Vec<u8> {
        self.try_get(descriptor, proof).unwrap_or_else(|why| panic!("{why}"))
    }

    /// What the name has now.
    pub fn read(&self, key: &str) -> Vec<u8> {
        let (descriptor, proof) = self.object(key);
        self.get(&descriptor, &proof)
    }

    pub fn assert_quiet(&self) {
        until("no put is under way at the client", || self.puts.is_empty() && self.puts.in_flight() == 0);
        let stats = self.arena.stats();
        assert_eq!((stats.free, stats.quarantined), (stats.total, 0));
    }
}

impl Drop for TestClient {
    fn drop(&mut self) {
        for rail in &self.rails {
            rail.rail.close();
        }
        self.puts.close();
    }
}
