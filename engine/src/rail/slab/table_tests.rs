//! A model of whoever uses the table, driven by a seed: memory is counted by the tokens that are alive.

use super::*;
use proptest::prelude::*;
use std::cell::Cell;
use std::rc::Rc;

const LIMIT: u64 = 64 << 10;

/// Memory that counts itself.
struct Memory {
    size: u32,
    in_use: Rc<Cell<u64>>,
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.in_use.set(self.in_use.get() - u64::from(self.size));
    }
}

fn identity(number: u8) -> Identity {
    Identity([number; 32])
}

/// Bytes, known by what they are.
#[derive(Clone)]
struct Content(Rc<(Memory, Want)>);

struct Model {
    table: Table<Content, (u64, Want)>,
    in_use: Rc<Cell<u64>>,
    /// Reads under way.
    reading: Vec<(u64, Memory, (u64, Want))>,
    /// Tickets that somebody uses, with what they were given.
    using: Vec<(u64, Content)>,
    asked: u64,
    /// In the order they were served or joined.
    answered: Vec<u64>,
    waiting: Vec<u64>,
}

impl Model {
    fn new() -> Model {
        Model {
            table: Table::default(),
            in_use: Rc::default(),
            reading: Vec::new(),
            using: Vec::new(),
            asked: 0,
            answered: Vec::new(),
            waiting: Vec::new(),
        }
    }

    fn ask(&mut self, want: Want) {
        self.asked += 1;
        if let Some((ticket, bytes, skip)) = self.table.hit(&want) {
            self.serve(ticket, bytes, skip, want);
            return;
        }
        self.waiting.push(self.asked);
        self.table.push(want, (self.asked, want));
        self.pump();
    }

    fn serve(&mut self, ticket: u64, bytes: Content, skip: u32, want: Want) {
        let held = bytes.0.1;
        assert_eq!(held.identity, want.identity, "served under another name");
        assert_eq!(held.offset + u64::from(skip), want.offset);
        assert!(skip + want.length <= held.length);
        self.using.push((ticket, bytes));
    }

    fn pump(&mut self) {
        let in_use = self.in_use.clone();
        let mut allocate = |size: u32| {
            (in_use.get() + u64::from(size) <= LIMIT).then(|| {
                in_use.set(in_use.get() + u64::from(size));
                Memory { size, in_use: in_use.clone() }
            })
        };
        while let Some(step) = self.table.next(&mut allocate) {
            match step {
                Step::Read { ticket, memory, waiter } => {
                    self.waiting.retain(|id| *id != waiter.0);
                    self.reading.push((ticket, memory, waiter));
                }
                Step::Serve { ticket, bytes, skip, waiter } => {
                    self.waiting.retain(|id| *id != waiter.0);
                    self.answered.push(waiter.0);
                    self.serve(ticket, bytes, skip, waiter.1);
                }
            }
        }
    }

    fn finish(&mut self, pick: usize, good: bool) {
        if self.reading.is_empty() {
            return;
        }
        let (ticket, memory, (id, want)) = self.reading.swap_remove(pick % self.reading.len());
        let bytes = Content(Rc::new((memory, want)));
        self.answered.push(id);
        let joined = self.table.done(ticket, bytes.clone(), good);
        self.using.push((ticket, bytes.clone()));
        for (skip, (id, want)) in joined {
            self.waiting.retain(|waiting| *waiting != id);
            self.answered.push(id);
            self.serve(ticket, bytes.clone(), skip, want);
        }
        drop(bytes);
        self.pump();
    }

    fn release(&mut self, pick: usize) {
        if self.using.is_empty() {
            return;
        }
        let (ticket, bytes) = self.using.swap_remove(pick % self.using.len());
        drop(bytes);
        self.table.release(ticket);
        self.pump();
    }

    fn check(&self) {
        assert_eq!(self.in_use.get(), self.table.used(), "the budget is exact");
        assert!(self.in_use.get() <= LIMIT);
        for (_, bytes) in &self.using {
            // The token is alive as long as it is used, so its memory is counted; the table has a second hand on it.
            assert!(Rc::strong_count(&bytes.0) >= 2, "a piece that is in use was dropped");
        }
    }
}

fn run(script: &[(u8, u8, u8)]) {
    let mut model = Model::new();
    for (what, one, two) in script {
        let (pick, page) = (usize::from(*one), 4096u64);
        match what % 8 {
            0..=2 => {
                let length = [4096, 8192, 16384, 5000][usize::from(two % 4)];
                let identity = (two % 16 != 15).then(|| identity(one % 3));
                model.ask(Want { identity, offset: u64::from(two / 4 % 4) * page, length });
            }
            3 | 4 => model.finish(pick, two % 5 != 0),
            5 | 6 => model.release(pick),
            _ => model.table.forget(&Want {
                identity: Some(identity(one % 3)),
                offset: u64::from(two % 4) * page,
                length: 4096,
            }),
        }
        model.check();
    }
    // When everything has come back, everybody was answered, and all memory is idle or free.
    while !model.reading.is_empty() || !model.using.is_empty() {
        model.finish(0, true);
        model.release(0);
        model.check();
    }
    assert!(model.waiting.is_empty() && !model.table.has_line(), "{} are left waiting", model.waiting.len());
    let counts = model.table.counts();
    assert_eq!(counts.hits + counts.misses + counts.joins, model.asked);
}

proptest! {
    #[test]
    fn i4_i6_the_slab_drops_nothing_that_is_used_and_takes_no_more_than_there_is(
        script in proptest::collection::vec((any::<u8>(), any::<u8>(), any::<u8>()), 0..400)
    ) {
        run(&script);
    }
}

fn want(number: u8, offset: u64, length: u32) -> Want {
    Want { identity: Some(identity(number)), offset, length }
}

#[test]
fn a_second_request_joins_the_read_and_a_third_hits() {
    let mut model = Model::new();
    model.ask(want(1, 0, 16384));
    model.ask(want(1, 0, 16384));
    model.ask(want(1, 4096, 4096));
    assert_eq!(model.reading.len(), 1);
    model.finish(0, true);
    assert_eq!(model.answered, [1, 2, 3]);
    model.ask(want(1, 8192, 8192));
    let Counts { hits, misses, joins, .. } = model.table.counts();
    assert_eq!((hits, misses, joins), (1, 1, 2));
    // Of another name it is another piece.
    model.ask(want(2, 0, 16384));
    assert_eq!(model.reading.len(), 1);
}

#[test]
fn i2_what_was_read_badly_is_served_to_nobody_who_comes_later() {
    let mut model = Model::new();
    model.ask(want(1, 0, 4096));
    model.ask(want(1, 0, 4096));
    model.finish(0, false);
    model.ask(want(1, 0, 4096));
    assert_eq!(model.reading.len(), 1, "it is read again");
    model.finish(0, true);
    model.table.forget(&want(1, 0, 4096));
    model.ask(want(1, 0, 4096));
    assert_eq!(model.reading.len(), 1, "what was forgotten is read again");
}

#[test]
fn i6_nobody_overtakes_who_waits_for_memory() {
    let mut model = Model::new();
    for number in 0..4 {
        model.ask(want(number, 0, 16384));
    }
    while !model.reading.is_empty() {
        model.finish(0, true);
    }
    // All memory is in use; the fifth waits, and the one who could hit stands behind it.
    model.ask(want(4, 0, 16384));
    model.ask(want(0, 0, 16384));
    assert_eq!(model.waiting, [5, 6]);
    assert_eq!(model.table.counts().waited, 1);
    model.release(0);
    assert_eq!(model.reading.len(), 1, "the fifth took the first that was given back");
}

#[test]
fn i10_reads_of_a_source_that_hangs_leave_room_for_those_of_others() {
    let of = |source: u8, object: u8| {
        let mut name = [object; 32];
        name[16..].fill(source);
        Want { identity: Some(Identity(name)), offset: 0, length: 4096 }
    };
    let mut table: Table<u8, u8> = Table::new(2);
    for object in 0..4 {
        table.push(of(1, object), object);
    }
    let read = |table: &mut Table<u8, u8>| match table.next(|_| Some(())) {
        Some(Step::Read { ticket, waiter, .. }) => Some((ticket, waiter)),
        Some(Step::Serve { .. }) => panic!("nothing is there"),
        None => None,
    };
    let first = read(&mut table).unwrap();
    assert_eq!((first.1, read(&mut table).unwrap().1), (0, 1));
    assert!(read(&mut table).is_none(), "it has its share");
    // Of another source, behind two that wait; and one that could join, who keeps his place behind them: those of one source
    // may be answered to one who holds what he has until all before it is there.
    table.push(of(2, 9), 9);
    table.push(of(1, 0), 10);
    assert_eq!(read(&mut table).unwrap().1, 9);
    assert!(read(&mut table).is_none());
    assert_eq!(table.done(first.0, 0, true), []);
    let third = read(&mut table).unwrap();
    assert_eq!(third.1, 2);
    assert!(read(&mut table).is_none());
    assert_eq!(table.done(third.0, 2, true), []);
    assert_eq!(read(&mut table).unwrap().1, 3);
    assert!(matches!(table.next(|_| Some(())), Some(Step::Serve { waiter: 10, bytes: 0, .. })));
    assert!(read(&mut table).is_none());
}
