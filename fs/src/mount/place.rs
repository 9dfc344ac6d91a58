//! The directory that is mounted on.
//!
//! Guarantees: a place is known by one absolute path, whatever way it was written; finding it never walks into a railfs
//! mount, so a dead or hung one cannot block; a dead mount of this user is taken away, a live one and one of somebody else never;
//! of two that mount one place at the same instant, from whatever runtime directories, one is refused.

use super::kernel;
use super::table;
use crate::failure::{Failure, io};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
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
    if absolute.to_str().is_none() {
        // Locks, status and messages name it as text.
        let shown = absolute.as_os_str().as_bytes().escape_ascii();
        return Err(Failure::failed(format!(
            "\"{shown}\" is no UTF-8, which the path of a mount has to be: take another place"
        )));
    }
    if let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) {
        let parent = parent.canonicalize().map_err(|error| io(parent.display(), &error))?;
        let direct = parent.join(name);
        // Stop before the last step where that would lead into a mount of ours.
        if table::railfs_at(&direct).map_err(|error| io("/proc/self/mountinfo", &error))?.is_some() {
            return Ok(direct);
        }
    }
    absolute.canonicalize().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Failure::failed(format!("{} does not exist", path.display())),
        _ => not_usable(&absolute, &error),
    })
}

/// Of a place where somebody else's dead mount lies, that is said.
fn not_usable(point: &Path, error: &std::io::Error) -> Failure {
    let shown = point.display();
    match table::top_at(point) {
        Ok(Some(mounted)) if Errno::from_io_error(error) == Some(Errno::NOTCONN) => Failure::failed(format!(
            "{shown}: the dead mount of {} (type {}) lies there: take it away first (`umount {shown}`)",
            mounted.source, mounted.fstype
        )),
        _ => io(shown, error),
    }
}

/// The type of mount that stands for one which is made when somebody looks inside.
const AUTOMOUNT: &str = "autofs";

/// Makes sure that a resolved path can be mounted on: takes a dead railfs mount of this user away, refuses a live one,
/// one of another user, anything but a directory, and one that is not empty (unless `nonempty`). The caller holds the
/// place's lock.
///
/// # Errors
/// See above.
pub fn make_free(point: &Path, nonempty: bool) -> Result<(), Failure> {
    let shown = point.display();
    let user = rustix::process::getuid().as_raw();
    loop {
        let top = table::top_at(point).map_err(|error| io("/proc/self/mountinfo", &error))?;
        match top {
            Some(mounted) if mounted.fstype == table::FSTYPE => remove_dead(point, &mounted, user)?,
            // Whoever looks inside waits for the mount that is about to be made.
            Some(mounted) if mounted.fstype == AUTOMOUNT => return Ok(()),
            _ => break,
        }
    }
    let metadata = std::fs::metadata(point).map_err(|error| not_usable(point, &error))?;
    if !metadata.is_dir() {
        return Err(Failure::failed(format!("{shown} is not a directory")));
    }
    if !nonempty && std::fs::read_dir(point).map_err(|error| io(&shown, &error))?.next().is_some() {
        return Err(Failure::failed(format!("{shown} is not empty: name an empty directory, or say -o nonempty")));
    }
    Ok(())
}

fn remove_dead(point: &Path, mounted: &table::Mounted, user: u32) -> Result<(), Failure> {
    let shown = point.display();
    let source = &mounted.source;
    if let Some(owner) = mounted.owner.filter(|owner| *owner != user) {
        // Whether it is dead is told to nobody else.
        return Err(Failure::failed(format!(
            "{shown}: {source} is mounted there already, by the user with id {owner}: `umount {shown}` first"
        )));
    }
    if !is_dead(point) {
        return Err(Failure::failed(format!(
            "{shown}: {source} is mounted there already: `railfs umount {shown}` first"
        )));
    }
    tracing::warn!("{shown}: taking away the dead mount of {source}");
    kernel::unmount(point, true)
        .map_err(|error| Failure::failed(format!("{shown}: a dead mount cannot be taken away: {error:?}")))
}

/// The place as it is now, for this process alone until this is dropped: a lock that everybody sees who mounts there,
/// also those with another runtime directory. `None` where the directory cannot be opened, or must not.
///
/// # Errors
/// Somebody else has it, or has mounted there meanwhile.
pub fn claim(point: &Path) -> Result<Option<OwnedFd>, Failure> {
    let shown = point.display();
    let top = || table::top_at(point).map_err(|error| io("/proc/self/mountinfo", &error));
    if top()?.is_some_and(|mounted| mounted.fstype == AUTOMOUNT) {
        return Ok(None);
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(directory) = rustix::fs::open(point, flags, Mode::empty()) else { return Ok(None) };
    let taken = || Failure::failed(format!("{shown} is being mounted on, or locked, by another process"));
    match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Err(taken()),
        // A file system without locks.
        Err(_) => return Ok(None),
    }
    // What was opened may be a mount that was finished a moment ago.
    match top()? {
        Some(mounted) if mounted.fstype == table::FSTYPE => Err(taken()),
        _ => Ok(Some(directory)),
    }
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
        assert!(resolve(&base.join("none")).unwrap_err().message.contains("does not exist"));
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
        let claim_of = |point: &Path| claim(point).map(|claim| claim.is_some());
        let held = claim(&empty).unwrap();
        assert!(held.is_some());
        assert!(claim_of(&empty).unwrap_err().message.contains("by another process"));
        drop(held);
        assert_eq!(claim_of(&empty), Ok(true));
    }
}
