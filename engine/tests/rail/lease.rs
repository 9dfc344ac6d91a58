//! Two runs of a server on one real device: the older one's software says nothing any more, but its slots stay registered and its
//! queue pairs connected, while the younger one publishes.

use super::tcp::SESSION;
use super::verbs::{Devices, Direct, listener_config};
use bytes::Bytes;
use prost::Message;
use railfs_engine::client::{CheckWay, Freshness, Object};
use railfs_engine::clock::Clock;
use railfs_engine::error::Error;
use railfs_engine::memory::Arena;
use railfs_engine::rail::tcp::{Admit, Joined, Limits};
use railfs_engine::rail::verbs::{Opening, VerbsListener, VerbsRail, VerbsRailConfig};
use railfs_engine::rail::{Bulk, Event, Events, Handler, Incoming, Lane, Rail};
use railfs_engine::read::core::{Core, Session};
use railfs_engine::read::driver::Driver;
use railfs_proto::checksum::page_checksums;
use railfs_proto::descriptor::{Attributes, Descriptor, Id, Proof, Replica};
use railfs_proto::layout::Striping;
use railfs_proto::limits::LEASE;
use railfs_proto::name::ObjectName;
use railfs_proto::reply::{Lookup, ok_outcome};
use railfs_proto::slot::Slot;
use railfs_proto::v1;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

const PAGE: u32 = 4096;
const STORE: [u8; 16] = [9; 16];

/// One run: one object, one slot.
struct Run {
    incarnation: u64,
    version: AtomicU64,
    words: Arc<[AtomicU64]>,
    silent: AtomicBool,
    checks: AtomicU64,
}

fn word(counter: u64, incarnation: u64) -> u64 {
    Slot { in_progress: 0, counter }.encode(incarnation)
}

fn object(version: u64, incarnation: u64, value: u64) -> Object {
    let attributes = Attributes { mode: 0o644, mtime_seconds: 0, mtime_nanoseconds: 0, owner: None };
    let striping = Striping::new(u64::from(PAGE), PAGE, PAGE, 1).unwrap();
    let replica = vec![Replica { node: "n".into(), directory: Id([1; 16]) }];
    let descriptor = Descriptor { version, attributes, striping, components: vec![replica] };
    let proof = Proof { node: "n".into(), incarnation, slot: 0, value, name_tag: 7 };
    Object::new(ObjectName::new("ns", "key").unwrap(), descriptor, proof)
}

fn content(version: u64) -> Vec<u8> {
    vec![u8::try_from(version % 251).unwrap(); PAGE as usize]
}

impl Run {
    fn new(incarnation: u64, version: u64) -> Arc<Run> {
        Arc::new(Run {
            incarnation,
            version: AtomicU64::new(version),
            words: Arc::from([AtomicU64::new(word(1, incarnation))]),
            silent: AtomicBool::new(false),
            checks: AtomicU64::new(0),
        })
    }
}

impl Handler for Run {
    fn request(&self, incoming: Incoming) {
        if self.silent.load(Ordering::SeqCst) {
            return;
        }
        let request = v1::RailRequest::decode(incoming.message).unwrap();
        let (version, value) = (self.version.load(Ordering::SeqCst), self.words[0].load(Ordering::SeqCst));
        let check = |proof: &v1::SlotProof| v1::CheckResult { current: proof.value == value, value };
        let meant = request.scope.unwrap().incarnation == self.incarnation;
        let (bulk, body) = match request.body.unwrap() {
            _ if !meant => (Bulk::None, None),
            v1::rail_request::Body::Fetch(fetch) => {
                let bytes = content(fetch.version);
                let body = v1::FetchReply {
                    version: fetch.version,
                    component: 0,
                    offset: 0,
                    length: PAGE,
                    checksums: page_checksums(fetch.version, 0, 0, PAGE, &bytes),
                    check: fetch.proof.as_ref().map(check),
                };
                (Bulk::Bytes(bytes.into()), Some(v1::rail_reply::Body::Fetch(body)))
            }
            v1::rail_request::Body::Check(request) => {
                self.checks.fetch_add(1, Ordering::SeqCst);
                let results = request.proofs.iter().map(check).collect();
                (Bulk::None, Some(v1::rail_reply::Body::Check(v1::CheckReply { results })))
            }
            v1::rail_request::Body::Lookup(_) => {
                let object = object(version, self.incarnation, value);
                let lookup = Lookup::Object(object.descriptor.clone(), object.proof());
                (Bulk::None, Some(v1::rail_reply::Body::Lookup(lookup.to_message())))
            }
            v1::rail_request::Body::Lease(_) => {
                let lease_milliseconds = u32::try_from(LEASE.as_millis()).unwrap();
                (Bulk::None, Some(v1::rail_reply::Body::Lease(v1::LeaseReply { lease_milliseconds })))
            }
            other => panic!("{other:?}"),
        };
        let wrong = v1::Outcome { code: v1::Code::WrongIncarnation.into(), message: String::new() };
        let outcome = Some(if body.is_some() { ok_outcome() } else { wrong });
        let message = Bytes::from(v1::RailReply { outcome, body }.encode_to_vec());
        incoming.replier.reply(bulk, Box::new(move |_| message));
    }
}

struct Nobody;
impl Events for Nobody {
    fn event(&self, _: Event) {}
}
impl Handler for Nobody {
    fn request(&self, _: Incoming) {}
}
struct Open(Arc<Run>);
impl Admit for Open {
    fn join(&self, _: &v1::JoinRequest, _: SocketAddr) -> Result<Joined, v1::Outcome> {
        Ok(Joined { session: SESSION, events: Arc::new(Nobody), handler: self.0.clone() })
    }
    fn connected(&self, _: u64, _: Lane, _: u64, _: Arc<dyn Rail>) {}
    fn closed(&self, _: u64, _: Lane, _: u64, _: &str) {}
}

fn patient() -> Limits {
    // Of an emulated machine: what is looked at is the lease.
    Limits { suspect: Duration::from_secs(60), retire: Duration::from_secs(120), ..Limits::default() }
}

fn listen(devices: &Devices, clock: Clock, run: &Arc<Run>) -> Arc<VerbsListener> {
    let config = listener_config(devices, patient());
    let listener = Arc::new(VerbsListener::start(config, clock, Arc::new(Open(run.clone()))).unwrap());
    listener.expose(run.words.clone(), run.incarnation, LEASE).unwrap();
    listener
}

struct Reader {
    driver: Arc<Driver>,
    arena: Arena,
    clock: Clock,
}

impl Reader {
    fn session(&self, run: &Run) {
        let scope = v1::Scope { store: Bytes::from_static(&STORE), node: "n".into(), incarnation: run.incarnation };
        self.driver.session(Session { scope, max_fetch: 1 << 20, pins: false, lease: LEASE });
    }

    fn rail(&self, devices: &Devices, listener: &Arc<VerbsListener>) {
        let config = VerbsRailConfig {
            name: "test".into(),
            device: devices.client.0.clone(),
            address: devices.client.1,
            remote: devices.server.1.to_string(),
            listener: 1,
            bulk_pairs: 1,
            opening: Opening::Auto,
            limits: patient(),
            seed: 1,
        };
        let join = Arc::new(Direct(listener.clone()));
        let start = |events: Arc<dyn Events>| -> std::io::Result<Arc<dyn Rail>> {
            let rail = VerbsRail::start(config, self.clock, self.arena.clone(), join, Arc::new(Nobody), events)?;
            Ok(rail)
        };
        self.driver.add_rail("test", start).unwrap();
    }

    fn read(&self, object: &Arc<Object>, limit: Duration) -> Result<Vec<u8>, Error> {
        let (send, receive) = mpsc::sync_channel(1);
        let reply = Box::new(move |result: Result<&[u8], Error>| drop(send.send(result.map(<[u8]>::to_vec))));
        self.driver.read(object, 1, 0, PAGE, Freshness::Current, limit, reply);
        receive.recv().unwrap()
    }

    fn looks(&self) -> u64 {
        self.driver.inspect(|core, _| core.counts().check_reads)
    }
}

pub fn predecessor(devices: &Devices) {
    let clock = Clock::start();
    let (old, new) = (Run::new(1, 2000), Run::new(2, 2000));
    let (listener, successor) = (listen(devices, clock, &old), listen(devices, clock, &new));
    let arena = Arena::new(8 << 20).unwrap();
    let mut core = Core::new(arena.clone(), 0);
    core.check_way(CheckWay::Read);
    let driver = Driver::start(core, clock, 2, Box::new(|| ())).unwrap();
    let reader = Reader { driver, arena, clock };
    reader.session(&old);
    reader.rail(devices, &listener);
    assert!(reader.driver.wait_for_rail(Duration::from_secs(60)), "the rail does not come up");
    let object = Arc::new(object(2000, 1, word(1, 1)));
    let long = Duration::from_secs(60);
    assert_eq!(reader.read(&object, long).unwrap(), content(2000));
    let checks = old.checks.load(Ordering::SeqCst);
    for _ in 0..200 {
        assert_eq!(reader.read(&object, long).unwrap(), content(2000));
    }
    let (before, frames) = (reader.looks(), old.checks.load(Ordering::SeqCst) - checks);
    println!("200 reads: {before} checks by READ, {frames} by frame");
    assert!(before > 100, "{before} checks by READ, {frames} by frame");

    // From here on its software says nothing; the successor has the locks, and publishes after 1.25 leases and a second.
    old.silent.store(true, Ordering::SeqCst);
    let publishes = clock.now().after(LEASE * 5 / 4 + Duration::from_secs(1));
    let (mut by_card, mut unanswered) = (0, 0);
    while clock.now() < publishes {
        match reader.read(&object, Duration::from_millis(200)) {
            Ok(bytes) => {
                assert_eq!(bytes, content(2000));
                by_card += 1;
            }
            Err(Error::TimedOut { .. }) => unanswered += 1,
            Err(error) => panic!("{error}"),
        }
    }
    println!("while the server was silent: {by_card} reads by the card's word, {unanswered} unanswered");
    assert!(by_card > 0 && unanswered > 0, "{by_card} {unanswered}");
    new.version.store(2001, Ordering::SeqCst);
    new.words[0].store(word(2, 2), Ordering::SeqCst);
    assert_eq!(old.words[0].load(Ordering::SeqCst), word(1, 1), "the old word still says the same");
    for _ in 0..10 {
        match reader.read(&object, Duration::from_millis(200)) {
            Err(Error::TimedOut { .. } | Error::Stale { .. }) => {}
            other => panic!("a read after the publish: {:?}", other.map(|bytes| bytes[0])),
        }
    }
    // The client finds the successor.
    reader.session(&new);
    reader.rail(devices, &successor);
    let result = loop {
        match reader.read(&object, Duration::from_secs(5)) {
            Err(Error::TimedOut { .. }) => {}
            other => break other,
        }
    };
    assert!(matches!(result, Err(Error::Stale { version: 2000, .. })), "{result:?}");
    reader.driver.close();
    listener.stop();
    successor.stop();
    drop((listener, successor));
    assert_eq!(railfs_engine::verbs::leaked(), 0, "the device kept something");
}
