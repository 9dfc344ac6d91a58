//! Reads of a version as such, and pins, in the small world.

use super::*;
use railfs_proto::pin::{PinAnswer, PinChange};
use std::collections::HashSet;

/// What the world's server keeps.
#[derive(Default)]
pub(super) struct Kept {
    pinned: HashSet<u64>,
    known: bool,
    below: u64,
    refuses: bool,
    requests: u64,
}

impl Kept {
    /// All below a number are gone, but for what is pinned.
    pub(super) fn reclaimed(&self, version: u64) -> bool {
        version < self.below && !self.pinned.contains(&version)
    }

    pub(super) fn answer(&mut self, request: &v1::PinRequest) -> v1::PinReply {
        let change = PinChange::from_message(request).unwrap();
        self.requests += 1;
        let fresh = !std::mem::replace(&mut self.known, true);
        change.remove.iter().for_each(|version| _ = self.pinned.remove(version));
        let (gone, kept): (Vec<u64>, Vec<u64>) = change.add.iter().partition(|version| self.reclaimed(**version));
        let refused = if self.refuses { kept } else { Vec::new() };
        self.pinned.extend(change.add.iter().filter(|version| !gone.contains(version) && !refused.contains(version)));
        PinAnswer { fresh, lease: Duration::from_secs(6), gone, refused }.to_message(&change)
    }
}

impl World {
    fn read_version(&mut self, object: &Arc<Object>, offset: u64, length: u32) -> u64 {
        self.next += 1;
        let (id, deadline) = (self.next, self.now.after(Duration::from_secs(10)));
        let current = vec![object.descriptor.version];
        self.asked.insert(id, Asked { object: object.clone(), offset, length, deadline, current });
        self.core.read(self.now, id, object, 9, offset, length, Freshness::Version, deadline);
        self.act();
        id
    }

    /// Calls that were told yes.
    fn held(&self) -> Vec<u64> {
        self.calls.iter().filter(|(_, result)| result.is_ok()).map(|(call, _)| *call).collect()
    }

    fn pin(&mut self, object: &Arc<Object>) -> u64 {
        self.next += 1;
        let id = self.next;
        self.core.pin(self.now, id, object, self.now.after(Duration::from_secs(5)));
        self.act();
        id
    }
}

#[test]
fn i3_a_read_of_a_version_is_answered_without_a_check_though_it_is_superseded() {
    let mut world = World::new(1, 2, 8 << 20);
    let old = world.object.clone();
    world.read_version(&old, 0, 60_000);
    world.answer_all();
    world.publish();
    // The cache, other pages, and beside a checked read of the same pages that fails.
    let (frames, warm) = (world.core.counts().check_frames, world.core.counts().reads_warm);
    world.read_version(&old, 0, 60_000);
    assert_eq!((world.answered[0], world.core.counts().reads_warm), (2, warm + 1), "at once, out of the cache");
    world.read(1, 120_000, 4096);
    world.read_version(&old, 120_000, 4096);
    world.answer_all();
    assert!(old.is_stale() && !old.is_gone());
    world.read_version(&old, 180_000, 9000);
    world.answer_all();
    assert_eq!((world.answered, world.core.counts().check_frames), ([4, 1, 1], frames));
    assert_eq!(world.core.counts().reads_unchecked, 4);
    // Reclaimed: ESTALE, never EIO; the fetch is not sent again.
    world.kept.below = 2001;
    world.read_version(&old, 60_000, 9000);
    world.answer_all();
    assert_eq!((world.answered, old.is_gone()), ([4, 2, 2], true));
    world.read_version(&old, 70_000, 9000);
    assert_eq!((world.answered[2], world.posted.len()), (3, 0));
    world.quiesce();
}

#[test]
fn a_pin_is_answered_once_the_server_keeps_the_version_and_renewed_by_the_timer() {
    let mut world = World::new(2, 2, 8 << 20);
    let old = world.object.clone();
    let call = world.pin(&old);
    assert!(world.calls.is_empty());
    world.answer_all();
    assert_eq!(world.held(), [call]);
    let again = world.pin(&old);
    assert_eq!(world.held(), [call, again], "held already");
    world.publish();
    world.kept.below = 2001;
    world.read_version(&old, 0, 4096);
    world.answer_all();
    assert_eq!(world.answered[0], 1);
    let second = Duration::from_secs(1);
    assert_eq!((world.core.rest(world.now, second), world.kept.requests), (Some(second), 1));
    world.now = world.now.after(Duration::from_millis(1500));
    assert_eq!(world.core.rest(world.now, second), Some(Duration::from_millis(500)), "a third of the lease");
    world.pass(Duration::from_millis(500));
    world.answer_all();
    assert_eq!(world.kept.requests, 2);
    world.core.unpin(world.now, 2000);
    world.act();
    assert_eq!((world.posted.len(), world.kept.pinned.len()), (0, 1), "one user is left");
    world.core.unpin(world.now, 2000);
    world.act();
    world.answer_all();
    assert!(world.kept.pinned.is_empty() && world.core.pin_counts() == Default::default());
    world.quiesce();
}

#[test]
fn a_pin_that_nobody_needs_any_more_is_not_found_overdue() {
    let mut world = World::new(3, 1, 8 << 20);
    let old = world.object.clone();
    let call = world.pin(&old);
    world.core.unpin(world.now, 2000);
    world.act();
    assert_eq!(world.held(), [call], "whoever asked is told at once");
    world.answer_all();
    world.pass(Duration::from_secs(20));
    assert_eq!(world.held(), [call], "and not once more");
    world.quiesce();
}

#[test]
fn a_pin_outlives_rails_and_a_restart_of_the_server() {
    let mut world = World::new(3, 2, 8 << 20);
    let old = world.object.clone();
    let call = world.pin(&old);
    world.die(0);
    world.answer_all();
    assert_eq!(world.held(), [call], "by the other rail");
    (world.kept.known, world.kept.pinned) = (false, HashSet::new());
    world.restart();
    world.pass(Duration::from_millis(10));
    world.answer_all();
    assert_eq!(world.kept.pinned, HashSet::from([2000]), "pinned again at once");
    world.quiesce();
}

#[test]
fn a_pin_that_is_not_kept_says_why() {
    let mut world = World::new(4, 1, 8 << 20);
    let old = world.object.clone();
    world.kept.refuses = true;
    world.pin(&old);
    world.answer_all();
    let said = world.calls.pop().unwrap().1.unwrap_err();
    assert!(matches!(&said, Error::OverBudget { .. }) && said.to_string().contains("retention.max_pins"), "{said}");
    world.kept.refuses = false;
    world.kept.below = 2001;
    world.pin(&old);
    world.answer_all();
    assert!(matches!(world.calls.pop(), Some((_, Err(Error::Stale { version: 2000, .. })))));
    assert_eq!(world.core.pin_counts().lost, 2);
    // A server that knows no pins, and one that says nothing.
    let scope = v1::Scope { store: Bytes::from_static(&[9; 16]), node: "n".into(), incarnation: 1 };
    world.core.session(Session { scope: scope.clone(), max_fetch: 1 << 20, pins: false, lease: LEASE });
    let other = Arc::new(object(2002, 3, 1));
    world.pin(&other);
    assert!(matches!(world.calls.pop(), Some((_, Err(Error::Protocol(_))))));
    world.core.session(Session { scope, max_fetch: 1 << 20, pins: true, lease: LEASE });
    world.pin(&Arc::new(object(2003, 3, 1)));
    world.pass(Duration::from_secs(5));
    assert!(matches!(world.calls.pop(), Some((_, Err(Error::TimedOut { .. })))));
    (2000..2004).for_each(|version| (0..2).for_each(|_| world.core.unpin(world.now, version)));
    world.act();
    world.quiesce();
}
