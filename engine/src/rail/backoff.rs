//! How long to wait before the next attempt to connect. Pure: the clock is passed in, the jitter comes from a seed.
//!
//! Guarantees: a wait is between three quarters and five quarters of `base` doubled per failure, and never longer than
//! `max`. A success does not forgive at once: each `decay` of being up takes back one doubling, so that a rail that comes
//! and goes is not tried at full speed for ever.

use crate::clock::Time;
use std::time::Duration;

/// See the module.
#[derive(Clone, Debug)]
pub struct Backoff {
    base: Duration,
    max: Duration,
    decay: Duration,
    /// Doublings owed.
    level: u32,
    /// Since when it has been up.
    up: Option<Time>,
    random: Random,
}

impl Backoff {
    /// 100 ms doubling to 2 s, one doubling forgiven per 5 s of being up.
    pub fn new(seed: u64) -> Backoff {
        Backoff::with(seed, Duration::from_millis(100), Duration::from_secs(2), Duration::from_secs(5))
    }

    /// See the module.
    pub fn with(seed: u64, base: Duration, max: Duration, decay: Duration) -> Backoff {
        Backoff { base, max, decay, level: 0, up: None, random: Random::new(seed) }
    }

    /// It has come up.
    pub fn connected(&mut self, now: Time) {
        self.up = Some(now);
    }

    /// It went down, or an attempt failed: wait this long before the next one.
    pub fn failed(&mut self, now: Time) -> Duration {
        if let Some(up) = self.up.take() {
            let forgiven = now.since(up).as_nanos() / self.decay.as_nanos().max(1);
            self.level = self.level.saturating_sub(u32::try_from(forgiven).unwrap_or(u32::MAX));
        }
        let wait = self.base.saturating_mul(1u32.checked_shl(self.level).unwrap_or(u32::MAX)).min(self.max);
        if wait < self.max {
            self.level += 1;
        }
        let jitter = wait.mul_f64(0.75 + 0.5 * self.random.unit());
        jitter.min(self.max)
    }
}

/// A small generator (splitmix64): the same seed gives the same numbers. Not for secrets.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed)
    }
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// From 0 up to but without 1.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn doubles_with_jitter_up_to_the_limit() {
        for seed in 0..50 {
            let mut backoff = Backoff::new(seed);
            for n in 0..10u32 {
                let plain = ms(100 << n.min(20)).min(ms(2000));
                let wait = backoff.failed(Time(u64::from(n)));
                assert!(
                    wait >= plain.mul_f64(0.75) && wait <= plain.mul_f64(1.25) && wait <= ms(2000),
                    "{n}: {wait:?}"
                );
            }
        }
    }

    #[test]
    fn a_success_forgives_slowly() {
        let mut backoff = Backoff::new(7);
        for n in 0..10 {
            backoff.failed(Time(n));
        }
        // Up for a moment: nothing is forgiven.
        backoff.connected(Time(100));
        assert!(backoff.failed(Time(200)) >= ms(1500));
        // Two steps forgiven, of the five it takes to get to the limit.
        backoff.connected(Time(0));
        let wait = backoff.failed(Time(0).after(Duration::from_secs(11)));
        assert!(wait >= ms(600) && wait <= ms(1000), "{wait:?}");
        backoff.connected(Time(0));
        assert!(backoff.failed(Time(0).after(Duration::from_secs(1000))) <= ms(125));
    }

    #[test]
    fn the_same_seed_waits_the_same() {
        let waits = |seed| {
            let mut backoff = Backoff::new(seed);
            (0..20).map(|n| backoff.failed(Time(n))).collect::<Vec<_>>()
        };
        assert_eq!(waits(3), waits(3));
        assert_ne!(waits(3), waits(4));
    }
}
