//! A client of one store: control connection, rails, arena, cache, the read path and puts, behind plain calls.
//!
//! Calls with a `done` never block: it is called once, on this thread or on one of the client's, by the deadline at the
//! latest. Calls without block by at most their deadline (never use them on a FUSE thread).

use crate::error::{Error, Result};
use railfs_proto::descriptor::{Attributes, Descriptor, Id, Proof};
use railfs_proto::name::ObjectName;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How to reach a store and what to use for it.
#[derive(Clone, Debug)]
pub struct Config {
    /// "host:port" of control listeners of one node, tried in order.
    pub addresses: Vec<String>,
    /// Bytes of the arena.
    pub arena: u64,
    /// Bind to this store: another one at the address is an error.
    pub store: Option<Id>,
    /// Threads that verify and answer what could not be answered at once.
    pub workers: usize,
    /// A read's limit.
    pub read_deadline: Duration,
    /// A lookup's, list's and check's limit.
    pub metadata_deadline: Duration,
    /// The limit of connecting.
    pub connect_deadline: Duration,
    /// Bytes read ahead at most per sequential reader; 0: none.
    pub readahead: u64,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            addresses: Vec::new(),
            arena: 256 << 20,
            store: None,
            workers: 2,
            read_deadline: railfs_proto::limits::READ_DEADLINE,
            metadata_deadline: railfs_proto::limits::METADATA_DEADLINE,
            connect_deadline: railfs_proto::limits::CONNECT_DEADLINE,
            readahead: 16 << 20,
        }
    }
}

/// What a name means now.
#[derive(Clone, Debug)]
pub enum Found {
    /// An object.
    Object(Arc<Object>),
    /// Something lies below this name. Seconds and nanoseconds of the namespace's last commit.
    Directory(i64, u32),
    /// Nothing.
    Absent,
}

/// One version of one object, with what is needed to check and read it.
#[derive(Debug)]
pub struct Object {
    /// Its name when it was looked up.
    pub name: ObjectName,
    /// Version, attributes, layout, components.
    pub descriptor: Descriptor,
    proof: Mutex<Proof>,
    stale: AtomicBool,
}

impl Object {
    /// What a lookup found.
    pub fn new(name: ObjectName, descriptor: Descriptor, proof: Proof) -> Object {
        Object { name, descriptor, proof: Mutex::new(proof), stale: AtomicBool::new(false) }
    }
    /// Under what slot value the version was last seen current.
    pub fn proof(&self) -> Proof {
        self.proof.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
    pub(crate) fn set_proof(&self, proof: Proof) {
        *self.proof.lock().unwrap_or_else(PoisonError::into_inner) = proof;
    }
    /// Whether the version was seen superseded. It never becomes current again.
    pub fn is_stale(&self) -> bool {
        self.stale.load(Ordering::Acquire)
    }
    pub(crate) fn set_stale(&self) {
        self.stale.store(true, Ordering::Release);
    }
    pub(crate) fn stale_error(&self) -> Error {
        Error::Stale { object: self.name.to_string(), version: self.descriptor.version }
    }
}

/// One page of a list.
#[derive(Clone, Debug)]
pub struct Listing {
    /// By raw bytes of the key, a directory sorting as its key and '/'.
    pub entries: Vec<ListEntry>,
    /// Where to go on, when there is more.
    pub next: Option<Vec<u8>>,
    /// Of the namespace's last commit.
    pub mtime: (i64, u32),
}

/// A key, or a directory of keys.
#[derive(Clone, Debug)]
pub struct ListEntry {
    /// The whole key, without a trailing '/'.
    pub key: Vec<u8>,
    /// `None`: a directory.
    pub object: Option<Descriptor>,
}

/// What to list.
#[derive(Clone, Debug)]
pub struct ListQuery {
    /// Which namespace.
    pub namespace: String,
    /// Keys that start with these bytes ("" or "dir/").
    pub prefix: Vec<u8>,
    /// Fold what lies below the next '/' into directories.
    pub delimited: bool,
    /// Only what comes after (a [`Listing::next`]).
    pub after: Vec<u8>,
    /// Entries at most (0: the server's default).
    pub limit: u32,
}

/// Where the bytes of a put come from. Called from several threads.
pub trait Source: Send + Sync {
    /// Bytes; it must not change.
    fn size(&self) -> u64;
    /// Fills the buffer from `offset`. Fewer bytes than asked for are an error: the source has shrunk.
    fn read_exact_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()>;
}

/// How to put.
#[derive(Clone, Copy, Debug)]
pub struct PutOptions {
    /// Mode and modification time.
    pub attributes: Attributes,
    /// 0: the server's default.
    pub stripe_size: u32,
    /// 0: the server's default.
    pub page_size: u32,
    /// 0: the server's default.
    pub width: u32,
    /// Only if this version is current (0: only if the name is absent).
    pub if_version: Option<u64>,
}

/// What became of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutDone {
    /// The version it made.
    pub version: u64,
    /// A newer version was there already: this put is ordered just before it.
    pub superseded: bool,
}

/// Gets the answer of a read: exactly the bytes asked for (fewer only at the end of the object).
pub type ReadReply = Box<dyn FnOnce(Result<&[u8]>) + Send>;
/// Gets the answer of another call.
pub type Done<T> = Box<dyn FnOnce(Result<T>) + Send>;

/// State of one rail, for `status`.
#[derive(Clone, Debug)]
pub struct RailStatus {
    /// "fabric address".
    pub name: String,
    /// The listener's address.
    pub address: String,
    /// Its fabric.
    pub fabric: String,
    /// "tcp".
    pub transport: String,
    /// "connecting", "up", "suspect", "probing" or "down".
    pub state: String,
    /// Why it is not up; empty when it is.
    pub reason: String,
    /// See there.
    pub counters: crate::rail::Counters,
    /// Measured, bytes per second; 0: not yet.
    pub bandwidth: u64,
    /// Pages it brought that failed their check.
    pub bad_pages: u64,
}

/// Everything `railfs status` shows of a client.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// Store id.
    pub store: String,
    /// Node name.
    pub node: String,
    /// Its incarnation.
    pub incarnation: u64,
    /// Control address in use; empty when there is none.
    pub control: String,
    /// Rails.
    pub rails: Vec<RailStatus>,
    /// Arena bytes: total, free, exposed, quarantined.
    pub arena: crate::memory::ArenaStats,
    /// Bytes in the cache.
    pub cached_bytes: u64,
    /// Name and value, a public contract (docs/metrics.md).
    pub counters: Vec<(&'static str, u64)>,
}

/// The client. One per mount or command.
#[derive(Debug)]
pub struct Client {}

impl Client {
    /// Says hello and brings up at least one rail, within `connect_deadline`.
    pub fn connect(_config: Config) -> Result<Arc<Client>> {
        Err(Error::Closed)
    }
    /// What the name means now (strict: the answer was true after the call began).
    pub fn lookup(&self, _name: &ObjectName, done: Done<Found>) {
        done(Err(Error::Closed))
    }
    /// One page of a list. `NotFound` when nobody ever wrote to the namespace.
    pub fn list(&self, _query: ListQuery, done: Done<Listing>) {
        done(Err(Error::Closed))
    }
    /// Whether the object's version is current, by a check that begins now. `Stale` when it is not.
    pub fn check(&self, _object: &Arc<Object>, done: Done<()>) {
        done(Err(Error::Closed))
    }
    /// Reads. `handle` tells readers apart (readahead, fairness). The reply may be called before this returns.
    pub fn read(&self, _object: &Arc<Object>, _handle: u64, _offset: u64, _length: u32, reply: ReadReply) {
        reply(Err(Error::Closed))
    }
    /// The handle is closed: what was read ahead for it is no longer wanted.
    pub fn release(&self, _handle: u64) {}
    /// Puts and waits until the object is durable and visible.
    pub fn put(&self, _name: &ObjectName, _source: Arc<dyn Source>, _options: PutOptions) -> Result<PutDone> {
        Err(Error::Closed)
    }
    /// Deletes; returns the version that was there.
    pub fn delete(&self, _name: &ObjectName, _if_version: Option<u64>) -> Result<u64> {
        Err(Error::Closed)
    }
    /// The server's own account.
    pub fn server_status(&self) -> Result<railfs_proto::v1::StatusReply> {
        Err(Error::Closed)
    }
    /// The server's account without blocking (for statfs).
    pub fn server_status_then(&self, done: Done<railfs_proto::v1::StatusReply>) {
        done(Err(Error::Closed))
    }
    /// This client's account. Never blocks on the network.
    pub fn status(&self) -> Status {
        Status::default()
    }
    /// Waits for a call that takes a `done`.
    pub fn wait<T: Send + 'static>(call: impl FnOnce(Done<T>)) -> Result<T> {
        let (send, receive) = std::sync::mpsc::sync_channel(1);
        call(Box::new(move |result| {
            let _ = send.send(result);
        }));
        receive.recv().unwrap_or(Err(Error::Closed))
    }
    /// Ends everything within a second or two: what is in flight fails, memory is released.
    pub fn close(&self) {}
}
