//! Models of what railfs decides, every state of which is looked at within bounds; and the code that several threads meet in,
//! under a scheduler that tries many of their orders (docs/testing.md).
//!
//! Guarantees: each model has the properties of its invariants as it is, and loses one of them in each of its broken
//! variants, so that a property that nothing could break would be noticed. The memory and inode tables here are those of the
//! engine and of the file system, copied by build.rs with other locks under them.

#![deny(unsafe_code)]
// Of the copies only a part is used here; they are documented where they come from.
#![allow(dead_code, missing_docs, clippy::len_without_is_empty)]

pub mod fetch;
pub mod publish;
pub mod stand_in;

/// What the copies use for std::sync: the scheduler's.
pub mod sync {
    pub use shuttle::sync::{Arc, Mutex, MutexGuard, atomic};
    pub use std::sync::PoisonError;
}

include!(concat!(env!("OUT_DIR"), "/threads.rs"));

/// The fences of both copies, for tests: there, only rails make one.
pub fn proved() -> memory::arena::Fence {
    memory::arena::Fence::proved()
}

/// See [`proved`].
pub fn racy_proved() -> racy_memory::arena::Fence {
    racy_memory::arena::Fence::proved()
}
