//! The catalog of one node: the log is the truth, the index makes it quick to read.

use super::batch::{Command, Committer, Reply, SequenceKeeper, Shortage};
use super::changes::{Changes, ChangesAt, ChangesError};
use super::cutting::{Cutting, CuttingOptions};
use super::growth::{CHECKPOINT_BYTES, Growth};
use super::history::History;
use super::index::{Index, IndexError, Kept, Reader, Snapshot};
use super::log::{LogIdentity, LogWriter};
use super::recovery::{Mended, Survey, Unequal};
use super::replay::{Replayed, apply, kept, replay};
use super::start_error::StartError;
use super::{
    BoxFuture, Catalog, CatalogError, Counts, Delete, DeleteOutcome, List, Looked, Page, Put, PutOutcome, Refusal,
    Standing, Time,
};
use crate::store::{LogDirectory, Newest, Store};
use crossbeam_channel::{Sender, TrySendError, bounded};
use railfs_proto::descriptor::Id;
use railfs_proto::limits::LEASE;
use railfs_proto::name::ObjectName;
use railfs_proto::v1::{Record, StartRecord, record::Body};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::{oneshot, watch};

/// Commits that may be queued; more are refused.
const QUEUE: usize = 4096;
/// Request ids that are kept, so that a repeated put or delete is answered and not done again.
const REQUESTS: u64 = 1 << 16;
/// In the number of every run that records nothing; those that record themselves count up from 1. Readable as a number
/// in JSON.
const READ_ONLY_RUN: u64 = 1 << 52;

/// What a [`LogCatalog`] needs to know.
#[derive(Clone)]
pub struct LogCatalogOptions {
    /// Where the index lies. Created if it is missing; may be lost.
    pub state_dir: PathBuf,
    /// The store.
    pub store: Id,
    /// The epoch of the log.
    pub epoch: u64,
    /// The log directories: one or two.
    pub logs: Vec<Arc<dyn LogDirectory>>,
    /// What the markers have seen.
    pub highest_sequence: u64,
    /// The newest component that is there.
    pub newest_component: Option<Newest>,
    /// Brings the markers up to date.
    pub keeper: Arc<dyn SequenceKeeper>,
    /// This node's name.
    pub node: String,
    /// The server lease of this run, milliseconds.
    pub lease_milliseconds: u32,
    /// This run has a verbs rail.
    pub verbs: bool,
    /// Bytes of a segment, a multiple of 8 and at least 64 KiB.
    pub segment_size: u64,
    /// Request ids kept.
    pub requests: u64,
    /// Bytes of log after which a checkpoint is written, and the log cut behind the one before it.
    pub checkpoint_bytes: u64,
    /// Checkpoints are written by a thread of their own; else commits wait for them.
    pub checkpoint_apart: bool,
    /// Why nothing may be appended: a log directory is missing or cannot be written.
    pub read_only: Option<String>,
    /// Bytes of the index that memory holds where `state_dir` is full.
    pub index_memory: u64,
    /// The wall clock.
    pub clock: Arc<dyn Fn() -> Time + Send + Sync>,
}

impl std::fmt::Debug for LogCatalogOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogCatalogOptions")
            .field("state_dir", &self.state_dir)
            .field("store", &self.store)
            .field("epoch", &self.epoch)
            .field("logs", &self.logs)
            .finish_non_exhaustive()
    }
}

impl LogCatalogOptions {
    /// For the directories of a store, which must stay open (locked) as long as the catalog is.
    pub fn new(store: &Arc<Store>, state_dir: PathBuf, node: &str) -> LogCatalogOptions {
        LogCatalogOptions {
            state_dir,
            store: store.id(),
            epoch: store.epoch(),
            logs: store.log_directories(),
            highest_sequence: store.highest_sequence(),
            newest_component: store.newest_component(),
            keeper: Arc::clone(store) as Arc<dyn SequenceKeeper>,
            node: node.to_owned(),
            lease_milliseconds: u32::try_from(LEASE.as_millis()).unwrap_or(u32::MAX),
            verbs: false,
            segment_size: super::log::SEGMENT_SIZE,
            requests: REQUESTS,
            checkpoint_bytes: CHECKPOINT_BYTES,
            checkpoint_apart: true,
            read_only: store.read_only(),
            index_memory: super::index::LIMIT,
            clock: Arc::new(|| Time::from(SystemTime::now())),
        }
    }
}

/// The run before this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Previous {
    /// Its number.
    pub incarnation: u64,
    /// It stopped cleanly.
    pub stopped: bool,
    /// It had a verbs rail: unless it stopped cleanly, its lease must run out before anything is published.
    pub verbs: bool,
    /// Its lease, milliseconds.
    pub lease_milliseconds: u32,
}

impl Previous {
    /// How long, from the start of the run after it, clients may still trust its slots; `None`: they do not, for it said
    /// good-bye, or had no rail by which slots are read without asking.
    pub fn trusted_for(self) -> Option<Duration> {
        let lease = Duration::from_millis(u64::from(self.lease_milliseconds));
        (self.verbs && !self.stopped).then(|| lease.saturating_add(lease / 4).saturating_add(Duration::from_secs(1)))
    }
}

/// What was found at start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovered {
    /// This run's number: never used before.
    pub incarnation: u64,
    /// The run before; `None` for a new store.
    pub previous: Option<Previous>,
    /// Why an index that was there was thrown away.
    pub index_discarded: Option<String>,
    /// Records that were replayed into the index.
    pub replayed: u64,
    /// Segments and checkpoints that were mended, by name and directory.
    pub mended: Vec<String>,
    /// Damaged checkpoints that were removed, as well: one before them, or the log itself, has what they held.
    pub removed: Vec<String>,
}

/// See the module's head.
pub struct LogCatalog {
    index: Arc<Index>,
    commands: Sender<Command>,
    frozen: Arc<OnceLock<String>>,
    revision: Arc<AtomicU64>,
    latest: watch::Receiver<u64>,
    history: History,
    /// Why no segment could be allocated ahead.
    shortage: Shortage,
    /// Why the log is not cut.
    uncut: Shortage,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
    read_only: Option<String>,
    /// Until then clients may trust the slots of a run before this one: a stop is not recorded as a clean one, else the run
    /// after this one would not wait for them.
    owed_until: Option<Instant>,
    /// It was stopped without a record: nothing more is taken.
    ended: AtomicBool,
    /// Of a read-only one: says nothing, ever, but those who watch wait.
    _silent: Option<watch::Sender<u64>>,
}

impl std::fmt::Debug for LogCatalog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogCatalog").field("index", &self.index).field("frozen", &self.frozen).finish_non_exhaustive()
    }
}

impl Kept {
    fn previous(&self) -> Option<Previous> {
        (self.incarnation > 0).then_some(Previous {
            incarnation: self.incarnation,
            stopped: self.stopped,
            verbs: self.verbs,
            lease_milliseconds: self.lease_milliseconds,
        })
    }
}

impl LogCatalog {
    /// Recovers the log, brings the index up to it, and records the start of this run. Reads and writes files, so call
    /// it where blocking is allowed.
    pub fn open(mut options: LogCatalogOptions) -> Result<(Arc<LogCatalog>, Recovered), StartError> {
        let Replayed { index, found, discarded, replayed, logs, unreadable } = replay(&options)?;
        options.logs = logs;
        let unreadable = unreadable.iter().map(ToString::to_string);
        let reasons: Vec<String> = options.read_only.take().into_iter().chain(unreadable).collect();
        match (!reasons.is_empty()).then(|| reasons.join("; ")) {
            None => Self::start(options, index, found, discarded, replayed),
            Some(why) => {
                // What is there is made as durable and as equal as can be; the rest is done when all logs are back.
                let reach = found.reach();
                let mended = match found.mend() {
                    Ok((_, mended)) => mended,
                    Err(error) => {
                        tracing::warn!(%error, "the log directories that are there could not be mended");
                        Mended::default()
                    }
                };
                Self::start_read_only(&options, index, reach, (discarded, replayed, mended), why)
            }
        }
    }

    /// What is wrong with the file of the index in this `state_dir`, as far as is seen without changing anything.
    pub fn index_trouble(state_dir: &Path) -> Option<(PathBuf, String)> {
        Index::trouble(state_dir)
    }

    /// Reads the log, and changes nothing: the index is made in `options.state_dir`, which is to be one of its own.
    pub fn inspect(options: &LogCatalogOptions) -> Result<(Arc<LogCatalog>, Vec<Unequal>), StartError> {
        let Replayed { index, found, discarded, replayed, logs, unreadable: _ } = replay(options)?;
        let options = &LogCatalogOptions { logs, ..options.clone() };
        let (reach, unequal) = (found.reach(), found.unequal());
        let why = "the log is only inspected".to_owned();
        let (catalog, _) = Self::start_read_only(options, index, reach, (discarded, replayed, Mended::default()), why)?;
        Ok((catalog, unequal))
    }

    /// Without a record of this run: one in some of the logs alone would differ from what the others are given when they
    /// are back. So the run's number is not the next one but one that no run has had, nor will have.
    fn start_read_only(
        options: &LogCatalogOptions,
        index: Index,
        (oldest, last): (u64, u64),
        (index_discarded, replayed, mended): (Option<String>, u64, Mended),
        why: String,
    ) -> Result<(Arc<LogCatalog>, Recovered), StartError> {
        let identity = LogIdentity { store: options.store, epoch: options.epoch, segment_size: options.segment_size };
        let before = kept(&index)?;
        let mut number = [0u8; 8];
        getrandom::fill(&mut number).map_err(|error| StartError::Write(format!("no random number: {error}")))?;
        let incarnation = READ_ONLY_RUN | (u64::from_le_bytes(number) & (READ_ONLY_RUN - 1));
        let previous = before.previous();
        let (commands, _) = bounded(1);
        let (silent, latest) = watch::channel(last);
        let catalog = LogCatalog {
            index: Arc::new(index),
            commands,
            frozen: Arc::default(),
            revision: Arc::new(AtomicU64::new(last)),
            latest,
            history: History::new(identity, options.logs.clone(), Arc::new(AtomicU64::new(oldest))),
            _silent: Some(silent),
            shortage: Shortage::default(),
            uncut: Shortage::default(),
            thread: Mutex::default(),
            read_only: Some(why),
            owed_until: None,
            ended: AtomicBool::new(false),
        };
        let Mended { files: mended, removed, .. } = mended;
        Ok((Arc::new(catalog), Recovered { incarnation, previous, index_discarded, replayed, mended, removed }))
    }

    fn start(
        options: LogCatalogOptions,
        index: Index,
        found: Survey,
        index_discarded: Option<String>,
        replayed: u64,
    ) -> Result<(Arc<LogCatalog>, Recovered), StartError> {
        let broken = |IndexError(why)| StartError::Index { path: index.path().display().to_string(), why };
        let before = kept(&index)?;
        let (mut writer, mended) = found.mend()?;
        for what in &mended.files {
            tracing::warn!(file = %what, "a file of the log was mended");
        }
        for what in &mended.removed {
            tracing::warn!(file = %what, "a damaged checkpoint was removed: what it held was found elsewhere in the log");
        }
        let incarnation = before.incarnation.saturating_add(1);
        let (previous, opened) = (before.previous(), Instant::now());
        let record = start_record(&options, incarnation, previous, &writer);
        let check = writer.append(std::slice::from_ref(&record)).map_err(|error| {
            StartError::Write(match error {
                super::log::AppendError::NotBegun(refusal) => refusal.to_string(),
                super::log::AppendError::Unknown(why) => why,
            })
        })?;
        let sequence = record.sequence;
        apply(&index, &[(record, check)], options.requests, true).map_err(broken)?;
        options.keeper.keep(sequence).map_err(StartError::Write)?;
        let Mended { files, removed, oldest, grown, size, wanting } = mended;
        let recovered = Recovered { incarnation, previous, index_discarded, replayed, mended: files, removed };
        let index = Arc::new(index);
        let frozen: Arc<OnceLock<String>> = Arc::default();
        let revision = Arc::new(AtomicU64::new(sequence));
        let (latest, shown) = watch::channel(sequence);
        let oldest = Arc::new(AtomicU64::new(oldest));
        let history = History::new(*writer.identity(), options.logs.clone(), Arc::clone(&oldest));
        let (shortage, uncut) = (Shortage::default(), Shortage::default());
        let cutting = Cutting::new(CuttingOptions {
            identity: *writer.identity(),
            logs: options.logs,
            growth: Growth::new(options.checkpoint_bytes, grown, size, wanting),
            before: before.reserved,
            oldest,
            uncut: Arc::clone(&uncut),
            apart: options.checkpoint_apart,
        });
        let mut committer = Committer {
            index: Arc::clone(&index),
            writer,
            incarnation,
            requests: options.requests,
            clock: options.clock,
            keeper: options.keeper,
            frozen: Arc::clone(&frozen),
            revision: Arc::clone(&revision),
            latest,
            reserved: before.reserved,
            kept: sequence,
            shortage: Arc::clone(&shortage),
            cutting,
        };
        // Before anything is served: whatever a mended segment left free is taken for the next one.
        committer.prepare();
        let (commands, queue) = bounded(QUEUE);
        let panicked = Arc::clone(&frozen);
        let thread = std::thread::Builder::new().name("catalog".to_owned()).spawn(move || {
            let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| committer.run(&queue)));
            if run.is_err() {
                let _ = panicked.set("the thread that commits ended unexpectedly".to_owned());
            }
        });
        let thread = thread.map_err(|error| StartError::Write(error.to_string()))?;
        let thread = Mutex::new(Some(thread));
        let catalog = LogCatalog {
            index,
            commands,
            frozen,
            revision,
            latest: shown,
            history,
            thread,
            read_only: None,
            owed_until: previous.and_then(Previous::trusted_for).map(|owed| opened + owed),
            ended: AtomicBool::new(false),
            shortage,
            uncut,
            _silent: None,
        };
        Ok((Arc::new(catalog), recovered))
    }

    /// Records a clean stop and brings markers and index up to date. Commits that come later are refused. Where clients may still
    /// trust the slots of a run before this one nothing is recorded: that takes this stop for a crash, which has the next run
    /// wait.
    pub async fn stop(&self) -> Result<(), CatalogError> {
        if self.read_only.is_some() {
            return Ok(()); // There is nothing to record, and nowhere to.
        }
        if self.owed_until.is_some_and(|until| Instant::now() < until) {
            tracing::info!("clients may still trust a run that ended before this one: the next one waits for them");
            // The thread ends as in a crash, when the catalog is dropped: a disk that hangs holds up nobody here.
            self.ended.store(true, Ordering::SeqCst);
            return Ok(());
        }
        let stopped = self.submit(Command::Stop).await;
        self.join();
        stopped
    }

    async fn submit<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, CatalogError> {
        if let Some(why) = &self.read_only {
            return Err(Refusal::ReadOnly(why.clone()).into());
        }
        if let Some(why) = self.frozen.get() {
            return Err(Refusal::Frozen(why.clone()).into());
        }
        if self.ended.load(Ordering::SeqCst) {
            return Err(Refusal::Stopping.into());
        }
        let (reply, answer): (_, oneshot::Receiver<_>) = Reply::new();
        match self.commands.try_send(command(reply)) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return Err(Refusal::Busy(QUEUE).into()),
            Err(TrySendError::Disconnected(_)) => return Err(Refusal::Stopping.into()),
        }
        answer.await.unwrap_or_else(|_| Err(CatalogError::Unknown("the thread that commits did not answer".to_owned())))
    }

    fn read<T>(&self, read: impl FnOnce(&Reader) -> Result<T, IndexError>) -> Result<T, CatalogError> {
        let answer = self.index.read().and_then(|reader| read(&reader));
        answer.map_err(|IndexError(why)| Refusal::Index(why).into())
    }

    /// Which log.
    pub(super) fn identity(&self) -> LogIdentity {
        *self.history.identity()
    }

    /// All of its state as it is now.
    pub(super) fn snapshot(&self) -> Result<Snapshot, IndexError> {
        self.index.snapshot()
    }

    /// Current and superseded versions above `after`, in order, at most `limit`.
    pub fn versions(&self, after: u64, limit: usize) -> Result<Vec<Standing>, CatalogError> {
        self.read(|reader| reader.versions(after, limit))
    }

    fn join(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic in it has been noted where it happened.
            let _ = thread.join();
        }
    }
}

/// A run whose predecessor is trusted still is recorded as one that is trusted itself, for as long: it may end before the wait does,
/// and the run after it knows of this record only.
fn start_record(
    options: &LogCatalogOptions,
    incarnation: u64,
    previous: Option<Previous>,
    writer: &LogWriter,
) -> Record {
    let time = (options.clock)();
    let owed = previous.filter(|previous| previous.trusted_for().is_some());
    Record {
        sequence: writer.next_sequence(),
        incarnation,
        time_seconds: time.seconds,
        time_nanoseconds: time.nanoseconds,
        body: Some(Body::Start(StartRecord {
            node: options.node.clone(),
            lease_milliseconds: options.lease_milliseconds.max(owed.map_or(0, |owed| owed.lease_milliseconds)),
            verbs: options.verbs || owed.is_some(),
        })),
    }
}

impl Drop for LogCatalog {
    fn drop(&mut self) {
        // Without a clean stop this is as good as a crash; the thread must not outlive the locks on the directories. A
        // catalog that is read-only has none.
        let _ = self.commands.send(Command::Abandon);
        self.join();
    }
}

impl Catalog for LogCatalog {
    fn revision(&self) -> u64 {
        self.revision.load(Ordering::SeqCst)
    }

    fn lookup<'a>(&'a self, name: &'a ObjectName) -> BoxFuture<'a, Result<Looked, CatalogError>> {
        Box::pin(async move { self.read(|reader| reader.lookup(name)) })
    }

    fn try_lookup(&self, name: &ObjectName) -> Option<Result<Looked, CatalogError>> {
        Some(self.read(|reader| reader.lookup(name)))
    }

    fn list<'a>(&'a self, list: &'a List) -> BoxFuture<'a, Result<Page, CatalogError>> {
        Box::pin(async move { self.read(|reader| reader.list(list)) })
    }

    fn commit_put(&self, put: Put) -> BoxFuture<'_, Result<PutOutcome, CatalogError>> {
        Box::pin(self.submit(|reply| Command::Put(put, reply)))
    }

    fn delete(&self, delete: Delete) -> BoxFuture<'_, Result<DeleteOutcome, CatalogError>> {
        Box::pin(self.submit(|reply| Command::Delete(delete, reply)))
    }

    fn reserve_versions(&self, count: u64) -> BoxFuture<'_, Result<RangeInclusive<u64>, CatalogError>> {
        Box::pin(self.submit(move |reply| Command::Reserve(count, reply)))
    }

    fn standing(&self, version: u64) -> BoxFuture<'_, Result<Option<Standing>, CatalogError>> {
        Box::pin(async move { self.read(|reader| reader.standing(version)) })
    }

    fn superseded(&self, after: u64, limit: usize) -> BoxFuture<'_, Result<Vec<Standing>, CatalogError>> {
        Box::pin(async move { self.read(|reader| reader.superseded(after, limit)) })
    }

    fn reclaimed(&self, versions: Vec<u64>) -> BoxFuture<'_, Result<(), CatalogError>> {
        Box::pin(self.submit(|reply| Command::Reclaimed(versions, reply)))
    }

    fn changes(&self, at: ChangesAt, limit: usize) -> BoxFuture<'_, Result<Changes, ChangesError>> {
        let (history, latest) = (self.history.clone(), self.revision());
        // Reads files: not on a thread of the runtime.
        let read = tokio::task::spawn_blocking(move || history.read(at, limit.max(1), latest));
        Box::pin(async move {
            let lost = |error: tokio::task::JoinError| Refusal::Index(format!("reading the log back: {error}"));
            read.await.map_err(|error| CatalogError::from(lost(error)))?
        })
    }

    fn latest(&self) -> watch::Receiver<u64> {
        self.latest.clone()
    }

    fn counts(&self) -> BoxFuture<'_, Result<Counts, CatalogError>> {
        Box::pin(async move { self.read(Reader::counts) })
    }

    fn frozen(&self) -> Option<String> {
        self.frozen.get().cloned()
    }

    fn degraded(&self) -> Vec<String> {
        let shortage = self.shortage.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let shortage = shortage.map(|why| format!("the log cannot go on for long: {why}"));
        let uncut = self.uncut.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let uncut = uncut.map(|why| format!("the log is not cut: {why}"));
        self.index.degraded().into_iter().chain(shortage).chain(uncut).collect()
    }
}
