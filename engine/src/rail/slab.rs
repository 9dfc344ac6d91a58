//! The server's slab: registered memory that object bytes are read into, verified in, kept in, and sent from.
//!
//! Guarantees:
//! * Bytes are verified as they come off the disk (I2); what fails is reported as such, and kept for nobody.
//! * What was read is kept for whoever asks for the same, by identity (see [`Identity`]), the longest unused evicted first; two who
//!   ask at once make one read. All clients and all devices share one slab.
//! * No more memory than was given to it (I6); what finds none waits in line, holding nothing.
//! * Memory that the kernel reads into, or that somebody still sends from ([`Lent`]), is not reused (I4).
//! * Reads go through io_uring where the kernel has it, else through a few threads; past the kernel's cache where the file system
//!   allows that, else through it. Both are said once, and counted.

mod table;
mod uring;

use super::tcp::signal::{Latch, Signal, lock, poll};
use super::{Bulk, Check, Sent};
use crate::memory::{Arena, Fenced, Free, MemoryError};
use rustix::event::{PollFd, PollFlags};
use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use table::{Step, Table, Want};
use uring::Ring;

/// Threads where io_uring does the waiting: they verify.
const RING_THREADS: usize = 2;
/// Reads of one ring at once.
const RING_DEPTH: u16 = 64;
/// Threads where each waits for its own read.
const READ_THREADS: usize = 16;
/// Reads of one source are at most one of so many of all: a disk that hangs leaves room for the others.
const SOURCE_SHARE: usize = 4;
/// How soon the kernel is told again of a read that it did not take.
const AGAIN: Duration = Duration::from_millis(5);
/// What direct reads must be multiples of.
const ALIGNED: u32 = 4096;

/// What bytes are, whatever file they are in: opaque here, but that its last 16 bytes name what they are read from. The same name is never used for other bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity(pub [u8; 32]);

impl Identity {
    /// What they are read from: a disk, by its last 16 bytes.
    pub fn source(&self) -> [u8; 16] {
        self.0.last_chunk().copied().unwrap_or_default()
    }
}

/// What a slab needs to keep bytes of a file for others.
#[derive(Clone, Debug)]
pub struct Kept {
    /// What they are.
    pub identity: Identity,
    /// The same file, opened by [`open_direct`], where that could be had.
    pub direct: Option<Arc<File>>,
    /// They are to be read from the disk, whatever is kept.
    pub fresh: bool,
}

/// How a slab reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reading {
    /// By io_uring where the kernel lets us, else by threads.
    #[default]
    Auto,
    /// By threads.
    Threads,
}

/// What a slab has done so far and holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlabCounters {
    /// Bytes of it.
    pub bytes: u64,
    /// Bytes that pieces take now, in use or kept.
    pub held: u64,
    /// Answered from what was kept.
    pub hits: u64,
    /// That were read.
    pub misses: u64,
    /// That waited for a read that was under way.
    pub joins: u64,
    /// Pieces dropped to make room.
    pub evicted: u64,
    /// Requests that found no memory when their turn came.
    pub waited: u64,
    /// Reads past the kernel's cache.
    pub direct: u64,
    /// Reads through the kernel's cache.
    pub buffered: u64,
    /// Whether io_uring reads.
    pub io_uring: bool,
}

/// Who wants a piece, and where it goes.
struct Waiter {
    bulk: Bulk,
    then: Then,
}

/// What is done with the bytes. Called on a thread of the slab or of whoever asked, with no lock held.
type Then = Box<dyn FnOnce(Lent, Sent) + Send>;

/// What became of a read, for all who wait for it.
struct Outcome {
    got: u32,
    error: Option<(io::ErrorKind, Option<i32>, String)>,
}

impl Outcome {
    /// For a part of `length` bytes from `skip` on.
    fn sent(&self, skip: u32, length: u32) -> Sent {
        let error = self.error.as_ref().map(|(kind, code, text)| match code {
            Some(code) => io::Error::from_raw_os_error(*code),
            None => io::Error::new(*kind, text.clone()),
        });
        Sent { bytes: self.got.saturating_sub(skip).min(length), error }
    }
}

struct Worker {
    signal: Signal,
    parked: AtomicBool,
}

type Tag = (u64, Waiter);

struct Shared {
    name: String,
    arena: Arena,
    table: Mutex<Table<Arc<Fenced>, Waiter>>,
    workers: Vec<Worker>,
    stopping: AtomicBool,
    direct: AtomicU64,
    buffered: AtomicU64,
    /// Said once that direct reads are refused.
    said: AtomicBool,
    io_uring: bool,
    latch: Arc<Latch>,
}

/// See the module. Stops when it is dropped.
pub struct Slab(Arc<Shared>);

impl std::fmt::Debug for Slab {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slab").field("name", &self.0.name).field("counters", &self.counters()).finish()
    }
}

/// Bytes of the slab in somebody's hand: they stand still, and their memory is not reused, until it is dropped. To forget
/// it is to leave the memory to whoever may still read it.
pub struct Lent {
    shared: Arc<Shared>,
    ticket: u64,
    bytes: Option<Arc<Fenced>>,
    skip: u32,
}

impl std::fmt::Debug for Lent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lent").field("ticket", &self.ticket).field("skip", &self.skip).finish_non_exhaustive()
    }
}

impl Lent {
    /// From its first byte to the end of its memory.
    pub fn bytes(&self) -> &[u8] {
        let all = self.bytes.as_ref().map_or(&[][..], |bytes| bytes.bytes());
        all.get(self.skip as usize..).unwrap_or_default()
    }
    /// Where it begins, for a device.
    pub fn start(&self) -> NonNull<u8> {
        NonNull::from(self.bytes()).cast()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // First this hand on it, so that the last one is the table's.
        drop(self.bytes.take());
        let wanted = {
            let mut table = lock(&self.shared.table);
            table.release(self.ticket);
            table.has_line()
        };
        if wanted {
            self.shared.wake();
        }
    }
}

impl Slab {
    /// Maps `bytes` (at least 1 MiB) and starts the threads.
    ///
    /// # Errors
    /// The memory cannot be mapped, or a thread not started.
    pub fn start(name: &str, bytes: u64, reading: Reading) -> Result<Arc<Slab>, MemoryError> {
        Slab::start_with(name, bytes, reading, || Ring::new(RING_DEPTH))
    }

    fn start_with(
        name: &str,
        bytes: u64,
        reading: Reading,
        ring: impl Fn() -> io::Result<Ring<Tag>>,
    ) -> Result<Arc<Slab>, MemoryError> {
        let arena = Arena::new(bytes)?;
        let failed = |source: io::Error| MemoryError::Map { bytes, source };
        let mut rings: Vec<Option<Ring<Tag>>> = Vec::new();
        if reading == Reading::Auto {
            for _ in 0..RING_THREADS {
                match ring() {
                    Ok(ring) => rings.push(Some(ring)),
                    Err(error) => {
                        tracing::warn!(%error, "io_uring cannot be had: {READ_THREADS} threads read object bytes");
                        rings.clear();
                        break;
                    }
                }
            }
        }
        let io_uring = !rings.is_empty();
        if !io_uring {
            rings = (0..READ_THREADS).map(|_| None).collect();
        }
        let at_once = if io_uring { RING_THREADS * usize::from(RING_DEPTH) } else { READ_THREADS };
        let worker = |_: &Option<Ring<Tag>>| Ok(Worker { signal: Signal::new()?, parked: AtomicBool::new(false) });
        let workers = rings.iter().map(worker).collect::<io::Result<Vec<_>>>().map_err(failed)?;
        let slab = Slab(Arc::new(Shared {
            name: name.to_owned(),
            arena,
            table: Mutex::new(Table::new(at_once.div_ceil(SOURCE_SHARE))),
            workers,
            stopping: AtomicBool::new(false),
            direct: AtomicU64::new(0),
            buffered: AtomicU64::new(0),
            said: AtomicBool::new(false),
            io_uring,
            latch: Arc::default(),
        }));
        for (number, ring) in rings.into_iter().enumerate() {
            let (shared, running) = (slab.0.clone(), slab.0.latch.enter());
            let thread = std::thread::Builder::new().name(format!("{name}-read{number}")).spawn(move || {
                running.begin();
                shared.run(number, ring);
                drop(shared);
                drop(running);
            });
            // What was started stops when `slab` is dropped here.
            thread.map_err(failed)?;
        }
        Ok(Arc::new(slab))
    }

    /// Its memory, to be registered.
    pub fn arena(&self) -> &Arena {
        &self.0.arena
    }

    /// See [`SlabCounters`].
    pub fn counters(&self) -> SlabCounters {
        let shared = &self.0;
        let (counts, held) = {
            let table = lock(&shared.table);
            (table.counts(), table.used())
        };
        SlabCounters {
            bytes: shared.arena.stats().total,
            held,
            hits: counts.hits,
            misses: counts.misses,
            joins: counts.joins,
            evicted: counts.evicted,
            waited: counts.waited,
            direct: shared.direct.load(Ordering::Relaxed),
            buffered: shared.buffered.load(Ordering::Relaxed),
            io_uring: shared.io_uring,
        }
    }

    /// Has the bytes of `bulk` (at most 1 MiB of them) read and verified, unless they are there, and calls `then` with them. What
    /// the disk does not give is zeros, and said. `then` is dropped when the slab stops before that.
    pub fn read(&self, bulk: Bulk, then: impl FnOnce(Lent, Sent) + Send + 'static) {
        let shared = &self.0;
        let want = want(&bulk);
        let waiter = Waiter { bulk, then: Box::new(then) };
        let found = {
            let mut table = lock(&shared.table);
            if shared.stopping.load(Ordering::SeqCst) {
                drop(table);
                drop(waiter);
                return;
            }
            if matches!(&waiter.bulk, Bulk::File { kept: Some(kept), .. } if kept.fresh) {
                table.forget(&want);
            }
            match table.hit(&want) {
                Some(found) => Some((found, waiter)),
                None => {
                    table.push(want, waiter);
                    None
                }
            }
        };
        match found {
            Some(((ticket, bytes, skip), waiter)) => shared.serve(ticket, bytes, skip, waiter, &Outcome::all()),
            None => shared.wake(),
        }
    }

    /// Ends the threads; who waits is not answered. Bounded by a second or so; a thread that hangs on a disk is left behind.
    pub fn stop(&self) {
        let shared = &self.0;
        shared.stopping.store(true, Ordering::SeqCst);
        let left = lock(&shared.table).end();
        // They hold connections and closures: dropped outside of the lock.
        drop(left);
        shared.workers.iter().for_each(|worker| worker.signal.raise());
        if !shared.latch.wait(Duration::from_millis(1500)) {
            tracing::error!("a thread that reads object bytes has not ended; it is left behind");
        }
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        if !self.0.stopping.load(Ordering::SeqCst) {
            self.stop();
        }
    }
}

fn want(bulk: &Bulk) -> Want {
    match bulk {
        Bulk::None => Want { identity: None, offset: 0, length: 0 },
        Bulk::Bytes(bytes) => {
            Want { identity: None, offset: 0, length: u32::try_from(bytes.len()).unwrap_or(u32::MAX) }
        }
        Bulk::File { offset, length, check, kept, .. } => {
            // Only what is verified is kept.
            let identity = kept.as_ref().filter(|_| check.is_some()).map(|kept| kept.identity);
            Want { identity, offset: *offset, length: *length }
        }
    }
}

impl Outcome {
    fn all() -> Outcome {
        Outcome { got: u32::MAX, error: None }
    }
}

impl Shared {
    /// Lets a thread look again.
    fn wake(&self) {
        if let Some(worker) = self.workers.iter().find(|worker| worker.parked.swap(false, Ordering::SeqCst)) {
            worker.signal.raise();
        }
    }

    fn serve(self: &Arc<Self>, ticket: u64, bytes: Arc<Fenced>, skip: u32, waiter: Waiter, outcome: &Outcome) {
        let sent = outcome.sent(skip, want(&waiter.bulk).length);
        let lent = Lent { shared: self.clone(), ticket, bytes: Some(bytes), skip };
        // The file, if it is the last to hold it open.
        drop(waiter.bulk);
        (waiter.then)(lent, sent);
    }

    fn next(&self) -> Option<Step<Free, Arc<Fenced>, Waiter>> {
        lock(&self.table).next(|size| self.arena.allocate(size))
    }

    /// A thread's life.
    fn run(self: &Arc<Self>, number: usize, mut ring: Option<Ring<Tag>>) {
        let Some(me) = self.workers.get(number) else { return };
        loop {
            if self.stopping.load(Ordering::SeqCst) {
                return;
            }
            let mut busy = self.turn(&mut ring);
            if !busy {
                me.signal.clear();
                me.parked.store(true, Ordering::SeqCst);
                // Whoever came before is seen now; whoever comes later sees that we are parked.
                busy = self.turn(&mut ring);
                if !busy && !self.stopping.load(Ordering::SeqCst) {
                    let mut fds = vec![PollFd::new(&me.signal, PollFlags::IN)];
                    let reads = ring.as_ref().filter(|ring| ring.len() > 0);
                    fds.extend(reads.map(|ring| PollFd::from_borrowed_fd(ring.fd(), PollFlags::IN)));
                    // What the kernel did not take makes no event: nobody else may ever ask for anything.
                    let limit = ring.as_ref().is_some_and(Ring::must_submit).then_some(AGAIN);
                    if let Err(error) = poll(&mut fds, limit) {
                        tracing::error!(%error, "a thread that reads object bytes cannot wait, and ends");
                        return;
                    }
                }
                me.parked.store(false, Ordering::SeqCst);
            }
        }
    }

    /// Begins a read, ends one; says whether there was anything to do.
    fn turn(self: &Arc<Self>, ring: &mut Option<Ring<Tag>>) -> bool {
        let mut busy = false;
        if ring.as_ref().is_none_or(Ring::has_room)
            && let Some(step) = self.next()
        {
            busy = true;
            match step {
                Step::Serve { ticket, bytes, skip, waiter } => {
                    self.serve(ticket, bytes, skip, waiter, &Outcome::all());
                }
                Step::Read { ticket, memory, waiter } => self.begin(ticket, memory, waiter, ring),
            }
        }
        if let Some(ring) = ring {
            if ring.must_submit() {
                ring.submit();
            }
            while let Some((bytes, result, (ticket, waiter))) = ring.completed() {
                busy = true;
                self.came(ticket, bytes, result, waiter);
            }
        }
        busy
    }

    fn begin(self: &Arc<Self>, ticket: u64, memory: Free, waiter: Waiter, ring: &mut Option<Ring<Tag>>) {
        let (file, offset, length) = match &waiter.bulk {
            Bulk::File { file, kept, offset, length, .. } => (direct(kept).unwrap_or(file), *offset, *length),
            Bulk::None | Bulk::Bytes(_) => return self.fill(ticket, memory, waiter),
        };
        // A whole block of the disk: what is beyond is not looked at.
        let asked = length.next_multiple_of(ALIGNED);
        let file = file.clone();
        match ring {
            Some(ring) => {
                if let Err((bytes, (ticket, waiter))) = ring.read(file, offset, asked, memory, (ticket, waiter)) {
                    self.came(ticket, bytes, Ok(0), waiter);
                }
            }
            None => {
                let (bytes, result) = memory.read(&file, offset, asked);
                self.came(ticket, bytes, result, waiter);
            }
        }
    }

    /// Bytes that are at hand.
    fn fill(self: &Arc<Self>, ticket: u64, memory: Free, waiter: Waiter) {
        let from = match &waiter.bulk {
            Bulk::Bytes(bytes) => bytes.clone(),
            _ => bytes::Bytes::new(),
        };
        let room = from.len().min(memory.size() as usize);
        // It fits: the memory was allocated for it.
        if let Some(bytes) = memory.filled(from.get(..room).unwrap_or_default()) {
            self.finish(ticket, bytes, &Outcome::all(), false, waiter);
        }
    }

    /// A read has ended, well or not.
    fn came(self: &Arc<Self>, ticket: u64, bytes: Fenced, result: io::Result<u32>, waiter: Waiter) {
        let (mut bytes, mut result) = (bytes, result);
        let Bulk::File { file, kept, offset, length, check } = &waiter.bulk else { return };
        let (offset, length, direct) = (*offset, *length, direct(kept));
        let whole = result.as_ref().is_ok_and(|got| *got >= length);
        let by = if direct.is_some() && whole { &self.direct } else { &self.buffered };
        by.fetch_add(1, Ordering::Relaxed);
        if !whole {
            if let (true, Err(error)) = (direct.is_some(), &result)
                && !self.said.swap(true, Ordering::SeqCst)
            {
                tracing::warn!(%error, "a direct read failed: such pieces are read through the kernel's cache");
            }
            // Once more, in the plainest way: a short or refused read may be one of this kind of reading alone.
            (bytes, result) = bytes.into_free().read(file, offset, length);
        }
        let mut outcome = match result {
            Ok(got) => Outcome { got: got.min(length), error: None },
            Err(error) => Outcome { got: 0, error: Some((error.kind(), error.raw_os_error(), error.to_string())) },
        };
        let mut good = outcome.got == length && outcome.error.is_none();
        if good && !passes(check.as_ref(), &bytes, length) {
            let text = "bytes fail their checksum on the disk".to_owned();
            outcome.error = Some((io::ErrorKind::InvalidData, None, text));
            good = false;
        }
        self.finish(ticket, bytes, &outcome, good, waiter);
    }

    fn finish(self: &Arc<Self>, ticket: u64, bytes: Fenced, outcome: &Outcome, good: bool, waiter: Waiter) {
        let bytes = Arc::new(bytes);
        let joined = lock(&self.table).done(ticket, bytes.clone(), good);
        let all: Vec<_> = std::iter::once((0, waiter)).chain(joined).map(|to| (to, bytes.clone())).collect();
        // From here on only the table and those who use it have a hand on it.
        drop(bytes);
        for ((skip, waiter), bytes) in all {
            self.serve(ticket, bytes, skip, waiter, outcome);
        }
    }
}

/// The file to read directly from, if there is one.
fn direct(kept: &Option<Kept>) -> Option<&Arc<File>> {
    kept.as_ref()?.direct.as_ref()
}

/// Whether the first `length` bytes are what they should be, as far as anybody can say.
fn passes(check: Option<&Check>, bytes: &Fenced, length: u32) -> bool {
    check.is_none_or(|check| bytes.bytes().get(..length as usize).is_some_and(|bytes| check.passes(bytes)))
}

/// Opens a file so that reads of it pass the kernel's cache by.
///
/// # Errors
/// The file system does not do that (`EINVAL`), or the file cannot be opened.
pub fn open_direct(path: &std::path::Path) -> io::Result<File> {
    use rustix::fs::{Mode, OFlags};
    // What was put in its place meanwhile is not waited for.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECT | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    // Some file systems would say EAGAIN to io_uring for as long as it is set.
    rustix::fs::fcntl_setfl(&file, OFlags::DIRECT)?;
    Ok(file.into())
}

#[cfg(test)]
#[path = "slab/tests.rs"]
mod tests;
