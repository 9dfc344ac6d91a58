//! Who goes next, and what memory may be used for what: pure.
//!
//! Guarantees:
//! * [`FairQueue`]: entries wait by handle, in order; handles take turns by bytes (worst-case fair queueing), so that no
//!   entry sees more than three times its fair share of bytes served before it (what would be served until it is done, if all
//!   were served at once; or three of the largest entries, where that is more: they are not cut); small entries are a class of their own with half of the bytes while they wait; nothing starves. It is capped;
//!   an entry that waits costs its own record only.
//! * [`Ledger`] (I6): what is held together stays within three quarters of the arena; large reads leave a part of it to small
//!   ones; readahead holds at most half of what reads do not, fetched and unread bytes included.

use crate::clock::Time;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

/// Largest read, in bytes, that counts as small.
pub const SMALL: u64 = 64 << 10;
/// Most entries that wait in one queue; one more is refused.
pub const MAX_WAITING: usize = 16 << 10;
/// Least memory that large reads leave to small ones, bytes: one block of the arena can be cut for them.
const RESERVE: u64 = 1 << 20;
/// Virtual time is bytes in this many parts.
const SCALE: u128 = 1 << 20;

/// Two kinds of entries, each with half of the bytes while both wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// At most [`SMALL`] bytes.
    Small,
    /// More.
    Large,
}

impl Class {
    /// Of a read of so many bytes.
    pub fn of(bytes: u64) -> Class {
        if bytes <= SMALL { Class::Small } else { Class::Large }
    }

    fn place(self) -> usize {
        match self {
            Class::Small => 0,
            Class::Large => 1,
        }
    }
}

/// What a queue has done, a public contract (docs/metrics.md).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Small entries that wait now.
    pub waiting_small: u64,
    /// Large entries that wait now.
    pub waiting_large: u64,
    /// Bytes of all that wait now.
    pub waiting_bytes: u64,
    /// Small entries served after waiting.
    pub served_small: u64,
    /// Large entries served after waiting.
    pub served_large: u64,
    /// Bytes of what was served after waiting.
    pub served_bytes: u64,
    /// Entries refused because the queue was full.
    pub refused: u64,
    /// The longest that an entry waited until it was served or taken out.
    pub longest_wait: Duration,
}

#[derive(Debug)]
struct Entry {
    handle: u64,
    class: Class,
    bytes: u64,
    arrived: Time,
}

/// One handle's turn: the span of virtual time that its first entry takes.
#[derive(Clone, Copy, Debug)]
struct Turn {
    start: u128,
    finish: u128,
    order: u64,
}

/// What waits of one handle.
#[derive(Debug, Default)]
struct Line {
    ids: VecDeque<u64>,
    bytes: u64,
}

/// Handles of one class that take turns by bytes: of those whose turn could have begun by now if all were served at once,
/// the one goes first that would be done first. Virtual time is what each would have been served by then.
#[derive(Debug, Default)]
struct Flows {
    now: u128,
    lines: HashMap<u64, Line>,
    turns: HashMap<u64, Turn>,
    /// Turns that could have begun, by finish.
    ready: BTreeSet<(u128, u64, u64)>,
    /// Turns that could not, by start.
    later: BTreeSet<(u128, u64, u64)>,
    /// When each handle would have nothing left, if all were served at once: going away and coming back gains nothing.
    ends: HashMap<u64, u128>,
    /// The same, of those who would still be served.
    busy: BTreeSet<(u128, u64)>,
    orders: u64,
}

impl Flows {
    fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    fn push(&mut self, id: u64, handle: u64, bytes: u64) {
        let line = self.lines.entry(handle).or_default();
        line.ids.push_back(id);
        line.bytes += bytes;
        if line.ids.len() == 1 {
            let start = self.ends.get(&handle).map_or(self.now, |end| (*end).max(self.now));
            self.begin(handle, bytes, start);
        }
        self.mark(handle);
    }

    /// Notes when the handle would have nothing left.
    fn mark(&mut self, handle: u64) {
        let (Some(line), Some(turn)) = (self.lines.get(&handle), self.turns.get(&handle)) else { return };
        self.end_at(handle, turn.start + u128::from(line.bytes) * SCALE);
    }

    fn end_at(&mut self, handle: u64, end: u128) {
        if let Some(before) = self.ends.remove(&handle) {
            self.busy.remove(&(before, handle));
        }
        if end > self.now {
            self.ends.insert(handle, end);
            self.busy.insert((end, handle));
        }
    }

    fn begin(&mut self, handle: u64, bytes: u64, start: u128) {
        self.orders += 1;
        let turn = Turn { start, finish: start + u128::from(bytes.max(1)) * SCALE, order: self.orders };
        self.turns.insert(handle, turn);
        if turn.start <= self.now {
            self.ready.insert((turn.finish, turn.order, handle));
        } else {
            self.later.insert((turn.start, turn.order, handle));
        }
    }

    fn end(&mut self, handle: u64) -> Option<Turn> {
        let turn = self.turns.remove(&handle)?;
        self.ready.remove(&(turn.finish, turn.order, handle));
        self.later.remove(&(turn.start, turn.order, handle));
        Some(turn)
    }

    /// Whose turn it is.
    fn first(&mut self) -> Option<u64> {
        if self.ready.is_empty()
            && let Some(&(start, _, _)) = self.later.first()
        {
            self.now = self.now.max(start);
        }
        while let Some(&(start, order, handle)) = self.later.first().filter(|(start, _, _)| *start <= self.now) {
            self.later.remove(&(start, order, handle));
            if let Some(turn) = self.turns.get(&handle) {
                self.ready.insert((turn.finish, order, handle));
            }
        }
        self.ready.first().map(|&(_, _, handle)| handle)
    }

    /// So many bytes of the class were served: each that would be busy has its part of them.
    fn advance(&mut self, bytes: u64) {
        let mut left = u128::from(bytes) * SCALE;
        while let Some(&(end, handle)) = self.busy.first() {
            let busy = self.busy.len() as u128;
            let need = end.saturating_sub(self.now) * busy;
            if need > left {
                self.now += left / busy;
                return;
            }
            left -= need;
            self.now = self.now.max(end);
            self.busy.remove(&(end, handle));
            self.ends.remove(&handle);
        }
    }

    /// An entry of the handle is gone: was it the first, the next one has its turn. `paid`: it was served.
    fn gone(&mut self, handle: u64, id: u64, bytes: u64, paid: bool, next: impl Fn(u64) -> Option<u64>) {
        let Some(line) = self.lines.get_mut(&handle) else { return };
        line.bytes = line.bytes.saturating_sub(bytes);
        if line.ids.front() != Some(&id) {
            // Somewhere in the middle: it is passed over when it comes to the front.
            return self.mark(handle);
        }
        while line.ids.front().is_some_and(|&id| next(id).is_none()) {
            line.ids.pop_front();
        }
        let first = line.ids.front().and_then(|&id| next(id));
        let Some(turn) = self.end(handle) else { return };
        let at = if paid { turn.finish } else { turn.start };
        match first {
            Some(bytes) => {
                self.begin(handle, bytes, at);
                self.mark(handle);
            }
            None => {
                self.lines.remove(&handle);
                self.end_at(handle, at);
            }
        }
        if self.turns.is_empty() {
            // Nobody waits: there is nothing to be fair about, and time begins anew.
            *self = Flows::default();
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct FairQueue {
    entries: HashMap<u64, Entry>,
    classes: [Flows; 2],
    /// Bytes served of each class, made equal when one of them begins to wait.
    served: [u64; 2],
    account: Account,
}

impl FairQueue {
    /// Entries that wait.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether this one waits.
    pub fn contains(&self, id: u64) -> bool {
        self.entries.contains_key(&id)
    }

    /// See [`Account`].
    pub fn account(&self) -> Account {
        self.account
    }

    /// An entry begins to wait, behind the others of its handle and class. False: the queue is full, and it does not.
    pub fn push(&mut self, now: Time, id: u64, handle: u64, class: Class, bytes: u64) -> bool {
        if self.entries.len() >= MAX_WAITING || self.entries.contains_key(&id) {
            self.account.refused += 1;
            return false;
        }
        let place = class.place();
        if self.classes[place].is_empty() {
            // It has missed nothing while nobody of it waited, and owes nothing.
            if self.classes[1 - place].is_empty() {
                self.served = [0, 0];
            } else {
                self.served[place] = self.served[place].max(self.served[1 - place]);
            }
        }
        self.entries.insert(id, Entry { handle, class, bytes, arrived: now });
        self.classes[place].push(id, handle, bytes);
        self.account.waiting_bytes += bytes;
        *self.waiting(class) += 1;
        true
    }

    fn waiting(&mut self, class: Class) -> &mut u64 {
        match class {
            Class::Small => &mut self.account.waiting_small,
            Class::Large => &mut self.account.waiting_large,
        }
    }

    /// Whose turn it is: of the class that would have been served less after it.
    pub fn first(&mut self) -> Option<(u64, Class)> {
        let [small, large] = [Class::Small, Class::Large].map(|class| self.first_of(class));
        let bytes = |id: u64| self.entries.get(&id).map_or(0, |entry| entry.bytes);
        match (small, large) {
            (None, None) => None,
            (Some(small), None) => Some((small, Class::Small)),
            (None, Some(large)) => Some((large, Class::Large)),
            (Some(small), Some(large)) => {
                let after = |class: Class, id| self.served[class.place()].saturating_add(bytes(id));
                let small_first = after(Class::Small, small) <= after(Class::Large, large);
                Some(if small_first { (small, Class::Small) } else { (large, Class::Large) })
            }
        }
    }

    /// The first of a class.
    pub fn first_of(&mut self, class: Class) -> Option<u64> {
        let flows = &mut self.classes[class.place()];
        let handle = flows.first()?;
        flows.lines.get(&handle).and_then(|line| line.ids.front()).copied()
    }

    /// The entry was served: its handle pays for it.
    pub fn served(&mut self, now: Time, id: u64) {
        let Some(entry) = self.take(now, id) else { return };
        let place = entry.class.place();
        self.served[place] = self.served[place].saturating_add(entry.bytes);
        self.account.served_bytes += entry.bytes;
        match entry.class {
            Class::Small => self.account.served_small += 1,
            Class::Large => self.account.served_large += 1,
        }
        self.next_turn(&entry, id, true);
    }

    /// The entry waits no longer (its time was over).
    pub fn remove(&mut self, now: Time, id: u64) {
        if let Some(entry) = self.take(now, id) {
            self.next_turn(&entry, id, false);
        }
    }

    fn take(&mut self, now: Time, id: u64) -> Option<Entry> {
        let entry = self.entries.remove(&id)?;
        self.account.waiting_bytes -= entry.bytes;
        *self.waiting(entry.class) -= 1;
        self.account.longest_wait = self.account.longest_wait.max(now.since(entry.arrived));
        Some(entry)
    }

    fn next_turn(&mut self, entry: &Entry, id: u64, paid: bool) {
        let entries = &self.entries;
        let flows = &mut self.classes[entry.class.place()];
        if paid {
            flows.advance(entry.bytes);
        }
        flows.gone(entry.handle, id, entry.bytes, paid, |id| entries.get(&id).map(|entry| entry.bytes));
    }

    /// Nothing waits any more.
    pub fn clear(&mut self) {
        let account = self.account;
        *self = FairQueue::default();
        self.account = Account { waiting_small: 0, waiting_large: 0, waiting_bytes: 0, ..account };
    }
}

/// What memory is held for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Use {
    /// A read of this class waits for it.
    Read(Class),
    /// Nobody has asked for it yet.
    Ahead,
}

impl Use {
    fn place(self) -> usize {
        match self {
            Use::Read(class) => class.place(),
            Use::Ahead => 2,
        }
    }
}

/// Bytes of landings in flight, waiting to be sent, and in quarantine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ledger {
    total: u64,
    held: [u64; 3],
}

impl Ledger {
    /// For an arena of so many bytes.
    pub fn new(total: u64) -> Ledger {
        Ledger { total, held: [0; 3] }
    }

    /// All that is held.
    pub fn held(&self) -> u64 {
        self.held.iter().sum()
    }

    /// What is held for readahead.
    pub fn ahead(&self) -> u64 {
        self.held[2]
    }

    /// Never exceeded.
    pub fn limit(&self) -> u64 {
        self.total / 4 * 3
    }

    /// What large reads leave to small ones.
    pub fn reserve(&self) -> u64 {
        RESERVE.max(self.total / 16).min(self.limit() / 3)
    }

    /// Whether so many bytes more may be held for that. `unread`: bytes that were fetched ahead and not read yet.
    pub fn fits(&self, what: Use, bytes: u64, unread: u64) -> bool {
        let (all, limit, reserve) = (self.held() + bytes, self.limit(), self.reserve());
        let large = self.held[Class::Large.place()];
        all <= limit
            && match what {
                Use::Read(Class::Small) => true,
                // One read must be possible, however small the arena.
                Use::Read(Class::Large) => large == 0 || large + bytes <= limit - reserve,
                Use::Ahead => {
                    let reads = self.held[0] + self.held[1];
                    all <= limit - reserve && self.held[2] + unread + bytes <= (self.total - reads.min(self.total)) / 2
                }
            }
    }

    /// Whether a small read may go before a large one that waits for memory: only in what is set aside for small ones.
    pub fn fits_overtaking(&self, bytes: u64) -> bool {
        self.held() + bytes <= self.limit() && self.held[Class::Small.place()] + bytes <= self.reserve()
    }

    /// Holds. The caller has asked whether it fits.
    pub fn take(&mut self, what: Use, bytes: u64) {
        self.held[what.place()] += bytes;
    }

    /// Holds no longer.
    pub fn give(&mut self, what: Use, bytes: u64) {
        let held = &mut self.held[what.place()];
        debug_assert!(*held >= bytes, "more given back than taken");
        *held = held.saturating_sub(bytes);
    }
}

#[cfg(test)]
#[path = "admission_tests.rs"]
mod tests;
