//! `railfsd replace-log`: another stripe directory takes the place of a log directory that is gone for good.
//!
//! Guarantees: the log of the new epoch is durable in all of its directories, and was read back, before the first marker
//! knows of it; cut off at any moment the store starts in the old epoch or in the new one, with everything that was committed,
//! and doing it again completes it. No server may have the store open.

use crate::catalog::{EpochError, LogCatalog, LogCatalogOptions, StartError, adopt_epoch, is_staged};
use crate::config::Config;
use crate::store::{self, StoreError};
use railfs_proto::descriptor::Id;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why the log is not where it was to be.
#[derive(Debug, thiserror::Error)]
pub enum ReplaceError {
    /// The stripe directories.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The log that is left.
    #[error("catalog: {0}")]
    Log(#[from] StartError),
    /// The new log could not be written: the old epoch goes on.
    #[error("the log of a new epoch cannot be written: {0}; nothing was changed")]
    Stage(EpochError),
    /// The new epoch has begun, or not.
    #[error("the new epoch is not complete: {0}; do it again")]
    Unfinished(String),
    /// There is no place for the index that the log is read into.
    #[error("cannot make a directory in {}: {source}", .path.display())]
    Scratch {
        /// Where.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

/// What was done.
#[derive(Debug)]
pub struct Replaced {
    /// The store.
    pub store: Id,
    /// The epoch that began.
    pub epoch: u64,
    /// The directories that hold its log.
    pub log_directories: Vec<(PathBuf, Id)>,
    /// Those that held it before. If they come back they are stripe directories like any other.
    pub replaced: Vec<Id>,
    /// The last record, if the log was written now; `None`: what was begun before was completed.
    pub last: Option<u64>,
    /// Directories whose markers do not know the epoch yet: the next start that can tells them.
    pub behind: Vec<String>,
}

/// Begins a new epoch of the log, with `directory` in the place of a log directory that is missing, cannot be written, or
/// whose log cannot be read. Blocks.
///
/// # Errors
/// See [`ReplaceError`].
pub fn replace_log(config: &Config, directory: &Path) -> Result<Replaced, ReplaceError> {
    let store = Arc::new(store::open_locked(store::lock(&config.stripe_dirs)?)?);
    let place = |id: &Id| store.directory(*id).map(|directory| (directory.path().to_owned(), *id));
    let possible = store.replacement(directory);
    if matches!(possible, Ok(None)) {
        let logs = store.log_directories();
        let unfinished = |error: &dyn std::fmt::Display| ReplaceError::Unfinished(error.to_string());
        // What an earlier attempt began is completed.
        if !store.is_behind() && !is_staged(store.epoch(), &logs).map_err(|error| unfinished(&error))? {
            return Err(StoreError::HoldsLog(directory.to_owned()).into());
        }
        store.update_markers(0).map_err(|error| unfinished(&error))?;
        adopt_epoch(store.epoch(), &logs).map_err(|error| unfinished(&error))?;
        let log_directories = store.directories().iter().filter(|directory| directory.holds_log());
        return Ok(Replaced {
            store: store.id(),
            epoch: store.epoch(),
            log_directories: log_directories.filter_map(|directory| place(&directory.id())).collect(),
            replaced: Vec::new(),
            last: None,
            behind: Vec::new(),
        });
    }
    // Whether there is nothing to replace is known only once the logs were read.
    if !matches!(possible, Err(StoreError::NothingToReplace { .. })) {
        possible?;
    }
    let scratch = tempfile::tempdir().map_err(|source| ReplaceError::Scratch { path: std::env::temp_dir(), source })?;
    let options = LogCatalogOptions::new(&store, scratch.path().to_owned(), &config.node);
    let (catalog, _) = LogCatalog::inspect(&options)?;
    let replacement = store.replacement(directory)?;
    let replacement = replacement.ok_or_else(|| StoreError::HoldsLog(directory.to_owned()))?;
    let logs = store.replacement_logs(&replacement)?;
    let last = catalog.stage_epoch(replacement.epoch, &logs).map_err(ReplaceError::Stage)?;
    let behind = store.begin_epoch(&replacement).map_err(|error| ReplaceError::Unfinished(error.to_string()))?;
    adopt_epoch(replacement.epoch, &logs).map_err(|error| ReplaceError::Unfinished(error.to_string()))?;
    Ok(Replaced {
        store: store.id(),
        epoch: replacement.epoch,
        log_directories: replacement.log_directories.iter().filter_map(place).collect(),
        replaced: replacement.replaced,
        last: Some(last),
        behind: behind.iter().map(ToString::to_string).collect(),
    })
}
