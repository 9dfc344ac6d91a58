//! Stripe directories that are missing, read-only, deleted or failing: the objects that need them fail by name, all others
//! are served, nothing is written in their place, and it is said once and shown for as long as it lasts.

#![forbid(unsafe_code)]

use railfs_tests::cluster::{COMMAND, Cluster, NAMESPACE, Plan};
use railfs_tests::data::{assert_file, compare, write_file};
use railfs_tests::need_mount;
use railfs_tests::process::run;
use railfs_tests::quiet::assert_quiet;
use railfs_tests::wait::{SOON, eventually};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const SIZE: u64 = 600_000;

/// Puts so many objects, of one component, two, and as many as there are directories, in turn, and says in which
/// directories each lies.
fn put_many(cluster: &Cluster, first: u64, count: u64) -> BTreeMap<String, Vec<String>> {
    let source = cluster.root.path().join("source");
    let mut placed = BTreeMap::new();
    for seed in first..first + count {
        write_file(&source, seed, SIZE);
        let key = format!("k{seed}");
        let width = ["1", "2", "8"][(seed % 3) as usize].min(&cluster.directories.len().to_string()).to_owned();
        let layout = ["put", "--stripe-size", "64KiB", "--width", &width].map(std::ffi::OsStr::new);
        cluster.cli(&[&layout[..], &[source.as_os_str(), cluster.url(&key).as_ref()]].concat()).expect(0);
        placed.insert(key.clone(), directories_of(cluster, &key));
    }
    placed
}

/// The ids of the directories of an object's components.
fn directories_of(cluster: &Cluster, key: &str) -> Vec<String> {
    let output = cluster.cli(&["stat", "--json", &cluster.url(key)]).expect(0);
    let stat: Value = serde_json::from_slice(&output.stdout).unwrap();
    let components = stat["components"].as_array().unwrap();
    components.iter().map(|c| c["replicas"][0]["directory"].as_str().unwrap().to_owned()).collect()
}

/// What status says of one directory.
fn directory(cluster: &Cluster, id: &str) -> Value {
    let status = cluster.status();
    let all = status["directories"].as_array().unwrap();
    all.iter().find(|directory| directory["id"] == id).unwrap_or_else(|| panic!("no {id} in {status}")).clone()
}

fn id_of(cluster: &Cluster, path: &Path) -> String {
    let status = cluster.status();
    let all = status["directories"].as_array().unwrap();
    let found = all.iter().find(|directory| directory["path"] == path.to_str().unwrap());
    found.unwrap_or_else(|| panic!("no {} in {status}", path.display()))["id"].as_str().unwrap().to_owned()
}

fn seed(key: &str) -> u64 {
    key[1..].parse().unwrap()
}

/// Every object reads as it was put, or, if it needs the directory, fails with EIO.
fn reads(cluster: &Cluster, at: &Path, placed: &BTreeMap<String, Vec<String>>, gone: Option<&str>) -> (u32, u32) {
    let (mut good, mut bad) = (0, 0);
    for (key, directories) in placed {
        let path = at.join(key);
        if gone.is_some_and(|gone| directories.iter().any(|id| id == gone)) {
            let error = std::fs::read(&path).map(|_| ()).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()), "{key}: {error}");
            let words = [&format!("{NAMESPACE}/{key}"), gone.unwrap_or_default()];
            cluster.cli(&["get", &cluster.url(key), "-"]).refused(1, &words.map(|word| word));
            bad += 1;
        } else {
            assert_file(&path, seed(key), SIZE);
            let output = cluster.cli(&["get", &cluster.url(key), "-"]).expect(0);
            assert_eq!(compare(&mut &output.stdout[..], seed(key), SIZE), Ok(()));
            good += 1;
        }
    }
    (good, bad)
}

/// The log's lines with all these words.
fn lines(log: &Path, words: &[&str]) -> Vec<String> {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    text.lines().filter(|line| words.iter().all(|word| line.contains(word))).map(str::to_owned).collect()
}

#[test]
fn i11_a_missing_directory_at_start_is_loud_and_costs_its_objects_alone() {
    need_mount!("i11_a_missing_directory_at_start_is_loud_and_costs_its_objects_alone");
    let mut cluster = Cluster::start(&Plan { directories: 4, ..Plan::default() });
    let mut placed = put_many(&cluster, 0, 12);
    let lost = cluster.directories[3].clone();
    let id = id_of(&cluster, &lost);
    let away = cluster.root.path().join("away");
    cluster.stop();
    std::fs::rename(&lost, &away).unwrap();
    // Its disk is not there at all, and then its mount point is there, and empty.
    for empty in [false, true] {
        if empty {
            std::fs::create_dir(&lost).unwrap();
        }
        cluster.serve();
        let name = lost.to_str().unwrap();
        assert_eq!(lines(&cluster.log(), &["ERROR", "missing", &id, name]).len(), 1, "said once");
        let state = directory(&cluster, &id);
        assert_eq!((state["state"].as_str(), state["path"].as_str()), (Some("missing"), Some(name)), "{state}");
        assert!(!state["reason"].as_str().unwrap().is_empty() && state["total_bytes"] == 0, "{state}");
        assert_eq!(cluster.status()["server"]["publishing"], "ok");
        let mount = cluster.mount("", "");
        let degraded = mount.status()["mount"]["degraded"].to_string();
        assert!(degraded.contains(&id) && degraded.contains(name) && degraded.contains("missing"), "{degraded}");
        let (good, bad) = reads(&cluster, &mount.path, &placed, Some(&id));
        assert!(good >= 3 && bad >= 3, "{good} and {bad}");
        let logged = mount.logged();
        let line = logged.lines().find(|line| line.contains("is missing")).unwrap_or_default();
        assert!(line.contains(&id) && line.contains("component"), "{logged}");
        run(Command::new("df").arg(&mount.path), COMMAND).expect(0);
        // Puts go to the others.
        let more = put_many(&cluster, 100 + u64::from(empty) * 10, 5);
        assert!(more.values().flatten().all(|directory| *directory != id), "{more:?}");
        placed.extend(more);
        reads(&cluster, &mount.path, &placed, Some(&id));
        assert_eq!(lines(&cluster.log(), &["ERROR", &id]).len(), 1, "still said once");
        assert_eq!(lost.exists(), empty);
        assert_eq!(std::fs::read_dir(&lost).map_or(0, Iterator::count), 0, "nothing is written in its place");
        mount.stop();
        cluster.stop();
    }
    std::fs::remove_dir(&lost).unwrap();
    std::fs::rename(&away, &lost).unwrap();
    cluster.serve();
    let mount = cluster.mount("", "");
    assert_eq!(reads(&cluster, &mount.path, &placed, None).1, 0, "back, whole");
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

#[test]
fn a_missing_log_directory_makes_the_store_read_only_until_it_is_back() {
    need_mount!("a_missing_log_directory_makes_the_store_read_only_until_it_is_back");
    let mut cluster = Cluster::start(&Plan { directories: 3, ..Plan::default() });
    let mut placed = put_many(&cluster, 0, 6);
    let logs = [cluster.directories[0].clone(), cluster.directories[1].clone()];
    let away = cluster.root.path().join("away");
    let source = cluster.root.path().join("source");
    let mut incarnations = Vec::new();
    for (round, log) in logs.iter().enumerate() {
        let id = id_of(&cluster, log);
        // After a crash as well as after a clean stop.
        if round == 0 {
            cluster.kill()
        } else {
            cluster.stop()
        }
        std::fs::rename(log, &away).unwrap();
        for _ in 0..2 {
            cluster.serve();
            incarnations.push(cluster.status()["incarnation"].as_u64().unwrap());
            let words = ["read-only", log.to_str().unwrap(), &id, "missing"];
            cluster.cli(&["put".as_ref(), source.as_os_str(), cluster.url("new").as_ref()]).refused(1, &words);
            cluster.cli(&["rm", &cluster.url("k1")]).refused(1, &words);
            let publishing = cluster.status()["server"]["publishing"].as_str().unwrap().to_owned();
            assert!(publishing.starts_with("read-only: ") && publishing.contains(&id), "{publishing}");
            let mount = cluster.mount("", "");
            let (good, bad) = reads(&cluster, &mount.path, &placed, Some(&id));
            assert!(good + bad >= 6 && bad > 0);
            let degraded = mount.status()["mount"]["degraded"].to_string();
            assert!(degraded.contains("takes no puts"), "{degraded}");
            mount.stop();
            cluster.stop();
        }
        assert!(!log.exists());
        std::fs::rename(&away, log).unwrap();
        cluster.serve();
        placed.extend(put_many(&cluster, 10 + round as u64, 1));
    }
    incarnations.sort_unstable();
    incarnations.dedup();
    assert_eq!(incarnations.len(), 4, "no run has the number of another");
    let mount = cluster.mount("", "");
    assert_eq!(reads(&cluster, &mount.path, &placed, None).1, 0);
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
    // None of them there: nothing can be served.
    cluster.stop();
    let names: Vec<PathBuf> = logs.iter().map(|log| log.with_extension("away")).collect();
    for (log, away) in logs.iter().zip(&names) {
        std::fs::rename(log, away).unwrap();
    }
    let output = run(cluster.railfsd().arg("serve").arg("--config").arg(cluster.config()), SOON);
    output.refused(1, &["no log directory", logs[0].to_str().unwrap(), logs[1].to_str().unwrap()]);
    for (log, away) in logs.iter().zip(&names) {
        assert!(!log.exists());
        std::fs::rename(away, log).unwrap();
    }
    cluster.serve();
    assert_quiet(&cluster, &[]);
}

#[test]
fn s38_a_log_directory_that_is_deleted_while_serving_freezes_publishing_by_name() {
    need_mount!("s38_a_log_directory_that_is_deleted_while_serving_freezes_publishing_by_name");
    let mut cluster = Cluster::start(&Plan { directories: 3, ..Plan::default() });
    let placed = put_many(&cluster, 0, 6);
    let lost = cluster.directories[1].clone();
    let id = id_of(&cluster, &lost);
    let mount = cluster.mount("", "metadata_ttl=0s");
    let source = cluster.root.path().join("source");
    std::fs::remove_dir_all(&lost).unwrap();
    // At once, not only when somebody has looked: what was committed would be in one log alone.
    let words = [lost.to_str().unwrap()];
    let output = cluster.cli(&["put".as_ref(), source.as_os_str(), cluster.url("new").as_ref()]);
    assert!(matches!(output.code, Some(1 | 5)) && output.err().contains(words[0]), "{}", output.err());
    eventually("it is seen to be missing", SOON, || {
        let state = directory(&cluster, &id);
        if state["state"] == "missing" { Ok(()) } else { Err(state.to_string()) }
    });
    cluster
        .cli(&["put".as_ref(), source.as_os_str(), cluster.url("new").as_ref()])
        .refused(1, &["read-only", words[0]]);
    let (good, bad) = reads(&cluster, &mount.path, &placed, Some(&id));
    assert!(good > 0 && bad > 0, "{good} and {bad}");
    run(Command::new("df").arg(&mount.path), COMMAND).expect(0);
    assert!(!lost.exists(), "nothing is written in its place");
    assert_eq!(lines(&cluster.log(), &["ERROR", "stripe directory is missing", &id]).len(), 1, "said once");
    mount.stop();
}

/// A file system of its own, gone when this is dropped.
struct Disk(PathBuf);

impl Disk {
    fn mount(path: &Path) -> Result<Disk, String> {
        let flags = MountFlags::NODEV | MountFlags::NOSUID;
        rustix::mount::mount("tmpfs", path, "tmpfs", flags, Some(c"size=64m"))
            .map_err(|error| format!("a tmpfs of its own: {error}"))?;
        Ok(Disk(path.to_owned()))
    }
    fn remount(&self, read_only: bool) {
        let option = if read_only { "remount,ro" } else { "remount,rw" };
        run(Command::new("mount").args(["-o", option]).arg(&self.0), COMMAND).expect(0);
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, UnmountFlags::DETACH);
    }
}

#[test]
fn s38_a_disk_that_goes_read_only_or_away_while_serving_is_named_and_avoided() {
    const NAME: &str = "s38_a_disk_that_goes_read_only_or_away_while_serving_is_named_and_avoided";
    need_mount!(NAME);
    let mut cluster = Cluster::new(&Plan::default());
    let place = cluster.root.path().join("d2");
    std::fs::create_dir(&place).unwrap();
    let disk = match Disk::mount(&place) {
        Ok(disk) => disk,
        Err(reason) => return railfs_tests::skip(NAME, &reason),
    };
    cluster.directories.push(place.clone());
    cluster.set_rails(2); // Writes the configuration anew.
    run(cluster.railfsd().arg("init").args(&cluster.directories), COMMAND).expect(0);
    cluster.serve();
    let id = id_of(&cluster, &place);
    let name = place.to_str().unwrap();
    let mut placed = put_many(&cluster, 0, 9);
    let mount = cluster.mount("", "");

    // A put that meets it before anybody has looked goes to the others as well.
    disk.remount(true);
    let more = put_many(&cluster, 20, 3);
    assert!(more.values().flatten().all(|directory| *directory != id), "{more:?}");
    placed.extend(more);
    eventually("it is seen to be read-only", SOON, || {
        let state = directory(&cluster, &id);
        let seen =
            state["state"] == "read-only" && state["reason"].as_str().is_some_and(|why| why.contains("read-only"));
        if seen { Ok(()) } else { Err(state.to_string()) }
    });
    assert_eq!(lines(&cluster.log(), &["ERROR", "read-only", &id, name]).len(), 1, "said once");
    assert_eq!(reads(&cluster, &mount.path, &placed, None).1, 0, "it is read all the same");
    let degraded = mount.status()["mount"]["degraded"].to_string();
    assert!(degraded.contains(name) && degraded.contains("read-only"), "{degraded}");
    assert_eq!(cluster.status()["server"]["publishing"], "ok");

    // Started with it read-only: the same.
    cluster.stop();
    cluster.serve();
    assert_eq!(directory(&cluster, &id)["state"], "read-only");
    eventually("reads go on", SOON, || File::open(mount.at("k0")).map_err(|error| error.to_string()));
    assert_eq!(reads(&cluster, &mount.path, &placed, None).1, 0);
    assert!(put_many(&cluster, 30, 1).values().flatten().all(|directory| *directory != id));
    disk.remount(false);
    cluster.stop();
    cluster.serve();
    assert_eq!(directory(&cluster, &id)["state"], "ok", "well again, from a restart on");

    // Taken away under the server: its mount point is left, and stays empty.
    let seen = placed.iter().find(|(_, directories)| directories.contains(&id)).unwrap().0.clone();
    rustix::mount::unmount(&place, UnmountFlags::DETACH).unwrap();
    let more = put_many(&cluster, 40, 3);
    assert!(more.values().flatten().all(|directory| *directory != id), "{more:?}");
    eventually("it is seen to be missing", SOON, || {
        let state = directory(&cluster, &id);
        if state["state"] == "missing" { Ok(()) } else { Err(state.to_string()) }
    });
    let output = cluster.cli(&["get", &cluster.url(&seen), "-"]);
    output.refused(1, &[&id, name, "missing"]);
    run(Command::new("df").arg(&mount.path), COMMAND).expect(0);
    cluster.stop();
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), 0, "nothing is written in its place");
    mount.stop();
}

#[test]
fn s38_a_log_directory_that_cannot_be_written_makes_the_store_read_only() {
    const NAME: &str = "s38_a_log_directory_that_cannot_be_written_makes_the_store_read_only";
    need_mount!(NAME);
    let mut cluster = Cluster::new(&Plan { directories: 1, ..Plan::default() });
    let place = cluster.root.path().join("d1");
    std::fs::create_dir(&place).unwrap();
    let disk = match Disk::mount(&place) {
        Ok(disk) => disk,
        Err(reason) => return railfs_tests::skip(NAME, &reason),
    };
    cluster.directories.push(place.clone());
    cluster.set_rails(2); // Writes the configuration anew.
    run(cluster.railfsd().arg("init").args(&cluster.directories), COMMAND).expect(0);
    cluster.serve();
    let mut placed = put_many(&cluster, 0, 3);
    let id = id_of(&cluster, &place);
    let source = cluster.root.path().join("source");
    for clean in [true, false] {
        if clean {
            cluster.stop()
        } else {
            cluster.kill()
        }
        disk.remount(true);
        cluster.serve();
        assert_eq!(directory(&cluster, &id)["state"], "read-only");
        let words = ["read-only", place.to_str().unwrap(), &id];
        cluster.cli(&["put".as_ref(), source.as_os_str(), cluster.url("new").as_ref()]).refused(1, &words);
        cluster.cli(&["rm", &cluster.url("k1")]).refused(1, &words);
        let mount = cluster.mount("", "");
        assert_eq!(reads(&cluster, &mount.path, &placed, None).1, 0, "everything reads");
        mount.stop();
        cluster.stop();
        disk.remount(false);
        cluster.serve();
        placed.extend(put_many(&cluster, if clean { 10 } else { 20 }, 1));
    }
    assert_quiet(&cluster, &[]);
    cluster.stop();
}

#[test]
fn s38_a_file_that_cannot_be_read_makes_its_directory_suspect() {
    need_mount!("s38_a_file_that_cannot_be_read_makes_its_directory_suspect");
    let mut cluster = Cluster::start(&Plan { directories: 3, ..Plan::default() });
    let placed = put_many(&cluster, 0, 4);
    let id = &placed["k1"][1];
    let path = PathBuf::from(directory(&cluster, id)["path"].as_str().unwrap());
    let output = cluster.cli(&["stat", "--json", &cluster.url("k1")]).expect(0);
    let stat: Value = serde_json::from_slice(&output.stdout).unwrap();
    let file = path.join("components").join(format!("{}.1", stat["version"]));
    let aside = cluster.root.path().join("aside");
    std::fs::rename(&file, &aside).unwrap();
    // A plain read of it is EIO.
    std::os::unix::fs::symlink("/proc/self/mem", &file).unwrap();
    let mount = cluster.mount("", "");
    let of_component_1 = File::open(mount.at("k1")).unwrap();
    let error = of_component_1.read_at(&mut [0; 1000], 64 << 10).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));
    assert_eq!(of_component_1.read_at(&mut [0; 1000], 0).unwrap(), 1000, "the other component is well");
    drop(of_component_1);
    for key in ["k0", "k2", "k3"] {
        assert_file(&mount.at(key), seed(key), SIZE);
    }
    let state = directory(&cluster, id);
    assert_eq!(state["state"], "suspect");
    assert!(state["reason"].as_str().unwrap().contains("Input/output error"), "{state}");
    let others = put_many(&cluster, 10, 3);
    assert!(others.values().flatten().all(|directory| directory != id), "{others:?}");
    std::fs::rename(&aside, &file).unwrap();
    cluster.stop();
    cluster.serve();
    eventually("it reads again", SOON, || {
        let mut file = File::open(mount.at("k1")).map_err(|error| error.to_string())?;
        compare(&mut file, 1, SIZE)
    });
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}
