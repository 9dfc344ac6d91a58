//! A log that cannot be read: the others take its place, as far as they are whole, and nothing is committed.

use super::testing::{Markers, open, options, put, state_dir, wait};
use super::*;
use crate::store::simdisk::{Fault, SimDisks};
use crate::store::{LogDirectory, LogFile};
use std::io;
use std::sync::{Arc, Mutex};

const SEGMENT: &str = "0000000000000001-0000000000000001.log";
const EIO: i32 = 5;

/// A log directory of which a file is in a bad place of its disk.
#[derive(Debug)]
struct Bad(Arc<dyn LogDirectory>, i32);

impl LogDirectory for Bad {
    fn describe(&self) -> String {
        self.0.describe()
    }
    fn list(&self) -> io::Result<Vec<String>> {
        self.0.list()
    }
    fn read(&self, name: &str, limit: u64) -> io::Result<Vec<u8>> {
        if name == SEGMENT { Err(io::Error::from_raw_os_error(self.1)) } else { self.0.read(name, limit) }
    }
    fn create(&self, name: &str, size: u64) -> io::Result<Box<dyn LogFile>> {
        panic!("{name} of {size} bytes is made in a log that cannot be read")
    }
    fn allocated(&self, name: &str) -> io::Result<u64> {
        self.0.allocated(name)
    }
    fn open(&self, name: &str) -> io::Result<Box<dyn LogFile>> {
        panic!("{name} is written in a log that cannot be read")
    }
    fn rename(&self, from: &str, _: &str) -> io::Result<()> {
        panic!("{from} is renamed in a log that cannot be read")
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        panic!("{name} is removed in a log that cannot be read")
    }
    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }
}

/// Markers that are told which logs cannot be read.
#[derive(Debug, Default)]
struct Told(Mutex<Vec<String>>);

impl SequenceKeeper for Told {
    fn keep(&self, _: u64) -> Result<(), String> {
        Ok(())
    }
    fn cannot_read(&self, log: &Unreadable) {
        self.0.lock().unwrap().push(log.to_string());
    }
}

/// Two logs with an object in them.
fn filled() -> (SimDisks, Arc<Markers>) {
    let (disks, state, markers) = (SimDisks::new(2, Fault::Never), state_dir(), Arc::new(Markers::default()));
    let (catalog, _) = open(&disks, state.path(), &markers).unwrap();
    let version = *wait(catalog.reserve_versions(1)).unwrap().start();
    wait(catalog.commit_put(put("a", version))).unwrap();
    wait(catalog.stop()).unwrap();
    (disks, markers)
}

fn with_bad(disks: &SimDisks, markers: &Arc<Markers>, bad: &[usize], errno: i32) -> (LogCatalogOptions, Arc<Told>) {
    let told = Arc::new(Told::default());
    let mut options = options(disks, std::path::Path::new("/nowhere"), markers);
    for &at in bad {
        options.logs[at] = Arc::new(Bad(Arc::clone(&options.logs[at]), errno));
    }
    options.keeper = Arc::clone(&told) as Arc<dyn SequenceKeeper>;
    (options, told)
}

#[test]
fn i8_a_log_that_cannot_be_read_is_named_and_the_other_is_read_but_takes_nothing() {
    let (disks, markers) = filled();
    for at in [0, 1] {
        let state = state_dir();
        let (mut options, told) = with_bad(&disks, &markers, &[at], EIO);
        options.state_dir = state.path().to_owned();
        let inspected = LogCatalog::inspect(&options).unwrap();
        drop(inspected);
        let (catalog, _) = LogCatalog::open(options).unwrap();
        let wanted = format!("disk{at}/{SEGMENT} cannot be read: Input/output error");
        let told = told.0.lock().unwrap().clone();
        assert!(told.len() == 2 && told.iter().all(|told| told.starts_with(&wanted)), "{told:?}");
        assert!(wait(catalog.lookup(&testing::name("a"))).unwrap().object.is_some());
        let refused = wait(catalog.commit_put(put("b", 9999))).unwrap_err().to_string();
        assert!(refused.contains(&wanted), "{refused}");
    }
}

#[test]
fn i8_where_no_whole_log_is_left_an_unreadable_one_is_refused_with_what_to_do() {
    let (disks, markers) = filled();
    let refused = |bad: &[usize], errno| {
        let state = state_dir();
        let (mut options, _) = with_bad(&disks, &markers, bad, errno);
        options.state_dir = state.path().to_owned();
        LogCatalog::open(options).map(drop).unwrap_err().to_string()
    };
    // None of them can be read: both are named.
    let both = refused(&[0, 1], EIO);
    for wanted in
        [&format!("disk0/{SEGMENT} cannot be read"), &format!("disk1/{SEGMENT} cannot be read"), "from a copy"]
    {
        assert!(both.contains(wanted), "{both}");
    }
    // Too many open files are no fault of the log.
    let short = refused(&[1], 24);
    assert!(short.contains("Too many open files") && short.contains("cannot read disk1/"), "{short}");
    // The one that can be read is an old one: refused as ever.
    *markers.0.lock().unwrap() += 1;
    let older = refused(&[1], EIO);
    assert!(
        older.contains("older copy of the log") && older.contains(&format!("disk1/{SEGMENT} cannot be read")),
        "{older}"
    );
    *markers.0.lock().unwrap() -= 1;
    // Or damaged.
    disks.damage(0, SEGMENT, |bytes| bytes[4096 + 20] ^= 1);
    let damaged = refused(&[1], EIO);
    assert!(
        damaged.contains("the log is damaged") && damaged.contains(&format!("disk1/{SEGMENT} cannot be read")),
        "{damaged}"
    );
}

#[test]
fn i8_a_stray_file_that_is_named_like_a_segment_is_named_and_left_alone() {
    let (disks, markers) = filled();
    // As after a crash the markers do not know the last records.
    *markers.0.lock().unwrap() = 1;
    let start = || {
        let state = state_dir();
        open(&disks, state.path(), &markers).map(|(catalog, _)| {
            assert!(wait(catalog.lookup(&testing::name("a"))).unwrap().object.is_some());
        })
    };
    for (first, why) in [(0xff, "ends with record 4"), (3, "has that record elsewhere")] {
        for at in [0, 1] {
            let name = format!("0000000000000001-{first:016x}.log");
            let log = disks.directories().remove(at);
            log.create(&name, 8192).unwrap().write_at(0, &[0x5a; 8192]).unwrap();
            let refused = start().unwrap_err().to_string();
            let wanted = format!("disk{at}/{name} does not belong there");
            assert!(refused.starts_with(&wanted) && refused.contains(why), "{refused}");
            assert!(refused.contains("move it away"), "{refused}");
            assert!(log.read(&name, 9000).unwrap() == [0x5a; 8192], "it is left alone");
            log.remove(&name).unwrap();
        }
    }
    start().unwrap();
}

#[test]
fn what_is_no_file_in_the_place_of_the_index_is_moved_aside_and_kept() {
    let (disks, markers) = filled();
    let state = state_dir();
    let (place, aside) = (state.path().join("index.redb"), state.path().join("index.redb.aside"));
    let start = || {
        open(&disks, state.path(), &markers).map(|(catalog, recovered)| {
            drop(catalog);
            recovered.index_discarded
        })
    };
    std::fs::create_dir_all(place.join("full")).unwrap();
    assert!(LogCatalog::index_trouble(state.path()).unwrap().1.contains("it is a directory"));
    let told = start().unwrap().unwrap();
    assert_eq!(told, format!("it was a directory, which was moved to {}", aside.display()));
    assert!(aside.join("full").is_dir() && place.is_file());
    assert_eq!((LogCatalog::index_trouble(state.path()), start().unwrap()), (None, None));
    // What was moved aside before stays, too.
    std::fs::remove_file(&place).unwrap();
    std::os::unix::fs::symlink("index.redb", &place).unwrap();
    assert!(start().unwrap().unwrap().contains("a symbolic link, which was moved to"));
    assert!(aside.join("full").is_dir() && state.path().join("index.redb.aside.1").is_symlink());
    std::fs::remove_file(&place).unwrap();
    let fifo = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, &place, fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    assert!(start().unwrap().unwrap().contains("a FIFO, which was moved to"));
    // A name that leads to where no file can be made.
    std::fs::remove_file(&place).unwrap();
    std::os::unix::fs::symlink("gone/index", &place).unwrap();
    assert!(LogCatalog::index_trouble(state.path()).unwrap().1.contains("can be removed"));
    let refused = start().unwrap_err().to_string();
    for wanted in ["index.redb", "No such file", "the index can be removed"] {
        assert!(refused.contains(wanted), "{refused}");
    }
}
