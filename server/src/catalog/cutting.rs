//! The log is cut while it is written: checkpoints by a thread beside the one that commits.
//!
//! Guarantees: commits do not wait for a checkpoint, but for the moment in which its state is taken; one is written at a time; where
//! it fails nothing is cut, the server goes on, it is said once and shown as long as it is so; the thread ends before the
//! catalog does, and with it the locks on the directories.

use super::batch::Shortage;
use super::checkpoint::{CheckpointError, Written, cut_logs, write};
use super::growth::Growth;
use super::index::{Forgotten, Index, IndexError, Tables};
use super::log::LogIdentity;
use crate::store::LogDirectory;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;

/// Tombstones that are taken away in one transaction: nobody waits longer for it than for a batch.
const FORGET_AT_ONCE: usize = 1024;

/// What [`Cutting`] needs to know.
pub(super) struct CuttingOptions {
    pub(super) identity: LogIdentity,
    pub(super) logs: Vec<Arc<dyn LogDirectory>>,
    pub(super) growth: Growth,
    /// Versions up to this one were reserved before this run.
    pub(super) before: u64,
    /// The first record that readers may look for.
    pub(super) oldest: Arc<AtomicU64>,
    /// Why the log is not cut; said once.
    pub(super) uncut: Shortage,
    /// In a thread of its own.
    pub(super) apart: bool,
}

/// What the thread that commits knows of checkpoints.
pub(super) struct Cutting {
    job: Arc<Job>,
    growth: Growth,
    apart: bool,
    /// Bytes that were appended when it was last asked.
    appended: u64,
    running: Option<JoinHandle<Option<Written>>>,
    /// Tombstones to be taken from the index.
    forgotten: Vec<Forgotten>,
}

/// What the thread beside works with.
struct Job {
    identity: LogIdentity,
    logs: Vec<Arc<dyn LogDirectory>>,
    before: u64,
    oldest: Arc<AtomicU64>,
    uncut: Shortage,
    stop: AtomicBool,
}

impl Cutting {
    pub(super) fn new(options: CuttingOptions) -> Cutting {
        let CuttingOptions { identity, logs, growth, before, oldest, uncut, apart } = options;
        let job = Job { identity, logs, before, oldest, uncut, stop: AtomicBool::new(false) };
        Cutting { job: Arc::new(job), growth, apart, appended: 0, running: None, forgotten: Vec::new() }
    }

    /// Called between batches. `appended`: bytes since the log was opened.
    pub(super) fn turn(&mut self, index: &Arc<Index>, appended: u64) {
        self.growth.appended(appended.saturating_sub(self.appended));
        self.appended = appended;
        if self.running.as_ref().is_some_and(JoinHandle::is_finished)
            && let Some(thread) = self.running.take()
        {
            self.ended(thread.join().unwrap_or(None));
        }
        self.forget(index);
        if self.growth.due() {
            self.growth.begin();
            self.begin(index);
        }
    }

    fn begin(&mut self, index: &Arc<Index>) {
        let (job, index) = (Arc::clone(&self.job), Arc::clone(index));
        if !self.apart {
            let written = job.run(&index);
            return self.ended(written);
        }
        let thread = std::thread::Builder::new().name("checkpoint".to_owned()).spawn(move || job.run(&index));
        match thread {
            Ok(thread) => self.running = Some(thread),
            Err(error) => {
                self.job.trouble(&format!("a thread for a checkpoint cannot be had: {error}"));
                self.growth.failed();
            }
        }
    }

    fn ended(&mut self, written: Option<Written>) {
        match written {
            Some(Written { size, forgotten }) => {
                self.growth.done(size);
                self.forgotten = forgotten;
            }
            None => self.growth.failed(),
        }
    }

    /// What is not in the checkpoint need not be in the index.
    fn forget(&mut self, index: &Index) {
        if self.forgotten.is_empty() {
            return;
        }
        let some = self.forgotten.split_off(self.forgotten.len().saturating_sub(FORGET_AT_ONCE));
        let forget = || {
            let transaction = index.begin_light()?;
            Tables::open(&transaction)?.forget(&some)?;
            Ok::<_, IndexError>(transaction.commit()?)
        };
        if let Err(error) = forget() {
            // They are found again at the next checkpoint.
            tracing::warn!(%error, "tombstones that nobody needs stay in the index");
            self.forgotten.clear();
        }
    }
}

impl Drop for Cutting {
    fn drop(&mut self) {
        self.job.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.running.take() {
            // What it had not finished is nothing: the next start removes it.
            let _ = thread.join();
        }
    }
}

impl Job {
    /// Writes a checkpoint of the index as it is now and cuts the log. `None`: there is none, and nothing was cut.
    fn run(&self, index: &Index) -> Option<Written> {
        let run = catch_unwind(AssertUnwindSafe(|| self.write(index)));
        match run {
            Ok(Ok(written)) => {
                *self.uncut.lock().unwrap_or_else(PoisonError::into_inner) = None;
                Some(written)
            }
            Ok(Err(CheckpointError::Stopping)) => None,
            Ok(Err(error)) => {
                self.trouble(&error.to_string());
                None
            }
            Err(_) => {
                self.trouble("the thread that writes checkpoints ended unexpectedly");
                None
            }
        }
    }

    fn write(&self, index: &Index) -> Result<Written, CheckpointError> {
        let state = index.snapshot()?;
        let written = write(&state, self.before, &self.identity, &self.logs, &|name| name, &self.stop)?;
        // Nothing of the index is held back any longer.
        drop(state);
        if let Err(error) = cut_logs(&self.logs, &self.identity, &self.oldest) {
            tracing::warn!(%error, "what is behind the last checkpoints is not removed: it takes room and nothing else");
        }
        tracing::info!(bytes = written.size, "a checkpoint of the log was written, and the log cut");
        Ok(written)
    }

    fn trouble(&self, why: &str) {
        let mut uncut = self.uncut.lock().unwrap_or_else(PoisonError::into_inner);
        if uncut.is_none() {
            tracing::warn!(%why, "the log is not cut: it grows until a checkpoint can be written");
        }
        *uncut = Some(why.to_owned());
    }
}
