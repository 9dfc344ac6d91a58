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
    /// A completion queue overflowed.
    CqError,
    /// A queue pair of ours failed.
    QpError,
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
    // SAFETY: the event just got, acknowledged once.
    unsafe { (context.0.library.ibv_ack_async_event)(&raw mut raw) };
    use rdma_sys::ibv_event_type as E;
    Some(match kind {
        kind if kind == E::IBV_EVENT_PORT_ACTIVE as u32 => DeviceEvent::PortActive(port),
        kind if kind == E::IBV_EVENT_PORT_ERR as u32 => DeviceEvent::PortDown(port),
        kind if kind == E::IBV_EVENT_GID_CHANGE as u32 || kind == E::IBV_EVENT_LID_CHANGE as u32 => {
            DeviceEvent::GidChange(port)
        }
        kind if kind == E::IBV_EVENT_DEVICE_FATAL as u32 => DeviceEvent::DeviceFatal,
        kind if kind == E::IBV_EVENT_CQ_ERR as u32 => DeviceEvent::CqError,
        kind if kind == E::IBV_EVENT_QP_FATAL as u32
            || kind == E::IBV_EVENT_QP_REQ_ERR as u32
            || kind == E::IBV_EVENT_QP_ACCESS_ERR as u32 =>
        {
            DeviceEvent::QpError
        }
        other => DeviceEvent::Other(other),
    })
}
