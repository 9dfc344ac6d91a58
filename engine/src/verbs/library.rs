//! The entry points of `libibverbs`, looked up when first needed.
//!
//! Guarantees: nothing links against the library (`rdma_sys` gives types only), so its absence is a message and not a
//! program that does not start; every entry point is there before the first is called.

use rdma_sys::{
    ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp,
    ibv_qp_attr, ibv_qp_init_attr,
};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// An entry of a device's GID table, as the library lays it out (the binding lacks it).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GidEntry {
    pub(super) gid: [u64; 2],
    pub(super) index: u32,
    pub(super) port: u32,
    pub(super) kind: u32,
    pub(super) interface: u32,
}

/// An asynchronous event. The binding's own type has a Rust enum in it, for which a newer code is undefined behaviour.
#[repr(C)]
pub(super) struct RawEvent {
    /// A pointer, or a port number in its first four bytes.
    pub(super) element: u64,
    pub(super) kind: u32,
}

macro_rules! entries {
    ($($name:ident($($argument:ty),*) -> $result:ty;)*) => {
        #[derive(Debug)]
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        fn load() -> Result<Library, String> {
            let handle = open()?;
            Ok(Library {
                // SAFETY: the symbol is the library's function of that name; the types are those of its public header.
                $($name: unsafe {
                    std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> $result>(
                        symbol(handle, concat!(stringify!($name), "\0"))?,
                    )
                },)*
            })
        }
    };
}

entries! {
    ibv_fork_init() -> c_int;
    ibv_get_device_list(*mut c_int) -> *mut *mut ibv_device;
    ibv_free_device_list(*mut *mut ibv_device) -> ();
    ibv_get_device_name(*mut ibv_device) -> *const c_char;
    ibv_open_device(*mut ibv_device) -> *mut ibv_context;
    ibv_close_device(*mut ibv_context) -> c_int;
    ibv_query_device(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    // Fills the first part of the struct only: give it a zeroed one.
    ibv_query_port(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    _ibv_query_gid_table(*mut ibv_context, *mut GidEntry, usize, u32, usize) -> isize;
    ibv_alloc_pd(*mut ibv_context) -> *mut ibv_pd;
    ibv_dealloc_pd(*mut ibv_pd) -> c_int;
    ibv_reg_mr(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    ibv_dereg_mr(*mut ibv_mr) -> c_int;
    ibv_create_comp_channel(*mut ibv_context) -> *mut ibv_comp_channel;
    ibv_destroy_comp_channel(*mut ibv_comp_channel) -> c_int;
    ibv_create_cq(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    ibv_destroy_cq(*mut ibv_cq) -> c_int;
    ibv_get_cq_event(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events(*mut ibv_cq, c_uint) -> ();
    ibv_create_qp(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    ibv_modify_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    ibv_destroy_qp(*mut ibv_qp) -> c_int;
    ibv_get_async_event(*mut ibv_context, *mut RawEvent) -> c_int;
    ibv_ack_async_event(*mut RawEvent) -> ();
}

fn why() -> String {
    // SAFETY: dlerror gives a C string that stays until the next dl call of this thread, or null.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason given".into();
    }
    // SAFETY: not null, see above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn open() -> Result<*mut c_void, String> {
    // SAFETY: a plain dlopen of a system library by its name; it is never closed, so what is looked up stays valid.
    let handle = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if handle.is_null() {
        return Err(format!("libibverbs.so.1 cannot be loaded ({}): install libibverbs1 and ibverbs-providers", why()));
    }
    Ok(handle)
}

fn symbol(handle: *mut c_void, name: &'static str) -> Result<*mut c_void, String> {
    let name = CStr::from_bytes_with_nul(name.as_bytes()).map_err(|error| error.to_string())?;
    // SAFETY: an open handle and a C string.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    if address.is_null() {
        return Err(format!("libibverbs.so.1 is too old: it has no {}", name.to_string_lossy()));
    }
    Ok(address)
}

/// The library, or why there is none. The first call loads it.
pub(super) fn library() -> Result<&'static Library, &'static str> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    let loaded = LIBRARY.get_or_init(|| {
        let library = load()?;
        // SAFETY: takes nothing. Before any memory is registered, so that a child cannot take pages away from it.
        let code = unsafe { (library.ibv_fork_init)() };
        if code != 0 {
            tracing::debug!(code, "no protection of registered memory against forks: none may happen");
        }
        Ok(library)
    });
    loaded.as_ref().map_err(String::as_str)
}
