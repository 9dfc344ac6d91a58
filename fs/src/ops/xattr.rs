//! GETXATTR and LISTXATTR: what a file's version, stripes and components are.
//!
//! Guarantees: a name that is not ours is answered at once, without asking anybody: EOPNOTSUPP where no file has such
//! (`security.*`, `system.*`, `trusted.*`: programs ask no more then), ENODATA in `user.*`. Values are of the inode's
//! version, which never change; only of an inode known from a list are the layout's looked up.

use super::inodes::{FileNode, Node};
use super::{Errno, FileSystem, Shared};
use railfs_engine::error::Error;
use railfs_proto::descriptor::Descriptor;
use std::fmt::Write as _;

/// The version, decimal.
const VERSION: &str = "user.railfs.version";
/// The stripes: how many, their size and that of a page in bytes, and the number of components they are dealt to.
const STRIPES: &str = "user.railfs.stripes";
/// The components: index, bytes and places of each.
const COMPONENTS: &str = "user.railfs.components";
/// Every name, in the order of listxattr.
const NAMES: [&str; 3] = [VERSION, STRIPES, COMPONENTS];
/// Longest value that the kernel takes, bytes.
const LONGEST: usize = 65536;

/// How an answer fits the room that was offered (0: only its length is asked for).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Xattr {
    /// So many bytes.
    Size(u32),
    /// These.
    Bytes(Vec<u8>),
}

fn fit(bytes: Vec<u8>, room: u32) -> Result<Xattr, Errno> {
    let length = u32::try_from(bytes.len()).ok().filter(|_| bytes.len() <= LONGEST).ok_or(Errno::TOOBIG)?;
    match room {
        0 => Ok(Xattr::Size(length)),
        room if length > room => Err(Errno::RANGE),
        _ => Ok(Xattr::Bytes(bytes)),
    }
}

fn stripes(descriptor: &Descriptor) -> String {
    let striping = &descriptor.striping;
    format!(
        "count={} size={} page={} width={}",
        striping.stripes(),
        striping.stripe_size(),
        striping.page_size(),
        striping.width()
    )
}

/// `INDEX:LENGTH:NODE/DIRECTORY`, replicas parted by commas, components by spaces.
fn components(descriptor: &Descriptor) -> String {
    let mut text = String::new();
    for (index, replicas) in (0u32..).zip(&descriptor.components) {
        let space = if index == 0 { "" } else { " " };
        // Writing to a string does not fail.
        let _ = write!(text, "{space}{index}:{}", descriptor.striping.component_length(index));
        for (place, replica) in replicas.iter().enumerate() {
            let _ = write!(text, "{}{}/{}", if place == 0 { ':' } else { ',' }, replica.node, replica.directory);
        }
    }
    text
}

impl FileSystem {
    /// GETXATTR. `room` 0 asks for the length.
    pub fn getxattr(
        &self,
        ino: u64,
        name: &[u8],
        room: u32,
        reply: impl FnOnce(Result<Xattr, Errno>) + Send + 'static,
    ) {
        if !name.starts_with(b"user.") {
            return reply(Err(Errno::OPNOTSUPP));
        }
        let Some(&name) = NAMES.iter().find(|known| known.as_bytes() == name) else {
            return reply(Err(Errno::NODATA));
        };
        let file = match self.0.inodes.node(ino) {
            None => return reply(Err(Errno::STALE)),
            Some(Node::Directory(_)) => return reply(Err(Errno::NODATA)),
            Some(Node::File(file)) => file,
        };
        if name == VERSION {
            return reply(fit(file.facts.version.to_string().into_bytes(), room));
        }
        let layout = if name == STRIPES { stripes } else { components };
        let request = self.begin();
        self.0.descriptor(&file, move |descriptor| {
            let _request = request;
            reply(descriptor.and_then(|text| fit(layout(&text).into_bytes(), room)));
        });
    }

    /// LISTXATTR. `room` 0 asks for the length.
    ///
    /// # Errors
    /// ESTALE, ERANGE.
    pub fn listxattr(&self, ino: u64, room: u32) -> Result<Xattr, Errno> {
        match self.0.inodes.node(ino).ok_or(Errno::STALE)? {
            Node::Directory(_) => fit(Vec::new(), room),
            Node::File(_) => fit(NAMES.iter().flat_map(|name| [name.as_bytes(), b"\0"].concat()).collect(), room),
        }
    }
}

impl Shared {
    /// The version's descriptor: as it was looked up, or looked up now.
    fn descriptor(
        self: &std::sync::Arc<Self>,
        file: &std::sync::Arc<FileNode>,
        done: impl FnOnce(Result<Descriptor, Errno>) + Send + 'static,
    ) {
        if let Some(object) = file.object() {
            return done(Ok(object.descriptor.clone()));
        }
        let (shared, key) = (self.clone(), file.key.clone());
        Shared::current(self, file, move |current: Result<_, Error>| {
            done(match current {
                Ok(object) => Ok(object.descriptor.clone()),
                Err(error) => Err(shared.fail("getxattr", &key, &error)),
            });
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use railfs_proto::descriptor::{Attributes, Id, Replica};
    use railfs_proto::layout::Striping;

    fn descriptor() -> Descriptor {
        let replica = |byte| Replica { node: "n".to_owned(), directory: Id([byte; 16]) };
        Descriptor {
            version: 2000,
            attributes: Attributes { mode: 0o640, mtime_seconds: 0, mtime_nanoseconds: 7, owner: None },
            striping: Striping::new(200_000, 4096, 65536, 2).unwrap(),
            components: vec![vec![replica(1)], vec![replica(2), replica(3)]],
        }
    }

    #[test]
    fn values_say_the_layout() {
        assert_eq!(stripes(&descriptor()), "count=4 size=65536 page=4096 width=2");
        let id = |byte: u8| Id([byte; 16]).to_string();
        let want = format!("0:131072:n/{} 1:68928:n/{},n/{}", id(1), id(2), id(3));
        assert_eq!(components(&descriptor()), want);
    }

    #[test]
    fn answers_fit_or_say_so() {
        assert_eq!(fit(b"abc".to_vec(), 0), Ok(Xattr::Size(3)));
        assert_eq!(fit(b"abc".to_vec(), 3), Ok(Xattr::Bytes(b"abc".to_vec())));
        assert_eq!(fit(b"abc".to_vec(), 2), Err(Errno::RANGE));
        assert_eq!(fit(Vec::new(), 0), Ok(Xattr::Size(0)));
        assert_eq!(fit(vec![0; LONGEST + 1], 0), Err(Errno::TOOBIG));
    }
}
