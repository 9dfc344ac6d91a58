//! What a record does to the index, and whether a put or delete may become a record.

use super::IndexError;
use super::read::{decode_descriptor, directory_range};
use crate::catalog::keys::{key_of, name_of};
use crate::catalog::{Condition, Conflict, Delete, DeleteOutcome, Put, PutOutcome, Refusal, RequestId, Time};
use bytes::Bytes;
use prost::Message;
use railfs_proto::descriptor::Descriptor;
use railfs_proto::limits::LAST_UNUSED_VERSION;
use railfs_proto::name::ObjectName;
use railfs_proto::v1::{self, DeleteRecord, PutRecord, Record, record::Body};
use redb::{ReadableTable, ReadableTableMetadata, Table, TableDefinition, WriteTransaction};

type BytesTable<'t, K, V> = Table<'t, K, V>;
/// What was done under a request id: sequence number, kind, version, the other version, key of the name.
pub(super) type Done = (u64, u8, u64, u64, &'static [u8]);
/// When it stopped being current, key of the name, descriptor.
pub(super) type Past = (i64, u32, &'static [u8], &'static [u8]);

pub(super) const OBJECTS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("objects");
pub(super) const TOMBSTONES: TableDefinition<'_, &[u8], u64> = TableDefinition::new("tombstones");
pub(super) const NAMESPACES: TableDefinition<'_, &str, (i64, u32)> = TableDefinition::new("namespaces");
pub(super) const VERSIONS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("versions");
pub(super) const SUPERSEDED: TableDefinition<'_, u64, Past> = TableDefinition::new("superseded");
pub(super) const REQUESTS: TableDefinition<'_, &[u8; 16], Done> = TableDefinition::new("requests");
pub(super) const REQUEST_ORDER: TableDefinition<'_, u64, &[u8; 16]> = TableDefinition::new("request_order");
pub(super) const NUMBERS: TableDefinition<'_, &str, u64> = TableDefinition::new("numbers");

pub(super) const PUT: u8 = 1;
pub(super) const DELETE: u8 = 2;

/// What the index knows of the log as a whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kept {
    /// The last record applied, and its checksum.
    pub(crate) sequence: u64,
    pub(crate) check: u64,
    /// The last run.
    pub(crate) incarnation: u64,
    /// Versions up to this one may have been handed out.
    pub(crate) reserved: u64,
    /// The last run ended cleanly.
    pub(crate) stopped: bool,
    /// The last run had a verbs rail.
    pub(crate) verbs: bool,
    /// The last run's lease.
    pub(crate) lease_milliseconds: u32,
}

/// What is to become of a put or delete.
#[derive(Debug)]
pub(crate) enum Verdict<T> {
    /// Nothing is to be recorded.
    Answer(T),
    /// This is to be recorded; then that is the answer.
    Record(Body, T),
    /// It may not be.
    Refuse(Refusal),
}

/// The tables, open for writing.
pub(crate) struct Tables<'t> {
    pub(super) objects: BytesTable<'t, &'static [u8], &'static [u8]>,
    pub(super) tombstones: Table<'t, &'static [u8], u64>,
    pub(super) namespaces: Table<'t, &'static str, (i64, u32)>,
    pub(super) versions: Table<'t, u64, &'static [u8]>,
    pub(super) superseded: Table<'t, u64, Past>,
    pub(super) requests: Table<'t, &'static [u8; 16], Done>,
    pub(super) request_order: Table<'t, u64, &'static [u8; 16]>,
    numbers: Table<'t, &'static str, u64>,
}

impl<'t> Tables<'t> {
    pub(crate) fn open(transaction: &'t WriteTransaction) -> Result<Tables<'t>, IndexError> {
        Ok(Tables {
            objects: transaction.open_table(OBJECTS)?,
            tombstones: transaction.open_table(TOMBSTONES)?,
            namespaces: transaction.open_table(NAMESPACES)?,
            versions: transaction.open_table(VERSIONS)?,
            superseded: transaction.open_table(SUPERSEDED)?,
            requests: transaction.open_table(REQUESTS)?,
            request_order: transaction.open_table(REQUEST_ORDER)?,
            numbers: transaction.open_table(NUMBERS)?,
        })
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<u64>, IndexError> {
        Ok(self.numbers.get(name)?.map(|value| value.value()))
    }

    pub(super) fn set_number(&mut self, name: &str, value: u64) -> Result<(), IndexError> {
        self.numbers.insert(name, value)?;
        Ok(())
    }

    pub(crate) fn kept(&self) -> Result<Kept, IndexError> {
        kept_of(|name| Ok(self.number(name)?.unwrap_or(0)))
    }

    /// All records up to this one have been applied.
    pub(crate) fn set_applied(&mut self, sequence: u64, check: u64) -> Result<(), IndexError> {
        self.set_number("sequence", sequence)?;
        self.set_number("check", check)
    }

    /// Whether a put may be recorded now.
    pub(crate) fn judge_put(&self, put: &Put, reserved: u64) -> Result<Verdict<PutOutcome>, IndexError> {
        let key = key_of(&put.name);
        let version = put.descriptor.version;
        if let Some(done) = self.requests.get(&put.request)? {
            let (_, kind, made, other, name) = done.value();
            let replaced = (other != 0).then_some(other);
            return Ok(match (kind, name == key) {
                (PUT, true) => Verdict::Answer(PutOutcome::Committed { version: made, replaced }),
                _ => Verdict::Refuse(Refusal::RequestReused(hex(&put.request))),
            });
        }
        if version <= LAST_UNUSED_VERSION || version > reserved {
            return Ok(Verdict::Refuse(Refusal::Version { version, reserved }));
        }
        let current = self.current(&key)?;
        let newest = current.max(self.tombstone(&key)?);
        if newest >= Some(version) {
            // Older than what is there: ordered just before it, unless that contradicts a condition.
            return Ok(Verdict::Answer(match (put.condition, newest) {
                (Condition::Always, _) if current == Some(version) => PutOutcome::Committed { version, replaced: None },
                (Condition::Always, Some(by)) => PutOutcome::Superseded { by },
                _ => PutOutcome::Conflict(Conflict::Version { current }),
            }));
        }
        if !put.condition.holds(current) {
            return Ok(Verdict::Answer(PutOutcome::Conflict(Conflict::Version { current })));
        }
        if self.has_below(&key)? {
            return Ok(Verdict::Answer(PutOutcome::Conflict(Conflict::IsDirectory)));
        }
        for ancestor in put.name.key.ancestors() {
            let object = ObjectName { namespace: put.name.namespace.clone(), key: ancestor };
            if self.current(&key_of(&object))?.is_some() {
                return Ok(Verdict::Answer(PutOutcome::Conflict(Conflict::NotADirectory { object })));
            }
        }
        let record = PutRecord {
            name: Some(put.name.to_message()),
            request: Bytes::copy_from_slice(&put.request),
            descriptor: Some(put.descriptor.to_message()),
        };
        Ok(Verdict::Record(Body::Put(record), PutOutcome::Committed { version, replaced: current }))
    }

    /// Whether a delete may be recorded now.
    pub(crate) fn judge_delete(&self, delete: &Delete, reserved: u64) -> Result<Verdict<DeleteOutcome>, IndexError> {
        let key = key_of(&delete.name);
        let version = delete.version;
        if let Some(done) = self.requests.get(&delete.request)? {
            let (_, kind, version, deleted, name) = done.value();
            return Ok(match (kind, name == key) {
                (DELETE, true) => Verdict::Answer(DeleteOutcome::Deleted { deleted, version }),
                _ => Verdict::Refuse(Refusal::RequestReused(hex(&delete.request))),
            });
        }
        if version <= LAST_UNUSED_VERSION || version > reserved {
            return Ok(Verdict::Refuse(Refusal::Version { version, reserved }));
        }
        let current = self.current(&key)?;
        if delete.condition != Condition::Always && !delete.condition.holds(current) {
            return Ok(Verdict::Answer(DeleteOutcome::Conflict(Conflict::Version { current })));
        }
        let Some(deleted) = current else { return Ok(Verdict::Answer(DeleteOutcome::NotFound)) };
        if deleted >= version {
            return Ok(Verdict::Answer(match delete.condition {
                Condition::Always => DeleteOutcome::Superseded { by: deleted },
                _ => DeleteOutcome::Conflict(Conflict::Version { current }),
            }));
        }
        let record = DeleteRecord {
            name: Some(delete.name.to_message()),
            request: Bytes::copy_from_slice(&delete.request),
            version,
            deleted,
        };
        Ok(Verdict::Record(Body::Delete(record), DeleteOutcome::Deleted { deleted, version }))
    }

    /// Which of these versions are superseded, and so may be recorded as reclaimed.
    pub(crate) fn reclaimable(&self, versions: &[u64]) -> Result<Vec<u64>, IndexError> {
        let mut there = Vec::new();
        for version in versions {
            if self.superseded.get(*version)?.is_some() {
                there.push(*version);
            }
        }
        Ok(there)
    }

    /// Does what the record says. At most `requests` request ids are kept.
    pub(crate) fn apply(&mut self, record: &Record, requests: u64) -> Result<(), IndexError> {
        let time = Time { seconds: record.time_seconds, nanoseconds: record.time_nanoseconds };
        let bad = |why: String| IndexError(format!("record {} makes no sense: {why}", record.sequence));
        match &record.body {
            Some(Body::Start(start)) => {
                self.set_number("incarnation", record.incarnation)?;
                self.set_number("stopped", 0)?;
                self.set_number("verbs", u64::from(start.verbs))?;
                self.set_number("lease", u64::from(start.lease_milliseconds))?;
            }
            Some(Body::Stop(_)) => self.set_number("stopped", 1)?,
            Some(Body::Reserve(reserve)) => self.raise_reserved(reserve.last)?,
            Some(Body::Put(put)) => {
                let name = ObjectName::from_message(put.name.as_ref()).map_err(|error| bad(error.to_string()))?;
                let message = put.descriptor.as_ref().ok_or_else(|| bad("no descriptor".to_owned()))?;
                let descriptor = Descriptor::from_message(message).map_err(|error| bad(error.to_string()))?;
                let replaced = self.put(&name, &descriptor, message, time)?;
                let done = (PUT, descriptor.version, replaced.unwrap_or(0));
                self.remember(record.sequence, &put.request, done, &name, requests)?;
            }
            Some(Body::Delete(delete)) => {
                let name = ObjectName::from_message(delete.name.as_ref()).map_err(|error| bad(error.to_string()))?;
                self.delete(&name, delete.version, time)?;
                let done = (DELETE, delete.version, delete.deleted);
                self.remember(record.sequence, &delete.request, done, &name, requests)?;
            }
            Some(Body::Reclaim(reclaim)) => {
                for version in &reclaim.versions {
                    self.superseded.remove(*version)?;
                }
            }
            None => return Err(bad("it is of a kind that this version does not know".to_owned())),
        }
        Ok(())
    }

    /// A put older than what is there, object or tombstone, changes nothing: what was deleted does not come back.
    fn put(
        &mut self,
        name: &ObjectName,
        descriptor: &Descriptor,
        message: &v1::Descriptor,
        time: Time,
    ) -> Result<Option<u64>, IndexError> {
        let (key, version) = (key_of(name), descriptor.version);
        self.raise_reserved(version)?;
        if self.current(&key)?.max(self.tombstone(&key)?) >= Some(version) {
            return Ok(None);
        }
        let replaced = self.supersede(&key, time)?;
        self.objects.insert(key.as_slice(), message.encode_to_vec().as_slice())?;
        self.versions.insert(version, key.as_slice())?;
        self.tombstones.remove(key.as_slice())?;
        self.touch(name, time)?;
        Ok(replaced)
    }

    fn delete(&mut self, name: &ObjectName, version: u64, time: Time) -> Result<(), IndexError> {
        let key = key_of(name);
        self.raise_reserved(version)?;
        if self.current(&key)? >= Some(version) {
            return Ok(());
        }
        self.supersede(&key, time)?;
        let newest = self.tombstone(&key)?.unwrap_or(0).max(version);
        self.tombstones.insert(key.as_slice(), newest)?;
        self.touch(name, time)
    }

    /// The version of the object under this key stops being current.
    fn supersede(&mut self, key: &[u8], time: Time) -> Result<Option<u64>, IndexError> {
        let Some(old) = self.objects.remove(key)?.map(|value| value.value().to_vec()) else { return Ok(None) };
        let version = decode_descriptor(&old)?.version;
        self.versions.remove(version)?;
        self.superseded.insert(version, (time.seconds, time.nanoseconds, key, old.as_slice()))?;
        Ok(Some(version))
    }

    /// The namespace's last commit: never goes back, whatever the wall clock does.
    fn touch(&mut self, name: &ObjectName, time: Time) -> Result<(), IndexError> {
        let namespace = name.namespace.as_str();
        let before = self.namespaces.get(namespace)?.map(|value| value.value());
        let now = (time.seconds, time.nanoseconds);
        self.namespaces.insert(namespace, before.map_or(now, |before| before.max(now)))?;
        Ok(())
    }

    fn remember(
        &mut self,
        sequence: u64,
        request: &[u8],
        (kind, version, other): (u8, u64, u64),
        name: &ObjectName,
        requests: u64,
    ) -> Result<(), IndexError> {
        let Ok(request) = RequestId::try_from(request) else { return Ok(()) };
        let key = key_of(name);
        if let Some(before) = self.requests.insert(&request, (sequence, kind, version, other, key.as_slice()))? {
            let sequence = before.value().0;
            drop(before);
            self.request_order.remove(sequence)?;
        }
        self.request_order.insert(sequence, &request)?;
        while self.request_order.len()? > requests {
            let Some(oldest) = self.request_order.pop_first()?.map(|(_, request)| *request.value()) else { break };
            self.requests.remove(&oldest)?;
        }
        Ok(())
    }

    fn raise_reserved(&mut self, last: u64) -> Result<(), IndexError> {
        let before = self.number("reserved")?.unwrap_or(0);
        self.set_number("reserved", before.max(last))
    }

    fn current(&self, key: &[u8]) -> Result<Option<u64>, IndexError> {
        let Some(value) = self.objects.get(key)? else { return Ok(None) };
        Ok(Some(decode_descriptor(value.value())?.version))
    }

    fn tombstone(&self, key: &[u8]) -> Result<Option<u64>, IndexError> {
        Ok(self.tombstones.get(key)?.map(|value| value.value()))
    }

    fn has_below(&self, key: &[u8]) -> Result<bool, IndexError> {
        let (start, end) = directory_range(key);
        Ok(self.objects.range(start.as_slice()..end.as_slice())?.next().transpose()?.is_some())
    }
}

/// From the numbers of the index, of which each that is not there is 0.
pub(super) fn kept_of(number: impl Fn(&'static str) -> Result<u64, IndexError>) -> Result<Kept, IndexError> {
    Ok(Kept {
        sequence: number("sequence")?,
        check: number("check")?,
        incarnation: number("incarnation")?,
        reserved: number("reserved")?.max(LAST_UNUSED_VERSION),
        stopped: number("stopped")? != 0,
        verbs: number("verbs")? != 0,
        lease_milliseconds: u32::try_from(number("lease")?).unwrap_or(u32::MAX),
    })
}

/// A name from the index, where only names were put.
pub(super) fn stored_name(key: &[u8]) -> Result<ObjectName, IndexError> {
    name_of(key).ok_or_else(|| IndexError("a key in it is not a name".to_owned()))
}

fn hex(request: &RequestId) -> String {
    request.iter().map(|byte| format!("{byte:02x}")).collect()
}
