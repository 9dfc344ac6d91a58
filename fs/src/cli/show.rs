//! `railfs status` on the screen.
//!
//! Guarantees: what is degraded is always shown; JSON is the document as it is.

use super::format::{duration, size};
use crate::failure::Failure;
use crate::status::Document;
use std::fmt::Write as _;
use std::io::Write;

/// Standard output failed: nothing is said of a reader that went away.
pub fn end_of_output(error: &std::io::Error) -> Failure {
    if error.kind() == std::io::ErrorKind::BrokenPipe {
        return Failure::failed("");
    }
    Failure::failed(format!("standard output: {error}"))
}

/// Shows one.
///
/// # Errors
/// Standard output failed.
pub fn document(document: &Document, json: bool) -> Result<(), Failure> {
    if json { print_json(document) } else { print(&text(document)) }
}

/// Shows all.
///
/// # Errors
/// Standard output failed.
pub fn documents(documents: &[Document], json: bool) -> Result<(), Failure> {
    if json {
        return print_json(documents);
    }
    if documents.is_empty() {
        return print("no mounts\n");
    }
    let all: Vec<String> = documents.iter().map(text).collect();
    print(&all.join("\n"))
}

fn print_json(value: &(impl serde::Serialize + ?Sized)) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).map_err(|error| Failure::failed(format!("JSON: {error}")))?;
    print(&(text + "\n"))
}

fn print(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| end_of_output(&error))
}

fn text(document: &Document) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = lines(document, &mut out);
    out
}

fn lines(document: &Document, out: &mut String) -> std::fmt::Result {
    if let Some(mount) = &document.mount {
        writeln!(out, "{} at {}", mount.url, mount.mountpoint)?;
        let up = duration(mount.uptime_seconds);
        let log = if mount.log.is_empty() { "standard error" } else { &mount.log };
        writeln!(out, "  process {} for {up}, log: {log}", mount.pid)?;
        writeln!(
            out,
            "  open: {} files, {} directories; {} requests under way; {} inodes",
            mount.open_files, mount.open_directories, mount.in_flight, mount.inodes
        )?;
        let pins = document.counters.get("pins_now").copied().unwrap_or(0);
        writeln!(out, "  mode {}, io {} ({}); {pins} versions pinned", mount.mode, mount.io, mount.io_reason)?;
        for line in &mount.degraded {
            writeln!(out, "  degraded: {line}")?;
        }
    }
    let control = if document.control.is_empty() { "none" } else { &document.control };
    writeln!(
        out,
        "  store {}, node {} (run {}), control address {control}",
        document.store, document.node, document.incarnation
    )?;
    for rail in &document.rails {
        write!(
            out,
            "  rail {} ({}): {}, received {}, sent {}, {} in flight, {} failed, up {} times",
            rail.name,
            rail.transport,
            rail.state,
            size(rail.bytes_received),
            size(rail.bytes_sent),
            rail.in_flight,
            rail.failed,
            rail.connects
        )?;
        if rail.bandwidth > 0 {
            write!(out, ", {}/s", size(rail.bandwidth))?;
        }
        if rail.bad_pages > 0 {
            write!(out, ", {} BAD PAGES", rail.bad_pages)?;
        }
        if !rail.reason.is_empty() {
            write!(out, " ({})", rail.reason)?;
        }
        writeln!(out)?;
    }
    let arena = &document.arena;
    writeln!(
        out,
        "  memory: arena {}, free {}, exposed {}, quarantined {}; cache {}",
        size(arena.total),
        size(arena.free),
        size(arena.exposed),
        size(arena.quarantined),
        size(document.cached_bytes)
    )?;
    let admission = &document.admission;
    if admission.waiting_small + admission.waiting_large + admission.admitted_bytes + admission.refused > 0 {
        writeln!(
            out,
            "  waiting for memory: {} small and {} large reads ({}); had to wait: {} small, {} large ({}), at most {} ms; \
             {} refused",
            admission.waiting_small,
            admission.waiting_large,
            size(admission.waiting_bytes),
            admission.admitted_small,
            admission.admitted_large,
            size(admission.admitted_bytes),
            admission.longest_wait_microseconds.div_ceil(1000),
            admission.refused
        )?;
    }
    if admission.ahead_in_flight_bytes + admission.ahead_unread_bytes + admission.ahead_wasted_bytes > 0 {
        writeln!(
            out,
            "  readahead: {} on its way, {} not read yet, {} dropped unread",
            size(admission.ahead_in_flight_bytes),
            size(admission.ahead_unread_bytes),
            size(admission.ahead_wasted_bytes)
        )?;
    }
    if let Some(error) = &document.server_error {
        writeln!(out, "  server: {error}")?;
    }
    if let Some(server) = &document.server {
        writeln!(
            out,
            "  server: {} for {}, {} objects, {} clients, {} puts, memory {} of {}, publishing {}",
            server.software,
            duration(server.uptime_seconds),
            server.objects,
            server.sessions,
            server.puts,
            size(server.memory_used_bytes),
            size(server.memory_limit_bytes),
            server.publishing
        )?;
        for line in &server.degraded {
            writeln!(out, "  server degraded: {line}")?;
        }
    }
    for directory in &document.directories {
        writeln!(
            out,
            "  directory {}: {}{}, {} free of {}{}{} ({})",
            directory.path,
            directory.state,
            if directory.reason.is_empty() { String::new() } else { format!(" ({})", directory.reason) },
            size(directory.available_bytes),
            size(directory.total_bytes),
            if directory.holds_log { ", holds the log" } else { "" },
            match directory.lost_files {
                0 => String::new(),
                files => format!(
                    ", lost/ has {files} components of {} (removed when room is needed)",
                    size(directory.lost_bytes)
                ),
            },
            directory.id
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::{Admission, Directory, Mount, Rail};

    #[test]
    fn what_is_degraded_is_shown() {
        let rail = Rail {
            name: "a 1:2".to_owned(),
            state: "down".to_owned(),
            reason: "refused".to_owned(),
            bad_pages: 3,
            ..Rail::default()
        };
        let mount = Mount {
            degraded: vec!["rail a 1:2 is down".to_owned()],
            mode: "strict".to_owned(),
            io: "cached".to_owned(),
            io_reason: "an old kernel".to_owned(),
            ..Mount::default()
        };
        let document = Document {
            counters: [("pins_now".to_owned(), 7)].into(),
            rails: vec![rail],
            directories: vec![Directory {
                path: "/d1".to_owned(),
                state: "suspect".to_owned(),
                ..Directory::default()
            }],
            server_error: Some("h:1 cannot be reached: refused".to_owned()),
            admission: Admission { waiting_large: 64, ahead_wasted_bytes: 1, ..Admission::default() },
            mount: Some(mount),
            ..Document::default()
        };
        let text = text(&document);
        assert!(text.contains("mode strict, io cached (an old kernel); 7 versions pinned"), "{text}");
        for word in [
            "degraded: rail a",
            "down, received",
            "(refused)",
            "3 BAD PAGES",
            "server: h:1",
            "/d1: suspect",
            "64 large reads",
            "dropped unread",
        ] {
            assert!(text.contains(word), "{word}: {text}");
        }
    }

    #[test]
    fn a_reader_that_went_away_is_not_talked_about() {
        assert_eq!(end_of_output(&std::io::ErrorKind::BrokenPipe.into()).message, "");
        assert!(!end_of_output(&std::io::ErrorKind::Other.into()).message.is_empty());
    }
}
