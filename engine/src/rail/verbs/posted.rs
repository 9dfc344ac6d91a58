//! The work of one queue pair that was posted and has not been completed, and its receives. Pure.
//!
//! Guarantees (I4, I5): every use of a place has a number of its own, and work is completed in the order it was posted. A
//! completion that comes twice, before its turn, or of work that was never posted is an error that changes nothing here: what the
//! work names is kept until the queue pair is gone.

use crate::clock::Time;
use crate::verbs::{WrId, WrKind};
use std::collections::VecDeque;
use std::time::Duration;

/// Work that was posted and will be signalled; `S` keeps what it names.
pub(super) struct Posted<S> {
    pub(super) kind: WrKind,
    pub(super) slot: u16,
    /// Which use of the place it is.
    pub(super) used: u16,
    /// Work requests that it took, those before it in the same post included.
    pub(super) requests: u32,
    pub(super) source: Option<S>,
}

/// See the module.
pub(super) struct Queue<S> {
    all: VecDeque<Posted<S>>,
    /// Of posts that failed: whether the device took part of them is not known.
    kept: Vec<S>,
    uses: u16,
    /// Which use of each receive is posted.
    receives: Vec<u16>,
    /// When the last of it was completed, or the first of it posted: since when the device owes us something.
    progress: Time,
}

impl<S> Queue<S> {
    /// Of a pair on which so many receives were posted, each for the first time (use 0).
    pub(super) fn new(receives: u16) -> Queue<S> {
        let receives = vec![0; usize::from(receives)];
        Queue { all: VecDeque::new(), kept: Vec::new(), uses: 0, receives, progress: Time::NEVER }
    }

    /// The number of what is posted next.
    pub(super) fn number(&mut self) -> u16 {
        // Far more than can be under way at a time.
        self.uses = self.uses.wrapping_add(1);
        self.uses
    }

    /// It was posted: from now on the device owes us a completion, if it did not already.
    pub(super) fn push(&mut self, posted: Posted<S>, now: Time) {
        if self.all.is_empty() {
            self.progress = now;
        }
        self.all.push_back(posted);
    }

    /// Posting failed: what it named is kept to the end.
    pub(super) fn keep(&mut self, source: S) {
        self.kept.push(source);
    }

    /// The work that is done now. An error ends the connection.
    pub(super) fn done(&mut self, id: WrId, now: Time) -> Result<Posted<S>, String> {
        let is = |posted: &Posted<S>| (posted.kind, posted.slot, posted.used) == (id.kind, id.slot, id.used);
        if self.all.front().is_some_and(is)
            && let Some(posted) = self.all.pop_front()
        {
            self.progress = now;
            return Ok(posted);
        }
        let what = if self.all.iter().any(is) {
            "before that of work that was posted earlier"
        } else {
            "that was not posted, or was completed before"
        };
        Err(format!("the device says a completion of {:?} {} (use {}) {what}", id.kind, id.slot, id.used))
    }

    /// A receive is done; gives the number of its next use. An error ends the connection.
    pub(super) fn received(&mut self, id: WrId) -> Result<u16, String> {
        match self.receives.get_mut(usize::from(id.slot)).filter(|used| **used == id.used) {
            Some(used) => {
                *used = used.wrapping_add(1);
                Ok(*used)
            }
            None => Err(format!(
                "the device says a completion of receive {} (use {}) that was not posted, or was completed before",
                id.slot, id.used
            )),
        }
    }

    /// When the device has owed us a completion for `limit`.
    pub(super) fn due(&self, limit: Duration) -> Time {
        if self.all.is_empty() { Time::NEVER } else { self.progress.after(limit) }
    }

    /// Signalled work that was not completed.
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// The connection is over: what its work names.
    pub(super) fn end(&mut self) -> Vec<S> {
        let mut sources = std::mem::take(&mut self.kept);
        sources.extend(self.all.drain(..).filter_map(|posted| posted.source));
        sources
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(kind: WrKind, slot: u16, used: u16) -> WrId {
        WrId { kind, pair: 0, slot, used, generation: 1 }
    }

    fn post(queue: &mut Queue<&'static str>, kind: WrKind, slot: u16, source: Option<&'static str>, now: u64) -> WrId {
        let used = queue.number();
        queue.push(Posted { kind, slot, used, requests: 1, source }, Time(now));
        id(kind, slot, used)
    }

    #[test]
    fn i4_a_completion_that_cannot_be_changes_nothing_and_everything_comes_out_at_the_end() {
        let mut queue = Queue::new(2);
        let first = post(&mut queue, WrKind::Send, 3, None, 10);
        assert!(queue.done(first, Time(20)).is_ok());
        // The same place again: the completion of its first use is not its own.
        let second = post(&mut queue, WrKind::Send, 3, Some("second"), 30);
        let read = post(&mut queue, WrKind::Read, 3, Some("read"), 40);
        for odd in [first, read, id(WrKind::Send, 4, second.used), id(WrKind::Unknown, 3, second.used)] {
            assert!(queue.done(odd, Time(50)).is_err(), "{odd:?}");
            assert_eq!(queue.len(), 2);
        }
        assert_eq!(queue.due(Duration::from_nanos(5)), Time(35), "no progress was made");
        assert_eq!(queue.done(second, Time(60)).unwrap().source, Some("second"));
        queue.keep("posting failed");
        assert_eq!(queue.end(), ["posting failed", "read"]);
        assert_eq!((queue.len(), queue.due(Duration::ZERO)), (0, Time::NEVER));
    }

    #[test]
    fn i5_a_receive_is_completed_once() {
        let mut queue = Queue::<()>::new(2);
        let receive = |slot, used| id(WrKind::Receive, slot, used);
        assert_eq!(queue.received(receive(1, 0)), Ok(1));
        assert!(queue.received(receive(1, 0)).is_err() && queue.received(receive(2, 0)).is_err());
        assert_eq!((queue.received(receive(1, 1)), queue.received(receive(0, 0))), (Ok(2), Ok(1)));
    }
}
