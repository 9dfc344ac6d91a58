//! Every message and every format against files committed with the first release: an old peer and an old disk stay
//! readable, and what is written stays what they can read. `RAILFS_UPDATE_GOLDEN=1` writes the files anew: do so only to
//! add one, never to change one that was released.

mod values;

use prost::Message;
use railfs_proto::component::{BlockId, Header, SUMS_PER_BLOCK, TableBlock, encode_table};
use railfs_proto::frame::{self, FrameKind};
use railfs_proto::hello::Hello;
use railfs_proto::pin::{PinAnswer, PinChange};
use railfs_proto::reply::{Lookup, check_begin_put_reply, check_fetch_reply, check_list_reply, check_pull_reply};
use railfs_proto::slot::Slot;
use railfs_proto::watch::check_watch_reply;
use railfs_proto::{checkpoint, checksum, logfile, v1, verbs};
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use values::{DIRECTORIES, INCARNATION, STORE, VERSION};

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// Compares with the committed bytes and returns those.
fn golden(name: &str, bytes: &[u8]) -> Vec<u8> {
    let path = directory().join(format!("{name}.bin"));
    if std::env::var_os("RAILFS_UPDATE_GOLDEN").is_some_and(|value| value == "1") {
        std::fs::write(&path, bytes).unwrap();
    }
    let committed = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(committed == bytes, "{name}: what is written now is not what the golden file holds");
    committed
}

/// What is done with each message.
trait Visit {
    fn message<M: Message + Default + PartialEq + Debug>(&mut self, name: &'static str, value: M);
}

fn visit_all(visit: &mut impl Visit) {
    use values as v;
    visit.message("Name", v::name().to_message());
    visit.message("Scope", v::scope());
    visit.message("Attributes", v::attributes());
    let descriptor = v::descriptor().to_message();
    visit.message("Layout", descriptor.layout.unwrap());
    visit.message("Replica", descriptor.components[1].replicas[0].clone());
    visit.message("Component", descriptor.components[1].clone());
    visit.message("Descriptor", descriptor);
    let owned = v::owned_descriptor().to_message();
    visit.message("Attributes-owner", owned.attributes.unwrap());
    visit.message("Descriptor-owner", owned);
    visit.message("SlotProof", v::proof().to_slot());
    visit.message("Proof", v::proof().to_message());
    visit.message("Outcome", v::refusal());
    visit.message("LookupRequest", v::lookup_request());
    v::lookups().into_iter().for_each(|(name, reply)| visit.message(name, reply));

    let (scope, name, request) = (Some(v::scope()), Some(v::name().to_message()), vec![0x13; 16].into());
    let outcome = Some(v::refusal());
    visit.message("HelloRequest", v::hello_request());
    visit.message("Listener", v::listener(1));
    visit.message("HelloReply", v::hello_reply());
    visit.message("Listener-verbs", v::verbs_listener());
    visit.message("VerbsPair", v::verbs_end().pairs[1]);
    visit.message("VerbsEnd", v::verbs_end());
    visit.message("VerbsEnd-offers", v::verbs_end_offers());
    visit.message("VerbsEnd-slots", v::verbs_end_with_slots());
    visit.message("SlotArray", v::slot_array());
    visit.message("JoinVerbsRequest", v::join_verbs_request());
    visit.message("JoinVerbsReply", v1::JoinVerbsReply { outcome: outcome.clone(), end: Some(v::verbs_end()) });
    visit.message("ListRequest", v::list_request());
    visit.message("ListEntry", v::list_reply().entries[0].clone());
    visit.message("ListReply", v::list_reply());
    visit.message("BeginPutRequest", v::begin_put_request());
    visit.message("BeginPutReply", v::begin_put_reply());
    let commit = |if_version| v1::CommitPutRequest {
        scope: Some(v::scope()),
        session: 42,
        put: 17,
        request: vec![0x14; 16].into(),
        if_version,
    };
    visit.message("CommitPutRequest", commit(Some(VERSION)));
    visit.message("CommitPutRequest-absent", commit(Some(0)));
    visit.message("CommitPutRequest-always", commit(None));
    visit
        .message("CommitPutReply", v1::CommitPutReply { outcome: outcome.clone(), version: VERSION, superseded: true });
    visit.message("AbortPutRequest", v1::AbortPutRequest { scope: scope.clone(), session: 42, put: 17 });
    visit.message("AbortPutReply", v1::AbortPutReply { outcome: outcome.clone() });
    visit
        .message("DeleteRequest", v1::DeleteRequest { scope: scope.clone(), name, request, if_version: Some(VERSION) });
    visit.message("DeleteReply", v1::DeleteReply { outcome: outcome.clone(), version: VERSION + 1, deleted: VERSION });
    visit.message("StatusRequest", v1::StatusRequest { scope });
    visit.message("DirectoryStatus", v::directory_status());
    visit.message("DirectoryStatus-missing", v::missing_directory_status());
    visit.message(
        "DirectoryStatus-filesystem",
        v1::DirectoryStatus { filesystem: 0xfd00_0001, ..v::directory_status() },
    );
    visit.message("ListenerStatus", v::listener_status());
    visit.message("Counter", v::counter());
    visit.message("StatusReply", v::status_reply());
    visit.message("ByeRequest", v1::ByeRequest { scope: Some(v::scope()), session: 42 });
    visit.message("ByeReply", v1::ByeReply { outcome: outcome.clone() });
    visit.message("WatchRequest", v::watch_request());
    visit.message("WatchRequest-acknowledge", v1::WatchRequest { acknowledged: 104, ..Default::default() });
    v::changes().into_iter().for_each(|(name, change)| visit.message(name, change));
    visit.message("WatchReply", v::watch_reply());
    visit.message("StatusReply-degraded", v::status_reply_degraded());

    visit.message("JoinRequest", v::join_request());
    visit.message("JoinReply", v1::JoinReply { outcome });
    visit.message("FetchRequest", v::fetch_request());
    visit.message("FetchRequest-fresh", v::fresh_fetch_request());
    visit.message("FetchReply", v::fetch_reply());
    visit.message("CheckRequest", v::check_request());
    visit.message("CheckResult", v::check_result());
    visit.message("CheckReply", v::check_reply());
    visit.message("PullRequest", v::pull_request());
    visit.message("PullReply", v::pull_reply());
    visit.message("PinRequest", v::pin_request());
    visit.message("PinReply", v::pin_reply());
    visit.message("LeaseRequest", v1::LeaseRequest {});
    visit.message("LeaseReply", v1::LeaseReply { lease_milliseconds: 2000 });
    v::rail_requests().into_iter().for_each(|(name, request)| visit.message(name, request));
    v::rail_replies().into_iter().for_each(|(name, reply)| visit.message(name, reply));

    visit.message("StartRecord", v::start_record());
    visit.message("ReserveRecord", v::reserve_record());
    visit.message("PutRecord", v::put_record());
    visit.message("PutRecord-owner", v::owned_put_record());
    visit.message("DeleteRecord", v::delete_record());
    visit.message("ReclaimRecord", v::reclaim_record());
    visit.message("StopRecord", v1::StopRecord {});
    v::records().into_iter().for_each(|(name, record)| visit.message(name, record));
    visit.message("Marker", v::marker());
    visit.message("CheckpointState", v::checkpoint_state());
    visit.message("CheckpointTime", v::checkpoint_time());
    visit.message("CheckpointObject", v::checkpoint_object());
    visit.message("CheckpointTombstone", v::checkpoint_tombstone());
    visit.message("CheckpointNamespace", v::checkpoint_namespace());
    visit.message("CheckpointRequest", v::checkpoint_request());
    v::checkpoint_entries().into_iter().for_each(|(name, entry)| visit.message(name, entry));
    visit.message("CheckpointBlock", v::checkpoint_blocks().swap_remove(0));
}

/// The names that were visited.
struct Names(BTreeSet<String>);
impl Visit for Names {
    fn message<M: Message + Default + PartialEq + Debug>(&mut self, name: &'static str, _: M) {
        assert!(self.0.insert(name.to_owned()), "{name} twice");
    }
}

const FORMATS: [&str; 21] = [
    "verbs-request",
    "verbs-reply",
    "verbs-cancel",
    "verbs-pull",
    "verbs-offer",
    "verbs-taken",
    "frame-request",
    "frame-reply",
    "frame-join",
    "frame-joined",
    "frame-ping",
    "frame-pong",
    "component-header",
    "component-header-long",
    "table-block",
    "slot-word",
    "page-checksums",
    "log-segment",
    "log-marker",
    "log-checkpoint",
    "component-table",
];

#[test]
fn every_message_is_as_it_was() {
    struct Compare;
    impl Visit for Compare {
        fn message<M: Message + Default + PartialEq + Debug>(&mut self, name: &'static str, value: M) {
            let committed = golden(name, &value.encode_to_vec());
            assert_eq!(M::decode(&committed[..]).unwrap(), value, "{name}");
        }
    }
    visit_all(&mut Compare);
}

#[test]
fn i12_unknown_fields_are_ignored() {
    struct AddFields;
    impl Visit for AddFields {
        fn message<M: Message + Default + PartialEq + Debug>(&mut self, name: &'static str, value: M) {
            let mut bytes = value.encode_to_vec();
            for (field, wire_type, payload) in [
                (1000u32, 0u32, &[0x96, 0x01][..]),
                (1001, 1, &[7; 8]),
                (1002, 2, &[3, b'n', b'e', b'w']),
                (1003, 5, &[9; 4]),
            ] {
                let tag = field << 3 | wire_type;
                let tag = [(tag & 0x7f | 0x80) as u8, (tag >> 7) as u8];
                // Before and after what is known.
                bytes = if field % 2 == 0 {
                    [&tag[..], payload, &bytes].concat()
                } else {
                    [&bytes, &tag[..], payload].concat()
                };
            }
            assert_eq!(M::decode(&bytes[..]).unwrap(), value, "{name}");
        }
    }
    visit_all(&mut AddFields);
}

#[test]
fn i12_unknown_fields_inside_a_message_are_ignored() {
    let new_field = [0xc2, 0x3e, 3, b'n', b'e', b'w'];
    let descriptor = [&values::descriptor().to_message().encode_to_vec()[..], &new_field].concat();
    let without = Lookup::Absent(values::proof()).to_message().encode_to_vec();
    let mut bytes = without;
    bytes.push(2 << 3 | 2);
    prost::encoding::encode_varint(descriptor.len() as u64, &mut bytes);
    bytes.extend_from_slice(&descriptor);
    let reply = v1::LookupReply::decode(&bytes[..]).unwrap();
    assert_eq!(Lookup::from_message(&reply), Ok(Lookup::Object(values::descriptor(), values::proof())));
}

#[test]
fn every_message_of_the_protocol_has_a_golden_file_and_every_file_a_test() {
    let mut names = Names(BTreeSet::new());
    visit_all(&mut names);
    let proto = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    for file in std::fs::read_dir(proto).unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        for name in text.lines().filter_map(|line| line.strip_prefix("message ")?.split([' ', '{']).next()) {
            let covered = names.0.iter().any(|golden| golden.split('-').next() == Some(name));
            assert!(covered, "message {name} has no golden file: add a value of it to visit_all");
        }
    }
    let wanted = names.0.into_iter().chain(FORMATS.map(str::to_owned)).map(|name| format!("{name}.bin"));
    let found = std::fs::read_dir(directory()).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    assert_eq!(wanted.collect::<BTreeSet<_>>(), found.collect::<BTreeSet<_>>());
}

#[test]
fn the_golden_replies_pass_their_checks() {
    use values as v;
    assert_eq!(Hello::check(&v::hello_request(), &v::hello_reply()).unwrap().store, STORE);
    assert_eq!(check_list_reply(&v::list_request(), &v::list_reply()).unwrap().entries.len(), 3);
    assert_eq!(check_watch_reply(b"2026/", 103, &v::watch_reply()).unwrap().changes.len(), 2);
    assert_eq!(check_begin_put_reply(&v::begin_put_request(), &v::begin_put_reply()), Ok((17, v::descriptor())));
    assert_eq!(check_fetch_reply(&v::fetch_request(), &v::fetch_reply(), 131_073, 65_536), Ok(vec![1, u64::MAX, 3]));
    assert_eq!(check_pull_reply(&v::pull_request(), &v::pull_reply(), 70_000, 65_536), Ok(vec![4, 5]));
    let change = PinChange::from_message(&v::pin_request()).unwrap();
    assert_eq!(PinAnswer::check(&change, &v::pin_reply()).unwrap().gone, [VERSION]);
    for (_, reply) in v::lookups() {
        assert_eq!(Lookup::from_message(&reply).unwrap().to_message(), reply);
    }
}

#[test]
fn frames_are_as_they_were() {
    let (_, request) = values::rail_requests().swap_remove(0);
    for (name, kind, id, message, bulk) in [
        ("frame-request", FrameKind::Request, 7, request.encode_to_vec(), 0),
        ("frame-reply", FrameKind::Reply, 7, values::rail_replies().swap_remove(0).1.encode_to_vec(), 100),
        ("frame-join", FrameKind::Join, 1, values::join_request().encode_to_vec(), 0),
        ("frame-joined", FrameKind::Joined, 1, v1::JoinReply::default().encode_to_vec(), 0),
        ("frame-ping", FrameKind::Ping, 8, Vec::new(), 0),
        ("frame-pong", FrameKind::Pong, 8, Vec::new(), 0),
    ] {
        let committed = golden(name, &values::frame(kind, id, &message, bulk));
        let (header, rest) = committed.split_first_chunk().unwrap();
        assert_eq!(frame::Header::decode(header), Ok(frame::Header { kind, bulk, session: 42, id }));
        let (trailer, rest) = rest[usize::try_from(bulk).unwrap()..].split_first_chunk().unwrap();
        assert_eq!(frame::Trailer::decode(trailer).unwrap().check_message(rest), Ok(()));
        assert_eq!(rest, message);
    }
}

#[test]
fn pieces_of_verbs_frames_are_as_they_were() {
    for (name, pieces) in values::verbs_frames() {
        let committed = golden(name, &pieces.concat());
        assert_eq!(committed, pieces.concat());
        let mut assembly = verbs::Assembly::default();
        let brought: Vec<_> =
            pieces.iter().map(|piece| assembly.take(&verbs::decode(piece).unwrap()).unwrap()).collect();
        assert!(brought.last().unwrap().message.is_some(), "{name}");
    }
    for end in [values::verbs_end(), values::verbs_end_offers()] {
        assert!(verbs::End::from_message(Some(&end)).is_ok());
    }
    let slots = verbs::End::from_message(Some(&values::verbs_end_with_slots())).unwrap().slots.unwrap();
    assert_eq!((slots.count, slots.incarnation), (1 << 20, INCARNATION));
}

#[test]
fn component_files_are_as_they_were() {
    for (name, header) in
        [("component-header", values::component_header()), ("component-header-long", values::long_component_header())]
    {
        let committed = golden(name, &header.encode());
        assert_eq!(Header::decode(committed[..].try_into().unwrap()), Ok(header));
    }
    let committed = golden("table-block", &values::table_block());
    let block = TableBlock::decode(values::block_id(), committed[..].try_into().unwrap()).unwrap();
    assert_eq!(block.sums()[..300], values::block_sums());
    let sums: Vec<u64> = (0..SUMS_PER_BLOCK as u64 + 1).collect();
    let committed = golden("component-table", &encode_table(VERSION, 1, &sums).collect::<Vec<_>>().concat());
    let id = BlockId { version: VERSION, component: 1, block: 1 };
    let block = TableBlock::decode(id, committed[4096..].try_into().unwrap()).unwrap();
    assert_eq!(block.sums()[0], SUMS_PER_BLOCK as u64);
}

#[test]
fn words_and_checksums_are_as_they_were() {
    let committed = golden("slot-word", &values::slot_word().to_le_bytes());
    let word = u64::from_le_bytes(committed[..].try_into().unwrap());
    assert_eq!(Slot::decode(word, INCARNATION), Some(Slot { in_progress: 0, counter: 0x12_3456_789a }));
    let bytes: Vec<u8> = (0..10_000u32).map(|n| n as u8).collect();
    let sums = checksum::page_checksums(VERSION, 1, 5, 4096, &bytes);
    golden("page-checksums", &sums.iter().flat_map(|sum| sum.to_le_bytes()).collect::<Vec<_>>());
    assert_eq!(sums.len(), 3);
}

#[test]
fn the_log_is_as_it_was() {
    let committed = golden("log-segment", &values::segment());
    let header = logfile::SegmentHeader::decode(&committed).unwrap();
    let scan = logfile::scan(&committed, logfile::record_seed(STORE, header.epoch), header.first);
    assert_eq!(scan.rest, logfile::Rest::Clean);
    let found: Vec<_> = scan.records.into_iter().map(|found| found.record).collect();
    assert_eq!(found, values::records().into_iter().map(|(_, record)| record).collect::<Vec<_>>());
    let committed = golden("log-marker", &values::marker_file());
    let marker = logfile::decode_marker(&committed).unwrap();
    assert_eq!(marker.directories[2], DIRECTORIES[2].to_bytes());
    assert_eq!(marker, values::marker());
    let committed = golden("log-checkpoint", &values::checkpoint_file());
    let (header, entries) = checkpoint::decode_checkpoint(&committed).unwrap();
    assert_eq!((header.id, header.last_check), (values::CHECKPOINT, 0x1234_5678_9abc_def0));
    assert_eq!(entries, values::checkpoint_entries().into_iter().map(|(_, entry)| entry).collect::<Vec<_>>());
}
