//! Sizes and times with units, as people write them in configuration files and options.
//!
//! Guarantees: any text gives a value or an error that says what is wrong with it; nothing overflows, nothing is rounded;
//! what the formatting functions write parses to the same value.

use std::time::Duration;

/// Why a size or a time is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// See the message.
    #[error("\"{0}\" has no number: write a whole number and a unit, such as {1}")]
    NoNumber(String, &'static str),
    /// See the message.
    #[error("\"{0}\" is negative")]
    Negative(String),
    /// See the message.
    #[error("\"{0}\" is not a whole number: use a smaller unit, such as {1}")]
    Fraction(String, &'static str),
    /// See the message.
    #[error("\"{text}\" has the unknown unit \"{unit}\": use one of {known}")]
    Unit {
        /// What was written.
        text: String,
        /// Its unit.
        unit: String,
        /// The units there are.
        known: &'static str,
    },
    /// A time needs a unit.
    #[error("\"{0}\" has no unit: use one of {1}")]
    NoUnit(String, &'static str),
    /// See the message.
    #[error("\"{0}\" is too large")]
    TooLarge(String),
}

const SIZE_UNITS: &str = "B, KiB, MiB, GiB, TiB (powers of 1024) or kB, MB, GB, TB (powers of 1000)";
const TIME_UNITS: &str = "ms, s, min, h";
const SIZE_EXAMPLE: &str = "\"64 KiB\"";
const TIME_EXAMPLE: &str = "\"500 ms\"";

/// The number and what stands behind it, without the spaces between.
fn split<'a>(text: &'a str, example: &'static str) -> Result<(u64, &'a str), UnitError> {
    let trimmed = text.trim();
    if trimmed.starts_with('-') {
        return Err(UnitError::Negative(text.to_owned()));
    }
    let end = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
    let (digits, rest) = trimmed.split_at(end);
    if digits.is_empty() {
        return Err(UnitError::NoNumber(text.to_owned(), example));
    }
    if rest.starts_with(['.', ',']) {
        return Err(UnitError::Fraction(text.to_owned(), example));
    }
    let number = digits.parse().map_err(|_| UnitError::TooLarge(text.to_owned()))?;
    Ok((number, rest.trim_start()))
}

/// Bytes: "1 MiB", "64KiB", "4194304". Units are not case sensitive.
///
/// # Errors
/// See [`UnitError`].
pub fn parse_size(text: &str) -> Result<u64, UnitError> {
    let (number, unit) = split(text, SIZE_EXAMPLE)?;
    let factor: u64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" | "k" => 1 << 10,
        "mib" | "m" => 1 << 20,
        "gib" | "g" => 1 << 30,
        "tib" | "t" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(UnitError::Unit { text: text.to_owned(), unit: unit.to_owned(), known: SIZE_UNITS }),
    };
    number.checked_mul(factor).ok_or_else(|| UnitError::TooLarge(text.to_owned()))
}

/// A time: "60 s", "500 ms", "5min", "2 h".
///
/// # Errors
/// See [`UnitError`].
pub fn parse_duration(text: &str) -> Result<Duration, UnitError> {
    let (number, unit) = split(text, TIME_EXAMPLE)?;
    let milliseconds: u64 = match unit {
        "" => return Err(UnitError::NoUnit(text.to_owned(), TIME_UNITS)),
        "ms" => 1,
        "s" => 1_000,
        "min" => 60_000,
        "h" => 3_600_000,
        _ => return Err(UnitError::Unit { text: text.to_owned(), unit: unit.to_owned(), known: TIME_UNITS }),
    };
    let total = number.checked_mul(milliseconds).ok_or_else(|| UnitError::TooLarge(text.to_owned()))?;
    Ok(Duration::from_millis(total))
}

/// In the largest unit that is exact: "1 MiB", "4097 B".
pub fn format_size(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.iter().find(|(shift, _)| bytes != 0 && bytes.trailing_zeros() >= *shift) {
        Some((shift, unit)) => format!("{} {unit}", bytes >> shift),
        None => format!("{bytes} B"),
    }
}

/// In seconds where that is exact, else in milliseconds (less is cut off).
pub fn format_duration(duration: Duration) -> String {
    let milliseconds = duration.as_millis();
    if milliseconds.is_multiple_of(1000) { format!("{} s", milliseconds / 1000) } else { format!("{milliseconds} ms") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_text_gives_a_value_or_an_error(text in ".{0,40}") {
            let _ = parse_size(&text);
            let _ = parse_duration(&text);
        }

        #[test]
        fn what_is_written_is_read_back(bytes in any::<u64>(), milliseconds in 0u64..u64::MAX / 2) {
            prop_assert_eq!(parse_size(&format_size(bytes)), Ok(bytes));
            let duration = Duration::from_millis(milliseconds);
            prop_assert_eq!(parse_duration(&format_duration(duration)), Ok(duration));
        }
    }

    #[test]
    fn sizes() {
        for (text, bytes) in
            [("1 MiB", 1 << 20), ("64KiB", 65536), ("4194304", 4 << 20), (" 3 kB ", 3000), ("2g", 2 << 30)]
        {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        assert!(matches!(parse_size("-1 MiB"), Err(UnitError::Negative(_))));
        assert!(matches!(parse_size("1.5 MiB"), Err(UnitError::Fraction(..))));
        assert!(matches!(parse_size("MiB"), Err(UnitError::NoNumber(..))));
        assert!(matches!(parse_size("1 MeB"), Err(UnitError::Unit { .. })));
        assert!(matches!(parse_size("99999999 TiB"), Err(UnitError::TooLarge(_))));
        assert!(matches!(parse_size("99999999999999999999"), Err(UnitError::TooLarge(_))));
    }

    #[test]
    fn times() {
        for (text, ms) in [("60 s", 60_000), ("500 ms", 500), ("5min", 300_000), ("2 h", 7_200_000), ("0 s", 0)] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        assert!(matches!(parse_duration("60"), Err(UnitError::NoUnit(..))));
        assert!(matches!(parse_duration("60 sec"), Err(UnitError::Unit { .. })));
        assert!(matches!(parse_duration("-1 s"), Err(UnitError::Negative(_))));
    }
}
