//! STATFS: the store's space, from the server's account.
//!
//! Guarantees: at most one question is under way and at most one a second is asked, however many programs ask; when the
//! server is gone the last known answer is given (zeros before there was one), never an error.

use super::{FileSystem, Shared};
use railfs_engine::clock::Time;
use railfs_engine::error::Error;
use railfs_proto::v1::StatusReply;
use std::collections::HashSet;
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

/// The sum over the file systems that the server's directories lie on, each counted once.
fn sum(reply: &StatusReply) -> Space {
    let mut counted = HashSet::new();
    // A server that does not say which file system a directory is on says 0 of all: they count each.
    let one_each = reply.directories.iter().filter(|d| d.filesystem == 0 || counted.insert(d.filesystem));
    let (mut total, mut available) = (0u64, 0u64);
    for directory in one_each {
        total = total.saturating_add(directory.total_bytes);
        available = available.saturating_add(directory.available_bytes);
    }
    let block = u64::from(BLOCK);
    Space { blocks: total / block, available: available / block, files: reply.objects }
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

#[cfg(test)]
mod tests {
    use super::*;
    use railfs_proto::v1::DirectoryStatus;

    #[test]
    fn a_disk_counts_once_however_many_directories_are_on_it() {
        let on = |filesystem, total_bytes| DirectoryStatus {
            filesystem,
            total_bytes,
            available_bytes: total_bytes / 2,
            ..Default::default()
        };
        let space = |directories: Vec<DirectoryStatus>| {
            let space = sum(&StatusReply { directories, objects: 3, ..Default::default() });
            (space.blocks, space.available, space.files)
        };
        let block = u64::from(BLOCK);
        assert_eq!(space(vec![on(7, 10 * block), on(7, 10 * block), on(8, 4 * block)]), (14, 7, 3));
        assert_eq!(space(vec![on(0, 10 * block), on(0, 10 * block)]), (20, 10, 3), "an older server does not say");
        assert_eq!(space(vec![on(1, u64::MAX), on(2, u64::MAX)]).0, u64::MAX / block);
        assert_eq!(space(vec![]), (0, 0, 3));
    }
}
