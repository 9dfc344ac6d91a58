//! The checker's own idea of what was current when, and what it makes of each answer.
//!
//! Guarantees: asks nothing of the code under test. A moment is a number that only grows; two events never share one.

use super::server::{NAMES, RUN, byte, number};
use crate::client::{Found, Object};
use crate::clock::Time;
use crate::error::Error;
use crate::read::core::Freshness;
use crate::read::landed::Landed;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

/// A read, check or lookup that was not answered yet.
pub(super) struct Asked {
    pub(super) object: Option<Arc<Object>>,
    /// Which name, for a lookup, and whose handle it is for.
    pub(super) name: u64,
    pub(super) handle: u64,
    pub(super) offset: u64,
    pub(super) length: u32,
    pub(super) freshness: Freshness,
    pub(super) arrived: Time,
    pub(super) deadline: Time,
    /// When it arrived, in moments.
    pub(super) moment: u64,
}

/// What the faults so far excuse.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Excuses {
    /// A page was damaged on its way.
    pub(super) damaged: bool,
    /// An answer was no answer (short, made up).
    pub(super) nonsense: bool,
    /// Since when something has been well that could have served every read; `None`: there was nothing.
    pub(super) well_since: Option<Time>,
}

/// See the module.
pub(super) struct Checker {
    moment: u64,
    /// When each version became current, and when it was superseded.
    current: HashMap<u64, (u64, Option<u64>)>,
    /// Reads, checks and lookups, by id.
    pub(super) asked: BTreeMap<u64, Asked>,
    pub(super) broken: Option<String>,
    pub(super) answered: [u64; 3],
    /// Of everything that was answered, in order.
    pub(super) digest: u64,
}

/// The first of the bytes from `at` on that is not the version's. They are the same within [`RUN`] bytes each.
fn first_wrong(version: u64, at: u64, bytes: &[u8]) -> Option<u64> {
    let (mut place, mut rest) = (at, bytes);
    while !rest.is_empty() {
        let length = usize::try_from(RUN - place % RUN).unwrap_or(1).min(rest.len());
        let (run, behind) = rest.split_at(length);
        let want = byte(version, place);
        if run.iter().fold(0, |all, got| all | (got ^ want)) != 0 {
            return run.iter().position(|got| *got != want).map(|index| place + index as u64);
        }
        (place, rest) = (place + length as u64, behind);
    }
    None
}

impl Checker {
    pub(super) fn new() -> Checker {
        let current = (0..NAMES).map(|name| (2000 + name, (0, None))).collect();
        Checker { moment: 0, current, asked: BTreeMap::new(), broken: None, answered: [0; 3], digest: 0 }
    }

    /// A new moment.
    pub(super) fn moment(&mut self) -> u64 {
        self.moment += 1;
        self.moment
    }

    /// From now on the name means `after`.
    pub(super) fn superseded(&mut self, before: u64, after: u64) {
        let moment = self.moment();
        if let Some((_, until)) = self.current.get_mut(&before) {
            *until = Some(moment);
        }
        self.current.insert(after, (moment, None));
    }

    pub(super) fn breaks(&mut self, what: String) {
        self.broken.get_or_insert(what);
    }

    fn note(&mut self, id: u64, what: u64) {
        self.digest = (self.digest.rotate_left(5) ^ id).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ what;
    }

    /// Whether the version was current at some moment since.
    fn was_current(&self, version: u64, since: u64) -> bool {
        self.current.get(&version).is_some_and(|(_, until)| until.is_none_or(|until| until > since))
    }

    /// A check of the object that somebody asked for has succeeded.
    pub(super) fn checked(&mut self, id: u64) {
        self.note(id, 1);
        let Some(asked) = self.asked.remove(&id) else { return self.breaks(format!("check {id} was answered twice")) };
        let Some(object) = asked.object else { return self.breaks(format!("I3: lookup {id} was answered as a check")) };
        let version = object.descriptor.version;
        if !self.was_current(version, asked.moment) {
            self.breaks(format!("I3: check {id} passed version {version}, which was superseded before it began"));
        }
    }

    /// The answer to a lookup. Gives the handle it is for, and the object.
    pub(super) fn looked_up(&mut self, id: u64, found: &Found) -> Option<(u64, Arc<Object>)> {
        self.note(id, 2);
        let Some(asked) = self.asked.remove(&id) else {
            self.breaks(format!("lookup {id} was answered twice"));
            return None;
        };
        let Found::Object(object) = found else {
            self.breaks(format!("I3: lookup {id} did not find a name that has been there always: {found:?}"));
            return None;
        };
        let version = object.descriptor.version;
        if number(&object.name) != Some(asked.name) || version % NAMES != asked.name {
            self.breaks(format!("I1: lookup {id} of name {} gave version {version} of {}", asked.name, object.name));
        }
        if !self.was_current(version, asked.moment) {
            self.breaks(format!("I3: lookup {id} gave version {version}, which was superseded before it began"));
        }
        Some((asked.handle, object.clone()))
    }

    /// A read is about to be answered. `Err`: a page that is not what its checksum says; it is not answered then.
    pub(super) fn finish(&mut self, id: u64, parts: &[Arc<Landed>]) -> Result<u64, Option<(Arc<Landed>, u64)>> {
        let Some(asked) = self.asked.get(&id) else {
            self.breaks(format!("read {id} was answered twice"));
            return Err(None);
        };
        let Some(object) = asked.object.clone() else { return Err(None) };
        let (version, striping) = (object.descriptor.version, object.descriptor.striping);
        let (page_size, moment, freshness) = (u64::from(striping.page_size()), asked.moment, asked.freshness);
        let range = crate::read::plan::clamp(&striping, asked.offset, asked.length);
        let mut at = range.start;
        while at < range.end {
            let part = parts.iter().find(|part| part.pages().contains(&(at / page_size)));
            let Some(part) = part else {
                self.breaks(format!("I1: read {id} of {range:?} has no page at {at}"));
                return Err(None);
            };
            let end = (part.pages().end * page_size).min(range.end);
            match part.verify(at..end) {
                Ok(bytes) => {
                    if let Some(wrong) = first_wrong(version, at, bytes) {
                        self.breaks(format!("I2: read {id}: byte {wrong} is not of version {version}"));
                    }
                    at += bytes.len().max(1) as u64;
                }
                Err(bad) => return Err(Some((part.clone(), bad.page))),
            }
        }
        if freshness == Freshness::Current && !self.was_current(version, moment) {
            self.breaks(format!("I3: read {id} got bytes of version {version}, superseded before it arrived"));
        }
        self.note(id, 3);
        self.asked.remove(&id);
        self.answered[0] += 1;
        Ok(range.end - range.start)
    }

    /// An error in answer to whatever it was. True: a read that was told that nobody answers.
    pub(super) fn fail(&mut self, now: Time, id: u64, error: &Error, excuses: &Excuses) -> bool {
        self.note(id, 4);
        let Some(asked) = self.asked.remove(&id) else {
            self.breaks(format!("{id} was answered twice, then with {error}"));
            return false;
        };
        let waited = now.since(asked.arrived);
        let mut outage = false;
        match error {
            Error::Stale { version, .. } => {
                self.answered[1] += 1;
                if self.current.get(version).is_none_or(|(_, until)| until.is_none()) {
                    self.breaks(format!("I3: ESTALE for {id}, but version {version} is current"));
                }
            }
            Error::TimedOut { .. } => {
                self.answered[2] += 1;
                outage = waited + Duration::from_millis(1) < asked.deadline.since(asked.arrived);
                let least = Duration::from_millis(500);
                if waited < least {
                    self.breaks(format!("I9: {id} was given up after {waited:?}: {error}"));
                }
                let long = asked.deadline.since(asked.arrived) >= Duration::from_secs(10);
                if long && excuses.well_since.is_some_and(|since| since < asked.arrived) {
                    self.breaks(format!("I10: {id} was given up although a rail was well all the time: {error}"));
                }
            }
            Error::Damaged { .. } if excuses.damaged => self.answered[2] += 1,
            Error::BadAnswer { .. } if excuses.nonsense => self.answered[2] += 1,
            other => self.breaks(format!("{id} met an error that nothing explains: {other}")),
        }
        outage
    }

    /// What should have been answered by now.
    pub(super) fn overdue(&mut self, now: Time) {
        let late = |asked: &Asked| asked.deadline.after(Duration::from_millis(30)) < now;
        if let Some(id) = self.asked.iter().find(|(_, asked)| late(asked)).map(|(id, _)| *id) {
            self.breaks(format!("I9: {id} is not answered, and its deadline is over"));
        }
    }
}
