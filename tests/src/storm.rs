//! Everything at once: readers of every kind, puts, deletes, and faults of every kind at random, against live mounts.
//!
//! Guarantees: what a read may show follows from what was put and acknowledged ([`history`]), never from what a read showed
//! before it was checked; an error counts as explained only while a fault was there that explains it ([`weather`]); a call that
//! takes longer than its limit is a hung call, also if it ends well; the same seed makes the same choices. Control connections are
//! of mutual TLS, and certificates are replaced now and then.

pub mod faults;
pub mod history;
pub mod readers;
pub mod weather;

use crate::certs::{Authority, Held, When};
use crate::cluster::{Cluster, Plan};
use crate::data::Random;
use crate::mount::Mount;
use crate::process::{descriptors, resident, run, threads};
use crate::quiet::assert_quiet;
use crate::wait;
use faults::Faults;
use history::{Count, Object, World};
use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::{Duration, Instant};
use weather::Weather;

/// How the mounts under test are mounted: shorter limits than usual, so that more happens in the time.
const LIMITS: &str = "arena=32MiB,read_timeout=6s,metadata_timeout=3s";
/// Their forms, and whether a descriptor shows what was current when it was opened.
const FORMS: [(&str, bool); 3] = [("io=direct", false), ("io=cached", false), ("mode=snapshot", true)];

/// One of them.
#[derive(Debug)]
pub struct Place {
    /// Where.
    pub path: std::path::PathBuf,
    /// Its options.
    pub options: String,
    /// Whether a descriptor shows what was current when it was opened.
    pub snapshot: bool,
    /// Whether reads go by the kernel's pages, where one call can be many requests.
    pub cached: bool,
}
/// A call that takes longer is hung. An open looks a name up as often as it is stale, three times at most, 3 s each; a read has
/// 6 s; the rest is for a machine that does much else.
pub const HUNG: Duration = Duration::from_secs(20);

/// What a run did and saw.
#[derive(Debug, Default)]
pub struct Report {
    /// What readers counted, by name.
    pub seen: BTreeMap<&'static str, u64>,
    /// Faults by kind.
    pub faults: BTreeMap<&'static str, u64>,
    /// Faults that this machine cannot make, and why.
    pub cannot: BTreeMap<&'static str, String>,
    /// Puts and deletes that were acknowledged, and those whose outcome is not known.
    pub puts: (u64, u64),
    /// Whatever must not be. Empty, or the run failed.
    pub violations: Vec<String>,
    /// Descriptors, threads and resident KiB of the mount and the server: when both were warm, and at the end.
    pub levels: BTreeMap<&'static str, [(usize, usize, u64); 2]>,
    /// How long it took.
    pub took: Duration,
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "| operations | count |\n| --- | --- |")?;
        for (name, count) in &self.seen {
            writeln!(f, "| {name} | {count} |")?;
        }
        writeln!(f, "| puts and deletes acknowledged | {} |\n| of unknown outcome | {} |", self.puts.0, self.puts.1)?;
        writeln!(f, "\n| fault | times |\n| --- | --- |")?;
        for (name, count) in &self.faults {
            writeln!(f, "| {name} | {count} |")?;
        }
        for (name, why) in &self.cannot {
            writeln!(f, "| {name} | SKIPPED: {why} |")?;
        }
        writeln!(f, "\n| level (descriptors, threads, KiB) | when warm | at the end |\n| --- | --- | --- |")?;
        for (name, [first, last]) in &self.levels {
            writeln!(f, "| {name} | {first:?} | {last:?} |")?;
        }
        let of = |word: &str| self.violations.iter().filter(|text| text.starts_with(word)).count();
        let (wrong, hung) = (of("wrong bytes"), of("hung"));
        let other = self.violations.len() - wrong - hung;
        write!(
            f,
            "\n{:.0} s: wrong bytes {wrong}, hung calls {hung}, unexplained errors {other}",
            self.took.as_secs_f64()
        )
    }
}

fn level(pid: u32) -> (usize, usize, u64) {
    (descriptors(pid), threads(pid), resident(pid))
}

/// How big a run is.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Readers at once.
    pub readers: u64,
    /// For how long.
    pub length: Duration,
    /// Of all choices.
    pub seed: u64,
}

const WRITERS: usize = 2;

/// Keeps putting and deleting what changes.
fn write(world: &World, cluster: &Shared<'_>, weather: &Weather, seed: u64, part: usize) -> (u64, u64) {
    let mut random = Random::new(seed ^ part as u64);
    let (mut done, mut unknown) = (0, 0);
    // Of one name one writer: what is put is numbered.
    let changing = world.objects.iter().filter(|object| object.changes).enumerate();
    let changing: Vec<&Object> = changing.filter(|(n, _)| n % WRITERS == part).map(|(_, object)| object).collect();
    while !world.is_over() {
        let object = changing[random.below(changing.len() as u64) as usize];
        let delete = object.name == "sometimes" && random.below(3) == 0;
        let state = object.begin(delete);
        // Outside of the lock: a put goes on while the server is taken away.
        let mut command = match state.size {
            Some(size) => {
                let file = cluster.root.join(format!("to-put{part}"));
                crate::data::write_file(&file, state.seed, size);
                let mut command = cluster.with(|cluster| cluster.railfs());
                command.args(["put", "--quiet"]).arg(&file).arg(cluster.with(|cluster| cluster.url(&object.name)));
                command
            }
            None => {
                let mut command = cluster.with(|cluster| cluster.railfs());
                command.arg("rm").arg(cluster.with(|cluster| cluster.url(&object.name)));
                command
            }
        };
        let began = Instant::now();
        let output = run(&mut command, Duration::from_secs(120));
        match output.code {
            Some(0) => {
                object.acknowledge(state.number);
                done += 1;
            }
            // Not there: an earlier delete of unknown outcome was done.
            Some(3) if delete => {
                object.acknowledge(state.number);
                done += 1;
            }
            _ => {
                unknown += 1;
                // Where nobody listens they fail in no time.
                std::thread::sleep(Duration::from_millis(50));
                if !weather.explains(began, |now| now.outage || now.rail || now.daemon) {
                    world.violation(format!(
                        "a put or delete of {} failed in fair weather: {}",
                        object.name,
                        output.err()
                    ));
                }
            }
        }
    }
    (done, unknown)
}

/// Who signs whom.
#[derive(Debug)]
pub struct Certificates {
    servers: Authority,
    clients: Authority,
    files: tempfile::TempDir,
    /// The server's addresses.
    names: Vec<String>,
}

impl Certificates {
    fn new(names: Vec<String>) -> Certificates {
        let files = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        Certificates { servers: Authority::new("servers"), clients: Authority::new("clients"), files, names }
    }
    /// Another for the server, in place of its last.
    pub fn server(&self) -> Held {
        let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        self.servers.server(self.files.path(), &names, &self.clients)
    }
    /// Another for the clients.
    pub fn client(&self) -> Held {
        self.clients.client(self.files.path(), "reader", When::Now, &self.servers)
    }
}

/// The store, which faults take down and bring back while others ask it for commands and addresses.
pub struct Shared<'a> {
    cluster: std::sync::Mutex<&'a mut Cluster>,
    certificates: &'a Certificates,
    /// Where files may be made.
    pub root: std::path::PathBuf,
}

impl Shared<'_> {
    /// Uses the store, alone.
    pub fn with<T>(&self, use_it: impl FnOnce(&mut Cluster) -> T) -> T {
        use_it(&mut self.cluster.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }
}

/// Runs it.
///
/// # Panics
/// The store or the mount cannot be started, or is not quiet at the end.
pub fn run_storm(size: Size) -> Report {
    let began = Instant::now();
    let network = crate::netns::cannot();
    let names = if network.is_none() {
        [1, 2].map(|rail| crate::netns::Network::address(rail).to_string()).to_vec()
    } else {
        vec!["127.0.0.1".to_owned()]
    };
    let certificates = Certificates::new(names);
    let more = certificates.server().security();
    let plan = Plan { directories: 4, rails: 2, network: network.is_none(), more, ..Plan::default() };
    let mut cluster = Cluster::new(&plan);
    cluster.of_clients = certificates.client().environment();
    cluster.serve();
    let world = World::new();
    let root = cluster.root.path().to_owned();
    for object in &world.objects {
        let state = object.begin(false);
        let file = root.join("to-put");
        crate::data::write_file(&file, state.seed, state.size.unwrap_or(0));
        cluster.put(&file, &object.name);
        object.acknowledge(state.number);
    }
    let mut mounts: Vec<Mount> = Vec::new();
    let mut places = Vec::new();
    for (form, snapshot) in FORMS {
        let options = format!("{form},{LIMITS}");
        mounts.push(cluster.mount("", &options));
        places.extend(mounts.last().map(|mount| Place {
            path: mount.path.clone(),
            options,
            snapshot,
            cached: form != "io=direct",
        }));
    }
    let mut report = Report::default();
    let weather = Weather::default();

    // Everything once, so that nothing is touched for the first time later.
    for (object, mount) in world.objects.iter().flat_map(|object| mounts.iter().map(move |mount| (object, mount))) {
        std::fs::read(mount.at(&object.name)).unwrap_or_else(|error| panic!("{}: {error}", object.name));
    }
    assert_quiet(&cluster, &mounts.iter().collect::<Vec<_>>());
    let mut first: Vec<_> = mounts.iter().map(|mount| level(mount.pid())).collect();
    first.push(level(cluster.server().pid()));

    let shared =
        Shared { cluster: std::sync::Mutex::new(&mut cluster), certificates: &certificates, root: root.clone() };
    let (seen, puts, faults) = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..size.readers)
            .map(|number| {
                let (world, weather) = (&world, &weather);
                let place = &places[(number % places.len() as u64) as usize];
                scope.spawn(move || {
                    readers::read(world, weather, place, size.seed.wrapping_mul(977).wrapping_add(number))
                })
            })
            .collect();
        let writers: Vec<_> = (0..WRITERS)
            .map(|part| {
                let (world, shared, weather) = (&world, &shared, &weather);
                scope.spawn(move || write(world, shared, weather, size.seed ^ 0x7700, part))
            })
            .collect();
        let mut faults = Faults::new(size.seed, network);
        let end = Instant::now() + size.length;
        while Instant::now() < end && world.violations() == 0 {
            faults.one(&world, &shared, &mut mounts, &places, &weather);
        }
        world.end();
        let mut seen: BTreeMap<&'static str, u64> = BTreeMap::new();
        for reader in readers {
            let counted: Count = reader.join().unwrap_or_else(|_| panic!("a reader"));
            for (name, count) in counted {
                *seen.entry(name).or_default() += count;
            }
        }
        let mut puts = (0, 0);
        for writer in writers {
            let (done, unknown) = writer.join().unwrap_or_else(|_| panic!("a writer"));
            puts = (puts.0 + done, puts.1 + unknown);
        }
        (seen, puts, faults)
    });
    drop(shared);
    (report.seen, report.puts) = (seen, puts);
    (report.faults, report.cannot) = (faults.done, faults.cannot);
    report.violations = world.take_violations();
    if report.violations.is_empty() {
        settle(&world, &mut cluster, &mounts, &mut report, &first);
    } else if let Ok(keep) = std::env::var("RAILFS_STORM_LOGS") {
        // For whoever wants to know why.
        let copied = std::process::Command::new("sh")
            .args(["-c", "mkdir -p \"$1\" && cp \"$0\"/*.err \"$0\"/*.log \"$1\"", &root.display().to_string(), &keep])
            .stdin(Stdio::null())
            .status();
        eprintln!("logs: {keep}, {copied:?}");
    }
    report.took = began.elapsed();
    mounts.into_iter().for_each(Mount::stop);
    report
}

/// After the storm: all is as it was, in memory, descriptors and threads, and nothing is left on the disks.
fn settle(world: &World, cluster: &mut Cluster, mounts: &[Mount], report: &mut Report, first: &[(usize, usize, u64)]) {
    for object in &world.objects {
        let state = object.begin(false);
        let file = cluster.root.path().join("to-put");
        crate::data::write_file(&file, state.seed, state.size.unwrap_or(0));
        cluster.put(&file, &object.name);
        object.acknowledge(state.number);
        for mount in mounts {
            wait::eventually("the newest is read", wait::SOON, || {
                let bytes = std::fs::read(mount.at(&object.name)).map_err(|error| error.to_string())?;
                if bytes == crate::data::bytes(state.seed, bytes.len()) {
                    Ok(())
                } else {
                    Err("other bytes".to_owned())
                }
            });
        }
    }
    assert_quiet(cluster, &mounts.iter().collect::<Vec<_>>());
    let pids = mounts.iter().map(Mount::pid).chain([cluster.server().pid()]);
    let names = ["mount, direct", "mount, cached", "mount, snapshot", "server"];
    for ((name, first), pid) in names.into_iter().zip(first).zip(pids) {
        let end = Instant::now() + Duration::from_secs(60);
        // Connections come and go by some; the server keeps components open, a bounded number. Its runtime keeps a thread for disks
        // 10 s after its last work, and looks at disks in turn, each with another of them, more than once a second: about twenty stay.
        let fits = |now: (usize, usize, u64)| {
            now.0 <= first.0 + 64 && now.1 <= first.1 + 24 && now.2 <= first.2 + first.2 / 2 + 64 * 1024
        };
        while !fits(level(pid)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(100));
        }
        let last = level(pid);
        report.levels.insert(name, [*first, last]);
        if !fits(last) {
            report.violations.push(format!("{name}: {first:?} when warm, {last:?} at the end"));
        }
    }
    cluster.stop();
    let checked = run(cluster.railfsd().arg("fsck").arg("--config").arg(cluster.config()), Duration::from_secs(120));
    if checked.code != Some(0) {
        report.violations.push(format!("fsck after the storm: {}{}", checked.out(), checked.err()));
    }
    cluster.serve();
    wait::until("the mounts are served again", wait::SOON, || {
        mounts.iter().all(|mount| std::fs::metadata(mount.at("still0")).is_ok())
    });
}
