//! Which pull of which put goes next, and by which rail: a pure state machine with the clock passed in.
//!
//! Guarantees (I6): never more landing memory than there is (the caller's allocator says), at most [`PER_RAIL`] pulls of
//! one put on one rail; puts take turns, and one that waits for memory keeps its place at the front; a put without
//! progress for [`PUT_IDLE`] is given back to be aborted.

use super::plan::{After, Plan, Pull, RailLoad};
use railfs_engine::clock::Time;
use railfs_proto::layout::Striping;
use railfs_proto::limits::PUT_IDLE;
use std::collections::{HashMap, VecDeque};

/// Most pulls of one put on one rail.
pub const PER_RAIL: usize = 4;

/// Most pulls of all puts on one rail: below what a connection takes, so that none is refused.
pub const MAX_LOAD: usize = 64;

/// A pull that is to be sent now.
#[derive(Debug, PartialEq, Eq)]
pub struct Send<M> {
    /// Of this put.
    pub put: u64,
    /// What.
    pub pull: Pull,
    /// On this connection.
    pub rail: u64,
    /// Where it lands.
    pub memory: M,
}

#[derive(Debug)]
struct Entry {
    session: u64,
    plan: Plan,
    on_rail: HashMap<u64, usize>,
    progress: Time,
    ready: bool,
    /// Every byte is there and the commit has begun: it ends by itself.
    committing: bool,
}

/// All puts of the server.
#[derive(Debug, Default)]
pub struct Schedule {
    puts: HashMap<u64, Entry>,
    ready: VecDeque<u64>,
    load: HashMap<u64, usize>,
    /// Puts that found every rail full of other puts' pulls.
    crowded: Vec<u64>,
}

impl Schedule {
    /// A put begins.
    pub fn begin(&mut self, put: u64, session: u64, striping: Striping, now: Time) {
        let plan = Plan::new(striping);
        let entry = Entry { session, plan, on_rail: HashMap::new(), progress: now, ready: false, committing: false };
        self.puts.insert(put, entry);
        self.wake(put);
    }

    /// A put is over, however it ended. Pulls that are still out are forgotten; [`Schedule::returned`] frees their rail.
    pub fn end(&mut self, put: u64) {
        self.puts.remove(&put);
    }

    /// Whether the put is known, and all its bytes are there.
    pub fn is_complete(&self, put: u64) -> Option<bool> {
        self.puts.get(&put).map(|entry| entry.plan.is_complete())
    }

    /// From here on the put is not given back as idle.
    pub fn committing(&mut self, put: u64) {
        if let Some(entry) = self.puts.get_mut(&put) {
            entry.committing = true;
        }
    }

    /// How many puts there are.
    pub fn len(&self) -> usize {
        self.puts.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.puts.is_empty()
    }

    /// Puts of a session.
    pub fn of_session(&self, session: u64) -> Vec<u64> {
        self.puts.iter().filter(|(_, entry)| entry.session == session).map(|(put, _)| *put).collect()
    }

    /// The session's rails changed.
    pub fn rails_changed(&mut self, session: u64) {
        for put in self.of_session(session) {
            self.wake(put);
        }
    }

    fn wake(&mut self, put: u64) {
        if let Some(entry) = self.puts.get_mut(&put)
            && !entry.ready
        {
            entry.ready = true;
            self.ready.push_back(put);
        }
    }

    /// The next pull to be sent. `rails` gives the connections of a session, `memory` a place to land (or none now).
    pub fn next<M>(
        &mut self,
        mut rails: impl FnMut(u64) -> Vec<u64>,
        mut memory: impl FnMut(u32) -> Option<M>,
    ) -> Option<Send<M>> {
        while let Some(put) = self.ready.pop_front() {
            let Some(entry) = self.puts.get_mut(&put) else { continue };
            entry.ready = false;
            let Some(length) = entry.plan.peek() else { continue };
            let open = |rail: &u64| entry.on_rail.get(rail).is_none_or(|&pulls| pulls < PER_RAIL);
            let mut usable: Vec<RailLoad> = rails(entry.session)
                .into_iter()
                .filter(open)
                .map(|rail| RailLoad { rail, load: self.load.get(&rail).copied().unwrap_or(0) })
                .collect();
            let any = !usable.is_empty();
            usable.retain(|rail| rail.load < MAX_LOAD);
            if usable.is_empty() {
                if any {
                    self.crowded.push(put);
                }
                continue;
            }
            let Some(memory) = memory(length) else {
                // It keeps its place: what becomes free is its own first.
                entry.ready = true;
                self.ready.push_front(put);
                return None;
            };
            let Some((pull, rail)) = entry.plan.take(&usable) else { continue };
            *entry.on_rail.entry(rail).or_default() += 1;
            *self.load.entry(rail).or_default() += 1;
            self.wake(put);
            return Some(Send { put, pull, rail, memory });
        }
        None
    }

    /// The pull is no longer on its rail (it was answered, or failed). Comes before what became of it.
    pub fn returned(&mut self, put: u64, rail: u64) {
        decrease(&mut self.load, rail);
        for put in std::mem::take(&mut self.crowded) {
            self.wake(put);
        }
        if let Some(entry) = self.puts.get_mut(&put) {
            decrease(&mut entry.on_rail, rail);
        }
    }

    fn after(&mut self, put: u64, now: Option<Time>, step: impl FnOnce(&mut Plan) -> After) -> After {
        let Some(entry) = self.puts.get_mut(&put) else { return After::Unknown };
        let after = step(&mut entry.plan);
        if let (Some(now), false) = (now, after == After::Unknown) {
            entry.progress = now;
        }
        self.wake(put);
        after
    }

    /// A pull's bytes are verified and written.
    pub fn accepted(&mut self, put: u64, index: u64, now: Time) -> After {
        self.after(put, Some(now), |plan| plan.accepted(index))
    }

    /// The rail failed a pull.
    pub fn rail_failed(&mut self, put: u64, index: u64) -> After {
        self.after(put, None, |plan| plan.rail_failed(index))
    }

    /// A pull's bytes failed their check.
    pub fn was_bad(&mut self, put: u64, index: u64) -> After {
        self.after(put, None, |plan| plan.was_bad(index))
    }

    /// Puts that made no progress for too long.
    pub fn idle(&self, now: Time) -> Vec<u64> {
        let idle = |entry: &Entry| !entry.committing && now.since(entry.progress) > PUT_IDLE;
        self.puts.iter().filter(|(_, entry)| idle(entry)).map(|(put, _)| *put).collect()
    }
}

fn decrease(counts: &mut HashMap<u64, usize>, key: u64) {
    if let Some(count) = counts.get_mut(&key) {
        *count = count.saturating_sub(1);
        if *count == 0 {
            counts.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::Cell;
    use std::time::Duration;

    fn striping(mebibytes: u64) -> Striping {
        Striping::new(mebibytes << 20, 65536, 1 << 20, 1).unwrap()
    }

    #[test]
    fn i6_puts_take_turns_within_the_memory_there_is() {
        let mut schedule = Schedule::default();
        schedule.begin(1, 9, striping(50), Time(0));
        schedule.begin(2, 9, striping(50), Time(0));
        let free = Cell::new(5u32);
        let memory = |_| (free.get() > 0).then(|| free.set(free.get() - 1));
        let mut sent: Vec<(u64, u64)> = Vec::new();
        while let Some(send) = schedule.next(|_| vec![3, 4], memory) {
            sent.push((send.put, send.pull.index));
        }
        assert_eq!(sent, [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2)]);
        // The next in turn gets what becomes free.
        free.set(1);
        let send = schedule.next(|_| vec![3, 4], memory).unwrap();
        assert_eq!((send.put, send.pull.index), (2, 2));
        assert!(schedule.next(|_| vec![3, 4], memory).is_none());
    }

    #[test]
    fn at_most_four_pulls_of_a_put_are_on_a_rail() {
        let mut schedule = Schedule::default();
        schedule.begin(1, 9, striping(50), Time(0));
        let mut sent = Vec::new();
        while let Some(send) = schedule.next(|_| vec![3, 4], |_| Some(())) {
            sent.push(send.rail);
        }
        assert_eq!(sent, [3, 4, 3, 4, 3, 4, 3, 4]);
        schedule.returned(1, 4);
        assert_eq!(schedule.accepted(1, 1, Time(5)), After::Going);
        assert_eq!(schedule.next(|_| vec![3, 4], |_| Some(())).map(|send| (send.pull.index, send.rail)), Some((8, 4)));
        assert_eq!(schedule.next(|_| vec![3, 4], |_| Some(())), None);
    }

    #[test]
    fn a_put_waits_for_rails_and_is_given_back_when_idle() {
        let mut schedule = Schedule::default();
        schedule.begin(1, 9, striping(1), Time(0));
        assert_eq!(schedule.next(|_| vec![], |_| Some(())), None);
        assert_eq!(schedule.idle(Time(0).after(PUT_IDLE)), []);
        schedule.rails_changed(9);
        let send = schedule.next(|_| vec![7], |_| Some(())).unwrap();
        schedule.returned(1, 7);
        assert_eq!(schedule.rail_failed(1, send.pull.index), After::Going);
        let late = Time(0).after(PUT_IDLE + Duration::from_nanos(1));
        assert_eq!(schedule.idle(late), [1]);
        let send = schedule.next(|_| vec![7], |_| Some(())).unwrap();
        schedule.returned(1, 7);
        assert_eq!(schedule.accepted(1, send.pull.index, late), After::Complete);
        assert_eq!((schedule.idle(late), schedule.is_complete(1)), (vec![], Some(true)));
        schedule.committing(1);
        assert_eq!(schedule.idle(late.after(PUT_IDLE * 2)), []);
        schedule.end(1);
        assert!(schedule.is_empty() && schedule.load.is_empty());
        assert_eq!(schedule.accepted(1, 0, late), After::Unknown);
    }

    proptest! {
        #[test]
        fn every_put_ends_whatever_rails_do(fates in proptest::collection::vec((0u8..3, any::<u16>()), 0..300)) {
            let mut schedule = Schedule::default();
            for put in 1..4 {
                schedule.begin(put, put % 2, striping(put * 3), Time(0));
            }
            let free = Cell::new(4u32);
            let mut flying = Vec::new();
            let mut accepted = 0;
            for (fate, pick) in fates.into_iter().chain(std::iter::repeat_n((0, 0), 100)) {
                let rails = |session| vec![10 + session, 20];
                while let Some(send) = schedule.next(rails, |_| (free.get() > 0).then(|| free.set(free.get() - 1))) {
                    flying.push((send.put, send.pull.index, send.rail));
                }
                if flying.is_empty() { break; }
                let (put, index, rail) = flying.swap_remove(pick as usize % flying.len());
                schedule.returned(put, rail);
                free.set(free.get() + 1);
                let after = if fate == 1 { schedule.rail_failed(put, index) } else { accepted += 1; schedule.accepted(put, index, Time(1)) };
                prop_assert_ne!(after, After::Unknown);
                prop_assert!(flying.len() <= 4);
            }
            prop_assert_eq!(accepted, 3 + 6 + 9);
            prop_assert!((1..4).all(|put| schedule.is_complete(put) == Some(true)));
        }
    }
}
