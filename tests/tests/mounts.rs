//! Real mounts: what programs see, what is refused, and how a mount begins and ends.

#![forbid(unsafe_code)]

use railfs_tests::cluster::{COMMAND, Cluster, Plan};
use railfs_tests::data::{assert_file, write_file};
use railfs_tests::mount::{Mount, is_mounted};
use railfs_tests::process::{Output, program, run};
use railfs_tests::quiet::assert_quiet;
use railfs_tests::{need_mount, wait};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

/// A shell command in a directory, with the mount and the source as `$M` and `$S`.
#[track_caller]
fn shell(mount: &Mount, source: &Path, text: &str) -> Output {
    let mut command = Command::new("bash");
    command.args(["-c", &format!("set -euo pipefail; {text}")]);
    run(command.env("M", &mount.path).env("S", source).env("LC_ALL", "C"), COMMAND)
}

/// A tree of files and what is odd about them.
fn tree(root: &Path) -> std::path::PathBuf {
    let tree = root.join("tree");
    std::fs::create_dir_all(tree.join("a/b/c/d")).unwrap();
    for (name, size) in [
        ("empty", 0),
        ("one", 1),
        ("page", 65_536),
        ("a/odd", 65_537),
        ("a/b/big", 9_000_003),
        ("a/b/c/d/deep", 1_048_576),
    ] {
        write_file(&tree.join(name), size, size);
    }
    for number in 0..150 {
        write_file(&tree.join("a/b/c").join(format!("small-{number:03}")), number, number * 37);
    }
    std::fs::write(tree.join("run.sh"), "#!/bin/sh\necho it runs\n").unwrap();
    std::fs::set_permissions(tree.join("run.sh"), std::fs::Permissions::from_mode(0o755)).unwrap();
    tree
}

#[test]
fn ordinary_programs_read_it() {
    need_mount!("ordinary_programs_read_it");
    let mut cluster = Cluster::start(&Plan { directories: 3, ..Plan::default() });
    let tree = tree(cluster.root.path());
    cluster.put(&tree, "");
    let mount = cluster.mount("", "arena=32MiB");
    let sh = |text: &str| shell(&mount, &tree, text).expect(0).out();
    sh("diff -r $S $M");
    sh("diff -r $S $M"); // Warm.
    sh("cmp $S/a/b/big $M/a/b/big");
    sh("for bs in 512 4096 65536 1M 3M; do dd if=$M/a/b/big iflag=direct bs=$bs status=none | cmp - $S/a/b/big; done");
    sh("dd if=$M/a/b/big iflag=direct,skip_bytes,count_bytes skip=524288 count=1048576 bs=64k status=none \
        | cmp - <(tail -c +524289 $S/a/b/big | head -c 1048576)");
    sh("diff <(cd $S && sha256sum $(find . -type f | sort)) <(cd $M && sha256sum $(find . -type f | sort))");
    sh("diff <(cd $S && find . | sort) <(cd $M && find . | sort)");
    sh("T=$(mktemp -d); cp -a $M/. $T; diff -r $S $T; stat -c %a $T/run.sh | grep -qx 755; rm -rf $T");
    sh("diff <(tar -C $M -cf - . | tar -tf - | sort) <(tar -C $S -cf - . | tar -tf - | sort)");
    sh("T=$(mktemp -d); tar -C $M -cf - . | tar -C $T -xf -; diff -r $S $T; rm -rf $T");
    assert_eq!(sh("ls $M"), sh("ls $S"));
    assert_eq!(sh("ls -l $M/a | awk '{print $1, $5, $9}' | grep odd"), "-rw-r--r-- 65537 odd\n");
    sh("df -P $M | tail -1 | grep -q railfs; df -i $M >/dev/null; stat -f $M >/dev/null");
    assert_eq!(sh("$M/run.sh"), "it runs\n");
    assert_eq!(sh("head -c 10 $M/a/b/big | cmp - <(head -c 10 $S/a/b/big) && wc -c < $M/a/b/big"), "9000003\n");
    sh("test -r $M/one && test ! -w $M/one && test -d $M/a && test ! -e $M/none");
    let hash = "import hashlib,sys,mmap,os\n\
        for name in sys.argv[1:]:\n\
        \x20 with open(name,'rb') as f: whole=hashlib.sha256(f.read()).hexdigest()\n\
        \x20 with open(name,'rb') as f:\n\
        \x20  m=mmap.mmap(f.fileno(),0,mmap.MAP_SHARED,mmap.PROT_READ); assert hashlib.sha256(m).hexdigest()==whole\n\
        \x20  assert m[-1]==m[len(m)-1]; m.close()\n\
        \x20  m=mmap.mmap(f.fileno(),0,mmap.MAP_PRIVATE,mmap.PROT_READ); assert hashlib.sha256(m).hexdigest()==whole\n\
        \x20 fd=os.open(name,os.O_RDONLY); size=os.fstat(fd).st_size\n\
        \x20 assert os.pread(fd,100,size)==b'' and len(os.pread(fd,100,size-1))==1\n\
        \x20 assert os.lseek(fd,0,os.SEEK_END)==size; os.close(fd)\n\
        \x20 print(whole)";
    let python = |base: &Path| {
        let names = ["one", "page", "a/odd", "a/b/big"].map(|name| base.join(name));
        run(Command::new("python3").args(["-c", hash]).args(names), COMMAND).expect(0).out()
    };
    assert_eq!(python(&mount.path), python(&tree));
    // st_ino is the version, d_ino equals it, and one object keeps it.
    let stat = cluster.cli(&["stat", "--json", &cluster.url("a/odd")]).expect(0);
    let stat: Value = serde_json::from_slice(&stat.stdout).unwrap();
    assert_eq!(stat["version"], mount.at("a/odd").metadata().unwrap().ino());
    let listed = sh("ls -i $M/a | grep odd");
    assert_eq!(listed.trim(), format!("{} odd", stat["version"]));
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

#[test]
fn every_mutation_is_erofs() {
    need_mount!("every_mutation_is_erofs");
    let mut cluster = Cluster::start(&Plan::default());
    let tree = tree(cluster.root.path());
    cluster.put(&tree, "");
    let mount = cluster.mount("", "");
    let script = "import os,sys,errno\n\
        m=sys.argv[1]; f=m+'/one'; d=m+'/a'; n=m+'/new'\n\
        calls={\n\
        'create':lambda:os.open(n,os.O_CREAT|os.O_WRONLY),'write':lambda:os.open(f,os.O_WRONLY),\n\
        'rdwr':lambda:os.open(f,os.O_RDWR),'trunc':lambda:os.truncate(f,0),'otrunc':lambda:os.open(f,os.O_WRONLY|os.O_TRUNC),\n\
        'unlink':lambda:os.unlink(f),'rmdir':lambda:os.rmdir(d),'mkdir':lambda:os.mkdir(n),'rename':lambda:os.rename(f,n),\n\
        'link':lambda:os.link(f,n),'symlink':lambda:os.symlink('x',n),'mknod':lambda:os.mknod(n),'mkfifo':lambda:os.mkfifo(n),\n\
        'chmod':lambda:os.chmod(f,0o600),'chown':lambda:os.chown(f,1,1),'utime':lambda:os.utime(f,(1,1)),\n\
        'setxattr':lambda:os.setxattr(f,'user.a',b'b'),'removexattr':lambda:os.removexattr(f,'user.a')}\n\
        for name,call in calls.items():\n\
        \x20 try: call(); print(name,'worked')\n\
        \x20 except OSError as e: print(name,errno.errorcode[e.errno])";
    let output = run(Command::new("python3").args(["-c", script]).arg(&mount.path), COMMAND).expect(0).out();
    for line in output.lines() {
        assert!(line.ends_with(" EROFS"), "{line}");
    }
    assert_eq!(output.lines().count(), 18);
    shell(&mount, &tree, "diff -r $S $M").expect(0);
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

#[test]
fn names_appear_change_and_vanish() {
    need_mount!("names_appear_change_and_vanish");
    let mut cluster = Cluster::start(&Plan::default());
    let mount = cluster.mount("", "metadata_ttl=0s");
    let file = cluster.root.path().join("f");
    let missing = || std::fs::metadata(mount.at("d/f")).unwrap_err().raw_os_error();
    assert_eq!(std::fs::read_dir(&mount.path).unwrap().count(), 0, "a namespace that nobody wrote to is empty");
    assert_eq!(missing(), Some(Errno::NOENT.raw_os_error()));
    let mut versions = BTreeSet::new();
    for size in [100_000, 50, 3_000_000] {
        write_file(&file, size, size);
        cluster.put(&file, "d/f");
        // No cache may hide it: negative entries are not kept, attributes of files are checked.
        let meta = mount.at("d/f").metadata().unwrap();
        assert_eq!(meta.len(), size);
        assert!(versions.insert(meta.ino()), "a version of its own");
        assert_file(&mount.at("d/f"), size, size);
    }
    assert!(versions.iter().collect::<Vec<_>>().is_sorted());
    // A descriptor is one version: after a replacement it is ESTALE, never other bytes.
    let old = File::open(mount.at("d/f")).unwrap();
    let mut buffer = [0; 1000];
    old.read_exact_at(&mut buffer, 0).unwrap();
    write_file(&file, 77, 3_000_000);
    cluster.put(&file, "d/f");
    for offset in [0, 2_000_000] {
        let error = old.read_at(&mut buffer, offset).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::STALE.raw_os_error()), "{error}");
    }
    drop(old);
    assert_file(&mount.at("d/f"), 77, 3_000_000);
    cluster.cli(&["rm", &cluster.url("d/f")]).expect(0);
    assert!(File::open(mount.at("d/f")).is_err());
    // Directory entries may be trusted for a second.
    wait::until("the directory is gone with its last object", wait::SOON, || !mount.at("d").exists());
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

#[test]
fn a_key_in_the_url_shows_what_lies_below() {
    need_mount!("a_key_in_the_url_shows_what_lies_below");
    let mut cluster = Cluster::start(&Plan::default());
    let tree = tree(cluster.root.path());
    cluster.put(&tree, "top/");
    let mount = cluster.mount("top/a/b/", "");
    shell(&mount, &tree, "diff -r $S/a/b $M").expect(0);
    let place = cluster.root.path().join("other");
    std::fs::create_dir(&place).unwrap();
    cluster.cli(&["mount".as_ref(), cluster.url("top/one").as_ref(), place.as_os_str()]).refused(1, &["is a file"]);
    assert!(!is_mounted(&place));
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

/// `railfs mount` without `-f`, and the daemon's id.
fn mount_behind(cluster: &Cluster, place: &Path) -> u32 {
    cluster.cli(&["mount".as_ref(), cluster.url("").as_ref(), place.as_os_str()]).expect(0);
    let status = cluster.cli(&["status".as_ref(), "--json".as_ref(), place.as_os_str()]).expect(0);
    let status: Value = serde_json::from_slice(&status.stdout).unwrap();
    let pid = status["mount"]["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
    pid.unwrap_or_else(|| panic!("no pid: {status}"))
}

fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

fn runs(pid: u32) -> bool {
    // Gone, or dead and not yet waited for by whoever inherited it.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !matches!(stat.rsplit(')').next().map(|rest| rest.trim_start().chars().next()), None | Some(None | Some('Z' | 'X')))
}

#[test]
fn begin_and_end_of_a_mount_behind_the_command() {
    need_mount!("begin_and_end_of_a_mount_behind_the_command");
    let cluster = Cluster::start(&Plan::default());
    let file = cluster.root.path().join("f");
    write_file(&file, 4, 400_000);
    cluster.put(&file, "f");
    let place = cluster.root.path().join("place");
    let arguments = |verb: &str| [verb.to_owned(), cluster.url(""), place.display().to_string()];
    cluster.cli(&arguments("mount")).refused(1, &["does not exist"]);
    std::fs::create_dir(&place).unwrap();
    std::fs::write(place.join("there"), "x").unwrap();
    cluster.cli(&arguments("mount")).refused(1, &["is not empty"]);
    std::fs::remove_file(place.join("there")).unwrap();

    // It answers when the command returns; a second mount is refused and says who holds the place.
    let pid = mount_behind(&cluster, &place);
    assert_file(&place.join("f"), 4, 400_000);
    cluster.cli(&arguments("mount")).refused(1, &["mounted already", &pid.to_string()]);
    assert_file(&place.join("f"), 4, 400_000);
    let all: Value = serde_json::from_slice(&cluster.cli(&["status", "--json"]).expect(0).stdout).unwrap();
    assert_eq!(all[0]["mount"]["pid"], pid);

    // Busy.
    let open = File::open(place.join("f")).unwrap();
    let umount = ["umount".as_ref(), place.as_os_str()];
    cluster.cli(&umount).refused(1, &["busy"]);
    assert!(is_mounted(&place));
    drop(open);
    cluster.cli(&umount).expect(0);
    assert!(!is_mounted(&place) && !runs(pid));

    // Killed: the dead mount is taken away by the next.
    let pid = mount_behind(&cluster, &place);
    signal(pid, Signal::KILL);
    wait::until("the daemon is dead", wait::SOON, || !runs(pid));
    assert!(is_mounted(&place));
    let pid = mount_behind(&cluster, &place);
    assert_file(&place.join("f"), 4, 400_000);

    // SIGTERM with a file open: bounded, and the mount is gone.
    let open = File::open(place.join("f")).unwrap();
    signal(pid, Signal::TERM);
    wait::until("the daemon ended by SIGTERM", wait::SOON, || !runs(pid) && !is_mounted(&place));
    drop(open);

    // Unmounted by others.
    let pid = mount_behind(&cluster, &place);
    run(Command::new("umount").arg(&place), COMMAND).expect(0);
    wait::until("the daemon ended after an unmount from outside", wait::SOON, || !runs(pid));
    let left: Vec<_> =
        std::fs::read_dir(cluster.root.path().join("run")).unwrap().flatten().map(|e| e.file_name()).collect();
    assert!(left.is_empty(), "locks, sockets and logs are gone: {left:?}");
    assert_quiet(&cluster, &[]);
}

#[test]
fn a_server_that_is_down_at_mount_is_named() {
    need_mount!("a_server_that_is_down_at_mount_is_named");
    let mut cluster = Cluster::start(&Plan::default());
    cluster.stop();
    let place = cluster.root.path().join("place");
    std::fs::create_dir(&place).unwrap();
    let address = cluster.control[0].to_string();
    for front in [&[][..], &["-f"]] {
        let arguments: Vec<std::ffi::OsString> = ["mount"].iter().chain(front).map(Into::into).collect();
        let more = [cluster.url("").into(), place.clone().into_os_string()];
        let output = cluster.cli(&[arguments, more.to_vec()].concat()).expect(5);
        assert!(output.err().contains(&address), "{}", output.err());
        assert!(output.took.as_secs() < 15, "{:?}", output.took);
        assert!(!is_mounted(&place));
    }
    assert!(program("railfs").exists());
}

#[test]
fn long_directories_and_names_of_any_bytes() {
    need_mount!("long_directories_and_names_of_any_bytes");
    let mut cluster = Cluster::start(&Plan::default());
    let tree = cluster.root.path().join("tree");
    std::fs::create_dir_all(tree.join("odd")).unwrap();
    std::fs::create_dir_all(tree.join("long")).unwrap();
    let bytes: Vec<u8> = (1..=254u8).filter(|byte| *byte != b'/').collect();
    for name in [&bytes[..], b"new\nline", b"\xff\xfe", b" ", b"...", &[b'x'; 255]] {
        std::fs::write(tree.join("odd").join(OsStr::from_bytes(name)), name).unwrap();
    }
    for number in 0..2500 {
        std::fs::write(tree.join("long").join(format!("{}-{number}", "n".repeat(number % 200))), "").unwrap();
    }
    cluster.put(&tree, "");
    let mount = cluster.mount("", "");
    let sh = |text: &str| shell(&mount, &tree, text).expect(0).out();
    sh("diff -r $S/odd $M/odd");
    sh("diff <(cd $S && find . -print0 | sort -z | cksum) <(cd $M && find . -print0 | sort -z | cksum)");
    assert_eq!(sh("ls -f $M/long | wc -l"), "2502\n");
    assert_eq!(sh("ls -f $M/long | sort -u | wc -l"), "2502\n");
    let listed = cluster.cli(&["ls", &cluster.url("long/")]).expect(0).out();
    assert_eq!(listed.lines().count(), 2500);
    let seen: Vec<_> = std::fs::read_dir(mount.at("long")).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(seen.iter().collect::<BTreeSet<_>>().len(), seen.len());
    assert_eq!(
        mount.at(&"y".repeat(256)).metadata().unwrap_err().raw_os_error(),
        Some(Errno::NAMETOOLONG.raw_os_error())
    );
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}
