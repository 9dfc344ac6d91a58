//! The core against a small world: a server that publishes, rails that lose, delay, lie and die, and a clock; all from a
//! seed. The world has its own idea of which version was current when.

use super::*;
use crate::clock::Time;
use crate::memory::Fenced;
use crate::rail::{Cause, State};
use bytes::Bytes;
use prost::Message;
use railfs_proto::checksum::page_checksums;
use railfs_proto::descriptor::{Attributes, Descriptor, Id, Proof, Replica};
use railfs_proto::layout::Striping;
use railfs_proto::limits::LEASE;
use railfs_proto::reply::{Lookup, ok_outcome};

#[path = "looking_tests.rs"]
mod looking;
#[path = "pin_tests.rs"]
mod pins;
#[path = "sim_tests.rs"]
mod sim;

const PAGE: u32 = 4096;
const SIZE: u64 = 200_000;

/// Says by which seed a test failed, and how to run it alone.
struct Told(u64);

impl Drop for Told {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {0}: RAILFS_SEEDS={0} replays it alone", self.0);
        }
    }
}

/// The seeds from 0 to `count`; or those that RAILFS_SEEDS says, one or FROM..TO.
fn seeds(count: u64) -> impl Iterator<Item = Told> {
    let said = std::env::var("RAILFS_SEEDS").ok();
    let range = said.map_or(0..count, |said| {
        let number = |text: &str| text.parse::<u64>().unwrap_or_else(|error| panic!("RAILFS_SEEDS: {text}: {error}"));
        said.split_once("..").map_or_else(|| number(&said)..number(&said) + 1, |(from, to)| number(from)..number(to))
    });
    range.map(Told)
}

/// A generator of test decisions: splitmix64.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides
    }
}

/// Another byte every 64, so that it is cheap to make.
fn content(version: u64, from: u64, length: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length);
    while bytes.len() < length {
        let at = from + bytes.len() as u64;
        let run = (64 - at % 64).min((length - bytes.len()) as u64) as usize;
        bytes.resize(bytes.len() + run, (version.wrapping_mul(31) ^ (at >> 6).wrapping_mul(0x9e37_79b9) >> 7) as u8);
    }
    bytes
}

#[derive(Debug)]
struct Asked {
    object: Arc<Object>,
    offset: u64,
    length: u32,
    deadline: Time,
    /// Versions that were current at some moment since it arrived.
    current: Vec<u64>,
}

struct World {
    core: Core,
    now: Time,
    dice: Dice,
    posted: Vec<(usize, Submission)>,
    /// Landings of attempts that were given up: not ours until the "rail" lets go.
    held: Vec<(usize, u64, crate::memory::Exposed)>,
    asked: HashMap<u64, Asked>,
    object: Arc<Object>,
    version: u64,
    slot: u64,
    incarnation: u64,
    answered: [u64; 3],
    next: u64,
    lying: Option<usize>,
    /// Fetches that asked for bytes from the disk, whatever is kept.
    fresh: u64,
    /// What the server saw when it served a request whose reply is still on its way: slot and version.
    served: HashMap<u64, (u64, u64)>,
    /// The server's pins and what it has reclaimed.
    kept: pins::Kept,
    /// Calls that were answered.
    calls: Vec<(u64, Result<(), Error>)>,
    /// READs of slots under way, and the word of those that the card has served already.
    looks: Vec<(usize, crate::rail::Look)>,
    words: HashMap<u64, Vec<u64>>,
    /// Slots whose card goes on answering while their server says nothing any more: incarnation and state.
    orphan: Option<(u64, u64)>,
    /// Pages that turned out bad, while somebody still looks at them (`None`: nobody does).
    bad_parts: Option<Vec<Arc<Landed>>>,
    /// Looks that an orphan answered with the word that was asked about, after its successor had published.
    tempting: u64,
}

/// The word of the one slot, which counts publishes.
fn word(slot: u64, incarnation: u64) -> u64 {
    railfs_proto::slot::Slot { in_progress: 0, counter: slot }.encode(incarnation)
}

fn striping() -> Striping {
    Striping::new(SIZE, PAGE, 4 * PAGE, 2).unwrap()
}

fn object(version: u64, slot: u64, incarnation: u64) -> Object {
    object_of(version, slot, incarnation, striping())
}

pub(super) fn object_of(version: u64, slot: u64, incarnation: u64, striping: Striping) -> Object {
    let replica = || vec![Replica { node: "n".into(), directory: Id([1; 16]) }];
    let attributes = Attributes { mode: 0o644, mtime_seconds: 0, mtime_nanoseconds: 0, owner: None };
    let descriptor = Descriptor { version, attributes, striping, components: vec![replica(), replica()] };
    Object::new(ObjectName::new("ns", "key").unwrap(), descriptor, proof(slot, incarnation))
}

fn proof(slot: u64, incarnation: u64) -> Proof {
    Proof { node: "n".into(), incarnation, slot: 0, value: word(slot, incarnation), name_tag: 7 }
}

impl World {
    fn new(seed: u64, rails: usize, arena: u64) -> World {
        let mut core = Core::new(Arena::new(arena).unwrap(), 1 << 20);
        core.check_way(crate::read::lease::CheckWay::Auto);
        let scope = v1::Scope { store: Bytes::from_static(&[9; 16]), node: "n".into(), incarnation: 1 };
        core.session(Session { scope, max_fetch: 1 << 20, pins: true, lease: LEASE });
        for rail in 0..rails {
            core.add_rail(&format!("r{rail}"));
            core.rail_event(Time(0), rail, Event::State(State::Up));
        }
        World {
            core,
            now: Time(1),
            dice: Dice(seed),
            posted: Vec::new(),
            held: Vec::new(),
            asked: HashMap::new(),
            object: Arc::new(object(2000, 1, 1)),
            version: 2000,
            slot: 1,
            incarnation: 1,
            answered: [0; 3],
            next: 1,
            lying: None,
            fresh: 0,
            served: HashMap::new(),
            kept: pins::Kept::default(),
            calls: Vec::new(),
            looks: Vec::new(),
            words: HashMap::new(),
            orphan: None,
            bad_parts: None,
            tempting: 0,
        }
    }

    fn read(&mut self, handle: u64, offset: u64, length: u32) -> u64 {
        self.read_within(handle, offset, length, Duration::from_secs(10))
    }

    fn read_within(&mut self, handle: u64, offset: u64, length: u32, limit: Duration) -> u64 {
        self.next += 1;
        let (id, deadline) = (self.next, self.now.after(limit));
        let object = self.object.clone();
        let current = vec![self.version];
        self.asked.insert(id, Asked { object: object.clone(), offset, length, deadline, current });
        self.core.read(self.now, id, &object, handle, offset, length, Freshness::Current, deadline);
        self.act();
        id
    }

    fn publish(&mut self) {
        self.version += 1;
        self.slot += 1;
        for asked in self.asked.values_mut() {
            asked.current.push(self.version);
        }
    }

    fn act(&mut self) {
        loop {
            let actions = self.core.take_actions();
            if actions.is_empty() {
                break;
            }
            for action in actions {
                match action {
                    Action::Submit { rail, submission } => self.posted.push((rail, submission)),
                    Action::Cancel { rail, id } => self.cancel(rail, id),
                    Action::Finish { id, parts } => self.finish(id, parts),
                    Action::Fail { id, error } => self.fail(id, &error),
                    Action::Checked { id } => self.calls.push((id, Ok(()))),
                    Action::Look { rail, look } => self.looks.push((rail, look)),
                    Action::LookedUp { .. } | Action::Renew => {}
                }
            }
        }
        let committed = self.core.committed_bytes();
        assert!(committed <= self.core.arena.stats().total / 4 * 3, "I6: {committed} bytes are committed");
    }

    fn cancel(&mut self, rail: usize, id: u64) {
        if let Some(at) = self.looks.iter().position(|(r, look)| *r == rail && look.id == id) {
            return self.lose_look(at, Cause::Cancelled);
        }
        let Some(at) = self.posted.iter().position(|(r, s)| *r == rail && s.id == id) else { return };
        let (_, submission) = self.posted.swap_remove(at);
        let hand = match submission.landing {
            None => Hand::None,
            Some(landing) if self.dice.roll(2) == 0 => {
                self.held.push((rail, id, landing.extent.expose()));
                Hand::Held
            }
            Some(landing) => Hand::Fenced(landing.extent.filled(b"").unwrap()),
        };
        self.core.rail_event(self.now, rail, Event::Failed { id, cause: Cause::Cancelled, hand });
    }

    fn finish(&mut self, id: u64, parts: Vec<Arc<Landed>>) {
        let asked = &self.asked[&id];
        let range = crate::read::plan::clamp(&striping(), asked.offset, asked.length);
        let mut bytes: Vec<u8> = Vec::new();
        while (bytes.len() as u64) < range.end - range.start {
            let at = range.start + bytes.len() as u64;
            let part = parts.iter().find(|part| part.pages().contains(&(at / u64::from(PAGE)))).expect("I1: no gap");
            let end = (part.pages().end * u64::from(PAGE)).min(range.end);
            match part.verify(at..end) {
                Ok(more) => bytes.extend_from_slice(more),
                Err(bad) => {
                    let part = part.clone();
                    drop(parts);
                    self.bad_parts.iter_mut().for_each(|kept| kept.push(part.clone()));
                    self.core.finished(self.now, id, Err((part, bad.page)));
                    return;
                }
            }
        }
        let asked = self.asked.remove(&id).expect("answered once");
        let version = asked.object.descriptor.version;
        assert_eq!(bytes, content(version, range.start, bytes.len()), "I2");
        assert!(asked.current.contains(&version), "I3: version {version} was never current: {:?}", asked.current);
        drop(parts);
        self.core.finished(self.now, id, Ok(bytes.len() as u64));
        self.answered[0] += 1;
    }

    fn fail(&mut self, id: u64, error: &Error) {
        let Some(asked) = self.asked.remove(&id) else { return self.calls.push((id, Err(error.clone()))) };
        match error {
            Error::Stale { version, .. } => {
                assert!(*version < self.version, "ESTALE for the current version {version}");
                self.answered[1] += 1;
            }
            Error::TimedOut { .. } => {
                // A second is enough while it is known that nobody answers.
                let waited = Duration::from_secs(10).saturating_sub(asked.deadline.since(self.now));
                assert!(waited >= crate::outage::READ_PROBE, "timed out after {waited:?}");
            }
            Error::Damaged { .. } => assert!(self.lying.is_some(), "{error}"),
            Error::BadAnswer { .. } | Error::OverBudget { .. } => {}
            other => panic!("{other}"),
        }
        self.answered[2] += 1;
    }

    /// The server answers the submission at `at`.
    fn answer(&mut self, at: usize) {
        let (rail, submission) = self.posted.swap_remove(at);
        let request = v1::RailRequest::decode(submission.message.clone()).unwrap();
        let (slot, version) = self.served.remove(&submission.id).unwrap_or((self.slot, self.version));
        let mut reply = v1::RailReply { outcome: Some(ok_outcome()), body: None };
        let (mut bulk, mut extent): (u32, Option<Fenced>) = (0, None);
        let wrong = |reply: &mut v1::RailReply| {
            reply.outcome = Some(v1::Outcome { code: v1::Code::WrongIncarnation.into(), message: String::new() });
        };
        let incarnation = self.incarnation;
        let check = |proof: &v1::SlotProof, slot: u64| {
            let value = word(slot, incarnation);
            v1::CheckResult { current: proof.value == value, value }
        };
        if request.scope.as_ref().unwrap().incarnation != self.incarnation {
            wrong(&mut reply);
            extent = submission.landing.map(|landing| landing.extent.filled(b"").unwrap());
        } else {
            match request.body.unwrap() {
                v1::rail_request::Body::Fetch(fetch) if self.kept.reclaimed(fetch.version) => {
                    reply.outcome = Some(v1::Outcome { code: v1::Code::Stale.into(), message: String::new() });
                    extent = submission.landing.map(|landing| landing.extent.filled(b"").unwrap());
                }
                v1::rail_request::Body::Fetch(fetch) => {
                    self.fresh += u64::from(fetch.fresh);
                    let landing = submission.landing.unwrap();
                    let mut bytes = Vec::new();
                    let s = striping();
                    while bytes.len() < fetch.length as usize {
                        let offset = fetch.offset + bytes.len() as u64;
                        let place = railfs_proto::layout::Place { component: fetch.component, offset };
                        let more = (fetch.length as usize - bytes.len()).min(PAGE as usize);
                        bytes.extend(content(fetch.version, s.object_offset(place), more));
                    }
                    let first = fetch.offset / u64::from(PAGE);
                    let checksums = page_checksums(fetch.version, fetch.component, first, PAGE, &bytes);
                    if self.lying == Some(rail) && self.dice.roll(3) == 0 {
                        let at = self.dice.roll(bytes.len() as u64) as usize;
                        bytes[at] ^= 0x10;
                    }
                    bulk = fetch.length;
                    extent = Some(landing.extent.filled(&bytes).unwrap());
                    reply.body = Some(v1::rail_reply::Body::Fetch(v1::FetchReply {
                        version: fetch.version,
                        component: fetch.component,
                        offset: fetch.offset,
                        length: fetch.length,
                        checksums,
                        check: fetch.proof.as_ref().map(|proof| check(proof, slot)),
                    }));
                }
                v1::rail_request::Body::Check(request)
                    if request.proofs.iter().any(|proof| proof.incarnation != self.incarnation) =>
                {
                    wrong(&mut reply);
                }
                v1::rail_request::Body::Check(request) => {
                    let results = request.proofs.iter().map(|proof| check(proof, slot)).collect();
                    reply.body = Some(v1::rail_reply::Body::Check(v1::CheckReply { results }));
                }
                v1::rail_request::Body::Lookup(_) => {
                    let descriptor = object(version, slot, self.incarnation).descriptor;
                    let lookup = Lookup::Object(descriptor, proof(slot, self.incarnation));
                    reply.body = Some(v1::rail_reply::Body::Lookup(lookup.to_message()));
                }
                v1::rail_request::Body::Pin(pin) => {
                    reply.body = Some(v1::rail_reply::Body::Pin(self.kept.answer(&pin)));
                }
                v1::rail_request::Body::Lease(_) => {
                    reply.body = Some(v1::rail_reply::Body::Lease(v1::LeaseReply { lease_milliseconds: 2000 }));
                }
                v1::rail_request::Body::Pull(_) => unreachable!(),
            }
        }
        let message = Bytes::from(reply.encode_to_vec());
        let event = Event::Replied { id: submission.id, message, bulk, extent };
        self.core.rail_event(self.now, rail, event);
        self.act();
    }

    fn lose(&mut self, at: usize, cause: Cause) {
        let (rail, submission) = self.posted.swap_remove(at);
        let hand = submission.landing.map_or(Hand::None, |l| Hand::Fenced(l.extent.filled(b"").unwrap()));
        self.core.rail_event(self.now, rail, Event::Failed { id: submission.id, cause, hand });
        self.act();
    }

    fn die(&mut self, rail: usize) {
        while let Some(at) = self.posted.iter().position(|(r, _)| *r == rail) {
            self.lose(at, Cause::Disconnected("died".into()));
        }
        while let Some(at) = self.looks.iter().position(|(r, _)| *r == rail) {
            self.lose_look(at, Cause::Disconnected("died".into()));
        }
        self.core.rail_event(self.now, rail, Event::State(State::Down("died".into())));
        self.act();
        while let Some(at) = self.posted.iter().position(|(r, _)| *r == rail) {
            self.lose(at, Cause::Down);
        }
        while let Some(at) = self.looks.iter().position(|(r, _)| *r == rail) {
            self.lose_look(at, Cause::Down);
        }
    }

    fn release_held(&mut self) {
        for (rail, id, exposed) in std::mem::take(&mut self.held) {
            let extent = exposed.fenced(crate::memory::Fence::proved()).unwrap();
            self.core.rail_event(self.now, rail, Event::Released { id, extent });
        }
        self.act();
    }

    fn pass(&mut self, time: Duration) {
        self.now = self.now.after(time);
        self.core.tick(self.now);
        self.act();
    }

    fn restart(&mut self) {
        self.incarnation += 1;
        self.served.clear();
        self.slot += 1000;
        let scope = v1::Scope { store: Bytes::from_static(&[9; 16]), node: "n".into(), incarnation: self.incarnation };
        self.core.session(Session { scope, max_fetch: 1 << 20, pins: true, lease: LEASE });
        self.act();
    }

    fn answer_all(&mut self) {
        while !self.posted.is_empty() || !self.looks.is_empty() {
            while !self.looks.is_empty() {
                self.answer_look(0);
            }
            if !self.posted.is_empty() {
                self.answer(0);
            }
        }
    }

    /// Everything ends: all answered, all memory back, nothing in flight.
    fn quiesce(&mut self) {
        for _ in 0..3000 {
            self.release_held();
            self.answer_all();
            if self.asked.is_empty() && self.core.idle() && self.core.committed_bytes() == 0 {
                break;
            }
            self.pass(Duration::from_millis(10));
        }
        assert!(self.asked.is_empty(), "I9: not answered: {:?}", self.asked.keys());
        assert!(self.core.idle(), "still active: {:?}", self.core.activity());
        assert_eq!((self.core.committed_bytes(), self.core.arena.stats().exposed), (0, 0));
        self.core.close();
        let stats = self.core.arena.stats();
        assert_eq!((stats.free, stats.quarantined), (stats.total, 0));
    }
}

fn random_world(seed: u64) -> World {
    let mut world = World::new(seed, 1 + (seed % 3) as usize, if seed.is_multiple_of(2) { 4 << 20 } else { 8 << 20 });
    world.lying = seed.is_multiple_of(5).then_some(0);
    let rails = world.core.rails().len() as u64;
    for _ in 0..400 {
        match world.dice.roll(20) {
            0..=5 => {
                let sequential = world.dice.roll(2) == 0;
                let offset = if sequential { world.next * 8192 % SIZE } else { world.dice.roll(SIZE + 5000) };
                let length = 1 + world.dice.roll(60_000) as u32;
                world.read(1 + u64::from(sequential), offset, length);
            }
            6..=9 | 11 if !world.posted.is_empty() => {
                let at = world.dice.roll(world.posted.len() as u64) as usize;
                world.answer(at);
            }
            10 if !world.looks.is_empty() => {
                let at = world.dice.roll(world.looks.len() as u64) as usize;
                match world.dice.roll(8) {
                    0 => world.lose_look(at, Cause::Disconnected("flushed".into())),
                    1..=3 => world.serve_look(at),
                    _ => world.answer_look(at),
                }
            }
            12 if !world.posted.is_empty() => {
                let at = world.dice.roll(world.posted.len() as u64) as usize;
                world.lose(at, Cause::Expired);
            }
            13 => world.publish(),
            // The server serves a request now; its reply comes later.
            18 if !world.posted.is_empty() && world.dice.roll(2) == 0 => {
                let at = world.dice.roll(world.posted.len() as u64) as usize;
                let id = world.posted[at].1.id;
                world.served.entry(id).or_insert((world.slot, world.version));
            }
            14 => {
                // A new open gets the newest version.
                world.object = Arc::new(object(world.version, world.slot, world.incarnation));
            }
            15 => {
                let rail = world.dice.roll(rails) as usize;
                world.die(rail);
            }
            16 => {
                let rail = world.dice.roll(rails) as usize;
                world.core.rail_event(world.now, rail, Event::State(State::Up));
                if world.dice.roll(3) > 0 {
                    world.slots_up(rail);
                }
                world.act();
            }
            17 => {
                let rail = world.dice.roll(rails) as usize;
                if matches!(world.core.rails().view(rail).unwrap().state, State::Up) {
                    world.core.rail_event(world.now, rail, Event::State(State::Silent));
                    world.act();
                }
            }
            18 if world.dice.roll(6) == 0 => world.restart(),
            18 => world.release_held(),
            _ => {
                let time = Duration::from_millis(world.dice.roll(400));
                world.pass(time);
            }
        }
    }
    for rail in 0..rails as usize {
        world.core.rail_event(world.now, rail, Event::State(State::Up));
    }
    world.act();
    world
}

#[test]
fn i1_i3_random_schedules_give_one_current_version_or_an_error() {
    let mut answered = [0u64; 3];
    let mut looks = [0u64; 2];
    for told in seeds(400) {
        let seed = told.0;
        let mut world = random_world(seed);
        world.quiesce();
        answered.iter_mut().zip(world.answered).for_each(|(sum, n)| *sum += n);
        let counts = world.core.counts();
        looks.iter_mut().zip([counts.check_reads, counts.check_reads_again]).for_each(|(sum, n)| *sum += n);
    }
    assert!(looks[0] > 1000 && looks[1] > 50, "{looks:?}");
    // All three outcomes were really met: bytes, ESTALE, other errors.
    assert!(answered.iter().all(|&n| n > 300), "{answered:?}");
}

#[test]
fn i3_a_cached_page_is_checked_again_for_each_read() {
    let mut world = World::new(1, 2, 8 << 20);
    world.read(1, 0, 4096);
    world.answer_all();
    assert_eq!(world.answered[0], 1);
    world.publish();
    world.read(1, 0, 4096);
    assert_eq!(world.posted.len(), 1, "the page is cached: only a check goes out");
    world.answer_all();
    assert_eq!(world.answered, [1, 1, 1]);
    world.quiesce();
}

#[test]
fn i3_a_read_never_joins_a_check_already_posted() {
    let mut world = World::new(1, 1, 8 << 20);
    world.read(1, 0, 4096);
    world.answer_all();
    world.read(1, 0, 4096);
    let early = world.posted.len();
    world.read(1, 0, 4096);
    assert_eq!((early, world.posted.len()), (1, 1), "the second one gathers");
    world.answer(0);
    assert_eq!(world.answered[0], 2, "only the first is answered by the first frame");
    assert_eq!(world.posted.len(), 1);
    world.publish();
    world.answer_all();
    assert_eq!(world.answered, [2, 1, 1]);
    world.quiesce();
}

#[test]
fn i3_a_read_that_joins_a_fetch_needs_a_check_of_its_own() {
    let mut world = World::new(1, 1, 8 << 20);
    world.read(1, 0, 4096);
    world.read(2, 0, 4096);
    assert_eq!(world.posted.len(), 2, "one fetch, one check");
    let fetch = world.posted.iter().position(|(_, s)| s.landing.is_some()).unwrap();
    world.answer(fetch);
    assert_eq!(world.answered[0], 1);
    world.publish();
    world.answer_all();
    assert_eq!(world.answered, [1, 1, 1]);
    world.quiesce();
}

#[test]
fn i6_reads_beyond_the_arena_are_refused_before_anything_is_sent_or_wait_as_configured() {
    // Something else holds all but 32 KiB: room for two reads of a cell each.
    for refuse in [false, true] {
        let mut world = World::new(1, 2, 1 << 20);
        world.core.refuse = refuse;
        let mut held = Vec::new();
        while let Some(extent) = world.core.arena.allocate(16384) {
            held.push(extent);
        }
        held.truncate(held.len() - 2);
        let before = world.posted.len();
        for handle in 0..4 {
            world.read(handle, handle * 16384, 16384);
        }
        let sent = world.posted.len() - before;
        assert_eq!(sent, 2, "a fetch for each of two reads, and nothing for the others");
        assert_eq!(world.answered[2], if refuse { 2 } else { 0 }, "{refuse}");
        world.answer_all();
        assert_eq!(world.answered, if refuse { [2, 0, 2] } else { [4, 0, 0] }, "{refuse}");
        drop(held);
        world.read(9, 0, 16384);
        world.answer_all();
        assert_eq!(world.answered[0], if refuse { 3 } else { 5 });
        world.quiesce();
    }
}

#[test]
fn i10_a_fetch_whose_post_fails_goes_to_another_rail_at_once() {
    let refused = || Cause::Disconnected("ibv_post_send on queue pair 17 failed: Input/output error".into());
    for cause in [refused(), Cause::Down, Cause::Refused("256 requests wait for replies".into())] {
        let mut world = World::new(1, 2, 8 << 20);
        world.read(1, 0, 4096);
        let (rail, deadline) = (world.posted[0].0, world.posted[0].1.deadline);
        world.lose(0, cause.clone());
        assert_eq!(world.posted.len(), 1, "{cause:?}");
        assert_ne!(world.posted[0].0, rail, "{cause:?}");
        assert_eq!(world.posted[0].1.deadline, deadline, "within the same deadline");
        world.answer_all();
        assert_eq!(world.answered, [1, 0, 0], "{cause:?}");
        world.quiesce();
    }
}

#[test]
fn i9_requests_that_every_rail_fails_at_once_are_tried_again_later() {
    let mut world = World::new(1, 3, 8 << 20);
    // A fetch; then what is cached is asked for again, which is a check.
    for length in [8192, 4096] {
        let read = world.read(1, 0, length);
        let mut lost = 0;
        // None of the rails has said that it is down.
        while !world.posted.is_empty() || !world.looks.is_empty() {
            match world.posted.is_empty() {
                true => world.lose_look(0, Cause::Down),
                false => world.lose(0, Cause::Down),
            }
            lost += 1;
            assert!(lost <= 16, "in one moment");
        }
        assert_eq!(lost, 3, "each rail was tried once");
        assert!(world.asked.contains_key(&read));
        let answered = world.answered[0];
        world.pass(RETRY);
        world.answer_all();
        assert_eq!(world.answered[0], answered + 1);
    }
    world.quiesce();
}

#[test]
fn i5_a_reply_to_an_attempt_that_was_given_up_is_dropped() {
    let mut world = World::new(1, 2, 8 << 20);
    world.read(1, 0, 4096);
    let (rail, submission) = world.posted.pop().unwrap();
    world.core.rail_event(world.now, rail, Event::State(State::Silent));
    world.act();
    assert_eq!(world.posted.len(), 1, "the other rail does it");
    assert_ne!(world.posted[0].0, rail);
    let stale = world.core.counts().stale_replies;
    let extent = submission.landing.unwrap().extent.filled(&[0xee; 4096]).unwrap();
    let event = Event::Replied { id: submission.id, message: Bytes::new(), bulk: 4096, extent: Some(extent) };
    world.core.rail_event(world.now, rail, event);
    world.act();
    assert_eq!((world.core.counts().stale_replies, world.answered[0]), (stale + 1, 0));
    world.answer_all();
    assert_eq!(world.answered[0], 1);
    world.quiesce();
}

#[test]
fn i6_reads_wait_in_line_for_memory_and_hold_nothing() {
    let mut world = World::new(1, 1, 4 << 20);
    for i in 0..400 {
        // Objects of their own under one slot: nothing is shared.
        world.version += 1;
        world.object = Arc::new(object(world.version, world.slot, 1));
        world.read(i, (i * 16384) % SIZE, 16384);
    }
    let waiting = world.core.activity()[3];
    assert!(waiting > 50, "{waiting} wait");
    world.answer_all();
    assert_eq!(world.answered[0], 400);
    world.quiesce();
}

#[test]
fn i9_a_read_is_answered_by_its_deadline_when_every_rail_is_gone() {
    let mut world = World::new(1, 2, 8 << 20);
    world.read(1, 0, 100_000);
    world.die(0);
    world.die(1);
    world.pass(Duration::from_secs(9));
    assert_eq!(world.answered[2], 0);
    world.pass(Duration::from_secs(1));
    assert_eq!(world.answered[2], 1);
    world.quiesce();
}

/// An outage that is longer than what one check is given: a read may have more time than that.
#[test]
fn i9_a_read_that_waits_for_longer_than_a_check_may_goes_on_once_a_rail_is_back() {
    for (restarts, seconds) in [(false, 11), (true, 11), (false, 45), (true, 45)] {
        let mut world = World::new(1, 2, 8 << 20);
        world.read(1, 0, 4096);
        world.answer_all();
        // Its page is there: only a check is missing when everything goes.
        world.read_within(1, 0, 4096, Duration::from_secs(60));
        world.die(0);
        world.die(1);
        for _ in 0..seconds {
            world.pass(Duration::from_secs(1));
        }
        if restarts {
            world.restart();
        }
        world.core.rail_event(world.now, 1, Event::State(State::Up));
        world.act();
        world.answer_all();
        world.pass(Duration::from_millis(100));
        world.answer_all();
        assert_eq!(world.answered, [2, 0, 0], "restarts: {restarts}, after {seconds} s");
        world.quiesce();
    }
}

#[test]
fn i9_checks_lookups_and_reads_end_at_their_own_deadlines_while_the_server_says_nothing() {
    let mut world = World::new(1, 1, 8 << 20);
    world.read(1, 0, 4096);
    world.answer_all();
    let (object, name) = (world.object.clone(), world.object.name.clone());
    let failed = |world: &mut World, time: Time| -> Vec<u64> {
        world.core.tick(time);
        let actions = world.core.take_actions();
        let failed = actions.into_iter().filter_map(|action| match action {
            Action::Fail { id, error: Error::TimedOut { .. } } => Some(id),
            _ => None,
        });
        failed.collect()
    };
    let at = |seconds| Time(0).after(Duration::from_secs(seconds));
    world.core.check(world.now, 9001, &object, at(1));
    world.core.lookup(world.now, 9002, &name, at(2));
    // Its page is cached: no fetch has a deadline in its stead.
    world.core.read(world.now, 9003, &object, 1, 0, 4096, Freshness::Current, at(3));
    let just_before = |time: Time| Time(time.0 - 1);
    for (seconds, id) in [(1, 9001), (2, 9002), (3, 9003)] {
        assert!(failed(&mut world, just_before(at(seconds))).is_empty());
        assert_eq!(failed(&mut world, at(seconds)), [id]);
    }
}

/// The timer rests while the core says that there is nothing to do.
#[test]
fn i9_a_call_whose_rail_fails_as_its_deadline_passes_is_answered_all_the_same() {
    for which in ["lookup", "check", "pin"] {
        let mut world = World::new(1, 2, 8 << 20);
        let (object, name) = (world.object.clone(), world.object.name.clone());
        let deadline = world.now.after(Duration::from_secs(1));
        match which {
            "lookup" => world.core.lookup(world.now, 9001, &name, deadline),
            "check" => world.core.check(world.now, 9001, &object, deadline),
            _ => world.core.pin(world.now, 9001, &object, deadline),
        }
        world.act();
        // Nobody ticks at the deadline itself: the rail speaks first, and what it failed is too late for the other rail.
        world.now = deadline.after(Duration::from_secs(5));
        while !world.posted.is_empty() || !world.looks.is_empty() {
            match world.posted.is_empty() {
                true => world.lose_look(0, Cause::Expired),
                false => world.lose(0, Cause::Expired),
            }
        }
        assert_eq!(world.core.rest(world.now, Duration::from_secs(1)), None, "{which}: somebody waits");
        world.core.tick(world.now);
        let actions = world.core.take_actions();
        let failed = |action: &Action| matches!(action, Action::Fail { id: 9001, error: Error::TimedOut { .. } });
        assert!(actions.iter().any(failed), "{which}: {actions:?}");
    }
}

#[test]
fn i9_once_it_is_known_that_nobody_answers_calls_and_reads_fail_soon() {
    let mut world = World::new(1, 1, 8 << 20);
    let (object, start) = (world.object.clone(), world.now);
    world.die(0);
    let at = |milliseconds| start.after(Duration::from_millis(milliseconds));
    let failed = |world: &mut World, time: Time| -> Vec<u64> {
        world.core.tick(time);
        let actions = world.core.take_actions();
        let failed = actions.into_iter().filter_map(|action| match action {
            Action::Fail { id, error: Error::TimedOut { .. } } => Some(id),
            _ => None,
        });
        failed.collect()
    };
    world.core.check(at(0), 9001, &object, at(5000));
    assert!(failed(&mut world, at(4999)).is_empty(), "the first one waits");
    assert_eq!(failed(&mut world, at(5000)), [9001]);
    assert_eq!(world.core.silent_since(), Some(at(0)));
    world.core.check(at(6000), 9002, &object, at(11_000));
    world.core.read(at(6000), 9003, &object, 1, 0, 4096, Freshness::Current, at(16_000));
    assert_eq!(failed(&mut world, at(6500)), [9002]);
    assert_eq!(failed(&mut world, at(7000)), [9003]);
    // A sign of life ends it.
    world.core.rail_event(at(7000), 0, Event::State(State::Up));
    world.act();
    assert_eq!(world.core.silent_since(), None);
    world.core.check(at(8000), 9004, &object, at(13_000));
    assert!(failed(&mut world, at(12_999)).is_empty());
}

#[test]
fn i10_a_rail_that_dies_costs_no_read_that_another_can_serve() {
    let mut world = World::new(1, 2, 8 << 20);
    for i in 0..20 {
        world.read(i, i * 9000, 9000);
    }
    world.die(0);
    world.answer_all();
    assert_eq!(world.answered[0], 20);
    world.quiesce();
}

#[test]
fn i2_i10_a_lying_rail_is_found_out_and_the_read_served_by_another() {
    let mut world = World::new(3, 2, 8 << 20);
    world.lying = Some(0);
    for i in 0..60u64 {
        world.read(i, (i * 4096) % SIZE, 4096);
        world.answer_all();
        world.pass(Duration::from_millis(1));
    }
    assert_eq!(world.answered[0], 60);
    assert!(world.core.rails().view(0).unwrap().bad_pages > 0);
    assert_eq!(world.core.rails().view(1).unwrap().bad_pages, 0);
    // What was bad is not asked for from what the server may have kept.
    assert!(world.fresh > 0);
    world.quiesce();
}

#[test]
fn a_restart_of_the_server_is_met_by_looking_the_name_up_again() {
    let mut world = World::new(1, 1, 8 << 20);
    world.read(1, 0, 4096);
    world.answer_all();
    world.restart();
    world.read(1, 0, 4096);
    world.answer_all();
    assert_eq!(world.answered[0], 2);
    assert_eq!(world.core.counts().rechecks, 1);
    world.quiesce();
}

#[test]
fn a_check_that_waits_while_the_server_is_restarted_becomes_a_lookup() {
    let mut world = World::new(1, 1, 8 << 20);
    world.read(1, 0, 4096);
    world.answer_all();
    world.die(0);
    world.read(1, 0, 4096);
    world.restart();
    world.core.rail_event(world.now, 0, Event::State(State::Up));
    world.act();
    world.answer_all();
    assert_eq!((world.answered[0], world.core.counts().rechecks), (2, 1));
    world.quiesce();
}

#[test]
fn readahead_keeps_fetches_in_flight_for_a_sequential_reader_only() {
    let mut world = World::new(1, 2, 8 << 20);
    for i in 0..6 {
        world.read(1, i * 8192, 8192);
        world.answer_all();
    }
    assert!(world.core.counts().fetches_ahead > 0);
    let ahead = world.core.counts().fetches_ahead;
    for i in [9u64, 2, 17, 5, 11] {
        world.read(2, i * 9973, 4096);
        world.answer_all();
    }
    assert_eq!(world.core.counts().fetches_ahead, ahead);
    world.quiesce();
}
