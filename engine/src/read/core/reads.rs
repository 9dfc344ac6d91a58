//! Reads: from arrival through admission to their answer.

use super::fetch::New;
use super::{Action, Complete, Core, Freshness, MAX_BAD, Waiter};
use crate::client::Object;
use crate::clock::Time;
use crate::error::Error;
use crate::outage::READ_PROBE;
use crate::rail::State;
use crate::read::admission::{Class, MAX_WAITING, Use};
use crate::read::landed::Landed;
use crate::read::plan;
use crate::read::rails::RailView;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// How a read may take memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Nobody is before it.
    First,
    /// A large one is before it, for which there is no room now.
    Overtaking,
    /// Others are before it: it goes on only if it needs none.
    Empty,
}

#[derive(Debug)]
pub(super) struct Read {
    pub(super) object: Arc<Object>,
    pub(super) handle: u64,
    pub(super) bytes: Range<u64>,
    pub(super) arrived: Time,
    pub(super) deadline: Time,
    /// Whole cells are worth fetching for it.
    whole: bool,
    /// Pages it has, each extent pinned.
    pub(super) parts: Vec<Arc<Landed>>,
    /// Fetches it waits for.
    pub(super) pending: BTreeSet<u64>,
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
        let pages = plan::pages(striping, &bytes);
        if let Some(error) = self.sore.find(now, object.descriptor.version, pages) {
            self.counts.reads_failed += 1;
            self.counts.reads_failed_again += 1;
            self.actions.push(Action::Fail { id, error });
            return None;
        }
        let deadline = self.within(now, deadline, READ_PROBE);
        let whole = self.observe(object, handle, offset, length, freshness);
        let read = Read {
            object: object.clone(),
            handle,
            bytes,
            arrived: now,
            deadline,
            whole,
            parts: Vec::new(),
            pending: BTreeSet::new(),
            checked: freshness == Freshness::Version,
            freshness,
            finishing: false,
            bad: Vec::new(),
        };
        self.reads.insert(id, read);
        self.admit_or_wait(now, id);
        self.turn(now);
        let read = self.reads.get(&id)?;
        let complete = read.pending.is_empty() && !read.finishing && !self.line.contains(id);
        complete.then(|| Complete { parts: read.parts.clone() })
    }

    fn admit_or_wait(&mut self, now: Time, id: u64) {
        // Those who wait already go first; a read that needs no memory takes nothing from them.
        let way = if self.line.is_empty() { Way::First } else { Way::Empty };
        if !self.admit(now, id, way) {
            self.enqueue(now, id);
        }
    }

    fn enqueue(&mut self, now: Time, id: u64) {
        self.counts.reads_waited += 1;
        let Some(read) = self.reads.get(&id) else { return };
        let (handle, length) = (read.handle, read.bytes.end - read.bytes.start);
        // What it may need: whole pages.
        let page = u64::from(read.object.descriptor.striping.page_size());
        if self.refuse {
            return self.refuse_read(id, length.next_multiple_of(page));
        }
        if self.line.push(now, id, handle, Class::of(length), length.next_multiple_of(page)) {
            return;
        }
        let error = Error::OverBudget {
            what: self.reads.remove(&id).map_or_else(String::new, |read| read.object.name.to_string()),
            need: 0,
            limit: MAX_WAITING as u64,
            cure: format!("{MAX_WAITING} reads wait for memory already; give the mount a larger arena"),
        };
        self.counts.reads_failed += 1;
        self.actions.push(Action::Fail { id, error });
    }

    /// Nothing was sent for it, and it holds nothing.
    fn refuse_read(&mut self, id: u64, need: u64) {
        let Some(read) = self.reads.remove(&id) else { return };
        self.counts.reads_waited -= 1;
        self.counts.reads_failed += 1;
        let error = Error::OverBudget {
            what: read.object.name.to_string(),
            need,
            limit: self.arena.stats().total,
            cure: "other reads hold the arena now; read fewer at once, give it more memory (which the memlock limit must allow for \
                   each RDMA device), or let reads wait"
                .to_owned(),
        };
        self.actions.push(Action::Fail { id, error });
    }

    /// Plans a read, takes all the memory it needs in one step, and sends its fetches and its check. False: there is no
    /// room now; it holds nothing.
    fn admit(&mut self, now: Time, id: u64, way: Way) -> bool {
        if self.try_admit(now, id, way) {
            return true;
        }
        // What it found in the cache may stand in the way of what it lacks. When nothing is in flight, nothing else will
        // make room: let the cache go and fetch it all.
        if way != Way::First || !self.flights.is_empty() || !self.sends.is_empty() {
            return false;
        }
        while self.cache.evict() {}
        self.try_admit(now, id, way)
    }

    fn try_admit(&mut self, now: Time, id: u64, way: Way) -> bool {
        let Some(read) = self.reads.get(&id) else { return true };
        let (object, bytes, checked) = (read.object.clone(), read.bytes.clone(), read.checked);
        let first = read.bad.is_empty() && (!checked || read.freshness == Freshness::Version);
        let (handle, whole, deadline) = (read.handle, read.whole, read.deadline);
        let class = Class::of(bytes.end - bytes.start);
        let (version, striping) = (object.descriptor.version, object.descriptor.striping);
        let avoid: Vec<usize> = read.bad.iter().map(|&(_, rail)| rail).collect();
        let mut parts: Vec<Arc<Landed>> = Vec::new();
        let mut joined: Vec<u64> = Vec::new();
        let mut fresh: Vec<(u64, Range<u64>)> = Vec::new();
        let cells = plan::cells(&striping, bytes);
        for wanted in &cells {
            let pages = wanted.first..wanted.end;
            let overlaps = |other: &Range<u64>| other.start < pages.end && pages.start < other.end;
            parts.extend(self.cache.get(version, wanted.cell, &pages));
            joined.extend(self.flying(version, wanted.cell).filter(|(_, flying)| overlaps(flying)).map(|(id, _)| id));
            let needed = self.missing(&object, wanted.cell, pages.clone());
            let runs = if whole && !needed.is_empty() {
                let all = plan::whole_cell(&striping, wanted.cell);
                let runs = self.missing(&object, wanted.cell, all.first..all.end);
                runs.into_iter().filter(|run| overlaps(run)).collect()
            } else {
                needed
            };
            let runs = plan::limited(&striping, runs, self.session.max_fetch);
            fresh.extend(runs.into_iter().map(|run| (wanted.cell, run)));
        }
        if way == Way::Empty && !fresh.is_empty() {
            return false;
        }
        let runs: Vec<Range<u64>> = fresh.iter().map(|(_, run)| run.clone()).collect();
        let held = Use::Read(class);
        let reserved = self.reserve(&striping, &runs, held, way == Way::Overtaking);
        let Some(memory) = reserved else { return false };
        for wanted in &cells {
            self.cache.asked(version, wanted.cell, &(wanted.first..wanted.end));
        }
        let warm = fresh.is_empty() && joined.is_empty();
        let mut pending: BTreeSet<u64> = joined.iter().copied().collect();
        for fetch in &joined {
            self.join_fetch(*fetch, id);
        }
        let any_fresh = !fresh.is_empty();
        for ((cell, pages), extent) in fresh.into_iter().zip(memory) {
            self.counts.fetches += 1;
            let avoid = avoid.clone();
            let new = New { cell, pages, deadline, handle, waiter: Some(id), avoid, extent, held };
            pending.insert(self.new_fetch(version, &object, new));
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

    /// Reads in line for memory get their turn.
    pub(super) fn admit_waiting(&mut self, now: Time) {
        loop {
            let Some((first, class)) = self.line.first() else { return };
            if self.admit_turn(now, first, Way::First) {
                continue;
            }
            self.cancel_unwanted(now);
            let small = (class == Class::Large).then(|| self.line.first_of(Class::Small)).flatten();
            if !small.is_some_and(|small| self.admit_turn(now, small, Way::Overtaking)) {
                return;
            }
        }
    }

    /// False: it has to wait on.
    fn admit_turn(&mut self, now: Time, id: u64, way: Way) -> bool {
        if !self.reads.contains_key(&id) {
            self.line.remove(now, id);
            return true;
        }
        let admitted = self.admit(now, id, way);
        if admitted {
            self.line.served(now, id);
        }
        admitted
    }

    /// Finishes a read that has its pages and its check.
    pub(super) fn progress(&mut self, id: u64) {
        // One in line has no pages, and waits for none of them yet: after a bad page it is there with its check passed.
        let in_line = self.line.contains(id);
        let Some(read) = self.reads.get_mut(&id) else { return };
        if in_line || !read.pending.is_empty() || !read.checked || read.finishing {
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
        self.turn(now);
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
            self.sore.add(now, object.descriptor.version, page, &error);
            self.fail_read(id, error);
        } else {
            self.admit_or_wait(now, id);
        }
    }

    /// Answers a read with an error.
    pub(super) fn fail_read(&mut self, id: u64, error: Error) {
        if let Some(read) = self.reads.remove(&id) {
            self.line.remove(read.arrived, id);
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
        } else if self.line.contains(id) {
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
        let arrived = read.arrived;
        self.line.remove(now, id);
        self.unanswered(arrived);
        self.fail_read(id, error);
    }

    /// What is known of why no rail is up.
    pub fn rails_down(&self) -> String {
        format!("no rail is up ({})", self.rails_now())
    }

    /// What each rail is.
    pub(super) fn rails_now(&self) -> String {
        let is = |view: &RailView| match (&view.reason.dead, &view.state) {
            (Some(why), _) => why.clone(),
            (None, State::Up) => "up".to_owned(),
            (None, State::Silent) => "silent".to_owned(),
            (None, State::Connecting | State::Down(_)) => "connecting".to_owned(),
        };
        let rails = (0..self.rails.len()).filter_map(|rail| self.rails.view(rail).filter(|view| !view.removed));
        rails.map(|view| format!("rail {}: {}", view.name, is(view))).collect::<Vec<_>>().join("; ")
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
