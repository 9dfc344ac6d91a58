//! The FUSE threads of a mount.
//!
//! Guarantees: the FUSE library only talks over the connection it is given; it never mounts or unmounts anything.

use super::kernel::device_opens;
use super::options::Options;
use crate::failure::Failure;
use crate::fuse::Adapter;
use crate::ops::FileSystem;
use std::io;
use std::os::fd::OwnedFd;

/// Says hello to the kernel and starts the threads; `ended` is told, on one of them, when the mount is gone for good. What
/// was agreed with the kernel is [`FileSystem::choice`] from here on.
///
/// # Errors
/// The kernel's FUSE is too old, or a thread cannot be started.
pub fn start(
    fs: FileSystem,
    connection: OwnedFd,
    options: &Options,
    ended: impl FnOnce(io::Result<()>) + Send + 'static,
) -> Result<(), Failure> {
    serve(Adapter::new(fs, options.mode, options.io), connection, options, ended)
}

/// The same for any file system: a benchmark compares the mount with a bare one that is served the same way.
///
/// # Errors
/// As [`start`].
pub fn serve(
    filesystem: impl fuser::Filesystem + 'static,
    connection: OwnedFd,
    options: &Options,
    ended: impl FnOnce(io::Result<()>) + Send + 'static,
) -> Result<(), Failure> {
    let mut config = fuser::Config::default();
    config.n_threads = Some(options.threads);
    // A device of its own for each thread saves a wake; where only the helper may open it, they share one.
    config.clone_fd = device_opens();
    if !config.clone_fd {
        tracing::info!("/dev/fuse cannot be opened again: FUSE threads share one connection");
    }
    let acl = if options.allow_other { fuser::SessionACL::All } else { fuser::SessionACL::Owner };
    let session = fuser::Session::from_fd(filesystem, connection, acl, config)
        .map_err(|error| Failure::failed(format!("FUSE: {error}")))?;
    let run = move || ended(session.run());
    let spawned = std::thread::Builder::new().name("fuse".to_owned()).spawn(run);
    spawned.map(drop).map_err(|error| Failure::failed(format!("FUSE thread: {error}")))
}
