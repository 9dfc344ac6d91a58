//! `make bench-forms`: the two forms of reads (`io=direct`, `io=cached`) side by side, as ordinary programs read: through
//! read(2), without O_DIRECT.
//!
//! Guarantees: the forms take turns in every round, so that what disturbs one disturbs the other; each row says how many
//! object bytes came over the rails.

use crate::report::median;
use crate::stand::Stand;
use crate::{COLD, Failed, MIB, SECONDS, WARM, fio, measure};
use std::collections::BTreeMap;
use std::path::Path;

/// Rows: name, pattern, bytes of a read, readers, whether the file has been read before.
const ROWS: [(&str, &str, u64, u64, bool); 8] = [
    ("cold, sequential 1 MiB", "read", MIB, 1, false),
    ("cold, sequential 1 MiB, 4 readers", "read", MIB, 4, false),
    ("cold, random 4 KiB", "randread", 4096, 1, false),
    ("cold, random 4 KiB, 4 readers", "randread", 4096, 4, false),
    ("warm, sequential 1 MiB", "read", MIB, 1, true),
    ("warm, sequential 1 MiB, 4 readers", "read", MIB, 4, true),
    ("warm, random 4 KiB", "randread", 4096, 1, true),
    ("warm, random 4 KiB, 4 readers", "randread", 4096, 4, true),
];
const FORMS: [&str; 2] = ["direct", "cached"];

/// Measures and prints.
///
/// # Errors
/// Something broke.
pub fn run(programs: &Path, work: &Path, rounds: u32) -> Result<bool, Failed> {
    let stand = Stand::start(programs, work)?;
    stand.put("cold", COLD)?;
    stand.put("warm", WARM)?;
    let mut rates: BTreeMap<(usize, &str), Vec<f64>> = BTreeMap::new();
    for round in 1..=rounds {
        eprintln!("bench: round {round} of {rounds}");
        for form in FORMS {
            // A new mount for each cold row: neither its arena nor the kernel has anything of the file.
            for (row, (_, pattern, block, jobs, _)) in ROWS.into_iter().enumerate().filter(|(_, row)| !row.4) {
                let mount = stand.mount(&format!("arena=256MiB,io={form}"))?;
                let seconds = if pattern == "read" { 0 } else { SECONDS };
                let job = fio::Job { pattern, block, jobs, size: COLD, seconds, direct: false };
                rates.entry((row, form)).or_default().push(measure(&stand, &mount, "cold", &job)?.rate);
            }
            let mount = stand.mount(&format!("arena=512MiB,io={form}"))?;
            let job = fio::Job { pattern: "read", block: MIB, jobs: 1, size: WARM, seconds: 0, direct: false };
            fio::read(&mount.point.join("warm"), &job)?;
            for (row, (_, pattern, block, jobs, _)) in ROWS.into_iter().enumerate().filter(|(_, row)| row.4) {
                let job = fio::Job { pattern, block, jobs, size: WARM, seconds: SECONDS, direct: false };
                rates.entry((row, form)).or_default().push(measure(&stand, &mount, "warm", &job)?.rate);
            }
        }
    }
    println!("{:38} {:>13} {:>13} {:>7}", "", "direct MiB/s", "cached MiB/s", "ratio");
    for (row, (title, ..)) in ROWS.into_iter().enumerate() {
        let of = |form: &'static str| rates.get(&(row, form)).cloned().unwrap_or_default();
        let (direct, cached) = (of("direct"), of("cached"));
        let ratio = median(cached.iter().zip(&direct).map(|(cached, direct)| cached / direct));
        let mib = |rates: Vec<f64>| median(rates) / MIB as f64;
        println!("{title:38} {:>13.0} {:>13.0} {ratio:>7.2}", mib(direct), mib(cached));
    }
    Ok(true)
}
