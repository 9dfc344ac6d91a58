//! When a checkpoint of the log is due, and what may go once there is one. Pure: no files, no clock.
//!
//! Guarantees: a checkpoint is due after so many bytes of log, and after as many as the last one is long, so that writing them
//! costs no more than what is logged; one that failed is tried again only after more has been logged; nothing goes that a start
//! would need that can use the last checkpoint but one.

use std::collections::BTreeSet;

/// Bytes of log after which a checkpoint is written.
pub(super) const CHECKPOINT_BYTES: u64 = 64 << 20;
/// Checkpoints that are kept: where the last one is damaged, the log goes on from the one before it.
pub(super) const KEPT: usize = 2;
/// Tombstones that go at one checkpoint, at most: what is remembered of them is held in memory.
pub(super) const FORGET: usize = 1 << 16;

/// How far the log has grown since the last checkpoint.
#[derive(Debug)]
pub(super) struct Growth {
    bound: u64,
    grown: u64,
    due_at: u64,
    /// How far it had grown when the checkpoint was begun that is being written.
    begun: Option<u64>,
}

impl Growth {
    /// `grown` bytes of log follow the last checkpoint, which has `size` bytes. `wanting`: one is due at once, because
    /// there is none that is whole everywhere.
    pub(super) fn new(bound: u64, grown: u64, size: u64, wanting: bool) -> Growth {
        let due_at = if wanting { 0 } else { due_after(bound, size) };
        Growth { bound, grown, due_at, begun: None }
    }

    /// So many bytes were appended.
    pub(super) fn appended(&mut self, bytes: u64) {
        self.grown = self.grown.saturating_add(bytes);
    }

    /// Whether one is to be begun now.
    pub(super) fn due(&self) -> bool {
        self.begun.is_none() && self.grown >= self.due_at
    }

    /// One is being written.
    pub(super) fn begin(&mut self) {
        self.begun = Some(self.grown);
    }

    /// It is whole in every log, `size` bytes long.
    pub(super) fn done(&mut self, size: u64) {
        self.grown = self.grown.saturating_sub(self.begun.take().unwrap_or(0));
        self.due_at = due_after(self.bound, size);
    }

    /// It is not.
    pub(super) fn failed(&mut self) {
        self.begun = None;
        self.due_at = self.grown.saturating_add((self.bound / 4).max(1));
    }
}

/// The bound, as many times as the last checkpoint, which has `size` bytes, has [`CHECKPOINT_BYTES`].
fn due_after(bound: u64, size: u64) -> u64 {
    bound.saturating_mul(size.div_ceil(CHECKPOINT_BYTES).max(1))
}

/// What may go.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Cut {
    /// Segments whose first record is below this one.
    pub(super) segments_below: u64,
    /// Checkpoints whose last record is below this one.
    pub(super) checkpoints_below: u64,
}

/// `segments` by their first records, `checkpoints` by their last ones: those that are whole in every log.
pub(super) fn cut(segments: &BTreeSet<u64>, checkpoints: &BTreeSet<u64>) -> Cut {
    let Some(&oldest) = checkpoints.iter().rev().nth(KEPT - 1) else { return Cut::default() };
    // The segment that holds the record after it, or will.
    let first = segments.range(..=oldest.saturating_add(1)).next_back().copied();
    Cut { segments_below: first.unwrap_or(0), checkpoints_below: oldest }
}

/// Whether a tombstone of this version must be kept: as long as a put with a lower version may be under way, which is one
/// of this run (versions up to `before` were reserved before it), and as long as files of its name are there.
pub(super) fn tombstone_needed(version: u64, before: u64, has_files: bool) -> bool {
    has_files || version > before
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_due_after_so_many_bytes_and_again_after_as_many() {
        let mut growth = Growth::new(100, 0, 0, false);
        growth.appended(99);
        assert!(!growth.due());
        growth.appended(1);
        assert!(growth.due());
        growth.begin();
        growth.appended(70);
        assert!(!growth.due(), "one at a time");
        growth.done(10);
        assert!(!growth.due());
        growth.appended(30);
        assert!(growth.due(), "what was appended meanwhile counts");
        growth.begin();
        growth.done(2 * CHECKPOINT_BYTES + 1);
        growth.appended(299);
        assert!(!growth.due(), "a long one is not written for a little log");
        growth.appended(1);
        assert!(growth.due());
    }

    #[test]
    fn one_that_failed_is_tried_again_after_more_was_logged() {
        let mut growth = Growth::new(100, 150, 0, false);
        assert!(growth.due(), "what a start finds counts");
        growth.begin();
        growth.failed();
        growth.appended(24);
        assert!(!growth.due());
        growth.appended(1);
        assert!(growth.due());
        let mut wanting = Growth::new(100, 0, 0, true);
        assert!(wanting.due());
        wanting.begin();
        wanting.failed();
        assert!(!wanting.due(), "not for ever");
    }

    #[test]
    fn what_the_last_checkpoint_but_one_needs_stays() {
        let segments = BTreeSet::from([1, 10, 20, 30]);
        let cut = |checkpoints: &[u64]| {
            let Cut { segments_below, checkpoints_below } = cut(&segments, &checkpoints.iter().copied().collect());
            (segments_below, checkpoints_below)
        };
        assert_eq!(cut(&[]), (0, 0));
        assert_eq!(cut(&[25]), (0, 0));
        assert_eq!(cut(&[18, 25]), (10, 18));
        assert_eq!(cut(&[19, 25]), (20, 19), "record 20 begins a segment");
        assert_eq!(cut(&[5, 12, 25, 33]), (20, 25));
        assert_eq!(cut(&[40, 50]), (30, 40), "the last segment always stays");
    }

    #[test]
    fn a_tombstone_goes_when_no_put_that_it_stops_can_come_and_its_files_are_gone() {
        assert!(tombstone_needed(11, 10, false), "of this run");
        assert!(tombstone_needed(5, 10, true), "its files are there");
        assert!(!tombstone_needed(10, 10, false));
    }
}
