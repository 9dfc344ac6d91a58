//! Does what the core says: gives submissions to rails, waits for checks, verifies, answers. Decides nothing.
//!
//! Guarantees: rail threads never copy, check or answer (they only hand over); no call here waits for the network but
//! [`Driver::read`] for one check, at most `limits::INLINE_CHECK`; replies and rails are called with no lock held.

use super::core::{Action, Complete, Core, Freshness, Session};
use super::landed::Landed;
use crate::client::{Done, Found, Object, ReadReply};
use crate::clock::{Clock, Time};
use crate::error::{Error, Result};
use crate::rail::{Event, Events, Rail};
use crossbeam_channel::{Receiver, Sender};
use railfs_proto::limits::INLINE_CHECK;
use railfs_proto::name::ObjectName;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often the core is told the time while something is under way.
const TICK: Duration = Duration::from_millis(10);
/// How long the timer sleeps at most while nothing is under way.
const PARK: Duration = Duration::from_secs(1);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

enum Outcome {
    Parts(Vec<Arc<Landed>>),
    Error(Error),
}

enum Stage {
    /// The thread that brought the read may still answer it.
    Inline,
    /// It was answered before the thread gave up waiting.
    Ready(Outcome),
    /// A worker will answer.
    Handed(ReadReply),
    /// Somebody is answering.
    Taken,
}

struct Slot {
    bytes: Range<u64>,
    stage: Mutex<Stage>,
    ready: Condvar,
}

enum Pending {
    Read(Arc<Slot>),
    Check(Done<()>),
    Lookup(Done<Found>),
}

enum Job {
    Answer(u64, Arc<Slot>, Outcome, ReadReply),
    Call(Box<dyn FnOnce() + Send>),
    Stop,
}

/// See the module.
pub struct Driver {
    clock: Clock,
    core: Mutex<Core>,
    rails: RwLock<Vec<Arc<dyn Rail>>>,
    pending: Mutex<HashMap<u64, Pending>>,
    next: AtomicU64,
    jobs: Sender<Job>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    timer_parked: AtomicBool,
    timer: Mutex<Option<std::thread::Thread>>,
    closed: AtomicBool,
    renew: Box<dyn Fn() + Send + Sync>,
    up: (Mutex<u64>, Condvar),
    inline_answers: AtomicU64,
    /// Who wants to know that the timer and a worker still do what they are there for.
    pulses: Mutex<Vec<Done<()>>>,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}

struct Sink {
    driver: Weak<Driver>,
    rail: usize,
}

impl Events for Sink {
    fn event(&self, event: Event) {
        let Some(driver) = self.driver.upgrade() else { return };
        let state = matches!(event, Event::State(_));
        driver.with_core(|core, now| core.rail_event(now, self.rail, event));
        if state {
            *lock(&driver.up.0) += 1;
            driver.up.1.notify_all();
        }
    }
}

impl Driver {
    /// Starts the workers and the timer. `renew` is called when the server turns out to be another incarnation; it must
    /// not block.
    pub fn start(
        core: Core,
        clock: Clock,
        workers: usize,
        renew: Box<dyn Fn() + Send + Sync>,
    ) -> std::io::Result<Arc<Driver>> {
        let (jobs, queue) = crossbeam_channel::unbounded();
        let driver = Arc::new(Driver {
            clock,
            core: Mutex::new(core),
            rails: RwLock::new(Vec::new()),
            pending: Mutex::new(HashMap::new()),
            next: AtomicU64::new(1),
            jobs,
            threads: Mutex::new(Vec::new()),
            timer_parked: AtomicBool::new(false),
            timer: Mutex::new(None),
            closed: AtomicBool::new(false),
            renew,
            up: (Mutex::new(0), Condvar::new()),
            inline_answers: AtomicU64::new(0),
            pulses: Mutex::new(Vec::new()),
        });
        let mut threads = Vec::new();
        for number in 0..workers.max(1) {
            let (queue, weak) = (queue.clone(), Arc::downgrade(&driver));
            let builder = std::thread::Builder::new().name(format!("railfs-work{number}"));
            threads.push(builder.spawn(move || work(&queue, &weak))?);
        }
        let weak = Arc::downgrade(&driver);
        let timer = std::thread::Builder::new().name("railfs-timer".into()).spawn(move || tick(&weak))?;
        *lock(&driver.timer) = Some(timer.thread().clone());
        threads.push(timer);
        *lock(&driver.threads) = threads;
        Ok(driver)
    }

    /// A new rail: `start` gets who is to be told and gives the rail.
    pub fn add_rail<E>(
        self: &Arc<Self>,
        name: &str,
        start: impl FnOnce(Arc<dyn Events>) -> std::result::Result<Arc<dyn Rail>, E>,
    ) -> std::result::Result<usize, E> {
        // Held throughout, so that numbers here and in the core agree.
        let mut rails = self.rails.write().unwrap_or_else(PoisonError::into_inner);
        let number = lock(&self.core).add_rail(name);
        let sink = Arc::new(Sink { driver: Arc::downgrade(self), rail: number });
        match start(sink) {
            Ok(rail) => {
                rails.push(rail);
                Ok(number)
            }
            Err(error) => {
                lock(&self.core).remove_rail(number);
                rails.push(Arc::new(NoRail));
                Err(error)
            }
        }
    }

    /// Closes a rail for good.
    pub fn remove_rail(&self, number: usize) {
        let rail = self.rails.read().unwrap_or_else(PoisonError::into_inner).get(number).cloned();
        if let Some(rail) = rail {
            rail.close();
            self.with_core(|core, now| {
                core.rail_event(now, number, Event::State(crate::rail::State::Down("no longer offered".into())));
                core.remove_rail(number);
            });
        }
    }

    /// A rail, by number.
    pub fn rail(&self, number: usize) -> Option<Arc<dyn Rail>> {
        self.rails.read().unwrap_or_else(PoisonError::into_inner).get(number).cloned()
    }

    /// Whom to ask from now on.
    pub fn session(&self, session: Session) {
        self.with_core(|core, _| core.session(session));
    }

    /// Waits until a rail is up; false when the time is over first. For starting up only.
    pub fn wait_for_rail(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut seen = lock(&self.up.0);
        loop {
            let now = self.clock.now();
            if lock(&self.core).rails().any(now) {
                return true;
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return false };
            seen = self.up.1.wait_timeout(seen, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Looks at the core (for status).
    pub fn inspect<T>(&self, look: impl FnOnce(&Core, Time) -> T) -> T {
        let now = self.clock.now();
        look(&lock(&self.core), now)
    }

    /// Warm reads that were answered on the thread that brought them.
    pub fn inline_answers(&self) -> u64 {
        self.inline_answers.load(Ordering::Relaxed)
    }

    /// Answers once the timer has looked at the core and a worker is free: all that a read needs of this side. It waits as
    /// long as they do, and is never called when they hang.
    pub fn pulse(&self, done: Done<()>) {
        if self.closed.load(Ordering::Acquire) {
            return done(Err(Error::Closed));
        }
        lock(&self.pulses).push(done);
        if let Some(timer) = &*lock(&self.timer) {
            timer.unpark();
        }
    }

    fn with_core<T>(&self, run: impl FnOnce(&mut Core, Time) -> T) -> T {
        let now = self.clock.now();
        let (result, actions) = {
            let mut core = lock(&self.core);
            let result = run(&mut core, now);
            (result, core.take_actions())
        };
        if !actions.is_empty() {
            self.execute(actions);
        }
        if self.timer_parked.swap(false, Ordering::AcqRel)
            && let Some(timer) = &*lock(&self.timer)
        {
            timer.unpark();
        }
        result
    }

    fn execute(&self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Submit { rail, submission } => {
                    if let Some(rail) = self.rail(rail) {
                        rail.submit(submission);
                    }
                }
                Action::Look { rail, look } => {
                    if let Some(rail) = self.rail(rail) {
                        rail.look(look);
                    }
                }
                Action::Cancel { rail, id } => {
                    if let Some(rail) = self.rail(rail) {
                        rail.cancel(id);
                    }
                }
                Action::Finish { id, parts } => self.deliver(id, Outcome::Parts(parts)),
                Action::Fail { id, error } => self.deliver(id, Outcome::Error(error)),
                Action::Checked { id } => {
                    if let Some(Pending::Check(done)) = lock(&self.pending).remove(&id) {
                        self.later(move || done(Ok(())));
                    }
                }
                Action::LookedUp { id, found } => {
                    if let Some(Pending::Lookup(done)) = lock(&self.pending).remove(&id) {
                        self.later(move || done(Ok(found)));
                    }
                }
                Action::Renew => (self.renew)(),
            }
        }
    }

    /// Runs something that may take a moment (a FUSE reply) on a worker: rail threads come through here.
    fn later(&self, call: impl FnOnce() + Send + 'static) {
        let _ = self.jobs.send(Job::Call(Box::new(call)));
    }

    fn deliver(&self, id: u64, outcome: Outcome) {
        let slot = match lock(&self.pending).get(&id) {
            Some(Pending::Read(slot)) => Some(slot.clone()),
            Some(_) => None,
            None => return,
        };
        let Some(slot) = slot else {
            let Outcome::Error(error) = outcome else { return };
            match lock(&self.pending).remove(&id) {
                Some(Pending::Check(done)) => self.later(move || done(Err(error))),
                Some(Pending::Lookup(done)) => self.later(move || done(Err(error))),
                _ => {}
            }
            return;
        };
        let mut stage = lock(&slot.stage);
        match std::mem::replace(&mut *stage, Stage::Taken) {
            Stage::Inline => {
                *stage = Stage::Ready(outcome);
                slot.ready.notify_one();
            }
            Stage::Handed(reply) => {
                let _ = self.jobs.send(Job::Answer(id, slot.clone(), outcome, reply));
            }
            other => *stage = other,
        }
    }

    /// Looks a name up.
    pub fn lookup(&self, name: &ObjectName, limit: Duration, done: Done<Found>) {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        if self.closed.load(Ordering::Acquire) {
            return done(Err(Error::Closed));
        }
        lock(&self.pending).insert(id, Pending::Lookup(done));
        self.with_core(|core, now| core.lookup(now, id, name, now.after(limit)));
    }

    /// Checks an object's version.
    pub fn check(&self, object: &Arc<Object>, limit: Duration, done: Done<()>) {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        if self.closed.load(Ordering::Acquire) {
            return done(Err(Error::Closed));
        }
        lock(&self.pending).insert(id, Pending::Check(done));
        self.with_core(|core, now| core.check(now, id, object, now.after(limit)));
    }

    /// Pins an object's version, until [`Driver::unpin`].
    pub fn pin(&self, object: &Arc<Object>, limit: Duration, done: Done<()>) {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        if self.closed.load(Ordering::Acquire) {
            return done(Err(Error::Closed));
        }
        lock(&self.pending).insert(id, Pending::Check(done));
        self.with_core(|core, now| core.pin(now, id, object, now.after(limit)));
    }

    /// One who pinned it does not need it any more.
    pub fn unpin(&self, version: u64) {
        self.with_core(|core, now| core.unpin(now, version));
    }

    /// Reads. Answers on this thread where the pages are there and the check comes in time, else on a worker.
    #[allow(clippy::too_many_arguments)]
    pub fn read(
        &self,
        object: &Arc<Object>,
        handle: u64,
        offset: u64,
        length: u32,
        freshness: Freshness,
        limit: Duration,
        reply: ReadReply,
    ) {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        if self.closed.load(Ordering::Acquire) {
            return reply(Err(Error::Closed));
        }
        let bytes = super::plan::clamp(&object.descriptor.striping, offset, length);
        let slot = Arc::new(Slot { bytes, stage: Mutex::new(Stage::Inline), ready: Condvar::new() });
        lock(&self.pending).insert(id, Pending::Read(slot.clone()));
        let complete =
            self.with_core(|core, now| core.read(now, id, object, handle, offset, length, freshness, now.after(limit)));
        let wait_until = complete.map(|Complete { parts }| {
            let until = Instant::now() + INLINE_CHECK;
            // The check is on its way: verify meanwhile. What fails here fails again in `answer`, where it counts.
            let _ = verify_all(&parts, &slot.bytes);
            until
        });
        let mut stage = lock(&slot.stage);
        loop {
            match std::mem::replace(&mut *stage, Stage::Taken) {
                Stage::Ready(outcome) => {
                    drop(stage);
                    self.inline_answers.fetch_add(1, Ordering::Relaxed);
                    return self.answer(id, &slot, outcome, reply);
                }
                Stage::Inline => {
                    let left = wait_until.and_then(|until| until.checked_duration_since(Instant::now()));
                    let Some(left) = left else {
                        *stage = Stage::Handed(reply);
                        return;
                    };
                    *stage = Stage::Inline;
                    stage = slot.ready.wait_timeout(stage, left).unwrap_or_else(PoisonError::into_inner).0;
                }
                other => {
                    // Not reachable: only this thread makes it Handed, and only Ready or Handed become Taken.
                    *stage = other;
                    return;
                }
            }
        }
    }

    /// Verifies, answers, and tells the core.
    fn answer(&self, id: u64, slot: &Arc<Slot>, outcome: Outcome, reply: ReadReply) {
        let mut parts = match outcome {
            Outcome::Error(error) => {
                lock(&self.pending).remove(&id);
                return reply(Err(error));
            }
            Outcome::Parts(parts) => parts,
        };
        match verify_all(&parts, &slot.bytes) {
            Ok(()) => {
                gather(&parts, &slot.bytes, reply);
                lock(&self.pending).remove(&id);
                // Before the core is told: memory that nobody reads can then be used at once.
                parts.clear();
                let length = slot.bytes.end - slot.bytes.start;
                self.with_core(|core, now| core.finished(now, id, Ok(length)));
            }
            Err((index, _)) if index >= parts.len() => {
                // No page at all: only a defect of the core could bring us here. The read fails, loudly.
                tracing::error!(read = id, "a read was finished without its pages");
                lock(&self.pending).remove(&id);
                reply(Err(Error::Invalid("the read was finished without its pages".into())));
                self.with_core(|core, now| core.finished(now, id, Ok(0)));
            }
            Err((index, page)) => {
                let bad = parts.swap_remove(index);
                parts.clear();
                *lock(&slot.stage) = Stage::Handed(reply);
                self.with_core(|core, now| core.finished(now, id, Err((bad, page))));
            }
        }
    }

    /// The reader closed its handle.
    pub fn release(&self, handle: u64) {
        self.with_core(|core, _| core.release(handle));
    }

    /// Fails what is under way, closes the rails, and ends the threads.
    pub fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.with_core(|core, _| core.close());
        let rails: Vec<_> = self.rails.read().unwrap_or_else(PoisonError::into_inner).clone();
        for rail in rails {
            rail.close();
        }
        let threads = std::mem::take(&mut *lock(&self.threads));
        for _ in &threads {
            let _ = self.jobs.send(Job::Stop);
        }
        if let Some(timer) = &*lock(&self.timer) {
            timer.unpark();
        }
        let this = std::thread::current().id();
        for thread in threads.into_iter().filter(|thread| thread.thread().id() != this) {
            let _ = thread.join();
        }
    }
}

/// The part that holds the byte at `at`, and how far it goes.
fn part_at(parts: &[Arc<Landed>], at: u64) -> Option<(usize, u64)> {
    parts.iter().enumerate().find_map(|(index, part)| {
        let start = part.origin().first * u64::from(part.origin().page_size);
        let end = start + u64::from(part.origin().length);
        (start..end).contains(&at).then_some((index, end))
    })
}

/// Verifies the bytes a read asked for; gives the part and the page that failed.
fn verify_all(parts: &[Arc<Landed>], bytes: &Range<u64>) -> std::result::Result<(), (usize, u64)> {
    let mut at = bytes.start;
    while at < bytes.end {
        // A gap cannot be: the core finishes a read only with all its pages. If it were, the read fails its check here.
        let (index, end) = part_at(parts, at).ok_or((0, at))?;
        let end = end.min(bytes.end);
        parts[index].verify(at..end).map_err(|bad| (index, bad.page))?;
        at = end;
    }
    Ok(())
}

thread_local! {
    /// Where a read that spans extents is made contiguous.
    static SPAN: std::cell::RefCell<Vec<u8>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Gives the bytes, whole: from the extent where they lie in one, else copied together.
fn gather(parts: &[Arc<Landed>], bytes: &Range<u64>, reply: impl FnOnce(Result<&[u8]>)) {
    let slice = |from: u64, to: u64| {
        let (index, end) = part_at(parts, from)?;
        parts[index].verify(from..end.min(to)).ok()
    };
    if bytes.is_empty() {
        return reply(Ok(&[]));
    }
    if let Some(whole) = slice(bytes.start, bytes.end).filter(|slice| slice.len() as u64 == bytes.end - bytes.start) {
        return reply(Ok(whole));
    }
    SPAN.with_borrow_mut(|span| {
        span.clear();
        while (span.len() as u64) < bytes.end - bytes.start {
            match slice(bytes.start + span.len() as u64, bytes.end) {
                Some(more) if !more.is_empty() => span.extend_from_slice(more),
                _ => return reply(Err(Error::Invalid("a verified page is not there any more".into()))),
            }
        }
        reply(Ok(span));
    });
}

fn work(queue: &Receiver<Job>, driver: &Weak<Driver>) {
    while let Ok(job) = queue.recv() {
        match job {
            Job::Stop => return,
            Job::Call(call) => call(),
            Job::Answer(id, slot, outcome, reply) => {
                let Some(driver) = driver.upgrade() else { return };
                driver.answer(id, &slot, outcome, reply);
            }
        }
    }
}

fn tick(driver: &Weak<Driver>) {
    loop {
        let Some(driver) = driver.upgrade() else { return };
        if driver.closed.load(Ordering::Acquire) {
            return;
        }
        let rest = || lock(&driver.core).rest(driver.clock.now(), PARK);
        let resting = rest().is_some();
        for done in std::mem::take(&mut *lock(&driver.pulses)) {
            driver.later(move || done(Ok(())));
        }
        if resting {
            driver.timer_parked.store(true, Ordering::Release);
            // Work that began between the look and the flag does not know that it has to wake us: look again.
            if let Some(rest) = rest() {
                drop(driver);
                std::thread::park_timeout(rest);
                continue;
            }
        }
        driver.with_core(|core, now| core.tick(now));
        drop(driver);
        std::thread::park_timeout(TICK);
    }
}

/// Stands where a rail could not be started, so that numbers agree. The core never chooses it.
#[derive(Debug)]
struct NoRail;

impl Rail for NoRail {
    fn submit(&self, _: crate::rail::Submission) {}
    fn cancel(&self, _: u64) {}
    fn counters(&self) -> crate::rail::Counters {
        crate::rail::Counters::default()
    }
    fn state(&self) -> crate::rail::State {
        crate::rail::State::Down("not started".into())
    }
    fn close(&self) {}
}

#[cfg(test)]
mod tests;
