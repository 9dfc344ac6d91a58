//! The one pure parser of the configuration: text in, a checked [`Config`] or an error with its place out.

use super::security::{namespaces, security};
use super::{
    Config, ConfigError, DEFAULT_MAX_PINS, DEFAULT_MAX_REGISTERED, DEFAULT_PIN_LEASE, DEFAULT_RAIL_PORT,
    DEFAULT_RETENTION, DEFAULT_STATE_DIR, MIN_MAX_REGISTERED, MIN_RDMA_REGISTERED, PutConfig, RDMA, RailConfig,
};
use railfs_proto::layout::{LayoutError, Striping};
use railfs_proto::limits::{
    CQ_WAIT, DEFAULT_CONTROL_PORT, MAX_CONTROL_ADDRESSES, MAX_LISTENERS, MAX_WIDTH, MAX_WORD, PIN_LEASE, PULL,
    RAIL_TIMES,
};
use railfs_proto::name::check_node_name;
use railfs_proto::units::{format_duration, format_size, parse_duration, parse_size};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

pub(super) const TOP: &[&str] = &[
    "node",
    "state_dir",
    "stripe_dirs",
    "require_rdma",
    "control",
    "rail",
    "put",
    "memory",
    "retention",
    "timeouts",
    "security",
    "namespace",
];
pub(super) const SECTIONS: &[(&str, &[&str])] = &[
    ("control", &["listen"]),
    ("rail", &["fabric", "transport", "listen", "device", "announce"]),
    ("put", &["stripe_size", "page_size", "width"]),
    ("memory", &["max_registered"]),
    ("retention", &["superseded", "pin_lease", "max_pins"]),
    ("timeouts", &["cq", "request"]),
    ("security", &["insecure", "cert", "key", "client_ca"]),
    ("namespace", &["name", "readers", "writers"]),
];
/// Most stripe directories of one node: components are at most as many.
const MAX_DIRECTORIES: usize = MAX_WIDTH as usize;
/// Most pins that can be allowed: each costs the server about 100 bytes.
const MOST_PINS: usize = 10_000_000;
/// Longest retention: a year says that a unit was mistaken.
const MAX_RETENTION: Duration = Duration::from_secs(366 * 24 * 3600);

/// Where the parts of a configuration stand in its file, for rules that are checked later.
#[derive(Clone, Debug)]
pub struct Origin {
    file: String,
    directories: Vec<usize>,
}

impl Origin {
    /// An error about one of `stripe_dirs`, by its place.
    pub fn directory(&self, place: usize, problem: String) -> ConfigError {
        let line = self.directories.get(place).copied();
        ConfigError { file: self.file.clone(), line, key: "stripe_dirs".to_owned(), problem }
    }
}

pub(super) struct Source<'a> {
    text: &'a str,
    file: &'a str,
}

impl Source<'_> {
    fn line(&self, at: usize) -> usize {
        self.text.as_bytes().iter().take(at).filter(|&&byte| byte == b'\n').count() + 1
    }
    /// The key that an error of the syntax is about; empty where it is about something else.
    fn named(&self, span: Option<Range<usize>>) -> &str {
        let text = span.and_then(|span| self.text.get(span)).unwrap_or_default().trim();
        let key = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.\"".contains(&byte);
        if text.bytes().all(key) { text } else { "" }
    }
    pub(super) fn error(&self, span: Option<Range<usize>>, key: &str, problem: impl Into<String>) -> ConfigError {
        ConfigError {
            file: self.file.to_owned(),
            line: span.map(|span| self.line(span.start)),
            key: key.to_owned(),
            problem: problem.into(),
        }
    }
}

/// One table with its name ("" at the top).
pub(super) struct Section<'a> {
    source: &'a Source<'a>,
    name: &'a str,
    table: Option<&'a DeTable<'a>>,
}

pub(super) type Value<'a> = &'a Spanned<DeValue<'a>>;

impl<'a> Section<'a> {
    pub(super) fn new(
        source: &'a Source<'a>,
        name: &'a str,
        table: Option<&'a DeTable<'a>>,
    ) -> Result<Self, ConfigError> {
        let known = if name.is_empty() { TOP } else { SECTIONS.iter().find(|(n, _)| *n == name).map_or(TOP, |s| s.1) };
        for (key, _) in table.into_iter().flat_map(|table| table.iter()) {
            let word: &str = key.get_ref();
            if !known.contains(&word) {
                let near = nearest(&path(name, word), name, known);
                let problem = format!("there is no such key; did you mean {near}?");
                return Err(source.error(Some(key.span()), &path(name, word), problem));
            }
        }
        Ok(Section { source, name, table })
    }

    fn path(&self, key: &str) -> String {
        path(self.name, key)
    }
    pub(super) fn error(&self, value: Value<'_>, key: &str, problem: impl Into<String>) -> ConfigError {
        self.source.error(Some(value.span()), &self.path(key), problem)
    }
    pub(super) fn get(&self, key: &str) -> Option<Value<'a>> {
        self.table?.iter().find(|(k, _)| k.get_ref().as_ref() == key).map(|(_, value)| value)
    }
    pub(super) fn wrong(&self, value: Value<'_>, key: &str, want: &str) -> ConfigError {
        self.error(value, key, format!("is a TOML {}; it must be {want}", value.get_ref().type_str()))
    }
    pub(super) fn string(&self, key: &str, want: &str) -> Result<Option<(&'a str, Value<'a>)>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let text = value.get_ref().as_str().ok_or_else(|| self.wrong(value, key, want))?;
        if text.is_empty() {
            Err(self.error(value, key, format!("is empty; it must be {want}")))
        } else {
            Ok(Some((text, value)))
        }
    }
    /// A string, or a list of strings that is not empty.
    fn strings(&self, key: &str, want: &str) -> Result<Option<Vec<(&'a str, Value<'a>)>>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        if let Some(text) = value.get_ref().as_str() {
            return Ok(Some(vec![(text, value)]));
        }
        let array = value.get_ref().as_array().ok_or_else(|| self.wrong(value, key, want))?;
        if array.is_empty() {
            return Err(self.error(value, key, format!("is empty; it must be {want}")));
        }
        let item = |item: Value<'a>| Ok((item.get_ref().as_str().ok_or_else(|| self.wrong(item, key, want))?, item));
        array.iter().map(item).collect::<Result<_, _>>().map(Some)
    }
    fn integer(&self, value: Value<'_>, key: &str, want: &str) -> Result<u64, ConfigError> {
        let integer = value.get_ref().as_integer().ok_or_else(|| self.wrong(value, key, want))?;
        if integer.as_str().starts_with('-') {
            return Err(self.error(value, key, format!("{} is negative; it must be {want}", integer.as_str())));
        }
        u64::from_str_radix(integer.as_str().trim_start_matches('+'), integer.radix())
            .map_err(|_| self.error(value, key, format!("{} is too large", integer.as_str())))
    }
    fn size(&self, key: &str) -> Result<Option<(u64, Value<'a>)>, ConfigError> {
        let want = "a size, such as \"1 MiB\" or a number of bytes";
        let Some(value) = self.get(key) else { return Ok(None) };
        let bytes = match value.get_ref().as_str() {
            Some(text) => parse_size(text).map_err(|error| self.error(value, key, error.to_string()))?,
            None => self.integer(value, key, want)?,
        };
        Ok(Some((bytes, value)))
    }
    fn duration(&self, key: &str) -> Result<Option<(Duration, Value<'a>)>, ConfigError> {
        let Some((text, value)) = self.string(key, "a time, such as \"60 s\" or \"500 ms\"")? else { return Ok(None) };
        let duration = parse_duration(text).map_err(|error| self.error(value, key, error.to_string()))?;
        Ok(Some((duration, value)))
    }
    pub(super) fn boolean(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.get_ref().as_bool().map(Some).ok_or_else(|| self.wrong(value, key, "true or false"))
    }
    /// Addresses with their defaults filled in: "10.0.0.1:7420", "10.0.0.1", "[::1]:7420", "::1", "*".
    fn address(&self, value: Value<'_>, key: &str, text: &str, port: u16) -> Result<SocketAddr, ConfigError> {
        let (host, port) = match text.strip_prefix("*") {
            Some("") => return Ok(SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port)),
            Some(rest) => match rest.strip_prefix(':').and_then(|p| p.parse().ok()) {
                Some(port) => return Ok(SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port)),
                None => ("*", port),
            },
            None => (text, port),
        };
        let bare = || host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().ok();
        host.parse::<SocketAddr>().ok().or_else(|| bare().map(|ip| SocketAddr::new(ip, port))).ok_or_else(|| {
            let problem = format!(
                "\"{text}\" is not an address: write ADDRESS, ADDRESS:PORT, [V6]:PORT, or \"*\" for every address"
            );
            self.error(value, key, problem)
        })
    }
}

fn path(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
}

/// The nearest right key: of this table, or the whole path of one in another.
fn nearest(wrong: &str, section: &str, known: &[&str]) -> String {
    let word = wrong.rsplit('.').next().unwrap_or(wrong);
    let here = known.iter().map(|key| (strsim::damerau_levenshtein(word, key), path(section, key)));
    let top = TOP.iter().map(|key| (1 + strsim::damerau_levenshtein(word, key), (*key).to_owned()));
    let elsewhere = SECTIONS.iter().flat_map(|(section, keys)| {
        keys.iter().map(move |key| (1 + strsim::damerau_levenshtein(word, key), path(section, key)))
    });
    here.chain(top).chain(elsewhere).min_by_key(|(distance, _)| *distance).map(|(_, key)| key).unwrap_or_default()
}

/// Whether only this machine reaches the address.
fn is_loopback(address: &SocketAddr) -> bool {
    match address.ip() {
        IpAddr::V4(ip) => ip.is_loopback(),
        IpAddr::V6(ip) => ip.is_loopback() || ip.to_ipv4_mapped().is_some_and(|ip| ip.is_loopback()),
    }
}

/// Parses and checks a configuration. `file` is only named; `host` is the default of `node`.
///
/// # Errors
/// The first rule that is broken, with its place.
pub fn parse(text: &str, file: &str, host: &str) -> Result<(Config, Origin), ConfigError> {
    let source = Source { text, file };
    let document = DeTable::parse(text)
        .map_err(|error| source.error(error.span(), source.named(error.span()), error.message()))?;
    let top = Section::new(&source, "", Some(document.get_ref()))?;

    let node = match top.string("node", "a name of letters, digits, '.', '_' and '-'")? {
        Some((node, value)) => {
            check_node_name(node).map_err(|error| top.error(value, "node", error.to_string()))?;
            node.to_owned()
        }
        None => {
            check_node_name(host).map_err(|error| {
                source.error(None, "node", format!("the host name cannot be used, set one: {error}"))
            })?;
            host.to_owned()
        }
    };
    let state_dir = match top.string("state_dir", "an absolute path")? {
        Some((text, value)) => absolute(&top, value, "state_dir", text)?,
        None => PathBuf::from(DEFAULT_STATE_DIR),
    };
    let (stripe_dirs, directories) = stripe_dirs(&top)?;
    if let Some(place) = stripe_dirs.iter().position(|d| state_dir.starts_with(d)) {
        let line = directories.get(place).copied();
        let problem = format!("state_dir {} lies inside this stripe directory: move it", state_dir.display());
        return Err(ConfigError { file: file.to_owned(), line, key: "stripe_dirs".to_owned(), problem });
    }

    let (insecure, tls) = security(&table(&top, "security")?)?;
    let namespaces = namespaces(&source, &top, tls.is_some())?;
    // A rail is plain in any case: what joins it shows a ticket, which only comes over the control connection.
    let open = insecure || tls.is_some();
    let control = control(&table(&top, "control")?, open)?;
    let rails = rails(&source, &top, &control, open)?;
    let put_section = table(&top, "put")?;
    let put = put(&put_section)?;
    if let (Some(width), Some(value)) = (put.width, put_section.get("width"))
        && usize::try_from(width).is_ok_and(|width| width > stripe_dirs.len())
    {
        let problem =
            format!("{width} is more than there are stripe_dirs ({}): leave it out for all", stripe_dirs.len());
        return Err(put_section.error(value, "width", problem));
    }

    let memory = table(&top, "memory")?;
    let max_registered = match memory.size("max_registered")? {
        Some((bytes, value)) if bytes < MIN_MAX_REGISTERED => {
            let problem = format!("{} is less than the least, {}", format_size(bytes), format_size(MIN_MAX_REGISTERED));
            return Err(memory.error(value, "max_registered", problem));
        }
        Some((bytes, value)) if bytes > isize::MAX as u64 => {
            return Err(memory.error(value, "max_registered", "is more than can be addressed"));
        }
        Some((bytes, _)) => bytes,
        None => DEFAULT_MAX_REGISTERED,
    };
    let kept = table(&top, "retention")?;
    let retention = match kept.duration("superseded")? {
        Some((time, value)) if time > MAX_RETENTION => {
            return Err(kept.error(value, "superseded", "is longer than a year"));
        }
        Some((time, _)) => time,
        None => DEFAULT_RETENTION,
    };
    let require_rdma = top.boolean("require_rdma")?.unwrap_or(false);
    let verbs = rails.iter().filter(|rail| rail.is_rdma()).count() as u64;
    if require_rdma && verbs == 0 {
        let problem = "is true, and no [[rail]] has transport = \"rdma\": give one that, or leave this key out";
        return Err(source.error(top.get("require_rdma").map(|value| value.span()), "require_rdma", problem));
    }
    let least = MIN_MAX_REGISTERED + verbs * MIN_RDMA_REGISTERED;
    if verbs > 0 && max_registered / 2 < least {
        let problem = format!(
            "{} is too little: with puts (at least {}) and {verbs} rdma rails (at least {} each, twice) it must be {}",
            format_size(max_registered),
            format_size(MIN_MAX_REGISTERED),
            format_size(MIN_RDMA_REGISTERED),
            format_size(2 * least)
        );
        return Err(source.error(None, "memory.max_registered", problem));
    }
    let pin_lease = match kept.duration("pin_lease")? {
        Some((time, value)) if !PIN_LEASE.contains(&time) => {
            return Err(kept.error(value, "pin_lease", "is not from 1 s to 24 h"));
        }
        Some((time, _)) => time,
        None => DEFAULT_PIN_LEASE,
    };
    let max_pins = match kept.get("max_pins") {
        Some(value) => {
            let want = format!("a whole number from 2 to {MOST_PINS}");
            let pins = kept.integer(value, "max_pins", &want)?;
            let pins = usize::try_from(pins).ok().filter(|pins| (2..=MOST_PINS).contains(pins));
            pins.ok_or_else(|| kept.error(value, "max_pins", format!("must be {want}")))?
        }
        None => DEFAULT_MAX_PINS,
    };
    let timeouts = table(&top, "timeouts")?;
    let time = |key: &str, default: Duration| match timeouts.duration(key)? {
        Some((time, value)) if !RAIL_TIMES.contains(&time) => {
            let (least, most) = (*RAIL_TIMES.start(), *RAIL_TIMES.end());
            let nearest = format_duration(time.clamp(least, most));
            let range = format!("{} to {}", format_duration(least), format_duration(most));
            let problem =
                format!("{} is not from {range}; the nearest that is right is \"{nearest}\"", format_duration(time));
            Err(timeouts.error(value, key, problem))
        }
        Some((time, _)) => Ok(time),
        None => Ok(default),
    };
    let (cq_timeout, request_timeout) = (time("cq", CQ_WAIT)?, time("request", PULL)?);
    let config = Config {
        node,
        state_dir,
        stripe_dirs,
        control,
        rails,
        put,
        max_registered,
        require_rdma,
        retention,
        pin_lease,
        max_pins,
        cq_timeout,
        request_timeout,
        insecure,
        tls,
        namespaces,
        file: None,
    };
    Ok((config, Origin { file: file.to_owned(), directories }))
}

fn table<'a>(top: &Section<'a>, name: &'a str) -> Result<Section<'a>, ConfigError> {
    let table = match top.get(name) {
        None => None,
        Some(value) => {
            Some(value.get_ref().as_table().ok_or_else(|| top.wrong(value, name, &format!("a table, [{name}]")))?)
        }
    };
    Section::new(top.source, name, table)
}

pub(super) fn absolute(section: &Section<'_>, value: Value<'_>, key: &str, text: &str) -> Result<PathBuf, ConfigError> {
    let path = Path::new(text);
    if !path.is_absolute() {
        return Err(section.error(value, key, format!("\"{text}\" is a relative path: write it from / on")));
    }
    if path.components().any(|part| part == Component::ParentDir) || text.contains('\0') {
        return Err(section.error(value, key, format!("{text:?} has a \"..\" or a NUL in it: write the plain path")));
    }
    // Without "." and doubled or trailing slashes, so that equal paths are equal.
    Ok(path.components().collect())
}

fn stripe_dirs(top: &Section<'_>) -> Result<(Vec<PathBuf>, Vec<usize>), ConfigError> {
    let want = "a list of absolute paths of directories that `railfsd init` has marked";
    let Some(list) = top.strings("stripe_dirs", want)? else {
        return Err(top.source.error(None, "stripe_dirs", format!("is missing; it must be {want}")));
    };
    let mut paths: Vec<PathBuf> = Vec::with_capacity(list.len().min(MAX_DIRECTORIES));
    let mut lines = Vec::with_capacity(paths.capacity());
    for (text, value) in list {
        if text.is_empty() {
            return Err(top.error(value, "stripe_dirs", "has an empty path in it"));
        }
        let path = absolute(top, value, "stripe_dirs", text)?;
        if paths.contains(&path) {
            return Err(top.error(value, "stripe_dirs", format!("{} is listed twice: list it once", path.display())));
        }
        if let Some(other) = paths.iter().find(|other| other.starts_with(&path) || path.starts_with(other)) {
            let problem =
                format!("{} and {} lie one inside the other: keep them apart", other.display(), path.display());
            return Err(top.error(value, "stripe_dirs", problem));
        }
        if paths.len() == MAX_DIRECTORIES {
            return Err(top.error(value, "stripe_dirs", format!("has more than {MAX_DIRECTORIES} directories")));
        }
        lines.push(top.source.line(value.span().start));
        paths.push(path);
    }
    Ok((paths, lines))
}

fn guarded(
    section: &Section<'_>,
    value: Value<'_>,
    address: SocketAddr,
    open: bool,
) -> Result<SocketAddr, ConfigError> {
    if is_loopback(&address) || open {
        return Ok(address);
    }
    let problem = format!(
        "{address} can be reached from other machines and connections are not encrypted: \
         set cert, key and client_ca under [security] for mutual TLS, \
         set `insecure = true` there to accept that, or listen on a loopback address"
    );
    Err(section.error(value, "listen", problem))
}

fn control(section: &Section<'_>, open: bool) -> Result<Vec<SocketAddr>, ConfigError> {
    let want = "an address, a list of addresses, or \"*\"";
    let Some(list) = section.strings("listen", want)? else {
        return Ok(vec![SocketAddr::new(Ipv4Addr::LOCALHOST.into(), DEFAULT_CONTROL_PORT)]);
    };
    let mut addresses = Vec::new();
    for (text, value) in list {
        let address = section.address(value, "listen", text, DEFAULT_CONTROL_PORT)?;
        let address = guarded(section, value, address, open)?;
        if addresses.contains(&address) && address.port() != 0 {
            return Err(section.error(value, "listen", format!("{address} is listed twice")));
        }
        if addresses.len() == MAX_CONTROL_ADDRESSES {
            return Err(section.error(value, "listen", format!("has more than {MAX_CONTROL_ADDRESSES} addresses")));
        }
        addresses.push(address);
    }
    Ok(addresses)
}

fn rails(
    source: &Source<'_>,
    top: &Section<'_>,
    control: &[SocketAddr],
    open: bool,
) -> Result<Vec<RailConfig>, ConfigError> {
    let default_host = control.first().map_or(Ipv4Addr::LOCALHOST.into(), SocketAddr::ip);
    let default = || RailConfig {
        fabric: "default".to_owned(),
        transport: "tcp".to_owned(),
        listen: SocketAddr::new(default_host, DEFAULT_RAIL_PORT),
        device: None,
        announce: true,
    };
    let Some(value) = top.get("rail") else { return Ok(vec![default()]) };
    let list = value.get_ref().as_array().ok_or_else(|| top.wrong(value, "rail", "written as [[rail]]"))?;
    if list.is_empty() {
        return Err(top.error(value, "rail", "is empty: leave it out for the default rail"));
    }
    if list.len() > MAX_LISTENERS {
        return Err(top.error(value, "rail", format!("there are more than {MAX_LISTENERS} rails")));
    }
    let mut rails: Vec<RailConfig> = Vec::with_capacity(list.len());
    for item in list.iter() {
        let table = item.get_ref().as_table().ok_or_else(|| top.wrong(item, "rail", "a table, [[rail]]"))?;
        let section = Section::new(source, "rail", Some(table))?;
        let mut rail = default();
        if let Some((fabric, value)) = section.string("fabric", "a name")? {
            if fabric.len() > MAX_WORD || fabric.bytes().any(|b| !(b.is_ascii_alphanumeric() || b"._-".contains(&b))) {
                let problem = format!("\"{fabric}\" is not 1 to {MAX_WORD} letters, digits, '.', '_' and '-'");
                return Err(section.error(value, "fabric", problem));
            }
            rail.fabric = fabric.to_owned();
        }
        if let Some((transport, value)) = section.string("transport", "\"tcp\" or \"rdma\"")? {
            if transport != "tcp" && transport != RDMA {
                let problem = format!("\"{transport}\" is not a transport of this version: use \"tcp\" or \"rdma\"");
                return Err(section.error(value, "transport", problem));
            }
            rail.transport = transport.to_owned();
        }
        if let Some((device, value)) = section.string("device", "the name of an RDMA device")? {
            if !rail.is_rdma() {
                return Err(section.error(value, "device", "is for transport = \"rdma\" only: leave it out"));
            }
            if device.len() > MAX_WORD || device.bytes().any(|b| !b.is_ascii_graphic() || b == b'/') {
                return Err(section.error(value, "device", format!("\"{device}\" is no name of a device")));
            }
            rail.device = Some(device.to_owned());
        }
        if let Some(announce) = section.boolean("announce")? {
            rail.announce = announce;
        }
        match section.string("listen", "an address")? {
            Some((text, value)) if rail.is_rdma() => {
                let problem =
                    || format!("\"{text}\" is not the address of an RDMA device (an IP address without a port)");
                let ip: IpAddr = text.parse().map_err(|_| section.error(value, "listen", problem()))?;
                if ip.is_unspecified() || ip.is_multicast() {
                    return Err(section.error(value, "listen", problem()));
                }
                rail.listen = guarded(&section, value, SocketAddr::new(ip, 0), open)?;
                if rails.iter().any(|other| other.is_rdma() && other.listen == rail.listen) {
                    return Err(section.error(value, "listen", format!("{ip} is listed twice")));
                }
            }
            None if rail.is_rdma() => {
                let problem = "is missing: a rail of transport \"rdma\" needs the address of its device";
                return Err(source.error(Some(item.span()), "rail.listen", problem));
            }
            Some((text, value)) => {
                let address = section.address(value, "listen", text, DEFAULT_RAIL_PORT)?;
                rail.listen = guarded(&section, value, address, open)?;
                let taken = |other: &SocketAddr| *other == rail.listen && rail.listen.port() != 0;
                if rails.iter().any(|other| taken(&other.listen)) || control.iter().any(taken) {
                    return Err(section.error(value, "listen", format!("{address} is listed twice")));
                }
            }
            None if rails.iter().any(|other| other.listen == rail.listen) => {
                let problem = format!("is missing: {} is taken by another rail of this file", rail.listen);
                return Err(source.error(Some(item.span()), "rail.listen", problem));
            }
            None => {}
        }
        rails.push(rail);
    }
    Ok(rails)
}

fn put(section: &Section<'_>) -> Result<PutConfig, ConfigError> {
    let mut put = PutConfig::default();
    let clamp = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
    let page = section.size("page_size")?;
    let stripe = section.size("stripe_size")?;
    if let Some((bytes, _)) = page {
        put.page_size = clamp(bytes);
    }
    if let Some((bytes, _)) = stripe {
        put.stripe_size = clamp(bytes);
    } else {
        put.stripe_size = put.stripe_size.max(put.page_size);
    }
    if let Err(error) = Striping::new(0, put.page_size, put.stripe_size, 1) {
        // One of the two was written: the defaults fit each other.
        let (key, value) = match (&error, page, stripe) {
            (LayoutError::Page(_), Some((_, value)), _) => ("page_size", value),
            (_, _, Some((_, value))) => ("stripe_size", value),
            (_, Some((_, value)), _) => ("page_size", value),
            _ => return Err(section.source.error(None, "put", error.to_string())),
        };
        return Err(section.error(value, key, error.to_string()));
    }
    if let Some(value) = section.get("width") {
        let want = format!("a whole number from 1 to {MAX_WIDTH}");
        let width = section.integer(value, "width", &want)?;
        let width = u32::try_from(width).ok().filter(|width| (1..=MAX_WIDTH).contains(width));
        put.width = Some(width.ok_or_else(|| section.error(value, "width", format!("must be {want}")))?);
    }
    Ok(put)
}
