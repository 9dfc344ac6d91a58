//! The adapter between `fuser` and [`FileSystem`]: it translates, it decides nothing.
//!
//! Guarantees: every request is answered; the reply object moves into the callback, so no FUSE thread waits for the store.
//! Every operation that would change something is answered EROFS.

use crate::errno::Errno;
use crate::ops::{
    Access, Attr, Choice, DirSink, Emitted, Entry, FileSystem, Form, Io, Kernel, Kind, MAX_READ, Mode, Purpose, Rights,
    Seek, Xattr, choose,
};
use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, PollEvents, PollFlags,
    PollNotifier, RenameFlags, ReplyAttr, ReplyBmap, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How many requests the kernel may have under way in the background.
const MAX_BACKGROUND: u16 = 128;
/// lseek(2)'s numbers, as the kernel sends them.
const SEEK_DATA: i32 = 3;
const SEEK_HOLE: i32 = 4;
/// open(2)'s flag, as the kernel sends it.
const O_TRUNC: i32 = 0o1000;
/// An inode number is never used for another file: the generation stays the same.
const GENERATION: Generation = Generation(0);

/// The adapter.
pub struct Adapter {
    fs: FileSystem,
    mode: Mode,
    io: Io,
    opened: FopenFlags,
}

impl Adapter {
    /// For a file system; the form of its reads is agreed with the kernel at INIT.
    pub fn new(fs: FileSystem, mode: Mode, io: Io) -> Adapter {
        Adapter { fs, mode, io, opened: opened(Form::Direct) }
    }
}

/// The kernel's form of an errno.
fn code(errno: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(errno.raw_os_error())
}

fn system_time(seconds: i64, nanoseconds: u32) -> SystemTime {
    let nanoseconds = Duration::from_nanos(nanoseconds.into());
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let base = if seconds >= 0 { UNIX_EPOCH.checked_add(whole) } else { UNIX_EPOCH.checked_sub(whole) };
    base.and_then(|base| base.checked_add(nanoseconds)).unwrap_or(UNIX_EPOCH)
}

fn file_type(kind: Kind) -> FileType {
    match kind {
        Kind::File => FileType::RegularFile,
        Kind::Directory => FileType::Directory,
    }
}

fn file_attr(attr: &Attr) -> FileAttr {
    let time = system_time(attr.mtime_seconds, attr.mtime_nanoseconds);
    FileAttr {
        ino: INodeNo(attr.ino),
        size: attr.size,
        blocks: attr.blocks,
        atime: time,
        mtime: time,
        ctime: time,
        crtime: time,
        kind: file_type(attr.kind),
        perm: attr.perm,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: 0,
        blksize: attr.blksize,
        flags: 0,
    }
}

fn xattr(value: Result<Xattr, Errno>, reply: ReplyXattr) {
    match value {
        Ok(Xattr::Size(size)) => reply.size(size),
        Ok(Xattr::Bytes(bytes)) => reply.data(&bytes),
        Err(errno) => reply.error(code(errno)),
    }
}

/// READDIR's reply as a sink.
struct Plain(ReplyDirectory);

impl DirSink for Plain {
    fn plus(&self) -> bool {
        false
    }
    fn is_full_for(&mut self, entry: &Emitted<'_>) -> bool {
        self.0.add(INodeNo(entry.ino), entry.next, file_type(entry.kind), OsStr::from_bytes(entry.name))
    }
}

/// READDIRPLUS' reply as a sink.
struct Plus(ReplyDirectoryPlus);

impl DirSink for Plus {
    fn plus(&self) -> bool {
        true
    }
    fn is_full_for(&mut self, entry: &Emitted<'_>) -> bool {
        let Some((attr, ttl)) = entry.plus else { return true };
        let name = OsStr::from_bytes(entry.name);
        self.0.add(INodeNo(entry.ino), entry.next, name, &ttl, &file_attr(&attr), GENERATION)
    }
}

/// What a file is opened with. What is cached stays so, always: an inode is one version.
pub fn opened(form: Form) -> FopenFlags {
    match form {
        Form::Direct => FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_KEEP_CACHE,
        Form::Cached => FopenFlags::FOPEN_KEEP_CACHE,
    }
}

/// What is agreed with the kernel at INIT: in which form reads come. Apart from the adapter, so that a benchmark's bare
/// file system speaks to the kernel on the same terms.
///
/// # Errors
/// The kernel's largest READ is smaller than ours.
pub fn negotiate(config: &mut KernelConfig, mode: Mode, io: Io) -> io::Result<Choice> {
    let wanted = [
        InitFlags::FUSE_PARALLEL_DIROPS,
        InitFlags::FUSE_DO_READDIRPLUS,
        InitFlags::FUSE_READDIRPLUS_AUTO,
        InitFlags::FUSE_ASYNC_DIO,
    ];
    for flag in wanted {
        // Each only saves time: a kernel without it works as well.
        let _ = config.add_capabilities(flag);
    }
    let offered = config.capabilities();
    let kernel = Kernel {
        direct_mmap: offered.contains(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP),
        auto_inval: offered.contains(InitFlags::FUSE_AUTO_INVAL_DATA),
    };
    let choice = choose(mode, io, kernel);
    // Asked for only where it is offered: neither can fail.
    let _ = match (choice.form, mode) {
        (Form::Direct, _) => config.add_capabilities(offered & InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP),
        (Form::Cached, Mode::Strict) => config.add_capabilities(InitFlags::FUSE_AUTO_INVAL_DATA),
        (Form::Cached, Mode::Snapshot) => Ok(()),
    };
    // The number of pages in a READ follows from the largest write.
    config.set_max_write(MAX_READ).map_err(|most| io::Error::other(format!("largest READ is {most}")))?;
    let _ = config.set_max_background(MAX_BACKGROUND);
    Ok(choice)
}

impl Filesystem for Adapter {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let choice = negotiate(config, self.mode, self.io)?;
        self.opened = opened(choice.form);
        let version = config.kernel_abi();
        tracing::info!("mode {}, io {} (FUSE {version}): {}", choice.mode, choice.form, choice.reason);
        if let Some(lacks) = &choice.lacks {
            tracing::warn!("{lacks}");
        }
        self.fs.agree(choice);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.fs.lookup(parent.0, name.as_bytes(), move |entry: Result<Entry, Errno>| match entry {
            Ok(Entry { attr, attr_ttl, entry_ttl }) => {
                reply.entry_with_ttls(&attr_ttl, &entry_ttl, &file_attr(&attr), GENERATION);
            }
            Err(errno) => reply.error(code(errno)),
        });
    }

    fn forget(&self, _request: &Request, ino: INodeNo, lookups: u64) {
        self.fs.forget(ino.0, lookups);
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        self.fs.getattr(ino.0, move |attr| match attr {
            Ok((attr, ttl)) => reply.attr(&ttl, &file_attr(&attr)),
            Err(errno) => reply.error(code(errno)),
        });
    }

    fn open(&self, _request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let reads = flags.acc_mode() == OpenAccMode::O_RDONLY && flags.0 & O_TRUNC == 0;
        let access = if reads { Access::Read } else { Access::Write };
        let opened = self.opened;
        self.fs.open(ino.0, access, move |handle| match handle {
            Ok(handle) => {
                reply.opened(FileHandle(handle), opened);
            }
            Err(errno) => reply.error(code(errno)),
        });
    }

    fn read(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        // Only a read of a program's own has one.
        let purpose = if lock_owner.is_some() { Purpose::Read } else { Purpose::Fill };
        self.fs.read(handle.0, offset, size, purpose, move |bytes| match bytes {
            Ok(bytes) => reply.data(bytes),
            Err(errno) => reply.error(code(errno)),
        });
    }

    fn release(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.fs.release(handle.0);
        reply.ok();
    }

    fn opendir(&self, _request: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        self.fs.opendir(ino.0, move |handle| match handle {
            Ok(handle) => reply.opened(FileHandle(handle), FopenFlags::empty()),
            Err(errno) => reply.error(code(errno)),
        });
    }

    fn readdir(&self, _request: &Request, _ino: INodeNo, handle: FileHandle, offset: u64, reply: ReplyDirectory) {
        self.fs.readdir(handle.0, offset, Plain(reply), |sink, result| match result {
            Ok(()) => sink.0.ok(),
            Err(errno) => sink.0.error(code(errno)),
        });
    }

    fn readdirplus(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        self.fs.readdir(handle.0, offset, Plus(reply), |sink, result| match result {
            Ok(()) => sink.0.ok(),
            Err(errno) => sink.0.error(code(errno)),
        });
    }

    fn releasedir(&self, _request: &Request, _ino: INodeNo, handle: FileHandle, _flags: OpenFlags, reply: ReplyEmpty) {
        self.fs.releasedir(handle.0);
        reply.ok();
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        self.fs.statfs(move |space| {
            let block = crate::ops::BLOCK;
            let free = space.available;
            reply.statfs(space.blocks, free, free, space.files, 0, block, 255, block);
        });
    }

    fn access(&self, _request: &Request, ino: INodeNo, mask: AccessFlags, reply: ReplyEmpty) {
        let rights = Rights { write: mask.contains(AccessFlags::W_OK), execute: mask.contains(AccessFlags::X_OK) };
        match self.fs.access(ino.0, rights) {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(code(errno)),
        }
    }

    fn lseek(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let seek = match whence {
            SEEK_DATA => Ok(Seek::Data),
            SEEK_HOLE => Ok(Seek::Hole),
            _ => Err(Errno::INVAL),
        };
        match seek.and_then(|seek| self.fs.seek(handle.0, offset, seek)) {
            Ok(offset) => reply.offset(offset),
            Err(errno) => reply.error(code(errno)),
        }
    }

    // Nothing is ever written, so there is nothing to flush or to sync.

    fn flush(&self, _request: &Request, _ino: INodeNo, _handle: FileHandle, _owner: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }
    fn fsync(&self, _request: &Request, _ino: INodeNo, _handle: FileHandle, _data: bool, reply: ReplyEmpty) {
        reply.ok();
    }
    fn fsyncdir(&self, _request: &Request, _ino: INodeNo, _handle: FileHandle, _data: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn getxattr(&self, _request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        self.fs.getxattr(ino.0, name.as_bytes(), size, move |value| xattr(value, reply));
    }
    fn listxattr(&self, _request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        xattr(self.fs.listxattr(ino.0, size), reply);
    }

    // What the file system does not have. ENOSYS is remembered by the kernel, which then answers by itself: always ready
    // to poll.

    fn readlink(&self, _request: &Request, _ino: INodeNo, reply: ReplyData) {
        reply.error(code(Errno::INVAL));
    }
    fn ioctl(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _flags: IoctlFlags,
        _command: u32,
        _in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(code(Errno::NOTTY));
    }
    fn poll(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _notifier: PollNotifier,
        _events: PollEvents,
        _flags: PollFlags,
        reply: ReplyPoll,
    ) {
        reply.error(code(Errno::NOSYS));
    }
    fn bmap(&self, _request: &Request, _ino: INodeNo, _block_size: u32, _index: u64, reply: ReplyBmap) {
        reply.error(code(Errno::NOSYS));
    }
    fn getlk(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _owner: LockOwner,
        _start: u64,
        _end: u64,
        _kind: i32,
        _pid: u32,
        reply: ReplyLock,
    ) {
        reply.error(code(Errno::NOSYS)); // Locks are not asked for at INIT: the kernel keeps them.
    }
    fn setlk(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _owner: LockOwner,
        _start: u64,
        _end: u64,
        _kind: i32,
        _pid: u32,
        _sleep: bool,
        reply: ReplyEmpty,
    ) {
        reply.error(code(Errno::NOSYS));
    }

    // What would change something.

    fn setattr(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        _size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        reply.error(code(Errno::ROFS));
    }
    fn mknod(
        &self,
        _request: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _mode: u32,
        _umask: u32,
        _rdev: u32,
        reply: ReplyEntry,
    ) {
        reply.error(code(Errno::ROFS));
    }
    fn mkdir(&self, _request: &Request, _parent: INodeNo, _name: &OsStr, _mode: u32, _umask: u32, reply: ReplyEntry) {
        reply.error(code(Errno::ROFS));
    }
    fn unlink(&self, _request: &Request, _parent: INodeNo, _name: &OsStr, reply: ReplyEmpty) {
        reply.error(code(Errno::ROFS));
    }
    fn rmdir(&self, _request: &Request, _parent: INodeNo, _name: &OsStr, reply: ReplyEmpty) {
        reply.error(code(Errno::ROFS));
    }
    fn symlink(&self, _request: &Request, _parent: INodeNo, _name: &OsStr, _target: &Path, reply: ReplyEntry) {
        reply.error(code(Errno::ROFS));
    }
    fn rename(
        &self,
        _request: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _new_parent: INodeNo,
        _new_name: &OsStr,
        _flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        reply.error(code(Errno::ROFS));
    }
    fn link(&self, _request: &Request, _ino: INodeNo, _parent: INodeNo, _name: &OsStr, reply: ReplyEntry) {
        reply.error(code(Errno::ROFS));
    }
    fn create(
        &self,
        _request: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        reply.error(code(Errno::ROFS));
    }
    fn write(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _offset: u64,
        _data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        reply.error(code(Errno::ROFS));
    }
    fn fallocate(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _offset: u64,
        _length: u64,
        _mode: i32,
        reply: ReplyEmpty,
    ) {
        reply.error(code(Errno::ROFS));
    }
    fn copy_file_range(
        &self,
        _request: &Request,
        _ino_in: INodeNo,
        _handle_in: FileHandle,
        _offset_in: u64,
        _ino_out: INodeNo,
        _handle_out: FileHandle,
        _offset_out: u64,
        _length: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        reply.error(code(Errno::ROFS));
    }
    fn setxattr(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _name: &OsStr,
        _value: &[u8],
        _flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        reply.error(code(Errno::ROFS));
    }
    fn removexattr(&self, _request: &Request, _ino: INodeNo, _name: &OsStr, reply: ReplyEmpty) {
        reply.error(code(Errno::ROFS));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_and_beyond_reason() {
        assert_eq!(system_time(5, 7), UNIX_EPOCH + Duration::new(5, 7));
        assert_eq!(system_time(-2, 500_000_000), UNIX_EPOCH - Duration::from_millis(1500));
        let _ = (system_time(i64::MAX, 999_999_999), system_time(i64::MIN, 0));
    }

    #[test]
    fn errno_numbers_are_the_kernels() {
        assert_eq!(code(Errno::STALE), fuser::Errno::from_i32(116));
        assert_eq!(code(Errno::ROFS), fuser::Errno::from_i32(30));
    }
}
