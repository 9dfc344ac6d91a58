//! A plain directory as a subject: what the reference says must be what a file system does.

use super::world::Content;
use super::{DESCRIPTORS, Line, Promise, Refusal, Stat, Subject};
use rustix::fs::{Mode, OFlags, SeekFrom};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirEntryExt, FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The errno of what the standard library says.
pub(super) fn errno(error: &std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

/// `stat`'s answer.
pub(super) fn stat_of(meta: &std::fs::Metadata) -> Stat {
    Stat {
        ino: meta.ino(),
        directory: meta.is_dir(),
        size: if meta.is_dir() { 0 } else { meta.len() },
        mode: meta.mode() & 0o7777,
    }
}

/// A path below a directory.
pub(super) fn path(top: &Path, key: &[u8]) -> PathBuf {
    if key.is_empty() { top.to_owned() } else { top.join(OsStr::from_bytes(key)) }
}

/// `readdir`, all of it.
pub(super) fn list(path: &Path) -> Result<Vec<Line>, Errno> {
    let entries = std::fs::read_dir(path).map_err(|error| errno(&error))?;
    let line = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.map_err(|error| errno(&error))?;
        let directory = entry.file_type().map_err(|error| errno(&error))?.is_dir();
        Ok(Line { ino: entry.ino(), name: entry.file_name().into_vec(), directory })
    };
    entries.map(line).collect()
}

/// Reads until it is all there or the file ends.
pub(super) fn read(file: &File, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
    let mut bytes = vec![0; length];
    let mut got = 0;
    while got < length {
        match file.read_at(&mut bytes[got..], offset + got as u64) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) => return Err(errno(&error)),
        }
    }
    bytes.truncate(got);
    Ok(bytes)
}

/// `sendfile` into a pipe: out of the page cache.
pub(super) fn sendfile(file: &File, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
    let (reader, writer) = rustix::pipe::pipe()?;
    let (mut bytes, mut at) = (Vec::new(), offset);
    while bytes.len() < length {
        let want = (length - bytes.len()).min(16 * 4096);
        let sent = rustix::fs::sendfile(&writer, file, Some(&mut at), want)?;
        if sent == 0 {
            break;
        }
        let start = bytes.len();
        bytes.resize(start + sent, 0);
        let mut got = 0;
        while got < sent {
            got += rustix::io::read(&reader, &mut bytes[start + got..])?;
        }
    }
    Ok(bytes)
}

/// `lseek`.
pub(super) fn seek(file: &File, offset: u64, data: bool) -> Result<u64, Errno> {
    rustix::fs::seek(file, if data { SeekFrom::Data(offset) } else { SeekFrom::Hole(offset) })
}

/// Opens as a program does that reads.
pub(super) fn open(path: &Path, more: OFlags) -> Result<File, Errno> {
    let opened = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC | more, Mode::empty());
    // What cannot be read directly at all.
    let direct_directory = matches!(opened, Err(Errno::INVAL)) && more.contains(OFlags::DIRECT) && path.is_dir();
    let file: OwnedFd = if direct_directory { return Err(Errno::ISDIR) } else { opened? };
    // A program that reads a directory is told when it reads.
    let file = File::from(file);
    let is_directory = file.metadata().is_ok_and(|meta| meta.is_dir());
    if is_directory { Err(Errno::ISDIR) } else { Ok(file) }
}

/// See the module.
#[derive(Debug)]
pub struct Plain {
    root: tempfile::TempDir,
    top: PathBuf,
    open: [Option<File>; DESCRIPTORS],
    sequences: u64,
    /// What it calls the version of each name, so that conditions mean something.
    versions: BTreeMap<Vec<u8>, u64>,
    newest: u64,
}

impl Plain {
    /// Below a directory.
    ///
    /// # Panics
    /// It cannot be made.
    pub fn new(below: &Path) -> Plain {
        let root = tempfile::tempdir_in(below).unwrap_or_else(|error| panic!("{}: {error}", below.display()));
        let top = root.path().join("0");
        std::fs::create_dir(&top).unwrap_or_else(|error| panic!("{}: {error}", top.display()));
        Plain { root, top, open: Default::default(), sequences: 0, versions: BTreeMap::new(), newest: 1024 }
    }

    fn version(&self, key: &[u8]) -> u64 {
        self.versions.get(key).copied().unwrap_or(0)
    }
    fn file(&self, descriptor: usize) -> Result<&File, Errno> {
        self.open[descriptor].as_ref().ok_or(Errno::BADF)
    }
}

impl Subject for Plain {
    fn promise(&self) -> Promise {
        Promise::Snapshot
    }
    fn numbers(&self) -> bool {
        false
    }
    fn residue(&self) -> Duration {
        Duration::ZERO
    }

    fn put(&mut self, key: &[u8], content: &Content, if_version: Option<u64>) -> Result<u64, Refusal> {
        let place = path(&self.top, key);
        if if_version.is_some_and(|wanted| wanted != self.version(key)) {
            return Err(Refusal::Conflict);
        }
        let made = || -> std::io::Result<()> {
            if let Some(parent) = place.parent() {
                std::fs::create_dir_all(parent)?;
            }
            let beside = self.root.path().join("new");
            std::fs::write(&beside, content.bytes(0, usize::MAX))?;
            std::fs::set_permissions(&beside, std::fs::Permissions::from_mode(content.mode))?;
            std::fs::rename(&beside, &place)
        };
        made().map_err(|error| match errno(&error) {
            Errno::ISDIR | Errno::NOTDIR | Errno::EXIST | Errno::NOTEMPTY => Refusal::Conflict,
            other => Refusal::Other(format!("{other:?}")),
        })?;
        self.newest += 1;
        self.versions.insert(key.to_vec(), self.newest);
        Ok(self.newest)
    }

    fn delete(&mut self, key: &[u8], if_version: Option<u64>) -> Result<(), Refusal> {
        let place = path(&self.top, key);
        if !place.is_file() {
            return Err(Refusal::NotFound);
        }
        if if_version.is_some_and(|wanted| wanted != self.version(key)) {
            return Err(Refusal::Conflict);
        }
        self.versions.remove(key);
        std::fs::remove_file(&place).map_err(|error| Refusal::Other(error.to_string()))?;
        let mut above = place.parent();
        // A directory exists while something lies below it.
        while let Some(directory) = above.filter(|directory| *directory != self.top) {
            if std::fs::remove_dir(directory).is_err() {
                break;
            }
            above = directory.parent();
        }
        Ok(())
    }

    fn list(&mut self, key: &[u8], _room: usize, _plus: bool) -> Result<Vec<Line>, Errno> {
        list(&path(&self.top, key))
    }
    fn stat(&mut self, key: &[u8]) -> Result<Stat, Errno> {
        path(&self.top, key).symlink_metadata().map(|meta| stat_of(&meta)).map_err(|error| errno(&error))
    }
    fn open(&mut self, descriptor: usize, key: &[u8]) -> Result<(), Errno> {
        self.open[descriptor] = Some(open(&path(&self.top, key), OFlags::empty())?);
        Ok(())
    }
    fn close(&mut self, descriptor: usize) {
        self.open[descriptor] = None;
    }
    fn fstat(&mut self, descriptor: usize) -> Result<Stat, Errno> {
        self.file(descriptor)?.metadata().map(|meta| stat_of(&meta)).map_err(|error| errno(&error))
    }
    fn read(&mut self, descriptor: usize, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
        read(self.file(descriptor)?, offset, length)
    }
    fn mapped(&mut self, descriptor: usize, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
        sendfile(self.file(descriptor)?, offset, length)
    }
    fn seek(&mut self, descriptor: usize, offset: u64, data: bool) -> Result<u64, Errno> {
        seek(self.file(descriptor)?, offset, data)
    }
    fn write(&mut self, _key: &[u8]) -> Option<Errno> {
        None // It would work.
    }
    fn remount(&mut self) {}
    fn restart(&mut self, _crash: bool) {}
    fn damage(&mut self, _key: &[u8]) -> Result<(), String> {
        Err("a plain directory has no checksums".to_owned())
    }
    fn quiet(&mut self) -> Result<(), String> {
        self.begin()
    }
}

impl Plain {
    /// A new place for a sequence.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn begin(&mut self) -> Result<(), String> {
        self.sequences += 1;
        self.open = Default::default();
        self.versions.clear();
        let _ = std::fs::remove_dir_all(&self.top);
        self.top = self.root.path().join(self.sequences.to_string());
        std::fs::create_dir(&self.top).map_err(|error| error.to_string())
    }
}
