//! Performs steps on a subject and compares every answer with the reference.
//!
//! Guarantees: nothing is compared that the subject does not promise; what it may answer late (a name that has just changed
//! between file and directory) is asked for until it is right, within the subject's limit and no longer.

use super::steps::{NAMES, SIZES, STRIPE, Step, When};
use super::world::{Content, Meaning, Open, Version, World, below};
use super::{Line, Promise, Refusal, Stat, Subject};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Room for a name to be answered late, beyond what the subject says: the machine does other things too.
const SLACK: Duration = Duration::from_secs(3);

/// Performs a sequence; the first difference.
///
/// # Errors
/// The step, what was answered and what was wanted.
pub fn run(steps: &[Step], subject: &mut dyn Subject) -> Result<(), String> {
    let mut walk = Walk { world: World::default(), subject, puts: 0, changed: Vec::new() };
    for (number, step) in steps.iter().enumerate() {
        walk.step(step).map_err(|why| format!("step {number}, {step:?}: {why}"))?;
    }
    for descriptor in 0..walk.world.open.len() {
        walk.close(descriptor);
    }
    walk.subject.quiet().map_err(|why| format!("after the last step: {why}"))
}

struct Walk<'a> {
    world: World,
    subject: &'a mut dyn Subject,
    puts: u64,
    /// Names that changed between file, directory and nothing.
    changed: Vec<Changed>,
}

struct Changed {
    name: &'static [u8],
    at: Instant,
    /// It was a directory, or is one now: then also the name itself may be answered late, not only what lies below.
    itself: bool,
}

type Checked = Result<(), String>;

fn show(key: &[u8]) -> String {
    key.escape_ascii().to_string()
}

fn differs<T: std::fmt::Debug>(what: &str, got: &T, want: &T) -> Checked {
    Err(format!("{what} gave {got:?}, wanted {want:?}"))
}

fn same<T: std::fmt::Debug + PartialEq>(what: &str, got: &T, want: &T) -> Checked {
    if got == want { Ok(()) } else { differs(what, got, want) }
}

impl Walk<'_> {
    fn step(&mut self, step: &Step) -> Checked {
        match *step {
            Step::Put { name, size, width, when } => self.put(NAMES[name], SIZES[size], width, when),
            Step::Delete { name, when } => self.delete(NAMES[name], when),
            Step::List { name, room, plus } => {
                let key = NAMES.get(name).copied().unwrap_or_default();
                self.soon(key, true, &mut |walk| walk.list(key, room, plus))
            }
            Step::Stat { name, below: false } => self.soon(NAMES[name], false, &mut |walk| walk.stat(NAMES[name])),
            Step::Stat { name, below: true } => {
                let key = [NAMES[name], b"/never"].concat();
                self.soon(&key, false, &mut |walk| walk.stat(&key))
            }
            Step::Open { descriptor, name } => self.open(descriptor, NAMES[name]),
            Step::Reopen { descriptor } => match self.world.open[descriptor].clone() {
                Some(open) => self.open(descriptor, &open.key),
                None => Ok(()),
            },
            Step::Close { descriptor } => {
                self.close(descriptor);
                Ok(())
            }
            Step::Fstat { descriptor } => self.fstat(descriptor),
            Step::Read { descriptor, place, length } => match self.world.open[descriptor].clone() {
                Some(open) => self.read(descriptor, &open, place.offset(open.version.content.size), length),
                None => Ok(()),
            },
            Step::Map { descriptor, place, length } => match self.world.open[descriptor].clone() {
                Some(open) => self.mapped(descriptor, &open, place.offset(open.version.content.size), length),
                None => Ok(()),
            },
            Step::Seek { descriptor, place, data } => match self.world.open[descriptor].clone() {
                Some(open) => self.seek(descriptor, &open, place.offset(open.version.content.size), data),
                None => Ok(()),
            },
            Step::Write { name } => self.soon(NAMES[name], true, &mut |walk| walk.write(NAMES[name])),
            Step::Remount => {
                for descriptor in 0..self.world.open.len() {
                    self.close(descriptor);
                }
                self.subject.remount();
                self.changed.clear();
                Ok(())
            }
            Step::Restart { crash } => {
                self.subject.restart(crash);
                Ok(())
            }
            Step::Damage { name } => self.subject.damage(NAMES[name]),
        }
    }

    fn condition(&self, key: &[u8], when: When) -> Option<u64> {
        let current = self.world.names.get(key).map_or(0, |version| version.number);
        match when {
            When::Always => None,
            When::Absent => Some(0),
            When::Current => Some(current),
            When::Other => Some(current + 1),
        }
    }

    fn put(&mut self, key: &'static [u8], size: u64, width: u32, when: When) -> Checked {
        self.puts += 1;
        let mode = if self.puts.is_multiple_of(3) { 0o755 } else { 0o644 };
        let stripe = u32::try_from(STRIPE).unwrap_or(u32::MAX);
        let content = Content { seed: self.puts * 1000 + size, size, mode, stripe, width };
        let if_version = self.condition(key, when);
        let want = self.world.may_put(key, if_version);
        let got = self.subject.put(key, &content, if_version);
        same("the put", &got.as_ref().map(|_| ()), &want.as_ref().map(|_| ()))?;
        let before = self.meanings();
        if let Ok(number) = got {
            self.world.put(key, content, number)?;
        }
        self.note_changes(&before, key);
        Ok(())
    }

    fn delete(&mut self, key: &'static [u8], when: When) -> Checked {
        // "Only if it is absent" makes no sense of a delete.
        let if_version = self.condition(key, if when == When::Absent { When::Always } else { when });
        let want = self.world.may_delete(key, if_version);
        // Of a version that never was of a name that is not there: either refusal is right.
        let got = match (self.subject.delete(key, if_version), &want) {
            (Err(Refusal::Conflict), Err(Refusal::NotFound)) => Err(Refusal::NotFound),
            (got, _) => got,
        };
        same("the delete", &got, &want)?;
        let before = self.meanings();
        if got.is_ok() {
            self.world.names.remove(key);
        }
        self.note_changes(&before, key);
        Ok(())
    }

    /// Whether each name is a file (1), a directory (2), or nothing (0).
    fn meanings(&self) -> BTreeMap<&'static [u8], u8> {
        let kind = |name: &&'static [u8]| match self.world.meaning(name) {
            Meaning::File(_) => 1,
            Meaning::Directory => 2,
            Meaning::Nothing(_) => 0,
        };
        NAMES.iter().map(|name| (*name, kind(name))).collect()
    }

    fn note_changes(&mut self, before: &BTreeMap<&'static [u8], u8>, key: &'static [u8]) {
        let now = self.meanings();
        if self.subject.promise() == Promise::Snapshot && before.get(key) == Some(&1) {
            // An open snapshot answers `stat` for as long as the kernel trusts its name.
            self.changed.push(Changed { name: key, at: Instant::now(), itself: true });
        }
        for (name, kind) in now {
            let was = before.get(name).copied().unwrap_or(0);
            // A name that appears is seen at once.
            if was != kind && was != 0 {
                self.changed.push(Changed { name, at: Instant::now(), itself: was == 2 || kind == 2 });
            }
        }
    }

    /// Checks; where the name or one on its way has lately changed its kind, until it is right or the time for that is over.
    /// `by_kind`: the kernel decides by the kind of what it knows, and does not ask (a directory is wanted, or to write).
    fn soon(&mut self, key: &[u8], by_kind: bool, check: &mut dyn FnMut(&mut Self) -> Checked) -> Checked {
        loop {
            let result = check(self);
            let residue = self.subject.residue();
            if result.is_ok() || residue.is_zero() {
                return result;
            }
            let snapshot = self.subject.promise() == Promise::Snapshot;
            let itself = |of: &Changed| (of.itself || by_kind) && key == of.name;
            // A list with attributes asks for what lies below.
            let entry = |of: &Changed| snapshot && by_kind && below(of.name, key).is_some();
            let concerns = |of: &Changed| below(key, of.name).is_some() || itself(of) || entry(of);
            if !self.changed.iter().any(|of| concerns(of) && of.at.elapsed() < residue + SLACK) {
                return result;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn is_right(&self, stat: &Stat, version: Option<&Version>) -> bool {
        match version {
            Some(version) => {
                let content = &version.content;
                let number = !self.subject.numbers() || stat.ino == version.number;
                !stat.directory && number && stat.size == content.size && stat.mode == content.mode
            }
            None => stat.directory,
        }
    }

    fn stat(&mut self, key: &[u8]) -> Checked {
        let got = self.subject.stat(key);
        let want = self.world.meaning(key);
        let right = match (&got, &want) {
            (Ok(stat), Meaning::File(version)) => self.is_right(stat, Some(version)),
            (Ok(stat), Meaning::Directory) => self.is_right(stat, None),
            (Err(got), Meaning::Nothing(want)) => got == want,
            _ => false,
        };
        if right { Ok(()) } else { Err(format!("stat {} gave {got:?}, wanted {want:?}", show(key))) }
    }

    fn list(&mut self, key: &[u8], room: usize, plus: bool) -> Checked {
        let got = self.subject.list(key, room, plus);
        let want = self.world.list(key);
        let (lines, entries) = match (got, want) {
            (Err(got), Err(want)) => return same("the list", &got, &want),
            (Ok(lines), Ok(entries)) => (lines, entries),
            (got, want) => return Err(format!("the list gave {got:?}, wanted {want:?}")),
        };
        let sorted: BTreeMap<&[u8], &Line> = lines.iter().map(|line| (&line.name[..], line)).collect();
        if sorted.len() != lines.len() {
            return Err(format!("a name came twice: {lines:?}"));
        }
        let names: Vec<&[u8]> = entries.keys().map(Vec::as_slice).collect();
        same("the list", &sorted.keys().copied().collect::<Vec<_>>(), &names)?;
        for (name, version) in &entries {
            let line = sorted[&name[..]];
            same("the kind", &line.directory, &version.is_none())?;
            if let Some(version) = version.as_ref().filter(|_| self.subject.numbers()) {
                same("the inode number", &line.ino, &version.number)?;
            }
        }
        Ok(())
    }

    fn open(&mut self, descriptor: usize, key: &[u8]) -> Checked {
        self.close(descriptor);
        self.soon(key, false, &mut |walk| {
            let got = walk.subject.open(descriptor, key);
            match (got, walk.world.meaning(key)) {
                (Ok(()), Meaning::File(version)) => {
                    walk.world.open[descriptor] = Some(Open { key: key.to_vec(), version });
                    // What it is a descriptor of is fixed by now.
                    walk.fstat(descriptor)
                }
                (Ok(()), want) => {
                    walk.subject.close(descriptor);
                    Err(format!("open {} worked, wanted {want:?}", show(key)))
                }
                (Err(got), Meaning::Nothing(want)) => same("open", &got, &want),
                (Err(got), Meaning::Directory) => same("open", &got, &Errno::ISDIR),
                (Err(got), want) => Err(format!("open {} gave {got:?}, wanted {want:?}", show(key))),
            }
        })
    }

    fn close(&mut self, descriptor: usize) {
        if self.world.open[descriptor].take().is_some() {
            self.subject.close(descriptor);
        }
    }

    /// The errno of a call on a descriptor whose version was replaced.
    fn stale(&self, open: &Open) -> Option<Errno> {
        let strict = self.subject.promise() == Promise::Strict;
        (strict && !self.world.is_current(open)).then_some(Errno::STALE)
    }

    fn fstat(&mut self, descriptor: usize) -> Checked {
        let Some(open) = self.world.open[descriptor].clone() else { return Ok(()) };
        let got = self.subject.fstat(descriptor);
        let right = match (&got, self.stale(&open)) {
            (Ok(stat), None) => self.is_right(stat, Some(&open.version)),
            (Err(got), Some(want)) => *got == want,
            _ => false,
        };
        let current = self.world.is_current(&open);
        if right { Ok(()) } else { Err(format!("fstat gave {got:?} of {open:?}, which is current: {current}")) }
    }

    fn bytes(open: &Open, offset: u64, got: &[u8], length: usize) -> Checked {
        let want = open.version.content.bytes(offset, length);
        if got == want {
            return Ok(());
        }
        let place = got.iter().zip(&want).position(|(a, b)| a != b);
        let number = open.version.number;
        Err(format!(
            "{} bytes at {offset} of version {number}, wanted {}; the first that differs: {place:?}",
            got.len(),
            want.len()
        ))
    }

    fn read(&mut self, descriptor: usize, open: &Open, offset: u64, length: usize) -> Checked {
        match (self.subject.read(descriptor, offset, length), self.stale(open)) {
            (Ok(got), None) => Self::bytes(open, offset, &got, length),
            (Err(got), Some(want)) => same("the read", &got, &want),
            (Ok(got), Some(_)) => Err(format!("{} bytes of a version that was replaced", got.len())),
            (Err(got), None) => Err(format!("the read gave {got:?} where version {} is current", open.version.number)),
        }
    }

    fn mapped(&mut self, descriptor: usize, open: &Open, offset: u64, length: usize) -> Checked {
        if offset >= open.version.content.size {
            return Ok(()); // No page of the file is there.
        }
        // Complete, of the version that was opened, superseded or not.
        match self.subject.mapped(descriptor, offset, length) {
            Ok(got) => Self::bytes(open, offset, &got, length),
            Err(got) => Err(format!("gave {got:?} of version {}", open.version.number)),
        }
    }

    fn seek(&mut self, descriptor: usize, open: &Open, offset: u64, data: bool) -> Checked {
        let got = self.subject.seek(descriptor, offset, data);
        let size = open.version.content.size;
        let want = match data {
            _ if offset >= size => Err(Errno::NXIO),
            true => Ok(offset),
            false => Ok(size),
        };
        // Nothing is asked of the server for it: a descriptor keeps its size.
        if self.stale(open).is_some() && got == Err(Errno::STALE) { Ok(()) } else { same("lseek", &got, &want) }
    }

    fn write(&mut self, key: &[u8]) -> Checked {
        let Some(got) = self.subject.write(key) else { return Ok(()) };
        let want = match self.world.meaning(key) {
            Meaning::File(_) => Errno::ROFS,
            Meaning::Directory => Errno::ISDIR,
            Meaning::Nothing(errno) => errno,
        };
        same("open for writing", &got, &want)
    }
}
