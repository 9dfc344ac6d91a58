//! Extents and inodes under many orders of their threads: the real code, with the scheduler's locks and atomics.

use railfs_models::stand_in::Facts;
use railfs_proto::descriptor::Attributes;
use railfs_proto::name::Key;
use shuttle::scheduler::RandomScheduler;
use shuttle::{Config, Runner, thread};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Orders of each test; RAILFS_ORDERS says another number.
fn orders() -> usize {
    let said = std::env::var("RAILFS_ORDERS").ok();
    said.map_or(20_000, |said| said.parse().unwrap_or_else(|error| panic!("RAILFS_ORDERS: {said}: {error}")))
}

fn explore(ids: &str, name: &str, body: impl Fn() + Send + Sync + 'static) {
    // The same orders each time: one that fails is met again.
    let ran = Runner::new(RandomScheduler::new_from_seed(1, orders()), Config::new()).run(body);
    println!("{name}: {ran} orders");
    let Some(path) = std::env::var_os("RAILFS_TALLY_LOG") else { return };
    let log = std::fs::OpenOptions::new().append(true).create(true).open(path);
    let written = log.and_then(|mut log| log.write_all(format!("{ids} interleavings {ran} {name}\n").as_bytes()));
    written.unwrap_or_else(|error| panic!("RAILFS_TALLY_LOG: {error}"));
}

fn caught(body: impl Fn() + Send + Sync + 'static) -> bool {
    std::panic::set_hook(Box::new(|_| {}));
    let run = || Runner::new(RandomScheduler::new_from_seed(1, orders()), Config::new()).run(body);
    let caught = catch_unwind(AssertUnwindSafe(run)).is_err();
    let _ = std::panic::take_hook();
    caught
}

macro_rules! extents {
    ($name:ident, $memory:ident, $proved:ident) => {
        /// Three threads take, expose, fence and give back extents of a small arena, and one loses a fence.
        fn $name() {
            use railfs_models::$memory::arena::Arena;
            const SIZE: u32 = 256 << 10;
            let arena = Arena::new(1 << 20).unwrap();
            let workers: Vec<_> = (1..=3u8)
                .map(|number| {
                    let arena = arena.clone();
                    thread::spawn(move || {
                        for _ in 0..2 {
                            let Some(free) = arena.allocate(SIZE) else { continue };
                            let mine = free.filled(&[number; 64]).unwrap();
                            thread::yield_now();
                            assert_eq!(mine.bytes()[..64], [number; 64], "I4: somebody else had it, too");
                            let exposed = mine.into_free().expose();
                            let stats = arena.stats();
                            assert!(stats.exposed >= u64::from(SIZE), "I4: {stats:?}");
                            thread::yield_now();
                            drop(exposed.fenced(railfs_models::$proved()));
                        }
                        if number == 1
                            && let Some(free) = arena.allocate(SIZE)
                        {
                            drop(free.expose());
                        }
                    })
                })
                .collect();
            workers.into_iter().for_each(|worker| worker.join().unwrap());
            let stats = arena.stats();
            assert_eq!((stats.exposed, stats.free + stats.quarantined), (0, stats.total), "I6: {stats:?}");
            // What lost its fence is never given out again.
            let all: Vec<_> = std::iter::from_fn(|| arena.allocate(SIZE)).collect();
            assert_eq!(all.len() as u64 * u64::from(SIZE), stats.free);
        }
    };
}
extents!(extents, memory, proved);
extents!(racy_extents, racy_memory, racy_proved);

fn key(text: &str) -> Key {
    Key::new(text.as_bytes().to_vec()).unwrap()
}

fn facts(version: u64) -> Facts {
    let attributes = Attributes { mode: 0o644, mtime_seconds: 0, mtime_nanoseconds: 0, owner: None };
    Facts { version, size: 1, attributes }
}

macro_rules! inodes {
    ($name:ident, $inodes:ident) => {
        /// Answers that name a file and two directories with one hash go out while the kernel forgets others.
        fn $name() {
            use railfs_models::$inodes::table::{Inodes, Node};
            use std::sync::Arc;
            let table = Arc::new(Inodes::new(None));
            let workers: Vec<_> = (0..3u64)
                .map(|number| {
                    let table = table.clone();
                    thread::spawn(move || {
                        let name = key(if number == 0 { "a" } else { "b" });
                        for _ in 0..2 {
                            table.remember_file(&key("f"), facts(5000), None).unwrap();
                            let known = table.node(5000);
                            assert!(matches!(known, Some(Node::File(_))), "a file that the kernel knows is gone");
                            let directory = table.remember_directory(&name);
                            let known = table.node(directory);
                            let right = matches!(&known, Some(Node::Directory(Some(key))) if *key == name);
                            assert!(right, "directory {directory} is {known:?}");
                            table.forget(5000, 1);
                            table.forget(directory, 1);
                        }
                    })
                })
                .collect();
            workers.into_iter().for_each(|worker| worker.join().unwrap());
            assert_eq!(table.len(), 0, "what the kernel has forgotten is still there");
        }
    };
}
inodes!(inodes, inodes);
inodes!(racy_inodes, racy_inodes);

#[test]
fn i4_i6_extents_have_one_owner_in_every_order_of_threads() {
    explore("i4,i6", "extents_have_one_owner", extents);
}

#[test]
fn inodes_live_as_long_as_the_kernel_knows_them_in_every_order_of_threads() {
    explore("i6", "inodes_live_as_long_as_the_kernel_knows_them", inodes);
}

#[test]
fn i4_races_that_were_planted_are_caught() {
    assert!(caught(racy_extents), "extents: no order met the race");
    assert!(caught(racy_inodes), "inodes: no order met the race");
}
