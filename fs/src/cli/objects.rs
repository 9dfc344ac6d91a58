//! `railfs ls`, `stat` and `rm`.
//!
//! Guarantees: a list of any length is shown page by page in bounded memory; names are shown as their raw bytes (on a
//! terminal, which some bytes command, escaped), and in JSON as text beside a URL that is exact.

use super::format;
use super::list::Pages;
use super::show::end_of_output;
use super::target::Target;
use crate::failure::Failure;
use crate::status::Directory;
use railfs_engine::client::{Client, Found, ListEntry, Object};
use railfs_engine::error::Error;
use railfs_proto::descriptor::{Descriptor, Replica};
use railfs_proto::name::{Escaped, Key};
use railfs_proto::units::format_size;
use railfs_proto::url::Url;
use serde_json::{Value, json};
use std::io::{IsTerminal, Write};
use std::sync::Arc;

/// How a list is shown.
#[derive(Clone, Copy)]
struct Style {
    long: bool,
    json: bool,
    recursive: bool,
    escaped: bool,
}

/// Lists a directory, or shows one object's line.
///
/// # Errors
/// Not found (3), unreachable (5).
pub(super) fn ls(url: &Target, long: bool, recursive: bool, json: bool) -> Result<(), Failure> {
    let style = Style { long, json, recursive, escaped: std::io::stdout().is_terminal() };
    let client = url.connect()?;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let result = list(&client, url, style, &mut out);
    client.close();
    result.and_then(|()| out.flush().map_err(|error| end_of_output(&error)))
}

fn list(client: &Arc<Client>, url: &Url, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    if let Some(name) = url.object().filter(|_| !url.directory) {
        match Client::wait(|done| client.lookup(&name, done))? {
            Found::Object(object) => {
                let entry = ListEntry { key: name.key.as_bytes().to_vec(), object: Some(object.descriptor.clone()) };
                return show(url, &entry, name.key.last_part(), style, out);
            }
            Found::Absent => return Err(Failure::not_found(format!("{name}: not found"))),
            Found::Directory(..) => {}
        }
    }
    let mut pages = Pages::begin(client, url, style.recursive);
    let mut shown = false;
    while let Some(entries) = pages.next()? {
        shown = true;
        for entry in &entries {
            show(url, entry, entry.key.strip_prefix(pages.prefix()).unwrap_or(&entry.key), style, out)?;
        }
    }
    // What was emptied again is a list without lines; that nothing lies below a key is worth a word.
    if shown || url.key.is_none() { Ok(()) } else { Err(Pages::nothing(url)) }
}

fn show(url: &Url, entry: &ListEntry, name: &[u8], style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    let written = if style.json {
        let key = Key::new(entry.key.clone()).map_err(|error| Failure::failed(format!("list: {error}")))?;
        let mut place = url.with_key(key);
        place.directory = entry.object.is_none();
        let mut value = json!({
            "name": String::from_utf8_lossy(name),
            "url": place.to_string(),
            "kind": if entry.object.is_some() { "file" } else { "directory" },
        });
        if let (Some(descriptor), Some(fields)) = (&entry.object, value.as_object_mut()) {
            fields.extend(attributes(descriptor));
        }
        writeln!(out, "{value}")
    } else {
        let mut line = Vec::new();
        if style.long {
            line = match &entry.object {
                Some(descriptor) => format!(
                    "-{} {:>14} {} {:>12} ",
                    format::mode(descriptor.attributes.mode),
                    descriptor.striping.size(),
                    format::utc(descriptor.attributes.mtime_seconds),
                    descriptor.version
                ),
                None => format!("d{} {:>14} {:19} {:>12} ", format::mode(0o555), "-", "-", "-"),
            }
            .into_bytes();
        }
        line.extend(name_bytes(name, style.escaped));
        line.extend_from_slice(if entry.object.is_some() { b"\n" } else { b"/\n" });
        out.write_all(&line)
    };
    written.map_err(|error| end_of_output(&error))
}

/// A name as it is, or so that it cannot command a terminal.
pub fn name_bytes(name: &[u8], escaped: bool) -> Vec<u8> {
    if escaped { Escaped(name).to_string().into_bytes() } else { name.to_vec() }
}

/// What lists, stat and watch say of a version in JSON.
pub fn attributes(descriptor: &Descriptor) -> serde_json::Map<String, Value> {
    let attributes = &descriptor.attributes;
    let fields = [
        ("version", json!(descriptor.version)),
        ("size", json!(descriptor.striping.size())),
        ("mode", json!(format!("{:04o}", attributes.mode))),
        ("mtime_seconds", json!(attributes.mtime_seconds)),
        ("mtime_nanoseconds", json!(attributes.mtime_nanoseconds)),
    ];
    let owner = attributes.owner.map(|owner| [("uid", json!(owner.uid)), ("gid", json!(owner.gid))]);
    let all = fields.into_iter().chain(owner.into_iter().flatten());
    all.map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Shows one object.
///
/// # Errors
/// Not found (3), a directory (1), unreachable (5).
pub(super) fn stat(url: &Target, json: bool) -> Result<(), Failure> {
    let name = url.object().filter(|_| !url.directory);
    let Some(name) = name else {
        return Err(Failure::usage(format!(
            "{url} names a directory: stat takes one object, `railfs ls` lists directories"
        )));
    };
    let client = url.connect()?;
    let found = Client::wait(|done| client.lookup(&name, done));
    // Where the directories are: worth showing, not worth failing for.
    let directories: Vec<Directory> = match &found {
        Ok(Found::Object(_)) => {
            client.server_status().map(|status| status.directories.iter().map(Directory::from).collect())
        }
        _ => Ok(Vec::new()),
    }
    .unwrap_or_default();
    client.close();
    let object = match found? {
        Found::Object(object) => object,
        Found::Absent => return Err(Failure::not_found(format!("{name}: not found"))),
        Found::Directory(..) => {
            return Err(Failure::failed(format!("{name} is a directory: `railfs ls` lists what lies below it")));
        }
    };
    let text = if json { stat_json(url, &object, &directories) } else { stat_text(&object, &directories) };
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| end_of_output(&error))
}

fn components(descriptor: &Descriptor) -> impl Iterator<Item = (u32, u64, &Vec<railfs_proto::descriptor::Replica>)> {
    let lengths = move |(index, replicas)| (index, descriptor.striping.component_length(index), replicas);
    (0u32..).zip(&descriptor.components).map(lengths)
}

/// What the server says of the directory that a replica lies in.
fn place<'a>(replica: &Replica, directories: &'a [Directory]) -> Option<&'a Directory> {
    let id = replica.directory.to_string();
    directories.iter().find(|directory| directory.id == id)
}

fn stat_json(url: &Url, object: &Object, directories: &[Directory]) -> String {
    let descriptor = &object.descriptor;
    let replica = |replica: &Replica| {
        let mut value = json!({ "node": replica.node, "directory": replica.directory.to_string() });
        if let (Some(place), Some(fields)) = (place(replica, directories), value.as_object_mut()) {
            fields.insert("path".to_owned(), json!(place.path));
            fields.insert("state".to_owned(), json!(place.state));
        }
        value
    };
    let components: Vec<Value> = components(descriptor)
        .map(|(index, length, replicas)| {
            let replicas: Vec<Value> = replicas.iter().map(replica).collect();
            json!({ "index": index, "length": length, "replicas": replicas })
        })
        .collect();
    let mut value = json!({
        "name": object.name.to_string(),
        "url": url.to_string(),
        "kind": "file",
        "stripe_size": descriptor.striping.stripe_size(),
        "page_size": descriptor.striping.page_size(),
        "width": descriptor.striping.width(),
        "stripes": descriptor.striping.stripes(),
        "components": components,
    });
    if let Some(fields) = value.as_object_mut() {
        fields.extend(attributes(descriptor));
    }
    format!("{value}\n")
}

fn stat_text(object: &Object, directories: &[Directory]) -> String {
    let descriptor = &object.descriptor;
    let (striping, attributes) = (&descriptor.striping, &descriptor.attributes);
    let owner = match attributes.owner {
        Some(owner) => format!("   owner: {} group {}\n", owner.uid, owner.gid),
        None => String::new(),
    };
    let mut text = format!(
        "  object: {}\n version: {}\n    size: {} ({})\n    mode: {:04o} (-{})\n{owner}modified: {}.{:09} UTC\n  layout: {} stripes \
         of {}, pages of {}, width {}\n",
        object.name,
        descriptor.version,
        striping.size(),
        format::size(striping.size()),
        attributes.mode,
        format::mode(attributes.mode),
        format::utc(attributes.mtime_seconds),
        attributes.mtime_nanoseconds,
        striping.stripes(),
        format_size(striping.stripe_size().into()),
        format_size(striping.page_size().into()),
        striping.width()
    );
    let shown = |replica: &Replica| match place(replica, directories) {
        Some(place) if place.state == "ok" => format!("{} ({}) on {}", place.path, place.id, replica.node),
        Some(place) => format!("{} ({}, {}) on {}", place.path, place.id, place.state, replica.node),
        None => format!("{} on {}", replica.directory, replica.node),
    };
    for (index, length, replicas) in components(descriptor) {
        let places: Vec<String> = replicas.iter().map(shown).collect();
        text.push_str(&format!("component {index}: {length} bytes in {}\n", places.join(", ")));
    }
    text
}

/// Deletes one object.
///
/// # Errors
/// Not found (3), conflict (4), a directory (1), unreachable (5).
pub(super) fn rm(url: &Target, if_version: Option<u64>, json: bool) -> Result<(), Failure> {
    let name = url.object().filter(|_| !url.directory);
    let Some(name) = name else {
        return Err(Failure::usage(format!("{url} names a directory: rm deletes one object, name those below it")));
    };
    let client = url.connect()?;
    let result = client.delete(&name, if_version).map_err(|error| match error {
        Error::NotFound(text) => match Client::wait(|done| client.lookup(&name, done)) {
            Ok(Found::Directory(..)) => {
                Failure::failed(format!("{name} is a directory: rm deletes one object, name those below it"))
            }
            _ => Error::NotFound(text).into(),
        },
        error => error.into(),
    });
    client.close();
    let deleted = result?;
    if json {
        let value = json!({ "url": url.to_string(), "deleted": deleted });
        let mut out = std::io::stdout().lock();
        return writeln!(out, "{value}").and_then(|()| out.flush()).map_err(|error| end_of_output(&error));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use railfs_proto::descriptor::{Attributes, Id, Owner, Proof};
    use railfs_proto::layout::Striping;
    use railfs_proto::name::ObjectName;

    fn object() -> Object {
        let replica = |directory| vec![Replica { node: "n".to_owned(), directory: Id([directory; 16]) }];
        let descriptor = Descriptor {
            version: 2000,
            attributes: Attributes { mode: 0o640, mtime_seconds: 0, mtime_nanoseconds: 7, owner: None },
            striping: Striping::new(200_000, 4096, 65536, 2).unwrap(),
            components: vec![replica(1), replica(2)],
        };
        let proof = Proof { node: "n".to_owned(), incarnation: 1, slot: 0, value: 0, name_tag: 0 };
        Object::new(ObjectName::new("ns", &b"d/f\xff"[..]).unwrap(), descriptor, proof)
    }

    #[test]
    fn one_object_as_text_and_as_json() {
        let text = stat_text(&object(), &[]);
        assert!(text.contains(" version: 2000\n    size: 200000 (195.3 KiB)\n    mode: 0640 (-rw-r-----)\n"), "{text}");
        assert!(text.contains("4 stripes of 64 KiB, pages of 4 KiB, width 2"), "{text}");
        assert!(text.contains("component 1: 68928 bytes in 0202"), "{text}");
        let url = Url::parse("railfs://h/ns/d/f%ff").unwrap();
        let value: Value = serde_json::from_str(&stat_json(&url, &object(), &[])).unwrap();
        assert_eq!((&value["version"], &value["mode"], &value["width"]), (&json!(2000), &json!("0640"), &json!(2)));
        assert_eq!(value["url"], json!("railfs://h/ns/d/f%FF"));
        assert_eq!(value["components"][1]["length"], json!(68928));
        assert_eq!((value.get("uid"), value["components"][1]["replicas"][0].get("path")), (None, None));

        // With what a server says of its directories, and with an owner.
        let directory = Directory {
            id: Id([2; 16]).to_string(),
            path: "/srv/disk1".to_owned(),
            state: "suspect".to_owned(),
            ..Directory::default()
        };
        let mut owned = object();
        owned.descriptor.attributes.owner = Some(Owner { uid: 1000, gid: 100 });
        let text = stat_text(&owned, std::slice::from_ref(&directory));
        assert!(text.contains("   owner: 1000 group 100\nmodified"), "{text}");
        assert!(
            text.contains("component 1: 68928 bytes in /srv/disk1 (0202") && text.contains(", suspect) on n"),
            "{text}"
        );
        let value: Value = serde_json::from_str(&stat_json(&url, &owned, &[directory])).unwrap();
        let replica = &value["components"][1]["replicas"][0];
        assert_eq!((&replica["path"], &replica["state"]), (&json!("/srv/disk1"), &json!("suspect")));
        assert_eq!((&value["uid"], &value["gid"]), (&json!(1000), &json!(100)));
    }

    #[test]
    fn lines_of_a_list() {
        let url = Url::parse("railfs://h/ns/d/").unwrap();
        let shown = |entry: &ListEntry, long, json| {
            let mut out = Vec::new();
            show(&url, entry, &entry.key[2..], Style { long, json, recursive: false, escaped: false }, &mut out)
                .unwrap();
            out
        };
        let file = ListEntry { key: b"d/f\xff".to_vec(), object: Some(object().descriptor) };
        let directory = ListEntry { key: b"d/sub".to_vec(), object: None };
        assert_eq!(shown(&file, false, false), b"f\xff\n");
        assert_eq!(shown(&directory, false, false), b"sub/\n");
        assert_eq!(shown(&file, true, false), b"-rw-r-----         200000 1970-01-01 00:00:00         2000 f\xff\n");
        let value: Value = serde_json::from_slice(&shown(&directory, false, true)).unwrap();
        assert_eq!(value, json!({ "name": "sub", "url": "railfs://h/ns/d/sub/", "kind": "directory" }));
        let value: Value = serde_json::from_slice(&shown(&file, false, true)).unwrap();
        assert_eq!((&value["name"], &value["size"]), (&json!("f\u{fffd}"), &json!(200_000)));
    }
}
