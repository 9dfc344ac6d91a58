//! Sockets: options, connecting, and the two frames of joining.
//!
//! Guarantees: every call returns by the instant it is given, or at once when told to stop; nothing past the joining
//! frame is read; nothing is allocated before its size was checked.

use super::Limits;
use super::signal::{Signal, wait};
use railfs_proto::frame::{FrameKind, HEADER, Header, TRAILER, Trailer};
use rustix::event::PollFlags;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::Instant;

/// Options of a connected socket. What cannot be set costs speed, not the connection.
pub(super) fn configure(socket: &TcpStream, limits: &Limits) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    socket.set_nodelay(true)?;
    let timeout = u32::try_from(limits.user_timeout.as_millis()).unwrap_or(u32::MAX);
    rustix::net::sockopt::set_tcp_user_timeout(socket, timeout)?;
    if limits.socket_buffer > 0 {
        // Plain SO_SNDBUF and SO_RCVBUF are cut to net.core.*mem_max and end the kernel's own tuning, which often gives
        // more: so either the whole (CAP_NET_ADMIN) or the kernel's tuning.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size_force(socket, limits.socket_buffer);
        let _ = rustix::net::sockopt::set_socket_recv_buffer_size_force(socket, limits.socket_buffer);
    }
    Ok(())
}

/// Connects, from `local` where one is given.
pub(super) fn connect(
    remote: SocketAddr,
    local: Option<IpAddr>,
    limits: &Limits,
    stop: &Signal,
    until: Instant,
) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(remote), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    if let Some(local) = local {
        socket.bind(&SockAddr::from(SocketAddr::new(local, 0)))?;
    }
    match socket.connect(&SockAddr::from(remote)) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => loop {
            wait(socket.as_fd(), PollFlags::OUT, stop, until)?;
            if let Some(error) = socket.take_error()? {
                return Err(error);
            }
            match socket.peer_addr() {
                Ok(_) => break,
                Err(error) if error.kind() == io::ErrorKind::NotConnected => {}
                Err(error) => return Err(error),
            }
        },
        Err(error) => return Err(error),
    }
    let stream = TcpStream::from(socket);
    // Connecting to a port of the ephemeral range on this host can meet itself.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    configure(&stream, limits)?;
    Ok(stream)
}

fn read_exact(mut socket: &TcpStream, mut to: &mut [u8], stop: &Signal, until: Instant) -> io::Result<()> {
    while !to.is_empty() {
        match socket.read(to) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "closed by the other side")),
            Ok(got) => to = &mut to[got..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait(socket.as_fd(), PollFlags::IN, stop, until)?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn write_all(mut socket: &TcpStream, mut from: &[u8], stop: &Signal, until: Instant) -> io::Result<()> {
    while !from.is_empty() {
        match socket.write(from) {
            Ok(sent) => from = &from[sent..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait(socket.as_fd(), PollFlags::OUT, stop, until)?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A whole frame without bulk.
pub(super) fn frame(kind: FrameKind, session: u64, id: u64, message: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER + TRAILER + message.len());
    out.extend_from_slice(&Header { kind, bulk: 0, session, id }.encode());
    out.extend_from_slice(&Trailer::of(message).encode());
    out.extend_from_slice(message);
    out
}

pub(super) fn write_frame(
    socket: &TcpStream,
    kind: FrameKind,
    session: u64,
    message: &[u8],
    stop: &Signal,
    until: Instant,
) -> io::Result<()> {
    write_all(socket, &frame(kind, session, 0, message), stop, until)
}

/// Reads one frame of this kind without bulk, and not a byte more.
pub(super) fn read_frame(
    socket: &TcpStream,
    kind: FrameKind,
    stop: &Signal,
    until: Instant,
) -> io::Result<(Header, Vec<u8>)> {
    let bad = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
    let mut header = [0u8; HEADER];
    read_exact(socket, &mut header, stop, until)?;
    let header = Header::decode(&header).map_err(|error| bad(error.to_string()))?;
    if header.kind != kind || header.bulk != 0 {
        return Err(bad(format!("a {:?} frame with {} bulk bytes where {kind:?} was due", header.kind, header.bulk)));
    }
    let mut trailer = [0u8; TRAILER];
    read_exact(socket, &mut trailer, stop, until)?;
    let trailer = Trailer::decode(&trailer).map_err(|error| bad(error.to_string()))?;
    let mut message = vec![0u8; trailer.message as usize];
    read_exact(socket, &mut message, stop, until)?;
    trailer.check_message(&message).map_err(|error| bad(error.to_string()))?;
    Ok((header, message))
}
