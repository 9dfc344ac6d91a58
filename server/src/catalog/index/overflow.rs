//! The file of the index, for when its file system is full.
//!
//! Guarantees: a write that finds no room is kept in memory and read from there, so that an index, which can be lost,
//! never stops what the log has. Before the first such write is done the file is marked, durably, as one to be thrown
//! away: a start never takes it for an index. When there is room again everything is written, synced, and only then the
//! mark taken away. Memory is bounded: beyond [`Room::limit`] writes fail, and [`Shared::exhausted`] says so at half.

use crate::store::{private, regular};
use redb::backends::FileBackend;
use redb::{BackendError, StorageBackend};
use std::collections::BTreeMap;
use std::io;
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

const BLOCK: usize = 4096;
const BLOCK_BYTES: u64 = 4096;
/// Bytes of the index that are kept in memory, at most.
pub(in crate::catalog) const LIMIT: u64 = 256 << 20;
/// Stands at the beginning of a file that is no index any more.
const MARK: &[u8] = b"railfs: no room was left here, the index goes on in memory alone\n";

type Block = Box<[u8; BLOCK]>;

/// What is in memory, shared with whoever reports it.
#[derive(Debug)]
pub(in crate::catalog) struct Shared {
    directory: PathBuf,
    limit: u64,
    /// Empty: everything is in the file. Else the first block is in it, and the file is marked.
    blocks: RwLock<BTreeMap<u64, Block>>,
}

impl Shared {
    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<u64, Block>> {
        self.blocks.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<u64, Block>> {
        self.blocks.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn bytes(&self) -> u64 {
        bytes_of(&self.read())
    }

    /// What is degraded, naming the directory and what it needs; `None`: nothing.
    pub(in crate::catalog) fn degraded(&self) -> Option<String> {
        let bytes = self.bytes();
        (bytes > 0).then(|| {
            let directory = self.directory.display();
            format!("state_dir {directory} is full: {bytes} bytes of the index are in memory alone; free as much there")
        })
    }

    /// Why the index must not grow now; `None`: it may.
    pub(in crate::catalog) fn exhausted(&self) -> Option<String> {
        let bytes = self.bytes();
        (bytes > self.limit / 2).then(|| {
            let directory = self.directory.display();
            format!("state_dir {directory} is full and {bytes} bytes of the index are in memory; free as much there")
        })
    }
}

fn bytes_of(blocks: &BTreeMap<u64, Block>) -> u64 {
    u64::try_from(blocks.len()).unwrap_or(u64::MAX).saturating_mul(BLOCK_BYTES)
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// See the module's head.
#[derive(Debug)]
pub(super) struct Overflow {
    file: FileBackend,
    shared: Arc<Shared>,
}

impl Overflow {
    /// Opens or makes the file.
    pub(super) fn open(path: &Path, limit: u64) -> io::Result<(Overflow, Arc<Shared>)> {
        let options = &mut private::options();
        let file = regular::open(options.read(true).write(true).create(true).truncate(false), path)?;
        // One that an earlier version made.
        private::close(path);
        let file = FileBackend::new(file).map_err(io::Error::other)?;
        let directory = path.parent().unwrap_or(path).to_owned();
        let shared = Arc::new(Shared { directory, limit, blocks: RwLock::default() });
        Ok((Overflow { file, shared: Arc::clone(&shared) }, shared))
    }

    /// A block as the file has it; zeros behind its end.
    fn stored(&self, block: u64) -> io::Result<Block> {
        let mut bytes = Box::new([0; BLOCK]);
        let start = block.saturating_mul(BLOCK_BYTES);
        let there = usize::try_from(self.file.len()?.saturating_sub(start)).unwrap_or(BLOCK).min(BLOCK);
        if let Some(part) = bytes.get_mut(..there).filter(|part| !part.is_empty()) {
            self.file.read(start, part)?;
        }
        Ok(bytes)
    }

    /// From here on the file is no index.
    fn spill(&self, blocks: &mut BTreeMap<u64, Block>) -> io::Result<()> {
        let first = self.stored(0)?;
        match self.file.write(0, MARK) {
            // Its first block was never given room: nothing stands there that could be taken for an index.
            Err(error) if is_full(&error) && self.stored(0)?.iter().all(|byte| *byte == 0) => {}
            other => other?,
        }
        self.file.sync_data()?;
        blocks.insert(0, first);
        let directory = self.shared.directory.display();
        tracing::warn!(state_dir = %directory, "state_dir is full: the index goes on in memory until there is room, and is rebuilt from the log at the next start");
        Ok(())
    }

    fn keep(&self, blocks: &mut BTreeMap<u64, Block>, offset: u64, data: &[u8]) -> io::Result<()> {
        let (mut at, mut left) = (offset, data);
        while !left.is_empty() {
            let block = at / BLOCK_BYTES;
            let inside = usize::try_from(at % BLOCK_BYTES).unwrap_or(0);
            let (part, rest) = left.split_at(left.len().min(BLOCK - inside));
            if !blocks.contains_key(&block) {
                if bytes_of(blocks) >= self.shared.limit {
                    let directory = self.shared.directory.display();
                    let what = format!("state_dir {directory} is full, and so is the memory for the index");
                    return Err(io::Error::new(io::ErrorKind::StorageFull, what));
                }
                blocks.insert(block, self.stored(block)?);
            }
            let place = blocks.get_mut(&block).and_then(|bytes| bytes.get_mut(inside..inside + part.len()));
            if let Some(place) = place {
                place.copy_from_slice(part);
            }
            at = at.saturating_add(u64::try_from(part.len()).unwrap_or(u64::MAX));
            left = rest;
        }
        Ok(())
    }

    /// Everything into the file, the block that makes it an index last.
    fn write_back(&self, blocks: &BTreeMap<u64, Block>) -> io::Result<()> {
        let length = self.file.len()?;
        let write = |block: u64, bytes: &[u8]| {
            let start = block.saturating_mul(BLOCK_BYTES);
            let inside = usize::try_from(length.saturating_sub(start)).unwrap_or(BLOCK).min(BLOCK);
            self.file.write(start, bytes.get(..inside).unwrap_or(bytes))
        };
        for (block, bytes) in blocks.range(1..) {
            write(*block, bytes.as_slice())?;
        }
        self.file.sync_data()?;
        if let Some(first) = blocks.get(&0) {
            write(0, first.as_slice())?;
        }
        self.file.sync_data()
    }
}

impl StorageBackend for Overflow {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let blocks = self.shared.read();
        self.file.read(offset, out)?;
        if blocks.is_empty() {
            return Ok(());
        }
        let end = offset.saturating_add(u64::try_from(out.len()).unwrap_or(u64::MAX));
        for (block, bytes) in blocks.range(offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES)) {
            let start = block.saturating_mul(BLOCK_BYTES);
            let (from, to) = (start.max(offset), start.saturating_add(BLOCK_BYTES).min(end));
            let index = |place: u64, base: u64| usize::try_from(place - base).unwrap_or(usize::MAX);
            let part = bytes.get(index(from, start)..index(to, start));
            if let (Some(place), Some(part)) = (out.get_mut(index(from, offset)..index(to, offset)), part) {
                place.copy_from_slice(part);
            }
        }
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut blocks = self.shared.write();
        self.file.set_len(len)?;
        // What is cut off must be zeros if the file grows again.
        let kept = blocks.split_off(&len.div_ceil(BLOCK_BYTES).max(1));
        drop(kept);
        let inside = usize::try_from(len % BLOCK_BYTES).unwrap_or(0);
        if inside > 0
            && let Some(tail) = blocks.get_mut(&(len / BLOCK_BYTES)).and_then(|bytes| bytes.get_mut(inside..))
        {
            tail.fill(0);
        }
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut blocks = self.shared.write();
        if blocks.is_empty() {
            return self.file.sync_data();
        }
        match self.write_back(&blocks) {
            Ok(()) => {
                blocks.clear();
                let directory = self.shared.directory.display();
                tracing::info!(state_dir = %directory, "state_dir has room again: the index is on disk");
                Ok(())
            }
            // The file is marked, so nobody counts on what is in it.
            Err(error) if is_full(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut blocks = self.shared.write();
        if blocks.is_empty() {
            match self.file.write(offset, data) {
                Err(error) if is_full(&error) => self.spill(&mut blocks)?,
                other => return other,
            }
        }
        self.keep(&mut blocks, offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.file.close()
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.file.try_lock_range(start, end)
    }

    fn try_lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.file.try_lock_shared_range(start, end)
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.file.lock_range(start, end)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.file.lock_shared_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.file.unlock_range(start, end)
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.file.query_lock_range(start, end)
    }
}
