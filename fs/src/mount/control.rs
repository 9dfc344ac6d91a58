//! The control socket of a mount: one JSON request a line, one JSON answer a line.
//!
//! Guarantees: only this user reaches it (mode 0600, in a directory of mode 0700); a request is bounded in size and time, so a caller that
//! says nothing cannot keep others out for longer than that; any bytes give an answer or the end of the connection.

use crate::failure::{Failure, io};
use crate::status::Document;
use serde::{Deserialize, Serialize};
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Longest request, bytes.
const MAX_REQUEST: u64 = 4096;
/// Longest answer, bytes.
const MAX_ANSWER: u64 = 16 << 20;
/// How long a caller may take to send or to take.
const SLOW: Duration = Duration::from_secs(2);
/// Between two attempts while callers cannot be accepted.
const PAUSE: Duration = Duration::from_millis(100);
/// How long an answer may take: the server's account is in it.
const ANSWER: Duration = Duration::from_secs(10);

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
enum Request {
    Status,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Status(Box<Document>),
    Error(String),
}

/// The listening end. Dropping it ends its thread.
#[derive(Debug)]
pub struct Control {
    path: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Control {
    /// Listens; `status` makes the document (within a few seconds).
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn listen(path: &Path, status: impl Fn() -> Document + Send + 'static) -> Result<Control, Failure> {
        let _ = std::fs::remove_file(path); // Left by a crash: the place's lock is ours.
        let listener = UnixListener::bind(path).map_err(|error| io(path.display(), &error))?;
        // The directory lets nobody else in; where it is not what it should be, this still holds.
        std::fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(|error| io(path.display(), &error))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let serve = move || {
            for caller in listener.incoming() {
                if stopped.load(Ordering::Acquire) {
                    return;
                }
                let caller = match caller {
                    Ok(caller) => caller,
                    Err(error) => {
                        tracing::debug!("control socket: {error}");
                        // Out of descriptors, and whoever asks stays in line: not as fast as the processor can.
                        std::thread::sleep(PAUSE);
                        continue;
                    }
                };
                if let Err(error) = serve(&caller, &status) {
                    tracing::debug!("control socket: {error}");
                }
            }
        };
        let thread = std::thread::Builder::new().name("control".to_owned()).spawn(serve);
        let thread = thread.map_err(|error| io("control thread", &error))?;
        Ok(Control { path: path.to_owned(), stop, thread: Some(thread) })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if UnixStream::connect(&self.path).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

fn serve(caller: &UnixStream, status: &impl Fn() -> Document) -> std::io::Result<()> {
    caller.set_read_timeout(Some(SLOW))?;
    caller.set_write_timeout(Some(SLOW))?;
    let mut line = String::new();
    BufReader::new(caller.take(MAX_REQUEST)).read_line(&mut line)?;
    let answer = match serde_json::from_str(&line) {
        Ok(Request::Status) => Answer::Status(Box::new(status())),
        Err(error) => Answer::Error(format!("request not understood: {error}")),
    };
    let mut text = serde_json::to_vec(&answer)?;
    text.push(b'\n');
    let mut caller = caller;
    caller.write_all(&text)
}

/// Asks a mount for its status.
///
/// # Errors
/// It does not answer, or not in this form.
pub fn ask_status(socket: &Path) -> Result<Document, Failure> {
    let shown = socket.display();
    let stream = UnixStream::connect(socket).map_err(|error| io(&shown, &error))?;
    let asked = stream
        .set_read_timeout(Some(ANSWER))
        .and_then(|()| stream.set_write_timeout(Some(SLOW)))
        .and_then(|()| (&stream).write_all(b"{\"request\":\"status\"}\n"));
    asked.map_err(|error| io(&shown, &error))?;
    let mut line = String::new();
    let read = BufReader::new((&stream).take(MAX_ANSWER)).read_line(&mut line);
    read.map_err(|error| io(format_args!("{shown}: no answer within {ANSWER:?}"), &error))?;
    match serde_json::from_str(&line) {
        Ok(Answer::Status(document)) => Ok(*document),
        Ok(Answer::Error(text)) => Err(Failure::failed(format!("{shown}: {text}"))),
        Err(error) => Err(Failure::failed(format!("{shown}: answer not understood: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_answers_status_and_says_what_it_does_not_understand() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let document = Document { node: "n".to_owned(), ..Document::default() };
        let given = document.clone();
        let control = Control::listen(&path, move || given.clone()).unwrap();
        assert_eq!(ask_status(&path).unwrap(), document);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        for bad in [&b"nonsense\n"[..], b"{\"request\":\"halt\"}\n", &[b'x'; 9999], b"\xff\n"] {
            let stream = UnixStream::connect(&path).unwrap();
            let _ = (&stream).write_all(bad);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let mut answer = String::new();
            let _ = (&stream).read_to_string(&mut answer);
            assert!(answer.is_empty() || answer.starts_with("{\"error\":"), "{answer}");
        }
        assert_eq!(ask_status(&path).unwrap(), document);
        drop(control);
        assert!(ask_status(&path).is_err());
    }
}
