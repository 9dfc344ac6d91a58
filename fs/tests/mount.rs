//! Real mounts over a store in memory: what programs see, and the life of a mount.

#[path = "common/fake.rs"]
mod fake;
use railfs::backend as railfs_backend;

use fake::Fake;
use railfs::mount::options::Options;
use railfs::mount::{daemon, kernel, session};
use railfs::ops::{Activity, FileSystem, Owner, Settings};
use railfs_engine::client::Config;
use railfs_engine::clock::Clock;
use railfs_proto::name::Namespace;
use railfs_proto::url::Url;
use rustix::io::Errno;
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirEntryExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Makes this program the daemon of a mount; its value is the mount point.
const DAEMON: &str = "RAILFS_TEST_DAEMON";
/// Of this processor: they do not agree on it.
const O_DIRECT: i32 = rustix::fs::OFlags::DIRECT.bits().cast_signed();

/// True, and the reason noted, where this machine cannot mount.
fn skipped(test: &str) -> bool {
    let reason = if !Path::new("/dev/fuse").exists() {
        "there is no /dev/fuse"
    } else if !rustix::process::geteuid().is_root() && Command::new("fusermount3").arg("-V").output().is_err() {
        "not root, and fusermount3 is missing"
    } else {
        return false;
    };
    let line = format!("SKIPPED mount::{test}: {reason}\n");
    eprint!("{line}");
    if let Some(log) = std::env::var_os("RAILFS_SKIP_LOG") {
        OpenOptions::new().create(true).append(true).open(log).unwrap().write_all(line.as_bytes()).unwrap();
    }
    true
}

/// Waits for a condition, at most 20 s.
fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn code(error: &std::io::Error) -> Option<Errno> {
    Errno::from_io_error(error)
}

fn pattern(size: usize) -> Vec<u8> {
    (0..size).map(|i| (i / 4096 * 7 + i % 251) as u8).collect()
}

// -- a mount inside this process --

struct Mounted {
    point: tempfile::TempDir,
    mount: kernel::Mount,
    fs: FileSystem,
    fake: Arc<Fake>,
    ended: Receiver<std::io::Result<()>>,
}

impl Mounted {
    fn new() -> Mounted {
        let point = tempfile::tempdir().unwrap();
        let options = Options { threads: 2, ..Options::default() };
        let (connection, mount) = kernel::mount("railfs://h/ns,x/", point.path(), &options).unwrap();
        let fake = Fake::threaded();
        let clock = Clock::start();
        let settings = Settings {
            namespace: Namespace::new("ns").unwrap(),
            root: None,
            owner: Owner::of(rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw()),
            entry_ttl: Duration::from_secs(1),
            metadata_ttl: Duration::from_secs(1),
            mounted_at: (0, 0),
            list_limit: railfs_proto::limits::METADATA_DEADLINE,
        };
        let fs = FileSystem::new(fake.clone(), settings, Box::new(move || clock.now()));
        let (send, ended) = channel();
        let end = move |result| {
            let _ = send.send(result);
        };
        session::start(fs.clone(), connection, &options, end).unwrap();
        Mounted { point, mount, fs, fake, ended }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.point.path().join(name)
    }

    /// Unmounts, and demands that nothing is open or under way.
    fn quiet(mut self) {
        until("everything is closed", || {
            let activity = self.fs.activity();
            Activity { inodes: 0, ..activity } == Activity::default()
        });
        kernel::unmount(self.point.path(), false).unwrap();
        self.mount.is_gone();
        self.ended.recv_timeout(Duration::from_secs(20)).unwrap().unwrap();
    }
}

#[test]
fn i1_programs_read_what_was_put() {
    if skipped("i1_programs_read_what_was_put") {
        return;
    }
    let mounted = Mounted::new();
    let big = pattern(3 * (1 << 20) + 777);
    mounted.fake.put("d/big", &big);
    mounted.fake.put("d/empty", b"");
    mounted.fake.put("small", b"hello\n");
    assert_eq!(std::fs::read(mounted.at("d/big")).unwrap(), big);
    assert_eq!(std::fs::read(mounted.at("d/empty")).unwrap(), b"");
    let cat = Command::new("cat").arg(mounted.at("small")).arg(mounted.at("small")).output().unwrap();
    assert_eq!(cat.stdout, b"hello\nhello\n");
    let mut file = File::open(mounted.at("d/big")).unwrap();
    for (offset, length) in [(1, 5000), (1 << 20, 1 << 20), (4095, 2 << 20), (big.len() - 10, 10)] {
        let mut buffer = vec![0; length];
        file.read_exact_at(&mut buffer, offset as u64).unwrap();
        assert!(buffer == big[offset..offset + length], "{length} bytes at {offset}");
    }
    let mut rest = [0; 100];
    assert_eq!(file.read_at(&mut rest, big.len() as u64 - 10).unwrap(), 10);
    assert_eq!(file.read_at(&mut rest, big.len() as u64).unwrap(), 0);
    assert_eq!(file.seek(SeekFrom::End(0)).unwrap(), big.len() as u64);
    assert_eq!(rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(5)).unwrap(), big.len() as u64);
    assert_eq!(rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(5)).unwrap(), 5);
    let direct = OpenOptions::new().read(true).custom_flags(O_DIRECT).open(mounted.at("d/big")).unwrap();
    let mut buffer = vec![0; (1 << 20) + 4096];
    let start = buffer.as_ptr().align_offset(4096);
    direct.read_exact_at(&mut buffer[start..start + (1 << 20)], 1 << 20).unwrap();
    assert!(buffer[start..start + (1 << 20)] == big[1 << 20..2 << 20]);
    drop((file, direct));
    mounted.quiet();
}

#[test]
fn directories_and_attributes() {
    if skipped("directories_and_attributes") {
        return;
    }
    let mounted = Mounted::new();
    assert_eq!(std::fs::read_dir(mounted.point.path()).unwrap().count(), 0, "nobody wrote to it yet");
    let version = mounted.fake.put("d/a", &[1; 1000]);
    for n in 0..3000 {
        mounted.fake.put(&format!("many/{n:05}"), b"");
    }
    let names = |path: &str| {
        let mut names: Vec<String> = std::fs::read_dir(mounted.at(path))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    assert_eq!(names(""), ["d", "many"]);
    assert_eq!(names("many"), (0..3000).map(|n| format!("{n:05}")).collect::<Vec<_>>());
    for entry in std::fs::read_dir(mounted.point.path()).unwrap().chain(std::fs::read_dir(mounted.at("d")).unwrap()) {
        let entry = entry.unwrap();
        assert_eq!(rustix::fs::lstat(entry.path()).unwrap().st_ino, std::os::unix::fs::DirEntryExt::ino(&entry));
    }
    let metadata = std::fs::metadata(mounted.at("d/a")).unwrap();
    assert_eq!((metadata.ino(), metadata.size(), metadata.blocks(), metadata.nlink()), (version, 1000, 2, 1));
    assert_eq!((metadata.mode() & 0o7777, metadata.blksize()), (0o644, 4096));
    let directory = std::fs::metadata(mounted.at("d")).unwrap();
    assert_eq!((directory.nlink(), directory.mode() & 0o7777), (1, 0o555));
    assert_eq!(std::fs::metadata(mounted.point.path()).unwrap().ino(), 1);
    assert_eq!(code(&std::fs::metadata(mounted.at("none")).unwrap_err()), Some(Errno::NOENT));
    assert_eq!(code(&std::fs::metadata(mounted.at(&"x".repeat(256))).unwrap_err()), Some(Errno::NAMETOOLONG));
    assert_eq!(code(&std::fs::read_dir(mounted.at("d/a")).unwrap_err()), Some(Errno::NOTDIR));
    let space = rustix::fs::statvfs(mounted.point.path()).unwrap();
    assert_eq!((space.f_blocks * space.f_frsize, space.f_namemax), (2 << 30, 255));
    let mut room = [0u8; 100];
    let names = b"user.railfs.version\0user.railfs.stripes\0user.railfs.components\0";
    assert_eq!(rustix::fs::listxattr(mounted.at("d/a"), &mut room[..20]), Err(Errno::RANGE));
    assert_eq!(rustix::fs::listxattr(mounted.at("d/a"), &mut room[..]), Ok(names.len()));
    assert_eq!(&room[..names.len()], names);
    assert_eq!(rustix::fs::listxattr(mounted.at("d"), &mut room[..]), Ok(0));
    let value = |name: &str| {
        let mut room = [0u8; 100];
        rustix::fs::getxattr(mounted.at("d/a"), name, &mut room[..]).map(|length| room[..length].to_vec())
    };
    assert_eq!(value("user.railfs.version"), Ok(version.to_string().into_bytes()));
    assert_eq!(value("user.railfs.stripes"), Ok(b"count=1 size=65536 page=4096 width=1".to_vec()));
    assert_eq!((value("user.x"), value("security.x")), (Err(Errno::NODATA), Err(Errno::OPNOTSUPP)));
    rustix::fs::access(mounted.at("d/a"), rustix::fs::Access::READ_OK).unwrap();
    assert_eq!(rustix::fs::access(mounted.at("d/a"), rustix::fs::Access::WRITE_OK), Err(Errno::ROFS));
    assert_eq!(rustix::fs::access(mounted.at("d/a"), rustix::fs::Access::EXEC_OK), Err(Errno::ACCESS));
    mounted.quiet();
}

#[test]
fn i3_a_replaced_file_is_stale_and_a_new_open_gets_the_newest() {
    if skipped("i3_a_replaced_file_is_stale_and_a_new_open_gets_the_newest") {
        return;
    }
    let mounted = Mounted::new();
    mounted.fake.put("f", b"one");
    let file = File::open(mounted.at("f")).unwrap();
    let mut buffer = [0; 3];
    file.read_exact_at(&mut buffer, 0).unwrap();
    for (round, bytes) in [&b"two"[..], b"three", b"4"].iter().enumerate() {
        let version = mounted.fake.put("f", bytes);
        assert_eq!(code(&file.read_at(&mut buffer, 0).unwrap_err()), Some(Errno::STALE), "round {round}");
        assert_eq!(std::fs::read(mounted.at("f")).unwrap(), *bytes, "within the name's second");
        assert_eq!(std::fs::metadata(mounted.at("f")).unwrap().ino(), version);
    }
    mounted.fake.remove("f");
    assert_eq!(code(&File::open(mounted.at("f")).unwrap_err()), Some(Errno::NOENT));
    drop(file);
    mounted.quiet();
}

#[test]
fn a_shared_mapping_works() {
    if skipped("a_shared_mapping_works") {
        return;
    }
    let mounted = Mounted::new();
    let bytes = pattern(600_000);
    mounted.fake.put("f", &bytes);
    std::fs::write(mounted.point.path().with_extension("want"), &bytes).unwrap();
    let want = mounted.point.path().with_extension("want");
    let program = "import mmap,sys\n\
        f=open(sys.argv[1],'rb'); m=mmap.mmap(f.fileno(),0,mmap.MAP_SHARED,mmap.PROT_READ)\n\
        sys.exit(m[:]!=open(sys.argv[2],'rb').read())";
    let output = Command::new("python3").arg("-c").arg(program).arg(mounted.at("f")).arg(&want).output().unwrap();
    std::fs::remove_file(want).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    mounted.quiet();
}

#[test]
fn i3_a_list_that_was_formed_before_a_put_and_comes_after_it_does_not_make_stat_go_back() {
    if skipped("i3_a_list_that_was_formed_before_a_put_and_comes_after_it_does_not_make_stat_go_back") {
        return;
    }
    let mounted = Mounted::new();
    let old = mounted.fake.put("d/f", b"old");
    let ino = || std::fs::metadata(mounted.at("d/f")).unwrap().ino();
    assert_eq!(ino(), old);
    mounted.fake.hold_only("list");
    let lists = mounted.fake.calls("list");
    std::thread::scope(|scope| {
        let directory = mounted.at("d");
        let listed =
            scope.spawn(move || std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().ino()).collect());
        until("the list is formed", || mounted.fake.calls("list") > lists);
        let new = mounted.fake.put("d/f", b"newer");
        until("stat gives the new version", || ino() == new);
        mounted.fake.let_go();
        let listed: Vec<u64> = listed.join().unwrap();
        assert_eq!((listed, ino()), (vec![old], new), "the list is as it was, and nobody is misled by it");
        assert_eq!(std::fs::read(mounted.at("d/f")).unwrap(), b"newer");
    });
    mounted.quiet();
}

#[test]
fn one_replace_within_an_open_is_not_seen_and_two_are_estale() {
    if skipped("one_replace_within_an_open_is_not_seen_and_two_are_estale") {
        return;
    }
    let mounted = Mounted::new();
    mounted.fake.put("f", b"old");
    mounted.fake.overtake(1);
    assert_eq!(std::fs::read(mounted.at("f")).unwrap(), b"once more");
    mounted.fake.overtake(2);
    assert_eq!(code(&File::open(mounted.at("f")).unwrap_err()), Some(Errno::STALE));
    assert_eq!(std::fs::read(mounted.at("f")).unwrap(), b"once more");
    mounted.quiet();
}

#[test]
fn everything_that_would_change_something_is_refused() {
    if skipped("everything_that_would_change_something_is_refused") {
        return;
    }
    let mounted = Mounted::new();
    mounted.fake.put("f", b"x");
    mounted.fake.put("d/g", b"x");
    let (f, d, new) = (mounted.at("f"), mounted.at("d"), mounted.at("new"));
    let file = File::open(&f).unwrap();
    let results: Vec<(&str, std::io::Result<()>)> = vec![
        ("create", File::create(&new).map(drop)),
        ("open to write", OpenOptions::new().write(true).open(&f).map(drop)),
        ("open to append", OpenOptions::new().append(true).open(&f).map(drop)),
        ("truncate", OpenOptions::new().write(true).truncate(true).open(&f).map(drop)),
        ("mkdir", std::fs::create_dir(&new)),
        ("unlink", std::fs::remove_file(&f)),
        ("rmdir", std::fs::remove_dir(&d)),
        ("rename", std::fs::rename(&f, &new)),
        ("symlink", std::os::unix::fs::symlink("x", &new)),
        ("link", std::fs::hard_link(&f, &new)),
        ("chmod", std::fs::set_permissions(&f, PermissionsExt::from_mode(0o777))),
        ("fchmod", file.set_permissions(PermissionsExt::from_mode(0o777))),
        ("chown", std::os::unix::fs::chown(&f, Some(1), None)),
        ("utimes", file.set_modified(std::time::SystemTime::UNIX_EPOCH)),
        (
            "mknod",
            rustix::fs::mknodat(rustix::fs::CWD, &new, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)
                .map_err(Into::into),
        ),
        ("setxattr", rustix::fs::setxattr(&f, "user.x", b"1", rustix::fs::XattrFlags::empty()).map_err(Into::into)),
        ("removexattr", rustix::fs::removexattr(&f, "user.x").map_err(Into::into)),
    ];
    for (what, result) in results {
        assert_eq!(code(&result.unwrap_err()), Some(Errno::ROFS), "{what}");
    }
    assert_eq!(std::fs::read(&f).unwrap(), b"x");
    assert_eq!(code(&rustix::fs::readlink(&f, Vec::new()).unwrap_err().into()), Some(Errno::INVAL));
    // Locks are the kernel's own.
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockShared).unwrap();
    drop(file);
    mounted.quiet();
}

#[test]
fn a_busy_mount_is_not_taken_away() {
    if skipped("a_busy_mount_is_not_taken_away") {
        return;
    }
    let mounted = Mounted::new();
    mounted.fake.put("f", b"hello");
    let mut file = File::open(mounted.at("f")).unwrap();
    assert!(matches!(kernel::unmount(mounted.point.path(), false), Err(kernel::UnmountError::Busy)));
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "hello");
    drop(file);
    mounted.quiet();
}

// -- a mount in a process of its own --

/// A server that is always there.
struct Here(Arc<Fake>);

impl railfs::mount::reach::Reach for Here {
    fn probe(&self, _: &str, _: Duration) -> Result<(), railfs_engine::error::Error> {
        Ok(())
    }
    fn connect(&self, _: Config) -> Result<Arc<dyn railfs::backend::Backend>, railfs_engine::error::Error> {
        Ok(self.0.clone())
    }
}

/// Not a test: the daemon that the tests below start.
#[test]
#[ignore = "started by other tests"]
fn serve() {
    let Some(point) = std::env::var_os(DAEMON) else { return };
    let fake = Fake::threaded();
    fake.put("f", &pattern(100_000));
    fake.put("hang", b"never");
    let options = std::env::var("RAILFS_TEST_OPTIONS").unwrap_or_default();
    let lists: Vec<String> = options.split(' ').filter(|list| !list.is_empty()).map(str::to_owned).collect();
    let url = std::env::var("RAILFS_TEST_URL").unwrap_or("railfs://h/ns".to_owned());
    let job = daemon::Job {
        url: Url::parse(&url).unwrap(),
        point: railfs::mount::place::resolve(Path::new(&point)).unwrap(),
        options: Options::parse(&lists).unwrap(),
        log: None,
        log_file: None,
        terminal: std::env::var_os("RAILFS_TEST_TERMINAL").is_some(),
        manager: railfs::mount::manager::Manager::default(),
    };
    let result = daemon::run(&job, Here(fake), || eprintln!("READY"));
    if let Err(failure) = &result {
        eprintln!("FAILED {}", failure.message);
    }
    std::process::exit(result.map_or_else(|failure| i32::from(failure.code) + 100, |()| 0));
}

struct Place {
    base: tempfile::TempDir,
}

struct Daemon {
    child: Child,
    stderr: BufReader<std::process::ChildStderr>,
}

impl Place {
    fn new() -> Place {
        let base = tempfile::tempdir().unwrap();
        std::fs::create_dir(base.path().join("m")).unwrap();
        // For its user alone, as the daemon demands.
        let run = base.path().join("run");
        std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(run).unwrap();
        Place { base }
    }
    fn point(&self) -> PathBuf {
        self.base.path().canonicalize().unwrap().join("m")
    }
    fn run_directory(&self) -> PathBuf {
        self.base.path().join("run")
    }
    fn start(&self, variables: &[(&str, &str)]) -> Daemon {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["serve", "--exact", "--ignored", "--nocapture"])
            .env(DAEMON, self.point())
            .env("RAILFS_RUNTIME_DIR", self.run_directory())
            .envs(variables.iter().copied())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        Daemon { child, stderr }
    }
    fn started(&self) -> Daemon {
        let mut daemon = self.start(&[]);
        assert_eq!(daemon.word(), "READY");
        daemon
    }
    fn railfs(&self, arguments: &[&str]) -> Output {
        let program = env!("CARGO_BIN_EXE_railfs");
        Command::new(program).args(arguments).env("RAILFS_RUNTIME_DIR", self.run_directory()).output().unwrap()
    }
    fn assert_nothing_left(&self) {
        assert_eq!(std::fs::read_dir(self.run_directory()).unwrap().count(), 0, "files are left");
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(self.point().to_str().unwrap()), "a mount is left");
    }
}

impl Daemon {
    /// The next line that the daemon says.
    fn word(&mut self) -> String {
        let mut line = String::new();
        while self.stderr.read_line(&mut line).unwrap() > 0 {
            if line.starts_with("READY") || line.starts_with("FAILED") {
                break;
            }
            line.clear();
        }
        line.trim().to_owned()
    }
    fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), signal).unwrap();
    }
    fn exit(mut self) -> Option<i32> {
        let mut status = None;
        until("the daemon ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.and_then(|status| status.code())
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn i9_signals_unmount_and_leave_nothing() {
    if skipped("i9_signals_unmount_and_leave_nothing") {
        return;
    }
    let (term, int, hup) = (rustix::process::Signal::TERM, rustix::process::Signal::INT, rustix::process::Signal::HUP);
    // SIGHUP where its terminal has gone.
    for (signal, variables) in [(term, &[][..]), (int, &[]), (hup, &[("RAILFS_TEST_TERMINAL", "1")])] {
        let place = Place::new();
        let mut daemon = place.start(variables);
        assert_eq!(daemon.word(), "READY");
        assert_eq!(std::fs::read(place.point().join("f")).unwrap(), pattern(100_000));
        daemon.signal(signal);
        assert_eq!(daemon.exit(), Some(0));
        place.assert_nothing_left();
    }
    // Without a terminal SIGHUP changes nothing; a second signal while it stops does no harm.
    let place = Place::new();
    let daemon = place.started();
    let open = File::open(place.point().join("f")).unwrap();
    daemon.signal(hup);
    assert_eq!(std::fs::read(place.point().join("f")).unwrap(), pattern(100_000));
    daemon.signal(term);
    until("it is out of the tree", || railfs::mount::table::railfs_at(&place.point()).unwrap().is_none());
    daemon.signal(int);
    daemon.signal(hup);
    assert_eq!(daemon.exit(), Some(0));
    drop(open);
    place.assert_nothing_left();
}

#[test]
fn i9_a_stop_is_bounded_while_files_are_open_and_reads_hang() {
    if skipped("i9_a_stop_is_bounded_while_files_are_open_and_reads_hang") {
        return;
    }
    let place = Place::new();
    let daemon = place.started();
    let open = File::open(place.point().join("f")).unwrap();
    daemon.signal(rustix::process::Signal::TERM);
    let started = Instant::now();
    assert_eq!(daemon.exit(), Some(0));
    assert!(started.elapsed() < Duration::from_secs(5), "an open file that nobody reads");
    assert!(open.read_at(&mut [0; 10], 0).is_err());
    place.assert_nothing_left();

    let daemon = place.started();
    let mut reader = Command::new("cat").arg(place.point().join("hang")).stderr(Stdio::null()).spawn().unwrap();
    until("the read is under way", || {
        let status = place.railfs(&["status", "--json", place.point().to_str().unwrap()]);
        serde_json::from_slice::<Value>(&status.stdout).is_ok_and(|value| value["mount"]["in_flight"] == 1)
    });
    daemon.signal(rustix::process::Signal::TERM);
    let started = Instant::now();
    assert_eq!(daemon.exit(), Some(0));
    assert!(started.elapsed() < Duration::from_secs(11), "a read that is never answered");
    assert!(!reader.wait().unwrap().success());
    place.assert_nothing_left();
}

#[test]
fn a_place_has_one_mount_and_the_first_is_untouched() {
    if skipped("a_place_has_one_mount_and_the_first_is_untouched") {
        return;
    }
    let place = Place::new();
    let daemon = place.started();
    let mut second = place.start(&[]);
    let word = second.word();
    assert!(word.contains("is mounted already, by process"), "{word}");
    assert!(word.contains(&daemon.child.id().to_string()), "{word}");
    assert_eq!(second.exit(), Some(101));
    // From another runtime directory the lock is not seen, but the mount is.
    let elsewhere = place.base.path().join("run2");
    let mut third = place.start(&[("RAILFS_RUNTIME_DIR", elsewhere.to_str().unwrap())]);
    let word = third.word();
    assert!(word.contains("mounted there already"), "{word}");
    assert_eq!(third.exit(), Some(101));
    let status = place.railfs(&["status", "--json", place.point().to_str().unwrap()]);
    let value: Value = serde_json::from_slice(&status.stdout).unwrap();
    assert_eq!((&value["store"], &value["mount"]["pid"]), (&"fake".into(), &daemon.child.id().into()));
    assert!(text(&place.railfs(&["status"]).stdout).contains(place.point().to_str().unwrap()));
    let umount = place.railfs(&["umount", place.point().to_str().unwrap()]);
    assert!(umount.status.success(), "{}", text(&umount.stderr));
    place.assert_nothing_left();
    assert_eq!(daemon.exit(), Some(0), "an unmount from outside is a clean end");
    let again = place.railfs(&["umount", place.point().to_str().unwrap()]);
    assert_eq!(again.status.code(), Some(1));
    assert!(text(&again.stderr).contains("is not a railfs mount"), "{}", text(&again.stderr));
}

#[test]
fn a_busy_mount_is_named_and_lazy_takes_it_away() {
    if skipped("a_busy_mount_is_named_and_lazy_takes_it_away") {
        return;
    }
    let place = Place::new();
    let daemon = place.started();
    let point = place.point();
    let open = File::open(point.join("f")).unwrap();
    let umount = place.railfs(&["umount", point.to_str().unwrap()]);
    assert_eq!(umount.status.code(), Some(1));
    assert!(text(&umount.stderr).contains("is busy"), "{}", text(&umount.stderr));
    assert_eq!(open.read_at(&mut [0; 10], 0).unwrap(), 10, "untouched");
    let lazy = Command::new(env!("CARGO_BIN_EXE_railfs"))
        .args(["umount", "--lazy", point.to_str().unwrap()])
        .env("RAILFS_RUNTIME_DIR", place.run_directory())
        .spawn()
        .unwrap();
    until("it is out of the tree", || railfs::mount::table::railfs_at(&point).unwrap().is_none());
    assert_eq!(open.read_at(&mut [0; 10], 0).unwrap(), 10, "what was open is still served");
    drop(open);
    assert_eq!(daemon.exit(), Some(0));
    assert!(lazy.wait_with_output().unwrap().status.success());
    place.assert_nothing_left();
}

#[test]
fn a_dead_mount_of_ours_is_replaced() {
    if skipped("a_dead_mount_of_ours_is_replaced") {
        return;
    }
    let place = Place::new();
    let daemon = place.started();
    daemon.signal(rustix::process::Signal::KILL);
    assert_eq!(daemon.exit(), None);
    assert_eq!(code(&std::fs::metadata(place.point()).unwrap_err()), Some(Errno::NOTCONN));
    let daemon = place.started();
    assert_eq!(std::fs::read(place.point().join("f")).unwrap().len(), 100_000);
    daemon.signal(rustix::process::Signal::TERM);
    assert_eq!(daemon.exit(), Some(0));
    place.assert_nothing_left();
    // And umount takes a dead one away by itself.
    let daemon = place.started();
    daemon.signal(rustix::process::Signal::KILL);
    daemon.exit();
    let umount = place.railfs(&["umount", place.point().to_str().unwrap()]);
    assert!(umount.status.success(), "{}", text(&umount.stderr));
    assert!(railfs::mount::table::railfs_at(&place.point()).unwrap().is_none());
}

#[test]
fn a_start_that_fails_leaves_nothing() {
    if skipped("a_start_that_fails_leaves_nothing") {
        return;
    }
    let place = Place::new();
    // The URL's key is a file: found out when the mount is made already.
    let mut daemon = place.start(&[("RAILFS_TEST_URL", "railfs://h/ns/f")]);
    let word = daemon.word();
    assert!(word.contains("ns/f is a file"), "{word}");
    assert_eq!(daemon.exit(), Some(101));
    place.assert_nothing_left();
    std::fs::write(place.point().join("x"), "").unwrap();
    let mut daemon = place.start(&[]);
    let word = daemon.word();
    assert!(word.contains("not empty"), "{word}");
    assert_eq!(daemon.exit(), Some(101));
    place.assert_nothing_left();
    let mut daemon = place.start(&[("RAILFS_TEST_OPTIONS", "nonempty,threads=4 noexec,allow_other")]);
    assert_eq!(daemon.word(), "READY");
    assert!(place.point().join("f").exists());
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = mounts.lines().find(|line| line.contains(place.point().to_str().unwrap())).unwrap();
    for word in ["ro,nosuid,nodev,noexec", "fuse.railfs railfs://h/ns/ ", "allow_other", "default_permissions"] {
        assert!(line.contains(word), "{word}: {line}");
    }
    daemon.signal(rustix::process::Signal::TERM);
    assert_eq!(daemon.exit(), Some(0));
    place.assert_nothing_left();
}

#[test]
fn the_command_line_says_what_is_wrong() {
    if skipped("the_command_line_says_what_is_wrong") {
        return;
    }
    let place = Place::new();
    let point = place.point();
    let m = point.to_str().unwrap();
    let cases: [(&[&str], i32, &str); 10] = [
        (&["mount", "railfs://h/ns", m, "-o", "arean=1GiB"], 2, "did you mean arena?"),
        (&["mount", "railfs://h/ns", m, "-o", "rw"], 2, "read-only"),
        (&["mount", "http://h/ns", m], 2, "does not begin with railfs://"),
        (&["mount", "railfs://h/ns", "/no/such/place"], 1, "/no/such"),
        (&["mount", "railfs://127.0.0.1:1/ns", m, "-o", "connect_timeout=500ms"], 5, "127.0.0.1:1"),
        (&["umount", m], 1, "is not a railfs mount"),
        (&["status", m], 1, "is not a mount of this user"),
        (&["get", "railfs://h/ns/d/", "-"], 2, "a directory cannot go"),
        (&["frobnicate"], 2, "frobnicate"),
        (&["put", "/dev/null", "railfs://h/ns/x"], 1, "is a device"),
    ];
    for (arguments, code, word) in cases {
        let output = place.railfs(arguments);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(said.starts_with("railfs: ") && said.contains(word), "{arguments:?}: {said}");
        assert_eq!(said.trim_end().lines().count(), 1, "{arguments:?}: {said}");
    }
    place.assert_nothing_left();
}
