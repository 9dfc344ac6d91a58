//! A store of a test's own: stripe directories, a configuration, and the server as a process.
//!
//! Guarantees: nothing is shared with other tests (directories, ports, mounts' lock files); the server is ended before its
//! directories are removed; a test that fails shows the end of the server's log.

use crate::mount::Mount;
use crate::netns::{Network, Side};
use crate::process::{Output, Process, program, run};
use crate::wait;
use railfs_proto::name::{Key, Namespace};
use railfs_proto::url::Url;
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

/// A command that has not ended after this long hangs.
pub const COMMAND: Duration = Duration::from_secs(60);
/// The namespace that tests put into.
pub const NAMESPACE: &str = "ns";

/// What kind of store.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Stripe directories.
    pub directories: usize,
    /// Rails.
    pub rails: usize,
    /// More lines of the configuration (tables).
    pub more: String,
    /// How long superseded versions are kept.
    pub retention: &'static str,
    /// In a network of its own.
    pub network: bool,
}

impl Default for Plan {
    fn default() -> Self {
        Plan { directories: 2, rails: 2, more: String::new(), retention: "1 s", network: false }
    }
}

/// See the module. Fields are dropped in order: the server first.
#[derive(Debug)]
pub struct Cluster {
    server: Option<Process>,
    network: Option<Network>,
    /// Stripe directories.
    pub directories: Vec<PathBuf>,
    /// Where the control plane listens; the first is the URL's.
    pub control: Vec<SocketAddr>,
    /// Where rails listen.
    pub rails: Vec<SocketAddr>,
    config: PathBuf,
    plan: Plan,
    all_rails: Vec<SocketAddr>,
    starts: u32,
    mounts: u32,
    /// Of the server's process, from the next start on.
    pub environment: Vec<(String, String)>,
    /// Of clients' processes.
    pub of_clients: Vec<(&'static str, PathBuf)>,
    /// Everything of this store lies below.
    pub root: tempfile::TempDir,
}

/// A port that nobody listens on, outside of the range from which the kernel gives ports to connections.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let spread = u16::try_from(std::process::id() % 1200).unwrap_or(0) * 10;
        let port = 20_000 + (spread + NEXT.fetch_add(1, Ordering::Relaxed)) % 12_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

impl Cluster {
    /// A new store, served.
    ///
    /// # Panics
    /// It does not start.
    pub fn start(plan: &Plan) -> Cluster {
        let mut cluster = Cluster::new(plan);
        cluster.serve();
        cluster
    }

    /// A new store that nobody serves yet.
    ///
    /// # Panics
    /// It cannot be made.
    pub fn new(plan: &Plan) -> Cluster {
        let root = tempfile::Builder::new().prefix("railfs-test-").tempdir().unwrap_or_else(|error| panic!("{error}"));
        let directories: Vec<PathBuf> = (0..plan.directories).map(|i| root.path().join(format!("d{i}"))).collect();
        for directory in directories.iter().chain([&root.path().join("run")]) {
            // The runtime directory must be for its user alone; the others may be.
            let made = std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(directory);
            made.unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
        }
        let network = plan
            .network
            .then(|| Network::new(plan.rails).unwrap_or_else(|error| panic!("network of its own: {error}")));
        let place = |port, rail| match plan.network {
            true => SocketAddr::new(Network::address(rail), port),
            false => SocketAddr::from(([127, 0, 0, 1], free_port())),
        };
        // With a network of its own the control plane is on every rail's address.
        let controls = if plan.network { plan.rails } else { 1 };
        let control: Vec<SocketAddr> = (1..=controls).map(|rail| place(7420, rail)).collect();
        let rails: Vec<SocketAddr> = (1..=plan.rails).map(|rail| place(7421, rail)).collect();
        let config = root.path().join("railfsd.toml");
        let all_rails = rails.clone();
        let plan = plan.clone();
        let (starts, mounts) = (0, 0);
        let cluster = Cluster {
            server: None,
            network,
            directories,
            control,
            rails,
            config,
            plan,
            all_rails,
            starts,
            mounts,
            environment: Vec::new(),
            of_clients: Vec::new(),
            root,
        };
        cluster.configure();
        cluster.railfsd().arg("init").args(&cluster.directories).output().map_or_else(
            |error| panic!("railfsd init: {error}"),
            |output| assert!(output.status.success(), "railfsd init: {}", String::from_utf8_lossy(&output.stderr)),
        );
        cluster
    }

    fn configure(&self) {
        let written = std::fs::write(&self.config, self.text(&self.plan));
        written.unwrap_or_else(|error| panic!("{}: {error}", self.config.display()));
    }

    /// From the next start on, only the first so many of its rails.
    ///
    /// # Panics
    /// It never had so many.
    pub fn set_rails(&mut self, rails: usize) {
        self.rails = self.all_rails[..rails].to_vec();
        self.configure();
    }

    fn text(&self, plan: &Plan) -> String {
        use std::fmt::Write;
        let quoted: Vec<String> = self.control.iter().map(|address| format!("\"{address}\"")).collect();
        let mut text = format!(
            "node = \"n1\"\nstate_dir = {:?}\nstripe_dirs = {:?}\n[control]\nlisten = [{}]\n",
            self.root.path().join("state"),
            self.directories,
            quoted.join(", ")
        );
        for (place, rail) in self.rails.iter().enumerate() {
            let _ = write!(text, "[[rail]]\nfabric = \"f{place}\"\ntransport = \"tcp\"\nlisten = \"{rail}\"\n");
        }
        let _ = write!(text, "[retention]\nsuperseded = \"{}\"\npin_lease = \"2 s\"\n", plan.retention);
        if plan.network && !plan.more.contains("[security]") {
            text.push_str("[security]\ninsecure = true\n");
        }
        text + &plan.more
    }

    /// The configuration file.
    pub fn config(&self) -> &Path {
        &self.config
    }
    /// The network of its own.
    ///
    /// # Panics
    /// It has none.
    pub fn network(&self) -> &Network {
        self.network.as_ref().unwrap_or_else(|| panic!("this store has no network of its own"))
    }

    fn command(&self, side: Side, name: &str) -> Command {
        let program = program(name);
        let mut command = match &self.network {
            Some(network) => network.command(side, &program),
            None => Command::new(program),
        };
        command.env("RAILFS_RUNTIME_DIR", self.root.path().join("run")).env_remove("RAILFS_LOG").stdin(Stdio::null());
        command
    }
    /// The server's program, without arguments.
    pub fn railfsd(&self) -> Command {
        self.command(Side::Server, "railfsd")
    }
    /// The client's program, without arguments.
    pub fn railfs(&self) -> Command {
        let mut command = self.command(Side::Client, "railfs");
        command.envs(self.of_clients.iter().map(|(name, value)| (name, value)));
        command
    }
    /// `bash` inside the network of the store, where it has one of its own.
    pub fn nobody(&self) -> Option<Command> {
        Some(self.network.as_ref()?.command(Side::Client, Path::new("bash")))
    }
    /// Runs the client's program.
    #[track_caller]
    pub fn cli<S: AsRef<std::ffi::OsStr>>(&self, arguments: &[S]) -> Output {
        run(self.railfs().args(arguments), COMMAND)
    }
    /// `railfs put`, which must succeed.
    #[track_caller]
    pub fn put(&self, source: &Path, key: &str) {
        self.cli(&["put".as_ref(), source.as_os_str(), self.url(key).as_ref()]).expect(0);
    }

    /// The URL of a key ("" and "dir/": a directory).
    ///
    /// # Panics
    /// No key can be so.
    pub fn url(&self, key: impl AsRef<[u8]>) -> String {
        let key = key.as_ref();
        let bare = key.strip_suffix(b"/").unwrap_or(key);
        let address = self.control[0];
        let namespace = Namespace::new(NAMESPACE).unwrap_or_else(|error| panic!("{error}"));
        let url = Url {
            host: address.ip().to_string(),
            port: address.port(),
            namespace,
            key: (!bare.is_empty()).then(|| Key::new(bare.to_vec()).unwrap_or_else(|error| panic!("{error}"))),
            directory: bare.len() < key.len() || key.is_empty(),
        };
        url.to_string()
    }

    /// Starts the server and waits until it serves.
    ///
    /// # Panics
    /// It does not.
    pub fn serve(&mut self) {
        assert!(self.server.is_none(), "it is served already");
        self.starts += 1;
        let out = self.root.path().join(format!("railfsd-{}.out", self.starts));
        let file = |path: &Path| File::create(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut command = self.railfsd();
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.arg("serve").arg("--config").arg(&self.config).stdout(file(&out)).stderr(file(&self.log()));
        let mut process = Process::start(&mut command);
        wait::eventually("railfsd serves", wait::SOON, || {
            if std::fs::read_to_string(&out).is_ok_and(|text| text.contains("railfsd ready")) {
                return Ok(());
            }
            if let Some(status) = process.ended() {
                panic!("railfsd ended ({status}): {}", std::fs::read_to_string(self.log()).unwrap_or_default());
            }
            Err("it has not said so".to_owned())
        });
        self.server = Some(process);
    }

    /// The log of the server's last run.
    pub fn log(&self) -> PathBuf {
        self.root.path().join(format!("railfsd-{}.err", self.starts))
    }
    /// The server's process.
    ///
    /// # Panics
    /// It is not served.
    pub fn server(&mut self) -> &mut Process {
        self.server.as_mut().unwrap_or_else(|| panic!("the store is not served"))
    }
    /// Whether the server runs.
    pub fn is_served(&mut self) -> bool {
        self.server.as_mut().is_some_and(|server| server.ended().is_none())
    }
    /// Stops the server by SIGTERM, which must end well.
    ///
    /// # Panics
    /// It does not.
    pub fn stop(&mut self) {
        let mut server = self.server.take().unwrap_or_else(|| panic!("the store is not served"));
        server.signal(Signal::TERM);
        let status = server.wait(wait::SOON);
        assert!(
            status.success(),
            "railfsd ended with {status}: {}",
            std::fs::read_to_string(self.log()).unwrap_or_default()
        );
    }
    /// `kill -9`.
    pub fn kill(&mut self) {
        if let Some(mut server) = self.server.take() {
            server.kill();
        }
    }

    /// Mounts what lies below a key ("" for all), with options.
    ///
    /// # Panics
    /// It does not come up.
    pub fn mount(&mut self, key: &str, options: &str) -> Mount {
        self.mounts += 1;
        let path = self.root.path().join(format!("m{}", self.mounts));
        std::fs::create_dir(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let log = self.root.path().join(format!("m{}.log", self.mounts));
        Mount::start(|| self.railfs(), &self.url(key), path, log, options)
    }

    /// What `railfs status URL --json` says.
    ///
    /// # Errors
    /// It fails.
    pub fn try_status(&self) -> Result<Value, String> {
        let output = self.cli(&["status", "--json", &self.url("")]);
        if output.code != Some(0) {
            return Err(output.err());
        }
        serde_json::from_slice(&output.stdout).map_err(|error| format!("{error} in {}", output.out()))
    }
    /// The same.
    ///
    /// # Panics
    /// It fails.
    #[track_caller]
    pub fn status(&self) -> Value {
        self.try_status().unwrap_or_else(|error| panic!("status: {error}"))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // A stopped process does not end by SIGTERM; what tests want of a clean end they ask for themselves.
        self.kill();
        if std::thread::panicking() {
            show_end(&self.log());
        }
        self.end_mounts();
    }
}

impl Cluster {
    /// Ends what a test that failed has left of mounts which it made by `railfs mount` without `-f`.
    fn end_mounts(&self) {
        for entry in std::fs::read_dir(self.root.path().join("run")).into_iter().flatten().flatten() {
            // A lock names its holder; the command line tells that the process is still that one.
            let holder = std::fs::read(entry.path()).ok().and_then(|text| serde_json::from_slice::<Value>(&text).ok());
            let pid = holder.and_then(|holder| i32::try_from(holder["pid"].as_u64()?).ok());
            let Some(pid) = pid.and_then(Pid::from_raw) else { continue };
            let line = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
            if String::from_utf8_lossy(&line).contains(&self.root.path().display().to_string()) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        for point in table.lines().filter_map(|line| line.split(' ').nth(4)).map(Path::new) {
            if point.starts_with(self.root.path()) {
                let _ = rustix::mount::unmount(point, UnmountFlags::DETACH);
            }
        }
    }
}

/// Shows the last lines of a log, for a test that failed.
pub fn show_end(path: &Path) {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    eprintln!("-- the end of {}", path.display());
    for line in &lines[lines.len().saturating_sub(40)..] {
        eprintln!("   {line}");
    }
}
