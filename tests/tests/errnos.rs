//! What a read-only file system answers, call by call: a mount and a plain directory that is mounted read-only say the same.

#![forbid(unsafe_code)]

use railfs_tests::cluster::{COMMAND, Cluster, Plan};
use railfs_tests::data::write_file;
use railfs_tests::process::run;
use railfs_tests::quiet::assert_quiet;
use railfs_tests::{need_mount, need_programs, skip};
use std::collections::BTreeMap;
use std::process::Command;

/// Prints "CALL TARGET: RESULT" for every call with every kind of target.
const CALLS: &str = r#"
import errno, fcntl, mmap, os, sys
top = sys.argv[1].encode()
at = lambda name: os.path.join(top, name) if name else b''
targets = {
    'file': b'file', 'empty': b'empty', 'directory': b'dir', 'nested': b'dir/sub/deep', 'missing': b'none',
    'missing-in-directory': b'dir/none', 'below-file': b'file/x', 'below-missing': b'none/x', 'file-slash': b'file/',
    'directory-slash': b'dir/', 'missing-slash': b'none/', 'dot': b'dir/.', 'dotdot': b'dir/sub/..', 'top': b'.',
    'name-255': b'n' * 255, 'name-256': b'n' * 256, 'in-file-256': b'file/' + b'n' * 256,
    'path-4095': (b'd/' * 2048)[:4000 - len(top)], 'path-5000': b'd/' * 2500, 'nothing': b'', 'file-dotdot': b'file/..',
}
flags = {
    'rdonly': os.O_RDONLY, 'wronly': os.O_WRONLY, 'rdwr': os.O_RDWR, 'rdonly-trunc': os.O_RDONLY | os.O_TRUNC,
    'wronly-trunc': os.O_WRONLY | os.O_TRUNC, 'append': os.O_WRONLY | os.O_APPEND, 'rdonly-append': os.O_RDONLY | os.O_APPEND,
    'creat-rdonly': os.O_CREAT, 'creat-wronly': os.O_CREAT | os.O_WRONLY, 'creat-trunc': os.O_CREAT | os.O_WRONLY | os.O_TRUNC,
    'creat-excl': os.O_CREAT | os.O_EXCL | os.O_RDWR, 'directory': os.O_DIRECTORY, 'creat-directory': os.O_CREAT | os.O_DIRECTORY,
    'nofollow': os.O_NOFOLLOW, 'path': os.O_PATH, 'tmpfile': os.O_TMPFILE | os.O_RDWR, 'direct': os.O_DIRECT,
    'noatime': os.O_NOATIME, 'nonblock': os.O_NONBLOCK, 'sync': os.O_SYNC, 'directory-wronly': os.O_DIRECTORY | os.O_WRONLY,
}
def report(call, target, act):
    try:
        result = act()
        print(f'{call} {target}: {"ok" if result is None else result}')
    except OSError as e:
        print(f'{call} {target}: {errno.errorcode[e.errno]}')
def opened(path, flag):
    os.close(os.open(path, flag, 0o644))
outside = os.path.join(sys.argv[2].encode(), b'outside')
for target, name in targets.items():
    path = at(name)
    for flag, number in flags.items():
        report('open-' + flag, target, lambda: opened(path, number))
    calls = {
        'stat': lambda: 'dir' if os.path.stat.S_ISDIR(os.stat(path).st_mode) else os.stat(path).st_size,
        'lstat': lambda: oct(os.lstat(path).st_mode), 'readlink': lambda: os.readlink(path),
        'access-f': lambda: os.access(path, os.F_OK), 'access-r': lambda: os.access(path, os.R_OK),
        'access-w': lambda: os.access(path, os.W_OK), 'access-x': lambda: os.access(path, os.X_OK),
        'unlink': lambda: os.unlink(path), 'rmdir': lambda: os.rmdir(path), 'mkdir': lambda: os.mkdir(path),
        'mknod': lambda: os.mknod(path), 'mkfifo': lambda: os.mkfifo(path), 'symlink': lambda: os.symlink(b'x', path),
        'link-to': lambda: os.link(at(b'file'), path), 'link-from': lambda: os.link(path, at(b'new')),
        'rename-from': lambda: os.rename(path, at(b'new')), 'rename-to': lambda: os.rename(at(b'file'), path),
        'rename-directory-to': lambda: os.rename(at(b'dir'), path), 'rename-self': lambda: os.rename(path, path),
        'chmod': lambda: os.chmod(path, 0o600), 'chown': lambda: os.chown(path, 1, 1), 'lchown': lambda: os.lchown(path, 1, 1),
        'chown-nobody': lambda: os.chown(path, -1, -1),
        'utime': lambda: os.utime(path, (1, 1)), 'utime-now': lambda: os.utime(path), 'truncate': lambda: os.truncate(path, 0),
        'truncate-same': lambda: os.truncate(path, os.stat(path).st_size), 'listdir': lambda: sorted(os.listdir(path)),
        'chdir': lambda: (os.chdir(path), os.chdir(b'/'))[1], 'exec': lambda: os.execv(path, [path]),
        'statvfs': lambda: os.statvfs(path).f_namemax, 'setxattr': lambda: os.setxattr(path, 'user.a', b'b'),
        'removexattr': lambda: os.removexattr(path, 'user.a'),
        'rename-out': lambda: os.rename(path, outside), 'rename-in': lambda: os.rename(outside, path),
        'link-out': lambda: os.link(path, outside + b'2'), 'pathconf': lambda: os.pathconf(path, 'PC_NAME_MAX'),
    }
    for call, act in calls.items():
        if call == 'exec' and target not in ('file', 'directory', 'missing', 'below-file', 'name-256'): continue
        report(call, target, act)
report('rename-into-itself', 'directory', lambda: os.rename(at(b'dir'), at(b'dir/sub/x')))
report('mount-point', 'rmdir', lambda: os.rmdir(top))
for target in ('file', 'empty', 'directory'):
    fd = os.open(at(targets[target]), os.O_RDONLY)
    out = os.open(outside, os.O_RDWR)
    memory = bytearray(10)
    calls = {
        'write': lambda: os.write(fd, b'x'), 'pwrite': lambda: os.pwrite(fd, b'x', 0), 'writev': lambda: os.writev(fd, [b'x']),
        'ftruncate': lambda: os.ftruncate(fd, 0), 'fchmod': lambda: os.fchmod(fd, 0o600), 'fchown': lambda: os.fchown(fd, 1, 1),
        'futimens': lambda: os.utime(fd, (1, 1)), 'fallocate': lambda: os.posix_fallocate(fd, 0, 100),
        'fsetxattr': lambda: os.setxattr(fd, 'user.a', b'b'), 'fsync': lambda: os.fsync(fd), 'fdatasync': lambda: os.fdatasync(fd),
        'syncfs-fadvise': lambda: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL),
        'read': lambda: len(os.read(fd, 10)), 'pread-negative': lambda: os.preadv(fd, [memory], -2),
        'lseek-negative': lambda: os.lseek(fd, -1, os.SEEK_SET), 'lseek-whence': lambda: os.lseek(fd, 0, 99),
        'ioctl': lambda: fcntl.ioctl(fd, 0x4242, 0), 'flock-sh': lambda: fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB),
        'flock-ex': lambda: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB), 'flock-un': lambda: fcntl.flock(fd, fcntl.LOCK_UN),
        'lockf-read': lambda: fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB), 'lockf-write': lambda: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB),
        'copy-into': lambda: os.copy_file_range(out, fd, 10), 'sendfile-into': lambda: os.sendfile(fd, out, 0, 10),
        'fchdir': lambda: (os.fchdir(fd), os.chdir(b'/'))[1], 'listdir': lambda: sorted(os.listdir(fd)),
        'setfl-direct': lambda: fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT) and None,
        'lease-read': lambda: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK) and None,
        'openat-creat': lambda: os.close(os.open(b'new', os.O_CREAT | os.O_WRONLY, dir_fd=fd)),
        'unlinkat': lambda: os.unlink(b'sub', dir_fd=fd), 'mkdirat': lambda: os.mkdir(b'new', dir_fd=fd),
    }
    if target == 'file':
        calls['mmap-shared-write'] = lambda: mmap.mmap(fd, 10, mmap.MAP_SHARED, mmap.PROT_WRITE) and None
    for call, act in calls.items():
        report('fd-' + call, target, act)
    os.close(fd); os.close(out)
"#;

/// Calls (by the start of their names) that may differ, and why that is right.
const MAY_DIFFER: [(&str, &str); 1] = [("fd-lease-read", "no lease can be kept of a file that others replace")];

#[test]
fn every_call_answers_what_a_read_only_directory_answers() {
    const TEST: &str = "every_call_answers_what_a_read_only_directory_answers";
    need_mount!(TEST);
    need_programs!(TEST, "python3", "unshare", "mount");
    let mut cluster = Cluster::start(&Plan::default());
    let source = cluster.root.path().join("source");
    let work = cluster.root.path().join("work");
    std::fs::create_dir_all(source.join("dir/sub")).unwrap();
    std::fs::create_dir(&work).unwrap();
    for (name, size) in [("file", 5000), ("empty", 0), ("dir/sub/deep", 70_000), ("dir/other", 1)] {
        write_file(&source.join(name), 5, size);
    }
    write_file(&work.join("outside"), 5, 100);
    cluster.put(&source, "");
    // Directories of a mount are 0555.
    run(Command::new("bash").args(["-c", "find \"$0\" -type d -exec chmod 555 {} +"]).arg(&source), COMMAND).expect(0);
    let mount = cluster.mount("", "");
    let script = cluster.root.path().join("calls.py");
    std::fs::write(&script, CALLS).unwrap();
    let ask = |prepare: &str, place: &std::path::Path| {
        let line = format!("set -e; {prepare} python3 \"$0\" \"$1\" \"$2\"");
        let mut command = Command::new("unshare");
        command.args(["-m", "bash", "-c", &line]).arg(&script).arg(place).arg(&work);
        run(&mut command, COMMAND)
    };
    let plain = ask("mount --bind \"$1\" \"$1\"; mount -o remount,ro,bind \"$1\";", &source);
    if plain.code != Some(0) {
        return skip(TEST, &format!("a directory cannot be mounted read-only here: {}", plain.err().trim()));
    }
    let railfs = ask("", &mount.path).expect(0);
    let table = |text: &str| -> BTreeMap<String, String> {
        let pairs = text.lines().filter_map(|line| line.split_once(": "));
        pairs.map(|(call, result)| (call.to_owned(), result.to_owned())).collect()
    };
    let (plain, railfs) = (table(&plain.out()), table(&railfs.out()));
    assert!(plain.len() > 1000, "{} calls", plain.len());
    let mut wrong = Vec::new();
    for (call, want) in &plain {
        let got = railfs.get(call).map_or("nothing", String::as_str);
        if got != want && !MAY_DIFFER.iter().any(|(name, _)| call.starts_with(name)) {
            wrong.push(format!("{call}: a plain directory says {want}, railfs {got}"));
        }
        assert!(!["ENOSYS", "EIO"].contains(&got), "{call}: {got}");
    }
    assert!(wrong.is_empty(), "{} of {} calls:\n{}", wrong.len(), plain.len(), wrong.join("\n"));
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}
