//! What is measured: a server with two stripe directories and two rails, and mounts of it, as real processes.
//!
//! Guarantees: whatever happens, what was started is stopped, by its own process id, and what was mounted is unmounted.

use crate::Failed;
use railfs::status::Document;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Ticks a second in /proc, on every architecture that railfs is built for.
const USER_HZ: f64 = 100.0;

/// Where everything lies and which programs are used.
#[derive(Debug)]
pub struct Stand {
    /// The railfs and railfsd that are measured.
    pub programs: PathBuf,
    /// An empty directory.
    pub work: PathBuf,
    /// The server's URL with the namespace.
    pub url: String,
    /// The server's control address.
    pub address: String,
    server: Child,
}

/// A mounted namespace.
#[derive(Debug)]
pub struct Mount<'a> {
    stand: &'a Stand,
    /// Where.
    pub point: PathBuf,
    /// The daemon.
    pub pid: u32,
}

/// Runs a program to its end; its output.
///
/// # Errors
/// It failed: its last words.
pub fn run(command: &mut Command) -> Result<String, Failed> {
    let shown = format!("{command:?}");
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{shown}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(format!("{shown} ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim()))
}

/// Processor seconds, user and system, of a process so far.
pub fn cpu_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in brackets may have spaces in it; user and system time are the 12th and 13th field behind it.
    let fields = stat.rsplit(')').next().unwrap_or_default();
    let ticks: u64 = fields.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    ticks as f64 / USER_HZ
}

/// Sends SIGTERM and waits; after 15 s SIGKILL.
pub fn stop(child: &mut Child) {
    let _ = rustix::process::kill_process(rustix::process::Pid::from_child(child), rustix::process::Signal::TERM);
    let until = Instant::now() + Duration::from_secs(15);
    while matches!(child.try_wait(), Ok(None)) {
        if Instant::now() > until {
            let _ = child.kill();
            let _ = child.wait();
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits for a line of a child's standard output that begins with `word`; the child's output goes on being read.
///
/// # Errors
/// It ended first.
pub fn hear(child: &mut Child, word: &str) -> Result<String, Failed> {
    let stdout = child.stdout.take().ok_or("its output is not read")?;
    let mut lines = BufReader::new(stdout).lines();
    let found = lines.by_ref().map_while(Result::ok).find(|line| line.starts_with(word));
    let found = found.ok_or_else(|| format!("ended before it said {word}"))?;
    // So that the pipe never fills.
    std::thread::spawn(move || lines.for_each(drop));
    Ok(found)
}

impl Stand {
    /// Makes a store in `work` and serves it on ports that the kernel chooses.
    ///
    /// # Errors
    /// The server does not start: its own words are in `work`.
    pub fn start(programs: &Path, work: &Path) -> Result<Stand, Failed> {
        let at = |name: &str| work.join(name);
        for name in ["disk0", "disk1", "state"] {
            std::fs::create_dir(at(name)).map_err(|error| format!("{}: {error}", at(name).display()))?;
        }
        let daemon = programs.join("railfsd");
        run(Command::new(&daemon).arg("init").arg(at("disk0")).arg(at("disk1")))?;
        let config = format!(
            "state_dir = {:?}\nstripe_dirs = [{:?}, {:?}]\n[control]\nlisten = \"127.0.0.1:0\"\n\
             [[rail]]\nfabric = \"a\"\nlisten = \"127.0.0.1:0\"\n[[rail]]\nfabric = \"b\"\nlisten = \"127.0.0.1:0\"\n",
            at("state"),
            at("disk0"),
            at("disk1")
        );
        std::fs::write(at("railfsd.toml"), config).map_err(|error| error.to_string())?;
        let log = std::fs::File::create(at("railfsd.log")).map_err(|error| error.to_string())?;
        let mut server = Command::new(&daemon)
            .args(["serve", "--config"])
            .arg(at("railfsd.toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .map_err(|error| format!("{}: {error}", daemon.display()))?;
        let heard = hear(&mut server, "railfsd ready").and_then(|line| {
            let address = line.split_whitespace().find_map(|word| word.strip_prefix("control="));
            address.map(str::to_owned).ok_or_else(|| format!("not understood: {line}"))
        });
        let address = match heard {
            Ok(address) => address,
            Err(error) => {
                stop(&mut server);
                let log = std::fs::read_to_string(at("railfsd.log")).unwrap_or_default();
                return Err(format!("railfsd {error}\n{log}"));
            }
        };
        let url = format!("railfs://{address}/bench");
        Ok(Stand { programs: programs.to_owned(), work: work.to_owned(), url, address, server })
    }

    /// The server's process.
    pub fn server_pid(&self) -> u32 {
        self.server.id()
    }

    /// The `railfs` command, with its locks and sockets below `work`.
    pub fn railfs(&self) -> Command {
        let mut command = Command::new(self.programs.join("railfs"));
        command.env("RAILFS_RUNTIME_DIR", self.work.join("run"));
        command
    }

    /// Puts `size` bytes that do not repeat under `name`.
    ///
    /// # Errors
    /// The disk or the put.
    pub fn put(&self, name: &str, size: u64) -> Result<(), Failed> {
        let path = self.work.join(name);
        let fail = |error: std::io::Error| format!("{}: {error}", path.display());
        let mut file = std::fs::File::create(&path).map_err(fail)?;
        let mut word = 0x9e37_79b9_7f4a_7c15u64;
        let mut piece = vec![0u8; 1 << 20];
        for _ in 0..size / piece.len() as u64 {
            for place in piece.chunks_exact_mut(8) {
                word ^= word << 13;
                word ^= word >> 7;
                word ^= word << 17;
                place.copy_from_slice(&word.to_le_bytes());
            }
            std::io::Write::write_all(&mut file, &piece).map_err(fail)?;
        }
        drop(file);
        run(self.railfs().arg("put").arg(&path).arg(format!("{}/{name}", self.url)))?;
        std::fs::remove_file(&path).map_err(fail)
    }

    /// Mounts the namespace with these options.
    ///
    /// # Errors
    /// What `railfs mount` said.
    pub fn mount(&self, options: &str) -> Result<Mount<'_>, Failed> {
        let point = self.work.join("mnt");
        std::fs::create_dir_all(&point).map_err(|error| format!("{}: {error}", point.display()))?;
        run(self.railfs().arg("mount").arg(format!("{}/", self.url)).arg(&point).args(["-o", options]))?;
        let mut mount = Mount { stand: self, point, pid: 0 };
        mount.pid = mount.status()?.mount.map_or(0, |mount| mount.pid);
        Ok(mount)
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        stop(&mut self.server);
    }
}

impl Mount<'_> {
    /// What `railfs status --json` says of it.
    ///
    /// # Errors
    /// It does not answer.
    pub fn status(&self) -> Result<Document, Failed> {
        let text = run(self.stand.railfs().arg("status").arg(&self.point).arg("--json"))?;
        serde_json::from_str(&text).map_err(|error| format!("status: {error}"))
    }

    /// Object bytes that came over the rails so far.
    ///
    /// # Errors
    /// It does not answer.
    pub fn rail_bytes(&self) -> Result<Vec<u64>, Failed> {
        Ok(self.status()?.rails.iter().map(|rail| rail.bytes_received).collect())
    }
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        if let Err(error) = run(self.stand.railfs().arg("umount").arg(&self.point)) {
            eprintln!("bench: {error}");
        }
    }
}
