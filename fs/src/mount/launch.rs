//! `railfs mount` without `-f`: starts the daemon and returns when the mount answers.
//!
//! Guarantees: the daemon's own error and exit code are this command's; the mount is known to answer when it returns
//! (this process asks it, the daemon never asks itself); it returns in bounded time; a daemon whose command has gone before
//! that ends, and leaves nothing.

use super::options::Options;
use super::{place, runtime};
use crate::failure::{Failure, io};
use crate::ops::ROOT;
use rustix::event::{PollFd, PollFlags, Timespec};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// The hidden option that makes `railfs mount` the daemon. Its value: the log's path.
pub const DAEMON_OPTION: &str = "--serve-with-log";

/// What the daemon says to the command that started it, once.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Word {
    Ready,
    Failed(Failure),
}

/// Starts the daemon (this program again) and waits until the mount answers.
///
/// # Errors
/// The daemon's, or that it or the mount does not answer.
pub fn launch(url: &str, point: &Path, lists: &[String], options: &Options, log: &Path) -> Result<(), Failure> {
    let program = std::env::current_exe().map_err(|error| io("this program's own path", &error))?;
    let file = OpenOptions::new().create(true).append(true).mode(0o600).open(log);
    let file = file.map_err(|error| io(log.display(), &error))?;
    let mut command = Command::new(program);
    command.arg("mount").arg(DAEMON_OPTION).arg(log);
    for list in lists {
        command.arg("-o").arg(list);
    }
    command.arg("--").arg(url).arg(point).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(file);
    let mut daemon = command.spawn().map_err(|error| io("the mount's daemon", &error))?;
    let limit = options.retry + options.connect_timeout + options.metadata_timeout + Duration::from_secs(15);
    match hear(&mut daemon, limit) {
        Ok(Some(Word::Ready)) => {}
        Ok(Some(Word::Failed(failure))) => {
            let _ = daemon.wait();
            if options.log.is_none() {
                // All is said; the file is another daemon's, or nobody's.
                runtime::remove_unused_log(point);
            }
            return Err(failure);
        }
        Ok(None) => {
            let status = daemon.wait().map_err(|error| io("the mount's daemon", &error))?;
            return Err(Failure::failed(format!("the mount's daemon died ({status}), see {}", log.display())));
        }
        Err(_) => {
            end(&daemon);
            return Err(Failure::failed(format!(
                "the mount's daemon says nothing after {limit:?}, see {}",
                log.display()
            )));
        }
    }
    let limit = options.metadata_timeout + Duration::from_secs(2);
    match place::probe(point, limit) {
        Some(Ok(metadata)) if metadata.ino() == ROOT => Ok(()),
        Some(Ok(_)) => {
            Err(Failure::failed(format!("{} was unmounted already, see {}", point.display(), log.display())))
        }
        other => {
            end(&daemon);
            let why = match other {
                Some(Err(error)) => error.to_string(),
                _ => format!("no answer within {limit:?}"),
            };
            Err(Failure::failed(format!("the mount at {} does not answer: {why}", point.display())))
        }
    }
}

fn hear(daemon: &mut Child, limit: Duration) -> Result<Option<Word>, RecvTimeoutError> {
    let (send, receive) = channel();
    let stdout = daemon.stdout.take();
    let _ = std::thread::Builder::new().name("daemon".to_owned()).spawn(move || {
        let mut line = String::new();
        if let Some(stdout) = stdout {
            let _ = BufReader::new(stdout).read_line(&mut line);
        }
        send.send(serde_json::from_str(&line).ok())
    });
    receive.recv_timeout(limit)
}

fn end(daemon: &Child) {
    let pid = rustix::process::Pid::from_child(daemon);
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
}

/// In the daemon, before any thread: no directory that it keeps busy. Until it is ready it ends with the command that started it,
/// and stays in that command's group: a place that systemd mounts at the first access lets only its own group of processes
/// pass until then.
///
/// # Errors
/// What the kernel said, or that the command has gone.
pub fn become_daemon() -> Result<(), Failure> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))
        .map_err(|error| io("the command's end", &error.into()))?;
    // It may have gone before that was asked for.
    let stdout = rustix::stdio::stdout();
    let mut pipe = [PollFd::from_borrowed_fd(stdout, PollFlags::empty())];
    let gone = rustix::event::poll(&mut pipe, Some(&Timespec::default()));
    if gone.is_ok_and(|count| count > 0) && pipe[0].revents().intersects(PollFlags::ERR | PollFlags::HUP) {
        return Err(Failure::failed("the command that started this daemon has gone"));
    }
    std::env::set_current_dir("/").map_err(|error| io("/", &error))
}

/// In the daemon: the mount answers. From here on the terminal's signals are not for it.
pub fn say_ready() {
    // From here on the mount outlives the command.
    if let Err(error) = rustix::process::set_parent_process_death_signal(None) {
        tracing::warn!("this daemon may end with the command that started it: {error}");
    }
    // Fails only for the leader of a process group, which is as well detached as it gets.
    let _ = rustix::process::setsid();
    say(&Word::Ready);
    // The command's pipe must not stay open as long as the mount.
    if let Ok(null) = File::options().write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdout(null);
    }
}

/// In the daemon: it will not.
pub fn say_failed(failure: &Failure) {
    say(&Word::Failed(failure.clone()));
}

fn say(word: &Word) {
    let Ok(mut text) = serde_json::to_vec(word) else { return };
    text.push(b'\n');
    let mut stdout = std::io::stdout().lock();
    // Nobody hears it when the command was killed meanwhile.
    let _ = stdout.write_all(&text).and_then(|()| stdout.flush());
}
