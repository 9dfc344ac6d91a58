//! `railfsd replace-log`: a store whose log directory is gone for good takes puts again, with everything it had.

mod common;

use common::{TestClient, TestServer, options, pattern, until};
use railfs_engine::client::PutOptions;
use railfs_engine::error::Error;
use railfs_proto::reply::Lookup;
use railfs_server::fsck::{self, Kind, Problem};
use railfs_server::replace::{ReplaceError, Replaced, replace_log};
use railfs_server::store::StoreError;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const SIZE: usize = 100_001;

/// In one directory, or in all of them.
fn layout(wide: bool) -> PutOptions {
    PutOptions { width: if wide { 0 } else { 1 }, stripe_size: 16 << 10, page_size: 4 << 10, ..options() }
}

fn replace(server: &TestServer, directory: &Path) -> Result<Replaced, ReplaceError> {
    replace_log(&server.config, directory)
}

fn check(server: &TestServer, repair: bool) -> Vec<Problem> {
    let mut problems = Vec::new();
    fsck::check(&server.config, repair, &mut |problem| problems.push(problem.clone())).unwrap();
    problems
}

fn serve(server: &mut TestServer) {
    until("it serves", || server.serve().is_ok());
}

/// Objects in every directory, and one that was deleted.
fn filled(directories: usize) -> (TestServer, Vec<String>) {
    let server = TestServer::start(directories, 1, "");
    let client = TestClient::connect(&server);
    let keys: Vec<String> = (0..12).map(|at| format!("k{at}")).collect();
    for (seed, key) in (0..).zip(&keys) {
        client.put_with(key, &pattern(SIZE, seed), layout(seed % 2 == 1)).unwrap();
    }
    client.put("gone", b"x").unwrap();
    client.delete("gone").unwrap();
    drop(client);
    (server, keys)
}

/// Objects that can be read are what they were. Gives how many cannot.
fn readable(server: &TestServer, keys: &[String]) -> usize {
    let client = TestClient::connect(server);
    let mut lost = 0;
    for (seed, key) in (0..).zip(keys) {
        let (descriptor, store) = (client.object(key).0, &server.server().node.store);
        let mut places = descriptor.components.iter().flatten().map(|replica| replica.directory);
        match places.all(|directory| store.directory(directory).is_some()) {
            true => assert_eq!(client.read(key), pattern(SIZE, seed), "{key}"),
            false => lost += 1,
        }
    }
    lost
}

fn log_files(directory: &Path, kind: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory.join("log")).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = entries.filter(|path| path.extension().is_some_and(|end| end == kind)).collect();
    files.sort();
    files
}

#[test]
fn i8_a_log_directory_that_is_gone_is_replaced_and_the_store_takes_puts_again() {
    let (mut server, keys) = filled(4);
    let dirs = server.config.stripe_dirs.clone();
    let elsewhere = server.root.path().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let away = server.root.path().join("away");
    // While it serves.
    assert!(matches!(replace(&server, &dirs[2]), Err(ReplaceError::Store(StoreError::Locked { .. }))));
    server.stop();
    let nothing = replace(&server, &dirs[2]).unwrap_err();
    assert!(matches!(nothing, ReplaceError::Store(StoreError::NothingToReplace { .. })), "{nothing}");
    std::fs::rename(&dirs[1], &away).unwrap();
    serve(&mut server);
    let client = TestClient::connect(&server);
    let version = client.object("k0").0.version;
    match client.put("more", b"x") {
        Err(Error::ReadOnly(why)) => assert!(why.contains("d1") && why.contains("railfsd replace-log DIR"), "{why}"),
        other => panic!("{other:?}"),
    }
    drop(client);
    let lost = readable(&server, &keys);
    assert!(lost > 0 && lost < keys.len());
    server.stop();
    // What cannot take its place.
    for (directory, wanted) in [
        (&dirs[0], "d0 holds the log already"),
        (&elsewhere, "elsewhere is no stripe directory of store"),
        (&dirs[1], "d1 does not exist"),
    ] {
        let refused = replace(&server, directory).unwrap_err().to_string();
        assert!(refused.contains(wanted), "{refused}");
    }
    let replaced = replace(&server, &dirs[2]).unwrap();
    assert_eq!((replaced.epoch, replaced.replaced.len(), replaced.behind.len()), (2, 1, 0));
    let paths: Vec<_> = replaced.log_directories.iter().map(|(path, _)| path.clone()).collect();
    assert_eq!(paths, [dirs[0].clone(), dirs[2].clone()]);
    // Once more: it holds the log.
    let again = replace(&server, &dirs[2]).unwrap_err();
    assert!(matches!(again, ReplaceError::Store(StoreError::HoldsLog(_))), "{again}");
    serve(&mut server);
    assert_eq!(readable(&server, &keys), lost);
    let client = TestClient::connect(&server);
    let put = client.put("more", b"x").unwrap();
    assert!(put.version > version);
    assert!(matches!(client.lookup("gone"), Lookup::Absent(_)));
    drop(client);
    server.stop();
    assert_eq!(log_files(&dirs[0], "log").len(), 1, "nothing of the old epoch is left");
    assert_eq!(
        log_files(&dirs[0], "checkpoint"),
        [dirs[0].join("log").join(file_name(&log_files(&dirs[2], "checkpoint")[0]))]
    );
    // A damaged checkpoint is found and named, and mended from the other log.
    let checkpoint = log_files(&dirs[2], "checkpoint").remove(0);
    let file = std::fs::File::options().write(true).open(&checkpoint).unwrap();
    file.write_all_at(&[0xa5; 8], 4200).unwrap();
    let of_log =
        |problems: Vec<Problem>| problems.into_iter().filter(|problem| problem.kind == Kind::Log).collect::<Vec<_>>();
    let found = of_log(check(&server, false));
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].path, checkpoint.display().to_string());
    assert!(found[0].detail.contains("the checkpoint is damaged") && found[0].remains(), "{found:?}");
    let repaired = of_log(check(&server, true));
    assert!(repaired.len() == 1 && !repaired[0].remains(), "{repaired:?}");
    assert_eq!(of_log(check(&server, false)), []);
    // The old directory is found again: a stripe directory like any other, and all is well.
    std::fs::rename(&away, &dirs[1]).unwrap();
    serve(&mut server);
    assert_eq!(readable(&server, &keys), 0);
    let client = TestClient::connect(&server);
    client.put("more", b"y").unwrap();
    drop(client);
    server.stop();
    assert_eq!(check(&server, false), []);
}

fn file_name(path: &Path) -> PathBuf {
    PathBuf::from(path.file_name().unwrap())
}

#[test]
fn a_damaged_marker_counts_as_a_missing_log_directory_and_without_any_log_nothing_can_be_done() {
    let (mut server, _) = filled(3);
    let dirs = server.config.stripe_dirs.clone();
    server.stop();
    let damage = |at: usize| {
        let file = std::fs::File::options().write(true).open(dirs[at].join(".railfs")).unwrap();
        file.write_all_at(&[0xa5; 8], 40).unwrap();
    };
    damage(0);
    let refused = replace(&server, &dirs[0]).unwrap_err().to_string();
    assert!(refused.contains("d0 is no stripe directory of store"), "{refused}");
    let replaced = replace(&server, &dirs[2]).unwrap();
    assert_eq!(replaced.log_directories.iter().map(|(path, _)| path.clone()).collect::<Vec<_>>(), dirs[1..]);
    serve(&mut server);
    let client = TestClient::connect(&server);
    client.put("more", b"x").unwrap();
    drop(client);
    server.stop();
    damage(1);
    std::fs::remove_file(dirs[2].join(".railfs")).unwrap();
    let refused = replace(&server, &dirs[2]).unwrap_err().to_string();
    assert!(refused.contains("d0") || refused.contains("no log directory"), "{refused}");
}

#[test]
fn i11_a_log_that_cannot_be_read_is_named_by_all_and_its_directory_can_be_replaced() {
    let (mut server, keys) = filled(4);
    let dirs = server.config.stripe_dirs.clone();
    server.stop();
    // Something else is in the place of a segment of one log.
    let segment = log_files(&dirs[1], "log").remove(0);
    std::fs::rename(&segment, server.root.path().join("segment")).unwrap();
    std::fs::create_dir(&segment).unwrap();
    let wanted = format!("{} cannot be read: it is a directory, not a regular file", segment.display());
    let named = |text: &str| {
        assert!(text.contains(&wanted) && text.contains("railfsd replace-log DIR"), "{text}");
    };
    for repair in [false, true] {
        let problems = check(&server, repair);
        let [problem] = &problems[..] else { panic!("{problems:?}") };
        assert_eq!((problem.kind, problem.remains(), &problem.path), (Kind::Log, true, &segment.display().to_string()));
        named(&problem.detail);
    }
    serve(&mut server);
    assert_eq!(readable(&server, &keys), 0);
    let client = TestClient::connect(&server);
    match client.put("more", b"x") {
        Err(Error::ReadOnly(why)) => named(&why),
        other => panic!("{other:?}"),
    }
    drop(client);
    let states: Vec<_> = server.server().node.health.all().filter(|state| !state.why.is_empty()).collect();
    assert!(states.len() == 1 && states[0].why.contains(&wanted), "{states:?}");
    server.stop();
    assert!(segment.is_dir(), "it is left alone");
    // Another takes its place, and it is a stripe directory like any other.
    let replaced = replace(&server, &dirs[2]).unwrap();
    let paths: Vec<_> = replaced.log_directories.iter().map(|(path, _)| path.clone()).collect();
    assert_eq!((replaced.epoch, paths), (2, vec![dirs[0].clone(), dirs[2].clone()]));
    serve(&mut server);
    assert_eq!(readable(&server, &keys), 0);
    TestClient::connect(&server).put("more", b"x").unwrap();
    server.stop();
    assert_eq!(check(&server, false), []);
    let nothing = replace(&server, &dirs[3]).unwrap_err();
    assert!(matches!(nothing, ReplaceError::Store(StoreError::NothingToReplace { .. })), "{nothing}");
}
