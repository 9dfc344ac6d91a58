//! The inodes that the kernel knows.
//!
//! Guarantees: a file's number is its version; a directory's is bit 63 and a hash of its path, the next free one on a live
//! collision, so two live inodes never share a number. An inode lives from the first answer that names it until the
//! kernel has forgotten as many; nothing else is kept, so the table is bounded by the kernel's own. A version is of one name
//! and of one size: an answer that says otherwise is refused, so that no two names share an inode's pages. A name's newest seen
//! version is kept as long as one of its inodes lives, so that an older answer that comes late can be told.

use super::attr::Facts;
use railfs_engine::client::Object;
use railfs_proto::name::Key;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The kernel's number of a mount's root.
pub const ROOT: u64 = 1;
/// Marks directories.
pub const DIRECTORY_BIT: u64 = 1 << 63;

/// One version of one object, as the kernel holds it.
#[derive(Debug)]
pub struct FileNode {
    /// Its key.
    pub key: Key,
    /// Version, size, mode, time.
    pub facts: Facts,
    /// With proof; `None` while it is only known from a list.
    object: Mutex<Option<Arc<Object>>>,
}

impl FileNode {
    /// What can be checked and read, when it was looked up already.
    pub fn object(&self) -> Option<Arc<Object>> {
        self.object.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
    /// Keeps a newer proof of the same version.
    pub fn set_object(&self, object: Arc<Object>) {
        if object.descriptor.version == self.facts.version {
            *self.object.lock().unwrap_or_else(PoisonError::into_inner) = Some(object);
        }
    }
}

/// What a number means.
#[derive(Clone, Debug)]
pub enum Node {
    /// `None`: the root of a whole namespace.
    Directory(Option<Key>),
    /// A file.
    File(Arc<FileNode>),
}

#[derive(Debug)]
struct Entry {
    node: Node,
    /// Answers that named it, less those that the kernel has forgotten.
    lookups: u64,
}

/// What was last seen under a name.
#[derive(Debug, Default)]
struct Seen {
    /// The newest version.
    newest: u64,
    /// It was gone since.
    gone: bool,
    /// Live inodes with this name.
    live: u32,
}

/// A version that an answer names is known otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// Which.
    version: u64,
    /// Under what name.
    key: Key,
    /// The name is the same; its size, mode, owner or time is not.
    differs: bool,
}

impl std::fmt::Display for Known {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Known { version, key, differs } = self;
        let what = if *differs { "with another size, mode, owner or time" } else { "under another name" };
        write!(f, "version {version} is that of {key}, and comes {what}: versions are never used again")
    }
}

#[derive(Debug)]
struct State {
    nodes: HashMap<u64, Entry>,
    directories: HashMap<Key, u64>,
    names: HashMap<Key, Seen>,
}

/// The table.
#[derive(Debug)]
pub struct Inodes {
    root: Option<Key>,
    hash: fn(&[u8]) -> u64,
    state: Mutex<State>,
}

impl Inodes {
    /// A table whose root is this directory (`None`: the whole namespace).
    pub fn new(root: Option<Key>) -> Inodes {
        Inodes::with_hash(root, crate::hash::bytes)
    }

    /// The same, with another hash (to try collisions).
    pub fn with_hash(root: Option<Key>, hash: fn(&[u8]) -> u64) -> Inodes {
        let state = State { nodes: HashMap::new(), directories: HashMap::new(), names: HashMap::new() };
        Inodes { root, hash, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the number means; `None` when the kernel cannot know it.
    pub fn node(&self, ino: u64) -> Option<Node> {
        if ino == ROOT {
            return Some(Node::Directory(self.root.clone()));
        }
        self.state().nodes.get(&ino).map(|entry| entry.node.clone())
    }

    /// Inodes that the kernel knows, without the root.
    pub fn len(&self) -> usize {
        self.state().nodes.len()
    }

    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number that this directory has or would get now (`None`: above the mount's root, which is shown as the root).
    pub fn directory_number(&self, key: Option<&Key>) -> u64 {
        match key {
            Some(key) if self.root.as_ref() != Some(key) => Self::number(&self.state(), key, self.hash),
            _ => ROOT,
        }
    }

    fn number(state: &State, key: &Key, hash: fn(&[u8]) -> u64) -> u64 {
        if let Some(&ino) = state.directories.get(key) {
            return ino;
        }
        let mut ino = hash(key.as_bytes()) | DIRECTORY_BIT;
        while state.nodes.contains_key(&ino) {
            ino = ino.wrapping_add(1) | DIRECTORY_BIT;
        }
        ino
    }

    /// An answer is going out that names this directory.
    pub fn remember_directory(&self, key: &Key) -> u64 {
        let mut state = self.state();
        let ino = Self::number(&state, key, self.hash);
        state.directories.insert(key.clone(), ino);
        let entry = state.nodes.entry(ino);
        entry.or_insert_with(|| Entry { node: Node::Directory(Some(key.clone())), lookups: 0 }).lookups += 1;
        ino
    }

    /// An answer is going out that names this version. False: a newer one was seen under this name, or that it is gone.
    ///
    /// # Errors
    /// The version is known under another name, or with other facts: nothing is remembered.
    pub fn remember_file(&self, key: &Key, facts: Facts, object: Option<Arc<Object>>) -> Result<bool, Known> {
        let looked_up = object.is_some();
        let mut state = self.state();
        if let Some(Entry { node: Node::File(file), .. }) = state.nodes.get(&facts.version)
            && (file.key != *key || file.facts != facts)
        {
            let differs = file.key == *key;
            return Err(Known { version: facts.version, key: file.key.clone(), differs });
        }
        let entry = state.nodes.entry(facts.version).or_insert_with(|| {
            let node = FileNode { key: key.clone(), facts, object: Mutex::new(None) };
            Entry { node: Node::File(Arc::new(node)), lookups: 0 }
        });
        entry.lookups += 1;
        let first = entry.lookups == 1;
        if let (Node::File(file), Some(object)) = (&entry.node, object) {
            file.set_object(object);
        }
        let seen = state.names.entry(key.clone()).or_default();
        seen.live += u32::from(first);
        let newest = facts.version > seen.newest || (facts.version == seen.newest && (looked_up || !seen.gone));
        if newest {
            seen.newest = facts.version;
            seen.gone = false;
        }
        Ok(newest)
    }

    /// A lookup found no object of this name.
    pub fn note_gone(&self, key: &Key) {
        if let Some(seen) = self.state().names.get_mut(key) {
            seen.gone = true;
        }
    }

    /// The kernel forgets so many answers. Unknown numbers and too many are ignored.
    pub fn forget(&self, ino: u64, lookups: u64) {
        let mut state = self.state();
        let Some(entry) = state.nodes.get_mut(&ino) else { return };
        entry.lookups = entry.lookups.saturating_sub(lookups);
        if entry.lookups > 0 {
            return;
        }
        match state.nodes.remove(&ino).map(|entry| entry.node) {
            Some(Node::Directory(Some(key))) => {
                state.directories.remove(&key);
            }
            Some(Node::File(file)) => {
                if let Some(seen) = state.names.get_mut(&file.key) {
                    seen.live = seen.live.saturating_sub(1);
                    if seen.live == 0 {
                        state.names.remove(&file.key);
                    }
                }
            }
            Some(Node::Directory(None)) | None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use railfs_proto::descriptor::Attributes;

    fn key(text: &str) -> Key {
        Key::new(text.as_bytes().to_vec()).unwrap()
    }
    fn facts(version: u64) -> Facts {
        let attributes = Attributes { mode: 0o644, mtime_seconds: 0, mtime_nanoseconds: 0, owner: None };
        Facts { version, size: 1, attributes }
    }

    #[test]
    fn numbers_of_files_are_versions_and_of_directories_hashes() {
        let table = Inodes::new(Some(key("top")));
        assert!(table.remember_file(&key("top/f"), facts(5000), None).unwrap());
        assert!(matches!(table.node(5000), Some(Node::File(file)) if file.facts.version == 5000));
        let ino = table.remember_directory(&key("top/d"));
        assert!(ino & DIRECTORY_BIT != 0);
        assert_eq!(table.directory_number(Some(&key("top/d"))), ino);
        assert_eq!(Inodes::new(None).remember_directory(&key("top/d")), ino, "the same in every mount");
        assert_eq!(table.directory_number(Some(&key("top"))), ROOT);
        assert_eq!(table.directory_number(None), ROOT);
        assert!(matches!(table.node(ROOT), Some(Node::Directory(Some(k))) if k == key("top")));
        assert!(table.node(77).is_none());
    }

    #[test]
    fn a_live_collision_probes_and_both_keep_their_numbers() {
        let table = Inodes::with_hash(None, |_| u64::MAX);
        let a = table.remember_directory(&key("a"));
        let b = table.remember_directory(&key("b"));
        assert_ne!(a, b);
        assert!(a & b & DIRECTORY_BIT != 0, "probing stays among directories");
        table.forget(a, 1);
        assert_eq!(table.remember_directory(&key("b")), b);
        assert_eq!(table.directory_number(Some(&key("c"))), a, "a dead one's number is free again");
    }

    #[test]
    fn forgets_bound_the_table() {
        let table = Inodes::new(None);
        for _ in 0..3 {
            table.remember_file(&key("f"), facts(5000), None).unwrap();
        }
        let d = table.remember_directory(&key("d"));
        table.forget(5000, 2);
        assert_eq!(table.len(), 2);
        table.forget(5000, 1);
        table.forget(d, 9);
        table.forget(424_242, 1);
        assert!(table.is_empty() && table.state().names.is_empty() && table.state().directories.is_empty());
    }

    #[test]
    fn i1_one_version_under_two_names_or_of_two_sizes_is_refused_and_leaves_nothing() {
        let table = Inodes::new(None);
        table.remember_file(&key("a"), facts(5000), None).unwrap();
        let refused = table.remember_file(&key("b"), facts(5000), None).unwrap_err();
        assert!(refused.to_string().contains("version 5000 is that of a"), "named");
        let grown = Facts { size: 2, ..facts(5000) };
        assert!(table.remember_file(&key("a"), grown, None).unwrap_err().to_string().contains("size"));
        assert!(matches!(table.node(5000), Some(Node::File(file)) if file.key == key("a") && file.facts.size == 1));
        table.forget(5000, 1);
        assert!(table.is_empty() && table.state().names.is_empty(), "what was refused left nothing");
        table.remember_file(&key("b"), facts(5000), None).unwrap();
    }

    #[test]
    fn an_older_answer_that_comes_late_is_told() {
        let table = Inodes::new(None);
        assert!(table.remember_file(&key("f"), facts(5000), None).unwrap());
        assert!(table.remember_file(&key("f"), facts(5001), None).unwrap());
        assert!(!table.remember_file(&key("f"), facts(5000), None).unwrap(), "superseded by one already seen");
        table.note_gone(&key("f"));
        assert!(!table.remember_file(&key("f"), facts(5001), None).unwrap(), "gone when last looked up");
        assert!(table.remember_file(&key("f"), facts(5002), None).unwrap());
        table.note_gone(&key("never seen"));
        assert_eq!(table.state().names.len(), 1);
    }

    proptest! {
        /// Any order of answers and forgets: numbers stay unique, and everything forgotten leaves nothing.
        #[test]
        fn any_history_ends_empty(steps in proptest::collection::vec((0u8..3, 0u8..6), 1..60)) {
            let table = Inodes::with_hash(None, |path| u64::from(path[0] % 2));
            let mut answers = Vec::new();
            for (what, which) in steps {
                let name = key(&format!("{}", (b'a' + which) as char));
                match what {
                    0 => {
                        let version = 2000 + u64::from(which);
                        table.remember_file(&name, facts(version), None).unwrap();
                        answers.push((version, None));
                    }
                    1 => answers.push((table.remember_directory(&name), Some(name))),
                    _ => {
                        if let Some((ino, _)) = answers.pop() {
                            table.forget(ino, 1);
                        }
                    }
                }
                for (ino, name) in &answers {
                    match (table.node(*ino), name) {
                        (Some(Node::Directory(Some(k))), Some(name)) => prop_assert_eq!(&k, name),
                        (Some(Node::File(_)), None) => {}
                        other => prop_assert!(false, "{:?}", other),
                    }
                }
            }
            for (ino, _) in answers {
                table.forget(ino, 1);
            }
            prop_assert!(table.is_empty());
            prop_assert!(table.state().names.is_empty() && table.state().directories.is_empty());
        }
    }
}
