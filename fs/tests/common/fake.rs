//! A store in memory behind the `Backend` trait: what it answers, and when, is up to the test.
//!
//! Guarantees: lists, lookups and checks agree with one map of names; versions count up and are never used again; a
//! version that was replaced is ESTALE for checks and checked reads, and for all reads once it is reclaimed, which what is
//! pinned is not.

#![allow(dead_code)] // Each test program uses its part.

use railfs_engine::client::{Done, Found, Freshness, ListEntry, ListQuery, Listing, Object, ReadReply, Status};
use railfs_engine::error::{Error, Result};
use railfs_proto::descriptor::{Attributes, Descriptor, Proof};
use railfs_proto::layout::Striping;
use railfs_proto::name::ObjectName;
use railfs_proto::v1::{DirectoryStatus, StatusReply};
use std::collections::{BTreeMap, HashMap};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};

type Job = Box<dyn FnOnce() + Send>;
type Contents = Arc<dyn Fn(u64, &mut [u8]) + Send + Sync>;

#[derive(Default)]
struct State {
    objects: BTreeMap<Vec<u8>, Descriptor>,
    contents: HashMap<u64, Contents>,
    last_version: u64,
    mtime: i64,
    /// Nobody wrote to the namespace yet.
    unwritten: bool,
    failing: Option<Error>,
    /// While set, answers wait here.
    held: Option<Vec<Job>>,
    /// Of these calls only.
    held_call: Option<&'static str>,
    /// How often a check is answered only after its object was replaced once more.
    overtaken: u64,
    calls: HashMap<&'static str, u64>,
    /// Reads of objects whose name ends in "hang": never answered.
    hanging: Vec<ReadReply>,
    released: Vec<u64>,
    /// Versions, and how often each is pinned.
    pins: HashMap<u64, u64>,
    /// No server keeps anything.
    pinless: bool,
}

/// The store.
pub struct Fake {
    state: Mutex<State>,
    worker: Option<Mutex<Sender<Job>>>,
}

impl Fake {
    /// Answers inside the call.
    pub fn new() -> Arc<Fake> {
        let state = State { last_version: 5000, mtime: 1000, unwritten: true, ..State::default() };
        Arc::new(Fake { state: Mutex::new(state), worker: None })
    }

    /// Answers on a thread of its own, as a client does.
    pub fn threaded() -> Arc<Fake> {
        let (send, receive) = channel::<Job>();
        std::thread::spawn(move || receive.into_iter().for_each(|job| job()));
        let state = State { last_version: 5000, mtime: 1000, unwritten: true, ..State::default() };
        Arc::new(Fake { state: Mutex::new(state), worker: Some(Mutex::new(send)) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Puts bytes; returns the version.
    pub fn put(&self, key: &str, bytes: &[u8]) -> u64 {
        let bytes = bytes.to_vec();
        let size = bytes.len() as u64;
        self.put_with(
            key,
            size,
            0o644,
            Arc::new(move |offset, out| {
                let start = usize::try_from(offset).unwrap();
                out.copy_from_slice(&bytes[start..start + out.len()]);
            }),
        )
    }

    /// Puts an object whose bytes are made when they are read.
    pub fn put_with(&self, key: &str, size: u64, mode: u32, contents: Contents) -> u64 {
        let mut state = self.state();
        state.last_version += 1;
        state.mtime += 1;
        state.unwritten = false;
        let version = state.last_version;
        let descriptor = Descriptor {
            version,
            attributes: Attributes { mode, mtime_seconds: state.mtime, mtime_nanoseconds: 5, owner: None },
            striping: Striping::new(size, 4096, 65536, 1).unwrap(),
            components: Vec::new(),
        };
        state.objects.insert(key.as_bytes().to_vec(), descriptor);
        state.contents.insert(version, contents);
        version
    }

    /// Deletes.
    pub fn remove(&self, key: &str) {
        let mut state = self.state();
        state.objects.remove(key.as_bytes());
        state.mtime += 1;
    }

    /// From now on every call fails like this (`None`: works again).
    pub fn fail(&self, error: Option<Error>) {
        self.state().failing = error;
    }

    /// From now on answers are formed at once, but wait for [`Fake::let_go`].
    pub fn hold(&self) {
        self.state().held = Some(Vec::new());
    }

    /// The same for one kind of call.
    pub fn hold_only(&self, call: &'static str) {
        let mut state = self.state();
        (state.held, state.held_call) = (Some(Vec::new()), Some(call));
    }

    /// The next so many checks come too late: their object is replaced just before.
    pub fn overtake(&self, checks: u64) {
        self.state().overtaken = checks;
    }

    /// Delivers what was held, in order, and holds no more.
    pub fn let_go(&self) {
        let jobs = {
            let mut state = self.state();
            state.held_call = None;
            state.held.take().unwrap_or_default()
        };
        jobs.into_iter().for_each(|job| job());
    }

    /// How often a call was made.
    pub fn calls(&self, call: &'static str) -> u64 {
        self.state().calls.get(call).copied().unwrap_or(0)
    }

    /// Pins now: version and how often.
    pub fn pins(&self) -> Vec<(u64, u64)> {
        let mut pins: Vec<_> = self.state().pins.iter().map(|(version, count)| (*version, *count)).collect();
        pins.sort_unstable();
        pins
    }

    /// From now on every pin is refused.
    pub fn refuse_pins(&self) {
        self.state().pinless = true;
    }

    /// Forgets the bytes of versions that are neither current nor pinned.
    pub fn reclaim(&self) {
        let mut state = self.state();
        let current: Vec<u64> = state.objects.values().map(|descriptor| descriptor.version).collect();
        let State { contents, pins, .. } = &mut *state;
        contents.retain(|version, _| current.contains(version) || pins.contains_key(version));
    }

    /// Handles that were released.
    pub fn released(&self) -> Vec<u64> {
        self.state().released.clone()
    }

    fn answer<T: Send + 'static>(&self, call: &'static str, done: Done<T>, form: impl FnOnce(&State) -> Result<T>) {
        let mut state = self.state();
        *state.calls.entry(call).or_default() += 1;
        let result = match &state.failing {
            Some(error) => Err(error.clone()),
            None => form(&state),
        };
        let job: Job = Box::new(move || done(result));
        if state.held_call.is_none_or(|only| only == call)
            && let Some(held) = &mut state.held
        {
            return held.push(job);
        }
        drop(state);
        match &self.worker {
            Some(worker) => worker.lock().unwrap().send(job).unwrap(),
            None => job(),
        }
    }
}

impl State {
    fn current(&self, object: &Object) -> Result<()> {
        let now = self.objects.get(object.name.key.as_bytes()).map(|d| d.version);
        if now == Some(object.descriptor.version) {
            return Ok(());
        }
        Err(Error::Stale { object: object.name.to_string(), version: object.descriptor.version })
    }
}

impl super::railfs_backend::Backend for Fake {
    fn lookup(&self, name: &ObjectName, done: Done<Found>) {
        let name = name.clone();
        self.answer("lookup", done, move |state| {
            let key = name.key.as_bytes();
            if let Some(descriptor) = state.objects.get(key) {
                let proof = Proof { node: "n".to_owned(), incarnation: 1, slot: 0, value: 0, name_tag: 0 };
                return Ok(Found::Object(Arc::new(Object::new(name.clone(), descriptor.clone(), proof))));
            }
            let below = name.key.below();
            let is_directory = state.objects.keys().any(|other| other.starts_with(&below));
            Ok(if is_directory { Found::Directory(state.mtime, 0) } else { Found::Absent })
        });
    }

    fn list(&self, query: ListQuery, done: Done<Listing>) {
        self.answer("list", done, move |state| {
            if state.unwritten {
                return Err(Error::NotFound(query.namespace.clone()));
            }
            // By what a name sorts as: a directory as its key and '/'.
            let mut found: BTreeMap<Vec<u8>, Option<Descriptor>> = BTreeMap::new();
            for (key, descriptor) in &state.objects {
                let Some(rest) = key.strip_prefix(&*query.prefix) else { continue };
                match rest.iter().position(|&b| b == b'/').filter(|_| query.delimited) {
                    Some(slash) => found.insert(key[..query.prefix.len() + slash + 1].to_vec(), None),
                    None => found.insert(key.clone(), Some(descriptor.clone())),
                };
            }
            let mut rest = found.into_iter().filter(|(sort, _)| *sort > query.after).peekable();
            let limit = if query.limit == 0 { 1000 } else { query.limit as usize };
            let (mut entries, mut last) = (Vec::new(), Vec::new());
            while let Some((sort, object)) = (entries.len() < limit).then(|| rest.next()).flatten() {
                let key = sort.strip_suffix(b"/").unwrap_or(&sort).to_vec();
                entries.push(ListEntry { key, object });
                last = sort;
            }
            Ok(Listing { entries, next: rest.peek().is_some().then_some(last), mtime: (state.mtime, 0) })
        });
    }

    fn check(&self, object: &Arc<Object>, done: Done<()>) {
        let overtaken = {
            let mut state = self.state();
            let left = state.overtaken;
            state.overtaken = left.saturating_sub(1);
            left > 0
        };
        if overtaken {
            self.put(std::str::from_utf8(object.name.key.as_bytes()).unwrap(), b"once more");
        }
        self.answer("check", done, |state| state.current(object));
    }

    fn pin(&self, object: &Arc<Object>, done: Done<()>) {
        let version = object.descriptor.version;
        *self.state().pins.entry(version).or_default() += 1;
        self.answer("pin", done, |state| match state.contents.contains_key(&version) {
            _ if state.pinless => {
                Err(Error::OverBudget { what: "pin".to_owned(), need: 1, limit: 0, cure: String::new() })
            }
            true => Ok(()),
            false => Err(Error::Stale { object: object.name.to_string(), version }),
        });
    }

    fn unpin(&self, version: u64) {
        let mut state = self.state();
        let count = state.pins.get_mut(&version).expect("unpinned once too often");
        *count -= 1;
        if *count == 0 {
            state.pins.remove(&version);
        }
    }

    fn keeps_pins(&self) -> bool {
        !self.state().pinless
    }

    fn read(
        &self,
        object: &Arc<Object>,
        _handle: u64,
        offset: u64,
        length: u32,
        freshness: Freshness,
        reply: ReadReply,
    ) {
        if object.name.key.as_bytes().ends_with(b"hang") {
            return self.state().hanging.push(reply);
        }
        let done: Done<Vec<u8>> = Box::new(move |result| match result {
            Ok(bytes) => reply(Ok(&bytes)),
            Err(error) => reply(Err(error)),
        });
        self.answer("read", done, |state| {
            if freshness == Freshness::Current {
                state.current(object)?;
            }
            let contents = state
                .contents
                .get(&object.descriptor.version)
                .ok_or_else(|| Error::Stale { object: object.name.to_string(), version: object.descriptor.version })?;
            let left = object.descriptor.striping.size().saturating_sub(offset).min(length.into());
            let mut bytes = vec![0; usize::try_from(left).unwrap()];
            contents(offset, &mut bytes);
            Ok(bytes)
        });
    }

    fn release(&self, handle: u64) {
        self.state().released.push(handle);
    }

    fn server_status(&self, done: Done<StatusReply>) {
        self.answer("status", done, |state| {
            let directory = DirectoryStatus { total_bytes: 1 << 30, available_bytes: 1 << 29, ..Default::default() };
            let objects = state.objects.len() as u64;
            Ok(StatusReply { directories: vec![directory.clone(), directory], objects, ..Default::default() })
        });
    }

    fn status(&self) -> Status {
        Status { store: "fake".to_owned(), node: "n".to_owned(), ..Default::default() }
    }

    fn pulse(&self, done: Done<()>) {
        done(Ok(()));
    }

    fn close(&self) {}
}
