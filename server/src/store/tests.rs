//! Tests of stripe directories: markers, init, open, locks.

use super::marker::{MARKER, Marker};
use super::*;
use railfs_proto::descriptor::Id;
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;

fn directories(count: usize) -> (TempDir, Vec<PathBuf>) {
    let root = tempfile::tempdir().unwrap();
    let paths: Vec<_> = (0..count).map(|at| root.path().join(format!("d{at}"))).collect();
    paths.iter().for_each(|path| fs::create_dir(path).unwrap());
    (root, paths)
}

fn contents(paths: &[PathBuf]) -> Vec<Vec<u8>> {
    paths.iter().map(|path| fs::read(path.join(MARKER)).unwrap()).collect()
}

fn refusal<T: std::fmt::Debug>(result: Result<T, StoreError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn init_makes_a_store_and_doing_it_twice_changes_nothing() {
    let (_root, paths) = directories(3);
    fs::create_dir(paths[1].join("lost+found")).unwrap();
    let made = init(&paths).unwrap();
    assert!(made.new_store);
    assert_eq!(made.added.len(), 3);
    let before = contents(&paths);
    let again = init(&paths).unwrap();
    assert_eq!((again.store, again.new_store, again.added.len(), again.kept.len()), (made.store, false, 0, 3));
    assert_eq!(contents(&paths), before);
    let store = open(&paths).unwrap();
    assert_eq!(store.id(), made.store);
    assert_eq!(store.directories().iter().map(StripeDirectory::holds_log).collect::<Vec<_>>(), [true, true, false]);
    assert!(paths[0].join("log").is_dir() && !paths[2].join("log").exists());
    assert!(paths[2].join("components").is_dir() && paths[2].join("lost").is_dir());
}

#[test]
fn init_adds_directories_to_the_store_that_the_others_carry() {
    let (_root, paths) = directories(4);
    let made = init(&paths[..1]).unwrap();
    let added = init(&paths[..3]).unwrap();
    assert_eq!((added.store, added.new_store, added.added.len()), (made.store, false, 2));
    let store = open(&paths[..3]).unwrap();
    assert_eq!(store.log_directories().len(), 2);
    drop(store);
    // All directories of the store must be there.
    let refused = refusal(init(&[paths[0].clone(), paths[3].clone()]));
    assert!(refused.contains("missing") && refused.contains(&added.added[0].1.to_string()), "{refused}");
    assert!(!paths[3].join(MARKER).exists());
}

#[test]
fn init_that_was_interrupted_is_repeated() {
    let (_root, paths) = directories(3);
    let made = init(&paths).unwrap();
    let ids: Vec<Id> = made.added.iter().map(|(_, id)| *id).collect();
    // As if it had stopped after the second marker: none lists what is not there.
    fs::remove_file(paths[2].join(MARKER)).unwrap();
    for (at, count) in [(0, 1), (1, 2)] {
        let mut marker = Marker::read(&paths[at]).unwrap().unwrap();
        marker.directories = ids[..count].to_vec();
        marker.log_directories = ids[..count].to_vec();
        marker.write(&paths[at]).unwrap();
    }
    fs::write(paths[2].join(".railfs.tmp"), b"half").unwrap();
    let again = init(&paths).unwrap();
    assert_eq!((again.store, again.added.len()), (made.store, 1));
    assert_eq!(open(&paths).unwrap().log_directories().len(), 2);
}

#[test]
fn init_refuses_what_is_not_empty_not_there_or_of_another_store() {
    let (root, paths) = directories(3);
    fs::write(paths[0].join("data"), b"x").unwrap();
    assert!(refusal(init(&paths)).contains("data"));
    assert!(!paths[1].join(MARKER).exists(), "nothing was made");
    let gone = root.path().join("gone");
    assert!(refusal(init(&[paths[1].clone(), gone.clone()])).contains("does not exist"));
    assert!(!gone.exists());
    assert!(refusal(init(&[paths[1].clone(), paths[1].join(".")])).contains("list it once"));
    let file = root.path().join("file");
    fs::write(&file, b"").unwrap();
    assert!(refusal(init(&[file])).contains("not a directory"));
    assert!(matches!(init(&[]), Err(StoreError::Empty)));
    init(&paths[1..2]).unwrap();
    init(&paths[2..3]).unwrap();
    assert!(matches!(init(&paths[1..]), Err(StoreError::OtherStore { .. })));
}

#[test]
fn open_refuses_by_name() {
    let (_root, paths) = directories(4);
    assert!(matches!(open(&paths[..1]), Err(StoreError::NoMarker(path)) if path == paths[0]));
    assert!(!paths[0].join("components").exists() && !paths[0].join(".railfs.lock").exists());
    let made = init(&paths[..3]).unwrap();
    let refused = refusal(open(&paths[..2]));
    assert!(refused.contains(&made.added[2].1.to_string()), "{refused}");
    init(&paths[3..]).unwrap();
    assert!(matches!(open(&paths), Err(StoreError::OtherStore { path, .. }) if path == paths[3]));
    assert!(matches!(open(&[]), Err(StoreError::Empty)));
    let mut bytes = fs::read(paths[1].join(MARKER)).unwrap();
    bytes[30] ^= 1;
    fs::write(paths[1].join(MARKER), &bytes).unwrap();
    let store = open(&paths[..3]).unwrap();
    let [missing] = store.missing() else { panic!("{:?}", store.missing()) };
    assert_eq!((missing.id, missing.holds_log), (made.added[1].1, true));
    assert!(missing.why.contains("counts as missing") && missing.why.contains("d1"), "{}", missing.why);
}

#[test]
fn what_is_not_there_is_missing_and_nothing_is_made_in_its_place() {
    let (root, paths) = directories(5);
    let made = init(&paths).unwrap();
    let id = |place: usize| made.added[place].1;
    let away = |place: usize| root.path().join(format!("away{place}"));
    let put_away = |place: usize| fs::rename(&paths[place], away(place)).unwrap();
    let put_back = |place: usize| fs::rename(away(place), &paths[place]).unwrap();
    // Not there; an empty directory, as where a disk is not mounted; a file.
    put_away(4);
    for kind in 0..3 {
        match kind {
            1 => fs::create_dir(&paths[4]).unwrap(),
            2 => fs::write(&paths[4], b"x").unwrap(),
            _ => {}
        }
        let store = open(&paths).unwrap();
        let [missing] = store.missing() else { panic!("{:?}", store.missing()) };
        assert_eq!((missing.id, missing.holds_log, store.read_only()), (id(4), false, None));
        assert_eq!(missing.place, paths[4].display().to_string());
        assert_eq!(store.directories().len(), 4);
        store.update_markers(70).unwrap();
        match kind {
            0 => assert!(!paths[4].exists()),
            1 => fs::remove_dir(&paths[4]).unwrap(), // Empty.
            _ => fs::remove_file(&paths[4]).unwrap(),
        }
    }
    // Two are: either may be either.
    put_away(3);
    let store = open(&paths).unwrap();
    assert_eq!(store.missing().iter().map(|missing| missing.id).collect::<Vec<_>>(), [id(3), id(4)]);
    let both = format!("{} or {}", paths[3].display(), paths[4].display());
    assert!(store.missing().iter().all(|missing| missing.place == both), "{:?}", store.missing());
    drop(store);
    // Back again, they belong to the store as before: the markers of the others kept them.
    put_back(3);
    put_back(4);
    let store = open(&paths).unwrap();
    assert_eq!((store.missing(), store.read_only(), store.highest_sequence()), (&[][..], None, 70));
    drop(store);
    // One of the log's: nothing can be committed; all of them: nothing can be served.
    put_away(0);
    let store = open(&paths).unwrap();
    let why = store.read_only().unwrap();
    assert!(why.contains(&id(0).to_string()) && why.contains(paths[0].to_str().unwrap()), "{why}");
    assert_eq!(store.log_directories().len(), 1);
    drop(store);
    put_away(1);
    let refused = refusal(open(&paths));
    assert!(refused.contains("no log directory") && refused.contains(&id(1).to_string()), "{refused}");
    put_back(0);
    put_back(1);
    // A place that is none of the store's is not taken for one that is missing.
    let mut more = paths.clone();
    more.push(root.path().join("typo"));
    assert!(matches!(open(&more), Err(StoreError::NotThere(path)) if path.ends_with("typo")));
    assert!(!root.path().join("typo").exists());
    // All away: the first is named.
    (0..5).for_each(put_away);
    assert!(matches!(open(&paths), Err(StoreError::NotThere(path)) if path == paths[0]));
}

#[test]
fn a_place_that_something_else_took_is_seen_and_not_written() {
    let (root, paths) = directories(3);
    init(&paths).unwrap();
    let store = open(&paths).unwrap();
    assert_eq!(store.directories()[2].check_place(), Ok(()));
    fs::rename(&paths[2], root.path().join("away")).unwrap();
    assert!(store.directories()[2].check_place().unwrap_err().contains("does not exist"));
    fs::create_dir(&paths[2]).unwrap();
    assert!(store.directories()[2].check_place().unwrap_err().contains("another directory"));
    store.update_markers(9).unwrap();
    assert_eq!(fs::read_dir(&paths[2]).unwrap().count(), 0);
    assert!(store.directories()[2].space().unwrap().f_blocks > 0);
    assert!(!store.directories()[2].is_read_only());
    assert_eq!(Marker::read(&paths[0]).unwrap().unwrap().highest_sequence, 9);
}

#[test]
fn a_segment_without_a_name_is_not_written() {
    let (_root, paths) = directories(1);
    let directory = DiskLogDirectory::new(paths[0].clone());
    let file = directory.create("a", 4096).unwrap();
    file.check().unwrap();
    directory.remove("a").unwrap();
    assert!(file.check().unwrap_err().to_string().contains("deleted"));
}

#[test]
fn a_directory_is_known_by_its_marker_not_by_its_place() {
    let (_root, mut paths) = directories(3);
    let made = init(&paths).unwrap();
    paths.reverse();
    let store = open(&paths).unwrap();
    for (path, id) in made.added {
        assert_eq!(store.directory(id).unwrap().path(), path);
    }
    assert_eq!(store.log_directories()[0].describe(), paths[2].join("log").display().to_string());
}

#[test]
fn one_directory_under_two_names_and_a_copy_of_one_are_refused() {
    let (root, paths) = directories(2);
    init(&paths[..1]).unwrap();
    let link = root.path().join("link");
    std::os::unix::fs::symlink(&paths[0], &link).unwrap();
    assert!(matches!(open(&[paths[0].clone(), link]), Err(StoreError::Twice { .. })));
    fs::copy(paths[0].join(MARKER), paths[1].join(MARKER)).unwrap();
    assert!(matches!(open(&paths), Err(StoreError::Twice { .. })));
}

#[test]
fn a_second_server_is_refused_naming_the_holder() {
    let (_root, paths) = directories(2);
    init(&paths).unwrap();
    let store = open(&paths).unwrap();
    let refused = refusal(open(&paths));
    assert!(refused.contains(&format!("process {}", std::process::id())), "{refused}");
    assert!(matches!(init(&paths), Err(StoreError::Locked { .. })));
    drop(store);
    open(&paths).unwrap();
}

#[test]
fn markers_keep_the_highest_sequence_that_any_of_them_has_seen() {
    let (_root, paths) = directories(2);
    init(&paths).unwrap();
    let store = open(&paths).unwrap();
    store.update_markers(70).unwrap();
    store.update_markers(60).unwrap();
    drop(store);
    let mut behind = Marker::read(&paths[0]).unwrap().unwrap();
    assert_eq!(behind.highest_sequence, 70);
    behind.highest_sequence = 10;
    behind.write(&paths[0]).unwrap();
    assert_eq!(open(&paths).unwrap().highest_sequence(), 70);
}

#[test]
fn a_segment_on_a_real_disk_is_allocated_written_and_renamed() {
    let (_root, paths) = directories(1);
    let directory = DiskLogDirectory::new(paths[0].clone());
    let file = directory.create("a", 1 << 20).unwrap();
    file.write_at(4096, b"hello").unwrap();
    file.sync().unwrap();
    directory.rename("a", "b").unwrap();
    directory.sync().unwrap();
    directory.open("b").unwrap().write_at(4101, b"!").unwrap();
    let bytes = directory.read("b", u64::MAX).unwrap();
    assert_eq!(bytes.len(), 1 << 20);
    assert_eq!(&bytes[4096..4103], b"hello!\0");
    assert_eq!(directory.list().unwrap(), ["b"]);
    directory.remove("b").unwrap();
    assert!(directory.read("b", 1).is_err());
}

#[test]
fn init_refuses_a_directory_inside_a_stripe_directory_however_it_is_reached() {
    let (root, paths) = directories(1);
    init(&paths).unwrap();
    let inner = paths[0].join("sub");
    fs::create_dir(&inner).unwrap();
    let link = root.path().join("link");
    std::os::unix::fs::symlink(&inner, &link).unwrap();
    for path in [inner, link] {
        let refused = refusal(init(std::slice::from_ref(&path)));
        assert!(refused.contains("inside stripe directory") && refused.contains("d0"), "{refused}");
        assert!(!path.join(MARKER).exists());
    }
}

#[test]
fn a_marker_is_replaced_in_room_that_is_kept_for_it() {
    use std::os::unix::fs::MetadataExt;
    let (_root, paths) = directories(1);
    init(&paths).unwrap();
    let store = open(&paths).unwrap();
    let room = || {
        let of = |name: &str| fs::metadata(paths[0].join(name)).unwrap().ino();
        let mut both = [of(MARKER), of(".railfs.tmp")];
        both.sort_unstable();
        both
    };
    store.update_markers(5).unwrap();
    let before = room();
    for highest in 6..9 {
        store.update_markers(highest).unwrap();
        assert_eq!(room(), before, "the same two files, in turns");
        assert_eq!(Marker::read(&paths[0]).unwrap().unwrap().highest_sequence, highest);
    }
}

fn fifo(path: &std::path::Path) {
    let _ = fs::remove_file(path);
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
}

#[test]
fn i9_what_is_no_file_in_the_place_of_one_of_ours_is_named_and_nobody_waits_for_it() {
    let (_root, paths) = directories(2);
    init(&paths).unwrap();
    // Who has it open is for messages alone.
    fifo(&paths[0].join(".railfs.lock"));
    drop(open(&paths).unwrap());
    // The next marker could not be written: that is said before anything is done.
    let tmp = paths[1].join(".railfs.tmp");
    fifo(&tmp);
    let wanted = format!("{} is in the way: it is a FIFO, not a regular file; move it away", tmp.display());
    for refused in [refusal(open(&paths)), refusal(init(&paths))] {
        assert!(refused.starts_with(&wanted), "{refused}");
    }
    fs::remove_file(&tmp).unwrap();
    fs::create_dir(&tmp).unwrap();
    let refused = refusal(open(&paths));
    assert!(refused.contains("it is a directory, not a regular file; move it away"), "{refused}");
    fs::remove_dir(&tmp).unwrap();
    // Files of the log.
    let log = open(&paths).unwrap().log_directories().remove(0);
    let place = paths[0].join("log/segment");
    fifo(&place);
    let errors = [
        log.read("segment", 10).unwrap_err(),
        log.read_at("segment", 0, 10).unwrap_err(),
        log.open("segment").unwrap_err(),
        log.create("segment", 10).unwrap_err(),
        log.remove("segment").unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.to_string(), "it is a FIFO, not a regular file; move it away");
    }
    assert_eq!(log.allocated("segment").unwrap(), 0);
    // Without its marker a directory is missing.
    fifo(&paths[1].join(MARKER));
    let store = open(&paths).unwrap();
    let [missing] = store.missing() else { panic!("{:?}", store.missing()) };
    assert!(missing.why.contains("d1/.railfs: it is a FIFO"), "{}", missing.why);
}

#[test]
fn a_marker_that_was_removed_is_put_back_where_the_one_before_says_who_the_directory_is() {
    let (_root, paths) = directories(3);
    init(&paths).unwrap();
    let store = open(&paths).unwrap();
    store.update_markers(7).unwrap();
    let ids: Vec<Id> = store.directories().iter().map(StripeDirectory::id).collect();
    drop(store);
    let restore = || restore_markers(&lock(&paths).unwrap()).unwrap();
    assert_eq!(restore(), []);
    fs::remove_file(paths[2].join(MARKER)).unwrap();
    let missing = open(&paths).unwrap().missing()[0].why.clone();
    for told in [missing, refusal(init(&paths))] {
        assert!(told.contains("d2/.railfs was removed") && told.contains("railfsd fsck --repair"), "{told}");
    }
    assert_eq!(restore(), [(paths[2].clone(), ids[2])]);
    let store = open(&paths).unwrap();
    assert_eq!((store.missing().len(), store.directories()[2].id()), (0, ids[2]));
    store.update_markers(8).unwrap();
    drop(store);
    // Another directory's, another store's, a damaged one, none.
    let tmp = paths[2].join(".railfs.tmp");
    let (root, other) = directories(1);
    init(&other).unwrap();
    fs::remove_file(paths[2].join(MARKER)).unwrap();
    let damaged = [&fs::read(&tmp).unwrap()[..], &[1]].concat();
    for wrong in [fs::read(paths[1].join(MARKER)).unwrap(), fs::read(other[0].join(MARKER)).unwrap(), damaged] {
        fs::write(&tmp, wrong).unwrap();
        assert_eq!(restore(), []);
    }
    fs::remove_file(&tmp).unwrap();
    assert_eq!(restore(), []);
    assert!(!paths[2].join(MARKER).exists());
    drop(root);
}
