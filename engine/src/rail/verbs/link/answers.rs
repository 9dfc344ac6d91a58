//! How a request ends: by its reply, by being given up, by its deadline; and when its landing is fenced.
//!
//! Guarantees:
//! * A reply that may have been written for takes its landing out of the table only with one of the accepted fences: the key that
//!   was taken away by it, our own invalidation, or the receive itself where nothing was opened.
//! * What is given up while the other side may still write is held, with its window, until it says that it does not, until the
//!   window is taken away, or until the queue pair is gone.

use super::{Held, Item, Shared, State, Then, Told, fence};
use crate::clock::Time;
use crate::rail::pending::Entry;
use crate::rail::verbs::GRACE;
use crate::rail::{Cause, Event, Hand};
use bytes::Bytes;
use railfs_proto::verbs::{FrameKind, Header};

impl State {
    /// A reply came on this pair. `key`: what it took away.
    pub(in crate::rail::verbs) fn reply(
        &mut self,
        header: &Header,
        message: Bytes,
        key: Option<u32>,
        shared: &Shared<'_>,
        told: &mut Told,
    ) -> Result<(), String> {
        let id = header.id;
        if self.offers.reads(id) {
            // It offered the answer, and that is being READ: there is no other.
            return Err(format!("request {id} is answered twice"));
        }
        let Some(entry) = self.pending.remove(id) else {
            told.stale += 1;
            return self.fence_comes(id, key, shared, told);
        };
        let allowed = entry.landing.as_ref().map_or(0, |(_, length)| *length);
        if header.bulk > allowed {
            let why = format!("a reply with {} bytes of bulk where {allowed} were asked for", header.bulk);
            self.failed(id, entry, Cause::Disconnected(why.clone()), shared.now, told);
            return Err(why);
        }
        // What was carried was counted as it landed.
        if header.carried == 0 {
            told.received += u64::from(header.bulk);
        }
        let bulk = header.bulk;
        match (entry.landing, self.bound.remove(&id)) {
            (Some((extent, _)), Some(window)) if key.is_none() => {
                // Answered without taking the key away: we do it, and the answer waits for that.
                self.invalidate(window, extent, Then::Reply { id, message, bulk }, shared)?;
            }
            (Some((extent, _)), Some(window)) => {
                let ours = window.key();
                if key != Some(ours) {
                    self.held.insert(id, Held { extent, window: Some(window), until: shared.now.after(GRACE) });
                    told.failed += 1;
                    told.ended += 1;
                    let why = format!("a reply that takes key {key:?} away, not {ours:#x}");
                    told.events.push(Event::Failed { id, cause: Cause::Disconnected(why.clone()), hand: Hand::Held });
                    return Err(why);
                }
                self.windows.push(window);
                // Proved: the receive of the reply on the pair that carried the request has taken the window's key away.
                let extent = fence(extent, told);
                told.ended += 1;
                told.events.push(Event::Replied { id, message, bulk, extent });
            }
            (landing, _) => {
                // No window: the reply's receive on the pair that carried the request is the fence itself, or the bytes were
                // copied by this very thread.
                let extent = landing.and_then(|(extent, _)| fence(extent, told));
                told.ended += 1;
                told.events.push(Event::Replied { id, message, bulk, extent });
            }
        }
        self.flush(shared, told)
    }

    /// The server's last word on a request that was given up: nothing is written for it any more.
    pub(in crate::rail::verbs) fn fence_comes(
        &mut self,
        id: u64,
        key: Option<u32>,
        shared: &Shared<'_>,
        told: &mut Told,
    ) -> Result<(), String> {
        let Some(held) = self.held.remove(&id) else { return Ok(()) };
        match held.window {
            Some(window) if key == Some(window.key()) => {
                self.windows.push(window);
                let fenced = fence(held.extent, told);
                told.events.extend(fenced.map(|extent| Event::Released { id, extent }));
                self.flush(shared, told)
            }
            Some(window) => self.invalidate(window, held.extent, Then::Release(id), shared),
            None => {
                let fenced = fence(held.extent, told);
                told.events.extend(fenced.map(|extent| Event::Released { id, extent }));
                Ok(())
            }
        }
    }

    /// Gives a request up: expired, cancelled.
    pub(in crate::rail::verbs) fn give_up(&mut self, id: u64, cause: Cause, shared: &Shared<'_>, told: &mut Told) {
        if let Some(entry) = self.pending.remove(id) {
            let sent = self.failed(id, entry, cause, shared.now, told);
            if sent {
                self.push_first(Item::plain(FrameKind::Cancel, shared.session, id));
            }
        }
    }

    /// The first request whose deadline has come.
    pub(in crate::rail::verbs) fn expire(&mut self, shared: &Shared<'_>, told: &mut Told) -> bool {
        let Some((id, entry)) = self.pending.expired(shared.now) else { return false };
        if self.failed(id, entry, Cause::Expired, shared.now, told) {
            self.push_first(Item::plain(FrameKind::Cancel, shared.session, id));
        }
        true
    }

    /// Fails a request. Says whether the other side has to be told, since it may write for it.
    pub(in crate::rail::verbs) fn failed(
        &mut self,
        id: u64,
        entry: Entry,
        cause: Cause,
        now: Time,
        told: &mut Told,
    ) -> bool {
        let waits = self.out.iter().position(|item| item.header.kind == FrameKind::Request && item.header.id == id);
        let unsent = waits.filter(|at| self.out.get(*at).is_some_and(|item| item.at == 0));
        if let Some(at) = unsent {
            self.out.remove(at);
        }
        told.failed += 1;
        told.ended += 1;
        let window = self.bound.remove(&id);
        let (hand, sent) = match entry.landing {
            None => (self.offer_given_up(id, told), false),
            // Never sent, or only ever copied to by the connection's own thread: nobody else can write there.
            Some((extent, _)) if unsent.is_some() || !self.ways.opens || (self.use_windows && window.is_none()) => {
                (fence(extent, told).map_or(Hand::None, Hand::Fenced), unsent.is_none())
            }
            // A fault: as if giving it up were a fence. The window stays as it is.
            Some((extent, _)) if self.ways.faults.unfenced => {
                self.bound.extend(window.map(|window| (id, window)));
                (fence(extent, told).map_or(Hand::None, Hand::Fenced), true)
            }
            Some((extent, _)) => {
                self.held.insert(id, Held { extent, window, until: now.after(GRACE) });
                (Hand::Held, true)
            }
        };
        told.events.push(Event::Failed { id, cause, hand });
        sent
    }

    /// Landings whose fence is overdue: their windows are taken away. An error ends the connection, which is a fence, too.
    pub(in crate::rail::verbs) fn overdue(&mut self, shared: &Shared<'_>) -> Result<(), String> {
        let due = |held: &Held| held.until <= shared.now;
        while let Some(id) = self.held.iter().find(|(_, held)| due(held)).map(|(id, _)| *id) {
            match self.held.remove(&id) {
                None => break,
                // Soft-RoCE looks at a key with the first packet of a WRITE only: what is on its way goes on landing after the window
                // was taken away. (It also crashes when the server's late answer takes away what was taken away before.)
                Some(Held { extent, window: Some(window), .. }) if !self.ways.soft => {
                    self.invalidate(window, extent, Then::Release(id), shared)?;
                }
                Some(held) => {
                    // There is no other way: the queue pair must go.
                    self.held.insert(id, Held { until: Time::NEVER, ..held });
                    return Err(format!("the server does not say whether it still writes for request {id}"));
                }
            }
        }
        self.offers.overdue(shared.now)?;
        let late = self.invalidating.front().is_some_and(|first| shared.now.since(first.since) >= 4 * GRACE);
        if late { Err("a window was not taken away in time".into()) } else { Ok(()) }
    }
}
