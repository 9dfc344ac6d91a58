//! A server's connection whose device, or whose client, says what cannot be: completions that come twice, before their turn or
//! of nothing; flushes, codes that nobody knows, a queue that overflowed; answers that come twice, and requests without end.

use super::listener::VerbsListener;
use super::prepare::Device;
use super::{QUEUED, VerbsJoin, VerbsListenerConfig};
use crate::clock::Clock;
use crate::memory::Arena;
use crate::memory::ledger::Ledger;
use crate::rail::slab::{Reading, Slab};
use crate::rail::tcp::{Admit, Joined, Limits};
use crate::rail::{Bulk, Event, Events, Hand, Handler, Incoming, Landing, Lane, Rail, Submission};
use crate::verbs::fake::{Fake, Kind, Sent};
use crate::verbs::{WrId, WrKind};
use bytes::Bytes;
use crossbeam_channel::{Receiver, Sender, unbounded};
use railfs_proto::v1::{JoinRequest, Outcome, VerbsEnd, VerbsPair};
use railfs_proto::verbs::{FrameKind, Header, decode, encode};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Only for a test that hangs.
const LONG: Duration = Duration::from_secs(60);
const SESSION: u64 = 5;
const BULK: u32 = 4096;

/// Lets everybody in.
struct Gate {
    connected: Sender<(Lane, Arc<dyn Rail>)>,
    closed: Sender<String>,
    events: Sender<Event>,
    requests: Sender<Incoming>,
}

struct Tell(Sender<Event>);

impl Events for Tell {
    fn event(&self, event: Event) {
        let _ = self.0.send(event);
    }
}

struct Serve(Sender<Incoming>);

impl Handler for Serve {
    fn request(&self, incoming: Incoming) {
        let _ = self.0.send(incoming);
    }
}

impl Admit for Gate {
    fn join(&self, _: &JoinRequest, _: SocketAddr) -> Result<Joined, Outcome> {
        let (events, handler) = (Arc::new(Tell(self.events.clone())), Arc::new(Serve(self.requests.clone())));
        Ok(Joined { session: SESSION, events, handler })
    }
    fn connected(&self, _: u64, lane: Lane, _: u64, rail: Arc<dyn Rail>) {
        let _ = self.connected.send((lane, rail));
    }
    fn closed(&self, _: u64, _: Lane, _: u64, why: &str) {
        let _ = self.closed.send(why.to_owned());
    }
}

/// A connection of a listener; the test is its client, and its device.
struct Stand {
    listener: VerbsListener,
    fake: Arc<Fake>,
    slab: Arc<Slab>,
    landings: Arena,
    /// The server's queue pairs: for bulk, for small messages.
    pairs: Vec<u32>,
    bulk: Arc<dyn Rail>,
    clock: Clock,
    closed: Receiver<String>,
    events: Receiver<Event>,
    requests: Receiver<Incoming>,
}

fn stand(limits: Limits) -> Stand {
    // It has receives enough.
    stand_with(limits, 1000)
}

fn stand_with(limits: Limits, grants: u32) -> Stand {
    let address: IpAddr = "10.9.0.1".parse().unwrap();
    let (context, fake) = Fake::open_as(Kind::Windows, "fake0", address, &Arc::default());
    let slab = Slab::start("slab", 4 << 20, Reading::Threads).unwrap();
    let landings = Arena::new(4 << 20).unwrap();
    let config = VerbsListenerConfig {
        name: "rail0".into(),
        device: None,
        address,
        slab: slab.clone(),
        landing: Some(landings.clone()),
        ledger: Ledger::new(64 << 20, "limit"),
        limits,
    };
    let (connected, lanes) = unbounded();
    let (close, closed) = unbounded();
    let (tell, events) = unbounded();
    let (ask, requests) = unbounded();
    let gate = Gate { connected, closed: close, events: tell, requests: ask };
    let clock = Clock::start();
    let device = Device::on(context, address).unwrap();
    let listener = VerbsListener::on(device, config, clock, Arc::new(gate)).unwrap();
    let end = VerbsEnd {
        gid: vec![1; 16].into(),
        mtu: 3,
        depth: 64,
        piece_bytes: 4096,
        pairs: (1..=2).map(|number| VerbsPair { number, psn: 7 }).collect(),
        reads_answered: 16,
        reads_asked: 16,
        offers: true,
        ..VerbsEnd::default()
    };
    let joined =
        listener.join(&VerbsJoin { join: JoinRequest::default(), end }, "10.9.0.2:1".parse().unwrap()).unwrap();
    let pairs: Vec<u32> = joined.pairs.iter().map(|pair| pair.number).collect();
    for pair in &pairs {
        fake.deliver(*pair, &of_granting(Header::plain(FrameKind::Ready, SESSION, 0), grants), None);
    }
    let both: Vec<_> = (0..2).map(|_| lanes.recv_timeout(LONG).unwrap()).collect();
    let bulk = both.into_iter().find(|(lane, _)| *lane == Lane::Bulk).map(|(_, rail)| rail).unwrap();
    Stand { listener, fake, slab, landings, pairs, bulk, clock, closed, events, requests }
}

/// A frame without a message.
fn frame(kind: FrameKind, id: u64) -> Vec<u8> {
    of(Header::plain(kind, SESSION, id))
}

fn of(header: Header) -> Vec<u8> {
    of_granting(header, 1000)
}

/// The client has posted so many receives so far.
fn of_granting(header: Header, receives: u32) -> Vec<u8> {
    let mut out = Vec::new();
    encode(&header, receives, 0, 4096, |_, _| &[], &mut out);
    out
}

impl Stand {
    /// Waits for work that was posted.
    fn sent(&self, wanted: impl Fn(&Sent) -> bool) -> Sent {
        let until = Instant::now() + LONG;
        loop {
            if let Some(found) = self.fake.sent().into_iter().find(|sent| wanted(sent)) {
                return found;
            }
            assert!(Instant::now() < until, "it is not posted");
            std::thread::yield_now();
        }
    }

    /// Waits for a message that was posted.
    fn message(&self, kind: FrameKind, id: u64) -> Sent {
        self.sent(|sent| {
            let header = decode(&sent.bytes).ok().and_then(|piece| piece.header);
            header.is_some_and(|header| header.kind == kind && header.id == id)
        })
    }

    /// Its answer to a ping is posted.
    fn pinged(&self, id: u64) -> (WrId, Sent) {
        let receive = self.fake.deliver(self.pairs[0], &frame(FrameKind::Ping, id), None);
        (receive, self.message(FrameKind::Pong, id))
    }

    /// A WRITE and its reply are posted, from the slab.
    fn written(&self, id: u64) -> Sent {
        let request = Header { bulk: BULK, address: 0x10000, key: 7, ..Header::plain(FrameKind::Request, SESSION, id) };
        self.fake.deliver(self.pairs[0], &of(request), None);
        let incoming = self.requests.recv_timeout(LONG).unwrap();
        let bytes = Bytes::from(vec![0x5a; BULK as usize]);
        incoming.replier.reply(Bulk::Bytes(bytes), Box::new(|_| Bytes::new()));
        let reply = self.message(FrameKind::Reply, id);
        let write = self.fake.sent().into_iter().find(|sent| sent.id.kind == WrKind::Write).unwrap();
        assert!(write.id.slot == reply.id.slot && !write.signalled && reply.signalled);
        assert_eq!(self.slab.counters().held, u64::from(BULK));
        reply
    }
}

#[test]
fn i4_i5_a_completion_that_cannot_be_retires_the_connection_and_frees_nothing_before() {
    type Odd = fn(&Stand, WrId, Sent, Sent);
    let all: [(&str, Odd, &str); 9] = [
        // The place was used again meanwhile: for the reply.
        ("one that comes twice", |on, _, pong, _| on.fake.complete(on.pairs[0], pong.id, 0), "completed before"),
        (
            "one of nothing",
            |on, _, pong, _| on.fake.complete(on.pairs[0], WrId { slot: 50, ..pong.id }, 0),
            "not posted",
        ),
        (
            "one before its turn",
            |on, _, _, _| {
                let (_, later) = on.pinged(2);
                on.fake.complete(on.pairs[0], later.id, 0);
            },
            "posted earlier",
        ),
        (
            "one of a kind that is not known",
            |on, _, _, reply| on.fake.complete(on.pairs[0], WrId { kind: WrKind::Unknown, ..reply.id }, 0),
            "nobody posted",
        ),
        ("a receive that comes twice", |on, receive, _, _| on.fake.complete(on.pairs[0], receive, 0), "receive"),
        ("a flush", |on, _, _, reply| on.fake.complete(on.pairs[0], reply.id, 5), "queue pair has failed"),
        (
            "a code that is not known",
            |on, _, _, reply| on.fake.complete(on.pairs[0], reply.id, 99),
            "completion code 99",
        ),
        (
            "a WRITE that failed",
            |on, _, _, reply| on.fake.complete(on.pairs[0], WrId { kind: WrKind::Write, ..reply.id }, 10),
            "a WRITE failed",
        ),
        ("an overflow", |on, _, _, _| on.fake.overflow(), "overflowed"),
    ];
    for (name, odd, want) in all {
        let stand = stand(Limits { completion: LONG, ..Limits::default() });
        let (receive, pong) = stand.pinged(1);
        stand.fake.complete(pong.pair, pong.id, 0);
        let reply = stand.written(9);
        let (tell, held) = unbounded();
        let slab = stand.slab.clone();
        *stand.fake.destroying.lock().unwrap() = Some(Box::new(move |_| {
            let _ = tell.send(slab.counters().held);
        }));
        odd(&stand, receive, pong, reply);
        let why = stand.closed.recv_timeout(LONG).unwrap();
        assert!(why.contains(want), "{name}: {why}");
        assert_eq!(
            held.try_iter().collect::<Vec<_>>(),
            [u64::from(BULK); 2],
            "{name}: the device may read it until then"
        );
        assert_eq!(stand.slab.counters().held, 0, "{name}: and then it is back");
        assert!(stand.listener.stop(), "{name}");
    }
}

#[test]
fn i5_a_completion_of_an_older_connection_is_dropped_and_counted() {
    let stand = stand(Limits { completion: LONG, ..Limits::default() });
    let reply = stand.written(9);
    stand.fake.complete(reply.pair, WrId { generation: reply.id.generation ^ 1, ..reply.id }, 0);
    // What comes after it was polled after it.
    stand.pinged(1);
    assert_eq!(stand.slab.counters().held, u64::from(BULK));
    assert_eq!(stand.listener.counters().stale, 1);
    stand.fake.complete(reply.pair, reply.id, 0);
    stand.pinged(2);
    assert_eq!(stand.slab.counters().held, 0, "its own completion gives it back");
    assert!(stand.closed.try_recv().is_err());
    assert!(stand.listener.stop());
}

#[test]
fn i9_a_servers_device_that_owes_a_completion_for_too_long_ends_the_connection() {
    let stand = stand(Limits { completion: Duration::from_millis(100), ..Limits::default() });
    // The answer to the ping is posted, and never completed.
    stand.pinged(1);
    let why = stand.closed.recv_timeout(LONG).unwrap();
    assert!(why.contains("completed nothing") && why.contains("100ms"), "{why}");
    assert!(stand.listener.stop());
}

#[test]
fn i5_a_request_whose_offer_is_read_is_not_answered_once_more() {
    let stand = stand(Limits { completion: LONG, ..Limits::default() });
    let before = stand.landings.stats();
    let landing = Landing { extent: stand.landings.allocate(BULK).unwrap(), length: BULK };
    let deadline = stand.clock.now().after(LONG);
    stand.bulk.submit(Submission { id: 1, lane: Lane::Bulk, message: Bytes::new(), landing: Some(landing), deadline });
    let pair = stand.message(FrameKind::Request, 1).pair;
    let offer = Header { bulk: BULK, address: 0x20000, key: 3, ..Header::plain(FrameKind::Offer, SESSION, 1) };
    stand.fake.deliver(pair, &of(offer), None);
    let read = stand.sent(|sent| sent.id.kind == WrKind::Read);
    stand.fake.deliver(pair, &frame(FrameKind::Reply, 1), None);
    // In the order they were posted.
    for sent in stand.fake.sent().iter().filter(|sent| sent.pair == pair && sent.signalled) {
        stand.fake.complete(pair, sent.id, 0);
    }
    assert!(read.signalled);
    let mut answers = Vec::new();
    let until = Instant::now() + LONG;
    let why = loop {
        assert!(Instant::now() < until);
        answers.extend(stand.events.try_iter());
        let told = answers.iter().filter(|event| matches!(event, Event::Replied { .. })).count();
        assert_eq!(told, 0, "nothing of this is an answer: {answers:?}");
        if let Ok(why) = stand.closed.try_recv() {
            break why;
        }
        std::thread::yield_now();
    };
    assert!(why.contains("request 1 is answered twice"), "{why}");
    answers.extend(stand.events.try_iter());
    assert!(
        matches!(&answers[..], [Event::Failed { id: 1, hand: Hand::Held, .. }, Event::Released { id: 1, .. }]),
        "{answers:?}"
    );
    let counters = stand.bulk.counters();
    assert_eq!((counters.in_flight, counters.held_bytes), (0, 0));
    drop(answers);
    assert_eq!(stand.landings.stats(), before);
    assert!(stand.listener.stop());
}

/// A client that takes nothing: it never says that it has posted a receive again.
#[test]
fn i6_a_client_that_asks_and_takes_nothing_ends_its_connection() {
    for kind in [FrameKind::Ping, FrameKind::Request] {
        let stand = stand_with(Limits::default(), 64);
        // The device does its work.
        stand.fake.completes.store(true, Ordering::SeqCst);
        let mut asked = 0;
        let until = Instant::now() + LONG;
        let why = loop {
            assert!(Instant::now() < until && asked < 2 * QUEUED as u64, "{asked} answers wait");
            if stand
                .fake
                .delivered(stand.pairs[1], &of_granting(Header::plain(kind, SESSION, asked), 64), None)
                .is_some()
            {
                asked += 1;
            }
            for incoming in stand.requests.try_iter() {
                incoming.replier.reply(Bulk::None, Box::new(|_| Bytes::new()));
            }
            if let Ok(why) = stand.closed.try_recv() {
                break why;
            }
        };
        assert!(why.contains("wait to be sent") && why.contains("4096"), "{why}");
        assert!(asked > QUEUED as u64);
        assert!(stand.listener.stop());
    }
}
