//! Version slots: one 8-byte word by which a server says whether anything under a name has changed.
//!
//! ```text
//! bits 56..64  publishes in progress (0 to 255)
//! bits 16..56  counter of finished publishes (40 bits)
//! bits  0..16  check bits: a hash of the two and of the incarnation
//! ```
//! A word that was torn on its way, or that belongs to another incarnation, fails its check bits; whoever reads it
//! treats that as "in progress". Only equality with the value that came with a lookup proves anything.

use xxhash_rust::xxh3::xxh3_64_with_seed;

const COUNTER_MASK: u64 = (1 << 40) - 1;

/// A slot word that passed its check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Publishes in progress on names of this slot.
    pub in_progress: u8,
    /// Publishes finished, modulo 2^40.
    pub counter: u64,
}

impl Slot {
    /// No publish in progress, none finished.
    pub const START: Slot = Slot { in_progress: 0, counter: 0 };

    /// The word, for one incarnation.
    pub fn encode(self, incarnation: u64) -> u64 {
        let body = u64::from(self.in_progress) << 40 | (self.counter & COUNTER_MASK);
        body << 16 | (xxh3_64_with_seed(&body.to_le_bytes(), incarnation) & 0xffff)
    }

    /// `None` for a torn word and for one of another incarnation.
    pub fn decode(word: u64, incarnation: u64) -> Option<Slot> {
        let body = word >> 16;
        let slot = Slot { in_progress: (body >> 40) as u8, counter: body & COUNTER_MASK };
        (slot.encode(incarnation) == word).then_some(slot)
    }

    /// A publish begins. `None` when 255 are in progress already.
    pub fn begin(self) -> Option<Slot> {
        Some(Slot { in_progress: self.in_progress.checked_add(1)?, ..self })
    }

    /// A publish ends: counter up, in progress down, one word.
    pub fn end(self) -> Slot {
        Slot { in_progress: self.in_progress.saturating_sub(1), counter: (self.counter + 1) & COUNTER_MASK }
    }

    /// The word that a lookup hands out: the same counter with nothing in progress.
    pub fn quiet(self) -> Slot {
        Slot { in_progress: 0, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_of_another_incarnation_or_torn_fails_its_check() {
        let word = Slot { in_progress: 3, counter: 0x12_3456_789a }.encode(9);
        assert_eq!(Slot::decode(word, 9), Some(Slot { in_progress: 3, counter: 0x12_3456_789a }));
        let refused = |word, incarnation| Slot::decode(word, incarnation).is_none();
        assert!((10..200).filter(|&other| refused(word, other)).count() >= 188);
        assert!((0..64).filter(|bit| refused(word ^ (1 << bit), 9)).count() >= 62);
    }

    #[test]
    fn ending_moves_the_counter_and_wraps() {
        let slot = Slot { in_progress: 1, counter: COUNTER_MASK };
        assert_eq!(slot.end(), Slot::START);
        assert_eq!(Slot { in_progress: 255, counter: 0 }.begin(), None);
    }
}
