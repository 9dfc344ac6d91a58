//! The client's end: two connections to one listener, kept up.

use super::{RailConfig, Tickets};
use crate::clock::Clock;
use crate::rail::{Counters, Events, Handler, Rail, State, Submission};
use std::sync::Arc;

/// A client's rail to one listener.
#[derive(Debug)]
pub struct TcpRail {}

impl TcpRail {
    /// Starts connecting and returns. Fails only where no thread can be started.
    pub fn start(
        _config: RailConfig,
        _clock: Clock,
        _tickets: Arc<dyn Tickets>,
        _handler: Arc<dyn Handler>,
        _events: Arc<dyn Events>,
    ) -> std::io::Result<Arc<TcpRail>> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// Does not wait for the backoff: for when something suggests that the rail is back.
    pub fn connect_now(&self) {}
}

impl Rail for TcpRail {
    fn submit(&self, _submission: Submission) {}
    fn cancel(&self, _id: u64) {}
    fn counters(&self) -> Counters {
        Counters::default()
    }
    fn state(&self) -> State {
        State::Down("not started".into())
    }
    fn close(&self) {}
}
