//! The index as the entries of a checkpoint, and back: what was written out gives the same index again.

use super::IndexError;
use super::tables::{
    DELETE, Done, Kept, NAMESPACES, NUMBERS, OBJECTS, PUT, Past, REQUESTS, SUPERSEDED, TOMBSTONES, Tables, kept_of,
    stored_name,
};
use crate::catalog::RequestId;
use crate::catalog::growth::{FORGET, tombstone_needed};
use crate::catalog::keys::key_of;
use bytes::Bytes;
use prost::Message;
use railfs_proto::descriptor::Descriptor;
use railfs_proto::name::{Namespace, ObjectName};
use railfs_proto::v1::{
    self, CheckpointEntry, CheckpointNamespace, CheckpointObject, CheckpointRequest, CheckpointState, CheckpointTime,
    CheckpointTombstone, checkpoint_entry::Body,
};
use redb::{ReadOnlyTable, ReadTransaction, ReadableTable};
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

/// One state of the whole index, whatever is committed meanwhile.
pub(crate) struct Snapshot {
    objects: ReadOnlyTable<&'static [u8], &'static [u8]>,
    tombstones: ReadOnlyTable<&'static [u8], u64>,
    namespaces: ReadOnlyTable<&'static str, (i64, u32)>,
    superseded: ReadOnlyTable<u64, Past>,
    requests: ReadOnlyTable<&'static [u8; 16], Done>,
    numbers: ReadOnlyTable<&'static str, u64>,
}

/// A tombstone that is not needed any more: the key of its name, and its version.
pub(crate) type Forgotten = (Vec<u8>, u64);

impl Snapshot {
    pub(super) fn open(transaction: &ReadTransaction) -> Result<Snapshot, IndexError> {
        Ok(Snapshot {
            objects: transaction.open_table(OBJECTS)?,
            tombstones: transaction.open_table(TOMBSTONES)?,
            namespaces: transaction.open_table(NAMESPACES)?,
            superseded: transaction.open_table(SUPERSEDED)?,
            requests: transaction.open_table(REQUESTS)?,
            numbers: transaction.open_table(NUMBERS)?,
        })
    }

    pub(crate) fn kept(&self) -> Result<Kept, IndexError> {
        kept_of(|name| Ok(ReadableTable::get(&self.numbers, name)?.map_or(0, |value| value.value())))
    }

    /// Every entry of a checkpoint of this state, always in the same order. `before`: versions up to this one were reserved
    /// before this run. Gives the tombstones that were left out.
    pub(crate) fn entries<E: From<IndexError>>(
        &self,
        before: u64,
        visit: &mut dyn FnMut(CheckpointEntry) -> Result<(), E>,
    ) -> Result<Vec<Forgotten>, E> {
        let mut give = |body| visit(CheckpointEntry { body: Some(body) });
        let Kept { incarnation, reserved, stopped, verbs, lease_milliseconds, .. } = self.kept()?;
        give(Body::State(CheckpointState { incarnation, stopped, verbs, lease_milliseconds, reserved }))?;
        for item in self.namespaces.iter().map_err(IndexError::from)? {
            let (name, changed) = item.map_err(IndexError::from)?;
            let changed = Some(time_message(changed.value()));
            give(Body::Namespace(CheckpointNamespace { name: name.value().to_owned(), changed }))?;
        }
        for item in self.objects.iter().map_err(IndexError::from)? {
            let (key, value) = item.map_err(IndexError::from)?;
            give(Body::Object(object(key.value(), value.value(), None)?))?;
        }
        let mut with_files = HashSet::new();
        for item in self.superseded.iter().map_err(IndexError::from)? {
            let (_, value) = item.map_err(IndexError::from)?;
            let (seconds, nanoseconds, key, descriptor) = value.value();
            with_files.insert(hash(key));
            give(Body::Object(object(key, descriptor, Some(time_message((seconds, nanoseconds))))?))?;
        }
        let mut forgotten = Vec::new();
        for item in self.tombstones.iter().map_err(IndexError::from)? {
            let (key, version) = item.map_err(IndexError::from)?;
            let (key, version) = (key.value(), version.value());
            // Two names with one hash: a tombstone is kept that need not be.
            if !tombstone_needed(version, before, with_files.contains(&hash(key))) && forgotten.len() < FORGET {
                forgotten.push((key.to_vec(), version));
                continue;
            }
            let name = Some(stored_name(key)?.to_message());
            give(Body::Tombstone(CheckpointTombstone { name, version }))?;
        }
        for item in self.requests.iter().map_err(IndexError::from)? {
            let (request, done) = item.map_err(IndexError::from)?;
            let (sequence, kind, version, other, key) = done.value();
            give(Body::Request(CheckpointRequest {
                request: Bytes::copy_from_slice(request.value()),
                sequence,
                name: Some(stored_name(key)?.to_message()),
                version,
                other,
                deleted: kind == DELETE,
            }))?;
        }
        Ok(forgotten)
    }
}

fn object(key: &[u8], descriptor: &[u8], superseded: Option<CheckpointTime>) -> Result<CheckpointObject, IndexError> {
    let descriptor = v1::Descriptor::decode(descriptor).map_err(|error| IndexError(error.to_string()))?;
    Ok(CheckpointObject { name: Some(stored_name(key)?.to_message()), descriptor: Some(descriptor), superseded })
}

fn time_message((seconds, nanoseconds): (i64, u32)) -> CheckpointTime {
    CheckpointTime { seconds, nanoseconds }
}

fn hash(key: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    hasher.finish()
}

impl Tables<'_> {
    /// Puts an entry of a checkpoint into the index, which holds nothing but such entries yet.
    pub(crate) fn restore(&mut self, entry: &CheckpointEntry) -> Result<(), IndexError> {
        let bad = |why: String| IndexError(format!("an entry of the checkpoint makes no sense: {why}"));
        let name = |name: Option<&v1::Name>| ObjectName::from_message(name).map_err(|error| bad(error.to_string()));
        let time = |time: Option<&CheckpointTime>| time.map_or((0, 0), |time| (time.seconds, time.nanoseconds));
        match &entry.body {
            Some(Body::State(state)) => {
                self.set_number("incarnation", state.incarnation)?;
                self.set_number("stopped", u64::from(state.stopped))?;
                self.set_number("verbs", u64::from(state.verbs))?;
                self.set_number("lease", u64::from(state.lease_milliseconds))?;
                self.set_number("reserved", state.reserved)?;
            }
            Some(Body::Namespace(namespace)) => {
                let name = Namespace::new(&namespace.name).map_err(|error| bad(error.to_string()))?;
                self.namespaces.insert(name.as_str(), time(namespace.changed.as_ref()))?;
            }
            Some(Body::Object(object)) => {
                let key = key_of(&name(object.name.as_ref())?);
                let message = object.descriptor.as_ref().ok_or_else(|| bad("no descriptor".to_owned()))?;
                let version = Descriptor::from_message(message).map_err(|error| bad(error.to_string()))?.version;
                let bytes = message.encode_to_vec();
                match &object.superseded {
                    None => {
                        self.objects.insert(key.as_slice(), bytes.as_slice())?;
                        self.versions.insert(version, key.as_slice())?;
                    }
                    Some(when) => {
                        let value = (when.seconds, when.nanoseconds, key.as_slice(), bytes.as_slice());
                        self.superseded.insert(version, value)?;
                    }
                }
            }
            Some(Body::Tombstone(tombstone)) => {
                let key = key_of(&name(tombstone.name.as_ref())?);
                self.tombstones.insert(key.as_slice(), tombstone.version)?;
            }
            Some(Body::Request(done)) => {
                let request = RequestId::try_from(&done.request[..]).map_err(|_| bad("a request id".to_owned()))?;
                let key = key_of(&name(done.name.as_ref())?);
                let kind = if done.deleted { DELETE } else { PUT };
                let value = (done.sequence, kind, done.version, done.other, key.as_slice());
                self.requests.insert(&request, value)?;
                self.request_order.insert(done.sequence, &request)?;
            }
            None => return Err(bad("it is of a kind that this version does not know".to_owned())),
        }
        Ok(())
    }

    /// Takes these tombstones away, where they are still the ones that were meant.
    pub(crate) fn forget(&mut self, tombstones: &[Forgotten]) -> Result<(), IndexError> {
        for (key, version) in tombstones {
            let there = self.tombstones.get(key.as_slice())?.map(|value| value.value());
            if there == Some(*version) {
                self.tombstones.remove(key.as_slice())?;
            }
        }
        Ok(())
    }
}
