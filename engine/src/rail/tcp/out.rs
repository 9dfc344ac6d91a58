//! What one connection sends: a queue of frames, written by whoever comes first, never by two at once.
//!
//! Guarantees:
//! * Frames go out whole and in the order they were queued.
//! * Nobody waits for another's system call: one writer at a time takes the queue's turn, the others queue and leave.
//! * A file that yields fewer bytes than promised, or fails, is made up with zeros, and the closure that makes the message
//!   is told so: the frame stays whole, the connection lives.

use crate::rail::{Bulk, Sent};
use bytes::Bytes;
use railfs_proto::frame::{FrameKind, HEADER, Header, TRAILER, Trailer};
use railfs_proto::limits::{MAX_EXTENT, MAX_RAIL_MESSAGE};
use rustix::io::Errno;
use rustix::net::SendFlags;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::net::TcpStream;
use std::sync::Arc;

/// Makes a reply's message when its bulk has gone out.
pub(super) type Finish = Box<dyn FnOnce(Sent) -> Bytes + Send>;

/// Small frames that wait together go out in one call, up to this many bytes.
const BATCH: usize = 32 << 10;
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

enum Stage {
    /// Only the buffer is left.
    Plain,
    Bytes(Bytes),
    File {
        file: Arc<File>,
        offset: u64,
        left: u32,
    },
    Zeros(u32),
}

/// One frame on its way out.
pub(super) struct Item {
    /// The request it is: skipped when nobody waits for its reply any more. None for other frames and joined ones.
    request: Option<u64>,
    /// Header and, without bulk, the rest; after the bulk, trailer and message.
    buffer: Vec<u8>,
    at: usize,
    stage: Stage,
    /// There is bulk; asked for when it has gone out.
    finish: Option<Finish>,
    sent: Sent,
    /// Bytes of replies in it: they count while it is queued.
    pub(super) cost: u64,
    /// There is a ping in it.
    pub(super) ping: bool,
    /// There is a pong in it.
    pub(super) pong: bool,
}

/// How far one call of [`Item::advance`] came.
#[derive(Debug)]
pub(super) enum Progress {
    /// The whole frame is with the kernel.
    Done,
    /// The socket takes no more now.
    Blocked,
    /// The connection cannot go on.
    Failed(String),
}

impl Item {
    /// A frame without bulk.
    pub(super) fn plain(kind: FrameKind, session: u64, id: u64, message: &[u8]) -> Item {
        Item {
            request: (kind == FrameKind::Request).then_some(id),
            buffer: super::socket::frame(kind, session, id, message),
            at: 0,
            stage: Stage::Plain,
            finish: None,
            sent: Sent { bytes: 0, error: None },
            cost: if kind == FrameKind::Reply { message.len() as u64 } else { 0 },
            ping: kind == FrameKind::Ping,
            pong: kind == FrameKind::Pong,
        }
    }

    /// A reply. A bulk that no frame can carry is not sent, and the message's maker told so.
    pub(super) fn reply(session: u64, id: u64, bulk: Bulk, finish: Finish) -> Result<Item, String> {
        let refused = |length: usize| Sent {
            bytes: 0,
            error: Some(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("bulk of {length} bytes is larger than {MAX_EXTENT}"),
            )),
        };
        let (stage, length) = match bulk {
            Bulk::Bytes(bytes) if bytes.len() > MAX_EXTENT as usize => {
                return Item::finished(session, id, finish(refused(bytes.len())));
            }
            Bulk::File { length, .. } if length > MAX_EXTENT => {
                return Item::finished(session, id, finish(refused(length as usize)));
            }
            Bulk::Bytes(bytes) if !bytes.is_empty() => {
                // At most MAX_EXTENT, checked above.
                let length = u32::try_from(bytes.len()).map_err(|error| error.to_string())?;
                (Stage::Bytes(bytes), length)
            }
            Bulk::File { file, offset, length, .. } if length > 0 => {
                (Stage::File { file, offset, left: length }, length)
            }
            Bulk::None | Bulk::Bytes(_) | Bulk::File { .. } => {
                return Item::finished(session, id, finish(Sent { bytes: 0, error: None }));
            }
        };
        Ok(Item {
            request: None,
            buffer: Header { kind: FrameKind::Reply, bulk: length, session, id }.encode().to_vec(),
            at: 0,
            stage,
            finish: Some(finish),
            sent: Sent { bytes: 0, error: None },
            cost: u64::from(length),
            ping: false,
            pong: false,
        })
    }

    fn finished(session: u64, id: u64, message: Bytes) -> Result<Item, String> {
        fits(&message)?;
        Ok(Item::plain(FrameKind::Reply, session, id, &message))
    }

    /// Whether nothing of it has gone out yet.
    fn untouched(&self) -> bool {
        self.at == 0 && matches!(self.stage, Stage::Plain) && self.finish.is_none()
    }

    /// Sends what the socket takes. `bulk` is told of every run of bulk bytes.
    pub(super) fn advance(&mut self, socket: &TcpStream, bulk: &dyn Fn(usize)) -> Progress {
        loop {
            // The header, or what comes after the bulk.
            while self.at < self.buffer.len() {
                match send(socket, &self.buffer[self.at..], self.finish.is_some()) {
                    Ok(sent) => self.at += sent,
                    Err(progress) => return progress,
                }
            }
            match &mut self.stage {
                Stage::Plain => match self.finish.take() {
                    None => return Progress::Done,
                    Some(finish) => {
                        let sent = std::mem::replace(&mut self.sent, Sent { bytes: 0, error: None });
                        let message = finish(sent);
                        if let Err(why) = fits(&message) {
                            return Progress::Failed(why);
                        }
                        self.buffer.clear();
                        self.buffer.reserve(TRAILER + message.len());
                        self.buffer.extend_from_slice(&Trailer::of(&message).encode());
                        self.buffer.extend_from_slice(&message);
                        self.at = 0;
                    }
                },
                Stage::Bytes(bytes) => match send(socket, bytes, true) {
                    Ok(sent) => {
                        let _ = bytes.split_to(sent);
                        if bytes.is_empty() {
                            self.stage = Stage::Plain;
                        }
                        // A frame's bulk fits in u32.
                        self.sent.bytes = self.sent.bytes.saturating_add(u32::try_from(sent).unwrap_or(u32::MAX));
                        bulk(sent);
                    }
                    Err(progress) => return progress,
                },
                Stage::File { file, offset, left } => {
                    match rustix::fs::sendfile(socket, &**file, Some(offset), *left as usize) {
                        Ok(0) => self.stage = Stage::Zeros(*left),
                        Ok(sent) => {
                            let sent = u32::try_from(sent).unwrap_or(*left).min(*left);
                            *left -= sent;
                            self.sent.bytes += sent;
                            if *left == 0 {
                                self.stage = Stage::Plain;
                            }
                            bulk(sent as usize);
                        }
                        Err(Errno::AGAIN) => return Progress::Blocked,
                        Err(Errno::INTR) => {}
                        Err(error) => {
                            // The disk's fault, or the socket's: then the zeros will not go out either.
                            self.sent.error = Some(error.into());
                            self.stage = Stage::Zeros(*left);
                        }
                    }
                }
                Stage::Zeros(left) => match send(socket, &ZEROS[..ZEROS.len().min(*left as usize)], true) {
                    Ok(sent) => {
                        *left -= u32::try_from(sent).unwrap_or(*left).min(*left);
                        if *left == 0 {
                            self.stage = Stage::Plain;
                        }
                        bulk(sent);
                    }
                    Err(progress) => return progress,
                },
            }
        }
    }
}

fn fits(message: &Bytes) -> Result<(), String> {
    if message.len() > MAX_RAIL_MESSAGE as usize {
        return Err(format!("a reply's message of {} bytes is larger than {MAX_RAIL_MESSAGE}", message.len()));
    }
    Ok(())
}

fn send(socket: &TcpStream, bytes: &[u8], more: bool) -> Result<usize, Progress> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL | if more { SendFlags::MORE } else { SendFlags::empty() };
    loop {
        match rustix::net::send(socket, bytes, flags) {
            Ok(sent) => return Ok(sent),
            Err(Errno::AGAIN) => return Err(Progress::Blocked),
            Err(Errno::INTR) => {}
            Err(error) => return Err(Progress::Failed(format!("sending failed: {}", io::Error::from(error)))),
        }
    }
}

/// The queue. Its turn is taken by [`Out::begin`] or [`Out::resume`], and given back by [`Out::give_back`].
#[derive(Default)]
pub(super) struct Out {
    queue: VecDeque<Item>,
    /// Somebody has the turn.
    writing: bool,
    /// The socket took no more: the connection's thread waits for it.
    blocked: bool,
    closed: bool,
    pong: bool,
}

/// What became of a frame that was given to the queue.
pub(super) enum Turn {
    /// Write it now; the turn is the caller's.
    Yours(Item),
    /// It is queued, and goes out in its turn.
    Queued,
    /// The connection has ended.
    Closed(Item),
}

impl Out {
    /// Takes the turn where nobody has it and nothing waits.
    pub(super) fn begin(&mut self, item: Item) -> Turn {
        if self.closed {
            return Turn::Closed(item);
        }
        if self.writing || self.blocked || !self.queue.is_empty() {
            self.queue.push_back(item);
            return Turn::Queued;
        }
        self.writing = true;
        Turn::Yours(item)
    }

    /// For the connection's thread: takes the turn to go on with what waits.
    pub(super) fn resume(&mut self) -> bool {
        if self.writing || self.closed || self.queue.is_empty() {
            return false;
        }
        self.blocked = false;
        self.writing = true;
        true
    }

    /// The next frame for the one who has the turn, small ones joined while `wanted` says that they are still of use.
    /// Those that are not are handed to `dropped`.
    pub(super) fn next(&mut self, wanted: &dyn Fn(u64) -> bool, dropped: &mut Vec<Item>) -> Option<Item> {
        let useful = |item: &Item| match item.request {
            Some(id) if item.untouched() => wanted(id),
            _ => true,
        };
        let mut first = loop {
            let item = self.queue.pop_front()?;
            if useful(&item) {
                break item;
            }
            dropped.push(item);
        };
        while first.untouched() {
            let Some(next) = self.queue.front() else { break };
            if !next.untouched() || first.buffer.len() + next.buffer.len() > BATCH {
                break;
            }
            let Some(next) = self.queue.pop_front() else { break };
            if !useful(&next) {
                dropped.push(next);
                continue;
            }
            first.buffer.extend_from_slice(&next.buffer);
            first.request = None;
            first.cost += next.cost;
            first.ping |= next.ping;
            first.pong |= next.pong;
        }
        Some(first)
    }

    /// The turn ends. `rest` is a frame that did not get out whole. True when something waits that only the connection's
    /// thread will send.
    pub(super) fn give_back(&mut self, rest: Option<Item>) -> bool {
        self.writing = false;
        if let Some(item) = rest {
            self.blocked = true;
            self.queue.push_front(item);
        }
        !self.queue.is_empty()
    }

    /// Whether the connection's thread must wait for the socket to take more, and then whether it had been full.
    pub(super) fn waits(&self) -> Option<bool> {
        (!self.writing && !self.closed && !self.queue.is_empty()).then_some(self.blocked)
    }

    /// One pong answers every ping that came before it was sent: false when one is queued already.
    pub(super) fn want_pong(&mut self) -> bool {
        !std::mem::replace(&mut self.pong, true)
    }
    pub(super) fn pong_sent(&mut self) {
        self.pong = false;
    }

    /// Nothing goes out any more. The frames come back so that they are dropped outside the lock.
    pub(super) fn close(&mut self) -> VecDeque<Item> {
        self.closed = true;
        std::mem::take(&mut self.queue)
    }
}

impl std::fmt::Debug for Out {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Out").field("queued", &self.queue.len()).field("blocked", &self.blocked).finish()
    }
}

const _: () = assert!(HEADER + TRAILER < BATCH);
