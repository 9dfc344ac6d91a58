//! Tests of the validation of replies.

use super::*;
use crate::descriptor::tests::descriptors;
use proptest::collection::{btree_set, vec};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use prost::Message;

fn proof() -> Proof {
    Proof { node: "n1".into(), incarnation: 3, slot: 7, value: 99, name_tag: 5 }
}

fn lookups() -> impl Strategy<Value = Lookup> {
    let time = (any::<i64>(), 0u32..1_000_000_000).prop_map(|(seconds, nanoseconds)| Time { seconds, nanoseconds });
    prop_oneof![
        descriptors().prop_map(|descriptor| Lookup::Object(descriptor, proof())),
        time.prop_map(|mtime| Lookup::Directory { mtime, proof: proof() }),
        Just(Lookup::Absent(proof())),
    ]
}

/// A reference server: what a right list of these keys is.
fn list(keys: &[Vec<u8>], descriptor: &Descriptor, request: &v1::ListRequest) -> v1::ListReply {
    let mut entries = std::collections::BTreeMap::new();
    for key in keys.iter().filter(|key| key.starts_with(&request.prefix)) {
        let rest = &key[request.prefix.len()..];
        match rest.iter().position(|&b| b == b'/').filter(|_| request.delimited) {
            Some(slash) => {
                let key = &key[..request.prefix.len() + slash];
                let entry = v1::ListEntry { key: key.to_vec().into(), directory: true, descriptor: None };
                entries.insert([key, b"/"].concat(), entry);
            }
            None => {
                let descriptor = Some(descriptor.to_message());
                entries.insert(key.clone(), v1::ListEntry { key: key.clone().into(), directory: false, descriptor });
            }
        }
    }
    let rest = entries.into_iter().filter(|(sort_key, _)| sort_key[..] > request.after[..]);
    let mut rest: Vec<_> = rest.collect();
    let limit = request.limit as usize;
    let more = limit > 0 && rest.len() > limit;
    if more {
        rest.truncate(limit);
    }
    let next_after = rest.last().filter(|_| more).map(|(sort_key, _)| sort_key.clone().into()).unwrap_or_default();
    let entries = rest.into_iter().map(|(_, entry)| entry).collect();
    v1::ListReply { outcome: Some(ok_outcome()), entries, more, next_after, ..Default::default() }
}

fn key_lists() -> impl Strategy<Value = Vec<Vec<u8>>> {
    // Leaves are upper case, directories lower case: no name is both.
    btree_set("([a-c]/){0,3}[A-D]{1,2}", 0..20).prop_map(|keys| keys.into_iter().map(String::into_bytes).collect())
}

fn prefixes() -> impl Strategy<Value = String> {
    prop_oneof![Just(String::new()), "([a-c]/){1,2}", "[a-c]", "[A-D]"]
}

proptest! {
    #[test]
    fn a_lookup_survives_its_message(lookup in lookups()) {
        let bytes = lookup.to_message().encode_to_vec();
        let message = v1::LookupReply::decode(&bytes[..]).unwrap();
        prop_assert_eq!(Lookup::from_message(&message), Ok(lookup));
    }

    #[test]
    fn a_damaged_lookup_gives_a_value_or_an_error(lookup in lookups(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = lookup.to_message().encode_to_vec();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(message) = v1::LookupReply::decode(&bytes[..]) {
            let _ = Lookup::from_message(&message);
        }
    }

    #[test]
    fn a_right_list_is_accepted_and_its_pages_cover_it(
        keys in key_lists(), prefix in prefixes(), delimited in any::<bool>(), limit in 0u32..4, descriptor in descriptors(),
    ) {
        let mut request = v1::ListRequest { prefix: prefix.into_bytes().into(), delimited, ..Default::default() };
        let whole = check_list_reply(&request, &list(&keys, &descriptor, &request)).unwrap();
        request.limit = limit;
        let mut paged = Vec::new();
        loop {
            let page = check_list_reply(&request, &list(&keys, &descriptor, &request)).unwrap();
            paged.extend(page.entries);
            match page.next_after {
                Some(after) => request.after = after,
                None => break,
            }
        }
        prop_assert_eq!(paged, whole.entries);
    }

    #[test]
    fn i9_a_page_without_entries_that_says_more_follow_is_refused(after in "[a-y]{0,9}") {
        let request = v1::ListRequest { after: after.clone().into_bytes().into(), ..Default::default() };
        let next = [after.as_bytes(), b"z"].concat();
        let endless = v1::ListReply {
            outcome: Some(ok_outcome()), more: true, next_after: next.into(), ..Default::default()
        };
        prop_assert_eq!(check_list_reply(&request, &endless), Err(ReplyError::EmptyPage));
        let end = v1::ListReply { more: false, ..endless };
        prop_assert!(check_list_reply(&request, &end).is_ok());
    }

    #[test]
    fn a_list_that_is_wrong_is_refused(keys in key_lists(), delimited in any::<bool>(), descriptor in descriptors()) {
        let request = v1::ListRequest { delimited, ..Default::default() };
        let right = list(&keys, &descriptor, &request);
        let refused = |request: &v1::ListRequest, reply: &v1::ListReply| check_list_reply(request, reply).is_err();
        let mut wrong = right.clone();
        wrong.more = true;
        prop_assert!(refused(&request, &wrong));
        if let Some(last) = right.entries.last() {
            let mut wrong = right.clone();
            wrong.entries.push(last.clone());
            prop_assert!(refused(&request, &wrong));
            let after = v1::ListRequest { after: [&last.key[..], b"/"].concat().into(), ..request.clone() };
            prop_assert!(refused(&after, &right));
            let prefixed = v1::ListRequest { prefix: b"zz"[..].into(), ..request.clone() };
            prop_assert!(refused(&prefixed, &right));
            let mut wrong = right.clone();
            wrong.entries[0].directory ^= true;
            prop_assert!(refused(&request, &wrong));
        }
        if right.entries.len() > 1 {
            let mut wrong = right.clone();
            wrong.entries.swap(0, 1);
            prop_assert!(refused(&request, &wrong));
            let one = v1::ListRequest { limit: 1, ..request.clone() };
            prop_assert!(refused(&one, &right));
        }
        let other = v1::ListRequest { delimited: !delimited, ..request.clone() };
        if keys.iter().any(|key| key.contains(&b'/')) {
            prop_assert!(refused(&other, &right));
        }
    }

    #[test]
    fn random_bytes_give_a_value_or_an_error(bytes in vec(any::<u8>(), 0..200)) {
        let _ = v1::LookupReply::decode(&bytes[..]).map(|message| Lookup::from_message(&message));
        let _ = v1::ListReply::decode(&bytes[..]).map(|message| check_list_reply(&Default::default(), &message));
        let _ = v1::BeginPutReply::decode(&bytes[..]).map(|message| check_begin_put_reply(&Default::default(), &message));
    }

    #[test]
    fn i5_a_fetch_reply_of_another_request_is_refused(
        version in any::<u64>(), component in any::<u32>(), offset in any::<u64>(), pages in 1u32..16, tail in 0u32..4096,
    ) {
        let length = pages * 4096 - tail;
        let request = v1::FetchRequest { version, component, offset, length, ..Default::default() };
        let right = v1::FetchReply { version, component, offset, length, checksums: vec![1; pages as usize], check: None };
        prop_assert_eq!(check_fetch_reply(&request, &right, length, 4096), Ok(vec![1; pages as usize]));
        let wrong: [fn(&mut v1::FetchReply); 7] = [
            |r| r.version ^= 1,
            |r| r.component ^= 1,
            |r| r.offset ^= 4096,
            |r| r.length -= 1,
            |r| r.length = 0,
            |r| r.checksums.push(0),
            |r| r.checksums.truncate(r.checksums.len() - 1),
        ];
        for change in wrong {
            let mut reply = right.clone();
            change(&mut reply);
            prop_assert!(check_fetch_reply(&request, &reply, length, 4096).is_err());
        }
        prop_assert!(check_fetch_reply(&request, &right, length - 1, 4096).is_err());
        prop_assert!(check_fetch_reply(&request, &right, length, 0).is_err());
    }
}

#[test]
fn a_refusal_keeps_code_and_words() {
    let outcome = |code: i32, message: &str| v1::Outcome { code, message: message.into() };
    assert_eq!(check_outcome(Some(&ok_outcome())), Ok(()));
    let refusal = check_outcome(Some(&outcome(v1::Code::NoSpace.into(), "disk a\nis full"))).unwrap_err();
    assert_eq!(refusal, Refusal::new(v1::Code::NoSpace, "disk a\\x0ais full"));
    assert_eq!(refusal.to_string(), "disk a\\x0ais full (CODE_NO_SPACE)");
    assert_eq!(check_outcome(None).unwrap_err().code, v1::Code::Unspecified);
    assert_eq!(check_outcome(Some(&outcome(0, ""))).unwrap_err().code, v1::Code::Unspecified);
    let newer = check_outcome(Some(&outcome(999, "words"))).unwrap_err();
    assert_eq!((newer.code, newer.message.as_str()), (v1::Code::Unspecified, "code 999, unknown here: words"));
    assert!(check_outcome(Some(&outcome(9, &"\u{e9}".repeat(9999)))).unwrap_err().message.len() <= MAX_REFUSAL);
}

#[test]
fn a_lookup_that_contradicts_itself_is_refused() {
    let absent = Lookup::Absent(proof()).to_message();
    let no_proof = v1::LookupReply { proof: None, ..absent.clone() };
    assert_eq!(Lookup::from_message(&no_proof), Err(ReplyError::Missing("proof")));
    let no_outcome = v1::LookupReply { outcome: None, ..absent.clone() };
    assert!(matches!(Lookup::from_message(&no_outcome), Err(ReplyError::Refused(_))));
    let bad_time = v1::LookupReply { directory: true, directory_mtime_nanoseconds: 1_000_000_000, ..absent.clone() };
    assert_eq!(Lookup::from_message(&bad_time), Err(ReplyError::Time(1_000_000_000)));
    let both = v1::LookupReply { directory: true, descriptor: Some(v1::Descriptor::default()), ..absent };
    assert!(matches!(Lookup::from_message(&both), Err(ReplyError::Both(_))));
}

#[test]
fn a_name_is_listed_once() {
    let directory = |key: &'static [u8]| v1::ListEntry { key: key.into(), directory: true, descriptor: None };
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let descriptor = descriptors().new_tree(&mut runner).unwrap().current().to_message();
    let object =
        |key: &'static [u8]| v1::ListEntry { key: key.into(), directory: false, descriptor: Some(descriptor.clone()) };
    let reply = |entries| v1::ListReply { outcome: Some(ok_outcome()), entries, ..Default::default() };
    let request = v1::ListRequest { delimited: true, ..Default::default() };
    let both = reply(vec![object(b"a"), object(b"a!"), directory(b"a")]);
    assert_eq!(check_list_reply(&request, &both), Err(ReplyError::Both("a".into())));
    let right = reply(vec![object(b"a!"), directory(b"a"), object(b"a0")]);
    assert_eq!(check_list_reply(&request, &right).unwrap().entries.len(), 3);
    let itself = v1::ListRequest { prefix: b"a/"[..].into(), ..request };
    assert!(check_list_reply(&itself, &reply(vec![directory(b"a")])).is_err());
    assert!(check_list_reply(&itself, &reply(vec![object(b"a/\0")])).is_err());
}

#[test]
fn what_begin_put_promises_is_what_was_asked() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let descriptor = descriptors().new_tree(&mut runner).unwrap().current();
    let message = descriptor.to_message();
    let layout = message.layout.unwrap();
    let mut request = v1::BeginPutRequest { attributes: message.attributes, ..Default::default() };
    let reply = v1::BeginPutReply { outcome: Some(ok_outcome()), put: 4, descriptor: Some(descriptor.to_message()) };
    assert_eq!(check_begin_put_reply(&request, &reply), Ok((4, descriptor)));
    request.page_size = layout.page_size;
    assert!(check_begin_put_reply(&request, &reply).is_ok());
    request.page_size *= 2;
    assert!(check_begin_put_reply(&request, &reply).is_err());
    request.page_size = 0;
    assert!(check_begin_put_reply(&request, &v1::BeginPutReply { put: 0, ..reply.clone() }).is_err());
    assert!(check_begin_put_reply(&request, &v1::BeginPutReply { descriptor: None, ..reply }).is_err());
}

#[test]
fn each_proof_of_a_check_is_answered() {
    let request = v1::CheckRequest { proofs: vec![proof().to_slot(); 2] };
    let reply = |n| v1::CheckReply { results: vec![v1::CheckResult { current: true, value: 1 }; n] };
    assert_eq!(check_check_reply(&request, &reply(2)).unwrap().len(), 2);
    assert!(check_check_reply(&request, &reply(1)).is_err());
    assert!(check_check_reply(&request, &reply(3)).is_err());
    let pull = v1::PullRequest { put: 1, offset: 0, length: 5000 };
    let answer = v1::PullReply { put: 1, offset: 0, length: 5000, checksums: vec![1, 2] };
    assert_eq!(check_pull_reply(&pull, &answer, 5000, 4096), Ok(vec![1, 2]));
    assert!(check_pull_reply(&pull, &answer, 4999, 4096).is_err());
    assert!(check_pull_reply(&pull, &v1::PullReply { put: 2, ..answer }, 5000, 4096).is_err());
}

#[test]
fn i6_the_longest_page_that_is_legal_fits_what_a_client_takes() {
    let node = "n".repeat(crate::limits::MAX_NODE_NAME);
    let replica = crate::descriptor::Replica { node, directory: crate::descriptor::Id([255; 16]) };
    let width = crate::limits::MAX_WIDTH;
    let (page, size) = (crate::limits::MIN_PAGE, crate::limits::MAX_OBJECT);
    let descriptor = Descriptor {
        version: crate::limits::MAX_VERSION,
        attributes: crate::descriptor::Attributes {
            mode: 0o777,
            mtime_seconds: i64::MIN,
            mtime_nanoseconds: 999_999_999,
            owner: None,
        },
        striping: crate::layout::Striping::new(size, page, crate::limits::MAX_STRIPE, width).unwrap(),
        components: vec![vec![replica]; width as usize],
    };
    let key = vec![b'k'; MAX_KEY].into();
    let entry = v1::ListEntry { key, directory: false, descriptor: Some(descriptor.to_message()) };
    let change = v1::Change {
        sequence: u64::MAX,
        key: entry.key.clone(),
        descriptor: entry.descriptor.clone(),
        ..Default::default()
    };
    // Outcome, cursor and times beside them.
    let more = 2 * MAX_KEY + MAX_REFUSAL;
    for longest in [entry.encoded_len(), change.encoded_len()] {
        let page = crate::limits::PAGE_BYTES + longest + more;
        assert!(page <= crate::limits::MAX_CONTROL_REPLY, "{page} bytes, of which the longest entry {longest}");
    }
}
