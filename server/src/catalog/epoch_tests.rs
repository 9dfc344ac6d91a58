//! A log directory is replaced, cut off at every operation: the store starts in the old epoch or in the new one, with
//! everything that was committed, and doing it again completes it.

use super::crash_tests::{Expected, check, nothing, work};
use super::testing::{Markers, OFTEN, dump, options, state_dir, wait};
use super::*;
use crate::store::LogDirectory;
use crate::store::simdisk::{Fault, SimDisks, Survives};
use std::io;
use std::path::Path;
use std::sync::Arc;

const MARKER: &str = "marker";

/// Three disks: the log was on the first two, the second is gone, and the third is to take its place.
fn logs(disks: &SimDisks, epoch: u64) -> Vec<Arc<dyn LogDirectory>> {
    let all = disks.directories();
    let at: &[usize] = if epoch == 1 { &[0] } else { &[0, 2] };
    at.iter().map(|at| Arc::clone(&all[*at])).collect()
}

/// As a marker is written: beside the old one, synced, renamed.
fn write_marker(disk: &dyn LogDirectory, epoch: u8) -> io::Result<()> {
    let file = disk.create("marker.new", 1)?;
    file.write_at(0, &[epoch])?;
    file.sync()?;
    disk.rename("marker.new", MARKER)?;
    disk.sync()
}

/// The newest marker of those that are there counts.
fn epoch(disks: &SimDisks) -> u64 {
    let all = disks.directories();
    let read = |at: usize| u64::from(all[at].read(MARKER, 1).unwrap()[0]);
    read(0).max(read(2))
}

fn at_epoch(disks: &SimDisks, epoch: u64, state: &Path, markers: &Arc<Markers>) -> LogCatalogOptions {
    // A log directory is missing: nothing is committed.
    let read_only = (epoch == 1).then(|| "disk1 is missing".to_owned());
    let logs = logs(disks, epoch);
    LogCatalogOptions { epoch, logs, read_only, checkpoint_bytes: OFTEN, ..options(disks, state, markers) }
}

/// What the command does, without the real directories.
fn replace(disks: &SimDisks, markers: &Arc<Markers>) -> Result<(), String> {
    let all = disks.directories();
    let told = |error: io::Error| error.to_string();
    if epoch(disks) == 1 {
        let scratch = state_dir();
        let inspected = LogCatalog::inspect(&at_epoch(disks, 1, scratch.path(), markers)).map_err(|e| e.to_string())?;
        inspected.0.stage_epoch(2, &logs(disks, 2)).map_err(|error| error.to_string())?;
    }
    for at in [0, 2] {
        write_marker(all[at].as_ref(), 2).map_err(told)?;
    }
    adopt_epoch(2, &logs(disks, 2)).map_err(|error| error.to_string())
}

/// A log that was cut, on two disks, of which the second is gone now.
fn before() -> (SimDisks, Arc<Markers>, Expected, Vec<String>, u64) {
    let (disks, state, markers) = (SimDisks::new(3, Fault::Never), state_dir(), Arc::new(Markers::default()));
    for disk in disks.directories() {
        write_marker(disk.as_ref(), 1).unwrap();
    }
    let logs = disks.directories()[..2].to_vec();
    let options = LogCatalogOptions { logs, checkpoint_bytes: OFTEN, ..options(&disks, state.path(), &markers) };
    let (catalog, _) = LogCatalog::open(options).unwrap();
    let mut expected = nothing();
    let handed_out = work(&catalog, &mut expected, 24);
    let all = dump(&catalog);
    drop(catalog);
    // As after `kill -9`: the end may be torn, and the spare segment is there.
    let disks = disks.crash(Survives::All, Fault::Never);
    disks.lose(1, "");
    (disks, markers, expected, all, handed_out)
}

fn without_state(lines: &[String]) -> Vec<String> {
    lines.iter().filter(|line| !line.contains("CheckpointState")).cloned().collect()
}

#[test]
fn i8_a_log_directory_is_replaced_and_a_crash_at_every_operation_leaves_the_old_epoch_or_the_new() {
    let (disks, markers, expected, all, handed_out) = before();
    let (mut old, mut new) = (0, 0);
    for at in 1.. {
        let stopped = disks.crash(Survives::All, Fault::FreezeAt(at));
        let finished = replace(&stopped, &markers).is_ok();
        for survives in [Survives::All, Survives::Nothing, Survives::Some(at), Survives::Some(at + 1000)] {
            let case = format!("cut off at {at}, {survives:?}");
            let after = stopped.crash(survives, Fault::Never);
            let now = epoch(&after);
            *(if now == 1 { &mut old } else { &mut new }) += 1;
            // A start as it is, and one after the command was given again.
            for again in [false, true] {
                let after = after.crash(Survives::All, Fault::Never);
                let case = format!("{case}, again: {again}");
                if again {
                    replace(&after, &markers).unwrap_or_else(|error| panic!("{case}: {error}"));
                    assert_eq!(epoch(&after), 2);
                }
                let (now, state, markers) = (epoch(&after), state_dir(), markers.copy());
                let (catalog, _) = LogCatalog::open(at_epoch(&after, now, state.path(), &markers))
                    .unwrap_or_else(|error| panic!("{case}, epoch {now}: {error}"));
                check(&catalog, &expected, &case);
                assert_eq!(without_state(&dump(&catalog)), without_state(&all), "{case}");
                if now == 1 {
                    assert!(wait(catalog.reserve_versions(1)).is_err(), "{case}: read-only");
                    continue;
                }
                let mut goes_on = expected.clone();
                assert!(*wait(catalog.reserve_versions(1)).unwrap().start() > handed_out, "{case}");
                work(&catalog, &mut goes_on, 4);
                drop(catalog);
                // Either of the two logs has it all, and what is of the old epoch is gone.
                for (lost, left) in [(0, 2), (2, 0)] {
                    let alone = after.crash(Survives::Nothing, Fault::Never);
                    assert!(
                        alone.directories()[left]
                            .list()
                            .unwrap()
                            .iter()
                            .all(|name| !name.starts_with("0000000000000001-"))
                    );
                    alone.lose(lost, "");
                    let state = state_dir();
                    let (catalog, _) = LogCatalog::open(at_epoch(&alone, 2, state.path(), &markers.copy()))
                        .unwrap_or_else(|error| panic!("{case}, without disk{lost}: {error}"));
                    check(&catalog, &goes_on, &case);
                }
            }
        }
        if finished {
            break;
        }
    }
    assert!(old > 20 && new > 20, "{old} {new}");
}

#[test]
fn what_was_staged_for_an_epoch_that_never_began_is_nothing() {
    let (disks, markers, expected, _, _) = before();
    let state = state_dir();
    let (catalog, _) = LogCatalog::inspect(&at_epoch(&disks, 1, state.path(), &markers)).unwrap();
    catalog.stage_epoch(2, &logs(&disks, 2)).unwrap();
    drop(catalog);
    let staged = |disk: usize| {
        let names = disks.directories()[disk].list().unwrap();
        names.iter().filter(|name| name.ends_with(".staged")).count()
    };
    assert_eq!((staged(0), staged(2)), (2, 2), "a checkpoint and a segment in each");
    // The lost disk is found again: the old epoch goes on, and removes what was staged.
    let state = state_dir();
    let writable = LogCatalogOptions { read_only: None, ..at_epoch(&disks, 1, state.path(), &markers) };
    let (catalog, _) = LogCatalog::open(writable).unwrap();
    let mut goes_on = expected;
    work(&catalog, &mut goes_on, 4);
    drop(catalog);
    assert_eq!(staged(0), 0);
    // What is left on the other disk is an older log by now: it is refused.
    let (state, stale) = (state_dir(), at_epoch(&disks, 2, Path::new(""), &markers));
    let refused = LogCatalog::open(LogCatalogOptions { state_dir: state.path().to_owned(), ..stale }).unwrap_err();
    assert!(matches!(refused, StartError::Older { .. }), "{refused}");
}

#[test]
fn i11_where_there_is_no_room_for_a_new_epoch_the_old_one_stays_as_it_was() {
    let (disks, markers, expected, _, _) = before();
    disks.fill();
    let refused = replace(&disks, &markers).unwrap_err();
    assert!(refused.contains("disk0 has no room for a checkpoint of"), "{refused}");
    let names = disks.directories()[0].list().unwrap();
    assert!(!names.iter().any(|name| name.ends_with(".staged") || name == "checkpoint"), "{names:?}");
    assert_eq!(epoch(&disks), 1);
    let state = state_dir();
    let (catalog, _) = LogCatalog::open(at_epoch(&disks, 1, state.path(), &markers)).unwrap();
    check(&catalog, &expected, "full");
}
