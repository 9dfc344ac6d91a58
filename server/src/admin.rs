//! What the server says of itself: `Status`.

use crate::control::addresses::Announced;
use crate::health::{Condition, State};
use crate::listeners::Listener;
use crate::node::{SOFTWARE, lock};
use crate::put::recover;
use crate::serve::Server;
use railfs_proto::reply::ok_outcome;
use railfs_proto::v1;
use std::sync::Arc;
use std::time::Instant;

/// Sees the listeners and knows when the server started.
#[derive(Debug)]
pub struct Admin {
    started: Instant,
    announced: Announced,
    listeners: Vec<Option<Listener>>,
}

impl Admin {
    /// `listeners` in the order of the configuration; none where an RDMA device could not be had.
    pub fn new(announced: Announced, listeners: Vec<Option<Listener>>) -> Admin {
        Admin { started: Instant::now(), announced, listeners }
    }

    /// The server's account of itself.
    pub async fn status(&self, server: &Arc<Server>) -> v1::StatusReply {
        let node = &server.node;
        let counting = Arc::clone(node);
        // Disks may be slow to answer, and this may be asked often.
        let directories = tokio::task::spawn_blocking(move || directories(&counting)).await.unwrap_or_default();
        let mut degraded = self.announced.absent();
        degraded.extend(node.publisher.catalog().degraded());
        let counts = node.publisher.catalog().counts().await.unwrap_or_default();
        let there = self.listeners.iter().flatten();
        let listeners = self.announced.listeners(None).into_iter().zip(there).map(|(listener, rail)| {
            let counts = rail.counts();
            v1::ListenerStatus {
                listener: Some(listener),
                connections: u32::try_from(counts.connections).unwrap_or(u32::MAX),
                bytes_sent: counts.sent,
                bytes_received: counts.received,
            }
        });
        let rails: Vec<_> = self.listeners.iter().flatten().map(Listener::counts).collect();
        let memory = server.puts.memory();
        let mut counters = node.counters.list();
        counters.push(("superseded_versions", counts.superseded));
        counters.push(("namespaces", counts.namespaces));
        counters.push(("rdma_registered_bytes", rails.iter().map(|rail| rail.registered).sum()));
        counters.push(("rdma_registered_bytes_now", rails.iter().map(|rail| rail.registered_used).sum()));
        counters.push(("rdma_waits", rails.iter().map(|rail| rail.waited).sum()));
        counters.extend(railfs_engine::rail::rdma_counters());
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

fn directories(node: &crate::node::Node) -> Vec<v1::DirectoryStatus> {
    let status = |state: State| {
        // Of one that is not in its place there is nothing to be had.
        let here = node.store.directory(state.id).filter(|_| state.condition != Condition::Missing);
        let space = here.and_then(|directory| directory.space().ok());
        let bytes = |blocks: fn(&rustix::fs::StatVfs) -> u64| {
            space.as_ref().map_or(0, |stat| blocks(stat).saturating_mul(stat.f_frsize))
        };
        let lost = here.map(recover::lost).unwrap_or_default();
        v1::DirectoryStatus {
            id: state.id.to_bytes(),
            path: state.path,
            state: state.condition.name().to_owned(),
            total_bytes: bytes(|stat| stat.f_blocks),
            available_bytes: bytes(|stat| stat.f_bavail),
            holds_log: state.holds_log,
            reason: state.why,
            filesystem: here
                .and_then(|directory| rustix::fs::stat(directory.path()).ok())
                .map_or(0, |stat| stat.st_dev),
            lost_files: u32::try_from(lost.files).unwrap_or(u32::MAX),
            lost_bytes: lost.bytes,
        }
    };
    node.health.all().map(status).collect()
}
