//! The fences on real devices: a WRITE that comes late, after its memory was used for something else.
//!
//! Without a fence the bytes are overwritten: that is shown first, so that what follows proves something. With each fence they
//! are not, in every round. Once the WRITE is late because the server posts it late, once because the wire is slow: then the lab
//! delays the packets of the server's interface, and says so by `RAILFS_VERBS_SLOW`. `RAILFS_VERBS_DEVICES` says which devices
//! (the lab's, by `make test-rdma`).

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

/// What makes the memory ours again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// Nothing: the test must show the damage.
    Nothing,
    /// The reply was received, on the queue pair of the request; the key covers the whole memory.
    Reply,
    /// The reply was received, and took the window's key away.
    ReplyTaking,
    /// The window is invalidated, and that was completed with success.
    Invalidation,
    /// The window is freed.
    Freeing,
    /// The queue pair is destroyed; the key covers the whole memory.
    Destroying,
    /// The memory is deregistered, and registered again for what it is used for next.
    Deregistering,
}

const FENCES: [By; 6] = [By::Reply, By::ReplyTaking, By::Invalidation, By::Freeing, By::Destroying, By::Deregistering];

impl By {
    fn windows(self) -> bool {
        matches!(self, By::Invalidation | By::Freeing | By::ReplyTaking)
    }
    /// What the fence waits for comes after the WRITE, so that it cannot be late.
    fn waits(self) -> bool {
        matches!(self, By::Reply | By::ReplyTaking)
    }
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
        let choice = PortChoice { port: 1, gid, traffic_class: 0, written, read: false };
        End { cq: Cq::new(&context, 256).unwrap(), pd, choice, mtu: port.mtu }
    }

    fn peer(&self, number: u32) -> Peer {
        Peer { number, psn: 7, gid: self.choice.gid.raw, lid: 0, mtu: self.mtu }
    }
}

fn id(kind: WrKind) -> WrId {
    WrId { kind, pair: 0, slot: 0, used: 0, generation: 1 }
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

/// What queue pairs that are gone have left.
fn drain(cq: &Cq) {
    let mut all = Vec::new();
    while cq.poll(&mut all).unwrap() > 0 {
        all.clear();
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

/// One round: whether the late bytes were found in the memory that was ours again, and how the WRITE ended. `slow`: the wire is,
/// and the WRITE is posted before the fence.
fn round(client: &End, server: &End, by: By, slow: bool) -> (bool, Result<(), Status>) {
    drain(&client.cq);
    drain(&server.cq);
    let arena = Arena::new(1 << 20).unwrap();
    let access = if by.windows() { Access::Landing } else { Access::OpenLanding };
    let mut landing = Some(Mr::register(&client.pd, arena.clone(), access).unwrap());
    let messages = Buffers::new(&client.pd, 8192).unwrap();
    let source = Buffers::new(&server.pd, 2 * BYTES as usize).unwrap();
    assert!(source.fill(0, &vec![LATE; BYTES as usize]));
    // A pair keeps what it was given registered: what is to be deregistered is open by its domain alone.
    let ours = landing.clone().filter(|_| by != By::Deregistering).into_iter().chain([messages.mr().clone()]).collect();
    let (mut pair, mut other) = connect(client, server, ours, vec![source.mr().clone()]);
    pair.receive(id(WrKind::Receive), messages.mr().slice(4096, 4096).unwrap()).unwrap();
    other.receive(id(WrKind::Receive), source.mr().slice(u64::from(BYTES), 4096).unwrap()).unwrap();

    // The request: a landing is opened to the server.
    let extent = arena.allocate(BYTES).unwrap().expose();
    let place = landing.as_ref().unwrap().slice_at(land::address(&extent).unwrap(), BYTES).unwrap();
    let request = Work::Send { id: id(WrKind::Send), from: messages.mr().slice(0, 64).unwrap(), invalidate: None };
    let (mut window, key) = if by.windows() {
        let mut window = Window::new(&client.pd).unwrap();
        // In one post with the request, as the rail does.
        let bind = Work::Bind { id: id(WrKind::Bind), window: &mut window, landing: place };
        pair.post(&mut [bind, request]).unwrap();
        let key = window.key();
        (Some(window), key)
    } else {
        pair.post(&mut [request]).unwrap();
        (None, landing.as_ref().unwrap().remote_key())
    };
    assert!(completed(&server.cq, WrKind::Receive).result.is_ok());

    let mut write = || {
        let from = source.mr().slice(0, BYTES).unwrap();
        let message = source.mr().slice(0, 64).unwrap();
        let write = Work::Write { id: id(WrKind::Write), from, address: place.address(), key };
        let invalidate = (by == By::ReplyTaking).then_some(key);
        other.post(&mut [write, Work::Send { id: id(WrKind::Send), from: message, invalidate }]).unwrap();
    };
    if slow || by.waits() {
        write();
    }
    // It is given up, and the fence comes.
    let mut pair = Some(pair);
    match by {
        By::Nothing => {}
        By::Reply => assert!(completed(&client.cq, WrKind::Receive).result.is_ok()),
        By::ReplyTaking => {
            let done = completed(&client.cq, WrKind::Receive).result.unwrap();
            assert_eq!(done.invalidated, Some(key));
        }
        By::Invalidation => {
            let invalidate = Work::Invalidate { id: id(WrKind::Invalidate), key };
            pair.as_mut().unwrap().post(&mut [invalidate]).unwrap();
            let ended = completed(&client.cq, WrKind::Invalidate);
            assert!(ended.result.is_ok(), "{ended:?}");
        }
        By::Freeing => window.take().unwrap().free().unwrap(),
        By::Destroying => {
            let mut pair = pair.take().unwrap();
            pair.fail().unwrap();
            pair.destroy().unwrap();
        }
        By::Deregistering => drop(landing.take()),
    }
    // Used for something else.
    let again = extent.fenced(Fence::proved()).unwrap().into_free().filled(&vec![OURS; BYTES as usize]).unwrap();
    if by == By::Deregistering {
        landing = Some(Mr::register(&client.pd, arena.clone(), Access::Landing).unwrap());
    }
    if !slow && !by.waits() {
        write();
    }
    let ended = completed(&server.cq, WrKind::Send).result.map(|_| ());
    let damaged = again.bytes()[..BYTES as usize].iter().any(|byte| *byte != OURS);
    // Queue pairs before windows, memory last.
    drop((pair, other));
    drop(window);
    drop(landing);
    (damaged, ended)
}

/// The damage, then each fence.
fn prove(name: &str, slow: bool) {
    let Ok(text) = std::env::var("RAILFS_VERBS_DEVICES") else {
        return skip(name, "RAILFS_VERBS_DEVICES names no devices (make test-rdma runs it)");
    };
    let words: Vec<&str> = text.split(',').collect();
    let client = End::new(words[0], words[1].parse().unwrap(), true);
    let server = End::new(words[2], words[3].parse().unwrap(), false);
    let rounds = if std::env::var_os("RAILFS_FULL").is_some() { 100 } else { 20 };
    let hurt = (0..rounds).filter(|_| round(&client, &server, By::Nothing, slow) == (true, Ok(()))).count();
    println!("slow {slow}, fence Nothing: damage in {hurt} of {rounds} rounds");
    // On a slow wire it may have come before the memory was used again.
    assert!(hurt >= if slow { 1 } else { rounds }, "without a fence the late bytes must be seen");
    for by in FENCES {
        let began = Instant::now();
        let (mut late, mut tried) = (0, 0);
        while late < rounds {
            tried += 1;
            assert!(tried <= 4 * rounds, "{by:?}: only {late} of {tried} WRITEs were late: is the wire slow?");
            let (damaged, ended) = round(&client, &server, by, slow);
            assert!(!damaged, "{by:?}: round {tried}: late bytes in memory that was ours again");
            assert!(slow || ended.is_err() != by.waits(), "{by:?}: round {tried}: the WRITE ended with {ended:?}");
            late += usize::from(ended.is_err() != by.waits());
        }
        println!(
            "slow {slow}, fence {by:?}: no damage by {late} late WRITEs in {tried} rounds, in {:?}",
            began.elapsed()
        );
    }
    assert_eq!(crate::verbs::leaked(), 0);
}

#[test]
fn i4_a_late_write_does_damage_without_a_fence_and_none_with_one() {
    prove("i4_a_late_write_does_damage_without_a_fence_and_none_with_one", false);
}

#[test]
fn i4_a_write_that_is_long_on_its_way_does_damage_only_without_a_fence() {
    let name = "i4_a_write_that_is_long_on_its_way_does_damage_only_without_a_fence";
    if std::env::var_os("RAILFS_VERBS_SLOW").is_none() {
        return skip(name, "RAILFS_VERBS_SLOW does not say that the wire is slow (make test-rdma does)");
    }
    prove(name, true);
}
