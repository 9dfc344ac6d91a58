//! Verbs rails: the rail trait over reliable queue pairs (RDMA).
//!
//! Guarantees:
//! * A client's memory is open to the server for one request at a time: a memory window is bound over the landing and the
//!   request sent in one post; the server WRITEs through it and answers by SEND with invalidate on the same queue pair. By
//!   itself the arena's registration gives no remote rights at all (I7). Of the server's memory the version slots are open, to
//!   READs through the queue pair for small messages, and nothing else.
//! * The fences (I4): the reply's receive that takes the window's key away; our own invalidation, completed with success; the
//!   window freed or the queue pair destroyed with return code 0. Until one of them has come the landing is held, and if none
//!   comes it stays in quarantine.
//! * Whoever gives up says so (`Cancel`); the server then writes nothing more for that request and says so (`Dropped`). Only
//!   where that answer does not come is the window taken away from under the server, which costs the connection if it writes
//!   after all; the rail comes back with new queue pairs.
//! * What a server pulls (puts) it READs: the client opens the bytes for one request, by a window that gives reading only, and
//!   keeps them until the server's `Taken`, which takes the key away, has come. Towards a side that does not know this they go
//!   in messages.
//! * Every message takes a receive at the other side: credits are counted, so that it always has one. Every queue is as deep
//!   as what may be posted to it.
//! * One completion queue and one thread per connection; submitters post themselves and never wait for the network.

mod candidates;
mod choose;
mod client;
mod credit;
#[cfg(test)]
mod failover_tests;
mod faults;
#[cfg(test)]
mod fence_tests;
mod group;
mod incoming;
mod lane;
mod link;
mod listener;
mod looks;
#[cfg(test)]
mod odd_tests;
mod offers;
mod posted;
mod prepare;
#[cfg(test)]
mod refused_tests;
mod retire;
mod source;
mod watch;

pub use candidates::candidates;
pub use choose::{Candidate, Matched, Wanted, choose_gid, match_devices};
pub use client::{Opened, VerbsRail};
pub use listener::{VerbsListener, VerbsListenerCounters};

pub use super::Opening;
use super::slab::Slab;
use super::tcp::Limits;
use crate::memory::Arena;
use crate::memory::ledger::Ledger;
use railfs_proto::v1::{JoinRequest, VerbsEnd};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// Queue pairs for bulk of a client's rail.
pub const BULK_PAIRS: u8 = 2;
/// Bytes of one message on a queue pair: 256 page checksums and their frame fit.
pub(crate) const PIECE: u32 = 4096;
/// Receives on each queue pair, and messages under way on it, where the device can have so many.
pub(crate) const DEPTH: u16 = 64;
/// The fewest that the other side accepts.
const LEAST_DEPTH: u16 = 8;
/// READs under way on each queue pair, at most.
pub(crate) const READS: u8 = 16;
/// Frames that may wait to be sent on a queue pair beside its own requests: answers to far more requests than a side that counts
/// them has under way, and every word beside them.
const QUEUED: usize = 4096;
/// Registered bytes of the messages of a client's rail.
pub const MESSAGES: u64 = (BULK_PAIRS as u64 + 1) * 2 * DEPTH as u64 * PIECE as u64 + looks::BYTES as u64;
/// How long bytes that were offered wait for the server's word that it has taken them; then the connection ends.
const OFFERED: Duration = Duration::from_secs(30);
/// How long a landing that was given up waits for the server's word before its window is taken away.
const GRACE: Duration = Duration::from_millis(250);

/// How a client reaches one verbs listener.
#[derive(Clone, Debug)]
pub struct VerbsRailConfig {
    /// For logs, errors and thread names.
    pub name: String,
    /// The local device.
    pub device: String,
    /// Its address: names the GID, which is looked up for every connection.
    pub address: IpAddr,
    /// The listener's address, for logs.
    pub remote: String,
    /// The listener's id, as hello said.
    pub listener: u32,
    /// Queue pairs for bulk, 1 to 16; one more is for small messages.
    pub bulk_pairs: u8,
    /// See [`Opening`].
    pub opening: Opening,
    /// See [`Limits`]; what is about sockets means nothing here.
    pub limits: Limits,
    /// Spreads the reconnects of many clients.
    pub seed: u64,
}

/// Carries a join to the server, over the control connection.
pub trait Join: Send + Sync {
    /// Gives the session and the server's end. May block, up to a few seconds: only a thread that connects calls it.
    fn join(&self, listener: u32, end: VerbsEnd) -> Result<(u64, VerbsEnd), String>;
}

/// How a server listens for verbs rails.
#[derive(Clone, Debug)]
pub struct VerbsListenerConfig {
    /// For logs, errors and thread names.
    pub name: String,
    /// The device; none: the one that has the address.
    pub device: Option<String>,
    /// The device's address.
    pub address: IpAddr,
    /// Object bytes are read into it and WRITTEN from it: all listeners share it.
    pub slab: Arc<Slab>,
    /// Where bulk lands that clients offer: registered as well. None, or one that the device refuses: bulk is carried in messages.
    pub landing: Option<Arena>,
    /// What the listener registers is taken from it: the slab at start, and a part for the messages of each connection; one that
    /// finds none left is refused.
    pub ledger: Ledger,
    /// See [`Limits`].
    pub limits: Limits,
}

/// What a client says to join: what every rail says, and its queue pairs.
#[derive(Clone, Debug)]
pub struct VerbsJoin {
    /// Session, ticket, listener. The lane means nothing.
    pub join: JoinRequest,
    /// The client's end.
    pub end: VerbsEnd,
}
