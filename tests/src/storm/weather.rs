//! Which faults there are now, and were a moment ago: what explains an error.
//!
//! Guarantees: a fault is noted before it is made, and ends here only after it was seen to be over.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// What is wrong at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sky {
    /// Nobody answers: no server, or no rail.
    pub outage: bool,
    /// A rail is down, slow or loses packets.
    pub rail: bool,
    /// The mount's daemon was killed, or is being mounted again.
    pub daemon: bool,
    /// The name of an object with a damaged component.
    pub damage: Option<String>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Weather {
    /// What there was, and until when; the last: what there is.
    past: Mutex<Vec<(Sky, Option<Instant>)>>,
}

impl Weather {
    /// From now on.
    pub fn set(&self, sky: Sky) {
        let mut past = self.past.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if let Some(last) = past.last_mut() {
            last.1 = Some(now);
        }
        // No call takes so long.
        past.retain(|(_, until)| until.is_none_or(|until| now.duration_since(until).as_secs() < 300));
        past.push((sky, None));
    }

    /// Whether it was so at any moment since `began`.
    pub fn explains(&self, began: Instant, so: impl Fn(&Sky) -> bool) -> bool {
        let past = self.past.lock().unwrap_or_else(PoisonError::into_inner);
        past.iter().any(|(sky, until)| until.is_none_or(|until| until >= began) && so(sky))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_over_before_explains_nothing() {
        let weather = Weather::default();
        let before = Instant::now();
        weather.set(Sky { outage: true, ..Sky::default() });
        weather.set(Sky::default());
        assert!(weather.explains(before, |sky| sky.outage));
        let after = Instant::now() + std::time::Duration::from_millis(1);
        assert!(!weather.explains(after, |sky| sky.outage));
        weather.set(Sky { daemon: true, ..Sky::default() });
        assert!(weather.explains(after, |sky| sky.daemon));
    }
}
