//! Configurations with mistakes, and what strangers send to the server's ports (S19, S40).

#![forbid(unsafe_code)]

use railfs_tests::cluster::{Cluster, Plan};
use railfs_tests::data::{assert_file, bytes, write_file};
use railfs_tests::need_mount;
use railfs_tests::process::{descriptors, resident, run};
use railfs_tests::quiet::assert_quiet;
use railfs_tests::wait::{self, eventually};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

#[test]
fn s19_a_mistake_in_the_configuration_is_named_with_file_and_key_and_nothing_is_made() {
    let cluster = Cluster::new(&Plan { directories: 2, rails: 1, ..Plan::default() });
    let good = std::fs::read_to_string(cluster.config()).unwrap();
    let root = cluster.root.path();
    let absent = root.join("absent").display().to_string();
    let (d0, d1) = (cluster.directories[0].display().to_string(), cluster.directories[1].display().to_string());
    std::os::unix::fs::symlink(&d0, root.join("same")).unwrap();
    let same = root.join("same").display().to_string();
    let line = |text: &str| format!("{text}\n{good}");
    let with = |text: &str| format!("{good}{text}\n");
    // What is wrong, the file's text, and the words that must be said.
    let cases: Vec<(&str, String, Vec<&str>)> = vec![
        ("a key with a typing mistake", line("stripe_dir = [\"/x\"]"), vec!["stripe_dir", "stripe_dirs"]),
        ("a key in a wrong section", with("[put]\nlisten = \"127.0.0.1\""), vec!["put.listen"]),
        ("a section that is not there", with("[puts]\nwidth = 1"), vec!["puts", "put"]),
        ("an old key", line("directories = [\"/x\"]"), vec!["directories"]),
        ("a wrong unit", with("[put]\nstripe_size = \"1MBB\""), vec!["put.stripe_size", "1MBB"]),
        ("a negative number", with("[put]\nwidth = -1"), vec!["put.width"]),
        ("a negative size", with("[put]\nstripe_size = -4096"), vec!["put.stripe_size"]),
        ("not a power of two", with("[put]\nstripe_size = 12345"), vec!["put.stripe_size"]),
        ("a text that should be a number", with("[put]\nwidth = \"two\""), vec!["put.width"]),
        (
            "a time without a unit",
            good.replace("superseded = \"1 s\"", "superseded = \"1\""),
            vec!["retention.superseded"],
        ),
        ("a directory twice", good.replace(&d1, &d0), vec!["stripe_dirs"]),
        ("one directory by two paths", good.replace(&d1, &same), vec!["stripe_dirs"]),
        ("a relative path", good.replace(&d1, "relative/path"), vec!["stripe_dirs", "relative/path"]),
        (
            "no directory that is there",
            good.replace(&d1, &absent).replace(&d0, &absent.replace("absent", "gone")),
            vec!["gone"],
        ),
        ("no directories", good.replace(&format!("[{d0:?}, {d1:?}]"), "[]"), vec!["stripe_dirs"]),
        (
            "an address that is none",
            good.replace("transport = \"tcp\"", "transport = \"tpc\""),
            vec!["rail", "transport"],
        ),
        ("no TOML", line("= ="), vec!["expected"]),
        ("an empty file", String::new(), vec!["stripe_dirs"]),
    ];
    let before: Vec<String> = tree(root);
    for (what, text, words) in cases {
        let file = root.join("bad.toml");
        std::fs::write(&file, text).unwrap();
        let output = run(cluster.railfsd().arg("serve").arg("--config").arg(&file), wait::SOON);
        assert!(output.took < Duration::from_secs(2) + Duration::from_secs(3), "{what}: {:?}", output.took);
        assert!(matches!(output.code, Some(1 | 2)), "{what}: {:?} {}", output.code, output.err());
        let said = output.err();
        let last = said.lines().last().unwrap_or_default();
        let missing: Vec<&&str> = words.iter().filter(|word| !said.contains(**word)).collect();
        // What the file says wrong is told with the file; what the disk lacks, with the path.
        assert!(
            missing.is_empty() && (last.contains("bad.toml") || last.contains("gone") || what.contains("two paths")),
            "{what}: {missing:?} in: {said}"
        );
        assert!(!said.contains("panic"), "{what}: {said}");
        std::fs::remove_file(&file).unwrap();
        assert_eq!(tree(root), before, "{what}: nothing is made");
    }
    let missing = run(cluster.railfsd().args(["serve", "--config"]).arg(&absent), wait::SOON);
    missing.refused(2, &["absent"]);
    run(cluster.railfsd().args(["serve", "--config"]).arg(root), wait::SOON).refused(2, &[&root.display().to_string()]);
    if !rustix::process::geteuid().is_root() {
        let file = root.join("secret.toml");
        std::fs::write(&file, &good).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o0)).unwrap();
        run(cluster.railfsd().args(["serve", "--config"]).arg(&file), wait::SOON).refused(2, &["secret.toml"]);
    }
}

/// Every path below a directory.
fn tree(root: &std::path::Path) -> Vec<String> {
    let output = std::process::Command::new("find").arg(root).output().unwrap();
    let mut paths: Vec<String> = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
    paths.sort();
    paths
}

/// Sends, then reads what is answered until the other side ends it or a second is over.
fn send(address: SocketAddr, what: &[u8]) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    // That it stops listening to nonsense is right.
    let _ = stream.write_all(what);
    let mut answer = Vec::new();
    let _ = stream.take(1 << 20).read_to_end(&mut answer);
    assert!(answer.len() < 64 << 10, "{} bytes for nonsense", answer.len());
}

#[test]
fn s40_strangers_on_the_ports_cost_no_memory_and_disturb_nobody() {
    need_mount!("s40_strangers_on_the_ports_cost_no_memory_and_disturb_nobody");
    let mut cluster = Cluster::start(&Plan::default());
    let source = cluster.root.path().join("source");
    write_file(&source, 3, 2_000_000);
    cluster.put(&source, "f");
    let server = cluster.server().pid();
    let targets = [cluster.control[0], cluster.rails[0], cluster.rails[1]];
    let kinds: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.0\r\n\r\n".to_vec(),
        bytes(5, 1 << 20),
        vec![0xff; 4096],
        [&[0xff, 0xff, 0xff, 0xff][..], &[0; 100]].concat(),
        [&0xffff_ffffu32.to_le_bytes()[..], &bytes(6, 1000)].concat(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x12\x04".to_vec(),
        vec![0; 16],
        Vec::new(),
    ];
    // Once, so that what is allocated once is there.
    for target in targets {
        kinds.iter().for_each(|kind| send(target, kind));
    }
    let (memory, files) = (resident(server), descriptors(server));
    let idle: Vec<TcpStream> = (0..1000).map(|number| TcpStream::connect(targets[number % 3]).unwrap()).collect();
    std::thread::scope(|scope| {
        for target in targets {
            let kinds = &kinds;
            scope.spawn(move || (0..4).for_each(|_| kinds.iter().for_each(|kind| send(target, kind))));
        }
        let started = Instant::now();
        let mount = cluster.mount("", "");
        assert_file(&mount.at("f"), 3, 2_000_000);
        eprintln!("a mount among strangers: {:?}", started.elapsed());
        assert_quiet(&cluster, &[&mount]);
        mount.stop();
    });
    let now = resident(server);
    eprintln!("resident: {memory} KiB before, {now} KiB with 1000 idle connections");
    assert!(now < memory + (32 << 10), "{memory} KiB before, {now} KiB after");
    drop(idle);
    eventually("their connections are gone", wait::SOON, || {
        let now = descriptors(server);
        if now <= files + 8 { Ok(()) } else { Err(format!("{now} descriptors, {files} before")) }
    });
    assert!(cluster.is_served());
    assert_quiet(&cluster, &[]);
}
