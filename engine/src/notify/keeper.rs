//! The thread that tells the manager how this process fares: a line for people, and the watchdog's food.
//!
//! Guarantees: [`super::rounds`] decides; witnesses are asked here and answer on threads of their own, so one that hangs
//! holds up nothing but the feeding; the thread ends when its handle is dropped.

use super::rounds::Rounds;
use super::{Notifier, Word};
use crate::clock::{Clock, Time};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Between two looks at what people are shown.
const LOOK: Duration = Duration::from_secs(5);

/// What a witness calls to say that it is alive, or that it can never be asked again, and why. Dropped: neither (yet).
pub type Answer = Box<dyn FnOnce(Result<(), String>) + Send>;
/// Asks a witness; must not block. The error: it can never be asked again, and why.
pub type Ask = Box<dyn FnMut(Answer) -> Result<(), String> + Send>;

/// A part without which there is no progress.
pub struct Witness {
    /// For the log.
    pub name: &'static str,
    /// How to ask it.
    pub ask: Ask,
}

enum Event {
    Answered(usize, Result<(), String>),
    Stop,
}

/// See the module.
#[derive(Debug)]
pub struct Keeper {
    stop: Sender<Event>,
    thread: Option<JoinHandle<()>>,
}

struct Loop<S> {
    notifier: Arc<Notifier>,
    witnesses: Vec<Witness>,
    status: S,
    said: String,
    send: Sender<Event>,
}

impl Keeper {
    /// Starts the thread. `status` makes the line for people; it must not block.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(
        notifier: Arc<Notifier>,
        witnesses: Vec<Witness>,
        status: impl FnMut() -> String + Send + 'static,
    ) -> std::io::Result<Keeper> {
        let (send, events) = channel();
        let mut telling = Loop { notifier, witnesses, status, said: String::new(), send: send.clone() };
        let builder = std::thread::Builder::new().name("manager".to_owned());
        let thread = builder.spawn(move || telling.run(&events))?;
        Ok(Keeper { stop: send, thread: Some(thread) })
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // Fails only when the thread has ended.
        let _ = self.stop.send(Event::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl<S: FnMut() -> String> Loop<S> {
    fn run(&mut self, events: &Receiver<Event>) {
        let clock = Clock::start();
        let names: Vec<&'static str> = self.witnesses.iter().map(|witness| witness.name).collect();
        let mut rounds = self.notifier.watchdog().map(|limit| Rounds::new(limit, &names));
        let pause = rounds.as_ref().map_or(LOOK, |rounds| rounds.pause().min(LOOK));
        let mut next = clock.now();
        loop {
            let now = clock.now();
            match events.recv_timeout(next.since(now)) {
                Ok(Event::Answered(place, answer)) => {
                    if let Some(rounds) = &mut rounds {
                        match answer {
                            Ok(()) => rounds.answered(place),
                            Err(why) => self.gone(rounds, place, &why),
                        }
                    }
                }
                Ok(Event::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    let now = clock.now();
                    next = now.after(pause);
                    if let Some(rounds) = &mut rounds {
                        self.beat(rounds, now);
                    }
                    let line = (self.status)();
                    if line != self.said {
                        self.notifier.tell(&[Word::Status(&line)]);
                        self.said = line;
                    }
                }
            }
        }
    }

    fn beat(&mut self, rounds: &mut Rounds, now: Time) {
        let beat = rounds.beat(now);
        if beat.feed {
            self.notifier.tell(&[Word::Watchdog]);
        }
        match beat.say {
            Some((true, text)) => tracing::error!("{text}"),
            Some((false, text)) => tracing::info!("{text}"),
            None => {}
        }
        for place in beat.ask {
            let Some(witness) = self.witnesses.get_mut(place) else { continue };
            let send = self.send.clone();
            let answer: Answer = Box::new(move |answer| {
                // Nobody listens once the process ends.
                let _ = send.send(Event::Answered(place, answer));
            });
            if let Err(why) = (witness.ask)(answer) {
                self.gone(rounds, place, &why);
            }
        }
    }

    fn gone(&self, rounds: &mut Rounds, place: usize, why: &str) {
        let name = self.witnesses.get(place).map_or("", |witness| witness.name);
        tracing::error!("{name}: {why}; the watchdog goes by the others alone");
        rounds.gone(place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixDatagram;
    use std::sync::Mutex;

    /// What the manager hears next, line by line, apart from lines for people.
    fn hear(socket: &UnixDatagram, limit: Duration) -> Option<String> {
        let end = std::time::Instant::now() + limit;
        loop {
            let left = end.checked_duration_since(std::time::Instant::now())?;
            socket.set_read_timeout(Some(left.max(Duration::from_millis(1)))).unwrap();
            let mut buffer = [0; 1024];
            let Ok(length) = socket.recv(&mut buffer) else { continue };
            let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
            if !text.starts_with("STATUS=") {
                return Some(text);
            }
        }
    }

    #[test]
    fn one_that_goes_while_it_is_asked_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("n");
        let manager = UnixDatagram::bind(&path).unwrap();
        let notifier = Notifier::new(Some(path.into()), Some("200000".as_ref()), None, 1).unwrap();
        let stays: Ask = Box::new(|answer| {
            answer(Ok(()));
            Ok(())
        });
        let goes: Ask = Box::new(|answer| {
            answer(Err("it is gone".to_owned()));
            Ok(())
        });
        let witnesses = vec![Witness { name: "a", ask: goes }, Witness { name: "b", ask: stays }];
        let _keeper = Keeper::start(Arc::new(notifier), witnesses, String::new).unwrap();
        for _ in 0..3 {
            assert_eq!(hear(&manager, Duration::from_secs(20)).as_deref(), Some("WATCHDOG=1\n"));
        }
    }

    #[test]
    fn i9_the_watchdog_is_fed_while_all_answer_and_no_longer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("n");
        let manager = UnixDatagram::bind(&path).unwrap();
        let notifier = Notifier::new(Some(path.into()), Some("200000".as_ref()), None, 1).unwrap();
        // One answers at once, one only while it is told to.
        let parked: Arc<Mutex<(bool, Vec<Answer>)>> = Arc::default();
        let at_once: Ask = Box::new(|answer| {
            answer(Ok(()));
            Ok(())
        });
        let park = parked.clone();
        let other: Ask = Box::new(move |answer| {
            let mut parked = park.lock().unwrap();
            if parked.0 {
                parked.1.push(answer);
            } else {
                answer(Ok(()));
            }
            Ok(())
        });
        let witnesses = vec![Witness { name: "a", ask: at_once }, Witness { name: "b", ask: other }];
        let keeper = Keeper::start(Arc::new(notifier), witnesses, || "fine".to_owned()).unwrap();
        let long = Duration::from_secs(20);
        for _ in 0..3 {
            assert_eq!(hear(&manager, long).as_deref(), Some("WATCHDOG=1\n"));
        }
        parked.lock().unwrap().0 = true;
        // What was asked before is answered, and fed, once.
        let fed = (0..9).take_while(|_| hear(&manager, Duration::from_millis(500)).is_some()).count();
        assert!(fed < 9, "fed without an answer");
        assert_eq!(parked.lock().unwrap().1.len(), 1, "no second question before the first is answered");
        let (open, answers) = std::mem::take(&mut *parked.lock().unwrap());
        assert!(open);
        answers.into_iter().for_each(|answer| answer(Ok(())));
        assert_eq!(hear(&manager, long).as_deref(), Some("WATCHDOG=1\n"), "it answers again");
        drop(keeper);
        let fed = (0..9).take_while(|_| hear(&manager, Duration::from_millis(300)).is_some()).count();
        assert!(fed < 9, "fed after its end");
    }
}
