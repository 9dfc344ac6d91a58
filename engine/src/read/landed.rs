//! Pages that landed: memory behind its fence, the checksums that came with it, and which pages were verified.
//!
//! Guarantees (I2): [`Landed::verify`] is the only way to the bytes of a page; it compares the page with the
//! checksum of the identity that was asked for. It runs on the thread that will reply, a page at a time.

use crate::memory::Fenced;
use railfs_proto::checksum::{PageId, page_checksum};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// What was fetched, and from where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Version.
    pub version: u64,
    /// Component.
    pub component: u32,
    /// Number of the first page in the component.
    pub component_page: u64,
    /// Number of the first page in the object.
    pub first: u64,
    /// Bytes of a page.
    pub page_size: u32,
    /// Valid bytes.
    pub length: u32,
    /// The rail that brought it.
    pub rail: usize,
}

/// One extent that holds a run of pages.
#[derive(Debug)]
pub struct Landed {
    memory: Fenced,
    origin: Origin,
    checksums: Vec<u64>,
    verified: [AtomicU64; 4],
}

/// A page that is not what it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadPage {
    /// Its number in the object.
    pub page: u64,
}

impl Landed {
    /// `None` where the numbers do not fit each other: more bytes than memory, or not one checksum per page.
    pub fn new(memory: Fenced, origin: Origin, checksums: Vec<u64>) -> Option<Landed> {
        let pages = origin.length.div_ceil(origin.page_size) as usize;
        let fits = origin.length <= memory.size() && checksums.len() == pages && pages <= 256;
        fits.then(|| Landed { memory, origin, checksums, verified: Default::default() })
    }

    /// See [`Origin`].
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The pages it holds, numbered in the object.
    pub fn pages(&self) -> Range<u64> {
        self.origin.first..self.origin.first + self.checksums.len() as u64
    }

    /// Bytes of memory it holds.
    pub fn memory_size(&self) -> u32 {
        self.memory.size()
    }

    /// Verifies the pages that `bytes` (offsets in the object) touches and gives exactly these bytes.
    pub fn verify(&self, bytes: Range<u64>) -> Result<&[u8], BadPage> {
        let page_size = u64::from(self.origin.page_size);
        let base = self.origin.first * page_size;
        let outside = BadPage { page: bytes.start / page_size };
        let start = bytes.start.checked_sub(base).ok_or(outside)?;
        let end = bytes.end.checked_sub(base).filter(|&end| end <= u64::from(self.origin.length)).ok_or(outside)?;
        if start > end {
            return Err(outside);
        }
        let valid = &self.memory.bytes()[..self.origin.length as usize];
        for index in (start / page_size) as usize..end.div_ceil(page_size) as usize {
            let (word, bit) = (&self.verified[index / 64], 1u64 << (index % 64));
            if word.load(Ordering::Acquire) & bit != 0 {
                continue;
            }
            let from = index * page_size as usize;
            let page = &valid[from..valid.len().min(from + page_size as usize)];
            let id = PageId {
                version: self.origin.version,
                component: self.origin.component,
                page: self.origin.component_page + index as u64,
            };
            if page_checksum(id, page) != self.checksums[index] {
                return Err(BadPage { page: self.origin.first + index as u64 });
            }
            word.fetch_or(bit, Ordering::AcqRel);
        }
        Ok(&valid[start as usize..end as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Arena;
    use railfs_proto::checksum::page_checksums;

    fn landed(bytes: &[u8], origin: Origin) -> Landed {
        let arena = Arena::new(1 << 20).unwrap();
        let (version, component, page) = (2000, 1, 7);
        let sums = page_checksums(version, component, page, origin.page_size, bytes);
        Landed::new(arena.allocate(1 << 20).unwrap().filled(bytes).unwrap(), origin, sums).unwrap()
    }

    fn origin(length: u32) -> Origin {
        Origin { version: 2000, component: 1, component_page: 7, first: 40, page_size: 4096, length, rail: 0 }
    }

    #[test]
    fn i2_only_pages_with_the_right_identity_pass() {
        let bytes: Vec<u8> = (0..10_000u32).map(|i| i as u8).collect();
        let good = landed(&bytes, origin(10_000));
        assert_eq!(good.verify(40 * 4096 + 5..40 * 4096 + 10_000).unwrap(), &bytes[5..]);
        assert_eq!(good.pages(), 40..43);
        for wrong in [
            Origin { version: 2001, ..origin(10_000) },
            Origin { component: 0, ..origin(10_000) },
            Origin { component_page: 8, ..origin(10_000) },
        ] {
            assert_eq!(landed(&bytes, wrong).verify(40 * 4096..40 * 4096 + 1), Err(BadPage { page: 40 }));
        }
    }

    #[test]
    fn i2_a_flipped_byte_is_found_in_its_page_only() {
        let mut bytes = vec![7u8; 10_000];
        let sums = page_checksums(2000, 1, 7, 4096, &bytes);
        bytes[9_999] ^= 1;
        let arena = Arena::new(1 << 20).unwrap();
        let memory = arena.allocate(16 << 10).unwrap().filled(&bytes).unwrap();
        let bad = Landed::new(memory, origin(10_000), sums).unwrap();
        let base = 40 * 4096;
        assert_eq!(bad.verify(base..base + 8192).unwrap().len(), 8192);
        assert_eq!(bad.verify(base + 8192..base + 8193), Err(BadPage { page: 42 }));
        assert_eq!(bad.verify(base..base + 10_001), Err(BadPage { page: 40 }));
        assert_eq!(bad.verify(base - 1..base), Err(BadPage { page: 39 }));
    }
}
