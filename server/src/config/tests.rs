use super::*;

fn ok(text: &str) -> Config {
    parse(text, "f.toml", "host").map(|(config, _)| config).unwrap_or_else(|error| panic!("{error}\n{text}"))
}
fn refused(text: &str) -> String {
    match parse(text, "f.toml", "host") {
        Ok((config, _)) => panic!("accepted:\n{text}\nas\n{config}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn the_least_file_has_documented_defaults() {
    let config = ok("stripe_dirs = [\"/a\"]");
    assert_eq!(config.node, "host");
    assert_eq!(config.state_dir, Path::new("/var/lib/railfs"));
    assert_eq!(config.control, ["127.0.0.1:7420".parse().unwrap()]);
    assert_eq!(config.rails.len(), 1);
    assert_eq!(config.rails[0].listen, "127.0.0.1:7421".parse().unwrap());
    assert_eq!(config.put, PutConfig { stripe_size: 1 << 20, page_size: 64 << 10, width: None });
    assert_eq!((config.max_registered, config.retention), (64 << 20, Duration::from_secs(60)));
    assert!(!config.insecure);
}

const FULL: &str = r#"
node = "n1"
state_dir = "/srv/state/"
stripe_dirs = ["/srv/a", "/srv//b/"]
[control]
listen = ["127.0.0.1", "[::1]:9000"]
[[rail]]
fabric = "left"
transport = "tcp"
listen = "127.0.0.2:7421"
[[rail]]
fabric = "right"
listen = "10.0.0.1:7421"
announce = false
[put]
stripe_size = "4 MiB"
page_size = 4096
width = 2
[memory]
max_registered = "128MiB"
[retention]
superseded = "500 ms"
pin_lease = "3 s"
max_pins = 20
[timeouts]
cq = "100 ms"
request = "30 s"
[security]
cert = "/etc/railfs/server.pem"
key = "/etc/railfs/server.key"
client_ca = "/etc/railfs/clients.pem"
[[namespace]]
name = "models"
readers = ["alice", "*"]
writers = ["bob"]
[[namespace]]
name = "*"
"#;

#[test]
fn every_key_is_read_and_the_resolved_form_reads_back() {
    let config = ok(FULL);
    assert_eq!(config.stripe_dirs, [Path::new("/srv/a"), Path::new("/srv/b")]);
    assert_eq!(config.control, ["127.0.0.1:7420".parse().unwrap(), "[::1]:9000".parse().unwrap()]);
    assert_eq!(config.rails[1].fabric, "right");
    assert_eq!(config.put, PutConfig { stripe_size: 4 << 20, page_size: 4096, width: Some(2) });
    assert_eq!((config.max_registered, config.retention), (128 << 20, Duration::from_millis(500)));
    assert_eq!((config.pin_lease, config.max_pins), (Duration::from_secs(3), 20));
    assert_eq!((config.cq_timeout, config.request_timeout), (Duration::from_millis(100), Duration::from_secs(30)));
    assert_eq!((config.rails[0].announce, config.rails[1].announce), (true, false));
    let files = config.tls.as_ref().unwrap();
    assert_eq!(
        (files.key.as_path(), files.ca.as_path()),
        (Path::new("/etc/railfs/server.key"), Path::new("/etc/railfs/clients.pem"))
    );
    assert_eq!((config.insecure, config.namespaces.len()), (false, 2));
    assert_eq!(
        (&config.namespaces[0].readers[1], &config.namespaces[0].writers[0]),
        (&"*".to_owned(), &"bob".to_owned())
    );
    assert_eq!(ok(&config.to_string()), config);
    let least = ok("stripe_dirs = [\"/a \\\" b\"]");
    assert_eq!(ok(&least.to_string()), least);
}

#[test]
fn an_unknown_key_is_named_with_its_line_and_the_nearest_right_one() {
    let said = refused("stripe_dirs = [\"/a\"]\n\n[put]\nstripe_siz = 1");
    assert_eq!(said, "f.toml:4: put.stripe_siz: there is no such key; did you mean put.stripe_size?");
    assert!(
        refused("stripe_dir = [\"/a\"]")
            .contains("f.toml:1: stripe_dir: there is no such key; did you mean stripe_dirs?")
    );
    assert!(refused("stripe_dirs = [\"/a\"]\nmax_registered = 1").contains("did you mean memory.max_registered?"));
    assert!(refused("[putt]\n").contains("did you mean put?"));
}

#[test]
fn what_is_wrong_is_named_with_key_and_line() {
    let with = |rest: &str| refused(&format!("stripe_dirs = [\"/a\"]\n{rest}"));
    for (text, want) in [
        ("node = 7", "f.toml:2: node: is a TOML integer"),
        ("require_rdma = true", "f.toml:2: require_rdma: is true, and no [[rail]] has transport = \"rdma\""),
        ("node = \"a b\"", "f.toml:2: node:"),
        ("state_dir = \"x\"", "f.toml:2: state_dir: \"x\" is a relative path"),
        ("state_dir = \"/a/x\"", "lies inside this stripe directory"),
        ("[put]\nstripe_size = \"1 MeB\"", "f.toml:3: put.stripe_size: \"1 MeB\" has the unknown unit \"MeB\""),
        ("[put]\nstripe_size = -1", "put.stripe_size: -1 is negative"),
        ("[put]\nstripe_size = \"-1 MiB\"", "put.stripe_size: \"-1 MiB\" is negative"),
        ("[put]\nstripe_size = 1.5", "put.stripe_size: is a TOML float"),
        ("[put]\npage_size = 5000", "put.page_size: page size 5000"),
        ("[put]\nstripe_size = \"4 KiB\"", "put.stripe_size: stripe size 4096"),
        ("[put]\nwidth = 0", "put.width: must be a whole number from 1"),
        ("[put]\nwidth = \"2\"", "put.width: is a TOML string"),
        (
            "[timeouts]\ncq = \"31 s\"",
            "timeouts.cq: 31 s is not from 100 ms to 30 s; the nearest that is right is \"30 s\"",
        ),
        (
            "[timeouts]\nrequest = \"1 ms\"",
            "timeouts.request: 1 ms is not from 100 ms to 30 s; the nearest that is right is \"100 ms\"",
        ),
        ("[memory]\nmax_registered = 1", "memory.max_registered: 1 B is less than the least"),
        ("[memory]\nmax_registered = \"9999999 TiB\"", "memory.max_registered:"),
        ("[retention]\nsuperseded = 60", "retention.superseded: is a TOML integer"),
        ("[retention]\nsuperseded = \"60\"", "has no unit"),
        ("[retention]\nsuperseded = \"10000 h\"", "longer than a year"),
        ("[retention]\npin_lease = \"10 ms\"", "retention.pin_lease: is not from 1 s to 24 h"),
        ("[retention]\nmax_pins = 1", "retention.max_pins: must be a whole number from 2"),
        ("[security]\ninsecure = 1", "security.insecure: is a TOML integer"),
        ("[security]\nkey = \"/k\"", "f.toml:3: security.key: needs the others beside it, and cert is missing"),
        (
            "[security]\ncert = \"/c\"\nkey = \"/k\"",
            "f.toml:3: security.cert: needs the others beside it, and client_ca is missing",
        ),
        ("[security]\ncert = \"c\"", "security.cert: \"c\" is a relative path"),
        (
            "[security]\ninsecure = true\ncert = \"/c\"\nkey = \"/k\"\nclient_ca = \"/a\"",
            "f.toml:4: security.cert: with it the control plane takes only TLS connections: leave `insecure = true` out",
        ),
        ("[[namespace]]\nname = \"a\"", "namespace: without TLS nobody can tell who a client is: set cert, key"),
        ("[namespace]\nname = \"a\"", "namespace: is a TOML table; it must be written as [[namespace]]"),
        ("[control]\nlisten = \"nowhere\"", "f.toml:3: control.listen: \"nowhere\" is not an address"),
        ("[control]\nlisten = []", "control.listen: is empty"),
        ("[control]\nlisten = [\"127.0.0.1\", \"127.0.0.1:7420\"]", "listed twice"),
        ("[control]\nlisten = \"10.0.0.1\"", "set `insecure = true`"),
        ("[control]\nlisten = \"*\"", "set `insecure = true`"),
        ("[[rail]]\nlisten = \"0.0.0.0\"", "f.toml:3: rail.listen: 0.0.0.0:7421 can be reached"),
        ("[[rail]]\n[[rail]]", "rail.listen: is missing"),
        ("[[rail]]\nlisten = \"127.0.0.1:7420\"", "listed twice"),
        ("[[rail]]\ntransport = \"verbs\"", "rail.transport: \"verbs\" is not a transport"),
        ("[rail]\nlisten = \"127.0.0.1\"", "rail: is a TOML table; it must be written as [[rail]]"),
        ("control = 3", "control: is a TOML integer"),
        ("x = ", "f.toml:2:"),
    ] {
        let said = with(text);
        assert!(said.contains(want), "{text}: {said}");
    }
}

#[test]
fn stripe_directories() {
    assert_eq!(
        refused(""),
        "f.toml: stripe_dirs: is missing; it must be a list of absolute paths of directories that `railfsd init` has marked"
    );
    assert!(refused("stripe_dirs = []").contains("f.toml:1: stripe_dirs: is empty"));
    assert!(refused("stripe_dirs = [\"a\"]").contains("relative path"));
    assert!(refused("stripe_dirs = [\"/a\",\n\"/a/\"]").contains("f.toml:2: stripe_dirs: /a is listed twice"));
    assert!(refused("stripe_dirs = [\"/a/../b\"]").contains("\"..\""));
    assert!(refused("stripe_dirs = [\"/a/b\", \"/a\"]").contains("lie one inside the other"));
    assert!(refused("stripe_dirs = [1]").contains("stripe_dirs: is a TOML integer"));
}

#[test]
fn two_names_of_one_directory_are_found() {
    let temp = tempfile::tempdir().unwrap();
    let (real, link) = (temp.path().join("a"), temp.path().join("b"));
    std::fs::create_dir(&real).unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    let file = temp.path().join("railfsd.toml");
    std::fs::write(&file, format!("stripe_dirs = [{real:?},\n{link:?}]")).unwrap();
    let said = Config::load(&file).unwrap_err().to_string();
    assert!(said.contains("railfsd.toml:2: stripe_dirs:") && said.contains("are the same directory"), "{said}");
    let said = Config::load(&temp.path().join("none")).unwrap_err().to_string();
    assert!(said.contains("cannot be read"), "{said}");
}

#[test]
fn every_address_form_is_read() {
    let listen = |text: &str| {
        ok(&format!("stripe_dirs = [\"/a\"]\n[control]\nlisten = \"{text}\"\n[security]\ninsecure = true")).control[0]
            .to_string()
    };
    for (text, want) in [
        ("10.0.0.1", "10.0.0.1:7420"),
        ("10.0.0.1:1", "10.0.0.1:1"),
        ("::1", "[::1]:7420"),
        ("[::1]:1", "[::1]:1"),
        ("*", "[::]:7420"),
        ("*:9", "[::]:9"),
        ("0.0.0.0", "0.0.0.0:7420"),
    ] {
        assert_eq!(listen(text), want);
    }
}

proptest::proptest! {
    #[test]
    fn any_text_is_answered(text in "(stripe_dirs = \\[\"/a\"\\]\n)?(\\[|put|rail|\\]|=|\"|\n| |[a-z0-9_.-]){0,60}") {
        let _ = parse(&text, "f", "host");
    }
}

/// The rows of the first table behind a heading of docs/configuration.md: cells without their code marks.
fn documented(heading: &str) -> Vec<Vec<String>> {
    let page = include_str!("../../../docs/configuration.md");
    let part = page.split_once(&format!("\n## {heading}\n")).expect("no such heading").1;
    let rows = part.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    let cells = |line: &str| line.trim_matches('|').split('|').map(|cell| cell.trim().replace('`', "")).collect();
    rows.skip(2).map(cells).collect()
}

#[test]
fn the_page_lists_every_key_and_no_other_with_its_default() {
    use super::parse::{SECTIONS, TOP};
    let rows = documented("Server");
    let names: Vec<&str> = rows.iter().map(|row| row[0].as_str()).collect();
    let plain = TOP.iter().filter(|key| SECTIONS.iter().all(|(name, _)| name != *key)).map(ToString::to_string);
    let below = SECTIONS.iter().flat_map(|(name, keys)| keys.iter().map(move |key| format!("{name}.{key}")));
    let known: Vec<String> = plain.chain(below).collect();
    assert_eq!(names, known);

    let default = |key: &str| rows.iter().find(|row| row[0] == key).map_or("", |row| row[1].as_str()).to_owned();
    let least = ok("stripe_dirs = [\"/a\"]");
    assert_eq!(default("state_dir"), least.state_dir.display().to_string());
    assert_eq!(default("control.listen"), least.control[0].to_string());
    assert_eq!(default("rail.fabric"), least.rails[0].fabric);
    assert_eq!(default("rail.transport"), least.rails[0].transport);
    assert!(default("rail.listen").ends_with(&least.rails[0].listen.port().to_string()));
    assert_eq!(default("put.stripe_size"), format_size(least.put.stripe_size.into()));
    assert_eq!(default("put.page_size"), format_size(least.put.page_size.into()));
    assert_eq!(default("memory.max_registered"), format_size(least.max_registered));
    assert_eq!(default("retention.superseded"), format_duration(least.retention));
    assert_eq!(default("retention.pin_lease"), format_duration(least.pin_lease));
    assert_eq!(default("retention.max_pins"), least.max_pins.to_string());
    assert_eq!(default("timeouts.cq"), format_duration(least.cq_timeout));
    assert_eq!(default("timeouts.request"), format_duration(least.request_timeout));
    assert_eq!(default("rail.announce"), least.rails[0].announce.to_string());
    assert_eq!(default("security.insecure"), least.insecure.to_string());
    assert_eq!(default("require_rdma"), least.require_rdma.to_string());
}

#[test]
fn the_example_of_the_page_is_accepted() {
    let page = include_str!("../../../docs/configuration.md");
    let example = page.split_once("```toml\n").and_then(|(_, rest)| rest.split_once("```")).expect("no example").0;
    assert_eq!(ok(example).rails.len(), 2);
}

#[test]
fn the_page_of_metrics_lists_every_counter_of_a_server_and_no_other() {
    let page = include_str!("../../../docs/metrics.md");
    let part = page.split_once("\n## Counters of a server\n").expect("no such heading").1;
    let cells = part.lines().filter(|line| line.starts_with("| `")).filter_map(|line| line.split('|').nth(1));
    let mut named: Vec<&str> = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
    let counters = crate::node::Counters::default().list();
    let mut known: Vec<&str> = counters.iter().map(|(name, _)| *name).collect();
    known.extend(["superseded_versions", "namespaces", "open_files", "watchers"]);
    known.extend(["pins", "pin_leases", "pins_refused", "pins_lapsed"]);
    known.extend(railfs_engine::rail::rdma_counters().map(|(name, _)| name));
    known.extend(["rdma_registered_bytes", "rdma_listeners_reopened", "rdma_read_bytes", "slab_refused"]);
    known.extend(crate::admin::slab_counters(&[]).iter().map(|(name, _)| *name));
    named.sort_unstable();
    known.sort_unstable();
    assert_eq!(named, known);
}

#[test]
fn paths_are_judged_by_where_they_lead() {
    let root = tempfile::tempdir().unwrap();
    let (a, b, link) = (root.path().join("a"), root.path().join("b"), root.path().join("link"));
    std::fs::create_dir_all(a.join("sub")).unwrap();
    std::fs::create_dir(&b).unwrap();
    std::os::unix::fs::symlink(&a, &link).unwrap();
    let file = root.path().join("railfsd.toml");
    let refused = |text: String| {
        std::fs::write(&file, text).unwrap();
        Config::load(&file).map_err(|error| error.to_string())
    };
    for state in [link.clone(), link.join("state/deeper"), a.join("sub")] {
        let said = refused(format!("state_dir = {state:?}\nstripe_dirs = [{a:?}, {b:?}]\n")).unwrap_err();
        assert!(said.contains("state_dir") && said.contains("inside this stripe directory"), "{said}");
    }
    let said = refused(format!("state_dir = {b:?}\nstripe_dirs = [{a:?}, {:?}]\n", link.join("sub"))).unwrap_err();
    assert!(said.contains(":2: stripe_dirs: leads to") && said.contains("keep them apart"), "{said}");
    refused(format!("state_dir = {:?}\nstripe_dirs = [{a:?}]\n", b.join("state"))).unwrap();
}

#[test]
fn what_is_written_twice_and_what_is_too_wide_is_named() {
    let said = |text: &str| parse(text, "f", "h").unwrap_err().to_string();
    let twice = said("stripe_dirs = [\"/a\"]\nnode = \"x\"\nnode = \"y\"\n");
    assert!(twice.starts_with("f:3: node: ") && twice.contains("duplicate key"), "{twice}");
    let wide = said("stripe_dirs = [\"/a\", \"/b\"]\n[put]\nwidth = 9\n");
    assert!(wide.starts_with("f:3: put.width: 9 ") && wide.contains("stripe_dirs (2)"), "{wide}");
    assert_eq!(parse("stripe_dirs = \"/one\"", "f", "h").unwrap().0.stripe_dirs, [std::path::Path::new("/one")]);
}

#[test]
fn rights_that_make_no_sense_are_named() {
    let with = |rest: &str| {
        let tls = "[security]\ncert = \"/c\"\nkey = \"/k\"\nclient_ca = \"/a\"\n";
        refused(&format!("stripe_dirs = [\"/a\"]\n{tls}[[namespace]]\n{rest}"))
    };
    for (text, want) in [
        ("readers = [\"a\"]", "f.toml:6: namespace.name: is missing; it must be the name of a namespace"),
        ("name = \"A\"", "f.toml:7: namespace.name:"),
        ("name = \"a\"\nreaders = \"x\"", "f.toml:8: namespace.readers: is a TOML string; it must be a list of names"),
        ("name = \"a\"\nwriters = [\"\"]", "f.toml:8: namespace.writers: \"\" is no name of a client"),
        ("name = \"a\"\nreader = []", "did you mean namespace.readers?"),
        ("name = \"a\"\n[[namespace]]\nname = \"a\"", "f.toml:9: namespace.name: \"a\" has an entry already"),
    ] {
        let said = with(text);
        assert!(said.contains(want), "{text}: {said}");
    }
}

#[test]
fn with_tls_other_machines_may_come_without_the_word_insecure() {
    let config = ok(
        "stripe_dirs = [\"/a\"]\n[control]\nlisten = \"*\"\n[security]\ncert = \"/c\"\nkey = \"/k\"\nclient_ca = \"/a\"",
    );
    assert!(config.control[0].ip().is_unspecified() && !config.insecure && config.tls.is_some());
    let said = Config { file: Some("f.toml".into()), ..config }.check_tls().unwrap_err().to_string();
    assert!(said.starts_with("f.toml: security.cert: /c: cannot be read"), "{said}");
}
