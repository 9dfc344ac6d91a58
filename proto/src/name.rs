//! Names: a [`Namespace`], a [`Key`] in it, and both as an [`ObjectName`].
//!
//! Guarantees: a value of these types has passed every rule, so nothing a peer sends becomes a path, climbs out of a
//! directory or overflows the kernel's limits. Order is by raw bytes. Clones share their bytes.

use crate::limits::{MAX_KEY, MAX_KEY_PART, MAX_NAMESPACE, MAX_NODE_NAME};
use crate::v1;
use bytes::Bytes;
use std::fmt::{self, Write as _};
use std::sync::Arc;

/// Which rule a name breaks. Offsets count bytes from the start of the key or namespace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The message carries no name.
    #[error("the name is missing")]
    Missing,
    /// See the message.
    #[error("namespace of {0} bytes is not from 1 to {MAX_NAMESPACE} bytes long")]
    NamespaceLength(usize),
    /// See the message.
    #[error("namespace has '{byte}' at byte {at}; only a-z, 0-9 and '-' are allowed", byte = byte.escape_ascii())]
    NamespaceByte {
        /// What is there.
        byte: u8,
        /// Where.
        at: usize,
    },
    /// See the message.
    #[error("key is empty")]
    KeyEmpty,
    /// See the message.
    #[error("key of {0} bytes is longer than {MAX_KEY}")]
    KeyLong(usize),
    /// See the message.
    #[error("key begins with '/'")]
    KeyLeadingSlash,
    /// See the message.
    #[error("key ends with '/'")]
    KeyTrailingSlash,
    /// See the message.
    #[error("key has an empty part at byte {0} ('//')")]
    PartEmpty(usize),
    /// See the message.
    #[error("key has the part '.' or '..' at byte {0}")]
    PartDots(usize),
    /// See the message.
    #[error("key has a part of {length} bytes at byte {at}; the longest is {MAX_KEY_PART}")]
    PartLong {
        /// Bytes of the part.
        length: usize,
        /// Where it starts.
        at: usize,
    },
    /// See the message.
    #[error("key has a NUL at byte {0}")]
    Nul(usize),
    /// A single part was wanted.
    #[error("part has a '/' at byte {0}")]
    PartSlash(usize),
    /// See the message.
    #[error("node name of {0} bytes is not from 1 to {MAX_NODE_NAME} bytes long")]
    NodeLength(usize),
    /// See the message.
    #[error("node name has '{byte}' at byte {at}; only letters, digits, '.', '_' and '-' are allowed", byte = byte.escape_ascii())]
    NodeByte {
        /// What is there.
        byte: u8,
        /// Where.
        at: usize,
    },
}

impl NameError {
    /// Whether a limit of length was passed (ENAMETOOLONG), rather than a rule of form broken (EINVAL).
    pub fn is_too_long(&self) -> bool {
        match self {
            Self::KeyLong(_) | Self::PartLong { .. } => true,
            Self::NamespaceLength(length) | Self::NodeLength(length) => *length > 0,
            _ => false,
        }
    }
}

/// A flat set of keys: 1 to 63 bytes of `a-z0-9-`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Namespace(Arc<str>);

impl Namespace {
    /// Checks the rules.
    ///
    /// # Errors
    /// `NamespaceLength`, `NamespaceByte`.
    pub fn new(name: &str) -> Result<Namespace, NameError> {
        if name.is_empty() || name.len() > MAX_NAMESPACE {
            return Err(NameError::NamespaceLength(name.len()));
        }
        match name.bytes().enumerate().find(|(_, b)| !matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-')) {
            Some((at, byte)) => Err(NameError::NamespaceByte { byte, at }),
            None => Ok(Namespace(name.into())),
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::str::FromStr for Namespace {
    type Err = NameError;
    fn from_str(name: &str) -> Result<Self, NameError> {
        Namespace::new(name)
    }
}
impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// A `/`-separated path of raw bytes: 1 to 4096 bytes, parts of 1 to 255 bytes, none of them `.` or `..`, no NUL.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(Bytes);

impl Key {
    /// Checks the rules. No copy.
    ///
    /// # Errors
    /// The first rule that is broken, and where.
    pub fn new(bytes: impl Into<Bytes>) -> Result<Key, NameError> {
        let bytes = bytes.into();
        check_key(&bytes)?;
        Ok(Key(bytes))
    }

    /// A key of one part, as a directory entry gives it.
    ///
    /// # Errors
    /// As [`Key::new`], and `PartSlash`.
    pub fn from_part(part: &[u8]) -> Result<Key, NameError> {
        check_part(part)?;
        Ok(Key(Bytes::copy_from_slice(part)))
    }

    /// The raw bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The raw bytes, shared.
    pub fn to_bytes(&self) -> Bytes {
        self.0.clone()
    }

    /// The parts, outermost first; at least one.
    pub fn parts(&self) -> impl DoubleEndedIterator<Item = &[u8]> {
        self.0.split(|&b| b == b'/')
    }

    /// The last part.
    pub fn last_part(&self) -> &[u8] {
        let start = self.0.iter().rposition(|&b| b == b'/').map_or(0, |slash| slash + 1);
        &self.0[start..]
    }

    /// The key without its last part; `None` for a key of one part, which lies at the namespace's root.
    pub fn parent(&self) -> Option<Key> {
        self.0.iter().rposition(|&b| b == b'/').map(|slash| Key(self.0.slice(..slash)))
    }

    /// Every key above this one, nearest first. None of them may be an object while this one is.
    pub fn ancestors(&self) -> impl Iterator<Item = Key> {
        std::iter::successors(self.parent(), Key::parent)
    }

    /// This key, `/`, `part`.
    ///
    /// # Errors
    /// The part breaks a rule or holds a `/`, or the whole is too long.
    pub fn join(&self, part: &[u8]) -> Result<Key, NameError> {
        check_part(part)?;
        let mut bytes = self.below();
        bytes.extend_from_slice(part);
        if bytes.len() > MAX_KEY {
            return Err(NameError::KeyLong(bytes.len()));
        }
        Ok(Key(bytes.into()))
    }

    /// This key and a `/`: what every key below it starts with.
    pub fn below(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.0.len() + 1 + MAX_KEY_PART);
        bytes.extend_from_slice(&self.0);
        bytes.push(b'/');
        bytes
    }

    /// Whether this key lies (at any depth) below `other`.
    pub fn is_below(&self, other: &Key) -> bool {
        self.0.strip_prefix(&*other.0).is_some_and(|rest| rest.first() == Some(&b'/'))
    }
}

impl AsRef<[u8]> for Key {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}
impl std::borrow::Borrow<[u8]> for Key {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Escaped(&self.0).fmt(f)
    }
}
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// What names an object.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectName {
    /// The namespace.
    pub namespace: Namespace,
    /// The key in it.
    pub key: Key,
}

impl ObjectName {
    /// Checks both.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn new(namespace: &str, key: impl Into<Bytes>) -> Result<ObjectName, NameError> {
        Ok(ObjectName { namespace: Namespace::new(namespace)?, key: Key::new(key)? })
    }

    /// Checks the name that a message carries.
    ///
    /// # Errors
    /// `Missing` when there is none, else the first rule that is broken.
    pub fn from_message(message: Option<&v1::Name>) -> Result<ObjectName, NameError> {
        let name = message.ok_or(NameError::Missing)?;
        ObjectName::new(&name.namespace, name.key.clone())
    }

    /// For messages.
    pub fn to_message(&self) -> v1::Name {
        v1::Name { namespace: self.namespace.as_str().to_owned(), key: self.key.to_bytes() }
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.key)
    }
}
impl fmt::Debug for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Whether `node` may name a node: 1 to 255 bytes of letters, digits, `.`, `_` and `-`.
///
/// # Errors
/// `NodeLength`, `NodeByte`.
pub fn check_node_name(node: &str) -> Result<(), NameError> {
    if node.is_empty() || node.len() > MAX_NODE_NAME {
        return Err(NameError::NodeLength(node.len()));
    }
    match node.bytes().enumerate().find(|(_, b)| !(b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))) {
        Some((at, byte)) => Err(NameError::NodeByte { byte, at }),
        None => Ok(()),
    }
}

/// Shows raw bytes on one line: text as it is; control characters, characters that change the direction of text,
/// backslashes and bytes that are not UTF-8 escaped. What a peer chose cannot forge a log line.
#[derive(Clone, Copy, Debug)]
pub struct Escaped<'a>(pub &'a [u8]);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.0.utf8_chunks() {
            for c in chunk.valid().chars() {
                match c {
                    '\\' => f.write_str("\\\\")?,
                    c if c.is_ascii_control() => write!(f, "\\x{:02x}", u32::from(c))?,
                    c if c.is_control() || changes_direction(c) => write!(f, "{}", c.escape_unicode())?,
                    c => f.write_char(c)?,
                }
            }
            chunk.invalid().iter().try_for_each(|byte| write!(f, "\\x{byte:02x}"))?;
        }
        Ok(())
    }
}

fn changes_direction(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

fn check_key(key: &[u8]) -> Result<(), NameError> {
    if key.is_empty() {
        return Err(NameError::KeyEmpty);
    }
    if key.len() > MAX_KEY {
        return Err(NameError::KeyLong(key.len()));
    }
    if key.first() == Some(&b'/') {
        return Err(NameError::KeyLeadingSlash);
    }
    if key.last() == Some(&b'/') {
        return Err(NameError::KeyTrailingSlash);
    }
    let mut at = 0;
    for part in key.split(|&b| b == b'/') {
        check_one_part(part, at)?;
        at += part.len() + 1;
    }
    Ok(())
}

fn check_part(part: &[u8]) -> Result<(), NameError> {
    if let Some(at) = part.iter().position(|&b| b == b'/') {
        return Err(NameError::PartSlash(at));
    }
    check_one_part(part, 0)
}

fn check_one_part(part: &[u8], at: usize) -> Result<(), NameError> {
    if part.is_empty() {
        return Err(NameError::PartEmpty(at));
    }
    if part == b"." || part == b".." {
        return Err(NameError::PartDots(at));
    }
    if part.len() > MAX_KEY_PART {
        return Err(NameError::PartLong { length: part.len(), at });
    }
    match part.iter().position(|&b| b == 0) {
        Some(within) => Err(NameError::Nul(at + within)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn part() -> impl Strategy<Value = Vec<u8>> {
        vec(prop_oneof![1u8..=b'.', b'0'..=255u8], 1..20).prop_filter("no dots", |p| p != b"." && p != b"..")
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_key_or_an_error(bytes in vec(any::<u8>(), 0..300)) {
            if let Ok(key) = Key::new(bytes.clone()) {
                prop_assert_eq!(key.as_bytes(), &bytes[..]);
                prop_assert!(!key.to_string().bytes().any(|b| b < b' '));
            }
        }

        #[test]
        fn parts_join_to_the_key_and_parents_lead_up(parts in vec(part(), 1..12)) {
            let key = Key::new(parts.join(&b'/')).unwrap();
            prop_assert!(key.parts().eq(parts.iter().map(|p| p.as_slice())));
            let mut joined = Key::from_part(&parts[0]).unwrap();
            for part in &parts[1..] {
                let longer = joined.join(part).unwrap();
                prop_assert_eq!(longer.parent(), Some(joined.clone()));
                prop_assert_eq!(longer.last_part(), part.as_slice());
                prop_assert!(longer.is_below(&joined) && !joined.is_below(&longer));
                prop_assert!(longer > joined);
                joined = longer;
            }
            prop_assert_eq!(&joined, &key);
            prop_assert_eq!(key.ancestors().count(), parts.len() - 1);
        }

        #[test]
        fn names_survive_their_message(namespace in "[a-z0-9-]{1,63}", parts in vec(part(), 1..5)) {
            let name = ObjectName::new(&namespace, parts.join(&b'/')).unwrap();
            prop_assert_eq!(ObjectName::from_message(Some(&name.to_message())), Ok(name));
        }

        #[test]
        fn any_namespace_string_gives_a_value_or_an_error(name in ".{0,70}") {
            let ok = (1..=63).contains(&name.len()) && name.bytes().all(|b| b"abcdefghijklmnopqrstuvwxyz0123456789-".contains(&b));
            prop_assert_eq!(Namespace::new(&name).is_ok(), ok);
        }

        #[test]
        fn order_is_that_of_raw_bytes(a in vec(part(), 1..4), b in vec(part(), 1..4)) {
            let (a, b) = (a.join(&b'/'), b.join(&b'/'));
            prop_assert_eq!(Key::new(a.clone()).unwrap().cmp(&Key::new(b.clone()).unwrap()), a.cmp(&b));
        }
    }

    #[test]
    fn each_rule_has_its_own_error() {
        use NameError as E;
        let key = |bytes: &[u8]| Key::new(bytes.to_vec());
        assert_eq!(key(b""), Err(E::KeyEmpty));
        assert_eq!(key(b"/a"), Err(E::KeyLeadingSlash));
        assert_eq!(key(b"a/"), Err(E::KeyTrailingSlash));
        assert_eq!(key(b"a//b"), Err(E::PartEmpty(2)));
        assert_eq!(key(b"a/./b"), Err(E::PartDots(2)));
        assert_eq!(key(b".."), Err(E::PartDots(0)));
        assert_eq!(key(b"ab/c\0"), Err(E::Nul(4)));
        assert_eq!(key(&[b'x'; 256]), Err(E::PartLong { length: 256, at: 0 }));
        assert!(key(&[b'x'; 255]).is_ok());
        let long = [&[b'x'; 255][..]; 16].join(&b'/');
        assert_eq!(long.len(), 4095);
        assert!(key(&long).is_ok());
        assert_eq!(key(&[&long[..], b"/a"].concat()), Err(E::KeyLong(4097)));
        assert_eq!(key(&long).unwrap().join(b"a"), Err(E::KeyLong(4097)));
        assert_eq!(key(b"a").unwrap().join(b"b/c"), Err(E::PartSlash(1)));
        assert_eq!(key(b"a").unwrap().join(b".."), Err(E::PartDots(0)));
        assert_eq!(Namespace::new(""), Err(E::NamespaceLength(0)));
        assert_eq!(Namespace::new(&"a".repeat(64)), Err(E::NamespaceLength(64)));
        assert_eq!(Namespace::new("aB"), Err(E::NamespaceByte { byte: b'B', at: 1 }));
        assert_eq!(ObjectName::from_message(None), Err(E::Missing));
        assert!(E::KeyLong(5000).is_too_long() && !E::KeyEmpty.is_too_long());
        assert!(!E::NamespaceLength(0).is_too_long() && E::NamespaceLength(64).is_too_long());
        assert!(check_node_name("host-1.example").is_ok());
        assert_eq!(check_node_name(""), Err(E::NodeLength(0)));
        assert_eq!(check_node_name("a b"), Err(E::NodeByte { byte: b' ', at: 1 }));
    }

    #[test]
    fn what_cannot_be_printed_is_escaped() {
        let key = Key::new("gr\u{fc}n\n\\\u{7f}\u{202e}".as_bytes().iter().copied().chain([0xff]).collect::<Vec<u8>>());
        assert_eq!(key.unwrap().to_string(), "gr\u{fc}n\\x0a\\\\\\x7f\\u{202e}\\xff");
    }
}
