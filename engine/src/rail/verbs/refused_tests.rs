//! A rail over a device that refuses posts, or completes nothing.

use super::client::Opened;
use super::listener::VerbsListener;
use super::prepare::Device;
use super::{Join, Opening, VerbsJoin, VerbsListenerConfig, VerbsRail, VerbsRailConfig};
use crate::clock::{Clock, Time};
use crate::memory::Arena;
use crate::memory::ledger::Ledger;
use crate::rail::slab::{Reading, Slab};
use crate::rail::tcp::{Admit, Joined, Limits};
use crate::rail::{Cause, Event, Events, Hand, Handler, Incoming, Landing, Lane, Rail, State, Submission};
use crate::verbs::fake::{Fake, Kind};
use bytes::Bytes;
use crossbeam_channel::{Receiver, Sender, unbounded};
use railfs_proto::v1::{Code, JoinRequest, Outcome, VerbsEnd, VerbsPair};
use railfs_proto::verbs::{FrameKind, decode};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Only for a test that hangs.
const LONG: Duration = Duration::from_secs(60);

struct Tell(Sender<Event>);

impl Events for Tell {
    fn event(&self, event: Event) {
        let _ = self.0.send(event);
    }
}

/// A server of which only its queue pairs are known.
struct Server;

impl Join for Server {
    fn join(&self, _: u32, end: VerbsEnd) -> Result<(u64, VerbsEnd), String> {
        let pairs = end.pairs.iter().map(|pair| VerbsPair { number: pair.number + 100, psn: 7 }).collect();
        Ok((5, VerbsEnd { pairs, ..end }))
    }
}

struct Nobody;

impl Handler for Nobody {
    fn request(&self, _: Incoming) {}
}

struct Stand {
    rail: Arc<VerbsRail>,
    events: Receiver<Event>,
    fake: Arc<Fake>,
    arena: Arena,
    clock: Clock,
}

fn stand(limits: Limits) -> Stand {
    stand_on(Kind::Plain, limits, true)
}

/// Its device completes what is posted until the rail is up, or nothing.
fn stand_on(kind: Kind, limits: Limits, completes: bool) -> Stand {
    let address: IpAddr = "10.9.0.2".parse().unwrap();
    let (context, fake) = Fake::open_as(kind, "fake0", address, &Arc::default());
    fake.completes.store(completes, Ordering::SeqCst);
    let arena = Arena::new(4 << 20).unwrap();
    let opened = Opened::on(Device::on(context, address).unwrap(), &arena, Opening::Auto).unwrap();
    let config = VerbsRailConfig {
        name: "rail".into(),
        device: "fake0".into(),
        address,
        remote: "10.9.0.1".into(),
        listener: 0,
        bulk_pairs: 2,
        opening: Opening::Auto,
        limits,
        seed: 1,
    };
    let (tell, events) = unbounded();
    let clock = Clock::start();
    let rail = VerbsRail::start_with(
        config,
        clock,
        arena.clone(),
        Arc::new(Server),
        Arc::new(Nobody),
        Arc::new(Tell(tell)),
        Some(opened),
    );
    Stand { rail: rail.unwrap(), events, fake, arena, clock }
}

impl Stand {
    fn until<T>(&self, mut wanted: impl FnMut(Event) -> Option<T>) -> T {
        loop {
            if let Some(found) = wanted(self.events.recv_timeout(LONG).unwrap()) {
                return found;
            }
        }
    }

    /// From then on nothing is completed.
    fn up(&self) {
        self.until(|event| matches!(event, Event::State(State::Up)).then_some(()));
        self.fake.completes.store(false, Ordering::SeqCst);
    }

    fn submit(&self, lane: Lane) {
        let deadline: Time = self.clock.now().after(LONG);
        let message = Bytes::from_static(b"request");
        self.rail.submit(Submission { id: 9, lane, message, landing: None, deadline });
    }

    fn down(&self) -> String {
        self.until(|event| match event {
            Event::State(State::Down(why)) => Some(why),
            _ => None,
        })
    }
}

#[test]
fn i10_a_post_that_the_device_refuses_fails_the_request_at_once_and_its_memory_comes_back() {
    let stand = stand(Limits::default());
    stand.up();
    let before = stand.arena.stats();
    stand.fake.refuse_posts.store(true, Ordering::SeqCst);
    let landing = Landing { extent: stand.arena.allocate(1 << 20).unwrap(), length: 1 << 20 };
    let deadline: Time = stand.clock.now().after(LONG);
    let message = Bytes::from_static(b"request");
    stand.rail.submit(Submission { id: 9, lane: Lane::Bulk, message, landing: Some(landing), deadline });
    // Whether the device took the half of it is not known: the memory is held until its queue pair is gone.
    let (cause, hand) = stand.until(|event| match event {
        Event::Failed { id: 9, cause, hand } => Some((cause, hand)),
        _ => None,
    });
    assert!(matches!(&cause, Cause::Disconnected(why) if why.contains("ibv_post_send")), "{cause:?}");
    assert!(matches!(hand, Hand::Held), "{hand:?}");
    stand.until(|event| matches!(event, Event::Released { id: 9, .. }).then_some(()));
    assert!(stand.down().contains("Input/output error"));
    assert_eq!(stand.arena.stats(), before);
    // It comes back with new queue pairs.
    let pairs = stand.fake.pairs();
    stand.fake.completes.store(true, Ordering::SeqCst);
    stand.fake.refuse_posts.store(false, Ordering::SeqCst);
    stand.up();
    assert!(stand.fake.pairs() >= pairs + 3);
    stand.rail.close();
}

#[test]
fn bulk_takes_turns_over_its_queue_pairs_whatever_small_requests_do() {
    let stand = stand(Limits { completion: LONG, ..Limits::default() });
    stand.up();
    let deadline: Time = stand.clock.now().after(LONG);
    for id in 0..16 {
        let lane = if id % 2 == 0 { Lane::Bulk } else { Lane::Small };
        let message = Bytes::from_static(b"request");
        stand.rail.submit(Submission { id, lane, message, landing: None, deadline });
    }
    // A submitter posts by itself.
    let requests = stand.fake.sent().into_iter().filter(|sent| {
        let header = decode(&sent.bytes).ok().and_then(|piece| piece.header);
        header.is_some_and(|header| header.kind == FrameKind::Request)
    });
    let mut of_pair = BTreeMap::new();
    for sent in requests {
        *of_pair.entry(sent.pair).or_insert(0) += 1;
    }
    assert_eq!(of_pair.into_values().collect::<Vec<_>>(), [4, 4, 8]);
    stand.rail.close();
}

#[test]
fn i9_posted_work_without_a_completion_ends_the_rail_after_the_cq_wait() {
    let stand = stand(Limits { completion: Duration::from_millis(100), ..Limits::default() });
    stand.up();
    stand.submit(Lane::Small);
    let why = stand.down();
    assert!(why.contains("completed nothing") && why.contains("100ms"), "{why}");
    stand.rail.close();
}

/// A firewall that drops UDP to port 4791 lets the handshake through, which goes over TCP.
#[test]
fn i10_a_rail_over_which_nothing_arrives_is_never_up_and_says_what_to_look_at() {
    let stand = stand_on(Kind::Plain, Limits { completion: LONG, ..Limits::default() }, false);
    let first = loop {
        // One of its three queue pairs is never heard of.
        let sent = stand.fake.sent();
        if sent.len() == 3 {
            break sent;
        }
        std::thread::yield_now();
    };
    stand.fake.complete(first[0].pair, first[0].id, 0);
    stand.fake.complete(first[1].pair, first[1].id, 0);
    // Retries exceeded.
    stand.fake.complete(first[2].pair, first[2].id, 12);
    let mut ups = 0;
    let why = stand.until(|event| match event {
        Event::State(State::Up) => {
            ups += 1;
            None
        }
        Event::State(State::Down(why)) => Some(why),
        _ => None,
    });
    assert_eq!(ups, 0);
    for wanted in ["port 4791", "10.9.0.2", "10.9.0.1", "MTU", "retr"] {
        assert!(why.contains(wanted), "no {wanted} in: {why}");
    }
    assert_eq!(stand.rail.counters().connects, 0);
    // The way is open again.
    stand.fake.completes.store(true, Ordering::SeqCst);
    stand.up();
    assert_eq!(stand.rail.counters().connects, 1);
    stand.rail.close();
}

/// Soft-RoCE looks at a window with the first packet of a WRITE only: there only the end of the queue pair is a fence.
#[test]
fn i4_where_a_window_is_no_fence_a_landing_that_nobody_speaks_of_costs_the_queue_pair() {
    for (kind, want) in
        [(Kind::Soft, "does not say whether it still writes"), (Kind::Windows, "not taken away in time")]
    {
        let stand = stand_on(kind, Limits { completion: LONG, ..Limits::default() }, true);
        stand.up();
        let before = stand.arena.stats();
        let landing = Landing { extent: stand.arena.allocate(1 << 20).unwrap(), length: 1 << 20 };
        let deadline: Time = stand.clock.now().after(Duration::from_millis(20));
        let message = Bytes::from_static(b"request");
        stand.rail.submit(Submission { id: 9, lane: Lane::Bulk, message, landing: Some(landing), deadline });
        let (cause, hand) = stand.until(|event| match event {
            Event::Failed { id: 9, cause, hand } => Some((cause, hand)),
            _ => None,
        });
        assert!(matches!(cause, Cause::Expired) && matches!(hand, Hand::Held), "{kind:?}: {cause:?}, {hand:?}");
        let mut down = None;
        stand.until(|event| match event {
            Event::State(State::Down(why)) => {
                down = Some(why);
                None
            }
            Event::Released { id: 9, .. } => Some(()),
            _ => None,
        });
        let why = down.unwrap_or_else(|| stand.down());
        assert!(why.contains(want), "{kind:?}: {why}");
        assert_eq!(stand.arena.stats(), before);
        stand.rail.close();
    }
}

/// Whoever has any ticket gets in.
struct Open;

impl Admit for Open {
    fn join(&self, _: &JoinRequest, _: SocketAddr) -> Result<Joined, Outcome> {
        Err(Outcome { code: Code::Denied.into(), message: "no ticket is good here".into() })
    }
    fn connected(&self, _: u64, _: Lane, _: u64, _: Arc<dyn Rail>) {}
    fn closed(&self, _: u64, _: Lane, _: u64, _: &str) {}
}

#[test]
fn i10_a_listener_whose_device_failed_says_so_and_lets_nobody_join() {
    let address: IpAddr = "10.9.0.1".parse().unwrap();
    let (context, fake) = Fake::open("fake0", address, &Arc::default());
    let config = VerbsListenerConfig {
        name: "rail0".into(),
        device: None,
        address,
        slab: Slab::start("slab", 4 << 20, Reading::Threads).unwrap(),
        landing: None,
        ledger: Ledger::new(64 << 20, "limit"),
        limits: Limits::default(),
    };
    let device = Device::on(context, address).unwrap();
    let listener = VerbsListener::on(device, config, Clock::start(), Arc::new(Open)).unwrap();
    let pairs = (1..=2).map(|number| VerbsPair { number, psn: 7 }).collect();
    let end = VerbsEnd { gid: vec![1; 16].into(), mtu: 3, depth: 64, piece_bytes: 4096, pairs, ..VerbsEnd::default() };
    let refused = || {
        let join = VerbsJoin { join: JoinRequest::default(), end: end.clone() };
        listener.join(&join, "10.9.0.2:1".parse().unwrap()).unwrap_err().message
    };
    assert_eq!(listener.failed(), None);
    assert_eq!(refused(), "no ticket is good here");
    fake.fail();
    let until = std::time::Instant::now() + LONG;
    while listener.failed().is_none() && std::time::Instant::now() < until {
        std::thread::yield_now();
    }
    let why = listener.failed().unwrap();
    assert!(why.contains("fake0") && why.contains("failed"), "{why}");
    assert_eq!(refused(), why, "its device is gone: no ticket is spent on it");
    assert!(listener.stop());
}
