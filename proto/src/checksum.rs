//! Page checksums, seeded with the page's identity: a right page in a wrong place fails.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Which page of which component of which version a checksum is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageId {
    /// The version.
    pub version: u64,
    /// Index of the component.
    pub component: u32,
    /// Page number in the component.
    pub page: u64,
}

impl PageId {
    /// The seed: xxh3-64 of version (8 bytes), component (4) and page (8), little endian.
    pub fn seed(self) -> u64 {
        let mut bytes = [0u8; 20];
        bytes[..8].copy_from_slice(&self.version.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.component.to_le_bytes());
        bytes[12..].copy_from_slice(&self.page.to_le_bytes());
        xxh3_64(&bytes)
    }
}

/// The checksum of a page's valid bytes (the last page of a component may be short).
pub fn page_checksum(id: PageId, bytes: &[u8]) -> u64 {
    xxh3_64_with_seed(bytes, id.seed())
}

/// The checksums of consecutive pages: `bytes` starts at page `first` of the component.
pub fn page_checksums(version: u64, component: u32, first: u64, page_size: u32, bytes: &[u8]) -> Vec<u64> {
    bytes
        .chunks(page_size as usize)
        .zip(first..)
        .map(|(page_bytes, page)| page_checksum(PageId { version, component, page }, page_bytes))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_in_another_place_has_another_checksum() {
        let id = PageId { version: 2000, component: 1, page: 7 };
        let sum = page_checksum(id, b"bytes");
        for other in [PageId { version: 2001, ..id }, PageId { component: 0, ..id }, PageId { page: 8, ..id }] {
            assert_ne!(sum, page_checksum(other, b"bytes"));
        }
    }
}
