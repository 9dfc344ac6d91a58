//! The rail frame of stream transports (TCP): a fixed header, the bulk bytes, then the message behind a short trailer.
//!
//! The message comes last so that the one who sends says what became of the bulk after it was sent: a disk that fails in
//! the middle of a stripe costs that reply (the rest is zeros, the outcome says so), not the connection.
//!
//! ```text
//! header   0 magic "RLF1"     4 kind (u8), flags (u8, 0), reserved (u16, 0)     8 bulk length (u32)
//!         12 session (u64)   20 request id (u64)   28 check (u32, low half of the xxh3-64 of bytes 0..28)
//! bulk    as many bytes as the header says
//! trailer  0 message length (u32)   4 message check (u32, low half of the message's xxh3-64)
//! message as many bytes as the trailer says
//! ```
//! All numbers are little endian.

use crate::limits::{MAX_EXTENT, MAX_RAIL_MESSAGE};
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of a header.
pub const HEADER: usize = 32;
/// Bytes of a trailer.
pub const TRAILER: usize = 8;
const MAGIC: [u8; 4] = *b"RLF1";

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// The first frame of the one who connected; message: `JoinRequest`.
    Join = 1,
    /// Its answer; message: `JoinReply`.
    Joined = 2,
    /// Message: `RailRequest`.
    Request = 3,
    /// Answers the request with the same id; message: `RailReply`.
    Reply = 4,
    /// Are you there? Empty message.
    Ping = 5,
    /// Yes. The id is the ping's.
    Pong = 6,
}

/// A decoded header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub kind: FrameKind,
    /// Bytes of the bulk.
    pub bulk: u32,
    /// The session it belongs to.
    pub session: u64,
    /// The request it belongs to.
    pub id: u64,
}

/// A decoded trailer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trailer {
    /// Bytes of the message.
    pub message: u32,
    /// Low half of the message's xxh3-64.
    pub check: u32,
}

/// Why a frame is refused. The connection cannot go on after one of these.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// See the message.
    #[error("not a railfs rail frame (first bytes {0:02x?})")]
    Magic([u8; 4]),
    /// See the message.
    #[error("frame header is damaged")]
    Damaged,
    /// See the message.
    #[error("frame kind {0} is not known")]
    Kind(u8),
    /// See the message.
    #[error("message of {0} bytes is larger than {MAX_RAIL_MESSAGE}")]
    Message(u32),
    /// See the message.
    #[error("bulk of {0} bytes is larger than {MAX_EXTENT}")]
    Bulk(u32),
    /// See the message.
    #[error("message is damaged")]
    MessageDamaged,
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

impl Header {
    /// As it goes over the wire.
    pub fn encode(&self) -> [u8; HEADER] {
        let mut out = [0u8; HEADER];
        out[..4].copy_from_slice(&MAGIC);
        out[4] = self.kind as u8;
        out[8..12].copy_from_slice(&self.bulk.to_le_bytes());
        out[12..20].copy_from_slice(&self.session.to_le_bytes());
        out[20..28].copy_from_slice(&self.id.to_le_bytes());
        let check = xxh3_64(&out[..28]) as u32;
        out[28..].copy_from_slice(&check.to_le_bytes());
        out
    }

    /// Checks everything that can be checked before a byte is allocated.
    pub fn decode(bytes: &[u8; HEADER]) -> Result<Header, FrameError> {
        let long = |at: usize| u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32;
        if bytes[..4] != MAGIC {
            return Err(FrameError::Magic([bytes[0], bytes[1], bytes[2], bytes[3]]));
        }
        if word(bytes, 28) != xxh3_64(&bytes[..28]) as u32 {
            return Err(FrameError::Damaged);
        }
        let kind = match bytes[4] {
            1 => FrameKind::Join,
            2 => FrameKind::Joined,
            3 => FrameKind::Request,
            4 => FrameKind::Reply,
            5 => FrameKind::Ping,
            6 => FrameKind::Pong,
            other => return Err(FrameError::Kind(other)),
        };
        let header = Header { kind, bulk: word(bytes, 8), session: long(12), id: long(20) };
        if header.bulk > MAX_EXTENT {
            return Err(FrameError::Bulk(header.bulk));
        }
        Ok(header)
    }
}

impl Trailer {
    /// The trailer of a message.
    pub fn of(message: &[u8]) -> Trailer {
        Trailer { message: message.len() as u32, check: xxh3_64(message) as u32 }
    }

    /// As it goes over the wire.
    pub fn encode(&self) -> [u8; TRAILER] {
        let mut out = [0u8; TRAILER];
        out[..4].copy_from_slice(&self.message.to_le_bytes());
        out[4..].copy_from_slice(&self.check.to_le_bytes());
        out
    }

    /// Refuses a message that is too large before a byte is allocated.
    pub fn decode(bytes: &[u8; TRAILER]) -> Result<Trailer, FrameError> {
        let trailer = Trailer { message: word(bytes, 0), check: word(bytes, 4) };
        if trailer.message > MAX_RAIL_MESSAGE { Err(FrameError::Message(trailer.message)) } else { Ok(trailer) }
    }

    /// Whether this is the message the trailer was made for.
    pub fn check_message(&self, message: &[u8]) -> Result<(), FrameError> {
        if *self == Trailer::of(message) { Ok(()) } else { Err(FrameError::MessageDamaged) }
    }
}
