//! One reader: opens names, reads at random places by several calls, and compares each byte with what it may be.
//!
//! Guarantees: a descriptor that has shown one state for certain shows no other; each error is explained or a violation; each
//! call's time is looked at.

use super::history::{Count, Object, State, World};
use super::weather::{Sky, Weather};
use super::{HUNG, Place};
use crate::data::{Random, fill};
use rustix::io::Errno;
use std::fs::File;
use std::io::{Error, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Instant;

const LARGEST: u64 = 1 << 20;
const O_DIRECT: i32 = 0o40000;

struct Reader<'a> {
    world: &'a World,
    weather: &'a Weather,
    place: &'a Place,
    count: Count,
    random: Random,
    memory: Vec<u8>,
    want: Vec<u8>,
}

/// Until the world ends.
pub fn read(world: &World, weather: &Weather, place: &Place, seed: u64) -> Count {
    let memory = vec![0; LARGEST as usize];
    let mut reader =
        Reader { world, weather, place, count: Count::new(), random: Random::new(seed), want: memory.clone(), memory };
    while !world.is_over() {
        let chosen = reader.random.below(world.objects.len() as u64) as usize;
        reader.visit(&world.objects[chosen], &place.path);
        if reader.random.below(20) == 0 {
            reader.list(&place.path);
        }
    }
    reader.count
}

impl Reader<'_> {
    fn add(&mut self, name: &'static str, many: u64) {
        *self.count.entry(name).or_default() += many;
    }

    fn timed<T>(&mut self, what: &str, name: &str, call: impl FnOnce(&mut Self) -> T) -> (Instant, T) {
        let began = Instant::now();
        let result = call(self);
        if began.elapsed() > HUNG {
            self.world.violation(format!("hung: {what} of {name} took {:?}", began.elapsed()));
        }
        (began, result)
    }

    /// Whether the error is one that may be. It is counted, or a violation.
    fn explained(&mut self, object: &Object, began: Instant, what: &str, error: &Error) {
        let errno = Errno::from_io_error(error);
        let weather = self.weather;
        let (name, fine) = match errno {
            Some(Errno::STALE) => ("ESTALE", object.changes || object.hurt),
            Some(Errno::TIMEDOUT) => ("ETIMEDOUT", weather.explains(began, |sky| sky.outage || sky.rail)),
            Some(Errno::IO) => {
                ("EIO", object.hurt && weather.explains(began, |sky| sky.damage.as_deref() == Some(&*object.name)))
            }
            Some(Errno::NOTCONN | Errno::CONNABORTED) => ("ENOTCONN", weather.explains(began, |sky| sky.daemon)),
            // What lies below the mount point while nothing is mounted there.
            Some(Errno::NOENT) if weather.explains(began, |sky| sky.daemon) => ("ENOENT", true),
            _ => ("other errors", false),
        };
        self.add(name, 1);
        if matches!(name, "ENOTCONN" | "ENOENT") {
            // Nobody serves: asking all the time would only keep others from starting.
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        if !fine {
            self.world.violation(format!("{what} of {}: {error}, for which there was no reason", object.name));
        }
    }

    fn visit(&mut self, object: &Object, place: &Path) {
        let floor = object.floor();
        let flags = if self.random.below(4) == 0 { O_DIRECT } else { 0 };
        let path = place.join(&object.name);
        let (began, opened) = self
            .timed("open", &object.name, |_| std::fs::OpenOptions::new().read(true).custom_flags(flags).open(&path));
        self.add("opens", 1);
        let file = match opened {
            Ok(file) => file,
            // Where the mount is not there what is seen is the directory below it, which says nothing.
            Err(error)
                if error.kind() == std::io::ErrorKind::NotFound
                    && object.changes
                    && !self.weather.explains(began, |sky| sky.daemon) =>
            {
                let absent: Vec<State> =
                    object.candidates(floor).into_iter().filter(|state| state.size.is_none()).collect();
                if let [.., oldest] = absent[..] {
                    self.add("ENOENT of what was deleted", 1);
                    object.acknowledge(oldest.number);
                } else {
                    self.explained(object, began, "open", &error);
                }
                return;
            }
            Err(error) => return self.explained(object, began, "open", &error),
        };
        let (mut mine, opened_at) = (None, floor);
        for _ in 0..1 + self.random.below(40) {
            if self.world.is_over() || !self.once(object, &file, opened_at, &mut mine) {
                return;
            }
            if self.random.below(8) == 0 {
                // Now and then the name is put anew between two reads of a descriptor.
                std::thread::sleep(std::time::Duration::from_millis(self.random.below(60)));
            }
        }
        if self.random.below(16) == 0 {
            self.whole(object, &path);
        }
    }

    /// One read at a random place. Says whether to go on with this descriptor.
    fn once(&mut self, object: &Object, file: &File, opened_at: u64, mine: &mut Option<u64>) -> bool {
        let length = match self.random.below(4) {
            0 => 1 + self.random.below(300),
            1 | 2 => 1 + self.random.below(128 << 10),
            _ => 1 + self.random.below(LARGEST),
        } as usize;
        let offset = self.random.below(object.largest + object.largest / 16);
        let floor = if self.place.snapshot { opened_at } else { object.floor() };
        let mut memory = std::mem::take(&mut self.memory);
        let (began, got) = self.timed("read", &object.name, |_| file.read_at(&mut memory[..length], offset));
        self.memory = memory;
        self.add("reads", 1);
        match got {
            Ok(got) => {
                self.add("bytes read", got as u64);
                let part = self.may_end_early(object, began, offset + got as u64);
                self.compare(object, floor, (offset, length), got, part, mine)
            }
            Err(error) => {
                self.explained(object, began, "read", &error);
                false
            }
        }
    }

    /// Whether a call that goes by the kernel's pages may have ended here, before a page for which there was an error.
    fn may_end_early(&self, object: &Object, began: Instant, end: u64) -> bool {
        let fault = |sky: &Sky| sky.outage || sky.rail || sky.daemon || sky.damage.as_deref() == Some(&*object.name);
        self.place.cached && end.is_multiple_of(4096) && self.weather.explains(began, fault)
    }

    /// Whether what came is of a state that may be: of this descriptor's, if it has shown one.
    fn compare(
        &mut self,
        object: &Object,
        floor: u64,
        (offset, length): (u64, usize),
        got: usize,
        part: bool,
        mine: &mut Option<u64>,
    ) -> bool {
        let candidates = object.candidates(floor);
        let mut fits = Vec::new();
        for state in candidates.iter().filter(|state| mine.is_none_or(|mine| mine == state.number)) {
            let Some(size) = state.size else { continue };
            let whole = length.min(usize::try_from(size.saturating_sub(offset)).unwrap_or(usize::MAX));
            // Memory that the kernel takes in two requests: a later part may have failed.
            let two = length + 8192 > LARGEST as usize;
            let right = got == whole || (got > 0 && got < whole && (two || part));
            if right {
                fill(state.seed, offset, &mut self.want[..got]);
                if self.want[..got] == self.memory[..got] {
                    fits.push(state.number);
                }
            }
        }
        if fits.is_empty() {
            let numbers: Vec<u64> = candidates.iter().map(|state| state.number).collect();
            self.world.violation(format!(
                "wrong bytes: {got} of {} at {offset} of {length} are of none of {numbers:?}, this descriptor's: {mine:?}",
                object.name
            ));
            return false;
        }
        // Few bytes, or none, can be of several.
        if let [number] = fits[..]
            && got >= 16
        {
            *mine = Some(number);
            object.acknowledge(number);
        }
        true
    }

    /// From beginning to end, as most programs read.
    fn whole(&mut self, object: &Object, path: &Path) {
        let floor = object.floor();
        let began = Instant::now();
        let Ok(mut file) = File::open(path) else { return };
        let mut bytes = Vec::new();
        let mut buffer = vec![0; 128 << 10];
        loop {
            let (_, got) = self.timed("read", &object.name, |_| file.read(&mut buffer));
            match got {
                Ok(0) => break,
                Ok(got) => bytes.extend_from_slice(&buffer[..got]),
                Err(error) => return self.explained(object, began, "read", &error),
            }
        }
        self.add("files read whole", 1);
        self.add("bytes read", bytes.len() as u64);
        let mut want = vec![0; bytes.len()];
        let right = object.candidates(floor).into_iter().any(|state| {
            fill(state.seed, 0, &mut want);
            state.size == Some(bytes.len() as u64) && want == bytes
        });
        if !right {
            self.world.violation(format!("wrong bytes: all {} of {}", bytes.len(), object.name));
        }
    }

    /// `ls`, and the size of everything.
    fn list(&mut self, place: &Path) {
        let (began, listed) = self.timed("ls", "the mount", |_| {
            std::fs::read_dir(place)?.map(|entry| Ok(entry?.file_name())).collect::<std::io::Result<Vec<_>>>()
        });
        self.add("lists", 1);
        match listed {
            Ok(names) => {
                let missing = self
                    .world
                    .objects
                    .iter()
                    .filter(|object| !object.changes)
                    .find(|object| !names.iter().any(|name| name.as_encoded_bytes() == object.name.as_bytes()));
                if let Some(object) = missing
                    && !self.weather.explains(began, |sky| sky.daemon)
                {
                    self.world.violation(format!("wrong list: {} is not in it", object.name));
                }
            }
            Err(error) => {
                let still = &self.world.objects[0];
                self.explained(still, began, "ls", &error);
            }
        }
    }
}
