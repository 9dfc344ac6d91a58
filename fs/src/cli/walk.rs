//! Finding what a put of a directory puts, as `cp -rL` would.
//!
//! Guarantees: links are followed; a loop, a link that leads nowhere, something that is neither file nor directory, and a
//! name that no key can have are all found, by name, before anything is put. The order is by name, so runs are alike.

use crate::failure::Failure;
use railfs_proto::name::Key;
use std::ffi::OsStr;
use std::fs::Metadata;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Problems are named one by one up to so many.
const MOST_PROBLEMS: usize = 20;

/// One file to put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Where it is.
    pub path: PathBuf,
    /// Under which key it goes.
    pub key: Key,
}

/// What lies in a directory.
#[derive(Debug, Default)]
pub struct Walk {
    /// By key.
    pub items: Vec<Item>,
    /// A store keeps no empty directories.
    pub empty: u64,
    /// Why nothing may be put.
    pub problems: Vec<String>,
}

/// What a path is that can be put.
#[derive(Debug)]
pub enum Source {
    /// A regular file.
    File,
    /// A directory.
    Directory,
}

/// What the path is, links followed.
///
/// # Errors
/// One line that names it.
pub fn source(path: &Path) -> Result<(Source, Metadata), String> {
    let shown = path.display();
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) => {
            let link = std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink());
            return Err(match error.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
                Some(rustix::io::Errno::LOOP) => format!("{shown}: a link that leads to itself"),
                Some(rustix::io::Errno::NOENT) if link => format!("{shown}: a link that leads nowhere"),
                _ => format!("{shown}: {error}"),
            });
        }
    };
    let kind = metadata.file_type();
    let special = match () {
        () if kind.is_file() => return Ok((Source::File, metadata)),
        () if kind.is_dir() => return Ok((Source::Directory, metadata)),
        () if kind.is_fifo() => "a named pipe",
        () if kind.is_socket() => "a socket",
        () if kind.is_block_device() || kind.is_char_device() => "a device",
        () => "of a kind that is not known",
    };
    Err(format!("{shown}: is {special}, only files and directories can be put"))
}

/// Everything in a directory, under keys below `base` (`None`: the namespace's root).
pub fn walk(directory: &Path, base: Option<&Key>) -> Walk {
    let mut walk = Walk::default();
    let mut above = Vec::new();
    match source(directory) {
        Ok((_, metadata)) => walk.visit(directory, base, &metadata, &mut above),
        Err(problem) => walk.problem(problem),
    }
    walk
}

/// A key one part longer.
///
/// # Errors
/// Which rule the name breaks.
pub fn child(base: Option<&Key>, name: &OsStr) -> Result<Key, railfs_proto::name::NameError> {
    match base {
        Some(base) => base.join(name.as_bytes()),
        None => Key::from_part(name.as_bytes()),
    }
}

impl Walk {
    /// Everything is fine, or what is wrong.
    ///
    /// # Errors
    /// The problems were said; this is the last word.
    pub fn check(&self) -> Result<(), Failure> {
        match self.problems.as_slice() {
            [] => Ok(()),
            [problem] => Err(Failure::failed(format!("{problem}; nothing was put"))),
            problems => {
                for problem in problems.iter().take(MOST_PROBLEMS) {
                    eprintln!("railfs: {problem}");
                }
                Err(Failure::failed(format!("{} such problems; nothing was put", problems.len())))
            }
        }
    }

    fn problem(&mut self, problem: String) {
        self.problems.push(problem);
    }

    fn visit(&mut self, directory: &Path, base: Option<&Key>, metadata: &Metadata, above: &mut Vec<(u64, u64)>) {
        let identity = (metadata.dev(), metadata.ino());
        if above.contains(&identity) {
            return self.problem(format!("{}: a link that leads back to a directory above it", directory.display()));
        }
        let names = std::fs::read_dir(directory).and_then(|entries| {
            entries.map(|entry| entry.map(|entry| entry.file_name())).collect::<Result<Vec<_>, _>>()
        });
        let mut names = match names {
            Ok(names) => names,
            Err(error) => return self.problem(format!("{}: {error}", directory.display())),
        };
        names.sort();
        self.empty += u64::from(names.is_empty());
        above.push(identity);
        for name in names {
            let path = directory.join(&name);
            let key = match child(base, &name) {
                Ok(key) => key,
                Err(error) => {
                    self.problem(format!("{}: {error}", path.display()));
                    continue;
                }
            };
            match source(&path) {
                Ok((Source::File, _)) => self.items.push(Item { path, key }),
                Ok((Source::Directory, metadata)) => self.visit(&path, Some(&key), &metadata, above),
                Err(problem) => self.problem(problem),
            }
        }
        above.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    fn keys(walk: &Walk) -> Vec<String> {
        walk.items.iter().map(|item| item.key.to_string()).collect()
    }

    #[test]
    fn links_are_followed_and_order_is_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(at("b/c")).unwrap();
        std::fs::create_dir(at("empty")).unwrap();
        std::fs::write(at("b/c/x"), "x").unwrap();
        std::fs::write(at("a"), "a").unwrap();
        symlink("b", at("link")).unwrap();
        symlink("../a", at("b/to-a")).unwrap();
        let walk = walk(dir.path(), Some(&Key::new(&b"top"[..]).unwrap()));
        assert!(walk.check().is_ok());
        assert_eq!(keys(&walk), ["top/a", "top/b/c/x", "top/b/to-a", "top/link/c/x", "top/link/to-a"]);
        assert_eq!(walk.empty, 1);
        assert_eq!(keys(&super::walk(&at("b"), None)), ["c/x", "to-a"]);
    }

    #[test]
    fn what_cannot_be_put_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("d")).unwrap();
        std::fs::write(at("fine"), "").unwrap();
        symlink("nowhere", at("broken")).unwrap();
        symlink("self", at("self")).unwrap();
        symlink("..", at("d/up")).unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        let walk = walk(dir.path(), None);
        let text = walk.problems.join("\n");
        for (name, word) in
            [("broken", "nowhere"), ("self", "itself"), ("d/up", "directory above"), ("socket", "is a socket")]
        {
            let line = text.lines().find(|line| line.starts_with(&at(name).display().to_string()));
            assert!(line.is_some_and(|line| line.contains(word)), "{name}: {text}");
        }
        assert_eq!((walk.problems.len(), walk.check().unwrap_err().code), (4, 1));
    }
}
