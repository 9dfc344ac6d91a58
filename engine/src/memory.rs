//! The arena and its extents: memory whose type says who may still write to it.
//!
//! Guarantees (I4, I6): an extent is in exactly one of these hands, and only the moves below exist.
//!
//! ```text
//! Free --expose--> Exposed --fenced(Fence)--> Fenced --into_free / drop--> (arena)
//!   ^                 |
//!   '--- (arena)      '-- dropped without a fence: quarantined for ever, counted, never reused
//! ```
//! * [`Free`]: ours alone; dropping it gives the memory back.
//! * [`Exposed`]: a peer, a device or the kernel may still write to it. It has no safe way to its bytes.
//! * [`Fenced`]: nobody else can write to it any more. Only this one gives `&[u8]`.
//!
//! Only a rail can make a [`Fence`], and only after one of the accepted fences (docs/architecture.md).

mod arena;
pub mod ledger;
pub mod plan;
mod slots;

pub use arena::{Arena, ArenaStats, Exposed, Fence, Fenced, Free, MemoryError};
