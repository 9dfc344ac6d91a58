//! Opening the stripe directories of a store: each once, locked before anything in them is read.
//!
//! Guarantees: a directory that is not there, or carries no usable marker, counts as missing as long as others of its store
//! are there: nothing is made in its place, and the store says which it is; one that cannot be written is opened to be read.
//! A directory that is in use, of another store, or that nobody listed, is refused by name, and so is a store of which no
//! log directory is there.

use super::lock::{DirectoryLock, identity};
use super::marker::Marker;
use super::restore::was_stripe_directory;
use super::{DiskLogDirectory, LogDirectory, StoreError, failed, private, sync_directory};
use railfs_proto::descriptor::Id;
use rustix::fs::{StatVfs, StatVfsMountFlags};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// What helps where a log directory is gone for good.
const REPLACE: &str = "mount its disk and restart railfsd; if it is gone for good, stop railfsd and run `railfsd replace-log DIR` with another stripe directory";

/// What helps where a log directory is there, and its log cannot be read.
pub(crate) const UNREADABLE: &str = "put that right and restart railfsd, or stop railfsd and run `railfsd replace-log DIR` with another stripe directory";

/// A stripe directory of this node.
#[derive(Debug)]
pub struct StripeDirectory {
    id: Id,
    path: PathBuf,
    holds_log: bool,
    read_only: Option<String>,
    lock: DirectoryLock,
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
    /// Why nothing could be written here when it was opened; `None`: it could.
    pub fn read_only(&self) -> Option<&str> {
        self.read_only.as_deref()
    }
    /// Whether its path still leads to what was opened. A disk that went away leaves an empty directory, or another
    /// one, in its place, where nothing must be written. Asks the file system that holds the place.
    ///
    /// # Errors
    /// What is there now.
    pub fn check_place(&self) -> Result<(), String> {
        match identity(&self.path) {
            Ok(now) if now == self.lock.identity => Ok(()),
            Ok(_) => Err("another directory is in its place: its disk is not mounted".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
    /// Size and room of its file system, whatever is at its path by now.
    ///
    /// # Errors
    /// What the system said.
    pub fn space(&self) -> io::Result<StatVfs> {
        Ok(rustix::fs::fstatvfs(self.lock.directory())?)
    }
    /// Whether its file system takes no writes now.
    pub fn is_read_only(&self) -> bool {
        self.space().is_ok_and(|space| space.f_flag.contains(StatVfsMountFlags::RDONLY))
    }
    /// Device and inode of what was opened.
    pub(super) fn lock_identity(&self) -> (u64, u64) {
        self.lock.identity
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

/// A log directory that is there, with a log that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadableLog {
    /// Which directory.
    pub directory: Id,
    /// The file.
    pub path: String,
    /// The file, and what the system said.
    pub why: String,
}

/// A directory of the store that was not there when it was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingDirectory {
    /// Which.
    pub id: Id,
    /// Its path; with several missing, all that it may be.
    pub place: String,
    /// Why it counts as missing.
    pub why: String,
    /// Whether the log is kept there.
    pub holds_log: bool,
}

/// The stripe directories of a store on this node, locked until this is dropped.
#[derive(Debug)]
pub struct Store {
    id: Id,
    epoch: u64,
    directories: Vec<StripeDirectory>,
    missing: Vec<MissingDirectory>,
    /// All of the store, in the order in which they joined.
    all: Vec<Id>,
    log_directories: Vec<Id>,
    /// The marker of one that is there is of an epoch that is over.
    behind: bool,
    highest_sequence: Mutex<u64>,
    /// Log directories whose logs were found to be unreadable.
    unreadable: Mutex<Vec<UnreadableLog>>,
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

    /// Those that are not among these.
    pub(super) fn missing(&self, marked: &[(PathBuf, Marker)]) -> Vec<Id> {
        let here: BTreeSet<Id> = marked.iter().map(|(_, marker)| marker.directory).collect();
        self.directories.iter().filter(|id| !here.contains(id)).copied().collect()
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
    let members = gather(marked)?;
    match members.missing(marked).first() {
        None => Ok(members),
        Some(missing) => Err(not_listed(&members, *missing, marked)),
    }
}

fn not_listed(members: &Members, missing: Id, marked: &[(PathBuf, Marker)]) -> StoreError {
    let given = marked.iter().map(|(path, marker)| format!("{} ({})", path.display(), marker.directory));
    StoreError::Missing {
        store: members.store,
        missing,
        expected: members.directories.len(),
        given: given.collect::<Vec<_>>().join(", "),
    }
}

/// Puts the markers together; refuses two stores and a copy of a directory.
pub(super) fn gather(marked: &[(PathBuf, Marker)]) -> Result<Members, StoreError> {
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
    let highest = marked.iter().map(|(_, marker)| marker.highest_sequence).max().unwrap_or(0);
    Ok(Members {
        store: first.store,
        epoch: newest.epoch,
        highest_sequence: highest,
        directories,
        log_directories: newest.log_directories.clone(),
    })
}

/// Stripe directories that this process alone has now; nothing in them was read or changed yet.
#[derive(Debug)]
pub struct LockedDirectories {
    paths: Vec<PathBuf>,
    locked: Vec<(PathBuf, DirectoryLock)>,
    absent: Vec<(PathBuf, StoreError)>,
}

impl LockedDirectories {
    /// Those that are there.
    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.locked.iter().map(|(path, _)| path.as_path())
    }
}

/// Locks the directories of a store that are there: the first thing that a server does. Changes nothing on disk.
///
/// # Errors
/// One is listed twice, or is another process's, which is named.
pub fn lock(paths: &[PathBuf]) -> Result<LockedDirectories, StoreError> {
    if paths.is_empty() {
        return Err(StoreError::Empty);
    }
    let mut absent: Vec<(PathBuf, StoreError)> = Vec::new();
    let mut there = Vec::new();
    for path in paths {
        match identity(path) {
            Ok(identity) => there.push((path.clone(), identity)),
            Err(error) => absent.push((path.clone(), error)),
        }
    }
    let (places, identities): (Vec<PathBuf>, Vec<_>) = there.into_iter().unzip();
    check_distinct(&places, &identities)?;
    let mut locked = Vec::new();
    for (path, identity) in places.into_iter().zip(identities) {
        match DirectoryLock::take(&path) {
            Ok(lock) if lock.identity == identity => locked.push((path, lock)),
            Ok(lock) => {
                let why =
                    format!("it was replaced while it was being opened (device and inode are now {:?})", lock.identity);
                return Err(StoreError::BadMarker { path, why });
            }
            Err(error) if error.is_absence() => absent.push((path, error)),
            Err(error) => return Err(error),
        }
    }
    Ok(LockedDirectories { paths: paths.to_vec(), locked, absent })
}

/// [`lock`], then [`open_locked`].
///
/// # Errors
/// See there.
pub fn open(paths: &[PathBuf]) -> Result<Store, StoreError> {
    open_locked(lock(paths)?)
}

/// Opens the directories of a store. Makes the folders inside them that are not there yet. Each of the store must be
/// listed; those that are not there, or carry no usable marker, are missing (see [`Store::missing`]) while others are there.
///
/// # Errors
/// See the module's head.
pub fn open_locked(locked: LockedDirectories) -> Result<Store, StoreError> {
    let LockedDirectories { paths, locked, mut absent } = locked;
    let (mut marked, mut locks) = (Vec::new(), Vec::new());
    for (path, lock) in locked {
        match Marker::read(&path) {
            Ok(Some(marker)) => {
                Marker::check_room(&path)?;
                marked.push((path, marker));
                locks.push(lock);
            }
            // Also a place whose disk is not mounted: nothing is made there.
            Ok(None) if was_stripe_directory(&path) => absent.push((path.clone(), StoreError::MarkerGone(path))),
            Ok(None) => absent.push((path.clone(), StoreError::NoMarker(path))),
            Err(error) if error.is_absence() => absent.push((path, error)),
            Err(error) => return Err(error),
        }
    }
    absent.sort_by_key(|(path, _)| paths.iter().position(|listed| listed == path));
    if marked.is_empty() {
        return Err(absent.into_iter().next().map_or(StoreError::Empty, |(_, error)| error));
    }
    let members = gather(&marked)?;
    let missing = missing_directories(&members, &marked, absent)?;
    let behind = marked.iter().any(|(_, marker)| marker.epoch < members.epoch);
    let mut directories = Vec::new();
    for ((path, marker), lock) in marked.into_iter().zip(locks) {
        let holds_log = members.log_directories.contains(&marker.directory);
        let mut directory = StripeDirectory { id: marker.directory, path, holds_log, read_only: None, lock };
        match prepare(&directory) {
            Ok(()) => {}
            Err(error) if error.refuses_writes() => directory.read_only = Some(error.to_string()),
            Err(error) => return Err(error),
        }
        directories.push(directory);
    }
    Ok(Store {
        id: members.store,
        epoch: members.epoch,
        directories,
        missing,
        all: members.directories,
        log_directories: members.log_directories,
        behind,
        highest_sequence: Mutex::new(members.highest_sequence),
        unreadable: Mutex::default(),
    })
}

/// Which of the store's directories are missing, and where they may be. Refuses places that are none of the store's,
/// directories that no place is listed for, and a store without a log.
fn missing_directories(
    members: &Members,
    marked: &[(PathBuf, Marker)],
    absent: Vec<(PathBuf, StoreError)>,
) -> Result<Vec<MissingDirectory>, StoreError> {
    let missing = members.missing(marked);
    if let Some(id) = missing.get(absent.len()) {
        return Err(not_listed(members, *id, marked));
    }
    let place = absent.iter().map(|(path, _)| path.display().to_string()).collect::<Vec<_>>().join(" or ");
    let why = absent.iter().map(|(_, error)| error.to_string()).collect::<Vec<_>>().join("; ");
    if absent.len() > missing.len() {
        // At least one of these places belongs to no directory of the store.
        return Err(absent.into_iter().next().map_or(StoreError::Empty, |(_, error)| error));
    }
    let is_missing = |id: &Id| missing.contains(id);
    if !members.log_directories.is_empty() && members.log_directories.iter().all(is_missing) {
        let logs = members.log_directories.iter().map(Id::to_string).collect::<Vec<_>>().join(", ");
        return Err(StoreError::NoLog { store: members.store, logs, why });
    }
    let describe = |id: Id| MissingDirectory {
        id,
        place: place.clone(),
        why: why.clone(),
        holds_log: members.log_directories.contains(&id),
    };
    Ok(missing.into_iter().map(describe).collect())
}

/// Names this process in the directory and makes the folders that are not there yet.
fn prepare(directory: &StripeDirectory) -> Result<(), StoreError> {
    match directory.lock.name_holder(&directory.path) {
        // It is for messages alone.
        Err(error) if !error.refuses_writes() => tracing::warn!(%error, "the holder of a directory is not noted there"),
        other => other?,
    }
    let mut folders = vec![directory.components(), directory.lost()];
    if directory.holds_log {
        folders.push(directory.log());
    }
    for folder in folders {
        private::folder(&folder).map_err(failed("create", &folder))?;
    }
    sync_directory(&directory.path).map_err(failed("sync", &directory.path))
}

impl StoreError {
    /// Whether it says that a directory is not usable where it should be, rather than that something is wrong with what
    /// is there.
    fn is_absence(&self) -> bool {
        matches!(
            self,
            StoreError::NotThere(_)
                | StoreError::NotADirectory(_)
                | StoreError::NoMarker(_)
                | StoreError::MarkerGone(_)
                | StoreError::BadMarker { .. }
                | StoreError::Io { .. }
        )
    }

    /// Whether the file system takes no writes, or not from this process.
    fn refuses_writes(&self) -> bool {
        let StoreError::Io { source, .. } = self else { return false };
        matches!(Errno::from_io_error(source), Some(Errno::ROFS | Errno::ACCESS | Errno::PERM | Errno::IO))
    }
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

    /// Those of the store that were not there when it was opened.
    pub fn missing(&self) -> &[MissingDirectory] {
        &self.missing
    }

    /// Why nothing can be committed: a log directory is missing or cannot be written, or its log cannot be read. `None`: the log is whole.
    pub fn read_only(&self) -> Option<String> {
        let missing = self.missing.iter().filter(|missing| missing.holds_log);
        let missing = missing.map(|dir| format!("log directory {} ({}) is missing: {}", dir.place, dir.id, dir.why));
        let unwritable = self.directories.iter().filter(|directory| directory.holds_log).filter_map(|directory| {
            let why = directory.read_only()?;
            Some(format!("log directory {} ({}) cannot be written: {why}", directory.path.display(), directory.id))
        });
        let mut reasons: Vec<String> = missing.chain(unwritable).collect();
        if !reasons.is_empty() {
            reasons.push(REPLACE.to_owned());
        }
        for log in self.unreadable_logs() {
            let path = self.directory(log.directory).map_or_else(String::new, |dir| dir.path.display().to_string());
            reasons.push(format!("log directory {path} ({}): {}; {UNREADABLE}", log.directory, log.why));
        }
        (!reasons.is_empty()).then(|| reasons.join("; "))
    }

    /// Log directories whose logs cannot be read, as far as it was tried.
    pub fn unreadable_logs(&self) -> Vec<UnreadableLog> {
        self.unreadable.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes that the log in this folder cannot be read: nothing is committed, and the directory can be replaced.
    pub fn note_unreadable(&self, log: &str, path: &str, why: &str) {
        let of_log = |directory: &&StripeDirectory| directory.log().display().to_string() == log;
        let Some(directory) = self.directories.iter().find(of_log).map(StripeDirectory::id) else { return };
        let mut unreadable = self.unreadable.lock().unwrap_or_else(PoisonError::into_inner);
        if unreadable.iter().all(|known| known.directory != directory) {
            unreadable.push(UnreadableLog { directory, path: path.to_owned(), why: why.to_owned() });
        }
    }

    /// The directory with this id.
    pub fn directory(&self, id: Id) -> Option<&StripeDirectory> {
        self.directories.iter().find(|directory| directory.id == id)
    }

    /// Those that hold the log, in the order of the markers.
    pub(super) fn log_ids(&self) -> &[Id] {
        &self.log_directories
    }

    /// All of the store, in the order in which they joined.
    pub(super) fn all_ids(&self) -> &[Id] {
        &self.all
    }

    /// Whether some marker that is there is of an epoch that is over: it was away, or the beginning of this one was cut off.
    pub fn is_behind(&self) -> bool {
        self.behind
    }

    /// The highest sequence number that any marker has seen: a log that ends before it is an old one.
    pub fn highest_sequence(&self) -> u64 {
        *self.highest_sequence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The folders of the log that are there, in the order of the markers.
    pub fn log_directories(&self) -> Vec<Arc<dyn LogDirectory>> {
        let paths = self.log_directories.iter().filter_map(|id| self.directory(*id)).map(StripeDirectory::log);
        paths.map(|path| Arc::new(DiskLogDirectory::new(path)) as Arc<dyn LogDirectory>).collect()
    }

    /// Writes every marker anew, with the highest sequence number that is durable now. A directory that is not in its
    /// place, or takes no writes, is left out; of the others every one is tried.
    ///
    /// # Errors
    /// The first that could not be written.
    pub fn update_markers(&self, highest_sequence: u64) -> Result<(), StoreError> {
        // One at a time: two writers would fight over the temporary file.
        let mut highest = self.highest_sequence.lock().unwrap_or_else(PoisonError::into_inner);
        *highest = highest_sequence.max(*highest);
        let mut result = Ok(());
        for directory in &self.directories {
            if directory.read_only.is_some() || directory.is_read_only() {
                continue;
            }
            if let Err(why) = directory.check_place() {
                tracing::warn!(path = %directory.path.display(), directory = %directory.id, %why, "a marker is not brought up to date");
                continue;
            }
            let marker = Marker {
                store: self.id,
                directory: directory.id,
                epoch: self.epoch,
                highest_sequence: *highest,
                log_directories: self.log_directories.clone(),
                directories: self.all.clone(),
            };
            result = result.and(marker.write(&directory.path));
        }
        result
    }
}
