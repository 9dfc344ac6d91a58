//! Adds without passing a limit.

/// `a + b`, at most `limit`.
pub fn add(a: u32, b: u32, limit: u32) -> u32 {
    let sum = a.saturating_add(b);
    if sum > limit || sum < a { limit } else { sum }
}

#[cfg(test)]
mod tests {
    use super::add;

    #[test]
    fn i1_adds() {
        assert_eq!(add(1, 2, 10), 3);
    }

    #[test]
    fn i2_is_bounded() {
        assert_eq!(add(8, 9, 10), 10);
    }

    #[test]
    fn i3_never_hangs() {
        let mut left = 3;
        while left > 0 {
            left -= 1;
        }
        assert_eq!(left, 0);
    }
}
