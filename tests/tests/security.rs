//! Mutual TLS on the control connection, and who may what: real processes, real mounts, certificates of the test's own.

#![forbid(unsafe_code)]

use railfs_engine::client::{Client, Config, Done, Found, Freshness, ListQuery, Object};
use railfs_engine::control::WatchQuery;
use railfs_engine::tls::Files;
use railfs_tests::certs::{Authority, Held, When, replace};
use railfs_tests::cluster::{COMMAND, Cluster, NAMESPACE, Plan};
use railfs_tests::data::{assert_file, write_file};
use railfs_tests::process::{Output, run};
use railfs_tests::putter::{Made, Putter, options};
use railfs_tests::{need_mount, wait};
use rustix::io::Errno;
use std::path::Path;
use std::sync::Arc;

/// A store that takes only TLS; whoever its authority signed gets in.
struct Secure {
    cluster: Cluster,
    servers: Authority,
    clients: Authority,
    files: tempfile::TempDir,
}

impl Secure {
    fn start(more: &str) -> Secure {
        let files = tempfile::tempdir().unwrap();
        let (servers, clients) = (Authority::new("servers"), Authority::new("clients"));
        let held = servers.server(files.path(), &["127.0.0.1"], &clients);
        let cluster = Cluster::start(&Plan { more: held.security() + more, ..Plan::default() });
        Secure { cluster, servers, clients, files }
    }

    fn client(&self, name: &str) -> Held {
        self.clients.client(self.files.path(), name, When::Now, &self.servers)
    }

    fn cli(&self, arguments: &[&str], held: Option<&Held>) -> Output {
        let mut command = self.cluster.railfs();
        command.args(arguments);
        if let Some(held) = held {
            command.args(held.flags());
        }
        run(&mut command, COMMAND)
    }

    fn put(&self, key: &str, seed: u64, size: u64, held: &Held) -> Output {
        let file = self.files.path().join("to-put");
        write_file(&file, seed, size);
        self.cli(&["put", file.to_str().unwrap(), &self.cluster.url(key)], Some(held))
    }
}

fn errno(path: &Path) -> Option<i32> {
    std::fs::read(path).err().and_then(|error| error.raw_os_error())
}

#[test]
fn mutual_tls_over_a_real_mount_reads_what_was_put() {
    need_mount!("mutual_tls_over_a_real_mount_reads_what_was_put");
    let mut secure = Secure::start("");
    let alice = secure.client("alice");
    secure.put("file", 1, 9_000_001, &alice).expect(0);
    let mount = secure.cluster.mount("", &format!("arena=32MiB,{}", alice.options()));
    assert_file(&mount.at("file"), 1, 9_000_001);
    // Over a restart of the server, without a remount.
    secure.cluster.stop();
    secure.cluster.serve();
    wait::until("reads resume", wait::SOON, || std::fs::read(mount.at("file")).is_ok());
    secure.put("file", 2, 9_000_001, &alice).expect(0);
    wait::until("the new one is read", wait::SOON, || {
        std::fs::read(mount.at("file")).is_ok_and(|bytes| bytes == railfs_tests::data::bytes(2, 9_000_001))
    });
    // The same by environment, as in a unit.
    let mut command = secure.cluster.railfs();
    command.env("RAILFS_CERT", &alice.cert).env("RAILFS_KEY", &alice.key).env("RAILFS_CA", &alice.ca);
    let listed = run(command.args(["ls", &secure.cluster.url("")]), COMMAND).expect(0);
    assert!(listed.out().contains("file"), "{}", listed.out());
    mount.stop();
}

#[test]
fn who_has_no_certificate_or_a_wrong_one_gets_one_clear_line() {
    let secure = Secure::start("");
    let url = secure.cluster.url("");
    let words = |output: &Output| {
        let err = output.err();
        assert!(output.code != Some(0), "{err}");
        assert_eq!(err.trim().lines().count(), 1, "one line: {err}");
        assert!(!err.contains("transport error"), "{err}");
        err
    };
    let plain = words(&secure.cli(&["ls", &url], None));
    assert!(plain.contains("TLS") && plain.contains("cert"), "{plain}");
    // Of an authority that the server does not know, and one that is over.
    let stranger = Authority::new("strangers").client(secure.files.path(), "mallory", When::Now, &secure.servers);
    let strange = words(&secure.cli(&["ls", &url], Some(&stranger)));
    assert!(strange.contains("certificate"), "{strange}");
    let late = secure.clients.client(secure.files.path(), "late", When::Before, &secure.servers);
    let late = words(&secure.cli(&["ls", &url], Some(&late)));
    assert!(late.contains("certificate") && late.to_lowercase().contains("expired"), "{late}");
    // A server of another authority than the client's.
    let mut doubting = secure.client("bob");
    doubting.ca = stranger.cert.clone();
    let doubt = words(&secure.cli(&["ls", &url], Some(&doubting)));
    assert!(doubt.contains("certificate"), "{doubt}");
    // And TLS where there is none.
    let open = Cluster::start(&Plan::default());
    let mut command = open.railfs();
    command.args(["ls", &open.url("")]).args(secure.client("carol").flags());
    let spoken = words(&run(&mut command, COMMAND));
    assert!(spoken.contains("TLS"), "{spoken}");
    // A key that others can read.
    let loose = secure.client("dave");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    std::fs::set_permissions(&loose.key, mode).unwrap();
    let loose = words(&secure.cli(&["ls", &url], Some(&loose)));
    assert!(loose.contains("chmod") || loose.contains("read by"), "{loose}");
    // Whoever is right still gets in.
    secure.put("file", 1, 1000, &secure.client("erin")).expect(0);
}

#[test]
fn readers_read_and_writers_write_and_others_get_eacces() {
    need_mount!("readers_read_and_writers_write_and_others_get_eacces");
    let rights = format!("[[namespace]]\nname = \"{NAMESPACE}\"\nreaders = [\"reader\"]\nwriters = [\"writer\"]\n");
    let mut secure = Secure::start(&rights);
    let (reader, writer, other) = (secure.client("reader"), secure.client("writer"), secure.client("other"));
    secure.put("file", 1, 300_000, &writer).expect(0);
    secure.put("file", 2, 300_000, &reader).refused(1, &["reader", NAMESPACE, "write"]);
    secure.put("file", 2, 300_000, &other).refused(1, &["other", NAMESPACE]);
    let url = secure.cluster.url("file");
    secure.cli(&["rm", &url], Some(&reader)).refused(1, &["reader", NAMESPACE]);
    for (arguments, word) in
        [(["get", &url, "-"].as_slice(), "get"), (&["stat", &url], "stat"), (&["ls", &secure.cluster.url("")], "ls")]
    {
        secure.cli(arguments, Some(&reader)).expect(0);
        secure.cli(arguments, Some(&writer)).expect(0);
        let refused = secure.cli(arguments, Some(&other));
        assert!(
            refused.code == Some(1) && refused.err().contains("other"),
            "{word}: {:?} {}",
            refused.code,
            refused.err()
        );
        assert!(!refused.out().contains("file") || word != "ls", "{}", refused.out());
    }
    let mount = secure.cluster.mount("", &format!("arena=32MiB,{}", reader.options()));
    assert_file(&mount.at("file"), 1, 300_000);
    mount.stop();
    let mut command = secure.cluster.railfs();
    let place = secure.files.path().join("m");
    std::fs::create_dir(&place).unwrap();
    command.args(["mount", "-o", &other.options(), &secure.cluster.url("")]).arg(&place);
    let mounted = run(&mut command, COMMAND);
    // Either the mount is refused, or all that is asked of it is.
    if mounted.code == Some(0) {
        assert_eq!(errno(&place.join("file")), Some(Errno::ACCESS.raw_os_error()));
        let mut umount = secure.cluster.railfs();
        run(umount.arg("umount").arg(&place), COMMAND).expect(0);
    } else {
        assert!(mounted.err().contains("other"), "{}", mounted.err());
    }
}

#[test]
fn certificates_and_rights_change_without_a_restart() {
    need_mount!("certificates_and_rights_change_without_a_restart");
    let rights =
        |who: &str| format!("[[namespace]]\nname = \"{NAMESPACE}\"\nreaders = [\"{who}\"]\nwriters = [\"writer\"]\n");
    let mut secure = Secure::start(&rights("alice"));
    let (alice, bob, writer) = (secure.client("alice"), secure.client("bob"), secure.client("writer"));
    secure.put("file", 1, 200_000, &writer).expect(0);
    let mount = secure.cluster.mount("", &format!("arena=32MiB,{}", alice.options()));
    assert_file(&mount.at("file"), 1, 200_000);
    let url = secure.cluster.url("file");
    secure.cli(&["stat", &url], Some(&bob)).refused(1, &["bob"]);
    // Bob instead of Alice, in the configuration of a server that runs.
    let config = std::fs::read_to_string(secure.cluster.config()).unwrap();
    replace(secure.cluster.config(), &config.replace("readers = [\"alice\"]", "readers = [\"bob\"]"));
    wait::until("bob may read", wait::SOON, || secure.cli(&["stat", &url], Some(&bob)).code == Some(0));
    secure.cli(&["stat", &url], Some(&alice)).refused(1, &["alice"]);
    wait::until("alice's mount is told so", wait::SOON, || {
        errno(&mount.at("file")) == Some(Errno::ACCESS.raw_os_error())
    });
    replace(secure.cluster.config(), &config);
    wait::until("alice may read again, through the same mount", wait::SOON, || {
        std::fs::read(mount.at("file")).is_ok_and(|bytes| bytes == railfs_tests::data::bytes(1, 200_000))
    });
    // Another authority of clients: the old ones' new connections are refused, new ones get in.
    let newer = Authority::new("newer");
    secure.servers.server(secure.files.path(), &["127.0.0.1"], &newer);
    let new_alice = newer.client(secure.files.path(), "alice", When::Now, &secure.servers);
    wait::until("a client of the new authority gets in", wait::SOON, || {
        secure.cli(&["stat", &url], Some(&new_alice)).code == Some(0)
    });
    // What makes no sense leaves everything as it was, and is said.
    replace(&secure.files.path().join("server.pem"), "no certificate\n");
    wait::until("it is said", wait::SOON, || {
        std::fs::read_to_string(secure.cluster.log()).is_ok_and(|log| log.contains("server.pem"))
    });
    secure.cli(&["stat", &url], Some(&new_alice)).expect(0);
    mount.stop();
}

/// A client that knows all that one with rights was told, versions and where their components lie, gets nothing: neither on the control
/// connection nor over a rail, and what it pins is kept for nobody.
#[test]
fn who_has_no_rights_gets_nothing_over_rails_either() {
    let rights = format!("[[namespace]]\nname = \"{NAMESPACE}\"\nreaders = [\"reader\"]\nwriters = [\"writer\"]\n");
    let secure = Secure::start(&rights);
    let connect = |name: &str| {
        let held = secure.client(name);
        let tls = Some(Files { cert: held.cert, key: held.key, ca: held.ca });
        let addresses = vec![secure.cluster.control[0].to_string()];
        Client::connect(Config { addresses, tls, arena: 16 << 20, ..Config::default() }).unwrap()
    };
    let (reader, writer, other) = (connect("reader"), connect("writer"), connect("other"));
    let name = Putter::name("file");
    let made = || Arc::new(Made { seed: 1, size: 300_000 });
    writer.put(&name, made(), options()).unwrap();
    let object = |client: &Client| match Client::wait(|done| client.lookup(&name, done)) {
        Ok(Found::Object(object)) => Ok(object),
        Ok(found) => panic!("{found:?}"),
        Err(error) => Err(error),
    };
    let known = object(&reader).unwrap();
    let read = |client: &Client, freshness| {
        let stolen = Arc::new(Object::new(known.name.clone(), known.descriptor.clone(), known.proof()));
        Client::wait(|done: Done<Vec<u8>>| {
            client.read_as(&stolen, 1, 0, 4096, freshness, Box::new(|result| done(result.map(<[u8]>::to_vec))));
        })
    };
    let list = ListQuery {
        namespace: NAMESPACE.into(),
        prefix: Vec::new(),
        delimited: false,
        after: Vec::new(),
        limit: 0,
        within: None,
    };
    let watch = WatchQuery { namespace: name.namespace.clone(), prefix: Vec::new(), from: 1 };
    type Case<'a> = (&'a str, bool, Box<dyn Fn(&Client) -> Result<(), railfs_engine::error::Error> + 'a>);
    let cases: Vec<Case<'_>> = vec![
        ("lookup", true, Box::new(|client| object(client).map(drop))),
        ("list", true, Box::new(|client| Client::wait(|done| client.list(list.clone(), done)).map(drop))),
        ("watch", true, Box::new(|client| client.watch(&watch).map(drop))),
        ("status", true, Box::new(|client| client.server_status().map(drop))),
        ("a fetch of a version, checked", true, Box::new(|client| read(client, Freshness::Current).map(drop))),
        ("a fetch of a version, not checked", true, Box::new(|client| read(client, Freshness::Version).map(drop))),
        ("a pin", true, Box::new(|client| Client::wait(|done| client.pin(&known, done)))),
        ("a put", false, Box::new(|client| client.put(&Putter::name("new"), made(), options()).map(drop))),
        ("a delete", false, Box::new(|client| client.delete(&Putter::name("new"), None).map(drop))),
    ];
    for (what, readers_may, call) in &cases {
        call(&writer).unwrap_or_else(|error| panic!("{what} of a writer: {error}"));
        assert_eq!(call(&reader).is_ok(), *readers_may, "{what} of a reader");
        let refused = call(&other).map(|()| "it was done").expect_err(what).to_string();
        // To a pin the version is simply not there.
        let said = if *what == "a pin" { refused.contains("1025") } else { refused.contains("other") };
        assert!(said, "{what}: who it is that may not is not said: {refused}");
    }
    let bytes = read(&reader, Freshness::Current).unwrap();
    assert_eq!(bytes, railfs_tests::data::bytes(1, 4096));
}
