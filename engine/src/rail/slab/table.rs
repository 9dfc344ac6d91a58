//! Which piece is read, joined, served, kept, evicted: pure bookkeeping, no memory, no disk.
//!
//! Guarantees:
//! * Never more memory than the caller's allocator gives; what finds none waits in line, first come first served, and nobody
//!   who comes later goes before it (I6).
//! * A piece that is being read, or whose bytes somebody still uses, is never dropped (I4): only what nobody uses is evicted,
//!   the longest unused first.
//! * A piece is found by its identity, never by the file it came from; what was read badly, or was forgotten, is found by nobody.
//! * Of one source no more than its share of reads is under way, so that one that hangs leaves room for the others: whoever asks
//!   for another goes before those who wait for it.
//! * A second request for a piece that is being read joins that read.

use super::Identity;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, VecDeque};

/// Bytes of a piece at least: a page of the disk.
const SMALLEST: u32 = 4096;
/// How many kept pieces that begin before the wanted one are looked at for one that has it inside.
const LOOK_BACK: usize = 4;

/// What somebody wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Want {
    /// What it is; none: bytes that nobody else can ask for.
    pub(super) identity: Option<Identity>,
    pub(super) offset: u64,
    /// At most 1 MiB.
    pub(super) length: u32,
}

impl Want {
    /// Bytes of memory that it takes.
    pub(super) fn size(&self) -> u32 {
        self.length.max(SMALLEST).checked_next_power_of_two().unwrap_or(u32::MAX)
    }
    fn end(&self) -> u64 {
        self.offset.saturating_add(u64::from(self.length))
    }
}

/// What is to be done.
#[derive(Debug)]
pub(super) enum Step<M, B, W> {
    /// Read the piece into this memory, then call [`Table::done`].
    Read { ticket: u64, memory: M, waiter: W },
    /// The bytes are there, from `skip` on; they are in use until [`Table::release`].
    Serve { ticket: u64, bytes: B, skip: u32, waiter: W },
}

/// What has been done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) hits: u64,
    pub(super) misses: u64,
    pub(super) joins: u64,
    pub(super) evicted: u64,
    /// Requests that found no memory when their turn came.
    pub(super) waited: u64,
}

#[derive(Debug)]
enum Bytes<B, W> {
    /// Being read: who joined.
    Reading(Vec<(u32, W)>),
    Ready(B),
}

#[derive(Debug)]
struct Entry<B, W> {
    want: Want,
    bytes: Bytes<B, W>,
    /// Who uses the bytes now.
    users: usize,
    /// Found by those who ask for it; else dropped with its last user.
    kept: bool,
    /// Its place among those that nobody uses.
    tick: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Table<B, W> {
    /// Reads of one source at once.
    limit: usize,
    reading: HashMap<[u8; 16], usize>,
    entries: HashMap<u64, Entry<B, W>>,
    places: BTreeMap<(Identity, u64, Reverse<u32>), u64>,
    /// Nobody uses these; the longest unused first.
    idle: BTreeMap<u64, u64>,
    line: VecDeque<(Want, W)>,
    front_waited: bool,
    next: u64,
    used: u64,
    counts: Counts,
}

impl<B, W> Default for Table<B, W> {
    fn default() -> Self {
        Table::new(usize::MAX)
    }
}

impl<B, W> Table<B, W> {
    /// At most `limit` reads of one source (see [`Identity::source`]) are under way at once.
    pub(super) fn new(limit: usize) -> Self {
        Table {
            limit,
            reading: HashMap::new(),
            entries: HashMap::new(),
            places: BTreeMap::new(),
            idle: BTreeMap::new(),
            line: VecDeque::new(),
            front_waited: false,
            next: 0,
            used: 0,
            counts: Counts::default(),
        }
    }
}

impl<B: Clone, W> Table<B, W> {
    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    /// Bytes that pieces take.
    pub(super) fn used(&self) -> u64 {
        self.used
    }

    /// Whether anybody waits.
    pub(super) fn has_line(&self) -> bool {
        !self.line.is_empty()
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The kept piece that has all of this, and where in it.
    fn find(&self, want: &Want) -> Option<(u64, u32)> {
        let identity = want.identity?;
        if let Some(ticket) = self.places.get(&(identity, want.offset, Reverse(want.length))) {
            return Some((*ticket, 0));
        }
        let first = (identity, 0, Reverse(u32::MAX));
        // Of those that begin at one place the longest comes first, so from behind it comes last.
        let until = (identity, want.offset, Reverse(0));
        let mut near = self.places.range(first..=until).rev().take(LOOK_BACK);
        near.find_map(|((_, offset, Reverse(length)), ticket)| {
            let skip = u32::try_from(want.offset - offset).ok()?;
            (skip.checked_add(want.length)? <= *length).then_some((*ticket, skip))
        })
    }

    /// Stands in line.
    pub(super) fn push(&mut self, want: Want, waiter: W) {
        self.line.push_back((want, waiter));
    }

    /// The bytes, if they are there and nobody stands in line.
    pub(super) fn hit(&mut self, want: &Want) -> Option<(u64, B, u32)> {
        if !self.line.is_empty() {
            return None;
        }
        let (ticket, skip) = self.find(want)?;
        let bytes = self.take(ticket)?;
        self.counts.hits += 1;
        Some((ticket, bytes, skip))
    }

    /// Takes the bytes of a piece that is there.
    fn take(&mut self, ticket: u64) -> Option<B> {
        let entry = self.entries.get_mut(&ticket)?;
        let Bytes::Ready(bytes) = &entry.bytes else { return None };
        if entry.users == 0 {
            self.idle.remove(&entry.tick);
        }
        entry.users += 1;
        Some(bytes.clone())
    }

    /// The next thing to do, as far as there is memory for it.
    pub(super) fn next<M>(&mut self, mut memory: impl FnMut(u32) -> Option<M>) -> Option<Step<M, B, W>> {
        loop {
            let at = self.turn()?;
            let want = self.line.get(at)?.0;
            if let Some((ticket, skip)) = self.find(&want) {
                let (_, waiter) = self.pass(at)?;
                if let Some(bytes) = self.take(ticket) {
                    self.counts.hits += 1;
                    return Some(Step::Serve { ticket, bytes, skip, waiter });
                }
                self.counts.joins += 1;
                if let Some(Entry { bytes: Bytes::Reading(joined), .. }) = self.entries.get_mut(&ticket) {
                    joined.push((skip, waiter));
                }
                continue;
            }
            let memory = loop {
                if let Some(memory) = memory(want.size()) {
                    break memory;
                }
                if !self.evict() {
                    if !std::mem::replace(&mut self.front_waited, true) {
                        self.counts.waited += 1;
                    }
                    return None;
                }
            };
            let (want, waiter) = self.pass(at)?;
            self.counts.misses += 1;
            let ticket = self.number();
            let kept = want.identity.is_some();
            if let Some(identity) = want.identity {
                *self.reading.entry(identity.source()).or_default() += 1;
                self.places.insert((identity, want.offset, Reverse(want.length)), ticket);
            }
            self.used += u64::from(want.size());
            let entry = Entry { want, bytes: Bytes::Reading(Vec::new()), users: 0, kept, tick: 0 };
            self.entries.insert(ticket, entry);
            return Some(Step::Read { ticket, memory, waiter });
        }
    }

    /// Whose turn it is: the first whose source has not its share of reads, or who needs none or joins one. Those of one source
    /// keep their order: who waits for memory that somebody holds who came later waits for ever.
    fn turn(&self) -> Option<usize> {
        let mut blocked: Vec<[u8; 16]> = Vec::new();
        self.line.iter().position(|(want, _)| {
            let Some(source) = want.identity.map(|identity| identity.source()) else { return true };
            if blocked.contains(&source) {
                return false;
            }
            let has_room = self.reading.get(&source).is_none_or(|reading| *reading < self.limit);
            let goes = has_room || self.find(want).is_some();
            if !goes {
                blocked.push(source);
            }
            goes
        })
    }

    fn pass(&mut self, at: usize) -> Option<(Want, W)> {
        self.front_waited = false;
        self.line.remove(at)
    }

    /// The read is over. `good`: its bytes may be served to others from here on. Gives those who joined it, with where their
    /// part begins; each of them, and whoever asked first, uses the bytes until [`Table::release`].
    pub(super) fn done(&mut self, ticket: u64, bytes: B, good: bool) -> Vec<(u32, W)> {
        if !good {
            self.hide(ticket);
        }
        let Some(entry) = self.entries.get_mut(&ticket) else { return Vec::new() };
        let joined = match std::mem::replace(&mut entry.bytes, Bytes::Ready(bytes)) {
            Bytes::Reading(joined) => {
                if let Some(source) = entry.want.identity.map(|identity| identity.source())
                    && let Some(reading) = self.reading.get_mut(&source)
                {
                    *reading -= 1;
                    if *reading == 0 {
                        self.reading.remove(&source);
                    }
                }
                joined
            }
            Bytes::Ready(_) => Vec::new(),
        };
        entry.users = 1 + joined.len();
        joined
    }

    /// Nobody finds it any more.
    fn hide(&mut self, ticket: u64) {
        let Some(entry) = self.entries.get_mut(&ticket) else { return };
        entry.kept = false;
        if let Some(identity) = entry.want.identity {
            let place = (identity, entry.want.offset, Reverse(entry.want.length));
            if self.places.get(&place) == Some(&ticket) {
                self.places.remove(&place);
            }
        }
    }

    /// One user less.
    pub(super) fn release(&mut self, ticket: u64) {
        let tick = self.number();
        let Some(entry) = self.entries.get_mut(&ticket) else { return };
        entry.users = entry.users.saturating_sub(1);
        if entry.users > 0 {
            return;
        }
        if entry.kept {
            entry.tick = tick;
            self.idle.insert(tick, ticket);
        } else {
            self.drop_entry(ticket);
        }
    }

    fn drop_entry(&mut self, ticket: u64) {
        if let Some(entry) = self.entries.remove(&ticket) {
            self.used = self.used.saturating_sub(u64::from(entry.want.size()));
        }
    }

    /// Drops the longest unused piece.
    fn evict(&mut self) -> bool {
        let Some((_, ticket)) = self.idle.pop_first() else { return false };
        self.hide(ticket);
        self.drop_entry(ticket);
        self.counts.evicted += 1;
        true
    }

    /// Pieces with this part of this identity are found by nobody any more.
    pub(super) fn forget(&mut self, want: &Want) {
        let Some(identity) = want.identity else { return };
        let all = (identity, 0, Reverse(u32::MAX))..(identity, want.end(), Reverse(u32::MAX));
        let touches = |(_, offset, Reverse(length)): &(Identity, u64, Reverse<u32>)| {
            offset.saturating_add(u64::from(*length)) > want.offset
        };
        let found: Vec<u64> = self.places.range(all).filter(|(place, _)| touches(place)).map(|(_, at)| *at).collect();
        for ticket in found {
            self.hide(ticket);
            let idle =
                self.entries.get(&ticket).filter(|entry| matches!(entry.bytes, Bytes::Ready(_)) && entry.users == 0);
            if let Some(tick) = idle.map(|entry| entry.tick) {
                self.idle.remove(&tick);
                self.drop_entry(ticket);
            }
        }
    }

    /// Everybody who waits, in line or for a read.
    pub(super) fn end(&mut self) -> Vec<W> {
        let mut all: Vec<W> = self.line.drain(..).map(|(_, waiter)| waiter).collect();
        for entry in self.entries.values_mut() {
            if let Bytes::Reading(joined) = &mut entry.bytes {
                all.extend(joined.drain(..).map(|(_, waiter)| waiter));
            }
        }
        all
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
