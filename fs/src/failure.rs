//! How a command fails: one line that says what to do, and an exit code.
//!
//! Guarantees: every failure of the command line and of a mount's start passes through this type, so each has both.

use crate::errno::exit_code;
use railfs_engine::error::Error;
use serde::{Deserialize, Serialize};

/// See the module. Also crosses the pipe from a mount's daemon to the command that started it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// One line, without "railfs: ". Empty: everything was said already.
    pub message: String,
    /// 1 failed, 2 usage or configuration, 3 not found, 4 conflict, 5 unreachable.
    pub code: u8,
}

impl Failure {
    /// Failed (1).
    pub fn failed(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), code: 1 }
    }
    /// Usage or configuration (2).
    pub fn usage(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), code: 2 }
    }
    /// Not found (3).
    pub fn not_found(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), code: 3 }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure { code: exit_code(&error), message: error.to_string() }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}
impl std::error::Error for Failure {}

/// An `std::io::Error` with what it was about.
pub fn io(what: impl std::fmt::Display, error: &std::io::Error) -> Failure {
    Failure::failed(format!("{what}: {error}"))
}
