//! The whole catalog under failures: old or new and whole, acknowledged never lost, refused never happens, versions
//! never reused.

use super::testing::{Markers, clock, delete, descriptor, name, open, options, put, request, state_dir, wait};
use super::*;
use crate::store::simdisk::{Fault, SimDisks, Survives};
use railfs_proto::logfile::Found;
use std::collections::BTreeMap;
use std::sync::Arc;

pub(super) const KEYS: [&str; 4] = ["a", "d/x", "d/y", "e"];

/// What a name may have: what was last acknowledged, or what came after it with an unknown outcome.
pub(super) type Expected = BTreeMap<&'static str, Vec<Option<u64>>>;

/// Puts and deletes, one after another and some at the same time, until something fails. Gives what may be there and
/// the highest version that was handed out.
pub(super) fn work(catalog: &Arc<LogCatalog>, expected: &mut Expected, rounds: u64) -> u64 {
    wait(async {
        let mut handed_out = 0;
        for round in 0..rounds {
            let Ok(range) = catalog.reserve_versions(8).await else { return handed_out };
            let first = *range.start();
            assert!(first > handed_out);
            handed_out = *range.end();
            let (one, other) = (KEYS[round as usize % 4], KEYS[(round as usize + 1) % 4]);
            let (one_put, other_put) =
                tokio::join!(catalog.commit_put(put(one, first)), catalog.commit_put(put(other, first + 1)));
            let mut failed = false;
            for (key, version, outcome) in [(one, first, one_put), (other, first + 1, other_put)] {
                match outcome {
                    Ok(PutOutcome::Committed { .. }) => drop(expected.insert(key, vec![Some(version)])),
                    Ok(outcome) => panic!("{outcome:?}"),
                    Err(CatalogError::Unknown(_)) => {
                        expected.get_mut(key).unwrap().push(Some(version));
                        failed = true;
                    }
                    Err(CatalogError::Refused(_)) => failed = true,
                }
            }
            if failed {
                return handed_out;
            }
            if round % 3 == 2 {
                match catalog.delete(delete(one, first + 2)).await {
                    Ok(DeleteOutcome::Deleted { deleted, .. }) => {
                        assert_eq!(deleted, first);
                        expected.insert(one, vec![None]);
                    }
                    Err(CatalogError::Unknown(_)) => {
                        expected.get_mut(one).unwrap().push(None);
                        return handed_out;
                    }
                    Err(CatalogError::Refused(_)) => return handed_out,
                    Ok(outcome) => panic!("{outcome:?}"),
                }
            }
        }
        handed_out
    })
}

pub(super) fn nothing() -> Expected {
    KEYS.into_iter().map(|key| (key, vec![None])).collect()
}

/// What is there is one of what may be there, whole; gives it.
pub(super) fn check(catalog: &Arc<LogCatalog>, expected: &Expected, case: &str) -> BTreeMap<&'static str, Option<u64>> {
    wait(async {
        let mut there = BTreeMap::new();
        for (key, allowed) in expected {
            let object = catalog.lookup(&name(key)).await.unwrap().object;
            if let Some(object) = &object {
                assert_eq!(*object, descriptor(object.version), "{case}: {key} is whole");
            }
            let version = object.map(|object| object.version);
            assert!(allowed.contains(&version), "{case}: {key} is {version:?}, not one of {allowed:?}");
            there.insert(*key, version);
        }
        there
    })
}

#[test]
fn i8_a_crash_at_every_write_and_sync_leaves_old_or_new() {
    for logs in [1, 2] {
        let (clean, state) = (SimDisks::new(logs, Fault::Never), state_dir());
        let (catalog, _) = open(&clean, state.path(), &Arc::default()).unwrap();
        let before = clean.operations();
        work(&catalog, &mut nothing(), 12);
        drop(catalog);
        let operations = clean.operations();
        for at in before + 1..=operations {
            let freeze = Fault::FreezeAt(at);
            let fault = if at % 2 == 0 { freeze } else { Fault::FailAt(at) };
            let case = format!("{logs} logs, {fault:?}");
            let (disks, state, markers) = (SimDisks::new(logs, fault), state_dir(), Arc::new(Markers::default()));
            let (catalog, first) = open(&disks, state.path(), &markers).unwrap();
            let mut expected = nothing();
            let handed_out = work(&catalog, &mut expected, 12);
            if catalog.frozen().is_some() {
                // What is there can be read all the same, and nothing else is committed.
                check(&catalog, &expected, &case);
                let refused = wait(catalog.commit_put(put("a", handed_out)));
                assert!(matches!(refused, Err(CatalogError::Refused(Refusal::Frozen(_)))), "{case}: {refused:?}");
            }
            drop(catalog);
            let after = disks.crash(Survives::Some(at), Fault::Never);
            let (catalog, second) = open(&after, state.path(), &markers).unwrap_or_else(|e| panic!("{case}: {e}"));
            assert_eq!(second.incarnation, first.incarnation + 1);
            assert!(!second.previous.unwrap().stopped);
            assert_eq!(second.index_discarded, None, "{case}");
            let there = check(&catalog, &expected, &case);
            let next = wait(catalog.reserve_versions(1)).unwrap();
            assert!(*next.start() > handed_out, "{case}: {next:?} after {handed_out}");
            drop(catalog);
            if at % 5 == 0 {
                // Without its index it says the same.
                let (rebuilt, _) = open(&after, state_dir().path(), &markers).unwrap();
                assert_eq!(check(&rebuilt, &expected, &case), there, "{case}");
            }
        }
    }
}

#[test]
fn a_clean_stop_is_known_and_commits_after_it_are_refused() {
    let (disks, state, markers) = (SimDisks::new(2, Fault::Never), state_dir(), Arc::new(Markers::default()));
    let with_verbs = LogCatalogOptions { verbs: true, ..options(&disks, state.path(), &markers) };
    let (catalog, recovered) = LogCatalog::open(with_verbs).unwrap();
    assert_eq!((recovered.incarnation, recovered.previous), (1, None));
    work(&catalog, &mut nothing(), 5);
    wait(catalog.stop()).unwrap();
    let end = catalog.revision();
    assert_eq!(*markers.0.lock().unwrap(), end, "the markers know the end");
    let refused = wait(catalog.commit_put(put("a", 2000)));
    assert_eq!(refused, Err(CatalogError::Refused(Refusal::Stopping)));
    assert!(wait(catalog.lookup(&name("a"))).is_ok());
    drop(catalog);
    let (_, recovered) = open(&disks, state.path(), &markers).unwrap();
    let previous = Previous { incarnation: 1, stopped: true, verbs: true, lease_milliseconds: 2000 };
    assert_eq!((recovered.incarnation, recovered.previous, recovered.replayed), (2, Some(previous), 0));
}

#[test]
fn i3_a_run_that_stops_while_its_predecessor_is_trusted_leaves_the_wait_to_the_next_one() {
    let (disks, state, markers) = (SimDisks::new(2, Fault::Never), state_dir(), Arc::new(Markers::default()));
    let options = |verbs| LogCatalogOptions { verbs, ..options(&disks, state.path(), &markers) };
    // It dies, and its card may go on answering.
    drop(LogCatalog::open(options(true)).unwrap());
    // Others follow at once, with slots that can be READ and without, and each stops in order or dies.
    for (verbs, stops) in [(true, true), (false, true), (false, false), (true, false), (false, true)] {
        let (catalog, recovered) = LogCatalog::open(options(verbs)).unwrap();
        let wait_for = recovered.previous.and_then(Previous::trusted_for);
        assert!(wait_for.is_some(), "{recovered:?}");
        let work = wait(catalog.reserve_versions(1)).unwrap();
        if stops {
            wait(catalog.stop()).unwrap();
            assert!(wait(catalog.commit_put(put("a", *work.start()))).is_err(), "it has stopped");
        }
    }
    let (_, recovered) = LogCatalog::open(options(false)).unwrap();
    assert!(recovered.previous.and_then(Previous::trusted_for).is_some(), "{recovered:?}");
}

#[test]
fn an_index_that_is_lost_damaged_or_of_another_store_is_rebuilt() {
    let (disks, state, markers) = (SimDisks::new(1, Fault::Never), state_dir(), Arc::new(Markers::default()));
    let (catalog, _) = open(&disks, state.path(), &markers).unwrap();
    let mut expected = nothing();
    work(&catalog, &mut expected, 9);
    wait(catalog.stop()).unwrap();
    drop(catalog);
    let file = state.path().join("index.redb");
    let whole = std::fs::read(&file).unwrap();
    let other = {
        let (disks, elsewhere) = (SimDisks::new(1, Fault::Never), state_dir());
        let foreign = LogCatalogOptions {
            store: railfs_proto::descriptor::Id([3; 16]),
            ..options(&disks, elsewhere.path(), &Arc::default())
        };
        drop(LogCatalog::open(foreign).unwrap());
        std::fs::read(elsewhere.path().join("index.redb")).unwrap()
    };
    let mut flipped = whole.clone();
    flipped[whole.len() / 2..].fill(0x5a);
    let damages: [(&str, Vec<u8>, bool); 5] = [
        ("of another store", other, true),
        ("garbage", vec![7; 100_000], true),
        ("cut short", whole[..whole.len() / 3].to_vec(), true),
        ("damaged inside", flipped, true),
        ("empty", Vec::new(), false),
    ];
    for (what, bytes, discarded) in damages {
        std::fs::write(&file, bytes).unwrap();
        let (catalog, recovered) = open(&disks, state.path(), &markers).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(recovered.index_discarded.is_some(), discarded, "{what}: {recovered:?}");
        check(&catalog, &expected, what);
    }
    std::fs::remove_file(&file).unwrap();
    let (catalog, recovered) = open(&disks, state.path(), &markers).unwrap();
    assert!(recovered.replayed > 0 && recovered.index_discarded.is_none());
    check(&catalog, &expected, "lost");
}

#[test]
fn an_index_of_another_history_is_rebuilt_and_one_that_is_ahead_is_refused() {
    let (disks, state) = (SimDisks::new(1, Fault::Never), state_dir());
    let markers = Arc::new(Markers::default());
    let (catalog, _) = open(&disks, state.path(), &markers).unwrap();
    work(&catalog, &mut nothing(), 3);
    let fork = disks.crash(Survives::All, Fault::Never);
    work(&catalog, &mut nothing(), 6);
    wait(catalog.stop()).unwrap();
    drop(catalog);
    let behind = open(&fork, state.path(), &Arc::default());
    assert!(matches!(&behind, Err(StartError::Older { witness, .. }) if witness.contains("index.redb")), "{behind:?}");
    // The fork goes on with another clock, and ends behind where the index is.
    let elsewhere = state_dir();
    let later: Arc<dyn Fn() -> Time + Send + Sync> = {
        let clock = clock();
        Arc::new(move || Time { seconds: clock().seconds + 500, nanoseconds: 0 })
    };
    let forked = LogCatalogOptions { clock: later, ..options(&fork, elsewhere.path(), &Arc::default()) };
    let (catalog, _) = LogCatalog::open(forked).unwrap();
    let mut expected = nothing();
    work(&catalog, &mut expected, 20);
    drop(catalog);
    let (catalog, recovered) = open(&fork, state.path(), &Arc::default()).unwrap();
    assert!(recovered.index_discarded.is_some());
    check(&catalog, &expected, "fork");
}

#[test]
fn request_ids_are_bounded_and_survive_a_rebuild() {
    let (disks, state, markers) = (SimDisks::new(1, Fault::Never), state_dir(), Arc::new(Markers::default()));
    let few = |state: &std::path::Path| LogCatalogOptions { requests: 3, ..options(&disks, state, &markers) };
    let (catalog, _) = LogCatalog::open(few(state.path())).unwrap();
    let first = *wait(catalog.reserve_versions(20)).unwrap().start();
    let puts: Vec<_> = (0..5).map(|at| put("a", first + at)).collect();
    for made in &puts {
        wait(catalog.commit_put(made.clone())).unwrap();
    }
    drop(catalog);
    let elsewhere = state_dir();
    let (catalog, _) = LogCatalog::open(few(elsewhere.path())).unwrap();
    for (at, made) in puts.iter().enumerate() {
        let outcome = wait(catalog.commit_put(made.clone())).unwrap();
        let expected = match at {
            // Forgotten, but it is still true that something newer is there.
            0 | 1 => PutOutcome::Superseded { by: first + 4 },
            _ => PutOutcome::Committed { version: first + at as u64, replaced: Some(first + at as u64 - 1) },
        };
        assert_eq!(outcome, expected, "{at}");
    }
}

#[test]
fn a_record_that_is_too_long_is_refused_and_nothing_else_suffers() {
    let (disks, state) = (SimDisks::new(1, Fault::Never), state_dir());
    let (catalog, _) = open(&disks, state.path(), &Arc::default()).unwrap();
    let first = *wait(catalog.reserve_versions(20)).unwrap().start();
    let mut long = put("a", first);
    long.descriptor.components[0][0].node = "n".repeat(4000);
    long.request = request();
    let refused = wait(catalog.commit_put(long));
    assert!(matches!(refused, Err(CatalogError::Refused(Refusal::TooLong(_)))), "{refused:?}");
    assert!(wait(catalog.commit_put(put("a", first + 1))).is_ok());
}

#[test]
fn i12_a_record_of_a_newer_version_stops_the_start_by_number() {
    let (disks, state) = (SimDisks::new(1, Fault::Never), state_dir());
    drop(open(&disks, state.path(), &Arc::default()).unwrap());
    let found =
        super::recovery::survey(&disks.directories(), super::testing::IDENTITY, 0, &mut |_: &Found| Ok(())).unwrap();
    let (mut writer, _) = found.mend().unwrap();
    let sequence = writer.next_sequence();
    writer.append(&[railfs_proto::v1::Record { sequence, incarnation: 1, ..Default::default() }]).unwrap();
    let refused = open(&disks, state.path(), &Arc::default());
    assert!(matches!(refused, Err(StartError::UnknownRecord(number)) if number == sequence), "{refused:?}");
}

/// The real thing: directories with markers and locks, segments of full size, an index beside them.
#[test]
fn a_catalog_on_real_directories_starts_commits_stops_and_starts_again() {
    let root = tempfile::tempdir().unwrap();
    let paths = [root.path().join("d0"), root.path().join("d1"), root.path().join("d2")];
    paths.iter().for_each(|path| std::fs::create_dir(path).unwrap());
    crate::store::init(&paths).unwrap();
    let state = root.path().join("state");
    let mut expected = nothing();
    for run in 1..4 {
        let store = Arc::new(crate::store::open(&paths).unwrap());
        let (catalog, recovered) = LogCatalog::open(LogCatalogOptions::new(&store, state.clone(), "n")).unwrap();
        assert_eq!(recovered.incarnation, run);
        assert_eq!(recovered.previous.map(|previous| previous.stopped), (run > 1).then_some(run == 2));
        check(&catalog, &expected, "real");
        work(&catalog, &mut expected, 6);
        if run == 1 {
            wait(catalog.stop()).unwrap();
        }
        drop(catalog);
        assert_eq!(Arc::strong_count(&store), 1, "nothing holds the locks any more");
        assert!(store.highest_sequence() > 0);
    }
}
