//! The options of a mount (`-o`).
//!
//! Guarantees: pure; an option exists only if it acts; nothing is tolerated in silence: an unknown key, a value that is
//! missing, out of range or not wanted is an error that says what would be right.

use crate::failure::Failure;
use crate::ops::{Io, MAX_READ, Mode};
use crate::tls;
use railfs_engine::client::{CheckWay, Config, ManualRail, Opening, Rdma};
use railfs_engine::tls::Files;
use railfs_proto::limits::{MAX_PAGE, RAIL_TIMES, STOP_DEADLINE};
use railfs_proto::units::{format_duration, format_size, parse_duration, parse_size};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Every key, as it is listed in messages.
pub const KEYS: [&str; 33] = [
    "ro",
    "nosuid",
    "nodev",
    "noexec",
    "allow_other",
    "default_permissions",
    "nonempty",
    "require_rdma",
    "no_rdma",
    "mode",
    "io",
    "rdma_opening",
    "arena",
    "threads",
    "workers",
    "readahead",
    "read_timeout",
    "metadata_timeout",
    "connect_timeout",
    "request_timeout",
    "cq_timeout",
    "rails",
    "metadata_ttl",
    "check",
    "retry",
    "stop_timeout",
    "log",
    "uid",
    "gid",
    "umask",
    "cert",
    "key",
    "ca",
];

/// The ways of opening memory to a server, by their names.
pub const OPENINGS: [(&str, Opening); 3] =
    [("auto", Opening::Auto), ("windows", Opening::Windows), ("arena", Opening::OpenArena)];
/// The ways to check a version, by their words.
const CHECKS: [(&str, CheckWay); 3] = [("auto", CheckWay::Auto), ("read", CheckWay::Read), ("frame", CheckWay::Frame)];

/// So many of [`KEYS`], the first ones, take no value.
const FLAGS: usize = 9;

/// How a mount is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Other users than the mounting one may use it. The kernel then checks permissions.
    pub allow_other: bool,
    /// The kernel checks modes.
    pub default_permissions: bool,
    /// Mount over a directory that is not empty.
    pub nonempty: bool,
    /// Nothing may be executed.
    pub noexec: bool,
    /// Only RDMA rails: without them the mount fails.
    pub require_rdma: bool,
    /// No RDMA rails.
    pub no_rdma: bool,
    /// What programs' reads see.
    pub mode: Mode,
    /// How they reach the daemon.
    pub io: Io,
    /// How memory is opened to the servers of RDMA rails.
    pub rdma_opening: Opening,
    /// Bytes of the arena.
    pub arena: u64,
    /// FUSE threads, 1 to 64.
    pub threads: usize,
    /// Threads that verify and answer, 1 to 64.
    pub workers: usize,
    /// Bytes read ahead at most per sequential reader; 0: none.
    pub readahead: u64,
    /// A read's limit.
    pub read_timeout: Duration,
    /// A lookup's, list's and check's limit.
    pub metadata_timeout: Duration,
    /// The limit of connecting.
    pub connect_timeout: Duration,
    /// The limit of one attempt of a request on one rail, while another rail could do it; 100 ms to 30 s.
    pub request_timeout: Duration,
    /// How long work that was posted to an RDMA device may be without a completion; 100 ms to 30 s.
    pub cq_timeout: Duration,
    /// The rails to have; empty: what discovery finds.
    pub rails: Vec<ManualRail>,
    /// How long the kernel may trust a file's attributes; 0: every `stat` is a check.
    pub metadata_ttl: Duration,
    /// How versions are checked over RDMA rails.
    pub check: CheckWay,
    /// How long a server that cannot be reached is tried again at the start; 0: once.
    pub retry: Duration,
    /// The limit of a stop.
    pub stop_timeout: Duration,
    /// Where the daemon's log goes; `None`: to a file beside its lock, or with `-f` to standard error.
    pub log: Option<PathBuf>,
    /// Who owns everything; `None`: whoever it was put with, else the mounting user.
    pub uid: Option<u32>,
    /// The same of the group.
    pub gid: Option<u32>,
    /// Permission bits that nothing has, 0777 at most.
    pub umask: u16,
    /// The files of mutual TLS, in the order of [`tls::NAMES`]: all of them or none, once [`Options::complete`] was there.
    pub tls: [Option<PathBuf>; 3],
}

impl Default for Options {
    fn default() -> Self {
        let client = Config::default();
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        Options {
            allow_other: false,
            default_permissions: false,
            nonempty: false,
            noexec: false,
            require_rdma: false,
            no_rdma: false,
            mode: Mode::default(),
            io: Io::default(),
            rdma_opening: client.opening,
            arena: client.arena,
            threads: cores.clamp(2, 8),
            workers: client.workers,
            readahead: client.readahead,
            read_timeout: client.read_deadline,
            metadata_timeout: client.metadata_deadline,
            connect_timeout: client.connect_deadline,
            request_timeout: client.request_deadline,
            cq_timeout: client.cq_wait,
            rails: client.rails,
            metadata_ttl: Duration::from_secs(1),
            check: client.check,
            retry: Duration::ZERO,
            stop_timeout: STOP_DEADLINE,
            log: None,
            uid: None,
            gid: None,
            umask: 0,
            tls: Default::default(),
        }
    }
}

impl Options {
    /// Parses what was given with `-o`, each a list parted by commas (`\,` for a comma in a value).
    ///
    /// # Errors
    /// Exit code 2, with the nearest right key or the right values.
    pub fn parse<S: AsRef<str>>(lists: &[S]) -> Result<Options, Failure> {
        let mut options = Options::default();
        for list in lists {
            for option in split(list.as_ref()) {
                options.set(&option)?;
            }
        }
        check_arena(options.arena)?;
        if options.require_rdma && options.no_rdma {
            return Err(Failure::usage("options require_rdma and no_rdma contradict each other: leave one out"));
        }
        Ok(options)
    }

    fn set(&mut self, option: &str) -> Result<(), Failure> {
        let (key, value) = match option.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (option, None),
        };
        let wrong = |problem: String| Err(Failure::usage(format!("option {key}: {problem}")));
        if KEYS[..FLAGS].contains(&key)
            && let Some(value) = value
        {
            return wrong(format!("takes no value (\"{value}\" was given)"));
        }
        let value = match value {
            Some(value) => value,
            None if KEYS[FLAGS..].contains(&key) => {
                return wrong(format!("needs a value, as in {key}={}", example(key)));
            }
            None => "",
        };
        match key {
            // Always so; saying it is right.
            "ro" | "nosuid" | "nodev" => {}
            "noexec" => self.noexec = true,
            "allow_other" => self.allow_other = true,
            "default_permissions" => self.default_permissions = true,
            "nonempty" => self.nonempty = true,
            "require_rdma" => self.require_rdma = true,
            "no_rdma" => self.no_rdma = true,
            "request_timeout" => self.request_timeout = rail_time(key, value)?,
            "cq_timeout" => self.cq_timeout = rail_time(key, value)?,
            "rails" => {
                self.rails =
                    ManualRail::list(value).map_err(|error| Failure::usage(format!("option rails: {error}")))?;
            }
            "mode" => self.mode = word(key, value, &Mode::NAMES)?,
            "io" => self.io = word(key, value, &Io::NAMES)?,
            "rdma_opening" => self.rdma_opening = word(key, value, &OPENINGS)?,
            "arena" => self.arena = size(key, value)? / ARENA_UNIT * ARENA_UNIT,
            "readahead" => self.readahead = size(key, value)?,
            "threads" => self.threads = count(key, value)?,
            "workers" => self.workers = count(key, value)?,
            "read_timeout" => self.read_timeout = time(key, value, Duration::from_millis(100))?,
            "metadata_timeout" => self.metadata_timeout = time(key, value, Duration::from_millis(100))?,
            "connect_timeout" => self.connect_timeout = time(key, value, Duration::from_millis(100))?,
            "metadata_ttl" => self.metadata_ttl = time(key, value, Duration::ZERO)?,
            "check" => self.check = word(key, value, &CHECKS)?,
            "retry" => self.retry = time(key, value, Duration::ZERO)?,
            "stop_timeout" => self.stop_timeout = time(key, value, Duration::from_millis(100))?,
            "log" if value.is_empty() => return wrong("needs a path".to_owned()),
            "log" => self.log = Some(PathBuf::from(value)),
            "uid" => self.uid = Some(id(key, value)?),
            "gid" => self.gid = Some(id(key, value)?),
            "umask" => self.umask = umask(key, value)?,
            "cert" | "key" | "ca" if !value.starts_with('/') => {
                return wrong(format!("\"{value}\" is not an absolute path: write it from / on"));
            }
            "cert" => self.tls[0] = Some(PathBuf::from(value)),
            "key" => self.tls[1] = Some(PathBuf::from(value)),
            "ca" => self.tls[2] = Some(PathBuf::from(value)),
            "rw" => return Err(Failure::usage("option rw: a railfs mount is read-only, leave it out or say ro")),
            "" => return Err(Failure::usage("an empty option: there is a comma too many after -o")),
            _ => return Err(unknown(key)),
        }
        Ok(())
    }

    /// With what the environment says of options that were not given; files that must go together are checked, and read once.
    ///
    /// # Errors
    /// Exit code 2.
    pub fn complete(mut self, environment: impl Fn(&str) -> Option<OsString>) -> Result<Options, Failure> {
        if let Some(files) = tls::files(std::mem::take(&mut self.tls), true, environment)? {
            files.client().map_err(|error| Failure::usage(error.to_string()))?;
            self.tls = [Some(files.cert), Some(files.key), Some(files.ca)];
        }
        Ok(self)
    }

    fn files(&self) -> Option<Files> {
        // One of them alone never means a plain connection: the others are then not found.
        let path = |place: usize| self.tls.get(place).cloned().flatten().unwrap_or_default();
        self.tls.iter().any(Option::is_some).then(|| Files { cert: path(0), key: path(1), ca: path(2) })
    }

    /// What the client is told. `address` is "host:port".
    pub fn client_config(&self, address: String) -> Config {
        Config {
            addresses: vec![address],
            arena: self.arena,
            workers: self.workers,
            readahead: self.readahead,
            read_deadline: self.read_timeout,
            metadata_deadline: self.metadata_timeout,
            connect_deadline: self.connect_timeout,
            cq_wait: self.cq_timeout,
            request_deadline: self.request_timeout,
            rdma: match (self.require_rdma, self.no_rdma) {
                (true, _) => Rdma::Required,
                (false, true) => Rdma::Off,
                (false, false) => Rdma::Auto,
            },
            rails: self.rails.clone(),
            refuse_shortage: true,
            check: self.check,
            opening: self.rdma_opening,
            tls: self.files(),
            ..Config::default()
        }
    }

    /// The lines that a mount logs when it starts: what memory it will use.
    pub fn memory_plan(&self) -> Vec<String> {
        let least = least_arena();
        vec![
            format!(
                "arena {}: at least {} = 3 x (largest READ {} + 2 pages of {}), in whole MiB",
                format_size(self.arena),
                format_size(least),
                format_size(MAX_READ.into()),
                format_size(MAX_PAGE.into())
            ),
            format!(
                "{} FUSE threads with a buffer of 16 MiB each, {} workers, readahead {} a reader",
                self.threads,
                self.workers,
                format_size(self.readahead)
            ),
        ]
    }
}

/// The smallest arena, bytes: three reads of the largest kind can be under way, each with a page to spare at both ends.
/// The arena is made of whole MiB, so that is what counts.
pub fn least_arena() -> u64 {
    (3 * (u64::from(MAX_READ) + 2 * u64::from(MAX_PAGE))).next_multiple_of(ARENA_UNIT)
}

/// What an arena is made of, bytes; the rest of what was asked for would never be used.
const ARENA_UNIT: u64 = 1 << 20;

fn check_arena(arena: u64) -> Result<(), Failure> {
    let least = least_arena();
    if arena >= least {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "option arena: {} is too small (a unit is needed, as in 256MiB): it takes at least {} = 3 x (largest READ {} + 2 pages of {}), in whole MiB",
        format_size(arena),
        format_size(least),
        format_size(MAX_READ.into()),
        format_size(MAX_PAGE.into())
    )))
}

/// The options in a list parted by commas, with what was escaped as it is meant.
pub(crate) fn split(list: &str) -> Vec<String> {
    let mut options = vec![String::new()];
    let mut characters = list.chars();
    while let Some(c) = characters.next() {
        let (out, escaped) = match c {
            '\\' => (characters.next().unwrap_or('\\'), true),
            c => (c, false),
        };
        match options.last_mut() {
            Some(option) if escaped || out != ',' => option.push(out),
            _ => options.push(String::new()),
        }
    }
    options
}

fn example(key: &str) -> &'static str {
    match key {
        "mode" => "strict",
        "io" | "rdma_opening" | "check" => "auto",
        "arena" => "256MiB",
        "readahead" => "16MiB",
        "threads" | "workers" => "4",
        "log" => "/var/log/railfs.log",
        "cert" | "ca" => "/etc/railfs/client.pem",
        "key" => "/etc/railfs/client.key",
        "uid" | "gid" => "1000",
        "umask" => "027",
        "rails" => "mlx5_0@10.0.0.2~10.0.0.1",
        "request_timeout" | "cq_timeout" => "5s",
        _ => "10s",
    }
}

/// One of a few words.
fn word<T: Copy>(key: &str, value: &str, words: &[(&str, T)]) -> Result<T, Failure> {
    if let Some((_, meaning)) = words.iter().find(|(word, _)| *word == value) {
        return Ok(*meaning);
    }
    let names: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
    let nearest = names.iter().map(|word| (strsim::damerau_levenshtein(value, word), *word)).min();
    let hint = match nearest {
        Some((distance, word)) if distance <= 1 + word.len() / 3 => format!(", did you mean {key}={word}?"),
        _ => String::new(),
    };
    Err(Failure::usage(format!("option {key}: \"{value}\" is not one of {}{hint}", names.join(", "))))
}

fn size(key: &str, value: &str) -> Result<u64, Failure> {
    let size = parse_size(value).map_err(|error| Failure::usage(format!("option {key}: {error}")))?;
    if size > 1 << 46 {
        return Err(Failure::usage(format!("option {key}: {} is too large", format_size(size))));
    }
    Ok(size)
}

fn count(key: &str, value: &str) -> Result<usize, Failure> {
    let count = value.parse().ok().filter(|count| (1..=64).contains(count));
    count.ok_or_else(|| Failure::usage(format!("option {key}: \"{value}\" is not a number from 1 to 64")))
}

/// A number: names are looked up by whoever writes the option, as `uid=$(id -u NAME)`.
fn id(key: &str, value: &str) -> Result<u32, Failure> {
    let digits = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
    let id = value.parse().ok().filter(|id| digits && *id != u32::MAX);
    id.ok_or_else(|| Failure::usage(format!("option {key}: \"{value}\" is not a number from 0 to {}", u32::MAX - 1)))
}

fn umask(key: &str, value: &str) -> Result<u16, Failure> {
    let octal = !value.is_empty() && value.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
    let mask = u16::from_str_radix(value, 8).ok().filter(|mask| octal && *mask <= 0o777);
    mask.ok_or_else(|| Failure::usage(format!("option {key}: \"{value}\" is not an octal number from 0 to 777")))
}

fn time(key: &str, value: &str, least: Duration) -> Result<Duration, Failure> {
    let time = parse_duration(value).map_err(|error| Failure::usage(format!("option {key}: {error}")))?;
    let most = Duration::from_secs(3600);
    if time < least || time > most {
        return Err(Failure::usage(format!("option {key}: {value} is not from {} ms to 1 h", least.as_millis())));
    }
    Ok(time)
}

/// A time that the rails wait by: outside its range it does harm, or nothing.
fn rail_time(key: &str, value: &str) -> Result<Duration, Failure> {
    let time = parse_duration(value).map_err(|error| Failure::usage(format!("option {key}: {error}")))?;
    if RAIL_TIMES.contains(&time) {
        return Ok(time);
    }
    let nearest = time.clamp(*RAIL_TIMES.start(), *RAIL_TIMES.end());
    Err(Failure::usage(format!(
        "option {key}: {value} is not from {} to {}; the nearest that is right is {key}={}",
        format_duration(*RAIL_TIMES.start()),
        format_duration(*RAIL_TIMES.end()),
        format_duration(nearest).replace(' ', "")
    )))
}

fn unknown(key: &str) -> Failure {
    let nearest = KEYS.iter().map(|known| (strsim::damerau_levenshtein(key, known), *known)).min();
    let hint = match nearest {
        Some((distance, known)) if distance <= 1 + known.len() / 3 => format!(", did you mean {known}?"),
        _ => String::new(),
    };
    Failure::usage(format!("unknown option {key}{hint} (there are {})", KEYS.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fails(list: &str) -> String {
        let failure = Options::parse(&[list]).unwrap_err();
        assert_eq!(failure.code, 2);
        failure.message
    }

    #[test]
    fn every_key_acts() {
        let lists = [
            "ro,nosuid,nodev,noexec,allow_other,default_permissions,nonempty,require_rdma,arena=64MiB,threads=3,workers=4",
            "mode=snapshot,io=cached,readahead=0,read_timeout=2s,metadata_timeout=1500ms,connect_timeout=1s,metadata_ttl=0s,log=/a\\,b",
            "retry=5min,stop_timeout=3s,rdma_opening=arena,check=read",
            "uid=1000,gid=0,umask=027",
            "cert=/c\\,d,key=/k,ca=/a",
            "request_timeout=200ms,cq_timeout=30s,rails=rxe0@10.9.0.2~10.9.0.1+tcp~fabric",
        ];
        let options = Options::parse(&lists).unwrap();
        let want = Options {
            allow_other: true,
            default_permissions: true,
            nonempty: true,
            noexec: true,
            require_rdma: true,
            no_rdma: false,
            mode: Mode::Snapshot,
            io: Io::Cached,
            rdma_opening: Opening::OpenArena,
            arena: 64 << 20,
            threads: 3,
            workers: 4,
            readahead: 0,
            read_timeout: Duration::from_secs(2),
            metadata_timeout: Duration::from_millis(1500),
            connect_timeout: Duration::from_secs(1),
            request_timeout: Duration::from_millis(200),
            cq_timeout: Duration::from_secs(30),
            rails: ManualRail::list("rxe0@10.9.0.2~10.9.0.1+tcp~fabric").unwrap(),
            metadata_ttl: Duration::ZERO,
            check: CheckWay::Read,
            retry: Duration::from_secs(300),
            stop_timeout: Duration::from_secs(3),
            log: Some(PathBuf::from("/a,b")),
            uid: Some(1000),
            gid: Some(0),
            umask: 0o027,
            tls: [Some("/c,d".into()), Some("/k".into()), Some("/a".into())],
        };
        assert_eq!(options, want);
        let config = options.client_config("h:1".to_owned());
        assert_eq!((config.arena, config.workers, config.readahead), (64 << 20, 4, 0));
        assert_eq!(config.opening, Opening::OpenArena);
        assert_eq!(config.check, CheckWay::Read);
        assert_eq!((config.read_deadline, config.addresses), (Duration::from_secs(2), vec!["h:1".to_owned()]));
        assert_eq!((config.cq_wait, config.request_deadline), (Duration::from_secs(30), Duration::from_millis(200)));
        let files = config.tls.unwrap();
        assert_eq!((files.cert, files.key, files.ca), ("/c,d".into(), "/k".into(), "/a".into()));
        let part = Options::parse(&["key=/k"]).unwrap();
        assert!(part.client_config("h:1".to_owned()).tls.is_some(), "never plain where a certificate was meant");
        assert!(part.complete(|_| None).unwrap_err().message.starts_with("cert, key and ca go together: key "));
        assert_eq!((config.rdma, config.rails.len(), config.refuse_shortage), (Rdma::Required, 2, true));
        let off = Options::parse(&["no_rdma"]).unwrap();
        assert_eq!(off.client_config("h:1".to_owned()).rdma, Rdma::Off);
        let none: [&str; 0] = [];
        assert_eq!(Options::parse(&none), Ok(Options::default()));
    }

    #[test]
    fn wrong_options_say_what_would_be_right() {
        assert!(fails("arean=1GiB").starts_with("unknown option arean, did you mean arena?"));
        assert!(fails("xyzzy").starts_with("unknown option xyzzy (there are ro, "));
        assert!(fails("rw").contains("read-only"));
        assert_eq!(
            fails("io=chached"),
            "option io: \"chached\" is not one of auto, direct, cached, did you mean io=cached?"
        );
        assert_eq!(fails("mode=loose"), "option mode: \"loose\" is not one of strict, snapshot");
        assert_eq!(fails("mode"), "option mode: needs a value, as in mode=strict");
        assert_eq!(fails("ro=1"), "option ro: takes no value (\"1\" was given)");
        assert_eq!(fails("arena"), "option arena: needs a value, as in arena=256MiB");
        assert!(fails("ro,,nodev").contains("comma too many"));
        assert!(fails("threads=0").contains("from 1 to 64"));
        assert!(fails("threads=x").contains("from 1 to 64"));
        assert!(fails("read_timeout=1").contains("no unit"));
        assert!(fails("read_timeout=1ms").contains("not from 100 ms to 1 h"));
        assert!(fails("arena=99999999TiB").contains("too large"));
        assert_eq!(
            fails("cq_timeout=31s"),
            "option cq_timeout: 31s is not from 100 ms to 30 s; the nearest that is right is cq_timeout=30s"
        );
        assert!(fails("request_timeout=99ms").contains("the nearest that is right is request_timeout=100ms"));
        assert!(fails("cq_timout=1s").starts_with("unknown option cq_timout, did you mean cq_timeout?"));
        assert!(fails("rails=mlx5_0").starts_with("option rails: \"mlx5_0\" has no ~; a rail is FROM~TO"));
        assert_eq!(fails("rails"), "option rails: needs a value, as in rails=mlx5_0@10.0.0.2~10.0.0.1");
        assert!(fails("require_rdma,no_rdma").contains("contradict each other"));
        assert!(fails("log=").contains("needs a path"));
        assert_eq!(fails("key=k"), "option key: \"k\" is not an absolute path: write it from / on");
        assert_eq!(fails("ca"), "option ca: needs a value, as in ca=/etc/railfs/client.pem");
        assert!(fails("ro\\").starts_with("unknown option"));
        for wrong in ["uid=root", "gid=-1", "uid=+1", "uid=4294967295", "gid="] {
            assert!(fails(wrong).contains("is not a number from 0 to 4294967294"), "{wrong}");
        }
        for wrong in ["umask=8", "umask=1000", "umask=0x1", "umask="] {
            assert!(fails(wrong).contains("is not an octal number from 0 to 777"), "{wrong}");
        }
    }

    #[test]
    fn i6_an_arena_that_is_too_small_is_refused_with_the_sum() {
        let message = fails("arena=4MiB");
        assert_eq!(
            message,
            "option arena: 4 MiB is too small (a unit is needed, as in 256MiB): it takes at least 5 MiB = 3 x (largest READ 1 MiB + 2 pages of 256 KiB), in whole MiB"
        );
        assert!(fails("arena=4608KiB").contains("at least 5 MiB"), "the arena would have 4 MiB of it");
        assert_eq!(Options::parse(&["arena=5MiB"]).unwrap().arena, 5 << 20);
        assert_eq!(Options::parse(&["arena=6655KiB"]).unwrap().arena, 6 << 20);
        assert!(Options::default().memory_plan()[0].starts_with("arena 256 MiB: at least 5 MiB = 3 x "));
    }

    #[test]
    fn the_page_lists_every_option_and_no_other_with_its_default() {
        let page = include_str!("../../../docs/configuration.md");
        let part = page.split_once("\n## Mount\n").expect("no such heading").1;
        let rows = part.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
        let cells = |line: &str| -> Vec<String> {
            line.trim_matches('|').split('|').map(|cell| cell.trim().replace('`', "")).collect()
        };
        let rows: Vec<Vec<String>> = rows.skip(2).map(cells).collect();
        assert_eq!(rows.iter().map(|row| row[0].as_str()).collect::<Vec<_>>(), KEYS);
        let row = |key: &str| rows.iter().find(|row| row[0] == key).expect("listed above").clone();
        let least = Options::default();
        for (key, value) in [("arena", least.arena), ("readahead", least.readahead)] {
            assert_eq!(row(key)[1], format_size(value));
        }
        assert!(row("arena")[2].starts_with(&format_size(least_arena())));
        for (key, value) in [
            ("read_timeout", least.read_timeout),
            ("metadata_timeout", least.metadata_timeout),
            ("connect_timeout", least.connect_timeout),
            ("request_timeout", least.request_timeout),
            ("cq_timeout", least.cq_timeout),
            ("metadata_ttl", least.metadata_ttl),
            ("retry", least.retry),
            ("stop_timeout", least.stop_timeout),
        ] {
            assert_eq!(row(key)[1], railfs_proto::units::format_duration(value));
        }
        assert_eq!(row("workers")[1], least.workers.to_string());
        assert_eq!((row("mode")[1].as_str(), row("io")[1].as_str()), ("strict", "auto"));
        assert!(Io::NAMES.iter().all(|(name, _)| row("io")[2].contains(name)));
        assert!(OPENINGS.iter().all(|(name, _)| row("rdma_opening")[2].contains(name)));
        assert!(CHECKS.iter().all(|(name, _)| row("check")[2].contains(name)) && row("check")[1] == "auto");
        assert!(Mode::NAMES.iter().all(|(name, _)| row("mode")[2].contains(name)));
        assert_eq!((Options::default().mode, Options::default().io), (Mode::Strict, Io::Auto));
    }
}
