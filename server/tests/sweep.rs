//! Damage of every kind to files of every kind, at random: what is not affected is readable, what is affected is an error or right,
//! and nothing is ever read wrong.
//!
//! `RAILFS_SWEEP_ROUNDS` sets how many (60; 1000 with `RAILFS_FULL=1`), `RAILFS_SEED` which.

mod common;

use common::{TestClient, TestServer, options, pattern};
use railfs_engine::client::PutOptions;
use railfs_proto::reply::Lookup;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Objects of several layouts: key, size, stripe, width.
const OBJECTS: [(&str, usize, u32, u32); 7] = [
    ("empty", 0, 0, 0),
    ("tiny", 1, 64 << 10, 1),
    ("page", 64 << 10, 64 << 10, 1),
    ("odd", 300_007, 64 << 10, 3),
    ("wide", 700_000, 64 << 10, 3),
    ("two", 250_000, 128 << 10, 2),
    ("long", 2_500_000, 256 << 10, 3),
];

fn layout(stripe_size: u32, width: u32) -> PutOptions {
    let page_size = if stripe_size == 0 { 0 } else { 64 << 10 };
    PutOptions { stripe_size, page_size, width, ..options() }
}

/// The object as a client that verifies sees it: all of it, or why not.
fn read(client: &TestClient, key: &str) -> Result<Vec<u8>, String> {
    match client.lookup(key) {
        Lookup::Object(descriptor, proof) => client.try_get(&descriptor, &proof),
        other => Err(format!("{other:?}")),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Component,
    Marker,
    Log,
    Index,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum How {
    Flip,
    FlipHead,
    Truncate,
    Extend,
    Remove,
    Swap,
    Zeros,
}

const HOW: [How; 7] = [How::Flip, How::FlipHead, How::Truncate, How::Extend, How::Remove, How::Swap, How::Zeros];

struct Dice(u64);
impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % end.max(1)
    }
}

fn list(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    all.sort();
    all
}

/// The last byte that is not zero, and what a file has behind it does not matter here: logs are allocated ahead.
fn used(bytes: &[u8]) -> usize {
    bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1)
}

/// Damages a file; what it held before.
fn damage(path: &Path, other: &Path, how: How, dice: &mut Dice) -> Vec<(PathBuf, Vec<u8>)> {
    let bytes = std::fs::read(path).unwrap();
    let mut kept = vec![(path.to_owned(), bytes.clone())];
    let open = || std::fs::File::options().write(true).open(path).unwrap();
    match how {
        How::Flip | How::FlipHead => {
            let end = if how == How::Flip { used(&bytes) } else { used(&bytes).min(4096) };
            let at = dice.below(end);
            let byte = bytes.get(at).copied().unwrap_or(0);
            open().write_all_at(&[byte ^ (1 << dice.below(8))], at as u64).unwrap();
        }
        How::Truncate => open().set_len(dice.below(used(&bytes)) as u64).unwrap(),
        How::Extend => open().set_len(bytes.len() as u64 + 1 + dice.below(9000) as u64).unwrap(),
        How::Remove => std::fs::remove_file(path).unwrap(),
        How::Swap => {
            let theirs = std::fs::read(other).unwrap();
            std::fs::write(path, &theirs).unwrap();
            std::fs::write(other, &bytes).unwrap();
            kept.push((other.to_owned(), theirs));
        }
        How::Zeros => {
            let at = dice.below(used(&bytes));
            let length = (bytes.len() - at).min(5000);
            open().write_all_at(&vec![0; length], at as u64).unwrap();
        }
    }
    kept
}

/// After a directory was away: what lies in lost/ because two directories had each other's marker is put back, nothing was thrown
/// away; and the logs are made equal, as the next damage may be to the one that went on alone.
fn mend(server: &mut TestServer) {
    server.config.control.iter_mut().for_each(|address| address.set_port(0));
    server.config.rails.iter_mut().for_each(|rail| rail.listen.set_port(0));
    let report = railfs_server::fsck::check(&server.config, true, &mut |_| {});
    report.unwrap_or_else(|error| panic!("fsck: {error}"));
    server.serve().unwrap_or_else(|error| panic!("{error}"));
    server.stop();
}

#[test]
fn i2_i8_damage_of_any_kind_to_any_file_is_an_error_of_what_is_affected_and_never_wrong_bytes() {
    let set = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let full = std::env::var_os("RAILFS_FULL").is_some_and(|value| value == "1");
    let rounds = set("RAILFS_SWEEP_ROUNDS").unwrap_or(if full { 1000 } else { 60 });
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let seed = set("RAILFS_SEED").unwrap_or(clock.as_secs());
    eprintln!("RAILFS_SEED={seed}");
    let mut dice = Dice(seed);
    let mut server = TestServer::start(3, 2, "");
    let client = TestClient::connect(&server);
    let mut wanted: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let mut owner: BTreeMap<PathBuf, String> = BTreeMap::new();
    let mut newest = 0;
    for (seed, (key, size, stripe, width)) in (1..).zip(OBJECTS) {
        let bytes = pattern(size, seed);
        client.put_with(key, &bytes, layout(stripe, width)).unwrap();
        let (descriptor, _) = client.object(key);
        newest = newest.max(descriptor.version);
        for component in 0..descriptor.components.len() as u32 {
            owner.insert(server.path(&descriptor, component), key.to_owned());
        }
        wanted.insert(key.to_owned(), bytes);
    }
    drop(client);
    server.stop();
    let dirs = server.config.stripe_dirs.clone();
    let index = server.config.state_dir.join("index.redb");
    let mut met: BTreeMap<(What, How), u64> = BTreeMap::new();
    let mut errors = 0;

    for round in 0..rounds {
        // Most of what a disk holds is components.
        let what =
            [What::Component, What::Component, What::Component, What::Marker, What::Log, What::Index][dice.below(6)];
        let how = HOW[dice.below(HOW.len())];
        let mut all = match what {
            What::Component => owner.keys().cloned().collect(),
            What::Marker => dirs.iter().map(|dir| dir.join(".railfs")).collect(),
            What::Log => {
                dirs.iter().filter(|dir| dir.join("log").is_dir()).flat_map(|dir| list(&dir.join("log"))).collect()
            }
            What::Index => vec![index.clone()],
        };
        if what == What::Log {
            all.retain(|path: &PathBuf| path.extension().is_some_and(|kind| kind == "log"));
        }
        let path = all[dice.below(all.len())].clone();
        // Another file of the kind; of the log one of the other directory would be the same log, so another kind.
        let other = match what {
            What::Log => dirs[0].join(".railfs"),
            What::Index => dirs[2].join(".railfs.lock"),
            _ => all[dice.below(all.len())].clone(),
        };
        // What is swapped with a file that is not of its kind damages only one of the two.
        let how = if how == How::Swap && (other == path || matches!(what, What::Log | What::Index)) {
            How::Zeros
        } else {
            how
        };
        let case = format!("RAILFS_SEED={seed} round {round}: {how:?} of {}", path.display());
        let kept = damage(&path, &other, how, &mut dice);
        let restore = |of: &[(PathBuf, Vec<u8>)]| {
            for (path, bytes) in of {
                std::fs::write(path, bytes).unwrap();
            }
        };
        *met.entry((what, how)).or_default() += 1;
        let touched: BTreeSet<&PathBuf> = kept.iter().map(|(path, _)| path).collect();
        // Objects that may be affected.
        let affected: BTreeSet<&String> = owner
            .iter()
            .filter(|(file, _)| match what {
                What::Component => touched.contains(file),
                What::Marker => touched.iter().any(|marker| file.starts_with(marker.parent().unwrap())),
                What::Log | What::Index => false,
            })
            .map(|(_, key)| key)
            .collect();
        // No client lives through a round: each start may have other ports.
        server.config.control.iter_mut().for_each(|address| address.set_port(0));
        server.config.rails.iter_mut().for_each(|rail| rail.listen.set_port(0));
        match server.serve() {
            Ok(()) => {}
            Err(error) => {
                // A marker that is another directory's, or of no directory: refused by name, nothing served.
                assert!(what == What::Marker, "{case}: {error}");
                let text = error.to_string();
                assert!(dirs.iter().any(|dir| text.contains(dir.to_str().unwrap())), "{case}: {text}");
                restore(&kept);
                mend(&mut server);
                continue;
            }
        }
        let client = TestClient::connect(&server);
        for (key, bytes) in &wanted {
            match read(&client, key) {
                Ok(got) => assert!(got == *bytes, "{case}: {key} was read wrong"),
                Err(why) => {
                    assert!(affected.contains(key), "{case}: {key}: {why}");
                    errors += 1;
                }
            }
        }
        // Puts go on, but where a directory of the log is missing; versions go up whatever was lost.
        match client.put("fresh", &pattern(70_000, round)) {
            Ok(done) => {
                assert!(done.version > newest, "{case}: version {} after {newest}", done.version);
                newest = done.version;
                assert_eq!(read(&client, "fresh").as_deref(), Ok(&pattern(70_000, round)[..]), "{case}");
            }
            Err(error) => assert!(what == What::Marker, "{case}: put: {error}"),
        }
        drop(client);
        server.stop();
        if what == What::Component || what == What::Marker {
            restore(&kept);
        }
        if what == What::Marker {
            mend(&mut server);
        }
    }
    server.serve().unwrap();
    let client = TestClient::connect(&server);
    for (key, bytes) in &wanted {
        assert_eq!(read(&client, key).as_deref(), Ok(&bytes[..]), "{key} after all was put back");
    }
    for ((what, how), times) in &met {
        eprintln!("{what:?} {how:?}: {times}");
    }
    eprintln!("{rounds} files damaged, {errors} reads of affected objects failed");
    assert!(errors > rounds / 8, "{errors} errors: the damage was met by nobody");
    common::tally(
        "i2,i8",
        "damaged-files",
        rounds,
        "i2_i8_damage_of_any_kind_to_any_file_is_an_error_of_what_is_affected_and_never_wrong_bytes",
    );
}
