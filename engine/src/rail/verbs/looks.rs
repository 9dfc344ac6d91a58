//! READs of a server's version slots, on the queue pair for small messages.
//!
//! Guarantees:
//! * A look gets exactly one answer: its words, when every READ of it was completed with success, or a failure, by its deadline.
//! * The place that a READ lands in belongs to that READ until its completion was polled (I4), whether or not anybody still waits
//!   for it; with the queue pair it goes when that is destroyed.
//! * No address is made up: a READ lies inside what the server announced, of the run that was asked for.

use super::link::{Shared, State, Told};
use crate::clock::Time;
use crate::rail::{Cause, Event, Hand, Look, MAX_LOOK};
use crate::verbs::{Slice, Work, WrId, WrKind};
use railfs_proto::verbs::SlotArray;
use std::collections::BTreeMap;

/// READs under way on one connection.
pub(super) const PLACES: u16 = 2 * MAX_LOOK as u16;
/// Each word has a cache line of its own.
const SPACING: usize = 64;
/// Bytes that they land in, after those of the messages.
pub(super) const BYTES: usize = PLACES as usize * SPACING;

/// A look that somebody waits for.
struct UnderWay {
    deadline: Time,
    /// As they came.
    words: Vec<Option<u64>>,
}

/// See the module.
pub(super) struct Looks {
    slots: SlotArray,
    /// Where the places begin.
    base: usize,
    free: Vec<u16>,
    /// Whose word lands in a place, and which one; `None`: nobody waits for it any more.
    at: BTreeMap<u16, Option<(u64, usize)>>,
    under_way: BTreeMap<u64, UnderWay>,
}

impl Looks {
    /// Of these slots, landing from `base` on.
    pub(super) fn new(slots: SlotArray, base: usize) -> Looks {
        Looks { slots, base, free: (0..PLACES).rev().collect(), at: BTreeMap::new(), under_way: BTreeMap::new() }
    }

    /// Where a place lies.
    pub(super) fn place(&self, slot: u16) -> usize {
        self.base + usize::from(slot) * SPACING
    }

    pub(super) fn contains(&self, id: u64) -> bool {
        self.under_way.contains_key(&id)
    }

    /// When the first of them ends at the latest.
    pub(super) fn next(&self) -> Time {
        self.under_way.values().map(|look| look.deadline).min().unwrap_or(Time::NEVER)
    }

    /// What one READ needs: place, address.
    fn plan(&self, look: &Look) -> Result<Vec<(u16, u64)>, Cause> {
        let refused = |why: String| Err(Cause::Refused(why));
        if look.incarnation != self.slots.incarnation {
            let (asked, here) = (look.incarnation, self.slots.incarnation);
            return refused(format!("slots of run {asked} were asked for, here are those of {here}"));
        }
        if look.slots.is_empty() || look.slots.len() > self.free.len() || self.contains(look.id) {
            return refused(format!("{} words at once, {} more can be under way", look.slots.len(), self.free.len()));
        }
        let places = self.free.iter().rev().copied();
        let of = |(place, slot): (u16, &u32)| match self.slots.place(*slot) {
            Some(address) => Ok((place, address)),
            None => Err(Cause::Refused(format!("slot {slot} of {}", self.slots.count))),
        };
        places.zip(&look.slots).map(of).collect()
    }

    /// A READ was completed with this word.
    fn landed(&mut self, place: u16, word: u64, told: &mut Told) {
        let Some(owner) = self.at.remove(&place) else { return };
        self.free.push(place);
        let Some((id, index)) = owner else {
            told.stale += 1;
            return;
        };
        let Some(look) = self.under_way.get_mut(&id) else { return };
        if let Some(slot) = look.words.get_mut(index) {
            *slot = Some(word);
        }
        if look.words.iter().all(Option::is_some) {
            let words = look.words.iter().copied().flatten().collect();
            self.under_way.remove(&id);
            told.events.push(Event::Looked { id, words });
        }
    }

    /// Nobody waits for it any more; its places stay taken until their READs are completed.
    pub(super) fn fail(&mut self, id: u64, cause: Cause, told: &mut Told) {
        if self.under_way.remove(&id).is_none() {
            return;
        }
        for owner in self.at.values_mut() {
            owner.take_if(|(of, _)| *of == id);
        }
        told.failed += 1;
        told.events.push(Event::Failed { id, cause, hand: Hand::None });
    }

    pub(super) fn expire(&mut self, now: Time, told: &mut Told) {
        let over = |(id, look): (&u64, &UnderWay)| (look.deadline <= now).then_some(*id);
        while let Some(id) = self.under_way.iter().find_map(over) {
            self.fail(id, Cause::Expired, told);
        }
    }

    /// The connection is over.
    pub(super) fn end(&mut self, why: &str, told: &mut Told) {
        while let Some(id) = self.under_way.keys().next().copied() {
            self.fail(id, Cause::Disconnected(why.to_owned()), told);
        }
    }
}

impl State {
    /// Posts the READs of a look, or gives its reason. `Ok(Err(why))`: posting failed, which ends the connection; the look is
    /// under way and fails with it.
    pub(super) fn look(&mut self, look: &Look, shared: &Shared<'_>) -> Result<Result<(), String>, Cause> {
        let (Some(pair), Some(looks)) = (&mut self.pair, &mut self.looks) else { return Err(Cause::Down) };
        if look.deadline <= shared.now {
            return Err(Cause::Expired);
        }
        let plan = looks.plan(look)?;
        // Messages have theirs beside it.
        if (pair.room() as usize) < plan.len() {
            return Err(Cause::Refused("the queue pair has no room for more work".into()));
        }
        let ids: Vec<WrId> =
            plan.iter().map(|(slot, _)| shared.id(WrKind::Read, *slot, self.posted.number())).collect();
        let into = |slot: u16| -> Option<Slice> { shared.buffers.mr().slice(looks.place(slot) as u64, 8) };
        let key = looks.slots.key;
        let work = ids
            .iter()
            .zip(&plan)
            .map(|(id, (slot, address))| into(*slot).map(|into| Work::Read { id: *id, into, address: *address, key }));
        let Some(mut work) = work.collect::<Option<Vec<_>>>() else {
            return Err(Cause::Refused("a word has no room to land in".into()));
        };
        looks.under_way.insert(look.id, UnderWay { deadline: look.deadline, words: vec![None; plan.len()] });
        for (index, (slot, _)) in plan.iter().enumerate() {
            looks.free.retain(|free| free != slot);
            looks.at.insert(*slot, Some((look.id, index)));
        }
        if let Err(error) = pair.post(&mut work) {
            return Ok(Err(error.to_string()));
        }
        for id in ids {
            self.read_posted(id, shared.now);
        }
        Ok(Ok(()))
    }

    /// A READ was completed with success: its word is ours to look at.
    pub(super) fn word(&mut self, slot: u16, shared: &Shared<'_>, told: &mut Told) {
        let Some(looks) = &mut self.looks else { return };
        let bytes = shared.buffers.take(looks.place(slot), 8);
        if let Ok(bytes) = <[u8; 8]>::try_from(&bytes[..]) {
            looks.landed(slot, u64::from_le_bytes(bytes), told);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn looks() -> Looks {
        let slots = SlotArray { address: 0x1000, key: 7, count: 64, incarnation: 3, lease: Duration::from_secs(2) };
        Looks::new(slots, 0)
    }

    fn look(id: u64, slots: &[u32]) -> Look {
        Look { id, incarnation: 3, slots: slots.to_vec(), deadline: Time(100) }
    }

    fn begin(looks: &mut Looks, look: &Look) -> Vec<u16> {
        let plan = looks.plan(look).unwrap();
        looks.under_way.insert(look.id, UnderWay { deadline: look.deadline, words: vec![None; plan.len()] });
        for (index, (slot, _)) in plan.iter().enumerate() {
            looks.free.retain(|free| free != slot);
            looks.at.insert(*slot, Some((look.id, index)));
        }
        plan.into_iter().map(|(slot, _)| slot).collect()
    }

    #[test]
    fn i7_a_read_lies_inside_what_was_announced_and_of_the_run_that_is_meant() {
        let looks = looks();
        assert_eq!(
            looks.plan(&look(1, &[0, 63])).unwrap().iter().map(|(_, at)| *at).collect::<Vec<_>>(),
            [0x1000, 0x11f8]
        );
        assert!(looks.plan(&look(1, &[64])).is_err() && looks.plan(&look(1, &[])).is_err());
        assert!(looks.plan(&Look { incarnation: 4, ..look(1, &[0]) }).is_err());
        assert!(looks.plan(&look(1, &[0; PLACES as usize + 1])).is_err());
    }

    #[test]
    fn i4_a_place_belongs_to_its_read_until_that_is_completed() {
        let mut looks = looks();
        let mut told = Told::default();
        let first = begin(&mut looks, &look(1, &[5; 16]));
        let second = begin(&mut looks, &look(2, &[6; 16]));
        assert!(looks.plan(&look(3, &[7])).is_err(), "all places are taken");
        looks.fail(1, Cause::Cancelled, &mut told);
        assert!(matches!(&told.events[..], [Event::Failed { id: 1, .. }]));
        assert!(looks.plan(&look(3, &[7])).is_err(), "its READs are still under way");
        for place in &first {
            looks.landed(*place, 11, &mut told);
        }
        assert_eq!((told.events.len(), told.stale), (1, 16), "nobody waits for them");
        let third = begin(&mut looks, &look(3, &[7]));
        assert!(first.contains(&third[0]));
        for (word, place) in (0..).zip(&second) {
            looks.landed(*place, word, &mut told);
        }
        let words: Vec<u64> = (0..16).collect();
        assert!(matches!(&told.events[1], Event::Looked { id: 2, words: came } if *came == words));
        // A completion that comes twice means nothing.
        looks.landed(second[0], 99, &mut told);
        assert_eq!(told.events.len(), 2);
        looks.expire(Time(100), &mut told);
        assert!(matches!(&told.events[2], Event::Failed { id: 3, cause: Cause::Expired, .. }));
        assert_eq!(looks.next(), Time::NEVER);
    }
}
