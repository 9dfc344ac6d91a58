//! Reading the log at start, and making all logs equal.
//!
//! Guarantees: a record counts if it is valid in any log; every record that was synced is found or the start is
//! refused by name; what is cut is only what was being written when it all stopped; nothing is changed on disk before
//! the whole log has been read and found good.

use super::log::{LogIdentity, LogWriter, MENDED, Place, SPARE, begin_segment};
use crate::store::{LogDirectory, LogFile};
use railfs_proto::logfile::{Found, Rest, SEGMENT_HEADER, SegmentHeader, scan};
use railfs_proto::v1::{Record, record::Body};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

/// Why the catalog cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A record that was synced is gone from every log.
    #[error(
        "the log is damaged: record {sequence} in segment {segment} is not valid in {logs} (at byte {offset}), but later ones are; \
         restore the log directory from a copy"
    )]
    Damaged {
        /// The file.
        segment: String,
        /// The directories that were tried.
        logs: String,
        /// The record that is missing.
        sequence: u64,
        /// Where it should begin, in the first log that has the file.
        offset: usize,
    },
    /// Two logs have different records in one place.
    #[error(
        "record {sequence} differs between the logs ({logs}): one of them is not this store's; put the right log directory in place"
    )]
    Differ {
        /// The record.
        sequence: u64,
        /// The directories.
        logs: String,
    },
    /// What the markers, or the index, have seen is not there: this is an older copy.
    #[error(
        "the log ({logs}) ends at record {end}, but {witness} has seen record {seen}: this is an older copy of the log; put the newest in place"
    )]
    Older {
        /// The directories.
        logs: String,
        /// Its last record.
        end: u64,
        /// Who knows better.
        witness: String,
        /// What it has seen.
        seen: u64,
    },
    /// The first part is not there.
    #[error("the log ({logs}) begins with record {first}, not with record 1: its first segments are missing")]
    Beginning {
        /// The directories.
        logs: String,
        /// The first record.
        first: u64,
    },
    /// A file that does not belong here.
    #[error("{path} is not a segment of this store's log: {why}")]
    Foreign {
        /// The file.
        path: String,
        /// What it says.
        why: String,
    },
    /// Written by a newer version.
    #[error("record {0} is of a kind that this version does not know: start a newer railfsd")]
    UnknownRecord(u64),
    /// A segment must be written, and there is neither room for it nor one that can be written in place.
    #[error(
        "log segment {path} cannot be written: that needs {bytes} bytes of free space in {directory}, which it does not \
         have: {source}; free as much there and start again"
    )]
    NoRoom {
        /// The segment.
        path: String,
        /// Where.
        directory: String,
        /// How much is needed.
        bytes: u64,
        /// What the system said.
        source: io::Error,
    },
    /// The system said no.
    #[error("cannot {doing} {path}: {source}")]
    Io {
        /// What was tried.
        doing: &'static str,
        /// On what.
        path: String,
        /// What came of it.
        source: io::Error,
    },
    /// The index cannot be made.
    #[error("the index {path}: {why}")]
    Index {
        /// Its file.
        path: String,
        /// What is wrong.
        why: String,
    },
    /// The log could not be written.
    #[error("the start of this run could not be recorded in the log: {0}")]
    Write(String),
    /// No log directory.
    #[error("no log directory is given")]
    NoLog,
}

struct Log {
    directory: Arc<dyn LogDirectory>,
    /// First sequence numbers of its segments.
    segments: BTreeSet<u64>,
}

/// One segment as all logs together have it.
struct Merged {
    /// By sequence number, with the log it is from.
    records: BTreeMap<u64, (Found, usize)>,
    /// The bytes of the segment in each log: records are copied as they are, whatever newer versions put in them.
    sources: Vec<Vec<u8>>,
    /// The first sequence number that is not there.
    end: u64,
    /// Logs that do not hold just that.
    deficient: Vec<usize>,
}

/// The whole log, read and found good; nothing has been written yet.
pub(super) struct Survey {
    identity: LogIdentity,
    logs: Vec<Log>,
    /// For messages.
    names: String,
    /// First sequence numbers of all segments.
    firsts: BTreeSet<u64>,
    /// What the next record will have.
    pub(super) next: u64,
    /// Segments that some logs do not hold as they should: the first record, that of the next segment, which logs.
    mends: Vec<(u64, Option<u64>, Vec<usize>)>,
    /// The last record says that the run before ended cleanly.
    stopped: bool,
}

/// Reads all records in order; `visit` may refuse one. `highest` is what the markers have seen.
pub(super) fn survey(
    directories: &[Arc<dyn LogDirectory>],
    identity: LogIdentity,
    highest: u64,
    mut visit: impl FnMut(&Found) -> Result<(), StartError>,
) -> Result<Survey, StartError> {
    if directories.is_empty() {
        return Err(StartError::NoLog);
    }
    let names = directories.iter().map(|directory| directory.describe()).collect::<Vec<_>>().join(", ");
    let logs = directories.iter().map(|directory| open_log(directory, &identity)).collect::<Result<Vec<_>, _>>()?;
    let firsts: BTreeSet<u64> = logs.iter().flat_map(|log| log.segments.iter().copied()).collect();
    if let Some(&first) = firsts.first().filter(|first| **first != 1) {
        return Err(StartError::Beginning { logs: names, first });
    }
    let mut next = 1;
    let mut mends = Vec::new();
    let mut stopped = false;
    for &first in &firsts {
        let until = firsts.range(first.saturating_add(1)..).next().copied();
        let merged = merge(&logs, &identity, first, until, &names)?;
        for (found, _) in merged.records.range(..merged.end).map(|(_, found)| found) {
            visit(found)?;
            stopped = matches!(found.record.body, Some(Body::Stop(_)));
        }
        next = merged.end;
        if !merged.deficient.is_empty() {
            mends.push((first, until, merged.deficient));
        }
    }
    let survey = Survey { identity, logs, names, firsts, next, mends, stopped };
    survey.must_have(highest, || "a stripe directory's marker".to_owned())?;
    Ok(survey)
}

impl Survey {
    /// Refuses a log that ends before a record that somebody has seen.
    pub(super) fn must_have(&self, seen: u64, witness: impl FnOnce() -> String) -> Result<(), StartError> {
        if self.next > seen {
            return Ok(());
        }
        let end = self.next.saturating_sub(1);
        Err(StartError::Older { logs: self.names.clone(), end, witness: witness(), seen })
    }

    /// Segments that some logs do not hold as they should, by name and directory.
    pub(super) fn unequal(&self) -> Vec<(String, String)> {
        let mut unequal = Vec::new();
        for (first, _, deficient) in &self.mends {
            let logs = deficient.iter().filter_map(|at| self.logs.get(*at));
            unequal.extend(logs.map(|log| (self.identity.name(*first), log.directory.describe())));
        }
        unequal
    }

    /// Makes the logs equal and opens them at their end. Gives what was mended.
    pub(super) fn mend(mut self) -> Result<(LogWriter, Vec<String>), StartError> {
        let identity = self.identity;
        let mut mended = Vec::new();
        for (first, until, deficient) in std::mem::take(&mut self.mends) {
            let merged = merge(&self.logs, &identity, first, until, &self.names)?;
            for at in deficient {
                rewrite(&self.logs, at, &identity, first, &merged)?;
                let Some(log) = self.logs.get(at) else { continue };
                mended.push(format!("{} in {}", identity.name(first), log.directory.describe()));
            }
        }
        if let Some(&last) = self.firsts.last().filter(|_| !self.stopped) {
            // What can be read may still be in memory alone: after a sync that failed the system neither writes it nor
            // says so again. A copy is written from scratch.
            let merged = merge(&self.logs, &identity, last, None, &self.names)?;
            for at in 0..self.logs.len() {
                rewrite(&self.logs, at, &identity, last, &merged)?;
            }
        }
        if self.firsts.is_empty() {
            let empty = Merged { records: BTreeMap::new(), sources: Vec::new(), end: 1, deficient: Vec::new() };
            for at in 0..self.logs.len() {
                rewrite(&self.logs, at, &identity, 1, &empty)?;
            }
        }
        let last = self.firsts.last().copied().unwrap_or(1);
        let (places, offset) = open_end(&self.logs, &identity, last, self.next, &self.names)?;
        Ok((LogWriter::new(identity, places, offset, self.next), mended))
    }
}

fn open_log(directory: &Arc<dyn LogDirectory>, identity: &LogIdentity) -> Result<Log, StartError> {
    let names = directory.list().map_err(failed("list", directory.describe()))?;
    let mut segments = BTreeSet::new();
    for name in names {
        match LogIdentity::parse(&name) {
            Some((epoch, first)) if epoch == identity.epoch => {
                segments.insert(first);
            }
            Some((epoch, _)) if epoch > identity.epoch => {
                let why = format!("it is of epoch {epoch}, the markers know epoch {}", identity.epoch);
                return Err(StartError::Foreign { path: path_of(directory.as_ref(), &name), why });
            }
            _ => {}
        }
    }
    Ok(Log { directory: Arc::clone(directory), segments })
}

/// Puts together what the logs have of one segment, which ends before `until` (or with the log).
fn merge(
    logs: &[Log],
    identity: &LogIdentity,
    first: u64,
    until: Option<u64>,
    names: &str,
) -> Result<Merged, StartError> {
    let name = identity.name(first);
    let mut records: BTreeMap<u64, (Found, usize)> = BTreeMap::new();
    let mut scans = Vec::new();
    let mut sources = Vec::new();
    for (at, log) in logs.iter().enumerate() {
        if !log.segments.contains(&first) {
            scans.push(None);
            sources.push(Vec::new());
            continue;
        }
        let path = path_of(log.directory.as_ref(), &name);
        let limit = identity.segment_size.saturating_mul(2).max(64 << 20);
        let bytes = log.directory.read(&name, limit).map_err(failed("read", path.clone()))?;
        let mut usable = true;
        match SegmentHeader::decode(&bytes) {
            Ok(header) if (header.store, header.epoch, header.first) == (identity.store, identity.epoch, first) => {}
            Ok(header) => {
                let SegmentHeader { store, epoch, first } = header;
                let why = format!("its header names store {store}, epoch {epoch}, first record {first}");
                return Err(StartError::Foreign { path, why });
            }
            // The name says the same and every record is seeded with store and epoch: it is mended.
            Err(error) => {
                tracing::warn!(%path, %error, "a segment's header is damaged");
                usable = false;
            }
        }
        let scan = scan(&bytes, identity.seed(), first);
        let whole = u64::try_from(bytes.len()).is_ok_and(|length| length >= identity.segment_size);
        for found in scan.records.iter().chain(&scan.later) {
            let sequence = found.record.sequence;
            if until.is_some_and(|until| sequence >= until) {
                break;
            }
            match records.get(&sequence) {
                // Which copy is taken does not matter; that there are two different ones does.
                Some((other, _)) if other.check != found.check || other.record != found.record => {
                    return Err(StartError::Differ { sequence, logs: names.to_owned() });
                }
                Some(_) => {}
                None => {
                    records.insert(sequence, (found.clone(), at));
                }
            }
        }
        scans.push(Some((scan, usable, whole)));
        sources.push(bytes);
    }
    let mut end = first;
    while records.contains_key(&end) {
        end += 1;
    }
    // A record that is missing must be one that had not been synced: none of a later segment or batch may follow.
    let followed = until.is_some_and(|until| end < until);
    let synced = records.range(end..).any(|(_, (found, _))| found.synced_before() > end);
    if followed || synced {
        let offset = scans.iter().flatten().map(|(scan, ..)| scan.end).next().unwrap_or(SEGMENT_HEADER);
        return Err(StartError::Damaged { segment: name, logs: names.to_owned(), sequence: end, offset });
    }
    // What is kept of a torn batch was in one write with what is lost: it counts, for it is valid.
    let deficient = scans.iter().enumerate().filter(|(_, scan)| match scan {
        None => true,
        Some((scan, usable, whole)) => {
            let held = scan.records.last().map_or(first, |found| found.record.sequence + 1);
            let last = until.is_none();
            held < end || !usable || (last && (!whole || scan.rest != Rest::Clean || held != end))
        }
    });
    let deficient = deficient.map(|(at, _)| at).collect();
    Ok(Merged { records, sources, end, deficient })
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
            let in_place = log.segments.contains(&first)
                && u64::try_from(old.len()).is_ok_and(|length| length >= size)
                && directory.allocated(&name).map_err(failed("look at", path.clone()))? >= size;
            if !in_place {
                let directory = directory.describe();
                return Err(StartError::NoRoom { path, directory, bytes: size, source: error });
            }
            tracing::warn!(%path, bytes = size, "no room for a copy of this segment: it is mended in place");
            overwrite(directory, &name, old, &content)
        }
        Err(error) => Err(error),
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
fn take_allocated(
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
fn forget(directory: &dyn LogDirectory, name: &str) {
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

fn path_of(directory: &dyn LogDirectory, name: &str) -> String {
    format!("{}/{name}", directory.describe())
}

fn failed(doing: &'static str, path: String) -> impl FnOnce(io::Error) -> StartError {
    move |source| StartError::Io { doing, path, source }
}

/// Whether this version knows what to do with a record.
pub(super) fn known(record: &Record) -> Result<(), StartError> {
    match record.body {
        Some(_) => Ok(()),
        None => Err(StartError::UnknownRecord(record.sequence)),
    }
}
