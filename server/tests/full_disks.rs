//! Disks without room: a server starts, serves, deletes and stops on them, and says what it needs where it cannot.

mod common;

use common::{SmallDisk, TestClient, TestServer, configured, pattern, skipped, until};
use railfs_engine::error::Error;
use railfs_proto::descriptor::{Descriptor, Replica};
use railfs_proto::layout::Striping;
use railfs_server::catalog::{Catalog, CatalogError, Condition, Delete, LogCatalog, LogCatalogOptions, Put, Refusal};
use railfs_server::store;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

/// One stripe directory of so many bytes; `None`: it cannot be had here, which is said.
fn small(test: &str, bytes: u64, more: &str) -> Option<(tempfile::TempDir, SmallDisk, railfs_server::config::Config)> {
    let root = tempfile::tempdir().unwrap();
    let config = configured(root.path(), 1, 1, more);
    std::fs::create_dir(&config.stripe_dirs[0]).unwrap();
    match SmallDisk::mount(&config.stripe_dirs[0], bytes) {
        Ok(disk) => Some((root, disk, config)),
        Err(why) => {
            skipped(test, &format!("cannot mount a tmpfs: {why}"));
            None
        }
    }
}

/// Takes every byte that is left.
fn fill(disk: &Path) {
    let mut file = std::fs::File::options().append(true).create(true).open(disk.join("somebody's")).unwrap();
    while file.write_all(&[7; 4096]).is_ok() {}
    while file.write_all(&[7]).is_ok() {}
}

fn empty(disk: &Path) {
    std::fs::remove_file(disk.join("somebody's")).unwrap();
}

#[test]
fn i8_a_log_without_room_for_a_second_segment_is_started_again_after_a_crash() {
    let test = "i8_a_log_without_room_for_a_second_segment_is_started_again_after_a_crash";
    let Some((root, disk, config)) = small(test, 20_000_000, "") else { return };
    store::init(&config.stripe_dirs).unwrap();
    let mut server = TestServer::over(root, config);
    server.crash();
    server.serve().unwrap();
    TestClient::connect(&server).put("a", b"1").unwrap();
    server.crash();
    server.serve().unwrap();
    assert_eq!(TestClient::connect(&server).read("a"), b"1");
    let names: Vec<_> = std::fs::read_dir(disk.0.join("log")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 1, "nothing but the segment: {names:?}");
    server.stop();
    drop((server, disk));
}

#[test]
fn i8_a_full_disk_does_not_stop_starts_reads_deletes_and_clean_stops() {
    let test = "i8_a_full_disk_does_not_stop_starts_reads_deletes_and_clean_stops";
    let Some((root, disk, config)) = small(test, 48 << 20, "[retention]\nsuperseded = \"0 s\"\n") else { return };
    store::init(&config.stripe_dirs).unwrap();
    let mut server = TestServer::over(root, config);
    let bytes = pattern(3 << 20, 1);
    {
        let client = TestClient::connect(&server);
        client.put("a", &bytes).unwrap();
        client.put("b", &bytes).unwrap();
        fill(&disk.0);
        let refused = client.put("c", &bytes).unwrap_err();
        assert!(matches!(&refused, Error::NoSpace(text) if text.contains(&disk.0.display().to_string())), "{refused}");
    }
    for round in 0..3 {
        server.crash();
        fill(&disk.0);
        server.serve().unwrap_or_else(|error| panic!("round {round}: {error}"));
        assert!(TestClient::connect(&server).read("a") == bytes, "round {round}");
    }
    // A clean stop is one, and the markers know the end of the log.
    fill(&disk.0);
    server.stop();
    let end = store::open(&server.config.stripe_dirs).unwrap().highest_sequence();
    server.serve().unwrap();
    assert!(server.daemon().recovered().previous.unwrap().stopped);
    let record = store_end(&server);
    assert!(end + 1 >= record, "the marker knows {end}, this run's first record is {record}");
    let client = TestClient::connect(&server);
    client.delete("b").unwrap();
    until("what was deleted is gone", || server.components().len() == 1);
    // So there is room again.
    client.put("d", &pattern(1 << 20, 2)).unwrap();
    empty(&disk.0);
    client.put("c", &bytes).unwrap();
    assert!(client.read("a") == bytes && client.read("c") == bytes);
    client.assert_quiet();
    server.assert_quiet();
    drop(client);
    server.stop();
    drop((server, disk));
}

/// The sequence number of the last record, right after a start.
fn store_end(server: &TestServer) -> u64 {
    server.server().node.publisher.catalog().revision()
}

/// The index can be lost, so a `state_dir` without room stops nothing: `status` says so, and a start says what it needs.
#[test]
fn i8_a_full_state_dir_stops_nothing_and_is_shown() {
    let test = "i8_a_full_state_dir_stops_nothing_and_is_shown";
    let root = tempfile::tempdir().unwrap();
    let config = configured(root.path(), 1, 1, "");
    std::fs::create_dir(&config.stripe_dirs[0]).unwrap();
    std::fs::create_dir(&config.state_dir).unwrap();
    let disk = match SmallDisk::mount(&config.state_dir, 64 << 10) {
        Ok(disk) => disk,
        Err(why) => return skipped(test, &format!("cannot mount a tmpfs: {why}")),
    };
    let path = config.state_dir.display().to_string();
    store::init(&config.stripe_dirs).unwrap();
    let mut server = TestServer::over(root, config);
    let degraded = |client: &TestClient| client.runtime.block_on(client.control.status()).unwrap().degraded;
    let objects = 300;
    {
        let client = TestClient::connect(&server);
        for number in 0..objects {
            client.put(&format!("k{number}"), &[1]).unwrap();
        }
        drop(client);
        // A clean stop makes the index durable: that is when it finds no room.
        server.stop();
        server.serve().unwrap();
    }
    for round in 0..3 {
        let client = TestClient::connect(&server);
        assert_eq!(server.server().node.publisher.frozen(), None);
        client.put(&format!("more{round}"), &[2]).unwrap();
        assert_eq!(client.read("more0"), [2]);
        assert_eq!(client.read(&format!("k{}", objects - 1)), [1], "round {round}");
        fill(&disk.0);
        drop(client);
        if round == 1 {
            server.crash()
        } else {
            server.stop()
        }
        server.serve().unwrap();
        let client = TestClient::connect(&server);
        let said = degraded(&client);
        assert!(said.iter().any(|line| line.contains(&path) && line.contains("bytes")), "{said:?}");
    }
    // Room again: the next time the index is made durable it is whole, and the start after that takes it as it is.
    empty(&disk.0);
    rustix::mount::mount_remount(&disk.0, rustix::mount::MountFlags::empty(), c"size=64m").unwrap();
    server.stop();
    server.serve().unwrap();
    assert_eq!((server.daemon().recovered().replayed, &server.daemon().recovered().index_discarded), (0, &None));
    let client = TestClient::connect(&server);
    assert_eq!(degraded(&client), Vec::<String>::new());
    assert_eq!(client.read("more2"), [2]);
    drop(client);
    server.stop();
    drop((server, disk));
}

/// Memory for what finds no room is bounded: then puts are refused by name, before their records; deletes still go.
#[test]
fn i6_memory_for_an_index_without_room_is_bounded() {
    let test = "i6_memory_for_an_index_without_room_is_bounded";
    let root = tempfile::tempdir().unwrap();
    let config = configured(root.path(), 1, 1, "");
    std::fs::create_dir(&config.stripe_dirs[0]).unwrap();
    std::fs::create_dir(&config.state_dir).unwrap();
    let disk = match SmallDisk::mount(&config.state_dir, 64 << 10) {
        Ok(disk) => disk,
        Err(why) => return skipped(test, &format!("cannot mount a tmpfs: {why}")),
    };
    store::init(&config.stripe_dirs).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let name = |number: u64| common::name(&format!("{number:05}{}", "x".repeat(200)));
    let mut number = 0;
    let refused = (0..40).find_map(|_| {
        let store = Arc::new(store::open(&config.stripe_dirs).unwrap());
        let options = LogCatalogOptions::new(&store, config.state_dir.clone(), "n1");
        let (catalog, _) = LogCatalog::open(LogCatalogOptions { index_memory: 8 << 20, ..options }).unwrap();
        let first = *runtime.block_on(catalog.reserve_versions(1000)).unwrap().start();
        for version in first..first + 600 {
            number += 1;
            let mut request = [0; 16];
            request[..8].copy_from_slice(&version.to_le_bytes());
            let descriptor = Descriptor {
                version,
                attributes: common::options().attributes,
                striping: Striping::new(1, 4096, 65536, 1).unwrap(),
                components: vec![vec![Replica { node: "n1".into(), directory: store.directories()[0].id() }]],
            };
            let put = Put { name: name(number), request, descriptor, condition: Condition::Always };
            if let Err(error) = runtime.block_on(catalog.commit_put(put)) {
                // What is there can still be removed.
                let condition = Condition::Always;
                let delete = Delete { name: name(1), request: [7; 16], version: first + 700, condition };
                runtime.block_on(catalog.delete(delete)).unwrap();
                assert!(runtime.block_on(catalog.lookup(&name(1))).unwrap().object.is_none());
                assert_eq!(catalog.frozen(), None);
                return Some(error);
            }
        }
        None
    });
    let refused = refused.expect("puts are refused in the end");
    let path = config.state_dir.display().to_string();
    assert!(
        matches!(&refused, CatalogError::Refused(Refusal::IndexFull(why)) if why.contains(&path)),
        "after {number} puts: {refused}"
    );
    drop((disk, root));
}

#[test]
fn init_refuses_a_file_system_that_cannot_hold_the_log_and_says_how_much_it_needs() {
    let test = "init_refuses_a_file_system_that_cannot_hold_the_log_and_says_how_much_it_needs";
    let Some((_root, disk, config)) = small(test, 10_000_000, "") else { return };
    let said = store::init(&config.stripe_dirs).unwrap_err().to_string();
    let needed = ((16u64 << 20) + (1 << 20)).to_string();
    assert!(said.contains(&needed) && said.contains(&disk.0.display().to_string()), "{said}");
    assert_eq!(std::fs::read_dir(&disk.0).unwrap().count(), 0, "nothing was made");
}
