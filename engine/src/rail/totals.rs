//! The counters of a rail, kept by its connections.

use super::Counters;
use std::sync::atomic::{
    AtomicU64, AtomicUsize,
    Ordering::{Relaxed, SeqCst},
};

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

/// Never below zero: a gauge that wrapped would refuse everything from then on.
pub(crate) fn subtract(counter: &AtomicU64, n: u64) {
    if let Ok(less) = counter.fetch_update(Relaxed, Relaxed, |now| Some(now.saturating_sub(n)))
        && less < n
    {
        tracing::error!(counter = less, less = n, "a counter of a rail would go below zero: it stays there");
    }
}

/// The same for requests that are under way.
#[cfg_attr(not(feature = "rdma"), allow(dead_code))]
pub(crate) fn ended(counter: &AtomicUsize, n: usize) {
    if let Ok(less) = counter.fetch_update(SeqCst, SeqCst, |now| Some(now.saturating_sub(n)))
        && less < n
    {
        tracing::error!(under_way = less, ended = n, "more requests ended than were under way");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i6_a_count_never_wraps() {
        let (bytes, requests) = (AtomicU64::new(3), AtomicUsize::new(1));
        subtract(&bytes, 2);
        ended(&requests, 1);
        assert_eq!((bytes.load(Relaxed), requests.load(SeqCst)), (1, 0));
        subtract(&bytes, 2);
        ended(&requests, 1);
        assert_eq!((bytes.load(Relaxed), requests.load(SeqCst)), (0, 0));
    }
}
