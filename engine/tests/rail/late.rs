//! Late WRITEs of a real server into memory that a real client has given up, and what a server does that keeps to no protocol:
//! only over queue pairs, where memory can be written to behind its owner's back.
//!
//! How late and whether with fences is said by `RAILFS_TEST_VERBS` (see [`FAULTS`]), which the lab sets.

use super::verbs::{Names, VerbsWorld, world_named};
use super::{Answer, Do, Setup, World, message, pattern};
use railfs_engine::memory::Fenced;
use railfs_engine::rail::verbs::Opening;
use railfs_engine::rail::{Cause, Lane, State};
use std::time::{Duration, Instant};

/// What `RAILFS_TEST_VERBS` must say. The names are those of the rails below.
pub const FAULTS: &str = "bare=unfenced;soon=late:250;later=late:900";

const LONG: Duration = Duration::from_secs(30);
/// A client gives up after so long: a server that takes longer to have its answer ready makes a round that does not count.
const SHORT: Duration = Duration::from_millis(150);
const LENGTH: u32 = 256 << 10;
const OURS: u8 = 0x55;

fn rounds() -> u32 {
    if std::env::var_os("RAILFS_FULL").is_some() { 100 } else { 20 }
}

/// The memory that comes first, filled with bytes of ours: what was given back last, when all is free.
fn used_again(world: &VerbsWorld) -> Fenced {
    world.landing(LENGTH).extent.filled(&vec![OURS; LENGTH as usize]).unwrap()
}

fn damaged(memory: &Fenced) -> bool {
    memory.bytes().iter().any(|byte| *byte != OURS)
}

/// One request that is given up before its WRITE goes out. Whether the late bytes were found in its memory when that was used
/// again; none where the WRITE did not go out, since the server heard in time.
fn round(world: &VerbsWorld) -> Option<bool> {
    let (sent, back) = (world.written(), world.log().seen().landings_back);
    let (stale, ended) = (world.client().counters().stale, world.ended());
    let id = world.submit(Lane::Bulk, message(Do::Bytes, LENGTH, 0xee), Some(LENGTH), SHORT);
    world.answered(id);
    assert_eq!(world.log().failure(id).0, Cause::Expired);
    world.until("its memory is back", &mut || world.log().seen().landings_back > back);
    let again = used_again(world);
    // What is late goes out; what was not ready when the server heard that it was given up never does.
    world.until("the WRITE was sent or dropped", &mut || {
        world.written() > sent || world.client().counters().stale > stale
    });
    let late = world.written() > sent;
    world.until("the WRITE has ended", &mut || world.client().counters().stale > stale || world.ended() > ended);
    // Whatever was on its way has come when others, on each queue pair, have been answered. The connection may end for what came
    // late, at any moment: then it is another one that answers.
    let mut lost = 0;
    for seed in 0..2 {
        loop {
            world.up();
            let id = world.submit(Lane::Bulk, message(Do::Bytes, 4096, seed), Some(4096), LONG);
            world.answered(id);
            if matches!(world.log().seen().answers.get(&id), Some(Answer::Replied { .. })) {
                let (_, bulk, extent) = world.log().reply(id);
                assert!(bulk == 4096 && extent.unwrap().bytes()[..4096] == pattern(seed, 4096), "wrong bytes");
                break;
            }
            lost += 1;
            assert!(lost <= 5, "{:?}", world.log().failure(id));
        }
    }
    late.then(|| damaged(&again))
}

fn run(what: &str, names: Names, opening: Opening) -> u32 {
    let world = world_named(Setup::default(), opening, names);
    world.up();
    let began = Instant::now();
    let (mut late, mut hurt, mut tried) = (0, 0, 0);
    while late < rounds() {
        tried += 1;
        assert!(
            tried <= 4 * rounds(),
            "{what}: only {late} of {tried} WRITEs came late: is RAILFS_TEST_VERBS '{FAULTS}'?"
        );
        match round(&world) {
            Some(true) => (late, hurt) = (late + 1, hurt + 1),
            Some(false) => late += 1,
            None => {}
        }
    }
    world.quiet();
    println!("{what}: {late} late WRITEs ({tried} tries), {hurt} with damage, in {:?}", began.elapsed());
    hurt
}

/// Red, then green with each fence of the rail.
pub fn i4_a_late_write_of_a_server_does_damage_only_without_the_fences() {
    let names = |client, server| Names { client, server };
    let hurt = run("no fence", names("bare", "soon"), Opening::Windows);
    // Some may have come before the memory was used again: the machine may be slow, too.
    assert!(2 * hurt >= rounds(), "without a fence the late bytes must be seen: they were in {hurt} rounds");
    for (what, server, opening) in [
        ("fence: the reply takes the window's key away", "soon", Opening::Windows),
        ("fence: the queue pair of the window is destroyed", "later", Opening::Windows),
        ("fence: the reply on the queue pair of the request", "soon", Opening::OpenArena),
        ("fence: the queue pair is destroyed", "later", Opening::OpenArena),
    ] {
        assert_eq!(run(what, names("fenced", server), opening), 0, "{what}: late bytes in memory that was ours again");
    }
}

fn by_hand(opening: Opening) -> VerbsWorld {
    let world = world_named(Setup { by_hand: true, ..Setup::default() }, opening, Names::default());
    world.up();
    world
}

/// Returns when the hand has it.
fn asked(world: &VerbsWorld, length: u32, after: Duration) -> u64 {
    let id = world.submit(Lane::Bulk, message(Do::Echo, 0, 0), Some(length), after);
    world.until("the server has it", &mut || world.requests().iter().any(|(_, at)| *at == id));
    id
}

/// Half of the bytes are written, the request is given up, and the other half is written by a server that does not care.
pub fn i4_the_second_half_that_comes_after_giving_up_reaches_nobody() {
    for opening in [Opening::Windows, Opening::OpenArena] {
        let world = by_hand(opening);
        for round in 1..=3 {
            world.deaf(true);
            let id = asked(&world, LENGTH, Duration::from_millis(400));
            let place = world.place(id).unwrap();
            let half = vec![0xee; LENGTH as usize / 2];
            world.write_at(&place, 0, &half);
            world.answered(id);
            assert_eq!(world.log().failure(id), (Cause::Expired, true));
            world.until("its memory is back", &mut || world.log().seen().landings_back == round);
            let again = used_again(&world);
            world.write_at(&place, LENGTH / 2, &half);
            assert!(!damaged(&again), "{opening:?}: late bytes in memory that was ours again");
            world.deaf(false);
            world.until("up again", &mut || {
                world.client().counters().connects > round as u64 && world.client().state() == State::Up
            });
            let next = asked(&world, 5000, LONG);
            world.whole(Lane::Bulk, next, &pattern(7, 5000), b"", true);
            world.answered(next);
            assert!(world.log().reply(next).2.unwrap().bytes()[..5000] == pattern(7, 5000));
            drop(again);
        }
        world.quiet();
    }
}

/// An answer that comes on another queue pair than its request proves nothing about what is still to be written.
pub fn i5_a_reply_on_another_queue_pair_is_dropped() {
    let world = by_hand(Opening::Auto);
    let id = asked(&world, 5000, LONG);
    world.astray(id, b"on the wrong one");
    world.until("dropped", &mut || world.client().counters().stale == 1);
    assert!(!world.log().has(id));
    world.whole(Lane::Bulk, id, &pattern(3, 5000), b"right", true);
    world.answered(id);
    let (message, _, extent) = world.log().reply(id);
    assert_eq!(&message[..], b"right");
    assert!(extent.unwrap().bytes()[..5000] == pattern(3, 5000));
    world.quiet();
}

/// A WRITE beyond what was asked for, inside the same extent (Soft-RoCE lets it pass, other devices do not): not a byte of it is
/// part of the answer, nor of what the memory is used for next.
pub fn i1_bytes_written_beyond_a_request_are_no_part_of_its_answer() {
    for opening in [Opening::Windows, Opening::OpenArena] {
        let world = by_hand(opening);
        let id = asked(&world, 5000, LONG);
        let place = world.place(id).unwrap();
        world.write_at(&place, 5000, &[0xee; 3000]);
        world.whole(Lane::Bulk, id, &pattern(3, 5000), b"", true);
        world.answered(id);
        if world.client().counters().connects == 1 {
            let (_, bulk, extent) = world.log().reply(id);
            assert_eq!(bulk, 5000);
            assert!(extent.unwrap().bytes()[..5000] == pattern(3, 5000));
        } else {
            assert!(matches!(world.log().failure(id).0, Cause::Disconnected(_)));
        }
        world.up();
        let next = asked(&world, 8192, LONG);
        world.whole(Lane::Bulk, next, &pattern(9, 8192), b"", true);
        world.answered(next);
        assert!(world.log().reply(next).2.unwrap().bytes() == pattern(9, 8192));
        world.quiet();
    }
}
