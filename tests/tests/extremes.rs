//! Sizes, depths and names at their limits, through a real server (S30).

#![forbid(unsafe_code)]

use railfs_tests::cluster::{Cluster, Plan};
use railfs_tests::process::run;
use railfs_tests::putter::Putter;
use railfs_tests::quiet::assert_quiet;
use railfs_tests::shell::shell;
use railfs_tests::{full, need_mount};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::Duration;

/// Gigabytes through a build for tests.
const LONG: Duration = Duration::from_secs(600);

#[test]
fn s30_marks_at_the_powers_of_two_of_a_sparse_file() {
    need_mount!("s30_marks_at_the_powers_of_two_of_a_sparse_file");
    let mut cluster = Cluster::start(&Plan { directories: 2, ..Plan::default() });
    // Beyond 2^32 takes a while; every day, offsets of this size are read from a store in memory (fs/tests/large.rs).
    let size: u64 = if full() { 5 << 30 } else { (160 << 20) + 7 };
    let source = cluster.root.path().join("sparse");
    let file = File::options().read(true).write(true).create_new(true).open(&source).unwrap();
    file.set_len(size).unwrap();
    let powers = (12..40).map(|power| 1u64 << power).filter(|power| *power < size);
    let marks: Vec<u64> = powers.flat_map(|power| [power - 1, power]).chain([0, size - 1]).collect();
    for (mark, at) in (1u8..).zip(&marks) {
        file.write_all_at(&[mark], *at).unwrap();
    }
    run(cluster.railfs().arg("put").arg(&source).arg(cluster.url("f")), LONG).expect(0);
    let mount = cluster.mount("", "");
    let sh = |text: &str| shell(&mount, &source, text).expect(0).out();
    assert_eq!(sh("stat -c %s $M/f"), format!("{size}\n"));
    for (mark, at) in (1u8..).zip(&marks) {
        let line = "dd if=$M/f iflag=skip_bytes,count_bytes count=3 status=none";
        let bytes = sh(&format!("{line} skip={} | od -An -tu1 | tr -s ' '", at));
        assert!(bytes.starts_with(&format!(" {mark}")), "{at}: {bytes}");
    }
    let maps = "import mmap, os, sys
with open(sys.argv[1], 'rb') as a, open(sys.argv[2], 'rb') as b:
    m = mmap.mmap(a.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    for at in map(int, sys.argv[3:]):
        start = max(0, at - 10)
        b.seek(start)
        want = b.read(20)
        assert m[start:start + 20] == want, at
        assert os.pread(a.fileno(), 20, start) == want, at
";
    let numbers: Vec<String> = marks.iter().map(u64::to_string).collect();
    let script = cluster.root.path().join("maps.py");
    std::fs::write(&script, maps).unwrap();
    sh(&format!("python3 {} $M/f $S {}", script.display(), numbers.join(" ")));
    let compared = run(Command::new("cmp").arg(mount.at("f")).arg(&source), LONG);
    compared.expect(0);
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

#[test]
fn deep_paths_and_names_of_255_bytes() {
    need_mount!("deep_paths_and_names_of_255_bytes");
    let mut cluster = Cluster::start(&Plan::default());
    let putter = Putter::new(&cluster);
    let deep = vec!["d"; 2000].join("/");
    let long = vec!["n".repeat(255); 15].join("/");
    for (key, seed) in [(&deep, 1), (&long, 2)] {
        putter.put(&format!("{key}/f"), seed, 100_000);
    }
    let mount = cluster.mount("", "");
    // Paths as long as keys are longer than what one call takes, with the mount point before them: step by step.
    let script = "import os, sys
want = open(sys.argv[2], 'rb').read()
os.chdir(sys.argv[1])
depth = 0
while True:
    names = os.listdir('.')
    assert len(names) == 1, names
    if names == ['f']: break
    os.chdir(names[0])
    depth += 1
assert open('f', 'rb').read() == want
print(depth)
";
    let source = cluster.root.path().join("want");
    for (top, seed, depth) in [("d", 1, 1999), (&"n".repeat(255)[..], 2, 14)] {
        railfs_tests::data::write_file(&source, seed, 100_000);
        let walked = run(Command::new("python3").args(["-c", script]).arg(mount.at(top)).arg(&source), LONG).expect(0);
        assert_eq!(walked.out().trim(), depth.to_string());
    }
    let sh = |text: &str| shell(&mount, &source, text).expect(0).out();
    assert_eq!(sh("find $M -type f | wc -l"), "2\n");
    assert_eq!(sh("cd $M/nnn* && cd n* && pwd | wc -c >/dev/null; find . -name f | wc -l"), "1\n");
    drop(putter);
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}
