//! The process that serves a mount, from its lock to its end.
//!
//! Guarantees: whatever fails at the start leaves nothing mounted, locked or running; SIGTERM, SIGINT and SIGHUP take the
//! mount away at once and end the daemon within 10 s (requests under way first); an unmount from outside ends it too; it
//! never walks into its own mount. The mount is made before the client maps memory or opens a device (as not-root that
//! starts a helper program).

use super::control::Control;
use super::kernel::{self, Mount};
use super::options::Options;
use super::runtime::{self, Holder, Lock};
use super::{place, session};
use crate::backend::Backend;
use crate::failure::Failure;
use crate::ops::{FileSystem, Form, MAX_READ, Mode, Owner, Settings};
use crate::status::{Document, Mount as MountStatus};
use railfs_engine::client::{Config, Found};
use railfs_engine::clock::Clock;
use railfs_engine::error::Error;
use railfs_proto::limits::STOP_DEADLINE;
use railfs_proto::url::Url;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Names and directories may be trusted so long.
const ENTRY_TTL: Duration = Duration::from_secs(1);
/// Open files that nobody reads do not hold up a stop for longer.
const IDLE_GRACE: Duration = Duration::from_secs(1);
/// Requests that are still under way so long after a stop began are aborted.
const ABORT_AFTER: Duration = Duration::from_secs(6);

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
}

enum Event {
    Signal(i32),
    Ended(std::io::Result<()>),
}

/// Mounts, says `ready`, serves, and returns when the mount is gone.
///
/// # Errors
/// What failed at the start, with the exit code for it.
pub fn run(
    job: &Job,
    connect: impl FnOnce(Config) -> Result<Arc<dyn Backend>, Error>,
    ready: impl FnOnce(),
) -> Result<(), Failure> {
    let shown = job.point.display().to_string();
    let url = job.url.to_string();
    let files = runtime::files(&job.point)?;
    let log = job.log.as_ref().map(|log| log.display().to_string()).unwrap_or_default();
    let pid = std::process::id();
    let holder = Holder { pid, url: url.clone(), mountpoint: shown.clone(), log: log.clone() };
    let own_log = job.log.as_ref() == Some(&files.log);
    let mut lock = Lock::take(&files, &holder, !own_log)?;
    if own_log {
        // What an earlier daemon left: its story ended.
        let _ = std::fs::OpenOptions::new().write(true).truncate(true).open(&files.log);
    }
    let (send, events) = channel();
    watch_signals(send.clone())?;
    place::make_free(&job.point, job.options.nonempty)?;
    for line in job.options.memory_plan() {
        tracing::info!("memory: {line}");
    }
    let (connection, mut mount) = kernel::mount(&url, &job.point, &job.options)?;
    let backend = connect(job.options.client_config(job.url.address()))?;
    let closing = Closing(backend.clone());
    if job.options.mode == Mode::Snapshot && !backend.keeps_pins() {
        return Err(Failure::failed(format!(
            "{url}: mode=snapshot needs a server that keeps versions for their readers, and this one is too old for that"
        )));
    }
    root_is_a_directory(&backend, &job.url)?;
    let clock = Clock::start();
    let fs = FileSystem::new(backend, settings(job), Box::new(move || clock.now()));
    session::start(fs.clone(), connection, &job.options, move |result| {
        let _ = send.send(Event::Ended(result));
    })?;
    if fs.choice().form == Form::Cached {
        mount.read_ahead(READ_AHEAD_KIB);
    }
    let about = MountStatus { url: url.clone(), mountpoint: shown.clone(), pid, log, ..MountStatus::default() };
    let control = Control::listen(&files.socket, status_of(fs.clone(), about))?;
    tracing::info!("{url} is mounted at {shown}");
    ready();

    let ended = match events.recv() {
        Ok(Event::Signal(signal)) => {
            tracing::info!("{shown}: stopping for signal {signal}");
            stop(&mut mount, &fs, &events);
            Ok(())
        }
        Ok(Event::Ended(Ok(()))) => {
            tracing::info!("{shown}: was unmounted");
            mount.is_gone();
            Ok(())
        }
        Ok(Event::Ended(Err(error))) => Err(Failure::failed(format!("{shown}: FUSE ended: {error}"))),
        Err(error) => Err(Failure::failed(format!("{shown}: {error}"))),
    };
    if ended.is_err() {
        lock.keep_log();
    }
    drop(control);
    drop(mount);
    drop(closing);
    drop(lock);
    ended
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
        owner: Owner { uid: rustix::process::getuid().as_raw(), gid: rustix::process::getgid().as_raw() },
        entry_ttl: ENTRY_TTL,
        metadata_ttl: job.options.metadata_ttl,
        mounted_at: (i64::try_from(now.as_secs()).unwrap_or(0), now.subsec_nanos()),
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
        let mut document = Document::new(fs.backend().status(), &server);
        let mut mount = about.clone().with(fs.activity());
        mount.uptime_seconds = started.elapsed().as_secs();
        let choice = fs.choice();
        (mount.mode, mount.io, mount.io_reason) = (choice.mode.to_string(), choice.form.to_string(), choice.reason);
        mount.degraded.extend(choice.lacks);
        if !fs.backend().keeps_pins() {
            mount
                .degraded
                .push("the server is too old to keep replaced versions for programs that map them".to_owned());
        }
        for rail in document.rails.iter().filter(|rail| rail.state != "up") {
            mount.degraded.push(format!("rail {} is {}: {}", rail.name, rail.state, rail.reason));
        }
        document.mount = Some(mount);
        document
    }
}

/// Takes the mount away, lets requests under way end, and goes on in bounded time.
fn stop(mount: &mut Mount, fs: &FileSystem, events: &Receiver<Event>) {
    let started = Instant::now();
    // Whatever hangs from here on (the helper, a thread of the client): the process ends.
    let _ = std::thread::Builder::new().name("watchdog".to_owned()).spawn(move || {
        std::thread::sleep(STOP_DEADLINE);
        tracing::error!("stopping took longer than {STOP_DEADLINE:?}: leaving");
        std::process::exit(0);
    });
    mount.detach();
    let mut aborted = false;
    loop {
        match events.recv_timeout(Duration::from_millis(20)) {
            Ok(Event::Ended(_)) | Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return,
            Ok(Event::Signal(_)) | Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
        }
        let activity = fs.activity();
        if activity.in_flight == 0 && started.elapsed() >= IDLE_GRACE {
            tracing::warn!("{} files were still open", activity.open_files);
            return;
        }
        if started.elapsed() >= ABORT_AFTER {
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
