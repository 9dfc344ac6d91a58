//! STATFS: the store's space, from the server's account.
//!
//! Guarantees: at most one question is under way and at most one a second is asked, however many programs ask; when the
//! server is gone the last known answer is given (zeros before there was one), never an error.

use super::{FileSystem, Shared};
use railfs_engine::clock::Time;
use railfs_engine::error::Error;
use railfs_proto::v1::StatusReply;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Unit of [`Space`], bytes.
pub const BLOCK: u32 = 4096;
/// How long an answer is good for.
const FRESH: Duration = Duration::from_secs(1);

/// What `df` shows, in units of [`BLOCK`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// All.
    pub blocks: u64,
    /// Free for puts.
    pub available: u64,
    /// Objects in the store.
    pub files: u64,
}

type Waiter = Box<dyn FnOnce(Space) + Send>;

#[derive(Default)]
struct State {
    known: Option<Space>,
    /// When the last answer or failure came.
    asked: Option<Time>,
    asking: bool,
    waiting: Vec<Waiter>,
}

#[derive(Default)]
pub(super) struct Cache(Mutex<State>);

impl Cache {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The sum over the server's directories.
fn sum(reply: &StatusReply) -> Space {
    let total = |bytes: fn(&railfs_proto::v1::DirectoryStatus) -> u64| {
        reply.directories.iter().fold(0u64, |sum, directory| sum.saturating_add(bytes(directory))) / u64::from(BLOCK)
    };
    Space { blocks: total(|d| d.total_bytes), available: total(|d| d.available_bytes), files: reply.objects }
}

impl FileSystem {
    /// STATFS.
    pub fn statfs(&self, reply: impl FnOnce(Space) + Send + 'static) {
        let now = (self.0.clock)();
        let mut state = self.0.space.state();
        if state.asked.is_some_and(|asked| now.since(asked) < FRESH) && !state.asking {
            let known = state.known.unwrap_or_default();
            drop(state);
            return reply(known);
        }
        if let (true, Some(known)) = (state.asking, state.known) {
            drop(state);
            return reply(known);
        }
        let request = self.begin();
        state.waiting.push(Box::new(move |space| {
            let _request = request;
            reply(space);
        }));
        if std::mem::replace(&mut state.asking, true) {
            return;
        }
        drop(state);
        let shared = self.0.clone();
        self.0.backend.server_status(Box::new(move |status| shared.space_known(status)));
    }
}

impl Shared {
    fn space_known(self: &Arc<Self>, status: Result<StatusReply, Error>) {
        let now = (self.clock)();
        if let Err(error) = &status {
            self.fail("statfs", &"", error);
        }
        let mut state = self.space.state();
        if let Ok(reply) = &status {
            state.known = Some(sum(reply));
        }
        state.asked = Some(now);
        state.asking = false;
        let known = state.known.unwrap_or_default();
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        for waiter in waiting {
            waiter(known);
        }
    }
}
