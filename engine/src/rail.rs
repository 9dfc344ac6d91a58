//! Rails: live paths between a client and a server, of any kind, behind one trait.
//!
//! Guarantees:
//! * Messages are opaque to a rail; it knows no objects.
//! * Every submission gets exactly one [`Event::Replied`] or [`Event::Failed`], and never from inside
//!   [`Rail::submit`] or [`Rail::cancel`] (callers may hold locks there).
//! * A landing's memory comes back exactly once: with that event as [`Hand::Fenced`], or later as [`Event::Released`]
//!   where the event said [`Hand::Held`]. Until then others may still write to it (I4).
//! * A reply is taken only on the connection instance that carried the request, with its session and id (I5). Work of a
//!   dead connection fails; it is never moved to the next one.
//! * Every submission ends by its deadline (I9); memory may come back later.

pub mod backoff;
pub(crate) mod land;
pub mod liveness;
mod pending;
pub mod sim;
pub mod slab;
pub mod tcp;
pub(crate) mod totals;
#[cfg(feature = "rdma")]
pub mod verbs;

use crate::clock::Time;
use crate::memory::{Fenced, Free};
use bytes::Bytes;
use std::fmt::Debug;
use std::fs::File;
use std::sync::Arc;

/// How a client opens its memory to the server of an RDMA rail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Opening {
    /// By memory windows where the device has them (type 2B), else by the second way.
    #[default]
    Auto,
    /// By memory windows; a device without them is refused.
    Windows,
    /// The second way: the whole arena has one key for the server. A landing that was given up takes the connection with it.
    OpenArena,
}

/// What this process has of RDMA devices now, for status: names and values.
pub fn rdma_counters() -> [(&'static str, u64); 4] {
    #[cfg(feature = "rdma")]
    let crate::verbs::Live { pairs, windows, regions, bytes } = crate::verbs::live();
    #[cfg(not(feature = "rdma"))]
    let [pairs, windows, regions, bytes] = [0; 4];
    [
        ("rdma_queue_pairs_now", pairs),
        ("rdma_windows_now", windows),
        ("rdma_regions_now", regions),
        ("rdma_pinned_bytes_now", bytes),
    ]
}

/// Which of a rail's lanes a message takes, so that checks never queue behind stripes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Fetches and pulls.
    Bulk,
    /// Messages of 16 KiB and less: checks, lookups.
    Small,
}

/// Where the reply's bulk may land.
#[derive(Debug)]
pub struct Landing {
    /// Ours until the rail takes it; it is exposed there.
    pub extent: Free,
    /// Bytes, at most the extent's size. A reply with more bulk is refused and the connection with it.
    pub length: u32,
}

/// One request.
#[derive(Debug)]
pub struct Submission {
    /// Unique among everything ever submitted to this rail.
    pub id: u64,
    /// See [`Lane`].
    pub lane: Lane,
    /// An encoded `RailRequest`.
    pub message: Bytes,
    /// For a reply with bulk.
    pub landing: Option<Landing>,
    /// When the submission fails with [`Cause::Expired`] at the latest.
    pub deadline: Time,
}

/// Version slots of a server that can be READ through a rail: see [`Event::Slots`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// Whose they are.
    pub incarnation: u64,
    /// How many.
    pub count: u64,
}

/// Most words that one look may ask for.
pub const MAX_LOOK: usize = 16;

/// Words of version slots, to be READ from the server's memory without its software taking part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Look {
    /// Unique among everything ever submitted to this rail.
    pub id: u64,
    /// Of which run of the server.
    pub incarnation: u64,
    /// Which slots: 1 to [`MAX_LOOK`], each below [`Slots::count`].
    pub slots: Vec<u32>,
    /// When it fails with [`Cause::Expired`] at the latest.
    pub deadline: Time,
}

/// What becomes of a landing's memory.
#[derive(Debug)]
pub enum Hand {
    /// There was no landing.
    None,
    /// Fenced: nobody else can write to it any more.
    Fenced(Fenced),
    /// Somebody may still write to it; the rail keeps it, [`Event::Released`] follows.
    Held,
}

/// Why a submission failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Its deadline came.
    Expired,
    /// [`Rail::cancel`].
    Cancelled,
    /// The rail was not up.
    Down,
    /// The connection died, with what is known of why.
    Disconnected(String),
    /// Over a budget of the rail (requests in flight, message size): nothing was sent.
    Refused(String),
}

/// What a rail is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Trying to connect (first time or again).
    Connecting,
    /// Both lanes are joined.
    Up,
    /// An answer has been due for longer than `limits::RAIL_SUSPECT`; it is still connected.
    Silent,
    /// Not connected; will be tried again after a while.
    Down(String),
}

/// What a rail tells.
#[derive(Debug)]
pub enum Event {
    /// The reply came; `bulk` bytes of it are in the extent.
    Replied {
        /// Of the submission.
        id: u64,
        /// An encoded `RailReply`.
        message: Bytes,
        /// Bytes that landed.
        bulk: u32,
        /// The landing's memory.
        extent: Option<Fenced>,
    },
    /// No reply will come.
    Failed {
        /// Of the submission.
        id: u64,
        /// Why.
        cause: Cause,
        /// The landing's memory.
        hand: Hand,
    },
    /// The fence of a [`Hand::Held`] landing has come.
    Released {
        /// Of the submission.
        id: u64,
        /// Its memory.
        extent: Fenced,
    },
    /// The words of a [`Look`], in its order, as the server's memory had them at some moment after it was asked for. One may be
    /// torn, or of a server that is no more: whoever asked judges that.
    Looked {
        /// Of the look.
        id: u64,
        /// The words.
        words: Vec<u64>,
    },
    /// The slots that can be READ from now on, or none. A rail that goes down takes them with it.
    Slots(Option<Slots>),
    /// The rail changed its state.
    State(State),
}

/// Who is told. Called on the rail's own threads: it must not block, nor copy or check object bytes there.
pub trait Events: Send + Sync {
    /// See [`Event`].
    fn event(&self, event: Event);
}

/// What a rail has done so far and does now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bulk bytes that arrived and were accepted (also counted while a bulk is still arriving).
    pub bulk_received: u64,
    /// Bulk bytes sent.
    pub bulk_sent: u64,
    /// Requests submitted here.
    pub submitted: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests in flight now.
    pub in_flight: u64,
    /// Bytes of landings that the rail holds now.
    pub held_bytes: u64,
    /// Times the rail came up.
    pub connects: u64,
    /// Signs of life asked for on connections that were quiet while something was awaited.
    pub pings: u64,
    /// Frames dropped because nobody waits for them.
    pub stale: u64,
}

/// One rail, or (on a server) one connection of a client's rail.
pub trait Rail: Send + Sync + Debug {
    /// Takes a request. Never blocks, never calls [`Events`] from inside.
    fn submit(&self, submission: Submission);
    /// READs slot words; gives exactly one [`Event::Looked`] or [`Event::Failed`]. Only for rails that told [`Event::Slots`]; the
    /// others know nothing of it. Never blocks, never calls [`Events`] from inside.
    fn look(&self, _look: Look) {}
    /// Gives up waiting for a reply or a look. Unknown ids are ignored.
    fn cancel(&self, id: u64);
    /// See [`Counters`].
    fn counters(&self) -> Counters;
    /// See [`State`].
    fn state(&self) -> State;
    /// Ends the rail: everything in flight fails, all memory is released, threads have ended when this returns
    /// (bounded by a second; memory that could not be fenced stays in quarantine).
    fn close(&self);
}

/// The bulk of a reply.
#[derive(Debug)]
pub enum Bulk {
    /// None.
    None,
    /// From memory.
    Bytes(Bytes),
    /// From a file, by whatever moves bytes cheapest. Held open until it was sent.
    File {
        /// Open for reading.
        file: Arc<File>,
        /// From here.
        offset: u64,
        /// So many bytes; where the file yields fewer, zeros are sent and [`Sent`] says so.
        length: u32,
        /// For rails that have the bytes in memory on their way: whether they are what was put. One that fails is an
        /// error in [`Sent`]. Rails that move bytes without looking leave it out: the reader checks in any case.
        check: Option<Check>,
        /// For rails that keep what they read for whoever asks for the same.
        kept: Option<slab::Kept>,
    },
}

type Passes = dyn Fn(&[u8]) -> bool + Send;

/// See [`Bulk::File`].
pub struct Check(Box<Passes>);

impl Check {
    /// By this function, which gets all bytes.
    pub fn new(passes: impl Fn(&[u8]) -> bool + Send + 'static) -> Check {
        Check(Box::new(passes))
    }
    /// Whether these are the right ones.
    pub fn passes(&self, bytes: &[u8]) -> bool {
        (self.0)(bytes)
    }
}

impl Debug for Check {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Check")
    }
}

/// What became of a reply's bulk.
#[derive(Debug)]
pub struct Sent {
    /// Bytes of the real bulk that went out (zeros that stand in are not counted).
    pub bytes: u32,
    /// What the disk said, when it failed.
    pub error: Option<std::io::Error>,
}

/// Answers one request, once, from any thread. Dropping it unanswered leaves the requester to its deadline.
pub trait Replier: Send {
    /// Queues the reply and returns; `message` is asked for when the bulk has gone out (at once where there is none), on
    /// a rail thread or from inside this call: it must be quick, and take no lock that is held here. Nothing happens
    /// when the connection is gone.
    fn reply(self: Box<Self>, bulk: Bulk, message: Box<dyn FnOnce(Sent) -> Bytes + Send>);
}

/// A request from the other side.
pub struct Incoming {
    /// An encoded `RailRequest`.
    pub message: Bytes,
    /// For the answer.
    pub replier: Box<dyn Replier>,
}

/// Who serves requests from the other side. Called on a rail thread, in order of arrival on a connection.
pub trait Handler: Send + Sync {
    /// Must not block for long; heavy work goes to another thread with the replier.
    fn request(&self, incoming: Incoming);
}
