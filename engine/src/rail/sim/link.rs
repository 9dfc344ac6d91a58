//! One simulated link: two ends, two lanes, and what is under way between them.

use super::card::Card;
use super::{Answer, Call, Context, Forged, Side, SimConfig};
use crate::clock::Time;
use crate::memory::{Exposed, Fence, Fenced};
use crate::rail::backoff::Backoff;
use crate::rail::liveness::{Action as Sign, Liveness};
use crate::rail::pending::{Entry, Pending, never_sent, refusal};
use crate::rail::{Bulk, Cause, Counters, Event, Events, Hand, Handler, Lane, Sent, State, Submission, land};
use bytes::Bytes;
use std::collections::{BTreeMap, VecDeque};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

mod remote;

const LANES: [Lane; 2] = [Lane::Bulk, Lane::Small];

/// Something that arrives. Frames name the connection they were sent on.
#[derive(Debug)]
pub(super) enum Action {
    Frame {
        to: Side,
        lane: Lane,
        connection: u64,
        frame: Frame,
    },
    /// An end hears that its connection is dead.
    Dead {
        to: Side,
        connection: u64,
        why: String,
    },
    /// An attempt to connect comes to its end.
    Connected,
}

#[derive(Debug)]
pub(super) enum Frame {
    Request { id: u64, message: Bytes },
    Piece { id: u64, offset: u32, bytes: Bytes },
    Reply { id: u64, bulk: u32, message: Bytes },
    Write { key: u32, offset: u32, bytes: Bytes },
    Read { id: u64, slots: Vec<u32>, posted: Vec<u64> },
    Words { id: u64, words: Vec<u64> },
    Ping,
    Pong,
}

/// A landing whose fence has not come.
struct Held {
    extent: Exposed,
    length: u32,
    until: Time,
}

struct End {
    events: Arc<dyn Events>,
    handler: Arc<dyn Handler>,
    /// The connection it believes in.
    connection: Option<u64>,
    /// By lane.
    pending: [Pending; 2],
    /// By id: unique for the rail.
    held: BTreeMap<u64, Held>,
    /// Looks under way, and when they end at the latest.
    looks: BTreeMap<u64, Time>,
    /// The windows of landings: request by key.
    keys: BTreeMap<u32, u64>,
    deferred: VecDeque<Event>,
    cancelled: VecDeque<u64>,
    counters: Counters,
    state: State,
    closed: bool,
}

pub(super) struct Link {
    number: usize,
    pub(super) config: SimConfig,
    pub(super) cut: bool,
    /// The server's software does nothing.
    pub(super) hung: bool,
    /// It will wake up and find what came meanwhile.
    sleeps: bool,
    asleep: Vec<Action>,
    pub(super) overflow: Option<(Side, bool)>,
    pub(super) refused_writes: u64,
    /// Ports that are down: of the client, of the server.
    down: [bool; 2],
    card: Option<Card>,
    next_key: u32,
    client: End,
    server: End,
    backoff: Backoff,
    /// When the client tries again.
    retry: Time,
    connections: u64,
    /// When the last frame to (side, lane) arrives: order within a lane.
    last: [[Time; 2]; 2],
}

fn index(lane: Lane) -> usize {
    match lane {
        Lane::Bulk => 0,
        Lane::Small => 1,
    }
}

/// Bulk as it goes over the wire, zeros standing in for what a file does not yield.
pub(super) fn gather(bulk: Bulk) -> (Bytes, Sent) {
    let (bytes, sent) = match bulk {
        Bulk::None => (Bytes::new(), Sent { bytes: 0, error: None }),
        Bulk::Bytes(bytes) => {
            let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            (bytes, Sent { bytes: length, error: None })
        }
        Bulk::File { file, offset, length, .. } => {
            let mut buffer = vec![0u8; length as usize];
            let mut sent = Sent { bytes: 0, error: None };
            while sent.bytes < length {
                let at = sent.bytes as usize;
                match file.read_at(&mut buffer[at..], offset + u64::from(sent.bytes)) {
                    Ok(0) => break,
                    Ok(got) => sent.bytes += u32::try_from(got).unwrap_or(length),
                    Err(error) => {
                        sent.error = Some(error);
                        break;
                    }
                }
            }
            (Bytes::from(buffer), sent)
        }
    };
    let limit = railfs_proto::limits::MAX_EXTENT as usize;
    if bytes.len() > limit {
        let text = format!("bulk of {} bytes is larger than {limit}", bytes.len());
        return (Bytes::new(), Sent { bytes: 0, error: Some(std::io::Error::other(text)) });
    }
    (bytes, sent)
}

impl End {
    fn new((events, handler): (Arc<dyn Events>, Arc<dyn Handler>), config: &SimConfig, now: Time) -> End {
        let pending = || Pending::new(config.limits.in_flight, liveness(config, now));
        End {
            events,
            handler,
            connection: None,
            pending: [pending(), pending()],
            held: BTreeMap::new(),
            looks: BTreeMap::new(),
            keys: BTreeMap::new(),
            deferred: VecDeque::new(),
            cancelled: VecDeque::new(),
            counters: Counters::default(),
            state: State::Connecting,
            closed: false,
        }
    }

    fn tell(&self, event: Event, context: &mut Context) {
        context.calls.push(Call::Tell(self.events.clone(), event));
    }

    fn set_state(&mut self, state: State, context: &mut Context) {
        self.state = state.clone();
        self.tell(Event::State(state), context);
    }

    /// The fence has come: a reply proved it, or nothing that arrives from here on is let near it.
    fn fenced(&mut self, extent: Exposed) -> Option<Fenced> {
        self.counters.held_bytes -= u64::from(extent.size());
        extent.fenced(Fence::proved())
    }

    fn fail(&mut self, id: u64, entry: Entry, cause: Cause, fence: Time, context: &mut Context) {
        self.counters.failed += 1;
        self.counters.in_flight -= 1;
        let hand = match entry.landing {
            None => Hand::None,
            // The other side may be writing to it at this moment.
            Some((extent, length)) => {
                self.held.insert(id, Held { extent, length, until: fence });
                Hand::Held
            }
        };
        self.tell(Event::Failed { id, cause, hand }, context);
    }

    fn look_failed(&mut self, id: u64, cause: Cause, context: &mut Context) {
        if self.looks.remove(&id).is_some() {
            self.tell(Event::Failed { id, cause, hand: Hand::None }, context);
        }
    }

    fn release(&mut self, id: u64, context: &mut Context) -> bool {
        let Some(held) = self.held.remove(&id) else { return false };
        self.keys.retain(|_, of| *of != id);
        if let Some(extent) = self.fenced(held.extent) {
            self.tell(Event::Released { id, extent }, context);
        }
        true
    }

    fn next(&self) -> Time {
        if !self.deferred.is_empty() || !self.cancelled.is_empty() {
            return Time(0);
        }
        let mut next = self.held.values().map(|held| held.until).min().unwrap_or(Time::NEVER);
        next = next.min(self.looks.values().copied().min().unwrap_or(Time::NEVER));
        for pending in &self.pending {
            next = next.min(pending.next_deadline());
            if self.connection.is_some() {
                next = next.min(pending.liveness.next());
            }
        }
        next
    }
}

fn liveness(config: &SimConfig, now: Time) -> Liveness {
    Liveness::new(now, config.limits.suspect, config.limits.retire, config.limits.ping)
}

impl Link {
    pub(super) fn new(
        number: usize,
        config: SimConfig,
        client: (Arc<dyn Events>, Arc<dyn Handler>),
        server: (Arc<dyn Events>, Arc<dyn Handler>),
        context: &mut Context,
    ) -> Link {
        let mut link = Link {
            number,
            client: End::new(client, &config, context.now),
            server: End::new(server, &config, context.now),
            backoff: Backoff::new(context.random.next()),
            config,
            cut: false,
            hung: false,
            sleeps: false,
            asleep: Vec::new(),
            overflow: None,
            refused_writes: 0,
            down: [false; 2],
            card: None,
            next_key: 1,
            retry: Time::NEVER,
            connections: 0,
            last: [[Time(0); 2]; 2],
        };
        link.attempt(context);
        link
    }

    fn end(&mut self, side: Side) -> &mut End {
        match side {
            Side::Client => &mut self.client,
            Side::Server => &mut self.server,
        }
    }

    fn attempt(&mut self, context: &mut Context) {
        self.retry = Time::NEVER;
        let at = self.delay(context);
        context.schedule(at, self.number, Action::Connected);
    }

    fn delay(&self, context: &mut Context) -> Time {
        let (least, most) = self.config.delay;
        context.now.after(least + most.saturating_sub(least).mul_f64(context.random.unit()))
    }

    /// Puts a frame on the wire, behind those of its lane.
    fn send(&mut self, to: Side, lane: Lane, connection: u64, frame: Frame, context: &mut Context) {
        if self.cut {
            return;
        }
        let at = self.delay(context);
        let last = &mut self.last[usize::from(to == Side::Server)][index(lane)];
        *last = at.max(Time(last.0 + 1));
        let at = *last;
        context.schedule(at, self.number, Action::Frame { to, lane, connection, frame });
    }

    pub(super) fn submit(&mut self, side: Side, submission: Submission, context: &mut Context) {
        let (id, lane, message) = (submission.id, submission.lane, submission.message.clone());
        let held = submission.landing.as_ref().map_or(0, |landing| u64::from(landing.extent.size()));
        let (now, fault) = (context.now, refusal(&submission));
        let end = self.end(side);
        end.counters.submitted += 1;
        let connection = end.connection;
        let entered = match (fault, connection) {
            (Some(cause), _) => Err((submission, cause)),
            (None, None) => Err((submission, Cause::Down)),
            (None, Some(connection)) => end.pending[index(lane)].enter(submission, now).map(|()| connection),
        };
        match entered {
            Err((submission, cause)) => {
                end.counters.failed += 1;
                if end.closed {
                    // Nobody steps a rail that was closed; told with the next step of the simulation.
                    context.calls.push(Call::Tell(end.events.clone(), never_sent(submission, cause)));
                    context.schedule(now, self.number, Action::Dead { to: side, connection: 0, why: String::new() });
                } else {
                    end.deferred.push_back(never_sent(submission, cause));
                }
            }
            Ok(connection) => {
                end.counters.in_flight += 1;
                end.counters.held_bytes += held;
                if held > 0 {
                    let key = self.next_key;
                    self.next_key = key.wrapping_add(1);
                    self.end(side).keys.insert(key, id);
                }
                context.trace(self.number, format_args!("{side:?} submits {id} on {lane:?}"));
                match context.chance(self.config.loss) {
                    true => context.tally.lost += 1,
                    false => self.send(side.other(), lane, connection, Frame::Request { id, message }, context),
                }
            }
        }
    }

    pub(super) fn cancel(&mut self, side: Side, id: u64) {
        let end = self.end(side);
        if end.looks.contains_key(&id) || end.pending.iter().any(|pending| pending.contains(id)) {
            end.cancelled.push_back(id);
        }
    }

    pub(super) fn answer(&mut self, answer: Answer, bulk: Bytes, message: Bytes, context: &mut Context) {
        let Answer { to, lane, connection, id, .. } = answer;
        if self.end(to.other()).connection != Some(connection) {
            return;
        }
        let length = u32::try_from(bulk.len()).unwrap_or(u32::MAX);
        let mut rest = bulk;
        let mut offset = 0u32;
        while !rest.is_empty() {
            let bytes = rest.split_to(rest.len().min(self.config.piece.max(1) as usize));
            let next = offset.saturating_add(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
            self.end(to.other()).counters.bulk_sent += bytes.len() as u64;
            self.send(to, lane, connection, Frame::Piece { id, offset, bytes }, context);
            offset = next;
        }
        if context.chance(self.config.loss) {
            context.tally.lost += 1;
            return;
        }
        let copies = if context.chance(self.config.duplicate) { 2 } else { 1 };
        context.tally.doubled += copies - 1;
        for _ in 0..copies {
            let message = message.clone();
            self.send(to, lane, connection, Frame::Reply { id, bulk: length, message }, context);
        }
    }

    pub(super) fn forge(&mut self, to: Side, lane: Lane, frame: Forged, context: &mut Context) {
        let current = self.end(to).connection.unwrap_or(0);
        let (connection, frame) = match frame {
            Forged::Piece { id, offset, bytes } => (current, Frame::Piece { id, offset, bytes }),
            Forged::Write { key, offset, bytes } => (current, Frame::Write { key, offset, bytes }),
            Forged::Words { id, words, current: true } => (current, Frame::Words { id, words }),
            Forged::Words { id, words, current: false } => (current.wrapping_sub(1), Frame::Words { id, words }),
            Forged::Reply { id, bulk, message, current: true } => (current, Frame::Reply { id, bulk, message }),
            Forged::Reply { id, bulk, message, current: false } => {
                (current.wrapping_sub(1), Frame::Reply { id, bulk, message })
            }
        };
        self.send(to, lane, connection, frame, context);
    }

    pub(super) fn kill(&mut self, why: &str, context: &mut Context) {
        for to in [Side::Client, Side::Server] {
            if let Some(connection) = self.end(to).connection {
                let at = self.delay(context);
                context.schedule(at, self.number, Action::Dead { to, connection, why: why.to_string() });
            }
        }
    }

    pub(super) fn counters(&mut self, side: Side) -> Counters {
        self.end(side).counters.clone()
    }

    pub(super) fn state(&mut self, side: Side) -> State {
        self.end(side).state.clone()
    }

    pub(super) fn next(&self) -> Time {
        let server = if self.hung { Time::NEVER } else { self.server.next() };
        self.client.next().min(server).min(self.retry)
    }

    /// One thing that the clock, a cancel or a refusal calls for.
    pub(super) fn timer(&mut self, context: &mut Context) {
        let now = context.now;
        if self.retry <= now {
            self.client.set_state(State::Connecting, context);
            return self.attempt(context);
        }
        let side = if self.client.next() <= now { Side::Client } else { Side::Server };
        let fence = now.after(self.config.fence);
        let number = self.number;
        let end = self.end(side);
        if let Some(event) = end.deferred.pop_front() {
            context.trace(number, format_args!("{side:?} is told {event:?}"));
            return end.tell(event, context);
        }
        if let Some(id) = end.cancelled.pop_front() {
            end.look_failed(id, Cause::Cancelled, context);
            let entry = end.pending.iter_mut().find_map(|pending| pending.remove(id));
            if let Some(entry) = entry {
                context.trace(number, format_args!("{side:?} cancels {id}"));
                end.fail(id, entry, Cause::Cancelled, fence, context);
            }
            return;
        }
        if let Some(id) = end.held.iter().find(|(_, held)| held.until <= now).map(|(id, _)| *id) {
            context.trace(number, format_args!("{side:?} has the fence of {id}"));
            end.release(id, context);
            return;
        }
        if let Some(id) = end.looks.iter().find(|(_, until)| **until <= now).map(|(id, _)| *id) {
            context.trace(number, format_args!("{side:?} gives up look {id}"));
            return end.look_failed(id, Cause::Expired, context);
        }
        for lane in LANES {
            if let Some((id, entry)) = end.pending[index(lane)].expired(now) {
                context.trace(number, format_args!("{side:?} gives up {id}"));
                return end.fail(id, entry, Cause::Expired, fence, context);
            }
            let pending = &mut end.pending[index(lane)];
            if pending.is_empty() {
                pending.liveness.idle();
            }
            if let (Some(connection), Some(sign)) = (end.connection, pending.liveness.tick(now)) {
                context.trace(number, format_args!("{side:?} {lane:?} {sign:?}"));
                match sign {
                    Sign::Ping => {
                        pending.liveness.sent(now);
                        self.send(side.other(), lane, connection, Frame::Ping, context);
                    }
                    Sign::Silent if end.state == State::Silent => {}
                    Sign::Silent => end.set_state(State::Silent, context),
                    Sign::Alive => {}
                    Sign::Retire => {
                        let why = format!("no sign of life for {:?}", self.config.limits.retire);
                        self.die(side, &why, context);
                    }
                }
                return;
            }
        }
    }

    pub(super) fn arrive(&mut self, action: Action, context: &mut Context) {
        match action {
            Action::Connected => self.connected(context),
            Action::Dead { to, connection, why } => {
                if self.end(to).connection == Some(connection) {
                    self.die(to, &why, context);
                }
            }
            Action::Frame { to, lane, connection, frame } => self.frame(to, lane, connection, frame, context),
        }
    }

    fn connected(&mut self, context: &mut Context) {
        if self.client.closed {
            return;
        }
        if self.cut || self.hung || self.server.closed {
            return self.down("nobody answers", context);
        }
        if self.down.contains(&true) {
            return self.down("a port is down", context);
        }
        if self.server.connection.is_some() {
            self.die(Side::Server, "the client has connected anew", context);
        }
        self.connections += 1;
        let (connections, now) = (self.connections, context.now);
        context.trace(self.number, format_args!("connection {connections}"));
        self.backoff.connected(now);
        let alive = liveness(&self.config, now);
        let in_flight = self.config.limits.in_flight;
        if let Some(card) = &self.card {
            self.client.tell(Event::Slots(Some(card.slots())), context);
        }
        for end in [&mut self.client, &mut self.server] {
            end.connection = Some(connections);
            end.pending = [Pending::new(in_flight, alive.clone()), Pending::new(in_flight, alive.clone())];
            end.counters.connects += 1;
            end.set_state(State::Up, context);
        }
    }

    fn down(&mut self, why: &str, context: &mut Context) {
        self.retry = context.now.after(self.backoff.failed(context.now));
        self.client.set_state(State::Down(why.to_string()), context);
    }

    /// One end's connection is dead; the other end, if it still believes in it, hears of it when something gets through.
    pub(super) fn die(&mut self, side: Side, why: &str, context: &mut Context) {
        let fence = context.now.after(self.config.fence);
        let number = self.number;
        let end = self.end(side);
        let Some(connection) = end.connection.take() else { return };
        context.trace(number, format_args!("{side:?} loses connection {connection}: {why}"));
        for lane in LANES {
            for (id, entry) in end.pending[index(lane)].close() {
                end.fail(id, entry, Cause::Disconnected(why.to_string()), fence, context);
            }
        }
        // What was posted is flushed.
        for id in end.looks.keys().copied().collect::<Vec<_>>() {
            end.look_failed(id, Cause::Disconnected(why.to_string()), context);
        }
        if !self.cut && self.end(side.other()).connection == Some(connection) {
            let at = self.delay(context);
            let dead = Action::Dead { to: side.other(), connection, why: "closed by the other side".into() };
            context.schedule(at, number, dead);
        }
        match side {
            Side::Client if !self.client.closed => self.down(why, context),
            Side::Client => {}
            Side::Server => self.server.set_state(State::Down(why.to_string()), context),
        }
    }

    fn frame(&mut self, to: Side, lane: Lane, connection: u64, frame: Frame, context: &mut Context) {
        let number = self.number;
        if let Frame::Piece { id, offset, bytes } = frame {
            return self.piece(to, lane, connection, (id, offset, bytes), context);
        }
        let now = context.now;
        if self.hung && to == Side::Server && !matches!(frame, Frame::Read { .. }) {
            if self.sleeps {
                self.asleep.push(Action::Frame { to, lane, connection, frame });
            }
            return;
        }
        let lost = |frame: &Frame| matches!(frame, Frame::Reply { .. } | Frame::Words { .. });
        if let Some((_, told)) = self.overflow.filter(|(of, _)| *of == to && lost(&frame)) {
            self.overflow = None;
            context.trace(number, format_args!("{to:?} loses a completion: {frame:?}"));
            match told {
                true => self.die(to, "a completion queue overflowed", context),
                false => context.tally.uncertain += 1,
            }
            return;
        }
        let end = self.end(to);
        if end.connection != Some(connection) {
            // Of another connection: dropped, whatever it is. A late reply does prove a fence of its own connection,
            // but that one's landings have theirs under way.
            if matches!(frame, Frame::Reply { .. } | Frame::Request { .. } | Frame::Words { .. }) {
                end.counters.stale += 1;
                context.tally.stale += 1;
                context.trace(number, format_args!("{to:?} drops {frame:?} of connection {connection}"));
            }
            return;
        }
        let frame = match frame {
            // The cards' own business: no sign of life of anybody's software.
            Frame::Read { id, slots, posted } => {
                return self.read((lane, connection, id), &slots, &posted, context);
            }
            Frame::Words { id, words } => return self.looked(to, id, words, context),
            Frame::Write { key, offset, bytes } => return self.write(to, key, offset, &bytes, context),
            frame => frame,
        };
        let end = self.end(to);
        let pending = &mut end.pending[index(lane)];
        let more = !pending.is_empty();
        if pending.liveness.heard(now, more) == Some(Sign::Alive) {
            let quiet = end.pending.iter().any(|pending| pending.liveness.is_silent());
            if !quiet {
                end.set_state(State::Up, context);
            }
        }
        match frame {
            Frame::Piece { .. } | Frame::Write { .. } | Frame::Read { .. } | Frame::Words { .. } | Frame::Pong => {}
            Frame::Ping => self.send(to.other(), lane, connection, Frame::Pong, context),
            Frame::Request { id, message } => {
                context.trace(number, format_args!("{to:?} gets request {id}"));
                let answer = Answer { link: number, to: to.other(), lane, connection, id };
                context.calls.push(Call::Serve(end.handler.clone(), message, answer));
                if context.chance(self.config.death) {
                    context.tally.deaths += 1;
                    self.kill("the network broke", context);
                }
            }
            Frame::Reply { id, bulk, message } => self.reply(to, lane, (id, bulk, message), context),
        }
    }

    fn reply(&mut self, to: Side, lane: Lane, (id, bulk, message): (u64, u32, Bytes), context: &mut Context) {
        let number = self.number;
        let end = self.end(to);
        let Some(entry) = end.pending[index(lane)].remove(id) else {
            // Given up, or answered before. It does prove that nothing is written there any more.
            end.counters.stale += 1;
            context.tally.stale += 1;
            context.trace(number, format_args!("{to:?} drops reply {id}"));
            end.release(id, context);
            return;
        };
        let allowed = entry.landing.as_ref().map_or(0, |(_, length)| *length);
        if bulk > allowed {
            let why = format!("a reply with {bulk} bytes of bulk where {allowed} were asked for");
            let fence = context.now.after(self.config.fence);
            let end = self.end(to);
            end.fail(id, entry, Cause::Disconnected(why.clone()), fence, context);
            return self.die(to, &why, context);
        }
        context.trace(number, format_args!("{to:?} gets reply {id}"));
        let end = self.end(to);
        end.counters.in_flight -= 1;
        end.keys.retain(|_, of| *of != id);
        let extent = entry.landing.and_then(|(extent, _)| end.fenced(extent));
        end.tell(Event::Replied { id, message, bulk, extent }, context);
    }

    /// Bulk lands wherever its request's memory still is, also after its request has failed: that is what fences are for.
    fn piece(
        &mut self,
        to: Side,
        lane: Lane,
        connection: u64,
        (id, offset, bytes): (u64, u32, Bytes),
        context: &mut Context,
    ) {
        let end = self.end(to);
        let current = end.connection == Some(connection);
        let waiting = if current { end.pending[index(lane)].get(id) } else { None };
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let reach = offset.saturating_add(length);
        match waiting {
            Some(Entry { landing: Some((extent, allowed)), .. }) if reach <= *allowed => {
                land::copy(extent, offset, &bytes);
                end.counters.bulk_received += bytes.len() as u64;
            }
            Some(Entry { landing, .. }) => {
                let allowed = landing.as_ref().map_or(0, |(_, length)| *length);
                let why = format!("bulk up to byte {reach} where {allowed} were asked for");
                self.die(to, &why, context);
            }
            None => {
                if let Some(held) = end.held.get_mut(&id)
                    && reach <= held.length
                {
                    land::copy(&mut held.extent, offset, &bytes);
                    context.tally.late += 1;
                    context.trace(self.number, format_args!("{to:?} is written to late, for {id}"));
                }
            }
        }
    }

    pub(super) fn close(&mut self, side: Side, context: &mut Context) {
        self.end(side).closed = true;
        self.die(side, "closed", context);
        if side == Side::Client {
            self.retry = Time::NEVER;
        }
        let end = self.end(side);
        for event in std::mem::take(&mut end.deferred) {
            end.tell(event, context);
        }
        // The device is closed with the rail: nothing writes any more.
        for id in end.held.keys().copied().collect::<Vec<_>>() {
            end.release(id, context);
        }
        if end.state != State::Down("closed".into()) {
            end.set_state(State::Down("closed".into()), context);
        }
    }
}
