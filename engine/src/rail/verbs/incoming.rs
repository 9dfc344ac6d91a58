//! What arrives on a queue pair, and the answers to the other side's requests.
//!
//! Guarantees: frames of another session, and answers that nobody waits for, are dropped and counted (I5); an answer never
//! writes more than its request asked for, nor anything for a request that was given up; missing bytes are never success.

use super::group::Group;
use super::link::{Before, Item, Serving, Told};
use crate::memory::Fenced;
use crate::rail::slab::Lent;
use crate::rail::tcp::signal::lock;
use crate::rail::{Bulk, Replier, Sent, land};
use bytes::Bytes;
use railfs_proto::limits::{MAX_EXTENT, MAX_RAIL_MESSAGE};
use railfs_proto::verbs::{FrameKind, Header, decode};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Makes a reply's message when it is known what became of its bulk.
pub(super) type Finish = Box<dyn FnOnce(Sent) -> Bytes + Send>;

impl Group {
    /// One piece came on a link. An error ends the connection.
    pub(super) fn piece(&self, index: usize, bytes: &[u8], key: Option<u32>, told: &mut Told) -> Result<(), String> {
        let piece = decode(bytes).map_err(|error| error.to_string())?;
        let Some(link) = self.links.get(index) else { return Ok(()) };
        let shared = self.shared(index);
        let mut state = lock(&link.state);
        if !state.credit.told(piece.posted) {
            return Err(format!("the other side claims {} receives", piece.posted));
        }
        let brought = state.assembly.take(&piece).map_err(|error| error.to_string())?;
        let header = brought.header;
        let ours = header.session == self.parts.session;
        if let Some((start, bulk)) = brought.bulk
            && ours
            && let Some(entry) = state.pending.get(header.id)
        {
            let Some((extent, allowed)) = entry.landing.as_mut().filter(|(_, allowed)| header.bulk <= *allowed) else {
                let allowed = entry.landing.as_ref().map_or(0, |(_, length)| *length);
                return Err(format!("a reply with {} bytes of bulk where {allowed} were asked for", header.bulk));
            };
            debug_assert!(*allowed >= header.bulk);
            told.received += land::copy(extent, start, bulk) as u64;
        }
        let Some(message) = brought.message else { return state.flush(&shared, told) };
        match header.kind {
            FrameKind::Ready if ours => told.ready = true,
            FrameKind::Ping if ours => {
                state.push_first(Item::plain(FrameKind::Pong, shared.session, header.id));
            }
            FrameKind::Pong | FrameKind::Credit if ours => {}
            FrameKind::Bye if ours => {
                let why = String::from_utf8_lossy(&message).escape_debug().take(200).collect::<String>();
                return Err(format!("closed by the other side: {why}"));
            }
            FrameKind::Request if ours => {
                let Header { address, key, bulk: length, keeps, reads, .. } = header;
                let serving = Serving { address, key, length, keeps, reads };
                if state.serving.insert(header.id, serving).is_some() {
                    return Err(format!("request {} came twice", header.id));
                }
                told.requests.push((header.id, message.into()));
            }
            FrameKind::Reply if ours => state.reply(&header, message.into(), key, &shared, told)?,
            FrameKind::Offer if ours => state.offer(&header, message.into(), &shared, told)?,
            FrameKind::Taken if ours => state.taken(header.id, key, told)?,
            FrameKind::Cancel if ours => {
                // Answered already: the answer says the same. Else nothing is written from here on.
                if state.serving.remove(&header.id).is_some() {
                    state.push_first(Item::plain(FrameKind::Dropped, shared.session, header.id));
                }
            }
            FrameKind::Dropped if ours => {
                told.stale += 1;
                state.fence_comes(header.id, key, &shared, told)?;
            }
            _ => told.stale += 1,
        }
        state.flush(&shared, told)
    }

    /// What a request asked for, while nobody has given it up.
    fn serving(&self, link: usize, id: u64) -> Option<Serving> {
        let link = self.links.get(link)?;
        lock(&link.state).serving.get(&id).copied()
    }

    fn reply(self: &Arc<Self>, link: usize, id: u64, bulk: Bulk, finish: Finish) {
        let Some(serving) = self.serving(link, id) else { return };
        let length = match &bulk {
            Bulk::None => 0,
            Bulk::Bytes(bytes) => bytes.len(),
            Bulk::File { length, .. } => *length as usize,
        };
        if length == 0 {
            return self.answer(link, id, Ready::Plain(finish(Sent { bytes: 0, error: None })));
        }
        if length > MAX_EXTENT as usize || length > serving.length as usize {
            let text = format!("bulk of {length} bytes where {} were asked for", serving.length);
            let error = Some(io::Error::new(io::ErrorKind::InvalidInput, text));
            return self.answer(link, id, Ready::Plain(finish(Sent { bytes: 0, error })));
        }
        self.replying.fetch_add(length as u64, Ordering::SeqCst);
        match (&self.parts.source, serving.address) {
            (Some(source), address) if address != 0 => {
                let group = self.clone();
                // At most MAX_EXTENT, checked above.
                let length = u32::try_from(length).unwrap_or(u32::MAX);
                source.slab.read(bulk, move |bytes, sent| {
                    let message = finish(sent);
                    group.answer(link, id, Ready::Written(bytes, length, message));
                });
            }
            _ => {
                let (bytes, sent) = whole(bulk);
                let message = finish(sent);
                let ready = match self.offered(&serving, &bytes) {
                    // At most MAX_EXTENT, checked above.
                    Some(source) => Ready::Offered(source, u32::try_from(bytes.len()).unwrap_or(u32::MAX), message),
                    None => Ready::Carried(bytes, message),
                };
                self.answer(link, id, ready);
            }
        }
    }

    /// The bytes in memory that can be opened, where the request asks for that and there is room now; else they are carried.
    fn offered(&self, serving: &Serving, bytes: &Bytes) -> Option<Fenced> {
        let arena = self.parts.offered.as_ref().filter(|_| serving.reads)?;
        let size = u32::try_from(bytes.len()).ok()?.max(4096).checked_next_power_of_two()?;
        arena.allocate(size)?.filled(bytes)
    }

    /// The answer is there: sends it, unless the request was given up meanwhile.
    pub(super) fn answer(&self, link: usize, id: u64, ready: Ready) {
        let late = matches!(ready, Ready::Written(..)).then_some(self.parts.faults.late).filter(|late| !late.is_zero());
        let Some(at) = self.links.get(link) else { return };
        let mut told = Told::default();
        let result = {
            let mut state = lock(&at.state);
            let Some(serving) = state.serving.remove(&id) else {
                told.replied += ready.length();
                drop(state);
                drop(ready);
                self.note(&told);
                return;
            };
            let shared = self.shared(link);
            match ready.item(shared.session, id, &serving, self) {
                Ok(item) => match late {
                    Some(late) => {
                        state.push_later(shared.now.after(late), item);
                        self.wake();
                        Ok(())
                    }
                    None => {
                        state.push(item);
                        state.flush(&shared, &mut told)
                    }
                },
                Err(why) => Err(why),
            }
        };
        self.note(&told);
        if let Err(why) = result {
            self.end(why);
        }
    }
}

/// An answer whose bytes are at hand.
pub(super) enum Ready {
    /// A message only.
    Plain(Bytes),
    /// Bulk that follows the message.
    Carried(Bytes, Bytes),
    /// So many bytes of registered memory that the other side is to read, and the message.
    Offered(Fenced, u32, Bytes),
    /// So many bytes of registered memory, which are written to the landing, and the message.
    Written(Lent, u32, Bytes),
}

impl Ready {
    fn length(&self) -> u64 {
        match self {
            Ready::Plain(_) => 0,
            Ready::Carried(bytes, _) => bytes.len() as u64,
            Ready::Offered(_, length, _) | Ready::Written(_, length, _) => u64::from(*length),
        }
    }

    fn item(self, session: u64, id: u64, serving: &Serving, group: &Group) -> Result<Item, String> {
        let header = Header::plain(FrameKind::Reply, session, id);
        let mut item = match self {
            Ready::Plain(message) => Item::new(header, message),
            Ready::Carried(bytes, message) => {
                // At most MAX_EXTENT, checked before.
                let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
                let mut item = Item::new(Header { bulk: length, carried: length, ..header }, message);
                item.carried = bytes;
                item
            }
            Ready::Offered(source, length, message) => {
                let mr = group.parts.landing.as_ref().ok_or("no memory to offer from")?;
                let from = mr.slice_at(std::ptr::NonNull::from(source.bytes()).cast(), length);
                let from = from.ok_or("bytes outside the registered memory")?;
                // The key is that of the window it is opened by, when that is known.
                let header = Header { kind: FrameKind::Offer, bulk: length, address: from.address(), ..header };
                let mut item = Item::new(header, message);
                item.before = Before::Offer { source, from };
                item
            }
            Ready::Written(source, length, message) => {
                let memory = group.parts.source.as_ref().ok_or("no memory to write from")?;
                let from = memory.mr.slice_at(source.start(), length).ok_or("bytes outside the registered memory")?;
                let mut item = Item::new(Header { bulk: length, ..header }, message);
                item.before = Before::Write { source, from, address: serving.address, key: serving.key };
                item
            }
        };
        if item.message.len() > MAX_RAIL_MESSAGE as usize {
            return Err(format!("a reply's message of {} bytes is larger than {MAX_RAIL_MESSAGE}", item.message.len()));
        }
        item.invalidate = (serving.key != 0 && !serving.keeps).then_some(serving.key);
        Ok(item)
    }
}

/// A reply's bulk, in memory; what the disk does not give is made up with zeros, and said.
fn whole(bulk: Bulk) -> (Bytes, Sent) {
    match bulk {
        Bulk::None => (Bytes::new(), Sent { bytes: 0, error: None }),
        Bulk::Bytes(bytes) => {
            let sent = Sent { bytes: u32::try_from(bytes.len()).unwrap_or(u32::MAX), error: None };
            (bytes, sent)
        }
        Bulk::File { file, offset, length, check, .. } => {
            let mut bytes = vec![0; length as usize];
            let mut got = 0;
            let mut error = None;
            while got < bytes.len() {
                match file.read_at(&mut bytes[got..], offset + got as u64) {
                    Ok(0) => break,
                    Ok(more) => got += more,
                    Err(failed) if failed.kind() == io::ErrorKind::Interrupted => {}
                    Err(failed) => {
                        error = Some(failed);
                        break;
                    }
                }
            }
            if got == bytes.len() && check.is_some_and(|check| !check.passes(&bytes)) {
                error = Some(io::Error::new(io::ErrorKind::InvalidData, "the bytes on the disk fail their checksum"));
            }
            (bytes.into(), Sent { bytes: u32::try_from(got).unwrap_or(u32::MAX), error })
        }
    }
}

/// For the answer to one request of the other side.
pub(super) struct Answer {
    pub(super) group: Arc<Group>,
    pub(super) link: usize,
    pub(super) id: u64,
}

impl Replier for Answer {
    fn reply(self: Box<Self>, bulk: Bulk, message: Box<dyn FnOnce(Sent) -> Bytes + Send>) {
        self.group.reply(self.link, self.id, bulk, message);
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.group.serving.fetch_sub(1, Ordering::SeqCst);
        self.group.answered();
    }
}
