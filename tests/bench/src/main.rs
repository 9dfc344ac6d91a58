//! `make bench`: what railfs reaches on this machine, with the machine's own ceilings measured beside it in the same run.
//!
//! Guarantees: ceilings and rows take turns in every round, so that what disturbs one disturbs the other; a row that did
//! not do what it claims (cold bytes that came from a cache, warm ones that came over a rail) is reported as broken and
//! ends the run with 1; the bars are printed, not enforced.

#![forbid(unsafe_code)]

mod fio;
mod forms;
mod null;
mod rdma;
mod report;
mod rtt;
mod stand;
mod tcp;

use report::{Report, Sample};
use stand::{Mount, Stand, cpu_seconds};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

/// What went wrong, for a person.
pub type Failed = String;

/// The cold file, bytes: four times the arena of the cold mount.
const COLD: u64 = 1 << 30;
/// The warm file, bytes: as much as null FUSE answers from.
const WARM: u64 = null::SIZE;
const MIB: u64 = 1 << 20;
/// Seconds of a row that is not once through a file.
const SECONDS: u64 = 2;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result =
        match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["null", point] => null::serve(Path::new(point)).map(|()| true),
            ["run", programs, work, json, rounds] => match rounds.parse() {
                Ok(rounds @ 1..=99) => run(Path::new(programs), Path::new(work), Path::new(json), rounds),
                _ => Err(format!("{rounds} is not a number of rounds from 1 to 99")),
            },
            ["rdma", ref sides @ ..] => rdma::bench(sides),
            ["forms", programs, work, rounds] => match rounds.parse() {
                Ok(rounds @ 1..=99) => forms::run(Path::new(programs), Path::new(work), rounds),
                _ => Err(format!("{rounds} is not a number of rounds from 1 to 99")),
            },
            _ => Err("usage: railfs-bench run PROGRAMS WORK JSON ROUNDS | forms PROGRAMS WORK ROUNDS | rdma SIDE SIDE ROUNDS | null MOUNTPOINT (see tests/bin/bench.sh)"
                .to_owned()),
        };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(programs: &Path, work: &Path, json: &Path, rounds: u32) -> Result<bool, Failed> {
    let mut report = Report::default();
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    report.machine.insert("processors", cores.to_string());
    report.machine.insert("kernel", read("/proc/sys/kernel/osrelease"));
    report.machine.insert("load before", read("/proc/loadavg"));
    let stand = Stand::start(programs, work)?;
    stand.put("cold", COLD)?;
    stand.put("warm", WARM)?;
    let mut session = rtt::Session::open(&stand.address, "bench", "warm")?;
    for round in 1..=rounds {
        eprintln!("bench: round {round} of {rounds}");
        let rate = tcp::stream(Duration::from_secs(SECONDS))?;
        report.add("tcp", Sample { rate, microseconds: MIB as f64 / rate * 1e6, ..Sample::default() });
        nulls(&mut report, work)?;
        report.add("rtt", Sample { microseconds: session.median()?, ..Sample::default() });
        for (row, jobs) in [("cold_seq", 1), ("cold_seq_4", 4)] {
            let mount = stand.mount("arena=256MiB")?;
            let job = fio::Job { pattern: "read", block: MIB, jobs, size: COLD, seconds: 0, direct: true };
            let sample = measure(&stand, &mount, "cold", &job)?;
            let moved: u64 = sample.rail_bytes.iter().sum();
            if moved < COLD {
                report.broken.push(format!("{row}: only {moved} of {COLD} bytes came over the rails"));
            }
            report.add(row, sample);
        }
        let mount = stand.mount("arena=512MiB")?;
        let once = fio::Job { pattern: "read", block: MIB, jobs: 1, size: WARM, seconds: 0, direct: true };
        fio::read(&mount.point.join("warm"), &once)?;
        for (row, pattern, block, jobs) in
            [("warm_seq", "read", MIB, 1), ("warm_seq_4", "read", MIB, 4), ("warm_4k", "randread", 4096, 1)]
        {
            let sample = measure(
                &stand,
                &mount,
                "warm",
                &fio::Job { pattern, block, jobs, size: WARM, seconds: SECONDS, direct: true },
            )?;
            let moved: u64 = sample.rail_bytes.iter().sum();
            if moved > 0 {
                report.broken.push(format!("{row}: {moved} bytes came over the rails, not from the cache"));
            }
            report.add(row, sample);
        }
        drop(mount);
        let mount = stand.mount("arena=256MiB")?;
        let job = fio::Job { pattern: "randread", block: 4096, jobs: 1, size: COLD, seconds: SECONDS, direct: true };
        report.add("cold_4k", measure(&stand, &mount, "cold", &job)?);
    }
    session.close();
    report.machine.insert("load after", read("/proc/loadavg"));
    report.judge();
    print!("{}", report.table());
    let text = serde_json::to_string_pretty(&report).map_err(|error| error.to_string())?;
    std::fs::write(json, text).map_err(|error| format!("{}: {error}", json.display()))?;
    println!("all samples: {}", json.display());
    Ok(report.broken.is_empty())
}

/// Microseconds of one read of one reader.
fn per_read(job: &fio::Job, rate: f64) -> f64 {
    job.block as f64 * job.jobs as f64 / rate * 1e6
}

fn measure(stand: &Stand, mount: &Mount<'_>, name: &str, job: &fio::Job) -> Result<Sample, Failed> {
    let file = mount.point.join(name);
    let before = mount.rail_bytes()?;
    let cpu = || (cpu_seconds(mount.pid), cpu_seconds(stand.server_pid()));
    let (client, server) = cpu();
    let reading = fio::read(&file, job)?;
    let (client_end, server_end) = cpu();
    let after = mount.rail_bytes()?;
    let gigabytes = reading.bytes as f64 / 1e9;
    Ok(Sample {
        rate: reading.rate,
        microseconds: per_read(job, reading.rate),
        bytes: reading.bytes,
        rail_bytes: after.iter().zip(before).map(|(after, before)| after - before).collect(),
        client_cpu: (client_end - client) / gigabytes,
        server_cpu: (server_end - server) / gigabytes,
    })
}

/// Null FUSE, a process of its own as the mount's daemon is.
fn nulls(report: &mut Report, work: &Path) -> Result<(), Failed> {
    let point: PathBuf = work.join("null");
    std::fs::create_dir_all(&point).map_err(|error| format!("{}: {error}", point.display()))?;
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut child = Command::new(program)
        .arg("null")
        .arg(&point)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("null FUSE: {error}"))?;
    let measured = stand::hear(&mut child, "ready").and_then(|_| {
        let file = point.join(null::NAME);
        for (row, pattern, block, jobs) in
            [("null_seq", "read", MIB, 1), ("null_seq_4", "read", MIB, 4), ("null_4k", "randread", 4096, 1)]
        {
            let job = fio::Job { pattern, block, jobs, size: null::SIZE, seconds: SECONDS, direct: true };
            let before = cpu_seconds(child.id());
            let reading = fio::read(&file, &job)?;
            let cpu = (cpu_seconds(child.id()) - before) / (reading.bytes as f64 / 1e9);
            let microseconds = per_read(&job, reading.rate);
            let (rate, bytes) = (reading.rate, reading.bytes);
            report.add(row, Sample { rate, microseconds, bytes, client_cpu: cpu, ..Sample::default() });
        }
        Ok(())
    });
    if let Err(error) = railfs::mount::kernel::unmount(&point, true) {
        eprintln!("bench: null FUSE: {error:?}");
    }
    stand::stop(&mut child);
    measured.map_err(|error| format!("null FUSE: {error}"))
}
