//! The railfs transfer engine: registered memory, rails, and the read path.
//!
//! Arrows point one way: `client` -> `read` -> `cache`, `rail` -> `memory`. Memory knows no network; rails know no objects.

#![deny(unsafe_code)]

pub mod cache;
pub mod client;
pub mod clock;
pub mod control;
pub mod error;
pub mod memory;
pub mod notify;
pub mod outage;
pub mod put;
pub mod rail;
pub mod read;
pub mod tls;
#[cfg(feature = "rdma")]
pub mod verbs;
