//! What every part of a running server shares: its identity, catalog, sessions, counters, and the health of its disks.
//!
//! Guarantees: every request's scope is checked in one place; a directory that failed once takes no new component until
//! the server is restarted; when a log directory is gone, nothing is published from the moment that is noticed.

use crate::access::{Access, Identity, Need};
use crate::catalog::Publisher;
use crate::control::sessions::Sessions;
use crate::health::{self, Condition, Health};
use crate::serve::files::Files;
use crate::share::{self, Shares};
use crate::store::Store;
use railfs_engine::clock::Clock;
use railfs_engine::rail::Rail;
use railfs_proto::descriptor::Id;
use railfs_proto::name::Namespace;
use railfs_proto::reply::Refusal;
use railfs_proto::v1::{self, Code};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::runtime::Handle;

/// The version in hellos and status.
pub const SOFTWARE: &str = concat!("railfsd ", env!("CARGO_PKG_VERSION"));

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What the server has done since it started. The names are a public contract.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[$doc])* pub $name: AtomicU64,)*
        }
        impl Counters {
            /// Name and value of each.
            pub fn list(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.load(Ordering::Relaxed)),)*]
            }
        }
    };
}

counters! {
    /// Hellos answered.
    hellos,
    /// Control connections refused at their TLS handshake.
    handshakes_refused,
    /// Requests refused because the client may not (readers and writers of namespaces).
    denied,
    /// Rail connections refused (wrong ticket, session, scope or protocol).
    joins_refused,
    /// Lookups, by either way.
    lookups,
    /// Proofs checked by frame.
    checks,
    /// Frames by which clients kept the server's lease, and nothing else.
    lease_renewals,
    /// Fetches asked for.
    fetches,
    /// Object bytes sent in fetches.
    fetch_bytes,
    /// Requests whose time was up before they were begun.
    expired,
    /// Fetches of versions that are gone.
    fetches_stale,
    /// Fetches that met damaged or missing bytes.
    fetches_damaged,
    /// Requests that made no sense.
    invalid,
    /// Puts begun.
    puts_begun,
    /// Puts that became visible.
    puts_committed,
    /// Puts that lost to a newer version.
    puts_superseded,
    /// Puts that ended otherwise.
    puts_failed,
    /// Bytes pulled, verified and written.
    pull_bytes,
    /// Pulls repeated because a rail failed.
    pulls_repeated,
    /// Pulls that brought bytes which failed their check.
    pulls_bad,
    /// Deletes done.
    deletes,
    /// Superseded versions whose files were removed.
    versions_reclaimed,
    /// Components without a valid header, removed at start.
    debris_removed,
    /// Valid components that no record names, moved to lost/ at start.
    components_lost,
}

/// Counts one more.
pub fn count(counter: &AtomicU64) {
    add(counter, 1);
}

/// Counts so many more.
pub fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

/// A mutex whose holders never leave it half changed: a panic elsewhere does not spread.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// See the module's head.
#[derive(Debug)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// This run.
    pub incarnation: u64,
    /// The stripe directories, locked.
    pub store: Arc<Store>,
    /// Lookups, checks and publishes.
    pub publisher: Arc<Publisher>,
    /// Clients.
    pub sessions: Mutex<Sessions<Arc<dyn Rail>>>,
    /// See there.
    pub counters: Counters,
    /// Who may do what.
    pub access: Access,
    /// Why files could not be loaded again, one line each.
    pub reload_trouble: Mutex<Vec<String>>,
    /// Clients that watch.
    pub watchers: AtomicU64,
    /// The one that the rails use too.
    pub clock: Clock,
    /// For work that waits.
    pub runtime: Handle,
    /// How the stripe directories are.
    pub health: Health,
    /// Each directory's share of the threads that wait for disks.
    pub shares: Shares,
    /// Open components: let go where descriptors are short.
    pub files: Arc<Files>,
    /// How long a request to a client may take.
    pub request_timeout: Duration,
}

impl Node {
    /// Directories that are not well are logged.
    pub fn new(
        name: String,
        incarnation: u64,
        store: Arc<Store>,
        publisher: Arc<Publisher>,
        clock: Clock,
        runtime: Handle,
    ) -> Node {
        let (health, shares) = (Health::new(&store), Shares::new(&store, clock));
        Node {
            name,
            incarnation,
            store,
            publisher,
            sessions: Mutex::default(),
            counters: Counters::default(),
            access: Access::default(),
            reload_trouble: Mutex::default(),
            watchers: AtomicU64::new(0),
            clock,
            runtime,
            health,
            shares,
            files: Arc::default(),
            request_timeout: railfs_proto::limits::PULL,
        }
    }

    /// Whether a request is meant for this run of this node of this store.
    ///
    /// # Errors
    /// `Invalid` without a scope, `WrongStore`, `WrongIncarnation`.
    pub fn check_scope(&self, scope: Option<&v1::Scope>) -> Result<(), Refusal> {
        let Some(scope) = scope else {
            return Err(Refusal::new(Code::Invalid, "the request names no store, node and incarnation"));
        };
        if scope.store != self.store.id().0[..] {
            let message = format!("the request is for another store; here is store {}", self.store.id());
            return Err(Refusal::new(Code::WrongStore, message));
        }
        if scope.node != self.name || scope.incarnation != self.incarnation {
            let message = format!(
                "the request is for incarnation {} of another run; here is {} in incarnation {}",
                scope.incarnation, self.name, self.incarnation
            );
            return Err(Refusal::new(Code::WrongIncarnation, message));
        }
        Ok(())
    }

    /// Whether a client may do something in a namespace; a refusal is counted.
    ///
    /// # Errors
    /// `Denied`, see [`Access::check`].
    pub fn check_access(&self, who: Option<&Identity>, namespace: &Namespace, need: Need) -> Result<(), Refusal> {
        self.access.check(who, namespace.as_str(), need).inspect_err(|refusal| self.denied(refusal))
    }

    /// The same for what is of no namespace.
    ///
    /// # Errors
    /// `Denied`: they may read none.
    pub fn check_access_to_any(&self, who: Option<&Identity>) -> Result<(), Refusal> {
        self.access.check_any(who).inspect_err(|refusal| self.denied(refusal))
    }

    fn denied(&self, refusal: &Refusal) {
        count(&self.counters.denied);
        tracing::debug!(reason = %refusal.message, "a request was refused");
    }

    /// Its own scope.
    pub fn scope(&self) -> v1::Scope {
        v1::Scope { store: self.store.id().to_bytes(), node: self.name.clone(), incarnation: self.incarnation }
    }

    /// A read, write or sync in the directory failed: it takes no new component from here on. Where more can be seen of
    /// it (it is not in its place, or read-only), that is what is noted.
    pub fn suspect(&self, directory: Id, why: &str) {
        match self.store.directory(directory).map(health::look) {
            Some(Err((condition, seen))) => self.worsen(directory, condition, &format!("{seen} ({why})")),
            _ => self.worsen(directory, Condition::Suspect, why),
        }
    }

    /// [`Node::suspect`] where nothing may wait for a disk; where the directory does not answer it is suspect without a look.
    pub fn suspect_soon(self: &Arc<Self>, directory: Id, why: String) {
        let node = Arc::clone(self);
        self.runtime.spawn(async move {
            let (looking, said) = (Arc::clone(&node), why.clone());
            let looked = match node.shares.of(directory) {
                Some(share) => share.run(share::WAIT, move || looking.suspect(directory, &said)).await.is_ok(),
                None => false,
            };
            if !looked {
                node.worsen(directory, Condition::Suspect, &why);
            }
        });
    }

    /// Has every directory looked at, each by itself, and tells of those that do not answer. To be called about once a
    /// second; waits for none.
    pub fn look_at_directories(self: &Arc<Self>) {
        for share in self.shares.all() {
            share.tell();
            // One that hangs holds up its own look alone.
            let Some(look) = share.look() else { continue };
            let node = Arc::clone(self);
            self.runtime.spawn_blocking(move || {
                let id = look.directory();
                if let Some(Err((condition, why))) = node.store.directory(id).map(health::look) {
                    node.worsen(id, condition, &why);
                }
                drop(look);
            });
        }
    }

    /// Whether every directory is well, and answers.
    pub fn is_well(&self) -> bool {
        self.health.is_well() && self.shares.all().iter().all(|share| share.silent().is_none())
    }

    fn worsen(&self, directory: Id, condition: Condition, why: &str) {
        if self.health.worsen(directory, condition, why)
            && condition >= Condition::ReadOnly
            && let Some(state) = self.health.of(directory).filter(|state| state.holds_log)
        {
            let what = format!("log directory {} ({directory}) is {}: {why}", state.path, condition.name());
            self.publisher.make_read_only(&what);
        }
    }

    /// How the directory is; one that the store does not have is missing.
    pub fn condition(&self, directory: Id) -> Condition {
        self.health.of(directory).map_or(Condition::Missing, |state| state.condition)
    }
}
