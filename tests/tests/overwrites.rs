//! Overwrites under readers: every byte of version k is k, so that a blend or an old version shows.

#![forbid(unsafe_code)]

use railfs_engine::client::{Client, Config, PutOptions, Source};
use railfs_proto::descriptor::Attributes;
use railfs_proto::name::ObjectName;
use railfs_tests::cluster::{Cluster, NAMESPACE, Plan};
use railfs_tests::data::Random;
use railfs_tests::quiet::assert_quiet;
use railfs_tests::{full, need_mount};
use rustix::io::Errno;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

const MIB: usize = 1 << 20;
/// Of the object; four pieces.
const SIZE: u64 = 4 << 20;

struct Same(u8);
impl Source for Same {
    fn size(&self) -> u64 {
        SIZE
    }
    fn read_exact_at(&self, _offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        buffer.fill(self.0);
        Ok(())
    }
}

/// What the writer has said so far.
#[derive(Default)]
struct Said {
    /// The newest k whose put has begun.
    begun: AtomicU64,
    /// The newest k whose put was acknowledged,
    acknowledged: AtomicU64,
    /// and its version.
    version: AtomicU64,
    done: AtomicBool,
    /// The server may be away for a while: no answer is an answer.
    outages: AtomicBool,
    /// How often that was so.
    unanswered: AtomicU64,
}

impl Said {
    fn put(&self, client: &Arc<Client>, k: u8) {
        self.try_put(client, k).unwrap_or_else(|error| panic!("put {k}: {error}"));
    }

    /// A put that fails may all the same have happened.
    fn try_put(&self, client: &Arc<Client>, k: u8) -> Result<(), railfs_engine::error::Error> {
        let options = PutOptions {
            attributes: Attributes { mode: 0o644, mtime_seconds: i64::from(k), mtime_nanoseconds: 0, owner: None },
            stripe_size: 1 << 20,
            page_size: 64 << 10,
            width: 2,
            if_version: None,
        };
        let name = ObjectName::new(NAMESPACE, &b"k"[..]).unwrap();
        self.begun.store(k.into(), SeqCst);
        let done = client.put(&name, Arc::new(Same(k)), options)?;
        assert!(!done.superseded && done.version > self.version.load(SeqCst));
        self.version.store(done.version, SeqCst);
        self.acknowledged.store(k.into(), SeqCst);
        Ok(())
    }
    fn may_be_unanswered(&self, error: &std::io::Error) -> bool {
        let unanswered = error.raw_os_error() == Some(Errno::TIMEDOUT.raw_os_error()) && self.outages.load(SeqCst);
        self.unanswered.fetch_add(unanswered.into(), SeqCst);
        unanswered
    }
    fn over(&self) -> bool {
        self.done.load(SeqCst)
    }
}

/// Ends the readers also when the writer fails.
struct Done<'a>(&'a Said);
impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.done.store(true, SeqCst);
    }
}

#[derive(Debug, Default)]
struct Seen {
    reads: u64,
    stale: u64,
    stale_opens: u64,
    versions: std::collections::BTreeSet<u8>,
}

/// The one byte that all are.
#[track_caller]
fn only(bytes: &[u8]) -> u8 {
    let first = bytes[0];
    if let Some(place) = bytes.iter().position(|byte| *byte != first) {
        panic!("a blend: {first} until byte {place}, then {}", bytes[place]);
    }
    first
}

fn is_stale(error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(Errno::STALE.raw_os_error())
}

/// A new open must get what had been acknowledged before it began; two replaces within one open may show as ESTALE.
fn open(path: &Path, said: &Said, seen: &mut Seen) -> Option<File> {
    while !said.over() {
        let (k, version) = (said.acknowledged.load(SeqCst), said.version.load(SeqCst));
        match File::open(path) {
            Ok(file) => {
                // The inode's number is the version, fixed at the open.
                let got = match file.metadata() {
                    Ok(meta) => meta.ino(),
                    Err(error) if is_stale(&error) || said.may_be_unanswered(&error) => continue,
                    Err(error) => panic!("fstat: {error}"),
                };
                assert!(
                    got >= version,
                    "open got version {got}, older than {version} (k = {k}), acknowledged before it"
                );
                return Some(file);
            }
            Err(error) if is_stale(&error) => seen.stale_opens += 1,
            Err(error) if said.may_be_unanswered(&error) => {}
            Err(error) => panic!("open: {error}"),
        }
    }
    None
}

/// Aligned reads of `length` bytes until the writer is done.
fn reader(path: &Path, said: &Said, seed: u64, length: usize, page_aligned: bool) -> Seen {
    let mut seen = Seen::default();
    let mut random = Random::new(seed);
    let mut memory = vec![0u8; length + 4096];
    let start = if page_aligned { memory.as_ptr().align_offset(4096) } else { 1 };
    let buffer = &mut memory[start..start + length];
    while let Some(file) = open(path, said, &mut seen) {
        let mut of_this_file = None;
        // Now and then a new open, also when nothing changed.
        for _ in 0..1 + random.below(60) {
            let pieces = (SIZE as usize - length) / MIB + 1;
            let offset = random.below(pieces as u64) * MIB as u64;
            let oldest = said.acknowledged.load(SeqCst);
            let got = file.read_at(buffer, offset);
            let newest = said.begun.load(SeqCst);
            seen.reads += 1;
            match got {
                Ok(got) => {
                    // One FUSE READ where it is aligned: whole. A longer read(2) may end where a later part failed.
                    let whole = if page_aligned { got >= MIB && got % MIB == 0 } else { got > 0 };
                    assert!(whole, "{got} bytes of {length} at {offset}");
                    let k = only(&buffer[..got]);
                    assert!(u64::from(k) >= oldest, "version {k} is older than {oldest}, acknowledged before the read");
                    assert!(u64::from(k) <= newest, "version {k} was never put ({newest})");
                    assert_eq!(*of_this_file.get_or_insert(k), k, "one descriptor is one version");
                    seen.versions.insert(k);
                }
                Err(error) if is_stale(&error) => {
                    seen.stale += 1;
                    break;
                }
                Err(error) if said.may_be_unanswered(&error) => {}
                Err(error) => panic!("pread: {error}"),
            }
            if said.over() {
                break;
            }
        }
    }
    seen
}

/// `stat` by name, every time the newest.
fn watcher(path: &Path, said: &Said) -> u64 {
    let mut asked = 0;
    while !said.over() {
        let version = said.version.load(SeqCst);
        match path.metadata() {
            Ok(meta) => assert!(meta.ino() >= version, "stat got {}, older than {version}", meta.ino()),
            Err(error) => assert!(is_stale(&error) || said.may_be_unanswered(&error), "stat: {error}"),
        }
        asked += 1;
    }
    asked
}

fn client(cluster: &Cluster) -> Arc<Client> {
    let addresses = vec![cluster.control[0].to_string()];
    Client::connect(Config { addresses, arena: 32 << 20, ..Config::default() }).unwrap()
}

#[test]
fn i3_readers_never_see_an_old_version_while_it_is_overwritten_200_times() {
    need_mount!("i3_readers_never_see_an_old_version_while_it_is_overwritten_200_times");
    let mut cluster = Cluster::start(&Plan::default());
    let writer = client(&cluster);
    let said = Said::default();
    said.put(&writer, 1);
    let mounts = [cluster.mount("", "metadata_ttl=0s,arena=32MiB"), cluster.mount("", "arena=32MiB")];
    let paths = [mounts[0].at("k"), mounts[1].at("k")];
    let seen: Vec<Seen> = std::thread::scope(|scope| {
        let done = Done(&said);
        let readers: Vec<_> = [0, 0, 1]
            .into_iter()
            .zip(10..)
            .map(|(mount, seed)| {
                let (path, said) = (&paths[mount], &said);
                scope.spawn(move || reader(path, said, seed, MIB, true))
            })
            .collect();
        let asked = scope.spawn(|| watcher(&paths[0], &said));
        for k in 2..=201 {
            said.put(&writer, k);
        }
        drop(done);
        eprintln!("stat {} times", asked.join().unwrap());
        readers.into_iter().map(|reader| reader.join().unwrap()).collect()
    });
    for seen in &seen {
        eprintln!(
            "{} reads, {} ESTALE ({} in open), {} versions",
            seen.reads,
            seen.stale,
            seen.stale_opens,
            seen.versions.len()
        );
        assert!(seen.versions.len() >= 20 && seen.stale >= 20, "readers and writer did not meet");
    }
    for path in &paths {
        let mut buffer = vec![0; MIB];
        assert_eq!(File::open(path).unwrap().read_at(&mut buffer, 0).unwrap(), MIB);
        assert_eq!(only(&buffer), 201);
    }
    writer.close();
    assert_quiet(&cluster, &[&mounts[0], &mounts[1]]);
    mounts.into_iter().for_each(|mount| mount.stop());
}

#[test]
fn i1_a_read_is_never_a_blend_of_versions() {
    need_mount!("i1_a_read_is_never_a_blend_of_versions");
    let mut cluster = Cluster::start(&Plan::default());
    let writer = client(&cluster);
    let said = Said::default();
    said.put(&writer, 1);
    let mount = cluster.mount("", "arena=32MiB");
    let path = mount.at("k");
    let seen: Vec<Seen> = std::thread::scope(|scope| {
        let done = Done(&said);
        let whole = scope.spawn(|| reader(&path, &said, 1, SIZE as usize, true));
        let odd = scope.spawn(|| reader(&path, &said, 2, 3 * MIB + 77, false));
        for k in 2..=if full() { 201 } else { 80 } {
            said.put(&writer, k);
        }
        drop(done);
        [whole, odd].into_iter().map(|reader| reader.join().unwrap()).collect()
    });
    for seen in &seen {
        eprintln!("{} reads, {} ESTALE, {} versions", seen.reads, seen.stale, seen.versions.len());
        assert!(seen.versions.len() >= 10, "readers and writer did not meet");
    }
    writer.close();
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

#[test]
fn i3_nor_when_the_server_is_killed_and_comes_back() {
    need_mount!("i3_nor_when_the_server_is_killed_and_comes_back");
    let mut cluster = Cluster::start(&Plan::default());
    let writer = client(&cluster);
    let said = Said::default();
    said.outages.store(true, SeqCst);
    said.put(&writer, 1);
    let mount = cluster.mount("", "metadata_ttl=0s,arena=32MiB,read_timeout=3s,metadata_timeout=3s");
    let path = mount.at("k");
    let (mut failed, outages) = (0, if full() { 12 } else { 4 });
    let seen: Vec<Seen> = std::thread::scope(|scope| {
        let done = Done(&said);
        let readers: Vec<_> = [20, 21]
            .into_iter()
            .map(|seed| {
                let (path, said) = (&path, &said);
                scope.spawn(move || reader(path, said, seed, MIB, true))
            })
            .collect();
        let asked = scope.spawn(|| watcher(&path, &said));
        let mut random = Random::new(3);
        let mut k = 1;
        for _ in 0..outages {
            for _ in 0..8 {
                k += 1;
                said.put(&writer, k);
            }
            // In the middle of a put, or thereabouts.
            k += 1;
            let put = scope.spawn({
                let (said, writer) = (&said, &writer);
                move || said.try_put(writer, k)
            });
            std::thread::sleep(std::time::Duration::from_micros(random.below(30_000)));
            cluster.kill();
            cluster.serve();
            if put.join().unwrap().is_err() {
                failed += 1;
            }
        }
        for _ in 0..8 {
            k += 1;
            said.put(&writer, k);
        }
        drop(done);
        eprintln!("stat {} times", asked.join().unwrap());
        readers.into_iter().map(|reader| reader.join().unwrap()).collect()
    });
    eprintln!("{outages} outages, {failed} puts failed, {} times no answer", said.unanswered.load(SeqCst));
    for seen in &seen {
        eprintln!(
            "{} reads, {} ESTALE ({} in open), {} versions",
            seen.reads,
            seen.stale,
            seen.stale_opens,
            seen.versions.len()
        );
        assert!(seen.versions.len() >= 5, "readers and writer did not meet");
    }
    writer.close();
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}
