//! A real mount as a subject.
//!
//! Guarantees: every sequence has a directory of its own in the one mount of its subject; what is put and deleted goes past
//! the mount. A mapping is read by a helper process, which a SIGBUS may end.

use super::plain::{errno, list, open, path, read, seek, sendfile, stat_of};
use super::world::Content;
use super::{DESCRIPTORS, Line, Promise, Refusal, Stat, Subject, bare};
use crate::cluster::{Cluster, NAMESPACE, Plan};
use crate::mount::Mount;
use crate::process::Process;
use crate::quiet::assert_quiet;
use railfs_engine::client::{Client, Config, Found};
use railfs_proto::name::ObjectName;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::File;
use std::io::{BufRead, BufReader, IoSliceMut, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// How long the kernel trusts a name.
const ENTRY_TTL: Duration = Duration::from_secs(1);
/// What keeps a sequence's directory there while it is empty.
const KEEP: &[u8] = b".keep";
/// Descriptors whose mappings are read (the others are sent with `sendfile`), and the one that is opened with O_DIRECT: what
/// is sent from such a one is read past the page cache, so it is a read like any other.
const MAPPED: std::ops::Range<usize> = 0..3;
const DIRECT: usize = 2;

/// Opens, maps at the first touch, and reads in a child of its own: SIGBUS ends that one.
const HELPER: &str = "
import mmap, os, sys
files = {}
sizes = {}
def touch(number, offset, length):
    # Asking for the size again would be answered ESTALE once it is replaced; what is mapped is not.
    fd, size = files[number], sizes[number]
    for kind in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
        try:
            return mmap.mmap(fd, size, kind, mmap.PROT_READ)[offset:offset+length]
        except OSError as e:
            if e.errno != 19: raise
for line in sys.stdin:
    words = line.split()
    number = int(words[1])
    if words[0] == 'open':
        if number in files: os.close(files.pop(number))
        try:
            files[number] = os.open(bytes.fromhex(words[2]), os.O_RDONLY)
            sizes[number] = os.fstat(files[number]).st_size
            print('ok')
        except OSError as e: print('errno', e.errno)
    elif words[0] == 'close':
        if number in files: os.close(files.pop(number))
        print('ok')
    else:
        r, w = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(r)
            try:
                out = b'ok ' + touch(number, int(words[2]), int(words[3])).hex().encode()
            except OSError as e: out = b'errno %d' % e.errno
            with os.fdopen(w, 'wb') as f: f.write(out)
            os._exit(0)
        os.close(w)
        with os.fdopen(r, 'rb') as f: out = f.read()
        _, status = os.waitpid(child, 0)
        print(out.decode() if status == 0 else 'signal %d' % os.WTERMSIG(status))
    sys.stdout.flush()
";

struct Helper {
    process: Process,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Helper {
    fn start() -> Helper {
        let mut command = Command::new("python3");
        command.args(["-c", HELPER]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Process::start(&mut command);
        let (input, output) = (process.child().stdin.take(), process.child().stdout.take());
        let (Some(input), Some(output)) = (input, output) else { panic!("the helper has no pipes") };
        Helper { process, input, output: BufReader::new(output) }
    }

    fn ask(&mut self, line: &str) -> Result<Vec<u8>, Errno> {
        let mut said = String::new();
        writeln!(self.input, "{line}").unwrap_or_else(|error| panic!("helper: {error}"));
        self.output.read_line(&mut said).unwrap_or_else(|error| panic!("helper: {error}"));
        let words: Vec<&str> = said.split_whitespace().collect();
        match words[..] {
            ["ok"] => Ok(Vec::new()),
            ["ok", hex] => {
                let digit =
                    |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok()).unwrap_or(0);
                Ok(hex
                    .as_bytes()
                    .chunks(2)
                    .map(|pair| pair.iter().fold(0, |all, byte| all << 4 | digit(*byte)))
                    .collect())
            }
            // A page that cannot be had: what ESTALE is to a mapping.
            ["signal", "7"] => Err(Errno::STALE),
            ["errno", number] => Err(number.parse().map_or(Errno::IO, Errno::from_raw_os_error)),
            _ => panic!("the helper said {said:?} to {line:.100} (process {})", self.process.pid()),
        }
    }
}

/// See the module.
pub struct Mounted {
    open: [Option<File>; DESCRIPTORS],
    helper: Helper,
    mount: Option<Mount>,
    writer: Arc<Client>,
    cluster: Cluster,
    sequences: u64,
    top: String,
    options: Vec<String>,
    mounts: usize,
}

impl std::fmt::Debug for Mounted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mounted").field("top", &self.top).finish_non_exhaustive()
    }
}

impl Mounted {
    /// With a server and a mount of its own; each mount takes the next of these options (each must have `metadata_ttl=0s`:
    /// the reference knows no time).
    ///
    /// # Panics
    /// They do not start.
    pub fn new(options: &[&str]) -> Mounted {
        let mut cluster = Cluster::start(&Plan { directories: 3, retention: "10 s", ..Plan::default() });
        let addresses = vec![cluster.control[0].to_string()];
        let writer = Client::connect(Config { addresses, arena: 8 << 20, ..Config::default() });
        let writer = writer.unwrap_or_else(|error| panic!("{error}"));
        let mount = Some(cluster.mount("", options[0]));
        let options = options.iter().map(|options| (*options).to_owned()).collect();
        let helper = Helper::start();
        let top = String::new();
        let mut mounted =
            Mounted { open: Default::default(), helper, mount, writer, cluster, sequences: 0, top, options, mounts: 0 };
        mounted.begin();
        mounted
    }

    /// A new sequence, in a directory of its own.
    ///
    /// # Panics
    /// It cannot be made.
    pub fn begin(&mut self) {
        self.sequences += 1;
        self.top = format!("s{}", self.sequences);
        let content = Content { seed: 0, size: 0, mode: 0o644, stripe: 1 << 20, width: 1 };
        let kept = bare::put(&self.writer, &self.name(KEEP), &content, None);
        assert!(kept.is_ok(), "{kept:?}");
    }

    /// Ends it: all must be quiet.
    pub fn end(mut self) {
        self.open = Default::default();
        for number in MAPPED {
            let _ = self.helper.ask(&format!("close {number}"));
        }
        self.writer.close();
        if let Some(mount) = self.mount.take() {
            assert_quiet(&self.cluster, &[&mount]);
            mount.stop();
        }
    }

    fn name(&self, key: &[u8]) -> ObjectName {
        let key = [self.top.as_bytes(), b"/", key].concat();
        ObjectName::new(NAMESPACE, key).unwrap_or_else(|error| panic!("{error}"))
    }
    fn at(&self, key: &[u8]) -> PathBuf {
        let mount = self.mount.as_ref().unwrap_or_else(|| panic!("it is not mounted"));
        path(&mount.at(&self.top), key)
    }
    fn file(&self, descriptor: usize) -> Result<&File, Errno> {
        self.open[descriptor].as_ref().ok_or(Errno::BADF)
    }
}

impl Subject for Mounted {
    fn promise(&self) -> Promise {
        let snapshot = self.options[self.mounts % self.options.len()].contains("mode=snapshot");
        if snapshot { Promise::Snapshot } else { Promise::Strict }
    }
    fn numbers(&self) -> bool {
        true
    }
    fn residue(&self) -> Duration {
        ENTRY_TTL
    }
    fn put(&mut self, key: &[u8], content: &Content, if_version: Option<u64>) -> Result<u64, Refusal> {
        bare::put(&self.writer, &self.name(key), content, if_version)
    }
    fn delete(&mut self, key: &[u8], if_version: Option<u64>) -> Result<(), Refusal> {
        self.writer.delete(&self.name(key), if_version).map(|_| ()).map_err(|error| bare::refusal(&error))
    }
    fn list(&mut self, key: &[u8], _room: usize, plus: bool) -> Result<Vec<Line>, Errno> {
        let place = self.at(key);
        let mut lines = list(&place)?;
        if key.is_empty() {
            lines.retain(|line| line.name != KEEP);
        }
        if plus {
            // As `ls -l` does: what the list brought with it, or what is asked for now, is the same.
            for line in &lines {
                let meta = path(&place, &line.name).symlink_metadata().map_err(|error| errno(&error))?;
                if stat_of(&meta).ino != line.ino {
                    return Err(Errno::NOTUNIQ);
                }
            }
        }
        Ok(lines)
    }
    fn stat(&mut self, key: &[u8]) -> Result<Stat, Errno> {
        self.at(key).symlink_metadata().map(|meta| stat_of(&meta)).map_err(|error| errno(&error))
    }

    fn open(&mut self, descriptor: usize, key: &[u8]) -> Result<(), Errno> {
        let place = self.at(key);
        let more = if descriptor == DIRECT { OFlags::DIRECT } else { OFlags::empty() };
        let file = open(&place, more)?;
        self.open[descriptor] = Some(file);
        if MAPPED.contains(&descriptor) {
            let hex: String = place.as_os_str().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
            self.helper.ask(&format!("open {descriptor} {hex}"))?;
        }
        Ok(())
    }
    fn close(&mut self, descriptor: usize) {
        self.open[descriptor] = None;
        if MAPPED.contains(&descriptor) {
            let _ = self.helper.ask(&format!("close {descriptor}"));
        }
    }
    fn fstat(&mut self, descriptor: usize) -> Result<Stat, Errno> {
        self.file(descriptor)?.metadata().map(|meta| stat_of(&meta)).map_err(|error| errno(&error))
    }

    fn read(&mut self, descriptor: usize, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
        let file = self.file(descriptor)?;
        if !length.is_multiple_of(3) {
            return read(file, offset, length);
        }
        // In two pieces.
        let (mut first, mut second) = (vec![0; length / 3], vec![0; length - length / 3]);
        let got = rustix::io::preadv(file, &mut [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)], offset)?;
        first.extend(second);
        first.truncate(got);
        Ok(first)
    }
    fn mapped(&mut self, descriptor: usize, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
        if MAPPED.contains(&descriptor) {
            return self.helper.ask(&format!("map {descriptor} {offset} {length}"));
        }
        sendfile(self.file(descriptor)?, offset, length)
    }
    fn seek(&mut self, descriptor: usize, offset: u64, data: bool) -> Result<u64, Errno> {
        seek(self.file(descriptor)?, offset, data)
    }
    fn write(&mut self, key: &[u8]) -> Option<Errno> {
        let opened = std::fs::OpenOptions::new().write(true).open(self.at(key));
        Some(opened.err().map_or(Errno::ALREADY, |error| errno(&error)))
    }

    fn remount(&mut self) {
        if let Some(mount) = self.mount.take() {
            mount.stop();
        }
        self.mounts += 1;
        let options = self.options[self.mounts % self.options.len()].clone();
        self.mount = Some(self.cluster.mount("", &options));
    }
    fn restart(&mut self, crash: bool) {
        if crash {
            self.cluster.kill();
        } else {
            self.cluster.stop();
        }
        self.cluster.serve();
    }
    fn damage(&mut self, key: &[u8]) -> Result<(), String> {
        let name = self.name(key);
        match Client::wait(|done| self.writer.lookup(&name, done)) {
            Ok(Found::Object(object)) => bare::damage(&self.cluster.directories, object.descriptor.version),
            other => Err(format!("{other:?}")),
        }
    }
    fn quiet(&mut self) -> Result<(), String> {
        Ok(()) // At the end, once for all.
    }
}
