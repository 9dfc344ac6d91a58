//! One small hash for names that must be the same in every run and build.

/// FNV-1a with a final mix.
pub fn bytes(bytes: &[u8]) -> u64 {
    let mut hash =
        bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    hash = (hash ^ (hash >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    hash ^ (hash >> 32)
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_never_changes() {
        assert_eq!(super::bytes(b""), super::bytes(b""));
        assert_ne!(super::bytes(b"a"), super::bytes(b"b"));
    }
}
