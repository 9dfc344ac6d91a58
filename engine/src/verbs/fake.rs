//! A device that is not there, for tests: it takes what it is given, completes what it is told to and nothing else, refuses what
//! it is told to refuse, and notes in which order memory is registered, deregistered and unmapped.

use super::device::ContextInner;
use super::library::{GidEntry, Library, RawEvent};
use super::memory::Registrable;
use super::{Context, Gid, WrId};
use rdma_sys::{
    ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_mr, ibv_mw, ibv_pd, ibv_port_attr,
    ibv_port_state, ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr, ibv_wc,
};
use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::io::Write;
use std::net::IpAddr;
use std::os::fd::IntoRawFd;
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a device does and has done.
pub(crate) struct Fake {
    name: &'static str,
    address: IpAddr,
    log: Arc<Mutex<Vec<String>>>,
    pub(crate) refuse_registration: AtomicBool,
    pub(crate) refuse_deregistration: AtomicBool,
    /// `ibv_post_send` fails with EIO.
    pub(crate) refuse_posts: AtomicBool,
    kind: Kind,
    /// Work that is signalled is completed, with success, as soon as it is posted.
    pub(crate) completes: AtomicBool,
    /// Work requests that a queue takes.
    pub(crate) depth: AtomicU32,
    /// Bytes of a message that a port takes.
    pub(crate) largest: AtomicU32,
    /// What a queue pair's number is told to before it is destroyed.
    pub(crate) destroying: Mutex<Option<Destroying>>,
    script: Mutex<Script>,
    /// An event that it has to tell: what it is about, and its kind.
    event: Mutex<Option<(u64, u32)>>,
    /// What is written here wakes whoever waits for its events.
    wake: Mutex<UnixStream>,
    pairs: AtomicU32,
}

type Destroying = Box<dyn Fn(u32) + Send>;

/// Work that was posted to be sent.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) pair: u32,
    pub(crate) id: WrId,
    pub(crate) signalled: bool,
    /// Of a message: its bytes.
    pub(crate) bytes: Vec<u8>,
}

/// A completion: of which work, its status, and of a receive the bytes and the key that was taken away.
#[derive(Clone, Copy, Debug)]
struct Wc {
    id: u64,
    status: u32,
    received: Option<(u32, Option<u32>)>,
}

struct Receive {
    pair: u32,
    id: u64,
    address: u64,
    length: u32,
}

/// Addresses name what the library would.
#[derive(Default)]
struct Script {
    sent: Vec<Sent>,
    receives: VecDeque<Receive>,
    /// Queue pairs and their completion queues.
    pairs: Vec<(u32, usize)>,
    /// Completion queues and their channels.
    queues: Vec<(usize, usize)>,
    /// Channels and what makes them readable.
    channels: Vec<(usize, UnixStream)>,
    /// By completion queue.
    completions: VecDeque<(usize, Wc)>,
}

/// What a device can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Kind {
    /// No windows.
    #[default]
    Plain,
    /// Windows of type 2B.
    Windows,
    /// The same, and it is the kernel's Soft-RoCE.
    Soft,
}

static FAKES: Mutex<Vec<(usize, Arc<Fake>)>> = Mutex::new(Vec::new());

impl Fake {
    /// An open device whose port has the address. Several may share a log.
    pub(crate) fn open(name: &'static str, address: IpAddr, log: &Arc<Mutex<Vec<String>>>) -> (Context, Arc<Fake>) {
        Fake::open_as(Kind::Plain, name, address, log)
    }

    /// One of that kind.
    pub(crate) fn open_as(
        kind: Kind,
        name: &'static str,
        address: IpAddr,
        log: &Arc<Mutex<Vec<String>>>,
    ) -> (Context, Arc<Fake>) {
        let (events, wake) = UnixStream::pair().unwrap();
        let fake = Arc::new(Fake {
            name,
            address,
            log: log.clone(),
            refuse_registration: AtomicBool::new(false),
            refuse_deregistration: AtomicBool::new(false),
            refuse_posts: AtomicBool::new(false),
            kind,
            completes: AtomicBool::new(false),
            depth: AtomicU32::new(1024),
            largest: AtomicU32::new(1 << 30),
            destroying: Mutex::default(),
            script: Mutex::default(),
            event: Mutex::default(),
            wake: Mutex::new(wake),
            pairs: AtomicU32::new(0),
        });
        let mut raw: ibv_context = zeroed();
        raw.async_fd = events.into_raw_fd();
        raw.ops.poll_cq = Some(poll_cq);
        raw.ops.req_notify_cq = Some(req_notify_cq);
        raw.ops.post_send = Some(post_send);
        raw.ops.post_recv = Some(post_recv);
        raw.ops.alloc_mw = Some(alloc_mw);
        raw.ops.dealloc_mw = Some(dealloc_mw);
        let raw = NonNull::from(Box::leak(Box::new(raw)));
        FAKES.lock().unwrap_or_else(PoisonError::into_inner).push((raw.as_ptr().addr(), fake.clone()));
        (Context(Arc::new(ContextInner { raw, library: &LIBRARY, name: name.to_owned(), shown: None })), fake)
    }

    fn note(&self, what: &str) {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).push(format!("{}: {what}", self.name));
    }

    /// It says that it failed.
    pub(crate) fn fail(&self) {
        self.tell(0, 8);
    }

    /// It says that the newest completion queue overflowed.
    pub(crate) fn overflow(&self) {
        let queue = self.script().queues.last().map(|(queue, _)| *queue).unwrap();
        self.overflow_of(queue as u64);
    }

    /// The same of the queue with this mark.
    pub(crate) fn overflow_of(&self, queue: u64) {
        self.tell(queue, 0);
    }

    fn tell(&self, about: u64, kind: u32) {
        *self.event.lock().unwrap() = Some((about, kind));
        self.wake.lock().unwrap().write_all(b"!").unwrap();
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Receives that wait.
    pub(crate) fn receives(&self) -> usize {
        self.script().receives.len()
    }

    /// What was posted to be sent so far.
    pub(crate) fn sent(&self) -> Vec<Sent> {
        self.script().sent.clone()
    }

    /// The device says that this work of a queue pair was completed, whether it was or not. Status 0: with success.
    pub(crate) fn complete(&self, pair: u32, id: WrId, status: u32) {
        self.script().complete(pair, Wc { id: id.raw(), status, received: None });
    }

    /// A message arrives on a queue pair, and takes a key away; gives the name of the receive it took. Waits for one to be posted.
    pub(crate) fn deliver(&self, pair: u32, bytes: &[u8], key: Option<u32>) -> WrId {
        loop {
            if let Some(receive) = self.delivered(pair, bytes, key) {
                return receive;
            }
            std::thread::yield_now();
        }
    }

    /// The same, unless no receive is posted.
    pub(crate) fn delivered(&self, pair: u32, bytes: &[u8], key: Option<u32>) -> Option<WrId> {
        let receive = {
            let mut script = self.script();
            let at = script.receives.iter().position(|receive| receive.pair == pair)?;
            script.receives.remove(at)?
        };
        assert!(bytes.len() <= receive.length as usize, "{} bytes in a receive of {}", bytes.len(), receive.length);
        let to: *mut u8 = std::ptr::with_exposed_provenance_mut(usize::try_from(receive.address).unwrap());
        // SAFETY: the receive's memory is registered, and nobody else's until it is completed; its provenance was exposed then.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        let received = Some((u32::try_from(bytes.len()).unwrap(), key));
        self.script().complete(pair, Wc { id: receive.id, status: 0, received });
        Some(WrId::from_raw(receive.id))
    }

    /// Queue pairs that were made.
    pub(crate) fn pairs(&self) -> u32 {
        self.pairs.load(Ordering::SeqCst)
    }
}

impl Script {
    fn complete(&mut self, pair: u32, wc: Wc) {
        let queue = self.pairs.iter().find(|(number, _)| *number == pair).map(|(_, queue)| *queue).unwrap();
        self.completions.push_back((queue, wc));
        let channel = self.queues.iter().find(|(of, _)| *of == queue).map(|(_, channel)| *channel);
        let wake = self.channels.iter_mut().find(|(of, _)| Some(*of) == channel);
        // Where there is no room it is readable already; to wait here would keep whoever reads it from doing so.
        match wake.map(|(_, wake)| wake.write_all(b"!")).unwrap() {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            written => written.unwrap(),
        }
    }
}

/// Memory that notes when it is unmapped.
pub(crate) struct Noted(pub(crate) Arc<Mutex<Vec<String>>>, pub(crate) &'static str, Box<[u8; 4096]>);

impl Noted {
    pub(crate) fn new(log: &Arc<Mutex<Vec<String>>>, name: &'static str) -> Noted {
        Noted(log.clone(), name, Box::new([0; 4096]))
    }
}

// SAFETY: a box, which does not move with the value, and to whose bytes nobody refers.
unsafe impl Registrable for Noted {
    fn region(&self) -> (NonNull<u8>, usize) {
        (NonNull::from(&self.2[0]), 4096)
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(format!("{}: unmapped", self.1));
    }
}

fn zeroed<T>() -> T {
    // SAFETY: only used for plain C structs of numbers, pointers and optional functions, for which zero is a value.
    unsafe { std::mem::zeroed() }
}

fn fake(context: *mut ibv_context) -> Arc<Fake> {
    let all = FAKES.lock().unwrap_or_else(PoisonError::into_inner);
    all.iter().find(|(of, _)| *of == context.addr()).map(|(_, fake)| fake.clone()).unwrap()
}

fn errno(code: c_int) {
    // SAFETY: this thread's own errno.
    unsafe { *libc::__errno_location() = code };
}

static LIBRARY: Library = Library {
    ibv_fork_init: fork_init,
    ibv_get_device_list: get_device_list,
    ibv_free_device_list: free_device_list,
    ibv_get_device_name: get_device_name,
    ibv_open_device: open_device,
    ibv_close_device: close_device,
    ibv_query_device: query_device,
    ibv_query_port: query_port,
    _ibv_query_gid_table: query_gid_table,
    ibv_alloc_pd: alloc_pd,
    ibv_dealloc_pd: dealloc_pd,
    ibv_reg_mr: reg_mr,
    ibv_dereg_mr: dereg_mr,
    ibv_create_comp_channel: create_comp_channel,
    ibv_destroy_comp_channel: destroy_comp_channel,
    ibv_create_cq: create_cq,
    ibv_destroy_cq: destroy_cq,
    ibv_get_cq_event: get_cq_event,
    ibv_ack_cq_events: ack_cq_events,
    ibv_create_qp: create_qp,
    ibv_modify_qp: modify_qp,
    ibv_destroy_qp: destroy_qp,
    ibv_get_async_event: get_async_event,
    ibv_ack_async_event: ack_async_event,
};

unsafe extern "C" fn fork_init() -> c_int {
    0
}
unsafe extern "C" fn get_device_list(_: *mut c_int) -> *mut *mut ibv_device {
    std::ptr::null_mut()
}
unsafe extern "C" fn free_device_list(_: *mut *mut ibv_device) {}
unsafe extern "C" fn get_device_name(_: *mut ibv_device) -> *const c_char {
    c"fake".as_ptr()
}
unsafe extern "C" fn open_device(_: *mut ibv_device) -> *mut ibv_context {
    std::ptr::null_mut()
}
unsafe extern "C" fn close_device(context: *mut ibv_context) -> c_int {
    fake(context).note("closed");
    0
}
unsafe extern "C" fn query_device(context: *mut ibv_context, attributes: *mut ibv_device_attr) -> c_int {
    // SAFETY: the caller's struct.
    let attributes = unsafe { &mut *attributes };
    let this = fake(context);
    attributes.max_qp_wr = i32::try_from(this.depth.load(Ordering::SeqCst)).unwrap();
    attributes.max_qp_rd_atom = 16;
    attributes.max_qp_init_rd_atom = 16;
    attributes.max_cqe = 1 << 16;
    attributes.max_mr_size = u64::MAX;
    attributes.phys_port_cnt = 1;
    let kind = this.kind;
    if kind != Kind::Plain {
        attributes.max_mw = 1 << 16;
        attributes.device_cap_flags |= rdma_sys::ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B.0;
    }
    if kind == Kind::Soft {
        attributes.vendor_id = super::device::SOFT_VENDOR;
    }
    0
}
unsafe extern "C" fn query_port(context: *mut ibv_context, _: u8, attributes: *mut ibv_port_attr) -> c_int {
    // SAFETY: the caller's struct.
    let attributes = unsafe { &mut *attributes };
    attributes.state = ibv_port_state::IBV_PORT_ACTIVE;
    attributes.link_layer = 2;
    attributes.active_mtu = 3;
    attributes.max_msg_sz = fake(context).largest.load(Ordering::SeqCst);
    0
}
unsafe extern "C" fn query_gid_table(
    context: *mut ibv_context,
    entries: *mut GidEntry,
    _: usize,
    _: u32,
    _: usize,
) -> isize {
    let raw = Gid::of(fake(context).address);
    let (mut high, mut low) = ([0; 8], [0; 8]);
    high.copy_from_slice(&raw[..8]);
    low.copy_from_slice(&raw[8..]);
    let gid = [u64::from_ne_bytes(high), u64::from_ne_bytes(low)];
    // SAFETY: the caller's array, which has room.
    unsafe { *entries = GidEntry { gid, index: 1, port: 1, kind: 2, interface: 1 } };
    1
}
unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    let mut pd: ibv_pd = zeroed();
    pd.context = context;
    Box::into_raw(Box::new(pd))
}
unsafe extern "C" fn dealloc_pd(_: *mut ibv_pd) -> c_int {
    0
}
unsafe extern "C" fn reg_mr(pd: *mut ibv_pd, memory: *mut c_void, length: usize, _: c_int) -> *mut ibv_mr {
    // SAFETY: made above, never freed.
    let context = unsafe { (*pd).context };
    let fake = fake(context);
    if fake.refuse_registration.load(Ordering::SeqCst) {
        fake.note("not registered");
        errno(libc::ENOMEM);
        return std::ptr::null_mut();
    }
    if length <= 4096 {
        fake.note("registered");
    }
    // Work names its memory by address.
    let _ = memory.expose_provenance();
    let mut mr: ibv_mr = zeroed();
    (mr.context, mr.length) = (context, length);
    Box::into_raw(Box::new(mr))
}
unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: made above, never freed.
    let (context, length) = unsafe { ((*mr).context, (*mr).length) };
    let fake = fake(context);
    if fake.refuse_deregistration.load(Ordering::SeqCst) {
        fake.note("not deregistered");
        return libc::EBUSY;
    }
    if length <= 4096 {
        fake.note("deregistered");
    }
    0
}
unsafe extern "C" fn create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    // Open until the process ends, like everything of a fake.
    let (ours, wake) = UnixStream::pair().unwrap();
    wake.set_nonblocking(true).unwrap();
    let channel = Box::into_raw(Box::new(ibv_comp_channel { context, fd: ours.into_raw_fd(), refcnt: 0 }));
    fake(context).script().channels.push((channel.addr(), wake));
    channel
}
unsafe extern "C" fn destroy_comp_channel(_: *mut ibv_comp_channel) -> c_int {
    0
}
unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    _: c_int,
    _: *mut c_void,
    channel: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    let mut cq: ibv_cq = zeroed();
    cq.context = context;
    let cq = Box::into_raw(Box::new(cq));
    fake(context).script().queues.push((cq.addr(), channel.addr()));
    cq
}
unsafe extern "C" fn destroy_cq(_: *mut ibv_cq) -> c_int {
    0
}
unsafe extern "C" fn get_cq_event(channel: *mut ibv_comp_channel, _: *mut *mut ibv_cq, _: *mut *mut c_void) -> c_int {
    let mut byte = 0u8;
    // SAFETY: made above, never freed; one byte of ours. The descriptor does not block.
    let got = unsafe { libc::read((*channel).fd, (&raw mut byte).cast(), 1) };
    if got == 1 { 0 } else { -1 }
}
unsafe extern "C" fn ack_cq_events(_: *mut ibv_cq, _: c_uint) {}
unsafe extern "C" fn create_qp(pd: *mut ibv_pd, attributes: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: made above, never freed.
    let context = unsafe { (*pd).context };
    let mut pair: ibv_qp = zeroed();
    pair.context = context;
    let fake = fake(context);
    pair.qp_num = 17 + fake.pairs.fetch_add(1, Ordering::SeqCst);
    // SAFETY: the caller's struct.
    let queue = unsafe { (*attributes).send_cq };
    fake.script().pairs.push((pair.qp_num, queue.addr()));
    Box::into_raw(Box::new(pair))
}
unsafe extern "C" fn modify_qp(_: *mut ibv_qp, _: *mut ibv_qp_attr, _: c_int) -> c_int {
    0
}
unsafe extern "C" fn destroy_qp(pair: *mut ibv_qp) -> c_int {
    // SAFETY: made above, never freed.
    let (context, number) = unsafe { ((*pair).context, (*pair).qp_num) };
    if let Some(tell) = &*fake(context).destroying.lock().unwrap_or_else(PoisonError::into_inner) {
        tell(number);
    }
    0
}
unsafe extern "C" fn get_async_event(context: *mut ibv_context, event: *mut RawEvent) -> c_int {
    let Some((element, kind)) = fake(context).event.lock().unwrap_or_else(PoisonError::into_inner).take() else {
        return -1;
    };
    // SAFETY: the caller's struct. Kinds: 0 is IBV_EVENT_CQ_ERR, 8 is IBV_EVENT_DEVICE_FATAL.
    unsafe { *event = RawEvent { element, kind } };
    0
}
unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, _: rdma_sys::ibv_mw_type::Type) -> *mut ibv_mw {
    let mut window: ibv_mw = zeroed();
    // SAFETY: made above, never freed.
    window.context = unsafe { (*pd).context };
    (window.pd, window.rkey) = (pd, 0x100);
    Box::into_raw(Box::new(window))
}
unsafe extern "C" fn dealloc_mw(_: *mut ibv_mw) -> c_int {
    0
}
unsafe extern "C" fn ack_async_event(_: *mut RawEvent) {}
unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, most: c_int, out: *mut ibv_wc) -> c_int {
    // SAFETY: made above, never freed.
    let context = unsafe { (*cq).context };
    let fake = fake(context);
    let mut script = fake.script();
    let mut got = 0;
    while got < most
        && let Some(at) = script.completions.iter().position(|(queue, _)| *queue == cq.addr())
        && let Some((_, done)) = script.completions.remove(at)
    {
        let mut wc: ibv_wc = zeroed();
        (wc.wr_id, wc.status) = (done.id, done.status);
        if let Some((bytes, key)) = done.received {
            (wc.opcode, wc.byte_len) = (rdma_sys::ibv_wc_opcode::IBV_WC_RECV, bytes);
            if let Some(key) = key {
                wc.wc_flags = rdma_sys::ibv_wc_flags::IBV_WC_WITH_INV.0;
                wc.imm_data_invalidated_rkey_union.invalidated_rkey = key;
            }
        }
        // SAFETY: the caller's array of `most` entries.
        unsafe { out.add(usize::try_from(got).unwrap()).write(wc) };
        got += 1;
    }
    got
}
unsafe extern "C" fn req_notify_cq(_: *mut ibv_cq, _: c_int) -> c_int {
    0
}
unsafe extern "C" fn post_send(pair: *mut ibv_qp, work: *mut ibv_send_wr, _: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: made above, never freed.
    let (context, number) = unsafe { ((*pair).context, (*pair).qp_num) };
    let fake = fake(context);
    if fake.refuse_posts.load(Ordering::SeqCst) {
        return libc::EIO;
    }
    let mut script = fake.script();
    let mut next = work;
    while !next.is_null() {
        // SAFETY: the caller's list.
        let work = unsafe { &*next };
        let id = WrId::from_raw(work.wr_id);
        let signalled = work.send_flags & rdma_sys::ibv_send_flags::IBV_SEND_SIGNALED.0 != 0;
        let mut bytes = Vec::new();
        if id.kind == super::WrKind::Send && work.num_sge == 1 {
            // SAFETY: the caller's list of one part, whose memory is registered and stands still; its provenance was exposed then.
            bytes = unsafe {
                let part = &*work.sg_list;
                let from: *const u8 = std::ptr::with_exposed_provenance(usize::try_from(part.addr).unwrap());
                std::slice::from_raw_parts(from, part.length as usize).to_vec()
            };
        }
        script.sent.push(Sent { pair: number, id, signalled, bytes });
        if signalled && fake.completes.load(Ordering::SeqCst) {
            script.complete(number, Wc { id: work.wr_id, status: 0, received: None });
        }
        next = work.next;
    }
    0
}
unsafe extern "C" fn post_recv(pair: *mut ibv_qp, work: *mut ibv_recv_wr, _: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: made above, never freed, and the caller's request of one part.
    let (context, number, id, part) = unsafe { ((*pair).context, (*pair).qp_num, (*work).wr_id, &*(*work).sg_list) };
    let receive = Receive { pair: number, id, address: part.addr, length: part.length };
    fake(context).script().receives.push_back(receive);
    0
}

mod tests {
    use super::*;
    use crate::memory::plan::all_or_nothing;
    use crate::verbs::{Access, Mr, Pd, leaked};

    fn address() -> IpAddr {
        "10.9.0.2".parse().unwrap()
    }

    #[test]
    fn i4_memory_is_deregistered_before_it_is_unmapped_and_stays_where_it_is_not() {
        let log = Arc::default();
        let (context, fake) = Fake::open("fake0", address(), &log);
        let pd = Pd::new(&context).unwrap();
        let mr = Mr::register(&pd, Noted::new(&log, "arena"), Access::Landing).unwrap();
        let kept = mr.clone();
        // Whatever is dropped first.
        drop((mr, pd, context));
        assert_eq!(*log.lock().unwrap(), ["fake0: registered"]);
        drop(kept);
        let order = ["fake0: registered", "fake0: deregistered", "fake0: closed", "arena: unmapped"];
        assert_eq!(*log.lock().unwrap(), order);
        log.lock().unwrap().clear();
        let (context, other) = Fake::open("fake1", address(), &log);
        other.refuse_deregistration.store(true, Ordering::SeqCst);
        let before = leaked();
        let mr = Mr::register(&Pd::new(&context).unwrap(), Noted::new(&log, "arena"), Access::Landing).unwrap();
        drop((mr, context, fake));
        assert_eq!(
            *log.lock().unwrap(),
            ["fake1: registered", "fake1: not deregistered"],
            "the device may still write there"
        );
        assert!(leaked() > before);
    }

    #[test]
    fn i6_a_second_device_that_refuses_gives_the_first_registration_back() {
        let log = Arc::default();
        let (one, _) = Fake::open("fake0", address(), &log);
        let (two, fake) = Fake::open("fake1", address(), &log);
        fake.refuse_registration.store(true, Ordering::SeqCst);
        let register = |context: &Context| Mr::register(&Pd::new(context)?, Noted::new(&log, "arena"), Access::Landing);
        let error = all_or_nothing([&one, &two], register).unwrap_err().to_string();
        assert!(error.contains("4096 bytes on fake1") && error.contains("Cannot allocate memory"), "{error}");
        let order =
            ["fake0: registered", "fake1: not registered", "arena: unmapped", "fake0: deregistered", "arena: unmapped"];
        assert_eq!(*log.lock().unwrap(), order);
    }
}
