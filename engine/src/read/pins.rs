//! The versions that this client has pinned, and what the server has to be told of it: pure, with the clock passed in.
//!
//! Guarantees: a pin is answered as held only after the server said so; what is held is renewed three times in a lease, by
//! one message; what nobody needs any more is released with the next message. One message is on its way at a time, and each
//! says only what changed; where the server turns out not to know the lease, everything is said again.

use crate::clock::Time;
use railfs_proto::limits::MAX_PINS;
use railfs_proto::pin::{PinAnswer, PinChange};
use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

/// After how long a message that failed is followed by another.
const AGAIN: Duration = Duration::from_millis(100);

/// What is known of a pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The server was not told yet, or has not answered.
    Wanted,
    /// The server keeps it.
    Held,
    /// It was reclaimed before.
    Gone,
    /// Over the server's limits.
    Refused,
}

#[derive(Debug)]
struct Pin {
    /// Who needs it.
    users: u64,
    standing: Standing,
    /// Calls that wait for the answer.
    waiters: Vec<u64>,
}

/// What there is now, and what was lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Versions that somebody here needs.
    pub pins: u64,
    /// Of these, and of what is to be released: what the server has not answered yet.
    pub unsaid: u64,
    /// Pins that the server did not keep (reclaimed before, or over its limits).
    pub lost: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Pins {
    lease: u64,
    supported: bool,
    sequence: u64,
    pins: HashMap<u64, Pin>,
    /// To be added with the next message,
    add: BTreeSet<u64>,
    /// and to be removed.
    remove: BTreeSet<u64>,
    /// On its way, and when it was sent.
    flight: Option<(PinChange, Time)>,
    renew_at: Time,
    not_before: Time,
    lost: u64,
}

impl Pins {
    /// `lease`: drawn at random, not 0.
    pub fn new(lease: u64) -> Pins {
        Pins {
            lease,
            supported: true,
            sequence: 0,
            pins: HashMap::new(),
            add: BTreeSet::new(),
            remove: BTreeSet::new(),
            flight: None,
            renew_at: Time(0),
            not_before: Time(0),
            lost: 0,
        }
    }

    /// Another session began: whether its server knows pins. It may be another incarnation: ask at once.
    pub fn session(&mut self, supported: bool) {
        self.supported = supported;
        self.renew_at = Time(0);
    }

    /// Whether the server knows pins.
    pub fn supported(&self) -> bool {
        self.supported
    }

    /// Somebody needs the version, until [`Pins::unpin`]. `call` waits where the answer is [`Standing::Wanted`].
    pub fn pin(&mut self, version: u64, call: u64) -> Standing {
        let new = || Pin { users: 0, standing: Standing::Wanted, waiters: Vec::new() };
        let pin = self.pins.entry(version).or_insert_with(new);
        pin.users += 1;
        let first = pin.users == 1;
        if pin.standing == Standing::Refused {
            // There may be room by now.
            pin.standing = Standing::Wanted;
        }
        if pin.standing == Standing::Wanted {
            pin.waiters.push(call);
            let flying = self.flight.as_ref().is_some_and(|(change, _)| change.add.contains(&version));
            if first || !flying {
                self.remove.remove(&version);
                self.add.insert(version);
            }
        }
        pin.standing
    }

    /// One who needed it does not any more. Gives the calls that waited, and need not any more, when it was the last.
    pub fn unpin(&mut self, version: u64) -> Vec<u64> {
        let Some(pin) = self.pins.get_mut(&version) else { return Vec::new() };
        pin.users = pin.users.saturating_sub(1);
        if pin.users > 0 {
            return Vec::new();
        }
        let (standing, waiters) = (pin.standing, std::mem::take(&mut pin.waiters));
        self.pins.remove(&version);
        self.add.remove(&version);
        if matches!(standing, Standing::Wanted | Standing::Held) {
            self.remove.insert(version);
        }
        waiters
    }

    fn wants(&self) -> bool {
        self.supported && (!self.add.is_empty() || !self.remove.is_empty() || self.holds())
    }

    fn holds(&self) -> bool {
        self.pins.values().any(|pin| pin.standing == Standing::Held)
    }

    /// When there is something to say; `None`: not before something else happens.
    pub fn due(&self, now: Time) -> Option<Time> {
        if self.flight.is_some() || !self.wants() {
            return None;
        }
        let changed = !self.add.is_empty() || !self.remove.is_empty();
        Some(if changed { self.not_before.max(now) } else { self.renew_at.max(self.not_before).max(now) })
    }

    /// The message that is to be sent now.
    pub fn next(&mut self, now: Time) -> Option<PinChange> {
        if self.due(now).is_none_or(|due| due > now) {
            return None;
        }
        self.sequence += 1;
        let remove: Vec<u64> = self.remove.iter().copied().take(MAX_PINS / 2).collect();
        let add: Vec<u64> = self.add.iter().copied().take(MAX_PINS - remove.len()).collect();
        remove.iter().for_each(|version| _ = self.remove.remove(version));
        add.iter().for_each(|version| _ = self.add.remove(version));
        let change = PinChange { lease: self.lease, sequence: self.sequence, add, remove };
        self.flight = Some((change.clone(), now));
        Some(change)
    }

    /// The server answered the message on its way. Gives the calls that wait for it, with what they are told.
    pub fn answered(&mut self, answer: &PinAnswer) -> Vec<(u64, u64, Standing)> {
        let Some((change, sent)) = self.flight.take() else { return Vec::new() };
        self.renew_at = sent.after(answer.lease / 3);
        if answer.fresh {
            self.say_all();
        }
        let mut told = Vec::new();
        for version in change.add {
            let standing = if answer.gone.contains(&version) {
                Standing::Gone
            } else if answer.refused.contains(&version) {
                Standing::Refused
            } else {
                Standing::Held
            };
            // Released meanwhile: the next message says so.
            let Some(pin) = self.pins.get_mut(&version) else { continue };
            self.lost += u64::from(standing != Standing::Held);
            pin.standing = standing;
            self.add.remove(&version);
            told.extend(pin.waiters.drain(..).map(|call| (call, version, standing)));
        }
        told
    }

    fn say_all(&mut self) {
        for (&version, pin) in &mut self.pins {
            if pin.standing == Standing::Held {
                pin.standing = Standing::Wanted;
                self.add.insert(version);
            }
        }
    }

    /// The message on its way failed. Whether the server has it is not known, and neither what it would have said: that the
    /// lease was new, perhaps. Everything is said again.
    pub fn failed(&mut self, now: Time) {
        let Some((change, _)) = self.flight.take() else { return };
        self.not_before = now.after(AGAIN);
        self.say_all();
        for version in change.add {
            if self.pins.get(&version).is_some_and(|pin| pin.standing == Standing::Wanted) {
                self.add.insert(version);
            }
        }
        for version in change.remove {
            if !self.pins.contains_key(&version) {
                self.remove.insert(version);
            }
        }
    }

    /// See [`Counts`].
    pub fn counts(&self) -> Counts {
        let flying = self.flight.as_ref().map_or(0, |(change, _)| change.add.len() + change.remove.len());
        Counts {
            pins: self.pins.len() as u64,
            unsaid: (self.add.len() + self.remove.len() + flying) as u64,
            lost: self.lost,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn at(milliseconds: u64) -> Time {
        Time(0).after(Duration::from_millis(milliseconds))
    }

    fn answer(fresh: bool) -> PinAnswer {
        PinAnswer { fresh, lease: Duration::from_secs(6), gone: vec![], refused: vec![] }
    }

    #[test]
    fn a_pin_is_held_once_the_server_said_so_and_released_with_the_last_user() {
        let mut pins = Pins::new(7);
        assert_eq!(pins.next(at(0)), None, "nothing to say");
        assert_eq!(pins.pin(2000, 1), Standing::Wanted);
        assert_eq!(pins.pin(2000, 2), Standing::Wanted);
        let change = pins.next(at(1)).unwrap();
        assert_eq!(change, PinChange { lease: 7, sequence: 1, add: vec![2000], remove: vec![] });
        assert_eq!(pins.next(at(1)), None, "one at a time");
        assert_eq!(pins.answered(&answer(true)), [(1, 2000, Standing::Held), (2, 2000, Standing::Held)]);
        assert_eq!(pins.pin(2000, 3), Standing::Held);
        // Renewed three times in a lease of 6 s.
        assert_eq!((pins.due(at(2)), pins.next(at(2000))), (Some(at(2001)), None));
        assert_eq!(pins.next(at(2001)).unwrap(), PinChange { sequence: 2, add: vec![], ..change });
        pins.answered(&answer(false));
        (0..3).for_each(|_| drop(pins.unpin(2000)));
        assert_eq!(pins.next(at(2002)).unwrap().remove, [2000]);
        pins.answered(&answer(false));
        assert_eq!((pins.due(at(9000)), pins.counts()), (None, Counts::default()));
    }

    #[test]
    fn what_the_server_does_not_know_is_said_again() {
        let mut pins = Pins::new(7);
        pins.pin(2000, 1);
        pins.next(at(0));
        pins.answered(&answer(true));
        pins.session(true);
        assert_eq!(pins.next(at(5)).unwrap().add, [], "a new session: asked at once");
        assert_eq!(pins.answered(&answer(true)), []);
        assert_eq!(pins.next(at(6)).unwrap().add, [2000]);
        // It was reclaimed while nobody renewed.
        assert_eq!(pins.answered(&PinAnswer { gone: vec![2000], ..answer(true) }), []);
        assert_eq!(pins.pin(2000, 2), Standing::Gone);
        assert_eq!((pins.due(at(7)), pins.counts().lost), (None, 1));
        pins.session(false);
        pins.pin(2001, 3);
        assert!(!pins.supported() && pins.due(at(8)).is_none());
    }

    #[test]
    fn a_message_that_fails_is_followed_by_one_that_says_it_too() {
        let mut pins = Pins::new(7);
        pins.pin(2000, 1);
        pins.pin(2001, 2);
        pins.next(at(0)).unwrap();
        pins.unpin(2001);
        pins.failed(at(1));
        assert_eq!(pins.next(at(1)), None);
        let change = pins.next(at(101)).unwrap();
        assert_eq!((change.add, change.remove, change.sequence), (vec![2000], vec![2001], 2));
        // Let go and taken again while the message is on its way: said again, in order.
        pins.unpin(2000);
        assert_eq!(pins.pin(2000, 3), Standing::Wanted);
        assert_eq!(pins.answered(&answer(true)), [(3, 2000, Standing::Held)]);
        assert_eq!(pins.counts(), Counts { pins: 1, unsaid: 0, lost: 0 });
    }

    #[test]
    fn a_refused_pin_is_asked_for_again_by_the_next_who_needs_it() {
        let mut pins = Pins::new(7);
        pins.pin(2000, 1);
        pins.next(at(0));
        let refused = PinAnswer { refused: vec![2000], ..answer(false) };
        assert_eq!(pins.answered(&refused), [(1, 2000, Standing::Refused)]);
        assert_eq!(pins.pin(2000, 2), Standing::Wanted);
        assert_eq!(pins.next(at(1)).unwrap().add, [2000]);
    }

    proptest! {
        /// Against a server that applies, loses requests and answers, and forgets: once all is said, both agree.
        #[test]
        fn i8_client_and_server_agree_in_the_end(steps in proptest::collection::vec((0u8..6, 2000u64..2005), 1..120)) {
            let mut pins = Pins::new(7);
            let mut users: HashMap<u64, u64> = HashMap::new();
            let mut server: HashSet<u64> = HashSet::new();
            let mut known = false;
            let (mut now, mut flight, mut call) = (0, None::<PinChange>, 0);
            let apply = |change: &PinChange, server: &mut HashSet<u64>, known: &mut bool| {
                let fresh = !*known;
                change.remove.iter().for_each(|version| _ = server.remove(version));
                server.extend(&change.add);
                *known = !server.is_empty();
                answer(fresh)
            };
            for (what, version) in steps {
                now += 50;
                match what {
                    0 | 1 => {
                        call += 1;
                        pins.pin(version, call);
                        *users.entry(version).or_default() += 1;
                    }
                    2 => {
                        if let Some(count) = users.get_mut(&version).filter(|count| **count > 0) {
                            *count -= 1;
                            pins.unpin(version);
                        }
                    }
                    3 => {
                        if flight.is_none() {
                            flight = pins.next(at(now));
                        } else if let Some(change) = flight.take() {
                            let answer = apply(&change, &mut server, &mut known);
                            pins.answered(&answer);
                        }
                    }
                    4 => {
                        if let Some(change) = flight.take() {
                            if version % 2 == 0 {
                                apply(&change, &mut server, &mut known);
                            }
                            pins.failed(at(now));
                        }
                    }
                    _ => {
                        if version == 2000 {
                            server.clear();
                            known = false;
                            pins.session(true);
                        }
                    }
                }
            }
            if flight.take().is_some() {
                pins.failed(at(now));
            }
            for _ in 0..8 {
                now += 10_000;
                if let Some(change) = pins.next(at(now)) {
                    let answer = apply(&change, &mut server, &mut known);
                    pins.answered(&answer);
                }
            }
            let wanted: HashSet<u64> = users.iter().filter(|(_, count)| **count > 0).map(|(v, _)| *v).collect();
            prop_assert_eq!(server, wanted);
            prop_assert_eq!(pins.counts().unsaid, 0);
        }
    }
}
