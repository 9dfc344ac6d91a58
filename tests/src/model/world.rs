//! The reference: names, versions and descriptors as they must be.
//!
//! Guarantees: pure; bytes follow from a version's seed, so nothing large is kept.

use super::{DESCRIPTORS, Refusal};
use crate::data::fill;
use rustix::io::Errno;
use std::collections::BTreeMap;

/// What an object holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// Its bytes follow from it.
    pub seed: u64,
    /// Bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Bytes of a stripe.
    pub stripe: u32,
    /// Components at most.
    pub width: u32,
}

impl Content {
    /// Bytes from `offset`, `length` of them, fewer at the end.
    pub fn bytes(&self, offset: u64, length: usize) -> Vec<u8> {
        let left = usize::try_from(self.size.saturating_sub(offset)).unwrap_or(usize::MAX);
        let mut bytes = vec![0; length.min(left)];
        fill(self.seed, offset, &mut bytes);
        bytes
    }
}

/// One version of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// Its number.
    pub number: u64,
    /// What it holds.
    pub content: Content,
}

/// A descriptor that is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Open {
    /// Under what name.
    pub key: Vec<u8>,
    /// The version that was current then.
    pub version: Version,
}

/// What a name means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// A file.
    File(Version),
    /// Something lies below it.
    Directory,
    /// Nothing: ENOENT, or ENOTDIR below a file.
    Nothing(Errno),
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct World {
    /// Every name that is a file.
    pub names: BTreeMap<Vec<u8>, Version>,
    /// By number.
    pub open: [Option<Open>; DESCRIPTORS],
    newest: u64,
}

fn ancestors(key: &[u8]) -> impl Iterator<Item = &[u8]> {
    key.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| &key[..at])
}

/// Whether `key` lies below `directory` ("": everything does).
pub fn below<'a>(key: &'a [u8], directory: &[u8]) -> Option<&'a [u8]> {
    if directory.is_empty() {
        return Some(key);
    }
    key.strip_prefix(directory)?.strip_prefix(b"/")
}

impl World {
    /// What a name means; the top is a directory.
    pub fn meaning(&self, key: &[u8]) -> Meaning {
        if let Some(version) = self.names.get(key) {
            return Meaning::File(version.clone());
        }
        if key.is_empty() || self.names.keys().any(|other| below(other, key).is_some()) {
            return Meaning::Directory;
        }
        // The first name on the way that is no directory decides.
        for above in ancestors(key) {
            match self.meaning(above) {
                Meaning::Directory => {}
                Meaning::File(_) => return Meaning::Nothing(Errno::NOTDIR),
                Meaning::Nothing(errno) => return Meaning::Nothing(errno),
            }
        }
        Meaning::Nothing(Errno::NOENT)
    }

    /// What a put must do.
    ///
    /// # Errors
    /// It must be refused.
    pub fn may_put(&self, key: &[u8], if_version: Option<u64>) -> Result<(), Refusal> {
        let collides = ancestors(key).any(|above| self.names.contains_key(above))
            || (!self.names.contains_key(key) && self.meaning(key) == Meaning::Directory);
        let wrong = if_version.is_some_and(|wanted| wanted != self.names.get(key).map_or(0, |version| version.number));
        if collides || wrong { Err(Refusal::Conflict) } else { Ok(()) }
    }

    /// A put was done.
    ///
    /// # Errors
    /// Its version is not the newest that there is.
    pub fn put(&mut self, key: &[u8], content: Content, number: u64) -> Result<(), String> {
        if number <= self.newest {
            return Err(format!("version {number} is not above {}, which was made before", self.newest));
        }
        self.newest = number;
        self.names.insert(key.to_vec(), Version { number, content });
        Ok(())
    }

    /// What a delete must do.
    ///
    /// # Errors
    /// It must be refused.
    pub fn may_delete(&self, key: &[u8], if_version: Option<u64>) -> Result<(), Refusal> {
        match (self.names.get(key), if_version) {
            (None, _) => Err(Refusal::NotFound),
            (Some(version), Some(wanted)) if version.number != wanted => Err(Refusal::Conflict),
            (Some(_), _) => Ok(()),
        }
    }

    /// What a list of a directory must hold: names, and the version of a file.
    ///
    /// # Errors
    /// The errno of the call.
    pub fn list(&self, directory: &[u8]) -> Result<BTreeMap<Vec<u8>, Option<Version>>, Errno> {
        match self.meaning(directory) {
            Meaning::File(_) => return Err(Errno::NOTDIR),
            Meaning::Nothing(errno) => return Err(errno),
            Meaning::Directory => {}
        }
        let mut entries = BTreeMap::new();
        for (key, version) in &self.names {
            let Some(name) = below(key, directory) else { continue };
            match name.iter().position(|byte| *byte == b'/') {
                Some(end) => entries.insert(name[..end].to_vec(), None),
                None => entries.insert(name.to_vec(), Some(version.clone())),
            };
        }
        Ok(entries)
    }

    /// Whether an open descriptor's version is the one that its name has.
    pub fn is_current(&self, open: &Open) -> bool {
        self.names.get(&open.key).is_some_and(|version| version.number == open.version.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_files_or_directories_or_nothing() {
        let mut world = World::default();
        let content = Content { seed: 1, size: 10, mode: 0o644, stripe: 16384, width: 1 };
        world.put(b"d/e/f", content.clone(), 5000).unwrap();
        world.put(b"d.x", content.clone(), 5001).unwrap();
        assert!(world.put(b"d/e/f", content.clone(), 5001).is_err());
        assert_eq!(world.meaning(b"d/e"), Meaning::Directory);
        assert_eq!(world.meaning(b"d/e/f/g"), Meaning::Nothing(Errno::NOTDIR));
        assert_eq!(world.meaning(b"d/f/g"), Meaning::Nothing(Errno::NOENT));
        assert_eq!(world.may_put(b"d/e", None), Err(Refusal::Conflict));
        assert_eq!(world.may_put(b"d/e/f/g", None), Err(Refusal::Conflict));
        assert_eq!(world.may_put(b"d/e/f", Some(0)), Err(Refusal::Conflict));
        assert_eq!(world.may_put(b"d/e/f", Some(5000)), Ok(()));
        assert_eq!(world.may_delete(b"d/e", None), Err(Refusal::NotFound));
        assert_eq!(world.list(b"").unwrap().keys().cloned().collect::<Vec<_>>(), [b"d".to_vec(), b"d.x".to_vec()]);
        assert_eq!(world.list(b"d.x"), Err(Errno::NOTDIR));
        assert_eq!(content.bytes(7, 100), crate::data::bytes(1, 10)[7..]);
    }
}
