//! `railfsd`, the railfs storage server, as a library.
//!
//! Arrows point one way: `daemon` -> `control`, `serve`, `put` -> `catalog` -> `store`.

#![forbid(unsafe_code)]

pub mod config;
