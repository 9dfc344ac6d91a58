//! Reliable queue pairs: brought up by types, then posted to with credits of our own.
//!
//! Guarantees:
//! * Reset -> Init -> Rtr -> Rts, each step consuming the one before; receives can be posted from Init on, sends in Rts.
//! * Work names only memory that was given to the pair when it was made, which stays registered until the pair is gone.
//! * No more is posted than the depths that were asked for (a device may take more, and lose it); what one call posts is
//!   counted as taken until [`Qp::sent`] says that it was completed.
//! * A pair that the device does not destroy is leaked together with its memory.

use super::cq::Cq;
use super::memory::{Access, Kept, Mr, Pd, Slice, Window};
use super::{Gid, PAIRS, VerbsError, failed, leak};
use rdma_sys::{
    ibv_ah_attr, ibv_gid, ibv_global_route, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_init_attr, ibv_qp_state,
    ibv_qp_type, ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode,
};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What a piece of work is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrKind {
    /// A receive.
    Receive,
    /// A message.
    Send,
    /// A WRITE into the other side's memory.
    Write,
    /// A binding of a window.
    Bind,
    /// An invalidation of a window.
    Invalidate,
    /// A READ of the other side's memory.
    Read,
    /// Nothing but a mark in the queue.
    Marker,
    /// Not one of ours.
    Unknown,
}

/// Names a piece of work: kind, queue pair, place, which use of the place, and the generation of the connection it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrId {
    /// See [`WrKind`].
    pub kind: WrKind,
    /// The queue pair within its group, up to 31.
    pub pair: u8,
    /// Slot or window.
    pub slot: u16,
    /// Which use of the slot.
    pub used: u16,
    /// Of the connection: 24 bits, see [`WrId::generation`].
    pub generation: u32,
}

impl WrId {
    /// What of a connection's number goes into the names of its work.
    pub fn generation(number: u64) -> u32 {
        u32::try_from(number & 0xff_ffff).unwrap_or(0)
    }
    pub(super) fn raw(self) -> u64 {
        let kind: u64 = match self.kind {
            WrKind::Receive => 1,
            WrKind::Send => 2,
            WrKind::Write => 3,
            WrKind::Bind => 4,
            WrKind::Invalidate => 5,
            WrKind::Marker => 6,
            WrKind::Read => 7,
            WrKind::Unknown => 0,
        };
        let generation = u64::from(WrId::generation(self.generation.into()));
        (kind << 5 | u64::from(self.pair & 31)) << 56
            | u64::from(self.slot) << 40
            | u64::from(self.used) << 24
            | generation
    }
    pub(super) fn from_raw(raw: u64) -> WrId {
        let bytes = raw.to_be_bytes();
        let kind = match bytes[0] >> 5 {
            1 => WrKind::Receive,
            2 => WrKind::Send,
            3 => WrKind::Write,
            4 => WrKind::Bind,
            5 => WrKind::Invalidate,
            6 => WrKind::Marker,
            7 => WrKind::Read,
            _ => WrKind::Unknown,
        };
        WrId {
            kind,
            pair: bytes[0] & 31,
            slot: u16::from_be_bytes([bytes[1], bytes[2]]),
            used: u16::from_be_bytes([bytes[3], bytes[4]]),
            generation: u32::from_be_bytes([0, bytes[5], bytes[6], bytes[7]]),
        }
    }
}

/// Depths of a queue pair, in work requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Of the send queue.
    pub sends: u32,
    /// Of the receive queue.
    pub receives: u32,
}

/// The port and GID that a pair uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortChoice {
    /// From 1.
    pub port: u8,
    /// Its own.
    pub gid: Gid,
    /// Traffic class of what it sends.
    pub traffic_class: u8,
    /// Whether the other side may write through it (where a window or key allows).
    pub written: bool,
    /// Whether the other side may read through it: version slots, or what a window opens.
    pub read: bool,
}

/// The other end of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its number, 24 bits.
    pub number: u32,
    /// Where its packets begin, 24 bits.
    pub psn: u32,
    /// Its GID.
    pub gid: [u8; 16],
    /// Its local id (InfiniBand); 0 on Ethernet.
    pub lid: u16,
    /// Path MTU as the code 1 (256 bytes) to 5 (4096): the lesser of both sides.
    pub mtu: u32,
}

/// Bytes of an MTU code.
pub fn mtu_bytes(code: u32) -> Option<u32> {
    (1..=5).contains(&code).then(|| 128 << code)
}

/// Posting failed. Whatever came before it in the same call may have been posted: retire the pair.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// The queue has no room for it: nothing was posted.
    #[error("the queue is full: {taken} of {depth} are taken, {asked} more were asked for")]
    Full {
        /// In use.
        taken: u32,
        /// In all.
        depth: u32,
        /// Wanted.
        asked: u32,
    },
    /// Memory that the pair does not keep: nothing was posted.
    #[error("memory that this queue pair was not made for")]
    Foreign,
    /// The device refused.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
}

/// Just made.
#[derive(Debug)]
pub struct Reset(());
/// Receives can be posted.
#[derive(Debug)]
pub struct Init(());
/// It receives.
#[derive(Debug)]
pub struct Rtr(());
/// It sends, too.
#[derive(Debug)]
pub struct Rts(());

/// A queue pair in a state.
#[derive(Debug)]
pub struct Qp<State> {
    inner: Inner,
    state: PhantomData<State>,
}

#[derive(Debug)]
struct Inner {
    raw: NonNull<ibv_qp>,
    kept: Kept,
    limits: Limits,
    taken: u32,
    receives: u32,
    port: u8,
    gid_index: u8,
    traffic_class: u8,
    destroyed: bool,
}

// SAFETY: verbs lock inside; the pointer is freed once.
unsafe impl Send for Inner {}
// SAFETY: as above; posting takes `&mut`.
unsafe impl Sync for Inner {}

/// Work for the send queue.
#[derive(Debug)]
pub enum Work<'a> {
    /// A message, which may take a key away from the other side's window. Always signalled.
    Send {
        /// Named in the completion.
        id: WrId,
        /// The message.
        from: Slice,
        /// The other side's key.
        invalidate: Option<u32>,
    },
    /// Bytes into the other side's memory. Not signalled: a later message is.
    Write {
        /// Named in the completion if it fails.
        id: WrId,
        /// What.
        from: Slice,
        /// Where, in the other side's words.
        address: u64,
        /// Its key.
        key: u32,
    },
    /// Bytes of the other side's memory. Signalled: its completion is the fence of the place that they land in.
    Read {
        /// Named in the completion.
        id: WrId,
        /// Where they land.
        into: Slice,
        /// From where, in the other side's words.
        address: u64,
        /// Its key.
        key: u32,
    },
    /// As [`Work::Bind`], over bytes that the other side may read, and not write.
    Offer {
        /// Named in the completion if it fails.
        id: WrId,
        /// Which window; it must not be bound now.
        window: &'a mut Window,
        /// Over what.
        source: Slice,
    },
    /// A window over memory; its key is [`Window::key`] afterwards. Not signalled.
    Bind {
        /// Named in the completion if it fails.
        id: WrId,
        /// Which window; it must not be bound now.
        window: &'a mut Window,
        /// Over what.
        landing: Slice,
    },
    /// Takes a window's key away. Signalled: its success is a fence.
    Invalidate {
        /// Named in the completion.
        id: WrId,
        /// The key.
        key: u32,
    },
}

fn zeroed<T>() -> T {
    // SAFETY: only used for plain C structs of numbers, pointers and optional functions, for which zero is a value.
    unsafe { std::mem::zeroed() }
}

impl Qp<Reset> {
    /// Makes a pair whose work may name `memory` (of the same domain).
    pub fn new(pd: &Pd, cq: &Cq, limits: Limits, memory: Vec<Arc<Mr>>) -> Result<Qp<Reset>, VerbsError> {
        let context = pd.context();
        if memory.iter().any(|mr| !mr.is_in(pd)) {
            return Err(failed(
                "ibv_create_qp",
                format!("{}: memory of another domain", context.name()),
                Some(libc::EINVAL),
            ));
        }
        let mut attributes: ibv_qp_init_attr = zeroed();
        attributes.send_cq = cq.0.raw.as_ptr();
        attributes.recv_cq = cq.0.raw.as_ptr();
        attributes.qp_type = ibv_qp_type::IBV_QPT_RC;
        attributes.cap.max_send_wr = limits.sends;
        attributes.cap.max_recv_wr = limits.receives;
        attributes.cap.max_send_sge = 1;
        attributes.cap.max_recv_sge = 1;
        // SAFETY: a live domain, a live queue of the same device, and a struct of ours.
        let raw = NonNull::new(unsafe { (context.0.library.ibv_create_qp)(pd.0.raw.as_ptr(), &raw mut attributes) });
        let raw = raw.ok_or_else(|| {
            failed("ibv_create_qp", format!("{} + {} on {}", limits.sends, limits.receives, context.name()), None)
        })?;
        PAIRS.fetch_add(1, Ordering::Relaxed);
        let kept = Kept { pd: pd.clone(), memory, _cq: cq.clone() };
        let inner = Inner {
            raw,
            kept,
            limits,
            taken: 0,
            receives: 0,
            port: 0,
            gid_index: 0,
            traffic_class: 0,
            destroyed: false,
        };
        Ok(Qp { inner, state: PhantomData })
    }

    /// To Init: port and rights.
    pub fn init(mut self, choice: &PortChoice) -> Result<Qp<Init>, VerbsError> {
        let gid_index = u8::try_from(choice.gid.index)
            .map_err(|_| failed("ibv_modify_qp", format!("GID index {}", choice.gid.index), Some(libc::EINVAL)))?;
        self.inner.port = choice.port;
        self.inner.gid_index = gid_index;
        self.inner.traffic_class = choice.traffic_class;
        let mut attributes: ibv_qp_attr = zeroed();
        attributes.qp_state = ibv_qp_state::IBV_QPS_INIT;
        attributes.port_num = choice.port;
        attributes.qp_access_flags = match (choice.written, choice.read) {
            (true, true) => Access::WrittenAndRead,
            (true, false) => Access::Written,
            (false, true) => Access::Slots,
            (false, false) => Access::Local,
        }
        .bits();
        let mask = ibv_qp_attr_mask::IBV_QP_STATE
            | ibv_qp_attr_mask::IBV_QP_PKEY_INDEX
            | ibv_qp_attr_mask::IBV_QP_PORT
            | ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS;
        self.inner.modify(attributes, mask, "to INIT")?;
        Ok(Qp { inner: self.inner, state: PhantomData })
    }
}

impl Qp<Init> {
    /// To Rtr: it receives from `peer`. Finds the way there, which may block for a second.
    pub fn rtr(mut self, peer: &Peer, reads: u8) -> Result<Qp<Rtr>, VerbsError> {
        let mut attributes: ibv_qp_attr = zeroed();
        attributes.qp_state = ibv_qp_state::IBV_QPS_RTR;
        attributes.path_mtu = peer.mtu;
        attributes.dest_qp_num = peer.number & 0xff_ffff;
        attributes.rq_psn = peer.psn & 0xff_ffff;
        attributes.max_dest_rd_atomic = reads;
        attributes.min_rnr_timer = 12;
        attributes.ah_attr = ibv_ah_attr {
            grh: ibv_global_route {
                dgid: ibv_gid { raw: peer.gid },
                flow_label: 0,
                sgid_index: self.inner.gid_index,
                hop_limit: 64,
                traffic_class: self.inner.traffic_class,
            },
            dlid: peer.lid,
            sl: 0,
            src_path_bits: 0,
            static_rate: 0,
            is_global: 1,
            port_num: self.inner.port,
        };
        let mask = ibv_qp_attr_mask::IBV_QP_STATE
            | ibv_qp_attr_mask::IBV_QP_AV
            | ibv_qp_attr_mask::IBV_QP_PATH_MTU
            | ibv_qp_attr_mask::IBV_QP_DEST_QPN
            | ibv_qp_attr_mask::IBV_QP_RQ_PSN
            | ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER;
        self.inner.modify(attributes, mask, "to RTR")?;
        Ok(Qp { inner: self.inner, state: PhantomData })
    }

    /// Posts a receive.
    pub fn receive(&mut self, id: WrId, into: Slice) -> Result<(), PostError> {
        self.inner.receive(id, into)
    }

    /// Its number, 24 bits.
    pub fn number(&self) -> u32 {
        self.inner.number()
    }
}

impl Qp<Rtr> {
    /// To Rts: it sends, its packets beginning at `psn`.
    pub fn rts(self, psn: u32) -> Result<Qp<Rts>, VerbsError> {
        self.rts_reading(psn, 1)
    }

    /// The same, with at most `reads` READs of its own under way at a time: no more than the other side answers.
    pub fn rts_reading(mut self, psn: u32, reads: u8) -> Result<Qp<Rts>, VerbsError> {
        let mut attributes: ibv_qp_attr = zeroed();
        attributes.qp_state = ibv_qp_state::IBV_QPS_RTS;
        attributes.sq_psn = psn & 0xff_ffff;
        // 4.096 us * 2^14, six times: a dead peer is noticed within about half a second. 7 would be for ever (rnr by the
        // specification, the other on Soft-RoCE). A software device answers when its host has a processor for it: a busy
        // one is not dead after half a second, so it has two.
        attributes.timeout = if self.inner.kept.pd.context().facts()?.soft { 16 } else { 14 };
        attributes.retry_cnt = 6;
        attributes.rnr_retry = 6;
        attributes.max_rd_atomic = reads;
        let mask = ibv_qp_attr_mask::IBV_QP_STATE
            | ibv_qp_attr_mask::IBV_QP_SQ_PSN
            | ibv_qp_attr_mask::IBV_QP_TIMEOUT
            | ibv_qp_attr_mask::IBV_QP_RETRY_CNT
            | ibv_qp_attr_mask::IBV_QP_RNR_RETRY
            | ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.inner.modify(attributes, mask, "to RTS")?;
        Ok(Qp { inner: self.inner, state: PhantomData })
    }
}

impl Qp<Rts> {
    /// Posts a receive.
    pub fn receive(&mut self, id: WrId, into: Slice) -> Result<(), PostError> {
        self.inner.receive(id, into)
    }

    /// Its number, 24 bits.
    pub fn number(&self) -> u32 {
        self.inner.number()
    }

    /// Work requests that can be posted now.
    pub fn room(&self) -> u32 {
        self.inner.limits.sends.saturating_sub(self.inner.taken)
    }

    /// Posts all of it, in order, in one call.
    pub fn post(&mut self, work: &mut [Work<'_>]) -> Result<(), PostError> {
        self.inner.post(work)
    }

    /// So many work requests were completed (a signalled one, and those before it).
    pub fn sent(&mut self, count: u32) {
        self.inner.taken = self.inner.taken.saturating_sub(count);
    }

    /// A receive was completed.
    pub fn received(&mut self) {
        self.inner.receives = self.inner.receives.saturating_sub(1);
    }

    /// To the error state: what is posted is flushed. A step towards its end, no proof of anything.
    pub fn fail(&mut self) -> Result<(), VerbsError> {
        let mut attributes: ibv_qp_attr = zeroed();
        attributes.qp_state = ibv_qp_state::IBV_QPS_ERR;
        self.inner.modify(attributes, ibv_qp_attr_mask::IBV_QP_STATE, "to ERR")
    }

    /// Destroys it. Success is a fence for everything that it could write to, and that its work named.
    pub fn destroy(mut self) -> Result<(), VerbsError> {
        self.inner.destroy()
    }
}

impl Inner {
    fn number(&self) -> u32 {
        // SAFETY: there for as long as `self`.
        unsafe { (*self.raw.as_ptr()).qp_num }
    }

    fn library(&self) -> &'static super::library::Library {
        self.kept.pd.context().0.library
    }

    fn modify(
        &mut self,
        mut attributes: ibv_qp_attr,
        mask: ibv_qp_attr_mask,
        what: &'static str,
    ) -> Result<(), VerbsError> {
        let mask = i32::try_from(mask.0).unwrap_or(0);
        // SAFETY: a live pair and a struct of ours in which the masked fields are set.
        match unsafe { (self.library().ibv_modify_qp)(self.raw.as_ptr(), &raw mut attributes, mask) } {
            0 => Ok(()),
            code => {
                let object = format!("queue pair {} of {} {what}", self.number(), self.kept.pd.context().name());
                Err(failed("ibv_modify_qp", object, Some(code)))
            }
        }
    }

    fn keeps(&self, slice: &Slice) -> bool {
        self.kept.memory.iter().any(|mr| mr.holds(slice))
    }

    fn receive(&mut self, id: WrId, into: Slice) -> Result<(), PostError> {
        if !self.keeps(&into) {
            return Err(PostError::Foreign);
        }
        if self.receives >= self.limits.receives {
            return Err(PostError::Full { taken: self.receives, depth: self.limits.receives, asked: 1 });
        }
        let mut sge = ibv_sge { addr: into.address, length: into.length, lkey: into.key };
        let mut work: ibv_recv_wr = zeroed();
        work.wr_id = id.raw();
        work.sg_list = &raw mut sge;
        work.num_sge = 1;
        let mut bad = std::ptr::null_mut();
        // SAFETY: a live pair's context has its table of operations.
        let post = unsafe { (*(*self.raw.as_ptr()).context).ops.post_recv };
        let post = post.ok_or_else(|| failed("ibv_post_recv", "no such operation", Some(libc::EOPNOTSUPP)))?;
        // SAFETY: a live pair, one request whose memory is registered and kept (checked above).
        match unsafe { post(self.raw.as_ptr(), &raw mut work, &raw mut bad) } {
            0 => {
                self.receives += 1;
                Ok(())
            }
            code => Err(failed("ibv_post_recv", format!("queue pair {}", self.number()), Some(code)).into()),
        }
    }

    fn post(&mut self, work: &mut [Work<'_>]) -> Result<(), PostError> {
        let asked = u32::try_from(work.len()).unwrap_or(u32::MAX);
        if asked == 0 {
            return Ok(());
        }
        if asked > self.limits.sends.saturating_sub(self.taken) {
            return Err(PostError::Full { taken: self.taken, depth: self.limits.sends, asked });
        }
        let foreign = work.iter().any(|work| match work {
            Work::Send { from, .. } | Work::Write { from, .. } => !self.keeps(from),
            Work::Read { into, .. } => !self.keeps(into),
            Work::Bind { landing, .. } => !self.keeps(landing),
            Work::Offer { source, .. } => !self.keeps(source),
            Work::Invalidate { .. } => false,
        });
        if foreign {
            return Err(PostError::Foreign);
        }
        let mut parts: Vec<ibv_sge> = work
            .iter()
            .map(|work| match work {
                Work::Send { from, .. } | Work::Write { from, .. } => {
                    ibv_sge { addr: from.address, length: from.length, lkey: from.key }
                }
                Work::Read { into, .. } => ibv_sge { addr: into.address, length: into.length, lkey: into.key },
                _ => zeroed(),
            })
            .collect();
        let mut requests: Vec<ibv_send_wr> = Vec::with_capacity(work.len());
        for (work, part) in work.iter_mut().zip(parts.iter_mut()) {
            requests.push(request(work, part));
        }
        for index in 1..requests.len() {
            let next: *mut ibv_send_wr = &raw mut requests[index];
            requests[index - 1].next = next;
        }
        let Some(first) = requests.first_mut() else { return Ok(()) };
        let first: *mut ibv_send_wr = first;
        let mut bad = std::ptr::null_mut();
        // SAFETY: a live pair's context has its table of operations.
        let post = unsafe { (*(*self.raw.as_ptr()).context).ops.post_send };
        let post = post.ok_or_else(|| failed("ibv_post_send", "no such operation", Some(libc::EOPNOTSUPP)))?;
        // SAFETY: a live pair and a list of requests in memory of ours, each naming registered memory that is kept
        // (checked above) or a window that is alive; the library copies them before it returns.
        let code = unsafe { post(self.raw.as_ptr(), first, &raw mut bad) };
        if code != 0 {
            return Err(failed("ibv_post_send", format!("queue pair {}", self.number()), Some(code)).into());
        }
        self.taken += asked;
        for work in work {
            if let Work::Bind { window, .. } | Work::Offer { window, .. } = work {
                let key = window.upcoming_key();
                window.bound(key);
            }
        }
        Ok(())
    }

    fn destroy(&mut self) -> Result<(), VerbsError> {
        self.destroyed = true;
        let number = self.number();
        // SAFETY: made by us, destroyed once (`destroyed`).
        match unsafe { (self.library().ibv_destroy_qp)(self.raw.as_ptr()) } {
            0 => {
                PAIRS.fetch_sub(1, Ordering::Relaxed);
                Ok(())
            }
            code => {
                let object = format!("queue pair {number} of {}", self.kept.pd.context().name());
                let error = failed("ibv_destroy_qp", object, Some(code));
                leak(&error);
                // It may still write: its memory stays registered.
                std::mem::forget(self.kept.clone());
                Err(error)
            }
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.destroyed {
            // A failure is logged and counted there.
            let _ = self.destroy();
        }
    }
}

fn request(work: &mut Work<'_>, part: &mut ibv_sge) -> ibv_send_wr {
    let mut raw: ibv_send_wr = zeroed();
    let signalled = ibv_send_flags::IBV_SEND_SIGNALED.0;
    match work {
        Work::Send { id, invalidate, .. } => {
            raw.wr_id = id.raw();
            raw.send_flags = signalled;
            raw.sg_list = part;
            raw.num_sge = 1;
            raw.opcode = match invalidate {
                Some(key) => {
                    raw.imm_data_invalidated_rkey_union.invalidated_rkey = *key;
                    ibv_wr_opcode::IBV_WR_SEND_WITH_INV
                }
                None => ibv_wr_opcode::IBV_WR_SEND,
            };
        }
        Work::Write { id, address, key, .. } => {
            raw.wr_id = id.raw();
            raw.sg_list = part;
            raw.num_sge = 1;
            raw.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
            raw.wr.rdma = rdma_sys::rdma_t { remote_addr: *address, rkey: *key };
        }
        Work::Read { id, address, key, .. } => {
            raw.wr_id = id.raw();
            raw.send_flags = signalled;
            raw.sg_list = part;
            raw.num_sge = 1;
            raw.opcode = ibv_wr_opcode::IBV_WR_RDMA_READ;
            raw.wr.rdma = rdma_sys::rdma_t { remote_addr: *address, rkey: *key };
        }
        Work::Bind { id, window, landing } => bind(&mut raw, *id, window, landing, Access::Window),
        Work::Offer { id, window, source } => bind(&mut raw, *id, window, source, Access::SourceWindow),
        Work::Invalidate { id, key } => {
            raw.wr_id = id.raw();
            raw.send_flags = signalled;
            raw.opcode = ibv_wr_opcode::IBV_WR_LOCAL_INV;
            raw.imm_data_invalidated_rkey_union.invalidated_rkey = *key;
        }
    }
    raw
}

fn bind(raw: &mut ibv_send_wr, id: WrId, window: &Window, over: &Slice, access: Access) {
    raw.wr_id = id.raw();
    raw.opcode = ibv_wr_opcode::IBV_WR_BIND_MW;
    raw.bind_mw_tso_union.bind_mw = rdma_sys::bind_mw_t {
        mw: window.raw(),
        rkey: window.upcoming_key(),
        bind_info: rdma_sys::ibv_mw_bind_info {
            mr: std::ptr::with_exposed_provenance_mut(over.mr),
            addr: over.address,
            length: u64::from(over.length),
            mw_access_flags: access.bits(),
        },
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn i5_an_id_comes_back_as_it_was(raw: u64) {
            let id = WrId::from_raw(raw);
            let kind = raw >> 61;
            prop_assert_eq!(u64::from(id.pair), raw >> 56 & 31);
            prop_assert_eq!((u64::from(id.slot), u64::from(id.used)), (raw >> 40 & 0xffff, raw >> 24 & 0xffff));
            prop_assert_eq!(u64::from(id.generation), raw & 0xff_ffff);
            prop_assert_eq!(id.kind == WrKind::Unknown, !(1..=7).contains(&kind));
            if id.kind != WrKind::Unknown {
                prop_assert_eq!(id.raw(), raw);
            }
        }
    }
}
