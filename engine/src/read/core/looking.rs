//! Checks by READ of the slot: when one may be made, and what is made of what it brought.
//!
//! Guarantees: as for checks by frame, and those of [`crate::read::lease`]. Whatever a READ leaves open is asked by frame: no
//! check is ever left out, and none is guessed.

use super::Core;
use super::small::{Kind, Member, Small};
use crate::clock::Time;
use crate::rail::{MAX_LOOK, Slots};
use crate::read::lease::{CheckWay, Lease, Pace, Verdict, verdict};

/// So often a word that leaves it open is READ; the next time a frame asks, which the server holds until the publish has ended.
const LOOKS: u32 = 3;

/// What decides how checks are made.
#[derive(Debug, Default)]
pub(super) struct Checking {
    pub(super) way: CheckWay,
    pub(super) lease: Lease,
    pub(super) pace: Pace,
}

impl Checking {
    /// The slots to READ for these checks; `None`: a frame has to ask.
    pub(super) fn slots(&mut self, now: Time, there: Option<Slots>, members: &[Member]) -> Option<Vec<u32>> {
        let there = there.filter(|_| members.len() <= MAX_LOOK)?;
        let known = |member: &Member| {
            let proof = &member.proof;
            proof.incarnation == there.incarnation
                && u64::from(proof.slot) < there.count
                && self.lease.holds(proof.incarnation, now)
        };
        if members.is_empty() || !members.iter().all(known) || !self.pace.prefers_read(self.way, now) {
            return None;
        }
        Some(members.iter().map(|member| member.proof.slot).collect())
    }
}

impl Core {
    /// How versions are checked from now on.
    pub fn check_way(&mut self, way: CheckWay) {
        self.checking.way = way;
    }

    /// Nanoseconds that a check by READ and one by frame took of late; `None`: not measured.
    pub fn check_pace(&self) -> [Option<u64>; 2] {
        self.checking.pace.measured()
    }

    /// While words are READ the lease is kept.
    pub(super) fn renew_lease(&mut self, now: Time) {
        let deadline = now.after(railfs_proto::limits::LEASE);
        if self.checking.lease.renew(now) {
            self.new_small(now, Kind::Renew, deadline);
        }
    }

    /// A READ failed: a frame asks, by whichever rail.
    pub(super) fn look_failed(&mut self, now: Time, id: u64, rail: usize) {
        if let Some(small) = self.smalls.get_mut(&id) {
            small.by_frame = true;
        }
        self.small_failed(now, id, rail);
    }

    /// The words are here.
    pub(super) fn looked(&mut self, now: Time, id: u64, words: &[u64]) {
        let Some(Small { kind, posted, mut looks, .. }) = self.smalls.get(&id).cloned() else { return };
        let Kind::Check(members) = kind else { return };
        let mut open = Vec::new();
        let mut by_frame = true;
        let believed = words.len() == members.len()
            && members.iter().all(|member| self.checking.lease.holds(member.proof.incarnation, now));
        if believed {
            self.checking.pace.read(now.since(posted));
            for (member, &word) in members.into_iter().zip(words) {
                match verdict(member.proof.value, word, member.proof.incarnation) {
                    Verdict::Current => self.current(&member.waiters),
                    Verdict::Moved => self.recheck(now, &member.object, member.waiters),
                    Verdict::Open => open.push(member),
                }
            }
            looks += 1;
            by_frame = looks >= LOOKS;
        } else {
            // Nobody knows whose memory that was: the server has to say it itself.
            open = members;
        }
        if open.is_empty() {
            self.smalls.remove(&id);
        } else {
            self.counts.check_reads_again += 1;
            if let Some(small) = self.smalls.get_mut(&id) {
                (small.kind, small.attempt) = (Kind::Check(open), None);
                (small.looks, small.by_frame) = (looks, by_frame);
            }
            self.post_small(now, id);
        }
        self.send_gathered(now);
    }
}
