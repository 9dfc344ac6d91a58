//! Component files that are open for reading, with their checksum tables: a bounded cache.
//!
//! Guarantees: a file is in here only if its header is valid, agrees with the object's record, and its size is what the
//! arithmetic gives; checksums come only from table blocks that carry their own; at most [`capacity`] files, and
//! [`TABLE_BLOCKS`] table blocks of each, are held, so that connections, puts and the log find descriptors.

use crate::node::lock;
use crate::scarce::lacks_descriptors;
use crate::store::Store;
use lru::LruCache;
use railfs_engine::rail::slab::{Identity, open_direct};
use railfs_proto::component::{BLOCK, BlockId, ComponentError, DATA_OFFSET, FileName, Geometry, Header, TableBlock};
use railfs_proto::descriptor::{Descriptor, Id};
use railfs_proto::layout::Striping;
use railfs_proto::name::Namespace;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Most files kept open, whatever the limit.
pub const OPEN_FILES: NonZeroUsize = NonZeroUsize::new(1024).unwrap();
/// Files that may be kept open under the smallest limit.
pub const FEWEST_FILES: NonZeroUsize = NonZeroUsize::new(4).unwrap();
/// Table blocks kept for each: 511 pages each.
pub const TABLE_BLOCKS: NonZeroUsize = NonZeroUsize::new(8).unwrap();

/// How many components may stay open where the process may have `limit` descriptors (`None`: any number): a quarter of them
/// is for these; one that is open for direct reads too takes two.
pub fn capacity(limit: Option<u64>, direct: bool) -> NonZeroUsize {
    let each = if direct { 2 } else { 1 };
    let files = limit.map_or(usize::MAX, |limit| usize::try_from(limit / 4 / each).unwrap_or(usize::MAX));
    NonZeroUsize::new(files).map_or(FEWEST_FILES, |files| files.clamp(FEWEST_FILES, OPEN_FILES))
}

/// Why bytes of a component cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file is not there.
    #[error("the file is missing")]
    Missing,
    /// The disk failed.
    #[error("{0}")]
    Io(io::Error),
    /// What is on the disk is not what was written.
    #[error("{0}")]
    Damaged(#[from] ComponentError),
    /// Something else lies there.
    #[error("{} is {what}, not a file: put the component itself in its place", .path.display())]
    NoFile {
        /// Where.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// The file is longer or shorter than it was written.
    #[error("the file has {found} bytes, not {wanted}")]
    Size {
        /// On disk.
        found: u64,
        /// By the arithmetic.
        wanted: u64,
    },
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::NotFound { ReadError::Missing } else { ReadError::Io(error) }
    }
}

/// What it is, for messages: `None` for a file.
pub fn kind_name(kind: FileType) -> Option<&'static str> {
    match kind {
        FileType::RegularFile => None,
        FileType::Directory => Some("a directory"),
        FileType::Symlink => Some("a symbolic link"),
        FileType::Fifo => Some("a FIFO"),
        FileType::Socket => Some("a socket"),
        FileType::CharacterDevice | FileType::BlockDevice => Some("a device"),
        FileType::Unknown => Some("something unknown"),
    }
}

/// The one place where a component is opened. Never waits for a writer of what is a FIFO; what is no file is refused. A
/// symbolic link is followed.
///
/// # Errors
/// `NoFile`, `Missing`, `Io`.
pub fn open_regular(path: &Path) -> Result<File, ReadError> {
    let no_file = |what| ReadError::NoFile { path: path.to_owned(), what };
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        // What a socket says, and a device that nothing drives.
        Err(error @ (Errno::NXIO | Errno::NODEV)) => {
            let stat = rustix::fs::stat(path).map_err(io::Error::from)?;
            return Err(kind_name(FileType::from_raw_mode(stat.st_mode)).map_or(ReadError::Io(error.into()), no_file));
        }
        Err(error) => return Err(io::Error::from(error).into()),
    };
    let stat = rustix::fs::fstat(&file).map_err(io::Error::from)?;
    if let Some(what) = kind_name(FileType::from_raw_mode(stat.st_mode)) {
        return Err(no_file(what));
    }
    // Some file systems would say EAGAIN to io_uring for as long as it is set.
    rustix::fs::fcntl_setfl(&file, OFlags::empty()).map_err(io::Error::from)?;
    Ok(file)
}

/// Which file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// Version.
    pub version: u64,
    /// Component.
    pub component: u32,
    /// Stripe directory.
    pub directory: Id,
}

impl Key {
    /// Names the bytes of this component: versions are never used again, so neither is this.
    pub fn identity(&self) -> Identity {
        let mut name = [0; 32];
        name[..8].copy_from_slice(&self.version.to_le_bytes());
        name[8..12].copy_from_slice(&self.component.to_le_bytes());
        name[16..].copy_from_slice(&self.directory.0);
        Identity(name)
    }
}

/// An open component.
#[derive(Debug)]
pub struct Component {
    key: Key,
    /// Of the object; `None` where nobody asks for it.
    namespace: Option<Namespace>,
    file: Arc<File>,
    direct: Option<Arc<File>>,
    geometry: Geometry,
    striping: Striping,
    blocks: Mutex<LruCache<u64, Arc<TableBlock>>>,
}

impl Component {
    /// Opens and checks the file. Reads the disk.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn open(
        store: &Store,
        key: Key,
        namespace: Namespace,
        descriptor: &Descriptor,
        direct: bool,
    ) -> Result<Component, ReadError> {
        let directory = store.directory(key.directory).ok_or(ReadError::Missing)?;
        let name = FileName { version: key.version, component: key.component };
        let opened = Self::open_at(&directory.components().join(name.to_string()), key, descriptor, direct)?;
        Ok(Component { namespace: Some(namespace), ..opened })
    }

    /// The same of a file that lies anywhere.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn open_at(path: &Path, key: Key, descriptor: &Descriptor, direct: bool) -> Result<Component, ReadError> {
        let file = open_regular(path)?;
        let found = file.metadata()?.len();
        let mut block = [0u8; BLOCK];
        match file.read_exact_at(&mut block, 0) {
            // Too short to say itself how long it should be.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                let wanted = Geometry::of(&descriptor.striping, key.component)?.file_size();
                return Err(ReadError::Size { found, wanted });
            }
            // The disk's own word first, whatever the size.
            other => other?,
        }
        let header = Header::decode(&block)?;
        header.agree(descriptor, key.component)?;
        let geometry = header.geometry()?;
        if found != geometry.file_size() {
            return Err(ReadError::Size { found, wanted: geometry.file_size() });
        }
        // Where it cannot be had the bytes are read through the kernel's cache.
        let direct = match direct.then(|| open_direct(path)) {
            // That is no word about the file system.
            Some(Err(error)) if lacks_descriptors(&error) => return Err(error.into()),
            direct => direct.and_then(Result::ok).map(Arc::new),
        };
        let blocks = Mutex::new(LruCache::new(TABLE_BLOCKS));
        Ok(Component {
            key,
            namespace: None,
            file: Arc::new(file),
            direct,
            geometry,
            striping: header.striping,
            blocks,
        })
    }

    /// Which it is.
    pub fn key(&self) -> Key {
        self.key
    }
    /// The namespace of the object that it is of.
    pub fn namespace(&self) -> Option<&Namespace> {
        self.namespace.as_ref()
    }
    /// The file.
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }
    /// The same file for direct reads, where the file system has them and they were asked for.
    pub fn direct(&self) -> Option<&Arc<File>> {
        self.direct.as_ref()
    }
    /// Where things lie in it.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }
    /// The object's layout.
    pub fn striping(&self) -> &Striping {
        &self.striping
    }
    /// Where bytes of the component lie in the file.
    pub fn file_offset(&self, offset: u64) -> u64 {
        DATA_OFFSET + offset
    }

    /// Checksums of `count` pages from `first` on, if their table blocks are held. Does not read the disk.
    pub fn held_sums(&self, first: u64, count: usize) -> Option<Vec<u64>> {
        let mut held = lock(&self.blocks);
        self.collect(first, count, |block| held.get(&block).cloned().ok_or(())).ok()
    }

    /// The same, reading what is not held.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn sums(&self, first: u64, count: usize) -> Result<Vec<u64>, ReadError> {
        self.collect(first, count, |block| {
            if let Some(held) = lock(&self.blocks).get(&block) {
                return Ok(Arc::clone(held));
            }
            let read = Arc::new(self.read_block(block)?);
            lock(&self.blocks).put(block, Arc::clone(&read));
            Ok(read)
        })
    }

    fn collect<E>(
        &self,
        first: u64,
        count: usize,
        mut block_of: impl FnMut(u64) -> Result<Arc<TableBlock>, E>,
    ) -> Result<Vec<u64>, E> {
        let mut sums = Vec::with_capacity(count);
        let mut page = first;
        while sums.len() < count {
            let (block, place) = Geometry::sum_place(page);
            let table = block_of(block)?;
            let before = sums.len();
            sums.extend(table.sums().iter().skip(place).take(count - before));
            page += (sums.len() - before) as u64;
        }
        Ok(sums)
    }

    fn read_block(&self, block: u64) -> Result<TableBlock, ReadError> {
        let offset = self.geometry.block_offset(block);
        let offset = offset.ok_or(ComponentError::Field { field: "table block", value: block })?;
        let mut bytes = [0u8; BLOCK];
        self.file.read_exact_at(&mut bytes, offset).map_err(|error| match self.file.metadata() {
            // It was cut after it was opened.
            Ok(now) if error.kind() == io::ErrorKind::UnexpectedEof => {
                ReadError::Size { found: now.len(), wanted: self.geometry.file_size() }
            }
            _ => error.into(),
        })?;
        let id = BlockId { version: self.key.version, component: self.key.component, block };
        Ok(TableBlock::decode(id, &bytes)?)
    }
}

/// The cache.
#[derive(Debug)]
pub struct Files(Mutex<LruCache<Key, Arc<Component>>>);

impl Default for Files {
    fn default() -> Self {
        Files::new(OPEN_FILES)
    }
}

impl Files {
    /// For so many at once: see [`capacity`].
    pub fn new(capacity: NonZeroUsize) -> Files {
        Files(Mutex::new(LruCache::new(capacity)))
    }
    /// Closes all, for when no descriptor is left; those that are being read are closed with their last read. How many.
    pub fn let_go(&self) -> usize {
        let mut all = Vec::new();
        {
            let mut files = lock(&self.0);
            while let Some((_, file)) = files.pop_lru() {
                all.push(file);
            }
        }
        // They are closed outside the lock.
        all.len()
    }
    /// The component, if it is open.
    pub fn get(&self, key: &Key) -> Option<Arc<Component>> {
        lock(&self.0).get(key).cloned()
    }
    /// Keeps it open.
    pub fn put(&self, component: &Arc<Component>) {
        // What falls out is closed outside the lock.
        let old = lock(&self.0).push(component.key, Arc::clone(component));
        drop(old);
    }
    /// Closes one, so that it is opened and checked afresh.
    pub fn forget(&self, key: &Key) {
        let old = lock(&self.0).pop(key);
        drop(old);
    }
    /// Closes everything of these versions: their files are gone.
    pub fn forget_versions(&self, versions: &[u64]) {
        let mut files = lock(&self.0);
        let keys: Vec<Key> = files.iter().map(|(key, _)| *key).filter(|key| versions.contains(&key.version)).collect();
        for key in keys {
            files.pop(&key);
        }
    }
    /// Files that are open.
    pub fn len(&self) -> usize {
        lock(&self.0).len()
    }
    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i6_a_quarter_of_the_descriptors_is_for_open_components() {
        let of = |limit, direct| capacity(limit, direct).get();
        assert_eq!((of(None, false), of(None, true)), (1024, 1024));
        assert_eq!((of(Some(65_536), false), of(Some(65_536), true)), (1024, 1024));
        assert_eq!((of(Some(4096), false), of(Some(4096), true)), (1024, 512));
        assert_eq!((of(Some(1024), false), of(Some(1024), true)), (256, 128));
        assert_eq!((of(Some(256), false), of(Some(256), true)), (64, 32));
        assert_eq!((of(Some(8), false), of(Some(0), true)), (4, 4));
    }
}
