//! What crosses a wire or lies on a disk in railfs.
//!
//! Guarantees: every decoder here is total (any bytes give a value or an error, never a panic), checks bounds before it
//! allocates, and refuses what it does not understand with a message that says what was wrong. There is no I/O here.

#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod checksum;
pub mod component;
pub mod descriptor;
pub mod frame;
pub mod hello;
pub mod layout;
pub mod limits;
pub mod logfile;
pub mod name;
pub mod pin;
pub mod reply;
pub mod slot;
pub mod status;
pub mod units;
pub mod url;
pub mod verbs;
pub mod watch;

/// Generated from `proto/*.proto`.
#[allow(missing_debug_implementations, clippy::all, clippy::pedantic)]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/railfs.v1.rs"));
}

/// The same files, compiled, as gRPC reflection serves them: an encoded `FileDescriptorSet`.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/railfs.v1.bin"));

/// The protocol versions this build speaks, lowest and highest.
pub const PROTOCOL_MIN: u32 = 1;
/// See [`PROTOCOL_MIN`].
pub const PROTOCOL_MAX: u32 = 1;
