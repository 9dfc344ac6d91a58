//! What is particular to TCP rails: joining, listeners, strangers, and what a peer can do with bytes.

mod rail;

use rail::tcp::{Door, OneTicket, SESSION, frame};
use rail::{Bell, Do, Log, Server, id, message, submit_to};
use railfs_engine::clock::Clock;
use railfs_engine::memory::Arena;
use railfs_engine::rail::tcp::{Limits, ListenerConfig, RailConfig, TcpListener, TcpRail, Tickets};
use railfs_engine::rail::{Cause, Landing, Lane, Rail, State, Submission};
use railfs_proto::frame::{FrameKind, HEADER, Header, TRAILER, Trailer};
use railfs_proto::v1::JoinRequest;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

const WAIT: Duration = Duration::from_secs(20);

struct Bench {
    bell: Arc<Bell>,
    clock: Clock,
    door: Arc<Door>,
    server: Arc<Server>,
    listener: TcpListener,
}

fn config() -> ListenerConfig {
    ListenerConfig::new("test", vec!["127.0.0.1:0".parse().unwrap()])
}

fn bench(config: ListenerConfig) -> Bench {
    let bell = Arc::<Bell>::default();
    let clock = Clock::start();
    let server = Server::new(bell.clone());
    let door = Arc::new(Door {
        log: Log::new(bell.clone()),
        server: server.clone(),
        lanes: Mutex::default(),
        closed: AtomicU64::new(0),
        bell: bell.clone(),
    });
    let listener = TcpListener::start(config, clock, door.clone()).unwrap();
    Bench { bell, clock, door, server, listener }
}

struct Client {
    rail: Arc<TcpRail>,
    log: Arc<Log>,
    bell: Arc<Bell>,
    clock: Clock,
}

fn client(remote: SocketAddr, limits: Limits, tickets: Arc<dyn Tickets>, bell: &Arc<Bell>) -> Client {
    let clock = Clock::start();
    let log = Log::new(bell.clone());
    let config = RailConfig { name: "rail".into(), remote, local: None, listener: 1, limits, seed: 3 };
    let rail = TcpRail::start(config, clock, tickets, Server::new(bell.clone()), log.clone()).unwrap();
    Client { rail, log, bell: bell.clone(), clock }
}

impl Client {
    fn until(&self, what: &str, mut done: impl FnMut(&Client) -> bool) {
        self.bell.until(what, WAIT, &mut || done(self));
    }
    fn up(&self) {
        self.until("up", |client| client.rail.state() == State::Up);
    }
    fn echo(&self) {
        let id = id();
        let deadline = self.clock.now().after(WAIT);
        let message = message(Do::Echo, 0, 0);
        submit_to(&*self.rail, Submission { id, lane: Lane::Small, message, landing: None, deadline });
        self.until("an echo", |client| client.log.has(id));
        self.log.reply(id);
    }
}

impl Bench {
    fn client(&self) -> Client {
        client(self.listener.addresses()[0], Limits::default(), Arc::new(OneTicket), &self.bell)
    }
    fn raw(&self) -> TcpStream {
        let socket = TcpStream::connect(self.listener.addresses()[0]).unwrap();
        socket.set_read_timeout(Some(WAIT)).unwrap();
        socket
    }
    fn joined(&self, lane: Lane) -> TcpStream {
        let mut socket = self.raw();
        let request = prost::Message::encode_to_vec(&OneTicket.join(lane, 1).unwrap());
        socket.write_all(&frame(FrameKind::Join, SESSION, 0, &[], &request)).unwrap();
        let (header, _) = read(&mut socket).unwrap();
        assert_eq!(header.kind, FrameKind::Joined);
        socket
    }
    fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        self.bell.until(what, WAIT, &mut done);
    }
}

/// A frame, without keeping its bulk.
fn read(socket: &mut TcpStream) -> std::io::Result<(Header, Vec<u8>)> {
    let mut header = [0; HEADER];
    socket.read_exact(&mut header)?;
    let header = Header::decode(&header).unwrap();
    let mut bulk = vec![0; header.bulk as usize];
    socket.read_exact(&mut bulk)?;
    let mut trailer = [0; TRAILER];
    socket.read_exact(&mut trailer)?;
    let mut message = vec![0; Trailer::decode(&trailer).unwrap().message as usize];
    socket.read_exact(&mut message)?;
    Ok((header, message))
}

/// Until the other side closes; a reset is one way of closing.
fn ends(mut socket: TcpStream) {
    let mut buffer = [0; 4096];
    loop {
        match socket.read(&mut buffer) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "not closed");
                return;
            }
        }
    }
}

#[test]
fn strangers_are_closed_and_hurt_nobody() {
    let bench = bench(config());
    let client = bench.client();
    client.up();
    let bad = |kind, session, bulk: u32| Header { kind, bulk, session, id: 1 }.encode().to_vec();
    let mut too_long = bad(FrameKind::Join, 1, 0);
    too_long.extend_from_slice(&u32::MAX.to_le_bytes());
    too_long.extend_from_slice(&[0; 4]);
    let garbage: [Vec<u8>; 6] = [
        b"GET / HTTP/1.1\r\nHost: railfs\r\n\r\n      ".to_vec(),
        vec![0; 100],
        bad(FrameKind::Join, 1, 1 << 20),
        bad(FrameKind::Request, 1, 0),
        too_long,
        frame(FrameKind::Join, 1, 0, &[], b"\xff\xff\xff\xff not protobuf"),
    ];
    for bytes in garbage {
        let mut socket = bench.raw();
        socket.write_all(&bytes).unwrap();
        ends(socket);
        client.echo();
    }
    // The same after joining.
    let garbage: [Vec<u8>; 5] = [
        vec![7; 64],
        frame(FrameKind::Join, SESSION, 0, &[], &[]),
        frame(FrameKind::Request, SESSION, 5, &[1; 100], &[]),
        frame(FrameKind::Ping, SESSION, 5, &[1; 100], &[]),
        {
            let mut bytes = frame(FrameKind::Request, SESSION, 5, &[], b"damaged");
            let last = bytes.len() - 1;
            bytes[last] ^= 1;
            bytes
        },
    ];
    for bytes in garbage {
        let mut socket = bench.joined(Lane::Bulk);
        socket.write_all(&bytes).unwrap();
        ends(socket);
        client.echo();
    }
    assert_eq!(client.rail.counters().connects, 1);
    bench.until("closed", || bench.door.closed.load(Ordering::SeqCst) == 5);
    assert_eq!(bench.listener.counters().connections, 2);
}

#[test]
fn i5_requests_of_another_session_are_dropped_and_counted() {
    let bench = bench(config());
    let mut socket = bench.joined(Lane::Small);
    socket.write_all(&frame(FrameKind::Request, SESSION + 1, 1, &[], &message(Do::Echo, 0, 0))).unwrap();
    socket.write_all(&frame(FrameKind::Request, SESSION, 2, &[], &message(Do::Echo, 0, 0))).unwrap();
    assert_eq!(read(&mut socket).unwrap().0.id, 2);
    assert_eq!(bench.listener.counters().stale, 1);
    bench.until("one counted", || bench.server.served() == 1);
}

#[test]
fn a_refused_rail_says_why_and_tries_on() {
    struct Wrong;
    impl Tickets for Wrong {
        fn join(&self, lane: Lane, listener: u32) -> Result<JoinRequest, String> {
            Ok(JoinRequest { ticket: vec![2; 16].into(), ..OneTicket.join(lane, listener)? })
        }
    }
    struct None;
    impl Tickets for None {
        fn join(&self, _lane: Lane, _listener: u32) -> Result<JoinRequest, String> {
            Err("the control connection is down".into())
        }
    }
    let bench = bench(config());
    let cases: [(Arc<dyn Tickets>, &str); 2] =
        [(Arc::new(Wrong), "no such ticket"), (Arc::new(None), "control connection")];
    for (tickets, why) in cases {
        let client = client(bench.listener.addresses()[0], Limits::default(), tickets, &bench.bell);
        let downs = |client: &Client| client.log.came(|state| matches!(state, State::Down(text) if text.contains(why)));
        client.until("refused", |client| downs(client) > 0);
        client.rail.connect_now();
        client.until("refused again", |client| downs(client) > 1);
    }
    assert_eq!(bench.listener.counters().connections, 0);
}

#[test]
fn i9_a_listener_that_never_answers_is_given_up() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let bell = Arc::<Bell>::default();
    let limits = Limits { connect: Duration::from_millis(100), ..Limits::default() };
    let client = client(silent.local_addr().unwrap(), limits, Arc::new(OneTicket), &bell);
    client.until("down", |client| client.log.came(|state| matches!(state, State::Down(_))) > 0);
    let arena = Arena::new(1 << 20).unwrap();
    let id = id();
    let landing = Some(Landing { extent: arena.allocate(4096).unwrap(), length: 4096 });
    let deadline = client.clock.now().after(WAIT);
    submit_to(&*client.rail, Submission { id, lane: Lane::Bulk, message: message(Do::Echo, 0, 0), landing, deadline });
    client.until("refused", |client| client.log.has(id));
    assert_eq!(client.log.failure(id), (Cause::Down, false));
    assert_eq!(arena.stats().free, 1 << 20);
    // And closing does not wait for it.
    let start = Instant::now();
    client.rail.close();
    assert!(start.elapsed() < Duration::from_millis(900));
}

#[test]
fn i9_closing_does_not_wait_for_tickets() {
    struct Slow(mpsc::Sender<()>, Mutex<mpsc::Receiver<()>>);
    impl Tickets for Slow {
        fn join(&self, _lane: Lane, _listener: u32) -> Result<JoinRequest, String> {
            let _ = self.0.send(());
            let _ = self.1.lock().unwrap().recv();
            Err("too late".into())
        }
    }
    let bell = Arc::<Bell>::default();
    let (ask, asked) = mpsc::channel();
    let (release, blocked) = mpsc::channel();
    let tickets = Arc::new(Slow(ask, Mutex::new(blocked)));
    let client = client("127.0.0.1:9".parse().unwrap(), Limits::default(), tickets, &bell);
    // Refusals do not wait for them either.
    let id = id();
    let deadline = client.clock.now().after(WAIT);
    let message = message(Do::Echo, 0, 0);
    submit_to(&*client.rail, Submission { id, lane: Lane::Bulk, message, landing: None, deadline });
    client.until("refused", |client| client.log.has(id));
    asked.recv_timeout(WAIT).unwrap();
    let start = Instant::now();
    client.rail.close();
    assert!(start.elapsed() < Duration::from_secs(2));
    drop(release);
}

#[test]
fn i6_those_who_do_not_join_are_few_and_leave_soon() {
    let mut config = config();
    config.max_unjoined = 8;
    config.limits.connect = Duration::from_millis(400);
    let bench = bench(config);
    let first = bench.raw();
    let strangers: Vec<_> = (0..100).map(|_| bench.raw()).collect();
    bench.until("accepted", || bench.listener.counters().accepted == 101);
    assert!(bench.listener.counters().unjoined <= 8);
    // The oldest had to leave at once.
    ends(first);
    let client = bench.client();
    client.up();
    client.echo();
    // The others when their time is over.
    for stranger in strangers {
        ends(stranger);
    }
    bench.until("left", || bench.listener.counters().refused == 101);
    assert_eq!(bench.listener.counters().unjoined, 0);
    client.echo();
}

#[test]
fn i6_connections_are_bounded() {
    let mut config = config();
    config.max_connections = 4;
    // Who is let in may take its time to join.
    config.limits.connect = Duration::from_secs(3600);
    let bench = bench(config);
    let kept: Vec<_> = (0..4).map(|_| bench.joined(Lane::Small)).collect();
    bench.until("joined", || bench.listener.counters().connections == 4);
    ends(bench.raw());
    drop(kept);
    bench.until("left", || bench.listener.counters().connections == 0);
    let client = bench.client();
    client.up();
    client.echo();
}

#[test]
fn many_idle_connections_do_not_hurt() {
    let mut config = config();
    // They do not answer pings.
    config.limits.ping = Duration::from_secs(3600);
    let bench = bench(config);
    let idle: Vec<_> = (0..200).map(|_| bench.joined(Lane::Small)).collect();
    bench.until("joined", || bench.listener.counters().connections == 200);
    let client = bench.client();
    client.up();
    for _ in 0..100 {
        client.echo();
    }
    assert_eq!(bench.listener.counters().connections, 202);
    drop(idle);
    bench.until("left", || bench.listener.counters().connections == 2);
}

#[test]
fn i6_a_peer_that_does_not_read_is_not_served_for_ever() {
    let mut config = config();
    config.limits.reply_bytes = 3 << 20;
    config.limits.socket_buffer = 64 << 10;
    let bench = bench(config);
    let mut socket = bench.joined(Lane::Bulk);
    for id in 0..200 {
        socket.write_all(&frame(FrameKind::Request, SESSION, id, &[], &message(Do::Bytes, 1 << 20, 0))).unwrap();
    }
    // The socket's buffers, the queue's limit and one more.
    bench.until("some", || bench.server.served() >= 4);
    let mut served = Vec::new();
    for _ in 0..200 {
        served.push(bench.server.served());
        let (header, _) = read(&mut socket).unwrap();
        assert_eq!((header.id, header.bulk), (served.len() as u64 - 1, 1 << 20));
    }
    for (done, served) in served.into_iter().enumerate() {
        assert!(served <= done as u64 + 16, "{served} served when {done} had been taken");
    }
    bench.until("all counted", || bench.server.served() == 200);
}

#[test]
fn i6_a_peer_that_floods_requests_is_not_read_for_ever() {
    let mut config = config();
    config.limits.serving = 2;
    config.limits.socket_buffer = 64 << 10;
    let bench = bench(config);
    let mut socket = bench.joined(Lane::Bulk);
    let mut writer = socket.try_clone().unwrap();
    let sent = Arc::new(AtomicU64::new(0));
    let counted = sent.clone();
    let thread = std::thread::spawn(move || {
        let mut request = message(Do::Hold, 0, 0).to_vec();
        request.resize(32 << 10, 0);
        for id in 0..1000 {
            writer.write_all(&frame(FrameKind::Request, SESSION, id, &[], &request)).unwrap();
            counted.fetch_add(1, Ordering::SeqCst);
        }
    });
    bench.until("two", || bench.server.held() == 2);
    for id in 0..1000 {
        bench.until("the next", || bench.server.held() > 0);
        assert!(bench.server.held() <= 2);
        // 4 MiB wait, a MiB or so is in the kernel's buffers; 32 MiB were offered.
        assert!(sent.load(Ordering::SeqCst) < id + 900, "everything was read");
        bench.server.answer_held(0, 0);
        assert_eq!(read(&mut socket).unwrap().0.id, id);
    }
    thread.join().unwrap();
}

#[test]
fn a_restarted_listener_is_found_again() {
    let first = bench(config());
    let client = first.client();
    client.up();
    client.echo();
    let address = first.listener.addresses()[0];
    let start = Instant::now();
    first.listener.stop();
    assert!(start.elapsed() < Duration::from_millis(900));
    assert_eq!(first.door.closed.load(Ordering::SeqCst), 2);
    assert_eq!(first.listener.counters().connections, 0);
    client.until("down", |client| matches!(client.rail.state(), State::Down(_)));
    drop(first);
    let second = bench(ListenerConfig::new("test", vec![address]));
    client.rail.connect_now();
    client.up();
    client.echo();
    second.until("one counted", || second.server.served() == 1);
    assert_eq!(client.rail.counters().connects, 2);
}

#[test]
fn connects_from_the_address_it_is_given() {
    let bench = bench(config());
    let log = Log::new(bench.bell.clone());
    let remote = bench.listener.addresses()[0];
    let mut config = RailConfig {
        name: "rail".into(),
        remote,
        local: Some("127.0.0.77".parse().unwrap()),
        listener: 1,
        limits: Limits::default(),
        seed: 3,
    };
    let start = |config: &RailConfig, log: &Arc<Log>| {
        let handler = Server::new(bench.bell.clone());
        TcpRail::start(config.clone(), bench.clock, Arc::new(OneTicket), handler, log.clone()).unwrap()
    };
    let first = start(&config, &log);
    bench.until("up", || bench.door.lanes.lock().unwrap().len() == 2);
    assert!(format!("{:?}", bench.door.lanes.lock().unwrap()[&Lane::Bulk].1).contains("127.0.0.77"));
    drop(first);
    // An address that this host does not have: an error that names both, and another attempt.
    config.local = Some("192.0.2.1".parse().unwrap());
    let rail = start(&config, &log);
    let named = |state: &State| matches!(state, State::Down(why) if why.contains("192.0.2.1") && why.contains(&remote.to_string()));
    bench.until("down", || named(&rail.state()));
}

#[test]
fn a_listener_that_cannot_be_bound_says_which() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let server = Server::new(Arc::default());
    let door = Arc::new(Door {
        log: Log::new(Arc::default()),
        server,
        lanes: Mutex::default(),
        closed: AtomicU64::new(0),
        bell: Arc::default(),
    });
    let start = |listen| TcpListener::start(ListenerConfig::new("data", listen), Clock::start(), door.clone());
    let error = start(vec![address]).unwrap_err().to_string();
    assert!(error.contains(&address.to_string()) && error.contains("data"), "{error}");
    assert!(start(vec![]).is_err());
    // Several at once.
    let both = start(vec!["127.0.0.1:0".parse().unwrap(), "[::1]:0".parse().unwrap()]);
    if let Ok(both) = both {
        assert_eq!(both.addresses().len(), 2);
    }
}

#[test]
fn dropping_the_rail_ends_its_threads_and_connections() {
    let bench = bench(config());
    let client = bench.client();
    client.up();
    bench.until("joined", || bench.listener.counters().connections == 2);
    drop(client);
    bench.until("left", || bench.listener.counters().connections == 0);
}

#[test]
fn the_last_hand_on_a_rail_may_be_let_go_by_its_own_thread() {
    /// Lets go of the rail when the first reply comes.
    struct LetGo(Mutex<Option<Arc<TcpRail>>>, mpsc::Sender<Duration>);
    impl railfs_engine::rail::Events for LetGo {
        fn event(&self, event: railfs_engine::rail::Event) {
            if matches!(event, railfs_engine::rail::Event::Replied { .. }) {
                let start = Instant::now();
                drop(self.0.lock().unwrap().take());
                let _ = self.1.send(start.elapsed());
            }
        }
    }
    let bench = bench(config());
    let (told, took) = mpsc::channel();
    let events = Arc::new(LetGo(Mutex::new(None), told));
    let config = RailConfig {
        name: "rail".into(),
        remote: bench.listener.addresses()[0],
        local: None,
        listener: 1,
        limits: Limits::default(),
        seed: 3,
    };
    let handler = Server::new(bench.bell.clone());
    let rail = TcpRail::start(config, bench.clock, Arc::new(OneTicket), handler, events.clone()).unwrap();
    bench.until("up", || rail.state() == State::Up);
    let deadline = bench.clock.now().after(WAIT);
    let submission =
        Submission { id: id(), lane: Lane::Small, message: message(Do::Hold, 0, 0), landing: None, deadline };
    rail.submit(submission);
    bench.until("held", || bench.server.held() == 1);
    *events.0.lock().unwrap() = Some(rail);
    bench.server.answer_held(0, 0);
    assert!(took.recv_timeout(WAIT).unwrap() < Duration::from_millis(500), "it waited for itself");
    bench.until("left", || bench.listener.counters().connections == 0);
}
