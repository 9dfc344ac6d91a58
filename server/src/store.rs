//! Stripe directories: their identity, their locks, and the files of the log in them.
//!
//! Guarantees: a directory is known by the marker in it, never by its place in a list; nothing is created outside
//! marked directories, and no stripe directory is ever created; at most one server has a marked directory open, and
//! nothing in it is read before that is certain.
//!
//! ```text
//! DIR/.railfs         the marker (proto: logfile)
//! DIR/.railfs.lock    the process id of the server that has the directory open
//! DIR/components/     component files
//! DIR/log/            segments of the log, in log directories only
//! DIR/lost/           valid components that no record names
//! ```

mod epoch;
mod init;
mod lock;
pub mod logdir;
mod marker;
mod newest;
mod open;
pub(crate) mod private;
pub(crate) mod regular;
mod restore;

#[cfg(test)]
pub(crate) mod simdisk;
#[cfg(test)]
mod tests;

pub use epoch::Replacement;
pub use init::{Initialised, init};
pub use logdir::{DiskLogDirectory, LogDirectory, LogFile};
pub use newest::Newest;
pub(crate) use open::UNREADABLE;
pub use open::{LockedDirectories, MissingDirectory, Store, StripeDirectory, UnreadableLog, lock, open, open_locked};
pub use restore::restore_markers;

use railfs_proto::descriptor::Id;
use std::io;
use std::path::{Path, PathBuf};

/// Why directories are not, or cannot become, a store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Nothing to work on.
    #[error("no stripe directory is given")]
    Empty,
    /// It is not there. It is never created: a disk that is not mounted must not be taken for an empty one.
    #[error("stripe directory {} does not exist; create it or mount its disk first", .0.display())]
    NotThere(PathBuf),
    /// It is there, but no directory.
    #[error("{} is not a directory", .0.display())]
    NotADirectory(PathBuf),
    /// Two places of the list are the same directory, or one is a copy of the other.
    #[error("{} and {} are the same stripe directory; list it once", .first.display(), .second.display())]
    Twice {
        /// The first place.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// Not a stripe directory.
    #[error(
        "{} carries no marker; mount its disk, or, if it is a new one, make it a stripe directory with `railfsd init`", .0.display()
    )]
    NoMarker(PathBuf),
    /// It was a stripe directory.
    #[error(
        "the marker {}/.railfs was removed, but components are there; stop railfsd and run `railfsd fsck --repair`, which puts it back \
         where .railfs.tmp still holds the one before; else put a copy of it back by hand", .0.display()
    )]
    MarkerGone(PathBuf),
    /// Something is in it that is not ours.
    #[error("{} carries no marker and is not empty (it holds {found:?}); give an empty directory", .path.display())]
    NotEmpty {
        /// The directory.
        path: PathBuf,
        /// One of the names in it.
        found: String,
    },
    /// There is no room for a log in it.
    #[error(
        "{} has {available} bytes free; a directory that is to hold the log needs {needed}: free as much, or give a \
         larger file system", .path.display()
    )]
    TooSmall {
        /// The directory.
        path: PathBuf,
        /// What is free in its file system, bytes.
        available: u64,
        /// What it needs, bytes.
        needed: u64,
    },
    /// It lies in another stripe directory.
    #[error("{} lies inside stripe directory {}; give a directory beside it", .path.display(), .outer.display())]
    Inside {
        /// The directory.
        path: PathBuf,
        /// The one around it.
        outer: PathBuf,
    },
    /// Its marker cannot be trusted: it counts as missing.
    #[error("the marker of {} cannot be used: {why}; the directory counts as missing", .path.display())]
    BadMarker {
        /// The directory.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// Something that is none of ours has the name of a file of ours.
    #[error("{} is in the way: {why} and start again", .path.display())]
    InTheWay {
        /// It.
        path: PathBuf,
        /// What it is, and what to do.
        why: String,
    },
    /// It belongs to another store.
    #[error("{} belongs to store {theirs}, {} to store {ours}", .path.display(), .other.display())]
    OtherStore {
        /// The directory.
        path: PathBuf,
        /// Its store.
        theirs: Id,
        /// A directory of the other store.
        other: PathBuf,
        /// That store.
        ours: Id,
    },
    /// None of the directories that hold the log is there.
    #[error(
        "no log directory of store {store} is there (it has {logs}): {why}; mount the disk of one: without a log nothing can be served"
    )]
    NoLog {
        /// The store.
        store: Id,
        /// Its log directories.
        logs: String,
        /// Why the directories that are missing are.
        why: String,
    },
    /// A directory of the store is not in the list.
    #[error(
        "stripe directory {missing} of store {store} is missing: of its {expected} directories only {given} are given; list all"
    )]
    Missing {
        /// The store.
        store: Id,
        /// The directory that is not given.
        missing: Id,
        /// How many belong to it.
        expected: usize,
        /// The directories that are there, with their ids.
        given: String,
    },
    /// It cannot hold the log.
    #[error("{} is no stripe directory of store {store} that is there; `railfsd replace-log` takes one that the configuration lists", .path.display())]
    NotOfStore {
        /// The directory.
        path: PathBuf,
        /// The store.
        store: Id,
    },
    /// It cannot hold the log.
    #[error("{} cannot be written: {why}; give another stripe directory", .path.display())]
    Unwritable {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        why: String,
    },
    /// It holds the log.
    #[error("{} holds the log already; give another stripe directory", .0.display())]
    HoldsLog(PathBuf),
    /// Nothing is to be replaced.
    #[error("every log directory of store {store} is there and can be read and written: there is nothing to replace")]
    NothingToReplace {
        /// The store.
        store: Id,
    },
    /// Another process has it open.
    #[error("{} is in use by {holder}; stop that first", .path.display())]
    Locked {
        /// The directory.
        path: PathBuf,
        /// Who has it, as far as is known.
        holder: String,
    },
    /// The system said no.
    #[error("cannot {doing} {}: {source}", .path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// What came of it.
        source: io::Error,
    },
    /// No random bytes for new ids.
    #[error("the system gave no random bytes for a new id: {0}")]
    Random(String),
}

impl StoreError {
    /// Whether there was no room, and nothing else wrong.
    pub fn is_full(&self) -> bool {
        let full = |kind| matches!(kind, io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
        matches!(self, StoreError::Io { source, .. } if full(source.kind()))
    }
}

/// For `map_err`: what was being done to which path.
fn failed(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::Io { doing, path, source }
}

/// Makes what was created, renamed or removed in a directory durable.
pub(crate) fn sync_directory(path: &Path) -> io::Result<()> {
    std::fs::File::open(path)?.sync_all()
}
