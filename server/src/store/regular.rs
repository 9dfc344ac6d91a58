//! Opening a file of ours where somebody may have put something else.
//!
//! Guarantees: no open waits for anybody, whatever has the name (a FIFO has no end of its own); what is no regular file is
//! neither read nor written nor removed, and the error says what it is.

use std::fs::{File, FileType, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// What has the name of a file of ours is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is {0}, not a regular file; move it away")]
pub(crate) struct NotRegular(&'static str);

impl NotRegular {
    /// What it is.
    pub(crate) fn name(self) -> &'static str {
        self.0
    }
}

impl From<NotRegular> for io::Error {
    fn from(what: NotRegular) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidInput, what)
    }
}

/// Whether an error says that something else has the name of a file.
pub(crate) fn is_something_else(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<NotRegular>())
}

/// What it is, if it is no regular file.
fn other(kind: FileType) -> Option<NotRegular> {
    let name = match kind {
        kind if kind.is_file() => return None,
        kind if kind.is_dir() => "a directory",
        kind if kind.is_fifo() => "a FIFO",
        kind if kind.is_socket() => "a socket",
        kind if kind.is_char_device() || kind.is_block_device() => "a device",
        kind if kind.is_symlink() => "a symbolic link",
        _ => "something unknown",
    };
    Some(NotRegular(name))
}

/// Opens a regular file.
///
/// # Errors
/// What the system said, or what is there instead (see [`is_something_else`]).
pub(crate) fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let opened = options.custom_flags(nonblock()).open(path);
    // What was opened is what counts; where nothing was (a socket, a FIFO that nobody reads, a directory that is to be
    // written), the name says why.
    let kind = match &opened {
        Ok(file) => file.metadata()?.file_type(),
        Err(_) => match std::fs::metadata(path) {
            Ok(metadata) => metadata.file_type(),
            Err(_) => return opened,
        },
    };
    match other(kind) {
        Some(what) => Err(what.into()),
        None => opened,
    }
}

/// [`open`], to be read.
///
/// # Errors
/// See there.
pub(crate) fn read(path: &Path) -> io::Result<File> {
    open(OpenOptions::new().read(true), path)
}

/// Refuses what has this name and is no regular file, or only leads to one. Nothing may have it.
///
/// # Errors
/// What is there instead. That it cannot be looked at is none: whoever opens it is told.
pub(crate) fn check(path: &Path) -> Result<(), NotRegular> {
    let kind = std::fs::symlink_metadata(path).map(|metadata| metadata.file_type());
    kind.ok().and_then(other).map_or(Ok(()), Err)
}

/// What has this name, or what it leads to, if that is no regular file; a link that leads nowhere, too, but for one to a name
/// that is free.
pub(crate) fn instead(path: &Path) -> Option<NotRegular> {
    match std::fs::metadata(path) {
        Ok(metadata) => other(metadata.file_type()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(_) => check(path).err(),
    }
}

/// As `open(2)` takes it.
fn nonblock() -> i32 {
    i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType as Kind, Mode};

    #[test]
    fn what_is_no_regular_file_is_named_and_nobody_waits_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("file"), b"x").unwrap();
        std::fs::create_dir(path("folder")).unwrap();
        rustix::fs::mknodat(CWD, path("fifo"), Kind::Fifo, Mode::RWXU, 0).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
        std::os::unix::fs::symlink(path("fifo"), path("to-fifo")).unwrap();
        std::os::unix::fs::symlink("loop", path("loop")).unwrap();
        let write = |name: &str| open(OpenOptions::new().write(true).create(true).truncate(false), &path(name));
        read(&path("file")).unwrap();
        write("file").unwrap();
        write("new").unwrap();
        assert_eq!(read(&path("gone")).unwrap_err().kind(), io::ErrorKind::NotFound);
        for (name, what) in
            [("folder", "a directory"), ("fifo", "a FIFO"), ("socket", "a socket"), ("to-fifo", "a FIFO")]
        {
            for error in [read(&path(name)).unwrap_err(), write(name).unwrap_err()] {
                assert!(is_something_else(&error), "{name}: {error}");
                assert_eq!(error.to_string(), format!("it is {what}, not a regular file; move it away"));
            }
        }
        let device = read(Path::new("/dev/null")).unwrap_err().to_string();
        assert!(device.contains("a device"), "{device}");
        let looped = read(&path("loop")).unwrap_err();
        assert!(!is_something_else(&looped) && looped.raw_os_error().is_some(), "{looped}");
        assert_eq!([check(&path("file")), check(&path("gone"))], [Ok(()), Ok(())]);
        assert_eq!(check(&path("loop")), Err(NotRegular("a symbolic link")));
        assert_eq!(check(&path("fifo")), Err(NotRegular("a FIFO")));
    }
}
