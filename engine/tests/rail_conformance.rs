//! What every rail promises, one body per promise, run over TCP on loopback and over the simulation.

mod rail;

use rail::{Do, Setup, World, id, message, pattern, sent, submit_to};
use railfs_engine::rail::tcp::Limits;
use railfs_engine::rail::{Cause, Lane, State, Submission};
use std::time::Duration;

type New = dyn Fn(Setup) -> Box<dyn World>;

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(30);

macro_rules! conformance {
    ($($name:ident)*) => {
        mod tcp {
            $(#[test] fn $name() { super::$name(&super::rail::tcp::world); })*
        }
        mod sim {
            $(#[test] fn $name() { super::$name(&super::rail::sim::world); })*
        }
        /// Every promise by its name, for worlds that are not everywhere.
        #[cfg(feature = "rdma")]
        const PROMISES: &[(&str, fn(&New))] = &[$((stringify!($name), $name)),*];
    };
}

conformance! {
    every_submission_is_answered_once
    bytes_are_exact_at_every_size
    a_short_file_is_made_up_with_zeros_and_says_so
    i5_replies_nobody_waits_for_are_dropped_and_counted
    i4_more_bulk_than_asked_for_is_refused
    i4_bulk_nobody_asked_for_is_refused
    i4_memory_of_an_expired_fetch_is_not_touched_by_its_late_answer
    i4_expiry_while_the_bulk_arrives
    i4_cancel_while_the_bulk_arrives
    i4_death_while_the_bulk_arrives
    cancel_before_the_answer
    i9_deadlines_are_met_when_nobody_answers
    i6_over_the_limit_is_refused_and_nothing_sent
    i6_what_cannot_be_sent_is_refused
    i5_work_of_a_dead_connection_fails_and_the_next_one_is_new
    i9_silence_is_noticed_and_the_rail_comes_back
    a_quiet_rail_is_pinged_and_stays_up
    a_slow_answer_is_not_silence
    small_requests_in_thousands
    both_directions_at_once_with_full_pipes
    i4_pulls_that_are_given_up_spoil_no_other
    counters_add_up
    i4_close_gives_everything_back
    a_rail_that_is_not_up_says_so
}

/// All of it over real devices, one after another; `make test-rdma` runs this in the lab. `RAILFS_VERBS_ONLY` names some.
#[cfg(feature = "rdma")]
#[test]
fn verbs_on_real_devices() {
    if rail::verbs::devices().is_none() {
        return rail::skip("verbs_on_real_devices", "RAILFS_VERBS_DEVICES names no devices (make test-rdma runs it)");
    }
    let only = std::env::var("RAILFS_VERBS_ONLY").unwrap_or_default();
    let mut failed = Vec::new();
    for (name, promise) in PROMISES.iter().filter(|(name, _)| name.contains(&only)) {
        let began = std::time::Instant::now();
        let kept = std::panic::catch_unwind(|| promise(&rail::verbs::world)).is_ok();
        println!("verbs {name}: {} in {:?}", if kept { "kept" } else { "BROKEN" }, began.elapsed());
        if !kept {
            failed.push(*name);
        }
    }
    assert!(failed.is_empty(), "broken over verbs: {failed:?}");
    assert_eq!(railfs_engine::verbs::leaked(), 0, "the device kept something");
}

/// What only queue pairs can do: memory written to behind its owner's back. `make test-rdma` runs it in the lab.
#[cfg(feature = "rdma")]
#[test]
fn late_and_lying_servers_over_verbs() {
    use rail::late::*;
    if rail::verbs::devices().is_none() {
        let why = "RAILFS_VERBS_DEVICES names no devices (make test-rdma runs it)";
        return rail::skip("late_and_lying_servers_over_verbs", why);
    }
    assert_eq!(std::env::var("RAILFS_TEST_VERBS").as_deref(), Ok(FAULTS));
    let promises: [(&str, fn()); 4] = [
        ("i5_a_reply_on_another_queue_pair_is_dropped", i5_a_reply_on_another_queue_pair_is_dropped),
        ("i1_bytes_written_beyond_a_request", i1_bytes_written_beyond_a_request_are_no_part_of_its_answer),
        ("i4_the_second_half", i4_the_second_half_that_comes_after_giving_up_reaches_nobody),
        ("i4_a_late_write", i4_a_late_write_of_a_server_does_damage_only_without_the_fences),
    ];
    for (name, promise) in promises {
        let began = std::time::Instant::now();
        promise();
        println!("verbs {name}: kept in {:?}", began.elapsed());
    }
    assert_eq!(railfs_engine::verbs::leaked(), 0, "the device kept something");
    let left = railfs_engine::verbs::live();
    assert_eq!(left, railfs_engine::verbs::Live::default(), "what the tests made is not all gone");
}

/// The lease on real devices: an old run's slots stay registered, and its queue pairs connected, while a successor publishes.
#[cfg(feature = "rdma")]
#[test]
fn i3_real_devices_that_answer_for_a_server_that_is_gone_are_not_believed() {
    let name = "i3_real_devices_that_answer_for_a_server_that_is_gone_are_not_believed";
    match rail::verbs::devices() {
        None => rail::skip(name, "RAILFS_VERBS_DEVICES names no devices (make test-rdma runs it)"),
        Some(devices) => rail::lease::predecessor(&devices),
    }
}

fn new(new: &New) -> Box<dyn World> {
    let world = new(Setup::default());
    world.up();
    world
}

fn by_hand(new: &New, limits: Limits) -> Box<dyn World> {
    let world = new(Setup { limits, by_hand: true, ..Setup::default() });
    world.up();
    world
}

/// A fetch that the test answers by hand; returns when the server has it.
fn fetch_by_hand(world: &dyn World, length: u32, after: Duration) -> u64 {
    let id = world.submit(Lane::Bulk, message(Do::Echo, 0, 0), Some(length), after);
    world.until("the server has it", &mut || world.requests().iter().any(|(_, at)| *at == id));
    id
}

fn every_submission_is_answered_once(make: &New) {
    let world = new(make);
    let mut ids = Vec::new();
    for n in 0..200u32 {
        let (what, lane) = match n % 5 {
            0 => (Do::Bytes, Lane::Bulk),
            1 => (Do::File, Lane::Bulk),
            2 => (Do::Echo, Lane::Small),
            3 => (Do::Hold, Lane::Bulk),
            _ => (Do::Drop, Lane::Small),
        };
        let landing = (lane == Lane::Bulk).then_some(n * 100 + 1);
        let after = if matches!(what, Do::Hold | Do::Drop) { SHORT } else { LONG };
        ids.push(world.submit(lane, message(what, n * 100 + 1, 0), landing, after));
        if n % 16 == 15 {
            for id in &ids {
                world.answered(*id);
            }
        }
        if n % 32 == 31 {
            world.cancel(id());
        }
    }
    world.until("all answers", &mut || world.log().count() == ids.len());
    for _ in 0..world.serving().held() {
        world.serving().answer_held(10, 0);
    }
    world.echo();
    world.fetch(Do::Bytes, 1000, 3);
    world.quiet();
}

fn bytes_are_exact_at_every_size(make: &New) {
    let world = new(make);
    for length in [1, 31, 32, 33, 4063, 4064, 4095, 4096, 4097, 8192, 65_535, 65_537, 300_001, (1 << 20) - 1, 1 << 20] {
        world.fetch(Do::Bytes, length, length as u8);
        world.fetch(Do::File, length, 0);
    }
    // Nothing, into a landing and into none.
    for landing in [Some(4096), None] {
        let id = world.submit(Lane::Bulk, message(Do::Bytes, 0, 0), landing, LONG);
        world.answered(id);
        let (_, bulk, extent) = world.log().reply(id);
        assert_eq!((bulk, extent.is_some()), (0, landing.is_some()));
    }
    world.quiet();
}

fn a_short_file_is_made_up_with_zeros_and_says_so(make: &New) {
    let world = new(make);
    let (there, asked) = (1u32 << 20, 1u32 << 20);
    world.fetch(Do::File, asked, 0);
    // The file ends at 1 MiB; asked for from its middle, half is missing.
    let id = world.submit(Lane::Bulk, message(Do::ShortFile, asked, 0), Some(asked), LONG);
    world.answered(id);
    let (message, bulk, extent) = world.log().reply(id);
    assert_eq!(bulk, asked);
    assert_eq!(sent(&message), (there / 2, false));
    let extent = extent.unwrap();
    let half = (there / 2) as usize;
    assert!(extent.bytes()[..half] == pattern(0, there)[half..]);
    assert!(extent.bytes()[half..].iter().all(|byte| *byte == 0));
    drop(extent);
    let id = world.submit(Lane::Bulk, rail::message(Do::NoFile, 70_000, 0), Some(asked), LONG);
    world.answered(id);
    let (message, bulk, extent) = world.log().reply(id);
    assert_eq!((bulk, sent(&message)), (70_000, (0, true)));
    assert!(extent.unwrap().bytes()[..70_000].iter().all(|byte| *byte == 0));
    world.fetch(Do::File, asked, 0);
    world.quiet();
}

fn i5_replies_nobody_waits_for_are_dropped_and_counted(make: &New) {
    let world = by_hand(make, Limits::default());
    let id = fetch_by_hand(&*world, 8192, LONG);
    // Unknown, and of another session: neither ends the request, nor writes to its landing.
    world.whole(Lane::Bulk, 1 << 60, &[1; 5000], b"unknown", true);
    world.whole(Lane::Bulk, id, &[2; 5000], b"another session", false);
    world.whole(Lane::Small, 1 << 61, &[], b"unknown", true);
    world.until("three dropped", &mut || world.client().counters().stale == 3);
    assert!(!world.log().has(id));
    world.whole(Lane::Bulk, id, &[3; 5000], b"yes", true);
    world.answered(id);
    let (message, bulk, extent) = world.log().reply(id);
    assert_eq!((&message[..], bulk), (&b"yes"[..], 5000));
    let extent = extent.unwrap();
    assert!(extent.bytes()[..5000].iter().all(|byte| *byte == 3));
    // Again: the extent is ours, and stays as it is.
    world.whole(Lane::Bulk, id, &[4; 5000], b"again", true);
    world.until("four dropped", &mut || world.client().counters().stale == 4);
    assert!(extent.bytes()[..5000].iter().all(|byte| *byte == 3));
    drop(extent);
    assert_eq!(world.client().state(), State::Up);
    world.quiet();
}

fn i4_more_bulk_than_asked_for_is_refused(make: &New) {
    let world = by_hand(make, Limits::default());
    let id = fetch_by_hand(&*world, 4096, LONG);
    world.whole(Lane::Bulk, id, &[1; 4097], b"", true);
    world.answered(id);
    assert!(matches!(world.log().failure(id).0, Cause::Disconnected(why) if why.contains("4097")));
    world.until("down", &mut || world.log().came(|state| matches!(state, State::Down(_))) > 0);
    world.until("up again", &mut || world.log().came(|state| *state == State::Up) == 2);
    world.quiet();
}

fn i4_bulk_nobody_asked_for_is_refused(make: &New) {
    let world = by_hand(make, Limits::default());
    let id = world.submit(Lane::Bulk, message(Do::Echo, 0, 0), None, LONG);
    world.until("the server has it", &mut || !world.requests().is_empty());
    world.whole(Lane::Bulk, id, &[1; 10], b"", true);
    world.answered(id);
    assert!(matches!(world.log().failure(id).0, Cause::Disconnected(_)));
    world.quiet();
}

fn i4_memory_of_an_expired_fetch_is_not_touched_by_its_late_answer(make: &New) {
    let world = new(make);
    let length = 512 << 10;
    let mut ids = Vec::new();
    for _ in 0..16 {
        ids.push(world.submit(Lane::Bulk, message(Do::Hold, length, 0), Some(length), SHORT));
    }
    world.until("all expired", &mut || ids.iter().all(|id| world.log().has(*id)));
    assert!(ids.iter().all(|id| world.log().failure(*id).0 == Cause::Expired));
    // The late answers come while the same memory is being used again by others, as far as it is given out.
    let again: Vec<_> = (0..16u8)
        .map(|seed| {
            world.serving().answer_held(length, 200 + seed);
            let id = world.submit(Lane::Bulk, message(Do::Bytes, length, seed), Some(length), LONG);
            (id, seed)
        })
        .collect();
    for (id, seed) in again {
        world.answered(id);
        let (_, _, extent) = world.log().reply(id);
        assert!(extent.unwrap().bytes() == pattern(seed, length), "an old answer was written over a new one");
    }
    world.until("late answers dropped", &mut || world.client().counters().stale == 16);
    world.quiet();
}

/// Half of the bulk arrives, then `end` makes an end of the request, then the rest arrives: it must go nowhere.
fn half_arrives(make: &New, after: Duration, end: fn(&dyn World, u64)) -> Cause {
    let world = by_hand(make, Limits::default());
    let length = 256 << 10;
    let id = fetch_by_hand(&*world, length, after);
    let half = (length / 2) as usize;
    world.piece(id, 0, length, &vec![1; half]);
    world.until("half has landed", &mut || world.client().counters().bulk_received >= half as u64);
    end(&*world, id);
    world.answered(id);
    let (cause, held) = world.log().failure(id);
    // Its fence may have come meanwhile.
    let exposed = world.arena().stats().exposed > 0;
    assert!(!held || exposed || world.log().seen().landings_back == 1, "held, but given back");
    world.piece(id, length / 2, length, &vec![2; half]);
    world.finish(id, b"late");
    world.until("the landing is back", &mut || world.log().seen().landings_back == 1);
    // The connection goes on behind it, with the same memory.
    world.until("dropped", &mut || world.client().counters().stale == 1);
    let next = fetch_by_hand(&*world, length, LONG);
    world.whole(Lane::Bulk, next, &pattern(9, length), b"", true);
    world.answered(next);
    assert!(world.log().reply(next).2.unwrap().bytes() == pattern(9, length));
    world.quiet();
    cause
}

fn i4_expiry_while_the_bulk_arrives(make: &New) {
    assert_eq!(half_arrives(make, Duration::from_millis(300), |_, _| ()), Cause::Expired);
}

fn i4_cancel_while_the_bulk_arrives(make: &New) {
    assert_eq!(half_arrives(make, LONG, |world, id| world.cancel(id)), Cause::Cancelled);
}

fn i4_death_while_the_bulk_arrives(make: &New) {
    let world = by_hand(make, Limits::default());
    let length = 256 << 10;
    let id = fetch_by_hand(&*world, length, LONG);
    let other = world.submit(Lane::Small, message(Do::Echo, 0, 0), None, LONG);
    world.piece(id, 0, length, &vec![1; 100_000]);
    world.until("some has landed", &mut || world.client().counters().bulk_received >= 100_000);
    world.kill();
    world.answered(id);
    world.answered(other);
    assert!(matches!(world.log().failure(id).0, Cause::Disconnected(_)));
    assert!(matches!(world.log().failure(other).0, Cause::Disconnected(_)));
    world.until("the landing is back", &mut || world.log().seen().landings_back == 1);
    world.until("up again", &mut || world.log().came(|state| *state == State::Up) == 2);
    world.quiet();
}

fn cancel_before_the_answer(make: &New) {
    let world = new(make);
    let id = world.submit(Lane::Bulk, message(Do::Hold, 0, 0), Some(4096), LONG);
    world.until("held", &mut || world.serving().held() == 1);
    world.cancel(id);
    world.cancel(id);
    world.answered(id);
    assert_eq!(world.log().failure(id).0, Cause::Cancelled);
    world.serving().answer_held(4096, 1);
    world.until("dropped", &mut || world.client().counters().stale == 1);
    world.cancel(id);
    world.fetch(Do::Bytes, 4096, 2);
    world.quiet();
}

fn i9_deadlines_are_met_when_nobody_answers(make: &New) {
    let world = new(make);
    let start = world.now();
    let mut ids = Vec::new();
    for n in 0..40u64 {
        let lane = if n % 2 == 0 { Lane::Bulk } else { Lane::Small };
        // The later ones are due earlier.
        let after = Duration::from_millis(20 + 5 * (40 - n));
        ids.push(world.submit(lane, message(Do::Hold, 0, 0), None, after));
    }
    let past = world.submit(Lane::Small, message(Do::Echo, 0, 0), Some(4096), Duration::ZERO);
    world.until("all expired", &mut || ids.iter().all(|id| world.log().has(*id)));
    assert!(ids.iter().all(|id| world.log().failure(*id).0 == Cause::Expired));
    assert!(world.now().since(start) < Duration::from_secs(5));
    world.answered(past);
    assert_eq!(world.log().failure(past).0, Cause::Expired);
    world.quiet();
}

fn i6_over_the_limit_is_refused_and_nothing_sent(make: &New) {
    let world = make(Setup { limits: Limits { in_flight: 4, ..Limits::default() }, ..Setup::default() });
    world.up();
    let held: Vec<_> = (0..4).map(|_| world.submit(Lane::Bulk, message(Do::Hold, 0, 0), Some(4096), LONG)).collect();
    let over = world.submit(Lane::Bulk, message(Do::Hold, 0, 0), Some(4096), LONG);
    world.answered(over);
    let (cause, held_back) = world.log().failure(over);
    assert!(matches!(cause, Cause::Refused(why) if why.contains('4')));
    assert!(!held_back, "nothing was exposed");
    // The other lane has its own.
    world.echo();
    world.until("four held", &mut || world.serving().held() == 4);
    world.until("all counted", &mut || world.serving().served() == 5);
    for id in held {
        world.serving().answer_held(0, 0);
        world.answered(id);
    }
    world.fetch(Do::Bytes, 100, 1);
    world.quiet();
}

fn i6_what_cannot_be_sent_is_refused(make: &New) {
    let world = new(make);
    let big = world.submit(Lane::Small, vec![0; (64 << 10) + 1].into(), None, LONG);
    world.answered(big);
    assert!(matches!(world.log().failure(big).0, Cause::Refused(_)));
    let id = id();
    let mut landing = world.landing(4096);
    landing.length = 4097;
    let deadline = world.now().after(LONG);
    let submission =
        Submission { id, lane: Lane::Bulk, message: message(Do::Echo, 0, 0), landing: Some(landing), deadline };
    submit_to(&*world.client(), submission);
    world.answered(id);
    assert!(matches!(world.log().failure(id).0, Cause::Refused(_)));
    // The largest message there is does go out.
    let mut largest = message(Do::Drop, 0, 0).to_vec();
    largest.resize(64 << 10, 0);
    let id = world.submit(Lane::Small, largest.into(), None, Duration::from_millis(200));
    world.answered(id);
    world.until("it came", &mut || world.serving().served() == 1);
    world.quiet();
}

fn i5_work_of_a_dead_connection_fails_and_the_next_one_is_new(make: &New) {
    let world = new(make);
    for round in 1..=3 {
        let ids: Vec<_> = (0..8)
            .map(|n| {
                let lane = if n % 2 == 0 { Lane::Bulk } else { Lane::Small };
                world.submit(lane, message(Do::Hold, 0, 0), (n % 2 == 0).then_some(4096), LONG)
            })
            .collect();
        world.until("held", &mut || world.serving().held() == 8);
        world.kill();
        for id in &ids {
            world.answered(*id);
            assert!(matches!(world.log().failure(*id).0, Cause::Disconnected(_)));
        }
        // Answers of the old connection have nowhere to go.
        for _ in 0..8 {
            world.serving().answer_held(0, 0);
        }
        world.until("up again", &mut || world.client().counters().connects == round + 1);
        world.up();
        world.fetch(Do::Bytes, 50_000, 5);
        world.echo();
    }
    world.quiet();
}

fn i9_silence_is_noticed_and_the_rail_comes_back(make: &New) {
    let limits = Limits {
        suspect: Duration::from_millis(100),
        retire: Duration::from_millis(300),
        ping: Duration::from_millis(50),
        ..Limits::default()
    };
    let world = by_hand(make, limits);
    world.mute(true);
    let id = world.submit(Lane::Bulk, message(Do::Drop, 0, 0), Some(4096), LONG);
    world.until("silent", &mut || world.log().came(|state| *state == State::Silent) > 0);
    world.answered(id);
    assert!(matches!(world.log().failure(id).0, Cause::Disconnected(_)));
    world.until("down", &mut || world.log().came(|state| matches!(state, State::Down(_))) > 0);
    let refused = world.submit(Lane::Bulk, message(Do::Drop, 0, 0), Some(4096), LONG);
    world.answered(refused);
    world.mute(false);
    let before = world.log().came(|state| *state == State::Up);
    world.until("up again", &mut || world.log().came(|state| *state == State::Up) > before);
    let id = fetch_by_hand(&*world, 4096, LONG);
    world.whole(Lane::Bulk, id, &[7; 4096], b"", true);
    world.answered(id);
    assert!(world.log().reply(id).2.unwrap().bytes().iter().all(|byte| *byte == 7));
    world.quiet();
}

fn a_quiet_rail_is_pinged_and_stays_up(make: &New) {
    let limits = Limits {
        suspect: Duration::from_millis(400),
        retire: Duration::from_millis(800),
        ping: Duration::from_millis(20),
        ..Limits::default()
    };
    let world = by_hand(make, limits);
    world.until("pings", &mut || world.pings() >= 20);
    assert_eq!(world.client().state(), State::Up);
    assert_eq!(world.client().counters().connects, 1);
    world.quiet();
}

fn a_slow_answer_is_not_silence(make: &New) {
    let limits = Limits {
        suspect: Duration::from_millis(200),
        retire: Duration::from_millis(400),
        ping: Duration::from_millis(50),
        ..Limits::default()
    };
    let world = make(Setup { limits, ..Setup::default() });
    world.up();
    let slow = world.submit(Lane::Bulk, message(Do::Hold, 0, 0), Some(4096), LONG);
    let late = world.submit(Lane::Small, message(Do::Drop, 0, 0), None, Duration::from_millis(1000));
    world.answered(late);
    world.serving().answer_held(10, 0);
    world.answered(slow);
    world.log().reply(slow);
    assert_eq!(world.log().came(|state| *state != State::Connecting && *state != State::Up), 0);
    world.quiet();
}

fn small_requests_in_thousands(make: &New) {
    let world = new(make);
    let kind = format!("{:?}", world.client());
    // Real devices are met on emulated machines.
    let each: u64 = if kind.contains("Verbs") { 100 } else { 2500 };
    // The simulation is stepped by one thread, so its requests are submitted by one.
    let threads = if kind.contains("Sim") { 1 } else { 4 };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut waiting = std::collections::VecDeque::new();
                for _ in 0..each * 4 / threads {
                    waiting.push_back(world.submit(Lane::Small, message(Do::Echo, 0, 0), None, LONG));
                    if waiting.len() >= 32 {
                        let id = waiting.pop_front().unwrap();
                        world.answered(id);
                        world.log().reply(id);
                    }
                }
                for id in waiting {
                    world.answered(id);
                    world.log().reply(id);
                }
            });
        }
    });
    assert_eq!(world.log().count() as u64, each * 4);
    world.quiet();
}

fn both_directions_at_once_with_full_pipes(make: &New) {
    let limits = Limits { reply_bytes: 2 << 20, socket_buffer: 64 << 10, ..Limits::default() };
    let world = make(Setup { limits, ..Setup::default() });
    world.up();
    let length = 1 << 20;
    // Real devices are met on emulated machines: as much at once as fills every queue, but less in all.
    let (each, at_once) = if format!("{:?}", world.client()).contains("Verbs") { (8, 6) } else { (64, 24) };
    let server = world.server(Lane::Bulk).unwrap();
    let (mut fetches, mut pulls) = (Vec::new(), Vec::new());
    let (mut fetched, mut pulled) = (0, 0);
    while fetched + pulled < 2 * each {
        while fetches.len() < at_once && fetched + fetches.len() < each {
            fetches.push(world.submit(Lane::Bulk, message(Do::Bytes, length, 1), Some(length), LONG));
        }
        while pulls.len() < at_once && pulled + pulls.len() < each {
            let id = id();
            let deadline = world.now().after(LONG);
            let landing = Some(world.landing(length));
            let message = message(Do::File, length, 0);
            submit_to(&*server, Submission { id, lane: Lane::Bulk, message, landing, deadline });
            pulls.push(id);
        }
        world.until("the next", &mut || {
            fetches.iter().any(|id| world.log().has(*id)) || pulls.iter().any(|id| world.server_log().has(*id))
        });
        fetches.retain(|id| {
            let came = world.log().has(*id);
            if came {
                fetched += 1;
                assert!(world.log().reply(*id).2.unwrap().bytes() == pattern(1, length));
            }
            !came
        });
        pulls.retain(|id| {
            let came = world.server_log().has(*id);
            if came {
                pulled += 1;
                assert!(world.server_log().reply(*id).2.unwrap().bytes() == pattern(0, length));
            }
            !came
        });
    }
    world.until("all counted", &mut || world.pulling().served() == each as u64);
    assert_eq!(world.client().counters().bulk_sent, (each as u64) << 20);
    assert_eq!(world.client().counters().bulk_received, (each as u64) << 20);
    world.quiet();
}

/// Pulls that the server gives up at every stage: before the answer, while it is on its way, with the connection.
fn i4_pulls_that_are_given_up_spoil_no_other(make: &New) {
    let world = new(make);
    let server = world.server(Lane::Bulk).unwrap();
    let pull = |message, length, after| {
        let id = id();
        let landing = Some(world.landing(length));
        let deadline = world.now().after(after);
        submit_to(&*server, Submission { id, lane: Lane::Bulk, message, landing, deadline });
        id
    };
    let told = |id| world.until("an answer at the server", &mut || world.server_log().has(id));
    for round in 0..4u8 {
        let given_up = pull(message(Do::Hold, 0, 0), 300_000, if round % 2 == 0 { LONG } else { SHORT });
        world.until("held", &mut || world.pulling().held() == 1);
        server.cancel(given_up);
        told(given_up);
        world.server_log().failure(given_up);
        // Its answer comes too late, and the next one's right behind it.
        world.pulling().answer_held(300_000, 77);
        let next = pull(message(Do::Bytes, 300_000, round), 300_000, LONG);
        told(next);
        let (_, bulk, extent) = world.server_log().reply(next);
        assert!(bulk == 300_000 && extent.unwrap().bytes()[..300_000] == pattern(round, 300_000));
    }
    for round in 0..4 {
        let ids: Vec<_> = (0..6).map(|_| pull(message(Do::File, 1 << 20, 0), 1 << 20, LONG)).collect();
        told(ids[round]);
        ids.iter().filter(|id| *id % 2 == 0).for_each(|id| server.cancel(*id));
        for id in ids {
            told(id);
            let replied = matches!(world.server_log().seen().answers.get(&id), Some(rail::Answer::Replied { .. }));
            if replied {
                let (_, bulk, extent) = world.server_log().reply(id);
                assert!(bulk == 1 << 20 && extent.unwrap().bytes() == pattern(0, 1 << 20));
            } else {
                assert_eq!(world.server_log().failure(id).0, Cause::Cancelled);
            }
        }
    }
    let ids: Vec<_> = (0..6).map(|_| pull(message(Do::File, 1 << 20, 0), 1 << 20, LONG)).collect();
    told(ids[0]);
    world.kill();
    ids.into_iter().for_each(told);
    world.quiet();
}

fn counters_add_up(make: &New) {
    let world = new(make);
    for n in 1..=20u32 {
        world.fetch(Do::Bytes, n * 1000, 1);
        world.echo();
    }
    let bytes: u64 = (1..=20u64).map(|n| n * 1000).sum();
    let held = world.submit(Lane::Bulk, message(Do::Hold, 0, 0), Some(5000), LONG);
    world.until("held", &mut || world.serving().held() == 1);
    let counters = world.client().counters();
    assert_eq!(counters.bulk_received, bytes);
    assert_eq!((counters.submitted, counters.failed, counters.in_flight), (41, 0, 1));
    assert_eq!((counters.held_bytes, counters.connects, counters.stale), (8192, 1, 0));
    let server = world.server(Lane::Bulk).unwrap().counters();
    assert_eq!((server.bulk_sent, server.bulk_received), (bytes, 0));
    world.serving().answer_held(0, 0);
    world.answered(held);
    assert_eq!(world.client().counters().in_flight, 0);
    world.quiet();
}

fn i4_close_gives_everything_back(make: &New) {
    let world = new(make);
    let ids: Vec<_> = (0..20).map(|_| world.submit(Lane::Bulk, message(Do::Hold, 0, 0), Some(100_000), LONG)).collect();
    world.until("held", &mut || world.serving().held() == 20);
    world.client().close();
    // All was told before close returned.
    assert!(ids.iter().all(|id| world.log().has(*id)));
    assert_eq!(world.log().seen().landings_back, 20);
    assert!(matches!(world.client().state(), State::Down(_)));
    assert!(matches!(world.log().seen().states.last(), Some(State::Down(_))));
    world.client().close();
    // A submission afterwards is answered all the same.
    let late = world.submit(Lane::Small, message(Do::Echo, 0, 0), Some(4096), LONG);
    world.answered(late);
    assert_eq!(world.log().failure(late), (Cause::Down, false));
    world.quiet();
}

fn a_rail_that_is_not_up_says_so(make: &New) {
    let world = new(make);
    world.client().close();
    for lane in [Lane::Bulk, Lane::Small] {
        let id = world.submit(lane, message(Do::Echo, 0, 0), Some(4096), LONG);
        world.answered(id);
        assert_eq!(world.log().failure(id), (Cause::Down, false));
    }
    world.quiet();
}
