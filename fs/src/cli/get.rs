//! `railfs get`.
//!
//! Guarantees: every byte was verified and seen current when it was read; a file appears whole under its name or not at
//! all (standard output and devices get what had arrived before a failure, and the exit code says so).

use super::show::end_of_output;
use crate::failure::{Failure, io};
use railfs_engine::client::{Client, Found, Object};
use railfs_engine::error::Error;
use railfs_proto::url::Url;
use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

/// Bytes that are read at once.
const PIECE: u32 = 1 << 20;
/// Pieces that are under way.
const AHEAD: usize = 8;
/// A piece that is under way: its offset, its length, and where it arrives.
type Piece = (u64, u32, Receiver<Result<Vec<u8>, Error>>);

/// The only reader of this client.
const READER: u64 = 1;

/// Gets one object.
///
/// # Errors
/// See the module.
pub fn get(url: &Url, file: &Path) -> Result<(), Failure> {
    let name = url.object().filter(|_| !url.directory);
    let Some(name) = name else {
        return Err(Failure::usage(format!("{url} names a directory: get takes one object (mount it to copy a tree)")));
    };
    let client = super::connect(url)?;
    let result = match Client::wait(|done| client.lookup(&name, done)) {
        Ok(Found::Object(object)) => copy_to(&client, &object, file),
        Ok(Found::Directory(..)) => {
            Err(Failure::failed(format!("{name} is a directory: get takes one object (mount it to copy a tree)")))
        }
        Ok(Found::Absent) => Err(Failure::not_found(format!("{name}: not found"))),
        Err(error) => Err(error.into()),
    };
    client.close();
    result
}

fn copy_to(client: &Arc<Client>, object: &Arc<Object>, file: &Path) -> Result<(), Failure> {
    if file.as_os_str() == "-" {
        let mut stdout = std::io::stdout().lock();
        copy(client, object, &mut |bytes| stdout.write_all(bytes).map_err(|error| end_of_output(&error)))?;
        return stdout.flush().map_err(|error| end_of_output(&error));
    }
    let target = target(object, file)?;
    let shown = target.display();
    let written = |error: std::io::Error| io(&shown, &error);
    if std::fs::metadata(&target).is_ok_and(|metadata| !metadata.is_file()) {
        let mut out = OpenOptions::new().write(true).open(&target).map_err(written)?;
        return copy(client, object, &mut |bytes| out.write_all(bytes).map_err(written));
    }
    let mode = object.descriptor.attributes.mode & 0o777;
    let (mut out, temporary) = Temporary::beside(&target, mode).map_err(written)?;
    copy(client, object, &mut |bytes| out.write_all(bytes).map_err(written))?;
    temporary.rename(&target).map_err(written)
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

/// A file that is gone again unless it was renamed.
struct Temporary {
    path: PathBuf,
}

impl Temporary {
    fn beside(target: &Path, mode: u32) -> std::io::Result<(File, Temporary)> {
        let name = target.file_name().ok_or(std::io::ErrorKind::InvalidInput)?;
        // Long names leave no room for more: the name's start tells enough.
        let start: Vec<u8> = name.as_bytes().iter().copied().take(200).collect();
        let directory = target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        for attempt in 0..100 {
            let ending = format!(".railfs-{}-{attempt}", std::process::id());
            let path = directory.join(std::ffi::OsStr::from_bytes(&[b".", &*start, ending.as_bytes()].concat()));
            match OpenOptions::new().write(true).create_new(true).mode(mode).open(&path) {
                Ok(file) => return Ok((file, Temporary { path })),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(std::io::ErrorKind::AlreadyExists.into())
    }

    fn rename(mut self, target: &Path) -> std::io::Result<()> {
        std::fs::rename(&self.path, target)?;
        self.path.clear();
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// All bytes in order, several pieces under way.
fn copy(
    client: &Arc<Client>,
    object: &Arc<Object>,
    write: &mut dyn FnMut(&[u8]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let size = object.descriptor.striping.size();
    let mut asked = 0;
    let mut pieces: VecDeque<Piece> = VecDeque::new();
    loop {
        while asked < size && pieces.len() < AHEAD {
            let length = u32::try_from(size - asked).map_or(PIECE, |left| left.min(PIECE));
            let (send, receive) = sync_channel(1);
            let answer = move |bytes: Result<&[u8], Error>| {
                let _ = send.send(bytes.map(<[u8]>::to_vec));
            };
            client.read(object, READER, asked, length, Box::new(answer));
            pieces.push_back((asked, length, receive));
            asked += u64::from(length);
        }
        let Some((offset, length, receive)) = pieces.pop_front() else {
            client.release(READER);
            return Ok(());
        };
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_temporary_file_is_gone_unless_it_was_renamed() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("x".repeat(255));
        let (mut file, temporary) = Temporary::beside(&target, 0o600).unwrap();
        file.write_all(b"1").unwrap();
        let (_, second) = Temporary::beside(&target, 0o600).unwrap();
        assert_ne!(temporary.path, second.path);
        drop(second);
        temporary.rename(&target).unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"1");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
