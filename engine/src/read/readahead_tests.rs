//! Readers of every kind against a small world: a pipe with a bandwidth and a round trip, a reader that takes its time.

use super::*;
use std::collections::{BTreeMap, HashSet};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GRID: Grid = Grid { size: 256 * MIB, page: 64 * KIB, cell: MIB };
const LIMIT: u64 = 16 * MIB;
/// Bytes a microsecond, and microseconds there and back.
const BANDWIDTH: u64 = 1000;
const ROUND_TRIP: u64 = 100;
/// Bytes on their way ahead of reads at most.
const IN_FLIGHT: u64 = 6 * MIB;

#[derive(Debug, Default)]
struct Figures {
    asked: u64,
    fetched: u64,
    ahead: u64,
    /// Bytes that were there when asked for.
    ready: u64,
}

impl Figures {
    fn over(&self) -> f64 {
        self.fetched as f64 / self.asked as f64
    }
    fn ready(&self) -> f64 {
        self.ready as f64 / self.asked as f64
    }
}

/// When each page that was fetched comes.
#[derive(Default)]
struct World {
    readahead: Readahead,
    now: u64,
    busy: u64,
    pages: BTreeMap<u64, u64>,
    figures: Figures,
}

impl World {
    fn fetch(&mut self, bytes: Range<u64>) -> u64 {
        let pages = bytes.start / GRID.page..bytes.end.min(GRID.size).div_ceil(GRID.page);
        let missing: Vec<u64> = pages.filter(|page| !self.pages.contains_key(page)).collect();
        let bytes = missing.len() as u64 * GRID.page;
        if bytes > 0 {
            self.busy = self.busy.max(self.now + ROUND_TRIP) + bytes / BANDWIDTH;
            self.pages.extend(missing.into_iter().map(|page| (page, self.busy)));
        }
        self.figures.fetched += bytes;
        bytes
    }

    fn ahead(&mut self) {
        while self.pages.values().filter(|&&at| at > self.now).count() as u64 * GRID.page < IN_FLIGHT {
            let Some(want) = self.readahead.next(&GRID) else { return };
            assert!(want.bytes.start < want.bytes.end && want.bytes.end <= GRID.size, "{want:?}");
            self.readahead.took(&want);
            self.figures.ahead += self.fetch(want.bytes);
        }
    }

    fn read(&mut self, offset: u64, length: u64) {
        let end = (offset + length).min(GRID.size);
        let whole = self.readahead.observe(offset, length as u32, &GRID, LIMIT);
        self.figures.asked += end - offset;
        for page in offset / GRID.page..end.div_ceil(GRID.page) {
            if self.pages.get(&page).is_some_and(|&at| at <= self.now) {
                let (from, to) = (offset.max(page * GRID.page), end.min((page + 1) * GRID.page));
                self.figures.ready += to - from;
            }
        }
        let cells = |at: u64| at / GRID.cell * GRID.cell;
        let missing = (offset / GRID.page..end.div_ceil(GRID.page)).any(|page| !self.pages.contains_key(&page));
        if missing {
            let wanted = if whole { cells(offset)..cells(end - 1) + GRID.cell } else { offset..end };
            self.fetch(wanted);
        }
        self.ahead();
        let come = (offset / GRID.page..end.div_ceil(GRID.page)).filter_map(|page| self.pages.get(&page)).max();
        self.now = self.now.max(come.copied().unwrap_or(0));
        // The reader takes a quarter longer for its bytes than the pipe.
        self.now += length * 5 / 4 / BANDWIDTH + 5;
        self.ahead();
    }
}

fn run(reads: impl IntoIterator<Item = (u64, u64)>) -> World {
    let mut world = World::default();
    for (offset, length) in reads {
        world.read(offset, length);
    }
    world
}

fn assert_figures(name: &str, reads: impl IntoIterator<Item = (u64, u64)>, over: f64, ready: f64) {
    let figures = run(reads).figures;
    eprintln!("{name}: {:.2} fetched for each asked, {:.2} ready: {figures:?}", figures.over(), figures.ready());
    assert!(figures.over() <= over && figures.ready() >= ready, "{name}: {figures:?}");
}

#[test]
fn sequential_readers_find_their_bytes_and_nothing_else_is_fetched() {
    for length in [4 * KIB, 64 * KIB, 128 * KIB, MIB] {
        let name = format!("sequential {length}");
        assert_figures(&name, (0..64 * MIB / length).map(|i| (i * length, length)), 1.3, 0.95);
    }
    assert_figures("to the end", (0..256).map(|i| (i * MIB, MIB)), 1.0, 0.97);
    // Unaligned, of changing lengths, not from the start.
    let lengths = [70_000u64, 3_000, 500_000, 131_072];
    let mut at = 12_345;
    let reads: Vec<_> = (0..400)
        .map(|i| {
            let length = lengths[i % 4];
            at += length;
            (at - length, length)
        })
        .collect();
    assert_figures("changing lengths", reads, 1.3, 0.9);
}

#[test]
fn backward_readers_as_well() {
    for length in [64 * KIB, 128 * KIB, MIB] {
        let name = format!("backward {length}");
        let reads = (1..=64 * MIB / length).map(|i| (GRID.size - i * length, length));
        assert_figures(&name, reads, 1.3, 0.95);
    }
    let to_the_start = (0..64).rev().map(|i| (i * MIB, MIB));
    assert_figures("backward to the start", to_the_start, 1.01, 0.9);
}

#[test]
fn strided_readers_get_the_pages_they_will_ask_for_and_no_others() {
    for (length, stride) in [(64 * KIB, 256 * KIB), (128 * KIB, MIB), (256 * KIB, 3 * MIB)] {
        let name = format!("{length} every {stride}");
        assert_figures(&name, (0..GRID.size / stride).map(|i| (i * stride, length)), 1.02, 0.9);
    }
    // A page for each 4 KiB, which is sixteen times as much.
    // The pipe is the limit then, so they are not all there in time.
    assert_figures("4 KiB every MiB", (0..256).map(|i| (i * MIB + 8192, 4 * KIB)), 16.0, 0.0);
    assert_figures("4 KiB every 16 KiB", (0..4000).map(|i| (i * 16 * KIB, 4 * KIB)), 4.5, 0.0);
    assert_figures("backward strides", (0..85).map(|i| (GRID.size - (i + 1) * 3 * MIB, 128 * KIB)), 1.02, 0.9);
}

/// A generator of test decisions.
fn dice(seed: &mut u64, sides: u64) -> u64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) % sides
}

#[test]
fn s16_eight_processes_on_one_descriptor_are_eight_streams() {
    for length in [64 * KIB, 128 * KIB, MIB] {
        let (part, mut seed) = (32 * MIB, length);
        let mut at: Vec<u64> = vec![0; 8];
        let mut reads = Vec::new();
        while at.iter().any(|&at| at < part) {
            // They run in bursts, none far behind for ever.
            let who = dice(&mut seed, 8) as usize;
            for _ in 0..=dice(&mut seed, 3) {
                if at[who] < part {
                    reads.push((who as u64 * 32 * MIB + at[who], length));
                    at[who] += length;
                }
            }
        }
        assert_figures(&format!("eight of {length}"), reads, 1.02, 0.85);
    }
}

#[test]
fn s16_pages_touched_in_order_come_as_fills_a_little_out_of_order() {
    let mut order: Vec<u64> = (0..512).collect();
    for i in (0..510).step_by(3) {
        order.swap(i, i + 1);
    }
    // It stops before the end: a window is fetched in vain.
    assert_figures("fills", order.iter().map(|i| (i * 128 * KIB, 128 * KIB)), 1.26, 0.95);
}

#[test]
fn a_random_reader_fetches_the_pages_it_asks_for_and_nothing_ahead() {
    for length in [KIB, 4 * KIB, 100 * KIB] {
        let mut seed = length;
        let world = run((0..2000).map(|_| (dice(&mut seed, GRID.size - length), length)));
        let mut seed = length;
        let pages: HashSet<u64> = (0..2000)
            .map(|_| dice(&mut seed, GRID.size - length))
            .flat_map(|offset| offset / GRID.page..(offset + length).div_ceil(GRID.page))
            .collect();
        assert_eq!(world.figures.fetched, pages.len() as u64 * GRID.page, "{length}");
        assert_eq!(world.figures.ahead, 0);
    }
    // Aligned preads, so that two may touch now and then.
    let mut seed = 9;
    let figures = run((0..4000).map(|_| (dice(&mut seed, GRID.size / 4096) * 4096, 4 * KIB))).figures;
    assert!(figures.over() < 17.0, "{figures:?}");
}

#[test]
fn a_seek_drops_what_is_no_longer_wanted() {
    let mut world = run((0..8).map(|i| (i * MIB, MIB)));
    assert!(world.readahead.next(&GRID).is_some() || world.figures.ahead > 4 * MIB);
    assert!(world.readahead.take_dropped().is_empty());
    world.readahead.observe(200 * MIB, 4096, &GRID, LIMIT);
    let dropped: u64 = world.readahead.take_dropped().iter().map(|range| range.end - range.start).sum();
    assert!((2 * MIB..=LIMIT).contains(&dropped), "{dropped}");
    assert_eq!(world.readahead.next(&GRID), None, "nothing is wanted ahead of a reader that has left");
    // It comes back: what is there already is not fetched again, and the window is open.
    let fetched = world.figures.fetched;
    world.read(8 * MIB, MIB);
    assert!(world.readahead.next(&GRID).is_some() || world.figures.fetched > fetched);
}

#[test]
fn a_look_at_the_head_of_the_file_between_reads_keeps_the_stream() {
    let reads = (1..200u64).flat_map(|i| [(i * 256 * KIB, 256 * KIB), (0, 4 * KIB)]);
    assert_figures("with looks at the head", reads, 1.4, 0.9);
}

#[test]
fn a_reader_that_stops_early_has_cost_little() {
    for length in [4 * KIB, 128 * KIB, MIB] {
        for count in 1..20 {
            let figures = run((0..count).map(|i| (10 * MIB + i * length, length))).figures;
            let most = 3 * figures.asked + 2 * GRID.page + if figures.asked >= MIB / 2 { 2 * GRID.cell } else { 0 };
            assert!(figures.fetched <= most, "{count} of {length}: {figures:?}");
        }
    }
}

#[test]
fn what_failed_ahead_is_not_tried_again_before_the_reader_is_past_it() {
    let mut r = Readahead::default();
    for i in 0..4 {
        r.observe(i * MIB, MIB as u32, &GRID, LIMIT);
    }
    let mut wanted = Vec::new();
    while let Some(want) = r.next(&GRID) {
        r.took(&want);
        wanted.push(want.bytes);
    }
    assert_eq!(wanted.first().map(|range| range.start), Some(4 * MIB));
    r.failed(6 * MIB);
    for i in 4..6 {
        r.observe(i * MIB, MIB as u32, &GRID, LIMIT);
        assert_eq!(r.next(&GRID), None);
    }
    r.observe(6 * MIB, MIB as u32, &GRID, LIMIT);
    assert_eq!(r.next(&GRID).map(|want| want.bytes.start), Some(7 * MIB));
}

#[test]
fn odd_numbers_are_harmless_and_the_table_is_bounded() {
    let tiny = Grid { size: 10, page: 4096, cell: 4096 };
    let mut r = Readahead::default();
    assert!(!r.observe(u64::MAX, u32::MAX, &tiny, 1));
    assert!(!r.observe(0, 0, &tiny, u64::MAX));
    let mut seed = 5;
    for _ in 0..20_000 {
        let offset = [dice(&mut seed, 1000), u64::MAX - dice(&mut seed, 1000), dice(&mut seed, 1 << 40)]
            [dice(&mut seed, 3) as usize];
        let grid = Grid { size: u64::MAX >> 2, page: 4096, cell: 1 << 20 };
        r.observe(offset, dice(&mut seed, 1 << 32) as u32, &grid, dice(&mut seed, 1 << 30));
        if let Some(want) = r.next(&grid) {
            assert!(want.bytes.start < want.bytes.end && want.bytes.end <= grid.size);
            r.took(&want);
        }
        r.failed(dice(&mut seed, 1 << 40));
        assert!(r.streams.len() <= STREAMS);
        r.take_dropped();
    }
    let mut none = Readahead::default();
    for i in 0..9 {
        assert!(!none.observe(i * MIB, MIB as u32, &GRID, 0));
    }
    assert_eq!(none.next(&GRID), None);
    assert!(none.close().is_empty());
}
