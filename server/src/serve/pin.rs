//! Pin requests, and the table behind its lock.
//!
//! Guarantees: a pin that is answered as held keeps the version's files from the moment it was entered; one that came too
//! late is answered as gone; the table's lock is never held over I/O.

use super::pins::{Applied, Counts, Limits, Pins};
use super::{Answer, Server};
use crate::access::{Identity, Need};
use crate::node::{count, lock};
use railfs_engine::clock::Time;
use railfs_proto::pin::{PinAnswer, PinChange};
use railfs_proto::reply::Refusal;
use railfs_proto::v1::{self, Code, rail_reply};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;

/// The pins of this run.
#[derive(Debug)]
pub struct Keeper {
    table: Mutex<Pins>,
    /// Tells reclaim that something was released.
    released: Arc<Notify>,
}

impl Keeper {
    /// See [`Pins::new`].
    pub fn new(limits: Limits, now: Time, predecessor: bool, released: Arc<Notify>) -> Keeper {
        Keeper { table: Mutex::new(Pins::new(limits, now, predecessor)), released }
    }

    /// See [`Pins::hand_out`].
    pub fn hand_out(&self, now: Time, due: &[u64]) -> Vec<u64> {
        lock(&self.table).hand_out(now, due)
    }

    /// See [`Pins::gone`].
    pub fn gone(&self, versions: &[u64]) {
        lock(&self.table).gone(versions);
    }

    /// See [`Pins::wait`].
    pub fn wait(&self, now: Time) -> Option<Duration> {
        lock(&self.table).wait(now)
    }

    /// See [`Pins::counts`].
    pub fn counts(&self) -> Counts {
        lock(&self.table).counts()
    }

    /// Releases what lapsed.
    pub fn tick(&self, now: Time) {
        let lapsed = lock(&self.table).expire(now);
        if lapsed > 0 {
            tracing::warn!(pins = lapsed, "pins lapsed: a client did not renew them in time");
            self.released.notify_one();
        }
    }
}

impl Server {
    pub(super) fn pin(self: &Arc<Self>, request: &v1::PinRequest, who: Option<&Identity>, now: Time, answer: Answer) {
        let change = match PinChange::from_message(request) {
            Ok(change) => change,
            Err(error) => {
                count(&self.node.counters.invalid);
                return answer.refuse(&Refusal::new(Code::Invalid, error.to_string()));
            }
        };
        let applied = lock(&self.pins.table).apply(now, &change);
        if !change.remove.is_empty() {
            self.pins.released.notify_one();
        }
        let done = match applied {
            Applied::Late => {
                return answer.refuse(&Refusal::new(Code::Conflict, "a newer pin request of this lease came before"));
            }
            Applied::Done(done) => done,
        };
        if !done.refused.is_empty() {
            tracing::warn!(lease = change.lease, refused = done.refused.len(), "pins refused: see retention.max_pins");
        }
        let added = change.add.iter().filter(|version| !done.gone.contains(version) && !done.refused.contains(version));
        let added: Vec<u64> = added.copied().collect();
        if added.is_empty() {
            return answer.pinned(&change, &done);
        }
        let (server, who) = (Arc::clone(self), who.cloned());
        self.node.runtime.spawn(async move {
            match server.known(change.lease, &added, who.as_ref()).await {
                Ok(unknown) => {
                    let mut done = done;
                    done.gone.extend(unknown);
                    answer.pinned(&change, &done);
                }
                Err(refusal) => answer.refuse(&refusal),
            }
        });
    }

    /// Which of these, just pinned, the catalog does not know: they were reclaimed before. What the client may not read is
    /// not known to it either.
    async fn known(&self, lease: u64, added: &[u64], who: Option<&Identity>) -> Result<Vec<u64>, Refusal> {
        let mut unknown = Vec::new();
        for &version in added {
            match self.node.publisher.catalog().standing(version).await {
                Ok(Some(standing)) if self.node.check_access(who, &standing.name.namespace, Need::Read).is_ok() => {}
                Ok(_) => {
                    lock(&self.pins.table).never_was(lease, version);
                    unknown.push(version);
                }
                // The pins stay; the client asks again.
                Err(error) => return Err(Refusal::new(Code::Unavailable, error.to_string())),
            }
        }
        Ok(unknown)
    }
}

impl Answer {
    fn pinned(self, change: &PinChange, done: &PinAnswer) {
        self.body(rail_reply::Body::Pin(done.to_message(change)));
    }
}
