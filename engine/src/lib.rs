//! The railfs transfer engine: registered memory, rails, and the read path.
//!
//! Arrows point one way: `client` -> `read` -> `cache`, `rail` -> `memory`. Memory knows no network; rails know no objects.

#![deny(unsafe_code)]

pub mod clock;
pub mod memory;
pub mod rail;
