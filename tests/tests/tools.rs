//! The tools and what a mount shows: attributes, trees, standard input, lists, watching, and what the server tells of itself.

#![forbid(unsafe_code)]

use railfs_tests::cluster::{COMMAND, Cluster, Plan};
use railfs_tests::data::{assert_file, bytes, write_file};
use railfs_tests::mount::Mount;
use railfs_tests::need_mount;
use railfs_tests::process::{Process, program, run};
use railfs_tests::quiet::assert_quiet;
use railfs_tests::wait::{SOON, eventually};
use rustix::fs::{Gid, Timespec, Timestamps, Uid};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

fn objects(output: &str) -> Vec<Value> {
    output.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

/// Every file below, by its path from there.
fn files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    let mut left = vec![directory.to_owned()];
    while let Some(next) = left.pop() {
        for entry in std::fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                left.push(path);
            } else {
                let name = path.strip_prefix(directory).unwrap().display().to_string();
                all.insert(name, std::fs::read(&path).unwrap());
            }
        }
    }
    all
}

fn shell(cluster: &Cluster, script: &str) -> railfs_tests::process::Output {
    let railfs = program("railfs");
    let mut command = Command::new("sh");
    command.args(["-c", script]).env("RAILFS", railfs).env("URL", cluster.url(""));
    run(&mut command, COMMAND)
}

// -- attributes --

#[test]
fn owners_modes_and_times_that_a_put_kept() {
    need_mount!("owners_modes_and_times_that_a_put_kept");
    let mut cluster = Cluster::start(&Plan::default());
    let file = cluster.root.path().join("f");
    write_file(&file, 1, 100_000);
    let root = rustix::process::geteuid().is_root();
    let (uid, gid) = if root {
        rustix::fs::chown(&file, Some(Uid::from_raw(1234)), Some(Gid::from_raw(55))).unwrap();
        (1234, 55)
    } else {
        (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw())
    };
    std::fs::set_permissions(&file, Permissions::from_mode(0o750)).unwrap();
    let time = Timespec { tv_sec: 1_000_000_007, tv_nsec: 123_456_789 };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::futimens(File::open(&file).unwrap(), &times).unwrap();
    cluster.cli(&["put".as_ref(), "-a".as_ref(), file.as_os_str(), cluster.url("kept").as_ref()]).expect(0);
    cluster.put(&file, "plain");

    let stat = cluster.cli(&["stat", "--json", &cluster.url("kept")]).expect(0).out();
    let stat: Value = serde_json::from_str(&stat).unwrap();
    assert_eq!((&stat["uid"], &stat["gid"], &stat["mode"]), (&uid.into(), &gid.into(), &"0750".into()));
    assert_eq!((&stat["mtime_seconds"], &stat["mtime_nanoseconds"]), (&1_000_000_007.into(), &123_456_789.into()));
    let plain = cluster.cli(&["stat", "--json", &cluster.url("plain")]).expect(0).out();
    assert_eq!(serde_json::from_str::<Value>(&plain).unwrap().get("uid"), None);

    let shown = |mount: &Mount, name: &str| {
        let metadata = std::fs::metadata(mount.at(name)).unwrap();
        (metadata.uid(), metadata.gid(), metadata.mode() & 0o7777)
    };
    let user = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let mount = cluster.mount("", "");
    assert_eq!((shown(&mount, "kept"), shown(&mount, "plain")), ((uid, gid, 0o750), (user.0, user.1, 0o750)));
    let metadata = std::fs::metadata(mount.at("kept")).unwrap();
    assert_eq!((metadata.mtime(), metadata.mtime_nsec()), (1_000_000_007, 123_456_789));
    assert!(std::fs::metadata(mount.at("plain")).unwrap().mtime() > 1_700_000_000, "the time of the put");
    let told = cluster.mount("", "uid=77,gid=78,umask=027");
    assert_eq!((shown(&told, "kept"), shown(&told, "plain"), shown(&told, "")), {
        ((77, 78, 0o750), (77, 78, 0o750), (77, 78, 0o550))
    });
    cluster.cli(&["mount", "-o", "umask=9", &cluster.url(""), "/nowhere"]).refused(2, &["umask", "octal"]);

    let back = cluster.root.path().join("back");
    cluster.cli(&["get".as_ref(), "-a".as_ref(), cluster.url("kept").as_ref(), back.as_os_str()]).expect(0);
    let metadata = std::fs::metadata(&back).unwrap();
    assert_eq!((metadata.uid(), metadata.gid(), metadata.mode() & 0o7777), (uid, gid, 0o750));
    assert_eq!((metadata.mtime(), metadata.mtime_nsec()), (1_000_000_007, 123_456_789));
    assert_file(&back, 1, 100_000);
    assert_quiet(&cluster, &[&mount, &told]);
    // What was kept is in the log: a server that starts again still knows it.
    told.stop();
    mount.stop();
    cluster.stop();
    cluster.serve();
    let again = cluster.cli(&["stat", "--json", &cluster.url("kept")]).expect(0).out();
    assert_eq!(serde_json::from_str::<Value>(&again).unwrap(), stat);
}

#[test]
fn default_permissions_are_the_kernels_to_keep() {
    need_mount!("default_permissions_are_the_kernels_to_keep");
    if !rustix::process::geteuid().is_root() {
        return railfs_tests::skip("default_permissions_are_the_kernels_to_keep", "only root can become somebody else");
    }
    let mut cluster = Cluster::start(&Plan::default());
    std::fs::set_permissions(cluster.root.path(), Permissions::from_mode(0o755)).unwrap();
    let file = cluster.root.path().join("f");
    std::fs::write(&file, "secret").unwrap();
    std::fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
    rustix::fs::chown(&file, Some(Uid::from_raw(0)), Some(Gid::from_raw(4321))).unwrap();
    cluster.cli(&["put".as_ref(), "-a".as_ref(), file.as_os_str(), cluster.url("f").as_ref()]).expect(0);
    let mount = cluster.mount("", "allow_other");
    let cat = |group: &str| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "65534", "--regid", group, "--clear-groups", "cat"]).arg(mount.at("f"));
        run(&mut command, COMMAND)
    };
    assert_eq!(cat("4321").expect(0).out(), "secret");
    assert!(cat("65534").expect(1).err().contains("Permission denied"));
    assert_quiet(&cluster, &[&mount]);
}

#[test]
fn s37_numbers_times_and_links_stay_as_they_are() {
    need_mount!("s37_numbers_times_and_links_stay_as_they_are");
    let mut cluster = Cluster::start(&Plan::default());
    let file = cluster.root.path().join("f");
    for (name, size) in [("a", 0), ("d/b", 1), ("d/e/c", 100_001)] {
        write_file(&file, size, size);
        cluster.put(&file, name);
    }
    let facts = |mount: &Mount| {
        ["a", "d", "d/b", "d/e", "d/e/c"].map(|name| {
            let m = std::fs::metadata(mount.at(name)).unwrap();
            (m.ino(), m.nlink(), m.size(), m.blocks(), m.mode(), m.mtime(), m.mtime_nsec())
        })
    };
    let mount = cluster.mount("", "");
    let first = facts(&mount);
    let mut numbers: Vec<u64> = first.iter().map(|fact| fact.0).collect();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 5);
    assert_eq!(first.map(|fact| fact.1), [1; 5]);
    assert_eq!(first.map(|fact| fact.3), [0, 0, 1, 0, 196]);
    let other = cluster.mount("", "");
    assert_eq!(facts(&other), first, "another mount");
    other.stop();
    mount.stop();
    cluster.stop();
    cluster.serve();
    let mount = cluster.mount("", "");
    assert_eq!(facts(&mount), first, "another run of the server");
    let restored = cluster.root.path().join("t");
    std::fs::create_dir(&restored).unwrap();
    let mut rsync = Command::new("cp");
    run(rsync.arg("-a").arg(mount.at(".")).arg(&restored), COMMAND).expect(0);
    let copied = std::fs::metadata(restored.join("d/e/c")).unwrap();
    assert_eq!((copied.mtime(), copied.mtime_nsec()), (first[4].5, first[4].6));
    // Other content is another inode; the same bytes again too.
    cluster.put(&file, "d/e/c");
    let now = eventually("the new version is shown", SOON, || {
        let ino = std::fs::metadata(mount.at("d/e/c")).unwrap().ino();
        if ino == first[4].0 { Err("the old one".to_owned()) } else { Ok(ino) }
    });
    assert!(now > first[4].0);
    assert_quiet(&cluster, &[&mount]);
}

#[test]
fn s05_df_counts_a_disk_once() {
    need_mount!("s05_df_counts_a_disk_once");
    let mut cluster = Cluster::start(&Plan { directories: 3, ..Plan::default() });
    let mount = cluster.mount("", "");
    let disk = rustix::fs::statvfs(cluster.root.path()).unwrap();
    let shown = rustix::fs::statvfs(&mount.path).unwrap();
    let (total, all) = (disk.f_blocks * disk.f_frsize, shown.f_blocks * shown.f_frsize);
    assert!(all <= total && total - all < 4096, "{all} of {total}");
    assert!(shown.f_bavail > 0 && shown.f_bavail <= shown.f_blocks && shown.f_namemax == 255);
    let status = cluster.status();
    let numbers: Vec<u64> =
        status["directories"].as_array().unwrap().iter().filter_map(|d| d["filesystem"].as_u64()).collect();
    assert!(numbers.len() == 3 && numbers[0] != 0 && numbers.iter().all(|number| *number == numbers[0]));
    assert_quiet(&cluster, &[&mount]);
}

#[test]
fn extended_attributes_say_version_stripes_and_components() {
    need_mount!("extended_attributes_say_version_stripes_and_components");
    let mut cluster = Cluster::start(&Plan::default());
    let file = cluster.root.path().join("f");
    write_file(&file, 1, 200_000);
    let layout = ["put", "--stripe-size", "64KiB", "--page-size", "4KiB"];
    let layout: Vec<&std::ffi::OsStr> = layout.iter().map(AsRef::as_ref).collect();
    cluster.cli(&[&layout[..], &[file.as_os_str(), cluster.url("d/f").as_ref()]].concat()).expect(0);
    let stat = cluster.cli(&["stat", "--json", &cluster.url("d/f")]).expect(0).out();
    let stat: Value = serde_json::from_str(&stat).unwrap();
    let mount = cluster.mount("", "");
    // Known from a list first, as `getfattr -R` and `rsync -X` have it.
    assert_eq!(std::fs::read_dir(mount.at("d")).unwrap().count(), 1);
    let value = |name: &str| {
        let mut room = [0u8; 1000];
        let length = rustix::fs::getxattr(mount.at("d/f"), name, &mut room[..])?;
        Ok::<_, rustix::io::Errno>(String::from_utf8(room[..length].to_vec()).unwrap())
    };
    assert_eq!(value("user.railfs.version"), Ok(stat["version"].to_string()));
    assert_eq!(value("user.railfs.stripes"), Ok("count=4 size=65536 page=4096 width=2".to_owned()));
    let replica =
        |index: usize| format!("n1/{}", stat["components"][index]["replicas"][0]["directory"].as_str().unwrap());
    let want = format!("0:131072:{} 1:68928:{}", replica(0), replica(1));
    assert_eq!(value("user.railfs.components"), Ok(want));
    assert_eq!(value("user.other"), Err(rustix::io::Errno::NODATA));
    assert_eq!(value("security.selinux"), Err(rustix::io::Errno::OPNOTSUPP));
    assert_quiet(&cluster, &[&mount]);
}

// -- putting and getting --

#[test]
fn standard_input_is_put_whole_whatever_its_size() {
    let cluster = Cluster::start(&Plan::default());
    let file = cluster.root.path().join("f");
    for size in [0u64, 1, 70_000, (4 << 20) + 1, 9_000_001] {
        write_file(&file, size, size);
        let script = format!("\"$RAILFS\" put -q - \"$URL\"in/{size} <'{}'", file.display());
        shell(&cluster, &script).expect(0);
        let got = cluster.cli(&["get", &cluster.url(format!("in/{size}")), "-"]).expect(0).stdout;
        assert!(got == bytes(size, usize::try_from(size).unwrap()), "{size}");
    }
    // A pipe that ends early is shorter input, not an error; no name for it is one.
    let said = shell(&cluster, "printf abc | \"$RAILFS\" put --json - \"$URL\"in/pipe").expect(0).out();
    let said = objects(&said);
    assert_eq!((said.len(), &said[0]["size"], &said[0]["source"]), (1, &3.into(), &"-".into()));
    shell(&cluster, "printf abc | \"$RAILFS\" put - \"$URL\"in/").refused(2, &["standard input has no name"]);
    shell(&cluster, "printf abc | \"$RAILFS\" put -a - \"$URL\"in/x").refused(2, &["-a", "standard input"]);
    let no_room = "TMPDIR=/nonexistent/tmp \"$RAILFS\" put - \"$URL\"in/large </dev/zero";
    shell(&cluster, no_room).refused(1, &["/nonexistent/tmp", "TMPDIR"]);
    cluster.cli(&["stat", &cluster.url("in/large")]).refused(3, &["in/large"]);
    shell(&cluster, "printf new | \"$RAILFS\" put --if-absent - \"$URL\"in/pipe").refused(4, &["in/pipe", "conflict"]);
    assert_quiet(&cluster, &[]);
}

#[test]
fn trees_go_there_and_back_in_parallel() {
    let cluster = Cluster::start(&Plan::default());
    let tree = cluster.root.path().join("tree");
    for (number, name) in (1u64..).zip(["a", "b/c", "b/d/e", "b/d/f", "z"]) {
        for copy in 0..8 {
            let path = tree.join(format!("{name}.{copy}"));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            write_file(&path, number, number * 30_000 * copy);
        }
    }
    let below = cluster.url("t/");
    let put = ["put".as_ref(), "--json".as_ref(), "-j8".as_ref(), tree.as_os_str(), below.as_ref()].to_vec();
    let said = objects(&cluster.cli(&put).expect(0).out());
    assert_eq!(said.len(), 40);
    let urls: std::collections::BTreeSet<&str> = said.iter().filter_map(|line| line["url"].as_str()).collect();
    assert!(urls.len() == 40 && urls.contains(&*cluster.url("t/b/d/e.3")), "{urls:?}");
    let lines = cluster.cli(&["put".as_ref(), tree.as_os_str(), cluster.url("t/").as_ref()]).expect(0).out();
    assert_eq!(lines.lines().filter(|line| line.contains(" -> ns/t/") && line.contains("version")).count(), 40);
    let quiet = cluster.cli(&["put".as_ref(), "-q".as_ref(), tree.as_os_str(), cluster.url("t/").as_ref()]).expect(0);
    assert_eq!((quiet.out(), quiet.err()), (String::new(), String::new()));

    let back = cluster.root.path().join("back");
    let got = ["get".as_ref(), "--json".as_ref(), "-j8".as_ref(), below.as_ref(), back.as_os_str()].to_vec();
    assert_eq!(objects(&cluster.cli(&got).expect(0).out()).len(), 40);
    assert!(files(&back) == files(&tree), "what came back is what was put, and nothing else is left");
    // -r does without the '/', and over what is there already.
    cluster.cli(&["get".as_ref(), "-rq".as_ref(), cluster.url("t").as_ref(), back.as_os_str()]).expect(0);
    assert!(files(&back) == files(&tree));
    let one = cluster.root.path().join("one");
    cluster.cli(&["get".as_ref(), "-rq".as_ref(), cluster.url("t/a.1").as_ref(), one.as_os_str()]).expect(0);
    assert_file(&one, 1, 30_000);
    assert_quiet(&cluster, &[]);
}

#[test]
fn a_tree_that_is_got_stays_in_its_directory() {
    let cluster = Cluster::start(&Plan::default());
    let file = cluster.root.path().join("f");
    write_file(&file, 1, 1000);
    for name in ["t/a/x", "t/b/y", "t/c"] {
        cluster.put(&file, name);
    }
    let at = |name: &str| cluster.root.path().join(name);
    for directory in ["into", "outside"] {
        std::fs::create_dir(at(directory)).unwrap();
    }
    std::fs::write(at("outside/mine"), "mine").unwrap();
    symlink(at("outside"), at("into/a")).unwrap();
    symlink(at("outside/mine"), at("into/c")).unwrap();
    let into = at("into");
    let below = cluster.url("t/");
    let get = ["get".as_ref(), below.as_ref(), into.as_os_str()].to_vec();
    let output = cluster.cli(&get).refused(1, &["into/a is a symbolic link", "1 of 3 files were not got"]);
    assert!(output.out().contains("into/b/y"), "{}", output.out());
    assert_eq!(files(&at("outside")), BTreeMap::from([("mine".to_owned(), b"mine".to_vec())]));
    assert_file(&at("into/b/y"), 1, 1000);
    assert_file(&at("into/c"), 1, 1000);
    assert!(!std::fs::symlink_metadata(at("into/c")).unwrap().is_symlink());
    cluster.cli(&["get", &cluster.url("none/"), at("none").to_str().unwrap()]).refused(3, &["ns/none/"]);
    assert!(!at("none").exists());
    cluster.cli(&["get", &cluster.url("t"), at("t").to_str().unwrap()]).refused(1, &["is a directory", "-r"]);
    cluster.cli(&["get", "-r", &cluster.url("t"), "-"]).refused(2, &["standard output"]);
    assert_quiet(&cluster, &[]);
}

#[test]
fn messages_name_the_flag_and_what_to_do() {
    let cluster = Cluster::start(&Plan::default());
    let file = cluster.root.path().join("f");
    write_file(&file, 1, 10);
    let source = file.to_str().unwrap();
    let put = |arguments: &[&str]| {
        let url = cluster.url("k");
        cluster.cli(&[&["put"], arguments, &[source, url.as_str()]].concat())
    };
    let wrong = put(&["--stripe-size", "12345"]).refused(2, &["--stripe-size", "power of two", "64 MiB"]);
    assert!(!wrong.err().contains("page"), "{}", wrong.err());
    put(&["--page-size", "1MiB"]).refused(2, &["--page-size", "256 KiB"]);
    put(&["--stripe-size", "4KiB", "--page-size", "8KiB"]).refused(2, &["--page-size", "does not fit"]);
    put(&["--jobs", "0"]).refused(2, &["--jobs", "1..=64"]);
    put(&["--if-absent", "--if-version", "3"]).refused(2, &["--if-version"]);
    let done = put(&["--json"]).expect(0).out();
    let version = objects(&done)[0]["version"].as_u64().unwrap();
    put(&["--if-version", &(version + 1).to_string()]).refused(4, &[&format!("version {version} is current")]);
    put(&["--if-version", &version.to_string(), "-q"]).expect(0);
    let gone = cluster.cli(&["rm", "--json", &cluster.url("k")]).expect(0).out();
    assert!(objects(&gone)[0]["deleted"].as_u64().unwrap() > version);
    cluster.put(&file, "k");
    let paths: Vec<String> = cluster.directories.iter().map(|path| path.display().to_string()).collect();
    let text = cluster.cli(&["stat", &cluster.url("k")]).expect(0).out();
    assert!(paths.iter().any(|path| text.contains(path)), "{text}");
    let stat = objects(&cluster.cli(&["stat", "--json", &cluster.url("k")]).expect(0).out());
    let replica = &stat[0]["components"][0]["replicas"][0];
    assert!(paths.iter().any(|path| replica["path"] == **path) && replica["state"] == "ok", "{replica}");
    assert_quiet(&cluster, &[]);
}

#[test]
fn lists_of_many_keys_are_read_page_by_page() {
    let keys = if railfs_tests::full() { 100_000 } else { 5000 };
    let cluster = Cluster::start(&Plan::default());
    let tree = cluster.root.path().join("tree");
    std::fs::create_dir(&tree).unwrap();
    for key in 0..keys {
        std::fs::write(tree.join(format!("{key:06}")), "").unwrap();
    }
    let url = cluster.url("many/");
    let mut put = cluster.railfs();
    put.args(["put", "-q", "-j32"]).arg(&tree).arg(&url);
    run(&mut put, COMMAND * 30).expect(0);
    let listed = cluster.cli(&["ls", &url]).expect(0);
    assert!(listed.out().lines().eq((0..keys).map(|key| format!("{key:06}"))), "each once, in order");
    assert!(listed.took.as_secs() < 10, "{:?}", listed.took);
    let json = cluster.cli(&["ls", "-R", "--json", &cluster.url("")]).expect(0).out();
    assert_eq!(json.lines().count(), keys);
    // A reader that has enough ends it without a word.
    let head = shell(&cluster, "\"$RAILFS\" ls \"$URL\"many/ | head -n 2").expect(0);
    assert_eq!((head.out().as_str(), head.err().as_str()), ("000000\n000001\n", ""));
}

// -- watching --

struct Watcher {
    process: Process,
    out: std::path::PathBuf,
}

impl Watcher {
    fn start(cluster: &Cluster, name: &str, arguments: &[&str]) -> Watcher {
        let out = cluster.root.path().join(format!("{name}.out"));
        let err = cluster.root.path().join(format!("{name}.err"));
        let mut command = cluster.railfs();
        command.args(["watch", "--json"]).args(arguments);
        command.stdout(File::create(&out).unwrap()).stderr(File::create(err).unwrap());
        Watcher { process: Process::start(&mut command), out }
    }
    /// Waits for so many changes.
    fn changes(&mut self, count: usize) -> Vec<Value> {
        eventually(&format!("{count} changes are shown"), SOON * 2, || {
            assert!(self.process.ended().is_none(), "the watch has ended");
            let text = std::fs::read_to_string(&self.out).unwrap();
            let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
            let changes = objects(whole);
            if changes.len() >= count { Ok(changes) } else { Err(format!("{} of them", changes.len())) }
        })
    }
}

fn watchers(cluster: &Cluster, count: u64) {
    eventually(&format!("{count} clients watch"), SOON, || {
        let status = cluster.try_status()?;
        let now = status["server"]["counters"]["watchers"].as_u64();
        if now == Some(count) { Ok(()) } else { Err(format!("{now:?}")) }
    });
}

#[test]
fn a_watch_sees_every_change_once_also_over_a_restart() {
    let mut cluster = Cluster::start(&Plan::default());
    let file = cluster.root.path().join("f");
    let put = |cluster: &Cluster, key: &str, size| {
        write_file(&file, size, size);
        cluster.put(&file, key);
    };
    put(&cluster, "d/before", 1);
    let mut all = Watcher::start(&cluster, "all", &[&cluster.url("")]);
    let mut below = Watcher::start(&cluster, "below", &[&cluster.url("d/")]);
    watchers(&cluster, 2);
    put(&cluster, "d/a", 10);
    put(&cluster, "other", 11);
    put(&cluster, "d/a", 12);
    cluster.cli(&["rm", &cluster.url("d/a")]).expect(0);
    let seen = all.changes(4);
    let fields = |change: &Value| (change["event"].clone(), change["name"].clone(), change["size"].as_u64());
    let want = [("put", "d/a", Some(10)), ("put", "other", Some(11)), ("put", "d/a", Some(12)), ("rm", "d/a", None)];
    assert_eq!(
        seen.iter().map(fields).collect::<Vec<_>>(),
        want.map(|(event, name, size)| { (Value::from(event), Value::from(name), size) })
    );
    assert_eq!(seen[3]["deleted"], seen[2]["version"]);
    assert_eq!(below.changes(3).iter().filter(|change| change["name"] == "d/a").count(), 3);

    // The server is killed and comes back: nothing is lost, nothing comes twice.
    cluster.kill();
    cluster.serve();
    put(&cluster, "d/after", 20);
    let now = all.changes(5);
    assert_eq!((now.len(), &now[..4]), (5, &seen[..]));
    assert_eq!(below.changes(4).last().unwrap(), &now[4]);
    let numbers: Vec<u64> = now.iter().filter_map(|change| change["sequence"].as_u64()).collect();
    assert!(numbers.is_sorted_by(|a, b| a < b) && numbers.len() == 5, "{numbers:?}");

    // From any number on, to where the log ends now.
    let from = |number: u64| {
        let arguments = ["watch", "--json", "--until-now", "--from", &number.to_string(), &cluster.url("")];
        objects(&cluster.cli(&arguments).expect(0).out())
    };
    assert_eq!(from(numbers[1]), now[1..]);
    assert_eq!(from(numbers[4] + 1), [] as [Value; 0]);
    let everything = from(1);
    assert_eq!((&everything[0]["name"], &everything[1..]), (&"d/before".into(), &now[..]));
    let text = cluster.cli(&["watch", "--until-now", "--from", "1", &cluster.url("other")]).expect(0).out();
    assert!(text.lines().count() == 1 && text.ends_with(" other\n") && text.contains(" put "), "{text}");
    let beyond = ["watch", "--from", "1000000", &cluster.url("")];
    cluster.cli(&beyond).refused(1, &["no number 1000000 yet", "the last one is"]);
    drop((all, below));
    watchers(&cluster, 0);
    assert_quiet(&cluster, &[]);
}

// -- what the server tells of itself, and keeps --

#[test]
fn short_commands_leave_no_session_behind() {
    let cluster = Cluster::start(&Plan::default());
    let file = cluster.root.path().join("f");
    write_file(&file, 1, 10);
    cluster.put(&file, "k");
    let before = cluster.status();
    for _ in 0..20 {
        cluster.cli(&["ls", &cluster.url("")]).expect(0);
    }
    let after = cluster.status();
    // The one that asks.
    assert_eq!((&before["server"]["sessions"], &after["server"]["sessions"]), (&1.into(), &1.into()));
    let hellos = |status: &Value| status["server"]["counters"]["hellos"].as_u64().unwrap();
    // One hello a command brings the tickets of all its rails; two rails with two lanes each would take four more.
    let more = hellos(&after) - hellos(&before);
    assert!((21..50).contains(&more), "{more} hellos for 21 commands");
    assert_quiet(&cluster, &[]);
}

#[test]
fn clients_can_ask_which_services_there_are() {
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
    use tonic_reflection::pb::v1::{ServerReflectionRequest, ServerReflectionResponse};

    let cluster = Cluster::start(&Plan::default());
    let address = format!("http://{}", cluster.control[0]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let ask = |question: MessageRequest| -> MessageResponse {
        runtime.block_on(async {
            let channel = tonic::transport::Endpoint::new(address.clone()).unwrap().connect().await.unwrap();
            let mut client = ServerReflectionClient::new(channel);
            let request = ServerReflectionRequest { host: String::new(), message_request: Some(question) };
            let questions = tonic::codegen::tokio_stream::once(request);
            let mut answers = client.server_reflection_info(questions).await.unwrap().into_inner();
            let answer: ServerReflectionResponse = answers.message().await.unwrap().unwrap();
            answer.message_response.unwrap()
        })
    };
    let MessageResponse::ListServicesResponse(services) = ask(MessageRequest::ListServices(String::new())) else {
        panic!("no list of services")
    };
    let names: Vec<&str> = services.service.iter().map(|service| service.name.as_str()).collect();
    for name in ["railfs.v1.Control", "grpc.health.v1.Health"] {
        assert!(names.contains(&name), "{names:?}");
    }
    let symbol = MessageRequest::FileContainingSymbol("railfs.v1.Control".to_owned());
    let MessageResponse::FileDescriptorResponse(file) = ask(symbol) else { panic!("no description of the service") };
    let text = String::from_utf8_lossy(&file.file_descriptor_proto[0]).into_owned();
    assert!(["LookupObject", "Watch", "WatchRequest"].iter().all(|word| text.contains(word)));
    assert_quiet(&cluster, &[]);
}

#[test]
fn a_file_that_says_no_size_is_read_to_its_end_and_what_is_replaced_keeps_its_mode() {
    let cluster = Cluster::start(&Plan::default());
    // The kernel makes them as they are read: their size is 0, or a page.
    for (number, path) in ["/proc/version", "/proc/sys/kernel/ostype", "/sys/kernel/mm/transparent_hugepage/enabled"]
        .into_iter()
        .filter(|path| std::path::Path::new(path).exists())
        .enumerate()
    {
        let url = cluster.url(format!("made{number}"));
        cluster.cli(&["put", path, &url]).expect(0);
        assert_eq!(cluster.cli(&["get", &url, "-"]).expect(0).stdout, std::fs::read(path).unwrap(), "{path}");
    }
    let private = cluster.root.path().join("private");
    std::fs::write(&private, "before").unwrap();
    std::fs::set_permissions(&private, std::fs::Permissions::from_mode(0o600)).unwrap();
    cluster.cli(&["get", &cluster.url("made0"), &private.display().to_string()]).expect(0);
    assert_eq!(std::fs::metadata(&private).unwrap().permissions().mode() & 0o777, 0o600);
    assert_ne!(std::fs::read(&private).unwrap(), b"before");
    assert_quiet(&cluster, &[]);
}
