//! `railfsd fsck`: what the log says, compared with what lies in the stripe directories.
//!
//! Guarantees: every component of every version that the log names is looked for and read to its last byte; every file among
//! the components is accounted for. Without repair nothing is changed (but for the lock of each directory). With it, nothing
//! that carries a valid header is removed: such a file is put where it belongs or moved to lost/; a damaged component stays
//! where it is, since its other pages can still be read, unless a whole copy takes its place.

mod repair;
mod verify;

use crate::catalog::{Catalog, CatalogError, LogCatalog, LogCatalogOptions, Previous, Standing, StartError, Unequal};
use crate::config::Config;
use crate::put::recover::{self, RecoverError};
use crate::serve::files::Key;
use crate::store::{self, Store, StoreError};
use railfs_proto::component::FileName;
use railfs_proto::descriptor::{Descriptor, Id};
use railfs_proto::name::ObjectName;
use repair::Place;
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Versions that are looked at together.
const BATCH: usize = 512;

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A segment or a checkpoint of the log is not whole in one of the log directories, or cannot be read.
    Log,
    /// The index is no file, or cannot be opened.
    Index,
    /// A stripe directory of the store is not there.
    Directory,
    /// A component lies under another's name.
    Misplaced,
    /// A component is not there.
    Missing,
    /// Bytes of a component, its table, its header or its size are not what was written.
    Damaged,
    /// A component that no record of the log names.
    Orphaned,
    /// What a put that never ended left: it has no valid header.
    Debris,
    /// Something that is not railfs's: left alone.
    Foreign,
}

impl Kind {
    /// As it is printed.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Log => "log",
            Kind::Index => "index",
            Kind::Directory => "directory",
            Kind::Misplaced => "misplaced",
            Kind::Missing => "missing",
            Kind::Damaged => "damaged",
            Kind::Orphaned => "orphaned",
            Kind::Debris => "debris",
            Kind::Foreign => "foreign",
        }
    }
}

/// One thing that is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// What.
    pub kind: Kind,
    /// Of which object, where it is one's.
    pub object: Option<ObjectName>,
    /// Of which version.
    pub version: Option<u64>,
    /// Which component of it.
    pub component: Option<u32>,
    /// The file or directory.
    pub path: String,
    /// What exactly.
    pub detail: String,
    /// What was done about it; `None`: it is as it was.
    pub repaired: Option<String>,
}

impl Problem {
    fn at(kind: Kind, path: &Path, detail: impl Into<String>) -> Problem {
        let path = path.display().to_string();
        Problem { kind, object: None, version: None, component: None, path, detail: detail.into(), repaired: None }
    }

    fn of_file(self, name: FileName) -> Problem {
        Problem { version: Some(name.version), component: Some(name.component), ..self }
    }

    /// Whether somebody has to see to it: what is foreign is only mentioned.
    pub fn remains(&self) -> bool {
        self.repaired.is_none() && self.kind != Kind::Foreign
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: ", self.kind.name())?;
        if let Some(object) = &self.object {
            write!(f, "{object} ")?;
        }
        match (self.version, self.component) {
            (Some(version), Some(component)) => write!(f, "version {version}, component {component}: ")?,
            (Some(version), None) => write!(f, "version {version}: ")?,
            _ => {}
        }
        write!(f, "{}: {}", self.path, self.detail)?;
        if let Some(repaired) = &self.repaired {
            write!(f, " (repaired: {repaired})")?;
        }
        Ok(())
    }
}

/// What was looked at, and what came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Versions that the log names: current ones, and superseded ones that are not reclaimed.
    pub versions: u64,
    /// Their components on this node.
    pub components: u64,
    /// Bytes that were read and found good.
    pub bytes: u64,
    /// Problems by kind: how many, and how many of them were repaired.
    pub problems: BTreeMap<Kind, (u64, u64)>,
    /// Problems that remain.
    pub remaining: u64,
}

/// Why a check came to no end.
#[derive(Debug, thiserror::Error)]
pub enum FsckError {
    /// The stripe directories.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The log.
    #[error("catalog: {0}")]
    Log(#[from] StartError),
    /// See the message.
    #[error("catalog: {0}")]
    Catalog(#[from] CatalogError),
    /// See the message.
    #[error("cannot {doing} {}: {source}", .path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// What came of it.
        source: std::io::Error,
    },
    /// See the message.
    #[error(transparent)]
    Recover(#[from] RecoverError),
    /// A thread could not be had, or ended unexpectedly.
    #[error("{0}")]
    Thread(String),
}

/// A component that the log names.
struct Wanted {
    object: ObjectName,
    descriptor: Arc<Descriptor>,
    superseded: bool,
    key: Key,
}

impl Wanted {
    fn file(&self) -> FileName {
        FileName { version: self.key.version, component: self.key.component }
    }

    fn problem(&self, kind: Kind, path: &Path, detail: String) -> Problem {
        let detail = if self.superseded { format!("{detail} (a superseded version)") } else { detail };
        let problem = Problem::at(kind, path, detail).of_file(self.file());
        Problem { object: Some(self.object.clone()), ..problem }
    }
}

/// Checks the store of a configuration, which no server may have open meanwhile. Each problem is told as it is found.
/// Blocks, for as long as all bytes take to be read.
///
/// # Errors
/// What cannot even be looked at; what was told and done until then stays so.
pub fn check(config: &Config, repair: bool, told: &mut (dyn FnMut(&Problem) + Send)) -> Result<Report, FsckError> {
    let locked = store::lock(&config.stripe_dirs)?;
    let restored = if repair { store::restore_markers(&locked)? } else { Vec::new() };
    let store = Arc::new(store::open_locked(locked)?);
    let thread = |error: std::io::Error| FsckError::Thread(format!("no runtime could be had: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread().build().map_err(thread)?;
    let began = Instant::now();
    // An index of its own, so that the server's is not touched where nothing is to be.
    let scratch = tempfile::tempdir();
    let scratch =
        scratch.map_err(|source| FsckError::Io { doing: "make a directory in", path: std::env::temp_dir(), source })?;
    let folder = if repair { config.state_dir.clone() } else { scratch.path().to_owned() };
    let options = LogCatalogOptions::new(&store, folder, &config.node);
    let mut log_problems = Vec::new();
    for (path, id) in restored {
        let problem = Problem::at(Kind::Directory, &path, format!("the marker of stripe directory {id} was removed"));
        log_problems.push(Problem { repaired: Some("the one before it was put back".to_owned()), ..problem });
    }
    let index = LogCatalog::index_trouble(&config.state_dir);
    let (catalog, previous) = if repair {
        let (catalog, recovered) = LogCatalog::open(options)?;
        for what in &recovered.mended {
            let problem = Problem::at(Kind::Log, Path::new(what), "it was not whole");
            log_problems.push(Problem { repaired: Some("mended from the other log".to_owned()), ..problem });
        }
        for what in &recovered.removed {
            let problem = Problem::at(Kind::Log, Path::new(what), "the checkpoint was damaged");
            let repaired = "removed: what it held was found elsewhere in the log, and another one is written";
            log_problems.push(Problem { repaired: Some(repaired.to_owned()), ..problem });
        }
        (catalog, recovered.previous)
    } else {
        let (catalog, unequal) = LogCatalog::inspect(&options)?;
        for Unequal { name, directory, why, mendable } in unequal {
            let does = if mendable { "mends" } else { "removes" };
            let detail = format!("{why}: the next start, or --repair, {does} it");
            log_problems.push(Problem::at(Kind::Log, &Path::new(&directory).join(name), detail));
        }
        (catalog, None)
    };
    if let Some((path, why)) = index {
        // The start of this run has opened the index, or has ended the check.
        let repaired = repair.then(|| "moved aside, and made again from the log".to_owned());
        log_problems.push(Problem { repaired, ..Problem::at(Kind::Index, &path, why) });
    }
    for log in store.unreadable_logs() {
        let detail = format!("{}: the log goes on without it, and nothing can be put; {}", log.why, store::UNREADABLE);
        log_problems.push(Problem::at(Kind::Log, Path::new(&log.path), detail));
    }
    let fsck = Fsck { store: &store, catalog: &catalog, node: &config.node, repair };
    let report = runtime.block_on(fsck.run(log_problems, told));
    if repair {
        // The record of this run must not hide from the next start that clients may still trust the slots of the one before.
        let wait = lease_of(previous).saturating_sub(began.elapsed());
        std::thread::sleep(wait);
        runtime.block_on(catalog.stop())?;
    }
    report
}

/// How long the slots of the run before may be trusted: what a server's start waits for, too.
fn lease_of(previous: Option<Previous>) -> Duration {
    previous.and_then(Previous::trusted_for).unwrap_or_default()
}

/// What a check works with.
struct Fsck<'a> {
    store: &'a Store,
    catalog: &'a LogCatalog,
    node: &'a str,
    repair: bool,
}

impl Fsck<'_> {
    async fn run(&self, log: Vec<Problem>, told: &mut (dyn FnMut(&Problem) + Send)) -> Result<Report, FsckError> {
        let mut report = Report::default();
        let mut tell = |report: &mut Report, problem: Problem| {
            let entry = report.problems.entry(problem.kind).or_default();
            entry.0 += 1;
            entry.1 += u64::from(problem.repaired.is_some());
            report.remaining += u64::from(problem.remains());
            told(&problem);
        };
        for problem in log {
            tell(&mut report, problem);
        }
        for missing in self.store.missing() {
            let detail = format!("stripe directory {} of the store is missing: {}", missing.id, missing.why);
            tell(&mut report, Problem::at(Kind::Directory, Path::new(&missing.place), detail));
        }
        // First, since what lies under a wrong name may be what is missing elsewhere.
        for problem in repair::misplaced(self.store, self.repair)? {
            tell(&mut report, problem);
        }
        let mut after = 0;
        loop {
            let batch = self.catalog.versions(after, BATCH)?;
            let Some(last) = batch.last() else { break };
            after = last.descriptor.version;
            report.versions += batch.len() as u64;
            let wanted = self.wanted(batch);
            report.components += wanted.len() as u64;
            for (bytes, problem) in self.look_at(wanted)? {
                report.bytes += bytes;
                if let Some(problem) = problem {
                    tell(&mut report, problem);
                }
            }
        }
        for problem in self.strays().await? {
            tell(&mut report, problem);
        }
        if self.repair {
            recover::recover(self.store, self.catalog, self.node).await?;
        }
        Ok(report)
    }

    /// The components of these versions that are to be on this node.
    fn wanted(&self, batch: Vec<Standing>) -> Vec<Wanted> {
        let mut wanted = Vec::new();
        for Standing { name, descriptor, superseded } in batch {
            let descriptor = Arc::new(descriptor);
            for (component, replicas) in (0u32..).zip(&descriptor.components) {
                for replica in replicas.iter().filter(|replica| replica.node == self.node) {
                    let key = Key { version: descriptor.version, component, directory: replica.directory };
                    let (object, descriptor) = (name.clone(), Arc::clone(&descriptor));
                    wanted.push(Wanted { object, descriptor, superseded: superseded.is_some(), key });
                }
            }
        }
        wanted
    }

    /// Verifies these, a thread for each directory: disks do not wait for each other.
    fn look_at(&self, wanted: Vec<Wanted>) -> Result<Vec<(u64, Option<Problem>)>, FsckError> {
        let mut by_directory: BTreeMap<Id, Vec<Wanted>> = BTreeMap::new();
        for component in wanted {
            by_directory.entry(component.key.directory).or_default().push(component);
        }
        let look = |all: Vec<Wanted>| all.iter().map(|wanted| self.one(wanted)).collect::<Result<Vec<_>, _>>();
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (directory, all) in by_directory {
                let thread = std::thread::Builder::new().name(format!("fsck {directory}"));
                let thread = thread.spawn_scoped(scope, move || look(all));
                threads.push(thread.map_err(|error| FsckError::Thread(format!("no thread could be had: {error}")))?);
            }
            let mut found = Vec::new();
            for thread in threads {
                let joined = thread.join();
                found.extend(joined.map_err(|_| FsckError::Thread("a thread ended unexpectedly".to_owned()))??);
            }
            Ok(found)
        })
    }

    /// The good bytes of a component, or what is wrong with it.
    fn one(&self, wanted: &Wanted) -> Result<(u64, Option<Problem>), FsckError> {
        let Some(directory) = self.store.directory(wanted.key.directory) else {
            let missing = self.store.missing().iter().find(|missing| missing.id == wanted.key.directory);
            let place = missing.map_or_else(String::new, |missing| missing.place.clone());
            let detail = format!("its directory {} is missing", wanted.key.directory);
            return Ok((0, Some(wanted.problem(Kind::Missing, Path::new(&place), detail))));
        };
        let path = directory.components().join(wanted.file().to_string());
        let (kind, detail, bytes) = match verify::component(&path, wanted.key, &wanted.descriptor) {
            Ok(bytes) => return Ok((bytes, None)),
            Err(verify::Bad::Missing) => (Kind::Missing, "the file is not there".to_owned(), 0),
            Err(verify::Bad::Damaged { detail, good }) => (Kind::Damaged, detail, good),
        };
        let mut problem = wanted.problem(kind, &path, detail);
        if self.repair {
            let place = Place { directory, path: &path };
            problem.repaired = repair::put_back(self.store, place, wanted.key, &wanted.descriptor)?;
        }
        Ok((bytes, Some(problem)))
    }

    /// Files among the components that no record names. What is done about them is done by what every start does.
    async fn strays(&self) -> Result<Vec<Problem>, FsckError> {
        let mut problems = Vec::new();
        for directory in self.store.directories() {
            let folder = directory.components();
            let entries = match std::fs::read_dir(&folder) {
                Ok(entries) => entries,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(source) => return Err(FsckError::Io { doing: "list", path: folder, source }),
            };
            for entry in entries {
                let entry = entry.map_err(|source| FsckError::Io { doing: "list", path: folder.clone(), source })?;
                let path = entry.path();
                let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
                let named = FileName::parse(entry.file_name().as_bytes());
                let Some(name) = named.as_ref().ok().copied().filter(|_| is_file) else {
                    let detail = match recover::no_file(&entry).filter(|_| named.is_ok()) {
                        Some(what) => format!("{what}, not a component file; {}", recover::advice(what)),
                        None => "not a component file; it is left alone".to_owned(),
                    };
                    problems.push(Problem::at(Kind::Foreign, &path, detail));
                    continue;
                };
                let standing = self.catalog.standing(name.version).await?;
                let named = standing.is_some_and(|standing| {
                    let replicas = standing.descriptor.components.get(name.component as usize);
                    let mut replicas = replicas.into_iter().flatten();
                    replicas.any(|replica| replica.directory == directory.id() && replica.node == self.node)
                });
                if named {
                    continue;
                }
                let repairs = self.repair && directory.read_only().is_none();
                let (kind, detail, repaired) = match recover::whole(&path) {
                    // Told, and moved where repairing, before.
                    Some(inside) if inside != name => continue,
                    Some(_) => (Kind::Orphaned, "no record of the log names it", "moved to lost/"),
                    None => (Kind::Debris, "no record of the log names it, and it has no valid header", "removed"),
                };
                let problem = Problem::at(kind, &path, detail).of_file(name);
                problems.push(Problem { repaired: repairs.then(|| repaired.to_owned()), ..problem });
            }
        }
        Ok(problems)
    }
}
