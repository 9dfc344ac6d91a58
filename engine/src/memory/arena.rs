//! The one mapping of extents. The only module of the engine that turns mapped memory into slices.
#![allow(unsafe_code)]

use super::slots::{BLOCK, Slot, Slots};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Why there is no arena.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// See the message.
    #[error("an arena of {0} bytes holds no extent: it needs at least {BLOCK}")]
    TooSmall(u64),
    /// See the message.
    #[error("cannot map an arena of {bytes} bytes: {source}")]
    Map {
        /// Asked for.
        bytes: u64,
        /// What the kernel said.
        source: std::io::Error,
    },
}

/// How the arena's bytes are held now. `free + owned + exposed + quarantined = total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaStats {
    /// Bytes of the arena.
    pub total: u64,
    /// Bytes in no extent.
    pub free: u64,
    /// Bytes of extents that others may still write to.
    pub exposed: u64,
    /// Bytes that lost their fence: never used again.
    pub quarantined: u64,
}

#[derive(Debug)]
struct Inner {
    /// Keeps the mapping alive; all access goes through `base`.
    map: memmap2::MmapRaw,
    base: NonNull<u8>,
    slots: Mutex<Slots>,
    total: u64,
    exposed: AtomicU64,
    quarantined: AtomicU64,
}

// SAFETY: `base` points into `map`, which lives as long as `Inner`. Access to its bytes goes only through Free, Exposed
// and Fenced, whose slots never overlap (tested in slots.rs), so two threads never touch the same bytes through them.
unsafe impl Send for Inner {}
// SAFETY: as above; everything else in `Inner` is Sync by itself.
unsafe impl Sync for Inner {}

impl Inner {
    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The arena. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Arena(Arc<Inner>);

/// A slot and the arena it belongs to. Gives the memory back when dropped.
struct Owned {
    arena: Arc<Inner>,
    slot: Slot,
}

impl Owned {
    fn pointer(&self) -> NonNull<u8> {
        // SAFETY: the slot lies inside the mapping: it was given out by `Slots`, which was made for its length.
        unsafe { self.arena.base.add(self.slot.offset as usize) }
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.arena.slots().give(self.slot);
    }
}

/// An extent that is ours alone.
pub struct Free(Owned);

/// An extent that others may still write to. Dropping it without a fence quarantines its memory for ever.
pub struct Exposed(Option<Owned>);

/// An extent whose fence has come: its bytes stand still.
pub struct Fenced(Owned);

/// Says that one of the accepted fences has come for an extent. Only rails make one.
#[derive(Debug)]
pub struct Fence(());

impl Fence {
    /// For rails, at the place where the fence is proved.
    pub(crate) fn proved() -> Fence {
        Fence(())
    }
}

macro_rules! debug_extent {
    ($($kind:ident: $slot:expr;)*) => {$(
        impl std::fmt::Debug for $kind {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!(stringify!($kind), "({:?})"), $slot(self))
            }
        }
    )*};
}
debug_extent! {
    Free: |e: &Free| e.0.slot;
    Exposed: |e: &Exposed| e.0.as_ref().map(|o| o.slot);
    Fenced: |e: &Fenced| e.0.slot;
}

impl Arena {
    /// Maps an arena of `bytes` (rounded down to whole MiB), zeroed, not yet backed by pages.
    pub fn new(bytes: u64) -> Result<Arena, MemoryError> {
        let blocks = u32::try_from(bytes / u64::from(BLOCK)).unwrap_or(u32::MAX);
        if blocks == 0 {
            return Err(MemoryError::TooSmall(bytes));
        }
        let total = u64::from(blocks) * u64::from(BLOCK);
        let failed = |source| MemoryError::Map { bytes: total, source };
        let length = usize::try_from(total).map_err(|_| failed(std::io::ErrorKind::OutOfMemory.into()))?;
        let map = memmap2::MmapRaw::from(memmap2::MmapOptions::new().len(length).map_anon().map_err(failed)?);
        // Copies in and out of large pages miss the TLB less and fault once for 2 MiB. Where there are none, it works as well.
        if let Err(error) = map.advise(memmap2::Advice::HugePage) {
            tracing::info!(%error, "the arena has no huge pages");
        }
        let base = NonNull::new(map.as_mut_ptr()).ok_or_else(|| failed(std::io::ErrorKind::OutOfMemory.into()))?;
        Ok(Arena(Arc::new(Inner {
            map,
            base,
            slots: Mutex::new(Slots::new(blocks)),
            total,
            exposed: AtomicU64::new(0),
            quarantined: AtomicU64::new(0),
        })))
    }

    /// An extent of `size` bytes (a power of two, 4 KiB to 1 MiB), or none when there is no room for it now.
    pub fn allocate(&self, size: u32) -> Option<Free> {
        let slot = self.0.slots().take(size)?;
        Some(Free(Owned { arena: self.0.clone(), slot }))
    }

    /// See [`ArenaStats`].
    pub fn stats(&self) -> ArenaStats {
        ArenaStats {
            total: self.0.total,
            free: self.0.slots().free_bytes(),
            exposed: self.0.exposed.load(Ordering::Relaxed),
            quarantined: self.0.quarantined.load(Ordering::Relaxed),
        }
    }

    /// The whole mapping, for registration with a device.
    pub fn region(&self) -> (NonNull<u8>, usize) {
        (self.0.base, self.0.map.len())
    }
}

impl Free {
    /// Bytes.
    pub fn size(&self) -> u32 {
        self.0.slot.size
    }
    /// From here on others may write to it.
    pub fn expose(self) -> Exposed {
        self.0.arena.exposed.fetch_add(u64::from(self.size()), Ordering::Relaxed);
        Exposed(Some(self.0))
    }
    /// Copies `bytes` to its start: memory that nobody else was ever told of needs no fence.
    pub fn filled(self, bytes: &[u8]) -> Option<Fenced> {
        if bytes.len() > self.size() as usize {
            return None;
        }
        // SAFETY: the slot is ours alone (Free) and at least `bytes.len()` long; `bytes` cannot overlap it, since no
        // slice of a Free slot exists.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.pointer().as_ptr(), bytes.len()) };
        Some(Fenced(self.0))
    }
    /// Reads `length` bytes (at most the extent's size) of a file from `offset` to its start; says how many there were. What
    /// is missing is zeros. Memory that nobody else was ever told of needs no fence: the kernel writes until the call returns.
    pub fn read(self, file: &File, offset: u64, length: u32) -> (Fenced, std::io::Result<u32>) {
        let length = length.min(self.size());
        let start = self.0.pointer();
        let mut got: u32 = 0;
        let mut result = Ok(());
        while got < length {
            let at = libc::off_t::try_from(offset + u64::from(got));
            let Ok(at) = at else {
                result = Err(std::io::ErrorKind::InvalidInput.into());
                break;
            };
            // SAFETY: the slot is ours alone (Free), and `got..length` lies inside it.
            let read = unsafe {
                let to = start.as_ptr().add(got as usize);
                libc::pread(file.as_raw_fd(), to.cast(), (length - got) as usize, at)
            };
            match u32::try_from(read) {
                Ok(0) => break,
                Ok(more) => got += more,
                Err(_) => {
                    let error = std::io::Error::last_os_error();
                    if error.kind() != std::io::ErrorKind::Interrupted {
                        result = Err(error);
                        break;
                    }
                }
            }
        }
        // SAFETY: as above.
        unsafe { std::ptr::write_bytes(start.as_ptr().add(got as usize), 0, (length - got) as usize) };
        (Fenced(self.0), result.map(|()| got))
    }
}

impl Exposed {
    /// Bytes.
    pub fn size(&self) -> u32 {
        self.0.as_ref().map_or(0, |owned| owned.slot.size)
    }
    /// Where a rail lets bytes land. Whoever writes there stays within [`Exposed::size`].
    pub fn landing(&self) -> Option<NonNull<u8>> {
        self.0.as_ref().map(Owned::pointer)
    }
    /// Nobody else can write to it any more.
    pub fn fenced(mut self, _proof: Fence) -> Option<Fenced> {
        let owned = self.0.take()?;
        owned.arena.exposed.fetch_sub(u64::from(owned.slot.size), Ordering::Relaxed);
        Some(Fenced(owned))
    }
}

impl Drop for Exposed {
    fn drop(&mut self) {
        if let Some(owned) = self.0.take() {
            let bytes = u64::from(owned.slot.size);
            owned.arena.exposed.fetch_sub(bytes, Ordering::Relaxed);
            owned.arena.quarantined.fetch_add(bytes, Ordering::Relaxed);
            tracing::error!(bytes, "an extent lost its fence and stays in quarantine");
            // The slot is never given back: somebody may still write to it.
            std::mem::forget(owned);
        }
    }
}

impl Fenced {
    /// Bytes.
    pub fn size(&self) -> u32 {
        self.0.slot.size
    }
    /// Its bytes. They stand still for as long as the borrow lasts.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the slot is inside the mapping and initialised (anonymous memory is zeroed); nobody writes to it: the
        // fence has come, and the only ways to write (expose, filled) consume the extent.
        unsafe { std::slice::from_raw_parts(self.0.pointer().as_ptr(), self.0.slot.size as usize) }
    }
    /// Ours alone again, to be exposed or given back.
    pub fn into_free(self) -> Free {
        Free(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i4_an_extent_without_a_fence_is_never_given_out_again() {
        let arena = Arena::new(2 << 20).unwrap();
        let lost = arena.allocate(1 << 20).unwrap().expose();
        assert_eq!(arena.stats().exposed, 1 << 20);
        drop(lost);
        assert_eq!(arena.stats(), ArenaStats { total: 2 << 20, free: 1 << 20, exposed: 0, quarantined: 1 << 20 });
        let other = arena.allocate(1 << 20).unwrap();
        assert!(arena.allocate(4 << 10).is_none());
        drop(other);
        assert!(arena.allocate(1 << 20).is_some());
        assert_eq!(arena.stats().free, 1 << 20, "the other one's memory came back, the lost one's never does");
    }

    #[test]
    fn i4_a_fenced_extent_comes_back() {
        let arena = Arena::new(1 << 20).unwrap();
        let fenced = arena.allocate(1 << 20).unwrap().expose().fenced(Fence::proved()).unwrap();
        assert_eq!(fenced.bytes().len(), 1 << 20);
        drop(fenced);
        assert_eq!(arena.stats().free, 1 << 20);
        let filled = arena.allocate(4096).unwrap().filled(b"abc").unwrap();
        assert_eq!(&filled.bytes()[..4], b"abc\0");
    }

    #[test]
    fn i6_an_arena_gives_out_no_more_than_it_has() {
        let arena = Arena::new((3 << 20) + 5).unwrap();
        let all: Vec<_> = std::iter::from_fn(|| arena.allocate(1 << 20)).collect();
        assert_eq!(all.len(), 3);
        assert!(Arena::new(4096).is_err());
        assert!(arena.allocate(12345).is_none());
    }
}
