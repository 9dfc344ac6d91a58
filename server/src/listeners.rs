//! The server's ends of rails, of whichever kind.
//!
//! Guarantees: one for each `[[rail]]`, by its place there; an RDMA device that cannot be had is said once and
//! tried again ([`reopen`]), announced from then on only, or stops the start where `require_rdma` says so; one whose device fails
//! later is opened again; what rails register stays within `memory.max_registered`.

pub mod reopen;

use crate::catalog::{DEFAULT_SLOTS, Slots};
use crate::config::{Config, RailConfig};
use crate::serve::Gate;
use railfs_engine::clock::{Clock, Time};
use railfs_engine::memory::Arena;
use railfs_engine::memory::ledger::Ledger;
use railfs_engine::memory::plan::Registration;
use railfs_engine::rail::slab::{Reading, Slab, SlabCounters};
use railfs_engine::rail::tcp::{ListenerConfig, TcpListener};
#[cfg(feature = "rdma")]
use railfs_engine::rail::verbs::{VerbsJoin, VerbsListener, VerbsListenerConfig};
use railfs_proto::v1::{Outcome, VerbsEnd};
#[cfg(feature = "rdma")]
use reopen::Kept;
use std::net::SocketAddr;
use std::sync::Arc;
#[cfg(feature = "rdma")]
use std::sync::atomic::AtomicU64;

/// One listener.
#[derive(Clone, Debug)]
pub enum Listener {
    /// Over stream sockets.
    Tcp(Arc<TcpListener>),
    /// Over queue pairs.
    #[cfg(feature = "rdma")]
    Verbs(Arc<Verbs>),
}

/// A listener of queue pairs, which is opened again when its device fails, and its address.
#[cfg(feature = "rdma")]
#[derive(Debug)]
pub struct Verbs {
    kept: Kept<VerbsListener>,
    address: std::net::IpAddr,
}

/// Connections now, bytes sent, bytes received, and for RDMA: bytes registered, and of a slab of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Joined connections now.
    pub connections: u64,
    /// Object bytes.
    pub sent: u64,
    /// Object bytes.
    pub received: u64,
    /// Of the received ones so many were READ from clients' memory.
    pub read: u64,
    /// Bytes registered with the device.
    pub registered: u64,
    /// Of the rail's own slab, where its device refused the one of all.
    pub own: Option<SlabCounters>,
}

/// Bytes of a version slot.
const WORD: u64 = 8;

/// How `memory.max_registered` is divided, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shares {
    /// What pulls land in.
    pub landing: u64,
    /// Of the slab, which each RDMA rail registers; 0: there are none.
    pub slab: u64,
    /// Of the version slots, which each RDMA rail registers, too.
    pub slots: u64,
    /// Of each RDMA rail's messages.
    pub messages: u64,
}

/// Each RDMA rail has an equal part: half of it for the slab, a quarter for the landings of puts, a sixteenth at most for the
/// version slots, the rest for messages. Without one all is for puts.
pub fn shares(config: &Config) -> Shares {
    match config.rails.iter().filter(|rail| rail.is_rdma()).count() as u64 {
        0 => Shares { landing: config.max_registered, slab: 0, slots: DEFAULT_SLOTS as u64 * WORD, messages: 0 },
        rails => {
            let part = config.max_registered / rails;
            // Both are whole MiB when they are mapped.
            let whole = |bytes: u64| bytes >> 20 << 20;
            let (slab, landing) = (whole(part / 2), whole(part / 4));
            let slots = WORD << (part / 16 / WORD).clamp(1 << 9, DEFAULT_SLOTS as u64).ilog2();
            Shares { landing, slab, slots, messages: (part - slab - landing).saturating_sub(slots) }
        }
    }
}

/// Version slots of a run: fewer than [`DEFAULT_SLOTS`] where rdma rails, which register them each, have little memory. A power
/// of two.
pub fn slots(config: &Config) -> usize {
    usize::try_from(shares(config).slots / WORD).unwrap_or(DEFAULT_SLOTS)
}

/// What the rdma rails register; `None`: there are none.
pub fn plan(config: &Config) -> Option<Vec<Registration>> {
    let name = |rail: &RailConfig| rail.device.clone().unwrap_or_else(|| rail.listen.ip().to_string());
    let rails = config.rails.iter().filter(|rail| rail.is_rdma());
    let Shares { landing, slab, slots, messages } = shares(config);
    let parts = || vec![("slab", slab), ("puts", landing), ("slots", slots), ("messages", messages)];
    let plan: Vec<Registration> = rails.map(|rail| Registration { device: name(rail), parts: parts() }).collect();
    (!plan.is_empty()).then_some(plan)
}

/// What RDMA rails share.
#[derive(Clone, Debug)]
pub struct Memory {
    /// Object bytes are read into it and sent from it.
    pub slab: Arc<Slab>,
    /// What pulls land in.
    pub landing: Arena,
    /// What is registered is taken from it.
    pub ledger: Ledger,
    /// How long a device may owe a completion.
    pub cq_timeout: std::time::Duration,
}

impl Memory {
    /// Maps the slab and starts its threads, where there are RDMA rails. Nothing is registered yet.
    ///
    /// # Errors
    /// There is no memory, or no thread.
    pub fn start(config: &Config) -> Result<Option<Memory>, String> {
        let shares = shares(config);
        if shares.slab == 0 {
            return Ok(None);
        }
        let slab = Slab::start("slab", shares.slab, Reading::Auto).map_err(|error| error.to_string())?;
        let landing = Arena::new(shares.landing).map_err(|error| error.to_string())?;
        let by = if slab.counters().io_uring { "io_uring" } else { "threads" };
        tracing::info!(bytes = slab.counters().bytes, by, "object bytes are read into the slab");
        Ok(Some(Memory {
            slab,
            landing,
            ledger: Ledger::new(config.max_registered, "memory.max_registered"),
            cq_timeout: config.cq_timeout,
        }))
    }
}

/// Why a rail cannot be had.
pub enum Failure {
    /// Its socket.
    Tcp(railfs_engine::error::Error),
    /// Its device.
    Rdma(String),
}

impl Listener {
    /// Binds the rail, or opens its device; one that cannot be had is opened as soon as that can be: see [`Listener::why`].
    pub fn start(
        id: u32,
        rail: &RailConfig,
        memory: Option<&Memory>,
        clock: Clock,
        gate: Arc<Gate>,
    ) -> Result<Listener, Failure> {
        if rail.is_rdma() {
            let memory = memory.ok_or_else(|| Failure::Rdma("there is no memory for it".to_owned()))?;
            return verbs(id, rail, memory, clock, gate).map_err(Failure::Rdma);
        }
        let listener = ListenerConfig::new(format!("rail{id}"), vec![rail.listen]);
        TcpListener::start(listener, clock, gate).map(|tcp| Listener::Tcp(Arc::new(tcp))).map_err(Failure::Tcp)
    }

    /// Where it can be reached: of a TCP rail with its port.
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Listener::Tcp(tcp) => tcp.addresses().first().copied(),
            #[cfg(feature = "rdma")]
            Listener::Verbs(verbs) => Some(SocketAddr::new(verbs.address, 0)),
        }
    }

    /// Of its port, megabits per second; 0: not known.
    pub fn speed_mbps(&self) -> u64 {
        match self {
            Listener::Tcp(_) => 0,
            #[cfg(feature = "rdma")]
            Listener::Verbs(verbs) => verbs.kept.now().map_or(0, |rail| rail.speed_mbps()),
        }
    }

    /// See [`Counts`].
    pub fn counts(&self) -> Counts {
        match self {
            Listener::Tcp(tcp) => {
                let counters = tcp.counters();
                Counts {
                    connections: counters.connections,
                    sent: counters.bulk_sent,
                    received: counters.bulk_received,
                    ..Counts::default()
                }
            }
            #[cfg(feature = "rdma")]
            Listener::Verbs(verbs) => verbs.kept.counts(),
        }
    }

    /// Why it is not there now, though it was: one line.
    pub fn trouble(&self) -> Option<String> {
        match self {
            Listener::Tcp(_) => None,
            #[cfg(feature = "rdma")]
            Listener::Verbs(verbs) => verbs.kept.trouble(),
        }
    }

    /// Why it is not there now, as its device says it.
    pub fn why(&self) -> Option<String> {
        match self {
            Listener::Tcp(_) => None,
            #[cfg(feature = "rdma")]
            Listener::Verbs(verbs) => verbs.kept.why(),
        }
    }

    /// Whether it was there at some time of this run: until then clients are not told of it.
    pub fn has_been(&self) -> bool {
        match self {
            Listener::Tcp(_) => true,
            #[cfg(feature = "rdma")]
            Listener::Verbs(verbs) => verbs.kept.has_been(),
        }
    }

    /// How often its device was opened again.
    pub fn reopened(&self) -> u64 {
        match self {
            Listener::Tcp(_) => 0,
            #[cfg(feature = "rdma")]
            Listener::Verbs(verbs) => verbs.kept.reopened(),
        }
    }

    /// Looks after it: see [`reopen::Kept::tend`].
    #[cfg_attr(not(feature = "rdma"), allow(unused_variables))]
    pub fn tend(&self, now: Time) {
        match self {
            Listener::Tcp(_) => {}
            #[cfg(feature = "rdma")]
            Listener::Verbs(verbs) => verbs.kept.tend(now),
        }
    }

    /// Makes the server's end of a verbs rail. Blocks for a moment. `None`: not a listener of that kind.
    #[cfg(feature = "rdma")]
    pub fn join(&self, join: VerbsJoinRequest, peer: SocketAddr) -> Option<Result<VerbsEnd, Outcome>> {
        match self {
            Listener::Tcp(_) => None,
            Listener::Verbs(verbs) => Some(match verbs.kept.now() {
                Some(rail) => rail.join(&VerbsJoin { join: join.join, end: join.end }, peer),
                None => Err(Outcome {
                    code: railfs_proto::v1::Code::Unavailable.into(),
                    message: verbs.kept.trouble().unwrap_or_else(|| "the listener is stopping".to_owned()),
                }),
            }),
        }
    }

    /// Without RDMA there is none to join.
    #[cfg(not(feature = "rdma"))]
    pub fn join(&self, _: VerbsJoinRequest, _: SocketAddr) -> Option<Result<VerbsEnd, Outcome>> {
        None
    }

    /// Whether it is one of queue pairs, through which slots can be READ.
    pub fn is_verbs(&self) -> bool {
        !matches!(self, Listener::Tcp(_))
    }

    /// Lets clients READ the slots where that can be: for those that join from now on.
    ///
    /// # Errors
    /// The device does not register them.
    #[cfg_attr(not(feature = "rdma"), allow(unused_variables))]
    pub fn expose(&self, slots: &Slots) -> Result<(), String> {
        match self {
            Listener::Tcp(_) => Ok(()),
            #[cfg(feature = "rdma")]
            Listener::Verbs(verbs) => verbs.kept.expose(slots.words(), slots.incarnation()),
        }
    }

    /// Ends every connection; bounded by a second or so. Says whether nothing is left by which a client could still READ a slot.
    pub fn stop(&self) -> bool {
        match self {
            Listener::Tcp(tcp) => {
                tcp.stop();
                true
            }
            #[cfg(feature = "rdma")]
            Listener::Verbs(verbs) => verbs.kept.stop(),
        }
    }
}

/// What a client says to join.
#[derive(Clone, Debug)]
pub struct VerbsJoinRequest {
    /// Session, ticket, listener.
    pub join: railfs_proto::v1::JoinRequest,
    /// Its queue pairs.
    pub end: VerbsEnd,
}

#[cfg(feature = "rdma")]
fn verbs(id: u32, rail: &RailConfig, memory: &Memory, clock: Clock, gate: Arc<Gate>) -> Result<Listener, String> {
    let completion = memory.cq_timeout;
    let address = rail.listen.ip();
    let config = VerbsListenerConfig {
        name: format!("rail{id}"),
        device: rail.device.clone(),
        address,
        slab: Arc::clone(&memory.slab),
        landing: Some(memory.landing.clone()),
        ledger: memory.ledger.clone(),
        limits: railfs_engine::rail::tcp::Limits { completion, ..Default::default() },
    };
    let open = move || VerbsListener::start(config.clone(), clock, Arc::clone(&gate) as _);
    let kept = Kept::open(format!("rail {id} ({address})"), u64::from(id), clock.now(), open);
    Ok(Listener::Verbs(Arc::new(Verbs { kept, address })))
}

#[cfg(feature = "rdma")]
impl reopen::Rail for VerbsListener {
    fn failed(&self) -> Option<String> {
        VerbsListener::failed(self)
    }

    fn expose(&self, words: &Arc<[AtomicU64]>, incarnation: u64) -> Result<(), String> {
        VerbsListener::expose(self, Arc::clone(words), incarnation, railfs_proto::limits::LEASE)
    }

    fn counts(&self) -> Counts {
        let counters = self.counters();
        Counts {
            connections: counters.connections,
            sent: counters.bulk_sent,
            received: counters.bulk_received,
            read: counters.read,
            registered: counters.registered,
            own: counters.own,
        }
    }

    fn stop(&self) -> bool {
        VerbsListener::stop(self)
    }
}

#[cfg(not(feature = "rdma"))]
fn verbs(_: u32, _: &RailConfig, _: &Memory, _: Clock, _: Arc<Gate>) -> Result<Listener, String> {
    Err("this railfsd was built without RDMA (the Cargo feature `rdma`)".to_owned())
}
