//! A running server: everything started in the right order, and stopped in bounded time.
//!
//! Guarantees: directories are locked before ports are bound, so that a second server names the first; ports are bound
//! before anything in a directory is read or changed; nothing is served before what a dead put left was tidied up; a
//! clean stop leaves a record that says so.

use crate::access::Rights;
use crate::admin::Admin;
use crate::catalog::{LogCatalog, LogCatalogOptions, Previous, Publisher, PublisherOptions, Recovered, Slots};
use crate::config::Config;
use crate::control::ControlService;
use crate::control::addresses::{Announced, is_here};
use crate::control::asides::{Bounded, MAX_STREAMS, Places};
use crate::control::handshake::Guard;
use crate::control::incoming::connections;
use crate::health::Condition;
use crate::listeners::{Failure, Listener, Memory, shares};
use crate::node::{Node, add, lock};
use crate::put::Puts;
use crate::put::recover::{self, Found};
use crate::reload::{self, Reload};
use crate::scarce;
use crate::serve::files::{Files, capacity};
use crate::serve::{Gate, Server, pin, pins, reclaim};
use crate::share::{self, threads};
use crate::store::{self, StoreError};
use railfs_engine::clock::Clock;
use railfs_engine::memory::Arena;
use railfs_engine::memory::plan::{Memlock, check};
use railfs_engine::tls::{Stamp, TlsError};
use railfs_proto::v1::control_server::ControlServer;
use std::collections::BTreeSet;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Notify, watch};
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_reflection::server::v1::{ServerReflection, ServerReflectionServer};

/// How long RPCs that are under way may go on after a stop began.
const GRACE: Duration = Duration::from_secs(2);
/// Seconds between two looks at lost/.
const TIDY: u64 = 3600;
/// For the standard health service: whether every stripe directory is well,
pub const HEALTH_DIRECTORIES: &str = "railfs.directories";
/// and whether puts and deletes are taken.
pub const HEALTH_PUBLISHING: &str = "railfs.publishing";
/// How long the last record may take.
const LAST_RECORD: Duration = Duration::from_secs(4);

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// See the message.
    #[error("cannot listen on {address} for {what}: {source}; {}", advice(.source, .key))]
    Listen {
        /// Control plane or rail.
        what: String,
        /// Which.
        address: SocketAddr,
        /// The configuration's.
        key: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// See the message.
    #[error("cannot listen for a rail: {0}; stop what uses that port, or set another rail.listen")]
    Rail(railfs_engine::error::Error),
    /// See the message.
    #[error("no interface of this machine has the address of any rail ({0}): bring one up, or set another rail.listen")]
    NoRail(String),
    /// See the message.
    #[error("an RDMA rail cannot be had: {0} (without `require_rdma` the others would be served)")]
    Rdma(String),
    /// See the message.
    #[error("no rail can be had: {0}; make one of their devices available, or add a rail with transport = \"tcp\"")]
    NoneToBeHad(String),
    /// More is to be registered than may be locked.
    #[error("RDMA rails: {0} (memory.max_registered is the sum of what is registered)")]
    Shortage(railfs_engine::memory::plan::Shortage),
    /// Certificate, key or authorities.
    #[error("[security] {0}")]
    Tls(#[from] TlsError),
    /// The stripe directories.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Log or index.
    #[error("catalog: {0}")]
    Catalog(String),
    /// Components.
    #[error(transparent)]
    Recover(#[from] recover::RecoverError),
    /// Memory or threads.
    #[error("{what}: {detail}")]
    Resources {
        /// Of what there is not enough.
        what: &'static str,
        /// What the system said.
        detail: String,
    },
}

/// A running server.
#[derive(Debug)]
pub struct Daemon {
    runtime: Option<Runtime>,
    server: Option<Arc<Server>>,
    catalog: Option<Arc<LogCatalog>>,
    reload: Arc<Reload>,
    listeners: Vec<Option<Listener>>,
    memory: Option<Memory>,
    control: Vec<SocketAddr>,
    shutdown: watch::Sender<bool>,
    control_tasks: Vec<tokio::task::JoinHandle<()>>,
    recovered: Recovered,
    found: Found,
}

/// What helps against a socket that cannot be bound.
fn advice(source: &io::Error, key: &str) -> String {
    match source.kind() {
        io::ErrorKind::AddrInUse => format!("stop what uses that port, or set another {key}"),
        io::ErrorKind::AddrNotAvailable => {
            format!("no interface of this machine has that address: bring it up, or set another {key}")
        }
        io::ErrorKind::PermissionDenied => format!("ports below 1024 are for root: set another {key}"),
        _ => format!("set another {key}"),
    }
}

fn bind(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let bound = std::net::TcpListener::bind(address).or_else(|error| {
        // Every address of a machine without IPv6.
        let any = address.is_ipv6() && address.ip().is_unspecified() && error.kind() != io::ErrorKind::AddrInUse;
        if any { std::net::TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())) } else { Err(error) }
    })?;
    bound.set_nonblocking(true)?;
    Ok(bound)
}

/// Sockets that are bound, before anything on a disk is changed.
struct Bound {
    control: Vec<std::net::TcpListener>,
    addresses: Vec<SocketAddr>,
    rails: Vec<Option<Listener>>,
    gates: Vec<Arc<Gate>>,
    announced: Announced,
    memory: Option<Memory>,
}

fn listen(config: &Config, clock: Clock) -> Result<Bound, StartError> {
    let (mut control, mut addresses) = (Vec::new(), Vec::new());
    for &address in &config.control {
        let failed = |source| StartError::Listen {
            what: "the control plane".to_owned(),
            address,
            key: "control.listen",
            source,
        };
        let socket = bind(address).map_err(failed)?;
        addresses.push(socket.local_addr().map_err(failed)?);
        control.push(socket);
    }
    if config.rails.iter().all(|rail| !is_here(rail.listen.ip())) {
        let all = config.rails.iter().map(|rail| rail.listen.to_string()).collect::<Vec<_>>();
        return Err(StartError::NoRail(all.join(", ")));
    }
    let plan = crate::listeners::plan(config);
    match plan.map(|plan| check(&plan, ("memory.max_registered", config.max_registered), Memlock::now())) {
        None => {}
        Some(Ok(plan)) => tracing::info!("{plan}"),
        Some(Err(shortage)) => return Err(StartError::Shortage(shortage)),
    }
    let memory =
        Memory::start(config).map_err(|detail| StartError::Resources { what: "memory.max_registered", detail })?;
    let (mut rails, mut gates, mut announced, mut refused) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (id, rail) in (0u32..).zip(&config.rails) {
        let gate = Gate::new(id);
        let listener = match Listener::start(id, rail, memory.as_ref(), clock, Arc::clone(&gate)) {
            Ok(listener) => match listener.why() {
                Some(why) if config.require_rdma => return Err(StartError::Rdma(why)),
                why => {
                    if let Some(why) = why {
                        tracing::error!(rail = id, fabric = rail.fabric, %why, "an RDMA rail cannot be had now: others are served, if there are any, and it is tried again");
                    }
                    Some(listener)
                }
            },
            Err(Failure::Tcp(error)) => return Err(StartError::Rail(error)),
            Err(Failure::Rdma(why)) if config.require_rdma => return Err(StartError::Rdma(why)),
            Err(Failure::Rdma(why)) => {
                tracing::error!(rail = id, fabric = rail.fabric, %why, "an RDMA rail cannot be had: others are served without it, if there are any");
                refused.push(why);
                None
            }
        };
        let address = listener.as_ref().and_then(Listener::address).unwrap_or(rail.listen);
        announced.push(listener.is_some().then(|| (rail.clone(), address)));
        rails.push(listener);
        gates.push(gate);
    }
    if rails.iter().flatten().all(|rail: &Listener| rail.why().is_some()) {
        let why: BTreeSet<String> = rails.iter().flatten().filter_map(Listener::why).chain(refused).collect();
        return Err(StartError::NoneToBeHad(why.into_iter().collect::<Vec<_>>().join("; ")));
    }
    let speeds = rails.iter().map(|rail: &Option<Listener>| rail.as_ref().map_or(0, Listener::speed_mbps)).collect();
    let announced = Announced::new(addresses.clone(), announced).with_speeds(speeds);
    for line in announced.absent() {
        tracing::warn!("{line}");
    }
    Ok(Bound { control, addresses, rails, gates, announced, memory })
}

impl Daemon {
    /// Starts a server and returns when it serves. Blocks; not to be called on a runtime.
    ///
    /// # Errors
    /// See [`StartError`]. Everything that was started has been stopped then.
    pub fn start(config: &Config) -> Result<Daemon, StartError> {
        let clock = Clock::start();
        // As they were before they are read: what is written meanwhile is found by the first look.
        let stamps = config.tls.as_ref().map(|files| files.stamps());
        let guard = config.tls.as_ref().map(|files| files.server()).transpose()?.map(Guard::new);
        let locked = store::lock(&config.stripe_dirs)?;
        let bound = listen(config, clock)?;
        let started = Self::start_behind(config, clock, locked, &bound, (guard, stamps));
        if started.is_err() {
            for rail in bound.rails.iter().flatten() {
                rail.stop();
            }
            bound.memory.iter().for_each(|memory| memory.slab.stop());
        }
        started
    }

    fn start_behind(
        config: &Config,
        clock: Clock,
        locked: store::LockedDirectories,
        bound: &Bound,
        (guard, stamps): (Option<Arc<Guard>>, Option<[Stamp; 3]>),
    ) -> Result<Daemon, StartError> {
        let no_thread =
            |error: io::Error| StartError::Resources { what: "cannot start threads", detail: error.to_string() };
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(threads(config.stripe_dirs.len()))
            .thread_name("railfsd")
            .enable_all()
            .build()
            .map_err(no_thread)?;
        let store = Arc::new(store::open_locked(locked)?);
        // Recorded before anybody can READ a slot: the run after this one waits out the leases of this one's clients.
        let verbs = bound.rails.iter().flatten().any(Listener::is_verbs);
        let options =
            LogCatalogOptions { verbs, ..LogCatalogOptions::new(&store, config.state_dir.clone(), &config.node) };
        let (catalog, recovered) = LogCatalog::open(options).map_err(|error| StartError::Catalog(error.to_string()))?;
        let incarnation = recovered.incarnation;
        let slots = Slots::new(&config.node, incarnation, crate::listeners::slots(config));
        // A read-only run leaves no record of itself: the run after it would not know that its slots are trusted.
        for rail in bound.rails.iter().flatten().filter(|_| store.read_only().is_none()) {
            if let Err(why) = rail.expose(&slots) {
                tracing::error!(%why, "slots cannot be READ over this rail: its clients check by frame");
            }
        }
        let options = PublisherOptions { not_before: not_before(&recovered), ..PublisherOptions::default() };
        let publisher = Publisher::new(Arc::clone(&catalog) as _, slots, runtime.handle().clone(), options);
        if let Some(why) = store.read_only() {
            publisher.make_read_only(&why);
        }
        let found = runtime.block_on(recover::recover(&store, &*catalog, &config.node))?;
        let mut node = Node::new(config.node.clone(), incarnation, store, publisher, clock, runtime.handle().clone());
        node.request_timeout = config.request_timeout;
        let (limit, direct) = (scarce::descriptors(), bound.memory.is_some());
        let room = capacity(limit, direct);
        if let Some(line) = scarce::low(limit, room.get()) {
            tracing::warn!("{line}");
        }
        node.files = Arc::new(Files::new(room));
        node.access.replace(Rights::new(&config.namespaces));
        let node = Arc::new(node);
        add(&node.counters.debris_removed, found.removed);
        add(&node.counters.components_lost, found.lost);
        let landing = match &bound.memory {
            // Rails have registered it.
            Some(memory) => Ok(memory.landing.clone()),
            None => Arena::new(shares(config).landing),
        };
        let puts = landing
            .and_then(|landing| Puts::start(Arc::clone(&node), config.put, landing))
            .map_err(|error| StartError::Resources { what: "memory.max_registered", detail: error.to_string() })?;
        let superseded = Arc::new(Notify::new());
        let limits = pins::Limits { lease: config.pin_lease, pins: config.max_pins };
        let predecessor = recovered.previous.is_some();
        let keeper = pin::Keeper::new(limits, node.clock.now(), predecessor, Arc::clone(&superseded));
        let server = Arc::new(Server {
            files: Arc::clone(&node.files),
            node,
            puts,
            pins: Arc::new(keeper),
            direct,
            buffered: Default::default(),
            said: Default::default(),
        });

        let (shutdown, stopping) = watch::channel(false);
        let admin = Arc::new(Admin::new(bound.announced.clone(), bound.rails.clone(), bound.memory.clone()));
        let service = ControlService::new(
            Arc::clone(&server),
            bound.announced.clone(),
            admin,
            Arc::clone(&superseded),
            stopping.clone(),
        )
        .with_listeners(bound.rails.clone());
        let mut control_tasks = Vec::new();
        let (reporter, health) = tonic_health::server::health_reporter();
        runtime.block_on(async {
            reporter.set_serving::<ControlServer<ControlService>>().await;
            tell_health(&reporter, &server.node).await;
        });
        let asides = (health, Places::new(MAX_STREAMS));
        for (socket, &address) in bound.control.iter().zip(&bound.addresses) {
            let task =
                serve_control(&runtime, socket, guard.clone(), service.clone(), asides.clone(), stopping.clone());
            let failed = |source| StartError::Listen {
                what: "the control plane".to_owned(),
                address,
                key: "control.listen",
                source,
            };
            control_tasks.push(task.map_err(failed)?);
        }
        runtime.spawn(every_second(Arc::clone(&server), bound.rails.clone(), reporter));
        let reload = Reload::new(config.clone(), guard, Arc::clone(&server.node), stamps);
        if config.file.is_some() || config.tls.is_some() {
            runtime.spawn(reload::run(Arc::clone(&reload)));
        }
        let (node, files, pins) = (Arc::clone(&server.node), Arc::clone(&server.files), Arc::clone(&server.pins));
        runtime.spawn(reclaim::run(node, files, pins, config.retention, superseded));
        for gate in &bound.gates {
            gate.open(Arc::clone(&server));
        }
        tracing::info!(
            store = %server.node.store.id(), node = %config.node, incarnation,
            replayed = recovered.replayed, components = found.kept, debris = found.removed, lost = found.lost,
            "serving"
        );
        Ok(Daemon {
            runtime: Some(runtime),
            server: Some(server),
            catalog: Some(catalog),
            reload,
            listeners: bound.rails.clone(),
            memory: bound.memory.clone(),
            control: bound.addresses.clone(),
            shutdown,
            control_tasks,
            recovered,
            found,
        })
    }

    /// Where the control plane listens, with the ports the kernel chose.
    pub fn control_addresses(&self) -> &[SocketAddr] {
        &self.control
    }

    /// Where the rails that there are listen, in the order of the configuration; rails of RDMA devices with port 0.
    pub fn rail_addresses(&self) -> Vec<SocketAddr> {
        let there = self.listeners.iter().flatten().filter(|rail| rail.why().is_none());
        there.filter_map(Listener::address).collect()
    }

    /// What was found at start.
    pub fn recovered(&self) -> &Recovered {
        &self.recovered
    }

    /// What of components was found at start.
    pub fn found(&self) -> Found {
        self.found
    }

    /// Its parts; `None` once it has stopped.
    pub fn server(&self) -> Option<&Arc<Server>> {
        self.server.as_ref()
    }

    /// Looks now whether certificates or rights have changed, not only at the next time. Does not wait.
    pub fn look_again(&self) {
        if let Some(runtime) = &self.runtime {
            let reload = Arc::clone(&self.reload);
            // Its end is of no use to anybody: what it finds is in the log and in the status.
            drop(runtime.spawn_blocking(move || reload.look()));
        }
    }

    /// Stops: what is under way ends or fails, and a record says that the stop was clean. Bounded by about
    /// `limits::STOP_DEADLINE` where the disks answer.
    ///
    /// # Errors
    /// The record could not be written: the next start takes this stop for a crash. Everything has ended all the same.
    pub fn stop(mut self) -> Result<(), String> {
        let stopped = self.end(true);
        tracing::info!(clean = stopped.is_ok(), "stopped");
        stopped
    }

    /// Ends without tidying up, as a crash would, as far as a process can do that to itself.
    pub fn crash(mut self) {
        let _ = self.end(false);
    }

    fn end(&mut self, clean: bool) -> Result<(), String> {
        let Some(runtime) = self.runtime.take() else { return Ok(()) };
        self.shutdown.send_replace(true);
        if let Some(server) = &self.server
            && !clean
        {
            server.puts.abandon();
        }
        let tasks = std::mem::take(&mut self.control_tasks);
        if let Some(server) = &self.server {
            // Waiting commits are answered by this.
            server.puts.stop();
        }
        if clean {
            runtime.block_on(async {
                let all = async {
                    for task in tasks {
                        let _ = task.await;
                    }
                };
                let _ = tokio::time::timeout(GRACE, all).await;
            });
        }
        let mut unread = true;
        for listener in self.listeners.drain(..).flatten() {
            unread &= listener.stop();
        }
        if let Some(memory) = self.memory.take() {
            memory.slab.stop();
        }
        let mut stopped = Ok(());
        if clean && !unread {
            // Without the last record the run after this one waits out the leases, as after a crash.
            stopped = Err("queue pairs are left behind, through which clients may still READ version slots".to_owned());
        }
        if let Some(catalog) = self.catalog.take()
            && clean
            && unread
        {
            stopped = runtime.block_on(async {
                match tokio::time::timeout(LAST_RECORD, catalog.stop()).await {
                    Ok(stopped) => stopped.map_err(|error| error.to_string()),
                    Err(_) => Err(format!("the last record was not written within {LAST_RECORD:?}")),
                }
            });
        }
        if let Some(server) = self.server.take() {
            // Connections that could not be closed would keep what keeps them.
            *lock(&server.node.sessions) = Default::default();
        }
        runtime.shutdown_timeout(GRACE);
        stopped
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.end(false);
    }
}

/// Clients of the run before may trust its slots until then.
fn not_before(recovered: &Recovered) -> Option<tokio::time::Instant> {
    recovered.previous.and_then(Previous::trusted_for).map(|wait| tokio::time::Instant::now() + wait)
}

/// The service that tells clients which services there are and what their messages look like.
fn reflection() -> Result<ServerReflectionServer<impl ServerReflection>, tonic_reflection::server::Error> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(railfs_proto::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
}

fn serve_control(
    runtime: &Runtime,
    socket: &std::net::TcpListener,
    guard: Option<Arc<Guard>>,
    service: ControlService,
    (health, places): (HealthServer<impl Health>, Places),
    mut stopping: watch::Receiver<bool>,
) -> io::Result<tokio::task::JoinHandle<()>> {
    let _inside = runtime.enter();
    let socket = tokio::net::TcpListener::from_std(socket.try_clone()?)?;
    let incoming = connections(socket, guard, Arc::clone(service.node()));
    Ok(runtime.spawn(async move {
        let reflection = match reflection() {
            Ok(reflection) => reflection,
            Err(error) => return tracing::error!(%error, "the control plane cannot describe itself"),
        };
        let served = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(Duration::from_secs(10)))
            .http2_keepalive_timeout(Some(Duration::from_secs(5)))
            .max_concurrent_streams(Some(1024))
            .add_service(Bounded::new(health, places.clone()))
            .add_service(Bounded::new(reflection, places))
            .add_service(ControlServer::new(service))
            .serve_with_incoming_shutdown(incoming, async move {
                let _ = stopping.wait_for(|stopping| *stopping).await;
            })
            .await;
        if let Err(error) = served {
            tracing::error!(%error, "the control plane ended");
        }
    }))
}

/// The standard health service knows, beside the control plane itself, whether all directories are well and whether
/// puts are taken.
async fn tell_health(reporter: &tonic_health::server::HealthReporter, node: &Node) {
    let serving = |well| if well { ServingStatus::Serving } else { ServingStatus::NotServing };
    reporter.set_service_status(HEALTH_DIRECTORIES, serving(node.is_well())).await;
    reporter.set_service_status(HEALTH_PUBLISHING, serving(node.publisher.frozen().is_none())).await;
}

/// Sessions and puts that are over; now and then what was lost too long ago.
async fn every_second(
    server: Arc<Server>,
    rails: Vec<Option<Listener>>,
    reporter: tonic_health::server::HealthReporter,
) {
    let mut tidying: Option<tokio::task::JoinHandle<()>> = None;
    let mut tick = tokio::time::interval(Duration::from_secs(1));
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for second in 0u64.. {
        tick.tick().await;
        let ended = lock(&server.node.sessions).expire(server.node.clock.now());
        for session in ended {
            server.session_ended(session, "idle");
        }
        server.puts.tick();
        server.pins.tick(server.node.clock.now());
        server.node.look_at_directories();
        for rail in rails.iter().flatten().filter(|rail| rail.is_verbs()) {
            // Devices that are opened or closed take their time; a rail lets one at a time look after it.
            let (rail, clock) = (rail.clone(), server.node.clock);
            tokio::task::spawn_blocking(move || rail.tend(clock.now()));
        }
        tell_health(&reporter, &server.node).await;
        if second % TIDY == TIDY - 1 && tidying.as_ref().is_none_or(tokio::task::JoinHandle::is_finished) {
            let node = Arc::clone(&server.node);
            // Slow disks must not delay the next second; one that hangs has its turn taken by the next.
            tidying = Some(tokio::spawn(async move {
                for share in node.shares.all() {
                    let (node, id) = (Arc::clone(&node), share.id());
                    let tidied = share.run(share::WAIT, move || {
                        let there = node.store.directory(id).filter(|_| node.condition(id) < Condition::ReadOnly);
                        there.map_or(0, recover::tidy_lost)
                    });
                    if let Err(refusal) = tidied.await {
                        tracing::warn!(reason = %refusal.message, "lost/ was not tidied up");
                    }
                }
            }));
        }
    }
}
