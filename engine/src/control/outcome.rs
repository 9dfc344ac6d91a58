//! What a server's refusal is to the caller: the one place where outcome codes become errors.

use crate::error::Error;
use railfs_proto::hello::HelloError;
use railfs_proto::reply::{Refusal, ReplyError};
use railfs_proto::v1::Code;
use std::time::Duration;

/// The error of a refused request about `object` (its name, or the operation's). `version` is the one that was asked
/// for, where one was.
pub fn error_of(refusal: &Refusal, object: &str, version: u64) -> Error {
    let object = object.to_owned();
    let detail = refusal.message.clone();
    match refusal.code {
        Code::NotFound => Error::NotFound(object),
        Code::Stale => Error::Stale { object, version },
        Code::Expired => Error::TimedOut { what: object, after: Duration::ZERO, detail: format!(": {detail}") },
        Code::Invalid => Error::Invalid(format!("{object}: {detail}")),
        Code::NoSpace => Error::NoSpace(format!("{object}: {detail}")),
        Code::ReadOnly => Error::ReadOnly(format!("{object}: {detail}")),
        Code::Conflict => Error::Conflict { object, detail },
        Code::Denied => Error::Denied(format!("{object}: {detail}")),
        Code::Protocol => Error::Protocol(detail),
        Code::Aborted => Error::Aborted(format!("{object}: {detail}")),
        Code::Damaged => Error::Io { what: object, detail },
        // Whoever is meant may be back in a moment.
        Code::WrongStore | Code::WrongIncarnation | Code::OverBudget | Code::Unavailable => {
            Error::Unreachable { peer: object, detail }
        }
        Code::Unspecified | Code::Ok => Error::BadAnswer { peer: object, detail },
    }
}

/// The error of a reply that was refused or does not hold.
pub fn reply_error(error: &ReplyError, object: &str) -> Error {
    match error {
        ReplyError::Refused(refusal) => error_of(refusal, object, 0),
        other => Error::BadAnswer { peer: object.to_owned(), detail: other.to_string() },
    }
}

/// The error of a hello to `address`.
pub fn hello_error(error: &HelloError, address: &str) -> Error {
    match error {
        HelloError::Refused(refusal) => error_of(refusal, address, 0),
        HelloError::Protocol(versions) => Error::Protocol(format!("{address}: {versions}")),
        HelloError::WrongStore { found, wanted } => {
            Error::WrongStore { address: address.to_owned(), found: *found, expected: *wanted }
        }
        other => Error::BadAnswer { peer: address.to_owned(), detail: other.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_error() {
        let of = |code| error_of(&Refusal::new(code, "why"), "ns/key", 7);
        assert!(matches!(of(Code::NotFound), Error::NotFound(name) if name == "ns/key"));
        assert!(matches!(of(Code::Stale), Error::Stale { version: 7, .. }));
        assert!(matches!(of(Code::NoSpace), Error::NoSpace(text) if text.contains("why")));
        assert!(matches!(of(Code::Unavailable), Error::Unreachable { .. }));
        assert!(matches!(of(Code::Conflict), Error::Conflict { .. }));
        for code in 0..=16 {
            let code = Code::try_from(code).unwrap();
            assert!(!of(code).to_string().is_empty());
        }
    }
}
