//! Long use: huge directories, many files opened one after another, numbers and times over restarts (S13, S32, S37).

#![forbid(unsafe_code)]

use railfs_tests::cluster::{Cluster, Plan};
use railfs_tests::mount::Mount;
use railfs_tests::process::{descriptors, resident, threads};
use railfs_tests::putter::Putter;
use railfs_tests::quiet::assert_quiet;
use railfs_tests::shell::{LIMIT, shell, shell_within};
use railfs_tests::wait::eventually;
use railfs_tests::{full, need_mount, need_programs, skip, wait};
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

#[track_caller]
fn sh(mount: &Mount, text: &str) -> String {
    shell(mount, Path::new("/"), text).expect(0).out()
}

/// `ls -f`, and how long it took.
fn list(mount: &Mount, directory: &str) -> (Vec<String>, Duration) {
    let started = Instant::now();
    let output = sh(mount, &format!("ls -f $M/{directory}"));
    let took = started.elapsed();
    (output.lines().map(str::to_owned).collect(), took)
}

#[test]
fn s32_each_name_of_a_huge_directory_once_in_linear_time_also_while_puts_run() {
    need_mount!("s32_each_name_of_a_huge_directory_once_in_linear_time_also_while_puts_run");
    let many: u64 = if full() { 100_000 } else { 20_000 };
    let few = many / 10;
    let mut cluster = Cluster::start(&Plan { directories: 1, rails: 1, ..Plan::default() });
    let putter = Putter::new(&cluster);
    let started = Instant::now();
    putter.put_many(0..many, 24, 0, |number| format!("many/{number:06}"));
    putter.put_many(0..few, 24, 0, |number| format!("few/{number:06}"));
    eprintln!("{} puts in {:?}", many + few, started.elapsed());
    let mount = cluster.mount("", "");
    let (names, _) = list(&mount, "few");
    assert_eq!(names.len() as u64, few + 2);
    let small = (0..3).map(|_| list(&mount, "few").1).min().unwrap_or_default();
    let mut large = Duration::MAX;
    for _ in 0..2 {
        let (names, took) = list(&mount, "many");
        large = large.min(took);
        assert_eq!(names.len() as u64, many + 2);
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len(), "each once");
    }
    eprintln!("ls of {few}: {small:?}, of {many}: {large:?}");
    assert!(large < Duration::from_secs(10), "{large:?}");
    // Linear, with room for what a machine with other work adds to a few milliseconds.
    assert!(large < small * 12 + Duration::from_millis(500), "{few} in {small:?}, {many} in {large:?}");
    assert_eq!(sh(&mount, "find $M/many -type f -printf '%i\\n' | sort -u | wc -l"), format!("{many}\n"));

    // Half read, a thousand gone, and new ones all the while: who was there throughout comes once, nobody twice.
    let mut half = std::fs::read_dir(mount.at("many")).unwrap();
    let mut seen: Vec<String> = Vec::new();
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    seen.extend(half.by_ref().take(few as usize * 5).map(name));
    let gone: BTreeSet<String> = (0..1000).map(|number| format!("{:06}", number * (many / 1000))).collect();
    std::thread::scope(|scope| {
        let delete =
            scope.spawn(|| gone.iter().for_each(|name| assert!(putter.delete(&format!("many/{name}")).is_ok())));
        let put = scope.spawn(|| putter.put_many(0..500, 4, 0, |number| format!("many/{:06}-new", number * 7)));
        while !delete.is_finished() || !put.is_finished() {
            let (names, _) = list(&mount, "many");
            assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len(), "each once, while puts run");
            let there: BTreeSet<&str> = names.iter().map(String::as_str).collect();
            let missing = (0..many)
                .map(|number| format!("{number:06}"))
                .find(|name| !gone.contains(name) && !there.contains(&name[..]));
            assert_eq!(missing, None, "one that is there throughout");
        }
    });
    seen.extend(half.map(name));
    let there: BTreeSet<&String> = seen.iter().collect();
    assert_eq!(there.len(), seen.len(), "none twice");
    for name in (0..many).map(|number| format!("{number:06}")).filter(|name| !gone.contains(name)) {
        assert!(there.contains(&name), "{name} survived and is missing");
    }
    let (names, _) = list(&mount, "many");
    assert_eq!(names.len() as u64, many + 2 - 1000 + 500);
    drop(putter);
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

#[test]
fn s13_memory_and_descriptors_stay_where_they_are_over_rounds_of_find() {
    need_mount!("s13_memory_and_descriptors_stay_where_they_are_over_rounds_of_find");
    let (objects, rounds) = if full() { (50_000, 10) } else { (2000, 6) };
    let mut cluster = Cluster::start(&Plan::default());
    let putter = Putter::new(&cluster);
    putter.put_many(0..objects, 16, 3000, |number| format!("d{}/{number}", number % 17));
    let mount = cluster.mount("", "arena=8MiB");
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = table.lines().find(|line| line.contains(&mount.path.display().to_string())).unwrap();
    assert!(line.contains(" - fuse.railfs "), "{line}: what PRUNEFS can match");
    let base = (descriptors(mount.pid()), threads(mount.pid()));
    let server = cluster.server().pid();
    let server_base = (descriptors(server), threads(server));
    let mut memory = Vec::new();
    let limit = if full() { LIMIT * 10 } else { LIMIT };
    for _ in 0..rounds {
        let walked = shell_within(&mount, Path::new("/"), "find $M -type f -exec head -qc1 {} + | wc -c", limit);
        assert_eq!(walked.expect(0).out(), format!("{objects}\n"));
        memory.push((resident(mount.pid()), resident(server)));
    }
    eprintln!("resident KiB of mount and server, by round: {memory:?}");
    for (what, early, late) in [
        ("the mount", memory[1].0, memory[memory.len() - 1].0),
        ("the server", memory[1].1, memory[memory.len() - 1].1),
    ] {
        assert!(late <= early + early / 5 + 1024, "{what}: {early} KiB after the second round, {late} after the last");
    }
    wait::until("descriptors and threads of the mount are back", wait::SOON, || {
        descriptors(mount.pid()) <= base.0 + 2 && threads(mount.pid()) <= base.1 + 2
    });
    eventually("descriptors and threads of the server are back", wait::SOON, || {
        // Components are kept open, a bounded number of them.
        let open = cluster.try_status()?["server"]["counters"]["open_files"].as_u64().unwrap_or(0);
        let now = (descriptors(server).saturating_sub(open as usize), threads(server));
        let level = now.0 <= server_base.0 + 2 && now.1 <= server_base.1 + 2;
        if level { Ok(()) } else { Err(format!("{now:?} and {open} components open, {server_base:?} before")) }
    });
    // Memory that the kernel's own inodes hold here goes with them.
    if rustix::process::geteuid().is_root() {
        std::fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
        wait::until("inodes are forgotten", wait::SOON, || {
            mount.status()["mount"]["inodes"].as_u64().is_some_and(|inodes| inodes < 100)
        });
    }
    drop(putter);
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

/// Everything that must stay as it is.
const NUMBERS: &str =
    "cd $M; find . -type f -printf '%p %i %T@ %n %s %m\\n' | sort; find . -type d -printf '%p %i %n\\n' | sort";

#[test]
fn s37_numbers_are_unique_and_stable_over_remounts_and_restarts_and_new_with_new_content() {
    need_mount!("s37_numbers_are_unique_and_stable_over_remounts_and_restarts_and_new_with_new_content");
    let mut cluster = Cluster::start(&Plan::default());
    let putter = Putter::new(&cluster);
    putter.put_many(0..300, 8, 100, |number| format!("a/{}/f{number}", number % 7));
    let mut mount = cluster.mount("", "");
    let before = sh(&mount, NUMBERS);
    assert_eq!(sh(&mount, "find $M -type f -printf '%i\\n' | sort | uniq -d"), "");
    assert_eq!(sh(&mount, "find $M -printf '%i\\n' | sort | uniq -d"), "");
    assert_eq!(sh(&mount, "find $M -type f ! -links 1 | wc -l"), "0\n");
    assert_eq!(
        sh(&mount, "stat -c '%y' $M/a/0/f0 | cut -c1-29"),
        sh(&mount, "date -d @1500000000.123456789 '+%F %T.%N'")
    );
    if rustix::process::geteuid().is_root() {
        std::fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
        assert_eq!(sh(&mount, NUMBERS), before, "after drop_caches");
    }
    mount.stop();
    mount = cluster.mount("", "");
    assert_eq!(sh(&mount, NUMBERS), before, "after a remount");
    cluster.stop();
    cluster.serve();
    assert_eq!(sh(&mount, NUMBERS), before, "after a restart of the server");
    let ino = mount.at("a/0/f0").metadata().unwrap().ino();
    putter.put("a/0/f0", 0, 100);
    wait::until("the number is new", Duration::from_secs(5), || {
        mount.at("a/0/f0").metadata().is_ok_and(|meta| meta.ino() > ino)
    });
    drop(putter);
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

#[test]
fn s37_a_server_with_another_clock_keeps_times_and_serves() {
    const TEST: &str = "s37_a_server_with_another_clock_keeps_times_and_serves";
    need_mount!(TEST);
    need_programs!(TEST, "faketime", "rsync");
    let found = Command::new("sh").args(["-c", "faketime -f '+0d' sh -c 'echo $LD_PRELOAD'"]).output().unwrap();
    let library = String::from_utf8_lossy(&found.stdout).trim().to_owned();
    if library.is_empty() {
        return skip(TEST, "faketime does not say where its library is");
    }
    // Where several threads ask for the time: the variant that is made for it, beside the plain one.
    let library = library.replace("libfaketime.so", "libfaketimeMT.so");
    let mut cluster = Cluster::start(&Plan::default());
    let putter = Putter::new(&cluster);
    putter.put_many(0..50, 8, 70_000, |number| format!("a/{number}"));
    let mut mount = cluster.mount("", "");
    let before = sh(&mount, NUMBERS);
    let copy = cluster.root.path().join("copy");
    sh(&mount, &format!("rsync -a $M/ {}/", copy.display()));
    let environment = [("LD_PRELOAD", library.as_str()), ("FAKETIME_DONT_FAKE_MONOTONIC", "1"), ("FAKETIME", "+1d")];
    for offset in ["+1d", "-10y"] {
        cluster.stop();
        cluster.environment =
            environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        cluster.environment[2].1 = offset.to_owned();
        cluster.serve();
        assert_eq!(sh(&mount, NUMBERS), before, "{offset}");
        mount.stop();
        mount = cluster.mount("", "");
        assert_eq!(sh(&mount, NUMBERS), before, "{offset}, after a remount");
        sh(&mount, &format!("diff -r $M {}", copy.display()));
        assert_eq!(
            sh(&mount, &format!("rsync -ai $M/ {}/ | grep -v '^\\.d..t' || true", copy.display())),
            "",
            "{offset}"
        );
        // What is put meanwhile has the time that the client gave it.
        putter.put("b", 1, 100);
        assert_eq!(sh(&mount, "stat -c %Y $M/b"), "1500000000\n");
        putter.delete("b").unwrap();
    }
    cluster.stop();
    cluster.environment.clear();
    cluster.serve();
    assert_eq!(sh(&mount, NUMBERS), before, "and back");
    drop(putter);
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}
