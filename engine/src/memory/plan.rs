//! What is registered with devices, against what this process may lock in memory.
//!
//! Guarantees: pure but for [`Memlock::now`]; a plan that does not fit is refused before anything is registered, with the number
//! needed, the limit, and how to raise it (I6). Memory is charged for each device that it is registered with.

use railfs_proto::units::format_size;

/// What is registered with one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The device.
    pub device: String,
    /// What, with its bytes.
    pub parts: Vec<(&'static str, u64)>,
}

/// What this process may lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memlock {
    /// Bytes; none: no limit.
    pub limit: Option<u64>,
    /// CAP_IPC_LOCK is effective: the limit does not apply.
    pub lifted: bool,
}

/// The bit of CAP_IPC_LOCK.
const IPC_LOCK: u32 = 14;

impl Memlock {
    /// Of this process, now.
    pub fn now() -> Memlock {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        Memlock { limit, lifted: effective(&status) }
    }
}

/// Whether the text of `/proc/PID/status` has the capability.
fn effective(status: &str) -> bool {
    let word = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = word.and_then(|word| u64::from_str_radix(word.trim(), 16).ok());
    bits.is_some_and(|bits| bits >> IPC_LOCK & 1 == 1)
}

/// The plan in one line, if it fits into four fifths of the limit.
///
/// # Errors
/// It does not: the line says what is needed and what to do.
pub fn check(plan: &[Registration], memlock: Memlock) -> Result<String, String> {
    let of = |device: &Registration| device.parts.iter().map(|(_, bytes)| *bytes).sum::<u64>();
    let device = |device: &Registration| {
        let parts: Vec<String> =
            device.parts.iter().map(|(what, bytes)| format!("{what} {}", format_size(*bytes))).collect();
        format!("{}: {}", device.device, parts.join(" + "))
    };
    let total: u64 = plan.iter().map(of).sum();
    let listed: Vec<String> = plan.iter().map(device).collect();
    let text = format!("registered memory {} ({})", format_size(total), listed.join("; "));
    let Some(limit) = memlock.limit else { return Ok(format!("{text}; memlock is not limited")) };
    if memlock.lifted {
        let limit = format_size(limit);
        return Ok(format!("{text}; the memlock limit of {limit} does not apply (CAP_IPC_LOCK)"));
    }
    let usable = limit / 5 * 4;
    if total <= usable {
        return Ok(format!(
            "{text}; of the memlock limit of {} at most {} are used",
            format_size(limit),
            format_size(usable)
        ));
    }
    Err(format!(
        "{text} is more than four fifths of the memlock limit of {}: raise it to {} (LimitMEMLOCK= of the unit, `ulimit -l`, \
         or /etc/security/limits.d), give CAP_IPC_LOCK, or register less",
        format_size(limit),
        format_size(total.div_ceil(4) * 5)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Vec<Registration> {
        let device =
            |name: &str| Registration { device: name.into(), parts: vec![("arena", 16 << 20), ("messages", 2 << 20)] };
        vec![device("rxe0"), device("rxe1")]
    }

    #[test]
    fn i6_memory_is_charged_per_device_and_refused_before_it_is_registered() {
        let limited = |limit| Memlock { limit: Some(limit), lifted: false };
        let error = check(&plan(), limited(44 << 20)).unwrap_err();
        assert!(error.contains("36 MiB") && error.contains("44 MiB") && error.contains("45 MiB"), "{error}");
        assert!(error.contains("rxe0: arena 16 MiB + messages 2 MiB") && error.contains("LimitMEMLOCK"), "{error}");
        assert!(check(&plan(), limited(45 << 20)).is_ok());
        for free in [Memlock { limit: None, lifted: false }, Memlock { limit: Some(64 << 10), lifted: true }] {
            assert!(check(&plan(), free).unwrap().contains("36 MiB"));
        }
    }

    #[test]
    fn the_capability_is_read_from_the_effective_set() {
        assert!(effective("Name:\tx\nCapPrm:\t0000000000000000\nCapEff:\t000001ffffffffff\n"));
        assert!(effective("CapEff:\t0000000000004000\n"));
        assert!(!effective("CapPrm:\t000001ffffffffff\nCapEff:\t0000000000000000\n"));
        assert!(!effective("CapEff:\tnonsense"));
        assert!(!effective(""));
    }
}
