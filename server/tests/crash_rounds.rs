//! Crashes at many points of overwrites: the name is the old or the new version, whole, and nothing else is left.

mod common;

use common::{TestClient, TestServer, options, pattern, until};
use railfs_engine::client::PutOptions;
use railfs_proto::reply::Lookup;

const SIZE: usize = 700_000;

#[test]
fn i8_a_crash_at_any_point_of_an_overwrite_leaves_old_or_new() {
    let mut server = TestServer::start(2, 2, "[retention]\nsuperseded = \"0 s\"\n");
    let mut acknowledged = 0u64;
    let mut highest = 0;
    for round in 0..12u64 {
        let client = TestClient::connect(&server);
        let (control, puts) = (client.control.clone(), client.puts.clone());
        let (told, tell) = (std::sync::Arc::new(std::sync::atomic::AtomicU64::new(acknowledged)), acknowledged);
        let telling = told.clone();
        let writer = client.runtime.spawn(async move {
            for content in tell + 1.. {
                let source = std::sync::Arc::new(common::Memory(pattern(SIZE, content)));
                let layout = PutOptions { stripe_size: 65536, page_size: 4096, ..options() };
                let name = common::name("k");
                let Ok(done) = railfs_engine::put::put(&control, &puts, &name, source, layout).await else { return };
                assert!(!done.superseded);
                telling.store(content, std::sync::atomic::Ordering::SeqCst);
            }
        });
        // A different point each time: so many bytes into the puts of this round.
        let bytes = 200_000 + round * 333_333;
        until("enough was pulled", || server.counter("pull_bytes") >= bytes);
        server.crash();
        writer.abort();
        let _ = client.runtime.block_on(writer);
        acknowledged = told.load(std::sync::atomic::Ordering::SeqCst);
        drop(client);
        server.serve().unwrap();

        let client = TestClient::connect(&server);
        match client.lookup("k") {
            Lookup::Object(descriptor, proof) => {
                assert!(descriptor.version >= highest, "round {round}: a version came back");
                highest = descriptor.version;
                let found = client.get(&descriptor, &proof);
                // The one that was acknowledged last, or the one that was on its way.
                let content = (acknowledged..=acknowledged + 1).find(|content| found == pattern(SIZE, *content));
                acknowledged =
                    content.unwrap_or_else(|| panic!("round {round}: not whole, or not {acknowledged} or next"));
            }
            Lookup::Absent(_) => assert_eq!(acknowledged, 0, "round {round}: what was acknowledged is gone"),
            other => panic!("{other:?}"),
        }
        // What records name, and nothing else, once what was superseded is reclaimed.
        let wanted = if acknowledged == 0 { 0 } else { 2 };
        until("only the current version is left", || server.components().len() == wanted);
        server.assert_quiet();
    }
    common::tally("i8", "crashes", 12, "i8_a_crash_at_any_point_of_an_overwrite_leaves_old_or_new");
}
