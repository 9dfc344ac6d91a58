//! Who keeps a mount busy.
//!
//! Guarantees: found by what `/proc` says of processes, as text: no path is followed into the mount, so a hung one cannot
//! block it. Processes of others are seen only by root; one that ends meanwhile is left out.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Most that are named.
const NAMED: usize = 4;

/// One reason why a mount is busy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The process.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// What it does there.
    pub does: Does,
}

/// What a process does in a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Does {
    /// Its working (or root) directory.
    Works(PathBuf),
    /// A file or directory is open, mapped, or run.
    Holds(PathBuf),
}

/// What stands at the end of a line of `/proc/PID/maps`.
fn mapped(line: &str) -> Option<PathBuf> {
    line.find('/').map(|at| PathBuf::from(&line[at..]))
}

fn of_process(process: &Path, point: &Path) -> Option<Does> {
    let link = |name: &str| std::fs::read_link(process.join(name)).ok();
    let inside = |path: &PathBuf| path.starts_with(point);
    if let Some(path) = ["cwd", "root"].into_iter().filter_map(link).find(inside) {
        return Some(Does::Works(path));
    }
    let open = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    let open = open.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    if let Some(path) = open.chain(link("exe")).find(inside) {
        return Some(Does::Holds(path));
    }
    let maps = std::fs::read(process.join("maps")).unwrap_or_default();
    String::from_utf8_lossy(&maps).lines().filter_map(mapped).find(inside).map(Does::Holds)
}

/// One reason for each process that keeps the mount at this (resolved) path busy, by process id.
pub fn holders(point: &Path) -> Vec<Holder> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Some(does) = of_process(&entry.path(), point) else { continue };
        let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default().trim().to_owned();
        found.push(Holder { pid, name, does });
    }
    found.sort_by_key(|holder| holder.pid);
    found
}

/// For a message; `None` when nobody was seen.
pub fn describe(holders: &[Holder]) -> Option<String> {
    let mut text = String::new();
    for (place, Holder { pid, name, does }) in holders.iter().take(NAMED).enumerate() {
        let comma = if place > 0 { ", " } else { "" };
        // Writing to a string does not fail.
        let _ = match does {
            Does::Works(path) => write!(text, "{comma}process {pid} ({name}) works in {}", path.display()),
            Does::Holds(path) => write!(text, "{comma}process {pid} ({name}) has {} open", path.display()),
        };
    }
    if holders.len() > NAMED {
        let _ = write!(text, ", and {} more", holders.len() - NAMED);
    }
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_seen_with_what_it_holds() {
        let dir = tempfile::tempdir().unwrap();
        let point = dir.path().canonicalize().unwrap();
        assert_eq!(holders(&point), []);
        let path = point.join("f");
        std::fs::write(&path, "x").unwrap();
        let file = std::fs::File::open(&path).unwrap();
        let found = holders(&point);
        assert_eq!((found.len(), found[0].pid, &found[0].does), (1, std::process::id(), &Does::Holds(path)));
        drop(file);
        assert_eq!(holders(&point), []);
        // A neighbour whose name begins alike is another place.
        assert_eq!(holders(&point.with_extension("x")), []);
    }

    #[test]
    fn the_first_few_are_named() {
        let holder = |pid| Holder { pid, name: "cat".to_owned(), does: Does::Holds("/m/f".into()) };
        assert_eq!(describe(&[]), None);
        let works = Holder { pid: 1, name: "sh".to_owned(), does: Does::Works("/m".into()) };
        let text = describe(&[works, holder(2)]).unwrap();
        assert_eq!(text, "process 1 (sh) works in /m, process 2 (cat) has /m/f open");
        assert!(describe(&(1..8).map(holder).collect::<Vec<_>>()).unwrap().ends_with("has /m/f open, and 3 more"));
        assert_eq!(mapped("7f-80 r-xp 00000000 00:2f 1131   /m/lib.so"), Some("/m/lib.so".into()));
        assert_eq!(mapped("7f-80 rw-p 00000000 00:00 0"), None);
    }
}
