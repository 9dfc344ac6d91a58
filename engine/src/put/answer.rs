//! Answers to pulls: a fair, bounded queue and what its threads do.

use super::{Entry, IN_FLIGHT, WAITING, lock, refuse};
use crate::rail::{Bulk, Replier};
use bytes::Bytes;
use prost::Message;
use railfs_proto::checksum::page_checksums;
use railfs_proto::reply::{Refusal, ok_outcome};
use railfs_proto::v1::{self, Code, rail_reply};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// One pull to be answered.
pub(super) struct Job {
    pull: v1::PullRequest,
    entry: Arc<Entry>,
    replier: Box<dyn Replier>,
    due: Option<Instant>,
}

impl Job {
    pub(super) fn new(pull: v1::PullRequest, entry: Arc<Entry>, replier: Box<dyn Replier>, microseconds: u64) -> Job {
        let due = Instant::now().checked_add(Duration::from_micros(microseconds));
        Job { pull, entry, replier, due }
    }

    pub(super) fn refuse(self, refusal: &Refusal) {
        refuse(self.replier, refusal);
    }
}

#[derive(Default)]
struct Waiting {
    jobs: HashMap<u64, VecDeque<Job>>,
    /// Puts that have jobs, in turn.
    turns: VecDeque<u64>,
    count: usize,
    in_flight: u64,
    closed: bool,
}

/// See the module's head.
#[derive(Default)]
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

/// A share of the bytes in flight, given back when the reply has gone out (or cannot any more).
struct Share {
    queue: Arc<Queue>,
    bytes: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut waiting = lock(&self.queue.waiting);
        waiting.in_flight = waiting.in_flight.saturating_sub(self.bytes);
        self.queue.changed.notify_one();
    }
}

impl Queue {
    pub(super) fn in_flight(&self) -> u64 {
        lock(&self.waiting).in_flight
    }

    pub(super) fn close(&self) {
        let mut waiting = lock(&self.waiting);
        waiting.closed = true;
        waiting.jobs.clear();
        waiting.turns.clear();
        waiting.count = 0;
        self.changed.notify_all();
    }

    /// Gives the job back when there is no room for it.
    pub(super) fn add(&self, job: Job) -> Result<(), Box<Job>> {
        let mut waiting = lock(&self.waiting);
        if waiting.closed || waiting.count >= WAITING {
            return Err(Box::new(job));
        }
        let put = job.pull.put;
        let jobs = waiting.jobs.entry(put).or_default();
        jobs.push_back(job);
        if jobs.len() == 1 {
            waiting.turns.push_back(put);
        }
        waiting.count += 1;
        self.changed.notify_one();
        Ok(())
    }

    /// The put is over: what waits of it is refused.
    pub(super) fn forget(&self, put: u64) {
        let jobs = {
            let mut waiting = lock(&self.waiting);
            let jobs = waiting.jobs.remove(&put).unwrap_or_default();
            waiting.turns.retain(|other| *other != put);
            waiting.count = waiting.count.saturating_sub(jobs.len());
            jobs
        };
        for job in jobs {
            job.refuse(&Refusal::new(Code::Aborted, format!("put {put} is not known to this client")));
        }
    }

    /// The next job in turn, once there is room for its bytes. `None`: closed.
    fn next(self: &Arc<Self>) -> Option<(Job, Share)> {
        let mut waiting = lock(&self.waiting);
        loop {
            if waiting.closed {
                return None;
            }
            let put = waiting.turns.front().copied();
            let bytes = put.and_then(|put| waiting.jobs.get(&put)?.front().map(|job| u64::from(job.pull.length)));
            if let (Some(put), Some(bytes)) = (put, bytes)
                && waiting.in_flight + bytes <= IN_FLIGHT
            {
                waiting.turns.pop_front();
                let (job, more) = match waiting.jobs.get_mut(&put) {
                    Some(jobs) => (jobs.pop_front(), !jobs.is_empty()),
                    None => (None, false),
                };
                if more {
                    waiting.turns.push_back(put);
                } else {
                    waiting.jobs.remove(&put);
                }
                let Some(job) = job else { continue };
                waiting.count = waiting.count.saturating_sub(1);
                waiting.in_flight += bytes;
                if !waiting.turns.is_empty() {
                    self.changed.notify_one();
                }
                return Some((job, Share { queue: Arc::clone(self), bytes }));
            }
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// What a thread does until the queue is closed.
    pub(super) fn work(self: Arc<Self>) {
        while let Some((job, share)) = self.next() {
            answer(job, share);
        }
    }
}

fn answer(job: Job, share: Share) {
    if job.due.is_some_and(|due| due <= Instant::now()) {
        return job.refuse(&Refusal::new(Code::Expired, "the pull's time was up before it was begun"));
    }
    let (entry, pull) = (&job.entry, job.pull);
    let mut buffer = vec![0u8; pull.length as usize];
    if let Err(error) = entry.source.read_exact_at(pull.offset, &mut buffer) {
        let message = format!("reading {} bytes at {} failed: {error}", pull.length, pull.offset);
        lock(&entry.error).get_or_insert_with(|| message.clone());
        return job.refuse(&Refusal::new(Code::Aborted, message));
    }
    let descriptor = &entry.descriptor;
    let page = descriptor.striping.page_size();
    let place = descriptor.striping.place(pull.offset);
    let first = place.offset / u64::from(page);
    let checksums = page_checksums(descriptor.version, place.component, first, page, &buffer);
    let reply = v1::PullReply { put: pull.put, offset: pull.offset, length: pull.length, checksums };
    let reply = v1::RailReply { outcome: Some(ok_outcome()), body: Some(rail_reply::Body::Pull(reply)) };
    let message: Bytes = reply.encode_to_vec().into();
    let entry = Arc::clone(entry);
    let sent = move |sent: crate::rail::Sent| {
        entry.progressed(pull.offset, sent.bytes.into());
        drop(share);
        message
    };
    job.replier.reply(Bulk::Bytes(buffer.into()), Box::new(sent));
}
