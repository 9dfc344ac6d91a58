//! Protection domains, registered memory, memory windows, and message buffers.
//!
//! Guarantees: memory stays mapped for as long as it is registered; a [`Slice`] lies inside its registration; what a peer
//! may do with memory is said by [`Access`] and nowhere else.

use super::cq::Cq;
use super::{BYTES, Context, REGIONS, VerbsError, WINDOWS, failed, leak};
use rdma_sys::{ibv_access_flags, ibv_mr, ibv_mw, ibv_pd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What may be done with memory or through a queue pair. The only place that sets access flags (I7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Nothing from outside: message buffers, what WRITEs are made from, a queue pair that nobody writes through.
    Local,
    /// Memory that windows are bound over: by itself nothing from outside.
    Landing,
    /// Memory that the other side writes to without a window: only where the device has none (said loudly).
    OpenLanding,
    /// Through this queue pair the other side may write, where a window or key allows it.
    Written,
    /// Through this queue pair the other side may write, and read what is offered to it: where a window allows the one or the other.
    WrittenAndRead,
    /// What a window over a landing gives: writing.
    Window,
    /// What a window over bytes that are offered gives: reading.
    SourceWindow,
    /// A server's version slots, and the queue pairs that they are read through: the other side may read, and nothing else.
    Slots,
}

impl Access {
    pub(super) fn bits(self) -> u32 {
        match self {
            Access::Local => ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0,
            Access::Window => ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0,
            Access::SourceWindow | Access::Slots => ibv_access_flags::IBV_ACCESS_REMOTE_READ.0,
            Access::Landing => Access::Local.bits() | ibv_access_flags::IBV_ACCESS_MW_BIND.0,
            Access::OpenLanding | Access::Written => Access::Local.bits() | Access::Window.bits(),
            Access::WrittenAndRead => Access::Written.bits() | Access::SourceWindow.bits(),
        }
    }
    pub(super) fn code(self) -> i32 {
        // All flags are small.
        i32::try_from(self.bits()).unwrap_or(0)
    }
}

/// A protection domain: keys of one mean nothing in another.
#[derive(Clone, Debug)]
pub struct Pd(pub(super) Arc<PdInner>);

#[derive(Debug)]
pub(super) struct PdInner {
    pub(super) raw: NonNull<ibv_pd>,
    pub(super) context: Context,
}

// SAFETY: see ContextInner: verbs lock inside, and the pointer is freed once.
unsafe impl Send for PdInner {}
// SAFETY: as above.
unsafe impl Sync for PdInner {}

impl Pd {
    /// A new one on an open device.
    pub fn new(context: &Context) -> Result<Pd, VerbsError> {
        // SAFETY: an open context.
        let raw = NonNull::new(unsafe { (context.0.library.ibv_alloc_pd)(context.0.raw.as_ptr()) });
        let raw = raw.ok_or_else(|| failed("ibv_alloc_pd", context.name(), None))?;
        Ok(Pd(Arc::new(PdInner { raw, context: context.clone() })))
    }

    /// Of this device.
    pub fn context(&self) -> &Context {
        &self.0.context
    }
}

impl Drop for PdInner {
    fn drop(&mut self) {
        // SAFETY: allocated by us, freed once; whatever was made in it holds an Arc of this.
        let code = unsafe { (self.context.0.library.ibv_dealloc_pd)(self.raw.as_ptr()) };
        if code != 0 {
            leak(&failed("ibv_dealloc_pd", self.context.name(), Some(code)));
            std::mem::forget(self.context.clone());
        }
    }
}

/// Memory that can be registered.
///
/// # Safety
/// The region is mapped for as long as the value lives, wherever it is moved, and no reference to bytes of it exists while a
/// device may write to them.
pub unsafe trait Registrable: Send + Sync + 'static {
    /// Start and bytes.
    fn region(&self) -> (NonNull<u8>, usize);
}

// SAFETY: the mapping lives as long as any clone of the arena; slices of it exist only for `Fenced` extents, to which nobody
// else can write.
unsafe impl Registrable for crate::memory::Arena {
    fn region(&self) -> (NonNull<u8>, usize) {
        crate::memory::Arena::region(self)
    }
}

// SAFETY: the words live as long as any clone of the Arc, which the registration keeps, and do not move with it. They are atomic:
// whatever a device does there, a shared reference to them stays valid.
unsafe impl Registrable for Arc<[std::sync::atomic::AtomicU64]> {
    fn region(&self) -> (NonNull<u8>, usize) {
        let words: &[std::sync::atomic::AtomicU64] = self;
        (NonNull::from(words).cast(), size_of_val(words))
    }
}

/// Registered memory.
pub struct Mr {
    raw: NonNull<ibv_mr>,
    base: u64,
    length: usize,
    pd: Pd,
    memory: Option<Box<dyn Registrable>>,
}

// SAFETY: see ContextInner.
unsafe impl Send for Mr {}
// SAFETY: as above; the memory behind it is only named, never touched, from here.
unsafe impl Sync for Mr {}

impl std::fmt::Debug for Mr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mr").field("device", &self.pd.context().name()).field("bytes", &self.length).finish()
    }
}

/// Part of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    pub(super) address: u64,
    pub(super) length: u32,
    pub(super) key: u32,
    pub(super) mr: usize,
}

impl Slice {
    /// Where it begins, as the other side names it.
    pub fn address(&self) -> u64 {
        self.address
    }
    /// Bytes.
    pub fn length(&self) -> u32 {
        self.length
    }
}

impl Mr {
    /// Registers memory. The error names bytes and device; memlock is what it usually is about.
    pub fn register(pd: &Pd, memory: impl Registrable, access: Access) -> Result<Arc<Mr>, VerbsError> {
        let (base, length) = memory.region();
        let library = pd.0.context.0.library;
        // SAFETY: a mapped region (Registrable) that is kept in the value until it was deregistered.
        let raw = unsafe { (library.ibv_reg_mr)(pd.0.raw.as_ptr(), base.as_ptr().cast(), length, access.code()) };
        let raw = NonNull::new(raw)
            .ok_or_else(|| failed("ibv_reg_mr", format!("{length} bytes on {}", pd.context().name()), None))?;
        let base = base.as_ptr().addr() as u64;
        REGIONS.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(length as u64, Ordering::Relaxed);
        Ok(Arc::new(Mr { raw, base, length, pd: pd.clone(), memory: Some(Box::new(memory)) }))
    }

    /// Bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// The key by which the other side names it: only of use where it may write (no windows) or read (slots).
    pub fn remote_key(&self) -> u32 {
        // SAFETY: registered for as long as `self`.
        unsafe { (*self.raw.as_ptr()).rkey }
    }

    fn local_key(&self) -> u32 {
        // SAFETY: registered for as long as `self`.
        unsafe { (*self.raw.as_ptr()).lkey }
    }

    /// `length` bytes from `offset`, if they lie inside.
    pub fn slice(&self, offset: u64, length: u32) -> Option<Slice> {
        let end = offset.checked_add(u64::from(length))?;
        if end > self.length as u64 {
            return None;
        }
        let mr = self.raw.as_ptr().expose_provenance();
        Some(Slice { address: self.base + offset, length, key: self.local_key(), mr })
    }

    /// `length` bytes from a pointer into it, if they lie inside.
    pub fn slice_at(&self, pointer: NonNull<u8>, length: u32) -> Option<Slice> {
        self.slice((pointer.as_ptr().addr() as u64).checked_sub(self.base)?, length)
    }

    pub(super) fn is_in(&self, pd: &Pd) -> bool {
        Arc::ptr_eq(&self.pd.0, &pd.0)
    }

    pub(super) fn holds(&self, slice: &Slice) -> bool {
        slice.mr == self.raw.as_ptr().addr()
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: registered by us, deregistered once. Queue pairs that may name it hold an Arc of it, so none is left.
        let code = unsafe { (self.pd.0.context.0.library.ibv_dereg_mr)(self.raw.as_ptr()) };
        if code != 0 {
            leak(&failed("ibv_dereg_mr", format!("{self:?}"), Some(code)));
            // The device may still reach it: it stays mapped, and what it hangs on stays there.
            std::mem::forget(self.memory.take());
            std::mem::forget(self.pd.clone());
            return;
        }
        REGIONS.fetch_sub(1, Ordering::Relaxed);
        BYTES.fetch_sub(self.length as u64, Ordering::Relaxed);
    }
}

/// A memory window of type 2: a key over one piece of memory for one queue pair, until it is invalidated.
#[derive(Debug)]
pub struct Window {
    raw: NonNull<ibv_mw>,
    pd: Pd,
    freed: bool,
}

// SAFETY: see ContextInner.
unsafe impl Send for Window {}
// SAFETY: as above; changing it takes `&mut`.
unsafe impl Sync for Window {}

impl Window {
    /// A new one, bound to nothing.
    pub fn new(pd: &Pd) -> Result<Window, VerbsError> {
        let context = pd.0.context.0.raw.as_ptr();
        // SAFETY: an open context has its table of operations.
        let allocate = unsafe { (*context).ops.alloc_mw };
        let allocate = allocate.ok_or_else(|| failed("ibv_alloc_mw", pd.context().name(), Some(libc::EOPNOTSUPP)))?;
        // SAFETY: a live domain of that context.
        let raw = NonNull::new(unsafe { allocate(pd.0.raw.as_ptr(), rdma_sys::ibv_mw_type::IBV_MW_TYPE_2) });
        let raw = raw.ok_or_else(|| failed("ibv_alloc_mw", pd.context().name(), None))?;
        WINDOWS.fetch_add(1, Ordering::Relaxed);
        Ok(Window { raw, pd: pd.clone(), freed: false })
    }

    /// The key of the last binding: what the other side names, and what an invalidation must name.
    pub fn key(&self) -> u32 {
        // SAFETY: allocated for as long as `self`.
        unsafe { (*self.raw.as_ptr()).rkey }
    }

    pub(super) fn raw(&self) -> *mut ibv_mw {
        self.raw.as_ptr()
    }

    /// The key that the next binding gives: the same window, the next generation.
    pub fn upcoming_key(&self) -> u32 {
        let key = self.key();
        (key & !0xff) | (key.wrapping_add(1) & 0xff)
    }

    /// After a binding was posted: the library leaves this to us, and the next binding needs it.
    pub(super) fn bound(&mut self, key: u32) {
        // SAFETY: allocated for as long as `self`, which is held alone.
        unsafe { (*self.raw.as_ptr()).rkey = key };
    }

    fn deallocate(&mut self) -> Result<(), VerbsError> {
        let context = self.pd.0.context.0.raw.as_ptr();
        self.freed = true;
        // SAFETY: an open context has its table of operations.
        let Some(free) = (unsafe { (*context).ops.dealloc_mw }) else {
            return Err(failed("ibv_dealloc_mw", self.pd.context().name(), Some(libc::EOPNOTSUPP)));
        };
        // SAFETY: allocated by us, freed once (`freed`).
        match unsafe { free(self.raw.as_ptr()) } {
            0 => {
                WINDOWS.fetch_sub(1, Ordering::Relaxed);
                Ok(())
            }
            code => Err(failed("ibv_dealloc_mw", self.pd.context().name(), Some(code))),
        }
    }

    /// Takes it away from the device. Success is a fence: nobody writes through it any more.
    pub fn free(mut self) -> Result<(), VerbsError> {
        self.deallocate()
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if !self.freed
            && let Err(error) = self.deallocate()
        {
            leak(&error);
            std::mem::forget(self.pd.clone());
        }
    }
}

/// Memory for messages: mapped, registered with no access from outside, read and written by copies only.
#[derive(Debug)]
pub struct Buffers {
    base: NonNull<u8>,
    length: usize,
    mr: Arc<Mr>,
}

// SAFETY: `base` points into the mapping that `mr` keeps; it is only used by the two copying functions.
unsafe impl Send for Buffers {}
// SAFETY: as above. Two copies at once touch different bytes: a slot belongs to whoever took it, see the rail.
unsafe impl Sync for Buffers {}

struct Pages(memmap2::MmapRaw, NonNull<u8>);

// SAFETY: a mapping of its own, which nothing refers to by reference.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}
// SAFETY: the mapping lives in the value and does not move with it.
unsafe impl Registrable for Pages {
    fn region(&self) -> (NonNull<u8>, usize) {
        (self.1, self.0.len())
    }
}

impl Buffers {
    /// Maps and registers `length` bytes.
    pub fn new(pd: &Pd, length: usize) -> Result<Buffers, VerbsError> {
        let none = |error: std::io::Error| failed("mmap", format!("{length} bytes"), error.raw_os_error());
        let map = memmap2::MmapRaw::from(memmap2::MmapOptions::new().len(length).map_anon().map_err(none)?);
        let base = NonNull::new(map.as_mut_ptr()).ok_or_else(|| failed("mmap", format!("{length} bytes"), None))?;
        let mr = Mr::register(pd, Pages(map, base), Access::Local)?;
        Ok(Buffers { base, length, mr })
    }

    /// Its registration.
    pub fn mr(&self) -> &Arc<Mr> {
        &self.mr
    }

    /// Copies `bytes` in at `offset`, if they fit: only where no posted work names that place.
    pub fn fill(&self, offset: usize, bytes: &[u8]) -> bool {
        if offset.checked_add(bytes.len()).is_none_or(|end| end > self.length) {
            return false;
        }
        // SAFETY: inside the mapping (just checked), which `mr` keeps; `bytes` cannot overlap it: no reference to the mapping
        // is ever made. Nobody else writes there: the slot is the caller's.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.as_ptr().add(offset), bytes.len()) };
        true
    }

    /// Copies `length` bytes out from `offset` (fewer at the end): only where the receive into them was completed.
    pub fn take(&self, offset: usize, length: usize) -> Vec<u8> {
        let length = length.min(self.length.saturating_sub(offset));
        let mut out = Vec::with_capacity(length);
        // SAFETY: inside the mapping, as above; the target has that capacity, and is initialised by the copy.
        unsafe {
            std::ptr::copy_nonoverlapping(self.base.as_ptr().add(offset.min(self.length)), out.as_mut_ptr(), length);
            out.set_len(length);
        }
        out
    }
}

/// What a queue pair may name in its work: kept registered for as long as the pair exists.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    pub(super) pd: Pd,
    pub(super) memory: Vec<Arc<Mr>>,
    /// Named by nothing; destroyed after the pair because it is kept here.
    pub(super) _cq: Cq,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The other side of two examples in the module's page, which names of that kind can have only in here.
    #[test]
    fn i4_i7_what_does_not_compile_outside_is_called_so_inside() {
        let slice = Slice { address: 0, length: 4096, key: 1, mr: 0 };
        assert_eq!(slice.length(), 4096);
        let _ = crate::memory::Fence::proved();
    }

    #[test]
    fn i7_what_may_be_written_is_never_read_and_what_may_be_read_is_never_written() {
        let (write, read) = (Access::Window.bits(), Access::SourceWindow.bits());
        // Memory, and windows over it. A queue pair gives nothing by itself.
        for memory in [Access::Local, Access::Landing, Access::OpenLanding, Access::Window] {
            assert_eq!(memory.bits() & read, 0, "{memory:?}");
        }
        for memory in [Access::Local, Access::Landing, Access::SourceWindow, Access::Slots] {
            assert_eq!(memory.bits() & write, 0, "{memory:?}");
        }
        assert_eq!(Access::Written.bits() & read, 0, "a pair over whose key a whole arena is open");
        assert_ne!(write, read);
    }
}
