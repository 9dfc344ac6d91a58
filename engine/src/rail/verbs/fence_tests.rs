//! The fences on real devices: a WRITE that comes late, after its memory was used for something else.
//!
//! Without a fence the bytes are overwritten: that is shown first, so that what follows proves something. With each fence they
//! are not, in every round. `RAILFS_VERBS_DEVICES` says which devices (the lab's, by `make test-rdma`).

use super::choose::choose_gid;
use crate::memory::{Arena, Fence};
use crate::rail::land;
use crate::verbs::{
    Access, Buffers, Completion, Context, Cq, Limits, Mr, Pd, Peer, PortChoice, Qp, Rts, Status, Window, Work, WrId,
    WrKind,
};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BYTES: u32 = 256 << 10;
const OURS: u8 = 0x55;
const LATE: u8 = 0xee;
const NAME: &str = "i4_a_late_write_does_damage_without_a_fence_and_none_with_one";

/// What makes the memory ours again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// Nothing: the test must show the damage.
    Nothing,
    /// The window is invalidated, and that was completed with success.
    Invalidation,
    /// The window is freed.
    Freeing,
    /// The queue pair is destroyed; the key covers the whole memory.
    Destroying,
}

fn skip(name: &str, why: &str) {
    use std::io::Write;
    eprintln!("SKIPPED {name}: {why}");
    if let Some(path) = std::env::var_os("RAILFS_SKIP_LOG") {
        let mut log = std::fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
        writeln!(log, "SKIPPED {name}: {why}").unwrap();
    }
}

/// One end: its device, and one queue pair on its way up.
struct End {
    pd: Pd,
    cq: Cq,
    choice: PortChoice,
    mtu: u32,
}

impl End {
    fn new(device: &str, address: IpAddr, written: bool) -> End {
        let context = Context::open(device).unwrap();
        let pd = Pd::new(&context).unwrap();
        let port = context.port(1).unwrap();
        let gid = choose_gid(&context.gids().unwrap(), 1, address).unwrap();
        let choice = PortChoice { port: 1, gid, traffic_class: 0, written };
        End { cq: Cq::new(&context, 256).unwrap(), pd, choice, mtu: port.mtu }
    }

    fn peer(&self, number: u32) -> Peer {
        Peer { number, psn: 7, gid: self.choice.gid.raw, lid: 0, mtu: self.mtu }
    }
}

fn id(kind: WrKind) -> WrId {
    WrId { kind, pair: 0, slot: 0, generation: 1 }
}

/// Waits for one completion of this kind.
fn completed(cq: &Cq, kind: WrKind) -> Completion {
    let end = Instant::now() + Duration::from_secs(30);
    let mut all = Vec::new();
    loop {
        all.clear();
        cq.poll(&mut all).unwrap();
        if let Some(found) = all.iter().find(|completion| completion.id.kind == kind || completion.result.is_err()) {
            return *found;
        }
        assert!(Instant::now() < end, "no completion of {kind:?}");
        std::thread::yield_now();
    }
}

fn connect(client: &End, server: &End, ours: Vec<Arc<Mr>>, theirs: Vec<Arc<Mr>>) -> (Qp<Rts>, Qp<Rts>) {
    let limits = Limits { sends: 16, receives: 16 };
    let one = Qp::new(&client.pd, &client.cq, limits, ours).unwrap().init(&client.choice).unwrap();
    let other = Qp::new(&server.pd, &server.cq, limits, theirs).unwrap().init(&server.choice).unwrap();
    let (to, from) = (server.peer(other.number()), client.peer(one.number()));
    let one = one.rtr(&to, 1).unwrap().rts(7).unwrap();
    let other = other.rtr(&from, 1).unwrap().rts(7).unwrap();
    (one, other)
}

/// One round: whether the late bytes were found in the memory that was ours again, and how the WRITE ended.
fn round(client: &End, server: &End, by: By) -> (bool, Result<(), Status>) {
    let arena = Arena::new(1 << 20).unwrap();
    let windows = matches!(by, By::Invalidation | By::Freeing);
    let access = if windows { Access::Landing } else { Access::OpenLanding };
    let landing = Mr::register(&client.pd, arena.clone(), access).unwrap();
    let source = Buffers::new(&server.pd, BYTES as usize).unwrap();
    assert!(source.fill(0, &vec![LATE; BYTES as usize]));
    let (mut pair, mut other) = connect(client, server, vec![landing.clone()], vec![source.mr().clone()]);

    // The request: a landing is opened to the server.
    let extent = arena.allocate(BYTES).unwrap().expose();
    let place = landing.slice_at(land::address(&extent).unwrap(), BYTES).unwrap();
    let (mut window, key) = if windows {
        let mut window = Window::new(&client.pd).unwrap();
        let bind = Work::Bind { id: id(WrKind::Bind), window: &mut window, landing: place };
        // In one post with the request, as the rail does.
        other.receive(id(WrKind::Receive), source.mr().slice(1 << 17, 4096).unwrap()).unwrap();
        let request = landing.slice(1 << 19, 64).unwrap();
        pair.post(&mut [bind, Work::Send { id: id(WrKind::Send), from: request, invalidate: None }]).unwrap();
        assert!(completed(&client.cq, WrKind::Send).result.is_ok());
        let key = window.key();
        (Some(window), key)
    } else {
        (None, landing.remote_key())
    };

    // It is given up, and the fence comes.
    let mut pair = Some(pair);
    match by {
        By::Nothing => {}
        By::Invalidation => {
            let invalidate = Work::Invalidate { id: id(WrKind::Invalidate), key };
            pair.as_mut().unwrap().post(&mut [invalidate]).unwrap();
            assert!(completed(&client.cq, WrKind::Invalidate).result.is_ok());
        }
        By::Freeing => window.take().unwrap().free().unwrap(),
        By::Destroying => {
            let mut pair = pair.take().unwrap();
            pair.fail().unwrap();
            pair.destroy().unwrap();
        }
    }
    // Used for something else.
    let again = extent.fenced(Fence::proved()).unwrap().into_free().filled(&vec![OURS; BYTES as usize]).unwrap();

    // Only now does the server write.
    let from = source.mr().slice(0, BYTES).unwrap();
    let message = source.mr().slice(0, 64).unwrap();
    let write = Work::Write { id: id(WrKind::Write), from, address: place.address(), key };
    if let (By::Nothing, Some(pair)) = (by, &mut pair) {
        // So that the message after the WRITE finds a receive.
        pair.receive(id(WrKind::Receive), landing.slice(1 << 19, 4096).unwrap()).unwrap();
    }
    other.post(&mut [write, Work::Send { id: id(WrKind::Send), from: message, invalidate: None }]).unwrap();
    let ended = completed(&server.cq, WrKind::Send).result.map(|_| ());
    let damaged = again.bytes()[..BYTES as usize].iter().any(|byte| *byte != OURS);
    // Queue pairs before windows, memory last.
    drop((pair, other));
    drop(window);
    (damaged, ended)
}

#[test]
fn i4_a_late_write_does_damage_without_a_fence_and_none_with_one() {
    let Ok(text) = std::env::var("RAILFS_VERBS_DEVICES") else {
        return skip(NAME, "RAILFS_VERBS_DEVICES names no devices (make test-rdma runs it)");
    };
    let words: Vec<&str> = text.split(',').collect();
    let client = End::new(words[0], words[1].parse().unwrap(), true);
    let server = End::new(words[2], words[3].parse().unwrap(), false);
    let rounds = if std::env::var_os("RAILFS_FULL").is_some() { 100 } else { 20 };
    let (damaged, ended) = round(&client, &server, By::Nothing);
    println!("fence Nothing: damaged {damaged}, the WRITE ended with {ended:?}");
    assert!(damaged && ended.is_ok(), "without a fence the late bytes must be seen");
    for by in [By::Invalidation, By::Freeing, By::Destroying] {
        let began = Instant::now();
        for number in 0..rounds {
            let (damaged, ended) = round(&client, &server, by);
            assert!(!damaged, "{by:?}: round {number}: late bytes in memory that was ours again");
            assert!(ended.is_err(), "{by:?}: round {number}: the late WRITE succeeded");
        }
        println!("fence {by:?}: {rounds} of {rounds} rounds without damage, in {:?}", began.elapsed());
    }
    assert_eq!(crate::verbs::leaked(), 0);
}
