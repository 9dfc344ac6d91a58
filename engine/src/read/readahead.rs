//! What to fetch before it is asked for: pure, one small state per open handle.
//!
//! Guarantees: a bounded table of streams per handle (several programs may read one descriptor, each its own part); a stream
//! is *forward* or *backward* once two reads in a row touch (reads of one file may arrive a little out of order), *strided*
//! once three in a row lie equally far apart. Its window is at most twice what it has read, so a reader that stops early has
//! cost little, and all windows of a handle share one limit. A random reader never gets a window. A stream that its reader
//! has left is closed, and what was fetched ahead for it is named once by [`Readahead::take_dropped`]. What nobody wants any
//! more holds nothing: [`Readahead::next`] is asked when there is room, and says what is wanted then.

use std::ops::Range;

/// Streams of one handle.
const STREAMS: usize = 16;
/// How many read lengths a read of a stream may be off its expected place.
const SLACK: u64 = 4;
/// Most reads ahead of a strided reader.
const STEPS: u64 = 64;
/// A stream of several is left when it was passed over so many times as often as it ever was before.
const PATIENCE: u64 = 16;

/// Sizes of the object, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Of the object.
    pub size: u64,
    /// Of a page.
    pub page: u64,
    /// Of a cell: what one fetch brings at most.
    pub cell: u64,
}

/// Bytes that are wanted ahead of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Want {
    stream: usize,
    /// Which; inside the object, and inside one cell unless the stream is strided.
    pub bytes: Range<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// One read so far.
    Once,
    Forward,
    Backward,
    Strided {
        stride: i64,
        length: u64,
        last: u64,
    },
}

#[derive(Clone, Debug)]
struct Stream {
    shape: Shape,
    /// What its run of reads covers.
    low: u64,
    high: u64,
    /// Reads in the run.
    streak: u32,
    /// Bytes wanted ahead; 0: closed.
    window: u64,
    /// Forward: end of what was fetched ahead. Backward: start of it. Strided: reads ahead.
    frontier: u64,
    /// Nothing is fetched ahead there or beyond: that failed.
    stop: Option<u64>,
    /// The number of the handle's read that used it last.
    used: u64,
    /// Reads of other streams between two of its own.
    gap: u64,
}

impl Stream {
    fn unread(&self) -> Vec<Range<u64>> {
        match self.shape {
            Shape::Once => Vec::new(),
            Shape::Forward => Vec::from_iter((self.frontier > self.high).then_some(self.high..self.frontier)),
            Shape::Backward => Vec::from_iter((self.frontier < self.low).then_some(self.frontier..self.low)),
            Shape::Strided { stride, length, last } => {
                let start = |step: u64| last.checked_add_signed(stride.saturating_mul(step.cast_signed()));
                (1..=self.frontier).filter_map(start).map(|start| start..start.saturating_add(length)).collect()
            }
        }
    }

    /// Nothing more is fetched ahead for it; gives what was and is not read.
    fn close(&mut self) -> Vec<Range<u64>> {
        let unread = if self.window > 0 { self.unread() } else { Vec::new() };
        self.window = 0;
        self.frontier = self.start();
        unread
    }

    /// The frontier of a stream ahead of which nothing was fetched.
    fn start(&self) -> u64 {
        match self.shape {
            Shape::Once | Shape::Forward => self.high,
            Shape::Backward => self.low,
            Shape::Strided { .. } => 0,
        }
    }

    /// How well a read fits: 0 exactly, 1 nearly. `None`: not at all. With the shape that the stream then has.
    fn fits(&self, offset: u64, end: u64) -> Option<(u8, Shape)> {
        let slack = (end - offset).saturating_mul(SLACK);
        let (after, before) = (offset == self.high, end == self.low);
        match self.shape {
            Shape::Once if offset == self.low && end == self.high => Some((0, Shape::Once)),
            Shape::Once | Shape::Forward if after => Some((0, Shape::Forward)),
            Shape::Once | Shape::Backward if before => Some((0, Shape::Backward)),
            // Two reads that came in the wrong order looked like the other direction.
            Shape::Backward if after && self.streak <= 2 => Some((0, Shape::Forward)),
            Shape::Forward if before && self.streak <= 2 => Some((0, Shape::Backward)),
            Shape::Forward if offset.abs_diff(self.high) <= slack => Some((1, Shape::Forward)),
            Shape::Backward if end.abs_diff(self.low) <= slack => Some((1, Shape::Backward)),
            Shape::Strided { stride, length, last } if last.checked_add_signed(stride) == Some(offset) => {
                Some((0, Shape::Strided { stride, length: length.max(end - offset), last: offset }))
            }
            _ => None,
        }
    }

    fn extend(&mut self, offset: u64, end: u64, shape: Shape) {
        if shape == Shape::Once {
            return;
        }
        if let Shape::Strided { .. } = shape {
            // One of the reads ahead has come.
            self.frontier = self.frontier.saturating_sub(1);
        } else if std::mem::discriminant(&self.shape) != std::mem::discriminant(&shape) {
            self.window = 0;
        }
        (self.low, self.high) = (self.low.min(offset), self.high.max(end));
        self.shape = shape;
        self.streak = self.streak.saturating_add(1);
        match shape {
            Shape::Forward if self.window == 0 => self.frontier = self.high,
            Shape::Forward => self.frontier = self.frontier.max(self.high),
            Shape::Backward if self.window == 0 => self.frontier = self.low,
            Shape::Backward => self.frontier = self.frontier.min(self.low),
            Shape::Once | Shape::Strided { .. } => {}
        }
        self.stop = self.stop.filter(|&stop| match shape {
            Shape::Forward => self.high <= stop,
            Shape::Backward => self.low > stop,
            Shape::Once | Shape::Strided { .. } => true,
        });
    }

    fn open(&mut self, grid: &Grid, limit: u64) {
        self.window = match self.shape {
            Shape::Once => 0,
            Shape::Forward | Shape::Backward => (self.high - self.low).saturating_mul(2).min(limit),
            Shape::Strided { length, .. } => {
                let steps = (1u64 << self.streak.min(6)).min(STEPS).min(limit / (length + grid.page).max(1));
                steps * length
            }
        };
    }

    fn next(&self, grid: &Grid) -> Option<Range<u64>> {
        if self.window == 0 {
            return None;
        }
        match self.shape {
            Shape::Once => None,
            Shape::Forward => {
                let end = grid.size.min(self.stop.unwrap_or(grid.size));
                let (from, to) = (self.frontier.max(self.high), self.high.saturating_add(self.window).min(end));
                let whole = (from / grid.cell + 1).saturating_mul(grid.cell);
                if from >= to {
                    None
                } else if whole <= to || to == end {
                    Some(from..whole.min(to))
                } else {
                    // A young stream: its window is less than a cell, and is fetched by halves.
                    (self.window < grid.cell && to - from >= self.window / 2).then_some(from..to)
                }
            }
            Shape::Backward => {
                let end = self.stop.map_or(0, |stop| stop + 1);
                let (from, to) = (self.frontier.min(self.low), self.low.saturating_sub(self.window).max(end));
                if from <= to {
                    return None;
                }
                let whole = (from - 1) / grid.cell * grid.cell;
                if whole >= to || to == end {
                    Some(whole.max(to)..from)
                } else {
                    (self.window < grid.cell && from - to >= self.window / 2).then_some(to..from)
                }
            }
            Shape::Strided { stride, length, last } => {
                let step = self.frontier + 1;
                if self.stop.is_some() || step * length > self.window {
                    return None;
                }
                let start = last.checked_add_signed(stride.checked_mul(i64::try_from(step).ok()?)?)?;
                (start < grid.size).then(|| start..start.saturating_add(length).min(grid.size))
            }
        }
    }
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Readahead {
    streams: Vec<Stream>,
    reads: u64,
    /// Start of the last read, and how far it was from the one before.
    last: Option<(u64, i64)>,
    turn: usize,
    dropped: Vec<Range<u64>>,
}

impl Readahead {
    /// A read arrived. Whether whole cells are worth fetching for it. `limit`: bytes ahead of this handle.
    pub fn observe(&mut self, offset: u64, length: u32, grid: &Grid, limit: u64) -> bool {
        let end = offset.saturating_add(u64::from(length)).min(grid.size);
        if offset >= end {
            return false;
        }
        self.reads += 1;
        let delta = self.last.map_or(0, |(last, _)| offset.wrapping_sub(last).cast_signed());
        let equal_steps = delta != 0 && self.last.is_some_and(|(_, before)| before == delta);
        self.last = Some((offset, delta));
        let fitting = self.streams.iter().enumerate().filter_map(|(at, s)| Some((s.fits(offset, end)?, at)));
        let best = fitting.min_by_key(|((how, _), at)| (*how, *at));
        let at = match best {
            Some(((_, shape), at)) => {
                let stream = &mut self.streams[at];
                let gap = self.reads.saturating_sub(stream.used + 1);
                stream.gap = if gap > stream.gap { gap } else { stream.gap - (stream.gap - gap) / 8 };
                stream.extend(offset, end, shape);
                at
            }
            None => {
                let shape = match equal_steps {
                    true => Shape::Strided { stride: delta, length: end - offset, last: offset },
                    false => Shape::Once,
                };
                let streak = if equal_steps { 2 } else { 1 };
                let start = if equal_steps { 0 } else { end };
                let stream = Stream {
                    shape,
                    low: offset,
                    high: end,
                    streak,
                    window: 0,
                    frontier: start,
                    stop: None,
                    used: 0,
                    gap: 0,
                };
                self.add(stream)
            }
        };
        self.streams[at].used = self.reads;
        self.close_left(at);
        let others = self.streams.iter().enumerate().filter(|(other, s)| *other != at && s.window > 0).count();
        self.streams[at].open(grid, limit / (others as u64 + 1));
        let stream = &self.streams[at];
        matches!(stream.shape, Shape::Forward | Shape::Backward) && stream.window >= grid.cell
    }

    /// Adds a stream, in the place of one that is closed, or of the least recently used one.
    fn add(&mut self, stream: Stream) -> usize {
        if self.streams.len() < STREAMS {
            self.streams.push(stream);
            return self.streams.len() - 1;
        }
        let oldest = self.streams.iter().enumerate().min_by_key(|(_, s)| (s.window > 0, s.used));
        let at = oldest.map_or(0, |(at, _)| at);
        let unread = self.streams[at].close();
        self.dropped.extend(unread);
        self.streams[at] = stream;
        at
    }

    fn close_left(&mut self, current: usize) {
        let reads = self.reads;
        for (at, stream) in self.streams.iter_mut().enumerate() {
            if at != current && stream.window > 0 && reads - stream.used > stream.gap.saturating_mul(PATIENCE) {
                self.dropped.extend(stream.close());
            }
        }
    }

    /// What is wanted ahead now, streams in turn; it stays wanted until [`Readahead::took`].
    pub fn next(&mut self, grid: &Grid) -> Option<Want> {
        let count = self.streams.len();
        let (stream, bytes) = (1..=count).find_map(|step| {
            let at = (self.turn + step) % count;
            Some((at, self.streams[at].next(grid)?))
        })?;
        Some(Want { stream, bytes })
    }

    /// It was fetched, or was there already.
    pub fn took(&mut self, want: &Want) {
        self.turn = want.stream;
        let Some(stream) = self.streams.get_mut(want.stream) else { return };
        match stream.shape {
            Shape::Once => {}
            Shape::Forward => stream.frontier = want.bytes.end,
            Shape::Backward => stream.frontier = want.bytes.start,
            Shape::Strided { .. } => stream.frontier += 1,
        }
    }

    /// What was fetched ahead at this place failed: nothing is fetched there or beyond before the reader has passed it.
    pub fn failed(&mut self, at: u64) {
        for stream in &mut self.streams {
            if stream.window > 0 && stream.unread().iter().any(|range| range.contains(&at)) {
                stream.stop = Some(at);
                match stream.shape {
                    Shape::Forward => stream.frontier = at,
                    Shape::Backward => stream.frontier = at + 1,
                    Shape::Once | Shape::Strided { .. } => {}
                }
            }
        }
    }

    /// What was fetched ahead and is no longer wanted, since this was asked last.
    pub fn take_dropped(&mut self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.dropped)
    }

    /// The handle is closed: what was fetched ahead and not read.
    pub fn close(mut self) -> Vec<Range<u64>> {
        let unread: Vec<_> = self.streams.iter_mut().flat_map(Stream::close).collect();
        self.dropped.extend(unread);
        self.dropped
    }
}

#[cfg(test)]
#[path = "readahead_tests.rs"]
mod tests;
