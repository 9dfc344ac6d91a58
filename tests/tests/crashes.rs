//! `kill -9` of client, server, mount, or all, at random instants of puts, overwrites and deletes; and of servers that start, stop, or
//! take back what they no longer need.

#![forbid(unsafe_code)]

use railfs_tests::cluster::{Cluster, Plan};
use railfs_tests::data::{Random, assert_file, compare, write_file};
use railfs_tests::mount::Mount;
use railfs_tests::process::Process;
use railfs_tests::quiet::{assert_quiet, components, debris};
use railfs_tests::wait::eventually;
use railfs_tests::{full, need_mount};
use rustix::process::Signal;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// A put whose server dies and comes back ends, well or not, within this.
const PUT_ENDS: Duration = Duration::from_secs(60);
const KEYS: u64 = 4;
/// Bytes of the file by which the time of a put is measured.
const TYPICAL: u64 = 4 << 20;
/// Starts that are killed before a server that was killed may serve again.
const STARTS: u32 = 16;
/// How long superseded versions are kept.
const RETENTION: &str = "200 ms";

/// What a key may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Absent,
    Present { version: u64, seed: u64, size: u64 },
}

/// What `stat` says: version and size; `None`: absent.
fn stat(cluster: &Cluster, key: &str) -> Option<(u64, u64)> {
    let output = cluster.cli(&["stat", "--json", &cluster.url(key)]);
    if output.code == Some(3) {
        return None;
    }
    let value: Value = serde_json::from_slice(&output.expect(0).stdout).unwrap();
    Some((value["version"].as_u64().unwrap(), value["size"].as_u64().unwrap()))
}

fn get(cluster: &Cluster, key: &str, seed: u64, size: u64) -> Result<(), String> {
    let output = cluster.cli(&["get", &cluster.url(key), "-"]).expect(0);
    compare(&mut &output.stdout[..], seed, size)
}

/// All versions that were ever seen, in records and as files.
#[derive(Debug, Default)]
struct Versions {
    content: BTreeMap<u64, u64>,
    highest: u64,
}

impl Versions {
    /// Of the files that lie there now, whatever becomes of them.
    fn see_files(&mut self, cluster: &Cluster) {
        let files = components(cluster).unwrap_or_default();
        self.highest = self.highest.max(files.keys().next_back().copied().unwrap_or(0));
    }
    /// A version that a put made: never one that was seen before it began.
    fn see(&mut self, version: u64, seed: u64, highest_before: u64) {
        assert!(version > highest_before, "version {version} is used again: {highest_before} was seen before");
        let other = self.content.insert(version, seed);
        assert_eq!(other, None, "version {version} is used again");
        self.highest = self.highest.max(version);
    }
}

struct Round<'a> {
    cluster: &'a mut Cluster,
    mount: Option<Mount>,
    random: Random,
    versions: Versions,
    keys: Vec<State>,
    typical: Duration,
    /// How long a start takes.
    start: Duration,
    /// Starts and stops that were killed.
    starts: u32,
    /// Deletes, new versions, old ones: what was met.
    met: [u32; 3],
}

impl Round<'_> {
    fn run(&mut self, number: u64) {
        let place = self.random.below(KEYS) as usize;
        let key = format!("k{place}");
        let delete = self.random.below(6) == 0 && self.keys[place] != State::Absent;
        let (seed, size) = (1000 + number, self.random.below(8 << 20));
        let file = self.cluster.root.path().join("source");
        self.versions.see_files(self.cluster);
        let highest = self.versions.highest;
        let mut command = self.cluster.railfs();
        if delete {
            command.args(["rm", &self.cluster.url(&key)]);
        } else {
            write_file(&file, seed, size);
            command.arg("put").arg(&file).arg(self.cluster.url(&key));
        }
        let mut put = Process::start(command.stdout(Stdio::null()).stderr(Stdio::null()));
        // The instant: anywhere in the life of such a command (a quarter of it is its start), or just after it.
        let typical = u64::try_from(self.typical.as_micros()).unwrap();
        let most = typical / 4 + typical * 3 / 4 * size / TYPICAL;
        let instant = Duration::from_micros(self.random.below(most.max(1)));
        put.ended_within(instant);
        let victims = self.random.below(5);
        let (client, server, daemon) = (victims != 0 && victims != 3, matches!(victims, 0 | 2 | 3 | 4), victims >= 3);
        if server {
            self.cluster.kill();
        }
        if client {
            put.kill();
        }
        if daemon && let Some(mut mount) = self.mount.take() {
            mount.kill();
        }
        self.versions.see_files(self.cluster);
        if server {
            for _ in 0..STARTS {
                self.kill_a_start();
            }
            self.cluster.serve();
        }
        let status = put.wait(PUT_ENDS);
        let what = format!(
            "round {number}: {} {key} (size {size}), killed after {instant:?}: {}{}{}, it ended with {status}",
            if delete { "rm" } else { "put" },
            if client { "client " } else { "" },
            if server { "server " } else { "" },
            if daemon { "mount" } else { "" },
        );
        eprintln!("{what}");
        self.judge(
            place,
            &key,
            if delete { State::Absent } else { State::Present { version: 0, seed, size } },
            status.success(),
            highest,
            &what,
        );
        if server {
            self.all_are_whole(&what);
        }
    }

    /// A server that is killed while it starts, or soon after that, when it takes back what was superseded, or while it stops.
    fn kill_a_start(&mut self) {
        let log = self.cluster.root.path().join("killed.err");
        let file = File::create(&log).unwrap();
        let mut command = self.cluster.railfsd();
        command.arg("serve").arg("--config").arg(self.cluster.config()).stdout(Stdio::null()).stderr(file);
        let mut server = Process::start(&mut command);
        let start = u64::try_from(self.start.as_micros()).unwrap().max(1);
        let (kind, later) = (self.random.below(4), self.random.below(400_000));
        let instant = self.random.below(start * 5 / 4) + if kind == 0 { later } else { 0 };
        let mut ended = server.ended_within(Duration::from_micros(instant));
        if kind == 1 && ended.is_none() {
            server.signal(Signal::TERM);
            let stop = Duration::from_micros(self.random.below(20_000));
            // One that was told to stop may have done so; one that had not yet heard of signals ends by this one.
            server.ended_within(stop);
            ended = None;
        }
        let said = || std::fs::read_to_string(&log).unwrap_or_default();
        assert!(ended.is_none(), "railfsd ended by itself ({ended:?}) after {instant} us: {}", said());
        server.kill();
        self.starts += 1;
        self.versions.see_files(self.cluster);
    }

    /// Old or new, whole; new when it was acknowledged.
    fn judge(&mut self, place: usize, key: &str, new: State, acknowledged: bool, highest: u64, what: &str) {
        let old = self.keys[place];
        let found = stat(self.cluster, key);
        let now = match (found, old, new) {
            (None, ..) => State::Absent,
            (Some((found, _)), State::Present { version, .. }, _) if found == version => old,
            (Some((version, _)), _, State::Present { seed, size, .. }) => {
                self.versions.see(version, seed, highest);
                State::Present { version, seed, size }
            }
            (Some(found), ..) => panic!("{what}: neither old ({old:?}) nor new ({new:?}): {found:?}"),
        };
        let is_new = match (now, new) {
            (State::Absent, State::Absent) => true,
            (State::Present { seed, .. }, State::Present { seed: wanted, .. }) => seed == wanted,
            _ => false,
        };
        assert!(is_new || now == old, "{what}: neither old ({old:?}) nor new ({new:?}): {now:?}");
        assert!(is_new || !acknowledged, "{what}: it was acknowledged, and is not there: {now:?}");
        self.met[if is_new { usize::from(new != State::Absent) } else { 2 }] += 1;
        self.keys[place] = now;
        if let State::Present { seed, size, .. } = now {
            get(self.cluster, key, seed, size).unwrap_or_else(|why| panic!("{what}: {why}"));
        }
    }

    /// After a restart every key is what it was, by the mount too, and nothing lies about.
    fn all_are_whole(&mut self, what: &str) {
        if self.mount.is_none() {
            self.mount = Some(self.cluster.mount("", "arena=32MiB,metadata_ttl=0s"));
        }
        let mount = self.mount.as_ref().unwrap();
        for (place, state) in self.keys.iter().enumerate() {
            let path = mount.at(&format!("k{place}"));
            match state {
                State::Absent => assert!(!path.exists(), "{what}: {} is there again", path.display()),
                State::Present { version, seed, size } => {
                    // The daemon finds its server again by itself.
                    eventually(&format!("{what}: {} reads", path.display()), PUT_ENDS, || {
                        let mut file = File::open(&path).map_err(|error| error.to_string())?;
                        compare(&mut file, *seed, *size)
                    });
                    assert_file(&path, *seed, *size);
                    use std::os::unix::fs::MetadataExt;
                    assert_eq!(path.metadata().unwrap().ino(), *version, "{what}");
                }
            }
        }
        // Superseded versions count until their second is over.
        eventually(&format!("{what}: no debris"), PUT_ENDS, || {
            let debris = debris(self.cluster)?;
            if debris.is_empty() { Ok(()) } else { Err(debris.join(", ")) }
        });
    }
}

#[test]
fn i8_old_or_new_after_kill_9_at_random_instants() {
    need_mount!("i8_old_or_new_after_kill_9_at_random_instants");
    let mut cluster = Cluster::start(&Plan { retention: RETENTION, ..Plan::default() });
    let rounds = if full() { 50 } else { 16 };
    let seed = std::env::var("RAILFS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        u64::from(now.subsec_nanos())
    });
    eprintln!("RAILFS_SEED={seed}");
    let mount = cluster.mount("", "arena=32MiB,metadata_ttl=0s");
    // How long a put takes here.
    let file = cluster.root.path().join("source");
    write_file(&file, 1, TYPICAL);
    cluster.put(&file, "k0");
    let started = Instant::now();
    cluster.put(&file, "k0");
    let typical = started.elapsed();
    cluster.stop();
    let started = Instant::now();
    cluster.serve();
    let start = started.elapsed();
    let (version, size) = stat(&cluster, "k0").unwrap();
    let mut keys = vec![State::Absent; KEYS as usize];
    keys[0] = State::Present { version, seed: 1, size };
    let mut versions = Versions::default();
    versions.see(version, 1, 0);
    let mut round = Round {
        cluster: &mut cluster,
        mount: Some(mount),
        random: Random::new(seed),
        versions,
        keys,
        typical,
        start,
        starts: 0,
        met: [0; 3],
    };
    for number in 0..rounds {
        round.run(number);
    }
    let [deleted, new, old] = round.met;
    let kills = rounds + u64::from(round.starts);
    railfs_tests::tally("i8", "kills", kills, "i8_old_or_new_after_kill_9_at_random_instants");
    eprintln!(
        "{rounds} rounds: {new} new, {deleted} deleted, {old} old; a put takes {typical:?}; {} starts and stops killed, a start \
         takes {start:?}",
        round.starts
    );
    round.all_are_whole("at the end");
    let mount = round.mount.take().unwrap();
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
    cluster.stop();
    cluster.serve();
    assert_quiet(&cluster, &[]);
}

#[test]
fn i8_a_client_that_dies_in_mid_put_leaves_nothing() {
    let cluster = Cluster::start(&Plan::default());
    let file = cluster.root.path().join("source");
    write_file(&file, 1, 256 << 20);
    let mut command = cluster.railfs();
    command.arg("put").arg(&file).arg(cluster.url("k")).stdout(Stdio::null()).stderr(Stdio::null());
    let mut put = Process::start(&mut command);
    eventually("bytes arrive", PUT_ENDS, || match components(&cluster) {
        Ok(files) if !files.is_empty() => Ok(()),
        other => Err(format!("{other:?}")),
    });
    put.kill();
    // Nobody commits it: 30 s without progress, and it is taken back, by a server that was never restarted.
    let committed = stat(&cluster, "k").is_some();
    assert_quiet(&cluster, &[]);
    assert_eq!(components(&cluster).unwrap().len(), usize::from(committed));
    assert!(!committed, "the put was over before it was killed");
}
