//! What the kernel is told of a file or directory.
//!
//! Guarantees: pure; a file's number is its version; modes and owners are as put, but for what the mount was told to show
//! instead; sizes, blocks and block size agree.

use railfs_engine::client::Object;
use railfs_proto::descriptor::{self, Attributes, Descriptor};

/// Largest READ, bytes: what the kernel is told at INIT, and what the memory plan counts with.
pub const MAX_READ: u32 = 1 << 20;

/// File or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An object.
    File,
    /// Something lies below it.
    Directory,
}

/// Attributes of one inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Inode number.
    pub ino: u64,
    /// Bytes; 0 of a directory.
    pub size: u64,
    /// Units of 512 bytes, rounded up.
    pub blocks: u64,
    /// Seconds since 1970.
    pub mtime_seconds: i64,
    /// And nanoseconds, below a billion.
    pub mtime_nanoseconds: u32,
    /// See [`Kind`].
    pub kind: Kind,
    /// Permission bits, 07777 at most.
    pub perm: u16,
    /// 1 of a file, 2 of a directory.
    pub nlink: u32,
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Bytes that programs are advised to read at once, a power of two.
    pub blksize: u32,
}

/// What is known of one version without its layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The version, also the inode number.
    pub version: u64,
    /// Bytes.
    pub size: u64,
    /// Mode, modification time, owner.
    pub attributes: Attributes,
}

impl Facts {
    /// Of a descriptor.
    pub fn of(descriptor: &Descriptor) -> Facts {
        Facts { version: descriptor.version, size: descriptor.striping.size(), attributes: descriptor.attributes }
    }
    /// Of a looked-up object.
    pub fn of_object(object: &Object) -> Facts {
        Facts::of(&object.descriptor)
    }
}

/// Who owns what is shown, and which permission bits are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// User id of what was put without an owner, and of directories: the mounting user's.
    pub uid: u32,
    /// The same of its group.
    pub gid: u32,
    /// Option `uid`: of everything.
    pub only_uid: Option<u32>,
    /// Option `gid`: of everything.
    pub only_gid: Option<u32>,
    /// Option `umask`: permission bits that nothing has.
    pub umask: u16,
}

impl Owner {
    /// Of everything that was put without one; modes as they are.
    pub fn of(uid: u32, gid: u32) -> Owner {
        Owner { uid, gid, ..Owner::default() }
    }

    fn shown(&self, kept: Option<descriptor::Owner>) -> (u32, u32) {
        let kept = kept.unwrap_or(descriptor::Owner { uid: self.uid, gid: self.gid });
        (self.only_uid.unwrap_or(kept.uid), self.only_gid.unwrap_or(kept.gid))
    }
}

/// A file's attributes.
pub fn file(facts: Facts, owner: Owner) -> Attr {
    // Programs size their buffers by it: one READ for a small file, whole megabytes for a large one (a direct READ pins
    // its buffer's pages whether or not there are bytes for them).
    let blksize = u32::try_from(facts.size.clamp(4096, u64::from(MAX_READ))).map_or(MAX_READ, u32::next_power_of_two);
    let (uid, gid) = owner.shown(facts.attributes.owner);
    Attr {
        ino: facts.version,
        size: facts.size,
        blocks: facts.size.div_ceil(512),
        mtime_seconds: facts.attributes.mtime_seconds,
        mtime_nanoseconds: facts.attributes.mtime_nanoseconds,
        kind: Kind::File,
        perm: u16::try_from(facts.attributes.mode & 0o7777).unwrap_or(0) & !owner.umask,
        nlink: 1,
        uid,
        gid,
        blksize,
    }
}

/// A directory's attributes; `mtime` is the namespace's last commit.
pub fn directory(ino: u64, mtime: (i64, u32), owner: Owner) -> Attr {
    let (uid, gid) = owner.shown(None);
    Attr {
        ino,
        size: 0,
        blocks: 0,
        mtime_seconds: mtime.0,
        mtime_nanoseconds: mtime.1,
        kind: Kind::Directory,
        perm: 0o555 & !owner.umask,
        // "Not counted": with 2 a program could take it that there are no directories in it.
        nlink: 1,
        uid,
        gid,
        blksize: 4096,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(size: u64) -> Facts {
        Facts {
            version: 2000,
            size,
            attributes: Attributes { mode: 0o4755, mtime_seconds: -7, mtime_nanoseconds: 9, owner: None },
        }
    }

    #[test]
    fn sizes_blocks_and_modes() {
        let owner = Owner::of(3, 4);
        let attr = file(facts(1025), owner);
        assert_eq!((attr.ino, attr.size, attr.blocks, attr.perm), (2000, 1025, 3, 0o4755));
        assert_eq!((attr.nlink, attr.uid, attr.gid, attr.mtime_seconds), (1, 3, 4, -7));
        let blksize = |size| file(facts(size), owner).blksize;
        assert_eq!([blksize(0), blksize(4097), blksize(1 << 20), blksize(u64::MAX)], [4096, 8192, 1 << 20, 1 << 20]);
        assert_eq!(file(facts(u64::MAX), owner).blocks, 1 << 55);
    }
    #[test]
    fn owners_are_as_put_or_as_the_mount_was_told() {
        let mut kept = facts(1);
        kept.attributes.owner = Some(descriptor::Owner { uid: 1000, gid: 0 });
        let ids = |attr: Attr| (attr.uid, attr.gid, attr.perm);
        let user = Owner::of(3, 4);
        assert_eq!(ids(file(kept, user)), (1000, 0, 0o4755));
        assert_eq!(ids(file(facts(1), user)), (3, 4, 0o4755));
        assert_eq!(ids(directory(9, (0, 0), user)), (3, 4, 0o555));
        let told = Owner { only_uid: Some(7), umask: 0o027, ..user };
        assert_eq!(ids(file(kept, told)), (7, 0, 0o4750));
        assert_eq!(ids(directory(9, (0, 0), told)), (7, 4, 0o550));
        let group = Owner { only_gid: Some(8), ..user };
        assert_eq!(ids(file(kept, group)), (1000, 8, 0o4755));
    }
}
