//! The command line against a served store: put, get, ls, stat, rm, with their exit codes and messages.

#![forbid(unsafe_code)]

use railfs_tests::cluster::{COMMAND, Cluster, NAMESPACE, Plan};
use railfs_tests::data::{assert_file, bytes, write_file};
use railfs_tests::process::run;
use railfs_tests::quiet::{assert_quiet, components};
use serde_json::Value;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

/// `get` to a file, and its bytes.
fn get(cluster: &Cluster, key: impl AsRef<[u8]>) -> Vec<u8> {
    cluster.cli(&["get", &cluster.url(key), "-"]).expect(0).stdout
}

#[test]
fn one_object_from_put_to_rm() {
    let cluster = Cluster::start(&Plan::default());
    let file = cluster.root.path().join("f");
    write_file(&file, 1, 3_000_001);
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
    cluster.put(&file, "a/b/f");
    assert_eq!(get(&cluster, "a/b/f"), bytes(1, 3_000_001));

    let copy = cluster.root.path().join("copy");
    cluster.cli(&["get".as_ref(), cluster.url("a/b/f").as_ref(), copy.as_os_str()]).expect(0);
    assert_file(&copy, 1, 3_000_001);
    assert_eq!(copy.metadata().unwrap().mode() & 0o777, 0o640);

    let stat = cluster.cli(&["stat", "--json", &cluster.url("a/b/f")]).expect(0);
    let stat: Value = serde_json::from_slice(&stat.stdout).unwrap();
    assert_eq!((&stat["size"], &stat["mode"]), (&3_000_001.into(), &"0640".into()));
    let version = stat["version"].as_u64().unwrap();
    assert!(version > 1024);
    let text = cluster.cli(&["stat", &cluster.url("a/b/f")]).expect(0).out();
    assert!(text.contains("a/b/f") && text.contains(&version.to_string()), "{text}");

    assert_eq!(cluster.cli(&["ls", &cluster.url("")]).expect(0).out(), "a/\n");
    assert_eq!(cluster.cli(&["ls", &cluster.url("a/b/")]).expect(0).out(), "f\n");
    assert_eq!(cluster.cli(&["ls", "-R", &cluster.url("a")]).expect(0).out(), "b/f\n");
    let long = cluster.cli(&["ls", "-l", &cluster.url("a/b/f")]).expect(0).out();
    assert!(long.contains("3000001") && long.contains(&version.to_string()), "{long}");

    let wrong = (version + 1).to_string();
    cluster.cli(&["rm", "--if-version", &wrong, &cluster.url("a/b/f")]).refused(4, &["a/b/f"]);
    cluster.cli(&["rm", "--if-version", &version.to_string(), &cluster.url("a/b/f")]).expect(0);
    cluster.cli(&["get", &cluster.url("a/b/f"), "-"]).refused(3, &["a/b/f"]);
    assert_quiet(&cluster, &[]);
    assert!(components(&cluster).unwrap().is_empty(), "what was deleted leaves nothing");
}

#[test]
fn exit_codes_say_what_kind_of_failure() {
    let mut cluster = Cluster::start(&Plan::default());
    let file = cluster.root.path().join("f");
    write_file(&file, 2, 10);
    let source = file.to_str().unwrap();
    // 2: usage.
    cluster.cli(&["frobnicate"]).refused(2, &["frobnicate"]);
    cluster.cli(&["get", "http://127.0.0.1/ns/k", "-"]).refused(2, &["railfs://"]);
    cluster.cli(&["ls", "railfs://127.0.0.1/UPPER/"]).refused(2, &["URL"]);
    cluster.cli(&["put", source, "railfs://127.0.0.1/ns/a//b"]).refused(2, &["URL"]);
    cluster.cli(&["get", &cluster.url("d/"), "-"]).refused(2, &["directory"]);
    cluster.cli(&["mount", "-o", "rw", &cluster.url(""), source]).refused(2, &["read-only"]);
    cluster.cli(&["put", "--stripe-size", "12345", source, &cluster.url("k")]).refused(2, &["12345"]);
    // 3: not there.
    cluster.cli(&["ls", &cluster.url("")]).refused(3, &[NAMESPACE]);
    cluster.put(&file, "k");
    cluster.cli(&["stat", &cluster.url("other")]).refused(3, &["other"]);
    cluster.cli(&["rm", &cluster.url("other")]).refused(3, &["other"]);
    cluster.cli(&["ls", &cluster.url("other/")]).refused(3, &["other"]);
    // 4: conflicts.
    cluster.cli(&["put", "--if-absent", source, &cluster.url("k")]).refused(4, &["k"]);
    cluster.cli(&["put", "--if-version", "1", source, &cluster.url("k")]).refused(4, &["k"]);
    cluster.cli(&["put", source, &cluster.url("k/below")]).refused(4, &["k"]);
    cluster.put(&file, "dir/f");
    cluster.cli(&["put", source, &cluster.url("dir")]).refused(4, &["dir"]);
    cluster.cli(&["put", "--if-absent", source, &cluster.url("new")]).expect(0);
    // 1: other failures.
    cluster.cli(&["put", "/nonexistent/file", &cluster.url("k")]).refused(1, &["/nonexistent/file"]);
    cluster.cli(&["stat", &cluster.url("dir")]).refused(1, &["directory"]);
    cluster.cli(&["umount", source]).refused(1, &["not a railfs mount"]);
    assert_quiet(&cluster, &[]);
    // 5: unreachable, naming the address.
    let address = cluster.control[0].to_string();
    cluster.stop();
    for arguments in [vec!["ls"], vec!["stat"], vec!["rm"], vec!["put", source]] {
        let url = cluster.url("k");
        let arguments: Vec<&str> = arguments.into_iter().chain([url.as_str()]).collect();
        cluster.cli(&arguments).refused(5, &[&address]);
    }
    cluster.cli(&["get", &cluster.url("k"), "-"]).refused(5, &[&address]);
    let left = cluster.cli(&["get", &cluster.url("k"), source]).refused(5, &[&address]);
    assert!(left.took.as_secs() < 10);
    assert_file(&file, 2, 10); // What was there is as before.
}

#[test]
fn a_directory_goes_as_cp_would_copy_it() {
    let cluster = Cluster::start(&Plan::default());
    let tree = cluster.root.path().join("tree");
    let at = |name: &str| tree.join(name);
    std::fs::create_dir_all(at("x/y/z")).unwrap();
    std::fs::create_dir(at("empty")).unwrap();
    for (name, size) in [("one", 1), ("x/two", 70_000), ("x/y/three", 0), ("x/y/z/four", 2_500_000)] {
        write_file(&at(name), size, size);
    }
    symlink("x/two", at("link")).unwrap();
    symlink("y", at("x/dirlink")).unwrap();
    let put = cluster.cli(&["put".as_ref(), tree.as_os_str(), cluster.url("to/here/").as_ref()]).expect(0);
    assert!(put.err().contains("1 empty director"), "{}", put.err());
    let list = cluster.cli(&["ls", "-R", &cluster.url("to/here")]).expect(0).out();
    let names: Vec<&str> = list.lines().collect();
    let want = ["link", "one", "x/dirlink/three", "x/dirlink/z/four", "x/two", "x/y/three", "x/y/z/four"];
    assert_eq!(names, want);
    assert_eq!(get(&cluster, "to/here/link"), bytes(70_000, 70_000));
    assert_eq!(get(&cluster, "to/here/x/dirlink/z/four"), bytes(2_500_000, 2_500_000));
    assert_eq!(get(&cluster, "to/here/x/y/three"), b"");

    // What cannot be put is named, and nothing is put.
    symlink("..", at("x/loop")).unwrap();
    symlink("nowhere", at("broken")).unwrap();
    let words = [at("x/loop"), at("broken")].map(|path| path.display().to_string());
    let words: Vec<&str> = words.iter().map(String::as_str).chain(["nothing was put"]).collect();
    cluster.cli(&["put".as_ref(), tree.as_os_str(), cluster.url("other/").as_ref()]).refused(1, &words);
    cluster.cli(&["ls", &cluster.url("other/")]).refused(3, &[]);
    assert_quiet(&cluster, &[]);
}

#[test]
fn names_of_any_bytes() {
    let cluster = Cluster::start(&Plan::default());
    let names: Vec<Vec<u8>> = vec![
        (1..=255u8).filter(|byte| *byte != b'/').collect::<Vec<u8>>()[..254].to_vec(),
        b"with space and % and \"quotes\" and \\".to_vec(),
        b"new\nline".to_vec(),
        b"\xff\xfe\x80".to_vec(),
        "\u{e4}\u{1f980}".as_bytes().to_vec(),
        b"-".to_vec(),
        b"...".to_vec(),
        vec![b'x'; 255],
    ];
    let tree = cluster.root.path().join("tree");
    std::fs::create_dir(&tree).unwrap();
    for name in &names {
        std::fs::write(tree.join(OsStr::from_bytes(name)), name).unwrap();
    }
    cluster.put(&tree, "any/");
    for name in &names {
        assert_eq!(get(&cluster, [b"any/", &name[..]].concat()), *name, "{}", name.escape_ascii());
    }
    let mut want = names.clone();
    want.sort();
    let listed = cluster.cli(&["ls", &cluster.url("any/")]).expect(0).stdout;
    assert_eq!(listed, want.iter().flat_map(|name| [&name[..], b"\n"].concat()).collect::<Vec<u8>>());
    let one = cluster.root.path().join("one");
    std::fs::write(&one, "1").unwrap();
    for wrong in
        ["railfs://h/ns/a/../b", "railfs://h/ns/a%00b", "railfs://h/ns/a b", "railfs://h/ns/a%2Fb", "railfs://h/ns/."]
    {
        cluster.cli(&["put".as_ref(), one.as_os_str(), wrong.as_ref()]).refused(2, &["URL, at byte"]);
    }
    let long = format!("railfs://h/ns/{}", "y".repeat(256));
    cluster.cli(&["put".as_ref(), one.as_os_str(), long.as_ref()]).refused(2, &["256"]);
    assert_quiet(&cluster, &[]);
}

#[test]
fn sizes_around_every_boundary() {
    let cluster = Cluster::start(&Plan { directories: 3, ..Plan::default() });
    let (page, stripe) = (4096u64, 65536u64);
    let mut sizes = vec![0, 1, 2];
    for edge in [page, stripe, 2 * stripe, 3 * stripe, 6 * stripe, 1 << 20, 511 * page, 3 * 512 * page] {
        sizes.extend([edge - 1, edge, edge + 1]);
    }
    sizes.sort_unstable();
    sizes.dedup();
    let tree = cluster.root.path().join("tree");
    std::fs::create_dir(&tree).unwrap();
    for size in &sizes {
        write_file(&tree.join(size.to_string()), *size, *size);
    }
    let layout = ["put", "--page-size", "4KiB", "--stripe-size", "64KiB", "--width", "3"];
    let arguments: Vec<&OsStr> = layout.iter().map(OsStr::new).collect();
    let url = cluster.url("sizes/");
    cluster.cli(&[&arguments[..], &[tree.as_os_str(), url.as_ref()]].concat()).expect(0);
    let back = cluster.root.path().join("back");
    for size in &sizes {
        let url = cluster.url(format!("sizes/{size}"));
        cluster.cli(&["get".as_ref(), url.as_ref(), back.as_os_str()]).expect(0);
        assert_file(&back, *size, *size);
    }
    // An empty object has one component of length 0; the others as many as they have stripes, three at most.
    let components = components(&cluster).unwrap();
    assert_eq!(components.len(), sizes.len());
    let widths: Vec<usize> = components.values().map(Vec::len).collect();
    assert_eq!(
        widths.iter().filter(|width| **width == 1).count(),
        sizes.iter().filter(|size| **size <= stripe).count()
    );
    assert!(widths.iter().all(|width| (1..=3).contains(width)));
    assert_quiet(&cluster, &[]);
}

#[test]
fn get_to_places_and_pipes() {
    let cluster = Cluster::start(&Plan::default());
    let file = cluster.root.path().join("f");
    write_file(&file, 9, 5_000_000);
    cluster.put(&file, "");
    let directory = cluster.root.path().join("dir");
    std::fs::create_dir(&directory).unwrap();
    cluster.cli(&["get".as_ref(), cluster.url("f").as_ref(), directory.as_os_str()]).expect(0);
    assert_file(&directory.join("f"), 9, 5_000_000);
    cluster.cli(&["get", &cluster.url("f"), "/nonexistent/there"]).refused(1, &["/nonexistent/"]);
    // A reader that goes away ends it without a word, and without a panic.
    let mut shell = Command::new("sh");
    let text = format!("'{}' get '{}' - | head -c 100000 | cksum", program("railfs").display(), cluster.url("f"));
    let output = run(shell.args(["-c", &text]), COMMAND).expect(0);
    assert_eq!(output.err(), "");
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 1, "no temporary file is left");
    assert_quiet(&cluster, &[]);
}

fn program(name: &str) -> std::path::PathBuf {
    railfs_tests::process::program(name)
}

#[test]
fn status_of_a_server_names_rails_directories_and_what_is_wrong() {
    let cluster = Cluster::start(&Plan { directories: 3, rails: 2, ..Plan::default() });
    let status = cluster.status();
    let addresses: Vec<&str> =
        status["rails"].as_array().unwrap().iter().filter_map(|r| r["address"].as_str()).collect();
    assert_eq!(addresses, cluster.rails.iter().map(ToString::to_string).collect::<Vec<_>>());
    let directories = status["directories"].as_array().unwrap();
    let paths: Vec<&Path> = directories.iter().filter_map(|d| d["path"].as_str()).map(Path::new).collect();
    assert_eq!(paths, cluster.directories);
    assert!(directories.iter().all(|directory| directory["state"] == "ok"));
    assert!(status["arena"]["total"].as_u64().unwrap() > 0 && status["counters"].is_object());
    let text = cluster.cli(&["status", &cluster.url("")]).expect(0).out();
    for word in addresses.iter().copied().chain(["publishing ok", "node n1"]) {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert_quiet(&cluster, &[]);
}
