//! The stand: the real core over simulated rails, the server behind them, and the checker beside them.
//!
//! Guarantees: after every step the core's books, the rails and the arena agree to the byte (I4, I6), and nobody waits beyond
//! a deadline (I9); at the end nothing is in flight, held, pinned or exposed.

use super::checker::{Asked, Checker, Excuses};
use super::faults::Agenda;
use super::kinds::{Kind, Met};
use super::server::{Faults, Log, NAMES, Port, Run, Store, name};
use super::{DRAWS, Dice, Outcome};
use crate::client::Object;
use crate::clock::Time;
use crate::memory::{Arena, Free};
use crate::rail::sim::{Sim, SimConfig, SimLink};
use crate::rail::tcp::Limits;
use crate::rail::{Cause, Event, Events, Hand, Handler, Incoming, Rail, State};
use crate::read::core::{Action, Core, Freshness, Session};
use crate::read::lease::CheckWay;
use bytes::Bytes;
use railfs_proto::limits::LEASE;
use railfs_proto::v1;
use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How often the core is told the time.
const TICK: Duration = Duration::from_millis(10);
/// Open handles.
pub(super) const HANDLES: u64 = 4;

#[derive(Default)]
struct Inbox(Mutex<VecDeque<(usize, Event)>>);

impl Inbox {
    fn take(&self) -> Option<(usize, Event)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }
}

struct Door(Arc<Inbox>, usize);

impl Events for Door {
    fn event(&self, event: Event) {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).push_back((self.1, event));
    }
}

struct Nobody;
impl Events for Nobody {
    fn event(&self, _: Event) {}
}
impl Handler for Nobody {
    fn request(&self, _: Incoming) {}
}

/// A rail, and what is wrong with it.
pub(super) struct Way {
    pub(super) link: SimLink,
    pub(super) faults: Arc<Faults>,
    /// Of which run.
    pub(super) incarnation: u64,
    /// Spells that last: it is not well while there is one.
    pub(super) ill: u32,
    /// Since when it has been up without a fault.
    well_since: Option<Time>,
    pub(super) gone: bool,
}

impl Way {
    /// Something went wrong with it just now.
    pub(super) fn hurt(&mut self) {
        self.well_since = None;
    }
}

/// See the module.
pub(super) struct Stand {
    pub(super) sim: Sim,
    pub(super) ways: Vec<Way>,
    inbox: Arc<Inbox>,
    pub(super) core: Core,
    arena: Arena,
    pub(super) store: Arc<Store>,
    pub(super) log: Arc<Log>,
    pub(super) run: Arc<Run>,
    /// Which run the client believes in.
    pub(super) believed: u64,
    /// Nothing is published before.
    pub(super) publish_from: Time,
    /// Its software does nothing at the moment; for good, if `dead`.
    pub(super) asleep: bool,
    pub(super) dice: Dice,
    pub(super) checker: Checker,
    pub(super) met: Met,
    pub(super) agenda: Agenda,
    pub(super) objects: Vec<Option<Arc<Object>>>,
    /// Memory that something else holds.
    pub(super) pressure: Vec<Free>,
    pressed: u64,
    /// Landings that a rail has exposed.
    exposed: BTreeSet<u64>,
    /// The last reply, to be told twice.
    pub(super) last_reply: Option<(usize, u64)>,
    next: u64,
    pub(super) events: u64,
    /// Something is wrong that no rail can help with, or was a moment ago.
    pub(super) server_ill_until: Time,
    pub(super) config: SimConfig,
    pub(super) nonsense: bool,
    /// Words that left it open, as counted a tick ago.
    open_words: u64,
}

thread_local! {
    /// The arena of this thread's schedules: mapping one is most of a short schedule's time. Each finds all of it free.
    static ARENA: RefCell<Option<Arena>> = const { RefCell::new(None) };
}

fn arena() -> Arena {
    ARENA.with_borrow_mut(|kept| {
        let whole = kept.take().filter(|arena| {
            let stats = arena.stats();
            stats.free == stats.total
        });
        let arena = whole.unwrap_or_else(|| Arena::new(5 << 20).unwrap_or_else(|error| panic!("{error}")));
        *kept = Some(arena.clone());
        arena
    })
}

/// The schedule of a seed.
pub(super) fn schedule(seed: u64, traced: bool) -> Outcome {
    let mut stand = Stand::new(seed, traced);
    for draw in 0..DRAWS {
        if stand.checker.broken.is_some() {
            break;
        }
        stand.sim.note(format_args!("draw {draw}"));
        stand.draw();
    }
    if stand.checker.broken.is_none() {
        stand.quiesce();
    }
    stand.outcome()
}

impl Stand {
    fn new(seed: u64, traced: bool) -> Stand {
        let mut dice = Dice(seed);
        let store = Store::new(dice.once_in(4));
        let log = Arc::new(Log::default());
        let run = Run::new(1, &store, &log);
        let arena = arena();
        // Every other rail lives on in silence, so that nothing but the lease stands between a card and its reader.
        let patient = Limits { retire: Duration::from_secs(60), ..Limits::default() };
        let limits = if dice.once_in(2) { patient } else { Limits::default() };
        let config = SimConfig { duplicate: 0.03, torn: 0.25, piece: 8 << 10, limits, ..SimConfig::default() };
        let mut stand = Stand {
            sim: Sim::new(seed),
            ways: Vec::new(),
            inbox: Arc::default(),
            core: Core::new(arena.clone(), 64 << 10),
            arena,
            store,
            log,
            run,
            believed: 1,
            publish_from: Time(0),
            asleep: false,
            checker: Checker::new(),
            met: Met::default(),
            agenda: Agenda::default(),
            objects: (0..HANDLES).map(|_| None).collect(),
            pressure: Vec::new(),
            pressed: 0,
            exposed: BTreeSet::new(),
            last_reply: None,
            next: 0,
            events: 0,
            server_ill_until: Time(0),
            config,
            nonsense: false,
            open_words: 0,
            dice,
        };
        if !traced {
            stand.sim.untraced();
        }
        let way = [CheckWay::Read, CheckWay::Read, CheckWay::Auto, CheckWay::Frame];
        let way = way[stand.dice.roll(4) as usize];
        stand.core.check_way(way);
        stand.session();
        for _ in 0..1 + stand.dice.roll(3) {
            stand.link();
        }
        stand.pass(Duration::from_millis(5));
        for handle in 0..HANDLES {
            stand.open(handle);
        }
        stand.pass(Duration::from_millis(5));
        stand
    }

    /// The client says hello to the run that there is now.
    pub(super) fn session(&mut self) {
        self.believed = self.run.incarnation;
        let scope = v1::Scope { store: Bytes::from_static(&[9; 16]), node: "n".into(), incarnation: self.believed };
        self.core.session(Session { scope, max_fetch: 1 << 20, pins: false, lease: LEASE });
    }

    /// Another rail, to the run that there is now.
    pub(super) fn link(&mut self) {
        let rail = self.core.add_rail(&format!("r{}", self.ways.len()));
        let faults = Arc::new(Faults::default());
        let port = Port { run: self.run.clone(), faults: faults.clone() };
        let client =
            (Arc::new(Door(self.inbox.clone(), rail)) as Arc<dyn Events>, Arc::new(Nobody) as Arc<dyn Handler>);
        let server = (Arc::new(Nobody) as Arc<dyn Events>, Arc::new(port) as Arc<dyn Handler>);
        let link = self.sim.link(self.config.clone(), client, server);
        link.expose(self.run.words.clone(), self.run.incarnation);
        let incarnation = self.run.incarnation;
        self.ways.push(Way { link, faults, incarnation, ill: 0, well_since: None, gone: false });
    }

    fn ask(&mut self, object: Option<Arc<Object>>, asked: Asked) -> (u64, Time) {
        self.next += 1;
        let deadline = asked.deadline;
        self.checker.asked.insert(self.next, Asked { object, ..asked });
        (self.next, deadline)
    }

    fn asked(&mut self, limit: Duration) -> Asked {
        let now = self.sim.now();
        Asked {
            object: None,
            name: 0,
            handle: 0,
            offset: 0,
            length: 0,
            freshness: Freshness::Current,
            arrived: now,
            deadline: now.after(limit),
            moment: self.checker.moment(),
        }
    }

    pub(super) fn read(&mut self, handle: u64, offset: u64, length: u32, freshness: Freshness, limit: Duration) {
        let Some(object) = self.objects[handle as usize].clone() else { return self.open(handle) };
        let asked = Asked { handle, offset, length, freshness, ..self.asked(limit) };
        let (id, deadline) = self.ask(Some(object.clone()), asked);
        let version = object.descriptor.version;
        self.sim.note(format_args!("read {id} of version {version}, {length} bytes at {offset}, {freshness:?}"));
        let waited = self.core.counts().reads_waited;
        let _ = self.core.read(self.sim.now(), id, &object, handle, offset, length, freshness, deadline);
        self.met.add_if(Kind::Waited, self.core.counts().reads_waited > waited);
        self.act();
    }

    pub(super) fn check(&mut self, handle: u64) {
        let Some(object) = self.objects[handle as usize].clone() else { return self.open(handle) };
        let asked = Asked { handle, ..self.asked(Duration::from_secs(5)) };
        let (id, deadline) = self.ask(Some(object.clone()), asked);
        self.sim.note(format_args!("check {id} of version {}", object.descriptor.version));
        self.core.check(self.sim.now(), id, &object, deadline);
        self.act();
    }

    /// The handle is opened anew: by lookup.
    pub(super) fn open(&mut self, handle: u64) {
        let which = (handle + self.dice.roll(5) / 4) % NAMES;
        let asked = Asked { name: which, handle, ..self.asked(Duration::from_secs(5)) };
        let (id, deadline) = self.ask(None, asked);
        self.sim.note(format_args!("lookup {id} of name {which} for handle {handle}"));
        self.core.lookup(self.sim.now(), id, &name(which), deadline);
        self.act();
    }

    /// The publish of a name ends, well or not.
    pub(super) fn publish_ended(&mut self, which: u64, done: bool) {
        if done {
            let (before, after) = self.store.advance(which);
            self.checker.superseded(before, after);
            self.sim.note(format_args!("version {after} takes the place of {before}"));
            self.met.add_if(Kind::Publish, !self.checker.asked.is_empty());
        }
        self.run.clone().end(which);
        self.act();
    }

    /// Hands events and actions to and fro until there are none.
    pub(super) fn act(&mut self) {
        let mut anything = false;
        loop {
            let event = self.inbox.take();
            let quiet = event.is_none();
            let now = self.sim.now();
            if let Some((rail, event)) = event {
                self.look_at(rail, &event);
                self.core.rail_event(now, rail, event);
            }
            let actions = self.core.take_actions();
            if quiet && actions.is_empty() {
                break;
            }
            anything = true;
            for action in actions {
                self.perform(now, action);
            }
        }
        let until = self.sim.now();
        for (late, replier, bulk, message) in self.log.take_outbox() {
            self.agenda.answer(until.after(late), replier, bulk, message);
        }
        // Nobody's hands change without a word to the core or from it.
        if anything {
            self.audit();
        }
    }

    /// The checker sees what a rail says before the core does.
    fn look_at(&mut self, rail: usize, event: &Event) {
        match event {
            Event::Replied { id, .. } => {
                self.exposed.remove(id);
                self.last_reply = Some((rail, *id));
            }
            Event::Released { id, .. } => {
                self.exposed.remove(id);
            }
            Event::Failed { id, cause, hand: Hand::Fenced(_) }
                if self.exposed.remove(id) && !matches!(cause, Cause::Down | Cause::Refused(_)) =>
            {
                self.checker.breaks(format!("I4: the memory of {id} came back without a fence: {cause:?}"));
            }
            Event::Looked { id, words } => self.sim.note(format_args!("look {id} brings {words:x?}")),
            _ => {}
        }
    }

    fn perform(&mut self, now: Time, action: Action) {
        match action {
            Action::Submit { rail, submission } => {
                let Some(way) = self.ways.get(rail) else { return };
                let (id, landing) = (submission.id, submission.landing.is_some());
                way.link.client.submit(submission);
                if landing && way.link.key(id).is_some() {
                    self.exposed.insert(id);
                }
            }
            Action::Look { rail, look } => {
                if let Some(way) = self.ways.get(rail) {
                    self.sim.note(format_args!("look {} by rail {rail}: slots {:?}", look.id, look.slots));
                    way.link.client.look(look);
                }
            }
            Action::Cancel { rail, id } => {
                if let Some(way) = self.ways.get(rail) {
                    way.link.client.cancel(id);
                }
            }
            Action::Finish { id, parts } => {
                self.sim.note(format_args!("{id} is answered with bytes"));
                let result = self.checker.finish(id, &parts);
                drop(parts);
                match result {
                    Ok(bytes) => self.core.finished(now, id, Ok(bytes)),
                    Err(Some(bad)) => self.core.finished(now, id, Err(bad)),
                    Err(None) => {}
                }
            }
            Action::Fail { id, error } => {
                self.sim.note(format_args!("{id} fails: {error}"));
                let stale = matches!(error, crate::error::Error::Stale { .. });
                let handle = self.checker.asked.get(&id).map(|asked| asked.handle);
                // As programs do: most open the name again.
                if let Some(handle) = handle.filter(|_| stale && !self.dice.once_in(4)) {
                    self.objects[handle as usize] = None;
                }
                let excuses = self.excuses();
                let outage = self.checker.fail(now, id, &error, &excuses);
                self.met.add_if(Kind::Outage, outage);
            }
            Action::Checked { id } => {
                self.sim.note(format_args!("check {id} passes"));
                self.checker.checked(id);
            }
            Action::LookedUp { id, found } => {
                if let Some((handle, object)) = self.checker.looked_up(id, &found) {
                    self.objects[handle as usize] = Some(object);
                }
            }
            // The client hears of another run over the control connection: see the agenda.
            Action::Renew => {}
        }
    }

    fn excuses(&self) -> Excuses {
        let damaged = self.log.corrupt.load(Ordering::SeqCst) > 0;
        let nonsense = self.nonsense || self.log.short.load(Ordering::SeqCst) > 0;
        let well = self.ways.iter().filter(|way| !way.gone).filter_map(|way| way.well_since).min();
        let well_since = well.map(|since| since.max(self.server_ill_until));
        Excuses { damaged, nonsense, well_since }
    }

    /// I4 and I6: every byte has exactly one owner, and each book says so.
    fn audit(&mut self) {
        let stats = self.arena.stats();
        let holdings = match self.core.audit() {
            Ok(holdings) => holdings,
            Err(what) => return self.checker.breaks(what),
        };
        let (mut held, mut unexposed) = (0, self.sim.untold());
        for way in &self.ways {
            held += way.link.client.counters().held_bytes;
            unexposed += way.link.unexposed();
        }
        let owned = stats.free + held + unexposed + holdings.waiting + holdings.cached + holdings.loose + self.pressed;
        if stats.quarantined > 0 || stats.exposed != held || owned != stats.total {
            let what =
                format!("I4: {stats:?}; rails hold {held}, and {unexposed} unexposed; something else {}", self.pressed);
            self.checker.breaks(format!("{what}; {holdings:?}"));
        }
        if holdings.with_rails != held + unexposed {
            self.checker.breaks(format!("I6: rails hold {held} and {unexposed}, the core knows of {holdings:?}"));
        }
        if holdings.ledger > stats.total / 4 * 3 {
            self.checker.breaks(format!("I6: {} of {} are committed", holdings.ledger, stats.total));
        }
    }

    /// Something else takes nearly all of the arena, or gives it back.
    pub(super) fn press(&mut self, on: bool) {
        self.pressure.clear();
        if on {
            let leave = self.dice.roll(3);
            while let Some(extent) = self.arena.allocate(1 << 20) {
                self.pressure.push(extent);
            }
            let keep = self.pressure.len().saturating_sub(leave as usize);
            self.pressure.truncate(keep);
            self.met.add_if(Kind::Pressure, keep > 0);
        }
        self.pressed = self.pressure.iter().map(|extent| u64::from(extent.size())).sum();
    }

    /// Time passes, in steps of a tick.
    pub(super) fn pass(&mut self, time: Duration) {
        let until = self.sim.now().after(time);
        while self.sim.now() < until && self.checker.broken.is_none() {
            let due = self.agenda.next().max(self.sim.now());
            let tick = self.sim.now().after(TICK).min(until).min(due);
            while self.sim.step_until(tick) {
                self.events += 1;
                self.act();
            }
            self.sim.advance_to(tick);
            // As the timer does: it sleeps while the core says that there is nothing to do.
            if self.core.rest(tick, TICK).is_none() {
                self.core.tick(tick);
            }
            self.act();
            self.run_agenda(tick);
            self.wellness(tick);
            self.checker.overdue(tick);
        }
    }

    /// The client sleeps: rails and server go on, and what comes waits for it.
    pub(super) fn suspend(&mut self, time: Duration) {
        let until = self.sim.now().after(time);
        while self.sim.step_until(until) {
            self.events += 1;
        }
        self.sim.advance_to(until);
        self.server_ill_until = until.after(Duration::from_millis(1));
        self.met.add(Kind::Suspend);
        self.act();
        self.core.tick(until);
        self.act();
    }

    fn wellness(&mut self, now: Time) {
        for way in &mut self.ways {
            let well = way.ill == 0 && way.incarnation == self.believed && way.link.client.state() == State::Up;
            way.well_since = if well { way.well_since.or(Some(now)) } else { None };
        }
        if self.asleep || self.believed != self.run.incarnation || !self.pressure.is_empty() {
            self.server_ill_until = now.after(Duration::from_millis(1));
        }
        let counts = self.core.counts();
        // A word came, and the lease was over.
        self.met.add_if(Kind::Lease, self.asleep && counts.check_reads_again > self.open_words);
        self.open_words = counts.check_reads_again;
    }

    /// All faults end: all is answered, all memory comes back.
    fn quiesce(&mut self) {
        self.heal();
        let end = self.sim.now().after(Duration::from_secs(60));
        let quiet = |stand: &Stand| {
            stand.checker.asked.is_empty()
                && stand.core.idle()
                && stand.arena.stats().exposed == 0
                && stand.agenda.is_empty()
        };
        while !quiet(self) && self.sim.now() < end && self.checker.broken.is_none() {
            self.pass(TICK);
        }
        if self.checker.broken.is_some() {
            return;
        }
        if !quiet(self) {
            let (asked, activity) = (self.checker.asked.keys().collect::<Vec<_>>(), self.core.activity());
            let what = format!("it does not come to rest: {asked:?} wait, {activity:?}, {:?}", self.arena.stats());
            return self.checker.breaks(what);
        }
        for way in &self.ways {
            way.link.client.close();
        }
        self.act();
        self.core.close();
        self.act();
        self.objects.clear();
        let stats = self.arena.stats();
        if (stats.free, stats.quarantined, self.core.committed_bytes()) != (stats.total, 0, 0) {
            self.checker.breaks(format!("I4: at rest there is still {stats:?}"));
        }
    }

    fn outcome(mut self) -> Outcome {
        let tally = self.sim.tally();
        for (kind, count) in [
            (Kind::Loss, tally.lost),
            (Kind::Late, tally.late),
            (Kind::Double, tally.doubled),
            (Kind::Torn, tally.torn),
            (Kind::Uncertain, tally.uncertain),
            (Kind::StrayWrite, tally.refused),
            (Kind::StrayReply, tally.stale),
        ] {
            self.met.add_if(kind, count > 0);
        }
        let log = &self.log;
        for (kind, count) in [
            (Kind::Held, &log.held),
            (Kind::Corrupt, &log.corrupt),
            (Kind::Short, &log.short),
            (Kind::Refused, &log.refused),
            (Kind::Reclaimed, &log.reclaimed),
            (Kind::SlowAnswer, &log.slow),
        ] {
            self.met.add_if(kind, count.load(Ordering::SeqCst) > 0);
        }
        let counts = self.core.counts();
        let digest = counts.named().iter().fold(self.checker.digest, |digest, (_, count)| {
            (digest.rotate_left(7) ^ count).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        });
        Outcome {
            met: self.met,
            events: DRAWS + self.events,
            answered: self.checker.answered,
            broken: self.checker.broken.take(),
            trace: self.sim.trace(),
            digest: digest ^ self.events,
        }
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        // Repliers know the simulation, which knows the ports: it would keep itself alive.
        self.agenda.clear();
        drop(self.log.take_outbox());
        self.run.forget();
    }
}
