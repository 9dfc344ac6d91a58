//! `railfs watch`.
//!
//! Guarantees: every change below the URL is shown once and in order, also over restarts of the server and broken
//! connections; a failure says from which number to go on.

use super::format;
use super::objects::{attributes, name_bytes};
use super::show::end_of_output;
use super::target::Target;
use crate::failure::Failure;
use railfs_engine::client::Client;
use railfs_engine::control::WatchQuery;
use railfs_engine::error::Error;
use railfs_proto::name::Key;
use railfs_proto::url::Url;
use railfs_proto::watch::{Change, Event, WatchPage};
use serde_json::json;
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A server that cannot be reached for this long is not waited for any more.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two tries.
const AGAIN: Duration = Duration::from_millis(200);

/// What is wanted.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Number of the first change; 0: what comes after now.
    pub from: u64,
    /// End where the log ends now.
    pub until_now: bool,
    /// One JSON object a line.
    pub json: bool,
}

/// How a change is shown.
#[derive(Clone, Copy)]
enum Style {
    Json,
    Text { escaped: bool },
}

/// Shows changes until it is ended.
///
/// # Errors
/// Unreachable for too long (5); a number that is too old or was never given, or cut off for being slow (1).
pub(super) fn watch(url: &Target, settings: Settings) -> Result<(), Failure> {
    let client = url.connect()?;
    let mut out = std::io::stdout().lock();
    let result = follow(&client, url, settings, &mut out);
    client.close();
    result
}

fn follow(client: &Arc<Client>, url: &Url, settings: Settings, out: &mut dyn Write) -> Result<(), Failure> {
    // A directory: what lies below. Else the object, and what lies below its name.
    let prefix = match &url.key {
        Some(key) if url.directory => key.below(),
        Some(key) => key.as_bytes().to_vec(),
        None => Vec::new(),
    };
    let mut query = WatchQuery { namespace: url.namespace.clone(), prefix, from: settings.from };
    let style = if settings.json { Style::Json } else { Style::Text { escaped: std::io::stdout().is_terminal() } };
    let mut until = None;
    let mut heard = Instant::now();
    loop {
        let error = match client.watch(&query) {
            Ok(mut watching) => loop {
                match client.watch_next(&mut watching) {
                    Ok(page) => {
                        heard = Instant::now();
                        show(url, &page, style, out)?;
                        query.from = page.next;
                        if page.next > *until.get_or_insert(page.latest) && settings.until_now {
                            return Ok(());
                        }
                    }
                    Err(error) => break error,
                }
            },
            Err(error) => error,
        };
        let lasting = !matches!(error, Error::Unreachable { .. } | Error::TimedOut { .. });
        if lasting || heard.elapsed() >= PATIENCE {
            let failure = Failure::from(error);
            let hint = match query.from {
                0 => String::new(),
                from if failure.message.contains("number") => format!("; `--from {from}` is where this one stood"),
                from => format!("; go on with --from {from}"),
            };
            return Err(Failure { message: format!("{}{hint}", failure.message), ..failure });
        }
        std::thread::sleep(AGAIN);
    }
}

/// Whether the change is of the URL's object, or below.
fn is_wanted(url: &Url, key: &Key) -> bool {
    let Some(wanted) = &url.key else { return true };
    key.as_bytes().strip_prefix(wanted.as_bytes()).is_some_and(|rest| match rest.first() {
        None => !url.directory,
        Some(next) => *next == b'/',
    })
}

fn show(url: &Url, page: &WatchPage, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    let mut text = Vec::new();
    for change in page.changes.iter().filter(|change| is_wanted(url, &change.key)) {
        text.extend(match style {
            Style::Json => line_json(url, change),
            Style::Text { escaped } => line(change, escaped),
        });
        text.push(b'\n');
    }
    if text.is_empty() {
        return Ok(());
    }
    out.write_all(&text).and_then(|()| out.flush()).map_err(|error| end_of_output(&error))
}

fn line(change: &Change, escaped: bool) -> Vec<u8> {
    let time = format::utc(change.time.seconds);
    let start = match &change.event {
        Event::Put(descriptor) => {
            format!("{:>10} {time} put {:>12} {:>14} ", change.sequence, descriptor.version, descriptor.striping.size())
        }
        Event::Delete { before, .. } => format!("{:>10} {time} rm  {before:>12} {:>14} ", change.sequence, "-"),
    };
    [start.as_bytes(), &name_bytes(change.key.as_bytes(), escaped)].concat()
}

fn line_json(url: &Url, change: &Change) -> Vec<u8> {
    let mut value = json!({
        "sequence": change.sequence,
        "name": String::from_utf8_lossy(change.key.as_bytes()),
        "url": url.with_key(change.key.clone()).to_string(),
        "time_seconds": change.time.seconds,
        "time_nanoseconds": change.time.nanoseconds,
    });
    let more = match &change.event {
        Event::Put(descriptor) => {
            let mut more = attributes(descriptor);
            more.insert("event".to_owned(), json!("put"));
            more
        }
        Event::Delete { version, before } => {
            let fields = [("event", json!("rm")), ("version", json!(version)), ("deleted", json!(before))];
            fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
        }
    };
    if let Some(fields) = value.as_object_mut() {
        fields.extend(more);
    }
    value.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use railfs_proto::reply::Time;

    fn key(text: &str) -> Key {
        Key::new(text.as_bytes().to_vec()).unwrap()
    }

    #[test]
    fn what_lies_below_the_url() {
        let wanted = |url: &str, name: &str| is_wanted(&Url::parse(url).unwrap(), &key(name));
        assert!(wanted("railfs://h/ns", "a") && wanted("railfs://h/ns/", "a/b"));
        assert!(
            wanted("railfs://h/ns/a/", "a/b") && !wanted("railfs://h/ns/a/", "a") && !wanted("railfs://h/ns/a/", "ab")
        );
        assert!(wanted("railfs://h/ns/a", "a") && wanted("railfs://h/ns/a", "a/b") && !wanted("railfs://h/ns/a", "ab"));
    }

    #[test]
    fn lines_of_a_delete() {
        let change = Change {
            sequence: 77,
            time: Time { seconds: 0, nanoseconds: 5 },
            key: key("d/f"),
            event: Event::Delete { version: 3000, before: 2000 },
        };
        let text = String::from_utf8(line(&change, true)).unwrap();
        assert_eq!(text, "        77 1970-01-01 00:00:00 rm          2000              - d/f");
        let odd = Change { key: key("d/\x1b]0;f\n"), ..change.clone() };
        assert!(line(&odd, false).ends_with(b"d/\x1b]0;f\n"));
        assert!(line(&odd, true).ends_with(b"d/\\x1b]0;f\\x0a"), "it commands no terminal");
        let url = Url::parse("railfs://h/ns/").unwrap();
        let value: serde_json::Value = serde_json::from_slice(&line_json(&url, &change)).unwrap();
        assert_eq!((&value["event"], &value["version"], &value["deleted"]), (&json!("rm"), &json!(3000), &json!(2000)));
        assert_eq!((&value["url"], &value["sequence"]), (&json!("railfs://h/ns/d/f"), &json!(77)));
    }
}
