//! Checkpoints as files: writing one into every log, reading it back, copying it to where it is missing, cutting the log.
//!
//! Guarantees: a checkpoint has its name in a log only after all of it was synced there, read back and found whole in every log;
//! nothing that is behind one goes before that; what goes, goes oldest first, and a checkpoint after the segments that it
//! needs. Memory is bounded: one block at a time, in and out.

use super::growth::{Cut, cut};
use super::index::{Forgotten, IndexError, Snapshot};
use super::log::{LogIdentity, LogName};
use crate::store::{LogDirectory, LogFile};
use prost::Message;
use railfs_proto::checkpoint::{
    BLOCK_BYTES, CHECKPOINT_HEADER, CheckpointHeader, append_block, block_size, read_checkpoint,
};
use railfs_proto::logfile::LogFormatError;
use railfs_proto::v1::{CheckpointBlock, CheckpointEntry};
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A checkpoint that is being written.
pub(super) const UNFINISHED: &str = "checkpoint";
/// Bytes that are written between two syncs: a commit's own sync waits behind no more than that.
const SYNC_EVERY: u64 = 8 << 20;
/// Bytes that are copied at once.
const PIECE: usize = 1 << 20;

/// Why there is no checkpoint.
#[derive(Debug, thiserror::Error)]
pub(super) enum CheckpointError {
    /// No room for it.
    #[error("{directory} has no room for a checkpoint of {bytes} bytes: {source}")]
    NoRoom { directory: String, bytes: u64, source: io::Error },
    /// The system said no.
    #[error("cannot {doing} {path}: {source}")]
    Io { doing: &'static str, path: String, source: io::Error },
    /// It is not what was written, or not a checkpoint.
    #[error("{0}")]
    Format(#[from] LogFormatError),
    /// What was read back is another one.
    #[error("{0} is whole, but not the checkpoint that was written there")]
    Other(String),
    /// The index it is made of.
    #[error("the index: {0}")]
    Index(#[from] IndexError),
    /// The catalog is being stopped.
    #[error("the catalog is stopping")]
    Stopping,
}

/// What a checkpoint came to.
#[derive(Debug)]
pub(super) struct Written {
    /// Bytes of the file.
    pub(super) size: u64,
    /// Tombstones that are not in it, because nobody needs them any more.
    pub(super) forgotten: Vec<Forgotten>,
}

fn path_of(directory: &dyn LogDirectory, name: &str) -> String {
    format!("{}/{name}", directory.describe())
}

fn failed(doing: &'static str, path: String) -> impl FnOnce(io::Error) -> CheckpointError {
    move |source| CheckpointError::Io { doing, path, source }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Gathers entries into blocks.
fn blocks(
    state: &Snapshot,
    before: u64,
    stop: &AtomicBool,
    emit: &mut dyn FnMut(&CheckpointBlock) -> Result<(), CheckpointError>,
) -> Result<Vec<Forgotten>, CheckpointError> {
    let (mut block, mut bytes) = (CheckpointBlock::default(), 0usize);
    let forgotten = state.entries(before, &mut |entry: CheckpointEntry| {
        // What an entry adds to its block: a tag and a length beside itself.
        bytes = bytes.saturating_add(entry.encoded_len()).saturating_add(8);
        block.entries.push(entry);
        if bytes >= BLOCK_BYTES {
            emit(&block)?;
            (block.entries, bytes) = (Vec::new(), 0);
            if stop.load(Ordering::Relaxed) {
                return Err(CheckpointError::Stopping);
            }
        }
        Ok(())
    })?;
    if !block.entries.is_empty() {
        emit(&block)?;
    }
    Ok(forgotten)
}

/// What there is of a checkpoint that could not be finished takes room that others need.
fn discard(log: &dyn LogDirectory) {
    if let Err(error) = log.remove(UNFINISHED)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path_of(log, UNFINISHED), %error, "an unfinished checkpoint cannot be removed: the next one replaces it");
    }
}

/// Writes a checkpoint of this state into every log, under the name that `name` makes of its own. `before`: see
/// [`Snapshot::entries`]. Where it fails, no log has one more than before, or some have and the others do not, which the
/// next start makes equal.
pub(super) fn write(
    state: &Snapshot,
    before: u64,
    identity: &LogIdentity,
    logs: &[Arc<dyn LogDirectory>],
    name: &dyn Fn(String) -> String,
    stop: &AtomicBool,
) -> Result<Written, CheckpointError> {
    let written = write_unfinished(state, before, identity, logs, stop);
    let (header, forgotten) = match written {
        Ok(written) => written,
        Err(error) => {
            logs.iter().for_each(|log| discard(&**log));
            return Err(error);
        }
    };
    let name = name(identity.checkpoint_name(header.id.sequence));
    for log in logs {
        let path = path_of(log.as_ref(), &name);
        log.rename(UNFINISHED, &name).map_err(failed("put in place", path))?;
        log.sync().map_err(failed("sync", log.describe()))?;
    }
    Ok(Written { size: header.length, forgotten })
}

fn write_unfinished(
    state: &Snapshot,
    before: u64,
    identity: &LogIdentity,
    logs: &[Arc<dyn LogDirectory>],
    stop: &AtomicBool,
) -> Result<(CheckpointHeader, Vec<Forgotten>), CheckpointError> {
    let kept = state.kept()?;
    let id = identity.checkpoint(kept.sequence);
    // Its length first: room for all of it is had before any of it is written.
    let (mut count, mut length) = (0u64, u64::try_from(CHECKPOINT_HEADER).unwrap_or(u64::MAX));
    blocks(state, before, stop, &mut |block| {
        count += 1;
        length = length.saturating_add(u64::try_from(block_size(block)).unwrap_or(u64::MAX));
        Ok(())
    })?;
    let header = CheckpointHeader { id, last_check: kept.check, blocks: count, length };
    let mut files: Vec<Box<dyn LogFile>> = Vec::new();
    for log in logs {
        let file = log.create(UNFINISHED, length).map_err(|source| match is_full(&source) {
            true => CheckpointError::NoRoom { directory: log.describe(), bytes: length, source },
            false => failed("create", path_of(log.as_ref(), UNFINISHED))(source),
        })?;
        files.push(file);
    }
    let write_all = |offset: u64, bytes: &[u8]| {
        logs.iter().zip(&files).try_for_each(|(log, file)| {
            file.write_at(offset, bytes).map_err(failed("write", path_of(log.as_ref(), UNFINISHED)))
        })
    };
    write_all(0, &header.encode())?;
    let sync_all = || {
        logs.iter()
            .zip(&files)
            .try_for_each(|(log, file)| file.sync().map_err(failed("sync", path_of(log.as_ref(), UNFINISHED))))
    };
    let (mut number, mut offset) = (0u64, u64::try_from(CHECKPOINT_HEADER).unwrap_or(u64::MAX));
    let (mut bytes, mut synced) = (Vec::new(), 0u64);
    let forgotten = blocks(state, before, stop, &mut |block| {
        bytes.clear();
        append_block(&mut bytes, &id, number, block)?;
        write_all(offset, &bytes)?;
        number += 1;
        offset = offset.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        if offset - synced >= SYNC_EVERY {
            sync_all()?;
            synced = offset;
        }
        Ok(())
    })?;
    sync_all()?;
    for log in logs {
        let read = read(log.as_ref(), UNFINISHED, &mut |_| match stop.load(Ordering::Relaxed) {
            true => Err(CheckpointError::Stopping),
            false => Ok(()),
        })?;
        if read != header {
            return Err(CheckpointError::Other(path_of(log.as_ref(), UNFINISHED)));
        }
    }
    Ok((header, forgotten))
}

/// Reads a checkpoint and gives every entry of it; its header when it is whole.
pub(super) fn read(
    directory: &dyn LogDirectory,
    name: &str,
    visit: &mut dyn FnMut(CheckpointEntry) -> Result<(), CheckpointError>,
) -> Result<CheckpointHeader, CheckpointError> {
    let mut read = |offset: u64, length: usize| {
        directory.read_at(name, offset, length).map_err(failed("read", path_of(directory, name)))
    };
    read_checkpoint(&mut read, &mut |_, entry| visit(entry))
}

/// Copies a checkpoint that is whole in one log to another, under its name.
pub(super) fn copy(
    from: &dyn LogDirectory,
    from_name: &str,
    to: &dyn LogDirectory,
    name: &str,
) -> Result<(), CheckpointError> {
    let header = read(from, from_name, &mut |_| Ok(()))?;
    let copied = copy_unfinished(from, from_name, to, &header);
    if let Err(error) = copied {
        discard(to);
        return Err(error);
    }
    to.rename(UNFINISHED, name).map_err(failed("put in place", path_of(to, name)))?;
    to.sync().map_err(failed("sync", to.describe()))
}

fn copy_unfinished(
    from: &dyn LogDirectory,
    from_name: &str,
    to: &dyn LogDirectory,
    header: &CheckpointHeader,
) -> Result<(), CheckpointError> {
    let path = path_of(to, UNFINISHED);
    let bytes = header.length;
    let file = to.create(UNFINISHED, bytes).map_err(|source| match is_full(&source) {
        true => CheckpointError::NoRoom { directory: to.describe(), bytes, source },
        false => failed("create", path.clone())(source),
    })?;
    let mut offset = 0u64;
    while offset < header.length {
        let left = usize::try_from(header.length - offset).unwrap_or(usize::MAX);
        let piece =
            from.read_at(from_name, offset, left.min(PIECE)).map_err(failed("read", path_of(from, from_name)))?;
        if piece.is_empty() {
            break;
        }
        file.write_at(offset, &piece).map_err(failed("write", path.clone()))?;
        offset = offset.saturating_add(u64::try_from(piece.len()).unwrap_or(u64::MAX));
    }
    file.sync().map_err(failed("sync", path.clone()))?;
    if read(to, UNFINISHED, &mut |_| Ok(()))? != *header {
        return Err(CheckpointError::Other(path));
    }
    Ok(())
}

/// What every log holds under names of this epoch.
fn held(
    logs: &[Arc<dyn LogDirectory>],
    identity: &LogIdentity,
) -> Result<(BTreeSet<u64>, Vec<BTreeSet<u64>>), CheckpointError> {
    let (mut segments, mut checkpoints) = (BTreeSet::new(), Vec::new());
    for log in logs {
        let mut own = BTreeSet::new();
        for name in log.list().map_err(failed("list", log.describe()))? {
            match LogName::parse(&name) {
                Some(LogName::Segment { epoch, first }) if epoch == identity.epoch => {
                    segments.insert(first);
                }
                Some(LogName::Checkpoint { epoch, sequence }) if epoch == identity.epoch => {
                    own.insert(sequence);
                }
                _ => {}
            }
        }
        checkpoints.push(own);
    }
    Ok((segments, checkpoints))
}

/// Removes what is behind the last checkpoint but one. Every checkpoint that has its name in all logs is whole there.
/// `oldest` is moved first: readers must not look for what goes.
pub(super) fn cut_logs(
    logs: &[Arc<dyn LogDirectory>],
    identity: &LogIdentity,
    oldest: &AtomicU64,
) -> Result<(), CheckpointError> {
    let (segments, checkpoints) = held(logs, identity)?;
    let everywhere = checkpoints.into_iter().reduce(|all, own| all.intersection(&own).copied().collect());
    let cut = cut(&segments, &everywhere.unwrap_or_default());
    oldest.fetch_max(cut.segments_below, Ordering::SeqCst);
    remove_below(logs, identity, &cut)
}

/// Removes segments and checkpoints below what is kept, oldest first.
pub(super) fn remove_below(
    logs: &[Arc<dyn LogDirectory>],
    identity: &LogIdentity,
    cut: &Cut,
) -> Result<(), CheckpointError> {
    for log in logs {
        let (segments, checkpoints) = held(std::slice::from_ref(log), identity)?;
        let segments = segments.range(..cut.segments_below).map(|first| identity.name(*first));
        let checkpoints = checkpoints.iter().flat_map(|own| own.range(..cut.checkpoints_below));
        let checkpoints = checkpoints.map(|sequence| identity.checkpoint_name(*sequence));
        let names: Vec<String> = segments.chain(checkpoints).collect();
        for name in &names {
            match log.remove(name) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(failed("remove", path_of(log.as_ref(), name))(error));
                }
                _ => {}
            }
        }
        if !names.is_empty() {
            log.sync().map_err(failed("sync", log.describe()))?;
        }
    }
    Ok(())
}
