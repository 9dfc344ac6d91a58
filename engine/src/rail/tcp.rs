//! TCP rails: the rail trait over stream sockets.
//!
//! Guarantees:
//! * Both sides use one symmetric, non-blocking connection with one thread; a submitter writes to the socket itself
//!   where nothing is queued, and never waits for anything but a short lock.
//! * Bulk bytes go from the socket straight into the extent, and from a file straight into the socket.
//! * The fence (I4): only the connection's own thread ever receives into a landing. Once the request has left the pending
//!   table that thread receives into scratch memory instead, so the landing comes back with the failure itself.
//! * Everything is bounded by [`Limits`] (I6), and every wait by a deadline (I9).

mod client;
mod connection;
pub(in crate::rail) mod listener;
mod out;
mod receive;
pub(in crate::rail) mod signal;
mod socket;

pub use client::TcpRail;
pub use listener::{ListenerCounters, TcpListener};

use super::{Events, Handler, Lane, Rail};
use railfs_proto::limits;
use railfs_proto::v1::{JoinRequest, Outcome};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

/// Bounds of one connection. The defaults are those of `railfs_proto::limits`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests that may wait for their replies on one connection; one more is refused.
    pub in_flight: usize,
    /// Requests of the other side that may be with the handler at once; more wait, then reading stops.
    pub serving: usize,
    /// Bytes of replies that may be queued before no further requests are given to the handler.
    pub reply_bytes: u64,
    /// Silence while an answer is due: the rail is suspect.
    pub suspect: Duration,
    /// Silence while an answer is due: the connection is retired.
    pub retire: Duration,
    /// Of queue pairs: posted work without any completion ends the connection after this long.
    pub completion: Duration,
    /// An idle connection is pinged this often.
    pub ping: Duration,
    /// Connecting and joining, each lane.
    pub connect: Duration,
    /// Sent bytes that the other side's kernel does not acknowledge end the connection after this long.
    pub user_timeout: Duration,
    /// Bytes asked of the kernel for each socket's buffers; 0 leaves them to its own tuning, and so does a kernel that
    /// would give less.
    pub socket_buffer: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            // More than the windows of a rail (`read::rails`) hold of the smallest fetches: a refused one is only sent again.
            in_flight: 1024,
            serving: 256,
            reply_bytes: 64 << 20,
            suspect: limits::RAIL_SUSPECT,
            retire: limits::RAIL_RETIRE,
            completion: limits::CQ_WAIT,
            ping: Duration::from_secs(1),
            connect: limits::CONNECT_DEADLINE,
            user_timeout: Duration::from_secs(5),
            socket_buffer: 4 << 20,
        }
    }
}

/// How a client reaches one listener.
#[derive(Clone, Debug)]
pub struct RailConfig {
    /// For logs, errors and thread names.
    pub name: String,
    /// Where the listener is.
    pub remote: SocketAddr,
    /// Connect from this address; none: the kernel chooses.
    pub local: Option<IpAddr>,
    /// The listener's id, as hello said; given to [`Tickets::join`].
    pub listener: u32,
    /// See [`Limits`].
    pub limits: Limits,
    /// Spreads the reconnects of many clients.
    pub seed: u64,
}

/// Where a rail gets what it needs to join.
pub trait Tickets: Send + Sync {
    /// The first frame of a new connection, with a fresh one-time ticket. May block (up to a few seconds): only a thread
    /// that connects calls it. An error is what the rail's state then says.
    fn join(&self, lane: Lane, listener: u32) -> Result<JoinRequest, String>;
}

/// How a server listens for rails.
#[derive(Clone, Debug)]
pub struct ListenerConfig {
    /// For logs, errors and thread names.
    pub name: String,
    /// Addresses to bind, at least one.
    pub listen: Vec<SocketAddr>,
    /// Connections in all; more are closed as they come.
    pub max_connections: usize,
    /// Connections that have not joined yet; one more closes the oldest of them.
    pub max_unjoined: usize,
    /// See [`Limits`].
    pub limits: Limits,
}

impl ListenerConfig {
    /// With the default limits.
    pub fn new(name: impl Into<String>, listen: Vec<SocketAddr>) -> ListenerConfig {
        ListenerConfig { name: name.into(), listen, max_connections: 4096, max_unjoined: 64, limits: Limits::default() }
    }
}

/// What an accepted connection becomes.
pub struct Joined {
    /// The session it belongs to: every frame carries it.
    pub session: u64,
    /// Told of what becomes of requests submitted on this connection (pulls). No `State` events come here: see
    /// [`Admit::closed`].
    pub events: Arc<dyn Events>,
    /// Serves the other side's requests.
    pub handler: Arc<dyn Handler>,
}

/// Who decides whether a connection may join. All calls come on the connection's own thread.
pub trait Admit: Send + Sync {
    /// Checks the ticket. An outcome that is not OK is sent, and the connection closed.
    fn join(&self, request: &JoinRequest, peer: SocketAddr) -> Result<Joined, Outcome>;
    /// The connection is joined and takes submissions; `connection` numbers it within the process.
    fn connected(&self, session: u64, lane: Lane, connection: u64, rail: Arc<dyn Rail>);
    /// The same connection has ended; everything in flight on it has failed before. Called once after
    /// [`Admit::connected`].
    fn closed(&self, session: u64, lane: Lane, connection: u64, why: &str);
}
