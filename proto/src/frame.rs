//! The rail frame of stream transports (TCP): a fixed header, then the bulk bytes, then the message.
//!
//! The message comes last so that the one who sends says what became of the bulk after it was sent: a disk that fails in
//! the middle of a stripe costs that reply (the rest is zeros, the outcome says so), not the connection.
//!
//! ```text
//! 0  magic "RLF1"          4  kind (u8), flags (u8, 0), reserved (u16, 0)
//! 8  message length (u32)  12 bulk length (u32)
//! 16 session (u64)         24 request id (u64)
//! 32 message check (u32, low half of the message's xxh3-64)
//! 36 header check (u32, low half of the xxh3-64 of bytes 0..36)
//! ```
//! All numbers are little endian.

use crate::limits::{MAX_EXTENT, MAX_RAIL_MESSAGE};
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of a header.
pub const HEADER: usize = 40;
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
    /// Are you there? No message.
    Ping = 5,
    /// Yes. The id is the ping's.
    Pong = 6,
}

/// A decoded header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub kind: FrameKind,
    /// Bytes of the message.
    pub message: u32,
    /// Bytes of the bulk.
    pub bulk: u32,
    /// The session it belongs to.
    pub session: u64,
    /// The request it belongs to.
    pub id: u64,
    /// Low half of the message's xxh3-64.
    pub message_check: u32,
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

/// The check that a header carries of its message.
pub fn message_check(message: &[u8]) -> u32 {
    xxh3_64(message) as u32
}

impl Header {
    /// The header of a frame with this message.
    pub fn new(kind: FrameKind, session: u64, id: u64, message: &[u8], bulk: u32) -> Header {
        Header { kind, message: message.len() as u32, bulk, session, id, message_check: message_check(message) }
    }

    /// As it goes over the wire.
    pub fn encode(&self) -> [u8; HEADER] {
        let mut out = [0u8; HEADER];
        out[..4].copy_from_slice(&MAGIC);
        out[4] = self.kind as u8;
        out[8..12].copy_from_slice(&self.message.to_le_bytes());
        out[12..16].copy_from_slice(&self.bulk.to_le_bytes());
        out[16..24].copy_from_slice(&self.session.to_le_bytes());
        out[24..32].copy_from_slice(&self.id.to_le_bytes());
        out[32..36].copy_from_slice(&self.message_check.to_le_bytes());
        let check = xxh3_64(&out[..36]) as u32;
        out[36..].copy_from_slice(&check.to_le_bytes());
        out
    }

    /// Checks everything that can be checked before a byte is allocated.
    pub fn decode(bytes: &[u8; HEADER]) -> Result<Header, FrameError> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if bytes[..4] != MAGIC {
            return Err(FrameError::Magic([bytes[0], bytes[1], bytes[2], bytes[3]]));
        }
        if word(36) != xxh3_64(&bytes[..36]) as u32 {
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
        let header =
            Header { kind, message: word(8), bulk: word(12), session: long(16), id: long(24), message_check: word(32) };
        if header.message > MAX_RAIL_MESSAGE {
            return Err(FrameError::Message(header.message));
        }
        if header.bulk > MAX_EXTENT {
            return Err(FrameError::Bulk(header.bulk));
        }
        Ok(header)
    }

    /// The message, if it is the one that the header was made for.
    pub fn check_message(&self, message: &[u8]) -> Result<(), FrameError> {
        if message.len() == self.message as usize && message_check(message) == self.message_check {
            Ok(())
        } else {
            Err(FrameError::MessageDamaged)
        }
    }
}
