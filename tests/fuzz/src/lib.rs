//! One function for every decoder of what a peer, a disk or a user can hand in.
//!
//! Guarantees looked for: any bytes give a value or an error, never a panic or a hang, and a value that was accepted
//! encodes to bytes that decode to the same value. Each function says whether its input was accepted; the seeds are, so
//! that the fuzzer starts beyond the first check. Where a checksum stands in the way, the input is tried a second time
//! with the checksum made right. `proto/tests/fuzz_seeds.rs` makes the seeds and demands that they are accepted.

use prost::Message;
use railfs_proto::checkpoint::{self, BLOCK_HEAD, CHECKPOINT_HEADER, CheckpointHeader, CheckpointId};
use railfs_proto::component::{BLOCK, BlockId, FileName, Geometry, Header, KeptKey, SUMS_PER_BLOCK, TableBlock};
use railfs_proto::descriptor::Id;
use railfs_proto::frame::{self, FrameKind, TRAILER};
use railfs_proto::hello::Hello;
use railfs_proto::logfile::{self, Rest, SegmentHeader};
use railfs_proto::name::{Escaped, Key, Namespace, ObjectName};
use railfs_proto::pin::{PinAnswer, PinChange};
use railfs_proto::reply::{
    Lookup, check_begin_put_reply, check_check_reply, check_fetch_reply, check_list_reply, check_outcome,
    check_pull_reply,
};
use railfs_proto::slot::Slot;
use railfs_proto::status::check_status_reply;
use railfs_proto::url::Url;
use railfs_proto::watch::check_watch_reply;
use railfs_proto::{units, v1, verbs};
use xxhash_rust::xxh3::xxh3_64;

/// A fuzz target: whether the bytes were accepted.
pub type Target = fn(&[u8]) -> bool;

/// Every target by name; a file of this name lies in `fuzz_targets/`, a folder in `seeds/`.
pub const TARGETS: [(&str, Target); 20] = [
    ("frame", frame),
    ("rail_request", rail_request),
    ("rail_reply", rail_reply),
    ("hello", hello),
    ("lookup", lookup),
    ("list", list),
    ("begin_put", begin_put),
    ("watch", watch),
    ("component_header", component_header),
    ("component_table", component_table),
    ("log_segment", log_segment),
    ("log_marker", log_marker),
    ("log_checkpoint", log_checkpoint),
    ("url", url),
    ("name", name),
    ("units", parse_units),
    ("verbs_frame", verbs_frame),
    ("verbs_end", verbs_end),
    ("status", status),
    ("slot", slot),
];

/// The page size that replies to fetches and pulls are checked with, bytes.
pub const PAGE: u32 = 65_536;

/// A frame as it comes out of a socket: header, bulk, trailer, message.
pub fn frame(data: &[u8]) -> bool {
    let accepted = one_frame(data);
    if let Some(repaired) = repair_frame(data) {
        one_frame(&repaired);
    }
    accepted
}

fn one_frame(data: &[u8]) -> bool {
    let Some((head, rest)) = data.split_first_chunk() else { return false };
    let Ok(header) = frame::Header::decode(head) else { return false };
    assert_eq!(frame::Header::decode(&header.encode()), Ok(header));
    let Some((_, rest)) = rest.split_at_checked(header.bulk as usize) else { return false };
    let Some((tail, message)) = rest.split_first_chunk() else { return false };
    let Ok(trailer) = frame::Trailer::decode(tail) else { return false };
    assert_eq!(trailer.encode(), *tail);
    if trailer.check_message(message).is_err() {
        return false;
    }
    match header.kind {
        FrameKind::Join => v1::JoinRequest::decode(message).is_ok(),
        FrameKind::Joined => v1::JoinReply::decode(message).is_ok(),
        FrameKind::Request => rail_request(message),
        FrameKind::Reply => rail_reply(message),
        FrameKind::Ping | FrameKind::Pong => message.is_empty(),
    }
}

fn repair_frame(data: &[u8]) -> Option<Vec<u8>> {
    let mut out = data.to_vec();
    let (head, rest) = out.split_first_chunk_mut::<{ frame::HEADER }>()?;
    let check = xxh3_64(&head[..28]) as u32;
    head[28..].copy_from_slice(&check.to_le_bytes());
    let bulk = u32::from_le_bytes([head[8], head[9], head[10], head[11]]);
    let (_, rest) = rest.split_at_mut_checked(bulk as usize)?;
    let (tail, message) = rest.split_first_chunk_mut::<TRAILER>()?;
    *tail = frame::Trailer::of(message).encode();
    Some(out)
}

/// Pieces of verbs frames as they come on one queue pair: each behind its length in two bytes.
pub fn verbs_frame(mut data: &[u8]) -> bool {
    let (mut assembly, mut whole) = (verbs::Assembly::default(), false);
    while let Some((length, rest)) = data.split_first_chunk() {
        let Some((bytes, rest)) = rest.split_at_checked(u16::from_le_bytes(*length).into()) else { return false };
        data = rest;
        let Ok(piece) = verbs::decode(bytes) else { return false };
        if let Some(header) = &piece.header {
            assert!(header.bulk <= railfs_proto::limits::MAX_EXTENT && header.payload() <= 2 << 20);
        }
        let Ok(brought) = assembly.take(&piece) else { return false };
        if let Some((start, bulk)) = brought.bulk {
            assert!(start as usize + bulk.len() <= brought.header.carried as usize);
        }
        if let Some(message) = &brought.message {
            assert_eq!(message.len(), brought.header.message as usize);
        }
        whole = brought.message.is_some();
    }
    whole && data.is_empty()
}

/// One piece as [`verbs_frame`] wants it.
pub fn piece_seed(piece: &[u8]) -> Vec<u8> {
    [&u16::try_from(piece.len()).unwrap_or(u16::MAX).to_le_bytes()[..], piece].concat()
}

/// What one side says of its queue pairs.
pub fn verbs_end(data: &[u8]) -> bool {
    let Ok(message) = v1::VerbsEnd::decode(data) else { return false };
    let Ok(end) = verbs::End::from_message(Some(&message)) else { return false };
    assert_eq!(verbs::End::from_message(Some(&end.to_message())), Ok(end));
    true
}

/// A request inside a frame.
pub fn rail_request(data: &[u8]) -> bool {
    use v1::rail_request::Body;
    let Ok(request) = v1::RailRequest::decode(data) else { return false };
    match &request.body {
        Some(Body::Lookup(lookup)) => object_name(lookup.name.as_ref()),
        Some(Body::Pin(pin)) => {
            let Ok(change) = PinChange::from_message(pin) else { return false };
            assert_eq!(change.to_message(), *pin);
            true
        }
        Some(_) => true,
        None => false,
    }
}

/// A reply inside a frame.
pub fn rail_reply(data: &[u8]) -> bool {
    use v1::rail_reply::Body;
    let Ok(reply) = v1::RailReply::decode(data) else { return false };
    if let Err(refusal) = check_outcome(reply.outcome.as_ref()) {
        assert_ne!(refusal.code, v1::Code::Ok);
        assert!(!refusal.to_string().contains('\n'));
        return reply.body.is_none();
    }
    match &reply.body {
        Some(Body::Fetch(fetch)) => {
            let request = v1::FetchRequest {
                version: fetch.version,
                component: 1,
                offset: fetch.offset,
                length: fetch.length,
                ..Default::default()
            };
            check_fetch_reply(&request, fetch, fetch.length, PAGE).is_ok()
        }
        Some(Body::Check(check)) => {
            let request = v1::CheckRequest { proofs: vec![Default::default(); check.results.len()] };
            check_check_reply(&request, check).is_ok()
        }
        Some(Body::Lookup(lookup)) => one_lookup(lookup),
        Some(Body::Pull(pull)) => {
            let request = v1::PullRequest { put: pull.put, offset: 1 << 20, length: pull.length };
            check_pull_reply(&request, pull, pull.length, PAGE).is_ok()
        }
        Some(Body::Pin(pin)) => {
            let add = pin.gone.iter().chain(&pin.refused).copied().collect();
            let request = PinChange { lease: 1, sequence: pin.sequence, add, remove: Vec::new() };
            let Ok(answer) = PinAnswer::check(&request, pin) else { return false };
            assert_eq!(answer.to_message(&request), *pin);
            true
        }
        Some(Body::Lease(_)) => true,
        None => false,
    }
}

/// A hello's request and reply, each behind its length.
pub fn hello(data: &[u8]) -> bool {
    let Some((request, reply)) = pair::<v1::HelloRequest, v1::HelloReply>(data) else { return false };
    let Ok(hello) = Hello::check(&request, &reply) else { return false };
    assert!(hello.listeners.len() <= 256 && hello.session != 0);
    true
}

/// A lookup's reply, with its descriptor and proof.
pub fn lookup(data: &[u8]) -> bool {
    v1::LookupReply::decode(data).is_ok_and(|reply| one_lookup(&reply))
}

fn one_lookup(reply: &v1::LookupReply) -> bool {
    let Ok(lookup) = Lookup::from_message(reply) else { return false };
    assert_eq!(Lookup::from_message(&lookup.to_message()).as_ref(), Ok(&lookup));
    if let Lookup::Object(descriptor, _) = &lookup {
        let striping = &descriptor.striping;
        let components = 0..striping.width();
        let sum: u64 = components.clone().map(|component| striping.component_length(component)).sum();
        assert_eq!(sum, striping.size());
        assert!(components.into_iter().all(|component| Geometry::of(striping, component).is_ok()));
    }
    true
}

/// A list's request and reply, each behind its length.
pub fn list(data: &[u8]) -> bool {
    let Some((request, reply)) = pair::<v1::ListRequest, v1::ListReply>(data) else { return false };
    let Ok(page) = check_list_reply(&request, &reply) else { return false };
    let keys: Vec<_> = page.entries.iter().map(|entry| entry.sort_key()).collect();
    assert!(keys.is_sorted_by(|a, b| a < b) && keys.iter().all(|key| *key > request.after));
    assert!(page.next_after.is_none_or(|next| next > request.after));
    true
}

/// The request and reply that begin a put, each behind its length.
pub fn begin_put(data: &[u8]) -> bool {
    let Some((request, reply)) = pair::<v1::BeginPutRequest, v1::BeginPutReply>(data) else { return false };
    object_name(request.name.as_ref()) && check_begin_put_reply(&request, &reply).is_ok()
}

/// A watch's first request and a message that answers it, each behind its length.
pub fn watch(data: &[u8]) -> bool {
    let Some((request, reply)) = pair::<v1::WatchRequest, v1::WatchReply>(data) else { return false };
    let Ok(page) = check_watch_reply(&request.prefix, request.from, &reply) else { return false };
    assert!(page.changes.is_sorted_by(|a, b| a.sequence < b.sequence));
    assert!(page.changes.iter().all(|change| change.sequence >= request.from && change.sequence < page.next));
    true
}

/// What a server says of itself: no text that comes through commands a terminal.
pub fn status(data: &[u8]) -> bool {
    let Ok(reply) =
        v1::StatusReply::decode(data).map_err(drop).and_then(|reply| check_status_reply(reply).map_err(drop))
    else {
        return false;
    };
    let texts = [&reply.node, &reply.software, &reply.publishing].into_iter().chain(&reply.degraded);
    let texts = texts.chain(reply.counters.iter().map(|counter| &counter.name));
    let texts = texts.chain(reply.directories.iter().flat_map(|place| [&place.path, &place.state, &place.reason]));
    assert!(texts.into_iter().all(|text| !text.contains(char::is_control)));
    true
}

/// A word of a slot as it was READ from a server's memory, and the incarnation that is expected.
pub fn slot(data: &[u8]) -> bool {
    let Some((word, rest)) = data.split_first_chunk::<8>() else { return false };
    let Some((incarnation, _)) = rest.split_first_chunk::<8>() else { return false };
    let (word, incarnation) = (u64::from_le_bytes(*word), u64::from_le_bytes(*incarnation));
    let Some(slot) = Slot::decode(word, incarnation) else { return false };
    assert_eq!(slot.encode(incarnation), word);
    // What a lookup hands out is this word, or one with nothing under way: never taken for the other.
    assert!(slot.in_progress == 0 || slot.quiet() != slot);
    true
}

/// The first 4 KiB of a component file.
pub fn component_header(data: &[u8]) -> bool {
    let Some((bytes, _)) = data.split_first_chunk::<BLOCK>() else { return false };
    let mut repaired = *bytes;
    let check = xxh3_64(&bytes[..BLOCK - 8]);
    repaired[BLOCK - 8..].copy_from_slice(&check.to_le_bytes());
    one_component_header(&repaired);
    one_component_header(bytes)
}

fn one_component_header(bytes: &[u8; BLOCK]) -> bool {
    let Ok(header) = Header::decode(bytes) else { return false };
    assert_eq!(Header::decode(&header.encode()).as_ref(), Ok(&header));
    let geometry = header.geometry().unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(geometry.length(), header.length());
    assert_eq!(geometry.page(geometry.pages()), None);
    let name = header.file_name();
    assert_eq!(FileName::parse(name.to_string().as_bytes()), Ok(name));
    if let KeptKey::Whole(key) = &header.key {
        assert!(header.key.is_of(key));
    }
    true
}

/// Version, component, block number, and the block of a checksum table that should be there.
pub fn component_table(data: &[u8]) -> bool {
    let Some((id, rest)) = data.split_first_chunk::<20>() else { return false };
    let Some((bytes, _)) = rest.split_first_chunk::<BLOCK>() else { return false };
    let long = |at: usize| id[at..at + 8].iter().rev().fold(0u64, |value, &byte| value << 8 | u64::from(byte));
    let id =
        BlockId { version: long(0), component: u32::from_le_bytes([id[8], id[9], id[10], id[11]]), block: long(12) };
    let sums: Vec<u64> = bytes.as_chunks().0.iter().take(SUMS_PER_BLOCK).map(|sum| u64::from_le_bytes(*sum)).collect();
    let repaired = TableBlock::encode(id, &sums).unwrap_or_else(|error| panic!("{error}"));
    let block = TableBlock::decode(id, &repaired).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(block.sums()[..], sums[..]);
    let accepted = TableBlock::decode(id, bytes).is_ok();
    assert_eq!(accepted, repaired == *bytes);
    accepted
}

/// The store that seeds of the log belong to.
pub const STORE: Id = Id([0x5a; 16]);

/// A whole segment of the log.
pub fn log_segment(data: &[u8]) -> bool {
    // Garbage behind records that count must not take them away, and never counts itself.
    let first = v1::Record { sequence: 1, incarnation: 1, ..Default::default() };
    let mut bytes = SegmentHeader { store: STORE, epoch: 1, first: 1 }.encode();
    let appended = logfile::append_record(&mut bytes, logfile::record_seed(STORE, 1), 0, &first);
    assert_eq!(appended, Ok(()));
    bytes.extend_from_slice(data);
    let scan = logfile::scan(&bytes, logfile::record_seed(STORE, 1), 1);
    assert_eq!(scan.records.first().map(|found| &found.record), Some(&first));

    // The fuzzer's record with its checksums made right is read back.
    if let Ok(record) = v1::Record::decode(data) {
        let mut bytes = Vec::new();
        if logfile::append_record(&mut bytes, 7, 3, &record).is_ok() {
            let found =
                logfile::record_at(&bytes, 0, 7).unwrap_or_else(|| panic!("a record that was written is not found"));
            assert_eq!((found.record, found.end), (record, bytes.len()));
        }
    }

    let Ok(header) = SegmentHeader::decode(data) else { return false };
    assert_eq!(SegmentHeader::decode(&header.encode()), Ok(header));
    let scan = logfile::scan(data, logfile::record_seed(header.store, header.epoch), header.first);
    assert!(scan.end <= data.len());
    !scan.records.is_empty() && scan.rest == Rest::Clean
}

/// A checkpoint of the log. The first block and the header are tried with their checksums made right, too.
pub fn log_checkpoint(data: &[u8]) -> bool {
    let accepted = one_checkpoint(data);
    if let Some(body) = data.get(CHECKPOINT_HEADER + BLOCK_HEAD..)
        && let Ok(block) = v1::CheckpointBlock::decode(body)
    {
        let id = CheckpointId { store: Id([5; 16]), epoch: 1, sequence: 9 };
        let mut bytes = Vec::new();
        if checkpoint::append_block(&mut bytes, &id, 0, &block).is_ok() {
            let length = (CHECKPOINT_HEADER + bytes.len()) as u64;
            let header = CheckpointHeader { id, last_check: 1, blocks: 1, length };
            assert_eq!(checkpoint::block_size(&block), bytes.len());
            let whole = [header.encode(), bytes].concat();
            if let Ok((read, entries)) = checkpoint::decode_checkpoint(&whole) {
                assert_eq!((read, &entries), (header, &block.entries));
            }
        }
    }
    accepted
}

fn one_checkpoint(data: &[u8]) -> bool {
    let Ok((header, _)) = checkpoint::decode_checkpoint(data) else { return false };
    assert_eq!(CheckpointHeader::decode(&header.encode()), Ok(header));
    assert_eq!(header.length, data.len() as u64);
    true
}

/// The identity marker of a stripe directory.
pub fn log_marker(data: &[u8]) -> bool {
    // Its head is magic, format, length, checksum: 24 bytes.
    if let Some(body) = data.get(24..) {
        let mut repaired = data.to_vec();
        repaired[12..16].copy_from_slice(&(body.len() as u32).to_le_bytes());
        repaired[16..24].copy_from_slice(&xxh3_64(body).to_le_bytes());
        one_marker(&repaired);
    }
    one_marker(data)
}

fn one_marker(data: &[u8]) -> bool {
    let Ok(marker) = logfile::decode_marker(data) else { return false };
    assert_eq!(logfile::encode_marker(&marker).and_then(|bytes| logfile::decode_marker(&bytes)), Ok(marker));
    true
}

/// A URL.
pub fn url(data: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(data) else { return false };
    match Url::parse(text) {
        Ok(url) => {
            assert_eq!(Url::parse(&url.to_string()), Ok(url));
            true
        }
        Err(error) => {
            assert!(error.at <= text.len() && !error.to_string().is_empty());
            false
        }
    }
}

/// A namespace, a line break, a key; the same bytes as the name of a component file.
pub fn name(data: &[u8]) -> bool {
    if let Ok(name) = FileName::parse(data) {
        assert_eq!(name.to_string().as_bytes(), data);
    }
    assert!(!Escaped(data).to_string().bytes().any(|byte| byte < b' '));
    let Some(at) = data.iter().position(|&byte| byte == b'\n') else { return false };
    let Ok(namespace) = std::str::from_utf8(&data[..at]) else { return false };
    let (Ok(namespace), Ok(key)) = (Namespace::new(namespace), Key::new(data[at + 1..].to_vec())) else { return false };
    assert_eq!(key.ancestors().count() + 1, key.parts().count());
    match key.parent() {
        Some(parent) => assert_eq!(parent.join(key.last_part()).as_ref(), Ok(&key)),
        None => assert_eq!(Key::from_part(key.last_part()).as_ref(), Ok(&key)),
    }
    object_name(Some(&ObjectName { namespace, key }.to_message()))
}

fn object_name(message: Option<&v1::Name>) -> bool {
    let Ok(name) = ObjectName::from_message(message) else { return false };
    assert_eq!(ObjectName::from_message(Some(&name.to_message())), Ok(name));
    true
}

/// A size or a time as people write it.
pub fn parse_units(data: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(data) else { return false };
    let (size, time) = (units::parse_size(text), units::parse_duration(text));
    if let Ok(size) = size {
        assert_eq!(units::parse_size(&units::format_size(size)), Ok(size));
    }
    if let Ok(time) = time {
        assert_eq!(units::parse_duration(&units::format_duration(time)), Ok(time));
    }
    size.is_ok() || time.is_ok()
}

fn pair<A: Message + Default, B: Message + Default>(mut data: &[u8]) -> Option<(A, B)> {
    Some((A::decode_length_delimited(&mut data).ok()?, B::decode_length_delimited(&mut data).ok()?))
}
