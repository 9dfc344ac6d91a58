//! TLS handshakes of control connections, each in a task of its own.
//!
//! Guarantees: a peer that is slow, silent or sends garbage holds nobody up: its handshake has a limit, and where there are too
//! many, the oldest of the address that has most of them makes room; nobody gets further without a certificate that was verified and
//! names somebody; whoever speaks without TLS is told so in words that a client of gRPC shows.

use super::caller::{Caller, Connection};
use super::incoming::Patient;
use crate::access::Identity;
use crate::node::{Node, count};
use railfs_engine::tls::{SAYS, WANTS_TLS};
use railfs_proto::limits::CONNECT_DEADLINE;
use rustls::ServerConfig;
use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, Id, JoinSet};
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_stream::StreamExt;
use tonic::transport::server::TcpIncoming;

/// Most handshakes at once, of one listener.
pub const MAX_HANDSHAKES: usize = 256;
/// How long a peer that was refused has to take the reason.
const FAREWELL: Duration = Duration::from_secs(1);
/// Bytes of it that are read meanwhile: a socket that is closed with bytes unread would take the reason back.
const UNREAD: u64 = 64 << 10;
/// Refusals that are logged in [`WINDOW`].
const LINES: u64 = 20;
/// See there.
const WINDOW: Duration = Duration::from_secs(10);

/// The configuration of new connections.
#[derive(Debug)]
pub struct Guard(RwLock<Arc<ServerConfig>>);

impl Guard {
    /// Begins with this one.
    pub fn new(config: ServerConfig) -> Arc<Guard> {
        Arc::new(Guard(RwLock::new(Arc::new(config))))
    }
    /// For connections that come from now on.
    pub fn replace(&self, config: ServerConfig) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(config);
    }
    fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Which handshakes are under way, by address: pure. `T` numbers them.
#[derive(Debug)]
struct Underway<T> {
    limit: usize,
    count: usize,
    from: HashMap<IpAddr, VecDeque<T>>,
}

impl<T: Copy + Eq + Hash> Underway<T> {
    fn new(limit: usize) -> Underway<T> {
        Underway { limit, count: 0, from: HashMap::new() }
    }

    /// One more; the one that makes room for it, where there are too many.
    fn begin(&mut self, from: IpAddr, id: T) -> Option<T> {
        self.from.entry(from).or_default().push_back(id);
        self.count += 1;
        if self.count <= self.limit {
            return None;
        }
        let most = self.from.iter().max_by_key(|(_, ids)| ids.len()).map(|(ip, _)| *ip)?;
        let oldest = self.from.get(&most)?.front().copied()?;
        self.end(most, oldest);
        Some(oldest)
    }

    fn end(&mut self, from: IpAddr, id: T) {
        let Some(ids) = self.from.get_mut(&from) else { return };
        if let Some(place) = ids.iter().position(|other| *other == id) {
            ids.remove(place);
            self.count -= 1;
        }
        if ids.is_empty() {
            self.from.remove(&from);
        }
    }
}

/// Says what is refused, and no more than so much.
#[derive(Debug)]
struct Voice {
    since: Instant,
    lines: u64,
}

impl Voice {
    fn say(&mut self, caller: &Caller, why: &str) {
        if self.since.elapsed() >= WINDOW {
            if self.lines > LINES {
                tracing::info!(refused = self.lines - LINES, "more control connections were refused");
            }
            *self = Voice { since: Instant::now(), lines: 0 };
        }
        self.lines += 1;
        if self.lines <= LINES {
            let peer = caller.peer.map(|peer| peer.to_string()).unwrap_or_default();
            tracing::info!(peer, why, "a control connection was refused");
        }
    }
}

/// Ends a connection with a word in HTTP/2: settings, as every server says first, and GOAWAY (INADEQUATE_SECURITY). Whether or not
/// the other end takes it, it is refused.
async fn refuse(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), why: &str) {
    const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    let why = why.as_bytes();
    let length = u32::try_from(why.len().saturating_add(8)).unwrap_or(u32::MAX).to_be_bytes();
    let mut bytes = SETTINGS.to_vec();
    bytes.extend_from_slice(&length[1..]);
    bytes.extend_from_slice(&[7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12]);
    bytes.extend_from_slice(why);
    if stream.write_all(&bytes).await.is_ok() {
        let_go(stream).await;
    }
}

/// Waits until the other end has taken what was said, or long enough: whatever comes of it, the connection ends.
async fn let_go(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
    if stream.shutdown().await.is_ok() {
        let mut rest = stream.take(UNREAD);
        drop(timeout(FAREWELL, tokio::io::copy(&mut rest, &mut tokio::io::sink())).await);
    }
}

/// One handshake.
async fn shake(mut stream: TcpStream, config: Arc<ServerConfig>, mut caller: Caller) -> Result<Connection, String> {
    let mut first = [0u8; 1];
    let there = stream.peek(&mut first).await.map_err(|error| error.to_string())?;
    match (there, first) {
        (0, _) => return Err("it ended before it had said anything".to_owned()),
        // A record with a handshake.
        (_, [22]) => {}
        // The preface of HTTP/2, or a method of its elder.
        (_, [b'A'..=b'Z']) => {
            refuse(&mut stream, WANTS_TLS).await;
            return Err("it speaks without TLS: give the client a certificate (cert, key, ca)".to_owned());
        }
        _ => return Err("its first byte is neither of TLS nor of HTTP".to_owned()),
    }
    match TlsAcceptor::from(config).accept(stream).into_fallible().await {
        Err((error, mut stream)) => {
            // The alert that says why has been sent.
            let_go(&mut stream).await;
            Err(error.to_string())
        }
        Ok(mut stream) => {
            let certificates = stream.get_ref().1.peer_certificates();
            let own = certificates.and_then(|certificates| certificates.first()).ok_or("it sent no certificate")?;
            match Identity::of_certificate(own) {
                Ok(who) => {
                    caller.who = Some(who);
                    Ok(Connection::tls(stream, caller))
                }
                Err(why) => {
                    let why = format!("the client's certificate is of no use: {why}");
                    refuse(&mut stream, &format!("{SAYS}{}", why.replace('"', "'"))).await;
                    Err(why)
                }
            }
        }
    }
}

/// Accepts until nobody takes the connections any more.
pub async fn accept(
    incoming: Patient<TcpIncoming>,
    guard: Arc<Guard>,
    node: Arc<Node>,
    ready: mpsc::Sender<io::Result<Connection>>,
) {
    let mut incoming = incoming;
    let mut underway = Underway::new(MAX_HANDSHAKES);
    let mut handles: HashMap<Id, (AbortHandle, Caller)> = HashMap::new();
    // They end with it.
    let mut tasks: JoinSet<Result<(), String>> = JoinSet::new();
    let mut voice = Voice { since: Instant::now(), lines: 0 };
    let address = |caller: &Caller| caller.peer.map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |peer| peer.ip());
    loop {
        tokio::select! {
            () = ready.closed() => return,
            next = incoming.next() => {
                let stream = match next {
                    Some(Ok(stream)) => stream,
                    // Errors are tried again there, and there is no end.
                    Some(Err(_)) => continue,
                    None => return,
                };
                let (caller, ready) = (Caller::at(&stream), ready.clone());
                let shaking = shake(stream, guard.config(), caller.clone());
                let handle = tasks.spawn(async move {
                    let shaken = timeout(CONNECT_DEADLINE, shaking).await;
                    let late = |_| format!("no handshake within {CONNECT_DEADLINE:?}");
                    let connection = shaken.map_err(late)??;
                    ready.send(Ok(connection)).await.map_err(|_| "the server is stopping".to_owned())
                });
                let oldest = underway.begin(address(&caller), handle.id());
                handles.insert(handle.id(), (handle, caller));
                if let Some((handle, _)) = oldest.and_then(|id| handles.get(&id)) {
                    handle.abort();
                }
            }
            Some(ended) = tasks.join_next_with_id(), if !tasks.is_empty() => {
                let (id, result) = match ended {
                    Ok(ended) => ended,
                    Err(error) => (error.id(), Err("it made room for others: too many handshakes are under way".to_owned())),
                };
                let Some((_, caller)) = handles.remove(&id) else { continue };
                underway.end(address(&caller), id);
                if let Err(why) = result {
                    count(&node.counters.handshakes_refused);
                    voice.say(&caller, &why);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i6_handshakes_are_bounded_and_who_has_most_makes_room_with_its_oldest() {
        let mut underway = Underway::new(4);
        let (a, b) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        assert!((0..3).all(|id| underway.begin(a, id).is_none()));
        assert_eq!(underway.begin(b, 10), None);
        assert_eq!(underway.begin(b, 11), Some(0), "a has more");
        assert_eq!((underway.begin(a, 4), underway.count), (Some(1), 4));
        for id in 100..10_000 {
            // Whoever comes in thousands ends its own.
            let ended = underway.begin(a, id).unwrap();
            assert!(ended != 10 && ended != 11, "{ended}");
            assert!(underway.count == 4 && underway.from[&b].len() == 2);
        }
        for id in [10, 11, 10, 77] {
            underway.end(b, id);
        }
        assert_eq!((underway.count, underway.from.len()), (2, 1));
    }

    #[tokio::test]
    async fn a_refusal_is_a_whole_frame_of_http2() {
        let (mut ours, mut theirs) = tokio::io::duplex(4096);
        let reading = tokio::spawn(async move {
            let mut bytes = Vec::new();
            theirs.read_to_end(&mut bytes).await.unwrap();
            bytes
        });
        refuse(&mut ours, "why").await;
        drop(ours);
        let bytes = reading.await.unwrap();
        assert_eq!(bytes.len(), 9 + 9 + 8 + 3);
        assert_eq!(bytes[9..13], [0, 0, 11, 7]);
        assert!(bytes.ends_with(b"\x0cwhy"));
    }
}
