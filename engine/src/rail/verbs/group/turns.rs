//! The thread of a connection: it polls the completion queue, does what the clock calls for, and sleeps until either wants it.
//!
//! Guarantees:
//! * It ends with the first reason there is, and takes the connection down by [`retire`] whatever it
//!   ends of, a panic included.
//! * It goes to sleep only with the completion queue armed and polled once more, and no longer than until the next deadline.
//! * Completions of another generation are dropped and counted (I5).

use super::{Group, Link};
use crate::clock::Time;
use crate::rail::Cause;
use crate::rail::liveness::Action;
use crate::rail::tcp::signal::{lock, poll};
use crate::rail::totals::add;
use crate::rail::verbs::PIECE;
use crate::rail::verbs::link::{Item, Told, receive_place};
use crate::rail::verbs::looks;
use crate::rail::verbs::retire::retire;
use crate::verbs::{Completion, Status, WrId, WrKind};
use railfs_proto::verbs::FrameKind;
use rustix::event::{PollFd, PollFlags};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Group {
    /// The thread. `silent` is told when the other side falls silent and when it is back, `ready` when it is ready:
    /// once, when each queue pair has been used.
    pub(in crate::rail::verbs) fn run(self: &Arc<Self>, silent: &dyn Fn(bool), ready: &dyn Fn()) -> String {
        let _ = self.thread.set(std::thread::current().id());
        let turns = std::panic::AssertUnwindSafe(|| self.turns(silent, ready));
        let why = std::panic::catch_unwind(turns).unwrap_or_else(|_| {
            tracing::error!(rail = %self.parts.name, peer = %self.parts.peer, "the connection's thread panicked");
            "internal error".into()
        });
        let _ = self.end.set(why.clone());
        retire(self, &why);
        for event in self.deferred.end() {
            self.parts.events.event(event);
        }
        why
    }

    fn turns(self: &Arc<Self>, silent: &dyn Fn(bool), ready: &dyn Fn()) -> String {
        let mut completions: Vec<Completion> = Vec::with_capacity(64);
        let mut armed = false;
        let mut looked = Time(0);
        loop {
            let got = match self.parts.cq.poll(&mut completions) {
                Ok(got) => got,
                Err(error) => return error.to_string(),
            };
            for completion in completions.drain(..) {
                if let Err(why) = self.completed(&completion, silent, ready) {
                    // The first reason counts, and it may be another thread's.
                    return self.end.get().cloned().unwrap_or(why);
                }
            }
            let now = self.parts.clock.now();
            if got == 0 || now.since(looked) > Duration::from_millis(5) || self.signal.is_raised() {
                looked = now;
                self.signal.clear();
                if let Err(why) = self.duties(silent) {
                    return self.end.get().cloned().unwrap_or(why);
                }
                self.serve_waiting();
            }
            if got > 0 {
                continue;
            }
            if !armed {
                if let Err(error) = self.parts.cq.arm() {
                    return error.to_string();
                }
                // What was completed before makes no event: poll once more.
                armed = true;
                continue;
            }
            let sleep = self.sleep();
            let channel = self.parts.cq.channel();
            let mut fds = [PollFd::from_borrowed_fd(channel, PollFlags::IN), PollFd::new(&self.signal, PollFlags::IN)];
            if let Err(error) = poll(&mut fds, sleep) {
                return format!("poll failed: {error}");
            }
            if fds[0].revents().contains(PollFlags::IN) {
                armed = false;
            }
        }
    }

    /// What the clock, cancels and deferred events call for.
    fn duties(self: &Arc<Self>, silent: &dyn Fn(bool)) -> Result<(), String> {
        for event in self.deferred.take() {
            self.parts.events.event(event);
        }
        if let Some(why) = self.end.get() {
            return Err(why.clone());
        }
        let cancelled = std::mem::take(&mut *lock(&self.cancelled));
        for (index, link) in self.links.iter().enumerate() {
            let mut told = Told::default();
            let shared = self.shared(index);
            let mut sign = Vec::new();
            let result = {
                let mut state = lock(&link.state);
                state.held_back_until(shared.now);
                for id in &cancelled {
                    state.give_up(*id, Cause::Cancelled, &shared, &mut told);
                    if let Some(looks) = &mut state.looks {
                        looks.fail(*id, Cause::Cancelled, &mut told);
                    }
                }
                if let Some(looks) = &mut state.looks {
                    looks.expire(shared.now, &mut told);
                }
                while state.expire(&shared, &mut told) {}
                if state.pending.is_empty() {
                    state.pending.liveness.idle();
                }
                let mut retired = None;
                let limit = self.parts.limits.completion;
                if state.completion_due(limit) <= shared.now {
                    retired =
                        Some(format!("the device completed nothing of {} posts for {limit:?}", state.unfinished()));
                }
                while let Some(action) = state.pending.liveness.tick(shared.now) {
                    match action {
                        Action::Ping => {
                            state.pending.liveness.sent(shared.now);
                            self.count(|totals| add(&totals.pings, 1));
                            state.push_first(Item::plain(FrameKind::Ping, shared.session, shared.now.0));
                        }
                        Action::Retire => {
                            retired = Some(format!("no sign of life for {:?}", self.parts.limits.retire));
                            break;
                        }
                        action => sign.push(action),
                    }
                }
                match retired {
                    Some(why) => Err(why),
                    None => state.overdue(&shared).and_then(|()| state.flush(&shared, &mut told)),
                }
            };
            self.tell(index, told);
            for action in sign {
                self.set_silent(link, action == Action::Silent, silent);
            }
            result?;
        }
        Ok(())
    }

    fn set_silent(&self, link: &Link, is: bool, silent: &dyn Fn(bool)) {
        if link.silent.swap(is, Ordering::SeqCst) != is {
            silent(self.is_silent());
        }
    }

    /// Until when the thread may sleep; announced, so that a submitter knows whether to wake it.
    fn sleep(&self) -> Option<Duration> {
        let now = self.parts.clock.now();
        let mut until = now.after(self.parts.limits.suspect / 2);
        let mut states: Vec<_> = self.links.iter().map(|link| lock(&link.state)).collect();
        for state in &states {
            until = until.min(state.pending.next_deadline()).min(state.pending.liveness.next()).min(state.next());
            until = until.min(state.completion_due(self.parts.limits.completion));
        }
        for state in &mut states {
            state.pending.wake_at = until;
        }
        Some(until.since(now) + Duration::from_micros(50))
    }

    fn completed(
        self: &Arc<Self>,
        completion: &Completion,
        silent: &dyn Fn(bool),
        ready: &dyn Fn(),
    ) -> Result<(), String> {
        let WrId { kind, pair, slot, generation, .. } = completion.id;
        let index = usize::from(pair);
        let link = self.links.get(index).filter(|_| generation == self.parts.generation);
        let Some(link) = link else {
            self.count(|totals| add(&totals.stale, 1));
            return Ok(());
        };
        let done = match completion.result {
            Ok(done) => done,
            // The cause came before the flood.
            Err(Status::Flushed) => return Err("the queue pair has failed".into()),
            Err(status) => {
                let what = match kind {
                    WrKind::Receive => "a receive",
                    WrKind::Send => "a message",
                    WrKind::Write => "a WRITE",
                    WrKind::Bind => "binding a window",
                    WrKind::Invalidate => "taking a window away",
                    WrKind::Read if slot < looks::PLACES => "a READ of the server's slots",
                    WrKind::Read => "a READ of what was offered",
                    WrKind::Marker | WrKind::Unknown => "work",
                };
                return Err(format!("{what} failed: {status} (vendor code {:#x})", completion.vendor));
            }
        };
        let mut told = Told::default();
        let result = match kind {
            WrKind::Receive => {
                let used = lock(&link.state).posted.received(completion.id)?;
                let bytes = self.parts.buffers.take(receive_place(pair, slot), done.bytes as usize);
                let alive = {
                    let mut state = lock(&link.state);
                    let more = !state.pending.is_empty();
                    state.pending.liveness.heard(self.parts.clock.now(), more)
                };
                if alive == Some(Action::Alive) {
                    self.set_silent(link, false, silent);
                }
                self.repost(link, slot, used).and_then(|()| self.piece(index, &bytes, done.invalidated, &mut told))
            }
            WrKind::Send | WrKind::Invalidate | WrKind::Read => {
                lock(&link.state).done(completion.id, &self.shared(index), &mut told)
            }
            // Not signalled, unless it failed.
            WrKind::Write | WrKind::Bind => Ok(()),
            WrKind::Marker | WrKind::Unknown => Err("the device says a completion of work that nobody posted".into()),
        };
        // A server's end is told by a frame; at a client's a message that was acknowledged says that the way there is open.
        let is_ready = told.ready || (kind == WrKind::Send && self.parts.source.is_none());
        self.tell(index, told);
        if is_ready && !link.ready.swap(true, Ordering::SeqCst) && self.is_ready() {
            ready();
        }
        result
    }

    /// Posts a receive again; its bytes were taken out.
    fn repost(&self, link: &Link, slot: u16, used: u16) -> Result<(), String> {
        let place = receive_place(link.index, slot);
        let kind = WrKind::Receive;
        let id = WrId { kind, pair: link.index, slot, used, generation: self.parts.generation };
        let into = self.parts.buffers.mr().slice(place as u64, PIECE).ok_or("a receive has no room")?;
        let mut state = lock(&link.state);
        let Some(pair) = &mut state.pair else { return Err("the queue pair is gone".into()) };
        pair.received();
        pair.receive(id, into).map_err(|error| error.to_string())?;
        state.credit.post();
        Ok(())
    }
}
