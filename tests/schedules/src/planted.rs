//! Which of the bugs that build.rs made switchable is on. Each thread has its own: schedules run side by side.

use std::cell::Cell;

include!("bugs.rs");

thread_local! {
    static ON: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Whether the bug is on, in this thread.
pub fn is(name: &str) -> bool {
    ON.get().is_some_and(|on| on == name)
}

/// Switches this bug on for this thread, and any other one off; `None`: none is on.
pub fn plant(bug: Option<&Bug>) {
    ON.set(bug.map(|bug| bug.name));
}
