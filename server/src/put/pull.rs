//! Pulls: sent to rails as the schedule says, verified when they have landed, written, counted.
//!
//! Guarantees: nothing is verified or written on a rail's thread; a landing's memory is read only after its fence; bytes
//! that are not what the client's checksums say are never written.

use super::plan::After;
use super::{Active, Fate, Puts};
use crate::node::{add, count, lock};
use prost::Message;
use railfs_engine::memory::{Fenced, Free};
use railfs_engine::rail::{Cause, Event, Hand, Landing, Lane, Submission};
use railfs_proto::checksum::page_checksums;
use railfs_proto::limits::MIN_PAGE;
use railfs_proto::reply::{Refusal, check_outcome, check_pull_reply};
use railfs_proto::v1::{self, Code, rail_reply, rail_request};
use std::sync::Arc;

/// What a rail said of a pull.
#[derive(Debug)]
pub(super) struct Work(pub(super) Event);

/// A pull on a rail.
#[derive(Debug)]
pub(super) struct Flying {
    pub(super) put: u64,
    pub(super) index: u64,
    pub(super) rail: u64,
    request: v1::PullRequest,
}

/// What is wrong with what landed.
enum Bad {
    /// Once more, by another rail.
    Rail(String),
    /// The bytes are not what their checksums say.
    Bytes(String),
    /// The put cannot succeed.
    Put(Refusal),
}

impl Puts {
    /// Sends every pull that can be sent now.
    pub(super) fn pump(&self) {
        loop {
            let sessions = |session| -> Vec<u64> {
                lock(&self.node.sessions).bulk(session).into_iter().map(|(connection, _)| connection).collect()
            };
            let memory = |length: u32| self.arena.allocate(length.next_power_of_two().max(MIN_PAGE));
            let Some(send) = lock(&self.schedule).next(sessions, memory) else { return };
            self.send(send);
        }
    }

    fn send(&self, send: super::schedule::Send<Free>) {
        let super::schedule::Send { put, pull, rail, memory } = send;
        let active = self.find(put);
        let connection = active.as_ref().and_then(|active| {
            let rails = lock(&self.node.sessions).bulk(active.session);
            rails.into_iter().find(|(number, _)| *number == rail).map(|(_, connection)| connection)
        });
        let Some(connection) = connection else {
            let mut schedule = lock(&self.schedule);
            schedule.returned(put, rail);
            schedule.rail_failed(put, pull.index);
            return;
        };
        let id = self.request_id();
        let request = v1::PullRequest { put, offset: pull.offset, length: pull.length };
        let message = v1::RailRequest {
            scope: Some(self.node.scope()),
            time_left_microseconds: u64::try_from(self.node.request_timeout.as_micros()).unwrap_or(u64::MAX),
            body: Some(rail_request::Body::Pull(request)),
        };
        lock(&self.flying).insert(id, Flying { put, index: pull.index, rail, request });
        connection.submit(Submission {
            id,
            lane: Lane::Bulk,
            message: message.encode_to_vec().into(),
            landing: Some(Landing { extent: memory, length: pull.length }),
            deadline: self.node.clock.now().after(self.node.request_timeout),
        });
    }

    /// On a worker.
    pub(super) fn pull_event(&self, event: Event) {
        match event {
            Event::Replied { id, message, bulk, extent } => {
                let Some(flying) = self.returned(id) else { return };
                self.landed(&flying, &message, bulk, extent);
            }
            Event::Failed { id, cause, hand } => {
                if let Hand::Fenced(extent) = hand {
                    drop(extent);
                }
                let Some(flying) = self.returned(id) else { return };
                if matches!(cause, Cause::Down | Cause::Disconnected(_))
                    && let Some(active) = self.find(flying.put)
                {
                    // Its end is told later; until then nothing more goes there.
                    lock(&self.node.sessions).closed(active.session, flying.rail, self.node.clock.now());
                }
                if cause != Cause::Cancelled {
                    self.repeat(&flying, &format!("{cause:?}"));
                }
            }
            Event::Released { extent, .. } => drop(extent),
            // A server looks at nothing.
            Event::State(_) | Event::Looked { .. } | Event::Slots(_) => return,
        }
        self.pump();
    }

    fn returned(&self, id: u64) -> Option<Flying> {
        let flying = lock(&self.flying).remove(&id)?;
        lock(&self.schedule).returned(flying.put, flying.rail);
        Some(flying)
    }

    fn repeat(&self, flying: &Flying, why: &str) {
        let after = lock(&self.schedule).rail_failed(flying.put, flying.index);
        if after != After::Unknown {
            count(&self.node.counters.pulls_repeated);
            tracing::debug!(
                put = flying.put,
                offset = flying.request.offset,
                rail = flying.rail,
                why,
                "a pull is repeated"
            );
        }
    }

    fn landed(&self, flying: &Flying, message: &[u8], bulk: u32, extent: Option<Fenced>) {
        let Some(active) = self.find(flying.put) else { return };
        let result = self.take_in(&active, flying, message, bulk, extent.as_ref());
        // The memory is free before the next pull is scheduled.
        drop(extent);
        match result {
            Ok(()) => {
                add(&self.node.counters.pull_bytes, flying.request.length.into());
                let after = lock(&self.schedule).accepted(flying.put, flying.index, self.node.clock.now());
                if after == After::Complete {
                    active.fate.send_if_modified(|fate| {
                        let open = *fate == Fate::Pulling;
                        if open {
                            *fate = Fate::Complete;
                        }
                        open
                    });
                }
            }
            Err(Bad::Rail(why)) => self.repeat(flying, &why),
            Err(Bad::Bytes(why)) => {
                count(&self.node.counters.pulls_bad);
                tracing::warn!(put = flying.put, object = %active.name, offset = flying.request.offset, rail = flying.rail, %why, "a pull brought bad bytes");
                if lock(&self.schedule).was_bad(flying.put, flying.index) == After::Hopeless {
                    let message = format!(
                        "{}: bytes {} to {} failed their check {} times, last on connection {}: {why}",
                        active.name,
                        flying.request.offset,
                        flying.request.offset + u64::from(flying.request.length),
                        super::plan::MAX_BAD,
                        flying.rail
                    );
                    self.give_up(flying.put, Refusal::new(Code::Aborted, message));
                }
            }
            Err(Bad::Put(refusal)) => {
                self.give_up(flying.put, refusal);
            }
        }
    }

    fn take_in(
        &self,
        active: &Arc<Active>,
        flying: &Flying,
        message: &[u8],
        bulk: u32,
        extent: Option<&Fenced>,
    ) -> Result<(), Bad> {
        let reply = v1::RailReply::decode(message).map_err(|error| Bad::Bytes(format!("unreadable reply: {error}")))?;
        if let Err(refusal) = check_outcome(reply.outcome.as_ref()) {
            return Err(match refusal.code {
                Code::OverBudget | Code::Unavailable | Code::Expired => Bad::Rail(refusal.to_string()),
                code => {
                    let code = if code == Code::Unspecified { Code::Aborted } else { code };
                    Bad::Put(Refusal::new(code, format!("the client gave put {} up: {}", active.put, refusal.message)))
                }
            });
        }
        let Some(rail_reply::Body::Pull(reply)) = reply.body else {
            return Err(Bad::Bytes("the reply is not one to a pull".to_owned()));
        };
        let striping = active.descriptor.striping;
        let sums = check_pull_reply(&flying.request, &reply, bulk, striping.page_size())
            .map_err(|error| Bad::Bytes(error.to_string()))?;
        let bytes = extent.and_then(|extent| extent.bytes().get(..flying.request.length as usize));
        let bytes = bytes.ok_or_else(|| Bad::Bytes("the reply brought no bytes".to_owned()))?;
        let place = striping.place(flying.request.offset);
        let first = place.offset / u64::from(striping.page_size());
        let computed = page_checksums(active.descriptor.version, place.component, first, striping.page_size(), bytes);
        if let Some(page) = computed.iter().zip(&sums).position(|(computed, sent)| computed != sent) {
            return Err(Bad::Bytes(format!("page {page} of the pull does not have the client's checksum")));
        }
        let writer = active.components.writer(place.component);
        let writer = writer.ok_or_else(|| Bad::Put(Refusal::new(Code::Aborted, "the put has no such component")))?;
        writer.write(place.offset, bytes, &sums).map_err(|error| Bad::Put(self.blame(&error)))
    }
}
