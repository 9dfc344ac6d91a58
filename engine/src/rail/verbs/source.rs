//! What a listener WRITES from: the slab, registered with its device, or a small one of its own where that is refused.
//!
//! Guarantees: registered once per device; what is registered is taken from the ledger before; where the device refuses the
//! slab, a small one of the listener's own takes its place with the same rules, which is said and counted (I11).

use crate::memory::Arena;
use crate::memory::ledger::{Ledger, Share};
use crate::rail::slab::{Reading, Slab};
use crate::verbs::{Access, Mr, Pd};
use railfs_proto::units::format_size;
use std::sync::Arc;

/// Bytes of the small one.
const SMALL: u64 = 4 << 20;

/// See the module. Cheap to clone.
#[derive(Clone)]
pub(super) struct Source {
    pub(super) slab: Arc<Slab>,
    pub(super) mr: Arc<Mr>,
    /// What was taken for it.
    share: Arc<Share>,
    /// It is the listener's own, because the device refused the one of all.
    pub(super) own: bool,
}

impl Source {
    pub(super) fn new(name: &str, pd: &Pd, slab: &Arc<Slab>, ledger: &Ledger) -> Result<Source, String> {
        let register = |arena: &Arena| {
            let share = ledger.take(arena.stats().total, "object bytes")?;
            let mr = Mr::register(pd, arena.clone(), Access::Local).map_err(|error| error.to_string())?;
            Ok((mr, share))
        };
        let (slab, (mr, share), own) = registered(name, slab, register)?;
        Ok(Source { slab, mr, share: Arc::new(share), own })
    }

    /// Bytes registered.
    pub(super) fn bytes(&self) -> u64 {
        self.share.bytes()
    }
}

/// The slab, or a small one, with what registering it gave.
fn registered<R>(
    name: &str,
    slab: &Arc<Slab>,
    register: impl Fn(&Arena) -> Result<R, String>,
) -> Result<(Arc<Slab>, R, bool), String> {
    let why = match register(slab.arena()) {
        Ok(registered) => return Ok((slab.clone(), registered, false)),
        Err(why) => why,
    };
    let all = slab.arena().stats().total;
    let small = all.min(SMALL);
    tracing::error!(
        rail = name, %why,
        "the slab of {} cannot be registered with this device: {} of its own are tried in its place, which keep little",
        format_size(all), format_size(small)
    );
    let own = Slab::start(name, small, Reading::Auto).map_err(|error| error.to_string())?;
    match register(own.arena()) {
        Ok(registered) => Ok((own, registered, true)),
        Err(again) => Err(format!(
            "{} of object bytes cannot be registered ({why}), nor {} ({again})",
            format_size(all),
            format_size(small)
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i11_a_device_that_refuses_the_slab_gets_a_small_one_and_one_that_refuses_both_is_an_error() {
        let slab = Slab::start("all", 16 << 20, Reading::Threads).unwrap();
        let upto = |limit: u64| {
            move |arena: &Arena| if arena.stats().total <= limit { Ok(()) } else { Err("too large".to_owned()) }
        };
        let (same, (), own) = registered("rail0", &slab, upto(16 << 20)).unwrap();
        assert!(Arc::ptr_eq(&same, &slab) && !own);
        let (small, (), own) = registered("rail0", &slab, upto(8 << 20)).unwrap();
        assert!(own && small.arena().stats().total == SMALL);
        let error = registered("rail0", &slab, upto(0)).err().unwrap();
        assert!(error.contains("16 MiB") && error.contains("4 MiB") && error.contains("too large"), "{error}");
    }
}
