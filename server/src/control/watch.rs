//! Watch: changes of a namespace by number, to one client, for as long as it takes them.
//!
//! Guarantees: a watcher is sent every change it wants, from the number it names on, once and in order; what is not sent yet
//! stays in the log, so that a watcher costs the same memory however slow it is; one that takes nothing, or acknowledges
//! nothing, for [`PATIENCE`] is cut off, and its last message says so and where to go on. The end of the server is said too,
//! and that the watcher may not read any more.
//!
//! What acknowledging means today: the server sends at most [`WINDOW`] messages ahead of what was acknowledged. Nothing is
//! remembered of a watcher that has gone: it says by itself where it goes on.

use crate::access::{Identity, Need};
use crate::catalog::{Catalog, Change, ChangesAt, ChangesError, Done};
use crate::node::Node;
use prost::Message;
use railfs_proto::limits::MAX_KEY;
use railfs_proto::name::Namespace;
use railfs_proto::reply::{Refusal, ok_outcome};
use railfs_proto::v1::{self, Code};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_stream::{Stream, StreamExt};
use tonic::Status;

/// Most watchers of one server.
pub const MAX_WATCHERS: u64 = 64;
/// A watcher that takes or acknowledges nothing for this long is cut off.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Messages with changes that may be sent ahead of what was acknowledged.
pub const WINDOW: usize = 16;
/// Changes of one message; in tests few, so that a window of them is.
const BATCH: usize = if cfg!(test) { 16 } else { 256 };
/// Bytes of one message, about.
const BATCH_BYTES: usize = railfs_proto::limits::PAGE_BYTES;
/// Messages that wait to be sent.
const QUEUE: usize = 2;
/// While nothing that is wanted happens, a watcher hears this often how far it has come.
const BEAT: Duration = Duration::from_secs(5);

/// What a watcher wants.
#[derive(Clone, Debug)]
pub struct Wanted {
    namespace: Namespace,
    prefix: Vec<u8>,
    /// 0: what comes after now.
    from: u64,
    acknowledges: bool,
    /// Whoever watches, and where it is asked whether it still may. `None`: nobody asks.
    watcher: Option<(Arc<Node>, Option<Identity>)>,
}

impl Wanted {
    /// Checks the first message of a watch.
    ///
    /// # Errors
    /// A wrong scope, `Invalid`, `Denied`.
    pub fn of(node: &Arc<Node>, request: &v1::WatchRequest, who: Option<Identity>) -> Result<Wanted, Refusal> {
        node.check_scope(request.scope.as_ref())?;
        let namespace =
            Namespace::new(&request.namespace).map_err(|error| Refusal::new(Code::Invalid, error.to_string()))?;
        if request.prefix.len() > MAX_KEY + 1 {
            let message = format!("the prefix has {} bytes, more than a key and a '/'", request.prefix.len());
            return Err(Refusal::new(Code::Invalid, message));
        }
        let prefix = request.prefix.to_vec();
        let watcher = Some((Arc::clone(node), who));
        let wanted = Wanted { namespace, prefix, from: request.from, acknowledges: request.acknowledges, watcher };
        wanted.check()?;
        Ok(wanted)
    }

    /// Rights may be taken away while it goes on.
    fn check(&self) -> Result<(), Refusal> {
        let Some((node, who)) = &self.watcher else { return Ok(()) };
        node.check_access(who.as_ref(), &self.namespace, Need::Read)
    }

    fn wants(&self, change: &Change) -> bool {
        change.name.namespace == self.namespace && change.name.key.as_bytes().starts_with(&self.prefix)
    }
}

fn message(change: Change) -> v1::Change {
    let mut message = v1::Change {
        sequence: change.sequence,
        time_seconds: change.time.seconds,
        time_nanoseconds: change.time.nanoseconds,
        key: change.name.key.to_bytes(),
        ..Default::default()
    };
    match change.done {
        Done::Put(descriptor) => {
            message.version = descriptor.version;
            message.descriptor = Some(descriptor.to_message());
        }
        Done::Delete { version, deleted } => {
            message.version = version;
            message.deleted = true;
            message.before = deleted;
        }
    }
    message
}

/// What was sent and not acknowledged: pure.
#[derive(Debug, Default)]
struct Window {
    /// Where each message with changes ends.
    ends: VecDeque<u64>,
    last: u64,
}

impl Window {
    fn sent(&mut self, next: u64, changes: bool) {
        if changes {
            self.ends.push_back(next);
        }
        self.last = next;
    }

    /// False: that was never sent.
    fn acknowledged(&mut self, next: u64) -> bool {
        while self.ends.front().is_some_and(|end| *end <= next) {
            self.ends.pop_front();
        }
        next <= self.last
    }

    fn is_full(&self) -> bool {
        self.ends.len() >= WINDOW
    }
}

/// One of the watchers that are counted.
#[derive(Debug)]
pub struct Seat(Arc<Node>);

impl Seat {
    /// # Errors
    /// `OverBudget`: there are [`MAX_WATCHERS`].
    pub fn take(node: &Arc<Node>) -> Result<Seat, Refusal> {
        let more = |taken| (taken < MAX_WATCHERS).then_some(taken + 1);
        let counter: &AtomicU64 = &node.watchers;
        match counter.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more) {
            Ok(_) => Ok(Seat(Arc::clone(node))),
            Err(taken) => {
                Err(Refusal::new(Code::OverBudget, format!("{taken} clients watch already: end one of them")))
            }
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.watchers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Where messages of a watch go.
pub type Out = mpsc::Sender<Result<v1::WatchReply, Status>>;

/// A stream of messages, and its other end.
pub fn channel() -> (Out, mpsc::Receiver<Result<v1::WatchReply, Status>>) {
    // One place more is kept for the last word.
    mpsc::channel(QUEUE + 1)
}

/// Sends changes until the watcher goes away or is cut off, or the server stops. `acknowledged` are the numbers that the
/// client names.
pub async fn run(
    catalog: Arc<dyn Catalog>,
    wanted: Wanted,
    acknowledged: impl Stream<Item = u64> + Unpin,
    out: Out,
    stopping: watch::Receiver<bool>,
) {
    let Ok(last_word) = out.clone().reserve_owned().await else { return };
    let gone = out.clone();
    let mut feed = Feed { catalog, wanted, at: ChangesAt::number(0), window: Window::default(), out, said: 0 };
    let ended = tokio::select! {
        ended = feed.run(acknowledged) => ended,
        () = gone.closed() => return,
        () = stopped(stopping) => Err(Refusal::new(Code::Unavailable, "the server is stopping")),
    };
    if let Err(refusal) = ended {
        tracing::info!(reason = %refusal.message, "a watcher was cut off");
        let next = feed.said;
        last_word.send(Ok(v1::WatchReply { outcome: Some(refusal.to_outcome()), next, ..Default::default() }));
    }
}

async fn stopped(mut stopping: watch::Receiver<bool>) {
    // An error: whoever could stop it is gone.
    let _ = stopping.wait_for(|stopping| *stopping).await;
}

struct Feed {
    catalog: Arc<dyn Catalog>,
    wanted: Wanted,
    at: ChangesAt,
    window: Window,
    out: Out,
    /// The `next` of the last message.
    said: u64,
}

impl Feed {
    async fn run(&mut self, mut acknowledged: impl Stream<Item = u64> + Unpin) -> Result<(), Refusal> {
        let mut latest = self.catalog.latest();
        let now = *latest.borrow_and_update();
        let from = if self.wanted.from == 0 { now.saturating_add(1) } else { self.wanted.from };
        self.at = ChangesAt::number(from);
        let (mut begun, mut caught_up) = (false, false);
        let mut pending = VecDeque::new();
        let mut acknowledging = self.wanted.acknowledges;
        loop {
            while self.wanted.acknowledges && self.window.is_full() {
                let next = timeout(PATIENCE, acknowledged.next()).await.ok().flatten();
                self.acknowledge(next.ok_or_else(|| slow("acknowledged", self.said))?)?;
            }
            latest.mark_unchanged();
            let read = self.catalog.changes(self.at, BATCH).await.map_err(|error| refusal(&error))?;
            self.at = read.at;
            pending.extend(read.changes.into_iter().filter(|change| self.wanted.wants(change)).map(message));
            let more = self.at.next <= read.latest;
            let said = (self.at.next, read.oldest, read.latest);
            // The first message says where it begins, and one that it has come to the end of what there was, also when
            // nothing in between was wanted.
            let end = !more && !caught_up;
            caught_up |= end;
            if !begun || !pending.is_empty() || (end && self.said != said.0) {
                begun = true;
                self.send(&mut pending, said).await?;
            }
            if more {
                continue;
            }
            loop {
                tokio::select! {
                    next = acknowledged.next(), if acknowledging => match next {
                        Some(next) => self.acknowledge(next)?,
                        None => acknowledging = false,
                    },
                    changed = latest.changed() => match changed {
                        Ok(()) => break,
                        Err(_) => return Err(Refusal::new(Code::Unavailable, "the server is stopping")),
                    },
                    () = tokio::time::sleep(BEAT), if self.said != said.0 => self.send(&mut pending, said).await?,
                }
            }
        }
    }

    fn acknowledge(&mut self, next: u64) -> Result<(), Refusal> {
        if self.window.acknowledged(next) {
            return Ok(());
        }
        let message = format!("number {next} was acknowledged, which was not sent yet");
        Err(Refusal::new(Code::Invalid, message))
    }

    /// Sends what is pending, at least one message.
    async fn send(
        &mut self,
        pending: &mut VecDeque<v1::Change>,
        (next, oldest, latest): (u64, u64, u64),
    ) -> Result<(), Refusal> {
        loop {
            let (mut changes, mut bytes) = (Vec::new(), 0);
            while let Some(change) = pending.front()
                && (changes.is_empty() || bytes + change.encoded_len() <= BATCH_BYTES)
            {
                bytes += change.encoded_len();
                changes.extend(pending.pop_front());
            }
            // Everything wanted below the next change has been sent.
            let next = pending.front().map_or(next, |change| change.sequence);
            let late = |_| slow("taken", self.said);
            let room = timeout(PATIENCE, self.out.reserve()).await.map_err(late)?;
            // It is closed: the watcher is gone, and so is whoever waits for this.
            let Ok(room) = room else { return Ok(()) };
            self.wanted.check()?;
            self.window.sent(next, !changes.is_empty());
            room.send(Ok(v1::WatchReply { outcome: Some(ok_outcome()), changes, next, oldest, latest }));
            self.said = next;
            if pending.is_empty() {
                return Ok(());
            }
        }
    }
}

fn slow(what: &str, next: u64) -> Refusal {
    Refusal::new(
        Code::OverBudget,
        format!("nothing was {what} for {PATIENCE:?}: the watch is cut off; watch again from number {next}"),
    )
}

fn refusal(error: &ChangesError) -> Refusal {
    let code = match error {
        ChangesError::TooOld { .. } => Code::Stale,
        ChangesError::Beyond { .. } => Code::Invalid,
        ChangesError::Catalog(_) => Code::Unavailable,
    };
    Refusal::new(code, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::memory::MemoryCatalog;
    use crate::catalog::testing::{delete, put};
    use tokio_stream::wrappers::ReceiverStream;

    struct Rig {
        catalog: Arc<MemoryCatalog>,
        stop: watch::Sender<bool>,
    }

    struct Watcher {
        replies: mpsc::Receiver<Result<v1::WatchReply, Status>>,
        acknowledge: mpsc::Sender<u64>,
        task: tokio::task::JoinHandle<()>,
    }

    impl Rig {
        async fn new() -> Rig {
            let catalog = MemoryCatalog::new();
            catalog.reserve_versions(100_000).await.unwrap();
            Rig { catalog, stop: watch::Sender::new(false) }
        }

        fn watch(&self, prefix: &str, from: u64, acknowledges: bool) -> Watcher {
            let namespace = Namespace::new("ns").unwrap();
            let wanted = Wanted { namespace, prefix: prefix.as_bytes().to_vec(), from, acknowledges, watcher: None };
            let (acknowledge, acknowledged) = mpsc::channel(100);
            let (out, replies) = channel();
            let catalog: Arc<dyn Catalog> = self.catalog.clone();
            let acknowledged = ReceiverStream::new(acknowledged);
            let task = tokio::spawn(run(catalog, wanted, acknowledged, out, self.stop.subscribe()));
            Watcher { replies, acknowledge, task }
        }

        async fn puts(&self, prefix: &str, versions: std::ops::Range<u64>) {
            for version in versions {
                self.catalog.commit_put(put(&format!("{prefix}{version}"), version)).await.unwrap();
            }
        }
    }

    impl Watcher {
        async fn next(&mut self) -> v1::WatchReply {
            self.replies.recv().await.unwrap().unwrap()
        }
        async fn numbers(&mut self) -> Vec<u64> {
            self.next().await.changes.iter().map(|change| change.sequence).collect()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn changes_come_once_in_order_from_any_number() {
        let rig = Rig::new().await;
        rig.puts("a/", 2000..2010).await;
        let mut watcher = rig.watch("a/", 3, false);
        let first = watcher.next().await;
        assert_eq!(
            first.changes.iter().map(|change| change.sequence).collect::<Vec<_>>(),
            (3..=10).collect::<Vec<_>>()
        );
        assert_eq!((first.next, first.oldest, first.latest), (11, 1, 10));
        assert_eq!((first.changes[0].version, &first.changes[0].key[..]), (2002, &b"a/2002"[..]));
        rig.puts("b/", 2010..2011).await;
        rig.catalog.delete(delete("a/2003", 2020)).await.unwrap();
        let change = watcher.next().await.changes.remove(0);
        assert_eq!((change.sequence, change.deleted, change.version, change.before), (12, true, 2020, 2003));
        // What is not wanted still moves the number on, in time.
        rig.puts("b/", 2030..2031).await;
        let beat = watcher.next().await;
        assert!(beat.changes.is_empty() && beat.next == 14, "{beat:?}");
        let mut now = rig.watch("", 0, false);
        assert_eq!(now.next().await.next, 14);
        rig.puts("c", 2040..2041).await;
        assert_eq!(now.numbers().await, [14]);
        drop(watcher.replies);
        watcher.task.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn numbers_out_of_reach_are_refused() {
        let rig = Rig::new().await;
        rig.puts("", 2000..2003).await;
        let refused = rig.watch("", 9, false).next().await.outcome.unwrap();
        assert_eq!(refused.code(), Code::Invalid);
        assert!(refused.message.contains("no number 9 yet: the last one is 3"), "{}", refused.message);
        let old = refusal(&ChangesError::TooOld { wanted: 2, oldest: 7 });
        assert!(old.code == Code::Stale && old.message.contains("the oldest is 7"), "{old}");
    }

    #[tokio::test(start_paused = true)]
    async fn i6_a_watcher_that_takes_nothing_is_cut_off_with_a_word() {
        let rig = Rig::new().await;
        let mut watcher = rig.watch("", 1, false);
        assert_eq!(watcher.next().await.next, 1);
        rig.puts("", 2000..2200).await;
        let before = tokio::time::Instant::now();
        watcher.task.await.unwrap();
        assert!(before.elapsed() >= PATIENCE);
        let mut seen = Vec::new();
        let last = loop {
            let reply = watcher.replies.recv().await.expect("the last word comes before the end").unwrap();
            if reply.outcome.as_ref().unwrap().code() != Code::Ok {
                break reply;
            }
            seen.extend(reply.changes.iter().map(|change| change.sequence));
        };
        assert!(seen.len() <= BATCH * (QUEUE + 1) && seen == (1..=seen.len() as u64).collect::<Vec<_>>());
        let message = last.outcome.unwrap().message;
        assert!(
            message.contains("cut off") && message.contains(&format!("from number {}", seen.len() + 1)),
            "{message}"
        );
        assert!(watcher.replies.recv().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn i6_no_more_than_a_window_is_sent_ahead_of_acknowledgements() {
        let rig = Rig::new().await;
        rig.puts("", 2000..2000 + (BATCH * (WINDOW + 4)) as u64).await;
        let mut watcher = rig.watch("", 1, true);
        let mut last = 0;
        for _ in 0..WINDOW {
            last = watcher.next().await.next;
        }
        assert!(timeout(Duration::from_secs(1), watcher.replies.recv()).await.is_err(), "the window is full");
        watcher.acknowledge.send(last).await.unwrap();
        assert_eq!(watcher.numbers().await.first(), Some(&last));
        // Acknowledging what was never sent is no way to get more.
        watcher.acknowledge.send(last + 1_000_000).await.unwrap();
        let refused = loop {
            let outcome = watcher.next().await.outcome.unwrap();
            if outcome.code() != Code::Ok {
                break outcome;
            }
        };
        assert!(refused.code() == Code::Invalid && refused.message.contains("not sent yet"), "{refused:?}");
        let mut silent = rig.watch("", 1, true);
        let end = loop {
            let reply = silent.next().await;
            if reply.outcome.as_ref().unwrap().code() != Code::Ok {
                break reply;
            }
        };
        assert!(end.outcome.unwrap().message.contains("nothing was acknowledged for 30s"));
        assert_eq!(end.next, BATCH as u64 * WINDOW as u64 + 1);
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_what_there_was_is_said_at_once_and_can_be_acknowledged() {
        let rig = Rig::new().await;
        rig.puts("other", 2000..2000 + 2 * BATCH as u64).await;
        let mut watcher = rig.watch("mine", 1, true);
        let before = tokio::time::Instant::now();
        let mut next = 0;
        while next <= 2 * BATCH as u64 {
            let reply = watcher.next().await;
            assert!(reply.changes.is_empty() && reply.next > next);
            next = reply.next;
            watcher.acknowledge.send(next).await.unwrap();
        }
        assert!(before.elapsed() < BEAT);
        rig.puts("mine", 4000..4001).await;
        assert_eq!(watcher.numbers().await, [next]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_the_server_is_said() {
        let rig = Rig::new().await;
        let mut watcher = rig.watch("", 0, false);
        watcher.next().await;
        rig.stop.send_replace(true);
        let outcome = watcher.next().await.outcome.unwrap();
        assert_eq!((outcome.code(), outcome.message.as_str()), (Code::Unavailable, "the server is stopping"));
        assert!(watcher.replies.recv().await.is_none());
    }
}
