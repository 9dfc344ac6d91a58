//! Tests of the component format.

use super::*;
use crate::checksum::{PageId, page_checksum};
use proptest::collection::vec;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn header(version: u64, size: u64, page: u32, extra: u32, width: u32, key: Vec<u8>, mode: u32) -> Header {
    let stripe = page << extra;
    let width = u64::from(width).min(size.div_ceil(u64::from(stripe)).max(1)) as u32;
    Header {
        version,
        namespace: Namespace::new("names-1").unwrap(),
        key: KeptKey::of(&Key::new(key).unwrap()),
        component: width - 1,
        striping: Striping::new(size, page, stripe, width).unwrap(),
        attributes: Attributes { mode, mtime_seconds: -5, mtime_nanoseconds: 999_999_999, owner: None },
    }
}

fn long_key(length: usize) -> Vec<u8> {
    let mut key = [&[b'k'; 255][..]; 16].join(&b'/');
    key.truncate(length);
    if key.last() == Some(&b'/') {
        key.pop();
    }
    key
}

fn headers() -> impl Strategy<Value = Header> {
    let numbers = (1025u64..=MAX_VERSION, 0u64..64 * MIB, 12u32..=18, 0u32..=4, 1u32..=9);
    (numbers, 1usize..=4095, 0u32..=0o7777).prop_map(|((version, size, page, extra, width), key, mode)| {
        header(version, size, 1 << page, extra, width, long_key(key), mode)
    })
}

/// A copy with bytes changed and its checksum made right again: what a bug, not a disk, would write.
fn forged(header: &Header, at: usize, bytes: &[u8]) -> [u8; BLOCK] {
    let mut out = header.encode();
    out[at..at + bytes.len()].copy_from_slice(bytes);
    let check = xxh3_64(&out[..CHECKED]);
    out[CHECKED..].copy_from_slice(&check.to_le_bytes());
    out
}

proptest! {
    #[test]
    fn headers_survive_the_disk(header in headers()) {
        prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
    }

    #[test]
    fn i2_one_flipped_bit_of_a_header_is_refused(header in headers(), bit in 0usize..BLOCK * 8) {
        let mut bytes = header.encode();
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(Header::decode(&bytes).is_err());
    }

    #[test]
    fn a_forged_header_gives_a_value_or_an_error(header in headers(), at in 0usize..CHECKED, bytes in vec(any::<u8>(), 1..8)) {
        let bytes = &bytes[..bytes.len().min(CHECKED - at)];
        if let Ok(other) = Header::decode(&forged(&header, at, bytes)) {
            prop_assert!(other.geometry().is_ok());
            prop_assert_eq!(Header::decode(&other.encode()), Ok(other));
        }
    }

    #[test]
    fn random_bytes_are_no_header_and_no_block(bytes in vec(any::<u8>(), BLOCK)) {
        let bytes: [u8; BLOCK] = bytes.try_into().unwrap();
        prop_assert!(Header::decode(&bytes).is_err());
        let id = BlockId { version: 2000, component: 0, block: 0 };
        prop_assert!(TableBlock::decode(id, &bytes).is_err());
    }

    #[test]
    fn i2_a_table_block_in_another_place_is_refused(
        sums in vec(any::<u64>(), 0..=SUMS_PER_BLOCK), version in 1025u64..1 << 40, component in 0u32..9, block in 0u64..99,
        bit in 0usize..BLOCK * 8,
    ) {
        let id = BlockId { version, component, block };
        let bytes = TableBlock::encode(id, &sums).unwrap();
        let decoded = TableBlock::decode(id, &bytes).unwrap();
        prop_assert_eq!(&decoded.sums()[..sums.len()], &sums[..]);
        prop_assert!(decoded.sums()[sums.len()..].iter().all(|&sum| sum == 0));
        for other in [
            BlockId { version: version + 1, ..id }, BlockId { component: component + 1, ..id }, BlockId { block: block + 1, ..id },
        ] {
            prop_assert!(TableBlock::decode(other, &bytes).is_err());
        }
        let mut damaged = bytes;
        damaged[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(TableBlock::decode(id, &damaged).is_err());
    }

    #[test]
    fn the_geometry_covers_the_file_exactly(length in 0u64..4 << 30, page in 12u32..=18) {
        let g = Geometry::new(length, 1 << page).unwrap();
        prop_assert_eq!(g.table_offset() % 4096, 0);
        prop_assert!(g.table_offset() - g.data_end() < 4096);
        prop_assert_eq!(g.file_size(), g.table_offset() + g.blocks() * 4096);
        let pages = g.pages();
        let lengths = [0, pages / 2, pages.saturating_sub(1)].map(|page| g.page(page));
        if pages > 0 {
            prop_assert_eq!(lengths[0].unwrap().0, 4096);
            let (last, bytes) = lengths[2].unwrap();
            prop_assert_eq!(last + bytes, g.data_end());
            let (block, place) = Geometry::sum_place(pages - 1);
            prop_assert_eq!(block + 1, g.blocks());
            prop_assert_eq!(g.block_sums(block), Some(place + 1));
            prop_assert_eq!(g.block_offset(block), Some(g.file_size() - 4096));
        }
        prop_assert_eq!(g.page(pages), None);
        prop_assert_eq!((g.block_offset(g.blocks()), g.block_sums(g.blocks())), (None, None));
    }

    #[test]
    fn any_numbers_give_a_geometry_or_an_error(length in any::<u64>(), page in any::<u32>(), n in any::<u64>()) {
        if let Ok(g) = Geometry::new(length, 1 << (page % 32)) {
            prop_assert!(g.file_size() <= i64::MAX as u64);
            let _ = (g.page(n), g.block_offset(n), g.block_sums(n), Geometry::sum_place(n));
        }
        let _ = Geometry::new(length, page);
    }

    #[test]
    fn file_names_survive_and_nothing_else_does(version in 1025u64..=MAX_VERSION, component in 0u32..1024, other in ".{0,12}") {
        let name = FileName { version, component };
        prop_assert_eq!(FileName::parse(name.to_string().as_bytes()), Ok(name));
        if let Ok(name) = FileName::parse(other.as_bytes()) {
            prop_assert_eq!(name.to_string(), other);
        }
    }
}

#[test]
fn file_names_have_one_form() {
    assert_eq!(FileName::parse(b"1025.0"), Ok(FileName { version: 1025, component: 0 }));
    for bad in [
        "",
        ".",
        "1025",
        "1025.",
        ".1",
        "1024.0",
        "01025.0",
        "+1025.0",
        "1025.00",
        "1025.01",
        "1025.1024",
        "2000.-1",
        "9223372036854775808.0",
        "99999999999999999999.0",
        "2000.0.1",
        "2000.0\n",
        "lost",
    ] {
        assert!(FileName::parse(bad.as_bytes()).is_err(), "{bad}");
    }
    assert!(FileName::parse(b"2000.\xff").unwrap_err().to_string().contains("2000.\\xff"));
}

#[test]
fn sizes_of_some_files() {
    let size = |length, page| Geometry::new(length, page).unwrap().file_size();
    assert_eq!(size(0, 65536), 4096);
    assert_eq!(size(1, 65536), 3 * 4096);
    assert_eq!(size(4096, 4096), 3 * 4096);
    assert_eq!(size(511 * 4096, 4096), 4096 + 511 * 4096 + 4096);
    assert_eq!(size(511 * 4096 + 1, 4096), 4096 + 512 * 4096 + 2 * 4096);
    assert!(Geometry::new(MAX_OBJECT, 4096).is_ok());
    assert!(Geometry::new(MAX_OBJECT + 1, 4096).is_err());
    assert!(Geometry::new(1, 5000).is_err());
    let striping = Striping::new(10 * MIB, 65536, 1 << 20, 3).unwrap();
    assert!(Geometry::of(&striping, 3).is_err());
    assert_eq!(Geometry::of(&striping, 0).unwrap().length(), 4 * MIB);
}

#[test]
fn a_long_key_is_cut_and_still_told_apart() {
    let (a, mut b) = (long_key(4095), long_key(4095));
    b[4094] = b'x';
    let [a, b] = [a, b].map(|key| Key::new(key).unwrap());
    let kept = header(2000, 5, 4096, 0, 1, a.as_bytes().to_vec(), 0o644);
    let back = Header::decode(&kept.encode()).unwrap();
    assert!(matches!(&back.key, KeptKey::Cut { start, length: 4095, .. } if start.len() == KEPT_KEY));
    assert!(back.key.is_of(&a) && !back.key.is_of(&b));
    assert!(back.key.to_string().ends_with("... (4095 bytes)"));
    for (length, whole) in [(KEPT_KEY, true), (KEPT_KEY + 1, false)] {
        let key = Key::new([b"a/", &[b'b'; 255][..], b"/", &long_key(length - 258)].concat()).unwrap();
        assert_eq!(key.as_bytes().len(), length);
        assert_eq!(matches!(KeptKey::of(&key), KeptKey::Whole(_)), whole);
    }
}

#[test]
fn i12_another_format_number_is_refused_by_name() {
    let header = header(2000, 5, 4096, 0, 1, b"k".to_vec(), 0o644);
    assert_eq!(Header::decode(&forged(&header, 8, &[2])), Err(ComponentError::Format(2)));
    assert!(ComponentError::Format(2).to_string().contains("format 2"));
    assert_eq!(Header::decode(&forged(&header, 4000, &[1; 88])), Ok(header));
}

#[test]
fn forged_fields_are_refused_each() {
    let good = header(2000, 10 * MIB, 65536, 4, 3, b"a/b".to_vec(), 0o644);
    let cases: [(usize, &[u8]); 17] = [
        (0, b"X"),
        (16, &[0, 4, 0, 0, 0, 0, 0, 0]),
        (23, &[0x80]),
        (24, &[3]),
        (28, &[0]),
        (32, &[1]),
        (36, &[1]),
        (40, &[1]),
        (48, &[0xff; 8]),
        (50, &[0xff]),
        (64, &1_000_000_000u32.to_le_bytes()),
        (68, &0o10000u32.to_le_bytes()),
        (72, &[4]),
        (72, &[0, 0x20]),
        (76, &[6]),
        (80, &[0, 1, 2, 3, 4]),
        (96, b"A"),
    ];
    for (at, bytes) in cases {
        assert!(Header::decode(&forged(&good, at, bytes)).is_err(), "byte {at}");
    }
    assert!(Header::decode(&forged(&good, 76, &64u32.to_le_bytes())).is_err());
}

#[test]
fn a_header_agrees_with_its_record_only() {
    let good = header(2000, 10 * MIB, 65536, 4, 3, b"a/b".to_vec(), 0o644);
    let name = ObjectName::new("names-1", &b"a/b"[..]).unwrap();
    let mut descriptor =
        Descriptor { version: 2000, attributes: good.attributes, striping: good.striping, components: Vec::new() };
    assert_eq!(Header::new(&name, &descriptor, 2), Ok(good.clone()));
    assert!(Header::new(&name, &descriptor, 3).is_err());
    assert_eq!(good.agree(&descriptor, 2), Ok(()));
    assert!(matches!(good.agree(&descriptor, 1), Err(ComponentError::Disagrees { field: "component index", .. })));
    descriptor.version = 2001;
    assert!(matches!(good.agree(&descriptor, 2), Err(ComponentError::Disagrees { field: "version", .. })));
    assert_eq!(good.file_name().to_string(), "2000.2");
}

#[test]
fn a_table_is_its_blocks_in_order() {
    let sums: Vec<u64> =
        (0..1100).map(|page| page_checksum(PageId { version: 2000, component: 1, page }, b"x")).collect();
    let blocks: Vec<_> = encode_table(2000, 1, &sums).collect();
    assert_eq!(blocks.len(), 3);
    let (block, place) = Geometry::sum_place(1099);
    let id = BlockId { version: 2000, component: 1, block };
    assert_eq!(TableBlock::decode(id, &blocks[block as usize]).unwrap().sums()[place], sums[1099]);
    let too_many = vec![0; SUMS_PER_BLOCK + 1];
    assert_eq!(TableBlock::encode(id, &too_many), Err(ComponentError::TooManySums(512)));
}
