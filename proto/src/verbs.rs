//! What goes over queue pairs: the frame of verbs rails, cut into pieces that fit a receive, and the check of what one side
//! says of its queue pairs when a rail joins.
//!
//! Object bytes do not travel in these frames where the other side gave a key to write with: they are WRITTEN before the
//! reply is sent. Where it gave none they follow the message ("carried"), or, where the request says that its sender READs, the
//! answer is an offer: the bytes lie open to be READ, until the other side says that it has taken them.
//!
//! ```text
//! piece   0 kind (u8)   1 flags (u8): 1 = more pieces follow, 2 = not the first piece, 4 = the key stays,
//!         8 = the bulk will be READ   2 reserved (u16, 0)
//!         4 receives posted so far by the sender (u32, wraps): the other side's credit
//!         first piece only:
//!         8 session (u64)  16 request id (u64)  24 message bytes (u32)  28 bulk bytes (u32)
//!        32 landing's address (u64)  40 landing's key (u32)  44 carried bulk bytes (u32)
//!         then the message and the carried bulk, as far as they fit
//! ```
//! All numbers are little endian. The transport checks packets; what a frame says is checked here.

use crate::hello::MAX_LEASE_MILLISECONDS;
use crate::limits::{MAX_EXTENT, MAX_RAIL_MESSAGE};
use crate::v1;
use std::time::Duration;

/// Bytes of the first piece's header.
pub const FIRST: usize = 48;
/// Bytes of every other piece's header.
pub const NEXT: usize = 8;
/// Smallest piece that a side may offer to receive, bytes.
pub const MIN_PIECE: u32 = 256;
/// Largest piece that is made use of, bytes.
pub const MAX_PIECE: u32 = 64 << 10;
/// Most queue pairs of one rail.
pub const MAX_PAIRS: usize = 17;
/// Most receives on one queue pair that are made use of.
pub const MAX_DEPTH: u32 = 4096;
const MORE: u8 = 1;
const CONTINUES: u8 = 2;
const KEEPS: u8 = 4;
const READS: u8 = 8;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// The client's queue pair can receive: the first frame on each.
    Ready = 1,
    /// Message: `RailRequest`; bulk: the landing's size; address and key say where it may be written, if it may.
    Request = 2,
    /// Answers the request with the same id. Message: `RailReply`; bulk: bytes that were written or are carried.
    Reply = 3,
    /// Nobody waits for this request any more.
    Cancel = 4,
    /// Answers a cancel: nothing was written for this request, and nothing will be.
    Dropped = 5,
    /// Are you there?
    Ping = 6,
    /// Yes.
    Pong = 7,
    /// Nothing but credit.
    Credit = 8,
    /// The sender closes the rail. Message: why, for people.
    Bye = 9,
    /// Answers a request whose sender READs. Message: `RailReply`; bulk: bytes to be READ; address and key say where.
    Offer = 10,
    /// Answers an offer: nothing is READ any more, and its key is taken away with this.
    Taken = 11,
}

/// The first piece's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub kind: FrameKind,
    /// The session it belongs to.
    pub session: u64,
    /// The request it belongs to.
    pub id: u64,
    /// Bytes of the whole message.
    pub message: u32,
    /// See [`FrameKind`].
    pub bulk: u32,
    /// Where the landing is.
    pub address: u64,
    /// Its key.
    pub key: u32,
    /// The key is no window's: the reply does not take it away.
    pub keeps: bool,
    /// The bulk may be offered: the request's sender READs it.
    pub reads: bool,
    /// Bulk bytes that follow the message.
    pub carried: u32,
}

impl Header {
    /// A frame without message and bulk.
    pub fn plain(kind: FrameKind, session: u64, id: u64) -> Header {
        Header { kind, session, id, message: 0, bulk: 0, address: 0, key: 0, keeps: false, reads: false, carried: 0 }
    }
    /// Bytes that follow the headers, in all pieces.
    pub fn payload(&self) -> usize {
        self.message as usize + self.carried as usize
    }
}

/// One piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece<'a> {
    /// Only in the first.
    pub header: Option<Header>,
    /// Whether more follow.
    pub more: bool,
    /// Receives that its sender has posted so far.
    pub posted: u32,
    /// Its part of the payload.
    pub payload: &'a [u8],
}

/// Why a piece, or an order of pieces, is refused. The connection cannot go on after one of these.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PieceError {
    /// See the message.
    #[error("a piece of {0} bytes has no room for its header")]
    Short(usize),
    /// See the message.
    #[error("frame kind {0} is not known")]
    Kind(u8),
    /// See the message.
    #[error("piece flags {0} are not known")]
    Flags(u8),
    /// See the message.
    #[error("message of {0} bytes is larger than {MAX_RAIL_MESSAGE}")]
    Message(u32),
    /// See the message.
    #[error("bulk of {0} bytes is larger than {MAX_EXTENT}")]
    Bulk(u32),
    /// See the message.
    #[error("{carried} carried bytes are not the bulk of {bulk}")]
    Carried {
        /// Said to follow.
        carried: u32,
        /// Said to be there.
        bulk: u32,
    },
    /// See the message.
    #[error("a landing of {bulk} bytes at address {address:#x} goes past the end")]
    Landing {
        /// Where.
        address: u64,
        /// How much.
        bulk: u32,
    },
    /// See the message.
    #[error("an offer of nothing, or from nowhere")]
    Offer,
    /// See the message.
    #[error("pieces are out of order: {0}")]
    Order(&'static str),
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The next piece of a frame: writes it to `out` (cleared before), at most `room` bytes, and says how much of the payload it
/// took. `at`: payload that earlier pieces took; `payload` gives the bytes from there on, at most as many as asked for.
pub fn encode<'a>(
    header: &Header,
    posted: u32,
    at: usize,
    room: usize,
    payload: impl Fn(usize, usize) -> &'a [u8],
    out: &mut Vec<u8>,
) -> usize {
    out.clear();
    let head = if at == 0 { FIRST } else { NEXT };
    let space = room.saturating_sub(head).min(header.payload().saturating_sub(at));
    let more = at + space < header.payload();
    out.push(header.kind as u8);
    let place =
        if at > 0 { CONTINUES } else { (if header.keeps { KEEPS } else { 0 }) | if header.reads { READS } else { 0 } };
    out.push(place | if more { MORE } else { 0 });
    out.extend_from_slice(&[0, 0]);
    out.extend_from_slice(&posted.to_le_bytes());
    if at == 0 {
        out.extend_from_slice(&header.session.to_le_bytes());
        out.extend_from_slice(&header.id.to_le_bytes());
        out.extend_from_slice(&header.message.to_le_bytes());
        out.extend_from_slice(&header.bulk.to_le_bytes());
        out.extend_from_slice(&header.address.to_le_bytes());
        out.extend_from_slice(&header.key.to_le_bytes());
        out.extend_from_slice(&header.carried.to_le_bytes());
    }
    let mut taken = 0;
    while taken < space {
        let bytes = payload(at + taken, space - taken);
        if bytes.is_empty() {
            break;
        }
        out.extend_from_slice(bytes);
        taken += bytes.len();
    }
    taken
}

/// Checks everything that can be checked of one piece before a byte is allocated.
///
/// # Errors
/// See [`PieceError`].
pub fn decode(bytes: &[u8]) -> Result<Piece<'_>, PieceError> {
    if bytes.len() < NEXT {
        return Err(PieceError::Short(bytes.len()));
    }
    let kind = match bytes[0] {
        1 => FrameKind::Ready,
        2 => FrameKind::Request,
        3 => FrameKind::Reply,
        4 => FrameKind::Cancel,
        5 => FrameKind::Dropped,
        6 => FrameKind::Ping,
        7 => FrameKind::Pong,
        8 => FrameKind::Credit,
        9 => FrameKind::Bye,
        10 => FrameKind::Offer,
        11 => FrameKind::Taken,
        other => return Err(PieceError::Kind(other)),
    };
    let of_first = bytes[1] & (KEEPS | READS);
    if bytes[1] & !(MORE | CONTINUES | KEEPS | READS) != 0 || (bytes[1] & CONTINUES != 0 && of_first != 0) {
        return Err(PieceError::Flags(bytes[1]));
    }
    let (more, posted) = (bytes[1] & MORE != 0, word(bytes, 4));
    if bytes[1] & CONTINUES != 0 {
        return Ok(Piece { header: None, more, posted, payload: &bytes[NEXT..] });
    }
    if bytes.len() < FIRST {
        return Err(PieceError::Short(bytes.len()));
    }
    let long = |at: usize| u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32;
    let header = Header {
        kind,
        session: long(8),
        id: long(16),
        message: word(bytes, 24),
        bulk: word(bytes, 28),
        address: long(32),
        key: word(bytes, 40),
        keeps: bytes[1] & KEEPS != 0,
        reads: bytes[1] & READS != 0,
        carried: word(bytes, 44),
    };
    if header.message > MAX_RAIL_MESSAGE {
        return Err(PieceError::Message(header.message));
    }
    if header.bulk > MAX_EXTENT {
        return Err(PieceError::Bulk(header.bulk));
    }
    if header.carried != 0 && (header.carried != header.bulk || kind != FrameKind::Reply) {
        return Err(PieceError::Carried { carried: header.carried, bulk: header.bulk });
    }
    if kind == FrameKind::Offer && (header.bulk == 0 || header.address == 0) {
        return Err(PieceError::Offer);
    }
    if header.address.checked_add(u64::from(header.bulk)).is_none() {
        return Err(PieceError::Landing { address: header.address, bulk: header.bulk });
    }
    Ok(Piece { header: Some(header), more, posted, payload: &bytes[FIRST..] })
}

/// Puts the pieces of one queue pair together, in their order. Carried bulk is handed on piece by piece, never kept here.
#[derive(Debug, Default)]
pub struct Assembly {
    current: Option<(Header, Vec<u8>, usize)>,
}

/// What a piece brought.
#[derive(Debug, PartialEq, Eq)]
pub struct Brought<'a> {
    /// The frame it belongs to.
    pub header: Header,
    /// Carried bulk: where in it, and the bytes.
    pub bulk: Option<(u32, &'a [u8])>,
    /// The whole message, when the frame is complete.
    pub message: Option<Vec<u8>>,
}

impl Assembly {
    /// Takes the next piece.
    ///
    /// # Errors
    /// When it does not belong there, or brings more or fewer bytes than its frame said.
    pub fn take<'a>(&mut self, piece: &Piece<'a>) -> Result<Brought<'a>, PieceError> {
        let (header, mut message, at) = match (piece.header, self.current.take()) {
            (Some(header), None) => (header, Vec::with_capacity(header.message as usize), 0),
            (None, Some(current)) => current,
            (Some(_), Some(_)) => return Err(PieceError::Order("a frame begins inside another")),
            (None, None) => return Err(PieceError::Order("a frame goes on that never began")),
        };
        let end = at + piece.payload.len();
        if end > header.payload() || (!piece.more && end != header.payload()) {
            return Err(PieceError::Order("a frame has more or fewer bytes than it said"));
        }
        if piece.more && piece.payload.is_empty() {
            return Err(PieceError::Order("a piece brings nothing, and more is to come"));
        }
        let of_message = (header.message as usize).saturating_sub(at).min(piece.payload.len());
        let (words, bulk) = piece.payload.split_at(of_message);
        message.extend_from_slice(words);
        // Where the carried bytes begin; at most MAX_EXTENT, checked in `decode`.
        let start = u32::try_from((at + of_message).saturating_sub(header.message as usize)).unwrap_or(u32::MAX);
        let bulk = (!bulk.is_empty()).then_some((start, bulk));
        if piece.more {
            self.current = Some((header, message, end));
            return Ok(Brought { header, bulk, message: None });
        }
        Ok(Brought { header, bulk, message: Some(message) })
    }
}

/// One queue pair of a side that joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// 24 bits.
    pub number: u32,
    /// Where its packets begin, 24 bits.
    pub psn: u32,
}

/// What one side says of its end of a rail, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// Its GID.
    pub gid: [u8; 16],
    /// Its local id; 0 on Ethernet.
    pub lid: u16,
    /// Active MTU of its port, as the code 1 (256 bytes) to 5 (4096).
    pub mtu: u32,
    /// Bytes of the pieces it receives, [`MIN_PIECE`] to [`MAX_PIECE`].
    pub piece: u32,
    /// Receives posted on each pair, 8 to [`MAX_DEPTH`].
    pub depth: u32,
    /// 2 to [`MAX_PAIRS`]; the last one is for small messages.
    pub pairs: Vec<Pair>,
    /// READs that each pair answers at a time; 0: it does not say.
    pub reads_answered: u8,
    /// READs that each pair has under way at a time; 0: it does not say.
    pub reads_asked: u8,
    /// It answers requests for bulk by offers, where they ask for that.
    pub offers: bool,
    /// Of a server: its slots.
    pub slots: Option<SlotArray>,
}

/// Most slots that a server may announce.
pub const MAX_SLOTS: u64 = 1 << 32;

/// A server's version slots, checked: they lie inside the address space, and are aligned so that a word is read whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotArray {
    /// Of the first word, in the server's terms.
    pub address: u64,
    /// The key to read them with.
    pub key: u32,
    /// Words, 1 to [`MAX_SLOTS`].
    pub count: u64,
    /// Whose they are; not 0.
    pub incarnation: u64,
    /// The server lease, 1 ms to [`MAX_LEASE_MILLISECONDS`].
    pub lease: Duration,
}

impl SlotArray {
    /// Checks every claim.
    ///
    /// # Errors
    /// The first that is wrong.
    pub fn from_message(message: &v1::SlotArray) -> Result<SlotArray, EndError> {
        let wrong = |text: String| Err(EndError(text));
        let v1::SlotArray { address, key, count, incarnation, lease_milliseconds } = *message;
        if address == 0 || address % 8 != 0 {
            return wrong(format!("slots at address {address:#x}, which is no multiple of 8"));
        }
        if !(1..=MAX_SLOTS).contains(&count) {
            return wrong(format!("{count} slots are not from 1 to {MAX_SLOTS}"));
        }
        if address.checked_add(count * 8).is_none() {
            return wrong(format!("{count} slots at address {address:#x} go past the end"));
        }
        if incarnation == 0 {
            return wrong("slots of incarnation 0".into());
        }
        if !(1..=MAX_LEASE_MILLISECONDS).contains(&lease_milliseconds) {
            return wrong(format!("a lease of {lease_milliseconds} ms is not from 1 to {MAX_LEASE_MILLISECONDS}"));
        }
        let lease = Duration::from_millis(lease_milliseconds.into());
        Ok(SlotArray { address, key, count, incarnation, lease })
    }

    /// As it goes over the wire.
    pub fn to_message(&self) -> v1::SlotArray {
        v1::SlotArray {
            address: self.address,
            key: self.key,
            count: self.count,
            incarnation: self.incarnation,
            lease_milliseconds: u32::try_from(self.lease.as_millis()).unwrap_or(u32::MAX),
        }
    }

    /// Where a slot's word is; `None`: there is no such slot.
    pub fn place(&self, slot: u32) -> Option<u64> {
        (u64::from(slot) < self.count).then(|| self.address + u64::from(slot) * 8)
    }
}

/// Why the other side's end is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the other side's queue pairs: {0}")]
pub struct EndError(String);

impl End {
    /// Checks every claim.
    ///
    /// # Errors
    /// The first that is wrong.
    pub fn from_message(message: Option<&v1::VerbsEnd>) -> Result<End, EndError> {
        let wrong = |text: String| Err(EndError(text));
        let Some(message) = message else { return wrong("nothing is said of them".into()) };
        let Ok(gid) = <[u8; 16]>::try_from(&message.gid[..]) else {
            return wrong(format!("a GID of {} bytes, not 16", message.gid.len()));
        };
        let Ok(lid) = u16::try_from(message.lid) else {
            return wrong(format!("local id {} does not fit 16 bits", message.lid));
        };
        if !(1..=5).contains(&message.mtu) {
            return wrong(format!("MTU code {} is not from 1 to 5", message.mtu));
        }
        if !(MIN_PIECE..=MAX_PIECE).contains(&message.piece_bytes) {
            return wrong(format!("pieces of {} bytes are not from {MIN_PIECE} to {MAX_PIECE}", message.piece_bytes));
        }
        if !(8..=MAX_DEPTH).contains(&message.depth) {
            return wrong(format!("{} receives are not from 8 to {MAX_DEPTH}", message.depth));
        }
        if !(2..=MAX_PAIRS).contains(&message.pairs.len()) {
            return wrong(format!("{} of them, not from 2 to {MAX_PAIRS}", message.pairs.len()));
        }
        let narrow = |pair: &v1::VerbsPair| pair.number < 1 << 24 && pair.psn < 1 << 24;
        if let Some(pair) = message.pairs.iter().find(|pair| !narrow(pair)) {
            return wrong(format!("number {} or packet number {} does not fit 24 bits", pair.number, pair.psn));
        }
        let (Ok(reads_answered), Ok(reads_asked)) =
            (u8::try_from(message.reads_answered), u8::try_from(message.reads_asked))
        else {
            let (answered, asked) = (message.reads_answered, message.reads_asked);
            return wrong(format!("{answered} READs answered or {asked} asked for at a time are more than 255"));
        };
        let pairs = message.pairs.iter().map(|pair| Pair { number: pair.number, psn: pair.psn }).collect();
        let slots = message.slots.as_ref().map(SlotArray::from_message).transpose()?;
        Ok(End {
            gid,
            lid,
            mtu: message.mtu,
            piece: message.piece_bytes,
            depth: message.depth,
            pairs,
            reads_answered,
            reads_asked,
            offers: message.offers,
            slots,
        })
    }

    /// As it goes over the wire.
    pub fn to_message(&self) -> v1::VerbsEnd {
        v1::VerbsEnd {
            gid: self.gid.to_vec().into(),
            lid: u32::from(self.lid),
            mtu: self.mtu,
            piece_bytes: self.piece,
            depth: self.depth,
            pairs: self.pairs.iter().map(|pair| v1::VerbsPair { number: pair.number, psn: pair.psn }).collect(),
            reads_answered: self.reads_answered.into(),
            reads_asked: self.reads_asked.into(),
            offers: self.offers,
            slots: self.slots.as_ref().map(SlotArray::to_message),
        }
    }
}

#[cfg(test)]
#[path = "verbs_tests.rs"]
mod tests;
