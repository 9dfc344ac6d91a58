//! What to fetch before it is asked for: pure, one small state per reader.
//!
//! A reader is sequential once two reads in a row went on about where the one before ended (reads of one file may arrive a
//! little out of order). Then a window ahead of it is kept full; it doubles with every further read up to the limit. A read
//! elsewhere closes the window; a random reader never gets one.

use std::ops::Range;

/// Bytes of the first window.
const FIRST_WINDOW: u64 = 2 << 20;
/// How many read lengths a sequential read may be off its expected place.
const SLACK: u64 = 4;

/// The state of one reader.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Readahead {
    expected: u64,
    streak: u32,
    window: u64,
    frontier: u64,
}

impl Readahead {
    /// A read arrived. Gives the bytes to fetch ahead now, if any, inside `0..size`.
    pub fn observe(&mut self, offset: u64, length: u32, size: u64, limit: u64) -> Option<Range<u64>> {
        let end = offset.saturating_add(u64::from(length));
        let slack = u64::from(length) * SLACK;
        let near = self.expected > 0 && offset.abs_diff(self.expected) <= if self.streak > 0 { slack } else { 0 };
        if !near {
            *self = Readahead { expected: end, ..Readahead::default() };
            return None;
        }
        self.expected = self.expected.max(end);
        self.streak = self.streak.saturating_add(1);
        self.window = if self.window == 0 { FIRST_WINDOW } else { self.window * 2 }.min(limit);
        let from = self.frontier.max(self.expected);
        let to = self.expected.saturating_add(self.window).min(size);
        if limit == 0 || to <= from {
            return None;
        }
        self.frontier = to;
        Some(from..to)
    }

    /// Whether the reader is sequential now: then whole cells are worth fetching for it.
    pub fn sequential(&self) -> bool {
        self.window > 0
    }

    /// What was fetched ahead and not read.
    pub fn unread(&self) -> Range<u64> {
        self.expected..self.frontier.max(self.expected)
    }

    /// Part of the window could not be fetched: try from `offset` again with the next read.
    pub fn fell_short(&mut self, offset: u64) {
        self.frontier = self.frontier.min(offset);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequential_reader_gets_a_growing_window_without_gaps() {
        let (mut r, size, step) = (Readahead::default(), 64 << 20, 1 << 20);
        let mut ahead: Option<u64> = None;
        for i in 0..64u64 {
            if let Some(range) = r.observe(i * step, step as u32, size, 16 << 20) {
                assert_eq!(range.start, ahead.unwrap_or(range.start));
                assert!(range.end <= size && range.end - (i + 1) * step <= 16 << 20);
                ahead = Some(range.end);
            }
            assert_eq!(r.sequential(), i >= 1);
        }
        assert_eq!(ahead, Some(size));
    }

    #[test]
    fn a_random_reader_gets_none() {
        let (mut r, mut at) = (Readahead::default(), 1u64);
        for _ in 0..1000 {
            at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            assert_eq!(r.observe((at >> 20) % (4 << 30), 4096, 4 << 30, 16 << 20), None);
        }
    }

    #[test]
    fn a_little_disorder_keeps_the_window_and_a_seek_closes_it() {
        let mut r = Readahead::default();
        for offset in [0u64, 1, 3, 2, 4, 6, 5] {
            r.observe(offset << 17, 1 << 17, 1 << 30, 16 << 20);
        }
        assert!(r.sequential());
        assert_eq!(r.observe(512 << 20, 1 << 17, 1 << 30, 16 << 20), None);
        assert!(!r.sequential());
        assert_eq!(Readahead::default().observe(u64::MAX, u32::MAX, 10, 1), None);
    }
}
