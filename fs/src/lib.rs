//! `railfs`: mounts striped objects as a directory, and the command line.
//!
//! `fuse` translates the kernel's requests for `ops`, the file system, which asks a `backend` (the engine's client) and
//! never waits for it; `mount` owns the life of a mount; `cli` is what people type.

#![forbid(unsafe_code)]

pub mod backend;
pub mod cli;
pub mod errno;
pub mod failure;
pub mod fuse;
mod hash;
pub mod mount;
pub mod ops;
pub mod status;
pub mod tls;

#[cfg(test)]
use backend as railfs_backend;
#[cfg(test)]
#[path = "../tests/common/fake.rs"]
mod fake;
