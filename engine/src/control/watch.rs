//! Watching: changes of a namespace as they are committed, over the control connection.
//!
//! Guarantees: changes come once and in order; what was given to the caller is acknowledged when it asks for more, so a
//! caller that is slow is found out by the server, and nothing piles up on either side. A watch belongs to one connection:
//! when that breaks, the caller begins another where the last page said to go on.

use super::calls::is_transport;
use super::dial::causes;
use super::outcome::error_of;
use super::{Control, Link};
use crate::error::{Error, Result};
use railfs_proto::name::Namespace;
use railfs_proto::reply::ReplyError;
use railfs_proto::v1::{self, Code};
use railfs_proto::watch::{WatchPage, check_watch_reply};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_stream::wrappers::ReceiverStream;

/// Between two tries.
const AGAIN: Duration = Duration::from_millis(50);

/// What to watch.
#[derive(Clone, Debug)]
pub struct WatchQuery {
    /// In which namespace.
    pub namespace: Namespace,
    /// Keys that start with these bytes.
    pub prefix: Vec<u8>,
    /// Number of the first change that is wanted; 0: what comes after now.
    pub from: u64,
}

/// A watch that has begun.
#[derive(Debug)]
pub struct Watching {
    replies: tonic::Streaming<v1::WatchReply>,
    acknowledge: mpsc::Sender<v1::WatchRequest>,
    query: WatchQuery,
    /// The first message, which was waited for.
    first: Option<WatchPage>,
    peer: String,
}

enum Failed {
    /// Another connection may do better.
    Connection(Error),
    /// The server was restarted, or has forgotten the session.
    Hello,
    Final(Error),
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Error {
        match failed {
            Failed::Connection(error) | Failed::Final(error) => error,
            Failed::Hello => {
                Error::Unreachable { peer: "the server".to_owned(), detail: "it was restarted".to_owned() }
            }
        }
    }
}

impl Watching {
    /// The next changes; waits for as long as nothing happens. What was given before is acknowledged.
    ///
    /// # Errors
    /// `Unreachable`: the connection broke or the server stops, begin another watch. `Io`: the server's word of why it ends
    /// this one (too old a number, cut off). `BadAnswer`.
    pub async fn next(&mut self) -> Result<WatchPage> {
        if let Some(first) = self.first.take() {
            return Ok(first);
        }
        // The number is that of the last page: this call is the caller's word that it is done with it.
        let acknowledged = v1::WatchRequest { acknowledged: self.query.from, ..Default::default() };
        // The other end is gone only when the watch is, which the next message tells.
        let _ = self.acknowledge.send(acknowledged).await;
        Ok(self.receive().await?)
    }

    async fn receive(&mut self) -> std::result::Result<WatchPage, Failed> {
        let unreachable = |detail: String| Error::Unreachable { peer: self.peer.clone(), detail };
        let reply = match self.replies.message().await {
            Ok(Some(reply)) => reply,
            Ok(None) => return Err(Failed::Connection(unreachable("the watch ended without a word".to_owned()))),
            Err(status) if is_transport(&status) => {
                return Err(Failed::Connection(unreachable(causes(&status))));
            }
            // Such as a message that is too large: another connection brings no better one.
            Err(status) => {
                let detail = format!("watch: {}", causes(&status));
                return Err(Failed::Final(Error::BadAnswer { peer: self.peer.clone(), detail }));
            }
        };
        let page = check_watch_reply(&self.query.prefix, self.query.from, &reply);
        let page = page.map_err(|error| match error {
            ReplyError::Refused(refusal) => match refusal.code {
                Code::WrongIncarnation => Failed::Hello,
                Code::Unavailable => Failed::Connection(unreachable(refusal.message)),
                Code::Stale | Code::OverBudget | Code::Invalid => Failed::Final(Error::Io {
                    what: format!("watch of {}", self.query.namespace),
                    detail: refusal.message,
                }),
                _ => Failed::Final(error_of(&refusal, self.query.namespace.as_str(), 0)),
            },
            other => Failed::Final(Error::BadAnswer { peer: self.peer.clone(), detail: other.to_string() }),
        })?;
        self.query.from = page.next;
        Ok(page)
    }
}

impl Control {
    /// Begins a watch.
    ///
    /// # Errors
    /// `Unreachable`, `TimedOut`, and as [`Watching::next`].
    pub async fn watch(&self, query: &WatchQuery) -> Result<Watching> {
        let deadline = Instant::now() + self.config.metadata_deadline;
        let mut failed = None;
        loop {
            let link = match self.link(failed, deadline).await {
                Ok(link) => link,
                Err(Error::Unreachable { .. }) if Instant::now() + AGAIN < deadline => {
                    sleep(AGAIN).await;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let what = || format!("watch of {}", query.namespace);
            let late = |_| Error::TimedOut {
                what: what(),
                after: self.config.metadata_deadline,
                detail: format!(": {} does not answer", link.address),
            };
            match timeout_at(deadline, begin(&link, query)).await.map_err(late)? {
                Ok(watching) => return Ok(watching),
                Err(Failed::Final(error)) => return Err(error),
                Err(Failed::Connection(error)) if Instant::now() + AGAIN >= deadline => return Err(error),
                Err(Failed::Connection(_)) => {
                    failed = Some(link.number);
                    sleep(AGAIN).await;
                }
                Err(Failed::Hello) => drop(self.hello_again(&link, 0, deadline).await?),
            }
        }
    }
}

async fn begin(link: &Link, query: &WatchQuery) -> std::result::Result<Watching, Failed> {
    let (acknowledge, requests) = mpsc::channel(4);
    let first = v1::WatchRequest {
        scope: Some(link.session.scope()),
        namespace: query.namespace.as_str().to_owned(),
        prefix: query.prefix.clone().into(),
        from: query.from,
        acknowledges: true,
        acknowledged: 0,
    };
    // There is room in a channel that is new.
    let _ = acknowledge.try_send(first);
    let answer = link.client.clone().watch(ReceiverStream::new(requests)).await;
    let replies = answer.map_err(|status| {
        let (peer, detail) = (link.address.clone(), format!("watch: {}", causes(&status)));
        match status.code() {
            tonic::Code::Unimplemented => Failed::Final(Error::BadAnswer {
                peer,
                detail: "this server is too old for watch: upgrade the server (railfsd)".to_owned(),
            }),
            _ => Failed::Connection(Error::Unreachable { peer, detail }),
        }
    })?;
    let (replies, peer) = (replies.into_inner(), link.address.clone());
    let mut watching = Watching { replies, acknowledge, query: query.clone(), first: None, peer };
    watching.first = Some(watching.receive().await?);
    Ok(watching)
}
