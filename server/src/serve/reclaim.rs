//! Removing the files of superseded versions.
//!
//! Guarantees: a version's files are removed only after it was superseded for the whole retention, never while it is
//! current or pinned, and after a start not before one pin lease has passed; the record that they are gone comes after they are; doing it again after a crash changes nothing.

use super::aging::Aging;
use super::files::Files;
use super::pin::Keeper;
use crate::catalog::{Standing, Time};
use crate::health::Condition;
use crate::node::{Node, add};
use crate::store::sync_directory;
use railfs_proto::component::FileName;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::Notify;

/// Versions that are looked at in one step.
const STEP: usize = 256;
/// Longest sleep between two looks: something else may have been superseded.
const LOOK: Duration = Duration::from_secs(10);
/// Shortest sleep.
const PAUSE: Duration = Duration::from_millis(50);

/// What is due now, and how long until the next is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Due {
    /// Versions whose files may go.
    pub versions: Vec<u64>,
    /// Until the first of the others is due.
    pub next: Option<Duration>,
}

fn nanoseconds(time: Time) -> i128 {
    i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanoseconds)
}

/// Pure: which of these superseded versions may go.
pub fn due(standings: &[Standing], retention: Duration, now: Time) -> Due {
    let mut due = Due::default();
    for standing in standings {
        let Some(superseded) = standing.superseded else { continue };
        let age = nanoseconds(now) - nanoseconds(superseded);
        let wanted = i128::try_from(retention.as_nanos()).unwrap_or(i128::MAX);
        if age >= wanted {
            due.versions.push(standing.descriptor.version);
        } else {
            // A clock that was set back (see `aging`): the wait is the retention at most.
            let left = Duration::from_nanos(u64::try_from(wanted - age).unwrap_or(u64::MAX)).min(retention);
            due.next = Some(due.next.map_or(left, |next| next.min(left)));
        }
    }
    due
}

/// Removes what is due, until it is told to stop. `nudge` says that something was superseded.
pub async fn run(node: Arc<Node>, files: Arc<Files>, pins: Arc<Keeper>, retention: Duration, nudge: Arc<Notify>) {
    let mut aging = Aging::default();
    loop {
        let next = match step(&node, &files, &pins, &mut aging, retention).await {
            Ok(next) => next.unwrap_or(LOOK).clamp(PAUSE, LOOK),
            Err(why) => {
                tracing::warn!(%why, "superseded versions could not be reclaimed; it is tried again");
                LOOK
            }
        };
        let _ = tokio::time::timeout(next, nudge.notified()).await;
        // Not more often than this, however often it is nudged.
        tokio::time::sleep(PAUSE).await;
    }
}

/// One look at everything. Returns how long until something is due.
async fn step(
    node: &Arc<Node>,
    files: &Arc<Files>,
    pins: &Arc<Keeper>,
    aging: &mut Aging,
    retention: Duration,
) -> Result<Option<Duration>, String> {
    if node.publisher.frozen().is_some() {
        return Ok(None); // That they are gone could not be recorded.
    }
    // Clients of an earlier run pin again first.
    if let Some(wait) = pins.wait(node.clock.now()) {
        return Ok(Some(wait));
    }
    let catalog = node.publisher.catalog();
    aging.begin();
    let (mut after, mut next) = (0, None::<Duration>);
    loop {
        let mut standings = catalog.superseded(after, STEP).await.map_err(|error| error.to_string())?;
        let Some(last) = standings.last().map(|standing| standing.descriptor.version) else { return Ok(next) };
        after = last;
        let now = Time::from(SystemTime::now());
        aging.settle(&mut standings, now, node.clock.now());
        let due = due(&standings, retention, now);
        if let Some(left) = due.next {
            next = Some(next.map_or(left, |next| next.min(left)));
        }
        // From here on these cannot be pinned any more. What is pinned is looked at again when something is released.
        let due = pins.hand_out(node.clock.now(), &due.versions);
        if due.is_empty() {
            continue;
        }
        let going: Vec<Standing> =
            standings.into_iter().filter(|standing| due.contains(&standing.descriptor.version)).collect();
        let unlinking = Arc::clone(node);
        let removed = tokio::task::spawn_blocking(move || unlink(&unlinking, &going)).await;
        let removed = removed.map_err(|error| error.to_string())?;
        if !removed.is_empty() {
            // Where the record fails they stay handed out: their files are gone.
            catalog.reclaimed(removed.clone()).await.map_err(|error| error.to_string())?;
            files.forget_versions(&removed);
        }
        pins.gone(&due);
        add(&node.counters.versions_reclaimed, removed.len() as u64);
    }
}

/// Removes the files; the versions of which nothing is left.
fn unlink(node: &Node, standings: &[Standing]) -> Vec<u64> {
    let mut folders = BTreeSet::new();
    let mut gone = Vec::new();
    for standing in standings {
        let version = standing.descriptor.version;
        let mut all = true;
        for (component, replicas) in (0u32..).zip(&standing.descriptor.components) {
            for replica in replicas.iter().filter(|replica| replica.node == node.name) {
                // What lies on a disk that is not there goes when it is back.
                let here = node.store.directory(replica.directory);
                let answers = |here: &&crate::store::StripeDirectory| {
                    node.condition(here.id()) < Condition::ReadOnly && node.shares.silent(here.id()).is_none()
                };
                let Some(directory) = here.filter(answers) else {
                    all = false;
                    continue;
                };
                let path = directory.components().join(FileName { version, component }.to_string());
                match std::fs::remove_file(&path) {
                    Ok(()) => {
                        folders.insert(directory.components());
                    }
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                    Err(error) => {
                        all = false;
                        tracing::warn!(path = %path.display(), %error, "cannot remove a superseded component");
                    }
                }
            }
        }
        if all {
            gone.push(version);
        }
    }
    for folder in folders {
        if let Err(error) = sync_directory(&folder) {
            tracing::warn!(path = %folder.display(), %error, "cannot sync a folder of components");
        }
    }
    gone
}

#[cfg(test)]
mod tests {
    use super::*;
    use railfs_proto::descriptor::{Attributes, Descriptor};
    use railfs_proto::layout::Striping;
    use railfs_proto::name::ObjectName;

    fn standing(version: u64, superseded: Option<(i64, u32)>) -> Standing {
        let attributes = Attributes { mode: 0, mtime_seconds: 0, mtime_nanoseconds: 0, owner: None };
        let striping = Striping::new(0, 4096, 4096, 1).unwrap();
        Standing {
            name: ObjectName::new("n", "k").unwrap(),
            descriptor: Descriptor { version, attributes, striping, components: vec![] },
            superseded: superseded.map(|(seconds, nanoseconds)| Time { seconds, nanoseconds }),
        }
    }

    #[test]
    fn i8_only_what_was_superseded_long_enough_goes() {
        let all =
            [standing(1, Some((100, 5))), standing(2, None), standing(3, Some((90, 0))), standing(4, Some((5000, 0)))];
        let at = |seconds, nanoseconds| due(&all, Duration::from_secs(10), Time { seconds, nanoseconds });
        assert_eq!(at(99, 0), Due { versions: vec![], next: Some(Duration::from_secs(1)) });
        assert_eq!(at(110, 4), Due { versions: vec![3], next: Some(Duration::from_nanos(1)) });
        assert_eq!(at(110, 5).versions, [1, 3]);
        assert_eq!(at(110, 5).next, Some(Duration::from_secs(10)));
        assert_eq!(due(&all, Duration::ZERO, Time { seconds: 100, nanoseconds: 5 }).versions, [1, 3]);
        assert_eq!(due(&[], Duration::ZERO, Time::default()), Due::default());
    }
}
