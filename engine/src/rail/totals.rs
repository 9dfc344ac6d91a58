//! The counters of a rail, kept by its connections.

use super::Counters;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// See [`Counters`]. Relaxed: each number is exact by itself, together they are a moment's view.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    pub(crate) bulk_received: AtomicU64,
    pub(crate) bulk_sent: AtomicU64,
    pub(crate) submitted: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) in_flight: AtomicU64,
    pub(crate) held_bytes: AtomicU64,
    pub(crate) connects: AtomicU64,
    pub(crate) pings: AtomicU64,
    pub(crate) stale: AtomicU64,
}

impl Totals {
    pub(crate) fn counters(&self) -> Counters {
        Counters {
            bulk_received: self.bulk_received.load(Relaxed),
            bulk_sent: self.bulk_sent.load(Relaxed),
            submitted: self.submitted.load(Relaxed),
            failed: self.failed.load(Relaxed),
            in_flight: self.in_flight.load(Relaxed),
            held_bytes: self.held_bytes.load(Relaxed),
            connects: self.connects.load(Relaxed),
            pings: self.pings.load(Relaxed),
            stale: self.stale.load(Relaxed),
        }
    }
}

pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Relaxed);
}

pub(crate) fn subtract(counter: &AtomicU64, n: u64) {
    counter.fetch_sub(n, Relaxed);
}
