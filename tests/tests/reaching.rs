//! A mount and its server's address: not there, late, a name that resolves later, moved, taken over, or another store's.

#![forbid(unsafe_code)]

use railfs_tests::cluster::{COMMAND, Cluster, Plan};
use railfs_tests::data::{assert_file, write_file};
use railfs_tests::mount::is_mounted;
use railfs_tests::netns::{self, Side};
use railfs_tests::process::{Output, Process, run};
use railfs_tests::quiet::assert_quiet;
use railfs_tests::typed::{SIZE, mount_command, no_process, nothing_kept, place, processes, stop, store};
use railfs_tests::wait::{self, SOON, eventually};
use railfs_tests::{need_mount, skip};
use rustix::io::Errno;
use rustix::process::Signal;
use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Two cores do other things too.
const MARGIN: Duration = Duration::from_secs(3);

/// A start that must fail as unreachable.
#[track_caller]
fn unreachable(command: &mut Command, words: &[&str], limit: Duration) -> Output {
    let output = run(command, COMMAND).refused(5, words);
    let lines = output.err();
    let lines: Vec<&str> = lines.lines().filter(|line| line.starts_with("railfs: ")).collect();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(output.took < limit, "{:?}", output.took);
    output
}

#[test]
fn s20_a_server_that_is_not_there_is_named_in_time_and_nothing_is_mounted() {
    need_mount!("s20_a_server_that_is_not_there_is_named_in_time_and_nothing_is_mounted");
    let cluster = Cluster::new(&Plan::default());
    let place = place(&cluster, "place");
    let mount = |url: &str, options: &[&str]| {
        let mut command = cluster.railfs();
        command.arg("mount").args(options).arg(url).arg(&place);
        command
    };
    for front in [&[][..], &["-f"]] {
        unreachable(&mut mount("railfs://127.0.0.1:1/ns", front), &["127.0.0.1:1", "refused"], Duration::from_secs(3));
        let options = [front, &["-o", "retry=1s"]].concat();
        let output =
            unreachable(&mut mount("railfs://127.0.0.1:1/ns", &options), &["127.0.0.1:1"], Duration::from_secs(5));
        assert!(output.took >= Duration::from_secs(1), "{:?}", output.took);
        unreachable(&mut mount("railfs://nosuch.invalid/ns", front), &["nosuch.invalid:7420"], Duration::from_secs(8));
        assert!(!is_mounted(&place));
        // Ctrl-C, in the middle of the attempts.
        let options = [front, &["-o", "retry=10min"]].concat();
        for url in ["railfs://127.0.0.1:1/ns", "railfs://nosuch.invalid/ns"] {
            let mut command = mount(url, &options);
            let mut process = Process::start(command.stdout(Stdio::null()).stderr(Stdio::null()));
            wait::until("it has taken its place", SOON, || {
                let run = std::fs::read_dir(cluster.root.path().join("run")).unwrap().flatten();
                run.filter(|entry| entry.path().extension().is_some_and(|e| e == "lock")).count() > 0
            });
            assert!(!is_mounted(&place) && process.ended().is_none());
            process.signal(Signal::INT);
            let started = Instant::now();
            assert!(!process.wait(SOON).success());
            wait::until("nothing is left of it", SOON, || processes(&place).is_empty());
            // Within a second; two cores do other things too.
            assert!(started.elapsed() < Duration::from_secs(2), "{url}: {:?}", started.elapsed());
        }
        assert!(!is_mounted(&place));
    }
    nothing_kept(&cluster);
}

#[test]
fn s20_an_address_without_a_route_or_an_answer_is_named_in_time() {
    const NAME: &str = "s20_an_address_without_a_route_or_an_answer_is_named_in_time";
    need_mount!(NAME);
    if let Some(reason) = netns::cannot() {
        return skip(NAME, &reason);
    }
    let cluster = Cluster::new(&Plan { network: true, ..Plan::default() });
    let place = place(&cluster, "place");
    let limit = Duration::from_secs(1) + MARGIN;
    let mount = |url: &str| {
        let mut command = cluster.railfs();
        command.args(["mount", "-o", "connect_timeout=1s"]).arg(url).arg(&place);
        command
    };
    unreachable(&mut mount("railfs://192.0.2.1/ns"), &["192.0.2.1:7420", "unreachable"], limit);
    // A route that ends in nothing.
    let ip = PathBuf::from("ip");
    let route = ["route", "add", "192.0.2.0/24", "dev", "c1"];
    run(cluster.network().command(Side::Client, &ip).args(route), COMMAND).expect(0);
    let neighbour = ["neigh", "add", "192.0.2.1", "lladdr", "02:00:00:00:00:99", "dev", "c1"];
    run(cluster.network().command(Side::Client, &ip).args(neighbour), COMMAND).expect(0);
    unreachable(&mut mount("railfs://192.0.2.1/ns"), &["192.0.2.1:7420"], limit);
    assert!(!is_mounted(&place));
    no_process(&place);
}

#[test]
fn s20_a_port_that_is_not_the_control_port_is_said_to_be_none() {
    let cluster = Cluster::start(&Plan::default());
    // A service of another kind, and one that ends what it does not understand.
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let there = other.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut connection in other.incoming().flatten() {
            let _ = connection.write_all(b"SSH-2.0-other\r\n");
        }
    });
    for address in [cluster.rails[0], there] {
        let mut command = cluster.railfs();
        command.arg("ls").arg(format!("railfs://{address}/ns"));
        unreachable(&mut command, &[&address.to_string(), "not the control port"], Duration::from_secs(8));
    }
}

#[test]
fn s20_a_server_that_comes_late_is_waited_for() {
    need_mount!("s20_a_server_that_comes_late_is_waited_for");
    let mut cluster = store(&Plan::default());
    cluster.stop();
    let place = place(&cluster, "place");
    let mut command = mount_command(&cluster, &place, &["-o", "retry=1min"]);
    let mut process = Process::start(command.stdout(Stdio::null()).stderr(Stdio::null()));
    let log = || {
        let run = std::fs::read_dir(cluster.root.path().join("run")).unwrap().flatten();
        let logs = run.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "log"));
        logs.map(|path| std::fs::read_to_string(path).unwrap_or_default()).collect::<String>()
    };
    let address = cluster.control[0].to_string();
    wait::until("it says what it waits for", SOON, || log().contains(&address) && log().contains("trying again"));
    assert!(!is_mounted(&place) && process.ended().is_none(), "whoever looks is not kept waiting");
    cluster.serve();
    assert!(process.wait(SOON).success());
    assert_file(&place.join("f"), 4, SIZE);
    stop(&cluster, &place);
    nothing_kept(&cluster);
    assert_quiet(&cluster, &[]);
}

/// A mount in a mount namespace of its own, where `/etc/hosts` is a file of the test. Its files are seen through `/proc`.
struct Elsewhere {
    daemon: Process,
    place: PathBuf,
}

impl Elsewhere {
    fn start(cluster: &Cluster, hosts: &Path, url: &str, options: &str) -> Elsewhere {
        let place = place(cluster, "elsewhere");
        let log = File::create(cluster.root.path().join("elsewhere.log")).unwrap();
        let railfs = cluster.railfs();
        let mut command = Command::new("unshare");
        command.args(["-m", "--propagation", "slave", "sh", "-c"]);
        command.arg("mount --bind \"$1\" /etc/hosts && shift && exec \"$@\"").arg("sh").arg(hosts);
        command.arg(railfs.get_program()).args(railfs.get_args());
        command.args(["mount", "-f", "-o", options, url]).arg(&place);
        command.envs(railfs.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let daemon = Process::start(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log));
        Elsewhere { daemon, place }
    }
    fn at(&self, name: &str) -> PathBuf {
        let place = self.place.strip_prefix("/").unwrap();
        Path::new("/proc").join(self.daemon.pid().to_string()).join("root").join(place).join(name)
    }
    fn stop(mut self) {
        self.daemon.signal(Signal::TERM);
        assert!(self.daemon.wait(SOON).success());
    }
}

#[test]
fn s20_a_name_that_resolves_later_or_to_another_address_is_found() {
    const NAME: &str = "s20_a_name_that_resolves_later_or_to_another_address_is_found";
    need_mount!(NAME);
    let unshare = run(Command::new("unshare").args(["-m", "true"]), COMMAND);
    if unshare.code != Some(0) {
        return skip(NAME, &format!("mount namespaces: {}", unshare.err()));
    }
    let mut cluster = store(&Plan::default());
    let hosts = cluster.root.path().join("hosts");
    std::fs::write(&hosts, "127.0.0.1 localhost\n").unwrap();
    let port = cluster.control[0].port();
    let url = format!("railfs://store.invalid:{port}/ns/");
    let mut mount = Elsewhere::start(&cluster, &hosts, &url, "retry=1min,metadata_timeout=2s,metadata_ttl=0s");
    let log = cluster.root.path().join("elsewhere.log");
    wait::until("it says what it waits for", SOON, || {
        std::fs::read_to_string(&log).is_ok_and(|text| text.contains("store.invalid") && text.contains("trying again"))
    });
    std::fs::write(&hosts, "127.0.0.1 localhost store.invalid\n").unwrap();
    eventually("it mounts", SOON, || {
        assert!(mount.daemon.ended().is_none(), "{}", std::fs::read_to_string(&log).unwrap());
        File::open(mount.at("f")).map(drop).map_err(|error| error.to_string())
    });
    assert_file(&mount.at("f"), 4, SIZE);
    // The server is started anew at another address, which it never told anybody: the name leads there.
    cluster.stop();
    let other: SocketAddr = format!("127.0.0.2:{port}").parse().unwrap();
    let text = std::fs::read_to_string(cluster.config()).unwrap();
    std::fs::write(cluster.config(), text.replace(&format!("127.0.0.1:{port}"), &other.to_string())).unwrap();
    std::fs::write(&hosts, "127.0.0.1 localhost\n127.0.0.2 store.invalid\n").unwrap();
    cluster.control[0] = other;
    cluster.serve();
    eventually("it reads again, without a remount", SOON, || {
        let file = File::open(mount.at("f")).map_err(|error| error.to_string())?;
        file.read_at(&mut [0; 1000], 0).map_err(|error| error.to_string())
    });
    assert_file(&mount.at("f"), 4, SIZE);
    mount.stop();
    assert_quiet(&cluster, &[]);
}

/// Ports of this test's own.
fn set_control(cluster: &mut Cluster, now: &[SocketAddr]) {
    let text = std::fs::read_to_string(cluster.config()).unwrap();
    let quoted = |list: &[SocketAddr]| list.iter().map(|a| format!("\"{a}\"")).collect::<Vec<_>>().join(", ");
    let text =
        text.replace(&format!("listen = [{}]", quoted(&cluster.control)), &format!("listen = [{}]", quoted(now)));
    assert!(text.contains(&quoted(now)), "{text}");
    std::fs::write(cluster.config(), text).unwrap();
    cluster.control = now.to_vec();
}

#[test]
fn a_server_that_moves_to_an_address_it_had_listed_is_followed_without_a_remount() {
    need_mount!("a_server_that_moves_to_an_address_it_had_listed_is_followed_without_a_remount");
    let mut cluster = Cluster::new(&Plan::default());
    let first = cluster.control[0];
    let second = SocketAddr::from(([127, 0, 0, 3], first.port()));
    set_control(&mut cluster, &[first, second]);
    cluster.serve();
    let source = cluster.root.path().join("source");
    write_file(&source, 4, SIZE);
    cluster.put(&source, "f");
    let mount = cluster.mount("", "metadata_timeout=2s,metadata_ttl=0s");
    assert_eq!(mount.status()["control"], first.to_string());
    let file = File::open(mount.at("f")).unwrap();
    let run_before = mount.status()["incarnation"].clone();
    // Restarted, moved away from the address of the mount's URL, and with other rails.
    cluster.stop();
    set_control(&mut cluster, &[second]);
    let text = std::fs::read_to_string(cluster.config()).unwrap();
    let rail = cluster.rails[0];
    let moved = SocketAddr::from(([127, 0, 0, 3], rail.port()));
    std::fs::write(cluster.config(), text.replace(&rail.to_string(), &moved.to_string())).unwrap();
    cluster.serve();
    eventually("the open file reads again", SOON, || {
        file.read_at(&mut [0; 1000], 0).map_err(|error| error.to_string())
    });
    assert_file(&mount.at("f"), 4, SIZE);
    let status = mount.status();
    assert_eq!(status["control"], second.to_string());
    assert!(
        status["incarnation"] != run_before && status["rails"].to_string().contains(&moved.to_string()),
        "{status}"
    );
    // Another process with the same directories, as a machine that takes them over would be: no clean stop before.
    cluster.kill();
    cluster.serve();
    eventually("the open file reads again", SOON, || {
        file.read_at(&mut [0; 1000], 0).map_err(|error| error.to_string())
    });
    drop(file);
    assert_file(&mount.at("f"), 4, SIZE);
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

#[test]
fn another_store_at_the_address_is_an_error_of_one_line_never_other_bytes() {
    need_mount!("another_store_at_the_address_is_an_error_of_one_line_never_other_bytes");
    let mut cluster = store(&Plan::default());
    let mut other = Cluster::new(&Plan::default());
    let mount = cluster.mount("", "metadata_timeout=2s,read_timeout=3s,metadata_ttl=0s");
    let file = File::open(mount.at("f")).unwrap();
    let ids = (mount.status()["store"].as_str().unwrap().to_owned(), cluster.control[0].to_string());
    cluster.stop();
    // The other store's server takes the very same ports.
    let text = std::fs::read_to_string(cluster.config()).unwrap();
    let mut text = text.replace(cluster.root.path().to_str().unwrap(), other.root.path().to_str().unwrap());
    text.push('\n');
    std::fs::write(other.config(), text).unwrap();
    (other.control, other.rails) = (cluster.control.clone(), cluster.rails.clone());
    other.serve();
    let source = other.root.path().join("source");
    write_file(&source, 77, SIZE);
    other.put(&source, "f");
    let eio = Some(Errno::IO.raw_os_error());
    eventually("reads and lookups are EIO", SOON, || {
        let read = file
            .read_at(&mut [0; 1000], 0)
            .map(|_| "bytes")
            .unwrap_or_else(|error| if error.raw_os_error() == eio { "EIO" } else { "another error" });
        let open = match File::open(mount.at("f")) {
            Ok(_) => "opened",
            Err(error) if error.raw_os_error() == eio => "EIO",
            Err(_) => "another error",
        };
        assert!(read != "bytes" && open != "opened", "of another store: read {read}, open {open}");
        if (read, open) == ("EIO", "EIO") { Ok(()) } else { Err(format!("read: {read}, open: {open}")) }
    });
    let listed = std::fs::read_dir(&mount.path).and_then(|mut list| list.next().transpose());
    assert_eq!(listed.unwrap_err().raw_os_error(), eio);
    let theirs = other.status()["store"].as_str().unwrap().to_owned();
    let logged = mount.logged();
    // A rail may have been refused before; that line knows one of the two stores only.
    let both = |line: &&str| line.contains(&theirs) && line.contains(&ids.0);
    let line = logged.lines().find(both).unwrap_or_else(|| panic!("no word of it: {logged}"));
    assert!(line.contains(&ids.1), "{line}");
    // The right one is back: all is well, without a remount.
    other.stop();
    cluster.serve();
    eventually("it reads again", SOON, || file.read_at(&mut [0; 1000], 0).map_err(|error| error.to_string()));
    drop(file);
    assert_file(&mount.at("f"), 4, SIZE);
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}
