//! One fixed value of every message and format. Every field differs from its default and from its neighbours, so that
//! two fields that change places are noticed. Golden files and fuzzing seeds are made from these.

#![allow(dead_code)] // each test that includes this file uses a part of it

mod checkpoint;

#[allow(unused_imports)] // as above
pub use checkpoint::*;

use railfs_proto::component::{BlockId, Header, TableBlock};
use railfs_proto::descriptor::{Attributes, Descriptor, Id, Owner, Proof, Replica};
use railfs_proto::frame::{self, FrameKind, Trailer};
use railfs_proto::layout::Striping;
use railfs_proto::logfile::{SegmentHeader, append_record, encode_marker, record_seed};
use railfs_proto::name::ObjectName;
use railfs_proto::reply::{Lookup, Time, ok_outcome};
use railfs_proto::slot::Slot;
use railfs_proto::v1::{self, rail_reply, rail_request, record};

pub const STORE: Id = Id([0x5a; 16]);
pub const DIRECTORIES: [Id; 3] = [Id([0xd0; 16]), Id([0xd1; 16]), Id([0xd2; 16])];
pub const INCARNATION: u64 = 0x1122_3344_5566_7788;
pub const VERSION: u64 = 123_456_789;
pub const EPOCH: u64 = 3;

pub fn name() -> ObjectName {
    ObjectName::new("photos-1", &b"2026/caf\xc3\xa9 \xff.raw"[..]).unwrap()
}

/// Five and a bit stripes of 1 MiB over three components.
pub fn descriptor() -> Descriptor {
    let replicas = |directory| vec![Replica { node: "node-a".into(), directory }];
    Descriptor {
        version: VERSION,
        attributes: Attributes {
            mode: 0o640,
            mtime_seconds: 1_767_225_600,
            mtime_nanoseconds: 123_456_789,
            owner: None,
        },
        striping: Striping::new((5 << 20) + 70_000, 65_536, 1 << 20, 3).unwrap(),
        components: DIRECTORIES.map(replicas).to_vec(),
    }
}

/// The same, put with its owner.
pub fn owned_descriptor() -> Descriptor {
    let owner = Some(Owner { uid: 1000, gid: 0 });
    let plain = descriptor();
    Descriptor { attributes: Attributes { owner, ..plain.attributes }, ..plain }
}

pub fn proof() -> Proof {
    Proof {
        node: "node-a".into(),
        incarnation: INCARNATION,
        slot: 77,
        value: slot_word(),
        name_tag: 0x0102_0304_0506_0708,
    }
}

pub fn slot_word() -> u64 {
    Slot { in_progress: 0, counter: 0x12_3456_789a }.encode(INCARNATION)
}

pub fn scope() -> v1::Scope {
    v1::Scope { store: STORE.to_bytes(), node: "node-a".into(), incarnation: INCARNATION }
}

pub fn refusal() -> v1::Outcome {
    v1::Outcome { code: v1::Code::NoSpace.into(), message: "directory d0 is full".into() }
}

pub fn attributes() -> v1::Attributes {
    descriptor().to_message().attributes.unwrap()
}

pub fn lookups() -> [(&'static str, v1::LookupReply); 3] {
    let mtime = Time { seconds: 1_767_225_601, nanoseconds: 5 };
    [
        ("LookupReply-object", Lookup::Object(descriptor(), proof()).to_message()),
        ("LookupReply-directory", Lookup::Directory { mtime, proof: proof() }.to_message()),
        ("LookupReply-absent", Lookup::Absent(proof()).to_message()),
    ]
}

pub fn listener(id: u32) -> v1::Listener {
    v1::Listener {
        id,
        fabric: "lan".into(),
        transport: "tcp".into(),
        address: format!("10.0.0.{}:7421", id + 1),
        speed_mbps: 25_000,
        capabilities: vec!["zero-copy".into()],
        gid: Default::default(),
    }
}

pub fn verbs_listener() -> v1::Listener {
    v1::Listener {
        transport: "rdma".into(),
        address: "10.0.0.9".into(),
        gid: b"\0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\0\0\x09"[..].into(),
        ..listener(2)
    }
}

pub fn verbs_end() -> v1::VerbsEnd {
    v1::VerbsEnd {
        gid: verbs_listener().gid,
        lid: 7,
        mtu: 3,
        piece_bytes: 4096,
        depth: 64,
        pairs: (1..6).map(|n| v1::VerbsPair { number: n * 17, psn: 0xff_ffff - n }).collect(),
        ..v1::VerbsEnd::default()
    }
}

/// Of a server whose slots can be READ.
pub fn verbs_end_with_slots() -> v1::VerbsEnd {
    v1::VerbsEnd { slots: Some(slot_array()), ..verbs_end() }
}

pub fn slot_array() -> v1::SlotArray {
    v1::SlotArray {
        address: 0x7f00_1234_5000,
        key: 0x1234_5678,
        count: 1 << 20,
        incarnation: INCARNATION,
        lease_milliseconds: 2000,
    }
}

/// Of a side that says how many READs it has under way, and that it knows offers.
pub fn verbs_end_offers() -> v1::VerbsEnd {
    v1::VerbsEnd { reads_answered: 128, reads_asked: 16, offers: true, ..verbs_end() }
}

pub fn join_verbs_request() -> v1::JoinVerbsRequest {
    v1::JoinVerbsRequest {
        protocol: 1,
        scope: Some(scope()),
        session: 42,
        ticket: vec![3; 16].into(),
        listener: 2,
        end: Some(verbs_end()),
    }
}

/// A request with a landing, a reply whose bulk is carried in its pieces, and a pull whose bulk is offered and taken.
pub fn verbs_frames() -> [(&'static str, Vec<Vec<u8>>); 6] {
    use prost::Message;
    use railfs_proto::verbs::{FrameKind, Header, encode};
    let request = rail_requests().swap_remove(0).1.encode_to_vec();
    let reply = rail_replies().swap_remove(0).1.encode_to_vec();
    let bulk: Vec<u8> = (0..700u32).map(|n| n as u8).collect();
    let plain = |kind| Header::plain(kind, 42, 7);
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap();
    let of = |header: Header, words: &[u8], bulk: &[u8]| {
        let whole = [words, bulk].concat();
        let (mut at, mut out, mut pieces) = (0, Vec::new(), Vec::new());
        loop {
            at += encode(&header, 99, at, 256, |at, length| &whole[at..(at + length).min(whole.len())], &mut out);
            pieces.push(out.clone());
            if at == whole.len() {
                return pieces;
            }
        }
    };
    let landing = Header {
        message: length(&request),
        bulk: 1 << 20,
        address: 0x7f00_1234_5000,
        key: 0xdead_beef,
        ..plain(FrameKind::Request)
    };
    let pull = rail_requests().swap_remove(3).1.encode_to_vec();
    let (address, key) = (0x7f00_0040_0000, 0x0001_2346);
    let offer = Header { message: length(&reply), bulk: 700, address, key, ..plain(FrameKind::Offer) };
    let carried = Header { message: length(&reply), bulk: 700, carried: 700, ..plain(FrameKind::Reply) };
    [
        ("verbs-request", of(landing, &request, &[])),
        ("verbs-reply", of(carried, &reply, &bulk)),
        ("verbs-cancel", of(plain(FrameKind::Cancel), &[], &[])),
        (
            "verbs-pull",
            of(Header { message: length(&pull), bulk: 700, reads: true, ..plain(FrameKind::Request) }, &pull, &[]),
        ),
        ("verbs-offer", of(offer, &reply, &[])),
        ("verbs-taken", of(plain(FrameKind::Taken), &[], &[])),
    ]
}

pub fn hello_request() -> v1::HelloRequest {
    v1::HelloRequest {
        protocol_min: 1,
        protocol_max: 1,
        software: "railfs 0.1.0".into(),
        store: STORE.to_bytes(),
        session: 42,
        incarnation: INCARNATION,
        tickets: 8,
        capabilities: vec!["watch".into(), "pins".into()],
    }
}

pub fn hello_reply() -> v1::HelloReply {
    v1::HelloReply {
        outcome: Some(ok_outcome()),
        protocol: 1,
        protocol_min: 1,
        protocol_max: 2,
        software: "railfsd 0.1.0".into(),
        store: STORE.to_bytes(),
        node: "node-a".into(),
        incarnation: INCARNATION,
        session: 42,
        tickets: vec![vec![1; 16].into(), vec![2; 32].into()],
        listeners: vec![listener(0), listener(1)],
        control_addresses: vec!["10.0.0.1:7420".into(), "[fd00::1]:7420".into()],
        lease_milliseconds: 2000,
        capabilities: vec!["watch".into()],
        max_fetch_bytes: 1 << 20,
    }
}

pub fn list_request() -> v1::ListRequest {
    v1::ListRequest {
        scope: Some(scope()),
        namespace: "photos-1".into(),
        prefix: b"2026/"[..].into(),
        delimited: true,
        after: b"2026/a"[..].into(),
        limit: 3,
    }
}

pub fn list_reply() -> v1::ListReply {
    let object = |key: &'static [u8]| v1::ListEntry {
        key: key.into(),
        directory: false,
        descriptor: Some(descriptor().to_message()),
    };
    let directory = v1::ListEntry { key: b"2026/b"[..].into(), directory: true, descriptor: None };
    v1::ListReply {
        outcome: Some(ok_outcome()),
        entries: vec![object(b"2026/b!"), directory, object(b"2026/b\xff")],
        more: true,
        next_after: b"2026/b\xff"[..].into(),
        directory_mtime_seconds: 1_767_225_602,
        directory_mtime_nanoseconds: 6,
    }
}

pub fn begin_put_request() -> v1::BeginPutRequest {
    v1::BeginPutRequest {
        scope: Some(scope()),
        session: 42,
        name: Some(name().to_message()),
        attributes: Some(attributes()),
        stripe_size: 1 << 20,
        page_size: 65_536,
        width: 3,
    }
}

pub fn begin_put_reply() -> v1::BeginPutReply {
    v1::BeginPutReply { outcome: Some(ok_outcome()), put: 17, descriptor: Some(descriptor().to_message()) }
}

pub fn status_reply() -> v1::StatusReply {
    v1::StatusReply {
        outcome: Some(ok_outcome()),
        store: STORE.to_bytes(),
        node: "node-a".into(),
        incarnation: INCARNATION,
        software: "railfsd 0.1.0".into(),
        uptime_seconds: 86_401,
        directories: vec![directory_status()],
        listeners: vec![listener_status()],
        memory_limit_bytes: 256 << 20,
        memory_used_bytes: 12 << 20,
        sessions: 2,
        puts: 4,
        publishing: "ok".into(),
        objects: 1_000_001,
        log_sequence: 2_000_002,
        counters: vec![counter()],
        degraded: Vec::new(),
    }
}

pub fn status_reply_degraded() -> v1::StatusReply {
    let mut reply = status_reply();
    reply.degraded = vec!["state_dir /var/lib/railfs is full".into()];
    reply.directories = vec![v1::DirectoryStatus { lost_files: 3, lost_bytes: 100 << 20, ..directory_status() }];
    reply
}

pub fn directory_status() -> v1::DirectoryStatus {
    v1::DirectoryStatus {
        id: DIRECTORIES[0].to_bytes(),
        path: "/srv/disk0".into(),
        state: "suspect".into(),
        total_bytes: 1 << 40,
        available_bytes: 1 << 39,
        holds_log: true,
        reason: String::new(),
        filesystem: 0,
        lost_files: 0,
        lost_bytes: 0,
    }
}

pub fn missing_directory_status() -> v1::DirectoryStatus {
    v1::DirectoryStatus {
        state: "missing".into(),
        total_bytes: 0,
        available_bytes: 0,
        reason: "it does not exist".into(),
        ..directory_status()
    }
}

/// What a watch was asked for first.
pub fn watch_request() -> v1::WatchRequest {
    v1::WatchRequest {
        scope: Some(scope()),
        namespace: "photos-1".into(),
        prefix: b"2026/"[..].into(),
        from: 103,
        acknowledges: true,
        acknowledged: 0,
    }
}

pub fn changes() -> [(&'static str, v1::Change); 2] {
    let put = v1::Change {
        sequence: 103,
        time_seconds: 1_767_225_603,
        time_nanoseconds: 7,
        key: b"2026/caf\xc3\xa9 \xff.raw"[..].into(),
        version: VERSION,
        deleted: false,
        before: 0,
        descriptor: Some(owned_descriptor().to_message()),
    };
    let delete = v1::Change {
        sequence: 105,
        version: VERSION + 1,
        deleted: true,
        before: VERSION,
        descriptor: None,
        ..put.clone()
    };
    [("Change-put", put), ("Change-delete", delete)]
}

pub fn watch_reply() -> v1::WatchReply {
    v1::WatchReply {
        outcome: Some(ok_outcome()),
        changes: changes().map(|(_, change)| change).to_vec(),
        next: 106,
        oldest: 1,
        latest: 107,
    }
}

pub fn listener_status() -> v1::ListenerStatus {
    v1::ListenerStatus { listener: Some(listener(1)), connections: 5, bytes_sent: 1 << 33, bytes_received: 1 << 32 }
}

pub fn counter() -> v1::Counter {
    v1::Counter { name: "fetches".into(), value: 31 }
}

pub fn fetch_request() -> v1::FetchRequest {
    v1::FetchRequest {
        version: VERSION,
        component: 1,
        offset: 131_072,
        length: 131_073,
        directory: DIRECTORIES[1].to_bytes(),
        proof: Some(proof().to_slot()),
        ..v1::FetchRequest::default()
    }
}
/// After a page that was bad.
pub fn fresh_fetch_request() -> v1::FetchRequest {
    v1::FetchRequest { fresh: true, ..fetch_request() }
}

pub fn fetch_reply() -> v1::FetchReply {
    v1::FetchReply {
        version: VERSION,
        component: 1,
        offset: 131_072,
        length: 131_073,
        checksums: vec![1, u64::MAX, 3],
        check: Some(check_result()),
    }
}

pub fn check_request() -> v1::CheckRequest {
    v1::CheckRequest { proofs: vec![proof().to_slot(), v1::SlotProof { slot: 78, ..proof().to_slot() }] }
}

pub fn check_result() -> v1::CheckResult {
    v1::CheckResult { current: true, value: slot_word() }
}

pub fn check_reply() -> v1::CheckReply {
    v1::CheckReply { results: vec![check_result(), v1::CheckResult { current: false, value: 9 }] }
}

pub fn lookup_request() -> v1::LookupRequest {
    v1::LookupRequest { scope: Some(scope()), name: Some(name().to_message()) }
}

pub fn pull_request() -> v1::PullRequest {
    v1::PullRequest { put: 17, offset: 1 << 20, length: 70_000 }
}

pub fn pull_reply() -> v1::PullReply {
    v1::PullReply { put: 17, offset: 1 << 20, length: 70_000, checksums: vec![4, 5] }
}

pub fn pin_request() -> v1::PinRequest {
    v1::PinRequest {
        lease: 0x1122_3344_5566_7788,
        sequence: 9,
        add: vec![VERSION, VERSION + 1],
        remove: vec![VERSION - 1],
    }
}

pub fn pin_reply() -> v1::PinReply {
    v1::PinReply {
        sequence: 9,
        fresh: true,
        lease_milliseconds: 60_000,
        gone: vec![VERSION],
        refused: vec![VERSION + 1],
    }
}

pub fn rail_requests() -> Vec<(&'static str, v1::RailRequest)> {
    use rail_request::Body;
    let request = |body| v1::RailRequest { scope: Some(scope()), time_left_microseconds: 9_500_000, body: Some(body) };
    vec![
        ("RailRequest-fetch", request(Body::Fetch(fetch_request()))),
        ("RailRequest-check", request(Body::Check(check_request()))),
        ("RailRequest-lookup", request(Body::Lookup(lookup_request()))),
        ("RailRequest-pull", request(Body::Pull(pull_request()))),
        ("RailRequest-pin", request(Body::Pin(pin_request()))),
        ("RailRequest-lease", request(Body::Lease(v1::LeaseRequest {}))),
    ]
}

pub fn rail_replies() -> Vec<(&'static str, v1::RailReply)> {
    use rail_reply::Body;
    let reply = |body| v1::RailReply { outcome: Some(ok_outcome()), body: Some(body) };
    let [(_, object), ..] = lookups();
    vec![
        ("RailReply-fetch", reply(Body::Fetch(fetch_reply()))),
        ("RailReply-check", reply(Body::Check(check_reply()))),
        ("RailReply-lookup", reply(Body::Lookup(object))),
        ("RailReply-pull", reply(Body::Pull(pull_reply()))),
        ("RailReply-pin", reply(Body::Pin(pin_reply()))),
        ("RailReply-lease", reply(Body::Lease(v1::LeaseReply { lease_milliseconds: 2000 }))),
        ("RailReply-refused", v1::RailReply { outcome: Some(refusal()), body: None }),
    ]
}

pub fn join_request() -> v1::JoinRequest {
    v1::JoinRequest {
        protocol: 1,
        scope: Some(scope()),
        session: 42,
        ticket: vec![2; 32].into(),
        lane: v1::Lane::Small.into(),
        listener: 1,
    }
}

pub fn start_record() -> v1::StartRecord {
    v1::StartRecord { node: "node-a".into(), lease_milliseconds: 2000, verbs: true }
}
pub fn reserve_record() -> v1::ReserveRecord {
    v1::ReserveRecord { last: 999_999 }
}
pub fn put_record() -> v1::PutRecord {
    v1::PutRecord {
        name: Some(name().to_message()),
        request: vec![0x11; 16].into(),
        descriptor: Some(descriptor().to_message()),
    }
}
/// Of a put that kept the owner.
pub fn owned_put_record() -> v1::PutRecord {
    v1::PutRecord { descriptor: Some(owned_descriptor().to_message()), ..put_record() }
}
pub fn delete_record() -> v1::DeleteRecord {
    v1::DeleteRecord {
        name: Some(name().to_message()),
        request: vec![0x12; 16].into(),
        version: VERSION + 1,
        deleted: VERSION,
    }
}
pub fn reclaim_record() -> v1::ReclaimRecord {
    v1::ReclaimRecord { versions: vec![VERSION, VERSION + 5] }
}

pub fn records() -> Vec<(&'static str, v1::Record)> {
    use record::Body;
    let bodies = [
        ("Record-start", Body::Start(start_record())),
        ("Record-reserve", Body::Reserve(reserve_record())),
        ("Record-put", Body::Put(put_record())),
        ("Record-delete", Body::Delete(delete_record())),
        ("Record-stop", Body::Stop(v1::StopRecord {})),
        ("Record-reclaim", Body::Reclaim(reclaim_record())),
    ];
    let record = |sequence, body| v1::Record {
        sequence,
        incarnation: INCARNATION,
        time_seconds: 1_767_225_603,
        time_nanoseconds: 7,
        body: Some(body),
    };
    (100..).zip(bodies).map(|(sequence, (name, body))| (name, record(sequence, body))).collect()
}

pub fn marker() -> v1::Marker {
    v1::Marker {
        store: STORE.to_bytes(),
        directory: DIRECTORIES[0].to_bytes(),
        epoch: EPOCH,
        highest_sequence: 105,
        log_directories: DIRECTORIES[..2].iter().map(|id| id.to_bytes()).collect(),
        directories: DIRECTORIES.iter().map(|id| id.to_bytes()).collect(),
    }
}

pub fn component_header() -> Header {
    Header::new(&name(), &descriptor(), 2).unwrap()
}

/// Of a key of 4000 bytes.
pub fn long_component_header() -> Header {
    let key = [&[b'k'; 249][..]; 16].join(&b'/');
    let name = ObjectName::new("photos-1", [&key[..], b"k"].concat()).unwrap();
    Header::new(&name, &descriptor(), 0).unwrap()
}

pub fn block_id() -> BlockId {
    BlockId { version: VERSION, component: 2, block: 1 }
}

pub fn block_sums() -> Vec<u64> {
    (1..=300u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
}

pub fn table_block() -> Vec<u8> {
    TableBlock::encode(block_id(), &block_sums()).unwrap().to_vec()
}

/// A whole frame of this message and `bulk` bytes of bulk.
pub fn frame(kind: FrameKind, id: u64, message: &[u8], bulk: u32) -> Vec<u8> {
    let header = frame::Header { kind, bulk, session: 42, id };
    let bytes = vec![0xb5; usize::try_from(bulk).unwrap()];
    [&header.encode()[..], &bytes, &Trailer::of(message).encode(), message].concat()
}

/// A segment with one record of each kind, in two batches.
pub fn segment() -> Vec<u8> {
    let mut bytes = SegmentHeader { store: STORE, epoch: EPOCH, first: 100 }.encode();
    for (batch, (_, record)) in [0, 1, 2, 0, 1, 2].into_iter().zip(records()) {
        append_record(&mut bytes, record_seed(STORE, EPOCH), batch, &record).unwrap();
    }
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    bytes
}

pub fn marker_file() -> Vec<u8> {
    encode_marker(&marker()).unwrap()
}
