//! Publish, check and lease: one name, two puts, two clients with two reads each, a server, and its successor after it died
//! with a card that still answers.
//!
//! Properties: I3 (no read that arrived after a version was acknowledged, or seen by anybody, is given an older one), I8 (what
//! was acknowledged is durable). Time is counted in ticks: a lease lasts one (`TERM`), a successor waits for two (`DELAY`).

use stateright::{Model, Property};

/// How long a lease lasts.
const TERM: u8 = 1;
/// For how long a successor publishes nothing.
const DELAY: u8 = 2;
/// The clock stops here.
const END: u8 = 3;
/// Clients.
const CLIENTS: usize = 2;
/// Reads of each client.
const READS: u8 = 2;
/// Puts.
const PUTS: u8 = 2;

/// What is wrong with a variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// Nothing.
    Nothing,
    /// A read joins a check that was posted before it arrived.
    JoinsPosted,
    /// A lookup reads the catalog and takes a word for it afterwards.
    WordAfterCatalog,
    /// A word that was READ counts without the lease.
    NoLease,
    /// A successor publishes at once.
    NoDelay,
    /// The lease runs from when the answer came.
    LeaseOfAnswer,
    /// A put is acknowledged before it is durable.
    AcknowledgesEarly,
}

/// The model.
#[derive(Clone, Copy, Debug)]
pub struct Publish {
    /// Its variant.
    pub broken: Broken,
}

/// The word of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Word {
    busy: bool,
    counter: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Life {
    /// Not begun yet.
    Before,
    Runs,
    /// Its software is dead, its card answers.
    Card,
}

/// How far the publish that is under way has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stage {
    None,
    /// In progress, not durable.
    Begun,
    /// Durable, the word has not moved.
    Durable,
    /// (Broken only:) acknowledged, not durable.
    Acknowledged,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Object {
    version: u8,
    run: u8,
    counter: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Read {
    No,
    /// With the newest version that anybody had seen when it arrived.
    Waits(u8),
    /// The check under way is its own.
    Covered(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Check {
    by_card: bool,
    run: u8,
    word: Option<Word>,
}

/// A lookup under way: what was read first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Lookup {
    run: u8,
    version: u8,
    word: Word,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Client {
    session: u8,
    object: Option<Object>,
    lookup: Option<Lookup>,
    check: Option<Check>,
    reads: [Read; 2],
    left: u8,
    /// The lease holds before this tick.
    lease: u8,
    /// When a renewal was sent, and whether the server has answered.
    renewal: Option<(u8, bool)>,
    renewed: bool,
}

/// A state.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    now: u8,
    lives: [Life; 2],
    words: [Word; 2],
    stage: Stage,
    /// What is durable.
    version: u8,
    puts: u8,
    publish_from: u8,
    clients: [Client; CLIENTS],
    /// The newest version that was acknowledged or given to anybody.
    seen: u8,
    /// The newest one that was acknowledged.
    acknowledged: u8,
    stale: bool,
}

/// A step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Time passes.
    Tick,
    /// The next step of a publish.
    Step,
    /// The server dies, its card does not.
    Die,
    /// Its successor starts.
    Succeed,
    /// A client hears of it.
    Hear(usize),
    /// A lookup reads for the first time, and for the second.
    LookUp(usize),
    /// See there.
    Found(usize),
    /// A read arrives.
    Arrive(usize),
    /// A check is posted for all that wait: by card or by frame.
    Post(usize, bool),
    /// The word is read.
    Sample(usize),
    /// The answer is here.
    Answer(usize),
    /// A renewal is sent, answered, and here.
    Renew(usize),
    /// See there.
    Renewed(usize),
}

impl Publish {
    fn runs(state: &State) -> Option<usize> {
        state.lives.iter().position(|life| *life == Life::Runs)
    }

    fn step(self, state: &mut State, run: usize) -> Option<()> {
        let early = self.broken == Broken::AcknowledgesEarly;
        state.stage = match state.stage {
            Stage::None => {
                if state.puts == 0 || state.now < state.publish_from {
                    return None;
                }
                state.puts -= 1;
                state.words[run].busy = true;
                Stage::Begun
            }
            Stage::Begun if early => {
                state.words[run] = Word { busy: false, counter: state.words[run].counter + 1 };
                state.acknowledged = state.version + 1;
                state.seen = state.seen.max(state.acknowledged);
                Stage::Acknowledged
            }
            Stage::Begun => {
                state.version += 1;
                Stage::Durable
            }
            Stage::Durable => {
                state.words[run] = Word { busy: false, counter: state.words[run].counter + 1 };
                state.acknowledged = state.version;
                state.seen = state.seen.max(state.version);
                Stage::None
            }
            Stage::Acknowledged => {
                state.version += 1;
                Stage::None
            }
        };
        Some(())
    }

    fn found(self, state: &mut State, client: usize) -> Option<()> {
        let Lookup { run, version, word } = state.clients[client].lookup.take()?;
        let now = state.words[usize::from(run)];
        if state.lives[usize::from(run)] != Life::Runs {
            return Some(());
        }
        let (good, counter) = match self.broken {
            Broken::WordAfterCatalog => (!now.busy, now.counter),
            _ => (!now.busy && now == word, word.counter),
        };
        if good {
            state.clients[client].object = Some(Object { version, run, counter });
            state.seen = state.seen.max(version);
        }
        Some(())
    }

    fn sample(state: &mut State, client: usize) -> Option<()> {
        let check = state.clients[client].check.as_mut()?;
        let run = usize::from(check.run);
        let word = state.words[run];
        match state.lives[run] {
            Life::Before => return None,
            Life::Card if !check.by_card => return None,
            // Software holds the answer while the name is published.
            Life::Runs if !check.by_card && word.busy => return None,
            _ => check.word = Some(word),
        }
        Some(())
    }

    /// What the check that has sampled its word is about to pass, and whether by the card of a dead server.
    fn passing(state: &State) -> impl Iterator<Item = (Object, bool)> + '_ {
        state.clients.iter().filter_map(|client| {
            let (check, object) = (client.check?, client.object?);
            let word = check.word?;
            let covers = client.reads.iter().any(|read| matches!(read, Read::Covered(_)));
            let held = !check.by_card || state.now < client.lease;
            let passes = covers && held && object.run == check.run && object.counter == word.counter && !word.busy;
            let dead = check.by_card && state.lives[usize::from(check.run)] == Life::Card;
            (passes && client.session == check.run).then_some((object, dead))
        })
    }

    fn answer(self, state: &mut State, client: usize) -> Option<()> {
        let now = state.now;
        let Check { by_card, run, word } = state.clients[client].check?;
        let word = word?;
        let me = &mut state.clients[client];
        me.check = None;
        let held = self.broken == Broken::NoLease || now < me.lease;
        let open = me.session != run || by_card && !held || word.busy;
        let object = me.object.filter(|object| object.run == run);
        for at in 0..2 {
            let Read::Covered(floor) = state.clients[client].reads[at] else { continue };
            let read = match object {
                _ if open => Read::Waits(floor),
                Some(object) if object.counter == word.counter => {
                    state.stale |= object.version < floor;
                    state.seen = state.seen.max(object.version);
                    Read::No
                }
                // Something was published: ESTALE, and another lookup.
                _ => {
                    state.clients[client].object = None;
                    Read::No
                }
            };
            state.clients[client].reads[at] = read;
        }
        // Which of two reads is which does not matter.
        state.clients[client].reads.sort_unstable();
        Some(())
    }
}

impl Model for Publish {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let client = Client {
            session: 0,
            object: Some(Object { version: 0, run: 0, counter: 0 }),
            lookup: None,
            check: None,
            reads: [Read::No; 2],
            left: READS,
            lease: TERM,
            renewal: None,
            renewed: false,
        };
        // The other client only looks names up and reads once: what it sees nobody may be denied later.
        let other = Client { left: 1, renewed: true, ..client };
        vec![State {
            now: 0,
            lives: [Life::Runs, Life::Before],
            words: [Word::default(); 2],
            stage: Stage::None,
            version: 0,
            puts: PUTS,
            publish_from: 0,
            clients: [client, other],
            seen: 0,
            acknowledged: 0,
            stale: false,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.now < END {
            actions.push(Action::Tick);
        }
        if Self::runs(state).is_some() {
            actions.push(Action::Step);
        }
        match state.lives {
            [Life::Runs, _] => actions.push(Action::Die),
            [Life::Card, Life::Before] => actions.push(Action::Succeed),
            _ => {}
        }
        for (number, client) in state.clients.iter().enumerate() {
            if client.session == 0 && state.lives[1] == Life::Runs {
                actions.push(Action::Hear(number));
            }
            match (client.lookup, client.object) {
                (Some(_), _) => actions.push(Action::Found(number)),
                (None, None) => actions.push(Action::LookUp(number)),
                _ => {}
            }
            if client.left > 0 && client.object.is_some() && client.reads.contains(&Read::No) {
                actions.push(Action::Arrive(number));
            }
            match client.check {
                None if client.reads.iter().any(|read| matches!(read, Read::Waits(_))) && client.object.is_some() => {
                    // One client asks by card. Of the other one only what it has seen matters: it asks by frame, and is
                    // answered at once, as are its lookups.
                    actions.push(Action::Post(number, number == 0));
                }
                Some(Check { word: None, .. }) => actions.push(Action::Sample(number)),
                Some(_) => actions.push(Action::Answer(number)),
                None => {}
            }
            match client.renewal {
                None if !client.renewed => actions.push(Action::Renew(number)),
                Some(_) => actions.push(Action::Renewed(number)),
                None => {}
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        let runs = Self::runs(last);
        match action {
            Action::Tick => state.now += 1,
            Action::Step => self.step(&mut state, runs?)?,
            Action::Die => state.lives[0] = Life::Card,
            Action::Succeed => {
                state.lives[1] = Life::Runs;
                let delay = if self.broken == Broken::NoDelay { 0 } else { DELAY };
                state.publish_from = state.now + delay;
                // Recovery: what is durable is so, what is not never was; its put is tried again.
                if matches!(state.stage, Stage::Begun | Stage::Acknowledged) {
                    state.puts += 1;
                }
                state.stage = Stage::None;
            }
            Action::Hear(client) => {
                let me = &mut state.clients[client];
                *me = Client { session: 1, object: None, lookup: None, lease: 0, renewal: None, ..*me };
            }
            Action::LookUp(client) => {
                let run = runs.filter(|run| *run == usize::from(last.clients[client].session))?;
                let word = last.words[run];
                if word.busy && self.broken != Broken::WordAfterCatalog {
                    return None;
                }
                let run = u8::try_from(run).ok()?;
                state.clients[client].lookup = Some(Lookup { run, version: last.version, word });
                if client > 0 {
                    self.found(&mut state, client)?;
                }
            }
            Action::Found(client) => self.found(&mut state, client)?,
            Action::Arrive(client) => {
                let floor = last.seen;
                let joins = self.broken == Broken::JoinsPosted && last.clients[client].check.is_some();
                let me = &mut state.clients[client];
                me.left -= 1;
                let free = me.reads.iter_mut().find(|read| **read == Read::No)?;
                *free = if joins { Read::Covered(floor) } else { Read::Waits(floor) };
                me.reads.sort_unstable();
            }
            Action::Post(client, by_card) => {
                let me = &mut state.clients[client];
                let run = me.object.map(|object| object.run)?;
                if run != me.session {
                    return None;
                }
                me.check = Some(Check { by_card, run, word: None });
                for read in &mut me.reads {
                    if let Read::Waits(floor) = *read {
                        *read = Read::Covered(floor);
                    }
                }
                me.reads.sort_unstable();
                if client > 0 {
                    Self::sample(&mut state, client)?;
                    self.answer(&mut state, client)?;
                }
            }
            Action::Sample(client) => Self::sample(&mut state, client)?,
            Action::Answer(client) => self.answer(&mut state, client)?,
            Action::Renew(client) => {
                let me = &mut state.clients[client];
                me.renewed = true;
                me.renewal = Some((last.now, false));
            }
            Action::Renewed(client) => {
                let session = usize::from(last.clients[client].session);
                let me = &mut state.clients[client];
                let (sent, answered) = me.renewal?;
                if !answered {
                    if last.lives[session] != Life::Runs {
                        return None;
                    }
                    me.renewal = Some((sent, true));
                } else {
                    let from = if self.broken == Broken::LeaseOfAnswer { last.now } else { sent };
                    me.lease = me.lease.max(from + TERM);
                    me.renewal = None;
                }
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("I3: nobody is given an older version than was seen before", |_, state: &State| {
                !state.stale
            }),
            Property::always("I8: what was acknowledged is durable, whoever starts next", |_, state: &State| {
                state.acknowledged <= state.version || state.lives[1] == Life::Before
            }),
            Property::sometimes("a read gets what was put", |_, state: &State| {
                Self::passing(state).any(|(object, _)| object.version > 0)
            }),
            Property::sometimes("the card of a dead server is believed", |_, state: &State| {
                Self::passing(state).any(|(_, dead)| dead)
            }),
            Property::sometimes("the successor publishes", |_, state: &State| state.words[1].counter > 0),
        ]
    }
}
