//! The bytes of the log's segments and of a stripe directory's identity marker.
//!
//! Guarantees: decoders are total; a record counts only if its checksum, which is seeded with the store and the epoch,
//! agrees; scanning a segment takes time in proportion to its size, whatever is in it, and tells a torn tail (what a
//! crash in the middle of a write leaves) from damage in the middle (a record that had been synced is gone).
//!
//! ```text
//! segment   4096 bytes of header, then records, then zeros to its allocated size
//! header    magic[8] format:u32 zero:u32 store[16] epoch:u64 first:u64 zeros check:u64
//! record    length:u32 batch:u16 head:u16 check:u64 body[length] zeros to a multiple of 8
//! marker    magic[8] format:u32 length:u32 check:u64 body[length]
//! ```
//! All numbers are little endian. `batch` is a record's place among those that were written together, before one
//! sync: the records of a batch may reach the disk in any order, so a valid record behind a bad one proves damage only
//! if it belongs to a later batch. `head` is a short check of length and batch alone: without it a scan of garbage
//! would have to hash what every accidental length covers.

use crate::descriptor::Id;
use crate::v1::{Marker, Record};
use prost::Message;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Bytes of a segment's header; the first record begins here.
pub const SEGMENT_HEADER: usize = 4096;
/// Bytes before a record's body.
pub const RECORD_HEAD: usize = 16;
/// Records begin at multiples of this many bytes.
pub const RECORD_ALIGN: usize = 8;
/// Longest body of a record, bytes.
pub const MAX_RECORD: usize = 4 << 20;
/// Longest body of a marker, bytes.
pub const MAX_MARKER: usize = 1 << 20;
/// The format number of segments and of markers that this build writes.
pub const FORMAT: u32 = 1;

const SEGMENT_MAGIC: [u8; 8] = *b"RFSLOG\r\n";
const MARKER_MAGIC: [u8; 8] = *b"RFSDIR\r\n";
const MARKER_HEAD: usize = 24;

/// Why bytes are not a segment header, a marker, or cannot become a record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogFormatError {
    /// Fewer bytes than the smallest one has, or more than its own length says.
    #[error("the {what} is {got} bytes long, not {want}")]
    Length {
        /// What was decoded.
        what: &'static str,
        /// Bytes there.
        got: usize,
        /// Bytes needed.
        want: usize,
    },
    /// Not such a file at all.
    #[error("no {0} begins here (the magic number is wrong)")]
    Magic(&'static str),
    /// Written by a newer version.
    #[error("the {what} has format {format}; this version reads format {FORMAT}")]
    Format {
        /// What was decoded.
        what: &'static str,
        /// The format it claims.
        format: u32,
    },
    /// Damaged.
    #[error("the {0} is damaged (its checksum does not agree)")]
    Checksum(&'static str),
    /// The checksum agrees, but the content makes no sense.
    #[error("the {what} is not understood: {why}")]
    Content {
        /// What was decoded.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// A record or marker to be written that is too long.
    #[error("the {what} would be {got} bytes long, the limit is {limit}")]
    TooLong {
        /// What was encoded.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The limit.
        limit: usize,
    },
}

/// The seed of every record checksum of one store and epoch.
pub fn record_seed(store: Id, epoch: u64) -> u64 {
    let mut bytes = [0u8; 24];
    bytes[..16].copy_from_slice(&store.0);
    bytes[16..].copy_from_slice(&epoch.to_le_bytes());
    xxh3_64(&bytes)
}

/// What the first 4 KiB of a segment say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The store.
    pub store: Id,
    /// The epoch of the log.
    pub epoch: u64,
    /// Sequence number of the first record. A segment holds no record at or beyond the first of the next one:
    /// what lies there was cut.
    pub first: u64,
}

impl SegmentHeader {
    /// Exactly [`SEGMENT_HEADER`] bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(SEGMENT_HEADER);
        out.extend_from_slice(&SEGMENT_MAGIC);
        out.extend_from_slice(&FORMAT.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.store.0);
        out.extend_from_slice(&self.epoch.to_le_bytes());
        out.extend_from_slice(&self.first.to_le_bytes());
        out.resize(SEGMENT_HEADER - 8, 0);
        out.extend_from_slice(&xxh3_64(&out).to_le_bytes());
        out
    }

    /// Reads the header at the start of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<SegmentHeader, LogFormatError> {
        let head = checked_head(bytes, SEGMENT_HEADER, &SEGMENT_MAGIC, FORMAT, "segment header")?;
        let store = Id::from_bytes(&head[16..32]).unwrap_or(Id([0; 16]));
        Ok(SegmentHeader { store, epoch: u64_at(head, 32), first: u64_at(head, 40) })
    }
}

/// The `size` bytes of a header that begins with `magic` and `format` and ends with its checksum.
pub(crate) fn checked_head<'a>(
    bytes: &'a [u8],
    size: usize,
    magic: &[u8],
    format: u32,
    what: &'static str,
) -> Result<&'a [u8], LogFormatError> {
    let short = LogFormatError::Length { what, got: bytes.len(), want: size };
    let head = bytes.get(..size).ok_or(short)?;
    if !head.starts_with(magic) {
        return Err(LogFormatError::Magic(what));
    }
    let found = u32_at(head, 8);
    if found != format {
        return Err(LogFormatError::Format { what, format: found });
    }
    if u64_at(head, size - 8) != xxh3_64(&head[..size - 8]) {
        return Err(LogFormatError::Checksum(what));
    }
    Ok(head)
}

/// Appends one record. `batch` is its place in the batch that is synced as one (0 for the first).
pub fn append_record(out: &mut Vec<u8>, seed: u64, batch: u16, record: &Record) -> Result<(), LogFormatError> {
    let length = record.encoded_len();
    let too_long = LogFormatError::TooLong { what: "log record", got: length, limit: MAX_RECORD };
    let stored = u32::try_from(length).ok().filter(|_| length <= MAX_RECORD && length > 0).ok_or(too_long)?;
    let start = out.len();
    out.extend_from_slice(&stored.to_le_bytes());
    out.extend_from_slice(&batch.to_le_bytes());
    out.extend_from_slice(&head_check(stored, batch, seed).to_le_bytes());
    out.extend_from_slice(&[0; 8]);
    out.extend_from_slice(&record.encode_to_vec());
    let check = record_check(stored, batch, &out[start + RECORD_HEAD..], seed);
    out[start + 8..start + RECORD_HEAD].copy_from_slice(&check.to_le_bytes());
    out.resize(start + RECORD_HEAD + padded(length), 0);
    Ok(())
}

/// How many bytes [`append_record`] adds for this record.
pub fn record_size(record: &Record) -> usize {
    RECORD_HEAD + padded(record.encoded_len())
}

/// The record that begins at `offset`, or `None` if no valid one does.
pub fn record_at(bytes: &[u8], offset: usize, seed: u64) -> Option<Found> {
    let head_end = offset.checked_add(RECORD_HEAD)?;
    let head = bytes.get(offset..head_end)?;
    let stored = u32_at(head, 0);
    let batch = u16::from_le_bytes([head[4], head[5]]);
    let length = usize::try_from(stored).ok().filter(|length| (1..=MAX_RECORD).contains(length))?;
    if head[6..8] != head_check(stored, batch, seed).to_le_bytes() {
        return None;
    }
    let body = bytes.get(head_end..head_end.checked_add(length)?)?;
    let check = u64_at(head, 8);
    if check != record_check(stored, batch, body, seed) {
        return None;
    }
    let record = Record::decode(body).ok()?;
    Some(Found { record, batch, check, offset, end: head_end.checked_add(padded(length))? })
}

/// A valid record and where it stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The record.
    pub record: Record,
    /// Its place in its batch.
    pub batch: u16,
    /// Its checksum: tells this record from another one with the same sequence number.
    pub check: u64,
    /// Where it begins, bytes from the start of the segment.
    pub offset: usize,
    /// Where the next one would begin.
    pub end: usize,
}

impl Found {
    /// Everything before this sequence number had been synced when this record was written.
    pub fn synced_before(&self) -> u64 {
        self.record.sequence.saturating_sub(u64::from(self.batch))
    }
}

/// What follows the last of the records that stand in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// Zeros to the end.
    Clean,
    /// Something that was being written when it all stopped: no record of a later batch follows.
    Torn {
        /// Where the first bad record begins.
        offset: usize,
    },
    /// A record that had been synced is gone: one of a later batch follows.
    Damaged {
        /// Where the first bad record begins.
        offset: usize,
        /// Where the valid record of a later batch begins.
        next: usize,
    },
}

/// What a segment holds.
#[derive(Clone, Debug)]
pub struct Scan {
    /// The records in a row from the first, sequence numbers without gaps.
    pub records: Vec<Found>,
    /// Where the next record would be written.
    pub end: usize,
    /// What follows them.
    pub rest: Rest,
    /// Valid records behind the first bad one, in order: another log may hold what is missing between.
    pub later: Vec<Found>,
}

/// Reads the records of a segment whose first one has the sequence number `first`. `bytes` is the whole segment.
pub fn scan(bytes: &[u8], seed: u64, first: u64) -> Scan {
    let mut records = Vec::new();
    let mut end = SEGMENT_HEADER;
    let mut expected = first;
    while let Some(found) = record_at(bytes, end, seed).filter(|found| found.record.sequence == expected) {
        end = found.end;
        expected = expected.saturating_add(1);
        records.push(found);
    }
    let mut scan = Scan { records, end, rest: Rest::Clean, later: Vec::new() };
    let tail = bytes.get(end..).unwrap_or_default();
    let Some(dirt) = tail.iter().position(|&byte| byte != 0) else { return scan };
    let mut offset = end + dirt / RECORD_ALIGN * RECORD_ALIGN;
    let mut least = expected.saturating_add(1);
    while offset < bytes.len() {
        match record_at(bytes, offset, seed).filter(|found| found.record.sequence >= least) {
            Some(found) => {
                offset = found.end;
                least = found.record.sequence.saturating_add(1);
                scan.later.push(found);
            }
            None => offset += RECORD_ALIGN,
        }
    }
    let damage = scan.later.iter().find(|found| found.synced_before() > expected);
    scan.rest = match damage {
        Some(found) => Rest::Damaged { offset: end, next: found.offset },
        None => Rest::Torn { offset: end },
    };
    scan
}

/// The file that makes a directory a stripe directory.
pub fn encode_marker(marker: &Marker) -> Result<Vec<u8>, LogFormatError> {
    let body = marker.encode_to_vec();
    let too_long = LogFormatError::TooLong { what: "marker", got: body.len(), limit: MAX_MARKER };
    let length = u32::try_from(body.len()).ok().filter(|_| body.len() <= MAX_MARKER).ok_or(too_long)?;
    let mut out = Vec::with_capacity(MARKER_HEAD + body.len());
    out.extend_from_slice(&MARKER_MAGIC);
    out.extend_from_slice(&FORMAT.to_le_bytes());
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(&xxh3_64(&body).to_le_bytes());
    out.extend_from_slice(&body);
    Ok(out)
}

/// Refuses anything but exactly one marker whose ids are ids.
pub fn decode_marker(bytes: &[u8]) -> Result<Marker, LogFormatError> {
    const WHAT: &str = "marker";
    let short = LogFormatError::Length { what: WHAT, got: bytes.len(), want: MARKER_HEAD };
    let head = bytes.get(..MARKER_HEAD).ok_or(short)?;
    if head[..8] != MARKER_MAGIC {
        return Err(LogFormatError::Magic(WHAT));
    }
    let format = u32_at(head, 8);
    if format != FORMAT {
        return Err(LogFormatError::Format { what: WHAT, format });
    }
    let length = usize::try_from(u32_at(head, 12)).unwrap_or(usize::MAX);
    let body = &bytes[MARKER_HEAD..];
    if body.len() != length {
        let want = length.saturating_add(MARKER_HEAD);
        return Err(LogFormatError::Length { what: WHAT, got: bytes.len(), want });
    }
    if xxh3_64(body) != u64_at(head, 16) {
        return Err(LogFormatError::Checksum(WHAT));
    }
    let content = |why: String| LogFormatError::Content { what: WHAT, why };
    let marker = Marker::decode(body).map_err(|error| content(error.to_string()))?;
    let own = [&marker.store, &marker.directory];
    if own.into_iter().chain(&marker.log_directories).chain(&marker.directories).any(|id| id.len() != 16) {
        return Err(content("an id in it is not 16 bytes long".to_owned()));
    }
    Ok(marker)
}

fn padded(length: usize) -> usize {
    length.next_multiple_of(RECORD_ALIGN)
}

fn head_bytes(length: u32, batch: u16) -> [u8; 6] {
    let mut bytes = [0u8; 6];
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    bytes[4..].copy_from_slice(&batch.to_le_bytes());
    bytes
}

fn head_check(length: u32, batch: u16, seed: u64) -> u16 {
    let low = xxh3_64_with_seed(&head_bytes(length, batch), seed).to_le_bytes();
    u16::from_le_bytes([low[0], low[1]])
}

fn record_check(length: u32, batch: u16, body: &[u8], seed: u64) -> u64 {
    // The body's hash is seeded with the hash of what stands before it: one pass, no copy.
    xxh3_64_with_seed(body, xxh3_64_with_seed(&head_bytes(length, batch), seed))
}

/// Zero where the slice ends early: callers have checked the length.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|slice| slice.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|slice| slice.try_into().ok()).map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::{ReserveRecord, record::Body};
    use proptest::prelude::*;

    const STORE: Id = Id([7; 16]);

    fn record(sequence: u64) -> Record {
        let body = Some(Body::Reserve(ReserveRecord { last: sequence * 1000 }));
        Record { sequence, incarnation: 1, time_seconds: 5, time_nanoseconds: 6, body }
    }

    /// A segment of `size` bytes whose batches have these lengths, and where each record begins.
    fn segment(first: u64, batches: &[u16], size: usize) -> (Vec<u8>, Vec<usize>) {
        let mut bytes = SegmentHeader { store: STORE, epoch: 1, first }.encode();
        let mut offsets = Vec::new();
        let mut sequence = first;
        for &count in batches {
            for place in 0..count {
                offsets.push(bytes.len());
                append_record(&mut bytes, record_seed(STORE, 1), place, &record(sequence)).unwrap();
                sequence += 1;
            }
        }
        bytes.resize(size, 0);
        (bytes, offsets)
    }

    #[test]
    fn a_segment_reads_back_and_ends_clean() {
        let (bytes, offsets) = segment(10, &[1, 3, 2], 16 << 10);
        assert_eq!(SegmentHeader::decode(&bytes), Ok(SegmentHeader { store: STORE, epoch: 1, first: 10 }));
        let scan = scan(&bytes, record_seed(STORE, 1), 10);
        assert_eq!(scan.records.iter().map(|found| found.offset).collect::<Vec<_>>(), offsets);
        assert_eq!(scan.records.iter().map(|found| found.record.clone()).collect::<Vec<_>>(), {
            (10..16).map(record).collect::<Vec<_>>()
        });
        assert_eq!(scan.rest, Rest::Clean);
        assert_eq!(scan.end % RECORD_ALIGN, 0);
    }

    #[test]
    fn a_record_of_another_store_or_epoch_does_not_count() {
        let (bytes, _) = segment(1, &[2], 8 << 10);
        for seed in [record_seed(STORE, 2), record_seed(Id([8; 16]), 1)] {
            let scan = scan(&bytes, seed, 1);
            assert!(scan.records.is_empty());
            assert_eq!(scan.rest, Rest::Torn { offset: SEGMENT_HEADER });
        }
    }

    #[test]
    fn a_bad_record_is_a_torn_tail_within_the_last_batch_and_damage_before_it() {
        let seed = record_seed(STORE, 1);
        let (good, offsets) = segment(1, &[2, 3], 8 << 10);
        for (bad, &offset) in offsets.iter().enumerate() {
            let mut bytes = good.clone();
            bytes[offset + RECORD_HEAD] ^= 1;
            let scan = scan(&bytes, seed, 1);
            assert_eq!(scan.records.len(), bad);
            assert_eq!(scan.end, offset);
            assert_eq!(scan.later.len(), offsets.len() - bad - 1);
            match bad {
                0 | 1 => assert_eq!(scan.rest, Rest::Damaged { offset, next: offsets[2] }),
                _ => assert_eq!(scan.rest, Rest::Torn { offset }),
            }
        }
    }

    #[test]
    fn a_record_that_is_too_long_is_refused_before_it_is_written() {
        let mut long = record(1);
        long.body = Some(Body::Start(crate::v1::StartRecord { node: "n".repeat(MAX_RECORD), ..Default::default() }));
        let mut out = vec![1, 2, 3];
        let refused = append_record(&mut out, 1, 0, &long);
        assert!(matches!(refused, Err(LogFormatError::TooLong { .. })), "{refused:?}");
        assert_eq!(out, [1, 2, 3]);
    }

    #[test]
    fn a_marker_reads_back_and_any_change_is_seen() {
        let id = |byte: u8| bytes::Bytes::from(vec![byte; 16]);
        let marker = Marker {
            store: id(1),
            directory: id(2),
            epoch: 1,
            highest_sequence: 77,
            log_directories: vec![id(2), id(3)],
            directories: vec![id(2), id(3), id(4)],
        };
        let bytes = encode_marker(&marker).unwrap();
        assert_eq!(decode_marker(&bytes), Ok(marker.clone()));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x40;
            assert!(decode_marker(&damaged).is_err(), "byte {at}");
            assert!(decode_marker(&bytes[..at]).is_err(), "cut at {at}");
        }
        let short = encode_marker(&Marker { store: id(1).slice(1..), ..marker }).unwrap();
        assert!(matches!(decode_marker(&short), Err(LogFormatError::Content { .. })));
    }

    #[test]
    fn a_newer_format_is_refused_by_its_number() {
        let mut header = SegmentHeader { store: STORE, epoch: 1, first: 1 }.encode();
        header[8] = 9;
        let refused = SegmentHeader::decode(&header).unwrap_err();
        assert_eq!(refused.to_string(), "the segment header has format 9; this version reads format 1");
    }

    /// The formats of the first release: if this fails, an old disk can no longer be read.
    #[test]
    fn i12_segment_record_and_marker_have_the_bytes_of_format_1() {
        let header = SegmentHeader { store: STORE, epoch: 3, first: 9 }.encode();
        let mut start = b"RFSLOG\r\n\x01\0\0\0\0\0\0\0".to_vec();
        start.extend_from_slice(&[7; 16]);
        start.extend_from_slice(&[3, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(header[..48], start);
        assert_eq!(hex(&header[4088..]), "c7df4494ad873975");
        let mut bytes = Vec::new();
        append_record(&mut bytes, record_seed(STORE, 3), 2, &record(9)).unwrap();
        assert_eq!(hex(&bytes), "0d00000002006001f6b9a359142ecd670809100118052006320308a846000000");
        let marker = Marker { store: STORE.to_bytes(), directory: STORE.to_bytes(), epoch: 1, ..Default::default() };
        assert_eq!(
            hex(&encode_marker(&marker).unwrap()),
            "5246534449520d0a0100000026000000bc9855f9ba3f80a20a10070707070707070707070707070707071210070707070707070707070707070707071801"
        );
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    proptest! {
        #[test]
        fn decoders_take_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..9000), seed: u64) {
            let _ = SegmentHeader::decode(&bytes);
            let _ = decode_marker(&bytes);
            let scan = scan(&bytes, seed, 1);
            prop_assert!(scan.records.is_empty());
        }

        #[test]
        fn a_segment_cut_anywhere_keeps_a_prefix(batches in proptest::collection::vec(1u16..4, 1..6), cut in 0usize..6000) {
            let (mut bytes, offsets) = segment(1, &batches, 8 << 10);
            let cut = cut.max(SEGMENT_HEADER).min(bytes.len());
            bytes[cut..].fill(0);
            let scan = scan(&bytes, record_seed(STORE, 1), 1);
            let whole = offsets.iter().zip(offsets.iter().skip(1)).filter(|(_, next)| **next <= cut).count();
            prop_assert!(scan.records.len() >= whole);
            let torn_or_clean = !matches!(scan.rest, Rest::Damaged { .. });
            prop_assert!(torn_or_clean);
            for (found, sequence) in scan.records.iter().zip(1u64..) {
                prop_assert_eq!(&found.record, &record(sequence));
            }
        }
    }
}
