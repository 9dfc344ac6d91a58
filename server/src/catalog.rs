//! The catalog: which version every name has.
//!
//! Guarantees: a commit is durable before it is visible and visible at once or not at all; what was answered as
//! committed is never lost, what was answered as refused never happens; versions are never handed out twice, not even
//! after a crash; a put or delete that is repeated with its request id is done once. [`Catalog`] is the seam behind
//! which a distributed catalog can stand: every call is asynchronous and conditional on versions, answers carry a
//! monotone revision, and no transaction leaves it.
//!
//! [`LogCatalog`] is the implementation for one node: an append-only log is the truth, a `redb` file its index.
//! [`Publisher`] ties a catalog to version slots and is what lookups, checks and publishes go through.

mod batch;
mod changes;
mod checkpoint;
mod cutting;
mod epoch;
mod error;
mod growth;
mod history;
mod index;
mod keys;
mod log;
mod log_catalog;
mod mend;
mod publisher;
mod recovery;
mod replay;
mod slots;
mod start_error;
mod stray;
mod unreadable;
mod versions;

#[cfg(test)]
mod checkpoint_tests;
#[cfg(test)]
mod conformance;
#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod epoch_tests;
#[cfg(test)]
mod log_tests;
#[cfg(test)]
pub(crate) mod memory;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod unreadable_tests;

pub use batch::SequenceKeeper;
pub use changes::{Change, Changes, ChangesAt, ChangesError, Done};
pub use epoch::{EpochError, adopt_epoch, is_staged};
pub use error::{CatalogError, Refusal};
pub use log_catalog::{LogCatalog, LogCatalogOptions, Previous, Recovered};
pub use publisher::{Answer, CheckError, Checked, LookupError, PublishError, Publisher, PublisherOptions};
pub use recovery::Unequal;
pub use slots::{DEFAULT_SLOTS, Slots};
pub use start_error::StartError;
pub use unreadable::Unreadable;
pub use versions::Versions;

use railfs_proto::descriptor::Descriptor;
use railfs_proto::name::{Namespace, ObjectName};
use std::future::Future;
use std::pin::Pin;
use std::time::SystemTime;

/// A future that a trait object can return.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A moment of the wall clock, as the log records it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time {
    /// Seconds since 1970.
    pub seconds: i64,
    /// And nanoseconds, below a billion.
    pub nanoseconds: u32,
}

impl From<SystemTime> for Time {
    fn from(time: SystemTime) -> Time {
        let clamp = |seconds: u64| i64::try_from(seconds).unwrap_or(i64::MAX);
        match time.duration_since(SystemTime::UNIX_EPOCH) {
            Ok(since) => Time { seconds: clamp(since.as_secs()), nanoseconds: since.subsec_nanos() },
            // Before 1970: whole seconds, rounded down.
            Err(before) => Time { seconds: -clamp(before.duration().as_secs()) - 1, nanoseconds: 0 },
        }
    }
}

/// What identifies one attempt to put or delete: 16 bytes chosen by the client.
pub type RequestId = [u8; 16];

/// When a put or delete may happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Whatever is there.
    Always,
    /// Only if nothing has the name.
    IfAbsent,
    /// Only if this version is current.
    IfVersion(u64),
}

impl Condition {
    /// As messages have it: absent means always, 0 means only if the name is absent.
    pub fn from_message(if_version: Option<u64>) -> Condition {
        match if_version {
            None => Condition::Always,
            Some(0) => Condition::IfAbsent,
            Some(version) => Condition::IfVersion(version),
        }
    }

    /// Whether it holds where `current` is there.
    pub fn holds(self, current: Option<u64>) -> bool {
        match self {
            Condition::Always => true,
            Condition::IfAbsent => current.is_none(),
            Condition::IfVersion(version) => current == Some(version),
        }
    }
}

/// Why nothing was changed: the state of the name does not allow it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    /// The condition does not hold.
    #[error("the condition does not hold: {}", current_version(*.current))]
    Version {
        /// The version that is there.
        current: Option<u64>,
    },
    /// Other objects have the key as a prefix: the name is a directory.
    #[error("the name is a directory: an object lies below it")]
    IsDirectory,
    /// A prefix of the key is an object, so nothing can lie below it.
    #[error("{object} is an object, so nothing can lie below it")]
    NotADirectory {
        /// That object.
        object: ObjectName,
    },
}

fn current_version(current: Option<u64>) -> String {
    current.map_or_else(|| "no object has the name".to_owned(), |version| format!("version {version} is current"))
}

/// How a put ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// Durable and visible. Also the answer to a repeated request, whatever has happened since.
    Committed {
        /// The version that the request made: of a repeated one not the put's own, whose files are not needed then.
        version: u64,
        /// The version it replaced, which is to be reclaimed in time.
        replaced: Option<u64>,
    },
    /// Done and ordered just before a newer version (or a newer delete): its files are not needed.
    Superseded {
        /// The version of the newer put or delete.
        by: u64,
    },
    /// Nothing was changed.
    Conflict(Conflict),
}

/// How a delete ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeleteOutcome {
    /// The name is absent. Also the answer to a repeated request.
    Deleted {
        /// The version that was there.
        deleted: u64,
        /// The delete's own version.
        version: u64,
    },
    /// Nothing had the name.
    NotFound,
    /// Ordered just before a newer version, which stays.
    Superseded {
        /// That version.
        by: u64,
    },
    /// Nothing was changed.
    Conflict(Conflict),
}

/// A put, ready to be committed: every byte is durable.
#[derive(Clone, Debug)]
pub struct Put {
    /// The name.
    pub name: ObjectName,
    /// The attempt.
    pub request: RequestId,
    /// Version, attributes, layout, placement.
    pub descriptor: Descriptor,
    /// When it may happen.
    pub condition: Condition,
}

/// A delete.
#[derive(Clone, Debug)]
pub struct Delete {
    /// The name.
    pub name: ObjectName,
    /// The attempt.
    pub request: RequestId,
    /// A version of its own: puts with a lower one lose to it.
    pub version: u64,
    /// When it may happen.
    pub condition: Condition,
}

/// What the catalog says of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Looked {
    /// The object, if one has the name.
    pub object: Option<Descriptor>,
    /// Whether something lies below the name.
    pub directory: bool,
    /// The last commit in the namespace; `None` when nobody ever wrote to it.
    pub namespace_mtime: Option<Time>,
    /// The state this was read from.
    pub revision: u64,
}

/// What to list.
#[derive(Clone, Debug)]
pub struct List {
    /// In which namespace.
    pub namespace: Namespace,
    /// Keys that start with these bytes.
    pub prefix: Vec<u8>,
    /// Fold what lies below the next `/` behind the prefix into one directory entry.
    pub delimited: bool,
    /// Only entries that sort behind this one (a directory entry sorts as its name and `/`); empty: from the start.
    pub after: Vec<u8>,
    /// At most this many entries (at least 1).
    pub limit: usize,
}

/// One line of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// An object.
    Object {
        /// Its whole key.
        key: Vec<u8>,
        /// What it is.
        descriptor: Descriptor,
    },
    /// Something lies below this.
    Directory {
        /// Its whole name, without the trailing `/`.
        key: Vec<u8>,
    },
}

/// A page of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// In order of raw bytes.
    pub entries: Vec<Entry>,
    /// `after` of the next page; `None` when this was the last.
    pub next_after: Option<Vec<u8>>,
    /// The last commit in the namespace; `None` when nobody ever wrote to it (there are no entries then).
    pub namespace_mtime: Option<Time>,
    /// The state this was read from.
    pub revision: u64,
}

/// What a version is to the catalog.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Whose version it is or was.
    pub name: ObjectName,
    /// What it is.
    pub descriptor: Descriptor,
    /// When it stopped being current; `None` while it is.
    pub superseded: Option<Time>,
}

/// How much the catalog holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Current objects.
    pub objects: u64,
    /// Versions that are no longer current and not reclaimed.
    pub superseded: u64,
    /// Namespaces ever written to.
    pub namespaces: u64,
    /// Sequence number of the last record applied.
    pub sequence: u64,
}

/// Which version every name has. See the module's head for what is promised.
pub trait Catalog: Send + Sync + std::fmt::Debug + 'static {
    /// A number that grows with every commit. Answers given after a commit was acknowledged carry at least its revision.
    fn revision(&self) -> u64;

    /// What has this name, and whether something lies below it.
    fn lookup<'a>(&'a self, name: &'a ObjectName) -> BoxFuture<'a, Result<Looked, CatalogError>>;

    /// [`Catalog::lookup`] where the answer needs no waiting (a read of the index); `None` where it does.
    fn try_lookup(&self, name: &ObjectName) -> Option<Result<Looked, CatalogError>> {
        let _ = name;
        None
    }

    /// A page of the names in a namespace: a name is returned once, one that exists throughout is never missed.
    fn list<'a>(&'a self, list: &'a List) -> BoxFuture<'a, Result<Page, CatalogError>>;

    /// Makes a put durable, then visible.
    fn commit_put(&self, put: Put) -> BoxFuture<'_, Result<PutOutcome, CatalogError>>;

    /// Makes a delete durable, then visible. It leaves a tombstone that every put with a lower version loses to.
    fn delete(&self, delete: Delete) -> BoxFuture<'_, Result<DeleteOutcome, CatalogError>>;

    /// Versions that were never handed out and never will be again: `count` of them (at least 1) in a row.
    fn reserve_versions(&self, count: u64) -> BoxFuture<'_, Result<std::ops::RangeInclusive<u64>, CatalogError>>;

    /// What a version is: current, superseded, or (`None`) unknown: never committed, or reclaimed.
    fn standing(&self, version: u64) -> BoxFuture<'_, Result<Option<Standing>, CatalogError>>;

    /// Superseded versions that are not reclaimed, those above `after` in order of version, at most `limit`.
    fn superseded(&self, after: u64, limit: usize) -> BoxFuture<'_, Result<Vec<Standing>, CatalogError>>;

    /// Records that the files of these superseded versions are gone. Versions that are not superseded are left alone.
    fn reclaimed(&self, versions: Vec<u64>) -> BoxFuture<'_, Result<(), CatalogError>>;

    /// Up to `limit` (at least 1) of the puts and deletes that were committed from there on, in order.
    fn changes(&self, at: ChangesAt, limit: usize) -> BoxFuture<'_, Result<Changes, ChangesError>>;

    /// Shows the number of the last commit, and wakes whoever waits for the next.
    fn latest(&self) -> tokio::sync::watch::Receiver<u64>;

    /// How much there is.
    fn counts(&self) -> BoxFuture<'_, Result<Counts, CatalogError>>;

    /// What it has to do without, one line each, naming the directory and what it needs.
    fn degraded(&self) -> Vec<String> {
        Vec::new()
    }

    /// Why nothing can be committed any more until a restart; `None` while all is well.
    fn frozen(&self) -> Option<String>;
}
