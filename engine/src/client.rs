//! A client of one store: control connection, rails, arena, cache, the read path and puts, behind plain calls.
//!
//! Calls with a `done` never block: it is called once, on this thread or on one of the client's, by the deadline at the
//! latest. Calls without block by at most their deadline (never use them on a FUSE thread).

mod manual;
#[cfg(test)]
mod memlock_tests;
mod rails;
mod reach;

pub use manual::{ManualRail, To, Via};

use crate::clock::Clock;
use crate::control::{Control, ControlConfig, WatchQuery, Watching};
use crate::error::{Error, Result};
use crate::memory::Arena;
use crate::memory::plan::Shortage;
use crate::put::{self, Puts};
pub use crate::rail::Opening;
use crate::read::core::Core;
pub use crate::read::core::Freshness;
use crate::read::driver::Driver;
pub use crate::read::lease::CheckWay;
use crate::tls::Files;
use railfs_proto::descriptor::{Attributes, Descriptor, Id, Proof};
use railfs_proto::name::ObjectName;
use railfs_proto::watch::WatchPage;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// What is left for the first rail to come up, however long hello took.
const FIRST_RAIL: Duration = Duration::from_millis(500);

/// How long the end of a client may take to tell the server, so that it keeps nothing for it.
const BYE: Duration = Duration::from_millis(300);

/// Whether RDMA rails are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rdma {
    /// Where a device reaches a listener; else TCP, which is said.
    #[default]
    Auto,
    /// Never.
    Off,
    /// Only: where there is none, connecting fails.
    Required,
}

/// How to reach a store and what to use for it.
#[derive(Clone, Debug)]
pub struct Config {
    /// "host:port" of control listeners of one node, tried in order.
    pub addresses: Vec<String>,
    /// Bytes of the arena.
    pub arena: u64,
    /// Bind to this store: another one at the address is an error.
    pub store: Option<Id>,
    /// Threads that verify and answer what could not be answered at once.
    pub workers: usize,
    /// A read's limit.
    pub read_deadline: Duration,
    /// A lookup's, list's and check's limit.
    pub metadata_deadline: Duration,
    /// The limit of connecting.
    pub connect_deadline: Duration,
    /// How long posted work of an RDMA rail may be without any completion (CQ wait), 100 ms to 30 s.
    pub cq_wait: Duration,
    /// The limit of one attempt of a request on one rail, while another rail could do it, 100 ms to 30 s.
    pub request_deadline: Duration,
    /// Bytes read ahead at most per sequential reader; 0: none.
    pub readahead: u64,
    /// See [`Rdma`].
    pub rdma: Rdma,
    /// See [`Opening`].
    pub opening: Opening,
    /// The rails to have, in place of what discovery finds; empty: discovery.
    pub rails: Vec<ManualRail>,
    /// A read for which the arena has no room now fails at once with `OverBudget`, before anything is sent; else it waits for
    /// room until its deadline.
    pub refuse_reads: bool,
    /// Where less memory may be locked than the RDMA rails of the first session register: connecting fails. Else they are left
    /// alone, and TCP is used, loudly.
    pub refuse_shortage: bool,
    /// See [`CheckWay`].
    pub check: CheckWay,
    /// The control connection is made by mutual TLS with these files; `None`: plain.
    pub tls: Option<Files>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            addresses: Vec::new(),
            arena: 256 << 20,
            store: None,
            workers: 2,
            read_deadline: railfs_proto::limits::READ_DEADLINE,
            metadata_deadline: railfs_proto::limits::METADATA_DEADLINE,
            connect_deadline: railfs_proto::limits::CONNECT_DEADLINE,
            cq_wait: railfs_proto::limits::CQ_WAIT,
            request_deadline: railfs_proto::limits::REQUEST,
            readahead: 16 << 20,
            rdma: Rdma::Auto,
            opening: Opening::Auto,
            rails: Vec::new(),
            refuse_reads: false,
            refuse_shortage: false,
            check: CheckWay::Auto,
            tls: None,
        }
    }
}

/// What a name means now.
#[derive(Clone, Debug)]
pub enum Found {
    /// An object.
    Object(Arc<Object>),
    /// Something lies below this name. Seconds and nanoseconds of the namespace's last commit.
    Directory(i64, u32),
    /// Nothing.
    Absent,
}

/// One version of one object, with what is needed to check and read it.
#[derive(Debug)]
pub struct Object {
    /// Its name when it was looked up.
    pub name: ObjectName,
    /// Version, attributes, layout, components.
    pub descriptor: Descriptor,
    proof: Mutex<Proof>,
    stale: AtomicBool,
    gone: AtomicBool,
}

impl Object {
    /// What a lookup found.
    pub fn new(name: ObjectName, descriptor: Descriptor, proof: Proof) -> Object {
        Object {
            name,
            descriptor,
            proof: Mutex::new(proof),
            stale: AtomicBool::new(false),
            gone: AtomicBool::new(false),
        }
    }
    /// Under what slot value the version was last seen current.
    pub fn proof(&self) -> Proof {
        self.proof.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
    pub(crate) fn set_proof(&self, proof: Proof) {
        *self.proof.lock().unwrap_or_else(PoisonError::into_inner) = proof;
    }
    /// Whether the version was seen superseded. It never becomes current again.
    pub fn is_stale(&self) -> bool {
        self.stale.load(Ordering::Acquire)
    }
    pub(crate) fn set_stale(&self) {
        self.stale.store(true, Ordering::Release);
    }
    /// Whether the server said that it has the version no more.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }
    pub(crate) fn set_gone(&self) {
        self.set_stale();
        self.gone.store(true, Ordering::Release);
    }
    pub(crate) fn stale_error(&self) -> Error {
        Error::Stale { object: self.name.to_string(), version: self.descriptor.version }
    }
}

/// One page of a list.
#[derive(Clone, Debug)]
pub struct Listing {
    /// By raw bytes of the key, a directory sorting as its key and '/'.
    pub entries: Vec<ListEntry>,
    /// Where to go on, when there is more.
    pub next: Option<Vec<u8>>,
    /// Of the namespace's last commit.
    pub mtime: (i64, u32),
}

/// A key, or a directory of keys.
#[derive(Clone, Debug)]
pub struct ListEntry {
    /// The whole key, without a trailing '/'.
    pub key: Vec<u8>,
    /// `None`: a directory.
    pub object: Option<Descriptor>,
}

/// What to list.
#[derive(Clone, Debug)]
pub struct ListQuery {
    /// Which namespace.
    pub namespace: String,
    /// Keys that start with these bytes ("" or "dir/").
    pub prefix: Vec<u8>,
    /// Fold what lies below the next '/' into directories.
    pub delimited: bool,
    /// Only what comes after (a [`Listing::next`]).
    pub after: Vec<u8>,
    /// Entries at most (0: the server's default).
    pub limit: u32,
    /// Less time than the client's limit for such calls, where the caller has less.
    pub within: Option<Duration>,
}

/// Where the bytes of a put come from. Called from several threads.
pub trait Source: Send + Sync {
    /// Bytes; it must not change.
    fn size(&self) -> u64;
    /// Fills the buffer from `offset`. Fewer bytes than asked for are an error: the source has shrunk.
    fn read_exact_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()>;
}

/// How to put.
#[derive(Clone, Copy, Debug)]
pub struct PutOptions {
    /// Mode and modification time.
    pub attributes: Attributes,
    /// 0: the server's default.
    pub stripe_size: u32,
    /// 0: the server's default.
    pub page_size: u32,
    /// 0: the server's default.
    pub width: u32,
    /// Only if this version is current (0: only if the name is absent).
    pub if_version: Option<u64>,
}

/// What became of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutDone {
    /// The version it made.
    pub version: u64,
    /// A newer version was there already: this put is ordered just before it.
    pub superseded: bool,
}

/// Gets the answer of a read: exactly the bytes asked for (fewer only at the end of the object).
pub type ReadReply = Box<dyn FnOnce(Result<&[u8]>) + Send>;
/// Gets the answer of another call.
pub type Done<T> = Box<dyn FnOnce(Result<T>) + Send>;

/// State of one rail, for `status`.
#[derive(Clone, Debug)]
pub struct RailStatus {
    /// "fabric address".
    pub name: String,
    /// The listener's address.
    pub address: String,
    /// Its fabric.
    pub fabric: String,
    /// "tcp" or "rdma".
    pub transport: String,
    /// "connecting", "up", "suspect", "probing" or "down".
    pub state: String,
    /// Why it is not up; empty when it is.
    pub reason: String,
    /// See there.
    pub counters: crate::rail::Counters,
    /// Measured, bytes per second; 0: not yet.
    pub bandwidth: u64,
    /// Pages it brought that failed their check.
    pub bad_pages: u64,
}

/// Everything `railfs status` shows of a client.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// Store id.
    pub store: String,
    /// Node name.
    pub node: String,
    /// Its incarnation.
    pub incarnation: u64,
    /// Control address in use; empty when there is none.
    pub control: String,
    /// Rails.
    pub rails: Vec<RailStatus>,
    /// Arena bytes: total, free, exposed, quarantined.
    pub arena: crate::memory::ArenaStats,
    /// Bytes in the cache.
    pub cached_bytes: u64,
    /// Reads that wait for memory.
    pub admission: crate::read::admission::Account,
    /// Bytes held for readahead: in flight; fetched, wanted and not read; dropped without having been read (of all time).
    pub ahead: [u64; 3],
    /// For how long nobody has answered: by the control connection, and by the rails. `None`: somebody does.
    pub silent_for: [Option<Duration>; 2],
    /// Name and value, a public contract (docs/metrics.md).
    pub counters: Vec<(&'static str, u64)>,
}

/// The client. One per mount or command.
pub struct Client {
    config: Config,
    clock: Clock,
    arena: Arena,
    control: Arc<Control>,
    driver: Arc<Driver>,
    puts: Arc<Puts>,
    rails: Mutex<Vec<rails::RailEntry>>,
    /// Why listeners cannot be reached by RDMA, as it was said last.
    unreached: Mutex<Vec<String>>,
    /// The ports of devices that are not used, as it was said last.
    skipped: Mutex<Vec<String>>,
    /// Of the last session, whose RDMA rails were left alone for it.
    shortage: Mutex<Option<Shortage>>,
    /// The plan of what is registered, as it was said last.
    planned: Mutex<String>,
    /// A listener of queue pairs is reached by no device: they are looked for again now and then.
    lacks_device: AtomicBool,
    runtime: Mutex<Option<tokio::runtime::Runtime>>,
    handle: tokio::runtime::Handle,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("config", &self.config).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn io(what: &str) -> impl Fn(std::io::Error) -> Error + '_ {
    move |error| Error::Io { what: what.to_owned(), detail: error.to_string() }
}

impl Client {
    /// Says hello and brings up at least one rail, within `connect_deadline`.
    pub fn connect(config: Config) -> Result<Arc<Client>> {
        let started = Instant::now();
        let clock = Clock::start();
        let arena = Arena::new(config.arena)
            .map_err(|error| Error::Invalid(format!("arena of {} bytes: {error}", config.arena)))?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("railfs-control")
            .enable_all()
            .build()
            .map_err(io("starting the control threads"))?;
        let handle = runtime.handle().clone();
        let (renew, mut renewals) = tokio::sync::mpsc::channel::<()>(1);
        let mut lease = [0u8; 8];
        getrandom::fill(&mut lease)
            .map_err(|error| Error::Io { what: "random bytes".into(), detail: error.to_string() })?;
        let mut core = Core::new(arena.clone(), config.readahead);
        core.pin_lease(u64::from_le_bytes(lease).max(1));
        core.attempt = config.request_deadline;
        core.refuse = config.refuse_reads;
        core.check_way(config.check);
        // One renewal at a time: what does not fit into the channel is already on its way.
        let wake = Box::new(move || {
            let _ = renew.try_send(());
        });
        let driver = Driver::start(core, clock, config.workers, wake).map_err(io("starting threads"))?;
        let client = Arc::new_cyclic(|weak: &Weak<Client>| {
            let on_session = weak.clone();
            let control = Control::new(
                ControlConfig::from(&config),
                handle.clone(),
                Box::new(move |session| {
                    if let Some(client) = on_session.upgrade() {
                        // Rails are closed and opened there, which takes a moment: not on the runtime's thread.
                        let started = std::thread::Builder::new()
                            .name("railfs-session".into())
                            .spawn(move || client.on_session(&session));
                        if let Err(error) = started {
                            tracing::error!(%error, "no thread for the new session: its rails are not taken into use");
                        }
                    }
                }),
            );
            Client {
                clock,
                arena,
                control,
                driver,
                puts: Puts::new(),
                rails: Mutex::new(Vec::new()),
                unreached: Mutex::default(),
                skipped: Mutex::default(),
                shortage: Mutex::default(),
                planned: Mutex::default(),
                lacks_device: AtomicBool::new(false),
                runtime: Mutex::new(Some(runtime)),
                handle: handle.clone(),
                config,
            }
        });
        let renewing = Arc::downgrade(&client);
        handle.spawn(async move {
            while renewals.recv().await.is_some() {
                let Some(control) = renewing.upgrade().map(|client| client.control.clone()) else { return };
                if let Err(error) = control.connect().await {
                    tracing::warn!(%error, "the server cannot be reached again yet");
                }
            }
        });
        handle.spawn(rails::look_now_and_then(Arc::downgrade(&client)));
        let connected = client.handle.block_on(client.control.connect()).and_then(|session| {
            let unreachable = |detail| Error::Unreachable { peer: session.control.clone(), detail };
            if let Some(why) = reach::refusal(&session.listeners, &client.config.rails) {
                return Err(unreachable(why));
            }
            client.on_session(&session);
            if let Some(shortage) = lock(&client.shortage).clone().filter(|_| client.config.refuse_shortage) {
                return Err(Error::Invalid(format!("RDMA rails: {shortage}; or do without RDMA (-o no_rdma)")));
            }
            let unreached = lock(&client.unreached).join("; ");
            if lock(&client.rails).is_empty() && !unreached.is_empty() {
                // Nothing to wait for.
                let required = client.config.rdma == Rdma::Required;
                let what = if required { "RDMA is required" } else { "there is no rail" };
                return Err(unreachable(format!("{what}: {unreached}")));
            }
            let left = client.config.connect_deadline.saturating_sub(started.elapsed()).max(FIRST_RAIL);
            if client.driver.wait_for_rail(left) {
                return Ok(());
            }
            Err(unreachable(client.driver.inspect(|core, _| core.rails_down())))
        });
        match connected {
            Ok(()) => Ok(client),
            Err(error) => {
                client.close();
                Err(error)
            }
        }
    }

    /// What the name means now (strict: the answer was true after the call began).
    pub fn lookup(&self, name: &ObjectName, done: Done<Found>) {
        self.driver.lookup(name, self.config.metadata_deadline, done);
    }

    /// One page of a list. `NotFound` when nobody ever wrote to the namespace.
    pub fn list(&self, query: ListQuery, done: Done<Listing>) {
        let limit = query.within.unwrap_or(Duration::MAX).min(self.config.metadata_deadline);
        self.call(done, limit, move |control| async move { control.list(&query).await });
    }

    fn call<T, F>(&self, done: Done<T>, limit: Duration, run: impl FnOnce(Arc<Control>) -> F + Send + 'static)
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        if lock(&self.runtime).is_none() {
            return done(Err(Error::Closed));
        }
        let control = self.control.clone();
        let (began, limit) = control.begin(limit);
        self.handle.spawn(async move {
            let result = tokio::time::timeout(limit, run(control.clone())).await;
            let late =
                || Err(Error::TimedOut { what: "control connection".into(), after: limit, detail: String::new() });
            let result = result.unwrap_or_else(|_| late());
            control.ended(began, &result);
            done(result);
        });
    }

    /// Whether the object's version is current, by a check that begins now. `Stale` when it is not.
    pub fn check(&self, object: &Arc<Object>, done: Done<()>) {
        self.driver.check(object, self.config.metadata_deadline, done);
    }

    /// Reads, checked. `handle` tells readers apart (readahead, fairness). The reply may be called before this returns.
    pub fn read(&self, object: &Arc<Object>, handle: u64, offset: u64, length: u32, reply: ReadReply) {
        self.read_as(object, handle, offset, length, Freshness::Current, reply);
    }

    /// The same, checked or not.
    pub fn read_as(
        &self,
        object: &Arc<Object>,
        handle: u64,
        offset: u64,
        length: u32,
        freshness: Freshness,
        reply: ReadReply,
    ) {
        self.driver.read(object, handle, offset, length, freshness, self.config.read_deadline, reply);
    }

    /// The version is needed until [`Client::unpin`] (which is to be called whatever the answer): `Ok` once the server keeps
    /// it although it may be superseded. `Stale`: it is reclaimed already. `OverBudget`: the server keeps no more.
    pub fn pin(&self, object: &Arc<Object>, done: Done<()>) {
        self.driver.pin(object, self.config.metadata_deadline, done);
    }

    /// One who needed the version does not any more.
    pub fn unpin(&self, version: u64) {
        self.driver.unpin(version);
    }

    /// Whether the server keeps versions that clients pin.
    pub fn server_pins(&self) -> bool {
        self.control.session().is_some_and(|session| session.pins)
    }

    /// Whether this side can make progress: see [`Driver::pulse`].
    pub fn pulse(&self, done: Done<()>) {
        self.driver.pulse(done);
    }

    /// The handle is closed: what was read ahead for it is no longer wanted.
    pub fn release(&self, handle: u64) {
        self.driver.release(handle);
    }

    /// Puts and waits until the object is durable and visible.
    pub fn put(&self, name: &ObjectName, source: Arc<dyn Source>, options: PutOptions) -> Result<PutDone> {
        self.handle.block_on(put::put(&self.control, &self.puts, name, source, options))
    }

    /// Deletes; returns the version that was there.
    pub fn delete(&self, name: &ObjectName, if_version: Option<u64>) -> Result<u64> {
        let mut request = [0u8; 16];
        getrandom::fill(&mut request)
            .map_err(|error| Error::Io { what: "random bytes".into(), detail: error.to_string() })?;
        self.handle.block_on(self.control.delete(name, request, if_version))
    }

    /// Begins to watch changes of a namespace.
    pub fn watch(&self, query: &WatchQuery) -> Result<Watching> {
        self.handle.block_on(self.control.watch(query))
    }

    /// Waits for the next changes; what was given before is acknowledged by that.
    pub fn watch_next(&self, watching: &mut Watching) -> Result<WatchPage> {
        self.handle.block_on(watching.next())
    }

    /// The server's own account.
    pub fn server_status(&self) -> Result<railfs_proto::v1::StatusReply> {
        Self::wait(|done| self.server_status_then(done))
    }

    /// The server's account without blocking (for statfs).
    pub fn server_status_then(&self, done: Done<railfs_proto::v1::StatusReply>) {
        self.call(done, self.config.metadata_deadline, |control| async move { control.status().await });
    }

    /// This client's account. Never blocks on the network.
    pub fn status(&self) -> Status {
        let session = self.control.session();
        let rails = lock(&self.rails).clone();
        let rail_status = |entry: &rails::RailEntry| {
            let (state, reason, bandwidth, bad_pages) =
                self.driver.inspect(|core, now| core.rails().describe(entry.number, now));
            RailStatus {
                name: format!("{} {}", entry.listener.fabric, entry.way.address()),
                address: entry.way.address(),
                fabric: entry.listener.fabric.clone(),
                transport: entry.way.transport().into(),
                state,
                reason,
                counters: self.driver.rail(entry.number).map(|rail| rail.counters()).unwrap_or_default(),
                bandwidth,
                bad_pages,
            }
        };
        let (counts, cached_bytes, activity, committed) = self
            .driver
            .inspect(|core, _| (core.counts(), core.cached_bytes(), core.activity(), core.committed_bytes()));
        let pins = self.driver.inspect(|core, _| core.pin_counts());
        let [check_read, check_frame] = self.driver.inspect(|core, _| core.check_pace()).map(Option::unwrap_or_default);
        let (admission, ahead) = self.driver.inspect(|core, _| (core.admission(), core.ahead_bytes()));
        let [reads, fetches, checks, waiting] = activity;
        let mut counters = counts.named();
        counters.extend([
            ("reads_inline", self.driver.inline_answers()),
            ("reads_now", reads),
            ("fetches_now", fetches),
            ("checks_now", checks),
            ("reads_waiting_now", waiting),
            ("committed_bytes_now", committed),
            ("put_bytes_now", self.puts.in_flight()),
            ("check_read_nanoseconds", check_read),
            ("check_frame_nanoseconds", check_frame),
            ("pins_now", pins.pins),
            ("pins_unsaid_now", pins.unsaid),
            ("pins_lost", pins.lost),
        ]);
        counters.extend(crate::rail::rdma_counters());
        Status {
            store: session.as_ref().map_or_else(String::new, |session| session.store.to_string()),
            node: session.as_ref().map_or_else(String::new, |session| session.node.clone()),
            incarnation: session.as_ref().map_or(0, |session| session.incarnation),
            control: self.control.address().unwrap_or_default(),
            rails: rails.iter().map(rail_status).collect(),
            arena: self.arena.stats(),
            cached_bytes,
            admission,
            ahead,
            silent_for: [
                self.control.silent_for(),
                self.driver.inspect(|core, now| core.silent_since().map(|since| now.since(since))),
            ],
            counters,
        }
    }

    /// The error that says so, while another store answers where this one was: that is why nothing is answered in time.
    pub fn wrong_store(&self) -> Option<Error> {
        self.control.wrong_store()
    }

    /// Waits for a call that takes a `done`.
    pub fn wait<T: Send + 'static>(call: impl FnOnce(Done<T>)) -> Result<T> {
        let (send, receive) = std::sync::mpsc::sync_channel(1);
        call(Box::new(move |result| {
            let _ = send.send(result);
        }));
        receive.recv().unwrap_or(Err(Error::Closed))
    }

    /// Ends everything within a second or two: what is in flight fails, memory is released.
    pub fn close(&self) {
        self.say_bye();
        self.control.close();
        self.driver.close();
        self.puts.close();
        if let Some(runtime) = lock(&self.runtime).take() {
            runtime.shutdown_background();
        }
    }
}

impl Client {
    fn say_bye(&self) {
        if lock(&self.runtime).is_none() {
            return;
        }
        let control = self.control.clone();
        let (send, receive) = std::sync::mpsc::sync_channel::<()>(1);
        self.handle.spawn(async move {
            control.bye(BYE).await;
            drop(send);
        });
        // Whoever drops the last client on a thread of its runtime must not wait there.
        if tokio::runtime::Handle::try_current().is_err() {
            // An error is the answer: nothing is ever sent.
            let _ = receive.recv_timeout(BYE * 2);
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.close();
    }
}
