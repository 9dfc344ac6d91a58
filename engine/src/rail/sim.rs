//! Rails without a network: both ends in this process, on a virtual clock, driven by a seed. For tests, at every level.
//!
//! Guarantees:
//! * Nothing happens but in [`Sim::step`] (and [`Rail::close`]): no threads, no wall clock. The same seed, calls and steps
//!   give the same [`Sim::trace`].
//! * It keeps the contract of the rail trait, as verbs will: a landing whose request has expired, or whose connection has
//!   died, may still be written to; the event says [`Hand::Held`], and [`Event::Released`] follows when the fence has come.
//! * Frames of one lane keep their order; lanes do not know of each other.
//! * A landing is reached by its key, inside its bounds, until its fence has come; any other WRITE hits nothing and ends the
//!   connection. A server whose software hangs is a card that goes on answering READs ([`SimLink::hang`]).

mod card;
mod link;

use super::backoff::Random;
use super::tcp::Limits;
use super::{Counters, Event, Events, Hand, Handler, Incoming, Lane, Look, Rail, State, Submission};
use crate::clock::Time;
use bytes::Bytes;
use link::{Action, Link};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What the network between two ends does.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Each frame and each piece of bulk takes between these two.
    pub delay: (Duration, Duration),
    /// Chance that a request or a reply vanishes (it was carried out, and nobody hears of it).
    pub loss: f64,
    /// Chance that a reply comes twice.
    pub duplicate: f64,
    /// Chance, per request, that the connection dies when it arrives.
    pub death: f64,
    /// Chance that a word that is READ is torn between two of its states.
    pub torn: f64,
    /// Bytes of bulk that land at once.
    pub piece: u32,
    /// How long a fence takes when no reply proves it.
    pub fence: Duration,
    /// Bounds of each lane. `socket_buffer` and `user_timeout` mean nothing here.
    pub limits: Limits,
}

impl Default for SimConfig {
    fn default() -> Self {
        SimConfig {
            delay: (Duration::from_micros(10), Duration::from_micros(200)),
            loss: 0.0,
            duplicate: 0.0,
            death: 0.0,
            torn: 0.0,
            piece: 64 << 10,
            fence: Duration::from_millis(5),
            limits: Limits::default(),
        }
    }
}

/// One end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Side {
    /// Connects.
    Client,
    /// Is connected to.
    Server,
}

impl Side {
    fn other(self) -> Side {
        match self {
            Side::Client => Side::Server,
            Side::Server => Side::Client,
        }
    }
}

/// A frame that a test makes up. It arrives at `to` after all that is under way on its lane.
#[derive(Clone, Debug)]
pub enum Forged {
    /// Bulk bytes of a reply land.
    Piece {
        /// The request.
        id: u64,
        /// Where in the landing.
        offset: u32,
        /// What.
        bytes: Bytes,
    },
    /// A WRITE of the server's to whatever it names.
    Write {
        /// The key: see [`SimLink::key`].
        key: u32,
        /// Where in the window.
        offset: u32,
        /// What.
        bytes: Bytes,
    },
    /// The completion of a look.
    Words {
        /// The look.
        id: u64,
        /// What it brings.
        words: Vec<u64>,
        /// Of this connection, or of its predecessor.
        current: bool,
    },
    /// A reply.
    Reply {
        /// The request.
        id: u64,
        /// Bulk bytes that it says have landed.
        bulk: u32,
        /// Its message.
        message: Bytes,
        /// Of this connection, or of its predecessor.
        current: bool,
    },
}

impl Event {
    /// Bytes of the memory that comes back with a failure.
    fn fenced_bytes(&self) -> u64 {
        match self {
            Event::Failed { hand: Hand::Fenced(extent), .. } => u64::from(extent.size()),
            _ => 0,
        }
    }
}

/// What must be done outside of the lock.
enum Call {
    Tell(Arc<dyn Events>, Event),
    Serve(Arc<dyn Handler>, Bytes, Answer),
}

struct Scheduled {
    at: Time,
    number: u64,
    link: usize,
    action: Action,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}
impl Eq for Scheduled {}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// What every part of the simulation shares.
struct Context {
    now: Time,
    number: u64,
    random: Random,
    heap: BinaryHeap<Reverse<Scheduled>>,
    calls: Vec<Call>,
    /// None: nobody wants it.
    trace: Option<Vec<String>>,
    tally: Tally,
}

/// How often something went wrong so far: what was asked for by chance or by a call may not come to pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Requests and replies that vanished.
    pub lost: u64,
    /// Replies and words that came twice.
    pub doubled: u64,
    /// Pieces that landed after their request had ended.
    pub late: u64,
    /// Words that came torn, other than each state they were torn between.
    pub torn: u64,
    /// Completions that were lost and not told.
    pub uncertain: u64,
    /// Connections that died of what the network did.
    pub deaths: u64,
    /// WRITEs that hit no window.
    pub refused: u64,
    /// Frames of another connection, and replies that nobody waits for.
    pub stale: u64,
}

impl Context {
    fn schedule(&mut self, at: Time, link: usize, action: Action) {
        self.number += 1;
        self.heap.push(Reverse(Scheduled { at, number: self.number, link, action }));
    }
    fn chance(&mut self, chance: f64) -> bool {
        // Drawn only where something can come of it, so that switching one fault off changes little else.
        chance > 0.0 && self.random.unit() < chance
    }
    fn trace(&mut self, link: usize, what: std::fmt::Arguments<'_>) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{} {link} {what}", self.now.0));
        }
    }
}

struct World {
    context: Context,
    links: Vec<Link>,
}

/// A simulation: a clock and any number of links.
#[derive(Clone)]
pub struct Sim(Arc<Mutex<World>>);

impl std::fmt::Debug for Sim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sim at {:?}", self.now())
    }
}

/// One end of a link, as a rail.
#[derive(Debug)]
pub struct SimRail {
    sim: Sim,
    link: usize,
    side: Side,
}

/// Both ends of a link, and the hand that meddles with it.
#[derive(Clone, Debug)]
pub struct SimLink {
    /// The client's end.
    pub client: Arc<SimRail>,
    /// The server's end.
    pub server: Arc<SimRail>,
    sim: Sim,
    number: usize,
}

impl Sim {
    /// At time 0, without links.
    pub fn new(seed: u64) -> Sim {
        Sim(Arc::new(Mutex::new(World {
            context: Context {
                now: Time(0),
                number: 0,
                random: Random::new(seed),
                heap: BinaryHeap::new(),
                calls: Vec::new(),
                trace: Some(Vec::new()),
                tally: Tally::default(),
            },
            links: Vec::new(),
        })))
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a link, which starts to connect. Each end has its events and its handler.
    pub fn link(
        &self,
        config: SimConfig,
        client: (Arc<dyn Events>, Arc<dyn Handler>),
        server: (Arc<dyn Events>, Arc<dyn Handler>),
    ) -> SimLink {
        let mut world = self.world();
        let World { context, links } = &mut *world;
        let number = links.len();
        links.push(Link::new(number, config, client, server, context));
        let end = |side| Arc::new(SimRail { sim: self.clone(), link: number, side });
        SimLink { client: end(Side::Client), server: end(Side::Server), sim: self.clone(), number }
    }

    /// The virtual time.
    pub fn now(&self) -> Time {
        self.world().context.now
    }

    /// When the next thing happens. A link that is up is never without one: it is pinged.
    pub fn next(&self) -> Option<Time> {
        self.world().next()
    }

    /// Lets the next thing happen. False when there is none.
    pub fn step(&self) -> bool {
        self.step_until(Time::NEVER)
    }

    /// The same, unless it is later than `limit`.
    pub fn step_until(&self, limit: Time) -> bool {
        let calls = {
            let mut world = self.world();
            let Some(at) = world.next().filter(|at| *at <= limit) else { return false };
            world.turn(at);
            std::mem::take(&mut world.context.calls)
        };
        self.run(calls);
        true
    }

    /// Lets everything happen up to `time`, and sets the clock to it.
    pub fn advance_to(&self, time: Time) {
        while self.step_until(time) {}
        let mut world = self.world();
        world.context.now = world.context.now.max(time);
    }

    /// Steps until `done`, but not past `limit`. Says whether it was done.
    pub fn run_until(&self, limit: Time, mut done: impl FnMut() -> bool) -> bool {
        loop {
            if done() {
                return true;
            }
            if self.next().is_none_or(|at| at > limit) || !self.step() {
                return done();
            }
        }
    }

    /// Everything that happened, a line each.
    pub fn trace(&self) -> Vec<String> {
        self.world().context.trace.clone().unwrap_or_default()
    }

    /// Bytes of landings of requests to closed rails, whose end is told with the next step: nobody else ever had them.
    pub fn untold(&self) -> u64 {
        let bytes = |call: &Call| match call {
            Call::Tell(_, event) => event.fenced_bytes(),
            Call::Serve(..) => 0,
        };
        self.world().context.calls.iter().map(bytes).sum()
    }

    /// A line of the caller's own for the trace.
    pub fn note(&self, what: std::fmt::Arguments<'_>) {
        let mut world = self.world();
        let now = world.context.now.0;
        if let Some(trace) = &mut world.context.trace {
            trace.push(format!("{now} - {what}"));
        }
    }

    /// Keeps no trace from here on: most of the time of a simulation goes into it.
    pub fn untraced(&self) {
        self.world().context.trace = None;
    }

    /// See [`Tally`].
    pub fn tally(&self) -> Tally {
        self.world().context.tally
    }

    fn run(&self, calls: Vec<Call>) {
        for call in calls {
            match call {
                Call::Tell(events, event) => events.event(event),
                Call::Serve(handler, message, answer) => {
                    let replier = Box::new(Replier { sim: self.clone(), answer });
                    handler.request(Incoming { message, replier });
                }
            }
        }
    }

    /// Something done to one link, and what came of it at once.
    fn on<T>(&self, link: usize, what: impl FnOnce(&mut Link, &mut Context) -> T) -> T {
        let mut world = self.world();
        let World { context, links } = &mut *world;
        what(&mut links[link], context)
    }
}

impl World {
    fn next(&self) -> Option<Time> {
        let scheduled = self.context.heap.peek().map(|Reverse(next)| next.at);
        let timers = self.links.iter().map(Link::next).filter(|at| *at != Time::NEVER);
        timers.chain(scheduled).min().map(|at| at.max(self.context.now))
    }

    fn turn(&mut self, at: Time) {
        self.context.now = at;
        let World { context, links } = self;
        if let Some(link) = links.iter_mut().find(|link| link.next() <= at) {
            return link.timer(context);
        }
        if let Some(Reverse(next)) = context.heap.pop() {
            links[next.link].arrive(next.action, context);
        }
    }
}

/// Where an answer goes.
#[derive(Clone, Copy, Debug)]
struct Answer {
    link: usize,
    /// Who asked.
    to: Side,
    lane: Lane,
    /// The connection on which it was asked.
    connection: u64,
    id: u64,
}

struct Replier {
    sim: Sim,
    answer: Answer,
}

impl super::Replier for Replier {
    fn reply(self: Box<Self>, bulk: super::Bulk, message: Box<dyn FnOnce(super::Sent) -> Bytes + Send>) {
        let (bytes, sent) = link::gather(bulk);
        let message = message(sent);
        self.sim.on(self.answer.link, |link, context| link.answer(self.answer, bytes, message, context));
    }
}

impl SimLink {
    /// Nothing gets through any more, in either direction, and no end is told.
    pub fn cut(&self) {
        self.sim.on(self.number, |link, _| link.cut = true);
    }
    /// The end of [`SimLink::cut`].
    pub fn heal(&self) {
        self.sim.on(self.number, |link, _| link.cut = false);
    }
    /// The connection dies: each end is told after a delay.
    pub fn kill(&self, why: &str) {
        self.sim.on(self.number, |link, context| link.kill(why, context));
    }
    /// Clients may READ these slots of the server's from now on; they are told.
    pub fn expose(&self, words: Arc<[AtomicU64]>, incarnation: u64) {
        self.sim.on(self.number, |link, context| link.expose(words, incarnation, context));
    }
    /// The server's software does nothing any more, or goes on; its card answers READs all the time.
    pub fn hang(&self, hangs: bool) {
        self.sim.on(self.number, |link, _| link.hung = hangs);
    }
    /// The server's software sleeps, or wakes up and finds what came meanwhile; its card answers READs all the time.
    pub fn pause(&self, sleeps: bool) {
        self.sim.on(self.number, |link, context| link.pause(sleeps, context));
    }
    /// Bytes of landings of requests that were refused, whose end was not told yet: nobody else ever had them.
    pub fn unexposed(&self) -> u64 {
        self.sim.on(self.number, |link, _| link.unexposed())
    }
    /// A port goes down, which its end hears of at once, or comes up.
    pub fn port(&self, of: Side, up: bool) {
        self.sim.on(self.number, |link, context| link.port(of, up, context));
    }
    /// A device fails: its end loses the connection at once.
    pub fn device_fatal(&self, of: Side) {
        self.sim.on(self.number, |link, context| link.die(of, "the device failed", context));
    }
    /// The next completion at that end is lost, since its queue has overflowed. `told`: the device says so, and the connection
    /// ends; else nobody ever hears of it.
    pub fn overflow(&self, of: Side, told: bool) {
        self.sim.on(self.number, |link, _| link.overflow = Some((of, told)));
    }
    /// The key by which a request's landing can be written to now.
    pub fn key(&self, id: u64) -> Option<u32> {
        self.sim.on(self.number, |link, _| link.key(id))
    }
    /// WRITEs that were refused.
    pub fn refused_writes(&self) -> u64 {
        self.sim.on(self.number, |link, _| link.refused_writes)
    }
    /// Changes what the network does from here on.
    pub fn configure(&self, change: impl FnOnce(&mut SimConfig)) {
        self.sim.on(self.number, |link, _| change(&mut link.config));
    }
    /// Sends a made-up frame to one end.
    pub fn forge(&self, to: Side, lane: Lane, frame: Forged) {
        self.sim.on(self.number, |link, context| link.forge(to, lane, frame, context));
    }
}

impl Rail for SimRail {
    fn submit(&self, submission: Submission) {
        self.sim.on(self.link, |link, context| link.submit(self.side, submission, context));
    }
    fn look(&self, look: Look) {
        self.sim.on(self.link, |link, context| link.look(self.side, look, context));
    }
    fn cancel(&self, id: u64) {
        self.sim.on(self.link, |link, _| link.cancel(self.side, id));
    }
    fn counters(&self) -> Counters {
        self.sim.on(self.link, |link, _| link.counters(self.side))
    }
    fn state(&self) -> State {
        self.sim.on(self.link, |link, _| link.state(self.side))
    }
    fn close(&self) {
        let calls = self.sim.on(self.link, |link, context| {
            let before = std::mem::take(&mut context.calls);
            link.close(self.side, context);
            std::mem::replace(&mut context.calls, before)
        });
        self.sim.run(calls);
    }
}
