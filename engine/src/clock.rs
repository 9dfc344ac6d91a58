//! Time as the deciding code sees it: a number that is passed in.

use std::time::{Duration, Instant};

/// Nanoseconds since some start (of the process, of a simulation).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// Later than every deadline.
    pub const NEVER: Time = Time(u64::MAX);

    /// This time and `duration`, or [`Time::NEVER`].
    pub fn after(self, duration: Duration) -> Time {
        Time(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }
    /// How long it is since `earlier`; zero when `earlier` is later.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// The process's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// Starts now. Clones agree.
    pub fn start() -> Clock {
        Clock(Instant::now())
    }
    /// See [`Time`].
    pub fn now(&self) -> Time {
        Time(u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
    /// The same moment on the standard library's clock (for waiting).
    pub fn instant(&self, time: Time) -> Instant {
        self.0 + Duration::from_nanos(time.0.min(u64::MAX / 4))
    }
}
