//! The cache: extents by (version, cell), least recently used cells first out.
//!
//! Guarantees: an extent leaves the cache only when nobody reads it, and its memory goes back to the arena at once.

use crate::read::landed::Landed;
use lru::LruCache;
use std::sync::Arc;

/// How many of the least recently used cells are looked at for one that nobody reads.
const SCAN: usize = 64;

/// See the module.
#[derive(Debug)]
pub struct Cache {
    cells: LruCache<(u64, u64), Vec<Arc<Landed>>>,
    bytes: u64,
}

impl Default for Cache {
    fn default() -> Self {
        Cache { cells: LruCache::unbounded(), bytes: 0 }
    }
}

impl Cache {
    /// Bytes of memory that the cache holds.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The extents of a cell; it becomes the most recently used one.
    pub fn get(&mut self, version: u64, cell: u64) -> &[Arc<Landed>] {
        self.cells.get(&(version, cell)).map_or(&[], Vec::as_slice)
    }

    /// Whether a page is there, without touching its cell.
    pub fn has(&self, version: u64, cell: u64, page: u64) -> bool {
        self.cells.peek(&(version, cell)).is_some_and(|runs| runs.iter().any(|run| run.pages().contains(&page)))
    }

    /// Adds an extent to its cell.
    pub fn insert(&mut self, version: u64, cell: u64, landed: Arc<Landed>) {
        self.bytes += u64::from(landed.memory_size());
        match self.cells.get_mut(&(version, cell)) {
            Some(runs) => runs.push(landed),
            None => {
                self.cells.put((version, cell), vec![landed]);
            }
        }
    }

    /// Takes out one extent (its bytes turned out bad).
    pub fn remove(&mut self, version: u64, cell: u64, landed: &Arc<Landed>) {
        let Some(runs) = self.cells.peek_mut(&(version, cell)) else { return };
        let before = runs.len();
        runs.retain(|run| !Arc::ptr_eq(run, landed));
        self.bytes -= (before - runs.len()) as u64 * u64::from(landed.memory_size());
        if runs.is_empty() {
            self.cells.pop(&(version, cell));
        }
    }

    /// Makes a cell the first to go, if it is there.
    pub fn demote(&mut self, version: u64, cell: u64) {
        self.cells.demote(&(version, cell));
    }

    /// Drops the least recently used cell that nobody reads. False where there is none.
    pub fn evict(&mut self) -> bool {
        let unread = |runs: &[Arc<Landed>]| runs.iter().all(|run| Arc::strong_count(run) == 1);
        let found = self.cells.iter().rev().take(SCAN).find(|(_, runs)| unread(runs)).map(|(key, _)| *key);
        let Some(runs) = found.and_then(|key| self.cells.pop(&key)) else { return false };
        self.bytes -= runs.iter().map(|run| u64::from(run.memory_size())).sum::<u64>();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Arena;
    use crate::read::landed::Origin;

    #[test]
    fn i6_the_least_recent_unread_cell_goes_and_its_memory_comes_back() {
        let arena = Arena::new(4 << 20).unwrap();
        let mut cache = Cache::default();
        for cell in 0..4u64 {
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
            cache.insert(2000, cell, Arc::new(Landed::new(memory, origin, vec![0; 16]).unwrap()));
        }
        assert_eq!((cache.bytes(), arena.stats().free), (4 << 20, 0));
        let reading = cache.get(2000, 1)[0].clone();
        cache.get(2000, 0);
        assert!(cache.evict());
        assert!(!cache.has(2000, 2, 32) && cache.has(2000, 0, 0) && cache.has(2000, 1, 16));
        assert_eq!(arena.stats().free, 1 << 20);
        assert!(cache.evict() && cache.evict() && !cache.evict());
        drop(reading);
        assert!(cache.evict());
        assert_eq!((cache.bytes(), arena.stats().free), (0, 4 << 20));
    }
}
