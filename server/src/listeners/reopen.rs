//! A rail whose device failed, or could not be had at first, is opened again.
//!
//! Guarantees: what failed is stopped and given back before anything is opened in its place; attempts are 1 s to 30 s apart for
//! as long as they fail; what failed is logged once, with the reason, and said for as long as it lasts; slots that were exposed
//! are exposed again; nothing is opened after a stop. No lock is held over a call that can block. When to try is decided by
//! `Attempts`, which is pure.

use super::Counts;
use railfs_engine::clock::Time;
use railfs_engine::rail::backoff::Backoff;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The end of a rail that can fail as a whole.
pub trait Rail: Send + Sync + 'static {
    /// Why nothing can be had of it any more.
    fn failed(&self) -> Option<String>;
    /// Opens the slots of a run of the server to READs.
    ///
    /// # Errors
    /// It cannot.
    fn expose(&self, words: &Arc<[AtomicU64]>, incarnation: u64) -> Result<(), String>;
    /// What it has done.
    fn counts(&self) -> Counts;
    /// Ends all of it; says whether nothing is left by which a client could still READ a slot.
    fn stop(&self) -> bool;
}

/// When to open a rail that failed.
#[derive(Debug)]
struct Attempts {
    backoff: Backoff,
    /// Why it is not there, and when it is tried next.
    down: Option<(String, Time)>,
}

impl Attempts {
    fn new(seed: u64) -> Attempts {
        let (base, max, decay) = (Duration::from_secs(1), Duration::from_secs(30), Duration::from_secs(60));
        Attempts { backoff: Backoff::with(seed, base, max, decay), down: None }
    }

    /// Says whether that is news.
    fn failed(&mut self, now: Time, why: String) -> bool {
        let news = self.down.as_ref().is_none_or(|(last, _)| *last != why);
        self.down = Some((why, now.after(self.backoff.failed(now))));
        news
    }

    fn is_due(&self, now: Time) -> bool {
        self.down.as_ref().is_some_and(|(_, next)| now >= *next)
    }

    fn opened(&mut self, now: Time) {
        self.backoff.connected(now);
        self.down = None;
    }
}

struct State<R> {
    rail: Option<Arc<R>>,
    attempts: Attempts,
    exposed: Option<(Arc<[AtomicU64]>, u64)>,
    /// Of those that failed.
    past: Counts,
    reopened: u64,
    /// It was there at some time.
    been: bool,
    stopping: bool,
    /// Of those that failed nothing is left through which slots could be READ.
    unread: bool,
}

/// See the module.
pub struct Kept<R> {
    name: String,
    open: Box<dyn Fn() -> Result<R, String> + Send + Sync>,
    state: Mutex<State<R>>,
    /// One look at a time.
    tending: AtomicBool,
}

impl<R> std::fmt::Debug for Kept<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kept").field("name", &self.name).finish_non_exhaustive()
    }
}

impl<R: Rail> Kept<R> {
    /// Opens it; where that cannot be it begins as one that failed, see [`Kept::why`], and is tried again. `seed`: of the jitter
    /// between attempts.
    pub fn open(
        name: String,
        seed: u64,
        now: Time,
        open: impl Fn() -> Result<R, String> + Send + Sync + 'static,
    ) -> Kept<R> {
        let mut attempts = Attempts::new(seed);
        let rail = match open() {
            Ok(rail) => Some(Arc::new(rail)),
            Err(why) => {
                // Always news: whoever opens it says it.
                attempts.failed(now, why);
                None
            }
        };
        let state = State {
            been: rail.is_some(),
            rail,
            attempts,
            exposed: None,
            past: Counts::default(),
            reopened: 0,
            stopping: false,
            unread: true,
        };
        Kept { name, open: Box::new(open), state: Mutex::new(state), tending: AtomicBool::new(false) }
    }

    /// Why there is none now, as its device says it.
    pub fn why(&self) -> Option<String> {
        self.state().attempts.down.as_ref().map(|(why, _)| why.clone())
    }

    /// Whether it was there at some time: until then nobody is to be told of it.
    pub fn has_been(&self) -> bool {
        self.state().been
    }

    fn state(&self) -> MutexGuard<'_, State<R>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The one that is there now.
    pub fn now(&self) -> Option<Arc<R>> {
        self.state().rail.clone()
    }

    /// Why there is none now, one line.
    pub fn trouble(&self) -> Option<String> {
        let state = self.state();
        let (why, _) = state.attempts.down.as_ref()?;
        Some(format!("{}: {why}; it is opened again as soon as that can be", self.name))
    }

    /// How often it was opened again.
    pub fn reopened(&self) -> u64 {
        self.state().reopened
    }

    /// What it has done, those that failed included.
    pub fn counts(&self) -> Counts {
        let state = self.state();
        let now = state.rail.as_ref().map(|rail| rail.counts()).unwrap_or_default();
        Counts {
            sent: state.past.sent + now.sent,
            received: state.past.received + now.received,
            read: state.past.read + now.read,
            ..now
        }
    }

    /// As [`Rail::expose`], also for whatever is opened later.
    ///
    /// # Errors
    /// It cannot now.
    pub fn expose(&self, words: &Arc<[AtomicU64]>, incarnation: u64) -> Result<(), String> {
        let mut state = self.state();
        state.exposed = Some((Arc::clone(words), incarnation));
        let rail = state.rail.clone();
        drop(state);
        rail.map_or(Ok(()), |rail| rail.expose(words, incarnation))
    }

    /// Looks whether it failed, or can be had again. Can block for as long as devices do: not on a runtime's thread. To be called
    /// every second or so.
    pub fn tend(&self, now: Time) {
        if self.tending.swap(true, Ordering::SeqCst) {
            return;
        }
        self.retire(now);
        self.reopen(now);
        self.tending.store(false, Ordering::SeqCst);
    }

    fn retire(&self, now: Time) {
        let mut state = self.state();
        let Some(why) = state.rail.as_ref().and_then(|rail| rail.failed()) else { return };
        let Some(rail) = state.rail.take() else { return };
        tracing::error!(rail = self.name, %why, "a rail failed: its connections end, and its device is opened again");
        state.attempts.failed(now, why);
        // Whoever asks while it is being stopped is not told that nothing is left: that is known when its queue pairs are gone.
        let before = std::mem::replace(&mut state.unread, false);
        drop(state);
        let unread = rail.stop();
        let done = rail.counts();
        // What it has registered is given back before it is registered again.
        drop(rail);
        let mut state = self.state();
        state.unread = before && unread;
        let past = &mut state.past;
        (past.sent, past.received, past.read) =
            (past.sent + done.sent, past.received + done.received, past.read + done.read);
    }

    fn reopen(&self, now: Time) {
        let state = self.state();
        if state.stopping || !state.attempts.is_due(now) {
            return;
        }
        let exposed = state.exposed.clone();
        drop(state);
        let opened = (self.open)();
        if let (Ok(rail), Some((words, incarnation))) = (&opened, &exposed)
            && let Err(why) = rail.expose(words, *incarnation)
        {
            tracing::error!(rail = self.name, %why, "slots cannot be READ over this rail: its clients check by frame");
        }
        let mut state = self.state();
        match opened {
            Ok(rail) if state.stopping => {
                drop(state);
                rail.stop();
            }
            Ok(rail) => {
                tracing::info!(rail = self.name, "the rail is there again");
                state.rail = Some(Arc::new(rail));
                state.reopened += u64::from(state.been);
                state.been = true;
                state.attempts.opened(now);
            }
            Err(why) => {
                if state.attempts.failed(now, why.clone()) {
                    tracing::warn!(rail = self.name, %why, "the rail's device cannot be opened again yet");
                }
            }
        }
    }

    /// Ends it for good. Says whether nothing is left by which a client could still READ a slot.
    pub fn stop(&self) -> bool {
        let mut state = self.state();
        state.stopping = true;
        let (rail, unread) = (state.rail.take(), state.unread);
        drop(state);
        rail.is_none_or(|rail| rail.stop()) && unread
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// What devices do, as the tests want it.
    #[derive(Default)]
    struct Device {
        broken: Mutex<Option<String>>,
        refuses: Mutex<Option<String>>,
        /// In order: what was asked of it.
        log: Mutex<Vec<String>>,
        /// Stopping says so here, and waits for the word to end.
        slow: Mutex<Option<(mpsc::Sender<()>, mpsc::Receiver<()>)>>,
    }

    struct Fake(Arc<Device>);

    impl Device {
        fn note(&self, what: impl Into<String>) {
            self.log.lock().unwrap().push(what.into());
        }
        fn taken(&self) -> Vec<String> {
            std::mem::take(&mut self.log.lock().unwrap())
        }
        fn open(self: &Arc<Device>) -> Result<Fake, String> {
            self.note("open");
            match &*self.refuses.lock().unwrap() {
                Some(why) => Err(why.clone()),
                None => Ok(Fake(Arc::clone(self))),
            }
        }
    }

    impl Rail for Fake {
        fn failed(&self) -> Option<String> {
            self.0.broken.lock().unwrap().clone()
        }
        fn expose(&self, _: &Arc<[AtomicU64]>, incarnation: u64) -> Result<(), String> {
            self.0.note(format!("expose {incarnation}"));
            Ok(())
        }
        fn counts(&self) -> Counts {
            Counts { sent: 5, received: 3, connections: 1, ..Counts::default() }
        }
        fn stop(&self) -> bool {
            self.0.note("stop");
            if let Some((begun, end)) = &*self.0.slow.lock().unwrap() {
                begun.send(()).unwrap();
                end.recv().unwrap();
            }
            true
        }
    }

    impl Drop for Fake {
        fn drop(&mut self) {
            self.0.note("drop");
        }
    }

    fn kept() -> (Arc<Device>, Kept<Fake>) {
        let device = Arc::<Device>::default();
        let opens = Arc::clone(&device);
        let kept = Kept::open("rail 0".into(), 1, Time(0), move || opens.open());
        kept.expose(&Arc::from([AtomicU64::new(7)]), 42).unwrap();
        assert_eq!(device.taken(), ["open", "expose 42"]);
        (device, kept)
    }

    fn seconds(n: u64) -> Time {
        Time(0).after(Duration::from_secs(n))
    }

    #[test]
    fn i10_a_device_that_failed_is_given_back_and_opened_again_with_its_slots() {
        let (device, kept) = kept();
        kept.tend(seconds(1));
        assert_eq!(device.taken(), [""; 0], "nothing is done to what is well");

        *device.broken.lock().unwrap() = Some("device fake0 failed".into());
        *device.refuses.lock().unwrap() = Some("there is no device fake0".into());
        kept.tend(seconds(2));
        assert_eq!(device.taken(), ["stop", "drop"], "given back, and not opened in the same moment");
        assert!(kept.now().is_none());
        assert!(kept.trouble().unwrap().contains("rail 0: device fake0 failed"));
        assert_eq!(kept.counts(), Counts { sent: 5, received: 3, ..Counts::default() });

        // It stays away for ten minutes: it is tried, but not all the time.
        for second in 3..600 {
            kept.tend(seconds(second));
        }
        let tries = device.taken().len();
        assert!((15..60).contains(&tries), "{tries} attempts in ten minutes");
        assert!(kept.trouble().unwrap().contains("there is no device fake0"));

        *device.refuses.lock().unwrap() = None;
        *device.broken.lock().unwrap() = None;
        for second in 600..640 {
            kept.tend(seconds(second));
        }
        assert_eq!(device.taken(), ["open", "expose 42"]);
        assert!(kept.now().is_some() && kept.trouble().is_none());
        assert_eq!(kept.reopened(), 1);
        assert_eq!(kept.counts(), Counts { sent: 10, received: 6, connections: 1, ..Counts::default() });
    }

    #[test]
    fn i3_a_stop_while_a_device_is_given_back_does_not_say_that_nothing_is_left() {
        let (device, kept) = kept();
        *device.broken.lock().unwrap() = Some("gone".into());
        let ((begin, begun), (end, ended)) = (mpsc::channel(), mpsc::channel());
        *device.slow.lock().unwrap() = Some((begin, ended));
        std::thread::scope(|scope| {
            scope.spawn(|| kept.tend(seconds(1)));
            begun.recv().unwrap();
            let said = kept.stop();
            end.send(()).unwrap();
            assert!(!said, "its queue pairs are not gone yet: a client can READ what they show");
        });
        assert!(kept.stop(), "now they are");
    }

    #[test]
    fn nothing_is_opened_after_a_stop() {
        let (device, kept) = kept();
        *device.broken.lock().unwrap() = Some("gone".into());
        kept.tend(seconds(1));
        device.taken();
        assert!(kept.stop());
        kept.tend(seconds(100));
        assert_eq!(device.taken(), [""; 0]);
    }

    #[test]
    fn i10_a_device_that_cannot_be_had_at_first_is_tried_again_and_told_of_only_then() {
        let device = Arc::<Device>::default();
        *device.refuses.lock().unwrap() = Some("port 1 is not active".into());
        let opens = Arc::clone(&device);
        let kept = Kept::open("rail 0".into(), 1, Time(0), move || opens.open());
        kept.expose(&Arc::from([AtomicU64::new(7)]), 42).unwrap();
        assert_eq!(kept.why().as_deref(), Some("port 1 is not active"));
        assert!(kept.trouble().is_some() && kept.now().is_none() && !kept.has_been());
        for second in 0..10 {
            kept.tend(seconds(second));
        }
        assert!(device.taken().len() > 2 && !kept.has_been());
        *device.refuses.lock().unwrap() = None;
        for second in 10..60 {
            kept.tend(seconds(second));
        }
        assert_eq!(device.taken(), ["open", "expose 42"]);
        assert!(kept.now().is_some() && kept.trouble().is_none() && kept.has_been());
        assert_eq!(kept.reopened(), 0, "it was opened once");
        assert!(kept.stop());
    }
}
