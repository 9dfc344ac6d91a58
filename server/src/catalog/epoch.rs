//! A new epoch of the log: written beside the old one, under names that count only once the markers know it.
//!
//! Guarantees: what is staged is all that the old log adds up to, synced and read back in every log; until the markers know the
//! new epoch it is nothing, and a start removes it; once one of them does it is the log, by whatever name.

use super::checkpoint::{self, CheckpointError};
use super::log::{LogIdentity, LogName, MENDED, SPARE, STAGED, begin_segment};
use super::log_catalog::LogCatalog;
use super::mend::take_allocated;
use crate::store::LogDirectory;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Why an epoch was not staged, or what is staged has not its names.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct EpochError(String);

impl From<CheckpointError> for EpochError {
    fn from(error: CheckpointError) -> EpochError {
        EpochError(error.to_string())
    }
}

fn failed(doing: &str, log: &dyn LogDirectory, name: &str) -> impl FnOnce(io::Error) -> EpochError {
    let what = format!("cannot {doing} {}/{name}", log.describe());
    move |error| EpochError(format!("{what}: {error}"))
}

fn names(log: &dyn LogDirectory) -> Result<Vec<(String, LogName, bool)>, EpochError> {
    let names = log.list().map_err(failed("list", log, ""))?;
    let parse = |name: String| {
        let staged = name.strip_suffix(STAGED);
        let parsed = LogName::parse(staged.unwrap_or(&name))?;
        let staged = staged.is_some();
        Some((name, parsed, staged))
    };
    Ok(names.into_iter().filter_map(parse).collect())
}

impl LogCatalog {
    /// Writes what the log adds up to into these logs, as the beginning of a new epoch that the markers do not know yet. The
    /// catalog must be one that nothing is committed to. Gives the number of the last record.
    ///
    /// # Errors
    /// A log cannot be written, or has no room. The old epoch is as it was.
    pub fn stage_epoch(&self, epoch: u64, logs: &[Arc<dyn LogDirectory>]) -> Result<u64, EpochError> {
        let identity = LogIdentity { epoch, ..self.identity() };
        unstage(epoch, logs)?;
        let staged = self.stage(&identity, logs);
        if staged.is_err()
            && let Err(error) = unstage(epoch, logs)
        {
            tracing::warn!(%error, "what was staged stays until the next start");
        }
        staged
    }

    fn stage(&self, identity: &LogIdentity, logs: &[Arc<dyn LogDirectory>]) -> Result<u64, EpochError> {
        let state = self.snapshot().map_err(|error| EpochError(format!("the index: {error}")))?;
        let last = state.kept().map_err(|error| EpochError(format!("the index: {error}")))?.sequence;
        let staged = |name: String| name + STAGED;
        // Every tombstone goes with it: nobody knows here which puts may still come.
        checkpoint::write(&state, 0, identity, logs, &staged, &AtomicBool::new(false))?;
        let first = last.saturating_add(1);
        let (name, header) = (staged(identity.name(first)), identity.header(first));
        for log in logs {
            let log = log.as_ref();
            let room = take_allocated(log, SPARE, identity.segment_size, 0).map_err(failed("use", log, SPARE))?;
            let (file, temporary) = match room {
                Some(file) => (file, SPARE),
                None => {
                    let size = identity.segment_size;
                    let doing = format!("allocate {size} bytes for");
                    (log.create(MENDED, size).map_err(failed(&doing, log, &name))?, MENDED)
                }
            };
            begin_segment(log, file, temporary, &name, &header).map_err(failed("write", log, &name))?;
        }
        Ok(last)
    }
}

/// Removes whatever is staged for this epoch or a later one. What is staged for an earlier one may be the log.
fn unstage(epoch: u64, logs: &[Arc<dyn LogDirectory>]) -> Result<(), EpochError> {
    for log in logs {
        let log = log.as_ref();
        let mut removed = false;
        for (name, ..) in names(log)?.iter().filter(|(_, name, staged)| *staged && name.epoch() >= epoch) {
            log.remove(name).map_err(failed("remove", log, name))?;
            removed = true;
        }
        if removed {
            log.sync().map_err(failed("sync", log, ""))?;
        }
    }
    Ok(())
}

/// Whether files of this epoch, which the markers know, still have the names that they were staged under.
///
/// # Errors
/// A log cannot be listed.
pub fn is_staged(epoch: u64, logs: &[Arc<dyn LogDirectory>]) -> Result<bool, EpochError> {
    for log in logs {
        if names(log.as_ref())?.iter().any(|(_, name, staged)| *staged && name.epoch() == epoch) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Gives what was staged for this epoch, which the markers know now, its names, and removes what is of epochs that are over.
///
/// # Errors
/// A log cannot be changed: the next start does it.
pub fn adopt_epoch(epoch: u64, logs: &[Arc<dyn LogDirectory>]) -> Result<(), EpochError> {
    for log in logs {
        let log = log.as_ref();
        let there = names(log)?;
        for (name, ..) in there.iter().filter(|(_, parsed, staged)| *staged && parsed.epoch() == epoch) {
            let own = name.trim_end_matches(STAGED);
            // What has the name already may have been written to since.
            if !there.iter().any(|(other, ..)| other == own) {
                log.rename(name, own).map_err(failed("rename", log, name))?;
            }
        }
        log.sync().map_err(failed("sync", log, ""))?;
        for (name, ..) in names(log)?.iter().filter(|(_, parsed, _)| parsed.epoch() < epoch) {
            log.remove(name).map_err(failed("remove", log, name))?;
        }
        log.sync().map_err(failed("sync", log, ""))?;
    }
    Ok(())
}
