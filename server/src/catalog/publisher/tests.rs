//! Lookups, checks and publishes against a catalog that is slow, refuses, or does not know.

use super::*;
use crate::catalog::memory::{Fault, MemoryCatalog};
use crate::catalog::testing::{descriptor, name, put};
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Notify;
use tokio::task::yield_now;

fn publisher(catalog: Arc<MemoryCatalog>, slots: usize) -> Arc<Publisher> {
    Publisher::new(catalog, Slots::new("n", 4, slots), Handle::current(), PublisherOptions::default())
}

async fn published(publisher: &Arc<Publisher>, key: &str) -> u64 {
    let version = publisher.next_version().await.unwrap();
    let outcome = publisher.publish_put(put(key, version)).await.unwrap();
    assert!(matches!(outcome, PutOutcome::Committed { .. }));
    version
}

fn now(publisher: &Publisher, proof: &Proof) -> Option<bool> {
    match publisher.check(proof).unwrap() {
        Checked::Now(result) => Some(result.current),
        Checked::Held(_) => None,
    }
}

/// A put that has arrived at the catalog and waits there, and what lets it go on.
async fn delayed(
    publisher: &Arc<Publisher>,
    catalog: &MemoryCatalog,
    key: &str,
) -> (u64, Arc<Notify>, tokio::task::JoinHandle<Result<PutOutcome, PublishError>>) {
    let (arrived, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    catalog.inject(Fault::Delay(Arc::clone(&arrived), Arc::clone(&go)));
    let version = publisher.next_version().await.unwrap();
    let (publisher, made) = (Arc::clone(publisher), put(key, version));
    let task = tokio::spawn(async move { publisher.publish_put(made).await });
    arrived.notified().await;
    (version, go, task)
}

#[tokio::test]
async fn i3_a_proof_holds_until_its_name_is_published() {
    let publisher = publisher(MemoryCatalog::new(), 1 << 10);
    let absent = publisher.lookup(&name("a")).await.unwrap();
    assert_eq!(absent.looked.object, None);
    assert_eq!(now(&publisher, &absent.proof), Some(true));
    let version = published(&publisher, "a").await;
    assert_eq!(now(&publisher, &absent.proof), Some(false));
    let found = publisher.lookup(&name("a")).await.unwrap();
    assert_eq!(found.looked.object, Some(descriptor(version)));
    assert_eq!(now(&publisher, &found.proof), Some(true));
    let outcome = publisher.publish_delete(&name("a"), [1; 16], Condition::Always).await.unwrap();
    assert!(matches!(outcome, DeleteOutcome::Deleted { deleted, version: new } if deleted == version && new > version));
    assert_eq!(now(&publisher, &found.proof), Some(false));
    assert_eq!(publisher.lookup(&name("a")).await.unwrap().looked.object, None);
    assert_eq!(publisher.slots().busy_names(), 0);
}

#[tokio::test]
async fn a_proof_of_another_run_or_node_or_slot_is_an_error() {
    let publisher = publisher(MemoryCatalog::new(), 16);
    let proof = publisher.lookup(&name("a")).await.unwrap().proof;
    let other_run = publisher.check(&Proof { incarnation: 5, ..proof.clone() });
    assert!(matches!(other_run, Err(CheckError::Incarnation { incarnation: 5, now: 4, .. })));
    let other_node = publisher.check(&Proof { node: "m".to_owned(), ..proof.clone() });
    assert!(matches!(other_node, Err(CheckError::Incarnation { .. })));
    assert!(matches!(publisher.check(&Proof { slot: 16, ..proof }), Err(CheckError::NoSuchSlot { slots: 16, .. })));
}

#[tokio::test(start_paused = true)]
async fn i3_while_a_name_is_published_its_lookups_wait_and_its_checks_are_held() {
    let catalog = MemoryCatalog::new();
    let publisher = publisher(Arc::clone(&catalog), 1);
    published(&publisher, "a").await;
    published(&publisher, "b").await;
    let before = publisher.lookup(&name("a")).await.unwrap();
    let neighbour = publisher.lookup(&name("b")).await.unwrap();
    let (version, go, task) = delayed(&publisher, &catalog, "a").await;
    assert!(publisher.try_lookup(&name("a")).is_none());
    let Checked::Held(held) = publisher.check(&before.proof).unwrap() else { panic!("answered") };
    let held = tokio::spawn(held);
    let lookup = {
        let publisher = Arc::clone(&publisher);
        tokio::spawn(async move { publisher.lookup(&name("a")).await })
    };
    for _ in 0..20 {
        yield_now().await;
    }
    assert!(!held.is_finished() && !lookup.is_finished());
    // A name in the same slot is not held up.
    assert!(publisher.try_lookup(&name("b")).is_some());
    assert_eq!(now(&publisher, &neighbour.proof), Some(true));
    go.notify_one();
    assert!(matches!(task.await.unwrap(), Ok(PutOutcome::Committed { .. })));
    let answer = lookup.await.unwrap().unwrap();
    assert_eq!(answer.looked.object.as_ref().map(|object| object.version), Some(version));
    assert!(!held.await.unwrap().unwrap().current);
    assert_eq!(now(&publisher, &answer.proof), Some(true));
    assert_eq!(publisher.slots().busy_names(), 0);
}

#[tokio::test(start_paused = true)]
async fn i9_a_publish_that_hangs_holds_lookups_and_checks_only_so_long() {
    let catalog = MemoryCatalog::new();
    let publisher = publisher(Arc::clone(&catalog), 1 << 10);
    let before = publisher.lookup(&name("a")).await.unwrap();
    let (_, go, task) = delayed(&publisher, &catalog, "a").await;
    let Checked::Held(held) = publisher.check(&before.proof).unwrap() else { panic!("answered") };
    let start = Instant::now();
    assert!(matches!(publisher.lookup(&name("a")).await, Err(LookupError::Expired { .. })));
    assert_eq!(start.elapsed(), PUBLISH_WAIT);
    assert_eq!(held.await, Err(CheckError::Expired(PUBLISH_WAIT)));
    go.notify_one();
    task.await.unwrap().unwrap();
    assert!(publisher.try_lookup(&name("a")).is_some());
}

#[tokio::test(start_paused = true)]
async fn i8_an_unknown_outcome_freezes_publishing_and_that_name_alone() {
    for fault in [Fault::UnknownDone, Fault::UnknownLost] {
        let catalog = MemoryCatalog::new();
        let publisher = publisher(Arc::clone(&catalog), 1);
        let other_version = published(&publisher, "b").await;
        let before = publisher.lookup(&name("a")).await.unwrap();
        let version = publisher.next_version().await.unwrap();
        catalog.inject(fault);
        let outcome = publisher.publish_put(put("a", version)).await;
        assert!(matches!(outcome, Err(PublishError::Catalog(CatalogError::Unknown(_)))), "{outcome:?}");
        assert!(publisher.frozen().is_some());
        // Neither old nor new may be claimed.
        assert!(matches!(publisher.lookup(&name("a")).await, Err(LookupError::Expired { .. })));
        let Checked::Held(held) = publisher.check(&before.proof).unwrap() else { panic!("answered") };
        assert!(matches!(held.await, Err(CheckError::Expired(_))));
        // Everything else is served, and nothing is published.
        let other = publisher.lookup(&name("b")).await.unwrap();
        assert_eq!(other.looked.object.map(|object| object.version), Some(other_version));
        for key in ["a", "b"] {
            let refused = publisher.publish_put(put(key, other_version)).await;
            assert!(matches!(refused, Err(PublishError::Catalog(CatalogError::Refused(Refusal::Frozen(_))))));
        }
    }
}

#[tokio::test]
async fn i3_a_refused_commit_moves_the_counter_all_the_same() {
    let catalog = MemoryCatalog::new();
    let publisher = publisher(Arc::clone(&catalog), 1 << 10);
    let before = publisher.lookup(&name("a")).await.unwrap();
    catalog.inject(Fault::Refuse(Refusal::NoSpace("full".to_owned())));
    let version = publisher.next_version().await.unwrap();
    let refused = publisher.publish_put(put("a", version)).await;
    assert!(matches!(refused, Err(PublishError::Catalog(CatalogError::Refused(Refusal::NoSpace(_))))));
    assert_eq!(now(&publisher, &before.proof), Some(false));
    assert!(publisher.try_lookup(&name("a")).is_some());
    assert_eq!(publisher.frozen(), None);
    published(&publisher, "a").await;
}

#[tokio::test]
async fn i8_a_caller_that_goes_away_does_not_stop_a_publish() {
    let catalog = MemoryCatalog::new();
    let publisher = publisher(Arc::clone(&catalog), 1 << 10);
    let (version, go, task) = delayed(&publisher, &catalog, "a").await;
    task.abort();
    let _ = task.await;
    assert!(publisher.try_lookup(&name("a")).is_none());
    go.notify_one();
    let answer = publisher.lookup(&name("a")).await.unwrap();
    assert_eq!(answer.looked.object.map(|object| object.version), Some(version));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_published_before_the_start_up_delay_is_over() {
    let options =
        PublisherOptions { not_before: Some(Instant::now() + Duration::from_secs(3)), ..PublisherOptions::default() };
    let catalog = MemoryCatalog::new();
    let publisher = Publisher::new(catalog, Slots::new("n", 4, 8), Handle::current(), options);
    let start = Instant::now();
    assert!(publisher.lookup(&name("a")).await.is_ok());
    published(&publisher, "a").await;
    assert!(start.elapsed() >= Duration::from_secs(3));
}

/// Writers without a pause, readers that look up and check, over a catalog whose reads are old by the time they are
/// given: nobody is told that something is current which had been replaced before he asked.
#[tokio::test]
async fn i3_no_lookup_and_no_check_is_older_than_what_was_acknowledged_before_it() {
    for slots in [1, 1 << 10] {
        let publisher = publisher(MemoryCatalog::with_slow_reads(), slots);
        let acknowledged: Arc<[AtomicU64; 2]> = Arc::default();
        let mut tasks = Vec::new();
        for writer in 0..4 {
            let (publisher, acknowledged) = (Arc::clone(&publisher), Arc::clone(&acknowledged));
            tasks.push(tokio::spawn(async move {
                for _ in 0..200 {
                    let key = writer % 2;
                    let version = publisher.next_version().await.unwrap();
                    yield_now().await;
                    publisher.publish_put(put(["a", "b"][key], version)).await.unwrap();
                    acknowledged[key].fetch_max(version, Ordering::SeqCst);
                    yield_now().await;
                }
            }));
        }
        for reader in 0..4 {
            let (publisher, acknowledged) = (Arc::clone(&publisher), Arc::clone(&acknowledged));
            tasks.push(tokio::spawn(async move {
                let key = reader % 2;
                for _ in 0..100 {
                    let floor = acknowledged[key].load(Ordering::SeqCst);
                    let answer = publisher.lookup(&name(["a", "b"][key])).await.unwrap();
                    let seen = answer.looked.object.map_or(0, |object| object.version);
                    assert!(seen >= floor, "{seen} after {floor} was acknowledged");
                    yield_now().await;
                    let floor = acknowledged[key].load(Ordering::SeqCst);
                    let current = match publisher.check(&answer.proof).unwrap() {
                        Checked::Now(result) => result.current,
                        Checked::Held(held) => held.await.unwrap().current,
                    };
                    assert!(!current || seen >= floor, "{seen} called current after {floor} was acknowledged");
                }
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(publisher.slots().busy_names(), 0);
    }
}
