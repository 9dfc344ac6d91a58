//! The client's end of a verbs rail: one connection to one listener, kept up.
//!
//! Guarantees:
//! * The rail is up when all its queue pairs are connected and the other side's device has acknowledged a message on each: a
//!   handshake over the control connection says nothing of the way that the rail's packets take. When one of them fails all
//!   are destroyed, and new ones are made. Work of the old ones has failed by then; it is never moved (I5).
//! * One thread decides, and another, made for each attempt, opens, registers and connects: what blocks there delays nothing
//!   else (I9). The arena is registered once, and stays so while the device is open.
//! * A port that goes down ends the connection at once, one that comes up is tried at once.
//! * [`VerbsRail::close`] returns within a second or so, whatever the network or the server do.

use super::group::{Group, Parts};
use super::prepare::{Device, Half, Plan};
use super::watch::{Verdict, Watch, verdict};
use super::{Join, Opening, VerbsRailConfig};
use crate::clock::{Clock, Time};
use crate::memory::Arena;
use crate::rail::backoff::Backoff;
use crate::rail::pending::never_sent;
use crate::rail::tcp::signal::{Deferred, Latch, lock, tell_late};
use crate::rail::totals::{Totals, add};
use crate::rail::{Cause, Counters, Event, Events, Hand, Handler, Look, Rail, Slots, State, Submission};
use crate::verbs::{Access, DeviceEvent, Mr, WrId};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use railfs_proto::verbs::End;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// How long [`VerbsRail::close`] waits for the threads, and the rail's thread for its connection.
const CLOSE: Duration = Duration::from_millis(1500);
const CLOSE_GROUP: Duration = Duration::from_millis(1200);

enum Note {
    /// Look at the deferred events.
    Deferred,
    Nudge,
    Attempt(Result<Arc<Group>, String>),
    /// On each queue pair of the connection with this number something has arrived.
    Reached(u32),
    /// The connection with this number has ended.
    Ended(u32, String),
    Silence,
    Close,
}

/// A device that is open, with the arena registered: what a rail begins with, so that several can be had all or none.
/// Dropping it deregisters the arena.
pub struct Opened {
    device: Device,
    landing: Arc<Mr>,
    windows: bool,
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened").field("device", &self.device.context.name()).finish_non_exhaustive()
    }
}

impl Opened {
    /// Opens the device that has the address, and registers the arena. Blocks for as long as pinning its pages takes.
    ///
    /// # Errors
    /// What cannot be had, with device, port, address or bytes; nothing is registered then.
    pub fn open(name: &str, address: IpAddr, arena: &Arena, opening: Opening) -> Result<Opened, String> {
        Opened::on(Device::open(Some(name), address)?, arena, opening)
    }

    /// The same with a device that is open.
    pub(super) fn on(device: Device, arena: &Arena, opening: Opening) -> Result<Opened, String> {
        let name = device.context.name().to_owned();
        let has = device.facts.windows_2b && device.facts.max_windows > 0;
        let windows = match opening {
            Opening::Auto => has,
            Opening::Windows if !has => {
                return Err(format!("device {name} has no memory windows of type 2B, which were asked for"));
            }
            Opening::Windows => true,
            Opening::OpenArena => false,
        };
        let (bytes, most) = (arena.stats().total, device.facts.max_region);
        if bytes > most {
            return Err(format!(
                "device {name} registers {most} bytes at once, the arena has {bytes}: make it smaller"
            ));
        }
        let access = if windows { Access::Landing } else { Access::OpenLanding };
        let landing = Mr::register(&device.pd, arena.clone(), access).map_err(|error| error.to_string())?;
        Ok(Opened { device, landing, windows })
    }
}

/// The device of a rail that has begun.
struct Open {
    opened: Opened,
    /// Of the device's events.
    _watch: Watch,
}

struct Shared {
    config: VerbsRailConfig,
    clock: Clock,
    arena: Arena,
    join: Arc<dyn Join>,
    handler: Arc<dyn Handler>,
    events: Arc<dyn Events>,
    totals: Arc<Totals>,
    open: Mutex<Option<Open>>,
    /// What the rail was given to begin with.
    ready: Mutex<Option<Opened>>,
    /// The device has failed: it is opened anew.
    reopen: AtomicBool,
    /// The connection, from when its thread runs; requests wait until it is ready.
    current: RwLock<Option<Arc<Group>>>,
    generations: AtomicU32,
    state: Mutex<State>,
    deferred: Deferred,
    notes: Sender<Note>,
    closing: AtomicBool,
    /// Said once that there are no windows.
    said: AtomicBool,
    latch: Arc<Latch>,
}

/// A client's rail to one verbs listener.
pub struct VerbsRail(Arc<Shared>);

impl std::fmt::Debug for VerbsRail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let config = &self.0.config;
        f.debug_struct("VerbsRail").field("name", &config.name).field("remote", &config.remote).finish()
    }
}

impl VerbsRail {
    /// Starts connecting and returns. Fails only where the system has no thread left.
    pub fn start(
        config: VerbsRailConfig,
        clock: Clock,
        arena: Arena,
        join: Arc<dyn Join>,
        handler: Arc<dyn Handler>,
        events: Arc<dyn Events>,
    ) -> std::io::Result<Arc<VerbsRail>> {
        VerbsRail::start_with(config, clock, arena, join, handler, events, None)
    }

    /// The same with a device that is open already.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn start_with(
        config: VerbsRailConfig,
        clock: Clock,
        arena: Arena,
        join: Arc<dyn Join>,
        handler: Arc<dyn Handler>,
        events: Arc<dyn Events>,
        ready: Option<Opened>,
    ) -> std::io::Result<Arc<VerbsRail>> {
        let (notes, inbox) = unbounded();
        let shared = Arc::new(Shared {
            config,
            clock,
            arena,
            join,
            handler,
            events,
            totals: Arc::default(),
            open: Mutex::new(None),
            ready: Mutex::new(ready),
            reopen: AtomicBool::new(false),
            current: RwLock::new(None),
            generations: AtomicU32::new(0),
            state: Mutex::new(State::Connecting),
            deferred: Deferred::new(),
            notes,
            closing: AtomicBool::new(false),
            said: AtomicBool::new(false),
            latch: Arc::default(),
        });
        let running = shared.latch.enter();
        let of_thread = shared.clone();
        std::thread::Builder::new().name(shared.config.name.clone()).spawn(move || {
            running.begin();
            Keeper::new(of_thread, inbox).run();
            drop(running);
        })?;
        Ok(Arc::new(VerbsRail(shared)))
    }

    /// Does not wait for the backoff: for when something suggests that the rail is back.
    pub fn connect_now(&self) {
        let _ = self.0.notes.send(Note::Nudge);
    }

    /// The connection, once it is up.
    fn group(&self) -> Option<Arc<Group>> {
        let current = self.0.current.read().unwrap_or_else(PoisonError::into_inner).clone();
        current.filter(|group| group.is_ready())
    }
}

impl Rail for VerbsRail {
    fn submit(&self, submission: Submission) {
        let shared = &self.0;
        add(&shared.totals.submitted, 1);
        let entered = match self.group() {
            Some(group) => group.enter(submission),
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

    fn look(&self, look: Look) {
        let shared = &self.0;
        let looking = self.group().map_or(Err(Cause::Down), |group| group.look(&look));
        if let Err(cause) = looking {
            match shared.deferred.push(Event::Failed { id: look.id, cause, hand: Hand::None }) {
                Ok(()) => {
                    let _ = shared.notes.send(Note::Deferred);
                }
                Err(event) => tell_late(shared.events.clone(), event),
            }
        }
    }

    fn cancel(&self, id: u64) {
        if let Some(group) = self.group()
            && group.waits_for(id)
        {
            group.give_up(id);
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
        let _ = shared.notes.send(Note::Close);
        if !shared.latch.wait(CLOSE) {
            tracing::error!(rail = %shared.config.name, "a thread of the rail has not ended; it is left behind");
        }
    }
}

impl Drop for VerbsRail {
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
    /// All is connected, and nothing has been acknowledged on some queue pair.
    Joining(Arc<Group>),
    /// Up, or on its way down.
    Connected(Arc<Group>),
}

/// The rail's thread.
struct Keeper {
    shared: Arc<Shared>,
    inbox: Receiver<Note>,
    backoff: Backoff,
    phase: Phase,
    /// Of the connection; a note of an older one means nothing.
    number: u32,
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
            for event in self.shared.deferred.take() {
                self.shared.events.event(event);
            }
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
                Phase::Connecting | Phase::Joining(_) | Phase::Connected(_) => match self.inbox.recv() {
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
            Note::Attempt(Ok(group)) => {
                if let Err(why) = self.join(group) {
                    self.go_down(why);
                }
            }
            Note::Attempt(Err(why)) => self.go_down(why),
            Note::Reached(number) if number == self.number => self.come_up(),
            Note::Silence => self.silence(),
            Note::Ended(number, why) if number == self.number => {
                self.forget();
                let why = match &self.phase {
                    Phase::Joining(group) if !group.is_polite() => self.unreached(&why),
                    _ => why,
                };
                self.go_down(why);
            }
            Note::Reached(_) | Note::Ended(..) => {}
        }
    }

    /// Loud once: a rail that stays down for one reason is logged once, however often it is tried (I11).
    fn set_state(&mut self, state: State) {
        let config = &self.shared.config;
        match &state {
            State::Up => {
                self.logged = None;
                tracing::info!(rail = %config.name, device = %config.device, remote = %config.remote, "rail is up");
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
            let result = connect(&shared);
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

    /// Begins to send; the rail is up when that has arrived.
    fn join(&mut self, group: Arc<Group>) -> Result<(), String> {
        self.number += 1;
        let (of_group, of_rail) = (group.running(), self.shared.latch.enter());
        let (of_thread, notes, number) = (group.clone(), self.shared.notes.clone(), self.number);
        let name = format!("{}-poll", self.shared.config.name);
        let spawned = std::thread::Builder::new().name(name).spawn(move || {
            of_rail.begin();
            let reached = || drop(notes.send(Note::Reached(number)));
            let why = of_thread.run(&|_| drop(notes.send(Note::Silence)), &reached);
            drop(of_thread);
            let _ = notes.send(Note::Ended(number, why));
            drop((of_group, of_rail));
        });
        spawned.map_err(|error| format!("no thread could be started: {error}"))?;
        // The device's events are about it from here on.
        *self.shared.current.write().unwrap_or_else(PoisonError::into_inner) = Some(group.clone());
        group.say_ready();
        self.phase = Phase::Joining(group);
        Ok(())
    }

    fn come_up(&mut self) {
        let Phase::Joining(group) = &self.phase else { return };
        let group = group.clone();
        add(&self.shared.totals.connects, 1);
        self.backoff.connected(self.shared.clock.now());
        // Before those who wait for the rail begin.
        let slots = group.slots().map(|slots| Slots { incarnation: slots.incarnation, count: slots.count });
        self.shared.events.event(Event::Slots(slots));
        self.phase = Phase::Connected(group);
        self.set_state(State::Up);
    }

    /// Why a connection that was agreed on carried nothing, for those who look after the network.
    fn unreached(&self, why: &str) -> String {
        let config = &self.shared.config;
        format!(
            "the server agreed to connect, and nothing sent from {} arrived at {} ({why}): RDMA over Ethernet is UDP to port \
             4791, which a firewall on either host or between them may drop, and the devices' MTU must fit through every switch",
            config.address, config.remote
        )
    }

    fn forget(&self) {
        *self.shared.current.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn silence(&mut self) {
        let Phase::Connected(group) = &self.phase else { return };
        if group.why().is_some() {
            return;
        }
        let state = if group.is_silent() { State::Silent } else { State::Up };
        if *lock(&self.shared.state) != state {
            self.set_state(state);
        }
    }

    fn close(mut self) {
        self.forget();
        if let Phase::Joining(group) | Phase::Connected(group) = &self.phase {
            group.close("closed");
            let until = Instant::now() + CLOSE_GROUP;
            loop {
                match self.inbox.recv_deadline(until) {
                    Ok(Note::Ended(number, _)) if number == self.number => break,
                    Ok(Note::Attempt(Ok(group))) => drop(group),
                    Ok(_) => {}
                    Err(_) => break,
                }
            }
        }
        self.phase = Phase::Connecting;
        // An attempt that is still under way has it, and drops what it made.
        if let Ok(mut open) = self.shared.open.try_lock() {
            *open = None;
        }
        *lock(&self.shared.ready) = None;
        let closed = State::Down("closed".into());
        tracing::info!(rail = %self.shared.config.name, "rail is closed");
        lock(&self.shared.state).clone_from(&closed);
        self.shared.events.event(Event::State(closed));
        for event in self.shared.deferred.end() {
            self.shared.events.event(event);
        }
    }
}

/// Takes the device that was given, or opens it, and begins to watch it.
fn open(shared: &Arc<Shared>) -> Result<Open, String> {
    let config = &shared.config;
    let ready = lock(&shared.ready).take();
    let opened = match ready {
        Some(opened) => opened,
        None => Opened::open(&config.device, config.address, &shared.arena, config.opening)?,
    };
    if !opened.windows && !shared.said.swap(true, Ordering::SeqCst) {
        tracing::warn!(
            rail = %config.name, device = %config.device,
            "no memory windows: the arena is open to the server as a whole, and a fetch that is given up costs the connection"
        );
    }
    let weak = Arc::downgrade(shared);
    let look = opened.device.look();
    let watch = Watch::start(&opened.device.context, move |event| {
        let Some(shared) = weak.upgrade() else { return };
        let group = shared.current.read().unwrap_or_else(PoisonError::into_inner).clone();
        let owns = |event: &DeviceEvent| group.as_ref().is_some_and(|group| group.owns(event));
        let verdict = verdict(event, look.port(), &owns, &|| look.address());
        if matches!(verdict, Verdict::Reopen(_)) {
            shared.reopen.store(true, Ordering::SeqCst);
        }
        match (verdict, &group) {
            (Verdict::End(why) | Verdict::Reopen(why), Some(group)) => {
                group.end(format!("device {}: {why}", shared.config.device));
            }
            (Verdict::Retry | Verdict::Reopen(_), _) => drop(shared.notes.send(Note::Nudge)),
            (Verdict::End(_), None) | (Verdict::Nothing, _) => {}
        }
    });
    let watch = watch.map_err(|error| format!("device {}: {error}", config.device))?;
    Ok(Open { opened, _watch: watch })
}

/// One attempt: on its own thread.
fn connect(shared: &Arc<Shared>) -> Result<Arc<Group>, String> {
    let config = &shared.config;
    // Only one attempt is under way at a time, and close waits for it.
    let mut opened = lock(&shared.open);
    if shared.closing.load(Ordering::SeqCst) {
        return Err("closed".into());
    }
    if shared.reopen.swap(false, Ordering::SeqCst) {
        *opened = None;
    }
    if opened.is_none() {
        *opened = Some(open(shared)?);
    }
    let Some(open) = opened.as_ref().map(|open| &open.opened) else { return Err("the device is not open".into()) };
    let number = shared.generations.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
    let generation = WrId::generation(number.into());
    let plan = Plan {
        device: &open.device,
        bulk: usize::from(config.bulk_pairs),
        memory: vec![open.landing.clone()],
        written: true,
        slots: false,
        windows: open.windows,
        generation,
    };
    let half = Half::new(&plan)?;
    let (session, theirs) = shared.join.join(config.listener, half.end().to_message())?;
    if shared.closing.load(Ordering::SeqCst) {
        return Err("closed".into());
    }
    let theirs = End::from_message(Some(&theirs)).map_err(|error| format!("{}: {error}", config.remote))?;
    let full = half.connect(&theirs)?;
    Group::new(Parts {
        name: config.name.clone(),
        peer: config.remote.clone(),
        session,
        generation,
        limits: config.limits.clone(),
        clock: shared.clock,
        events: shared.events.clone(),
        handler: shared.handler.clone(),
        totals: vec![shared.totals.clone()],
        source: None,
        landing: Some(open.landing.clone()),
        pulled: None,
        // Where the arena is open as a whole it is open to WRITEs alone.
        offered: open.windows.then(|| shared.arena.clone()),
        read: Arc::default(),
        windows: open.windows.then(|| open.device.pd.clone()),
        soft: open.device.facts.soft,
        cq: full.cq,
        buffers: full.buffers,
        pairs: full.pairs,
        depth: full.depth,
        their_depth: theirs.depth,
        their_piece: theirs.piece,
        slots: theirs.slots.filter(|_| full.reads),
    })
    .map_err(|error| error.to_string())
}
