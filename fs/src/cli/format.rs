//! Numbers as people read them.
//!
//! Guarantees: pure and total.

/// "1.2 GiB".
pub fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut unit = 0;
    let mut tenths = u128::from(bytes) * 10;
    while tenths >= 10240 && unit + 1 < units.len() {
        tenths = (tenths + 512) / 1024;
        unit += 1;
    }
    match units.get(unit).copied().unwrap_or("EiB") {
        "B" => format!("{bytes} B"),
        name => format!("{}.{} {name}", tenths / 10, tenths % 10),
    }
}

/// "3 d 4 h", "5 min 6 s".
pub fn duration(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86400 => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86400, seconds % 86400 / 3600),
    }
}

/// "2026-01-31 23:59:58" (UTC).
pub fn utc(seconds: i64) -> String {
    let days = seconds.div_euclid(86400);
    let (hour, minute, second) = {
        let rest = seconds.rem_euclid(86400);
        (rest / 3600, rest % 3600 / 60, rest % 60)
    };
    // Civil date from days since 1970, in eras of 400 years that begin on 1 March.
    let shifted = i128::from(days) + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i128::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}")
}

/// "rwxr-x---", with the special bits as `ls` shows them.
pub fn mode(mode: u32) -> String {
    let bit = |mask: u32, letter: char| if mode & mask != 0 { letter } else { '-' };
    let execute = |mask: u32, special: u32, letter: char| match (mode & mask != 0, mode & special != 0) {
        (true, true) => letter,
        (false, true) => letter.to_ascii_uppercase(),
        (true, false) => 'x',
        (false, false) => '-',
    };
    [
        bit(0o400, 'r'),
        bit(0o200, 'w'),
        execute(0o100, 0o4000, 's'),
        bit(0o040, 'r'),
        bit(0o020, 'w'),
        execute(0o010, 0o2000, 's'),
        bit(0o004, 'r'),
        bit(0o002, 'w'),
        execute(0o001, 0o1000, 't'),
    ]
    .iter()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_durations() {
        let shown = [0, 1023, 1024, 1536, (1 << 20) - 1, 5 << 30, u64::MAX].map(size);
        assert_eq!(shown, ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "5.0 GiB", "16.0 EiB"]);
        assert_eq!([59, 61, 7200, 90_000].map(duration), ["59 s", "1 min 1 s", "2 h 0 min", "1 d 1 h"]);
    }

    #[test]
    fn dates() {
        let shown = [0, 951_782_399, 951_782_400, 1_767_225_599, -1, 253_402_300_800].map(utc);
        let want = [
            "1970-01-01 00:00:00",
            "2000-02-28 23:59:59",
            "2000-02-29 00:00:00",
            "2025-12-31 23:59:59",
            "1969-12-31 23:59:59",
            "10000-01-01 00:00:00",
        ];
        assert_eq!(shown, want);
        let _ = (utc(i64::MAX), utc(i64::MIN));
    }

    #[test]
    fn modes() {
        assert_eq!([0o644, 0o4755, 0o1000, 0o2070].map(mode), ["rw-r--r--", "rwsr-xr-x", "--------T", "---rws---"]);
    }
}
