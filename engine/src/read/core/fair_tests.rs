//! The core beside a clock and rails of so many bytes a second: who waits how long, and what is fetched for it. Bytes are not
//! looked at here.

use super::tests::object_of;
use super::*;
use crate::rail::State;
use bytes::Bytes;
use prost::Message;
use railfs_proto::layout::Striping;
use railfs_proto::limits::LEASE;
use railfs_proto::reply::ok_outcome;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Bytes a second of each rail, and there and back.
const BANDWIDTH: u64 = 1000 * MIB;
const ROUND_TRIP: Duration = Duration::from_micros(100);

fn striping(size: u64) -> Striping {
    Striping::new(size, 64 << 10, 1 << 20, 2).unwrap()
}

fn time_of(bytes: u64) -> Duration {
    Duration::from_nanos(bytes * 1_000_000_000 / BANDWIDTH)
}

/// Where the next read of a reader goes; `None`: it is done.
type Next<'a> = Box<dyn FnMut(u64) -> Option<(u64, u32)> + 'a>;

struct Program<'a> {
    object: Arc<Object>,
    handle: u64,
    next: Next<'a>,
    /// How long it looks at what it read.
    think: Duration,
    reads: u64,
    bytes: u64,
    waits: Vec<Duration>,
}

struct Sim<'a> {
    core: Core,
    now: Time,
    rails: Vec<VecDeque<(Time, Submission)>>,
    busy: Vec<Time>,
    /// Fetches answered with damage.
    damaged: bool,
    programs: Vec<Program<'a>>,
    under_way: HashMap<u64, (usize, Time, u64)>,
    /// Programs that look at what they read, until then.
    thinking: Vec<(Time, usize)>,
    next: u64,
    fetched: Vec<u32>,
    failed: Vec<Error>,
    cancelled: usize,
}

impl<'a> Sim<'a> {
    fn new(arena: u64, rails: usize) -> Sim<'a> {
        let mut core = Core::new(Arena::new(arena).unwrap(), 16 * MIB);
        let scope = v1::Scope { store: Bytes::from_static(&[9; 16]), node: "n".into(), incarnation: 1 };
        core.session(Session { scope, max_fetch: 1 << 20, pins: true, lease: LEASE });
        for rail in 0..rails {
            core.add_rail(&format!("r{rail}"));
            core.rail_event(Time(0), rail, Event::State(State::Up));
        }
        Sim {
            core,
            now: Time(1),
            rails: (0..rails).map(|_| VecDeque::new()).collect(),
            busy: vec![Time(0); rails],
            damaged: false,
            programs: Vec::new(),
            under_way: HashMap::new(),
            thinking: Vec::new(),
            next: 1,
            fetched: Vec::new(),
            failed: Vec::new(),
            cancelled: 0,
        }
    }

    /// `depth`: reads that it keeps waiting.
    fn program(
        &mut self,
        object: &Arc<Object>,
        handle: u64,
        depth: usize,
        next: impl FnMut(u64) -> Option<(u64, u32)> + 'a,
    ) -> usize {
        let (object, next, think) = (object.clone(), Box::new(next) as Next<'a>, Duration::from_micros(5));
        let program = Program { object, handle, next, think, reads: 0, bytes: 0, waits: Vec::new() };
        self.programs.push(program);
        let at = self.programs.len() - 1;
        self.thinking.extend(std::iter::repeat_n((self.now, at), depth));
        at
    }

    fn read(&mut self, at: usize) {
        let program = &mut self.programs[at];
        let Some((offset, length)) = (program.next)(program.reads) else { return };
        program.reads += 1;
        self.next += 1;
        let (id, object, handle) = (self.next, program.object.clone(), program.handle);
        let bytes = crate::read::plan::clamp(&object.descriptor.striping, offset, length);
        self.under_way.insert(id, (at, self.now, bytes.end - bytes.start));
        let deadline = self.now.after(Duration::from_secs(10));
        self.core.read(self.now, id, &object, handle, offset, length, Freshness::Current, deadline);
        self.act();
    }

    fn act(&mut self) {
        loop {
            let actions = self.core.take_actions();
            if actions.is_empty() {
                break;
            }
            for action in actions {
                match action {
                    Action::Submit { rail, submission } => {
                        let bytes = submission.landing.as_ref().map_or(0, |landing| u64::from(landing.length));
                        let sent = self.now.after(ROUND_TRIP);
                        // Small messages have a lane of their own.
                        let done = if bytes == 0 { sent } else { self.busy[rail].max(sent).after(time_of(bytes)) };
                        if bytes > 0 {
                            self.busy[rail] = done;
                            self.fetched.push(bytes as u32);
                        }
                        self.rails[rail].push_back((done, submission));
                    }
                    Action::Cancel { rail, id } => {
                        let at = self.rails[rail].iter().position(|(_, s)| s.id == id).unwrap();
                        let (_, submission) = self.rails[rail].remove(at).unwrap();
                        self.cancelled += 1;
                        let hand =
                            submission.landing.map_or(Hand::None, |l| Hand::Fenced(l.extent.filled(b"").unwrap()));
                        let cause = crate::rail::Cause::Cancelled;
                        self.core.rail_event(self.now, rail, Event::Failed { id, cause, hand });
                    }
                    Action::Finish { id, parts } => {
                        let (at, arrived, bytes) = self.under_way.remove(&id).unwrap();
                        drop(parts);
                        self.core.finished(self.now, id, Ok(bytes));
                        let program = &mut self.programs[at];
                        program.bytes += bytes;
                        program.waits.push(self.now.since(arrived));
                        self.thinking.push((self.now.after(program.think), at));
                    }
                    Action::Fail { id, error } => {
                        self.failed.push(error);
                        let (at, _, _) = self.under_way.remove(&id).unwrap();
                        self.thinking.push((self.now.after(self.programs[at].think), at));
                    }
                    Action::Checked { .. } | Action::LookedUp { .. } | Action::Renew | Action::Look { .. } => {
                        unreachable!()
                    }
                }
            }
        }
        let committed = self.core.committed_bytes();
        assert!(committed <= self.core.arena.stats().total / 4 * 3, "I6: {committed} bytes are committed");
    }

    fn answer(&mut self, rail: usize, at: usize) {
        let (_, submission) = self.rails[rail].remove(at).unwrap();
        let request = v1::RailRequest::decode(submission.message.clone()).unwrap();
        let mut reply = v1::RailReply { outcome: Some(ok_outcome()), body: None };
        let (mut bulk, mut extent) = (0, None);
        match request.body.unwrap() {
            v1::rail_request::Body::Fetch(fetch) => {
                let memory = submission.landing.unwrap().extent;
                extent = Some(memory.filled(b"").unwrap());
                if self.damaged {
                    let code = v1::Code::Damaged.into();
                    reply.outcome = Some(v1::Outcome { code, message: "worn out".into() });
                } else {
                    bulk = fetch.length;
                    let check = fetch.proof.map(|proof| v1::CheckResult { current: true, value: proof.value });
                    reply.body = Some(v1::rail_reply::Body::Fetch(v1::FetchReply {
                        version: fetch.version,
                        component: fetch.component,
                        offset: fetch.offset,
                        length: fetch.length,
                        checksums: vec![0; fetch.length.div_ceil(64 << 10) as usize],
                        check,
                    }));
                }
            }
            v1::rail_request::Body::Check(request) => {
                let current = |proof: v1::SlotProof| v1::CheckResult { current: true, value: proof.value };
                let results = request.proofs.into_iter().map(current).collect();
                reply.body = Some(v1::rail_reply::Body::Check(v1::CheckReply { results }));
            }
            other => panic!("{other:?}"),
        }
        let message = Bytes::from(reply.encode_to_vec());
        self.core.rail_event(self.now, rail, Event::Replied { id: submission.id, message, bulk, extent });
        self.act();
    }

    /// Until nothing is under way, or for so long.
    fn run(&mut self, time: Duration) {
        let end = self.now.after(time);
        while self.now < end {
            let programs = self.thinking.iter().map(|&(at, _)| at).min();
            let answers = self.rails.iter().flatten().map(|(at, _)| *at).min();
            let Some(next) = programs.into_iter().chain(answers).min() else { return };
            self.now = self.now.max(next);
            let ready: Vec<usize> = self.thinking.extract_if(.., |(at, _)| *at <= next).map(|(_, at)| at).collect();
            ready.into_iter().for_each(|at| self.read(at));
            for rail in 0..self.rails.len() {
                while let Some(at) = self.rails[rail].iter().position(|(at, _)| *at <= next) {
                    self.answer(rail, at);
                }
            }
            self.core.tick(self.now);
            self.act();
        }
    }

    fn fetched_bytes(&self) -> u64 {
        self.fetched.iter().map(|&bytes| u64::from(bytes)).sum()
    }

    fn read_bytes(&self) -> u64 {
        self.programs.iter().map(|program| program.bytes).sum()
    }

    fn longest(&self, program: usize) -> Duration {
        self.programs[program].waits.iter().copied().max().unwrap_or_default()
    }
}

fn objects(count: u64, size: u64) -> Vec<Arc<Object>> {
    (0..count).map(|n| Arc::new(object_of(5000 + n, 1, 1, striping(size)))).collect()
}

/// Offsets at random, in steps of so many bytes.
fn random(seed: u64, size: u64, length: u32) -> impl FnMut(u64) -> Option<(u64, u32)> {
    let mut state = seed;
    move |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let blocks = size / u64::from(length);
        Some(((state >> 33) % blocks * u64::from(length), length))
    }
}

fn sequential(from: u64, end: u64, length: u32) -> impl FnMut(u64) -> Option<(u64, u32)> {
    move |read| {
        let offset = from + read * u64::from(length);
        (offset < end).then_some((offset, length))
    }
}

#[test]
fn sixty_four_readers_share_a_small_arena_by_bytes() {
    let files = objects(64, 256 * MIB);
    let mut sim = Sim::new(16 * MIB, 2);
    for (handle, file) in (0u64..).zip(&files) {
        // Some ask for more at a time, and some for several reads at once: a handle is a handle.
        let length = [MIB, 512 * KIB, 128 * KIB][handle as usize % 3] as u32;
        sim.program(file, handle, 1 + handle as usize % 4, random(handle, 256 * MIB, length));
    }
    sim.run(Duration::from_secs(1));
    assert!(sim.failed.is_empty(), "{:?}", sim.failed);
    let bytes: Vec<u64> = sim.programs.iter().map(|program| program.bytes).collect();
    let (least, most) = (bytes.iter().min().unwrap(), bytes.iter().max().unwrap());
    eprintln!("64 readers: {} to {} MiB each, {:?}", least / MIB, most / MIB, sim.core.admission());
    // One read at a time of 128 KiB asks for less than its share when others keep four waiting: it is not held to it.
    assert!(*least > 0 && *most <= least * 4, "{bytes:?}");
    assert!(sim.core.counts().reads_waited > 1000);
    let share: u64 = bytes.iter().sum::<u64>() / 64;
    assert!(*most <= share * 3, "{bytes:?}");
}

#[test]
fn a_reader_of_4_kib_is_not_held_up_by_one_of_a_mebibyte() {
    for (arena, depth) in [(16 * MIB, 32), (64 * MIB, 64), (256 * MIB, 256)] {
        let files = objects(2, 4096 * MIB);
        let mut sim = Sim::new(arena, 1);
        sim.program(&files[0], 1, depth, random(1, 4096 * MIB, MIB as u32));
        let small = sim.program(&files[1], 2, 1, random(2, 4096 * MIB, 4096));
        sim.run(Duration::from_millis(500));
        let (longest, reads) = (sim.longest(small), sim.programs[small].waits.len());
        eprintln!("arena {} MiB, {depth} waiting: 4 KiB reads {reads}, longest {longest:?}", arena / MIB);
        // What the rail has been given already, and no more.
        assert!(longest <= time_of(5 * MIB) + 2 * ROUND_TRIP, "{longest:?}");
        assert!(sim.programs[0].bytes >= 300 * MIB, "the large one goes on: {}", sim.programs[0].bytes);
    }
}

#[test]
fn readahead_of_one_does_not_delay_what_another_asks_for() {
    let files = objects(2, 4096 * MIB);
    let mut sim = Sim::new(256 * MIB, 1);
    sim.program(&files[0], 1, 1, sequential(0, 4096 * MIB, MIB as u32));
    let small = sim.program(&files[1], 2, 1, random(2, 4096 * MIB, 4096));
    sim.run(Duration::from_millis(500));
    let longest = sim.longest(small);
    eprintln!(
        "4 KiB beside readahead of 16 MiB: longest {longest:?}; the other read {} MiB",
        sim.programs[0].bytes / MIB
    );
    assert!(longest <= time_of(5 * MIB) + 2 * ROUND_TRIP, "{longest:?}");
    assert!(sim.programs[0].bytes >= 300 * MIB);
}

#[test]
fn two_far_readers_of_one_file_both_stream() {
    for one_handle in [false, true] {
        let files = objects(1, 1024 * MIB);
        let mut sim = Sim::new(64 * MIB, 2);
        sim.program(&files[0], 1, 1, sequential(0, 100 * MIB, 128 << 10));
        let handle = if one_handle { 1 } else { 2 };
        sim.program(&files[0], handle, 1, sequential(512 * MIB, 612 * MIB, 128 << 10));
        sim.run(Duration::from_secs(10));
        assert_eq!(sim.read_bytes(), 200 * MIB);
        let over = sim.fetched_bytes() as f64 / sim.read_bytes() as f64;
        let counts = sim.core.counts();
        eprintln!("two far readers: {over:.3} fetched for each asked, {} of {} warm", counts.reads_warm, counts.reads);
        // Ahead of where they stopped at most.
        assert!(sim.fetched_bytes() <= 200 * MIB + 33 * MIB, "{over}");
        let waits = &sim.programs[1].waits;
        assert!(waits.iter().filter(|wait| **wait > Duration::from_millis(1)).count() < waits.len() / 10);
    }
}

#[test]
fn s16_eight_processes_on_one_descriptor_fit_an_arena_of_16_mib() {
    for arena in [16 * MIB, 64 * MIB] {
        let files = objects(1, 512 * MIB);
        let mut sim = Sim::new(arena, 2);
        for part in 0..8 {
            sim.program(&files[0], 1, 1, sequential(part * 64 * MIB, (part + 1) * 64 * MIB, 128 << 10));
        }
        sim.run(Duration::from_secs(10));
        assert_eq!(sim.read_bytes(), 512 * MIB);
        let over = sim.fetched_bytes() as f64 / sim.read_bytes() as f64;
        let [_, _, wasted] = sim.core.ahead_bytes();
        eprintln!("eight on one, arena {} MiB: {over:.3} fetched for each asked, {wasted} dropped unread", arena / MIB);
        assert!(over <= 1.3, "{over}");
        assert!(sim.fetched.len() <= 3 * 512, "{} fetches", sim.fetched.len());
    }
}

#[test]
fn sixty_four_sequential_readers_do_not_fetch_in_vain() {
    let files = objects(64, 16 * MIB);
    let mut sim = Sim::new(16 * MIB, 2);
    for (handle, file) in (0u64..).zip(&files) {
        sim.program(file, handle, 1, sequential(0, 16 * MIB, 128 << 10));
    }
    sim.run(Duration::from_secs(60));
    assert!(sim.failed.is_empty());
    assert_eq!(sim.read_bytes(), 1024 * MIB);
    let over = sim.fetched_bytes() as f64 / sim.read_bytes() as f64;
    eprintln!("64 sequential readers in 16 MiB: {over:.3} fetched for each asked; {:?}", sim.core.admission());
    assert!(over <= 2.0, "{over}");
}

#[test]
fn random_reads_of_4_kib_fetch_one_page_each() {
    let files = objects(1, 4096 * MIB);
    let mut sim = Sim::new(64 * MIB, 2);
    let mut offsets = random(3, 4096 * MIB, 4096);
    sim.program(&files[0], 1, 4, move |read| if read < 3000 { offsets(read) } else { None });
    sim.run(Duration::from_secs(60));
    assert_eq!(sim.read_bytes(), 3000 * 4096);
    assert!(sim.fetched_bytes() <= 3000 * 64 * KIB + 10 * 64 * KIB, "{}", sim.fetched_bytes());
    assert!(sim.core.counts().bytes_ahead <= 10 * 64 * KIB);
}

#[test]
fn no_fetch_is_larger_than_the_server_takes() {
    let files = objects(1, 64 * MIB);
    let mut sim = Sim::new(64 * MIB, 2);
    let scope = sim.core.session.scope.clone();
    sim.core.session(Session { scope, max_fetch: 200 << 10, pins: true, lease: LEASE });
    sim.program(&files[0], 1, 1, sequential(0, 64 * MIB, MIB as u32));
    sim.program(&files[0], 2, 1, sequential(100, 64 * MIB, 70_000));
    sim.run(Duration::from_secs(60));
    assert!(sim.failed.is_empty() && sim.read_bytes() > 127 * MIB);
    assert_eq!(sim.fetched.iter().max(), Some(&(192 << 10)), "whole pages");
}

#[test]
fn a_read_that_waits_for_memory_gets_that_of_fetches_nobody_wants() {
    let files = objects(2, 1024 * MIB);
    let mut sim = Sim::new(16 * MIB, 1);
    sim.program(&files[0], 1, 1, sequential(0, 8 * MIB, MIB as u32));
    sim.run(Duration::from_millis(7));
    let [ahead, ..] = sim.core.ahead_bytes();
    assert!(ahead > 0, "fetches ahead are in flight");
    sim.core.release(1);
    assert_eq!(sim.cancelled, 0, "nobody waits for memory");
    sim.program(&files[1], 2, 32, random(7, 1024 * MIB, MIB as u32));
    sim.run(Duration::from_micros(50));
    assert!(sim.cancelled > 0);
    assert_eq!(sim.core.ahead_bytes()[0], 0);
    sim.run(Duration::from_millis(100));
    assert!(sim.failed.is_empty());
}

#[test]
fn what_is_damaged_is_not_fetched_again_at_once() {
    let files = objects(1, 64 * MIB);
    let mut sim = Sim::new(64 * MIB, 2);
    sim.damaged = true;
    // As the kernel does: 128 KiB ahead of a fault, then the page alone.
    let asks = [(0u64, 128u32 << 10), (0, 4096), (0, 4096), (64 << 10, 4096)];
    sim.program(&files[0], 1, 1, move |read| asks.get(read as usize).copied());
    // Once both rails have failed they are tried again a moment later.
    for _ in 0..10 {
        sim.run(Duration::from_millis(20));
        sim.now = sim.now.after(RETRY);
        sim.core.tick(sim.now);
        sim.act();
    }
    assert_eq!(sim.failed.len(), 4);
    assert!(sim.failed.iter().all(|error| matches!(error, Error::Damaged { .. })), "{:?}", sim.failed);
    assert_eq!(sim.core.counts().reads_failed_again, 3);
    let fetched = sim.fetched.len();
    assert!(fetched <= 1 + MAX_BAD as usize, "{fetched}");
    // A little later it is tried again.
    sim.damaged = false;
    sim.now = sim.now.after(Duration::from_millis(400));
    sim.program(&files[0], 1, 1, |read| (read == 0).then_some((0, 4096)));
    sim.run(Duration::from_millis(20));
    assert_eq!((sim.failed.len(), sim.read_bytes()), (4, 4096));
}

#[test]
fn bytes_that_failed_ahead_cost_one_try() {
    let files = objects(1, 64 * MIB);
    let mut sim = Sim::new(64 * MIB, 1);
    sim.program(&files[0], 1, 1, sequential(0, 4 * MIB, MIB as u32));
    sim.run(Duration::from_micros(4500));
    sim.damaged = true;
    sim.run(Duration::from_secs(1));
    let tried = sim.fetched.len();
    // Everything that was under way ahead has failed; nothing is tried beyond.
    for _ in 0..10 {
        sim.now = sim.now.after(Duration::from_millis(100));
        sim.core.tick(sim.now);
        sim.act();
        sim.run(Duration::from_secs(1));
    }
    assert_eq!(sim.fetched.len(), tried);
    assert!(sim.core.idle(), "{:?}", sim.core.activity());
}
