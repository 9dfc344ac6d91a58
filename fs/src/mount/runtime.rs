//! What a mount leaves outside itself: a lock, a control socket and a log, in a directory for this user only.
//!
//! Guarantees: one daemon per place at a time, by a lock that dies with its holder; whoever is refused is told who holds
//! it; a clean end leaves no file.

use super::table;
use crate::failure::{Failure, io};
use railfs_proto::limits::STOP_DEADLINE;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Names the directory instead of the usual one.
pub const DIRECTORY_VARIABLE: &str = "RAILFS_RUNTIME_DIR";

/// Somebody who only looks ([`holder`]) has the lock for a moment; whoever mounts keeps it.
const LOOKING: Duration = Duration::from_millis(100);
/// A daemon whose mount was taken away from outside learns of it a moment later.
const UNNOTICED: Duration = Duration::from_secs(1);
/// One that says that it ends has its own limit for that.
const ENDING: Duration = STOP_DEADLINE.saturating_add(Duration::from_secs(2));

/// Who holds a place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Its process.
    pub pid: u32,
    /// What it mounts.
    pub url: String,
    /// Where, as text.
    pub mountpoint: String,
    /// Its log, as text.
    pub log: String,
    /// Its mount is gone, and it will be soon.
    #[serde(default)]
    pub ending: bool,
}

/// The files of one place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// The lock, with the holder in it.
    pub lock: PathBuf,
    /// The control socket.
    pub socket: PathBuf,
    /// The log, where no other was named.
    pub log: PathBuf,
}

/// A held lock. Dropping it removes the files and frees the place.
#[derive(Debug)]
pub struct Lock {
    file: File,
    files: Files,
    holder: Holder,
    keep_log: bool,
}

/// The directory of this user's mounts: `/run/railfs` for root, else `$XDG_RUNTIME_DIR/railfs`, else one in the directory
/// for temporary files. It is made if it is missing.
///
/// # Errors
/// It cannot be made, or belongs to somebody else.
pub fn directory() -> Result<PathBuf, Failure> {
    let user = rustix::process::geteuid();
    let path = match (std::env::var_os(DIRECTORY_VARIABLE), std::env::var_os("XDG_RUNTIME_DIR")) {
        (Some(directory), _) if !directory.is_empty() => PathBuf::from(directory),
        _ if user.is_root() => PathBuf::from("/run/railfs"),
        (_, Some(directory)) if !directory.is_empty() => PathBuf::from(directory).join("railfs"),
        _ => std::env::temp_dir().join(format!("railfs-{}", user.as_raw())),
    };
    private(path)
}

/// Makes the directory if it is missing; one that others can enter, or that is another user's, is refused.
fn private(path: PathBuf) -> Result<PathBuf, Failure> {
    let user = rustix::process::geteuid();
    let mut builder = std::fs::DirBuilder::new();
    if let Err(error) = builder.mode(0o700).recursive(true).create(&path) {
        return Err(Failure::failed(format!(
            "{}: {error}: set {DIRECTORY_VARIABLE} to another directory",
            path.display()
        )));
    }
    // In a directory that all may write to, the name could have been taken by anybody.
    let metadata = std::fs::symlink_metadata(&path).map_err(|error| io(path.display(), &error))?;
    if !metadata.is_dir() || metadata.uid() != user.as_raw() {
        return Err(Failure::failed(format!(
            "{} is not a directory of this user: remove it, or set {DIRECTORY_VARIABLE} to another one",
            path.display()
        )));
    }
    if metadata.mode() & 0o077 != 0 {
        return Err(Failure::failed(format!(
            "{path} can be entered by others (mode {:04o}): `chmod 700 {path}`, or set {DIRECTORY_VARIABLE} to another \
             directory",
            metadata.mode() & 0o7777,
            path = path.display()
        )));
    }
    Ok(path)
}

/// The files of a resolved place.
///
/// # Errors
/// As [`directory`].
pub fn files(point: &Path) -> Result<Files, Failure> {
    let directory = directory()?;
    let name = format!("{:016x}", crate::hash::bytes(super::kernel::bytes(point)));
    let file = |ending: &str| directory.join(format!("{name}.{ending}"));
    Ok(Files { lock: file("lock"), socket: file("sock"), log: file("log") })
}

/// Removes the log of a place that its holder does not write to, or that has none.
pub fn remove_unused_log(point: &Path) {
    if let Ok(files) = files(point)
        && holder(&files.lock).is_none_or(|holder| Path::new(&holder.log) != files.log)
    {
        let _ = std::fs::remove_file(&files.log);
    }
}

/// Everybody who holds a place of this user now.
///
/// # Errors
/// As [`directory`].
pub fn holders() -> Result<Vec<(Holder, Files)>, Failure> {
    let directory = directory()?;
    let mut found = Vec::new();
    for entry in std::fs::read_dir(&directory).map_err(|error| io(directory.display(), &error))?.flatten() {
        let lock = entry.path();
        if lock.extension().is_some_and(|ending| ending == "lock")
            && let Some(holder) = holder(&lock)
        {
            let files = Files { socket: lock.with_extension("sock"), log: lock.with_extension("log"), lock };
            found.push((holder, files));
        }
    }
    found.sort_by(|a, b| a.0.mountpoint.cmp(&b.0.mountpoint));
    Ok(found)
}

/// Who holds this lock now; `None`: nobody.
pub fn holder(lock: &Path) -> Option<Holder> {
    let mut file = File::open(lock).ok()?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => None,
        Err(_) => Some(read_holder(&mut file)),
    }
}

fn write_holder(file: &mut File, holder: &Holder) -> std::io::Result<()> {
    let text = serde_json::to_vec(holder)?;
    file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(&text))
}

fn read_holder(file: &mut File) -> Holder {
    let mut text = String::new();
    let read = file.rewind().and_then(|()| file.take(64 << 10).read_to_string(&mut text));
    let holder = read.ok().and_then(|_| serde_json::from_str(&text).ok());
    // Taken a moment ago, not written yet.
    holder.unwrap_or(Holder {
        pid: 0,
        url: String::new(),
        mountpoint: String::new(),
        log: String::new(),
        ending: false,
    })
}

impl Lock {
    /// Takes the place. `keep_log`: the log is the user's own file.
    ///
    /// # Errors
    /// Somebody holds it (named), or the file cannot be written.
    pub fn take(files: &Files, holder: &Holder, keep_log: bool) -> Result<Lock, Failure> {
        let path = files.lock.display();
        let started = Instant::now();
        loop {
            let opened =
                OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&files.lock);
            let mut file = opened.map_err(|error| io(&path, &error))?;
            if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                let other = read_holder(&mut file);
                let mounted = table::railfs_at(Path::new(&holder.mountpoint)).is_ok_and(|mounted| mounted.is_some());
                let patience = match (other.ending, mounted) {
                    (true, _) => ENDING,
                    (false, true) => LOOKING,
                    (false, false) => UNNOTICED,
                };
                if started.elapsed() < patience {
                    std::thread::sleep(Duration::from_millis(20));
                    continue;
                }
                let what = match mounted {
                    true => "mounted already",
                    // About to be, or taken away lazily.
                    false => {
                        "mounted already, though not to be seen now (it is about to be, or programs still use it since it was taken away)"
                    }
                };
                return Err(Failure::failed(format!(
                    "{} is {what}, by process {} ({}): `railfs umount {}` first",
                    holder.mountpoint, other.pid, other.url, holder.mountpoint
                )));
            }
            // The last holder may have removed the file between our open and our lock.
            let same =
                std::fs::metadata(&files.lock).ok().zip(file.metadata().ok()).is_some_and(|(a, b)| a.ino() == b.ino());
            if !same {
                continue;
            }
            write_holder(&mut file, holder).map_err(|error| io(&path, &error))?;
            return Ok(Lock { file, files: files.clone(), holder: holder.clone(), keep_log });
        }
    }

    /// The mount is gone, or about to go: whoever wants the place next waits for this process instead of giving up.
    pub fn ending(&mut self) {
        self.holder.ending = true;
        if let Err(error) = write_holder(&mut self.file, &self.holder) {
            tracing::warn!("{}: {error}", self.files.lock.display());
        }
    }

    /// Whoever fails wants the log to stay.
    pub fn keep_log(&mut self) {
        self.keep_log = true;
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.files.socket);
        if !self.keep_log {
            let _ = std::fs::remove_file(&self.files.log);
            let _ = std::fs::remove_file(super::log::previous(&self.files.log));
        }
        // While it is still locked: whoever opened it before and locks it after sees that it is gone.
        let _ = std::fs::remove_file(&self.files.lock);
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder_of(point: &str) -> Holder {
        Holder {
            pid: 7,
            url: "railfs://h/ns/".to_owned(),
            mountpoint: point.to_owned(),
            log: String::new(),
            ending: false,
        }
    }

    #[test]
    fn a_runtime_directory_is_for_its_user_alone() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/run");
        private(path.clone()).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o7777, 0o700);
        for mode in [0o755, 0o750, 0o701] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let refused = private(path.clone()).unwrap_err().message;
            assert!(refused.contains(&format!("mode {mode:04o}")) && refused.contains("chmod 700"), "{refused}");
        }
    }

    #[test]
    fn a_place_has_one_holder_and_the_second_is_told_who() {
        let dir = tempfile::tempdir().unwrap();
        let file = |ending: &str| dir.path().join(format!("x.{ending}"));
        let files = Files { lock: file("lock"), socket: file("sock"), log: file("log") };
        assert_eq!(holder(&files.lock), None);
        let lock = Lock::take(&files, &holder_of("/m"), false).unwrap();
        assert_eq!(holder(&files.lock), Some(holder_of("/m")));
        let refused = Lock::take(&files, &holder_of("/m"), false).unwrap_err();
        // There is no mount there to be seen.
        let words = ["/m is mounted already, though", "by process 7 (railfs://h/ns/): `railfs umount /m` first"];
        assert!(words.iter().all(|word| refused.message.contains(word)), "{refused}");
        std::fs::write(&files.log, "").unwrap();
        // One that ends is waited for.
        let mut lock = lock;
        lock.ending();
        let (send, taken) = std::sync::mpsc::channel();
        let wanted = files.clone();
        std::thread::spawn(move || send.send(Lock::take(&wanted, &holder_of("/m"), false)).unwrap());
        assert!(taken.recv_timeout(Duration::from_millis(300)).is_err(), "it still ends");
        drop(lock);
        let lock = taken.recv_timeout(Duration::from_secs(20)).unwrap().unwrap();
        assert_eq!(holder(&files.lock), Some(holder_of("/m")));
        drop(lock);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "a clean end leaves no file");
        std::fs::write(&files.lock, "left by a crash").unwrap();
        let mut lock = Lock::take(&files, &holder_of("/m"), false).unwrap();
        std::fs::write(&files.log, "").unwrap();
        lock.keep_log();
        drop(lock);
        assert!(files.log.exists());
    }
}
