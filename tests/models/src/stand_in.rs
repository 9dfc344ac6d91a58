//! What the inode table needs of the rest of the file system: no more than it looks at.

use railfs_proto::descriptor::Attributes;

/// As in the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Version.
    pub version: u64,
    /// Bytes.
    pub size: u64,
    /// Mode, time, owner.
    pub attributes: Attributes,
}

/// An object that was looked up.
#[derive(Debug)]
pub struct Object {
    /// See there.
    pub descriptor: Descriptor,
}

/// Of a descriptor, its version.
#[derive(Debug)]
pub struct Descriptor {
    /// Version.
    pub version: u64,
}

/// All paths collide.
pub fn hash(_: &[u8]) -> u64 {
    7
}
