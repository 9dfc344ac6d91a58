//! Puts that meet trouble: bad bytes, dead rails, clients and servers that go away, full disks. Nothing half is ever
//! visible, and nothing is left behind.

mod common;

use common::{Memory, SmallDisk, TestClient, TestServer, configured, name, options, pattern, skipped, until};
use railfs_engine::client::Source;
use railfs_engine::control::{BeginPut, CommitFailure};
use railfs_engine::error::Error;
use railfs_engine::put::{Puts, put};
use railfs_engine::rail::{Bulk, Handler, Incoming, Rail, Replier, Sent};
use railfs_proto::component::Header;
use railfs_proto::descriptor::{Descriptor, Id, Replica};
use railfs_proto::layout::Striping;
use railfs_server::daemon::Daemon;
use railfs_server::{fsck, store};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// Spoils the first so many replies.
struct Spoil {
    inner: Arc<Puts>,
    left: Arc<AtomicU64>,
}
struct SpoilReply(Box<dyn Replier>, bool);

impl Handler for Spoil {
    fn request(&self, incoming: Incoming) {
        let spoil = self.left.try_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok();
        let replier = Box::new(SpoilReply(incoming.replier, spoil));
        self.inner.request(Incoming { message: incoming.message, replier });
    }
}
impl Replier for SpoilReply {
    fn reply(self: Box<Self>, bulk: Bulk, message: Box<dyn FnOnce(Sent) -> bytes::Bytes + Send>) {
        let bulk = match bulk {
            Bulk::Bytes(bytes) if self.1 => {
                let mut bytes = bytes.to_vec();
                let middle = bytes.len() / 2;
                bytes[middle] ^= 1;
                Bulk::Bytes(bytes.into())
            }
            other => other,
        };
        self.0.reply(bulk, message);
    }
}

fn spoiled(server: &TestServer, times: u64) -> TestClient {
    let left = Arc::new(AtomicU64::new(times));
    let wrap = |inner| Arc::new(Spoil { inner, left }) as Arc<dyn Handler>;
    TestClient::connect_with(server.control().to_string(), wrap).unwrap()
}

#[test]
fn i2_bytes_that_fail_their_check_are_pulled_again_and_never_stored() {
    let server = TestServer::start(2, 2, "");
    let client = spoiled(&server, 2);
    let bytes = pattern(5 << 20, 1);
    client.put("a", &bytes).unwrap();
    assert!(client.read("a") == bytes);
    assert_eq!(server.counter("pulls_bad"), 2);
    let hopeless = spoiled(&server, u64::MAX);
    let error = hopeless.put("b", &bytes).unwrap_err();
    assert!(
        matches!(&error, Error::Aborted(text) if text.contains("ns/b") && text.contains("failed their check 3 times")),
        "{error}"
    );
    assert!(matches!(hopeless.lookup("b"), railfs_proto::reply::Lookup::Absent(_)));
    until("what it made is gone", || server.components().len() == 2);
    client.assert_quiet();
    hopeless.assert_quiet();
    server.assert_quiet();
}

/// A source whose reads wait at a gate.
struct Gated {
    inner: Memory,
    gate: Arc<(Mutex<bool>, Condvar)>,
    reads: AtomicU64,
}
impl Gated {
    fn new(bytes: Vec<u8>) -> Arc<Gated> {
        Arc::new(Gated { inner: Memory(bytes), gate: Arc::default(), reads: AtomicU64::new(0) })
    }
    fn open(&self) {
        *self.gate.0.lock().unwrap() = true;
        self.gate.1.notify_all();
    }
    fn reached(&self) -> bool {
        self.reads.load(Ordering::SeqCst) > 0
    }
}
impl Source for Gated {
    fn size(&self) -> u64 {
        self.inner.size()
    }
    fn read_exact_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let mut open = self.gate.0.lock().unwrap();
        while !*open {
            open = self.gate.1.wait(open).unwrap();
        }
        drop(open);
        self.inner.read_exact_at(offset, buffer)
    }
}

fn start_put(
    client: &TestClient,
    key: &str,
    source: Arc<dyn Source>,
) -> tokio::task::JoinHandle<railfs_engine::error::Result<railfs_engine::client::PutDone>> {
    let (control, puts, name) = (Arc::clone(&client.control), Arc::clone(&client.puts), name(key));
    client.runtime.spawn(async move { put(&control, &puts, &name, source, options()).await })
}

#[test]
fn i10_a_rail_that_dies_in_the_middle_of_a_put_costs_time_not_the_put() {
    let server = TestServer::start(2, 2, "");
    let client = TestClient::connect(&server);
    let bytes = pattern(24 << 20, 1);
    let source = Gated::new(bytes.clone());
    let task = start_put(&client, "a", Arc::clone(&source) as _);
    until("pulls are under way", || source.reached());
    client.rails[1].rail.close();
    source.open();
    client.runtime.block_on(task).unwrap().unwrap();
    let (descriptor, proof) = client.object("a");
    let mut one = client;
    one.rails.truncate(1);
    assert!(one.get(&descriptor, &proof) == bytes);
    assert!(server.counter("pulls_repeated") > 0);
    server.assert_quiet();
}

#[test]
fn i8_a_put_that_is_given_up_leaves_nothing() {
    let server = TestServer::start(2, 1, "");
    let client = TestClient::connect(&server);
    // Cancelled by its caller.
    let source = Gated::new(pattern(3 << 20, 1));
    let task = start_put(&client, "a", Arc::clone(&source) as _);
    until("pulls are under way", || source.reached());
    assert_eq!(server.components().len(), 2);
    task.abort();
    until("its files are gone", || server.components().is_empty());
    source.open();
    // The source has shrunk.
    let error = client.runtime.block_on(start_put(&client, "b", Arc::new(Shrunk))).unwrap().unwrap_err();
    assert!(matches!(&error, Error::Io { what, detail } if what == "ns/b" && detail.contains("reading")), "{error}");
    until("its files are gone", || server.components().is_empty());
    // The session ends (nobody came back for it in time).
    let source = Gated::new(pattern(3 << 20, 1));
    let task = start_put(&client, "c", Arc::clone(&source) as _);
    until("pulls are under way", || source.reached());
    let session = client.control.session().unwrap().id;
    server.server().puts.session_ended(session);
    let error = client.runtime.block_on(task).unwrap().unwrap_err();
    assert!(matches!(&error, Error::Aborted(text) if text.contains("session ended")), "{error}");
    source.open();
    assert!(server.components().is_empty());
    for key in ["a", "b", "c"] {
        assert!(matches!(client.lookup(key), railfs_proto::reply::Lookup::Absent(_)));
    }
    client.assert_quiet();
    server.assert_quiet();
}

struct Shrunk;
impl Source for Shrunk {
    fn size(&self) -> u64 {
        1 << 20
    }
    fn read_exact_at(&self, _: u64, _: &mut [u8]) -> std::io::Result<()> {
        Err(std::io::ErrorKind::UnexpectedEof.into())
    }
}

fn begin(client: &TestClient, key: &str) -> railfs_engine::control::Begun {
    let begin =
        BeginPut { name: name(key), attributes: options().attributes, size: 0, stripe_size: 0, page_size: 0, width: 0 };
    client.runtime.block_on(client.control.begin_put(&begin)).unwrap()
}

#[test]
fn i8_a_commit_that_is_asked_for_again_is_done_once() {
    let mut server = TestServer::start(1, 1, "");
    let client = TestClient::connect(&server);
    let begun = begin(&client, "a");
    let commit = |begun: &railfs_engine::control::Begun, request: u8| {
        client.runtime.block_on(client.control.commit_put(&name("a"), begun, [request; 16], None))
    };
    // Twice at the same time, then once more.
    let a = name("a");
    let (first, second) = client.runtime.block_on(async {
        tokio::join!(
            client.control.commit_put(&a, &begun, [1; 16], None),
            client.control.commit_put(&a, &begun, [1; 16], None)
        )
    });
    let version = first.unwrap().version;
    assert_eq!(second.unwrap().version, version);
    assert_eq!(commit(&begun, 1).unwrap().version, version);
    assert_eq!(server.counter("puts_committed"), 1);
    // Another request for the same put, and the same request for another put.
    assert!(matches!(commit(&begun, 2), Err(CommitFailure::Final(Error::Aborted(_)))));
    let other = begin(&client, "b");
    assert!(matches!(commit(&other, 1), Err(CommitFailure::Final(Error::Invalid(_)))));
    client.runtime.block_on(client.control.abort_put(&other));
    // A server that was restarted before the answer arrived: the put is begun anew with the same request id.
    server.crash();
    server.serve().unwrap();
    client.runtime.block_on(client.control.status()).unwrap();
    assert!(matches!(commit(&begun, 1), Err(CommitFailure::OtherRun)));
    let again = begin(&client, "a");
    assert_eq!(commit(&again, 1).unwrap().version, version);
    assert_eq!(client.object("a").0.version, version);
    assert_eq!(server.components().len(), 1);
    client.wait_up();
    server.assert_quiet();
}

#[test]
fn i8_a_put_goes_on_over_a_crash_of_the_server() {
    let mut server = TestServer::start(2, 1, "");
    let client = TestClient::connect(&server);
    let bytes = pattern(6 << 20, 1);
    let source = Gated::new(bytes.clone());
    let task = start_put(&client, "a", Arc::clone(&source) as _);
    until("pulls are under way", || source.reached());
    server.crash();
    assert_eq!(server.components().len(), 2);
    server.serve().unwrap();
    // What the dead put left had no header.
    assert_eq!((server.daemon().found().removed, server.daemon().found().lost), (2, 0));
    source.open();
    client.runtime.block_on(task).unwrap().unwrap();
    client.wait_up();
    assert!(client.read("a") == bytes);
    assert_eq!(server.components().len(), 2);
    client.assert_quiet();
    server.assert_quiet();
}

#[test]
fn i8_components_that_no_record_names_are_removed_or_kept_as_lost() {
    let mut server = TestServer::start(2, 1, "");
    TestClient::connect(&server).put("a", b"1").unwrap();
    server.stop();
    let folder = server.config.stripe_dirs[0].join("components");
    std::fs::write(folder.join("1900.0"), b"no header").unwrap();
    std::fs::write(folder.join("1901.0"), vec![0; 8192]).unwrap();
    std::fs::write(folder.join("notes.txt"), b"somebody's").unwrap();
    std::fs::create_dir(folder.join("9999.0")).unwrap();
    let descriptor = Descriptor {
        version: 1902,
        attributes: options().attributes,
        striping: Striping::new(0, 4096, 4096, 1).unwrap(),
        components: vec![vec![Replica { node: "n1".into(), directory: Id([0; 16]) }]],
    };
    let header = Header::new(&name("never"), &descriptor, 0).unwrap().encode();
    std::fs::write(folder.join("1902.0"), header).unwrap();
    // Valid, but under another's name.
    let other = Descriptor { version: 1904, ..descriptor };
    std::fs::write(folder.join("1903.0"), Header::new(&name("never"), &other, 0).unwrap().encode()).unwrap();
    server.serve().unwrap();
    let found = server.daemon().found();
    assert_eq!((found.kept, found.removed, found.lost, found.foreign), (1, 2, 2, 2));
    let lost = server.config.stripe_dirs[0].join("lost");
    assert!(lost.join("1902.0").exists() && lost.join("1904.0").exists() && folder.join("notes.txt").exists());
    assert!(folder.join("9999.0").is_dir());
    let client = TestClient::connect(&server);
    assert_eq!(client.read("a"), b"1");
    let status = client.runtime.block_on(client.control.status()).unwrap();
    let lost: Vec<_> = status.directories.iter().map(|d| (d.lost_files, d.lost_bytes)).collect();
    assert_eq!(lost, [(2, 8192), (0, 0)]);
}

fn copy_files(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// A copy of the log from before the last versions were reserved, in place of the log: the markers learn of records only now
/// and then, but the components that were made since are there.
#[test]
fn i8_a_log_that_is_older_than_a_component_is_refused_and_no_version_is_used_twice() {
    let mut server = TestServer::start(2, 1, "");
    let logs: Vec<PathBuf> = server.config.stripe_dirs.iter().map(|directory| directory.join("log")).collect();
    let aside = |log: &Path, of: &str| log.with_file_name(format!("log-{of}"));
    logs.iter().for_each(|log| copy_files(log, &aside(log, "old")));
    let client = TestClient::connect(&server);
    let version = client.put("a", b"new").unwrap().version;
    drop(client);
    server.crash();
    for log in &logs {
        std::fs::rename(log, aside(log, "new")).unwrap();
        copy_files(&aside(log, "old"), log);
    }
    // The index, which knows as well here, may be behind after a crash, or be lost.
    std::fs::remove_file(server.config.state_dir.join("index.redb")).unwrap();
    let before: Vec<_> = logs.iter().map(|log| std::fs::read_dir(log).unwrap().count()).collect();
    let mut said = String::new();
    // What crashed within this process takes a moment to let go of its sockets and locks.
    until("the old log is refused", || {
        said = Daemon::start(&server.config).err().map(|error| error.to_string()).unwrap_or_default();
        said.contains("older copy of the log")
    });
    assert!(said.contains(&format!("{version}.0")) && said.contains("reserved versions up to"), "{said}");
    let mut problems = Vec::new();
    let checked = fsck::check(&server.config, true, &mut |problem| problems.push(problem.to_string()));
    assert!(checked.is_err_and(|error| error.to_string().contains("older copy of the log")));
    assert_eq!(problems, Vec::<String>::new(), "nothing is repaired by an older log");
    // Nothing was written to it, nor moved away: with the newest log in place all is there.
    assert_eq!(logs.iter().map(|log| std::fs::read_dir(log).unwrap().count()).collect::<Vec<_>>(), before);
    for log in &logs {
        std::fs::remove_dir_all(log).unwrap();
        std::fs::rename(aside(log, "new"), log).unwrap();
    }
    server.serve().unwrap();
    assert_eq!(server.daemon().found().lost, 0);
    let client = TestClient::connect(&server);
    assert_eq!(client.read("a"), b"new");
    assert!(client.put("b", b"newer").unwrap().version > version);
}

#[test]
fn i8_what_is_lost_goes_from_every_directory_that_a_put_needs() {
    let test = "i8_what_is_lost_goes_from_every_directory_that_a_put_needs";
    let root = tempfile::tempdir().unwrap();
    let config = configured(root.path(), 4, 1, "");
    config.stripe_dirs.iter().for_each(|directory| std::fs::create_dir(directory).unwrap());
    let mut disks = Vec::new();
    for directory in &config.stripe_dirs[2..] {
        match SmallDisk::mount(directory, 8 << 20) {
            Ok(disk) => disks.push(disk),
            Err(why) => return skipped(test, &format!("cannot mount a tmpfs: {why}")),
        }
    }
    store::init(&config.stripe_dirs).unwrap();
    let server = TestServer::over(root, config);
    let client = TestClient::connect(&server);
    for disk in &disks {
        std::fs::write(disk.0.join("lost/7002.0"), vec![1; 6 << 20]).unwrap();
    }
    let bytes = pattern(16 << 20, 1);
    client.put("a", &bytes).unwrap();
    assert!(client.read("a") == bytes);
    assert!(disks.iter().all(|disk| !disk.0.join("lost/7002.0").exists()));
    client.assert_quiet();
    server.assert_quiet();
    drop((client, server));
}

#[test]
fn i10_a_rail_whose_address_is_not_here_yet_costs_that_rail_alone() {
    // For documents, and on no interface.
    let nowhere: std::net::SocketAddr = "192.0.2.77:0".parse().unwrap();
    let root = tempfile::tempdir().unwrap();
    let mut config = configured(root.path(), 1, 2, "");
    std::fs::create_dir(&config.stripe_dirs[0]).unwrap();
    store::init(&config.stripe_dirs).unwrap();
    let mut none = config.clone();
    none.rails.truncate(1);
    none.rails[0].listen = nowhere;
    let said = Daemon::start(&none).unwrap_err().to_string();
    assert!(said.contains("192.0.2.77") && said.contains("no interface") && !said.contains("stop what"), "{said}");
    let mut control = config.clone();
    control.control = vec![nowhere];
    let said = Daemon::start(&control).unwrap_err().to_string();
    assert!(said.contains("192.0.2.77") && said.contains("no interface") && said.contains("control.listen"), "{said}");
    config.rails[1].listen = nowhere;
    let daemon = Daemon::start(&config).unwrap();
    let server = daemon.server().unwrap();
    assert_eq!(daemon.rail_addresses().len(), 2);
    let control = daemon.control_addresses()[0].to_string();
    let status = railfs_engine::control::ControlConfig {
        addresses: vec![control],
        store: None,
        connect_deadline: common::LONG,
        metadata_deadline: common::LONG,
        software: "test".into(),
        tls: None,
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let control = railfs_engine::control::Control::new(status, runtime.handle().clone(), Box::new(|_| {}));
    let status = runtime.block_on(control.status()).unwrap();
    assert!(status.degraded.len() == 1 && status.degraded[0].contains("192.0.2.77"), "{:?}", status.degraded);
    assert!(server.puts.is_empty());
    daemon.stop().unwrap();
}

#[test]
fn a_port_that_is_taken_is_named_and_no_directory_is_touched() {
    let root = tempfile::tempdir().unwrap();
    let mut config = configured(root.path(), 1, 1, "");
    std::fs::create_dir(&config.stripe_dirs[0]).unwrap();
    store::init(&config.stripe_dirs).unwrap();
    let list = || {
        let names = std::fs::read_dir(&config.stripe_dirs[0]).unwrap().map(|entry| entry.unwrap().file_name());
        names.collect::<std::collections::BTreeSet<_>>()
    };
    let before = list();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let mut other = config.clone();
    other.control = vec![address];
    let said = Daemon::start(&other).unwrap_err().to_string();
    assert!(said.contains(&address.to_string()) && said.contains("control.listen"), "{said}");
    config.rails[0].listen = address;
    let said = Daemon::start(&config).unwrap_err().to_string();
    assert!(said.contains(&address.to_string()) && said.contains("rail"), "{said}");
    assert!(!root.path().join("state").exists());
    assert_eq!(before, list());
}

#[test]
fn a_second_server_on_the_same_directories_is_refused() {
    let server = TestServer::start(1, 1, "");
    let mut other = server.config.clone();
    other.control = vec!["127.0.0.1:0".parse().unwrap()];
    other.rails[0].listen = "127.0.0.1:0".parse().unwrap();
    // Also with the very same configuration, ports and all: who has the directories says more than that a port is taken.
    for config in [&other, &server.config] {
        let said = Daemon::start(config).unwrap_err().to_string();
        assert!(said.contains("in use by") && said.contains(&std::process::id().to_string()), "{said}");
    }
    let client = TestClient::connect(&server);
    client.put("a", b"1").unwrap();
}

#[test]
fn a_full_directory_is_named_and_what_was_written_is_freed() {
    let root = tempfile::tempdir().unwrap();
    let config = configured(root.path(), 3, 1, "");
    config.stripe_dirs.iter().for_each(|directory| std::fs::create_dir(directory).unwrap());
    // The third holds no log.
    let disk = match SmallDisk::mount(&config.stripe_dirs[2], 4 << 20) {
        Ok(disk) => disk,
        Err(why) => {
            return skipped(
                "a_full_directory_is_named_and_what_was_written_is_freed",
                &format!("cannot mount a tmpfs: {why}"),
            );
        }
    };
    store::init(&config.stripe_dirs).unwrap();
    let server = TestServer::over(root, config);
    let client = TestClient::connect(&server);
    let free = || rustix::fs::statvfs(&disk.0).unwrap().f_bavail;
    let before = free();
    let error = client.put("a", &pattern(30 << 20, 1)).unwrap_err();
    let path = disk.0.display().to_string();
    assert!(matches!(&error, Error::NoSpace(text) if text.contains(&path)), "{error}");
    assert!(server.components().is_empty());
    assert_eq!(free(), before);
    // What was lost and found goes before a put is refused.
    let lost = disk.0.join("lost/7002.0");
    std::fs::write(&lost, vec![1; 2 << 20]).unwrap();
    let bytes = pattern(9 << 20, 1);
    client.put("b", &bytes).unwrap();
    assert!(client.read("b") == bytes);
    assert!(!lost.exists());
    client.assert_quiet();
    server.assert_quiet();
    drop((client, server));
}

/// No descriptor is left to this process for as long as it lives.
struct Spent {
    limit: rustix::process::Rlimit,
    held: Vec<std::fs::File>,
}

impl Spent {
    fn all() -> Spent {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(512), maximum: limit.maximum }).unwrap();
        let held = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
        Spent { limit, held }
    }
}

impl Drop for Spent {
    fn drop(&mut self) {
        self.held.clear();
        rustix::process::setrlimit(rustix::process::Resource::Nofile, self.limit).unwrap();
    }
}

#[test]
fn i11_without_descriptors_no_directory_is_suspect_and_no_object_damaged() {
    let server = TestServer::start(3, 1, "");
    let client = TestClient::connect(&server);
    let bytes = pattern(100_000, 1);
    client.put("a", &bytes).unwrap();
    let (descriptor, proof) = client.object("a");
    let begin = BeginPut {
        name: name("b"),
        attributes: options().attributes,
        size: 100_000,
        stripe_size: 0,
        page_size: 0,
        width: 0,
    };
    {
        let _none = Spent::all();
        let refused = client.runtime.block_on(client.control.begin_put(&begin)).unwrap_err();
        assert!(
            matches!(refused, Error::Unreachable { .. }) && refused.to_string().contains("LimitNOFILE"),
            "{refused}"
        );
        let refused = client.try_get(&descriptor, &proof).unwrap_err();
        assert!(refused.contains("LimitNOFILE"), "{refused}");
    }
    assert!(server.server().node.health.is_well(), "{:?}", server.server().node.health.all().collect::<Vec<_>>());
    assert_eq!(server.counter("fetches_damaged"), 0);
    assert!(client.get(&descriptor, &proof) == bytes);
    client.put("b", &bytes).unwrap();
    assert!(client.read("b") == bytes);
    client.assert_quiet();
    server.assert_quiet();
}

#[test]
fn components_that_are_only_kept_open_give_way_where_descriptors_are_short() {
    let server = TestServer::start(3, 1, "");
    let client = TestClient::connect(&server);
    let bytes = pattern(100_000, 1);
    let keys: Vec<String> = (0..8).map(|number| format!("k{number}")).collect();
    for key in &keys {
        client.put(key, &bytes).unwrap();
    }
    let objects: Vec<_> = keys.iter().map(|key| client.object(key)).collect();
    // All but the last are open now.
    let (last, first) = objects.split_last().unwrap();
    for (descriptor, proof) in first {
        assert!(client.get(descriptor, proof) == bytes);
    }
    let begin =
        BeginPut { name: name("b"), attributes: options().attributes, size: 1, stripe_size: 0, page_size: 0, width: 0 };
    {
        let _none = Spent::all();
        assert!(client.get(&last.0, &last.1) == bytes);
        // What was let go is gone by now, but for the one that was read.
        let begun = client.runtime.block_on(client.control.begin_put(&begin));
        begun.unwrap_or_else(|error| panic!("{error}"));
    }
    let open = server.server().files.len();
    assert!(open <= 3, "{open}");
}
