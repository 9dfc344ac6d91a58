//! Which bytes of a source were given to the server.
//!
//! Guarantees: pure; a byte counts once, however often it was pulled; what is kept is bounded: beyond [`MOST`] separate runs
//! only what touches one of them counts.

use std::collections::BTreeMap;

/// Most runs of bytes that are kept. A server that pulls in order needs as many as pulls are under way.
const MOST: usize = 1 << 16;

/// Runs of bytes that do not touch: start and end.
#[derive(Debug, Default)]
pub(super) struct Given {
    runs: BTreeMap<u64, u64>,
    bytes: u64,
}

impl Given {
    /// Bytes in all.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// These have gone out. Whether any of them had not before.
    pub(super) fn add(&mut self, offset: u64, bytes: u64) -> bool {
        let (mut start, mut end) = (offset, offset.saturating_add(bytes));
        if start == end {
            return false;
        }
        // From the first run that touches these bytes to the last one.
        let from =
            self.runs.range(..=start).next_back().filter(|(_, until)| **until >= start).map_or(start, |run| *run.0);
        let touching: Vec<(u64, u64)> = self.runs.range(from..=end).map(|(start, end)| (*start, *end)).collect();
        if touching.is_empty() && self.runs.len() >= MOST {
            return false;
        }
        let mut known = 0;
        for (first, last) in touching {
            self.runs.remove(&first);
            known += last - first;
            (start, end) = (start.min(first), end.max(last));
        }
        self.runs.insert(start, end);
        let new = (end - start).saturating_sub(known);
        self.bytes = self.bytes.saturating_add(new);
        new > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bytes_count_once(pulls in proptest::collection::vec((0u64..60, 0u64..9), 0..40)) {
            let (mut given, mut seen) = (Given::default(), [false; 80]);
            for (offset, bytes) in pulls {
                let place = &mut seen[usize::try_from(offset).unwrap()..usize::try_from(offset + bytes).unwrap()];
                let new = place.iter().any(|seen| !seen);
                place.fill(true);
                prop_assert_eq!(given.add(offset, bytes), new);
                prop_assert_eq!(given.bytes(), seen.iter().filter(|seen| **seen).count() as u64);
            }
        }
    }

    #[test]
    fn i6_what_is_kept_of_scattered_pulls_is_bounded() {
        let mut given = Given::default();
        for index in 0..MOST as u64 {
            assert!(given.add(index * 2, 1));
        }
        assert!(!given.add(u64::MAX - 1, 1), "one run more is not kept");
        assert!(given.add(1, 1), "what joins two is");
        assert!(given.add(u64::MAX - 1, 1) && given.runs.len() <= MOST);
    }
}
