//! The cache: extents by (version, cell), least recently used cells first out.
//!
//! Guarantees: an extent leaves the cache only when nobody reads it, and its memory goes back to the arena at once. What was
//! fetched ahead and nobody has read yet is counted; it goes after what was read, unless it is no longer wanted
//! ([`Cache::demote`]) or has lain there while twice the cache's bytes came in.

use crate::read::landed::Landed;
use lru::LruCache;
use std::ops::Range;
use std::sync::Arc;

/// How many of the least recently used cells are looked at for one that nobody reads.
const SCAN: usize = 64;

#[derive(Debug)]
struct Run {
    landed: Arc<Landed>,
    /// Fetched ahead and not read yet; what had come in by then.
    ahead: Option<u64>,
}

/// See the module.
#[derive(Debug)]
pub struct Cache {
    cells: LruCache<(u64, u64), Vec<Run>>,
    bytes: u64,
    unread: u64,
    /// Bytes that ever came in.
    came: u64,
    /// Bytes that were fetched ahead and dropped without having been read.
    wasted: u64,
}

impl Default for Cache {
    fn default() -> Self {
        Cache { cells: LruCache::unbounded(), bytes: 0, unread: 0, came: 0, wasted: 0 }
    }
}

impl Cache {
    /// Bytes of memory that the cache holds.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of memory that hold what was fetched ahead, is still wanted, and was not read yet.
    pub fn unread(&self) -> u64 {
        self.unread
    }

    /// Bytes of memory of what was fetched ahead and dropped before anybody read it.
    pub fn wasted(&self) -> u64 {
        self.wasted
    }

    /// The extents of a cell that overlap these pages; the cell becomes the most recently used one.
    pub fn get(&mut self, version: u64, cell: u64, pages: &Range<u64>) -> Vec<Arc<Landed>> {
        let runs = self.cells.get(&(version, cell)).map_or(&[][..], Vec::as_slice);
        runs.iter().map(|run| &run.landed).filter(|landed| overlap(&landed.pages(), pages)).cloned().collect()
    }

    /// These pages of the cell were asked for: what was fetched ahead there counts as read.
    pub fn asked(&mut self, version: u64, cell: u64, pages: &Range<u64>) {
        for run in self.cells.peek_mut(&(version, cell)).into_iter().flatten() {
            if overlap(&run.landed.pages(), pages) && run.ahead.take().is_some() {
                self.unread -= u64::from(run.landed.memory_size());
            }
        }
    }

    /// Whether a page is there, without touching its cell.
    pub fn has(&self, version: u64, cell: u64, page: u64) -> bool {
        self.cells.peek(&(version, cell)).is_some_and(|runs| runs.iter().any(|run| run.landed.pages().contains(&page)))
    }

    /// Whether this very extent is there, without touching its cell.
    pub fn holds(&self, version: u64, cell: u64, landed: &Arc<Landed>) -> bool {
        self.cells.peek(&(version, cell)).is_some_and(|runs| runs.iter().any(|run| Arc::ptr_eq(&run.landed, landed)))
    }

    /// Adds an extent to its cell. `ahead`: nobody has asked for it yet.
    pub fn insert(&mut self, version: u64, cell: u64, landed: Arc<Landed>, ahead: bool) {
        let size = u64::from(landed.memory_size());
        self.bytes += size;
        self.came += size;
        if ahead {
            self.unread += size;
        }
        let run = Run { landed, ahead: ahead.then_some(self.came) };
        match self.cells.get_mut(&(version, cell)) {
            Some(runs) => runs.push(run),
            None => {
                self.cells.put((version, cell), vec![run]);
            }
        }
    }

    /// Takes out one extent (its bytes turned out bad).
    pub fn remove(&mut self, version: u64, cell: u64, landed: &Arc<Landed>) {
        let Some(runs) = self.cells.peek_mut(&(version, cell)) else { return };
        let Some(at) = runs.iter().position(|run| Arc::ptr_eq(&run.landed, landed)) else { return };
        let run = runs.swap_remove(at);
        if runs.is_empty() {
            self.cells.pop(&(version, cell));
        }
        self.left(&run);
    }

    /// A run has left the cache.
    fn left(&mut self, run: &Run) {
        let size = u64::from(run.landed.memory_size());
        self.bytes -= size;
        if run.ahead.is_some() {
            self.unread -= size;
            self.wasted += size;
        }
    }

    /// What was fetched ahead of these pages of a cell is no longer wanted: the cell is the first to go.
    pub fn demote(&mut self, version: u64, cell: u64, pages: &Range<u64>) {
        let Some(runs) = self.cells.peek_mut(&(version, cell)) else { return };
        let mut unread = 0;
        for run in runs.iter_mut().filter(|run| overlap(&run.landed.pages(), pages)) {
            if run.ahead.take().is_some() {
                unread += u64::from(run.landed.memory_size());
            }
        }
        self.unread -= unread;
        self.wasted += unread;
        if unread > 0 {
            self.cells.demote(&(version, cell));
        }
    }

    /// Drops the least recently used cell that nobody reads, one with bytes ahead of their reader last. False where there
    /// is none.
    pub fn evict(&mut self) -> bool {
        let idle = |runs: &[Run]| runs.iter().all(|run| Arc::strong_count(&run.landed) == 1);
        let fresh = |run: &Run| run.ahead.is_some_and(|came| self.came - came < 2 * self.bytes);
        let mut last = None;
        let mut found = None;
        for (key, runs) in self.cells.iter().rev().filter(|(_, runs)| idle(runs)).take(SCAN) {
            if !runs.iter().any(fresh) {
                found = Some(*key);
                break;
            }
            last = last.or(Some(*key));
        }
        let Some(runs) = found.or(last).and_then(|key| self.cells.pop(&key)) else { return false };
        runs.iter().for_each(|run| self.left(run));
        true
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Arena;
    use crate::read::landed::Origin;

    fn landed(arena: &Arena, cell: u64) -> Arc<Landed> {
        let memory = arena.allocate(1 << 20).unwrap().filled(b"x").unwrap();
        let origin = Origin {
            version: 2000,
            component: 0,
            component_page: 0,
            first: cell * 16,
            page_size: 65536,
            length: 1 << 20,
            rail: 0,
        };
        Arc::new(Landed::new(memory, origin, vec![0; 16]).unwrap())
    }

    #[test]
    fn i6_the_least_recent_unread_cell_goes_and_its_memory_comes_back() {
        let arena = Arena::new(4 << 20).unwrap();
        let mut cache = Cache::default();
        for cell in 0..4u64 {
            cache.insert(2000, cell, landed(&arena, cell), false);
        }
        assert_eq!((cache.bytes(), arena.stats().free), (4 << 20, 0));
        let reading = cache.get(2000, 1, &(16..17));
        assert!(cache.get(2000, 1, &(32..48)).is_empty());
        cache.get(2000, 0, &(0..1));
        assert!(cache.evict());
        assert!(!cache.has(2000, 2, 32) && cache.has(2000, 0, 0) && cache.has(2000, 1, 16));
        assert_eq!(arena.stats().free, 1 << 20);
        assert!(cache.evict() && cache.evict() && !cache.evict());
        drop(reading);
        assert!(cache.evict());
        assert_eq!((cache.bytes(), arena.stats().free), (0, 4 << 20));
    }

    #[test]
    fn what_is_ahead_of_its_reader_goes_last_unless_it_is_no_longer_wanted() {
        let arena = Arena::new(64 << 20).unwrap();
        let mut cache = Cache::default();
        cache.insert(2000, 0, landed(&arena, 0), true);
        cache.insert(2000, 1, landed(&arena, 1), true);
        cache.insert(2000, 2, landed(&arena, 2), false);
        assert_eq!((cache.unread(), cache.wasted()), (2 << 20, 0));
        assert!(cache.evict());
        assert!(cache.has(2000, 0, 0) && !cache.has(2000, 2, 32), "what was read goes first, although it is newer");
        cache.insert(2000, 2, landed(&arena, 2), false);
        cache.asked(2000, 0, &(3..4));
        cache.asked(2000, 0, &(3..4));
        cache.get(2000, 0, &(3..4));
        assert_eq!(cache.unread(), 1 << 20);
        cache.demote(2000, 1, &(16..32));
        cache.demote(2000, 2, &(32..48));
        assert_eq!((cache.unread(), cache.wasted()), (0, 1 << 20));
        assert!(cache.evict() && !cache.has(2000, 1, 16));
        assert!(cache.evict() && !cache.has(2000, 2, 32) && cache.has(2000, 0, 0));
        // One that nobody comes for does not stay for ever.
        let mut cache = Cache::default();
        cache.insert(2000, 0, landed(&arena, 0), true);
        for cell in 1..9 {
            cache.insert(2000, cell, landed(&arena, cell), false);
            if cell > 2 {
                cache.evict();
            }
        }
        assert!(!cache.has(2000, 0, 0));
        assert_eq!((cache.unread(), cache.wasted()), (0, 1 << 20));
    }
}
