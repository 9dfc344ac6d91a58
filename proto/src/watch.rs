//! Changes as a watch brings them, checked before anything in them is used.
//!
//! Guarantees: numbers rise from where was asked on, across messages too; every key is one, and has the prefix that was
//! asked for; a put comes with the descriptor of its version.

use crate::descriptor::Descriptor;
use crate::limits::{MAX_VERSION, MAX_WATCH};
use crate::name::Key;
use crate::reply::{ReplyError, Time, check_outcome};
use crate::v1;

/// What was done to a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// This became current.
    Put(Descriptor),
    /// The name became absent.
    Delete {
        /// The delete's own version.
        version: u64,
        /// The version that was there.
        before: u64,
    },
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Its number.
    pub sequence: u64,
    /// When it was committed.
    pub time: Time,
    /// The key.
    pub key: Key,
    /// What.
    pub event: Event,
}

/// One message of a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchPage {
    /// In rising order of number.
    pub changes: Vec<Change>,
    /// Where to go on: everything wanted below this number has come.
    pub next: u64,
    /// The oldest number that can be asked for.
    pub oldest: u64,
    /// The number of the last change there was.
    pub latest: u64,
}

/// Checks one message. `from` is the number that was asked for or where the message before said to go on (0 at the beginning
/// of a watch from now on).
///
/// # Errors
/// The server's refusal, or the first claim that is wrong.
pub fn check_watch_reply(prefix: &[u8], from: u64, reply: &v1::WatchReply) -> Result<WatchPage, ReplyError> {
    check_outcome(reply.outcome.as_ref())?;
    if reply.changes.len() > MAX_WATCH {
        return Err(ReplyError::TooManyEntries { got: reply.changes.len(), limit: MAX_WATCH });
    }
    let mut least = from;
    let mut changes = Vec::with_capacity(reply.changes.len());
    for message in &reply.changes {
        let change = change(prefix, least, message)?;
        least = change.sequence.saturating_add(1);
        changes.push(change);
    }
    if reply.next < least.max(1) {
        return Err(ReplyError::Change {
            sequence: reply.next,
            problem: "is said to be next, which was passed already",
        });
    }
    Ok(WatchPage { changes, next: reply.next, oldest: reply.oldest, latest: reply.latest })
}

fn change(prefix: &[u8], least: u64, message: &v1::Change) -> Result<Change, ReplyError> {
    let wrong = |problem| ReplyError::Change { sequence: message.sequence, problem };
    if message.sequence < least.max(1) || message.sequence == u64::MAX {
        return Err(wrong("is not in order, or not one that was asked for"));
    }
    let time = Time::new(message.time_seconds, message.time_nanoseconds)?;
    let key = Key::new(message.key.clone())?;
    if !key.as_bytes().starts_with(prefix) {
        return Err(wrong("is of a key without the prefix"));
    }
    let event = match (&message.descriptor, message.deleted) {
        (Some(descriptor), false) => Event::Put(Descriptor::from_message(descriptor)?),
        (None, true) if message.version <= MAX_VERSION && message.before <= MAX_VERSION => {
            Event::Delete { version: message.version, before: message.before }
        }
        _ => return Err(wrong("is neither a put nor a delete")),
    };
    match &event {
        Event::Put(descriptor) if descriptor.version != message.version => {
            Err(wrong("has a descriptor of another version"))
        }
        _ => Ok(Change { sequence: message.sequence, time, key, event }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reply::ok_outcome;

    fn deleted(sequence: u64, key: &str) -> v1::Change {
        let key = key.as_bytes().to_vec().into();
        v1::Change { sequence, key, version: 3000, deleted: true, before: 2000, ..Default::default() }
    }

    fn reply(changes: Vec<v1::Change>, next: u64) -> v1::WatchReply {
        v1::WatchReply { outcome: Some(ok_outcome()), changes, next, oldest: 1, latest: 90 }
    }

    #[test]
    fn a_right_message_is_read_whole() {
        let page = check_watch_reply(b"a/", 5, &reply(vec![deleted(5, "a/x"), deleted(9, "a/y")], 12)).unwrap();
        assert_eq!((page.changes.len(), page.next, page.oldest, page.latest), (2, 12, 1, 90));
        assert_eq!(page.changes[1].event, Event::Delete { version: 3000, before: 2000 });
        assert!(check_watch_reply(b"", 0, &reply(vec![], 1)).is_ok());
    }

    #[test]
    fn each_wrong_claim_is_refused() {
        let put =
            |version| v1::Change { version, deleted: false, descriptor: Some(Default::default()), ..deleted(5, "a/x") };
        let cases = [
            ("before what was asked", reply(vec![deleted(4, "a/x")], 12)),
            ("twice", reply(vec![deleted(5, "a/x"), deleted(5, "a/y")], 12)),
            ("going back", reply(vec![deleted(6, "a/x"), deleted(5, "a/y")], 12)),
            ("past the end of numbers", reply(vec![deleted(u64::MAX, "a/x")], u64::MAX)),
            ("next inside", reply(vec![deleted(5, "a/x"), deleted(9, "a/y")], 9)),
            ("next before", reply(vec![], 4)),
            ("prefix", reply(vec![deleted(5, "b/x")], 12)),
            ("key", reply(vec![deleted(5, "a//x")], 12)),
            ("time", reply(vec![v1::Change { time_nanoseconds: 1_000_000_000, ..deleted(5, "a/x") }], 12)),
            ("neither", reply(vec![v1::Change { deleted: false, ..deleted(5, "a/x") }], 12)),
            ("both", reply(vec![v1::Change { deleted: true, ..put(3000) }], 12)),
            ("descriptor", reply(vec![put(3000)], 12)),
            ("version", reply(vec![v1::Change { version: u64::MAX, ..deleted(5, "a/x") }], 12)),
            ("too many", reply((5..).take(MAX_WATCH + 1).map(|n| deleted(n, "a/x")).collect(), u64::MAX)),
            ("outcome", v1::WatchReply { outcome: None, ..reply(vec![], 12) }),
        ];
        for (name, reply) in cases {
            assert!(check_watch_reply(b"a/", 5, &reply).is_err(), "{name}");
        }
    }
}
