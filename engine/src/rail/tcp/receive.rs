//! What one connection receives: frames cut out of the stream, their bulk straight into the landing.
//!
//! Guarantees: total over any bytes (a frame, or an error that ends the connection); at most one landing is being written
//! to, only from inside [`Receiver::pump`], so outside of it nothing writes there (the TCP fence, I4); memory is bounded by
//! the largest message.

use crate::memory::Exposed;
use crate::rail::land;
use bytes::Bytes;
use railfs_proto::frame::{HEADER, Header, TRAILER, Trailer};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::io;
use std::net::TcpStream;

/// Read ahead of what is needed: small frames come many at a time, but bulk that ends up here has to be copied.
const AHEAD: usize = 4 << 10;
/// For lanes without bulk.
const AHEAD_SMALL: usize = 32 << 10;
/// Bytes that nobody wants are received in pieces of this size.
const SCRATCH: usize = 64 << 10;
/// One turn receives about this much, then the other duties of the thread have theirs.
const TURN: usize = 4 << 20;

/// Where the bulk that is arriving goes.
#[derive(Debug)]
pub(super) enum Sink {
    /// There is none, or nobody wants it.
    Scratch,
    /// Into the landing of this request.
    Land {
        /// The request.
        id: u64,
        /// Its landing.
        extent: Exposed,
        /// Bytes that have landed.
        at: u32,
    },
}

/// Whom a receiver tells.
pub(super) trait Frames {
    /// A header with bulk has come: where does it go? An error ends the connection.
    fn bulk(&self, header: &Header) -> Result<Sink, String>;
    /// So many bytes have landed.
    fn landed(&self, bytes: usize);
    /// A whole frame has come.
    fn frame(&self, header: &Header, message: Bytes, sink: Sink) -> Result<(), String>;
    /// Whether to stop reading for now.
    fn paused(&self) -> bool;
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    Header,
    /// So many bytes of bulk are still to come; never 0.
    Bulk(Header, u32),
    Tail(Header),
}

/// How a turn ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Pumped {
    /// Bytes have come.
    pub(super) heard: bool,
    /// There may be more at once.
    pub(super) more: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Receiver {
    buffer: Vec<u8>,
    /// Received and not looked at yet: `start..end`.
    start: usize,
    end: usize,
    /// Bytes from `start` that the next step takes.
    need: usize,
    stage: Stage,
    sink: Sink,
    scratch: Vec<u8>,
}

impl Receiver {
    pub(super) fn new(small: bool) -> Receiver {
        Receiver {
            buffer: vec![0; if small { AHEAD_SMALL } else { AHEAD }],
            start: 0,
            end: 0,
            need: HEADER,
            stage: Stage::Header,
            sink: Sink::Scratch,
            scratch: Vec::new(),
        }
    }

    /// Takes the landing of this request away: what still arrives for it goes nowhere.
    pub(super) fn take_landing(&mut self, request: u64) -> Option<Exposed> {
        match std::mem::replace(&mut self.sink, Sink::Scratch) {
            Sink::Land { id, extent, .. } if id == request => Some(extent),
            other => {
                self.sink = other;
                None
            }
        }
    }

    /// Receives what is there, until there is no more, reading pauses, or the turn is over.
    pub(super) fn pump(&mut self, socket: &TcpStream, frames: &dyn Frames) -> Result<Pumped, String> {
        let mut pumped = Pumped::default();
        let mut turn = 0;
        let mut empty = false;
        loop {
            // What was received before a pause is looked at when it is over, without asking the socket.
            loop {
                if frames.paused() {
                    return Ok(pumped);
                }
                if !self.step(frames)? {
                    break;
                }
            }
            if empty {
                return Ok(pumped);
            }
            if turn >= TURN {
                pumped.more = true;
                return Ok(pumped);
            }
            let (asked, got) = match self.receive(socket, frames) {
                Ok((_, 0)) => return Err("closed by the other side".into()),
                Ok(both) => both,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(pumped),
                Err(error) => return Err(format!("receiving failed: {error}")),
            };
            pumped.heard = true;
            turn += got;
            // Less than asked for: there is no more now, and asking would cost a system call to hear so.
            empty = got < asked;
        }
    }

    /// One call to the socket: bytes asked for, and received.
    fn receive(&mut self, socket: &TcpStream, frames: &dyn Frames) -> io::Result<(usize, usize)> {
        if self.start == self.end
            && let Stage::Bulk(header, left) = self.stage
        {
            let asked = left as usize;
            let (asked, got) = match &mut self.sink {
                Sink::Land { extent, at, .. } => {
                    let got = land::receive(socket, extent, *at, asked)?;
                    *at += narrow(got, left);
                    frames.landed(got);
                    (asked, got)
                }
                Sink::Scratch => {
                    self.scratch.resize(SCRATCH, 0);
                    let asked = asked.min(SCRATCH);
                    (asked, receive(socket, &mut self.scratch[..asked])?)
                }
            };
            self.arrived(header, left, narrow(got, left));
            return Ok((asked, got));
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        if self.start > 0 && (self.end == self.buffer.len() || self.start + self.need > self.buffer.len()) {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.need > self.buffer.len() {
            // At most the largest message: `need` was checked when the trailer was decoded.
            self.buffer.resize(self.need, 0);
        }
        let free = &mut self.buffer[self.end..];
        let asked = free.len();
        let got = receive(socket, free)?;
        self.end += got;
        Ok((asked, got))
    }

    fn arrived(&mut self, header: Header, left: u32, got: u32) {
        let left = left - got;
        if left > 0 {
            self.stage = Stage::Bulk(header, left);
        } else {
            self.stage = Stage::Tail(header);
            self.need = TRAILER;
        }
    }

    /// Goes on with what was received; false when that is not enough.
    fn step(&mut self, frames: &dyn Frames) -> Result<bool, String> {
        let there = &self.buffer[self.start..self.end];
        match self.stage {
            Stage::Header => {
                let Some(bytes) = there.first_chunk::<HEADER>() else { return Ok(false) };
                let header = Header::decode(bytes).map_err(|error| error.to_string())?;
                self.start += HEADER;
                if header.bulk > 0 {
                    self.sink = frames.bulk(&header)?;
                    self.stage = Stage::Bulk(header, header.bulk);
                } else {
                    self.sink = Sink::Scratch;
                    self.stage = Stage::Tail(header);
                    self.need = TRAILER;
                }
                Ok(true)
            }
            Stage::Bulk(header, left) => {
                let bytes = &there[..there.len().min(left as usize)];
                let got = bytes.len();
                if got == 0 {
                    return Ok(false);
                }
                if let Sink::Land { extent, at, .. } = &mut self.sink {
                    if land::copy(extent, *at, bytes) < got {
                        return Err("bulk larger than its landing".into());
                    }
                    *at += narrow(got, left);
                    frames.landed(got);
                }
                self.start += got;
                self.arrived(header, left, narrow(got, left));
                Ok(true)
            }
            Stage::Tail(header) => {
                let Some(bytes) = there.first_chunk::<TRAILER>() else { return Ok(false) };
                let trailer = Trailer::decode(bytes).map_err(|error| error.to_string())?;
                let whole = TRAILER + trailer.message as usize;
                let Some(message) = there.get(TRAILER..whole) else {
                    self.need = whole;
                    return Ok(false);
                };
                trailer.check_message(message).map_err(|error| error.to_string())?;
                let message = Bytes::copy_from_slice(message);
                self.start += whole;
                self.stage = Stage::Header;
                self.need = HEADER;
                frames.frame(&header, message, std::mem::replace(&mut self.sink, Sink::Scratch))?;
                Ok(true)
            }
        }
    }
}

/// `got` is at most `left`, whatever a broken kernel says.
fn narrow(got: usize, left: u32) -> u32 {
    u32::try_from(got).unwrap_or(left).min(left)
}

fn receive(socket: &TcpStream, to: &mut [u8]) -> io::Result<usize> {
    loop {
        match rustix::net::recv(socket, &mut *to, RecvFlags::DONTWAIT) {
            Ok((got, _)) => return Ok(got),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Arena, Fence};
    use proptest::prelude::*;
    use railfs_proto::frame::FrameKind;
    use std::cell::RefCell;
    use std::io::Write;
    use std::net::TcpListener;

    /// Id, bulk, message.
    type Frame = (u64, Vec<u8>, Vec<u8>);

    /// Odd ids have a landing; everything that comes is kept.
    struct Kept {
        arena: Arena,
        frames: RefCell<Vec<Frame>>,
    }

    impl Frames for Kept {
        fn bulk(&self, header: &Header) -> Result<Sink, String> {
            if header.id.is_multiple_of(2) {
                return Ok(Sink::Scratch);
            }
            let size = header.bulk.max(4096).next_power_of_two();
            let extent = self.arena.allocate(size).ok_or("no room")?.expose();
            Ok(Sink::Land { id: header.id, extent, at: 0 })
        }
        fn landed(&self, _bytes: usize) {}
        fn frame(&self, header: &Header, message: Bytes, sink: Sink) -> Result<(), String> {
            let bulk = match sink {
                Sink::Land { extent, at, .. } => {
                    extent.fenced(Fence::proved()).unwrap().bytes()[..at as usize].to_vec()
                }
                Sink::Scratch => Vec::new(),
            };
            self.frames.borrow_mut().push((header.id, bulk, message.to_vec()));
            Ok(())
        }
        fn paused(&self) -> bool {
            false
        }
    }

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (to, _) = listener.accept().unwrap();
        from.set_nodelay(true).unwrap();
        (from, to)
    }

    fn kept() -> Kept {
        Kept { arena: Arena::new(16 << 20).unwrap(), frames: RefCell::default() }
    }

    /// Writes the bytes in pieces of these sizes, pumping in between, and to the end of the stream.
    fn run(bytes: &[u8], cuts: &[usize], small: bool, kept: &Kept) -> Result<(), String> {
        let (mut from, to) = pair();
        let mut receiver = Receiver::new(small);
        let mut rest = bytes;
        let mut cuts = cuts.iter().cycle();
        while !rest.is_empty() {
            let piece = rest.len().min(*cuts.next().unwrap_or(&rest.len()));
            from.write_all(&rest[..piece]).unwrap();
            rest = &rest[piece..];
            receiver.pump(&to, kept)?;
        }
        drop(from);
        loop {
            match receiver.pump(&to, kept) {
                Err(why) if why == "closed by the other side" => return Ok(()),
                Err(why) => return Err(why),
                Ok(_) => std::thread::yield_now(),
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn frames_are_cut_the_same_however_they_come(
            frames in proptest::collection::vec((1u64..9, 0usize..20_000, 0usize..9000), 1..12),
            cuts in proptest::collection::vec(1usize..30_000, 1..5),
            small: bool,
        ) {
            let (mut bytes, mut expected) = (Vec::new(), Vec::new());
            for (n, (id, bulk, message)) in frames.into_iter().enumerate() {
                let fill = |length: usize| (0..length).map(|i| (i / 7 + n * 13) as u8).collect::<Vec<_>>();
                let (bulk, message) = (fill(bulk), fill(message));
                let length = u32::try_from(bulk.len()).unwrap();
                bytes.extend(Header { kind: FrameKind::Reply, bulk: length, session: 1, id }.encode());
                bytes.extend(&bulk);
                bytes.extend(Trailer::of(&message).encode());
                bytes.extend(&message);
                expected.push((id, if id % 2 == 1 { bulk } else { Vec::new() }, message));
            }
            let kept = kept();
            prop_assert_eq!(run(&bytes, &cuts, small, &kept), Ok(()));
            prop_assert_eq!(kept.frames.into_inner(), expected);
        }

        #[test]
        fn any_bytes_give_frames_or_an_error(
            bytes in proptest::collection::vec(any::<u8>(), 0..2000),
            flip in 0usize..80,
            real: bool,
        ) {
            let mut all = Vec::new();
            if real {
                // A right frame with one byte changed, then anything.
                all.extend(Header { kind: FrameKind::Request, bulk: 8, session: 1, id: 1 }.encode());
                all.extend([5; 8]);
                all.extend(Trailer::of(b"some message").encode());
                all.extend(b"some message");
                let at = flip % all.len();
                all[at] ^= 1 << (flip % 8);
            }
            all.extend(bytes);
            let kept = kept();
            let _ = run(&all, &[1000], true, &kept);
            // The flipped byte may be one of the bulk, which is not the frame's to check: at most that frame came.
            prop_assert!(kept.frames.borrow().len() <= 1);
        }
    }

    #[test]
    fn i4_a_landing_that_was_taken_away_is_written_no_more() {
        let (mut from, to) = pair();
        let kept = kept();
        let mut receiver = Receiver::new(false);
        from.write_all(&Header { kind: FrameKind::Reply, bulk: 8192, session: 1, id: 1 }.encode()).unwrap();
        from.write_all(&[1; 5000]).unwrap();
        let mut landed = false;
        while !landed {
            receiver.pump(&to, &kept).unwrap();
            landed = matches!(receiver.sink, Sink::Land { at: 5000, .. });
        }
        assert!(receiver.take_landing(2).is_none());
        let extent = receiver.take_landing(1).unwrap().fenced(Fence::proved()).unwrap();
        from.write_all(&[2; 3192]).unwrap();
        from.write_all(&Trailer::of(b"").encode()).unwrap();
        while kept.frames.borrow().is_empty() {
            receiver.pump(&to, &kept).unwrap();
        }
        assert!(extent.bytes()[..5000].iter().all(|byte| *byte == 1));
        assert!(extent.bytes()[5000..].iter().all(|byte| *byte == 0));
        assert!(receiver.take_landing(1).is_none());
    }
}
