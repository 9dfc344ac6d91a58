//! `railfsd fsck`: everything that can be wrong with files is found and named, and what can be put right is.

mod common;

use common::{TestClient, TestServer, name, options, pattern};
use railfs_engine::client::PutOptions;
use railfs_server::config::Config;
use railfs_server::fsck::{Kind, Problem, Report, check};
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const SIZE: usize = 700_001;

fn layout() -> PutOptions {
    PutOptions { stripe_size: 128 << 10, page_size: 64 << 10, width: 3, ..options() }
}

fn run(config: &Config, repair: bool) -> (Report, Vec<Problem>) {
    let mut problems = Vec::new();
    let report = check(config, repair, &mut |problem| problems.push(problem.clone()));
    (report.unwrap_or_else(|error| panic!("{error}")), problems)
}

/// Every file of the stripe directories but the locks, with its bytes.
fn files(config: &Config) -> BTreeMap<PathBuf, Vec<u8>> {
    fn walk(folder: &Path, found: &mut BTreeMap<PathBuf, Vec<u8>>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.file_name().unwrap() != ".railfs.lock" {
                found.insert(path.clone(), std::fs::read(&path).unwrap());
            }
        }
    }
    let mut found = BTreeMap::new();
    config.stripe_dirs.iter().for_each(|directory| walk(directory, &mut found));
    found
}

fn flip(path: &Path, offset: u64) {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[!byte[0]], offset).unwrap();
}

fn swap(one: &Path, other: &Path) {
    let beside = one.with_extension("swap");
    std::fs::rename(one, &beside).unwrap();
    std::fs::rename(other, one).unwrap();
    std::fs::rename(beside, other).unwrap();
}

/// Kind, object and component of each, sorted.
fn sorted(problems: &[Problem]) -> Vec<(Kind, String, Option<u32>)> {
    let object = |problem: &Problem| problem.object.as_ref().map(ToString::to_string).unwrap_or_default();
    let mut all: Vec<_> = problems.iter().map(|problem| (problem.kind, object(problem), problem.component)).collect();
    all.sort();
    all
}

#[test]
fn i2_fsck_names_all_that_is_wrong_and_repairs_what_can_be() {
    let mut server = TestServer::start(3, 1, "");
    let client = TestClient::connect(&server);
    let mut paths = BTreeMap::new();
    for (seed, key) in (0..).zip(["flipped", "gone", "cut", "table", "one", "other", "moved", "well", "aside"]) {
        client.put_with(key, &pattern(SIZE, seed), layout()).unwrap();
        let descriptor = client.object(key).0;
        let all: Vec<_> = (0..3).map(|component| server.path(&descriptor, component)).collect();
        paths.insert(key, all);
    }
    drop(client);
    let busy = check(&server.config, false, &mut |_| {}).unwrap_err().to_string();
    assert!(busy.contains("is in use by") && busy.contains(&std::process::id().to_string()), "{busy}");
    server.stop();
    let config = server.config.clone();
    let (report, problems) = run(&config, false);
    assert_eq!((report.versions, report.components, problems.len()), (9, 27, 0), "{problems:?}");
    assert_eq!(report.bytes, 9 * SIZE as u64);

    // Component 1 of an object, its page 2: the second stripe of the component, stripe 4 of the object.
    flip(&paths["flipped"][1], 4096 + (128 << 10) + 77);
    std::fs::remove_file(&paths["gone"][0]).unwrap();
    std::fs::File::options().write(true).open(&paths["cut"][2]).unwrap().set_len(100_000).unwrap();
    let end = std::fs::metadata(&paths["table"][1]).unwrap().len();
    flip(&paths["table"][1], end - 4000);
    swap(&paths["one"][0], &paths["other"][0]);
    // A whole component that has lost its place: it lies in another directory's lost/.
    let away = paths["moved"][0].parent().unwrap().parent().unwrap().to_owned();
    let elsewhere = config.stripe_dirs.iter().find(|directory| **directory != away).unwrap();
    std::fs::rename(&paths["moved"][0], elsewhere.join("lost").join(paths["moved"][0].file_name().unwrap())).unwrap();
    // Another, in the lost/ of its own.
    let aside = &paths["aside"][1];
    let lost = aside.parent().unwrap().parent().unwrap().join("lost");
    std::fs::rename(aside, lost.join(aside.file_name().unwrap())).unwrap();
    // What no record names.
    let folder = config.stripe_dirs[0].join("components");
    let there = |component: usize| paths["well"][component].starts_with(&config.stripe_dirs[0]);
    let stray = (0..3).find(|component| !there(*component)).unwrap();
    std::fs::copy(&paths["well"][stray], folder.join(paths["well"][stray].file_name().unwrap())).unwrap();
    std::fs::write(folder.join("999999.0"), b"half a component").unwrap();
    std::fs::write(folder.join("README"), b"mine").unwrap();

    let before = files(&config);
    let (report, problems) = run(&config, false);
    assert_eq!(files(&config), before, "a check changes nothing");
    let well = Some(u32::try_from(stray).unwrap());
    let ns = |key: &str| name(key).to_string();
    let mut want = vec![
        (Kind::Damaged, ns("flipped"), Some(1)),
        (Kind::Missing, ns("gone"), Some(0)),
        (Kind::Damaged, ns("cut"), Some(2)),
        (Kind::Damaged, ns("table"), Some(1)),
        (Kind::Damaged, ns("one"), Some(0)),
        (Kind::Damaged, ns("other"), Some(0)),
        (Kind::Misplaced, String::new(), Some(0)),
        (Kind::Misplaced, String::new(), Some(0)),
        (Kind::Missing, ns("moved"), Some(0)),
        (Kind::Missing, ns("aside"), Some(1)),
        (Kind::Orphaned, String::new(), well),
        (Kind::Debris, String::new(), Some(0)),
        (Kind::Foreign, String::new(), None),
    ];
    want.sort();
    assert_eq!(sorted(&problems), want);
    assert_eq!(report.remaining, 12, "what is foreign is only mentioned");
    let of = |key: &str| problems.iter().find(|p| p.object == Some(name(key))).unwrap().to_string();
    for (key, words) in [
        ("flipped", &["page 2 of the component", "stripe 4", "checksum"][..]),
        ("gone", &["is not there"]),
        ("cut", &["100000 bytes"]),
        ("table", &["table block 0"]),
    ] {
        let line = of(key);
        assert!(words.iter().all(|word| line.contains(word)), "{line}");
        let place = paths[key].iter().any(|path| line.contains(path.to_str().unwrap()));
        assert!(place && line.contains("version"), "{line}");
    }

    let (report, problems) = run(&config, true);
    let left = problems.iter().filter(|problem| problem.remains()).cloned().collect::<Vec<_>>();
    let mut want = vec![
        (Kind::Damaged, ns("flipped"), Some(1)),
        (Kind::Missing, ns("gone"), Some(0)),
        (Kind::Damaged, ns("cut"), Some(2)),
        (Kind::Damaged, ns("table"), Some(1)),
    ];
    want.sort();
    assert_eq!((report.remaining, sorted(&left)), (4, want.clone()), "{problems:#?}");
    assert!(folder.join("README").exists() && !folder.join("999999.0").exists());
    // Nothing more to do the second time, and what cannot be repaired is still said.
    let (_, problems) = run(&config, true);
    let named = problems.iter().filter(|problem| problem.kind != Kind::Foreign).cloned().collect::<Vec<_>>();
    assert_eq!(sorted(&named), want);

    server.serve().unwrap();
    let client = TestClient::connect(&server);
    for (seed, key) in [(4, "one"), (5, "other"), (6, "moved"), (7, "well"), (8, "aside")] {
        assert_eq!(client.read(key), pattern(SIZE, seed), "{key}");
    }
}

#[test]
fn i8_a_log_that_is_not_whole_is_named_and_mended_and_versions_go_on() {
    let mut server = TestServer::start(2, 1, "");
    let client = TestClient::connect(&server);
    client.put("a", b"one").unwrap();
    let first = client.object("a").0.version;
    drop(client);
    server.stop();
    let log = server.config.stripe_dirs[1].join("log");
    let mut segments: Vec<_> = std::fs::read_dir(&log).unwrap().map(|entry| entry.unwrap().path()).collect();
    segments.sort();
    let segment = segments.iter().find(|path| path.extension().is_none_or(|end| end != "spare")).unwrap();
    flip(segment, 4096 + 20);
    let (report, problems) = run(&server.config, false);
    assert_eq!((report.remaining, problems[0].kind), (1, Kind::Log), "{problems:?}");
    assert!(problems[0].path.contains(segment.file_name().unwrap().to_str().unwrap()), "{problems:?}");
    let (report, _) = run(&server.config, true);
    assert_eq!(report.remaining, 0);
    assert_eq!(run(&server.config, false).1, []);
    server.serve().unwrap();
    let client = TestClient::connect(&server);
    client.put("a", b"two").unwrap();
    assert!(client.object("a").0.version > first);
}

#[test]
fn i11_a_missing_directory_is_named_with_all_that_it_holds() {
    let mut server = TestServer::start(3, 1, "");
    let client = TestClient::connect(&server);
    client.put_with("a", &pattern(SIZE, 1), layout()).unwrap();
    drop(client);
    server.stop();
    std::fs::rename(&server.config.stripe_dirs[2], server.root.path().join("away")).unwrap();
    std::fs::create_dir(&server.config.stripe_dirs[2]).unwrap();
    let (report, problems) = run(&server.config, true);
    assert_eq!((report.remaining, problems.len()), (2, 2), "{problems:?}");
    assert_eq!((problems[0].kind, problems[1].kind), (Kind::Directory, Kind::Missing));
    let place = server.config.stripe_dirs[2].to_str().unwrap();
    assert!(problems.iter().all(|problem| problem.to_string().contains(place)), "{problems:?}");
    assert_eq!(std::fs::read_dir(&server.config.stripe_dirs[2]).unwrap().count(), 0, "nothing is written in its place");
}

#[test]
fn what_has_the_place_of_the_index_or_of_no_marker_is_told_and_put_right() {
    let mut server = TestServer::start(3, 1, "");
    TestClient::connect(&server).put_with("a", &pattern(SIZE, 1), layout()).unwrap();
    server.stop();
    let index = server.config.state_dir.join("index.redb");
    std::fs::remove_file(&index).unwrap();
    std::fs::create_dir(&index).unwrap();
    std::fs::remove_file(server.config.stripe_dirs[2].join(".railfs")).unwrap();
    let kinds = |problems: &[Problem]| problems.iter().map(|problem| problem.kind).collect::<Vec<_>>();
    let (report, problems) = run(&server.config, false);
    assert_eq!(kinds(&problems)[..2], [Kind::Index, Kind::Directory], "{problems:?}");
    assert!(report.remaining > 2 && problems[1].detail.contains("fsck --repair"), "{problems:?}");
    let (report, problems) = run(&server.config, true);
    assert_eq!((report.remaining, kinds(&problems)), (0, vec![Kind::Directory, Kind::Index]), "{problems:?}");
    assert_eq!(run(&server.config, false).1, []);
}

/// A FIFO that nobody writes to.
fn fifo(path: &Path) {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
}

#[test]
fn i9_what_is_no_file_in_a_components_place_is_damage_of_its_object_and_nobody_hangs() {
    let mut server = TestServer::start(3, 1, "");
    let client = TestClient::connect(&server);
    for (seed, key) in (0..).zip(["fifo", "link", "empty", "well"]) {
        client.put_with(key, &pattern(SIZE, seed), layout()).unwrap();
    }
    let place = |key: &str| server.path(&client.object(key).0, 1);
    let (of_fifo, of_link, empty) = (place("fifo"), place("link"), place("empty"));
    drop(client);
    server.stop();
    std::fs::remove_file(&of_fifo).unwrap();
    fifo(&of_fifo);
    let target = server.root.path().join("elsewhere");
    std::fs::rename(&of_link, &target).unwrap();
    std::os::unix::fs::symlink(&target, &of_link).unwrap();
    std::fs::File::options().write(true).open(&empty).unwrap().set_len(0).unwrap();
    // That no record names.
    let unnamed = server.config.stripe_dirs[0].join("components/7777.0");
    fifo(&unnamed);
    for repair in [false, true] {
        let (config, (done, ended)) = (server.config.clone(), std::sync::mpsc::channel());
        std::thread::spawn(move || done.send(run(&config, repair)));
        let (report, problems) = ended.recv_timeout(std::time::Duration::from_secs(30)).expect("the check hangs");
        assert_eq!(report.remaining, 2, "{problems:?}");
        let said = |path: &Path, kind: Kind, words: &str| {
            let of = |problem: &&Problem| problem.path == path.to_str().unwrap() && problem.kind == kind;
            let problem = problems.iter().find(of).unwrap_or_else(|| panic!("{path:?} {kind:?}: {problems:?}"));
            assert!(problem.detail.contains(words), "{problem}");
        };
        said(&of_fifo, Kind::Damaged, "is a FIFO, not a file");
        said(&of_fifo, Kind::Foreign, "a FIFO");
        said(&unnamed, Kind::Foreign, "a FIFO");
        said(&of_link, Kind::Foreign, "a symbolic link");
        said(&empty, Kind::Damaged, "has 0 bytes, not ");
        let link = problems.iter().find(|problem| problem.path == of_link.to_str().unwrap()).unwrap();
        assert!(link.detail.contains("or leave it") && !link.detail.contains("remove"), "{link}");
    }
    server.serve().unwrap();
    let client = TestClient::connect(&server);
    for (key, words) in [("fifo", "is a FIFO, not a file"), ("empty", "has 0 bytes, not ")] {
        let (descriptor, proof) = client.object(key);
        let refused = client.try_get(&descriptor, &proof).unwrap_err();
        assert!(refused.contains(words) && refused.contains("stripe directory"), "{refused}");
    }
    for (seed, key) in [(1, "link"), (3, "well")] {
        assert!(client.read(key) == pattern(SIZE, seed), "{key}");
    }
}
