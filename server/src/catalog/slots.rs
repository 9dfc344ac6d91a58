//! Version slots of one incarnation, and whose turn it is to publish a name.
//!
//! Guarantees: publishes of one name happen one after another, in the order in which they asked; from before a publish
//! commits until it has ended its slot is in progress; a slot never shows the same quiet value before and after a
//! publish; a publish whose outcome is unknown leaves its name in progress for ever. Lookups that had to wait take
//! their turn in the same queue, so a name that is overwritten without a pause is still looked up.
//!
//! One mutex guards all changes. Readers of a quiet slot do not take it.

use railfs_proto::descriptor::Proof;
use railfs_proto::name::ObjectName;
use railfs_proto::slot::Slot;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// How many slots an incarnation has unless told otherwise.
pub const DEFAULT_SLOTS: usize = 1 << 20;

/// Where a name's slot is, and the hash that tells names of one slot apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index of the slot.
    pub slot: u32,
    /// Hash of the name, keyed afresh in each incarnation.
    pub tag: u64,
}

/// Why a name cannot be published now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TurnError {
    /// A publish of this name has an unknown outcome: only a restart ends it.
    #[error("an earlier publish of this name has an unknown outcome; a restart of the server decides it")]
    Stuck,
    /// 255 publishes are in progress in one slot.
    #[error("too many publishes are in progress in one slot")]
    Crowded,
}

/// The slots of one incarnation. See the module's head.
#[derive(Debug)]
pub struct Slots {
    node: String,
    incarnation: u64,
    words: Arc<[AtomicU64]>,
    slot_key: RandomState,
    tag_key: RandomState,
    /// Names being published, or being looked up in turn, by tag. Two names with one tag wait for each other: harmless.
    turns: Mutex<HashMap<u64, Turns>>,
}

#[derive(Debug)]
struct Turns {
    slot: u32,
    holder: Holder,
    queue: VecDeque<Waiting>,
    /// Woken whenever a publish of the name ends.
    watchers: Vec<oneshot::Sender<()>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    Publisher,
    Readers(usize),
    Stuck,
}

#[derive(Debug)]
enum Waiting {
    Publisher(oneshot::Sender<Result<PublishTurn, TurnError>>),
    Reader(oneshot::Sender<ReadTurn>),
}

/// What is to be sent once the mutex is released: a turn that nobody receives releases itself, which takes the mutex.
#[derive(Debug)]
enum Grant {
    Publisher(oneshot::Sender<Result<PublishTurn, TurnError>>, Result<PublishTurn, TurnError>),
    Reader(oneshot::Sender<ReadTurn>, ReadTurn),
    Wake(oneshot::Sender<()>),
}

impl Slots {
    /// `size` slots (at least one, at most 2^32 - 1), all quiet.
    pub fn new(node: &str, incarnation: u64, size: usize) -> Arc<Slots> {
        let size = size.clamp(1, usize::try_from(u32::MAX).unwrap_or(usize::MAX));
        let start = Slot::START.encode(incarnation);
        Arc::new(Slots {
            node: node.to_owned(),
            incarnation,
            words: (0..size).map(|_| AtomicU64::new(start)).collect(),
            slot_key: RandomState::new(),
            tag_key: RandomState::new(),
            turns: Mutex::new(HashMap::new()),
        })
    }

    /// The node whose slots these are.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// The run of the server whose slots these are.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// The words themselves, to be registered read-only.
    pub fn words(&self) -> &Arc<[AtomicU64]> {
        &self.words
    }

    /// Where a name's slot is.
    pub fn place(&self, name: &ObjectName) -> Place {
        let parts = (name.namespace.as_str(), name.key.as_bytes());
        // The remainder is below the number of slots, which fits 32 bits.
        let slot = self.slot_key.hash_one(parts) % u64::try_from(self.words.len()).unwrap_or(1);
        Place { slot: u32::try_from(slot).unwrap_or(0), tag: self.tag_key.hash_one(parts) }
    }

    /// What a lookup that ends with this quiet word hands out.
    pub fn proof(&self, place: Place, value: u64) -> Proof {
        Proof { node: self.node.clone(), incarnation: self.incarnation, slot: place.slot, value, name_tag: place.tag }
    }

    /// The slot's quiet word, unless this very name is being published. Other names of the slot do not matter: when
    /// their publish ends the counter moves, and the word with it. Never waits for a publish.
    pub fn observe(&self, place: Place) -> Option<u64> {
        let slot = self.read(place.slot)?;
        if slot.in_progress > 0 {
            let turns = self.lock();
            // Again under the mutex: word and turns agree there.
            let slot = self.read(place.slot)?;
            return (!publishing(&turns, place.tag)).then(|| slot.quiet().encode(self.incarnation));
        }
        Some(slot.encode(self.incarnation))
    }

    /// As [`Slots::observe`] for a check against `value`: a word that differs is an answer even while the name is being
    /// published, for the counter never comes back. Otherwise a receiver that is woken when the publish has ended.
    pub fn check(&self, place: Place, value: u64) -> Option<Result<u64, oneshot::Receiver<()>>> {
        let slot = self.read(place.slot)?;
        let word = slot.quiet().encode(self.incarnation);
        if slot.in_progress == 0 || word != value {
            return Some(Ok(word));
        }
        let mut turns = self.lock();
        let word = self.read(place.slot)?.quiet().encode(self.incarnation);
        match turns.get_mut(&place.tag) {
            Some(turn) if word == value && !matches!(turn.holder, Holder::Readers(_)) => {
                let (sender, receiver) = oneshot::channel();
                turn.watchers.retain(|watcher| !watcher.is_closed());
                turn.watchers.push(sender);
                Some(Err(receiver))
            }
            _ => Some(Ok(word)),
        }
    }

    /// Waits until it is this caller's turn to publish the name; its slot is in progress from then on.
    pub async fn begin_publish(self: &Arc<Self>, place: Place) -> Result<PublishTurn, TurnError> {
        let (sender, receiver) = oneshot::channel();
        self.enqueue(place, Waiting::Publisher(sender))?;
        receiver.await.unwrap_or(Err(TurnError::Stuck))
    }

    /// Waits until it is this caller's turn to look the name up: while the turn is held, nothing publishes the name.
    pub async fn begin_read(self: &Arc<Self>, place: Place) -> Result<ReadTurn, TurnError> {
        let (sender, receiver) = oneshot::channel();
        self.enqueue(place, Waiting::Reader(sender))?;
        receiver.await.map_err(|_| TurnError::Stuck)
    }

    fn enqueue(self: &Arc<Self>, place: Place, waiting: Waiting) -> Result<(), TurnError> {
        let grants = {
            let mut turns = self.lock();
            let fresh =
                Turns { slot: place.slot, holder: Holder::Readers(0), queue: VecDeque::new(), watchers: Vec::new() };
            let turn = turns.entry(place.tag).or_insert(fresh);
            if turn.holder == Holder::Stuck {
                return Err(TurnError::Stuck);
            }
            turn.queue.push_back(waiting);
            self.grant(&mut turns, place.tag)
        };
        send(grants);
        Ok(())
    }

    /// Gives the turn to whoever is next, if it is free; forgets the name when nobody is left.
    fn grant(self: &Arc<Self>, turns: &mut HashMap<u64, Turns>, tag: u64) -> Vec<Grant> {
        let mut grants = Vec::new();
        let Some(turn) = turns.get_mut(&tag) else { return grants };
        while let Holder::Readers(readers) = turn.holder {
            match turn.queue.pop_front() {
                Some(Waiting::Publisher(sender)) if sender.is_closed() => {}
                Some(Waiting::Reader(sender)) if sender.is_closed() => {}
                Some(Waiting::Reader(sender)) => {
                    turn.holder = Holder::Readers(readers + 1);
                    let place = Place { slot: turn.slot, tag };
                    grants.push(Grant::Reader(sender, ReadTurn { slots: Arc::clone(self), place }));
                }
                Some(Waiting::Publisher(sender)) if readers > 0 => {
                    turn.queue.push_front(Waiting::Publisher(sender));
                    return grants;
                }
                Some(Waiting::Publisher(sender)) => {
                    let place = Place { slot: turn.slot, tag };
                    let granted = match self.read(turn.slot).and_then(Slot::begin) {
                        Some(slot) => {
                            self.store(turn.slot, slot);
                            turn.holder = Holder::Publisher;
                            let slots = Arc::clone(self);
                            Ok(PublishTurn { slots, place, stage: Stage::Begun })
                        }
                        None => Err(TurnError::Crowded),
                    };
                    grants.push(Grant::Publisher(sender, granted));
                }
                None => {
                    if readers == 0 {
                        turns.remove(&tag);
                    }
                    return grants;
                }
            }
        }
        grants
    }

    /// A publish ended, whatever came of it: one store moves the counter and counts down.
    fn end_publish(self: &Arc<Self>, place: Place) {
        let grants = {
            let mut turns = self.lock();
            let mut grants = Vec::new();
            if let Some(slot) = self.read(place.slot) {
                self.store(place.slot, slot.end());
            }
            if let Some(turn) = turns.get_mut(&place.tag) {
                turn.holder = Holder::Readers(0);
                grants.extend(turn.watchers.drain(..).map(Grant::Wake));
            }
            grants.extend(self.grant(&mut turns, place.tag));
            grants
        };
        send(grants);
    }

    fn end_read(self: &Arc<Self>, place: Place) {
        let grants = {
            let mut turns = self.lock();
            if let Some(Turns { holder: Holder::Readers(readers), .. }) = turns.get_mut(&place.tag) {
                *readers = readers.saturating_sub(1);
            }
            self.grant(&mut turns, place.tag)
        };
        send(grants);
    }

    /// The outcome is unknown: the name stays in progress, whoever waits for a turn is told, checks run out of time.
    fn stick(&self, place: Place) {
        let mut turns = self.lock();
        if let Some(turn) = turns.get_mut(&place.tag) {
            turn.holder = Holder::Stuck;
            turn.queue.clear();
        }
    }

    /// `None` for a slot that does not exist.
    fn read(&self, slot: u32) -> Option<Slot> {
        let word = self.words.get(usize::try_from(slot).ok()?)?.load(Ordering::SeqCst);
        Slot::decode(word, self.incarnation)
    }

    /// Callers hold the mutex.
    fn store(&self, slot: u32, value: Slot) {
        if let Some(word) = usize::try_from(slot).ok().and_then(|slot| self.words.get(slot)) {
            word.store(value.encode(self.incarnation), Ordering::SeqCst);
            // A device may read the word without our loads in between: nothing later may pass this store.
            fence(Ordering::SeqCst);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Turns>> {
        // Nothing in here panics half way through a change.
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Names in the table of turns: zero when all is quiet.
    pub fn busy_names(&self) -> usize {
        self.lock().len()
    }
}

fn publishing(turns: &HashMap<u64, Turns>, tag: u64) -> bool {
    turns.get(&tag).is_some_and(|turn| !matches!(turn.holder, Holder::Readers(_)))
}

fn send(grants: Vec<Grant>) {
    for grant in grants {
        // A receiver that has gone away drops what was sent, and the turn passes on.
        match grant {
            Grant::Publisher(sender, turn) => drop(sender.send(turn)),
            Grant::Reader(sender, turn) => drop(sender.send(turn)),
            Grant::Wake(sender) => drop(sender.send(())),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Begun,
    Committing,
    Over,
}

/// The turn to publish a name. Dropped before [`PublishTurn::committing`] it ends as a publish that did not happen;
/// dropped after it, without [`PublishTurn::finish`], the name stays in progress for ever.
#[derive(Debug)]
#[must_use = "the turn ends when this is dropped"]
pub struct PublishTurn {
    slots: Arc<Slots>,
    place: Place,
    stage: Stage,
}

impl PublishTurn {
    /// From here on the commit may become durable at any moment.
    pub fn committing(&mut self) {
        self.stage = Stage::Committing;
    }

    /// The commit happened, or is known not to have happened: the counter moves either way.
    pub fn finish(mut self) {
        self.stage = Stage::Over;
        self.slots.end_publish(self.place);
    }
}

impl Drop for PublishTurn {
    fn drop(&mut self) {
        match self.stage {
            Stage::Begun => self.slots.end_publish(self.place),
            Stage::Committing => self.slots.stick(self.place),
            Stage::Over => {}
        }
    }
}

/// The turn to look a name up, shared with the lookups next to it in the queue.
#[derive(Debug)]
#[must_use = "the turn ends when this is dropped"]
pub struct ReadTurn {
    slots: Arc<Slots>,
    place: Place,
}

impl Drop for ReadTurn {
    fn drop(&mut self) {
        self.slots.end_read(self.place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    fn name(key: &str) -> ObjectName {
        ObjectName::new("ns", key.as_bytes().to_vec()).unwrap()
    }

    /// Polls once: these futures only wait for each other.
    fn poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Poll<T> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    fn ready<T>(poll: Poll<T>) -> T {
        match poll {
            Poll::Ready(value) => value,
            Poll::Pending => panic!("not ready"),
        }
    }

    #[test]
    fn i3_a_slot_never_shows_one_quiet_word_before_and_after_a_publish() {
        let slots = Slots::new("n", 3, 8);
        let place = slots.place(&name("a"));
        let before = slots.observe(place).unwrap();
        let mut turn = ready(poll(pin!(slots.begin_publish(place)))).unwrap();
        assert_eq!(slots.observe(place), None);
        turn.committing();
        turn.finish();
        let after = slots.observe(place).unwrap();
        assert_ne!(before, after);
        // Known not to have happened: the counter moves all the same.
        drop(ready(poll(pin!(slots.begin_publish(place)))).unwrap());
        assert_ne!(slots.observe(place), Some(after));
        assert_eq!(slots.busy_names(), 0);
    }

    #[test]
    fn publishes_of_one_name_take_turns_in_order_and_a_lookup_gets_its_own() {
        let slots = Slots::new("n", 3, 8);
        let place = slots.place(&name("a"));
        let first = ready(poll(pin!(slots.begin_publish(place)))).unwrap();
        let mut second = pin!(slots.begin_publish(place));
        let mut reader = pin!(slots.begin_read(place));
        let mut third = pin!(slots.begin_publish(place));
        assert!(poll(second.as_mut()).is_pending());
        assert!(poll(reader.as_mut()).is_pending());
        assert!(poll(third.as_mut()).is_pending());
        first.finish();
        let second = ready(poll(second.as_mut())).unwrap();
        assert!(poll(reader.as_mut()).is_pending());
        second.finish();
        let reader = ready(poll(reader.as_mut())).unwrap();
        assert!(slots.observe(place).is_some());
        assert!(poll(third.as_mut()).is_pending());
        drop(reader);
        ready(poll(third.as_mut())).unwrap().finish();
        assert_eq!(slots.busy_names(), 0);
    }

    #[test]
    fn a_caller_that_goes_away_passes_its_turn_on() {
        let slots = Slots::new("n", 3, 8);
        let place = slots.place(&name("a"));
        let first = ready(poll(pin!(slots.begin_publish(place)))).unwrap();
        let mut third = pin!(slots.begin_publish(place));
        let mut last = pin!(slots.begin_read(place));
        {
            let mut gone_waiting = pin!(slots.begin_publish(place));
            assert!(poll(gone_waiting.as_mut()).is_pending());
        }
        assert!(poll(third.as_mut()).is_pending());
        assert!(poll(last.as_mut()).is_pending());
        first.finish();
        drop(ready(poll(third.as_mut())));
        drop(ready(poll(last.as_mut())));
        // Granted, but never received.
        let holder = ready(poll(pin!(slots.begin_publish(place)))).unwrap();
        {
            let mut granted = Box::pin(slots.begin_publish(place));
            assert!(poll(granted.as_mut()).is_pending());
            holder.finish();
        }
        assert_eq!(slots.busy_names(), 0);
        assert!(slots.observe(place).is_some());
    }

    #[test]
    fn i8_an_unknown_outcome_leaves_the_name_in_progress_and_others_served() {
        let slots = Slots::new("n", 3, 1);
        let (stuck, other) = (slots.place(&name("a")), slots.place(&name("b")));
        let value = slots.observe(stuck).unwrap();
        let mut turn = ready(poll(pin!(slots.begin_publish(stuck)))).unwrap();
        let mut waiting = pin!(slots.begin_publish(stuck));
        assert!(poll(waiting.as_mut()).is_pending());
        turn.committing();
        drop(turn);
        assert_eq!(ready(poll(waiting.as_mut())).unwrap_err(), TurnError::Stuck);
        assert_eq!(ready(poll(pin!(slots.begin_read(stuck)))).unwrap_err(), TurnError::Stuck);
        assert_eq!(slots.observe(stuck), None);
        assert!(matches!(slots.check(stuck, value), Some(Err(_))));
        // A name in the same slot is looked up, checked and (as far as the slot goes) published.
        assert_eq!(slots.observe(other), Some(value));
        assert!(matches!(slots.check(other, value), Some(Ok(word)) if word == value));
        ready(poll(pin!(slots.begin_publish(other)))).unwrap().finish();
        assert_ne!(slots.observe(other), Some(value));
    }

    #[test]
    fn i3_a_check_is_held_only_while_its_answer_is_open() {
        let slots = Slots::new("n", 3, 8);
        let place = slots.place(&name("a"));
        let value = slots.observe(place).unwrap();
        let turn = ready(poll(pin!(slots.begin_publish(place)))).unwrap();
        let Some(Err(mut held)) = slots.check(place, value) else { panic!("answered") };
        assert!(held.try_recv().is_err());
        turn.finish();
        held.try_recv().unwrap();
        let Some(Ok(now)) = slots.check(place, value) else { panic!("held") };
        assert_ne!(now, value);
        // An old value is not current, publish or not.
        let turn = ready(poll(pin!(slots.begin_publish(place)))).unwrap();
        assert!(matches!(slots.check(place, value), Some(Ok(word)) if word != value));
        turn.finish();
        assert!(slots.check(Place { slot: 8, tag: 0 }, 0).is_none());
    }

    #[test]
    fn the_256th_publish_in_one_slot_is_refused() {
        let slots = Slots::new("n", 3, 1);
        let turns: Vec<_> = (0..255)
            .map(|key| ready(poll(pin!(slots.begin_publish(slots.place(&name(&format!("k{key}"))))))).unwrap())
            .collect();
        let refused = ready(poll(pin!(slots.begin_publish(slots.place(&name("one more"))))));
        assert_eq!(refused.unwrap_err(), TurnError::Crowded);
        drop(turns);
        assert_eq!(slots.busy_names(), 0);
        assert!(slots.observe(slots.place(&name("x"))).is_some());
    }
}
