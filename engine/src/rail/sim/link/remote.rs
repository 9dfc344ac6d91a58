//! What one end's device does to the other end's memory, and what devices and ports do of themselves.
//!
//! Guarantees: a WRITE lands inside the window that its key names, or nowhere; a READ gives words of the slots that were exposed,
//! or ends the connection; a completion that comes twice, or for a look that was given up, is dropped and counted.

use super::{Frame, Link};
use crate::clock::Time;
use crate::rail::sim::card::Card;
use crate::rail::sim::{Context, Side};
use crate::rail::{Cause, Event, Hand, Lane, Look, land};
use bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

impl Link {
    pub(in crate::rail::sim) fn expose(&mut self, words: Arc<[AtomicU64]>, incarnation: u64, context: &mut Context) {
        let card = Card::new(words, incarnation);
        if self.client.connection.is_some() {
            // Told with the next step.
            self.client.deferred.push_back(Event::Slots(Some(card.slots())));
        }
        context.trace(self.number, format_args!("slots of {incarnation} can be READ"));
        self.card = Some(card);
    }

    pub(in crate::rail::sim) fn port(&mut self, of: Side, up: bool, context: &mut Context) {
        self.down[usize::from(of == Side::Server)] = !up;
        if !up {
            self.die(of, "the port went down", context);
        } else if of == Side::Client && self.retry != Time::NEVER {
            self.retry = context.now;
        }
    }

    pub(in crate::rail::sim) fn pause(&mut self, sleeps: bool, context: &mut Context) {
        (self.hung, self.sleeps) = (sleeps, sleeps);
        for action in std::mem::take(&mut self.asleep) {
            match sleeps {
                true => self.asleep.push(action),
                false => context.schedule(context.now, self.number, action),
            }
        }
    }

    pub(in crate::rail::sim) fn unexposed(&self) -> u64 {
        self.client.deferred.iter().map(Event::fenced_bytes).sum()
    }

    /// The key of a request's landing, pending or held.
    pub(in crate::rail::sim) fn key(&self, id: u64) -> Option<u32> {
        self.client.keys.iter().find(|(_, of)| **of == id).map(|(key, _)| *key)
    }

    pub(in crate::rail::sim) fn look(&mut self, side: Side, look: Look, context: &mut Context) {
        let known = side == Side::Client && self.card.as_ref().is_some_and(|card| card.has(&look));
        let end = self.end(side);
        let failed = |cause| Event::Failed { id: look.id, cause, hand: Hand::None };
        match end.connection {
            None => end.deferred.push_back(failed(Cause::Down)),
            Some(_) if !known => end.deferred.push_back(failed(Cause::Refused("no such slots".into()))),
            Some(connection) => {
                end.looks.insert(look.id, look.deadline);
                let posted = self.card.as_ref().and_then(|card| card.now(&look.slots)).unwrap_or_default();
                let frame = Frame::Read { id: look.id, slots: look.slots, posted };
                self.send(side.other(), Lane::Small, connection, frame, context);
            }
        }
    }

    /// The server's card is asked: its software knows nothing of it.
    pub(super) fn read(
        &mut self,
        (lane, connection, id): (Lane, u64, u64),
        slots: &[u32],
        posted: &[u64],
        context: &mut Context,
    ) {
        let torn = self.config.torn;
        let words = self.card.as_ref().and_then(|card| card.read(slots, posted, torn, context));
        let Some(words) = words else {
            return self.die(Side::Client, "the other side's memory is not accessible", context);
        };
        let copies = if context.chance(self.config.duplicate) { 2 } else { 1 };
        context.tally.doubled += copies - 1;
        for _ in 0..copies {
            self.send(Side::Client, lane, connection, Frame::Words { id, words: words.clone() }, context);
        }
    }

    pub(super) fn looked(&mut self, to: Side, id: u64, words: Vec<u64>, context: &mut Context) {
        let end = self.end(to);
        if end.looks.remove(&id).is_some() {
            return end.tell(Event::Looked { id, words }, context);
        }
        // Given up, or here before.
        end.counters.stale += 1;
        context.tally.stale += 1;
    }

    /// A WRITE by key: into its window, or nowhere.
    pub(super) fn write(&mut self, to: Side, key: u32, offset: u32, bytes: &Bytes, context: &mut Context) {
        let number = self.number;
        let reach = u64::from(offset) + bytes.len() as u64;
        let end = self.end(to);
        let id = end.keys.get(&key).copied().unwrap_or(0);
        let waiting = end.pending.iter_mut().find_map(|pending| pending.get(id)?.landing.as_mut());
        let landing = match waiting {
            Some((extent, length)) => Some((extent, *length)),
            None => end.held.get_mut(&id).map(|held| (&mut held.extent, held.length)),
        };
        match landing {
            Some((extent, length)) if reach <= u64::from(length) => {
                land::copy(extent, offset, bytes);
                context.trace(number, format_args!("{to:?} is written to by key {key}"));
            }
            _ => {
                context.trace(number, format_args!("{to:?} refuses a WRITE by key {key} up to {reach}"));
                self.refused_writes += 1;
                context.tally.refused += 1;
                self.die(to.other(), "the other side's memory is not accessible", context);
                self.die(to, "a WRITE outside of its window", context);
            }
        }
    }
}
