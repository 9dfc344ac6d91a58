//! One lane of a server's connection, as a rail: for what the server asks of a client.
//!
//! Guarantees: those of the connection ([`Group`]).

use super::group::Group;
use crate::rail::pending::never_sent;
use crate::rail::totals::add;
use crate::rail::{Counters, Lane, Rail, State, Submission};
use std::sync::Arc;
use std::time::Duration;

/// How long closing waits for the connection's thread.
const CLOSE: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug)]
pub(super) struct LaneRail {
    pub(super) group: Arc<Group>,
    pub(super) lane: Lane,
}

impl Rail for LaneRail {
    fn submit(&self, submission: Submission) {
        self.group.count(|totals| add(&totals.submitted, 1));
        let submission = Submission { lane: self.lane, ..submission };
        if let Err((submission, cause)) = self.group.enter(submission) {
            self.group.count(|totals| add(&totals.failed, 1));
            self.group.tell_later(never_sent(submission, cause));
        }
    }

    fn cancel(&self, id: u64) {
        if self.group.waits_for(id) {
            self.group.give_up(id);
        }
    }

    fn counters(&self) -> Counters {
        self.group.counters()
    }

    fn state(&self) -> State {
        match self.group.why() {
            Some(why) => State::Down(why.clone()),
            None if self.group.is_silent() => State::Silent,
            None => State::Up,
        }
    }

    fn close(&self) {
        self.group.close("closed");
        if !self.group.wait(CLOSE) {
            tracing::error!(rail = %self.group.parts.name, peer = %self.group.parts.peer, "the connection's thread has not ended");
        }
    }
}
