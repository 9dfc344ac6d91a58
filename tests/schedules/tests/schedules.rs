//! A hundred thousand schedules in four parts, and the bugs that they must find.

use railfs_schedules::planted::{BUGS, plant};
use railfs_schedules::schedule::kinds::Table;
use railfs_schedules::schedule::{DRAWS, run};
use std::io::Write;

/// Schedules of each part, unless RAILFS_SCHEDULES says another number (of all parts).
const PART: u64 = 25_000;
const PARTS: u64 = 4;

/// One seed, or FROM..TO, from RAILFS_SEEDS.
fn said() -> Option<std::ops::Range<u64>> {
    let said = std::env::var("RAILFS_SEEDS").ok()?;
    let number = |text: &str| text.parse::<u64>().unwrap_or_else(|error| panic!("RAILFS_SEEDS: {text}: {error}"));
    Some(match said.split_once("..") {
        Some((from, to)) => number(from)..number(to),
        None => number(&said)..number(&said) + 1,
    })
}

fn traced() -> bool {
    std::env::var_os("RAILFS_TRACE").is_some()
}

/// For whoever counts what was tried.
fn tally(ids: &str, kind: &str, count: u64, test: &str) {
    let Some(path) = std::env::var_os("RAILFS_TALLY_LOG") else { return };
    let log = std::fs::OpenOptions::new().append(true).create(true).open(path);
    let written = log.and_then(|mut log| log.write_all(format!("{ids} {kind} {count} {test}\n").as_bytes()));
    written.unwrap_or_else(|error| panic!("RAILFS_TALLY_LOG: {error}"));
}

fn replay(seed: u64) -> String {
    format!("RAILFS_TRACE=1 RAILFS_SEEDS={seed} cargo nextest run --workspace --no-capture -E 'test(schedules_part_0)'")
}

fn part(number: u64) {
    let wanted = std::env::var("RAILFS_SCHEDULES").ok().map(|all| {
        let all: u64 = all.parse().unwrap_or_else(|error| panic!("RAILFS_SCHEDULES: {all}: {error}"));
        all.div_ceil(PARTS)
    });
    let each = wanted.unwrap_or(PART);
    let seeds = said().unwrap_or(number * each..(number + 1) * each);
    let (chosen, began) = (said().is_some(), std::time::Instant::now());
    if chosen && number > 0 {
        return;
    }
    let mut table = Table::default();
    let count = seeds.end - seeds.start;
    for seed in seeds {
        let outcome = run(seed, traced());
        outcome.trace.iter().for_each(|line| println!("{line}"));
        if let Some(broken) = outcome.broken {
            panic!("seed {seed}: {broken}\nagain, with a trace: {}", replay(seed));
        }
        table.add(&outcome);
    }
    println!("{table}{count} schedules in {:?}", began.elapsed());
    if !chosen {
        tally("i1,i2,i3,i4,i5,i6,i9,i10", "schedules", count, &format!("schedules_part_{number}"));
        assert!(table.fewest.is_some_and(|fewest| fewest >= DRAWS), "a schedule had fewer than {DRAWS} events");
        for (name, share) in table.shares() {
            assert!(share >= 100, "only {share} schedules in 10,000 met this: {name}");
        }
    }
}

#[test]
fn i1_i3_i4_i6_i9_schedules_part_0() {
    part(0);
}

#[test]
fn i1_i3_i4_i6_i9_schedules_part_1() {
    part(1);
}

#[test]
fn i1_i3_i4_i6_i9_schedules_part_2() {
    part(2);
}

#[test]
fn i1_i3_i4_i6_i9_schedules_part_3() {
    part(3);
}

#[test]
fn the_same_seed_gives_the_same_schedule() {
    for seed in 0..200 {
        let [one, other] = [run(seed, false), run(seed, false)];
        assert_eq!((one.digest, one.events, one.broken), (other.digest, other.events, other.broken), "seed {seed}");
    }
    let [one, other] = [run(7, true), run(7, true)];
    assert!(one.trace.len() > 500 && one.trace == other.trace, "the traces differ");
}

/// Each bug is found within its number of seeds. What it is found by is printed.
#[test]
fn i1_i2_i3_i4_i5_i6_i9_i10_planted_bugs_are_found_soon() {
    std::panic::set_hook(Box::new(|_| {}));
    let only = std::env::var("RAILFS_PLANT").ok();
    let mut missed = Vec::new();
    for bug in BUGS.iter().filter(|bug| only.as_ref().is_none_or(|only| only == bug.name)) {
        plant(Some(bug));
        let found = (0..bug.seeds).find_map(|seed| run(seed, false).broken.map(|broken| (seed, broken)));
        plant(None);
        match found {
            Some((seed, broken)) => {
                println!("{}: found by seed {seed} of {}: {broken}", bug.name, bug.seeds);
                tally("i1,i2,i3,i4,i5,i6,i9,i10", "schedules", seed + 1, "planted_bugs_are_found_soon");
            }
            None => missed.push(format!("{} ({}): not found by {} seeds", bug.name, bug.what, bug.seeds)),
        }
    }
    let _ = std::panic::take_hook();
    assert!(missed.is_empty(), "{missed:#?}");
}
