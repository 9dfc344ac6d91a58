//! The core over simulated rails, by seeds: late, torn, lost and doubled completions, devices and ports that fail, writes to
//! arbitrary targets, and a server that hangs while its successor publishes. What was current when is known here alone.

use super::*;
use crate::rail::sim::{Forged, Side, Sim, SimConfig, SimLink};
use crate::rail::tcp::Limits;
use crate::rail::{Bulk, Events, Handler, Incoming, Lane, Rail};
use crate::read::lease::CheckWay;
use railfs_proto::slot::Slot;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// One run of the server's software: what it believes, and the slots in its memory.
struct Run {
    incarnation: u64,
    words: Arc<[AtomicU64]>,
    /// Version, publishes that have ended, whether one is under way.
    state: Mutex<(u64, u64, bool)>,
}

impl Run {
    fn new(incarnation: u64, version: u64) -> Arc<Run> {
        let words = Arc::from([AtomicU64::new(word(1, incarnation))]);
        Arc::new(Run { incarnation, words, state: Mutex::new((version, 1, false)) })
    }

    fn begin(&self) {
        let mut state = self.state.lock().unwrap();
        state.2 = true;
        let begun = Slot { in_progress: 1, counter: state.1 };
        self.words[0].store(begun.encode(self.incarnation), Ordering::SeqCst);
    }

    fn end(&self) {
        let mut state = self.state.lock().unwrap();
        *state = (state.0 + 1, state.1 + 1, false);
        self.words[0].store(word(state.1, self.incarnation), Ordering::SeqCst);
    }
}

impl Handler for Run {
    fn request(&self, incoming: Incoming) {
        let request = v1::RailRequest::decode(incoming.message).unwrap();
        let (version, slot, busy) = *self.state.lock().unwrap();
        let refused = |code: v1::Code| {
            let outcome = Some(v1::Outcome { code: code.into(), message: String::new() });
            (Bulk::None, v1::RailReply { outcome, body: None })
        };
        let good = |body| v1::RailReply { outcome: Some(ok_outcome()), body: Some(body) };
        let check = |proof: &v1::SlotProof| {
            let value = word(slot, self.incarnation);
            v1::CheckResult { current: proof.value == value && !busy, value }
        };
        let meant = request.scope.unwrap().incarnation == self.incarnation;
        let (bulk, reply) = match request.body.unwrap() {
            _ if !meant => refused(v1::Code::WrongIncarnation),
            v1::rail_request::Body::Fetch(fetch) => {
                let place = |offset| railfs_proto::layout::Place { component: fetch.component, offset };
                let mut bytes = Vec::new();
                while bytes.len() < fetch.length as usize {
                    let more = (fetch.length as usize - bytes.len()).min(PAGE as usize);
                    let at = striping().object_offset(place(fetch.offset + bytes.len() as u64));
                    bytes.extend(content(fetch.version, at, more));
                }
                let first = fetch.offset / u64::from(PAGE);
                let body = v1::rail_reply::Body::Fetch(v1::FetchReply {
                    version: fetch.version,
                    component: fetch.component,
                    offset: fetch.offset,
                    length: fetch.length,
                    checksums: page_checksums(fetch.version, fetch.component, first, PAGE, &bytes),
                    check: fetch.proof.as_ref().filter(|_| !busy).map(check),
                });
                (Bulk::Bytes(bytes.into()), good(body))
            }
            _ if busy => refused(v1::Code::Unavailable),
            v1::rail_request::Body::Check(request) => {
                let results = request.proofs.iter().map(check).collect();
                (Bulk::None, good(v1::rail_reply::Body::Check(v1::CheckReply { results })))
            }
            v1::rail_request::Body::Lookup(_) => {
                let descriptor = object(version, slot, self.incarnation).descriptor;
                let lookup = Lookup::Object(descriptor, proof(slot, self.incarnation));
                (Bulk::None, good(v1::rail_reply::Body::Lookup(lookup.to_message())))
            }
            v1::rail_request::Body::Lease(_) => {
                (Bulk::None, good(v1::rail_reply::Body::Lease(v1::LeaseReply { lease_milliseconds: 2000 })))
            }
            other => panic!("{other:?}"),
        };
        let message = Bytes::from(reply.encode_to_vec());
        incoming.replier.reply(bulk, Box::new(move |_| message));
    }
}

#[derive(Default)]
struct Inbox(Mutex<VecDeque<(usize, Event)>>);
struct Door(Arc<Inbox>, usize);

impl Events for Door {
    fn event(&self, event: Event) {
        self.0.0.lock().unwrap().push_back((self.1, event));
    }
}
struct Nobody;
impl Events for Nobody {
    fn event(&self, _: Event) {}
}
impl Handler for Nobody {
    fn request(&self, _: Incoming) {}
}

struct Stand {
    sim: Sim,
    links: Vec<SimLink>,
    inbox: Arc<Inbox>,
    core: Core,
    run: Arc<Run>,
    dice: Dice,
    object: Arc<Object>,
    /// By read: where, its version, what was current since it arrived, its deadline.
    asked: HashMap<u64, (u64, u32, u64, Vec<u64>, Time)>,
    next: u64,
    /// Bytes, ESTALE, other errors.
    answered: [u64; 3],
    config: SimConfig,
}

impl Stand {
    fn new(seed: u64, config: SimConfig) -> Stand {
        let run = Run::new(1, 2000);
        let mut stand = Stand {
            sim: Sim::new(seed),
            links: Vec::new(),
            inbox: Arc::default(),
            core: Core::new(Arena::new(8 << 20).unwrap(), 1 << 20),
            run,
            dice: Dice(seed),
            object: Arc::new(object(2000, 1, 1)),
            asked: HashMap::new(),
            next: 0,
            answered: [0; 3],
            config,
        };
        stand.core.check_way(CheckWay::Read);
        stand.session();
        for _ in 0..1 + seed % 2 {
            stand.link();
        }
        stand.pass(Duration::from_millis(20));
        stand
    }

    fn session(&mut self) {
        let incarnation = self.run.incarnation;
        let scope = v1::Scope { store: Bytes::from_static(&[9; 16]), node: "n".into(), incarnation };
        self.core.session(Session { scope, max_fetch: 1 << 20, pins: true, lease: LEASE });
    }

    /// Another rail, to the run that there is now.
    fn link(&mut self) {
        let rail = self.core.add_rail("sim");
        let client =
            (Arc::new(Door(self.inbox.clone(), rail)) as Arc<dyn Events>, Arc::new(Nobody) as Arc<dyn Handler>);
        let server = (Arc::new(Nobody) as Arc<dyn Events>, self.run.clone() as Arc<dyn Handler>);
        let link = self.sim.link(self.config.clone(), client, server);
        link.expose(self.run.words.clone(), self.run.incarnation);
        self.links.push(link);
    }

    fn read(&mut self, offset: u64, length: u32) {
        self.next += 1;
        let (id, now) = (self.next, self.sim.now());
        let (object, deadline) = (self.object.clone(), now.after(Duration::from_secs(10)));
        let version = object.descriptor.version;
        let current = vec![self.run.state.lock().unwrap().0];
        self.asked.insert(id, (offset, length, version, current, deadline));
        self.core.read(now, id, &object, 1, offset, length, Freshness::Current, deadline);
        self.act();
    }

    /// A publish ends: what it makes current is so for every read from now on.
    fn end_publish(&mut self) {
        let busy = self.run.state.lock().unwrap().2;
        if busy {
            self.run.end();
            let version = self.run.state.lock().unwrap().0;
            self.asked.values_mut().for_each(|asked| asked.3.push(version));
        }
    }

    fn act(&mut self) {
        loop {
            let now = self.sim.now();
            let event = self.inbox.0.lock().unwrap().pop_front();
            let quiet = event.is_none();
            if let Some((rail, event)) = event {
                self.core.rail_event(now, rail, event);
            }
            let actions = self.core.take_actions();
            if quiet && actions.is_empty() {
                break;
            }
            for action in actions {
                match action {
                    Action::Submit { rail, submission } => self.links[rail].client.submit(submission),
                    Action::Look { rail, look } => self.links[rail].client.look(look),
                    Action::Cancel { rail, id } => self.links[rail].client.cancel(id),
                    Action::Finish { id, parts } => self.finish(id, parts),
                    Action::Fail { id, error } => self.fail(id, &error),
                    Action::Checked { .. } | Action::LookedUp { .. } | Action::Renew => {}
                }
            }
            let committed = self.core.committed_bytes();
            assert!(committed <= self.core.arena.stats().total / 4 * 3, "I6: {committed} bytes are committed");
        }
    }

    fn finish(&mut self, id: u64, parts: Vec<Arc<Landed>>) {
        let (offset, length, version, current, _) = self.asked[&id].clone();
        let range = crate::read::plan::clamp(&striping(), offset, length);
        let mut at = range.start;
        while at < range.end {
            let part = parts.iter().find(|part| part.pages().contains(&(at / u64::from(PAGE)))).expect("I1: no gap");
            let end = (part.pages().end * u64::from(PAGE)).min(range.end);
            match part.verify(at..end) {
                Ok(bytes) => assert_eq!(bytes, content(version, at, bytes.len()), "I2"),
                Err(bad) => {
                    let part = part.clone();
                    drop(parts);
                    return self.core.finished(self.sim.now(), id, Err((part, bad.page)));
                }
            }
            at = end;
        }
        assert!(current.contains(&version), "I3: version {version} was never current: {current:?}");
        self.asked.remove(&id);
        drop(parts);
        self.core.finished(self.sim.now(), id, Ok(range.end - range.start));
        self.answered[0] += 1;
    }

    fn fail(&mut self, id: u64, error: &Error) {
        let Some((_, _, version, current, _)) = self.asked.remove(&id) else { return };
        let stale = matches!(error, Error::Stale { .. });
        assert!(!stale || current.iter().any(|now| *now > version), "ESTALE for the current version {version}");
        self.answered[if stale { 1 } else { 2 }] += 1;
    }

    /// Time passes, in steps of a tick.
    fn pass(&mut self, time: Duration) {
        let until = self.sim.now().after(time);
        while self.sim.now() < until {
            let tick = self.sim.now().after(Duration::from_millis(10)).min(until);
            while self.sim.next().is_some_and(|at| at <= tick) {
                self.sim.step();
                self.act();
            }
            self.sim.advance_to(tick);
            // As the timer does: it sleeps while the core says that there is nothing to do.
            if self.core.rest(tick, Duration::from_millis(10)).is_none() {
                self.core.tick(tick);
            }
            self.act();
            let late = self.asked.values().find(|asked| asked.4.after(Duration::from_millis(20)) < tick);
            assert!(late.is_none(), "I9: not answered: {late:?}");
        }
    }

    /// All answered, all memory back.
    fn quiesce(&mut self) {
        self.end_publish();
        self.pass(Duration::from_secs(12));
        assert!(self.asked.is_empty() && self.core.idle(), "{:?} {:?}", self.asked, self.core.activity());
        assert_eq!((self.core.committed_bytes(), self.core.arena.stats().exposed), (0, 0));
        self.links.iter().for_each(|link| link.client.close());
        self.act();
        self.core.close();
        let stats = self.core.arena.stats();
        assert_eq!((stats.free, stats.quarantined), (stats.total, 0));
    }
}

fn faults() -> SimConfig {
    SimConfig { loss: 0.01, duplicate: 0.1, death: 0.004, torn: 0.2, piece: 16 << 10, ..SimConfig::default() }
}

#[test]
fn i1_i3_i4_reads_over_simulated_rails_under_every_fault() {
    let (mut answered, mut looks, mut refused, mut late) = ([0; 3], [0; 2], 0, 0);
    for told in seeds(60) {
        let seed = told.0;
        let mut stand = Stand::new(seed, faults());
        for _ in 0..150 {
            let rail = stand.dice.roll(stand.links.len() as u64) as usize;
            let side = if stand.dice.roll(2) == 0 { Side::Client } else { Side::Server };
            let link = stand.links[rail].clone();
            match stand.dice.roll(26) {
                0..=9 => {
                    let (offset, length) = (stand.dice.roll(SIZE), 1 + stand.dice.roll(30_000) as u32);
                    stand.read(offset, length);
                }
                10 | 11 => stand.read(0, PAGE),
                12 => stand.run.begin(),
                13 | 14 => stand.end_publish(),
                15 => {
                    let (version, slot, _) = *stand.run.state.lock().unwrap();
                    stand.object = Arc::new(object(version, slot, stand.run.incarnation));
                }
                16 => link.overflow(side, stand.dice.roll(2) == 0),
                17 => link.port(side, false),
                18 | 19 => {
                    link.port(Side::Client, true);
                    link.port(Side::Server, true);
                }
                20 => link.device_fatal(side),
                // A WRITE to an arbitrary target; into a landing, but past its end; into one that is nobody's any more.
                21 => {
                    let (key, offset) = (stand.dice.roll(1 << 20) as u32, stand.dice.roll(1 << 20) as u32);
                    link.forge(
                        Side::Client,
                        Lane::Bulk,
                        Forged::Write { key, offset, bytes: Bytes::from_static(&[0xee; 64]) },
                    );
                }
                22 => {
                    let (id, words) = (stand.dice.roll(5000), vec![stand.dice.roll(u64::MAX)]);
                    let current = stand.dice.roll(2) == 0;
                    link.forge(Side::Client, Lane::Small, Forged::Words { id, words, current });
                }
                23 => link.hang(stand.dice.roll(3) == 0),
                _ => {}
            }
            let time = Duration::from_micros(stand.dice.roll(8000));
            stand.pass(time);
        }
        for link in stand.links.clone() {
            link.hang(false);
            link.port(Side::Client, true);
            link.port(Side::Server, true);
            link.configure(|config| (config.loss, config.death, config.duplicate) = (0.0, 0.0, 0.0));
            refused += link.refused_writes();
        }
        late += stand.sim.trace().iter().filter(|line| line.contains("is written to late")).count();
        stand.quiesce();
        let counts = stand.core.counts();
        answered.iter_mut().zip(stand.answered).for_each(|(sum, n)| *sum += n);
        looks.iter_mut().zip([counts.check_reads, counts.check_reads_again]).for_each(|(sum, n)| *sum += n);
    }
    assert!(answered[0] > 300 && answered[1] > 10, "{answered:?}");
    assert!(looks[0] > 50 && looks[1] > 0 && refused > 3 && late > 0, "{looks:?} {refused} {late}");
}

#[test]
fn i3_a_successor_publishes_while_the_predecessors_card_answers() {
    let (mut by_card, mut stale) = (0, 0);
    for told in seeds(60) {
        let seed = told.0;
        // The rails live on: what is looked at here is the lease, not the end of a rail that is silent.
        let limits = Limits { retire: Duration::from_secs(60), ..Limits::default() };
        let mut stand = Stand::new(seed, SimConfig { torn: 0.1, duplicate: 0.1, limits, ..SimConfig::default() });
        stand.read(0, PAGE);
        stand.pass(Duration::from_millis(5));
        let before = stand.dice.roll(2500);
        let reads = |stand: &mut Stand, milliseconds: u64| {
            let until = stand.sim.now().after(Duration::from_millis(milliseconds));
            while stand.sim.now() < until {
                stand.read(0, PAGE);
                let time = Duration::from_micros(500 + stand.dice.roll(60_000));
                stand.pass(time);
            }
        };
        reads(&mut stand, before);
        let counts = stand.core.counts();
        assert!(before < 100 || counts.check_reads > 0, "seed {seed}: {counts:?}");
        stand.links.iter().for_each(|link| link.hang(true));
        let version = stand.run.state.lock().unwrap().0;
        let successor = Run::new(2, version);
        // It has the directories' locks from now on, and publishes after a lease and a quarter, and a second.
        reads(&mut stand, 3500);
        by_card += stand.core.counts().check_reads - counts.check_reads;
        let orphan = std::mem::replace(&mut stand.run, successor);
        stand.run.begin();
        stand.end_publish();
        assert_eq!(orphan.words[0].load(Ordering::SeqCst), stand.object.proof().value, "the old word is still there");
        // No answer may be of the old version from here on; the client learns of the new run when it asks.
        reads(&mut stand, 1500);
        stand.session();
        stand.link();
        reads(&mut stand, 500);
        stale += stand.answered[1];
        stand.quiesce();
    }
    assert!(by_card > 300 && stale > 100, "{by_card} checks by the card of a hung server, {stale} stale");
}

#[test]
fn i7_a_write_outside_its_window_hits_nothing_and_ends_the_connection() {
    for (past, known) in [(1u32, true), (0, false)] {
        let mut stand = Stand::new(2, SimConfig::default());
        stand.links[0].hang(true);
        stand.read(0, PAGE);
        let id = stand.core.flights.keys().copied().next().unwrap();
        let key = if known { stand.links[0].key(id).unwrap() } else { 0xdead };
        let write = Forged::Write { key, offset: past, bytes: vec![0xee; 1 << 20].into() };
        stand.links[0].forge(Side::Client, Lane::Bulk, write);
        stand.pass(Duration::from_millis(5));
        assert_eq!(stand.links[0].refused_writes(), 1);
        assert!(!stand.sim.trace().iter().any(|line| line.contains("is written to by key")));
        stand.links[0].hang(false);
        stand.pass(Duration::from_secs(2));
        assert_eq!(stand.answered, [1, 0, 0], "another connection serves it");
        stand.quiesce();
    }
}
