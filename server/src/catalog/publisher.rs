//! Lookups with proofs, checks, and publishes: the catalog and the version slots tied together.
//!
//! Guarantees: a lookup's answer was current under the slot value it carries; a check says "current" only if nothing
//! under the name has been published since; a publish is in progress in its slot before its commit can be durable, and
//! leaves that state only once its outcome is known. Nobody who goes away in the middle of a publish stops it half way.

use super::slots::{Place, Slots, TurnError};
use super::{
    BoxFuture, Catalog, CatalogError, Condition, Delete, DeleteOutcome, Looked, Put, PutOutcome, Refusal, RequestId,
    Versions,
};
use railfs_proto::descriptor::Proof;
use railfs_proto::limits::PUBLISH_WAIT;
use railfs_proto::name::ObjectName;
use railfs_proto::v1::CheckResult;
use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::time::Instant;

/// How a publisher behaves.
#[derive(Clone, Copy, Debug)]
pub struct PublisherOptions {
    /// Nothing is published before this moment: until then clients may trust the slots of the incarnation before.
    pub not_before: Option<Instant>,
    /// How long a lookup or a check waits for a publish of its name.
    pub wait: Duration,
}

impl Default for PublisherOptions {
    fn default() -> Self {
        PublisherOptions { not_before: None, wait: PUBLISH_WAIT }
    }
}

/// What lookup says, and under which slot value it is current.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The object, if one has the name; whether something lies below it (not covered by the proof).
    pub looked: Looked,
    /// Covers the object's name, present or absent.
    pub proof: Proof,
}

/// Why a name could not be looked up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LookupError {
    /// A publish of the name did not end in time.
    #[error("{name} is being published and that has not ended within {wait:?}")]
    Expired {
        /// The name.
        name: ObjectName,
        /// How long was waited.
        wait: Duration,
    },
    /// The catalog cannot be read.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
}

/// Why a check has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckError {
    /// The proof is from another run of the server, or from another node: it proves nothing here.
    #[error("the proof is from {node} in incarnation {incarnation}, this is {here} in incarnation {now}")]
    Incarnation {
        /// Whose proof it is.
        node: String,
        /// From which run.
        incarnation: u64,
        /// Who was asked.
        here: String,
        /// In which run.
        now: u64,
    },
    /// There is no such slot.
    #[error("slot {slot} does not exist: there are {slots}")]
    NoSuchSlot {
        /// In the proof.
        slot: u32,
        /// How many there are.
        slots: usize,
    },
    /// A publish of the name did not end in time: neither current nor stale.
    #[error("the name is being published and that has not ended within {0:?}")]
    Expired(Duration),
}

/// The answer to a check, or the promise of one.
pub enum Checked {
    /// Known now.
    Now(CheckResult),
    /// The name is being published: known when that has ended, or not at all when that takes too long. The future
    /// needs a tokio runtime with a timer.
    Held(BoxFuture<'static, Result<CheckResult, CheckError>>),
}

impl std::fmt::Debug for Checked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Checked::Now(result) => f.debug_tuple("Now").field(result).finish(),
            Checked::Held(_) => f.write_str("Held"),
        }
    }
}

/// Why a publish did not happen, or may have happened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PublishError {
    /// From the catalog: refused, or unknown.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// Too many publishes at once in one slot; it did not happen, try again.
    #[error("too many publishes are in progress in one version slot; try again")]
    Crowded,
}

/// The authority for the names of one store: what may say what is current. See the module's head.
#[derive(Debug)]
pub struct Publisher {
    slots: Arc<Slots>,
    catalog: Arc<dyn Catalog>,
    versions: Arc<Versions>,
    options: PublisherOptions,
    runtime: Handle,
    frozen: Arc<OnceLock<String>>,
    read_only: Arc<OnceLock<String>>,
}

impl Publisher {
    /// Publishes run as tasks of `runtime`.
    pub fn new(
        catalog: Arc<dyn Catalog>,
        slots: Arc<Slots>,
        runtime: Handle,
        options: PublisherOptions,
    ) -> Arc<Publisher> {
        let versions = Arc::new(Versions::new(Arc::clone(&catalog)));
        let (frozen, read_only) = Default::default();
        Arc::new(Publisher { slots, catalog, versions, options, runtime, frozen, read_only })
    }

    /// For lists, counts and reclaim.
    pub fn catalog(&self) -> &Arc<dyn Catalog> {
        &self.catalog
    }

    /// To be registered on rails.
    pub fn slots(&self) -> &Arc<Slots> {
        &self.slots
    }

    /// Why nothing is published any more until a restart; `None` while all is well.
    pub fn frozen(&self) -> Option<String> {
        let read_only = || self.read_only().map(|why| format!("read-only: {why}"));
        self.frozen.get().cloned().or_else(|| self.catalog.frozen()).or_else(read_only)
    }

    /// Why the store is read-only (a log directory is missing or cannot be written); `None`: it is not.
    pub fn read_only(&self) -> Option<String> {
        self.read_only.get().map(|why| Refusal::ReadOnly(why.clone()).to_string())
    }

    /// From here on, until a restart, nothing new is published; what is being published goes on to its end. `why` names
    /// the log directory.
    pub fn make_read_only(&self, why: &str) {
        if self.read_only.set(why.to_owned()).is_ok() {
            tracing::error!(why, "the store is read-only: puts and deletes are refused until railfsd is restarted");
        }
    }

    /// A version for a put that begins.
    pub async fn next_version(&self) -> Result<u64, CatalogError> {
        self.versions.next().await
    }

    /// [`Publisher::lookup`] without waiting: `None` when the answer needs it. For connection threads.
    pub fn try_lookup(&self, name: &ObjectName) -> Option<Result<Answer, LookupError>> {
        let place = self.slots.place(name);
        let before = self.slots.observe(place)?;
        match self.catalog.try_lookup(name)? {
            Ok(looked) => self.answer(place, before, looked).map(Ok),
            Err(error) => Some(Err(error.into())),
        }
    }

    /// What has the name now, with a proof. Waits for a publish of this name, in turn and not for ever.
    pub async fn lookup(&self, name: &ObjectName) -> Result<Answer, LookupError> {
        if let Some(answer) = self.try_lookup(name) {
            return answer;
        }
        let expired = || LookupError::Expired { name: name.clone(), wait: self.options.wait };
        tokio::time::timeout(self.options.wait, self.lookup_in_turn(name)).await.map_err(|_| expired())?
    }

    async fn lookup_in_turn(&self, name: &ObjectName) -> Result<Answer, LookupError> {
        let place = self.slots.place(name);
        loop {
            let turn = match self.slots.observe(place) {
                Some(_) => None,
                None => Some(self.slots.begin_read(place).await),
            };
            if let Some(Err(_)) = turn {
                // Its outcome is unknown until a restart: out of time is the only true answer.
                std::future::pending::<()>().await;
            }
            let Some(before) = self.slots.observe(place) else { continue };
            let looked = self.catalog.lookup(name).await?;
            if let Some(answer) = self.answer(place, before, looked) {
                return Ok(answer);
            }
        }
    }

    /// Only if the slot still has the value from before the catalog was read.
    fn answer(&self, place: Place, before: u64, looked: Looked) -> Option<Answer> {
        let after = self.slots.observe(place)?;
        (after == before).then(|| Answer { looked, proof: self.slots.proof(place, after) })
    }

    /// Whether nothing under the proof's name was published since the lookup it came with. Never blocks.
    pub fn check(&self, proof: &Proof) -> Result<Checked, CheckError> {
        let (here, now) = (self.slots.node(), self.slots.incarnation());
        if proof.node != here || proof.incarnation != now {
            let (node, incarnation) = (proof.node.clone(), proof.incarnation);
            return Err(CheckError::Incarnation { node, incarnation, here: here.to_owned(), now });
        }
        let place = Place { slot: proof.slot, tag: proof.name_tag };
        let value = proof.value;
        let slots = self.slots.words().len();
        let no_such_slot = CheckError::NoSuchSlot { slot: proof.slot, slots };
        match self.slots.check(place, value).ok_or_else(|| no_such_slot.clone())? {
            Ok(word) => Ok(Checked::Now(result(word, value))),
            Err(mut ended) => {
                let (slots, wait) = (Arc::clone(&self.slots), self.options.wait);
                let held = async move {
                    loop {
                        // An error means that the table of turns has gone: look again all the same.
                        let _ = ended.await;
                        match slots.check(place, value).ok_or_else(|| no_such_slot.clone())? {
                            Ok(word) => return Ok(result(word, value)),
                            Err(again) => ended = again,
                        }
                    }
                };
                let timed =
                    async move { tokio::time::timeout(wait, held).await.unwrap_or(Err(CheckError::Expired(wait))) };
                Ok(Checked::Held(Box::pin(timed)))
            }
        }
    }

    /// Makes a put visible whose bytes are durable. Goes on to its end even if the caller goes away.
    pub async fn publish_put(&self, put: Put) -> Result<PutOutcome, PublishError> {
        let catalog = Arc::clone(&self.catalog);
        let name = put.name.clone();
        self.publish(&name, async move { catalog.commit_put(put).await }).await
    }

    /// Makes a name absent. Goes on to its end even if the caller goes away.
    pub async fn publish_delete(
        &self,
        name: &ObjectName,
        request: RequestId,
        condition: Condition,
    ) -> Result<DeleteOutcome, PublishError> {
        let (catalog, versions) = (Arc::clone(&self.catalog), Arc::clone(&self.versions));
        let named = name.clone();
        // The version is taken in the delete's own turn: it is above that of every put that has been committed.
        let commit = async move {
            let version = versions.next().await.map_err(|error| match error {
                // A failed reservation is not a failed delete: the delete's own record was never begun.
                CatalogError::Unknown(why) => CatalogError::Refused(Refusal::Frozen(why)),
                refused => refused,
            })?;
            catalog.delete(Delete { name: named, request, version, condition }).await
        };
        self.publish(name, commit).await
    }

    async fn publish<T: Send + 'static>(
        &self,
        name: &ObjectName,
        commit: impl Future<Output = Result<T, CatalogError>> + Send + 'static,
    ) -> Result<T, PublishError> {
        let (slots, catalog, frozen) = (Arc::clone(&self.slots), Arc::clone(&self.catalog), Arc::clone(&self.frozen));
        let read_only = Arc::clone(&self.read_only);
        let place = slots.place(name);
        let not_before = self.options.not_before;
        let refuse_frozen = move |frozen: &OnceLock<String>| {
            if let Some(why) = read_only.get() {
                return Err(PublishError::Catalog(Refusal::ReadOnly(why.clone()).into()));
            }
            match frozen.get().cloned().or_else(|| catalog.frozen()) {
                Some(why) => Err(PublishError::Catalog(Refusal::Frozen(why).into())),
                None => Ok(()),
            }
        };
        let task = self.runtime.spawn(async move {
            if let Some(moment) = not_before {
                tokio::time::sleep_until(moment).await;
            }
            refuse_frozen(&frozen)?;
            let mut turn = slots.begin_publish(place).await.map_err(|error| match error {
                TurnError::Stuck => PublishError::Catalog(Refusal::Frozen(error.to_string()).into()),
                TurnError::Crowded => PublishError::Crowded,
            })?;
            refuse_frozen(&frozen)?;
            revoke(place).await;
            turn.committing();
            let outcome = commit.await;
            match &outcome {
                Err(CatalogError::Unknown(why)) => {
                    // Loudly: from here on reads of this name time out and nothing can be published.
                    if frozen.set(why.clone()).is_ok() {
                        tracing::error!(%why, "a commit has an unknown outcome: publishing is frozen until a restart");
                    }
                    drop(turn);
                }
                _ => turn.finish(),
            }
            Ok(outcome?)
        });
        match task.await {
            Ok(outcome) => outcome,
            Err(error) => {
                let why = format!("the publish of {name} ended without an answer: {error}");
                let _ = self.frozen.set(why.clone());
                Err(PublishError::Catalog(CatalogError::Unknown(why)))
            }
        }
    }
}

/// The step that takes back what holders were promised about the name and waits for them. Nobody is promised anything
/// yet; leases that let clients skip checks will be revoked here.
async fn revoke(_place: Place) {}

fn result(word: u64, value: u64) -> CheckResult {
    CheckResult { current: word == value, value: word }
}

#[cfg(test)]
mod tests;
