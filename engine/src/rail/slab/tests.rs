//! Over files of the real file system, in both ways of reading.

use super::*;
use railfs_proto::limits::MAX_EXTENT;
use std::io::Write;
use std::sync::Condvar;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

const LONG: Duration = Duration::from_secs(30);

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i.wrapping_mul(31) ^ (i >> 8)) as u8).collect()
}

struct Disk {
    _dir: tempfile::TempDir,
    file: Arc<File>,
    direct: Option<Arc<File>>,
    all: Vec<u8>,
}

fn disk(length: usize) -> Disk {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("component");
    let all = pattern(length);
    let mut file = File::create(&path).unwrap();
    file.write_all(&all).unwrap();
    file.sync_all().unwrap();
    Disk { _dir: dir, file: Arc::new(File::open(&path).unwrap()), direct: open_direct(&path).ok().map(Arc::new), all }
}

impl Disk {
    fn piece(&self, identity: u8, offset: u64, length: u32) -> Bulk {
        let expected = self.all.get(offset as usize..offset as usize + length as usize).map(<[u8]>::to_vec);
        Bulk::File {
            file: self.file.clone(),
            offset,
            length,
            check: Some(Check::new(move |bytes| expected.as_deref() == Some(bytes))),
            kept: Some(Kept { identity: Identity([identity; 32]), direct: self.direct.clone(), fresh: false }),
        }
    }
}

/// Says that a part of a test cannot run here, where `make test` counts it.
fn skip(name: &str, why: &str) {
    eprintln!("SKIPPED {name}: {why}");
    if let Some(path) = std::env::var_os("RAILFS_SKIP_LOG") {
        let mut log = std::fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
        writeln!(log, "SKIPPED {name}: {why}").unwrap();
    }
}

type Answers = Receiver<(Lent, Sent)>;

fn ask(slab: &Slab, bulk: Bulk) -> Answers {
    let (to, answers) = channel();
    slab.read(bulk, move |lent, sent| to.send((lent, sent)).unwrap());
    answers
}

fn ways() -> [Reading; 2] {
    [Reading::Auto, Reading::Threads]
}

#[test]
fn both_ways_of_reading_give_the_bytes_and_keep_them() {
    let disk = disk(3 << 20);
    for reading in ways() {
        let slab = Slab::start("test", 4 << 20, reading).unwrap();
        if reading == Reading::Auto && !slab.counters().io_uring {
            skip("both_ways_of_reading_give_the_bytes_and_keep_them", "no io_uring here");
        }
        for _ in 0..2 {
            for (offset, length) in [(0u64, MAX_EXTENT), (1 << 20, MAX_EXTENT), (2 << 20, 5000), (4096, 4096)] {
                let (lent, sent) = ask(&slab, disk.piece(1, offset, length)).recv_timeout(LONG).unwrap();
                assert!(sent.error.is_none() && sent.bytes == length, "{sent:?}");
                let at = offset as usize;
                assert!(lent.bytes()[..length as usize] == disk.all[at..at + length as usize], "{offset}");
            }
        }
        let counters = slab.counters();
        assert_eq!((counters.misses, counters.hits), (3, 5), "{counters:?}");
        assert_eq!(counters.direct + counters.buffered, 3);
        assert_eq!(counters.direct > 0, disk.direct.is_some(), "{counters:?}");
        assert_eq!(counters.held, (2 << 20) + 8192);
        slab.stop();
    }
}

#[test]
fn i2_bytes_that_fail_their_checksum_are_never_success_and_never_kept() {
    let disk = disk(1 << 20);
    for reading in ways() {
        let slab = Slab::start("test", 2 << 20, reading).unwrap();
        let damaged = || {
            let Bulk::File { file, offset, length, kept, .. } = disk.piece(1, 0, 65536) else { unreachable!() };
            Bulk::File { file, offset, length, kept, check: Some(Check::new(|_| false)) }
        };
        for _ in 0..2 {
            let (_, sent) = ask(&slab, damaged()).recv_timeout(LONG).unwrap();
            assert_eq!(sent.error.unwrap().kind(), io::ErrorKind::InvalidData);
        }
        // Short: what is there, zeros, and the word that it was short.
        let (lent, sent) = ask(&slab, disk.piece(1, (1 << 20) - 4096, 8192)).recv_timeout(LONG).unwrap();
        assert!(sent.bytes == 4096 && sent.error.is_none(), "{sent:?}");
        assert!(lent.bytes()[4096..8192].iter().all(|byte| *byte == 0));
        drop(lent);
        assert_eq!((slab.counters().hits, slab.counters().held), (0, 0));
    }
}

#[test]
fn what_is_fresh_is_read_again() {
    let disk = disk(1 << 20);
    let slab = Slab::start("test", 2 << 20, Reading::Auto).unwrap();
    for fresh in [false, true, false] {
        let mut bulk = disk.piece(1, 0, 65536);
        if let Bulk::File { kept: Some(kept), .. } = &mut bulk {
            kept.fresh = fresh;
        }
        ask(&slab, bulk).recv_timeout(LONG).unwrap();
    }
    assert_eq!((slab.counters().misses, slab.counters().hits), (2, 1));
}

/// Lets nobody pass until it is opened.
#[derive(Default)]
struct Gate(Mutex<bool>, Condvar);

impl Gate {
    fn open(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }
    fn pass(&self) {
        drop(self.1.wait_while(self.0.lock().unwrap(), |open| !*open).unwrap());
    }
}

#[test]
fn i4_i6_many_at_once_share_reads_wait_for_memory_and_all_get_their_own_bytes() {
    let disk = disk(8 << 20);
    for reading in ways() {
        // Room for two pieces of eight.
        let slab = Slab::start("test", 2 << 20, reading).unwrap();
        let mut all = Vec::new();
        for round in 0..4 {
            for piece in 0..8u64 {
                all.push((piece, ask(&slab, disk.piece(1, piece << 20, MAX_EXTENT)), round));
            }
        }
        for (piece, answer, round) in all {
            let (lent, sent) = answer.recv_timeout(LONG).unwrap();
            assert!(sent.error.is_none() && sent.bytes == MAX_EXTENT, "{sent:?}");
            let at = (piece as usize) << 20;
            assert!(lent.bytes()[..1 << 20] == disk.all[at..at + (1 << 20)], "piece {piece} in round {round}");
        }
        let counters = slab.counters();
        assert_eq!(counters.hits + counters.misses + counters.joins, 32);
        assert!(counters.held <= 2 << 20 && counters.evicted > 0 && counters.waited > 0, "{counters:?}");
        assert_eq!(slab.arena().stats().free + counters.held, slab.arena().stats().total);
    }
}

#[test]
fn one_who_asks_while_it_is_read_joins() {
    let disk = disk(1 << 20);
    for reading in ways() {
        let slab = Slab::start("test", 2 << 20, reading).unwrap();
        let gate = Arc::<Gate>::default();
        let of_check = gate.clone();
        let Bulk::File { file, offset, length, kept, .. } = disk.piece(1, 0, 1 << 20) else { unreachable!() };
        let check = Some(Check::new(move |_| {
            of_check.pass();
            true
        }));
        let first = ask(&slab, Bulk::File { file, offset, length, kept, check });
        let second = ask(&slab, disk.piece(1, 8192, 4096));
        let until = std::time::Instant::now() + LONG;
        while slab.counters().joins == 0 {
            assert!(std::time::Instant::now() < until, "{:?}", slab.counters());
            std::thread::yield_now();
        }
        gate.open();
        first.recv_timeout(LONG).unwrap();
        let (lent, sent) = second.recv_timeout(LONG).unwrap();
        assert!(sent.bytes == 4096 && lent.bytes()[..4096] == disk.all[8192..8192 + 4096]);
        assert_eq!(slab.counters().misses, 1);
    }
}

#[test]
fn i9_a_slab_that_stops_drops_who_waits() {
    let disk = disk(2 << 20);
    let slab = Slab::start("test", 1 << 20, Reading::Auto).unwrap();
    let (held, _) = ask(&slab, disk.piece(1, 0, 1 << 20)).recv_timeout(LONG).unwrap();
    let waits = ask(&slab, disk.piece(1, 1 << 20, 1 << 20));
    slab.stop();
    // Not only unanswered: what waits is gone, and with it whatever it kept.
    assert_eq!(waits.recv_timeout(LONG).err(), Some(RecvTimeoutError::Disconnected));
    let later = ask(&slab, disk.piece(1, 0, 4096));
    assert_eq!(later.recv_timeout(LONG).err(), Some(RecvTimeoutError::Disconnected));
    assert_eq!(slab.counters().held, 1 << 20, "what is in use stays");
    drop(held);
}

#[test]
fn i9_a_read_that_the_kernel_does_not_take_at_once_is_tried_again_though_nobody_else_asks() {
    let name = "i9_a_read_that_the_kernel_does_not_take_at_once_is_tried_again_though_nobody_else_asks";
    let disk = disk(1 << 20);
    let refusing = || {
        Ring::new(RING_DEPTH).map(|mut ring| {
            ring.refuses = 20;
            ring
        })
    };
    let slab = Slab::start_with("test", 2 << 20, Reading::Auto, refusing).unwrap();
    if !slab.counters().io_uring {
        return skip(name, "no io_uring here");
    }
    let (lent, sent) = ask(&slab, disk.piece(1, 0, 4096)).recv_timeout(LONG).unwrap();
    assert!(sent.error.is_none() && sent.bytes == 4096, "{sent:?}");
    assert!(lent.bytes()[..4096] == disk.all[..4096]);
}

#[test]
fn where_io_uring_cannot_be_had_threads_read() {
    let disk = disk(1 << 20);
    let none = || Err(io::Error::from_raw_os_error(libc::EPERM));
    let slab = Slab::start_with("test", 2 << 20, Reading::Auto, none).unwrap();
    let (lent, sent) = ask(&slab, disk.piece(1, 0, 65536)).recv_timeout(LONG).unwrap();
    assert!(sent.error.is_none() && sent.bytes == 65536, "{sent:?}");
    assert!(lent.bytes()[..65536] == disk.all[..65536]);
    assert!(!slab.counters().io_uring);
    assert_eq!(slab.0.workers.len(), READ_THREADS);
}
