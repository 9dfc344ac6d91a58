//! Reading the log at start: the last checkpoint that is whole, and the records behind it.
//!
//! Guarantees: a record counts if it is valid in any log; every record that was synced, and is in no checkpoint, is found or
//! the start is refused by name; what is cut is only what was being written when it all stopped; nothing is changed on disk
//! before the whole log has been read and found good.

use super::checkpoint::{self, CheckpointError, UNFINISHED};
use super::growth::{Cut, KEPT, cut};
use super::log::{LogIdentity, LogName, LogWriter, STAGED};
use super::start_error::StartError;
use super::stray::strays;
use super::unreadable::unreadable;
use crate::store::LogDirectory;
use crate::store::regular::is_something_else;
use railfs_proto::checkpoint::CheckpointHeader;
use railfs_proto::logfile::{Found, Rest, SEGMENT_HEADER, SegmentHeader, scan};
use railfs_proto::v1::{Record, record::Body};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

/// A log directory and what of this epoch is in it, by the names of the files.
pub(super) struct Log {
    pub(super) directory: Arc<dyn LogDirectory>,
    /// Segments, by their first sequence numbers.
    pub(super) segments: BTreeMap<u64, String>,
    /// Checkpoints, by their last sequence numbers.
    pub(super) checkpoints: BTreeMap<u64, String>,
    /// Those of them that are whole.
    pub(super) whole: BTreeMap<u64, CheckpointHeader>,
    /// Files that nobody needs: of epochs that are over, and a checkpoint that was never finished.
    pub(super) leftovers: Vec<String>,
    /// The newest epoch that is over and has files here.
    over: Option<u64>,
}

/// One segment as all logs together have it.
#[derive(Default)]
pub(super) struct Merged {
    /// By sequence number, with the log it is from.
    pub(super) records: BTreeMap<u64, (Found, usize)>,
    /// The bytes of the segment in each log: records are copied as they are, whatever newer versions put in them.
    pub(super) sources: Vec<Vec<u8>>,
    /// The first sequence number that is not there.
    pub(super) end: u64,
    /// Logs that do not hold just that.
    deficient: Vec<usize>,
    /// Some log has records of the next segment in this one.
    overlaps: bool,
}

/// Where a start begins: the newest checkpoint that is whole.
#[derive(Clone, Debug)]
pub(super) struct Base {
    pub(super) header: CheckpointHeader,
    pub(super) directory: Arc<dyn LogDirectory>,
    pub(super) name: String,
}

impl Base {
    /// The last record that is in it.
    pub(super) fn sequence(&self) -> u64 {
        self.header.id.sequence
    }
}

/// A file that some log does not hold as it should: what it is, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unequal {
    /// The file's name.
    pub name: String,
    /// The log directory.
    pub directory: String,
    /// What is wrong with it.
    pub why: String,
    /// Whether another log has it whole.
    pub mendable: bool,
}

/// The whole log, read and found good; nothing has been written yet.
pub(super) struct Survey {
    pub(super) identity: LogIdentity,
    pub(super) logs: Vec<Log>,
    /// For messages.
    pub(super) names: String,
    /// First sequence numbers of all segments that count.
    pub(super) firsts: BTreeSet<u64>,
    /// What the next record will have.
    pub(super) next: u64,
    /// Segments that some logs do not hold as they should: the first record, that of the next segment, which logs.
    pub(super) mends: Vec<(u64, Option<u64>, Vec<usize>)>,
    /// The last record says that the run before ended cleanly.
    pub(super) stopped: bool,
    /// The checkpoint that was begun from.
    pub(super) base: Option<Base>,
    /// Bytes of records behind it.
    pub(super) grown: u64,
    /// Checkpoints that are not whole.
    damaged: Vec<Unequal>,
}

/// What is done with the log while it is read.
pub(super) trait Visit {
    /// First of all: where the records that are given begin, if not with record 1. Those before it may be given, too.
    fn base(&mut self, base: Option<&Base>) -> Result<(), StartError>;
    /// In order; there may be a gap before a record that is in the checkpoint, or is the one behind it.
    fn record(&mut self, found: &Found) -> Result<(), StartError>;
}

/// Reads all records in order. `highest` is what the markers have seen.
pub(super) fn survey(
    directories: &[Arc<dyn LogDirectory>],
    identity: LogIdentity,
    highest: u64,
    visit: &mut dyn Visit,
) -> Result<Survey, StartError> {
    if directories.is_empty() {
        return Err(StartError::NoLog);
    }
    let names = directories.iter().map(|directory| directory.describe()).collect::<Vec<_>>().join(", ");
    let mut logs = directories.iter().map(|directory| open_log(directory, &identity)).collect::<Result<Vec<_>, _>>()?;
    let mut firsts: BTreeSet<u64> = logs.iter().flat_map(|log| log.segments.keys().copied()).collect();
    let has_checkpoints = logs.iter().any(|log| !log.checkpoints.is_empty());
    let over = logs.iter().filter_map(|log| log.over).max();
    if firsts.is_empty() && !has_checkpoints && (over.is_some() || identity.epoch > 1) {
        return Err(StartError::Epoch { logs: names, found: over, epoch: identity.epoch });
    }
    let damaged = check_checkpoints(&mut logs, &identity)?;
    let base = newest(&logs);
    let start = base.as_ref().map_or(1, |base| base.sequence().saturating_add(1));
    match firsts.first() {
        Some(&first) if first > start && base.is_none() && !damaged.is_empty() => {
            let damage = damaged.iter().map(|file| format!("{}/{}: {}", file.directory, file.name, file.why));
            return Err(StartError::Checkpoint { first, damage: damage.collect::<Vec<_>>().join("; ") });
        }
        Some(&first) if first > start => return Err(StartError::Beginning { logs: names, first, wanted: start }),
        None if has_checkpoints => return Err(StartError::NoSegment { logs: names, wanted: start }),
        _ => {}
    }
    visit.base(base.as_ref())?;
    let mut survey = Survey {
        identity,
        logs,
        names,
        firsts: BTreeSet::new(),
        next: 1,
        mends: Vec::new(),
        stopped: false,
        base,
        grown: 0,
        damaged,
    };
    while let Some(first) = firsts.pop_first() {
        survey.read_segment(first, firsts.first().copied(), start, visit)?;
    }
    if let Some(base) = &survey.base {
        survey.must_have(base.sequence(), || format!("checkpoint {}", path_of(base.directory.as_ref(), &base.name)))?;
    }
    survey.must_have(highest, || "a stripe directory's marker".to_owned())?;
    Ok(survey)
}

impl Survey {
    /// `start` is the first record that is in no checkpoint.
    fn read_segment(
        &mut self,
        first: u64,
        until: Option<u64>,
        start: u64,
        visit: &mut dyn Visit,
    ) -> Result<(), StartError> {
        let merged = match merge(&self.logs, &self.identity, first, until, &self.names) {
            // All of it is in the checkpoint: it was being cut, or is of no use any more, and with it what is before it.
            Err(StartError::Damaged { .. }) if until.is_some_and(|until| until <= start) => {
                self.firsts.clear();
                self.mends.clear();
                return Ok(());
            }
            Err(error @ StartError::Damaged { sequence, .. }) => {
                let stray = until.map_or(Ok(None), |until| self.stray(until, Some(sequence.saturating_sub(1))))?;
                return Err(stray.unwrap_or(error));
            }
            other => other?,
        };
        // Else the records behind would be taken for ones that had not been synced.
        if let Some(until) = until.filter(|_| merged.overlaps)
            && let Some(stray) = self.stray(until, None)?
        {
            return Err(stray);
        }
        for (found, _) in merged.records.range(..merged.end).map(|(_, found)| found) {
            visit.record(found)?;
            self.stopped = matches!(found.record.body, Some(Body::Stop(_)));
            if found.record.sequence >= start {
                let bytes = found.end.saturating_sub(found.offset);
                self.grown = self.grown.saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX));
            }
        }
        self.next = merged.end;
        self.firsts.insert(first);
        if !merged.deficient.is_empty() {
            self.mends.push((first, until, merged.deficient));
        }
        Ok(())
    }

    /// Whether the files of the segment from `first` on are none of the log's, which ends before it with `end`.
    fn stray(&self, first: u64, end: Option<u64>) -> Result<Option<StartError>, StartError> {
        let strays = strays(&self.logs, &self.identity, first)?;
        Ok(strays.map(|path| StartError::Stray { path, first, end }))
    }

    /// Refuses a log that ends before a record that somebody has seen.
    pub(super) fn must_have(&self, seen: u64, witness: impl FnOnce() -> String) -> Result<(), StartError> {
        if self.next > seen {
            return Ok(());
        }
        let end = self.next.saturating_sub(1);
        Err(StartError::Older { logs: self.names.clone(), end, witness: witness(), seen })
    }

    /// The first record that can be read, and the last.
    pub(super) fn reach(&self) -> (u64, u64) {
        (self.firsts.first().copied().unwrap_or(1), self.next.saturating_sub(1))
    }

    /// Files that some logs do not hold as they should.
    pub(super) fn unequal(&self) -> Vec<Unequal> {
        let mut unequal = self.damaged.clone();
        let Cut { segments_below, .. } = self.cut();
        // Those below were being removed.
        for (first, _, deficient) in self.mends.iter().filter(|(first, ..)| *first >= segments_below) {
            let logs = deficient.iter().filter_map(|at| self.logs.get(*at));
            unequal.extend(logs.map(|log| Unequal {
                name: self.identity.name(*first),
                directory: log.directory.describe(),
                why: "the segment is not whole".to_owned(),
                mendable: true,
            }));
        }
        unequal
    }

    /// What may go, as the logs are now.
    pub(super) fn cut(&self) -> Cut {
        let whole = self.logs.iter().map(|log| log.whole.keys().copied().collect::<BTreeSet<_>>());
        let everywhere = whole.reduce(|all, own| all.intersection(&own).copied().collect());
        cut(&self.firsts, &everywhere.unwrap_or_default())
    }

    /// Checkpoints that every log is to have, and a log that has them: the newest ones.
    pub(super) fn wanted(&self) -> BTreeMap<u64, usize> {
        wanted(&self.logs)
    }

    /// Makes the logs equal and opens them at their end. Gives what was mended, and the log as it is then.
    pub(super) fn mend(self) -> Result<(LogWriter, Mended), StartError> {
        super::mend::mend(self)
    }
}

/// What a start did to the log.
#[derive(Debug, Default)]
pub(super) struct Mended {
    /// Files that were not whole, by name and directory.
    pub(super) files: Vec<String>,
    /// Checkpoints that were whole nowhere, as well: they are gone, and were not needed.
    pub(super) removed: Vec<String>,
    /// The first record that can still be read.
    pub(super) oldest: u64,
    /// Bytes of records behind the last checkpoint.
    pub(super) grown: u64,
    /// Bytes of that, 0 where there is none.
    pub(super) size: u64,
    /// A checkpoint is missing somewhere that could not be put there: one is due.
    pub(super) wanting: bool,
}

fn open_log(directory: &Arc<dyn LogDirectory>, identity: &LogIdentity) -> Result<Log, StartError> {
    let names = directory.list().map_err(unreadable(directory.as_ref(), ""))?;
    let mut log = Log {
        directory: Arc::clone(directory),
        segments: BTreeMap::new(),
        checkpoints: BTreeMap::new(),
        whole: BTreeMap::new(),
        leftovers: Vec::new(),
        over: None,
    };
    for name in names {
        let staged = name.strip_suffix(STAGED);
        let Some(parsed) = LogName::parse(staged.unwrap_or(&name)) else {
            if name == UNFINISHED {
                log.leftovers.push(name);
            }
            continue;
        };
        if parsed.epoch() > identity.epoch {
            // Staged: an epoch that was about to begin, and did not.
            if staged.is_none() {
                let why = format!("it is of epoch {}, the markers know epoch {}", parsed.epoch(), identity.epoch);
                return Err(StartError::Foreign { path: path_of(directory.as_ref(), &name), why });
            }
            log.leftovers.push(name);
        } else if parsed.epoch() < identity.epoch {
            if staged.is_none() {
                log.over = log.over.max(Some(parsed.epoch()));
            }
            log.leftovers.push(name);
        } else {
            let (files, key) = match parsed {
                LogName::Segment { first, .. } => (&mut log.segments, first),
                LogName::Checkpoint { sequence, .. } => (&mut log.checkpoints, sequence),
            };
            // The one that has its name is the one that was written to since.
            let is_staged = staged.is_some();
            match files.get(&key) {
                Some(_) if is_staged => log.leftovers.push(name),
                _ => log.leftovers.extend(files.insert(key, name)),
            }
        }
    }
    Ok(log)
}

/// Reads every checkpoint, and notes which are whole. Gives those that are not, in every log that has one too few.
fn check_checkpoints(logs: &mut [Log], identity: &LogIdentity) -> Result<Vec<Unequal>, StartError> {
    let mut wrong = Vec::new();
    for log in logs.iter_mut() {
        for (&sequence, name) in &log.checkpoints {
            let path = path_of(log.directory.as_ref(), name);
            match checkpoint::read(log.directory.as_ref(), name, &mut |_| Ok(())) {
                Ok(header) if header.id == identity.checkpoint(sequence) => {
                    log.whole.insert(sequence, header);
                }
                Ok(header) => {
                    let id = header.id;
                    let why =
                        format!("its header names store {}, epoch {}, last record {}", id.store, id.epoch, id.sequence);
                    return Err(StartError::Foreign { path, why });
                }
                // Nothing is put in the place of what is none of ours.
                Err(CheckpointError::Io { source, .. }) if is_something_else(&source) => {
                    return Err(unreadable(log.directory.as_ref(), name)(source));
                }
                Err(error) => {
                    tracing::warn!(%path, %error, "a checkpoint is damaged");
                    wrong.push((log.directory.describe(), sequence, format!("the checkpoint is damaged: {error}")));
                }
            }
        }
    }
    let wanted = wanted(logs);
    for log in logs.iter() {
        for sequence in wanted.keys().filter(|sequence| !log.checkpoints.contains_key(sequence)) {
            wrong.push((log.directory.describe(), *sequence, "the checkpoint is missing".to_owned()));
        }
    }
    let unequal = wrong.into_iter().map(|(directory, sequence, why)| {
        let (name, mendable) = (identity.checkpoint_name(sequence), wanted.contains_key(&sequence));
        Unequal { name, directory, why, mendable }
    });
    Ok(unequal.collect())
}

/// See [`Survey::wanted`].
fn wanted(logs: &[Log]) -> BTreeMap<u64, usize> {
    let whole = logs.iter().enumerate().flat_map(|(at, log)| log.whole.keys().map(move |sequence| (*sequence, at)));
    let mut wanted: BTreeMap<u64, usize> = whole.collect();
    while wanted.len() > KEPT {
        wanted.pop_first();
    }
    wanted
}

/// The newest checkpoint that is whole in some log.
fn newest(logs: &[Log]) -> Option<Base> {
    let whole = logs.iter().filter_map(|log| {
        let (sequence, header) = log.whole.last_key_value()?;
        let name = log.checkpoints.get(sequence)?.clone();
        Some(Base { header: *header, directory: Arc::clone(&log.directory), name })
    });
    whole.max_by_key(Base::sequence)
}

/// Puts together what the logs have of one segment, which ends before `until` (or with the log).
pub(super) fn merge(
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
    let mut overlaps = false;
    for (at, log) in logs.iter().enumerate() {
        let Some(own_name) = log.segments.get(&first) else {
            scans.push(None);
            sources.push(Vec::new());
            continue;
        };
        let path = path_of(log.directory.as_ref(), own_name);
        let bytes =
            log.directory.read(own_name, read_limit(identity)).map_err(unreadable(log.directory.as_ref(), own_name))?;
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
                overlaps = true;
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
    Ok(Merged { records, sources, end, deficient, overlaps })
}

/// Bytes of a segment that are read at most: what is longer is none.
pub(super) fn read_limit(identity: &LogIdentity) -> u64 {
    identity.segment_size.saturating_mul(2).max(64 << 20)
}

pub(super) fn path_of(directory: &dyn LogDirectory, name: &str) -> String {
    format!("{}/{name}", directory.describe())
}

pub(super) fn failed(doing: &'static str, path: String) -> impl FnOnce(io::Error) -> StartError {
    move |source| StartError::Io { doing, path, source }
}

/// Whether this version knows what to do with a record.
pub(super) fn known(record: &Record) -> Result<(), StartError> {
    match record.body {
        Some(_) => Ok(()),
        None => Err(StartError::UnknownRecord(record.sequence)),
    }
}

/// For tests that only want the records.
#[cfg(test)]
impl<F: FnMut(&Found) -> Result<(), StartError>> Visit for F {
    fn base(&mut self, _: Option<&Base>) -> Result<(), StartError> {
        Ok(())
    }

    fn record(&mut self, found: &Found) -> Result<(), StartError> {
        self(found)
    }
}
