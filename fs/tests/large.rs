//! Files beyond 2^31 and 2^32 bytes, whose bytes are made when they are read: every offset is exact (S30).

#[path = "common/fake.rs"]
mod fake;
use railfs::backend as railfs_backend;

use fake::Fake;
use railfs::mount::options::Options;
use railfs::mount::{kernel, session};
use railfs::ops::{FileSystem, Owner, Settings};
use railfs_engine::clock::Clock;
use railfs_proto::name::Namespace;
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

/// 5 TiB and a little.
const SIZE: u64 = (5 << 40) + 4097;

/// The bytes of every place: its offset, as eight bytes.
fn fill(offset: u64, out: &mut [u8]) {
    let word = |at: u64| (at & !7).to_le_bytes();
    let skip = usize::try_from(offset % 8).unwrap();
    let head = out.len().min((8 - skip) % 8);
    out[..head].copy_from_slice(&word(offset)[skip..][..head]);
    let start = offset + head as u64;
    for (at, piece) in (start..).step_by(8).zip(out[head..].chunks_mut(8)) {
        piece.copy_from_slice(&word(at)[..piece.len()]);
    }
}

fn skipped(test: &str) -> bool {
    if Path::new("/dev/fuse").exists() {
        return false;
    }
    let line = format!("SKIPPED large::{test}: there is no /dev/fuse\n");
    eprint!("{line}");
    if let Some(log) = std::env::var_os("RAILFS_SKIP_LOG") {
        OpenOptions::new().create(true).append(true).open(log).unwrap().write_all(line.as_bytes()).unwrap();
    }
    true
}

#[test]
fn s30_offsets_around_2_31_and_2_32_and_one_read_and_one_sendfile_beyond_2_gib() {
    if skipped("s30_offsets_around_2_31_and_2_32_and_one_read_and_one_sendfile_beyond_2_gib") {
        return;
    }
    let point = tempfile::tempdir().unwrap();
    let options = Options { threads: 2, ..Options::default() };
    let (connection, mount) = kernel::mount("railfs://h/ns/", point.path(), &options).unwrap();
    let fake = Fake::threaded();
    let clock = Clock::start();
    let settings = Settings {
        namespace: Namespace::new("ns").unwrap(),
        root: None,
        owner: Owner::of(rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw()),
        entry_ttl: Duration::from_secs(1),
        metadata_ttl: Duration::from_secs(1),
        mounted_at: (0, 0),
        list_limit: railfs_proto::limits::METADATA_DEADLINE,
    };
    let fs = FileSystem::new(fake.clone(), settings, Box::new(move || clock.now()));
    let (send, ended) = channel();
    session::start(fs, connection, &options, move |result| {
        let _ = send.send(result);
    })
    .unwrap();
    fake.put_with("f", SIZE, 0o644, Arc::new(fill));
    let path = point.path().join("f");
    let file = File::open(&path).unwrap();
    assert_eq!((file.metadata().unwrap().len(), file.metadata().unwrap().blocks()), (SIZE, SIZE.div_ceil(512)));
    let places = [(1 << 31) - 1, 1 << 31, (1u64 << 32) - 1, 1 << 32, (1 << 32) + 4095, 1 << 40, SIZE - 1, SIZE - 4097];
    let (mut got, mut want) = (vec![0; 9000], vec![0; 9000]);
    for place in places {
        // Before it, across it, after it.
        for offset in [place - 4500, place - 1, place] {
            let length = usize::try_from((SIZE - offset).min(9000)).unwrap();
            assert_eq!(file.read_at(&mut got, offset).unwrap(), length, "at {offset}");
            fill(offset, &mut want[..length]);
            assert!(got[..length] == want[..length], "at {offset}");
            let line =
                format!("dd if='{}' iflag=skip_bytes,count_bytes skip={offset} count=64 status=none", path.display());
            let dd = Command::new("sh").args(["-c", &line]).output().unwrap();
            assert!(dd.stdout == want[..length.min(64)], "dd at {offset}");
        }
        assert_eq!(rustix::fs::seek(&file, SeekFrom::Data(place)), Ok(place));
        assert_eq!(rustix::fs::seek(&file, SeekFrom::Hole(place)), Ok(SIZE));
    }
    for beyond in [SIZE, SIZE + 1, 1 << 62] {
        assert_eq!(file.read_at(&mut got, beyond).unwrap(), 0);
        assert_eq!(rustix::fs::seek(&file, SeekFrom::Data(beyond)), Err(Errno::NXIO));
    }
    let map = "import mmap, os, sys
size = os.stat(sys.argv[1]).st_size
with open(sys.argv[1], 'rb') as f:
    for place in map(int, sys.argv[2:]):
        start = (place - 8) // mmap.PAGESIZE * mmap.PAGESIZE
        m = mmap.mmap(f.fileno(), min(size - start, 16384), mmap.MAP_SHARED, mmap.PROT_READ, offset=start)
        for at in range(start, start + len(m) - 8, 8):
            assert int.from_bytes(m[at - start:at - start + 8], 'little') == at, at
        m.close()
";
    let numbers = places.map(|place| place.to_string());
    let mapped = Command::new("python3").args(["-c", map]).arg(&path).args(numbers).output().unwrap();
    assert!(mapped.status.success(), "{}", String::from_utf8_lossy(&mapped.stderr));

    // One call that asks for more than 2 GiB gives what Linux gives at most, and goes on from there.
    const MOST: usize = 0x7fff_f000;
    let script = "import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
most, start = int(sys.argv[2]), (1 << 31) - 123456
memory = bytearray(most + 8192)
got = os.preadv(fd, [memory], start)
assert got == most, got
for at in list(range(0, most - 8, 7777777)) + [most - 16]:
    place = start + at + (-(start + at)) % 8
    assert int.from_bytes(memory[place - start:place - start + 8], 'little') == place, at
del memory
out = os.open('/dev/null', os.O_WRONLY)
sent = os.sendfile(out, fd, start, most + 8192)
assert sent == most, sent
";
    let read = Command::new("python3").args(["-c", script]).arg(&path).arg(MOST.to_string()).output().unwrap();
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    drop(file);
    kernel::unmount(point.path(), false).unwrap();
    drop(mount);
    ended.recv_timeout(Duration::from_secs(20)).unwrap().unwrap();
}
