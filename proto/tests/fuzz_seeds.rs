//! The seeds of the fuzz targets reach the accepting path: each is made from a valid value and accepted by its target.
//! `RAILFS_UPDATE_GOLDEN=1` writes them anew.

#[path = "../../tests/fuzz/src/lib.rs"]
mod targets;
mod values;

use prost::Message;
use railfs_proto::frame::FrameKind;
use railfs_proto::slot::Slot;
use railfs_proto::v1;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use targets::{TARGETS, Target};

type Seeds = Vec<(String, Vec<u8>)>;

fn fuzz_directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz")
}

fn named<M: Message>(messages: impl IntoIterator<Item = (&'static str, M)>) -> Seeds {
    messages.into_iter().map(|(name, message)| (name.to_owned(), message.encode_to_vec())).collect()
}

fn numbered(seeds: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Seeds {
    (1..).zip(seeds).map(|(number, seed): (u32, _)| (number.to_string(), seed.as_ref().to_vec())).collect()
}

fn pair(request: &impl Message, reply: &impl Message) -> Vec<u8> {
    [request.encode_length_delimited_to_vec(), reply.encode_length_delimited_to_vec()].concat()
}

fn frames() -> Seeds {
    let mut seeds = vec![
        ("join".to_owned(), values::frame(FrameKind::Join, 1, &values::join_request().encode_to_vec(), 0)),
        ("joined".to_owned(), values::frame(FrameKind::Joined, 1, &v1::JoinReply::default().encode_to_vec(), 0)),
        ("ping".to_owned(), values::frame(FrameKind::Ping, 2, &[], 0)),
        ("pong".to_owned(), values::frame(FrameKind::Pong, 2, &[], 0)),
    ];
    for (name, request) in values::rail_requests() {
        seeds.push((name.to_owned(), values::frame(FrameKind::Request, 3, &request.encode_to_vec(), 0)));
    }
    for (name, reply) in values::rail_replies() {
        seeds.push((name.to_owned(), values::frame(FrameKind::Reply, 3, &reply.encode_to_vec(), 64)));
    }
    seeds
}

fn table_block() -> Vec<u8> {
    let id = values::block_id();
    let id = [&id.version.to_le_bytes()[..], &id.component.to_le_bytes(), &id.block.to_le_bytes()].concat();
    [id, values::table_block()].concat()
}

fn seeds(target: &str) -> Seeds {
    match target {
        "frame" => frames(),
        "rail_request" => named(values::rail_requests()),
        "rail_reply" => named(values::rail_replies()),
        "hello" => numbered([pair(&values::hello_request(), &values::hello_reply())]),
        "lookup" => named(values::lookups()),
        "list" => {
            let everything = v1::ListRequest { limit: 0, ..values::list_request() };
            let last = v1::ListReply { more: false, ..values::list_reply() };
            numbered([pair(&values::list_request(), &values::list_reply()), pair(&everything, &last)])
        }
        "begin_put" => numbered([pair(&values::begin_put_request(), &values::begin_put_reply())]),
        "watch" => {
            let last = v1::WatchReply { changes: Vec::new(), ..values::watch_reply() };
            numbered([pair(&values::watch_request(), &values::watch_reply()), pair(&values::watch_request(), &last)])
        }
        "component_header" => numbered([values::component_header().encode(), values::long_component_header().encode()]),
        "component_table" => numbered([table_block()]),
        "log_segment" => numbered([values::segment()]),
        "log_marker" => numbered([values::marker_file()]),
        "log_checkpoint" => numbered([values::checkpoint_file()]),
        "url" => numbered([
            "railfs://host/ns",
            "railfs://127.0.0.1:9/ns/a/b%20c%FF/",
            "railfs://[fd00::1]:65535/photos-1/2026/x",
        ]),
        "name" => numbered([&b"ns\nkey"[..], b"photos-1\n2026/caf\xc3\xa9 \xff.raw", b"-\na/b/c/d/...e"]),
        "verbs_frame" => values::verbs_frames()
            .into_iter()
            .map(|(name, pieces)| {
                (name.to_owned(), pieces.iter().flat_map(|piece| targets::piece_seed(piece)).collect())
            })
            .collect(),
        "verbs_end" => numbered([
            values::verbs_end().encode_to_vec(),
            values::verbs_end_with_slots().encode_to_vec(),
            values::verbs_end_offers().encode_to_vec(),
        ]),
        "status" => numbered([values::status_reply().encode_to_vec()]),
        "slot" => numbered([0, 3].map(|in_progress| {
            let word = Slot { in_progress, counter: 0x12_3456_789a }.encode(9);
            [word.to_le_bytes(), 9u64.to_le_bytes()].concat()
        })),
        "units" => numbered(["64 KiB", "500 ms", "4194304", "2 h", "1 TiB"]),
        other => panic!("target {other} has no seeds"),
    }
}

fn update() -> bool {
    std::env::var_os("RAILFS_UPDATE_GOLDEN").is_some_and(|value| value == "1")
}

fn accepts(name: &str, target: Target) {
    let directory = fuzz_directory().join("seeds").join(name);
    let seeds = seeds(name);
    if update() {
        std::fs::create_dir_all(&directory).unwrap();
        seeds.iter().for_each(|(seed, bytes)| std::fs::write(directory.join(seed), bytes).unwrap());
    }
    for (seed, bytes) in &seeds {
        assert!(target(bytes), "{name}: seed {seed} is not accepted");
        let committed = std::fs::read(directory.join(seed)).unwrap_or_else(|error| panic!("{name}/{seed}: {error}"));
        assert!(committed == *bytes, "{name}: the committed seed {seed} is not what is made now");
    }
    let found = std::fs::read_dir(&directory).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    assert_eq!(found.collect::<BTreeSet<_>>(), seeds.into_iter().map(|(seed, _)| seed).collect(), "{name}");
}

#[test]
fn every_target_accepts_its_seeds() {
    TARGETS.iter().for_each(|(name, target)| accepts(name, *target));
}

#[test]
fn every_target_has_its_program() {
    let files = std::fs::read_dir(fuzz_directory().join("fuzz_targets")).unwrap();
    let found: BTreeSet<_> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(found, TARGETS.iter().map(|(name, _)| format!("{name}.rs")).collect());
    let manifest = std::fs::read_to_string(fuzz_directory().join("Cargo.toml")).unwrap();
    for (name, _) in TARGETS {
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name} is not in Cargo.toml");
    }
}

#[test]
fn damaged_seeds_give_an_answer() {
    // The fuzzer goes further; this runs everywhere. Every seed, with each of some bytes changed, and cut short.
    for (name, target) in TARGETS {
        for (_, bytes) in seeds(name) {
            let step = (bytes.len() / 199).max(1);
            for at in (0..bytes.len()).step_by(step) {
                for change in [1, 0x80, 0xff] {
                    let mut damaged = bytes.clone();
                    damaged[at] ^= change;
                    target(&damaged);
                }
                target(&bytes[..at]);
            }
        }
    }
}
