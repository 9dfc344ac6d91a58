//! The control connection of a client: one session with one node, over whichever of its addresses answers.
//!
//! Guarantees: a client is bound to the store of its first hello (or of its configuration): another one is an error,
//! never a new home; every call has a deadline; a call that fails with its connection is tried again over every address
//! known (those given, those hello listed) until then; a new incarnation, or a session that the server has forgotten,
//! is a new [`Session`], and [`OnSession`] is told once for each.

mod calls;
mod connect;
mod dial;
pub mod outcome;
mod watch;

pub use calls::{BeginPut, Begun, CommitFailure};
pub use watch::{WatchQuery, Watching};

use crate::client::Config;
use crate::clock::{Clock, Time};
use crate::error::{Error, Result};
use crate::outage::{Outage, PROBE};
use crate::rail::Lane;
use crate::rail::tcp::Tickets;
use crate::tls::Files;
use bytes::Bytes;
use railfs_proto::descriptor::Id;
use railfs_proto::hello::{Hello, Listener};
use railfs_proto::v1::control_client::ControlClient;
use railfs_proto::v1::{self, JoinRequest};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tonic::transport::Channel;

/// Told of each new session, on a thread of the runtime: it must not block.
pub type OnSession = Box<dyn Fn(Arc<Session>) + Send + Sync>;

/// How to reach a node.
#[derive(Clone, Debug)]
pub struct ControlConfig {
    /// "host:port", tried in this order.
    pub addresses: Vec<String>,
    /// Bound to this store from the start.
    pub store: Option<Id>,
    /// Connecting and saying hello.
    pub connect_deadline: Duration,
    /// Lookup, list, status, delete.
    pub metadata_deadline: Duration,
    /// For the server's log, such as "railfs 0.1.0".
    pub software: String,
    /// Mutual TLS with these files, and nothing else; `None`: plain.
    pub tls: Option<Arc<Files>>,
}

impl From<&Config> for ControlConfig {
    fn from(config: &Config) -> Self {
        ControlConfig {
            addresses: config.addresses.clone(),
            store: config.store,
            connect_deadline: config.connect_deadline,
            metadata_deadline: config.metadata_deadline,
            software: concat!("railfs ", env!("CARGO_PKG_VERSION")).to_owned(),
            tls: config.tls.clone().map(Arc::new),
        }
    }
}

/// A client's connection to one incarnation of a node's server, as hello described it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// The store.
    pub store: Id,
    /// The node.
    pub node: String,
    /// Its run.
    pub incarnation: u64,
    /// The session's number.
    pub id: u64,
    /// The protocol spoken.
    pub protocol: u32,
    /// Where rails can go.
    pub listeners: Vec<Listener>,
    /// Most that one fetch may ask for, bytes.
    pub max_fetch_bytes: u32,
    /// The control address in use when the session began.
    pub control: String,
    /// Where the control plane can be reached as well.
    pub control_addresses: Vec<SocketAddr>,
    /// The server's software.
    pub software: String,
    /// It keeps versions that clients pin.
    pub pins: bool,
    /// How long the server's lease lasts.
    pub lease: Duration,
}

impl Session {
    fn of(hello: &Hello, control: &str) -> Session {
        Session {
            store: hello.store,
            node: hello.node.clone(),
            incarnation: hello.incarnation,
            id: hello.session,
            protocol: hello.protocol,
            listeners: hello.listeners.clone(),
            max_fetch_bytes: hello.max_fetch_bytes,
            control: control.to_owned(),
            control_addresses: hello.control_addresses.clone(),
            software: hello.software.clone(),
            pins: hello.capabilities.iter().any(|word| word == railfs_proto::pin::CAPABILITY),
            lease: hello.lease,
        }
    }

    /// For requests.
    pub fn scope(&self) -> v1::Scope {
        v1::Scope { store: self.store.to_bytes(), node: self.node.clone(), incarnation: self.incarnation }
    }

    /// Whether the other is the same session of the same run.
    pub fn is_same(&self, other: &Session) -> bool {
        (self.incarnation, self.id) == (other.incarnation, other.id) && self.store == other.store
    }
}

/// A connection that said hello.
#[derive(Clone, Debug)]
struct Link {
    number: u64,
    address: String,
    client: ControlClient<Channel>,
    session: Arc<Session>,
}

#[derive(Debug, Default)]
struct State {
    link: Option<Link>,
    session: Option<Arc<Session>>,
    store: Option<Id>,
    links: u64,
    closed: bool,
    /// What the last attempt to connect met, when that was another store.
    wrong_store: Option<Error>,
    /// Tickets of the session that no rail has used yet, and when hello brought them.
    tickets: (VecDeque<Bytes>, Option<Instant>),
    /// Whether anybody answers here.
    outage: Outage,
}

/// See the module's head.
pub struct Control {
    config: ControlConfig,
    runtime: Handle,
    clock: Clock,
    state: Mutex<State>,
    /// One reconnect at a time; who waits takes what it brought.
    connecting: tokio::sync::Mutex<()>,
    /// One hello for tickets at a time; who waits takes of what it brought.
    helloing: tokio::sync::Mutex<()>,
    on_session: OnSession,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Control {
    /// Connects to nothing yet.
    pub fn new(config: ControlConfig, runtime: Handle, on_session: OnSession) -> Arc<Control> {
        let state = Mutex::new(State { store: config.store, ..State::default() });
        Arc::new(Control {
            config,
            runtime,
            clock: Clock::start(),
            state,
            connecting: Default::default(),
            helloing: Default::default(),
            on_session,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing leaves it half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects and says hello, unless that was done.
    ///
    /// # Errors
    /// `Unreachable` naming every address and what it said, `WrongStore`, `Protocol`, `Closed`.
    pub async fn connect(&self) -> Result<Arc<Session>> {
        let deadline = tokio::time::Instant::now() + self.config.connect_deadline;
        self.link(None, deadline).await.map(|link| link.session)
    }

    /// The session; `None` before the first hello. It may be over at the server by now.
    pub fn session(&self) -> Option<Arc<Session>> {
        self.state().session.clone()
    }

    /// The control address in use; `None` while there is none.
    pub fn address(&self) -> Option<String> {
        self.state().link.as_ref().map(|link| link.address.clone())
    }

    /// The error of the last attempt to connect, when another store answered it. `None` once the right one did.
    pub fn wrong_store(&self) -> Option<Error> {
        self.state().wrong_store.clone()
    }

    /// Ends the session at the server, as far as that can be said within `limit`; nothing is called any more.
    pub async fn bye(&self, limit: Duration) {
        let link = {
            let mut state = self.state();
            state.closed = true;
            state.link.take()
        };
        let Some(link) = link else { return };
        let said = async {
            // A hello that is still on its way would open another session.
            let _last = self.helloing.lock().await;
            let request = v1::ByeRequest { scope: Some(link.session.scope()), session: link.session.id };
            link.client.clone().bye(request).await
        };
        match tokio::time::timeout(limit, said).await {
            Ok(Ok(_)) => {}
            // It ends there by itself, after a while.
            Ok(Err(status)) => tracing::debug!(status = %dial::causes(&status), "good-bye"),
            Err(_) => tracing::debug!(?limit, "no answer to good-bye"),
        }
    }

    /// A call begins: when, and how long it may take. While nobody answers that is less than `limit`.
    pub fn begin(&self, limit: Duration) -> (Time, Duration) {
        (self.clock.now(), self.state().outage.limit(limit, PROBE))
    }

    /// A call that began then has ended.
    pub fn ended<T>(&self, began: Time, result: &Result<T>) {
        match result {
            Err(Error::TimedOut { .. } | Error::Unreachable { .. }) => {
                if self.state().outage.unanswered(began) {
                    tracing::warn!("the server does not answer: until it does, calls wait {PROBE:?}");
                }
            }
            Err(Error::Closed) => {}
            Ok(_) | Err(_) => self.heard(),
        }
    }

    fn heard(&self) {
        let over = self.state().outage.heard(self.clock.now());
        if let Some(after) = over {
            tracing::info!(?after, "the server answers again");
        }
    }

    /// For how long nobody has answered, where that is known.
    pub fn silent_for(&self) -> Option<Duration> {
        self.state().outage.since().map(|since| self.clock.now().since(since))
    }

    /// Nothing is called any more; what is under way fails.
    pub fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.link = None;
    }
}

impl Tickets for Control {
    fn join(&self, lane: Lane, listener: u32) -> std::result::Result<JoinRequest, String> {
        // Only threads that connect rails call this: none of them belongs to the runtime.
        let hello = self.runtime.block_on(self.ticket());
        let (session, ticket) = hello.map_err(|error: Error| error.to_string())?;
        let lane = match lane {
            Lane::Bulk => v1::Lane::Bulk,
            Lane::Small => v1::Lane::Small,
        };
        Ok(JoinRequest {
            protocol: session.protocol,
            scope: Some(session.scope()),
            session: session.id,
            ticket,
            lane: lane.into(),
            listener,
        })
    }
}

#[cfg(feature = "rdma")]
impl crate::rail::verbs::Join for Control {
    fn join(&self, listener: u32, end: v1::VerbsEnd) -> std::result::Result<(u64, v1::VerbsEnd), String> {
        // As above: a thread that connects.
        self.runtime.block_on(self.join_verbs(listener, end)).map_err(|error: Error| error.to_string())
    }
}
