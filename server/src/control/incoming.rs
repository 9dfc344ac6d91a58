//! The connections that the control plane takes.
//!
//! Guarantees: a connection that cannot be accepted (no descriptors are left) never ends the accepting: it is said once, and
//! tried again until it passes. With TLS what comes out has had its handshake, and none waits for another's. There are so many of
//! them at most, and those that say nothing make room.

use super::caller::Connection;
use super::handshake::{Guard, accept};
use super::seats::{MAX_CONNECTIONS, Seats};
use crate::node::Node;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::Sleep;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::TcpIncoming;

/// After an error: others may be freed meanwhile.
const PAUSE: Duration = Duration::from_millis(100);

/// The same stream, without its errors.
pub struct Patient<S> {
    inner: S,
    pause: Option<Pin<Box<Sleep>>>,
    said: bool,
}

impl<S> Patient<S> {
    /// To be used on a runtime with a timer.
    pub fn new(inner: S) -> Patient<S> {
        Patient { inner, pause: None, said: false }
    }
}

impl<T, S: Stream<Item = io::Result<T>> + Unpin> Stream for Patient<S> {
    type Item = io::Result<T>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(context));
                self.pause = None;
            }
            match ready!(Pin::new(&mut self.inner).poll_next(context)) {
                Some(Err(error)) => {
                    if !std::mem::replace(&mut self.said, true) {
                        tracing::warn!(%error, "a control connection cannot be accepted; it is tried again");
                    }
                    self.pause = Some(Box::pin(tokio::time::sleep(PAUSE)));
                }
                other => {
                    self.said = false;
                    return Poll::Ready(other);
                }
            }
        }
    }
}

/// Connections that had their handshake and were not taken yet.
const READY: usize = 16;

/// What comes of a listener: with a guard by TLS only. To be called on a runtime.
pub fn connections(
    listener: TcpListener,
    guard: Option<Arc<Guard>>,
    node: Arc<Node>,
) -> Pin<Box<dyn Stream<Item = io::Result<Connection>> + Send>> {
    let incoming = Patient::new(TcpIncoming::from(listener).with_nodelay(Some(true)));
    let seats = Seats::new(MAX_CONNECTIONS);
    let seated = move |accepted: io::Result<Connection>| accepted.map(|connection| connection.seated(&seats));
    match guard {
        None => Box::pin(incoming.map(move |accepted| seated(accepted.map(Connection::plain)))),
        Some(guard) => {
            let (ready, taken) = mpsc::channel(READY);
            // It ends when the stream is dropped.
            tokio::spawn(accept(incoming, guard, node, ready));
            Box::pin(ReceiverStream::new(taken).map(seated))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn errors_pass_and_what_comes_after_them_is_taken() {
        let full = || Err(io::Error::from_raw_os_error(24));
        let inner = tokio_stream::iter([Ok(1), full(), full(), Ok(2), full(), Ok(3)]);
        let started = tokio::time::Instant::now();
        let taken: Vec<i32> = Patient::new(inner).map(Result::unwrap).collect().await;
        assert_eq!(taken, [1, 2, 3]);
        assert!(started.elapsed() >= PAUSE * 3);
    }
}
