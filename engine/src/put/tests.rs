use super::*;
use crate::rail::Sent;
use bytes::Bytes;
use railfs_proto::descriptor::{Attributes, Id, Replica};
use railfs_proto::layout::Striping;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

const M: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(20);

struct Zeros(u64);
impl Source for Zeros {
    fn size(&self) -> u64 {
        self.0
    }
    fn read_exact_at(&self, _: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        buffer.fill(0);
        Ok(())
    }
}

type Said = (u64, Bulk, Box<dyn FnOnce(Sent) -> Bytes + Send>);

/// Keeps what was to be sent, as a socket that does not drain does.
struct Keep(u64, Sender<Said>);
impl Replier for Keep {
    fn reply(self: Box<Self>, bulk: Bulk, message: Box<dyn FnOnce(Sent) -> Bytes + Send>) {
        let _ = self.1.send((self.0, bulk, message));
    }
}

fn entry(version: u64) -> Arc<Entry> {
    let striping = Striping::new(64 * M, 65536, 1 << 20, 1).unwrap();
    let replica = Replica { node: "n".into(), directory: Id([1; 16]) };
    let attributes = Attributes { mode: 0, mtime_seconds: 0, mtime_nanoseconds: 0, owner: None };
    let descriptor = Descriptor { version, attributes, striping, components: vec![vec![replica]] };
    Arc::new(Entry {
        source: Arc::new(Zeros(64 * M)),
        descriptor,
        incarnation: 3,
        progress: Mutex::new(Instant::now()),
        given: Mutex::default(),
        error: Mutex::default(),
    })
}

fn pull(puts: &Arc<Puts>, sender: &Sender<Said>, put: u64, offset: u64, length: u32) {
    let request = v1::RailRequest {
        scope: Some(v1::Scope { store: Bytes::new(), node: "n".into(), incarnation: 3 }),
        time_left_microseconds: 60_000_000,
        body: Some(rail_request::Body::Pull(v1::PullRequest { put, offset, length })),
    };
    let replier = Box::new(Keep(put, sender.clone()));
    puts.request(Incoming { message: request.encode_to_vec().into(), replier });
}

fn outcome(said: Said) -> Code {
    let length = if let Bulk::Bytes(bytes) = &said.1 { bytes.len() as u32 } else { 0 };
    let message = (said.2)(Sent { bytes: length, error: None });
    v1::RailReply::decode(message).unwrap().outcome.unwrap().code()
}

fn next(receiver: &Receiver<Said>) -> Said {
    receiver.recv_timeout(LONG).unwrap()
}

#[test]
fn i6_replies_that_are_not_sent_yet_stay_within_their_budget_and_puts_take_turns() {
    let puts = Puts::new();
    let (sender, receiver) = channel();
    let first = puts.register(2001, entry(2001)).unwrap();
    let second = puts.register(2002, entry(2002)).unwrap();
    for index in 0..40 {
        pull(&puts, &sender, 2001, index * M, 1 << 20);
    }
    pull(&puts, &sender, 2002, 0, 1 << 20);
    let mut held: Vec<Said> = (0..16).map(|_| next(&receiver)).collect();
    assert_eq!(puts.in_flight(), IN_FLIGHT);
    assert!(receiver.try_recv().is_err());
    // The second put did not wait for all of the first one's.
    let mut seen = held.iter().any(|said| said.0 == 2002);
    let mut answered = 0;
    while let Some(said) = held.pop() {
        assert_eq!(outcome(said), Code::Ok);
        answered += 1;
        assert!(puts.in_flight() <= IN_FLIGHT);
        if answered + held.len() < 41 {
            let said = next(&receiver);
            seen |= said.0 == 2002 && answered < 10;
            held.push(said);
        }
    }
    assert_eq!((answered, seen, puts.in_flight()), (41, true, 0));
    drop((first, second));
    assert!(puts.is_empty());
    puts.close();
}

#[test]
fn i9_only_bytes_that_were_not_pulled_before_are_progress() {
    let puts = Puts::new();
    let (sender, receiver) = channel();
    let put = entry(2001);
    let registered = puts.register(2001, Arc::clone(&put)).unwrap();
    let give = |offset| {
        pull(&puts, &sender, 2001, offset, 1 << 20);
        assert_eq!(outcome(next(&receiver)), Code::Ok);
        *lock(&put.progress)
    };
    let first = give(0);
    assert_eq!(give(0), first, "the same bytes again");
    let second = give(3 * M);
    assert!(second > first);
    assert_eq!((give(3 * M), give(0)), (second, second));
    assert_eq!(lock(&put.given).bytes(), 2 * M);
    drop(registered);
    puts.close();
}

#[test]
fn pulls_that_make_no_sense_or_of_unknown_puts_are_refused() {
    let puts = Puts::new();
    let (sender, receiver) = channel();
    pull(&puts, &sender, 2001, 0, 4096);
    assert_eq!(outcome(next(&receiver)), Code::Aborted);
    // One that comes before its put is known waits for it.
    let beginning = puts.beginning();
    pull(&puts, &sender, 2001, 0, 1 << 20);
    pull(&puts, &sender, 2002, 0, 1 << 20);
    assert!(receiver.try_recv().is_err());
    let registered = puts.register(2001, entry(2001)).unwrap();
    let said = next(&receiver);
    assert_eq!((said.0, outcome(said)), (2001, Code::Ok));
    drop(beginning);
    let said = next(&receiver);
    assert_eq!((said.0, outcome(said)), (2002, Code::Aborted));
    for (offset, length) in
        [(0, 0), (1, 4096), (64 * M, 65536), (u64::MAX - 65535, 65536), (65536, 1 << 20), (0, u32::MAX)]
    {
        pull(&puts, &sender, 2001, offset, length);
        assert_eq!(outcome(next(&receiver)), Code::Invalid, "{offset} {length}");
    }
    drop(registered);
    pull(&puts, &sender, 2001, 0, 65536);
    assert_eq!(outcome(next(&receiver)), Code::Aborted);
    assert_eq!(puts.in_flight(), 0);
    puts.close();
}
