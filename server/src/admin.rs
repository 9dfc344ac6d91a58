//! What the server says of itself: `Status`.

use crate::control::addresses::Announced;
use crate::health::{Condition, State};
use crate::listeners::{Listener, Memory};
use crate::node::{Node, SOFTWARE, lock};
use crate::put::recover;
use crate::serve::Server;
use crate::share::{HANGING, Seen};
use railfs_engine::rail::slab::SlabCounters;
use railfs_proto::descriptor::Id;
use railfs_proto::reply::ok_outcome;
use railfs_proto::v1;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Sees the listeners and knows when the server started.
#[derive(Debug)]
pub struct Admin {
    started: Instant,
    announced: Announced,
    listeners: Vec<Option<Listener>>,
    memory: Option<Memory>,
}

impl Admin {
    /// `listeners` in the order of the configuration; none where an RDMA device could not be had.
    pub fn new(announced: Announced, listeners: Vec<Option<Listener>>, memory: Option<Memory>) -> Admin {
        Admin { started: Instant::now(), announced, listeners, memory }
    }

    /// The server's account of itself.
    pub async fn status(&self, server: &Arc<Server>) -> v1::StatusReply {
        let node = &server.node;
        let directories = directories(node).await;
        let mut degraded = self.announced.absent();
        degraded.extend(node.publisher.catalog().degraded());
        degraded.extend(lock(&node.reload_trouble).iter().cloned());
        let counts = node.publisher.catalog().counts().await.unwrap_or_default();
        degraded.extend(self.listeners.iter().flatten().filter_map(Listener::trouble));
        let listeners = self.announced.listeners(None).into_iter().filter_map(|listener| {
            // Ids are places: some are not there, and some are not announced.
            let place = usize::try_from(listener.id).ok()?;
            let counts = self.listeners.get(place)?.as_ref()?.counts();
            Some(v1::ListenerStatus {
                listener: Some(listener),
                connections: u32::try_from(counts.connections).unwrap_or(u32::MAX),
                bytes_sent: counts.sent,
                bytes_received: counts.received,
            })
        });
        let rails: Vec<_> = self.listeners.iter().flatten().map(Listener::counts).collect();
        let memory = server.puts.memory();
        let mut counters = node.counters.list();
        counters.push(("superseded_versions", counts.superseded));
        counters.push(("namespaces", counts.namespaces));
        counters.push(("rdma_registered_bytes", rails.iter().map(|rail| rail.registered).sum()));
        let reopened = self.listeners.iter().flatten().map(Listener::reopened).sum();
        counters.push(("rdma_listeners_reopened", reopened));
        counters.extend(railfs_engine::rail::rdma_counters());
        counters.push(("rdma_read_bytes", rails.iter().map(|rail| rail.read).sum()));
        let slabs = self.memory.iter().map(|memory| memory.slab.counters());
        let slabs: Vec<_> = slabs.chain(rails.iter().filter_map(|rail| rail.own)).collect();
        counters.extend(slab_counters(&slabs));
        degraded.extend(slabs_degraded(&slabs, self.memory.is_some()));
        counters.push(("slab_refused", rails.iter().filter(|rail| rail.own.is_some()).count() as u64));
        counters.push(("open_files", server.files.len() as u64));
        let pins = server.pins.counts();
        counters.push(("pins", pins.pins));
        counters.push(("pin_leases", pins.leases));
        counters.push(("pins_refused", pins.refused));
        counters.push(("pins_lapsed", pins.lapsed));
        counters.push(("watchers", node.watchers.load(std::sync::atomic::Ordering::Relaxed)));
        v1::StatusReply {
            outcome: Some(ok_outcome()),
            store: node.store.id().to_bytes(),
            node: node.name.clone(),
            incarnation: node.incarnation,
            software: SOFTWARE.to_owned(),
            uptime_seconds: self.started.elapsed().as_secs(),
            directories,
            listeners: listeners.collect(),
            memory_limit_bytes: memory.total,
            memory_used_bytes: memory.total.saturating_sub(memory.free),
            sessions: u32::try_from(lock(&node.sessions).len()).unwrap_or(u32::MAX),
            puts: u32::try_from(server.puts.len()).unwrap_or(u32::MAX),
            degraded,
            publishing: node.publisher.frozen().unwrap_or_else(|| "ok".to_owned()),
            objects: counts.objects,
            log_sequence: counts.sequence,
            counters: counters.into_iter().map(|(name, value)| v1::Counter { name: name.to_owned(), value }).collect(),
        }
    }
}

/// What of slabs is not as it should be: the first is the one that rails share, the others are their own.
fn slabs_degraded(slabs: &[SlabCounters], shared: bool) -> Vec<String> {
    let mut lines = Vec::new();
    let own = slabs.len().saturating_sub(shared.into());
    if own > 0 {
        lines.push(format!("the devices of {own} RDMA rails refused the slab: each has a small one of its own"));
    }
    if slabs.iter().any(|slab| !slab.io_uring) {
        lines.push("the kernel refuses io_uring: threads read object bytes into the slab".to_owned());
    }
    lines
}

/// Of all slabs: the one that rails share, and their own where a device refused that.
pub fn slab_counters(slabs: &[SlabCounters]) -> Vec<(&'static str, u64)> {
    let sum = |of: fn(&SlabCounters) -> u64| slabs.iter().map(of).sum();
    vec![
        ("slab_bytes", sum(|slab| slab.bytes)),
        ("slab_bytes_now", sum(|slab| slab.held)),
        ("slab_hits", sum(|slab| slab.hits)),
        ("slab_misses", sum(|slab| slab.misses)),
        ("slab_joins", sum(|slab| slab.joins)),
        ("slab_evicted", sum(|slab| slab.evicted)),
        ("slab_waits", sum(|slab| slab.waited)),
        ("slab_reads_direct", sum(|slab| slab.direct)),
        ("slab_reads_buffered", sum(|slab| slab.buffered)),
        ("slab_io_uring", sum(|slab| slab.io_uring.into())),
    ]
}

/// Longest that status waits for all directories together: of one that takes longer it tells what it found last.
const COUNT: Duration = Duration::from_secs(1);

async fn directories(node: &Arc<Node>) -> Vec<v1::DirectoryStatus> {
    let states: Vec<State> = node.health.all().collect();
    let mut counting = tokio::task::JoinSet::new();
    for state in &states {
        // Of one that is not in its place there is nothing to be had.
        let share = node.shares.of(state.id).filter(|_| state.condition != Condition::Missing);
        let Some(share) = share.cloned() else { continue };
        let (id, node) = (state.id, Arc::clone(node));
        counting.spawn(async move { (id, share.seen(COUNT, move || count(&node, id)).await) });
    }
    let mut seen: HashMap<Id, Seen> = counting.join_all().await.into_iter().collect();
    let status = |state: State| {
        let Seen { total, available, filesystem, lost } = seen.remove(&state.id).unwrap_or_default();
        let hangs = node.shares.silent(state.id).filter(|_| state.condition != Condition::Missing);
        let (name, reason) = match hangs {
            Some(why) if state.why.is_empty() => (HANGING, why),
            Some(why) => (HANGING, format!("{why} (before: {})", state.why)),
            None => (state.condition.name(), state.why),
        };
        v1::DirectoryStatus {
            id: state.id.to_bytes(),
            path: state.path,
            state: name.to_owned(),
            total_bytes: total,
            available_bytes: available,
            holds_log: state.holds_log,
            reason,
            filesystem,
            lost_files: u32::try_from(lost.files).unwrap_or(u32::MAX),
            lost_bytes: lost.bytes,
        }
    };
    states.into_iter().map(status).collect()
}

/// Asks the directory's file system: waits for it.
fn count(node: &Node, id: Id) -> Seen {
    let Some(directory) = node.store.directory(id) else { return Seen::default() };
    let space = directory.space().ok();
    let bytes = |blocks: fn(&rustix::fs::StatVfs) -> u64| {
        space.as_ref().map_or(0, |stat| blocks(stat).saturating_mul(stat.f_frsize))
    };
    Seen {
        total: bytes(|stat| stat.f_blocks),
        available: bytes(|stat| stat.f_bavail),
        filesystem: rustix::fs::stat(directory.path()).map_or(0, |stat| stat.st_dev),
        lost: recover::lost(directory),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i11_a_refused_slab_and_a_refused_io_uring_are_degraded() {
        let (good, threads) = (SlabCounters { io_uring: true, ..Default::default() }, SlabCounters::default());
        assert!(slabs_degraded(&[good], true).is_empty() && slabs_degraded(&[], false).is_empty());
        assert!(slabs_degraded(&[good, good], true)[0].contains("1 RDMA rails refused"));
        assert!(slabs_degraded(&[threads], true)[0].contains("io_uring"));
    }
}
