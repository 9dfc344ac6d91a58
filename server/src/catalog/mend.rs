//! Making all logs equal at start, and opening them at their end.
//!
//! Guarantees: only what was found good is written, beside what is there, and takes its place whole; a start that is cut off at
//! any moment is repeated by the next one; it needs no more room than was allocated ahead, but for checkpoints, without
//! which it goes on; what goes is in a checkpoint that is whole in every log, or of no use.

use super::checkpoint::{self, CheckpointError};
use super::growth::Cut;
use super::log::{LogIdentity, LogWriter, MENDED, Place, SPARE, STAGED, begin_segment};
use super::recovery::{Log, Mended, Merged, Survey, failed, merge, path_of};
use super::start_error::StartError;
use crate::store::{LogDirectory, LogFile};
use railfs_proto::logfile::{Rest, SEGMENT_HEADER, scan};
use std::io;
use std::sync::Arc;

/// See [`Survey::mend`].
pub(super) fn mend(mut survey: Survey) -> Result<(LogWriter, Mended), StartError> {
    let identity = survey.identity;
    adopt(&mut survey)?;
    let mut mended = Mended { grown: survey.grown, ..Mended::default() };
    mended.size = survey.base.as_ref().map_or(0, |base| base.header.length);
    mend_checkpoints(&mut survey, &mut mended)?;
    cut_off(&mut survey)?;
    let start = survey.base.as_ref().map_or(1, |base| base.sequence().saturating_add(1));
    mended.oldest = survey.firsts.first().copied().unwrap_or(1);
    for (first, until, deficient) in std::mem::take(&mut survey.mends) {
        let merged = merge(&survey.logs, &identity, first, until, &survey.names)?;
        for at in deficient {
            match rewrite(&survey.logs, at, &identity, first, &merged) {
                // All of it is in the checkpoint, and the other log has it for those who watch.
                Err(error @ StartError::NoRoom { .. }) if until.is_some_and(|until| until <= start) => {
                    tracing::warn!(%error, "a segment is not mended");
                    mended.wanting = true;
                    continue;
                }
                other => other?,
            }
            let Some(log) = survey.logs.get(at) else { continue };
            mended.files.push(format!("{} in {}", identity.name(first), log.directory.describe()));
        }
    }
    if let Some(&last) = survey.firsts.last().filter(|_| !survey.stopped) {
        // What can be read may still be in memory alone: after a sync that failed the system neither writes it nor
        // says so again. A copy is written from scratch.
        let merged = merge(&survey.logs, &identity, last, None, &survey.names)?;
        for at in 0..survey.logs.len() {
            rewrite(&survey.logs, at, &identity, last, &merged)?;
        }
    }
    if survey.firsts.is_empty() {
        let empty = Merged::default();
        for at in 0..survey.logs.len() {
            rewrite(&survey.logs, at, &identity, 1, &empty)?;
        }
    }
    let last = survey.firsts.last().copied().unwrap_or(1);
    let (places, offset) = open_end(&survey.logs, &identity, last, survey.next, &survey.names)?;
    for log in &survey.logs {
        for name in &log.leftovers {
            forget(log.directory.as_ref(), name);
        }
    }
    Ok((LogWriter::new(identity, places, offset, survey.next), mended))
}

/// Gives files that were staged for this epoch, which has begun, their names.
fn adopt(survey: &mut Survey) -> Result<(), StartError> {
    for log in &mut survey.logs {
        let mut adopted = false;
        for name in log.segments.values_mut().chain(log.checkpoints.values_mut()) {
            let Some(own) = name.strip_suffix(STAGED).map(str::to_owned) else { continue };
            let path = path_of(log.directory.as_ref(), name);
            log.directory.rename(name, &own).map_err(failed("rename", path))?;
            *name = own;
            adopted = true;
        }
        if adopted {
            log.directory.sync().map_err(failed("sync", log.directory.describe()))?;
        }
    }
    if let Some(base) = &mut survey.base
        && let Some(own) = base.name.strip_suffix(STAGED).map(str::to_owned)
    {
        base.name = own;
    }
    Ok(())
}

/// Copies checkpoints to the logs that lack them, and removes those that are whole nowhere. Where there is no room the
/// start goes on without: every log has what it needs from the others, and another checkpoint is due.
fn mend_checkpoints(survey: &mut Survey, mended: &mut Mended) -> Result<(), StartError> {
    let identity = survey.identity;
    let whole = survey.wanted();
    for at in 0..survey.logs.len() {
        for (&sequence, &from) in &whole {
            let name = identity.checkpoint_name(sequence);
            let (Some(source), Some(log)) = (survey.logs.get(from), survey.logs.get(at)) else { continue };
            if log.whole.contains_key(&sequence) {
                continue;
            }
            match checkpoint::copy(source.directory.as_ref(), &name, log.directory.as_ref(), &name) {
                Ok(()) => {
                    mended.files.push(format!("{name} in {}", log.directory.describe()));
                    let header = source.whole.get(&sequence).copied();
                    if let (Some(header), Some(log)) = (header, survey.logs.get_mut(at)) {
                        log.whole.insert(sequence, header);
                        log.checkpoints.insert(sequence, name);
                    }
                }
                Err(error @ CheckpointError::NoRoom { .. }) => {
                    tracing::warn!(%error, "a checkpoint of the log is not mended");
                    mended.wanting = true;
                }
                Err(error) => {
                    return Err(StartError::Mend {
                        path: path_of(log.directory.as_ref(), &name),
                        why: error.to_string(),
                    });
                }
            }
        }
        let Some(log) = survey.logs.get_mut(at) else { continue };
        let useless = log.checkpoints.keys().filter(|own| !log.whole.contains_key(own) && !whole.contains_key(own));
        let useless: Vec<u64> = useless.copied().collect();
        for sequence in useless {
            if let Some(name) = log.checkpoints.remove(&sequence) {
                forget(log.directory.as_ref(), &name);
                mended.removed.push(format!("{name} in {}", log.directory.describe()));
                mended.wanting = true;
            }
        }
    }
    Ok(())
}

/// Removes what is behind the last checkpoint but one, and segments from which no row of records leads to the end.
fn cut_off(survey: &mut Survey) -> Result<(), StartError> {
    let Cut { segments_below, checkpoints_below } = survey.cut();
    let segments_below = segments_below.max(survey.firsts.first().copied().unwrap_or(0));
    let directories: Vec<_> = survey.logs.iter().map(|log| Arc::clone(&log.directory)).collect();
    checkpoint::remove_below(&directories, &survey.identity, &Cut { segments_below, checkpoints_below })
        .map_err(|error| StartError::Mend { path: survey.names.clone(), why: error.to_string() })?;
    survey.firsts.retain(|first| *first >= segments_below);
    survey.mends.retain(|(first, ..)| *first >= segments_below);
    for log in &mut survey.logs {
        log.segments.retain(|first, _| *first >= segments_below);
        log.checkpoints.retain(|sequence, _| *sequence >= checkpoints_below);
    }
    Ok(())
}

/// Writes a segment anew, beside the old one, and puts it in its place; where there is no room for a second one, writes
/// over the old one. `at` is the log's place among all.
fn rewrite(logs: &[Log], at: usize, identity: &LogIdentity, first: u64, merged: &Merged) -> Result<(), StartError> {
    let Some(log) = logs.get(at) else { return Ok(()) };
    let directory = log.directory.as_ref();
    let (name, path) = (identity.name(first), path_of(directory, &identity.name(first)));
    let mut content = identity.header(first);
    for (found, source) in merged.records.range(..merged.end).map(|(_, found)| found) {
        let bytes = merged.sources.get(*source).and_then(|bytes| bytes.get(found.offset..found.end));
        content.extend_from_slice(bytes.unwrap_or_default());
    }
    let size = u64::try_from(content.len()).unwrap_or(u64::MAX).max(identity.segment_size);
    // Room that was allocated ahead first: what a start needs must not depend on what is free.
    for temporary in [SPARE, MENDED] {
        let there = take_allocated(directory, temporary, size, content.len());
        if let Some(file) = there.map_err(failed("mend", path.clone()))? {
            let made = begin_segment(directory, file, temporary, &name, &content);
            return made.map(drop).map_err(failed("mend", path));
        }
    }
    let made = match directory.create(MENDED, size) {
        Ok(file) => begin_segment(directory, file, MENDED, &name, &content).map(drop),
        Err(error) if is_full(&error) => {
            // What little of it there is helps nobody.
            forget(directory, MENDED);
            let old = merged.sources.get(at).map(Vec::as_slice).unwrap_or_default();
            let in_place = log.segments.contains_key(&first)
                && u64::try_from(old.len()).is_ok_and(|length| length >= size)
                && directory.allocated(&name).map_err(failed("look at", path.clone()))? >= size;
            if !in_place {
                let directory = directory.describe();
                return Err(StartError::NoRoom { path, directory, bytes: size, source: error });
            }
            tracing::warn!(%path, bytes = size, "no room for a copy of this segment: it is mended in place");
            overwrite(directory, &name, old, &content)
        }
        Err(error) => return Err(failed("create", path_of(directory, MENDED))(error)),
    };
    made.map_err(failed("mend", path))
}

/// Over the old bytes. Whenever this is cut off, each sector has its old bytes or its new ones; the new ones are the old
/// ones wherever the log was good, so nothing that counts is ever away, and what is cleared counted nowhere.
fn overwrite(directory: &dyn LogDirectory, name: &str, old: &[u8], content: &[u8]) -> io::Result<()> {
    let file = directory.open(name)?;
    file.write_at(0, content)?;
    clear(file.as_ref(), old, content.len())?;
    file.sync()
}

/// A file that an earlier run allocated, if it has room for `size` bytes: with nothing but zeros behind `keep`.
pub(super) fn take_allocated(
    directory: &dyn LogDirectory,
    name: &str,
    size: u64,
    keep: usize,
) -> io::Result<Option<Box<dyn LogFile>>> {
    if directory.allocated(name)? != size {
        return Ok(None);
    }
    let old = directory.read(name, size)?;
    let file = directory.open(name)?;
    clear(file.as_ref(), &old, keep)?;
    Ok(Some(file))
}

/// Writes zeros over everything behind `keep` that is not zero.
fn clear(file: &dyn LogFile, old: &[u8], keep: usize) -> io::Result<()> {
    const STEP: usize = 1 << 20;
    let mut at = keep;
    for part in old.get(keep..).unwrap_or_default().chunks(STEP) {
        if part.iter().any(|byte| *byte != 0) {
            file.write_at(u64::try_from(at).unwrap_or(u64::MAX), &vec![0; part.len()])?;
        }
        at = at.saturating_add(part.len());
    }
    Ok(())
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Removes a file that nobody needs; one that stays costs room and nothing else.
pub(super) fn forget(directory: &dyn LogDirectory, name: &str) {
    match directory.remove(name) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(path = %path_of(directory, name), %error, "cannot remove a file that is not needed");
        }
        _ => {}
    }
}

/// Opens the last segment of every log, which are equal now.
fn open_end(
    logs: &[Log],
    identity: &LogIdentity,
    last: u64,
    next: u64,
    names: &str,
) -> Result<(Vec<Place>, u64), StartError> {
    let name = identity.name(last);
    let mut places = Vec::new();
    let mut offset = None;
    for log in logs {
        let path = path_of(log.directory.as_ref(), &name);
        let bytes = log
            .directory
            .read(&name, identity.segment_size.saturating_mul(2).max(64 << 20))
            .map_err(failed("read", path.clone()))?;
        let scan = scan(&bytes, identity.seed(), last);
        let held = scan.records.last().map_or(last, |found| found.record.sequence + 1);
        if scan.rest != Rest::Clean || held != next || offset.is_some_and(|offset| offset != scan.end) {
            // Mending has just made this so: the disk does not keep what it is given.
            return Err(StartError::Damaged {
                segment: name,
                logs: names.to_owned(),
                sequence: held,
                offset: scan.end,
            });
        }
        offset = Some(scan.end);
        let file = log.directory.open(&name).map_err(failed("open", path))?;
        // A spare that is there stays there: its room could be somebody else's in a moment.
        let spare = take_allocated(log.directory.as_ref(), SPARE, identity.segment_size, 0);
        let spare = spare.unwrap_or_else(|error| {
            tracing::warn!(path = %path_of(log.directory.as_ref(), SPARE), %error, "the spare segment cannot be used");
            None
        });
        for (unused, name) in [(spare.is_none(), SPARE), (true, MENDED)] {
            if unused {
                forget(log.directory.as_ref(), name);
            }
        }
        // The name it has may be of a start that was cut off before it was durable: what is written there next must not go
        // with it.
        log.directory.sync().map_err(failed("sync", log.directory.describe()))?;
        places.push(Place::new(Arc::clone(&log.directory), file, spare));
    }
    let offset = offset.unwrap_or(SEGMENT_HEADER);
    Ok((places, u64::try_from(offset).unwrap_or(u64::MAX)))
}
