//! The server's ends of rails, of whichever kind.
//!
//! Guarantees: one for each `[[rail]]`, by its place there; an RDMA device that cannot be had leaves its place empty, said
//! once, or stops the start where `require_rdma` says so; what rails register stays within `memory.max_registered`.

use crate::catalog::{DEFAULT_SLOTS, Slots};
use crate::config::{Config, RailConfig};
use crate::serve::Gate;
use railfs_engine::clock::Clock;
use railfs_engine::memory::plan::Registration;
use railfs_engine::rail::tcp::{ListenerConfig, TcpListener};
#[cfg(feature = "rdma")]
use railfs_engine::rail::verbs::{VerbsJoin, VerbsListener, VerbsListenerConfig};
use railfs_proto::v1::{Outcome, VerbsEnd};
use std::net::SocketAddr;
use std::sync::Arc;

/// One listener.
#[derive(Clone, Debug)]
pub enum Listener {
    /// Over stream sockets.
    Tcp(Arc<TcpListener>),
    /// Over queue pairs.
    #[cfg(feature = "rdma")]
    Verbs(Arc<VerbsListener>),
}

/// Connections now, bytes sent, bytes received, and for RDMA: bytes registered, in use, answers that waited for memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Joined connections now.
    pub connections: u64,
    /// Object bytes.
    pub sent: u64,
    /// Object bytes.
    pub received: u64,
    /// Bytes registered with the device.
    pub registered: u64,
    /// Of which so many are in use now.
    pub registered_used: u64,
    /// Answers that had to wait for registered memory.
    pub waited: u64,
}

/// Bytes for puts, and for each rdma rail: half, and equal parts of the other half.
pub fn shares(config: &Config) -> (u64, u64) {
    let verbs = config.rails.iter().filter(|rail| rail.is_rdma()).count() as u64;
    match verbs {
        0 => (config.max_registered, 0),
        verbs => (config.max_registered / 2, config.max_registered / 2 / verbs),
    }
}

/// Version slots of a run: fewer than [`DEFAULT_SLOTS`] where rdma rails, which register them each, have little memory. A power
/// of two.
pub fn slots(config: &Config) -> usize {
    let most = DEFAULT_SLOTS as u64;
    let count = match shares(config).1 {
        0 => most,
        // An eighth of a rail's part.
        share => (share / 64).clamp(1 << 9, most),
    };
    usize::try_from(1 << count.ilog2()).unwrap_or(DEFAULT_SLOTS)
}

fn slot_bytes(config: &Config) -> u64 {
    slots(config) as u64 * 8
}

/// What the rdma rails register; `None`: there are none.
pub fn plan(config: &Config) -> Option<Vec<Registration>> {
    let (_, share) = shares(config);
    let name = |rail: &RailConfig| rail.device.clone().unwrap_or_else(|| rail.listen.ip().to_string());
    let rails = config.rails.iter().filter(|rail| rail.is_rdma());
    let plan: Vec<Registration> = rails
        .map(|rail| Registration {
            device: name(rail),
            parts: vec![
                ("object bytes", share / 2),
                ("slots", slot_bytes(config)),
                ("messages", share - share / 2 - slot_bytes(config)),
            ],
        })
        .collect();
    (!plan.is_empty()).then_some(plan)
}

/// Why a rail cannot be had.
pub enum Failure {
    /// Its socket.
    Tcp(railfs_engine::error::Error),
    /// Its device.
    Rdma(String),
}

impl Listener {
    /// Binds the rail, or opens its device.
    pub fn start(
        id: u32,
        rail: &RailConfig,
        config: &Config,
        clock: Clock,
        gate: Arc<Gate>,
    ) -> Result<Listener, Failure> {
        if rail.is_rdma() {
            return verbs(id, rail, config, clock, gate).map_err(Failure::Rdma);
        }
        let listener = ListenerConfig::new(format!("rail{id}"), vec![rail.listen]);
        TcpListener::start(listener, clock, gate).map(|tcp| Listener::Tcp(Arc::new(tcp))).map_err(Failure::Tcp)
    }

    /// Where it can be reached: of a TCP rail with its port.
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Listener::Tcp(tcp) => tcp.addresses().first().copied(),
            #[cfg(feature = "rdma")]
            Listener::Verbs(verbs) => Some(SocketAddr::new(verbs.address(), 0)),
        }
    }

    /// Of its port, megabits per second; 0: not known.
    pub fn speed_mbps(&self) -> u64 {
        match self {
            Listener::Tcp(_) => 0,
            #[cfg(feature = "rdma")]
            Listener::Verbs(verbs) => verbs.speed_mbps(),
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
            Listener::Verbs(verbs) => {
                let counters = verbs.counters();
                Counts {
                    connections: counters.connections,
                    sent: counters.bulk_sent,
                    received: counters.bulk_received,
                    registered: counters.registered,
                    registered_used: counters.registered_used,
                    waited: counters.waited,
                }
            }
        }
    }

    /// Makes the server's end of a verbs rail. Blocks for a moment. `None`: not a listener of that kind.
    #[cfg(feature = "rdma")]
    pub fn join(&self, join: VerbsJoinRequest, peer: SocketAddr) -> Option<Result<VerbsEnd, Outcome>> {
        match self {
            Listener::Tcp(_) => None,
            Listener::Verbs(verbs) => Some(verbs.join(&VerbsJoin { join: join.join, end: join.end }, peer)),
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
            Listener::Verbs(verbs) => {
                verbs.expose(slots.words().clone(), slots.incarnation(), railfs_proto::limits::LEASE)
            }
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
            Listener::Verbs(verbs) => verbs.stop(),
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
fn verbs(id: u32, rail: &RailConfig, config: &Config, clock: Clock, gate: Arc<Gate>) -> Result<Listener, String> {
    let (_, share) = shares(config);
    let completion = config.cq_timeout;
    let config = VerbsListenerConfig {
        name: format!("rail{id}"),
        device: rail.device.clone(),
        address: rail.listen.ip(),
        memory: share / 2,
        messages: (share - share / 2).saturating_sub(slot_bytes(config)),
        readers: 2,
        limits: railfs_engine::rail::tcp::Limits { completion, ..Default::default() },
    };
    VerbsListener::start(config, clock, gate).map(|verbs| Listener::Verbs(Arc::new(verbs)))
}

#[cfg(not(feature = "rdma"))]
fn verbs(_: u32, _: &RailConfig, _: &Config, _: Clock, _: Arc<Gate>) -> Result<Listener, String> {
    Err("this railfsd was built without RDMA (the Cargo feature `rdma`)".to_owned())
}
