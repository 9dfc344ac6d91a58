//! OPENDIR, READDIR and READDIRPLUS: pages turned into the kernel's entries.
//!
//! Guarantees: an entry's number is the one `stat` shows. What READDIRPLUS lets the kernel cache is never trusted for
//! longer than the TTLs, counted from when the list was asked for; an entry older than what was already seen of its name
//! is given no trust at all, so that a late list never makes `stat` go back. An inode is counted only for an entry that
//! found room. A READDIR ends within one limit, however many pages lie before its offset.

use super::dirs::{Fetch, Item, PAGE, Page, Paging, Step};
use super::inodes::{Known, Node, ROOT};
use super::{Attr, Errno, FileSystem, Kind, Shared, attr};
use railfs_engine::client::Listing;
use railfs_engine::clock::Time;
use railfs_engine::error::Error;
use railfs_proto::name::Key;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// One entry on its way to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Emitted<'a> {
    /// Inode number.
    pub ino: u64,
    /// The offset to go on from after this entry.
    pub next: u64,
    /// File or directory.
    pub kind: Kind,
    /// Its name.
    pub name: &'a [u8],
    /// For READDIRPLUS: attributes, and how long they and the name may be trusted.
    pub plus: Option<(Attr, Duration)>,
}

/// Where entries go: a reply with limited room.
pub trait DirSink: Send + 'static {
    /// Whether attributes are wanted.
    fn plus(&self) -> bool;
    /// True: there was no room, the entry was not taken.
    fn is_full_for(&mut self, entry: &Emitted<'_>) -> bool;
}

/// An open directory.
pub(super) struct Handle {
    /// `None`: the root of a whole namespace.
    key: Option<Key>,
    ino: u64,
    parent: u64,
    paging: Mutex<Paging>,
}

impl Handle {
    fn paging(&self) -> std::sync::MutexGuard<'_, Paging> {
        self.paging.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FileSystem {
    /// OPENDIR: a handle, with the directory's first page listed.
    pub fn opendir(&self, ino: u64, reply: impl FnOnce(Result<u64, Errno>) + Send + 'static) {
        let key = match self.0.inodes.node(ino) {
            None => return reply(Err(Errno::STALE)),
            Some(Node::File(_)) => return reply(Err(Errno::NOTDIR)),
            Some(Node::Directory(key)) => key,
        };
        let parent = match &key {
            Some(key) if ino != ROOT => self.0.inodes.directory_number(key.parent().as_ref()),
            _ => ROOT,
        };
        let prefix = key.as_ref().map(Key::below).unwrap_or_default();
        let handle = Arc::new(Handle { key, ino, parent, paging: Mutex::new(Paging::new(prefix)) });
        let (request, shared) = (self.begin(), self.0.clone());
        let opened = handle.clone();
        let begun = (self.0.clock)();
        Shared::fetch(&self.0, &handle, Fetch::start(), "opendir", begun, move |page| {
            let _request = request;
            reply(page.and_then(|page| {
                if page.is_whole_and_empty() && opened.ino != ROOT {
                    return Err(Errno::STALE); // The kernel walks the path again and finds that it is gone.
                }
                let number = shared.new_handle();
                shared.directories.lock().unwrap_or_else(PoisonError::into_inner).insert(number, opened);
                Ok(number)
            }));
        });
    }

    /// READDIR and READDIRPLUS from an offset: fills the sink; an empty one means the end.
    pub fn readdir<S: DirSink>(
        &self,
        handle: u64,
        offset: u64,
        sink: S,
        reply: impl FnOnce(S, Result<(), Errno>) + Send + 'static,
    ) {
        let found = self.0.directories.lock().unwrap_or_else(PoisonError::into_inner).get(&handle).cloned();
        let Some(directory) = found else { return reply(sink, Err(Errno::BADF)) };
        let request = self.begin();
        let begun = (self.0.clock)();
        Shared::serve(&self.0, &directory, offset, sink, begun, move |sink, result| {
            let _request = request;
            reply(sink, result);
        });
    }

    /// RELEASEDIR.
    pub fn releasedir(&self, handle: u64) {
        self.0.directories.lock().unwrap_or_else(PoisonError::into_inner).remove(&handle);
    }
}

impl Shared {
    fn serve<S: DirSink>(
        shared: &Arc<Shared>,
        directory: &Arc<Handle>,
        offset: u64,
        mut sink: S,
        begun: Time,
        reply: impl FnOnce(S, Result<(), Errno>) + Send + 'static,
    ) {
        let step = directory.paging().step(offset);
        match step {
            Step::Serve(page) => {
                let filled = shared.fill(directory, &page, offset, &mut sink);
                let filled = filled.map_err(|(key, other)| shared.fail("readdir", &key, &lie(&other)));
                reply(sink, filled);
            }
            Step::Fetch(fetch) => {
                let (again, directory_again) = (shared.clone(), directory.clone());
                Shared::fetch(shared, directory, fetch, "readdir", begun, move |page| match page {
                    Ok(_) => Shared::serve(&again, &directory_again, offset, sink, begun, reply),
                    Err(code) => reply(sink, Err(code)),
                });
            }
        }
    }

    fn fetch(
        shared: &Arc<Shared>,
        directory: &Arc<Handle>,
        fetch: Fetch,
        operation: &'static str,
        started: Time,
        done: impl FnOnce(Result<Arc<Page>, Errno>) + Send + 'static,
    ) {
        let begun = (shared.clock)();
        let limit = shared.settings.list_limit;
        let left = limit.saturating_sub(begun.since(started));
        if left.is_zero() {
            // Pages that lead on and on, of whoever sends them.
            let what = format!("list of {}", directory.key.as_ref().map(ToString::to_string).unwrap_or_default());
            let detail = ": its pages do not come to an end in time".to_owned();
            let error = Error::TimedOut { what, after: limit, detail };
            return done(Err(shared.fail(operation, &"", &error)));
        }
        let mut query = shared.query(directory.key.as_ref(), fetch.after.clone(), PAGE);
        query.within = Some(left);
        let (shared_in, directory) = (shared.clone(), directory.clone());
        let listed = move |listing: Result<Listing, Error>| {
            let listing = match listing {
                // A namespace that nobody wrote to yet is an empty directory.
                Err(Error::NotFound(_)) => Ok(Listing { entries: Vec::new(), next: None, mtime: (0, 0) }),
                Ok(listing) => {
                    shared_in.note_mtime(listing.mtime);
                    Ok(listing)
                }
                Err(error) => Err(error),
            };
            let page = listing.and_then(|listing| directory.paging().fetched(&fetch, &listing, begun));
            done(page.map_err(|error| match &directory.key {
                Some(key) => shared_in.fail(operation, key, &error),
                None => shared_in.fail(operation, &"", &error),
            }));
        };
        shared.backend.list(query, Box::new(listed));
    }

    /// An error only while the kernel was given no inode: those that it was given it must be told of.
    fn fill<S: DirSink>(
        &self,
        directory: &Handle,
        page: &Page,
        mut offset: u64,
        sink: &mut S,
    ) -> Result<(), (Key, Known)> {
        let mut given = false;
        let plus = sink.plus();
        let owner = self.settings.owner;
        for (at, name, ino) in [(0, &b"."[..], directory.ino), (1, b"..", directory.parent)] {
            if offset == at {
                // The kernel takes no inode from these two.
                let plus = plus.then(|| (attr::directory(ino, (0, 0), owner), Duration::ZERO));
                if sink.is_full_for(&Emitted { ino, next: at + 1, kind: Kind::Directory, name, plus }) {
                    return Ok(());
                }
                offset += 1;
            }
        }
        let age = (self.clock)().since(page.begun);
        let ttl = self.settings.entry_ttl.min(self.file_ttl()).saturating_sub(age);
        while let Some(item) = page.at(offset) {
            offset += 1;
            let full = if plus {
                match self.emit_plus(item, offset, ttl, sink) {
                    Ok(full) => full,
                    // The next READDIR begins with this one.
                    Err(_) if given => return Ok(()),
                    Err(other) => return Err((item.key.clone(), other)),
                }
            } else {
                let ino = match &item.facts {
                    Some(facts) => facts.version,
                    None => self.inodes.directory_number(Some(&item.key)),
                };
                sink.is_full_for(&Emitted {
                    ino,
                    next: offset,
                    kind: kind(item),
                    name: item.key.last_part(),
                    plus: None,
                })
            };
            if full {
                return Ok(());
            }
            given = true;
        }
        Ok(())
    }

    fn emit_plus<S: DirSink>(&self, item: &Item, next: u64, ttl: Duration, sink: &mut S) -> Result<bool, Known> {
        let owner = self.settings.owner;
        let (attr, ttl) = match item.facts {
            Some(facts) => {
                let newest = self.inodes.remember_file(&item.key, facts, None)?;
                (attr::file(facts, owner), if newest { ttl } else { Duration::ZERO })
            }
            None => {
                let mtime = self.root_times.lock().unwrap_or_else(PoisonError::into_inner).mtime;
                (attr::directory(self.inodes.remember_directory(&item.key), mtime, owner), ttl)
            }
        };
        let name = item.key.last_part();
        let full = sink.is_full_for(&Emitted { ino: attr.ino, next, kind: kind(item), name, plus: Some((attr, ttl)) });
        if full {
            self.inodes.forget(attr.ino, 1);
        }
        Ok(full)
    }
}

/// A version that is known otherwise.
pub(super) fn lie(known: &Known) -> Error {
    Error::BadAnswer { peer: "the server".to_owned(), detail: known.to_string() }
}

fn kind(item: &Item) -> Kind {
    if item.facts.is_some() { Kind::File } else { Kind::Directory }
}
