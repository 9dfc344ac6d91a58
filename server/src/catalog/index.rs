//! The index of the log: a `redb` file that says what the records up to a certain one add up to.
//!
//! Guarantees: it never knows more than the log; it is bound to one store and epoch; one that is damaged, or is of
//! another store, is thrown away and rebuilt. Applying a record is a function of the index and the record alone, so a
//! rebuilt index is the same as one that grew.

mod aside;
mod entries;
mod overflow;
mod read;
mod tables;

pub(super) use aside::REMOVE;
pub(super) use entries::{Forgotten, Snapshot};
pub(super) use overflow::LIMIT;
pub(super) use read::Reader;
pub(super) use tables::{Kept, Tables, Verdict};

use super::start_error::StartError;
use crate::store::private;
use overflow::{Overflow, Shared};
use railfs_proto::descriptor::Id;
use redb::{Builder, Database, DatabaseError, Durability, ReadableDatabase, StorageError, WriteTransaction};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The format of the tables. Another one is thrown away: the log has it all.
const FORMAT: u64 = 1;
const FILE: &str = "index.redb";
/// Bytes of memory for its pages.
const CACHE: usize = 64 << 20;

/// The index could not be read or written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct IndexError(pub(super) String);

macro_rules! from_redb {
    ($($error:ty),*) => { $(
        impl From<$error> for IndexError {
            fn from(error: $error) -> IndexError {
                IndexError(error.to_string())
            }
        }
    )* };
}
from_redb!(StorageError, redb::TableError, redb::TransactionError, redb::CommitError, redb::SetDurabilityError);

/// The open index.
#[derive(Debug)]
pub(super) struct Index {
    database: Database,
    path: PathBuf,
    overflow: Arc<Shared>,
    memory: u64,
}

/// An index to go on with.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) index: Index,
    /// Why an index that was there was thrown away.
    pub(super) discarded: Option<String>,
}

impl Index {
    /// Opens or makes the index in `state_dir`, which is created if it is missing.
    /// Where that is full, up to `memory` bytes of the index are kept in memory.
    pub(super) fn open(state_dir: &Path, store: Id, epoch: u64, memory: u64) -> Result<Opened, StartError> {
        let path = state_dir.join(FILE);
        let broken = |why: String| StartError::Index { path: path.display().to_string(), why };
        private::directories(state_dir).map_err(|error| broken(error.to_string()))?;
        let aside = aside::move_aside(&path).map_err(|error| broken(format!("{error}; {REMOVE}")))?;
        let was_there = std::fs::metadata(&path).is_ok_and(|metadata| metadata.len() > 0);
        let discarded = match open_file(&path, memory) {
            Ok((database, overflow)) => {
                let index = Index { database, path: path.clone(), overflow, memory };
                match index.bind(store, epoch, !was_there) {
                    Ok(()) => return Ok(Opened { index, discarded: aside }),
                    Err(IndexError(why)) => why,
                }
            }
            Err(Trouble::Damaged(why)) => why,
            Err(Trouble::Unusable(why)) => return Err(broken(why)),
        };
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(broken(format!("{discarded}, and it cannot be removed ({error}); {REMOVE}")));
            }
            _ => {}
        }
        let (database, overflow) =
            open_file(&path, memory).map_err(|(Trouble::Damaged(why) | Trouble::Unusable(why))| broken(why))?;
        let index = Index { database, path: path.clone(), overflow, memory };
        index.bind(store, epoch, true).map_err(|IndexError(why)| broken(why))?;
        Ok(Opened { index, discarded: Some(discarded) })
    }

    /// What is wrong with the file of the index in this directory, and what becomes of it, as far as is seen without opening it.
    pub(super) fn trouble(state_dir: &Path) -> Option<(PathBuf, String)> {
        let path = state_dir.join(FILE);
        aside::trouble(&path).map(|why| (path, why))
    }

    /// Throws everything away: what follows is a rebuild.
    pub(super) fn discard(self, state_dir: &Path, store: Id, epoch: u64) -> Result<Index, StartError> {
        let (path, memory) = (self.path.clone(), self.memory);
        drop(self);
        let broken = |why: String| StartError::Index { path: path.display().to_string(), why };
        std::fs::remove_file(&path).map_err(|error| broken(format!("it cannot be removed ({error}); {REMOVE}")))?;
        Ok(Index::open(state_dir, store, epoch, memory)?.index)
    }

    /// What it has to do without, naming the directory; `None`: nothing.
    pub(super) fn degraded(&self) -> Option<String> {
        self.overflow.degraded()
    }

    /// Why nothing that makes it larger may be recorded now; `None`: it may.
    pub(super) fn exhausted(&self) -> Option<String> {
        self.overflow.exhausted()
    }

    /// For messages.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// An index of another store, epoch or format is refused; a new one is made this store's.
    fn bind(&self, store: Id, epoch: u64, new: bool) -> Result<(), IndexError> {
        let transaction = self.begin()?;
        {
            let mut tables = Tables::open(&transaction)?;
            let (high, low) = store.0.split_at(8);
            let number = |half: &[u8]| half.try_into().map_or(0, u64::from_le_bytes);
            let binding =
                [("format", FORMAT), ("store_high", number(high)), ("store_low", number(low)), ("epoch", epoch)];
            for (name, value) in binding {
                let there = tables.number(name)?;
                if new {
                    tables.set_number(name, value)?;
                } else if there != Some(value) {
                    return Err(IndexError(format!("it is of another store, epoch or format ({name} is {there:?})")));
                }
            }
        }
        transaction.commit()?;
        Ok(())
    }

    /// One at a time; readers see what was there before until it is committed.
    pub(super) fn begin(&self) -> Result<WriteTransaction, IndexError> {
        Ok(self.database.begin_write()?)
    }

    /// As [`Index::begin`], but what is committed need not survive a crash: the log has it.
    pub(super) fn begin_light(&self) -> Result<WriteTransaction, IndexError> {
        let mut transaction = self.begin()?;
        transaction.set_durability(Durability::None)?;
        Ok(transaction)
    }

    /// One state, whatever is committed meanwhile.
    pub(super) fn read(&self) -> Result<Reader, IndexError> {
        Reader::open(&self.database.begin_read()?)
    }

    /// All of one state, whatever is committed meanwhile.
    pub(super) fn snapshot(&self) -> Result<Snapshot, IndexError> {
        Snapshot::open(&self.database.begin_read()?)
    }
}

enum Trouble {
    /// To be thrown away.
    Damaged(String),
    /// Not the index's fault.
    Unusable(String),
}

fn open_file(path: &Path, memory: u64) -> Result<(Database, Arc<Shared>), Trouble> {
    let full = |error: &io::Error| match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            format!("{error}; free some space in that directory, or set another state_dir")
        }
        _ => format!("{error}; {REMOVE}"),
    };
    let (file, overflow) = Overflow::open(path, memory).map_err(|error| Trouble::Unusable(full(&error)))?;
    // A file that was altered behind its back is found by the integrity check, or makes the library panic.
    let opened = catch_unwind(AssertUnwindSafe(|| {
        Builder::new().set_cache_size(CACHE).set_check_integrity_on_open(true).create_with_backend(file)
    }));
    match opened {
        Ok(Ok(database)) => Ok((database, overflow)),
        Ok(Err(DatabaseError::DatabaseAlreadyOpen)) => {
            Err(Trouble::Unusable("another process has it open; two servers cannot share a state_dir".to_owned()))
        }
        Ok(Err(DatabaseError::Storage(StorageError::Io(error))))
            if !matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof) =>
        {
            Err(Trouble::Unusable(full(&error)))
        }
        Ok(Err(error)) => Err(Trouble::Damaged(error.to_string())),
        Err(_) => Err(Trouble::Damaged("it cannot be read at all".to_owned())),
    }
}
