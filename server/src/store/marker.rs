//! Reading and writing the marker: after a crash a directory has the old marker or the new one, whole.

use super::{StoreError, failed, private, regular, sync_directory};
use railfs_proto::descriptor::Id;
use railfs_proto::logfile::{MAX_MARKER, decode_marker, encode_marker};
use railfs_proto::v1;
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The marker's name in its directory.
pub(super) const MARKER: &str = ".railfs";
/// What was the marker before, mostly.
pub(super) const TEMPORARY: &str = ".railfs.tmp";
/// What file systems hand out.
const BLOCK: usize = 4096;

/// A marker whose ids have been checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Marker {
    pub(super) store: Id,
    pub(super) directory: Id,
    pub(super) epoch: u64,
    pub(super) highest_sequence: u64,
    /// In the order in which they joined the store.
    pub(super) log_directories: Vec<Id>,
    /// As well.
    pub(super) directories: Vec<Id>,
}

impl Marker {
    fn from_message(message: &v1::Marker) -> Option<Marker> {
        let ids = |list: &[bytes::Bytes]| list.iter().map(|id| Id::from_bytes(id)).collect::<Option<Vec<_>>>();
        Some(Marker {
            store: Id::from_bytes(&message.store)?,
            directory: Id::from_bytes(&message.directory)?,
            epoch: message.epoch,
            highest_sequence: message.highest_sequence,
            log_directories: ids(&message.log_directories)?,
            directories: ids(&message.directories)?,
        })
    }

    fn to_message(&self) -> v1::Marker {
        let ids = |list: &[Id]| list.iter().map(|id| id.to_bytes()).collect();
        v1::Marker {
            store: self.store.to_bytes(),
            directory: self.directory.to_bytes(),
            epoch: self.epoch,
            highest_sequence: self.highest_sequence,
            log_directories: ids(&self.log_directories),
            directories: ids(&self.directories),
        }
    }

    /// The marker of the directory at `path`; `None` when there is none.
    pub(super) fn read(path: &Path) -> Result<Option<Marker>, StoreError> {
        Marker::read_file(path, MARKER)
    }

    /// A marker under this name.
    pub(super) fn read_file(path: &Path, name: &str) -> Result<Option<Marker>, StoreError> {
        let file_path = path.join(name);
        let file = match regular::read(&file_path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(StoreError::Io { doing: "open the marker", path: file_path, source }),
        };
        let mut bytes = Vec::new();
        // One byte more than a marker can have, so that a huge file is refused without being read.
        let limit = u64::try_from(MAX_MARKER).unwrap_or(u64::MAX).saturating_add(4096);
        file.take(limit).read_to_end(&mut bytes).map_err(failed("read the marker", &file_path))?;
        let bad = |why: String| StoreError::BadMarker { path: path.to_owned(), why };
        let message = decode_marker(&bytes).map_err(|error| bad(error.to_string()))?;
        let marker = Marker::from_message(&message).ok_or_else(|| bad("an id in it is not 16 bytes".to_owned()))?;
        if !marker.directories.contains(&marker.directory) {
            return Err(bad("it does not list its own directory".to_owned()));
        }
        Ok(Some(marker))
    }

    /// Refuses a place where the next marker could not be written, because something else has its name: before anything is
    /// done that the marker is to know of.
    pub(super) fn check_room(path: &Path) -> Result<(), StoreError> {
        let temporary = path.join(TEMPORARY);
        regular::check(&temporary).map_err(|what| StoreError::InTheWay { path: temporary, why: what.to_string() })
    }

    /// Replaces the marker: temporary file, sync, exchange of names, sync of the directory. What was the marker becomes
    /// the temporary file of the next time, so its room is never given up and a full disk does not stop it.
    pub(super) fn write(&self, path: &Path) -> Result<(), StoreError> {
        let bytes = encode_marker(&self.to_message())
            .map_err(|error| StoreError::BadMarker { path: path.to_owned(), why: error.to_string() })?;
        let (temporary, target) = (path.join(TEMPORARY), path.join(MARKER));
        // Not truncated: that would give back the room that it has.
        let options = &mut private::options();
        let file = regular::open(options.write(true).create(true).truncate(false), &temporary);
        let file = file.map_err(failed("create", &temporary))?;
        file.write_all_at(&bytes, 0).map_err(failed("write", &temporary))?;
        let length = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        file.set_len(length).map_err(failed("write", &temporary))?;
        file.sync_all().map_err(failed("sync", &temporary))?;
        match rustix::fs::renameat_with(CWD, &temporary, CWD, &target, RenameFlags::EXCHANGE) {
            Ok(()) => {}
            // The first marker; or a file system that knows no exchange.
            Err(Errno::NOENT | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                std::fs::rename(&temporary, &target).map_err(failed("put the marker in place at", &target))?;
                hold_room(&temporary, bytes.len());
            }
            Err(errno) => return Err(failed("put the marker in place at", &target)(errno.into())),
        }
        sync_directory(path).map_err(failed("sync", path))
    }
}

/// Takes room for the next marker, where there is some: without it the next one needs it then.
fn hold_room(temporary: &Path, length: usize) {
    let options = &mut private::options();
    let file = regular::open(options.write(true).create(true).truncate(false), temporary);
    if let Err(error) = file.and_then(|file| file.write_all_at(&vec![0; length.next_multiple_of(BLOCK)], 0)) {
        tracing::warn!(path = %temporary.display(), %error, "no room is held for the next marker");
    }
}

/// Whether a name may stand in a directory that is to become a stripe directory.
pub(super) fn is_ours_or_harmless(name: &std::ffi::OsStr) -> bool {
    name == "lost+found" || name == TEMPORARY || name == super::lock::HOLDER
}
