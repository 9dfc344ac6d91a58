//! Random schedules against the engine's real read path: reads, publishes and every kind of fault, from one seed and on a
//! virtual clock (docs/testing.md).
//!
//! Guarantees: the same seed gives the same schedule, event for event, in any process; what is current when, and who owns
//! which byte of memory, is known to the checker by itself, never asked of what is checked.
//!
//! The engine's modules are those of the engine, compiled here once more (build.rs) so that they are optimised without making
//! everybody's builds slow, and so that bugs can be planted in them without a switch in the engine.

// The modules of the engine are used as far as the read path needs them, and documented there.
#![allow(dead_code, unused_variables, missing_docs)]

include!(concat!(env!("OUT_DIR"), "/engine/lib.rs"));

pub mod planted;
pub mod schedule;
