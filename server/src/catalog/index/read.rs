//! Reading the index: lookups, lists by seeking, standings.

use super::IndexError;
use super::tables::{NAMESPACES, NUMBERS, OBJECTS, Past, SUPERSEDED, VERSIONS, stored_name};
use crate::catalog::keys::{Folding, behind, behind_directory, in_namespace, key_of};
use crate::catalog::{Counts, Entry, List, Looked, Page, Standing, Time};
use prost::Message;
use railfs_proto::descriptor::Descriptor;
use railfs_proto::limits::MAX_LIST;
use railfs_proto::name::{Namespace, ObjectName};
use railfs_proto::v1;
use redb::{ReadOnlyTable, ReadTransaction, ReadableTable, ReadableTableMetadata};

/// One state of the index.
pub(crate) struct Reader {
    objects: ReadOnlyTable<&'static [u8], &'static [u8]>,
    namespaces: ReadOnlyTable<&'static str, (i64, u32)>,
    versions: ReadOnlyTable<u64, &'static [u8]>,
    superseded: ReadOnlyTable<u64, Past>,
    numbers: ReadOnlyTable<&'static str, u64>,
}

impl Reader {
    pub(super) fn open(transaction: &ReadTransaction) -> Result<Reader, IndexError> {
        Ok(Reader {
            objects: transaction.open_table(OBJECTS)?,
            namespaces: transaction.open_table(NAMESPACES)?,
            versions: transaction.open_table(VERSIONS)?,
            superseded: transaction.open_table(SUPERSEDED)?,
            numbers: transaction.open_table(NUMBERS)?,
        })
    }

    /// The sequence number of the last record that this state has seen.
    pub(crate) fn revision(&self) -> Result<u64, IndexError> {
        Ok(ReadableTable::get(&self.numbers, "sequence")?.map_or(0, |value| value.value()))
    }

    pub(crate) fn lookup(&self, name: &ObjectName) -> Result<Looked, IndexError> {
        let key = key_of(name);
        let object = ReadableTable::get(&self.objects, key.as_slice())?;
        let object = object.map(|value| decode_descriptor(value.value())).transpose()?;
        let (start, end) = directory_range(&key);
        let below = ReadableTable::range(&self.objects, start.as_slice()..end.as_slice())?.next().transpose()?;
        Ok(Looked {
            object,
            directory: below.is_some(),
            namespace_mtime: self.namespace(&name.namespace)?,
            revision: self.revision()?,
        })
    }

    fn namespace(&self, namespace: &Namespace) -> Result<Option<Time>, IndexError> {
        let value = ReadableTable::get(&self.namespaces, namespace.as_str())?;
        Ok(value.map(|value| {
            let (seconds, nanoseconds) = value.value();
            Time { seconds, nanoseconds }
        }))
    }

    /// Seeks behind every directory it has named: what lies below is never read.
    pub(crate) fn list(&self, list: &List) -> Result<Page, IndexError> {
        let base = in_namespace(&list.namespace, b"");
        let place = |key: &[u8]| in_namespace(&list.namespace, key);
        let folding = Folding { prefix: &list.prefix, delimited: list.delimited };
        let limit = list.limit.clamp(1, usize::try_from(MAX_LIST).unwrap_or(usize::MAX));
        let mut start = place(&folding.start(&list.after));
        // The base ends in a zero byte, so something lies behind every prefix.
        let end = behind(&place(&list.prefix)).unwrap_or_default();
        let mut entries = Vec::new();
        let mut last = Vec::new();
        let mut more = false;
        'seek: while start < end {
            for item in ReadableTable::range(&self.objects, start.as_slice()..end.as_slice())? {
                let (key, value) = item?;
                let key = key.value().get(base.len()..).unwrap_or_default();
                if entries.len() == limit {
                    more = true;
                    break 'seek;
                }
                if let Some(directory) = folding.directory(key) {
                    last = directory.to_vec();
                    entries.push(Entry::Directory { key: directory[..directory.len() - 1].to_vec() });
                    start = place(&behind_directory(directory));
                    continue 'seek;
                }
                last = key.to_vec();
                entries.push(Entry::Object { key: key.to_vec(), descriptor: decode_descriptor(value.value())? });
            }
            break;
        }
        Ok(Page {
            entries,
            next_after: more.then_some(last),
            namespace_mtime: self.namespace(&list.namespace)?,
            revision: self.revision()?,
        })
    }

    pub(crate) fn standing(&self, version: u64) -> Result<Option<Standing>, IndexError> {
        if let Some(key) = ReadableTable::get(&self.versions, version)? {
            let key = key.value();
            let value = ReadableTable::get(&self.objects, key)?;
            let value = value.ok_or_else(|| IndexError(format!("version {version} has no object in it")))?;
            let descriptor = decode_descriptor(value.value())?;
            return Ok(Some(Standing { name: stored_name(key)?, descriptor, superseded: None }));
        }
        let past = ReadableTable::get(&self.superseded, version)?;
        past.map(|past| standing_of(past.value())).transpose()
    }

    /// Current and superseded versions above `after`, in order, at most `limit`.
    pub(crate) fn versions(&self, after: u64, limit: usize) -> Result<Vec<Standing>, IndexError> {
        let Some(start) = after.checked_add(1) else { return Ok(Vec::new()) };
        let mut versions = Vec::new();
        for item in ReadableTable::range(&self.versions, start..)?.take(limit) {
            versions.push(item?.0.value());
        }
        for item in ReadableTable::range(&self.superseded, start..)?.take(limit) {
            versions.push(item?.0.value());
        }
        versions.sort_unstable();
        versions.truncate(limit);
        let standing = |version: u64| {
            let standing = self.standing(version)?;
            standing.ok_or_else(|| IndexError(format!("version {version} is listed and not there")))
        };
        versions.into_iter().map(standing).collect()
    }

    pub(crate) fn superseded(&self, after: u64, limit: usize) -> Result<Vec<Standing>, IndexError> {
        let Some(start) = after.checked_add(1) else { return Ok(Vec::new()) };
        let range = ReadableTable::range(&self.superseded, start..)?;
        range.take(limit).map(|item| standing_of(item?.1.value())).collect()
    }

    pub(crate) fn counts(&self) -> Result<Counts, IndexError> {
        Ok(Counts {
            objects: self.objects.len()?,
            superseded: self.superseded.len()?,
            namespaces: self.namespaces.len()?,
            sequence: self.revision()?,
        })
    }
}

fn standing_of((seconds, nanoseconds, key, descriptor): (i64, u32, &[u8], &[u8])) -> Result<Standing, IndexError> {
    Ok(Standing {
        name: stored_name(key)?,
        descriptor: decode_descriptor(descriptor)?,
        superseded: Some(Time { seconds, nanoseconds }),
    })
}

/// The keys below the name with this key: from its `/` up to the byte behind it.
pub(super) fn directory_range(key: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let mut start = key.to_vec();
    start.push(b'/');
    let end = behind_directory(&start);
    (start, end)
}

pub(super) fn decode_descriptor(bytes: &[u8]) -> Result<Descriptor, IndexError> {
    let message = v1::Descriptor::decode(bytes).map_err(|error| IndexError(error.to_string()))?;
    Descriptor::from_message(&message).map_err(|error| IndexError(error.to_string()))
}
