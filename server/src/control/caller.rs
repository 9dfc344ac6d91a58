//! A control connection, and who is at its other end.
//!
//! Guarantees: whoever came by TLS has shown a certificate that was verified; the identity in it goes with every request of the
//! connection, and no request can set it.

use super::seats::{Seat, Seats};
use crate::access::Identity;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;
use tonic::Request;
use tonic::transport::server::Connected;

/// Who calls.
#[derive(Clone, Debug, Default)]
pub struct Caller {
    /// The address of this machine that was reached.
    pub reached: Option<SocketAddr>,
    /// The other end's.
    pub peer: Option<SocketAddr>,
    /// By its certificate; `None`: it came without TLS.
    pub who: Option<Identity>,
}

impl Caller {
    /// Of a request that came over a [`Connection`].
    pub fn of<T>(request: &Request<T>) -> Caller {
        request.extensions().get::<Caller>().cloned().unwrap_or_default()
    }

    /// At the other end of a socket.
    pub fn at(stream: &TcpStream) -> Caller {
        Caller { reached: stream.local_addr().ok(), peer: stream.peer_addr().ok(), who: None }
    }
}

#[derive(Debug)]
enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// An accepted connection.
#[derive(Debug)]
pub struct Connection {
    stream: Stream,
    caller: Caller,
    seat: Option<Seat>,
}

impl Connection {
    /// Without TLS.
    pub fn plain(stream: TcpStream) -> Connection {
        Connection { caller: Caller::at(&stream), stream: Stream::Plain(stream), seat: None }
    }

    /// After a handshake.
    pub fn tls(stream: TlsStream<TcpStream>, caller: Caller) -> Connection {
        Connection { stream: Stream::Tls(Box::new(stream)), caller, seat: None }
    }

    /// The same, as one of those that are counted.
    #[must_use]
    pub fn seated(self, seats: &Arc<Seats>) -> Connection {
        let seat = seats.take(self.caller.peer.map(|peer| peer.ip()));
        Connection { seat: Some(seat), ..self }
    }
}

impl Connected for Connection {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.caller.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(seat) = &mut self.seat {
            seat.poll(context)?;
        }
        let before = buffer.filled().len();
        let read = match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Stream::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
        };
        let bytes = buffer.filled().len().saturating_sub(before);
        if let Some(seat) = self.seat.as_mut().filter(|_| bytes > 0) {
            seat.heard(bytes);
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Stream::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_flush(context),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_write_vectored(context, parts),
            Stream::Tls(stream) => Pin::new(stream).poll_write_vectored(context, parts),
        }
    }
    fn is_write_vectored(&self) -> bool {
        match &self.stream {
            Stream::Plain(stream) => stream.is_write_vectored(),
            Stream::Tls(stream) => stream.is_write_vectored(),
        }
    }
}
