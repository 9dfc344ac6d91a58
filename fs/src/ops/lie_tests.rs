//! Servers that lie in what they list and look up.

use super::*;
use railfs_engine::client::{Done, ListEntry, Listing, ReadReply};
use railfs_proto::descriptor::{Attributes, Descriptor, Proof};
use railfs_proto::layout::Striping;

type Lists = Box<dyn Fn(&ListQuery) -> Listing + Send + Sync>;

/// Lists what it is told to; looks nothing up but `known`.
struct Lying {
    lists: Lists,
    known: Option<u64>,
}

fn descriptor(version: u64) -> Descriptor {
    Descriptor {
        version,
        attributes: Attributes { mode: 0o644, mtime_seconds: 0, mtime_nanoseconds: 0, owner: None },
        striping: Striping::new(0, 4096, 65536, 1).unwrap(),
        components: Vec::new(),
    }
}

fn entry(key: impl Into<Vec<u8>>, version: u64) -> ListEntry {
    ListEntry { key: key.into(), object: Some(descriptor(version)) }
}

impl Backend for Lying {
    fn lookup(&self, name: &ObjectName, done: Done<Found>) {
        let object = |version| {
            Found::Object(Arc::new(Object::new(
                name.clone(),
                descriptor(version),
                Proof { node: "n".to_owned(), incarnation: 1, slot: 0, value: 0, name_tag: 0 },
            )))
        };
        done(Ok(self.known.map_or(Found::Absent, object)));
    }
    fn list(&self, query: ListQuery, done: Done<Listing>) {
        done(Ok((self.lists)(&query)));
    }
    fn check(&self, _: &Arc<Object>, done: Done<()>) {
        done(Ok(()));
    }
    fn read(&self, _: &Arc<Object>, _: u64, _: u64, _: u32, _: Freshness, _: ReadReply) {}
    fn pin(&self, _: &Arc<Object>, done: Done<()>) {
        done(Ok(()));
    }
    fn unpin(&self, _: u64) {}
    fn keeps_pins(&self) -> bool {
        false
    }
    fn release(&self, _: u64) {}
    fn server_status(&self, _: Done<railfs_proto::v1::StatusReply>) {}
    fn status(&self) -> railfs_engine::client::Status {
        railfs_engine::client::Status::default()
    }
    fn pulse(&self, _: Done<()>) {}
    fn close(&self) {}
}

fn over(lying: Lying, now: &Arc<AtomicU64>) -> Rig {
    let settings = rig().fs.0.settings.clone();
    let clock = now.clone();
    let fs = FileSystem::new(Arc::new(lying), settings, Box::new(move || Time(clock.load(Ordering::Relaxed))));
    Rig { fake: Fake::new(), fs, now: now.clone() }
}

#[test]
fn i9_a_readdir_over_pages_that_never_end_ends_at_its_limit() {
    let (now, asked) = (Arc::new(AtomicU64::new(1)), Arc::new(AtomicU64::new(0)));
    let (clock, count) = (now.clone(), asked.clone());
    let lists = move |query: &ListQuery| {
        let number = count.fetch_add(1, Ordering::Relaxed);
        let left = query.within.unwrap();
        assert!(left <= railfs_proto::limits::METADATA_DEADLINE && !left.is_zero(), "{left:?}");
        assert!(number < 1000, "it never ends");
        clock.fetch_add(100_000_000, Ordering::Relaxed);
        let key = format!("{number:08}").into_bytes();
        Listing { entries: vec![entry(key.clone(), 5000 + number)], next: Some(key), mtime: (0, 0) }
    };
    let rig = over(Lying { lists: Box::new(lists), known: None }, &now);
    let handle = got(|reply| rig.fs.opendir(ROOT, reply)).unwrap();
    // What a reader gets that seeks far beyond the end.
    assert_eq!(rig.readdir(handle, 1 << 40, 9, false), Err(Errno::TIMEDOUT));
    assert_eq!(asked.load(Ordering::Relaxed), 1 + 50, "one limit for all of them");
    assert!(rig.readdir(handle, 0, 9, false).is_ok(), "the next one begins anew");
}

#[test]
fn i1_a_listed_version_that_is_known_under_another_name_is_an_error_and_no_inode_leaks() {
    let now = Arc::new(AtomicU64::new(1));
    let lists = |_: &ListQuery| Listing {
        entries: vec![entry("a", 5000), entry("b", 5001), entry("c", 5002)],
        next: None,
        mtime: (0, 0),
    };
    let rig = over(Lying { lists: Box::new(lists), known: Some(5001) }, &now);
    // Under this name: and so never under "b".
    let known = rig.lookup(ROOT, "known").unwrap();
    assert_eq!(rig.lookup(ROOT, "again"), Err(Errno::IO), "the same version under a second name");
    let handle = got(|reply| rig.fs.opendir(ROOT, reply)).unwrap();
    let first = rig.readdir(handle, 0, 9, true).unwrap();
    assert_eq!(names(&first), [".", "..", "a"], "what was given is told, and it ends there");
    assert_eq!(rig.readdir(handle, 3, 9, true), Err(Errno::IO));
    rig.fs.forget(5000, 1);
    rig.fs.forget(known.attr.ino, 1);
    rig.fs.releasedir(handle);
    assert_eq!(rig.fs.activity(), Activity::default(), "quiet");
}
