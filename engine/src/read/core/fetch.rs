//! Fetches: one run of pages into one extent, on one rail after another until it lands or its time is over.
//!
//! Guarantee: a rail is given so much that it has enough to do, and no more; what does not fit waits here, where reads of
//! other handles and small ones have their turn.

use super::message::{self, Bad, denied};
use super::reads::damaged;
use super::{Action, Core, Flight, InFlight, MAX_BAD, RETRY, Waiter};
use crate::client::Object;
use crate::clock::Time;
use crate::error::Error;
use crate::memory::{Fenced, Free};
use crate::rail::{Landing, Lane, Submission};
use crate::read::admission::{Class, Use};
use crate::read::landed::{Landed, Origin};
use crate::read::plan;
use bytes::Bytes;
use railfs_proto::layout::Striping;
use railfs_proto::reply::check_fetch_reply;
use railfs_proto::v1;
use std::ops::Range;
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Fetch {
    pub(super) object: Arc<Object>,
    pub(super) cell: u64,
    pub(super) pages: Range<u64>,
    pub(super) geometry: plan::Geometry,
    deadline: Time,
    /// Whose it is: the first handle that wanted it.
    handle: u64,
    /// What its memory is held for.
    pub(super) held: Use,
    /// False: it was sent ahead of a reader that has left.
    pub(super) wanted: bool,
    /// It was sent before anybody had asked for its bytes.
    ahead: bool,
    /// Reads that want its pages.
    pub(super) waiters: Vec<u64>,
    /// Reads that had arrived when the attempt in flight was posted: its reply is their check.
    covers: Vec<u64>,
    /// Rails that failed it.
    avoid: Vec<usize>,
    /// Answers that said "damaged".
    bad: u32,
    /// Memory for the next attempt.
    pub(super) extent: Option<Free>,
    /// The attempt in flight.
    pub(super) attempt: Option<u64>,
    /// When to try again, while there is none in flight.
    retry_at: Time,
    request: v1::FetchRequest,
}

/// What a new fetch is made of.
pub(super) struct New {
    pub(super) cell: u64,
    pub(super) pages: Range<u64>,
    pub(super) deadline: Time,
    pub(super) handle: u64,
    pub(super) waiter: Option<u64>,
    pub(super) avoid: Vec<usize>,
    pub(super) extent: Free,
    pub(super) held: Use,
}

impl Core {
    /// Takes memory for all these runs or for none, dropping cached extents that nobody reads. `overtaking`: a large read
    /// waits for memory that is before this small one.
    pub(super) fn reserve(
        &mut self,
        striping: &Striping,
        runs: &[Range<u64>],
        what: Use,
        overtaking: bool,
    ) -> Option<Vec<Free>> {
        let sizes: Vec<u32> = runs.iter().map(|run| plan::geometry(striping, run).extent).collect();
        let sum: u64 = sizes.iter().map(|&size| u64::from(size)).sum();
        let fits = match overtaking {
            true => self.ledger.fits_overtaking(sum),
            false => self.ledger.fits(what, sum, self.cache.unread()),
        };
        if !fits {
            return None;
        }
        let mut memory = Vec::with_capacity(sizes.len());
        for size in sizes {
            memory.push(self.allocate(size)?);
        }
        self.ledger.take(what, sum);
        Some(memory)
    }

    fn allocate(&mut self, size: u32) -> Option<Free> {
        loop {
            match self.arena.allocate(size) {
                Some(extent) => return Some(extent),
                None if self.cache.evict() => {}
                None => return None,
            }
        }
    }

    pub(super) fn new_fetch(&mut self, version: u64, object: &Arc<Object>, new: New) -> u64 {
        let id = self.id();
        let geometry = plan::geometry(&object.descriptor.striping, &new.pages);
        let replicas = object.descriptor.components.get(geometry.component as usize);
        let directory = replicas.and_then(|replicas| replicas.first()).map(|replica| replica.directory.to_bytes());
        let request = v1::FetchRequest {
            version,
            component: geometry.component,
            offset: geometry.offset,
            length: geometry.length,
            directory: directory.unwrap_or_default(),
            proof: None,
            // After a bad page; the server may have kept what it sent.
            fresh: !new.avoid.is_empty(),
        };
        self.by_cell.entry((version, new.cell)).or_default().push(id);
        let fetch = Fetch {
            object: object.clone(),
            cell: new.cell,
            pages: new.pages,
            geometry,
            deadline: new.deadline,
            handle: new.handle,
            held: new.held,
            wanted: true,
            ahead: new.waiter.is_none(),
            waiters: new.waiter.into_iter().collect(),
            covers: Vec::new(),
            avoid: new.avoid,
            bad: 0,
            extent: Some(new.extent),
            attempt: None,
            retry_at: Time(0),
            request,
        };
        self.fetches.insert(id, fetch);
        id
    }

    /// A read wants pages that are on their way already. It needs a check of its own. A fetch ahead is the read's from now
    /// on, with its memory.
    pub(super) fn join_fetch(&mut self, fetch: u64, read: u64) {
        let Some(deadline) = self.reads.get(&read).map(|read| read.deadline) else { return };
        let Some(fetch) = self.fetches.get_mut(&fetch) else { return };
        fetch.waiters.push(read);
        fetch.wanted = true;
        fetch.deadline = fetch.deadline.max(deadline);
        if fetch.held == Use::Ahead {
            let size = u64::from(fetch.geometry.extent);
            let flight = fetch.attempt.and_then(|attempt| self.flights.get_mut(&attempt));
            if fetch.extent.is_some() || flight.is_some() {
                self.ledger.give(Use::Ahead, size);
                self.ledger.take(Use::Read(Class::of(size)), size);
            }
            fetch.held = Use::Read(Class::of(size));
            if let Some(flight) = flight {
                flight.held = fetch.held;
            }
        }
    }

    /// Posts a fetch that has no attempt in flight and whose time to try has come, or lets it wait for a rail.
    pub(super) fn post_fetch(&mut self, now: Time, id: u64) {
        let idle = self.fetches.get(&id).is_some_and(|fetch| fetch.attempt.is_none());
        if !idle || self.sends.contains(id) || self.over(now, id) {
            return;
        }
        let Some(fetch) = self.fetches.get(&id) else { return };
        let (size, handle, ahead) = (u64::from(fetch.geometry.extent), fetch.handle, fetch.waiters.is_empty());
        let class = Class::of(size);
        let waits = |core: &Core, rail| !ahead && (core.sends_wait(class) || !core.rails.room(rail, size, false));
        match self.rails.choose(now, u64::from(fetch.geometry.length), &fetch.avoid) {
            None => self.park_fetch(now, id),
            Some(rail) if waits(self, rail) => {
                if !self.sends.push(now, id, handle, class, size) {
                    self.park_fetch(now, id);
                }
            }
            Some(rail) => self.send_fetch(now, id, rail),
        }
    }

    fn sends_wait(&self, class: Class) -> bool {
        let account = self.sends.account();
        match class {
            Class::Small => account.waiting_small > 0,
            Class::Large => account.waiting_large > 0,
        }
    }

    /// Whether the fetch has ended because nobody waits for it or because its time is over.
    fn over(&mut self, now: Time, id: u64) -> bool {
        let Some(fetch) = self.fetches.get(&id) else { return true };
        if fetch.waiters.is_empty() && fetch.retry_at > Time(0) {
            let (handle, object, pages) = (fetch.handle, fetch.object.clone(), fetch.pages.clone());
            self.failed_ahead(handle, &object, &pages);
            self.end_fetch(now, id);
            return true;
        }
        if now >= fetch.deadline {
            // The deadlines of those who wait have come as well: each is told what is known.
            for read in fetch.waiters.clone() {
                self.read_timed_out(now, read);
            }
            self.end_fetch(now, id);
            return true;
        }
        false
    }

    /// Fetches that wait for a rail get their turn. A small one may go before a large one, for which there is no room: they
    /// have room of their own.
    pub(super) fn send_waiting(&mut self, now: Time) {
        loop {
            let Some((first, class)) = self.sends.first() else { return };
            if self.send_turn(now, first) {
                continue;
            }
            let small = (class == Class::Large).then(|| self.sends.first_of(Class::Small)).flatten();
            if !small.is_some_and(|small| self.send_turn(now, small)) {
                return;
            }
        }
    }

    /// False: it has to wait on.
    fn send_turn(&mut self, now: Time, id: u64) -> bool {
        let Some(fetch) = self.fetches.get(&id) else {
            self.sends.remove(now, id);
            return true;
        };
        let asked_for = fetch.waiters.iter().any(|read| self.reads.contains_key(read));
        let (size, length) = (u64::from(fetch.geometry.extent), u64::from(fetch.geometry.length));
        match self.rails.choose(now, length, &fetch.avoid) {
            _ if !asked_for => self.end_fetch(now, id),
            Some(rail) if self.rails.room(rail, size, false) => {
                self.sends.served(now, id);
                self.send_fetch(now, id, rail);
            }
            Some(_) => return false,
            None => {
                self.sends.remove(now, id);
                self.park_fetch(now, id);
            }
        }
        true
    }

    fn send_fetch(&mut self, now: Time, id: u64, rail: usize) {
        let Some(fetch) = self.fetches.get_mut(&id) else { return };
        let (size, held) = (fetch.geometry.extent, fetch.held);
        let extent = match fetch.extent.take() {
            Some(extent) => extent,
            None => {
                // It gave its memory away when it had to wait: it takes some again where there is some.
                let fits = self.ledger.fits(held, u64::from(size), self.cache.unread());
                let Some(extent) = fits.then(|| self.allocate(size)).flatten() else {
                    return self.park_fetch(now, id);
                };
                self.ledger.take(held, u64::from(size));
                extent
            }
        };
        let attempt = self.id();
        let Some(fetch) = self.fetches.get_mut(&id) else { return };
        fetch.attempt = Some(attempt);
        fetch.covers = fetch.waiters.clone();
        let mut request = fetch.request.clone();
        let proof = fetch.object.proof();
        request.proof = (proof.incarnation == self.session.scope.incarnation).then(|| proof.to_slot());
        fetch.request.proof.clone_from(&request.proof);
        let body = v1::rail_request::Body::Fetch(request);
        let submission = Submission {
            id: attempt,
            lane: Lane::Bulk,
            message: message::request(&self.session.scope, fetch.deadline.since(now), body),
            landing: Some(Landing { extent, length: fetch.geometry.length }),
            deadline: fetch.deadline,
        };
        self.rails.posted(rail, u64::from(size));
        let incarnation = self.session.scope.incarnation;
        let entry = InFlight { flight: Flight::Fetch(id), rail, memory: size, held, posted: now, incarnation };
        self.flights.insert(attempt, entry);
        self.actions.push(Action::Submit { rail, submission });
    }

    fn park_fetch(&mut self, now: Time, id: u64) {
        if let Some(fetch) = self.fetches.get_mut(&id) {
            // It waits without memory: others may need it meanwhile.
            if fetch.extent.take().is_some() {
                self.ledger.give(fetch.held, u64::from(fetch.geometry.extent));
            }
            fetch.retry_at = now.after(RETRY);
        }
    }

    /// What waits for a rail, for memory or for a busy server is tried again (`all`: a rail came back).
    pub(super) fn retry_waiting(&mut self, now: Time, all: bool) {
        let due = |(id, fetch): (&u64, &Fetch)| match self.sends.contains(*id) {
            // It waits for its turn, as long as it has the time.
            true => fetch.deadline <= now,
            false => fetch.attempt.is_none() && (all || fetch.retry_at <= now),
        };
        let fetches: Vec<u64> = self.fetches.iter().filter(|&entry| due(entry)).map(|(&id, _)| id).collect();
        for id in fetches {
            self.sends.remove(now, id);
            self.counts.fetches_again += 1;
            self.post_fetch(now, id);
        }
        self.retry_smalls(now, all);
    }

    pub(super) fn fetch_failed(&mut self, now: Time, id: u64, rail: usize, why: &str) {
        let name = self.rails.name(rail).to_owned();
        let Some(fetch) = self.fetches.get_mut(&id) else { return };
        tracing::debug!(object = %fetch.object.name, rail = name, why, "a fetch failed and is sent again");
        fetch.attempt = None;
        fetch.retry_at = now;
        if !fetch.avoid.contains(&rail) {
            fetch.avoid.push(rail);
        }
        self.counts.fetches_again += 1;
        // A rail that failed it would only fail again at once; it may not have said yet that it is down.
        match self.rails.choose(now, 0, &fetch.avoid) {
            Some(other) if !fetch.avoid.contains(&other) => self.post_fetch(now, id),
            _ => {
                fetch.avoid.clear();
                self.park_fetch(now, id);
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn fetch_replied(
        &mut self,
        now: Time,
        id: u64,
        rail: usize,
        message: &Bytes,
        bulk: u32,
        extent: Option<Fenced>,
        entry: &InFlight,
    ) {
        let Some(fetch) = self.fetches.get_mut(&id) else { return };
        fetch.attempt = None;
        let page_size = fetch.object.descriptor.striping.page_size();
        let body = match message::reply(message) {
            Ok(v1::rail_reply::Body::Fetch(body)) => {
                self.checking.lease.answered(entry.incarnation, entry.posted);
                Ok(body)
            }
            Ok(_) => Err(Bad::Malformed("reply to another kind of request".into())),
            Err(bad) => Err(bad),
        };
        let landed = body.and_then(|reply| {
            let checksums = check_fetch_reply(&fetch.request, &reply, bulk, page_size)
                .map_err(|error| Bad::Malformed(error.to_string()))?;
            let origin = Origin {
                version: reply.version,
                component: reply.component,
                component_page: reply.offset / u64::from(page_size),
                first: fetch.pages.start,
                page_size,
                length: reply.length,
                rail,
            };
            let landed = extent.and_then(|extent| Landed::new(extent, origin, checksums));
            let landed = landed.ok_or_else(|| Bad::Malformed("reply without its bytes".into()))?;
            Ok((Arc::new(landed), reply.check))
        });
        match landed {
            Ok((landed, check)) => self.fetch_landed(now, id, &landed, check),
            Err(bad) => self.fetch_refused(now, id, rail, bad),
        }
    }

    fn fetch_landed(&mut self, now: Time, id: u64, landed: &Arc<Landed>, check: Option<v1::CheckResult>) {
        let Some(fetch) = self.fetches.get_mut(&id) else { return };
        let (object, waiters) = (fetch.object.clone(), std::mem::take(&mut fetch.waiters));
        let (covers, proof) = (std::mem::take(&mut fetch.covers), fetch.request.proof.take());
        let (cell, ahead, wanted) = (fetch.cell, fetch.ahead, fetch.wanted);
        let length = u64::from(landed.origin().length);
        self.counts.bytes_landed += length;
        self.counts.bytes_ahead += if ahead { length } else { 0 };
        let version = object.descriptor.version;
        self.cache.insert(version, cell, landed.clone(), waiters.is_empty());
        if !wanted {
            self.cache.demote(version, cell, &landed.pages());
        }
        self.end_fetch(now, id);
        // The server compared the value that was sent with the request, after the request had arrived there.
        let check = check.filter(|_| proof.is_some());
        let mut moved = Vec::new();
        for waiter in waiters {
            let Some(read) = self.reads.get_mut(&waiter) else { continue };
            read.pending.remove(&id);
            read.parts.push(landed.clone());
            if !read.checked && covers.contains(&waiter) {
                match &check {
                    Some(check) if check.current => {
                        read.checked = true;
                        self.counts.checks_by_fetch += 1;
                    }
                    Some(_) => moved.push(Waiter::Read(waiter)),
                    None => self.want_check(now, Waiter::Read(waiter), &object),
                }
            }
            self.progress(waiter);
        }
        if !moved.is_empty() {
            self.recheck(now, &object, moved);
        }
    }

    fn fetch_refused(&mut self, now: Time, id: u64, rail: usize, bad: Bad) {
        use v1::Code;
        let name = self.rails.name(rail).to_owned();
        let Some(fetch) = self.fetches.get_mut(&id) else { return };
        let page = fetch.pages.start;
        match bad {
            Bad::Refused(refusal) => match refusal.code {
                Code::Stale | Code::NotFound => {
                    fetch.object.set_gone();
                    self.fail_fetch(now, id, Object::stale_error);
                }
                Code::Expired | Code::Unavailable | Code::OverBudget => self.park_fetch(now, id),
                Code::WrongIncarnation | Code::WrongStore => {
                    self.actions.push(Action::Renew);
                    self.park_fetch(now, id);
                }
                Code::Damaged if fetch.bad < MAX_BAD => {
                    fetch.bad += 1;
                    self.fetch_failed(now, id, rail, &refusal.message);
                }
                Code::Damaged => {
                    for page in fetch.pages.clone() {
                        let error = damaged(&fetch.object, page, &name, &refusal.message);
                        self.sore.add(now, fetch.object.descriptor.version, page, &error);
                    }
                    self.fail_fetch(now, id, |object| damaged(object, page, &name, &refusal.message));
                }
                Code::Denied => self.fail_fetch(now, id, |object| denied(&object.name, &refusal.message)),
                _ => self.fail_fetch(now, id, |object| Error::BadAnswer {
                    peer: format!("{} by rail {name}", object.name),
                    detail: refusal.message.clone(),
                }),
            },
            Bad::Malformed(detail) if fetch.bad < MAX_BAD => {
                fetch.bad += 1;
                tracing::warn!(object = %fetch.object.name, rail = name, detail, "bad answer to a fetch");
                self.fetch_failed(now, id, rail, "bad answer");
            }
            Bad::Malformed(detail) => self.fail_fetch(now, id, |object| Error::BadAnswer {
                peer: format!("{} by rail {name}", object.name),
                detail: detail.clone(),
            }),
        }
    }

    /// The fetch and everyone who waits for it fail.
    fn fail_fetch(&mut self, now: Time, id: u64, error: impl Fn(&Object) -> Error) {
        let Some(fetch) = self.fetches.get_mut(&id) else { return };
        let (object, waiters) = (fetch.object.clone(), std::mem::take(&mut fetch.waiters));
        if waiters.is_empty() {
            let (handle, pages) = (fetch.handle, fetch.pages.clone());
            self.failed_ahead(handle, &object, &pages);
        }
        self.end_fetch(now, id);
        for waiter in waiters {
            self.fail_read(waiter, error(&object));
        }
    }

    pub(super) fn end_fetch(&mut self, now: Time, id: u64) {
        let Some(mut fetch) = self.fetches.remove(&id) else { return };
        self.sends.remove(now, id);
        if fetch.extent.take().is_some() {
            self.ledger.give(fetch.held, u64::from(fetch.geometry.extent));
        }
        let key = (fetch.object.descriptor.version, fetch.cell);
        if let Some(list) = self.by_cell.get_mut(&key) {
            list.retain(|&other| other != id);
            if list.is_empty() {
                self.by_cell.remove(&key);
            }
        }
    }
}
