//! Waiting for conditions.
//!
//! Guarantees: a wait ends when its condition holds, or in a panic that says what did not come true within the limit.

use std::time::{Duration, Instant};

/// Long enough for anything that should happen soon, on a machine that does much else.
pub const SOON: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(5);

/// Waits until the condition holds.
///
/// # Panics
/// Not within the limit.
pub fn until(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
    eventually(what, limit, || if condition() { Ok(()) } else { Err("not so".to_owned()) });
}

/// Waits until the attempt succeeds, and returns what it got.
///
/// # Panics
/// Not within the limit; says what the last attempt said.
pub fn eventually<T>(what: &str, limit: Duration, mut attempt: impl FnMut() -> Result<T, String>) -> T {
    let end = Instant::now() + limit;
    loop {
        match attempt() {
            Ok(value) => return value,
            Err(why) if Instant::now() >= end => panic!("{what}: not within {limit:?}: {why}"),
            Err(_) => std::thread::sleep(POLL),
        }
    }
}
