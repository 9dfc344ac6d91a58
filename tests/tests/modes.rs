//! `strict` in both of its forms, and `snapshot`: what each call sees before and after a replace, on real mounts. Every
//! byte of version k is k.

#![forbid(unsafe_code)]

use railfs_engine::client::{Client, Config, PutOptions, Source};
use railfs_proto::descriptor::Attributes;
use railfs_proto::name::ObjectName;
use railfs_tests::cluster::{Cluster, NAMESPACE, Plan};
use railfs_tests::data::Random;
use railfs_tests::mount::Mount;
use railfs_tests::process::run;
use railfs_tests::quiet::assert_quiet;
use railfs_tests::reader::{FILLS, Got, READS, Reader};
use railfs_tests::wait::{self, SOON, eventually};
use railfs_tests::{full, need_mount, reader, skip};
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 3 * MIB + 12_345;
/// Every form, as options.
const FORMS: [&str; 4] = ["io=direct", "io=cached", "mode=snapshot", "mode=snapshot,io=direct"];

macro_rules! need_reader {
    ($test:expr) => {
        need_mount!($test);
        if let Some(reason) = reader::missing() {
            return skip($test, &reason);
        }
    };
}

struct Same(u8);
impl Source for Same {
    fn size(&self) -> u64 {
        SIZE
    }
    fn read_exact_at(&self, _offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        buffer.fill(self.0);
        Ok(())
    }
}

/// Puts version k of a key; its number.
fn put(client: &Arc<Client>, key: &str, k: u8) -> u64 {
    let options = PutOptions {
        attributes: Attributes { mode: 0o644, mtime_seconds: i64::from(k), mtime_nanoseconds: 0, owner: None },
        stripe_size: 1 << 20,
        page_size: 64 << 10,
        width: 2,
        if_version: None,
    };
    let name = ObjectName::new(NAMESPACE, key.as_bytes().to_vec()).unwrap();
    client.put(&name, Arc::new(Same(k)), options).unwrap_or_else(|error| panic!("put {k}: {error}")).version
}

fn client(cluster: &Cluster) -> Arc<Client> {
    let addresses = vec![cluster.control[0].to_string()];
    Client::connect(Config { addresses, arena: 16 << 20, ..Config::default() }).unwrap()
}

fn server_counter(cluster: &Cluster, name: &str) -> u64 {
    let status = cluster.status();
    status["server"]["counters"][name].as_u64().unwrap_or_else(|| panic!("no counter {name}"))
}

/// Waits until a server's counter is so.
fn counts(cluster: &Cluster, name: &str, wanted: impl Fn(u64) -> bool) {
    eventually(&format!("the server's {name}"), SOON, || {
        let found = server_counter(cluster, name);
        if wanted(found) { Ok(()) } else { Err(format!("is {found}")) }
    });
}

/// Waits until the server has reclaimed something superseded later than all that is kept.
fn reclaim_passes(cluster: &Cluster, client: &Arc<Client>) {
    let before = server_counter(cluster, "versions_reclaimed");
    put(client, "other", 1);
    put(client, "other", 2);
    counts(cluster, "versions_reclaimed", |now| now > before);
}

fn form(mount: &Mount) -> String {
    let status = mount.status();
    format!("{} {}", status["mount"]["mode"], status["mount"]["io"]).replace('"', "")
}

#[test]
fn every_way_of_reading_gives_every_byte_in_every_mode() {
    need_reader!("every_way_of_reading_gives_every_byte_in_every_mode");
    let mut cluster = Cluster::start(&Plan::default());
    let writer = client(&cluster);
    let version = put(&writer, "k", 7);
    for options in FORMS.into_iter().chain([""]) {
        let mount = cluster.mount("", format!("arena=16MiB,{options}").trim_end_matches(','));
        if !options.is_empty() {
            let io = if options.contains("direct") { "direct" } else { "cached" };
            let mode = if options.contains("snapshot") { "snapshot" } else { "strict" };
            assert_eq!(form(&mount), format!("{mode} {io}"));
        }
        let mut reader = Reader::start();
        assert_eq!(reader.open(&mount.at("k")), Ok((version, SIZE)), "{options}");
        for method in READS.into_iter().chain(FILLS) {
            for (offset, length) in [(0, 4096), (1, 100_000), (MIB - 1, 2), (2 * MIB + 5, SIZE as usize), (SIZE - 1, 1)]
            {
                assert_eq!(
                    reader.get(method, offset, length),
                    Got::Byte(7),
                    "{options}: {method} {length} at {offset}"
                );
            }
        }
        // Between file systems the kernel refuses, and programs copy by themselves; where it copies, it is right.
        match reader.get("copy", 0, SIZE as usize) {
            Got::Byte(byte) => assert_eq!(byte, 7),
            Got::Other(errno) => assert_eq!(errno, "EXDEV", "{options}"),
            Got::Sigbus => panic!("{options}"),
        }
        let copy = cluster.root.path().join("copy");
        run(Command::new("cp").arg(mount.at("k")).arg(&copy), SOON).expect(0);
        assert_eq!(std::fs::read(&copy).unwrap(), vec![7; SIZE as usize]);
        reader.close();
        assert_quiet(&cluster, &[&mount]);
        mount.stop();
    }
    writer.close();
}

#[test]
fn programs_and_libraries_run_from_the_mount_in_every_mode() {
    need_mount!("programs_and_libraries_run_from_the_mount_in_every_mode");
    let mut cluster = Cluster::start(&Plan::default());
    let source = cluster.root.path().join("source");
    std::fs::create_dir(&source).unwrap();
    std::fs::copy("/bin/cat", source.join("program")).unwrap();
    std::fs::set_permissions(source.join("program"), std::fs::Permissions::from_mode(0o755)).unwrap();
    // Any library that the program needs will do.
    let maps = run(Command::new("/bin/cat").arg("/proc/self/maps"), SOON).expect(0).out();
    let library = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(|path| path.contains("libc.so"));
    let library = library.expect("cat uses libc").to_owned();
    std::fs::copy(&library, source.join("libc.so.6")).unwrap();
    cluster.cli(&["put".as_ref(), source.as_os_str(), cluster.url("bin/").as_ref()]).expect(0);
    for options in FORMS {
        let mount = cluster.mount("", options);
        let program = mount.at("bin/program");
        let maps = run(Command::new(&program).arg("/proc/self/maps"), SOON).expect(0).out();
        assert!(maps.contains(&program.display().to_string()), "{options}: {maps}");
        let mut with_library = Command::new(&program);
        let maps =
            run(with_library.arg("/proc/self/maps").env("LD_LIBRARY_PATH", mount.at("bin")), SOON).expect(0).out();
        assert!(maps.contains(&mount.at("bin/libc.so.6").display().to_string()), "{options}: {maps}");
        assert_quiet(&cluster, &[&mount]);
        mount.stop();
    }
}

#[test]
fn i3_a_mapping_keeps_its_version_after_a_replace_while_reads_of_the_same_descriptor_are_stale() {
    need_reader!("i3_a_mapping_keeps_its_version_after_a_replace_while_reads_of_the_same_descriptor_are_stale");
    for options in ["io=direct", "io=cached"] {
        let mut cluster = Cluster::start(&Plan { retention: "200 ms", ..Plan::default() });
        let writer = client(&cluster);
        put(&writer, "k", 1);
        let mount = cluster.mount("", &format!("arena=16MiB,{options}"));
        let mut reader = Reader::start();
        reader.open(&mount.at("k")).unwrap();
        assert_eq!(reader.get("shared", 0, 1), Got::Byte(1));
        counts(&cluster, "pins", |pins| pins == 1);
        put(&writer, "k", 2);
        reclaim_passes(&cluster, &writer);
        for method in READS {
            assert_eq!(reader.get(method, 0, 4096), Got::Other("ESTALE".to_owned()), "{options}: {method}");
        }
        // Pages that nobody has read yet, too.
        for method in FILLS {
            assert_eq!(reader.get(method, MIB + 77, 2 * MIB as usize), Got::Byte(1), "{options}: {method}");
        }
        assert_eq!(reader.get("pread", SIZE, 1), Got::Other("ESTALE".to_owned()), "{options}: at the end");
        // In the direct form within `metadata_ttl`.
        eventually("fstat is stale", SOON, || match reader.fstat() {
            stale if stale == "ESTALE" => Ok(()),
            other if options == "io=direct" => Err(other),
            other => panic!("{options}: fstat gives {other}"),
        });
        assert!(server_counter(&cluster, "superseded_versions") >= 1);
        reader.close();
        counts(&cluster, "pins", |pins| pins == 0);
        reader.open(&mount.at("k")).unwrap();
        for method in READS.into_iter().chain(FILLS) {
            assert_eq!(reader.get(method, MIB, 100_000), Got::Byte(2), "{options}: {method}");
        }
        reader.close();
        writer.close();
        assert_quiet(&cluster, &[&mount]);
        mount.stop();
    }
}

#[test]
fn i8_a_snapshot_is_whole_after_a_replace_and_until_it_is_closed_and_is_reclaimed_then() {
    need_reader!("i8_a_snapshot_is_whole_after_a_replace_and_until_it_is_closed_and_is_reclaimed_then");
    for options in ["mode=snapshot", "mode=snapshot,io=direct"] {
        let mut cluster = Cluster::start(&Plan { retention: "0 s", ..Plan::default() });
        let mut writer = client(&cluster);
        let old = put(&writer, "k", 1);
        let mount = cluster.mount("", &format!("arena=16MiB,{options}"));
        let mut reader = Reader::start();
        reader.open(&mount.at("k")).unwrap();
        counts(&cluster, "pins", |pins| pins == 1);
        put(&writer, "k", 2);
        writer.delete(&ObjectName::new(NAMESPACE, &b"k"[..]).unwrap(), None).unwrap();
        reclaim_passes(&cluster, &writer);
        assert_eq!(reader.get("pread", 0, 4096), Got::Byte(1), "{options}");
        assert_eq!(reader.fstat(), old.to_string(), "{options}: fstat of what is open");
        // The server goes and comes: its successor waits until the pins are said again.
        cluster.kill();
        cluster.serve();
        writer.close();
        writer = client(&cluster);
        counts(&cluster, "pins", |pins| pins == 1);
        reclaim_passes(&cluster, &writer);
        for method in READS.into_iter().chain(FILLS) {
            assert_eq!(reader.get(method, 3, SIZE as usize), Got::Byte(1), "{options}: {method}");
        }
        assert!(!mount.at("k").exists(), "a new open is of what is there now");
        reader.close();
        counts(&cluster, "pins", |pins| pins == 0);
        counts(&cluster, "superseded_versions", |versions| versions == 0);
        writer.close();
        assert_quiet(&cluster, &[&mount]);
        mount.stop();
    }
}

#[test]
fn i8_pins_that_are_not_renewed_lapse_and_what_is_reclaimed_then_is_estale() {
    need_reader!("i8_pins_that_are_not_renewed_lapse_and_what_is_reclaimed_then_is_estale");
    let mut cluster = Cluster::start(&Plan { retention: "0 s", ..Plan::default() });
    let writer = client(&cluster);
    put(&writer, "k", 1);
    let mount = cluster.mount("", "arena=16MiB,mode=snapshot,io=direct");
    let mut reader = Reader::start();
    reader.open(&mount.at("k")).unwrap();
    counts(&cluster, "pins", |pins| pins == 1);
    put(&writer, "k", 2);
    let pid = Pid::from_raw(i32::try_from(mount.pid()).unwrap()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    counts(&cluster, "pins_lapsed", |lapsed| lapsed == 1);
    counts(&cluster, "superseded_versions", |versions| versions == 0);
    kill_process(pid, Signal::CONT).unwrap();
    assert_eq!(reader.get("pread", 0, 4096), Got::Other("ESTALE".to_owned()), "never EIO");
    wait::until("the client knows that its pin is lost", SOON, || mount.counter("pins_lost") == 1);
    reader.close();
    reader.open(&mount.at("k")).unwrap();
    assert_eq!(reader.get("pread", 0, 4096), Got::Byte(2));
    reader.close();
    writer.close();
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

#[test]
fn i6_pins_are_capped_and_a_snapshot_over_the_cap_is_refused() {
    need_mount!("i6_pins_are_capped_and_a_snapshot_over_the_cap_is_refused");
    let mut cluster = Cluster::start(&Plan::default());
    // One client may have half of four.
    let config = std::fs::read_to_string(cluster.config()).unwrap();
    std::fs::write(cluster.config(), config.replace("[retention]\n", "[retention]\nmax_pins = 4\n")).unwrap();
    cluster.stop();
    cluster.serve();
    let writer = client(&cluster);
    (0..4u8).for_each(|k| _ = put(&writer, &format!("k{k}"), k + 1));
    let mount = cluster.mount("", "arena=16MiB,mode=snapshot");
    let files: Vec<_> = (0..2).map(|k| std::fs::File::open(mount.at(&format!("k{k}"))).unwrap()).collect();
    let refused = std::fs::File::open(mount.at("k2")).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(rustix::io::Errno::NOMEM.raw_os_error()));
    wait::until("the log says what to do", SOON, || mount.logged().contains("retention.max_pins"));
    assert_eq!((server_counter(&cluster, "pins"), server_counter(&cluster, "pins_refused")), (2, 1));
    drop(files);
    eventually("there is room again", SOON, || std::fs::File::open(mount.at("k2")).map_err(|error| error.to_string()));
    writer.close();
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

/// What the writer has said so far.
#[derive(Default)]
struct Said {
    begun: AtomicU64,
    acknowledged: AtomicU64,
    done: AtomicBool,
}

struct Done<'a>(&'a Said);
impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.done.store(true, SeqCst);
    }
}

#[derive(Debug, Default)]
struct Seen {
    calls: u64,
    stale: u64,
    stale_opens: u64,
    opens: u64,
    versions: std::collections::BTreeSet<u8>,
}

/// Random calls at random places until the writer is done; each byte must be explained by the one version that was opened.
fn reads(path: &Path, said: &Said, snapshot: bool, seed: u64) -> Seen {
    let (mut seen, mut random) = (Seen::default(), Random::new(seed));
    let mut reader = Reader::start();
    let over = || said.done.load(SeqCst);
    while !over() {
        let before = said.acknowledged.load(SeqCst);
        if let Err(errno) = reader.open(path) {
            assert_eq!(errno, "ESTALE", "two replaces within one open");
            seen.stale_opens += 1;
            continue;
        }
        seen.opens += 1;
        let mut of_this: Option<u8> = None;
        for _ in 0..1 + random.below(12) {
            let fill = random.below(2) == 0;
            let methods = if fill { &FILLS } else { &READS };
            let method = methods[usize::try_from(random.below(4)).unwrap()];
            let offset = random.below(SIZE);
            // One READ at most, so that a call is of one moment.
            let length = usize::try_from(1 + random.below(MIB / 2)).unwrap();
            let checked = !fill && !snapshot;
            let oldest = if checked { said.acknowledged.load(SeqCst) } else { before };
            let got = reader.get(method, offset, length);
            let newest = said.begun.load(SeqCst);
            seen.calls += 1;
            match got {
                // Versions count up to 250 and begin again: the distance to the newest tells their order.
                Got::Byte(byte) => {
                    let age = (newest % 250 + 250 - u64::from(byte) + 1) % 250;
                    let most = newest - oldest.min(newest);
                    assert!(age <= most, "{method}: {byte} is {age} versions old, {most} at most ({newest} begun)");
                    assert_eq!(*of_this.get_or_insert(byte), byte, "{method}: one descriptor is one version");
                    seen.versions.insert(byte);
                }
                Got::Other(errno) if errno == "ESTALE" && checked => {
                    seen.stale += 1;
                    if random.below(3) == 0 {
                        break;
                    }
                }
                other => panic!("{method} of {length} at {offset}: {other:?}"),
            }
            if over() {
                break;
            }
        }
        reader.close();
    }
    seen
}

fn overwrite_under_readers(test: &str, options: &str, snapshot: bool) {
    let mut cluster = Cluster::start(&Plan { retention: "5 s", ..Plan::default() });
    let writer = client(&cluster);
    let said = Said::default();
    let one = |n: u64| {
        said.begun.store(n, SeqCst);
        put(&writer, "k", u8::try_from(n % 250 + 1).unwrap());
        said.acknowledged.store(n, SeqCst);
    };
    one(1);
    let mount = cluster.mount("", &format!("arena=32MiB,{options}"));
    let path = mount.at("k");
    let (limit, between) =
        (if full() { Duration::from_secs(600) } else { Duration::from_secs(4) }, Duration::from_millis(50));
    let seen: Vec<Seen> = std::thread::scope(|scope| {
        let done = Done(&said);
        let readers: Vec<_> = (1..=2)
            .map(|seed| {
                let (path, said) = (&path, &said);
                scope.spawn(move || reads(path, said, snapshot, seed))
            })
            .collect();
        let started = Instant::now();
        let mut n = 1;
        while started.elapsed() < limit && !readers.iter().any(|reader| reader.is_finished()) {
            n += 1;
            one(n);
            // Twenty a second: the pace is the test's subject, not a wait for something.
            std::thread::sleep((between * u32::try_from(n).unwrap()).saturating_sub(started.elapsed()).min(between));
        }
        eprintln!("{test}: {n} overwrites in {:?}", started.elapsed());
        drop(done);
        readers.into_iter().map(|reader| reader.join().unwrap()).collect()
    });
    let counters = mount.status()["counters"].clone();
    for seen in &seen {
        eprintln!(
            "{test}: {} opens, {} calls, {} ESTALE ({} in open), {} versions",
            seen.opens,
            seen.calls,
            seen.stale,
            seen.stale_opens,
            seen.versions.len()
        );
        assert!(seen.versions.len() >= 5, "reader and writer did not meet");
        assert!(seen.stale == 0 || !snapshot);
    }
    eprintln!(
        "{test}: rechecks {}, fetches again {}, unchecked {}, bad pages {}",
        counters["rechecks"], counters["fetches_again"], counters["reads_unchecked"], counters["bad_pages"]
    );
    writer.close();
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

#[test]
fn i3_random_reads_under_overwrites_strict_direct() {
    need_reader!("i3_random_reads_under_overwrites_strict_direct");
    overwrite_under_readers("strict direct", "io=direct", false);
}

#[test]
fn i3_random_reads_under_overwrites_strict_cached() {
    need_reader!("i3_random_reads_under_overwrites_strict_cached");
    overwrite_under_readers("strict cached", "io=cached", false);
}

#[test]
fn i1_random_reads_under_overwrites_snapshot() {
    need_reader!("i1_random_reads_under_overwrites_snapshot");
    overwrite_under_readers("snapshot", "mode=snapshot", true);
}

#[test]
fn the_kernel_reads_ahead_as_far_as_a_read_goes_in_the_cached_form() {
    need_mount!("the_kernel_reads_ahead_as_far_as_a_read_goes_in_the_cached_form");
    if !rustix::process::geteuid().is_root() {
        return skip(
            "the_kernel_reads_ahead_as_far_as_a_read_goes_in_the_cached_form",
            "only root may set read_ahead_kb",
        );
    }
    let mut cluster = Cluster::start(&Plan::default());
    for (options, kib) in [("io=cached", 1024), ("io=direct", 128)] {
        let mount = cluster.mount("", options);
        let device = std::fs::metadata(&mount.path).unwrap().dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let found = std::fs::read_to_string(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb")).unwrap();
        assert_eq!(found.trim().parse(), Ok(kib), "{options}");
        assert_quiet(&cluster, &[&mount]);
        mount.stop();
    }
}

#[test]
fn residues_a_bind_mounted_file_and_a_name_that_changes_its_kind() {
    need_mount!("residues_a_bind_mounted_file_and_a_name_that_changes_its_kind");
    let mut cluster = Cluster::start(&Plan::default());
    let writer = client(&cluster);
    put(&writer, "k", 1);
    put(&writer, "flips", 1);
    let mount = cluster.mount("", "arena=16MiB");
    if rustix::process::geteuid().is_root() {
        // The bind mount keeps its inode: stale once it is replaced, and right again once it is made anew.
        let bound = cluster.root.path().join("bound");
        std::fs::write(&bound, "").unwrap();
        let script = "mount --bind \"$1\" \"$2\" && head -c1 \"$2\" && touch \"$3\" && read line && head -c1 \"$2\"";
        let flag = cluster.root.path().join("flag");
        let mut shell = Command::new("unshare");
        shell.args(["-m", "sh", "-c", script, "sh"]).arg(mount.at("k")).arg(&bound).arg(&flag);
        shell.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
        let mut shell = shell.stderr(std::process::Stdio::piped()).spawn().unwrap();
        wait::until("it is bound and read", SOON, || flag.exists());
        put(&writer, "k", 2);
        drop(std::io::Write::write_all(&mut shell.stdin.take().unwrap(), b"go\n"));
        let output = shell.wait_with_output().unwrap();
        assert_eq!(output.stdout, [1], "what was bound, and nothing of the new version");
        assert!(String::from_utf8_lossy(&output.stderr).contains("Stale file handle"));
    }
    assert!(mount.at("flips").is_file());
    writer.delete(&ObjectName::new(NAMESPACE, &b"flips"[..]).unwrap(), None).unwrap();
    put(&writer, "flips/below", 3);
    let started = Instant::now();
    wait::until("the name is a directory", SOON, || mount.at("flips").is_dir());
    eprintln!("a file was seen for {:?} after it had become a directory", started.elapsed());
    assert_eq!(std::fs::read(mount.at("flips/below")).unwrap(), vec![3; SIZE as usize]);
    writer.close();
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}
