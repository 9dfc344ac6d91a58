//! What is drawn: requests, publishes, and each kind of fault with its end.
//!
//! Guarantees: every fault ends by itself or with [`Stand::heal`]; a server that is dead or sleeps publishes and answers nothing;
//! a run that follows one that did not stop publishes nothing before a lease and a quarter, and a second.

use super::kinds::Kind;
use super::server::{NAMES, PAGE, Run};
use super::stand::{HANDLES, Stand};
use crate::clock::Time;
use crate::rail::sim::{Forged, Side, SimConfig};
use crate::rail::{Bulk, Event, Lane, Rail, Replier, State};
use crate::read::core::Freshness;
use bytes::Bytes;
use railfs_proto::limits::LEASE;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A spell of one rail.
#[derive(Clone, Copy, Debug)]
pub(super) enum Spell {
    Delay,
    Loss,
    Cut,
    Port,
}

/// What comes later by itself.
enum Later {
    PublishEnds {
        incarnation: u64,
        name: u64,
        done: bool,
    },
    Answer(Box<dyn Replier>, Bulk, Bytes),
    SpellEnds(usize, Spell),
    Wake(u64),
    /// The client hears which run there is.
    Hear,
    /// A rail to a run that is no more is closed.
    Retire(usize),
}

/// By time, then in the order of asking.
#[derive(Default)]
pub(super) struct Agenda {
    entries: BTreeMap<(Time, u64), Later>,
    number: u64,
}

impl Agenda {
    fn add(&mut self, at: Time, what: Later) {
        self.number += 1;
        self.entries.insert((at, self.number), what);
    }

    pub(super) fn answer(&mut self, at: Time, replier: Box<dyn Replier>, bulk: Bulk, message: Bytes) {
        self.add(at, Later::Answer(replier, bulk, message));
    }

    /// When the next one is due.
    pub(super) fn next(&self) -> Time {
        self.entries.keys().next().map_or(Time::NEVER, |(at, _)| *at)
    }

    fn take(&mut self, now: Time) -> Option<Later> {
        let (key, _) = self.entries.first_key_value().filter(|((at, _), _)| *at <= now)?;
        let key = *key;
        self.entries.remove(&key)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.entries.clear();
    }
}

fn milliseconds(count: u64) -> Duration {
    Duration::from_millis(count)
}

impl Stand {
    /// One event, and a little time.
    pub(super) fn draw(&mut self) {
        match self.dice.roll(100) {
            0..=24 => self.draw_read(),
            25..=34 => self.read(0, 0, PAGE, Freshness::Current, Duration::from_secs(10)),
            35..=39 => {
                let handle = self.dice.roll(HANDLES);
                self.check(handle);
            }
            40..=46 => {
                let handle = self.dice.roll(HANDLES);
                self.open(handle);
            }
            47..=56 => self.publish(),
            57..=60 => self.draw_fault(),
            _ => self.draw_read(),
        }
        let time = match self.dice.roll(100) {
            0..=59 => self.dice.roll(1000),
            60..=84 => self.dice.roll(10_000),
            85..=97 => self.dice.roll(60_000),
            _ => self.dice.roll(1_500_000),
        };
        self.pass(Duration::from_micros(time));
    }

    fn draw_read(&mut self) {
        let handle = self.dice.roll(HANDLES);
        let (offset, length) = match self.dice.roll(4) {
            // The same few pages: they are cached, or on their way.
            0 | 1 => (self.dice.roll(4) * u64::from(PAGE), PAGE),
            2 => (self.dice.roll(90_000), 1 + self.dice.roll(9_000) as u32),
            _ => (self.dice.roll(90_000), 1 + self.dice.roll(30_000) as u32),
        };
        let freshness = if self.dice.once_in(10) { Freshness::Version } else { Freshness::Current };
        let limit = if self.dice.once_in(4) { 4 } else { 10 };
        self.read(handle, offset, length, freshness, Duration::from_secs(limit));
    }

    fn publish(&mut self) {
        let (name, now) = (self.dice.roll(NAMES), self.sim.now());
        if self.asleep || now < self.publish_from || !self.run.begin(name) {
            return;
        }
        let takes = if self.dice.once_in(12) { 300_000 } else { 20_000 };
        let at = now.after(Duration::from_micros(self.dice.between(50, takes)));
        let done = !self.dice.once_in(8);
        self.agenda.add(at, Later::PublishEnds { incarnation: self.run.incarnation, name, done });
    }

    /// A rail to the run that there is now.
    fn any_way(&mut self) -> Option<usize> {
        let there: Vec<usize> = (0..self.ways.len())
            .filter(|&way| !self.ways[way].gone && self.ways[way].incarnation == self.run.incarnation)
            .collect();
        let pick = self.dice.roll(there.len() as u64) as usize;
        there.get(pick).copied()
    }

    fn draw_fault(&mut self) {
        let fault = self.dice.roll(27);
        self.sim.note(format_args!("fault {fault}"));
        match fault {
            0 => self.server_sleeps(false),
            1 => self.server_sleeps(true),
            2 => self.successor(true, true),
            3 => self.successor(false, true),
            4 => self.successor(false, false),
            5 => {
                // Its last answers are long on their way.
                let late = self.dice.between(300, 3500);
                for way in self.ways.iter().filter(|way| way.incarnation == self.run.incarnation) {
                    way.faults.late.store(late, Ordering::SeqCst);
                    way.faults.slow.store(2, Ordering::SeqCst);
                }
                self.draw_read();
                self.open(0);
                self.pass(milliseconds(2));
                self.successor(false, false);
            }
            6 => {
                let time = self.dice.between(20, 5000);
                self.suspend(milliseconds(time));
            }
            7 => {
                self.press(true);
                for handle in 0..HANDLES {
                    let offset = self.dice.roll(60_000);
                    self.read(handle, offset, 30_000, Freshness::Current, Duration::from_secs(10));
                }
            }
            8 => self.press(false),
            9 => {
                if let Some((rail, id)) = self.last_reply {
                    self.met.add(Kind::DoubleEvent);
                    let event = Event::Replied { id, message: Bytes::new(), bulk: 0, extent: None };
                    self.core.rail_event(self.sim.now(), rail, event);
                    self.act();
                }
            }
            _ => {
                if let Some(way) = self.any_way() {
                    self.rail_fault(way, fault);
                }
            }
        }
    }

    fn rail_fault(&mut self, way: usize, fault: u64) {
        let now = self.sim.now();
        let side = if self.dice.once_in(2) { Side::Client } else { Side::Server };
        let link = self.ways[way].link.clone();
        let faults = self.ways[way].faults.clone();
        match fault {
            10 | 11 => {
                let slow = milliseconds(self.dice.between(5, 400));
                link.configure(|config| config.delay = (slow / 4, slow));
                self.met.add(Kind::Delay);
                self.spell(way, Spell::Delay, 1500);
            }
            12 | 13 => {
                let loss = self.dice.between(1, 40) as f64 / 100.0;
                link.configure(|config| config.loss = loss);
                self.spell(way, Spell::Loss, 2000);
            }
            14 => {
                // One, or all of them at once and for long.
                let all = self.dice.once_in(4);
                self.met.add(Kind::Cut);
                for other in 0..self.ways.len() {
                    if other == way || all {
                        self.ways[other].link.cut();
                        self.ways[other].hurt();
                        self.spell(other, Spell::Cut, if all { 16_000 } else { 4000 });
                    }
                }
                if all {
                    self.read(0, 0, PAGE, Freshness::Current, Duration::from_secs(4));
                    self.pass(Duration::from_secs(5));
                    self.read(1, 0, PAGE, Freshness::Current, Duration::from_secs(4));
                }
            }
            15 => {
                link.port(side, false);
                self.met.add(Kind::Port);
                self.spell(way, Spell::Port, 800);
            }
            16 => {
                link.kill("the queue pair failed");
                self.met.add(Kind::PairDeath);
            }
            17 => {
                link.device_fatal(side);
                self.met.add(Kind::Device);
            }
            18 => {
                let told = self.dice.once_in(2);
                link.overflow(side, told);
                self.met.add_if(Kind::Told, told);
                // Nobody knows when it takes effect.
                self.ways[way].ill += 1;
            }
            19 | 20 => {
                let (key, offset) = (self.dice.roll(1 << 12) as u32, self.dice.roll(1 << 20) as u32);
                let write = Forged::Write { key, offset, bytes: Bytes::from_static(&[0xee; 64]) };
                link.forge(Side::Client, Lane::Bulk, write);
            }
            21 => {
                let (id, current) = (self.dice.roll(5000), self.dice.once_in(2));
                let words = vec![self.dice.roll(u64::MAX)];
                self.nonsense = true;
                let forged = match self.dice.once_in(2) {
                    true => Forged::Words { id, words, current },
                    false => Forged::Reply { id, bulk: 0, message: Bytes::new(), current },
                };
                link.forge(Side::Client, Lane::Small, forged);
            }
            22 => faults.corrupt.store(self.dice.between(1, 4) as u32, Ordering::SeqCst),
            23 => faults.short.store(self.dice.between(1, 3) as u32, Ordering::SeqCst),
            24 => {
                faults.refuse.store(self.dice.between(1, 6) as u32, Ordering::SeqCst);
                self.server_ill_until = self.server_ill_until.max(now.after(Duration::from_secs(1)));
            }
            _ => {
                faults.late.store(self.dice.between(1, 4000), Ordering::SeqCst);
                faults.slow.store(self.dice.between(1, 4) as u32, Ordering::SeqCst);
            }
        }
        self.ways[way].hurt();
    }

    fn spell(&mut self, way: usize, spell: Spell, longest: u64) {
        self.ways[way].ill += 1;
        let at = self.sim.now().after(milliseconds(self.dice.between(5, longest)));
        self.agenda.add(at, Later::SpellEnds(way, spell));
    }

    fn spell_ends(&mut self, way: usize, spell: Spell) {
        let Some(way) = self.ways.get_mut(way) else { return };
        way.ill = way.ill.saturating_sub(1);
        match spell {
            Spell::Delay => way.link.configure(|config| config.delay = SimConfig::default().delay),
            Spell::Loss => way.link.configure(|config| config.loss = 0.0),
            Spell::Cut => way.link.heal(),
            Spell::Port => {
                way.link.port(Side::Client, true);
                way.link.port(Side::Server, true);
            }
        }
    }

    /// It hangs and loses what comes meanwhile, or (`wakes`) it finds that when it wakes up.
    fn server_sleeps(&mut self, wakes: bool) {
        if self.asleep {
            return;
        }
        self.asleep = true;
        self.met.add(if wakes { Kind::Pause } else { Kind::Hang });
        for way in self.ways.iter().filter(|way| way.incarnation == self.run.incarnation) {
            if wakes { way.link.pause(true) } else { way.link.hang(true) }
        }
        let longest = if self.dice.once_in(2) { 4000 } else { 300 };
        let at = self.sim.now().after(milliseconds(self.dice.between(10, longest)));
        self.agenda.add(at, Later::Wake(self.run.incarnation));
    }

    fn wake(&mut self) {
        self.asleep = false;
        for way in self.ways.iter().filter(|way| way.incarnation == self.run.incarnation) {
            way.link.pause(false);
        }
    }

    /// Another run begins. `clean`: the one before has stopped in order. `closed`: its connections have ended; else its card goes
    /// on answering.
    fn successor(&mut self, clean: bool, closed: bool) {
        if self.run.incarnation > 3 || clean && self.asleep {
            return;
        }
        let now = self.sim.now();
        self.met.add(match (clean, closed) {
            (true, _) => Kind::Restart,
            (false, true) => Kind::Crash,
            (false, false) => Kind::Takeover,
        });
        let before = self.run.clone();
        for way in self.ways.iter().filter(|way| way.incarnation == before.incarnation) {
            if closed { way.link.server.close() } else { way.link.hang(true) }
        }
        // What was being published is so or not: the log knows.
        for name in before.publishing() {
            self.met.add(Kind::Undecided);
            if self.dice.once_in(2) {
                let (old, new) = self.store.advance(name);
                self.checker.superseded(old, new);
            }
        }
        before.forget();
        self.run = Run::new(before.incarnation + 1, &self.store, &self.log);
        self.asleep = false;
        // A run that stops in order while the one before it is still trusted leaves the wait to the next one.
        let owes = !clean || now < self.publish_from;
        self.publish_from = if owes { now.after(LEASE * 5 / 4 + Duration::from_secs(1)) } else { now };
        let longest = if closed { 500 } else { 6000 };
        let at = now.after(milliseconds(self.dice.between(5, longest)));
        self.agenda.add(at, Later::Hear);
        self.act();
    }

    fn hear(&mut self) {
        if self.believed == self.run.incarnation {
            return;
        }
        self.session();
        let now = self.sim.now();
        for way in 0..self.ways.len() {
            if self.ways[way].incarnation != self.run.incarnation && !self.ways[way].gone {
                let at = now.after(milliseconds(self.dice.roll(2000)));
                self.agenda.add(at, Later::Retire(way));
            }
        }
        for _ in 0..1 + self.dice.roll(3) {
            self.link();
        }
        self.act();
    }

    fn retire(&mut self, rail: usize) {
        let Some(way) = self.ways.get_mut(rail).filter(|way| !way.gone) else { return };
        way.gone = true;
        way.link.client.close();
        way.link.server.close();
        self.act();
        self.core.rail_event(self.sim.now(), rail, Event::State(State::Down("no longer offered".into())));
        self.core.remove_rail(rail);
        self.act();
    }

    /// Does what is due.
    pub(super) fn run_agenda(&mut self, now: Time) {
        while let Some(later) = self.agenda.take(now) {
            match later {
                Later::PublishEnds { incarnation, name, done } => {
                    if self.asleep && incarnation == self.run.incarnation {
                        let again = now.after(milliseconds(5));
                        self.agenda.add(again, Later::PublishEnds { incarnation, name, done });
                    } else if incarnation == self.run.incarnation {
                        self.publish_ended(name, done);
                    }
                }
                // A server that sleeps sends it later; one that is no more has no connection to send it on.
                Later::Answer(replier, bulk, message) if self.asleep => {
                    self.agenda.answer(now.after(milliseconds(5)), replier, bulk, message);
                }
                Later::Answer(replier, bulk, message) => {
                    replier.reply(bulk, Box::new(move |_| message));
                    self.act();
                }
                Later::SpellEnds(way, spell) => self.spell_ends(way, spell),
                Later::Wake(incarnation) if self.asleep && incarnation == self.run.incarnation => self.wake(),
                Later::Wake(_) => {}
                Later::Hear => self.hear(),
                Later::Retire(rail) => self.retire(rail),
            }
        }
    }

    /// Ends every fault.
    pub(super) fn heal(&mut self) {
        self.press(false);
        if self.asleep {
            self.wake();
        }
        for way in &mut self.ways {
            way.hurt();
            way.ill = 0;
            for count in [&way.faults.corrupt, &way.faults.short, &way.faults.refuse, &way.faults.slow] {
                count.store(0, Ordering::SeqCst);
            }
            way.link.heal();
            way.link.port(Side::Client, true);
            way.link.port(Side::Server, true);
            let delay = SimConfig::default().delay;
            way.link.configure(|config| (config.loss, config.duplicate, config.delay) = (0.0, 0.0, delay));
        }
        self.hear();
        let now = self.sim.now();
        for way in 0..self.ways.len() {
            if self.ways[way].incarnation != self.run.incarnation {
                self.agenda.add(now, Later::Retire(way));
            }
        }
        self.act();
    }
}
