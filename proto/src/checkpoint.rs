//! The bytes of a checkpoint: what the records of a log up to a certain one add up to.
//!
//! Guarantees: the decoder is total; it takes time in proportion to what it reads, and memory for one block at a time, whose
//! length is checked before it is allocated; a checkpoint is whole or refused: every block is there, in its place, of this
//! checkpoint, and nothing stands behind the last.
//!
//! ```text
//! checkpoint  4096 bytes of header, then blocks
//! header      magic[8] format:u32 zero:u32 store[16] epoch:u64 sequence:u64 last_check:u64 blocks:u64 length:u64 zeros check:u64
//! block       length:u32 zero:u32 check:u64 body[length] zeros to a multiple of 8
//! ```
//! All numbers are little endian. A block's check is over its length and body, seeded with store, epoch, sequence and the
//! block's number.

use crate::descriptor::Id;
use crate::logfile::{LogFormatError, MAX_RECORD, checked_head};
use crate::v1::{CheckpointBlock, CheckpointEntry};
use prost::Message;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Bytes of a checkpoint's header; the first block begins here.
pub const CHECKPOINT_HEADER: usize = 4096;
/// Bytes before a block's body.
pub const BLOCK_HEAD: usize = 16;
/// Bytes of entries after which a block is closed.
pub const BLOCK_BYTES: usize = 64 << 10;
/// Longest body of a block, bytes: one that was nearly full, and the longest entry.
pub const MAX_BLOCK: usize = MAX_RECORD + 2 * BLOCK_BYTES;
/// The format number of checkpoints that this build writes.
pub const CHECKPOINT_FORMAT: u32 = 1;

const MAGIC: [u8; 8] = *b"RFSCKP\r\n";
const WHAT: &str = "checkpoint";
const WHAT_HEADER: &str = "checkpoint header";
const WHAT_BLOCK: &str = "checkpoint block";
const ALIGN: usize = 8;

/// Which checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointId {
    /// The store.
    pub store: Id,
    /// The epoch of the log.
    pub epoch: u64,
    /// The last record that is in it.
    pub sequence: u64,
}

impl CheckpointId {
    fn seed(&self, block: u64) -> u64 {
        let mut bytes = [0u8; 40];
        bytes[..16].copy_from_slice(&self.store.0);
        bytes[16..24].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[32..].copy_from_slice(&block.to_le_bytes());
        xxh3_64(&bytes)
    }
}

/// What the first 4 KiB of a checkpoint say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointHeader {
    /// Which.
    pub id: CheckpointId,
    /// The checksum of the last record that is in it: tells this history from another one.
    pub last_check: u64,
    /// How many blocks follow.
    pub blocks: u64,
    /// Bytes of the whole file.
    pub length: u64,
}

impl CheckpointHeader {
    /// Exactly [`CHECKPOINT_HEADER`] bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(CHECKPOINT_HEADER);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&CHECKPOINT_FORMAT.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.id.store.0);
        for number in [self.id.epoch, self.id.sequence, self.last_check, self.blocks, self.length] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.resize(CHECKPOINT_HEADER - 8, 0);
        out.extend_from_slice(&xxh3_64(&out).to_le_bytes());
        out
    }

    /// Reads the header at the start of `bytes`.
    ///
    /// # Errors
    /// It is no header, of a newer format, or damaged.
    pub fn decode(bytes: &[u8]) -> Result<CheckpointHeader, LogFormatError> {
        let head = checked_head(bytes, CHECKPOINT_HEADER, &MAGIC, CHECKPOINT_FORMAT, WHAT_HEADER)?;
        let store = Id::from_bytes(&head[16..32]).unwrap_or(Id([0; 16]));
        let id = CheckpointId { store, epoch: u64_at(head, 32), sequence: u64_at(head, 40) };
        let (last_check, blocks, length) = (u64_at(head, 48), u64_at(head, 56), u64_at(head, 64));
        Ok(CheckpointHeader { id, last_check, blocks, length })
    }
}

/// Appends one block. `number` counts from 0.
///
/// # Errors
/// It is empty, or longer than [`MAX_BLOCK`].
pub fn append_block(
    out: &mut Vec<u8>,
    id: &CheckpointId,
    number: u64,
    block: &CheckpointBlock,
) -> Result<(), LogFormatError> {
    let length = block.encoded_len();
    let too_long = LogFormatError::TooLong { what: WHAT_BLOCK, got: length, limit: MAX_BLOCK };
    let stored = u32::try_from(length).ok().filter(|_| (1..=MAX_BLOCK).contains(&length)).ok_or(too_long)?;
    let start = out.len();
    out.extend_from_slice(&stored.to_le_bytes());
    out.extend_from_slice(&[0; 12]);
    out.extend_from_slice(&block.encode_to_vec());
    let check = block_check(stored, &out[start + BLOCK_HEAD..], id.seed(number));
    out[start + 8..start + BLOCK_HEAD].copy_from_slice(&check.to_le_bytes());
    out.resize(start + BLOCK_HEAD + padded(length), 0);
    Ok(())
}

/// How many bytes [`append_block`] adds for this block.
pub fn block_size(block: &CheckpointBlock) -> usize {
    BLOCK_HEAD + padded(block.encoded_len())
}

/// Reads a whole checkpoint. `read` gives up to so many bytes from an offset on, fewer only where the file ends; `visit` is
/// given every entry, and may refuse one. Gives the header.
///
/// # Errors
/// What is wrong with the checkpoint, or what `read` or `visit` said. Entries may have been given before that.
pub fn read_checkpoint<E: From<LogFormatError>>(
    read: &mut dyn FnMut(u64, usize) -> Result<Vec<u8>, E>,
    visit: &mut dyn FnMut(&CheckpointHeader, CheckpointEntry) -> Result<(), E>,
) -> Result<CheckpointHeader, E> {
    let header = CheckpointHeader::decode(&read(0, CHECKPOINT_HEADER)?)?;
    let mut offset = u64::try_from(CHECKPOINT_HEADER).unwrap_or(u64::MAX);
    let cut_short = |offset: u64, got: usize| LogFormatError::Length {
        what: WHAT,
        got: usize::try_from(offset).unwrap_or(usize::MAX).saturating_add(got),
        want: usize::try_from(header.length).unwrap_or(usize::MAX),
    };
    let mut states = 0u64;
    for number in 0..header.blocks {
        let head = read(offset, BLOCK_HEAD)?;
        if head.len() != BLOCK_HEAD {
            return Err(cut_short(offset, head.len()).into());
        }
        let (stored, check) = (u32_at(&head, 0), u64_at(&head, 8));
        let length = usize::try_from(stored).ok().filter(|length| (1..=MAX_BLOCK).contains(length));
        let Some(length) = length.filter(|_| u32_at(&head, 4) == 0) else {
            return Err(LogFormatError::Checksum(WHAT_BLOCK).into());
        };
        let body_at = offset.saturating_add(u64::try_from(BLOCK_HEAD).unwrap_or(u64::MAX));
        let body = read(body_at, padded(length))?;
        if body.len() != padded(length) {
            return Err(cut_short(body_at, body.len()).into());
        }
        let (body, padding) = body.split_at(length);
        if block_check(stored, body, header.id.seed(number)) != check || padding.iter().any(|byte| *byte != 0) {
            return Err(LogFormatError::Checksum(WHAT_BLOCK).into());
        }
        let block = CheckpointBlock::decode(body).map_err(|error| content(error.to_string()))?;
        for entry in block.entries {
            match entry.body {
                None => return Err(content("an entry is of a kind that this version does not know".to_owned()).into()),
                Some(crate::v1::checkpoint_entry::Body::State(_)) => states += 1,
                Some(_) => {}
            }
            visit(&header, entry)?;
        }
        offset = body_at.saturating_add(u64::try_from(padded(length)).unwrap_or(u64::MAX));
    }
    if offset != header.length || !read(offset, 1)?.is_empty() {
        return Err(cut_short(offset, 0).into());
    }
    if states != 1 {
        return Err(content(format!("{states} entries say how the last run ended, not one")).into());
    }
    Ok(header)
}

/// [`read_checkpoint`] of bytes.
///
/// # Errors
/// See there.
pub fn decode_checkpoint(bytes: &[u8]) -> Result<(CheckpointHeader, Vec<CheckpointEntry>), LogFormatError> {
    let mut entries = Vec::new();
    let mut read = |offset: u64, length: usize| {
        let rest = usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..)).unwrap_or_default();
        Ok(rest.get(..length).unwrap_or(rest).to_vec())
    };
    let header = read_checkpoint(&mut read, &mut |_, entry| {
        entries.push(entry);
        Ok::<_, LogFormatError>(())
    })?;
    Ok((header, entries))
}

fn content(why: String) -> LogFormatError {
    LogFormatError::Content { what: WHAT, why }
}

fn block_check(length: u32, body: &[u8], seed: u64) -> u64 {
    xxh3_64_with_seed(body, xxh3_64_with_seed(&length.to_le_bytes(), seed))
}

fn padded(length: usize) -> usize {
    length.next_multiple_of(ALIGN)
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
    use crate::v1::{CheckpointNamespace, CheckpointState, checkpoint_entry::Body};

    const ID: CheckpointId = CheckpointId { store: Id([7; 16]), epoch: 3, sequence: 41 };

    fn entry(body: Body) -> CheckpointEntry {
        CheckpointEntry { body: Some(body) }
    }

    fn checkpoint(blocks: &[CheckpointBlock]) -> Vec<u8> {
        let mut body = Vec::new();
        for (number, block) in (0..).zip(blocks) {
            let before = body.len();
            append_block(&mut body, &ID, number, block).unwrap();
            assert_eq!(body.len() - before, block_size(block));
        }
        let length = (CHECKPOINT_HEADER + body.len()) as u64;
        let header = CheckpointHeader { id: ID, last_check: 99, blocks: blocks.len() as u64, length };
        [header.encode(), body].concat()
    }

    fn some() -> Vec<CheckpointBlock> {
        let state = entry(Body::State(CheckpointState { incarnation: 4, ..Default::default() }));
        let namespace =
            |at: usize| entry(Body::Namespace(CheckpointNamespace { name: format!("n{at}"), ..Default::default() }));
        let mut blocks = vec![CheckpointBlock { entries: vec![state, namespace(0)] }];
        blocks.extend((1..5).map(|at| CheckpointBlock { entries: vec![namespace(at)] }));
        blocks
    }

    #[test]
    fn a_checkpoint_reads_back() {
        let (header, entries) = decode_checkpoint(&checkpoint(&some())).unwrap();
        assert_eq!((header.id, header.last_check, header.blocks), (ID, 99, 5));
        assert_eq!(entries, some().into_iter().flat_map(|block| block.entries).collect::<Vec<_>>());
    }

    #[test]
    fn one_flipped_bit_anywhere_is_refused_and_so_is_every_cut() {
        let bytes = checkpoint(&some());
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << (at % 8);
            assert!(decode_checkpoint(&damaged).is_err(), "byte {at}");
            assert!(decode_checkpoint(&bytes[..at]).is_err(), "cut at {at}");
        }
        assert!(decode_checkpoint(&[&bytes[..], &[0]].concat()).is_err(), "one byte more");
    }

    #[test]
    fn blocks_of_another_place_or_checkpoint_are_refused() {
        let blocks = some();
        let size = block_size(&blocks[1]);
        let mut swapped = checkpoint(&blocks);
        let second = CHECKPOINT_HEADER + block_size(&blocks[0]);
        assert_eq!(size, block_size(&blocks[2]), "equally long ones");
        let (one, other) = swapped[second..second + 2 * size].split_at_mut(size);
        one.swap_with_slice(other);
        assert_eq!(decode_checkpoint(&swapped), Err(LogFormatError::Checksum(WHAT_BLOCK)));
        let bytes = checkpoint(&blocks);
        let header = CheckpointHeader::decode(&bytes).unwrap();
        let other = CheckpointHeader { id: CheckpointId { sequence: 42, ..ID }, ..header };
        let other = [&other.encode()[..], &bytes[CHECKPOINT_HEADER..]].concat();
        assert_eq!(decode_checkpoint(&other), Err(LogFormatError::Checksum(WHAT_BLOCK)));
    }

    #[test]
    fn a_length_is_checked_before_anything_is_allocated_for_it() {
        let mut bytes = checkpoint(&some());
        bytes[CHECKPOINT_HEADER..CHECKPOINT_HEADER + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        let mut longest = 0;
        let mut read = |offset: u64, length: usize| {
            longest = longest.max(length);
            let rest = &bytes[(offset as usize).min(bytes.len())..];
            Ok::<_, LogFormatError>(rest[..length.min(rest.len())].to_vec())
        };
        assert!(read_checkpoint(&mut read, &mut |_, _| Ok(())).is_err());
        assert_eq!(longest, CHECKPOINT_HEADER);
        let long = CheckpointNamespace { name: "n".repeat(MAX_BLOCK), ..Default::default() };
        let long = CheckpointBlock { entries: vec![entry(Body::Namespace(long))] };
        assert!(matches!(append_block(&mut Vec::new(), &ID, 0, &long), Err(LogFormatError::TooLong { .. })));
    }

    #[test]
    fn i12_entries_and_formats_of_a_newer_version_are_refused() {
        let mut blocks = some();
        blocks[0].entries.push(CheckpointEntry { body: None });
        let refused = decode_checkpoint(&checkpoint(&blocks)).unwrap_err();
        assert!(refused.to_string().contains("this version does not know"), "{refused}");
        let mut newer = checkpoint(&some());
        newer[8] = 2;
        assert!(matches!(decode_checkpoint(&newer), Err(LogFormatError::Format { format: 2, .. })));
        let headless = decode_checkpoint(&checkpoint(&some()[1..])).unwrap_err();
        assert!(headless.to_string().contains("0 entries say"), "{headless}");
    }
}
