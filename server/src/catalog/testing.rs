//! What the tests of the catalog share.

use super::batch::SequenceKeeper;
use super::log::LogIdentity;
use super::{Condition, Delete, LogCatalog, LogCatalogOptions, Put, Recovered, RequestId, StartError, Time};
use crate::store::simdisk::SimDisks;
use railfs_proto::descriptor::{Attributes, Descriptor, Id, Replica};
use railfs_proto::layout::Striping;
use railfs_proto::name::ObjectName;
use std::path::Path;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

pub(crate) const STORE: Id = Id([9; 16]);

pub(crate) fn name(key: &str) -> ObjectName {
    ObjectName::new("ns", key.as_bytes().to_vec()).unwrap()
}

pub(crate) fn descriptor(version: u64) -> Descriptor {
    // The size tells versions apart, so that a blend of two would be seen.
    let striping = Striping::new(version * 3, 4096, 65536, 1).unwrap();
    Descriptor {
        version,
        attributes: Attributes { mode: 0o644, mtime_seconds: 5, mtime_nanoseconds: 6, owner: None },
        striping,
        components: vec![vec![Replica { node: "n".to_owned(), directory: Id([1; 16]) }]],
    }
}

/// A request id that no other call gives.
pub(crate) fn request() -> RequestId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut id = [0; 16];
    id[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    id
}

pub(crate) fn put(key: &str, version: u64) -> Put {
    Put { name: name(key), request: request(), descriptor: descriptor(version), condition: Condition::Always }
}

pub(crate) fn delete(key: &str, version: u64) -> Delete {
    Delete { name: name(key), request: request(), version, condition: Condition::Always }
}

/// A clock that moves one second each time it is asked.
pub(crate) fn clock() -> Arc<dyn Fn() -> Time + Send + Sync> {
    let seconds = AtomicI64::new(1000);
    Arc::new(move || Time { seconds: seconds.fetch_add(1, Ordering::Relaxed), nanoseconds: 7 })
}

/// The markers, in memory.
#[derive(Debug, Default)]
pub(crate) struct Markers(pub(crate) Mutex<u64>);

impl SequenceKeeper for Markers {
    fn keep(&self, highest: u64) -> Result<(), String> {
        let mut kept = self.0.lock().unwrap();
        *kept = highest.max(*kept);
        Ok(())
    }
}

impl Markers {
    /// Others, that have seen the same: a start of one image of the disks is nothing to the others.
    pub(crate) fn copy(&self) -> Arc<Markers> {
        Arc::new(Markers(Mutex::new(*self.0.lock().unwrap())))
    }
}

/// Small segments, so that the log rolls often.
pub(crate) const SEGMENT: u64 = 6 << 10;

/// Bytes of log after which a checkpoint is due where there are to be many.
pub(crate) const OFTEN: u64 = 600;

/// What their records are seeded with.
pub(super) const IDENTITY: LogIdentity = LogIdentity { store: STORE, epoch: 1, segment_size: SEGMENT };

pub(crate) fn options(disks: &SimDisks, state: &Path, markers: &Arc<Markers>) -> LogCatalogOptions {
    LogCatalogOptions {
        newest_component: None,
        state_dir: state.to_owned(),
        store: STORE,
        epoch: 1,
        logs: disks.directories(),
        highest_sequence: *markers.0.lock().unwrap(),
        keeper: Arc::clone(markers) as Arc<dyn SequenceKeeper>,
        node: "n".to_owned(),
        lease_milliseconds: 2000,
        verbs: false,
        segment_size: SEGMENT,
        requests: 1000,
        checkpoint_bytes: u64::MAX,
        checkpoint_apart: false,
        read_only: None,
        index_memory: super::index::LIMIT,
        clock: clock(),
    }
}

pub(crate) fn open(
    disks: &SimDisks,
    state: &Path,
    markers: &Arc<Markers>,
) -> Result<(Arc<LogCatalog>, Recovered), StartError> {
    LogCatalog::open(options(disks, state, markers))
}

/// Everything that the index holds, without its numbers of records: sorted, one entry a line.
pub(super) fn dump(catalog: &LogCatalog) -> Vec<String> {
    let mut lines = Vec::new();
    let all = catalog.snapshot().unwrap().entries::<super::index::IndexError>(0, &mut |entry| {
        lines.push(format!("{entry:?}"));
        Ok(())
    });
    assert!(all.unwrap().is_empty(), "no tombstone is left out");
    lines.sort();
    lines
}

/// In memory where there is such a place: the index syncs, and its durability is not what is tested.
pub(crate) fn state_dir() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory).unwrap() } else { tempfile::tempdir().unwrap() }
}

/// Runs a future whose only company is the catalog's own thread.
pub(crate) fn wait<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

/// What a test of invariants has tried, for the table that `make test` ends with.
pub(super) fn tally(invariants: &str, kind: &str, count: u64, test: &str) {
    if let Some(log) = std::env::var_os("RAILFS_TALLY_LOG") {
        let mut file = std::fs::File::options().append(true).create(true).open(log).unwrap();
        std::io::Write::write_all(&mut file, format!("{invariants} {kind} {count} {test}\n").as_bytes()).unwrap();
    }
}
