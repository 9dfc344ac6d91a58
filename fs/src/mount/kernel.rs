//! Making and removing the mount itself: mount(2) as root, `fusermount3` otherwise.
//!
//! Guarantees: the life of the mount is ours, not the FUSE library's: it is removed at most once, and only while the
//! mount at that place is still the one that was made. Nothing here waits for the file system's answers.

use super::options::Options;
use super::table::{self, FSTYPE};
use crate::failure::{Failure, io};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use std::ffi::CString;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const DEVICE: &str = "/dev/fuse";
/// Its numbers.
const NUMBERS: (u32, u32) = (10, 229);
const HELPER: &str = "fusermount3";

/// A mount that was made here. Dropping it removes it.
#[derive(Debug)]
pub struct Mount {
    point: PathBuf,
    /// Number of the FUSE connection; `None`: the table did not show it.
    connection: Option<u32>,
    mounted: bool,
}

/// Why a mount was not removed.
#[derive(Debug)]
pub enum UnmountError {
    /// A program has a file or its working directory there.
    Busy,
    /// Something else.
    Other(String),
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Whether the FUSE device can be opened here: then each FUSE thread can have its own.
pub fn device_opens() -> bool {
    std::fs::OpenOptions::new().read(true).write(true).open(DEVICE).is_ok()
}

/// Mounts at `point` (an absolute path) under the name `source`; returns the kernel's end of the FUSE connection.
///
/// # Errors
/// What is missing (device, helper, right) and what to do.
pub fn mount(source: &str, point: &Path, options: &Options) -> Result<(OwnedFd, Mount), Failure> {
    let fd = if is_root() { mount_directly(source, point, options)? } else { mount_by_helper(source, point, options)? };
    let connection = table::railfs_at(point).ok().flatten().map(|mounted| mounted.minor);
    Ok((fd, Mount { point: point.to_owned(), connection, mounted: true }))
}

fn mount_directly(source: &str, point: &Path, options: &Options) -> Result<OwnedFd, Failure> {
    let device = std::fs::OpenOptions::new().read(true).write(true).open(DEVICE).map_err(|error| {
        let cure = match error.kind() {
            std::io::ErrorKind::NotFound => {
                "load the kernel's module (modprobe fuse), or give the container the device"
            }
            _ => "give this user the right to it",
        };
        Failure::failed(format!("{DEVICE}: {error}: {cure}"))
    })?;
    let is_fuse = device.metadata().is_ok_and(|meta| {
        let numbers = (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
        meta.file_type().is_char_device() && numbers == NUMBERS
    });
    if !is_fuse {
        return Err(Failure::failed(format!(
            "{DEVICE} is not the FUSE device (character device 10:229): give the container the right one"
        )));
    }
    let device = OwnedFd::from(device);
    let user = rustix::process::getuid().as_raw();
    let group = rustix::process::getgid().as_raw();
    let mut data = format!("fd={},rootmode=40000,user_id={user},group_id={group}", device.as_raw_fd());
    for option in kernel_options(options) {
        data.push(',');
        data.push_str(option);
    }
    let data = CString::new(data).map_err(|_| Failure::failed("a mount option has a NUL"))?;
    let mut flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
    if options.noexec {
        flags |= MountFlags::NOEXEC;
    }
    match rustix::mount::mount(source, point, FSTYPE, flags, data.as_c_str()) {
        Ok(()) => Ok(device),
        Err(Errno::PERM) => Err(Failure::failed(format!(
            "mount at {}: not permitted: this needs CAP_SYS_ADMIN (in a container, its mount right)",
            point.display()
        ))),
        Err(Errno::NODEV) => Err(Failure::failed("the kernel has no FUSE: load its module (modprobe fuse)".to_owned())),
        Err(error) => Err(Failure::failed(format!("mount at {}: {error}", point.display()))),
    }
}

/// Who may use the mount: the kernel's own options.
fn kernel_options(options: &Options) -> Vec<&'static str> {
    let mut list = Vec::new();
    if options.allow_other {
        list.push("allow_other");
    }
    // Without it everybody who may reach the mount could read what was put for its owner only.
    if options.default_permissions || options.allow_other {
        list.push("default_permissions");
    }
    list
}

/// A value as `fusermount3` takes it in a list.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace(',', "\\,")
}

fn mount_by_helper(source: &str, point: &Path, options: &Options) -> Result<OwnedFd, Failure> {
    let mut list = vec!["ro".to_owned(), "nosuid".to_owned(), "nodev".to_owned()];
    list.extend(options.noexec.then(|| "noexec".to_owned()));
    list.extend(kernel_options(options).into_iter().map(str::to_owned));
    list.push(format!("fsname={}", escape(source)));
    list.push("subtype=railfs".to_owned());
    let (ours, theirs) = UnixStream::pair().map_err(|error| io("socket for fusermount3", &error))?;
    // The helper sends the device over this socket, which it knows by its number: it must survive the exec. No other
    // thread of this process starts programs, so nothing else can inherit it.
    rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty())
        .map_err(|error| io("socket for fusermount3", &error.into()))?;
    let child = Command::new(HELPER)
        .arg("-o")
        .arg(list.join(","))
        .arg("--")
        .arg(point)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    drop(theirs);
    let child = child.map_err(|error| helper_missing(&error))?;
    let _ = ours.set_read_timeout(Some(Duration::from_secs(10)));
    let received = receive_descriptor(&ours);
    drop(ours);
    let output = child.wait_with_output().map_err(|error| io(HELPER, &error))?;
    match received {
        Some(device) if output.status.success() => Ok(device),
        _ => {
            let text = String::from_utf8_lossy(&output.stderr);
            let text = text.trim().lines().last().unwrap_or("no word of why").to_owned();
            let cure = helper_cure(&text);
            Err(Failure::failed(format!("mount at {}: {text}{cure}", point.display())))
        }
    }
}

/// What to do, where the helper says only what it met.
fn helper_cure(said: &str) -> &'static str {
    if said.contains(DEVICE) && said.contains("Permission denied") {
        ": give this user the right to it (its usual mode is 0666)"
    } else {
        ""
    }
}

fn helper_missing(error: &std::io::Error) -> Failure {
    match error.kind() {
        std::io::ErrorKind::NotFound => {
            Failure::failed(format!("{HELPER} is missing, which mounts for users other than root: install fuse3"))
        }
        _ => io(HELPER, error),
    }
}

fn receive_descriptor(socket: &UnixStream) -> Option<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0u8];
    loop {
        match rustix::net::recvmsg(
            socket.as_fd(),
            &mut [IoSliceMut::new(&mut byte)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        ) {
            Err(Errno::INTR) => {}
            Err(_) => return None,
            Ok(_) => break,
        }
    }
    control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    })
}

/// Removes what is mounted at `point`; `lazy`: even while it is in use.
///
/// # Errors
/// Busy, or what the kernel or the helper said.
pub fn unmount(point: &Path, lazy: bool) -> Result<(), UnmountError> {
    if is_root() {
        let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
        return match rustix::mount::unmount(point, flags | UnmountFlags::NOFOLLOW) {
            Ok(()) => Ok(()),
            Err(Errno::BUSY) => Err(UnmountError::Busy),
            Err(error) => Err(UnmountError::Other(error.to_string())),
        };
    }
    let mut command = Command::new(HELPER);
    command.arg("-u").args(lazy.then_some("-z")).arg("--").arg(point);
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(|error| UnmountError::Other(helper_missing(&error).message))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if text.contains("busy") { Err(UnmountError::Busy) } else { Err(UnmountError::Other(text)) }
}

impl Mount {
    /// The FUSE connection's number.
    pub fn connection(&self) -> Option<u32> {
        self.connection
    }

    /// Tells the kernel how far to read ahead into its page cache. After INIT, which sets it; only root may.
    pub fn read_ahead(&self, kib: u32) {
        let Some(connection) = self.connection else { return };
        // The number of the FUSE connection is that of the mount's device, and of its bdi.
        let path = format!("/sys/class/bdi/0:{connection}/read_ahead_kb");
        if let Err(error) = std::fs::write(&path, kib.to_string()) {
            tracing::info!("{path}: {error}: cold reads through the page cache stay small");
        }
    }

    /// Takes the mount away from the tree at once, also while it is in use. Does nothing when it is gone already, or
    /// when another one is there now.
    pub fn detach(&mut self) {
        if !std::mem::take(&mut self.mounted) {
            return;
        }
        let now = table::railfs_at(&self.point).ok().flatten().map(|mounted| mounted.minor);
        if self.connection.is_some() && now != self.connection {
            return;
        }
        if let Err(error) = unmount(&self.point, true) {
            tracing::warn!("unmount {}: {error:?}", self.point.display());
        }
    }

    /// The last resort: every request that waits fails, also of programs that still have files open.
    pub fn abort(&self) {
        let Some(connection) = self.connection else { return };
        let path = format!("/sys/fs/fuse/connections/{connection}/abort");
        if let Err(error) = std::fs::write(&path, "1") {
            tracing::warn!("{path}: {error}");
        }
    }

    /// Somebody else has removed it.
    pub fn is_gone(&mut self) {
        self.mounted = false;
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.detach();
    }
}

/// The path's bytes, for messages and hashes.
pub fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_a_value_are_escaped_for_the_helper() {
        assert_eq!(escape("a,b\\c"), "a\\,b\\\\c");
    }

    #[test]
    fn a_device_that_is_closed_to_users_has_a_cure() {
        assert!(helper_cure("fusermount3: failed to open /dev/fuse: Permission denied").contains("0666"));
        assert_eq!(helper_cure("fusermount3: user has no write access to mountpoint /m"), "");
    }

    #[test]
    fn others_get_in_only_with_permission_checks() {
        let mut options = Options::default();
        assert!(kernel_options(&options).is_empty());
        options.allow_other = true;
        assert_eq!(kernel_options(&options), ["allow_other", "default_permissions"]);
    }
}
