//! Readahead: what is wanted ahead of readers is fetched when nobody waits for memory or for a rail, readers in turn.
//!
//! Guarantees: what is wanted and not sent holds nothing; a fetch that nobody wants any more is cancelled as soon as a read
//! waits for memory, and what it brings is the first to go; bytes that failed ahead are not fetched ahead again.

use super::fetch::New;
use super::{Action, Core, Flight, Freshness};
use crate::client::Object;
use crate::clock::Time;
use crate::error::Error;
use crate::read::admission::Use;
use crate::read::plan;
use crate::read::readahead::{Grid, Readahead, Want};
use lru::LruCache;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// How long pages that were found damaged are not fetched again: the kernel asks again at once, page by page.
const SORE: Duration = Duration::from_millis(300);
/// Pages that are remembered as damaged.
const SORES: NonZeroUsize = NonZeroUsize::new(256).unwrap();

/// One open handle.
#[derive(Debug)]
pub(super) struct Reader {
    pub(super) object: Arc<Object>,
    readahead: Readahead,
    /// Its reads are of their version, current or not.
    unchecked: bool,
    /// It is in the ring.
    ringed: bool,
}

/// Pages that were found damaged a moment ago, with what was said of them.
#[derive(Debug)]
pub(super) struct Sore(LruCache<(u64, u64), (Time, Error)>);

impl Default for Sore {
    fn default() -> Self {
        Sore(LruCache::new(SORES))
    }
}

impl Sore {
    pub(super) fn add(&mut self, now: Time, version: u64, page: u64, error: &Error) {
        self.0.put((version, page), (now.after(SORE), error.clone()));
    }

    /// The error of a page of these that is sore now.
    pub(super) fn find(&self, now: Time, version: u64, mut pages: Range<u64>) -> Option<Error> {
        if self.0.is_empty() {
            return None;
        }
        let sore = |page| self.0.peek(&(version, page)).filter(|(until, _)| *until > now);
        pages.find_map(sore).map(|(_, error)| error.clone())
    }
}

fn grid(object: &Object) -> Grid {
    let striping = &object.descriptor.striping;
    let (page, cell) = (u64::from(striping.page_size()), u64::from(striping.extent_size()));
    Grid { size: striping.size(), page, cell }
}

/// Whether something was sent, or why not.
enum Sent {
    Yes,
    NoRoom,
}

impl Core {
    /// A read of this handle arrived. Whether whole cells are worth fetching for it.
    pub(super) fn observe(
        &mut self,
        object: &Arc<Object>,
        handle: u64,
        offset: u64,
        length: u32,
        freshness: Freshness,
    ) -> bool {
        let unchecked = freshness == Freshness::Version;
        let new = || Reader { object: object.clone(), readahead: Readahead::default(), unchecked, ringed: false };
        let reader = self.readers.entry(handle).or_insert_with(new);
        let mut left = Vec::new();
        if !Arc::ptr_eq(&reader.object, object) {
            let before = std::mem::replace(reader, Reader { ringed: reader.ringed, ..new() });
            left.push((before.object, before.readahead.close()));
        }
        reader.unchecked = unchecked;
        let grid = grid(object);
        let whole = reader.readahead.observe(offset, length, &grid, self.readahead_limit);
        left.push((object.clone(), reader.readahead.take_dropped()));
        if !reader.ringed && reader.readahead.next(&grid).is_some() {
            reader.ringed = true;
            self.ring.push_back(handle);
        }
        for (object, ranges) in left {
            self.unwanted(&object, ranges);
        }
        whole
    }

    /// The reader closed its handle: what was fetched ahead for it goes first when memory is wanted.
    pub fn release(&mut self, handle: u64) {
        if let Some(reader) = self.readers.remove(&handle) {
            self.unwanted(&reader.object, reader.readahead.close());
        }
    }

    /// These bytes were fetched ahead and are no longer wanted.
    fn unwanted(&mut self, object: &Object, ranges: Vec<Range<u64>>) {
        let version = object.descriptor.version;
        for bytes in ranges {
            for cell in plan::cells(&object.descriptor.striping, bytes) {
                let pages = cell.first..cell.end;
                self.cache.demote(version, cell.cell, &pages);
                for id in self.by_cell.get(&(version, cell.cell)).into_iter().flatten() {
                    if let Some(fetch) = self.fetches.get_mut(id).filter(|fetch| fetch.waiters.is_empty()) {
                        fetch.wanted = false;
                    }
                }
            }
        }
    }

    /// A read waits for memory: fetches that nobody wants any more give theirs.
    pub(super) fn cancel_unwanted(&mut self, now: Time) {
        if self.ledger.ahead() == 0 {
            return;
        }
        let unwanted: Vec<(u64, Option<u64>)> =
            self.fetches.iter().filter(|(_, fetch)| !fetch.wanted).map(|(&id, fetch)| (id, fetch.attempt)).collect();
        for (id, attempt) in unwanted {
            if let Some((attempt, entry)) = attempt.and_then(|a| Some((a, self.flights.get_mut(&a)?))) {
                let (rail, memory, posted) = (entry.rail, entry.memory, entry.posted);
                entry.flight = Flight::Gone;
                self.actions.push(Action::Cancel { rail, id: attempt });
                self.rails.ended(now, rail, u64::from(memory), posted, false);
            }
            self.end_fetch(now, id);
        }
    }

    /// Bytes that were fetched ahead failed.
    pub(super) fn failed_ahead(&mut self, handle: u64, object: &Object, pages: &Range<u64>) {
        let at = pages.start * u64::from(object.descriptor.striping.page_size());
        if let Some(reader) = self.readers.get_mut(&handle)
            && reader.object.descriptor.version == object.descriptor.version
        {
            reader.readahead.failed(at);
        }
    }

    /// Fetches what is wanted ahead, readers in turn, as far as there is room that nobody waits for.
    pub(super) fn pump_ahead(&mut self, now: Time) {
        while self.line.is_empty()
            && self.sends.is_empty()
            && let Some(&handle) = self.ring.front()
        {
            let Some(reader) = self.readers.get_mut(&handle) else {
                self.ring.pop_front();
                continue;
            };
            let object = reader.object.clone();
            let over = object.is_gone() || object.is_stale() && !reader.unchecked;
            let want = reader.readahead.next(&grid(&object)).filter(|_| !over);
            let Some(want) = want else {
                reader.ringed = false;
                self.ring.pop_front();
                continue;
            };
            match self.fetch_ahead(now, handle, &object, &want) {
                Sent::NoRoom => return,
                Sent::Yes => {
                    if let Some(reader) = self.readers.get_mut(&handle) {
                        reader.readahead.took(&want);
                    }
                    self.ring.rotate_left(1);
                }
            }
        }
    }

    fn fetch_ahead(&mut self, now: Time, handle: u64, object: &Arc<Object>, want: &Want) -> Sent {
        let (striping, version) = (object.descriptor.striping, object.descriptor.version);
        let deadline = now.after(railfs_proto::limits::READ_DEADLINE);
        for cell in plan::cells(&striping, want.bytes.clone()) {
            let runs = self.missing(object, cell.cell, cell.first..cell.end);
            for run in plan::limited(&striping, runs, self.session.max_fetch) {
                let size = plan::geometry(&striping, &run).extent;
                let room = |rail| self.rails.room(rail, u64::from(size), true);
                if !self.rails.choose(now, u64::from(size), &[]).is_some_and(room) {
                    return Sent::NoRoom;
                }
                let memory = self.reserve(&striping, std::slice::from_ref(&run), Use::Ahead, false);
                let Some(extent) = memory.and_then(|mut memory| memory.pop()) else { return Sent::NoRoom };
                self.counts.fetches_ahead += 1;
                let new = New {
                    cell: cell.cell,
                    pages: run,
                    deadline,
                    handle,
                    waiter: None,
                    avoid: Vec::new(),
                    extent,
                    held: Use::Ahead,
                };
                let fetch = self.new_fetch(version, object, new);
                self.post_fetch(now, fetch);
            }
        }
        Sent::Yes
    }

    /// The runs of these pages of a cell that are neither in the cache nor on their way.
    pub(super) fn missing(&self, object: &Object, cell: u64, pages: Range<u64>) -> Vec<Range<u64>> {
        let version = object.descriptor.version;
        let flying: Vec<Range<u64>> = self.flying(version, cell).map(|(_, pages)| pages).collect();
        let present =
            |page: u64| self.cache.has(version, cell, page) || flying.iter().any(|pages| pages.contains(&page));
        plan::missing(pages.start, pages.end, present)
    }

    /// The fetches of a cell that are under way, with their pages.
    pub(super) fn flying(&self, version: u64, cell: u64) -> impl Iterator<Item = (u64, Range<u64>)> + '_ {
        let ids = self.by_cell.get(&(version, cell)).map_or(&[][..], Vec::as_slice);
        ids.iter().filter_map(|&id| self.fetches.get(&id).map(|fetch| (id, fetch.pages.clone())))
    }
}
