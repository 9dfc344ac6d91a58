//! Puts of one key at once, puts against deletes, and what a mount sees of a replacement, when (S22, S35).

#![forbid(unsafe_code)]

use railfs_engine::error::Error;
use railfs_tests::cluster::{Cluster, Plan};
use railfs_tests::data::{assert_file, bytes, write_file};
use railfs_tests::mount::Mount;
use railfs_tests::putter::Putter;
use railfs_tests::quiet::{assert_quiet, debris};
use railfs_tests::shell::shell;
use railfs_tests::wait::{self, eventually};
use railfs_tests::{full, need_mount};
use rustix::io::Errno;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// How long the kernel may answer a name by itself.
const TTL: Duration = Duration::from_secs(1);
const O_DIRECT: i32 = 0o40000;

/// Puts of one key at one instant; what became of each.
fn at_once(putters: &[Putter], key: &str, round: u64) -> Vec<(u64, u64, bool, u64)> {
    let barrier = Barrier::new(putters.len());
    std::thread::scope(|scope| {
        let running: Vec<_> = putters
            .iter()
            .zip(0u64..)
            .map(|(putter, which)| {
                let barrier = &barrier;
                scope.spawn(move || {
                    let seed = round * 100 + which;
                    let size = (which * 700_001 + round * 4099) % 3_000_000;
                    barrier.wait();
                    let done = putter.try_put(key, seed, size).unwrap_or_else(|error| panic!("put: {error}"));
                    (seed, size, done.superseded, done.version)
                })
            })
            .collect();
        running.into_iter().map(|put| put.join().unwrap()).collect()
    })
}

#[test]
fn s35_of_puts_of_one_key_at_once_one_wins_whole_and_the_others_say_so() {
    need_mount!("s35_of_puts_of_one_key_at_once_one_wins_whole_and_the_others_say_so");
    let rounds = if full() { 200 } else { 25 };
    let mut cluster = Cluster::start(&Plan { directories: 3, ..Plan::default() });
    let putters: Vec<Putter> = (0..8).map(|_| Putter::new(&cluster)).collect();
    let mount = cluster.mount("", "arena=16MiB,metadata_ttl=0s");
    let mut superseded = 0;
    for (count, key) in [(2, "two"), (8, "eight")] {
        for round in 0..rounds {
            let done = at_once(&putters[..count], key, round);
            // Ordered by versions: the highest stays, and who came later than it is ordered before it.
            let (seed, size, lost, version) = done.iter().copied().max_by_key(|put| put.3).unwrap();
            assert!(!lost, "the newest cannot be superseded: {done:?}");
            superseded += done.iter().filter(|put| put.2).count();
            assert_file(&mount.at(key), seed, size);
            let meta = std::fs::File::open(mount.at(key)).unwrap().metadata().unwrap();
            assert_eq!((meta.ino(), meta.len()), (version, size));
        }
    }
    eprintln!("{superseded} of {} puts were superseded at once", rounds * 10);
    // Nothing of the losers stays.
    eventually("no debris", Duration::from_secs(30), || {
        let debris = debris(&cluster)?;
        if debris.is_empty() { Ok(()) } else { Err(format!("{debris:?}")) }
    });
    drop(putters);
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

#[test]
fn s35_a_put_and_a_delete_at_once_and_the_same_put_twice() {
    need_mount!("s35_a_put_and_a_delete_at_once_and_the_same_put_twice");
    let rounds = if full() { 200 } else { 30 };
    let mut cluster = Cluster::start(&Plan::default());
    let (putter, deleter) = (Putter::new(&cluster), Putter::new(&cluster));
    let mount = cluster.mount("", "arena=16MiB,metadata_ttl=0s");
    let (mut stayed, mut gone) = (0, 0);
    for round in 0..rounds {
        putter.put("k", 1, 10);
        let barrier = Barrier::new(2);
        let (deleted, put) = std::thread::scope(|scope| {
            let put = scope.spawn(|| {
                barrier.wait();
                putter.try_put("k", round, 1000 + round)
            });
            barrier.wait();
            (deleter.delete("k"), put.join().unwrap())
        });
        let put = put.unwrap_or_else(|error| panic!("put: {error}"));
        let deleted = deleted.unwrap_or_else(|error| panic!("delete: {error}"));
        // The delete took the first object or the second; whichever is newer decides.
        match std::fs::metadata(mount.at("k")).map_err(|error| error.raw_os_error()) {
            Ok(meta) => {
                assert_eq!(meta.ino(), put.version, "the put that was acknowledged");
                assert!(deleted < put.version);
                assert_file(&mount.at("k"), round, 1000 + round);
                stayed += 1;
            }
            Err(code) => {
                assert_eq!(code, Some(Errno::NOENT.raw_os_error()));
                gone += 1;
            }
        }
    }
    eprintln!("{stayed} puts stayed, {gone} were deleted");
    // From the command line: the same again is done again, and what each says is documented.
    let source = cluster.root.path().join("source");
    write_file(&source, 9, 500_000);
    for _ in 0..2 {
        cluster.put(&source, "same");
        assert_file(&mount.at("same"), 9, 500_000);
    }
    let both = shell(&mount, &source, &{
        let (url, railfs) = (cluster.url("same"), railfs_tests::process::program("railfs").display().to_string());
        format!(
            "p=; for i in 1 2 3 4; do {railfs} put $S '{url}' & p=\"$p $!\"; done; for i in $p; do wait $i; done; cmp $S $M/same"
        )
    });
    both.expect(0);
    drop((putter, deleter));
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

/// One look at a name, by one way: which version's bytes, whole; `None`: there is nothing.
fn look(mount: &Mount, key: &str, way: &str, versions: &[(u64, u64)]) -> Option<usize> {
    let path = mount.at(key);
    let got = match way {
        "read" => std::fs::read(&path),
        "direct" => std::fs::OpenOptions::new().read(true).custom_flags(O_DIRECT).open(&path).and_then(|mut file| {
            let mut got = Vec::new();
            std::io::Read::read_to_end(&mut file, &mut got).map(|_| got)
        }),
        _ => {
            let script = "import mmap, os, sys\nfd=os.open(sys.argv[1], os.O_RDONLY)\nsys.stdout.buffer.write(mmap.mmap(fd,0,mmap.MAP_SHARED,mmap.PROT_READ)[:])";
            let output = std::process::Command::new("python3").args(["-c", script]).arg(&path).output().unwrap();
            let missing = String::from_utf8_lossy(&output.stderr).contains("FileNotFoundError");
            if missing { Err(Errno::NOENT.into()) } else { Ok(output.stdout) }
        }
    };
    match got {
        Ok(got) => {
            let found = versions.iter().position(|&(seed, size)| bytes(seed, size as usize) == got);
            Some(found.unwrap_or_else(|| panic!("{way}: {} bytes that are of no version", got.len())))
        }
        Err(error) => {
            assert_eq!(error.raw_os_error(), Some(Errno::NOENT.raw_os_error()), "{way}: {error}");
            None
        }
    }
}

#[test]
fn s22_a_replacement_is_seen_whole_and_at_once_by_every_way_of_reading() {
    need_mount!("s22_a_replacement_is_seen_whole_and_at_once_by_every_way_of_reading");
    let mut cluster = Cluster::start(&Plan::default());
    let putter = Putter::new(&cluster);
    for options in ["", "metadata_ttl=0s"] {
        let mount = cluster.mount("", options);
        for (case, next) in [("larger", 900_000), ("smaller", 100), ("same", 300_000)] {
            for way in ["read", "direct", "mmap"] {
                let key = format!("{case}/{way}");
                let versions = [(1, 300_000), (2, next)];
                putter.put(&key, 1, 300_000);
                assert_eq!(look(&mount, &key, way, &versions[..1]), Some(0));
                putter.put(&key, 2, next);
                // What opens after the put was acknowledged has the new bytes, from the first moment to beyond every TTL.
                let started = Instant::now();
                let mut looks = 0;
                while looks < 3 || (way == "read" && case == "same" && started.elapsed() < TTL + TTL / 10) {
                    assert_eq!(look(&mount, &key, way, &versions), Some(1), "{key} after {:?}", started.elapsed());
                    looks += 1;
                }
                // A stat without an open may be as old as the TTL, not older.
                wait::until("stat has the new size", TTL + Duration::from_secs(3), || {
                    mount.at(&key).metadata().is_ok_and(|meta| meta.len() == next)
                });
            }
        }
        // Deleted: gone at once for who opens; put again: there at once, no ghost and no memory of its absence.
        putter.put("d/k", 1, 1000);
        assert_eq!(look(&mount, "d/k", "read", &[(1, 1000)]), Some(0));
        putter.delete("d/k").unwrap();
        assert_eq!(look(&mount, "d/k", "read", &[(1, 1000)]), None);
        assert!(!mount.at("d/k").exists());
        putter.put("d/k", 3, 2000);
        assert_eq!(look(&mount, "d/k", "read", &[(1, 1000), (3, 2000)]), Some(1));
        assert!(!mount.at("d/other").exists());
        putter.put("d/other", 4, 10);
        assert_eq!(look(&mount, "d/other", "read", &[(4, 10)]), Some(0));
        for key in ["d/k", "d/other"] {
            putter.delete(key).unwrap();
        }
        wait::until("the directory is gone", TTL + Duration::from_secs(3), || !mount.at("d").exists());
        assert_quiet(&cluster, &[&mount]);
        mount.stop();
    }
    // Conditions that fail are conflicts.
    let conflict = putter.client.put(
        &Putter::name("larger/read"),
        std::sync::Arc::new(railfs_tests::putter::Made { seed: 1, size: 1 }),
        railfs_engine::client::PutOptions { if_version: Some(0), ..railfs_tests::putter::options() },
    );
    assert!(matches!(conflict, Err(Error::Conflict { .. })), "{conflict:?}");
    drop(putter);
    assert_quiet(&cluster, &[]);
}
