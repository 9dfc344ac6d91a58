//! The kinds of fault that a schedule may meet, by name, and how many schedules met each.

macro_rules! kinds {
    ($($kind:ident $name:literal,)*) => {
        /// One kind. It counts as met only where it took effect.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind {
            $(#[doc = $name] $kind,)*
        }

        /// All of them.
        pub const ALL: &[(Kind, &str)] = &[$((Kind::$kind, $name),)*];
    };
}

kinds! {
    Publish "a publish while a read was under way",
    Held "a check or lookup held while its name was published",
    Delay "frames delayed by up to 0.4 s",
    Loss "a request or reply lost",
    Late "bytes landed after their request had ended",
    Double "a completion came twice",
    DoubleEvent "a reply was told twice",
    Uncertain "a completion was lost and not told",
    Told "a completion queue overflowed",
    Torn "a word came torn",
    PairDeath "a queue pair died",
    Cut "a rail went dead, and nobody was told",
    Port "a port went down and came up",
    Device "a device failed",
    StrayWrite "a WRITE that hit no window",
    StrayReply "a reply or word that nobody waits for",
    Hang "the server hung and lost what came",
    Pause "the server slept and woke up",
    SlowAnswer "an answer held back by up to 4 s",
    Refused "a request refused (busy, over budget, expired)",
    Restart "the server stopped and another run began",
    Crash "the server died and another run began",
    Takeover "the server died, and its card went on answering",
    Undecided "a server died while it published",
    Corrupt "a page came damaged",
    Short "a reply with fewer bytes than asked for",
    Reclaimed "a version was reclaimed under a reader",
    Pressure "the arena was nearly full",
    Waited "a read waited for memory",
    Lease "the lease ran out while words were READ",
    Suspend "the client slept for up to 5 s",
    Outage "nobody answered, and reads were told so",
}

/// Which kinds a schedule met, a bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Met(u64);

impl Met {
    /// This one, too.
    pub fn add(&mut self, kind: Kind) {
        self.0 |= 1 << kind as u64;
    }

    /// If `when`.
    pub fn add_if(&mut self, kind: Kind, when: bool) {
        self.0 |= u64::from(when) << kind as u64;
    }

    /// Whether it was.
    pub fn has(&self, kind: Kind) -> bool {
        self.0 & (1 << kind as u64) != 0
    }
}

/// Schedules, by kind.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// All.
    pub schedules: u64,
    /// Events of all.
    pub events: u64,
    /// Fewest events of one.
    pub fewest: Option<u64>,
    /// Reads answered with bytes, with ESTALE, with other errors.
    pub answered: [u64; 3],
    met: Vec<u64>,
}

impl Table {
    /// One more schedule.
    pub fn add(&mut self, outcome: &super::Outcome) {
        self.met.resize(ALL.len(), 0);
        self.schedules += 1;
        self.events += outcome.events;
        self.fewest = Some(self.fewest.map_or(outcome.events, |fewest| fewest.min(outcome.events)));
        self.answered.iter_mut().zip(outcome.answered).for_each(|(sum, count)| *sum += count);
        for (count, (kind, _)) in self.met.iter_mut().zip(ALL) {
            *count += u64::from(outcome.met.has(*kind));
        }
    }

    /// Name of each kind, and of how many schedules in ten thousand it was part.
    pub fn shares(&self) -> Vec<(&'static str, u64)> {
        let share = |count: &u64| count * 10_000 / self.schedules.max(1);
        ALL.iter().zip(&self.met).map(|((_, name), count)| (*name, share(count))).collect()
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let per = |sum: u64| sum / self.schedules.max(1);
        let [bytes, stale, errors] = self.answered;
        writeln!(
            f,
            "{} schedules, {} events each (at least {})",
            self.schedules,
            per(self.events),
            self.fewest.unwrap_or(0)
        )?;
        writeln!(f, "reads: {bytes} answered with bytes, {stale} ESTALE, {errors} other errors")?;
        for (name, share) in self.shares() {
            writeln!(f, "{:>6}.{:02} %  {name}", share / 100, share % 100)?;
        }
        Ok(())
    }
}
