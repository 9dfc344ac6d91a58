//! What the read path decides: pure. Calls say what happened and when; [`Core::take_actions`] says what to do.
//!
//! Guarantees:
//! * The same calls give the same actions in the same order, whatever a process drew for its hash tables: what happened once
//!   happens again from its seed. So what is gone through in turn lies in ordered tables.
//! * I1, I3: a read finishes only with every page it asked for, all of one version, and after a check that began when the
//!   read had arrived. A check is a check frame, a READ of the slot that ended while the server's lease was held, a lookup made
//!   anew, or what a fetch posted after the read's arrival brings.
//! * I5: what comes for an attempt that was given up is dropped.
//! * I6: landings in flight and in quarantine together stay within three quarters of the arena; a read that does not fit
//!   waits in line and holds nothing. Those in line are served fairly by bytes over handles, small ones in a class of their
//!   own; so are fetches where a rail has enough to do already. Readahead is sent when nobody waits for either, and holds
//!   nothing before.
//! * I9: every read, check and lookup is answered by its deadline ([`Core::tick`]).
//! * I10: what fails on one rail is sent on another, into a new extent, within the same deadline.

mod ahead;
mod audit;
#[cfg(test)]
mod fair_tests;
mod fetch;
mod looking;
mod message;
mod pinning;
mod reads;
mod small;
#[cfg(test)]
mod tests;

use crate::cache::Cache;
use crate::client::{Found, Object};
use crate::clock::Time;
use crate::error::Error;
use crate::memory::Arena;
use crate::outage::{Outage, PROBE, READ_PROBE};
use crate::rail::{Cause, Event, Hand, Look, Submission};
use crate::read::admission::{Account, FairQueue, Ledger, Use};
use crate::read::landed::Landed;
use crate::read::pins::Pins;
use crate::read::rails::Rails;
pub use audit::Holdings;

use ahead::{Reader, Sore};
use fetch::Fetch;
use railfs_proto::name::ObjectName;
use railfs_proto::v1;
use reads::Read;
use small::Small;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// How often an answer that says "bad bytes" is asked for again, each time by another rail where there is one.
pub(crate) const MAX_BAD: u32 = 2;
/// When work that found no room or a busy server is tried again.
pub(crate) const RETRY: Duration = Duration::from_millis(20);

/// What to do.
#[derive(Debug)]
pub enum Action {
    /// Give this to a rail.
    Submit {
        /// Which.
        rail: usize,
        /// What.
        submission: Submission,
    },
    /// Have a rail READ slot words.
    Look {
        /// Which.
        rail: usize,
        /// What.
        look: Look,
    },
    /// Give up an earlier submission or look.
    Cancel {
        /// Of which rail.
        rail: usize,
        /// Its id.
        id: u64,
    },
    /// Verify the pages, answer the read, and call [`Core::finished`].
    Finish {
        /// The read.
        id: u64,
        /// Its pages, in order and without gaps.
        parts: Vec<Arc<Landed>>,
    },
    /// Answer the read, check or lookup with this error.
    Fail {
        /// Which.
        id: u64,
        /// Why.
        error: Error,
    },
    /// The check succeeded.
    Checked {
        /// Which.
        id: u64,
    },
    /// The lookup's answer.
    LookedUp {
        /// Which.
        id: u64,
        /// What the name means.
        found: Found,
    },
    /// The server is another incarnation than the session's: say hello again.
    Renew,
}

/// What a session is about: who is asked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Session {
    /// Goes into every request.
    pub scope: v1::Scope,
    /// Most bytes of one fetch.
    pub max_fetch: u32,
    /// Whether the server keeps versions that clients pin.
    pub pins: bool,
    /// The server lease.
    pub lease: Duration,
}

/// What a read asks of its version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freshness {
    /// That it is current, by a check that begins when the read has arrived.
    Current,
    /// Nothing: these bytes of this version, for as long as the server has them.
    Version,
}

/// A read that has all its pages and waits for its check only.
#[derive(Debug)]
pub struct Complete {
    /// As in [`Action::Finish`].
    pub parts: Vec<Arc<Landed>>,
}

/// Counters of the read path (a public contract).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Reads that arrived.
    pub reads: u64,
    /// Reads answered with bytes.
    pub reads_ok: u64,
    /// Reads answered with an error.
    pub reads_failed: u64,
    /// Reads answered ESTALE.
    pub reads_stale: u64,
    /// Reads of a version as such, without a check (page-cache fills, snapshots).
    pub reads_unchecked: u64,
    /// Reads whose pages were all in the cache.
    pub reads_warm: u64,
    /// Reads that had to wait for memory.
    pub reads_waited: u64,
    /// Fetches sent for reads.
    pub fetches: u64,
    /// Fetches sent ahead of reads.
    pub fetches_ahead: u64,
    /// Fetches sent again after a failure.
    pub fetches_again: u64,
    /// Check frames sent.
    pub check_frames: u64,
    /// Checks made by READ of slots (as many frames would have been sent).
    pub check_reads: u64,
    /// Of which proved nothing, since a word was torn, a publish was under way or the lease was over: asked again.
    pub check_reads_again: u64,
    /// Frames sent for nothing but the server's lease.
    pub lease_renewals: u64,
    /// Checks answered by the fetch that brought the bytes.
    pub checks_by_fetch: u64,
    /// Names looked up again because their slot had moved.
    pub rechecks: u64,
    /// Pages that failed their checksum.
    pub bad_pages: u64,
    /// Replies dropped because nobody waited for them.
    pub stale_replies: u64,
    /// Object bytes that landed.
    pub bytes_landed: u64,
    /// Object bytes that landed before anybody had asked for them.
    pub bytes_ahead: u64,
    /// Reads answered with the error that the same bytes met a moment before.
    pub reads_failed_again: u64,
    /// Object bytes given to readers.
    pub bytes_read: u64,
}

impl Counts {
    /// Names and values.
    pub fn named(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("reads", self.reads),
            ("reads_ok", self.reads_ok),
            ("reads_failed", self.reads_failed),
            ("reads_stale", self.reads_stale),
            ("reads_unchecked", self.reads_unchecked),
            ("reads_warm", self.reads_warm),
            ("reads_waited", self.reads_waited),
            ("fetches", self.fetches),
            ("fetches_ahead", self.fetches_ahead),
            ("fetches_again", self.fetches_again),
            ("check_frames", self.check_frames),
            ("check_reads", self.check_reads),
            ("check_reads_again", self.check_reads_again),
            ("lease_renewals", self.lease_renewals),
            ("checks_by_fetch", self.checks_by_fetch),
            ("rechecks", self.rechecks),
            ("bad_pages", self.bad_pages),
            ("stale_replies", self.stale_replies),
            ("bytes_landed", self.bytes_landed),
            ("bytes_ahead", self.bytes_ahead),
            ("reads_failed_again", self.reads_failed_again),
            ("bytes_read", self.bytes_read),
        ]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flight {
    Fetch(u64),
    Small(u64),
    /// A check by READ.
    Look(u64),
    /// Given up; only its memory is still awaited.
    Gone,
}

/// A check or a lookup that somebody waits for.
#[derive(Debug)]
struct Call {
    began: Time,
    deadline: Time,
    what: String,
}

/// An attempt in flight.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    flight: Flight,
    rail: usize,
    /// Bytes of its landing, and what they are held for.
    memory: u32,
    held: Use,
    posted: Time,
    /// Who was asked.
    incarnation: u64,
}

/// Who waits for a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiter {
    Read(u64),
    Call(u64),
}

/// See the module.
#[derive(Debug)]
pub struct Core {
    arena: Arena,
    cache: Cache,
    rails: Rails,
    session: Session,
    readahead_limit: u64,
    /// How long one attempt may take on a rail that is up, while another rail could do it.
    pub(crate) attempt: Duration,
    /// A read for which there is no memory now is refused, and does not wait for it.
    pub(crate) refuse: bool,
    next_id: u64,
    actions: Vec<Action>,
    reads: BTreeMap<u64, Read>,
    /// Reads that wait for memory.
    line: FairQueue,
    /// Fetches that have memory and wait for a rail that has room.
    sends: FairQueue,
    fetches: BTreeMap<u64, Fetch>,
    by_cell: HashMap<(u64, u64), Vec<u64>>,
    smalls: BTreeMap<u64, Small>,
    gathering: Vec<small::Member>,
    last_check_posted: Time,
    checking: looking::Checking,
    /// Checks and lookups for callers.
    calls: BTreeMap<u64, Call>,
    /// Whether anybody answers on the rails.
    outage: Outage,
    /// Attempts in flight.
    flights: BTreeMap<u64, InFlight>,
    /// Bytes of landings in flight and in quarantine.
    ledger: Ledger,
    readers: HashMap<u64, Reader>,
    /// Handles that may want something fetched ahead, in turn.
    ring: VecDeque<u64>,
    /// What was found damaged a moment ago.
    sore: Sore,
    pins: Pins,
    counts: Counts,
}

impl Core {
    /// Nothing happens before [`Core::session`] and [`Core::add_rail`]. `readahead_limit`: bytes per reader.
    pub fn new(arena: Arena, readahead_limit: u64) -> Core {
        let ledger = Ledger::new(arena.stats().total);
        Core {
            arena,
            cache: Cache::default(),
            rails: Rails::default(),
            session: Session::default(),
            readahead_limit,
            attempt: railfs_proto::limits::REQUEST,
            refuse: false,
            next_id: 1,
            actions: Vec::new(),
            reads: BTreeMap::new(),
            line: FairQueue::default(),
            sends: FairQueue::default(),
            fetches: BTreeMap::new(),
            by_cell: HashMap::new(),
            smalls: BTreeMap::new(),
            gathering: Vec::new(),
            last_check_posted: Time(0),
            checking: looking::Checking::default(),
            calls: BTreeMap::new(),
            outage: Outage::default(),
            flights: BTreeMap::new(),
            ledger,
            readers: HashMap::new(),
            ring: VecDeque::new(),
            sore: Sore::default(),
            pins: Pins::new(1),
            counts: Counts::default(),
        }
    }

    /// Under what number the server keeps this client's pins: drawn at random, not 0. Before the first pin.
    pub fn pin_lease(&mut self, lease: u64) {
        self.pins = Pins::new(lease);
    }

    /// What is to be done now, in order.
    pub fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// Whom to ask from now on. Requests to the one before are not sent again to it.
    pub fn session(&mut self, session: Session) {
        self.pins.session(session.pins);
        self.checking.lease.session(session.scope.incarnation, session.lease);
        self.session = session;
    }

    /// A new rail; gives its number. The name is for messages.
    pub fn add_rail(&mut self, name: &str) -> usize {
        self.rails.add(name)
    }

    /// The rail was closed for good.
    pub fn remove_rail(&mut self, rail: usize) {
        self.rails.remove(rail);
    }

    /// All rails.
    pub fn rails(&self) -> &Rails {
        &self.rails
    }

    /// See [`Counts`].
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Bytes in the cache.
    pub fn cached_bytes(&self) -> u64 {
        self.cache.bytes()
    }

    /// Bytes of landings in flight or in quarantine.
    pub fn committed_bytes(&self) -> u64 {
        self.ledger.held()
    }

    /// Who waits for memory, and how long that took.
    pub fn admission(&self) -> Account {
        self.line.account()
    }

    /// Bytes held for readahead: in flight; fetched, wanted and not read; dropped without having been read.
    pub fn ahead_bytes(&self) -> [u64; 3] {
        [self.ledger.ahead(), self.cache.unread(), self.cache.wasted()]
    }

    /// Reads under way, fetches in flight, checks and lookups in flight, reads in line for memory.
    pub fn activity(&self) -> [u64; 4] {
        [self.reads.len(), self.fetches.len(), self.smalls.len() + self.gathering.len(), self.line.len()]
            .map(|count| count as u64)
    }

    /// Whether nothing is under way and nobody waits: no timer is needed. Calls count by themselves: what was sent for one may be
    /// given up before its deadline is looked at.
    pub fn idle(&self) -> bool {
        self.reads.is_empty()
            && self.calls.is_empty()
            && self.fetches.is_empty()
            && self.smalls.is_empty()
            && self.gathering.is_empty()
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// The object's version is current: asks, from now on. Answered by [`Action::Checked`] or [`Action::Fail`].
    pub fn check(&mut self, now: Time, id: u64, object: &Arc<Object>, deadline: Time) {
        let deadline = self.within(now, deadline, PROBE);
        self.calls.insert(id, Call { began: now, deadline, what: object.name.to_string() });
        self.want_check(now, Waiter::Call(id), object);
    }

    /// Answered by [`Action::LookedUp`] or [`Action::Fail`].
    pub fn lookup(&mut self, now: Time, id: u64, name: &ObjectName, deadline: Time) {
        let deadline = self.within(now, deadline, PROBE);
        self.calls.insert(id, Call { began: now, deadline, what: name.to_string() });
        self.want_lookup(now, id, name, deadline);
    }

    /// The deadline of what begins now: a near one while nobody answers.
    fn within(&self, now: Time, deadline: Time, probe: Duration) -> Time {
        now.after(self.outage.limit(deadline.since(now), probe))
    }

    /// Something that began then got no answer by now.
    fn unanswered(&mut self, began: Time) {
        if self.outage.unanswered(began) {
            tracing::warn!(
                "no rail brings an answer: until one does, reads wait {READ_PROBE:?} and other calls {PROBE:?} ({})",
                self.rails_now()
            );
        }
    }

    fn heard(&mut self, now: Time) {
        if let Some(after) = self.outage.heard(now) {
            tracing::info!(?after, "answers come again");
        }
    }

    /// Since when nobody answers on the rails.
    pub fn silent_since(&self) -> Option<Time> {
        self.outage.since()
    }

    /// A rail says something.
    pub fn rail_event(&mut self, now: Time, rail: usize, event: Event) {
        match event {
            Event::Replied { id, message, bulk, extent } => {
                let Some(entry) = self.flights.remove(&id).filter(|entry| entry.rail == rail) else {
                    self.counts.stale_replies += 1;
                    return;
                };
                self.heard(now);
                self.ledger.give(entry.held, u64::from(entry.memory));
                if !matches!(entry.flight, Flight::Gone) {
                    self.rails.ended(now, rail, u64::from(entry.memory), entry.posted, true);
                }
                match entry.flight {
                    Flight::Fetch(fetch) => self.fetch_replied(now, fetch, rail, &message, bulk, extent, &entry),
                    Flight::Small(small) => self.small_replied(now, small, rail, &message, &entry),
                    // A look has no reply.
                    Flight::Look(_) | Flight::Gone => self.counts.stale_replies += 1,
                }
            }
            Event::Failed { id, cause, hand } => {
                let held = matches!(hand, Hand::Held);
                drop(hand);
                let Some(&entry) = self.flights.get(&id).filter(|entry| entry.rail == rail) else { return };
                if held {
                    // Its memory stays committed until the rail releases it.
                    self.flights.insert(id, InFlight { flight: Flight::Gone, ..entry });
                } else {
                    self.flights.remove(&id);
                    self.ledger.give(entry.held, u64::from(entry.memory));
                }
                if !matches!(entry.flight, Flight::Gone) {
                    self.rails.ended(now, rail, u64::from(entry.memory), entry.posted, false);
                }
                match entry.flight {
                    Flight::Fetch(fetch) => self.fetch_failed(now, fetch, rail, &format!("{cause:?}")),
                    Flight::Small(small) => self.small_failed(now, small, rail),
                    Flight::Look(small) => {
                        if matches!(cause, Cause::Expired | Cause::Disconnected(_)) {
                            self.rails.look_failed(now, rail);
                        }
                        self.look_failed(now, small, rail);
                    }
                    Flight::Gone => {}
                }
            }
            Event::Looked { id, words } => {
                let Some(entry) = self.flights.remove(&id).filter(|entry| entry.rail == rail) else {
                    self.counts.stale_replies += 1;
                    return;
                };
                match entry.flight {
                    Flight::Look(small) => {
                        self.rails.ended(now, rail, 0, entry.posted, true);
                        self.looked(now, small, &words);
                    }
                    _ => self.counts.stale_replies += 1,
                }
            }
            Event::Slots(slots) => self.rails.set_slots(rail, slots),
            Event::Released { id, extent } => {
                drop(extent);
                if let Some(entry) = self.flights.remove(&id) {
                    self.ledger.give(entry.held, u64::from(entry.memory));
                }
            }
            Event::State(state) => {
                let silent = state == crate::rail::State::Silent;
                if state == crate::rail::State::Up {
                    self.heard(now);
                }
                let came_back = self.rails.state(rail, state);
                self.rails.since(rail, now);
                if silent {
                    self.leave(now, rail);
                }
                if came_back {
                    self.retry_waiting(now, true);
                }
            }
        }
        self.turn(now);
    }

    /// What waits gets its turn: reads that wait for memory, then fetches that wait for a rail, then readahead.
    fn turn(&mut self, now: Time) {
        self.admit_waiting(now);
        self.send_waiting(now);
        self.pump_ahead(now);
    }

    /// The rail is silent: what it was to do is done by others, where there are any.
    fn leave(&mut self, now: Time, rail: usize) {
        if !self.rails.other_than(now, &[rail]) {
            return;
        }
        let on_it = |entry: &InFlight| entry.rail == rail && !matches!(entry.flight, Flight::Gone);
        let attempts: Vec<u64> = self.flights.iter().filter(|(_, f)| on_it(f)).map(|(&id, _)| id).collect();
        for attempt in attempts {
            self.give_up(now, attempt);
        }
    }

    /// Cancels an attempt and sends its work elsewhere.
    fn give_up(&mut self, now: Time, attempt: u64) {
        let Some(entry) = self.flights.get_mut(&attempt) else { return };
        let InFlight { flight, rail, memory, posted, .. } = *entry;
        entry.flight = Flight::Gone;
        self.actions.push(Action::Cancel { rail, id: attempt });
        if !matches!(flight, Flight::Gone) {
            self.rails.ended(now, rail, u64::from(memory), posted, false);
        }
        match flight {
            Flight::Fetch(fetch) => self.fetch_failed(now, fetch, rail, "no answer in time"),
            Flight::Small(small) => self.small_failed(now, small, rail),
            Flight::Look(small) => self.look_failed(now, small, rail),
            Flight::Gone => {}
        }
    }

    /// Time passes: deadlines, attempts that take too long, work to try again. Call it every 10 ms or so while not
    /// [`Core::idle`].
    pub fn tick(&mut self, now: Time) {
        let late = |(&id, read): (&u64, &Read)| (read.deadline <= now && !read.finishing).then_some(id);
        let reads: Vec<u64> = self.reads.iter().filter_map(late).collect();
        for id in reads {
            self.read_timed_out(now, id);
        }
        let calls: Vec<u64> = self.calls.iter().filter(|(_, call)| call.deadline <= now).map(|(&id, _)| id).collect();
        for id in calls {
            self.call_timed_out(id);
        }
        let slow = |(&id, entry): (&u64, &InFlight)| {
            let old = !matches!(entry.flight, Flight::Gone) && now.since(entry.posted) >= self.attempt;
            (old && self.rails.other_than(now, &[entry.rail])).then_some(id)
        };
        let attempts: Vec<u64> = self.flights.iter().filter_map(slow).collect();
        for attempt in attempts {
            self.give_up(now, attempt);
        }
        self.tick_smalls(now);
        self.say_pins(now);
        self.retry_waiting(now, false);
        self.turn(now);
    }

    /// Fails everything: the client is being closed.
    pub fn close(&mut self) {
        let reads: Vec<u64> = self.reads.iter().filter(|(_, read)| !read.finishing).map(|(&id, _)| id).collect();
        for id in reads {
            self.reads.remove(&id);
            self.actions.push(Action::Fail { id, error: Error::Closed });
        }
        for id in std::mem::take(&mut self.calls).into_keys() {
            self.actions.push(Action::Fail { id, error: Error::Closed });
        }
        self.line.clear();
        self.sends.clear();
        self.ring.clear();
        for fetch in std::mem::take(&mut self.fetches).into_values() {
            if fetch.extent.is_some() {
                self.ledger.give(fetch.held, u64::from(fetch.geometry.extent));
            }
        }
        self.by_cell.clear();
        self.smalls.clear();
        self.gathering.clear();
        for (id, open) in &mut self.flights {
            if !matches!(open.flight, Flight::Gone) {
                open.flight = Flight::Gone;
                self.actions.push(Action::Cancel { rail: open.rail, id: *id });
            }
        }
        while self.cache.evict() {}
    }
}
