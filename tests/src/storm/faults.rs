//! The faults, one after another at random, each with its end: after it all is well again, by itself.
//!
//! Guarantees: a fault is in the [`Weather`] before it is made, and leaves it once the mount has been seen to be well; what does not
//! become well again is a violation.

use super::history::{Object, World};
use super::weather::{Sky, Weather};
use super::{Place, Shared};
use crate::data::Random;
use crate::mount::Mount;
use crate::netns::Trouble;
use crate::process::Process;
use crate::quiet::components;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How soon all must be well after a fault: rails reconnect after 2 s at most, a successor publishes after its start.
const WELL: Duration = Duration::from_secs(30);

/// See the module.
#[derive(Debug)]
pub struct Faults {
    random: Random,
    number: u64,
    /// How often, by kind.
    pub done: BTreeMap<&'static str, u64>,
    /// What this machine cannot do, and why.
    pub cannot: BTreeMap<&'static str, String>,
}

const KINDS: [&str; 15] = [
    "server stopped and continued",
    "server killed and started",
    "server restarted",
    "rail taken away",
    "all rails taken away",
    "rail slow",
    "rail loses packets",
    "byte of a component flipped",
    "component cut short",
    "component removed",
    "mount's daemon killed",
    "umount while busy",
    "put killed",
    "garbage on the ports",
    "certificates replaced",
];

impl Faults {
    /// From a seed. `network`: why the machine cannot have one of its own.
    pub fn new(seed: u64, network: Option<String>) -> Faults {
        let mut cannot = BTreeMap::new();
        if let Some(why) = network {
            for kind in ["rail taken away", "all rails taken away", "rail slow", "rail loses packets"] {
                cannot.insert(kind, why.clone());
            }
        }
        Faults { random: Random::new(seed ^ 0xfa), number: 0, done: BTreeMap::new(), cannot }
    }

    fn pause(&mut self, most: u64) {
        // How long a fault lasts is part of it.
        std::thread::sleep(Duration::from_millis(50 + self.random.below(most)));
    }

    /// One, and its end. Each kind comes once in every round of all.
    pub fn one(
        &mut self,
        world: &World,
        store: &Shared<'_>,
        mounts: &mut [Mount],
        places: &[Place],
        weather: &Weather,
    ) {
        let round = self.number / KINDS.len() as u64;
        // A permutation that differs from round to round.
        let step = [1, 2, 4, 7, 8, 11][(round % 6) as usize];
        let kind = KINDS[((self.number * step + round) % KINDS.len() as u64) as usize];
        self.number += 1;
        if self.cannot.contains_key(kind) {
            return;
        }
        let chosen = self.random.below(mounts.len() as u64) as usize;
        self.make(kind, world, store, &mut mounts[chosen], &places[chosen].options, weather);
        if !self.cannot.contains_key(kind) {
            *self.done.entry(kind).or_default() += 1;
        }
        let began = Instant::now();
        let mut last = String::new();
        while let Err(why) = mounts.iter().try_for_each(|mount| well(world, mount)) {
            last = why;
            if began.elapsed() > WELL {
                world.violation(format!("after \"{kind}\" not all was well within {WELL:?}: {last}"));
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(last);
        weather.set(Sky::default());
        self.pause(600);
    }

    fn make(
        &mut self,
        kind: &'static str,
        world: &World,
        store: &Shared<'_>,
        mount: &mut Mount,
        options: &str,
        weather: &Weather,
    ) {
        let outage = || weather.set(Sky { outage: true, ..Sky::default() });
        let rail = 1 + self.random.below(2) as usize;
        match kind {
            "server stopped and continued" => {
                outage();
                store.with(|cluster| cluster.server().signal(Signal::STOP));
                self.kill_a_reader(world, mount);
                self.pause(4000);
                store.with(|cluster| cluster.server().signal(Signal::CONT));
            }
            "server killed and started" => {
                outage();
                store.with(crate::cluster::Cluster::kill);
                self.pause(2000);
                store.with(crate::cluster::Cluster::serve);
            }
            "server restarted" => {
                outage();
                store.with(|cluster| {
                    cluster.stop();
                    cluster.serve();
                });
            }
            "rail taken away" => {
                weather.set(Sky { rail: true, ..Sky::default() });
                store.with(|cluster| cluster.network().link(rail, false));
                self.pause(5000);
                store.with(|cluster| cluster.network().link(rail, true));
            }
            "all rails taken away" => {
                outage();
                store.with(|cluster| [1, 2].map(|rail| cluster.network().link(rail, false)));
                self.kill_a_reader(world, mount);
                self.pause(5000);
                store.with(|cluster| [1, 2].map(|rail| cluster.network().link(rail, true)));
            }
            "rail slow" | "rail loses packets" => {
                let trouble = if kind == "rail slow" { Trouble::Slow } else { Trouble::Lossy };
                weather.set(Sky { rail: true, ..Sky::default() });
                match store.with(|cluster| cluster.network().trouble(rail, trouble)) {
                    Ok(()) => {
                        self.pause(5000);
                        store.with(|cluster| cluster.network().no_trouble(rail, trouble));
                    }
                    Err(why) => drop(self.cannot.insert(kind, why)),
                }
            }
            "byte of a component flipped" | "component cut short" | "component removed" => {
                self.hurt(kind, world, store, mount, weather);
            }
            "mount's daemon killed" => {
                weather.set(Sky { daemon: true, ..Sky::default() });
                mount.kill();
                self.pause(300);
                let (path, log) = (mount.path.clone(), mount.log.with_extension(format!("{}.log", self.number)));
                // In the same place, with no manual step between.
                let again = store.with(|cluster| {
                    let url = cluster.url("");
                    Mount::start(|| cluster.railfs(), &url, path, log, options)
                });
                // The old value would take the new mount away when it is dropped.
                std::mem::forget(std::mem::replace(mount, again));
            }
            "umount while busy" => {
                let held = std::fs::File::open(mount.at("still0"));
                let held = held.unwrap_or_else(|error| panic!("still0: {error}"));
                let output = mount.umount();
                if output.code == Some(0) {
                    world.violation("umount of a busy mount went through".to_owned());
                }
                drop(held);
            }
            "put killed" => {
                let file = store.root.join("never");
                crate::data::write_file(&file, self.number, 32 << 20);
                let mut command = store.with(|cluster| cluster.railfs());
                let url = store.with(|cluster| cluster.url(format!("never{}", self.number)));
                command.args(["put", "--quiet"]).arg(&file).arg(&url).stdout(Stdio::null()).stderr(Stdio::null());
                let mut put = Process::start(&mut command);
                self.pause(300);
                put.kill();
                let mut remove = store.with(|cluster| cluster.railfs());
                // It may have been done.
                let removed = crate::process::run(remove.arg("rm").arg(&url), Duration::from_secs(60));
                if !matches!(removed.code, Some(0 | 3)) {
                    world.violation(format!("rm of a put that was killed: {}", removed.err()));
                }
            }
            "certificates replaced" => {
                // Nobody is told: both ends look at their files by themselves. They are not one file each: what does not fit
                // together as one end reads it, the other has put half of it in place, costs an attempt and no more.
                weather.set(Sky { rail: true, ..Sky::default() });
                store.certificates.server();
                store.certificates.client();
                if self.random.below(2) == 0 {
                    store.with(|cluster| cluster.server().signal(Signal::HUP));
                }
                self.pause(3000);
            }
            _ => self.garbage(store),
        }
    }

    /// A reader that waits for an answer can be killed within its deadline.
    fn kill_a_reader(&mut self, world: &World, mount: &Mount) {
        let name = format!("still{}", self.random.below(4));
        let mut command = Command::new("cat");
        command.arg(mount.at(&name)).stdout(Stdio::null()).stderr(Stdio::null());
        let mut reader = Process::start(&mut command);
        self.pause(300);
        let began = Instant::now();
        reader.signal(Signal::KILL);
        if reader.ended_within(super::HUNG).is_none() {
            world.violation(format!("hung: a reader of {name} could not be killed within {:?}", began.elapsed()));
        }
        *self.done.entry("reader killed in an outage").or_default() += 1;
    }

    /// Damages a component of an object; the object, and it alone, is put again once the damage was met.
    fn hurt(&mut self, kind: &str, world: &World, store: &Shared<'_>, mount: &Mount, weather: &Weather) {
        let hurt: Vec<&Object> = world.objects.iter().filter(|object| object.hurt).collect();
        let object = hurt[self.random.below(hurt.len() as u64) as usize];
        let version = store.with(|cluster| {
            let output = cluster.cli(&["stat", "--json", &cluster.url(&object.name)]);
            serde_json::from_slice::<serde_json::Value>(&output.stdout).ok()?["version"].as_u64()
        });
        let files = store.with(|cluster| components(cluster)).unwrap_or_else(|why| panic!("{why}"));
        let Some(files) = version.and_then(|version| files.get(&version).cloned()) else {
            return world.violation(format!("{}: version {version:?} has no components", object.name));
        };
        let path = &files[self.random.below(files.len() as u64) as usize];
        weather.set(Sky { damage: Some(object.name.clone()), ..Sky::default() });
        let mut change = || -> std::io::Result<()> {
            let file = std::fs::OpenOptions::new().read(true).write(true).open(path)?;
            let size = file.metadata()?.len();
            match kind {
                "byte of a component flipped" => {
                    let at = 4096 + self.random.below(size - 4096);
                    let mut byte = [0];
                    file.read_exact_at(&mut byte, at)?;
                    file.write_all_at(&[byte[0] ^ 0x20], at)
                }
                "component cut short" => file.set_len(self.random.below(size)),
                _ => std::fs::remove_file(path),
            }
        };
        change().unwrap_or_else(|error| panic!("{path}: {error}"));
        // Read by somebody, without the pages that the client has already.
        drop(mount.try_status());
        self.pause(2000);
        let state = object.begin(false);
        let file = store.root.join("heal");
        crate::data::write_file(&file, state.seed, state.size.unwrap_or(0));
        let mut command = store.with(|cluster| cluster.railfs());
        command.args(["put", "--quiet"]).arg(&file).arg(store.with(|cluster| cluster.url(&object.name)));
        let output = crate::process::run(&mut command, Duration::from_secs(60));
        if output.code == Some(0) {
            object.acknowledge(state.number);
        } else {
            world.violation(format!("{} could not be put again: {}", object.name, output.err()));
        }
    }

    /// Strangers on every port: noise, half a hello, nothing at all.
    fn garbage(&mut self, store: &Shared<'_>) {
        let (addresses, mut speak) = store.with(|cluster| {
            let all: Vec<_> = cluster.control.iter().chain(&cluster.rails).copied().collect();
            (all, cluster.nobody())
        });
        if let Some(speak) = speak.as_mut() {
            // From inside the store's own network.
            let script = addresses
                .iter()
                .map(|address| {
                    format!(
                        "for n in 1 2 3 4 5 6; do (exec 3<>/dev/tcp/{}/{}; head -c $((n * 997)) /dev/urandom >&3; sleep 0.$n) 2>/dev/null & done; ",
                        address.ip(),
                        address.port()
                    )
                })
                .collect::<String>();
            speak.args(["-c", &(script + "wait")]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            let _ = crate::process::run(speak, Duration::from_secs(60));
            return;
        }
        for address in addresses {
            for length in [0, 3, 900, 5000] {
                let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_secs(2)) else { continue };
                let noise: Vec<u8> = (0..length).map(|_| self.random.below(256) as u8).collect();
                let _ = stream.write_all(&noise);
                let _ = stream.set_read_timeout(Some(Duration::from_millis(20)));
                let _ = stream.read(&mut [0; 64]);
            }
        }
    }
}

/// Whether the mount reads, and every rail is up.
fn well(world: &World, mount: &Mount) -> Result<(), String> {
    let object = &world.objects[0];
    let mut byte = [0; 16];
    let file = std::fs::File::open(mount.at(&object.name)).map_err(|error| format!("open: {error}"))?;
    file.read_exact_at(&mut byte, 0).map_err(|error| format!("read: {error}"))?;
    let status = mount.try_status()?;
    let rails = status["rails"].as_array().cloned().unwrap_or_default();
    match rails.iter().find(|rail| rail["state"] != "up") {
        Some(rail) => Err(format!("rail {} is {}: {}", rail["name"], rail["state"], rail["reason"])),
        None => Ok(()),
    }
}
