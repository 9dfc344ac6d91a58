//! The process that serves a mount, from its lock to its end.
//!
//! Guarantees: whatever fails at the start leaves nothing mounted, locked or running; nothing is mounted before somebody
//! answers at the server's address; a start can be interrupted at any moment; SIGTERM and SIGINT (and SIGHUP of a mount in
//! front of a terminal) take the mount away at once and end the daemon within its stop limit (requests under way first); an
//! unmount from outside ends it too; it never walks into its own mount. The mount is made before the client maps memory or
//! opens a device (as not-root that starts a helper program).

use super::control::Control;
use super::kernel::{self, Mount};
use super::log::Log;
use super::manager::Manager;
use super::options::Options;
use super::reach::Reach;
use super::runtime::{self, Holder, Lock};
use super::{place, session};
use crate::backend::Backend;
use crate::failure::Failure;
use crate::ops::{FileSystem, Form, MAX_READ, Mode, Owner, Settings};
use crate::status::{Document, Mount as MountStatus};
use railfs_engine::client::Found;
use railfs_engine::clock::Clock;
use railfs_engine::error::Error;
use railfs_proto::url::Url;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SendError, Sender, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Names and directories may be trusted so long.
const ENTRY_TTL: Duration = Duration::from_secs(1);
/// Open files that nobody reads do not hold up a stop for longer (or for a quarter of its limit).
const IDLE_GRACE: Duration = Duration::from_secs(1);
/// The exit code of a server that cannot be reached.
const UNREACHABLE: u8 = 5;
/// What an attempt may take beyond its own limits before it is given up.
const SLACK: Duration = Duration::from_secs(1);
/// Between two attempts to reach the server at the start.
const AGAIN: Duration = Duration::from_millis(500);

/// The kernel reads ahead so much into its page cache, where it may be told (root): as much as the largest READ.
const READ_AHEAD_KIB: u32 = MAX_READ / 1024;

/// What to mount, and where.
#[derive(Clone, Debug)]
pub struct Job {
    /// What.
    pub url: Url,
    /// A resolved place.
    pub point: PathBuf,
    /// How.
    pub options: Options,
    /// The daemon's own log file, or the user's; `None`: standard error.
    pub log: Option<PathBuf>,
    /// The same, in use: SIGHUP opens it again.
    pub log_file: Option<Log>,
    /// In front, on a terminal: SIGHUP says that it has gone.
    pub terminal: bool,
    /// Who is told how it fares.
    pub manager: Manager,
}

enum Event {
    Signal(i32),
    Ended(std::io::Result<()>),
    Probed(Result<(), Failure>),
    Connected(Result<Arc<dyn Backend>, Failure>),
}

/// Mounts, says `ready`, serves, and returns when the mount is gone.
///
/// # Errors
/// What failed at the start, with the exit code for it.
pub fn run(job: &Job, reach: impl Reach, ready: impl FnOnce()) -> Result<(), Failure> {
    // First: from here on a signal ends in order, whatever there is by then.
    let (send, events) = channel();
    watch_signals(send.clone())?;
    let shown = job.point.display().to_string();
    let url = job.url.to_string();
    let files = runtime::files(&job.point)?;
    let log = job.log.as_ref().map(|log| log.display().to_string()).unwrap_or_default();
    let pid = std::process::id();
    let holder = Holder { pid, url: url.clone(), mountpoint: shown.clone(), log: log.clone(), ending: false };
    let own_log = job.log.as_ref() == Some(&files.log);
    let mut lock = Lock::take(&files, &holder, !own_log)?;
    if own_log {
        // What an earlier daemon left: its story ended. One that ended a moment ago took the file with it.
        let emptied = std::fs::OpenOptions::new().write(true).truncate(true).open(&files.log);
        if let (Err(_), Some(log)) = (emptied, &job.log_file) {
            log.reopen().map_err(|error| crate::failure::io(files.log.display(), &error))?;
        }
    }
    place::make_free(&job.point, job.options.nonempty)?;
    let claim = place::claim(&job.point)?;
    for line in job.options.memory_plan() {
        tracing::info!("memory: {line}");
    }
    let start = Start { job, reach: Arc::new(reach), send: &send, events: &events };
    let (connection, mut mount, backend) = start.until_it_works()?;
    let closing = Closing(backend.clone());
    if job.options.mode == Mode::Snapshot && !backend.keeps_pins() {
        return Err(Failure::failed(format!(
            "{url}: mode=snapshot needs a server that keeps versions for their readers, and this one is too old for that"
        )));
    }
    let clock = Clock::start();
    let fs = FileSystem::new(backend, settings(job), Box::new(move || clock.now()));
    session::start(fs.clone(), connection, &job.options, move |result| {
        let _ = send.send(Event::Ended(result));
    })?;
    // So that df has numbers to show from the beginning, whatever becomes of the server.
    fs.statfs(drop);
    if fs.choice().form == Form::Cached {
        mount.read_ahead(READ_AHEAD_KIB);
    }
    let about = MountStatus { url: url.clone(), mountpoint: shown.clone(), pid, log, ..MountStatus::default() };
    let control = Control::listen(&files.socket, status_of(fs.clone(), about))?;
    let keeper = job.manager.ready(&format!("{url} at {shown}"), &fs)?;
    tracing::info!("{url} is mounted at {shown}");
    ready();

    let ended = loop {
        break match events.recv() {
            Ok(Event::Signal(signal)) if job.is_reload(signal) => {
                job.manager.reloading();
                job.reload();
                job.manager.reloaded();
                continue;
            }
            Ok(Event::Signal(signal)) => {
                tracing::info!("{shown}: stopping for signal {signal}");
                let status = format!("{shown}: stopping for signal {signal}");
                job.manager.stopping(&status, job.options.stop_timeout);
                drop(keeper);
                lock.ending();
                stop(&mut mount, &fs, &events, job.options.stop_timeout);
                Ok(())
            }
            Ok(Event::Ended(Ok(()))) => {
                lock.ending();
                tracing::info!("{shown}: was unmounted");
                mount.is_gone();
                Ok(())
            }
            Ok(Event::Ended(Err(error))) => Err(Failure::failed(format!("{shown}: FUSE ended: {error}"))),
            // An attempt of the start that came too late.
            Ok(Event::Probed(_)) => continue,
            Ok(Event::Connected(late)) => {
                drop(late.map(Closing));
                continue;
            }
            Err(error) => Err(Failure::failed(format!("{shown}: {error}"))),
        };
    };
    if ended.is_err() {
        lock.keep_log();
    }
    drop(control);
    drop(mount);
    drop(closing);
    drop(claim);
    drop(lock);
    ended
}

impl Job {
    /// Whether the signal asks for the log to be opened again, not for an end.
    fn is_reload(&self, signal: i32) -> bool {
        signal == SIGHUP && !self.terminal
    }

    fn reload(&self) {
        match &self.log_file {
            None => tracing::info!("SIGHUP: there is nothing to load again"),
            Some(log) => match log.reopen() {
                Ok(()) => tracing::info!("SIGHUP: the log was opened again"),
                Err(error) => {
                    tracing::error!("SIGHUP: the log cannot be opened again, it goes on where it was: {error}")
                }
            },
        }
    }
}

/// Reaching the server and mounting, as often as it takes.
struct Start<'a> {
    job: &'a Job,
    reach: Arc<dyn Reach>,
    send: &'a Sender<Event>,
    events: &'a Receiver<Event>,
}

/// Why an attempt came to nothing.
enum NotYet {
    /// A signal: no other attempt.
    Interrupted(Failure),
    Failed(Failure),
}

impl Start<'_> {
    /// Tries until it works, or until `retry` is over. Only a server that cannot be reached is worth another attempt.
    fn until_it_works(&self) -> Result<(OwnedFd, Mount, Arc<dyn Backend>), Failure> {
        let (started, retry) = (Instant::now(), self.job.options.retry);
        let mut said = String::new();
        loop {
            let failure = match self.attempt() {
                Ok(done) => return Ok(done),
                Err(NotYet::Interrupted(failure)) => return Err(failure),
                Err(NotYet::Failed(failure)) => failure,
            };
            let left = retry.saturating_sub(started.elapsed());
            if failure.code != UNREACHABLE || left.is_zero() {
                return Err(failure);
            }
            if failure.message != said {
                tracing::warn!("{failure}; trying again for {} s", left.as_secs());
                said.clone_from(&failure.message);
            }
            self.job.manager.starting(&format!("{failure}; trying again for {} s", left.as_secs()), left);
            let pause = AGAIN.min(left);
            match self.wait(pause, Err::<(), _>) {
                Ok(_) => {}
                Err(NotYet::Interrupted(failure) | NotYet::Failed(failure)) => return Err(failure),
            }
        }
    }

    fn attempt(&self) -> Result<(OwnedFd, Mount, Arc<dyn Backend>), NotYet> {
        let Job { url, point, options, .. } = self.job;
        let address = url.address();
        // What is asked of the network is asked on threads of their own: a signal is heard meanwhile.
        let (reach, asked, limit) = (self.reach.clone(), address.clone(), options.connect_timeout);
        self.spawn("probe", move || Event::Probed(reach.probe(&asked, limit).map_err(Failure::from)))?;
        let probed = self.wait(limit + SLACK, |event| match event {
            Event::Probed(result) => Ok(result),
            other => Err(other),
        })?;
        let late = || {
            let detail = format!("its name was not resolved within {:?}", limit + SLACK);
            Failure::from(Error::Unreachable { peer: address.clone(), detail })
        };
        probed.unwrap_or_else(|| Err(late())).map_err(NotYet::Failed)?;
        let (connection, mount) = kernel::mount(&url.to_string(), point, options).map_err(NotYet::Failed)?;
        let (reach, config, url) = (self.reach.clone(), options.client_config(address.clone()), url.clone());
        self.spawn("connect", move || {
            let connected = reach.connect(config).map_err(Failure::from).and_then(|backend| {
                root_is_a_directory(&backend, &url).inspect_err(|_| backend.close())?;
                Ok(backend)
            });
            Event::Connected(connected)
        })?;
        // Connecting and the look at the root have limits of their own.
        let limit = options.connect_timeout + options.metadata_timeout + SLACK;
        let connected = self.wait(limit, |event| match event {
            Event::Connected(result) => Ok(result),
            other => Err(other),
        })?;
        let late =
            || Failure::from(Error::Unreachable { peer: address, detail: format!("no answer within {limit:?}") });
        let backend = connected.unwrap_or_else(|| Err(late())).map_err(NotYet::Failed)?;
        Ok((connection, mount, backend))
    }

    fn spawn(&self, name: &str, ask: impl FnOnce() -> Event + Send + 'static) -> Result<(), NotYet> {
        let send = self.send.clone();
        let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            // Nobody waits any more: whoever connected is closed.
            if let Err(SendError(Event::Connected(Ok(backend)))) = send.send(ask()) {
                drop(Closing(backend));
            }
        });
        spawned.map(drop).map_err(|error| NotYet::Failed(Failure::failed(format!("{name} thread: {error}"))))
    }

    /// Waits for an event that is wanted; `None`: not within the limit.
    fn wait<T>(&self, limit: Duration, wanted: impl Fn(Event) -> Result<T, Event>) -> Result<Option<T>, NotYet> {
        let end = Instant::now() + limit;
        loop {
            match self.events.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(Event::Signal(signal)) if self.job.is_reload(signal) => self.job.reload(),
                Ok(Event::Signal(signal)) => {
                    let point = self.job.point.display();
                    let message = format!("{point}: interrupted by signal {signal} before it was mounted");
                    return Err(NotYet::Interrupted(Failure::failed(message)));
                }
                Ok(event) => match wanted(event) {
                    Ok(wanted) => return Ok(Some(wanted)),
                    // Of an attempt that was given up.
                    Err(Event::Connected(Ok(backend))) => drop(Closing(backend)),
                    Err(_) => {}
                },
                Err(_) => return Ok(None),
            }
        }
    }
}

/// Closes the client however the daemon ends.
struct Closing(Arc<dyn Backend>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.close();
    }
}

fn watch_signals(send: Sender<Event>) -> Result<(), Failure> {
    let signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT, SIGHUP]);
    let mut signals = signals.map_err(|error| Failure::failed(format!("signals: {error}")))?;
    let forward = move || {
        for signal in signals.forever() {
            if send.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    };
    let thread = std::thread::Builder::new().name("signals".to_owned()).spawn(forward);
    thread.map(drop).map_err(|error| Failure::failed(format!("signals: {error}")))
}

fn settings(job: &Job) -> Settings {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Settings {
        namespace: job.url.namespace.clone(),
        root: job.url.key.clone(),
        owner: Owner {
            only_uid: job.options.uid,
            only_gid: job.options.gid,
            umask: job.options.umask,
            ..Owner::of(rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw())
        },
        entry_ttl: ENTRY_TTL,
        metadata_ttl: job.options.metadata_ttl,
        mounted_at: (i64::try_from(now.as_secs()).unwrap_or(0), now.subsec_nanos()),
        list_limit: job.options.metadata_timeout,
    }
}

/// A key in the URL shows what lies below it: it must not be an object. That nothing lies there yet is no error.
fn root_is_a_directory(backend: &Arc<dyn Backend>, url: &Url) -> Result<(), Failure> {
    let Some(name) = url.object() else { return Ok(()) };
    let found = railfs_engine::client::Client::wait(|done| backend.lookup(&name, done))?;
    match found {
        Found::Object(_) => {
            Err(Failure::failed(format!("{name} is a file: mount the directory that it lies in, or `railfs get` it")))
        }
        Found::Directory(..) | Found::Absent => Ok(()),
    }
}

fn status_of(fs: FileSystem, about: MountStatus) -> impl Fn() -> Document + Send + 'static {
    let started = Instant::now();
    move || {
        // Bounded by the metadata deadline; a mount whose server is gone still says what it knows.
        let server = railfs_engine::client::Client::wait(|done| fs.backend().server_status(done));
        let status = fs.backend().status();
        let silent_for = status.silent_for;
        let mut document = Document::new(status, &server);
        let mut mount = about.clone().with(fs.activity());
        mount.uptime_seconds = started.elapsed().as_secs();
        for (what, silent) in ["the server does not answer", "no rail brings an answer"].into_iter().zip(silent_for) {
            if let Some(silent) = silent {
                mount.degraded.push(format!("{what}, for {} s now: calls fail soon", silent.as_secs()));
            }
        }
        let choice = fs.choice();
        (mount.mode, mount.io, mount.io_reason) = (choice.mode.to_string(), choice.form.to_string(), choice.reason);
        mount.degraded.extend(choice.lacks);
        if !fs.backend().keeps_pins() {
            mount
                .degraded
                .push("the server is too old to keep replaced versions for programs that map them".to_owned());
        }
        mount.degraded.extend(document.degraded());
        document.mount = Some(mount);
        document
    }
}

/// Takes the mount away, lets requests under way end, and goes on in bounded time.
fn stop(mount: &mut Mount, fs: &FileSystem, events: &Receiver<Event>, limit: Duration) {
    let started = Instant::now();
    let (idle, abort_after) = (IDLE_GRACE.min(limit / 4), limit.mul_f64(0.6));
    // Whatever hangs from here on (the helper, a thread of the client): the process ends.
    let _ = std::thread::Builder::new().name("watchdog".to_owned()).spawn(move || {
        std::thread::sleep(limit);
        tracing::error!("stopping took longer than {limit:?}: leaving");
        std::process::exit(0);
    });
    mount.detach();
    let mut aborted = false;
    loop {
        match events.recv_timeout(Duration::from_millis(20)) {
            Ok(Event::Ended(_)) | Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return,
            Ok(_) | Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
        }
        let activity = fs.activity();
        if activity.in_flight == 0 && started.elapsed() >= idle {
            tracing::warn!("{} files were still open", activity.open_files);
            return;
        }
        if started.elapsed() >= abort_after {
            if std::mem::replace(&mut aborted, true) {
                return;
            }
            tracing::warn!("{} requests are still under way: aborting them", activity.in_flight);
            mount.abort();
        }
    }
}

/// Where a mount's log goes when no file was named.
///
/// # Errors
/// As [`runtime::directory`].
pub fn default_log(point: &Path) -> Result<PathBuf, Failure> {
    Ok(runtime::files(point)?.log)
}
