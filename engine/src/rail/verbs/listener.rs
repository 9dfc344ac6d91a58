//! The server's end: joins that came over the control connection become queue pairs.
//!
//! Guarantees: no ticket, no queue pair; connections are bounded (I6); a client that never becomes ready is given up when it
//! does not answer; the server's memory is written to by nobody from outside, and nothing of it but the version slots is read; [`VerbsListener::stop`]
//! returns within a second or so.

use super::group::{Group, Parts};
use super::lane::LaneRail;
use super::link::buffer_bytes;
use super::prepare::{Device, Half, Plan};
use super::source::Source;
use super::watch::{Verdict, Watch, verdict};
use super::{VerbsJoin, VerbsListenerConfig};
use crate::clock::Clock;
use crate::memory::Arena;
use crate::memory::ledger::Share;
use crate::rail::Lane;
use crate::rail::slab::SlabCounters;
use crate::rail::tcp::Admit;
use crate::rail::tcp::listener::NUMBERS;
use crate::rail::tcp::signal::{Latch, lock};
use crate::rail::totals::{Totals, add};
use crate::verbs::{Access, Mr, WrId};
use railfs_proto::v1::{self, Code, Outcome, VerbsEnd};
use railfs_proto::verbs::{End, SlotArray};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// How long [`VerbsListener::stop`] waits for the threads.
const STOP: Duration = Duration::from_millis(1500);

/// What a listener has done so far and does now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerbsListenerCounters {
    /// Connections now.
    pub connections: u64,
    /// Joins that were refused.
    pub refused: u64,
    /// Bulk bytes sent.
    pub bulk_sent: u64,
    /// Bulk bytes received.
    pub bulk_received: u64,
    /// Of which so many were READ from clients' memory.
    pub read: u64,
    /// Frames dropped because nobody waits for them.
    pub stale: u64,
    /// Bytes registered: object bytes and messages.
    pub registered: u64,
    /// Of the listener's own slab, where its device refused the one of all.
    pub own: Option<SlabCounters>,
}

/// The version slots, open to READs.
struct Exposed {
    announced: SlotArray,
    share: Share,
    _mr: Arc<Mr>,
}

struct Shared {
    config: VerbsListenerConfig,
    clock: Clock,
    device: Device,
    source: Source,
    /// Where bulk lands that clients offer.
    pulled: Option<(Arc<Mr>, Share)>,
    admit: Arc<dyn Admit>,
    totals: Arc<Totals>,
    refused: AtomicU64,
    /// Bytes of registered memory that connections have for their messages.
    messages: Arc<AtomicU64>,
    /// Bulk bytes READ from clients.
    read: Arc<AtomicU64>,
    /// The version slots, once they are open to READs.
    slots: OnceLock<Exposed>,
    groups: Mutex<HashMap<u64, Arc<Group>>>,
    stopping: AtomicBool,
    /// Why the device is of no use any more.
    failed: OnceLock<String>,
    latch: Arc<Latch>,
}

/// Lets verbs rails join. Dropping it stops it.
pub struct VerbsListener {
    shared: Arc<Shared>,
    gid: [u8; 16],
    /// Ends before the device is closed.
    _watch: Watch,
}

impl std::fmt::Debug for VerbsListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VerbsListener").field("name", &self.shared.config.name).finish_non_exhaustive()
    }
}

impl VerbsListener {
    /// Opens the device, registers the memory, starts the threads. The error names device and address.
    pub fn start(config: VerbsListenerConfig, clock: Clock, admit: Arc<dyn Admit>) -> Result<VerbsListener, String> {
        let what = format!("rail listener {} on {}", config.name, config.address);
        let named = |why: String| format!("{what}: {why}");
        let device = Device::open(config.device.as_deref(), config.address).map_err(named)?;
        VerbsListener::on(device, config, clock, admit)
    }

    /// The same, on a device that is open.
    pub(super) fn on(
        device: Device,
        config: VerbsListenerConfig,
        clock: Clock,
        admit: Arc<dyn Admit>,
    ) -> Result<VerbsListener, String> {
        let what = format!("rail listener {} on {}", config.name, config.address);
        let named = |why: String| format!("{what}: {why}");
        device.port().map_err(named)?;
        let gid = device.gid().map_err(named)?.raw;
        let source = Source::new(&config.name, &device.pd, &config.slab, &config.ledger).map_err(named)?;
        let pulled = config.landing.as_ref().and_then(|arena| landing(&config, &device, arena));
        let shared = Arc::new(Shared {
            config,
            clock,
            device,
            source,
            pulled,
            admit,
            totals: Arc::default(),
            refused: AtomicU64::new(0),
            messages: Arc::default(),
            read: Arc::default(),
            slots: OnceLock::new(),
            groups: Mutex::default(),
            stopping: AtomicBool::new(false),
            failed: OnceLock::new(),
            latch: Arc::default(),
        });
        let weak = Arc::downgrade(&shared);
        let look = shared.device.look();
        let watch = Watch::start(&shared.device.context, move |event| {
            let Some(shared) = weak.upgrade() else { return };
            if let Verdict::Reopen(why) = verdict(event, look.port(), &|_| false, &|| Ok(())) {
                let device = shared.device.context.name();
                shared.failed.get_or_init(|| format!("the device {device}: {why}"));
            }
            let groups: Vec<_> = lock(&shared.groups).values().cloned().collect();
            for group in groups {
                match verdict(event, look.port(), &|event| group.owns(event), &|| look.address()) {
                    Verdict::End(why) | Verdict::Reopen(why) => {
                        group.end(format!("the server's device {}: {why}", shared.device.context.name()));
                    }
                    Verdict::Nothing | Verdict::Retry => {}
                }
            }
        });
        let watch = watch.map_err(|error| named(error.to_string()))?;
        Ok(VerbsListener { shared, gid, _watch: watch })
    }

    /// Why the device is of no use any more: then this is to be dropped, and one started anew.
    pub fn failed(&self) -> Option<String> {
        self.shared.failed.get().cloned()
    }

    /// The GID it is reached by.
    pub fn gid(&self) -> [u8; 16] {
        self.gid
    }

    /// Opens version slots to READs, for all connections that join from now on. They stay registered as long as the listener
    /// lives. `lease`: how long an answer lets a client believe what it READs; whoever comes after this run of the server must
    /// not publish sooner. A second call changes nothing.
    ///
    /// # Errors
    /// The device does not register them; the message says how many bytes.
    pub fn expose(&self, words: Arc<[AtomicU64]>, incarnation: u64, lease: Duration) -> Result<(), String> {
        let shared = &self.shared;
        if shared.slots.get().is_some() {
            return Ok(());
        }
        let count = words.len() as u64;
        let share = shared.config.ledger.take(size_of_val(&*words) as u64, "the version slots")?;
        let mr = Mr::register(&shared.device.pd, words, Access::Slots).map_err(|error| error.to_string())?;
        let first = mr.slice(0, 8).ok_or("there are no slots")?;
        let announced = SlotArray { address: first.address(), key: mr.remote_key(), count, incarnation, lease };
        // Where another call was first its registration stays, and this one is given back here.
        drop(shared.slots.set(Exposed { announced, share, _mr: mr }));
        Ok(())
    }

    /// Its address.
    pub fn address(&self) -> IpAddr {
        self.shared.config.address
    }

    /// The device's name.
    pub fn device(&self) -> &str {
        self.shared.device.context.name()
    }

    /// Of the port, megabits per second; 0: not known.
    pub fn speed_mbps(&self) -> u64 {
        self.shared.device.port().map_or(0, |port| port.speed_mbps)
    }

    /// See [`VerbsListenerCounters`].
    pub fn counters(&self) -> VerbsListenerCounters {
        let totals = self.shared.totals.counters();
        let Source { slab, own, .. } = &self.shared.source;
        VerbsListenerCounters {
            connections: lock(&self.shared.groups).len() as u64,
            refused: self.shared.refused.load(Ordering::Relaxed),
            bulk_sent: totals.bulk_sent,
            bulk_received: totals.bulk_received,
            read: self.shared.read.load(Ordering::Relaxed),
            stale: totals.stale,
            registered: self.shared.source.bytes()
                + self.shared.pulled.as_ref().map_or(0, |(_, share)| share.bytes())
                + self.shared.messages.load(Ordering::SeqCst)
                + self.shared.slots.get().map_or(0, |exposed| exposed.share.bytes()),
            own: own.then(|| slab.counters()),
        }
    }

    /// Makes the server's end of a connection. Blocks for a moment: not on the runtime.
    ///
    /// # Errors
    /// What to answer: the ticket is not good, the claims make no sense, or the device has no more to give.
    pub fn join(&self, request: &VerbsJoin, peer: SocketAddr) -> Result<VerbsEnd, Outcome> {
        self.shared.join(request, peer).inspect_err(|outcome| {
            self.shared.refused.fetch_add(1, Ordering::Relaxed);
            tracing::info!(listener = %self.shared.config.name, %peer, why = %outcome.message, "a verbs rail was refused");
        })
    }

    /// Ends every connection; bounded by a second or so. Says whether nothing is left by which a client could still READ a slot.
    pub fn stop(&self) -> bool {
        let shared = &self.shared;
        shared.stopping.store(true, Ordering::SeqCst);
        let groups: Vec<_> = lock(&shared.groups).values().cloned().collect();
        for group in &groups {
            group.close("the listener was stopped");
        }
        drop(groups);
        let ended = shared.latch.wait(STOP);
        if !ended {
            tracing::error!(listener = %shared.config.name, "a thread of the listener has not ended; it is left behind");
        }
        if shared.source.own {
            shared.source.slab.stop();
        }
        // A queue pair that the device did not give back may still answer.
        ended && crate::verbs::leaked() == 0
    }
}

impl Drop for VerbsListener {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The landings of pulls, registered; without that they are carried, which is said.
fn landing(config: &VerbsListenerConfig, device: &Device, arena: &Arena) -> Option<(Arc<Mr>, Share)> {
    let registered = config.ledger.take(arena.stats().total, "the landings of puts").and_then(|share| {
        let mr = Mr::register(&device.pd, arena.clone(), Access::Local).map_err(|error| error.to_string())?;
        Ok((mr, share))
    });
    registered
        .inspect_err(|why| {
            tracing::error!(
                listener = %config.name, %why,
                "the landings of puts cannot be registered: what is put travels in messages, which costs both sides more"
            );
        })
        .ok()
}

/// A connection's part of the memory for messages, given back when it is dropped.
struct Messages {
    _share: Share,
    bytes: u64,
    all: Arc<AtomicU64>,
}

impl Messages {
    fn take(shared: &Shared, bytes: u64) -> Result<Messages, String> {
        let share = shared.config.ledger.take(bytes, "the messages of a connection")?;
        shared.messages.fetch_add(bytes, Ordering::SeqCst);
        Ok(Messages { _share: share, bytes, all: shared.messages.clone() })
    }
}

impl Drop for Messages {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

fn outcome(code: Code, message: impl Into<String>) -> Outcome {
    Outcome { code: code as i32, message: message.into() }
}

impl Shared {
    fn join(self: &Arc<Self>, request: &VerbsJoin, peer: SocketAddr) -> Result<VerbsEnd, Outcome> {
        let unavailable = |why: String| outcome(Code::Unavailable, why);
        let theirs = End::from_message(Some(&request.end)).map_err(|why| outcome(Code::Invalid, why.to_string()))?;
        if self.stopping.load(Ordering::SeqCst) {
            return Err(unavailable("the listener is stopping".into()));
        }
        if let Some(why) = self.failed.get() {
            return Err(unavailable(why.clone()));
        }
        let messages = Messages::take(self, buffer_bytes(theirs.pairs.len()) as u64).map_err(unavailable)?;
        let join = v1::JoinRequest { lane: v1::Lane::Bulk as i32, ..request.join.clone() };
        let joined = self.admit.join(&join, peer)?;
        let number = NUMBERS.fetch_add(2, Ordering::Relaxed);
        // Enough to tell completions of this connection from any other's.
        let generation = WrId::generation(number);
        let pulled = self.pulled.as_ref().map(|(mr, _)| mr);
        let plan = Plan {
            device: &self.device,
            bulk: theirs.pairs.len().saturating_sub(1),
            memory: std::iter::once(&self.source.mr).chain(pulled).cloned().collect(),
            written: false,
            slots: self.slots.get().is_some(),
            windows: false,
            generation,
        };
        let half = Half::new(&plan).map_err(unavailable)?;
        let mut end = half.end().to_message();
        end.slots = self.slots.get().map(|exposed| exposed.announced.to_message());
        let full = half.connect(&theirs).map_err(unavailable)?;
        let totals = Arc::new(Totals::default());
        for totals in [&totals, &self.totals] {
            add(&totals.connects, 1);
        }
        let group = Group::new(Parts {
            name: format!("{} connection {number}", self.config.name),
            peer: peer.to_string(),
            session: joined.session,
            generation,
            limits: self.config.limits.clone(),
            clock: self.clock,
            events: joined.events,
            handler: joined.handler,
            totals: vec![totals, self.totals.clone()],
            source: Some(self.source.clone()),
            landing: None,
            pulled: pulled.filter(|_| full.offers).cloned(),
            offered: None,
            read: self.read.clone(),
            windows: None,
            soft: self.device.facts.soft,
            cq: full.cq,
            buffers: full.buffers,
            pairs: full.pairs,
            depth: full.depth,
            their_depth: theirs.depth,
            their_piece: theirs.piece,
            slots: None,
        });
        let group = group.map_err(|error| unavailable(error.to_string()))?;
        lock(&self.groups).insert(number, group.clone());
        let (of_group, of_listener, shared) = (group.running(), self.latch.enter(), self.clone());
        let of_thread = group.clone();
        let spawned = std::thread::Builder::new().name(format!("{}-{number}", self.config.name)).spawn(move || {
            of_listener.begin();
            shared.connection(number, &of_thread, peer);
            drop(of_thread);
            drop((messages, of_group, of_listener));
        });
        if let Err(error) = spawned {
            lock(&self.groups).remove(&number);
            return Err(unavailable(format!("no thread could be started: {error}")));
        }
        if self.stopping.load(Ordering::SeqCst) {
            group.end("the listener was stopped");
        }
        Ok(end)
    }

    /// The thread of one connection.
    fn connection(&self, number: u64, group: &Arc<Group>, peer: SocketAddr) {
        let session = group.parts.session;
        let lanes = [(Lane::Bulk, number), (Lane::Small, number + 1)];
        let ready = || {
            for (lane, number) in lanes {
                self.admit.connected(session, lane, number, Arc::new(LaneRail { group: group.clone(), lane }));
            }
        };
        let silent = |silent| tracing::info!(listener = %self.config.name, %peer, silent, "a client's connection");
        let why = group.run(&silent, &ready);
        lock(&self.groups).remove(&number);
        if group.is_ready() {
            for (lane, number) in lanes {
                self.admit.closed(session, lane, number, &why);
            }
        }
        tracing::debug!(listener = %self.config.name, %peer, %why, "connection closed");
    }
}
