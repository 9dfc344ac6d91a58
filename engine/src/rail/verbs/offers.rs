//! Bulk that is READ: at the side that offers it, the bytes that lie open; at the side that reads, the READs under way.
//!
//! Guarantees (I4):
//! * Bytes that were offered are kept until the other side's `Taken` has come on the queue pair that carried the offer, which took
//!   their key away; or until that queue pair is destroyed. One that says nothing for 30 s loses the connection.
//! * A landing that a READ was posted for is held until that READ is completed, whoever gives the request up meanwhile; `Taken` goes
//!   out only then, so that the memory on the other side stands still for as long as it may be read.
//! * An offer that nobody waits for, or for more than was asked for, is never read.

use super::link::{Item, Remains, Shared, State, Told, fence};
use super::looks::PLACES;
use super::{OFFERED, READS};
use crate::clock::Time;
use crate::memory::{Exposed, Fenced};
use crate::rail::{Event, Hand, land};
use crate::verbs::{Slice, Window, Work, WrKind};
use bytes::Bytes;
use railfs_proto::verbs::{FrameKind, Header};
use std::collections::{HashMap, VecDeque};

/// Bytes that the other side may read.
struct Open {
    source: Fenced,
    window: Window,
    until: Time,
}

/// An offer of the other side that is read, or will be.
struct Reading {
    id: u64,
    extent: Exposed,
    into: Slice,
    /// Where, and by which key.
    address: u64,
    key: u32,
    /// The key is no window's.
    keeps: bool,
    message: Bytes,
    given_up: bool,
}

/// See the module.
#[derive(Default)]
pub(super) struct Offers {
    open: HashMap<u64, Open>,
    reading: HashMap<u16, Reading>,
    /// Not posted yet.
    waiting: VecDeque<u16>,
    /// Posted.
    under_way: usize,
    next: u16,
    session: u64,
}

impl Offers {
    /// These bytes were opened, or may have been.
    pub(super) fn open(&mut self, id: u64, source: Fenced, window: Window, now: Time) {
        self.open.insert(id, Open { source, window, until: now.after(OFFERED) });
    }

    /// A place that no READ has; those below [`PLACES`] are for the words of looks.
    fn slot(&mut self) -> Option<u16> {
        let from = self.next.max(PLACES);
        let slot = (from..=u16::MAX).chain(PLACES..from).find(|slot| !self.reading.contains_key(slot))?;
        self.next = slot.wrapping_add(1);
        Some(slot)
    }

    /// Whether what this request was offered is READ, or will be.
    pub(super) fn reads(&self, id: u64) -> bool {
        self.reading.values().any(|reading| reading.id == id)
    }

    /// When to look again.
    pub(super) fn next(&self) -> Time {
        self.open.values().map(|open| open.until).min().unwrap_or(Time::NEVER)
    }

    /// An error ends the connection, which is a fence.
    pub(super) fn overdue(&self, now: Time) -> Result<(), String> {
        match self.open.iter().find(|(_, open)| open.until <= now) {
            Some((id, _)) => {
                Err(format!("the server has not said for {OFFERED:?} whether it reads what request {id} was offered"))
            }
            None => Ok(()),
        }
    }

    /// The connection is over.
    pub(super) fn end(&mut self, remains: &mut Remains) {
        for (_, Open { source, window, .. }) in self.open.drain() {
            remains.windows.push(window);
            remains.offered.push(source);
        }
        self.waiting.clear();
        remains.landings.extend(self.reading.drain().map(|(_, reading)| (reading.id, reading.extent)));
    }
}

impl Reading {
    /// What is said when nothing is read any more.
    fn taken(&self, session: u64) -> Item {
        taken(session, self.id, self.key, self.keeps)
    }
}

fn taken(session: u64, id: u64, key: u32, keeps: bool) -> Item {
    let mut item = Item::plain(FrameKind::Taken, session, id);
    item.invalidate = (key != 0 && !keeps).then_some(key);
    item
}

impl State {
    /// The other side offers what it was asked for.
    pub(super) fn offer(
        &mut self,
        header: &Header,
        message: Bytes,
        shared: &Shared<'_>,
        told: &mut Told,
    ) -> Result<(), String> {
        self.offers.session = shared.session;
        let Some(entry) = self.pending.get(header.id) else {
            // Given up: it is not read.
            told.stale += 1;
            self.push(taken(shared.session, header.id, header.key, header.keeps));
            return Ok(());
        };
        let slot = self.offers.slot().ok_or("more is offered than can be READ at a time")?;
        let Some((extent, allowed)) = entry.landing.take() else {
            return Err(format!("request {} is offered twice, or asked for nothing", header.id));
        };
        let into = land::address(&extent).and_then(|pointer| shared.pulled?.slice_at(pointer, header.bulk));
        let Some(into) = into.filter(|_| header.bulk <= allowed) else {
            entry.landing = Some((extent, allowed));
            return Err(format!("an offer of {} bytes where {allowed} were asked for", header.bulk));
        };
        let Header { id, address, key, keeps, .. } = *header;
        let reading = Reading { id, extent, into, address, key, keeps, message, given_up: false };
        self.offers.reading.insert(slot, reading);
        self.offers.waiting.push_back(slot);
        Ok(())
    }

    /// Posts the READs that there is room for.
    pub(super) fn read_offers(&mut self, shared: &Shared<'_>) -> Result<(), String> {
        // Soft-RoCE answers a READ with all of its packets at once: a few of them are more than a kernel's queue of received packets
        // takes (1000), what is dropped is sent again with all that came after it, and in the end the retries are exceeded.
        let most = if self.ways.soft { 1 } else { usize::from(READS) };
        while self.offers.under_way < most {
            let Some(pair) = self.pair.as_mut().filter(|pair| pair.room() > 0) else { return Ok(()) };
            let Some(slot) = self.offers.waiting.pop_front() else { return Ok(()) };
            let Some(reading) = self.offers.reading.get(&slot) else { continue };
            let used = self.posted.number();
            let id = shared.id(WrKind::Read, slot, used);
            let (into, address, key) = (reading.into, reading.address, reading.key);
            // Counted first: should it fail, part of it may be under way.
            self.offers.under_way += 1;
            pair.post(&mut [Work::Read { id, into, address, key }]).map_err(|error| error.to_string())?;
            self.read_posted(id, shared.now);
        }
        Ok(())
    }

    /// A READ was completed with success.
    pub(super) fn read(&mut self, slot: u16, shared: &Shared<'_>, told: &mut Told) {
        let Some(reading) = self.offers.reading.remove(&slot) else { return };
        self.offers.under_way = self.offers.under_way.saturating_sub(1);
        self.push(reading.taken(shared.session));
        let bulk = reading.into.length();
        let Reading { id, extent, message, given_up, .. } = reading;
        // Proved: the READ that wrote there is completed.
        let extent = fence(extent, told);
        // Nobody is answered twice, whatever became of the request meanwhile.
        if given_up || self.pending.remove(id).is_none() {
            told.events.extend(extent.map(|extent| Event::Released { id, extent }));
            return;
        }
        told.received += u64::from(bulk);
        told.read += u64::from(bulk);
        told.ended += 1;
        told.events.push(Event::Replied { id, message, bulk, extent });
    }

    /// A request without a landing in its entry is given up: where an offer is being read the landing is held until that is over.
    pub(super) fn offer_given_up(&mut self, id: u64, told: &mut Told) -> Hand {
        let slot = self.offers.reading.iter().find(|(_, reading)| reading.id == id).map(|(slot, _)| *slot);
        let Some(slot) = slot else { return Hand::None };
        if let Some(at) = self.offers.waiting.iter().position(|waiting| *waiting == slot) {
            self.offers.waiting.remove(at);
            let Some(reading) = self.offers.reading.remove(&slot) else { return Hand::None };
            self.push(reading.taken(self.offers.session));
            // Proved: no READ was posted for it.
            return fence(reading.extent, told).map_or(Hand::None, Hand::Fenced);
        }
        if let Some(reading) = self.offers.reading.get_mut(&slot) {
            reading.given_up = true;
        }
        Hand::Held
    }

    /// The other side reads no more of what this request was offered. `key`: what its word took away.
    pub(super) fn taken(&mut self, id: u64, key: Option<u32>, told: &mut Told) -> Result<(), String> {
        let Some(open) = self.offers.open.remove(&id) else {
            told.stale += 1;
            return Ok(());
        };
        let ours = open.window.key();
        if key != Some(ours) {
            // It may still read: the bytes stay until the queue pair is gone.
            self.offers.open.insert(id, open);
            return Err(format!("offered bytes were said to be taken with key {key:?}, not {ours:#x}"));
        }
        // Proved: the receive took the window's key away.
        self.windows.push(open.window);
        drop(open.source);
        Ok(())
    }
}
