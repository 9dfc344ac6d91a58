//! What a dead put left behind, and lost/.
//!
//! Guarantees: before a server serves, every component that no record names is removed (no valid header) or moved to
//! lost/ (valid header, right size; under the name that its header gives it); what a record names is never touched; files that are not components are left alone,
//! and so is a directory that cannot be written;
//! lost/ keeps its files seven days, within bounds.

use crate::catalog::{Catalog, CatalogError, Standing};
use crate::serve::files::{kind_name, open_regular};
use crate::store::{Store, StripeDirectory, sync_directory};
use railfs_proto::component::{BLOCK, FileName, Header};
use rustix::fs::{FileType, Mode, OFlags};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// How long a lost component is kept.
pub const LOST_LIFE: Duration = Duration::from_secs(7 * 24 * 3600);
/// Most lost components in one directory.
pub const LOST_FILES: usize = 1024;
/// Lost components take at most this part of their file system: one of so many.
pub const LOST_SHARE: u64 = 20;

/// What a start found and did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Components that records name.
    pub kept: u64,
    /// Without a valid header: removed.
    pub removed: u64,
    /// Valid, but not named by any record: moved to lost/.
    pub lost: u64,
    /// Files that are not components: left alone.
    pub foreign: u64,
}

/// Why the components of a directory could not be gone through.
#[derive(Debug, thiserror::Error)]
pub enum RecoverError {
    /// See the message.
    #[error("cannot {doing} {}: {source}", .path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// What came of it.
        source: io::Error,
    },
    /// See the message.
    #[error("cannot tell which components are in use: {0}")]
    Catalog(#[from] CatalogError),
}

/// A lost component, as the planner sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// Its name in lost/.
    pub name: PathBuf,
    /// Since it was moved there.
    pub age: Duration,
    /// Bytes.
    pub bytes: u64,
}

/// Which lost components go: those past their time, then the oldest until the rest is within the bounds.
pub fn plan_lost(mut files: Vec<Lost>, limit: u64) -> Vec<PathBuf> {
    files.sort_by_key(|file| file.age);
    let (mut kept, mut bytes) = (0, 0u64);
    let mut keep = |file: &Lost| {
        let within = file.age <= LOST_LIFE && kept < LOST_FILES && bytes.saturating_add(file.bytes) <= limit;
        if within {
            kept += 1;
            bytes = bytes.saturating_add(file.bytes);
        }
        within
    };
    files.into_iter().filter(|file| !keep(file)).map(|file| file.name).collect()
}

fn failed(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RecoverError {
    let path = path.to_owned();
    move |source| RecoverError::Io { doing, path, source }
}

/// Goes through the components of all directories. To be called before anything is served.
///
/// # Errors
/// See [`RecoverError`]; what was done until then stays done.
pub async fn recover(store: &Store, catalog: &dyn Catalog, node: &str) -> Result<Found, RecoverError> {
    let mut found = Found::default();
    let mut standings: HashMap<u64, Option<Standing>> = HashMap::new();
    for directory in store.directories() {
        let folder = directory.components();
        let mut changed = false;
        let entries = match std::fs::read_dir(&folder) {
            // It could not be made, and it cannot hold anything either.
            Err(error) if error.kind() == io::ErrorKind::NotFound && directory.read_only().is_some() => continue,
            other => other.map_err(failed("list", &folder))?,
        };
        for entry in entries {
            let entry = entry.map_err(failed("list", &folder))?;
            let Ok(name) = FileName::parse(entry.file_name().as_bytes()) else {
                tracing::warn!(path = %entry.path().display(), "not a component file: left alone");
                found.foreign += 1;
                continue;
            };
            // Whoever made a directory with such a name knows why; it cannot be a component, whatever records say.
            if let Some(what) = no_file(&entry) {
                let path = entry.path();
                tracing::error!(path = %path.display(), "this has a component's name and is {what}, not a file: {}", advice(what));
                found.foreign += 1;
                continue;
            }
            // Components of a wide object are asked for one after another; of others the memory stays small.
            if standings.len() > 65_536 {
                standings.clear();
            }
            let standing = match standings.get(&name.version) {
                Some(standing) => standing,
                None => {
                    let standing = catalog.standing(name.version).await?;
                    standings.entry(name.version).or_insert(standing)
                }
            };
            let replicas = standing.as_ref().and_then(|s| s.descriptor.components.get(name.component as usize));
            let named = replicas.is_some_and(|replicas| {
                replicas.iter().any(|replica| replica.directory == directory.id() && replica.node == node)
            });
            if named {
                found.kept += 1;
                continue;
            }
            if directory.read_only().is_some() {
                continue; // It is tidied up when it can be written again.
            }
            changed = true;
            let path = entry.path();
            if let Some(inside) = whole(&path) {
                // One that lies under another's name keeps its own, unless that is taken.
                let own = directory.lost().join(inside.to_string());
                let taken = inside != name && own.try_exists().map_err(failed("look for", &own))?;
                let to = if taken { directory.lost().join(entry.file_name()) } else { own };
                begin_lost_life(&path);
                std::fs::rename(&path, &to).map_err(failed("move to lost", &path))?;
                found.lost += 1;
                tracing::warn!(path = %to.display(), "a valid component that no record names was moved to lost/");
            } else {
                std::fs::remove_file(&path).map_err(failed("remove", &path))?;
                found.removed += 1;
            }
        }
        if changed {
            sync_directory(&folder).map_err(failed("sync", &folder))?;
        }
        if directory.read_only().is_none() {
            tidy_lost(directory);
        }
    }
    Ok(found)
}

/// What an entry is, if it is no file: a link is one of those, whatever it leads to.
pub fn no_file(entry: &std::fs::DirEntry) -> Option<&'static str> {
    let kind = entry.file_type().ok()?;
    let name = |kind| kind_name(kind).unwrap_or("something unknown");
    (!kind.is_file()).then(|| {
        let kinds = [
            (kind.is_dir(), FileType::Directory),
            (kind.is_symlink(), FileType::Symlink),
            (kind.is_fifo(), FileType::Fifo),
            (kind.is_socket(), FileType::Socket),
            (kind.is_char_device() || kind.is_block_device(), FileType::CharacterDevice),
        ];
        name(kinds.into_iter().find(|(is, _)| *is).map_or(FileType::Unknown, |(_, kind)| kind))
    })
}

/// What is to be done about it.
pub fn advice(what: &str) -> &'static str {
    if what == "a symbolic link" {
        "it is left alone, and read where a record names it; put the file that it leads to in its place, or leave it"
    } else {
        "it is left alone; if the log names it `railfsd fsck` says so: then put the component itself in its place, else move it away"
    }
}

/// Which component the file is by its header, if it was completed: a valid header, and the exact size.
pub fn whole(path: &Path) -> Option<FileName> {
    let file = open_regular(path).ok()?;
    let mut block = [0u8; BLOCK];
    file.read_exact_at(&mut block, 0).ok()?;
    let header = Header::decode(&block).ok()?;
    let size = file.metadata().ok()?.len();
    (header.geometry().ok()?.file_size() == size).then(|| header.file_name())
}

/// What is in lost/.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LostCount {
    /// Components.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What is in the directory's lost/ now.
pub fn lost(directory: &StripeDirectory) -> LostCount {
    let add = |sum: LostCount, file: &Lost| LostCount {
        files: sum.files.saturating_add(1),
        bytes: sum.bytes.saturating_add(file.bytes),
    };
    lost_files(directory).iter().fold(LostCount::default(), add)
}

/// Its time in lost/ begins now, however old its bytes are.
fn begin_lost_life(path: &Path) {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let opened = rustix::fs::open(path, flags, Mode::empty()).map_err(io::Error::from);
    let touched = opened.and_then(|file| File::from(file).set_modified(SystemTime::now()));
    if let Err(error) = touched {
        tracing::warn!(path = %path.display(), %error, "the time in lost/ counts from when it was written");
    }
}

fn lost_files(directory: &StripeDirectory) -> Vec<Lost> {
    let now = SystemTime::now();
    let entries = std::fs::read_dir(directory.lost()).into_iter().flatten().flatten();
    let lost = |entry: std::fs::DirEntry| {
        FileName::parse(entry.file_name().as_bytes()).ok()?;
        let meta = entry.metadata().ok()?;
        let age = meta.modified().ok().and_then(|time| now.duration_since(time).ok()).unwrap_or_default();
        Some(Lost { name: entry.file_name().into(), age, bytes: meta.len() })
    };
    entries.filter_map(lost).collect()
}

fn remove_lost(directory: &StripeDirectory, names: &[PathBuf]) -> u64 {
    let mut removed = 0;
    for name in names {
        let path = directory.lost().join(name);
        match std::fs::remove_file(&path) {
            Ok(()) => removed += 1,
            Err(error) => tracing::warn!(path = %path.display(), %error, "cannot remove a lost component"),
        }
    }
    removed
}

/// Removes from lost/ what is past its time or beyond the bounds. Returns how many.
pub fn tidy_lost(directory: &StripeDirectory) -> u64 {
    let total = rustix::fs::statvfs(directory.path()).map_or(0, |stat| stat.f_blocks.saturating_mul(stat.f_frsize));
    remove_lost(directory, &plan_lost(lost_files(directory), total / LOST_SHARE))
}

/// Removes all of lost/: for when space is short. Returns how many.
pub fn empty_lost(directory: &StripeDirectory) -> u64 {
    remove_lost(directory, &plan_lost(lost_files(directory), 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost(name: &str, days: u64, bytes: u64) -> Lost {
        Lost { name: name.into(), age: Duration::from_secs(days * 24 * 3600), bytes }
    }

    #[test]
    fn time_in_lost_begins_when_it_is_moved_there() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("7.0");
        std::fs::write(&path, b"x").unwrap();
        let old = SystemTime::now() - 2 * LOST_LIFE;
        File::options().write(true).open(&path).unwrap().set_modified(old).unwrap();
        begin_lost_life(&path);
        let age = SystemTime::now().duration_since(path.metadata().unwrap().modified().unwrap());
        assert!(age.unwrap_or_default() < LOST_LIFE);
    }

    #[test]
    fn the_oldest_lost_components_go_first_and_none_stays_past_its_time() {
        let files = vec![lost("old", 8, 1), lost("b", 3, 50), lost("a", 1, 50), lost("c", 5, 50)];
        assert_eq!(plan_lost(files.clone(), 1000), [Path::new("old")]);
        assert_eq!(plan_lost(files.clone(), 100), [Path::new("c"), Path::new("old")]);
        assert_eq!(plan_lost(files, 0).len(), 4);
        let many = (0..LOST_FILES + 3).map(|i| lost(&i.to_string(), 1, 0)).collect();
        assert_eq!(plan_lost(many, 1000).len(), 3);
    }
}
