//! Writing the log: batches of records, to every log directory, synced.
//!
//! Guarantees: a batch whose append returned is durable in every log; space is allocated before a record is begun, so
//! that a full disk refuses a batch that then did not happen; after a failed write or sync nothing is written any more,
//! because nobody knows what is on the disk.

use super::Refusal;
use crate::store::{LogDirectory, LogFile};
use railfs_proto::checkpoint::CheckpointId;
use railfs_proto::descriptor::Id;
use railfs_proto::logfile::{MAX_RECORD, RECORD_HEAD, SEGMENT_HEADER, SegmentHeader, append_record, record_seed};
use railfs_proto::v1::Record;
use std::io;
use std::sync::Arc;

pub(super) use crate::store::logdir::SEGMENT_SIZE;
/// Records of one batch, at most: their place in it is a 16-bit number.
pub(super) const MAX_BATCH: usize = 1024;
/// The file that becomes the next segment.
pub(super) const SPARE: &str = "spare";
/// A segment that is being mended.
pub(super) const MENDED: &str = "mended";

/// Which log: what its records and files are seeded and named with.
#[derive(Clone, Copy, Debug)]
pub(super) struct LogIdentity {
    pub(super) store: Id,
    pub(super) epoch: u64,
    pub(super) segment_size: u64,
}

impl LogIdentity {
    pub(super) fn seed(&self) -> u64 {
        record_seed(self.store, self.epoch)
    }

    pub(super) fn header(&self, first: u64) -> Vec<u8> {
        SegmentHeader { store: self.store, epoch: self.epoch, first }.encode()
    }

    pub(super) fn name(&self, first: u64) -> String {
        format!("{:016x}-{first:016x}.log", self.epoch)
    }

    /// Which checkpoint has this as the last record in it.
    pub(super) fn checkpoint(&self, sequence: u64) -> CheckpointId {
        CheckpointId { store: self.store, epoch: self.epoch, sequence }
    }

    pub(super) fn checkpoint_name(&self, sequence: u64) -> String {
        format!("{:016x}-{sequence:016x}.checkpoint", self.epoch)
    }

    /// Epoch and first sequence number from a file's name; `None` if it is not a segment's.
    pub(super) fn parse(name: &str) -> Option<(u64, u64)> {
        match LogName::parse(name)? {
            LogName::Segment { epoch, first } => Some((epoch, first)),
            LogName::Checkpoint { .. } => None,
        }
    }

    /// Longest body of a record that fits a segment.
    pub(super) fn longest_record(&self) -> usize {
        self.capacity().saturating_sub(RECORD_HEAD + 8).min(MAX_RECORD)
    }

    /// Bytes of records in a segment.
    pub(super) fn capacity(&self) -> usize {
        usize::try_from(self.segment_size).unwrap_or(usize::MAX).saturating_sub(SEGMENT_HEADER)
    }
}

/// What a file of a log is, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LogName {
    /// Records from `first` on.
    Segment { epoch: u64, first: u64 },
    /// What the records up to `sequence` add up to.
    Checkpoint { epoch: u64, sequence: u64 },
}

impl LogName {
    /// `None` if it is neither.
    pub(super) fn parse(name: &str) -> Option<LogName> {
        // Exactly as it is written: what another spelling names would never be found again.
        let digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        let number = |text: &str| {
            let all = text.len() == 16 && text.bytes().all(digit);
            all.then(|| u64::from_str_radix(text, 16).ok()).flatten()
        };
        let (stem, kind) = name.split_once('.')?;
        let (epoch, place) = stem.split_once('-')?;
        let (epoch, place) = (number(epoch)?, number(place)?);
        match kind {
            "log" => Some(LogName::Segment { epoch, first: place }),
            "checkpoint" => Some(LogName::Checkpoint { epoch, sequence: place }),
            _ => None,
        }
    }

    pub(super) fn epoch(self) -> u64 {
        match self {
            LogName::Segment { epoch, .. } | LogName::Checkpoint { epoch, .. } => epoch,
        }
    }
}

/// Behind the name of a file of an epoch that may not have begun yet: it counts once the markers know that epoch.
pub(super) const STAGED: &str = ".staged";

/// Why a batch was not appended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AppendError {
    /// Not one byte of a record was written.
    NotBegun(Refusal),
    /// It may be durable or not.
    Unknown(String),
}

/// One of the directories, and the segment in it that is being written.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) directory: Arc<dyn LogDirectory>,
    pub(super) file: Box<dyn LogFile>,
    spare: Option<Box<dyn LogFile>>,
}

impl Place {
    pub(super) fn new(
        directory: Arc<dyn LogDirectory>,
        file: Box<dyn LogFile>,
        spare: Option<Box<dyn LogFile>>,
    ) -> Place {
        Place { directory, file, spare }
    }
}

/// The end of the log.
#[derive(Debug)]
pub(super) struct LogWriter {
    identity: LogIdentity,
    places: Vec<Place>,
    /// Where the next record goes, in every place.
    offset: u64,
    next_sequence: u64,
    /// Bytes of records that were appended.
    appended: u64,
    frozen: Option<String>,
}

impl LogWriter {
    /// All places end at the same offset, before the same sequence number.
    pub(super) fn new(identity: LogIdentity, places: Vec<Place>, offset: u64, next_sequence: u64) -> LogWriter {
        LogWriter { identity, places, offset, next_sequence, appended: 0, frozen: None }
    }

    /// The sequence number that the next record must have.
    pub(super) fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    pub(super) fn identity(&self) -> &LogIdentity {
        &self.identity
    }

    /// Bytes of records that were appended since the log was opened.
    pub(super) fn appended(&self) -> u64 {
        self.appended
    }

    /// Makes the records durable in every log. Their sequence numbers follow the log's; they fit one segment together.
    /// Gives the checksum of the last one.
    pub(super) fn append(&mut self, records: &[Record]) -> Result<u64, AppendError> {
        if let Some(why) = &self.frozen {
            return Err(AppendError::NotBegun(Refusal::Frozen(why.clone())));
        }
        let mut bytes = Vec::new();
        let mut last = 0;
        for (record, batch) in records.iter().zip(0u16..) {
            let start = bytes.len();
            append_record(&mut bytes, self.identity.seed(), batch, record)
                .map_err(|error| AppendError::NotBegun(Refusal::TooLong(error.to_string())))?;
            let check = bytes.get(start + 8..start + RECORD_HEAD).and_then(|check| check.try_into().ok());
            last = check.map_or(0, u64::from_le_bytes);
        }
        let length = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        if bytes.len() > self.identity.capacity() {
            let why = format!("{length} bytes do not fit a segment of {} bytes", self.identity.segment_size);
            return Err(AppendError::NotBegun(Refusal::TooLong(why)));
        }
        if self.offset.saturating_add(length) > self.identity.segment_size {
            self.roll()?;
        }
        for place in &self.places {
            if let Err(error) = place.file.check() {
                // Nothing of this batch was written, so it is known not to have happened.
                let why = format!(
                    "the log in {} is gone: {error}; mount its disk and restart railfsd",
                    place.directory.describe()
                );
                self.frozen = Some(why.clone());
                return Err(AppendError::NotBegun(Refusal::ReadOnly(why)));
            }
        }
        for place in &self.places {
            if let Err(error) = place.file.write_at(self.offset, &bytes) {
                return Err(
                    self.freeze(format!("writing to the log in {} failed: {error}", place.directory.describe()))
                );
            }
        }
        for place in &self.places {
            if let Err(error) = place.file.sync() {
                return Err(self.freeze(format!("syncing the log in {} failed: {error}", place.directory.describe())));
            }
        }
        self.offset = self.offset.saturating_add(length);
        self.appended = self.appended.saturating_add(length);
        self.next_sequence = self.next_sequence.saturating_add(u64::try_from(records.len()).unwrap_or(u64::MAX));
        Ok(last)
    }

    /// Allocates the next segment in every place that has none yet. Best done when nobody is waiting.
    pub(super) fn prepare(&mut self) -> Result<(), Refusal> {
        for place in &mut self.places {
            if place.spare.is_none() {
                match place.directory.create(SPARE, self.identity.segment_size) {
                    Ok(spare) => place.spare = Some(spare),
                    Err(error) => {
                        // Part of it may have been allocated: nothing else should go without for that.
                        let _ = place.directory.remove(SPARE);
                        let (what, size) = (place.directory.describe(), self.identity.segment_size);
                        return Err(Refusal::NoSpace(format!("a segment of {size} bytes in {what}: {error}")));
                    }
                }
            }
        }
        Ok(())
    }

    /// Why `more` bytes of records that take up room must not be begun now: without a spare segment the last quarter of
    /// this one is kept for deletes and what belongs to them, so that a full disk can always be emptied.
    pub(super) fn kept_back(&self, more: usize) -> Option<Refusal> {
        let place = self.places.iter().find(|place| place.spare.is_none())?;
        let end = self.offset.saturating_add(u64::try_from(more).unwrap_or(u64::MAX));
        let size = self.identity.segment_size;
        let what = place.directory.describe();
        (end > size - size / 4).then(|| {
            Refusal::NoSpace(format!(
                "{what} has no room for the next segment of {size} bytes, and what is left of this one is kept for deletes"
            ))
        })
    }

    /// Begins the next segment everywhere. Once one log has begun it, all must: a failure half way freezes the log.
    fn roll(&mut self) -> Result<(), AppendError> {
        self.prepare().map_err(AppendError::NotBegun)?;
        let header = self.identity.header(self.next_sequence);
        let name = self.identity.name(self.next_sequence);
        let mut failure = None;
        for place in &mut self.places {
            let Some(spare) = place.spare.take() else { continue };
            match begin_segment(place.directory.as_ref(), spare, SPARE, &name, &header) {
                Ok(file) => place.file = file,
                Err(error) => {
                    failure =
                        Some(format!("beginning segment {name} in {} failed: {error}", place.directory.describe()));
                    break;
                }
            }
        }
        match failure {
            None => {
                self.offset = u64::try_from(header.len()).unwrap_or(u64::MAX);
                Ok(())
            }
            Some(why) => {
                self.frozen = Some(why.clone());
                // No record was begun: this batch is known not to have happened.
                Err(AppendError::NotBegun(Refusal::Frozen(why)))
            }
        }
    }

    fn freeze(&mut self, why: String) -> AppendError {
        self.frozen = Some(why.clone());
        AppendError::Unknown(why)
    }

    /// Why nothing is appended any more.
    pub(super) fn frozen(&self) -> Option<&str> {
        self.frozen.as_deref()
    }
}

/// Makes an allocated file a segment: what was written to it, then its name, become durable.
pub(super) fn begin_segment(
    directory: &dyn LogDirectory,
    file: Box<dyn LogFile>,
    temporary: &str,
    name: &str,
    content: &[u8],
) -> io::Result<Box<dyn LogFile>> {
    file.write_at(0, content)?;
    file.sync()?;
    directory.rename(temporary, name)?;
    directory.sync()?;
    Ok(file)
}
