//! What is still to be pulled of one put: a pure state machine.
//!
//! Guarantees: each pull lies inside one stripe, is page aligned and at most 1 MiB long; every byte of the object is
//! accepted exactly once; a pull that failed goes to another rail where there is one; bytes that fail their check
//! [`MAX_BAD`] times fail the put.

use railfs_proto::layout::{Place, Striping};
use std::collections::{BTreeMap, VecDeque};

/// The put fails when the bytes of one pull failed their check this often.
pub const MAX_BAD: u32 = 3;

/// One run of the object's bytes to be pulled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pull {
    /// Its number in the put.
    pub index: u64,
    /// In the object.
    pub offset: u64,
    /// Bytes, at least 1, at most 1 MiB.
    pub length: u32,
    /// Where the bytes belong.
    pub place: Place,
}

#[derive(Clone, Copy, Debug)]
struct Again {
    index: u64,
    bad: u32,
    avoid: u64,
}

#[derive(Clone, Copy, Debug)]
struct Flight {
    rail: u64,
    bad: u32,
}

/// What became of a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// There is more to do.
    Going,
    /// Every byte was accepted.
    Complete,
    /// Too often bad.
    Hopeless,
    /// No such pull was in flight.
    Unknown,
}

/// A rail that pulls can go by, and how many are on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RailLoad {
    /// The connection's number.
    pub rail: u64,
    /// Pulls of all puts on it.
    pub load: usize,
}

/// See the module's head.
#[derive(Debug)]
pub struct Plan {
    striping: Striping,
    count: u64,
    next: u64,
    again: VecDeque<Again>,
    flying: BTreeMap<u64, Flight>,
    accepted: u64,
}

impl Plan {
    /// Everything is to be pulled.
    pub fn new(striping: Striping) -> Plan {
        let count = striping.size().div_ceil(u64::from(striping.extent_size()));
        Plan { striping, count, next: 0, again: VecDeque::new(), flying: BTreeMap::new(), accepted: 0 }
    }

    /// Pulls in flight, or landed and being verified.
    pub fn in_flight(&self) -> usize {
        self.flying.len()
    }

    /// Whether every byte was accepted.
    pub fn is_complete(&self) -> bool {
        self.accepted == self.count
    }

    /// Bytes of the pull that [`Plan::take`] would give; `None` when nothing is left to be sent.
    pub fn peek(&self) -> Option<u32> {
        let index = self.again.front().map(|again| again.index).or((self.next < self.count).then_some(self.next))?;
        Some(self.pull(index).length)
    }

    /// A pull by its number.
    pub fn pull(&self, index: u64) -> Pull {
        let extent = u64::from(self.striping.extent_size());
        let offset = index * extent;
        // At most an extent, which fits.
        let length = extent.min(self.striping.size().saturating_sub(offset)) as u32;
        Pull { index, offset, length, place: self.striping.place(offset) }
    }

    /// The next pull and the rail for it: the one with the least on it, not the one that failed it, where there is
    /// another. `None` when there is nothing to send or no rail.
    pub fn take(&mut self, rails: &[RailLoad]) -> Option<(Pull, u64)> {
        let avoid = self.again.front().map(|again| again.avoid);
        let least = |avoid: Option<u64>| {
            rails.iter().filter(|rail| Some(rail.rail) != avoid).min_by_key(|rail| rail.load).map(|rail| rail.rail)
        };
        let rail = least(avoid).or_else(|| least(None))?;
        let (index, bad) = match self.again.pop_front() {
            Some(again) => (again.index, again.bad),
            None if self.next < self.count => {
                self.next += 1;
                (self.next - 1, 0)
            }
            None => return None,
        };
        self.flying.insert(index, Flight { rail, bad });
        Some((self.pull(index), rail))
    }

    /// Its bytes are verified and written.
    pub fn accepted(&mut self, index: u64) -> After {
        if self.flying.remove(&index).is_none() {
            return After::Unknown;
        }
        self.accepted += 1;
        if self.is_complete() { After::Complete } else { After::Going }
    }

    /// The rail failed it: once more, by another.
    pub fn rail_failed(&mut self, index: u64) -> After {
        match self.flying.remove(&index) {
            Some(flight) => {
                self.again.push_back(Again { index, bad: flight.bad, avoid: flight.rail });
                After::Going
            }
            None => After::Unknown,
        }
    }

    /// Its bytes failed their check.
    pub fn was_bad(&mut self, index: u64) -> After {
        match self.flying.remove(&index) {
            Some(flight) if flight.bad + 1 >= MAX_BAD => After::Hopeless,
            Some(flight) => {
                self.again.push_back(Again { index, bad: flight.bad + 1, avoid: flight.rail });
                After::Going
            }
            None => After::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plan(size: u64, page: u32, stripe: u32, width: u32) -> Plan {
        Plan::new(Striping::new(size, page, stripe, width).unwrap())
    }
    const RAILS: [RailLoad; 2] = [RailLoad { rail: 1, load: 0 }, RailLoad { rail: 2, load: 3 }];

    proptest! {
        #[test]
        fn pulls_cover_the_object_and_never_cross_a_stripe(
            page in 12u32..=18, extra in 0u32..=8, width in 1u64..=5, size in 0u64..(40 << 20),
        ) {
            let (page, stripe) = (1u32 << page, 1u32 << (page + extra).min(26));
            let width = width.min(size.div_ceil(u64::from(stripe)).max(1)) as u32;
            let mut plan = plan(size, page, stripe, width);
            let striping = plan.striping;
            let mut at = 0;
            while let Some((pull, _)) = plan.take(&RAILS) {
                prop_assert_eq!(pull.offset, at);
                prop_assert!(pull.length >= 1 && pull.length <= 1 << 20 && pull.offset % u64::from(page) == 0);
                let last = pull.offset + u64::from(pull.length) - 1;
                prop_assert_eq!(pull.offset / u64::from(stripe), last / u64::from(stripe));
                prop_assert_eq!(striping.place(last).offset, pull.place.offset + u64::from(pull.length) - 1);
                at = last + 1;
                plan.accepted(pull.index);
            }
            prop_assert_eq!(at, size);
            prop_assert!(plan.is_complete());
        }

        #[test]
        fn whatever_fails_every_byte_is_accepted_once_or_the_put_fails(
            size in 1u64..(9 << 20), fates in proptest::collection::vec(0u8..4, 0..200),
        ) {
            let mut plan = plan(size, 4096, 1 << 20, 1);
            let (mut flying, mut accepted) = (Vec::new(), Vec::new());
            for fate in fates.into_iter().chain(std::iter::repeat_n(0, 64)) {
                while let Some((pull, rail)) = plan.take(&RAILS) {
                    flying.push((pull, rail));
                }
                let Some((pull, _)) = flying.pop() else { break };
                let after = match fate {
                    1 => plan.rail_failed(pull.index),
                    2 => plan.was_bad(pull.index),
                    _ => { accepted.push(pull.index); plan.accepted(pull.index) }
                };
                prop_assert_ne!(after, After::Unknown);
                if after == After::Hopeless { return Ok(()); }
                prop_assert_eq!(after == After::Complete, plan.is_complete());
            }
            prop_assert!(plan.is_complete() || !flying.is_empty() || plan.peek().is_some());
            accepted.sort_unstable();
            let before = accepted.len();
            accepted.dedup();
            prop_assert_eq!(before, accepted.len());
        }
    }

    #[test]
    fn i10_a_failed_pull_goes_to_another_rail_where_there_is_one() {
        let mut plan = plan(100, 4096, 4096, 1);
        let (pull, rail) = plan.take(&RAILS).unwrap();
        assert_eq!((pull.length, rail), (100, 1));
        assert_eq!(plan.take(&RAILS), None);
        plan.rail_failed(0);
        assert_eq!(plan.peek(), Some(100));
        assert_eq!(plan.take(&RAILS).unwrap().1, 2);
        plan.rail_failed(0);
        assert_eq!(plan.take(&RAILS[1..]).unwrap().1, 2);
        assert_eq!(plan.was_bad(0), After::Going);
        assert_eq!(plan.take(&RAILS).unwrap().1, 1);
        assert_eq!(plan.was_bad(0), After::Going);
        assert_eq!(plan.take(&[]), None);
        plan.take(&RAILS);
        assert_eq!(plan.was_bad(0), After::Hopeless);
        assert_eq!(plan.was_bad(0), After::Unknown);
        assert_eq!(plan.accepted(0), After::Unknown);
    }
}
