//! Which rail a fetch takes, and what is known of each rail: pure.
//!
//! A fetch goes to the rail that would finish it first: bytes queued there and its own, over the measured bandwidth.
//! Bandwidths within a factor of four of the best count as equal (a shared machine's noise is of that size, where a thread
//! waits for its turn on a core; the length of the queues settles the rest), and equal predictions go to the rail that got less lately. A rail that was measured slow
//! is tried again when it has had nothing to do for a second: one bad measurement must not starve it for ever.

use crate::clock::Time;
use crate::rail::{Slots, State};
use crate::read::admission::Class;
use std::time::Duration;

/// What a rail is good for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Not joined yet.
    Connecting,
    /// Takes its full share.
    Up,
    /// Joined, but silent while an answer is due, or caught with wrong bytes: used when there is no better one.
    Suspect,
    /// Came back: one fetch at a time until one succeeds, or until it has been up for a while.
    Probing,
    /// Takes nothing.
    Down,
}

/// Why a rail is not up. The three are kept apart; wrong bytes heal by time alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reason {
    /// Dead: what the rail said.
    pub dead: Option<String>,
    /// Silent while an answer was due.
    pub silent: bool,
    /// Brought bytes that another rail brought right; suspect until then.
    pub wrong_until: Option<Time>,
}

/// How long a rail that brought wrong bytes stays suspect.
const WRONG_PENALTY: Duration = Duration::from_secs(10);
/// For so long nothing is READ through a rail after a READ has failed: it may be what brought the rail down.
const NO_LOOKS: Duration = Duration::from_secs(10);
/// What a new rail is taken to do, bytes a second, until measured.
const UNMEASURED: u64 = 1 << 30;
/// After so long without an answer a measurement says little.
const STALE: Duration = Duration::from_secs(1);
/// So many bytes make a measurement (fewer say more of the threads of both ends than of the rail: until then the length of
/// its queue tells),
const ENOUGH: u64 = 8 << 20;
/// and after so many the older ones count half.
const WINDOW: u64 = 32 << 20;
/// A rail that came back and answered its pings for so long is trusted although nobody had anything to ask.
const PROBATION: Duration = Duration::from_secs(2);
/// So many bytes of large fetches keep a rail busy: what reads want beyond waits where others can go before it,
const LARGE_WINDOW: u64 = 4 << 20;
/// what is fetched ahead of reads stops earlier,
const AHEAD_WINDOW: u64 = 3 << 20;
/// and small fetches have room of their own.
const SMALL_WINDOW: u64 = 2 << 20;
/// Of a smaller fetch that had the rail to itself the time tells the round trip, not the bandwidth.
const TELLING: u64 = 512 << 10;

#[derive(Clone, Debug)]
pub(crate) struct RailView {
    pub(crate) name: String,
    pub(crate) state: State,
    pub(crate) reason: Reason,
    proven: bool,
    was_down: bool,
    /// Since when; `None` where nobody said.
    up_since: Option<Time>,
    /// Bytes a second; 0: not measured.
    pub(crate) bandwidth: u64,
    /// What it is measured by: nanoseconds it was busy, and bytes it brought meanwhile. (Sums, not an average of rates:
    /// answers come in bursts, and small ones that had to wait for a core would count as much as large ones.)
    busy: u64,
    moved: u64,
    pub(crate) queued: u64,
    /// Of `queued`, in small fetches.
    queued_small: u64,
    pub(crate) in_flight: u32,
    recent: u64,
    last_done: Time,
    pub(crate) bad_pages: u64,
    pub(crate) removed: bool,
    /// What can be READ of the server's slots.
    slots: Option<Slots>,
    /// Until then nothing is READ: it failed.
    no_looks_until: Time,
}

/// All rails to one server, by number. Numbers are never used again.
#[derive(Debug, Default)]
pub struct Rails {
    list: Vec<RailView>,
}

impl Rails {
    /// A new rail; gives its number. The name is for messages.
    pub fn add(&mut self, name: &str) -> usize {
        self.list.push(RailView {
            name: name.to_owned(),
            state: State::Connecting,
            reason: Reason::default(),
            proven: false,
            was_down: false,
            up_since: None,
            bandwidth: 0,
            busy: 0,
            moved: 0,
            queued: 0,
            queued_small: 0,
            in_flight: 0,
            recent: 0,
            last_done: Time(0),
            bad_pages: 0,
            removed: false,
            slots: None,
            no_looks_until: Time(0),
        });
        self.list.len() - 1
    }

    /// The rail will not come back.
    pub fn remove(&mut self, rail: usize) {
        if let Some(view) = self.list.get_mut(rail) {
            view.removed = true;
        }
    }

    /// What a rail is called in messages.
    pub(crate) fn name(&self, rail: usize) -> &str {
        self.list.get(rail).map_or("?", |view| &view.name)
    }

    pub(crate) fn view(&self, rail: usize) -> Option<&RailView> {
        self.list.get(rail)
    }

    /// What the rail says of itself. Gives whether it can take work now and could not before.
    pub fn state(&mut self, rail: usize, state: State) -> bool {
        let Some(view) = self.list.get_mut(rail) else { return false };
        let usable = |state: &State| matches!(state, State::Up | State::Silent);
        let before = usable(&view.state);
        match &state {
            State::Up => {
                view.reason.dead = None;
                view.reason.silent = false;
            }
            State::Silent => view.reason.silent = true,
            State::Down(why) => {
                view.reason.dead = Some(why.clone());
                view.reason.silent = false;
                view.proven = false;
                view.was_down = true;
                view.slots = None;
            }
            State::Connecting => view.proven = false,
        }
        let came_back = usable(&state) && (!before || matches!(state, State::Up) && view.state == State::Silent);
        view.state = state;
        came_back
    }

    /// The server's slots can be READ through the rail, or not any more.
    pub(crate) fn set_slots(&mut self, rail: usize, slots: Option<Slots>) {
        if let Some(view) = self.list.get_mut(rail) {
            view.slots = slots;
        }
    }

    /// The slots that can be READ through the rail now.
    pub(crate) fn slots(&self, rail: usize, now: Time) -> Option<Slots> {
        self.list.get(rail).filter(|view| view.no_looks_until <= now)?.slots
    }

    /// A READ of slots failed there: for a while checks go by frame.
    pub(crate) fn look_failed(&mut self, now: Time, rail: usize) {
        if let Some(view) = self.list.get_mut(rail) {
            view.no_looks_until = now.after(NO_LOOKS);
        }
    }

    /// What the rail said of itself just now lets it begin its probation.
    pub(crate) fn since(&mut self, rail: usize, now: Time) {
        if let Some(view) = self.list.get_mut(rail) {
            view.up_since = match view.state {
                State::Up => view.up_since.or(Some(now)),
                _ => None,
            };
        }
    }

    /// See [`Health`].
    pub fn health(&self, rail: usize, now: Time) -> Health {
        let Some(view) = self.list.get(rail).filter(|view| !view.removed) else { return Health::Down };
        match view.state {
            State::Connecting if view.was_down => Health::Down,
            State::Connecting => Health::Connecting,
            State::Down(_) => Health::Down,
            State::Silent => Health::Suspect,
            State::Up if view.reason.wrong_until.is_some_and(|until| until > now) => Health::Suspect,
            State::Up if view.was_down && !view.proven => match view.up_since {
                Some(since) if now.since(since) >= PROBATION => Health::Up,
                _ => Health::Probing,
            },
            State::Up => Health::Up,
        }
    }

    /// The rail for `bytes`, not one of `avoid` unless there is no other.
    pub fn choose(&self, now: Time, bytes: u64, avoid: &[usize]) -> Option<usize> {
        let best = self.list.iter().map(|view| view.bandwidth).max().unwrap_or(0).max(1);
        let rank = |&rail: &usize| {
            let view = &self.list[rail];
            let health = match self.health(rail, now) {
                Health::Up => 0,
                Health::Probing if view.in_flight == 0 => 0,
                Health::Probing => 1,
                Health::Suspect => 2,
                Health::Connecting | Health::Down => return None,
            };
            let bandwidth = match view.bandwidth {
                0 if best > 1 => best,
                0 => UNMEASURED,
                measured if measured >= best / 4 => best,
                _ if view.queued == 0 && now.since(view.last_done) >= STALE => best,
                measured => measured,
            };
            let finish = (view.queued + bytes).saturating_mul(1_000_000) / (bandwidth / 1000).max(1);
            Some((health + if avoid.contains(&rail) { 3 } else { 0 }, finish, view.recent, rail))
        };
        (0..self.list.len()).filter_map(|rail| rank(&rail)).min().map(|(_, _, _, rail)| rail)
    }

    /// Whether there is a rail that is not in `avoid` and could take work.
    pub fn other_than(&self, now: Time, avoid: &[usize]) -> bool {
        (0..self.list.len())
            .any(|rail| !avoid.contains(&rail) && matches!(self.health(rail, now), Health::Up | Health::Probing))
    }

    /// Whether any rail could take work now.
    pub fn any(&self, now: Time) -> bool {
        self.choose(now, 0, &[]).is_some()
    }

    /// Whether a fetch of so many bytes (of memory) may be given to the rail now, or has to wait because the rail has enough to
    /// do. `ahead`: nobody waits for it.
    pub(crate) fn room(&self, rail: usize, bytes: u64, ahead: bool) -> bool {
        let Some(view) = self.list.get(rail) else { return false };
        let large = view.queued - view.queued_small;
        let (queued, window) = match Class::of(bytes) {
            _ if ahead => (view.queued, AHEAD_WINDOW),
            Class::Small => (view.queued_small, SMALL_WINDOW),
            Class::Large => (large, LARGE_WINDOW),
        };
        queued == 0 || queued + bytes <= window
    }

    pub(crate) fn posted(&mut self, rail: usize, bytes: u64) {
        if let Some(view) = self.list.get_mut(rail) {
            view.queued += bytes;
            if Class::of(bytes) == Class::Small {
                view.queued_small += bytes;
            }
            view.in_flight += 1;
            view.recent += bytes;
            if view.recent > 64 << 20 {
                self.list.iter_mut().for_each(|view| view.recent /= 2);
            }
        }
    }

    /// A request ended: `moved` where its bytes came, `None` where it failed or was taken back.
    pub(crate) fn ended(&mut self, now: Time, rail: usize, bytes: u64, posted: Time, moved: bool) {
        let Some(view) = self.list.get_mut(rail) else { return };
        view.queued = view.queued.saturating_sub(bytes);
        if Class::of(bytes) == Class::Small {
            view.queued_small = view.queued_small.saturating_sub(bytes);
        }
        view.in_flight = view.in_flight.saturating_sub(1);
        if !moved {
            return;
        }
        view.proven = true;
        // Checks and lookups have a lane of their own: they say nothing of how busy the other one is.
        if bytes == 0 {
            return;
        }
        let (alone, stale) = (posted >= view.last_done, posted.since(view.last_done) >= STALE);
        let busy = now.since(posted.max(view.last_done)).as_nanos().max(1);
        view.last_done = view.last_done.max(now);
        if bytes < (64 << 10) || alone && bytes < TELLING {
            return;
        }
        if stale {
            (view.busy, view.moved, view.bandwidth) = (0, 0, 0);
        }
        view.busy = view.busy.saturating_add(u64::try_from(busy).unwrap_or(u64::MAX));
        view.moved += bytes;
        if view.moved >= ENOUGH {
            let bandwidth = u128::from(view.moved) * 1_000_000_000 / u128::from(view.busy.max(1));
            view.bandwidth = u64::try_from(bandwidth).unwrap_or(u64::MAX).max(1);
        }
        if view.moved >= WINDOW {
            view.busy /= 2;
            view.moved /= 2;
        }
    }

    /// The rail brought wrong bytes where another one brought the right ones.
    pub(crate) fn wrong(&mut self, now: Time, rail: usize) {
        if let Some(view) = self.list.get_mut(rail) {
            view.bad_pages += 1;
            view.reason.wrong_until = Some(now.after(WRONG_PENALTY));
        }
    }

    /// For status: state, why it is not up, measured bytes a second, bad pages.
    pub fn describe(&self, rail: usize, now: Time) -> (String, String, u64, u64) {
        let Some(view) = self.list.get(rail) else { return Default::default() };
        let state = match self.health(rail, now) {
            Health::Connecting => "connecting",
            Health::Up => "up",
            Health::Suspect => "suspect",
            Health::Probing => "probing",
            Health::Down => "down",
        };
        let reason = match (&view.reason.dead, view.reason.silent, view.reason.wrong_until) {
            (Some(why), _, _) => why.clone(),
            (None, true, _) => "silent".to_owned(),
            (None, false, Some(until)) if until > now => "brought wrong bytes".to_owned(),
            _ => match state {
                "probing" => "it came back; one fetch at a time until one succeeds".to_owned(),
                "connecting" => "no connection yet".to_owned(),
                _ => String::new(),
            },
        };
        (state.to_owned(), reason, view.bandwidth, view.bad_pages)
    }

    /// How many there are, removed ones included.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn up(count: usize) -> Rails {
        let mut rails = Rails::default();
        for rail in 0..count {
            rails.add(&format!("r{rail}"));
            rails.state(rail, State::Up);
        }
        rails
    }

    #[test]
    fn i6_a_rail_is_given_no_more_fetches_than_a_connection_takes_however_small_they_are() {
        let limit = crate::rail::tcp::Limits::default().in_flight;
        // The least that a fetch takes of memory; readahead first, which may go further.
        let mut rails = up(1);
        let mut given = 0;
        for (bytes, ahead) in [(4096, true), (4096, false), (65 << 10, true), (65 << 10, false)] {
            while rails.room(0, bytes, ahead) {
                rails.posted(0, bytes);
                given += 1;
            }
        }
        assert!(given > 512 && given < limit, "{given} of {limit}");
    }

    #[test]
    fn i10_equal_rails_share_and_a_dead_one_gets_nothing() {
        let mut rails = up(4);
        let mut share = [0u64; 4];
        for _ in 0..400 {
            let rail = rails.choose(Time(0), 1 << 20, &[]).unwrap();
            rails.posted(rail, 1 << 20);
            rails.ended(Time(1), rail, 1 << 20, Time(0), true);
            share[rail] += 1;
        }
        assert!(share.iter().all(|&count| (80..=120).contains(&count)), "{share:?}");
        rails.state(2, State::Down("gone".into()));
        assert!((0..50).all(|_| rails.choose(Time(0), 1, &[]) != Some(2)));
        assert_eq!(rails.health(2, Time(0)), Health::Down);
        for rail in [0, 1, 3] {
            rails.posted(rail, 64 << 20);
        }
        assert!(rails.choose(Time(0), 1, &[]).is_some_and(|rail| rail != 2), "however long the others' queues are");
        assert!(rails.choose(Time(0), 1, &[0, 1, 3]).is_some_and(|rail| rail != 2));
        for rail in [0, 1, 3] {
            rails.state(rail, State::Down("gone".into()));
        }
        assert_eq!(rails.choose(Time(0), 1, &[]), None);
    }

    const M: u64 = 1 << 20;

    /// Answers of a MiB, one after another, each after so long.
    fn answers(rails: &mut Rails, rail: usize, from: Time, count: u64, each: Duration) -> Time {
        let mut now = from;
        for _ in 0..count {
            rails.posted(rail, M);
            now = now.after(each);
            rails.ended(now, rail, M, from, true);
        }
        now
    }

    #[test]
    fn a_slow_rail_gets_less_and_a_long_queue_is_avoided() {
        let mut rails = up(2);
        answers(&mut rails, 0, Time(0), 8, Duration::from_millis(1));
        answers(&mut rails, 1, Time(0), 8, Duration::from_millis(10));
        let mut share = [0u64; 2];
        for _ in 0..22 {
            let rail = rails.choose(Time(0), M, &[]).unwrap();
            rails.posted(rail, M);
            share[rail] += 1;
        }
        assert!(share[0] >= 18 && share[1] >= 1, "{share:?}");
    }

    #[test]
    fn i10_one_slow_answer_does_not_starve_a_rail() {
        // A small file came slowly over rail 0 (the round trip, not the bandwidth), then a MiB: they say little.
        let mut rails = up(2);
        rails.posted(0, 64 << 10);
        rails.ended(Time(3_000_000), 0, 64 << 10, Time(0), true);
        let now = answers(&mut rails, 1, Time(3_000_000), 8, Duration::from_millis(1));
        let now = answers(&mut rails, 0, now, 1, Duration::from_millis(200));
        assert_eq!(rails.view(0).unwrap().bandwidth, 0);
        assert_eq!(rails.choose(now, M, &[]), Some(0));
        // More of them: it gets less for a while, then work to show what it can do.
        let now = answers(&mut rails, 0, now, 8, Duration::from_millis(200));
        assert!(rails.view(0).unwrap().bandwidth < 6 << 20);
        assert_eq!(rails.choose(now, M, &[]), Some(1));
        let later = now.after(STALE);
        for _ in 0..3 {
            rails.posted(1, M);
        }
        assert_eq!(rails.choose(later, M, &[]), Some(0));
        rails.posted(0, M);
        assert_eq!(rails.choose(later, M, &[]), Some(1));
        rails.ended(later.after(Duration::from_millis(1)), 0, M, later, true);
        answers(&mut rails, 0, later.after(Duration::from_millis(1)), 8, Duration::from_millis(1));
        assert!(rails.view(0).unwrap().bandwidth > 1 << 29);
    }

    #[test]
    fn i10_small_answers_that_waited_for_a_core_do_not_starve_a_rail() {
        const K: u64 = 64 << 10;
        let mut rails = up(2);
        let mut now = 0;
        // 64 KiB every 60 us by both; rail 0 waits 10 ms for a core now and then.
        for n in 1..200u64 {
            now += if n % 100 == 0 { 10_000_000 } else { 60_000 };
            for rail in [0, 1] {
                rails.posted(rail, K);
                let done = if rail == 1 && n % 100 == 0 { Time(now - 9_940_000) } else { Time(now) };
                rails.ended(done, rail, K, Time(0), true);
            }
        }
        let mut share = [0u64; 2];
        for _ in 0..100 {
            let rail = rails.choose(Time(now), K, &[]).unwrap();
            rails.posted(rail, K);
            share[rail] += 1;
        }
        assert!(share.iter().all(|&count| count >= 40), "{share:?}");
    }

    #[test]
    fn answers_that_come_in_bursts_are_measured_by_their_sum() {
        let mut rails = up(1);
        let mut now = 0;
        // Four at a time every 4 ms: a MiB a millisecond.
        for _ in 0..50 {
            now += 4_000_000;
            for n in 0..4u64 {
                rails.posted(0, M);
                rails.ended(Time(now + n * 1000), 0, M, Time(0), true);
            }
        }
        let bandwidth = rails.view(0).unwrap().bandwidth;
        assert!((500 << 20..2200 << 20).contains(&bandwidth), "{bandwidth}");
    }

    #[test]
    fn i10_a_rail_that_returns_is_probed_before_it_is_trusted() {
        let mut rails = up(2);
        rails.state(0, State::Down("cut".into()));
        rails.state(0, State::Connecting);
        assert_eq!(rails.health(0, Time(0)), Health::Down);
        assert!(rails.state(0, State::Up));
        assert_eq!(rails.health(0, Time(0)), Health::Probing);
        let (state, reason, ..) = rails.describe(0, Time(0));
        assert!(state == "probing" && reason.contains("came back"), "{state}: {reason}");
        rails.since(0, Time(0));
        assert_eq!(rails.health(0, Time(5)), Health::Probing);
        assert_eq!(rails.health(0, Time(0).after(PROBATION)), Health::Up, "nobody asked it anything");
        rails.posted(0, 1);
        assert_eq!(rails.choose(Time(0), 1, &[]), Some(1));
        rails.ended(Time(5), 0, 1, Time(0), true);
        assert_eq!(rails.health(0, Time(5)), Health::Up);
        rails.wrong(Time(5), 0);
        assert_eq!(rails.health(0, Time(6)), Health::Suspect);
        assert_eq!(rails.choose(Time(6), 1, &[]), Some(1));
        rails.state(1, State::Down("cut".into()));
        assert_eq!(rails.choose(Time(6), 1, &[]), Some(0));
        assert_eq!(rails.health(0, Time(0).after(Duration::from_secs(20))), Health::Up);
    }
}
