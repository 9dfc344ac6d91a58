//! What arrives on a connection: replies for the table, requests for the handler.
//!
//! Guarantees: those of the connection, as far as they are about what the other side sends (see there).

use super::{Connection, WAITING, WAITING_BYTES};
use crate::rail::tcp::out::{Finish, Item};
use crate::rail::tcp::receive::{Frames, Sink};
use crate::rail::tcp::signal::lock;
use crate::rail::totals::{add, subtract};
use crate::rail::{Bulk, Event, Incoming, Replier, Sent};
use bytes::Bytes;
use railfs_proto::frame::{FrameKind, Header};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Connection {
    /// Gives on what waited, as far as it may.
    pub(super) fn serve_waiting(self: &Arc<Self>) {
        while self.may_serve() {
            let next = {
                let mut waiting = lock(&self.waiting);
                let next = waiting.0.pop_front();
                waiting.1 -= next.as_ref().map_or(0, |(_, message)| message.len());
                next
            };
            let Some((id, message)) = next else {
                self.throttled.store(false, Ordering::SeqCst);
                return;
            };
            self.serve(id, message);
        }
        self.throttled.store(true, Ordering::SeqCst);
        // Something may have been answered before the flag was seen.
        if self.may_serve() {
            self.signal.raise();
        }
    }

    fn serve(self: &Arc<Self>, id: u64, message: Bytes) {
        self.serving.fetch_add(1, Ordering::SeqCst);
        let replier = Box::new(Answer { connection: self.clone(), id });
        self.parts.handler.request(Incoming { message, replier });
    }

    fn reply(&self, id: u64, bulk: Bulk, finish: Finish) {
        match Item::reply(self.parts.session, id, bulk, finish) {
            Ok(item) => {
                self.replying.fetch_add(item.cost, Ordering::SeqCst);
                self.send(item);
            }
            Err(why) => self.end(why),
        }
    }
}

/// What the receiver tells.
pub(super) struct Shared<'a> {
    pub(super) connection: &'a Arc<Connection>,
}

impl Frames for Shared<'_> {
    fn bulk(&self, header: &Header) -> Result<Sink, String> {
        let connection = self.connection;
        if header.kind != FrameKind::Reply {
            return Err(format!("a {:?} frame with bulk", header.kind));
        }
        if header.session != connection.parts.session {
            return Ok(Sink::Scratch);
        }
        let mut pending = lock(&connection.pending);
        let Some(entry) = pending.get(header.id) else { return Ok(Sink::Scratch) };
        let allowed = entry.landing.as_ref().map_or(0, |(_, length)| *length);
        if header.bulk > allowed {
            return Err(format!("a reply with {} bytes of bulk where {allowed} were asked for", header.bulk));
        }
        Ok(match entry.landing.take() {
            Some((extent, _)) => Sink::Land { id: header.id, extent, at: 0 },
            None => Sink::Scratch,
        })
    }

    fn landed(&self, bytes: usize) {
        self.connection.count(|totals| add(&totals.bulk_received, bytes as u64));
    }

    fn frame(&self, header: &Header, message: Bytes, sink: Sink) -> Result<(), String> {
        let connection = self.connection;
        let ours = header.session == connection.parts.session;
        match header.kind {
            FrameKind::Join | FrameKind::Joined => Err(format!("a {:?} frame on a joined connection", header.kind)),
            FrameKind::Ping if ours => {
                if lock(&connection.out).want_pong() {
                    connection.send(Item::plain(FrameKind::Pong, header.session, header.id, &[]));
                }
                Ok(())
            }
            FrameKind::Pong if ours => Ok(()),
            FrameKind::Request if ours => {
                let mut waiting = lock(&connection.waiting);
                if waiting.0.is_empty() && connection.may_serve() {
                    drop(waiting);
                    connection.serve(header.id, message);
                } else {
                    waiting.1 += message.len();
                    waiting.0.push_back((header.id, message));
                }
                Ok(())
            }
            FrameKind::Reply if ours => {
                let entry = lock(&connection.pending).remove(header.id);
                let Some(entry) = entry else {
                    connection.count(|totals| add(&totals.stale, 1));
                    return Ok(());
                };
                let (landed, bulk) = match sink {
                    Sink::Land { extent, .. } => (Some(extent), header.bulk),
                    Sink::Scratch => (None, 0),
                };
                let extent = landed.or(entry.landing.map(|(extent, _)| extent));
                let extent = extent.and_then(|extent| connection.fenced(extent));
                connection.count(|totals| subtract(&totals.in_flight, 1));
                connection.parts.events.event(Event::Replied { id: header.id, message, bulk, extent });
                Ok(())
            }
            _ => {
                connection.count(|totals| add(&totals.stale, 1));
                Ok(())
            }
        }
    }

    fn paused(&self) -> bool {
        let waiting = lock(&self.connection.waiting);
        waiting.0.len() >= WAITING || waiting.1 >= WAITING_BYTES
    }
}

/// For the answer to one request of the other side.
struct Answer {
    connection: Arc<Connection>,
    id: u64,
}

impl Replier for Answer {
    fn reply(self: Box<Self>, bulk: Bulk, message: Box<dyn FnOnce(Sent) -> Bytes + Send>) {
        self.connection.reply(self.id, bulk, message);
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.connection.serving.fetch_sub(1, Ordering::SeqCst);
        self.connection.unthrottle();
    }
}
