//! Pins on the wire: what a client may ask for and what a server may answer.
//!
//! Guarantees: pure; a change names a lease and only versions that can exist, at most [`MAX_PINS`] of them and none twice;
//! an answer speaks of versions that were to be added only, and grants a lease within [`PIN_LEASE`].

use crate::limits::{LAST_UNUSED_VERSION, MAX_PINS, MAX_VERSION, PIN_LEASE};
use crate::reply::ReplyError;
use crate::v1;
use std::collections::HashSet;
use std::time::Duration;

/// The capability of a server that knows pins.
pub const CAPABILITY: &str = "pins";

/// What is wrong with a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PinError {
    /// See the message.
    #[error("a pin request names no lease")]
    NoLease,
    /// See the message.
    #[error("{0} versions in one pin request, more than {MAX_PINS}")]
    TooMany(usize),
    /// See the message.
    #[error("a pin request names {0}, which no version can be")]
    NoVersion(u64),
    /// See the message.
    #[error("a pin request names version {0} twice")]
    Twice(u64),
}

/// What is to change in the pins of a lease.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PinChange {
    /// Whose, not 0.
    pub lease: u64,
    /// Greater than those of all requests before.
    pub sequence: u64,
    /// To be kept from here on.
    pub add: Vec<u64>,
    /// No longer needed.
    pub remove: Vec<u64>,
}

impl PinChange {
    /// Checks every number.
    ///
    /// # Errors
    /// The first that is wrong.
    pub fn from_message(request: &v1::PinRequest) -> Result<PinChange, PinError> {
        if request.lease == 0 {
            return Err(PinError::NoLease);
        }
        let count = request.add.len().saturating_add(request.remove.len());
        if count > MAX_PINS {
            return Err(PinError::TooMany(count));
        }
        let mut seen = HashSet::with_capacity(count);
        for &version in request.add.iter().chain(&request.remove) {
            if version <= LAST_UNUSED_VERSION || version > MAX_VERSION {
                return Err(PinError::NoVersion(version));
            }
            if !seen.insert(version) {
                return Err(PinError::Twice(version));
            }
        }
        let (add, remove) = (request.add.clone(), request.remove.clone());
        Ok(PinChange { lease: request.lease, sequence: request.sequence, add, remove })
    }

    /// The request that says the same.
    pub fn to_message(&self) -> v1::PinRequest {
        let (add, remove) = (self.add.clone(), self.remove.clone());
        v1::PinRequest { lease: self.lease, sequence: self.sequence, add, remove }
    }
}

/// What became of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinAnswer {
    /// The lease was not known when the request came: what was added before has to be added again.
    pub fresh: bool,
    /// How long pins last without a renewal.
    pub lease: Duration,
    /// Of those to add: reclaimed already.
    pub gone: Vec<u64>,
    /// Of those to add: over the server's limits.
    pub refused: Vec<u64>,
}

impl PinAnswer {
    /// Checks a reply against its request.
    ///
    /// # Errors
    /// It answers another request, speaks of a version that was not to be added, or grants a lease that makes no sense.
    pub fn check(request: &PinChange, reply: &v1::PinReply) -> Result<PinAnswer, ReplyError> {
        let differs = |field, found, wanted| Err(ReplyError::Differs { field, found, wanted });
        if reply.sequence != request.sequence {
            return differs("pin sequence", reply.sequence, request.sequence);
        }
        let lease = Duration::from_millis(reply.lease_milliseconds.into());
        if !PIN_LEASE.contains(&lease) {
            let least = u64::try_from(PIN_LEASE.start().as_millis()).unwrap_or(u64::MAX);
            return differs("pin lease", reply.lease_milliseconds.into(), least);
        }
        let mut asked: HashSet<u64> = request.add.iter().copied().collect();
        for &version in reply.gone.iter().chain(&reply.refused) {
            if !asked.remove(&version) {
                return differs("pinned version", version, 0);
            }
        }
        Ok(PinAnswer { fresh: reply.fresh, lease, gone: reply.gone.clone(), refused: reply.refused.clone() })
    }

    /// The reply that says the same to this request.
    pub fn to_message(&self, request: &PinChange) -> v1::PinReply {
        v1::PinReply {
            sequence: request.sequence,
            fresh: self.fresh,
            lease_milliseconds: u32::try_from(self.lease.as_millis()).unwrap_or(u32::MAX),
            gone: self.gone.clone(),
            refused: self.refused.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> v1::PinRequest {
        v1::PinRequest { lease: 7, sequence: 3, add: vec![2000, 2001], remove: vec![1999] }
    }

    #[test]
    fn requests_are_checked_number_by_number() {
        let change = PinChange::from_message(&request()).unwrap();
        assert_eq!(change.to_message(), request());
        let wrong = |change: fn(&mut v1::PinRequest)| {
            let mut request = request();
            change(&mut request);
            PinChange::from_message(&request).unwrap_err()
        };
        assert_eq!(wrong(|r| r.lease = 0), PinError::NoLease);
        assert_eq!(wrong(|r| r.add = vec![LAST_UNUSED_VERSION]), PinError::NoVersion(LAST_UNUSED_VERSION));
        assert_eq!(wrong(|r| r.remove = vec![1 << 63]), PinError::NoVersion(1 << 63));
        assert_eq!(wrong(|r| r.add = vec![1999]), PinError::Twice(1999));
        assert_eq!(wrong(|r| r.add = (2000..).take(MAX_PINS).collect()), PinError::TooMany(MAX_PINS + 1));
        // The largest one fits a rail's message.
        let most =
            v1::PinRequest { add: (0..MAX_PINS as u64).map(|i| MAX_VERSION - i).collect(), ..Default::default() };
        assert!(prost::Message::encoded_len(&most) < crate::limits::MAX_RAIL_MESSAGE as usize / 2);
    }

    #[test]
    fn answers_speak_of_what_was_asked() {
        let change = PinChange::from_message(&request()).unwrap();
        let answer = PinAnswer { fresh: true, lease: Duration::from_secs(5), gone: vec![2000], refused: vec![2001] };
        let reply = answer.to_message(&change);
        assert_eq!(PinAnswer::check(&change, &reply), Ok(answer));
        let wrong = |change_reply: fn(&mut v1::PinReply)| {
            let mut reply = reply.clone();
            change_reply(&mut reply);
            PinAnswer::check(&change, &reply).is_err()
        };
        assert!(wrong(|r| r.sequence += 1) && wrong(|r| r.lease_milliseconds = 0));
        assert!(wrong(|r| r.gone = vec![1999]) && wrong(|r| r.refused = vec![2000]));
        assert!(wrong(|r| r.lease_milliseconds = u32::MAX));
    }
}
