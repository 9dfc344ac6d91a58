//! Why a catalog cannot be opened: each reason names the file or directory, the record, and what to do.

use super::unreadable::Unreadable;
use std::io;

/// Why the catalog cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A record that was synced is gone from every log.
    #[error(
        "the log is damaged: record {sequence} in segment {segment} is not valid in {logs} (at byte {offset}), but later ones are; \
         restore the log directory from a copy"
    )]
    Damaged {
        /// The file.
        segment: String,
        /// The directories that were tried.
        logs: String,
        /// The record that is missing.
        sequence: u64,
        /// Where it should begin, in the first log that has the file.
        offset: usize,
    },
    /// Two logs have different records in one place.
    #[error(
        "record {sequence} differs between the logs ({logs}): one of them is not this store's; put the right log directory in place"
    )]
    Differ {
        /// The record.
        sequence: u64,
        /// The directories.
        logs: String,
    },
    /// What the markers, or the index, have seen is not there: this is an older copy.
    #[error(
        "the log ({logs}) ends at record {end}, but {witness} has seen record {seen}: this is an older copy of the log; put the newest in place"
    )]
    Older {
        /// The directories.
        logs: String,
        /// Its last record.
        end: u64,
        /// Who knows better.
        witness: String,
        /// What it has seen.
        seen: u64,
    },
    /// A component is newer than all that the log knows of.
    #[error(
        "the log ({logs}) has reserved versions up to {reserved}, but the component {path} is whole and of version {version}: this is an \
         older copy of the log; put the newest in place (nothing but that brings back what was put since; to accept the loss, \
         move the components with versions above {reserved} out of the store, and mount anew wherever it is mounted)"
    )]
    Unreserved {
        /// The directories.
        logs: String,
        /// The highest version that it has reserved.
        reserved: u64,
        /// The component.
        path: String,
        /// Its version.
        version: u64,
    },
    /// The first part is not there.
    #[error(
        "the log ({logs}) begins with record {first}, not with record {wanted}: its first segments are missing; restore them from a copy"
    )]
    Beginning {
        /// The directories.
        logs: String,
        /// The first record.
        first: u64,
        /// The one that is needed: record 1, or the one behind the last checkpoint.
        wanted: u64,
    },
    /// There is a checkpoint, and nothing behind it.
    #[error(
        "no segment of the log ({logs}) has record {wanted}, or room for it: they are missing; restore them from a copy"
    )]
    NoSegment {
        /// The directories.
        logs: String,
        /// The record behind the last checkpoint.
        wanted: u64,
    },
    /// The log was cut, and no checkpoint of what was cut is whole.
    #[error(
        "the log begins with record {first}, and no checkpoint of what was before that is whole: {damage}; restore one from a copy"
    )]
    Checkpoint {
        /// The first record.
        first: u64,
        /// Each file, and what is wrong with it.
        damage: String,
    },
    /// All of it is of an epoch that is over.
    #[error(
        "the log ({logs}) {}, but the markers know epoch {epoch}: this is an older copy of the log; put the newest in place",
        .found.map_or_else(|| "is empty".to_owned(), |found| format!("is of epoch {found}"))
    )]
    Epoch {
        /// The directories.
        logs: String,
        /// The newest epoch in them.
        found: Option<u64>,
        /// That of the markers.
        epoch: u64,
    },
    /// A file has the name of a segment, and nothing of the log in it, where the log does not go on with it.
    #[error(
        "{path} does not belong there: it is named as the log's segment from record {first} on, but holds nothing of this log, \
         which {}; move it away and start again (were it a damaged segment of this log, that would have to be restored from a copy)",
        .end.map_or_else(|| "has that record elsewhere".to_owned(), |end| format!("ends with record {end}"))
    )]
    Stray {
        /// The file; in each log that has it.
        path: String,
        /// The record that it should begin with.
        first: u64,
        /// Where the log ends before it; `None`: it goes on behind that in the segment before.
        end: Option<u64>,
    },
    /// A file that does not belong here.
    #[error("{path} is not a segment of this store's log: {why}")]
    Foreign {
        /// The file.
        path: String,
        /// What it says.
        why: String,
    },
    /// Written by a newer version.
    #[error("record {0} is of a kind that this version does not know: start a newer railfsd")]
    UnknownRecord(u64),
    /// A segment must be written, and there is neither room for it nor one that can be written in place.
    #[error(
        "log segment {path} cannot be written: that needs {bytes} bytes of free space in {directory}, which it does not \
         have: {source}; free as much there and start again"
    )]
    NoRoom {
        /// The segment.
        path: String,
        /// Where.
        directory: String,
        /// How much is needed.
        bytes: u64,
        /// What the system said.
        source: io::Error,
    },
    /// A checkpoint, or what is behind one.
    #[error("cannot make the logs equal at {path}: {why}")]
    Mend {
        /// The file or directories.
        path: String,
        /// What is wrong.
        why: String,
    },
    /// A log cannot be read, and there is no other.
    #[error("{log}; make it readable again, or restore the log directory {directory} from a copy", log = .0, directory = .0.directory)]
    Unreadable(Unreadable),
    /// The logs that are left besides some that cannot be read are not enough.
    #[error("{source}; another log is of no help: {unreadable}")]
    Rest {
        /// Each, and why it cannot be read.
        unreadable: String,
        /// What is wrong with those that are left.
        source: Box<StartError>,
    },
    /// The system said no.
    #[error("cannot {doing} {path}: {source}")]
    Io {
        /// What was tried.
        doing: &'static str,
        /// On what.
        path: String,
        /// What came of it.
        source: io::Error,
    },
    /// The index cannot be made.
    #[error("the index {path}: {why}")]
    Index {
        /// Its file.
        path: String,
        /// What is wrong.
        why: String,
    },
    /// The log could not be written.
    #[error("the start of this run could not be recorded in the log: {0}")]
    Write(String),
    /// No log directory.
    #[error("no log directory is given")]
    NoLog,
}
