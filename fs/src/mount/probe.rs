//! A process beside the daemon that asks the mount what the daemon itself must never ask.
//!
//! Guarantees: it is started before the daemon has threads or devices; whoever waits for an answer does so for a limited
//! time; it ends with the daemon (its input ends), and where it hangs in a dead mount, with that mount.

use crate::failure::{Failure, io};
use crate::ops::ROOT;
use railfs_engine::notify::VARIABLES;
use railfs_engine::notify::keeper::Answer;
use rustix::io::Errno;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The hidden subcommand that makes this program the process. Its argument: the mount point.
pub const SUBCOMMAND: &str = "probe";

/// In messages.
const NAME: &str = "the process that probes the mount";
/// One longer than a name can be: the daemon says so by itself, whatever has become of the server.
const TOO_LONG: usize = 256;

/// What can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// Whether `ls` of the mount answers.
    List,
    /// Whether the daemon answers anything at all.
    Alive,
}

impl Question {
    fn word(self) -> &'static str {
        match self {
            Question::List => "list",
            Question::Alive => "alive",
        }
    }
}

/// Who waits for the answer that comes next.
type Waiting = Arc<Mutex<Option<Answer>>>;

/// The daemon's end.
pub struct Probe {
    child: Child,
    questions: ChildStdin,
    /// Answers that nobody waits for by a call of its own.
    answers: Receiver<Result<(), String>>,
    waiting: Waiting,
}

impl std::fmt::Debug for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Probe").field("child", &self.child).finish_non_exhaustive()
    }
}

impl Probe {
    /// Starts the process, for a resolved mount point.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(point: &Path) -> Result<Probe, Failure> {
        let program = std::env::current_exe().map_err(|error| io("this program's own path", &error))?;
        let mut command = Command::new(program);
        command.arg(SUBCOMMAND).arg("--").arg(point).current_dir("/").stdin(Stdio::piped()).stdout(Stdio::piped());
        for variable in VARIABLES {
            command.env_remove(variable);
        }
        let failed = |error| io(NAME, &error);
        let mut child = command.spawn().map_err(failed)?;
        let (Some(questions), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::failed(format!("{NAME} has no pipes")));
        };
        let (send, answers) = channel();
        let waiting = Waiting::default();
        let waits = waiting.clone();
        let listen = move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let told = if line == "ok" { Ok(()) } else { Err(line) };
                let asker = waits.lock().unwrap_or_else(PoisonError::into_inner).take();
                match (asker, told) {
                    (Some(answer), Ok(())) => answer(Ok(())),
                    (Some(_), Err(why)) => tracing::warn!("{NAME}: {why}"),
                    // Nobody waits any more.
                    (None, told) => drop(send.send(told)),
                }
            }
            if let Some(answer) = waits.lock().unwrap_or_else(PoisonError::into_inner).take() {
                answer(Err(format!("{NAME} has gone")));
            }
        };
        std::thread::Builder::new().name("probe".to_owned()).spawn(listen).map_err(failed)?;
        Ok(Probe { child, questions, answers, waiting })
    }

    fn write(&mut self, question: Question) -> Result<(), String> {
        let written = self.questions.write_all(format!("{}\n", question.word()).as_bytes());
        written.map_err(|error| format!("{NAME} has gone: {error}"))
    }

    /// Asks; the answer is called when it is a good one, or when there will be none.
    ///
    /// # Errors
    /// The process has gone.
    pub fn ask(&mut self, question: Question, answer: Answer) -> Result<(), String> {
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
        self.write(question)
    }

    /// Asks, and waits for a good answer.
    ///
    /// # Errors
    /// A bad one, none within the limit, or the process has gone.
    pub fn ask_and_wait(&mut self, question: Question, limit: Duration) -> Result<(), String> {
        self.write(question)?;
        match self.answers.recv_timeout(limit) {
            Ok(told) => told.map_err(|why| format!("the mount does not answer: {why}")),
            Err(RecvTimeoutError::Timeout) => Err(format!("the mount does not answer within {limit:?}")),
            Err(RecvTimeoutError::Disconnected) => Err(format!("{NAME} has gone")),
        }
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        // It may hang in the mount, which is about to go, and it with it.
        let _ = self.child.kill();
        let _ = self.child.try_wait();
    }
}

/// The process itself: a question a line in, an answer a line out, until there are no more.
pub fn serve(point: &Path) {
    // What reaches a terminal's whole group is for the daemon: this process ends when its input does.
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let answer = match line.as_str() {
            "list" => list(point),
            "alive" => alive(point),
            other => Err(format!("no such question: {other}")),
        };
        let text = answer.err().unwrap_or_else(|| "ok".to_owned()).replace('\n', " ");
        if writeln!(out, "{text}").and_then(|()| out.flush()).is_err() {
            return;
        }
    }
}

/// As `ls` does.
fn list(point: &Path) -> Result<(), String> {
    let read = || -> std::io::Result<u64> {
        std::fs::read_dir(point)?.take(100).try_for_each(|entry| entry.map(drop))?;
        Ok(std::fs::metadata(point)?.ino())
    };
    match read() {
        Ok(ROOT) => Ok(()),
        Ok(_) => Err("nothing of railfs is mounted there any more".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// By a name that no server is asked for.
fn alive(point: &Path) -> Result<(), String> {
    match std::fs::symlink_metadata(point.join("x".repeat(TOO_LONG))) {
        Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::NOTCONN | Errno::CONNABORTED)) => {
            Err(error.to_string())
        }
        // Whatever else it is (somebody may have mounted something over it), somebody answered.
        _ => Ok(()),
    }
}
