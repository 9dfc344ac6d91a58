//! Checkpoints and the cut log under every failure: what was committed is there, nothing comes back, numbers go on.

use super::crash_tests::{Expected, KEYS, check, nothing, work};
use super::log::LogName;
use super::testing::{Markers, OFTEN, SEGMENT, delete, dump, name, options, put, state_dir, wait};
use super::*;
use crate::store::simdisk::{Fault, SimDisks, Survives};
use std::path::Path;
use std::sync::Arc;

fn often(disks: &SimDisks, state: &Path, markers: &Arc<Markers>) -> LogCatalogOptions {
    LogCatalogOptions { checkpoint_bytes: OFTEN, ..options(disks, state, markers) }
}

fn open(disks: &SimDisks, state: &Path, markers: &Arc<Markers>) -> Result<(Arc<LogCatalog>, Recovered), StartError> {
    LogCatalog::open(often(disks, state, markers))
}

/// First records of the segments and last records of the checkpoints that a disk holds.
fn held(disks: &SimDisks, at: usize) -> (Vec<u64>, Vec<u64>) {
    let (mut segments, mut checkpoints) = (Vec::new(), Vec::new());
    for name in disks.directories()[at].list().unwrap() {
        match LogName::parse(&name) {
            Some(LogName::Segment { first, .. }) => segments.push(first),
            Some(LogName::Checkpoint { sequence, .. }) => checkpoints.push(sequence),
            None => {}
        }
    }
    (segments, checkpoints)
}

fn checkpoint_name(sequence: u64) -> String {
    super::testing::IDENTITY.checkpoint_name(sequence)
}

/// A log that was cut, everything synced; its catalog is closed.
fn cut(logs: usize) -> (SimDisks, Arc<Markers>, Expected, Vec<String>) {
    let (disks, state, markers) = (SimDisks::new(logs, Fault::Never), state_dir(), Arc::new(Markers::default()));
    let (catalog, _) = open(&disks, state.path(), &markers).unwrap();
    let mut expected = nothing();
    work(&catalog, &mut expected, 24);
    let all = dump(&catalog);
    drop(catalog);
    let (segments, checkpoints) = held(&disks, 0);
    assert!(segments[0] > 1 && checkpoints.len() == 2, "{segments:?} {checkpoints:?}");
    assert!(segments[0] <= checkpoints[0] + 1 && checkpoints[0] < checkpoints[1]);
    (disks, markers, expected, all)
}

/// What the state entry says changes with every start.
fn without_state(lines: Vec<String>) -> Vec<String> {
    lines.into_iter().filter(|line| !line.contains("CheckpointState")).collect()
}

#[test]
fn i8_a_crash_at_every_operation_of_checkpoints_and_cuts_leaves_old_or_new() {
    for logs in [1, 2] {
        let (clean, state) = (SimDisks::new(logs, Fault::Never), state_dir());
        let (catalog, _) = open(&clean, state.path(), &Arc::default()).unwrap();
        let before = clean.operations();
        work(&catalog, &mut nothing(), 12);
        drop(catalog);
        let operations = clean.operations();
        assert!(held(&clean, 0).0[0] > 1, "it was cut");
        for at in before + 1..=operations {
            let fault = if at % 2 == 0 { Fault::FreezeAt(at) } else { Fault::FailAt(at) };
            let (disks, state, markers) = (SimDisks::new(logs, fault), state_dir(), Arc::new(Markers::default()));
            let (catalog, first) = open(&disks, state.path(), &markers).unwrap();
            let mut expected = nothing();
            let handed_out = work(&catalog, &mut expected, 12);
            let revision = catalog.revision();
            drop(catalog);
            // Once with the index it had, and without one in all the ways in which the disks can have been left.
            let with_index = disks.crash(Survives::Some(at), Fault::Never);
            let mut dumps = Vec::new();
            let rebuilt = [Survives::Some(at), Survives::All, Survives::Nothing].map(|survives| (false, survives));
            let thorough = at % 5 == 0;
            for (kept, survives) in rebuilt.into_iter().chain(thorough.then_some((true, Survives::Some(at)))) {
                let case = format!("{logs} logs, {fault:?}, {survives:?}, index kept: {kept}");
                let after = if kept {
                    with_index.crash(Survives::All, Fault::Never)
                } else {
                    disks.crash(survives, Fault::Never)
                };
                let elsewhere = state_dir();
                let state = if kept { state.path() } else { elsewhere.path() };
                let (catalog, second) = open(&after, state, &markers.copy()).unwrap_or_else(|e| panic!("{case}: {e}"));
                assert_eq!(second.incarnation, first.incarnation + 1, "{case}");
                check(&catalog, &expected, &case);
                assert!(catalog.revision() > revision, "{case}: numbers go on");
                let next = wait(catalog.reserve_versions(1)).unwrap();
                assert!(*next.start() > handed_out, "{case}: {next:?} after {handed_out}");
                if survives == Survives::Some(at) {
                    dumps.push(without_state(dump(&catalog)));
                }
                if thorough {
                    // And it can be cut on.
                    let mut goes_on = expected.clone();
                    work(&catalog, &mut goes_on, 3);
                    check(&catalog, &goes_on, &case);
                }
            }
            dumps.dedup();
            assert_eq!(dumps.len(), 1, "{logs} logs, {fault:?}: an index that grew and one that was rebuilt");
        }
    }
}

/// A start that is cut off at any of its own operations, while it completes a cut or mends a checkpoint.
#[test]
fn i8_a_start_on_a_cut_log_that_is_cut_off_is_repeated() {
    let (disks, markers, expected, all) = cut(2);
    let (segments, checkpoints) = held(&disks, 0);
    let lost: [&dyn Fn(&SimDisks); 4] = [
        &|disks| disks.lose(0, ""),
        &|disks| disks.lose(1, &checkpoint_name(checkpoints[1])),
        &|disks| disks.damage(0, &checkpoint_name(checkpoints[0]), |bytes| bytes[5000] ^= 1),
        &|disks| disks.lose(1, &super::testing::IDENTITY.name(segments[0])),
    ];
    for (case, lose) in lost.iter().enumerate() {
        for at in 1.. {
            let stopped = disks.crash(Survives::All, Fault::FreezeAt(at));
            lose(&stopped);
            let finished = open(&stopped, state_dir().path(), &markers.copy()).is_ok();
            for survives in [Survives::All, Survives::Nothing, Survives::Some(at)] {
                let case = format!("case {case}, cut off at {at}, {survives:?}");
                let after = stopped.crash(survives, Fault::Never);
                let (catalog, _) =
                    open(&after, state_dir().path(), &markers.copy()).unwrap_or_else(|e| panic!("{case}: {e}"));
                check(&catalog, &expected, &case);
                assert_eq!(without_state(dump(&catalog)), without_state(all.clone()), "{case}");
            }
            if finished {
                break;
            }
        }
    }
}

#[test]
fn i8_behind_a_cut_deletes_stay_versions_and_numbers_go_on_and_requests_are_done_once() {
    let (disks, state, markers) = (SimDisks::new(2, Fault::Never), state_dir(), Arc::new(Markers::default()));
    let (catalog, _) = open(&disks, state.path(), &markers).unwrap();
    let first = *wait(catalog.reserve_versions(50)).unwrap().start();
    let kept = put("kept", first + 1);
    let outcome = wait(catalog.commit_put(kept.clone())).unwrap();
    wait(catalog.commit_put(put("gone", first + 2))).unwrap();
    let delete = delete("gone", first + 10);
    let deleted = wait(catalog.delete(delete.clone())).unwrap();
    work(&catalog, &mut nothing(), 24);
    let (last, reserved) = (catalog.revision(), *wait(catalog.reserve_versions(1)).unwrap().end());
    drop(catalog);
    assert!(held(&disks, 0).0[0] > 20, "none of these records is in the log any more: {:?}", held(&disks, 0));
    let (catalog, recovered) = open(&disks, state_dir().path(), &markers).unwrap();
    assert!(recovered.replayed < last / 2, "{recovered:?}");
    assert_eq!(wait(catalog.commit_put(kept)).unwrap(), outcome);
    assert_eq!(wait(catalog.delete(delete)).unwrap(), deleted);
    assert_eq!(wait(catalog.lookup(&name("gone"))).unwrap().object, None);
    // The files of what was deleted are still there, so its tombstone is.
    let late = wait(catalog.commit_put(put("gone", first + 5))).unwrap();
    assert_eq!(late, PutOutcome::Superseded { by: first + 10 });
    assert!(wait(catalog.standing(first + 2)).unwrap().unwrap().superseded.is_some());
    assert!(*wait(catalog.reserve_versions(1)).unwrap().start() > reserved);
    assert!(catalog.revision() > last);
    // Who watches from before the cut is told so, and from the oldest number on misses nothing.
    let changes = |from| wait(async { catalog.changes(ChangesAt::number(from), 1000).await });
    let Err(ChangesError::TooOld { wanted: 2, oldest }) = changes(2) else { panic!("{:?}", changes(2)) };
    assert_eq!(oldest, held(&disks, 0).0[0]);
    let read = changes(oldest).unwrap();
    assert_eq!((read.at.next, read.oldest), (catalog.revision() + 1, oldest));
    assert!(read.changes.iter().all(|change| change.sequence >= oldest));
}

#[test]
fn i8_a_tombstone_outlives_its_files_and_the_puts_of_its_run() {
    let (disks, state, markers) = (SimDisks::new(1, Fault::Never), state_dir(), Arc::new(Markers::default()));
    let tombstones = |catalog: &LogCatalog| {
        let all = dump(catalog);
        all.iter().filter(|line| line.contains("CheckpointTombstone")).count()
    };
    let (catalog, _) = open(&disks, state.path(), &markers).unwrap();
    let first = *wait(catalog.reserve_versions(20)).unwrap().start();
    for (at, key) in (0..).zip(["one", "other"]) {
        wait(catalog.commit_put(put(key, first + at))).unwrap();
        wait(catalog.delete(delete(key, first + 10 + at))).unwrap();
    }
    wait(catalog.reclaimed(vec![first])).unwrap();
    let fill = |catalog: &LogCatalog| {
        for _ in 0..40 {
            wait(catalog.reserve_versions(1)).unwrap();
        }
    };
    fill(&catalog);
    assert_eq!(tombstones(&catalog), 2, "both may still be needed in this run");
    drop(catalog);
    let (catalog, _) = open(&disks, state.path(), &markers).unwrap();
    fill(&catalog);
    assert_eq!(tombstones(&catalog), 1, "the files of one are gone");
    drop(catalog);
    let (catalog, _) = open(&disks, state_dir().path(), &markers).unwrap();
    assert_eq!(tombstones(&catalog), 1);
    wait(catalog.reclaimed(vec![first + 1])).unwrap();
    fill(&catalog);
    assert_eq!(tombstones(&catalog), 0);
}

#[test]
fn i11_a_full_disk_leaves_the_log_uncut_and_says_so_until_there_is_room() {
    let (disks, state, markers) = (SimDisks::new(2, Fault::Never), state_dir(), Arc::new(Markers::default()));
    let options = LogCatalogOptions { checkpoint_bytes: 1500, ..options(&disks, state.path(), &markers) };
    let (catalog, _) = LogCatalog::open(options).unwrap();
    let reserve = || wait(catalog.reserve_versions(1));
    for _ in 0..3 {
        reserve().unwrap();
    }
    disks.fill();
    let before = held(&disks, 0);
    // The first segment has room for these.
    while !catalog.degraded().iter().any(|why| why.contains("not cut")) {
        reserve().unwrap();
    }
    let why = catalog.degraded().join("; ");
    assert!(why.contains("disk0 has no room for a checkpoint of"), "{why}");
    assert_eq!(held(&disks, 0), before);
    let mut later = 0;
    while reserve().is_ok() {
        later += 1;
    }
    assert!(later > 3 && catalog.frozen().is_none(), "it goes on");
    disks.make_room();
    for _ in 0..60 {
        reserve().unwrap();
    }
    assert_eq!(catalog.degraded(), [] as [String; 0]);
    assert!(!held(&disks, 1).1.is_empty());
    for disk in disks.directories() {
        assert!(!disk.list().unwrap().contains(&super::checkpoint::UNFINISHED.to_owned()));
    }
}

#[test]
fn i8_a_damaged_checkpoint_is_named_and_mended_from_the_other_log() {
    let (disks, markers, expected, all) = cut(2);
    let (_, checkpoints) = held(&disks, 0);
    let length = disks.directories()[0].read(&checkpoint_name(checkpoints[1]), u64::MAX).unwrap().len();
    for log in 0..2 {
        for sequence in &checkpoints {
            for at in [0, 9, 33, 60, 4095, 4096, 4104, 4200, length - 1] {
                let damaged = disks.crash(Survives::All, Fault::Never);
                let name = checkpoint_name(*sequence);
                damaged.damage(log, &name, |bytes| {
                    let at = at.min(bytes.len() - 1);
                    bytes[at] ^= 0x40;
                });
                let scratch = state_dir();
                let (_, unequal) = LogCatalog::inspect(&often(&damaged, scratch.path(), &markers)).unwrap();
                assert_eq!(unequal.len(), 1, "{unequal:?}");
                assert_eq!((&unequal[0].name, unequal[0].mendable), (&name, true));
                assert_eq!(unequal[0].directory, format!("disk{log}"));
                let (_, recovered) = open(&damaged, state_dir().path(), &markers.copy()).unwrap();
                assert!(recovered.mended.contains(&format!("{name} in disk{log}")), "{recovered:?}");
                // The other log is not needed any more.
                let alone = damaged.crash(Survives::Nothing, Fault::Never);
                alone.lose(1 - log, "");
                let (catalog, _) = open(&alone, state_dir().path(), &markers.copy()).unwrap();
                check(&catalog, &expected, &name);
                assert_eq!(without_state(dump(&catalog)), without_state(all.clone()));
            }
        }
    }
}

#[test]
fn i8_with_one_log_a_damaged_checkpoint_is_done_without_where_the_one_before_it_is_whole() {
    let (disks, markers, expected, all) = cut(1);
    let (segments, checkpoints) = held(&disks, 0);
    let damaged = disks.crash(Survives::All, Fault::Never);
    damaged.damage(0, &checkpoint_name(checkpoints[1]), |bytes| bytes[4200] ^= 1);
    let (_, unequal) = LogCatalog::inspect(&often(&damaged, state_dir().path(), &markers)).unwrap();
    assert_eq!((unequal.len(), unequal[0].mendable), (1, false), "{unequal:?}");
    let (catalog, recovered) = open(&damaged, state_dir().path(), &markers.copy()).unwrap();
    assert_eq!(recovered.removed, [format!("{} in disk0", checkpoint_name(checkpoints[1]))]);
    check(&catalog, &expected, "the one before");
    assert_eq!(without_state(dump(&catalog)), without_state(all));
    // Another one is written at once.
    drop(catalog);
    assert!(held(&damaged, 0).1.last() > Some(&checkpoints[1]), "{:?}", held(&damaged, 0));
    // Both: the start is refused, by name, and nothing is written.
    let hopeless = disks.crash(Survives::All, Fault::Never);
    for sequence in &checkpoints {
        hopeless.damage(0, &checkpoint_name(*sequence), |bytes| bytes[4200] ^= 1);
    }
    let operations = hopeless.operations();
    let refused = open(&hopeless, state_dir().path(), &markers.copy()).unwrap_err();
    assert!(matches!(refused, StartError::Checkpoint { first, .. } if first == segments[0]), "{refused}");
    for sequence in &checkpoints {
        assert!(refused.to_string().contains(&format!("disk0/{}", checkpoint_name(*sequence))), "{refused}");
    }
    assert_eq!(hopeless.operations(), operations);
    for sequence in &checkpoints {
        hopeless.lose(0, &checkpoint_name(*sequence));
    }
    let refused = open(&hopeless, state_dir().path(), &markers.copy()).unwrap_err();
    assert!(matches!(refused, StartError::Beginning { wanted: 1, .. }), "{refused}");
}

#[test]
fn i8_an_older_log_than_the_markers_or_a_checkpoint_know_is_refused() {
    let (disks, markers, _, _) = cut(1);
    let (segments, checkpoints) = held(&disks, 0);
    // Nothing behind the checkpoint.
    let old = disks.crash(Survives::All, Fault::Never);
    for first in segments.iter().filter(|first| **first > checkpoints[1] / 2) {
        old.lose(0, &super::testing::IDENTITY.name(*first));
    }
    let refused = open(&old, state_dir().path(), &Arc::default()).unwrap_err();
    let named = matches!(&refused, StartError::Older { witness, .. } if witness.contains("disk0"))
        || matches!(refused, StartError::NoSegment { .. } | StartError::Beginning { .. });
    assert!(named, "{refused}");
    // An index that is behind the cut is thrown away, not gone on with.
    let (disks, state, markers2) = (SimDisks::new(1, Fault::Never), state_dir(), Arc::new(Markers::default()));
    let (catalog, _) = open(&disks, state.path(), &markers2).unwrap();
    work(&catalog, &mut nothing(), 2);
    wait(catalog.stop()).unwrap();
    drop(catalog);
    let old_index = std::fs::read(state.path().join("index.redb")).unwrap();
    let (catalog, _) = open(&disks, state.path(), &markers2).unwrap();
    let mut expected = nothing();
    work(&catalog, &mut expected, 24);
    drop(catalog);
    std::fs::write(state.path().join("index.redb"), old_index).unwrap();
    let (catalog, recovered) = open(&disks, state.path(), &markers2).unwrap();
    assert!(recovered.index_discarded.is_some_and(|why| why.contains("what is left of the log")));
    check(&catalog, &expected, "an old index");
    // Segments of an epoch that is over are not taken for an empty log.
    let state = state_dir();
    let newer = LogCatalogOptions { epoch: 2, ..often(&disks, state.path(), &markers) };
    let refused = LogCatalog::open(newer).unwrap_err();
    assert!(matches!(refused, StartError::Epoch { found: Some(1), epoch: 2, .. }), "{refused}");
    assert!(refused.to_string().contains("epoch 1") && refused.to_string().contains("epoch 2"), "{refused}");
}

#[test]
fn i6_the_log_stays_bounded() {
    let (disks, state, markers) = (SimDisks::new(2, Fault::Never), state_dir(), Arc::new(Markers::default()));
    let options = LogCatalogOptions { checkpoint_bytes: 2 * SEGMENT, ..options(&disks, state.path(), &markers) };
    let (catalog, _) = LogCatalog::open(options).unwrap();
    let mut most = 0;
    for _ in 0..40 {
        work(&catalog, &mut nothing(), 10);
        // What is recorded as reclaimed is in no checkpoint: those stay small.
        let past = wait(catalog.superseded(0, 1000)).unwrap();
        wait(catalog.reclaimed(past.iter().map(|past| past.descriptor.version).collect())).unwrap();
        let (segments, checkpoints) = held(&disks, 0);
        most = most.max(segments.len() + checkpoints.len());
    }
    assert!(held(&disks, 0).0[0] > 1);
    // Two thirds of a segment are its header here, and request ids are kept for long.
    assert!(most < 40, "{most}");
}

#[test]
fn i8_commits_go_on_while_a_thread_writes_checkpoints() {
    let (disks, state, markers) = (SimDisks::new(2, Fault::Never), state_dir(), Arc::new(Markers::default()));
    let apart = |state: &Path| LogCatalogOptions { checkpoint_apart: true, ..often(&disks, state, &markers) };
    let (catalog, _) = LogCatalog::open(apart(state.path())).unwrap();
    let mut expected = nothing();
    // Until it has had time for two of them.
    while held(&disks, 0).0[0] == 1 {
        work(&catalog, &mut expected, 5);
    }
    work(&catalog, &mut expected, 5);
    wait(catalog.stop()).unwrap();
    let all = dump(&catalog);
    drop(catalog);
    let (catalog, _) = LogCatalog::open(apart(state_dir().path())).unwrap();
    check(&catalog, &expected, "apart");
    assert_eq!(without_state(dump(&catalog)), without_state(all));
    assert_eq!(KEYS.len(), expected.len());
}
