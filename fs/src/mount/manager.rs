//! What the service manager hears of a mount: that it is ready, how it fares, that it ends.
//!
//! Guarantees: READY is told only once `ls` of the mount has answered (a helper process asks, see [`super::probe`]); the
//! watchdog is fed only after the FUSE threads, and the timer and a worker of the read path, have answered once more
//! ([`railfs_engine::notify::rounds`] decides); where no manager listens, no process and no thread is started.

use super::probe::{Probe, Question};
use crate::failure::{Failure, io};
use crate::ops::FileSystem;
use railfs_engine::notify::keeper::{Answer, Ask, Keeper, Witness};
use railfs_engine::notify::{Notifier, Word};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// What `ls` may take beyond the limit that the mount has for it, and a stop or a start beyond theirs.
const SLACK: Duration = Duration::from_secs(2);

/// The way to the manager, if there is one. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Manager(Option<Arc<Inner>>);

#[derive(Debug)]
struct Inner {
    notifier: Arc<Notifier>,
    probe: Mutex<Option<Probe>>,
    /// Of `ls`.
    limit: Duration,
}

impl Manager {
    /// As the environment says, for a mount in front. To be called before there are threads: it starts the process that
    /// probes the mount.
    ///
    /// # Errors
    /// That process cannot be started.
    pub fn from_environment(point: &Path, metadata_timeout: Duration) -> Result<Manager, Failure> {
        let notifier = Notifier::from_environment().unwrap_or_else(|problem| {
            tracing::error!("the service manager cannot be told anything: {problem}");
            Notifier::default()
        });
        if !notifier.is_heard() {
            return Ok(Manager(None));
        }
        let (notifier, limit) = (Arc::new(notifier), metadata_timeout + SLACK);
        Ok(Manager(Some(Arc::new(Inner { notifier, probe: Mutex::new(Some(Probe::start(point)?)), limit }))))
    }

    fn tell(&self, words: &[Word<'_>]) {
        if let Some(inner) = &self.0 {
            inner.notifier.tell(words);
        }
    }

    /// The start goes on, for so long at most.
    pub fn starting(&self, status: &str, limit: Duration) {
        let ls = self.0.as_ref().map_or(SLACK, |inner| inner.limit);
        self.tell(&[Word::Status(status), Word::MoreTime(limit + ls + SLACK)]);
    }

    /// The mount is made: waits until `ls` of it answers, says so, and goes on telling until what it gives is dropped.
    /// `what` names the mount.
    ///
    /// # Errors
    /// `ls` does not answer, or fails: then the mount is not ready, and never will be.
    pub fn ready(&self, what: &str, fs: &FileSystem) -> Result<Option<Keeper>, Failure> {
        let Some(inner) = &self.0 else { return Ok(None) };
        let taken = inner.probe.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut probe) = taken else { return Ok(None) };
        probe.ask_and_wait(Question::List, inner.limit).map_err(|why| Failure::failed(format!("{what}: {why}")))?;
        inner.notifier.tell(&[Word::Ready, Word::Status(&summary(what, fs))]);
        let fuse: Ask = Box::new(move |answer| probe.ask(Question::Alive, answer));
        let (backend, shown, named) = (fs.clone(), fs.clone(), what.to_owned());
        let reads: Ask = Box::new(move |answer: Answer| {
            backend.backend().pulse(Box::new(move |result| {
                if result.is_ok() {
                    answer(Ok(()));
                }
            }));
            Ok(())
        });
        let witnesses =
            vec![Witness { name: "the FUSE threads", ask: fuse }, Witness { name: "the read path", ask: reads }];
        let keeper = Keeper::start(inner.notifier.clone(), witnesses, move || summary(&named, &shown));
        keeper.map(Some).map_err(|error| io("a thread for the service manager", &error))
    }

    /// SIGHUP was heard.
    pub fn reloading(&self) {
        self.tell(&[Word::Reloading]);
    }

    /// What it asked for is done.
    pub fn reloaded(&self) {
        self.tell(&[Word::Ready]);
    }

    /// The mount ends, within this limit.
    pub fn stopping(&self, status: &str, limit: Duration) {
        self.tell(&[Word::Stopping, Word::Status(status), Word::MoreTime(limit + SLACK)]);
    }
}

/// One line for people.
fn summary(what: &str, fs: &FileSystem) -> String {
    let (status, activity) = (fs.backend().status(), fs.activity());
    let up = status.rails.iter().filter(|rail| rail.state == "up").count();
    format!("{what}: {up} of {} rails up, {} files open", status.rails.len(), activity.open_files)
}
