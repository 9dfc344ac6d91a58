//! A second catalog, in memory and as simple as can be, for tests: with delays, refusals and unknown outcomes on
//! demand. It passes the same suite as the real one, and where the real one seeks this one looks at everything.

use super::{
    BoxFuture, Catalog, CatalogError, Change, Changes, ChangesAt, ChangesError, Condition, Conflict, Counts, Delete,
    DeleteOutcome, Done, Entry, List, Looked, Page, Put, PutOutcome, Refusal, RequestId, Standing, Time,
};
use railfs_proto::limits::LAST_UNUSED_VERSION;
use railfs_proto::name::ObjectName;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

/// What happens to the next put or delete.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// It is committed only after the second is notified; the first says that it has arrived.
    Delay(Arc<Notify>, Arc<Notify>),
    /// Known not to have happened.
    Refuse(Refusal),
    /// Unknown; it happened.
    UnknownDone,
    /// Unknown; it did not happen.
    UnknownLost,
}

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<ObjectName, super::Descriptor>,
    tombstones: HashMap<ObjectName, u64>,
    superseded: BTreeMap<u64, Standing>,
    puts: HashMap<RequestId, (ObjectName, PutOutcome)>,
    deletes: HashMap<RequestId, (ObjectName, DeleteOutcome)>,
    namespaces: BTreeMap<String, Time>,
    reserved: u64,
    revision: u64,
    seconds: i64,
    frozen: Option<String>,
    changes: Vec<Change>,
}

/// See the module's head.
#[derive(Debug, Default)]
pub(crate) struct MemoryCatalog {
    state: Mutex<State>,
    latest: tokio::sync::watch::Sender<u64>,
    faults: Mutex<VecDeque<Fault>>,
    /// Lookups give up the thread once before they answer.
    slow_reads: bool,
}

impl MemoryCatalog {
    pub(crate) fn new() -> Arc<MemoryCatalog> {
        let state = State { reserved: LAST_UNUSED_VERSION, ..State::default() };
        Arc::new(MemoryCatalog { state: Mutex::new(state), ..Default::default() })
    }

    pub(crate) fn with_slow_reads() -> Arc<MemoryCatalog> {
        let state = State { reserved: LAST_UNUSED_VERSION, ..State::default() };
        Arc::new(MemoryCatalog { state: Mutex::new(state), slow_reads: true, ..Default::default() })
    }

    /// Faults are used up in order, one by each put or delete.
    pub(crate) fn inject(&self, fault: Fault) {
        self.faults.lock().unwrap().push_back(fault);
    }

    async fn commit<T>(&self, apply: impl FnOnce(&mut State) -> Result<T, Refusal>) -> Result<T, CatalogError> {
        let fault = self.faults.lock().unwrap().pop_front();
        match fault {
            Some(Fault::Delay(arrived, go)) => {
                arrived.notify_one();
                go.notified().await;
            }
            Some(Fault::Refuse(refusal)) => return Err(refusal.into()),
            Some(Fault::UnknownDone) => {
                let mut state = self.state.lock().unwrap();
                let _ = apply(&mut state);
                state.frozen = Some("injected".to_owned());
                return Err(CatalogError::Unknown("injected".to_owned()));
            }
            Some(Fault::UnknownLost) => {
                self.state.lock().unwrap().frozen = Some("injected".to_owned());
                return Err(CatalogError::Unknown("injected".to_owned()));
            }
            None => {}
        }
        let mut state = self.state.lock().unwrap();
        if let Some(why) = &state.frozen {
            return Err(Refusal::Frozen(why.clone()).into());
        }
        let done = apply(&mut state)?;
        self.latest.send_replace(state.revision);
        Ok(done)
    }

    fn look(&self, name: &ObjectName) -> Looked {
        let state = self.state.lock().unwrap();
        Looked {
            object: state.objects.get(name).cloned(),
            directory: state.objects.keys().any(|other| below(other, name)),
            namespace_mtime: state.namespaces.get(name.namespace.as_str()).copied(),
            revision: state.revision,
        }
    }
}

fn below(other: &ObjectName, name: &ObjectName) -> bool {
    other.namespace == name.namespace
        && other.key.as_bytes().strip_prefix(name.key.as_bytes()).is_some_and(|rest| rest.starts_with(b"/"))
}

impl State {
    fn current(&self, name: &ObjectName) -> Option<u64> {
        self.objects.get(name).map(|descriptor| descriptor.version)
    }

    fn changed(&mut self, name: &ObjectName, done: Done) {
        self.revision += 1;
        self.seconds += 1;
        let time = Time { seconds: self.seconds, nanoseconds: 7 };
        self.namespaces.insert(name.namespace.to_string(), time);
        self.changes.push(Change { sequence: self.revision, time, name: name.clone(), done });
    }

    fn supersede(&mut self, name: &ObjectName) -> Option<u64> {
        let descriptor = self.objects.remove(name)?;
        let version = descriptor.version;
        let superseded = Some(Time { seconds: self.seconds, nanoseconds: 7 });
        self.superseded.insert(version, Standing { name: name.clone(), descriptor, superseded });
        Some(version)
    }

    fn check_version(&self, version: u64) -> Result<(), Refusal> {
        match version > LAST_UNUSED_VERSION && version <= self.reserved {
            true => Ok(()),
            false => Err(Refusal::Version { version, reserved: self.reserved }),
        }
    }

    fn put(&mut self, put: Put) -> Result<PutOutcome, Refusal> {
        if self.deletes.contains_key(&put.request) {
            return Err(Refusal::RequestReused(String::new()));
        }
        if let Some((name, outcome)) = self.puts.get(&put.request) {
            let same = *name == put.name;
            return if same { Ok(outcome.clone()) } else { Err(Refusal::RequestReused(String::new())) };
        }
        let version = put.descriptor.version;
        self.check_version(version)?;
        let current = self.current(&put.name);
        let newest = current.max(self.tombstones.get(&put.name).copied()).unwrap_or(0);
        if put.condition == Condition::Always && newest >= version {
            return Ok(match current == Some(version) {
                true => PutOutcome::Committed { version, replaced: None },
                false => PutOutcome::Superseded { by: newest },
            });
        }
        if newest >= version || !put.condition.holds(current) {
            return Ok(PutOutcome::Conflict(Conflict::Version { current }));
        }
        if self.objects.keys().any(|other| below(other, &put.name)) {
            return Ok(PutOutcome::Conflict(Conflict::IsDirectory));
        }
        let above = self.objects.keys().filter(|other| below(&put.name, other));
        if let Some(object) = above.max_by_key(|other| other.key.as_bytes().len()) {
            return Ok(PutOutcome::Conflict(Conflict::NotADirectory { object: object.clone() }));
        }
        let replaced = self.supersede(&put.name);
        self.changed(&put.name, Done::Put(put.descriptor.clone()));
        self.tombstones.remove(&put.name);
        self.objects.insert(put.name.clone(), put.descriptor);
        let outcome = PutOutcome::Committed { version, replaced };
        self.puts.insert(put.request, (put.name, outcome.clone()));
        Ok(outcome)
    }

    fn delete(&mut self, delete: Delete) -> Result<DeleteOutcome, Refusal> {
        if self.puts.contains_key(&delete.request) {
            return Err(Refusal::RequestReused(String::new()));
        }
        if let Some((name, outcome)) = self.deletes.get(&delete.request) {
            let same = *name == delete.name;
            return if same { Ok(outcome.clone()) } else { Err(Refusal::RequestReused(String::new())) };
        }
        self.check_version(delete.version)?;
        let current = self.current(&delete.name);
        if !delete.condition.holds(current) {
            return Ok(DeleteOutcome::Conflict(Conflict::Version { current }));
        }
        let Some(deleted) = current else { return Ok(DeleteOutcome::NotFound) };
        if deleted >= delete.version {
            return Ok(match delete.condition {
                Condition::Always => DeleteOutcome::Superseded { by: deleted },
                _ => DeleteOutcome::Conflict(Conflict::Version { current }),
            });
        }
        self.supersede(&delete.name);
        self.changed(&delete.name, Done::Delete { version: delete.version, deleted });
        self.tombstones.insert(delete.name.clone(), delete.version);
        let outcome = DeleteOutcome::Deleted { deleted, version: delete.version };
        self.deletes.insert(delete.request, (delete.name, outcome.clone()));
        Ok(outcome)
    }

    fn list(&self, list: &List) -> Page {
        let mut all: BTreeMap<Vec<u8>, Entry> = BTreeMap::new();
        for (name, descriptor) in self.objects.iter().filter(|(name, _)| name.namespace == list.namespace) {
            let key = name.key.as_bytes();
            let Some(rest) = key.strip_prefix(list.prefix.as_slice()) else { continue };
            match rest.iter().position(|&byte| byte == b'/').filter(|_| list.delimited) {
                Some(slash) => {
                    let directory = &key[..list.prefix.len() + slash];
                    all.insert([directory, b"/"].concat(), Entry::Directory { key: directory.to_vec() });
                }
                None => {
                    all.insert(key.to_vec(), Entry::Object { key: key.to_vec(), descriptor: descriptor.clone() });
                }
            }
        }
        let behind: Vec<_> = all
            .into_iter()
            .filter(|(sort, _)| sort.as_slice() > list.after.as_slice() || list.after.is_empty())
            .collect();
        let limit = list.limit.max(1);
        let next_after = (behind.len() > limit).then(|| behind[limit - 1].0.clone());
        Page {
            entries: behind.into_iter().take(limit).map(|(_, entry)| entry).collect(),
            next_after,
            namespace_mtime: self.namespaces.get(list.namespace.as_str()).copied(),
            revision: self.revision,
        }
    }
}

impl Catalog for MemoryCatalog {
    fn revision(&self) -> u64 {
        self.state.lock().unwrap().revision
    }

    fn lookup<'a>(&'a self, name: &'a ObjectName) -> BoxFuture<'a, Result<Looked, CatalogError>> {
        Box::pin(async move {
            let looked = self.look(name);
            if self.slow_reads {
                // What was read may be old by the time it is given.
                tokio::task::yield_now().await;
            }
            Ok(looked)
        })
    }

    fn try_lookup(&self, name: &ObjectName) -> Option<Result<Looked, CatalogError>> {
        (!self.slow_reads).then(|| Ok(self.look(name)))
    }

    fn list<'a>(&'a self, list: &'a List) -> BoxFuture<'a, Result<Page, CatalogError>> {
        Box::pin(async move { Ok(self.state.lock().unwrap().list(list)) })
    }

    fn commit_put(&self, put: Put) -> BoxFuture<'_, Result<PutOutcome, CatalogError>> {
        Box::pin(self.commit(move |state| state.put(put)))
    }

    fn delete(&self, delete: Delete) -> BoxFuture<'_, Result<DeleteOutcome, CatalogError>> {
        Box::pin(self.commit(move |state| state.delete(delete)))
    }

    fn reserve_versions(&self, count: u64) -> BoxFuture<'_, Result<RangeInclusive<u64>, CatalogError>> {
        Box::pin(async move {
            let mut state = self.state.lock().unwrap();
            let first = state.reserved + 1;
            state.reserved += count.max(1);
            Ok(first..=state.reserved)
        })
    }

    fn standing(&self, version: u64) -> BoxFuture<'_, Result<Option<Standing>, CatalogError>> {
        Box::pin(async move {
            let state = self.state.lock().unwrap();
            let current = state.objects.iter().find(|(_, descriptor)| descriptor.version == version);
            let current = current.map(|(name, descriptor)| Standing {
                name: name.clone(),
                descriptor: descriptor.clone(),
                superseded: None,
            });
            Ok(current.or_else(|| state.superseded.get(&version).cloned()))
        })
    }

    fn superseded(&self, after: u64, limit: usize) -> BoxFuture<'_, Result<Vec<Standing>, CatalogError>> {
        Box::pin(async move {
            let state = self.state.lock().unwrap();
            Ok(state.superseded.range(after + 1..).take(limit).map(|(_, standing)| standing.clone()).collect())
        })
    }

    fn reclaimed(&self, versions: Vec<u64>) -> BoxFuture<'_, Result<(), CatalogError>> {
        Box::pin(async move {
            let mut state = self.state.lock().unwrap();
            versions.iter().for_each(|version| drop(state.superseded.remove(version)));
            state.revision += 1;
            Ok(())
        })
    }

    fn changes(&self, at: ChangesAt, limit: usize) -> BoxFuture<'_, Result<Changes, ChangesError>> {
        Box::pin(async move {
            let state = self.state.lock().unwrap();
            let (oldest, latest) = (1, state.revision);
            if at.next > latest + 1 {
                return Err(ChangesError::Beyond { wanted: at.next, latest });
            }
            if at.next < oldest {
                return Err(ChangesError::TooOld { wanted: at.next, oldest });
            }
            let wanted = state.changes.iter().filter(|change| change.sequence >= at.next);
            let changes: Vec<Change> = wanted.take(limit).cloned().collect();
            let next = if changes.len() < limit { latest + 1 } else { changes[limit - 1].sequence + 1 };
            Ok(Changes { changes, at: ChangesAt { next, ..at }, oldest, latest })
        })
    }

    fn latest(&self) -> tokio::sync::watch::Receiver<u64> {
        self.latest.subscribe()
    }

    fn counts(&self) -> BoxFuture<'_, Result<Counts, CatalogError>> {
        Box::pin(async move {
            let state = self.state.lock().unwrap();
            Ok(Counts {
                objects: state.objects.len() as u64,
                superseded: state.superseded.len() as u64,
                namespaces: state.namespaces.len() as u64,
                sequence: state.revision,
            })
        })
    }

    fn frozen(&self) -> Option<String> {
        self.state.lock().unwrap().frozen.clone()
    }
}
