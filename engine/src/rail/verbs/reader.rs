//! Where a server's answers come from: object bytes are read into registered memory, verified there, and written from there.
//!
//! Guarantees: no more registered memory is used than there is ([`Reader::new`]); an answer that finds none waits in line,
//! first come first served, holding nothing; bytes that fail their checksum as they come off the disk are never success.

use super::group::Group;
use super::incoming::{Finish, Ready};
use crate::memory::{Arena, Fenced};
use crate::rail::tcp::signal::{Latch, lock};
use crate::rail::{Bulk, Sent};
use crate::verbs::{Access, Mr, Pd, Slice};
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// One answer to be read and sent.
pub(super) struct Job {
    pub(super) group: Arc<Group>,
    pub(super) link: usize,
    pub(super) id: u64,
    pub(super) bulk: Bulk,
    pub(super) finish: Finish,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Answers that found no memory when their turn came.
    waited: u64,
    stopping: bool,
}

/// See the module.
pub(super) struct Reader {
    arena: Arena,
    mr: Arc<Mr>,
    queue: Mutex<Queue>,
    wake: Condvar,
    latch: Arc<Latch>,
}

impl Reader {
    /// Maps and registers `bytes` (at least 1 MiB) and starts the threads.
    pub(super) fn new(name: &str, pd: &Pd, bytes: u64, threads: usize) -> Result<Arc<Reader>, String> {
        let arena = Arena::new(bytes).map_err(|error| error.to_string())?;
        let mr = Mr::register(pd, arena.clone(), Access::Local).map_err(|error| error.to_string())?;
        let reader =
            Arc::new(Reader { arena, mr, queue: Mutex::default(), wake: Condvar::new(), latch: Arc::default() });
        for number in 0..threads.max(1) {
            let of_thread = reader.clone();
            let running = reader.latch.enter();
            let started = std::thread::Builder::new().name(format!("{name}-read{number}")).spawn(move || {
                running.begin();
                of_thread.run();
                drop(running);
            });
            if let Err(error) = started {
                reader.stop();
                return Err(format!("no thread could be started: {error}"));
            }
        }
        Ok(reader)
    }

    /// The registration, for queue pairs that write from it.
    pub(super) fn mr(&self) -> &Arc<Mr> {
        &self.mr
    }

    /// Bytes registered, bytes in use, answers that waited for memory so far.
    pub(super) fn usage(&self) -> (u64, u64, u64) {
        let stats = self.arena.stats();
        (stats.total, stats.total - stats.free, lock(&self.queue).waited)
    }

    pub(super) fn push(&self, job: Job) {
        let mut queue = lock(&self.queue);
        if queue.stopping {
            return;
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.wake.notify_one();
    }

    /// Memory came back.
    pub(super) fn released(&self) {
        // Through the lock, so that whoever has just found none is waiting by now.
        drop(lock(&self.queue));
        self.wake.notify_all();
    }

    pub(super) fn slice(&self, source: &Fenced, length: u32) -> Option<Slice> {
        self.mr.slice_at(std::ptr::NonNull::from(source.bytes()).cast(), length)
    }

    pub(super) fn stop(&self) {
        let jobs = {
            let mut queue = lock(&self.queue);
            queue.stopping = true;
            std::mem::take(&mut queue.jobs)
        };
        // They hold connections and closures: dropped outside of the lock.
        drop(jobs);
        self.wake.notify_all();
        if !self.latch.clone().wait(Duration::from_secs(1)) {
            tracing::error!("a thread that reads object bytes has not ended; it is left behind");
        }
    }

    fn run(&self) {
        loop {
            let (job, length, memory) = {
                let mut queue = lock(&self.queue);
                let mut counted = false;
                loop {
                    if queue.stopping {
                        return;
                    }
                    if let Some(front) = queue.jobs.front() {
                        let length = match &front.bulk {
                            Bulk::None => 0,
                            Bulk::Bytes(bytes) => u32::try_from(bytes.len()).unwrap_or(u32::MAX),
                            Bulk::File { length, .. } => *length,
                        };
                        let memory = self.arena.allocate(length.max(4096).next_power_of_two());
                        if let Some(memory) = memory
                            && let Some(job) = queue.jobs.pop_front()
                        {
                            break (job, length, memory);
                        }
                        if !std::mem::replace(&mut counted, true) {
                            queue.waited += 1;
                        }
                    }
                    queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
            };
            let Job { group, link, id, bulk, finish } = job;
            let (source, sent) = match bulk {
                Bulk::None => (memory.filled(&[]), Sent { bytes: 0, error: None }),
                Bulk::Bytes(bytes) => (memory.filled(&bytes), Sent { bytes: length, error: None }),
                Bulk::File { file, offset, length, check } => {
                    let (source, result) = memory.read(&file, offset, length);
                    let sent = match result {
                        Ok(got) if got == length => {
                            let good = check.is_none_or(|check| check.passes(&source.bytes()[..length as usize]));
                            let bad =
                                || io::Error::new(io::ErrorKind::InvalidData, "bytes fail their checksum on the disk");
                            Sent { bytes: got, error: (!good).then(bad) }
                        }
                        Ok(got) => Sent { bytes: got, error: None },
                        Err(error) => Sent { bytes: 0, error: Some(error) },
                    };
                    (Some(source), sent)
                }
            };
            let message = finish(sent);
            if let Some(source) = source {
                group.answer(link, id, Ready::Written(source, length, message));
            }
        }
    }
}
