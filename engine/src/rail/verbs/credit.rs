//! How many messages may be sent on a queue pair: the receives that the other side has posted. Pure.
//!
//! Guarantees: never more messages under way than the other side has receives; the last [`RESERVE`] are kept for a message
//! that tells it of ours, so that two sides that wait for each other cannot be.

/// Receives that are kept for messages which bring credit.
pub(super) const RESERVE: u32 = 2;

/// See the module. The counters wrap.
#[derive(Clone, Copy, Debug)]
pub(super) struct Credit {
    /// Receives that the other side has posted, as far as it has told.
    granted: u32,
    /// Messages sent.
    sent: u32,
    /// Receives that we have posted.
    posted: u32,
    /// As far as we have told.
    told: u32,
    depth: u32,
}

impl Credit {
    /// At the start each side has posted as many as it said when the rail joined.
    pub(super) fn new(ours: u32, theirs: u32) -> Credit {
        Credit { granted: theirs, sent: 0, posted: ours, told: ours, depth: ours }
    }

    fn available(&self) -> u32 {
        self.granted.wrapping_sub(self.sent)
    }

    fn must_tell(&self) -> bool {
        self.posted.wrapping_sub(self.told) >= self.depth / 2
    }

    /// Whether a message may be sent now.
    pub(super) fn may_send(&self) -> bool {
        self.available() > if self.must_tell() { 0 } else { RESERVE }
    }

    /// Whether one must be sent for the credit's sake alone, when nothing else is to be sent.
    pub(super) fn wants_to_tell(&self) -> bool {
        self.must_tell() && self.available() > 0
    }

    /// A message goes out; gives what it says of our receives.
    pub(super) fn send(&mut self) -> u32 {
        self.sent = self.sent.wrapping_add(1);
        self.told = self.posted;
        self.posted
    }

    /// We posted a receive again.
    pub(super) fn post(&mut self) {
        self.posted = self.posted.wrapping_add(1);
    }

    /// The other side has told; false where that cannot be.
    pub(super) fn told(&mut self, posted: u32) -> bool {
        // Messages arrive in order: it never goes back, and never far ahead.
        if posted.wrapping_sub(self.granted) > u32::from(u16::MAX) || posted.wrapping_sub(self.sent) > 1 << 20 {
            return false;
        }
        self.granted = posted;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    /// Two ends that want to send; messages under way as (what they tell).
    fn run(depth: u32, script: &[u8]) -> Result<(), TestCaseError> {
        let mut ends = [Credit::new(depth, depth), Credit::new(depth, depth)];
        let mut ways: [VecDeque<u32>; 2] = Default::default();
        let send = |ends: &mut [Credit; 2], ways: &mut [VecDeque<u32>; 2], who: usize| {
            if ends[who].may_send() {
                let told = ends[who].send();
                ways[who].push_back(told);
                return true;
            }
            false
        };
        let arrive = |ends: &mut [Credit; 2], ways: &mut [VecDeque<u32>; 2], who: usize| {
            if let Some(told) = ways[1 - who].pop_front() {
                ends[who].post();
                assert!(ends[who].told(told));
                if ends[who].wants_to_tell() {
                    let told = ends[who].send();
                    ways[who].push_back(told);
                }
            }
        };
        for step in script {
            let who = usize::from(step & 1);
            if step & 2 == 0 {
                send(&mut ends, &mut ways, who);
            } else {
                arrive(&mut ends, &mut ways, who);
            }
            prop_assert!(ways.iter().all(|way| way.len() as u32 <= depth), "more under way than receives");
        }
        // Whatever came before: when all has arrived both may send again.
        while ways.iter().any(|way| !way.is_empty()) {
            arrive(&mut ends, &mut ways, 0);
            arrive(&mut ends, &mut ways, 1);
        }
        prop_assert!(send(&mut ends, &mut ways, 0) && send(&mut ends, &mut ways, 1), "stuck: {ends:?}");
        Ok(())
    }

    proptest! {
        #[test]
        fn i6_there_is_always_a_receive_and_nobody_gets_stuck(
            depth in 8u32..70, script in proptest::collection::vec(any::<u8>(), 0..2000)
        ) {
            run(depth, &script)?;
            // Both send all they may before anything arrives: neither has told the other of a receive since.
            run(depth, &[0, 1].repeat(2 * depth as usize))?;
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let mut credit = Credit::new(64, 64);
        assert!(!credit.told(63));
        assert!(!credit.told(1 << 30));
        assert!(credit.told(65));
    }
}
