//! The model of admission: a virtual clock, a resource that serves so many bytes a second, and beside the queue the ideal
//! that it is held against: a fluid in which every waiting handle of a class is served at once, each class with half.

use super::*;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// The ideal. It serves as many bytes as the queue does, a little of everything at once.
#[derive(Default)]
struct Fluid {
    lines: [HashMap<u64, VecDeque<(u64, f64)>>; 2],
    total: f64,
    /// Bytes that it had served in all when this entry was done.
    done: HashMap<u64, f64>,
}

impl Fluid {
    fn push(&mut self, id: u64, handle: u64, class: Class, bytes: u64) {
        self.lines[class.place()].entry(handle).or_default().push_back((id, bytes as f64));
    }

    fn remove(&mut self, id: u64) {
        for lines in &mut self.lines {
            lines.values_mut().for_each(|line| line.retain(|entry| entry.0 != id));
            lines.retain(|_, line| !line.is_empty());
        }
    }

    fn serve(&mut self, bytes: u64) {
        let mut left = bytes as f64;
        while left > 1e-6 {
            let classes = self.lines.iter().filter(|lines| !lines.is_empty()).count();
            if classes == 0 {
                break;
            }
            let part = |lines: &HashMap<u64, VecDeque<(u64, f64)>>| 1.0 / (classes * lines.len()) as f64;
            let until_one_is_done = self
                .lines
                .iter()
                .flat_map(|lines| lines.values().map(|line| line[0].1 / part(lines)))
                .fold(f64::INFINITY, f64::min);
            let step = left.min(until_one_is_done);
            self.total += step;
            left -= step;
            for lines in &mut self.lines {
                let part = if lines.is_empty() { 0.0 } else { part(lines) };
                for line in lines.values_mut() {
                    line[0].1 -= step * part;
                    if line[0].1 <= 1e-6 {
                        self.done.insert(line[0].0, self.total);
                        line.pop_front();
                    }
                }
                lines.retain(|_, line| !line.is_empty());
            }
        }
    }
}

#[derive(Clone, Debug)]
struct Reader {
    /// Bytes of each of its reads.
    bytes: u64,
    reads: u64,
    /// When its first read arrives, and how long after it the next, in bytes that are served meanwhile.
    start: u64,
    period: u64,
}

struct Waiting {
    before: f64,
    deadline: Time,
}

/// Serves all of it; gives the worst of bytes served before a read over its fair share, and how many were out of time.
fn run(readers: &[Reader], rate: u64, patience: Duration) -> (f64, usize) {
    let time = |bytes: u64| Duration::from_nanos(bytes.saturating_mul(1_000_000_000) / rate);
    let mut arrivals: Vec<(Time, u64, u64)> = Vec::new();
    for (handle, reader) in (0u64..).zip(readers) {
        let at = |read: u64| Time(0).after(time(reader.start + read * reader.period));
        arrivals.extend((0..reader.reads).map(|read| (at(read), handle, reader.bytes)));
    }
    arrivals.sort_unstable_by(|one, other| other.cmp(one));
    let all = arrivals.len();
    let (mut queue, mut fluid) = (FairQueue::default(), Fluid::default());
    let mut waiting: HashMap<u64, Waiting> = HashMap::new();
    let (mut now, mut served, mut total, mut worst, mut late, mut next) = (Time(0), 0usize, 0f64, 0f64, 0usize, 0u64);
    let largest = readers.iter().map(|reader| reader.bytes).max().unwrap_or(0) as f64;
    loop {
        while let Some(&(at, handle, bytes)) = arrivals.last().filter(|(at, _, _)| *at <= now) {
            arrivals.pop();
            next += 1;
            let (id, class) = (next << 8 | handle, Class::of(bytes));
            assert!(queue.push(at, id, handle, class, bytes));
            fluid.push(id, handle, class, bytes);
            waiting.insert(id, Waiting { before: total, deadline: now.after(patience) });
        }
        let expired: Vec<u64> = waiting.iter().filter(|(_, w)| w.deadline <= now).map(|(&id, _)| id).collect();
        for id in expired {
            queue.remove(now, id);
            fluid.remove(id);
            fluid.done.remove(&id);
            waiting.remove(&id);
            late += 1;
        }
        let Some((id, class)) = queue.first() else {
            match arrivals.last() {
                Some(&(at, _, _)) => now = now.max(at),
                None => break,
            }
            continue;
        };
        let bytes = readers[(id & 0xff) as usize].bytes;
        assert_eq!(class, Class::of(bytes));
        let entry = waiting.remove(&id).expect("only what waits is served");
        queue.served(now, id);
        fluid.serve(bytes);
        served += 1;
        // Where the ideal is not done with it yet, its share is at least what was served so far.
        let mine = total + bytes as f64 - entry.before;
        let fair = fluid.done.remove(&id).map_or(mine, |done| done - entry.before);
        worst = worst.max((total - entry.before) / fair.max(largest));
        total += bytes as f64;
        now = now.after(time(bytes));
    }
    assert_eq!(served + late, all, "every read is served or out of time");
    let account = queue.account();
    assert_eq!((account.waiting_small, account.waiting_large, account.waiting_bytes), (0, 0, 0));
    assert_eq!((account.served_small + account.served_large) as usize, served);
    assert!(queue.is_empty() && queue.first().is_none());
    assert!(queue.classes.iter().all(|flows| flows.turns.is_empty() && flows.lines.is_empty()));
    (worst, late)
}

fn reader() -> impl Strategy<Value = Reader> {
    let pages = prop_oneof![1u64..=16, 17u64..=256];
    let period = prop_oneof![Just(0u64), 1u64..3_000_000];
    (pages, 1u64..40, 0u64..20_000_000, period).prop_map(|(pages, reads, start, period)| Reader {
        bytes: pages * 4 * KIB,
        reads,
        start,
        period,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, rng_seed: RngSeed::Fixed(6), ..ProptestConfig::default() })]
    #[test]
    fn no_read_sees_more_than_three_times_its_fair_share_served_before_it(
        readers in proptest::collection::vec(reader(), 1..40)
    ) {
        let (worst, late) = run(&readers, 1 << 30, Duration::from_secs(1000));
        prop_assert!(worst <= 3.0, "{}", worst);
        prop_assert_eq!(late, 0);
    }

    #[test]
    fn every_read_is_served_or_out_of_time(
        readers in proptest::collection::vec(reader(), 1..40), patience in 1u64..2000
    ) {
        // 16 MiB a second: some of them run out of time.
        run(&readers, 16 * MIB, Duration::from_millis(patience));
    }

    #[test]
    fn the_ledger_keeps_its_limits(
        megabytes in 3u64..64,
        steps in proptest::collection::vec((0u8..4, 0u32..=8, any::<u8>()), 1..300),
    ) {
        let mut ledger = Ledger::new(megabytes * MIB);
        let mut held: Vec<(Use, u64)> = Vec::new();
        let mut unread = 0u64;
        for (kind, class, pick) in steps {
            let bytes = (4 * KIB) << class;
            let what = match kind {
                0 => Use::Read(Class::Small),
                1 => Use::Read(Class::Large),
                2 => Use::Ahead,
                _ => {
                    if !held.is_empty() {
                        let (what, bytes) = held.swap_remove(pick as usize % held.len());
                        ledger.give(what, bytes);
                        unread = if what == Use::Ahead { unread + bytes } else { unread / 2 };
                    }
                    continue;
                }
            };
            let reads = ledger.held() - ledger.ahead();
            if ledger.fits(what, bytes, unread) {
                ledger.take(what, bytes);
                held.push((what, bytes));
                if what == Use::Ahead {
                    prop_assert!(ledger.ahead() + unread <= (megabytes * MIB - reads) / 2);
                }
            } else if what == Use::Read(Class::Small) {
                prop_assert!(ledger.held() + bytes > ledger.limit());
            }
            prop_assert!(ledger.held() <= megabytes * MIB / 4 * 3);
        }
    }
}

#[test]
fn one_reader_of_a_mebibyte_beside_one_of_4_kib() {
    let mut queue = FairQueue::default();
    for n in 0..32 {
        assert!(queue.push(Time(0), n, 1, Class::Large, MIB));
    }
    queue.served(Time(0), 0);
    // However much waits: the small one is next.
    assert!(queue.push(Time(0), 100, 2, Class::Small, 4 * KIB));
    assert_eq!(queue.first(), Some((100, Class::Small)));
    queue.served(Time(7), 100);
    assert_eq!(queue.first(), Some((1, Class::Large)));
    assert_eq!(queue.account().waiting_bytes, 31 * MIB);
}

#[test]
fn small_reads_keep_half_of_the_bytes_and_so_do_large_ones() {
    let reader = |n| Reader { bytes: if n < 38 { MIB } else { 4 * KIB }, reads: 8, start: n, period: 0 };
    let readers: Vec<Reader> = (0..40).map(reader).collect();
    assert!(run(&readers, 1 << 30, Duration::from_secs(100)).0 <= 3.0);
    let mut queue = FairQueue::default();
    for n in 0..1000 {
        assert!(queue.push(Time(0), n, n % 50, Class::Small, 64 * KIB));
    }
    for n in 1000..1020 {
        assert!(queue.push(Time(0), n, 60, Class::Large, MIB));
    }
    let mut bytes = [0u64; 2];
    for _ in 0..200 {
        let (id, class) = queue.first().unwrap();
        bytes[class.place()] += if class == Class::Small { 64 * KIB } else { MIB };
        queue.served(Time(0), id);
    }
    assert!(bytes[0].abs_diff(bytes[1]) <= MIB, "{bytes:?}");
}

#[test]
fn a_handle_with_much_waiting_does_not_delay_one_with_little() {
    let mut queue = FairQueue::default();
    for n in 0..1000 {
        assert!(queue.push(Time(0), n, 1, Class::Large, MIB));
    }
    for n in 0..10 {
        queue.served(Time(0), n);
    }
    for n in 1000..1003 {
        assert!(queue.push(Time(0), n, 2, Class::Large, MIB));
    }
    let order: Vec<u64> = (0..6)
        .map(|_| {
            let id = queue.first().unwrap().0;
            queue.served(Time(0), id);
            id
        })
        .collect();
    let last = order.iter().position(|&id| id == 1002);
    assert!(last.is_some(), "{order:?}: the second handle is served every other time");
}

#[test]
fn going_away_and_coming_back_gains_nothing() {
    // One keeps ten waiting, the other one at a time: each gets half.
    let mut queue = FairQueue::default();
    for n in 0..100 {
        assert!(queue.push(Time(0), n, 1, Class::Large, MIB));
    }
    let (mut mine, mut next) = (0, 1000);
    assert!(queue.push(Time(0), next, 2, Class::Large, MIB));
    for _ in 0..60 {
        let id = queue.first().unwrap().0;
        queue.served(Time(0), id);
        if id == next {
            mine += 1;
            next += 1;
            assert!(queue.push(Time(0), next, 2, Class::Large, MIB));
        }
    }
    assert!((25..=35).contains(&mine), "{mine}");
}

#[test]
fn i6_a_full_queue_refuses_and_what_was_taken_out_of_the_middle_is_passed_over() {
    let mut queue = FairQueue::default();
    for n in 0..MAX_WAITING as u64 {
        assert!(queue.push(Time(0), n, n % 3, Class::Small, KIB));
    }
    assert!(!queue.push(Time(0), 1 << 40, 1, Class::Large, MIB));
    assert_eq!(queue.account().refused, 1);
    for n in 1..MAX_WAITING as u64 - 1 {
        queue.remove(Time(5), n);
    }
    assert!(queue.contains(0) && !queue.contains(1) && queue.len() == 2);
    let mut rest = Vec::new();
    while let Some((id, _)) = queue.first() {
        rest.push(id);
        queue.served(Time(9), id);
    }
    rest.sort_unstable();
    assert_eq!(rest, [0, MAX_WAITING as u64 - 1]);
    assert_eq!(queue.account().longest_wait, Duration::from_nanos(9));
    assert!(queue.push(Time(0), 1, 1, Class::Large, MIB));
    queue.clear();
    assert_eq!((queue.account().waiting_large, queue.account().waiting_bytes, queue.first()), (0, 0, None));
}

#[test]
fn i6_a_small_arena_lets_one_large_read_in_and_keeps_room_for_small_ones() {
    let mut ledger = Ledger::new(16 * MIB);
    let large = Use::Read(Class::Large);
    while ledger.fits(large, MIB, 0) {
        ledger.take(large, MIB);
    }
    assert_eq!(ledger.held(), 11 * MIB);
    assert!(ledger.fits(Use::Read(Class::Small), 64 * KIB, 0) && ledger.fits_overtaking(64 * KIB));
    assert!(!ledger.fits(Use::Ahead, 64 * KIB, 0));
    ledger.take(Use::Read(Class::Small), MIB);
    assert!(!ledger.fits_overtaking(4 * KIB) && !ledger.fits(Use::Read(Class::Small), 4 * KIB, 0));
    let mut tiny = Ledger::new(3 * MIB);
    assert!(tiny.fits(large, 2 * MIB, 0), "one must be possible");
    tiny.take(large, 2 * MIB);
    assert!(!tiny.fits(large, 64 * KIB, 0) && tiny.fits_overtaking(64 * KIB));
    let ledger = Ledger::new(16 * MIB);
    assert!(ledger.fits(Use::Ahead, MIB, 7 * MIB) && !ledger.fits(Use::Ahead, MIB, 8 * MIB), "unread bytes count");
}
