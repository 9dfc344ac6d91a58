//! What has the name of the index and is no file: out of the way, and kept.
//!
//! Guarantees: nothing is removed and nothing is replaced; a file, whatever is in it, is left where it is.

use crate::store::regular;
use std::io;
use std::path::{Path, PathBuf};

/// What helps where the index cannot be opened.
pub(in crate::catalog) const REMOVE: &str = "the index can be removed: it is made again from the log";
/// Names that are tried.
const TRIED: usize = 100;

/// Moves it aside, if it is no file. Says what it was, and where it is now.
pub(super) fn move_aside(path: &Path) -> io::Result<Option<String>> {
    let Some(what) = regular::instead(path) else { return Ok(None) };
    let to = free(path).ok_or_else(|| io::Error::other(format!("it is {}, and cannot be moved aside", what.name())))?;
    let failed = |error| io::Error::other(format!("it is {}, and cannot be moved aside: {error}", what.name()));
    std::fs::rename(path, &to).map_err(failed)?;
    tracing::warn!(path = %path.display(), now = %to.display(), "what had the index's name was {}: it was moved aside", what.name());
    Ok(Some(format!("it was {}, which was moved to {}", what.name(), to.display())))
}

/// A name beside it that nothing has.
fn free(path: &Path) -> Option<PathBuf> {
    let named = |end: String| {
        let mut name = path.as_os_str().to_owned();
        name.push(end);
        PathBuf::from(name)
    };
    let mut names = std::iter::once(".aside".to_owned()).chain((1..TRIED).map(|at| format!(".aside.{at}"))).map(named);
    let taken = |path: &PathBuf| std::fs::symlink_metadata(path).is_ok();
    names.find(|name| !taken(name))
}

/// What keeps a start from opening the index in this directory, or what it will do about it; `None`: nothing, as far as
/// is seen without changing anything.
pub(in crate::catalog) fn trouble(path: &Path) -> Option<String> {
    if let Some(what) = regular::instead(path) {
        return Some(format!(
            "it is {}, not a regular file: the next start moves it aside and makes the index again",
            what.name()
        ));
    }
    match regular::open(std::fs::OpenOptions::new().read(true).write(true), path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound || path.is_symlink() => {
            Some(format!("it cannot be opened: {error}; {REMOVE}"))
        }
        _ => None,
    }
}
