//! Copies the engine's sources, and makes each line that a planted bug changes switchable (src/bugs.rs).
//!
//! Guarantees: what is compiled here is the engine as it is, but for those lines, which do what they do there unless the bug
//! is switched on; a bug whose line is no longer there, or stands there twice, stops the build by name. The engine itself has
//! no such switch.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

include!("src/bugs.rs");

fn main() {
    if let Err(error) = run() {
        println!("cargo::error={error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), String> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from).ok_or_else(|| format!("{name} is not set"));
    let engine = variable("CARGO_MANIFEST_DIR")?.join("../../engine/src");
    let copy = variable("OUT_DIR")?.join("engine");
    println!("cargo::rerun-if-changed={}", engine.display());
    println!("cargo::rerun-if-changed=src/bugs.rs");
    println!("cargo::rerun-if-changed=build.rs");
    // The engine's feature, which is never on here: schedules run over simulated rails.
    println!("cargo::rustc-check-cfg=cfg(feature, values(\"rdma\"))");
    let mut files = Vec::new();
    collect(&engine, &engine, &mut files).map_err(|error| format!("{}: {error}", engine.display()))?;
    let mut texts = Vec::new();
    for file in files {
        let text = fs::read_to_string(engine.join(&file)).map_err(|error| format!("{}: {error}", file.display()))?;
        texts.push((file, text));
    }
    for bug in BUGS {
        for (file, old, new) in bug.changes {
            let found = texts.iter_mut().find(|(path, _)| path == Path::new(file));
            let (_, text) = found.ok_or_else(|| format!("planted bug {}: there is no {file}", bug.name))?;
            let times = text.matches(old).count();
            if times != 1 {
                return Err(format!("planted bug {}: {file} has {times} times, not once: {old}", bug.name));
            }
            *text = text.replace(old, &new.replace("PLANTED", &format!("crate::planted::is({:?})", bug.name)));
        }
    }
    for (file, text) in &mut texts {
        // The engine's own tests run there.
        *text = text.replace("#[cfg(test)]", "#[cfg(any())]");
        if file == Path::new("lib.rs") {
            // It is included: what is said of a whole crate stands in ours.
            *text = text
                .lines()
                .filter(|line| !line.starts_with("//!") && !line.starts_with("#!["))
                .fold(String::new(), |all, line| all + line + "\n");
        }
        write(&copy.join(&file), text).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(())
}

fn collect(top: &Path, directory: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(top, &path, files)?;
        } else if let Ok(name) = path.strip_prefix(top) {
            files.push(name.to_owned());
        }
    }
    files.sort();
    Ok(())
}

/// Only what changed, so that no more is compiled again than must be.
fn write(path: &Path, text: &str) -> io::Result<()> {
    if fs::read_to_string(path).is_ok_and(|there| there == text) {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(path, text)
}
