//! Reading a directory page by page, per handle.
//!
//! Guarantees: pure (lists and clock come in, steps go out). Within one pass from the start a name is returned once, and
//! one that exists throughout is never missed; an offset is the number of what was returned before it, so going on after
//! a buffer that was taken only in part is exact. A handle holds one page of entries, however large the directory is.

use super::attr::Facts;
use railfs_engine::client::Listing;
use railfs_engine::clock::Time;
use railfs_engine::error::Error;
use railfs_proto::name::Key;
use std::collections::HashSet;
use std::sync::Arc;

/// Entries that are asked for at once.
pub const PAGE: u32 = 1024;
/// Offset of the first entry: "." and ".." come before it.
const FIRST: u64 = 2;

/// One entry of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Its whole key.
    pub key: Key,
    /// Of a file; `None`: a directory.
    pub facts: Option<Facts>,
}

/// One page of entries.
#[derive(Debug)]
pub struct Page {
    /// Number of its first entry in the directory.
    first: u64,
    /// When its list was asked for.
    pub begun: Time,
    items: Vec<Item>,
    next: Option<Vec<u8>>,
}

impl Page {
    fn end(&self) -> u64 {
        self.first + self.items.len() as u64
    }
    /// The entry at an offset from 2 on.
    pub fn at(&self, offset: u64) -> Option<&Item> {
        let place = offset.checked_sub(FIRST)?.checked_sub(self.first)?;
        self.items.get(usize::try_from(place).ok()?)
    }
    /// Whether the directory has no entries at all.
    pub fn is_whole_and_empty(&self) -> bool {
        self.first == 0 && self.items.is_empty() && self.next.is_none()
    }
}

/// What to do for a request.
#[derive(Debug)]
pub enum Step {
    /// Answer from this page (nothing at the offset: the end).
    Serve(Arc<Page>),
    /// List first, from after this cursor, and ask again.
    Fetch(Fetch),
}

/// A page to list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// Number of its first entry.
    first: u64,
    /// The list's cursor; empty: from the start.
    pub after: Vec<u8>,
}

impl Fetch {
    /// The first page.
    pub fn start() -> Fetch {
        Fetch { first: 0, after: Vec::new() }
    }
}

/// Where one handle is.
#[derive(Debug)]
pub struct Paging {
    /// What every key below the directory starts with.
    prefix: Vec<u8>,
    page: Option<Arc<Page>>,
    /// First entry and cursor of every page that was seen, to go back to.
    starts: Vec<Fetch>,
    /// Names returned as files on earlier pages under which a directory may still come ("a" sorts before "a.b", and the
    /// directory "a/" after it): at most one per byte of a name.
    open_files: Vec<Key>,
    /// The page is the directory's first and was not read from the start yet.
    fresh: bool,
}

impl Paging {
    /// Of the directory below which every key starts with `prefix` ("" or "dir/").
    pub fn new(prefix: Vec<u8>) -> Paging {
        Paging { prefix, page: None, starts: Vec::new(), open_files: Vec::new(), fresh: false }
    }

    /// What a request at this offset needs.
    pub fn step(&mut self, offset: u64) -> Step {
        let Some(page) = &self.page else { return Step::Fetch(Fetch::start()) };
        if offset == 0 && !self.fresh {
            // Rewound: what is there now.
            return Step::Fetch(Fetch::start());
        }
        let index = offset.saturating_sub(FIRST);
        if index < page.first {
            let start = self.starts.iter().rev().find(|start| start.first <= index);
            return Step::Fetch(start.cloned().unwrap_or_else(Fetch::start));
        }
        match &page.next {
            Some(next) if index >= page.end() => Step::Fetch(Fetch { first: page.end(), after: next.clone() }),
            _ => {
                self.fresh &= offset != 0;
                Step::Serve(page.clone())
            }
        }
    }

    /// The answer to a [`Step::Fetch`].
    ///
    /// # Errors
    /// `BadAnswer`: a key outside the directory or out of order, one version under two names, or a cursor that does not
    /// advance.
    pub fn fetched(&mut self, fetch: &Fetch, listing: &Listing, begun: Time) -> Result<Arc<Page>, Error> {
        let forward = self.page.as_ref().is_some_and(|page| page.end() == fetch.first && page.first < fetch.first);
        if !forward {
            self.open_files.clear();
        }
        let mut items = Vec::with_capacity(listing.entries.len());
        let mut versions = HashSet::new();
        for entry in &listing.entries {
            let name = entry.key.strip_prefix(&*self.prefix).filter(|name| !name.contains(&b'/'));
            let key = Key::new(entry.key.clone()).ok().filter(|_| name.is_some());
            let Some(key) = key else {
                return Err(bad(&format!("the key {} is not directly below {}", show(&entry.key), show(&self.prefix))));
            };
            if entry.object.is_none() && self.open_files.contains(&key) {
                continue; // Was a file when an earlier page was listed: returned already.
            }
            let facts = entry.object.as_ref().map(Facts::of);
            if let Some(facts) = facts.filter(|facts| !versions.insert(facts.version)) {
                return Err(bad(&format!("version {} is that of {key} and of another name", facts.version)));
            }
            items.push(Item { key, facts });
        }
        if let Some(next) = &listing.next {
            if *next <= fetch.after {
                return Err(bad(&format!("the cursor {} does not advance", show(next))));
            }
            let earlier = items.iter().filter(|item| item.facts.is_some()).map(|item| &item.key);
            let candidates = std::mem::take(&mut self.open_files);
            let is_open = |key: &&Key| next.len() > key.as_bytes().len() && next.starts_with(key.as_bytes());
            self.open_files = candidates.iter().chain(earlier).filter(is_open).cloned().collect();
        }
        if fetch.first == 0 {
            self.starts.clear();
            self.fresh = true;
        }
        if self.starts.last().is_none_or(|last| last.first < fetch.first) {
            self.starts.push(fetch.clone());
        }
        let page = Arc::new(Page { first: fetch.first, begun, items, next: listing.next.clone() });
        self.page = Some(page.clone());
        Ok(page)
    }
}

fn bad(detail: &str) -> Error {
    Error::BadAnswer { peer: "the server".to_owned(), detail: format!("list: {detail}") }
}

fn show(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use railfs_engine::client::ListEntry;
    use std::collections::BTreeMap;

    /// A directory as the server lists it: names to versions (0: a directory).
    type Tree = BTreeMap<Vec<u8>, u64>;

    fn descriptor(version: u64) -> railfs_proto::descriptor::Descriptor {
        railfs_proto::descriptor::Descriptor {
            version,
            attributes: railfs_proto::descriptor::Attributes {
                mode: 0,
                mtime_seconds: 0,
                mtime_nanoseconds: 0,
                owner: None,
            },
            striping: railfs_proto::layout::Striping::new(0, 4096, 4096, 1).unwrap(),
            components: Vec::new(),
        }
    }

    fn list(tree: &Tree, after: &[u8], limit: usize) -> Listing {
        let mut all: Vec<(Vec<u8>, &Vec<u8>, u64)> = tree
            .iter()
            .map(|(name, &version)| {
                let sort = if version == 0 { [name, &b"/"[..]].concat() } else { name.clone() };
                (sort, name, version)
            })
            .filter(|(sort, ..)| &**sort > after)
            .collect();
        all.sort();
        let more = all.len() > limit;
        all.truncate(limit);
        Listing {
            next: more.then(|| all[all.len() - 1].0.clone()),
            entries: all
                .iter()
                .map(|(_, name, v)| ListEntry { key: (*name).clone(), object: (*v != 0).then(|| descriptor(*v)) })
                .collect(),
            mtime: (0, 0),
        }
    }

    fn page_at(paging: &mut Paging, tree: &Tree, offset: u64, limit: usize) -> Arc<Page> {
        for _ in 0..1000 {
            match paging.step(offset) {
                Step::Serve(page) => return page,
                Step::Fetch(fetch) => {
                    paging.fetched(&fetch, &list(tree, &fetch.after, limit), Time(0)).unwrap();
                }
            }
        }
        panic!("never ends");
    }

    fn names(tree: &[(&str, u64)]) -> Tree {
        tree.iter().map(|(name, version)| (name.as_bytes().to_vec(), *version)).collect()
    }

    proptest! {
        /// Each name once, in order, whatever the page size, and also when each request starts before the last one's end.
        #[test]
        fn pages_return_each_name_once(
            keys in proptest::collection::btree_map("[a-c.]{1,3}", 0u64..2, 0..30), limit in 1usize..7, back in 0u64..4,
        ) {
            let tree: Tree = (5000..).zip(&keys).filter(|(_, (k, _))| !matches!(k.as_str(), "." | ".."))
                .map(|(version, (k, v))| (k.clone().into_bytes(), v * version)).collect();
            let mut paging = Paging::new(Vec::new());
            let mut got: Vec<Vec<u8>> = Vec::new();
            loop {
                // Ask again for what was "not taken" by the kernel.
                let taken = got.len() as u64;
                let page = page_at(&mut paging, &tree, FIRST + taken.saturating_sub(back).max(1), limit);
                let _ = page.at(FIRST + taken.saturating_sub(back));
                let page = page_at(&mut paging, &tree, FIRST + taken, limit);
                match page.at(FIRST + taken) {
                    Some(item) => got.push(item.key.as_bytes().to_vec()),
                    None => break,
                }
            }
            let mut sorted = got.clone();
            sorted.sort();
            prop_assert_eq!(sorted, tree.keys().cloned().collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_file_that_becomes_a_directory_on_the_way_is_returned_once() {
        let before = names(&[("a", 5000), ("a.b", 5001), ("b", 5002)]);
        let after = names(&[("a", 0), ("a.b", 5001), ("b", 5002)]);
        let mut paging = Paging::new(Vec::new());
        assert!(page_at(&mut paging, &before, 0, 2).at(2).is_some_and(|item| item.key.as_bytes() == b"a"));
        let page = page_at(&mut paging, &after, 4, 2);
        assert_eq!(page.at(4).unwrap().key.as_bytes(), b"b");
    }

    #[test]
    fn rewinding_shows_what_is_there_now() {
        let mut paging = Paging::new(Vec::new());
        let one = names(&[("a", 5000)]);
        assert!(page_at(&mut paging, &one, 0, 9).at(2).is_some());
        assert!(page_at(&mut paging, &one, 3, 9).at(3).is_none());
        let two = names(&[("a", 5000), ("b", 5001)]);
        assert!(page_at(&mut paging, &two, 2, 9).at(3).is_none(), "a pass is one listing");
        assert!(page_at(&mut paging, &two, 0, 9).at(3).is_some());
    }

    #[test]
    fn bad_answers_are_errors() {
        let mut paging = Paging::new(b"d/".to_vec());
        let entry = |key: &[u8]| ListEntry { key: key.to_vec(), object: None };
        for key in [&b"x/y"[..], b"d/", b"d/a/b", b"d", b"d/.."] {
            let listing = Listing { entries: vec![entry(key)], next: None, mtime: (0, 0) };
            assert!(paging.fetched(&Fetch::start(), &listing, Time(0)).is_err(), "{}", show(key));
        }
        let listing = Listing { entries: vec![], next: Some(Vec::new()), mtime: (0, 0) };
        assert!(paging.fetched(&Fetch::start(), &listing, Time(0)).is_err(), "a cursor that stands still");
        let file = |key: &[u8], version| ListEntry { key: key.to_vec(), object: Some(descriptor(version)) };
        let listing = Listing { entries: vec![file(b"d/a", 5000), file(b"d/b", 5000)], next: None, mtime: (0, 0) };
        let refused = paging.fetched(&Fetch::start(), &listing, Time(0)).unwrap_err().to_string();
        assert!(refused.contains("version 5000"), "one version under two names: {refused}");
    }
}
