//! Why the catalog could not do what it was asked. The one distinction that matters to callers: whether a commit is
//! known not to have happened, or may have happened.

/// Why a commit was refused before any byte of its record was written. It did not happen and will not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The disk under a log directory is full: no segment could be allocated.
    #[error("no space for the log: {0}; free some space in that file system")]
    NoSpace(String),
    /// A log directory is missing or cannot be written.
    #[error("{0}")]
    ReadOnly(String),
    /// `state_dir` is full, and so is the memory that stands in for it.
    #[error("no space for the index: {0}")]
    IndexFull(String),
    /// An earlier commit had an unknown outcome.
    #[error("publishing is frozen until the server is restarted: {0}")]
    Frozen(String),
    /// The catalog is being stopped.
    #[error("the catalog is stopping")]
    Stopping,
    /// Too many commits are queued.
    #[error("{0} commits are waiting already")]
    Busy(usize),
    /// The record would be longer than the log's limit.
    #[error("the commit does not fit a log record: {0}")]
    TooLong(String),
    /// The caller's version was never reserved.
    #[error("version {version} was never reserved (the highest reserved is {reserved})")]
    Version {
        /// The version of the put or delete.
        version: u64,
        /// The highest one that could have been handed out.
        reserved: u64,
    },
    /// The 63 bits of versions are used up.
    #[error("no versions are left")]
    OutOfVersions,
    /// A request id was used before, for another name.
    #[error("request id {0} was used before for another name or operation")]
    RequestReused(String),
    /// The log is stopped cleanly, but the markers do not say so.
    #[error("the markers could not be brought up to date: {0}")]
    Marker(String),
    /// The index could not be read, so nothing could be decided.
    #[error(
        "the index cannot be read: {0}; stop the server, remove the index and start again: it is rebuilt from the log"
    )]
    Index(String),
}

/// What a call to the catalog can fail with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CatalogError {
    /// Known not to have happened.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// It may or may not be durable; a restart decides. The catalog commits nothing from here on.
    #[error("whether the commit happened is not known until the server is restarted: {0}")]
    Unknown(String),
}

impl CatalogError {
    /// Whether a commit may have happened in spite of the error.
    pub fn is_unknown(&self) -> bool {
        matches!(self, CatalogError::Unknown(_))
    }
}
