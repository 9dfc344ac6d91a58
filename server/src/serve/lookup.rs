//! Lookups and checks: one handler for both ways in (control plane, rail frames).
//!
//! Guarantees: what needs no waiting never leaves the connection's thread; a check says "current" only on the word of
//! the publisher; where a publish does not end in time, a check answers with a word that equals no proof.

use super::{Answer, Due, Server};
use crate::access::{Identity, Need};
use crate::catalog::{Answer as Found, CheckError, Checked, LookupError};
use crate::node::{add, count};
use railfs_proto::descriptor::Proof;
use railfs_proto::limits::MAX_CHECKS;
use railfs_proto::name::ObjectName;
use railfs_proto::reply::{Refusal, ok_outcome};
use railfs_proto::slot::Slot;
use railfs_proto::v1::{self, CheckResult, Code, rail_reply};
use std::sync::Arc;

/// What a failed lookup is to a client.
pub fn lookup_refusal(error: &LookupError) -> Refusal {
    Refusal::new(
        if matches!(error, LookupError::Expired { .. }) { Code::Expired } else { Code::Unavailable },
        error.to_string(),
    )
}

fn check_refusal(error: &CheckError) -> Refusal {
    let code = match error {
        CheckError::Incarnation { .. } => Code::WrongIncarnation,
        CheckError::NoSuchSlot { .. } => Code::Invalid,
        CheckError::Expired(_) => Code::Expired,
    };
    Refusal::new(code, error.to_string())
}

/// The reply to a lookup.
pub fn lookup_reply(found: Result<Found, LookupError>) -> v1::LookupReply {
    match found {
        Err(error) => v1::LookupReply { outcome: Some(lookup_refusal(&error).to_outcome()), ..Default::default() },
        Ok(found) => {
            let mtime = found.looked.namespace_mtime.unwrap_or_default();
            v1::LookupReply {
                outcome: Some(ok_outcome()),
                // A name is one or the other; while both could be seen the object is what the proof covers.
                directory: found.looked.directory && found.looked.object.is_none(),
                descriptor: found.looked.object.map(|object| object.to_message()),
                proof: Some(found.proof.to_message()),
                directory_mtime_seconds: mtime.seconds,
                directory_mtime_nanoseconds: mtime.nanoseconds,
            }
        }
    }
}

fn refused(refusal: &Refusal) -> v1::LookupReply {
    v1::LookupReply { outcome: Some(refusal.to_outcome()), ..Default::default() }
}

impl Server {
    /// A lookup that came by the control plane; its scope is checked here.
    pub async fn control_lookup(&self, request: &v1::LookupRequest, who: Option<&Identity>) -> v1::LookupReply {
        count(&self.node.counters.lookups);
        if let Err(refusal) = self.node.check_scope(request.scope.as_ref()) {
            return refused(&refusal);
        }
        match ObjectName::from_message(request.name.as_ref()) {
            Ok(name) => match self.node.check_access(who, &name.namespace, Need::Read) {
                Ok(()) => lookup_reply(self.node.publisher.lookup(&name).await),
                Err(refusal) => refused(&refusal),
            },
            Err(error) => refused(&Refusal::new(Code::Invalid, error.to_string())),
        }
    }

    /// A lookup that came by a rail, whose scope is the frame's.
    pub(super) fn rail_lookup(
        self: &Arc<Self>,
        request: &v1::LookupRequest,
        who: Option<&Identity>,
        due: Due,
        answer: Answer,
    ) {
        count(&self.node.counters.lookups);
        let name = match ObjectName::from_message(request.name.as_ref()) {
            Ok(name) => name,
            Err(error) => {
                count(&self.node.counters.invalid);
                return answer.refuse(&Refusal::new(Code::Invalid, error.to_string()));
            }
        };
        if let Err(refusal) = self.node.check_access(who, &name.namespace, Need::Read) {
            return answer.refuse(&refusal);
        }
        if due.is_over(&self.node) {
            return answer.refuse(&Due::refusal());
        }
        if let Some(found) = self.node.publisher.try_lookup(&name) {
            return answer.lookup(lookup_reply(found));
        }
        let server = Arc::clone(self);
        self.node.runtime.spawn(async move {
            answer.lookup(lookup_reply(server.node.publisher.lookup(&name).await));
        });
    }

    /// All proofs of one frame. One that is held up by a publish holds up the frame, not the connection.
    pub(super) fn check(self: &Arc<Self>, request: &v1::CheckRequest, answer: Answer) {
        add(&self.node.counters.checks, request.proofs.len() as u64);
        if request.proofs.is_empty() || request.proofs.len() > MAX_CHECKS {
            count(&self.node.counters.invalid);
            let message = format!("{} proofs in one check, not 1 to {MAX_CHECKS}", request.proofs.len());
            return answer.refuse(&Refusal::new(Code::Invalid, message));
        }
        let mut results = Vec::with_capacity(request.proofs.len());
        let mut held = Vec::new();
        for (place, proof) in request.proofs.iter().enumerate() {
            match self.node.publisher.check(&proof_of(proof)) {
                Ok(Checked::Now(result)) => results.push(result),
                Ok(Checked::Held(later)) => {
                    held.push((place, later));
                    results.push(self.in_progress());
                }
                Err(error) => return answer.refuse(&check_refusal(&error)),
            }
        }
        if held.is_empty() {
            return answer.body(rail_reply::Body::Check(v1::CheckReply { results }));
        }
        // All of them wait at the same time: their limit counts from now.
        let waits: Vec<_> = held.into_iter().map(|(place, later)| (place, self.node.runtime.spawn(later))).collect();
        self.node.runtime.spawn(async move {
            for (place, wait) in waits {
                if let (Ok(Ok(result)), Some(slot)) = (wait.await, results.get_mut(place)) {
                    *slot = result;
                }
            }
            answer.body(rail_reply::Body::Check(v1::CheckReply { results }));
        });
    }

    /// A word that fails its check bits: "in progress" to whoever reads it, equal to no proof.
    fn in_progress(&self) -> CheckResult {
        CheckResult { current: false, value: Slot::START.encode(self.node.incarnation) ^ 1 }
    }

    /// The proof of a fetch, as things are now; `None` while the name is being published.
    pub(super) fn check_now(&self, proof: &Proof) -> Option<CheckResult> {
        match self.node.publisher.check(proof) {
            Ok(Checked::Now(result)) => Some(result),
            _ => None,
        }
    }
}

/// As it came; whatever is wrong with it the publisher finds.
pub(super) fn proof_of(proof: &v1::SlotProof) -> Proof {
    Proof {
        node: proof.node.clone(),
        incarnation: proof.incarnation,
        slot: proof.slot,
        value: proof.value,
        name_tag: proof.name_tag,
    }
}

impl Answer {
    fn lookup(self, reply: v1::LookupReply) {
        let outcome = reply.outcome.clone();
        self.send(v1::RailReply { outcome, body: Some(rail_reply::Body::Lookup(reply)) });
    }
}
