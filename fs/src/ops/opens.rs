//! Which versions are open, and which of them the page cache has been filled from.
//!
//! Guarantees: pure but for its lock; a version is pinned at most once for its fills, by whoever comes first, and released
//! with its last handle.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
struct Open {
    handles: u64,
    filled: bool,
}

/// The table.
#[derive(Debug, Default)]
pub struct Opens(Mutex<HashMap<u64, Open>>);

impl Opens {
    fn table(&self) -> MutexGuard<'_, HashMap<u64, Open>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A handle of the version is about to be given out.
    pub fn opened(&self, version: u64) {
        self.table().entry(version).or_default().handles += 1;
    }

    /// A handle is closed. True: it was the last, and the version's fills were pinned: unpin it.
    pub fn closed(&self, version: u64) -> bool {
        let mut table = self.table();
        let Some(open) = table.get_mut(&version) else { return false };
        open.handles = open.handles.saturating_sub(1);
        if open.handles > 0 {
            return false;
        }
        table.remove(&version).is_some_and(|open| open.filled)
    }

    /// The page cache is filled from the version. True: for the first time since it was opened: pin it.
    pub fn fills(&self, version: u64) -> bool {
        self.table().get_mut(&version).is_some_and(|open| !std::mem::replace(&mut open.filled, true))
    }

    /// Whether a handle of it is open.
    pub fn is_open(&self, version: u64) -> bool {
        self.table().contains_key(&version)
    }

    /// Versions whose fills are pinned.
    pub fn filled(&self) -> u64 {
        self.table().values().filter(|open| open.filled).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_pinned_once_and_released_with_its_last_handle() {
        let opens = Opens::default();
        assert!(!opens.fills(2000), "nobody has it open");
        opens.opened(2000);
        opens.opened(2000);
        assert!(opens.is_open(2000) && opens.fills(2000) && !opens.fills(2000));
        assert_eq!(opens.filled(), 1);
        assert!(!opens.closed(2000) && opens.closed(2000) && !opens.closed(2000));
        opens.opened(2000);
        assert!(!opens.closed(2000), "not filled this time");
        assert!(!opens.is_open(2000) && opens.filled() == 0);
    }
}
