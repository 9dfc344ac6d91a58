//! Puts: the server pulls the bytes of a new object from its client, verifies them, makes them durable, and publishes.
//!
//! Guarantees: nothing is visible before it is whole and durable (I8); every page is verified against the client's
//! checksum before it is written (I2); landing memory, pulls and puts are bounded (I6); a put ends in one way only, and
//! whatever it made is removed unless it was published, or may have been; a commit that is asked for again with the same
//! request id is answered with what came of it.

pub mod files;
pub mod placement;
pub mod plan;
pub mod recover;
pub mod schedule;

mod begin;
mod commit;
mod pull;

pub use begin::{BeginPut, catalog_refusal};
pub use commit::{Committed, conflict_refusal, publish_refusal};

use crate::catalog::RequestId;
use crate::config::PutConfig;
use crate::node::{Node, count, lock};
use crate::share::RESERVE;
use files::Components;
use lru::LruCache;
use pull::{Flying, Work};
use railfs_engine::memory::{Arena, ArenaStats, MemoryError};
use railfs_engine::rail::{Event, Events, Rail};
use railfs_proto::descriptor::Descriptor;
use railfs_proto::name::{Namespace, ObjectName};
use railfs_proto::reply::Refusal;
use railfs_proto::v1::Code;
use schedule::Schedule;
use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::{Semaphore, watch};

/// Most puts at once.
pub const MAX_PUTS: usize = 1024;
/// Ended puts whose end is remembered.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(4096).unwrap();
/// Threads that verify and write.
const WORKERS: usize = 2;
/// Threads that begin and seal puts, over all directories: of those that are of no directory's share half remain.
const AT_DISKS: usize = RESERVE / 2;

/// How far a put has come.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Fate {
    Pulling,
    /// Every byte is verified and written.
    Complete,
    Failed(Refusal),
}

/// Who may end a put now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Anyone.
    Open,
    /// Only its commit.
    Committing,
    Over,
}

type CommitResult = watch::Receiver<Option<Result<Committed, Refusal>>>;

/// Which put a request committed, and what came of it.
type Answered = (u64, Result<Committed, Refusal>);

/// One put that is under way.
#[derive(Debug)]
struct Active {
    put: u64,
    session: u64,
    name: ObjectName,
    descriptor: Descriptor,
    components: Components,
    fate: watch::Sender<Fate>,
    stage: Mutex<Stage>,
    commit: Mutex<Option<(RequestId, CommitResult)>>,
}

/// See the module's head.
#[derive(Debug)]
pub struct Puts {
    node: Arc<Node>,
    settings: PutConfig,
    arena: Arena,
    schedule: Mutex<Schedule>,
    active: Mutex<HashMap<u64, Arc<Active>>>,
    /// Pulls on rails, by request id. Rails' ids are unique, so one table serves all connections.
    flying: Mutex<HashMap<u64, Flying>>,
    /// Why puts ended that did not become visible.
    ended: Mutex<LruCache<u64, Refusal>>,
    /// What came of commits.
    done: Mutex<LruCache<RequestId, Answered>>,
    work: Mutex<Option<crossbeam_channel::Sender<Work>>>,
    next_request: AtomicU64,
    workers: Mutex<Vec<JoinHandle<()>>>,
    disks: Arc<Semaphore>,
    stopping: AtomicBool,
}

/// Takes what rails say of pulls to the threads that verify.
struct PullEvents(Arc<Puts>);

impl Events for PullEvents {
    fn event(&self, event: Event) {
        let work = match event {
            Event::State(_) => return,
            other => Work(other),
        };
        if let Some(sender) = &*lock(&self.0.work) {
            // The number of pulls in flight bounds the queue.
            let _ = sender.send(work);
        }
    }
}

impl Puts {
    /// Does what waits for disks of several directories, on one of a bounded number of threads; `limit` is for how long one
    /// is waited for.
    async fn at_disks<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let place = tokio::time::timeout(limit, Arc::clone(&self.disks).acquire_owned()).await;
        let Ok(Ok(place)) = place else {
            let hang = self.node.shares.all().iter().filter_map(|share| share.refused()).map(|refusal| refusal.message);
            let hang = hang.collect::<Vec<_>>().join("; ");
            let message = format!("{AT_DISKS} puts wait for disks, none of them for less than {limit:?}: {hang}");
            return Err(Refusal::new(Code::Unavailable, message));
        };
        let done = tokio::task::spawn_blocking(move || {
            let done = work();
            drop(place);
            done
        });
        done.await.map_err(|error| Refusal::new(Code::Unavailable, format!("a thread of the put ended: {error}")))
    }

    /// Starts the threads that verify and write. `arena` is what pulls land in.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(node: Arc<Node>, settings: PutConfig, arena: Arena) -> Result<Arc<Puts>, MemoryError> {
        let bytes = arena.stats().total;
        let (sender, receiver) = crossbeam_channel::unbounded();
        let puts = Arc::new(Puts {
            node,
            settings,
            arena,
            schedule: Mutex::default(),
            active: Mutex::default(),
            flying: Mutex::default(),
            ended: Mutex::new(LruCache::new(REMEMBERED)),
            done: Mutex::new(LruCache::new(REMEMBERED)),
            work: Mutex::new(Some(sender)),
            next_request: AtomicU64::new(1),
            workers: Mutex::default(),
            disks: Arc::new(Semaphore::new(AT_DISKS)),
            stopping: AtomicBool::new(false),
        });
        for number in 0..WORKERS {
            // Weak, so that what is queued does not keep the server's locks.
            let (weak, receiver) = (Arc::downgrade(&puts), receiver.clone());
            let thread = std::thread::Builder::new().name(format!("put-{number}")).spawn(move || {
                while let Ok(Work(event)) = receiver.recv() {
                    let Some(puts) = weak.upgrade() else { return };
                    puts.pull_event(event);
                }
            });
            let thread = thread.map_err(|source| MemoryError::Map { bytes, source })?;
            lock(&puts.workers).push(thread);
        }
        Ok(puts)
    }

    /// For the connections of clients.
    pub fn events(self: &Arc<Self>) -> Arc<dyn Events> {
        Arc::new(PullEvents(Arc::clone(self)))
    }

    /// Landing memory.
    pub fn memory(&self) -> ArenaStats {
        self.arena.stats()
    }

    /// Where a put that is under way goes.
    pub fn namespace(&self, put: u64) -> Option<Namespace> {
        self.find(put).map(|active| active.name.namespace.clone())
    }

    /// Puts under way.
    pub fn len(&self) -> usize {
        lock(&self.active).len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The session has another connection, or one fewer.
    pub fn rails_changed(&self, session: u64) {
        lock(&self.schedule).rails_changed(session);
        self.pump();
    }

    /// The session is over.
    pub fn session_ended(&self, session: u64) {
        let puts = lock(&self.schedule).of_session(session);
        for put in puts {
            self.give_up(put, Refusal::new(Code::Aborted, format!("put {put} was aborted: its session ended")));
        }
    }

    /// Aborts what made no progress for too long. To be called about once a second.
    pub fn tick(&self) {
        let idle = lock(&self.schedule).idle(self.node.clock.now());
        for put in idle {
            let limit = railfs_proto::limits::PUT_IDLE;
            self.give_up(put, Refusal::new(Code::Aborted, format!("put {put} was aborted: no progress for {limit:?}")));
        }
    }

    /// By request of the client.
    ///
    /// # Errors
    /// The put is another session's, or it is being committed.
    pub fn abort(&self, session: u64, put: u64) -> Result<(), Refusal> {
        let Some(active) = self.find(put) else { return Ok(()) };
        if active.session != session {
            return Err(Refusal::new(Code::Denied, format!("put {put} belongs to another session")));
        }
        if !self.give_up(put, Refusal::new(Code::Aborted, format!("put {put} was aborted by its client"))) {
            return Err(Refusal::new(
                Code::Conflict,
                format!("put {put} is being committed and cannot be aborted now"),
            ));
        }
        Ok(())
    }

    /// Ends all puts that are not being committed, and the threads. Bounded by what is being written.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        let all: Vec<u64> = lock(&self.active).keys().copied().collect();
        for put in all {
            self.give_up(put, Refusal::new(Code::Unavailable, "the server is stopping"));
        }
        lock(&self.work).take();
        let workers = std::mem::take(&mut *lock(&self.workers));
        for worker in workers {
            // A worker that panicked has nothing left to do.
            let _ = worker.join();
        }
    }

    /// As if the process were gone: nothing is tidied up.
    pub fn abandon(&self) {
        for active in lock(&self.active).values() {
            active.components.keep();
        }
    }

    fn find(&self, put: u64) -> Option<Arc<Active>> {
        lock(&self.active).get(&put).cloned()
    }

    /// Fails a put unless its commit has gone beyond pulling. False when it has.
    fn give_up(&self, put: u64, why: Refusal) -> bool {
        let Some(active) = self.find(put) else { return true };
        {
            let mut stage = lock(&active.stage);
            match *stage {
                Stage::Open => *stage = Stage::Over,
                Stage::Committing => return false,
                Stage::Over => return true,
            }
        }
        tracing::info!(put, object = %active.name, reason = %why.message, "put failed");
        self.fail(&active, why);
        true
    }

    /// Ends a put that did not become visible: what it made is removed.
    fn fail(&self, active: &Arc<Active>, why: Refusal) {
        count(&self.node.counters.puts_failed);
        lock(&self.ended).put(active.put, why.clone());
        self.forget(active);
        active.components.remove();
        active.fate.send_replace(Fate::Failed(why));
    }

    /// Takes the put out of all tables; pulls that are out are cancelled, so that their memory comes back.
    fn forget(&self, active: &Arc<Active>) {
        lock(&self.schedule).end(active.put);
        lock(&self.active).remove(&active.put);
        let out: Vec<(u64, u64)> = {
            let flying = lock(&self.flying);
            flying.iter().filter(|(_, f)| f.put == active.put).map(|(id, f)| (*id, f.rail)).collect()
        };
        if !out.is_empty() {
            let rails: HashMap<u64, Arc<dyn Rail>> =
                lock(&self.node.sessions).bulk(active.session).into_iter().collect();
            for (id, rail) in out {
                if let Some(rail) = rails.get(&rail) {
                    rail.cancel(id);
                }
            }
        }
    }

    fn request_id(&self) -> u64 {
        self.next_request.fetch_add(1, Ordering::Relaxed)
    }
}
