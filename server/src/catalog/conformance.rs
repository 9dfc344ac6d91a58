//! What every catalog must do, tried on both.

use super::memory::MemoryCatalog;
use super::testing::{Markers, OFTEN, delete, descriptor, name, open, options, put, state_dir, wait};
use super::*;
use crate::store::simdisk::{Fault, SimDisks};
use proptest::prelude::*;
use std::sync::Arc;

/// Runs a test of the suite on both, and on a log that is cut behind a checkpoint every few records.
fn on_both<F: Future<Output = ()>>(test: impl Fn(Arc<dyn Catalog>) -> F) {
    on_both_uncut(&test);
    for apart in [false, true] {
        let (disks, state) = (SimDisks::new(2, Fault::Never), state_dir());
        let markers = Arc::new(Markers::default());
        let often = LogCatalogOptions {
            checkpoint_bytes: OFTEN,
            checkpoint_apart: apart,
            ..options(&disks, state.path(), &markers)
        };
        let (catalog, _) = LogCatalog::open(often).unwrap();
        wait(test(catalog));
    }
}

/// The same without cutting: for tests that look at the whole history.
fn on_both_uncut<F: Future<Output = ()>>(test: impl Fn(Arc<dyn Catalog>) -> F) {
    wait(test(MemoryCatalog::new()));
    let (disks, state) = (SimDisks::new(2, Fault::Never), state_dir());
    let (catalog, _) = open(&disks, state.path(), &Arc::new(Markers::default())).unwrap();
    wait(test(catalog));
}

async fn current(catalog: &Arc<dyn Catalog>, key: &str) -> Option<u64> {
    let looked = catalog.lookup(&name(key)).await.unwrap();
    if let Some(object) = &looked.object {
        assert_eq!(*object, descriptor(object.version), "whole");
    }
    looked.object.map(|object| object.version)
}

async fn reserve(catalog: &Arc<dyn Catalog>, count: u64) -> u64 {
    *catalog.reserve_versions(count).await.unwrap().start()
}

fn list(prefix: &str, delimited: bool, after: &str, limit: usize) -> List {
    let namespace = name("x").namespace;
    List { namespace, prefix: prefix.into(), delimited, after: after.into(), limit }
}

fn keys(page: &Page) -> Vec<String> {
    let text = |key: &[u8]| String::from_utf8(key.to_vec()).unwrap();
    let line = |entry: &Entry| match entry {
        Entry::Object { key, .. } => text(key),
        Entry::Directory { key } => text(key) + "/",
    };
    page.entries.iter().map(line).collect()
}

#[test]
fn a_put_is_seen_and_replaces() {
    on_both(|catalog| async move {
        let v = reserve(&catalog, 10).await;
        assert_eq!(catalog.lookup(&name("a")).await.unwrap().namespace_mtime, None);
        let before = catalog.revision();
        let first = catalog.commit_put(put("a", v)).await.unwrap();
        assert_eq!(first, PutOutcome::Committed { version: v, replaced: None });
        assert!(catalog.revision() > before);
        let looked = catalog.lookup(&name("a")).await.unwrap();
        assert!(looked.revision >= catalog.revision() && looked.namespace_mtime.is_some());
        let second = catalog.commit_put(put("a", v + 1)).await.unwrap();
        assert_eq!(second, PutOutcome::Committed { version: v + 1, replaced: Some(v) });
        assert_eq!(current(&catalog, "a").await, Some(v + 1));
        let standing = catalog.standing(v).await.unwrap().unwrap();
        assert!(standing.superseded.is_some() && standing.descriptor == descriptor(v) && standing.name == name("a"));
        assert_eq!(catalog.standing(v + 1).await.unwrap().unwrap().superseded, None);
        assert_eq!(catalog.standing(v + 5).await.unwrap(), None);
        let counts = catalog.counts().await.unwrap();
        assert_eq!((counts.objects, counts.superseded, counts.namespaces), (1, 1, 1));
    });
}

/// All changes from a number on, read in steps of two.
async fn changes(catalog: &Arc<dyn Catalog>, from: u64) -> Vec<(u64, String, bool)> {
    let (mut at, mut all) = (ChangesAt::number(from), Vec::new());
    loop {
        let read = catalog.changes(at, 2).await.unwrap();
        assert!(read.changes.len() <= 2 && read.at.next >= at.next && read.oldest == 1);
        all.extend(read.changes.iter().map(|change| {
            let deleted = matches!(change.done, Done::Delete { .. });
            (change.sequence, change.name.key.to_string(), deleted)
        }));
        if read.at.next > read.latest {
            return all;
        }
        at = read.at;
    }
}

#[test]
fn changes_are_numbered_and_read_on_from_any_number() {
    on_both_uncut(|catalog| async move {
        let v = reserve(&catalog, 100).await;
        let mut latest = catalog.latest();
        let start = *latest.borrow_and_update();
        for n in 0..30 {
            catalog.commit_put(put(&format!("k{}", n % 7), v + n)).await.unwrap();
        }
        assert!(latest.has_changed().unwrap() && *latest.borrow_and_update() == catalog.revision());
        catalog.commit_put(put("k0", v)).await.unwrap();
        let all = changes(&catalog, 1).await;
        assert_eq!(all.len(), 30, "a put that lost is no change");
        assert!(all.is_sorted() && all[0].0 > start && all[29].0 <= catalog.revision());
        catalog.delete(delete("k3", v + 50)).await.unwrap();
        let last = catalog.revision();
        assert_eq!(changes(&catalog, last).await, [(last, "k3".to_owned(), true)]);
        for (at, change) in all.iter().enumerate() {
            assert_eq!(changes(&catalog, change.0).await[..30 - at], all[at..], "from {}", change.0);
        }
        assert_eq!(changes(&catalog, last + 1).await, []);
        let beyond = catalog.changes(ChangesAt::number(last + 2), 1).await;
        assert_eq!(beyond, Err(ChangesError::Beyond { wanted: last + 2, latest: last }));
        let old = catalog.changes(ChangesAt::number(0), 1).await;
        assert_eq!(old, Err(ChangesError::TooOld { wanted: 0, oldest: 1 }));
    });
}

#[test]
fn i8_an_older_put_loses_to_a_newer_put_and_to_a_delete() {
    on_both(|catalog| async move {
        let v = reserve(&catalog, 10).await;
        catalog.commit_put(put("a", v + 3)).await.unwrap();
        assert_eq!(catalog.commit_put(put("a", v)).await.unwrap(), PutOutcome::Superseded { by: v + 3 });
        let deleted = catalog.delete(delete("a", v + 5)).await.unwrap();
        assert_eq!(deleted, DeleteOutcome::Deleted { deleted: v + 3, version: v + 5 });
        assert_eq!(catalog.commit_put(put("a", v + 4)).await.unwrap(), PutOutcome::Superseded { by: v + 5 });
        assert_eq!(catalog.commit_put(put("a", v + 3)).await.unwrap(), PutOutcome::Superseded { by: v + 5 });
        assert_eq!(current(&catalog, "a").await, None);
        let conditional = Put { condition: Condition::IfAbsent, ..put("a", v + 4) };
        let conflict = PutOutcome::Conflict(Conflict::Version { current: None });
        assert_eq!(catalog.commit_put(conditional).await.unwrap(), conflict);
        assert_eq!(catalog.delete(delete("a", v + 6)).await.unwrap(), DeleteOutcome::NotFound);
        catalog.commit_put(put("a", v + 7)).await.unwrap();
        assert_eq!(catalog.delete(delete("a", v + 6)).await.unwrap(), DeleteOutcome::Superseded { by: v + 7 });
        assert_eq!(current(&catalog, "a").await, Some(v + 7));
    });
}

#[test]
fn conditions_hold_or_conflict() {
    on_both(|catalog| async move {
        let v = reserve(&catalog, 10).await;
        let conflict = |current| PutOutcome::Conflict(Conflict::Version { current });
        let with = |version, condition| Put { condition, ..put("a", version) };
        assert_eq!(catalog.commit_put(with(v, Condition::IfVersion(7))).await.unwrap(), conflict(None));
        let first = catalog.commit_put(with(v, Condition::IfAbsent)).await.unwrap();
        assert_eq!(first, PutOutcome::Committed { version: v, replaced: None });
        assert_eq!(catalog.commit_put(with(v + 1, Condition::IfAbsent)).await.unwrap(), conflict(Some(v)));
        let next = catalog.commit_put(with(v + 2, Condition::IfVersion(v))).await.unwrap();
        assert_eq!(next, PutOutcome::Committed { version: v + 2, replaced: Some(v) });
        let gone = Delete { condition: Condition::IfVersion(v), ..delete("a", v + 3) };
        let conflict = DeleteOutcome::Conflict(Conflict::Version { current: Some(v + 2) });
        assert_eq!(catalog.delete(gone).await.unwrap(), conflict);
        let right = Delete { condition: Condition::IfVersion(v + 2), ..delete("a", v + 3) };
        assert_eq!(catalog.delete(right).await.unwrap(), DeleteOutcome::Deleted { deleted: v + 2, version: v + 3 });
    });
}

#[test]
fn a_name_is_not_a_file_and_a_directory() {
    on_both(|catalog| async move {
        let v = reserve(&catalog, 20).await;
        catalog.commit_put(put("a/b/c", v)).await.unwrap();
        for (at, key) in ["a", "a/b"].into_iter().enumerate() {
            let refused = catalog.commit_put(put(key, v + 1 + at as u64)).await.unwrap();
            assert_eq!(refused, PutOutcome::Conflict(Conflict::IsDirectory), "{key}");
            assert!(catalog.lookup(&name(key)).await.unwrap().directory);
        }
        let refused = catalog.commit_put(put("a/b/c/d/e", v + 5)).await.unwrap();
        assert_eq!(refused, PutOutcome::Conflict(Conflict::NotADirectory { object: name("a/b/c") }));
        // Neighbours in the order of bytes are no relatives.
        for (at, key) in ["a/b/c.x", "a/b/c0", "a/bb", "a.", "a0"].into_iter().enumerate() {
            let done = catalog.commit_put(put(key, v + 6 + at as u64)).await.unwrap();
            assert_eq!(done, PutOutcome::Committed { version: v + 6 + at as u64, replaced: None }, "{key}");
        }
        catalog.delete(delete("a/b/c", v + 15)).await.unwrap();
        let below = catalog.commit_put(put("a/b/c/d", v + 16)).await.unwrap();
        assert_eq!(below, PutOutcome::Committed { version: v + 16, replaced: None });
    });
}

#[test]
fn repeating_a_request_does_it_once() {
    on_both(|catalog| async move {
        let v = reserve(&catalog, 10).await;
        let first = put("a", v);
        let outcome = catalog.commit_put(first.clone()).await.unwrap();
        let second = put("a", v + 1);
        let replaced = catalog.commit_put(second.clone()).await.unwrap();
        assert_eq!(catalog.commit_put(first.clone()).await.unwrap(), outcome);
        assert_eq!(catalog.commit_put(second.clone()).await.unwrap(), replaced);
        let gone = delete("a", v + 2);
        let deleted = catalog.delete(gone.clone()).await.unwrap();
        catalog.commit_put(put("a", v + 4)).await.unwrap();
        // The repeated delete carries a new version, and still deletes nothing that came after it.
        assert_eq!(catalog.delete(Delete { version: v + 5, ..gone.clone() }).await.unwrap(), deleted);
        assert_eq!(current(&catalog, "a").await, Some(v + 4));
        for reused in [Put { name: name("b"), ..first }, Put { request: gone.request, ..put("a", v + 6) }] {
            let refused = catalog.commit_put(reused).await;
            assert!(matches!(refused, Err(CatalogError::Refused(Refusal::RequestReused(_)))), "{refused:?}");
        }
    });
}

#[test]
fn i8_versions_are_handed_out_once_and_only_those() {
    on_both(|catalog| async move {
        let first = catalog.reserve_versions(3).await.unwrap();
        assert!(*first.start() > railfs_proto::limits::LAST_UNUSED_VERSION);
        let second = catalog.reserve_versions(5).await.unwrap();
        assert!(second.start() > first.end() && second.end() - second.start() == 4);
        for version in [second.end() + 1, 7] {
            let made_up = Put { descriptor: descriptor(version.max(1025)), ..put("a", version.max(1025)) };
            let mut made_up = made_up;
            made_up.descriptor.version = version;
            let refused = catalog.commit_put(made_up).await;
            assert!(matches!(refused, Err(CatalogError::Refused(Refusal::Version { .. }))), "{refused:?}");
        }
        assert_eq!(current(&catalog, "a").await, None);
        let versions = Versions::new(Arc::clone(&catalog));
        let mut last = *second.end();
        for _ in 0..2000 {
            let next = versions.next().await.unwrap();
            assert!(next > last);
            last = next;
        }
    });
}

#[test]
fn superseded_versions_are_listed_until_they_are_reclaimed() {
    on_both(|catalog| async move {
        let v = reserve(&catalog, 10).await;
        for version in v..v + 4 {
            catalog.commit_put(put("a", version)).await.unwrap();
        }
        catalog.delete(delete("a", v + 5)).await.unwrap();
        let all = catalog.superseded(0, 100).await.unwrap();
        assert_eq!(all.iter().map(|past| past.descriptor.version).collect::<Vec<_>>(), [v, v + 1, v + 2, v + 3]);
        assert!(all.windows(2).all(|pair| pair[0].superseded <= pair[1].superseded));
        assert_eq!(catalog.superseded(v + 1, 1).await.unwrap()[0].descriptor.version, v + 2);
        catalog.commit_put(put("a", v + 6)).await.unwrap();
        // One that is current, and one that never was, are left alone.
        catalog.reclaimed(vec![v, v + 2, v + 6, v + 9]).await.unwrap();
        let left = catalog.superseded(0, 100).await.unwrap();
        assert_eq!(left.iter().map(|past| past.descriptor.version).collect::<Vec<_>>(), [v + 1, v + 3]);
        assert_eq!(catalog.standing(v).await.unwrap(), None);
        assert_eq!(current(&catalog, "a").await, Some(v + 6));
    });
}

#[test]
fn lists_fold_and_go_on_where_they_stopped() {
    on_both(|catalog| async move {
        let all = ["a", "b.x", "b/1", "b/2/x", "b/2/y", "b0", "c/d/e", "d"];
        let v = reserve(&catalog, 20).await;
        for (key, version) in all.into_iter().zip(v..) {
            catalog.commit_put(put(key, version)).await.unwrap();
        }
        let foreign = Put { name: ObjectName::new("other", "zz").unwrap(), ..put("zz", v + 15) };
        catalog.commit_put(foreign).await.unwrap();
        let flat = catalog.list(&list("", false, "", 100)).await.unwrap();
        assert_eq!(keys(&flat), all);
        assert_eq!(flat.next_after, None);
        let root = catalog.list(&list("", true, "", 100)).await.unwrap();
        assert_eq!(keys(&root), ["a", "b.x", "b/", "b0", "c/", "d"]);
        let below = catalog.list(&list("b/", true, "", 100)).await.unwrap();
        assert_eq!(keys(&below), ["b/1", "b/2/"]);
        for delimited in [false, true] {
            for limit in 1..8 {
                let whole = keys(&catalog.list(&list("", delimited, "", 100)).await.unwrap());
                let mut paged = Vec::new();
                let mut after = Some(String::new());
                while let Some(from) = after {
                    let page = catalog.list(&list("", delimited, &from, limit)).await.unwrap();
                    assert!(page.entries.len() <= limit);
                    paged.extend(keys(&page));
                    after = page.next_after.map(|after| String::from_utf8(after).unwrap());
                }
                assert_eq!(paged, whole, "delimited {delimited}, limit {limit}");
            }
        }
        assert!(catalog.list(&list("zzz", true, "", 5)).await.unwrap().entries.is_empty());
        let nowhere = List { namespace: "nobody".parse().unwrap(), ..list("", true, "", 5) };
        assert_eq!(catalog.list(&nowhere).await.unwrap().namespace_mtime, None);
    });
}

#[test]
fn commits_at_the_same_time_are_all_answered() {
    on_both(|catalog| async move {
        let v = reserve(&catalog, 500).await;
        let mut pending = Vec::new();
        for version in v..v + 400 {
            let catalog = Arc::clone(&catalog);
            let key = format!("k{}", version % 40);
            pending.push(async move { catalog.commit_put(put(&key, version)).await.unwrap() });
        }
        // All at once, on one thread.
        let mut pending: Vec<_> = pending.into_iter().map(Box::pin).collect();
        let outcomes = std::future::poll_fn(|context| {
            let mut waiting = false;
            pending.retain_mut(|future| {
                let done = future.as_mut().poll(context).is_ready();
                waiting |= !done;
                !done
            });
            if waiting { std::task::Poll::Pending } else { std::task::Poll::Ready(()) }
        });
        outcomes.await;
        assert_eq!(catalog.counts().await.unwrap().objects, 40);
        for key in 0..40 {
            let version = current(&catalog, &format!("k{key}")).await.unwrap();
            assert_eq!(version % 40, key);
            assert!(version >= v + 360, "the newest wins");
        }
    });
}

/// One step of a random history. Versions are counted back from the newest reserved one.
#[derive(Clone, Debug)]
enum Step {
    Put { key: usize, back: u64, condition: u8 },
    Delete { key: usize, back: u64, condition: u8 },
    Again,
    Reclaim { back: u64 },
}

const KEYS: [&str; 6] = ["a", "a/b", "a/b/c", "a.", "b", "b/c"];

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..KEYS.len(), 0u64..6, 0u8..3).prop_map(|(key, back, condition)| Step::Put { key, back, condition }),
        3 => (0..KEYS.len(), 0u64..6, 0u8..3).prop_map(|(key, back, condition)| Step::Delete { key, back, condition }),
        1 => Just(Step::Again),
        1 => (0u64..8).prop_map(|back| Step::Reclaim { back }),
    ]
}

/// Everything that can be seen, except times and revisions.
async fn seen(catalog: &Arc<dyn Catalog>) -> String {
    let mut text = String::new();
    for key in KEYS {
        let looked = catalog.lookup(&name(key)).await.unwrap();
        text += &format!("{key}: {:?} {}\n", looked.object.map(|object| object.version), looked.directory);
    }
    for (prefix, delimited, after, limit) in
        [("", true, "", 2), ("", false, "a/b", 9), ("a/", true, "", 9), ("a", true, "a.", 2), ("b", true, "b/c", 9)]
    {
        let page = catalog.list(&list(prefix, delimited, after, limit)).await.unwrap();
        text += &format!("{prefix} {delimited} {after}: {:?} {:?}\n", keys(&page), page.next_after);
    }
    let past = catalog.superseded(0, 100).await.unwrap();
    text + &format!("{:?}", past.iter().map(|past| past.descriptor.version).collect::<Vec<_>>())
}

/// The new version of a step: a fresh one, or an older one that has not been used.
async fn run(catalog: &Arc<dyn Catalog>, steps: &[(Step, RequestId)]) -> Vec<String> {
    let mut trace = Vec::new();
    let mut last: Option<Put> = None;
    let condition = |kind: u8, current: Option<u64>| match kind {
        0 => Condition::Always,
        1 => Condition::IfAbsent,
        _ => Condition::IfVersion(current.unwrap_or(3)),
    };
    for (step, request) in steps {
        let newest = *catalog.reserve_versions(8).await.unwrap().end();
        let outcome = match step.clone() {
            Step::Put { key, back, condition: kind } => {
                let now = catalog.lookup(&name(KEYS[key])).await.unwrap().object.map(|object| object.version);
                // Those of the last two blocks, so that some are older than what is there.
                let version = newest - back * 3;
                let made = Put {
                    name: name(KEYS[key]),
                    request: *request,
                    descriptor: descriptor(version),
                    condition: condition(kind, now),
                };
                last = Some(made.clone());
                format!("{:?}", catalog.commit_put(made).await)
            }
            Step::Delete { key, back, condition: kind } => {
                let now = catalog.lookup(&name(KEYS[key])).await.unwrap().object.map(|object| object.version);
                let version = newest - back * 3;
                let condition = condition(kind, now);
                let gone = Delete { name: name(KEYS[key]), request: *request, version, condition };
                format!("{:?}", catalog.delete(gone).await)
            }
            Step::Again => match last.clone() {
                Some(made) => format!("{:?}", catalog.commit_put(made).await),
                None => String::new(),
            },
            Step::Reclaim { back } => {
                format!("{:?}", catalog.reclaimed(vec![newest - 8 - back, newest - 16 - back]).await)
            }
        };
        trace.push(format!("{step:?} -> {outcome}"));
        trace.push(seen(catalog).await);
    }
    trace
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// The two agree on every history, and so does an index that is rebuilt from the log.
    #[test]
    fn both_catalogs_agree_and_a_rebuilt_index_is_the_same(steps in proptest::collection::vec(step(), 1..40)) {
        let steps: Vec<_> = steps.into_iter().map(|step| (step, testing::request())).collect();
        let memory: Arc<dyn Catalog> = MemoryCatalog::new();
        wait(async { memory.reserve_versions(16).await }).unwrap();
        let expected = wait(run(&memory, &steps));
        let (disks, state, markers) = (SimDisks::new(1, Fault::Never), state_dir(), Arc::new(Markers::default()));
        let (real, _) = open(&disks, state.path(), &markers).unwrap();
        let real: Arc<dyn Catalog> = real;
        wait(async { real.reserve_versions(16).await }).unwrap();
        prop_assert_eq!(wait(run(&real, &steps)), expected);
        let before = (wait(seen(&real)), wait(real.counts()).unwrap());
        drop(real);
        let elsewhere = state_dir();
        let (rebuilt, _) = open(&disks, elsewhere.path(), &markers).unwrap();
        let rebuilt: Arc<dyn Catalog> = rebuilt;
        prop_assert_eq!(wait(seen(&rebuilt)), before.0);
        let after = wait(rebuilt.counts()).unwrap();
        prop_assert_eq!((after.objects, after.superseded), (before.1.objects, before.1.superseded));
    }

    /// So does one that is rebuilt from a checkpoint and the rest of the log, again and again, in a log that is cut every few
    /// records: neither deletes nor lost puts come back, and what was done under a request id stays done once.
    #[test]
    fn i8_a_log_that_is_cut_and_rebuilt_agrees_with_a_model(
        runs in proptest::collection::vec(proptest::collection::vec(step(), 1..25), 1..5)
    ) {
        let memory: Arc<dyn Catalog> = MemoryCatalog::new();
        let (disks, markers) = (SimDisks::new(2, Fault::Never), Arc::new(Markers::default()));
        let mut before: Option<(Put, String)> = None;
        for (at, steps) in runs.into_iter().enumerate() {
            let steps: Vec<_> = steps.into_iter().map(|step| (step, testing::request())).collect();
            // Every start is without an index.
            let state = state_dir();
            let often = LogCatalogOptions { checkpoint_bytes: OFTEN, ..options(&disks, state.path(), &markers) };
            let (real, _) = LogCatalog::open(often).unwrap();
            let real: Arc<dyn Catalog> = real;
            prop_assert_eq!(wait(seen(&real)), wait(seen(&memory)), "run {}", at);
            if let Some((made, outcome)) = &before {
                prop_assert_eq!(&format!("{:?}", wait(real.commit_put(made.clone()))), outcome);
            }
            // A put of this run has a version of this run.
            let first = wait(real.reserve_versions(16)).unwrap();
            prop_assert_eq!(&first, &wait(memory.reserve_versions(16)).unwrap());
            prop_assert_eq!(wait(run(&real, &steps)), wait(run(&memory, &steps)));
            let last = put("z", *wait(real.reserve_versions(1)).unwrap().end());
            wait(memory.reserve_versions(1)).unwrap();
            let outcome = wait(real.commit_put(last.clone()));
            prop_assert_eq!(&outcome, &wait(memory.commit_put(last.clone())));
            before = Some((last, format!("{outcome:?}")));
        }
    }
}
