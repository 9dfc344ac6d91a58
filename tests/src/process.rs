//! Programs that a test starts.
//!
//! Guarantees: a program that was started is ended and waited for when its handle is dropped, stopped or not, by its own
//! id; a command that does not end in time is a panic that shows what it had said.

use crate::wait;
use rustix::process::{Pid, Signal, kill_process};
use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Where `railfs` and `railfsd` are: `RAILFS_BIN_DIR`, else beside the tests that were built.
///
/// # Panics
/// They are not there: they were not built.
pub fn program(name: &str) -> PathBuf {
    let directory = std::env::var_os("RAILFS_BIN_DIR").map(PathBuf::from).or_else(|| {
        let own = std::env::current_exe().ok()?;
        Some(own.parent()?.parent()?.to_owned()) // target/debug/deps/NAME-HASH
    });
    let path = directory.unwrap_or_default().join(name);
    assert!(path.exists(), "{} is not there: build it first (cargo build --bins)", path.display());
    path
}

/// What a command said and how it ended.
#[derive(Debug)]
pub struct Output {
    /// `None`: by a signal.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
    /// How long it took.
    pub took: Duration,
    command: String,
}

impl Output {
    /// Standard output as text.
    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
    /// Standard error as text.
    pub fn err(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }
    /// It must have ended with this code.
    ///
    /// # Panics
    /// It did not.
    #[track_caller]
    pub fn expect(self, code: i32) -> Output {
        let Output { command, took, .. } = &self;
        let (out, err) = (self.out(), self.err());
        assert_eq!(self.code, Some(code), "{command} (took {took:?})\nout: {out:.2000}\nerr: {err:.4000}");
        self
    }
    /// It must have ended with this code and said all these words on standard error.
    ///
    /// # Panics
    /// It did not.
    #[track_caller]
    pub fn refused(self, code: i32, words: &[&str]) -> Output {
        let output = self.expect(code);
        let err = output.err();
        for word in words {
            assert!(err.contains(word), "{}: {word:?} is missing in: {err}", output.command);
        }
        output
    }
}

fn drain(pipe: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            let _ = pipe.read_to_end(&mut bytes);
        }
        bytes
    })
}

/// Runs a command to its end.
///
/// # Panics
/// It cannot be started, or does not end within the limit (it is ended then).
#[track_caller]
pub fn run(command: &mut Command, limit: Duration) -> Output {
    let shown = format!("{command:?}");
    let started = Instant::now();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{shown}: {error}"));
    let (out, err) = (drain(child.stdout.take()), drain(child.stderr.take()));
    let mut process = Process { child, name: shown.clone(), ended: None };
    let status = process.ended_within(limit);
    if status.is_none() {
        process.signal(Signal::KILL);
    }
    let output = Output {
        code: status.and_then(|status| status.code()),
        stdout: out.join().unwrap_or_default(),
        stderr: err.join().unwrap_or_default(),
        took: started.elapsed(),
        command: shown.clone(),
    };
    assert!(status.is_some(), "{shown} did not end within {limit:?}: {}{}", output.out(), output.err());
    output
}

/// A program that runs beside the test.
#[derive(Debug)]
pub struct Process {
    child: Child,
    name: String,
    ended: Option<ExitStatus>,
}

impl Process {
    /// Starts it. What it reads and writes is the caller's to set.
    ///
    /// # Panics
    /// It cannot be started.
    pub fn start(command: &mut Command) -> Process {
        let name = format!("{command:?}");
        let child = command.spawn().unwrap_or_else(|error| panic!("{name}: {error}"));
        Process { child, name, ended: None }
    }
    /// Its id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
    /// The pipes that the caller asked for.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }
    /// Sends a signal, unless it has ended.
    pub fn signal(&mut self, signal: Signal) {
        if self.ended().is_none() {
            let _ = kill_process(Pid::from_child(&self.child), signal);
        }
    }
    /// How it ended; `None`: it runs.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().ok().flatten();
        }
        self.ended
    }
    /// Waits for its end; `None`: it still runs after the limit.
    pub fn ended_within(&mut self, limit: Duration) -> Option<ExitStatus> {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.ended() {
                return Some(status);
            }
            if Instant::now() >= end {
                return None;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    /// Waits for its end.
    ///
    /// # Panics
    /// It still runs after the limit.
    #[track_caller]
    pub fn wait(&mut self, limit: Duration) -> ExitStatus {
        let ended = self.ended_within(limit);
        ended.unwrap_or_else(|| panic!("{} still runs after {limit:?}", self.name))
    }
    /// `kill -9`, and waits until it is gone.
    pub fn kill(&mut self) {
        self.signal(Signal::KILL);
        let _ = self.ended_within(wait::SOON);
    }
    /// Waits until it is stopped (SIGSTOP acts a moment later than it is sent).
    pub fn wait_stopped(&self) {
        let path = format!("/proc/{}/status", self.pid());
        wait::until("the process is stopped", wait::SOON, || {
            std::fs::read_to_string(&path).is_ok_and(|text| text.contains("State:\tT"))
        });
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        let _ = self.ended_within(wait::SOON);
    }
}

/// Open descriptors of a process.
pub fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// Threads of a process.
pub fn threads(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count)
}

/// Resident memory of a process, KiB.
pub fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.split_whitespace().next().and_then(|kib| kib.parse().ok()).unwrap_or(0)
}
