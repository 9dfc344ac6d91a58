//! Connecting: every address that is known, the first good hello wins.

use super::dial::{self, causes};
use super::outcome::hello_error;
use super::{Control, Link, Session};
use crate::error::{Error, Result};
use crate::tls::Files;
use bytes::Bytes;
use railfs_proto::descriptor::Id;
use railfs_proto::hello::{Hello, HelloError};
use railfs_proto::limits::MAX_CONTROL_REPLY;
use railfs_proto::v1::{self, control_client::ControlClient};
use railfs_proto::{PROTOCOL_MAX, PROTOCOL_MIN};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tonic::transport::Channel;

/// An address that does not answer delays the next one by this much, not by its whole deadline.
const STAGGER: Duration = Duration::from_millis(250);
/// Tickets that the first hello asks for: enough for the rails of most servers, so that they need no further one.
const FIRST_TICKETS: u32 = 8;
/// Most tickets that are asked for at once.
const MOST_TICKETS: u32 = 64;
/// A ticket that came with a hello so long ago is not used: asking anew finds out whether the session still lives.
const TICKET_FRESH: Duration = Duration::from_secs(1);
/// Says hello over a connection.
async fn say_hello(
    client: &mut ControlClient<Channel>,
    address: &str,
    files: Option<&Arc<Files>>,
    request: &v1::HelloRequest,
    deadline: Instant,
) -> Result<Hello> {
    let unreachable = |detail| Error::Unreachable { peer: address.to_owned(), detail };
    let reply = timeout_at(deadline, client.hello(request.clone())).await;
    let reply = reply.map_err(|_| unreachable("no answer to hello in time".to_owned()))?;
    let reply = reply.map_err(|status| match status.code() {
        // What a web server's 404 becomes, too.
        tonic::Code::Unimplemented => {
            unreachable(format!("something answers there, but it is not railfsd ({})", causes(&status)))
        }
        // The connection failed: this is not what a server has said. Unless it was about TLS, which can be said so only.
        _ if dial::refusal(address, &causes(&status), files).is_some() => dial::explain(address, &status, files),
        _ if std::error::Error::source(&status).is_some() => unreachable(format!(
            "it took the connection and gave no answer to hello: a railfsd that is ending, or not the control port of one \
             (which is 7420 unless configured, not that of a rail) ({})",
            causes(&status)
        )),
        _ => unreachable(causes(&status)),
    });
    let reply = reply?.into_inner();
    Hello::check(request, &reply).map_err(|error| match (&error, Id::from_bytes(&reply.store)) {
        // It says whose it is, so that a person can tell.
        (HelloError::Refused(refusal), Some(found)) if refusal.code == v1::Code::WrongStore => {
            let expected = Id::from_bytes(&request.store).unwrap_or(found);
            Error::WrongStore { address: address.to_owned(), found, expected }
        }
        _ => hello_error(&error, address),
    })
}

/// An address, and what must be so of whoever answers there.
struct Attempt {
    address: String,
    /// The address whose host must stand in the server's certificate.
    named: String,
    files: Option<Arc<Files>>,
}

impl Attempt {
    async fn run(
        self,
        request: v1::HelloRequest,
        deadline: Duration,
    ) -> Result<(String, ControlClient<Channel>, Hello)> {
        let Attempt { address, named, files } = self;
        let end = Instant::now() + deadline;
        let channel = timeout(deadline, dial::channel(&address, &named, files.as_ref(), deadline)).await;
        let late =
            |_| Error::Unreachable { peer: address.clone(), detail: format!("no connection within {deadline:?}") };
        let client = ControlClient::new(channel.map_err(late)??);
        let mut client = client.max_decoding_message_size(MAX_CONTROL_REPLY);
        let hello = say_hello(&mut client, &address, files.as_ref(), &request, end).await?;
        Ok((address, client, hello))
    }
}

impl Control {
    fn request(&self, tickets: u32) -> v1::HelloRequest {
        let state = self.state();
        let session = state.session.as_ref();
        v1::HelloRequest {
            protocol_min: PROTOCOL_MIN,
            protocol_max: PROTOCOL_MAX,
            software: self.config.software.clone(),
            store: state.store.map(Id::to_bytes).unwrap_or_default(),
            session: session.map_or(0, |session| session.id),
            incarnation: session.map_or(0, |session| session.incarnation),
            tickets,
            capabilities: Vec::new(),
        }
    }

    fn known_addresses(&self) -> Vec<String> {
        let mut all = self.config.addresses.clone();
        if let Some(session) = &self.state().session {
            all.extend(session.control_addresses.iter().map(ToString::to_string));
        }
        let mut known: Vec<String> = Vec::with_capacity(all.len());
        for address in all {
            if !known.contains(&address) {
                known.push(address);
            }
        }
        known
    }

    /// The address whose host the certificate of the server at `address` must name: its own, if it was given; that of the
    /// first which was, if it is one that hello listed. So whoever is believed was named by the user.
    fn named(&self, address: &str) -> String {
        let given = &self.config.addresses;
        let own = given.iter().find(|other| *other == address).or_else(|| given.first());
        own.map_or_else(|| address.to_owned(), Clone::clone)
    }

    /// The connection in use; another one where there is none, or where it is the one that `failed`.
    pub(super) async fn link(&self, failed: Option<u64>, deadline: Instant) -> Result<Link> {
        let current = |control: &Control| {
            let state = control.state();
            if state.closed {
                return Err(Error::Closed);
            }
            Ok(state.link.clone().filter(|link| Some(link.number) != failed))
        };
        if let Some(link) = current(self)? {
            return Ok(link);
        }
        let late = || self.unreachable("no connection in time".to_owned());
        let _one = timeout_at(deadline, self.connecting.lock()).await.map_err(|_| late())?;
        if let Some(link) = current(self)? {
            return Ok(link);
        }
        self.state().link = None;
        let connected = self.connect_any(deadline).await;
        let linked = connected.and_then(|(address, client, hello)| self.adopt(address, client, &hello));
        self.note(&linked);
        linked
    }

    /// Remembers whether another store answered.
    fn note<T>(&self, hello: &Result<T>) {
        let wrong = hello.as_ref().err().filter(|error| matches!(error, Error::WrongStore { .. })).cloned();
        let said = std::mem::replace(&mut self.state().wrong_store, wrong.clone());
        if let (Some(error), None) = (&wrong, said) {
            // Once, for as long as it is so.
            tracing::error!("{error}: nothing is read from it");
        }
    }

    fn unreachable(&self, detail: String) -> Error {
        Error::Unreachable { peer: self.known_addresses().join(", "), detail }
    }

    async fn connect_any(&self, deadline: Instant) -> Result<(String, ControlClient<Channel>, Hello)> {
        let mut attempts = JoinSet::new();
        let request = self.request(FIRST_TICKETS);
        let limit = self.config.connect_deadline.min(deadline.saturating_duration_since(Instant::now()));
        for (place, address) in (0u32..).zip(self.known_addresses()) {
            let request = request.clone();
            let attempt = Attempt { named: self.named(&address), address, files: self.config.tls.clone() };
            attempts.spawn_on(
                async move {
                    sleep(STAGGER * place.min(8)).await;
                    attempt.run(request, limit).await
                },
                &self.runtime,
            );
        }
        let mut said = Vec::new();
        let mut worst = None;
        while let Ok(Some(attempt)) = timeout_at(deadline, attempts.join_next()).await {
            match attempt {
                // The others end with the set.
                Ok(Ok(won)) => return Ok(won),
                Ok(Err(Error::Unreachable { peer, detail })) => said.push(format!("{peer}: {detail}")),
                // Somebody answers there, and is not whom we want: more telling than silence.
                Ok(Err(error)) => worst = Some(error),
                Err(error) => said.push(error.to_string()),
            }
        }
        if said.is_empty() {
            said.push("no address answered in time".to_owned());
        }
        Err(worst.unwrap_or_else(|| self.unreachable(said.join("; "))))
    }

    /// From here on this connection is in use. A session that is not the one before is told of.
    fn adopt(&self, address: String, client: ControlClient<Channel>, hello: &Hello) -> Result<Link> {
        let session = Session::of(hello, &address);
        let (link, new) = {
            let mut state = self.state();
            if state.closed {
                return Err(Error::Closed);
            }
            match state.store {
                Some(expected) if expected != session.store => {
                    return Err(Error::WrongStore { address, found: session.store, expected });
                }
                _ => state.store = Some(session.store),
            }
            let (session, new) = match &state.session {
                Some(before) if before.is_same(&session) && before.listeners == session.listeners => {
                    (Arc::clone(before), false)
                }
                _ => (Arc::new(session), true),
            };
            state.session = Some(Arc::clone(&session));
            state.tickets = (hello.tickets.iter().cloned().collect(), Some(std::time::Instant::now()));
            state.links += 1;
            let link = Link { number: state.links, address, client, session };
            state.link = Some(link.clone());
            (link, new)
        };
        self.heard();
        if new {
            let session = &link.session;
            tracing::info!(store = %session.store, node = %session.node, incarnation = session.incarnation, session = session.id, control = %link.address, "session");
            (self.on_session)(Arc::clone(&link.session));
        }
        Ok(link)
    }

    /// The tickets that came with a hello are there for the rails that are about to join.
    fn stock(&self, tickets: Vec<Bytes>) {
        self.state().tickets = (tickets.into(), Some(std::time::Instant::now()));
    }

    fn stocked(&self) -> Option<(Arc<Session>, Bytes)> {
        let mut state = self.state();
        let fresh = state.tickets.1.is_some_and(|came| came.elapsed() < TICKET_FRESH) && !state.closed;
        let session = state.session.clone().filter(|_| fresh)?;
        Some((session, state.tickets.0.pop_front()?))
    }

    /// A ticket for a rail: one that came with a hello just now, or by hello again over the connection in use, which
    /// finds a session that is still known, or a new one.
    pub(super) async fn ticket(&self) -> Result<(Arc<Session>, Bytes)> {
        let deadline = Instant::now() + self.config.connect_deadline;
        let late = || self.unreachable("no ticket in time".to_owned());
        let _one = timeout_at(deadline, self.helloing.lock()).await.map_err(|_| late())?;
        let mut failed = None;
        loop {
            let link = self.link(failed, deadline).await?;
            if let Some(found) = self.stocked() {
                return Ok(found);
            }
            // Both lanes of every rail: where one joins, the others are likely to.
            let lanes = u32::try_from(link.session.listeners.len()).unwrap_or(u32::MAX).saturating_mul(2);
            match self.hello_again(&link, lanes.clamp(2, MOST_TICKETS), deadline).await {
                Ok((link, tickets)) => {
                    let missing = || Error::BadAnswer { peer: link.address.clone(), detail: "no ticket".to_owned() };
                    let mut tickets = tickets.into_iter();
                    let ticket = tickets.next().ok_or_else(missing)?;
                    self.stock(tickets.collect());
                    return Ok((link.session, ticket));
                }
                Err(Error::Unreachable { .. }) if Instant::now() < deadline && failed.is_none() => {
                    failed = Some(link.number);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes a ticket and makes the server's end of a verbs rail.
    #[cfg(feature = "rdma")]
    pub(super) async fn join_verbs(&self, listener: u32, end: v1::VerbsEnd) -> Result<(u64, v1::VerbsEnd)> {
        let deadline = Instant::now() + self.config.connect_deadline;
        let (session, ticket) = self.ticket().await?;
        let link = self.link(None, deadline).await?;
        let request = v1::JoinVerbsRequest {
            protocol: session.protocol,
            scope: Some(session.scope()),
            session: session.id,
            ticket,
            listener,
            end: Some(end),
        };
        let unreachable = |detail| Error::Unreachable { peer: link.address.clone(), detail };
        let mut client = link.client.clone();
        let reply = timeout_at(deadline, client.join_verbs(request)).await;
        let reply = reply.map_err(|_| unreachable("no answer to a join in time".to_owned()))?;
        let reply = reply.map_err(|status| unreachable(causes(&status)))?.into_inner();
        railfs_proto::reply::check_outcome(reply.outcome.as_ref())
            .map_err(|refusal| unreachable(format!("the rail was refused: {refusal}")))?;
        let end = reply.end.ok_or_else(|| Error::BadAnswer {
            peer: link.address.clone(),
            detail: "a join without queue pairs".to_owned(),
        })?;
        Ok((session.id, end))
    }

    /// Hello over a connection that is there. One at a time: several rails that ask for tickets of a server that was
    /// restarted would otherwise each be given a session of their own, and a put belongs to one session's rails.
    pub(super) async fn hello_again(&self, link: &Link, tickets: u32, deadline: Instant) -> Result<(Link, Vec<Bytes>)> {
        let late = || self.unreachable("another hello is not answered yet".to_owned());
        let _one = timeout_at(deadline, self.connecting.lock()).await.map_err(|_| late())?;
        // Another one may have connected meanwhile.
        let link = &self.state().link.clone().unwrap_or_else(|| link.clone());
        let request = self.request(tickets);
        let mut client = link.client.clone();
        let hello = say_hello(&mut client, &link.address, self.config.tls.as_ref(), &request, deadline).await;
        self.note(&hello);
        if let Err(Error::WrongStore { .. }) = &hello {
            // The channel has connected anew, to somebody else: other addresses may still lead to the right one.
            let mut state = self.state();
            state.link = state.link.take().filter(|current| current.number != link.number);
        }
        let hello = hello?;
        let current = {
            let state = self.state();
            state.link.clone().filter(|current| {
                current.number == link.number
                    && current.session.incarnation == hello.incarnation
                    && current.session.id == hello.session
            })
        };
        let link = match current {
            Some(link) => link,
            None => self.adopt(link.address.clone(), client, &hello)?,
        };
        Ok((link, hello.tickets))
    }
}
