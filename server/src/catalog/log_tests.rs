//! The log under every failure: what was appended is there, what was refused is not, damage is told from a torn tail.

use super::log::{AppendError, LogIdentity, LogWriter};
use super::recovery::survey;
use super::start_error::StartError;
use super::testing::IDENTITY;
use crate::store::simdisk::{Fault, SimDisks, Survives};
use railfs_proto::logfile::Found;
use railfs_proto::v1::{Record, ReserveRecord, record::Body};

fn record(sequence: u64, last: u64) -> Record {
    let body = Some(Body::Reserve(ReserveRecord { last }));
    Record { sequence, incarnation: 1, time_seconds: 1, time_nanoseconds: 2, body }
}

fn value(record: &Record) -> u64 {
    match &record.body {
        Some(Body::Reserve(reserve)) => reserve.last,
        _ => 0,
    }
}

/// The values in the log, and the log ready to be written.
fn recover(disks: &SimDisks, highest: u64) -> Result<(Vec<u64>, LogWriter), StartError> {
    let mut values = Vec::new();
    let found = survey(&disks.directories(), IDENTITY, highest, &mut |found: &Found| {
        assert_eq!(found.record.sequence, values.len() as u64 + 1, "without gaps");
        values.push(value(&found.record));
        Ok(())
    })?;
    let (writer, _) = found.mend()?;
    assert_eq!(writer.next_sequence(), values.len() as u64 + 1);
    Ok((values, writer))
}

/// Appends batches of 1 to 4 records until one fails: what was acknowledged, and what came last if its outcome is
/// unknown. Values tell the runs of a test apart.
fn append(writer: &mut LogWriter, batches: u64, base: u64) -> (Vec<u64>, Vec<u64>) {
    let mut acknowledged = Vec::new();
    for batch in 0..batches {
        writer.prepare().ok();
        let first = writer.next_sequence();
        let records: Vec<_> = (0..=batch % 4).map(|at| record(first + at, base + first + at)).collect();
        match writer.append(&records) {
            Ok(_) => acknowledged.extend(records.iter().map(value)),
            Err(AppendError::NotBegun(_)) => return (acknowledged, Vec::new()),
            Err(AppendError::Unknown(_)) => {
                let again = writer.append(&records);
                assert!(matches!(again, Err(AppendError::NotBegun(_))), "frozen: {again:?}");
                return (acknowledged, records.iter().map(value).collect());
            }
        }
    }
    (acknowledged, Vec::new())
}

/// What was acknowledged is there, in order, and behind it at most a part of what was being written.
fn check(values: &[u64], acknowledged: &[u64], unknown: &[u64], case: &str) {
    assert!(values.starts_with(acknowledged), "{case}: {values:?} lacks some of {acknowledged:?}");
    let more = &values[acknowledged.len()..];
    assert!(unknown.starts_with(more), "{case}: {more:?} was never written, {unknown:?} was");
}

const SURVIVES: [Survives; 5] =
    [Survives::All, Survives::Nothing, Survives::Some(1), Survives::Some(2), Survives::Some(3)];

/// Every operation of appending, for one log and for two, as the last one or as the one that fails.
#[test]
fn i8_what_was_acknowledged_survives_a_failure_at_every_write_and_sync() {
    for logs in [1, 2] {
        let clean = SimDisks::new(logs, Fault::Never);
        let (_, mut writer) = recover(&clean, 0).unwrap();
        let before = clean.operations();
        append(&mut writer, 90, 0);
        let operations = clean.operations();
        assert!(operations - before > 180);
        for at in before + 1..=operations {
            for fault in [Fault::FreezeAt(at), Fault::FailAt(at)] {
                let disks = SimDisks::new(logs, fault);
                let (_, mut writer) = recover(&disks, 0).unwrap();
                let (acknowledged, unknown) = append(&mut writer, 90, 0);
                for survives in SURVIVES {
                    let case = format!("{logs} logs, {fault:?}, {survives:?}");
                    let after = disks.crash(survives, Fault::Never);
                    let highest = acknowledged.len() as u64;
                    let (values, mut writer) = recover(&after, highest).unwrap_or_else(|e| panic!("{case}: {e}"));
                    check(&values, &acknowledged, &unknown, &case);
                    // It goes on from there, and a second start finds the same.
                    let (more, _) = append(&mut writer, 5, 10_000);
                    let again = after.crash(Survives::Nothing, Fault::Never);
                    let (all, _) = recover(&again, 0).unwrap_or_else(|e| panic!("{case}, again: {e}"));
                    assert_eq!(all, [values, more].concat(), "{case}");
                }
            }
        }
    }
}

/// A start that is cut off at any of its own writes leaves a log that the next start reads the same.
#[test]
fn i8_a_start_that_is_cut_off_anywhere_is_repeated() {
    let mut cases = 0;
    for seed in 0..40 {
        let disks = SimDisks::new(2, Fault::FreezeAt(100 + seed * 3));
        let (_, mut writer) = recover(&disks, 0).unwrap();
        let (acknowledged, unknown) = append(&mut writer, 90, 0);
        let torn = disks.crash(Survives::Some(seed), Fault::Never);
        for at in 1.. {
            let cut = torn.crash(Survives::All, Fault::FreezeAt(at));
            let finished = recover(&cut, 0).is_ok();
            for survives in SURVIVES {
                let case = format!("seed {seed}, cut at {at}, {survives:?}");
                let after = cut.crash(survives, Fault::Never);
                let (values, _) = recover(&after, 0).unwrap_or_else(|e| panic!("{case}: {e}"));
                check(&values, &acknowledged, &unknown, &case);
            }
            cases += 1;
            if finished {
                break;
            }
        }
    }
    assert!(cases > 100, "{cases}");
}

#[test]
fn a_full_disk_refuses_before_a_record_is_begun_and_goes_on_when_there_is_room() {
    let disks = SimDisks::new(2, Fault::Never);
    let (_, mut writer) = recover(&disks, 0).unwrap();
    append(&mut writer, 4, 0);
    let room = disks.operations() + 30;
    disks.set_fault(Fault::FullFrom(room));
    let (acknowledged, unknown) = append(&mut writer, 1000, 1000);
    assert!(unknown.is_empty() && acknowledged.len() < 1000);
    assert_eq!(writer.frozen(), None);
    // Smaller ones may still fit what is allocated.
    let refused = (0..100).find_map(|_| writer.append(&[record(writer.next_sequence(), 5)]).err());
    assert!(
        matches!(&refused, Some(AppendError::NotBegun(super::Refusal::NoSpace(why))) if why.contains("disk0")),
        "{refused:?}"
    );
    let (values, _) = recover(&disks.crash(Survives::All, Fault::Never), 0).unwrap();
    let all = values.iter().copied().filter(|&value| value != 5).collect::<Vec<_>>();
    assert!(all.ends_with(&acknowledged));
    disks.set_fault(Fault::Never);
    writer.append(&[record(writer.next_sequence(), 6)]).unwrap();
    let (values, _) = recover(&disks.crash(Survives::Nothing, Fault::Never), 0).unwrap();
    assert_eq!(values.last(), Some(&6));
}

/// Some records in three segments, everything synced.
fn written(logs: usize) -> (SimDisks, Vec<u64>, Vec<String>) {
    let disks = SimDisks::new(logs, Fault::Never);
    let (_, mut writer) = recover(&disks, 0).unwrap();
    let (acknowledged, _) = append(&mut writer, 60, 0);
    let mut names = disks.directories()[0].list().unwrap();
    names.retain(|name| LogIdentity::parse(name).is_some());
    assert!(names.len() >= 3, "{names:?}");
    (disks, acknowledged, names)
}

#[test]
fn damage_to_one_of_two_logs_is_mended_from_the_other() {
    let (disks, acknowledged, names) = written(2);
    for log in 0..2 {
        for name in &names {
            for offset in [0, 100, 4096, 4100, 4096 + 700, 4096 + 1500] {
                let damaged = disks.crash(Survives::All, Fault::Never);
                damaged.damage(log, name, |bytes| bytes[offset..offset + 40].fill(0xa5));
                let (values, _) = recover(&damaged, acknowledged.len() as u64).unwrap();
                assert_eq!(values, acknowledged);
                // Mended: the other log is not needed any more.
                let alone = damaged.crash(Survives::Nothing, Fault::Never);
                alone.lose(1 - log, "");
                assert_eq!(recover(&alone, 0).unwrap().0, acknowledged, "log {log}, {name} at {offset}");
            }
        }
        let lost = disks.crash(Survives::All, Fault::Never);
        lost.lose(log, "");
        assert_eq!(recover(&lost, 0).unwrap().0, acknowledged);
        let one = disks.crash(Survives::All, Fault::Never);
        one.lose(log, &names[1]);
        assert_eq!(recover(&one, 0).unwrap().0, acknowledged);
    }
}

#[test]
fn damage_in_the_middle_of_the_only_log_stops_the_start_by_name() {
    let (disks, acknowledged, names) = written(1);
    let damaged = disks.crash(Survives::All, Fault::Never);
    damaged.damage(0, &names[1], |bytes| bytes[4096 + 20] ^= 1);
    let refused = recover(&damaged, 0).unwrap_err();
    assert!(matches!(&refused, StartError::Damaged { segment, offset: 4096, .. } if *segment == names[1]), "{refused}");
    assert!(refused.to_string().contains("disk0"), "{refused}");
    let operations = damaged.operations();
    assert_eq!(operations, 0, "nothing was written");
    let lost = disks.crash(Survives::All, Fault::Never);
    lost.lose(0, &names[1]);
    assert!(matches!(recover(&lost, 0), Err(StartError::Damaged { .. })));
    let headless = disks.crash(Survives::All, Fault::Never);
    headless.lose(0, &names[0]);
    assert!(matches!(recover(&headless, 0), Err(StartError::Beginning { .. })));
    // A header alone is mended: the records say whose they are.
    let header = disks.crash(Survives::All, Fault::Never);
    header.damage(0, &names[1], |bytes| bytes[50] ^= 1);
    assert_eq!(recover(&header, 0).unwrap().0, acknowledged);
}

#[test]
fn an_older_log_than_the_markers_have_seen_is_refused() {
    let (disks, acknowledged, names) = written(2);
    let end = acknowledged.len() as u64;
    assert!(recover(&disks.crash(Survives::All, Fault::Never), end).is_ok());
    let old = disks.crash(Survives::All, Fault::Never);
    old.lose(0, names.last().unwrap());
    old.lose(1, names.last().unwrap());
    let refused = recover(&old, end).unwrap_err();
    assert!(matches!(refused, StartError::Older { seen, .. } if seen == end), "{refused}");
    assert!(matches!(recover(&SimDisks::new(2, Fault::Never), 1), Err(StartError::Older { .. })));
}

#[test]
fn segments_of_another_store_or_a_newer_epoch_are_refused_by_name() {
    let (disks, _, names) = written(1);
    let other = LogIdentity { store: railfs_proto::descriptor::Id([1; 16]), ..IDENTITY };
    let refused = survey(&disks.directories(), other, 0, &mut |_: &Found| Ok(())).err().unwrap();
    assert!(matches!(&refused, StartError::Foreign { path, .. } if path.contains(&names[0])), "{refused}");
    let older = LogIdentity { epoch: 0, ..IDENTITY };
    assert!(matches!(survey(&disks.directories(), older, 0, &mut |_: &Found| Ok(())), Err(StartError::Foreign { .. })));
}

/// After `kill -9` on a disk that is full: a start needs no more room than was allocated ahead, wherever the run before
/// it stopped, and wherever it is cut off itself.
#[test]
fn i8_a_start_on_a_full_disk_needs_no_room() {
    for logs in [1, 2] {
        let clean = SimDisks::new(logs, Fault::Never);
        let (_, mut writer) = recover(&clean, 0).unwrap();
        let begun = clean.operations();
        append(&mut writer, 90, 0);
        let operations = clean.operations();
        for at in (begun + 1..=operations).step_by(3) {
            let disks = SimDisks::new(logs, Fault::FreezeAt(at));
            let (_, mut writer) = recover(&disks, 0).unwrap();
            let (acknowledged, unknown) = append(&mut writer, 90, 0);
            for cut in 1.. {
                let full = disks.crash(Survives::All, Fault::FreezeAt(cut));
                full.fill();
                let case = format!("{logs} logs, stopped at {at}, cut at {cut}");
                let finished = recover(&full, 0).is_ok();
                let after = full.crash(Survives::All, Fault::Never);
                after.fill();
                let (values, mut writer) = match recover(&after, 0) {
                    Ok(recovered) => recovered,
                    // Known limit: cut off while the second log was about to begin a segment that the first has, it may lack
                    // the room for it. Nothing is lost, and the refusal says how many bytes are needed where.
                    Err(error @ StartError::NoRoom { .. }) if logs == 2 => {
                        assert!(error.to_string().contains("6144 bytes"), "{case}: {error}");
                        break;
                    }
                    Err(error) => panic!("{case}: {error}"),
                };
                check(&values, &acknowledged, &unknown, &case);
                let (more, _) = append(&mut writer, 2, 10_000);
                let again = after.crash(Survives::Nothing, Fault::Never);
                let (all, _) = recover(&again, 0).unwrap_or_else(|e| panic!("{case}, again: {e}"));
                assert_eq!(all, [values, more].concat(), "{case}");
                for disk in after.directories() {
                    assert!(!disk.list().unwrap().contains(&super::log::MENDED.to_owned()), "{case}");
                }
                if finished || cut > 40 {
                    break;
                }
            }
        }
    }
}

#[test]
fn without_a_spare_the_end_of_a_segment_is_kept_for_deletes() {
    let disks = SimDisks::new(1, Fault::Never);
    let (_, mut writer) = recover(&disks, 0).unwrap();
    disks.fill();
    assert!(writer.prepare().is_err());
    while writer.kept_back(0).is_none() {
        writer.append(&[record(writer.next_sequence(), 1)]).unwrap();
    }
    let why = writer.kept_back(0).unwrap().to_string();
    assert!(why.contains("disk0") && why.contains("6144"), "{why}");
    writer.append(&[record(writer.next_sequence(), 2)]).unwrap();
}
