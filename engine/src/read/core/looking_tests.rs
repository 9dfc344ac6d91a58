//! Checks by READ of the slot, in the world of [`super`]: cards that answer without their server.

use super::*;
use crate::rail::{Look, Slots};
use crate::read::lease::CheckWay;
use railfs_proto::slot::Slot;

impl World {
    /// The rail's server has its slots READ.
    pub(super) fn slots_up(&mut self, rail: usize) {
        let slots = Slots { incarnation: self.incarnation, count: 1 };
        self.core.rail_event(self.now, rail, Event::Slots(Some(slots)));
        self.act();
    }

    /// The card serves a look now; the words arrive later.
    pub(super) fn serve_look(&mut self, at: usize) {
        let Look { id, incarnation, slots, .. } = self.looks[at].1.clone();
        let truth = match self.orphan {
            Some((orphan, slot)) if orphan == incarnation => word(slot, orphan),
            // Another run's keys are void: what lies there now is nobody's word.
            _ if incarnation != self.incarnation => 0x5555_0000_0000_0000,
            _ => word(self.slot, incarnation),
        };
        let states = [
            truth,
            // Torn, and with a publish of some name of the slot under way.
            truth ^ 0xff,
            Slot { in_progress: 1, ..Slot::decode(truth, incarnation).unwrap_or(Slot::START) }.encode(incarnation),
        ];
        let pick = |dice: &mut Dice| if dice.roll(6) == 0 { states[dice.roll(3) as usize] } else { truth };
        let words = slots.iter().map(|_| pick(&mut self.dice)).collect();
        self.words.entry(id).or_insert(words);
    }

    pub(super) fn answer_look(&mut self, at: usize) {
        self.serve_look(at);
        let (rail, look) = self.looks.swap_remove(at);
        let words = self.words.remove(&look.id).unwrap();
        if let Some((orphan, slot)) = self.orphan
            && look.incarnation == orphan
            && words.contains(&word(slot, orphan))
            && self.version > self.object.descriptor.version
        {
            self.tempting += 1;
        }
        self.core.rail_event(self.now, rail, Event::Looked { id: look.id, words });
        self.act();
    }

    pub(super) fn lose_look(&mut self, at: usize, cause: Cause) {
        let (rail, look) = self.looks.swap_remove(at);
        self.core.rail_event(self.now, rail, Event::Failed { id: look.id, cause, hand: Hand::None });
        self.act();
    }

    /// The server's software says nothing any more, its card goes on; a successor is there.
    fn take_over(&mut self) {
        self.orphan = Some((self.incarnation, self.slot));
        self.incarnation += 1;
        self.slot += 1000;
    }

    /// The client hears of it.
    fn hear_of_successor(&mut self) {
        let scope = v1::Scope { store: Bytes::from_static(&[9; 16]), node: "n".into(), incarnation: self.incarnation };
        self.core.session(Session { scope, max_fetch: 1 << 20, pins: true, lease: LEASE });
        self.act();
    }
}

/// A world whose one page is cached, and whose lease is held.
fn warm(seed: u64, rails: usize) -> World {
    let mut world = World::new(seed, rails, 8 << 20);
    for rail in 0..rails {
        world.slots_up(rail);
    }
    world.read(1, 0, 4096);
    world.answer_all();
    assert_eq!(world.answered[0], 1);
    world
}

#[test]
fn i3_checks_by_read_send_no_check_frame_and_few_renewals() {
    let mut world = warm(1, 1);
    world.core.check_way(CheckWay::Read);
    let before = world.core.counts();
    let mut frames = 0;
    for _ in 0..5000 {
        world.read(1, 0, 4096);
        assert_eq!(world.looks.len(), 1, "one READ");
        let id = world.looks[0].1.id;
        world.words.insert(id, vec![word(world.slot, 1)]);
        world.answer_look(0);
        frames += world.posted.len();
        world.answer_all();
        world.pass(Duration::from_millis(1));
    }
    let after = world.core.counts();
    assert_eq!((after.check_reads - before.check_reads, after.check_frames), (5000, before.check_frames));
    assert_eq!(world.answered[0], 5001);
    let renewals = (after.lease_renewals - before.lease_renewals) as usize;
    assert_eq!(renewals, frames, "nothing else is sent");
    assert!((6..=8).contains(&renewals), "{renewals} in 5 s of a lease of 2 s");
    world.quiesce();
}

#[test]
fn i3_a_read_never_joins_a_look_already_posted() {
    let mut world = warm(1, 1);
    world.core.check_way(CheckWay::Read);
    world.read(1, 0, 4096);
    world.serve_look(0);
    let id = world.looks[0].1.id;
    world.words.insert(id, vec![word(world.slot, 1)]);
    world.read(1, 0, 4096);
    assert_eq!(world.looks.len(), 1, "the second one gathers");
    world.publish();
    world.answer_look(0);
    assert_eq!(world.answered[0], 2, "only the first is answered by what was READ before");
    world.answer_all();
    assert_eq!(world.answered, [2, 1, 1]);
    world.quiesce();
}

#[test]
fn i3_a_word_that_leaves_it_open_is_read_again_and_then_asked_by_frame() {
    let mut world = warm(1, 1);
    world.core.check_way(CheckWay::Read);
    for open in [Slot { in_progress: 1, counter: 1 }.encode(1), word(1, 1) ^ 4, word(1, 2)] {
        world.read(1, 0, 4096);
        for _ in 0..3 {
            let id = world.looks[0].1.id;
            world.words.insert(id, vec![open]);
            world.answer_look(0);
        }
        assert_eq!((world.looks.len(), world.posted.len()), (0, 1), "a frame asks");
        world.answer_all();
    }
    assert_eq!((world.answered[0], world.core.counts().check_frames), (4, 3));
    // A word that has moved on is looked up at once, and an old version is told from the current one by that.
    world.read(1, 0, 4096);
    world.publish();
    let id = world.looks[0].1.id;
    world.words.insert(id, vec![word(world.slot, 1)]);
    world.answer_look(0);
    assert_eq!((world.looks.len(), world.posted.len(), world.core.counts().rechecks), (0, 1, 1));
    world.answer_all();
    assert_eq!(world.answered[1], 1);
    world.quiesce();
}

#[test]
fn i10_a_look_that_fails_is_asked_by_frame_and_the_rail_not_read_through_for_a_while() {
    let mut world = warm(1, 1);
    world.core.check_way(CheckWay::Read);
    world.read(1, 0, 4096);
    world.lose_look(0, Cause::Disconnected("not accessible".into()));
    world.pass(Duration::from_millis(30));
    assert_eq!((world.looks.len(), world.posted.len()), (0, 1));
    world.answer_all();
    world.read(1, 0, 4096);
    assert_eq!((world.looks.len(), world.posted.len()), (0, 1), "by frame for a while");
    world.answer_all();
    world.pass(Duration::from_secs(11));
    world.read(1, 0, 4096);
    world.answer_all();
    world.read(1, 0, 4096);
    assert_eq!(world.looks.len(), 1);
    world.answer_all();
    assert_eq!(world.answered[0], 5);
    world.quiesce();
}

/// The lease, without which this fails: a card that answers for a server that hangs is not believed once a successor publishes.
#[test]
fn i3_a_version_published_by_the_successor_is_never_missed_by_a_check_of_the_predecessors_card() {
    let (mut by_card, mut tempting, mut stale) = (0, 0, 0);
    for told in seeds(100) {
        let seed = told.0;
        let mut world = warm(seed, 1 + (seed % 2) as usize);
        world.core.check_way(CheckWay::Read);
        let alive = world.now.after(Duration::from_millis(world.dice.roll(3000)));
        // It waits for a lease and a quarter, and a second.
        let (mut publishes, mut hears, mut heard) = (Time::NEVER, Time::NEVER, false);
        for _ in 0..1200 {
            if world.orphan.is_none() && world.now >= alive {
                world.take_over();
                publishes = world.now.after(LEASE * 5 / 4 + Duration::from_secs(1));
                hears = publishes.after(Duration::from_millis(world.dice.roll(4000)));
            }
            // Of every other seed what the card is asked for last arrives only after the publish.
            let arrives = seed % 2 == 1 || world.orphan.is_none() || world.version > 2000;
            match world.dice.roll(8) {
                0..=2 => drop(world.read(1, 0, 4096)),
                3 if !world.looks.is_empty() => world.serve_look(0),
                3..=5 if !world.looks.is_empty() && arrives => {
                    by_card += u64::from(world.orphan.is_some());
                    world.answer_look(0);
                }
                6 if !world.posted.is_empty() && (world.orphan.is_none() || heard) => world.answer(0),
                7 if world.now >= publishes && world.dice.roll(3) == 0 => world.publish(),
                _ => {
                    let time = Duration::from_millis(world.dice.roll(100));
                    world.pass(time);
                }
            }
            if world.now >= hears && !heard {
                heard = true;
                world.hear_of_successor();
            }
        }
        if !heard {
            world.hear_of_successor();
        }
        world.quiesce();
        tempting += world.tempting;
        stale += world.answered[1];
    }
    // The last: words that would have said "current" of what was superseded.
    assert!(by_card > 200 && stale > 50 && tempting > 20, "{by_card} by card, {stale} stale, {tempting} tempting");
}

#[test]
fn i1_a_read_that_waits_for_memory_after_a_bad_page_is_not_finished_by_its_own_check() {
    let mut world = World::new(1, 1, 1 << 20);
    world.read(1, 0, 4096);
    world.read(2, 0, 4096);
    let fetch = |world: &World| world.posted.iter().position(|(_, s)| s.landing.is_some()).unwrap();
    // The second one joins the fetch and has a check of its own on its way. The fetch is sent again: that is a check of both.
    let at = fetch(&world);
    world.lose(at, Cause::Disconnected("died".into()));
    world.pass(RETRY);
    let at = fetch(&world);
    assert_eq!(world.posted.len(), 2, "the fetch, and the check of the second read");
    // It brings a bad page, and there is no memory to fetch that again: somebody still looks at it.
    let held: Vec<_> = std::iter::from_fn(|| world.core.arena.allocate(4096)).collect();
    world.bad_parts = Some(Vec::new());
    world.lying = Some(0);
    while Dice(world.dice.0).roll(3) != 0 {
        world.dice.0 += 1;
    }
    world.answer(at);
    assert_eq!((world.core.counts().bad_pages, world.core.activity()[3]), (2, 2), "both wait for memory");
    world.lying = None;
    // Now the check is answered.
    world.answer(0);
    assert_eq!(world.answered, [0; 3]);
    (world.bad_parts, world.lying) = (None, None);
    drop(held);
    world.pass(RETRY);
    world.answer_all();
    assert_eq!(world.answered, [2, 0, 0]);
    world.quiesce();
}
