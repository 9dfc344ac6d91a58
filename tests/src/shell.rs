//! Programs as people type them: a line of bash, with the mount and its source as `$M` and `$S`.
//!
//! Guarantees: a line that fails anywhere (`set -euo pipefail`) fails, and a program that a machine lacks is known before.

use crate::mount::Mount;
use crate::process::{Output, run};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// A line that has not ended after this long hangs.
pub const LIMIT: Duration = Duration::from_secs(120);

/// Runs a line of bash; `$T` is an empty directory that is removed afterwards.
///
/// # Panics
/// It does not end in time.
#[track_caller]
pub fn shell(mount: &Mount, source: &Path, text: &str) -> Output {
    shell_within(mount, source, text, LIMIT)
}

/// [`shell`] with a limit of its own.
///
/// # Panics
/// It does not end in time.
#[track_caller]
pub fn shell_within(mount: &Mount, source: &Path, text: &str, limit: Duration) -> Output {
    let temporary = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
    let mut command = Command::new("bash");
    command.args(["-c", &format!("set -euo pipefail; {text}")]).env("LC_ALL", "C");
    run(command.env("M", &mount.path).env("S", source).env("T", temporary.path()), limit)
}

/// The first of these programs that this machine lacks.
pub fn lacks(programs: &[&str]) -> Option<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let has = |name: &str| std::env::split_paths(&path).any(|directory| directory.join(name).is_file());
    programs.iter().find(|name| !has(name)).map(|name| format!("{name} is not installed (make setup)"))
}

/// Returns from the test, with a word in the log of skips, where programs are missing.
#[macro_export]
macro_rules! need_programs {
    ($test:expr, $($program:expr),+) => {
        if let Some(reason) = $crate::shell::lacks(&[$($program),+]) {
            return $crate::skip($test, &reason);
        }
    };
}
