//! The ceiling of the kernel's side: a bare FUSE file system of one file, whose reads are answered from memory.
//!
//! Guarantees: it speaks to the kernel on the mount's own terms (the same INIT, flags of open, threads, size of a READ), so
//! that what railfs loses against it is railfs' own doing.

use crate::Failed;
use fuser::{
    FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, KernelConfig, LockOwner, OpenFlags, ReplyAttr,
    ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, Request,
};
use railfs::fuse::{negotiate, opened};
use railfs::mount::options::Options;
use railfs::mount::{kernel, session};
use railfs::ops::{Form, Io, Mode};
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

/// Bytes of the file, all of which lie in memory: more than the caches of a CPU.
pub const SIZE: u64 = 256 << 20;
/// Its name.
pub const NAME: &str = "file";
const FILE: u64 = 2;
const TTL: Duration = Duration::from_secs(60);

struct Null {
    memory: Vec<u8>,
}

fn attr(ino: u64) -> FileAttr {
    let file = ino == FILE;
    FileAttr {
        ino: INodeNo(ino),
        size: if file { SIZE } else { 0 },
        blocks: if file { SIZE / 512 } else { 0 },
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: if file { FileType::RegularFile } else { FileType::Directory },
        perm: if file { 0o444 } else { 0o555 },
        nlink: 1,
        uid: rustix::process::getuid().as_raw(),
        gid: rustix::process::getgid().as_raw(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for Null {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        negotiate(config, Mode::Strict, Io::Direct).map(drop)
    }

    fn lookup(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if name == NAME {
            reply.entry(&TTL, &attr(FILE), Generation(0));
        } else {
            reply.error(fuser::Errno::ENOENT);
        }
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &attr(ino.0));
    }

    fn open(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(1), opened(Form::Direct));
    }

    fn read(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.memory.len());
        let end = start.saturating_add(size as usize).min(self.memory.len());
        reply.data(&self.memory[start..end]);
    }

    fn release(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }
}

/// Serves at `point` until it is unmounted. Says "ready" on standard output when it answers.
///
/// # Errors
/// The mount, or FUSE.
pub fn serve(point: &Path) -> Result<(), Failed> {
    let options = Options::default();
    // Not zeros: a page that was never written has no memory of its own.
    let memory = (0..SIZE / 8).flat_map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect();
    let (connection, mut mount) = kernel::mount("null", point, &options).map_err(|failure| failure.to_string())?;
    let (send, receive) = std::sync::mpsc::channel();
    session::serve(Null { memory }, connection, &options, move |ended| {
        let _ = send.send(ended);
    })
    .map_err(|failure| failure.to_string())?;
    println!("ready");
    let ended = receive.recv().map_err(|error| error.to_string())?;
    mount.is_gone();
    ended.map_err(|error| format!("null FUSE: {error}"))
}
