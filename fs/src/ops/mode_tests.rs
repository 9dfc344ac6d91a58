//! Fills, pins and snapshots over a store in memory.

use super::*;

fn agree(rig: &Rig, mode: Mode, io: Io) {
    rig.fs.agree(choose(mode, io, Kernel { direct_mmap: true, auto_inval: true }));
}

fn fill(rig: &Rig, handle: u64) -> Result<Vec<u8>, Errno> {
    rig.read_as(handle, 0, 4096, Purpose::Fill)
}

#[test]
fn i3_a_fill_is_of_its_version_and_a_read_of_the_same_handle_is_checked() {
    for io in [Io::Direct, Io::Cached] {
        let rig = rig();
        agree(&rig, Mode::Strict, io);
        let old = rig.fake.put("f", b"old");
        rig.walk("f").unwrap();
        let (first, second) = (rig.open(old).unwrap(), rig.open(old).unwrap());
        assert_eq!(rig.fake.pins(), [], "an open alone pins nothing");
        assert_eq!(fill(&rig, first).unwrap(), b"old");
        assert_eq!(rig.fake.pins(), [(old, 1)]);
        rig.fake.put("f", b"newer");
        rig.fake.reclaim();
        assert_eq!(fill(&rig, second).unwrap(), b"old");
        assert_eq!(rig.read_as(second, 3, 9, Purpose::Fill).unwrap(), b"", "the end of the version needs no check");
        assert_eq!(rig.read(second, 0, 9), Err(Errno::STALE));
        assert_eq!(rig.getattr(old), Err(Errno::STALE));
        rig.fs.release(first);
        assert_eq!((rig.fake.pins(), rig.fs.activity().filled_versions), (vec![(old, 1)], 1), "until the last handle");
        rig.fake.reclaim();
        assert_eq!(fill(&rig, second).unwrap(), b"old");
        rig.fs.release(second);
        assert_eq!(rig.fake.pins(), []);
        rig.fs.forget(old, 1);
        assert_eq!(rig.fs.activity(), Activity::default());
    }
}

#[test]
fn a_fill_that_cannot_be_pinned_is_answered_while_the_version_is_there() {
    let rig = rig();
    let old = rig.fake.put("f", b"old");
    rig.walk("f").unwrap();
    let handle = rig.open(old).unwrap();
    rig.fake.refuse_pins();
    assert_eq!(fill(&rig, handle).unwrap(), b"old");
    rig.fake.put("f", b"newer");
    assert_eq!(fill(&rig, handle).unwrap(), b"old");
    rig.fs.release(handle);
    assert_eq!(rig.fake.pins(), []);
}

#[test]
fn a_snapshot_is_what_was_opened_until_it_is_closed() {
    for io in [Io::Auto, Io::Direct] {
        let rig = rig();
        agree(&rig, Mode::Snapshot, io);
        let old = rig.fake.put("f", b"old");
        rig.walk("f").unwrap();
        let handle = rig.open(old).unwrap();
        assert_eq!(rig.fake.pins(), [(old, 1)], "pinned when the open is answered");
        rig.fake.put("f", b"newer");
        rig.fake.reclaim();
        for purpose in [Purpose::Read, Purpose::Fill] {
            assert_eq!(rig.read_as(handle, 0, 9, purpose).unwrap(), b"old");
        }
        assert_eq!(rig.getattr(old).unwrap().0.size, 3, "fstat of what is open");
        assert_eq!(rig.open(old), Err(Errno::STALE), "a new open is of the current version");
        assert_eq!(rig.fake.pins(), [(old, 1)]);
        rig.fs.release(handle);
        assert_eq!((rig.fake.pins(), rig.getattr(old)), (vec![], Err(Errno::STALE)));
        rig.fake.reclaim();
        assert_eq!(rig.fs.activity().open_files, 0);
    }
}

#[test]
fn a_snapshot_that_cannot_be_pinned_is_not_opened() {
    let rig = rig();
    agree(&rig, Mode::Snapshot, Io::Auto);
    let ino = rig.fake.put("f", b"old");
    rig.walk("f").unwrap();
    rig.fake.refuse_pins();
    assert_eq!(rig.open(ino), Err(Errno::NOMEM));
    assert_eq!((rig.fake.pins(), rig.fs.activity().open_files), (vec![], 0));
}

#[test]
fn i3_cached_strict_lets_the_kernel_trust_no_attributes() {
    let rig = rig();
    agree(&rig, Mode::Strict, Io::Cached);
    let ino = rig.fake.put("f", b"1");
    let entry = rig.walk("f").unwrap();
    assert_eq!((entry.attr_ttl, entry.entry_ttl), (Duration::ZERO, Duration::from_secs(1)));
    assert_eq!(rig.getattr(ino).unwrap().1, Duration::ZERO);
    assert!(rig.list(ROOT, 9, true).iter().all(|line| line.ttl == Some(Duration::ZERO)));
}
