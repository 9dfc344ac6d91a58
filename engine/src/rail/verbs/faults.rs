//! Faults that tests put into a verbs rail. Only builds with debug assertions have them: anywhere else there are none, and
//! nothing that could be said would make one.
//!
//! Guarantees: without `RAILFS_TEST_VERBS` a rail has no faults.

use std::time::Duration;

/// Of one rail, or of all connections of one listener.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Faults {
    /// A server: a reply with its WRITE goes out so much later than it should, and after its request was struck off, so that
    /// giving the request up no longer stops it: as a slow wire or card would do it.
    pub(super) late: Duration,
    /// A client: memory of a request that was given up counts as fenced at once.
    pub(super) unfenced: bool,
}

/// Those of a rail, by what its name begins with.
#[cfg(not(debug_assertions))]
pub(super) fn of(_: &str) -> Faults {
    Faults::default()
}

/// Those of a rail, by what its name begins with: `NAME=WORD+WORD;NAME=WORD...`, with the words `unfenced` and
/// `late:MILLISECONDS`, in `RAILFS_TEST_VERBS`.
#[cfg(debug_assertions)]
pub(super) fn of(name: &str) -> Faults {
    let faults = std::env::var("RAILFS_TEST_VERBS").map(|text| parse(&text, name)).unwrap_or_default();
    if faults != Faults::default() {
        tracing::warn!(rail = name, ?faults, "this rail has faults, as RAILFS_TEST_VERBS says");
    }
    faults
}

#[cfg(debug_assertions)]
fn parse(text: &str, name: &str) -> Faults {
    let mut faults = Faults::default();
    for (rail, words) in text.split(';').filter_map(|part| part.split_once('=')) {
        if !name.starts_with(rail.trim()) {
            continue;
        }
        for word in words.split('+').map(str::trim) {
            match word.split_once(':') {
                None if word == "unfenced" => faults.unfenced = true,
                Some(("late", milliseconds)) => {
                    faults.late = milliseconds.parse().map(Duration::from_millis).unwrap_or_default();
                }
                _ => tracing::error!(word, "RAILFS_TEST_VERBS says something that is not known"),
            }
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_those_of_the_rail_that_was_named_and_none_by_default() {
        let text = "rail0=late:1500+unfenced; f1 10=unfenced;rail=nonsense;x";
        assert_eq!(parse(text, "rail0 connection 3"), Faults { late: Duration::from_millis(1500), unfenced: true });
        assert_eq!(parse(text, "f1 10.9.0.1"), Faults { late: Duration::ZERO, unfenced: true });
        assert_eq!(parse(text, "rail1"), Faults::default());
        assert_eq!(parse("", "rail0"), Faults::default());
    }
}
