//! Servers that hang, die, come back, are spoken to in garbage or in another protocol, or are started twice.

#![forbid(unsafe_code)]

use railfs_proto::v1::{self, control_client::ControlClient};
use railfs_tests::cluster::{Cluster, Plan};
use railfs_tests::data::{Random, assert_file, fill, write_file};
use railfs_tests::mount::{Mount, is_mounted};
use railfs_tests::process::{Process, run};
use railfs_tests::quiet::assert_quiet;
use railfs_tests::wait::{self, eventually};
use railfs_tests::{data, need_mount};
use rustix::io::Errno;
use rustix::process::Signal;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
/// Beyond a deadline: two cores do other things too.
const MARGIN: Duration = Duration::from_secs(3);

#[test]
fn i9_nothing_hangs_while_the_server_hangs() {
    need_mount!("i9_nothing_hangs_while_the_server_hangs");
    let mut cluster = Cluster::start(&Plan::default());
    let source = cluster.root.path().join("source");
    write_file(&source, 1, 40 * MIB as u64);
    cluster.put(&source, "f");
    let options = "arena=16MiB,readahead=0,read_timeout=2s,metadata_timeout=2s";
    let mount = cluster.mount("", options);
    let other = cluster.mount("", options);
    let file = File::open(mount.at("f")).unwrap();
    let mut buffer = vec![0; MIB];
    assert_eq!(file.read_at(&mut buffer, 0).unwrap(), MIB);

    cluster.server().signal(Signal::STOP);
    cluster.server().wait_stopped();
    // Cold and warm alike: what cannot be checked is not shown, and the answer comes by the deadline.
    for offset in [20 * MIB as u64, 0, 30 * MIB as u64] {
        let started = Instant::now();
        let error = file.read_at(&mut buffer, offset).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::TIMEDOUT.raw_os_error()), "{error}");
        assert!(started.elapsed() < Duration::from_secs(2) + MARGIN, "{:?}", started.elapsed());
    }
    for program in ["ls", "df", "stat", "find"] {
        let output = run(Command::new(program).arg(&mount.path), Duration::from_secs(10));
        eprintln!("{program}: {:?} after {:?}", output.code, output.took);
    }
    // A reader in mid-wait can be killed as soon as its request is answered.
    let mut cat = Process::start(Command::new("cat").arg(mount.at("f")).stdout(Stdio::null()).stderr(Stdio::null()));
    cat.signal(Signal::TERM);
    cat.wait(Duration::from_secs(4) + MARGIN);
    assert!(mount.status()["server_error"].is_string(), "status says that the server does not answer");
    // A mount whose server hangs ends in bounded time, with a reader in it.
    let mut reader = Process::start(Command::new("cat").arg(other.at("f")).stdout(Stdio::null()).stderr(Stdio::null()));
    let path = other.path.clone();
    let started = Instant::now();
    other.stop();
    assert!(started.elapsed() < Duration::from_secs(10) + MARGIN && !is_mounted(&path));
    reader.wait(wait::SOON);

    cluster.server().signal(Signal::CONT);
    // The same descriptor, without a remount.
    eventually("reads resume", wait::SOON, || {
        file.read_at(&mut buffer, 20 * MIB as u64).map_err(|error| error.to_string())
    });
    let mut want = vec![0; MIB];
    fill(1, 20 * MIB as u64, &mut want);
    assert!(buffer == want);
    drop(file);
    assert_file(&mount.at("f"), 1, 40 * MIB as u64);
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

/// How often these words are in the log.
fn said(log: &str, words: &[&str]) -> usize {
    log.lines().filter(|line| words.iter().all(|word| line.contains(word))).count()
}

#[test]
fn i11_an_outage_is_logged_once_and_costs_ls_and_df_one_limit() {
    need_mount!("i11_an_outage_is_logged_once_and_costs_ls_and_df_one_limit");
    let mut cluster = Cluster::start(&Plan::default());
    let source = cluster.root.path().join("source");
    write_file(&source, 5, MIB as u64);
    cluster.put(&source, "f");
    let limit = Duration::from_secs(3);
    let mount = cluster.mount("", "arena=16MiB,metadata_timeout=3s");
    assert_file(&mount.at("f"), 5, MIB as u64);
    cluster.kill();
    eventually("the rails are down", wait::SOON, || {
        let down = mount.rails("state").iter().all(|state| state == "down");
        if down { Ok(()) } else { Err(format!("{:?}", mount.rails("state"))) }
    });
    // All of them together: the first finds out, the others are told at once.
    let started = Instant::now();
    for round in 0..3 {
        for program in ["ls", "df", "stat", "ls"] {
            let output = run(Command::new(program).arg(&mount.path), Duration::from_secs(20));
            eprintln!("{round} {program}: {:?} after {:?}", output.code, output.took);
            assert!(output.took < limit * 2 + MARGIN, "{program}: {:?}", output.took);
        }
    }
    let took = started.elapsed();
    assert!(took < limit * 5 + MARGIN, "{took:?}");
    let degraded = mount.status()["mount"]["degraded"].to_string();
    assert!(degraded.contains("does not answer"), "{degraded}");
    let log = mount.logged();
    assert_eq!(said(&log, &["WARN", "the server does not answer"]), 1, "{log}");
    for rail in 0..2 {
        let name = format!("f{rail} ");
        let lines = said(&log, &["WARN", &name, "rail is down"]);
        // Once that the connection broke, once that no new one can be made; never once for each try.
        assert!((1..=3).contains(&lines), "rail {name}: {lines} lines: {log}");
    }
    cluster.serve();
    eventually("it answers again", wait::SOON, || {
        std::fs::read_dir(&mount.path).map(drop).map_err(|error| error.to_string())
    });
    assert_file(&mount.at("f"), 5, MIB as u64);
    assert_eq!(said(&mount.logged(), &["the server answers again"]), 1);
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

#[test]
fn reads_resume_after_a_restart_of_the_server() {
    need_mount!("reads_resume_after_a_restart_of_the_server");
    let mut cluster = Cluster::start(&Plan::default());
    let source = cluster.root.path().join("source");
    write_file(&source, 2, 30 * MIB as u64);
    cluster.put(&source, "f");
    let mount = cluster.mount("", "arena=16MiB,metadata_timeout=2s");
    let file = File::open(mount.at("f")).unwrap();
    let (mut buffer, mut want) = (vec![0; MIB], vec![0; MIB]);
    for clean in [true, false] {
        if clean {
            cluster.stop()
        } else {
            cluster.kill()
        }
        let started = Instant::now();
        assert!(std::fs::read_dir(&mount.path).is_err() || started.elapsed() < Duration::from_secs(5) + MARGIN);
        cluster.serve();
        for offset in [0, 15 * MIB as u64, 29 * MIB as u64] {
            eventually("reads resume", wait::SOON, || {
                file.read_at(&mut buffer, offset).map_err(|error| error.to_string())
            });
            fill(2, offset, &mut want);
            assert!(buffer == want, "at {offset}");
        }
    }
    // A read that is under way while the server goes and comes waits for it: one deadline, one answer.
    let read = std::thread::scope(|scope| {
        cluster.kill();
        let read = scope.spawn(|| {
            let mut buffer = vec![0; MIB];
            file.read_at(&mut buffer, 10 * MIB as u64).map(|got| (got, buffer))
        });
        cluster.serve();
        read.join().unwrap()
    });
    let (got, buffer) = read.unwrap_or_else(|error| panic!("a read across a short restart: {error}"));
    fill(2, 10 * MIB as u64, &mut want);
    assert!(got == MIB && buffer == want);
    drop(file);
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

/// What nobody who speaks the protocol would send.
fn garbage(address: SocketAddr, random: &mut Random, until: &AtomicBool) -> u64 {
    let mut sent = 0;
    let mut idle = Vec::new();
    while !until.load(Ordering::Relaxed) {
        let Ok(mut stream) = TcpStream::connect(address) else { continue };
        let _ = stream.set_read_timeout(Some(Duration::from_millis(20)));
        let _ = stream.set_write_timeout(Some(Duration::from_millis(100)));
        let length = random.below(20_000) as usize;
        let bytes = match random.below(6) {
            0 => data::bytes(random.below(u64::MAX), length),
            1 => b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
            2 => [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &data::bytes(random.below(u64::MAX), length)].concat(),
            3 => vec![0xff; length],
            4 => vec![0; length],
            _ => Vec::new(),
        };
        let _ = stream.write_all(&bytes);
        sent += bytes.len() as u64;
        match random.below(3) {
            0 => drop(stream.read(&mut [0; 100])),
            // Says nothing more, and stays.
            1 if idle.len() < 40 => idle.push(stream),
            _ => {}
        }
    }
    sent
}

#[test]
fn garbage_on_both_ports_does_not_disturb_others() {
    let mut cluster = Cluster::start(&Plan::default());
    let source = cluster.root.path().join("source");
    write_file(&source, 3, 2_000_000);
    let over = AtomicBool::new(false);
    let targets = [cluster.control[0], cluster.rails[0], cluster.rails[1]];
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    std::thread::scope(|scope| {
        let end = Over(&over);
        let senders: Vec<_> = targets
            .into_iter()
            .zip(1..)
            .map(|(address, seed)| {
                let over = &over;
                scope.spawn(move || garbage(address, &mut Random::new(seed), over))
            })
            .collect();
        for round in 0..15 {
            let key = format!("k{}", round % 3);
            cluster.put(&source, &key);
            let output = cluster.cli(&["get", &cluster.url(&key), "-"]).expect(0);
            assert_eq!(data::compare(&mut &output.stdout[..], 3, 2_000_000), Ok(()));
        }
        drop(end);
        for sender in senders {
            assert!(sender.join().unwrap() > 0);
        }
    });
    assert!(cluster.is_served());
    assert_quiet(&cluster, &[]);
}

#[test]
fn a_second_server_is_refused_and_told_who_holds_the_directories() {
    let mut cluster = Cluster::start(&Plan::default());
    let pid = cluster.server().pid().to_string();
    // Another configuration, other ports, one directory in common.
    let text = std::fs::read_to_string(cluster.config()).unwrap();
    let state = cluster.root.path().join("state");
    let text = text.replace(state.to_str().unwrap(), cluster.root.path().join("other").to_str().unwrap());
    let ports: Vec<u16> = cluster.control.iter().chain(&cluster.rails).map(SocketAddr::port).collect();
    let text = ports.iter().fold(text, |text, port| text.replace(&format!(":{port}\""), ":0\""));
    let second = cluster.root.path().join("second.toml");
    std::fs::write(&second, text).unwrap();
    let output = run(cluster.railfsd().arg("serve").arg("--config").arg(&second), wait::SOON);
    output.refused(1, &[&pid, cluster.directories[0].to_str().unwrap()]);
    // The first goes on; killed, its locks are gone with it.
    let source = cluster.root.path().join("source");
    write_file(&source, 4, 1000);
    cluster.put(&source, "f");
    cluster.kill();
    cluster.serve();
    assert_quiet(&cluster, &[]);
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

#[test]
fn i12_a_client_of_another_protocol_is_refused_with_both_versions() {
    let cluster = Cluster::start(&Plan::default());
    let address = cluster.control[0];
    let reply = runtime().block_on(async {
        let mut client = ControlClient::connect(format!("http://{address}")).await.unwrap();
        let request = v1::HelloRequest { protocol_min: 77, protocol_max: 99, ..Default::default() };
        client.hello(request).await.unwrap().into_inner()
    });
    let outcome = reply.outcome.unwrap_or_default();
    assert_eq!(outcome.code, i32::from(v1::Code::Protocol));
    let own = format!("{} to {}", railfs_proto::PROTOCOL_MIN, railfs_proto::PROTOCOL_MAX);
    assert!(outcome.message.contains("77 to 99") && outcome.message.contains(&own), "{}", outcome.message);
    assert!(!outcome.message.contains('\n'));
    assert_eq!((reply.protocol_min, reply.session), (railfs_proto::PROTOCOL_MIN, 0));
    assert_quiet(&cluster, &[]);
}

/// A server of a time to come: it speaks other protocols only.
struct FromTheFuture {
    polite: bool,
}

type Answer<T> = Result<tonic::Response<T>, tonic::Status>;

#[tonic::async_trait]
impl v1::control_server::Control for FromTheFuture {
    async fn hello(&self, _: tonic::Request<v1::HelloRequest>) -> Answer<v1::HelloReply> {
        let refused = v1::Outcome { code: v1::Code::Protocol.into(), message: "too old".to_owned() };
        Ok(tonic::Response::new(v1::HelloReply {
            outcome: Some(if self.polite {
                refused
            } else {
                v1::Outcome { code: v1::Code::Ok.into(), ..Default::default() }
            }),
            protocol: 78,
            protocol_min: 77,
            protocol_max: 99,
            software: "railfsd 9.0".to_owned(),
            store: vec![7; 16].into(),
            node: "n".to_owned(),
            incarnation: 1,
            session: 1,
            lease_milliseconds: 2000,
            max_fetch_bytes: 1 << 20,
            ..Default::default()
        }))
    }
    async fn lookup_object(&self, _: tonic::Request<v1::LookupRequest>) -> Answer<v1::LookupReply> {
        Err(tonic::Status::unimplemented("not here"))
    }
    async fn list(&self, _: tonic::Request<v1::ListRequest>) -> Answer<v1::ListReply> {
        Err(tonic::Status::unimplemented("not here"))
    }
    async fn begin_put(&self, _: tonic::Request<v1::BeginPutRequest>) -> Answer<v1::BeginPutReply> {
        Err(tonic::Status::unimplemented("not here"))
    }
    async fn commit_put(&self, _: tonic::Request<v1::CommitPutRequest>) -> Answer<v1::CommitPutReply> {
        Err(tonic::Status::unimplemented("not here"))
    }
    async fn abort_put(&self, _: tonic::Request<v1::AbortPutRequest>) -> Answer<v1::AbortPutReply> {
        Err(tonic::Status::unimplemented("not here"))
    }
    async fn delete(&self, _: tonic::Request<v1::DeleteRequest>) -> Answer<v1::DeleteReply> {
        Err(tonic::Status::unimplemented("not here"))
    }
    async fn join_verbs(&self, _: tonic::Request<v1::JoinVerbsRequest>) -> Answer<v1::JoinVerbsReply> {
        Err(tonic::Status::unimplemented("not here"))
    }
    async fn status(&self, _: tonic::Request<v1::StatusRequest>) -> Answer<v1::StatusReply> {
        Err(tonic::Status::unimplemented("not here"))
    }
    async fn bye(&self, _: tonic::Request<v1::ByeRequest>) -> Answer<v1::ByeReply> {
        Err(tonic::Status::unimplemented("not here"))
    }
    type WatchStream = tonic::codegen::tokio_stream::Empty<Result<v1::WatchReply, tonic::Status>>;
    async fn watch(&self, _: tonic::Request<tonic::Streaming<v1::WatchRequest>>) -> Answer<Self::WatchStream> {
        Err(tonic::Status::unimplemented("not here"))
    }
}

#[test]
fn i12_a_server_of_another_protocol_is_refused_with_both_versions() {
    let cluster = Cluster::new(&Plan::default());
    let runtime = runtime();
    for polite in [true, false] {
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let incoming = tonic::transport::server::TcpIncoming::from(listener);
        let service = v1::control_server::ControlServer::new(FromTheFuture { polite });
        runtime.spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));
        let url = format!("railfs://{address}/ns/");
        let own = format!("{} to {}", railfs_proto::PROTOCOL_MIN, railfs_proto::PROTOCOL_MAX);
        for arguments in [&["ls"][..], &["status", "--json"]] {
            let arguments: Vec<&str> = arguments.iter().copied().chain([url.as_str()]).collect();
            let output = cluster.cli(&arguments).refused(1, &["77 to 99", &own]);
            assert_eq!(output.err().lines().count(), 1, "one line: {}", output.err());
            assert!(output.took < Duration::from_secs(10));
        }
    }
}

/// Under a live mount, and back: nobody hangs meanwhile, the log says why, and nothing has to be done by hand.
#[test]
fn i12_a_server_that_is_replaced_by_one_of_another_protocol_and_back_needs_no_remount() {
    need_mount!("i12_a_server_that_is_replaced_by_one_of_another_protocol_and_back_needs_no_remount");
    let mut cluster = Cluster::start(&Plan::default());
    let source = cluster.root.path().join("source");
    write_file(&source, 3, 4 * MIB as u64);
    cluster.put(&source, "f");
    let limits = "arena=16MiB,readahead=0,read_timeout=2s,metadata_timeout=2s";
    let mount = cluster.mount("", limits);
    let file = File::open(mount.at("f")).unwrap();
    let mut buffer = vec![0; MIB];
    file.read_exact_at(&mut buffer, 0).unwrap();
    for polite in [true, false] {
        cluster.stop();
        let runtime = runtime();
        let listener = runtime.block_on(tokio::net::TcpListener::bind(cluster.control[0])).unwrap();
        let incoming = tonic::transport::server::TcpIncoming::from(listener);
        let service = v1::control_server::ControlServer::new(FromTheFuture { polite });
        runtime.spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));
        // What is in the cache and what is not.
        for offset in [0, 2 * MIB as u64] {
            let started = Instant::now();
            file.read_at(&mut buffer, offset).unwrap_err();
            assert!(started.elapsed() < Duration::from_secs(2) + MARGIN, "{:?}", started.elapsed());
        }
        eventually("the mount's log names both versions", wait::SOON, || {
            let log = std::fs::read_to_string(&mount.log).map_err(|error| error.to_string())?;
            if log.contains("77 to 99") { Ok(()) } else { Err(log) }
        });
        runtime.shutdown_timeout(Duration::from_secs(5));
        cluster.serve();
        eventually("it is read again", wait::SOON, || {
            let bytes = std::fs::read(mount.at("f")).map_err(|error| error.to_string())?;
            if bytes == data::bytes(3, 4 * MIB) { Ok(()) } else { Err("other bytes".to_owned()) }
        });
    }
    file.read_exact_at(&mut buffer, 0).unwrap();
    drop(file);
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}

/// A daemon that is killed and started again, twenty times: its readers are told, and the place is mounted again with no manual step.
#[test]
fn i9_a_daemon_that_is_killed_twenty_times_is_mounted_again_with_no_manual_step() {
    const NAME: &str = "i9_a_daemon_that_is_killed_twenty_times_is_mounted_again_with_no_manual_step";
    need_mount!(NAME);
    let mut cluster = Cluster::start(&Plan::default());
    let source = cluster.root.path().join("source");
    write_file(&source, 4, 2 * MIB as u64);
    cluster.put(&source, "f");
    let mut mount = cluster.mount("", "arena=16MiB");
    for round in 0..20 {
        let file = File::open(mount.at("f")).unwrap();
        let mut buffer = vec![0; MIB];
        file.read_exact_at(&mut buffer, 0).unwrap();
        let mut reader = Process::start(
            Command::new("sh")
                .arg("-c")
                .arg("while cat \"$0\"; do :; done")
                .arg(mount.at("f"))
                .stdout(Stdio::null())
                .stderr(Stdio::null()),
        );
        mount.kill();
        let started = Instant::now();
        file.read_at(&mut buffer, MIB as u64).unwrap_err();
        reader.wait(MARGIN);
        assert!(started.elapsed() < MARGIN, "round {round}: {:?}", started.elapsed());
        let (path, log) = (mount.path.clone(), mount.log.with_extension(format!("{round}.log")));
        let url = cluster.url("");
        let again = Mount::start(|| cluster.railfs(), &url, path, log, "arena=16MiB");
        // The old value would take the new mount away when it is dropped.
        std::mem::forget(std::mem::replace(&mut mount, again));
        assert_file(&mount.at("f"), 4, 2 * MIB as u64);
    }
    railfs_tests::tally("i9", "kills", 20, NAME);
    assert_quiet(&cluster, &[&mount]);
    mount.stop();
}
