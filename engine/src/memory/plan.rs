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

/// More is to be registered than may be locked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what} is more than four fifths of the memlock limit of {limit}: raise it to {least} (LimitMEMLOCK={bytes} in the unit \
     of a service; `ulimit -l {kib}` in a shell; `memlock` in /etc/security/limits.d for a user), give CAP_IPC_LOCK, or register \
     less",
    limit = format_size(*limit),
    least = format_size(self.limit_needed()),
    bytes = self.limit_needed(),
    kib = self.limit_needed().div_ceil(1024)
)]
pub struct Shortage {
    /// What, with the bytes of each part.
    pub what: String,
    /// Bytes to register in all.
    pub need: u64,
    /// The limit, bytes.
    pub limit: u64,
}

impl Shortage {
    /// The least limit that is enough, bytes: four fifths of it are used.
    pub fn limit_needed(&self) -> u64 {
        self.need.div_ceil(4).saturating_mul(5)
    }
}

/// The plan in one line, if it fits into four fifths of the limit: for each device its parts and their sum, the sum of all, and
/// what caps it (the option or key, and its bytes).
///
/// # Errors
/// It does not: the line says what is needed and what to do.
pub fn check(plan: &[Registration], (cap, most): (&str, u64), memlock: Memlock) -> Result<String, Shortage> {
    let of = |device: &Registration| device.parts.iter().map(|(_, bytes)| *bytes).sum::<u64>();
    let device = |device: &Registration| {
        let parts: Vec<String> =
            device.parts.iter().map(|(what, bytes)| format!("{what} {}", format_size(*bytes))).collect();
        format!("{}: {} = {}", device.device, parts.join(" + "), format_size(of(device)))
    };
    let total: u64 = plan.iter().map(of).sum();
    let listed: Vec<String> = plan.iter().map(device).collect();
    let text =
        format!("registered memory {} ({}; {cap} = {})", format_size(total), listed.join("; "), format_size(most));
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
    Err(Shortage { what: text, need: total, limit })
}

/// Makes all of it, in order, or nothing: where one cannot be made, those made before it are given back, the last first.
///
/// # Errors
/// Of the one that could not be made.
pub fn all_or_nothing<I, T, E>(
    items: impl IntoIterator<Item = I>,
    make: impl Fn(I) -> Result<T, E>,
) -> Result<Vec<T>, E> {
    let mut made = Vec::new();
    for item in items {
        match make(item) {
            Ok(one) => made.push(one),
            Err(error) => {
                while let Some(one) = made.pop() {
                    drop(one);
                }
                return Err(error);
            }
        }
    }
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAP: (&str, u64) = ("memory.max_registered", 40 << 20);

    fn plan() -> Vec<Registration> {
        let device =
            |name: &str| Registration { device: name.into(), parts: vec![("arena", 16 << 20), ("messages", 2 << 20)] };
        vec![device("rxe0"), device("rxe1")]
    }

    #[test]
    fn i6_memory_is_charged_per_device_and_refused_before_it_is_registered() {
        let limited = |limit| Memlock { limit: Some(limit), lifted: false };
        let shortage = check(&plan(), CAP, limited(44 << 20)).unwrap_err();
        assert_eq!((shortage.need, shortage.limit, shortage.limit_needed()), (36 << 20, 44 << 20, 45 << 20));
        let error = shortage.to_string();
        assert!(error.contains("36 MiB") && error.contains("44 MiB") && error.contains("45 MiB"), "{error}");
        assert!(
            error.contains("rxe0: arena 16 MiB + messages 2 MiB = 18 MiB; rxe1: ")
                && error.contains("; memory.max_registered = 40 MiB) is more than four fifths")
                && error.contains("LimitMEMLOCK=47185920"),
            "{error}"
        );
        assert!(
            error.contains("ulimit -l 46080") && error.contains("limits.d") && error.contains("CAP_IPC_LOCK"),
            "{error}"
        );
        assert!(check(&plan(), CAP, limited(45 << 20)).is_ok());
        for free in [Memlock { limit: None, lifted: false }, Memlock { limit: Some(64 << 10), lifted: true }] {
            assert!(check(&plan(), CAP, free).unwrap().contains("36 MiB"));
        }
    }

    #[test]
    fn i6_what_is_half_registered_is_given_back_the_last_first() {
        use std::cell::RefCell;
        struct Registered<'a>(u32, &'a RefCell<Vec<String>>);
        impl Drop for Registered<'_> {
            fn drop(&mut self) {
                self.1.borrow_mut().push(format!("-{}", self.0));
            }
        }
        let log: RefCell<Vec<String>> = RefCell::default();
        let make = |device: u32| {
            if device == 3 {
                return Err("device 3: Cannot allocate memory");
            }
            log.borrow_mut().push(format!("+{device}"));
            Ok(Registered(device, &log))
        };
        assert_eq!(all_or_nothing([1, 2, 3, 4], make).err(), Some("device 3: Cannot allocate memory"));
        assert_eq!(log.borrow_mut().drain(..).collect::<Vec<_>>(), ["+1", "+2", "-2", "-1"]);
        assert_eq!(all_or_nothing([1, 2], make).map(|made| made.len()).ok(), Some(2));
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
