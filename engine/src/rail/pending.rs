//! The requests of one connection that wait for their replies. Pure: the clock is passed in.
//!
//! Guarantees: an id is in the table at most once and leaves it once, with its landing; never more than the limit; once
//! closed nothing enters. [`Pending::wake_at`] is when the connection's thread must look again at the latest.

use crate::clock::Time;
use crate::memory::{Exposed, Fence};
use crate::rail::liveness::Liveness;
use crate::rail::{Cause, Event, Hand, Submission};
use railfs_proto::limits::MAX_RAIL_MESSAGE;
use std::collections::{BTreeSet, HashMap};

/// One request that waits.
#[derive(Debug)]
pub(crate) struct Entry {
    deadline: Time,
    /// The landing and how much of it may be written; none while a bulk is arriving in it.
    pub(crate) landing: Option<(Exposed, u32)>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Pending {
    entries: HashMap<u64, Entry>,
    deadlines: BTreeSet<(Time, u64)>,
    limit: usize,
    closed: bool,
    /// Beside the table, since what is due depends on it.
    pub(crate) liveness: Liveness,
    /// Until when the connection's thread may sleep.
    pub(crate) wake_at: Time,
}

impl Pending {
    pub(crate) fn new(limit: usize, liveness: Liveness) -> Pending {
        Pending {
            entries: HashMap::new(),
            deadlines: BTreeSet::new(),
            limit,
            closed: false,
            liveness,
            wake_at: Time(0),
        }
    }

    /// Exposes the landing and enters the request, or says why not and gives everything back unexposed.
    pub(crate) fn enter(&mut self, submission: Submission, now: Time) -> Result<(), (Submission, Cause)> {
        let cause = if self.closed {
            Some(Cause::Down)
        } else if submission.deadline <= now {
            Some(Cause::Expired)
        } else if self.entries.len() >= self.limit {
            Some(Cause::Refused(format!("{} requests wait for replies, the limit of a connection", self.limit)))
        } else if self.entries.contains_key(&submission.id) {
            Some(Cause::Refused(format!("request id {} is in use", submission.id)))
        } else {
            None
        };
        if let Some(cause) = cause {
            return Err((submission, cause));
        }
        let landing = submission.landing.map(|landing| (landing.extent.expose(), landing.length));
        self.deadlines.insert((submission.deadline, submission.id));
        self.entries.insert(submission.id, Entry { deadline: submission.deadline, landing });
        self.liveness.sent(now);
        Ok(())
    }

    pub(crate) fn get(&mut self, id: u64) -> Option<&mut Entry> {
        self.entries.get_mut(&id)
    }

    pub(crate) fn remove(&mut self, id: u64) -> Option<Entry> {
        let entry = self.entries.remove(&id)?;
        self.deadlines.remove(&(entry.deadline, id));
        Some(entry)
    }

    /// Whether it waits.
    pub(crate) fn contains(&self, id: u64) -> bool {
        self.entries.contains_key(&id)
    }

    /// Requests that wait.
    #[cfg_attr(not(feature = "rdma"), allow(dead_code))]
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// One whose deadline has come.
    pub(crate) fn expired(&mut self, now: Time) -> Option<(u64, Entry)> {
        let &(deadline, id) = self.deadlines.first()?;
        if deadline > now {
            return None;
        }
        self.remove(id).map(|entry| (id, entry))
    }

    /// The earliest deadline.
    pub(crate) fn next_deadline(&self) -> Time {
        self.deadlines.first().map_or(Time::NEVER, |(deadline, _)| *deadline)
    }

    /// Nothing enters any more; what is left comes out.
    pub(crate) fn close(&mut self) -> Vec<(u64, Entry)> {
        self.closed = true;
        self.deadlines.clear();
        let mut left: Vec<_> = self.entries.drain().collect();
        // In the order they were made, whatever the table's own order is.
        left.sort_unstable_by_key(|(id, _)| *id);
        left
    }
}

/// What must be wrong with a request before it is looked at by the table.
pub(crate) fn refusal(submission: &Submission) -> Option<Cause> {
    if submission.message.len() > MAX_RAIL_MESSAGE as usize {
        let text = format!("message of {} bytes is larger than {MAX_RAIL_MESSAGE}", submission.message.len());
        return Some(Cause::Refused(text));
    }
    let landing = submission.landing.as_ref()?;
    (landing.length > landing.extent.size()).then(|| {
        Cause::Refused(format!("landing of {} bytes in an extent of {}", landing.length, landing.extent.size()))
    })
}

/// A failure of something that was never entered. Its landing was never exposed, so nobody else has ever known of it.
pub(crate) fn never_sent(submission: Submission, cause: Cause) -> Event {
    let hand = submission
        .landing
        .and_then(|landing| landing.extent.expose().fenced(Fence::proved()))
        .map_or(Hand::None, Hand::Fenced);
    Event::Failed { id: submission.id, cause, hand }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rail::Lane;
    use bytes::Bytes;
    use std::time::Duration;

    fn submission(id: u64, deadline: u64) -> Submission {
        Submission { id, lane: Lane::Small, message: Bytes::new(), landing: None, deadline: Time(deadline) }
    }
    fn table(limit: usize) -> Pending {
        let second = Duration::from_secs(1);
        Pending::new(limit, Liveness::new(Time(0), second, 3 * second, second))
    }

    #[test]
    fn i9_deadlines_come_in_order_and_once() {
        let mut table = table(10);
        for (id, deadline) in [(1, 30), (2, 10), (3, 20), (4, 10)] {
            table.enter(submission(id, deadline), Time(0)).unwrap();
        }
        assert_eq!(table.next_deadline(), Time(10));
        table.remove(4).unwrap();
        let mut ids = Vec::new();
        while let Some((id, _)) = table.expired(Time(20)) {
            ids.push(id);
        }
        assert_eq!(ids, [2, 3]);
        assert_eq!(table.next_deadline(), Time(30));
        assert_eq!(table.close().len(), 1);
        assert_eq!(table.next_deadline(), Time::NEVER);
    }

    #[test]
    fn i6_over_the_limit_is_refused_and_nothing_kept() {
        let mut table = table(2);
        table.enter(submission(1, 30), Time(0)).unwrap();
        assert!(matches!(table.enter(submission(1, 30), Time(0)), Err((_, Cause::Refused(_)))));
        assert!(matches!(table.enter(submission(2, 30), Time(30)), Err((_, Cause::Expired))));
        table.enter(submission(2, 30), Time(0)).unwrap();
        assert!(matches!(table.enter(submission(3, 30), Time(0)), Err((_, Cause::Refused(_)))));
        table.remove(1).unwrap();
        table.enter(submission(3, 30), Time(0)).unwrap();
        table.close();
        assert!(matches!(table.enter(submission(4, 30), Time(0)), Err((_, Cause::Down))));
        assert!(table.is_empty());
    }
}
