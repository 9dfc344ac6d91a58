//! The model test: random sequences of what people and programs do, against a reference that holds versions.
//!
//! Guarantees: the reference ([`world`]) knows after every step what each name means, what each descriptor was opened with,
//! and so what every call must answer; [`run`] performs each step on a [`Subject`] and compares, so a difference is the first
//! wrong answer, named with its step. Steps are plain data ([`steps`]): a sequence follows from its seed, and a failing one is
//! made smaller by proptest before it is shown ([`sequences`]).
//!
//! There are three subjects: the file system over a real client and server without a kernel ([`bare`]), a real mount
//! ([`mounted`]), and a plain directory ([`plain`]), which shows that the reference says what a file system does.

pub mod bare;
pub mod mounted;
pub mod plain;
pub mod sequences;
pub mod steps;
mod walk;
pub mod world;

pub use walk::run;

use rustix::io::Errno;
use std::time::Duration;
use world::Content;

/// Descriptors that a sequence may have open at once.
pub const DESCRIPTORS: usize = 4;

/// What a subject says of a name or a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Inode number.
    pub ino: u64,
    /// Or a file.
    pub directory: bool,
    /// Bytes, of a file.
    pub size: u64,
    /// Permission bits, of a file.
    pub mode: u32,
}

/// One entry of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Name in the directory.
    pub name: Vec<u8>,
    /// Inode number (`d_ino`).
    pub ino: u64,
    /// Or a file.
    pub directory: bool,
}

/// Why something was not put or deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// A condition, or a name that would be file and directory.
    Conflict,
    /// There is nothing to delete.
    NotFound,
    /// Anything else: always a difference.
    Other(String),
}

/// What a subject promises of the descriptors of a version that was replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    /// ESTALE.
    Strict,
    /// The bytes of the version that was opened.
    Snapshot,
}

/// What steps are performed on. Keys are relative to a place that is the sequence's own and empty at first.
pub trait Subject {
    /// See [`Promise`].
    fn promise(&self) -> Promise;
    /// Whether a file's number is its version.
    fn numbers(&self) -> bool;
    /// For how long a name that changed between file, directory and nothing may be answered as it was.
    fn residue(&self) -> Duration;
    /// Puts; gives the version.
    ///
    /// # Errors
    /// It was refused.
    fn put(&mut self, key: &[u8], content: &Content, if_version: Option<u64>) -> Result<u64, Refusal>;
    /// Deletes.
    ///
    /// # Errors
    /// It was refused.
    fn delete(&mut self, key: &[u8], if_version: Option<u64>) -> Result<(), Refusal>;
    /// Everything in a directory ("" is the top), without "." and "..", in the order in which it came. `room`: entries that
    /// are asked for at once where the caller can say; `plus`: with attributes.
    ///
    /// # Errors
    /// The call's.
    fn list(&mut self, key: &[u8], room: usize, plus: bool) -> Result<Vec<Line>, Errno>;
    /// `stat` by name.
    ///
    /// # Errors
    /// The call's.
    fn stat(&mut self, key: &[u8]) -> Result<Stat, Errno>;
    /// Opens to read; what was open there before was closed.
    ///
    /// # Errors
    /// The call's.
    fn open(&mut self, descriptor: usize, key: &[u8]) -> Result<(), Errno>;
    /// Closes.
    fn close(&mut self, descriptor: usize);
    /// `fstat`.
    ///
    /// # Errors
    /// The call's.
    fn fstat(&mut self, descriptor: usize) -> Result<Stat, Errno>;
    /// `pread`, all of it.
    ///
    /// # Errors
    /// The call's.
    fn read(&mut self, descriptor: usize, offset: u64, length: usize) -> Result<Vec<u8>, Errno>;
    /// The same through the kernel's page cache (a mapping, `sendfile`), where there is one. Within the file.
    ///
    /// # Errors
    /// The call's.
    fn mapped(&mut self, descriptor: usize, offset: u64, length: usize) -> Result<Vec<u8>, Errno>;
    /// `lseek` with SEEK_DATA, or else SEEK_HOLE.
    ///
    /// # Errors
    /// The call's.
    fn seek(&mut self, descriptor: usize, offset: u64, data: bool) -> Result<u64, Errno>;
    /// Opens for writing: `None` where that is not to be tried.
    fn write(&mut self, key: &[u8]) -> Option<Errno>;
    /// Mounts again: descriptors are closed by it.
    fn remount(&mut self);
    /// The server ends, by a crash or in order, and comes back.
    fn restart(&mut self, crash: bool);
    /// Changes one byte of an object on disk. Where the subject cannot: an error.
    ///
    /// # Errors
    /// It has no disk to change.
    fn damage(&mut self, key: &[u8]) -> Result<(), String>;
    /// The sequence is over: what must hold of a subject without open descriptors.
    ///
    /// # Errors
    /// What is left.
    fn quiet(&mut self) -> Result<(), String>;
}
