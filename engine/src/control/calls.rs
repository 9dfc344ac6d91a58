//! The calls: each with a deadline, tried again over another connection where the first one broke.

use super::dial::causes;
use super::outcome::{error_of, reply_error};
use super::{Control, Link, Session};
use crate::client::{ListEntry, ListQuery, Listing, PutDone};
use crate::error::{Error, Result};
use railfs_proto::descriptor::{Attributes, Descriptor};
use railfs_proto::name::ObjectName;
use railfs_proto::reply::{self, Lookup, check_begin_put_reply, check_list_reply, check_outcome};
use railfs_proto::status::check_status_reply;
use railfs_proto::v1::control_client::ControlClient;
use railfs_proto::v1::{self, Code};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::transport::Channel;
use tonic::{Response, Status};

/// Between two tries.
const AGAIN: Duration = Duration::from_millis(50);

/// A put that begins.
#[derive(Clone, Debug)]
pub struct BeginPut {
    /// Its name.
    pub name: ObjectName,
    /// Mode, time, owner.
    pub attributes: Attributes,
    /// Bytes.
    pub size: u64,
    /// 0: the server's default.
    pub stripe_size: u32,
    /// 0: the server's default.
    pub page_size: u32,
    /// 0: the server's default.
    pub width: u32,
}

/// A put that has begun.
#[derive(Clone, Debug)]
pub struct Begun {
    /// Its number.
    pub put: u64,
    /// What will be there.
    pub descriptor: Descriptor,
    /// The session it belongs to.
    pub session: Arc<Session>,
}

/// Why a commit was not answered with a version.
#[derive(Clone, Debug)]
pub enum CommitFailure {
    /// The connection broke, or the server asks for patience: ask again with the same request id.
    Again(Error),
    /// The put's session is over (the server was restarted): begin anew, with the same request id.
    OtherRun,
    /// It failed.
    Final(Error),
}

/// Whether the call may not have reached the server, or another connection may do better.
pub(super) fn is_transport(status: &Status) -> bool {
    use tonic::Code as C;
    matches!(status.code(), C::Unavailable | C::Unknown | C::Cancelled | C::Internal | C::DeadlineExceeded)
}

fn status_error(status: &Status, what: &str, peer: &str) -> Error {
    if is_transport(status) {
        Error::Unreachable { peer: peer.to_owned(), detail: format!("{what}: {}", causes(status)) }
    } else {
        Error::BadAnswer { peer: peer.to_owned(), detail: format!("{what}: {}", causes(status)) }
    }
}

impl Control {
    /// Calls until it is answered, the deadline comes, or the answer is one that no other try changes.
    async fn call<Q, R>(
        &self,
        what: &str,
        limit: Duration,
        request: impl Fn(&Session) -> Q,
        send: impl AsyncFn(ControlClient<Channel>, Q) -> std::result::Result<Response<R>, Status>,
        outcome: impl Fn(&R) -> Option<&v1::Outcome>,
    ) -> Result<(Q, R, Link)>
    where
        Q: Clone,
    {
        let deadline = Instant::now() + limit;
        let timed_out = |detail: String| Error::TimedOut { what: what.to_owned(), after: limit, detail };
        let mut failed = None;
        let mut last = String::new();
        loop {
            let link = match self.link(failed, deadline).await {
                Ok(link) => link,
                Err(error @ Error::Unreachable { .. }) if Instant::now() + AGAIN < deadline => {
                    last = format!(": {error}");
                    sleep(AGAIN).await;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let message = request(&link.session);
            let sent = timeout_at(deadline, send(link.client.clone(), message.clone())).await;
            match sent {
                Err(_) => return Err(timed_out(last)),
                Ok(Err(status)) if is_transport(&status) => {
                    let error = status_error(&status, what, &link.address);
                    if Instant::now() + AGAIN >= deadline {
                        return Err(error);
                    }
                    last = format!(": {error}");
                    failed = Some(link.number);
                    sleep(AGAIN).await;
                }
                Ok(Err(status)) => return Err(status_error(&status, what, &link.address)),
                Ok(Ok(reply)) => {
                    let reply = reply.into_inner();
                    match check_outcome(outcome(&reply)) {
                        Err(refusal) if refusal.code == Code::WrongIncarnation => {
                            // The server was restarted, or has forgotten the session: introduce ourselves again.
                            if Instant::now() + AGAIN >= deadline {
                                return Err(error_of(&refusal, what, 0));
                            }
                            last = format!(": {}", refusal.message);
                            self.hello_again(&link, 0, deadline).await?;
                        }
                        _ => return Ok((message, reply, link)),
                    }
                }
            }
        }
    }

    /// What has the name, by the control connection.
    ///
    /// # Errors
    /// `Unreachable`, `TimedOut`, `BadAnswer`, and what the server says.
    pub async fn lookup(&self, name: &ObjectName) -> Result<Lookup> {
        let what = format!("lookup of {name}");
        let (_, reply, _) = self
            .call(
                &what,
                self.config.metadata_deadline,
                |session| v1::LookupRequest { scope: Some(session.scope()), name: Some(name.to_message()) },
                async |mut client, request| client.lookup_object(request).await,
                |reply: &v1::LookupReply| reply.outcome.as_ref(),
            )
            .await?;
        Lookup::from_message(&reply).map_err(|error| reply_error(&error, &name.to_string()))
    }

    /// One page of a list.
    ///
    /// # Errors
    /// `NotFound` when nobody ever wrote to the namespace, and as [`Control::lookup`].
    pub async fn list(&self, query: &ListQuery) -> Result<Listing> {
        let what = format!("list of {}/{}", query.namespace, String::from_utf8_lossy(&query.prefix).escape_debug());
        let (request, reply, _) = self
            .call(
                &what,
                self.config.metadata_deadline,
                |session| v1::ListRequest {
                    scope: Some(session.scope()),
                    namespace: query.namespace.clone(),
                    prefix: query.prefix.clone().into(),
                    delimited: query.delimited,
                    after: query.after.clone().into(),
                    limit: query.limit,
                },
                async |mut client, request| client.list(request).await,
                |reply: &v1::ListReply| reply.outcome.as_ref(),
            )
            .await?;
        let page = check_list_reply(&request, &reply).map_err(|error| reply_error(&error, &query.namespace))?;
        let entry = |entry| match entry {
            reply::ListEntry::Object { key, descriptor } => {
                ListEntry { key: key.as_bytes().to_vec(), object: Some(descriptor) }
            }
            reply::ListEntry::Directory { key } => ListEntry { key: key.as_bytes().to_vec(), object: None },
        };
        Ok(Listing {
            entries: page.entries.into_iter().map(entry).collect(),
            next: page.next_after.map(Vec::from),
            mtime: (page.mtime.seconds, page.mtime.nanoseconds),
        })
    }

    /// Begins a put. One whose answer is lost is aborted by the server in time.
    ///
    /// # Errors
    /// `NoSpace`, `ReadOnly`, `Invalid`, and as [`Control::lookup`].
    pub async fn begin_put(&self, begin: &BeginPut) -> Result<Begun> {
        let what = format!("put of {}", begin.name);
        let (request, reply, link) = self
            .call(
                &what,
                // Taking space on many disks may take longer than a lookup.
                self.config.metadata_deadline * 2,
                |session| v1::BeginPutRequest {
                    scope: Some(session.scope()),
                    session: session.id,
                    name: Some(begin.name.to_message()),
                    attributes: Some(begin.attributes.to_message(begin.size)),
                    stripe_size: begin.stripe_size,
                    page_size: begin.page_size,
                    width: begin.width,
                },
                async |mut client, request| client.begin_put(request).await,
                |reply: &v1::BeginPutReply| reply.outcome.as_ref(),
            )
            .await?;
        let begun = check_begin_put_reply(&request, &reply);
        let (put, descriptor) = begun.map_err(|error| reply_error(&error, &begin.name.to_string()))?;
        Ok(Begun { put, descriptor, session: link.session })
    }

    /// Asks for the commit of a put and waits for as long as the server takes: the caller has a limit of its own.
    ///
    /// # Errors
    /// See [`CommitFailure`].
    pub async fn commit_put(
        &self,
        name: &ObjectName,
        begun: &Begun,
        request: [u8; 16],
        if_version: Option<u64>,
    ) -> std::result::Result<PutDone, CommitFailure> {
        use CommitFailure as F;
        let deadline = Instant::now() + self.config.connect_deadline;
        let link = self.link(None, deadline).await.map_err(|error| match error {
            Error::Unreachable { .. } | Error::TimedOut { .. } => F::Again(error),
            other => F::Final(other),
        })?;
        if !link.session.is_same(&begun.session) {
            return Err(F::OtherRun);
        }
        let message = v1::CommitPutRequest {
            scope: Some(begun.session.scope()),
            session: begun.session.id,
            put: begun.put,
            request: request.to_vec().into(),
            if_version,
        };
        let what = format!("put of {name}");
        match link.client.clone().commit_put(message).await {
            Err(status) if is_transport(&status) => {
                // The next try looks for a connection that works.
                let again = Instant::now() + self.config.connect_deadline;
                let _ = self.link(Some(link.number), again).await;
                Err(F::Again(status_error(&status, &what, &link.address)))
            }
            Err(status) => Err(F::Final(status_error(&status, &what, &link.address))),
            Ok(reply) => {
                let reply = reply.into_inner();
                match check_outcome(reply.outcome.as_ref()) {
                    Ok(()) => Ok(PutDone { version: reply.version, superseded: reply.superseded }),
                    Err(refusal) if refusal.code == Code::WrongIncarnation => {
                        let again = Instant::now() + self.config.connect_deadline;
                        let _ = self.hello_again(&link, 0, again).await;
                        Err(F::OtherRun)
                    }
                    Err(refusal) if matches!(refusal.code, Code::Unavailable | Code::OverBudget) => {
                        Err(F::Again(error_of(&refusal, &name.to_string(), 0)))
                    }
                    Err(refusal) => Err(F::Final(error_of(&refusal, &name.to_string(), 0))),
                }
            }
        }
    }

    /// Gives a put up. Best effort: the server does it by itself in time.
    pub async fn abort_put(&self, begun: &Begun) {
        let message =
            v1::AbortPutRequest { scope: Some(begun.session.scope()), session: begun.session.id, put: begun.put };
        let deadline = Instant::now() + self.config.connect_deadline;
        if let Ok(link) = self.link(None, deadline).await
            && link.session.is_same(&begun.session)
        {
            let _ = timeout_at(deadline, link.client.clone().abort_put(message)).await;
        }
    }

    /// Deletes; the version that was there. The request id makes it safe to ask again.
    ///
    /// # Errors
    /// `NotFound`, `Conflict`, and as [`Control::lookup`].
    pub async fn delete(&self, name: &ObjectName, request: [u8; 16], if_version: Option<u64>) -> Result<u64> {
        let what = format!("delete of {name}");
        let (_, reply, _) = self
            .call(
                &what,
                self.config.metadata_deadline,
                |session| v1::DeleteRequest {
                    scope: Some(session.scope()),
                    name: Some(name.to_message()),
                    request: request.to_vec().into(),
                    if_version,
                },
                async |mut client, request| client.delete(request).await,
                |reply: &v1::DeleteReply| reply.outcome.as_ref(),
            )
            .await?;
        check_outcome(reply.outcome.as_ref()).map_err(|refusal| error_of(&refusal, &name.to_string(), 0))?;
        Ok(reply.deleted)
    }

    /// The server's account of itself.
    ///
    /// # Errors
    /// As [`Control::lookup`].
    pub async fn status(&self) -> Result<v1::StatusReply> {
        let (_, reply, link) = self
            .call(
                "status",
                self.config.metadata_deadline,
                |session| v1::StatusRequest { scope: Some(session.scope()) },
                async |mut client, request| client.status(request).await,
                |reply: &v1::StatusReply| reply.outcome.as_ref(),
            )
            .await?;
        check_status_reply(reply).map_err(|error| reply_error(&error, &link.address))
    }
}
