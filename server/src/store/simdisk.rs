//! A disk for tests that can fail or freeze at any write or sync, and be cut off at any moment: what was not synced
//! then survives sector by sector, as chance has it. Changes of names survive up to some point, in order.

use super::{LogDirectory, LogFile};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

const SECTOR: usize = 512;

/// What goes wrong, and at which operation (counted from 1; reads and lists do not count).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Never,
    /// This operation fails, half done perhaps, and nothing works after it.
    FreezeAt(u64),
    /// This operation fails, half done perhaps; what comes after it works.
    FailAt(u64),
    /// From this operation on nothing can be allocated.
    FullFrom(u64),
}

/// What survives of what was not synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Survives {
    /// As after `kill -9`: the system goes on.
    All,
    Nothing,
    /// As after a power cut.
    Some(u64),
}

#[derive(Debug)]
struct Machine {
    operations: u64,
    fault: Fault,
    /// Nothing can be allocated, beside what the fault does.
    full: bool,
    frozen: bool,
    random: u64,
}

#[derive(Clone, Debug)]
struct File {
    durable: Vec<u8>,
    now: Vec<u8>,
    unsynced: Vec<(usize, Vec<u8>)>,
}

#[derive(Clone, Debug)]
enum NameChange {
    Set(String, u64),
    Rename(String, String),
    Remove(String),
}

#[derive(Debug)]
struct Disk {
    label: String,
    files: HashMap<u64, File>,
    next_file: u64,
    now: BTreeMap<String, u64>,
    durable: BTreeMap<String, u64>,
    pending: Vec<NameChange>,
}

/// Some directories on one machine: they fail together and are cut off together.
#[derive(Clone, Debug)]
pub(crate) struct SimDisks {
    machine: Arc<Mutex<Machine>>,
    disks: Vec<Arc<Mutex<Disk>>>,
}

#[derive(Debug)]
struct SimDirectory {
    machine: Arc<Mutex<Machine>>,
    disk: Arc<Mutex<Disk>>,
}

#[derive(Debug)]
struct SimFile {
    machine: Arc<Mutex<Machine>>,
    disk: Arc<Mutex<Disk>>,
    file: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap()
}

fn next_random(state: &mut u64) -> u64 {
    // splitmix64
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Machine {
    /// Whether the next operation works; if not, how much of it is done all the same (0 to 2: none, some, all).
    fn step(&mut self) -> Result<(), u64> {
        if self.frozen {
            return Err(0);
        }
        self.operations += 1;
        let fails = match self.fault {
            Fault::FreezeAt(at) | Fault::FailAt(at) => self.operations == at,
            _ => false,
        };
        if !fails {
            return Ok(());
        }
        self.frozen = matches!(self.fault, Fault::FreezeAt(_));
        Err(next_random(&mut self.random) % 3)
    }
}

fn broken() -> io::Error {
    io::Error::other("the simulated disk failed")
}

impl Disk {
    fn change(names: &mut BTreeMap<String, u64>, change: &NameChange) {
        match change {
            NameChange::Set(name, file) => {
                names.insert(name.clone(), *file);
            }
            NameChange::Rename(from, to) => {
                if let Some(file) = names.remove(from) {
                    names.insert(to.clone(), file);
                }
            }
            NameChange::Remove(name) => {
                names.remove(name);
            }
        }
    }

    fn apply(&mut self, change: NameChange) {
        Self::change(&mut self.now, &change);
        self.pending.push(change);
    }

    fn sync_names(&mut self, count: usize) {
        for change in self.pending.drain(..count) {
            Self::change(&mut self.durable, &change);
        }
    }
}

impl SimDisks {
    pub(crate) fn new(count: usize, fault: Fault) -> SimDisks {
        let machine = Machine { operations: 0, fault, full: false, frozen: false, random: 7 };
        let disk = |at| Disk {
            label: format!("disk{at}"),
            files: HashMap::new(),
            next_file: 1,
            now: BTreeMap::new(),
            durable: BTreeMap::new(),
            pending: Vec::new(),
        };
        SimDisks {
            machine: Arc::new(Mutex::new(machine)),
            disks: (0..count).map(|at| Arc::new(Mutex::new(disk(at)))).collect(),
        }
    }

    pub(crate) fn directories(&self) -> Vec<Arc<dyn LogDirectory>> {
        self.disks
            .iter()
            .map(|disk| {
                let directory = SimDirectory { machine: Arc::clone(&self.machine), disk: Arc::clone(disk) };
                Arc::new(directory) as Arc<dyn LogDirectory>
            })
            .collect()
    }

    /// Writes, syncs and changes of names so far.
    pub(crate) fn operations(&self) -> u64 {
        lock(&self.machine).operations
    }

    pub(crate) fn set_fault(&self, fault: Fault) {
        lock(&self.machine).fault = fault;
    }

    /// From now on nothing can be allocated.
    pub(crate) fn fill(&self) {
        lock(&self.machine).full = true;
    }

    /// There is room again.
    pub(crate) fn make_room(&self) {
        lock(&self.machine).full = false;
    }

    /// The disks as they are found after everything stopped at this moment.
    pub(crate) fn crash(&self, survives: Survives, fault: Fault) -> SimDisks {
        let after = SimDisks::new(self.disks.len(), fault);
        let mut random = match survives {
            Survives::Some(seed) => seed,
            _ => 0,
        };
        for (from, to) in self.disks.iter().zip(&after.disks) {
            let (from, mut to) = (lock(from), lock(to));
            if survives == Survives::All {
                to.files = from.files.clone();
                (to.now, to.durable) = (from.now.clone(), from.durable.clone());
                (to.pending, to.next_file) = (from.pending.clone(), from.next_file);
                continue;
            }
            let count = match survives {
                Survives::All | Survives::Nothing => 0,
                Survives::Some(_) => next_random(&mut random) as usize % (from.pending.len() + 1),
            };
            // On a copy: the disk that was cut off can be cut off in other ways too.
            let mut names = from.durable.clone();
            from.pending[..count].iter().for_each(|change| Disk::change(&mut names, change));
            for (number, file) in &from.files {
                let mut bytes = file.durable.clone();
                for (offset, written) in &file.unsynced {
                    for (at, sector) in sectors(*offset, written) {
                        let kept = match survives {
                            Survives::All | Survives::Nothing => false,
                            Survives::Some(_) => next_random(&mut random).is_multiple_of(2),
                        };
                        if kept {
                            bytes[at..at + sector.len()].copy_from_slice(sector);
                        }
                    }
                }
                to.files.insert(*number, File { durable: bytes.clone(), now: bytes, unsynced: Vec::new() });
            }
            to.next_file = from.next_file;
            to.now = names.clone();
            to.durable = names;
        }
        after
    }

    /// Changes bytes of a file behind everyone's back.
    pub(crate) fn damage(&self, disk: usize, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut disk = lock(&self.disks[disk]);
        let number = disk.now[name];
        let file = disk.files.get_mut(&number).unwrap();
        change(&mut file.now);
        file.durable = file.now.clone();
    }

    /// Loses a file, or (with an empty name) all of them.
    pub(crate) fn lose(&self, disk: usize, name: &str) {
        let mut disk = lock(&self.disks[disk]);
        disk.now.retain(|other, _| !name.is_empty() && other != name);
        disk.durable = disk.now.clone();
    }
}

/// The sectors of a write, as the disk would keep or lose them.
fn sectors(offset: usize, written: &[u8]) -> Vec<(usize, &[u8])> {
    let mut parts = Vec::new();
    let mut at = 0;
    while at < written.len() {
        let end = ((offset + at) / SECTOR * SECTOR + SECTOR - offset).min(written.len());
        parts.push((offset + at, &written[at..end]));
        at = end;
    }
    parts
}

impl LogDirectory for SimDirectory {
    fn describe(&self) -> String {
        lock(&self.disk).label.clone()
    }

    fn list(&self) -> io::Result<Vec<String>> {
        Ok(lock(&self.disk).now.keys().cloned().collect())
    }

    fn read(&self, name: &str, limit: u64) -> io::Result<Vec<u8>> {
        self.read_at(name, 0, usize::try_from(limit).unwrap_or(usize::MAX))
    }

    fn read_at(&self, name: &str, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let disk = lock(&self.disk);
        let file = disk.now.get(name).and_then(|file| disk.files.get(file)).ok_or(io::ErrorKind::NotFound)?;
        let rest = file.now.get(usize::try_from(offset).unwrap()..).unwrap_or_default();
        Ok(rest[..length.min(rest.len())].to_vec())
    }

    fn create(&self, name: &str, size: u64) -> io::Result<Box<dyn LogFile>> {
        let mut machine = lock(&self.machine);
        let full = matches!(machine.fault, Fault::FullFrom(at) if machine.operations + 1 >= at);
        if full || machine.full {
            // A real disk makes the file before it finds that it has no room for its bytes.
            let mut disk = lock(&self.disk);
            let number = disk.next_file;
            disk.next_file += 1;
            disk.files.insert(number, File { durable: Vec::new(), now: Vec::new(), unsynced: Vec::new() });
            disk.apply(NameChange::Set(name.to_owned(), number));
            return Err(io::ErrorKind::StorageFull.into());
        }
        machine.step().map_err(|_| broken())?;
        let mut disk = lock(&self.disk);
        let number = disk.next_file;
        disk.next_file += 1;
        let zeros = vec![0; usize::try_from(size).unwrap()];
        disk.files.insert(number, File { durable: zeros.clone(), now: zeros, unsynced: Vec::new() });
        disk.apply(NameChange::Set(name.to_owned(), number));
        Ok(Box::new(SimFile { machine: Arc::clone(&self.machine), disk: Arc::clone(&self.disk), file: number }))
    }

    fn allocated(&self, name: &str) -> io::Result<u64> {
        match self.read(name, u64::MAX) {
            Ok(bytes) => Ok(u64::try_from(bytes.len()).unwrap()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error),
        }
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn LogFile>> {
        let file = lock(&self.disk).now.get(name).copied().ok_or(io::ErrorKind::NotFound)?;
        Ok(Box::new(SimFile { machine: Arc::clone(&self.machine), disk: Arc::clone(&self.disk), file }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let outcome = lock(&self.machine).step();
        if outcome != Err(0) {
            lock(&self.disk).apply(NameChange::Rename(from.to_owned(), to.to_owned()));
        }
        outcome.map_err(|_| broken())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        lock(&self.machine).step().map_err(|_| broken())?;
        lock(&self.disk).apply(NameChange::Remove(name.to_owned()));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let outcome = lock(&self.machine).step();
        if outcome.is_ok() {
            let mut disk = lock(&self.disk);
            let count = disk.pending.len();
            disk.sync_names(count);
        }
        outcome.map_err(|_| broken())
    }
}

impl LogFile for SimFile {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let outcome = lock(&self.machine).step();
        let done = match outcome {
            Ok(()) | Err(2) => bytes,
            Err(1) => &bytes[..bytes.len() / 2],
            Err(_) => &[],
        };
        let offset = usize::try_from(offset).unwrap();
        let mut disk = lock(&self.disk);
        let file = disk.files.get_mut(&self.file).unwrap();
        file.now[offset..offset + done.len()].copy_from_slice(done);
        file.unsynced.push((offset, done.to_vec()));
        outcome.map_err(|_| broken())
    }

    fn sync(&self) -> io::Result<()> {
        let outcome = lock(&self.machine).step();
        let mut disk = lock(&self.disk);
        let file = disk.files.get_mut(&self.file).unwrap();
        // After a failure what was written stays readable, but is neither on the disk nor written again.
        for (offset, written) in file.unsynced.drain(..) {
            if outcome.is_ok() {
                file.durable[offset..offset + written.len()].copy_from_slice(&written);
            }
        }
        outcome.map_err(|_| broken())
    }
}
