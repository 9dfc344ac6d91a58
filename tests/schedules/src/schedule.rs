//! One schedule: readers, a server that publishes, rails between them, and what goes wrong; all drawn from a seed.
//!
//! Guarantees: see the crate. [`run`] never panics because an invariant is broken: it says which one.

mod checker;
mod faults;
pub mod kinds;
mod server;
mod stand;

use kinds::Met;

/// How often something is drawn in a schedule: each draw is an event, and so is everything that it sets in motion.
pub const DRAWS: u64 = 200;

/// What came of a schedule.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Which kinds of fault it met.
    pub met: Met,
    /// Draws, and what happened on the rails.
    pub events: u64,
    /// Reads answered with bytes, with ESTALE, with other errors.
    pub answered: [u64; 3],
    /// The invariant that was broken first, and how.
    pub broken: Option<String>,
    /// Line by line, if asked for.
    pub trace: Vec<String>,
    /// Of everything that happened, in order: the same seed has the same one.
    pub digest: u64,
}

/// Generator of decisions: splitmix64.
#[derive(Clone, Debug)]
pub struct Dice(pub u64);

impl Dice {
    /// One of `sides` numbers from 0 on.
    pub fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides.max(1)
    }

    /// From `from` up to, not including, `to`.
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.roll(to.saturating_sub(from))
    }

    /// Once in so many times.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.roll(times) == 0
    }
}

/// Runs the schedule of a seed. A panic of what is tested counts as broken, too.
pub fn run(seed: u64, traced: bool) -> Outcome {
    let result = std::panic::catch_unwind(|| stand::schedule(seed, traced));
    result.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        let broken = format!("it panicked: {}", text.unwrap_or_default());
        Outcome { broken: Some(broken), ..Outcome::default() }
    })
}
