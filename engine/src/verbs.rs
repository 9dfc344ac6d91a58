//! A small safe layer over RDMA verbs: devices, ports and GIDs, protection domains, registered memory, type 2 memory
//! windows, completion queues with their channel, reliable queue pairs, posting, asynchronous events.
//!
//! Guarantees:
//! * This is the only place that names `rdma_sys`; `libibverbs` is looked up when first needed, so a program
//!   starts on a machine that has neither the library nor a device.
//! * Children keep their parents alive: a queue pair its memory, domain and completion queue, memory its domain and mapping,
//!   all of them the device. So memory is deregistered before it is unmapped, whatever is dropped first.
//! * Access rights are set in one place ([`Access`]): no other code can say what a peer may do (I7).
//! * A queue pair is brought up through its states by types: what a state forbids does not compile.
//! * Codes that this software does not know are values, never panics. Nothing panics in `Drop`: what the device refuses to
//!   give back is leaked, counted ([`leaked`]) and logged.
//!
//! What does not compile, each beside what differs from it in that one thing and does: the compiler does not check the codes, and a
//! name that has changed fails, too, but on both sides.
//!
//! A send before the queue pair can send does not compile:
//! ```compile_fail,E0599
//! use railfs_engine::verbs::{Init, Qp};
//! fn early(pair: &mut Qp<Init>) {
//!     let _ = pair.post(&mut []);
//! }
//! ```
//! ```no_run
//! use railfs_engine::verbs::{Qp, Rts};
//! fn in_time(pair: &mut Qp<Rts>) {
//!     let _ = pair.post(&mut []);
//! }
//! ```
//! Nor does a receive before it has a port:
//! ```compile_fail,E0599
//! use railfs_engine::verbs::{Qp, Reset, Slice, WrId};
//! fn early(pair: &mut Qp<Reset>, id: WrId, into: Slice) {
//!     let _ = pair.receive(id, into);
//! }
//! ```
//! ```no_run
//! use railfs_engine::verbs::{Init, Qp, Slice, WrId};
//! fn in_time(pair: &mut Qp<Init>, id: WrId, into: Slice) {
//!     let _ = pair.receive(id, into);
//! }
//! ```
//! Neither does going on with a queue pair that was handed over to its next state, or destroyed:
//! ```compile_fail,E0382
//! use railfs_engine::verbs::{Qp, Reset, PortChoice};
//! fn twice(pair: Qp<Reset>, port: &PortChoice) {
//!     let _ = pair.init(port);
//!     let _ = pair.init(port);
//! }
//! ```
//! ```no_run
//! use railfs_engine::verbs::{Qp, Reset, PortChoice};
//! fn once(pair: Qp<Reset>, port: &PortChoice) {
//!     let _ = pair.init(port);
//! }
//! ```
//! ```compile_fail,E0382
//! use railfs_engine::verbs::{Qp, Rts};
//! fn after(mut pair: Qp<Rts>) {
//!     let _ = pair.destroy();
//!     let _ = pair.post(&mut []);
//! }
//! ```
//! ```no_run
//! use railfs_engine::verbs::{Qp, Rts};
//! fn before(mut pair: Qp<Rts>) {
//!     let _ = pair.post(&mut []);
//!     let _ = pair.destroy();
//! }
//! ```
//! Nor skipping a state:
//! ```compile_fail,E0599
//! use railfs_engine::verbs::{Qp, Reset};
//! fn skip(pair: Qp<Reset>) {
//!     let _ = pair.rts(1);
//! }
//! ```
//! ```no_run
//! use railfs_engine::verbs::{Qp, Rtr};
//! fn next(pair: Qp<Rtr>) {
//!     let _ = pair.rts(1);
//! }
//! ```
//! Nor posting from two threads at once:
//! ```compile_fail,E0596
//! use railfs_engine::verbs::{Qp, Rts};
//! fn shared(pair: &Qp<Rts>) {
//!     let _ = pair.post(&mut []);
//! }
//! ```
//! ```no_run
//! use railfs_engine::verbs::{Qp, Rts};
//! fn alone(pair: &mut Qp<Rts>) {
//!     let _ = pair.post(&mut []);
//! }
//! ```
//! Nor a window that is bound twice at once, used after it was freed, nor making access rights up:
//! ```compile_fail,E0499
//! use railfs_engine::verbs::{Slice, Window, Work, WrId};
//! fn twice(window: &mut Window, id: WrId, landing: Slice) {
//!     let _ = [Work::Bind { id, window, landing }, Work::Bind { id, window, landing }];
//! }
//! ```
//! ```no_run
//! use railfs_engine::verbs::{Slice, Window, Work, WrId};
//! fn once(window: &mut Window, id: WrId, landing: Slice) {
//!     let _ = [Work::Bind { id, window, landing }];
//! }
//! ```
//! ```compile_fail,E0382
//! use railfs_engine::verbs::Window;
//! fn after(window: Window) {
//!     let _ = window.free();
//!     let _ = window.key();
//! }
//! ```
//! ```no_run
//! use railfs_engine::verbs::Window;
//! fn before(window: Window) {
//!     let _ = window.key();
//!     let _ = window.free();
//! }
//! ```
//! ```compile_fail,E0277
//! let everything = railfs_engine::verbs::Access::from(!0u32);
//! ```
//! ```no_run
//! let one = railfs_engine::verbs::Access::from(railfs_engine::verbs::Access::Local);
//! ```
//! Nor naming memory by numbers of one's own, nor reading or reusing memory to which somebody may still write:
//! ```compile_fail,E0451
//! let anywhere = railfs_engine::verbs::Slice { address: 0, length: 4096, key: 1, mr: 0 };
//! ```
//! ```compile_fail,E0599
//! use railfs_engine::memory::Exposed;
//! fn early(landing: &Exposed) -> &[u8] {
//!     landing.bytes()
//! }
//! ```
//! ```no_run
//! use railfs_engine::memory::Fenced;
//! fn late(landing: &Fenced) -> &[u8] {
//!     landing.bytes()
//! }
//! ```
//! ```compile_fail,E0382
//! use railfs_engine::memory::Free;
//! fn again(extent: Free) {
//!     let exposed = extent.expose();
//!     let _ = extent.filled(b"somebody else's");
//! }
//! ```
//! ```no_run
//! use railfs_engine::memory::Free;
//! fn each(one: Free, other: Free) {
//!     let exposed = one.expose();
//!     let _ = other.filled(b"somebody else's");
//! }
//! ```
//! Nor a fence without its proof, which only rails can make:
//! ```compile_fail,E0624
//! let proof = railfs_engine::memory::Fence::proved();
//! ```
//! (Memory of another domain is not a matter of types: [`Qp::new`] refuses it, and posting refuses memory that the pair was not made
//! for.)
#![allow(unsafe_code)]

mod cq;
mod device;
mod event;
#[cfg(test)]
pub(crate) mod fake;
mod library;
mod memory;
mod qp;

pub use cq::{Completion, Cq, Done, Status};
pub use device::{Context, DeviceFacts, Gid, GidKind, Port, PortState, devices, no_device};
pub use event::{DeviceEvent, next_event};
pub use memory::{Access, Buffers, Mr, Pd, Registrable, Slice, Window};
pub use qp::{Init, Limits, Peer, PortChoice, PostError, Qp, Reset, Rtr, Rts, Work, WrId, WrKind, mtu_bytes};

use std::sync::atomic::{AtomicU64, Ordering};

/// A verb failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} on {object} failed: {}", std::io::Error::from_raw_os_error(*errno))]
pub struct VerbsError {
    /// The verb.
    pub call: &'static str,
    /// What it was about: device, port, bytes.
    pub object: String,
    /// What the system said.
    pub errno: i32,
}

/// Some verbs give the error number, some set `errno`: here is the one place that knows both.
fn failed(call: &'static str, object: impl Into<String>, code: Option<i32>) -> VerbsError {
    let errno = code.filter(|code| *code > 0).or_else(|| std::io::Error::last_os_error().raw_os_error()).unwrap_or(0);
    VerbsError { call, object: object.into(), errno }
}

/// What this process has of its devices, the leaked things included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// Queue pairs.
    pub pairs: u64,
    /// Memory windows, bound or not.
    pub windows: u64,
    /// Registrations.
    pub regions: u64,
    /// Bytes of them: memory that is registered twice counts twice, as it does against memlock.
    pub bytes: u64,
}

static PAIRS: AtomicU64 = AtomicU64::new(0);
static WINDOWS: AtomicU64 = AtomicU64::new(0);
static REGIONS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

/// See [`Live`].
pub fn live() -> Live {
    Live {
        pairs: PAIRS.load(Ordering::Relaxed),
        windows: WINDOWS.load(Ordering::Relaxed),
        regions: REGIONS.load(Ordering::Relaxed),
        bytes: BYTES.load(Ordering::Relaxed),
    }
}

static LEAKED: AtomicU64 = AtomicU64::new(0);

/// Objects that a device refused to give back: they, and the memory they name, are kept until the process ends.
pub fn leaked() -> u64 {
    LEAKED.load(Ordering::Relaxed)
}

fn leak(error: &VerbsError) {
    LEAKED.fetch_add(1, Ordering::Relaxed);
    tracing::error!(%error, "the device does not give it back; it is kept until the process ends");
}

/// Whether verbs can be used on this machine at all, and if not why: no library, or one that is too old.
pub fn available() -> Result<(), String> {
    library::library().map(|_| ()).map_err(str::to_owned)
}
