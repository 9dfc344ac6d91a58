//! What can be put right: a component that lies under another's name, or whose whole copy lies elsewhere in the store.
//!
//! Guarantees: only a file that was read to its last byte and found to be the one that is wanted takes a place; it does so
//! whole or not at all, durably; what was in the place is moved to lost/ only if it is another component, whole by its header.

use super::{FsckError, Kind, Problem, verify};
use crate::put::recover;
use crate::serve::files::Key;
use crate::store::{Store, StripeDirectory, sync_directory};
use railfs_proto::component::FileName;
use railfs_proto::descriptor::Descriptor;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Where a component is to be.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) directory: &'a StripeDirectory,
    pub(super) path: &'a Path,
}

fn failed(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FsckError {
    let path = path.to_owned();
    move |source| FsckError::Io { doing, path, source }
}

/// Files with a component's name and another component's header. Repairing, they are moved to lost/ under their own name,
/// from where they are put back if they are wanted.
pub(super) fn misplaced(store: &Store, repair: bool) -> Result<Vec<Problem>, FsckError> {
    let mut problems = Vec::new();
    for directory in store.directories() {
        let folder = directory.components();
        let entries = match std::fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(failed("list", &folder)(error)),
        };
        let mut moved = false;
        for entry in entries {
            let entry = entry.map_err(failed("list", &folder))?;
            let Ok(name) = FileName::parse(entry.file_name().as_bytes()) else { continue };
            let path = entry.path();
            let Some(inside) = recover::whole(&path).filter(|inside| *inside != name) else { continue };
            let detail = format!("by its header it is component {} of version {}", inside.component, inside.version);
            let mut problem = Problem::at(Kind::Misplaced, &path, detail).of_file(name);
            if repair && directory.read_only().is_none() {
                let to = directory.lost().join(inside.to_string());
                match to.try_exists() {
                    Ok(false) => {
                        std::fs::rename(&path, &to).map_err(failed("move to lost", &path))?;
                        moved = true;
                        problem.repaired = Some(format!("moved to {}", to.display()));
                    }
                    Ok(true) => problem.detail = format!("{}; {} is there already", problem.detail, to.display()),
                    Err(error) => return Err(failed("look for", &to)(error)),
                }
            }
            problems.push(problem);
        }
        if moved {
            sync_directory(&directory.lost()).map_err(failed("sync", &directory.lost()))?;
            sync_directory(&folder).map_err(failed("sync", &folder))?;
        }
    }
    Ok(problems)
}

/// Looks for a whole copy of a component, in lost/ and among the components of other directories, and puts it in its
/// place. Says from where; `None`: there is none.
pub(super) fn put_back(
    store: &Store,
    place: Place<'_>,
    key: Key,
    descriptor: &Descriptor,
) -> Result<Option<String>, FsckError> {
    let Place { directory, path } = place;
    if directory.read_only().is_some() {
        return Ok(None);
    }
    let name = FileName { version: key.version, component: key.component };
    let mut candidates: Vec<(PathBuf, bool)> = Vec::new();
    for other in store.directories() {
        candidates.push((other.lost().join(name.to_string()), other.read_only().is_none()));
        if other.id() != directory.id() {
            candidates.push((other.components().join(name.to_string()), false));
        }
    }
    for (from, movable) in candidates {
        if verify::component(&from, key, descriptor).is_err() {
            continue;
        }
        let folder = directory.components();
        if from.parent() == Some(directory.lost().as_path()) {
            // Within one file system nothing need be copied, and no room is needed.
            let synced = File::open(&from).and_then(|file| file.sync_all());
            synced.map_err(failed("sync", &from))?;
            std::fs::rename(&from, path).map_err(failed("put back", path))?;
            sync_directory(&folder).map_err(failed("sync", &folder))?;
        } else {
            // Under a name that is no component's, which the next attempt writes over.
            let beside = directory.lost().join(format!("{name}.putting-back"));
            // Whatever it is: a FIFO would be waited for.
            let _ = std::fs::remove_file(&beside);
            let copied = std::fs::copy(&from, &beside).and_then(|_| File::open(&beside)?.sync_all());
            if let Err(error) = copied {
                // What there is of it only takes room; the failure is told.
                let _ = std::fs::remove_file(&beside);
                return Err(failed("copy to", &beside)(error));
            }
            std::fs::rename(&beside, path).map_err(failed("put back", path))?;
            sync_directory(&folder).map_err(failed("sync", &folder))?;
            if movable && let Err(error) = std::fs::remove_file(&from) {
                tracing::warn!(path = %from.display(), %error, "a copy that was put back is left in lost/");
            }
        }
        return Ok(Some(format!("a whole copy was put back from {}", from.display())));
    }
    Ok(None)
}
