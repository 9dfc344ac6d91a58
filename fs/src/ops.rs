//! The file system, without a kernel: what each operation means over a [`Backend`].
//!
//! Guarantees:
//! * No operation waits: each answers in its callback, on this thread or one of the backend's, by the backend's deadline.
//! * An inode is one version. OPEN and GETATTR of a file check that it is current and answer ESTALE when it is not (in
//!   `snapshot` GETATTR does so only while it is not open); READ gives all the bytes asked for (fewer only at the end of the
//!   file), of that version, or an error; in `strict` a READ of read(2) is checked, a page-cache fill is not.
//! * A version that the page cache is filled from, or that is open in `snapshot`, is pinned until its last handle is closed.
//! * A failure is logged once, here, with operation, object and cause; everyday answers (not there, replaced) at debug.

mod attr;
mod dirs;
mod inodes;
mod listing;
mod modes;
mod opens;
mod space;
#[cfg(test)]
mod tests;
mod xattr;

pub use attr::{Attr, Kind, MAX_READ, Owner};
pub use inodes::{DIRECTORY_BIT, ROOT};
pub use listing::{DirSink, Emitted};
pub use modes::{Choice, Form, Io, Kernel, Mode, choose};
pub use space::{BLOCK, Space};
pub use xattr::Xattr;

use crate::backend::Backend;
use crate::errno::{Errno, errno, is_everyday, name_errno};
use attr::Facts;
use inodes::{FileNode, Inodes, Node};
use opens::Opens;
use railfs_engine::client::{Found, Freshness, ListQuery, Object};
use railfs_engine::clock::Time;
use railfs_engine::error::Error;
use railfs_proto::name::{Key, Namespace, ObjectName};
use std::collections::HashMap;
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::Duration;

/// What a mount shows, and how.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Which namespace.
    pub namespace: Namespace,
    /// The directory that is the root; `None`: the whole namespace.
    pub root: Option<Key>,
    /// Who owns files and directories.
    pub owner: Owner,
    /// How long the kernel may trust a name, and a directory's attributes.
    pub entry_ttl: Duration,
    /// How long it may trust a file's attributes.
    pub metadata_ttl: Duration,
    /// Seconds and nanoseconds since 1970: the root's time until the store has told one.
    pub mounted_at: (i64, u32),
    /// How long one READDIR may take, over all the pages that it asks for.
    pub list_limit: Duration,
}

/// An answer that names an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its attributes.
    pub attr: Attr,
    /// How long they may be trusted.
    pub attr_ttl: Duration,
    /// How long the name may be trusted.
    pub entry_ttl: Duration,
}

/// What is open and under way: all zero when a mount is quiet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// Open files.
    pub open_files: u64,
    /// Versions that are pinned for what the page cache was filled with.
    pub filled_versions: u64,
    /// Open directories.
    pub open_directories: u64,
    /// Requests that are not answered yet.
    pub in_flight: u64,
    /// Inodes that the kernel knows.
    pub inodes: u64,
}

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// To read.
    Read,
    /// In any way that can change it.
    Write,
}

/// Rights that a program asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rights {
    /// To write.
    pub write: bool,
    /// To execute, or to pass through a directory.
    pub execute: bool,
}

/// Where a SEEK_DATA or SEEK_HOLE goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seek {
    /// The next data.
    Data,
    /// The next hole: the end of the file, there are no others.
    Hole,
}

/// The file system. Clones are the same one.
#[derive(Clone)]
pub struct FileSystem(Arc<Shared>);

struct Shared {
    backend: Arc<dyn Backend>,
    settings: Settings,
    clock: Box<dyn Fn() -> Time + Send + Sync>,
    inodes: Inodes,
    files: RwLock<HashMap<u64, Arc<FileHandle>>>,
    opens: Opens,
    /// Set at INIT, before any other request; until then (and in tests without a kernel) `strict`, direct.
    choice: OnceLock<Choice>,
    directories: Mutex<HashMap<u64, Arc<listing::Handle>>>,
    next_handle: AtomicU64,
    in_flight: AtomicU64,
    root_times: Mutex<RootTimes>,
    space: space::Cache,
}

struct FileHandle {
    object: Arc<Object>,
    /// It holds a pin of its own (`snapshot`).
    pinned: bool,
}

/// What a READ is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A read(2) or one of its relatives.
    Read,
    /// The kernel's page cache: mmap, exec, sendfile, splice, readahead; in the cached form also what read(2) lacked there.
    Fill,
}

/// What is known of the root's time.
struct RootTimes {
    mtime: (i64, u32),
    asked: Option<Time>,
}

/// Counts a request until its callback has run (or was dropped).
struct InFlight(Arc<Shared>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl FileSystem {
    /// Over a backend. `clock` is monotonic.
    pub fn new(backend: Arc<dyn Backend>, settings: Settings, clock: Box<dyn Fn() -> Time + Send + Sync>) -> Self {
        let root_times = RootTimes { mtime: settings.mounted_at, asked: None };
        FileSystem(Arc::new(Shared {
            inodes: Inodes::new(settings.root.clone()),
            backend,
            settings,
            clock,
            files: RwLock::default(),
            opens: Opens::default(),
            choice: OnceLock::new(),
            directories: Mutex::default(),
            next_handle: AtomicU64::new(1),
            in_flight: AtomicU64::new(0),
            root_times: Mutex::new(root_times),
            space: space::Cache::default(),
        }))
    }

    /// What was agreed with the kernel, once, before any other request.
    pub fn agree(&self, choice: Choice) {
        // A second INIT of one connection does not exist.
        let _ = self.0.choice.set(choice);
    }

    /// What was agreed with the kernel.
    pub fn choice(&self) -> Choice {
        self.0.choice.get().cloned().unwrap_or_default()
    }

    /// What is open and under way.
    pub fn activity(&self) -> Activity {
        let shared = &self.0;
        Activity {
            open_files: shared.files.read().unwrap_or_else(PoisonError::into_inner).len() as u64,
            filled_versions: shared.opens.filled(),
            open_directories: shared.directories.lock().unwrap_or_else(PoisonError::into_inner).len() as u64,
            in_flight: shared.in_flight.load(Ordering::Relaxed),
            inodes: shared.inodes.len() as u64,
        }
    }

    fn begin(&self) -> InFlight {
        self.0.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlight(self.0.clone())
    }

    /// LOOKUP: a name in a directory.
    pub fn lookup(&self, parent: u64, name: &[u8], reply: impl FnOnce(Result<Entry, Errno>) + Send + 'static) {
        let key = match self.0.child(parent, name) {
            Ok(key) => key,
            Err(code) => return reply(Err(code)),
        };
        let (request, shared) = (self.begin(), self.0.clone());
        let name = shared.name(&key);
        let found = move |found: Result<Found, Error>| {
            let _request = request;
            reply(match found {
                Ok(Found::Object(object)) => {
                    let facts = Facts::of_object(&object);
                    let settings = &shared.settings;
                    let entry = Entry {
                        attr: attr::file(facts, settings.owner),
                        attr_ttl: shared.file_ttl(),
                        entry_ttl: settings.entry_ttl,
                    };
                    let remembered = shared.inodes.remember_file(&key, facts, Some(object));
                    remembered.map(|_| entry).map_err(|other| shared.fail("lookup", &key, &listing::lie(&other)))
                }
                Ok(Found::Directory(seconds, nanoseconds)) => {
                    shared.inodes.note_gone(&key);
                    shared.note_mtime((seconds, nanoseconds));
                    let ttl = shared.settings.entry_ttl;
                    let ino = shared.inodes.remember_directory(&key);
                    let attr = attr::directory(ino, (seconds, nanoseconds), shared.settings.owner);
                    Ok(Entry { attr, attr_ttl: ttl, entry_ttl: ttl })
                }
                Ok(Found::Absent) => {
                    shared.inodes.note_gone(&key);
                    Err(Errno::NOENT)
                }
                Err(error) => Err(shared.fail("lookup", &key, &error)),
            });
        };
        self.0.backend.lookup(&name, Box::new(found));
    }

    /// FORGET: the kernel forgets so many answers that named the inode.
    pub fn forget(&self, ino: u64, lookups: u64) {
        self.0.inodes.forget(ino, lookups);
    }

    /// GETATTR: attributes and how long they may be trusted.
    pub fn getattr(&self, ino: u64, reply: impl FnOnce(Result<(Attr, Duration), Errno>) + Send + 'static) {
        let shared = self.0.clone();
        match shared.inodes.node(ino) {
            None => reply(Err(Errno::STALE)),
            // An open snapshot is what it was.
            Some(Node::File(file)) if shared.mode() == Mode::Snapshot && shared.opens.is_open(ino) => {
                reply(Ok((attr::file(file.facts, shared.settings.owner), shared.file_ttl())));
            }
            Some(Node::File(file)) => {
                let request = self.begin();
                let (facts, key) = (file.facts, file.key.clone());
                Shared::current(&self.0, &file, move |current| {
                    let _request = request;
                    reply(match current {
                        Ok(_) => Ok((attr::file(facts, shared.settings.owner), shared.file_ttl())),
                        Err(error) => Err(shared.fail("getattr", &key, &error)),
                    });
                });
            }
            Some(Node::Directory(key)) => match key.filter(|_| ino != ROOT) {
                Some(key) => self.directory_attr(ino, key, reply),
                None => self.root_attr(reply),
            },
        }
    }

    fn directory_attr(&self, ino: u64, key: Key, reply: impl FnOnce(Result<(Attr, Duration), Errno>) + Send + 'static) {
        let (request, shared) = (self.begin(), self.0.clone());
        let name = shared.name(&key);
        let found = move |found: Result<Found, Error>| {
            let _request = request;
            reply(match found {
                Ok(Found::Directory(seconds, nanoseconds)) => {
                    let attr = attr::directory(ino, (seconds, nanoseconds), shared.settings.owner);
                    Ok((attr, shared.settings.entry_ttl))
                }
                // Nothing lies below it any more: the kernel walks the path again and finds that.
                Ok(Found::Object(_) | Found::Absent) => Err(Errno::STALE),
                Err(error) => Err(shared.fail("getattr", &key, &error)),
            });
        };
        self.0.backend.lookup(&name, Box::new(found));
    }

    /// The root is always there, also when every server is gone: at worst its time is an old one.
    fn root_attr(&self, reply: impl FnOnce(Result<(Attr, Duration), Errno>) + Send + 'static) {
        let shared = self.0.clone();
        let now = (shared.clock)();
        let ttl = shared.settings.entry_ttl;
        let known = {
            let times = shared.root_times.lock().unwrap_or_else(PoisonError::into_inner);
            times.asked.is_some_and(|asked| now.since(asked) < ttl).then_some(times.mtime)
        };
        let answer = move |mtime, owner| Ok((attr::directory(ROOT, mtime, owner), ttl));
        if let Some(mtime) = known {
            return reply(answer(mtime, shared.settings.owner));
        }
        let request = self.begin();
        let query = shared.query(shared.settings.root.as_ref(), Vec::new(), 1);
        let done = move |listing: Result<railfs_engine::client::Listing, Error>| {
            let _request = request;
            match listing {
                Ok(listing) => shared.note_mtime(listing.mtime),
                Err(Error::NotFound(_)) => {}
                Err(error) => {
                    shared.fail("getattr", &"", &error);
                }
            }
            let mtime = {
                let mut times = shared.root_times.lock().unwrap_or_else(PoisonError::into_inner);
                times.asked = Some((shared.clock)());
                times.mtime
            };
            reply(answer(mtime, shared.settings.owner));
        };
        self.0.backend.list(query, Box::new(done));
    }

    /// OPEN of a file: a handle, after a check that the inode's version is current.
    pub fn open(&self, ino: u64, access: Access, reply: impl FnOnce(Result<u64, Errno>) + Send + 'static) {
        let file = match self.0.inodes.node(ino) {
            None => return reply(Err(Errno::STALE)),
            Some(Node::Directory(_)) => return reply(Err(Errno::ISDIR)),
            Some(Node::File(file)) => file,
        };
        if access == Access::Write {
            return reply(Err(Errno::ROFS));
        }
        let (request, shared) = (self.begin(), self.0.clone());
        let key = file.key.clone();
        Shared::current(&self.0, &file, move |current| {
            let object = match current {
                Ok(object) => object,
                Err(error) => {
                    let _request = request;
                    return reply(Err(shared.fail("open", &key, &error)));
                }
            };
            if shared.mode() == Mode::Strict {
                let _request = request;
                return reply(Ok(shared.opened(object, false)));
            }
            // It was current a moment ago; from the answer on it stays readable.
            let pinned = object.clone();
            let backend = shared.backend.clone();
            let done = move |kept: Result<(), Error>| {
                let _request = request;
                reply(match kept {
                    Ok(()) => Ok(shared.opened(pinned, true)),
                    Err(error) => {
                        shared.backend.unpin(pinned.descriptor.version);
                        Err(shared.fail("open", &key, &error))
                    }
                });
            };
            backend.pin(&object, Box::new(done));
        });
    }

    /// READ: all bytes from `offset`, `size` of them (fewer only at the end of the file).
    pub fn read(
        &self,
        handle: u64,
        offset: u64,
        size: u32,
        purpose: Purpose,
        reply: impl FnOnce(Result<&[u8], Errno>) + Send + 'static,
    ) {
        let Some(file) = self.0.file(handle) else { return reply(Err(Errno::BADF)) };
        let checked =
            self.0.choice.get().map_or(purpose == Purpose::Read, |choice| choice.checks(purpose == Purpose::Fill));
        let freshness = if checked { Freshness::Current } else { Freshness::Version };
        if !checked && !file.pinned && self.0.opens.fills(file.object.descriptor.version) {
            Shared::pin_fills(&self.0, &file.object);
        }
        let left = file.object.descriptor.striping.size().saturating_sub(offset);
        let length = u32::try_from(left).map_or(size, |left| left.min(size));
        let (request, shared) = (self.begin(), self.0.clone());
        let key = file.object.name.key.clone();
        if length == 0 && !checked {
            drop(request);
            return reply(Ok(&[]));
        }
        if length == 0 {
            // Also "no bytes here" is only said of a version that is current.
            let done = move |current: Result<(), Error>| {
                let _request = request;
                reply(match current {
                    Ok(()) => Ok(&[]),
                    Err(error) => Err(shared.fail("read", &key, &error)),
                });
            };
            return self.0.backend.check(&file.object, Box::new(done));
        }
        let done = move |bytes: Result<&[u8], Error>| {
            let _request = request;
            reply(match bytes {
                // A short answer would make the kernel cut the file.
                Ok(bytes) if bytes.len() == length as usize => Ok(bytes),
                Ok(bytes) => {
                    let detail = format!("{} bytes at {offset} where {length} were asked for", bytes.len());
                    let error = Error::BadAnswer { peer: "the read path".to_owned(), detail };
                    Err(shared.fail("read", &key, &error))
                }
                Err(error) => Err(shared.fail("read", &key, &error)),
            });
        };
        self.0.backend.read(&file.object, handle, offset, length, freshness, Box::new(done));
    }

    /// RELEASE of a file handle.
    pub fn release(&self, handle: u64) {
        let removed = self.0.files.write().unwrap_or_else(PoisonError::into_inner).remove(&handle);
        let Some(file) = removed else { return };
        self.0.backend.release(handle);
        let version = file.object.descriptor.version;
        let filled = self.0.opens.closed(version);
        for _ in 0..u32::from(filled) + u32::from(file.pinned) {
            self.0.backend.unpin(version);
        }
    }

    /// LSEEK: there are no holes.
    pub fn seek(&self, handle: u64, offset: i64, seek: Seek) -> Result<i64, Errno> {
        let file = self.0.file(handle).ok_or(Errno::BADF)?;
        let size = i64::try_from(file.object.descriptor.striping.size()).map_err(|_| Errno::OVERFLOW)?;
        match seek {
            _ if offset < 0 || offset >= size => Err(Errno::NXIO),
            Seek::Data => Ok(offset),
            Seek::Hole => Ok(size),
        }
    }

    /// ACCESS, asked only where the kernel does not check permissions itself: whoever may reach the mount may read it.
    pub fn access(&self, ino: u64, rights: Rights) -> Result<(), Errno> {
        let node = self.0.inodes.node(ino).ok_or(Errno::STALE)?;
        match node {
            _ if rights.write => Err(Errno::ROFS),
            Node::File(file) if rights.execute && attr::file(file.facts, self.0.settings.owner).perm & 0o111 == 0 => {
                Err(Errno::ACCESS)
            }
            Node::File(_) | Node::Directory(_) => Ok(()),
        }
    }

    /// The backend, for its account.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.0.backend
    }
}

impl Shared {
    fn mode(&self) -> Mode {
        self.choice.get().map_or(Mode::Strict, |choice| choice.mode)
    }

    /// How long the kernel may trust a file's attributes.
    fn file_ttl(&self) -> Duration {
        let wanted = self.settings.metadata_ttl;
        self.choice.get().map_or(wanted, |choice| choice.attributes_ttl(wanted))
    }

    fn opened(&self, object: Arc<Object>, pinned: bool) -> u64 {
        self.opens.opened(object.descriptor.version);
        let handle = self.new_handle();
        let mut files = self.files.write().unwrap_or_else(PoisonError::into_inner);
        files.insert(handle, Arc::new(FileHandle { object, pinned }));
        handle
    }

    /// The page cache holds pages of this version from here on: the rest of them must stay readable, although nobody waits
    /// for that. Where the server does not keep it, fills fail once it is reclaimed.
    fn pin_fills(shared: &Arc<Shared>, object: &Arc<Object>) {
        let (shared_in, key) = (shared.clone(), object.name.key.clone());
        let done = move |kept: Result<(), Error>| {
            if let Err(error) = kept {
                shared_in.fail("pin", &key, &error);
            }
        };
        shared.backend.pin(object, Box::new(done));
    }

    fn new_handle(&self) -> u64 {
        self.next_handle.fetch_add(1, Ordering::Relaxed)
    }

    fn file(&self, handle: u64) -> Option<Arc<FileHandle>> {
        self.files.read().unwrap_or_else(PoisonError::into_inner).get(&handle).cloned()
    }

    fn name(&self, key: &Key) -> ObjectName {
        ObjectName { namespace: self.settings.namespace.clone(), key: key.clone() }
    }

    fn child(&self, parent: u64, name: &[u8]) -> Result<Key, Errno> {
        match self.inodes.node(parent) {
            None => Err(Errno::STALE),
            Some(Node::File(_)) => Err(Errno::NOTDIR),
            Some(Node::Directory(Some(key))) => key.join(name).map_err(|error| name_errno(&error)),
            Some(Node::Directory(None)) => Key::from_part(name).map_err(|error| name_errno(&error)),
        }
    }

    fn query(&self, directory: Option<&Key>, after: Vec<u8>, limit: u32) -> ListQuery {
        let prefix = directory.map(Key::below).unwrap_or_default();
        let namespace = self.settings.namespace.as_str().to_owned();
        ListQuery { namespace, prefix, delimited: true, after, limit, within: None }
    }

    fn note_mtime(&self, mtime: (i64, u32)) {
        let mut times = self.root_times.lock().unwrap_or_else(PoisonError::into_inner);
        times.mtime = mtime;
        times.asked = Some((self.clock)());
    }

    /// The file's object, seen current by a check that begins now.
    fn current(
        shared: &Arc<Shared>,
        file: &Arc<FileNode>,
        done: impl FnOnce(Result<Arc<Object>, Error>) + Send + 'static,
    ) {
        if let Some(object) = file.object() {
            let checked = object.clone();
            return shared.backend.check(&checked, Box::new(move |result| done(result.map(|()| object))));
        }
        // Known from a list only, which carries no proof: looking the name up is the check.
        let (file, name, shared_in) = (file.clone(), shared.name(&file.key), shared.clone());
        let found = move |found: Result<Found, Error>| {
            done(match found {
                Ok(Found::Object(object)) if object.descriptor.version == file.facts.version => {
                    file.set_object(object.clone());
                    Ok(object)
                }
                Ok(found) => {
                    if !matches!(found, Found::Object(_)) {
                        shared_in.inodes.note_gone(&file.key);
                    }
                    Err(Error::Stale { object: file.key.to_string(), version: file.facts.version })
                }
                Err(error) => Err(error),
            });
        };
        shared.backend.lookup(&name, Box::new(found));
    }

    /// One line of log, and the errno.
    fn fail(&self, operation: &str, what: &dyn Display, error: &Error) -> Errno {
        // Nobody answers in time where another store has taken the address: that is the cause, and not one that passes.
        let known = match error {
            Error::TimedOut { .. } | Error::Unreachable { .. } => self.backend.wrong_store(),
            _ => None,
        };
        let error = known.as_ref().unwrap_or(error);
        let code = errno(error);
        let namespace = &self.settings.namespace;
        if is_everyday(code) {
            tracing::debug!("{operation} {namespace}/{what}: {error} ({code})");
        } else {
            tracing::warn!("{operation} {namespace}/{what}: {error} ({code})");
        }
        code
    }
}
