//! What people type.
//!
//! Guarantees: a failure is one line on standard error, "railfs: " and what to do, and an exit code (0 done, 1 failed,
//! 2 usage or configuration, 3 not found, 4 conflict, 5 unreachable); a reader of standard output that goes away ends the
//! command without a word.

mod format;
mod get;
mod helper;
mod list;
mod manual;
mod objects;
mod put;
mod report;
mod show;
mod target;
mod walk;
mod watch;

use crate::failure::{Failure, io};
use crate::mount::file::MountFile;
use crate::mount::log::Log;
use crate::mount::manager::Manager;
use crate::mount::options::Options;
use crate::mount::reach::Network;
use crate::mount::{daemon, launch, place, probe, runtime, umount};
use crate::tls;
use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand};
use railfs_proto::url::Url;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use target::{Target, TlsArguments};
use tracing_subscriber::fmt::MakeWriter;

/// What the log shows, as `tracing` filters are written.
const LOG_VARIABLE: &str = "RAILFS_LOG";

#[derive(Debug, Parser)]
#[command(
    name = "railfs",
    version,
    about = "Mounts striped objects as a directory, and puts, gets and lists them",
    after_help = "A URL is railfs://HOST[:PORT]/NAMESPACE[/KEY]; a '/' at its end means the directory.\n\
                  Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 not found, 4 conflict, 5 unreachable.\n\
                  RAILFS_LOG sets what is logged (\"debug\"), RAILFS_RUNTIME_DIR where mounts keep locks and sockets;\n\
                  RAILFS_CERT, RAILFS_KEY and RAILFS_CA are the files for a server that wants TLS."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Mount a namespace, or what lies below a key, read-only; returns when the mount answers
    Mount(MountCommand),
    /// Unmount, and wait until the mount's daemon is gone
    Umount {
        /// Where
        #[arg(required_unless_present = "config", conflicts_with = "config")]
        mountpoint: Option<PathBuf>,
        /// The mount that this file describes, as for `railfs mount --config`
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Also while programs use it: they keep what they have open, until they close it
        #[arg(short, long)]
        lazy: bool,
        /// Only if its daemon is dead; nothing to take away is no error
        #[arg(long)]
        dead: bool,
    },
    /// Put a file, standard input, or (below the URL) everything in a directory, as `cp -rL` would
    Put(PutArguments),
    /// Get an object's bytes, or everything below a URL
    Get(GetArguments),
    /// List a directory, or show one object
    Ls {
        /// What
        url: String,
        /// Mode, size, time (UTC) and version too
        #[arg(short)]
        long: bool,
        /// Everything below, not only the next level
        #[arg(short = 'R')]
        recursive: bool,
        /// One JSON object a line
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        tls: TlsArguments,
    },
    /// Show one object: version, attributes, layout, where its components lie
    Stat {
        /// Which
        url: String,
        /// As JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        tls: TlsArguments,
    },
    /// Delete one object
    Rm {
        /// Which
        url: String,
        /// Only if this version is current
        #[arg(long, value_name = "VERSION")]
        if_version: Option<u64>,
        /// Say what was deleted, as JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        tls: TlsArguments,
    },
    /// Show puts and deletes as they are committed, each with its number
    Watch {
        /// A directory, or an object
        url: String,
        /// Begin with this number, not with what comes after now: the last one seen and 1 goes on where it ended
        #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
        from: Option<u64>,
        /// End where the log ends now
        #[arg(long)]
        until_now: bool,
        /// One JSON object a line
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        tls: TlsArguments,
    },
    /// Write the manual pages into a directory
    #[command(hide = true)]
    Manual {
        /// Where to
        directory: PathBuf,
    },
    /// The process that asks a mount for its daemon
    #[command(hide = true)]
    Probe {
        /// A resolved mount point
        mountpoint: PathBuf,
    },
    /// Show rails, memory, cache and directories: of a mount, of a server, or of every mount of this user
    Status {
        /// A mount point or a URL
        target: Option<PathBuf>,
        /// As JSON (of every mount: an array)
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        tls: TlsArguments,
    },
}

#[derive(Debug, Args)]
struct MountCommand {
    /// What to mount
    #[arg(required_unless_present = "config", conflicts_with = "config")]
    url: Option<String>,
    /// An empty directory
    #[arg(required_unless_present = "config", conflicts_with = "config")]
    mountpoint: Option<PathBuf>,
    /// A file that says what to mount, where and how (see railfs.toml(5)); options of -o are added to it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Stay in front, log to standard error
    #[arg(short)]
    foreground: bool,
    /// Options, parted by commas: ro, allow_other, default_permissions, noexec, nonempty, require_rdma, no_rdma,
    /// mode=strict|snapshot, io=auto|direct|cached, rdma_opening=auto|windows|arena, arena=SIZE, threads=N, workers=N,
    /// readahead=SIZE, read_timeout=TIME,
    /// metadata_timeout=TIME, connect_timeout=TIME, request_timeout=TIME, cq_timeout=TIME, rails=FROM~TO+FROM~TO...,
    /// metadata_ttl=TIME, check=auto|read|frame, retry=TIME, stop_timeout=TIME,
    /// log=FILE, uid=N, gid=N, umask=OCTAL, cert=FILE, key=FILE, ca=FILE
    #[arg(short = 'o', value_name = "OPTIONS")]
    options: Vec<String>,
    /// This is the daemon; its log's path
    #[arg(long = "serve-with-log", hide = true)]
    serve_with_log: Option<PathBuf>,
}

/// Files at once, of a tree.
const JOBS: u8 = 4;

#[derive(Debug, Args)]
struct TransferArguments {
    /// Say nothing but what went wrong
    #[arg(short, long)]
    quiet: bool,
    /// One JSON object for each file
    #[arg(long)]
    json: bool,
    /// Files of a tree at once
    #[arg(short, long, value_name = "N", default_value_t = JOBS, value_parser = clap::value_parser!(u8).range(1..=64))]
    jobs: u8,
}

impl TransferArguments {
    fn wanted(&self) -> report::Wanted {
        report::Wanted { quiet: self.quiet, json: self.json }
    }
}

/// What to mount, where and how, from wherever it was said.
#[derive(Debug)]
struct MountArguments {
    url: String,
    mountpoint: PathBuf,
    foreground: bool,
    options: Vec<String>,
    serve_with_log: Option<PathBuf>,
}

impl MountCommand {
    fn arguments(self) -> Result<MountArguments, Failure> {
        let (url, mountpoint, mut options) = match (&self.config, self.url, self.mountpoint) {
            (Some(file), ..) => {
                let file = MountFile::load(file)?;
                (file.url, file.mountpoint, file.options)
            }
            (None, Some(url), Some(mountpoint)) => (url, mountpoint, Vec::new()),
            (None, ..) => return Err(Failure::usage("a URL and a mount point are wanted, or --config FILE")),
        };
        options.extend(self.options);
        let (foreground, serve_with_log) = (self.foreground, self.serve_with_log);
        Ok(MountArguments { url, mountpoint, foreground, options, serve_with_log })
    }
}

#[derive(Debug, Args)]
struct PutArguments {
    /// A file or a directory; - for standard input, which is read to its end before anything is put
    source: PathBuf,
    /// Where to; with a '/' at the end, or no key, a file keeps its name
    url: String,
    /// Keep owner, group and time of the source too, not only the mode
    #[arg(short, long)]
    archive: bool,
    /// Only if nothing has this name yet
    #[arg(long, conflicts_with = "if_version")]
    if_absent: bool,
    /// Only if this version is current
    #[arg(long, value_name = "VERSION", value_parser = clap::value_parser!(u64).range(1..))]
    if_version: Option<u64>,
    /// Bytes of a stripe (server's default if left out)
    #[arg(long, value_name = "SIZE")]
    stripe_size: Option<String>,
    /// Bytes of a page, the unit of checksum (server's default if left out)
    #[arg(long, value_name = "SIZE")]
    page_size: Option<String>,
    /// Stripe directories to spread over (server's default if left out)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    width: Option<u32>,
    #[command(flatten)]
    transfer: TransferArguments,
    #[command(flatten)]
    tls: TlsArguments,
}

#[derive(Debug, Args)]
struct GetArguments {
    /// Which object; with a '/' at the end everything below
    url: String,
    /// A file or directory to write to; - for standard output
    file: PathBuf,
    /// Everything below the URL, also without the '/'
    #[arg(short, long)]
    recursive: bool,
    /// Give files the time, mode and (as root) owner that they were put with
    #[arg(short, long)]
    archive: bool,
    #[command(flatten)]
    transfer: TransferArguments,
    #[command(flatten)]
    tls: TlsArguments,
}

/// Runs a command line, `railfs` itself first.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let mut arguments = arguments.into_iter().peekable();
    // Under another name (a link) this program is what mount(8) runs.
    let name = arguments.peek().and_then(|name| Path::new(name).file_name()).unwrap_or_default();
    if name.to_string_lossy().starts_with(helper::PREFIX) {
        return ExitCode::from(helper::main(arguments.skip(1)));
    }
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !failure.message.is_empty() {
                eprintln!("railfs: {}", failure.message);
            }
            ExitCode::from(failure.code)
        }
    }
}

fn usage(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let _ = error.print();
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            ExitCode::from(2)
        }
        _ => {
            let text = error.to_string();
            let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
            let first = lines.next().unwrap_or("wrong arguments");
            let rest: Vec<&str> =
                lines.take_while(|line| !line.starts_with("Usage") && !line.starts_with("For more")).collect();
            let first = first.strip_prefix("error: ").unwrap_or(first);
            eprintln!("railfs: {}; see `railfs --help`", [&[first], &*rest].concat().join(" "));
            ExitCode::from(2)
        }
    }
}

fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Mount(command) => mount(&command.arguments()?),
        Command::Umount { mountpoint, config, lazy, dead } => {
            let of_file = config.map(|file| MountFile::load(&file)).transpose()?.map(|file| file.mountpoint);
            let point = of_file.or(mountpoint).unwrap_or_default();
            if dead { umount::umount_dead(&point) } else { umount::umount(&point, lazy) }
        }
        Command::Put(arguments) => {
            quiet_log();
            let settings = put_settings(&arguments)?;
            let url = Target::new(&arguments.url, arguments.tls)?;
            let report = report::Report::new(arguments.transfer.wanted(), false);
            put::put(&arguments.source, &url, &settings, &Arc::new(report))
        }
        Command::Get(arguments) => {
            quiet_log();
            let settings = get::Settings {
                recursive: arguments.recursive,
                archive: arguments.archive,
                jobs: arguments.transfer.jobs.into(),
            };
            let report = report::Report::new(arguments.transfer.wanted(), arguments.file.as_os_str() == "-");
            get::get(&Target::new(&arguments.url, arguments.tls)?, &arguments.file, &settings, &report)
        }
        Command::Ls { url, long, recursive, json, tls } => {
            quiet_log();
            objects::ls(&Target::new(&url, tls)?, long, recursive, json)
        }
        Command::Stat { url, json, tls } => {
            quiet_log();
            objects::stat(&Target::new(&url, tls)?, json)
        }
        Command::Rm { url, if_version, json, tls } => {
            quiet_log();
            objects::rm(&Target::new(&url, tls)?, if_version, json)
        }
        Command::Watch { url, from, until_now, json, tls } => {
            quiet_log();
            watch::watch(&Target::new(&url, tls)?, watch::Settings { from: from.unwrap_or(0), until_now, json })
        }
        Command::Manual { directory } => manual::write(&directory),
        Command::Probe { mountpoint } => {
            probe::serve(&mountpoint);
            Ok(())
        }
        Command::Status { target, json, tls } => {
            quiet_log();
            status(target.as_deref(), json, tls)
        }
    }
}

fn parse(url: &str) -> Result<Url, Failure> {
    Url::parse(url).map_err(|error| Failure::usage(error.to_string()))
}

fn put_settings(arguments: &PutArguments) -> Result<put::Settings, Failure> {
    let size = |name: &str, text: &Option<String>| match text {
        None => Ok(0),
        Some(text) => {
            let size =
                railfs_proto::units::parse_size(text).map_err(|error| Failure::usage(format!("{name}: {error}")))?;
            u32::try_from(size).map_err(|_| Failure::usage(format!("{name}: {text} is too large")))
        }
    };
    let settings = put::Settings {
        stripe_size: size("--stripe-size", &arguments.stripe_size)?,
        page_size: size("--page-size", &arguments.page_size)?,
        width: arguments.width.unwrap_or(0),
        if_version: if arguments.if_absent { Some(0) } else { arguments.if_version },
        archive: arguments.archive,
        jobs: arguments.transfer.jobs.into(),
    };
    settings.check()?;
    Ok(settings)
}

// -- mount --

fn mount(arguments: &MountArguments) -> Result<(), Failure> {
    let Some(log) = &arguments.serve_with_log else { return start(arguments) };
    let result = launch::become_daemon().and_then(|()| {
        let file = log_to_file(log)?;
        serve(arguments, Some(log.clone()), Some(file), launch::say_ready)
    });
    if let Err(failure) = &result {
        tracing::error!("{failure}");
        launch::say_failed(failure);
        return Err(Failure { message: String::new(), ..failure.clone() });
    }
    result
}

fn start(arguments: &MountArguments) -> Result<(), Failure> {
    let options = Options::parse(&arguments.options)?.complete(tls::environment)?;
    let url = parse(&arguments.url)?;
    let log = options.log.as_ref().map(std::path::absolute).transpose().map_err(|error| io("log", &error))?;
    if arguments.foreground {
        let file = log.as_deref().map(log_to_file).transpose()?;
        if file.is_none() {
            init_log(DAEMON_LOG, std::io::stderr);
        }
        return serve(arguments, log, file, || {});
    }
    let point = place::resolve(&arguments.mountpoint)?;
    let files = runtime::files(&point)?;
    let log = log.unwrap_or(files.log);
    launch::launch(&url.to_string(), &point, &arguments.options, &options, &log)
}

fn serve(
    arguments: &MountArguments,
    log: Option<PathBuf>,
    log_file: Option<Log>,
    ready: impl FnOnce(),
) -> Result<(), Failure> {
    let options = Options::parse(&arguments.options)?.complete(tls::environment)?;
    let point = place::resolve(&arguments.mountpoint)?;
    let terminal = arguments.foreground && (std::io::stdin().is_terminal() || std::io::stderr().is_terminal());
    // Only a daemon in front is the manager's own; before there are threads, see there.
    let manager = match arguments.foreground {
        true => Manager::from_environment(&point, options.metadata_timeout)?,
        false => Manager::default(),
    };
    let job = daemon::Job { url: parse(&arguments.url)?, point, options, log, log_file, terminal, manager };
    daemon::run(&job, Network, ready)
}

/// A daemon's log: what happens to it, one line each.
const DAEMON_LOG: &str = "info,fuser=error";

/// A daemon's log in a file, which is bounded; standard error goes there too.
fn log_to_file(path: &Path) -> Result<Log, Failure> {
    let log = Log::open(path, crate::mount::log::LIMIT).map_err(|error| io(path.display(), &error))?;
    log.take_stderr().map_err(|error| io(path.display(), &error))?;
    init_log(DAEMON_LOG, log.clone());
    Ok(log)
}

/// A command's: only what is wrong.
fn quiet_log() {
    init_log("error", std::io::stderr);
}

fn init_log(default: &str, writer: impl for<'a> MakeWriter<'a> + Send + Sync + 'static) {
    let filter = tracing_subscriber::EnvFilter::try_from_env(LOG_VARIABLE)
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(default));
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer).with_ansi(false);
    // Somebody else's subscriber (in a test) is as good.
    let _ = subscriber.with_target(false).try_init();
}

// -- status --

fn status(target: Option<&Path>, json: bool, tls: TlsArguments) -> Result<(), Failure> {
    let Some(target) = target else { return status_of_all(json) };
    let document = match target.to_str().filter(|text| text.contains("://")) {
        Some(url) => {
            let client = Target::new(url, tls)?.connect()?;
            let server = client.server_status();
            let document = crate::status::Document::new(client.status(), &server);
            client.close();
            document
        }
        None => {
            let point = place::resolve(target)?;
            let files = runtime::files(&point)?;
            if runtime::holder(&files.lock).is_none() {
                return Err(Failure::failed(format!(
                    "{} is not a mount of this user that lives (`railfs status` lists those)",
                    point.display()
                )));
            }
            crate::mount::control::ask_status(&files.socket)?
        }
    };
    show::document(&document, json)
}

fn status_of_all(json: bool) -> Result<(), Failure> {
    let mut documents = Vec::new();
    let mut silent = 0;
    for (holder, files) in runtime::holders()? {
        match crate::mount::control::ask_status(&files.socket) {
            Ok(document) => documents.push(document),
            Err(failure) => {
                silent += 1;
                eprintln!("railfs: {} (process {}): {failure}", holder.mountpoint, holder.pid);
            }
        }
    }
    show::documents(&documents, json)?;
    if silent > 0 {
        return Err(Failure::failed(format!("{silent} mounts do not answer")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
        for wrong in
            [&["railfs", "mount"][..], &["railfs", "mount", "u"], &["railfs", "mount", "u", "m", "--config", "f"]]
        {
            assert!(Cli::try_parse_from(wrong).is_err(), "{wrong:?}");
        }
        assert!(Cli::try_parse_from(["railfs", "mount", "--config", "f", "-f"]).is_ok());
        assert!(Cli::try_parse_from(["railfs", "umount", "--dead", "--config", "f"]).is_ok());
        assert!(Cli::try_parse_from(["railfs", "put", "f", "u", "--if-absent", "--if-version", "3"]).is_err());
        assert!(
            Cli::try_parse_from(["railfs", "mount", "u", "m", "-f", "-o", "ro,arena=1GiB", "-o", "threads=2"]).is_ok()
        );
    }

    #[test]
    fn the_page_of_commands_lists_every_command_and_flag_and_no_other() {
        use clap::CommandFactory;
        let page = include_str!("../../docs/commands.md");
        let rows = page.lines().filter(|line| line.starts_with("| `"));
        let spans = |line: &str| line.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
        let documented: Vec<Vec<String>> = rows.map(spans).collect();
        let flag = |argument: &clap::Arg| match (argument.get_long(), argument.get_short()) {
            (Some(long), _) => Some(format!("--{long}")),
            (None, short) => short.map(|short| format!("-{short}")),
        };
        let commands = Cli::command();
        let there: Vec<Vec<String>> = commands
            .get_subcommands()
            .filter(|command| !command.is_hide_set())
            .map(|command| {
                let shown = command.get_arguments().filter(|argument| !argument.is_hide_set());
                [command.get_name().to_owned()].into_iter().chain(shown.filter_map(flag)).collect()
            })
            .collect();
        let sorted = |mut lists: Vec<Vec<String>>| {
            lists.iter_mut().for_each(|list| list.sort());
            lists.sort();
            lists
        };
        assert_eq!(sorted(documented), sorted(there));
    }

    #[test]
    fn sizes_of_a_put() {
        let parse = |arguments: &[&str]| match Cli::try_parse_from([&["railfs", "put", "f", "u"], arguments].concat()) {
            Ok(Cli { command: Command::Put(arguments) }) => put_settings(&arguments),
            other => panic!("{other:?}"),
        };
        let settings =
            parse(&["--stripe-size", "4MiB", "--page-size", "64 KiB", "--width", "2", "--if-absent"]).unwrap();
        assert_eq!((settings.stripe_size, settings.page_size, settings.width), (4 << 20, 64 << 10, 2));
        assert_eq!(settings.if_version, Some(0));
        assert_eq!(parse(&["--stripe-size", "4 GiB"]).unwrap_err().code, 2);
        assert_eq!(parse(&["--if-version", "7"]).unwrap().if_version, Some(7));
        assert_eq!(parse(&["--stripe-size", "12345"]).unwrap_err().code, 2);
        let many = parse(&["-a", "-j", "9"]).unwrap();
        assert_eq!((many.archive, many.jobs, settings.archive, settings.jobs), (true, 9, false, 4));
    }
}
