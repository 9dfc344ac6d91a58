// The bugs that can be planted, for build.rs and for the tests. In a new text `PLANTED` stands for "this bug is switched on".

/// One bug.
#[derive(Clone, Copy, Debug)]
pub struct Bug {
    /// By which it is switched on.
    pub name: &'static str,
    /// What is wrong then.
    pub what: &'static str,
    /// It is found within so many seeds, from 0 on.
    pub seeds: u64,
    /// File of the engine, text in it, and text in its place.
    pub changes: &'static [(&'static str, &'static str, &'static str)],
}

/// All of them: at least one of each kind that the invariants are about.
pub const BUGS: &[Bug] = &[
    Bug {
        name: "joins_posted",
        what: "a read joins a check that was posted before it arrived",
        seeds: 3000,
        changes: &[(
            "read/core/small.rs",
            "        match self.gathering.iter_mut().find(same) {",
            "        if PLANTED {
                for small in self.smalls.values_mut().filter(|small| small.attempt.is_some()) {
                    if let Kind::Check(members) = &mut small.kind
                        && let Some(member) = members.iter_mut().find(same)
                    {
                        return member.waiters.push(waiter);
                    }
                }
            }
            match self.gathering.iter_mut().find(same) {",
        )],
    },
    Bug {
        name: "joins_fetch",
        what: "a read that joins a fetch takes the check that was posted with it for its own",
        seeds: 2000,
        changes: &[(
            "read/core/fetch.rs",
            "        fetch.waiters.push(read);",
            "        fetch.waiters.push(read);
            if PLANTED {
                fetch.covers.push(read);
            }",
        ), (
            "read/core/reads.rs",
            "        if !any_fresh && !checked {",
            "        if !any_fresh && !checked && (!PLANTED || joined.is_empty()) {",
        )],
    },
    Bug {
        name: "no_fence",
        what: "memory counts as free at the time-out, without its fence",
        seeds: 200,
        changes: &[(
            "read/core.rs",
            "let held = matches!(hand, Hand::Held);",
            "let held = matches!(hand, Hand::Held) && !PLANTED;",
        )],
    },
    Bug {
        name: "gives_unfenced",
        what: "a rail gives memory back at the time-out, without its fence",
        seeds: 200,
        changes: &[(
            "rail/sim/link.rs",
            "            Some((extent, length)) => {
                self.held.insert(id, Held { extent, length, until: fence });
                Hand::Held
            }",
            "            Some((extent, _)) if PLANTED => self.fenced(extent).map_or(Hand::None, Hand::Fenced),
            Some((extent, length)) => {
                self.held.insert(id, Held { extent, length, until: fence });
                Hand::Held
            }",
        )],
    },
    Bug {
        name: "takes_stale_reply",
        what: "the reply to an attempt that was given up, on a connection that is dead to us, is taken",
        seeds: 200,
        changes: &[(
            "read/core.rs",
            "        entry.flight = Flight::Gone;
        self.actions.push(Action::Cancel { rail, id: attempt });",
            "        if !PLANTED {
            entry.flight = Flight::Gone;
        }
        self.actions.push(Action::Cancel { rail, id: attempt });",
        )],
    },
    Bug {
        name: "unverified",
        what: "a page is not compared with its checksum",
        seeds: 200,
        changes: &[(
            "read/landed.rs",
            "if page_checksum(id, page) != self.checksums[index] {",
            "if !PLANTED && page_checksum(id, page) != self.checksums[index] {",
        )],
    },
    Bug {
        name: "no_lease",
        what: "a word that was READ counts without the lease",
        seeds: 1000,
        changes: &[(
            "read/lease.rs",
            "incarnation == self.incarnation && self.sent.is_some_and(|sent| now < sent.after(self.term))",
            "incarnation == self.incarnation && (PLANTED || self.sent.is_some_and(|sent| now < sent.after(self.term)))",
        )],
    },
    Bug {
        name: "lease_of_reply",
        what: "the lease runs from when the answer came, not from when it was asked for",
        seeds: 20_000,
        changes: &[(
            "read/core/fetch.rs",
            "self.checking.lease.answered(entry.incarnation, entry.posted);",
            "self.checking.lease.answered(entry.incarnation, if PLANTED { now } else { entry.posted });",
        ), (
            "read/core/small.rs",
            "self.checking.lease.answered(entry.incarnation, entry.posted);",
            "self.checking.lease.answered(entry.incarnation, if PLANTED { now } else { entry.posted });",
        )],
    },
    Bug {
        name: "believes_torn",
        what: "a word that fails its check bits is taken for the one that is expected",
        seeds: 2000,
        changes: &[(
            "read/lease.rs",
            "let Some(now) = Slot::decode(word, incarnation) else { return Verdict::Open };",
            "let Some(now) = Slot::decode(word, incarnation) else {
                return if PLANTED { Verdict::Current } else { Verdict::Open };
            };",
        )],
    },
    Bug {
        name: "believes_busy",
        what: "a word that says that a publish is under way counts as current",
        seeds: 200,
        changes: &[(
            "read/lease.rs",
            "if now.in_progress > 0 && now.counter == then.counter => Verdict::Open,",
            "if now.in_progress > 0 && (PLANTED || now.counter == then.counter) => {
                if PLANTED { Verdict::Current } else { Verdict::Open }
            }",
        )],
    },
    Bug {
        name: "keeps_budget",
        what: "what a request that failed had taken of the budget is not given back",
        seeds: 200,
        changes: &[(
            "read/core.rs",
            "                } else {
                    self.flights.remove(&id);
                    self.ledger.give(entry.held, u64::from(entry.memory));
                }",
            "                } else {
                    self.flights.remove(&id);
                    if !PLANTED {
                        self.ledger.give(entry.held, u64::from(entry.memory));
                    }
                }",
        )],
    },
    Bug {
        name: "no_deadline",
        what: "the deadline of a read is forgotten",
        seeds: 200,
        changes: &[(
            "read/core.rs",
            "(read.deadline <= now && !read.finishing)",
            "(read.deadline <= now && !read.finishing && !PLANTED)",
        )],
    },
    Bug {
        name: "sleeps_on_calls",
        what: "the timer sleeps while a call waits for which nothing is sent any more",
        seeds: 5_000,
        changes: &[("read/core.rs", "&& self.calls.is_empty()", "&& (PLANTED || self.calls.is_empty())")],
    },
    Bug {
        name: "short_bytes",
        what: "fewer bytes than were asked for count as all of them",
        seeds: 200,
        changes: &[(
            "read/core/fetch.rs",
            "            let checksums = check_fetch_reply(&fetch.request, &reply, bulk, page_size)
",
            "            let checked = check_fetch_reply(&fetch.request, &reply, bulk, page_size);
            let checksums = if PLANTED { Ok(reply.checksums.clone()) } else { checked }
",
        )],
    },
    Bug {
        name: "loses_read",
        what: "a read whose rail fails is not sent on by another",
        seeds: 200,
        changes: &[(
            "read/core/fetch.rs",
            "        fetch.attempt = None;
        fetch.retry_at = now;
        if !fetch.avoid.contains(&rail) {",
            "        fetch.attempt = None;
        fetch.retry_at = now;
        if PLANTED {
            fetch.retry_at = Time::NEVER;
            return;
        }
        if !fetch.avoid.contains(&rail) {",
        )],
    },
    Bug {
        name: "frees_twice",
        what: "a completion that comes twice gives back twice",
        seeds: 200,
        changes: &[(
            "read/core.rs",
            "                let Some(entry) = self.flights.remove(&id).filter(|entry| entry.rail == rail) else {
                    self.counts.stale_replies += 1;
                    return;
                };
                self.heard(now);",
            "                let Some(entry) = self.flights.remove(&id).filter(|entry| entry.rail == rail) else {
                    self.counts.stale_replies += 1;
                    if PLANTED && self.ledger.held() > 0 {
                        self.ledger.give(Use::Read(crate::read::admission::Class::Small), 4096);
                    }
                    return;
                };
                self.heard(now);",
        )],
    },
    Bug {
        name: "stale_proof",
        what: "a lookup that finds another version counts as a check of the old one",
        seeds: 200,
        changes: &[(
            "read/core/small.rs",
            "if descriptor.version == object.descriptor.version => {",
            "if PLANTED || descriptor.version == object.descriptor.version => {",
        )],
    },
];
