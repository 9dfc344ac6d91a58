//! What a sequence is made of.
//!
//! Guarantees: steps are plain data and mean something in any order, so that leaving some out leaves a sequence.

use super::DESCRIPTORS;
use proptest::prelude::*;

/// Names that steps choose from: files beside and below each other, one that sorts between a directory and what lies below
/// it, one of odd bytes, and a long one.
pub const NAMES: [&[u8]; 9] =
    [b"f", b"d", b"d/x", b"d/y", b"d.x", b"d/e", b"d/e/z", b"\xff \n'%", b"d/long-long-long-long-long-long-long-long"];

/// Bytes of a page, the smallest that there is.
pub const PAGE: u64 = 4096;
/// Bytes of a stripe.
pub const STRIPE: u64 = 4 * PAGE;

/// Sizes around page, stripe and width x stripe.
pub const SIZES: [u64; 16] = [
    0,
    1,
    511,
    PAGE - 1,
    PAGE,
    PAGE + 1,
    3 * PAGE + 5,
    STRIPE - 1,
    STRIPE,
    STRIPE + 1,
    2 * STRIPE - 1,
    2 * STRIPE,
    2 * STRIPE + 1,
    5 * STRIPE + 777,
    64 * 1024,
    100_003,
];

/// A condition of a put or delete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// None.
    Always,
    /// Nothing has the name.
    Absent,
    /// The version that is current.
    Current,
    /// A version that is not.
    Other,
}

/// Where in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The start.
    Start,
    /// So many 65,536ths of the size.
    Part(u16),
    /// So many bytes before the end (not before the start).
    Before(u16),
    /// So many bytes beyond the end.
    Beyond(u16),
    /// Far beyond any end.
    Far,
}

impl Place {
    /// The offset in a file of that size.
    pub fn offset(self, size: u64) -> u64 {
        match self {
            Place::Start => 0,
            Place::Part(part) => (u128::from(size) * u128::from(part) / 65_536).try_into().unwrap_or(0),
            Place::Before(bytes) => size.saturating_sub(bytes.into()),
            Place::Beyond(bytes) => size + u64::from(bytes),
            Place::Far => 1 << 62,
        }
    }
}

/// One step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Puts.
    Put {
        /// Index into [`NAMES`].
        name: usize,
        /// Index into [`SIZES`].
        size: usize,
        /// Components, 1 to 3.
        width: u32,
        /// Its condition.
        when: When,
    },
    /// Deletes.
    Delete {
        /// Index into [`NAMES`].
        name: usize,
        /// Its condition.
        when: When,
    },
    /// Lists a directory, or what is none.
    List {
        /// Index into [`NAMES`]; beyond it: the top.
        name: usize,
        /// Entries at once.
        room: usize,
        /// With attributes.
        plus: bool,
    },
    /// `stat` by name.
    Stat {
        /// Index into [`NAMES`].
        name: usize,
        /// Of a name below it that never is.
        below: bool,
    },
    /// Opens by name.
    Open {
        /// Which number it gets.
        descriptor: usize,
        /// Index into [`NAMES`].
        name: usize,
    },
    /// Opens the same name again.
    Reopen {
        /// Which.
        descriptor: usize,
    },
    /// Closes.
    Close {
        /// Which.
        descriptor: usize,
    },
    /// `fstat`.
    Fstat {
        /// Which.
        descriptor: usize,
    },
    /// `pread`.
    Read {
        /// Which.
        descriptor: usize,
        /// From where.
        place: Place,
        /// Bytes.
        length: usize,
    },
    /// A read through the kernel's page cache.
    Map {
        /// Which.
        descriptor: usize,
        /// From where.
        place: Place,
        /// Bytes.
        length: usize,
    },
    /// `lseek`.
    Seek {
        /// Which.
        descriptor: usize,
        /// From where.
        place: Place,
        /// SEEK_DATA, not SEEK_HOLE.
        data: bool,
    },
    /// Opens for writing.
    Write {
        /// Index into [`NAMES`].
        name: usize,
    },
    /// Mounts again.
    Remount,
    /// The server ends and comes back.
    Restart {
        /// Without notice.
        crash: bool,
    },
    /// A byte on disk changes. Never chosen at random: it is how the model is shown to notice.
    Damage {
        /// Index into [`NAMES`].
        name: usize,
    },
}

fn name() -> impl Strategy<Value = usize> {
    0..NAMES.len()
}
fn descriptor() -> impl Strategy<Value = usize> {
    0..DESCRIPTORS
}
fn when() -> impl Strategy<Value = When> {
    prop_oneof![8 => Just(When::Always), 1 => Just(When::Absent), 1 => Just(When::Current), 1 => Just(When::Other)]
}
fn place() -> impl Strategy<Value = Place> {
    prop_oneof![
        4 => Just(Place::Start),
        8 => any::<u16>().prop_map(Place::Part),
        3 => (0u16..9000).prop_map(Place::Before),
        2 => (0u16..9000).prop_map(Place::Beyond),
        1 => Just(Place::Far),
    ]
}
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![2 => 1usize..64, 3 => 1usize..9000, 2 => Just(1usize << 17), 1 => 1usize..(1 << 17)]
}

/// One step. `rare` (10 or more): one step in about so many is a remount, and one a restart.
fn step(rare: u32) -> impl Strategy<Value = Step> {
    // Weights of the others add up to about 100.
    let rest = (rare / 10).max(1);
    prop_oneof![
        20 * rest => (name(), 0..SIZES.len(), 1u32..4, when())
            .prop_map(|(name, size, width, when)| Step::Put { name, size, width, when }),
        9 * rest => (name(), when()).prop_map(|(name, when)| Step::Delete { name, when }),
        9 * rest => (0..NAMES.len() + 3, 1usize..8, any::<bool>())
            .prop_map(|(name, room, plus)| Step::List { name, room, plus }),
        9 * rest => (name(), proptest::bool::weighted(0.1)).prop_map(|(name, below)| Step::Stat { name, below }),
        14 * rest => (descriptor(), name()).prop_map(|(descriptor, name)| Step::Open { descriptor, name }),
        4 * rest => descriptor().prop_map(|descriptor| Step::Reopen { descriptor }),
        3 * rest => descriptor().prop_map(|descriptor| Step::Close { descriptor }),
        3 * rest => descriptor().prop_map(|descriptor| Step::Fstat { descriptor }),
        20 * rest => (descriptor(), place(), length())
            .prop_map(|(descriptor, place, length)| Step::Read { descriptor, place, length }),
        6 * rest => (descriptor(), place(), length())
            .prop_map(|(descriptor, place, length)| Step::Map { descriptor, place, length }),
        2 * rest => (descriptor(), place(), any::<bool>())
            .prop_map(|(descriptor, place, data)| Step::Seek { descriptor, place, data }),
        rest => name().prop_map(|name| Step::Write { name }),
        10 => Just(Step::Remount),
        10 => any::<bool>().prop_map(|crash| Step::Restart { crash }),
    ]
}

/// A sequence of 20 to 40 steps, about one in `rare` (10 or more) a remount, and one a restart of the server.
pub fn sequence(rare: u32) -> impl Strategy<Value = Vec<Step>> {
    proptest::collection::vec(step(rare), 20..=40)
}
