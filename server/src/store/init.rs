//! `railfsd init`: makes stripe directories.
//!
//! Guarantees: doing it twice changes nothing; interrupted at any moment it can be repeated, because a marker lists
//! another directory only once that one's own marker is durable.

use super::lock::{DirectoryLock, identity};
use super::logdir::SEGMENT_SIZE;
use super::marker::{MARKER, Marker, is_ours_or_harmless};
use super::open::{Members, check_distinct, members};
use super::restore::was_stripe_directory;
use super::{StoreError, failed};
use railfs_proto::descriptor::Id;
use std::path::{Path, PathBuf};

/// How many stripe directories hold the log, where there are that many.
const LOG_DIRECTORIES: usize = 2;

/// What a log directory needs at least, bytes: a segment, and little files beside it.
const LOG_ROOM: u64 = SEGMENT_SIZE + (1 << 20);

/// What [`init`] made or found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Initialised {
    /// The store.
    pub store: Id,
    /// Whether it is new.
    pub new_store: bool,
    /// The directories that became stripe directories now.
    pub added: Vec<(PathBuf, Id)>,
    /// The directories that were so before.
    pub kept: Vec<(PathBuf, Id)>,
}

/// Makes a store of these directories, or adds those without a marker to the store whose marker the others carry. All
/// directories of that store must be given. The first two of a store hold its log.
pub fn init(directories: &[PathBuf]) -> Result<Initialised, StoreError> {
    if directories.is_empty() {
        return Err(StoreError::Empty);
    }
    let identities = directories.iter().map(|path| identity(path)).collect::<Result<Vec<_>, _>>()?;
    check_distinct(directories, &identities)?;
    let locks = directories.iter().map(|path| DirectoryLock::take(path)).collect::<Result<Vec<_>, _>>()?;
    let mut kept = Vec::new();
    let mut bare = Vec::new();
    for path in directories {
        Marker::check_room(path)?;
        match Marker::read(path)? {
            Some(marker) => kept.push((path.clone(), marker)),
            None if was_stripe_directory(path) => return Err(StoreError::MarkerGone(path.clone())),
            None => {
                check_empty(path)?;
                bare.push(path.clone());
            }
        }
    }
    bare.iter().try_for_each(|path| check_outside(path))?;
    let new_store = kept.is_empty();
    let members = if new_store { Members::none(new_id()?) } else { members(&kept)? };
    let Members { store, epoch, highest_sequence: highest, directories: mut all, log_directories: mut logs } = members;
    let new_logs = bare.iter().take(LOG_DIRECTORIES.saturating_sub(logs.len())).cloned().collect::<Vec<_>>();
    check_room(&new_logs)?;
    let mut added = Vec::new();
    for path in bare {
        let directory = new_id()?;
        all.push(directory);
        if logs.len() < LOG_DIRECTORIES {
            logs.push(directory);
        }
        let marker = Marker {
            store,
            directory,
            epoch,
            highest_sequence: highest,
            log_directories: logs.clone(),
            directories: all.clone(),
        };
        marker.write(&path)?;
        added.push((path, directory));
    }
    // Only now may the others list the new ones.
    let known = kept.iter().map(|(path, marker)| (path.clone(), marker.directory, Some(marker)));
    let fresh = added.iter().map(|(path, directory)| (path.clone(), *directory, None));
    for (path, directory, before) in known.chain(fresh) {
        let marker = Marker {
            store,
            directory,
            epoch,
            highest_sequence: highest,
            log_directories: logs.clone(),
            directories: all.clone(),
        };
        if before != Some(&marker) {
            marker.write(&path)?;
        }
    }
    drop(locks);
    let kept = kept.into_iter().map(|(path, marker)| (path, marker.directory)).collect();
    Ok(Initialised { store, new_store, added, kept })
}

fn check_empty(path: &Path) -> Result<(), StoreError> {
    for entry in std::fs::read_dir(path).map_err(failed("list", path))? {
        let name = entry.map_err(failed("list", path))?.file_name();
        if name != MARKER && !is_ours_or_harmless(&name) {
            return Err(StoreError::NotEmpty { path: path.to_owned(), found: name.to_string_lossy().into_owned() });
        }
    }
    Ok(())
}

/// A store inside another one's directory would be that one's debris, or the other way round.
fn check_outside(path: &Path) -> Result<(), StoreError> {
    let real = std::fs::canonicalize(path).map_err(failed("resolve", path))?;
    match real.ancestors().skip(1).find(|outer| outer.join(MARKER).exists()) {
        Some(outer) => Err(StoreError::Inside { path: path.to_owned(), outer: outer.to_owned() }),
        None => Ok(()),
    }
}

/// The first segment of the log, and what is beside it, must fit: a server that finds no room for it cannot start.
fn check_room(logs: &[PathBuf]) -> Result<(), StoreError> {
    let identities = logs.iter().map(|path| identity(path)).collect::<Result<Vec<_>, _>>()?;
    for (path, (device, _)) in logs.iter().zip(&identities) {
        let sharing = identities.iter().filter(|(other, _)| other == device).count();
        let needed = LOG_ROOM.saturating_mul(u64::try_from(sharing).unwrap_or(u64::MAX));
        let stat = rustix::fs::statvfs(path).map_err(|errno| failed("look at the space of", path)(errno.into()))?;
        let available = stat.f_bavail.saturating_mul(stat.f_frsize);
        if available < needed {
            return Err(StoreError::TooSmall { path: path.clone(), available, needed });
        }
    }
    Ok(())
}

fn new_id() -> Result<Id, StoreError> {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes).map_err(|error| StoreError::Random(error.to_string()))?;
    Ok(Id(bytes))
}
