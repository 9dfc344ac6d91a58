//! Fetch, failover and quarantine: two reads over two rails into three extents, with WRITEs that land late, replies that are
//! late or come twice, time-outs, queue pairs that die, and their successors.
//!
//! Properties: I1 (a read is given all its bytes, of its own attempt), I4 (no WRITE lands in memory that is used for something
//! else, and memory is never without an owner), I5 (no reply of a dead connection is taken).

use stateright::{Model, Property};

const RAILS: usize = 2;
const READS: usize = 2;
const EXTENTS: usize = 3;
/// Attempts of each read.
const TRIES: [u8; READS] = [2, 1];
/// Connections of each rail, one after another.
const CONNECTIONS: u8 = 2;

/// What is wrong with a variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// Nothing.
    Nothing,
    /// Memory is given back at the time-out.
    FreedAtTimeout,
    /// Memory is given back when the connection is dead, before its queue pair is destroyed.
    FreedAtDeath,
    /// A reply of a dead connection is taken.
    TakesStale,
    /// The second of two replies gives the memory back once more.
    FreesTwice,
    /// A rail that dies takes its reads with it.
    LosesReads,
}

/// The model.
#[derive(Clone, Copy, Debug)]
pub struct Fetch {
    /// Its variant.
    pub broken: Broken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Owner {
    Free,
    /// A peer may write to it, for this attempt.
    Exposed(u8),
    /// The same, and nobody waits for it any more.
    Quarantine(u8),
    /// Fenced: the bytes of a read.
    Landed(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Extent {
    owner: Owner,
    /// Whose bytes are in it.
    bytes: Option<u8>,
}

/// What is on its way for an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Attempt {
    read: u8,
    rail: u8,
    connection: u8,
    extent: u8,
    /// Its WRITE has not landed.
    write: bool,
    /// Replies that have not arrived.
    replies: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Read {
    Waits,
    Flies(u8),
    /// Answered, with its memory still held.
    Answered(u8),
    Done,
    Failed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Rail {
    connection: u8,
    /// Dead, and its queue pair not destroyed yet: what was posted may still land.
    dying: bool,
}

/// A state.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    extents: [Extent; EXTENTS],
    attempts: Vec<Attempt>,
    reads: [Read; READS],
    tries: [u8; READS],
    rails: [Rail; RAILS],
    fault: Option<Fault>,
    late: bool,
}

/// What was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Fault {
    /// A read was given other bytes than its own.
    Bytes,
    /// A WRITE landed in memory of somebody else.
    Landed,
    /// Memory was given back that was free or somebody else's.
    Twice,
    /// A reply of a dead connection was taken.
    Stale,
    /// A read ended that another rail could have served.
    Lost,
}

/// A step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// A read is sent by a rail.
    Send(usize, usize),
    /// The WRITE of an attempt lands.
    Land(u8),
    /// A reply arrives.
    Reply(u8),
    /// It comes twice.
    Double(u8),
    /// It is given up.
    TimeOut(u8),
    /// A connection dies.
    Die(usize),
    /// Its queue pair is destroyed, and the next one is there.
    Destroy(usize),
    /// A read that was answered lets its memory go.
    Release(usize),
}

impl Fetch {
    fn give(state: &mut State, extent: u8, expect: Owner) {
        let extent = &mut state.extents[usize::from(extent)];
        if extent.owner != expect {
            state.fault.get_or_insert(Fault::Twice);
        }
        extent.owner = Owner::Free;
    }

    /// An attempt that was in flight is over: its memory waits for its fence.
    fn give_up(self, state: &mut State, number: u8) {
        let attempt = state.attempts[usize::from(number)];
        let extent = &mut state.extents[usize::from(attempt.extent)];
        if extent.owner == Owner::Exposed(number) {
            extent.owner = Owner::Quarantine(number);
        }
        let read = usize::from(attempt.read);
        if state.reads[read] == Read::Flies(number) {
            state.reads[read] = if state.tries[read] > 0 { Read::Waits } else { Read::Failed };
        }
    }

    fn reply(self, state: &mut State, number: u8) {
        let attempt = state.attempts[usize::from(number)];
        let rail = state.rails[usize::from(attempt.rail)];
        let alive = rail.connection == attempt.connection && !rail.dying;
        state.attempts[usize::from(number)].replies -= 1;
        if !alive && self.broken != Broken::TakesStale {
            return;
        }
        let read = usize::from(attempt.read);
        // Matched by the number of the attempt; the broken one by that of the read.
        let waits = match (self.broken, state.reads[read]) {
            (Broken::TakesStale, Read::Flies(of)) => Some(of),
            (_, Read::Flies(of)) if of == number => Some(of),
            _ => None,
        };
        let Some(of) = waits else {
            match state.extents[usize::from(attempt.extent)].owner {
                // Late: it proves that nothing is written there any more.
                Owner::Quarantine(owner) if owner == number => {
                    Self::give(state, attempt.extent, Owner::Quarantine(number));
                }
                _ if self.broken == Broken::FreesTwice => {
                    Self::give(state, attempt.extent, Owner::Quarantine(number));
                }
                _ => {}
            }
            return;
        };
        if !alive {
            state.fault.get_or_insert(Fault::Stale);
        }
        let extent = state.attempts[usize::from(of)].extent;
        let there = &mut state.extents[usize::from(extent)];
        if there.bytes != Some(of) {
            state.fault.get_or_insert(Fault::Bytes);
        }
        there.owner = Owner::Landed(attempt.read);
        state.reads[read] = Read::Answered(extent);
    }
}

impl Model for Fetch {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            extents: [Extent { owner: Owner::Free, bytes: None }; EXTENTS],
            attempts: Vec::new(),
            reads: [Read::Waits; READS],
            tries: TRIES,
            rails: [Rail { connection: 0, dying: false }; RAILS],
            fault: None,
            late: false,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for (read, at) in state.reads.iter().enumerate() {
            match at {
                Read::Waits => actions.extend((0..RAILS).map(|rail| Action::Send(read, rail))),
                Read::Answered(_) => actions.push(Action::Release(read)),
                _ => {}
            }
        }
        for (number, attempt) in (0u8..).zip(&state.attempts) {
            if attempt.write {
                actions.push(Action::Land(number));
            } else if attempt.replies > 0 {
                actions.push(Action::Reply(number));
                if attempt.replies == 1 {
                    actions.push(Action::Double(number));
                }
            }
            if state.reads[usize::from(attempt.read)] == Read::Flies(number) {
                actions.push(Action::TimeOut(number));
            }
        }
        for (number, rail) in state.rails.iter().enumerate() {
            if rail.dying {
                actions.push(Action::Destroy(number));
            } else if rail.connection < CONNECTIONS - 1 {
                actions.push(Action::Die(number));
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Send(read, rail) => {
                let extent = last.extents.iter().position(|extent| extent.owner == Owner::Free)?;
                if last.tries[read] == 0 || last.rails[rail].dying {
                    return None;
                }
                let number = u8::try_from(last.attempts.len()).ok()?;
                state.tries[read] -= 1;
                state.extents[extent] = Extent { owner: Owner::Exposed(number), bytes: None };
                state.reads[read] = Read::Flies(number);
                state.attempts.push(Attempt {
                    read: u8::try_from(read).ok()?,
                    rail: u8::try_from(rail).ok()?,
                    connection: last.rails[rail].connection,
                    extent: u8::try_from(extent).ok()?,
                    write: true,
                    replies: 1,
                });
            }
            Action::Land(number) => {
                let attempt = last.attempts[usize::from(number)];
                state.attempts[usize::from(number)].write = false;
                // A queue pair that was destroyed brings nothing any more.
                if last.rails[usize::from(attempt.rail)].connection == attempt.connection {
                    let extent = &mut state.extents[usize::from(attempt.extent)];
                    match extent.owner {
                        Owner::Exposed(of) if of == number => extent.bytes = Some(number),
                        Owner::Quarantine(of) if of == number => state.late = true,
                        _ => {
                            extent.bytes = Some(number);
                            state.fault.get_or_insert(Fault::Landed);
                        }
                    }
                } else {
                    // Nor its replies, but for one that was there before.
                    state.attempts[usize::from(number)].replies = 0;
                }
            }
            Action::Reply(number) => self.reply(&mut state, number),
            Action::Double(number) => state.attempts[usize::from(number)].replies = 2,
            Action::TimeOut(number) => {
                self.give_up(&mut state, number);
                if self.broken == Broken::FreedAtTimeout {
                    let extent = last.attempts[usize::from(number)].extent;
                    Self::give(&mut state, extent, Owner::Quarantine(number));
                }
            }
            Action::Die(rail) => {
                state.rails[rail].dying = true;
                let on_it = |attempt: &Attempt| usize::from(attempt.rail) == rail;
                for number in 0..u8::try_from(last.attempts.len()).ok()? {
                    let attempt = last.attempts[usize::from(number)];
                    if !on_it(&attempt) || attempt.connection != last.rails[rail].connection {
                        continue;
                    }
                    let flies = last.reads[usize::from(attempt.read)] == Read::Flies(number);
                    self.give_up(&mut state, number);
                    if flies && self.broken == Broken::LosesReads {
                        state.reads[usize::from(attempt.read)] = Read::Failed;
                        if state.tries[usize::from(attempt.read)] > 0 {
                            state.fault.get_or_insert(Fault::Lost);
                        }
                    }
                    if flies && self.broken == Broken::FreedAtDeath {
                        Self::give(&mut state, attempt.extent, Owner::Quarantine(number));
                    }
                }
            }
            Action::Destroy(rail) => {
                let connection = last.rails[rail].connection;
                state.rails[rail] = Rail { connection: connection + 1, dying: false };
                // The fence: whatever was posted on it is over.
                for (number, attempt) in (0u8..).zip(&last.attempts) {
                    let ours = usize::from(attempt.rail) == rail && attempt.connection == connection;
                    let owner = last.extents[usize::from(attempt.extent)].owner;
                    if ours && owner == Owner::Quarantine(number) {
                        Self::give(&mut state, attempt.extent, owner);
                    }
                }
            }
            Action::Release(read) => {
                let Read::Answered(extent) = last.reads[read] else { return None };
                Self::give(&mut state, extent, Owner::Landed(u8::try_from(read).ok()?));
                state.reads[read] = Read::Done;
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let whole = |_: &Self, state: &State| {
            // Bytes that were given to a read stay what they were until it lets them go.
            state.reads.iter().zip(0u8..).all(|(read, number)| match read {
                Read::Answered(extent) => {
                    let extent = state.extents[usize::from(*extent)];
                    let of = extent.bytes.and_then(|attempt| state.attempts.get(usize::from(attempt)));
                    extent.owner == Owner::Landed(number) && of.is_some_and(|attempt| attempt.read == number)
                }
                _ => true,
            })
        };
        vec![
            Property::always("I1: a read has its own bytes, as long as it has them", whole),
            Property::always("I1: a read is answered with what has landed for it", |_, state: &State| {
                state.fault != Some(Fault::Bytes)
            }),
            Property::always("I4: no WRITE lands in memory of somebody else", |_, state: &State| {
                state.fault != Some(Fault::Landed)
            }),
            Property::always("I4: memory has one owner, and is given back once", |_, state: &State| {
                state.fault != Some(Fault::Twice)
            }),
            Property::always("I5: no reply of a dead connection is taken", |_, state: &State| {
                state.fault != Some(Fault::Stale)
            }),
            Property::always("I10: a rail that dies loses no read", |_, state: &State| {
                state.fault != Some(Fault::Lost)
            }),
            Property::sometimes("both reads are answered", |_, state: &State| state.reads == [Read::Done; READS]),
            Property::sometimes("a WRITE lands late", |_, state: &State| state.late),
            Property::sometimes("all memory is free again after a late WRITE", |_, state: &State| {
                state.late && state.extents.iter().all(|extent| extent.owner == Owner::Free)
            }),
        ]
    }
}
