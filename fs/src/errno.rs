//! The one place where an engine error becomes an errno or an exit code.
//!
//! Guarantees: both maps are exhaustive (a new kind of error does not compile until it is mapped), and what the design
//! promises programs holds: not there ENOENT, superseded ESTALE, unreachable or out of time ETIMEDOUT, damaged EIO, no
//! memory budget ENOMEM, not allowed EACCES.

use railfs_engine::error::Error;
use railfs_proto::name::NameError;
pub use rustix::io::Errno;

/// What a program sees.
pub fn errno(error: &Error) -> Errno {
    match error {
        Error::NotFound(_) => Errno::NOENT,
        Error::Stale { .. } => Errno::STALE,
        Error::Unreachable { .. } | Error::TimedOut { .. } | Error::Closed => Errno::TIMEDOUT,
        Error::Damaged { .. }
        | Error::WrongStore { .. }
        | Error::BadAnswer { .. }
        | Error::Protocol(_)
        | Error::Aborted(_)
        | Error::Io { .. } => Errno::IO,
        Error::OverBudget { .. } => Errno::NOMEM,
        Error::Conflict { .. } => Errno::EXIST,
        Error::NoSpace(_) => Errno::NOSPC,
        Error::ReadOnly(_) => Errno::ROFS,
        Error::Denied(_) => Errno::ACCESS,
        Error::Invalid(_) => Errno::INVAL,
    }
}

/// What a program sees of a name that breaks a rule.
pub fn name_errno(error: &NameError) -> Errno {
    if error.is_too_long() { Errno::NAMETOOLONG } else { Errno::INVAL }
}

/// How the command line ends: 0 done, 1 failed, 2 usage or configuration, 3 not found, 4 conflict, 5 unreachable.
pub fn exit_code(error: &Error) -> u8 {
    match error {
        Error::Invalid(_) => 2,
        Error::NotFound(_) => 3,
        Error::Conflict { .. } => 4,
        Error::Unreachable { .. } | Error::TimedOut { .. } => 5,
        Error::Stale { .. }
        | Error::Damaged { .. }
        | Error::OverBudget { .. }
        | Error::WrongStore { .. }
        | Error::NoSpace(_)
        | Error::ReadOnly(_)
        | Error::Denied(_)
        | Error::BadAnswer { .. }
        | Error::Protocol(_)
        | Error::Aborted(_)
        | Error::Io { .. }
        | Error::Closed => 1,
    }
}

/// Whether a failure is an everyday answer (a name that is not there, a file that was replaced) rather than trouble.
pub fn is_everyday(errno: Errno) -> bool {
    matches!(errno, Errno::NOENT | Errno::STALE | Errno::ROFS | Errno::ISDIR | Errno::NOTDIR | Errno::ACCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use railfs_proto::descriptor::Id;
    use std::time::Duration;

    fn text() -> String {
        "x".to_owned()
    }

    #[test]
    fn every_error_has_its_errno_and_exit_code() {
        let id = Id([0; 16]);
        let damaged = Error::Damaged {
            object: text(),
            version: 2000,
            stripe: 1,
            component: 0,
            directory: id,
            rail: text(),
            detail: text(),
        };
        let table = [
            (Error::NotFound(text()), Errno::NOENT, 3),
            (Error::Stale { object: text(), version: 2000 }, Errno::STALE, 1),
            (Error::Unreachable { peer: text(), detail: text() }, Errno::TIMEDOUT, 5),
            (Error::TimedOut { what: text(), after: Duration::from_secs(1), detail: text() }, Errno::TIMEDOUT, 5),
            (damaged, Errno::IO, 1),
            (Error::OverBudget { what: text(), need: 2, limit: 1, cure: text() }, Errno::NOMEM, 1),
            (Error::WrongStore { address: text(), found: id, expected: id }, Errno::IO, 1),
            (Error::Conflict { object: text(), detail: text() }, Errno::EXIST, 4),
            (Error::NoSpace(text()), Errno::NOSPC, 1),
            (Error::ReadOnly(text()), Errno::ROFS, 1),
            (Error::Denied(text()), Errno::ACCESS, 1),
            (Error::Invalid(text()), Errno::INVAL, 2),
            (Error::BadAnswer { peer: text(), detail: text() }, Errno::IO, 1),
            (Error::Protocol(text()), Errno::IO, 1),
            (Error::Aborted(text()), Errno::IO, 1),
            (Error::Io { what: text(), detail: text() }, Errno::IO, 1),
            (Error::Closed, Errno::TIMEDOUT, 1),
        ];
        for (error, want, code) in table {
            assert_eq!(errno(&error), want, "{error}");
            assert_eq!(exit_code(&error), code, "{error}");
        }
    }

    #[test]
    fn long_names_are_told_from_wrong_ones() {
        assert_eq!(name_errno(&NameError::KeyLong(5000)), Errno::NAMETOOLONG);
        assert_eq!(name_errno(&NameError::PartLong { length: 300, at: 0 }), Errno::NAMETOOLONG);
        assert_eq!(name_errno(&NameError::PartDots(0)), Errno::INVAL);
    }
}
