//! The configuration of `railfsd`: what a file may say, and what it means when it says nothing.
//!
//! Guarantees: a [`Config`] has passed every rule that needs no disk; unknown keys are errors; each error names the file,
//! the line and the key. Every key acts. docs/configuration.md lists the same keys.

mod parse;
mod security;

pub use parse::{Origin, parse};

use crate::access::NamespaceConfig;
use railfs_engine::tls::{Files, Which};
use railfs_proto::units::{format_duration, format_size};
use std::fmt::{self, Display};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Most `[[namespace]]` tables.
pub const MAX_NAMESPACES: usize = 10_000;
/// Where the catalog's index lies by default.
pub const DEFAULT_STATE_DIR: &str = "/var/lib/railfs";
/// Where a rail listens by default.
pub const DEFAULT_RAIL_PORT: u16 = 7421;
/// The transport of queue pairs.
pub const RDMA: &str = "rdma";
/// Bytes of landing memory by default.
pub const DEFAULT_MAX_REGISTERED: u64 = 64 << 20;
/// The least landing memory: what the pulls of one put need.
pub const MIN_MAX_REGISTERED: u64 = 4 << 20;
/// The least registered memory of one rdma rail, bytes.
pub const MIN_RDMA_REGISTERED: u64 = 8 << 20;
/// How long superseded versions stay readable by default.
pub const DEFAULT_RETENTION: Duration = Duration::from_secs(60);
/// How long a client's pins last without a renewal by default.
pub const DEFAULT_PIN_LEASE: Duration = Duration::from_secs(60);
/// Pins of all clients together by default.
pub const DEFAULT_MAX_PINS: usize = 100_000;
/// Bytes of a stripe by default.
pub const DEFAULT_STRIPE_SIZE: u32 = 1 << 20;
/// Bytes of a page by default.
pub const DEFAULT_PAGE_SIZE: u32 = 64 << 10;

/// Why a configuration is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The file.
    pub file: String,
    /// Line, from 1; `None` where the problem has no place (a key that is missing).
    pub line: Option<usize>,
    /// The key with its table, such as `put.stripe_size`; empty where the file as a whole is wrong.
    pub key: String,
    /// What is wrong and what would be right.
    pub problem: String,
}

impl Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        if !self.key.is_empty() {
            write!(f, ": {}", self.key)?;
        }
        write!(f, ": {}", self.problem)
    }
}
impl std::error::Error for ConfigError {}

/// One `[[rail]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RailConfig {
    /// Name of the network in which every listener reaches every device.
    pub fabric: String,
    /// "tcp" or "rdma".
    pub transport: String,
    /// Where it listens. A wildcard is announced to each client as the address by which it reached the control plane. Of
    /// "rdma" the device's address; the port means nothing.
    pub listen: SocketAddr,
    /// Of "rdma": the device's name; none: whichever has the address.
    pub device: Option<String>,
    /// Whether hello lists it. Else only clients use it that name it.
    pub announce: bool,
}

impl RailConfig {
    /// Whether it is made of queue pairs.
    pub fn is_rdma(&self) -> bool {
        self.transport == RDMA
    }
}

/// `[put]`: what a put gets that asks for nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutConfig {
    /// Bytes, a power of two.
    pub stripe_size: u32,
    /// Bytes, a power of two that is at most the stripe size.
    pub page_size: u32,
    /// Components at most; `None`: as many as there are writable stripe directories.
    pub width: Option<u32>,
}

impl Default for PutConfig {
    fn default() -> Self {
        PutConfig { stripe_size: DEFAULT_STRIPE_SIZE, page_size: DEFAULT_PAGE_SIZE, width: None }
    }
}

/// A configuration that has passed every rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The node's name.
    pub node: String,
    /// For the catalog's index.
    pub state_dir: PathBuf,
    /// At least one, absolute, none twice.
    pub stripe_dirs: Vec<PathBuf>,
    /// Where the control plane listens; at least one.
    pub control: Vec<SocketAddr>,
    /// At least one. A listener's id is its place here.
    pub rails: Vec<RailConfig>,
    /// See there.
    pub put: PutConfig,
    /// Bytes of landing memory, and of what is registered with RDMA devices.
    pub max_registered: u64,
    /// A rail whose RDMA device cannot be had stops the start; else it is left out, loudly, until it can be had.
    pub require_rdma: bool,
    /// How long superseded versions stay readable.
    pub retention: Duration,
    /// How long pins last without a renewal.
    pub pin_lease: Duration,
    /// Pins of all clients together; one may have half of them.
    pub max_pins: usize,
    /// How long work that was posted to an RDMA device may be without a completion; 100 ms to 30 s.
    pub cq_timeout: Duration,
    /// How long a request to a client (the bytes of a put) may take; 100 ms to 30 s.
    pub request_timeout: Duration,
    /// Plain connections from other machines are accepted.
    pub insecure: bool,
    /// The control plane takes mutual TLS, with these files, and nothing else; `None`: plain connections.
    pub tls: Option<Files>,
    /// Readers and writers; none: whoever got in may do all.
    pub namespaces: Vec<NamespaceConfig>,
    /// Where it was read from: there it is looked at again.
    pub file: Option<PathBuf>,
}

impl Config {
    /// Reads and parses a file, and checks where its paths lead: no stripe directory twice under
    /// two names, none inside another, and `state_dir` inside none.
    ///
    /// # Errors
    /// See [`ConfigError`]; a file that cannot be read is one.
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        let file = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|error| ConfigError {
            file: file.clone(),
            line: None,
            key: String::new(),
            problem: format!("cannot be read: {error}"),
        })?;
        let (config, origin) = parse(&text, &file, &host_name())?;
        config.check_aliases(&origin)?;
        Ok(Config { file: Some(path.to_owned()), ..config })
    }

    /// Whether certificate, key and authorities can be used now. Reads the disk.
    ///
    /// # Errors
    /// The first that cannot.
    pub fn check_tls(&self) -> Result<(), ConfigError> {
        let Some(files) = &self.tls else { return Ok(()) };
        let file = self.file.as_ref().map(|file| file.display().to_string()).unwrap_or_default();
        files.server().map(|_| ()).map_err(|error| {
            let key = match error.which {
                Which::Cert => "security.cert",
                Which::Key => "security.key",
                Which::Ca => "security.client_ca",
            };
            ConfigError { file, line: None, key: key.to_owned(), problem: error.to_string() }
        })
    }

    /// Two paths that lead to one directory, or into one (symbolic links, bind mounts of it).
    fn check_aliases(&self, origin: &Origin) -> Result<(), ConfigError> {
        use std::os::unix::fs::MetadataExt;
        let mut seen: Vec<(u64, u64, &PathBuf)> = Vec::new();
        let mut real: Vec<(usize, PathBuf)> = Vec::new();
        for (place, directory) in self.stripe_dirs.iter().enumerate() {
            // A directory that is not there is the business of whoever opens it: it is named there.
            let Ok(meta) = std::fs::metadata(directory) else { continue };
            if let Some((_, _, first)) = seen.iter().find(|(dev, ino, _)| (*dev, *ino) == (meta.dev(), meta.ino())) {
                let problem = format!(
                    "{} and {} are the same directory: list each one once",
                    first.display(),
                    directory.display()
                );
                return Err(origin.directory(place, problem));
            }
            seen.push((meta.dev(), meta.ino(), directory));
            real.extend(std::fs::canonicalize(directory).ok().map(|path| (place, path)));
        }
        for (place, path) in &real {
            if let Some((_, outer)) = real.iter().find(|(other, outer)| other != place && path.starts_with(outer)) {
                let problem = format!("leads to {}, inside {}: keep them apart", path.display(), outer.display());
                return Err(origin.directory(*place, problem));
            }
        }
        let state = real_path(&self.state_dir);
        if let Some((place, path)) = real.iter().find(|(_, path)| state.starts_with(path)) {
            let (given, path) = (self.state_dir.display(), path.display());
            let problem =
                format!("state_dir {given} leads to {}, inside this stripe directory {path}: move it", state.display());
            return Err(origin.directory(*place, problem));
        }
        Ok(())
    }
}

/// Where a path leads; of one that does not exist yet, where it will.
fn real_path(path: &Path) -> PathBuf {
    let there = path.ancestors().find_map(|part| Some((part, std::fs::canonicalize(part).ok()?)));
    there.map_or_else(
        || path.to_owned(),
        |(part, real)| match path.strip_prefix(part) {
            Ok(rest) if !rest.as_os_str().is_empty() => real.join(rest),
            _ => real,
        },
    )
}

/// The machine's name, for `node`.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The resolved configuration, as a file that says the same.
impl Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn list<T: Display>(items: impl Iterator<Item = T>) -> String {
            items.map(|item| toml::Value::String(item.to_string()).to_string()).collect::<Vec<_>>().join(", ")
        }
        let text = |value: &str| toml::Value::String(value.to_owned()).to_string();
        writeln!(f, "node = {}", text(&self.node))?;
        writeln!(f, "state_dir = {}", text(&self.state_dir.display().to_string()))?;
        writeln!(f, "stripe_dirs = [{}]", list(self.stripe_dirs.iter().map(|d| d.display())))?;
        writeln!(f, "require_rdma = {}", self.require_rdma)?;
        writeln!(f, "\n[control]\nlisten = [{}]", list(self.control.iter()))?;
        for rail in &self.rails {
            let (fabric, transport) = (text(&rail.fabric), text(&rail.transport));
            write!(f, "\n[[rail]]\nfabric = {fabric}\ntransport = {transport}\n")?;
            if rail.is_rdma() {
                writeln!(f, "listen = \"{}\"", rail.listen.ip())?;
            } else {
                writeln!(f, "listen = \"{}\"", rail.listen)?;
            }
            if let Some(device) = &rail.device {
                writeln!(f, "device = {}", text(device))?;
            }
            if !rail.announce {
                writeln!(f, "announce = false")?;
            }
        }
        writeln!(f, "\n[put]")?;
        writeln!(f, "stripe_size = \"{}\"", format_size(u64::from(self.put.stripe_size)))?;
        writeln!(f, "page_size = \"{}\"", format_size(u64::from(self.put.page_size)))?;
        match self.put.width {
            Some(width) => writeln!(f, "width = {width}")?,
            None => writeln!(f, "# width: as many as there are writable stripe directories")?,
        }
        writeln!(f, "\n[memory]\nmax_registered = \"{}\"", format_size(self.max_registered))?;
        writeln!(f, "\n[retention]\nsuperseded = \"{}\"", format_duration(self.retention))?;
        writeln!(f, "pin_lease = \"{}\"\nmax_pins = {}", format_duration(self.pin_lease), self.max_pins)?;
        writeln!(f, "\n[timeouts]\ncq = \"{}\"", format_duration(self.cq_timeout))?;
        writeln!(f, "request = \"{}\"", format_duration(self.request_timeout))?;
        write!(f, "\n[security]\ninsecure = {}", self.insecure)?;
        if let Some(Files { cert, key, ca }) = &self.tls {
            for (name, path) in [("cert", cert), ("key", key), ("client_ca", ca)] {
                write!(f, "\n{name} = {}", text(&path.display().to_string()))?;
            }
        }
        for namespace in &self.namespaces {
            write!(f, "\n\n[[namespace]]\nname = {}", text(&namespace.name))?;
            write!(f, "\nreaders = [{}]", list(namespace.readers.iter()))?;
            write!(f, "\nwriters = [{}]", list(namespace.writers.iter()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
