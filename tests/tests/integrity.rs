//! What is put comes back identical: a large file, many small ones, every layout over every number of rails.

#![forbid(unsafe_code)]

use railfs_tests::cluster::{Cluster, Plan};
use railfs_tests::data::write_file;
use railfs_tests::full;
use railfs_tests::mount::Mount;
use railfs_tests::need_mount;
use railfs_tests::process::run;
use railfs_tests::quiet::assert_quiet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Gigabytes through a build for tests, on a machine that does other things.
const LONG: Duration = Duration::from_secs(900);
const MIB: u64 = 1 << 20;

#[track_caller]
fn cmp(a: &Path, b: &Path) {
    run(Command::new("cmp").args([a, b]), LONG).expect(0);
}

/// Bytes received by each rail while something is done.
fn during(mount: &Mount, work: impl FnOnce()) -> Vec<u64> {
    let before = mount.received();
    work();
    mount.received().iter().zip(&before).map(|(after, before)| after - before).collect()
}

/// All bytes came over rails, and each rail carried at least half of its share.
fn shares(received: &[u64], size: u64, what: &str) -> Result<(), String> {
    let total: u64 = received.iter().sum();
    assert!(total >= size, "{what}: {total} bytes over rails for a file of {size}");
    let least = 0.5 / received.len() as f64;
    for (rail, bytes) in received.iter().enumerate() {
        let share = *bytes as f64 / total as f64;
        if share < least {
            return Err(format!(
                "{what}: rail {rail} carried {share:.3} of the bytes, at least {least:.3} is wanted: {received:?}"
            ));
        }
    }
    Ok(())
}

/// Files that really exist, up to so many; made ones where there are none.
fn small_files(root: &Path, most: usize) -> PathBuf {
    let tree = root.join("small");
    let script = format!(
        "mkdir -p '{0}'; cd /usr/share/doc 2>/dev/null && find . -type f -size -400k | sort | head -{most} | tar -cf - -T - | tar -xf - -C '{0}'",
        tree.display()
    );
    let _ = run(Command::new("bash").args(["-c", &script]), LONG);
    let found = run(Command::new("find").arg(&tree).args(["-type", "f"]), LONG).out().lines().count();
    for number in found..most.min(1000) {
        let directory = tree.join(format!("made-{:02}", number % 40));
        std::fs::create_dir_all(&directory).unwrap();
        write_file(&directory.join(format!("{number}.txt")), number as u64, (number as u64 * 7919) % 60_000);
    }
    tree
}

#[test]
fn a_large_file_and_many_small_ones_come_back_identical() {
    need_mount!("a_large_file_and_many_small_ones_come_back_identical");
    let mut cluster = Cluster::start(&Plan { directories: 2, rails: 2, ..Plan::default() });
    let size = if full() { 2 << 30 } else { 96 * MIB + 12_345 };
    let large = cluster.root.path().join("large");
    write_file(&large, 3, size);
    let tree = small_files(cluster.root.path(), if full() { 100_000 } else { 1000 });
    let started = Instant::now();
    cluster.put(&large, "large");
    let put = started.elapsed();
    cluster.put(&tree, "small/");
    eprintln!("put: {} MiB in {put:?}, small files in {:?}", size / MIB, started.elapsed() - put);

    let mount = cluster.mount("", "");
    for round in ["cold", "warm"] {
        let started = Instant::now();
        let received = during(&mount, || cmp(&large, &mount.at("large")));
        eprintln!("{round}: {} MiB compared in {:?}, received {received:?}", size / MIB, started.elapsed());
        if round == "cold" {
            shares(&received, size, "the large file").unwrap_or_else(|why| panic!("{why}"));
        } else if size < 200 * MIB {
            assert_eq!(received.iter().sum::<u64>(), 0, "what fits into the arena is read once");
        }
    }
    for round in ["cold", "warm"] {
        let started = Instant::now();
        run(Command::new("diff").arg("-r").args([&tree, &mount.at("small")]), LONG).expect(0);
        eprintln!("{round}: small files compared in {:?}", started.elapsed());
    }
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

#[test]
fn i10_nine_layouts_over_one_two_and_four_rails() {
    need_mount!("i10_nine_layouts_over_one_two_and_four_rails");
    let mut cluster = Cluster::start(&Plan { directories: 3, rails: 4, ..Plan::default() });
    let size = if full() { 512 * MIB + 4097 } else { 40 * MIB + 4097 };
    let file = cluster.root.path().join("file");
    write_file(&file, 8, size);
    let layouts: Vec<(&str, u32)> =
        ["64KiB", "1MiB", "4MiB"].into_iter().flat_map(|stripe| (1..=3).map(move |width| (stripe, width))).collect();
    for (stripe, width) in &layouts {
        let url = cluster.url(format!("{stripe}-{width}"));
        let width = width.to_string();
        let layout = ["put", "--stripe-size", stripe, "--width", &width].map(std::ffi::OsStr::new);
        run(cluster.railfs().args(layout).args([file.as_os_str(), url.as_ref()]), LONG).expect(0);
    }
    for rails in [4, 2, 1] {
        cluster.stop();
        cluster.set_rails(rails);
        cluster.serve();
        let mut mount = cluster.mount("", "arena=128MiB");
        assert_eq!(mount.received().len(), rails);
        let mut unlucky = 0;
        for (stripe, width) in &layouts {
            let name = format!("{stripe}-{width}");
            let what = format!("stripe {stripe}, width {width}, {rails} rails");
            loop {
                let started = Instant::now();
                let received = during(&mount, || cmp(&file, &mount.at(&name)));
                eprintln!("{what}: {:?}, received {received:?}", started.elapsed());
                let Err(why) = shares(&received, size, &what) else { break };
                // A tenth of a second says little of a rail on a machine whose cores have other work: cold, once more.
                unlucky += 1;
                assert!(unlucky <= 2 && !full(), "{why}");
                eprintln!("{why}");
                mount.stop();
                mount = cluster.mount("", "arena=128MiB");
            }
        }
        // Warm: what was read last is still there.
        let (stripe, width) = layouts.last().copied().unwrap();
        let received = during(&mount, || cmp(&file, &mount.at(&format!("{stripe}-{width}"))));
        assert!(full() || received.iter().sum::<u64>() == 0, "warm: {received:?}");
        assert_quiet(&cluster, &[&mount]);
        mount.stop();
    }
}
