//! The core's books, counted anew from what it holds: for tests, which compare them with the arena, the rails and the ledger
//! after every step.
//!
//! Guarantees: looks only. What it finds is said with the number of the read, fetch or attempt that it is about.

use super::{Core, Flight};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Bytes of memory, by who holds them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// What the ledger says is committed.
    pub ledger: u64,
    /// Of attempts whose memory a rail has, or keeps until its fence.
    pub with_rails: u64,
    /// Of fetches that wait for a rail.
    pub waiting: u64,
    /// In the cache.
    pub cached: u64,
    /// Of landed pages that reads hold and the cache does not.
    pub loose: u64,
}

impl Core {
    /// Counts what is held, and compares the tables with each other.
    ///
    /// # Errors
    /// The first entry that contradicts another one, with the invariant that it breaks.
    pub fn audit(&self) -> Result<Holdings, String> {
        let mut holdings = Holdings { ledger: self.ledger.held(), cached: self.cache.bytes(), ..Holdings::default() };
        for (id, flight) in &self.flights {
            holdings.with_rails += u64::from(flight.memory);
            let attempt = match flight.flight {
                Flight::Gone => continue,
                Flight::Fetch(fetch) => self.fetches.get(&fetch).and_then(|fetch| fetch.attempt),
                Flight::Small(small) | Flight::Look(small) => self.smalls.get(&small).and_then(|small| small.attempt),
            };
            if attempt != Some(*id) {
                return Err(format!(
                    "I5: {:?} is not what attempt {id} in flight is for: that is {attempt:?}",
                    flight.flight
                ));
            }
        }
        for (id, fetch) in &self.fetches {
            if fetch.extent.is_some() {
                holdings.waiting += u64::from(fetch.geometry.extent);
            }
            if let Some(attempt) = fetch.attempt.filter(|attempt| !self.flights.contains_key(attempt)) {
                return Err(format!("I9: fetch {id} waits for attempt {attempt}, which is not in flight"));
            }
            if fetch.extent.is_some() && fetch.attempt.is_some() {
                return Err(format!("I4: fetch {id} has memory beside that of its attempt in flight"));
            }
        }
        let mut loose = BTreeSet::new();
        for (id, read) in &self.reads {
            let pending = read.pending.iter().find(|fetch| !self.fetches.contains_key(fetch));
            // One that has its pages may still name a fetch that brought others of them.
            if let Some(fetch) = pending {
                return Err(format!("I9: read {id} waits for fetch {fetch}, which is no more"));
            }
            for part in &read.parts {
                let cell = self.cell_of(read, part.pages().start);
                if !self.cache.holds(part.origin().version, cell, part) && loose.insert(Arc::as_ptr(part) as usize) {
                    holdings.loose += u64::from(part.memory_size());
                }
            }
        }
        let owed = holdings.with_rails + holdings.waiting;
        if holdings.ledger != owed {
            return Err(format!("I6: the ledger says {}, attempts and fetches hold {owed}", holdings.ledger));
        }
        Ok(holdings)
    }

    fn cell_of(&self, read: &super::Read, page: u64) -> u64 {
        page / crate::read::plan::pages_per_cell(&read.object.descriptor.striping)
    }
}
