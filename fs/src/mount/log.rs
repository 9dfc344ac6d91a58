//! The daemon's log file.
//!
//! Guarantees: a log never takes more than about [`LIMIT`] bytes twice (what was before is kept beside it, as FILE.1); what
//! panics and libraries write to standard error lands in it too; a log that cannot be turned over, or opened again, goes on
//! where it was. Only files are turned over: a device or a pipe is written to as it is.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tracing_subscriber::fmt::MakeWriter;

/// Bytes of a log file, about.
pub const LIMIT: u64 = 16 << 20;

/// A log file in use. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Log(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    file: File,
    /// In the file, as far as is known; `None`: not a file, never turned over.
    bytes: Option<u64>,
    limit: u64,
}

/// Where what was before goes.
pub fn previous(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".1");
    PathBuf::from(name)
}

fn open(path: &Path) -> io::Result<(File, Option<u64>)> {
    let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
    let metadata = file.metadata()?;
    let bytes = metadata.is_file().then_some(metadata.len());
    Ok((file, bytes))
}

impl Log {
    /// Opens a log, to be added to. `limit` as [`LIMIT`].
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open(path: &Path, limit: u64) -> io::Result<Log> {
        let (file, bytes) = open(path)?;
        Ok(Log(Arc::new(Mutex::new(Inner { path: path.to_owned(), file, bytes, limit }))))
    }

    /// From here on standard error is this log.
    ///
    /// # Errors
    /// What the system said.
    pub fn take_stderr(&self) -> io::Result<()> {
        Ok(rustix::stdio::dup2_stderr(&self.lock().file)?)
    }

    /// Opens the path again: somebody has moved the file away.
    ///
    /// # Errors
    /// It cannot be opened: the log stays where it was.
    pub fn reopen(&self) -> io::Result<()> {
        self.lock().reopen()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn reopen(&mut self) -> io::Result<()> {
        let (file, bytes) = open(&self.path)?;
        rustix::stdio::dup2_stderr(&file)?;
        (self.file, self.bytes) = (file, bytes);
        Ok(())
    }

    fn make_room(&mut self) {
        if self.bytes.is_none_or(|bytes| bytes < self.limit) {
            return;
        }
        let turned = std::fs::rename(&self.path, previous(&self.path)).and_then(|()| self.reopen());
        if let Err(error) = turned {
            // Tried again after as much again.
            self.bytes = Some(0);
            let _ = writeln!(self.file, "the log {} cannot be turned over: {error}", self.path.display());
        }
    }
}

/// One line at a time.
#[derive(Debug)]
pub struct Writer<'a>(MutexGuard<'a, Inner>);

impl Write for Writer<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.0.file.write(bytes)?;
        let more = u64::try_from(written).unwrap_or(u64::MAX);
        self.0.bytes = self.0.bytes.map(|bytes| bytes.saturating_add(more));
        Ok(written)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.file.flush()
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Writer<'a>;
    fn make_writer(&'a self) -> Writer<'a> {
        let mut inner = self.lock();
        inner.make_room();
        Writer(inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Standard error of the test program is given back at the end.
    #[test]
    fn a_log_is_turned_over_when_it_is_full_and_found_again_when_it_was_moved() {
        let stderr = rustix::io::dup(rustix::stdio::stderr()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log = Log::open(&path, 100).unwrap();
        for line in 0..50 {
            let mut writer = log.make_writer();
            writeln!(writer, "line {line:02} of many").unwrap();
        }
        let (now, before) =
            (std::fs::read_to_string(&path).unwrap(), std::fs::read_to_string(previous(&path)).unwrap());
        assert!(now.ends_with("line 49 of many\n") && now.len() <= 116, "{now}");
        assert!(before.len() >= 100 && before.len() <= 116, "{before}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
        std::fs::rename(&path, dir.path().join("moved")).unwrap();
        log.reopen().unwrap();
        writeln!(log.make_writer(), "after").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "after\n");
        // It cannot be opened any more: it goes on where it was.
        std::fs::create_dir(dir.path().join("other")).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(log.reopen().is_err());
        for _ in 0..20 {
            writeln!(log.make_writer(), "into what has no name any more").unwrap();
        }
        rustix::stdio::dup2_stderr(stderr).unwrap();
        let device = Log::open(Path::new("/dev/null"), 1).unwrap();
        writeln!(device.make_writer(), "nothing is turned over").unwrap();
        writeln!(device.make_writer(), "nothing is turned over").unwrap();
        assert!(!previous(Path::new("/dev/null")).exists());
    }
}
