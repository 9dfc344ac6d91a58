//! Which superseded versions must stay, because a client has them open: a pure table, with the clock passed in.
//!
//! Guarantees: a version that is pinned by a lease which has not lapsed is never handed out for reclaim; one that was
//! handed out is never pinned again; nothing is handed out before one pin lease has passed since the start, in which the
//! clients of an earlier run pin again; leases, and pins in all and of each lease, are bounded, and what is refused keeps
//! nothing. A request that comes late, after a newer one of its lease, changes nothing; one that is repeated is answered alike.

use railfs_engine::clock::Time;
use railfs_proto::pin::{PinAnswer, PinChange};
use std::collections::{HashMap, HashSet};
use std::time::Duration;

/// Most leases at a time.
pub const MAX_LEASES: usize = 4096;

/// How much may be pinned, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How long pins last without a renewal.
    pub lease: Duration,
    /// Pins of all leases together; one lease may have half of them.
    pub pins: usize,
}

#[derive(Debug)]
struct Lease {
    /// Of the request that made it: repeated, it is told again that the lease is new.
    created: u64,
    sequence: u64,
    lapses: Time,
    versions: HashSet<u64>,
}

/// What there is now, and what was lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Leases.
    pub leases: u64,
    /// Pins: a version that two leases pin counts twice.
    pub pins: u64,
    /// Pins that were refused, since the start.
    pub refused: u64,
    /// Pins whose lease lapsed, since the start.
    pub lapsed: u64,
}

/// What a request did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Applied {
    /// It came after a newer one of its lease: nothing.
    Late,
    /// This.
    Done(PinAnswer),
}

/// The table of one incarnation.
#[derive(Debug)]
pub struct Pins {
    limits: Limits,
    not_before: Time,
    leases: HashMap<u64, Lease>,
    /// How many leases pin a version.
    versions: HashMap<u64, u32>,
    total: usize,
    /// Handed out for reclaim: their files may be gone.
    going: HashSet<u64>,
    refused: u64,
    lapsed: u64,
}

impl Pins {
    /// At a start. `predecessor`: there was an earlier run, whose clients may have pins.
    pub fn new(limits: Limits, now: Time, predecessor: bool) -> Pins {
        Pins {
            limits,
            not_before: if predecessor { now.after(limits.lease) } else { now },
            leases: HashMap::new(),
            versions: HashMap::new(),
            total: 0,
            going: HashSet::new(),
            refused: 0,
            lapsed: 0,
        }
    }

    /// Carries a request out. What it pins that was reclaimed before the start the table cannot know: the caller asks the
    /// catalog afterwards, and says [`Pins::never_was`].
    pub fn apply(&mut self, now: Time, change: &PinChange) -> Applied {
        self.expire(now);
        let known = self.leases.contains_key(&change.lease);
        let mut answer = PinAnswer { fresh: !known, lease: self.limits.lease, gone: Vec::new(), refused: Vec::new() };
        if !known {
            if change.add.is_empty() {
                return Applied::Done(answer);
            }
            if self.leases.len() >= MAX_LEASES {
                answer.refused.clone_from(&change.add);
                self.refused += answer.refused.len() as u64;
                return Applied::Done(answer);
            }
        }
        let lapses = now.after(self.limits.lease);
        let lease = self.leases.entry(change.lease).or_insert_with(|| Lease {
            created: change.sequence,
            sequence: change.sequence,
            lapses,
            versions: HashSet::new(),
        });
        if change.sequence < lease.sequence {
            return Applied::Late;
        }
        answer.fresh = change.sequence == lease.created;
        lease.sequence = change.sequence;
        lease.lapses = lapses;
        for version in &change.remove {
            if lease.versions.remove(version) {
                self.total -= 1;
                unpin(&mut self.versions, *version);
            }
        }
        for &version in &change.add {
            if lease.versions.contains(&version) {
                continue;
            }
            if self.going.contains(&version) {
                answer.gone.push(version);
            } else if self.total >= self.limits.pins || lease.versions.len() >= self.limits.pins.div_ceil(2) {
                answer.refused.push(version);
            } else {
                lease.versions.insert(version);
                self.total += 1;
                *self.versions.entry(version).or_default() += 1;
            }
        }
        self.refused += answer.refused.len() as u64;
        self.drop_if_empty(change.lease);
        Applied::Done(answer)
    }

    /// A version that was just pinned turned out to be unknown to the catalog.
    pub fn never_was(&mut self, lease: u64, version: u64) {
        if let Some(entry) = self.leases.get_mut(&lease)
            && entry.versions.remove(&version)
        {
            self.total -= 1;
            unpin(&mut self.versions, version);
        }
        self.drop_if_empty(lease);
    }

    fn drop_if_empty(&mut self, lease: u64) {
        if self.leases.get(&lease).is_some_and(|lease| lease.versions.is_empty()) {
            self.leases.remove(&lease);
        }
    }

    /// Of these, what may be reclaimed now: from here on they cannot be pinned. [`Pins::gone`] ends it.
    pub fn hand_out(&mut self, now: Time, due: &[u64]) -> Vec<u64> {
        self.expire(now);
        if now < self.not_before {
            return Vec::new();
        }
        let free: Vec<u64> = due.iter().copied().filter(|version| !self.versions.contains_key(version)).collect();
        self.going.extend(&free);
        free
    }

    /// The catalog knows these no more, or they stay after all.
    pub fn gone(&mut self, versions: &[u64]) {
        for version in versions {
            self.going.remove(version);
        }
    }

    /// How long nothing is handed out yet.
    pub fn wait(&self, now: Time) -> Option<Duration> {
        (now < self.not_before).then(|| self.not_before.since(now))
    }

    /// Releases what lapsed. Returns how many pins.
    pub fn expire(&mut self, now: Time) -> u64 {
        let lapsed: Vec<u64> = self.leases.iter().filter(|(_, lease)| lease.lapses <= now).map(|(id, _)| *id).collect();
        let mut pins = 0;
        for id in lapsed {
            let Some(lease) = self.leases.remove(&id) else { continue };
            pins += lease.versions.len();
            for version in lease.versions {
                unpin(&mut self.versions, version);
            }
        }
        self.total -= pins;
        self.lapsed += pins as u64;
        pins as u64
    }

    /// See [`Counts`].
    pub fn counts(&self) -> Counts {
        Counts { leases: self.leases.len() as u64, pins: self.total as u64, refused: self.refused, lapsed: self.lapsed }
    }
}

fn unpin(versions: &mut HashMap<u64, u32>, version: u64) {
    if let Some(count) = versions.get_mut(&version) {
        *count -= 1;
        if *count == 0 {
            versions.remove(&version);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LEASE: Duration = Duration::from_secs(10);

    fn at(seconds: u64) -> Time {
        Time::default().after(Duration::from_secs(seconds))
    }

    fn pins(most: usize) -> Pins {
        Pins::new(Limits { lease: LEASE, pins: most }, at(0), false)
    }

    fn change(lease: u64, sequence: u64, add: &[u64], remove: &[u64]) -> PinChange {
        PinChange { lease, sequence, add: add.to_vec(), remove: remove.to_vec() }
    }

    fn done(applied: Applied) -> PinAnswer {
        match applied {
            Applied::Done(answer) => answer,
            Applied::Late => panic!("late"),
        }
    }

    #[test]
    fn i8_what_is_pinned_is_not_reclaimed_and_what_goes_is_not_pinned() {
        let mut pins = pins(100);
        let answer = done(pins.apply(at(0), &change(7, 1, &[2000, 2001], &[])));
        assert!(answer.fresh && answer.gone.is_empty() && answer.refused.is_empty());
        assert_eq!(done(pins.apply(at(1), &change(8, 1, &[2000], &[]))).gone, []);
        assert_eq!(pins.hand_out(at(1), &[2000, 2001, 2002]), [2002]);
        assert_eq!(done(pins.apply(at(2), &change(8, 2, &[2002], &[]))).gone, [2002]);
        pins.gone(&[2002]);
        // Two leases pin it: it stays until the second lets go.
        assert!(!done(pins.apply(at(3), &change(7, 2, &[], &[2000, 2001]))).fresh);
        assert_eq!(pins.hand_out(at(3), &[2000, 2001]), [2001]);
        done(pins.apply(at(4), &change(8, 3, &[], &[2000, 2500])));
        assert_eq!(pins.hand_out(at(4), &[2000]), [2000]);
        assert_eq!(pins.counts(), Counts::default(), "an empty lease leaves nothing");
    }

    #[test]
    fn i8_a_lease_that_lapses_releases_and_a_renewal_keeps() {
        let mut pins = pins(100);
        done(pins.apply(at(0), &change(7, 1, &[2000], &[])));
        done(pins.apply(at(0), &change(8, 1, &[2001], &[])));
        assert!(!done(pins.apply(at(9), &change(7, 2, &[], &[]))).fresh);
        assert_eq!(pins.hand_out(at(10), &[2000, 2001]), [2001]);
        assert_eq!(pins.counts(), Counts { leases: 1, pins: 1, refused: 0, lapsed: 1 });
        assert!(done(pins.apply(at(19), &change(7, 3, &[], &[]))).fresh, "it lapsed: everything has to be added again");
        assert_eq!(pins.hand_out(at(19), &[2000]), [2000]);
        assert!(done(pins.apply(at(20), &change(7, 4, &[2000], &[]))).gone == [2000]);
    }

    #[test]
    fn i8_after_a_start_nothing_goes_for_one_lease() {
        let mut pins = Pins::new(Limits { lease: LEASE, pins: 100 }, at(100), true);
        assert_eq!((pins.hand_out(at(109), &[2000, 2001]), pins.wait(at(109))), (vec![], Some(Duration::from_secs(1))));
        assert!(done(pins.apply(at(109), &change(7, 55, &[2000], &[]))).fresh);
        assert_eq!((pins.hand_out(at(110), &[2000, 2001]), pins.wait(at(110))), (vec![2001], None));
        let mut first = Pins::new(Limits { lease: LEASE, pins: 100 }, at(100), false);
        assert_eq!(first.hand_out(at(100), &[2000]), [2000], "nobody can have pinned in a first run's predecessor");
    }

    #[test]
    fn i6_pins_and_leases_are_bounded_and_what_is_refused_keeps_nothing() {
        let mut pins = pins(6);
        let answer = done(pins.apply(at(0), &change(7, 1, &[2000, 2001, 2002, 2003], &[])));
        assert_eq!(answer.refused, [2003], "one lease has half");
        assert_eq!(done(pins.apply(at(0), &change(8, 1, &[2000, 2001, 2002], &[]))).refused, []);
        assert_eq!(done(pins.apply(at(0), &change(9, 1, &[2000], &[]))).refused, [2000], "all together are full");
        assert_eq!(pins.counts(), Counts { leases: 2, pins: 6, refused: 2, lapsed: 0 });
        assert_eq!(done(pins.apply(at(0), &change(7, 2, &[2003], &[2000]))).refused, [], "what goes makes room");
        let mut pins = super::Pins::new(Limits { lease: LEASE, pins: 1 << 20 }, at(0), false);
        for lease in 1..=MAX_LEASES as u64 {
            done(pins.apply(at(0), &change(lease, 1, &[2000], &[])));
        }
        assert_eq!(done(pins.apply(at(0), &change(1 << 40, 1, &[2000], &[]))).refused, [2000]);
        assert_eq!(pins.counts().leases, MAX_LEASES as u64);
    }

    #[test]
    fn a_late_request_changes_nothing() {
        let mut pins = pins(100);
        done(pins.apply(at(0), &change(7, 2, &[2000], &[])));
        assert_eq!(pins.apply(at(1), &change(7, 1, &[2001], &[2000])), Applied::Late);
        assert!(done(pins.apply(at(1), &change(7, 2, &[2000], &[]))).fresh, "the first answer may have been lost");
        assert!(!done(pins.apply(at(1), &change(7, 3, &[], &[]))).fresh);
        assert_eq!(pins.hand_out(at(1), &[2000, 2001]), [2001]);
        pins.never_was(7, 2000);
        pins.never_was(7, 2000);
        assert_eq!(pins.counts(), Counts::default());
    }

    proptest! {
        /// Against the plain meaning: who pins what, until when.
        #[test]
        fn i8_any_history_agrees_with_a_plain_model(
            steps in proptest::collection::vec((0u8..4, 1u64..4, 2000u64..2006, 0u64..6), 1..80)
        ) {
            let mut pins = pins(1000);
            let mut model: HashMap<u64, (u64, HashSet<u64>)> = HashMap::new();
            let mut going: HashSet<u64> = HashSet::new();
            let (mut now, mut sequence) = (0, 0);
            for (what, lease, version, passes) in steps {
                now += passes;
                sequence += 1;
                model.retain(|_, (until, _)| *until > now);
                match what {
                    0 | 1 => {
                        let (add, remove) = if what == 0 { (vec![version], vec![]) } else { (vec![], vec![version]) };
                        let answer = done(pins.apply(at(now), &change(lease, sequence, &add, &remove)));
                        prop_assert_eq!(answer.fresh, !model.contains_key(&lease));
                        prop_assert_eq!(answer.gone.contains(&version), what == 0 && going.contains(&version));
                        if what == 0 && !going.contains(&version) {
                            model.entry(lease).or_default().1.insert(version);
                        }
                        if let Some(entry) = model.get_mut(&lease) {
                            entry.0 = now + LEASE.as_secs();
                            if what == 1 {
                                entry.1.remove(&version);
                            }
                        }
                        model.retain(|_, (_, versions)| !versions.is_empty());
                    }
                    2 => {
                        let pinned = model.values().any(|(_, versions)| versions.contains(&version));
                        let free = pins.hand_out(at(now), &[version]);
                        prop_assert_eq!(free.is_empty(), pinned);
                        going.extend(free);
                    }
                    _ => {
                        pins.expire(at(now));
                    }
                }
                let all: usize = model.values().map(|(_, versions)| versions.len()).sum();
                if what != 2 || !going.is_empty() {
                    pins.expire(at(now));
                }
                prop_assert_eq!(pins.counts().pins, all as u64);
            }
        }
    }
}
