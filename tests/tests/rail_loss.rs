//! A rail's address or link is taken away in the middle of a `cat`, the URL's own too, and comes back.

#![forbid(unsafe_code)]

use railfs_tests::cluster::{Cluster, Plan};
use railfs_tests::data::{Random, assert_file, fill, write_file};
use railfs_tests::mount::Mount;
use railfs_tests::netns::cannot;
use railfs_tests::process::Process;
use railfs_tests::quiet::{assert_quiet, components};
use railfs_tests::wait::{self, eventually};
use railfs_tests::{full, need_mount, skip};
use rustix::io::Errno;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// A rail that died is noticed, retired and tried again within this.
const LIMIT: Duration = Duration::from_secs(30);

/// How a rail is taken away and given back.
#[derive(Clone, Copy, Debug)]
enum Way {
    Link,
    Address,
}

fn set(cluster: &Cluster, way: Way, rail: usize, there: bool) {
    match way {
        Way::Link => cluster.network().link(rail, there),
        Way::Address => cluster.network().have_address(rail, there),
    }
}

/// Reads on until `end` and compares.
#[track_caller]
fn expect_bytes(pipe: &mut dyn Read, from: u64, end: u64, seed: u64) {
    let (mut buffer, mut want) = (vec![0; MIB as usize], vec![0; MIB as usize]);
    let mut at = from;
    while at < end {
        let piece = (end - at).min(MIB) as usize;
        pipe.read_exact(&mut buffer[..piece]).unwrap_or_else(|error| panic!("at {at}: {error}"));
        fill(seed, at, &mut want[..piece]);
        assert!(buffer[..piece] == want[..piece], "bytes differ between {at} and {}", at + piece as u64);
        at += piece as u64;
    }
}

fn wait_for_state(mount: &Mount, rail: usize, wanted: &[&str]) {
    eventually(&format!("rail {rail} is {wanted:?}"), LIMIT, || {
        let status = mount.try_status()?;
        let state = status["rails"][rail - 1]["state"].as_str().unwrap_or_default().to_owned();
        if wanted.contains(&&*state) { Ok(()) } else { Err(format!("it is {state}: {}", status["rails"])) }
    });
}

fn lose_in_mid_cat(cluster: &Cluster, mount: &Mount, name: &str, way: Way, lost: usize, size: u64) {
    let seed = 5;
    let others = |received: &[u64]| {
        received.iter().enumerate().filter(|(rail, _)| rail + 1 != lost).map(|(_, b)| b).sum::<u64>()
    };
    let start = mount.received();
    let mut cat = Process::start(Command::new("cat").arg(mount.at(name)).stdout(Stdio::piped()));
    let mut pipe = cat.child().stdout.take().unwrap();
    expect_bytes(&mut pipe, 0, size / 3, seed);
    let before = mount.received();
    assert!(before[lost - 1] > start[lost - 1], "{way:?}: rail {lost} carried nothing before: {start:?} {before:?}");
    // The pipe holds the reader back: what is read ahead is far from the end.
    set(cluster, way, lost, false);
    let taken = Instant::now();
    expect_bytes(&mut pipe, size / 3, size / 2, seed);
    eprintln!("{way:?} of rail {lost}: the next sixth took {:?}", taken.elapsed());
    wait_for_state(mount, lost, &["down", "suspect", "connecting", "probing"]);
    let stopped = mount.received();
    expect_bytes(&mut pipe, size / 2, size, seed);
    assert_eq!(pipe.read(&mut [0; 1]).unwrap(), 0, "the end of the file");
    assert!(cat.wait(wait::SOON).success());
    let after = mount.received();
    assert_eq!(after[lost - 1], stopped[lost - 1], "{way:?}: rail {lost} stopped in mid-file");
    assert!(after[lost - 1] - start[lost - 1] < size / 2, "{way:?}: {start:?} {after:?}");
    assert!(others(&after) > others(&stopped), "{way:?}: the others go on: {stopped:?} {after:?}");
    // `status` says so, with the reason, until it is back; also as text.
    wait_for_state(mount, lost, &["down"]);
    let reason = mount.rails("reason")[lost - 1].clone();
    assert!(reason.as_str().is_some_and(|reason| !reason.is_empty()), "a rail that is down says why");
    let status = mount.status();
    assert!(status["mount"]["degraded"].as_array().is_some_and(|lines| !lines.is_empty()), "{}", status["mount"]);

    set(cluster, way, lost, true);
    wait_for_state(mount, lost, &["up"]);
}

#[test]
fn i10_a_rail_taken_away_in_mid_cat_costs_nothing_but_its_share() {
    let test = "i10_a_rail_taken_away_in_mid_cat_costs_nothing_but_its_share";
    need_mount!(test);
    if let Some(reason) = cannot() {
        return skip(test, &reason);
    }
    let mut cluster = Cluster::start(&Plan { rails: 2, network: true, ..Plan::default() });
    let size = if full() { 1024 * MIB } else { 160 * MIB };
    let file = cluster.root.path().join("file");
    write_file(&file, 5, size);
    let cases = [(Way::Link, 2), (Way::Address, 2), (Way::Link, 1), (Way::Address, 1)];
    let cases = if full() { &cases[..] } else { &cases[1..3] };
    cluster.put(&file, "f");
    // Smaller than the file, so that every pass is cold.
    let mount = cluster.mount("", "arena=48MiB");
    for (way, lost) in cases {
        lose_in_mid_cat(&cluster, &mount, "f", *way, *lost, size);
    }
    // All ports again, by itself: the rails share a read as they did before the first of them was lost.
    let before = mount.received();
    let mut cat = Process::start(Command::new("cat").arg(mount.at("f")).stdout(Stdio::piped()));
    let mut pipe = cat.child().stdout.take().unwrap();
    expect_bytes(&mut pipe, 0, size, 5);
    drop(pipe);
    let after = mount.received();
    for (rail, (before, after)) in before.iter().zip(&after).enumerate() {
        assert!(after - before > size / 3, "rail {} carried {} of {size} after its return", rail + 1, after - before);
    }
    // Opens and puts too survived the loss of the URL's own address: they work by any other.
    cluster.network().have_address(1, false);
    eventually("a new open without the URL's address", LIMIT, || {
        std::fs::metadata(mount.at("f")).map(|meta| assert_eq!(meta.len(), size)).map_err(|error| error.to_string())
    });
    cluster.network().have_address(1, true);
    wait_for_state(&mount, 1, &["up"]);
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

#[test]
fn i10_a_put_goes_on_when_a_rail_is_lost() {
    let test = "i10_a_put_goes_on_when_a_rail_is_lost";
    if let Some(reason) = cannot() {
        return skip(test, &reason);
    }
    let cluster = Cluster::start(&Plan { rails: 2, network: true, ..Plan::default() });
    let size = 256 * MIB;
    let file = cluster.root.path().join("file");
    write_file(&file, 6, size);
    // The other rail, and the one of the URL's own address: the control connection goes with it.
    for (lost, key) in [(2, "other"), (1, "own")] {
        let before = components(&cluster).unwrap().len();
        let mut command = cluster.railfs();
        command.arg("put").arg(&file).arg(cluster.url(key)).stdout(Stdio::null());
        let mut put = Process::start(&mut command);
        wait::until("bytes arrive", wait::SOON, || components(&cluster).unwrap().len() > before);
        cluster.network().link(lost, false);
        let taken = Instant::now();
        let status = put.wait(LIMIT);
        eprintln!("rail {lost} lost: the put ended {:?} later", taken.elapsed());
        assert!(status.success(), "rail {lost} lost in mid-put: it ended with {status}");
        cluster.network().link(lost, true);
        let back = cluster.root.path().join("back");
        cluster.cli(&["get".as_ref(), cluster.url(key).as_ref(), back.as_os_str()]).expect(0);
        assert_file(&back, 6, size);
    }
    assert_quiet(&cluster, &[]);
}

#[test]
fn s28_rails_that_come_and_go_cost_no_read() {
    let test = "s28_rails_that_come_and_go_cost_no_read";
    need_mount!(test);
    if let Some(reason) = cannot() {
        return skip(test, &reason);
    }
    let mut cluster = Cluster::start(&Plan { rails: 3, network: true, ..Plan::default() });
    let size = 64 * MIB;
    let file = cluster.root.path().join("file");
    write_file(&file, 7, size);
    cluster.put(&file, "f");
    let mount = cluster.mount("", "arena=24MiB");
    let over = std::sync::atomic::AtomicBool::new(false);
    struct Over<'a>(&'a std::sync::atomic::AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, std::sync::atomic::Ordering::Relaxed);
        }
    }
    std::thread::scope(|scope| {
        let end = Over(&over);
        let reader = scope.spawn(|| {
            let mut passes = 0;
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                assert_file(&mount.at("f"), 7, size);
                passes += 1;
            }
            passes
        });
        // One rail is down at a time, each for as long as it takes the client to see it (or, sometimes, not so long).
        let mut random = Random::new(1);
        for _ in 0..if full() { 30 } else { 6 } {
            let lost = 1 + random.below(3) as usize;
            let way = if random.below(2) == 0 { Way::Link } else { Way::Address };
            set(&cluster, way, lost, false);
            if random.below(3) > 0 {
                wait_for_state(&mount, lost, &["down"]);
            }
            set(&cluster, way, lost, true);
            wait_for_state(&mount, lost, &["up"]);
        }
        drop(end);
        let passes = reader.join().unwrap();
        eprintln!("{passes} passes over the file");
        assert!(passes > 0);
    });
    assert_eq!(mount.counter("reads_failed"), 0);
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

#[test]
fn s28_with_every_rail_down_a_read_ends_in_time_and_one_that_returns_is_enough() {
    let test = "s28_with_every_rail_down_a_read_ends_in_time_and_one_that_returns_is_enough";
    need_mount!(test);
    if let Some(reason) = cannot() {
        return skip(test, &reason);
    }
    let mut cluster = Cluster::start(&Plan { rails: 2, network: true, ..Plan::default() });
    let size = 24 * MIB;
    let path = cluster.root.path().join("file");
    write_file(&path, 9, size);
    cluster.put(&path, "f");
    let mount = cluster.mount("", "arena=8MiB,readahead=0,read_timeout=3s,metadata_timeout=3s");
    let file = std::fs::File::open(mount.at("f")).unwrap();
    let (mut buffer, mut want) = (vec![0; MIB as usize], vec![0; MIB as usize]);
    assert_eq!(file.read_at(&mut buffer, 0).unwrap() as u64, MIB);
    for rail in [1, 2] {
        set(&cluster, Way::Link, rail, false);
    }
    for offset in [10 * MIB, 0] {
        let started = Instant::now();
        let error = file.read_at(&mut buffer, offset).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::TIMEDOUT.raw_os_error()), "{error}");
        assert!(started.elapsed() < Duration::from_secs(6), "{:?}", started.elapsed());
    }
    for returning in [2, 1] {
        set(&cluster, Way::Link, returning, true);
        // The same descriptor, with no more than this rail.
        eventually("reads go on", LIMIT, || file.read_at(&mut buffer, 10 * MIB).map_err(|error| error.to_string()));
        fill(9, 10 * MIB, &mut want);
        assert!(buffer == want);
        wait_for_state(&mount, returning, &["up"]);
    }
    drop(file);
    assert_file(&mount.at("f"), 9, size);
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}
