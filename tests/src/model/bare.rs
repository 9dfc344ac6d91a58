//! The file system over a real client and a real server, without a kernel.
//!
//! Guarantees: it asks what a kernel asks, in the same order (every name on the way, once more from the top after ESTALE,
//! FORGET for every answer), and keeps nothing that a kernel would not; every sequence has a namespace of its own on the one
//! server of its subject, whose puts are real commits. A call that is not answered in time counts as a wrong answer.

use super::steps::PAGE;
use super::world::Content;
use super::{DESCRIPTORS, Line, Promise, Refusal, Stat, Subject};
use crate::wait;
use railfs::ops::{
    Access, Activity, Attr, Choice, DirSink, Emitted, FileSystem, Kind, Mode, Owner, Purpose, ROOT, Seek, Settings,
};
use railfs_engine::client::{Client, Config, Found, PutOptions, Source};
use railfs_engine::clock::Clock;
use railfs_engine::error::Error;
use railfs_proto::component::DATA_OFFSET;
use railfs_proto::descriptor::Attributes;
use railfs_proto::name::{Namespace, ObjectName};
use railfs_server::config as server_config;
use railfs_server::daemon::Daemon;
use railfs_server::store;
use rustix::io::Errno;
use std::net::Ipv4Addr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// A call that has no answer after this long has none: every deadline is shorter.
const HANG: Duration = Duration::from_secs(30);
/// What is answered then.
const NO_ANSWER: Errno = Errno::CANCELED;
const ARENA: u64 = 8 << 20;

/// A server in this process, over directories of its own.
struct Server {
    daemon: Option<Daemon>,
    config: server_config::Config,
    _root: tempfile::TempDir,
}

/// Where the stripe directories lie: in memory where that is possible, since thousands of puts wait for the disk otherwise
/// and nothing here is about a disk.
pub fn fast_directory() -> PathBuf {
    let memory = Path::new("/dev/shm");
    if tempfile::tempdir_in(memory).is_ok() { memory.to_owned() } else { std::env::temp_dir() }
}

/// A loopback address that no other server of these tests has: ports that are given up in a restart stay free.
fn own_address() -> Ipv4Addr {
    static NEXT: AtomicU16 = AtomicU16::new(1);
    let [_, _, a, b] = std::process::id().to_be_bytes();
    let [c, d] = NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    Ipv4Addr::new(127, 2 + a % 250, b ^ c, 2 + d % 250)
}

impl Server {
    fn start() -> Server {
        let root = tempfile::tempdir_in(fast_directory()).unwrap_or_else(|error| panic!("{error}"));
        let directories: Vec<PathBuf> = (0..3).map(|number| root.path().join(format!("d{number}"))).collect();
        let address = own_address();
        let rails: String =
            (0..2).map(|number| format!("[[rail]]\nfabric = \"f{number}\"\nlisten = \"{address}:0\"\n")).collect();
        let text = format!(
            "node = \"n1\"\nstate_dir = {:?}\nstripe_dirs = {directories:?}\n[control]\nlisten = \"{address}:0\"\n{rails}",
            root.path().join("state")
        );
        let (config, _) = server_config::parse(&text, "test", "n1").unwrap_or_else(|error| panic!("{error}"));
        for directory in &directories {
            std::fs::create_dir(directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
        }
        store::init(&directories).unwrap_or_else(|error| panic!("{error}"));
        let mut server = Server { daemon: None, config, _root: root };
        server.serve();
        server
    }

    fn serve(&mut self) {
        // A crash within a process leaves threads and sockets that end a moment later, which a real one does not.
        let daemon = wait::eventually("the server starts", wait::SOON, || {
            Daemon::start(&self.config).map_err(|error| error.to_string())
        });
        self.config.control = daemon.control_addresses().to_vec();
        for (rail, address) in self.config.rails.iter_mut().zip(daemon.rail_addresses()) {
            rail.listen = address;
        }
        self.daemon = Some(daemon);
    }

    fn restart(&mut self, crash: bool) {
        match self.daemon.take() {
            Some(daemon) if crash => daemon.crash(),
            Some(daemon) => daemon.stop().unwrap_or_else(|error| panic!("the server did not stop: {error}")),
            None => {}
        }
        self.serve();
    }

    fn client(&self) -> Arc<Client> {
        let addresses = vec![self.config.control[0].to_string()];
        // A cache that a few objects fill: extents come and go.
        let config = Config { addresses, arena: ARENA, ..Config::default() };
        Client::connect(config).unwrap_or_else(|error| panic!("{error}"))
    }
}

struct Bytes(Content);
impl Source for Bytes {
    fn size(&self) -> u64 {
        self.0.size
    }
    fn read_exact_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        if offset + buffer.len() as u64 > self.0.size {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        crate::data::fill(self.0.seed, offset, buffer);
        Ok(())
    }
}

/// Puts through a client; what became of it as the model says it.
///
/// # Errors
/// It was refused.
pub fn put(client: &Client, name: &ObjectName, content: &Content, if_version: Option<u64>) -> Result<u64, Refusal> {
    let options = PutOptions {
        attributes: Attributes { mode: content.mode, mtime_seconds: 1_000_000_000, mtime_nanoseconds: 5, owner: None },
        stripe_size: content.stripe,
        page_size: u32::try_from(PAGE).unwrap_or(0),
        width: content.width,
        if_version,
    };
    match client.put(name, Arc::new(Bytes(content.clone())), options) {
        Ok(done) if done.superseded => Err(Refusal::Other("superseded, with nobody else about".to_owned())),
        Ok(done) => Ok(done.version),
        Err(error) => Err(refusal(&error)),
    }
}

/// What the model calls an error of a put or delete.
pub fn refusal(error: &Error) -> Refusal {
    match error {
        Error::Conflict { .. } => Refusal::Conflict,
        Error::NotFound(_) => Refusal::NotFound,
        other => Refusal::Other(other.to_string()),
    }
}

/// See the module.
pub struct Bare {
    mode: Mode,
    server: Server,
    /// Puts and deletes.
    writer: Arc<Client>,
    client: Arc<Client>,
    clock: Clock,
    fs: FileSystem,
    namespace: Namespace,
    sequences: u64,
    thread: u64,
    /// Handle and inode.
    open: [Option<(u64, u64)>; DESCRIPTORS],
}

impl std::fmt::Debug for Bare {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bare").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}

/// What is done with an inode that was looked up.
type Act<'a, T> = dyn Fn(&FileSystem, u64, &Attr) -> Result<T, Errno> + 'a;

/// The answer of a call.
fn answer<T: Send + 'static>(call: impl FnOnce(Box<dyn FnOnce(Result<T, Errno>) + Send>)) -> Result<T, Errno> {
    let (send, receive) = channel();
    call(Box::new(move |result| {
        let _ = send.send(result);
    }));
    receive.recv_timeout(HANG).unwrap_or(Err(NO_ANSWER))
}

struct Lines {
    room: usize,
    plus: bool,
    lines: Vec<(Line, u64)>,
}

impl DirSink for Lines {
    fn plus(&self) -> bool {
        self.plus
    }
    fn is_full_for(&mut self, entry: &Emitted<'_>) -> bool {
        if self.lines.len() == self.room {
            return true;
        }
        let line = Line { name: entry.name.to_vec(), ino: entry.ino, directory: entry.kind == Kind::Directory };
        self.lines.push((line, entry.next));
        false
    }
}

fn stat(attr: &Attr) -> Stat {
    Stat { ino: attr.ino, directory: attr.kind == Kind::Directory, size: attr.size, mode: attr.perm.into() }
}

fn file_system(client: &Arc<Client>, namespace: &Namespace, mode: Mode, clock: Clock) -> FileSystem {
    let settings = Settings {
        namespace: namespace.clone(),
        root: None,
        owner: Owner::of(0, 0),
        entry_ttl: Duration::from_secs(1),
        metadata_ttl: Duration::ZERO,
        mounted_at: (0, 0),
        list_limit: railfs_proto::limits::METADATA_DEADLINE,
    };
    let fs = FileSystem::new(client.clone(), settings, Box::new(move || clock.now()));
    fs.agree(Choice { mode, ..Choice::default() });
    fs
}

fn namespace_of(thread: u64, number: u64) -> Namespace {
    Namespace::new(&format!("t{thread}-s{number}")).unwrap_or_else(|error| panic!("{error}"))
}

impl Bare {
    /// With a server of its own; every other thread's mode is `snapshot`.
    ///
    /// # Panics
    /// It does not start.
    pub fn new(thread: u64) -> Bare {
        let server = Server::start();
        let (writer, client) = (server.client(), server.client());
        let clock = Clock::start();
        let namespace = namespace_of(thread, 0);
        let mode = if thread.is_multiple_of(2) { Mode::Strict } else { Mode::Snapshot };
        let fs = file_system(&client, &namespace, mode, clock);
        Bare { mode, server, writer, client, clock, fs, namespace, sequences: 0, thread, open: Default::default() }
    }

    /// A new sequence, in a namespace of its own.
    pub fn begin(&mut self) {
        self.sequences += 1;
        self.open = Default::default();
        self.namespace = namespace_of(self.thread, self.sequences);
        self.fs = file_system(&self.client, &self.namespace, self.mode, self.clock);
    }

    /// Ends it.
    pub fn end(self) {
        self.writer.close();
        self.client.close();
    }

    fn name(&self, key: &[u8]) -> ObjectName {
        ObjectName::new(self.namespace.as_str(), key.to_vec()).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Looks every name on the way up, then does something with the last one, and FORGETs all of them; the last only where it
    /// is not to be kept, or failed.
    fn walk<T>(&self, key: &[u8], keep: bool, act: &Act<'_, T>) -> Result<T, Errno> {
        let mut seen = Vec::new();
        let found = (|| {
            let mut last = answer(|reply| self.fs.getattr(ROOT, reply)).map(|(attr, _)| attr)?;
            for part in key.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
                if last.kind == Kind::File {
                    return Err(Errno::NOTDIR); // The kernel does not ask.
                }
                last = answer(|reply| self.fs.lookup(last.ino, part, reply))?.attr;
                seen.push(last.ino);
            }
            act(&self.fs, last.ino, &last)
        })();
        if keep && found.is_ok() {
            seen.pop();
        }
        for ino in seen {
            self.fs.forget(ino, 1);
        }
        found
    }

    /// As the kernel walks a path: once more from the top after ESTALE.
    fn path<T>(&self, key: &[u8], keep: bool, act: &Act<'_, T>) -> Result<T, Errno> {
        match self.walk(key, keep, act) {
            Err(Errno::STALE) => self.walk(key, keep, act),
            other => other,
        }
    }

    fn handle(&self, descriptor: usize) -> Result<(u64, u64), Errno> {
        self.open[descriptor].ok_or(Errno::BADF)
    }

    /// One READ.
    fn read_once(&self, descriptor: usize, offset: u64, length: usize, purpose: Purpose) -> Result<Vec<u8>, Errno> {
        let (handle, _) = self.handle(descriptor)?;
        let size = u32::try_from(length).map_err(|_| Errno::INVAL)?;
        let (send, receive) = channel();
        self.fs.read(handle, offset, size, purpose, move |bytes| {
            let _ = send.send(bytes.map(<[u8]>::to_vec));
        });
        receive.recv_timeout(HANG).unwrap_or(Err(NO_ANSWER))
    }
}

fn list(fs: &FileSystem, ino: u64, room: usize, plus: bool) -> Result<Vec<Line>, Errno> {
    let handle = answer(|reply| fs.opendir(ino, reply))?;
    let mut all = Vec::new();
    let mut offset = 0;
    let result = loop {
        let (send, receive) = channel();
        fs.readdir(handle, offset, Lines { room, plus, lines: Vec::new() }, move |sink, result| {
            let _ = send.send(result.map(|()| sink.lines));
        });
        match receive.recv_timeout(HANG).unwrap_or(Err(NO_ANSWER)) {
            Ok(lines) if lines.is_empty() => break Ok(()),
            Ok(lines) => {
                for (line, next) in lines {
                    offset = next;
                    let dots = line.name == b"." || line.name == b"..";
                    if plus && !dots {
                        fs.forget(line.ino, 1);
                    }
                    if !dots {
                        all.push(line);
                    }
                }
            }
            Err(errno) => break Err(errno),
        }
    };
    fs.releasedir(handle);
    result.map(|()| all)
}

impl Subject for Bare {
    fn promise(&self) -> Promise {
        match self.mode {
            Mode::Strict => Promise::Strict,
            Mode::Snapshot => Promise::Snapshot,
        }
    }
    fn numbers(&self) -> bool {
        true
    }
    fn residue(&self) -> Duration {
        Duration::ZERO
    }
    fn put(&mut self, key: &[u8], content: &Content, if_version: Option<u64>) -> Result<u64, Refusal> {
        put(&self.writer, &self.name(key), content, if_version)
    }
    fn delete(&mut self, key: &[u8], if_version: Option<u64>) -> Result<(), Refusal> {
        self.writer.delete(&self.name(key), if_version).map(|_| ()).map_err(|error| refusal(&error))
    }

    fn list(&mut self, key: &[u8], room: usize, plus: bool) -> Result<Vec<Line>, Errno> {
        let lines = self.path(key, false, &|fs, ino, attr| match attr.kind {
            Kind::File => Err(Errno::NOTDIR),
            Kind::Directory => list(fs, ino, room, plus),
        })?;
        let sort = |line: &Line| {
            let mut key = line.name.clone();
            key.extend(line.directory.then_some(b'/'));
            key
        };
        // By raw bytes, a directory as its name and a '/'.
        if lines.is_sorted_by_key(sort) { Ok(lines) } else { Err(Errno::NOTUNIQ) }
    }

    fn stat(&mut self, key: &[u8]) -> Result<Stat, Errno> {
        self.path(key, false, &|fs, ino, _| answer(|reply| fs.getattr(ino, reply)).map(|(attr, _)| stat(&attr)))
    }

    fn open(&mut self, descriptor: usize, key: &[u8]) -> Result<(), Errno> {
        // It stays known as long as it is open.
        let opened = self.path(key, true, &|fs, ino, attr| {
            if attr.kind == Kind::Directory {
                return Err(Errno::ISDIR);
            }
            answer(|reply| fs.open(ino, Access::Read, reply)).map(|handle| (handle, ino))
        })?;
        self.open[descriptor] = Some(opened);
        Ok(())
    }
    fn close(&mut self, descriptor: usize) {
        if let Some((handle, ino)) = self.open[descriptor].take() {
            self.fs.release(handle);
            self.fs.forget(ino, 1);
        }
    }
    fn fstat(&mut self, descriptor: usize) -> Result<Stat, Errno> {
        let (_, ino) = self.handle(descriptor)?;
        answer(|reply| self.fs.getattr(ino, reply)).map(|(attr, _)| stat(&attr))
    }
    fn read(&mut self, descriptor: usize, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
        self.read_once(descriptor, offset, length, Purpose::Read)
    }
    fn mapped(&mut self, descriptor: usize, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
        self.read_once(descriptor, offset, length, Purpose::Fill)
    }
    fn seek(&mut self, descriptor: usize, offset: u64, data: bool) -> Result<u64, Errno> {
        let (handle, _) = self.handle(descriptor)?;
        let offset = i64::try_from(offset).map_err(|_| Errno::INVAL)?;
        let found = self.fs.seek(handle, offset, if data { Seek::Data } else { Seek::Hole })?;
        u64::try_from(found).map_err(|_| Errno::OVERFLOW)
    }
    fn write(&mut self, key: &[u8]) -> Option<Errno> {
        let opened = self.path(key, false, &|fs, ino, attr| {
            if attr.kind == Kind::Directory {
                return Err(Errno::ISDIR); // The kernel does not ask.
            }
            answer(|reply| fs.open(ino, Access::Write, reply))
        });
        opened.err().or(Some(Errno::ALREADY)) // Never opened.
    }

    fn remount(&mut self) {
        self.client.close();
        self.client = self.server.client();
        self.fs = file_system(&self.client, &self.namespace, self.mode, self.clock);
        self.open = Default::default();
    }
    fn restart(&mut self, crash: bool) {
        self.server.restart(crash);
    }

    fn damage(&mut self, key: &[u8]) -> Result<(), String> {
        let name = self.name(key);
        let found = Client::wait(|done| self.writer.lookup(&name, done)).map_err(|error| error.to_string())?;
        let Found::Object(object) = found else { return Err("it is not there".to_owned()) };
        damage(&self.server.config.stripe_dirs, object.descriptor.version)
    }

    fn quiet(&mut self) -> Result<(), String> {
        let end = Instant::now() + HANG;
        loop {
            let activity = self.fs.activity();
            let status = self.client.status();
            let busy: Vec<_> =
                status.counters.iter().filter(|(name, value)| name.ends_with("_now") && *value > 0).collect();
            let open = activity == Activity::default();
            if open && busy.is_empty() && status.arena.exposed == 0 && status.arena.quarantined == 0 {
                return Ok(());
            }
            if Instant::now() > end {
                return Err(format!("left behind: {activity:?}, {busy:?}, {:?}", status.arena));
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

/// Changes the first byte of a version's first component, wherever it lies.
///
/// # Errors
/// It is nowhere, or cannot be changed.
pub fn damage(directories: &[PathBuf], version: u64) -> Result<(), String> {
    let name = format!("components/{version}.0");
    let path = directories.iter().map(|directory| directory.join(&name)).find(|path| path.exists());
    let path = path.ok_or_else(|| format!("{name} is in none of {directories:?}"))?;
    let change = || -> std::io::Result<()> {
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&path)?;
        let mut byte = [0];
        file.read_exact_at(&mut byte, DATA_OFFSET)?;
        file.write_all_at(&[byte[0] ^ 0x10], DATA_OFFSET)
    };
    change().map_err(|error| format!("{}: {error}", path.display()))
}
