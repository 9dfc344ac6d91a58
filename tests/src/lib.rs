//! The harness of the end-to-end tests: stores served by real processes, real mounts, and what must hold when a test ends.
//!
//! Guarantees: whatever becomes of a test, the processes, mounts and network namespaces it made are gone afterwards, by
//! their own ids; nothing waits for a fixed time, only for conditions with a limit.

#![forbid(unsafe_code)]

pub mod certs;
pub mod cluster;
pub mod data;
pub mod model;
pub mod mount;
pub mod netns;
pub mod process;
pub mod putter;
pub mod quiet;
pub mod reader;
pub mod shell;
pub mod storm;
pub mod typed;
pub mod wait;

/// Says that a test cannot run on this machine, and why; the caller returns then.
///
/// # Panics
/// The file that collects the reasons cannot be written: a skip that nobody hears of is a failure.
pub fn skip(test: &str, reason: &str) {
    let line = format!("SKIPPED {test}: {reason}\n");
    eprint!("{line}");
    if let Some(log) = std::env::var_os("RAILFS_SKIP_LOG") {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&log);
        let written = file.and_then(|mut file| std::io::Write::write_all(&mut file, line.as_bytes()));
        written.unwrap_or_else(|error| panic!("RAILFS_SKIP_LOG {}: {error}", log.display()));
    }
}

/// Notes how much a test of invariants has tried: what kind (`kills`, `schedules`), and how many. Counted in the table that
/// `make test` and `make test-faults` end with.
///
/// # Panics
/// The file that collects them cannot be written.
pub fn tally(invariants: &str, kind: &str, count: u64, test: &str) {
    // tests/bin/by_invariant.py takes no other form: found out here, and not at the end of everything.
    let known = |id: &str| id.strip_prefix('i').is_some_and(|number| number.parse::<u8>().is_ok());
    assert!(invariants.split(',').all(known), "{invariants}: ids of invariants are written i1,i2");
    if let Some(log) = std::env::var_os("RAILFS_TALLY_LOG") {
        let line = format!("{invariants} {} {count} {test}\n", kind.replace(' ', "-"));
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&log);
        let written = file.and_then(|mut file| std::io::Write::write_all(&mut file, line.as_bytes()));
        written.unwrap_or_else(|error| panic!("RAILFS_TALLY_LOG {}: {error}", log.display()));
    }
}

/// Whether the sizes and counts of the acceptance list are wanted (`RAILFS_FULL=1`), not those of every day.
pub fn full() -> bool {
    std::env::var_os("RAILFS_FULL").is_some_and(|value| value == "1")
}

/// Why this machine cannot mount; `None`: it can.
pub fn cannot_mount() -> Option<String> {
    if !std::path::Path::new("/dev/fuse").exists() {
        return Some("/dev/fuse is not there".to_owned());
    }
    let open = std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse");
    open.err().map(|error| format!("/dev/fuse: {error}"))
}

/// Returns from the test, with a word in the log of skips, where it cannot mount.
#[macro_export]
macro_rules! need_mount {
    ($test:expr) => {
        if let Some(reason) = $crate::cannot_mount() {
            return $crate::skip($test, &reason);
        }
    };
}
