//! The client's side of a put: the server pulls, this answers with bytes and their checksums.
//!
//! Guarantees: bytes are read and hashed on two threads of its own, never on a rail's; at most [`IN_FLIGHT`] bytes of
//! replies exist at once, and puts take turns for them (I6); what travels carries the checksum of its own place, so the
//! server stores nothing that this side did not mean (I2); a put that is given up is taken back at the server.

mod answer;
mod begin;
mod given;

pub use begin::put;

use crate::client::Source;
use crate::rail::{Bulk, Handler, Incoming, Replier};
use answer::{Job, Queue};
use given::Given;
use prost::Message;
use railfs_proto::descriptor::Descriptor;
use railfs_proto::limits::MAX_EXTENT;
use railfs_proto::reply::Refusal;
use railfs_proto::v1::{self, Code, rail_request};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Most bytes of pull replies that are being made or sent at once.
pub const IN_FLIGHT: u64 = 16 << 20;
/// Most pulls that wait.
const WAITING: usize = 1024;
/// Threads that read and hash.
const WORKERS: usize = 2;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing in here leaves what it guards half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A put that may be pulled.
struct Entry {
    source: Arc<dyn Source>,
    descriptor: Descriptor,
    incarnation: u64,
    progress: Mutex<Instant>,
    given: Mutex<Given>,
    /// What the source said when it failed.
    error: Mutex<Option<String>>,
}

impl Entry {
    /// Bytes have gone out. Only those that had not before are progress: a server may pull again, and not for ever.
    fn progressed(&self, offset: u64, bytes: u64) {
        if lock(&self.given).add(offset, bytes) {
            *lock(&self.progress) = Instant::now();
        }
    }
}

/// A pull, with the request it came in and the way back.
struct Pull {
    request: v1::RailRequest,
    pull: v1::PullRequest,
    replier: Box<dyn Replier>,
}

#[derive(Default)]
struct Table {
    entries: HashMap<u64, Arc<Entry>>,
    /// Puts whose BeginPut is not answered yet: the server pulls at once, so a pull may be here before the answer is.
    beginning: usize,
    /// Pulls that came so early.
    early: Vec<Pull>,
}

/// The puts of a client, and what answers their pulls: the [`Handler`] of its rails.
pub struct Puts {
    table: Mutex<Table>,
    queue: Arc<Queue>,
    started: Mutex<bool>,
}

impl std::fmt::Debug for Puts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Puts").field("puts", &self.len()).finish_non_exhaustive()
    }
}

impl Puts {
    /// No put; no thread is started before the first.
    pub fn new() -> Arc<Puts> {
        Arc::new(Puts { table: Mutex::default(), queue: Arc::default(), started: Mutex::new(false) })
    }

    /// Puts under way.
    pub fn len(&self) -> usize {
        lock(&self.table).entries.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of replies being made or sent: zero when all is quiet.
    pub fn in_flight(&self) -> u64 {
        self.queue.in_flight()
    }

    /// Ends the threads. Pulls are not answered any more.
    pub fn close(&self) {
        self.queue.close();
        let table = std::mem::take(&mut *lock(&self.table));
        // Dropped outside the lock: whoever waits for an answer is left to its deadline.
        drop(table);
    }

    /// A BeginPut is about to be sent. Pulls of puts that are not known yet wait until what is returned is dropped.
    fn beginning(self: &Arc<Self>) -> Beginning {
        lock(&self.table).beginning += 1;
        Beginning(Arc::clone(self))
    }

    fn register(self: &Arc<Self>, put: u64, entry: Arc<Entry>) -> std::io::Result<Registered> {
        {
            let mut started = lock(&self.started);
            if !*started {
                for number in 0..WORKERS {
                    let queue = Arc::clone(&self.queue);
                    std::thread::Builder::new().name(format!("put-{number}")).spawn(move || queue.work())?;
                }
                *started = true;
            }
        }
        let early = {
            let mut table = lock(&self.table);
            table.entries.insert(put, entry);
            let (early, others) = std::mem::take(&mut table.early).into_iter().partition(|early| early.pull.put == put);
            table.early = others;
            early
        };
        let early: Vec<Pull> = early;
        early.into_iter().for_each(|pull| self.answer(pull));
        Ok(Registered { puts: Arc::clone(self), put })
    }

    fn answer(&self, pull: Pull) {
        let found = {
            let mut table = lock(&self.table);
            if !table.entries.contains_key(&pull.pull.put) && table.beginning > 0 && table.early.len() < WAITING {
                table.early.push(pull);
                return;
            }
            table.entries.get(&pull.pull.put).cloned()
        };
        let Pull { request, pull, replier } = pull;
        match check(found, &request, &pull) {
            Ok(entry) => {
                let job = Job::new(pull, entry, replier, request.time_left_microseconds);
                if let Err(job) = self.queue.add(job) {
                    job.refuse(&Refusal::new(Code::OverBudget, format!("{WAITING} pulls are waiting already")));
                }
            }
            Err(refusal) => refuse(replier, &refusal),
        }
    }
}

/// Whether the pull is one of this put's, and makes sense.
fn check(found: Option<Arc<Entry>>, request: &v1::RailRequest, pull: &v1::PullRequest) -> Result<Arc<Entry>, Refusal> {
    let aborted = || Refusal::new(Code::Aborted, format!("put {} is not known to this client", pull.put));
    let incarnation = request.scope.as_ref().map_or(0, |scope| scope.incarnation);
    let entry = found.filter(|entry| entry.incarnation == incarnation).ok_or_else(aborted)?;
    let striping = &entry.descriptor.striping;
    let end = pull.offset.checked_add(u64::from(pull.length)).filter(|end| *end <= striping.size());
    let stripe = u64::from(striping.stripe_size());
    let good = pull.length > 0
        && pull.length <= MAX_EXTENT
        && pull.offset.is_multiple_of(u64::from(striping.page_size()))
        && end.is_some_and(|end| pull.offset / stripe == (end - 1) / stripe);
    if !good {
        let message = format!("a pull of {} bytes at {} makes no sense for this put", pull.length, pull.offset);
        return Err(Refusal::new(Code::Invalid, message));
    }
    Ok(entry)
}

impl Handler for Puts {
    fn request(&self, incoming: Incoming) {
        let Incoming { message, replier } = incoming;
        let request = match v1::RailRequest::decode(message) {
            Ok(request) => request,
            Err(error) => return refuse(replier, &Refusal::new(Code::Invalid, format!("unreadable request: {error}"))),
        };
        let Some(rail_request::Body::Pull(pull)) = request.body else {
            return refuse(replier, &Refusal::new(Code::Invalid, "a client answers pulls only"));
        };
        self.answer(Pull { request, pull, replier });
    }
}

fn refuse(replier: Box<dyn Replier>, refusal: &Refusal) {
    let reply = v1::RailReply { outcome: Some(refusal.to_outcome()), body: None };
    let bytes = reply.encode_to_vec().into();
    replier.reply(Bulk::None, Box::new(move |_| bytes));
}

/// As long as this lives the put may be pulled.
struct Registered {
    puts: Arc<Puts>,
    put: u64,
}

impl Drop for Registered {
    fn drop(&mut self) {
        lock(&self.puts.table).entries.remove(&self.put);
        self.puts.queue.forget(self.put);
    }
}

/// As long as this lives pulls of unknown puts wait.
struct Beginning(Arc<Puts>);

impl Drop for Beginning {
    fn drop(&mut self) {
        let early = {
            let mut table = lock(&self.0.table);
            table.beginning = table.beginning.saturating_sub(1);
            if table.beginning > 0 { Vec::new() } else { std::mem::take(&mut table.early) }
        };
        early.into_iter().for_each(|pull| self.0.answer(pull));
    }
}

#[cfg(test)]
mod tests;
