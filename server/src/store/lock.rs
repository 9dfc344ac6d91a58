//! The exclusive lock on a stripe directory. It is on the directory itself, so taking it creates nothing and it is
//! gone when its process is, however that ended; the holder's process id stands in a file beside it, for messages.

use super::{StoreError, failed, private, regular};
use rustix::fs::{FlockOperation, Mode, OFlags};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

/// Who has the directory open.
pub(super) const HOLDER: &str = ".railfs.lock";

/// Held as long as this lives.
#[derive(Debug)]
pub(super) struct DirectoryLock {
    directory: OwnedFd,
    /// Device and inode: the same for two names of one directory.
    pub(super) identity: (u64, u64),
}

/// Device and inode of a directory; says so if it is not there or is something else.
pub(super) fn identity(path: &Path) -> Result<(u64, u64), StoreError> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Ok((metadata.dev(), metadata.ino())),
        Ok(_) => Err(StoreError::NotADirectory(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(StoreError::NotThere(path.to_owned())),
        Err(source) => Err(StoreError::Io { doing: "look at", path: path.to_owned(), source }),
    }
}

impl DirectoryLock {
    /// Does not wait: a directory that is in use is refused, naming who has it.
    pub(super) fn take(path: &Path) -> Result<DirectoryLock, StoreError> {
        let identity = identity(path)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| failed("open", path)(e.into()))?;
        match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(DirectoryLock { directory, identity }),
            Err(rustix::io::Errno::WOULDBLOCK) => {
                Err(StoreError::Locked { path: path.to_owned(), holder: read_holder(path) })
            }
            Err(errno) => Err(failed("lock", path)(errno.into())),
        }
    }

    /// The directory itself, whatever its path leads to by now.
    pub(super) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// Names this process as the holder. Only in directories that carry a marker.
    pub(super) fn name_holder(&self, path: &Path) -> Result<(), StoreError> {
        let file_path = path.join(HOLDER);
        let text = format!("{}\n", std::process::id());
        // Written over what is there: on a full disk that works where making it anew does not.
        let options = &mut private::options();
        let file = regular::open(options.write(true).create(true).truncate(false), &file_path);
        let written = file.and_then(|file| {
            file.write_all_at(text.as_bytes(), 0)?;
            file.set_len(u64::try_from(text.len()).unwrap_or(u64::MAX))
        });
        match written.map_err(failed("write", &file_path)) {
            // It is for messages alone; the lock holds without it.
            Err(error) if error.is_full() => {
                tracing::warn!(%error, "who has the directory open is not written down: there is no room");
                Ok(())
            }
            other => other,
        }
    }
}

fn read_holder(path: &Path) -> String {
    let mut text = String::new();
    let read = regular::read(&path.join(HOLDER)).and_then(|file| file.take(32).read_to_string(&mut text));
    match (read, text.trim().parse::<u32>()) {
        (Ok(_), Ok(pid)) => format!("process {pid}"),
        _ => "another process".to_owned(),
    }
}
