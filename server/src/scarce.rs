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
            let limit = getrlimit(Resource::Nofile).current.map_or("unlimited".to_owned(), |limit| limit.to_string());
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

#[cfg(test)]
mod tests {
    use super::*;

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
