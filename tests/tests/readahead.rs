//! Readahead and fairness seen from programs: what is fetched for readers of every kind, and who waits meanwhile. Counters are
//! asserted, not times.

#![forbid(unsafe_code)]

use railfs_tests::cluster::{COMMAND, Cluster, Plan};
use railfs_tests::data::{Random, assert_file, fill, write_file};
use railfs_tests::mount::Mount;
use railfs_tests::process::run;
use railfs_tests::quiet::assert_quiet;
use railfs_tests::{full, need_mount, wait};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

const MIB: u64 = 1 << 20;

fn size() -> u64 {
    if full() { 1024 * MIB } else { 96 * MIB }
}

/// What reading has cost since the mount was new.
#[derive(Clone, Copy, Debug)]
struct Cost {
    /// Object bytes that came over the rails.
    bytes: u64,
    /// Fetches, for reads and ahead of them.
    fetches: u64,
}

fn cost(mount: &Mount) -> Cost {
    let status = mount.status();
    let counter = |name: &str| status["counters"][name].as_u64().unwrap();
    Cost { bytes: counter("bytes_landed"), fetches: counter("fetches") + counter("fetches_ahead") }
}

/// A mount that has read nothing, one reader on it, and what that cost.
fn cold(cluster: &mut Cluster, options: &str, reader: impl FnOnce(&Mount)) -> Cost {
    let mount = cluster.mount("", options);
    reader(&mount);
    let cost = cost(&mount);
    assert_quiet(cluster, &[&mount]);
    mount.stop();
    cost
}

/// A program in Python, which must be there and succeed; what it printed.
#[track_caller]
fn python(text: &str, arguments: &[&std::path::Path]) -> String {
    let mut command = Command::new("python3");
    command.arg("-c").arg(text).args(arguments);
    run(&mut command, COMMAND * 3).expect(0).out().trim().to_owned()
}

const TOUCH: &str = r"
import hashlib, mmap, sys
with open(sys.argv[1], 'rb') as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
    h = hashlib.md5()
    for at in range(0, len(m), 4096):
        h.update(m[at:at + 4096])
    print(h.hexdigest())
";

const EIGHT: &str = r"
import hashlib, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
size, parts = os.fstat(fd).st_size, 8
sums = []
for part in range(parts):
    r, w = os.pipe()
    if os.fork() == 0:
        h, at, end = hashlib.md5(), part * size // parts, (part + 1) * size // parts
        while at < end:
            got = os.pread(fd, min(131072, end - at), at)
            assert got
            h.update(got)
            at += len(got)
        os.write(w, h.hexdigest().encode())
        os._exit(0)
    os.close(w)
    sums.append(r)
out = [os.read(r, 100).decode() for r in sums]
for _ in sums:
    assert os.wait()[1] == 0
print(' '.join(out))
";

#[test]
fn s16_mmap_in_order_and_eight_processes_on_one_descriptor_cost_what_cat_costs() {
    need_mount!("s16_mmap_in_order_and_eight_processes_on_one_descriptor_cost_what_cat_costs");
    let mut cluster = Cluster::start(&Plan::default());
    let source = cluster.root.path().join("source");
    write_file(&source, 16, size());
    cluster.put(&source, "f");
    // The arena holds a fraction of the file: what is dropped before it is read is fetched twice.
    for options in ["arena=32MiB", "arena=16MiB"] {
        let cat = cold(&mut cluster, options, |mount| assert_file(&mount.at("f"), 16, size()));
        let touch = cold(&mut cluster, options, |mount| {
            assert_eq!(python(TOUCH, &[&mount.at("f")]), python(TOUCH, &[&source]));
        });
        let eight = cold(&mut cluster, options, |mount| {
            assert_eq!(python(EIGHT, &[&mount.at("f")]), python(EIGHT, &[&source]));
        });
        eprintln!("{options}: cat {cat:?}, mmap in order {touch:?}, eight processes {eight:?}");
        assert_eq!(cat.bytes, size(), "cat fetches each byte once");
        for other in [touch, eight] {
            assert!(other.bytes < 3 * cat.bytes && other.fetches < 3 * cat.fetches, "{other:?}, cat {cat:?}");
        }
    }
}

#[test]
fn s16_random_reads_fetch_less_than_twenty_times_what_they_ask_for() {
    need_mount!("s16_random_reads_fetch_less_than_twenty_times_what_they_ask_for");
    let mut cluster = Cluster::start(&Plan::default());
    let source = cluster.root.path().join("source");
    write_file(&source, 17, size());
    cluster.put(&source, "f");
    const READS: u64 = 1500;
    for aligned in [true, false] {
        let cost = cold(&mut cluster, "arena=16MiB", |mount| {
            let file = File::open(mount.at("f")).unwrap();
            let (mut buffer, mut want) = ([0; 4096], [0; 4096]);
            let mut random = Random::new(8);
            for _ in 0..READS {
                let step = if aligned { 4096 } else { 1 };
                let offset = random.below(size() - 4096) / step * step;
                file.read_exact_at(&mut buffer, offset).unwrap();
                fill(17, offset, &mut want);
                assert!(buffer == want, "at {offset}");
            }
        });
        eprintln!(
            "random 4 KiB, aligned {aligned}: {:.1} fetched for each asked",
            cost.bytes as f64 / (READS * 4096) as f64
        );
        assert!(cost.bytes < 20 * READS * 4096, "{cost:?}");
    }
}

#[test]
fn backward_and_strided_readers_fetch_what_they_read() {
    need_mount!("backward_and_strided_readers_fetch_what_they_read");
    let mut cluster = Cluster::start(&Plan::default());
    let source = cluster.root.path().join("source");
    write_file(&source, 18, size());
    cluster.put(&source, "f");
    let length = 128 << 10;
    let backward: Vec<u64> = (0..size() / length).rev().map(|i| i * length).collect();
    let strided: Vec<u64> = (0..size() / (4 * length)).map(|i| i * 4 * length).collect();
    for (name, offsets) in [("backward", backward), ("strided", strided)] {
        let asked = offsets.len() as u64 * length;
        let mut ahead = 0;
        let cost = cold(&mut cluster, "arena=32MiB", |mount| {
            let file = File::open(mount.at("f")).unwrap();
            let (mut buffer, mut want) = (vec![0; length as usize], vec![0; length as usize]);
            for offset in offsets {
                file.read_exact_at(&mut buffer, offset).unwrap();
                fill(18, offset, &mut want);
                assert!(buffer == want, "{name} at {offset}");
            }
            ahead = mount.counter("bytes_ahead");
        });
        eprintln!("{name}: {cost:?} for {asked} asked, {ahead} ahead");
        assert!(cost.bytes <= asked + asked / 4, "{name}: {cost:?} for {asked}");
        assert!(ahead >= asked / 2, "{name}: {ahead} of {asked} came ahead");
    }
}

#[test]
fn i9_ls_and_df_answer_while_64_readers_wait_for_memory() {
    need_mount!("i9_ls_and_df_answer_while_64_readers_wait_for_memory");
    readers_wait_for_memory(64, &[]);
}

#[test]
fn i9_ls_and_df_answer_while_readers_of_tiny_stripes_wait_for_memory() {
    need_mount!("i9_ls_and_df_answer_while_readers_of_tiny_stripes_wait_for_memory");
    // 256 fetches for a read: a few readers are as many fetches as a thousand others make.
    readers_wait_for_memory(24, &["--stripe-size", "4KiB", "--page-size", "4KiB"]);
}

fn readers_wait_for_memory(count: u64, layout: &[&str]) {
    let mut cluster = Cluster::start(&Plan::default());
    let source = cluster.root.path().join("source");
    write_file(&source, 19, 64 * MIB);
    let url = cluster.url("f");
    let put = [&["put", source.to_str().unwrap(), &url][..], layout].concat();
    cluster.cli(&put).expect(0);
    let mount = cluster.mount("", "arena=5MiB,readahead=0");
    let over = AtomicBool::new(false);
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    std::thread::scope(|scope| {
        let end = Over(&over);
        let readers: Vec<_> = (0..count)
            .map(|n| {
                let (path, over) = (mount.at("f"), &over);
                scope.spawn(move || {
                    // A file of its own: the kernel serves the reads of one in turn.
                    let file = File::open(path).unwrap();
                    let mut random = Random::new(n);
                    let length = if n % 4 == 0 { 4096 } else { MIB as usize };
                    let (mut buffer, mut want) = (vec![0; length], vec![0; length]);
                    let mut reads = 0u64;
                    while !over.load(Ordering::Relaxed) {
                        let offset = random.below(64 * MIB - length as u64);
                        file.read_exact_at(&mut buffer, offset).unwrap();
                        fill(19, offset, &mut want);
                        assert!(buffer == want);
                        reads += 1;
                    }
                    reads
                })
            })
            .collect();
        wait::until("readers wait for memory", wait::SOON, || {
            let status = mount.status();
            let waits = |class: &str| status["admission"][class].as_u64().unwrap_or(0);
            waits("waiting_large") > count / 8 && waits("admitted_large") > count / 2
        });
        for program in ["ls", "df", "stat"] {
            let mut command = Command::new(program);
            let output = run(command.arg(&mount.path), COMMAND).expect(0);
            // Their own deadline, not that of the reads before them.
            assert!(output.took < railfs_proto::limits::METADATA_DEADLINE, "{program}: {:?}", output.took);
        }
        drop(end);
        let reads: Vec<u64> = readers.into_iter().map(|reader| reader.join().unwrap()).collect();
        assert!(reads.iter().all(|&reads| reads > 0), "nobody starves: {reads:?}");
    });
    let admission = mount.status()["admission"].clone();
    eprintln!("{admission}");
    assert_eq!(admission["refused"], 0);
    for rail in mount.status()["rails"].as_array().unwrap() {
        assert_eq!(rail["failed"], 0, "a healthy rail refuses nothing: {rail}");
    }
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

#[test]
fn a_seek_and_a_close_leave_nothing_behind() {
    need_mount!("a_seek_and_a_close_leave_nothing_behind");
    let mut cluster = Cluster::start(&Plan::default());
    let source = cluster.root.path().join("source");
    write_file(&source, 20, 64 * MIB);
    cluster.put(&source, "f");
    let mount = cluster.mount("", "arena=32MiB");
    let file = File::open(mount.at("f")).unwrap();
    let mut buffer = vec![0; MIB as usize];
    for offset in (0..8).chain(40..44) {
        file.read_exact_at(&mut buffer, offset * MIB).unwrap();
    }
    drop(file);
    wait::until("nothing is wanted ahead any more", wait::SOON, || {
        let status = mount.status();
        status["admission"]["ahead_unread_bytes"] == 0 && status["admission"]["ahead_in_flight_bytes"] == 0
    });
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}
