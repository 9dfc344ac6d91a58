//! The one error of the engine: what an operator needs (object, stripe, directory, rail, peer, limit), in one line.

use railfs_proto::descriptor::Id;
use std::time::Duration;

/// See the variants. Mapped to errno in one place in `fs`.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// Nothing has this name.
    #[error("{0}: not found")]
    NotFound(String),
    /// The version is not current any more, or was reclaimed.
    #[error("{object}: version {version} was superseded")]
    Stale {
        /// Its name.
        object: String,
        /// The version that was asked for.
        version: u64,
    },
    /// Nobody answers at any address.
    #[error("{peer} cannot be reached: {detail}")]
    Unreachable {
        /// Address or node.
        peer: String,
        /// What was tried, and what it said.
        detail: String,
    },
    /// The deadline came.
    #[error("{what}: no answer within {after:?}{detail}")]
    TimedOut {
        /// The operation and its object.
        what: String,
        /// The limit.
        after: Duration,
        /// Empty, or ": " and what is known of why.
        detail: String,
    },
    /// Bytes failed their check on every rail, or the server says that they are damaged or missing.
    #[error(
        "{object}: version {version} is damaged: stripe {stripe}, component {component} in directory {directory}, by rail {rail}: {detail}"
    )]
    Damaged {
        /// Its name.
        object: String,
        /// Which version.
        version: u64,
        /// Stripe number.
        stripe: u64,
        /// Component.
        component: u32,
        /// Stripe directory.
        directory: Id,
        /// The rail that brought it last.
        rail: String,
        /// What was wrong.
        detail: String,
    },
    /// A budget of this side: nothing was sent.
    #[error("{what} needs {need} bytes where the limit is {limit}: {cure}")]
    OverBudget {
        /// The operation.
        what: String,
        /// Bytes.
        need: u64,
        /// Bytes.
        limit: u64,
        /// What to do.
        cure: String,
    },
    /// The other side's store is not the one this client is bound to.
    #[error("{address} serves store {found}, this client is bound to store {expected}")]
    WrongStore {
        /// Where.
        address: String,
        /// There.
        found: Id,
        /// Here.
        expected: Id,
    },
    /// The condition of a put or delete does not hold, or the name is taken by another kind.
    #[error("{object}: conflict: {detail}")]
    Conflict {
        /// Its name.
        object: String,
        /// What is there.
        detail: String,
    },
    /// A stripe directory is full.
    #[error("no space: {0}")]
    NoSpace(String),
    /// The store takes no puts now.
    #[error("store is read-only: {0}")]
    ReadOnly(String),
    /// Not allowed.
    #[error("not allowed: {0}")]
    Denied(String),
    /// The input is wrong.
    #[error("{0}")]
    Invalid(String),
    /// The peer said something that this version does not accept.
    #[error("{peer} sent a bad answer: {detail}")]
    BadAnswer {
        /// Who.
        peer: String,
        /// What.
        detail: String,
    },
    /// No common protocol version; the message names both.
    #[error("{0}")]
    Protocol(String),
    /// The put was given up.
    #[error("put was aborted: {0}")]
    Aborted(String),
    /// A local file or socket.
    #[error("{what}: {detail}")]
    Io {
        /// Path or operation.
        what: String,
        /// What the system said.
        detail: String,
    },
    /// The client is being closed.
    #[error("the client is closed")]
    Closed,
}

/// What the engine's calls return.
pub type Result<T> = std::result::Result<T, Error>;
