//! A program that reads a file in every way there is (read(2) and its relatives, O_DIRECT, mappings, sendfile, splice,
//! copy_file_range), one call at a time, as it is told. A process of its own: a mapping whose page cannot be had ends it.
//!
//! Guarantees: it is gone when it is dropped; an answer that does not come in time is a panic.

use crate::wait::SOON;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

/// Methods that ask railfs each time (strict checks them).
pub const READS: [&str; 4] = ["pread", "read", "readv", "direct"];
/// Methods that go through the kernel's page cache.
pub const FILLS: [&str; 4] = ["private", "shared", "sendfile", "splice"];

/// Why no reader can run here.
pub fn missing() -> Option<String> {
    let ran = Command::new("python3").args(["-c", "import os; os.splice, os.copy_file_range"]).output();
    match ran {
        Ok(output) if output.status.success() => None,
        Ok(_) => Some("python3 is older than 3.10".to_owned()),
        Err(error) => Some(format!("python3: {error}")),
    }
}

/// See the module.
#[derive(Debug)]
pub struct Reader {
    child: Child,
    input: ChildStdin,
    answers: Receiver<String>,
}

/// What a call gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Got {
    /// All bytes are this one.
    Byte(u8),
    /// An errno's name, or what else was wrong.
    Other(String),
    /// It died of SIGBUS.
    Sigbus,
}

impl Reader {
    /// Starts it.
    ///
    /// # Panics
    /// It does not start.
    pub fn start() -> Reader {
        let mut command = Command::new("python3");
        command.args(["-c", include_str!("reader.py")]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("python3: {error}"));
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else { panic!("no pipes") };
        let (send, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        Reader { child, input, answers }
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn say(&mut self, line: &str) -> Option<String> {
        // A dead one is found by its silence.
        let _ = writeln!(self.input, "{line}").and_then(|()| self.input.flush());
        match self.answers.recv_timeout(SOON) {
            Ok(answer) => Some(answer),
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => None,
            Err(error) => panic!("{line}: no answer: {error}"),
        }
    }

    /// Opens the file (and once more with O_DIRECT): inode number and size, or an errno's name.
    ///
    /// # Errors
    /// What it said.
    pub fn open(&mut self, path: &Path) -> Result<(u64, u64), String> {
        let answer = self.say(&format!("open {}", path.display())).unwrap_or_default();
        let words: Vec<&str> = answer.split(' ').collect();
        match words[..] {
            ["ok", ino, size] => Ok((ino.parse().unwrap_or(0), size.parse().unwrap_or(0))),
            _ => Err(answer),
        }
    }

    /// Closes the file, its mappings included.
    pub fn close(&mut self) {
        self.say("close");
    }

    /// One call.
    ///
    /// # Panics
    /// It died in another way than by SIGBUS.
    pub fn get(&mut self, method: &str, offset: u64, length: usize) -> Got {
        match self.say(&format!("{method} {offset} {length}")) {
            Some(answer) => answer.parse().map_or(Got::Other(answer), Got::Byte),
            None => {
                let status = self.child.wait().unwrap_or_else(|error| panic!("{error}"));
                assert_eq!(status.signal(), Some(7), "the reader died: {status}");
                Got::Sigbus
            }
        }
    }

    /// The inode number that fstat gives.
    pub fn fstat(&mut self) -> String {
        self.say("fstat 0 0").unwrap_or_default()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
