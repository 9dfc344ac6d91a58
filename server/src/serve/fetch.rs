//! Fetches: bytes of one component, inside one stripe, with their checksums and the check of the request's proof.
//!
//! Guarantees: nothing is sent that lies outside the component or the request's stripe; missing bytes are never success
//! (a short or failing disk makes the outcome DAMAGED, naming directory and component, and the connection goes on); the
//! proof is evaluated after the request arrived.

use super::files::{Component, Key, ReadError};
use super::lookup::proof_of;
use super::{Answer, Due, Server};
use crate::access::{Identity, Need};
use crate::health::Condition;
use crate::node::{add, count};
use crate::scarce::{lacks_descriptors, shortage};
use railfs_engine::rail::slab::Kept;
use railfs_engine::rail::{Bulk, Check, Sent};
use railfs_proto::checksum::page_checksums;
use railfs_proto::descriptor::{Id, Proof};
use railfs_proto::limits::MAX_EXTENT;
use railfs_proto::reply::{Refusal, ok_outcome};
use railfs_proto::v1::{self, Code, RailReply, rail_reply};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A fetch whose numbers make sense by themselves.
#[derive(Clone, Debug)]
struct Fetch {
    key: Key,
    offset: u64,
    length: u32,
    proof: Option<Proof>,
    fresh: bool,
}

fn invalid(message: impl Into<String>) -> Refusal {
    Refusal::new(Code::Invalid, message)
}

impl Fetch {
    fn from_message(request: &v1::FetchRequest) -> Result<Fetch, Refusal> {
        let directory = Id::from_bytes(&request.directory);
        let directory = directory.ok_or_else(|| invalid("the directory's id is not 16 bytes long"))?;
        if request.length == 0 || request.length > MAX_EXTENT {
            return Err(invalid(format!("a fetch of {} bytes is not one of 1 to {MAX_EXTENT}", request.length)));
        }
        let key = Key { version: request.version, component: request.component, directory };
        let proof = request.proof.as_ref().map(proof_of);
        Ok(Fetch { key, offset: request.offset, length: request.length, proof, fresh: request.fresh })
    }

    /// First page and number of pages, if the bytes lie in this component as they must.
    fn pages(&self, component: &Component) -> Result<(u64, usize), Refusal> {
        let (striping, geometry) = (component.striping(), component.geometry());
        let (page, stripe) = (u64::from(striping.page_size()), u64::from(striping.stripe_size()));
        let end = self.offset.checked_add(u64::from(self.length)).filter(|end| *end <= geometry.length());
        let Some(end) = end else {
            return Err(invalid(format!(
                "bytes {} and {} more are not in component {}, which has {}",
                self.offset,
                self.length,
                self.key.component,
                geometry.length()
            )));
        };
        if !self.offset.is_multiple_of(page) || !(end.is_multiple_of(page) || end == geometry.length()) {
            return Err(invalid(format!("bytes {} to {end} are not whole pages of {page}", self.offset)));
        }
        if self.offset / stripe != (end - 1) / stripe {
            return Err(invalid(format!("bytes {} to {end} cross a stripe of {stripe}", self.offset)));
        }
        let count = u64::from(self.length).div_ceil(page);
        // At most 256 pages of the smallest size make 1 MiB.
        Ok((self.offset / page, usize::try_from(count).unwrap_or(usize::MAX)))
    }
}

impl Server {
    pub(super) fn fetch(self: &Arc<Self>, request: v1::FetchRequest, who: Option<&Identity>, due: Due, answer: Answer) {
        count(&self.node.counters.fetches);
        let fetch = match Fetch::from_message(&request) {
            Ok(fetch) => fetch,
            Err(refusal) => return self.refuse_fetch(&refusal, answer),
        };
        if due.is_over(&self.node) {
            return answer.refuse(&Due::refusal());
        }
        // Everything at hand: answered here, without another thread.
        if let Some(component) = self.files.get(&fetch.key) {
            match self.may_read(who, &component).and_then(|()| fetch.pages(&component)) {
                Err(refusal) => return self.refuse_fetch(&refusal, answer),
                Ok((first, pages)) => {
                    if let Some(sums) = component.held_sums(first, pages) {
                        return self.send_fetch(&fetch, &component, sums, answer);
                    }
                }
            }
        }
        let (server, who) = (Arc::clone(self), who.cloned());
        self.node.runtime.spawn(async move {
            match server.prepare(&fetch, who.as_ref(), due).await {
                Ok((component, sums)) => server.send_fetch(&fetch, &component, sums, answer),
                Err(refusal) => server.refuse_fetch(&refusal, answer),
            }
        });
    }

    fn refuse_fetch(&self, refusal: &Refusal, answer: Answer) {
        let counters = &self.node.counters;
        match refusal.code {
            Code::Invalid => count(&counters.invalid),
            Code::Stale => count(&counters.fetches_stale),
            Code::Damaged => count(&counters.fetches_damaged),
            _ => {}
        }
        answer.refuse(refusal);
    }

    /// Whether the client may read the object that an open component is of.
    fn may_read(&self, who: Option<&Identity>, component: &Component) -> Result<(), Refusal> {
        // None that is served lacks it.
        component.namespace().map_or(Ok(()), |namespace| self.node.check_access(who, namespace, Need::Read))
    }

    /// Opens the component if need be and reads the checksums.
    async fn prepare(
        self: &Arc<Self>,
        fetch: &Fetch,
        who: Option<&Identity>,
        due: Due,
    ) -> Result<(Arc<Component>, Vec<u64>), Refusal> {
        let component = match self.files.get(&fetch.key) {
            Some(component) => component,
            None => self.open(fetch.key, who, due).await?,
        };
        self.may_read(who, &component)?;
        let (first, pages) = fetch.pages(&component)?;
        if due.is_over(&self.node) {
            return Err(Due::refusal());
        }
        let reading = Arc::clone(&component);
        let sums = match self.node.shares.of(fetch.key.directory) {
            Some(share) => share.run(due.left(&self.node), move || reading.sums(first, pages)).await?,
            // Cannot be: it was opened there.
            None => Err(ReadError::Missing),
        };
        match sums {
            Ok(sums) => Ok((component, sums)),
            Err(error) => Err(self.damaged(fetch.key, &error).await),
        }
    }

    /// A committed version's component. What was superseded stays readable until it is reclaimed.
    async fn open(self: &Arc<Self>, key: Key, who: Option<&Identity>, due: Due) -> Result<Arc<Component>, Refusal> {
        let catalog = self.node.publisher.catalog();
        let unavailable = |error: &dyn std::fmt::Display| Refusal::new(Code::Unavailable, error.to_string());
        let standing = catalog.standing(key.version).await.map_err(|error| unavailable(&error))?;
        let Some(standing) = standing else { return Err(gone(key)) };
        self.node.check_access(who, &standing.name.namespace, Need::Read)?;
        let replicas = standing.descriptor.components.get(key.component as usize);
        let here = |replicas: &Vec<railfs_proto::descriptor::Replica>| {
            replicas.iter().any(|replica| replica.directory == key.directory && replica.node == self.node.name)
        };
        if !replicas.is_some_and(here) {
            let message =
                format!("component {} of version {} is not in directory {}", key.component, key.version, key.directory);
            return Err(invalid(message));
        }
        let server = Arc::clone(self);
        let open = move || {
            let namespace = &standing.name.namespace;
            let open =
                || Component::open(&server.node.store, key, namespace.clone(), &standing.descriptor, server.direct);
            match open() {
                // What is only kept open gives way, once.
                Err(ReadError::Io(error)) if lacks_descriptors(&error) && server.files.let_go() > 0 => open(),
                opened => opened,
            }
        };
        let opened = match self.node.shares.of(key.directory) {
            Some(share) => share.run(due.left(&self.node), open).await?,
            None => Err(ReadError::Missing),
        };
        match opened {
            Err(error) => Err(self.damaged(key, &error).await),
            Ok(component) => {
                let component = Arc::new(component);
                if self.direct && component.direct().is_none() && !self.buffered.swap(true, Ordering::Relaxed) {
                    let path = self.node.health.of(key.directory).map(|state| state.path).unwrap_or_default();
                    tracing::warn!(
                        directory = path,
                        "its file system has no direct reads (O_DIRECT): object bytes of RDMA rails are read through the kernel's cache"
                    );
                }
                self.files.put(&component);
                // Reclaimed meanwhile: whoever did that may have looked before it was kept.
                if matches!(catalog.standing(key.version).await, Ok(None)) {
                    self.files.forget(&key);
                }
                Ok(component)
            }
        }
    }

    /// A component that cannot be read: of a version that is no longer current that is its end, else it is damage.
    async fn damaged(&self, key: Key, error: &ReadError) -> Refusal {
        self.files.forget(&key);
        if matches!(error, ReadError::Missing)
            && let Ok(standing) = self.node.publisher.catalog().standing(key.version).await
            && standing.is_none_or(|standing| standing.superseded.is_some())
        {
            return gone(key);
        }
        if let ReadError::Io(error) = error {
            if let Some(why) = suspicion(key, error) {
                self.node.suspect_soon(key.directory, why);
            }
            if let Some(refusal) = short(key, error) {
                return refusal;
            }
        }
        self.damage(key, &error.to_string())
    }

    fn damage(&self, key: Key, why: &str) -> Refusal {
        let Key { version, component, directory } = key;
        let state = self.node.health.of(directory);
        let path = state.as_ref().map(|state| state.path.clone()).unwrap_or_default();
        let message = match state.filter(|state| state.condition == Condition::Missing) {
            // That was said when it was noticed.
            Some(state) => format!(
                "component {component} of version {version} lies in stripe directory {path} ({directory}), which is missing: {}",
                state.why
            ),
            None => {
                let message = format!(
                    "component {component} of version {version} in stripe directory {path} ({directory}) is damaged: {why}"
                );
                // Each rail that a client tries meets it again.
                if self.said.is_new(key, why, self.node.clock.now()) {
                    tracing::error!("{message}");
                }
                message
            }
        };
        Refusal::new(Code::Damaged, message)
    }

    fn send_fetch(self: &Arc<Self>, fetch: &Fetch, component: &Arc<Component>, sums: Vec<u64>, answer: Answer) {
        // A rail's thread, which would read, serves other directories too.
        if let Some(refusal) = self.node.shares.of(fetch.key.directory).and_then(|share| share.refused()) {
            return self.refuse_fetch(&refusal, answer);
        }
        let offset = component.file_offset(fetch.offset);
        if component.direct().is_none() {
            // Only advice: the kernel may begin to read while the frame's header goes out.
            let _ = rustix::fs::fadvise(
                component.file(),
                offset,
                std::num::NonZeroU64::new(u64::from(fetch.length)),
                rustix::fs::Advice::WillNeed,
            );
        }
        let bulk = Bulk::File {
            file: Arc::clone(component.file()),
            offset,
            length: fetch.length,
            check: Some(check_of(fetch, component, sums.clone())),
            kept: Some(Kept {
                identity: fetch.key.identity(),
                direct: component.direct().cloned(),
                fresh: fetch.fresh,
            }),
        };
        let (server, fetch) = (Arc::clone(self), fetch.clone());
        answer.bulk(bulk, move |sent| server.fetched(&fetch, sums, &sent));
    }

    /// On the rail's thread, when the bytes have gone out.
    fn fetched(&self, fetch: &Fetch, sums: Vec<u64>, sent: &Sent) -> RailReply {
        add(&self.node.counters.fetch_bytes, sent.bytes.into());
        if sent.bytes != fetch.length || sent.error.is_some() {
            if let Some(refusal) = sent.error.as_ref().and_then(|error| short(fetch.key, error)) {
                return RailReply { outcome: Some(refusal.to_outcome()), body: None };
            }
            if let Some(why) = sent.error.as_ref().and_then(|error| suspicion(fetch.key, error)) {
                self.node.suspect_soon(fetch.key.directory, why);
            }
            count(&self.node.counters.fetches_damaged);
            let why = match &sent.error {
                Some(error) => format!("reading at {} failed after {} bytes: {error}", fetch.offset, sent.bytes),
                None => format!("the file ends {} bytes after {}", sent.bytes, fetch.offset),
            };
            self.files.forget(&fetch.key);
            return RailReply { outcome: Some(self.damage(fetch.key, &why).to_outcome()), body: None };
        }
        let reply = v1::FetchReply {
            version: fetch.key.version,
            component: fetch.key.component,
            offset: fetch.offset,
            length: sent.bytes,
            checksums: sums,
            check: fetch.proof.as_ref().and_then(|proof| self.check_now(proof)),
        };
        RailReply { outcome: Some(ok_outcome()), body: Some(rail_reply::Body::Fetch(reply)) }
    }
}

/// Whether bytes that came off the disk are those that were put: every page against its checksum.
fn check_of(fetch: &Fetch, component: &Component, sums: Vec<u64>) -> Check {
    let page_size = component.striping().page_size();
    let (version, index) = (fetch.key.version, fetch.key.component);
    let first = fetch.offset / u64::from(page_size);
    Check::new(move |bytes| page_checksums(version, index, first, page_size, bytes) == sums)
}

/// Why the directory is suspect: its disk failed.
fn suspicion(key: Key, error: &std::io::Error) -> Option<String> {
    let failed = error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error());
    failed.then(|| format!("reading component {} failed: {error}", key.component))
}

/// What is answered where a limit of the server was met: the component is not damaged.
fn short(key: Key, error: &std::io::Error) -> Option<Refusal> {
    let what = shortage(error)?;
    let message = format!("component {} of version {} cannot be read now: {what}", key.component, key.version);
    Some(Refusal::new(Code::Unavailable, message))
}

fn gone(key: Key) -> Refusal {
    Refusal::new(Code::Stale, format!("version {} is not here any more", key.version))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::Daemon;
    use railfs_engine::rail::Sent;

    #[test]
    fn i11_a_disk_that_fails_while_bytes_go_out_makes_its_directory_suspect_and_a_limit_does_not() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("d");
        std::fs::create_dir(&directory).unwrap();
        crate::store::init(std::slice::from_ref(&directory)).unwrap();
        let text = format!(
            "state_dir = {:?}\nstripe_dirs = [{directory:?}]\n[control]\nlisten = \"127.0.0.1:0\"\n[[rail]]\nfabric = \"f\"\nlisten = \"127.0.0.1:0\"\n",
            root.path().join("state")
        );
        let daemon = Daemon::start(&crate::config::parse(&text, "test", "n1").unwrap().0).unwrap();
        let server = daemon.server().unwrap();
        let directory = server.node.store.directories()[0].id();
        let key = Key { version: 5000, component: 0, directory };
        let fetch = Fetch { key, offset: 0, length: 4096, proof: None, fresh: false };
        let failed = |errno: rustix::io::Errno| {
            let sent = Sent { bytes: 0, error: Some(errno.into()) };
            server.fetched(&fetch, Vec::new(), &sent).outcome.unwrap()
        };
        for limit in [rustix::io::Errno::MFILE, rustix::io::Errno::NOMEM] {
            let said = failed(limit);
            assert!(said.code() == Code::Unavailable && said.message.contains("try again"), "{said:?}");
        }
        assert_eq!(server.node.condition(directory), Condition::Ok);
        assert_eq!(failed(rustix::io::Errno::IO).code(), Code::Damaged);
        let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while server.node.condition(directory) != Condition::Suspect {
            assert!(std::time::Instant::now() < end, "the directory is not suspect");
            std::thread::yield_now();
        }
        daemon.stop().unwrap();
    }
}
