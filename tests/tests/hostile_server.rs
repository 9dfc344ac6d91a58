//! A server that lies, against a real mount and the command line: its control plane and its rail are the test's own.
//!
//! Each lie is a few lines of a table. While it is told, every call on the mount ends within its limit, with right bytes or
//! an error; the daemon lives and does not grow; and once the server is honest again, so is the mount, without a remount.

#![forbid(unsafe_code)]

mod hostile;

use hostile::{Hostile, KEY, Rail, Script, contents, version_of};
use railfs_proto::v1;
use railfs_tests::cluster::{COMMAND, Cluster, NAMESPACE, Plan};
use railfs_tests::data::{assert_file, write_file};
use railfs_tests::mount::Mount;
use railfs_tests::process::{program, resident, run};
use railfs_tests::{need_mount, tally, wait};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

/// More than any deadline of the mounts below, and than a busy machine adds.
const LIMIT: Duration = Duration::from_secs(30);
/// A daemon may grow by its arena, and what a few messages need.
const GROWTH: u64 = 200 << 10;

/// One lie, what the mount's log must say of it ("": nothing), and how it is told.
type Lie = (&'static str, &'static str, fn(&mut Script));

/// One lie to a command: what it is, the command, how it is told, and a word of what is said of it.
type Told<'a> = (&'a str, &'a [&'a str], fn(&mut Script), &'a str);

fn entry(key: &[u8]) -> v1::ListEntry {
    let descriptor = Some(hostile::descriptor(KEY).to_message());
    v1::ListEntry { key: key.to_vec().into(), directory: false, descriptor }
}

fn directory(key: &str) -> v1::ListEntry {
    v1::ListEntry { key: key.as_bytes().to_vec().into(), directory: true, descriptor: None }
}

/// Of every object that is looked up.
fn described(script: &mut Script, change: fn(&mut v1::Descriptor)) {
    script.lookup = Arc::new(move |reply| reply.descriptor.iter_mut().for_each(change));
}

const LISTS: &[Lie] = &[
    ("empty pages for ever", "says that more follow", |s| {
        s.list = Arc::new(|request, reply| {
            reply.entries.clear();
            (reply.more, reply.next_after) = (true, [&request.after[..], b"x"].concat().into());
        });
    }),
    ("a cursor that goes back", "cursor", |s| {
        s.list = Arc::new(|_, reply| (reply.more, reply.next_after) = (true, b"a"[..].into()));
    }),
    ("one name twice", "order", |s| s.list = Arc::new(|_, reply| reply.entries = vec![entry(b"f1"), entry(b"f1")])),
    ("one version under two names", "version", |s| {
        s.list = Arc::new(|_, reply| reply.entries = vec![entry(b"g1"), entry(b"g2")]);
    }),
    ("a name with a slash", "", |s| s.list = Arc::new(|_, reply| reply.entries = vec![entry(b"f/1")])),
    ("the name ..", "", |s| s.list = Arc::new(|_, reply| reply.entries = vec![directory("..")])),
    ("a name with NUL", "", |s| s.list = Arc::new(|_, reply| reply.entries = vec![entry(b"f\0")])),
    ("a name too long", "", |s| s.list = Arc::new(|_, reply| reply.entries = vec![entry(&[b'x'; 300])])),
    ("a key too long", "", |s| s.list = Arc::new(|_, reply| reply.entries = vec![entry(&[b'x'; 9000])])),
    ("a list of nothing, a million times", "", |s| {
        s.list = Arc::new(|_, reply| reply.entries = vec![v1::ListEntry::default(); 700_000]);
    }),
    ("a list larger than any page", "too large", |s| {
        s.list = Arc::new(|_, reply| reply.entries = vec![entry(&vec![b'x'; 2 << 20])]);
    }),
    ("a file and a directory of one name", "", |s| {
        s.list = Arc::new(|_, reply| reply.entries = vec![entry(b"f1"), directory("f1")]);
    }),
];

const LOOKUPS: &[Lie] = &[
    ("a size near 2^64", "", |s| described(s, |d| d.attributes.as_mut().unwrap().size = u64::MAX - 1)),
    ("no stripes", "", |s| described(s, |d| d.layout.as_mut().unwrap().stripe_size = 0)),
    ("no pages", "", |s| described(s, |d| d.layout.as_mut().unwrap().page_size = 0)),
    ("no components", "", |s| described(s, |d| d.components.clear())),
    ("too many components", "", |s| {
        described(s, |d| d.components = vec![d.components[0].clone(); 20_000]);
    }),
    ("a component that is too long", "", |s| described(s, |d| d.components[0].length = u64::MAX)),
    ("a small version", "", |s| described(s, |d| d.version = 1)),
    ("a directory's number for a version", "", |s| described(s, |d| d.version = 1 << 63)),
    ("a version of another object", "version", |s| described(s, |d| d.version = version_of(KEY))),
    ("neither proof nor outcome", "", |s| s.lookup = Arc::new(|reply| (reply.proof, reply.outcome) = (None, None))),
    ("an object that is a directory", "", |s| s.lookup = Arc::new(|reply| reply.directory = true)),
];

const RAILS: &[Lie] = &[
    ("a bare word for an answer", "", |s| s.fetch = Arc::new(|_, _, reply| *reply = v1::RailReply::default())),
    ("damaged pages", "", |s| s.fetch = Arc::new(|_, bulk, _| bulk.iter_mut().for_each(|byte| *byte ^= 1))),
    ("fewer bytes than asked for", "", |s| s.fetch = Arc::new(|_, bulk, _| bulk.truncate(bulk.len() / 2))),
    ("no bytes", "", |s| s.fetch = Arc::new(|_, bulk, _| bulk.clear())),
    ("more bytes than asked for", "", |s| {
        s.fetch = Arc::new(|_, bulk, _| bulk.resize((bulk.len() + 4096).min(1 << 20), 7));
    }),
    ("answers to nobody's question", "", |s| s.rail = Rail::Unasked),
    ("answers of another session", "", |s| s.rail = Rail::OtherSession),
    ("garbage", "", |s| s.rail = Rail::Garbage),
    ("headers of endless bulk", "", |s| s.rail = Rail::Endless),
    ("silence on the rail", "", |s| s.rail = Rail::Silent),
    ("a byte a second", "", |s| s.rail = Rail::Dribble),
    ("a rail that ends at once", "", |s| s.rail = Rail::Closed),
    ("requests that a client does not answer", "", |s| s.rail = Rail::Asking),
];

const CALLS: &[Lie] = &[
    ("a status with escapes", "", |s| {
        s.status = Arc::new(|reply| {
            reply.publishing = "no \x1b]0;puts\x07\n".to_owned();
            reply.degraded = vec!["\x1b[2J".to_owned()];
        });
    }),
    ("a status without end", "", |s| s.status = Arc::new(|reply| reply.degraded = vec!["x".repeat(90); 20_000])),
    ("a hello of countless listeners", "", |s| {
        s.hello = Arc::new(|reply| reply.listeners = vec![reply.listeners[0].clone(); 10_000]);
    }),
    ("a hello of countless tickets", "", |s| {
        s.hello = Arc::new(|reply| reply.tickets = vec![vec![1; 16].into(); 10_000]);
    }),
    ("another session with every hello", "", |s| {
        static NEXT: AtomicU64 = AtomicU64::new(1000);
        s.hello = Arc::new(|reply| reply.session = NEXT.fetch_add(1, Ordering::Relaxed));
    }),
    ("no answer to any call", "", |s| s.silent = true),
];

/// Runs the call on a thread of its own.
///
/// # Panics
/// It does not end within the limit.
fn within<T: Send + 'static>(what: &str, call: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = channel();
    std::thread::spawn(move || send.send(call()));
    receive.recv_timeout(LIMIT).unwrap_or_else(|_| panic!("{what}: no answer within {LIMIT:?}"))
}

/// Every call, with a name that was not used before; whether all of them were right.
fn calls(lie: &str, root: &Path, number: usize) -> bool {
    let place = root.to_owned();
    let listed = within(&format!("{lie}: ls"), move || {
        let entries = std::fs::read_dir(&place)?.take(10_000).map(|entry| Ok(entry?.file_name()));
        entries.collect::<std::io::Result<Vec<_>>>()
    });
    let place = root.to_owned();
    let space = within(&format!("{lie}: df"), move || rustix::fs::statvfs(&place).is_ok());
    let name = format!("f{number}");
    let place = root.join(&name);
    let read = within(&format!("{lie}: read"), move || std::fs::read(&place));
    if let Ok(bytes) = &read {
        assert!(*bytes == contents(&name), "{lie}: {} wrong bytes of {name}", bytes.len());
    }
    let listed = listed.is_ok_and(|names| names.len() == 1 && names[0] == KEY);
    listed && space && read.is_ok()
}

fn mount(hostile: &Hostile, root: &Path) -> Mount {
    let run = root.join("run");
    std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&run).unwrap();
    std::fs::create_dir(root.join("m")).unwrap();
    let railfs = || {
        let mut command = Command::new(program("railfs"));
        command.env("RAILFS_RUNTIME_DIR", &run).env_remove("RAILFS_LOG").stdin(std::process::Stdio::null());
        command
    };
    let options = "arena=16MiB,read_timeout=3s,metadata_timeout=2s,connect_timeout=2s,metadata_ttl=0s";
    Mount::start(railfs, &hostile.url(""), root.join("m"), root.join("m.log"), options)
}

#[test]
fn i9_whatever_a_server_lists_calls_end_and_the_daemon_lives() {
    need_mount!("i9_whatever_a_server_lists_calls_end_and_the_daemon_lives");
    tell("i9_whatever_a_server_lists_calls_end_and_the_daemon_lives", LISTS);
}

#[test]
fn i9_whatever_a_lookup_says_calls_end_and_the_daemon_lives() {
    need_mount!("i9_whatever_a_lookup_says_calls_end_and_the_daemon_lives");
    tell("i9_whatever_a_lookup_says_calls_end_and_the_daemon_lives", LOOKUPS);
}

#[test]
fn i9_whatever_a_rail_sends_bytes_are_right_or_an_error_and_the_daemon_lives() {
    need_mount!("i9_whatever_a_rail_sends_bytes_are_right_or_an_error_and_the_daemon_lives");
    tell("i9_whatever_a_rail_sends_bytes_are_right_or_an_error_and_the_daemon_lives", RAILS);
}

#[test]
fn i9_whatever_other_calls_are_answered_the_daemon_lives() {
    need_mount!("i9_whatever_other_calls_are_answered_the_daemon_lives");
    tell("i9_whatever_other_calls_are_answered_the_daemon_lives", CALLS);
}

/// Every lie of a table, over one mount.
fn tell(test: &str, lies: &[Lie]) {
    let root = tempfile::tempdir().unwrap();
    let hostile = Hostile::start();
    let mut mounted = mount(&hostile, root.path());
    assert!(calls("nothing", &mounted.path, 0), "an honest one is believed: {}", mounted.logged());
    // A mount of a good server beside it.
    let mut good = Cluster::start(&Plan::default());
    let file = root.path().join("file");
    write_file(&file, 1, 300_000);
    good.put(&file, "file");
    let beside = good.mount("", "arena=16MiB");
    let base = resident(mounted.pid());
    // What the kernel holds no inode of, nobody can tell from another name's.
    let held = std::fs::File::open(mounted.at(KEY)).unwrap();
    for (number, (lie, word, tell)) in (1..).zip(lies) {
        let before = mounted.logged().len();
        hostile.change(*tell);
        calls(lie, &mounted.path, number);
        assert_file(&beside.at("file"), 1, 300_000);
        // Also by the command line, each call of which ends.
        for arguments in [vec!["stat".to_owned(), hostile.url("f")], vec!["status".to_owned(), hostile.url("")]] {
            let output = run(Command::new(program("railfs")).args(&arguments).env_remove("RAILFS_LOG"), COMMAND);
            let said = output.out() + &output.err();
            assert!(!said.contains('\x1b') && !said.contains("panicked"), "{lie}: {said:?}");
        }
        let logged = mounted.logged();
        let logged = logged.get(before..).unwrap_or_default();
        assert!(logged.contains(word), "{lie}: no word of \"{word}\" in {logged}");
        assert!(!logged.contains("panicked"), "{lie}: {logged}");
        assert!(mounted.daemon.ended().is_none(), "{lie}: the daemon has ended: {logged}");
        hostile.change(|script| *script = Script::default());
        let mut again = 0;
        wait::eventually(&format!("{lie}: the mount is right again"), wait::SOON, || {
            again += 1;
            let right = calls(lie, &mounted.path, number * 1000 + again);
            if right { Ok(()) } else { Err(mounted.logged().lines().last().unwrap_or_default().to_owned()) }
        });
        let grown = resident(mounted.pid()).saturating_sub(base);
        assert!(grown < GROWTH, "{lie}: the daemon has grown by {grown} KiB");
    }
    drop(held);
    tally("i9", "lies", lies.len() as u64, test);
    assert_eq!(mounted.umount().code, Some(0));
    assert!(mounted.daemon.wait(wait::SOON).success());
    beside.stop();
}

#[test]
fn i9_commands_end_whatever_a_server_says() {
    let hostile = Hostile::start();
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("file");
    write_file(&file, 1, 300_000);
    let railfs =
        |arguments: &[&str]| run(Command::new(program("railfs")).args(arguments).env_remove("RAILFS_LOG"), COMMAND);
    let (all, one) = (hostile.url(""), hostile.url("f"));
    railfs(&["ls", &all]).expect(0);
    let got = railfs(&["get", &one, "-"]).expect(0);
    assert_eq!(got.stdout, contents("f"));
    let lies: &[Told<'_>] = &[
        ("endless pages", &["ls", &all], LISTS[0].2, "more follow"),
        (
            "a huge list",
            &["ls", &all],
            |s| s.list = Arc::new(|_, r| r.entries = vec![entry(&vec![b'x'; 2 << 20])]),
            "too large",
        ),
        ("changes at random", &["watch", &all], |s| s.watch = Arc::new(|n| hostile::change(n ^ 5)), "order"),
        (
            "changes without a key",
            &["watch", &all],
            |s| {
                s.watch = Arc::new(|_| v1::WatchReply { changes: vec![v1::Change::default(); 9], ..hostile::change(1) })
            },
            "change",
        ),
        (
            "a huge message of changes",
            &["watch", &all],
            |s| {
                s.watch = Arc::new(|_| v1::WatchReply {
                    changes: vec![v1::Change { key: vec![b'x'; 2 << 20].into(), ..Default::default() }],
                    ..hostile::change(1)
                })
            },
            "too large",
        ),
        ("pulls that make no sense", &["put", file.to_str().unwrap(), &one], |s| s.rail = Rail::Pulling, "no such put"),
        (
            "a refusal with escapes",
            &["stat", &one],
            |s| {
                s.lookup =
                    Arc::new(|reply| reply.outcome = Some(v1::Outcome { code: 12, message: "\x1b[2Jno\n".to_owned() }))
            },
            "\\x1b[2Jno",
        ),
        ("a status of HTTP/2 with escapes", &["ls", &all], |s| s.list_status = Some("\x1b[2Jno\n"), "\\u{1b}[2Jno"),
        ("no answer", &["ls", &all], |s| s.silent = true, ""),
    ];
    for (lie, arguments, tell, word) in lies {
        hostile.change(*tell);
        let output = railfs(arguments);
        let said = output.err();
        assert!(output.code.is_some_and(|code| code != 0 && code != 101), "{lie}: {:?} {said}", output.code);
        assert!(said.contains(word) && !said.contains("panicked"), "{lie}: {said}");
        assert!(!said.contains('\x1b') && !output.out().contains('\x1b'), "{lie}: {said:?}");
        hostile.change(|script| *script = Script::default());
    }
    railfs(&["get", &one, "-"]).expect(0);
    assert_eq!(NAMESPACE, "ns");
}
