//! A mount of a test's own: `railfs mount -f` as a process.
//!
//! Guarantees: the mount answers when it is handed out; whatever became of its daemon, the mount is gone after the drop.

use crate::cluster::{COMMAND, show_end};
use crate::process::{Output, Process, descriptors, run, threads};
use crate::wait;
use rustix::mount::UnmountFlags;
use rustix::process::Signal;
use serde_json::Value;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// See the module.
#[derive(Debug)]
pub struct Mount {
    /// The mount point.
    pub path: PathBuf,
    /// The daemon's log.
    pub log: PathBuf,
    /// The daemon.
    pub daemon: Process,
    run: PathBuf,
    base: (usize, usize),
}

/// Whether something of type railfs is mounted there.
pub fn is_mounted(path: &Path) -> bool {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let place = format!(" {} ", path.display());
    table.lines().any(|line| line.contains(&place) && line.contains(" - fuse.railfs "))
}

impl Mount {
    /// Mounts, and waits until the mount answers and every rail is up.
    ///
    /// # Panics
    /// It does not come up.
    pub fn start(railfs: impl Fn() -> Command, url: &str, path: PathBuf, log: PathBuf, options: &str) -> Mount {
        let file = File::create(&log).unwrap_or_else(|error| panic!("{}: {error}", log.display()));
        let mut command = railfs();
        command.args(["mount", "-f"]);
        if !options.is_empty() {
            command.args(["-o", options]);
        }
        command.arg(url).arg(&path).stdout(Stdio::null()).stderr(file);
        let run = path.parent().map(|parent| parent.join("run")).unwrap_or_default();
        let mut mount = Mount { daemon: Process::start(&mut command), path, log, run, base: (0, 0) };
        wait::eventually("the mount answers, with every rail up", wait::SOON, || {
            if let Some(status) = mount.daemon.ended() {
                let log = std::fs::read_to_string(&mount.log).unwrap_or_default();
                panic!("railfs mount ended ({status}): {log}");
            }
            let status = mount.try_status()?;
            let up = status["rails"].as_array().is_some_and(|rails| rails.iter().all(|rail| rail["state"] == "up"));
            if up { Ok(()) } else { Err(format!("rails: {}", status["rails"])) }
        });
        assert!(is_mounted(&mount.path), "{} is not in the table of mounts", mount.path.display());
        mount.base = (descriptors(mount.pid()), threads(mount.pid()));
        mount
    }

    /// A path in the mount.
    pub fn at(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
    /// The daemon's id.
    pub fn pid(&self) -> u32 {
        self.daemon.pid()
    }
    /// Descriptors and threads of the daemon when it was new.
    pub fn base(&self) -> (usize, usize) {
        self.base
    }

    fn railfs(&self) -> Command {
        let mut command = Command::new(crate::process::program("railfs"));
        command.env("RAILFS_RUNTIME_DIR", &self.run).env_remove("RAILFS_LOG");
        command
    }
    /// What `railfs status MOUNTPOINT --json` says.
    ///
    /// # Errors
    /// It fails.
    pub fn try_status(&self) -> Result<Value, String> {
        let output = run(self.railfs().args(["status", "--json"]).arg(&self.path), COMMAND);
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
    /// One counter.
    ///
    /// # Panics
    /// There is none of that name.
    #[track_caller]
    pub fn counter(&self, name: &str) -> u64 {
        let status = self.status();
        status["counters"][name].as_u64().unwrap_or_else(|| panic!("no counter {name}: {}", status["counters"]))
    }
    /// Object bytes received by each rail, in the order of the configuration.
    #[track_caller]
    pub fn received(&self) -> Vec<u64> {
        self.rails("bytes_received").iter().map(|value| value.as_u64().unwrap_or(0)).collect()
    }
    /// One field of each rail.
    #[track_caller]
    pub fn rails(&self, field: &str) -> Vec<Value> {
        let status = self.status();
        let rails = status["rails"].as_array().cloned().unwrap_or_default();
        rails.iter().map(|rail| rail[field].clone()).collect()
    }
    /// `railfs umount`.
    pub fn umount(&self) -> Output {
        run(self.railfs().arg("umount").arg(&self.path), COMMAND)
    }
    /// SIGTERM, which must end the daemon well and take the mount away.
    ///
    /// # Panics
    /// It does not.
    pub fn stop(mut self) {
        self.daemon.signal(Signal::TERM);
        let status = self.daemon.wait(wait::SOON);
        assert!(status.success(), "railfs mount ended with {status}");
        assert!(!is_mounted(&self.path), "{} is still mounted", self.path.display());
    }
    /// `kill -9`; the dead mount stays.
    pub fn kill(&mut self) {
        self.daemon.kill();
    }
    /// What the daemon has logged.
    pub fn logged(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if std::thread::panicking() {
            show_end(&self.log);
        }
        self.daemon.kill();
        while is_mounted(&self.path) {
            if rustix::mount::unmount(&self.path, UnmountFlags::DETACH).is_err() {
                break;
            }
        }
    }
}
