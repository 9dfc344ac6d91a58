//! What a server's network card does by itself: it answers READs of version slots, whatever its software does.
//!
//! Guarantees: a READ outside the slots is an error and gives nothing; a word may be torn between two states that it really had.

use super::Context;
use crate::rail::{Look, Slots};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(super) struct Card {
    words: Arc<[AtomicU64]>,
    incarnation: u64,
}

impl Card {
    pub(super) fn new(words: Arc<[AtomicU64]>, incarnation: u64) -> Card {
        Card { words, incarnation }
    }

    pub(super) fn slots(&self) -> Slots {
        Slots { incarnation: self.incarnation, count: self.words.len() as u64 }
    }

    /// Whether the look is of these slots.
    pub(super) fn has(&self, look: &Look) -> bool {
        look.incarnation == self.incarnation && !look.slots.is_empty()
    }

    /// The words as they are now. `None`: one of the slots lies outside.
    pub(super) fn now(&self, slots: &[u32]) -> Option<Vec<u64>> {
        let word = |slot: &u32| Some(self.words.get(usize::try_from(*slot).ok()?)?.load(Ordering::SeqCst));
        slots.iter().map(word).collect()
    }

    /// A READ that was posted when the words were those: some are torn between then and now.
    pub(super) fn read(&self, slots: &[u32], posted: &[u64], torn: f64, context: &mut Context) -> Option<Vec<u64>> {
        let half = u64::from(u32::MAX);
        let mut words = self.now(slots)?;
        for (word, before) in words.iter_mut().zip(posted) {
            if context.chance(torn) {
                let now = *word;
                *word = if context.chance(0.5) { before & half | *word & !half } else { *word & half | before & !half };
                context.tally.torn += u64::from(*word != now && *word != *before);
            }
        }
        Some(words)
    }
}
