//! The simulated rail by itself: that it replays from a seed, and that it does what it is there for.

mod rail;

use rail::{Answer, Bell, Do, Log, Server, id, message, pattern, submit_to};
use railfs_engine::clock::Time;
use railfs_engine::memory::Arena;
use railfs_engine::rail::sim::{Sim, SimConfig, SimLink};
use railfs_engine::rail::{Cause, Landing, Lane, Rail, Submission};
use std::sync::Arc;
use std::time::Duration;

struct Bench {
    sim: Sim,
    link: SimLink,
    log: Arc<Log>,
    server: Arc<Server>,
    arena: Arena,
}

fn bench(seed: u64, config: SimConfig) -> Bench {
    let bell = Arc::<Bell>::default();
    let sim = Sim::new(seed);
    let (log, server) = (Log::new(bell.clone()), Server::new(bell.clone()));
    let pulls = Server::new(bell.clone());
    let link = sim.link(config, (log.clone(), pulls), (Log::new(bell), server.clone()));
    Bench { sim, link, log, server, arena: Arena::new(16 << 20).unwrap() }
}

impl Bench {
    fn submit(&self, id: u64, lane: Lane, what: Do, length: u32, after: Duration) {
        let landing = self.arena.allocate(length.max(4096).next_power_of_two());
        let landing = landing.filter(|_| length > 0).map(|extent| Landing { extent, length });
        let deadline = self.sim.now().after(after);
        let message = message(what, length, 5);
        submit_to(&*self.link.client, Submission { id, lane, message, landing, deadline });
    }
}

fn faults() -> SimConfig {
    SimConfig { loss: 0.05, duplicate: 0.1, death: 0.02, piece: 16 << 10, ..SimConfig::default() }
}

/// A hundred requests under every fault, all answered and all memory back. The trace, without the ids.
fn storm(seed: u64) -> Vec<String> {
    let bench = bench(seed, faults());
    for n in 0..100u64 {
        let lane = if n % 3 == 0 { Lane::Small } else { Lane::Bulk };
        let length = if lane == Lane::Bulk { 100_000 } else { 0 };
        let what = if n % 7 == 0 { Do::Drop } else { Do::Bytes };
        bench.submit(n, lane, what, length, Duration::from_millis(5 + n % 10));
        if n % 11 == 0 {
            bench.link.client.cancel(n);
        }
        if n % 25 == 24 {
            bench.link.cut();
        }
        if n % 25 == 5 {
            bench.link.heal();
        }
        bench.sim.advance_to(bench.sim.now().after(Duration::from_micros(300)));
        if let Some(Answer::Replied { bulk, extent: Some(extent), .. }) = bench.log.seen().answers.get(&n) {
            assert!(extent.bytes()[..*bulk as usize] == pattern(5, *bulk), "an answer with wrong bytes");
        }
    }
    assert!(bench.sim.run_until(Time(u64::MAX / 2), || bench.log.count() == 100), "some were not answered");
    let quiet = || bench.link.client.counters().held_bytes == 0;
    assert!(bench.sim.run_until(bench.sim.now().after(Duration::from_secs(1)), quiet), "some memory did not come back");
    bench.log.seen().answers.clear();
    assert_eq!(bench.log.seen().problems, Vec::<String>::new());
    let stats = bench.arena.stats();
    assert_eq!((stats.free, stats.quarantined), (stats.total, 0));
    bench.sim.trace()
}

#[test]
fn the_same_seed_replays_and_another_does_not() {
    assert_eq!(storm(1), storm(1));
    assert_ne!(storm(1), storm(2));
}

#[test]
fn i4_every_submission_ends_and_all_memory_comes_back_under_every_fault() {
    let mut late = 0;
    for seed in 0..150 {
        late += storm(seed).iter().filter(|line| line.contains("is written to late")).count();
    }
    assert!(late > 100, "the storm has to include landings after the end of their requests: {late}");
}

#[test]
fn i4_an_expired_landing_is_held_while_the_other_side_writes_to_it() {
    let slow = Duration::from_millis(20);
    let config = SimConfig { delay: (slow, slow), fence: Duration::from_millis(500), ..SimConfig::default() };
    let bench = bench(3, config);
    assert!(bench.sim.run_until(Time(1_000_000_000), || bench.link.client.counters().connects == 1));
    let id = id();
    // Long enough for the request to get there, too short for the answer to get back.
    bench.submit(id, Lane::Bulk, Do::Bytes, 1 << 20, Duration::from_millis(30));
    assert!(bench.sim.run_until(Time(1_000_000_000), || bench.log.has(id)));
    assert_eq!(bench.log.failure(id), (Cause::Expired, true));
    assert_eq!(bench.arena.stats().exposed, 1 << 20);
    assert_eq!(bench.link.client.counters().held_bytes, 1 << 20);
    // The answer itself is the fence: it comes behind the bytes, long before the other fence would.
    let before = bench.sim.now();
    assert!(bench.sim.run_until(Time(1_000_000_000), || !bench.log.seen().released.is_empty()));
    assert!(bench.sim.now().since(before) < Duration::from_millis(100));
    assert!(bench.sim.trace().iter().any(|line| line.contains("is written to late")));
    assert_eq!(bench.arena.stats().free, 16 << 20);
    assert_eq!(bench.link.client.counters().stale, 1);
}

#[test]
fn a_lost_answer_is_carried_out_and_its_memory_fenced() {
    let bench = bench(4, SimConfig::default());
    assert!(bench.sim.run_until(Time(1_000_000_000), || bench.link.client.counters().connects == 1));
    let id = id();
    bench.submit(id, Lane::Bulk, Do::Hold, 4096, Duration::from_millis(50));
    assert!(bench.sim.run_until(Time(1_000_000_000), || bench.server.held() == 1));
    bench.link.configure(|config| config.loss = 1.0);
    bench.server.answer_held(4096, 1);
    assert!(bench.sim.run_until(Time(1_000_000_000), || !bench.log.seen().released.is_empty()));
    assert_eq!(bench.log.failure(id), (Cause::Expired, true));
    assert_eq!(bench.server.served(), 1);
}
