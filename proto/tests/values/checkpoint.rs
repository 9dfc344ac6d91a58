//! A checkpoint with one entry of each kind, in two blocks.

use super::{EPOCH, INCARNATION, STORE, VERSION, descriptor, name};
use railfs_proto::checkpoint::{CHECKPOINT_HEADER, CheckpointHeader, CheckpointId, append_block};
use railfs_proto::v1::{
    CheckpointBlock, CheckpointEntry, CheckpointNamespace, CheckpointObject, CheckpointRequest, CheckpointState,
    CheckpointTime, CheckpointTombstone, checkpoint_entry::Body,
};

pub const CHECKPOINT: CheckpointId = CheckpointId { store: STORE, epoch: EPOCH, sequence: 105 };

pub fn checkpoint_state() -> CheckpointState {
    CheckpointState {
        incarnation: INCARNATION,
        stopped: true,
        verbs: true,
        lease_milliseconds: 2000,
        reserved: VERSION + 1000,
    }
}

pub fn checkpoint_time() -> CheckpointTime {
    CheckpointTime { seconds: 1_767_225_604, nanoseconds: 8 }
}

pub fn checkpoint_object() -> CheckpointObject {
    CheckpointObject {
        name: Some(name().to_message()),
        descriptor: Some(descriptor().to_message()),
        superseded: Some(checkpoint_time()),
    }
}

pub fn checkpoint_tombstone() -> CheckpointTombstone {
    CheckpointTombstone { name: Some(name().to_message()), version: VERSION + 1 }
}

pub fn checkpoint_namespace() -> CheckpointNamespace {
    CheckpointNamespace { name: "photos-1".to_owned(), changed: Some(checkpoint_time()) }
}

pub fn checkpoint_request() -> CheckpointRequest {
    CheckpointRequest {
        request: vec![0x12; 16].into(),
        sequence: 103,
        name: Some(name().to_message()),
        version: VERSION + 1,
        other: VERSION,
        deleted: true,
    }
}

pub fn checkpoint_entries() -> Vec<(&'static str, CheckpointEntry)> {
    let current = CheckpointObject { superseded: None, ..checkpoint_object() };
    [
        ("CheckpointEntry-state", Body::State(checkpoint_state())),
        ("CheckpointEntry-current", Body::Object(current)),
        ("CheckpointEntry-superseded", Body::Object(checkpoint_object())),
        ("CheckpointEntry-tombstone", Body::Tombstone(checkpoint_tombstone())),
        ("CheckpointEntry-namespace", Body::Namespace(checkpoint_namespace())),
        ("CheckpointEntry-request", Body::Request(checkpoint_request())),
    ]
    .into_iter()
    .map(|(name, body)| (name, CheckpointEntry { body: Some(body) }))
    .collect()
}

pub fn checkpoint_blocks() -> Vec<CheckpointBlock> {
    let entries: Vec<_> = checkpoint_entries().into_iter().map(|(_, entry)| entry).collect();
    entries.chunks(4).map(|entries| CheckpointBlock { entries: entries.to_vec() }).collect()
}

pub fn checkpoint_file() -> Vec<u8> {
    let mut body = Vec::new();
    for (number, block) in (0..).zip(checkpoint_blocks()) {
        append_block(&mut body, &CHECKPOINT, number, &block).unwrap();
    }
    let length = (CHECKPOINT_HEADER + body.len()) as u64;
    let header = CheckpointHeader { id: CHECKPOINT, last_check: 0x1234_5678_9abc_def0, blocks: 2, length };
    [header.encode(), body].concat()
}
