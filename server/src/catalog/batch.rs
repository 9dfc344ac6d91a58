//! The one thread that commits: takes what is queued, decides, records it in one batch, shows it, answers.
//!
//! Guarantees: nobody is answered before the batch is durable in every log and visible in the index; what a batch that
//! failed was decided from is taken back with it; whoever asked is answered, whatever happens.
//!
//! Commits that arrive while a batch is being synced make up the next one: nobody waits for company.

use super::cutting::Cutting;
use super::index::{Index, IndexError, Tables, Verdict};
use super::log::{AppendError, LogWriter, MAX_BATCH};
use super::unreadable::Unreadable;
use super::{CatalogError, Delete, DeleteOutcome, Put, PutOutcome, Refusal, Time};
use crossbeam_channel::Receiver;
use railfs_proto::limits::{LAST_UNUSED_VERSION, MAX_VERSION};
use railfs_proto::logfile::record_size;
use railfs_proto::v1::{ReclaimRecord, Record, ReserveRecord, StopRecord, record::Body};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use tokio::sync::{oneshot, watch};

/// Bytes of records in one batch, about: more would make those at its beginning wait.
const BATCH_BYTES: usize = 1 << 20;
/// The markers, and the index, are made durable after this many records.
const KEEP_EVERY: u64 = 4096;

/// Writes down, outside the log, the highest sequence number that is durable in it: an older log is known by that.
pub trait SequenceKeeper: Send + Sync + std::fmt::Debug {
    /// Says why it could not.
    fn keep(&self, highest: u64) -> Result<(), String>;
    /// Is told of a log that cannot be read, before anything is done without it.
    fn cannot_read(&self, log: &Unreadable) {
        let _ = log;
    }
}

impl SequenceKeeper for crate::store::Store {
    fn cannot_read(&self, log: &Unreadable) {
        self.note_unreadable(&log.directory, &log.path, &log.to_string());
    }

    fn keep(&self, highest: u64) -> Result<(), String> {
        match self.update_markers(highest) {
            // Nothing is at risk: the log has everything. What a marker that is behind cannot do is tell an older copy
            // of the log, so it is said, and tried again the next time.
            Err(error) if error.is_full() => {
                tracing::warn!(%error, "the markers could not be brought up to date: there is no room for them");
                Ok(())
            }
            other => other.map_err(|error| error.to_string()),
        }
    }
}

/// Where an answer goes. One that is dropped unanswered says that nothing happened: it was never begun.
#[derive(Debug)]
pub(super) struct Reply<T>(Option<oneshot::Sender<Result<T, CatalogError>>>);

impl<T> Reply<T> {
    pub(super) fn new() -> (Reply<T>, oneshot::Receiver<Result<T, CatalogError>>) {
        let (sender, receiver) = oneshot::channel();
        (Reply(Some(sender)), receiver)
    }

    fn send(mut self, answer: Result<T, CatalogError>) {
        if let Some(sender) = self.0.take() {
            let _ = sender.send(answer);
        }
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        if let Some(sender) = self.0.take() {
            let _ = sender.send(Err(match std::thread::panicking() {
                true => CatalogError::Unknown("the thread that commits ended in the middle of a commit".to_owned()),
                false => Refusal::Stopping.into(),
            }));
        }
    }
}

/// What the thread is asked to do.
#[derive(Debug)]
pub(super) enum Command {
    Put(Put, Reply<PutOutcome>),
    Delete(Delete, Reply<DeleteOutcome>),
    Reserve(u64, Reply<RangeInclusive<u64>>),
    Reclaimed(Vec<u64>, Reply<()>),
    /// Records a clean stop and ends.
    Stop(Reply<()>),
    /// Ends at once, as a crash would.
    Abandon,
}

/// Why no segment could be allocated ahead; `None`: one is, or none was needed yet.
pub(super) type Shortage = Arc<Mutex<Option<String>>>;

/// What the thread owns.
pub(super) struct Committer {
    pub(super) index: Arc<Index>,
    pub(super) writer: LogWriter,
    pub(super) incarnation: u64,
    pub(super) requests: u64,
    pub(super) clock: Arc<dyn Fn() -> Time + Send + Sync>,
    pub(super) keeper: Arc<dyn SequenceKeeper>,
    pub(super) frozen: Arc<OnceLock<String>>,
    pub(super) revision: Arc<AtomicU64>,
    /// Tells those who wait for changes.
    pub(super) latest: watch::Sender<u64>,
    /// Versions up to this one are reserved.
    pub(super) reserved: u64,
    /// What markers and the index on disk know.
    pub(super) kept: u64,
    /// Said once.
    pub(super) shortage: Shortage,
    /// Checkpoints.
    pub(super) cutting: Cutting,
}

/// Answers one caller once the batch has an outcome.
type Completion = Box<dyn FnOnce(Result<(), CatalogError>)>;

/// A batch as it grows.
struct Batch {
    records: Vec<Record>,
    bytes: usize,
    completions: Vec<Completion>,
    reserved: u64,
    time: Time,
    stop: bool,
}

impl Committer {
    /// Until it is told to stop, or nobody is left who could ask.
    pub(super) fn run(mut self, commands: &Receiver<Command>) {
        // What was found at start may be enough for a checkpoint.
        self.cutting.turn(&self.index, self.writer.appended());
        let mut carried = None;
        loop {
            let Some(first) = carried.take().or_else(|| commands.recv().ok()) else { return };
            match self.commit_batch(first, commands) {
                Next::Go(carry) => carried = carry,
                Next::End => return,
            }
            self.between_batches();
        }
    }

    fn commit_batch(&mut self, first: Command, commands: &Receiver<Command>) -> Next {
        let mut batch = Batch {
            records: Vec::new(),
            bytes: 0,
            completions: Vec::new(),
            reserved: self.reserved,
            time: (self.clock)(),
            stop: false,
        };
        let short = self.shortage.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        if short {
            // Room may have come back while nothing was committed.
            self.prepare();
        }
        let mut transaction = match self.index.begin_light() {
            Ok(transaction) => transaction,
            Err(error) => return refuse(first, &index_refusal(&error)),
        };
        let mut carry = None;
        let mut abandoned = false;
        let gathered = (|| {
            let mut tables = Tables::open(&transaction)?;
            let mut command = Some(first);
            while let Some(next) = command.take() {
                if matches!(next, Command::Abandon) {
                    abandoned = true;
                    break;
                }
                carry = self.add(&mut batch, &mut tables, next)?;
                if carry.is_some() || batch.stop || batch.records.len() >= MAX_BATCH {
                    break;
                }
                command = commands.try_recv().ok();
            }
            Ok::<_, IndexError>(())
        })();
        if abandoned {
            // As a crash would: what was gathered was never begun.
            return Next::End;
        }
        let outcome = match gathered {
            Err(error) => Err(index_refusal(&error)),
            Ok(()) if batch.records.is_empty() => Ok(None),
            Ok(()) => match self.writer.append(&batch.records) {
                Ok(check) => Ok(Some(check)),
                Err(AppendError::NotBegun(refusal)) => {
                    if let Some(why) = self.writer.frozen() {
                        self.freeze(why.to_owned());
                    }
                    Err(CatalogError::Refused(refusal))
                }
                Err(AppendError::Unknown(why)) => {
                    self.freeze(why.clone());
                    Err(CatalogError::Unknown(why))
                }
            },
        };
        let outcome = match outcome {
            Ok(Some(check)) => {
                let last = self.writer.next_sequence().saturating_sub(1);
                let durable = batch.stop || last >= self.kept.saturating_add(KEEP_EVERY);
                let shown = (|| {
                    Tables::open(&transaction)?.set_applied(last, check)?;
                    if durable {
                        transaction.set_durability(redb::Durability::Immediate)?;
                    }
                    Ok::<_, IndexError>(transaction.commit()?)
                })();
                match shown {
                    Ok(()) => {
                        self.reserved = batch.reserved;
                        self.revision.store(last, Ordering::SeqCst);
                        self.latest.send_replace(last);
                        Ok(())
                    }
                    Err(error) => {
                        // Durable, but nobody can see it: a restart will show it.
                        let why = format!("the index {} cannot be written: {error}", self.index.path().display());
                        self.freeze(why.clone());
                        Err(CatalogError::Unknown(why))
                    }
                }
            }
            // Dropping the transaction takes back what was applied.
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        for completion in batch.completions {
            completion(outcome.clone());
        }
        if batch.stop { Next::End } else { Next::Go(carry) }
    }

    /// Decides one command. Gives it back when it does not fit this batch any more.
    fn add(&self, batch: &mut Batch, tables: &mut Tables<'_>, command: Command) -> Result<Option<Command>, IndexError> {
        match command {
            Command::Put(put, reply) => match tables.judge_put(&put, batch.reserved)? {
                Verdict::Record(body, outcome) => match self.record_put(batch, tables, body)? {
                    Added::Yes => batch.complete(reply, Ok(outcome)),
                    Added::Later => return Ok(Some(Command::Put(put, reply))),
                    Added::Never(refusal) => reply.send(Err(refusal.into())),
                },
                Verdict::Answer(outcome) => batch.complete(reply, Ok(outcome)),
                Verdict::Refuse(refusal) => batch.complete(reply, Err(refusal)),
            },
            Command::Delete(delete, reply) => match tables.judge_delete(&delete, batch.reserved)? {
                Verdict::Record(body, outcome) => match self.record(batch, tables, body)? {
                    Added::Yes => batch.complete(reply, Ok(outcome)),
                    Added::Later => return Ok(Some(Command::Delete(delete, reply))),
                    Added::Never(refusal) => reply.send(Err(refusal.into())),
                },
                Verdict::Answer(outcome) => batch.complete(reply, Ok(outcome)),
                Verdict::Refuse(refusal) => batch.complete(reply, Err(refusal)),
            },
            Command::Reserve(count, reply) => {
                let before = batch.reserved.max(LAST_UNUSED_VERSION);
                match before.checked_add(count.max(1)).filter(|last| *last <= MAX_VERSION) {
                    None => reply.send(Err(Refusal::OutOfVersions.into())),
                    Some(last) => match self.record(batch, tables, Body::Reserve(ReserveRecord { last }))? {
                        Added::Yes => {
                            batch.reserved = last;
                            batch.complete(reply, Ok(before.saturating_add(1)..=last));
                        }
                        Added::Later => return Ok(Some(Command::Reserve(count, reply))),
                        Added::Never(refusal) => reply.send(Err(refusal.into())),
                    },
                }
            }
            Command::Reclaimed(versions, reply) => {
                let there = tables.reclaimable(&versions)?;
                if there.is_empty() {
                    batch.complete(reply, Ok(()));
                    return Ok(None);
                }
                match self.record(batch, tables, Body::Reclaim(ReclaimRecord { versions: there }))? {
                    Added::Yes => batch.complete(reply, Ok(())),
                    Added::Later => return Ok(Some(Command::Reclaimed(versions, reply))),
                    Added::Never(refusal) => reply.send(Err(refusal.into())),
                }
            }
            Command::Stop(reply) => match self.record(batch, tables, Body::Stop(StopRecord {}))? {
                Added::Yes => {
                    batch.stop = true;
                    let keeper = Arc::clone(&self.keeper);
                    let highest = self.writer.next_sequence();
                    let highest = highest.saturating_add(u64::try_from(batch.records.len()).unwrap_or(0));
                    batch.completions.push(Box::new(move |outcome| {
                        reply.send(outcome.and_then(|()| {
                            keeper.keep(highest.saturating_sub(1)).map_err(|why| Refusal::Marker(why).into())
                        }));
                    }));
                }
                Added::Later => return Ok(Some(Command::Stop(reply))),
                Added::Never(refusal) => reply.send(Err(refusal.into())),
            },
            Command::Abandon => {}
        }
        Ok(None)
    }

    /// As [`Committer::record`], but leaves the end of the last segment, and of the memory for an index
    /// whose directory is full, to deletes.
    fn record_put(&self, batch: &mut Batch, tables: &mut Tables<'_>, body: Body) -> Result<Added, IndexError> {
        let index_full = || self.index.exhausted().map(Refusal::IndexFull);
        match self.writer.kept_back(batch.bytes).or_else(index_full) {
            Some(refusal) => Ok(Added::Never(refusal)),
            None => self.record(batch, tables, body),
        }
    }

    /// Appends to the batch and shows it to those who come after in it.
    fn record(&self, batch: &mut Batch, tables: &mut Tables<'_>, body: Body) -> Result<Added, IndexError> {
        let before = u64::try_from(batch.records.len()).unwrap_or(u64::MAX);
        let record = Record {
            sequence: self.writer.next_sequence().saturating_add(before),
            incarnation: self.incarnation,
            time_seconds: batch.time.seconds,
            time_nanoseconds: batch.time.nanoseconds,
            body: Some(body),
        };
        let size = record_size(&record);
        let longest = self.writer.identity().longest_record();
        if size > longest {
            let why = format!("it is {size} bytes long, the longest is {longest}");
            return Ok(Added::Never(Refusal::TooLong(why)));
        }
        let limit = BATCH_BYTES.min(self.writer.identity().capacity());
        if !batch.records.is_empty() && batch.bytes + size > limit {
            return Ok(Added::Later);
        }
        tables.apply(&record, self.requests)?;
        batch.bytes += size;
        batch.records.push(record);
        Ok(Added::Yes)
    }

    /// Has the next segment allocated, where there is room for it.
    pub(super) fn prepare(&mut self) {
        let prepared = self.writer.prepare();
        let mut shortage = self.shortage.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = &prepared
            && shortage.is_none()
        {
            tracing::warn!(%error, "no spare segment for the log: puts will be refused before this one is full");
        }
        *shortage = prepared.err().map(|error| error.to_string());
    }

    /// What can be done while nobody waits.
    fn between_batches(&mut self) {
        self.prepare();
        let last = self.writer.next_sequence().saturating_sub(1);
        if last >= self.kept.saturating_add(KEEP_EVERY) {
            self.kept = last;
            if let Err(error) = self.keeper.keep(last) {
                tracing::warn!(%error, "the markers could not be brought up to date");
            }
        }
        if self.frozen.get().is_none() {
            self.cutting.turn(&self.index, self.writer.appended());
        }
    }

    fn freeze(&self, why: String) {
        if self.frozen.set(why.clone()).is_ok() {
            tracing::error!(%why, "the log cannot be written: nothing is committed until a restart");
        }
    }
}

impl Batch {
    /// The answer holds only if the batch does: it may have been decided from what stands before it in the batch.
    fn complete<T: 'static>(&mut self, reply: Reply<T>, answer: Result<T, Refusal>) {
        let nothing_recorded = self.records.is_empty();
        self.completions.push(Box::new(move |outcome| {
            reply.send(match outcome {
                Ok(()) => answer.map_err(CatalogError::from),
                Err(error) if nothing_recorded && error.is_unknown() => Err(Refusal::Frozen(error.to_string()).into()),
                Err(error) => Err(error),
            });
        }));
    }
}

enum Next {
    Go(Option<Command>),
    End,
}

enum Added {
    Yes,
    Later,
    Never(Refusal),
}

fn index_refusal(error: &IndexError) -> CatalogError {
    Refusal::Index(error.to_string()).into()
}

fn refuse(command: Command, error: &CatalogError) -> Next {
    let error = error.clone();
    match command {
        Command::Put(_, reply) => reply.send(Err(error)),
        Command::Delete(_, reply) => reply.send(Err(error)),
        Command::Reserve(_, reply) => reply.send(Err(error)),
        Command::Reclaimed(_, reply) => reply.send(Err(error)),
        Command::Stop(reply) => reply.send(Err(error)),
        Command::Abandon => return Next::End,
    }
    Next::Go(None)
}
