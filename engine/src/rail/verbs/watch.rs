//! One thread per open device that reads its asynchronous events.
//!
//! Guarantees: events are read until there are none, each is acknowledged; the thread ends when the watch is dropped. A device that
//! is taken away and says nothing of it (see [`Context::is_there`]) is noticed within [`LOOK`] and told as one that failed. What an
//! event means for a rail is decided by [`verdict`], which is pure: only what is about the rail's own port, address, queues or
//! queue pairs ends it, and that at once.

use crate::rail::tcp::signal::{Latch, Signal, poll};
use crate::verbs::{Context, DeviceEvent, next_event};
use rustix::event::{PollFd, PollFlags};
use std::sync::Arc;
use std::time::Duration;

/// How often it is looked whether the device is still there.
const LOOK: Duration = Duration::from_secs(2);

/// Stops when dropped.
pub(super) struct Watch {
    stop: Arc<Signal>,
    latch: Arc<Latch>,
}

impl Watch {
    pub(super) fn start(context: &Context, tell: impl Fn(DeviceEvent) + Send + 'static) -> std::io::Result<Watch> {
        Watch::start_with(context, LOOK, Context::is_there, tell)
    }

    fn start_with(
        context: &Context,
        every: Duration,
        is_there: impl Fn(&Context) -> bool + Send + 'static,
        tell: impl Fn(DeviceEvent) + Send + 'static,
    ) -> std::io::Result<Watch> {
        let stop = Arc::new(Signal::new()?);
        let latch = Arc::<Latch>::default();
        let (context, of_thread, running) = (context.clone(), stop.clone(), latch.enter());
        std::thread::Builder::new().name(format!("{}-events", context.name())).spawn(move || {
            running.begin();
            while !of_thread.is_raised() {
                let mut fds = [
                    PollFd::from_borrowed_fd(context.events(), PollFlags::IN),
                    PollFd::new(&*of_thread, PollFlags::IN),
                ];
                if let Err(error) = poll(&mut fds, Some(every)) {
                    tracing::error!(device = context.name(), %error, "the device's events cannot be waited for");
                    return;
                }
                let gone = PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL;
                let revents = fds[0].revents();
                let mut failed = !revents.contains(PollFlags::IN) && revents.intersects(gone);
                while let Some(event) = next_event(&context) {
                    tracing::info!(device = context.name(), ?event, "device event");
                    failed |= event == DeviceEvent::DeviceFatal;
                    if event != DeviceEvent::DeviceFatal {
                        tell(event);
                    }
                }
                if !failed && !is_there(&context) {
                    tracing::warn!(device = context.name(), "the device is being taken away");
                    failed = true;
                }
                if failed {
                    // It has nothing more to say, and its descriptor would never be quiet again.
                    tell(DeviceEvent::DeviceFatal);
                    return;
                }
            }
            drop(running);
        })?;
        Ok(Watch { stop, latch })
    }
}

/// What an event means for a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing.
    Nothing,
    /// It ends now.
    End(String),
    /// It ends now, and the device must be opened anew.
    Reopen(String),
    /// What is down is tried again now.
    Retry,
}

/// Pure. `port` is the rail's, `owns` says whether a queue or queue pair is the connection's, `address` whether the port still
/// has the rail's address.
pub(super) fn verdict(
    event: DeviceEvent,
    port: u8,
    owns: &dyn Fn(&DeviceEvent) -> bool,
    address: &dyn Fn() -> Result<(), String>,
) -> Verdict {
    // Port 0 is none: whoever says it means the device.
    let ours = |of: u8| of == port || of == 0;
    match event {
        DeviceEvent::PortDown(of) if ours(of) => Verdict::End(format!("port {port} went down")),
        DeviceEvent::PortActive(of) if ours(of) => Verdict::Retry,
        DeviceEvent::GidChange(of) if ours(of) => match address() {
            Ok(()) => Verdict::Retry,
            Err(why) => Verdict::End(why),
        },
        DeviceEvent::DeviceFatal => Verdict::Reopen("it failed, or is being taken away".to_owned()),
        DeviceEvent::CqError(_) if owns(&event) => Verdict::End("a completion queue overflowed".to_owned()),
        DeviceEvent::QpError(number) if owns(&event) => Verdict::End(format!("queue pair {number} failed")),
        _ => Verdict::Nothing,
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.raise();
        // Whoever is told may have had the last hand on what keeps this: then it is the thread itself, and does not wait.
        if !self.latch.wait(Duration::from_secs(1)) {
            tracing::error!("a thread that reads device events has not ended; it is left behind");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::fake::Fake;
    use std::sync::{Mutex, mpsc};
    use std::time::Instant;

    #[test]
    fn a_watch_that_its_own_thread_drops_does_not_wait_for_itself() {
        let (context, fake) = Fake::open("fake0", "10.9.0.2".parse().unwrap(), &Arc::default());
        let kept = Arc::<Mutex<Option<Watch>>>::default();
        let (of_thread, (send, took)) = (kept.clone(), mpsc::channel());
        let watch = Watch::start(&context, move |_| {
            let begun = Instant::now();
            drop(of_thread.lock().unwrap().take());
            send.send(begun.elapsed()).unwrap();
        });
        let mut place = kept.lock().unwrap();
        *place = Some(watch.unwrap());
        fake.overflow_of(0);
        drop(place);
        let took = took.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(took < Duration::from_millis(900), "{took:?}");
    }

    #[test]
    fn i10_a_device_that_is_taken_away_without_a_word_is_told_as_failed_once() {
        let (context, _fake) = Fake::open("fake0", "10.9.0.2".parse().unwrap(), &Arc::default());
        let (send, told) = mpsc::channel();
        let looks = std::sync::atomic::AtomicUsize::new(0);
        // It is there when it is looked at for the first three times.
        let is_there = move |_: &Context| looks.fetch_add(1, std::sync::atomic::Ordering::SeqCst) < 3;
        let tell = move |event| send.send(event).unwrap();
        let watch = Watch::start_with(&context, Duration::from_millis(1), is_there, tell).unwrap();
        assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok(DeviceEvent::DeviceFatal));
        // The thread has ended, and with it the sender.
        assert_eq!(told.recv_timeout(Duration::from_secs(60)), Err(mpsc::RecvTimeoutError::Disconnected));
        drop(watch);
    }

    #[test]
    fn i10_what_a_device_says_ends_the_rails_that_it_is_about_at_once() {
        use DeviceEvent as E;
        let of = |event, owned: bool, there: bool| {
            let address = || if there { Ok(()) } else { Err("port 1 has no RoCE v2 GID of 10.9.0.2".to_owned()) };
            verdict(event, 1, &|_| owned, &address)
        };
        let end = |why: &str| Verdict::End(why.to_owned());
        for (event, owned, there, want) in [
            (E::PortDown(1), false, true, end("port 1 went down")),
            // The other port of a device with two, the queue pair of another connection.
            (E::PortDown(2), true, true, Verdict::Nothing),
            (E::PortActive(2), true, true, Verdict::Nothing),
            (E::GidChange(2), true, false, Verdict::Nothing),
            (E::QpError(17), false, true, Verdict::Nothing),
            (E::CqError(0x1000), false, true, Verdict::Nothing),
            (E::PortActive(1), false, true, Verdict::Retry),
            (E::GidChange(1), false, true, Verdict::Retry),
            (E::GidChange(1), false, false, end("port 1 has no RoCE v2 GID of 10.9.0.2")),
            (E::QpError(17), true, true, end("queue pair 17 failed")),
            (E::CqError(0x1000), true, true, end("a completion queue overflowed")),
            (E::DeviceFatal, false, true, Verdict::Reopen("it failed, or is being taken away".to_owned())),
            (E::Other(16), true, false, Verdict::Nothing),
        ] {
            assert_eq!(of(event, owned, there), want, "{event:?}");
        }
    }
}
