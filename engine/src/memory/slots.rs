//! Which parts of the arena are free: pure bookkeeping, no memory.
//!
//! The arena is a row of 1 MiB blocks. A free block is cut into slots of one power-of-two size when a smaller extent is
//! wanted, and is whole again when the last of them comes back. Lowest addresses go first, so that extents allocated one
//! after another tend to be neighbours.

use std::collections::BTreeSet;

/// Bytes of a block, and of the largest slot.
pub(crate) const BLOCK: u32 = 1 << 20;
/// Bytes of the smallest slot.
pub(crate) const SMALLEST: u32 = 4 << 10;
const CLASSES: usize = 9;

/// Where a slot lies, in bytes from the start of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Slot {
    pub(crate) offset: u64,
    pub(crate) size: u32,
}

#[derive(Debug, Clone)]
struct Block {
    /// Bytes of its slots; 0: whole and free.
    size: u32,
    /// A bit per slot that is taken.
    taken: [u64; 4],
    used: u32,
}

#[derive(Debug)]
pub(crate) struct Slots {
    blocks: Vec<Block>,
    whole: BTreeSet<u32>,
    partial: [BTreeSet<u32>; CLASSES],
    free_bytes: u64,
}

fn class(size: u32) -> usize {
    (size.trailing_zeros() - SMALLEST.trailing_zeros()) as usize
}

impl Slots {
    pub(crate) fn new(blocks: u32) -> Slots {
        Slots {
            blocks: vec![Block { size: 0, taken: [0; 4], used: 0 }; blocks as usize],
            whole: (0..blocks).collect(),
            partial: Default::default(),
            free_bytes: u64::from(blocks) * u64::from(BLOCK),
        }
    }

    /// Bytes that no extent holds. Some may be in blocks that are cut for another size.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// `size` is a power of two from [`SMALLEST`] to [`BLOCK`]; anything else has no slot.
    pub(crate) fn take(&mut self, size: u32) -> Option<Slot> {
        if !size.is_power_of_two() || !(SMALLEST..=BLOCK).contains(&size) {
            return None;
        }
        let class = class(size);
        let number = match self.partial[class].first() {
            Some(&number) => number,
            None => {
                let number = self.whole.pop_first()?;
                let block = &mut self.blocks[number as usize];
                block.size = size;
                self.partial[class].insert(number);
                number
            }
        };
        let block = &mut self.blocks[number as usize];
        let count = BLOCK / size;
        let index = (0..4).find_map(|word| {
            let bit = (!block.taken[word]).trailing_zeros();
            let index = word as u32 * 64 + bit;
            (bit < 64 && index < count).then_some(index)
        })?;
        block.taken[(index / 64) as usize] |= 1 << (index % 64);
        block.used += 1;
        if block.used == count {
            self.partial[class].remove(&number);
        }
        self.free_bytes -= u64::from(size);
        Some(Slot { offset: u64::from(number) * u64::from(BLOCK) + u64::from(index) * u64::from(size), size })
    }

    /// Gives back what [`Slots::take`] gave. Giving back twice is ignored and reported as false.
    pub(crate) fn give(&mut self, slot: Slot) -> bool {
        let number = (slot.offset / u64::from(BLOCK)) as u32;
        let Some(block) = self.blocks.get_mut(number as usize) else { return false };
        if block.size != slot.size {
            return false;
        }
        let index = (slot.offset % u64::from(BLOCK)) as u32 / slot.size;
        let (word, bit) = ((index / 64) as usize, 1u64 << (index % 64));
        if block.taken[word] & bit == 0 {
            return false;
        }
        block.taken[word] &= !bit;
        block.used -= 1;
        let class = class(slot.size);
        if block.used == 0 {
            block.size = 0;
            self.partial[class].remove(&number);
            self.whole.insert(number);
        } else {
            self.partial[class].insert(number);
        }
        self.free_bytes += u64::from(slot.size);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slots_never_overlap_and_all_come_back(ops in proptest::collection::vec((0u32..9, any::<u8>()), 1..400)) {
            let mut slots = Slots::new(5);
            let mut held: Vec<Slot> = Vec::new();
            for (class, pick) in ops {
                if pick % 3 == 0 && !held.is_empty() {
                    let slot = held.swap_remove(pick as usize % held.len());
                    prop_assert!(slots.give(slot));
                    prop_assert!(!slots.give(slot));
                } else if let Some(slot) = slots.take(SMALLEST << class) {
                    prop_assert_eq!(slot.offset % u64::from(slot.size), 0);
                    prop_assert!(slot.offset + u64::from(slot.size) <= 5 * u64::from(BLOCK));
                    for other in &held {
                        let apart = slot.offset + u64::from(slot.size) <= other.offset
                            || other.offset + u64::from(other.size) <= slot.offset;
                        prop_assert!(apart);
                    }
                    held.push(slot);
                }
                let sum: u64 = held.iter().map(|slot| u64::from(slot.size)).sum();
                prop_assert_eq!(slots.free_bytes() + sum, 5 * u64::from(BLOCK));
            }
            for slot in held {
                prop_assert!(slots.give(slot));
            }
            for _ in 0..5 {
                prop_assert!(slots.take(BLOCK).is_some());
            }
        }
    }

    #[test]
    fn one_after_another_are_neighbours() {
        let mut slots = Slots::new(4);
        let offsets: Vec<u64> = (0..32).map(|_| slots.take(64 << 10).unwrap().offset).collect();
        assert_eq!(offsets, (0..32).map(|i| i * (64 << 10)).collect::<Vec<_>>());
    }
}
