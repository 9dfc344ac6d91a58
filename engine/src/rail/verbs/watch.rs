//! One thread per open device that reads its asynchronous events.
//!
//! Guarantees: events are read until there are none, each is acknowledged; the thread ends when the watch is dropped.

use crate::rail::tcp::signal::{Latch, Signal, poll};
use crate::verbs::{Context, DeviceEvent, next_event};
use rustix::event::{PollFd, PollFlags};
use std::sync::Arc;
use std::time::Duration;

/// Stops when dropped.
pub(super) struct Watch {
    stop: Arc<Signal>,
    latch: Arc<Latch>,
}

impl Watch {
    pub(super) fn start(context: &Context, tell: impl Fn(DeviceEvent) + Send + 'static) -> std::io::Result<Watch> {
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
                if let Err(error) = poll(&mut fds, None) {
                    tracing::error!(device = context.name(), %error, "the device's events cannot be waited for");
                    return;
                }
                while let Some(event) = next_event(&context) {
                    tracing::info!(device = context.name(), ?event, "device event");
                    tell(event);
                }
            }
            drop(running);
        })?;
        Ok(Watch { stop, latch })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.raise();
        if !self.latch.wait(Duration::from_secs(1)) {
            tracing::error!("a thread that reads device events has not ended; it is left behind");
        }
    }
}
