//! Telling the service manager how this process fares, as sd_notify(3) describes: one datagram to the socket that
//! `NOTIFY_SOCKET` names.
//!
//! Guarantees: nothing is told, and nothing fails, where nobody listens; a manager that does not take its datagrams holds
//! up the caller for a second at most, and is complained about once. When the watchdog is fed is decided in [`rounds`].

pub mod keeper;
pub mod rounds;

use rustix::time::{ClockId, clock_gettime};
use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Where the manager listens: a path, or `@` and an abstract name.
pub const SOCKET_VARIABLE: &str = "NOTIFY_SOCKET";
/// Within how many microseconds the manager wants to hear of progress, again and again.
pub const WATCHDOG_VARIABLE: &str = "WATCHDOG_USEC";
/// Which process it wants to hear that from.
pub const WATCHDOG_PID_VARIABLE: &str = "WATCHDOG_PID";
/// All of them: what a program that we start must not inherit.
pub const VARIABLES: [&str; 3] = [SOCKET_VARIABLE, WATCHDOG_VARIABLE, WATCHDOG_PID_VARIABLE];

/// How long a datagram may wait for a manager that is slow to take it.
const SLOW: Duration = Duration::from_secs(1);

/// What can be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word<'a> {
    /// The service does what it is there for.
    Ready,
    /// It ends.
    Stopping,
    /// It loads something again; [`Word::Ready`] follows.
    Reloading,
    /// One line for people.
    Status(&'a str),
    /// Progress is possible.
    Watchdog,
    /// The step that is under way may take so much longer, counted from now.
    MoreTime(Duration),
}

/// The way to the manager.
#[derive(Debug, Default)]
pub struct Notifier {
    manager: Option<(UnixDatagram, SocketAddr)>,
    watchdog: Option<Duration>,
    complained: AtomicBool,
}

impl Notifier {
    /// As the environment of this process says.
    ///
    /// # Errors
    /// `NOTIFY_SOCKET` names nothing that can be told: what is wrong with it.
    pub fn from_environment() -> Result<Notifier, String> {
        let [socket, limit, pid] = VARIABLES.map(std::env::var_os);
        Notifier::new(socket, limit.as_deref(), pid.as_deref(), std::process::id())
    }

    /// From the variables' values and the id of this process.
    ///
    /// # Errors
    /// See [`Notifier::from_environment`].
    pub fn new(
        socket: Option<OsString>,
        limit: Option<&OsStr>,
        watched: Option<&OsStr>,
        pid: u32,
    ) -> Result<Notifier, String> {
        let Some(socket) = socket.filter(|socket| !socket.is_empty()) else { return Ok(Notifier::default()) };
        let wrong = |problem: String| format!("{SOCKET_VARIABLE}={}: {problem}", socket.to_string_lossy());
        let address = match socket.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
            [b'/', ..] => SocketAddr::from_pathname(&socket),
            _ => return Err(wrong("neither an absolute path nor an abstract name (@...)".to_owned())),
        };
        let address = address.map_err(|error| wrong(error.to_string()))?;
        let sender = UnixDatagram::unbound().map_err(|error| wrong(error.to_string()))?;
        sender.set_write_timeout(Some(SLOW)).map_err(|error| wrong(error.to_string()))?;
        let number = |value: &OsStr| value.to_str().and_then(|value| value.parse::<u64>().ok());
        // A limit for another process (our parent's) is none of ours.
        let ours = watched.is_none_or(|watched| number(watched) == Some(pid.into()));
        let watchdog = limit.and_then(number).filter(|limit| ours && *limit > 0).map(Duration::from_micros);
        Ok(Notifier { manager: Some((sender, address)), watchdog, complained: AtomicBool::new(false) })
    }

    /// Whether there is a manager.
    pub fn is_heard(&self) -> bool {
        self.manager.is_some()
    }

    /// How long the manager waits for [`Word::Watchdog`]; `None`: it does not.
    pub fn watchdog(&self) -> Option<Duration> {
        self.watchdog
    }

    /// Tells these words, in one datagram.
    pub fn tell(&self, words: &[Word<'_>]) {
        let Some((sender, address)) = &self.manager else { return };
        match sender.send_to_addr(message(words).as_bytes(), address) {
            Ok(_) => self.complained.store(false, Ordering::Relaxed),
            Err(error) if self.complained.swap(true, Ordering::Relaxed) => {
                tracing::debug!("{SOCKET_VARIABLE}: the service manager still cannot be told: {error}");
            }
            Err(error) => tracing::warn!("{SOCKET_VARIABLE}: the service manager cannot be told: {error}"),
        }
    }
}

fn message(words: &[Word<'_>]) -> String {
    let mut text = String::new();
    for word in words {
        // Writing to a string does not fail.
        let _ = match word {
            Word::Ready => writeln!(text, "READY=1"),
            Word::Stopping => writeln!(text, "STOPPING=1"),
            Word::Reloading => {
                let now = clock_gettime(ClockId::Monotonic);
                writeln!(text, "RELOADING=1\nMONOTONIC_USEC={}", now.tv_sec * 1_000_000 + now.tv_nsec / 1000)
            }
            // A line is a word: one that has lines in it would say others.
            Word::Status(status) => writeln!(text, "STATUS={}", status.replace(['\n', '\r'], " ")),
            Word::Watchdog => writeln!(text, "WATCHDOG=1"),
            Word::MoreTime(time) => writeln!(text, "EXTEND_TIMEOUT_USEC={}", time.as_micros()),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receive(socket: &UnixDatagram) -> String {
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut buffer = [0; 4096];
        let length = socket.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    }

    #[test]
    fn words_reach_sockets_with_a_path_and_abstract_ones() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let name = format!("railfs-test-{}", std::process::id());
        let named = UnixDatagram::bind(&path).unwrap();
        let hidden = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        for (socket, listener) in [(path.clone().into_os_string(), named), (format!("@{name}").into(), hidden)] {
            let notifier = Notifier::new(Some(socket), None, None, 7).unwrap();
            assert!(notifier.is_heard());
            notifier.tell(&[Word::Ready, Word::Status("two\nlines"), Word::MoreTime(Duration::from_millis(1500))]);
            assert_eq!(receive(&listener), "READY=1\nSTATUS=two lines\nEXTEND_TIMEOUT_USEC=1500000\n");
            notifier.tell(&[Word::Reloading]);
            assert!(receive(&listener).starts_with("RELOADING=1\nMONOTONIC_USEC="));
            notifier.tell(&[Word::Stopping, Word::Watchdog]);
            assert_eq!(receive(&listener), "STOPPING=1\nWATCHDOG=1\n");
        }
    }

    #[test]
    fn nobody_and_nonsense() {
        for socket in [None, Some(OsString::new())] {
            let notifier = Notifier::new(socket, Some("1000".as_ref()), None, 7).unwrap();
            assert!(!notifier.is_heard() && notifier.watchdog().is_none());
            notifier.tell(&[Word::Ready]);
        }
        for socket in ["relative", "vsock:2:1", &format!("/{}", "x".repeat(200))] {
            let error = Notifier::new(Some(socket.into()), None, None, 7).unwrap_err();
            assert!(error.starts_with(&format!("NOTIFY_SOCKET={socket}")), "{error}");
        }
        // A manager that has gone is no reason to end.
        let gone = Notifier::new(Some("/nonexistent/railfs".into()), None, None, 7).unwrap();
        gone.tell(&[Word::Ready]);
        gone.tell(&[Word::Ready]);
    }

    #[test]
    fn the_watchdog_is_for_the_process_it_names() {
        let of = |limit: &str, pid: Option<&str>| {
            let notifier = Notifier::new(Some("/n".into()), Some(limit.as_ref()), pid.map(OsStr::new), 7);
            notifier.unwrap().watchdog()
        };
        assert_eq!(of("2500000", Some("7")), Some(Duration::from_millis(2500)));
        assert_eq!(of("2500000", None), Some(Duration::from_millis(2500)));
        for (limit, pid) in [("2500000", Some("8")), ("2500000", Some("x")), ("0", None), ("-1", None), ("", None)] {
            assert_eq!(of(limit, pid), None, "{limit} {pid:?}");
        }
    }
}
