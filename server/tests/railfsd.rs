//! The program itself: what it says, and with which code it ends.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

fn railfsd(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_railfsd")).args(arguments).output().unwrap()
}
fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}
fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}
fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

struct Setup {
    root: tempfile::TempDir,
    file: std::path::PathBuf,
}

fn setup() -> Setup {
    let root = tempfile::tempdir().unwrap();
    let dirs = [root.path().join("a"), root.path().join("b")];
    dirs.iter().for_each(|directory| std::fs::create_dir(directory).unwrap());
    let file = root.path().join("railfsd.toml");
    let config = format!(
        "stripe_dirs = {dirs:?}\nstate_dir = {:?}\n[control]\nlisten = \"127.0.0.1:0\"\n[[rail]]\nlisten = \"127.0.0.1:0\"\n",
        root.path().join("state")
    );
    std::fs::write(&file, config).unwrap();
    Setup { root, file }
}

fn serve(file: &Path) -> (Child, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_railfsd"))
        .args(["serve", "--config", text(file)])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    if line.is_empty() {
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        let _ = child.wait();
        panic!("railfsd did not become ready: {said}");
    }
    (child, line)
}

fn signal(child: &Child, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, signal).unwrap();
}

#[test]
fn init_serve_and_stop() {
    let setup = setup();
    let (a, b) = (setup.root.path().join("a"), setup.root.path().join("b"));
    let bare = railfsd(&["serve", "--config", text(&setup.file)]);
    assert_eq!(code(&bare), 1);
    assert!(err(&bare).contains("carries no marker") && err(&bare).contains("railfsd init"), "{}", err(&bare));
    let made = railfsd(&["init", text(&a), text(&b)]);
    assert_eq!(code(&made), 0, "{}", err(&made));
    assert!(out(&made).starts_with("new store "), "{}", out(&made));
    let again = railfsd(&["init", text(&a), text(&b)]);
    assert_eq!(code(&again), 0);
    assert!(out(&again).starts_with("store ") && out(&again).contains("there before"), "{}", out(&again));
    for end in [rustix::process::Signal::TERM, rustix::process::Signal::INT] {
        let (mut child, line) = serve(&setup.file);
        assert!(line.starts_with("railfsd ready store=") && line.contains("control=127.0.0.1:"), "{line}");
        signal(&child, end);
        assert_eq!(child.wait().unwrap().code(), Some(0));
    }
    let (mut child, line) = serve(&setup.file);
    assert!(line.contains("incarnation=3 "), "{line}");
    signal(&child, rustix::process::Signal::KILL);
    child.wait().unwrap();
    let (mut child, line) = serve(&setup.file);
    assert!(line.contains("incarnation=4 "), "{line}");
    // Without a terminal it goes on.
    signal(&child, rustix::process::Signal::HUP);
    signal(&child, rustix::process::Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let missing = railfsd(&["init", text(&setup.root.path().join("none"))]);
    assert_eq!(code(&missing), 1);
    assert!(err(&missing).contains("does not exist"), "{}", err(&missing));
}

#[test]
fn replace_log_says_what_it_did_or_why_not() {
    let setup = setup();
    let dirs = ["a", "b", "c"].map(|name| setup.root.path().join(name));
    std::fs::create_dir_all(&dirs[2]).unwrap();
    let config = std::fs::read_to_string(&setup.file).unwrap();
    let both = format!("{:?}", &dirs[..2]);
    assert!(config.contains(&both), "{config}");
    std::fs::write(&setup.file, config.replace(&both, &format!("{dirs:?}"))).unwrap();
    let replace = |directory: &Path| railfsd(&["replace-log", "--config", text(&setup.file), text(directory)]);
    assert_eq!(code(&railfsd(&["replace-log", "--config", text(&setup.file)])), 2);
    assert_eq!(code(&railfsd(&["replace-log", "--config", "/nowhere/railfsd.toml", text(&dirs[2])])), 2);
    assert_eq!(code(&railfsd(&["init", text(&dirs[0]), text(&dirs[1]), text(&dirs[2])])), 0);
    let (mut child, _) = serve(&setup.file);
    let running = replace(&dirs[2]);
    assert_eq!(code(&running), 1);
    assert!(err(&running).contains(&format!("is in use by process {}", child.id())), "{}", err(&running));
    signal(&child, rustix::process::Signal::KILL);
    child.wait().unwrap();
    std::fs::remove_dir_all(&dirs[1]).unwrap();
    let held = replace(&dirs[0]);
    assert_eq!(code(&held), 1);
    assert!(err(&held).contains("holds the log already"), "{}", err(&held));
    let done = replace(&dirs[2]);
    assert_eq!(code(&done), 0, "{}", err(&done));
    assert!(out(&done).contains("epoch 2 of the log began behind record 1"), "{}", out(&done));
    assert!(out(&done).contains(&format!("holds the log: {}", dirs[2].display())), "{}", out(&done));
    let (mut child, line) = serve(&setup.file);
    assert!(line.contains("incarnation=2 "), "runs are counted on: {line}");
    signal(&child, rustix::process::Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn check_prints_what_a_configuration_comes_to_or_what_is_wrong() {
    let setup = setup();
    let good = railfsd(&["check", "--config", text(&setup.file)]);
    assert_eq!(code(&good), 0, "{}", err(&good));
    assert!(out(&good).contains("max_registered = \"64 MiB\""), "{}", out(&good));
    let mut config = std::fs::read_to_string(&setup.file).unwrap();
    config.push_str("[retention]\nsuperceded = \"60 s\"\n");
    std::fs::write(&setup.file, config).unwrap();
    for command in ["check", "serve"] {
        let bad = railfsd(&[command, "--config", text(&setup.file)]);
        assert_eq!(code(&bad), 2);
        let wanted = format!(
            "{}:8: retention.superceded: there is no such key; did you mean retention.superseded?",
            text(&setup.file)
        );
        assert!(err(&bad).contains(&wanted), "{}", err(&bad));
    }
    assert_eq!(code(&railfsd(&["check", "--config", "/nowhere/railfsd.toml"])), 2);
    assert_eq!(code(&railfsd(&["serve"])), 2);
    assert_eq!(code(&railfsd(&["init"])), 2);
    assert_eq!(code(&railfsd(&["frobnicate"])), 2);
    assert_eq!(code(&railfsd(&["--help"])), 0);
    assert_eq!(code(&railfsd(&["--version"])), 0);
}

#[test]
fn the_example_configuration_says_what_the_defaults_are() {
    let example = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/railfsd.toml")).unwrap();
    let (config, _) = railfs_server::config::parse(&example, "example", "the-host").unwrap();
    // Every default that it shows in a comment is the default.
    let setting = |line: &&str| {
        line.starts_with("[[") || line.split_once(" = ").is_some_and(|(key, _)| !key.contains(['`', ' ']))
    };
    let line = |line: &str| line.strip_prefix("# ").filter(setting).unwrap_or(line).to_owned() + "\n";
    let shown: String = example.lines().map(line).collect();
    let shown = shown.replace("\"the host's name\"", "\"the-host\"");
    let (same, _) = railfs_server::config::parse(&shown, "shown", "the-host").unwrap();
    let same =
        railfs_server::config::Config { put: railfs_server::config::PutConfig { width: None, ..same.put }, ..same };
    assert_eq!(config, same);
}
