//! Unmodified programs on a mount: what they read is right, what they may not do they are told so (S03, S05, S14, S15, S31).

#![forbid(unsafe_code)]

use railfs_tests::cluster::{Cluster, Plan};
use railfs_tests::data::write_file;
use railfs_tests::mount::Mount;
use railfs_tests::process::Output;
use railfs_tests::quiet::assert_quiet;
use railfs_tests::shell::shell;
use railfs_tests::{need_mount, need_programs};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Sizes around page (4 KiB of the kernel, 64 KiB of railfs), extent and stripe (1 MiB), and width x stripe (3 MiB).
const SIZES: [u64; 19] = [
    0,
    1,
    4095,
    4096,
    4097,
    65_535,
    65_536,
    65_537,
    131_072,
    (1 << 20) - 1,
    1 << 20,
    (1 << 20) + 1,
    (3 << 20) - 1,
    3 << 20,
    (3 << 20) + 1,
    (4 << 20) - 5,
    (6 << 20) + 65_536,
    (7 << 20) + 12_345,
    (12 << 20) + 1,
];

struct Rig {
    mount: Mount,
    source: PathBuf,
    cluster: Cluster,
}

/// A store of three directories with a tree in it, made by `make`, and a mount of it.
fn rig(options: &str, make: impl FnOnce(&Path)) -> Rig {
    let mut cluster = Cluster::start(&Plan { directories: 3, ..Plan::default() });
    let source = cluster.root.path().join("source");
    std::fs::create_dir(&source).unwrap();
    make(&source);
    cluster.put(&source, "");
    let mount = cluster.mount("", options);
    Rig { mount, source, cluster }
}

impl Rig {
    #[track_caller]
    fn sh(&self, text: &str) -> String {
        self.shell(text).expect(0).out()
    }
    #[track_caller]
    fn shell(&self, text: &str) -> Output {
        shell(&self.mount, &self.source, text)
    }
    fn end(self) {
        assert_quiet(&self.cluster, &[&self.mount]);
        self.mount.stop();
    }
}

/// A small tree with something of everything.
fn tree(at: &Path) {
    std::fs::create_dir_all(at.join("d/e/f")).unwrap();
    for (name, size) in [("a", 70_000), ("empty", 0), ("d/b", 2_000_003), ("d/e/f/deep", 5)] {
        write_file(&at.join(name), size, size);
    }
    for number in 0..60 {
        write_file(&at.join(format!("d/e/s{number:02}")), number, number * 997);
    }
    std::fs::set_permissions(at.join("d/b"), std::fs::Permissions::from_mode(0o751)).unwrap();
}

/// Files of every interesting size.
fn sizes(at: &Path) {
    for size in SIZES {
        write_file(&at.join(size.to_string()), size, size);
    }
}

#[test]
fn s03_programs_that_would_change_something_are_told_erofs() {
    need_mount!("s03_programs_that_would_change_something_are_told_erofs");
    let rig = rig("", tree);
    let state =
        "cd $M; find . | sort; find . -type f | sort | xargs md5sum; find . -printf '%i %p %m %s %T@\\n' | sort";
    let before = rig.sh(state);
    for line in [
        "mv $M/a $M/c",
        "mv $M/d $M/x",
        "touch $M/a",
        "touch $M/new",
        "chmod 600 $M/a",
        "chmod 700 $M/d",
        "chown 1:1 $M/a",
        "rm -f $M/a",
        "rm -rf $M/d",
        "rmdir $M/d/e/f",
        "mkdir $M/new",
        "mkdir $M/d/new",
        "ln $M/a $M/c",
        "ln -s a $M/c",
        "mkfifo $M/c",
        "mknod $M/c p",
        "truncate -s 0 $M/a",
        "truncate -s 100000 $M/a",
        "fallocate -l 100 $M/a",
        "echo x >>$M/a",
        "echo x >$M/a",
        "echo x >$M/new",
        "cp $S/a $M/new",
        "cp $S/a $M/a",
        "tee $M/new </dev/null",
        "dd if=/dev/null of=$M/a",
        "dd if=/dev/zero of=$M/a conv=notrunc count=1",
        "sed -i s/a/b/ $M/a",
        "setfattr -n user.x -v y $M/a",
        "setfattr -x user.x $M/a",
    ] {
        if line.starts_with("setfattr") && railfs_tests::shell::lacks(&["setfattr"]).is_some() {
            continue;
        }
        let output = rig.shell(line);
        let said = output.err();
        assert_ne!(output.code, Some(0), "{line} worked");
        let lines: Vec<&str> = said.lines().filter(|line| line.contains(": ")).collect();
        let all_rofs = lines.iter().filter(|line| !line.contains("Read-only file system")).count() == 0;
        assert!(!lines.is_empty() && all_rofs, "{line}: {said}");
    }
    assert_eq!(rig.sh(state), before, "nothing has changed");
    rig.sh("diff -r $S $M");
    rig.end();
}

#[test]
fn s03_s37_trees_are_copied_as_they_are_and_a_second_copy_finds_nothing_to_do() {
    need_mount!("s03_s37_trees_are_copied_as_they_are_and_a_second_copy_finds_nothing_to_do");
    need_programs!("s03_s37_trees_are_copied_as_they_are_and_a_second_copy_finds_nothing_to_do", "rsync");
    let rig = rig("", tree);
    for copy in ["cp -a $M/. $T/t", "cp -r $M/. $T/t", "mkdir $T/t; tar -C $M -cf - . | tar -C $T/t -xf -"] {
        let output = rig.shell(&format!("{copy}; diff -r $S $T/t")).expect(0);
        assert_eq!(output.err(), "", "{copy} has nothing to say");
    }
    assert_eq!(rig.sh("cp -a $M/. $T/t; stat -c '%a %Y' $T/t/d/b"), rig.sh("stat -c '%a %Y' $M/d/b"));
    assert_eq!(rig.sh("rsync -a $M/ $T/t/; rsync -ai $M/ $T/t/; diff -r $S $T/t"), "", "a second rsync prints nothing");
    assert_eq!(rig.sh("rsync -ac --dry-run -i $M/ $T/t/ | grep -c '^>f'"), "64\n");
    // tar takes no file for a hard link of another, and none for a hole.
    let listed = rig.sh("tar -C $M -cf - . | tar -tvf - | awk '$1 ~ /^h/' | wc -l");
    assert_eq!(listed, "0\n");
    rig.sh("cd $M; tar -Scf $T/t . 2>$T/said; test ! -s $T/said; mkdir $T/x; tar -xf $T/t -C $T/x; diff -r $S $T/x");
    rig.end();
}

#[test]
fn s03_a_repository_a_database_locks_and_attributes() {
    need_mount!("s03_a_repository_a_database_locks_and_attributes");
    need_programs!("s03_a_repository_a_database_locks_and_attributes", "git", "sqlite3", "flock", "getfattr");
    let rig = rig("", |at| {
        let made = "cd \"$0\"; export HOME=$0 GIT_CONFIG_GLOBAL=/dev/null; set -e; mkdir w; cd w; git init -q .
            git config user.email a@b; git config user.name n
            for i in $(seq 40); do mkdir -p d$((i%5)); echo \"text $i\" >d$((i%5))/f$i; done; git add .; git commit -qm one
            for i in $(seq 1 7 40); do echo more >>d$((i%5))/f$i; done; git commit -qam two; git tag t; git gc -q
            echo third >new; git add .; git commit -qm three; cd ..; git init -q --bare repo.git
            git -C w push -q ../repo.git HEAD refs/tags/t; rm -rf w
            sqlite3 x.db 'create table t(a, b); create index i on t(a)' \
              \"with recursive n(i) as (select 1 union all select i+1 from n where i<5000) insert into t select i, hex(i*i) from n\"
            echo a >a; printf '#!/bin/sh\\nexit 7\\n' >seven; chmod 755 seven";
        let output = std::process::Command::new("bash").args(["-c", made]).arg(at).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    });
    rig.sh(
        "export HOME=$T GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
        git clone -q $M/repo.git $T/r; cd $T/r; git fsck --full 2>&1; test $(git log --oneline | wc -l) = 3; test -f new
        git clone -q --no-local $M/repo.git $T/r2; diff -r $T/r/d1 $T/r2/d1
        cd $M/repo.git; git rev-parse HEAD; git log --oneline | wc -l; git show t --stat >/dev/null; git grep -q text HEAD",
    );
    assert_eq!(rig.sh("sqlite3 -readonly $M/x.db 'select count(*), sum(a) from t'"), "5000|12502500\n");
    assert_eq!(rig.sh("sqlite3 \"file:$M/x.db?immutable=1\" 'select b from t where a = 77'"), "35393239\n");
    assert_eq!(rig.sh("sqlite3 -readonly $M/x.db 'pragma integrity_check'"), "ok\n");
    // Locks: shared and exclusive, of files and of a directory, and one holds off the other.
    rig.sh("flock -s $M/a true; flock -x $M/a true; flock -s $M/repo.git true");
    rig.sh("flock -x $M/a flock -n -s $M/a true && exit 1 || true; flock -s $M/a flock -n -s $M/a true");
    rig.sh("python3 -c 'import fcntl,sys; f=open(sys.argv[1]); fcntl.lockf(f,fcntl.LOCK_SH); fcntl.lockf(f,fcntl.LOCK_UN)' $M/a");
    rig.sh("getfattr -d -m - $M/a $M/repo.git; getfacl $M/a 2>/dev/null || true; ls -l $M/a >/dev/null 2>&1 || true; ls -l $M");
    rig.sh("code=0; $M/seven || code=$?; test $code = 7");
    rig.end();
}

#[test]
fn s05_space_and_blocks_are_real_and_nothing_is_taken_for_a_hole() {
    need_mount!("s05_space_and_blocks_are_real_and_nothing_is_taken_for_a_hole");
    let rig = rig("", sizes);
    let total: u64 = rig.sh("df -P -B1 $M | tail -1 | awk '{print $2}'").trim().parse().unwrap();
    let free: u64 = rig.sh("df -P -B1 $M | tail -1 | awk '{print $4}'").trim().parse().unwrap();
    assert!(total > free && free > 0, "{total} {free}");
    assert_eq!(rig.sh("stat -f -c '%l' $M"), "255\n");
    for size in SIZES {
        let blocks = rig.sh(&format!("stat -c '%s %b' $M/{size}"));
        assert_eq!(blocks, format!("{size} {}\n", size.div_ceil(512)));
    }
    let sum: u64 = SIZES.iter().sum();
    let used: u64 = rig.sh("du -s -B1 $M | cut -f1").trim().parse().unwrap();
    assert!(used.abs_diff(sum) < 64 * 1024, "du says {used}, all files are {sum}");
    assert_eq!(rig.sh("du -sb --apparent-size $M/1 | cut -f1"), "1\n");
    for size in SIZES {
        rig.sh(&format!("cd $M; tar -Scf $T/t {size}; tar -xOf $T/t | cmp - $S/{size}"));
    }
    rig.sh("cp --sparse=always $M/7352377 $T/c; cmp $T/c $S/7352377; df -h $M; df -i $M; ls -ls $M");
    rig.end();
}

#[test]
fn s14_direct_reads_of_any_alignment() {
    need_mount!("s14_direct_reads_of_any_alignment");
    let rig = rig("arena=16MiB", sizes);
    for size in SIZES {
        rig.sh(&format!("dd if=$M/{size} iflag=direct bs=1M status=none | cmp - $S/{size}"));
    }
    let any = "import os, sys, mmap, random
m, s = sys.argv[1:]
random.seed(7)
for name in sorted(os.listdir(s)):
    size = int(name)
    want = open(os.path.join(s, name), 'rb').read()
    fd = os.open(os.path.join(m, name), os.O_RDONLY | os.O_DIRECT)
    memory = mmap.mmap(-1, 4 << 20)
    assert os.pread(fd, 100, size) == b'' and os.pread(fd, 100, size + 4096) == b'' and os.pread(fd, 1, 1 << 62) == b''
    for _ in range(25):
        offset = random.randrange(size + 100)
        start, length = random.randrange(5000), random.randrange(1, 3 << 20)
        got = os.preadv(fd, [memoryview(memory)[start:start + length]], offset)
        if offset < size:
            # One call may end where a READ ends, never before a page and never with nothing.
            assert got == min(length, size - offset), (name, offset, start, length, got)
        else:
            assert got == 0
        assert memory[start:start + got] == want[offset:offset + got], (name, offset, start, length)
    os.close(fd)
";
    let script = rig.cluster.root.path().join("any.py");
    std::fs::write(&script, any).unwrap();
    rig.sh(&format!("python3 {} $M $S", script.display()));
    rig.end();
}

#[test]
fn s14_fio_with_every_engine() {
    need_mount!("s14_fio_with_every_engine");
    need_programs!("s14_fio_with_every_engine", "fio");
    let rig = rig("arena=32MiB", |at| write_file(&at.join("f"), 3, 24 << 20));
    let mut used = 0;
    for engine in ["psync", "libaio", "io_uring", "mmap", "pvsync2"] {
        for direct in ["0", "1"] {
            let line = format!(
                "fio --name=r --filename=$M/f --readonly --rw=randread --bs=4k --size=24m --io_size=4m --ioengine={engine} \
                 --direct={direct} --iodepth=8 --output-format=terse --randseed=5"
            );
            let output = rig.shell(&line);
            let refused = output.code != Some(0)
                && ["engine", "io_uring", "Operation not permitted"].iter().any(|word| output.err().contains(word));
            if refused && !matches!(engine, "psync" | "libaio") {
                eprintln!("{engine} is not to be had here: {}", output.err().lines().next().unwrap_or_default());
                continue;
            }
            output.expect(0);
            used += 1;
        }
    }
    assert!(used >= 4, "{used}");
    rig.end();
}

#[test]
fn s15_mappings_compilers_binaries_libraries_and_modules() {
    need_mount!("s15_mappings_compilers_binaries_libraries_and_modules");
    need_programs!("s15_mappings_compilers_binaries_libraries_and_modules", "gcc", "python3");
    let rig = rig("", |at| {
        sizes(at);
        std::fs::create_dir_all(at.join("py/package/sub")).unwrap();
        let write = |name: &str, text: &str| std::fs::write(at.join(name), text).unwrap();
        write("x.h", "#define ANSWER 42\n");
        write(
            "x.c",
            "#include \"x.h\"\n#include <stdio.h>\nint twice(int);\nint main(void){printf(\"%d\\n\",twice(ANSWER));return 0;}\n",
        );
        write("twice.c", "int twice(int x){return 2*x;}\n");
        write("py/package/__init__.py", "from .sub import value\n");
        write("py/package/sub/__init__.py", "value = 17\n");
        write("py/single.py", "import package\nprint(package.value)\n");
        let made = "cd \"$0\"; gcc -shared -fPIC -o libtwice.so twice.c; gcc -o prog x.c -L. -ltwice; cp /bin/true true; chmod 755 true; chmod 644 x.c";
        let output = std::process::Command::new("bash").args(["-c", made]).arg(at).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    });
    let maps = "import mmap, os, sys
m, s = sys.argv[1:]
for name in sorted(os.listdir(s)):
    if not name.isdigit() or name == '0': continue
    want = open(os.path.join(s, name), 'rb').read()
    for kind in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
        with open(os.path.join(m, name), 'rb') as f:
            a = mmap.mmap(f.fileno(), 0, kind, mmap.PROT_READ)
            f.close()
            b = a[len(want) // 2:]
            assert a[:] == want and b == want[len(want) // 2:], name
            a.close()
fd = os.open(os.path.join(m, '65537'), os.O_RDONLY)
private = mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
private[0:3] = b'abc'
assert private[0:3] == b'abc' and os.pread(fd, 3, 0) != b'abc'
try:
    mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    sys.exit('a shared writable mapping of a file opened to read')
except PermissionError: pass
try: mmap.mmap(os.open(os.path.join(m, '0'), os.O_RDONLY), 1, mmap.MAP_SHARED, mmap.PROT_READ)
except ValueError: pass
";
    let script = rig.cluster.root.path().join("maps.py");
    std::fs::write(&script, maps).unwrap();
    for _ in 0..2 {
        rig.sh(&format!("python3 {} $M $S", script.display()));
    }
    rig.sh("$M/true");
    rig.sh("cd $T; gcc -I$M -c $M/x.c -o x.o; gcc -shared -fPIC $M/twice.c -o libtwice.so; gcc x.o -L$M -ltwice -o p; test $(LD_LIBRARY_PATH=$M ./p) = 84");
    assert_eq!(rig.sh("LD_LIBRARY_PATH=$M $M/prog"), "84\n");
    assert_eq!(rig.sh("PYTHONDONTWRITEBYTECODE= PYTHONPATH=$M/py python3 -c 'import single'"), "17\n");
    assert_eq!(rig.sh("cd $M/py; python3 single.py"), "17\n");
    // Without the right to execute: EACCES, as anywhere.
    let refused = rig.shell("$M/x.c");
    assert_eq!((refused.code, refused.err().contains("Permission denied")), (Some(126), true), "{}", refused.err());
    rig.end();
}

#[test]
fn s31_reads_are_whole_up_to_the_end_and_nothing_beyond_it() {
    need_mount!("s31_reads_are_whole_up_to_the_end_and_nothing_beyond_it");
    let rig = rig("", sizes);
    let calls = "import errno, os, sys
m, s, t = sys.argv[1:]
for name in sorted(os.listdir(s)):
    size, path = int(name), os.path.join(m, name)
    want = open(os.path.join(s, name), 'rb').read()
    fd = os.open(path, os.O_RDONLY)
    assert os.pread(fd, size + 10, 0) == want, name
    if size: assert os.pread(fd, 100, size - 1) == want[-1:]
    for offset in (size, size + 1, size + 4096, 1 << 31, 1 << 32, 1 << 62):
        assert os.pread(fd, 100, offset) == b'', (name, offset)
    assert os.lseek(fd, 0, os.SEEK_END) == size and os.lseek(fd, 5, os.SEEK_SET) == 5
    if size:
        assert os.lseek(fd, 0, os.SEEK_HOLE) == size and os.lseek(fd, 0, os.SEEK_DATA) == 0
        assert os.lseek(fd, size - 1, os.SEEK_DATA) == size - 1
    for whence in (os.SEEK_DATA, os.SEEK_HOLE):
        try: os.lseek(fd, size, whence); sys.exit('seek at the end')
        except OSError as e: assert e.errno == errno.ENXIO
    out = os.open(os.path.join(t, 'out'), os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    sent = 0
    while True:
        n = os.sendfile(out, fd, sent, 1 << 30)
        if n == 0: break
        sent += n
    assert sent == size and open(os.path.join(t, 'out'), 'rb').read() == want, name
    r, w = os.pipe()
    done = 0
    while done < size:
        n = os.splice(fd, w, 65536, offset_src=done)
        assert n > 0
        piece = b''
        while len(piece) < n: piece += os.read(r, n - len(piece))
        assert piece == want[done:done + n], (name, done)
        done += n
    assert os.splice(fd, w, 65536, offset_src=size) == 0
    os.close(r); os.close(w)
    os.ftruncate(out, 0); os.lseek(out, 0, 0)
    try:
        n = os.copy_file_range(fd, out, size, 0, 0)
        assert n <= size
    except OSError as e: assert e.errno in (errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL), e
    os.posix_fadvise(fd, 0, size, os.POSIX_FADV_WILLNEED)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.fsync(fd); os.fdatasync(fd)
    os.close(fd); os.close(out)
";
    let script = rig.cluster.root.path().join("calls.py");
    std::fs::write(&script, calls).unwrap();
    rig.sh(&format!("python3 {} $M $S $T", script.display()));
    for size in SIZES {
        rig.sh(&format!(
            "cat $M/{size} | cmp - $S/{size}; cp $M/{size} $T/c; cmp $T/c $S/{size}; test $(wc -c <$M/{size}) = {size}"
        ));
        rig.sh(&format!("tail -c 5 $M/{size} | cmp - <(tail -c 5 $S/{size}); head -c 70000 $M/{size} | cmp - <(head -c 70000 $S/{size})"));
    }
    rig.end();
}
