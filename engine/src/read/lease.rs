//! When a slot word that was READ from a server's memory may be believed, what it says, and which way of checking is the
//! quicker one: pure.
//!
//! Guarantees:
//! * I3: a word counts only while this client holds the lease of the very incarnation that the word is of. The lease runs
//!   from when a message was *sent* that software of that incarnation has answered; what a network card answers by itself
//!   does not renew it. So a card that goes on answering for a server that is dead or hangs is not believed once a successor
//!   may publish (which waits for longer than a lease).
//! * Only equality says "current". A torn word, and one that says that a publish is under way, say nothing.
//! * Renewals are bounded by time, not by checks: one in a third of a lease at most, and none while nobody checks.

use crate::clock::Time;
use railfs_proto::slot::Slot;
use std::time::Duration;

/// How an object's version is checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CheckWay {
    /// Whichever was measured to be quicker of late; by READ until both were.
    #[default]
    Auto,
    /// By a READ of the slot where a rail can; else by frame.
    Read,
    /// By frame.
    Frame,
}

/// The right to believe what is READ from one incarnation's slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lease {
    incarnation: u64,
    term: Duration,
    /// When the last message that was answered had been sent.
    sent: Option<Time>,
    /// When a renewal was asked for last.
    asked: Option<Time>,
}

impl Lease {
    /// Whose lease it is from now on, and how long it lasts. That of another incarnation is void.
    pub fn session(&mut self, incarnation: u64, term: Duration) {
        if self.incarnation != incarnation {
            *self = Lease { incarnation, ..Lease::default() };
        }
        self.term = term;
    }

    /// Software of this incarnation has answered a message that was sent then.
    pub fn answered(&mut self, incarnation: u64, sent: Time) {
        if incarnation == self.incarnation {
            self.sent = self.sent.max(Some(sent));
        }
    }

    /// Whether a word of this incarnation that is here now may be believed.
    pub fn holds(&self, incarnation: u64, now: Time) -> bool {
        incarnation == self.incarnation && self.sent.is_some_and(|sent| now < sent.after(self.term))
    }

    /// Whether it is time to ask for a renewal; asking is noted.
    pub fn renew(&mut self, now: Time) -> bool {
        let third = self.term / 3;
        let due = |since: Option<Time>| since.is_none_or(|since| now >= since.after(third));
        let wanted = due(self.sent) && due(self.asked);
        if wanted {
            self.asked = Some(now);
        }
        wanted
    }
}

/// What a word that was READ says of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is current.
    Current,
    /// Something of this slot was published: the name has to be looked up.
    Moved,
    /// Nothing: the word is torn, or a publish is under way.
    Open,
}

/// `value`: what came with the lookup.
pub fn verdict(value: u64, word: u64, incarnation: u64) -> Verdict {
    if word == value {
        return Verdict::Current;
    }
    let Some(now) = Slot::decode(word, incarnation) else { return Verdict::Open };
    match Slot::decode(value, incarnation) {
        Some(then) if now.in_progress > 0 && now.counter == then.counter => Verdict::Open,
        _ => Verdict::Moved,
    }
}

/// Of the way that seems slower one check in so long is made, to see whether it still is.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// An answer that took longer says more of a publish than of the way.
const TELLING: Duration = Duration::from_millis(20);

/// Which way was quicker of late.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pace {
    read: Option<u64>,
    frame: Option<u64>,
    tried: Time,
}

fn average(old: Option<u64>, took: Duration) -> Option<u64> {
    if took > TELLING {
        return old;
    }
    let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
    Some(old.map_or(took, |old| (old.saturating_mul(15).saturating_add(took)) / 16))
}

impl Pace {
    /// A check by READ took so long.
    pub fn read(&mut self, took: Duration) {
        self.read = average(self.read, took);
    }
    /// A check by frame took so long.
    pub fn frame(&mut self, took: Duration) {
        self.frame = average(self.frame, took);
    }
    /// Nanoseconds of a check by READ and by frame, where measured.
    pub fn measured(&self) -> [Option<u64>; 2] {
        [self.read, self.frame]
    }
    /// Whether the next check is to be made by READ, where it can be.
    pub fn prefers_read(&mut self, way: CheckWay, now: Time) -> bool {
        match way {
            CheckWay::Read => true,
            CheckWay::Frame => false,
            CheckWay::Auto => {
                if self.read.is_none() || self.frame.is_none() || self.read <= self.frame {
                    return true;
                }
                let again = now.since(self.tried) >= LOOK_AGAIN;
                if again {
                    self.tried = now;
                }
                again
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERM: Duration = Duration::from_secs(2);

    fn at(milliseconds: u64) -> Time {
        Time(0).after(Duration::from_millis(milliseconds))
    }

    #[test]
    fn i3_a_lease_runs_from_when_the_answered_message_was_sent_and_of_one_incarnation_only() {
        let mut lease = Lease::default();
        lease.session(7, TERM);
        assert!(!lease.holds(7, at(0)), "nobody has answered yet");
        lease.answered(7, at(100));
        assert!(lease.holds(7, at(2099)) && !lease.holds(7, at(2100)));
        assert!(!lease.holds(8, at(200)), "of another incarnation");
        // An answer that took long says nothing of the time since it was asked for, and an older one takes nothing away.
        lease.answered(7, at(50));
        assert!(lease.holds(7, at(2099)));
        lease.answered(8, at(1000));
        assert!(!lease.holds(7, at(2100)));
        lease.session(7, TERM);
        assert!(lease.holds(7, at(2099)), "the same session again takes nothing away");
        lease.session(8, TERM);
        assert!(!lease.holds(8, at(200)) && !lease.holds(7, at(200)));
    }

    #[test]
    fn i6_renewals_are_bounded_by_time_whatever_is_checked() {
        let mut lease = Lease::default();
        lease.session(7, TERM);
        lease.answered(7, at(0));
        let mut asked = 0;
        for milliseconds in 0..20_000 {
            if lease.renew(at(milliseconds)) {
                asked += 1;
                lease.answered(7, at(milliseconds));
            }
            assert!(lease.holds(7, at(milliseconds)));
        }
        assert!((25..=30).contains(&asked), "{asked} in 20 s");
        // Unanswered ones are not asked for more often.
        let asked = (20_000..40_000).filter(|milliseconds| lease.renew(at(*milliseconds))).count();
        assert!((25..=31).contains(&asked), "{asked} in 20 s");
    }

    #[test]
    fn i3_only_the_very_word_says_current() {
        let word = |in_progress, counter| Slot { in_progress, counter }.encode(7);
        let value = word(0, 40);
        assert_eq!(verdict(value, value, 7), Verdict::Current);
        assert_eq!(verdict(value, word(1, 40), 7), Verdict::Open, "a publish is under way");
        assert_eq!(verdict(value, word(0, 41), 7), Verdict::Moved);
        assert_eq!(verdict(value, word(1, 41), 7), Verdict::Moved, "one has ended, whatever else is under way");
        assert_eq!(verdict(value, value ^ 1, 7), Verdict::Open, "torn");
        assert_eq!(verdict(value, Slot { in_progress: 0, counter: 40 }.encode(8), 7), Verdict::Open, "of another run");
    }

    /// Each word that a publish goes through, torn after each byte, of runs of counters: what it says is the same each time.
    #[test]
    fn i3_a_word_torn_between_two_states_never_says_current_by_its_halves() {
        let word = |in_progress, counter| Slot { in_progress, counter }.encode(7);
        let (mut said, mut alike) = ([0; 3], 0);
        for counter in (0..1 << 12).chain((1 << 32) - 2048..(1 << 32) + 2048) {
            let (value, begun, ended) = (word(0, counter), word(1, counter), word(0, counter + 1));
            // Sixteen check bits are what there is: where two words have the same, halves of them may pass for a third.
            if [begun, ended].iter().any(|word| (word ^ value) & 0xffff == 0) {
                alike += 1;
                continue;
            }
            for (cut, (low, high)) in (1..8).flat_map(|cut| [(cut, (begun, ended)), (cut, (ended, begun))]) {
                let mask = (1u64 << (8 * cut)) - 1;
                let torn = low & mask | high & !mask;
                if torn != begun && torn != ended {
                    said[verdict(value, torn, 7) as usize] += 1;
                }
            }
        }
        let [current, moved, open] = said;
        assert_eq!(current, 0, "{said:?}");
        // What passes for another word all the same says that the name be looked up.
        assert!(open > 100_000 && moved <= 12 && alike <= 2, "{said:?}, {alike} alike");
    }

    #[test]
    fn the_quicker_way_is_taken_and_the_other_looked_at_now_and_then() {
        let mut pace = Pace::default();
        assert!(pace.prefers_read(CheckWay::Auto, at(0)), "nothing is known");
        pace.read(Duration::from_micros(90));
        pace.frame(Duration::from_micros(50));
        let reads = (1000..11_000).filter(|ms| pace.prefers_read(CheckWay::Auto, at(*ms))).count();
        assert_eq!(reads, 10);
        assert!(pace.prefers_read(CheckWay::Read, at(11_000)) && !pace.prefers_read(CheckWay::Frame, at(11_000)));
        for _ in 0..100 {
            pace.read(Duration::from_micros(20));
            pace.frame(Duration::from_secs(1));
        }
        assert!(pace.prefers_read(CheckWay::Auto, at(11_001)));
    }
}
