//! Runs fio and reads what it says.

use crate::Failed;
use std::path::Path;
use std::process::{Command, Stdio};

/// What is read, and how.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// "read" or "randread".
    pub pattern: &'static str,
    /// Bytes of one read(2).
    pub block: u64,
    /// Readers, each with its own part of the file.
    pub jobs: u64,
    /// Bytes of the file.
    pub size: u64,
    /// Seconds; 0: once through the file.
    pub seconds: u64,
    /// O_DIRECT.
    pub direct: bool,
}

/// What came of it.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// Bytes a second, all readers together.
    pub rate: f64,
    /// Bytes read.
    pub bytes: u64,
}

/// Reads a file, one read(2) at a time for each job, without a hint to the kernel of what comes next.
///
/// # Errors
/// fio's own last words, or an output that is not understood.
pub fn read(file: &Path, job: &Job) -> Result<Reading, Failed> {
    let mut command = Command::new("fio");
    let part = job.size / job.jobs;
    command.args([
        "--name=bench",
        "--readonly",
        "--fadvise_hint=0",
        "--ioengine=psync",
        "--thread",
        "--group_reporting",
    ]);
    command.args(["--output-format=json", "--invalidate=0", "--allrandrepeat=0", "--randrepeat=0", "--norandommap"]);
    command.arg(format!("--filename={}", file.display()));
    command.arg(format!("--direct={}", u8::from(job.direct)));
    command.arg(format!("--rw={}", job.pattern));
    command.arg(format!("--bs={}", job.block));
    command.arg(format!("--numjobs={}", job.jobs));
    command.arg(format!("--size={part}"));
    if job.jobs > 1 {
        command.arg(format!("--offset_increment={part}"));
    }
    if job.seconds > 0 {
        command.args(["--time_based".to_owned(), format!("--runtime={}", job.seconds)]);
    }
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("fio: {error}"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(format!("fio ended with {}: {}", output.status, text.trim().lines().last().unwrap_or("")));
    }
    // fio may print a word of warning before its JSON.
    let text = String::from_utf8_lossy(&output.stdout);
    let json = text.find('{').map_or("", |start| &text[start..]);
    let value: serde_json::Value = serde_json::from_str(json).map_err(|error| format!("fio's output: {error}"))?;
    let done = &value["jobs"][0];
    let number = |key: &str| done["read"][key].as_f64().ok_or_else(|| format!("fio's output has no {key}"));
    if done["error"].as_i64() != Some(0) {
        return Err(format!("fio: a read failed with errno {}", done["error"]));
    }
    Ok(Reading { rate: number("bw_bytes")?, bytes: number("io_bytes")? as u64 })
}
