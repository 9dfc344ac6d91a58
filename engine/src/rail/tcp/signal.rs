//! Small tools of the TCP rail's threads: a wake that poll() understands, events to be told later, and a bounded wait for
//! threads to end.
//!
//! Guarantees: a wake that is raised before or during a poll is not lost; an event handed to [`Deferred`] is taken
//! exactly once or handed back; [`Latch::wait`] returns by its limit.

use crate::rail::{Event, Events};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A panic elsewhere must not take the rail's bookkeeping with it.
pub(in crate::rail) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A wake for a poll() loop.
#[derive(Debug)]
pub(in crate::rail) struct Signal {
    fd: OwnedFd,
    raised: AtomicBool,
}

impl Signal {
    pub(in crate::rail) fn new() -> io::Result<Signal> {
        Ok(Signal { fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?, raised: AtomicBool::new(false) })
    }
    /// Raised twice is raised once: the second costs no system call.
    pub(in crate::rail) fn raise(&self) {
        if !self.raised.swap(true, Ordering::SeqCst) {
            // The counter cannot overflow: `raised` allows one write between two clears.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }
    /// Before looking at what it was raised for.
    pub(in crate::rail) fn clear(&self) {
        let _ = rustix::io::read(&self.fd, &mut [0u8; 8]);
        self.raised.store(false, Ordering::SeqCst);
    }
    pub(in crate::rail) fn is_raised(&self) -> bool {
        self.raised.load(Ordering::SeqCst)
    }
}

impl AsFd for Signal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// poll() that an interrupting signal handler only shortens. A timeout past what the kernel can say waits for ever.
pub(in crate::rail) fn poll(fds: &mut [PollFd<'_>], timeout: Option<Duration>) -> io::Result<()> {
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    match rustix::event::poll(fds, timeout.as_ref()) {
        Ok(_) => Ok(()),
        Err(rustix::io::Errno::INTR) => {
            for fd in fds {
                fd.clear_revents();
            }
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// Waits for the socket or for `stop`, until `until`.
pub(in crate::rail) fn wait(fd: BorrowedFd<'_>, flags: PollFlags, stop: &Signal, until: Instant) -> io::Result<()> {
    let now = Instant::now();
    if now >= until {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in time"));
    }
    poll(&mut [PollFd::from_borrowed_fd(fd, flags), PollFd::new(stop, PollFlags::IN)], Some(until - now))?;
    if stop.is_raised() {
        return Err(io::Error::new(io::ErrorKind::Interrupted, "closed"));
    }
    Ok(())
}

/// Events that must not be told from where they come up, until a thread of the rail tells them.
#[derive(Debug)]
pub(in crate::rail) struct Deferred(Mutex<Option<Vec<Event>>>);

impl Deferred {
    pub(in crate::rail) fn new() -> Deferred {
        Deferred(Mutex::new(Some(Vec::new())))
    }
    /// Hands the event back when nobody will tell it any more.
    pub(in crate::rail) fn push(&self, event: Event) -> Result<(), Event> {
        match lock(&self.0).as_mut() {
            Some(list) => {
                list.push(event);
                Ok(())
            }
            None => Err(event),
        }
    }
    pub(in crate::rail) fn take(&self) -> Vec<Event> {
        lock(&self.0).as_mut().map(std::mem::take).unwrap_or_default()
    }
    /// What is left; nothing is taken from here on.
    pub(in crate::rail) fn end(&self) -> Vec<Event> {
        lock(&self.0).take().unwrap_or_default()
    }
}

/// Tells an event of a rail that has ended, from a thread of its own: rare, so the thread is made for it.
pub(in crate::rail) fn tell_late(events: Arc<dyn Events>, event: Event) {
    let told = std::thread::Builder::new().name("rail-late".into()).spawn(move || events.event(event));
    if let Err(error) = told {
        tracing::error!(%error, "an answer of a closed rail was lost: no thread could be started");
    }
}

thread_local! {
    /// The latch that this thread is counted by, by address; 0: none.
    static COUNTED: Cell<usize> = const { Cell::new(0) };
}

/// Counts threads; somebody waits until there are none.
#[derive(Debug, Default)]
pub(in crate::rail) struct Latch {
    running: Mutex<usize>,
    ended: Condvar,
}

/// One thread of a [`Latch`].
#[derive(Debug)]
pub(in crate::rail) struct Running(Arc<Latch>);

impl Latch {
    pub(in crate::rail) fn enter(self: &Arc<Latch>) -> Running {
        *lock(&self.running) += 1;
        Running(self.clone())
    }
    /// Whether all have ended. One of them does not wait for itself: there the answer is yes at once.
    pub(in crate::rail) fn wait(self: &Arc<Latch>, limit: Duration) -> bool {
        if COUNTED.get() == Arc::as_ptr(self).addr() {
            return true;
        }
        let until = Instant::now() + limit;
        let mut running = lock(&self.running);
        while *running > 0 {
            let now = Instant::now();
            if now >= until {
                return false;
            }
            running = self.ended.wait_timeout(running, until - now).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Running {
    /// On the thread itself, so that [`Latch::wait`] knows it.
    pub(in crate::rail) fn begin(&self) {
        COUNTED.set(Arc::as_ptr(&self.0).addr());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        *lock(&self.0.running) -= 1;
        self.0.ended.notify_all();
    }
}
