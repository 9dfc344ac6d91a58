//! The server's end: accepts connections and lets them join.

use super::{Admit, ListenerConfig};
use crate::clock::Clock;
use crate::error::{Error, Result};
use std::net::SocketAddr;
use std::sync::Arc;

/// What a listener has done so far and does now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListenerCounters {
    /// Joined connections now.
    pub connections: u64,
    /// Connections now that have not joined yet.
    pub unjoined: u64,
    /// Connections accepted so far.
    pub accepted: u64,
    /// Connections that were closed without having joined.
    pub refused: u64,
    /// Bulk bytes sent.
    pub bulk_sent: u64,
    /// Bulk bytes received.
    pub bulk_received: u64,
    /// Frames dropped because nobody waits for them.
    pub stale: u64,
}

/// Accepts rails.
#[derive(Debug)]
pub struct TcpListener {}

impl TcpListener {
    /// Binds and starts. The error names the address.
    pub fn start(config: ListenerConfig, _clock: Clock, _admit: Arc<dyn Admit>) -> Result<TcpListener> {
        Err(Error::Io { what: format!("rail listener {}", config.name), detail: "not supported".into() })
    }
    /// What was bound, with the ports the kernel chose.
    pub fn addresses(&self) -> &[SocketAddr] {
        &[]
    }
    /// See [`ListenerCounters`].
    pub fn counters(&self) -> ListenerCounters {
        ListenerCounters::default()
    }
    /// Closes the listener and every connection; bounded by a second.
    pub fn stop(&self) {}
}
