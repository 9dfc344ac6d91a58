//! What a server says of a store that is not whole, by status and by the standard health service.

mod common;

use common::{TestClient, TestServer, configured, until};
use railfs_engine::error::Error;
use railfs_server::daemon::{HEALTH_DIRECTORIES, HEALTH_PUBLISHING};
use railfs_server::store;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

fn health(server: &TestServer, client: &TestClient, service: &str) -> ServingStatus {
    let address = format!("http://{}", server.control());
    let reply = client.runtime.block_on(async {
        let channel = tonic::transport::Endpoint::from_shared(address).unwrap().connect().await.unwrap();
        let mut health = HealthClient::new(channel);
        health.check(HealthCheckRequest { service: service.to_owned() }).await.unwrap().into_inner()
    });
    ServingStatus::try_from(reply.status).unwrap()
}

/// The ports of a server within this process are free a moment after its clients have gone.
fn serve(server: &mut TestServer) {
    until("it serves", || server.serve().is_ok());
}

#[test]
fn i11_health_tells_a_missing_directory_from_a_store_that_takes_no_puts() {
    let root = tempfile::tempdir().unwrap();
    let config = configured(root.path(), 3, 1, "");
    for directory in &config.stripe_dirs {
        std::fs::create_dir(directory).unwrap();
    }
    store::init(&config.stripe_dirs).unwrap();
    let mut server = TestServer::over(root, config);
    let away = server.root.path().join("away");
    let well = (ServingStatus::Serving, ServingStatus::Serving);
    // Whole; without a directory that keeps no log; without one that does.
    for (place, want) in [
        (None, well),
        (Some(2), (ServingStatus::NotServing, ServingStatus::Serving)),
        (Some(1), (ServingStatus::NotServing, ServingStatus::NotServing)),
        (None, well),
    ] {
        server.stop();
        if let Some(place) = place {
            std::fs::rename(&server.config.stripe_dirs[place], &away).unwrap();
        }
        serve(&mut server);
        let client = TestClient::connect(&server);
        let states = || (health(&server, &client, HEALTH_DIRECTORIES), health(&server, &client, HEALTH_PUBLISHING));
        assert_eq!(states(), want, "{place:?}");
        assert_eq!(health(&server, &client, "railfs.v1.Control"), ServingStatus::Serving);
        match client.put("a", b"x") {
            Ok(_) => assert_ne!(place, Some(1)),
            Err(Error::ReadOnly(why)) => assert!(place == Some(1) && why.contains("d1"), "{why}"),
            Err(error) => panic!("{error}"),
        }
        if place.is_none() {
            // While it serves.
            std::fs::rename(&server.config.stripe_dirs[2], &away).unwrap();
            until("it is seen", || states() == (ServingStatus::NotServing, ServingStatus::Serving));
            std::fs::rename(&away, &server.config.stripe_dirs[2]).unwrap();
        }
        drop(client);
        if let Some(place) = place {
            server.stop();
            std::fs::rename(&away, &server.config.stripe_dirs[place]).unwrap();
            serve(&mut server);
        }
    }
}

#[test]
fn i6_streams_of_health_and_reflection_are_bounded_and_who_asks_once_is_told() {
    use railfs_server::control::asides::MAX_STREAMS;
    use tonic::{Code, codegen::tokio_stream};
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;

    let server = TestServer::start(1, 1, "");
    let client = TestClient::connect(&server);
    let address = format!("http://{}", server.control());
    let first = HealthCheckRequest { service: HEALTH_PUBLISHING.to_owned() };
    client.runtime.block_on(async {
        let channel = tonic::transport::Endpoint::from_shared(address).unwrap().connect().await.unwrap();
        let mut health = HealthClient::new(channel.clone());
        let mut reflection = ServerReflectionClient::new(channel);
        let mut watches = Vec::new();
        for _ in 0..MAX_STREAMS {
            let mut watch = health.watch(first.clone()).await.unwrap().into_inner();
            assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
            watches.push(watch);
        }
        let refused = health.watch(first.clone()).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted);
        assert!(refused.message().contains(&format!("{MAX_STREAMS} streams")), "{refused}");
        let refused = reflection.server_reflection_info(tokio_stream::empty()).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted, "they share one limit");
        let told = health.check(first.clone()).await.unwrap().into_inner();
        assert_eq!(told.status(), ServingStatus::Serving, "whoever asks once is told");
        // One that ends makes room.
        drop(watches.pop());
        let room = async {
            loop {
                match health.watch(first.clone()).await {
                    Err(error) if error.code() == Code::ResourceExhausted => tokio::task::yield_now().await,
                    answer => break answer.unwrap(),
                }
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(20), room).await.unwrap();
    });
    client.put("a", b"x").unwrap();
}

#[test]
fn i9_i11_a_directory_that_hangs_is_shown_and_costs_the_others_nothing() {
    use railfs_engine::client::PutOptions;
    use railfs_server::share::SHARE;
    use std::sync::{Arc, Mutex, PoisonError, mpsc};

    let server = TestServer::start(3, 1, "");
    let client = TestClient::connect(&server);
    let bytes = common::pattern(100_000, 1);
    let node = Arc::clone(&server.server().node);
    let one = || PutOptions { width: 1, ..common::options() };
    client.put_with("there", &bytes, one()).unwrap();
    let there = client.object("there");
    let hung = there.0.components[0][0].directory;
    let at = node.store.directories().iter().position(|directory| directory.id() == hung).unwrap();
    // What its disk would do: more threads than the share ask it, and whoever asked gives up.
    let (let_go, held) = mpsc::channel::<()>();
    let held = Arc::new(Mutex::new(held));
    for _ in 0..SHARE + 8 {
        let (node, held) = (Arc::clone(&node), Arc::clone(&held));
        let inside = move || _ = held.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let soon = std::time::Duration::from_millis(10);
        node.runtime.clone().spawn(async move { node.shares.of(hung).unwrap().run(soon, inside).await });
    }
    until("it is said not to answer", || node.shares.silent(hung).is_some());
    until("health says so", || health(&server, &client, HEALTH_DIRECTORIES) == ServingStatus::NotServing);
    let status = client.runtime.block_on(async {
        let address = format!("http://{}", server.control());
        let mut control = railfs_proto::v1::control_client::ControlClient::connect(address).await.unwrap();
        let request = railfs_proto::v1::StatusRequest { scope: Some(node.scope()) };
        control.status(request).await.unwrap().into_inner()
    });
    let state = &status.directories[at];
    assert!(state.state == "hanging" && state.reason.contains("requests wait"), "{state:?}");
    let other = &status.directories[(at + 1) % 3];
    assert!(other.state == "ok" && other.total_bytes > 0, "{other:?}");
    let refused = client.try_get(&there.0, &there.1).unwrap_err();
    assert!(refused.contains("does not answer") && refused.contains(&format!("d{at}")), "{refused}");
    client.put_with("new", &bytes, one()).unwrap();
    let new = client.object("new");
    assert_ne!(new.0.components[0][0].directory, hung);
    assert!(client.get(&new.0, &new.1) == bytes);
    drop(let_go);
    until("it answers", || node.shares.silent(hung).is_none());
    assert!(client.get(&there.0, &there.1) == bytes);
}
