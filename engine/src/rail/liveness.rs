//! Whether the other side is still there. Pure: events and a clock in, actions out.
//!
//! Guarantees:
//! * Silence counts only while something is due: a request, or a ping that was sent because the connection was idle.
//! * Any byte that arrives, and any proof that the other side still reads, ends it. A server that takes long over a
//!   request is not silent: it answers the pings.
//! * Silence of `suspect` gives one [`Action::Silent`], of `retire` one [`Action::Retire`]; the next byte after `Silent`
//!   gives one [`Action::Alive`].
//! * [`Liveness::next`] never lies later than the next action.

use crate::clock::Time;
use std::time::Duration;

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a ping, and say [`Liveness::sent`] when it has gone out.
    Ping,
    /// Suspect from now on.
    Silent,
    /// No longer suspect.
    Alive,
    /// Close the connection.
    Retire,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Liveness {
    suspect: Duration,
    retire: Duration,
    ping: Duration,
    /// The last sign of life (or the start).
    heard: Time,
    /// Since when something has been due without a sign of life.
    due: Option<Time>,
    /// A ping was asked for since the last sign of life.
    pinged: bool,
    silent: bool,
    retired: bool,
}

impl Liveness {
    /// Starts as alive.
    pub fn new(now: Time, suspect: Duration, retire: Duration, ping: Duration) -> Liveness {
        Liveness { suspect, retire, ping, heard: now, due: None, pinged: false, silent: false, retired: false }
    }

    /// Something that is answered has gone out.
    pub fn sent(&mut self, now: Time) {
        self.due.get_or_insert(now);
    }

    /// A sign of life. `more` says that answers are still due.
    pub fn heard(&mut self, now: Time, more: bool) -> Option<Action> {
        self.heard = now;
        self.due = more.then_some(now);
        self.pinged = false;
        (std::mem::take(&mut self.silent) && !self.retired).then_some(Action::Alive)
    }

    /// Nobody waits for anything any more (given up, cancelled): silence proves nothing now. A ping that is out keeps
    /// the question open.
    pub fn idle(&mut self) {
        if !self.pinged && !self.silent {
            self.due = None;
        }
    }

    /// While something is due a ping goes out well before it becomes suspicious.
    fn ping_at(&self) -> Time {
        match self.due {
            Some(due) => due.after((self.suspect / 4).min(self.ping)),
            None => self.heard.after(self.ping),
        }
    }

    /// What the time calls for, one action at a time: call until it says `None`.
    pub fn tick(&mut self, now: Time) -> Option<Action> {
        if self.retired {
            return None;
        }
        if let Some(due) = self.due {
            if now >= due.after(self.retire) {
                self.retired = true;
                return Some(Action::Retire);
            }
            if !self.silent && now >= due.after(self.suspect) {
                self.silent = true;
                return Some(Action::Silent);
            }
        }
        if !self.pinged && now >= self.ping_at() {
            self.pinged = true;
            return Some(Action::Ping);
        }
        None
    }

    /// When to call [`Liveness::tick`] at the latest.
    pub fn next(&self) -> Time {
        if self.retired {
            return Time::NEVER;
        }
        let ping = if self.pinged { Time::NEVER } else { self.ping_at() };
        match self.due {
            None => ping,
            Some(due) => ping.min(due.after(if self.silent { self.retire } else { self.suspect })),
        }
    }

    /// Whether it is suspect.
    pub fn is_silent(&self) -> bool {
        self.silent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn at(milliseconds: u64) -> Time {
        Time(milliseconds * 1_000_000)
    }
    fn machine() -> Liveness {
        Liveness::new(Time(0), Duration::from_secs(1), Duration::from_secs(3), Duration::from_secs(1))
    }
    /// Ticks at every millisecond from `from` to `to`; pings count as sent at once.
    fn run(machine: &mut Liveness, from: u64, to: u64) -> Vec<(u64, Action)> {
        let mut out = Vec::new();
        for now in from..=to {
            while let Some(action) = machine.tick(at(now)) {
                if action == Action::Ping {
                    machine.sent(at(now));
                }
                out.push((now, action));
            }
        }
        out
    }

    #[test]
    fn an_unanswered_request_is_pinged_suspected_and_retired() {
        let mut machine = machine();
        machine.sent(at(100));
        let all = run(&mut machine, 100, 10_000);
        assert_eq!(all, [(350, Action::Ping), (1100, Action::Silent), (3100, Action::Retire)]);
        assert_eq!(machine.next(), Time::NEVER);
    }

    #[test]
    fn an_idle_connection_is_pinged_every_second_and_its_silence_noticed() {
        let mut machine = machine();
        assert_eq!(run(&mut machine, 0, 1500), [(1000, Action::Ping)]);
        assert_eq!(machine.heard(at(1500), false), None);
        assert_eq!(run(&mut machine, 1500, 2600), [(2500, Action::Ping)]);
        assert_eq!(run(&mut machine, 2600, 9000), [(3500, Action::Silent), (5500, Action::Retire)]);
    }

    #[test]
    fn a_byte_brings_it_back_once() {
        let mut machine = machine();
        machine.sent(at(0));
        run(&mut machine, 0, 2000);
        assert!(machine.is_silent());
        assert_eq!(machine.heard(at(2000), true), Some(Action::Alive));
        assert_eq!(machine.heard(at(2001), true), None);
        // Still due, so it starts again from there.
        assert_eq!(run(&mut machine, 2001, 3001), [(2251, Action::Ping), (3001, Action::Silent)]);
    }

    #[test]
    fn a_slow_server_that_answers_pings_is_never_silent() {
        let mut machine = machine();
        machine.sent(at(0));
        let mut pings = 0;
        for now in 0..60_000 {
            while let Some(action) = machine.tick(at(now)) {
                assert_eq!(action, Action::Ping);
                machine.sent(at(now));
                pings += 1;
            }
            if now % 100 == 99 && machine.pinged {
                assert_eq!(machine.heard(at(now), true), None);
            }
        }
        assert!(pings > 100);
    }

    #[test]
    fn what_nobody_waits_for_is_not_silence() {
        let mut machine = machine();
        machine.sent(at(0));
        machine.idle();
        assert_eq!(run(&mut machine, 0, 999), []);
        // But a ping that is out keeps the question open.
        assert_eq!(run(&mut machine, 1000, 1001), [(1000, Action::Ping)]);
        machine.idle();
        assert_eq!(run(&mut machine, 1001, 2000), [(2000, Action::Silent)]);
    }

    proptest::proptest! {
        /// Sleeping until `next` misses nothing that ticking at every step would have seen.
        #[test]
        fn i9_next_is_never_too_late(events in proptest::collection::vec((0u64..3, 1u64..1500), 1..40)) {
            let mut machine = machine();
            let mut now = 0;
            for (kind, wait) in events {
                let mut probe = machine.clone();
                let next = machine.next();
                if next > at(now) && next != Time::NEVER {
                    proptest::prop_assert_eq!(probe.tick(Time(next.0 - 1).min(Time(next.0 - SECOND / 1000))), None);
                    let mut probe = machine.clone();
                    proptest::prop_assert!(probe.tick(next).is_some());
                }
                now += wait;
                while let Some(action) = machine.tick(at(now)) {
                    if action == Action::Ping {
                        machine.sent(at(now));
                    }
                }
                match kind {
                    0 => machine.sent(at(now)),
                    1 => { machine.heard(at(now), wait % 2 == 0); }
                    _ => machine.idle(),
                }
            }
        }
    }
}
