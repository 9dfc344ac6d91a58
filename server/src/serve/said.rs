//! What was said of damaged components: a client that asks three times, over three rails, makes one line.
//!
//! Guarantees: the same reason of the same component is said again only after [`AGAIN`]; of at most [`KEPT`] components is
//! remembered what was said.

use super::files::Key;
use crate::node::lock;
use lru::LruCache;
use railfs_engine::clock::Time;
use std::num::NonZeroUsize;
use std::sync::Mutex;
use std::time::Duration;

/// After so long it is said again.
pub const AGAIN: Duration = Duration::from_secs(300);
/// Components that are remembered.
pub const KEPT: NonZeroUsize = NonZeroUsize::new(1024).unwrap();

/// See the module.
#[derive(Debug)]
pub struct Said(Mutex<LruCache<Key, (String, Time)>>);

impl Default for Said {
    fn default() -> Self {
        Said(Mutex::new(LruCache::new(KEPT)))
    }
}

impl Said {
    /// Whether this is to be said now.
    pub fn is_new(&self, key: Key, why: &str, now: Time) -> bool {
        let mut said = lock(&self.0);
        if said.get(&key).is_some_and(|(before, when)| before == why && now.since(*when) < AGAIN) {
            return false;
        }
        said.put(key, (why.to_owned(), now));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use railfs_proto::descriptor::Id;

    #[test]
    fn i11_damage_is_said_once_until_it_changes_or_minutes_have_passed() {
        let said = Said::default();
        let key = |component| Key { version: 7, component, directory: Id([1; 16]) };
        let at = |seconds| Time::default().after(Duration::from_secs(seconds));
        assert!(said.is_new(key(0), "cut", at(0)) && said.is_new(key(1), "cut", at(0)));
        assert!(!said.is_new(key(0), "cut", at(1)) && !said.is_new(key(0), "cut", at(299)));
        assert!(said.is_new(key(0), "gone", at(299)) && !said.is_new(key(0), "gone", at(301)));
        assert!(said.is_new(key(1), "cut", at(300)));
    }
}
