//! Reading changes back from the log.
//!
//! Guarantees: only records that were committed are read (up to the number that the caller names); each read is bounded in
//! bytes; a record counts if any log of the store holds it whole.

use super::changes::{Change, Changes, ChangesAt, ChangesError, Done};
use super::log::LogIdentity;
use super::{CatalogError, Refusal, Time};
use crate::store::LogDirectory;
use railfs_proto::descriptor::Descriptor;
use railfs_proto::logfile::{Found, MAX_RECORD, RECORD_HEAD, SEGMENT_HEADER, record_at};
use railfs_proto::name::ObjectName;
use railfs_proto::v1::{Record, record::Body};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that are read at once.
const PIECE: usize = 256 << 10;
/// Bytes that one call passes over at most, once it has found its place.
const CALL: u64 = 1 << 20;

/// The log, for reading.
#[derive(Clone, Debug)]
pub(super) struct History {
    identity: LogIdentity,
    logs: Vec<Arc<dyn LogDirectory>>,
    /// The first record that is kept: moved before what is behind it goes.
    oldest: Arc<AtomicU64>,
}

/// Part of a segment, as one log holds it.
struct Piece {
    segment: u64,
    offset: u64,
    bytes: Vec<u8>,
}

impl History {
    pub(super) fn new(identity: LogIdentity, logs: Vec<Arc<dyn LogDirectory>>, oldest: Arc<AtomicU64>) -> History {
        History { identity, logs, oldest }
    }

    pub(super) fn identity(&self) -> &LogIdentity {
        &self.identity
    }

    /// Up to `limit` changes from `at` on, none of a number above `latest`. Reads files.
    pub(super) fn read(&self, at: ChangesAt, limit: usize, latest: u64) -> Result<Changes, ChangesError> {
        let read = self.read_kept(at, limit, latest);
        let oldest = self.oldest.load(Ordering::SeqCst);
        match read {
            // What was looked for went meanwhile.
            Err(ChangesError::Catalog(_)) if at.next < oldest => Err(ChangesError::TooOld { wanted: at.next, oldest }),
            other => other,
        }
    }

    fn read_kept(&self, at: ChangesAt, limit: usize, latest: u64) -> Result<Changes, ChangesError> {
        if at.next > latest.saturating_add(1) {
            return Err(ChangesError::Beyond { wanted: at.next, latest });
        }
        let kept = self.oldest.load(Ordering::SeqCst);
        let mut firsts = self.firsts()?;
        firsts.retain(|first| *first >= kept);
        let oldest = firsts.first().copied().unwrap_or(1);
        if at.next < oldest {
            return Err(ChangesError::TooOld { wanted: at.next, oldest });
        }
        let (mut segment, mut offset) = at.place.unwrap_or_else(|| beginning(&firsts, at.next));
        let mut found = Changes { changes: Vec::new(), at, oldest, latest };
        let mut piece = None;
        let mut passed = 0;
        while found.at.next <= latest && found.changes.len() < limit && passed < CALL {
            let after = firsts.iter().copied().find(|first| *first > segment);
            if after.is_some_and(|after| found.at.next >= after) {
                (segment, offset) = beginning(&firsts, found.at.next);
            }
            let record = self.record(segment, offset, &mut piece, found.at.next)?;
            let sequence = record.record.sequence;
            let end = u64::try_from(record.end).unwrap_or(u64::MAX);
            // Records before the place that was asked for: the segment is read from its beginning.
            if sequence >= found.at.next {
                passed = passed.saturating_add(end.saturating_sub(offset));
                found.at.next = sequence.saturating_add(1);
                found.changes.extend(change(&record.record).map_err(unreadable)?);
            }
            offset = end;
            found.at.place = Some((segment, offset));
        }
        Ok(found)
    }

    /// First numbers of all segments, in order.
    fn firsts(&self) -> Result<Vec<u64>, CatalogError> {
        let mut firsts = Vec::new();
        let mut failed = None;
        for log in &self.logs {
            match log.list() {
                Ok(names) => firsts.extend(names.iter().filter_map(|name| match LogIdentity::parse(name) {
                    Some((epoch, first)) if epoch == self.identity.epoch => Some(first),
                    _ => None,
                })),
                Err(error) => failed = Some(format!("{}: {error}", log.describe())),
            }
        }
        firsts.sort_unstable();
        firsts.dedup();
        match failed {
            Some(why) if firsts.is_empty() => Err(unreadable(why)),
            _ => Ok(firsts),
        }
    }

    /// The record at this place, from the first log that holds it. `number` is for the message.
    fn record(&self, segment: u64, offset: u64, piece: &mut Option<Piece>, number: u64) -> Result<Found, CatalogError> {
        if let Some(found) = piece.as_ref().and_then(|piece| self.in_piece(piece, segment, offset)) {
            return Ok(found);
        }
        let mut why = Vec::new();
        for length in [PIECE, MAX_RECORD + RECORD_HEAD] {
            for log in &self.logs {
                match log.read_at(&self.identity.name(segment), offset, length) {
                    Ok(bytes) => {
                        let read = Piece { segment, offset, bytes };
                        if let Some(found) = self.in_piece(&read, segment, offset) {
                            *piece = Some(read);
                            return Ok(found);
                        }
                    }
                    Err(error) => why.push(format!("{}: {error}", log.describe())),
                }
            }
        }
        let name = self.identity.name(segment);
        Err(unreadable(format!(
            "record {number} is not valid at byte {offset} of {name} in any log {}",
            why.join(", ")
        )))
    }

    fn in_piece(&self, piece: &Piece, segment: u64, offset: u64) -> Option<Found> {
        let start = usize::try_from(offset.checked_sub(piece.offset)?).ok().filter(|_| piece.segment == segment)?;
        let mut found = record_at(&piece.bytes, start, self.identity.seed())?;
        let base = usize::try_from(piece.offset).ok()?;
        (found.offset, found.end) = (found.offset.checked_add(base)?, found.end.checked_add(base)?);
        Some(found)
    }
}

/// The start of the segment that holds the number.
fn beginning(firsts: &[u64], number: u64) -> (u64, u64) {
    let segment = firsts.iter().copied().rfind(|first| *first <= number).unwrap_or(1);
    (segment, u64::try_from(SEGMENT_HEADER).unwrap_or(u64::MAX))
}

fn unreadable(why: String) -> CatalogError {
    Refusal::Index(format!("the log cannot be read back: {why}")).into()
}

/// What a record is to a watcher; `None`: nothing.
pub(super) fn change(record: &Record) -> Result<Option<Change>, String> {
    let bad = |error: &dyn std::fmt::Display| format!("record {} makes no sense: {error}", record.sequence);
    let (name, done) = match &record.body {
        Some(Body::Put(put)) => {
            let descriptor = put.descriptor.as_ref().ok_or_else(|| bad(&"it has no descriptor"))?;
            let descriptor = Descriptor::from_message(descriptor).map_err(|error| bad(&error))?;
            (put.name.as_ref(), Done::Put(descriptor))
        }
        Some(Body::Delete(delete)) => {
            (delete.name.as_ref(), Done::Delete { version: delete.version, deleted: delete.deleted })
        }
        _ => return Ok(None),
    };
    let name = ObjectName::from_message(name).map_err(|error| bad(&error))?;
    let time = Time { seconds: record.time_seconds, nanoseconds: record.time_nanoseconds };
    Ok(Some(Change { sequence: record.sequence, time, name, done }))
}
