//! The directory that is mounted on.
//!
//! Guarantees: a place is known by one absolute path, whatever way it was written; finding it never walks into a railfs
//! mount, so a dead or hung one cannot block; a dead mount of ours is taken away, a live one never.

use super::kernel;
use super::table;
use crate::failure::{Failure, io};
use rustix::io::Errno;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::Duration;

/// How long an answer from somebody's mount may take before it counts as alive and busy.
const PROBE: Duration = Duration::from_secs(2);

/// The one absolute path of a mount point.
///
/// # Errors
/// It does not exist, or a directory above it cannot be passed.
pub fn resolve(path: &Path) -> Result<PathBuf, Failure> {
    let absolute = std::path::absolute(path).map_err(|error| io(path.display(), &error))?;
    if let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) {
        let parent = parent.canonicalize().map_err(|error| io(parent.display(), &error))?;
        let direct = parent.join(name);
        // Stop before the last step where that would lead into a mount of ours.
        if table::railfs_at(&direct).map_err(|error| io("/proc/self/mountinfo", &error))?.is_some() {
            return Ok(direct);
        }
    }
    absolute.canonicalize().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Failure::failed(format!("{} does not exist: make it first", path.display())),
        _ => io(path.display(), &error),
    })
}

/// Makes sure that a resolved path can be mounted on: takes a dead railfs mount away, refuses a live one, anything but a
/// directory, and one that is not empty (unless `nonempty`). The caller holds the place's lock.
///
/// # Errors
/// See above.
pub fn make_free(point: &Path, nonempty: bool) -> Result<(), Failure> {
    let shown = point.display();
    while let Some(mounted) = table::railfs_at(point).map_err(|error| io("/proc/self/mountinfo", &error))? {
        if !is_dead(point) {
            return Err(Failure::failed(format!(
                "{shown}: {} is mounted there already: `railfs umount {shown}` first",
                mounted.source
            )));
        }
        tracing::warn!("{shown}: taking away the dead mount of {}", mounted.source);
        if let Err(error) = kernel::unmount(point, true) {
            return Err(Failure::failed(format!("{shown}: a dead mount cannot be taken away: {error:?}")));
        }
    }
    let metadata = std::fs::metadata(point).map_err(|error| io(&shown, &error))?;
    if !metadata.is_dir() {
        return Err(Failure::failed(format!("{shown} is not a directory")));
    }
    if !nonempty && std::fs::read_dir(point).map_err(|error| io(&shown, &error))?.next().is_some() {
        return Err(Failure::failed(format!("{shown} is not empty: name an empty directory, or say -o nonempty")));
    }
    Ok(())
}

/// Whether nobody serves the mount at this place any more. By `statfs`: the kernel keeps attributes for a while, so a `stat`
/// may be answered in a dead daemon's name. What was asked of a daemon that is just dying is aborted.
pub fn is_dead(point: &Path) -> bool {
    let (send, receive) = channel();
    let path = point.to_owned();
    // As in `probe`.
    let _ = std::thread::Builder::new().name("probe".to_owned()).spawn(move || {
        let _ = send.send(rustix::fs::statfs(&path).err());
    });
    matches!(receive.recv_timeout(PROBE), Ok(Some(Errno::NOTCONN | Errno::CONNABORTED)))
}

/// A `stat` with a limit; `None`: no answer. Never for a mount that this very process serves.
pub fn probe(point: &Path, limit: Duration) -> Option<std::io::Result<std::fs::Metadata>> {
    let (send, receive) = channel();
    let path = point.to_owned();
    // A thread that hangs is left behind: the process ends soon, and with it the thread.
    let _ = std::thread::Builder::new().name("probe".to_owned()).spawn(move || {
        let _ = send.send(std::fs::metadata(path));
    });
    receive.recv_timeout(limit).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_that_cannot_be_mounted_on() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().canonicalize().unwrap();
        let file = base.join("file");
        std::fs::write(&file, "x").unwrap();
        assert!(resolve(&base.join("none")).unwrap_err().message.contains("make it first"));
        assert!(resolve(&file.join("below")).is_err());
        assert!(make_free(&file, false).unwrap_err().message.contains("not a directory"));
        assert!(make_free(&base, false).unwrap_err().message.contains("nonempty"));
        assert_eq!(make_free(&base, true), Ok(()));
        let empty = base.join("empty");
        std::fs::create_dir(&empty).unwrap();
        std::os::unix::fs::symlink(&empty, base.join("link")).unwrap();
        assert_eq!(resolve(&base.join("link/../link/.")).unwrap(), empty);
        assert_eq!(make_free(&empty, false), Ok(()));
        assert!(!is_dead(&empty));
    }
}
