//! How long versions have been superseded, whatever is done to the clock.
//!
//! Guarantees: pure. A version that was superseded in what the clock now calls the future (the clock was set back, or was
//! wrong when it happened) ages from the moment it is first seen so: it is kept for the retention from then, not until the
//! clock has caught up, and never for less. What is not superseded in the future is left as it is; only those that are, are
//! remembered, as long as they are listed.

use crate::catalog::{Standing, Time};
use railfs_engine::clock::Time as Instant;
use std::collections::HashMap;

const NANOSECONDS: i128 = 1_000_000_000;

/// Versions that were superseded in the future, and when that was first seen.
#[derive(Debug, Default)]
pub struct Aging {
    first: HashMap<u64, Instant>,
    seen: HashMap<u64, Instant>,
}

fn nanoseconds(time: Time) -> i128 {
    i128::from(time.seconds) * NANOSECONDS + i128::from(time.nanoseconds)
}

impl Aging {
    /// One look at everything begins.
    pub fn begin(&mut self) {
        self.first = std::mem::take(&mut self.seen);
    }

    /// Gives those of the future the time at which they would have been superseded if the clock had always been as it is
    /// now. `now` is the clock's, `instant` what only ever goes on.
    pub fn settle(&mut self, standings: &mut [Standing], now: Time, instant: Instant) {
        for standing in standings {
            let Some(superseded) = standing.superseded.as_mut() else { continue };
            if nanoseconds(*superseded) <= nanoseconds(now) {
                continue;
            }
            let version = standing.descriptor.version;
            let first = self.first.get(&version).copied().unwrap_or(instant);
            self.seen.insert(version, first);
            let age = i128::try_from(instant.since(first).as_nanos()).unwrap_or(0);
            let then = nanoseconds(now) - age;
            *superseded = Time {
                seconds: i64::try_from(then.div_euclid(NANOSECONDS)).unwrap_or(i64::MIN),
                nanoseconds: u32::try_from(then.rem_euclid(NANOSECONDS)).unwrap_or(0),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::reclaim::due;
    use railfs_proto::descriptor::{Attributes, Descriptor};
    use railfs_proto::layout::Striping;
    use railfs_proto::name::ObjectName;
    use std::time::Duration;

    fn standing(version: u64, seconds: i64) -> Standing {
        let attributes = Attributes { mode: 0, mtime_seconds: 0, mtime_nanoseconds: 0, owner: None };
        let striping = Striping::new(0, 4096, 4096, 1).unwrap();
        Standing {
            name: ObjectName::new("n", "k").unwrap(),
            descriptor: Descriptor { version, attributes, striping, components: vec![] },
            superseded: Some(Time { seconds, nanoseconds: 7 }),
        }
    }

    #[test]
    fn i8_a_clock_that_was_set_back_keeps_a_version_for_the_retention_and_no_longer() {
        let retention = Duration::from_secs(10);
        let mut aging = Aging::default();
        let mut look = |wall: i64, since_start: u64| {
            let mut all = [standing(1, 1_000_000), standing(2, 95)];
            let instant = Instant::default().after(Duration::from_secs(since_start));
            let now = Time { seconds: wall, nanoseconds: 0 };
            aging.begin();
            aging.settle(&mut all, now, instant);
            due(&all, retention, now)
        };
        assert_eq!(look(100, 5).versions, [0; 0]);
        assert_eq!(look(104, 9).versions, [0; 0], "four seconds are known");
        assert_eq!(look(106, 11).versions, [2]);
        // Set back once more, by years: nothing is lost of what is known.
        assert_eq!(look(-50, 14).versions, [0; 0], "the second is in the future as well now");
        assert_eq!(look(-49, 15).versions, [1]);
        assert_eq!(look(-40, 24).versions, [1, 2]);
    }
}
