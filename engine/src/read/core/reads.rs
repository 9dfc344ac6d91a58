//! Reads: from arrival through admission to their answer.

use super::{Action, Complete, Core, Freshness, MAX_BAD, Waiter};
use crate::client::Object;
use crate::clock::Time;
use crate::error::Error;
use crate::read::landed::Landed;
use crate::read::plan;
use crate::read::readahead::Readahead;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

/// Reads that may wait in line for memory; one more is refused.
const MAX_QUEUE: usize = 16 << 10;

#[derive(Debug)]
pub(super) struct Read {
    pub(super) object: Arc<Object>,
    pub(super) handle: u64,
    pub(super) bytes: Range<u64>,
    pub(super) arrived: Time,
    pub(super) deadline: Time,
    /// Pages it has, each extent pinned.
    pub(super) parts: Vec<Arc<Landed>>,
    /// Fetches it waits for.
    pub(super) pending: HashSet<u64>,
    /// Seen current by a check that began after it arrived, or it asks for none.
    pub(super) checked: bool,
    /// See there.
    pub(super) freshness: Freshness,
    /// The answer is being made.
    pub(super) finishing: bool,
    /// Bad pages so far: page, and the rail that brought it.
    pub(super) bad: Vec<(u64, usize)>,
}

impl Core {
    /// A read arrived. Gives its pages where it waits for nothing but a check (so that they can be verified meanwhile).
    #[allow(clippy::too_many_arguments)]
    pub fn read(
        &mut self,
        now: Time,
        id: u64,
        object: &Arc<Object>,
        handle: u64,
        offset: u64,
        length: u32,
        freshness: Freshness,
        deadline: Time,
    ) -> Option<Complete> {
        self.counts.reads += 1;
        self.counts.reads_unchecked += u64::from(freshness == Freshness::Version);
        if object.is_stale() && freshness == Freshness::Current || object.is_gone() {
            self.fail_stale(id, object);
            return None;
        }
        let striping = &object.descriptor.striping;
        let bytes = plan::clamp(striping, offset, length);
        let read = Read {
            object: object.clone(),
            handle,
            bytes,
            arrived: now,
            deadline,
            parts: Vec::new(),
            pending: HashSet::new(),
            checked: freshness == Freshness::Version,
            freshness,
            finishing: false,
            bad: Vec::new(),
        };
        let (ahead, unread) = {
            let entry = self.handles.entry(handle).or_insert_with(|| (object.clone(), Readahead::default()));
            if !Arc::ptr_eq(&entry.0, object) {
                *entry = (object.clone(), Readahead::default());
            }
            let unread = entry.1.unread();
            let ahead = entry.1.observe(offset, length, striping.size(), self.readahead_limit);
            (ahead, if entry.1.sequential() { 0..0 } else { unread })
        };
        self.demote(object, unread);
        self.reads.insert(id, read);
        // Those who wait already go first.
        if !self.queue.is_empty() || !self.admit(now, id) {
            self.enqueue(id);
            return None;
        }
        if let Some(ahead) = ahead {
            self.fetch_ahead(now, object, handle, ahead);
        }
        let read = self.reads.get(&id)?;
        (read.pending.is_empty() && !read.finishing).then(|| Complete { parts: read.parts.clone() })
    }

    fn enqueue(&mut self, id: u64) {
        self.counts.reads_waited += 1;
        if self.queue.len() < MAX_QUEUE {
            self.queue.push_back(id);
            return;
        }
        let error = Error::OverBudget {
            what: self.reads.remove(&id).map_or_else(String::new, |read| read.object.name.to_string()),
            need: 0,
            limit: MAX_QUEUE as u64,
            cure: format!("{MAX_QUEUE} reads wait for memory already; give the mount a larger arena"),
        };
        self.counts.reads_failed += 1;
        self.actions.push(Action::Fail { id, error });
    }

    /// Plans a read, takes all the memory it needs in one step, and sends its fetches and its check. False: there is no
    /// room now; it holds nothing.
    fn admit(&mut self, now: Time, id: u64) -> bool {
        if self.try_admit(now, id) {
            return true;
        }
        // What it found in the cache may stand in the way of what it lacks. When nothing is in flight, nothing else will
        // make room: let the cache go and fetch it all.
        if !self.flights.is_empty() {
            return false;
        }
        while self.cache.evict() {}
        self.try_admit(now, id)
    }

    fn try_admit(&mut self, now: Time, id: u64) -> bool {
        let Some(read) = self.reads.get(&id) else { return true };
        let (object, bytes, checked) = (read.object.clone(), read.bytes.clone(), read.checked);
        let first = read.bad.is_empty() && (!checked || read.freshness == Freshness::Version);
        let (version, striping) = (object.descriptor.version, object.descriptor.striping);
        let sequential = self.handles.get(&read.handle).is_some_and(|(_, readahead)| readahead.sequential());
        let avoid: Vec<usize> = read.bad.iter().map(|&(_, rail)| rail).collect();
        let mut parts: Vec<Arc<Landed>> = Vec::new();
        let mut joined: Vec<u64> = Vec::new();
        let mut fresh: Vec<(u64, Range<u64>)> = Vec::new();
        for wanted in plan::cells(&striping, bytes) {
            let overlaps = |pages: &Range<u64>| pages.start < wanted.end && wanted.first < pages.end;
            let cached = self.cache.get(version, wanted.cell);
            parts.extend(cached.iter().filter(|run| overlaps(&run.pages())).cloned());
            let flying = self.by_cell.get(&(version, wanted.cell)).map_or(&[][..], Vec::as_slice);
            let flying: Vec<(u64, Range<u64>)> =
                flying.iter().filter_map(|&f| self.fetches.get(&f).map(|fetch| (f, fetch.pages.clone()))).collect();
            joined.extend(flying.iter().filter(|(_, pages)| overlaps(pages)).map(|&(f, _)| f));
            let cache = &self.cache;
            let present = |page: u64| {
                cache.has(version, wanted.cell, page) || flying.iter().any(|(_, pages)| pages.contains(&page))
            };
            let needed = plan::missing(wanted.first, wanted.end, present);
            let runs = if sequential && !needed.is_empty() {
                let whole = plan::whole_cell(&striping, wanted.cell);
                let runs = plan::missing(whole.first, whole.end, present);
                runs.into_iter().filter(|run| overlaps(run)).collect()
            } else {
                needed
            };
            fresh.extend(runs.into_iter().map(|run| (wanted.cell, run)));
        }
        let Some(memory) = self.reserve(&striping, &fresh) else { return false };
        let warm = fresh.is_empty() && joined.is_empty();
        let mut pending: HashSet<u64> = joined.iter().copied().collect();
        for fetch in &joined {
            self.join_fetch(*fetch, id);
        }
        let deadline = self.reads.get(&id).map_or(now, |read| read.deadline);
        let any_fresh = !fresh.is_empty();
        for ((cell, run), extent) in fresh.into_iter().zip(memory) {
            self.counts.fetches += 1;
            pending.insert(self.new_fetch(&object, cell, run, deadline, Some(id), avoid.clone(), extent));
        }
        if let Some(read) = self.reads.get_mut(&id) {
            read.parts = parts;
            read.pending = pending.clone();
        }
        for fetch in pending {
            self.post_fetch(now, fetch);
        }
        if warm && first {
            self.counts.reads_warm += 1;
        }
        // A read that sent a fetch of its own gets its check with that fetch's reply.
        if !any_fresh && !checked {
            self.want_check(now, Waiter::Read(id), &object);
        }
        self.progress(id);
        true
    }

    /// Reads in line for memory get their turn, in order.
    pub(super) fn admit_waiting(&mut self, now: Time) {
        while let Some(&id) = self.queue.front() {
            if self.reads.contains_key(&id) && !self.admit(now, id) {
                return;
            }
            self.queue.pop_front();
        }
    }

    /// Finishes a read that has its pages and its check.
    pub(super) fn progress(&mut self, id: u64) {
        let Some(read) = self.reads.get_mut(&id) else { return };
        if !read.pending.is_empty() || !read.checked || read.finishing {
            return;
        }
        read.finishing = true;
        let mut parts = read.parts.clone();
        parts.sort_by_key(|part| part.pages().start);
        self.actions.push(Action::Finish { id, parts });
    }

    /// A read was answered with `bytes` bytes, or one of its pages turned out bad: then it is fetched again by another
    /// rail, or answered with an error.
    pub fn finished(&mut self, now: Time, id: u64, result: Result<u64, (Arc<Landed>, u64)>) {
        match result {
            Ok(bytes) => {
                self.counts.reads_ok += 1;
                self.counts.bytes_read += bytes;
                let Some(read) = self.reads.remove(&id) else { return };
                for (page, rail) in read.bad {
                    // Another rail brought the same page right: the first one lies. (The same rail: the disk or luck.)
                    if read.parts.iter().any(|part| part.pages().contains(&page) && part.origin().rail != rail) {
                        self.rails.wrong(now, rail);
                    }
                }
            }
            Err((bad, page)) => {
                self.counts.bad_pages += 1;
                self.bad_page(now, id, &bad, page);
            }
        }
        self.admit_waiting(now);
    }

    fn bad_page(&mut self, now: Time, id: u64, bad: &Arc<Landed>, page: u64) {
        let Some(read) = self.reads.get_mut(&id) else { return };
        let object = read.object.clone();
        let cell = page / plan::pages_per_cell(&object.descriptor.striping);
        self.cache.remove(object.descriptor.version, cell, bad);
        read.parts.clear();
        read.finishing = false;
        read.bad.push((page, bad.origin().rail));
        let again = read.bad.iter().filter(|entry| entry.0 == page).count() as u32 <= MAX_BAD;
        if !again || read.deadline <= now {
            let error =
                damaged(&object, page, self.rails.name(bad.origin().rail), "its bytes do not match their checksum");
            self.fail_read(id, error);
        } else if !self.queue.is_empty() || !self.admit(now, id) {
            self.enqueue(id);
        }
    }

    /// Answers a read with an error.
    pub(super) fn fail_read(&mut self, id: u64, error: Error) {
        if self.reads.remove(&id).is_some() {
            self.counts.reads_failed += 1;
            if matches!(error, Error::Stale { .. }) {
                self.counts.reads_stale += 1;
            }
            self.actions.push(Action::Fail { id, error });
        }
    }

    fn fail_stale(&mut self, id: u64, object: &Object) {
        self.counts.reads_failed += 1;
        self.counts.reads_stale += 1;
        self.actions.push(Action::Fail { id, error: object.stale_error() });
    }

    pub(super) fn read_timed_out(&mut self, now: Time, id: u64) {
        let Some(read) = self.reads.get(&id) else { return };
        let detail = if !self.rails.any(now) {
            format!(": {}", self.rails_down())
        } else if self.queue.contains(&id) {
            ": the arena had no room for it".to_owned()
        } else if read.pending.is_empty() {
            ": its version could not be checked".to_owned()
        } else {
            format!(": {} fetches were not answered", read.pending.len())
        };
        let what = format!(
            "{}: read of {} bytes at {}",
            read.object.name,
            read.bytes.end - read.bytes.start,
            read.bytes.start
        );
        let error = Error::TimedOut { what, after: read.deadline.since(read.arrived), detail };
        self.fail_read(id, error);
    }

    /// What is known of why no rail is up.
    pub fn rails_down(&self) -> String {
        let reasons: Vec<String> = (0..self.rails.len())
            .filter_map(|rail| self.rails.view(rail).filter(|view| !view.removed))
            .map(|view| format!("rail {}: {}", view.name, view.reason.dead.as_deref().unwrap_or("connecting")))
            .collect();
        format!("no rail is up ({})", reasons.join("; "))
    }

    /// The reader closed its handle: what was fetched ahead for it goes first when memory is wanted.
    pub fn release(&mut self, handle: u64) {
        if let Some((object, readahead)) = self.handles.remove(&handle) {
            self.demote(&object, readahead.unread());
        }
    }

    fn demote(&mut self, object: &Object, bytes: Range<u64>) {
        for cell in plan::cells(&object.descriptor.striping, bytes) {
            self.cache.demote(object.descriptor.version, cell.cell);
        }
    }
}

pub(super) fn damaged(object: &Object, page: u64, rail: &str, detail: &str) -> Error {
    let striping = &object.descriptor.striping;
    let (component, _) = striping.page_place(page);
    let replica = object.descriptor.components.get(component as usize).and_then(|replicas| replicas.first());
    Error::Damaged {
        object: object.name.to_string(),
        version: object.descriptor.version,
        stripe: page * u64::from(striping.page_size()) / u64::from(striping.stripe_size()),
        component,
        directory: replica.map_or(railfs_proto::descriptor::Id([0; 16]), |replica| replica.directory),
        rail: rail.to_owned(),
        detail: format!("page {page}: {detail}"),
    }
}
