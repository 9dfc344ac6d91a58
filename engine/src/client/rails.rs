//! The rails of a client: taken into use with a session, kept where their listeners are as before, looked for again.
//!
//! Guarantees: what is registered with devices is planned first, and then registered with all of them or none; what goes is
//! given back before more is taken; what cannot be had is said once.

use super::{Client, Rdma, lock, reach};
use crate::control::Session;
use crate::memory::plan::Memlock;
use crate::rail::tcp::{Limits, RailConfig, TcpRail};
use crate::read::core;
use railfs_proto::hello::{Listener, Transport};
use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

#[cfg(feature = "rdma")]
use crate::rail::verbs::Opened;

/// Without RDMA there is none.
#[cfg(not(feature = "rdma"))]
enum Opened {}
/// Devices that are open, by what they are for.
type OpenedWays = std::result::Result<Vec<(reach::Way, Opened)>, String>;

/// A rail in use: what the server said of its listener, and its number.
#[derive(Clone, Debug)]
pub(super) struct RailEntry {
    pub(super) listener: Listener,
    pub(super) way: reach::Way,
    pub(super) number: usize,
}

impl RailEntry {
    /// What a listener can do beside may change without its being another one.
    fn leads_to(&self, listener: &Listener) -> bool {
        let identity = |of: &Listener| (of.id, of.fabric.clone(), of.transport.clone());
        identity(&self.listener) == identity(listener)
    }
    fn is(&self, listener: &Listener, way: &reach::Way) -> bool {
        self.leads_to(listener) && self.way == *way
    }
}

/// Devices are looked for again after so long where one is lacking; then after twice as long, and so on,
const LOOK_AGAIN: Duration = Duration::from_secs(15);
/// up to this.
const LOOK_AT_LEAST: Duration = Duration::from_secs(300);

pub(super) async fn look_now_and_then(client: Weak<Client>) {
    let mut wait = LOOK_AGAIN;
    loop {
        tokio::time::sleep(wait).await;
        let Some(client) = client.upgrade() else { return };
        if !client.lacks_device.load(Ordering::SeqCst) {
            wait = LOOK_AGAIN;
            continue;
        }
        wait = (wait * 2).min(LOOK_AT_LEAST);
        // Opening devices and registering memory takes its time.
        let looked = tokio::task::spawn_blocking(move || client.look_again()).await;
        if let Err(error) = looked {
            tracing::error!(%error, "devices could not be looked for");
        }
    }
}

/// A listener that is announced as before, and that a rail leads to, keeps its way where none is found now: a port that is
/// down for a moment comes back, and the rail with it. `by_hand`: what is named by hand needs no announcement.
fn keep_ways(ways: &mut Vec<(Listener, reach::Way)>, rails: &[RailEntry], announced: &[Listener], by_hand: bool) {
    for rail in rails.iter().filter(|rail| rail.way.is_rdma()) {
        let there = ways.iter().any(|(listener, way)| rail.leads_to(listener) && way.is_rdma());
        if !there && (by_hand || announced.iter().any(|listener| rail.leads_to(listener))) {
            ways.retain(|(listener, way)| way.is_rdma() || listener.fabric != rail.listener.fabric);
            ways.push((rail.listener.clone(), rail.way.clone()));
        }
    }
    ways.truncate(railfs_proto::limits::MAX_RAILS);
}

impl Client {
    /// A new session: rails to listeners that are as before stay (they join again by themselves), others go and come.
    pub(super) fn on_session(&self, session: &Session) {
        let mut rails = lock(&self.rails);
        // A later session may have come while this one waited for the lock.
        if self.control.session().is_some_and(|now| !now.is_same(session)) {
            return;
        }
        self.driver.session(core::Session {
            scope: session.scope(),
            max_fetch: session.max_fetch_bytes,
            pins: session.pins,
            lease: session.lease,
        });
        self.take_rails(session, &mut rails);
    }

    /// Looks for devices again where a listener has none: a port that was down may be up. Not on the runtime.
    fn look_again(&self) {
        let mut rails = lock(&self.rails);
        if let Some(session) = self.control.session().filter(|_| self.lacks_device.load(Ordering::SeqCst)) {
            self.take_rails(&session, &mut rails);
        }
    }

    fn take_rails(&self, session: &Session, rails: &mut Vec<RailEntry>) {
        let (rdma, by_hand) = (self.config.rdma, &self.config.rails);
        let mut reached = reach::reach(&session.listeners, rdma, by_hand, &reach::find);
        if rdma != Rdma::Off {
            keep_ways(&mut reached.ways, rails, &session.listeners, !by_hand.is_empty());
        }
        let mut shortage = None;
        let mut opened = Vec::new();
        let all = match reach::plan(&reached.ways, self.arena.stats().total, Memlock::now()) {
            None => Ok(()),
            Some(Ok(plan)) => {
                if *lock(&self.planned) != plan {
                    tracing::info!("{plan}");
                    *lock(&self.planned) = plan;
                }
                // What goes is given back before more is taken.
                self.remove_gone(rails, &reached.ways);
                self.open_all(&reached.ways, rails).map(|all| opened = all)
            }
            Some(Err(short)) => Err(shortage.insert(short).to_string()),
        };
        if let Err(why) = all {
            // Nothing is registered by halves: what is new is had with all its devices or with none. What was there stays.
            let there = |remote: &IpAddr| {
                let way = rails.iter().find_map(|rail| match &rail.way {
                    reach::Way::Verbs { remote: of, device, local } if of == remote => Some((device.clone(), *local)),
                    _ => None,
                });
                way.ok_or_else(|| why.clone())
            };
            let kept = |wanted: &[(&str, IpAddr)], _: Option<&str>| reach::Found {
                ways: wanted.iter().map(|(_, remote)| there(remote)).collect(),
                skipped: Vec::new(),
            };
            let skipped = std::mem::take(&mut reached.skipped);
            reached = reach::reach(&session.listeners, rdma, by_hand, &kept);
            // A device that was named with its address is not looked for.
            reached.ways.retain(|(listener, way)| !way.is_rdma() || rails.iter().any(|rail| rail.is(listener, way)));
            if !reached.reasons.iter().any(|reason| reason.ends_with(&why)) {
                reached.reasons.push(why);
            }
            reached.skipped = skipped;
        }
        *lock(&self.shortage) = shortage;
        self.say_once(&reached);
        let wanted = |listener: &&Listener| matches!(listener.transport, Transport::Rdma(_)) && rdma != Rdma::Off;
        let lacks = |listener: &Listener| {
            !reached.ways.iter().any(|(of, way)| way.is_rdma() && of.transport == listener.transport)
        };
        self.lacks_device.store(session.listeners.iter().filter(wanted).any(lacks), Ordering::SeqCst);
        self.remove_gone(rails, &reached.ways);
        for (listener, way) in reached.ways {
            if rails.iter().any(|rail| rail.is(&listener, &way)) {
                continue;
            }
            let name = format!("{} {}", listener.fabric, way.address());
            let mut seed = [0u8; 8];
            // It only spreads reconnects: where there is no random number 0 will do.
            let _ = getrandom::fill(&mut seed);
            let seed = u64::from_le_bytes(seed);
            let place = opened.iter().position(|(of, _)| *of == way);
            let ready = place.map(|place| opened.swap_remove(place).1);
            let start = |events| self.start_rail(&name, listener.id, &way, seed, ready, events);
            match self.driver.add_rail(&name, start) {
                Ok(number) => rails.push(RailEntry { listener, way, number }),
                Err(error) => tracing::error!(rail = name, %error, "the rail's threads cannot be started"),
            }
        }
    }

    fn remove_gone(&self, rails: &mut Vec<RailEntry>, ways: &[(Listener, reach::Way)]) {
        rails.retain(|rail| {
            let stays = ways.iter().any(|(listener, way)| rail.is(listener, way));
            if !stays {
                self.driver.remove_rail(rail.number);
            }
            stays
        });
    }

    /// Opens the devices of new RDMA rails and registers the arena with each: all of them, or none.
    #[cfg(feature = "rdma")]
    fn open_all(&self, ways: &[(Listener, reach::Way)], rails: &[RailEntry]) -> OpenedWays {
        let new =
            ways.iter().filter(|(listener, way)| way.is_rdma() && !rails.iter().any(|rail| rail.is(listener, way)));
        crate::memory::plan::all_or_nothing(new, |(_, way)| match way {
            reach::Way::Verbs { device, local, .. } => {
                let opened = Opened::open(device, *local, &self.arena, self.config.opening)?;
                Ok((way.clone(), opened))
            }
            reach::Way::Tcp { .. } => Err("not a device".to_owned()),
        })
    }

    /// Without RDMA there is none.
    #[cfg(not(feature = "rdma"))]
    #[allow(clippy::unused_self)]
    fn open_all(&self, _: &[(Listener, reach::Way)], _: &[RailEntry]) -> OpenedWays {
        Ok(Vec::new())
    }

    fn start_rail(
        &self,
        name: &str,
        listener: u32,
        way: &reach::Way,
        seed: u64,
        ready: Option<Opened>,
        events: Arc<dyn crate::rail::Events>,
    ) -> std::io::Result<Arc<dyn crate::rail::Rail>> {
        let limits = Limits { completion: self.config.cq_wait, ..Limits::default() };
        let name = name.to_owned();
        match way {
            reach::Way::Tcp { remote, local } => {
                let config = RailConfig { name, remote: *remote, local: *local, listener, limits, seed };
                TcpRail::start(config, self.clock, self.control.clone(), self.puts.clone(), events)
                    .map(|rail| rail as Arc<dyn crate::rail::Rail>)
            }
            #[cfg(feature = "rdma")]
            reach::Way::Verbs { remote, device, local } => {
                use crate::rail::verbs::{BULK_PAIRS, VerbsRail, VerbsRailConfig};
                let config = VerbsRailConfig {
                    name,
                    device: device.clone(),
                    address: *local,
                    remote: remote.to_string(),
                    listener,
                    bulk_pairs: BULK_PAIRS,
                    opening: self.config.opening,
                    limits,
                    seed,
                };
                let (arena, join) = (self.arena.clone(), self.control.clone());
                VerbsRail::start_with(config, self.clock, arena, join, self.puts.clone(), events, ready)
                    .map(|rail| rail as Arc<dyn crate::rail::Rail>)
            }
            #[cfg(not(feature = "rdma"))]
            reach::Way::Verbs { .. } => Err(std::io::ErrorKind::Unsupported.into()),
        }
    }

    /// What cannot be had is logged once, however often the server is asked again.
    fn say_once(&self, reached: &reach::Reached) {
        let skipped = std::mem::replace(&mut *lock(&self.skipped), reached.skipped.clone());
        for port in reached.skipped.iter().filter(|port| !skipped.contains(port)) {
            tracing::warn!("{port}: it is not used");
        }
        let said = std::mem::replace(&mut *lock(&self.unreached), reached.reasons.clone());
        if said == reached.reasons {
            return;
        }
        let tcp = reached.ways.iter().any(|(_, way)| !way.is_rdma());
        let instead = if tcp { "reads go over TCP there" } else { "there is no other rail there" };
        for reason in &reached.reasons {
            tracing::warn!(reason, "a rail is not used: {instead}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reach::Way;

    #[test]
    fn i10_a_rail_whose_port_is_down_for_a_moment_stays() {
        let of =
            |id, transport| Listener { id, fabric: "a".into(), transport, speed_mbps: 0, capabilities: Vec::new() };
        let remote: IpAddr = "10.9.0.1".parse().unwrap();
        let (tcp, rdma) = (of(0, Transport::Tcp((remote, 7421).into())), of(1, Transport::Rdma(remote)));
        let way = Way::Verbs { remote, device: "rxe0c".into(), local: "10.9.0.2".parse().unwrap() };
        let over_tcp = (tcp.clone(), Way::Tcp { remote: (remote, 7421).into(), local: None });
        let rails = [RailEntry { listener: rdma.clone(), way: way.clone(), number: 0 }];
        // No device was found just now: the rail stays, and its fabric is not read over TCP beside it.
        let faster = Listener { speed_mbps: 100_000, ..rdma.clone() };
        let mut ways = vec![over_tcp.clone()];
        keep_ways(&mut ways, &rails, &[tcp.clone(), faster], false);
        assert_eq!(ways, [(rdma.clone(), way.clone())]);
        // The server does not have it any more.
        let mut ways = vec![over_tcp.clone()];
        keep_ways(&mut ways, &rails, std::slice::from_ref(&tcp), false);
        assert_eq!(ways, std::slice::from_ref(&over_tcp));
        // What is named by hand needs nobody to announce it.
        let mut ways = Vec::new();
        keep_ways(&mut ways, &rails, &[], true);
        assert_eq!(ways, [(rdma, way)]);
    }
}
