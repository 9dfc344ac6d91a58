//! Changes by number: what a watcher is told.
//!
//! Guarantees: a change's number is that of its commit, so numbers rise and never mean anything else; reading on from where
//! a reader stands gives every later change exactly once.

use super::{CatalogError, Time};
use railfs_proto::descriptor::Descriptor;
use railfs_proto::name::ObjectName;

/// Where a reader of changes stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangesAt {
    /// Number of the first commit that it has not seen.
    pub next: u64,
    /// Where that is in the log: first number of its segment, and byte. A catalog that has no log leaves it alone.
    pub(super) place: Option<(u64, u64)>,
}

impl ChangesAt {
    /// Before the commit with this number.
    pub fn number(next: u64) -> ChangesAt {
        ChangesAt { next, place: None }
    }
}

/// What was done to a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Done {
    /// A version became current.
    Put(Descriptor),
    /// The name became absent.
    Delete {
        /// The delete's own version.
        version: u64,
        /// The version that was there.
        deleted: u64,
    },
}

/// One commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Its number.
    pub sequence: u64,
    /// When it was committed.
    pub time: Time,
    /// To what name.
    pub name: ObjectName,
    /// What.
    pub done: Done,
}

/// Some changes, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changes {
    /// May be none although there are more: other commits were passed over.
    pub changes: Vec<Change>,
    /// Where to read on.
    pub at: ChangesAt,
    /// The oldest number that can be read.
    pub oldest: u64,
    /// The number of the last commit.
    pub latest: u64,
}

/// Why changes could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangesError {
    /// They are not kept any more.
    #[error(
        "changes from number {wanted} on are not kept any more: the oldest is {oldest}; list again, and watch from there"
    )]
    TooOld {
        /// What was asked for.
        wanted: u64,
        /// What there is.
        oldest: u64,
    },
    /// There was no such commit yet.
    #[error("there is no number {wanted} yet: the last one is {latest}; this is another store, or an older copy of it")]
    Beyond {
        /// What was asked for.
        wanted: u64,
        /// The last one.
        latest: u64,
    },
    /// The catalog cannot be read.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
}
