//! Reads by io_uring into extents. The only place of the engine that names it.
//!
//! Guarantees (I4): memory that was given to the kernel comes back with the read's completion, and not before; a file stays
//! open for as long as it is read from. A ring that is dropped waits a second for what is under way; memory that the kernel
//! has not given back by then stays in quarantine.
#![allow(unsafe_code)]

use crate::memory::{Exposed, Fence, Fenced, Free};
use crate::rail::land;
use crate::rail::tcp::signal::poll;
use io_uring::{IoUring, Probe, opcode, types};
use rustix::event::{PollFd, PollFlags};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a ring that is dropped waits for what is under way.
const DRAIN: Duration = Duration::from_secs(1);

struct Flying<T> {
    extent: Exposed,
    /// Open until the kernel is done with it.
    _file: Arc<File>,
    tag: T,
}

/// A ring of one thread.
pub(super) struct Ring<T> {
    ring: IoUring,
    flying: HashMap<u64, Flying<T>>,
    next: u64,
    depth: usize,
    /// Reads that the kernel has not been told of.
    untold: usize,
    /// Said once that it takes none.
    said: bool,
    /// So many times it takes none.
    #[cfg(test)]
    pub(super) refuses: usize,
}

impl<T> Ring<T> {
    /// A ring for `depth` reads at once, if the kernel lets us have one that reads.
    pub(super) fn new(depth: u16) -> io::Result<Ring<T>> {
        let ring = IoUring::new(u32::from(depth))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "io_uring without reads"));
        }
        // What the kernel's own threads wait for (a disk that hangs, of a file system that cannot do without) is not to hold up
        // what they do for others. Where it is refused there are some few.
        let _ = ring.submitter().register_iowq_max_workers(&mut [u32::from(depth), 0]);
        Ok(Ring {
            ring,
            flying: HashMap::new(),
            next: 0,
            depth: usize::from(depth),
            untold: 0,
            said: false,
            #[cfg(test)]
            refuses: 0,
        })
    }

    /// Reads under way.
    pub(super) fn len(&self) -> usize {
        self.flying.len()
    }

    /// Whether there are reads of which the kernel has not been told: then it is to be tried again soon, whatever else happens.
    pub(super) fn must_submit(&self) -> bool {
        self.untold > 0
    }

    pub(super) fn has_room(&self) -> bool {
        self.flying.len() < self.depth
    }

    /// Readable when a read is over.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring's descriptor is open for as long as the ring, which the borrow keeps.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }

    /// Begins to read `length` bytes at `offset`. Gives everything back where it cannot.
    pub(super) fn read(
        &mut self,
        file: Arc<File>,
        offset: u64,
        length: u32,
        memory: Free,
        tag: T,
    ) -> Result<(), (Fenced, T)> {
        let length = length.min(memory.size());
        let extent = memory.expose();
        // Proved where nothing was begun: the kernel was never told of this memory.
        let back = |extent: Exposed, tag: T| extent.fenced(Fence::proved()).map(|fenced| (fenced, tag));
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        let pushed = land::address(&extent).is_some_and(|pointer| {
            let descriptor = types::Fd(file.as_raw_fd());
            let read = opcode::Read::new(descriptor, pointer.as_ptr(), length).offset(offset);
            let entry = read.build().user_data(number);
            // SAFETY: the memory is `length` bytes inside an extent that is exposed and kept in `flying` until the completion
            // has come (or for ever); the file is kept open as long.
            self.flying.len() < self.depth && unsafe { self.ring.submission().push(&entry) }.is_ok()
        });
        if !pushed {
            return match back(extent, tag) {
                Some(back) => Err(back),
                // Cannot be: it was exposed above.
                None => Ok(()),
            };
        }
        self.flying.insert(number, Flying { extent, _file: file, tag });
        self.untold += 1;
        self.submit();
        Ok(())
    }

    /// Tells the kernel of what it does not know yet. What it does not take now is tried again by the next call: see
    /// [`Ring::must_submit`].
    pub(super) fn submit(&mut self) {
        match self.told() {
            Ok(taken) => self.untold = self.untold.saturating_sub(taken),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy
                ) => {}
            Err(error) if !self.said => {
                self.said = true;
                tracing::error!(%error, "io_uring takes no reads: it is tried again");
            }
            Err(_) => {}
        }
    }

    fn told(&mut self) -> io::Result<usize> {
        #[cfg(test)]
        if let Some(left) = self.refuses.checked_sub(1) {
            self.refuses = left;
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        self.ring.submit()
    }

    /// A read that is over: its bytes stand still.
    pub(super) fn completed(&mut self) -> Option<(Fenced, io::Result<u32>, T)> {
        loop {
            let (number, result) = {
                let completion = self.ring.completion().next()?;
                (completion.user_data(), completion.result())
            };
            let Some(Flying { extent, tag, .. }) = self.flying.remove(&number) else { continue };
            // Proved: the kernel's last completion of this read has come.
            let Some(fenced) = extent.fenced(Fence::proved()) else { continue };
            let result = u32::try_from(result).map_err(|_| io::Error::from_raw_os_error(result.saturating_neg()));
            return Some((fenced, result, tag));
        }
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        let until = Instant::now() + DRAIN;
        while !self.flying.is_empty() {
            self.submit();
            while self.completed().is_some() {}
            let left = until.saturating_duration_since(Instant::now());
            if self.flying.is_empty() || left.is_zero() {
                break;
            }
            let fd = self.fd();
            if poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(left)).is_err() {
                break;
            }
        }
        if !self.flying.is_empty() {
            tracing::error!(
                reads = self.flying.len(),
                "reads of the disk have not ended: their memory stays in quarantine"
            );
        }
    }
}
