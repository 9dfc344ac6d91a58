//! The client's end of a rail: two connections to one listener, kept up.
//!
//! Guarantees:
//! * The rail is up when both lanes are joined; when either ends, both are closed and new ones are made. Work of the old
//!   ones has failed by then; it is never moved (I5).
//! * One thread decides, and another, made for each attempt, connects: what blocks there delays nothing else (I9).
//! * [`TcpRail::close`] returns within a second or so, whatever the network or the tickets do.

use super::connection::{Connection, Parts};
use super::signal::{Deferred, Latch, Signal, lock, tell_late};
use super::{RailConfig, Tickets, socket};
use crate::clock::{Clock, Time};
use crate::rail::backoff::Backoff;
use crate::rail::pending::never_sent;
use crate::rail::totals::{Totals, add};
use crate::rail::{Cause, Counters, Event, Events, Handler, Lane, Rail, State, Submission};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use prost::Message;
use railfs_proto::frame::FrameKind;
use railfs_proto::reply::check_outcome;
use railfs_proto::v1::JoinReply;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

/// How long [`TcpRail::close`] waits for the threads, and the rail's thread for its connections.
const CLOSE: Duration = Duration::from_secs(1);
const CLOSE_LANES: Duration = Duration::from_millis(700);

/// Both lanes of a rail that is up.
#[derive(Debug)]
struct Pair {
    bulk: Arc<Connection>,
    small: Arc<Connection>,
}

impl Pair {
    fn lane(&self, lane: Lane) -> &Arc<Connection> {
        match lane {
            Lane::Bulk => &self.bulk,
            Lane::Small => &self.small,
        }
    }
}

/// A joined socket and its session.
type Joined = (TcpStream, u64);

enum Note {
    /// Look at the deferred events.
    Deferred,
    Nudge,
    Attempt(Result<(Joined, Joined), String>),
    /// A lane of the pair with this number has ended.
    Ended(u64, String),
    /// A lane fell silent, or is back.
    Silence,
    Close,
}

struct Shared {
    config: RailConfig,
    clock: Clock,
    tickets: Arc<dyn Tickets>,
    handler: Arc<dyn Handler>,
    events: Arc<dyn Events>,
    totals: Arc<Totals>,
    current: RwLock<Option<Arc<Pair>>>,
    state: Mutex<State>,
    deferred: Deferred,
    notes: Sender<Note>,
    closing: AtomicBool,
    /// Raised once, by close: ends connecting and joining.
    stop: Signal,
    latch: Arc<Latch>,
}

/// A client's rail to one listener.
pub struct TcpRail(Arc<Shared>);

impl std::fmt::Debug for TcpRail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let config = &self.0.config;
        f.debug_struct("TcpRail").field("name", &config.name).field("remote", &config.remote).finish()
    }
}

impl TcpRail {
    /// Starts connecting and returns. Fails only where the system has no thread or descriptor left.
    pub fn start(
        config: RailConfig,
        clock: Clock,
        tickets: Arc<dyn Tickets>,
        handler: Arc<dyn Handler>,
        events: Arc<dyn Events>,
    ) -> std::io::Result<Arc<TcpRail>> {
        let (notes, inbox) = unbounded();
        let shared = Arc::new(Shared {
            config,
            clock,
            tickets,
            handler,
            events,
            totals: Arc::default(),
            current: RwLock::new(None),
            state: Mutex::new(State::Connecting),
            deferred: Deferred::new(),
            notes,
            closing: AtomicBool::new(false),
            stop: Signal::new()?,
            latch: Arc::default(),
        });
        let running = shared.latch.enter();
        let of_thread = shared.clone();
        std::thread::Builder::new().name(shared.config.name.clone()).spawn(move || {
            running.begin();
            Keeper::new(of_thread, inbox).run();
            drop(running);
        })?;
        Ok(Arc::new(TcpRail(shared)))
    }

    /// Does not wait for the backoff: for when something suggests that the rail is back.
    pub fn connect_now(&self) {
        let _ = self.0.notes.send(Note::Nudge);
    }

    /// The configured name.
    pub fn name(&self) -> &str {
        &self.0.config.name
    }

    fn pair(&self) -> Option<Arc<Pair>> {
        self.0.current.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }
}

impl Rail for TcpRail {
    fn submit(&self, submission: Submission) {
        let shared = &self.0;
        add(&shared.totals.submitted, 1);
        let entered = match self.pair() {
            Some(pair) => pair.lane(submission.lane).enter(submission),
            None => Err((submission, Cause::Down)),
        };
        if let Err((submission, cause)) = entered {
            add(&shared.totals.failed, 1);
            match shared.deferred.push(never_sent(submission, cause)) {
                Ok(()) => {
                    let _ = shared.notes.send(Note::Deferred);
                }
                Err(event) => tell_late(shared.events.clone(), event),
            }
        }
    }

    fn cancel(&self, id: u64) {
        if let Some(pair) = self.pair() {
            for lane in [&pair.bulk, &pair.small] {
                if lane.waits_for(id) {
                    lane.give_up(id);
                }
            }
        }
    }

    fn counters(&self) -> Counters {
        self.0.totals.counters()
    }

    fn state(&self) -> State {
        lock(&self.0.state).clone()
    }

    fn close(&self) {
        let shared = &self.0;
        shared.closing.store(true, Ordering::SeqCst);
        shared.stop.raise();
        let _ = shared.notes.send(Note::Close);
        if !shared.latch.wait(CLOSE) {
            tracing::error!(rail = %shared.config.name, "a thread of the rail has not ended; it is left behind");
        }
    }
}

impl Drop for TcpRail {
    fn drop(&mut self) {
        self.close();
    }
}

/// What the rail is at.
enum Phase {
    /// Until then.
    Waiting(Time),
    /// An attempt is under way.
    Connecting,
    /// Up, or on its way down: `left` lanes have not ended.
    Paired { pair: Arc<Pair>, left: usize, down: bool },
}

/// The rail's thread.
struct Keeper {
    shared: Arc<Shared>,
    inbox: Receiver<Note>,
    backoff: Backoff,
    phase: Phase,
    /// Numbers the pairs: a note of an older one means nothing.
    number: u64,
    /// The reason of being down that was logged last.
    logged: Option<String>,
}

impl Keeper {
    fn new(shared: Arc<Shared>, inbox: Receiver<Note>) -> Keeper {
        let backoff = Backoff::new(shared.config.seed);
        Keeper { shared, inbox, backoff, phase: Phase::Waiting(Time(0)), number: 0, logged: None }
    }

    fn run(mut self) {
        loop {
            self.tell_deferred();
            if self.shared.closing.load(Ordering::SeqCst) {
                return self.close();
            }
            if let Phase::Waiting(until) = self.phase
                && until <= self.shared.clock.now()
            {
                self.attempt();
            }
            let note = match self.phase {
                Phase::Waiting(until) => match self.inbox.recv_deadline(self.shared.clock.instant(until)) {
                    Ok(note) => note,
                    Err(RecvTimeoutError::Timeout) => continue,
                    Err(RecvTimeoutError::Disconnected) => return self.close(),
                },
                Phase::Connecting | Phase::Paired { .. } => match self.inbox.recv() {
                    Ok(note) => note,
                    Err(_) => return self.close(),
                },
            };
            self.take(note);
        }
    }

    fn take(&mut self, note: Note) {
        match note {
            Note::Deferred | Note::Close => {}
            Note::Nudge => {
                if matches!(self.phase, Phase::Waiting(_)) {
                    self.phase = Phase::Waiting(Time(0));
                }
            }
            Note::Attempt(Ok(joined)) => {
                if let Err(why) = self.come_up(joined) {
                    self.go_down(why);
                }
            }
            Note::Attempt(Err(why)) => self.go_down(why),
            Note::Silence => self.silence(),
            Note::Ended(number, why) if number == self.number => self.lane_ended(&why),
            Note::Ended(..) => {}
        }
    }

    fn tell_deferred(&self) {
        for event in self.shared.deferred.take() {
            self.shared.events.event(event);
        }
    }

    /// Loud once: a rail that stays down for one reason is logged once, however often it is tried (I11).
    fn set_state(&mut self, state: State) {
        let config = &self.shared.config;
        match &state {
            State::Up => {
                self.logged = None;
                tracing::info!(rail = %config.name, remote = %config.remote, "rail is up");
            }
            State::Silent => {
                tracing::warn!(rail = %config.name, remote = %config.remote, "rail is silent while an answer is due");
            }
            State::Down(why) if self.logged.as_ref() != Some(why) => {
                tracing::warn!(rail = %config.name, remote = %config.remote, %why, "rail is down; it will be tried again");
                self.logged = Some(why.clone());
            }
            State::Down(_) | State::Connecting => {
                tracing::debug!(rail = %config.name, remote = %config.remote, ?state, "rail");
            }
        }
        lock(&self.shared.state).clone_from(&state);
        self.shared.events.event(Event::State(state));
    }

    fn attempt(&mut self) {
        self.phase = Phase::Connecting;
        if *lock(&self.shared.state) != State::Connecting || self.number == 0 {
            self.set_state(State::Connecting);
        }
        let shared = self.shared.clone();
        let running = shared.latch.enter();
        let name = format!("{}-join", shared.config.name);
        let spawned = std::thread::Builder::new().name(name).spawn(move || {
            running.begin();
            let result = join_lane(&shared, Lane::Small).and_then(|small| Ok((join_lane(&shared, Lane::Bulk)?, small)));
            let _ = shared.notes.send(Note::Attempt(result));
            drop(running);
        });
        if let Err(error) = spawned {
            self.go_down(format!("no thread could be started: {error}"));
        }
    }

    fn go_down(&mut self, why: String) {
        let now = self.shared.clock.now();
        let wait = self.backoff.failed(now);
        self.phase = Phase::Waiting(now.after(wait));
        self.set_state(State::Down(why));
    }

    fn come_up(&mut self, (bulk, small): (Joined, Joined)) -> Result<(), String> {
        self.number += 1;
        let text = |error: std::io::Error| error.to_string();
        let pair = Arc::new(Pair {
            bulk: self.connection(Lane::Bulk, bulk).map_err(text)?,
            small: self.connection(Lane::Small, small).map_err(text)?,
        });
        self.start(&pair.bulk).map_err(text)?;
        if let Err(error) = self.start(&pair.small) {
            pair.bulk.end("the other lane could not be started");
            return Err(error.to_string());
        }
        add(&self.shared.totals.connects, 1);
        self.backoff.connected(self.shared.clock.now());
        *self.shared.current.write().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(pair.clone());
        self.phase = Phase::Paired { pair, left: 2, down: false };
        self.set_state(State::Up);
        Ok(())
    }

    fn connection(&self, lane: Lane, (socket, session): Joined) -> std::io::Result<Arc<Connection>> {
        let shared = &self.shared;
        Connection::new(Parts {
            name: shared.config.name.clone(),
            peer: shared.config.remote,
            lane,
            session,
            socket,
            limits: shared.config.limits.clone(),
            clock: shared.clock,
            events: shared.events.clone(),
            handler: shared.handler.clone(),
            totals: vec![shared.totals.clone()],
        })
    }

    fn start(&self, connection: &Arc<Connection>) -> std::io::Result<()> {
        let kind = match connection.lane() {
            Lane::Bulk => "bulk",
            Lane::Small => "small",
        };
        let name = format!("{}-{kind}", self.shared.config.name);
        let (of_connection, of_rail) = (connection.running(), self.shared.latch.enter());
        let (connection, notes, number) = (connection.clone(), self.shared.notes.clone(), self.number);
        std::thread::Builder::new().name(name).spawn(move || {
            of_rail.begin();
            let why = connection.run(&|_| drop(notes.send(Note::Silence)));
            drop(connection);
            let _ = notes.send(Note::Ended(number, format!("{kind} lane: {why}")));
            drop((of_connection, of_rail));
        })?;
        Ok(())
    }

    fn forget_pair(&self) {
        *self.shared.current.write().unwrap_or_else(std::sync::PoisonError::into_inner) = None;
    }

    fn lane_ended(&mut self, why: &str) {
        let Phase::Paired { pair, left, down } = &mut self.phase else { return };
        *left -= 1;
        let (pair, left, first) = (pair.clone(), *left, !std::mem::replace(down, true));
        if first {
            self.forget_pair();
            pair.bulk.end(why);
            pair.small.end(why);
            // Told at once, tried again when both have ended.
            self.set_state(State::Down(why.to_string()));
        }
        if left == 0 {
            let now = self.shared.clock.now();
            let wait = self.backoff.failed(now);
            self.phase = Phase::Waiting(now.after(wait));
        }
    }

    fn silence(&mut self) {
        let Phase::Paired { pair, down: false, .. } = &self.phase else { return };
        let state = if pair.bulk.is_silent() || pair.small.is_silent() { State::Silent } else { State::Up };
        if *lock(&self.shared.state) != state {
            self.set_state(state);
        }
    }

    fn close(mut self) {
        self.forget_pair();
        if let Phase::Paired { pair, left, .. } = &mut self.phase {
            pair.bulk.end("closed");
            pair.small.end("closed");
            let until = Instant::now() + CLOSE_LANES;
            while *left > 0 {
                match self.inbox.recv_deadline(until) {
                    Ok(Note::Ended(number, _)) if number == self.number => *left -= 1,
                    Ok(_) => {}
                    Err(_) => break,
                }
            }
        }
        let closed = State::Down("closed".into());
        tracing::info!(rail = %self.shared.config.name, "rail is closed");
        lock(&self.shared.state).clone_from(&closed);
        self.shared.events.event(Event::State(closed));
        for event in self.shared.deferred.end() {
            self.shared.events.event(event);
        }
    }
}

/// Connects and joins one lane: on the attempt's own thread.
fn join_lane(shared: &Shared, lane: Lane) -> Result<Joined, String> {
    let config = &shared.config;
    let request = shared.tickets.join(lane, config.listener)?;
    let until = Instant::now() + config.limits.connect;
    let failed = |error: std::io::Error| match config.local {
        Some(local) => format!("{} from {local}: {error}", config.remote),
        None => format!("{}: {error}", config.remote),
    };
    let stream = socket::connect(config.remote, config.local, &config.limits, &shared.stop, until).map_err(failed)?;
    let session = request.session;
    let message = request.encode_to_vec();
    socket::write_frame(&stream, FrameKind::Join, session, &message, &shared.stop, until).map_err(failed)?;
    let (_, reply) = socket::read_frame(&stream, FrameKind::Joined, &shared.stop, until).map_err(failed)?;
    let reply = JoinReply::decode(reply.as_slice()).map_err(|error| format!("{}: {error}", config.remote))?;
    // Its words are escaped there.
    match check_outcome(reply.outcome.as_ref()) {
        Ok(()) => Ok((stream, session)),
        Err(refusal) => Err(format!("{} refused the rail: {}", config.remote, refusal.message)),
    }
}
