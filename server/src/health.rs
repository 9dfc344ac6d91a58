//! How the stripe directories are: what is known of each, which only gets worse until a restart.
//!
//! Guarantees: each change for the worse is logged once, naming directory, path and reason; a directory that is not `Ok`
//! takes no new component; what was known at the start (missing, not writable) is known here from the beginning.

use crate::node::lock;
use crate::store::{Store, StripeDirectory};
use railfs_proto::descriptor::Id;
use std::sync::Mutex;

/// From good to bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Condition {
    /// All is well.
    Ok,
    /// A read, write or sync failed.
    Suspect,
    /// Its file system takes no writes.
    ReadOnly,
    /// It is not in its place.
    Missing,
}

impl Condition {
    /// As status shows it.
    pub fn name(self) -> &'static str {
        match self {
            Condition::Ok => "ok",
            Condition::Suspect => "suspect",
            Condition::ReadOnly => "read-only",
            Condition::Missing => "missing",
        }
    }

    /// What follows from it, for the log.
    fn consequence(self) -> &'static str {
        match self {
            Condition::Ok => "",
            Condition::Suspect | Condition::ReadOnly => {
                "no new component goes there; restart railfsd when its disk is well"
            }
            Condition::Missing => {
                "objects with a component there cannot be read; restart railfsd when its disk is back in its place"
            }
        }
    }
}

/// One directory, as far as is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// Which.
    pub id: Id,
    /// Where it is, or should be.
    pub path: String,
    /// Whether the log is kept there.
    pub holds_log: bool,
    /// How it is.
    pub condition: Condition,
    /// Why it is not `Ok`; empty when it is.
    pub why: String,
}

/// All directories of a store.
#[derive(Debug)]
pub struct Health(Vec<Mutex<State>>);

impl Health {
    /// What is known at the start; what is wrong is logged.
    pub fn new(store: &Store) -> Health {
        let here = store.directories().iter().map(|directory| State {
            id: directory.id(),
            path: directory.path().display().to_string(),
            holds_log: directory.holds_log(),
            condition: Condition::Ok,
            why: String::new(),
        });
        let missing = store.missing().iter().map(|missing| State {
            id: missing.id,
            path: missing.place.clone(),
            holds_log: missing.holds_log,
            condition: Condition::Ok,
            why: String::new(),
        });
        let health = Health(here.chain(missing).map(Mutex::new).collect());
        for missing in store.missing() {
            health.worsen(missing.id, Condition::Missing, &missing.why);
        }
        for directory in store.directories() {
            if let Some(why) = directory.read_only() {
                health.worsen(directory.id(), Condition::ReadOnly, why);
            }
        }
        for log in store.unreadable_logs() {
            health.worsen(log.directory, Condition::Suspect, &log.why);
        }
        health
    }

    /// How the directory is; `None`: the store has no such directory.
    pub fn of(&self, directory: Id) -> Option<State> {
        self.all().find(|state| state.id == directory)
    }

    /// Every directory: those that are there as they were given, then those that were missing at the start.
    pub fn all(&self) -> impl Iterator<Item = State> {
        self.0.iter().map(|state| lock(state).clone())
    }

    /// Whether every directory is `Ok`.
    pub fn is_well(&self) -> bool {
        self.all().all(|state| state.condition == Condition::Ok)
    }

    /// Notes that it is so bad, if it was better before. True when it was.
    pub fn worsen(&self, directory: Id, condition: Condition, why: &str) -> bool {
        let Some(mut state) = self.0.iter().map(lock).find(|state| state.id == directory) else { return false };
        if state.condition >= condition {
            return false;
        }
        state.condition = condition;
        why.clone_into(&mut state.why);
        let (path, name) = (state.path.clone(), condition.name());
        drop(state);
        tracing::error!(%directory, path, why, "stripe directory is {name}: {}", condition.consequence());
        true
    }
}

/// What is to be seen of a directory from outside: whether it is in its place and may be written. Asks its file system.
pub fn look(directory: &StripeDirectory) -> Result<(), (Condition, String)> {
    directory.check_place().map_err(|why| (Condition::Missing, why))?;
    if directory.is_read_only() {
        return Err((Condition::ReadOnly, "its file system is mounted read-only".to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store;

    #[test]
    fn i11_a_directory_only_gets_worse_and_missing_ones_are_known_from_the_start() {
        let root = tempfile::tempdir().unwrap();
        let paths: Vec<_> = (0..3).map(|place| root.path().join(format!("d{place}"))).collect();
        paths.iter().for_each(|path| std::fs::create_dir(path).unwrap());
        let made = store::init(&paths).unwrap();
        std::fs::rename(&paths[2], root.path().join("away")).unwrap();
        let store = store::open(&paths).unwrap();
        let health = Health::new(&store);
        let id = made.added[0].1;
        assert!(!health.is_well());
        let missing = health.of(made.added[2].1).unwrap();
        assert_eq!((missing.condition, missing.path), (Condition::Missing, paths[2].display().to_string()));
        assert!(missing.why.contains("does not exist"), "{}", missing.why);
        assert!(health.worsen(id, Condition::ReadOnly, "first"));
        assert!(!health.worsen(id, Condition::Suspect, "second"));
        assert!(!health.worsen(id, Condition::ReadOnly, "third"));
        assert_eq!(health.of(id).unwrap().why, "first");
        assert_eq!(look(&store.directories()[0]), Ok(()));
        std::fs::rename(&paths[0], root.path().join("gone")).unwrap();
        let (condition, why) = look(&store.directories()[0]).unwrap_err();
        assert!(condition == Condition::Missing && why.contains("does not exist"), "{why}");
        std::fs::create_dir(&paths[0]).unwrap();
        assert!(look(&store.directories()[0]).unwrap_err().1.contains("another directory"));
        assert!(health.worsen(id, Condition::Missing, "gone"));
        assert_eq!(health.all().map(|state| state.condition).max(), Some(Condition::Missing));
        assert!(!health.worsen(Id([9; 16]), Condition::Missing, "of nobody"));
    }
}
