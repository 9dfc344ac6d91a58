//! One connection of a verbs rail, the same at both ends: its queue pairs, one completion queue, and the thread that polls it.
//!
//! Guarantees:
//! * A submission that [`Group::enter`] took is answered exactly once, by this connection's thread, by its deadline or when
//!   the connection ends; one that it did not take comes back with its reason.
//! * Any failed completion, any frame that makes no sense, silence, and what the device tells of itself end the whole
//!   connection: all its requests fail, then its queue pairs are destroyed, then the landings that were held come back.
//! * Completions of another generation are dropped and counted (I5).
//! * Nobody is told anything under a lock.

mod turns;

use super::PIECE;
use super::credit::Credit;
use super::faults::{self, Faults};
use super::incoming::Answer;
use super::link::{Item, Shared, State, Told, Ways, looks_place};
use super::looks::Looks;
use super::source::Source;
use crate::clock::Clock;
use crate::memory::Arena;
use crate::rail::liveness::Liveness;
use crate::rail::pending::{Pending, refusal};
use crate::rail::tcp::Limits;
use crate::rail::tcp::signal::{Deferred, Latch, Running, Signal, lock, tell_late};
use crate::rail::totals::{Totals, add, ended, subtract};
use crate::rail::{Cause, Counters, Event, Events, Handler, Incoming, Lane, Look, Submission};
use crate::verbs::{Buffers, Cq, DeviceEvent, Mr, Pd, Qp, Rts};
use bytes::Bytes;
use railfs_proto::verbs::{FrameKind, SlotArray};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// Requests of the other side that may wait for the handler; more is a flood, and ends the connection.
const WAITING: usize = 1024;

/// What a connection is made of.
pub(super) struct Parts {
    /// For logs and errors.
    pub(super) name: String,
    pub(super) peer: String,
    pub(super) session: u64,
    pub(super) generation: u32,
    pub(super) limits: Limits,
    pub(super) clock: Clock,
    pub(super) events: Arc<dyn Events>,
    pub(super) handler: Arc<dyn Handler>,
    pub(super) totals: Vec<Arc<Totals>>,
    /// Where replies' bytes come from; none at the client.
    pub(super) source: Option<Source>,
    /// The client's arena.
    pub(super) landing: Option<Arc<Mr>>,
    /// A server's landings, where the other side offers what it is asked for.
    pub(super) pulled: Option<Arc<Mr>>,
    /// Where a client's offers lie: the arena again.
    pub(super) offered: Option<Arena>,
    /// Bulk bytes that were READ.
    pub(super) read: Arc<AtomicU64>,
    /// Where windows are made; none: landings are not opened by windows.
    pub(super) windows: Option<Pd>,
    /// See [`crate::verbs::DeviceFacts::soft`].
    pub(super) soft: bool,
    pub(super) cq: Cq,
    pub(super) buffers: Buffers,
    /// Bulk first, the one for small messages last; receives are posted on each.
    pub(super) pairs: Vec<Qp<Rts>>,
    /// So many.
    pub(super) depth: u16,
    /// Of the other side.
    pub(super) their_depth: u32,
    pub(super) their_piece: u32,
    /// Of the other side, to be READ through the last pair.
    pub(super) slots: Option<SlotArray>,
}

/// One queue pair.
pub(super) struct Link {
    index: u8,
    pub(super) state: Mutex<State>,
    silent: AtomicBool,
    ready: AtomicBool,
}

/// See the module.
pub(super) struct Group {
    pub(super) parts: Fixed,
    pub(super) links: Vec<Link>,
    signal: Signal,
    cancelled: Mutex<Vec<u64>>,
    deferred: Deferred,
    /// Requests on the bulk lane and on the small one.
    in_flight: [AtomicUsize; 2],
    /// Which link the next request of a lane takes.
    turn: [AtomicUsize; 2],
    /// Requests of the other side that the handler has, and bytes of replies that wait.
    pub(super) serving: AtomicUsize,
    pub(super) replying: AtomicU64,
    waiting: Mutex<VecDeque<(usize, u64, Bytes)>>,
    end: OnceLock<String>,
    polite: AtomicBool,
    thread: OnceLock<std::thread::ThreadId>,
    latch: Arc<Latch>,
}

/// What of [`Parts`] stays as it is.
pub(super) struct Fixed {
    pub(super) name: String,
    pub(super) peer: String,
    pub(super) session: u64,
    generation: u32,
    pub(super) limits: Limits,
    pub(super) clock: Clock,
    events: Arc<dyn Events>,
    handler: Arc<dyn Handler>,
    totals: Vec<Arc<Totals>>,
    pub(super) source: Option<Source>,
    pub(super) landing: Option<Arc<Mr>>,
    pulled: Option<Arc<Mr>>,
    pub(super) offered: Option<Arena>,
    read: Arc<AtomicU64>,
    pub(super) cq: Cq,
    buffers: Buffers,
    piece: usize,
    /// Landings are opened by windows, each of one queue pair alone.
    pub(super) windows: bool,
    pub(super) faults: Faults,
    slots: Option<SlotArray>,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Group").field("name", &self.parts.name).field("peer", &self.parts.peer).finish()
    }
}

fn lane_index(lane: Lane) -> usize {
    match lane {
        Lane::Bulk => 0,
        Lane::Small => 1,
    }
}

impl Group {
    pub(super) fn new(parts: Parts) -> std::io::Result<Arc<Group>> {
        let limits = &parts.limits;
        let now = parts.clock.now();
        let opens = parts.landing.is_some();
        let count = parts.pairs.len();
        let faults = faults::of(&parts.name);
        let by_windows = parts.windows.is_some();
        let (depth, soft) = (parts.depth, parts.soft);
        let link = |(index, pair): (usize, Qp<Rts>)| {
            let windows = parts.windows.clone().map(|pd| (pd, super::prepare::windows_of(index + 1 == count, depth)));
            let liveness = Liveness::new(now, limits.suspect, limits.retire, limits.ping);
            // The lane's limit is counted by the group.
            let pending = Pending::new(limits.in_flight, liveness);
            let credit = Credit::new(depth.into(), parts.their_depth);
            Link {
                // At most MAX_PAIRS.
                index: u8::try_from(index).unwrap_or(u8::MAX),
                state: Mutex::new(State::new(pair, depth, pending, credit, windows, Ways { opens, soft, faults })),
                silent: AtomicBool::new(false),
                ready: AtomicBool::new(false),
            }
        };
        let looks = parts.slots.map(|slots| Looks::new(slots, looks_place(count)));
        let links: Vec<Link> = parts.pairs.into_iter().enumerate().map(link).collect();
        if let Some(last) = links.last() {
            lock(&last.state).looks = looks;
        }
        Ok(Arc::new(Group {
            links,
            signal: Signal::new()?,
            cancelled: Mutex::default(),
            deferred: Deferred::new(),
            in_flight: Default::default(),
            turn: Default::default(),
            serving: AtomicUsize::new(0),
            replying: AtomicU64::new(0),
            waiting: Mutex::default(),
            end: OnceLock::new(),
            polite: AtomicBool::new(false),
            thread: OnceLock::new(),
            latch: Arc::default(),
            parts: Fixed {
                name: parts.name,
                peer: parts.peer,
                session: parts.session,
                generation: parts.generation,
                limits: parts.limits,
                clock: parts.clock,
                events: parts.events,
                handler: parts.handler,
                totals: parts.totals,
                source: parts.source,
                landing: parts.landing,
                pulled: parts.pulled,
                offered: parts.offered,
                read: parts.read,
                cq: parts.cq,
                buffers: parts.buffers,
                piece: parts.their_piece.min(PIECE) as usize,
                windows: by_windows,
                faults,
                slots: parts.slots,
            },
        }))
    }

    pub(super) fn shared(&self, index: usize) -> Shared<'_> {
        Shared {
            index: u8::try_from(index).unwrap_or(u8::MAX),
            generation: self.parts.generation,
            session: self.parts.session,
            buffers: &self.parts.buffers,
            landing: self.parts.landing.as_ref(),
            pulled: self.parts.pulled.as_ref(),
            piece: self.parts.piece,
            now: self.parts.clock.now(),
        }
    }

    pub(super) fn count(&self, change: impl Fn(&Totals)) {
        self.parts.totals.iter().for_each(|totals| change(totals));
    }

    fn links_of(&self, lane: Lane) -> &[Link] {
        let (bulk, small) = self.links.split_at(self.links.len().saturating_sub(1));
        match lane {
            Lane::Bulk => bulk,
            Lane::Small => small,
        }
    }

    fn lane_of(&self, index: usize) -> Lane {
        if index + 1 == self.links.len() { Lane::Small } else { Lane::Bulk }
    }

    /// Takes a request, or gives it back with the reason.
    pub(super) fn enter(&self, submission: Submission) -> Result<(), (Submission, Cause)> {
        if let Some(cause) = refusal(&submission) {
            return Err((submission, cause));
        }
        let lane = submission.lane;
        let links = self.links_of(lane);
        // In turn: fetches are of much the same size, and each queue pair is served by itself.
        let turn = self.turn[lane_index(lane)].fetch_add(1, Ordering::Relaxed) % links.len().max(1);
        let Some(link) = links.get(turn) else { return Err((submission, Cause::Down)) };
        let in_flight = &self.in_flight[lane_index(lane)];
        let limit = self.parts.limits.in_flight;
        if in_flight.fetch_add(1, Ordering::SeqCst) >= limit {
            in_flight.fetch_sub(1, Ordering::SeqCst);
            let text = format!("{limit} requests wait for replies, the limit of a connection");
            return Err((submission, Cause::Refused(text)));
        }
        let held = submission.landing.as_ref().map_or(0, |landing| u64::from(landing.extent.size()));
        let deadline = submission.deadline;
        // Before the table has it: the answer may be there before this thread goes on.
        self.count(|totals| {
            add(&totals.in_flight, 1);
            add(&totals.held_bytes, held);
        });
        let mut told = Told::default();
        let index = usize::from(link.index);
        let (entered, posted, must_wake) = {
            let mut state = lock(&link.state);
            let shared = self.shared(index);
            match state.enter(submission, &shared) {
                Ok(()) => {
                    let posted = state.flush(&shared, &mut told);
                    let soon = shared.now.after(self.parts.limits.suspect / 2);
                    (Ok(()), posted, state.pending.wake_at > deadline.min(soon))
                }
                Err(back) => (Err(back), Ok(()), false),
            }
        };
        if let Err(back) = entered {
            in_flight.fetch_sub(1, Ordering::SeqCst);
            self.count(|totals| {
                subtract(&totals.in_flight, 1);
                subtract(&totals.held_bytes, held);
            });
            return Err(back);
        }
        self.note(&told);
        if let Err(why) = posted {
            self.end(why);
        } else if must_wake {
            self.wake();
        }
        Ok(())
    }

    /// READs slot words. `Err`: nothing was posted.
    pub(super) fn look(&self, look: &Look) -> Result<(), Cause> {
        let index = self.links.len().saturating_sub(1);
        let Some(link) = self.links.get(index) else { return Err(Cause::Down) };
        let (posted, must_wake) = {
            let mut state = lock(&link.state);
            let shared = self.shared(index);
            let posted = state.look(look, &shared)?;
            let soon = shared.now.after(self.parts.limits.suspect / 2);
            (posted, state.pending.wake_at > look.deadline.min(soon))
        };
        if let Err(why) = posted {
            self.end(why);
        } else if must_wake {
            self.wake();
        }
        Ok(())
    }

    /// Counts what a link did while a submitter had it; such a one never has anything to tell.
    pub(super) fn note(&self, told: &Told) {
        self.count(|totals| {
            add(&totals.bulk_sent, told.sent_bulk);
        });
        self.parts.read.fetch_add(told.read, Ordering::Relaxed);
        if told.replied > 0 {
            self.replying.fetch_sub(told.replied.min(self.replying.load(Ordering::SeqCst)), Ordering::SeqCst);
            self.answered();
        }
    }

    /// Queues a frame of our own on a link.
    pub(super) fn send(&self, index: usize, item: Item) {
        let Some(link) = self.links.get(index) else { return };
        let mut told = Told::default();
        let result = {
            let mut state = lock(&link.state);
            state.push(item);
            state.flush(&self.shared(index), &mut told)
        };
        self.note(&told);
        if let Err(why) = result {
            self.end(why);
        }
    }

    /// Says on every link that our queue pairs are ready: the first frame.
    pub(super) fn say_ready(&self) {
        for index in 0..self.links.len() {
            self.send(index, Item::plain(FrameKind::Ready, self.parts.session, 0));
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        self.links.iter().all(|link| link.ready.load(Ordering::SeqCst))
    }

    pub(super) fn wake(&self) {
        if self.thread.get() != Some(&std::thread::current().id()) {
            self.signal.raise();
        }
    }

    /// Tells the thread to end; the first reason counts.
    pub(super) fn end(&self, why: impl Into<String>) {
        let _ = self.end.set(why.into());
        self.signal.raise();
    }

    /// Ends it by our own will: the other side is told first.
    pub(super) fn close(&self, why: &str) {
        self.polite.store(true, Ordering::SeqCst);
        self.end(why);
    }

    pub(super) fn is_polite(&self) -> bool {
        self.polite.load(Ordering::SeqCst)
    }

    pub(super) fn why(&self) -> Option<&String> {
        self.end.get()
    }

    /// Whether an event is about a queue or queue pair of this connection.
    pub(super) fn owns(&self, event: &DeviceEvent) -> bool {
        match event {
            DeviceEvent::CqError(mark) => self.parts.cq.mark() == *mark,
            DeviceEvent::QpError(number) => {
                let of = |link: &Link| lock(&link.state).pair.as_ref().is_some_and(|pair| pair.number() == *number);
                self.links.iter().any(of)
            }
            _ => false,
        }
    }

    /// What of the other side's memory may be READ.
    pub(super) fn slots(&self) -> Option<SlotArray> {
        self.parts.slots
    }

    pub(super) fn waits_for(&self, id: u64) -> bool {
        let waits =
            |state: &State| state.pending.contains(id) || state.looks.as_ref().is_some_and(|looks| looks.contains(id));
        self.links.iter().any(|link| waits(&lock(&link.state)))
    }

    pub(super) fn give_up(&self, id: u64) {
        lock(&self.cancelled).push(id);
        self.signal.raise();
    }

    pub(super) fn is_silent(&self) -> bool {
        self.links.iter().any(|link| link.silent.load(Ordering::SeqCst))
    }

    pub(super) fn running(&self) -> Running {
        self.latch.enter()
    }

    pub(super) fn wait(&self, limit: Duration) -> bool {
        self.thread.get() == Some(&std::thread::current().id()) || self.latch.wait(limit)
    }

    fn may_serve(&self) -> bool {
        self.serving.load(Ordering::SeqCst) < self.parts.limits.serving
            && self.replying.load(Ordering::SeqCst) <= self.parts.limits.reply_bytes
    }

    /// Something was answered: what waits may be given on.
    pub(super) fn answered(&self) {
        if !lock(&self.waiting).is_empty() && self.may_serve() {
            self.wake();
        }
    }

    fn serve_waiting(self: &Arc<Self>) {
        while self.may_serve() {
            let Some((link, id, message)) = lock(&self.waiting).pop_front() else { return };
            self.serving.fetch_add(1, Ordering::SeqCst);
            let replier = Box::new(Answer { group: self.clone(), link, id });
            self.parts.handler.request(Incoming { message, replier });
        }
    }

    /// Counts and tells, with no lock held.
    pub(super) fn tell(self: &Arc<Self>, index: usize, told: Told) {
        self.count(|totals| {
            add(&totals.failed, told.failed);
            add(&totals.stale, told.stale);
            add(&totals.bulk_received, told.received);
            subtract(&totals.in_flight, told.ended);
            subtract(&totals.held_bytes, told.released_bytes);
        });
        self.note(&told);
        ended(&self.in_flight[lane_index(self.lane_of(index))], usize::try_from(told.ended).unwrap_or(usize::MAX));
        for event in told.events {
            self.parts.events.event(event);
        }
        if told.requests.is_empty() {
            return;
        }
        let waiting = {
            let mut waiting = lock(&self.waiting);
            waiting.extend(told.requests.into_iter().map(|(id, message)| (index, id, message)));
            waiting.len()
        };
        if waiting > WAITING {
            self.end(format!("{waiting} requests at once"));
        }
        self.serve_waiting();
    }

    pub(super) fn tell_later(&self, event: Event) {
        match self.deferred.push(event) {
            Ok(()) => self.signal.raise(),
            Err(event) => tell_late(self.parts.events.clone(), event),
        }
    }

    pub(super) fn counters(&self) -> Counters {
        self.parts.totals.first().map(|totals| totals.counters()).unwrap_or_default()
    }
}
