//! The life of a mount.
//!
//! Guarantees: a place has one daemon at a time; `railfs mount` returns when the mount answers, or with the daemon's own
//! error; a signal or an unmount from outside ends the daemon in bounded time, with its mount, files and memory gone; the
//! daemon never walks into its own mount.

pub mod busy;
pub mod control;
pub mod daemon;
pub mod file;
pub mod kernel;
pub mod launch;
pub mod log;
pub mod manager;
pub mod options;
pub mod place;
pub mod probe;
pub mod reach;
pub mod runtime;
pub mod session;
pub mod table;
pub mod umount;
