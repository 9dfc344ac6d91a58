//! Bytes that can be told: every byte of a test's file follows from a seed and its place.
//!
//! Guarantees: the same seed and place give the same byte, in whatever pieces it is asked for; files are written and
//! compared in pieces, so their size does not matter.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

/// A well-mixed word of a seed (splitmix64).
pub fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Fills a buffer with the bytes at `offset`.
pub fn fill(seed: u64, offset: u64, buffer: &mut [u8]) {
    let base = mix(seed);
    let word = |place: u64| mix(base.wrapping_add(place)).to_le_bytes();
    let (first, skip) = (offset / 8, usize::try_from(offset % 8).unwrap_or(0));
    let head = buffer.len().min((8 - skip) % 8);
    let (start, rest) = buffer.split_at_mut(head);
    start.copy_from_slice(&word(first)[skip..][..head]);
    for (place, piece) in (first + u64::from(skip > 0)..).zip(rest.chunks_mut(8)) {
        piece.copy_from_slice(&word(place)[..piece.len()]);
    }
}

/// So many bytes from the start.
pub fn bytes(seed: u64, size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size];
    fill(seed, 0, &mut bytes);
    bytes
}

/// Writes a file.
///
/// # Panics
/// It cannot be written.
pub fn write_file(path: &Path, seed: u64, size: u64) {
    let mut file = File::create(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    while at < size {
        let piece = usize::try_from(size - at).unwrap_or(usize::MAX).min(buffer.len());
        fill(seed, at, &mut buffer[..piece]);
        file.write_all(&buffer[..piece]).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        at += piece as u64;
    }
}

/// Reads to the end and compares; how it differs, if it does.
///
/// # Errors
/// The first difference, or what reading said.
pub fn compare(reader: &mut dyn Read, seed: u64, size: u64) -> Result<(), String> {
    let mut buffer = vec![0; 1 << 20];
    let mut want = vec![0; 1 << 20];
    let mut at = 0;
    loop {
        let got = reader.read(&mut buffer).map_err(|error| format!("at {at}: {error}"))?;
        if got == 0 {
            return if at == size { Ok(()) } else { Err(format!("{at} bytes, not {size}")) };
        }
        fill(seed, at, &mut want[..got]);
        if buffer[..got] != want[..got] {
            let place = buffer[..got].iter().zip(&want).position(|(a, b)| a != b).unwrap_or(0);
            return Err(format!("differs at byte {}", at + place as u64));
        }
        at += got as u64;
    }
}

/// A file must hold exactly these bytes.
///
/// # Panics
/// It does not.
#[track_caller]
pub fn assert_file(path: &Path, seed: u64, size: u64) {
    let mut file = File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    compare(&mut file, seed, size).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
}

/// Numbers that follow from a seed, for choices at random that can be repeated.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// From a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }
    /// From 0 up to, not including, `end` (which is not 0).
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0) % end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_as_the_whole() {
        let whole = bytes(7, 100);
        for start in 0..30 {
            for end in start..60 {
                let mut piece = vec![0; end - start];
                fill(7, start as u64, &mut piece);
                assert_eq!(piece, whole[start..end], "{start}..{end}");
            }
        }
        assert_ne!(whole, bytes(8, 100));
        assert_eq!(compare(&mut &whole[..], 7, 100), Ok(()));
        assert!(compare(&mut &whole[..99], 7, 100).is_err());
        assert!(compare(&mut &whole[..], 8, 100).unwrap_err().contains("at byte 0"));
    }
}
