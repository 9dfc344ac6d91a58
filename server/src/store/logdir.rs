//! What the log needs of a directory, as a trait, and the real thing.
//!
//! The trait is the place where tests freeze, fail or tear: everything that the log writes goes through it.

use super::{private, regular, sync_directory};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

/// Bytes of a segment of the log, unless told otherwise.
pub const SEGMENT_SIZE: u64 = 16 << 20;

/// A directory that holds segments of the log.
pub trait LogDirectory: Send + Sync + std::fmt::Debug {
    /// For messages: where it is.
    fn describe(&self) -> String;
    /// The names of the files in it.
    fn list(&self) -> io::Result<Vec<String>>;
    /// A whole file, at most `limit` bytes of it.
    fn read(&self, name: &str, limit: u64) -> io::Result<Vec<u8>>;
    /// Up to `length` bytes of a file from `offset` on; fewer only where it ends.
    fn read_at(&self, name: &str, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let end = offset.saturating_add(u64::try_from(length).unwrap_or(u64::MAX));
        let mut bytes = self.read(name, end)?;
        Ok(bytes.split_off(usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len())))
    }
    /// A new file (or an old one made empty) of `size` zeros whose space is allocated: later writes inside it do not
    /// fail for lack of space. `StorageFull` when there is none.
    fn create(&self, name: &str, size: u64) -> io::Result<Box<dyn LogFile>>;
    /// Bytes of the file, from its beginning, that have their space: writing there does not fail for lack of it. 0
    /// where there is no such file.
    fn allocated(&self, name: &str) -> io::Result<u64>;
    /// An existing file, to be written.
    fn open(&self, name: &str) -> io::Result<Box<dyn LogFile>>;
    /// Gives a file another name; replaces what had it.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Makes creations, renames and removals durable.
    fn sync(&self) -> io::Result<()>;
}

/// A file of the log, open for writing.
pub trait LogFile: Send + std::fmt::Debug {
    /// Writes all of it, inside the file's size.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Whether what is written can still be found again. An error refuses what was to be written, before any of it is.
    fn check(&self) -> io::Result<()> {
        Ok(())
    }
    /// Makes everything written durable. After an error nothing is known of it, and asking again proves nothing.
    fn sync(&self) -> io::Result<()>;
}

/// A folder of a real file system.
#[derive(Clone, Debug)]
pub struct DiskLogDirectory {
    path: PathBuf,
}

impl DiskLogDirectory {
    /// The folder must exist.
    pub fn new(path: PathBuf) -> DiskLogDirectory {
        DiskLogDirectory { path }
    }
}

impl LogDirectory for DiskLogDirectory {
    fn describe(&self) -> String {
        self.path.display().to_string()
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.path)? {
            // A name that is not text is not one of the log's.
            names.extend(entry?.file_name().into_string().ok());
        }
        Ok(names)
    }

    fn read(&self, name: &str, limit: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        io::Read::read_to_end(&mut io::Read::take(regular::read(&self.path.join(name))?, limit), &mut bytes)?;
        Ok(bytes)
    }

    fn read_at(&self, name: &str, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let file = regular::read(&self.path.join(name))?;
        let left = file.metadata()?.len().saturating_sub(offset);
        let mut bytes = vec![0; usize::try_from(left).unwrap_or(usize::MAX).min(length)];
        file.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }

    fn create(&self, name: &str, size: u64) -> io::Result<Box<dyn LogFile>> {
        let options = &mut private::options();
        let file = regular::open(options.write(true).create(true).truncate(true), &self.path.join(name))?;
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size) {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => write_zeros(&file, size)?,
            Err(errno) => return Err(errno.into()),
        }
        file.sync_all()?;
        Ok(Box::new(DiskLogFile { file }))
    }

    fn allocated(&self, name: &str) -> io::Result<u64> {
        match std::fs::metadata(self.path.join(name)) {
            // What has the name is no file of ours: whoever opens it is told.
            Ok(metadata) if !metadata.is_file() => Ok(0),
            // A file with holes has fewer blocks than bytes: then nothing is known of any one place in it.
            Ok(metadata) if metadata.blocks().saturating_mul(512) >= metadata.len() => Ok(metadata.len()),
            Ok(_) => Ok(0),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error),
        }
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn LogFile>> {
        let file = regular::open(OpenOptions::new().write(true), &self.path.join(name))?;
        Ok(Box::new(DiskLogFile { file }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        std::fs::rename(self.path.join(from), self.path.join(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let path = self.path.join(name);
        // What is none of ours is not ours to remove.
        match regular::instead(&path) {
            Some(what) => Err(what.into()),
            None => std::fs::remove_file(path),
        }
    }

    fn sync(&self) -> io::Result<()> {
        sync_directory(&self.path)
    }
}

/// For file systems that cannot allocate ahead: as near to it as they come.
fn write_zeros(file: &File, size: u64) -> io::Result<()> {
    let zeros = vec![0u8; 1 << 20];
    let mut at = 0;
    while at < size {
        let left = usize::try_from(size - at).unwrap_or(usize::MAX).min(zeros.len());
        file.write_all_at(&zeros[..left], at)?;
        at = at.saturating_add(u64::try_from(left).unwrap_or(u64::MAX));
    }
    Ok(())
}

#[derive(Debug)]
struct DiskLogFile {
    file: File,
}

impl LogFile for DiskLogFile {
    fn check(&self) -> io::Result<()> {
        // A file without a name can be written and synced, and is gone with this process.
        if rustix::fs::fstat(&self.file)?.st_nlink == 0 {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the segment was deleted"));
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}
