//! Whether the other side answers at all: pure.
//!
//! Guarantees: the first call that finds nobody waits for its whole limit; from then until a sign of life, others wait only as
//! long as it takes to see that nothing has changed. What one call waits for (a name that is being published) says nothing: only
//! silence that lasted for all of a call does. Beginning and end are each told once (I11).

use crate::clock::Time;
use std::time::Duration;

/// The limit of lookups, lists and checks while nobody answers.
pub const PROBE: Duration = Duration::from_millis(500);
/// The limit of reads while nobody answers.
pub const READ_PROBE: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outage {
    heard: Time,
    since: Option<Time>,
}

impl Outage {
    /// A sign of life. How long it was awaited, where somebody had noticed.
    pub fn heard(&mut self, now: Time) -> Option<Duration> {
        self.heard = self.heard.max(now);
        self.since.take().map(|since| now.since(since))
    }

    /// A call that began then was not answered. True when this is how it is noticed.
    pub fn unanswered(&mut self, began: Time) -> bool {
        if self.since.is_some() || self.heard >= began && self.heard != Time(0) {
            return false;
        }
        self.since = Some(began);
        true
    }

    /// Since when nobody answers.
    pub fn since(&self) -> Option<Time> {
        self.since
    }

    /// How long a call may wait that would wait so long.
    pub fn limit(&self, limit: Duration, probe: Duration) -> Duration {
        if self.since.is_some() { limit.min(probe) } else { limit }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i11_silence_is_noticed_once_and_its_end_as_well() {
        let mut outage = Outage::default();
        let full = Duration::from_secs(5);
        assert_eq!(outage.limit(full, PROBE), full);
        assert_eq!(outage.heard(Time(10)), None);
        assert!(!outage.unanswered(Time(5)), "somebody answered meanwhile");
        assert_eq!(outage.limit(full, PROBE), full);
        assert!(outage.unanswered(Time(20)));
        assert!(!outage.unanswered(Time(30)), "it is known");
        assert_eq!((outage.since(), outage.limit(full, PROBE)), (Some(Time(20)), PROBE));
        assert_eq!(outage.limit(Duration::from_millis(100), PROBE), Duration::from_millis(100));
        assert_eq!(outage.heard(Time(50)), Some(Duration::from_nanos(30)));
        assert_eq!((outage.heard(Time(60)), outage.limit(full, PROBE)), (None, full));
    }
}
