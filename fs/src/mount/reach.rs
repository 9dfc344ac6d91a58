//! How a mount reaches its server, and whether somebody answers at a server's address, before anything is mounted: a program that meets a mount whose server
//! was never there would wait for it.
//!
//! Guarantees: the name is resolved anew each time; every address of it is tried, within one limit for all; a failure names
//! the address and what each said.

use crate::backend::Backend;
use railfs_engine::client::{Client, Config};
use railfs_engine::error::Error;
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the start of a mount asks of the network. Both may block, for about their limits.
pub trait Reach: Send + Sync + 'static {
    /// Whether somebody takes connections at "host:port".
    ///
    /// # Errors
    /// `Unreachable`.
    fn probe(&self, address: &str, limit: Duration) -> Result<(), Error>;
    /// Makes a client.
    ///
    /// # Errors
    /// As `Client::connect`.
    fn connect(&self, config: Config) -> Result<Arc<dyn Backend>, Error>;
}

/// The network itself.
#[derive(Clone, Copy, Debug)]
pub struct Network;

impl Reach for Network {
    fn probe(&self, address: &str, limit: Duration) -> Result<(), Error> {
        probe(address, limit)
    }
    fn connect(&self, config: Config) -> Result<Arc<dyn Backend>, Error> {
        Client::connect(config).map(|client| -> Arc<dyn Backend> { client })
    }
}

/// Whether `address` ("host:port") takes connections. Resolving a name may take longer than the limit.
///
/// # Errors
/// `Unreachable`.
pub fn probe(address: &str, limit: Duration) -> Result<(), Error> {
    let unreachable = |detail: String| Error::Unreachable { peer: address.to_owned(), detail };
    let end = Instant::now() + limit;
    let places = address.to_socket_addrs().map_err(|error| unreachable(error.to_string()))?;
    let mut said = Vec::new();
    for place in places {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        match TcpStream::connect_timeout(&place, left) {
            Ok(_) => return Ok(()),
            Err(error) if place.to_string() == address => said.push(error.to_string()),
            Err(error) => said.push(format!("{place}: {error}")),
        }
    }
    Err(unreachable(if said.is_empty() { format!("no address within {limit:?}") } else { said.join("; ") }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_found_and_silence_is_named() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        assert!(probe(&address, Duration::from_secs(5)).is_ok());
        drop(listener);
        let error = probe(&address, Duration::from_secs(5)).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{address} cannot be reached: ")) && error.contains("refused"), "{error}");
        let error = probe("no-port", Duration::from_secs(5)).unwrap_err().to_string();
        assert!(error.starts_with("no-port cannot be reached: "), "{error}");
        assert!(probe(&address, Duration::ZERO).unwrap_err().to_string().contains("within"));
    }
}
