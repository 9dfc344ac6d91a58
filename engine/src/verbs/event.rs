//! Asynchronous events of a device.
//!
//! Guarantees: every event that is taken is acknowledged at once (destroying a queue pair waits for that); codes that are
//! not known are values.

use super::Context;
use super::library::RawEvent;

/// What a device tells by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceEvent {
    /// The port can be used.
    PortActive(u8),
    /// The port cannot be used any more.
    PortDown(u8),
    /// Addresses have changed.
    GidChange(u8),
    /// The device is gone.
    DeviceFatal,
    /// This completion queue overflowed: compare with [`super::Cq::mark`].
    CqError(u64),
    /// The queue pair with this number failed.
    QpError(u32),
    /// Anything else, by its code.
    Other(u32),
}

/// The next event there is, without waiting.
pub fn next_event(context: &Context) -> Option<DeviceEvent> {
    let mut raw = RawEvent { element: 0, kind: 0 };
    // SAFETY: an open context whose descriptor does not block, and a struct of the library's layout.
    let code = unsafe { (context.0.library.ibv_get_async_event)(context.0.raw.as_ptr(), &raw mut raw) };
    if code != 0 {
        return None;
    }
    // The port number is an int at the start of the union.
    let port = raw.element.to_ne_bytes()[..4].try_into().map(i32::from_ne_bytes).unwrap_or(0);
    let port = u8::try_from(port).unwrap_or(0);
    let kind = raw.kind;
    use rdma_sys::ibv_event_type as E;
    let of_pair = [E::IBV_EVENT_QP_FATAL, E::IBV_EVENT_QP_REQ_ERR, E::IBV_EVENT_QP_ACCESS_ERR];
    let pair = of_pair.iter().any(|of| *of as u32 == kind).then(|| pair_number(&raw));
    // SAFETY: the event just got, acknowledged once.
    unsafe { (context.0.library.ibv_ack_async_event)(&raw mut raw) };
    Some(match kind {
        kind if kind == E::IBV_EVENT_PORT_ACTIVE as u32 => DeviceEvent::PortActive(port),
        kind if kind == E::IBV_EVENT_PORT_ERR as u32 => DeviceEvent::PortDown(port),
        kind if kind == E::IBV_EVENT_GID_CHANGE as u32 || kind == E::IBV_EVENT_LID_CHANGE as u32 => {
            DeviceEvent::GidChange(port)
        }
        kind if kind == E::IBV_EVENT_DEVICE_FATAL as u32 => DeviceEvent::DeviceFatal,
        kind if kind == E::IBV_EVENT_CQ_ERR as u32 => DeviceEvent::CqError(raw.element),
        other => pair.map_or(DeviceEvent::Other(other), DeviceEvent::QpError),
    })
}

/// Of an event about a queue pair that has not been acknowledged.
fn pair_number(raw: &RawEvent) -> u32 {
    let Ok(address) = usize::try_from(raw.element) else { return 0 };
    let pair = std::ptr::with_exposed_provenance::<rdma_sys::ibv_qp>(address);
    if pair.is_null() {
        return 0;
    }
    // SAFETY: the library's own pointer to a queue pair of this process; ibv_destroy_qp waits until the event is acknowledged,
    // so it is there.
    unsafe { (*pair).qp_num }
}
