//! How names become keys of the index: the namespace, a zero byte, the key. No namespace has a zero byte in it, so keys
//! of one namespace lie together, in the order of the raw bytes of their keys.

use railfs_proto::name::{Namespace, ObjectName};

/// The key of a name.
pub(super) fn key_of(name: &ObjectName) -> Vec<u8> {
    in_namespace(&name.namespace, name.key.as_bytes())
}

/// The key that a raw key (or the beginning of one) has in a namespace.
pub(super) fn in_namespace(namespace: &Namespace, key: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(namespace.as_str().len() + 1 + key.len());
    bytes.extend_from_slice(namespace.as_str().as_bytes());
    bytes.push(0);
    bytes.extend_from_slice(key);
    bytes
}

/// The name of a key; `None` for bytes that no name gives.
pub(super) fn name_of(bytes: &[u8]) -> Option<ObjectName> {
    let zero = bytes.iter().position(|&byte| byte == 0)?;
    let namespace = std::str::from_utf8(&bytes[..zero]).ok()?;
    ObjectName::new(namespace, bytes[zero + 1..].to_vec()).ok()
}

/// The first key that does not begin with `prefix`; `None` when there is none (it is all 0xff).
pub(super) fn behind(prefix: &[u8]) -> Option<Vec<u8>> {
    let last = prefix.iter().rposition(|&byte| byte != 0xff)?;
    let mut bytes = prefix[..=last].to_vec();
    bytes[last] += 1;
    Some(bytes)
}

/// The smallest key greater than this one.
pub(super) fn next(key: &[u8]) -> Vec<u8> {
    let mut bytes = key.to_vec();
    bytes.push(0);
    bytes
}

/// What comes next in a list: folding and seeking, apart from where the keys are.
#[derive(Debug)]
pub(super) struct Folding<'a> {
    pub(super) prefix: &'a [u8],
    pub(super) delimited: bool,
}

impl Folding<'_> {
    /// The directory that a key is folded into: its name with the `/`. The key begins with the prefix.
    pub(super) fn directory<'k>(&self, key: &'k [u8]) -> Option<&'k [u8]> {
        let rest = key.get(self.prefix.len()..).filter(|_| self.delimited && key.starts_with(self.prefix))?;
        let slash = rest.iter().position(|&byte| byte == b'/')?;
        key.get(..self.prefix.len() + slash + 1)
    }

    /// Where to begin for the entries that sort behind `after`.
    pub(super) fn start(&self, after: &[u8]) -> Vec<u8> {
        if after < self.prefix || after.is_empty() {
            return self.prefix.to_vec();
        }
        match self.directory(after) {
            // Whatever of it was named, its entry has been given: go on behind all that lies below.
            Some(directory) => behind_directory(directory),
            None => next(after),
        }
    }
}

/// The first key behind everything below a directory, whose name ends in `/`: the byte behind `/` is `0`.
pub(super) fn behind_directory(directory: &[u8]) -> Vec<u8> {
    let mut bytes = directory.to_vec();
    if let Some(last) = bytes.last_mut() {
        *last = b'/' + 1;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_key_behind_a_prefix() {
        assert_eq!(behind(b"ab"), Some(b"ac".to_vec()));
        assert_eq!(behind(b"a\xff\xff"), Some(b"b".to_vec()));
        assert_eq!(behind(b"\xff"), None);
        assert_eq!(behind(b""), None);
        assert_eq!(behind_directory(b"a/"), b"a0".to_vec());
    }

    #[test]
    fn names_come_back_from_their_keys() {
        let name = ObjectName::new("a-b", b"x/\xff\xfe y".to_vec()).unwrap();
        assert_eq!(name_of(&key_of(&name)), Some(name));
        assert_eq!(name_of(b"no zero"), None);
        assert_eq!(name_of(b"ns\0a//b"), None);
    }

    #[test]
    fn a_list_goes_on_behind_what_it_gave() {
        let folding = Folding { prefix: b"d/", delimited: true };
        assert_eq!(folding.start(b""), b"d/".to_vec());
        assert_eq!(folding.start(b"d/x"), b"d/x\0".to_vec());
        assert_eq!(folding.start(b"d/x/"), b"d/x0".to_vec());
        assert_eq!(folding.start(b"d/x/y/z"), b"d/x0".to_vec());
        assert_eq!(folding.start(b"a"), b"d/".to_vec());
        let flat = Folding { prefix: b"d/", delimited: false };
        assert_eq!(flat.start(b"d/x/y"), b"d/x/y\0".to_vec());
    }
}
