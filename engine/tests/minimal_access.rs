//! I7: a peer reaches one landing for one request, no byte beyond what was asked for, and nothing afterwards.

mod rail;

use rail::{Do, Setup, message};
use railfs_engine::rail::tcp::Limits;
use railfs_engine::rail::{Cause, Lane};
use std::path::{Path, PathBuf};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(30);

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
}

/// Where the words stand in the code of both sides, tests left out: file and how often.
fn places(words: &str) -> Vec<(String, usize)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut files = Vec::new();
    for side in ["engine/src", "server/src", "fs/src"] {
        rust_files(&root.join(side), &mut files);
    }
    files.sort();
    let count = |path: &PathBuf| {
        let text = std::fs::read_to_string(path).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        let file = path.strip_prefix(root).unwrap().display().to_string();
        // Examples that must not compile name it, too.
        let code = code.lines().filter(|line| !line.trim_start().starts_with("//"));
        let count = code.map(|line| line.matches(words).count()).sum();
        (!file.contains("tests")).then_some((file, count)).filter(|(_, count)| *count > 0)
    };
    files.iter().filter_map(count).collect()
}

fn only(expected: &[(&str, usize)]) -> Vec<(String, usize)> {
    expected.iter().map(|(file, count)| ((*file).to_owned(), *count)).collect()
}

#[test]
fn i7_access_to_memory_is_given_in_one_place() {
    // The second one gives what was never sent back to its owner.
    assert_eq!(places(".expose()"), only(&[("engine/src/rail/pending.rs", 2), ("engine/src/rail/slab/uring.rs", 1)]));
    assert_eq!(places(".landing()"), only(&[("engine/src/rail/land.rs", 1)]));
    assert_eq!(
        places("Fence::proved()"),
        only(&[
            ("engine/src/rail/pending.rs", 1),
            ("engine/src/rail/sim/link.rs", 1),
            ("engine/src/rail/slab/uring.rs", 2),
            ("engine/src/rail/tcp/connection.rs", 1),
            ("engine/src/rail/verbs/link.rs", 1)
        ])
    );
}

#[test]
fn i7_what_a_device_may_do_is_said_in_one_place() {
    assert_eq!(places("ibv_access_flags::IBV_ACCESS"), only(&[("engine/src/verbs/memory.rs", 4)]));
    // Nothing that a peer could change by atomics is registered anywhere. What it may read are version slots, and a window over one
    // put's bytes: never what it may write to.
    assert_eq!(places("ACCESS_REMOTE_READ"), only(&[("engine/src/verbs/memory.rs", 1)]));
    for (access, file) in [("Slots", "listener"), ("OpenLanding", "client"), ("Landing", "client")] {
        let said: Vec<_> = places(&format!("Access::{access}"));
        let outside: Vec<_> = said.into_iter().filter(|(file, _)| !file.contains("src/verbs/")).collect();
        assert_eq!(outside, only(&[(&format!("engine/src/rail/verbs/{file}.rs"), 1)]), "{access}");
    }
    for access in ["SourceWindow", "Written", "WrittenAndRead"] {
        let said = places(&format!("Access::{access}"));
        assert!(said.iter().all(|(file, _)| file.starts_with("engine/src/verbs/")), "{access}: {said:?}");
    }
    assert!(places("REMOTE_ATOMIC").is_empty());
    let elsewhere: Vec<_> =
        places("rdma_sys").into_iter().filter(|(file, _)| !file.starts_with("engine/src/verbs")).collect();
    assert_eq!(elsewhere, [], "rdma_sys is named outside of engine/src/verbs");
}

#[test]
fn i7_a_reply_reaches_no_byte_beyond_what_was_asked_for() {
    let world = rail::tcp::world(Setup { limits: Limits::default(), by_hand: true, ..Setup::default() });
    world.up();
    // The extent has room for more than the request asked for: the room is not the peer's.
    let id = world.submit(Lane::Bulk, message(Do::Echo, 0, 0), Some(5000), LONG);
    world.until("the server has it", &mut || world.requests().iter().any(|(_, at)| *at == id));
    world.whole(Lane::Bulk, id, &[1; 5001], b"", true);
    world.answered(id);
    assert!(matches!(world.log().failure(id).0, Cause::Disconnected(why) if why.contains("5001")));
    world.quiet();
}
