//! The world of sockets, over loopback.

use super::{Bell, Log, Server, Setup, World};
use prost::Message;
use railfs_engine::clock::{Clock, Time};
use railfs_engine::memory::Arena;
use railfs_engine::rail::tcp::{Admit, Joined, ListenerConfig, RailConfig, TcpListener, TcpRail, Tickets};
use railfs_engine::rail::{Lane, Rail};
use railfs_proto::frame::{FrameKind, HEADER, Header, TRAILER, Trailer};
use railfs_proto::v1::{self, Code, JoinReply, JoinRequest, Outcome};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

pub const SESSION: u64 = 77;

/// Gives every connection the same ticket.
pub struct OneTicket;

impl Tickets for OneTicket {
    fn join(&self, lane: Lane, listener: u32) -> Result<JoinRequest, String> {
        let lane = match lane {
            Lane::Bulk => v1::Lane::Bulk,
            Lane::Small => v1::Lane::Small,
        };
        Ok(JoinRequest {
            protocol: 1,
            scope: None,
            session: SESSION,
            ticket: vec![1; 16].into(),
            lane: lane as i32,
            listener,
        })
    }
}

/// The connections of each lane: number, rail.
pub type Lanes = HashMap<Lane, (u64, Arc<dyn Rail>)>;

/// Lets everybody with that ticket in.
pub struct Door {
    pub log: Arc<Log>,
    pub server: Arc<Server>,
    pub lanes: Mutex<Lanes>,
    pub closed: AtomicU64,
    pub bell: Arc<Bell>,
}

impl Admit for Door {
    fn join(&self, request: &JoinRequest, _peer: SocketAddr) -> Result<Joined, Outcome> {
        if request.ticket[..] != [1; 16] {
            return Err(Outcome { code: Code::Denied as i32, message: "no such ticket".into() });
        }
        Ok(Joined { session: request.session, events: self.log.clone(), handler: self.server.clone() })
    }
    fn connected(&self, session: u64, lane: Lane, connection: u64, rail: Arc<dyn Rail>) {
        assert_eq!(session, SESSION);
        self.lanes.lock().unwrap().insert(lane, (connection, rail));
        self.bell.ring();
    }
    fn closed(&self, _session: u64, lane: Lane, connection: u64, _why: &str) {
        let mut lanes = self.lanes.lock().unwrap();
        if lanes.get(&lane).is_some_and(|(now, _)| *now == connection) {
            lanes.remove(&lane);
        }
        drop(lanes);
        self.closed.fetch_add(1, Ordering::SeqCst);
        self.bell.ring();
    }
}

pub struct TcpWorld {
    clock: Clock,
    bell: Arc<Bell>,
    arena: Arena,
    rail: Arc<TcpRail>,
    log: Arc<Log>,
    server_log: Arc<Log>,
    server: Arc<Server>,
    puller: Arc<Server>,
    door: Arc<Door>,
    /// Stops when dropped.
    _listener: Option<TcpListener>,
    hand: Option<Arc<Hand>>,
}

/// A server made of plain sockets, which the test plays by hand.
pub struct Hand {
    bell: Arc<Bell>,
    lanes: Mutex<HashMap<Lane, TcpStream>>,
    requests: Mutex<Vec<(Lane, u64)>>,
    mute: AtomicBool,
    pings: AtomicU64,
    /// Bulk bytes of a reply that are still to be sent.
    open: Mutex<HashMap<u64, u32>>,
}

fn read_frame(mut socket: &TcpStream) -> std::io::Result<(Header, Vec<u8>)> {
    let mut header = [0; HEADER];
    socket.read_exact(&mut header)?;
    let header = Header::decode(&header).unwrap();
    let mut trailer = [0; TRAILER];
    socket.read_exact(&mut trailer)?;
    let mut message = vec![0; Trailer::decode(&trailer).unwrap().message as usize];
    socket.read_exact(&mut message)?;
    Ok((header, message))
}

pub fn frame(kind: FrameKind, session: u64, id: u64, bulk: &[u8], message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bulk.len()).unwrap();
    let mut out = Header { kind, bulk: length, session, id }.encode().to_vec();
    out.extend_from_slice(bulk);
    out.extend_from_slice(&Trailer::of(message).encode());
    out.extend_from_slice(message);
    out
}

impl Hand {
    /// Accepts until the world is gone.
    fn start(bell: Arc<Bell>) -> (Arc<Hand>, SocketAddr) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let hand = Arc::new(Hand {
            bell,
            lanes: Mutex::default(),
            requests: Mutex::default(),
            mute: AtomicBool::new(false),
            pings: AtomicU64::new(0),
            open: Mutex::default(),
        });
        let weak = Arc::downgrade(&hand);
        std::thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                if weak.strong_count() == 0 {
                    return;
                }
                let weak = weak.clone();
                std::thread::spawn(move || Hand::serve(&weak, &socket).is_some());
            }
        });
        (hand, address)
    }

    fn serve(weak: &Weak<Hand>, mut socket: &TcpStream) -> Option<()> {
        let (header, message) = read_frame(socket).ok()?;
        assert_eq!(header.kind, FrameKind::Join);
        let lane = match JoinRequest::decode(&message[..]).unwrap().lane() {
            v1::Lane::Small => Lane::Small,
            _ => Lane::Bulk,
        };
        let reply = JoinReply { outcome: Some(Outcome { code: Code::Ok as i32, message: String::new() }) };
        weak.upgrade()?.lanes.lock().unwrap().insert(lane, socket.try_clone().ok()?);
        socket.write_all(&frame(FrameKind::Joined, header.session, 0, &[], &reply.encode_to_vec())).ok()?;
        while let Ok((header, _)) = read_frame(socket) {
            let hand = weak.upgrade()?;
            match header.kind {
                FrameKind::Ping => {
                    hand.pings.fetch_add(1, Ordering::SeqCst);
                    if !hand.mute.load(Ordering::SeqCst) {
                        hand.send(lane, &frame(FrameKind::Pong, header.session, header.id, &[], &[]));
                    }
                }
                FrameKind::Request => hand.requests.lock().unwrap().push((lane, header.id)),
                _ => {}
            }
            hand.bell.ring();
        }
        Some(())
    }

    /// Pongs come between pieces of a reply otherwise: nothing else is sent while one is open.
    fn send(&self, lane: Lane, bytes: &[u8]) {
        let open = self.open.lock().unwrap();
        if lane == Lane::Bulk && !open.is_empty() {
            return;
        }
        self.write(lane, bytes);
    }

    fn write(&self, lane: Lane, bytes: &[u8]) {
        if let Some(mut socket) = self.lanes.lock().unwrap().get(&lane) {
            let _ = socket.write_all(bytes);
        }
    }
}

pub fn world(setup: Setup) -> Box<dyn World> {
    let bell = Arc::<Bell>::default();
    let clock = Clock::start();
    let (log, server_log) = (Log::new(bell.clone()), Log::new(bell.clone()));
    let (server, puller) = (Server::new(bell.clone()), Server::new(bell.clone()));
    let door = Arc::new(Door {
        log: server_log.clone(),
        server: server.clone(),
        lanes: Mutex::default(),
        closed: AtomicU64::new(0),
        bell: bell.clone(),
    });
    let (hand, listener, remote) = if setup.by_hand {
        let (hand, address) = Hand::start(bell.clone());
        (Some(hand), None, address)
    } else {
        let mut config = ListenerConfig::new("test", vec!["127.0.0.1:0".parse().unwrap()]);
        config.limits = setup.server_limits.unwrap_or(setup.limits.clone());
        let listener = TcpListener::start(config, clock, door.clone()).unwrap();
        let address = listener.addresses()[0];
        (None, Some(listener), address)
    };
    let config = RailConfig { name: "test".into(), remote, local: None, listener: 1, limits: setup.limits, seed: 1 };
    let rail = TcpRail::start(config, clock, Arc::new(OneTicket), puller.clone(), log.clone()).unwrap();
    let arena = Arena::new(64 << 20).unwrap();
    Box::new(TcpWorld { clock, bell, arena, rail, log, server_log, server, puller, door, _listener: listener, hand })
}

impl TcpWorld {
    fn hand(&self) -> &Hand {
        self.hand.as_ref().unwrap()
    }
}

impl World for TcpWorld {
    fn client(&self) -> Arc<dyn Rail> {
        self.rail.clone()
    }
    fn server(&self, lane: Lane) -> Option<Arc<dyn Rail>> {
        self.door.lanes.lock().unwrap().get(&lane).map(|(_, rail)| rail.clone())
    }
    fn log(&self) -> &Log {
        &self.log
    }
    fn server_log(&self) -> &Log {
        &self.server_log
    }
    fn serving(&self) -> &Server {
        &self.server
    }
    fn pulling(&self) -> &Server {
        &self.puller
    }
    fn arena(&self) -> &Arena {
        &self.arena
    }
    fn now(&self) -> Time {
        self.clock.now()
    }
    fn until(&self, what: &str, done: &mut dyn FnMut() -> bool) {
        self.bell.until(what, Duration::from_secs(20), done);
    }
    fn kill(&self) {
        match &self.hand {
            Some(hand) => {
                for socket in hand.lanes.lock().unwrap().drain() {
                    let _ = socket.1.shutdown(Shutdown::Both);
                }
                hand.open.lock().unwrap().clear();
            }
            None => {
                if let Some(rail) = self.server(Lane::Bulk) {
                    rail.close();
                }
            }
        }
    }
    fn mute(&self, mute: bool) {
        self.hand().mute.store(mute, Ordering::SeqCst);
    }
    fn requests(&self) -> Vec<(Lane, u64)> {
        self.hand().requests.lock().unwrap().clone()
    }
    fn piece(&self, id: u64, offset: u32, total: u32, bytes: &[u8]) {
        let mut open = self.hand().open.lock().unwrap();
        if offset == 0 {
            open.insert(id, total);
            let header = Header { kind: FrameKind::Reply, bulk: total, session: SESSION, id };
            self.hand().write(Lane::Bulk, &header.encode());
        }
        self.hand().write(Lane::Bulk, bytes);
    }
    fn finish(&self, id: u64, message: &[u8]) {
        let mut open = self.hand().open.lock().unwrap();
        let mut tail = Trailer::of(message).encode().to_vec();
        if open.remove(&id).is_none() {
            tail = Header { kind: FrameKind::Reply, bulk: 0, session: SESSION, id }.encode().to_vec();
            tail.extend_from_slice(&Trailer::of(message).encode());
        }
        tail.extend_from_slice(message);
        self.hand().write(Lane::Bulk, &tail);
    }
    fn whole(&self, lane: Lane, id: u64, bulk: &[u8], message: &[u8], ours: bool) {
        let session = if ours { SESSION } else { SESSION + 1 };
        self.hand().send(lane, &frame(FrameKind::Reply, session, id, bulk, message));
    }
    fn pings(&self) -> u64 {
        self.hand.as_ref().map_or(u64::MAX, |hand| hand.pings.load(Ordering::SeqCst))
    }
}
