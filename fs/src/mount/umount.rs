//! `railfs umount`: takes a mount away and waits until its daemon is gone.
//!
//! Guarantees: touches only railfs mounts, never walks into one, and returns in bounded time.

use super::{busy, kernel, place, runtime, table};
use crate::failure::{Failure, io};
use kernel::UnmountError;
use railfs_proto::limits::STOP_DEADLINE;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::path::Path;
use std::time::{Duration, Instant};

/// Unmounts; `lazy`: also while programs use it.
///
/// # Errors
/// Not a railfs mount, busy, or the daemon does not end.
pub fn umount(path: &Path, lazy: bool) -> Result<(), Failure> {
    let point = place::resolve(path)?;
    let shown = point.display();
    let files = runtime::files(&point)?;
    let mounted = table::railfs_at(&point).map_err(|error| io("/proc/self/mountinfo", &error))?;
    let holder = runtime::holder(&files.lock);
    if mounted.is_none() && holder.is_none() {
        return Err(Failure::failed(format!(
            "{shown} is not a railfs mount (`railfs status` lists those of this user)"
        )));
    }
    // Taken while it lives, so that it can only mean this process.
    let process = holder.as_ref().and_then(|holder| process(holder.pid));
    if mounted.is_some() {
        kernel::unmount(&point, lazy).map_err(|error| match error {
            UnmountError::Busy => {
                // Neither this process nor the one that serves the mount is what keeps it busy.
                let serves = |pid| holder.as_ref().is_some_and(|holder| holder.pid == pid);
                let mut holders = busy::holders(&point);
                holders.retain(|found| found.pid != std::process::id() && !serves(found.pid));
                let who = busy::describe(&holders).unwrap_or_else(|| {
                    format!(
                        "a program of another user has a file or its working directory there \
                         (`fuser -vm {shown}` as root names it)"
                    )
                });
                Failure::failed(format!("{shown} is busy: {who}; end that first, or say --lazy"))
            }
            UnmountError::Other(text) => Failure::failed(format!("{shown}: {text}")),
        })?;
    }
    let Some(holder) = holder else { return Ok(()) };
    let deadline = Instant::now() + STOP_DEADLINE + Duration::from_secs(1);
    while runtime::holder(&files.lock).is_some_and(|now| now.pid == holder.pid) {
        if lazy && table::railfs_at(&point).is_ok_and(|mounted| mounted.is_none()) && Instant::now() > deadline {
            return Ok(()); // Programs still have files open: the daemon serves them until they are closed.
        }
        if Instant::now() > deadline {
            let pid = holder.pid;
            return Err(Failure::failed(match mounted.is_some() {
                true => {
                    format!("{shown} is unmounted, but process {pid} still runs: programs may have files open there")
                }
                false => format!(
                    "{shown} is not mounted any more; process {pid} still serves what was open when it was taken away, and \
                     ends with that"
                ),
            }));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    // It has let go of the place; a script that goes on may count on the process being gone, too.
    process.map_or(Ok(()), |process| wait_for(&process, deadline)).map_err(|error| io("waiting for the daemon", &error))
}

/// `None`: there is no such process any more.
fn process(pid: u32) -> Option<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

/// Until it has ended or the time is up.
fn wait_for(process: &OwnedFd, deadline: Instant) -> std::io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 0, tv_nsec: 0 });
        match poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => {}
            ended => return ended.map(|_| ()).map_err(Into::into),
        }
    }
}

/// Takes a mount away whose daemon is dead; does nothing, and that well, where there is none.
///
/// # Errors
/// It cannot be taken away.
pub fn umount_dead(path: &Path) -> Result<(), Failure> {
    let point = place::resolve(path)?;
    let files = runtime::files(&point)?;
    let mounted = table::railfs_at(&point).map_err(|error| io("/proc/self/mountinfo", &error))?;
    if mounted.is_none() || runtime::holder(&files.lock).is_some() || !place::is_dead(&point) {
        return Ok(());
    }
    kernel::unmount(&point, true).map_err(|error| match error {
        UnmountError::Busy => Failure::failed(format!("{}: the dead mount is busy", point.display())),
        UnmountError::Other(text) => Failure::failed(format!("{}: {text}", point.display())),
    })
}
