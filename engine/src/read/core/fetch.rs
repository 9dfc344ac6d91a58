//! Fetches: one run of pages into one extent, on one rail after another until it lands or its time is over.

use super::message::{self, Bad};
use super::reads::damaged;
use super::{Action, Core, Flight, MAX_BAD, RETRY, Waiter};
use crate::client::Object;
use crate::clock::Time;
use crate::error::Error;
use crate::memory::{Fenced, Free};
use crate::rail::{Landing, Lane, Submission};
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
    geometry: plan::Geometry,
    deadline: Time,
    /// Reads that want its pages.
    pub(super) waiters: Vec<u64>,
    /// Reads that had arrived when the attempt in flight was posted: its reply is their check.
    covers: Vec<u64>,
    /// Rails that failed it.
    avoid: Vec<usize>,
    /// Answers that said "damaged".
    bad: u32,
    /// Memory for the next attempt.
    extent: Option<Free>,
    /// The attempt in flight.
    attempt: Option<u64>,
    /// When to try again, while there is none in flight.
    retry_at: Time,
    request: v1::FetchRequest,
}

impl Core {
    /// Takes memory for all these runs or for none, dropping cached extents that nobody reads.
    pub(super) fn reserve(&mut self, striping: &Striping, runs: &[(u64, Range<u64>)]) -> Option<Vec<Free>> {
        let sizes: Vec<u32> = runs.iter().map(|(_, run)| plan::geometry(striping, run).extent).collect();
        let sum: u64 = sizes.iter().map(|&size| u64::from(size)).sum();
        if self.committed + sum > self.arena.stats().total / 4 * 3 {
            return None;
        }
        let mut memory = Vec::with_capacity(sizes.len());
        for size in sizes {
            memory.push(self.allocate(size)?);
        }
        self.committed += sum;
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

    #[allow(clippy::too_many_arguments)]
    pub(super) fn new_fetch(
        &mut self,
        object: &Arc<Object>,
        cell: u64,
        pages: Range<u64>,
        deadline: Time,
        waiter: Option<u64>,
        avoid: Vec<usize>,
        extent: Free,
    ) -> u64 {
        let id = self.id();
        let geometry = plan::geometry(&object.descriptor.striping, &pages);
        let replicas = object.descriptor.components.get(geometry.component as usize);
        let directory = replicas.and_then(|replicas| replicas.first()).map(|replica| replica.directory.to_bytes());
        let request = v1::FetchRequest {
            version: object.descriptor.version,
            component: geometry.component,
            offset: geometry.offset,
            length: geometry.length,
            directory: directory.unwrap_or_default(),
            proof: None,
        };
        self.by_cell.entry((object.descriptor.version, cell)).or_default().push(id);
        let fetch = Fetch {
            object: object.clone(),
            cell,
            pages,
            geometry,
            deadline,
            waiters: waiter.into_iter().collect(),
            covers: Vec::new(),
            avoid,
            bad: 0,
            extent: Some(extent),
            attempt: None,
            retry_at: Time(0),
            request,
        };
        self.fetches.insert(id, fetch);
        id
    }

    /// A read wants pages that are on their way already. It needs a check of its own.
    pub(super) fn join_fetch(&mut self, fetch: u64, read: u64) {
        let deadline = self.reads.get(&read).map_or(Time(0), |read| read.deadline);
        if let Some(fetch) = self.fetches.get_mut(&fetch) {
            fetch.waiters.push(read);
            fetch.deadline = fetch.deadline.max(deadline);
        }
    }

    /// Posts a fetch that has no attempt in flight and whose time to try has come.
    pub(super) fn post_fetch(&mut self, now: Time, id: u64) {
        let Some(fetch) = self.fetches.get(&id).filter(|fetch| fetch.attempt.is_none()) else { return };
        if fetch.waiters.is_empty() && fetch.retry_at > Time(0) {
            return self.end_fetch(id);
        }
        if now >= fetch.deadline {
            // The deadlines of those who wait have come as well: each is told what is known.
            for read in fetch.waiters.clone() {
                self.read_timed_out(now, read);
            }
            return self.end_fetch(id);
        }
        let size = fetch.geometry.extent;
        let Some(rail) = self.rails.choose(now, u64::from(fetch.geometry.length), &fetch.avoid) else {
            return self.park_fetch(now, id);
        };
        let extent = match self.fetches.get_mut(&id).and_then(|fetch| fetch.extent.take()) {
            Some(extent) => extent,
            None => {
                let fits = self.committed + u64::from(size) <= self.arena.stats().total / 4 * 3;
                let Some(extent) = fits.then(|| self.allocate(size)).flatten() else {
                    return self.park_fetch(now, id);
                };
                self.committed += u64::from(size);
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
        self.flights.insert(attempt, (Flight::Fetch(id), rail, size, now));
        self.actions.push(Action::Submit { rail, submission });
    }

    fn park_fetch(&mut self, now: Time, id: u64) {
        if let Some(fetch) = self.fetches.get_mut(&id) {
            // It waits without memory: others may need it meanwhile.
            if fetch.extent.take().is_some() {
                self.committed -= u64::from(fetch.geometry.extent);
            }
            fetch.retry_at = now.after(RETRY);
        }
    }

    /// What waits for a rail, for memory or for a busy server is tried again (`all`: a rail came back).
    pub(super) fn retry_waiting(&mut self, now: Time, all: bool) {
        let due = |fetch: &Fetch| fetch.attempt.is_none() && (all || fetch.retry_at <= now);
        let fetches: Vec<u64> = self.fetches.iter().filter(|(_, f)| due(f)).map(|(&id, _)| id).collect();
        for id in fetches {
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
        // The same rail at once would only fail again; it may not have said yet that it is down.
        match self.rails.choose(now, 0, &fetch.avoid) {
            Some(other) if other != rail => self.post_fetch(now, id),
            _ => {
                fetch.avoid.clear();
                self.park_fetch(now, id);
            }
        }
    }

    pub(super) fn fetch_replied(
        &mut self,
        now: Time,
        id: u64,
        rail: usize,
        message: &Bytes,
        bulk: u32,
        extent: Option<Fenced>,
    ) {
        let Some(fetch) = self.fetches.get_mut(&id) else { return };
        fetch.attempt = None;
        let page_size = fetch.object.descriptor.striping.page_size();
        let body = match message::reply(message) {
            Ok(v1::rail_reply::Body::Fetch(body)) => Ok(body),
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
        let cell = fetch.cell;
        self.counts.bytes_landed += u64::from(landed.origin().length);
        self.cache.insert(object.descriptor.version, cell, landed.clone());
        self.end_fetch(id);
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
                    self.fail_fetch(id, Object::stale_error);
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
                Code::Damaged => self.fail_fetch(id, |object| damaged(object, page, &name, &refusal.message)),
                _ => self.fail_fetch(id, |object| Error::BadAnswer {
                    peer: format!("{} by rail {name}", object.name),
                    detail: refusal.message.clone(),
                }),
            },
            Bad::Malformed(detail) if fetch.bad < MAX_BAD => {
                fetch.bad += 1;
                tracing::warn!(object = %fetch.object.name, rail = name, detail, "bad answer to a fetch");
                self.fetch_failed(now, id, rail, "bad answer");
            }
            Bad::Malformed(detail) => self.fail_fetch(id, |object| Error::BadAnswer {
                peer: format!("{} by rail {name}", object.name),
                detail: detail.clone(),
            }),
        }
    }

    /// The fetch and everyone who waits for it fail.
    fn fail_fetch(&mut self, id: u64, error: impl Fn(&Object) -> Error) {
        let Some(fetch) = self.fetches.get_mut(&id) else { return };
        let (object, waiters) = (fetch.object.clone(), std::mem::take(&mut fetch.waiters));
        self.end_fetch(id);
        for waiter in waiters {
            self.fail_read(waiter, error(&object));
        }
    }

    fn end_fetch(&mut self, id: u64) {
        let Some(mut fetch) = self.fetches.remove(&id) else { return };
        if fetch.extent.take().is_some() {
            self.committed -= u64::from(fetch.geometry.extent);
        }
        let key = (fetch.object.descriptor.version, fetch.cell);
        if let Some(list) = self.by_cell.get_mut(&key) {
            list.retain(|&other| other != id);
            if list.is_empty() {
                self.by_cell.remove(&key);
            }
        }
    }

    /// Fetches whole cells ahead of a sequential reader, as far as half of the arena goes.
    pub(super) fn fetch_ahead(&mut self, now: Time, object: &Arc<Object>, handle: u64, bytes: Range<u64>) {
        let (striping, version) = (object.descriptor.striping, object.descriptor.version);
        let deadline = now.after(railfs_proto::limits::READ_DEADLINE);
        for wanted in plan::cells(&striping, bytes) {
            let whole = plan::whole_cell(&striping, wanted.cell);
            let flying = self.by_cell.contains_key(&(version, wanted.cell));
            if flying || self.cache.has(version, wanted.cell, whole.first) {
                continue;
            }
            let (cache, cell) = (&self.cache, wanted.cell);
            for run in plan::missing(whole.first, whole.end, |page| cache.has(version, cell, page)) {
                let half = self.arena.stats().total / 2;
                let runs = [(cell, run.clone())];
                let fits = self.committed + u64::from(plan::geometry(&striping, &run).extent) <= half;
                let Some(extent) = fits.then(|| self.reserve(&striping, &runs)).flatten().and_then(|mut m| m.pop())
                else {
                    if let Some((_, readahead)) = self.handles.get_mut(&handle) {
                        readahead.fell_short(run.start * u64::from(striping.page_size()));
                    }
                    return;
                };
                self.counts.fetches_ahead += 1;
                let fetch = self.new_fetch(object, cell, run, deadline, None, Vec::new(), extent);
                self.post_fetch(now, fetch);
            }
        }
    }
}
