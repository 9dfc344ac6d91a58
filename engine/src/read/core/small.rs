//! Checks and lookups: small messages, many checks to a frame.
//!
//! A check must begin after the read arrived, so a read never joins a frame that is on its way: it gathers with others for
//! the next one, which leaves when the one before is answered or after a millisecond at the latest. A frame that is not
//! answered soon (the server holds it while one of its names is being published) is taken apart, so that one name does
//! not hold up the others.

use super::message::{self, Bad};
use super::{Action, Call, Core, Flight, InFlight, RETRY, Waiter};
use crate::client::{Found, Object};
use crate::clock::Time;
use crate::error::Error;
use crate::rail::{Lane, Look, Submission};
use crate::read::admission::{Class, Use};
use bytes::Bytes;
use railfs_proto::descriptor::Proof;
use railfs_proto::limits::{MAX_CHECKS, METADATA_DEADLINE};
use railfs_proto::name::ObjectName;
use railfs_proto::pin::PinChange;
use railfs_proto::reply::{Lookup, ReplyError};
use railfs_proto::v1;
use std::sync::Arc;
use std::time::Duration;

/// How long checks gather while another frame is on its way.
const GATHER: Duration = Duration::from_millis(1);
/// After how long a frame of several checks is taken apart.
const SPLIT: Duration = Duration::from_millis(20);

#[derive(Debug, Clone)]
pub(super) struct Member {
    pub(super) object: Arc<Object>,
    pub(super) proof: Proof,
    pub(super) waiters: Vec<Waiter>,
}

#[derive(Clone, Debug)]
pub(super) enum Kind {
    Check(Vec<Member>),
    /// For a call.
    Lookup(ObjectName, u64),
    /// The slot moved: is the version still the name's?
    Recheck(Arc<Object>, Vec<Waiter>),
    /// What the server is to be told of pins.
    Pin(PinChange),
    /// Nothing but the server's lease.
    Renew,
}

#[derive(Clone, Debug)]
pub(super) struct Small {
    pub(super) kind: Kind,
    deadline: Time,
    avoid: Vec<usize>,
    pub(super) attempt: Option<u64>,
    pub(super) posted: Time,
    retry_at: Time,
    bad: u32,
    /// READs that proved nothing.
    pub(super) looks: u32,
    /// Not by READ.
    pub(super) by_frame: bool,
}

impl Core {
    /// A check of the object's version that begins now, for one who arrived before now.
    pub(super) fn want_check(&mut self, now: Time, waiter: Waiter, object: &Arc<Object>) {
        if object.is_stale() {
            return self.not_current(&[waiter], object);
        }
        let proof = object.proof();
        if proof.incarnation != self.session.scope.incarnation {
            return self.recheck(now, object, vec![waiter]);
        }
        let same = |member: &&mut Member| Arc::ptr_eq(&member.object, object) && member.proof == proof;
        match self.gathering.iter_mut().find(same) {
            Some(member) => member.waiters.push(waiter),
            None => self.gathering.push(Member { object: object.clone(), proof, waiters: vec![waiter] }),
        }
        self.send_gathered(now);
    }

    /// Sends what has gathered, unless a frame left a moment ago and is not back yet.
    pub(super) fn send_gathered(&mut self, now: Time) {
        let flying = self.smalls.values().any(|small| small.attempt.is_some() && matches!(small.kind, Kind::Check(_)));
        if self.gathering.is_empty() || flying && now.since(self.last_check_posted) < GATHER {
            return;
        }
        let members = std::mem::take(&mut self.gathering);
        for chunk in members.chunks(MAX_CHECKS) {
            self.last_check_posted = now;
            self.new_small(now, Kind::Check(chunk.to_vec()), now.after(METADATA_DEADLINE * 2));
        }
    }

    pub(super) fn recheck(&mut self, now: Time, object: &Arc<Object>, waiters: Vec<Waiter>) {
        self.counts.rechecks += 1;
        self.new_small(now, Kind::Recheck(object.clone(), waiters), now.after(METADATA_DEADLINE * 2));
    }

    pub(super) fn want_lookup(&mut self, now: Time, id: u64, name: &ObjectName, deadline: Time) {
        self.new_small(now, Kind::Lookup(name.clone(), id), deadline);
    }

    pub(super) fn new_small(&mut self, now: Time, kind: Kind, deadline: Time) {
        let id = self.id();
        let small = Small {
            kind,
            deadline,
            avoid: Vec::new(),
            attempt: None,
            posted: now,
            retry_at: Time(0),
            bad: 0,
            looks: 0,
            by_frame: false,
        };
        self.smalls.insert(id, small);
        self.post_small(now, id);
    }

    /// Whether anybody waits for a check whose own deadline is later: a read may wait for longer than one check does.
    fn is_waited_for(&self, now: Time, kind: &Kind) -> bool {
        let waits = |waiter: &Waiter| match waiter {
            Waiter::Read(id) => self.reads.get(id).is_some_and(|read| read.deadline > now),
            Waiter::Call(id) => self.calls.get(id).is_some_and(|call| call.deadline > now),
        };
        match kind {
            Kind::Check(members) => members.iter().flat_map(|member| &member.waiters).any(waits),
            Kind::Recheck(_, waiters) => waiters.iter().any(waits),
            // One call's, with its deadline.
            Kind::Lookup(..) | Kind::Pin(_) | Kind::Renew => false,
        }
    }

    pub(super) fn post_small(&mut self, now: Time, id: u64) {
        let attempt = self.id();
        let Some(small) = self.smalls.get_mut(&id).filter(|small| small.attempt.is_none()) else { return };
        if now >= small.deadline {
            let small = small.clone();
            if !self.is_waited_for(now, &small.kind) {
                self.smalls.remove(&id);
                if matches!(small.kind, Kind::Pin(_)) {
                    self.pins.failed(now);
                }
                return;
            }
            // Nobody answered for so long, and somebody has the time to wait on.
            if let Some(small) = self.smalls.get_mut(&id) {
                small.deadline = now.after(METADATA_DEADLINE * 2);
            }
        }
        let Some(small) = self.smalls.get_mut(&id) else { return };
        // A proof is void in another incarnation: then the name has to be looked up.
        let incarnation = self.session.scope.incarnation;
        if let Kind::Check(members) = &small.kind
            && members.iter().any(|member| member.proof.incarnation != incarnation)
        {
            let members = members.clone();
            self.smalls.remove(&id);
            for member in members {
                for waiter in member.waiters {
                    self.want_check(now, waiter, &member.object);
                }
            }
            return;
        }
        let Some(rail) = self.rails.choose(now, 0, &small.avoid) else {
            small.retry_at = now.after(RETRY);
            return;
        };
        let held = Use::Read(Class::Small);
        if let Kind::Check(members) = &small.kind
            && !small.by_frame
            && let Some(slots) = self.checking.slots(now, self.rails.slots(rail, now), members)
        {
            self.counts.check_reads += 1;
            (small.attempt, small.posted) = (Some(attempt), now);
            let look = Look { id: attempt, incarnation, slots, deadline: small.deadline };
            self.rails.posted(rail, 0);
            let flight = Flight::Look(id);
            self.flights.insert(attempt, InFlight { flight, rail, memory: 0, held, posted: now, incarnation });
            self.actions.push(Action::Look { rail, look });
            return self.renew_lease(now);
        }
        let scope = &self.session.scope;
        let body = match &mut small.kind {
            Kind::Check(members) => {
                self.counts.check_frames += 1;
                let proofs = members.iter().map(|member| member.proof.to_slot()).collect();
                v1::rail_request::Body::Check(v1::CheckRequest { proofs })
            }
            Kind::Lookup(name, _) => lookup_body(scope, name),
            Kind::Recheck(object, _) => lookup_body(scope, &object.name),
            Kind::Pin(change) => v1::rail_request::Body::Pin(change.to_message()),
            Kind::Renew => {
                self.counts.lease_renewals += 1;
                v1::rail_request::Body::Lease(v1::LeaseRequest {})
            }
        };
        small.attempt = Some(attempt);
        small.posted = now;
        let submission = Submission {
            id: attempt,
            lane: Lane::Small,
            message: message::request(scope, small.deadline.since(now), body),
            landing: None,
            deadline: small.deadline,
        };
        self.rails.posted(rail, 0);
        let flight = Flight::Small(id);
        self.flights.insert(attempt, InFlight { flight, rail, memory: 0, held, posted: now, incarnation });
        self.actions.push(Action::Submit { rail, submission });
    }

    pub(super) fn retry_smalls(&mut self, now: Time, all: bool) {
        let due = |small: &Small| small.attempt.is_none() && (all || small.retry_at <= now);
        let ids: Vec<u64> = self.smalls.iter().filter(|(_, small)| due(small)).map(|(&id, _)| id).collect();
        for id in ids {
            self.post_small(now, id);
        }
    }

    /// Sends what has gathered long enough and takes apart frames that wait too long.
    pub(super) fn tick_smalls(&mut self, now: Time) {
        self.send_gathered(now);
        let held = |small: &Small| {
            matches!(&small.kind, Kind::Check(members) if members.len() > 1)
                && small.attempt.is_some()
                && now.since(small.posted) >= SPLIT
        };
        let ids: Vec<u64> = self.smalls.iter().filter(|(_, small)| held(small)).map(|(&id, _)| id).collect();
        for id in ids {
            let Some(small) = self.smalls.remove(&id) else { continue };
            if let Some(attempt) = small.attempt
                && let Some(flight) = self.flights.get_mut(&attempt)
            {
                flight.flight = Flight::Gone;
                let (rail, posted) = (flight.rail, flight.posted);
                self.rails.ended(now, rail, 0, posted, false);
                self.actions.push(Action::Cancel { rail, id: attempt });
            }
            if let Kind::Check(members) = small.kind {
                for member in members {
                    self.new_small(now, Kind::Check(vec![member]), small.deadline);
                }
            }
        }
    }

    pub(super) fn small_failed(&mut self, now: Time, id: u64, rail: usize) {
        let Some(small) = self.smalls.get_mut(&id) else { return };
        small.attempt = None;
        small.retry_at = now.after(RETRY);
        if !small.avoid.contains(&rail) {
            small.avoid.push(rail);
        }
        // A rail that failed it would only fail again at once; it may not have said yet that it is down.
        match self.rails.choose(now, 0, &small.avoid) {
            Some(other) if !small.avoid.contains(&other) => self.post_small(now, id),
            _ => small.avoid.clear(),
        }
    }

    pub(super) fn small_replied(&mut self, now: Time, id: u64, rail: usize, message: &Bytes, entry: &InFlight) {
        let Some(mut small) = self.smalls.remove(&id) else { return };
        small.attempt = None;
        let reply = message::reply(message);
        if reply.is_ok() {
            self.checking.lease.answered(entry.incarnation, entry.posted);
        }
        match reply {
            Err(Bad::Refused(refusal)) => match refusal.code {
                v1::Code::WrongIncarnation | v1::Code::WrongStore => {
                    self.actions.push(Action::Renew);
                    self.put_back(now, id, small, None);
                }
                v1::Code::Unavailable | v1::Code::OverBudget | v1::Code::Expired => {
                    self.put_back(now, id, small, None);
                }
                code => self.small_refused(now, &small, rail, code, &refusal.message),
            },
            Err(Bad::Malformed(detail)) => self.bad_small(now, id, small, rail, &detail),
            Ok(v1::rail_reply::Body::Check(reply)) => match &small.kind {
                Kind::Check(members) if members.len() == reply.results.len() => {
                    let members = members.clone();
                    self.checking.pace.frame(now.since(entry.posted));
                    self.checks_answered(now, members, &reply.results);
                }
                _ => self.bad_small(now, id, small, rail, "another number of checks, or no check was asked for"),
            },
            Ok(v1::rail_reply::Body::Pin(reply)) => {
                let answered = match &small.kind {
                    Kind::Pin(change) => self.pins_replied(change, &reply),
                    _ => Err("pins where none were asked for".to_owned()),
                };
                match answered {
                    Ok(()) => self.say_pins(now),
                    Err(detail) => self.bad_small(now, id, small, rail, &detail),
                }
            }
            Ok(v1::rail_reply::Body::Lookup(reply)) => match (&small.kind, Lookup::from_message(&reply)) {
                (Kind::Check(_) | Kind::Pin(_) | Kind::Renew, _) => {
                    self.bad_small(now, id, small, rail, "a lookup where none was asked for")
                }
                (_, Err(ReplyError::Refused(refusal))) if refusal.code == v1::Code::Unavailable => {
                    self.put_back(now, id, small, None);
                }
                (_, Err(ReplyError::Refused(refusal))) if refusal.code == v1::Code::Denied => {
                    self.small_refused(now, &small, rail, refusal.code, &refusal.message);
                }
                (_, Err(error)) => self.bad_small(now, id, small, rail, &error.to_string()),
                (Kind::Lookup(name, call), Ok(lookup)) => {
                    if self.calls.remove(call).is_some() {
                        self.actions.push(Action::LookedUp { id: *call, found: found(name, lookup) });
                    }
                }
                (Kind::Recheck(object, waiters), Ok(lookup)) => self.rechecked(object, waiters, lookup),
            },
            Ok(v1::rail_reply::Body::Lease(_)) if matches!(small.kind, Kind::Renew) => {}
            Ok(_) => self.bad_small(now, id, small, rail, "reply to another kind of request"),
        }
        self.send_gathered(now);
    }

    /// Tries again a little later.
    fn put_back(&mut self, now: Time, id: u64, mut small: Small, avoid: Option<usize>) {
        small.retry_at = now.after(RETRY);
        small.avoid.extend(avoid);
        self.smalls.insert(id, small);
    }

    fn bad_small(&mut self, now: Time, id: u64, mut small: Small, rail: usize, detail: &str) {
        tracing::warn!(rail, detail, "bad answer to a check or lookup");
        small.bad += 1;
        if small.bad > super::MAX_BAD {
            self.small_refused(now, &small, rail, v1::Code::Unspecified, detail)
        } else {
            self.put_back(now, id, small, Some(rail))
        }
    }

    /// `code`: what the server said, where it was that.
    fn small_refused(&mut self, now: Time, small: &Small, rail: usize, code: v1::Code, detail: &str) {
        let error = |name: &ObjectName| match code {
            v1::Code::Denied => message::denied(name, detail),
            _ => Error::BadAnswer { peer: format!("{name} by rail {rail}"), detail: detail.to_owned() },
        };
        match &small.kind {
            Kind::Lookup(name, call) => self.fail_call(*call, error(name)),
            Kind::Recheck(object, waiters) => self.fail_waiters(waiters, &error(&object.name)),
            // Without a lease checks go by frame.
            Kind::Renew => tracing::debug!(rail, detail, "a renewal of the server's lease was refused"),
            // Who waits for it waits on: it is said again.
            Kind::Pin(_) => {
                tracing::debug!(rail, detail, "a pin request was refused");
                self.pins.failed(now);
            }
            Kind::Check(members) => {
                for member in members {
                    self.fail_waiters(&member.waiters, &error(&member.object.name));
                }
            }
        }
    }

    fn checks_answered(&mut self, now: Time, members: Vec<Member>, results: &[v1::CheckResult]) {
        for (member, result) in members.into_iter().zip(results) {
            if result.current {
                self.current(&member.waiters);
            } else {
                self.recheck(now, &member.object, member.waiters);
            }
        }
    }

    fn rechecked(&mut self, object: &Arc<Object>, waiters: &[Waiter], lookup: Lookup) {
        match lookup {
            Lookup::Object(descriptor, proof) if descriptor.version == object.descriptor.version => {
                object.set_proof(proof);
                self.current(waiters);
            }
            _ => {
                object.set_stale();
                self.not_current(waiters, object);
            }
        }
    }

    pub(super) fn current(&mut self, waiters: &[Waiter]) {
        for &waiter in waiters {
            match waiter {
                Waiter::Read(id) => {
                    if let Some(read) = self.reads.get_mut(&id) {
                        read.checked = true;
                        self.progress(id);
                    }
                }
                Waiter::Call(id) => {
                    if self.calls.remove(&id).is_some() {
                        self.actions.push(Action::Checked { id });
                    }
                }
            }
        }
    }

    fn not_current(&mut self, waiters: &[Waiter], object: &Object) {
        self.fail_waiters(waiters, &object.stale_error());
    }

    fn fail_waiters(&mut self, waiters: &[Waiter], error: &Error) {
        for &waiter in waiters {
            match waiter {
                Waiter::Read(id) => self.fail_read(id, error.clone()),
                Waiter::Call(id) => self.fail_call(id, error.clone()),
            }
        }
    }

    fn fail_call(&mut self, id: u64, error: Error) {
        if self.calls.remove(&id).is_some() {
            self.actions.push(Action::Fail { id, error });
        }
    }

    pub(super) fn call_timed_out(&mut self, id: u64) {
        let Some(Call { began, deadline, what }) = self.calls.get(&id) else { return };
        let (began, deadline) = (*began, *deadline);
        let after = deadline.since(began);
        let detail = match self.rails.any(deadline) {
            true => ": the rails are up, and none of them brought it".to_owned(),
            false => format!(": {}", self.rails_down()),
        };
        let error = Error::TimedOut { what: what.clone(), after, detail };
        self.unanswered(began);
        self.fail_call(id, error);
    }
}

fn lookup_body(scope: &v1::Scope, name: &ObjectName) -> v1::rail_request::Body {
    v1::rail_request::Body::Lookup(v1::LookupRequest { scope: Some(scope.clone()), name: Some(name.to_message()) })
}

fn found(name: &ObjectName, lookup: Lookup) -> Found {
    match lookup {
        Lookup::Object(descriptor, proof) => Found::Object(Arc::new(Object::new(name.clone(), descriptor, proof))),
        Lookup::Directory { mtime, .. } => Found::Directory(mtime.seconds, mtime.nanoseconds),
        Lookup::Absent(_) => Found::Absent,
    }
}
