//! Opening the stripe directories of a store: all of them, each once, locked before anything in them is read.

use super::lock::{DirectoryLock, identity};
use super::marker::Marker;
use super::{DiskLogDirectory, LogDirectory, StoreError, failed, sync_directory};
use railfs_proto::descriptor::Id;
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// A stripe directory of this node.
#[derive(Debug)]
pub struct StripeDirectory {
    id: Id,
    path: PathBuf,
    holds_log: bool,
    _lock: DirectoryLock,
}

impl StripeDirectory {
    /// By this it is known, whatever its path.
    pub fn id(&self) -> Id {
        self.id
    }
    /// Where it is today.
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// Whether the log is kept here.
    pub fn holds_log(&self) -> bool {
        self.holds_log
    }
    /// Component files.
    pub fn components(&self) -> PathBuf {
        self.path.join("components")
    }
    /// Segments of the log.
    pub fn log(&self) -> PathBuf {
        self.path.join("log")
    }
    /// Valid components that no record names.
    pub fn lost(&self) -> PathBuf {
        self.path.join("lost")
    }
}

/// The stripe directories of a store on this node, locked until this is dropped.
#[derive(Debug)]
pub struct Store {
    id: Id,
    epoch: u64,
    directories: Vec<StripeDirectory>,
    log_directories: Vec<Id>,
    highest_sequence: Mutex<u64>,
}

/// What the markers of some directories say together.
#[derive(Debug)]
pub(super) struct Members {
    pub(super) store: Id,
    pub(super) epoch: u64,
    pub(super) highest_sequence: u64,
    pub(super) directories: Vec<Id>,
    pub(super) log_directories: Vec<Id>,
}

impl Members {
    /// A store that has no directory yet.
    pub(super) fn none(store: Id) -> Members {
        Members { store, epoch: 1, highest_sequence: 0, directories: Vec::new(), log_directories: Vec::new() }
    }
}

/// Two names of one directory are refused.
pub(super) fn check_distinct(paths: &[PathBuf], identities: &[(u64, u64)]) -> Result<(), StoreError> {
    for (at, (path, identity)) in paths.iter().zip(identities).enumerate() {
        if let Some(before) = identities.iter().take(at).position(|other| other == identity) {
            return Err(StoreError::Twice { first: paths[before].clone(), second: path.clone() });
        }
    }
    Ok(())
}

/// Puts the markers together; refuses two stores, a copy of a directory, and a directory that is listed but not here.
pub(super) fn members(marked: &[(PathBuf, Marker)]) -> Result<Members, StoreError> {
    let Some((first_path, first)) = marked.first() else { return Err(StoreError::Empty) };
    // The newest marker knows most: markers are replaced one after another.
    let mut newest = first;
    for (at, (path, marker)) in marked.iter().enumerate() {
        if marker.store != first.store {
            return Err(StoreError::OtherStore {
                path: path.clone(),
                theirs: marker.store,
                other: first_path.clone(),
                ours: first.store,
            });
        }
        if let Some((before, _)) = marked[..at].iter().find(|(_, other)| other.directory == marker.directory) {
            return Err(StoreError::Twice { first: before.clone(), second: path.clone() });
        }
        if (marker.epoch, marker.directories.len()) > (newest.epoch, newest.directories.len()) {
            newest = marker;
        }
    }
    let mut directories = newest.directories.clone();
    let more = marked.iter().flat_map(|(_, marker)| &marker.directories);
    for id in more {
        if !directories.contains(id) {
            directories.push(*id);
        }
    }
    let here: BTreeSet<Id> = marked.iter().map(|(_, marker)| marker.directory).collect();
    if let Some(missing) = directories.iter().find(|id| !here.contains(id)) {
        let given = marked.iter().map(|(path, marker)| format!("{} ({})", path.display(), marker.directory));
        return Err(StoreError::Missing {
            store: first.store,
            missing: *missing,
            expected: directories.len(),
            given: given.collect::<Vec<_>>().join(", "),
        });
    }
    let highest = marked.iter().map(|(_, marker)| marker.highest_sequence).max().unwrap_or(0);
    Ok(Members {
        store: first.store,
        epoch: newest.epoch,
        highest_sequence: highest,
        directories,
        log_directories: newest.log_directories.clone(),
    })
}

/// Opens the directories of a store. Each must carry a marker, all of one store, and none of that store may be missing.
/// Makes the folders inside them that are not there yet.
pub fn open(paths: &[PathBuf]) -> Result<Store, StoreError> {
    if paths.is_empty() {
        return Err(StoreError::Empty);
    }
    let identities = paths.iter().map(|path| identity(path)).collect::<Result<Vec<_>, _>>()?;
    check_distinct(paths, &identities)?;
    let locks = paths.iter().map(|path| DirectoryLock::take(path)).collect::<Result<Vec<_>, _>>()?;
    if let Some((lock, path)) = locks
        .iter()
        .zip(paths)
        .zip(&identities)
        .find_map(|((lock, path), identity)| (lock.identity != *identity).then_some((lock, path)))
    {
        let why = format!("it was replaced while it was being opened (device and inode are now {:?})", lock.identity);
        return Err(StoreError::BadMarker { path: path.clone(), why });
    }
    let mut marked = Vec::new();
    for path in paths {
        let marker = Marker::read(path)?.ok_or_else(|| StoreError::NoMarker(path.clone()))?;
        marked.push((path.clone(), marker));
    }
    let members = members(&marked)?;
    let mut directories = Vec::new();
    for ((path, marker), lock) in marked.into_iter().zip(locks) {
        lock.name_holder(&path)?;
        let holds_log = members.log_directories.contains(&marker.directory);
        let directory = StripeDirectory { id: marker.directory, path, holds_log, _lock: lock };
        let mut folders = vec![directory.components(), directory.lost()];
        if holds_log {
            folders.push(directory.log());
        }
        for folder in folders {
            match std::fs::create_dir(&folder) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(failed("create", &folder)(error));
                }
                _ => {}
            }
        }
        sync_directory(&directory.path).map_err(failed("sync", &directory.path))?;
        directories.push(directory);
    }
    Ok(Store {
        id: members.store,
        epoch: members.epoch,
        directories,
        log_directories: members.log_directories,
        highest_sequence: Mutex::new(members.highest_sequence),
    })
}

impl Store {
    /// The store's id.
    pub fn id(&self) -> Id {
        self.id
    }

    /// The epoch of the log that counts.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// In the order in which they were given.
    pub fn directories(&self) -> &[StripeDirectory] {
        &self.directories
    }

    /// The directory with this id.
    pub fn directory(&self, id: Id) -> Option<&StripeDirectory> {
        self.directories.iter().find(|directory| directory.id == id)
    }

    /// The highest sequence number that any marker has seen: a log that ends before it is an old one.
    pub fn highest_sequence(&self) -> u64 {
        *self.highest_sequence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The folders of the log, in the order of the markers.
    pub fn log_directories(&self) -> Vec<Arc<dyn LogDirectory>> {
        let paths = self.log_directories.iter().filter_map(|id| self.directory(*id)).map(StripeDirectory::log);
        paths.map(|path| Arc::new(DiskLogDirectory::new(path)) as Arc<dyn LogDirectory>).collect()
    }

    /// Writes every marker anew, with the highest sequence number that is durable now.
    pub fn update_markers(&self, highest_sequence: u64) -> Result<(), StoreError> {
        // One at a time: two writers would fight over the temporary file.
        let mut highest = self.highest_sequence.lock().unwrap_or_else(PoisonError::into_inner);
        *highest = highest_sequence.max(*highest);
        let all: Vec<Id> = self.directories.iter().map(|directory| directory.id).collect();
        for directory in &self.directories {
            let current = Marker::read(&directory.path)?;
            // Keeps the order in which the directories joined, which the configuration need not have.
            let listed = current.map(|marker| marker.directories).unwrap_or_default();
            let more = all.iter().filter(|id| !listed.contains(id));
            let directories = listed.iter().chain(more).copied().collect();
            let marker = Marker {
                store: self.id,
                directory: directory.id,
                epoch: self.epoch,
                highest_sequence: *highest,
                log_directories: self.log_directories.clone(),
                directories,
            };
            marker.write(&directory.path)?;
        }
        Ok(())
    }
}
