//! Completion queues with their channel, and completion codes.
//!
//! Guarantees: events of the channel are acknowledged before the queue is armed again; codes that are not known are values;
//! of a failed completion only what the specification calls valid is looked at.

use super::qp::WrId;
use super::{Context, VerbsError, failed, leak};
use rdma_sys::{ibv_comp_channel, ibv_cq, ibv_wc, ibv_wc_opcode, ibv_wc_status};
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// How work ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It was done.
    Success,
    /// It was not done, since other work failed before it: not the cause of anything.
    Flushed,
    /// The other side does not answer.
    RetryExceeded,
    /// The other side had no receive posted.
    NoReceive,
    /// The other side's memory may not be used so.
    RemoteAccess,
    /// The other side could not do it, or does not understand it.
    RemoteError(u32),
    /// A window could not be bound.
    BindError,
    /// Wrong on this side: length, protection, queue pair.
    LocalError(u32),
    /// A code that this software does not know.
    Other(u32),
}

impl Status {
    pub(super) fn of(code: u32) -> Status {
        use ibv_wc_status as S;
        match code {
            S::IBV_WC_SUCCESS => Status::Success,
            S::IBV_WC_WR_FLUSH_ERR => Status::Flushed,
            S::IBV_WC_RETRY_EXC_ERR => Status::RetryExceeded,
            S::IBV_WC_RNR_RETRY_EXC_ERR => Status::NoReceive,
            S::IBV_WC_REM_ACCESS_ERR => Status::RemoteAccess,
            S::IBV_WC_REM_INV_REQ_ERR | S::IBV_WC_REM_OP_ERR | S::IBV_WC_REM_ABORT_ERR => Status::RemoteError(code),
            S::IBV_WC_MW_BIND_ERR => Status::BindError,
            S::IBV_WC_LOC_LEN_ERR | S::IBV_WC_LOC_QP_OP_ERR | S::IBV_WC_LOC_PROT_ERR | S::IBV_WC_LOC_ACCESS_ERR => {
                Status::LocalError(code)
            }
            other => Status::Other(other),
        }
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Status::Success => f.write_str("done"),
            Status::Flushed => f.write_str("flushed"),
            Status::RetryExceeded => f.write_str("the other side does not answer (retries exceeded)"),
            Status::NoReceive => f.write_str("the other side has no receive posted"),
            Status::RemoteAccess => f.write_str("the other side's memory is not accessible (any more)"),
            Status::RemoteError(code) => write!(f, "the other side could not do it (completion code {code})"),
            Status::BindError => f.write_str("a memory window could not be bound"),
            Status::LocalError(code) => write!(f, "refused by this side's device (completion code {code})"),
            Status::Other(code) => write!(f, "completion code {code}"),
        }
    }
}

/// What a successful completion says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Bytes received.
    pub bytes: u32,
    /// The key that the message took away.
    pub invalidated: Option<u32>,
}

/// One piece of work has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Which one.
    pub id: WrId,
    /// How.
    pub result: Result<Done, Status>,
    /// The vendor's own code, for logs.
    pub vendor: u32,
}

/// A completion queue and the channel that wakes whoever polls it.
#[derive(Clone, Debug)]
pub struct Cq(pub(super) Arc<CqInner>);

#[derive(Debug)]
pub(super) struct CqInner {
    pub(super) raw: NonNull<ibv_cq>,
    channel: NonNull<ibv_comp_channel>,
    context: Context,
    soft: bool,
}

// SAFETY: see ContextInner: verbs lock inside, pointers are freed once.
unsafe impl Send for CqInner {}
// SAFETY: as above.
unsafe impl Sync for CqInner {}

impl Cq {
    /// What an event about this queue names it by; of a queue that is gone another one may have it.
    pub fn mark(&self) -> u64 {
        self.0.raw.as_ptr().addr() as u64
    }

    /// A queue of at least `entries`: it must be able to hold all work of its queue pairs (an overflow loses completions).
    pub fn new(context: &Context, entries: u32) -> Result<Cq, VerbsError> {
        let library = context.0.library;
        let soft = context.facts()?.soft;
        let what = || format!("{entries} entries on {}", context.name());
        // SAFETY: an open context.
        let channel = NonNull::new(unsafe { (library.ibv_create_comp_channel)(context.0.raw.as_ptr()) });
        let channel = channel.ok_or_else(|| failed("ibv_create_comp_channel", context.name(), None))?;
        let count = i32::try_from(entries).unwrap_or(i32::MAX);
        // SAFETY: an open context and its channel; no context pointer is handed over.
        let raw = unsafe {
            (library.ibv_create_cq)(context.0.raw.as_ptr(), count, std::ptr::null_mut(), channel.as_ptr(), 0)
        };
        let Some(raw) = NonNull::new(raw) else {
            let error = failed("ibv_create_cq", what(), None);
            // SAFETY: made above, used by nothing.
            if unsafe { (library.ibv_destroy_comp_channel)(channel.as_ptr()) } != 0 {
                leak(&failed("ibv_destroy_comp_channel", context.name(), None));
            }
            return Err(error);
        };
        let cq = Cq(Arc::new(CqInner { raw, channel, context: context.clone(), soft }));
        cq.nonblocking().map_err(|error| failed("fcntl", what(), error.raw_os_error()))?;
        Ok(cq)
    }

    fn raw_channel(&self) -> RawFd {
        // SAFETY: the channel is there for as long as `self`.
        unsafe { (*self.0.channel.as_ptr()).fd }
    }

    /// Readable when something was completed since the queue was armed.
    pub fn channel(&self) -> BorrowedFd<'_> {
        // SAFETY: open for as long as the channel, which `self` keeps.
        unsafe { BorrowedFd::borrow_raw(self.raw_channel()) }
    }

    fn nonblocking(&self) -> std::io::Result<()> {
        let flags = rustix::fs::fcntl_getfl(self.channel())?;
        rustix::fs::fcntl_setfl(self.channel(), flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(())
    }

    /// Takes and acknowledges the events there are, then arms the queue. Poll once more afterwards: what was completed
    /// before makes no event.
    pub fn arm(&self) -> Result<(), VerbsError> {
        let library = self.0.context.0.library;
        let mut events = 0;
        loop {
            let (mut cq, mut pointer) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: a channel of ours that does not block, and two places for the answers.
            let code = unsafe { (library.ibv_get_cq_event)(self.0.channel.as_ptr(), &raw mut cq, &raw mut pointer) };
            if code != 0 {
                break;
            }
            events += 1;
        }
        if events > 0 {
            // SAFETY: the only queue of this channel; as many events as were taken.
            unsafe { (library.ibv_ack_cq_events)(self.0.raw.as_ptr(), events) };
        }
        // SAFETY: an open context has its table of operations.
        let request = unsafe { (*self.0.context.0.raw.as_ptr()).ops.req_notify_cq };
        let request =
            request.ok_or_else(|| failed("ibv_req_notify_cq", self.0.context.name(), Some(libc::EOPNOTSUPP)))?;
        // SAFETY: a live queue.
        match unsafe { request(self.0.raw.as_ptr(), 0) } {
            0 => Ok(()),
            code => Err(failed("ibv_req_notify_cq", self.0.context.name(), Some(code))),
        }
    }

    /// Appends the completions there are to `out`, at most 32; says how many.
    pub fn poll(&self, out: &mut Vec<Completion>) -> Result<usize, VerbsError> {
        const BATCH: usize = 32;
        // SAFETY: plain numbers, for which zero is a value.
        let mut raw: [ibv_wc; BATCH] = unsafe { std::mem::zeroed() };
        // SAFETY: an open context has its table of operations.
        let poll = unsafe { (*self.0.context.0.raw.as_ptr()).ops.poll_cq };
        let poll = poll.ok_or_else(|| failed("ibv_poll_cq", self.0.context.name(), Some(libc::EOPNOTSUPP)))?;
        // SAFETY: a live queue and room for BATCH entries.
        let got = unsafe { poll(self.0.raw.as_ptr(), 32, raw.as_mut_ptr()) };
        let got = usize::try_from(got).map_err(|_| failed("ibv_poll_cq", self.0.context.name(), Some(-got)))?;
        out.extend(raw.iter().take(got).map(|raw| completion(raw, self.0.soft)));
        Ok(got)
    }
}

/// The kernel's flag for "with an invalidated key", which Soft-RoCE hands out as it is; the library's own has another value.
const KERNEL_WITH_INVALIDATE: u32 = 1 << 2;

fn completion(raw: &ibv_wc, soft: bool) -> Completion {
    let result = match Status::of(raw.status) {
        Status::Success => {
            let with_key = raw.wc_flags & rdma_sys::ibv_wc_flags::IBV_WC_WITH_INV.0 != 0
                || (soft && raw.wc_flags & KERNEL_WITH_INVALIDATE != 0);
            let received = raw.opcode & ibv_wc_opcode::IBV_WC_RECV != 0;
            // SAFETY: both members of the union are four bytes of numbers.
            let key = unsafe { raw.imm_data_invalidated_rkey_union.invalidated_rkey };
            Ok(Done {
                bytes: if received { raw.byte_len } else { 0 },
                invalidated: (received && with_key).then_some(key),
            })
        }
        status => Err(status),
    };
    Completion { id: WrId::from_raw(raw.wr_id), result, vendor: raw.vendor_err }
}

impl Drop for CqInner {
    fn drop(&mut self) {
        let library = self.context.0.library;
        // SAFETY: made by us, destroyed once; queue pairs hold an Arc of this, so none is left. All events are acknowledged.
        let code = unsafe { (library.ibv_destroy_cq)(self.raw.as_ptr()) };
        if code != 0 {
            leak(&failed("ibv_destroy_cq", self.context.name(), Some(code)));
            std::mem::forget(self.context.clone());
            return;
        }
        // SAFETY: made by us, destroyed once; its only queue is gone.
        let code = unsafe { (library.ibv_destroy_comp_channel)(self.channel.as_ptr()) };
        if code != 0 {
            leak(&failed("ibv_destroy_comp_channel", self.context.name(), Some(code)));
            std::mem::forget(self.context.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_a_value() {
        for code in 0..40 {
            let status = Status::of(code);
            assert_eq!(status == Status::Success, code == 0);
            assert!(!status.to_string().is_empty());
        }
        assert_eq!(Status::of(u32::MAX), Status::Other(u32::MAX));
    }
}
