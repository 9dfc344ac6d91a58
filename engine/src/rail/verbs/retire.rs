//! The end of a connection: its queue pairs go, and with them every right to memory.
//!
//! Guarantees: requests fail at once; then the pairs are moved to the error state, what was posted is waited for (bounded),
//! windows are freed, pairs destroyed. Only a pair that was destroyed with return code 0 gives its landings and sources back, and
//! without windows only when all of them were: there one key opens the memory to every pair. What does not come back stays in
//! quarantine, counted.

use super::group::Group;
use super::link::Item;
use super::link::{Remains, Told, fence};
use crate::rail::Event;
use crate::rail::tcp::signal::lock;
use crate::verbs::{Completion, WrKind};
use bytes::Bytes;
use railfs_proto::verbs::{FrameKind, Header};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long flushed work is waited for: the destroying proves the rest.
const DRAIN: Duration = Duration::from_millis(300);
/// How long the last message may take.
const FAREWELL: Duration = Duration::from_millis(100);

pub(super) fn retire(group: &Arc<Group>, why: &str) {
    if group.is_polite() {
        farewell(group, why);
    }
    let mut all: Vec<(usize, Remains)> = Vec::new();
    for (index, link) in group.links.iter().enumerate() {
        let mut told = Told::default();
        let now = group.parts.clock.now();
        let remains = lock(&link.state).end(why, now, &mut told);
        group.tell(index, told);
        all.push((index, remains));
    }
    let mut unfinished = 0;
    for (_, remains) in &mut all {
        unfinished += remains.unfinished;
        if let Some(pair) = &mut remains.pair
            && let Err(error) = pair.fail()
        {
            tracing::warn!(rail = %group.parts.name, %error, "a queue pair could not be moved to its error state");
        }
    }
    drain(group, unfinished);
    let mut gone = Vec::new();
    for (index, remains) in all {
        let Remains { pair, windows, landings, sources, offered, .. } = remains;
        for window in windows {
            if let Err(error) = window.free() {
                tracing::warn!(rail = %group.parts.name, %error, "a window could not be freed");
            }
        }
        let destroyed = match pair.map_or(Ok(()), |pair| pair.destroy()) {
            Ok(()) => true,
            Err(error) => {
                tracing::error!(rail = %group.parts.name, %error, "its memory stays in quarantine");
                false
            }
        };
        gone.push((index, destroyed, landings, sources, offered));
    }
    let all_gone = gone.iter().all(|(_, destroyed, ..)| *destroyed);
    for (index, destroyed, landings, sources, offered) in gone {
        let mut told = Told::default();
        if destroyed {
            drop(sources);
            // Opened by windows, each of this pair alone.
            drop(offered);
            let landings = if all_gone || group.parts.windows { landings } else { Vec::new() };
            for (id, extent) in landings {
                // Proved: every queue pair through which it could be written to is destroyed.
                let extent = fence(extent, &mut told);
                told.events.extend(extent.map(|extent| Event::Released { id, extent }));
            }
        } else {
            // The device may still read from them: as good as lost. Landings go the same way, by being dropped unfenced.
            sources.into_iter().for_each(std::mem::forget);
            offered.into_iter().for_each(std::mem::forget);
            drop(landings);
        }
        group.tell(index, told);
    }
}

/// Tells the other side, so that it need not find out; bounded, and no matter if it is not heard.
fn farewell(group: &Group, why: &str) {
    let Some(last) = group.links.len().checked_sub(1) else { return };
    let message = Bytes::copy_from_slice(why.as_bytes());
    group.send(last, Item::new(Header::plain(FrameKind::Bye, group.parts.session, 0), message));
    let until = Instant::now() + FAREWELL;
    let mut completions: Vec<Completion> = Vec::new();
    let wanted = |done: &Completion| usize::from(done.id.pair) == last && done.id.kind == WrKind::Send;
    let mut posted = group.links.get(last).map_or(0, |link| lock(&link.state).unfinished());
    while posted > 0 && Instant::now() < until {
        completions.clear();
        match group.parts.cq.poll(&mut completions) {
            Ok(0) => std::thread::yield_now(),
            Ok(_) => posted = posted.saturating_sub(completions.iter().filter(|done| wanted(done)).count()),
            Err(_) => return,
        }
    }
}

/// Waits for the flushed work, so that destroying finds nothing under way.
fn drain(group: &Group, mut unfinished: usize) {
    let until = Instant::now() + DRAIN;
    let mut completions: Vec<Completion> = Vec::new();
    while unfinished > 0 && Instant::now() < until {
        completions.clear();
        match group.parts.cq.poll(&mut completions) {
            Ok(0) => std::thread::yield_now(),
            Ok(_) => {
                let ours = |done: &&Completion| done.id.kind != WrKind::Receive;
                unfinished = unfinished.saturating_sub(completions.iter().filter(ours).count());
            }
            Err(error) => {
                tracing::warn!(rail = %group.parts.name, %error, "its completions cannot be read");
                return;
            }
        }
    }
}
