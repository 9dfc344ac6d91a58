//! Each stripe directory's share of the threads that wait for disks.
//!
//! Guarantees: at most [`SHARE`] threads are inside one directory for requests, one more looks at it and one more counts what
//! it holds; at most [`LINE`] requests wait for it, each for a bounded time and holding no thread, and none once it does not
//! answer. So a directory that hangs costs the others nothing. A thread counts until its work has really ended, however long
//! ago whoever asked gave up. That a directory does not answer is logged once, and so is that it answers again.

use crate::node::lock;
use crate::store::Store;
use railfs_engine::clock::{Clock, Time};
use railfs_proto::descriptor::Id;
use railfs_proto::reply::Refusal;
use railfs_proto::v1::Code;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

/// Threads that requests may have inside one directory.
pub const SHARE: usize = 16;
/// Requests that may wait for one directory.
pub const LINE: usize = 256;
/// Longest that one of them waits, for a thread and for its end together, where it has no shorter deadline of its own.
pub const WAIT: Duration = Duration::from_secs(5);
/// A directory does not answer when its whole share, or a look at it, has been inside for so long and nothing came back.
pub const SILENT: Duration = Duration::from_secs(3);
/// As status shows a directory that does not answer.
pub const HANGING: &str = "hanging";
/// Threads for everything else.
pub const RESERVE: usize = 64;

/// Threads that may wait for disks: every directory's share, a look at it and a count, and the reserve. They are made when
/// they are needed.
pub fn threads(directories: usize) -> usize {
    RESERVE + (SHARE + 2) * directories.min(1024)
}

/// Who is inside one directory and who waits: pure.
#[derive(Debug, Default)]
struct Book {
    next: u64,
    inside: BTreeMap<u64, Time>,
    waiting: usize,
    /// Since when the whole share is inside.
    full: Option<Time>,
    /// Since when it is looked at.
    look: Option<Time>,
    /// It was said that it does not answer.
    said: bool,
}

impl Book {
    fn enter(&mut self, now: Time) -> u64 {
        self.next += 1;
        self.inside.insert(self.next, now);
        if self.inside.len() >= SHARE {
            self.full = Some(now);
        }
        self.next
    }

    fn leave(&mut self, number: u64) {
        self.inside.remove(&number);
        // Whoever comes next fills it anew: one that is busy, and answers, is never full for long.
        self.full = None;
    }

    /// Why it is said not to answer.
    fn silent(&self, now: Time) -> Option<String> {
        let long = |since: Option<Time>| since.is_some_and(|since| now.since(since) >= SILENT);
        if !long(self.full) && !long(self.look) {
            return None;
        }
        let oldest = self.inside.values().copied().chain(self.look).min().unwrap_or(now);
        Some(format!(
            "does not answer: {} requests wait, the oldest for {} s",
            self.inside.len() + self.waiting,
            now.since(oldest).as_secs()
        ))
    }

    /// What is to be logged now: that it does not answer, or (`Err`) that it does again.
    fn news(&mut self, now: Time) -> Option<Result<String, ()>> {
        let silent = self.silent(now);
        if silent.is_some() == std::mem::replace(&mut self.said, silent.is_some()) {
            return None;
        }
        Some(silent.ok_or(()))
    }
}

/// What was last counted in a directory.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Bytes of its file system.
    pub total: u64,
    /// That are free.
    pub available: u64,
    /// The file system's number.
    pub filesystem: u64,
    /// What is in lost/.
    pub lost: crate::put::recover::LostCount,
}

/// One directory's.
#[derive(Debug)]
pub struct Share {
    id: Id,
    path: String,
    clock: Clock,
    places: Arc<Semaphore>,
    book: Mutex<Book>,
    counting: Arc<tokio::sync::Mutex<()>>,
    seen: Mutex<Seen>,
}

/// Inside until it is dropped.
struct Within(Arc<Share>, u64);

impl Drop for Within {
    fn drop(&mut self) {
        lock(&self.0.book).leave(self.1);
    }
}

/// In line until it is dropped.
struct Waiting<'a>(&'a Share);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(&self.0.book).waiting -= 1;
    }
}

/// A look at the directory, under way until it is dropped.
#[derive(Debug)]
pub struct Look(Arc<Share>);

impl Look {
    /// Of which it is.
    pub fn directory(&self) -> Id {
        self.0.id
    }
}

impl Drop for Look {
    fn drop(&mut self) {
        lock(&self.0.book).look = None;
    }
}

impl Share {
    fn new(id: Id, path: String, clock: Clock) -> Arc<Share> {
        let (places, counting) = (Arc::new(Semaphore::new(SHARE)), Arc::default());
        Arc::new(Share { id, path, clock, places, book: Mutex::default(), counting, seen: Mutex::default() })
    }

    /// Which directory.
    pub fn id(&self) -> Id {
        self.id
    }

    fn refusal(&self, why: &str) -> Refusal {
        let Share { path, id, .. } = self;
        Refusal::new(Code::Unavailable, format!("stripe directory {path} ({id}) {why}: see to its disk, and try again"))
    }

    /// Why it is said not to answer; `None`: it answers, as far as is known.
    pub fn silent(&self) -> Option<String> {
        lock(&self.book).silent(self.clock.now())
    }

    /// The same, for whoever asks for something that lies in it.
    pub fn refused(&self) -> Option<Refusal> {
        self.silent().map(|why| self.refusal(&why))
    }

    /// Does what waits for this directory's disk, and only for that, on a thread of its share. What is not over after `limit`
    /// goes on by itself.
    ///
    /// # Errors
    /// `Unavailable`, naming the directory: it does not answer, or too many wait for it.
    pub async fn run<T: Send + 'static>(
        self: &Arc<Self>,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let limit = limit.min(WAIT);
        let late = || {
            let (share, seconds) = (SHARE, limit.as_secs_f32());
            let why =
                format!("does not answer within {seconds:.1} s ({share} requests at a time may wait for its disk)");
            self.refusal(&self.silent().unwrap_or(why))
        };
        let whole = async {
            let place = match Arc::clone(&self.places).try_acquire_owned() {
                Ok(place) => place,
                Err(_) => {
                    let _waiting = self.stand_in_line()?;
                    // It is never closed.
                    Arc::clone(&self.places).acquire_owned().await.map_err(|_| self.refusal("is being given up"))?
                }
            };
            let within = Within(Arc::clone(self), lock(&self.book).enter(self.clock.now()));
            let done = spawn_blocking(move || {
                let done = work();
                // The book first, so that nobody enters it who makes it more than full.
                drop(within);
                drop(place);
                done
            });
            done.await.map_err(|error| self.refusal(&format!("was left by a thread that ended unexpectedly ({error})")))
        };
        tokio::time::timeout(limit, whole).await.unwrap_or_else(|_| Err(late()))
    }

    fn stand_in_line(&self) -> Result<Waiting<'_>, Refusal> {
        let mut book = lock(&self.book);
        if let Some(why) = book.silent(self.clock.now()) {
            return Err(self.refusal(&why));
        }
        if book.waiting >= LINE {
            return Err(self.refusal(&format!("is not answering: {LINE} requests wait for it already")));
        }
        book.waiting += 1;
        Ok(Waiting(self))
    }

    /// Begins a look at it; `None` while the one before is under way.
    pub fn look(self: &Arc<Self>) -> Option<Look> {
        let mut book = lock(&self.book);
        if book.look.is_some() {
            return None;
        }
        book.look = Some(self.clock.now());
        Some(Look(Arc::clone(self)))
    }

    /// What `count` finds; where that takes longer than `limit`, or the directory does not answer, what it found last.
    pub async fn seen(self: &Arc<Self>, limit: Duration, count: impl FnOnce() -> Seen + Send + 'static) -> Seen {
        let fresh = async {
            let counting = Arc::clone(&self.counting).lock_owned().await;
            let share = Arc::clone(self);
            let counted = spawn_blocking(move || {
                let seen = count();
                *lock(&share.seen) = seen;
                drop(counting);
            });
            // A panic there leaves what was seen last.
            let _ = counted.await;
        };
        if self.silent().is_none() {
            let _ = tokio::time::timeout(limit, fresh).await;
        }
        lock(&self.seen).clone()
    }

    /// Logs, once, that it does not answer, or that it answers again.
    pub fn tell(&self) {
        let news = lock(&self.book).news(self.clock.now());
        let (directory, path) = (self.id, &self.path);
        match news {
            Some(Ok(why)) => {
                tracing::error!(%directory, path, why, "stripe directory hangs: requests for it are refused, others are served; see to its disk")
            }
            Some(Err(())) => tracing::info!(%directory, path, "stripe directory answers again"),
            None => {}
        }
    }
}

/// Of all directories that are there.
#[derive(Debug)]
pub struct Shares(Vec<Arc<Share>>);

impl Shares {
    /// Nobody is inside any.
    pub fn new(store: &Store, clock: Clock) -> Shares {
        let of = |directory: &crate::store::StripeDirectory| {
            Share::new(directory.id(), directory.path().display().to_string(), clock)
        };
        Shares(store.directories().iter().map(of).collect())
    }

    /// Each.
    pub fn all(&self) -> &[Arc<Share>] {
        &self.0
    }

    /// The directory's; `None`: it is not there.
    pub fn of(&self, directory: Id) -> Option<&Arc<Share>> {
        self.0.iter().find(|share| share.id == directory)
    }

    /// Why the directory is said not to answer.
    pub fn silent(&self, directory: Id) -> Option<String> {
        self.of(directory).and_then(|share| share.silent())
    }
}

#[cfg(test)]
#[path = "share_tests.rs"]
mod tests;
