//! Reads, by the whole client side, over a verbs rail that stops taking posts and another rail that goes on.

use super::client::Opened;
use super::prepare::Device;
use super::{Join, Opening, VerbsRail, VerbsRailConfig};
use crate::client::{CheckWay, Freshness, Object};
use crate::clock::Clock;
use crate::error::Error;
use crate::memory::Arena;
use crate::rail::sim::{Sim, SimConfig};
use crate::rail::tcp::Limits;
use crate::rail::{Bulk, Event, Events, Handler, Incoming, Rail};
use crate::read::core::{Core, Session};
use crate::read::driver::Driver;
use crate::verbs::fake::Fake;
use bytes::Bytes;
use prost::Message;
use railfs_proto::checksum::page_checksums;
use railfs_proto::descriptor::{Attributes, Descriptor, Id, Proof, Replica};
use railfs_proto::layout::Striping;
use railfs_proto::limits::LEASE;
use railfs_proto::name::ObjectName;
use railfs_proto::reply::ok_outcome;
use railfs_proto::slot::Slot;
use railfs_proto::v1::{self, VerbsEnd, VerbsPair};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);
const PAGE: u32 = 4096;
const PAGES: u64 = 64;
const VERSION: u64 = 2000;

fn value() -> u64 {
    Slot { in_progress: 0, counter: 1 }.encode(1)
}

fn page(number: u64) -> Vec<u8> {
    vec![u8::try_from(number + 1).unwrap(); PAGE as usize]
}

/// A server of one object.
struct Server;

impl Handler for Server {
    fn request(&self, incoming: Incoming) {
        let request = v1::RailRequest::decode(incoming.message).unwrap();
        let check = |proof: &v1::SlotProof| v1::CheckResult { current: proof.value == value(), value: value() };
        let (bulk, body) = match request.body.unwrap() {
            v1::rail_request::Body::Fetch(fetch) => {
                let first = fetch.offset / u64::from(PAGE);
                let pages = u64::from(fetch.length / PAGE);
                let bytes: Vec<u8> = (first..first + pages).flat_map(page).collect();
                let body = v1::FetchReply {
                    version: fetch.version,
                    component: 0,
                    offset: fetch.offset,
                    length: fetch.length,
                    checksums: page_checksums(fetch.version, 0, first, PAGE, &bytes),
                    check: fetch.proof.as_ref().map(check),
                };
                (Bulk::Bytes(bytes.into()), v1::rail_reply::Body::Fetch(body))
            }
            v1::rail_request::Body::Check(request) => {
                let results = request.proofs.iter().map(check).collect();
                (Bulk::None, v1::rail_reply::Body::Check(v1::CheckReply { results }))
            }
            other => panic!("{other:?}"),
        };
        let message = Bytes::from(v1::RailReply { outcome: Some(ok_outcome()), body: Some(body) }.encode_to_vec());
        incoming.replier.reply(bulk, Box::new(move |_| message));
    }
}

impl Join for Server {
    fn join(&self, _: u32, end: VerbsEnd) -> Result<(u64, VerbsEnd), String> {
        let pairs = end.pairs.iter().map(|pair| VerbsPair { number: pair.number + 100, psn: 7 }).collect();
        Ok((5, VerbsEnd { pairs, ..end }))
    }
}

struct Nobody;

impl Events for Nobody {
    fn event(&self, _: Event) {}
}

impl Handler for Nobody {
    fn request(&self, _: Incoming) {}
}

fn object() -> Object {
    let attributes = Attributes { mode: 0o644, mtime_seconds: 0, mtime_nanoseconds: 0, owner: None };
    let striping = Striping::new(PAGES * u64::from(PAGE), PAGE, 16 * PAGE, 1).unwrap();
    let replica = vec![Replica { node: "n".into(), directory: Id([1; 16]) }];
    let descriptor = Descriptor { version: VERSION, attributes, striping, components: vec![replica] };
    let proof = Proof { node: "n".into(), incarnation: 1, slot: 0, value: value(), name_tag: 7 };
    Object::new(ObjectName::new("ns", "key").unwrap(), descriptor, proof)
}

/// Ends the simulation's thread, also where the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn i10_reads_go_on_over_another_rail_when_the_device_of_one_takes_no_posts() {
    let clock = Clock::start();
    let arena = Arena::new(16 << 20).unwrap();
    let mut core = Core::new(arena.clone(), 0);
    core.check_way(CheckWay::Frame);
    let driver = Driver::start(core, clock, 2, Box::new(|| ())).unwrap();
    let scope = v1::Scope { store: Bytes::from_static(&[9; 16]), node: "n".into(), incarnation: 1 };
    driver.session(Session { scope, max_fetch: 1 << 20, pins: false, lease: LEASE });

    let address: IpAddr = "10.9.0.2".parse().unwrap();
    let (context, fake) = Fake::open("fake0", address, &Arc::default());
    fake.completes.store(true, Ordering::SeqCst);
    let opened = Opened::on(Device::on(context, address).unwrap(), &arena, Opening::Auto).unwrap();
    let config = VerbsRailConfig {
        name: "verbs".into(),
        device: "fake0".into(),
        address,
        remote: "10.9.0.1".into(),
        listener: 0,
        bulk_pairs: 2,
        opening: Opening::Auto,
        limits: Limits::default(),
        seed: 1,
    };
    let start = |events| -> std::io::Result<Arc<dyn Rail>> {
        let (server, nobody) = (Arc::new(Server), Arc::new(Nobody));
        Ok(VerbsRail::start_with(config, clock, arena.clone(), server, nobody, events, Some(opened))?)
    };
    let verbs = driver.add_rail("verbs", start).unwrap();
    assert!(driver.wait_for_rail(LONG), "the verbs rail does not come up");
    // From here on it takes nothing.
    fake.refuse_posts.store(true, Ordering::SeqCst);

    let sim = Sim::new(1);
    let start = |events| -> std::io::Result<Arc<dyn Rail>> {
        let link = sim.link(SimConfig::default(), (events, Arc::new(Nobody)), (Arc::new(Nobody), Arc::new(Server)));
        Ok(link.client)
    };
    driver.add_rail("sim", start).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                sim.advance_to(clock.now());
                std::thread::yield_now();
            }
        });
        let _stop = Stop(&stop);
        let object = Arc::new(object());
        let mut failed = 0;
        for number in 0..PAGES {
            let (send, receive) = mpsc::sync_channel(1);
            let reply = Box::new(move |result: Result<&[u8], Error>| drop(send.send(result.map(<[u8]>::to_vec))));
            driver.read(&object, 1, number * u64::from(PAGE), PAGE, Freshness::Current, LONG, reply);
            let bytes = receive.recv_timeout(LONG).unwrap();
            assert!(bytes.as_ref().is_ok_and(|bytes| *bytes == page(number)), "page {number}: {:?}", bytes.err());
            failed = driver.rail(verbs).map_or(0, |rail| rail.counters().failed);
        }
        assert!(failed > 0, "the rail that fails was not asked");
    });
    driver.close();
    drop(driver);
    assert_eq!(arena.stats().quarantined, 0, "its queue pairs are gone");
}
