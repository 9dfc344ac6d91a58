//! `railfs get`.
//!
//! Guarantees: every byte was verified and seen current when it was read; a file appears whole under its name or not at
//! all (standard output and devices get what had arrived before a failure, and the exit code says so); of a tree nothing is
//! written outside the directory that was named.

mod place;
mod tree;

use super::format;
use super::report::Report;
use super::show::end_of_output;
use super::target::Target;
use crate::failure::{Failure, io};
use place::{Kept, Temporary};
use railfs_engine::client::{Client, Found, Object};
use railfs_engine::error::Error;
use railfs_proto::name::ObjectName;
use railfs_proto::url::Url;
use serde_json::json;
use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

/// Bytes that are read at once.
const PIECE: u32 = 1 << 20;
/// Pieces that are under way, of all files together.
const AHEAD: usize = 16;
/// Of one.
const MOST_AHEAD: usize = 8;
/// A piece that is under way: its offset, its length, and where it arrives.
type Piece = (u64, u32, Receiver<Result<Vec<u8>, Error>>);

/// How to get.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Everything below the URL.
    pub recursive: bool,
    /// Give files the time, mode and (as root) owner that they were put with.
    pub archive: bool,
    /// Files that are got at once.
    pub jobs: usize,
}

/// Gets one object, or everything below the URL.
///
/// # Errors
/// See the module.
pub(super) fn get(url: &Target, file: &Path, settings: &Settings, report: &Report) -> Result<(), Failure> {
    let result = get_url(url, file, settings, report);
    let said = report.end();
    result.and(said)
}

fn get_url(url: &Target, file: &Path, settings: &Settings, report: &Report) -> Result<(), Failure> {
    if file.as_os_str() == "-" && (url.object().is_none() || url.directory || settings.recursive) {
        return Err(Failure::usage(format!(
            "{url}: a directory cannot go to standard output, name a directory for it"
        )));
    }
    let client = url.connect()?;
    let result = match url.object().filter(|_| !url.directory) {
        Some(name) => get_named(&client, url, &name, file, settings, report),
        None => tree::get(&client, url, file, settings, report),
    };
    client.close();
    result
}

fn get_named(
    client: &Arc<Client>,
    url: &Url,
    name: &ObjectName,
    file: &Path,
    settings: &Settings,
    report: &Report,
) -> Result<(), Failure> {
    let reader = Reader { client, number: 1, ahead: MOST_AHEAD, report };
    match Client::wait(|done| client.lookup(name, done))? {
        Found::Object(object) => {
            if let Some(target) = copy_to(&reader, &object, file, settings)? {
                say(report, url, &object, &target);
            }
            Ok(())
        }
        Found::Directory(..) if settings.recursive => tree::get(client, url, file, settings, report),
        Found::Directory(..) => Err(Failure::failed(format!(
            "{name} is a directory: put a '/' behind it (or say -r) to get everything that lies below it"
        ))),
        Found::Absent => Err(Failure::not_found(format!("{name}: not found"))),
    }
}

/// One of those who read from a client.
struct Reader<'a> {
    client: &'a Arc<Client>,
    /// Tells readers apart.
    number: u64,
    /// Pieces that are under way.
    ahead: usize,
    report: &'a Report,
}

/// Where it went, unless that is standard output.
fn copy_to(
    reader: &Reader<'_>,
    object: &Arc<Object>,
    file: &Path,
    settings: &Settings,
) -> Result<Option<PathBuf>, Failure> {
    reader.report.expect(object.descriptor.striping.size());
    if file.as_os_str() == "-" {
        let mut stdout = std::io::stdout().lock();
        reader.copy(object, &mut |bytes| stdout.write_all(bytes).map_err(|error| end_of_output(&error)))?;
        stdout.flush().map_err(|error| end_of_output(&error))?;
        return Ok(None);
    }
    let target = target(object, file)?;
    let shown = target.display();
    let written = |error: std::io::Error| io(&shown, &error);
    if std::fs::metadata(&target).is_ok_and(|metadata| !metadata.is_file()) {
        let mut out = OpenOptions::new().write(true).open(&target).map_err(written)?;
        reader.copy(object, &mut |bytes| out.write_all(bytes).map_err(written))?;
        return Ok(Some(target));
    }
    // What is there keeps its mode, as with cp: somebody may have closed it to others.
    let there = std::fs::metadata(&target).ok().map(|metadata| metadata.permissions().mode());
    let mode = there.unwrap_or(object.descriptor.attributes.mode) & 0o777;
    let (mut out, temporary) = Temporary::beside(&target, mode).map_err(written)?;
    reader.copy(object, &mut |bytes| out.write_all(bytes).map_err(written))?;
    if settings.archive {
        Kept::of(&object.descriptor.attributes).give(&out).map_err(written)?;
    }
    temporary.finish().map_err(written)?;
    Ok(Some(target))
}

/// A directory gets a file of the object's own name; a link is followed, so that what it names is replaced.
fn target(object: &Object, file: &Path) -> Result<PathBuf, Failure> {
    let into = if file.is_dir() {
        file.join(std::ffi::OsStr::from_bytes(object.name.key.last_part()))
    } else {
        file.to_owned()
    };
    if into.is_dir() {
        return Err(Failure::failed(format!("{} is a directory", into.display())));
    }
    Ok(into.canonicalize().unwrap_or(into))
}

fn say(report: &Report, url: &Url, object: &Object, target: &Path) {
    let (size, version) = (object.descriptor.striping.size(), object.descriptor.version);
    let line = || {
        let text = format!(" ({}, version {version})", format::size(size));
        let from = format!("{} -> ", object.name);
        [from.as_bytes(), target.as_os_str().as_bytes(), text.as_bytes()].concat()
    };
    report.done(line, || {
        json!({
            "url": url.with_key(object.name.key.clone()).to_string(),
            "file": String::from_utf8_lossy(target.as_os_str().as_bytes()),
            "size": size,
            "version": version,
        })
    });
}

impl Reader<'_> {
    /// All bytes in order, several pieces under way.
    fn copy(&self, object: &Arc<Object>, write: &mut dyn FnMut(&[u8]) -> Result<(), Failure>) -> Result<(), Failure> {
        let result = self.pieces(object, write);
        self.client.release(self.number);
        result
    }

    fn pieces(&self, object: &Arc<Object>, write: &mut dyn FnMut(&[u8]) -> Result<(), Failure>) -> Result<(), Failure> {
        let size = object.descriptor.striping.size();
        let mut asked = 0;
        let mut pieces: VecDeque<Piece> = VecDeque::new();
        loop {
            while asked < size && pieces.len() < self.ahead {
                let length = u32::try_from(size - asked).map_or(PIECE, |left| left.min(PIECE));
                let (send, receive) = sync_channel(1);
                let answer = move |bytes: Result<&[u8], Error>| {
                    // An earlier piece may have failed: then nobody waits for this one.
                    let _ = send.send(bytes.map(<[u8]>::to_vec));
                };
                self.client.read(object, self.number, asked, length, Box::new(answer));
                pieces.push_back((asked, length, receive));
                asked += u64::from(length);
            }
            let Some((offset, length, receive)) = pieces.pop_front() else { return Ok(()) };
            let bytes = receive.recv().unwrap_or(Err(Error::Closed)).map_err(|error| match error {
                Error::Stale { .. } => {
                    Failure::failed(format!("{} was replaced or deleted while it was read: get it again", object.name))
                }
                error => error.into(),
            })?;
            if bytes.len() != length as usize {
                let got = bytes.len();
                return Err(Failure::failed(format!(
                    "{}: {got} bytes at {offset} where {length} were asked for",
                    object.name
                )));
            }
            write(&bytes)?;
            self.report.moved(length.into());
        }
    }
}
