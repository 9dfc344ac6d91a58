//! Putting back markers that were removed.
//!
//! Guarantees: a marker is put back only where the one before it is still there, whole, and names a directory of this store
//! that is nowhere else; its name changes in one step, so whenever this is cut off the directory is as it was, or itself again.

use super::marker::{MARKER, Marker, TEMPORARY};
use super::open::{LockedDirectories, gather};
use super::{StoreError, failed, sync_directory};
use railfs_proto::descriptor::Id;
use std::path::{Path, PathBuf};

/// Whether a directory without a marker is one whose marker was removed: it holds what only a stripe directory does.
pub(super) fn was_stripe_directory(path: &Path) -> bool {
    path.join("components").is_dir()
}

/// Gives directories whose markers were removed the ones before those: what they do not know yet, the others do. Gives the
/// directories that have one again.
///
/// # Errors
/// The markers that are there are of two stores, or one cannot be put back.
pub fn restore_markers(locked: &LockedDirectories) -> Result<Vec<(PathBuf, Id)>, StoreError> {
    let (mut marked, mut bare) = (Vec::new(), Vec::new());
    for path in locked.paths() {
        match Marker::read(path) {
            Ok(Some(marker)) => marked.push((path.to_owned(), marker)),
            Ok(None) if was_stripe_directory(path) => bare.push(path),
            // What is wrong there is told by whoever opens it.
            _ => {}
        }
    }
    if marked.is_empty() || bare.is_empty() {
        return Ok(Vec::new());
    }
    let members = gather(&marked)?;
    let missing = members.missing(&marked);
    let known = bare.into_iter().filter_map(|path| {
        let before = Marker::read_file(path, TEMPORARY).ok().flatten()?;
        (before.store == members.store && missing.contains(&before.directory)).then_some((path, before.directory))
    });
    let known: Vec<(&Path, Id)> = known.collect();
    let mut restored = Vec::new();
    for (path, id) in &known {
        // One of two that say the same is a copy, and nobody knows which.
        if known.iter().filter(|(_, other)| other == id).count() > 1 {
            continue;
        }
        let target = path.join(MARKER);
        std::fs::rename(path.join(TEMPORARY), &target).map_err(failed("put the marker back at", &target))?;
        sync_directory(path).map_err(failed("sync", path))?;
        restored.push((path.to_path_buf(), *id));
    }
    Ok(restored)
}
