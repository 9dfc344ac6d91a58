//! A log of which a file cannot be read: what was met, and what helps.
//!
//! Guarantees: it is told apart from a log whose records are not what they should be, and from a want of descriptors or memory,
//! which passes; its message names the file, the error and what to do.

use super::start_error::StartError;
use crate::scarce::shortage;
use crate::store::LogDirectory;
use std::io;

/// A file of a log cannot be read, or is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// The folder of the log.
    pub directory: String,
    /// The file in it; the folder itself where that cannot be listed.
    pub path: String,
    /// What the system said, or what is there instead.
    pub why: String,
}

impl std::fmt::Display for Unreadable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} cannot be read: {}", self.path, self.why)
    }
}

/// For `map_err`: which file (none: the folder) of which log was being read.
pub(super) fn unreadable(directory: &dyn LogDirectory, name: &str) -> impl FnOnce(io::Error) -> StartError {
    let directory = directory.describe();
    let path = if name.is_empty() { directory.clone() } else { format!("{directory}/{name}") };
    move |source| match shortage(&source) {
        // Nothing is wrong with the log.
        Some(_) => StartError::Io { doing: "read", path, source },
        None => StartError::Unreadable(Unreadable { directory, path, why: source.to_string() }),
    }
}

/// Tells of what the start met while it had to do with the logs that are left.
pub(super) fn with(error: StartError, unreadable: &[Unreadable]) -> StartError {
    if unreadable.is_empty() {
        return error;
    }
    let unreadable = unreadable.iter().map(Unreadable::to_string).collect::<Vec<_>>().join("; ");
    StartError::Rest { unreadable, source: Box::new(error) }
}
