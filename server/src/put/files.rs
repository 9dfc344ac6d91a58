//! The component files of a put while they are written.
//!
//! Guarantees: space for data, table and header is taken before the first byte is pulled; the header is written last,
//! by one pwrite, so a component without one never counts; what was made is removed when the put fails; errors name
//! the directory.

use crate::scarce::shortage;
use crate::store::Store;
use railfs_proto::component::{BLOCK, BlockId, ComponentError, FileName, Geometry, Header, SUMS_PER_BLOCK, TableBlock};
use railfs_proto::descriptor::{Descriptor, Id};
use railfs_proto::name::ObjectName;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::node::lock;

/// Why a component cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The directory's file system is full.
    #[error("stripe directory {} ({directory}) is full: it has no room for {bytes} bytes of component {component}", .path.display())]
    NoSpace {
        /// Which.
        directory: Id,
        /// Where.
        path: PathBuf,
        /// Of which component.
        component: u32,
        /// Its whole file.
        bytes: u64,
    },
    /// Not the disk's fault: a limit of the process or the machine was met.
    #[error("cannot {doing} component {component} in stripe directory {} ({directory}): {what}", .path.display())]
    Short {
        /// What was tried.
        doing: &'static str,
        /// Where.
        directory: Id,
        /// Where.
        path: PathBuf,
        /// Of which component.
        component: u32,
        /// What there is too little of, and what to do.
        what: String,
    },
    /// Anything else the disk says.
    #[error("cannot {doing} component {component} in stripe directory {} ({directory}): {source}", .path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// Which.
        directory: Id,
        /// Where.
        path: PathBuf,
        /// Which component.
        component: u32,
        /// What came of it.
        source: io::Error,
    },
    /// The numbers do not fit the format.
    #[error(transparent)]
    Format(#[from] ComponentError),
    /// The store has no such directory.
    #[error("stripe directory {0} is not one of this node's")]
    NoDirectory(Id),
}

impl WriteError {
    /// The directory whose disk failed; `None` when it is only full, or not to blame (a limit of descriptors was met).
    pub fn suspect(&self) -> Option<Id> {
        match self {
            WriteError::Io { directory, .. } => Some(*directory),
            _ => None,
        }
    }
}

/// A table block that is being filled.
#[derive(Debug)]
struct Filling {
    sums: Vec<u64>,
    have: usize,
}

/// One component file.
#[derive(Debug)]
pub struct ComponentWriter {
    directory: Id,
    folder: PathBuf,
    path: PathBuf,
    file: File,
    version: u64,
    component: u32,
    geometry: Geometry,
    header: Box<[u8; BLOCK]>,
    /// Blocks that have some of their checksums; a full one is written and forgotten, so this stays small.
    table: Mutex<BTreeMap<u64, Filling>>,
}

impl ComponentWriter {
    fn error(&self, doing: &'static str, source: io::Error) -> WriteError {
        failed(self.directory, &self.path, self.component, self.geometry.file_size(), doing, source)
    }

    /// Writes verified bytes and keeps their checksums. `offset` is in the component and page aligned; the sums are of
    /// the pages of `bytes` in order. No page may be written twice.
    ///
    /// # Errors
    /// See [`WriteError`].
    pub fn write(&self, offset: u64, bytes: &[u8], sums: &[u64]) -> Result<(), WriteError> {
        self.file
            .write_all_at(bytes, railfs_proto::component::DATA_OFFSET + offset)
            .map_err(|source| self.error("write", source))?;
        let first = offset / self.geometry.page_size().max(1);
        let full = {
            let mut table = lock(&self.table);
            let mut full = Vec::new();
            for (page, sum) in (first..).zip(sums) {
                let (block, place) = Geometry::sum_place(page);
                let filling = table.entry(block).or_insert_with(|| Filling { sums: vec![0; SUMS_PER_BLOCK], have: 0 });
                if let Some(slot) = filling.sums.get_mut(place) {
                    *slot = *sum;
                    filling.have += 1;
                }
                if Some(filling.have) == self.geometry.block_sums(block)
                    && let Some(filling) = table.remove(&block)
                {
                    full.push((block, filling));
                }
            }
            full
        };
        full.into_iter().try_for_each(|(block, filling)| self.write_block(block, &filling))
    }

    fn write_block(&self, block: u64, filling: &Filling) -> Result<(), WriteError> {
        let id = BlockId { version: self.version, component: self.component, block };
        let bytes = TableBlock::encode(id, filling.sums.get(..filling.have).unwrap_or(&filling.sums))?;
        let offset =
            self.geometry.block_offset(block).ok_or(ComponentError::Field { field: "table block", value: block })?;
        self.file.write_all_at(&bytes, offset).map_err(|source| self.error("write the table of", source))
    }

    /// Every byte was written: the header, and all of it durable (the directory's entry not yet).
    ///
    /// # Errors
    /// See [`WriteError`]; a failed sync is not tried again.
    pub fn seal(&self) -> Result<(), WriteError> {
        if let Some((block, _)) = lock(&self.table).first_key_value() {
            // Cannot be: a put is sealed when every pull was accepted.
            return Err(ComponentError::Field { field: "unfinished table block", value: *block }.into());
        }
        self.file.write_all_at(&self.header[..], 0).map_err(|source| self.error("write the header of", source))?;
        self.file.sync_data().map_err(|source| self.error("sync", source))
    }
}

fn failed(
    directory: Id,
    path: &std::path::Path,
    component: u32,
    bytes: u64,
    doing: &'static str,
    source: io::Error,
) -> WriteError {
    // The stripe directory: DIR/components/VERSION.COMPONENT.
    let path = path.parent().and_then(std::path::Path::parent).unwrap_or(path).to_owned();
    if let Some(what) = shortage(&source) {
        return WriteError::Short { doing, directory, path, component, what };
    }
    match Errno::from_io_error(&source) {
        Some(Errno::NOSPC | Errno::DQUOT) => WriteError::NoSpace { directory, path, component, bytes },
        _ => WriteError::Io { doing, directory, path, component, source },
    }
}

/// The component files of one put. Dropped without [`Components::keep`] they are removed.
#[derive(Debug)]
pub struct Components {
    writers: Vec<ComponentWriter>,
    /// Nothing is to be removed any more: they are kept, or gone.
    settled: AtomicBool,
}

impl Components {
    /// Makes every file, with all its space.
    ///
    /// # Errors
    /// See [`WriteError`]; nothing is left behind.
    pub fn create(store: &Store, name: &ObjectName, descriptor: &Descriptor) -> Result<Components, WriteError> {
        let mut made =
            Components { writers: Vec::with_capacity(descriptor.components.len()), settled: AtomicBool::new(false) };
        for (component, replicas) in (0u32..).zip(&descriptor.components) {
            let Some(replica) = replicas.first() else { continue };
            let directory = store.directory(replica.directory).ok_or(WriteError::NoDirectory(replica.directory))?;
            let header = Header::new(name, descriptor, component)?;
            let geometry = header.geometry()?;
            let folder = directory.components();
            let path = folder.join(FileName { version: descriptor.version, component }.to_string());
            let broken = |doing, source| failed(directory.id(), &path, component, geometry.file_size(), doing, source);
            // Nothing is written where its disk should be and is not.
            directory
                .check_place()
                .map_err(|why| broken("find the place of", io::Error::new(io::ErrorKind::NotFound, why)))?;
            let file = File::options()
                .read(true)
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&path)
                .map_err(|source| broken("create", source))?;
            let writer = ComponentWriter {
                directory: directory.id(),
                folder,
                path: path.clone(),
                file,
                version: descriptor.version,
                component,
                geometry,
                header: Box::new(header.encode()),
                table: Mutex::default(),
            };
            // From here on it is removed if anything fails.
            made.writers.push(writer);
            if let Some(writer) = made.writers.last() {
                take_space(&writer.file, geometry.file_size()).map_err(|source| broken("take space for", source))?;
            }
        }
        Ok(made)
    }

    /// One of them.
    pub fn writer(&self, component: u32) -> Option<&ComponentWriter> {
        self.writers.get(component as usize)
    }

    /// Makes all of them durable, with the entries of their directories.
    ///
    /// # Errors
    /// See [`WriteError`].
    pub fn seal(&self) -> Result<(), WriteError> {
        match self.writers.as_slice() {
            [one] => one.seal()?,
            many => seal_at_once(many)?,
        }
        let mut synced = BTreeSet::new();
        for writer in &self.writers {
            if synced.insert(&writer.folder) {
                crate::store::sync_directory(&writer.folder)
                    .map_err(|source| writer.error("sync the folder of", source))?;
            }
        }
        Ok(())
    }

    /// They belong to an object now.
    pub fn keep(&self) {
        self.settled.store(true, Ordering::SeqCst);
    }

    /// It turned out that they do not belong to an object: [`Components::remove`] removes them again.
    pub fn drop_after_all(&self) {
        self.settled.store(false, Ordering::SeqCst);
    }

    /// Removes them now. Whoever still writes to one writes to a file without a name.
    pub fn remove(&self) {
        if self.settled.swap(true, Ordering::SeqCst) {
            return;
        }
        for writer in &self.writers {
            if let Err(error) = std::fs::remove_file(&writer.path) {
                tracing::warn!(path = %writer.path.display(), %error, "cannot remove a component of a failed put");
            }
        }
    }
}

/// Disks work at the same time: one thread for each of a few groups of components.
fn seal_at_once(writers: &[ComponentWriter]) -> Result<(), WriteError> {
    let share = writers.len().div_ceil(4).max(1);
    std::thread::scope(|scope| {
        let groups: Vec<_> = writers
            .chunks(share)
            .map(|group| scope.spawn(|| group.iter().try_for_each(ComponentWriter::seal)))
            .collect();
        let mut result = Ok(());
        for group in groups {
            // A panic there fails the put like an error.
            let sealed = group.join().unwrap_or_else(|_| {
                Err(ComponentError::Field { field: "component whose sealing panicked", value: 0 }.into())
            });
            result = result.and(sealed);
        }
        result
    })
}

impl Drop for Components {
    fn drop(&mut self) {
        self.remove();
    }
}

fn take_space(file: &File, bytes: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        // Some file systems cannot: then a full disk shows itself while writing.
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(bytes),
        other => other.map_err(io::Error::from),
    }
}
