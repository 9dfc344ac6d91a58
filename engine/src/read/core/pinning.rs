//! Pins: what the table of [`crate::read::pins`] wants said goes out as small messages, and calls are answered.

use super::small::Kind;
use super::{Action, Call, Core};
use crate::client::Object;
use crate::clock::Time;
use crate::error::Error;
use crate::outage::PROBE;
use crate::read::pins::{Counts, Standing};
use railfs_proto::limits::METADATA_DEADLINE;
use railfs_proto::pin::{PinAnswer, PinChange};
use railfs_proto::v1;
use std::sync::Arc;
use std::time::Duration;

impl Core {
    /// The version is needed until [`Core::unpin`], whatever the answer. Answered by [`Action::Checked`] once the server
    /// keeps it, or by [`Action::Fail`].
    pub fn pin(&mut self, now: Time, id: u64, object: &Arc<Object>, deadline: Time) {
        let deadline = self.within(now, deadline, PROBE);
        self.calls.insert(id, Call { began: now, deadline, what: object.name.to_string() });
        let standing = self.pins.pin(object.descriptor.version, id);
        if standing != Standing::Wanted || !self.pins.supported() {
            self.pin_answered(id, object.descriptor.version, standing);
        }
        self.say_pins(now);
    }

    /// See [`Core::pin`].
    pub fn unpin(&mut self, now: Time, version: u64) {
        // A call that was not answered in time for the last one who needed it must not be found overdue later.
        for call in self.pins.unpin(version) {
            if self.calls.remove(&call).is_some() {
                self.actions.push(Action::Checked { id: call });
            }
        }
        self.say_pins(now);
    }

    /// See [`Counts`].
    pub fn pin_counts(&self) -> Counts {
        self.pins.counts()
    }

    /// Until when nothing has to be done if nothing happens; `None`: something is under way.
    pub fn rest(&self, now: Time, longest: Duration) -> Option<Duration> {
        let left = self.pins.due(now).map_or(longest, |due| due.since(now).min(longest));
        (self.idle() && !left.is_zero()).then_some(left)
    }

    pub(super) fn say_pins(&mut self, now: Time) {
        if let Some(change) = self.pins.next(now) {
            self.new_small(now, Kind::Pin(change), now.after(METADATA_DEADLINE));
        }
    }

    pub(super) fn pins_replied(&mut self, change: &PinChange, reply: &v1::PinReply) -> Result<(), String> {
        let answer = PinAnswer::check(change, reply).map_err(|error| error.to_string())?;
        for (call, version, standing) in self.pins.answered(&answer) {
            self.pin_answered(call, version, standing);
        }
        Ok(())
    }

    fn pin_answered(&mut self, call: u64, version: u64, standing: Standing) {
        let Some(Call { what: name, .. }) = self.calls.remove(&call) else { return };
        let error = match standing {
            Standing::Held => return self.actions.push(Action::Checked { id: call }),
            Standing::Gone => Error::Stale { object: name, version },
            Standing::Refused => Error::OverBudget {
                what: format!("pin of {name}"),
                need: 1,
                limit: 0,
                cure: "the server keeps no more pins for this client: raise its retention.max_pins".to_owned(),
            },
            Standing::Wanted => {
                Error::Protocol(format!("{name}: the server is too old to keep a version for a reader"))
            }
        };
        self.actions.push(Action::Fail { id: call, error });
    }
}
