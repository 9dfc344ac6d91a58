//! A device that is not there, for tests: it takes what it is given, completes nothing, refuses what it is told to refuse, and
//! notes in which order memory is registered, deregistered and unmapped.

use super::device::ContextInner;
use super::library::{GidEntry, Library, RawEvent};
use super::memory::Registrable;
use super::{Context, Gid};
use rdma_sys::{
    ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_mr, ibv_mw, ibv_pd, ibv_port_attr,
    ibv_port_state, ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr, ibv_wc,
};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::net::IpAddr;
use std::os::fd::IntoRawFd;
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What a device does and has done.
#[derive(Debug)]
pub(crate) struct Fake {
    name: &'static str,
    address: IpAddr,
    log: Arc<Mutex<Vec<String>>>,
    pub(crate) refuse_registration: AtomicBool,
    pub(crate) refuse_deregistration: AtomicBool,
    /// `ibv_post_send` fails with EIO.
    pub(crate) refuse_posts: AtomicBool,
    kind: Kind,
    /// It has an event to tell: that it failed.
    failed: AtomicBool,
    /// What is written here wakes whoever waits for its events.
    wake: Mutex<UnixStream>,
    pairs: AtomicU32,
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
            failed: AtomicBool::new(false),
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
        (Context(Arc::new(ContextInner { raw, library: &LIBRARY, name: name.to_owned() })), fake)
    }

    fn note(&self, what: &str) {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).push(format!("{}: {what}", self.name));
    }

    /// It says that it failed.
    pub(crate) fn fail(&self) {
        self.failed.store(true, Ordering::SeqCst);
        std::io::Write::write_all(&mut *self.wake.lock().unwrap(), b"!").unwrap();
    }

    /// Queue pairs that were made.
    pub(crate) fn pairs(&self) -> u32 {
        self.pairs.load(Ordering::SeqCst)
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

/// One that never becomes readable. Open until the process ends, like everything of a fake.
fn descriptor() -> c_int {
    let (ours, other) = UnixStream::pair().unwrap();
    std::mem::forget(other);
    ours.into_raw_fd()
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
    attributes.max_qp_wr = 1024;
    attributes.max_cqe = 1 << 16;
    attributes.max_mr_size = u64::MAX;
    attributes.phys_port_cnt = 1;
    let kind = fake(context).kind;
    if kind != Kind::Plain {
        attributes.max_mw = 1 << 16;
        attributes.device_cap_flags |= rdma_sys::ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B.0;
    }
    if kind == Kind::Soft {
        attributes.vendor_id = super::device::SOFT_VENDOR;
    }
    0
}
unsafe extern "C" fn query_port(_: *mut ibv_context, _: u8, attributes: *mut ibv_port_attr) -> c_int {
    // SAFETY: the caller's struct.
    let attributes = unsafe { &mut *attributes };
    attributes.state = ibv_port_state::IBV_PORT_ACTIVE;
    attributes.link_layer = 2;
    attributes.active_mtu = 3;
    attributes.max_msg_sz = 1 << 30;
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
unsafe extern "C" fn reg_mr(pd: *mut ibv_pd, _: *mut c_void, length: usize, _: c_int) -> *mut ibv_mr {
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
    Box::into_raw(Box::new(ibv_comp_channel { context, fd: descriptor(), refcnt: 0 }))
}
unsafe extern "C" fn destroy_comp_channel(_: *mut ibv_comp_channel) -> c_int {
    0
}
unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    _: c_int,
    _: *mut c_void,
    _: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    let mut cq: ibv_cq = zeroed();
    cq.context = context;
    Box::into_raw(Box::new(cq))
}
unsafe extern "C" fn destroy_cq(_: *mut ibv_cq) -> c_int {
    0
}
unsafe extern "C" fn get_cq_event(_: *mut ibv_comp_channel, _: *mut *mut ibv_cq, _: *mut *mut c_void) -> c_int {
    -1
}
unsafe extern "C" fn ack_cq_events(_: *mut ibv_cq, _: c_uint) {}
unsafe extern "C" fn create_qp(pd: *mut ibv_pd, _: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: made above, never freed.
    let context = unsafe { (*pd).context };
    let mut pair: ibv_qp = zeroed();
    pair.context = context;
    pair.qp_num = 17 + fake(context).pairs.fetch_add(1, Ordering::SeqCst);
    Box::into_raw(Box::new(pair))
}
unsafe extern "C" fn modify_qp(_: *mut ibv_qp, _: *mut ibv_qp_attr, _: c_int) -> c_int {
    0
}
unsafe extern "C" fn destroy_qp(_: *mut ibv_qp) -> c_int {
    0
}
unsafe extern "C" fn get_async_event(context: *mut ibv_context, event: *mut RawEvent) -> c_int {
    if !fake(context).failed.swap(false, Ordering::SeqCst) {
        return -1;
    }
    // SAFETY: the caller's struct. 8: IBV_EVENT_DEVICE_FATAL.
    unsafe { *event = RawEvent { element: 0, kind: 8 } };
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
unsafe extern "C" fn poll_cq(_: *mut ibv_cq, _: c_int, _: *mut ibv_wc) -> c_int {
    0
}
unsafe extern "C" fn req_notify_cq(_: *mut ibv_cq, _: c_int) -> c_int {
    0
}
unsafe extern "C" fn post_send(pair: *mut ibv_qp, _: *mut ibv_send_wr, _: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: made above, never freed.
    let context = unsafe { (*pair).context };
    if fake(context).refuse_posts.load(Ordering::SeqCst) { libc::EIO } else { 0 }
}
unsafe extern "C" fn post_recv(_: *mut ibv_qp, _: *mut ibv_recv_wr, _: *mut *mut ibv_recv_wr) -> c_int {
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
