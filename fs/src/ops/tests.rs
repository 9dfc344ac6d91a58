//! The operations over a store in memory.

use super::*;
use crate::fake::Fake;
use std::sync::mpsc::{Receiver, channel};

struct Rig {
    fake: Arc<Fake>,
    fs: FileSystem,
    now: Arc<AtomicU64>,
}

fn rig_at(root: Option<&str>) -> Rig {
    let fake = Fake::new();
    let settings = Settings {
        namespace: Namespace::new("ns").unwrap(),
        root: root.map(|root| Key::new(root.as_bytes().to_vec()).unwrap()),
        owner: Owner::of(10, 20),
        entry_ttl: Duration::from_secs(1),
        metadata_ttl: Duration::from_secs(1),
        mounted_at: (77, 0),
        list_limit: railfs_proto::limits::METADATA_DEADLINE,
    };
    let now = Arc::new(AtomicU64::new(1));
    let clock = now.clone();
    let fs = FileSystem::new(fake.clone(), settings, Box::new(move || Time(clock.load(Ordering::Relaxed))));
    Rig { fake, fs, now }
}

fn rig() -> Rig {
    rig_at(None)
}

/// The answer of an operation: it is there when the operation returns, or never.
fn got<T: Send + 'static>(call: impl FnOnce(Box<dyn FnOnce(T) + Send>)) -> T {
    later(call).try_recv().expect("answered at once")
}

fn later<T: Send + 'static>(call: impl FnOnce(Box<dyn FnOnce(T) + Send>)) -> Receiver<T> {
    let (send, receive) = channel();
    call(Box::new(move |answer| {
        let _ = send.send(answer);
    }));
    receive
}

#[derive(Clone, Debug, PartialEq)]
struct Line {
    name: String,
    ino: u64,
    next: u64,
    kind: Kind,
    ttl: Option<Duration>,
}

struct Lines {
    room: usize,
    plus: bool,
    lines: Vec<Line>,
}

impl DirSink for Lines {
    fn plus(&self) -> bool {
        self.plus
    }
    fn is_full_for(&mut self, entry: &Emitted<'_>) -> bool {
        if self.lines.len() == self.room {
            return true;
        }
        self.lines.push(Line {
            name: String::from_utf8(entry.name.to_vec()).unwrap(),
            ino: entry.ino,
            next: entry.next,
            kind: entry.kind,
            ttl: entry.plus.map(|(attr, ttl)| {
                assert_eq!(attr.ino, entry.ino);
                ttl
            }),
        });
        false
    }
}

impl Rig {
    fn lookup(&self, parent: u64, name: &str) -> Result<Entry, Errno> {
        got(|reply| self.fs.lookup(parent, name.as_bytes(), reply))
    }
    fn walk(&self, path: &str) -> Result<Entry, Errno> {
        let mut parts = path.split('/');
        let mut entry = self.lookup(ROOT, parts.next().unwrap())?;
        for part in parts {
            entry = self.lookup(entry.attr.ino, part)?;
        }
        Ok(entry)
    }
    fn getattr(&self, ino: u64) -> Result<(Attr, Duration), Errno> {
        got(|reply| self.fs.getattr(ino, reply))
    }
    fn open(&self, ino: u64) -> Result<u64, Errno> {
        got(|reply| self.fs.open(ino, Access::Read, reply))
    }
    fn read(&self, handle: u64, offset: u64, size: u32) -> Result<Vec<u8>, Errno> {
        self.read_as(handle, offset, size, Purpose::Read)
    }
    fn read_as(&self, handle: u64, offset: u64, size: u32, purpose: Purpose) -> Result<Vec<u8>, Errno> {
        let (send, receive) = channel();
        self.fs.read(handle, offset, size, purpose, move |bytes| send.send(bytes.map(<[u8]>::to_vec)).unwrap());
        receive.try_recv().unwrap()
    }
    fn readdir(&self, handle: u64, offset: u64, room: usize, plus: bool) -> Result<Vec<Line>, Errno> {
        let sink = Lines { room, plus, lines: Vec::new() };
        let (send, receive) = channel();
        self.fs.readdir(handle, offset, sink, move |sink, result| send.send(result.map(|()| sink.lines)).unwrap());
        receive.try_recv().unwrap()
    }
    /// A whole pass, as the kernel makes it.
    fn list(&self, ino: u64, room: usize, plus: bool) -> Vec<Line> {
        let handle = got(|reply| self.fs.opendir(ino, reply)).unwrap();
        let mut all: Vec<Line> = Vec::new();
        loop {
            let offset = all.last().map_or(0, |line| line.next);
            let lines = self.readdir(handle, offset, room, plus).unwrap();
            if lines.is_empty() {
                self.fs.releasedir(handle);
                return all;
            }
            all.extend(lines);
        }
    }
    fn pass(&self, time: Duration) {
        self.now.fetch_add(u64::try_from(time.as_nanos()).unwrap(), Ordering::Relaxed);
    }
}

fn names(lines: &[Line]) -> Vec<&str> {
    lines.iter().map(|line| line.name.as_str()).collect()
}

fn gone() -> Error {
    Error::Unreachable { peer: "h:1".to_owned(), detail: "refused".to_owned() }
}

#[test]
fn lookups_of_files_directories_and_nothing() {
    let rig = rig();
    let version = rig.fake.put("d/f", b"hello");
    let entry = rig.walk("d/f").unwrap();
    assert_eq!((entry.attr.ino, entry.attr.size, entry.attr.kind), (version, 5, Kind::File));
    assert_eq!((entry.attr.uid, entry.attr.gid, entry.attr.perm, entry.attr.nlink), (10, 20, 0o644, 1));
    assert_eq!((entry.attr_ttl, entry.entry_ttl), (Duration::from_secs(1), Duration::from_secs(1)));
    let directory = rig.walk("d").unwrap();
    assert!(directory.attr.ino & DIRECTORY_BIT != 0);
    assert_eq!((directory.attr.kind, directory.attr.nlink, directory.attr.perm), (Kind::Directory, 1, 0o555));
    assert_eq!(rig.walk("nothing"), Err(Errno::NOENT));
    assert_eq!(rig.walk("d/f/x"), Err(Errno::NOTDIR));
    assert_eq!(rig.lookup(424_242, "x"), Err(Errno::STALE));
    assert_eq!(rig.walk(&"x".repeat(256)), Err(Errno::NAMETOOLONG));
    let deep = vec!["y".repeat(200); 21].join("/");
    rig.fake.put(&deep[..201 * 19 - 1], b"");
    let directory = rig.walk(&deep[..201 * 18 - 1]).unwrap().attr.ino;
    assert_eq!(rig.lookup(directory, &"z".repeat(255)), Err(Errno::NOENT));
    rig.fs.forget(directory, 1);
}

#[test]
fn a_key_in_the_url_shows_what_lies_below_it() {
    let rig = rig_at(Some("a/b"));
    let version = rig.fake.put("a/b/c", b"x");
    rig.fake.put("a/other", b"y");
    assert_eq!(rig.walk("c").unwrap().attr.ino, version);
    assert_eq!(names(&rig.list(ROOT, 9, false)), [".", "..", "c"]);
    assert!(rig.list(ROOT, 9, false)[..2].iter().all(|line| line.ino == ROOT));
    assert_eq!(rig.getattr(ROOT).unwrap().0.ino, ROOT);
}

#[test]
fn i1_reads_give_all_bytes_of_one_version_or_an_error() {
    let rig = rig();
    let bytes: Vec<u8> = (0..200_000u32).map(|i| (i % 251) as u8).collect();
    let version = rig.fake.put("f", &bytes);
    let handle = rig.open(rig.walk("f").unwrap().attr.ino).unwrap();
    assert_eq!(rig.read(handle, 0, 4096).unwrap(), bytes[..4096]);
    assert_eq!(rig.read(handle, 199_000, 1 << 20).unwrap(), bytes[199_000..]);
    assert_eq!(rig.read(handle, 200_000, 4096).unwrap(), b"");
    assert_eq!(rig.read(handle, u64::MAX, 4096).unwrap(), b"");
    rig.fake.put("f", b"new");
    assert_eq!(rig.read(handle, 0, 4096), Err(Errno::STALE));
    assert_eq!(rig.read(handle, 200_000, 4096), Err(Errno::STALE), "also beyond the end");
    assert_eq!(rig.read(handle + 1, 0, 1), Err(Errno::BADF));
    rig.fs.release(handle);
    assert_eq!(rig.fake.released(), [handle]);
    rig.fs.forget(version, 1);
    assert_eq!(rig.fs.activity(), Activity::default(), "quiet");
}

#[test]
fn i1_a_short_answer_never_reaches_the_kernel() {
    struct Short(Arc<Fake>);
    impl Backend for Short {
        fn lookup(&self, name: &ObjectName, done: railfs_engine::client::Done<Found>) {
            self.0.lookup(name, done);
        }
        fn list(&self, _: ListQuery, _: railfs_engine::client::Done<railfs_engine::client::Listing>) {}
        fn check(&self, object: &Arc<Object>, done: railfs_engine::client::Done<()>) {
            self.0.check(object, done);
        }
        fn read(
            &self,
            _: &Arc<Object>,
            _: u64,
            _: u64,
            length: u32,
            _: Freshness,
            reply: railfs_engine::client::ReadReply,
        ) {
            reply(Ok(&vec![0; length as usize - 1]));
        }
        fn pin(&self, _: &Arc<Object>, _: railfs_engine::client::Done<()>) {}
        fn unpin(&self, _: u64) {}
        fn keeps_pins(&self) -> bool {
            false
        }
        fn release(&self, _: u64) {}
        fn server_status(&self, _: railfs_engine::client::Done<railfs_proto::v1::StatusReply>) {}
        fn status(&self) -> railfs_engine::client::Status {
            railfs_engine::client::Status::default()
        }
        fn pulse(&self, _: railfs_engine::client::Done<()>) {}
        fn close(&self) {}
    }
    let whole = rig();
    whole.fake.put("f", &[1; 100]);
    let settings = whole.fs.0.settings.clone();
    let fs = FileSystem::new(Arc::new(Short(whole.fake.clone())), settings, Box::new(|| Time(0)));
    let entry = got(|reply| fs.lookup(ROOT, b"f", reply)).unwrap();
    let handle = got(|reply| fs.open(entry.attr.ino, Access::Read, reply)).unwrap();
    let (send, receive) = channel();
    fs.read(handle, 0, 50, Purpose::Read, move |bytes| send.send(bytes.map(<[u8]>::to_vec)).unwrap());
    assert_eq!(receive.try_recv().unwrap(), Err(Errno::IO));
}

#[path = "lie_tests.rs"]
mod lies;
#[path = "mode_tests.rs"]
mod modes;

#[test]
fn i3_open_and_getattr_check_the_version_every_time() {
    let rig = rig();
    let old = rig.fake.put("f", b"1");
    rig.walk("f").unwrap();
    let checks = rig.fake.calls("check");
    assert_eq!(rig.getattr(old).unwrap().1, Duration::from_secs(1));
    rig.open(old).unwrap();
    assert_eq!(rig.fake.calls("check"), checks + 2);
    let new = rig.fake.put("f", b"2");
    for _ in 0..2 {
        assert_eq!(rig.open(old), Err(Errno::STALE));
        assert_eq!(rig.getattr(old), Err(Errno::STALE));
    }
    assert_eq!(rig.walk("f").unwrap().attr.ino, new);
    rig.open(new).unwrap();
    rig.fake.remove("f");
    assert_eq!(rig.open(new), Err(Errno::STALE));
    assert_eq!(rig.open(999_999), Err(Errno::STALE));
    rig.fake.put("f/below", b"");
    let directory = rig.walk("f").unwrap().attr.ino;
    assert_eq!(rig.open(directory), Err(Errno::ISDIR));
    rig.fake.remove("f/below");
    assert_eq!(rig.getattr(directory), Err(Errno::STALE));
}

#[test]
fn i3_a_file_known_from_a_list_is_looked_up_before_it_opens() {
    let rig = rig();
    let old = rig.fake.put("f", b"1");
    rig.list(ROOT, 99, true);
    assert_eq!(rig.fake.calls("lookup"), 0);
    let handle = rig.open(old).unwrap();
    assert_eq!(rig.read(handle, 0, 9).unwrap(), b"1");
    rig.open(old).unwrap();
    assert_eq!((rig.fake.calls("lookup"), rig.fake.calls("check")), (1, 1), "the proof is kept");
    let rig = super::tests::rig();
    let old = rig.fake.put("f", b"1");
    rig.list(ROOT, 99, true);
    rig.fake.put("f", b"2");
    assert_eq!(rig.open(old), Err(Errno::STALE));
}

#[test]
fn opening_to_write_is_refused_without_asking() {
    let rig = rig();
    let ino = rig.fake.put("f", b"1");
    rig.walk("f").unwrap();
    assert_eq!(got(|reply| rig.fs.open(ino, Access::Write, reply)), Err(Errno::ROFS));
    assert_eq!(rig.fake.calls("check"), 0);
    assert_eq!(rig.fs.access(ino, Rights { write: true, execute: false }), Err(Errno::ROFS));
    assert_eq!(rig.fs.access(ino, Rights { write: false, execute: true }), Err(Errno::ACCESS));
    assert_eq!(rig.fs.access(ROOT, Rights { write: false, execute: true }), Ok(()));
    assert_eq!(rig.fs.access(ino, Rights::default()), Ok(()));
}

#[test]
fn directories_are_read_in_pieces_of_any_size() {
    let rig = rig();
    for n in 0..2500 {
        rig.fake.put(&format!("d/f{n:04}"), b"");
    }
    rig.fake.put("d/sub/x", b"");
    let d = rig.walk("d").unwrap().attr.ino;
    for (room, plus) in [(1, false), (7, true), (100, false), (5000, true)] {
        let lines = rig.list(d, room, plus);
        assert_eq!(lines.len(), 2503);
        assert_eq!(names(&lines[..3]), [".", "..", "f0000"]);
        assert_eq!((lines[0].ino, lines[1].ino), (d, ROOT));
        let sub = lines.last().unwrap();
        assert_eq!((sub.name.as_str(), sub.kind), ("sub", Kind::Directory));
        assert_eq!(sub.ino, rig.walk("d/sub").unwrap().attr.ino, "d_ino is st_ino");
        assert_eq!(lines[2].ino, rig.walk("d/f0000").unwrap().attr.ino);
    }
}

#[test]
fn a_buffer_that_was_taken_in_part_is_asked_for_again() {
    let rig = rig();
    for n in 0..1500 {
        rig.fake.put(&format!("f{n:04}"), b"");
    }
    let handle = got(|reply| rig.fs.opendir(ROOT, reply)).unwrap();
    let all = rig.readdir(handle, 0, 9999, false).unwrap();
    assert_eq!(all.len(), 1026, "one page and the dots");
    let rest = rig.readdir(handle, all[1025].next, 9999, false).unwrap();
    assert_eq!(rest.len(), 1500 - 1024);
    let back = rig.readdir(handle, all[9].next, 2, false).unwrap();
    assert_eq!(back, all[10..12]);
    let again = rig.readdir(handle, rest[99].next, 1, false).unwrap();
    assert_eq!(again, rest[100..101]);
    assert_eq!(rig.readdir(handle + 99, 0, 1, false), Err(Errno::BADF));
}

#[test]
fn readdirplus_counts_what_found_room_and_trusts_no_longer_than_the_list_is_old() {
    let rig = rig();
    let f = rig.fake.put("f", b"1");
    rig.fake.put("g/h", b"2");
    let handle = got(|reply| rig.fs.opendir(ROOT, reply)).unwrap();
    rig.pass(Duration::from_millis(400));
    let lines = rig.readdir(handle, 0, 3, true).unwrap();
    assert_eq!(names(&lines), [".", "..", "f"]);
    assert_eq!(lines[2].ttl, Some(Duration::from_millis(600)));
    assert_eq!(rig.fs.activity().inodes, 1, "the directory found no room");
    rig.pass(Duration::from_secs(9));
    let lines = rig.readdir(handle, 3, 9, true).unwrap();
    assert_eq!((lines[0].name.as_str(), lines[0].ttl), ("g", Some(Duration::ZERO)));
    rig.fs.forget(f, 1);
    rig.fs.forget(lines[0].ino, 1);
    rig.fs.releasedir(handle);
    assert_eq!(rig.fs.activity(), Activity::default());
}

#[test]
fn i3_a_list_formed_before_a_put_does_not_make_stat_go_back() {
    let rig = rig();
    let old = rig.fake.put("f", b"1");
    rig.walk("f").unwrap();
    rig.fake.hold();
    let opened = later(|reply| rig.fs.opendir(ROOT, reply));
    let new = rig.fake.put("f", b"2");
    let found = later(|reply| rig.fs.lookup(ROOT, b"f", reply));
    rig.fake.let_go();
    assert_eq!(found.try_recv().unwrap().unwrap().attr.ino, new);
    let lines = rig.readdir(opened.try_recv().unwrap().unwrap(), 0, 9, true).unwrap();
    assert_eq!((lines[2].ino, lines[2].ttl), (old, Some(Duration::ZERO)), "no trust in what is known to be old");
}

#[test]
fn a_namespace_nobody_wrote_to_is_an_empty_directory() {
    let rig = rig();
    assert_eq!(names(&rig.list(ROOT, 9, true)), [".", ".."]);
    let (attr, _) = rig.getattr(ROOT).unwrap();
    assert_eq!((attr.kind, attr.mtime_seconds), (Kind::Directory, 77));
    assert_eq!(rig.walk("x"), Err(Errno::NOENT));
}

#[test]
fn a_directory_that_is_gone_cannot_be_opened() {
    let rig = rig();
    rig.fake.put("d/f", b"");
    let d = rig.walk("d").unwrap().attr.ino;
    rig.fake.remove("d/f");
    assert_eq!(got(|reply| rig.fs.opendir(d, reply)), Err(Errno::STALE));
    rig.fake.put("e", b"");
    let e = rig.walk("e").unwrap().attr.ino;
    assert_eq!(got(|reply| rig.fs.opendir(e, reply)), Err(Errno::NOTDIR));
}

#[test]
fn i9_root_and_space_answer_when_the_server_is_gone() {
    let rig = rig();
    rig.fake.put("f", b"1");
    let space: Space = got(|reply| rig.fs.statfs(reply));
    assert_eq!((space.blocks, space.available, space.files), ((2 << 30) / 4096, (2 << 29) / 4096, 1));
    let (attr, _) = rig.getattr(ROOT).unwrap();
    assert_eq!(attr.mtime_seconds, 1001);
    rig.fake.fail(Some(gone()));
    rig.pass(Duration::from_secs(60));
    assert_eq!(got(|reply: Box<dyn FnOnce(Space) + Send>| rig.fs.statfs(reply)), space);
    assert_eq!(rig.getattr(ROOT).unwrap().0, attr);
    assert_eq!(rig.walk("f"), Err(Errno::TIMEDOUT));
    assert_eq!(got(|reply| rig.fs.opendir(ROOT, reply)), Err(Errno::TIMEDOUT));
    assert_eq!(rig.fs.activity().in_flight, 0);
}

#[test]
fn space_is_asked_once_a_second_and_once_at_a_time() {
    let rig = rig();
    rig.fake.put("f", b"1");
    rig.fake.hold();
    let answers: Vec<Receiver<Space>> = (0..3).map(|_| later(|reply| rig.fs.statfs(reply))).collect();
    assert_eq!(rig.fs.activity().in_flight, 3);
    rig.fake.let_go();
    for answer in answers {
        assert_eq!(answer.try_recv().unwrap().files, 1);
    }
    rig.pass(Duration::from_millis(900));
    got::<Space>(|reply| rig.fs.statfs(reply));
    assert_eq!(rig.fake.calls("status"), 1);
    rig.pass(Duration::from_millis(200));
    rig.fake.hold();
    let waiting = later::<Space>(|reply| rig.fs.statfs(reply));
    assert_eq!(got::<Space>(|reply| rig.fs.statfs(reply)).files, 1, "the last known, while another asks");
    rig.fake.let_go();
    assert_eq!(waiting.try_recv().unwrap().files, 1);
    assert_eq!(rig.fake.calls("status"), 2);
}

#[test]
fn seeking_finds_no_holes() {
    let rig = rig();
    let ino = rig.fake.put("f", &[0; 100]);
    rig.walk("f").unwrap();
    let handle = rig.open(ino).unwrap();
    assert_eq!(rig.fs.seek(handle, 7, Seek::Data), Ok(7));
    assert_eq!(rig.fs.seek(handle, 7, Seek::Hole), Ok(100));
    for bad in [-1, 100, i64::MAX] {
        assert_eq!(rig.fs.seek(handle, bad, Seek::Data), Err(Errno::NXIO));
        assert_eq!(rig.fs.seek(handle, bad, Seek::Hole), Err(Errno::NXIO));
    }
    assert_eq!(rig.fs.seek(99, 0, Seek::Data), Err(Errno::BADF));
}

#[test]
fn extended_attributes_are_of_the_inode_and_foreign_names_ask_nobody() {
    let rig = rig();
    let version = rig.fake.put("f", &[1; 100_000]);
    rig.fake.put("d/g", b"x");
    let file = rig.lookup(ROOT, "f").unwrap().attr.ino;
    let directory = rig.lookup(ROOT, "d").unwrap().attr.ino;
    let value = |ino, name: &str, room| {
        let answer: Result<Xattr, Errno> = got(|reply| rig.fs.getxattr(ino, name.as_bytes(), room, reply));
        answer.map(|value| match value {
            Xattr::Size(size) => size.to_string(),
            Xattr::Bytes(bytes) => String::from_utf8(bytes).unwrap(),
        })
    };
    assert_eq!(value(file, "user.railfs.version", 100), Ok(version.to_string()));
    assert_eq!(value(file, "user.railfs.version", 0), Ok("4".to_owned()));
    assert_eq!(value(file, "user.railfs.version", 3), Err(Errno::RANGE));
    assert_eq!(value(file, "user.railfs.stripes", 100), Ok("count=2 size=65536 page=4096 width=1".to_owned()));
    let asked = || [rig.fake.calls("lookup"), rig.fake.calls("check"), rig.fake.calls("list")];
    let before = asked();
    assert_eq!(value(file, "security.selinux", 100), Err(Errno::OPNOTSUPP));
    assert_eq!(value(file, "system.posix_acl_access", 0), Err(Errno::OPNOTSUPP));
    assert_eq!(value(file, "user.mine", 100), Err(Errno::NODATA));
    assert_eq!(value(directory, "user.railfs.version", 100), Err(Errno::NODATA));
    assert_eq!(rig.fs.listxattr(directory, 100), Ok(Xattr::Bytes(vec![])));
    assert_eq!(asked(), before, "none of these asks the store");
    assert_eq!(value(424_242, "user.railfs.version", 100), Err(Errno::STALE));
    // One that is known from a list only is looked up for its layout.
    let listed = rig.list(directory, 100, true).into_iter().find(|line| line.name == "g").unwrap().ino;
    assert_eq!(value(listed, "user.railfs.stripes", 100), Ok("count=1 size=65536 page=4096 width=1".to_owned()));
    rig.fake.put("d/g", b"y");
    let listed = rig.list(directory, 100, true).into_iter().find(|line| line.name == "g").unwrap().ino;
    rig.fake.fail(Some(gone()));
    assert_eq!(value(listed, "user.railfs.components", 100), Err(Errno::TIMEDOUT));
    assert_eq!(value(listed, "user.railfs.version", 100), Ok(listed.to_string()));
}
