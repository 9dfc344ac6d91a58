//! What `railfs status` shows: one document, from a mount's control socket or made by the command itself.
//!
//! Guarantees: the field names are a public contract (docs/metrics.md); fields are only ever added.

use crate::ops::Activity;
use railfs_engine::client::{RailStatus, Status};
use railfs_engine::error::Error;
use railfs_proto::descriptor::Id;
use railfs_proto::v1::StatusReply;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Document {
    /// Store id, hexadecimal.
    pub store: String,
    /// The server's node name.
    pub node: String,
    /// The server's run.
    pub incarnation: u64,
    /// Control address in use; empty: none.
    pub control: String,
    /// Rails to the server.
    pub rails: Vec<Rail>,
    /// Transfer memory.
    pub arena: Arena,
    /// Bytes in the cache.
    pub cached_bytes: u64,
    /// Reads that wait for memory, and readahead.
    pub admission: Admission,
    /// By name.
    pub counters: BTreeMap<String, u64>,
    /// The server's stripe directories; empty when it did not answer.
    pub directories: Vec<Directory>,
    /// What else the server says of itself; null when it did not answer.
    pub server: Option<Server>,
    /// Why it did not answer.
    pub server_error: Option<String>,
    /// The mount; null when a URL was asked for.
    pub mount: Option<Mount>,
}

/// One rail.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rail {
    /// "fabric address".
    pub name: String,
    /// The listener's address.
    pub address: String,
    /// Its fabric.
    pub fabric: String,
    /// "tcp".
    pub transport: String,
    /// "connecting", "up", "suspect", "probing" or "down".
    pub state: String,
    /// Why it is not up.
    pub reason: String,
    /// Object bytes.
    pub bytes_received: u64,
    /// Object bytes.
    pub bytes_sent: u64,
    /// Requests.
    pub in_flight: u64,
    /// Of memory that others may still write to.
    pub held_bytes: u64,
    /// Times it came up.
    pub connects: u64,
    /// Signs of life asked for.
    pub pings: u64,
    /// Requests.
    pub failed: u64,
    /// Measured, bytes per second; 0: not yet.
    pub bandwidth: u64,
    /// Pages that failed their check.
    pub bad_pages: u64,
}

/// Bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Arena {
    /// All.
    pub total: u64,
    /// In no extent.
    pub free: u64,
    /// Others may still write to them.
    pub exposed: u64,
    /// Lost their fence.
    pub quarantined: u64,
}

/// Reads that wait for memory, and what readahead holds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Admission {
    /// Reads of at most 64 KiB, now.
    pub waiting_small: u64,
    /// Larger ones, now.
    pub waiting_large: u64,
    /// Bytes of both, now.
    pub waiting_bytes: u64,
    /// Reads of at most 64 KiB that got memory after waiting.
    pub admitted_small: u64,
    /// Larger ones.
    pub admitted_large: u64,
    /// Bytes of both.
    pub admitted_bytes: u64,
    /// Reads refused because too many waited.
    pub refused: u64,
    /// The longest that one has waited.
    pub longest_wait_microseconds: u64,
    /// Memory of fetches ahead of reads that are in flight.
    pub ahead_in_flight_bytes: u64,
    /// Memory of what was fetched ahead and is wanted, and not read yet.
    pub ahead_unread_bytes: u64,
    /// Memory of what was fetched ahead and dropped unread, since the start.
    pub ahead_wasted_bytes: u64,
}

/// One stripe directory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Directory {
    /// Hexadecimal.
    pub id: String,
    /// On the server.
    pub path: String,
    /// "ok", "hanging", "suspect", "read-only" or "missing".
    pub state: String,
    /// Why it is not "ok".
    pub reason: String,
    /// Bytes.
    pub total_bytes: u64,
    /// Bytes.
    pub available_bytes: u64,
    /// Keeps the log.
    pub holds_log: bool,
    /// Directories with the same number share one file system; 0: the server does not say.
    pub filesystem: u64,
    /// Whole components that no record names.
    pub lost_files: u32,
    /// Their bytes: the first to go when a put needs room.
    pub lost_bytes: u64,
}

/// The server's own account.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Server {
    /// Name and version.
    pub software: String,
    /// Since it started.
    pub uptime_seconds: u64,
    /// Budget, bytes.
    pub memory_limit_bytes: u64,
    /// Bytes.
    pub memory_used_bytes: u64,
    /// Clients.
    pub sessions: u32,
    /// Under way.
    pub puts: u32,
    /// "ok", or why it is frozen.
    pub publishing: String,
    /// What it has to do without, one line each.
    pub degraded: Vec<String>,
    /// Objects in the store.
    pub objects: u64,
    /// By name.
    pub counters: BTreeMap<String, u64>,
}

/// The mount that was asked.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Mount {
    /// What is mounted.
    pub url: String,
    /// Where.
    pub mountpoint: String,
    /// The daemon.
    pub pid: u32,
    /// Since it was mounted.
    pub uptime_seconds: u64,
    /// Where its log goes; empty: standard error.
    pub log: String,
    /// "strict" or "snapshot".
    pub mode: String,
    /// "direct" or "cached".
    pub io: String,
    /// Why this form of reads.
    pub io_reason: String,
    /// Open now.
    pub open_files: u64,
    /// Open now.
    pub open_directories: u64,
    /// Requests of the kernel that are not answered yet.
    pub in_flight: u64,
    /// Known to the kernel.
    pub inodes: u64,
    /// Versions that are pinned because the kernel's page cache was filled from them.
    pub filled_versions: u64,
    /// What this mount has to do without, one line each.
    pub degraded: Vec<String>,
}

impl Document {
    /// From what both sides say.
    pub fn new(status: Status, server: &Result<StatusReply, Error>) -> Document {
        let admission = Admission::new(&status);
        let mut document = Document {
            store: status.store,
            node: status.node,
            incarnation: status.incarnation,
            control: status.control,
            rails: status.rails.into_iter().map(Rail::from).collect(),
            arena: Arena {
                total: status.arena.total,
                free: status.arena.free,
                exposed: status.arena.exposed,
                quarantined: status.arena.quarantined,
            },
            cached_bytes: status.cached_bytes,
            admission,
            counters: status.counters.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
            ..Document::default()
        };
        match server {
            Ok(reply) => {
                document.directories = reply.directories.iter().map(Directory::from).collect();
                document.server = Some(Server::from(reply));
            }
            Err(error) => document.server_error = Some(error.to_string()),
        }
        document
    }
}

impl Document {
    /// What a mount has to do without on the server's side, one line each.
    pub fn degraded(&self) -> Vec<String> {
        let rails = self.rails.iter().filter(|rail| rail.state != "up");
        let rails = rails.map(|rail| format!("rail {} is {}: {}", rail.name, rail.state, rail.reason));
        let directories = self.directories.iter().filter(|directory| directory.state != "ok").map(|directory| {
            let Directory { path, id, state, reason, .. } = directory;
            format!("stripe directory {path} ({id}) of the server is {state}: {reason}")
        });
        let publishing = self.server.iter().map(|server| &server.publishing).filter(|publishing| *publishing != "ok");
        rails.chain(directories).chain(publishing.map(|why| format!("the server takes no puts: {why}"))).collect()
    }
}

impl Admission {
    fn new(status: &Status) -> Admission {
        let account = &status.admission;
        let [in_flight, unread, wasted] = status.ahead;
        Admission {
            waiting_small: account.waiting_small,
            waiting_large: account.waiting_large,
            waiting_bytes: account.waiting_bytes,
            admitted_small: account.served_small,
            admitted_large: account.served_large,
            admitted_bytes: account.served_bytes,
            refused: account.refused,
            longest_wait_microseconds: u64::try_from(account.longest_wait.as_micros()).unwrap_or(u64::MAX),
            ahead_in_flight_bytes: in_flight,
            ahead_unread_bytes: unread,
            ahead_wasted_bytes: wasted,
        }
    }
}

impl Mount {
    /// With what is open and under way.
    pub fn with(mut self, activity: Activity) -> Mount {
        self.open_files = activity.open_files;
        self.open_directories = activity.open_directories;
        self.in_flight = activity.in_flight;
        self.inodes = activity.inodes;
        self.filled_versions = activity.filled_versions;
        self
    }
}

impl From<RailStatus> for Rail {
    fn from(rail: RailStatus) -> Rail {
        Rail {
            name: rail.name,
            address: rail.address,
            fabric: rail.fabric,
            transport: rail.transport,
            state: rail.state,
            reason: rail.reason,
            bytes_received: rail.counters.bulk_received,
            bytes_sent: rail.counters.bulk_sent,
            in_flight: rail.counters.in_flight,
            held_bytes: rail.counters.held_bytes,
            connects: rail.counters.connects,
            pings: rail.counters.pings,
            failed: rail.counters.failed,
            bandwidth: rail.bandwidth,
            bad_pages: rail.bad_pages,
        }
    }
}

impl From<&railfs_proto::v1::DirectoryStatus> for Directory {
    fn from(directory: &railfs_proto::v1::DirectoryStatus) -> Directory {
        Directory {
            id: Id::from_bytes(&directory.id).map(|id| id.to_string()).unwrap_or_default(),
            path: directory.path.clone(),
            state: directory.state.clone(),
            reason: directory.reason.clone(),
            total_bytes: directory.total_bytes,
            available_bytes: directory.available_bytes,
            holds_log: directory.holds_log,
            filesystem: directory.filesystem,
            lost_files: directory.lost_files,
            lost_bytes: directory.lost_bytes,
        }
    }
}

impl From<&StatusReply> for Server {
    fn from(reply: &StatusReply) -> Server {
        Server {
            software: reply.software.clone(),
            uptime_seconds: reply.uptime_seconds,
            memory_limit_bytes: reply.memory_limit_bytes,
            memory_used_bytes: reply.memory_used_bytes,
            sessions: reply.sessions,
            puts: reply.puts,
            publishing: reply.publishing.clone(),
            degraded: reply.degraded.clone(),
            objects: reply.objects,
            counters: reply.counters.iter().map(|counter| (counter.name.clone(), counter.value)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_degraded_has_a_line_each() {
        let directory = |state: &str| Directory {
            id: "77".to_owned(),
            path: "/d".to_owned(),
            state: state.to_owned(),
            reason: "why".to_owned(),
            ..Directory::default()
        };
        let rail = |state: &str| Rail {
            name: "a 1:2".to_owned(),
            state: state.to_owned(),
            reason: "r".to_owned(),
            ..Rail::default()
        };
        let document = Document {
            rails: vec![rail("up"), rail("down")],
            directories: vec![directory("ok"), directory("missing")],
            server: Some(Server { publishing: "read-only: log".to_owned(), ..Server::default() }),
            ..Document::default()
        };
        let lines = [
            "rail a 1:2 is down: r",
            "stripe directory /d (77) of the server is missing: why",
            "the server takes no puts: read-only: log",
        ];
        assert_eq!(document.degraded(), lines);
        let well = Server { publishing: "ok".to_owned(), ..Server::default() };
        assert_eq!(Document { server: Some(well), ..Document::default() }.degraded(), [""; 0]);
    }

    #[test]
    fn the_names_of_the_contract() {
        let rail = RailStatus {
            name: "a 1:2".to_owned(),
            address: "1:2".to_owned(),
            fabric: "a".to_owned(),
            transport: "tcp".to_owned(),
            state: "up".to_owned(),
            reason: String::new(),
            counters: railfs_engine::rail::Counters { bulk_received: 5, ..Default::default() },
            bandwidth: 6,
            bad_pages: 7,
        };
        let status =
            Status { store: "s".to_owned(), rails: vec![rail], counters: vec![("reads", 3)], ..Default::default() };
        let reply = StatusReply { directories: vec![Default::default()], ..Default::default() };
        let document = Document::new(status.clone(), &Ok(reply));
        let json = serde_json::to_value(&document).unwrap();
        let keys = |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ");
        assert_eq!(
            keys(&json),
            "admission arena cached_bytes control counters directories incarnation mount node rails server server_error store"
        );
        assert_eq!(
            keys(&json["rails"][0]),
            "address bad_pages bandwidth bytes_received bytes_sent connects fabric failed held_bytes in_flight name \
             pings reason state transport"
        );
        assert_eq!(keys(&json["arena"]), "exposed free quarantined total");
        assert_eq!(
            keys(&json["directories"][0]),
            "available_bytes filesystem holds_log id lost_bytes lost_files path reason state total_bytes"
        );
        assert_eq!((&json["rails"][0]["bytes_received"], &json["counters"]["reads"]), (&5.into(), &3.into()));
        let gone = Document::new(status, &Err(Error::Closed));
        assert_eq!((gone.server, gone.server_error.as_deref()), (None, Some("the client is closed")));
        assert_eq!(serde_json::from_value::<Document>(json).unwrap(), document);
    }

    /// The first cells' names of the tables behind a heading of docs/metrics.md, up to the next heading of any level.
    fn documented(heading: &str) -> Vec<String> {
        let page = include_str!("../../docs/metrics.md");
        let part = page.split_once(&format!("\n{heading}\n")).expect("no such heading").1;
        let part = part.split_once("\n#").map_or(part, |(part, _)| part);
        let cells = part.lines().filter(|line| line.starts_with("| `")).filter_map(|line| line.split('|').nth(1));
        let mut names: Vec<String> =
            cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned).collect();
        names.sort();
        names
    }

    #[test]
    fn the_page_of_metrics_lists_every_field_and_no_other() {
        let document = Document {
            rails: vec![Rail::default()],
            directories: vec![Directory::default()],
            server: Some(Server::default()),
            mount: Some(Mount::default()),
            ..Document::default()
        };
        let json = serde_json::to_value(&document).unwrap();
        let keys = |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        let nested = ["arena", "admission"];
        let mut top: Vec<String> = keys(&json).into_iter().filter(|key| !nested.contains(&key.as_str())).collect();
        top.extend(keys(&json["arena"]).iter().map(|key| format!("arena.{key}")));
        top.sort();
        top.push("admission".to_owned());
        top.sort();
        assert_eq!(documented("## Document"), top);
        assert_eq!(documented("### `admission`"), keys(&json["admission"]));
        assert_eq!(documented("### `rails[]`"), keys(&json["rails"][0]));
        assert_eq!(documented("### `directories[]`"), keys(&json["directories"][0]));
        assert_eq!(documented("### `server`"), keys(&json["server"]));
        assert_eq!(documented("### `mount`"), keys(&json["mount"]));

        let counts = railfs_engine::read::core::Counts::default().named();
        let mut counters: Vec<&str> = counts.iter().map(|(name, _)| *name).collect();
        counters.extend(["reads_inline", "reads_now", "fetches_now", "checks_now", "reads_waiting_now"]);
        counters.extend(["committed_bytes_now", "put_bytes_now", "pins_now", "pins_unsaid_now", "pins_lost"]);
        counters.extend(["check_read_nanoseconds", "check_frame_nanoseconds"]);
        counters.extend(railfs_engine::rail::rdma_counters().map(|(name, _)| name));
        counters.sort_unstable();
        assert_eq!(documented("## Counters of a client"), counters);
    }
}
