//! The control plane: one gRPC service over the parts that decide.
//!
//! Guarantees: every request but Hello (and Status of whoever answers) names store, node and incarnation and is refused
//! where they differ; every number and name is checked before it is used, and so is what the caller may do; a session is used by
//! the identity that opened it alone; object bytes never travel here.

pub mod addresses;
pub mod asides;
pub mod caller;
pub mod handshake;
pub mod incoming;
pub mod list;
pub mod seats;
pub mod sessions;
pub mod watch;

use crate::access::{Identity, Need};
use crate::admin::Admin;
use crate::catalog::{Condition, DeleteOutcome, RequestId};
use crate::listeners::{Listener, VerbsJoinRequest};
use crate::node::{Node, SOFTWARE, count, lock};
use crate::put::{BeginPut, conflict_refusal, publish_refusal};
use crate::serve::Server;
use addresses::Announced;
use caller::Caller;
use railfs_proto::descriptor::{Attributes, Id};
use railfs_proto::hello::negotiate;
use railfs_proto::limits::{LEASE, MAX_EXTENT, MAX_TICKETS};
use railfs_proto::name::ObjectName;
use railfs_proto::reply::{Refusal, ok_outcome};
use railfs_proto::v1::{self, Code, Outcome, control_server};
use railfs_proto::{PROTOCOL_MAX, PROTOCOL_MIN};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// The gRPC service. Cheap to clone: every listener has one.
#[derive(Clone, Debug)]
pub struct ControlService {
    server: Arc<Server>,
    announced: Arc<Announced>,
    admin: Arc<Admin>,
    /// In the order of the configuration.
    listeners: Arc<Vec<Option<Listener>>>,
    /// Tells reclaim that something was superseded.
    superseded: Arc<Notify>,
    /// Ends what would go on for ever.
    stopping: tokio::sync::watch::Receiver<bool>,
}

fn invalid(error: &dyn std::fmt::Display) -> Refusal {
    Refusal::new(Code::Invalid, error.to_string())
}

fn request_id(bytes: &[u8]) -> Result<RequestId, Refusal> {
    bytes.try_into().map_err(|_| invalid(&"the request id is not 16 bytes long"))
}

/// The outcome of work that may have been refused, and its result or nothing.
fn split<T: Default>(result: Result<T, Refusal>) -> (Option<Outcome>, T) {
    match result {
        Ok(value) => (Some(ok_outcome()), value),
        Err(refusal) => (Some(refusal.to_outcome()), T::default()),
    }
}

impl ControlService {
    /// Over the parts of one server.
    pub fn new(
        server: Arc<Server>,
        announced: Announced,
        admin: Arc<Admin>,
        superseded: Arc<Notify>,
        stopping: tokio::sync::watch::Receiver<bool>,
    ) -> ControlService {
        ControlService {
            server,
            announced: Arc::new(announced),
            admin,
            superseded,
            stopping,
            listeners: Arc::default(),
        }
    }

    /// Of which server.
    pub fn node(&self) -> &Arc<Node> {
        &self.server.node
    }

    /// Begins a watch: its first message has come.
    fn begin_watch(
        &self,
        caller: Caller,
        first: &v1::WatchRequest,
        further: Streaming<v1::WatchRequest>,
        out: watch::Out,
    ) -> Result<(), Refusal> {
        let node = &self.server.node;
        let wanted = watch::Wanted::of(node, first, caller.who)?;
        let seat = watch::Seat::take(node)?;
        let acknowledged = further.map_while(|request| request.ok().map(|request| request.acknowledged));
        let catalog = Arc::clone(node.publisher.catalog());
        let stopping = self.stopping.clone();
        node.runtime.spawn(async move {
            watch::run(catalog, wanted, acknowledged, out, stopping).await;
            drop(seat);
        });
        Ok(())
    }

    /// Joins of verbs rails go to these.
    #[must_use]
    pub fn with_listeners(self, listeners: Vec<Option<Listener>>) -> ControlService {
        ControlService { listeners: Arc::new(listeners), ..self }
    }

    /// Whether a listener was there at some time: a client would try one that never was instead of what is.
    fn has_been(&self, listener: u32) -> bool {
        let listener = usize::try_from(listener).ok().and_then(|place| self.listeners.get(place));
        listener.and_then(Option::as_ref).is_none_or(Listener::has_been)
    }

    async fn join(&self, request: v1::JoinVerbsRequest, caller: &Caller) -> Result<v1::VerbsEnd, Outcome> {
        let refused = |refusal: Refusal| refusal.to_outcome();
        self.check_session(request.scope.as_ref(), request.session, caller).map_err(refused)?;
        let peer = caller.peer.unwrap_or_else(|| SocketAddr::from(([0, 0, 0, 0], 0)));
        let place = usize::try_from(request.listener).unwrap_or(usize::MAX);
        let missing = || invalid(&format!("listener {} is not one of queue pairs here", request.listener)).to_outcome();
        let listener = self.listeners.get(place).cloned().flatten().ok_or_else(missing)?;
        let end = request.end.clone().ok_or_else(|| invalid(&"the request has no queue pairs").to_outcome())?;
        let join = v1::JoinRequest {
            protocol: request.protocol,
            scope: request.scope,
            session: request.session,
            ticket: request.ticket,
            lane: v1::Lane::Bulk.into(),
            listener: request.listener,
        };
        // Queue pairs are made and connected there, which may take a moment.
        let joined = tokio::task::spawn_blocking(move || listener.join(VerbsJoinRequest { join, end }, peer)).await;
        match joined {
            Ok(Some(joined)) => joined,
            Ok(None) => Err(missing()),
            Err(error) => Err(Refusal::new(Code::Unavailable, error.to_string()).to_outcome()),
        }
    }

    fn say_hello(&self, request: &v1::HelloRequest, caller: &Caller) -> Result<v1::HelloReply, Refusal> {
        let node = &self.server.node;
        count(&node.counters.hellos);
        let protocol = negotiate(request.protocol_min, request.protocol_max, PROTOCOL_MIN, PROTOCOL_MAX)
            .map_err(|error| Refusal::new(Code::Protocol, error.to_string()))?;
        if !request.store.is_empty() && Id::from_bytes(&request.store) != Some(node.store.id()) {
            return Err(Refusal::new(Code::WrongStore, format!("here is store {}", node.store.id())));
        }
        let random = |bytes: &mut [u8]| {
            getrandom::fill(bytes)
                .map_err(|error| Refusal::new(Code::Unavailable, format!("the system gave no random bytes: {error}")))
        };
        let now = node.clock.now();
        let (who, reached) = (caller.who.as_ref(), caller.reached);
        let known = request.incarnation == node.incarnation && lock(&node.sessions).renew(request.session, who, now);
        let session = if known {
            request.session
        } else {
            let mut bytes = [0u8; 8];
            random(&mut bytes)?;
            let session = u64::from_le_bytes(bytes).max(1);
            if !lock(&node.sessions).open(session, who.cloned(), now) {
                return Err(Refusal::new(Code::OverBudget, "too many clients have sessions here: try again later"));
            }
            let identity = who.map_or("none", Identity::as_str);
            tracing::info!(session, identity, software = %request.software.escape_debug(), "session opened");
            session
        };
        let wanted = (request.tickets as usize).min(MAX_TICKETS);
        let mut tickets = Vec::with_capacity(wanted);
        for _ in 0..wanted {
            let mut ticket = [0u8; 16];
            random(&mut ticket)?;
            lock(&node.sessions).issue(session, ticket, now);
            tickets.push(ticket.to_vec().into());
        }
        Ok(v1::HelloReply {
            outcome: Some(ok_outcome()),
            protocol,
            protocol_min: PROTOCOL_MIN,
            protocol_max: PROTOCOL_MAX,
            software: SOFTWARE.to_owned(),
            store: node.store.id().to_bytes(),
            node: node.name.clone(),
            incarnation: node.incarnation,
            session,
            tickets,
            listeners: self.announced.listeners(reached).into_iter().filter(|rail| self.has_been(rail.id)).collect(),
            control_addresses: self.announced.control(reached),
            lease_milliseconds: u32::try_from(LEASE.as_millis()).unwrap_or(u32::MAX),
            capabilities: vec![railfs_proto::pin::CAPABILITY.to_owned()],
            max_fetch_bytes: MAX_EXTENT,
        })
    }

    /// Whether the session is there, and is the caller's.
    fn check_session(&self, scope: Option<&v1::Scope>, session: u64, caller: &Caller) -> Result<(), Refusal> {
        let node = &self.server.node;
        node.check_scope(scope)?;
        if lock(&node.sessions).contains(session, caller.who.as_ref()) {
            return Ok(());
        }
        let message = format!(
            "session {session} is not one of this client's here (ended, or of an earlier run): say hello again"
        );
        Err(Refusal::new(Code::WrongIncarnation, message))
    }

    async fn begin(&self, request: v1::BeginPutRequest, caller: &Caller) -> Result<(u64, v1::Descriptor), Refusal> {
        self.check_session(request.scope.as_ref(), request.session, caller)?;
        let name = ObjectName::from_message(request.name.as_ref()).map_err(|error| invalid(&error))?;
        self.server.node.check_access(caller.who.as_ref(), &name.namespace, Need::Write)?;
        let claimed = request.attributes.ok_or_else(|| invalid(&"the put has no attributes"))?;
        let attributes = Attributes::from_message(&claimed).map_err(|error| invalid(&error))?;
        let begin = BeginPut {
            session: request.session,
            name,
            attributes,
            size: claimed.size,
            stripe_size: request.stripe_size,
            page_size: request.page_size,
            width: request.width,
        };
        // A task of its own: a client that goes away in the middle leaves no half-begun put.
        let puts = Arc::clone(&self.server.puts);
        let begun = self.server.node.runtime.spawn(async move { puts.begin(begin).await }).await;
        let (put, descriptor) =
            begun.unwrap_or_else(|error| Err(Refusal::new(Code::Unavailable, error.to_string())))?;
        Ok((put, descriptor.to_message()))
    }

    async fn commit(&self, request: v1::CommitPutRequest, caller: &Caller) -> Result<(u64, bool), Refusal> {
        self.check_session(request.scope.as_ref(), request.session, caller)?;
        // The right may have been taken away since the put began.
        if let Some(namespace) = self.server.puts.namespace(request.put) {
            self.server.node.check_access(caller.who.as_ref(), &namespace, Need::Write)?;
        }
        let id = request_id(&request.request)?;
        let condition = Condition::from_message(request.if_version);
        let done = self.server.puts.commit(request.session, request.put, id, condition).await?;
        self.superseded.notify_one();
        Ok((done.version, done.superseded))
    }

    async fn remove(&self, request: v1::DeleteRequest, caller: &Caller) -> Result<(u64, u64), Refusal> {
        let node = &self.server.node;
        node.check_scope(request.scope.as_ref())?;
        let name = ObjectName::from_message(request.name.as_ref()).map_err(|error| invalid(&error))?;
        node.check_access(caller.who.as_ref(), &name.namespace, Need::Write)?;
        let id = request_id(&request.request)?;
        let condition = Condition::from_message(request.if_version);
        let outcome = node.publisher.publish_delete(&name, id, condition).await;
        self.superseded.notify_one();
        match outcome.map_err(|error| publish_refusal(&error))? {
            DeleteOutcome::Deleted { deleted, version } => {
                count(&node.counters.deletes);
                Ok((version, deleted))
            }
            DeleteOutcome::NotFound => Err(Refusal::new(Code::NotFound, format!("{name}: not found"))),
            DeleteOutcome::Superseded { by } => {
                Err(Refusal::new(Code::Conflict, format!("{name}: version {by} was put meanwhile")))
            }
            DeleteOutcome::Conflict(conflict) => Err(conflict_refusal(&conflict)),
        }
    }
}

#[tonic::async_trait]
impl control_server::Control for ControlService {
    type WatchStream = ReceiverStream<Result<v1::WatchReply, Status>>;

    async fn watch(
        &self,
        request: Request<Streaming<v1::WatchRequest>>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let caller = Caller::of(&request);
        let mut requests = request.into_inner();
        // Its seat is taken afterwards only: until then it waits, and not for ever.
        let first = tokio::time::timeout(seats::BEGIN, requests.message()).await;
        let first = first.map_err(|_| Status::deadline_exceeded("a watch whose request does not come"))??;
        let first = first.ok_or_else(|| Status::invalid_argument("a watch without a request"))?;
        let (out, replies) = watch::channel();
        if let Err(refusal) = self.begin_watch(caller, &first, requests, out.clone()) {
            let reply = v1::WatchReply { outcome: Some(refusal.to_outcome()), ..Default::default() };
            // There is room in a channel that is new.
            let _ = out.try_send(Ok(reply));
        }
        Ok(Response::new(ReceiverStream::new(replies)))
    }

    async fn hello(&self, request: Request<v1::HelloRequest>) -> Result<Response<v1::HelloReply>, Status> {
        let reply = self.say_hello(request.get_ref(), &Caller::of(&request)).unwrap_or_else(|refusal| v1::HelloReply {
            outcome: Some(refusal.to_outcome()),
            protocol_min: PROTOCOL_MIN,
            protocol_max: PROTOCOL_MAX,
            software: SOFTWARE.to_owned(),
            store: self.server.node.store.id().to_bytes(),
            ..Default::default()
        });
        Ok(Response::new(reply))
    }

    async fn lookup_object(&self, request: Request<v1::LookupRequest>) -> Result<Response<v1::LookupReply>, Status> {
        Ok(Response::new(self.server.control_lookup(request.get_ref(), Caller::of(&request).who.as_ref()).await))
    }

    async fn list(&self, request: Request<v1::ListRequest>) -> Result<Response<v1::ListReply>, Status> {
        let who = Caller::of(&request).who;
        let reply = list::list(&self.server.node, request.into_inner(), who.as_ref()).await;
        Ok(Response::new(
            reply.unwrap_or_else(|refusal| v1::ListReply { outcome: Some(refusal.to_outcome()), ..Default::default() }),
        ))
    }

    async fn begin_put(&self, request: Request<v1::BeginPutRequest>) -> Result<Response<v1::BeginPutReply>, Status> {
        let caller = Caller::of(&request);
        let reply = match self.begin(request.into_inner(), &caller).await {
            Ok((put, descriptor)) => {
                v1::BeginPutReply { outcome: Some(ok_outcome()), put, descriptor: Some(descriptor) }
            }
            Err(refusal) => v1::BeginPutReply { outcome: Some(refusal.to_outcome()), ..Default::default() },
        };
        Ok(Response::new(reply))
    }

    async fn commit_put(&self, request: Request<v1::CommitPutRequest>) -> Result<Response<v1::CommitPutReply>, Status> {
        let caller = Caller::of(&request);
        let (outcome, (version, superseded)) = split(self.commit(request.into_inner(), &caller).await);
        Ok(Response::new(v1::CommitPutReply { outcome, version, superseded }))
    }

    async fn abort_put(&self, request: Request<v1::AbortPutRequest>) -> Result<Response<v1::AbortPutReply>, Status> {
        let caller = Caller::of(&request);
        let request = request.into_inner();
        let aborted = self
            .check_session(request.scope.as_ref(), request.session, &caller)
            .and_then(|()| self.server.puts.abort(request.session, request.put));
        let (outcome, ()) = split(aborted);
        Ok(Response::new(v1::AbortPutReply { outcome }))
    }

    async fn delete(&self, request: Request<v1::DeleteRequest>) -> Result<Response<v1::DeleteReply>, Status> {
        let caller = Caller::of(&request);
        let (outcome, (version, deleted)) = split(self.remove(request.into_inner(), &caller).await);
        Ok(Response::new(v1::DeleteReply { outcome, version, deleted }))
    }

    async fn bye(&self, request: Request<v1::ByeRequest>) -> Result<Response<v1::ByeReply>, Status> {
        let who = Caller::of(&request).who;
        let (request, node) = (request.get_ref(), &self.server.node);
        let known = node.check_scope(request.scope.as_ref());
        let (outcome, ()) = split(known.map(|()| {
            // Nobody ends what is another's.
            let ended = {
                let mut sessions = lock(&node.sessions);
                sessions.contains(request.session, who.as_ref()) && sessions.end(request.session)
            };
            if ended {
                self.server.session_ended(request.session, "the client said good-bye");
            }
        }));
        Ok(Response::new(v1::ByeReply { outcome }))
    }

    async fn join_verbs(&self, request: Request<v1::JoinVerbsRequest>) -> Result<Response<v1::JoinVerbsReply>, Status> {
        let caller = Caller::of(&request);
        let reply = match self.join(request.into_inner(), &caller).await {
            Ok(end) => v1::JoinVerbsReply { outcome: Some(ok_outcome()), end: Some(end) },
            Err(outcome) => v1::JoinVerbsReply { outcome: Some(outcome), end: None },
        };
        Ok(Response::new(reply))
    }

    async fn status(&self, request: Request<v1::StatusRequest>) -> Result<Response<v1::StatusReply>, Status> {
        let scope = request.get_ref().scope.as_ref();
        let node = &self.server.node;
        let meant = scope.map_or(Ok(()), |scope| node.check_scope(Some(scope)));
        // It names no object, but directories and counts: not for those who may read nothing.
        let meant = meant.and_then(|()| node.check_access_to_any(Caller::of(&request).who.as_ref()));
        let reply = match meant {
            Ok(()) => self.admin.status(&self.server).await,
            Err(refusal) => v1::StatusReply { outcome: Some(refusal.to_outcome()), ..Default::default() },
        };
        Ok(Response::new(reply))
    }
}
