//! What a transfer says while it goes on.
//!
//! Guarantees: on a terminal a bar on standard error, redrawn in place and gone at the end; otherwise one line for each file
//! on standard output, or with `--json` one object; with `--quiet` nothing. What went wrong is said on standard error in
//! each case. Any number of threads may report.

use super::show::end_of_output;
use crate::failure::Failure;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// How much is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Nothing.
    pub quiet: bool,
    /// One JSON object a file.
    pub json: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Report {
    wanted: Wanted,
    bar: Option<ProgressBar>,
    files: AtomicU64,
    /// Standard output failed: the first that was said of it.
    failed: Mutex<Option<Failure>>,
}

impl Report {
    /// For a transfer of files to standard output, if `to_stdout`: then nothing else may be said there.
    pub fn new(wanted: Wanted, to_stdout: bool) -> Report {
        // Bytes that go to a terminal would be drawn over.
        let drawn_over = to_stdout && std::io::stdout().is_terminal();
        let draws = !wanted.quiet && !wanted.json && !drawn_over && std::io::stderr().is_terminal();
        let bar = draws.then(bar);
        let wanted = if to_stdout { Wanted { quiet: true, json: false } } else { wanted };
        Report { wanted, bar, files: AtomicU64::new(0), failed: Mutex::default() }
    }

    /// So many bytes more are to come.
    pub fn expect(&self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.inc_length(bytes);
        }
    }

    /// So many bytes have gone.
    pub fn moved(&self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.inc(bytes);
        }
    }

    /// A file is done: as a line, and as JSON.
    pub fn done(&self, line: impl FnOnce() -> Vec<u8>, json: impl FnOnce() -> Value) {
        let files = self.files.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if self.wanted.quiet {
            return;
        }
        let text = match &self.bar {
            Some(bar) => return bar.set_message(format!("{files} files")),
            None if self.wanted.json => json().to_string().into_bytes(),
            None => line(),
        };
        let mut out = std::io::stdout().lock();
        let written = out.write_all(&[&text[..], b"\n"].concat()).and_then(|()| out.flush());
        if let Err(error) = written {
            let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
            failed.get_or_insert_with(|| end_of_output(&error));
        }
    }

    /// Something that a person should know.
    pub fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("railfs: {text}")),
            None => eprintln!("railfs: {text}"),
        }
    }

    /// Everything has been said.
    ///
    /// # Errors
    /// Standard output failed meanwhile.
    pub fn end(&self) -> Result<(), Failure> {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        match self.failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }
}

fn bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
    let template = "{bar:30} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left {msg}";
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        // The plain one does as well.
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_template_of_the_bar_is_one() {
        let bar = bar();
        bar.inc_length(10);
        bar.inc(3);
        assert_eq!((bar.position(), bar.length()), (3, Some(10)));
        bar.finish_and_clear();
    }

    #[test]
    fn nothing_is_said_where_the_bytes_go_or_when_quiet() {
        for report in [
            Report::new(Wanted { quiet: true, json: false }, false),
            Report::new(Wanted { quiet: false, json: true }, true),
        ] {
            report.done(|| panic!("a line was made"), || panic!("JSON was made"));
            assert_eq!(report.end(), Ok(()));
        }
    }
}
