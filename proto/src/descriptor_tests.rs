//! Tests of the validation of descriptors and proofs.

use super::*;
use crate::limits::{MAX_OBJECT, MAX_WIDTH};
use proptest::prelude::*;
use prost::Message;

/// Valid descriptors of up to 5 components with up to 3 replicas.
pub(crate) fn descriptors() -> impl Strategy<Value = Descriptor> {
    let layout = (12u32..=18, 0u32..=5, 1u32..=5, 0u64..64 << 20);
    let owner = proptest::option::of((0..u32::MAX, 0..u32::MAX));
    let attributes = (0u32..=0o7777, any::<i64>(), 0u32..1_000_000_000, owner);
    let rest = (LAST_UNUSED_VERSION + 1..=MAX_VERSION, 1u8..=3);
    (layout, attributes, rest).prop_map(
        |((page, extra, width, size), (mode, mtime_seconds, mtime_nanoseconds, owner), (version, copies))| {
            let (page, stripe) = (1u32 << page, 1u32 << (page + extra).min(26));
            let width = u64::from(width).min(size.div_ceil(u64::from(stripe)).max(1)) as u32;
            let replica = |copy| Replica { node: format!("node-{copy}"), directory: Id([copy; 16]) };
            Descriptor {
                version,
                attributes: Attributes {
                    mode,
                    mtime_seconds,
                    mtime_nanoseconds,
                    owner: owner.map(|(uid, gid)| Owner { uid, gid }),
                },
                striping: Striping::new(size, page, stripe, width).unwrap(),
                components: vec![(0..copies).map(replica).collect(); width as usize],
            }
        },
    )
}

type Corruption = (&'static str, fn(&mut v1::Descriptor));

fn attributes(message: &mut v1::Descriptor) -> &mut v1::Attributes {
    message.attributes.as_mut().unwrap()
}
fn layout(message: &mut v1::Descriptor) -> &mut v1::Layout {
    message.layout.as_mut().unwrap()
}

/// Each changes one field.
const CORRUPTIONS: &[Corruption] = &[
    ("version 0", |d| d.version = 0),
    ("version reserved", |d| d.version = LAST_UNUSED_VERSION),
    ("version of 64 bits", |d| d.version |= 1 << 63),
    ("kind unspecified", |d| d.kind = 0),
    ("kind unknown", |d| d.kind = 2),
    ("no attributes", |d| d.attributes = None),
    ("mode", |d| attributes(d).mode |= 0o10000),
    ("nanoseconds", |d| attributes(d).mtime_nanoseconds += 1_000_000_000),
    ("user without group", |d| (attributes(d).uid, attributes(d).gid) = (Some(1), None)),
    ("group without user", |d| (attributes(d).uid, attributes(d).gid) = (None, Some(1))),
    ("nobody", |d| (attributes(d).uid, attributes(d).gid) = (Some(u32::MAX), Some(1))),
    ("no group", |d| (attributes(d).uid, attributes(d).gid) = (Some(1), Some(u32::MAX))),
    ("size up", |d| attributes(d).size += 1),
    ("size down", |d| attributes(d).size = attributes(d).size.wrapping_sub(1)),
    ("size huge", |d| attributes(d).size = MAX_OBJECT + 1),
    ("size largest", |d| attributes(d).size = u64::MAX),
    ("no layout", |d| d.layout = None),
    ("page 0", |d| layout(d).page_size = 0),
    ("page odd", |d| layout(d).page_size += 1),
    ("page large", |d| layout(d).page_size = 1 << 31),
    ("page small", |d| layout(d).page_size = 2048),
    ("stripe 0", |d| layout(d).stripe_size = 0),
    ("stripe odd", |d| layout(d).stripe_size += 1),
    ("stripe under page", |d| layout(d).stripe_size = layout(d).page_size / 2),
    ("stripe large", |d| layout(d).stripe_size = 1 << 27),
    ("width 0", |d| layout(d).width = 0),
    ("width up", |d| layout(d).width += 1),
    ("width down", |d| layout(d).width -= 1),
    ("width huge", |d| layout(d).width = u32::MAX),
    ("width over the limit", |d| layout(d).width = MAX_WIDTH + 1),
    ("no components", |d| d.components.clear()),
    ("a component less", |d| drop(d.components.pop())),
    ("a component more", |d| d.components.push(d.components[0].clone())),
    ("first component's index", |d| d.components[0].index += 1),
    ("last component's index", |d| d.components.last_mut().unwrap().index ^= 1 << 31),
    ("length up", |d| d.components[0].length += 1),
    ("length down", |d| d.components[0].length = d.components[0].length.wrapping_sub(1)),
    ("no replicas", |d| d.components[0].replicas.clear()),
    ("replicas", |d| d.components[0].replicas = vec![d.components[0].replicas[0].clone(); MAX_REPLICAS + 1]),
    ("replica twice", |d| d.components[0].replicas.extend_from_within(..1)),
    ("node empty", |d| d.components[0].replicas[0].node.clear()),
    ("node bytes", |d| d.components[0].replicas[0].node = "a\nb".into()),
    ("directory empty", |d| d.components[0].replicas[0].directory = bytes::Bytes::new()),
    ("directory long", |d| d.components[0].replicas[0].directory = vec![1; 17].into()),
];

proptest! {
    #[test]
    fn a_valid_descriptor_survives_its_message(descriptor in descriptors()) {
        let bytes = descriptor.to_message().encode_to_vec();
        let message = v1::Descriptor::decode(&bytes[..]).unwrap();
        prop_assert_eq!(Descriptor::from_message(&message), Ok(descriptor));
    }

    #[test]
    fn each_corruption_of_one_field_is_refused(descriptor in descriptors()) {
        for (name, corrupt) in CORRUPTIONS {
            let mut message = descriptor.to_message();
            corrupt(&mut message);
            prop_assert!(Descriptor::from_message(&message).is_err(), "{name}: {message:?}");
        }
    }

    #[test]
    fn two_components_may_not_change_places(descriptor in descriptors()) {
        let mut message = descriptor.to_message();
        if message.components.len() > 1 {
            message.components.swap(0, 1);
            prop_assert!(Descriptor::from_message(&message).is_err());
        }
    }

    #[test]
    fn damaged_bytes_give_a_value_or_an_error(
        descriptor in descriptors(), at in any::<prop::sample::Index>(), byte in any::<u8>(),
    ) {
        let mut bytes = descriptor.to_message().encode_to_vec();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(message) = v1::Descriptor::decode(&bytes[..])
            && let Ok(other) = Descriptor::from_message(&message)
        {
            prop_assert_eq!(Descriptor::from_message(&other.to_message()), Ok(other));
        }
    }

    #[test]
    fn random_bytes_give_a_value_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = v1::Descriptor::decode(&bytes[..]).map(|message| Descriptor::from_message(&message));
        let _ = v1::Proof::decode(&bytes[..]).map(|message| Proof::from_message(&message));
    }
}

#[test]
fn a_proof_is_one_slot_of_a_named_node() {
    let proof = Proof { node: "n1".into(), incarnation: 3, slot: 7, value: u64::MAX, name_tag: 5 };
    assert_eq!(Proof::from_message(&proof.to_message()), Ok(proof.clone()));
    let two = v1::Proof { slots: vec![proof.to_slot(); 2] };
    assert_eq!(Proof::from_message(&two), Err(DescriptorError::Proof(2)));
    assert_eq!(Proof::from_message(&v1::Proof::default()), Err(DescriptorError::Proof(0)));
    let unnamed = Proof { node: String::new(), ..proof };
    assert!(matches!(Proof::from_message(&unnamed.to_message()), Err(DescriptorError::ProofNode(_))));
}
