//! How a mount begins and ends: twice at once, killed half way, busy, signalled, without descriptors, hanging; and a server
//! whose port is taken.

#![forbid(unsafe_code)]

use railfs_tests::cluster::{COMMAND, Cluster, Plan};
use railfs_tests::data::{Random, assert_file};
use railfs_tests::mount::is_mounted;
use railfs_tests::need_mount;
use railfs_tests::process::{Process, run};
use railfs_tests::quiet::assert_quiet;
use railfs_tests::typed::{
    SIZE, daemon, mount_command, mounts_at, no_process, nothing_kept, place, processes, signal, stop, store,
};
use railfs_tests::wait::{self, SOON, eventually};
use rustix::process::Signal;
use std::fs::File;
use std::net::TcpListener;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Two cores do other things too.
const MARGIN: Duration = Duration::from_secs(3);

#[test]
fn s08_of_mounts_at_one_instant_one_is_made_and_stays_untouched() {
    need_mount!("s08_of_mounts_at_one_instant_one_is_made_and_stays_untouched");
    let cluster = store(&Plan::default());
    let place = place(&cluster, "place");
    for round in 0..3 {
        let start = |number: usize| {
            let mut command = mount_command(&cluster, &place, &[]);
            if round == 2 {
                // From directories of their own they do not see each other's locks.
                command.env("RAILFS_RUNTIME_DIR", cluster.root.path().join(format!("run{number}")));
            }
            let error = cluster.root.path().join(format!("{round}-{number}.err"));
            command.stdout(Stdio::null()).stderr(File::create(&error).unwrap());
            (Process::start(&mut command), error)
        };
        let mut started: Vec<_> = (0..4).map(start).collect();
        let mut winners = Vec::new();
        for (number, (process, error)) in started.iter_mut().enumerate() {
            let said = || std::fs::read_to_string(&*error).unwrap();
            match process.wait(SOON).code() {
                Some(0) => winners.push(number),
                Some(1) => {
                    let said = said();
                    let right = ["mounted already", "mounted there already", "by another process"];
                    assert!(right.iter().any(|right| said.contains(right)), "{said}");
                    assert_eq!(said.lines().count(), 1, "{said}");
                }
                other => panic!("{other:?}: {}", said()),
            }
        }
        assert_eq!((winners.len(), mounts_at(&place)), (1, 1), "round {round}");
        assert_file(&place.join("f"), 4, SIZE);
        // One after another it is the same.
        run(&mut mount_command(&cluster, &place, &[]), SOON).refused(1, &["already"]);
        assert_file(&place.join("f"), 4, SIZE);
        let run_directory =
            cluster.root.path().join(if round == 2 { format!("run{}", winners[0]) } else { "run".into() });
        let umount = run(cluster.railfs().arg("umount").arg(&place).env("RAILFS_RUNTIME_DIR", run_directory), SOON);
        umount.expect(0);
        no_process(&place);
    }
    nothing_kept(&cluster);
    assert_quiet(&cluster, &[]);
}

#[test]
fn s08_a_daemon_killed_at_any_moment_of_its_start_leaves_nothing_in_the_way() {
    need_mount!("s08_a_daemon_killed_at_any_moment_of_its_start_leaves_nothing_in_the_way");
    let cluster = store(&Plan::default());
    let place = place(&cluster, "place");
    let started = Instant::now();
    run(&mut mount_command(&cluster, &place, &[]), SOON).expect(0);
    let typical = started.elapsed();
    signal(daemon(&cluster, &place), Signal::KILL);
    no_process(&place);
    let mut random = Random::new(8);
    for _ in 0..8 {
        let mut command = mount_command(&cluster, &place, &["-f"]);
        let mut process = Process::start(command.stdout(Stdio::null()).stderr(Stdio::null()));
        process.ended_within(Duration::from_micros(random.below(u64::try_from(typical.as_micros()).unwrap())));
        process.kill();
    }
    run(&mut mount_command(&cluster, &place, &[]), SOON).expect(0);
    assert_eq!(mounts_at(&place), 1, "dead ones are not stacked");
    assert_file(&place.join("f"), 4, SIZE);
    stop(&cluster, &place);
    // The command is killed before its daemon is ready: the daemon goes too.
    let mut command = mount_command(&cluster, &place, &[]);
    let mut process = Process::start(command.stdout(Stdio::null()).stderr(Stdio::null()));
    process.ended_within(typical / 3);
    process.kill();
    eventually("either nothing is left, or a whole mount", SOON, || {
        match (processes(&place).len(), is_mounted(&place)) {
            (0, false) => Ok(()),
            // It had become ready.
            (1, true) if File::open(place.join("f")).is_ok() => {
                stop(&cluster, &place);
                Ok(())
            }
            other => Err(format!("{other:?}")),
        }
    });
    run(&mut mount_command(&cluster, &place, &[]), SOON).expect(0);
    stop(&cluster, &place);
    nothing_kept(&cluster);
    assert_quiet(&cluster, &[]);
}

#[test]
fn s09_a_busy_mount_stays_and_says_who_and_signals_end_it_in_time() {
    need_mount!("s09_a_busy_mount_stays_and_says_who_and_signals_end_it_in_time");
    let cluster = store(&Plan::default());
    let place = place(&cluster, "place");
    for (signals, code) in [(&[Signal::TERM][..], 0), (&[Signal::INT], 0), (&[Signal::TERM, Signal::TERM], 0)] {
        let log = cluster.root.path().join("front.log");
        let mut command = mount_command(&cluster, &place, &["-f"]);
        let mut front = Process::start(command.stdout(Stdio::null()).stderr(File::create(&log).unwrap()));
        wait::until("it is mounted", SOON, || place.join("f").exists());
        let mut open = Process::start(
            Command::new("bash")
                .args(["-c", "exec 9<f; echo held; exec sleep 600"])
                .current_dir(&place)
                .stdout(Stdio::piped()),
        );
        std::io::BufRead::read_line(
            &mut std::io::BufReader::new(open.child().stdout.take().unwrap()),
            &mut String::new(),
        )
        .unwrap();
        let other = run(Command::new("umount").arg(&place), COMMAND);
        assert!(other.code != Some(0) && other.err().contains("busy"), "{}", other.err());
        let words = ["is busy", &format!("process {} (sleep) works in {}", open.pid(), place.display()), "--lazy"];
        cluster.cli(&["umount".as_ref(), place.as_os_str()]).refused(1, &words);
        assert_file(&place.join("f"), 4, SIZE);
        // Without a terminal SIGHUP is a word in the log.
        front.signal(Signal::HUP);
        eventually("it says so", SOON, || {
            let text = std::fs::read_to_string(&log).unwrap();
            if text.contains("SIGHUP") { Ok(()) } else { Err(text) }
        });
        assert_file(&place.join("f"), 4, SIZE);
        let started = Instant::now();
        for (number, signal) in signals.iter().enumerate() {
            if number > 0 {
                front.ended_within(Duration::from_millis(50));
            }
            front.signal(*signal);
        }
        assert_eq!(front.wait(SOON).code(), Some(code));
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
        assert_eq!(mounts_at(&place), 0);
    }
    nothing_kept(&cluster);
    assert_quiet(&cluster, &[]);
}

#[test]
fn s09_a_stop_keeps_its_limit_with_readers_waiting() {
    need_mount!("s09_a_stop_keeps_its_limit_with_readers_waiting");
    let mut cluster = store(&Plan::default());
    let mount = cluster.mount("", "stop_timeout=2s,readahead=0");
    let path = mount.at("f");
    assert_eq!(mount.status()["mount"]["in_flight"], 0);
    let file = File::open(&path).unwrap();
    cluster.server().signal(Signal::STOP);
    cluster.server().wait_stopped();
    let (read, took) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| file.read_at(&mut [0; 1000], 0));
        wait::until("the reader waits", SOON, || waiting_requests(&mount.path) > 0);
        let started = Instant::now();
        mount.stop();
        (reader.join().unwrap(), started.elapsed())
    });
    assert!(read.is_err() && took < Duration::from_secs(2) + MARGIN, "{took:?}");
    drop(file);
    cluster.server().signal(Signal::CONT);
    assert_quiet(&cluster, &[]);
}

/// Requests that the kernel has handed to the daemon of this mount, or will.
fn waiting_requests(place: &Path) -> u64 {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let here = format!(" {} ", place.display());
    let line = table.lines().find(|line| line.contains(&here)).unwrap_or_default();
    let minor = line.split(' ').nth(2).and_then(|device| device.split(':').nth(1)).unwrap_or("none");
    let text = std::fs::read_to_string(format!("/sys/fs/fuse/connections/{minor}/waiting"));
    text.map_or(1, |text| text.trim().parse().unwrap_or(0)) // Without that file system: as good as known.
}

#[test]
fn s17_a_mount_behind_the_command_is_there_if_and_only_if_the_command_says_so() {
    need_mount!("s17_a_mount_behind_the_command_is_there_if_and_only_if_the_command_says_so");
    let mut cluster = store(&Plan::default());
    let place = place(&cluster, "place");
    let nowhere = cluster.root.path().join("nowhere");
    run(&mut mount_command(&cluster, &nowhere, &[]), SOON).refused(1, &["nowhere", "does not exist"]);
    let file = cluster.root.path().join("source");
    run(&mut mount_command(&cluster, &file, &[]), SOON).refused(1, &["source", "not a directory"]);
    run(&mut mount_command(&cluster, &place, &["-o", "log=/no/such/log"]), SOON).refused(1, &["/no/such/log"]);
    // Two of them beside each other, and one on the other's directory below.
    let second = railfs_tests::typed::place(&cluster, "second");
    for place in [&place, &second] {
        run(&mut mount_command(&cluster, place, &[]), SOON).expect(0);
        assert_file(&place.join("f"), 4, SIZE);
    }
    for place in [&place, &second] {
        stop(&cluster, place);
    }
    cluster.stop();
    run(&mut mount_command(&cluster, &place, &[]), SOON).refused(5, &[&cluster.control[0].to_string()]);
    for path in [&nowhere, &place, &second] {
        assert!(!is_mounted(path));
        no_process(path);
    }
    nothing_kept(&cluster);
}

#[test]
fn s17_a_port_that_is_taken_is_named_and_no_directory_is_touched() {
    let mut cluster = Cluster::start(&Plan::default());
    cluster.stop();
    let state = |cluster: &Cluster| -> Vec<(PathBuf, i64, i64, u64)> {
        let mut all = Vec::new();
        let mut todo = cluster.directories.clone();
        while let Some(path) = todo.pop() {
            let meta = std::fs::metadata(&path).unwrap();
            if meta.is_dir() {
                todo.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            }
            all.push((path, meta.mtime(), meta.mtime_nsec(), meta.size()));
        }
        all.sort();
        all
    };
    let before = state(&cluster);
    for address in [cluster.control[0], cluster.rails[1]] {
        let taken = TcpListener::bind(address).unwrap();
        let output = run(cluster.railfsd().arg("serve").arg("--config").arg(cluster.config()), SOON);
        let output = output.refused(1, &[&address.to_string(), "in use"]);
        assert_eq!(output.err().lines().filter(|line| line.starts_with("railfsd: ")).count(), 1, "{}", output.err());
        drop(taken);
        assert_eq!(state(&cluster), before);
    }
    cluster.serve();
    assert_quiet(&cluster, &[]);
}

#[test]
fn s13_without_descriptors_callers_are_told_and_all_is_well_after() {
    need_mount!("s13_without_descriptors_callers_are_told_and_all_is_well_after");
    let mut cluster = store(&Plan::default());
    let mount = cluster.mount("", "");
    let limits = |soft: &str| {
        let pid = mount.pid().to_string();
        run(Command::new("prlimit").args(["--pid", &pid, &format!("--nofile={soft}:")]), COMMAND).expect(0);
    };
    limits("256");
    let mut open = Vec::new();
    for _ in 0..400 {
        match File::open(mount.at("f")) {
            Ok(file) => open.push(file),
            Err(error) => {
                assert!(matches!(error.raw_os_error(), Some(5 | 23 | 24)), "EIO, ENFILE or EMFILE, not {error}")
            }
        }
    }
    for file in &open {
        assert_eq!(file.read_at(&mut [0; 100], 0).unwrap(), 100);
    }
    // As few as it has: nobody can be accepted at its control socket.
    limits("8");
    let mut socket = std::fs::read_dir(cluster.root.path().join("run")).unwrap().flatten().map(|entry| entry.path());
    let socket = socket.find(|path| path.extension().is_some_and(|e| e == "sock")).unwrap();
    let callers: Vec<_> = (0..3).map(|_| std::os::unix::net::UnixStream::connect(&socket).unwrap()).collect();
    // Hundredths of a second of processor time: fields 14 and 15, of which the first two are cut off.
    let busy = |pid: u32| -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    // Whether it spins can be seen only over a while.
    let before = busy(mount.pid());
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(1500) {
        assert_eq!(open[0].read_at(&mut [0; 100], 0).unwrap(), 100, "what is open is served");
        std::thread::park_timeout(Duration::from_millis(100));
    }
    let used = busy(mount.pid()) - before;
    assert!(used < 75, "{used} hundredths of a second of processor time within 1.5 s");
    limits("1024");
    drop((callers, open));
    assert_file(&mount.at("f"), 4, SIZE);
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

#[test]
fn s13_a_server_without_descriptors_takes_clients_again_when_it_has_some() {
    let mut cluster = store(&Plan::default());
    let pid = cluster.server().pid();
    let open = railfs_tests::process::descriptors(pid);
    let limit = |soft: usize| {
        let (pid, limit) = (pid.to_string(), format!("--nofile={soft}:"));
        run(Command::new("prlimit").args(["--pid", &pid, &limit]), COMMAND).expect(0);
    };
    limit(open + 4);
    for address in [cluster.control[0], cluster.rails[0]] {
        let idle: Vec<_> = (0..20).map(|_| std::net::TcpStream::connect(address).unwrap()).collect();
        wait::until("it has none left", SOON, || railfs_tests::process::descriptors(pid) >= open + 4);
        // It tries, and cannot, for as long as they are there.
        eventually("it says so", SOON, || {
            let text = std::fs::read_to_string(cluster.log()).unwrap();
            if text.contains("accept") { Ok(()) } else { Err(text) }
        });
        drop(idle);
        wait::until("they are closed", SOON, || railfs_tests::process::descriptors(pid) < open + 4);
    }
    limit(1024);
    cluster.cli(&["get", &cluster.url("f"), "-"]).expect(0);
    assert_quiet(&cluster, &[]);
}

#[test]
fn s11_tcp_rails_need_no_locked_memory() {
    need_mount!("s11_tcp_rails_need_no_locked_memory");
    let cluster = store(&Plan::default());
    let place = place(&cluster, "place");
    let railfs = mount_command(&cluster, &place, &[]);
    let mut command = Command::new("prlimit");
    command.arg("--memlock=65536:65536").arg(railfs.get_program()).args(railfs.get_args());
    command.envs(railfs.get_envs().filter_map(|(name, value)| Some((name, value?))));
    run(&mut command, SOON).expect(0);
    assert_file(&place.join("f"), 4, SIZE);
    stop(&cluster, &place);
    assert_quiet(&cluster, &[]);
}

#[test]
fn i9_status_and_umount_of_a_daemon_that_hangs_are_bounded() {
    need_mount!("i9_status_and_umount_of_a_daemon_that_hangs_are_bounded");
    let mut cluster = store(&Plan::default());
    let mut mount = cluster.mount("", "");
    mount.daemon.signal(Signal::STOP);
    mount.daemon.wait_stopped();
    let path = mount.path.as_os_str();
    let limit = Duration::from_secs(12) + MARGIN;
    let output = cluster.cli(&["status".as_ref(), path]).expect(1);
    assert!(output.took < limit && output.err().contains("no answer"), "{:?}: {}", output.took, output.err());
    let started = Instant::now();
    run(&mut mount_command(&cluster, &mount.path, &[]), COMMAND).refused(1, &["mounted already"]);
    assert!(started.elapsed() < limit);
    let output = cluster.cli(&["umount".as_ref(), path]);
    assert!(output.took < limit, "{:?}", output.took);
    assert!(!is_mounted(&mount.path));
    mount.daemon.signal(Signal::CONT);
    assert!(mount.daemon.wait(SOON).success());
    nothing_kept(&cluster);
    assert_quiet(&cluster, &[]);
}
