//! Every state of the models, and of each broken variant until it is caught.

use railfs_models::{fetch, publish};
use stateright::{Checker, HasDiscoveries, Model};
use std::io::Write;

fn tally(ids: &str, count: usize, test: &str) {
    let Some(path) = std::env::var_os("RAILFS_TALLY_LOG") else { return };
    let log = std::fs::OpenOptions::new().append(true).create(true).open(path);
    let written = log.and_then(|mut log| log.write_all(format!("{ids} states {count} {test}\n").as_bytes()));
    written.unwrap_or_else(|error| panic!("RAILFS_TALLY_LOG: {error}"));
}

/// All states; the properties hold.
fn holds<M>(model: M, ids: &str, name: &str)
where
    M: Model + Send + Sync + 'static,
    M::State: Send + Sync + Clone + std::hash::Hash + std::fmt::Debug + PartialEq,
    M::Action: Clone + PartialEq + std::fmt::Debug + Send + Sync,
{
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let checker = model.checker().threads(threads).spawn_bfs().join();
    println!("{name}: {} states, {} deep", checker.unique_state_count(), checker.max_depth());
    checker.assert_properties();
    tally(ids, checker.unique_state_count(), &name.replace([' ', ','], "_"));
}

/// The property whose name begins so is broken, and how is found.
fn caught<M>(model: M, invariant: &str, name: &str)
where
    M: Model + Send + Sync + 'static,
    M::State: Send + Sync + Clone + std::hash::Hash + std::fmt::Debug + PartialEq,
    M::Action: Clone + PartialEq + std::fmt::Debug + Send + Sync,
{
    let checker = model.checker().finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let found = checker.discoveries();
    let path = found.iter().find(|(property, _)| property.starts_with(invariant));
    let Some((property, path)) = path else {
        panic!("{name}: nothing breaks {invariant} in {} states", checker.unique_state_count())
    };
    println!("{name}: caught after {} steps: {property}", path.clone().into_actions().len());
}

#[test]
fn i3_i8_every_state_of_publish_check_and_lease() {
    holds(publish::Publish { broken: publish::Broken::Nothing }, "i3,i8", "publish, check and lease");
}

#[test]
fn i3_i8_broken_variants_of_publish_are_caught() {
    use publish::{Broken, Publish};
    for (broken, invariant) in [
        (Broken::JoinsPosted, "I3"),
        (Broken::WordAfterCatalog, "I3"),
        (Broken::NoLease, "I3"),
        (Broken::NoDelay, "I3"),
        (Broken::LeaseOfAnswer, "I3"),
        (Broken::AcknowledgesEarly, "I8"),
    ] {
        caught(Publish { broken }, invariant, &format!("publish with {broken:?}"));
    }
}

#[test]
fn i1_i4_i5_every_state_of_fetch_failover_and_quarantine() {
    holds(fetch::Fetch { broken: fetch::Broken::Nothing }, "i1,i4,i5", "fetch, failover and quarantine");
}

#[test]
fn i1_i4_i5_broken_variants_of_fetch_are_caught() {
    use fetch::{Broken, Fetch};
    for (broken, invariant) in [
        (Broken::FreedAtTimeout, "I4"),
        (Broken::FreedAtDeath, "I4"),
        (Broken::TakesStale, "I5"),
        (Broken::FreesTwice, "I4"),
        (Broken::LosesReads, "I10"),
    ] {
        caught(Fetch { broken }, invariant, &format!("fetch with {broken:?}"));
    }
}
