//! Opening a device, and making the queue pairs of one connection.
//!
//! Guarantees: the GID is looked up by address every time; the queues are as deep as the device can have them, up to what is of use,
//! and each side sends no more than the other has receives; the MTU and the READs at a time are the lesser of both sides'; a device
//! that cannot have what a rail needs at least is refused, by its numbers; whatever was half made is given back when a later step fails. Everything here may block for a moment: never
//! on a polling thread or the runtime.

use super::choose::choose_gid;
use super::link::{buffer_bytes, receive_place};
use super::{DEPTH, LEAST_DEPTH, PIECE, READS};
use crate::verbs::{
    Buffers, Context, Cq, DeviceFacts, Init, Limits, Mr, Pd, Peer, Port, PortChoice, PortState, Qp, Rts, WrId, WrKind,
    devices, mtu_bytes,
};
use railfs_proto::limits::MAX_EXTENT;
use railfs_proto::verbs::{End, Pair};
use std::net::IpAddr;
use std::sync::Arc;

/// An open device with the port that has an address.
pub(super) struct Device {
    pub(super) context: Context,
    pub(super) pd: Pd,
    pub(super) facts: DeviceFacts,
    address: IpAddr,
    port: u8,
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Why a port cannot be used, if it cannot.
pub(super) fn usable(port: &Port) -> Result<(), String> {
    match port.state {
        PortState::Active => {}
        PortState::Other(code) => return Err(format!("the port is not active (state {code})")),
    }
    if !port.ethernet {
        return Err("the port is not Ethernet: rails are RoCE version 2 only".into());
    }
    if mtu_bytes(port.mtu).is_none() {
        return Err(format!("its MTU code {} is not known", port.mtu));
    }
    if port.max_message < MAX_EXTENT {
        return Err(format!("it takes messages of {} bytes, {MAX_EXTENT} are needed", port.max_message));
    }
    Ok(())
}

/// Work requests that the queues of a connection hold: each as many as may be posted to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Depths {
    /// Receives on each queue pair, and messages under way on it.
    depth: u16,
    /// Of the send queues: for bulk, and the last.
    sends: [u32; 2],
    /// Of the completion queue.
    completions: u32,
}

impl Depths {
    fn of(depth: u16, pairs: usize, windows: bool) -> Depths {
        // A binding or a WRITE before every message, invalidations, READs of bulk, READs of slots on the last, and one to spare.
        let sends = |last: bool| {
            let windows = if windows { u32::try_from(windows_of(last, depth)).unwrap_or(0) } else { 0 };
            let looks = if last { u32::from(super::looks::PLACES) } else { 0 };
            2 * u32::from(depth) + windows + looks + u32::from(READS) + 2
        };
        let completions = (0..pairs).map(|index| sends(index + 1 == pairs) + u32::from(depth)).sum();
        Depths { depth, sends: [sends(false), sends(true)], completions }
    }

    /// The most that the device can have, up to what is of use: at least what the other side accepts. The other side sends no more
    /// messages than it is told of receives.
    fn fitting(name: &str, facts: &DeviceFacts, pairs: usize, windows: bool) -> Result<Depths, String> {
        let most = |depths: &Depths| depths.sends[0].max(depths.sends[1]);
        let fits = |depths: &Depths| most(depths) <= facts.max_queue && depths.completions <= facts.max_completions;
        let all = (LEAST_DEPTH..=DEPTH).rev().map(|depth| Depths::of(depth, pairs, windows));
        let least = Depths::of(LEAST_DEPTH, pairs, windows);
        all.into_iter().find(fits).ok_or_else(|| {
            format!(
                "device {name} has queues of {} work requests and completion queues of {} entries, {} and {} are needed \
                 for {pairs} queue pairs",
                facts.max_queue,
                facts.max_completions,
                most(&least),
                least.completions
            )
        })
    }
}

impl Device {
    /// Opens `name`, or the device that has the address.
    pub(super) fn open(name: Option<&str>, address: IpAddr) -> Result<Device, String> {
        let names = match name {
            Some(name) => vec![name.to_owned()],
            None => devices()?,
        };
        let mut reasons = Vec::new();
        for name in &names {
            match Device::try_open(name, address) {
                Ok(device) => return Ok(device),
                Err(why) => reasons.push(format!("{name}: {why}")),
            }
        }
        if reasons.is_empty() {
            reasons.push("there is no RDMA device".into());
        }
        Err(reasons.join("; "))
    }

    fn try_open(name: &str, address: IpAddr) -> Result<Device, String> {
        Device::on(Context::open(name)?, address)
    }

    /// The port of an open device that has the address.
    pub(super) fn on(context: Context, address: IpAddr) -> Result<Device, String> {
        let facts = context.facts().map_err(text)?;
        let gids = context.gids().map_err(text)?;
        let mut reason = "it has no port".to_owned();
        for number in 1..=facts.ports {
            match choose_gid(&gids, number, address) {
                Ok(_) => {
                    let pd = Pd::new(&context).map_err(text)?;
                    return Ok(Device { context, pd, facts, address, port: number });
                }
                Err(why) => reason = why,
            }
        }
        Err(reason)
    }

    /// For the thread that reads the device's events.
    pub(super) fn look(&self) -> Look {
        Look { context: self.context.clone(), address: self.address, port: self.port }
    }

    /// The port as it is now.
    pub(super) fn port(&self) -> Result<Port, String> {
        let port = self.context.port(self.port).map_err(text)?;
        usable(&port).map_err(|why| format!("device {} port {}: {why}", self.context.name(), self.port))?;
        Ok(port)
    }

    /// The GID as it is now.
    pub(super) fn gid(&self) -> Result<crate::verbs::Gid, String> {
        let gids = self.context.gids().map_err(text)?;
        choose_gid(&gids, self.port, self.address).map_err(|why| format!("device {}: {why}", self.context.name()))
    }
}

/// Asks an open device what has become of its address.
pub(super) struct Look {
    context: Context,
    address: IpAddr,
    port: u8,
}

impl Look {
    pub(super) fn port(&self) -> u8 {
        self.port
    }
    /// Whether the port still has the address, else why not.
    pub(super) fn address(&self) -> Result<(), String> {
        let gids = self.context.gids().map_err(text)?;
        choose_gid(&gids, self.port, self.address).map(drop)
    }
}

/// What to make.
pub(super) struct Plan<'a> {
    pub(super) device: &'a Device,
    /// Pairs for bulk; one more is made.
    pub(super) bulk: usize,
    /// Memory that work may name, beside the messages.
    pub(super) memory: Vec<Arc<Mr>>,
    /// The other side may write through these pairs.
    pub(super) written: bool,
    /// The other side may READ version slots through the last pair.
    pub(super) slots: bool,
    /// Landings are opened by windows.
    pub(super) windows: bool,
    pub(super) generation: u32,
}

/// Queue pairs that receive as soon as they know their other ends.
pub(super) struct Half {
    cq: Cq,
    buffers: Buffers,
    pairs: Vec<(Qp<Init>, u32)>,
    depth: u16,
    end: End,
}

/// Queue pairs that are connected.
pub(super) struct Full {
    pub(super) cq: Cq,
    pub(super) buffers: Buffers,
    pub(super) pairs: Vec<Qp<Rts>>,
    /// Receives posted on each.
    pub(super) depth: u16,
    /// The other side can be READ from.
    pub(super) reads: bool,
    /// It offers what it is asked for, too.
    pub(super) offers: bool,
}

/// Windows of a pair at most: for bulk as many as messages, for the last one few.
pub(super) fn windows_of(last: bool, depth: u16) -> usize {
    if last { 2 } else { usize::from(depth) }
}

/// READs at a time, of what this side can and what the other side says it can; one that says nothing is taken to know one.
fn lesser(ours: u8, theirs: u8) -> u8 {
    ours.min(if theirs == 0 { 1 } else { theirs })
}

fn random_psn() -> Result<u32, String> {
    let mut bytes = [0; 4];
    getrandom::fill(&mut bytes).map_err(text)?;
    Ok(u32::from_ne_bytes(bytes) & 0xff_ffff)
}

impl Half {
    pub(super) fn new(plan: &Plan<'_>) -> Result<Half, String> {
        let Plan { device, bulk, .. } = plan;
        let (port, gid) = (device.port()?, device.gid()?);
        let count = bulk.clamp(&1, &16) + 1;
        let Depths { depth, sends, completions } =
            Depths::fitting(device.context.name(), &device.facts, count, plan.windows)?;
        // Only by windows, which give reading of one put's bytes and nothing else.
        let offers = plan.windows && device.facts.max_reads > 0;
        let cq = Cq::new(&device.context, completions).map_err(text)?;
        let buffers = Buffers::new(&device.pd, buffer_bytes(count)).map_err(text)?;
        let choice = |read| PortChoice { port: port.number, gid, traffic_class: 0, written: plan.written, read };
        let mut pairs = Vec::with_capacity(count);
        for index in 0..count {
            let last = index + 1 == count;
            let mut memory = vec![buffers.mr().clone()];
            memory.extend(plan.memory.clone());
            let limits = Limits { sends: sends[usize::from(last)], receives: depth.into() };
            let pair = Qp::new(&device.pd, &cq, limits, memory).map_err(text)?;
            let mut pair = pair.init(&choice(offers || (last && plan.slots))).map_err(text)?;
            // At most MAX_PAIRS.
            let number = u8::try_from(index).unwrap_or(u8::MAX);
            for slot in 0..depth {
                let into =
                    buffers.mr().slice(receive_place(number, slot) as u64, PIECE).ok_or("no room for receives")?;
                let kind = WrKind::Receive;
                let id = WrId { kind, pair: number, slot, used: 0, generation: plan.generation };
                pair.receive(id, into).map_err(text)?;
            }
            pairs.push((pair, random_psn()?));
        }
        let said = |(pair, psn): &(Qp<Init>, u32)| Pair { number: pair.number(), psn: *psn };
        let end = End {
            gid: gid.raw,
            lid: port.lid,
            mtu: port.mtu,
            piece: PIECE,
            depth: depth.into(),
            pairs: pairs.iter().map(said).collect(),
            reads_answered: device.facts.max_reads.min(READS),
            reads_asked: device.facts.max_reads_out.min(READS),
            offers,
            slots: None,
        };
        Ok(Half { cq, buffers, pairs, depth, end })
    }

    /// What is said of it.
    pub(super) fn end(&self) -> &End {
        &self.end
    }

    /// Connects to the other side's pairs: as many as here. A server makes as many as the client says; one that answers with another
    /// number is refused, since which pair is the last says what it is for.
    pub(super) fn connect(mut self, theirs: &End) -> Result<Full, String> {
        let count = self.pairs.len();
        if theirs.pairs.len() != count {
            return Err(format!("the other side has {} queue pairs, not {count}", theirs.pairs.len()));
        }
        let mtu = self.end.mtu.min(theirs.mtu);
        // Each way the lesser of what one side asks and the other answers.
        let answered = lesser(self.end.reads_answered, theirs.reads_asked);
        let asked = lesser(self.end.reads_asked, theirs.reads_answered);
        let reads = asked > 0;
        let mut pairs = Vec::with_capacity(count);
        for ((pair, psn), other) in self.pairs.drain(..).zip(&theirs.pairs) {
            let peer = Peer { number: other.number, psn: other.psn, gid: theirs.gid, lid: theirs.lid, mtu };
            let pair = pair.rtr(&peer, answered).map_err(text)?;
            pairs.push(pair.rts_reading(psn, asked).map_err(text)?);
        }
        let offers = reads && theirs.offers;
        Ok(Full { cq: self.cq, buffers: self.buffers, pairs, depth: self.depth, reads, offers })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::fake::Fake;
    use std::sync::atomic::Ordering;

    /// Receives of a device whose queues hold so much, or why it cannot be used.
    fn device(max_queue: u32, max_completions: u32) -> Result<Depths, String> {
        let facts = DeviceFacts { max_queue, max_completions, ..facts() };
        Depths::fitting("fake0", &facts, 3, true)
    }

    fn facts() -> DeviceFacts {
        let (context, _) = Fake::open("fake0", "10.9.0.2".parse().unwrap(), &Arc::default());
        context.facts().unwrap()
    }

    #[test]
    fn i6_queues_are_as_deep_as_the_device_can_have_them() {
        let full = device(u32::MAX, u32::MAX).unwrap();
        assert_eq!(full, Depths::of(DEPTH, 3, true));
        let most = full.sends[0].max(full.sends[1]);
        assert_eq!(device(most, full.completions), Ok(full));
        let less = device(most - 1, u32::MAX).unwrap();
        assert!(less.depth < DEPTH && less.sends.iter().all(|sends| *sends < most), "{less:?}");
        let less = device(u32::MAX, full.completions - 1).unwrap();
        assert!(less.depth < DEPTH && less.completions < full.completions, "{less:?}");
        let least = Depths::of(LEAST_DEPTH, 3, true);
        let need = least.sends[0].max(least.sends[1]);
        assert_eq!(device(need, least.completions), Ok(least));
        for small in [device(need - 1, u32::MAX), device(u32::MAX, least.completions - 1)] {
            let why = small.unwrap_err();
            assert!(why.contains("fake0") && why.contains(&need.to_string()), "{why}");
        }
    }

    #[test]
    fn i6_a_small_device_gets_small_queues_and_one_of_small_messages_is_refused() {
        let address = "10.9.0.2".parse().unwrap();
        let (context, fake) = Fake::open("fake0", address, &Arc::default());
        fake.depth.store(100, Ordering::SeqCst);
        let device = Device::on(context, address).unwrap();
        let plan = || Plan {
            device: &device,
            bulk: 2,
            memory: Vec::new(),
            written: true,
            slots: false,
            windows: false,
            generation: 1,
        };
        let half = Half::new(&plan()).unwrap();
        assert_eq!((half.end().depth, fake.receives()), (25, 3 * 25), "2 * 25 + 32 words + 16 READs + 2 are 100");
        fake.largest.store(MAX_EXTENT - 1, Ordering::SeqCst);
        let why = Half::new(&plan()).err().unwrap();
        assert!(why.contains("fake0") && why.contains("1048575 bytes"), "{why}");
        // One that answers with fewer queue pairs is not taken for one that has the same.
        let mut theirs = half.end().clone();
        theirs.pairs.pop();
        assert!(half.connect(&theirs).err().unwrap().contains("2 queue pairs, not 3"));
    }

    #[test]
    fn i6_reads_at_a_time_are_the_lesser_of_both_sides() {
        for (ours, theirs, both) in [(16, 4, 4), (4, 16, 4), (16, 0, 1), (0, 16, 0), (0, 0, 0), (1, 255, 1)] {
            assert_eq!(lesser(ours, theirs), both, "{ours} and {theirs}");
        }
    }
}
