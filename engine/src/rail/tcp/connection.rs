//! One connection, the same at both ends: one thread that polls, receives and finishes what submitters could not send.
//!
//! Guarantees:
//! * A submission that [`Connection::enter`] took is answered exactly once, by this connection's thread, by its deadline
//!   or when the connection ends; one that it did not take comes back with its reason.
//! * Only this thread receives, so a landing whose request has left the table, and which is not the receiver's sink any
//!   more, is fenced (I4).
//! * Frames of another session, and replies that nobody waits for, are dropped and counted (I5).
//! * Requests of the other side are given on only while answers are not piling up; then reading stops (I6).

mod incoming;

use self::incoming::Shared;
use super::Limits;
use super::out::{Item, Out, Progress, Turn};
use super::receive::{Frames, Receiver};
use super::signal::{Deferred, Latch, Running, Signal, lock, poll, tell_late};
use crate::clock::{Clock, Time};
use crate::memory::{Exposed, Fence, Fenced};
use crate::rail::liveness::{Action, Liveness};
use crate::rail::pending::{Entry, Pending, never_sent, refusal};
use crate::rail::totals::{Totals, add, subtract};
use crate::rail::{Cause, Counters, Event, Events, Hand, Handler, Lane, Rail, State, Submission};
use bytes::Bytes;
use railfs_proto::frame::FrameKind;
use rustix::event::{PollFd, PollFlags};
use std::collections::VecDeque;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::ThreadId;
use std::time::Duration;

/// Requests of the other side that may wait for the handler, and their bytes; beyond that reading stops.
const WAITING: usize = 1024;
const WAITING_BYTES: usize = 4 << 20;
/// One turn of the connection's thread sends about so many frames, then it receives.
const TURN: usize = 16;
/// A submitter sends so many frames at most that others queued while it was sending its own.
const FAVOUR: usize = 4;
/// How long closing waits for the thread.
const CLOSE: Duration = Duration::from_secs(1);

/// What a connection is made of.
pub(super) struct Parts {
    /// For logs and errors: the rail or listener, and the lane.
    pub(super) name: String,
    pub(super) peer: SocketAddr,
    pub(super) lane: Lane,
    pub(super) session: u64,
    pub(super) socket: TcpStream,
    pub(super) limits: Limits,
    pub(super) clock: Clock,
    pub(super) events: Arc<dyn Events>,
    pub(super) handler: Arc<dyn Handler>,
    /// Counted there, all alike.
    pub(super) totals: Vec<Arc<Totals>>,
}

/// See the module.
pub(super) struct Connection {
    parts: Parts,
    signal: Signal,
    pending: Mutex<Pending>,
    out: Mutex<Out>,
    cancelled: Mutex<Vec<u64>>,
    deferred: Deferred,
    /// Requests of the other side that the handler has.
    serving: AtomicUsize,
    /// Bytes of replies in the queue.
    replying: AtomicU64,
    /// The other side's requests that wait for the handler.
    waiting: Mutex<(VecDeque<(u64, Bytes)>, usize)>,
    /// The thread would go on with them when something is answered.
    throttled: AtomicBool,
    /// Why it must end; the first reason counts.
    end: OnceLock<String>,
    silent: AtomicBool,
    thread: OnceLock<ThreadId>,
    latch: Arc<Latch>,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("name", &self.parts.name).field("peer", &self.parts.peer).finish()
    }
}

impl Connection {
    pub(super) fn new(parts: Parts) -> std::io::Result<Arc<Connection>> {
        let limits = &parts.limits;
        let liveness = Liveness::new(parts.clock.now(), limits.suspect, limits.retire, limits.ping);
        Ok(Arc::new(Connection {
            pending: Mutex::new(Pending::new(limits.in_flight, liveness)),
            signal: Signal::new()?,
            out: Mutex::new(Out::default()),
            cancelled: Mutex::new(Vec::new()),
            deferred: Deferred::new(),
            serving: AtomicUsize::new(0),
            replying: AtomicU64::new(0),
            waiting: Mutex::default(),
            throttled: AtomicBool::new(false),
            end: OnceLock::new(),
            silent: AtomicBool::new(false),
            thread: OnceLock::new(),
            latch: Arc::default(),
            parts,
        }))
    }

    pub(super) fn lane(&self) -> Lane {
        self.parts.lane
    }

    fn count(&self, change: impl Fn(&Totals)) {
        self.parts.totals.iter().for_each(|totals| change(totals));
    }

    /// Takes a request, or gives it back with the reason.
    pub(super) fn enter(&self, submission: Submission) -> Result<(), (Submission, Cause)> {
        if let Some(cause) = refusal(&submission) {
            return Err((submission, cause));
        }
        let id = submission.id;
        let held = submission.landing.as_ref().map_or(0, |landing| u64::from(landing.extent.size()));
        let deadline = submission.deadline;
        let item = Item::plain(FrameKind::Request, self.parts.session, id, &submission.message);
        let now = self.parts.clock.now();
        // Before the table has it: the answer may be there before this thread goes on.
        self.count(|totals| {
            add(&totals.in_flight, 1);
            add(&totals.held_bytes, held);
        });
        let must_wake = {
            let mut pending = lock(&self.pending);
            match pending.enter(submission, now) {
                // The thread sleeps no longer than half of what is suspicious, so that it hardly ever has to be woken
                // for a new request.
                Ok(()) => pending.wake_at > deadline.min(now.after(self.parts.limits.suspect / 2)),
                Err(back) => {
                    drop(pending);
                    self.count(|totals| {
                        subtract(&totals.in_flight, 1);
                        subtract(&totals.held_bytes, held);
                    });
                    return Err(back);
                }
            }
        };
        if must_wake {
            self.signal.raise();
        }
        self.send(item);
        Ok(())
    }

    /// Queues a frame, and sends it at once where nothing is before it.
    fn send(&self, item: Item) {
        let turn = lock(&self.out).begin(item);
        match turn {
            Turn::Yours(item) => self.write(item, FAVOUR),
            Turn::Queued => {}
            Turn::Closed(item) => drop(item),
        }
    }

    /// Sends `item` and then up to `more` others. The turn is ours; it is given back.
    fn write(&self, item: Item, more: usize) {
        let mut next = Some(item);
        let mut left = more;
        let mut dropped = Vec::new();
        let mut rest = None;
        while let Some(mut item) = next.take() {
            let sent = |bytes: usize| self.count(|totals| add(&totals.bulk_sent, bytes as u64));
            match item.advance(&self.parts.socket, &sent) {
                Progress::Done => self.sent(&item),
                Progress::Blocked => {
                    rest = Some(item);
                    break;
                }
                Progress::Failed(why) => {
                    self.end(why);
                    break;
                }
            }
            if left == 0 {
                break;
            }
            left -= 1;
            let wanted = |id| lock(&self.pending).contains(id);
            next = lock(&self.out).next(&wanted, &mut dropped);
        }
        if lock(&self.out).give_back(rest) {
            self.wake();
        }
    }

    /// The connection's thread goes on with what waits.
    fn flush(&self) {
        let mut dropped = Vec::new();
        let wanted = |id| lock(&self.pending).contains(id);
        let item = {
            let mut out = lock(&self.out);
            if !out.resume() {
                return;
            }
            let item = out.next(&wanted, &mut dropped);
            if item.is_none() {
                out.give_back(None);
            }
            item
        };
        if let Some(item) = item {
            self.write(item, TURN);
        }
    }

    fn sent(&self, item: &Item) {
        if item.ping {
            lock(&self.pending).liveness.sent(self.parts.clock.now());
        }
        if item.pong {
            lock(&self.out).pong_sent();
        }
        if item.cost > 0 {
            self.replying.fetch_sub(item.cost, Ordering::SeqCst);
            self.unthrottle();
        }
    }

    fn unthrottle(&self) {
        if self.throttled.load(Ordering::SeqCst) && self.may_serve() {
            self.wake();
        }
    }

    /// Wakes the thread, unless that is who asks.
    fn wake(&self) {
        if self.thread.get() != Some(&std::thread::current().id()) {
            self.signal.raise();
        }
    }

    /// Tells the thread to end; the first reason counts.
    pub(super) fn end(&self, why: impl Into<String>) {
        let _ = self.end.set(why.into());
        self.signal.raise();
    }

    /// Sends the answer to the join, before anything else.
    pub(super) fn joined(&self, message: &[u8]) {
        self.send(Item::plain(FrameKind::Joined, self.parts.session, 0, message));
    }

    /// Whether a request waits for its reply.
    pub(super) fn waits_for(&self, id: u64) -> bool {
        lock(&self.pending).contains(id)
    }

    pub(super) fn give_up(&self, id: u64) {
        lock(&self.cancelled).push(id);
        self.signal.raise();
    }

    /// Has the thread tell it, or another one when that has ended.
    fn tell_later(&self, event: Event) {
        match self.deferred.push(event) {
            Ok(()) => self.signal.raise(),
            Err(event) => tell_late(self.parts.events.clone(), event),
        }
    }

    fn may_serve(&self) -> bool {
        self.serving.load(Ordering::SeqCst) < self.parts.limits.serving
            && self.replying.load(Ordering::SeqCst) <= self.parts.limits.reply_bytes
    }

    pub(super) fn is_silent(&self) -> bool {
        self.silent.load(Ordering::SeqCst)
    }

    /// Whether the thread has ended within the limit (or is the caller).
    pub(super) fn wait(&self, limit: Duration) -> bool {
        self.thread.get() == Some(&std::thread::current().id()) || self.latch.wait(limit)
    }

    /// To be held by the thread for as long as it runs; taken before the thread is started.
    pub(super) fn running(&self) -> Running {
        self.latch.enter()
    }

    /// The thread. `silent` is told when the other side falls silent and when it is back. Returns why it ended.
    pub(super) fn run(self: &Arc<Self>, silent: &dyn Fn(bool)) -> String {
        let _ = self.thread.set(std::thread::current().id());
        let mut receiver = Receiver::new(self.parts.lane == Lane::Small);
        let turns = std::panic::AssertUnwindSafe(|| self.turns(&mut receiver, silent));
        let why = match std::panic::catch_unwind(turns) {
            Ok(why) => why,
            Err(_) => {
                tracing::error!(rail = %self.parts.name, peer = %self.parts.peer, "the connection's thread panicked");
                "internal error".into()
            }
        };
        self.finish(receiver, &why);
        why
    }

    fn turns(self: &Arc<Self>, receiver: &mut Receiver, silent: &dyn Fn(bool)) -> String {
        let frames = Shared { connection: self };
        let mut active = true;
        let mut more = false;
        let mut paused = false;
        loop {
            let now = self.parts.clock.now();
            if paused {
                // We are the one who does not listen.
                self.heard(silent);
            }
            if let Some(why) = self.duties(receiver, now, silent) {
                return why;
            }
            self.serve_waiting();
            let reading = !frames.paused();
            // After a pause there may be whole frames in the buffer, of which poll() knows nothing.
            more |= std::mem::replace(&mut paused, !reading) && reading;
            let sleep = self.sleep(now, std::mem::take(&mut active), more);
            let sending = lock(&self.out).waits();
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, reading);
            flags.set(PollFlags::OUT, sending.is_some());
            let (socket, woken) = {
                let mut fds = [PollFd::new(&self.parts.socket, flags), PollFd::new(&self.signal, PollFlags::IN)];
                if let Err(error) = poll(&mut fds, sleep) {
                    return format!("poll failed: {error}");
                }
                (fds[0].revents(), fds[1].revents())
            };
            if woken.contains(PollFlags::IN) {
                self.signal.clear();
            }
            if let Some(blocked) = sending
                && socket.contains(PollFlags::OUT)
            {
                self.flush();
                if blocked {
                    // It had been full: the other side is reading.
                    self.heard(silent);
                    active = true;
                }
            }
            let broken = socket.intersects(PollFlags::ERR | PollFlags::HUP);
            if reading && (more || broken || socket.contains(PollFlags::IN)) {
                match receiver.pump(&self.parts.socket, &frames) {
                    Ok(pumped) => {
                        more = pumped.more;
                        if pumped.heard {
                            active = true;
                            self.heard(silent);
                        }
                    }
                    Err(why) => return self.end.get().cloned().unwrap_or(why),
                }
            } else if broken {
                return "closed by the other side".into();
            }
        }
    }

    /// What the clock, cancels and deferred events call for. A reason ends the connection.
    fn duties(&self, receiver: &mut Receiver, now: Time, silent: &dyn Fn(bool)) -> Option<String> {
        for event in self.deferred.take() {
            self.parts.events.event(event);
        }
        if let Some(why) = self.end.get() {
            return Some(why.clone());
        }
        let cancelled = std::mem::take(&mut *lock(&self.cancelled));
        for id in cancelled {
            let entry = lock(&self.pending).remove(id);
            if let Some(entry) = entry {
                self.fail(receiver, id, entry, Cause::Cancelled);
            }
        }
        loop {
            let expired = lock(&self.pending).expired(now);
            let Some((id, entry)) = expired else { break };
            self.fail(receiver, id, entry, Cause::Expired);
        }
        loop {
            let action = {
                let mut pending = lock(&self.pending);
                if pending.is_empty() {
                    pending.liveness.idle();
                }
                pending.liveness.tick(now)
            };
            match action? {
                Action::Ping => {
                    self.count(|totals| add(&totals.pings, 1));
                    self.send(Item::plain(FrameKind::Ping, self.parts.session, now.0, &[]));
                }
                Action::Silent => self.set_silent(true, silent),
                Action::Alive => self.set_silent(false, silent),
                Action::Retire => {
                    return Some(format!("no sign of life for {:?}", self.parts.limits.retire));
                }
            }
        }
    }

    fn set_silent(&self, is: bool, silent: &dyn Fn(bool)) {
        if self.silent.swap(is, Ordering::SeqCst) != is {
            silent(is);
        }
    }

    fn heard(&self, silent: &dyn Fn(bool)) {
        let action = {
            let mut pending = lock(&self.pending);
            let more = !pending.is_empty();
            pending.liveness.heard(self.parts.clock.now(), more)
        };
        if action == Some(Action::Alive) {
            self.set_silent(false, silent);
        }
    }

    /// How long poll() may wait; `None` for ever. Announced in the table, so that a submitter knows whether to wake us.
    fn sleep(&self, now: Time, active: bool, at_once: bool) -> Option<Duration> {
        let mut pending = lock(&self.pending);
        let mut until = pending.next_deadline().min(pending.liveness.next());
        if active {
            // After activity a new request is likely: sleep shortly, so that it need not wake us to be watched over.
            until = until.min(now.after(self.parts.limits.suspect / 2));
        }
        pending.wake_at = until;
        if at_once {
            return Some(Duration::ZERO);
        }
        // Rounded up: waking just before the time would turn once more for nothing.
        (until != Time::NEVER).then(|| until.since(now) + Duration::from_micros(50))
    }

    fn fenced(&self, extent: Exposed) -> Option<Fenced> {
        self.count(|totals| subtract(&totals.held_bytes, u64::from(extent.size())));
        // Proved: only this thread receives into landings, it is not doing so now, and the landing has left both the
        // table and the receiver, so it never will again.
        extent.fenced(Fence::proved())
    }

    fn fail(&self, receiver: &mut Receiver, id: u64, entry: Entry, cause: Cause) {
        let extent = entry.landing.map(|(extent, _)| extent).or_else(|| receiver.take_landing(id));
        self.count(|totals| {
            add(&totals.failed, 1);
            subtract(&totals.in_flight, 1);
        });
        let hand = extent.and_then(|extent| self.fenced(extent)).map_or(Hand::None, Hand::Fenced);
        self.parts.events.event(Event::Failed { id, cause, hand });
    }

    /// After the last turn: nothing is received or sent any more.
    fn finish(&self, mut receiver: Receiver, why: &str) {
        let _ = self.end.set(why.to_string());
        let _ = self.parts.socket.shutdown(Shutdown::Both);
        // Dropped here, outside of the lock: they hold files, and closures of the handler.
        drop(lock(&self.out).close());
        drop(std::mem::take(&mut *lock(&self.waiting)));
        let entries = lock(&self.pending).close();
        for (id, entry) in entries {
            self.fail(&mut receiver, id, entry, Cause::Disconnected(why.to_string()));
        }
        for event in self.deferred.end() {
            self.parts.events.event(event);
        }
    }
}

impl Rail for Connection {
    fn submit(&self, submission: Submission) {
        self.count(|totals| add(&totals.submitted, 1));
        if let Err((submission, cause)) = self.enter(submission) {
            self.count(|totals| add(&totals.failed, 1));
            self.tell_later(never_sent(submission, cause));
        }
    }

    fn cancel(&self, id: u64) {
        if self.waits_for(id) {
            self.give_up(id);
        }
    }

    fn counters(&self) -> Counters {
        self.parts.totals.first().map(|totals| totals.counters()).unwrap_or_default()
    }

    fn state(&self) -> State {
        match self.end.get() {
            Some(why) => State::Down(why.clone()),
            None if self.is_silent() => State::Silent,
            None => State::Up,
        }
    }

    fn close(&self) {
        self.end("closed");
        if !self.wait(CLOSE) {
            tracing::error!(rail = %self.parts.name, peer = %self.parts.peer, "the connection's thread has not ended");
        }
    }
}
