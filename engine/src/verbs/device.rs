//! Devices, their ports, and the GID table.
//!
//! Guarantees: no device, no kernel support and no library are all an empty list with a reason, never an error that stops a
//! program; what a device says is kept as it is, with unknown codes as values.

use super::library::{GidEntry, Library, library};
use super::{VerbsError, failed, leak};
use rdma_sys::{ibv_context, ibv_device_attr, ibv_port_attr};
use std::ffi::CStr;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{BorrowedFd, RawFd};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;

/// What kind of address a GID is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand.
    InfiniBand,
    /// RoCE version 1: not routed, not used here.
    RoceV1,
    /// RoCE version 2.
    RoceV2,
    /// One that this software does not know.
    Other(u32),
}

/// One entry of a device's GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gid {
    /// The port, from 1.
    pub port: u8,
    /// Its place in the table. It moves when addresses change: look it up for every connection.
    pub index: u32,
    /// See [`GidKind`].
    pub kind: GidKind,
    /// The 16 bytes.
    pub raw: [u8; 16],
    /// Of the network interface; 0: none.
    pub interface: u32,
}

impl Gid {
    /// The IP address that it stands for (RoCE).
    pub fn address(&self) -> IpAddr {
        let six = Ipv6Addr::from(self.raw);
        six.to_ipv4_mapped().map_or(IpAddr::V6(six), IpAddr::V4)
    }
    /// The GID of an IP address.
    pub fn of(address: IpAddr) -> [u8; 16] {
        match address {
            IpAddr::V4(four) => four.to_ipv6_mapped().octets(),
            IpAddr::V6(six) => six.octets(),
        }
    }
}

/// What a port is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// Can be used.
    Active,
    /// Cannot, with the code.
    Other(u32),
}

/// A port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// From 1.
    pub number: u8,
    /// See [`PortState`].
    pub state: PortState,
    /// Whether it is Ethernet (RoCE); else InfiniBand or something else.
    pub ethernet: bool,
    /// Active MTU as the code 1 (256 bytes) to 5 (4096).
    pub mtu: u32,
    /// Its local id (InfiniBand).
    pub lid: u16,
    /// Longest message, bytes.
    pub max_message: u32,
    /// Megabits per second, as far as width and speed are known; 0: not known.
    pub speed_mbps: u64,
}

/// What a device can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Work requests in one queue.
    pub max_queue: u32,
    /// Entries of one completion queue.
    pub max_completions: u32,
    /// READs that one queue pair answers at once.
    pub max_reads: u8,
    /// READs that one queue pair has under way at once.
    pub max_reads_out: u8,
    /// Memory windows; 0: none.
    pub max_windows: u32,
    /// Whether windows of type 2B can be had: bound and invalidated on one queue pair.
    pub windows_2b: bool,
    /// Bytes of one registration.
    pub max_region: u64,
    /// Ports.
    pub ports: u8,
    /// Soft-RoCE, two of whose defects (seen in Linux 6.1) are worked around: it reports an invalidated key with the kernel's own
    /// flag, and it crashes when a window is invalidated that was invalidated before.
    pub soft: bool,
}

/// What Soft-RoCE says as its vendor.
pub(super) const SOFT_VENDOR: u32 = 0xff_ffff;

/// An open device. Cheap to clone; closed with the last thing that hangs on it.
#[derive(Clone, Debug)]
pub struct Context(pub(super) Arc<ContextInner>);

#[derive(Debug)]
pub(super) struct ContextInner {
    pub(super) raw: NonNull<ibv_context>,
    pub(super) library: &'static Library,
    pub(super) name: String,
    /// Where the kernel shows the device to programs, for as long as it does; none: not known.
    pub(super) shown: Option<PathBuf>,
}

// SAFETY: verbs may be called from any thread; the pointer is freed once, when the last owner is dropped.
unsafe impl Send for ContextInner {}
// SAFETY: as above, the library locks inside.
unsafe impl Sync for ContextInner {}

impl Drop for ContextInner {
    fn drop(&mut self) {
        // SAFETY: opened by us, closed once; everything made from it holds an Arc of this, so nothing is left.
        let code = unsafe { (self.library.ibv_close_device)(self.raw.as_ptr()) };
        if code != 0 {
            leak(&failed("ibv_close_device", &self.name, None));
        }
    }
}

/// A device list that is freed.
struct List(&'static Library, *mut *mut rdma_sys::ibv_device, usize);

impl List {
    fn get() -> Result<List, String> {
        let library = library()?;
        let mut count = 0;
        // SAFETY: gives an array of `count` devices that is freed in Drop, or null.
        let list = unsafe { (library.ibv_get_device_list)(&raw mut count) };
        if list.is_null() {
            // ENOSYS: the kernel has no RDMA. That is the same as having no device.
            return Err("the kernel has no RDMA support".into());
        }
        Ok(List(library, list, usize::try_from(count).unwrap_or(0)))
    }
    fn name(&self, index: usize) -> Option<(String, *mut rdma_sys::ibv_device)> {
        if index >= self.2 {
            return None;
        }
        // SAFETY: inside the array.
        let device = unsafe { *self.1.add(index) };
        if device.is_null() {
            return None;
        }
        // SAFETY: a device of the list has a name, a C string that lives as long as it.
        let name = unsafe { CStr::from_ptr((self.0.ibv_get_device_name)(device)) };
        Some((name.to_string_lossy().into_owned(), device))
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: from ibv_get_device_list, freed once. Devices that were opened stay valid.
        unsafe { (self.0.ibv_free_device_list)(self.1) };
    }
}

/// The names of the devices there are. An error says why there can be none.
pub fn devices() -> Result<Vec<String>, String> {
    let list = List::get()?;
    Ok((0..list.2).filter_map(|index| list.name(index).map(|(name, _)| name)).collect())
}

/// What is said of a device that is not among these.
pub fn no_device(name: &str, there: &[String]) -> String {
    match there {
        [] => format!("there is no RDMA device {name}, nor any other"),
        there => format!("there is no RDMA device {name} (there are: {})", there.join(", ")),
    }
}

fn zeroed<T: Copy>() -> T {
    // SAFETY: only used for plain C structs of numbers, for which zero is a value.
    unsafe { std::mem::zeroed() }
}

impl Context {
    /// Opens a device by its name.
    pub fn open(name: &str) -> Result<Context, String> {
        let list = List::get()?;
        let mut names = Vec::new();
        for index in 0..list.2 {
            let Some((found, device)) = list.name(index) else { continue };
            if found != name {
                names.push(found);
                continue;
            }
            // SAFETY: a device of the list, which is still there.
            if unsafe { (*device).node_type } == rdma_sys::ibv_node_type::IBV_NODE_RNIC {
                return Err(format!("device {name} is iWARP, which rails cannot use (RoCE version 2 only)"));
            }
            // SAFETY: as above.
            let raw = NonNull::new(unsafe { (list.0.ibv_open_device)(device) });
            let raw = raw.ok_or_else(|| failed("ibv_open_device", name, None).to_string())?;
            // SAFETY: a device of the list has the name of its character device, a C string that lives as long as it.
            let character = unsafe { CStr::from_ptr((*device).dev_name.as_ptr()) };
            let shown = Path::new("/sys/class/infiniband_verbs").join(&*character.to_string_lossy());
            let shown = Some(shown).filter(|path| path.exists());
            let context = Context(Arc::new(ContextInner { raw, library: list.0, name: name.to_owned(), shown }));
            context.nonblocking_events().map_err(|error| format!("device {name}: {error}"))?;
            return Ok(context);
        }
        Err(no_device(name, &names))
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Whether the kernel still shows the device. One that is being taken away may wait, without a word, until whoever has it
    /// open closes it (Soft-RoCE, Linux 6.1). Its name may change while it is open.
    pub fn is_there(&self) -> bool {
        self.0.shown.as_ref().is_none_or(|path| path.try_exists().unwrap_or(true))
    }

    /// The same open device?
    pub fn is(&self, other: &Context) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    fn raw_events(&self) -> RawFd {
        // SAFETY: an open context has its descriptor.
        unsafe { (*self.0.raw.as_ptr()).async_fd }
    }

    /// The descriptor that is readable when there are asynchronous events.
    pub fn events(&self) -> BorrowedFd<'_> {
        // SAFETY: open for as long as the context, which `self` keeps.
        unsafe { BorrowedFd::borrow_raw(self.raw_events()) }
    }

    fn nonblocking_events(&self) -> std::io::Result<()> {
        let flags = rustix::fs::fcntl_getfl(self.events())?;
        rustix::fs::fcntl_setfl(self.events(), flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(())
    }

    /// What the device can do.
    pub fn facts(&self) -> Result<DeviceFacts, VerbsError> {
        let mut attributes: ibv_device_attr = zeroed();
        // SAFETY: an open context and a struct of ours that is filled.
        let code = unsafe { (self.0.library.ibv_query_device)(self.0.raw.as_ptr(), &raw mut attributes) };
        if code != 0 {
            return Err(failed("ibv_query_device", self.name(), Some(code)));
        }
        let number = |value: i32| u32::try_from(value).unwrap_or(0);
        let small = |value: i32| u8::try_from(value.clamp(0, 255)).unwrap_or(0);
        Ok(DeviceFacts {
            max_queue: number(attributes.max_qp_wr),
            max_completions: number(attributes.max_cqe),
            max_reads: small(attributes.max_qp_rd_atom),
            max_reads_out: small(attributes.max_qp_init_rd_atom),
            max_windows: number(attributes.max_mw),
            windows_2b: attributes.device_cap_flags & rdma_sys::ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B.0
                != 0,
            max_region: attributes.max_mr_size,
            ports: attributes.phys_port_cnt,
            soft: attributes.vendor_id == SOFT_VENDOR,
        })
    }

    /// A port.
    pub fn port(&self, number: u8) -> Result<Port, VerbsError> {
        let mut attributes: ibv_port_attr = zeroed();
        // SAFETY: an open context and a zeroed struct of ours that is filled in part.
        let code = unsafe { (self.0.library.ibv_query_port)(self.0.raw.as_ptr(), number, &raw mut attributes) };
        if code != 0 {
            return Err(failed("ibv_query_port", format!("{} port {number}", self.name()), Some(code)));
        }
        // The codes of the InfiniBand specification, as megabits per second and lane.
        let lanes = match attributes.active_width {
            1 => 1,
            2 => 4,
            4 => 8,
            8 => 12,
            16 => 2,
            _ => 0,
        };
        let lane = match attributes.active_speed {
            1 => 2_500,
            2 => 5_000,
            4 | 8 => 10_000,
            16 => 14_000,
            32 => 25_000,
            64 => 50_000,
            128 => 100_000,
            _ => 0,
        };
        Ok(Port {
            number,
            state: match attributes.state {
                rdma_sys::ibv_port_state::IBV_PORT_ACTIVE => PortState::Active,
                other => PortState::Other(other),
            },
            ethernet: attributes.link_layer == 2,
            mtu: attributes.active_mtu,
            lid: attributes.lid,
            max_message: attributes.max_msg_sz,
            speed_mbps: lanes * lane,
        })
    }

    /// Every valid GID of the device.
    pub fn gids(&self) -> Result<Vec<Gid>, VerbsError> {
        let mut entries = vec![GidEntry::default(); 1024];
        // SAFETY: an open context, and room for as many entries as said, each of the size said.
        let got = unsafe {
            (self.0.library._ibv_query_gid_table)(
                self.0.raw.as_ptr(),
                entries.as_mut_ptr(),
                entries.len(),
                0,
                size_of::<GidEntry>(),
            )
        };
        let Ok(got) = usize::try_from(got) else {
            return Err(failed("ibv_query_gid_table", self.name(), Some(i32::try_from(-got).unwrap_or(0))));
        };
        entries.truncate(got);
        Ok(entries.iter().map(gid).collect())
    }
}

fn gid(entry: &GidEntry) -> Gid {
    let mut raw = [0; 16];
    raw[..8].copy_from_slice(&entry.gid[0].to_ne_bytes());
    raw[8..].copy_from_slice(&entry.gid[1].to_ne_bytes());
    Gid {
        port: u8::try_from(entry.port).unwrap_or(0),
        index: entry.index,
        kind: match entry.kind {
            0 => GidKind::InfiniBand,
            1 => GidKind::RoceV1,
            2 => GidKind::RoceV2,
            other => GidKind::Other(other),
        },
        raw,
        interface: entry.interface,
    }
}
