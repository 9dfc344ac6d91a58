//! What the conformance suite runs on: a log of events that notices broken promises, a server that does as it is told, and
//! the worlds (TCP over loopback, the simulation) behind one trait.

#![allow(dead_code, reason = "each suite uses its part of it")]

#[cfg(feature = "rdma")]
pub mod late;
#[cfg(feature = "rdma")]
pub mod lease;
pub mod sim;
pub mod tcp;
#[cfg(feature = "rdma")]
pub mod verbs;

use bytes::{BufMut, Bytes, BytesMut};
use railfs_engine::clock::Time;
use railfs_engine::memory::{Arena, Fenced};
use railfs_engine::rail::tcp::Limits;
use railfs_engine::rail::{
    Bulk, Cause, Event, Events, Hand, Handler, Incoming, Landing, Lane, Rail, Replier, Sent, Slots, State, Submission,
};
use std::cell::Cell;
use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Rung whenever something has happened, so that nobody has to sleep.
#[derive(Default)]
pub struct Bell(Mutex<u64>, Condvar);

impl Bell {
    pub fn ring(&self) {
        *self.0.lock().unwrap() += 1;
        self.1.notify_all();
    }
    /// Checks again after every ring (and now and then, for counters that ring nothing).
    pub fn until(&self, what: &str, limit: Duration, done: &mut dyn FnMut() -> bool) {
        let end = Instant::now() + limit;
        loop {
            let heard = *self.0.lock().unwrap();
            if done() {
                return;
            }
            assert!(Instant::now() < end, "not within {limit:?}: {what}");
            let rung = self.0.lock().unwrap();
            drop(self.1.wait_timeout_while(rung, Duration::from_millis(20), |rung| *rung == heard).unwrap());
        }
    }
}

pub enum Answer {
    Replied { message: Bytes, bulk: u32, extent: Option<Fenced> },
    Failed { cause: Cause, held: bool },
}

#[derive(Default)]
pub struct Seen {
    pub answers: HashMap<u64, Answer>,
    pub released: Vec<u64>,
    pub states: Vec<State>,
    /// Of all failed and released landings.
    pub landings_back: usize,
    pub problems: Vec<String>,
    /// What can be READ of the server's slots, and what was.
    pub slots: Option<Slots>,
    pub looked: Vec<(u64, Vec<u64>)>,
}

/// Everything an end was told.
pub struct Log {
    seen: Mutex<Seen>,
    bell: Arc<Bell>,
}

impl Log {
    pub fn new(bell: Arc<Bell>) -> Arc<Log> {
        Arc::new(Log { seen: Mutex::default(), bell })
    }
    pub fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap()
    }
    pub fn count(&self) -> usize {
        self.seen().answers.len()
    }
    pub fn has(&self, id: u64) -> bool {
        self.seen().answers.contains_key(&id)
    }
    /// The cause, and whether the landing was held; panics where it was answered.
    pub fn failure(&self, id: u64) -> (Cause, bool) {
        match self.seen().answers.get(&id) {
            Some(Answer::Failed { cause, held }) => (cause.clone(), *held),
            Some(Answer::Replied { .. }) => panic!("{id} was answered"),
            None => panic!("{id} has no answer yet"),
        }
    }
    /// Message, bulk and landing; panics where it failed.
    pub fn reply(&self, id: u64) -> (Bytes, u32, Option<Fenced>) {
        match self.seen().answers.get_mut(&id) {
            Some(Answer::Replied { message, bulk, extent }) => (message.clone(), *bulk, extent.take()),
            Some(Answer::Failed { cause, .. }) => panic!("{id} failed: {cause:?}"),
            None => panic!("{id} has no answer yet"),
        }
    }
    pub fn came(&self, wanted: impl Fn(&State) -> bool) -> usize {
        self.seen().states.iter().filter(|state| wanted(state)).count()
    }
}

impl Events for Log {
    fn event(&self, event: Event) {
        let mut seen = self.seen();
        if INSIDE.get() {
            seen.problems.push(format!("told from inside of submit or cancel: {event:?}"));
        }
        let answer = match event {
            Event::State(state) => {
                seen.states.push(state);
                None
            }
            Event::Slots(slots) => {
                seen.slots = slots;
                None
            }
            Event::Looked { id, words } => {
                seen.looked.push((id, words));
                None
            }
            Event::Released { id, extent } => {
                if !matches!(seen.answers.get(&id), Some(Answer::Failed { held: true, .. })) {
                    seen.problems.push(format!("{id} was released without having been held"));
                }
                if seen.released.contains(&id) {
                    seen.problems.push(format!("{id} was released twice"));
                }
                seen.released.push(id);
                seen.landings_back += 1;
                drop(extent);
                None
            }
            Event::Replied { id, message, bulk, extent } => Some((id, Answer::Replied { message, bulk, extent })),
            Event::Failed { id, cause, hand } => {
                seen.landings_back += usize::from(matches!(hand, Hand::Fenced(_)));
                Some((id, Answer::Failed { cause, held: matches!(hand, Hand::Held) }))
            }
        };
        if let Some((id, answer)) = answer
            && seen.answers.insert(id, answer).is_some()
        {
            seen.problems.push(format!("{id} was answered twice"));
        }
        drop(seen);
        self.bell.ring();
    }
}

/// What the message tells the server to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Do {
    Echo = 0,
    Bytes = 1,
    /// From a file that holds 1 MiB.
    File = 2,
    /// Keep the replier.
    Hold = 3,
    /// Drop the replier.
    Drop = 4,
    /// From the middle of the file: half of it is not there.
    ShortFile = 5,
    /// From something that cannot be read.
    NoFile = 6,
}

pub fn message(what: Do, length: u32, seed: u8) -> Bytes {
    let mut out = BytesMut::new();
    out.put_u8(what as u8);
    out.put_u32_le(length);
    out.put_u8(seed);
    out.freeze()
}

/// The bytes that belong to a seed: from the file's, shifted.
pub fn pattern(seed: u8, length: u32) -> Vec<u8> {
    (0..length).map(|i| (i.wrapping_mul(31) ^ (i >> 8)).wrapping_add(u32::from(seed)) as u8).collect()
}

type Kept = (Bytes, Box<dyn Replier>);

/// Serves requests as their messages say.
pub struct Server {
    file: Arc<File>,
    held: Mutex<Vec<Kept>>,
    pub served: AtomicU64,
    bell: Arc<Bell>,
}

impl Server {
    pub fn new(bell: Arc<Bell>) -> Arc<Server> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&pattern(0, 1 << 20)).unwrap();
        Arc::new(Server { file: Arc::new(file), held: Mutex::default(), served: AtomicU64::new(0), bell })
    }
    pub fn held(&self) -> usize {
        self.held.lock().unwrap().len()
    }
    /// Answers the oldest held request with so much bulk.
    pub fn answer_held(&self, length: u32, seed: u8) {
        let (message, replier) = self.held.lock().unwrap().remove(0);
        replier.reply(Bulk::Bytes(pattern(seed, length).into()), Box::new(move |sent| with(&message, &sent)));
    }
    pub fn served(&self) -> u64 {
        self.served.load(Ordering::SeqCst)
    }
}

/// The reply's message: the request's, and what was sent.
fn with(message: &Bytes, sent: &Sent) -> Bytes {
    let mut out = BytesMut::from(&message[..]);
    out.put_u32_le(sent.bytes);
    out.put_u8(u8::from(sent.error.is_some()));
    out.freeze()
}

/// What [`with`] added.
pub fn sent(message: &Bytes) -> (u32, bool) {
    let tail = &message[message.len() - 5..];
    (u32::from_le_bytes(tail[..4].try_into().unwrap()), tail[4] != 0)
}

impl Handler for Server {
    fn request(&self, Incoming { message, replier }: Incoming) {
        let length = u32::from_le_bytes(message[1..5].try_into().unwrap());
        let copy = message.clone();
        let finish = Box::new(move |sent: Sent| with(&copy, &sent));
        match message[0] {
            0 => replier.reply(Bulk::None, finish),
            1 => replier.reply(Bulk::Bytes(pattern(message[5], length).into()), finish),
            2 => replier
                .reply(Bulk::File { file: self.file.clone(), offset: 0, length, check: None, kept: None }, finish),
            5 => replier.reply(
                Bulk::File { file: self.file.clone(), offset: 1 << 19, length, check: None, kept: None },
                finish,
            ),
            6 => {
                let file = Arc::new(File::open("/").unwrap());
                replier.reply(Bulk::File { file, offset: 0, length, check: None, kept: None }, finish);
            }
            3 => self.held.lock().unwrap().push((message, replier)),
            _ => drop(replier),
        }
        self.served.fetch_add(1, Ordering::SeqCst);
        self.bell.ring();
    }
}

/// What a test asks of a world.
#[derive(Clone, Default)]
pub struct Setup {
    pub limits: Limits,
    /// The server's end, where it differs.
    pub server_limits: Option<Limits>,
    /// The test itself plays the server: see [`World::piece`] and the like.
    pub by_hand: bool,
}

/// A client's rail, a server behind it, and the means to disturb both.
pub trait World: Send + Sync {
    fn client(&self) -> Arc<dyn Rail>;
    /// The server's end of a lane, when it is up.
    fn server(&self, lane: Lane) -> Option<Arc<dyn Rail>>;
    fn log(&self) -> &Log;
    fn server_log(&self) -> &Log;
    fn serving(&self) -> &Server;
    /// Serves the server's requests.
    fn pulling(&self) -> &Server;
    fn arena(&self) -> &Arena;
    fn now(&self) -> Time;
    fn until(&self, what: &str, done: &mut dyn FnMut() -> bool);
    /// Kills the connection.
    fn kill(&self);
    /// The server falls silent (by hand only), or comes back.
    fn mute(&self, mute: bool);
    /// Requests that came (by hand only): lane, id.
    fn requests(&self) -> Vec<(Lane, u64)>;
    /// By hand: a piece of the bulk of a reply on the bulk lane. Pieces come in order and fill `total` before the reply.
    fn piece(&self, id: u64, offset: u32, total: u32, bytes: &[u8]);
    /// By hand: the reply itself. `bulk` is sent with it where it was not in pieces.
    fn finish(&self, id: u64, message: &[u8]);
    /// By hand: a whole reply, of this session or another.
    fn whole(&self, lane: Lane, id: u64, bulk: &[u8], message: &[u8], ours: bool);
    /// Pings that the server has seen, by hand.
    fn pings(&self) -> u64;
}

/// Says that a test cannot run here, where `make test` counts it.
pub fn skip(name: &str, why: &str) {
    eprintln!("SKIPPED {name}: {why}");
    if let Some(path) = std::env::var_os("RAILFS_SKIP_LOG") {
        let mut log = std::fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
        writeln!(log, "SKIPPED {name}: {why}").unwrap();
    }
}

/// Ids are unique over all of a test.
static IDS: AtomicU64 = AtomicU64::new(1);

pub fn id() -> u64 {
    IDS.fetch_add(1, Ordering::SeqCst)
}

pub fn submit_to(rail: &dyn Rail, submission: Submission) {
    INSIDE.set(true);
    rail.submit(submission);
    INSIDE.set(false);
}

impl dyn World + '_ {
    pub fn up(&self) {
        self.until("up", &mut || self.client().state() == State::Up);
        self.until("both lanes at the server", &mut || {
            self.by_hand() || (self.server(Lane::Bulk).is_some() && self.server(Lane::Small).is_some())
        });
    }
    fn by_hand(&self) -> bool {
        self.pings() != u64::MAX
    }
    pub fn landing(&self, length: u32) -> Landing {
        let size = length.max(4096).next_power_of_two();
        let mut extent = None;
        self.until("room in the arena", &mut || {
            extent = self.arena().allocate(size);
            extent.is_some()
        });
        Landing { extent: extent.unwrap(), length }
    }
    /// Submits to the client's rail; seconds to the deadline.
    pub fn submit(&self, lane: Lane, message: Bytes, landing: Option<u32>, after: Duration) -> u64 {
        let id = id();
        let landing = landing.map(|length| self.landing(length));
        let deadline = self.now().after(after);
        submit_to(&*self.client(), Submission { id, lane, message, landing, deadline });
        id
    }
    pub fn cancel(&self, id: u64) {
        INSIDE.set(true);
        self.client().cancel(id);
        INSIDE.set(false);
    }
    pub fn answered(&self, id: u64) {
        self.until(&format!("an answer for {id}"), &mut || self.log().has(id));
    }
    /// A fetch that must succeed.
    pub fn fetch(&self, what: Do, length: u32, seed: u8) {
        let id = self.submit(Lane::Bulk, message(what, length, seed), Some(length), Duration::from_secs(20));
        self.answered(id);
        let (_, bulk, extent) = self.log().reply(id);
        assert_eq!(bulk, length);
        assert!(extent.unwrap().bytes()[..length as usize] == pattern(seed, length), "wrong bytes");
    }
    /// A small request that must succeed.
    pub fn echo(&self) {
        let id = self.submit(Lane::Small, message(Do::Echo, 0, 0), None, Duration::from_secs(20));
        self.answered(id);
        self.log().reply(id);
    }
    /// Ends the test: everything comes back, all counters agree, nothing was promised and broken.
    pub fn quiet(&self) {
        self.until("nothing in flight", &mut || {
            let counters = self.client().counters();
            counters.in_flight == 0 && counters.held_bytes == 0
        });
        let counters = self.client().counters();
        {
            let mut seen = self.log().seen();
            assert_eq!(seen.problems, Vec::<String>::new());
            let failed = seen.answers.values().filter(|answer| matches!(answer, Answer::Failed { .. })).count() as u64;
            assert_eq!(counters.failed, failed);
            assert_eq!(counters.submitted, seen.answers.len() as u64);
            seen.answers.clear();
        }
        self.server_log().seen().answers.clear();
        assert_eq!(self.server_log().seen().problems, Vec::<String>::new());
        // What was offered is given back a moment after the request is answered.
        self.until("all memory is back", &mut || {
            let stats = self.arena().stats();
            stats.free + stats.quarantined == stats.total
        });
        let stats = self.arena().stats();
        assert_eq!((stats.free, stats.exposed, stats.quarantined), (stats.total, 0, 0));
    }
}
