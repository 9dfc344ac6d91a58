//! The server of a schedule: its store, its runs, and what it answers.
//!
//! Guarantees: it keeps to the protocol (a check and a lookup are held while their name is published, a slot's word moves with
//! each publish, a run knows nothing of another one's words), but for the faults that are asked of a port.

use crate::rail::{Bulk, Handler, Incoming, Replier};
use bytes::Bytes;
use prost::Message;
use railfs_proto::checksum::page_checksums;
use railfs_proto::descriptor::{Attributes, Descriptor, Id, Proof, Replica};
use railfs_proto::layout::{Place, Striping};
use railfs_proto::name::ObjectName;
use railfs_proto::reply::{Lookup, ok_outcome};
use railfs_proto::slot::Slot;
use railfs_proto::v1;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Bytes of a page.
pub(super) const PAGE: u32 = 4096;
/// Names of the store. A version's name is the version modulo this.
pub(super) const NAMES: u64 = 2;
/// Versions of a name that are kept, the current one included.
const KEPT: u64 = 3;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Layout of an object: one over two components, one of a few pages.
pub(super) fn striping(version: u64) -> Striping {
    let made = match version % NAMES {
        0 => Striping::new(90_000, PAGE, 4 * PAGE, 2),
        _ => Striping::new(9_000, PAGE, PAGE, 1),
    };
    made.unwrap_or_else(|error| panic!("the layouts here are valid: {error}"))
}

/// Name of an object.
pub(super) fn name(number: u64) -> ObjectName {
    ObjectName::new("ns", format!("key{number}")).unwrap_or_else(|error| panic!("the names here are valid: {error}"))
}

/// Which name that is.
pub(super) fn number(name: &ObjectName) -> Option<u64> {
    (0..NAMES).find(|&number| self::name(number) == *name)
}

/// The bytes of a version: another one every [`RUN`], so that they are cheap to make.
pub(super) fn content(version: u64, from: u64, length: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length);
    while bytes.len() < length {
        let at = from + bytes.len() as u64;
        let run = (RUN - at % RUN).min((length - bytes.len()) as u64) as usize;
        bytes.resize(bytes.len() + run, byte(version, at));
    }
    bytes
}

/// So many bytes of an object in a row are the same.
pub(super) const RUN: u64 = 64;

/// One of them.
pub(super) fn byte(version: u64, at: u64) -> u8 {
    let mixed = version.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (at / RUN).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed >> 40) as u8
}

/// What is durable: the current version of each name, and the next one of each.
pub(super) struct Store {
    versions: [AtomicU64; NAMES as usize],
    slots: u32,
}

impl Store {
    /// `shared`: both names have one slot.
    pub(super) fn new(shared: bool) -> Arc<Store> {
        let first = [AtomicU64::new(2000), AtomicU64::new(2001)];
        Arc::new(Store { versions: first, slots: if shared { 1 } else { NAMES as u32 } })
    }

    pub(super) fn version(&self, name: u64) -> u64 {
        self.versions[(name % NAMES) as usize].load(Ordering::SeqCst)
    }

    /// The next version of the name is current from now on. Gives both.
    pub(super) fn advance(&self, name: u64) -> (u64, u64) {
        let before = self.versions[(name % NAMES) as usize].fetch_add(NAMES, Ordering::SeqCst);
        (before, before + NAMES)
    }

    fn slot(&self, name: u64) -> u32 {
        (name % u64::from(self.slots)) as u32
    }

    fn reclaimed(&self, version: u64) -> bool {
        version + KEPT * NAMES <= self.version(version)
    }
}

struct Words {
    slots: Vec<Slot>,
    /// Names that are being published.
    publishing: Vec<u64>,
    /// Requests that wait for a publish to end, each with its port.
    held: Vec<(Arc<Faults>, Incoming)>,
}

/// One run of the server's software.
pub(super) struct Run {
    pub(super) incarnation: u64,
    pub(super) words: Arc<[AtomicU64]>,
    store: Arc<Store>,
    state: Mutex<Words>,
    pub(super) log: Arc<Log>,
}

/// What the server met, for the table of kinds.
#[derive(Default)]
pub(super) struct Log {
    pub(super) held: AtomicU64,
    pub(super) corrupt: AtomicU64,
    pub(super) short: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) reclaimed: AtomicU64,
    pub(super) slow: AtomicU64,
    /// Answers that are held back, and for how long.
    pub(super) outbox: Mutex<Vec<Late>>,
}

/// An answer, and for how long it is held back.
pub(super) type Late = (Duration, Box<dyn Replier>, Bulk, Bytes);

impl Log {
    pub(super) fn take_outbox(&self) -> Vec<Late> {
        std::mem::take(&mut *lock(&self.outbox))
    }
}

/// What goes wrong at one port next: how often each.
#[derive(Default)]
pub(super) struct Faults {
    pub(super) corrupt: AtomicU32,
    pub(super) short: AtomicU32,
    pub(super) refuse: AtomicU32,
    pub(super) slow: AtomicU32,
    /// Milliseconds of a slow answer.
    pub(super) late: AtomicU64,
}

fn take(count: &AtomicU32) -> bool {
    count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

/// Where a link ends at the server.
pub(super) struct Port {
    pub(super) run: Arc<Run>,
    pub(super) faults: Arc<Faults>,
}

impl Handler for Port {
    fn request(&self, incoming: Incoming) {
        self.run.request(&self.faults, incoming);
    }
}

impl Run {
    pub(super) fn new(incarnation: u64, store: &Arc<Store>, log: &Arc<Log>) -> Arc<Run> {
        let slots = vec![Slot { in_progress: 0, counter: 1 }; store.slots as usize];
        let words = slots.iter().map(|slot| AtomicU64::new(slot.encode(incarnation))).collect::<Vec<_>>();
        let state = Mutex::new(Words { slots, publishing: Vec::new(), held: Vec::new() });
        Arc::new(Run { incarnation, words: Arc::from(words), store: store.clone(), state, log: log.clone() })
    }

    fn set(&self, state: &mut Words, slot: u32, to: Slot) {
        let at = slot as usize;
        state.slots[at] = to;
        self.words[at].store(to.encode(self.incarnation), Ordering::SeqCst);
    }

    /// False: one is under way.
    pub(super) fn begin(&self, name: u64) -> bool {
        let mut state = lock(&self.state);
        if state.publishing.contains(&name) {
            return false;
        }
        let slot = self.store.slot(name);
        let Some(begun) = state.slots[slot as usize].begin() else { return false };
        state.publishing.push(name);
        self.set(&mut state, slot, begun);
        true
    }

    /// The publish has ended, well or (`done` false) without effect. Those who waited for it are to be answered.
    pub(super) fn end(&self, name: u64) {
        let held = {
            let mut state = lock(&self.state);
            state.publishing.retain(|other| *other != name);
            let slot = self.store.slot(name);
            let ended = state.slots[slot as usize].end();
            self.set(&mut state, slot, ended);
            std::mem::take(&mut state.held)
        };
        for (faults, incoming) in held {
            self.request(&faults, incoming);
        }
    }

    /// Names that are being published.
    pub(super) fn publishing(&self) -> Vec<u64> {
        lock(&self.state).publishing.clone()
    }

    /// It is no more: those who wait are not answered.
    pub(super) fn forget(&self) {
        let held = std::mem::take(&mut lock(&self.state).held);
        drop(held);
    }

    fn busy(&self, slot: u32) -> bool {
        lock(&self.state).slots.get(slot as usize).is_some_and(|slot| slot.in_progress > 0)
    }

    fn word(&self, slot: u32) -> u64 {
        lock(&self.state).slots.get(slot as usize).map_or(0, |slot| slot.quiet().encode(self.incarnation))
    }

    fn check(&self, proof: &v1::SlotProof) -> v1::CheckResult {
        let value = self.word(proof.slot);
        v1::CheckResult { current: proof.value == value && !self.busy(proof.slot), value }
    }

    fn lookup(&self, name: u64) -> Lookup {
        let version = self.store.version(name);
        let slot = self.store.slot(name);
        let proof =
            Proof { node: "n".into(), incarnation: self.incarnation, slot, value: self.word(slot), name_tag: 7 };
        Lookup::Object(descriptor(version), proof)
    }

    fn request(&self, faults: &Arc<Faults>, incoming: Incoming) {
        use v1::rail_request::Body;
        let Ok(request) = v1::RailRequest::decode(incoming.message.clone()) else { return };
        let Some(body) = request.body else { return };
        if request.scope.is_none_or(|scope| scope.incarnation != self.incarnation) {
            return self.refuse(faults, incoming, v1::Code::WrongIncarnation);
        }
        if take(&faults.refuse) {
            let times = self.log.refused.fetch_add(1, Ordering::SeqCst);
            let codes = [v1::Code::Unavailable, v1::Code::OverBudget, v1::Code::Expired];
            return self.refuse(faults, incoming, codes[(times % 3) as usize]);
        }
        let held = match &body {
            Body::Check(request) => request.proofs.iter().any(|proof| self.busy(proof.slot)),
            Body::Lookup(request) => asked(request).is_some_and(|name| self.busy(self.store.slot(name))),
            _ => false,
        };
        if held {
            self.log.held.fetch_add(1, Ordering::SeqCst);
            lock(&self.state).held.push((faults.clone(), incoming));
            return;
        }
        let good = |body| v1::RailReply { outcome: Some(ok_outcome()), body: Some(body) };
        let (bulk, reply) = match body {
            Body::Fetch(fetch) if self.store.reclaimed(fetch.version) => {
                self.log.reclaimed.fetch_add(1, Ordering::SeqCst);
                return self.refuse(faults, incoming, v1::Code::Stale);
            }
            Body::Fetch(fetch) => {
                let (bytes, body) = self.fetch(faults, &fetch);
                (Bulk::Bytes(bytes), good(v1::rail_reply::Body::Fetch(body)))
            }
            Body::Check(request) => {
                let results = request.proofs.iter().map(|proof| self.check(proof)).collect();
                (Bulk::None, good(v1::rail_reply::Body::Check(v1::CheckReply { results })))
            }
            Body::Lookup(request) => {
                let Some(name) = asked(&request) else { return };
                (Bulk::None, good(v1::rail_reply::Body::Lookup(self.lookup(name).to_message())))
            }
            Body::Lease(_) => {
                (Bulk::None, good(v1::rail_reply::Body::Lease(v1::LeaseReply { lease_milliseconds: 2000 })))
            }
            Body::Pin(_) | Body::Pull(_) => return,
        };
        self.answer(faults, incoming, bulk, reply);
    }

    fn fetch(&self, faults: &Faults, fetch: &v1::FetchRequest) -> (Bytes, v1::FetchReply) {
        let striping = striping(fetch.version);
        let short = fetch.length > PAGE && take(&faults.short);
        let length = if short { fetch.length - PAGE } else { fetch.length };
        let mut bytes = Vec::with_capacity(length as usize);
        while bytes.len() < length as usize {
            let more = (length as usize - bytes.len()).min(PAGE as usize);
            let place = Place { component: fetch.component, offset: fetch.offset + bytes.len() as u64 };
            bytes.extend(content(fetch.version, striping.object_offset(place), more));
        }
        let first = fetch.offset / u64::from(PAGE);
        let checksums = page_checksums(fetch.version, fetch.component, first, PAGE, &bytes);
        if take(&faults.corrupt) {
            self.log.corrupt.fetch_add(1, Ordering::SeqCst);
            let at = bytes.len() / 2;
            bytes[at] ^= 0x10;
        }
        self.log.short.fetch_add(u64::from(short), Ordering::SeqCst);
        let busy = fetch.proof.as_ref().is_some_and(|proof| self.busy(proof.slot));
        let reply = v1::FetchReply {
            version: fetch.version,
            component: fetch.component,
            offset: fetch.offset,
            length,
            checksums,
            check: fetch.proof.as_ref().filter(|_| !busy).map(|proof| self.check(proof)),
        };
        (Bytes::from(bytes), reply)
    }

    fn refuse(&self, faults: &Faults, incoming: Incoming, code: v1::Code) {
        let outcome = Some(v1::Outcome { code: code.into(), message: String::new() });
        self.answer(faults, incoming, Bulk::None, v1::RailReply { outcome, body: None });
    }

    fn answer(&self, faults: &Faults, incoming: Incoming, bulk: Bulk, reply: v1::RailReply) {
        let message = Bytes::from(reply.encode_to_vec());
        if take(&faults.slow) {
            self.log.slow.fetch_add(1, Ordering::SeqCst);
            let late = Duration::from_millis(faults.late.load(Ordering::SeqCst));
            return lock(&self.log.outbox).push((late, incoming.replier, bulk, message));
        }
        incoming.replier.reply(bulk, Box::new(move |_| message));
    }
}

fn asked(request: &v1::LookupRequest) -> Option<u64> {
    let key = request.name.as_ref()?;
    (0..NAMES).find(|&number| name(number).to_message() == *key)
}

fn descriptor(version: u64) -> Descriptor {
    let striping = striping(version);
    let replica = || vec![Replica { node: "n".into(), directory: Id([1; 16]) }];
    let attributes = Attributes { mode: 0o644, mtime_seconds: 0, mtime_nanoseconds: 0, owner: None };
    let components = if version.is_multiple_of(NAMES) { vec![replica(), replica()] } else { vec![replica()] };
    Descriptor { version, attributes, striping, components }
}
