//! Serving over rails: who may join, checks, lookups, fetches.
//!
//! Guarantees: a connection joins one live session of this incarnation with a ticket that was never used; every request
//! is validated before anything is looked at, and refused where the session's identity may not read the namespace; checks and lookups that need no waiting are answered on the connection's
//! thread, everything else elsewhere; work whose time is up is not begun.

mod aging;
pub mod fetch;
pub mod files;
pub mod lookup;
pub mod pin;
pub mod pins;
pub mod reclaim;
pub mod said;

use crate::access::Identity;
use crate::node::{Node, count, lock};
use crate::put::Puts;
use files::Files;
use prost::Message;
use railfs_engine::clock::Time;
use railfs_engine::rail::tcp::{Admit, Joined};
use railfs_engine::rail::{Bulk, Handler, Incoming, Lane, Rail, Replier};
use railfs_proto::limits::LEASE;
use railfs_proto::reply::{Refusal, ok_outcome};
use railfs_proto::v1::{self, Code, JoinRequest, Outcome, RailReply, rail_reply, rail_request};
use railfs_proto::{PROTOCOL_MAX, PROTOCOL_MIN};
use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Everything that serves.
#[derive(Debug)]
pub struct Server {
    /// Identity, catalog, sessions.
    pub node: Arc<Node>,
    /// Puts under way.
    pub puts: Arc<Puts>,
    /// Open components.
    pub files: Arc<Files>,
    /// Superseded versions that clients still need.
    pub pins: Arc<pin::Keeper>,
    /// Components are opened for direct reads, too: RDMA rails read into a slab of their own.
    pub direct: bool,
    /// It was said that a directory has no direct reads.
    pub buffered: AtomicBool,
    /// What was said of damaged components.
    pub said: said::Said,
}

/// The door of one listener: closed until the server is there, so that a port is bound before any disk is touched.
#[derive(Debug)]
pub struct Gate {
    listener: u32,
    server: OnceLock<Arc<Server>>,
}

impl Gate {
    /// For the listener with this id.
    pub fn new(listener: u32) -> Arc<Gate> {
        Arc::new(Gate { listener, server: OnceLock::new() })
    }

    /// From here on connections may join.
    pub fn open(&self, server: Arc<Server>) {
        // A second call changes nothing.
        let _ = self.server.set(server);
    }

    fn admit(&self, server: &Arc<Server>, request: &JoinRequest) -> Result<Joined, Refusal> {
        let node = &server.node;
        if !(PROTOCOL_MIN..=PROTOCOL_MAX).contains(&request.protocol) {
            let message = format!(
                "the connection speaks protocol {}, this server {PROTOCOL_MIN} to {PROTOCOL_MAX}",
                request.protocol
            );
            return Err(Refusal::new(Code::Protocol, message));
        }
        node.check_scope(request.scope.as_ref())?;
        if request.listener != self.listener {
            let message =
                format!("the connection was meant for listener {}, this is {}", request.listener, self.listener);
            return Err(Refusal::new(Code::Invalid, message));
        }
        if !matches!(request.lane(), v1::Lane::Bulk | v1::Lane::Small) {
            return Err(Refusal::new(Code::Invalid, format!("lane {} is not known", request.lane)));
        }
        let denied = |error: &dyn std::fmt::Display| Refusal::new(Code::Denied, error.to_string());
        let ticket = request.ticket.as_ref().try_into();
        let ticket = ticket.map_err(|_| denied(&"the ticket is not 16 bytes long"))?;
        let redeemed = lock(&node.sessions).redeem(request.session, &ticket, node.clock.now());
        let who = redeemed.map_err(|error| denied(&error))?;
        let handler = SessionHandler { server: Arc::clone(server), who };
        Ok(Joined { session: request.session, events: server.puts.events(), handler: Arc::new(handler) })
    }
}

impl Admit for Gate {
    fn join(&self, request: &JoinRequest, peer: SocketAddr) -> Result<Joined, Outcome> {
        let Some(server) = self.server.get() else {
            return Err(Refusal::new(Code::Unavailable, "the server is starting").to_outcome());
        };
        self.admit(server, request).map_err(|refusal| {
            count(&server.node.counters.joins_refused);
            tracing::info!(%peer, listener = self.listener, reason = %refusal.message, "a rail connection was refused");
            refusal.to_outcome()
        })
    }

    fn connected(&self, session: u64, lane: Lane, connection: u64, rail: Arc<dyn Rail>) {
        let Some(server) = self.server.get() else { return };
        tracing::debug!(session, ?lane, connection, listener = self.listener, "rail connection joined");
        lock(&server.node.sessions).connected(session, connection, lane, rail);
        if lane == Lane::Bulk {
            server.puts.rails_changed(session);
        }
    }

    fn closed(&self, session: u64, lane: Lane, connection: u64, why: &str) {
        let Some(server) = self.server.get() else { return };
        tracing::debug!(session, ?lane, connection, listener = self.listener, why, "rail connection ended");
        lock(&server.node.sessions).closed(session, connection, server.node.clock.now());
        if lane == Lane::Bulk {
            server.puts.rails_changed(session);
        }
    }
}

/// Serves the requests of one connection.
struct SessionHandler {
    server: Arc<Server>,
    /// Whose session it joined.
    who: Option<Identity>,
}

impl Handler for SessionHandler {
    fn request(&self, incoming: Incoming) {
        let now = self.server.node.clock.now();
        let Incoming { message, replier } = incoming;
        let reply = Answer(replier);
        match v1::RailRequest::decode(message) {
            Ok(request) => self.server.rail_request(request, self.who.as_ref(), now, reply),
            Err(error) => {
                count(&self.server.node.counters.invalid);
                reply.refuse(&Refusal::new(Code::Invalid, format!("unreadable request: {error}")));
            }
        }
    }
}

/// Where the one answer to a request goes.
pub struct Answer(Box<dyn Replier>);

impl Answer {
    /// An outcome that is not OK.
    pub fn refuse(self, refusal: &Refusal) {
        self.send(RailReply { outcome: Some(refusal.to_outcome()), body: None });
    }
    /// A body, and OK.
    pub fn body(self, body: rail_reply::Body) {
        self.send(RailReply { outcome: Some(ok_outcome()), body: Some(body) });
    }
    fn send(self, reply: RailReply) {
        let bytes = reply.encode_to_vec().into();
        self.0.reply(Bulk::None, Box::new(move |_| bytes));
    }
    /// Bytes of a file, and what is to be said when they have gone out.
    pub fn bulk(self, bulk: Bulk, message: impl FnOnce(railfs_engine::rail::Sent) -> RailReply + Send + 'static) {
        self.0.reply(bulk, Box::new(move |sent| message(sent).encode_to_vec().into()));
    }
}

/// Until when a request may be begun.
#[derive(Clone, Copy, Debug)]
pub struct Due(Time);

impl Due {
    fn of(now: Time, microseconds: u64) -> Due {
        Due(now.after(Duration::from_micros(microseconds)))
    }
    /// How long until then.
    pub fn left(self, node: &Node) -> Duration {
        self.0.since(node.clock.now())
    }
    /// Whether its time is up.
    pub fn is_over(self, node: &Node) -> bool {
        let over = node.clock.now() >= self.0;
        if over {
            count(&node.counters.expired);
        }
        over
    }
    /// What is said then.
    pub fn refusal() -> Refusal {
        Refusal::new(Code::Expired, "the request's time was up before it was begun")
    }
}

impl Server {
    /// A session is over: what it has under way here is given up.
    pub fn session_ended(&self, session: u64, why: &str) {
        tracing::info!(session, why, "session ended");
        self.puts.session_ended(session);
    }

    fn rail_request(self: &Arc<Self>, request: v1::RailRequest, who: Option<&Identity>, now: Time, answer: Answer) {
        if let Err(refusal) = self.node.check_scope(request.scope.as_ref()) {
            return answer.refuse(&refusal);
        }
        let due = Due::of(now, request.time_left_microseconds);
        match request.body {
            Some(rail_request::Body::Check(check)) => self.check(&check, answer),
            Some(rail_request::Body::Lookup(lookup)) => self.rail_lookup(&lookup, who, due, answer),
            Some(rail_request::Body::Fetch(fetch)) => self.fetch(fetch, who, due, answer),
            Some(rail_request::Body::Pin(pin)) => self.pin(&pin, who, now, answer),
            Some(rail_request::Body::Lease(_)) => {
                count(&self.node.counters.lease_renewals);
                let lease_milliseconds = u32::try_from(LEASE.as_millis()).unwrap_or(u32::MAX);
                answer.body(rail_reply::Body::Lease(v1::LeaseReply { lease_milliseconds }));
            }
            Some(rail_request::Body::Pull(_)) => {
                answer.refuse(&Refusal::new(Code::Invalid, "a server is not pulled from"));
            }
            None => answer.refuse(&Refusal::new(Code::Invalid, "the request asks for nothing this server knows")),
        }
    }
}
