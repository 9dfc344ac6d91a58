//! What the process or the machine is short of, told apart from what a disk does.
//!
//! Guarantees: a limit of descriptors or memory that was met is never held against a directory or an object; its message names
//! the limit and what to do.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::io;

/// What the error is a sign of, where that is a shortage: it passes, and nothing is wrong with what was asked for.
pub fn shortage(error: &io::Error) -> Option<String> {
    let errno = Errno::from_io_error(error)?;
    Some(match errno {
        Errno::MFILE => {
            let limit = descriptors().map_or("unlimited".to_owned(), |limit| limit.to_string());
            format!(
                "the server has no file descriptor left (its limit is {limit}): try again later, or raise LimitNOFILE of \
                 railfsd.service (ulimit -n) and restart railfsd"
            )
        }
        Errno::NFILE => {
            "the server's machine has no open file left: try again later, or raise fs.file-max there".to_owned()
        }
        Errno::NOMEM => "the server's machine has no memory left: try again later, or give it more".to_owned(),
        _ => return None,
    })
}

/// Descriptors below which a server of many clients and directories soon meets its limit.
const ENOUGH: u64 = 1024;

/// Whether it failed because no descriptor is left, to the process or on the machine.
pub fn lacks_descriptors(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// How many descriptors this process may have; `None`: any number.
pub fn descriptors() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

/// What is to be said at the start of a limit of descriptors that is low.
pub fn low(limit: Option<u64>, files: usize) -> Option<String> {
    let limit = limit.filter(|limit| *limit < ENOUGH)?;
    Some(format!(
        "railfsd may have {limit} file descriptors only, so that it keeps {files} components open at most: clients, puts and \
         reads are refused when they are used up; set LimitNOFILE of railfsd.service (ulimit -n) to {ENOUGH} or more, better \
         65536, and restart railfsd"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i11_a_low_limit_of_descriptors_is_said_with_what_to_do() {
        assert_eq!((low(None, 1024), low(Some(1024), 256)), (None, None));
        let said = low(Some(256), 64).unwrap();
        assert!(said.contains("256 file") && said.contains("64 components") && said.contains("LimitNOFILE"), "{said}");
    }

    #[test]
    fn a_shortage_names_its_limit_and_a_failing_disk_is_none() {
        let of = |errno: Errno| shortage(&io::Error::from(errno));
        let files = of(Errno::MFILE).unwrap();
        assert!(files.contains("LimitNOFILE") && files.contains("limit is "), "{files}");
        assert!(of(Errno::NFILE).unwrap().contains("fs.file-max") && of(Errno::NOMEM).unwrap().contains("memory"));
        for disk in [Errno::IO, Errno::NOSPC, Errno::ROFS, Errno::NOENT] {
            assert_eq!(of(disk), None);
        }
        assert_eq!(shortage(&io::Error::other("words")), None);
    }
}
