//! Both daemons under a service manager, without one: what they tell the socket that `NOTIFY_SOCKET` names, and when.

use railfs_tests::cluster::{Cluster, Plan};
use railfs_tests::data::write_file;
use railfs_tests::mount::is_mounted;
use railfs_tests::process::Process;
use railfs_tests::quiet::assert_quiet;
use railfs_tests::{need_mount, wait};
use rustix::process::Signal;
use std::ffi::OsString;
use std::fs::File;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// The manager's end.
struct Manager {
    socket: UnixDatagram,
    name: OsString,
    heard: Vec<String>,
}

impl Manager {
    fn at(path: &Path) -> Manager {
        Manager { socket: UnixDatagram::bind(path).unwrap(), name: path.into(), heard: Vec::new() }
    }
    fn hidden(name: &str) -> Manager {
        let name = format!("{name}-{}", std::process::id());
        let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        Manager { socket, name: format!("@{name}").into(), heard: Vec::new() }
    }
    /// Waits for a line that begins so; gives it.
    #[track_caller]
    fn wait(&mut self, line: &str) -> String {
        let found = self.within(line, wait::SOON);
        found.unwrap_or_else(|| panic!("{line} was never told, but {:?}", self.heard))
    }
    fn within(&mut self, line: &str, limit: Duration) -> Option<String> {
        let end = Instant::now() + limit;
        loop {
            if let Some(at) = self.heard.iter().position(|heard| heard.starts_with(line)) {
                return Some(self.heard.remove(at));
            }
            let left = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
            self.socket.set_read_timeout(Some(left)).unwrap();
            let mut buffer = [0; 4096];
            let Ok(length) = self.socket.recv(&mut buffer) else { continue };
            self.heard.extend(String::from_utf8_lossy(&buffer[..length]).lines().map(str::to_owned));
        }
    }
}

fn place(cluster: &Cluster) -> PathBuf {
    let place = cluster.root.path().join("place");
    std::fs::create_dir(&place).unwrap();
    place
}

/// `railfs mount -f`, as a unit would run it.
fn unit(cluster: &Cluster, manager: &Manager, place: &Path, options: &str, watchdog: Option<u32>) -> Process {
    let mut command = cluster.railfs();
    command.args(["mount", "-f", "-o", options, &cluster.url("")]).arg(place).env("NOTIFY_SOCKET", &manager.name);
    if let Some(milliseconds) = watchdog {
        command.env("WATCHDOG_USEC", format!("{milliseconds}000"));
    }
    let log = File::create(cluster.root.path().join("unit.log")).unwrap();
    Process::start(command.stdout(Stdio::null()).stderr(log))
}

/// Processes whose parent this is.
fn children(pid: u32) -> Vec<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|child| child.parse().ok()).collect()
}

/// Processes whose command line names this place.
fn probes_of(place: &Path) -> usize {
    let line = |entry: std::fs::DirEntry| std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
    let name = place.display().to_string();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes.map(line).filter(|line| String::from_utf8_lossy(line).contains(&name)).count()
}

fn log(cluster: &Cluster) -> String {
    std::fs::read_to_string(cluster.root.path().join("unit.log")).unwrap_or_default()
}

#[test]
fn s04_ready_is_told_only_once_ls_of_the_mount_answers() {
    need_mount!("s04_ready_is_told_only_once_ls_of_the_mount_answers");
    let mut cluster = Cluster::start(&Plan::default());
    write_file(&cluster.root.path().join("f"), 1, 300_000);
    cluster.put(&cluster.root.path().join("f"), "f");
    let place = place(&cluster);
    let mut manager = Manager::at(&cluster.root.path().join("notify"));
    // Mounted, and the server hangs: somebody who looks now would wait.
    let mut unit = unit(&cluster, &manager, &place, "connect_timeout=60s,metadata_timeout=60s", None);
    wait::until("it is mounted", wait::SOON, || is_mounted(&place));
    cluster.server().signal(Signal::STOP);
    cluster.server().wait_stopped();
    let early = manager.within("READY=1", Duration::from_millis(500));
    cluster.server().signal(Signal::CONT);
    if early.is_none() {
        manager.wait("READY=1");
    }
    // (Where the answer to `ls` came before the server was stopped, it was ready by right.)
    let names: Vec<_> = std::fs::read_dir(&place).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["f"]);
    assert!(manager.wait("STATUS=").contains("rails up"));
    unit.signal(Signal::TERM);
    manager.wait("STOPPING=1");
    assert!(unit.wait(wait::SOON).success(), "{}", log(&cluster));
    assert!(!is_mounted(&place));
    wait::until("the process that probes is gone", wait::SOON, || probes_of(&place) == 0);
    assert_quiet(&cluster, &[]);
}

#[test]
fn s04_a_unit_whose_server_is_down_is_never_ready() {
    need_mount!("s04_a_unit_whose_server_is_down_is_never_ready");
    let mut cluster = Cluster::start(&Plan::default());
    cluster.stop();
    let place = place(&cluster);
    let mut manager = Manager::hidden("railfs-down");
    let mut unit = unit(&cluster, &manager, &place, "connect_timeout=1s", None);
    assert_eq!(unit.wait(wait::SOON).code(), Some(5), "{}", log(&cluster));
    assert_eq!(manager.within("READY=1", Duration::from_millis(200)), None);
    assert!(!is_mounted(&place));
    wait::until("the process that probes is gone", wait::SOON, || probes_of(&place) == 0);
}

#[test]
fn s04_a_server_that_is_late_makes_ready_late() {
    need_mount!("s04_a_server_that_is_late_makes_ready_late");
    let mut cluster = Cluster::start(&Plan::default());
    cluster.stop();
    let place = place(&cluster);
    let mut manager = Manager::hidden("railfs-late");
    let mut unit = unit(&cluster, &manager, &place, "retry=2min", None);
    // People see what it waits for, and the manager is asked for as much time as that may take.
    assert!(manager.wait("STATUS=").contains("trying again"));
    let more: u64 = manager.wait("EXTEND_TIMEOUT_USEC=")["EXTEND_TIMEOUT_USEC=".len()..].parse().unwrap();
    assert!(more > 60_000_000, "{more}");
    assert_eq!(manager.within("READY=1", Duration::from_millis(300)), None);
    assert!(!is_mounted(&place));
    cluster.serve();
    manager.wait("READY=1");
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), 0);
    unit.signal(Signal::TERM);
    assert!(unit.wait(wait::SOON).success(), "{}", log(&cluster));
    assert_quiet(&cluster, &[]);
}

#[test]
fn s09_the_watchdog_is_fed_until_the_stop_and_a_dead_helper_is_no_end() {
    need_mount!("s09_the_watchdog_is_fed_until_the_stop_and_a_dead_helper_is_no_end");
    let cluster = Cluster::start(&Plan::default());
    let place = place(&cluster);
    let mut manager = Manager::hidden("railfs-watchdog");
    let mut unit = unit(&cluster, &manager, &place, "arena=16MiB", Some(400));
    manager.wait("READY=1");
    for _ in 0..3 {
        manager.wait("WATCHDOG=1");
    }
    let helpers = children(unit.pid());
    assert_eq!(helpers.len(), 1, "{helpers:?}");
    // It does not keep the mount busy, and inherits nothing that would let it speak for the daemon.
    let environment = std::fs::read(format!("/proc/{}/environ", helpers[0])).unwrap();
    assert!(!String::from_utf8_lossy(&environment).contains("NOTIFY_SOCKET"));
    let helper = rustix::process::Pid::from_raw(i32::try_from(helpers[0]).unwrap()).unwrap();
    rustix::process::kill_process(helper, Signal::KILL).unwrap();
    wait::until("it is said", wait::SOON, || log(&cluster).contains("the watchdog goes by the others alone"));
    manager.heard.clear();
    manager.wait("WATCHDOG=1");
    unit.signal(Signal::TERM);
    manager.wait("STOPPING=1");
    assert!(manager.wait("EXTEND_TIMEOUT_USEC=").len() > 20);
    assert!(unit.wait(wait::SOON).success(), "{}", log(&cluster));
    assert_quiet(&cluster, &[]);
}

#[test]
fn s18_a_unit_needs_no_path_and_no_other_program_as_root() {
    need_mount!("s18_a_unit_needs_no_path_and_no_other_program_as_root");
    if !rustix::process::geteuid().is_root() {
        return railfs_tests::skip("s18_a_unit_needs_no_path_and_no_other_program_as_root", "not root");
    }
    let cluster = Cluster::start(&Plan::default());
    let place = place(&cluster);
    let mut manager = Manager::hidden("railfs-bare");
    let mut command = cluster.railfs();
    command.args(["mount", "-f", &cluster.url("")]).arg(&place).env_clear().env("PATH", "/none");
    command.env("RAILFS_RUNTIME_DIR", cluster.root.path().join("run")).env("NOTIFY_SOCKET", &manager.name);
    let log_file = File::create(cluster.root.path().join("unit.log")).unwrap();
    let mut unit = Process::start(command.stdout(Stdio::null()).stderr(log_file));
    manager.wait("READY=1");
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), 0);
    unit.signal(Signal::TERM);
    assert!(unit.wait(wait::SOON).success());
    // A socket that is none is said to be, and no reason not to mount.
    let mut command = cluster.railfs();
    command.args(["mount", "-f", &cluster.url("")]).arg(&place).env("NOTIFY_SOCKET", "nonsense");
    let log_file = File::create(cluster.root.path().join("unit.log")).unwrap();
    let mut unit = Process::start(command.stdout(Stdio::null()).stderr(log_file));
    wait::until("it is mounted all the same", wait::SOON, || log(&cluster).contains("is mounted at"));
    assert!(log(&cluster).contains("NOTIFY_SOCKET=nonsense: neither an absolute path"));
    unit.signal(Signal::TERM);
    assert!(unit.wait(wait::SOON).success());
    assert_quiet(&cluster, &[]);
}

#[test]
fn s08_a_place_is_mounted_again_the_moment_it_was_unmounted() {
    need_mount!("s08_a_place_is_mounted_again_the_moment_it_was_unmounted");
    let cluster = Cluster::start(&Plan::default());
    let place = place(&cluster);
    for _ in 0..4 {
        cluster.cli(&["mount".as_ref(), cluster.url("").as_ref(), place.as_os_str()]).expect(0);
        let mut umount = std::process::Command::new("umount");
        railfs_tests::process::run(umount.arg(&place), railfs_tests::cluster::COMMAND).expect(0);
    }
    wait::until("the last daemon is gone", wait::SOON, || probes_of(&place) == 0);
    assert_quiet(&cluster, &[]);
}

/// All files and links below a directory.
fn below(root: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(root) else { return Vec::new() };
    entries.flatten().map(|entry| entry.path()).fold(Vec::new(), |mut found, path| {
        match path.is_dir() && !path.is_symlink() {
            true => found.extend(below(&path)),
            false => found.push(path.display().to_string()),
        }
        found
    })
}

#[test]
fn what_is_installed_is_uninstalled_and_the_administrators_files_stay() {
    let root = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/install.sh");
    let programs = railfs_tests::process::program("railfs").parent().unwrap().to_owned();
    let call = |verb: &str, prefix: &str| {
        let mut command = std::process::Command::new("bash");
        command.arg(&script).arg(verb).env("DESTDIR", root.path()).env("PREFIX", prefix).env("BIN_DIR", &programs);
        railfs_tests::process::run(&mut command, railfs_tests::cluster::COMMAND)
    };
    call("install", "/usr/local").expect(0);
    let at = |path: &str| root.path().join(path);
    for page in ["man1/railfs.1", "man1/railfs-mount.1", "man8/railfsd.8", "man8/mount.railfs.8", "man5/railfs.toml.5"]
    {
        assert!(at("usr/local/share/man").join(page).exists(), "{page}");
    }
    let unit = std::fs::read_to_string(at("usr/local/lib/systemd/system/railfs@.service")).unwrap();
    assert!(
        unit.contains("\nExecStart=/usr/local/bin/railfs mount -f --config /etc/railfs/mounts/%i.toml\n"),
        "{unit}"
    );
    assert_eq!(std::fs::read_link(at("sbin/mount.railfs")).unwrap(), Path::new("/usr/local/bin/railfs"));
    // Called by that name it is mount(8)'s helper.
    std::os::unix::fs::symlink(programs.join("railfs"), at("mount.railfs")).unwrap();
    let mut helper = std::process::Command::new(at("mount.railfs"));
    helper.args(["railfs://h/ns/", "/mnt", "-o", "rw,_netdev,arean=1GiB"]);
    let refused = railfs_tests::process::run(&mut helper, railfs_tests::cluster::COMMAND);
    assert!(refused.expect(1).err().contains("mount.railfs: unknown option arean, did you mean arena?"));
    std::fs::remove_file(at("mount.railfs")).unwrap();
    let own = at("etc/railfs/mounts/mine.toml");
    std::fs::write(&own, "").unwrap();
    call("uninstall", "/usr/local").expect(0);
    assert_eq!(below(root.path()), [own.display().to_string()]);
    call("install", "relative").refused(2, &["PREFIX is 'relative'"]);
}

#[test]
fn s04_the_server_says_when_it_serves_and_when_it_ends() {
    let cluster = Cluster::new(&Plan::default());
    let mut manager = Manager::at(&cluster.root.path().join("notify"));
    let mut command = cluster.railfsd();
    command.arg("serve").arg("--config").arg(cluster.config());
    command.env("NOTIFY_SOCKET", &manager.name).env("WATCHDOG_USEC", "400000");
    let log = File::create(cluster.root.path().join("server.log")).unwrap();
    let mut server = Process::start(command.stdout(Stdio::null()).stderr(log));
    manager.wait("READY=1");
    cluster.status();
    assert!(manager.wait("STATUS=store ").contains("2 directories"));
    for _ in 0..3 {
        manager.wait("WATCHDOG=1");
    }
    server.signal(Signal::TERM);
    manager.wait("STOPPING=1");
    assert!(server.wait(wait::SOON).success());
    // One that cannot start is never ready.
    let mut command = cluster.railfsd();
    command.args(["serve", "--config", "/nonexistent.toml"]).env("NOTIFY_SOCKET", &manager.name);
    let mut server = Process::start(command.stdout(Stdio::null()).stderr(Stdio::null()));
    assert_eq!(server.wait(wait::SOON).code(), Some(2));
    assert_eq!(manager.within("READY=1", Duration::from_millis(100)), None);
}
