//! Limits and deadlines, in one table (docs/configuration.md shows it to users).

use std::time::Duration;

/// Smallest page, bytes.
pub const MIN_PAGE: u32 = 4 << 10;
/// Largest page, bytes.
pub const MAX_PAGE: u32 = 256 << 10;
/// Largest stripe, bytes.
pub const MAX_STRIPE: u32 = 64 << 20;
/// Most components of one object.
pub const MAX_WIDTH: u32 = 1024;
/// Most replicas of one component that a descriptor may list.
pub const MAX_REPLICAS: usize = 16;
/// Largest object, bytes: offsets stay inside what `off_t` can say.
pub const MAX_OBJECT: u64 = (1 << 62) - 1;
/// Largest extent, and so the most that one fetch or pull moves, bytes.
pub const MAX_EXTENT: u32 = 1 << 20;
/// Versions at or below this one are never handed out (they would look like small fixed inode numbers).
pub const LAST_UNUSED_VERSION: u64 = 1024;
/// Versions fit 63 bits; bit 63 marks directories' inode numbers.
pub const MAX_VERSION: u64 = (1 << 63) - 1;
/// A list's page, and a message of a watch, is ended where its entries reach this many bytes.
pub const PAGE_BYTES: usize = 1 << 20;
/// Largest message of a server that a client takes on its control connection, bytes: a page, and its last entry with the
/// longest key and the longest descriptor.
pub const MAX_CONTROL_REPLY: usize = PAGE_BYTES + (512 << 10);
/// Largest message of a rail frame, bytes.
pub const MAX_RAIL_MESSAGE: u32 = 64 << 10;
/// Longest key, bytes.
pub const MAX_KEY: usize = 4096;
/// Longest part of a key between slashes, bytes (the kernel's NAME_MAX).
pub const MAX_KEY_PART: usize = 255;
/// Longest namespace, bytes.
pub const MAX_NAMESPACE: usize = 63;
/// Longest name of a node, bytes.
pub const MAX_NODE_NAME: usize = 255;
/// Where the control plane listens by default.
pub const DEFAULT_CONTROL_PORT: u16 = 7420;
/// Most listeners that a hello may list.
pub const MAX_LISTENERS: usize = 256;
/// Most rails that a client has to one server, and so the most that one read uses.
pub const MAX_RAILS: usize = 32;
/// Most control addresses that a hello may list.
pub const MAX_CONTROL_ADDRESSES: usize = 64;
/// Most rail tickets in one hello.
pub const MAX_TICKETS: usize = 256;
/// Shortest and longest rail ticket, bytes.
pub const TICKET_BYTES: std::ops::RangeInclusive<usize> = 16..=64;
/// Most capabilities in one list.
pub const MAX_CAPABILITIES: usize = 64;
/// Longest capability, fabric or transport name, bytes.
pub const MAX_WORD: usize = 63;
/// Longest name of a peer's software that is kept, bytes.
pub const MAX_SOFTWARE: usize = 255;
/// Longest message of a refusal that is kept, bytes.
pub const MAX_REFUSAL: usize = 1024;
/// Most entries in one page of a list.
pub const MAX_LIST: u32 = 4096;
/// Most stripe directories, counters and lines of what is degraded that a status may have.
pub const MAX_STATUS: usize = 4096;
/// Most changes in one message of a watch.
pub const MAX_WATCH: usize = 4096;
/// Most proofs in one check frame.
pub const MAX_CHECKS: usize = 256;

/// Most versions in one pin request, added and removed together: it stays within a rail's message.
pub const MAX_PINS: usize = 1024;
/// The pin lease that a server may grant.
pub const PIN_LEASE: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(24 * 3600);

/// A FUSE read, from its arrival to its answer.
pub const READ_DEADLINE: Duration = Duration::from_secs(10);
/// Lookup, stat, list.
pub const METADATA_DEADLINE: Duration = Duration::from_secs(5);
/// Connecting and saying hello.
pub const CONNECT_DEADLINE: Duration = Duration::from_secs(3);
/// How long a lookup or a check waits for a publish of its name.
pub const PUBLISH_WAIT: Duration = Duration::from_secs(2);
/// A rail that was silent this long while an answer was due is suspect: its work is sent on other rails too.
pub const RAIL_SUSPECT: Duration = Duration::from_secs(1);
/// A rail that was silent this long is retired.
pub const RAIL_RETIRE: Duration = Duration::from_secs(3);
/// Work that was posted to an RDMA device, without a completion of any: its connection is retired.
pub const CQ_WAIT: Duration = Duration::from_secs(5);
/// One attempt of a client's request on one rail, while another rail could do it.
pub const REQUEST: Duration = Duration::from_secs(3);
/// One request of a server to a client: the bytes of a put.
pub const PULL: Duration = Duration::from_secs(10);
/// What can be set of the three above.
pub const RAIL_TIMES: std::ops::RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(30);
/// A put without progress is aborted.
pub const PUT_IDLE: Duration = Duration::from_secs(30);
/// A daemon that was told to stop has stopped.
pub const STOP_DEADLINE: Duration = Duration::from_secs(10);
/// The server lease.
pub const LEASE: Duration = Duration::from_secs(2);
/// How long a FUSE thread may wait for a check before it hands the read over.
pub const INLINE_CHECK: Duration = Duration::from_micros(300);
