//! Copies the files whose threads are tried in every order (engine memory, the inode table), with their locks and atomics
//! those of a scheduler (`crate::sync`); and each once more with a race planted.
//!
//! Guarantees: nothing else is changed; a text that is no longer there, or stands there twice, stops the build by name.

use std::fs;
use std::path::PathBuf;

/// File, text in it, text in its place; the copies, as they are and with the race.
const ALWAYS: &[(&str, &str, &str)] = &[
    ("engine/src/memory/arena.rs", "use std::sync::atomic::", "use crate::sync::atomic::"),
    ("engine/src/memory/arena.rs", "use std::sync::{", "use crate::sync::{"),
    ("fs/src/ops/inodes.rs", "use std::sync::{", "use crate::sync::{"),
    ("fs/src/ops/inodes.rs", "use super::attr::Facts;", "use crate::stand_in::Facts;"),
    ("fs/src/ops/inodes.rs", "use railfs_engine::client::Object;", "use crate::stand_in::Object;"),
    (
        "fs/src/ops/inodes.rs",
        "Inodes::with_hash(root, crate::hash::bytes)",
        "Inodes::with_hash(root, crate::stand_in::hash)",
    ),
];

const RACES: &[(&str, &str, &str)] = &[
    (
        "engine/src/memory/arena.rs",
        "        let slot = self.0.slots().take(size)?;
        Some(Free(Owned { arena: self.0.clone(), slot }))",
        "        // Looked at under the lock, and taken under another one.
        let slot = self.0.slots().take(size)?;
        self.0.slots().give(slot);
        self.0.slots().take(size)?;
        Some(Free(Owned { arena: self.0.clone(), slot }))",
    ),
    (
        "fs/src/ops/inodes.rs",
        "        if entry.lookups > 0 {
            return;
        }
        match state",
        "        if entry.lookups > 0 {
            return;
        }
        drop(state);
        let mut state = self.state();
        match state",
    ),
];

fn main() {
    if let Err(error) = run() {
        println!("cargo::error={error}");
        std::process::exit(1);
    }
}

fn change(file: &str, text: &str, changes: &[(&str, &str, &str)]) -> Result<String, String> {
    let mut text = text.to_owned();
    for (_, old, new) in changes.iter().filter(|(of, _, _)| *of == file) {
        let times = text.matches(old).count();
        if times != 1 {
            return Err(format!("{file} has {times} times, not once: {old}"));
        }
        text = text.replace(old, new);
    }
    Ok(text)
}

fn run() -> Result<(), String> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from).ok_or_else(|| format!("{name} is not set"));
    let (root, out) = (variable("CARGO_MANIFEST_DIR")?.join("../.."), variable("OUT_DIR")?);
    for (file, name) in [
        ("engine/src/memory/arena.rs", "memory/arena.rs"),
        ("engine/src/memory/slots.rs", "memory/slots.rs"),
        ("fs/src/ops/inodes.rs", "inodes/table.rs"),
    ] {
        let path = root.join(file);
        println!("cargo::rerun-if-changed={}", path.display());
        let text = fs::read_to_string(&path).map_err(|error| format!("{file}: {error}"))?;
        // Their own tests run where they come from.
        let text = change(file, &text.replace("#[cfg(test)]", "#[cfg(any())]"), ALWAYS)?;
        let raced = change(file, &text, RACES)?;
        for (prefix, text) in [("", text), ("racy_", raced)] {
            let to = out.join(format!("{prefix}{name}"));
            let made = to.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::write(&to, text));
            made.map_err(|error| format!("{}: {error}", to.display()))?;
        }
    }
    println!("cargo::rerun-if-changed=build.rs");
    let modules = ["", "racy_"].map(|prefix| {
        format!("pub mod {prefix}memory {{ pub mod arena; mod slots; }}\npub mod {prefix}inodes {{ pub mod table; }}\n")
    });
    fs::write(out.join("threads.rs"), modules.concat()).map_err(|error| format!("threads.rs: {error}"))
}
