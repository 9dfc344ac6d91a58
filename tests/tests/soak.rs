//! Readers of every method, at random places, while what they read is replaced twenty times a second: every byte is
//! explained by one version. Then `fio --verify`. Then: everything is where it was, in memory, descriptors and threads.
//!
//! `RAILFS_SOAK_SECONDS` sets how long each form of mount is read (4; 600 with `RAILFS_FULL=1`), `RAILFS_SEED` what is read.

#![forbid(unsafe_code)]

use railfs_tests::cluster::{Cluster, Plan};
use railfs_tests::data::{Random, fill, write_file};
use railfs_tests::mount::Mount;
use railfs_tests::process::{descriptors, resident, run, threads};
use railfs_tests::putter::Putter;
use railfs_tests::quiet::assert_quiet;
use railfs_tests::{full, need_mount, shell, wait};
use rustix::io::Errno;
use std::collections::HashMap;
use std::fs::File;
use std::io::IoSliceMut;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Forms of a mount, and whether a descriptor's version may be read after it was replaced.
const FORMS: [(&str, bool); 3] = [("io=direct", false), ("io=cached", false), ("mode=snapshot", true)];
/// Overwrites a second.
const RATE: u32 = 20;
const MIB: u64 = 1 << 20;
const O_DIRECT: i32 = 0o40000;

fn seconds() -> u64 {
    let set =
        std::env::var("RAILFS_SOAK_SECONDS").ok().map(|text| text.parse().expect("RAILFS_SOAK_SECONDS: a number"));
    set.unwrap_or(if full() { 600 } else { 4 })
}

fn seed() -> u64 {
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    std::env::var("RAILFS_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(clock.as_secs())
}

/// The size of version k: around 4 MiB, odd.
fn size_of(k: u64) -> u64 {
    3 * MIB + (k * 65_537) % (2 * MIB)
}

/// What has been put, and what was acknowledged.
#[derive(Default)]
struct Said {
    begun: AtomicU64,
    acknowledged: AtomicU64,
    /// k by version number.
    versions: Mutex<HashMap<u64, u64>>,
    over: AtomicBool,
}

impl Said {
    fn over(&self) -> bool {
        self.over.load(SeqCst)
    }
    /// Which k a version number is: of those begun, the put may not be acknowledged yet.
    fn k_of(&self, version: u64) -> Option<u64> {
        self.versions.lock().unwrap().get(&version).copied()
    }
}

struct Over<'a>(&'a Said);
impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, SeqCst);
    }
}

fn write(putter: &Putter, said: &Said) -> u64 {
    let started = Instant::now();
    let mut k = said.begun.load(SeqCst);
    while !said.over() {
        k += 1;
        said.begun.store(k, SeqCst);
        let version = putter.put("k", k, size_of(k));
        said.versions.lock().unwrap().insert(version, k);
        said.acknowledged.store(k, SeqCst);
        // The rate is part of the test.
        std::thread::sleep(
            (started + k as u32 * Duration::from_secs(1) / RATE).saturating_duration_since(Instant::now()),
        );
    }
    k
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    opens: u64,
    reads: u64,
    bytes: u64,
    stale: u64,
    stale_opens: u64,
    mapped: u64,
}

fn is_stale(error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(Errno::STALE.raw_os_error())
}

/// One read by one of the methods; what came.
fn one(file: &File, method: u64, offset: u64, buffer: &mut [u8]) -> std::io::Result<usize> {
    match method {
        0 | 1 => file.read_at(buffer, offset),
        2 => {
            let (first, second) = buffer.split_at_mut(buffer.len() / 3);
            Ok(rustix::io::preadv(file, &mut [IoSliceMut::new(first), IoSliceMut::new(second)], offset)?)
        }
        3 => {
            rustix::fs::seek(file, rustix::fs::SeekFrom::Start(offset))?;
            Ok(rustix::io::read(file, &mut *buffer)?)
        }
        // Out of the page cache: sendfile, or splice.
        _ => {
            let (reader, writer) = rustix::pipe::pipe()?;
            let mut at = offset;
            let want = buffer.len().min(60_000);
            let sent = if method == 4 {
                rustix::fs::sendfile(&writer, file, Some(&mut at), want)?
            } else {
                rustix::pipe::splice(file, Some(&mut at), &writer, None, want, rustix::pipe::SpliceFlags::empty())?
            };
            let mut got = 0;
            while got < sent {
                got += rustix::io::read(&reader, &mut buffer[got..sent])?;
            }
            Ok(sent)
        }
    }
}

fn read(path: &Path, said: &Said, seed: u64, may_be_old: bool) -> Seen {
    let mut seen = Seen::default();
    let mut random = Random::new(seed);
    let mut memory = vec![0u8; 3 << 20];
    let mut want = vec![0u8; 3 << 20];
    while !said.over() {
        let direct = if random.below(4) == 0 { O_DIRECT } else { 0 };
        let acknowledged = said.acknowledged.load(SeqCst);
        let file = match std::fs::OpenOptions::new().read(true).custom_flags(direct).open(path) {
            Ok(file) => file,
            // Two replaces within one open.
            Err(error) if is_stale(&error) => {
                seen.stale_opens += 1;
                continue;
            }
            Err(error) => panic!("open: {error}"),
        };
        seen.opens += 1;
        // The inode is the version. Learnt later than opened: a replaced one may not say it any more.
        let mut mine: Option<u64> = None;
        for _ in 0..1 + random.below(40) {
            let length = match random.below(4) {
                0 => 1 + random.below(200),
                1 => 4096 * (1 + random.below(16)),
                2 => 1 + random.below(MIB),
                _ => 1 + random.below(3 * MIB),
            };
            let (offset, method) = (random.below(5 * MIB + 5000), random.below(6));
            let start = random.below(4096) as usize;
            let length = (length as usize).min(memory.len() - start);
            let address = memory.as_ptr().addr() + start;
            let oldest = said.acknowledged.load(SeqCst);
            let got = one(&file, method, offset, &mut memory[start..start + length]);
            let newest = said.begun.load(SeqCst);
            seen.reads += 1;
            let got = match got {
                Ok(got) => got,
                Err(error) if is_stale(&error) => {
                    seen.stale += 1;
                    break;
                }
                Err(error) => panic!("{method} {length} at {offset}: {error}"),
            };
            seen.bytes += got as u64;
            let mapped = method >= 4;
            seen.mapped += u64::from(mapped);
            // The oldest that it may be: what was current when the call began, or what was opened.
            let lowest = if mapped || may_be_old { acknowledged } else { oldest };
            let candidates = match mine {
                Some(k) => k..=k,
                None => lowest.max(1)..=newest,
            };
            assert!(
                mine.is_none_or(|k| k >= lowest),
                "{mine:?} is older than {lowest}, which was acknowledged before the read"
            );
            let mut explains = |k: u64| {
                let whole = length.min(size_of(k).saturating_sub(offset) as usize);
                // A read that the kernel cuts in two (more than 256 pages of the caller's memory, whole or in part) may end
                // early where a later part of it failed; so may one where the pipe was full. Never at the start.
                let pages = (address % 4096 + whole).div_ceil(4096) + usize::from(method == 2);
                let right = got == whole || (got > 0 && got < whole && (pages > 256 || mapped));
                right && {
                    fill(k, offset, &mut want[..got]);
                    want[..got] == memory[start..start + got]
                }
            };
            let fits: Vec<u64> = candidates.clone().rev().filter(|k| explains(*k)).collect();
            assert!(
                !fits.is_empty(),
                "{got} bytes by method {method} at {offset} of {length} are of none of {candidates:?}"
            );
            // Few bytes, or none, can be of several.
            if let [k] = fits[..]
                && got >= 16
            {
                mine = Some(k);
            }
            if let Ok(meta) = file.metadata()
                && let (Some(k), Some(mine)) = (said.k_of(meta.ino()), mine)
            {
                assert_eq!(k, mine, "the inode's number is the version");
            }
            if said.over() {
                break;
            }
        }
    }
    seen
}

/// Descriptors, threads and KiB of memory of a mount.
fn of_mount(mount: &Mount) -> (usize, usize, u64) {
    (descriptors(mount.pid()), threads(mount.pid()), resident(mount.pid()))
}

/// The same of the server, without the components that it keeps open (a bounded number).
fn of_server(cluster: &Cluster, pid: u32) -> (usize, usize, u64) {
    let open = cluster.status()["server"]["counters"]["open_files"].as_u64().unwrap_or(0);
    (descriptors(pid).saturating_sub(open as usize), threads(pid), resident(pid))
}

/// Threads that a runtime may still keep for work that blocks.
const WAITING_FOR_DISKS: usize = 4;

fn back_at_base(what: &str, account: impl Fn() -> (usize, usize, u64), before: (usize, usize, u64)) {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let now = account();
        // Connections come and go by one or two; a runtime keeps threads that wait for disks for ten seconds after the last one
        // was needed, and what asks here needs one.
        let level = now.0 <= before.0 + 2 && now.1 <= before.1 + 2 + WAITING_FOR_DISKS;
        // Five per cent, and what an allocator keeps of its own.
        let memory = now.2 <= before.2 + before.2 / 20 + 2048;
        if level && memory {
            eprintln!("{what}: descriptors, threads, KiB {before:?} before, {now:?} after");
            return;
        }
        assert!(Instant::now() < end, "{what}: descriptors, threads, KiB {before:?} before, {now:?} after");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn fio(mount: &Mount, source: &Path, seconds: u64) {
    for (mode, direct) in [("randread", 1), ("read", 0), ("randread", 0)] {
        let line = format!(
            "fio --name=v --filename=$M/verified --readonly --rw={mode} --bs=16k --size=24m --verify=crc32c \
             --verify_fatal=1 --verify_state_save=0 --direct={direct} --ioengine=psync --runtime={} --time_based --output-format=terse",
            (seconds / 3).max(1)
        );
        shell::shell_within(mount, source, &line, shell::LIMIT + Duration::from_secs(seconds)).expect(0);
    }
}

#[test]
fn i1_i3_every_byte_is_of_one_version_while_it_is_overwritten_20_times_a_second() {
    need_mount!("i1_i3_every_byte_is_of_one_version_while_it_is_overwritten_20_times_a_second");
    let mut cluster = Cluster::start(&Plan { directories: 3, ..Plan::default() });
    let putter = Putter::new(&cluster);
    let verify = shell::lacks(&["fio"]).is_none();
    let source = cluster.root.path().join("verified");
    if verify {
        let made = "fio --name=v --rw=write --bs=16k --size=24m --verify=crc32c --verify_state_save=0 --do_verify=0 --ioengine=psync --filename";
        let output = run(Command::new("sh").args(["-c", &format!("{made}={}", source.display())]), shell::LIMIT);
        output.expect(0);
        cluster.put(&source, "verified");
    }
    let filler = cluster.root.path().join("filler");
    write_file(&filler, 1, 48 * MIB);
    cluster.put(&filler, "filler");
    let seed = seed();
    eprintln!("RAILFS_SEED={seed}");
    let server = cluster.server().pid();
    for (form, may_be_old) in FORMS {
        let mount = cluster.mount("", &format!("{form},arena=32MiB"));
        let said = Said::default();
        // Once of everything, and the cache full: from here on nothing may grow.
        said.begun.store(1, SeqCst);
        let version = putter.put("k", 1, size_of(1));
        said.versions.lock().unwrap().insert(version, 1);
        said.acknowledged.store(1, SeqCst);
        let round = |length: Duration, seed: u64| -> (Vec<Seen>, u64) {
            said.over.store(false, SeqCst);
            std::thread::scope(|scope| {
                let over = Over(&said);
                let readers: Vec<_> = (0..3)
                    .map(|number| {
                        let (path, said) = (mount.at("k"), &said);
                        scope.spawn(move || read(&path, said, seed + number, may_be_old))
                    })
                    .collect();
                let writer = scope.spawn(|| write(&putter, &said));
                let end = Instant::now() + length;
                wait::until("a reader or the writer has failed, or the time is over", length + wait::SOON, || {
                    Instant::now() >= end || writer.is_finished() || readers.iter().any(|reader| reader.is_finished())
                });
                drop(over);
                let puts = writer.join().unwrap();
                (readers.into_iter().map(|reader| reader.join().unwrap()).collect(), puts)
            })
        };
        shell::shell(&mount, &filler, "cat $M/filler | cmp - $S; cat <$M/filler >/dev/null").expect(0);
        // Until nothing is touched for the first time any more: on a busy machine one round does little.
        let mut level = 0;
        for number in 0.. {
            round(Duration::from_secs(1), seed.wrapping_add(77 + number));
            let now = resident(mount.pid()) + resident(server);
            if number > 0 && now <= level + level / 100 {
                break;
            }
            assert!(number < 40, "memory does not stop growing: {now} KiB after round {number}, {level} before");
            level = now;
        }
        assert_quiet(&cluster, &[&mount]);
        let before = (of_mount(&mount), of_server(&cluster, server));
        let again = mount.counter("fetches_again");

        let (seen, k) = round(Duration::from_secs(seconds()), seed);
        if verify {
            fio(&mount, &source, seconds());
        }
        for seen in &seen {
            eprintln!("{form}: {seen:?}");
            assert!(
                seen.reads > 20 && seen.stale + seen.stale_opens > 0 || may_be_old,
                "readers and writer did not meet"
            );
        }
        let retries = mount.counter("fetches_again") - again;
        eprintln!(
            "{form}: {k} overwrites, {} bytes read, {} ESTALE, {} in open, {retries} fetches repeated",
            seen.iter().map(|seen| seen.bytes).sum::<u64>(),
            seen.iter().map(|seen| seen.stale).sum::<u64>(),
            seen.iter().map(|seen| seen.stale_opens).sum::<u64>()
        );
        assert_quiet(&cluster, &[&mount]);
        shell::shell(&mount, &filler, "cat $M/filler | cmp - $S; cat <$M/filler >/dev/null").expect(0);
        back_at_base("the mount", || of_mount(&mount), before.0);
        back_at_base("the server", || of_server(&cluster, server), before.1);
        assert_quiet(&cluster, &[&mount]);
        mount.stop();
    }
    drop(putter);
    assert_quiet(&cluster, &[]);
}
