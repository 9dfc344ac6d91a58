//! A file that has the name of a segment and is none of the log's.
//!
//! Guarantees: a file that holds anything of this log, in any of its directories, is not taken for one; none is removed.

use super::log::LogIdentity;
use super::recovery::{Log, path_of, read_limit};
use super::start_error::StartError;
use super::unreadable::unreadable;
use railfs_proto::logfile::{SegmentHeader, scan};

/// The files of the segment that begins with `first`, if none of them holds a header or a record of this log.
///
/// # Errors
/// One cannot be read.
pub(super) fn strays(logs: &[Log], identity: &LogIdentity, first: u64) -> Result<Option<String>, StartError> {
    let mut paths = Vec::new();
    for log in logs {
        let Some(name) = log.segments.get(&first) else { continue };
        let directory = log.directory.as_ref();
        let bytes = directory.read(name, read_limit(identity)).map_err(unreadable(directory, name))?;
        let of_store = |header: SegmentHeader| (header.store, header.epoch) == (identity.store, identity.epoch);
        let scan = scan(&bytes, identity.seed(), first);
        if SegmentHeader::decode(&bytes).is_ok_and(of_store) || !scan.records.is_empty() || !scan.later.is_empty() {
            return Ok(None);
        }
        paths.push(path_of(directory, name));
    }
    Ok((!paths.is_empty()).then(|| paths.join(", ")))
}
