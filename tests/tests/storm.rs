//! Faults of every kind at random under a live mount with many readers: see `railfs_tests::storm`.
//!
//! `RAILFS_STORM_SECONDS` sets how long (20), `RAILFS_STORM_READERS` how many readers (64), `RAILFS_SEED` which faults.
//! `RAILFS_STORM_REPORT` names a file for what it did; `RAILFS_STORM_LOGS` a directory for logs of a run that failed.

#![forbid(unsafe_code)]

use railfs_tests::storm::{Size, run_storm};
use railfs_tests::{need_mount, tally};
use std::time::Duration;

const NAME: &str = "i1_i3_i9_in_a_storm_readers_see_only_what_was_put_and_nobody_hangs";

fn number(name: &str, default: u64) -> u64 {
    let set = std::env::var(name).ok();
    set.map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is '{text}': a number is wanted")))
}

#[test]
fn i1_i3_i9_in_a_storm_readers_see_only_what_was_put_and_nobody_hangs() {
    need_mount!(NAME);
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let size = Size {
        readers: number("RAILFS_STORM_READERS", 64),
        length: Duration::from_secs(number("RAILFS_STORM_SECONDS", 20)),
        seed: number("RAILFS_SEED", clock.as_secs()),
    };
    eprintln!("RAILFS_SEED={}", size.seed);
    let report = run_storm(size);
    eprintln!("{report}");
    if let Ok(path) = std::env::var("RAILFS_STORM_REPORT") {
        std::fs::write(&path, format!("{report}\n")).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
    assert!(report.violations.is_empty(), "{}", report.violations.join("\n"));
    let reads = report.seen.get("reads").copied().unwrap_or(0);
    assert!(reads > 1000, "{reads} reads: that is no storm");
    tally("i1,i2,i3,i9,i10", "reads under faults", reads, NAME);
    tally("i1,i2,i3,i9,i10", "faults of a live system", report.faults.values().sum(), NAME);
}
