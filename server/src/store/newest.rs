//! The newest component that lies in the store: a witness of what the log has seen.
//!
//! Guarantees: only a file that is whole by its own header counts, and what it says there, whatever its name; nothing is
//! changed. A version is handed out after the log has reserved it, durably, and components are made after that: so a log that
//! has not reserved the version of a component that is there is older than it.

use super::Store;
use crate::put::recover::whole;
use railfs_proto::component::FileName;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Newest {
    /// The file.
    pub path: PathBuf,
    /// Its version.
    pub version: u64,
}

impl Store {
    /// The whole component with the highest version; `None`: there is none. Lists every directory, and reads one header, or
    /// as many as there are higher names of files that are not whole.
    pub fn newest_component(&self) -> Option<Newest> {
        self.directories()
            .iter()
            .filter_map(|directory| newest_in(&directory.components()))
            .max_by_key(|one| one.version)
    }
}

fn newest_in(folder: &std::path::Path) -> Option<Newest> {
    let entries = std::fs::read_dir(folder).ok()?;
    // A few are enough: more files that are none, with versions above all others, nobody leaves but on purpose.
    const TRIED: usize = 1024;
    let mut highest: std::collections::BTreeMap<u64, PathBuf> = std::collections::BTreeMap::new();
    for entry in entries.flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        let Ok(name) = FileName::parse(entry.file_name().as_bytes()) else { continue };
        highest.insert(name.version, entry.path());
        if highest.len() > TRIED {
            highest.pop_first();
        }
    }
    highest.into_values().rev().find_map(|path| whole(&path).map(|name| Newest { version: name.version, path }))
}
