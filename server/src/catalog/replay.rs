//! Bringing the index to the end of the log, from where it is, or from the last checkpoint, or from record 1.
//!
//! Guarantees: an index goes on only where its last record is seen to be the log's, or the checkpoint's; any other is thrown
//! away and made anew; a checkpoint is in the index wholly or not at all; a log that cannot be read is left out as long as there
//! is another, which then must be whole by itself; a log that has not reserved the version of a component that is there is
//! refused, before anything is written to it: it is an older copy.

use super::checkpoint::{self, CheckpointError};
use super::index::{Index, IndexError, Kept, Tables};
use super::log::LogIdentity;
use super::log_catalog::LogCatalogOptions;
use super::recovery::{Base, Survey, Visit, known, path_of, survey};
use super::start_error::StartError;
use super::unreadable::{Unreadable, with};
use crate::store::LogDirectory;
use railfs_proto::logfile::Found;
use railfs_proto::v1::Record;
use std::sync::Arc;

/// Records applied in one transaction when the index is rebuilt.
const REPLAY: usize = 4096;

/// The index, brought to the end of the log, and the log.
pub(super) struct Replayed {
    pub(super) index: Index,
    pub(super) found: Survey,
    /// Why an index that was there was thrown away.
    pub(super) discarded: Option<String>,
    pub(super) replayed: u64,
    /// The logs that were read.
    pub(super) logs: Vec<Arc<dyn LogDirectory>>,
    /// Those that could not be: nothing may be appended.
    pub(super) unreadable: Vec<Unreadable>,
}

struct Replay<'a> {
    index: &'a Index,
    requests: u64,
    kept: Kept,
    /// The last record that is in the index or pending.
    last: u64,
    /// The index's last record is the log's, or there is none.
    seen: bool,
    pending: Vec<(Record, u64)>,
    replayed: u64,
    /// Why this index cannot go on.
    diverged: Option<&'static str>,
}

const ANOTHER: &str = "its last record is not the one in the log";
const BEHIND: &str = "it ends before what is left of the log";

impl<'a> Replay<'a> {
    fn new(index: &'a Index, requests: u64) -> Result<Replay<'a>, StartError> {
        let kept = kept(index)?;
        let (last, seen) = (kept.sequence, kept.sequence == 0);
        Ok(Replay { index, requests, kept, last, seen, pending: Vec::new(), replayed: 0, diverged: None })
    }

    fn broken(&self) -> impl FnOnce(IndexError) -> StartError {
        broken(self.index)
    }

    fn flush(&mut self, durable: bool) -> Result<(), StartError> {
        apply(self.index, &self.pending, self.requests, durable).map_err(self.broken())?;
        self.replayed = self.replayed.saturating_add(u64::try_from(self.pending.len()).unwrap_or(u64::MAX));
        self.pending.clear();
        Ok(())
    }

    /// Fills the index, which is empty, in one transaction: a part of a checkpoint must never be taken for all of it.
    fn restore(&mut self, base: &Base) -> Result<(), StartError> {
        let transaction = self.index.begin().map_err(self.broken())?;
        let mut tables = Tables::open(&transaction).map_err(self.broken())?;
        let restored = checkpoint::read(base.directory.as_ref(), &base.name, &mut |entry| Ok(tables.restore(&entry)?));
        match restored {
            Ok(header) if header == base.header => {}
            Err(CheckpointError::Index(error)) => return Err(self.broken()(error)),
            other => {
                // It was whole a moment ago.
                let path = path_of(base.directory.as_ref(), &base.name);
                let why =
                    other.err().map_or_else(|| "it changed while it was read".to_owned(), |error| error.to_string());
                return Err(StartError::Checkpoint {
                    first: base.sequence().saturating_add(1),
                    damage: format!("{path}: {why}"),
                });
            }
        }
        tables.set_applied(base.sequence(), base.header.last_check).map_err(self.broken())?;
        self.kept = tables.kept().map_err(self.broken())?;
        drop(tables);
        transaction.commit().map_err(|error| self.broken()(error.into()))?;
        tracing::info!(checkpoint = %path_of(base.directory.as_ref(), &base.name), "the index was made from a checkpoint");
        Ok(())
    }
}

impl Visit for Replay<'_> {
    fn base(&mut self, base: Option<&Base>) -> Result<(), StartError> {
        let Some(base) = base else { return Ok(()) };
        if self.kept.sequence == 0 {
            self.restore(base)?;
            (self.last, self.seen) = (self.kept.sequence, true);
        } else if self.kept.sequence == base.sequence() {
            match self.kept.check == base.header.last_check {
                true => self.seen = true,
                false => self.diverged = Some(ANOTHER),
            }
        }
        Ok(())
    }

    fn record(&mut self, found: &Found) -> Result<(), StartError> {
        known(&found.record)?;
        let sequence = found.record.sequence;
        if sequence == self.kept.sequence {
            self.seen = true;
            if found.check != self.kept.check {
                self.diverged = Some(ANOTHER);
            }
        }
        if sequence <= self.last || self.diverged.is_some() {
            return Ok(());
        }
        if sequence != self.last.saturating_add(1) {
            self.diverged = Some(BEHIND);
            return Ok(());
        }
        self.last = sequence;
        self.pending.push((found.record.clone(), found.check));
        if self.pending.len() >= REPLAY { self.flush(false) } else { Ok(()) }
    }
}

fn broken(index: &Index) -> impl FnOnce(IndexError) -> StartError {
    let path = index.path().display().to_string();
    move |IndexError(why)| StartError::Index { path, why }
}

/// What the index knows of the log as a whole.
pub(super) fn kept(index: &Index) -> Result<Kept, StartError> {
    let transaction = index.begin().map_err(broken(index))?;
    let tables = Tables::open(&transaction).map_err(broken(index))?;
    tables.kept().map_err(broken(index))
}

pub(super) fn apply(index: &Index, records: &[(Record, u64)], requests: u64, durable: bool) -> Result<(), IndexError> {
    let transaction = if durable { index.begin()? } else { index.begin_light()? };
    {
        let mut tables = Tables::open(&transaction)?;
        for (record, _) in records {
            tables.apply(record, requests)?;
        }
        if let Some((record, check)) = records.last() {
            tables.set_applied(record.sequence, *check)?;
        }
    }
    transaction.commit()?;
    Ok(())
}

/// Reads the log and changes nothing of it.
pub(super) fn replay(options: &LogCatalogOptions) -> Result<Replayed, StartError> {
    let identity = LogIdentity { store: options.store, epoch: options.epoch, segment_size: options.segment_size };
    let opened = Index::open(&options.state_dir, options.store, options.epoch, options.index_memory)?;
    let (mut index, mut discarded) = (opened.index, opened.discarded);
    let (mut logs, mut unreadable) = (options.logs.clone(), Vec::new());
    let (found, replayed) = loop {
        let mut replay = Replay::new(&index, options.requests)?;
        let found = match survey(&logs, identity, options.highest_sequence, &mut replay) {
            Err(StartError::Unreadable(log)) if logs.len() > 1 => {
                tracing::error!(log = %log.directory, "{log}: the store goes on with the other log, read-only");
                options.keeper.cannot_read(&log);
                logs.retain(|other| other.describe() != log.directory);
                unreadable.push(log);
                continue;
            }
            other => other.map_err(|error| with(error, &unreadable))?,
        };
        if replay.diverged.is_none() {
            let witness = || format!("the index {} (remove it to accept the loss)", index.path().display());
            found.must_have(replay.kept.sequence, witness).map_err(|error| with(error, &unreadable))?;
        }
        let diverged = replay.diverged.or((!replay.seen).then_some(BEHIND));
        let Some(why) = diverged else {
            replay.flush(true)?;
            break (found, replay.replayed);
        };
        discarded = Some(why.to_owned());
        index = index.discard(&options.state_dir, options.store, options.epoch)?;
    };
    if let Some(why) = &discarded {
        tracing::warn!(index = %index.path().display(), %why, "the index was thrown away and rebuilt from the log");
    }
    let reserved = kept(&index)?.reserved;
    if let Some(newest) = options.newest_component.as_ref().filter(|newest| newest.version > reserved) {
        let logs = logs.iter().map(|log| log.describe()).collect::<Vec<_>>().join(", ");
        let (path, version) = (newest.path.display().to_string(), newest.version);
        return Err(with(StartError::Unreserved { logs, reserved, path, version }, &unreadable));
    }
    Ok(Replayed { index, found, discarded, replayed, logs, unreadable })
}
