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

/// The machine's clock since it was started, time in suspension included (`CLOCK_BOOTTIME`): a lease does not last longer
/// because whoever holds it was asleep.
#[derive(Clone, Copy, Debug)]
pub struct Clock(u64);

fn boot_time() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

impl Clock {
    /// Starts now. Clones agree.
    pub fn start() -> Clock {
        Clock(boot_time())
    }
    /// See [`Time`].
    pub fn now(&self) -> Time {
        Time(boot_time().saturating_sub(self.0))
    }
    /// The same moment on the standard library's clock (for waiting), if the machine is not suspended until then.
    pub fn instant(&self, time: Time) -> Instant {
        let left = Duration::from_nanos(time.0.min(u64::MAX / 4).saturating_sub(self.now().0));
        Instant::now() + left
    }
}
