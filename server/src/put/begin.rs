//! The beginning of a put: layout, place, version, files, then pulls.

use super::files::{Components, WriteError};
use super::placement::{PlacementError, Room, place};
use super::{Active, Fate, MAX_PUTS, Puts, Stage};
use crate::catalog::{CatalogError, Refusal as CatalogRefusal};
use crate::health::Condition;
use crate::node::{Node, count, lock};
use crate::put::recover;
use crate::scarce::shortage;
use crate::share::WAIT;
use crate::store::StripeDirectory;
use railfs_proto::descriptor::{Attributes, Descriptor, Id, Replica};
use railfs_proto::limits::MIN_PAGE;
use railfs_proto::name::ObjectName;
use railfs_proto::reply::Refusal;
use railfs_proto::v1::Code;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

/// What a client asks for. 0 stands for the server's default.
#[derive(Clone, Debug)]
pub struct BeginPut {
    /// Whose put it is.
    pub session: u64,
    /// The object's name.
    pub name: ObjectName,
    /// Mode, time, owner.
    pub attributes: Attributes,
    /// Bytes of the object.
    pub size: u64,
    /// Bytes.
    pub stripe_size: u32,
    /// Bytes.
    pub page_size: u32,
    /// Components.
    pub width: u32,
}

/// What a failed call to the catalog is to a client that was putting or deleting.
pub fn catalog_refusal(error: &CatalogError) -> Refusal {
    let code = match error {
        CatalogError::Refused(CatalogRefusal::NoSpace(_) | CatalogRefusal::IndexFull(_)) => Code::NoSpace,
        // For good, as far as a client that waits is concerned: only a restart ends it.
        CatalogError::Refused(CatalogRefusal::ReadOnly(_) | CatalogRefusal::Frozen(_)) => Code::ReadOnly,
        CatalogError::Refused(CatalogRefusal::TooLong(_) | CatalogRefusal::RequestReused(_)) => Code::Invalid,
        CatalogError::Refused(_) | CatalogError::Unknown(_) => Code::Unavailable,
    };
    Refusal::new(code, error.to_string())
}

/// Room in the directories that take new components.
fn rooms(node: &Node) -> Vec<Room> {
    let healthy = |directory: &&StripeDirectory| {
        node.condition(directory.id()) == Condition::Ok && node.shares.silent(directory.id()).is_none()
    };
    let healthy = node.store.directories().iter().filter(healthy);
    let room = |directory: &StripeDirectory| match directory.space() {
        Ok(stat) => Some(Room { directory: directory.id(), available: stat.f_bavail.saturating_mul(stat.f_frsize) }),
        Err(error) => {
            if shortage(&error).is_none() {
                node.suspect(directory.id(), &format!("statvfs: {error}"));
            }
            None
        }
    };
    healthy.filter_map(room).collect()
}

impl Puts {
    /// What a failed write is to the client; a failed disk makes its directory suspect.
    pub(super) fn blame(&self, error: &WriteError) -> Refusal {
        if let Some(directory) = error.suspect() {
            self.node.suspect(directory, &error.to_string());
        }
        let code = match error {
            WriteError::NoSpace { .. } => Code::NoSpace,
            WriteError::Short { .. } => Code::Unavailable,
            _ => Code::Aborted,
        };
        Refusal::new(code, error.to_string())
    }

    /// Begins a put and starts pulling. Returns its id and the descriptor of what will be there.
    ///
    /// # Errors
    /// `Invalid`, `NoSpace` naming the directory (nothing is left behind), `ReadOnly`, `OverBudget`, `Unavailable`.
    pub async fn begin(self: &Arc<Self>, request: BeginPut) -> Result<(u64, Descriptor), Refusal> {
        let node = Arc::clone(&self.node);
        if self.stopping.load(Ordering::SeqCst) {
            return Err(Refusal::new(Code::Unavailable, "the server is stopping"));
        }
        if let Some(why) = node.publisher.read_only() {
            return Err(Refusal::new(Code::ReadOnly, why));
        }
        if let Some(why) = node.publisher.frozen() {
            return Err(Refusal::new(
                Code::ReadOnly,
                format!("publishing is frozen until railfsd is restarted: {why}"),
            ));
        }
        if self.len() >= MAX_PUTS {
            return Err(Refusal::new(Code::OverBudget, format!("{MAX_PUTS} puts are under way: try again later")));
        }
        let version = node.publisher.next_version().await.map_err(|error| catalog_refusal(&error))?;
        let settings = self.settings;
        let pick = |asked: u32, default: u32| if asked == 0 { default } else { asked };
        // Both defaults fit each other; with one asked for the other gives way.
        let mut stripe = pick(request.stripe_size, settings.stripe_size);
        let mut page = pick(request.page_size, settings.page_size);
        if request.stripe_size == 0 {
            stripe = stripe.max(page);
        } else if request.page_size == 0 {
            // Where the stripe is none at all the message is to be about the stripe.
            page = if stripe.is_power_of_two() { page.min(stripe.max(MIN_PAGE)) } else { MIN_PAGE };
        }
        let width = if request.width == 0 { settings.width } else { Some(request.width) };
        let name = request.name.clone();
        let attributes = request.attributes;
        let size = request.size;
        let node_name = node.name.clone();
        let puts = Arc::clone(self);
        let make = move || -> Result<(Descriptor, Components), Refusal> {
            let mut let_go = false;
            // A directory that fails here is out of the running: the others are tried, each time one fewer.
            loop {
                let (striping, places) = place(&rooms(&node), size, page, stripe, width).map_err(|error| {
                    let code = if error == PlacementError::NoDirectory { Code::ReadOnly } else { Code::Invalid };
                    Refusal::new(code, error.to_string())
                })?;
                let replica = |directory| vec![Replica { node: node_name.clone(), directory }];
                let components = places.into_iter().map(replica).collect();
                let descriptor = Descriptor { version, attributes, striping, components };
                match Components::create(&node.store, &name, &descriptor) {
                    Ok(made) => return Ok((descriptor, made)),
                    // What was lost and found goes before a put is refused: at most once in each directory.
                    Err(WriteError::NoSpace { directory, .. }) if empty_lost(&node, directory) => {}
                    // Components that are only kept open for reads give way, once.
                    Err(WriteError::Short { .. })
                        if !std::mem::replace(&mut let_go, true) && node.files.let_go() > 0 => {}
                    Err(error) => {
                        let refusal = puts.blame(&error);
                        if error.suspect().is_none() {
                            return Err(refusal);
                        }
                    }
                }
            }
        };
        let (descriptor, components) = self.at_disks(WAIT, make).await??;
        // A version is unique in the whole store, so it numbers its put as well.
        let put = version;
        let complete = size == 0;
        let active = Arc::new(Active {
            put,
            session: request.session,
            name: request.name,
            descriptor: descriptor.clone(),
            components,
            fate: watch::Sender::new(if complete { Fate::Complete } else { Fate::Pulling }),
            stage: Mutex::new(Stage::Open),
            commit: Mutex::default(),
        });
        lock(&self.active).insert(put, active);
        lock(&self.schedule).begin(put, request.session, descriptor.striping, self.node.clock.now());
        count(&self.node.counters.puts_begun);
        self.pump();
        Ok((put, descriptor))
    }
}

/// Whether anything was freed.
fn empty_lost(node: &Node, directory: Id) -> bool {
    node.store.directory(directory).is_some_and(|directory| recover::empty_lost(directory) > 0)
}
