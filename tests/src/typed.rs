//! Mounts as they are typed, behind the command or in front of it, and what they must not leave.
//!
//! Guarantees: what is looked for is looked for by the test's own paths, never by a program's name.

use crate::cluster::{Cluster, Plan};
use crate::data::write_file;
use crate::mount::is_mounted;
use crate::wait;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Bytes of the one object of [`store`], whose seed is 4.
pub const SIZE: u64 = 400_000;

/// A store with one object, "f".
///
/// # Panics
/// It cannot be made.
pub fn store(plan: &Plan) -> Cluster {
    let cluster = Cluster::start(plan);
    let source = cluster.root.path().join("source");
    write_file(&source, 4, SIZE);
    cluster.put(&source, "f");
    cluster
}

/// A new directory of the test's own.
///
/// # Panics
/// It cannot be made.
pub fn place(cluster: &Cluster, name: &str) -> PathBuf {
    let place = cluster.root.path().join(name);
    std::fs::create_dir(&place).unwrap_or_else(|error| panic!("{}: {error}", place.display()));
    place
}

/// `railfs mount` as it is typed.
pub fn mount_command(cluster: &Cluster, place: &Path, more: &[&str]) -> Command {
    let mut command = cluster.railfs();
    command.arg("mount").args(more).arg(cluster.url("")).arg(place);
    command
}

/// The daemon's id, by status.
///
/// # Panics
/// Status does not say.
pub fn daemon(cluster: &Cluster, place: &Path) -> u32 {
    let status = cluster.cli(&["status".as_ref(), "--json".as_ref(), place.as_os_str()]).expect(0);
    let status: Value = serde_json::from_slice(&status.stdout).unwrap_or_default();
    let pid = status["mount"]["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
    pid.unwrap_or_else(|| panic!("no pid: {status}"))
}

/// Sends a signal, if there is still such a process.
pub fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// Processes that have this path on their command line, other than this one.
pub fn processes(path: &Path) -> Vec<u32> {
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let path = path.display().to_string();
    let here = |pid: &u32| {
        // Empty of one that has ended and is not waited for yet.
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&path)
    };
    pids.filter(|pid| *pid != std::process::id()).filter(here).collect()
}

/// Waits until there is none.
///
/// # Panics
/// Some stay.
pub fn no_process(path: &Path) {
    wait::eventually("no process is left", wait::SOON, || {
        let left = processes(path);
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    });
}

/// Nothing is left in the directory of locks, sockets and logs.
///
/// # Panics
/// Something is.
#[track_caller]
pub fn nothing_kept(cluster: &Cluster) {
    let left: Vec<_> = std::fs::read_dir(cluster.root.path().join("run")).into_iter().flatten().flatten().collect();
    assert!(left.is_empty(), "locks, sockets and logs are gone: {left:?}");
}

/// Mounts that lie upon each other there.
pub fn mounts_at(place: &Path) -> usize {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let place = format!(" {} ", place.display());
    table.lines().filter(|line| line.contains(&place)).count()
}

/// `railfs umount`, after which nothing is left.
///
/// # Panics
/// It fails, or something is.
#[track_caller]
pub fn stop(cluster: &Cluster, place: &Path) {
    cluster.cli(&["umount".as_ref(), place.as_os_str()]).expect(0);
    no_process(place);
    assert!(!is_mounted(place));
}
