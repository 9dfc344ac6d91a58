//! The one ledger of what is registered with devices.
//!
//! Guarantees (I6): never more is taken than the limit, by whoever; what a [`Share`] holds comes back when it is dropped; a
//! refusal names what was asked for, what is taken, and the limit.

use railfs_proto::units::format_size;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug)]
struct Inner {
    limit: u64,
    used: AtomicU64,
    /// How an operator raises it.
    key: &'static str,
}

/// See the module. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Ledger(Arc<Inner>);

/// Bytes taken from a ledger; given back when it is dropped.
#[derive(Debug)]
pub struct Share {
    ledger: Ledger,
    bytes: u64,
}

impl Ledger {
    /// Of `limit` bytes. `key` is what an operator raises.
    pub fn new(limit: u64, key: &'static str) -> Ledger {
        Ledger(Arc::new(Inner { limit, used: AtomicU64::new(0), key }))
    }

    /// Takes `bytes` for `what`.
    ///
    /// # Errors
    /// There are not so many left; nothing is taken then.
    pub fn take(&self, bytes: u64, what: &str) -> Result<Share, String> {
        let Inner { limit, used, key } = &*self.0;
        let fits = |used: u64| used.checked_add(bytes).filter(|sum| sum <= limit);
        match used.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fits) {
            Ok(_) => Ok(Share { ledger: self.clone(), bytes }),
            Err(used) => Err(format!(
                "registered memory: {} of {} are taken, {what} needs {}; raise {key}",
                format_size(used),
                format_size(*limit),
                format_size(bytes)
            )),
        }
    }

    /// Bytes taken now.
    pub fn used(&self) -> u64 {
        self.0.used.load(Ordering::SeqCst)
    }
}

impl Share {
    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.ledger.0.used.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i6_a_ledger_gives_no_more_than_its_limit_and_names_the_numbers() {
        let ledger = Ledger::new(10 << 20, "memory.max_registered");
        let one = ledger.take(8 << 20, "the slab").unwrap();
        let error = ledger.take(3 << 20, "a connection").unwrap_err();
        for part in ["8 MiB", "10 MiB", "3 MiB", "a connection", "memory.max_registered"] {
            assert!(error.contains(part), "{error}");
        }
        assert!(ledger.take(u64::MAX, "all").is_err());
        let two = ledger.take(2 << 20, "a connection").unwrap();
        assert_eq!((ledger.used(), two.bytes()), (10 << 20, 2 << 20));
        drop(one);
        assert_eq!(ledger.used(), 2 << 20);
    }
}
