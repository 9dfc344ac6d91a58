//! The world of queue pairs, over two real devices (Soft-RoCE in the lab). Which ones is said by `RAILFS_VERBS_DEVICES`:
//! client device, its address, server device, its address, separated by commas.

use super::tcp::{Door, OneTicket, SESSION};
use super::{Bell, Log, Server, Setup, World};
use railfs_engine::clock::{Clock, Time};
use railfs_engine::memory::Arena;
use railfs_engine::memory::ledger::Ledger;
use railfs_engine::rail::slab::{Reading, Slab};
use railfs_engine::rail::tcp::{Limits as RailLimits, Tickets};
use railfs_engine::rail::verbs::{
    Join, Opening, VerbsJoin, VerbsListener, VerbsListenerConfig, VerbsRail, VerbsRailConfig, choose_gid,
};
use railfs_engine::rail::{Counters, Lane, Rail, State, Submission};
use railfs_engine::verbs::{Buffers, Context, Cq, Limits, Pd, Peer, PortChoice, Qp, Rts, Work, WrId, WrKind};
use railfs_proto::v1::VerbsEnd;
use railfs_proto::verbs::{Assembly, End, FrameKind, Header, Pair, decode, encode};
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

const PIECE: usize = 4096;
const DEPTH: u16 = 64;

/// Where the tests run.
#[derive(Clone, Debug)]
pub struct Devices {
    pub client: (String, IpAddr),
    pub server: (String, IpAddr),
}

pub fn devices() -> Option<Devices> {
    let text = std::env::var("RAILFS_VERBS_DEVICES").ok()?;
    let words: Vec<&str> = text.split(',').collect();
    let [client, at, server, there] = words[..] else { panic!("RAILFS_VERBS_DEVICES is '{text}'") };
    Some(Devices { client: (client.into(), at.parse().unwrap()), server: (server.into(), there.parse().unwrap()) })
}

/// What the rail's ends are called.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    pub client: &'static str,
    pub server: &'static str,
}

impl Default for Names {
    fn default() -> Names {
        Names { client: "test", server: "test" }
    }
}

/// Joins without a network between.
pub struct Direct(pub Arc<VerbsListener>);

impl Join for Direct {
    fn join(&self, listener: u32, end: VerbsEnd) -> Result<(u64, VerbsEnd), String> {
        let join = OneTicket.join(Lane::Bulk, listener)?;
        let peer = SocketAddr::new(self.0.address(), 1);
        let end = self.0.join(&VerbsJoin { join, end }, peer).map_err(|outcome| outcome.message)?;
        Ok((SESSION, end))
    }
}

#[derive(Clone, Copy)]
pub struct Landing {
    pair: usize,
    address: u64,
    key: u32,
    length: u32,
    written: u32,
    /// The key is no window's, and stays.
    keeps: bool,
}

impl Landing {
    /// What a reply takes away.
    fn taken(&self) -> Option<u32> {
        (!self.keeps).then_some(self.key)
    }
}

/// The queue pairs of one connection.
struct Pairs {
    pairs: Vec<Qp<Rts>>,
    cq: Cq,
    buffers: Buffers,
    source: Buffers,
    assemblies: Vec<Assembly>,
    posted: Vec<u32>,
    next_slot: Vec<u16>,
    outstanding: Vec<VecDeque<u32>>,
    done: u64,
    sent: u64,
    /// Which connection.
    serial: u64,
}

static SERIALS: AtomicU64 = AtomicU64::new(0);

/// A server made of plain queue pairs, which the test plays by hand. It keeps to the protocol: what was cancelled is dropped
/// and written no more.
pub struct Hand {
    bell: Arc<Bell>,
    device: (String, IpAddr),
    now: Mutex<Option<Pairs>>,
    requests: Mutex<Vec<(Lane, u64)>>,
    landings: Mutex<HashMap<u64, Landing>>,
    dropped: Mutex<HashSet<u64>>,
    partial: Arc<AtomicU64>,
    mute: AtomicBool,
    /// It lets nobody join, and does not hear that something was given up.
    deaf: AtomicBool,
    pings: AtomicU64,
}

fn place(pair: usize, slot: u16, send: bool) -> usize {
    let depth = usize::from(DEPTH);
    (pair * 2 * depth + if send { depth } else { 0 } + usize::from(slot)) * PIECE
}

fn id(kind: WrKind, pair: usize, slot: u16) -> WrId {
    WrId { kind, pair: u8::try_from(pair).unwrap(), slot, used: 0, generation: 0 }
}

impl Pairs {
    fn new(device: &(String, IpAddr), theirs: &End) -> (Pairs, End) {
        let context = Context::open(&device.0).unwrap();
        let pd = Pd::new(&context).unwrap();
        let port = context.port(1).unwrap();
        let gid = choose_gid(&context.gids().unwrap(), 1, device.1).unwrap();
        let count = theirs.pairs.len();
        let cq = Cq::new(&context, 4096).unwrap();
        let buffers = Buffers::new(&pd, count * 2 * usize::from(DEPTH) * PIECE).unwrap();
        let source = Buffers::new(&pd, 1 << 20).unwrap();
        let (mut pairs, mut said) = (Vec::new(), Vec::new());
        for (index, other) in theirs.pairs.iter().enumerate() {
            let limits = Limits { sends: 256, receives: u32::from(DEPTH) };
            let memory = vec![buffers.mr().clone(), source.mr().clone()];
            let pair = Qp::new(&pd, &cq, limits, memory).unwrap();
            let choice = PortChoice { port: 1, gid, traffic_class: 0, written: false, read: false };
            let mut pair = pair.init(&choice).unwrap();
            for slot in 0..DEPTH {
                let into = buffers.mr().slice(place(index, slot, false) as u64, PIECE as u32).unwrap();
                pair.receive(id(WrKind::Receive, index, slot), into).unwrap();
            }
            said.push(Pair { number: pair.number(), psn: 1000 + index as u32 });
            let mtu = port.mtu.min(theirs.mtu);
            let peer = Peer { number: other.number, psn: other.psn, gid: theirs.gid, lid: theirs.lid, mtu };
            pairs.push(pair.rtr(&peer, 1).unwrap().rts(1000 + index as u32).unwrap());
        }
        let end = End {
            gid: gid.raw,
            lid: port.lid,
            mtu: port.mtu,
            piece: PIECE as u32,
            depth: DEPTH.into(),
            pairs: said,
            reads_answered: 1,
            reads_asked: 1,
            offers: false,
            slots: None,
        };
        let each = |n: u32| vec![n; count];
        let pairs = Pairs {
            pairs,
            cq,
            buffers,
            source,
            assemblies: (0..count).map(|_| Assembly::default()).collect(),
            posted: each(DEPTH.into()),
            next_slot: vec![0; count],
            outstanding: vec![VecDeque::new(); count],
            done: 0,
            sent: 0,
            serial: SERIALS.fetch_add(1, Ordering::SeqCst),
        };
        (pairs, end)
    }

    /// Posts a frame of one piece, after a WRITE of the source's first bytes where one is wanted.
    fn send(&mut self, pair: usize, header: &Header, message: &[u8], write: Option<(u32, u64, u32)>, key: Option<u32>) {
        let slot = self.next_slot[pair];
        self.next_slot[pair] = (slot + 1) % DEPTH;
        let mut out = Vec::new();
        let payload = |at: usize, length: usize| &message[at..at + length];
        encode(header, self.posted[pair], 0, PIECE, payload, &mut out);
        let offset = place(pair, slot, true);
        assert!(self.buffers.fill(offset, &out));
        let from = self.buffers.mr().slice(offset as u64, out.len() as u32).unwrap();
        let send = Work::Send { id: id(WrKind::Send, pair, slot), from, invalidate: key };
        let Some(queue) = self.pairs.get_mut(pair) else { return };
        let requests = match write {
            None => queue.post(&mut [send]).map(|()| 1),
            Some((length, address, key)) => {
                let from = self.source.mr().slice(0, length).unwrap();
                let write = Work::Write { id: id(WrKind::Write, pair, slot), from, address, key };
                queue.post(&mut [write, send]).map(|()| 2)
            }
        };
        self.outstanding[pair].push_back(requests.unwrap());
        self.sent += 1;
    }
}

impl Hand {
    fn start(bell: Arc<Bell>, device: (String, IpAddr), partial: Arc<AtomicU64>) -> Arc<Hand> {
        let hand = Arc::new(Hand {
            bell,
            device,
            now: Mutex::new(None),
            requests: Mutex::default(),
            landings: Mutex::default(),
            dropped: Mutex::default(),
            partial,
            mute: AtomicBool::new(false),
            deaf: AtomicBool::new(false),
            pings: AtomicU64::new(0),
        });
        let weak = Arc::downgrade(&hand);
        std::thread::spawn(move || while Hand::turn(&weak) {});
        hand
    }

    /// Takes what there is, then waits a moment for more.
    fn turn(weak: &Weak<Hand>) -> bool {
        let Some(hand) = weak.upgrade() else { return false };
        let cq = {
            let mut now = hand.now.lock().unwrap();
            match now.as_mut() {
                None => None,
                Some(pairs) => {
                    let mut completions = Vec::new();
                    while pairs.cq.poll(&mut completions).unwrap() > 0 {}
                    for completion in completions {
                        let pair = usize::from(completion.id.pair);
                        let Ok(done) = completion.result else {
                            // What comes before a failed message fails with it.
                            pairs.done += u64::from(completion.id.kind == WrKind::Send);
                            hand.bell.ring();
                            continue;
                        };
                        match completion.id.kind {
                            WrKind::Receive => {
                                let at = place(pair, completion.id.slot, false);
                                let bytes = pairs.buffers.take(at, done.bytes as usize);
                                let into = pairs.buffers.mr().slice(at as u64, PIECE as u32).unwrap();
                                pairs.pairs[pair].received();
                                if pairs.pairs[pair].receive(completion.id, into).is_ok() {
                                    pairs.posted[pair] += 1;
                                }
                                hand.came(pairs, pair, &bytes);
                            }
                            _ => {
                                let count = pairs.outstanding[pair].pop_front().unwrap();
                                pairs.pairs[pair].sent(count);
                                pairs.done += 1;
                            }
                        }
                        hand.bell.ring();
                    }
                    pairs.cq.arm().unwrap();
                    Some(pairs.cq.clone())
                }
            }
        };
        drop(hand);
        let limit = rustix::event::Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
        match cq {
            Some(cq) => {
                let channel = cq.channel();
                let mut fds = [rustix::event::PollFd::from_borrowed_fd(channel, rustix::event::PollFlags::IN)];
                let _ = rustix::event::poll(&mut fds, Some(&limit));
            }
            None => {
                let _ = rustix::event::poll(&mut [], Some(&limit));
            }
        }
        true
    }

    fn came(&self, pairs: &mut Pairs, pair: usize, bytes: &[u8]) {
        let piece = decode(bytes).unwrap();
        let brought = pairs.assemblies[pair].take(&piece).unwrap();
        let (header, Some(_)) = (brought.header, brought.message) else { return };
        let reply = |kind| Header::plain(kind, SESSION, header.id);
        match header.kind {
            FrameKind::Ping => {
                self.pings.fetch_add(1, Ordering::SeqCst);
                if !self.mute.load(Ordering::SeqCst) {
                    pairs.send(pair, &reply(FrameKind::Pong), &[], None, None);
                }
            }
            FrameKind::Request => {
                let Header { address, key, bulk: length, keeps, .. } = header;
                let landing = Landing { pair, address, key, length, written: 0, keeps };
                self.landings.lock().unwrap().insert(header.id, landing);
                let lane = if pair + 1 == pairs.pairs.len() { Lane::Small } else { Lane::Bulk };
                self.requests.lock().unwrap().push((lane, header.id));
            }
            FrameKind::Cancel if self.deaf.load(Ordering::SeqCst) => {}
            FrameKind::Cancel if self.landings.lock().unwrap().remove(&header.id).is_some() => {
                self.dropped.lock().unwrap().insert(header.id);
                pairs.send(pair, &reply(FrameKind::Dropped), &[], None, None);
            }
            _ => {}
        }
    }

    /// Posts, and waits until what was posted is done.
    fn send(&self, pair: usize, header: &Header, message: &[u8], write: Option<(&[u8], u64, u32)>, key: Option<u32>) {
        let (serial, sent) = {
            let mut now = self.now.lock().unwrap();
            let Some(pairs) = now.as_mut() else { return };
            let write = write.map(|(bytes, address, key)| {
                assert!(pairs.source.fill(0, bytes));
                (bytes.len() as u32, address, key)
            });
            pairs.send(pair, header, message, write, key);
            (pairs.serial, pairs.sent)
        };
        self.bell.until("the hand's message is out", Duration::from_secs(10), &mut || {
            self.now.lock().unwrap().as_ref().is_none_or(|pairs| pairs.serial != serial || pairs.done >= sent)
        });
    }
}

impl Join for Hand {
    fn join(&self, _: u32, end: VerbsEnd) -> Result<(u64, VerbsEnd), String> {
        if self.deaf.load(Ordering::SeqCst) {
            return Err("the hand is deaf".into());
        }
        let theirs = End::from_message(Some(&end)).unwrap();
        *self.now.lock().unwrap() = None;
        self.landings.lock().unwrap().clear();
        let (pairs, end) = Pairs::new(&self.device, &theirs);
        *self.now.lock().unwrap() = Some(pairs);
        Ok((SESSION, end.to_message()))
    }
}

struct HandJoin(Arc<Hand>);

impl Join for HandJoin {
    fn join(&self, listener: u32, end: VerbsEnd) -> Result<(u64, VerbsEnd), String> {
        self.0.join(listener, end)
    }
}

/// What has landed by WRITE is known to the writer alone until the reply: the hand's writes are added here.
#[derive(Debug)]
struct Counting(Arc<VerbsRail>, Arc<AtomicU64>);

impl Rail for Counting {
    fn submit(&self, submission: Submission) {
        self.0.submit(submission);
    }
    fn cancel(&self, id: u64) {
        self.0.cancel(id);
    }
    fn counters(&self) -> Counters {
        let mut counters = self.0.counters();
        counters.bulk_received += self.1.load(Ordering::SeqCst);
        counters
    }
    fn state(&self) -> State {
        self.0.state()
    }
    fn close(&self) {
        self.0.close();
    }
}

pub struct VerbsWorld {
    clock: Clock,
    bell: Arc<Bell>,
    arena: Arena,
    rail: Arc<Counting>,
    log: Arc<Log>,
    server_log: Arc<Log>,
    server: Arc<Server>,
    puller: Arc<Server>,
    door: Arc<Door>,
    hand: Option<Arc<Hand>>,
    listener: Option<Arc<VerbsListener>>,
}

/// A listener on the server's device.
pub fn listener_config(devices: &Devices, limits: RailLimits) -> VerbsListenerConfig {
    VerbsListenerConfig {
        name: "test".into(),
        device: Some(devices.server.0.clone()),
        address: devices.server.1,
        slab: Slab::start("test", 8 << 20, Reading::Auto).unwrap(),
        ledger: Ledger::new(256 << 20, "the test's"),
        landing: None,
        limits,
    }
}

pub fn world(setup: Setup) -> Box<dyn World> {
    world_of(setup, Opening::Auto)
}

pub fn world_of(setup: Setup, opening: Opening) -> Box<dyn World> {
    Box::new(world_named(setup, opening, Names::default()))
}

pub fn world_named(mut setup: Setup, opening: Opening, names: Names) -> VerbsWorld {
    // Real devices are met on emulated machines, where the test's own server takes seconds to make what it sends.
    for limits in [Some(&mut setup.limits), setup.server_limits.as_mut()].into_iter().flatten() {
        if limits.retire == railfs_proto::limits::RAIL_RETIRE {
            (limits.suspect, limits.retire) = (Duration::from_secs(10), Duration::from_secs(30));
        }
    }
    let devices = devices().expect("only called where there are devices");
    let bell = Arc::<Bell>::default();
    let clock = Clock::start();
    let (log, server_log) = (Log::new(bell.clone()), Log::new(bell.clone()));
    let (server, puller) = (Server::new(bell.clone()), Server::new(bell.clone()));
    let door = Arc::new(Door {
        log: server_log.clone(),
        server: server.clone(),
        lanes: Mutex::default(),
        closed: AtomicU64::new(0),
        bell: bell.clone(),
    });
    let partial = Arc::<AtomicU64>::default();
    // Registering takes its time on emulated machines: no more than the tests have in flight.
    let arena = Arena::new(32 << 20).unwrap();
    let (hand, listener, join): (_, _, Arc<dyn Join>) = if setup.by_hand {
        let hand = Hand::start(bell.clone(), devices.server.clone(), partial.clone());
        (Some(hand.clone()), None, Arc::new(HandJoin(hand)))
    } else {
        let limits = setup.server_limits.unwrap_or(setup.limits.clone());
        let config = VerbsListenerConfig {
            name: names.server.into(),
            landing: Some(arena.clone()),
            ..listener_config(&devices, limits)
        };
        let listener = Arc::new(VerbsListener::start(config, clock, door.clone()).unwrap());
        (None, Some(listener.clone()), Arc::new(Direct(listener)))
    };
    let config = VerbsRailConfig {
        name: names.client.into(),
        device: devices.client.0,
        address: devices.client.1,
        remote: devices.server.1.to_string(),
        listener: 1,
        bulk_pairs: if setup.by_hand { 1 } else { 2 },
        opening,
        limits: setup.limits,
        seed: 1,
    };
    let rail = VerbsRail::start(config, clock, arena.clone(), join, puller.clone(), log.clone()).unwrap();
    let rail = Arc::new(Counting(rail, partial));
    VerbsWorld { clock, bell, arena, rail, log, server_log, server, puller, door, hand, listener }
}

impl VerbsWorld {
    fn hand(&self) -> &Hand {
        self.hand.as_ref().unwrap()
    }
    /// Bytes of WRITEs that the server has posted.
    pub fn written(&self) -> u64 {
        self.listener.as_ref().map_or(0, |listener| listener.counters().bulk_sent)
    }
    /// Lanes of connections that have ended at the server.
    pub fn ended(&self) -> u64 {
        self.door.closed.load(Ordering::SeqCst)
    }
    /// By hand: the server does not hear what is given up, and lets nobody join.
    pub fn deaf(&self, deaf: bool) {
        self.hand().deaf.store(deaf, Ordering::SeqCst);
    }
    /// By hand: where a request lets the server write.
    pub fn place(&self, id: u64) -> Option<Landing> {
        self.hand().landings.lock().unwrap().get(&id).copied()
    }
    /// By hand: writes there, whatever was said of it, and waits until that has ended in whatever way.
    pub fn write_at(&self, landing: &Landing, offset: u32, bytes: &[u8]) {
        let credit = Header::plain(FrameKind::Credit, SESSION, 0);
        let write = (bytes, landing.address + u64::from(offset), landing.key);
        self.hand().send(landing.pair, &credit, &[], Some(write), None);
    }
    /// By hand: a reply on another queue pair than its request's.
    pub fn astray(&self, id: u64, message: &[u8]) {
        let hand = self.hand();
        let Some(landing) = self.place(id) else { return };
        let last = hand.now.lock().unwrap().as_ref().map_or(0, |pairs| pairs.pairs.len() - 1);
        assert_ne!(last, landing.pair);
        let header = Header { message: message.len() as u32, ..Header::plain(FrameKind::Reply, SESSION, id) };
        hand.send(last, &header, message, None, None);
    }
}

impl std::ops::Deref for VerbsWorld {
    type Target = dyn World;
    fn deref(&self) -> &Self::Target {
        self
    }
}

impl World for VerbsWorld {
    fn client(&self) -> Arc<dyn Rail> {
        self.rail.clone()
    }
    fn server(&self, lane: Lane) -> Option<Arc<dyn Rail>> {
        self.door.lanes.lock().unwrap().get(&lane).map(|(_, rail)| rail.clone())
    }
    fn log(&self) -> &Log {
        &self.log
    }
    fn server_log(&self) -> &Log {
        &self.server_log
    }
    fn serving(&self) -> &Server {
        &self.server
    }
    fn pulling(&self) -> &Server {
        &self.puller
    }
    fn arena(&self) -> &Arena {
        &self.arena
    }
    fn now(&self) -> Time {
        self.clock.now()
    }
    fn until(&self, what: &str, done: &mut dyn FnMut() -> bool) {
        self.bell.until(what, Duration::from_secs(60), done);
    }
    fn kill(&self) {
        match &self.hand {
            Some(hand) => drop(hand.now.lock().unwrap().take()),
            None => {
                if let Some(rail) = self.server(Lane::Bulk) {
                    rail.close();
                }
            }
        }
    }
    fn mute(&self, mute: bool) {
        self.hand().mute.store(mute, Ordering::SeqCst);
    }
    fn requests(&self) -> Vec<(Lane, u64)> {
        self.hand().requests.lock().unwrap().clone()
    }
    fn piece(&self, id: u64, offset: u32, _total: u32, bytes: &[u8]) {
        let hand = self.hand();
        let place = {
            let mut landings = hand.landings.lock().unwrap();
            landings.get_mut(&id).map(|landing| {
                landing.written += bytes.len() as u32;
                (landing.pair, landing.address + u64::from(offset), landing.key)
            })
        };
        // Given up: a server that keeps to the protocol writes no more.
        let Some((pair, address, key)) = place else { return };
        let credit = Header::plain(FrameKind::Credit, SESSION, 0);
        hand.send(pair, &credit, &[], Some((bytes, address, key)), None);
        hand.partial.fetch_add(bytes.len() as u64, Ordering::SeqCst);
    }
    fn finish(&self, id: u64, message: &[u8]) {
        let hand = self.hand();
        let Some(landing) = hand.landings.lock().unwrap().remove(&id) else { return };
        let header = Header {
            message: message.len() as u32,
            bulk: landing.written,
            ..Header::plain(FrameKind::Reply, SESSION, id)
        };
        hand.send(landing.pair, &header, message, None, landing.taken());
    }
    fn whole(&self, lane: Lane, id: u64, bulk: &[u8], message: &[u8], ours: bool) {
        let hand = self.hand();
        let session = if ours { SESSION } else { SESSION + 1 };
        let header = Header {
            message: message.len() as u32,
            bulk: bulk.len() as u32,
            ..Header::plain(FrameKind::Reply, session, id)
        };
        let landing = if ours { hand.landings.lock().unwrap().remove(&id) } else { None };
        let last = hand.now.lock().unwrap().as_ref().map_or(0, |pairs| pairs.pairs.len() - 1);
        match landing {
            Some(landing) if landing.key != 0 => {
                // No more than the landing has, whatever the reply claims.
                let bytes = &bulk[..bulk.len().min(landing.length as usize)];
                let write = (bytes, landing.address, landing.key);
                hand.send(landing.pair, &header, message, Some(write), landing.taken());
            }
            _ => {
                let pair = if lane == Lane::Small { last } else { 0 };
                hand.send(pair, &header, message, None, None);
            }
        }
    }
    fn pings(&self) -> u64 {
        self.hand.as_ref().map_or(u64::MAX, |hand| hand.pings.load(Ordering::SeqCst))
    }
}

impl Drop for VerbsWorld {
    fn drop(&mut self) {
        self.rail.close();
        if let Some(listener) = &self.listener {
            listener.stop();
        }
    }
}
