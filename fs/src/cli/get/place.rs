//! Where got files go: without a name or under a temporary one first, and of a tree only below the directory that was named.
//!
//! Guarantees: a file appears whole under its name or not at all; below the directory of a tree no symbolic link is ever
//! followed, and no name leads out of it, whatever lies there and whatever happens to it meanwhile.

use crate::failure::{Failure, io};
use railfs_proto::descriptor::Attributes;
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Names that are tried for one temporary file.
const TRIES: u32 = 100;

/// Long names leave no room for more: the name's start tells enough.
fn temporary_name(name: &[u8], attempt: u32) -> Vec<u8> {
    let start = &name[..name.len().min(200)];
    let ending = format!(".railfs-{}-{attempt}", std::process::id());
    [b".", start, ending.as_bytes()].concat()
}

/// A file that has not got its name yet, and is gone unless it gets it: where the file system can (O_TMPFILE) it has none at all
/// until then, so that not even a kill leaves one behind.
pub struct Temporary {
    directory: OwnedFd,
    file: File,
    /// Of a file that had to have a name.
    temporary: Option<Vec<u8>>,
    name: Vec<u8>,
}

impl Temporary {
    /// In the same directory.
    ///
    /// # Errors
    /// What the system said.
    pub fn beside(target: &Path, mode: u32) -> std::io::Result<(File, Temporary)> {
        let name = target.file_name().ok_or(std::io::ErrorKind::InvalidInput)?;
        let directory = target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let flags = OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC;
        let directory = rustix::fs::open(directory, flags, Mode::empty())?;
        Temporary::create(directory, name.as_bytes(), mode)
    }

    fn create(directory: OwnedFd, name: &[u8], mode: u32) -> std::io::Result<(File, Temporary)> {
        let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        let (file, temporary) = match rustix::fs::openat(&directory, ".", flags, Mode::from_raw_mode(mode)) {
            // It is named by way of /proc, which may be missing.
            Ok(file) if rustix::fs::stat(way_to(&file)).is_ok() => (File::from(file), None),
            Ok(_) | Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {
                let (file, temporary) = named(&directory, name, mode)?;
                (file, Some(temporary))
            }
            Err(error) => return Err(error.into()),
        };
        let temporary = Temporary { directory, file: file.try_clone()?, temporary, name: name.to_vec() };
        Ok((file, temporary))
    }

    /// Gives it its name; what had it (a link too) is replaced.
    ///
    /// # Errors
    /// What the system said; it is gone then.
    pub fn finish(mut self) -> std::io::Result<()> {
        let directory = &self.directory;
        let link = |name: &[u8]| {
            rustix::fs::linkat(rustix::fs::CWD, way_to(&self.file), directory, name, AtFlags::SYMLINK_FOLLOW)
        };
        if self.temporary.is_none() {
            match link(&self.name) {
                Ok(()) => return Ok(()),
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            // Only a rename replaces.
            let names = (0..TRIES).map(|attempt| temporary_name(&self.name, attempt));
            for name in names {
                match link(&name) {
                    Ok(()) => {
                        self.temporary = Some(name);
                        break;
                    }
                    Err(Errno::EXIST) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        let temporary = self.temporary.as_ref().ok_or(std::io::ErrorKind::AlreadyExists)?;
        rustix::fs::renameat(&self.directory, temporary.as_slice(), &self.directory, self.name.as_slice())?;
        self.temporary = None;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            // It may have been removed by somebody else; the failure is being reported already.
            let _ = rustix::fs::unlinkat(&self.directory, temporary.as_slice(), AtFlags::empty());
        }
    }
}

/// A path to an open file, whether it has a name or not.
fn way_to(file: &impl AsRawFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// A new file under a temporary name.
fn named(directory: &OwnedFd, name: &[u8], mode: u32) -> std::io::Result<(File, Vec<u8>)> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    for attempt in 0..TRIES {
        let temporary = temporary_name(name, attempt);
        match rustix::fs::openat(directory, temporary.as_slice(), flags, Mode::from_raw_mode(mode)) {
            Ok(file) => return Ok((file.into(), temporary)),
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(std::io::ErrorKind::AlreadyExists.into())
}

/// What a put kept, to be given to a file again.
#[derive(Clone, Copy, Debug)]
pub struct Kept(Attributes);

impl Kept {
    /// Of an object.
    pub fn of(attributes: &Attributes) -> Kept {
        Kept(*attributes)
    }

    /// Owner (where this user may), mode, time.
    ///
    /// # Errors
    /// What the system said.
    pub fn give(&self, file: &File) -> std::io::Result<()> {
        let Kept(attributes) = self;
        let mut mode = attributes.mode & 0o7777;
        if let Some(owner) = attributes.owner {
            match rustix::fs::fchown(file, Some(Uid::from_raw(owner.uid)), Some(Gid::from_raw(owner.gid))) {
                Ok(()) => {}
                // As cp does for those who may not give files away: then it must not run as somebody else either.
                Err(Errno::PERM) if !rustix::process::geteuid().is_root() => mode &= 0o777,
                Err(error) => return Err(error.into()),
            }
        } else {
            mode &= 0o777;
        }
        rustix::fs::fchmod(file, Mode::from_raw_mode(mode))?;
        let time = Timespec { tv_sec: attributes.mtime_seconds, tv_nsec: attributes.mtime_nanoseconds.into() };
        rustix::fs::futimens(file, &Timestamps { last_access: time, last_modification: time })?;
        Ok(())
    }
}

/// The directory that a tree goes into.
pub struct Root {
    directory: OwnedFd,
    path: PathBuf,
}

/// A file in it that has not got its name yet.
pub struct Pending {
    temporary: Temporary,
    /// For messages.
    pub path: PathBuf,
}

impl Root {
    /// Opens the directory, which is made if it is missing. A link to a directory is one: it was named by the user.
    ///
    /// # Errors
    /// It is something else, or cannot be made.
    pub fn open(path: &Path) -> Result<Root, Failure> {
        match std::fs::create_dir(path) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(io(path.display(), &error)),
            _ => {}
        }
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(path, flags, Mode::empty());
        let directory = directory.map_err(|error| io(path.display(), &error.into()))?;
        Ok(Root { directory, path: path.to_owned() })
    }

    /// A new file at a path below, given by its parts; directories on the way are made.
    ///
    /// # Errors
    /// A part that is no name, a link on the way, what the system said.
    pub fn create(&self, parts: &[&[u8]], mode: u32) -> Result<(File, Pending), Failure> {
        let mut path = self.path.clone();
        let Some((name, above)) = parts.split_last() else {
            return Err(Failure::failed(format!("{}: a file without a name", path.display())));
        };
        if let Some(part) = parts.iter().find(|part| !is_name(part)) {
            return Err(Failure::failed(format!("\"{}\" is no name for a file", part.escape_ascii())));
        }
        let mut directory = self.directory.try_clone().map_err(|error| io(path.display(), &error))?;
        for part in above {
            path.push(OsStr::from_bytes(part));
            directory = below(&directory, part).map_err(|error| refused(&path, error))?;
        }
        path.push(OsStr::from_bytes(name));
        let created = Temporary::create(directory, name, mode);
        let (file, temporary) = created.map_err(|error| io(path.display(), &error))?;
        Ok((file, Pending { temporary, path }))
    }
}

fn is_name(part: &[u8]) -> bool {
    !part.is_empty() && part != b"." && part != b".." && !part.contains(&b'/') && !part.contains(&0)
}

/// A directory in a directory, made if it is missing, no link followed.
fn below(directory: &OwnedFd, part: &[u8]) -> Result<OwnedFd, Errno> {
    match rustix::fs::mkdirat(directory, part, Mode::from_raw_mode(0o777)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error),
    }
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(directory, part, flags, Mode::empty()).map_err(|error| {
        let link = rustix::fs::statat(directory, part, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_symlink());
        if link { Errno::LOOP } else { error }
    })
}

fn refused(path: &Path, error: Errno) -> Failure {
    let shown = path.display();
    match error {
        Errno::LOOP => Failure::failed(format!("{shown} is a symbolic link, which get does not follow: remove it")),
        Errno::NOTDIR => Failure::failed(format!("{shown} is not a directory: remove it, or get into another place")),
        error => io(shown, &error.into()),
    }
}

impl Pending {
    /// See [`Temporary::finish`].
    ///
    /// # Errors
    /// What the system said; it is gone then.
    pub fn finish(self) -> Result<PathBuf, Failure> {
        let Pending { temporary, path } = self;
        temporary.finish().map_err(|error| io(path.display(), &error))?;
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::{MetadataExt, symlink};

    #[test]
    fn a_temporary_file_is_gone_unless_it_was_finished_and_has_no_name_until_then() {
        let dir = tempfile::tempdir().unwrap();
        let names = || std::fs::read_dir(dir.path()).unwrap().count();
        let target = dir.path().join("x".repeat(255));
        for round in [&b"1"[..], b"2"] {
            let (mut file, temporary) = Temporary::beside(&target, 0o600).unwrap();
            file.write_all(round).unwrap();
            assert!(temporary.temporary.is_some() || names() <= 1, "nothing that a kill could leave behind");
            drop(Temporary::beside(&target, 0o600).unwrap());
            temporary.finish().unwrap();
            assert_eq!(std::fs::read(&target).unwrap(), round);
            assert_eq!(names(), 1);
        }
    }

    #[test]
    fn a_file_that_must_have_a_name_gets_a_temporary_one() {
        let dir = tempfile::tempdir().unwrap();
        let names = || std::fs::read_dir(dir.path()).unwrap().count();
        let target = dir.path().join("f");
        let directory = || OwnedFd::from(File::open(dir.path()).unwrap());
        let new = || {
            let (file, name) = named(&directory(), b"f", 0o600).unwrap();
            let temporary = Some(name);
            Temporary { directory: directory(), file, temporary, name: b"f".to_vec() }
        };
        let (mut first, second) = (new(), new());
        assert_ne!(first.temporary, second.temporary);
        drop(second);
        first.file.write_all(b"1").unwrap();
        assert_eq!((names(), target.exists()), (1, false));
        first.finish().unwrap();
        assert_eq!((names(), std::fs::read(&target).unwrap()), (1, b"1".to_vec()));
    }

    fn put(root: &Root, parts: &[&[u8]], bytes: &[u8]) -> Result<PathBuf, Failure> {
        let (mut file, pending) = root.create(parts, 0o640)?;
        file.write_all(bytes).unwrap();
        pending.finish()
    }

    #[test]
    fn a_tree_is_made_below_its_directory_and_nowhere_else() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let root = Root::open(&at("into")).unwrap();
        assert_eq!(put(&root, &[b"a", b"b", b"f"], b"1"), Ok(at("into/a/b/f")));
        assert_eq!(std::fs::read(at("into/a/b/f")).unwrap(), b"1");
        let (_, pending) = root.create(&[b"a", b"gone"], 0o600).unwrap();
        drop(pending);
        assert_eq!(std::fs::read_dir(at("into/a")).unwrap().count(), 1);
        // Links on the way are refused; one that has the file's own name is replaced, not followed.
        std::fs::create_dir(at("outside")).unwrap();
        std::fs::write(at("outside/f"), "mine").unwrap();
        symlink(at("outside"), at("into/link")).unwrap();
        let refused = put(&root, &[b"link", b"f"], b"2").unwrap_err().message;
        assert!(refused.contains("into/link is a symbolic link"), "{refused}");
        symlink(at("outside/f"), at("into/f")).unwrap();
        assert_eq!(put(&root, &[b"f"], b"3"), Ok(at("into/f")));
        assert!(!std::fs::symlink_metadata(at("into/f")).unwrap().is_symlink());
        assert_eq!(std::fs::read(at("outside/f")).unwrap(), b"mine");
        assert_eq!(std::fs::read_dir(at("outside")).unwrap().count(), 1);
        for parts in [&[&b".."[..], b"f"][..], &[b"a", b"..", b"..", b"f"], &[b"."], &[b"a/b"], &[b""], &[b"a\0b"], &[]]
        {
            assert!(put(&root, parts, b"4").is_err(), "{parts:?}");
        }
        let file_on_the_way = put(&root, &[b"f", b"below"], b"5").unwrap_err().message;
        assert!(file_on_the_way.contains("is not a directory"), "{file_on_the_way}");
        assert!(put(&root, &[b"a"], b"6").is_err(), "a directory has the name");
        assert_eq!(std::fs::read_dir(at("into")).unwrap().count(), 3, "no temporary file is left");
        assert!(Root::open(&at("into/f")).is_err());
    }

    #[test]
    fn what_was_kept_is_given_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = File::create(dir.path().join("f")).unwrap();
        let mut attributes = Attributes { mode: 0o4640, mtime_seconds: -5, mtime_nanoseconds: 7, owner: None };
        Kept::of(&attributes).give(&file).unwrap();
        let metadata = file.metadata().unwrap();
        // Without its owner it must not run as whoever gets it.
        assert_eq!((metadata.mode() & 0o7777, metadata.mtime(), metadata.mtime_nsec()), (0o640, -5, 7));
        if rustix::process::geteuid().is_root() {
            attributes.owner = Some(railfs_proto::descriptor::Owner { uid: 1234, gid: 55 });
            Kept::of(&attributes).give(&file).unwrap();
            let metadata = file.metadata().unwrap();
            assert_eq!((metadata.uid(), metadata.gid(), metadata.mode() & 0o7777), (1234, 55, 0o4640));
        }
    }
}
