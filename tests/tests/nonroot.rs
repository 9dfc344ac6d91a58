//! Mounting as a user, other users of a mount, mount namespaces and bind mounts, and machines on which something that a
//! mount needs is missing.

#![forbid(unsafe_code)]

use railfs_tests::cluster::{COMMAND, Cluster, NAMESPACE, Plan};
use railfs_tests::data::{assert_file, compare, write_file};
use railfs_tests::mount::is_mounted;
use railfs_tests::process::{Output, Process, program, run};
use railfs_tests::quiet::assert_quiet;
use railfs_tests::wait::{self, SOON};
use railfs_tests::{need_mount, skip};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::ffi::OsStr;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A user without a name.
const USER: u32 = 65534;
const SIZE: u64 = 300_000;

/// A store with "f" (mode 0644), "private" (mode 0600) and "none" (mode 0), and places of that user, who mounts in a mount
/// namespace of the test's own: there the device has the mode that it has on most machines.
struct Setup {
    cluster: Cluster,
    world: Process,
    /// Copies of the programs that everybody may run.
    railfs: PathBuf,
    /// The user's mount point and runtime directory.
    place: PathBuf,
    runtime: PathBuf,
}

/// Why this machine cannot try it; `None`: it can.
fn cannot() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("becoming another user needs root".to_owned());
    }
    let has = |program: &str| Command::new(program).arg("--version").output().is_ok();
    ["setpriv", "fusermount3", "unshare", "nsenter"]
        .into_iter()
        .find(|program| !has(program))
        .map(|program| format!("{program} is not installed"))
}

/// Whether `/etc/fuse.conf` is as it is delivered.
fn stock_fuse_conf() -> bool {
    let text = std::fs::read_to_string("/etc/fuse.conf").unwrap_or_default();
    !text.lines().any(|line| line.trim() == "user_allow_other")
}

fn mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
}

impl Setup {
    fn new() -> Setup {
        let cluster = Cluster::start(&Plan::default());
        let root = cluster.root.path().to_owned();
        mode(&root, 0o755);
        let source = root.join("source");
        for (key, seed, bits) in [("f", 4, 0o644), ("private", 5, 0o600), ("none", 6, 0o000)] {
            write_file(&source, seed, SIZE);
            mode(&source, bits);
            cluster.put(&source, key);
        }
        let railfs = root.join("railfs");
        std::fs::copy(program("railfs"), &railfs).unwrap();
        mode(&railfs, 0o755);
        let (place, runtime) = (root.join("place"), root.join("runtime"));
        for path in [&place, &runtime] {
            std::fs::create_dir(path).unwrap();
            chown(path, Some(USER), Some(USER)).unwrap();
        }
        mode(&runtime, 0o700);
        let devices = root.join("devices");
        std::fs::create_dir(&devices).unwrap();
        let mut command = Command::new("unshare");
        command.args(["-m", "--propagation", "slave", "sh", "-ec"]);
        command.arg(format!("{}; exec sleep 600", DEVICE.replace("MODE", "666"))).arg("sh").arg(&devices);
        let world = Process::start(&mut command);
        wait::until("its mount namespace is there", SOON, || {
            std::fs::read_to_string(format!("/proc/{}/mountinfo", world.pid())).is_ok_and(|t| t.contains(" /dev/fuse "))
        });
        Setup { cluster, world, railfs, place, runtime }
    }

    /// A command of root, or of the user, in the namespace.
    fn inside(&self, user: bool, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--mount=/proc/{}/ns/mnt", self.world.pid())).arg("--");
        if user {
            command.args(["setpriv", &format!("--reuid={USER}"), &format!("--regid={USER}"), "--clear-groups", "--"]);
        }
        command.arg(program).env("LC_ALL", "C").current_dir("/");
        command
    }
    fn mounts_at(&self, place: &Path) -> usize {
        let table = std::fs::read_to_string(format!("/proc/{}/mountinfo", self.world.pid())).unwrap();
        table.matches(&format!(" {} ", place.display())).count()
    }

    /// A command of the user.
    fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = self.inside(true, program);
        command.env("XDG_RUNTIME_DIR", &self.runtime).env_remove("RAILFS_RUNTIME_DIR").env_remove("RAILFS_LOG");
        command
    }
    fn mount(&self, options: &str) -> Command {
        let mut command = self.command(&self.railfs);
        command.arg("mount");
        if !options.is_empty() {
            command.args(["-o", options]);
        }
        command.arg(self.cluster.url("")).arg(&self.place);
        command
    }
    fn status(&self) -> Value {
        let output = run(self.command(&self.railfs).args(["status", "--json"]).arg(&self.place), COMMAND).expect(0);
        serde_json::from_slice(&output.stdout).unwrap()
    }
    fn read(&self, key: &str) -> Output {
        run(self.command("cat").arg(self.place.join(key)), COMMAND)
    }
    #[track_caller]
    fn umount(&self) {
        run(self.command(&self.railfs).arg("umount").arg(&self.place), COMMAND).expect(0);
        assert_eq!(self.mounts_at(&self.place), 0);
        let left: Vec<_> = std::fs::read_dir(self.runtime.join("railfs")).unwrap().flatten().collect();
        assert!(left.is_empty(), "locks, sockets and logs are gone: {left:?}");
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        // Of a test that failed: the user's daemon is not in the store's own directory of locks.
        for entry in std::fs::read_dir(self.runtime.join("railfs")).into_iter().flatten().flatten() {
            let holder = std::fs::read(entry.path()).ok().and_then(|text| serde_json::from_slice::<Value>(&text).ok());
            let pid = holder.and_then(|holder| Pid::from_raw(i32::try_from(holder["pid"].as_u64()?).ok()?));
            let Some(pid) = pid else { continue };
            let line = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
            if String::from_utf8_lossy(&line).contains(&self.place.display().to_string()) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

/// Puts a FUSE device of this mode in place, in the mount namespace of the shell that is told.
const DEVICE: &str = "mount -t tmpfs none $1; mknod -m MODE $1/fuse c 10 229; mount --bind $1/fuse /dev/fuse";

fn as_user(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    let user = format!("--reuid={USER}");
    command
        .args([&user, &format!("--regid={USER}"), "--clear-groups", "--"])
        .arg(program)
        .env("LC_ALL", "C")
        .current_dir("/");
    command
}

/// The name of the test, once; whether it can run.
macro_rules! need {
    ($name:expr) => {
        need_mount!($name);
        if let Some(reason) = cannot() {
            return skip($name, &reason);
        }
    };
}

#[test]
fn s02_a_user_mounts_with_a_stock_fuse_conf_and_nobody_else_sees_it() {
    const NAME: &str = "s02_a_user_mounts_with_a_stock_fuse_conf_and_nobody_else_sees_it";
    need!(NAME);
    let setup = Setup::new();
    run(&mut setup.mount(""), COMMAND).expect(0);
    assert_eq!(compare(&mut &setup.read("f").expect(0).stdout[..], 4, SIZE), Ok(()));
    assert_eq!(compare(&mut &setup.read("private").expect(0).stdout[..], 5, SIZE), Ok(()));
    let status = setup.status();
    assert_eq!(status["mount"]["mountpoint"], setup.place.to_str().unwrap());
    // Lock, control socket and log are the user's alone.
    let own = setup.runtime.join("railfs");
    assert_eq!(own.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(std::fs::read_dir(&own).unwrap().count(), 3);
    // Without `allow_other` even root is somebody else.
    run(setup.inside(false, "cat").arg(setup.place.join("f")), COMMAND).refused(1, &["Permission denied"]);
    let listed = run(setup.command("stat").args(["-c", "%U %u %a", "-L"]).arg(setup.place.join("private")), COMMAND);
    assert!(listed.expect(0).out().ends_with(&format!(" {USER} 600\n")));
    setup.umount();
    // `default_permissions`: the kernel checks the modes of the user's own mount too.
    run(&mut setup.mount("default_permissions"), COMMAND).expect(0);
    setup.read("private").expect(0);
    setup.read("none").refused(1, &["Permission denied"]);
    setup.umount();
    // The runtime directory where there is none of the session: one for this user, in that for temporary files.
    let temporary = setup.cluster.root.path().join("temporary");
    std::fs::create_dir(&temporary).unwrap();
    mode(&temporary, 0o1777);
    let mut command = setup.mount("");
    run(command.env_remove("XDG_RUNTIME_DIR").env("TMPDIR", &temporary), COMMAND).expect(0);
    let own = temporary.join(format!("railfs-{USER}"));
    assert_eq!(own.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    let mut command = setup.command(&setup.railfs);
    command.env_remove("XDG_RUNTIME_DIR").env("TMPDIR", &temporary);
    run(command.arg("umount").arg(&setup.place), COMMAND).expect(0);
    assert_eq!(setup.mounts_at(&setup.place), 0);
    assert_quiet(&setup.cluster, &[]);
}

#[test]
fn s02_allow_other_of_a_user_is_refused_in_one_line_that_names_the_file() {
    const NAME: &str = "s02_allow_other_of_a_user_is_refused_in_one_line_that_names_the_file";
    need!(NAME);
    if !stock_fuse_conf() {
        return skip(NAME, "/etc/fuse.conf allows it here (user_allow_other)");
    }
    let setup = Setup::new();
    let output = run(&mut setup.mount("allow_other"), COMMAND)
        .refused(1, &["allow_other", "/etc/fuse.conf", "user_allow_other"]);
    assert_eq!(output.err().lines().count(), 1, "{}", output.err());
    assert_eq!(setup.mounts_at(&setup.place), 0);
    run(&mut setup.mount(""), COMMAND).expect(0);
    setup.umount();
    assert_quiet(&setup.cluster, &[]);
}

#[test]
fn s02_other_users_read_a_mount_of_root_only_with_allow_other() {
    const NAME: &str = "s02_other_users_read_a_mount_of_root_only_with_allow_other";
    need!(NAME);
    let mut setup = Setup::new();
    let mount = setup.cluster.mount("", "");
    let cat = |path: PathBuf| run(as_user("cat").arg(path), COMMAND);
    cat(mount.at("f")).refused(1, &["Permission denied"]);
    run(as_user("ls").arg(&mount.path), COMMAND).refused(2, &["Permission denied"]);
    mount.stop();
    let mount = setup.cluster.mount("", "allow_other");
    assert_eq!(compare(&mut &cat(mount.at("f")).expect(0).stdout[..], 4, SIZE), Ok(()));
    run(as_user("ls").arg("-l").arg(&mount.path), COMMAND).expect(0);
    // Modes count, which the kernel checks.
    cat(mount.at("private")).refused(1, &["Permission denied"]);
    assert_file(&mount.at("private"), 5, SIZE);
    assert_quiet(&setup.cluster, &[&mount]);
    mount.stop();
}

#[test]
fn s02_bind_mounts_and_mount_namespaces_read_the_same() {
    const NAME: &str = "s02_bind_mounts_and_mount_namespaces_read_the_same";
    need!(NAME);
    let mut setup = Setup::new();
    let mount = setup.cluster.mount("", "");
    let unshare = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["-m", "--propagation", "slave", "sh", "-ec", script, "sh"]).arg(&mount.path).arg(&setup.place);
        run(&mut command, COMMAND)
    };
    let through = unshare("cat $1/f").expect(0);
    assert_eq!(compare(&mut &through.stdout[..], 4, SIZE), Ok(()));
    let through = unshare("mount --bind $1 $2; cat $2/f; cmp $1/f $2/f; umount $2").expect(0);
    assert_eq!(compare(&mut &through.stdout[..], 4, SIZE), Ok(()));
    let through = unshare("cp $1/f /dev/null; mount --rbind $1 $2; ls $2; stat -c %i $1/f $2/f").expect(0).out();
    let words: Vec<&str> = through.split_whitespace().collect();
    assert_eq!(words[..3], ["f", "none", "private"]);
    assert_eq!(words[3], words[4]);
    // A bind mount made outside keeps the file system when the mount point goes; the daemon ends when both have.
    run(Command::new("mount").arg("--bind").arg(&mount.path).arg(&setup.place), COMMAND).expect(0);
    assert_file(&setup.place.join("f"), 4, SIZE);
    run(Command::new("umount").arg(&setup.place), COMMAND).expect(0);
    assert_file(&mount.at("f"), 4, SIZE);
    assert_quiet(&setup.cluster, &[&mount]);
    mount.stop();
}

#[test]
fn a_dead_mount_of_another_user_is_named_and_left_alone() {
    const NAME: &str = "a_dead_mount_of_another_user_is_named_and_left_alone";
    need!(NAME);
    let setup = Setup::new();
    run(&mut setup.mount(""), COMMAND).expect(0);
    let pid = setup.status()["mount"]["pid"].as_u64().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?)).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    wait::until("the daemon is dead", SOON, || {
        std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).is_ok_and(|line| line.is_empty())
            || !Path::new(&format!("/proc/{}", pid.as_raw_nonzero())).exists()
    });
    let mut command = setup.inside(false, &setup.railfs);
    command.env("RAILFS_RUNTIME_DIR", setup.cluster.root.path().join("run"));
    let output = run(command.arg("mount").arg(setup.cluster.url("")).arg(&setup.place), COMMAND);
    output.refused(1, &["mounted there already", NAMESPACE, &format!("the user with id {USER}"), "umount"]);
    assert_eq!(setup.mounts_at(&setup.place), 1);
    // Its owner replaces it, with no other step.
    run(&mut setup.mount(""), COMMAND).expect(0);
    assert_eq!(compare(&mut &setup.read("f").expect(0).stdout[..], 4, SIZE), Ok(()));
    assert_eq!(setup.mounts_at(&setup.place), 1);
    setup.umount();
    assert_quiet(&setup.cluster, &[]);
}

#[test]
fn s18_what_is_missing_on_a_bare_machine_is_named() {
    const NAME: &str = "s18_what_is_missing_on_a_bare_machine_is_named";
    need!(NAME);
    let setup = Setup::new();
    let url = setup.cluster.url("");
    let root_place = setup.cluster.root.path().join("root-place");
    std::fs::create_dir(&root_place).unwrap();
    // Root needs no helper.
    let bare = |user: bool, place: &Path, verb: &[&OsStr]| {
        let mut command = if user { as_user("env") } else { Command::new("env") };
        command.args(["-i", "PATH=/none"]);
        let runtime = if user { setup.runtime.clone() } else { setup.cluster.root.path().join("run") };
        command.arg(format!("RAILFS_RUNTIME_DIR={}", runtime.display()));
        run(command.arg(&setup.railfs).args(verb).arg(place), COMMAND)
    };
    bare(false, &root_place, &["mount".as_ref(), url.as_ref()]).expect(0);
    assert_file(&root_place.join("f"), 4, SIZE);
    bare(false, &root_place, &["umount".as_ref()]).expect(0);
    bare(true, &setup.place, &["mount".as_ref(), url.as_ref()]).refused(1, &["fusermount3", "install fuse3"]);

    // The device is another one, or not there at all; in a mount namespace of its own.
    let without = |user: bool, script: &str| {
        let mut command = Command::new("unshare");
        let place = if user { &setup.place } else { &root_place };
        command.args(["-m", "--propagation", "slave", "sh", "-ec"]);
        command.arg(format!("{script}; exec \"$@\"")).arg("sh");
        if user {
            command.args(["setpriv", &format!("--reuid={USER}"), &format!("--regid={USER}"), "--clear-groups"]);
        }
        command.arg(&setup.railfs).args(["mount", "-f", &url]).arg(place);
        command.env(
            "RAILFS_RUNTIME_DIR",
            if user { setup.runtime.clone() } else { setup.cluster.root.path().join("run") },
        );
        let output = run(&mut command, COMMAND);
        let output = output.refused(1, &["fuse"]);
        let said: Vec<String> =
            output.err().lines().filter(|line| line.starts_with("railfs: ")).map(str::to_owned).collect();
        assert_eq!(said.len(), 1, "{}", output.err());
        assert!(!output.err().contains("panicked"), "{}", output.err());
        said[0].clone()
    };
    let said = without(false, "mount --bind /dev/null /dev/fuse");
    assert!(said.contains("/dev/fuse") && said.contains("is not the FUSE device"), "{said}");
    let empty = "mount -t tmpfs none /dev; mknod -m 666 /dev/null c 1 3";
    let said = without(false, empty);
    assert!(said.contains("/dev/fuse") && said.contains("modprobe fuse"), "{said}");
    let said = without(true, "mount --bind /dev/null /dev/fuse");
    assert!(said.contains("fuse"), "{said}");
    let said = without(true, empty);
    assert!(said.contains("fuse") && said.contains("modprobe"), "{said}");
    // Only root may open the device, and the helper does not say that it is.
    let devices = setup.cluster.root.path().join("devices");
    let said = without(true, &DEVICE.replace("MODE", "600").replace("$1", &devices.display().to_string()));
    assert!(said.contains("/dev/fuse") && said.contains("Permission denied") && said.contains("0666"), "{said}");
    for place in [&root_place, &setup.place] {
        assert!(!is_mounted(place));
    }
    assert_quiet(&setup.cluster, &[]);
}
