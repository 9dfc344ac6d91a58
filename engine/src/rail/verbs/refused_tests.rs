//! A rail over a device that refuses posts, or completes nothing.

use super::client::Opened;
use super::prepare::Device;
use super::{Join, Opening, VerbsRail, VerbsRailConfig};
use crate::clock::{Clock, Time};
use crate::memory::Arena;
use crate::rail::tcp::Limits;
use crate::rail::{Cause, Event, Events, Hand, Handler, Incoming, Landing, Lane, Rail, State, Submission};
use crate::verbs::fake::Fake;
use bytes::Bytes;
use crossbeam_channel::{Receiver, Sender, unbounded};
use railfs_proto::v1::{VerbsEnd, VerbsPair};
use std::net::IpAddr;
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
    let address: IpAddr = "10.9.0.2".parse().unwrap();
    let (context, fake) = Fake::open("fake0", address, &Arc::default());
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
    fn until<T>(&self, wanted: impl Fn(Event) -> Option<T>) -> T {
        loop {
            if let Some(found) = wanted(self.events.recv_timeout(LONG).unwrap()) {
                return found;
            }
        }
    }

    fn up(&self) {
        self.until(|event| matches!(event, Event::State(State::Up)).then_some(()));
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
    stand.fake.refuse_posts.store(false, Ordering::SeqCst);
    stand.up();
    assert!(stand.fake.pairs() >= pairs + 3);
    stand.rail.close();
}

#[test]
fn i9_posted_work_without_a_completion_ends_the_rail_after_the_cq_wait() {
    let stand = stand(Limits { completion: Duration::from_millis(100), ..Limits::default() });
    stand.up();
    // The first frame of each queue pair was posted, and nothing is ever completed.
    let why = stand.down();
    assert!(why.contains("completed nothing") && why.contains("100ms"), "{why}");
    stand.rail.close();
}
