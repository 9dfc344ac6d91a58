//! One queue pair and what waits on it: requests for their replies, messages for credit, landings for their fences.
//!
//! Guarantees:
//! * What a landing is opened with (a window's key) is in the request that is posted with the binding, and nowhere else.
//! * A landing leaves this table fenced, or as [`Hand::Held`] and later released: see the functions that make a `Fence`.
//! * Frames go out whole, in the order they were queued; what nobody waits for any more does not go out.
//! * Nothing here tells anybody anything: what is to be told is collected, and told when no lock is held.

mod answers;

use super::credit::Credit;
use super::faults::Faults;
use super::looks::{self, Looks};
use super::offers::Offers;
use super::posted::{Posted, Queue};
use super::{DEPTH, GRACE, PIECE, QUEUED};
use crate::clock::Time;
use crate::memory::{Exposed, Fence, Fenced};
use crate::rail::pending::Pending;
use crate::rail::slab::Lent;
use crate::rail::{Cause, Event, Hand, Submission, land};
use crate::verbs::{Buffers, Mr, Pd, Qp, Rts, Slice, Window, Work, WrId, WrKind};
use bytes::Bytes;
use railfs_proto::verbs::{Assembly, FrameKind, Header, encode};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// What comes before a frame's first piece, in the same post.
pub(super) enum Before {
    /// Nothing.
    Nothing,
    /// A window is bound over the landing.
    Bind(Slice),
    /// The bulk is written.
    Write {
        /// Keeps the bytes until the device has read them.
        source: Lent,
        from: Slice,
        address: u64,
        key: u32,
    },
    /// The bulk is opened to be read, by a window.
    Offer {
        /// Keeps the bytes until the other side has read them.
        source: Fenced,
        from: Slice,
    },
}

impl Before {
    fn takes_window(&self) -> bool {
        matches!(self, Before::Bind(_) | Before::Offer { .. })
    }
}

/// A frame on its way out.
pub(super) struct Item {
    pub(super) header: Header,
    pub(super) message: Bytes,
    pub(super) carried: Bytes,
    pub(super) before: Before,
    /// The other side's key that the last piece takes away.
    pub(super) invalidate: Option<u32>,
    /// Payload bytes that have gone out.
    at: usize,
}

impl Item {
    pub(super) fn new(header: Header, message: Bytes) -> Item {
        let message_bytes = u32::try_from(message.len()).unwrap_or(u32::MAX);
        let header = Header { message: message_bytes, ..header };
        Item { header, message, carried: Bytes::new(), before: Before::Nothing, invalidate: None, at: 0 }
    }
    pub(super) fn plain(kind: FrameKind, session: u64, id: u64) -> Item {
        Item::new(Header::plain(kind, session, id), Bytes::new())
    }
    /// Bulk bytes of a reply that it holds.
    pub(super) fn cost(&self) -> u64 {
        if matches!(self.header.kind, FrameKind::Reply | FrameKind::Offer) { u64::from(self.header.bulk) } else { 0 }
    }
}

/// A landing that was given up.
struct Held {
    extent: Exposed,
    window: Option<Window>,
    /// When its window is taken away.
    until: Time,
}

/// What happens when a window has been taken away by ourselves.
enum Then {
    Release(u64),
    Reply { id: u64, message: Bytes, bulk: u32 },
}

/// An invalidation under way.
struct Invalidating {
    slot: u16,
    window: Window,
    extent: Exposed,
    then: Then,
    since: Time,
}

/// A request of the other side that has not been answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Serving {
    pub(super) address: u64,
    pub(super) key: u32,
    pub(super) length: u32,
    /// The key is no window's.
    pub(super) keeps: bool,
    /// The bulk may be offered.
    pub(super) reads: bool,
}

/// What is to be told when the lock is gone.
#[derive(Default)]
pub(super) struct Told {
    pub(super) events: Vec<Event>,
    /// Requests of the other side.
    pub(super) requests: Vec<(u64, Bytes)>,
    pub(super) failed: u64,
    pub(super) ended: u64,
    pub(super) released_bytes: u64,
    pub(super) received: u64,
    /// Of which so many by READ.
    pub(super) read: u64,
    pub(super) sent_bulk: u64,
    pub(super) stale: u64,
    pub(super) replied: u64,
    /// The other side's queue pair is ready.
    pub(super) ready: bool,
}

/// What a link needs of its group.
pub(super) struct Shared<'a> {
    pub(super) index: u8,
    pub(super) generation: u32,
    pub(super) session: u64,
    pub(super) buffers: &'a Buffers,
    /// The client's arena.
    pub(super) landing: Option<&'a Arc<Mr>>,
    /// A server's landings, where the other side offers.
    pub(super) pulled: Option<&'a Arc<Mr>>,
    /// Bytes of a piece that the other side receives.
    pub(super) piece: usize,
    pub(super) now: Time,
}

impl Shared<'_> {
    /// Names work on this link.
    pub(super) fn id(&self, kind: WrKind, slot: u16, used: u16) -> WrId {
        WrId { kind, pair: self.index, slot, used, generation: self.generation }
    }
}

/// See the module.
pub(super) struct State {
    pub(super) pair: Option<Qp<Rts>>,
    pub(super) pending: Pending,
    pub(super) credit: Credit,
    pub(super) assembly: Assembly,
    pub(super) serving: HashMap<u64, Serving>,
    out: VecDeque<Item>,
    /// What a fault holds back, until when.
    later: VecDeque<(Time, Item)>,
    free_slots: Vec<u16>,
    pub(super) posted: Queue<Lent>,
    /// Bound to nothing.
    pub(super) windows: Vec<Window>,
    /// Windows that may still be made, in this domain.
    unmade: Option<(Pd, usize)>,
    pub(super) use_windows: bool,
    pub(super) ways: Ways,
    /// By request.
    bound: HashMap<u64, Window>,
    held: HashMap<u64, Held>,
    invalidating: VecDeque<Invalidating>,
    next_invalidation: u16,
    pub(super) offers: Offers,
    scratch: Vec<u8>,
    /// What of the other side's memory may be READ.
    pub(super) looks: Option<Looks>,
}

/// How a link treats landings.
#[derive(Clone, Copy)]
pub(super) struct Ways {
    /// They are opened to the other side.
    pub(super) opens: bool,
    /// See [`crate::verbs::DeviceFacts::soft`].
    pub(super) soft: bool,
    pub(super) faults: Faults,
}

/// Receives of link `index` lie before its send slots.
fn place(index: u8, slot: u16, send: bool) -> usize {
    let slots = usize::from(DEPTH);
    let first = usize::from(index) * 2 * slots + if send { slots } else { 0 };
    (first + usize::from(slot)) * PIECE as usize
}

/// Bytes of messages of so many links, and of the words of slots.
pub(super) fn buffer_bytes(links: usize) -> usize {
    looks_place(links) + looks::BYTES
}

/// Where the words of slots land: after the messages.
pub(super) fn looks_place(links: usize) -> usize {
    links * 2 * usize::from(DEPTH) * PIECE as usize
}

/// Where a receive of a link lies.
pub(super) fn receive_place(index: u8, slot: u16) -> usize {
    place(index, slot, false)
}

impl State {
    pub(super) fn new(
        pair: Qp<Rts>,
        depth: u16,
        pending: Pending,
        credit: Credit,
        windows: Option<(Pd, usize)>,
        ways: Ways,
    ) -> State {
        State {
            pair: Some(pair),
            pending,
            credit,
            assembly: Assembly::default(),
            serving: HashMap::new(),
            out: VecDeque::new(),
            later: VecDeque::new(),
            free_slots: (0..depth).rev().collect(),
            posted: Queue::new(depth),
            windows: Vec::new(),
            use_windows: windows.is_some(),
            unmade: windows,
            ways,
            bound: HashMap::new(),
            held: HashMap::new(),
            invalidating: VecDeque::new(),
            next_invalidation: 0,
            offers: Offers::default(),
            scratch: Vec::with_capacity(PIECE as usize),
            looks: None,
        }
    }

    /// Enters a request and queues it. `Err` gives it back.
    pub(super) fn enter(&mut self, submission: Submission, shared: &Shared<'_>) -> Result<(), (Submission, Cause)> {
        if self.pair.is_none() {
            return Err((submission, Cause::Down));
        }
        let (id, message) = (submission.id, submission.message.clone());
        self.pending.enter(submission, shared.now)?;
        let mut item = Item::new(Header::plain(FrameKind::Request, shared.session, id), message);
        let landing = self.pending.get(id).and_then(|entry| entry.landing.as_ref());
        if let Some((extent, length)) = landing {
            item.header.bulk = *length;
            // A server reads into its own landings what the other side offers; without that the bulk is carried.
            let pointer = land::address(extent);
            let slice = pointer.and_then(|pointer| shared.pulled?.slice_at(pointer, *length));
            item.header.reads = slice.is_some() && *length > 0;
            if let (Some(mr), true) = (shared.landing, *length > 0) {
                let slice = land::address(extent).and_then(|pointer| mr.slice_at(pointer, *length));
                if let Some(slice) = slice {
                    item.header.address = slice.address();
                    if self.use_windows {
                        item.before = Before::Bind(slice);
                    } else {
                        item.header.key = mr.remote_key();
                        item.header.keeps = true;
                    }
                }
            }
        }
        self.out.push_back(item);
        Ok(())
    }

    /// Before what waits, but never inside a frame.
    pub(super) fn push_first(&mut self, item: Item) {
        let inside = self.out.front().is_some_and(|front| front.at > 0);
        self.out.insert(usize::from(inside).min(self.out.len()), item);
    }

    pub(super) fn push(&mut self, item: Item) {
        self.out.push_back(item);
    }

    /// A fault: the reply goes out at that time, whatever becomes of its request.
    pub(super) fn push_later(&mut self, at: Time, item: Item) {
        self.later.push_back((at, item));
    }

    /// What was held back until now goes out.
    pub(super) fn held_back_until(&mut self, now: Time) {
        while self.later.front().is_some_and(|(at, _)| *at <= now) {
            self.out.extend(self.later.pop_front().map(|(_, item)| item));
        }
    }

    /// Posts what may be posted. An error ends the connection.
    pub(super) fn flush(&mut self, shared: &Shared<'_>, told: &mut Told) -> Result<(), String> {
        self.post_frames(shared, told)?;
        // Beside our own requests, which have their own limit.
        let (waiting, own) = (self.out.len(), self.pending.len());
        if waiting > QUEUED + own {
            return Err(format!(
                "{waiting} frames wait to be sent, and the other side takes none: at most {QUEUED} may"
            ));
        }
        Ok(())
    }

    fn post_frames(&mut self, shared: &Shared<'_>, told: &mut Told) -> Result<(), String> {
        if self.out.is_empty() && self.credit.wants_to_tell() {
            self.out.push_back(Item::plain(FrameKind::Credit, shared.session, 0));
        }
        self.read_offers(shared)?;
        while let Some(front) = self.out.front_mut() {
            let Some(pair) = &mut self.pair else { return Ok(()) };
            if !self.credit.may_send() || pair.room() < 2 {
                return Ok(());
            }
            let first = front.at == 0;
            if first && front.before.takes_window() && self.windows.is_empty() {
                // Made when they are first needed: a connection that fetches nothing needs none.
                match &mut self.unmade {
                    Some((pd, left)) if *left > 0 => {
                        *left -= 1;
                        self.windows.push(Window::new(pd).map_err(|error| error.to_string())?);
                    }
                    _ => return Ok(()),
                }
            }
            let Some(slot) = self.free_slots.pop() else { return Ok(()) };
            let mut window = None;
            if first && front.before.takes_window() {
                let taken = self.windows.pop();
                front.header.key = taken.as_ref().map_or(0, Window::upcoming_key);
                window = taken;
            }
            let posted = self.credit.send();
            let (message, carried) = (&front.message, &front.carried);
            let payload = |at: usize, length: usize| {
                let (from, at) = if at < message.len() { (message, at) } else { (carried, at - message.len()) };
                &from[at.min(from.len())..(at + length).min(from.len())]
            };
            front.at += encode(&front.header, posted, front.at, shared.piece, payload, &mut self.scratch);
            let whole = front.at >= front.header.payload();
            let offset = place(shared.index, slot, true);
            let length = u32::try_from(self.scratch.len()).unwrap_or(u32::MAX);
            let from = shared.buffers.mr().slice(offset as u64, length);
            let Some(from) = from.filter(|_| shared.buffers.fill(offset, &self.scratch)) else {
                return Err(format!("a message of {length} bytes has no room in its slot"));
            };
            let used = self.posted.number();
            let id = |kind| shared.id(kind, slot, used);
            let invalidate = front.invalidate.filter(|_| whole);
            let send = Work::Send { id: id(WrKind::Send), from, invalidate };
            let before = if first { std::mem::replace(&mut front.before, Before::Nothing) } else { Before::Nothing };
            let (mut source, mut offered) = (None, None);
            let result = match (before, &mut window) {
                (Before::Bind(landing), Some(window)) => {
                    pair.post(&mut [Work::Bind { id: id(WrKind::Bind), window, landing }, send]).map(|()| 2)
                }
                (Before::Write { source: bytes, from, address, key }, _) => {
                    told.sent_bulk += u64::from(from.length());
                    source = Some(bytes);
                    pair.post(&mut [Work::Write { id: id(WrKind::Write), from, address, key }, send]).map(|()| 2)
                }
                (Before::Offer { source: bytes, from }, Some(window)) => {
                    told.sent_bulk += u64::from(from.length());
                    offered = Some(bytes);
                    pair.post(&mut [Work::Offer { id: id(WrKind::Bind), window, source: from }, send]).map(|()| 2)
                }
                _ => pair.post(&mut [send]).map(|()| 1),
            };
            let requests = result.map_err(|error| {
                // Whether the device took part of it is not known: the bytes stay until the pair is gone.
                if let Some(source) = source.take() {
                    self.posted.keep(source);
                }
                error.to_string()
            });
            match (offered, window) {
                (Some(source), Some(window)) => self.offers.open(front.header.id, source, window, shared.now),
                (None, Some(window)) => drop(self.bound.insert(front.header.id, window)),
                (_, None) => {}
            }
            let posted = Posted { kind: WrKind::Send, slot, used, requests: requests?, source };
            self.posted.push(posted, shared.now);
            if whole {
                told.sent_bulk += u64::from(front.header.carried);
                told.replied += front.cost();
                self.out.pop_front();
            }
            if self.out.is_empty() && self.credit.wants_to_tell() {
                self.out.push_back(Item::plain(FrameKind::Credit, shared.session, 0));
            }
        }
        Ok(())
    }

    /// When the device has owed us a completion for `limit`.
    pub(super) fn completion_due(&self, limit: Duration) -> Time {
        self.posted.due(limit)
    }

    /// This signalled work is done, and what was posted with it. An error ends the connection: then nothing is given free before its
    /// queue pair is gone.
    pub(super) fn done(&mut self, id: WrId, shared: &Shared<'_>, told: &mut Told) -> Result<(), String> {
        let posted = self.posted.done(id, shared.now)?;
        if let Some(pair) = &mut self.pair {
            pair.sent(posted.requests);
        }
        match id.kind {
            WrKind::Send => self.free_slots.push(id.slot),
            WrKind::Invalidate => self.invalidated(id.slot, told),
            WrKind::Read if id.slot < looks::PLACES => self.word(id.slot, shared, told),
            WrKind::Read => self.read(id.slot, shared, told),
            _ => {}
        }
        self.flush(shared, told)
    }

    /// A READ was posted. Slots below [`looks::PLACES`] are those of words, the others those of bulk.
    pub(super) fn read_posted(&mut self, id: WrId, now: Time) {
        let WrId { kind, slot, used, .. } = id;
        self.posted.push(Posted { kind, slot, used, requests: 1, source: None }, now);
    }

    /// Our own invalidation was completed with success: a fence.
    fn invalidated(&mut self, slot: u16, told: &mut Told) {
        if self.invalidating.front().is_none_or(|front| front.slot != slot) {
            return;
        }
        let Some(Invalidating { window, extent, then, .. }) = self.invalidating.pop_front() else { return };
        self.windows.push(window);
        let fenced = fence(extent, told);
        match then {
            Then::Release(id) => told.events.extend(fenced.map(|extent| Event::Released { id, extent })),
            Then::Reply { id, message, bulk } => {
                told.ended += 1;
                told.events.push(Event::Replied { id, message, bulk, extent: fenced });
            }
        }
    }

    fn invalidate(&mut self, window: Window, extent: Exposed, then: Then, shared: &Shared<'_>) -> Result<(), String> {
        let slot = self.next_invalidation;
        self.next_invalidation = slot.wrapping_add(1);
        let used = self.posted.number();
        let id = shared.id(WrKind::Invalidate, slot, used);
        let key = window.key();
        self.invalidating.push_back(Invalidating { slot, window, extent, then, since: shared.now });
        let Some(pair) = &mut self.pair else { return Err("the queue pair is gone".into()) };
        pair.post(&mut [Work::Invalidate { id, key }]).map_err(|error| error.to_string())?;
        self.posted.push(Posted { kind: WrKind::Invalidate, slot, used, requests: 1, source: None }, shared.now);
        Ok(())
    }

    /// Signalled work that was not completed.
    pub(super) fn unfinished(&self) -> usize {
        self.posted.len()
    }

    /// When to look at the landings again.
    pub(super) fn next(&self) -> Time {
        let held = self.held.values().map(|held| held.until).min().unwrap_or(Time::NEVER);
        let taken = self.invalidating.front().map_or(Time::NEVER, |first| first.since.after(4 * GRACE));
        let later = self.later.front().map_or(Time::NEVER, |(at, _)| *at);
        let looks = self.looks.as_ref().map_or(Time::NEVER, Looks::next);
        held.min(taken).min(later).min(self.offers.next()).min(looks)
    }

    /// The connection is over: every request fails, and what may still be written to comes out with the windows.
    pub(super) fn end(&mut self, why: &str, now: Time, told: &mut Told) -> Remains {
        for (id, entry) in self.pending.close() {
            self.failed(id, entry, Cause::Disconnected(why.to_owned()), now, told);
        }
        if let Some(looks) = &mut self.looks {
            looks.end(why, told);
        }
        let mut remains = Remains { pair: self.pair.take(), ..Remains::default() };
        self.out.clear();
        self.later.clear();
        self.serving.clear();
        remains.windows.append(&mut self.windows);
        for (_, window) in self.bound.drain() {
            remains.windows.push(window);
        }
        for (id, held) in self.held.drain() {
            remains.windows.extend(held.window);
            remains.landings.push((id, held.extent));
        }
        for Invalidating { window, extent, then, .. } in self.invalidating.drain(..) {
            remains.windows.push(window);
            let id = match then {
                Then::Release(id) => id,
                Then::Reply { id, .. } => {
                    told.failed += 1;
                    told.ended += 1;
                    let cause = Cause::Disconnected(why.to_owned());
                    told.events.push(Event::Failed { id, cause, hand: Hand::Held });
                    id
                }
            };
            remains.landings.push((id, extent));
        }
        self.offers.end(&mut remains);
        remains.unfinished = self.posted.len();
        remains.sources = self.posted.end();
        remains
    }
}

/// What is left of a link when it has ended, until its queue pair is gone.
#[derive(Default)]
pub(super) struct Remains {
    pub(super) pair: Option<Qp<Rts>>,
    pub(super) windows: Vec<Window>,
    pub(super) landings: Vec<(u64, Exposed)>,
    pub(super) sources: Vec<Lent>,
    /// What the other side may still read.
    pub(super) offered: Vec<Fenced>,
    /// Signalled work that was not completed.
    pub(super) unfinished: usize,
}

/// For those who have just seen one of the accepted fences for this landing; each call says which.
pub(super) fn fence(extent: Exposed, told: &mut Told) -> Option<Fenced> {
    told.released_bytes += u64::from(extent.size());
    extent.fenced(Fence::proved())
}
