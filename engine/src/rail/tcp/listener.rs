//! The server's end: accepts connections and lets them join.
//!
//! Guarantees:
//! * Nothing a peer does ends the accepting: errors are logged once, and it goes on when they pass.
//! * Connections are bounded; so are, more tightly and in time, those that have not joined (I6, I9).
//! * [`TcpListener::stop`] returns within a second or so.

use super::connection::{Connection, Parts};
use super::signal::{Latch, Running, Signal, lock, poll};
use super::{Admit, ListenerConfig, socket};
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::rail::totals::{Totals, add};
use crate::rail::{Lane, Rail};
use prost::Message;
use railfs_proto::frame::FrameKind;
use railfs_proto::v1::{self, Code, JoinReply, JoinRequest, Outcome};
use rustix::event::{PollFd, PollFlags};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long [`TcpListener::stop`] waits for the threads.
const STOP: Duration = Duration::from_secs(1);
/// After an error of accepting (no descriptors left): wait, others may be freed.
const PAUSE: Duration = Duration::from_millis(100);
/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// Numbers every connection of the process.
pub(in crate::rail) static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// What a listener has done so far and does now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListenerCounters {
    /// Joined connections now.
    pub connections: u64,
    /// Connections now that have not joined yet.
    pub unjoined: u64,
    /// Connections accepted so far.
    pub accepted: u64,
    /// Connections that were closed without having joined.
    pub refused: u64,
    /// Bulk bytes sent.
    pub bulk_sent: u64,
    /// Bulk bytes received.
    pub bulk_received: u64,
    /// Frames dropped because nobody waits for them.
    pub stale: u64,
}

#[derive(Default)]
struct Table {
    /// Oldest first.
    unjoined: VecDeque<(u64, Arc<TcpStream>)>,
    joined: HashMap<u64, Arc<Connection>>,
    stopping: bool,
}

struct Shared {
    config: ListenerConfig,
    clock: Clock,
    admit: Arc<dyn Admit>,
    totals: Arc<Totals>,
    accepted: AtomicU64,
    refused: AtomicU64,
    table: Mutex<Table>,
    stop: Signal,
    latch: Arc<Latch>,
}

/// Accepts rails. Dropping it stops it.
pub struct TcpListener {
    shared: Arc<Shared>,
    addresses: Vec<SocketAddr>,
}

impl std::fmt::Debug for TcpListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpListener").field("addresses", &self.addresses).finish()
    }
}

/// As the standard library binds, and also to an address that no interface has now: it is listened on as soon as one
/// has it, so a link that is late or comes and goes costs its rail and nothing else.
fn bind(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    match address {
        SocketAddr::V4(_) => rustix::net::sockopt::set_ip_freebind(&socket, true)?,
        SocketAddr::V6(_) => rustix::net::sockopt::set_ipv6_freebind(&socket, true)?,
    }
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

impl TcpListener {
    /// Binds and starts. The error names the address.
    pub fn start(config: ListenerConfig, clock: Clock, admit: Arc<dyn Admit>) -> Result<TcpListener> {
        let failed = |what: String| move |error: io::Error| Error::Io { what, detail: error.to_string() };
        let name = config.name.clone();
        if config.listen.is_empty() {
            return Err(Error::Invalid(format!("rail listener {name}: no address to listen on")));
        }
        let mut sockets = Vec::new();
        let mut addresses = Vec::new();
        for address in &config.listen {
            let what = format!("rail listener {name} on {address}");
            let socket = bind(*address).map_err(failed(what.clone()))?;
            socket.set_nonblocking(true).map_err(failed(what.clone()))?;
            addresses.push(socket.local_addr().map_err(failed(what))?);
            sockets.push(socket);
        }
        let what = format!("rail listener {name}");
        let shared = Arc::new(Shared {
            config,
            clock,
            admit,
            totals: Arc::default(),
            accepted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            table: Mutex::default(),
            stop: Signal::new().map_err(failed(what.clone()))?,
            latch: Arc::default(),
        });
        let running = shared.latch.enter();
        let of_thread = shared.clone();
        std::thread::Builder::new()
            .name(format!("{name}-accept"))
            .spawn(move || {
                running.begin();
                of_thread.accept(&sockets);
                drop(running);
            })
            .map_err(failed(what))?;
        Ok(TcpListener { shared, addresses })
    }

    /// What was bound, with the ports the kernel chose.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// See [`ListenerCounters`].
    pub fn counters(&self) -> ListenerCounters {
        let (connections, unjoined) = {
            let table = lock(&self.shared.table);
            (table.joined.len() as u64, table.unjoined.len() as u64)
        };
        let totals = self.shared.totals.counters();
        ListenerCounters {
            connections,
            unjoined,
            accepted: self.shared.accepted.load(Relaxed),
            refused: self.shared.refused.load(Relaxed),
            bulk_sent: totals.bulk_sent,
            bulk_received: totals.bulk_received,
            stale: totals.stale,
        }
    }

    /// Closes the listener and every connection; bounded by a second.
    pub fn stop(&self) {
        let shared = &self.shared;
        let (unjoined, joined) = {
            let mut table = lock(&shared.table);
            table.stopping = true;
            let joined: Vec<_> = table.joined.values().cloned().collect();
            (std::mem::take(&mut table.unjoined), joined)
        };
        shared.stop.raise();
        for (_, socket) in unjoined {
            let _ = socket.shutdown(Shutdown::Both);
        }
        for connection in joined {
            connection.end("the listener was stopped");
        }
        if !shared.latch.wait(STOP) {
            tracing::error!(listener = %shared.config.name, "a thread of the listener has not ended; it is left behind");
        }
    }
}

impl Drop for TcpListener {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, sockets: &[std::net::TcpListener]) {
        let mut trouble: Option<io::ErrorKind> = None;
        loop {
            let pause = trouble.map(|_| PAUSE);
            let mut fds: Vec<PollFd<'_>> = vec![PollFd::new(&self.stop, PollFlags::IN)];
            if trouble.is_none() {
                fds.extend(sockets.iter().map(|socket| PollFd::new(socket, PollFlags::IN)));
            }
            if let Err(error) = poll(&mut fds, pause) {
                tracing::error!(listener = %self.config.name, %error, "waiting for connections failed");
                std::thread::park_timeout(PAUSE);
            }
            drop(fds);
            if self.stop.is_raised() {
                return;
            }
            let before = trouble.take();
            for socket in sockets {
                loop {
                    match socket.accept() {
                        Ok((stream, peer)) => self.accepted(stream, peer),
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                        // The other side was quicker to give up.
                        Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                        Err(error) => {
                            if before != Some(error.kind()) {
                                tracing::warn!(listener = %self.config.name, %error, "accepting fails; trying on");
                            }
                            trouble = Some(error.kind());
                            break;
                        }
                    }
                }
            }
        }
    }

    fn accepted(self: &Arc<Self>, stream: TcpStream, peer: SocketAddr) {
        self.accepted.fetch_add(1, Relaxed);
        let number = NUMBERS.fetch_add(1, Relaxed);
        let stream = Arc::new(stream);
        {
            let mut table = lock(&self.table);
            if table.stopping {
                return;
            }
            if table.unjoined.len() >= self.config.max_unjoined.max(1) {
                if let Some((_, oldest)) = table.unjoined.pop_front() {
                    // Its thread sees the end of the stream, and ends.
                    let _ = oldest.shutdown(Shutdown::Both);
                }
            } else if table.unjoined.len() + table.joined.len() >= self.config.max_connections {
                drop(table);
                self.refused.fetch_add(1, Relaxed);
                let limit = self.config.max_connections;
                tracing::debug!(listener = %self.config.name, %peer, limit, "connection refused: too many");
                return;
            }
            table.unjoined.push_back((number, stream.clone()));
        }
        let running = self.latch.enter();
        let shared = self.clone();
        let spawned = std::thread::Builder::new().name(format!("{}-{number}", self.config.name)).spawn(move || {
            shared.connection(number, stream, peer, running);
        });
        if let Err(error) = spawned {
            lock(&self.table).unjoined.retain(|(other, _)| *other != number);
            self.refused.fetch_add(1, Relaxed);
            tracing::warn!(listener = %self.config.name, %peer, %error, "connection refused: no thread could be started");
        }
    }

    /// The thread of one connection: joining, then its whole life.
    fn connection(self: Arc<Self>, number: u64, stream: Arc<TcpStream>, peer: SocketAddr, running: Running) {
        running.begin();
        let made = self.join(number, &stream, peer);
        lock(&self.table).unjoined.retain(|(other, _)| *other != number);
        drop(stream);
        match made {
            Err(why) => {
                self.refused.fetch_add(1, Relaxed);
                tracing::debug!(listener = %self.config.name, %peer, %why, "connection did not join");
            }
            Ok((connection, session, lane)) => {
                let _running = connection.running();
                let rail: Arc<dyn Rail> = connection.clone();
                self.admit.connected(session, lane, number, rail);
                let stopping = {
                    let mut table = lock(&self.table);
                    table.joined.insert(number, connection.clone());
                    table.stopping
                };
                if stopping {
                    connection.end("the listener was stopped");
                }
                let why = connection.run(&|silent| {
                    tracing::info!(listener = %self.config.name, %peer, ?lane, silent, "a client's connection");
                });
                lock(&self.table).joined.remove(&number);
                self.admit.closed(session, lane, number, &why);
                tracing::debug!(listener = %self.config.name, %peer, ?lane, %why, "connection closed");
            }
        }
        drop(running);
    }

    fn join(
        &self,
        number: u64,
        stream: &TcpStream,
        peer: SocketAddr,
    ) -> std::result::Result<(Arc<Connection>, u64, Lane), String> {
        let limits = &self.config.limits;
        let text = |error: io::Error| error.to_string();
        socket::configure(stream, limits).map_err(text)?;
        let until = Instant::now() + limits.connect;
        let (_, message) = socket::read_frame(stream, FrameKind::Join, &self.stop, until).map_err(text)?;
        let request = JoinRequest::decode(message.as_slice()).map_err(|error| error.to_string())?;
        let admitted = lane(request.lane()).and_then(|lane| Ok((self.admit.join(&request, peer)?, lane)));
        let (joined, lane) = match admitted {
            Ok(admitted) => admitted,
            Err(outcome) => {
                let why = outcome.message.clone();
                let message = JoinReply { outcome: Some(outcome) }.encode_to_vec();
                let session = request.session;
                socket::write_frame(stream, FrameKind::Joined, session, &message, &self.stop, until).map_err(text)?;
                return Err(format!("refused: {why}"));
            }
        };
        let totals = Arc::new(Totals::default());
        for totals in [&totals, &self.totals] {
            add(&totals.connects, 1);
        }
        let connection = Connection::new(Parts {
            name: format!("{} connection {number}", self.config.name),
            peer,
            lane,
            session: joined.session,
            socket: stream.try_clone().map_err(text)?,
            limits: limits.clone(),
            clock: self.clock,
            events: joined.events,
            handler: joined.handler,
            totals: vec![totals, self.totals.clone()],
        })
        .map_err(text)?;
        // The first frame of its queue: whatever `connected` submits comes after it.
        let outcome = Some(Outcome { code: Code::Ok as i32, message: String::new() });
        connection.joined(&JoinReply { outcome }.encode_to_vec());
        Ok((connection, joined.session, lane))
    }
}

fn lane(lane: v1::Lane) -> std::result::Result<Lane, Outcome> {
    match lane {
        v1::Lane::Bulk => Ok(Lane::Bulk),
        v1::Lane::Small => Ok(Lane::Small),
        v1::Lane::Unspecified => {
            Err(Outcome { code: Code::Invalid as i32, message: "the join names no lane that is known here".into() })
        }
    }
}
