//! The end of a put: every byte there, all of it durable, then one record, then visible.
//!
//! Guarantees: a commit runs once, whoever asks for it and however often; the client that goes away in the middle does
//! not stop it; where the outcome is unknown nothing is removed (a restart decides).

use super::begin::catalog_refusal;
use super::{Active, Fate, Puts, Stage};
use crate::catalog::{Condition, Conflict, PublishError, Put, PutOutcome, RequestId};
use crate::node::{count, lock};
use railfs_proto::limits::PUT_IDLE;
use railfs_proto::reply::Refusal;
use railfs_proto::v1::Code;
use std::sync::Arc;
use tokio::sync::watch;

/// A put that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The version it made.
    pub version: u64,
    /// A newer version was there already.
    pub superseded: bool,
}

/// What a publish that did not happen is to a client.
pub fn publish_refusal(error: &PublishError) -> Refusal {
    match error {
        PublishError::Catalog(error) => catalog_refusal(error),
        PublishError::Crowded => Refusal::new(Code::Unavailable, error.to_string()),
    }
}

/// A condition that does not hold, or a name that is taken by another kind.
pub fn conflict_refusal(conflict: &Conflict) -> Refusal {
    Refusal::new(Code::Conflict, conflict.to_string())
}

impl Puts {
    /// Waits until the put is durable and visible, or has failed. The same request id gets the same answer.
    ///
    /// # Errors
    /// Why the put is not visible: `Conflict`, `NoSpace`, `Aborted` (also for a put that is not known), `Unavailable`
    /// (also when the outcome is not known: ask again after a restart).
    pub async fn commit(
        self: &Arc<Self>,
        session: u64,
        put: u64,
        request: RequestId,
        condition: Condition,
    ) -> Result<Committed, Refusal> {
        if let Some((of, result)) = lock(&self.done).get(&request) {
            if *of == put {
                return result.clone();
            }
            return Err(Refusal::new(Code::Invalid, "the request id was used for another put"));
        }
        let Some(active) = self.find(put) else {
            let ended = lock(&self.ended).get(&put).cloned();
            let unknown =
                || Refusal::new(Code::Aborted, format!("put {put} is not known here: it ended, or never began"));
            return Err(ended.unwrap_or_else(unknown));
        };
        if active.session != session {
            return Err(Refusal::new(Code::Denied, format!("put {put} belongs to another session")));
        }
        let mut result = {
            let mut commit = lock(&active.commit);
            match &*commit {
                Some((first, _)) if *first != request => {
                    return Err(Refusal::new(
                        Code::Invalid,
                        format!("put {put} is being committed by another request"),
                    ));
                }
                Some((_, result)) => result.clone(),
                None => {
                    let (sender, receiver) = watch::channel(None);
                    let (puts, active) = (Arc::clone(self), Arc::clone(&active));
                    self.node.runtime.spawn(async move {
                        let result = puts.run_commit(&active, request, condition).await;
                        sender.send_replace(Some(result));
                    });
                    *commit = Some((request, receiver.clone()));
                    receiver
                }
            }
        };
        let gone = || Refusal::new(Code::Unavailable, "the server is stopping");
        let answer = result.wait_for(Option::is_some).await.map_err(|_| gone())?;
        (*answer).clone().unwrap_or_else(|| Err(gone()))
    }

    async fn run_commit(
        self: &Arc<Self>,
        active: &Arc<Active>,
        request: RequestId,
        condition: Condition,
    ) -> Result<Committed, Refusal> {
        let mut fate = active.fate.subscribe();
        let pulled = match fate.wait_for(|fate| *fate != Fate::Pulling).await.as_deref() {
            Ok(Fate::Failed(why)) => Err(why.clone()),
            Ok(_) => Ok(()),
            Err(_) => Err(Refusal::new(Code::Unavailable, "the server is stopping")),
        };
        pulled?;
        {
            let mut stage = lock(&active.stage);
            if *stage != Stage::Open {
                let ended = lock(&self.ended).get(&active.put).cloned();
                return Err(ended.unwrap_or_else(|| Refusal::new(Code::Aborted, "the put was aborted")));
            }
            *stage = Stage::Committing;
        }
        lock(&self.schedule).committing(active.put);
        let result = self.seal_and_publish(active, request, condition).await;
        match &result {
            Ok(done) => {
                count(if done.superseded {
                    &self.node.counters.puts_superseded
                } else {
                    &self.node.counters.puts_committed
                });
            }
            Err(why) => tracing::info!(put = active.put, object = %active.name, reason = %why.message, "put failed"),
        }
        *lock(&active.stage) = Stage::Over;
        match &result {
            Err(why) if why.code != Code::Conflict => self.fail(active, why.clone()),
            other => {
                if other.is_err() {
                    count(&self.node.counters.puts_failed);
                }
                lock(&self.done).put(request, (active.put, result.clone()));
                self.forget(active);
                // Unless they were kept.
                active.components.remove();
            }
        }
        result
    }

    async fn seal_and_publish(
        self: &Arc<Self>,
        active: &Arc<Active>,
        request: RequestId,
        condition: Condition,
    ) -> Result<Committed, Refusal> {
        let (puts, sealing) = (Arc::clone(self), Arc::clone(active));
        let seal = move || sealing.components.seal().map_err(|error| puts.blame(&error));
        self.at_disks(PUT_IDLE, seal).await??;
        let descriptor = active.descriptor.clone();
        let version = descriptor.version;
        // From here on a crash of this task may leave a record that names the files.
        active.components.keep();
        let put = Put { name: active.name.clone(), request, descriptor, condition };
        match self.node.publisher.publish_put(put).await {
            Ok(PutOutcome::Committed { version: made, .. }) => {
                if made != version {
                    // A client that came back after a crash: its earlier attempt won, these are the same bytes again.
                    active.components.drop_after_all();
                }
                Ok(Committed { version: made, superseded: false })
            }
            Ok(PutOutcome::Superseded { .. }) => {
                active.components.drop_after_all();
                Ok(Committed { version, superseded: true })
            }
            Ok(PutOutcome::Conflict(conflict)) => {
                active.components.drop_after_all();
                Err(conflict_refusal(&conflict))
            }
            Err(error) => {
                let unknown = matches!(&error, PublishError::Catalog(error) if error.is_unknown());
                if !unknown {
                    active.components.drop_after_all();
                }
                Err(publish_refusal(&error))
            }
        }
    }
}
