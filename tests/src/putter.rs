//! Puts without a process each: a client of the test's own.
//!
//! Guarantees: bytes follow from a seed ([`crate::data`]), and every object says by its mode bits and size nothing else.

use crate::cluster::{Cluster, NAMESPACE};
use railfs_engine::client::{Client, Config, PutDone, PutOptions, Source};
use railfs_engine::error::Error;
use railfs_proto::descriptor::Attributes;
use railfs_proto::name::ObjectName;
use std::sync::Arc;

/// Bytes of [`crate::data::fill`].
#[derive(Clone, Copy, Debug)]
pub struct Made {
    /// What they follow from.
    pub seed: u64,
    /// How many.
    pub size: u64,
}

impl Source for Made {
    fn size(&self) -> u64 {
        self.size
    }
    fn read_exact_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        crate::data::fill(self.seed, offset, buffer);
        Ok(())
    }
}

/// How tests put: server's layout, mode 0644, a fixed time.
pub fn options() -> PutOptions {
    PutOptions {
        attributes: Attributes {
            mode: 0o644,
            mtime_seconds: 1_500_000_000,
            mtime_nanoseconds: 123_456_789,
            owner: None,
        },
        stripe_size: 0,
        page_size: 0,
        width: 0,
        if_version: None,
    }
}

/// See the module.
#[derive(Debug)]
pub struct Putter {
    /// The client.
    pub client: Arc<Client>,
}

impl Putter {
    /// Of a store that is served.
    ///
    /// # Panics
    /// It cannot be reached.
    pub fn new(cluster: &Cluster) -> Putter {
        let addresses = vec![cluster.control[0].to_string()];
        let config = Config { addresses, arena: 16 << 20, ..Config::default() };
        Putter { client: Client::connect(config).unwrap_or_else(|error| panic!("{error}")) }
    }

    /// The name of a key.
    ///
    /// # Panics
    /// No key can be so.
    pub fn name(key: &str) -> ObjectName {
        ObjectName::new(NAMESPACE, key.as_bytes().to_vec()).unwrap_or_else(|error| panic!("{key}: {error}"))
    }

    /// Puts.
    ///
    /// # Errors
    /// As the client says.
    pub fn try_put(&self, key: &str, seed: u64, size: u64) -> Result<PutDone, Error> {
        self.client.put(&Putter::name(key), Arc::new(Made { seed, size }), options())
    }
    /// Puts; gives the version.
    ///
    /// # Panics
    /// It failed.
    #[track_caller]
    pub fn put(&self, key: &str, seed: u64, size: u64) -> u64 {
        self.try_put(key, seed, size).unwrap_or_else(|error| panic!("put {key}: {error}")).version
    }
    /// Deletes.
    ///
    /// # Errors
    /// As the client says.
    pub fn delete(&self, key: &str) -> Result<u64, Error> {
        self.client.delete(&Putter::name(key), None)
    }

    /// Puts many, over as many threads: `key(number)`, of `size` bytes each.
    ///
    /// # Panics
    /// One failed.
    pub fn put_many(&self, numbers: std::ops::Range<u64>, threads: u64, size: u64, key: impl Fn(u64) -> String + Sync) {
        let next = std::sync::atomic::AtomicU64::new(numbers.start);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    loop {
                        let number = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        if number >= numbers.end {
                            return;
                        }
                        self.put(&key(number), number, size);
                    }
                });
            }
        });
    }
}

impl Drop for Putter {
    fn drop(&mut self) {
        self.client.close();
    }
}
