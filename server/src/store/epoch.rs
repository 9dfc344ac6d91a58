//! Replacing a log directory that is gone for good: what may be done, and the markers.
//!
//! Guarantees: the new epoch begins with one marker, whole, of a directory that holds its log; the newest marker is what counts,
//! so from then on the old epoch is over, wherever the rest is cut off.

use super::lock::identity;
use super::marker::Marker;
use super::open::StripeDirectory;
use super::{DiskLogDirectory, LogDirectory, Store, StoreError, failed, private, sync_directory};
use railfs_proto::descriptor::Id;
use std::path::Path;
use std::sync::Arc;

/// What is to be replaced, and by what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replacement {
    /// The epoch that begins; of one that was cut off, the one that has begun.
    pub epoch: u64,
    /// The directories that hold its log, in order.
    pub log_directories: Vec<Id>,
    /// The new one among them.
    pub directory: Id,
    /// Those that held it before and do not any more.
    pub replaced: Vec<Id>,
}

impl Store {
    /// Whether the directory at this path may take the place of a log directory, and of which. `None`: it holds the log
    /// already. Logs that cannot be read are those that the store was told of: read the log first.
    ///
    /// # Errors
    /// It is none of the store's, or cannot be written, or no log directory is gone, or none is left.
    pub fn replacement(&self, path: &Path) -> Result<Option<Replacement>, StoreError> {
        let at = identity(path)?;
        let directory = self.directories().iter().find(|directory| directory.lock_identity() == at);
        let Some(directory) = directory else {
            return Err(StoreError::NotOfStore { path: path.to_owned(), store: self.id() });
        };
        if self.log_ids().contains(&directory.id()) {
            return Ok(None);
        }
        if let Some(why) = directory.read_only() {
            return Err(StoreError::Unwritable { path: path.to_owned(), why: why.to_owned() });
        }
        let unreadable = |id: &Id| self.unreadable_logs().iter().any(|log| log.directory == *id);
        let writable = |id: &Id| self.directory(*id).is_some_and(|directory| directory.read_only().is_none());
        let stays = |id: &Id| writable(id) && !unreadable(id);
        let (kept, replaced): (Vec<Id>, Vec<Id>) = self.log_ids().iter().copied().partition(stays);
        if replaced.is_empty() {
            return Err(StoreError::NothingToReplace { store: self.id() });
        }
        if kept.is_empty() {
            let logs = self.log_ids().iter().map(Id::to_string).collect::<Vec<_>>().join(", ");
            let why = self.read_only().unwrap_or_default();
            return Err(StoreError::NoLog { store: self.id(), logs, why });
        }
        let log_directories = kept.into_iter().chain([directory.id()]).collect();
        Ok(Some(Replacement {
            epoch: self.epoch().saturating_add(1),
            log_directories,
            directory: directory.id(),
            replaced,
        }))
    }

    /// The folders of the log of an epoch that is about to begin; made where they are not there yet.
    ///
    /// # Errors
    /// One cannot be made.
    pub fn replacement_logs(&self, replacement: &Replacement) -> Result<Vec<Arc<dyn LogDirectory>>, StoreError> {
        let mut logs: Vec<Arc<dyn LogDirectory>> = Vec::new();
        for directory in replacement.log_directories.iter().filter_map(|id| self.directory(*id)) {
            let folder = directory.log();
            private::folder(&folder).map_err(failed("create", &folder))?;
            sync_directory(directory.path()).map_err(failed("sync", directory.path()))?;
            logs.push(Arc::new(DiskLogDirectory::new(folder)));
        }
        Ok(logs)
    }

    /// Begins the epoch: its log is staged in its directories. The first of them that takes its marker begins it. Gives what
    /// is wrong with those that hold no log and did not take theirs: the next start that can writes it.
    ///
    /// # Errors
    /// A log directory did not take its marker. Doing it again completes it.
    pub fn begin_epoch(&self, replacement: &Replacement) -> Result<Vec<StoreError>, StoreError> {
        let holds = |directory: &&StripeDirectory| replacement.log_directories.contains(&directory.id());
        let write = |directory: &StripeDirectory| {
            let marker = Marker {
                store: self.id(),
                directory: directory.id(),
                epoch: replacement.epoch,
                highest_sequence: self.highest_sequence(),
                log_directories: replacement.log_directories.clone(),
                directories: self.all_ids().to_vec(),
            };
            marker.write(directory.path())
        };
        // In the order of the log: those that held it before first, since without them there is neither epoch.
        for id in &replacement.log_directories {
            if let Some(directory) = self.directory(*id) {
                write(directory)?;
            }
        }
        let others = self.directories().iter().filter(|directory| !holds(directory) && directory.read_only().is_none());
        Ok(others.filter_map(|directory| write(directory).err()).collect())
    }
}
