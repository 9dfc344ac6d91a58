//! What was put and acknowledged, and so what a read may show.
//!
//! Guarantees: a state is numbered before its put begins and acknowledged after it ended; what a read saw for certain counts as
//! acknowledged for every read that begins later, by whomever: time goes forward only.

use crate::data::mix;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, PoisonError};

/// Counters by name.
pub type Count = BTreeMap<&'static str, u64>;

/// What an object is after one put or delete.
#[derive(Clone, Copy, Debug)]
pub struct State {
    /// From 1 on.
    pub number: u64,
    /// Of its bytes.
    pub seed: u64,
    /// None: deleted.
    pub size: Option<u64>,
}

/// One name.
#[derive(Debug)]
pub struct Object {
    /// Its key.
    pub name: String,
    /// Whether it is put again during the storm.
    pub changes: bool,
    /// Whether its components are damaged on purpose.
    pub hurt: bool,
    /// It has half as many bytes to as many.
    pub largest: u64,
    states: Mutex<Vec<State>>,
    begun: AtomicU64,
    floor: AtomicU64,
}

impl Object {
    fn new(name: impl Into<String>, changes: bool, hurt: bool, largest: u64) -> Object {
        Object {
            name: name.into(),
            changes,
            hurt,
            largest,
            states: Mutex::default(),
            begun: AtomicU64::new(0),
            floor: AtomicU64::new(0),
        }
    }

    /// A put (or a delete) begins.
    pub fn begin(&self, delete: bool) -> State {
        let mut states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        let number = states.len() as u64 + 1;
        let seed = self.name.bytes().fold(number, |seed, byte| mix(seed ^ u64::from(byte)));
        let size = self.largest / 2 + mix(seed) % (self.largest / 2);
        let state = State { number, seed, size: (!delete).then_some(size) };
        states.push(state);
        self.begun.store(number, SeqCst);
        state
    }

    /// It, or a later one, is what every read from now on must show.
    pub fn acknowledge(&self, number: u64) {
        self.floor.fetch_max(number, SeqCst);
    }

    /// The oldest that a read that begins now may show.
    pub fn floor(&self) -> u64 {
        self.floor.load(SeqCst)
    }

    /// The states that a read may show which began when `floor` was the floor, and has just ended; the newest first.
    pub fn candidates(&self, floor: u64) -> Vec<State> {
        let newest = self.begun.load(SeqCst);
        let states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        // The n-th is numbered n.
        let first = usize::try_from(floor.saturating_sub(1)).unwrap_or(usize::MAX);
        states
            .iter()
            .skip(first)
            .take_while(|state| state.number <= newest)
            .copied()
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
            .collect()
    }
}

/// All of it.
#[derive(Debug)]
pub struct World {
    /// Every name.
    pub objects: Vec<Object>,
    pub(super) over: AtomicBool,
    violations: Mutex<Vec<String>>,
}

impl World {
    /// Nothing was put yet.
    #[allow(clippy::new_without_default)]
    pub fn new() -> World {
        const MIB: u64 = 1 << 20;
        let still = (0..4).map(|n| Object::new(format!("still{n}"), false, false, 24 * MIB));
        let busy = (0..3).map(|n| Object::new(format!("busy{n}"), true, false, 2 * MIB));
        let hurt = (0..2).map(|n| Object::new(format!("hurt{n}"), false, true, 6 * MIB));
        let other = [Object::new("sometimes", true, false, MIB), Object::new("deep/er/small", true, false, 3000)];
        let objects = still.chain(busy).chain(hurt).chain(other).collect();
        World { objects, over: AtomicBool::new(false), violations: Mutex::default() }
    }

    /// Readers and writer end.
    pub fn end(&self) {
        self.over.store(true, SeqCst);
    }

    /// They have to.
    pub fn is_over(&self) -> bool {
        self.over.load(SeqCst)
    }

    /// What must not be has been seen.
    pub fn violation(&self, text: String) {
        eprintln!("VIOLATION {text}");
        let mut violations = self.violations.lock().unwrap_or_else(PoisonError::into_inner);
        // One fault can be seen by all readers.
        if violations.len() < 200 {
            violations.push(text);
        }
    }

    /// How many.
    pub fn violations(&self) -> usize {
        self.violations.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// All of them.
    pub fn take_violations(&self) -> Vec<String> {
        std::mem::take(&mut self.violations.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_may_show_what_was_acknowledged_before_it_or_begun_before_its_end() {
        let object = Object::new("name", true, false, 100);
        assert!(object.candidates(0).is_empty());
        let one = object.begin(false);
        object.acknowledge(one.number);
        let floor = object.floor();
        let two = object.begin(true);
        let numbers = |floor| object.candidates(floor).iter().map(|state| state.number).collect::<Vec<_>>();
        assert_eq!(numbers(floor), [2, 1], "one that is under way may be seen or not");
        // Somebody has seen it: it is done, whatever its put says.
        object.acknowledge(two.number);
        assert_eq!(numbers(object.floor()), [2]);
        assert_eq!(object.candidates(2)[0].size, None);
        assert_ne!(one.seed, two.seed);
    }
}
