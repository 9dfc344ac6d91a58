//! What is printed: medians, ratios, the two bars.

use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Measured once, in one round.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Sample {
    /// Bytes a second; of `rtt` none.
    pub rate: f64,
    /// Microseconds of one operation of one reader.
    pub microseconds: f64,
    /// Bytes that the reader got.
    pub bytes: u64,
    /// Object bytes over each rail meanwhile.
    pub rail_bytes: Vec<u64>,
    /// Processor seconds of the client's daemon for 10^9 bytes.
    pub client_cpu: f64,
    /// Processor seconds of the server for 10^9 bytes.
    pub server_cpu: f64,
}

/// One run.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Processors, kernel, load before.
    pub machine: BTreeMap<&'static str, String>,
    /// By row, one sample a round.
    pub rows: BTreeMap<&'static str, Vec<Sample>>,
    /// Medians of the ratios of each round.
    pub ratios: BTreeMap<&'static str, f64>,
    /// What is not as it must be.
    pub broken: Vec<String>,
}

/// The rows in the order they are printed, and what they are.
pub const ROWS: [(&str, &str); 11] = [
    ("null_seq", "null FUSE, sequential 1 MiB"),
    ("null_seq_4", "null FUSE, sequential 1 MiB, 4 readers"),
    ("null_4k", "null FUSE, random 4 KiB"),
    ("tcp", "one loopback TCP stream"),
    ("rtt", "a check, there and back over a rail"),
    ("cold_seq", "railfs, cold sequential 1 MiB"),
    ("cold_seq_4", "railfs, cold sequential 1 MiB, 4 readers"),
    ("warm_seq", "railfs, warm sequential 1 MiB"),
    ("warm_seq_4", "railfs, warm sequential 1 MiB, 4 readers"),
    ("warm_4k", "railfs, warm random 4 KiB"),
    ("cold_4k", "railfs, cold random 4 KiB (a page each)"),
];

/// The smallest ratios that are wanted: cold to one TCP stream, warm to what null FUSE and one round trip allow.
pub const BARS: [(&str, f64); 2] = [("cold_of_tcp", 0.25), ("warm_of_allowed", 0.8)];

/// The middle one; of two the lower.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(f64::NAN)
}

impl Report {
    /// Adds a sample.
    pub fn add(&mut self, row: &'static str, sample: Sample) {
        self.rows.entry(row).or_default().push(sample);
    }

    fn of(&self, row: &str, value: impl Fn(&Sample) -> f64) -> Vec<f64> {
        self.rows.get(row).into_iter().flatten().map(value).collect()
    }

    /// Ratios by round, then their median: what disturbs a round disturbs both sides of it.
    pub fn judge(&mut self) {
        let rate = |row: &str| self.of(row, |sample| sample.rate);
        let micro = |row: &str| self.of(row, |sample| sample.microseconds);
        let ratio = |a: &[f64], b: &[f64]| median(a.iter().zip(b).map(|(a, b)| a / b));
        let tcp = rate("tcp");
        let allowed =
            |null: &str| -> Vec<f64> { micro(null).iter().zip(micro("rtt")).map(|(null, trip)| null + trip).collect() };
        let ratios = [
            ("cold_of_tcp", ratio(&rate("cold_seq"), &tcp)),
            ("cold_4_of_tcp", ratio(&rate("cold_seq_4"), &tcp)),
            ("warm_of_allowed", ratio(&allowed("null_seq"), &micro("warm_seq"))),
            ("warm_of_null", ratio(&rate("warm_seq"), &rate("null_seq"))),
            ("warm_4_of_null_4", ratio(&rate("warm_seq_4"), &rate("null_seq_4"))),
            ("warm_4k_of_allowed", ratio(&allowed("null_4k"), &micro("warm_4k"))),
        ];
        self.ratios = ratios.into_iter().collect();
    }

    /// For people.
    pub fn table(&self) -> String {
        let mut out = String::new();
        for (key, value) in &self.machine {
            let _ = writeln!(out, "{key}: {value}");
        }
        let rounds = self.rows.values().map(Vec::len).max().unwrap_or(0);
        let _ = writeln!(out, "medians of {rounds} rounds\n");
        let _ =
            writeln!(out, "{:44} {:>9} {:>9} {:>19} {:>13}", "", "MiB/s", "us/read", "MiB over rails", "CPU s per GB");
        for (row, title) in ROWS {
            let Some(samples) = self.rows.get(row) else { continue };
            let mid = |value: fn(&Sample) -> f64| median(samples.iter().map(value));
            let rate = mid(|sample| sample.rate) / f64::from(1 << 20);
            let rate = if rate > 0.0 { format!("{rate:.0}") } else { String::new() };
            let micro = mid(|sample| sample.microseconds);
            let micro = if micro > 0.0 { format!("{micro:.1}") } else { String::new() };
            let rails = samples.last().map_or(String::new(), |sample| {
                let mib: Vec<String> = sample.rail_bytes.iter().map(|bytes| (bytes >> 20).to_string()).collect();
                mib.join(" + ")
            });
            let (client, server) = (mid(|sample| sample.client_cpu), mid(|sample| sample.server_cpu));
            let cpu = match (client > 0.0, server > 0.0) {
                (false, _) => String::new(),
                (true, false) => format!("{client:.2}"),
                (true, true) => format!("{client:.2} + {server:.2}"),
            };
            let _ = writeln!(out, "{title:44} {rate:>9} {micro:>9} {rails:>19} {cpu:>13}");
        }
        out.push('\n');
        for (name, value) in &self.ratios {
            let bar = BARS.iter().find(|(bar, _)| bar == name);
            let verdict = bar.map_or(String::new(), |(_, least)| {
                format!("  {} (at least {least})", if value >= least { "PASS" } else { "FAIL" })
            });
            let _ = writeln!(out, "{name:20} {value:6.3}{verdict}");
        }
        for line in &self.broken {
            let _ = writeln!(out, "BROKEN {line}");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(rate: f64, microseconds: f64) -> Sample {
        Sample { rate, microseconds, ..Sample::default() }
    }

    #[test]
    fn medians() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([1.0, 4.0]), 1.0);
        assert!(median([]).is_nan());
    }

    #[test]
    fn the_bars_compare_round_by_round() {
        let mut report = Report::default();
        // The second round ran on a machine half as fast: its ratio is the same.
        for speed in [1.0, 2.0, 1.0] {
            report.add("tcp", sample(4000.0 / speed, 0.0));
            report.add("cold_seq", sample(1000.0 / speed, 1000.0 * speed));
            report.add("null_seq", sample(5000.0 / speed, 200.0 * speed));
            report.add("rtt", sample(0.0, 50.0 * speed));
            report.add("warm_seq", sample(2500.0 / speed, 312.5 * speed));
        }
        report.judge();
        assert_eq!(report.ratios["cold_of_tcp"], 0.25);
        assert_eq!(report.ratios["warm_of_allowed"], 0.8);
        let table = report.table();
        assert_eq!(table.matches("PASS").count(), 2, "{table}");
        report.rows.clear();
        report.add("tcp", sample(4000.0, 0.0));
        report.add("cold_seq", sample(999.0, 1000.0));
        report.judge();
        assert!(report.table().contains("FAIL (at least 0.25)"));
    }
}
