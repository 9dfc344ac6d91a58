//! The read path.
//!
//! Guarantees (I1, I2, I3): a read is answered with all the bytes of one version that were asked for (fewer only at the
//! end of the object), every page verified against the checksum of its identity, and the version seen current by a check
//! that began after the read arrived (not where the read asks for a version as such: a page-cache fill, a snapshot); or with
//! an error.
//!
//! [`core`] decides (pure: events and a clock in, actions out); [`driver`] does what it says and decides nothing.

pub mod admission;
pub mod core;
pub mod driver;
pub mod landed;
pub mod lease;
pub mod pins;
pub mod plan;
pub mod rails;
pub mod readahead;
