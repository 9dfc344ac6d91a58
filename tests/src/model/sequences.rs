//! Runs many sequences on several threads, and makes a failing one small.
//!
//! Guarantees: sequence number n of a run from seed s is the sequence of seed s + n; a difference is shown with the smallest
//! sequence that still has it, and with what to set to run that one alone. `RAILFS_SEED` sets the first seed.

use super::steps::{Step, sequence};
use crate::full;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A run that goes on for longer says now and then how far it is.
const TELL: Duration = Duration::from_secs(60);

/// How many, from which seed, on how many threads.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Sequences.
    pub count: u64,
    /// The first one's seed.
    pub seed: u64,
    /// Threads, each with a subject of its own.
    pub threads: u64,
    /// One step in about so many is a remount, and one a restart.
    pub rare: u32,
}

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name} is \"{value}\": a number is wanted")))
}

impl Plan {
    /// `count` sequences, or `full_count` with `RAILFS_FULL=1`, or as many as the variable says.
    ///
    /// # Panics
    /// A variable holds no number.
    pub fn new(variable: &str, count: u64, full_count: u64, threads: u64, rare: u32) -> Plan {
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let seed = number("RAILFS_SEED").unwrap_or(clock.as_secs() % 1_000_000_000 * 1000);
        let count = number(variable).unwrap_or(if full() { full_count } else { count });
        Plan { count, seed, threads: threads.min(count.max(1)), rare }
    }

    /// Runs all of it. `make`: what a thread runs its sequences with. `run`: one sequence, in a place of its own (it is called
    /// again, with fewer steps, when it fails).
    ///
    /// # Panics
    /// A difference: the smallest sequence that shows it, and its seed.
    pub fn run<S>(
        &self,
        variable: &str,
        make: impl Fn(u64) -> S + Sync,
        run: impl Fn(&mut S, &[Step]) -> Result<(), String> + Sync,
        end: impl Fn(S) + Sync,
    ) {
        let (next, done, steps) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        let failed = AtomicBool::new(false);
        let (started, told) = (Instant::now(), AtomicU64::new(1));
        eprintln!("{} sequences on {} threads, RAILFS_SEED={}", self.count, self.threads, self.seed);
        std::thread::scope(|scope| {
            for thread in 0..self.threads {
                let (next, done, steps, failed, told) = (&next, &done, &steps, &failed, &told);
                let (make, run, end) = (&make, &run, &end);
                scope.spawn(move || {
                    let mut subject = make(thread);
                    while !failed.load(Ordering::Relaxed) {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number >= self.count {
                            break;
                        }
                        let seed = self.seed.wrapping_add(number);
                        if let Err(why) = self.one(seed, steps, &mut |steps| run(&mut subject, steps)) {
                            failed.store(true, Ordering::Relaxed);
                            panic!("RAILFS_SEED={seed} {variable}=1 shows it again: {why}");
                        }
                        let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                        let minutes = started.elapsed().as_secs() / TELL.as_secs();
                        if minutes >= told.load(Ordering::Relaxed)
                            && told.fetch_max(minutes + 1, Ordering::Relaxed) <= minutes
                        {
                            eprintln!("{done} of {} after {:?}", self.count, started.elapsed());
                        }
                    }
                    end(subject);
                });
            }
        });
        eprintln!(
            "{} sequences, {} steps, no difference, in {:?}",
            done.load(Ordering::Relaxed),
            steps.load(Ordering::Relaxed),
            started.elapsed()
        );
    }

    fn one(
        &self,
        seed: u64,
        steps: &AtomicU64,
        run: &mut dyn FnMut(&[Step]) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut bytes = [0; 32];
        crate::data::fill(seed, 0, &mut bytes);
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let config = Config { cases: 1, failure_persistence: None, max_shrink_iters: 400, ..Config::default() };
        let mut runner = TestRunner::new_with_rng(config, rng);
        // The runner wants a function that can be shared; it calls it on this thread only.
        let run = std::sync::Mutex::new(run);
        let outcome = runner.run(&sequence(self.rare), |sequence| {
            steps.fetch_add(sequence.len() as u64, Ordering::Relaxed);
            let mut run = run.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            run(&sequence).map_err(TestCaseError::fail)
        });
        match outcome {
            Ok(()) => Ok(()),
            Err(TestError::Fail(why, steps)) => {
                let lines: Vec<String> = steps.iter().map(|step| format!("  {step:?}")).collect();
                Err(format!("{why}\n{}", lines.join("\n")))
            }
            Err(TestError::Abort(why)) => Err(format!("aborted: {why}")),
        }
    }
}
