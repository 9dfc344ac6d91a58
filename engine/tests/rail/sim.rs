//! The simulated world.

use super::{Bell, Log, Server, Setup, World};
use bytes::Bytes;
use railfs_engine::clock::Time;
use railfs_engine::memory::Arena;
use railfs_engine::rail::sim::{Forged, Side, Sim, SimConfig, SimLink};
use railfs_engine::rail::{Handler, Incoming, Lane, Rail, Replier, State};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub struct SimWorld {
    sim: Sim,
    link: SimLink,
    arena: Arena,
    log: Arc<Log>,
    server_log: Arc<Log>,
    server: Arc<Server>,
    puller: Arc<Server>,
    by_hand: Option<Arc<Keeper>>,
    /// Bulk that was sent in pieces, by id.
    pieces: Mutex<HashMap<u64, u32>>,
    pings: AtomicU64,
}

/// Keeps every request for the test to answer.
#[derive(Default)]
struct Keeper(Mutex<Vec<Box<dyn Replier>>>);

impl Handler for Keeper {
    fn request(&self, incoming: Incoming) {
        self.0.lock().unwrap().push(incoming.replier);
    }
}

pub fn world(setup: Setup) -> Box<dyn World> {
    let bell = Arc::<Bell>::default();
    let sim = Sim::new(1);
    let (log, server_log) = (Log::new(bell.clone()), Log::new(bell.clone()));
    let (server, puller) = (Server::new(bell.clone()), Server::new(bell));
    let by_hand = setup.by_hand.then(Arc::<Keeper>::default);
    let handler: Arc<dyn Handler> = match &by_hand {
        Some(keeper) => keeper.clone(),
        None => server.clone(),
    };
    let config = SimConfig { limits: setup.limits, ..SimConfig::default() };
    let link = sim.link(config, (log.clone(), puller.clone()), (server_log.clone(), handler));
    let arena = Arena::new(64 << 20).unwrap();
    let pieces = Mutex::default();
    Box::new(SimWorld { sim, link, arena, log, server_log, server, puller, by_hand, pieces, pings: AtomicU64::new(0) })
}

impl World for SimWorld {
    fn client(&self) -> Arc<dyn Rail> {
        self.link.client.clone()
    }
    fn server(&self, _lane: Lane) -> Option<Arc<dyn Rail>> {
        (self.link.server.state() == State::Up).then(|| self.link.server.clone() as Arc<dyn Rail>)
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
        self.sim.now()
    }
    fn until(&self, what: &str, done: &mut dyn FnMut() -> bool) {
        let limit = self.sim.now().after(Duration::from_secs(60));
        assert!(self.sim.run_until(limit, done), "never: {what}");
    }
    fn kill(&self) {
        self.link.kill("killed");
    }
    fn mute(&self, mute: bool) {
        if mute { self.link.cut() } else { self.link.heal() }
    }
    fn requests(&self) -> Vec<(Lane, u64)> {
        self.sim
            .trace()
            .iter()
            .filter_map(|line| line.split_once("Server gets request ")?.1.parse().ok())
            .map(|id| (Lane::Bulk, id))
            .collect()
    }
    fn piece(&self, id: u64, offset: u32, total: u32, bytes: &[u8]) {
        self.pieces.lock().unwrap().insert(id, total);
        let bytes = Bytes::copy_from_slice(bytes);
        self.link.forge(Side::Client, Lane::Bulk, Forged::Piece { id, offset, bytes });
    }
    fn finish(&self, id: u64, message: &[u8]) {
        let bulk = self.pieces.lock().unwrap().remove(&id).unwrap_or(0);
        let message = Bytes::copy_from_slice(message);
        self.link.forge(Side::Client, Lane::Bulk, Forged::Reply { id, bulk, message, current: true });
    }
    fn whole(&self, lane: Lane, id: u64, bulk: &[u8], message: &[u8], ours: bool) {
        if ours && !bulk.is_empty() {
            let bytes = Bytes::copy_from_slice(bulk);
            self.link.forge(Side::Client, lane, Forged::Piece { id, offset: 0, bytes });
        }
        let bulk = u32::try_from(bulk.len()).unwrap();
        let message = Bytes::copy_from_slice(message);
        self.link.forge(Side::Client, lane, Forged::Reply { id, bulk, message, current: ours });
    }
    fn pings(&self) -> u64 {
        if self.by_hand.is_none() {
            return u64::MAX;
        }
        let seen = self.sim.trace().iter().filter(|line| line.contains("Client") && line.ends_with("Ping")).count();
        self.pings.store(seen as u64, Ordering::SeqCst);
        seen as u64
    }
}
