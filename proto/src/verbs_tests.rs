use super::*;
use proptest::prelude::*;

fn reply(message: u32, carried: u32) -> Header {
    Header {
        kind: FrameKind::Reply,
        session: 3,
        id: 9,
        message,
        bulk: carried,
        address: 0,
        key: 0,
        keeps: false,
        reads: false,
        carried,
    }
}

/// Cuts a frame into pieces and puts it together again: message, bulk.
fn through(header: &Header, message: &[u8], bulk: &[u8], room: usize) -> (Vec<u8>, Vec<u8>, usize) {
    let payload = |at: usize, length: usize| {
        let (from, at) = if at < message.len() { (message, at) } else { (bulk, at - message.len()) };
        &from[at..(at + length).min(from.len())]
    };
    let (mut assembly, mut at, mut pieces, mut landed) = (Assembly::default(), 0, 0, vec![0; bulk.len()]);
    let mut out = Vec::new();
    loop {
        at += encode(header, 7, at, room, payload, &mut out);
        pieces += 1;
        assert!(out.len() <= room);
        let piece = decode(&out).unwrap();
        assert_eq!(piece.posted, 7);
        let brought = assembly.take(&piece).unwrap();
        assert_eq!(brought.header, *header);
        if let Some((start, bytes)) = brought.bulk {
            landed[start as usize..start as usize + bytes.len()].copy_from_slice(bytes);
        }
        if let Some(message) = brought.message {
            return (message, landed, pieces);
        }
    }
}

proptest! {
    #[test]
    fn i1_a_frame_comes_out_of_its_pieces_as_it_went_in(message in 0usize..3000, bulk in 0usize..9000, room in 64usize..5000) {
        let words: Vec<u8> = (0..message).map(|n| n as u8).collect();
        let bytes: Vec<u8> = (0..bulk).map(|n| (n * 7) as u8).collect();
        let header = reply(message as u32, bulk as u32);
        let (got, landed, pieces) = through(&header, &words, &bytes, room);
        prop_assert_eq!((got, landed), (words, bytes));
        prop_assert!(pieces <= 2 + (message + bulk) / (room - FIRST));
    }

    #[test]
    fn any_bytes_give_a_value_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(piece) = decode(&bytes) {
            let _ = Assembly::default().take(&piece);
        }
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let mut out = Vec::new();
    let good = Header { address: 0x1000, key: 5, bulk: 4096, ..Header::plain(FrameKind::Request, 1, 2) };
    encode(&good, 0, 0, 256, |_, _| &[], &mut out);
    assert_eq!(decode(&out).unwrap().header, Some(good));
    let kept = Header { keeps: true, ..good };
    encode(&kept, 0, 0, 256, |_, _| &[], &mut out);
    assert_eq!(decode(&out).unwrap().header, Some(kept));
    let read = Header { reads: true, ..good };
    encode(&read, 0, 0, 256, |_, _| &[], &mut out);
    assert_eq!(decode(&out).unwrap().header, Some(read));
    let offer = Header { kind: FrameKind::Offer, ..good };
    encode(&offer, 0, 0, 256, |_, _| &[], &mut out);
    assert_eq!(decode(&out).unwrap().header, Some(offer));
    for (bad, what) in [
        (Header { message: MAX_RAIL_MESSAGE + 1, ..good }, "message"),
        (Header { bulk: MAX_EXTENT + 1, ..good }, "bulk"),
        (Header { address: u64::MAX - 4095, ..good }, "landing"),
        (Header { carried: 4096, ..good }, "carried"),
        (Header { carried: 1, kind: FrameKind::Reply, ..good }, "carried"),
        (Header { carried: 4096, ..offer }, "carried"),
        (Header { bulk: 0, ..offer }, "an offer of nothing"),
        (Header { address: 0, ..offer }, "an offer from nowhere"),
        (Header { address: u64::MAX - 4095, ..offer }, "an offer past the end"),
    ] {
        encode(&bad, 0, 0, 256, |_, _| &[], &mut out);
        assert!(decode(&out).is_err(), "{what}");
    }
    assert_eq!(decode(&[1, 0, 0]), Err(PieceError::Short(3)));
    assert_eq!(decode(&[77; 60]), Err(PieceError::Kind(77)));
    assert_eq!(decode(&[1, 16, 0, 0, 0, 0, 0, 0]), Err(PieceError::Flags(16)));
    assert_eq!(decode(&[1, 10, 0, 0, 0, 0, 0, 0]), Err(PieceError::Flags(10)));
    assert_eq!(decode(&[1, 6, 0, 0, 0, 0, 0, 0]), Err(PieceError::Flags(6)));
    assert_eq!(decode(&[1, 0, 0, 0, 0, 0, 0, 0, 0]), Err(PieceError::Short(9)));
}

#[test]
fn pieces_out_of_order_are_refused() {
    let mut out = Vec::new();
    let header = reply(1000, 0);
    let words = [7; 1000];
    encode(&header, 0, 0, 256, |at, length| &words[at..at + length], &mut out);
    let first = out.clone();
    encode(&header, 0, 208, 256, |at, length| &words[at..at + length], &mut out);
    let second = out.clone();
    let mut assembly = Assembly::default();
    assert!(assembly.take(&decode(&second).unwrap()).is_err(), "goes on without a beginning");
    let mut assembly = Assembly::default();
    assert_eq!(assembly.take(&decode(&first).unwrap()).unwrap().message, None);
    assert!(assembly.take(&decode(&first).unwrap()).is_err(), "begins twice");
    // Says that it is the last, and is not.
    let mut cut = first;
    cut[1] = 0;
    assert!(Assembly::default().take(&decode(&cut).unwrap()).is_err());
}

type Change = fn(&mut v1::VerbsEnd);

fn slots_of(end: &mut v1::VerbsEnd) -> &mut v1::SlotArray {
    end.slots.get_or_insert_default()
}

#[test]
fn a_slot_has_its_place_inside_the_array_or_none() {
    let slots = SlotArray { address: 0x1000, key: 7, count: 64, incarnation: 3, lease: Duration::from_secs(2) };
    assert_eq!((slots.place(0), slots.place(63)), (Some(0x1000), Some(0x11f8)));
    assert_eq!((slots.place(64), slots.place(u32::MAX)), (None, None));
    let last = SlotArray { address: u64::MAX - 15, count: 1, ..slots };
    assert_eq!(SlotArray::from_message(&last.to_message()).map(|slots| slots.place(0)), Ok(Some(u64::MAX - 15)));
}

#[test]
fn each_wrong_claim_of_an_end_is_refused() {
    let slots = SlotArray { address: 0x1000, key: 7, count: 64, incarnation: 3, lease: Duration::from_secs(2) };
    let end = End {
        gid: [9; 16],
        lid: 0,
        mtu: 3,
        piece: 4096,
        depth: 64,
        pairs: vec![Pair { number: 1, psn: 2 }; 5],
        reads_answered: 255,
        reads_asked: 16,
        offers: true,
        slots: Some(slots),
    };
    assert_eq!(End::from_message(Some(&end.to_message())), Ok(end.clone()));
    let changes: &[Change] = &[
        |end| end.gid = vec![1; 15].into(),
        |end| end.lid = 1 << 16,
        |end| end.mtu = 0,
        |end| end.mtu = 6,
        |end| end.piece_bytes = 255,
        |end| end.piece_bytes = (64 << 10) + 1,
        |end| end.depth = 7,
        |end| end.depth = 4097,
        |end| end.pairs.truncate(1),
        |end| end.pairs = vec![v1::VerbsPair::default(); 18],
        |end| end.pairs[3].number = 1 << 24,
        |end| end.pairs[4].psn = 1 << 24,
        |end| end.reads_answered = 256,
        |end| end.reads_asked = 256,
        |end| slots_of(end).address = 0,
        |end| slots_of(end).address = 0x1004,
        |end| slots_of(end).address = u64::MAX - 7,
        |end| slots_of(end).count = 0,
        |end| slots_of(end).count = MAX_SLOTS + 1,
        |end| slots_of(end).incarnation = 0,
        |end| slots_of(end).lease_milliseconds = 0,
        |end| slots_of(end).lease_milliseconds = MAX_LEASE_MILLISECONDS + 1,
    ];
    for change in changes {
        let mut message = end.to_message();
        change(&mut message);
        assert!(End::from_message(Some(&message)).is_err(), "{message:?}");
    }
    assert!(End::from_message(None).is_err());
}
