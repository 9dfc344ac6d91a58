//! `railfsd`: makes stores, checks configurations and stores, serves.
//!
//! Exit codes: 0 done, 1 failed, 2 usage or configuration.

#![forbid(unsafe_code)]

use clap::{CommandFactory, Parser, Subcommand};
use railfs_engine::notify::{Notifier, Word};
use railfs_proto::limits::STOP_DEADLINE;
use railfs_proto::units::format_size;
use railfs_server::config::Config;
use railfs_server::daemon::{Daemon, StartError};
use railfs_server::fsck::{Kind, Problem, Report};
use railfs_server::{fsck, manager, manual, replace, store};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tracing_subscriber::EnvFilter;

const FAILED: u8 = 1;
const USAGE: u8 = 2;
/// What a stop may take beyond its limit before the service manager loses patience.
const STOP_SLACK: Duration = Duration::from_secs(2);

/// The railfs storage server.
#[derive(Debug, Parser)]
#[command(name = "railfsd", version, about, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make a store of these (empty) directories, or add them to the store that the others belong to
    Init {
        /// Stripe directories, normally one per disk
        #[arg(required = true, value_name = "DIR")]
        directories: Vec<PathBuf>,
    },
    /// Serve until SIGTERM or SIGINT (or SIGHUP of its terminal); RAILFS_LOG sets what is logged (error, warn, info, debug)
    Serve {
        /// The configuration
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Compare what the log says with what lies in the stripe directories, every byte; no server may have them open
    Fsck {
        /// The configuration
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Put right what can be: components that lie in a wrong place, leftovers, a log that is not whole
        #[arg(long)]
        repair: bool,
        /// One JSON object for each problem, and one for the sum
        #[arg(long)]
        json: bool,
    },
    /// Keep the log in this stripe directory, in place of a log directory that is gone for good; no server may be running
    ReplaceLog {
        /// The configuration
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// A stripe directory of the store that does not hold the log yet
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
    /// Write the manual pages into a directory
    #[command(hide = true)]
    Manual {
        /// Where to
        directory: PathBuf,
    },
    /// Check a configuration and print what it comes to
    Check {
        /// The configuration
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
}

/// For scripts.
fn problem_json(problem: &Problem) -> serde_json::Value {
    serde_json::json!({
        "problem": problem.kind.name(),
        "object": problem.object.as_ref().map(ToString::to_string),
        "version": problem.version,
        "component": problem.component,
        "path": problem.path,
        "detail": problem.detail,
        "repaired": problem.repaired,
    })
}

fn report_json(report: &Report) -> serde_json::Value {
    let count = |(kind, (found, repaired)): (&Kind, &(u64, u64))| {
        (kind.name().to_owned(), serde_json::json!({ "found": found, "repaired": repaired }))
    };
    let problems: serde_json::Map<_, _> = report.problems.iter().map(count).collect();
    serde_json::json!({
        "versions": report.versions,
        "components": report.components,
        "bytes": report.bytes,
        "problems": problems,
        "remaining": report.remaining,
    })
}

/// Words for what was looked at and found.
fn sum_up(report: &Report) -> String {
    let Report { versions, components, bytes, problems, remaining } = report;
    let kinds = problems.iter().map(|(kind, (found, repaired))| match repaired {
        0 => format!("{found} {}", kind.name()),
        repaired => format!("{found} {} ({repaired} repaired)", kind.name()),
    });
    let kinds = kinds.collect::<Vec<_>>().join(", ");
    let found = if kinds.is_empty() { "all is well".to_owned() } else { format!("{kinds}; {remaining} remain") };
    format!("{versions} versions, {components} components, {} read: {found}", format_size(*bytes))
}

fn fsck(file: &Path, repair: bool, json: bool) -> ExitCode {
    let config = match Config::load(file) {
        Ok(config) => config,
        Err(error) => return complain(USAGE, &error),
    };
    let mut told = |problem: &Problem| {
        if json {
            say(format_args!("{}", problem_json(problem)));
        } else {
            say(format_args!("{problem}"));
        }
    };
    match fsck::check(&config, repair, &mut told) {
        Ok(report) => {
            if json {
                say(format_args!("{}", report_json(&report)));
            } else {
                say(format_args!("{}", sum_up(&report)));
            }
            if report.remaining == 0 { ExitCode::SUCCESS } else { ExitCode::from(FAILED) }
        }
        Err(error) => complain(FAILED, &error),
    }
}

/// Whoever reads the output may have gone: that is no error.
fn say(text: std::fmt::Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}");
    let _ = out.flush();
}

fn complain(code: u8, error: &dyn std::fmt::Display) -> ExitCode {
    let _ = writeln!(std::io::stderr().lock(), "railfsd: {error}");
    ExitCode::from(code)
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let filter = EnvFilter::try_from_env("RAILFS_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // Colours are for people: a file or a journal gets none. Fails only where something else took the log before.
    let _ = subscriber.with_ansi(std::io::stderr().is_terminal()).try_init();
    match arguments.command {
        Command::Init { directories } => init(&directories),
        Command::Serve { config } => serve(&config),
        Command::Fsck { config, repair, json } => fsck(&config, repair, json),
        Command::ReplaceLog { config, directory } => replace_log(&config, &directory),
        Command::Manual { directory } => match manual::write(Arguments::command(), &directory) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => complain(FAILED, &format!("{}: {error}", directory.display())),
        },
        Command::Check { config } => match Config::load(&config) {
            Ok(config) => match config.check_tls() {
                Ok(()) => {
                    say(format_args!("{config}"));
                    ExitCode::SUCCESS
                }
                Err(error) => complain(USAGE, &error),
            },
            Err(error) => complain(USAGE, &error),
        },
    }
}

fn init(directories: &[PathBuf]) -> ExitCode {
    match store::init(directories) {
        Ok(initialised) => {
            let state = if initialised.new_store { "new store" } else { "store" };
            say(format_args!("{state} {}", initialised.store));
            let added = initialised.added.iter().map(|directory| ("added", directory));
            let kept = initialised.kept.iter().map(|directory| ("there before", directory));
            for (what, (path, id)) in added.chain(kept) {
                say(format_args!("{what}: {} ({id})", path.display()));
            }
            ExitCode::SUCCESS
        }
        Err(error) => complain(FAILED, &error),
    }
}

fn replace_log(file: &Path, directory: &Path) -> ExitCode {
    let config = match Config::load(file) {
        Ok(config) => config,
        Err(error) => return complain(USAGE, &error),
    };
    match replace::replace_log(&config, directory) {
        Ok(replaced) => {
            match replaced.last {
                Some(last) => say(format_args!(
                    "store {}: epoch {} of the log began behind record {last}",
                    replaced.store, replaced.epoch
                )),
                None => say(format_args!(
                    "store {}: epoch {} of the log, which had begun, is complete",
                    replaced.store, replaced.epoch
                )),
            }
            for (path, id) in &replaced.log_directories {
                say(format_args!("holds the log: {} ({id})", path.display()));
            }
            for id in &replaced.replaced {
                say(format_args!("does not any more: {id}"));
            }
            for why in &replaced.behind {
                say(format_args!("not told yet, the next start does it: {why}"));
            }
            ExitCode::SUCCESS
        }
        Err(error) => complain(FAILED, &error),
    }
}

/// As many open files as this process may have: components that are being read stay open, and so do connections.
fn raise_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }) {
        tracing::warn!(%error, current = ?limit.current, "the limit of open files cannot be raised");
    }
}

fn serve(file: &Path) -> ExitCode {
    let config = match Config::load(file) {
        Ok(config) => config,
        Err(error) => return complain(USAGE, &error),
    };
    if let Err(error) = config.check_tls() {
        return complain(USAGE, &error);
    }
    raise_descriptors();
    let notifier = Arc::new(Notifier::from_environment().unwrap_or_else(|problem| {
        tracing::error!("the service manager cannot be told anything: {problem}");
        Notifier::default()
    }));
    // Before anything is started, so that no signal is missed.
    let mut signals = match Signals::new([SIGTERM, SIGINT, SIGHUP]) {
        Ok(signals) => signals,
        Err(error) => return complain(FAILED, &format!("cannot wait for signals: {error}")),
    };
    let daemon = match Daemon::start(&config) {
        Ok(daemon) => daemon,
        // Starting again does not help, so that a service manager need not: as for a mount.
        Err(error @ StartError::Shortage(_)) => return complain(USAGE, &error),
        Err(error) => return complain(FAILED, &error),
    };
    let list =
        |addresses: &[std::net::SocketAddr]| addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let store = daemon.server().map(|server| server.node.store.id().to_string()).unwrap_or_default();
    say(format_args!(
        "railfsd ready store={store} node={} incarnation={} control={} rails={}",
        config.node,
        daemon.recovered().incarnation,
        list(daemon.control_addresses()),
        list(&daemon.rail_addresses())
    ));
    let keeper = match daemon.server().map(|server| {
        notifier.tell(&[Word::Ready, Word::Status(&manager::summary(server))]);
        manager::keep(&notifier, server)
    }) {
        Some(Err(error)) => return complain(FAILED, &format!("a thread for the service manager: {error}")),
        Some(Ok(keeper)) => keeper,
        None => None,
    };
    // SIGHUP ends it only where it says that the terminal has gone.
    let terminal = std::io::stdin().is_terminal() || std::io::stderr().is_terminal();
    let signal = signals.forever().find(|signal| {
        let ends = *signal != SIGHUP || terminal;
        if !ends {
            tracing::info!("SIGHUP: looking whether certificates or rights have changed");
            daemon.look_again();
        }
        ends
    });
    tracing::info!(?signal, "stopping");
    drop(keeper);
    notifier.tell(&[Word::Stopping, Word::Status("stopping"), Word::MoreTime(STOP_DEADLINE + STOP_SLACK)]);
    // Whatever hangs (a disk): the process ends in time.
    let watchdog = std::thread::Builder::new().name("stop".to_owned()).spawn(|| {
        std::thread::sleep(STOP_DEADLINE);
        tracing::error!("not stopped within {STOP_DEADLINE:?}: ending as after a crash");
        std::process::exit(i32::from(FAILED));
    });
    drop(watchdog);
    match daemon.stop() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => complain(FAILED, &format!("the stop was not clean: {error}")),
    }
}
