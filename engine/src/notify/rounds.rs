//! When the watchdog is fed. Pure.
//!
//! Guarantees: it is fed only after every witness (a part without which there is no progress) has answered a question that
//! was asked after the last feeding. A timer alone never feeds it. What does not answer is named once, and once more when it
//! answers again.

use crate::clock::Time;
use std::time::Duration;

/// How many times the manager's limit is divided into rounds: one may be late, and one answer slow.
const ROUNDS: u32 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Asked,
    Answered,
    /// It can no longer be asked: that it says nothing means nothing.
    Gone,
}

/// See the module.
#[derive(Debug)]
pub struct Rounds {
    witnesses: Vec<(&'static str, State)>,
    limit: Duration,
    /// When the round under way began; `None`: there was none.
    began: Option<Time>,
    complained: bool,
}

/// What is to be done now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Beat {
    /// Tell the manager.
    pub feed: bool,
    /// Ask every witness, by its place, that is not gone.
    pub ask: Vec<usize>,
    /// For the log, and whether it is bad news.
    pub say: Option<(bool, String)>,
}

impl Rounds {
    /// For a manager that waits so long.
    pub fn new(limit: Duration, witnesses: &[&'static str]) -> Rounds {
        let witnesses = witnesses.iter().map(|name| (*name, State::Answered)).collect();
        Rounds { witnesses, limit, began: None, complained: false }
    }

    /// How long to wait between two beats.
    pub fn pause(&self) -> Duration {
        (self.limit / ROUNDS).max(Duration::from_millis(1))
    }

    /// A witness has answered.
    pub fn answered(&mut self, place: usize) {
        if let Some((_, state @ State::Asked)) = self.witnesses.get_mut(place) {
            *state = State::Answered;
        }
    }

    /// A witness cannot be asked any more; the others go on.
    pub fn gone(&mut self, place: usize) {
        if let Some((_, state)) = self.witnesses.get_mut(place) {
            *state = State::Gone;
        }
    }

    /// A pause is over.
    pub fn beat(&mut self, now: Time) -> Beat {
        let silent: Vec<&str> =
            self.witnesses.iter().filter(|(_, state)| *state == State::Asked).map(|(name, _)| *name).collect();
        let witnessed = self.witnesses.iter().any(|(_, state)| *state == State::Answered);
        if !silent.is_empty() || !witnessed {
            let since = self.began.map_or(Duration::ZERO, |began| now.since(began));
            if since < self.limit / 2 || std::mem::replace(&mut self.complained, true) {
                return Beat::default();
            }
            let who = if silent.is_empty() { "everything".to_owned() } else { silent.join(", ") };
            let text = format!(
                "no progress: no answer for {} s from {who}; the service manager's watchdog is not fed, its limit is {} s",
                since.as_secs(),
                self.limit.as_secs()
            );
            return Beat { say: Some((true, text)), ..Beat::default() };
        }
        let feed = self.began.is_some();
        let mut ask = Vec::new();
        for (place, (_, state)) in self.witnesses.iter_mut().enumerate() {
            if *state == State::Answered {
                *state = State::Asked;
                ask.push(place);
            }
        }
        self.began = Some(now);
        let say = std::mem::take(&mut self.complained).then(|| (false, "progress again".to_owned()));
        Beat { feed, ask, say }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time(seconds * 1_000_000_000)
    }

    #[test]
    fn it_is_fed_by_a_whole_round_of_answers_only() {
        let mut rounds = Rounds::new(Duration::from_secs(20), &["threads", "driver"]);
        assert_eq!(rounds.pause(), Duration::from_secs(5));
        let first = rounds.beat(at(0));
        assert_eq!((first.feed, first.ask), (false, vec![0, 1]), "nobody has answered anything yet");
        rounds.answered(0);
        assert_eq!(rounds.beat(at(5)), Beat::default());
        rounds.answered(1);
        assert_eq!(rounds.beat(at(10)), Beat { feed: true, ask: vec![0, 1], say: None });
        // Answers of the last round do not feed this one.
        assert_eq!(rounds.beat(at(15)), Beat::default());
        let complaint = rounds.beat(at(20));
        assert!(!complaint.feed && complaint.ask.is_empty());
        let (bad, text) = complaint.say.unwrap();
        assert!(bad && text.contains("10 s from threads, driver") && text.contains("its limit is 20 s"), "{text}");
        rounds.answered(0);
        assert_eq!(rounds.beat(at(60)), Beat::default(), "once is enough");
        rounds.answered(1);
        let again = rounds.beat(at(65));
        assert_eq!((again.feed, again.say), (true, Some((false, "progress again".to_owned()))));
    }

    #[test]
    fn a_witness_that_is_gone_is_not_waited_for_and_nobody_is_no_witness() {
        let mut rounds = Rounds::new(Duration::from_secs(4), &["threads", "driver"]);
        rounds.beat(at(0));
        rounds.gone(0);
        rounds.answered(0);
        rounds.answered(1);
        rounds.answered(9);
        assert_eq!(rounds.beat(at(1)), Beat { feed: true, ask: vec![1], say: None });
        rounds.gone(1);
        for second in 2..9 {
            assert!(!rounds.beat(at(second)).feed, "without any witness nothing is known");
        }
        assert!(!Rounds::new(Duration::from_secs(4), &[]).beat(at(1)).feed);
    }
}
