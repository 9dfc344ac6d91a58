//! `railfs put`.
//!
//! Guarantees: what cannot be put is refused before anything is; each file is put whole or not at all; a file that
//! changes meanwhile is reported; with several files, one failure does not hold up the others unless it would meet
//! them too.

use super::walk::{self, Item, Source as Kind};
use crate::failure::{Failure, io};
use railfs_engine::client::{Client, PutOptions, Source};
use railfs_engine::error::Error;
use railfs_proto::descriptor::Attributes;
use railfs_proto::name::{Key, ObjectName};
use railfs_proto::url::Url;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Files that are put at once.
const PARALLEL: usize = 4;

/// How to put.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Bytes; 0: the server's default.
    pub stripe_size: u32,
    /// Bytes; 0: the server's default.
    pub page_size: u32,
    /// 0: the server's default.
    pub width: u32,
    /// Only if this version is current; 0: only if the name is absent.
    pub if_version: Option<u64>,
}

struct FileSource {
    file: File,
    size: u64,
}

impl Source for FileSource {
    fn size(&self) -> u64 {
        self.size
    }
    fn read_exact_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }
}

/// Puts a file, or everything in a directory below the URL.
///
/// # Errors
/// See the module.
pub fn put(source: &Path, url: &Url, settings: &Settings) -> Result<(), Failure> {
    let (kind, _) = walk::source(source).map_err(Failure::failed)?;
    let items = match kind {
        Kind::File => vec![Item { path: source.to_owned(), key: key_of_file(source, url)? }],
        Kind::Directory if settings.if_version.is_some_and(|version| version > 0) => {
            return Err(Failure::usage("--if-version is for one object, the source is a directory"));
        }
        Kind::Directory => {
            let walk = walk::walk(source, url.key.as_ref());
            walk.check()?;
            if walk.empty > 0 {
                eprintln!(
                    "railfs: {} empty directories are not put: a directory exists by what lies below it",
                    walk.empty
                );
            }
            walk.items
        }
    };
    let client = super::connect(url)?;
    let result = put_all(&client, url, &items, settings);
    client.close();
    result
}

/// The URL names the object, or (with a '/' at its end, or no key) the directory it goes to under its own name.
fn key_of_file(source: &Path, url: &Url) -> Result<Key, Failure> {
    match (&url.key, url.directory) {
        (Some(key), false) => Ok(key.clone()),
        (base, _) => {
            let name = source.file_name().ok_or_else(|| {
                Failure::usage(format!("{} has no name to put it under: name the object in the URL", source.display()))
            })?;
            walk::child(base.as_ref(), name).map_err(|error| Failure::usage(format!("{}: {error}", source.display())))
        }
    }
}

fn put_all(client: &Arc<Client>, url: &Url, items: &[Item], settings: &Settings) -> Result<(), Failure> {
    if let [item] = items {
        return put_one(client, url, item, settings).map_err(|(failure, _)| failure);
    }
    let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let (code, stop) = (AtomicU8::new(0), AtomicBool::new(false));
    let said = Mutex::new(());
    std::thread::scope(|scope| {
        for _ in 0..PARALLEL.min(items.len()) {
            scope.spawn(|| {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    if let Err((failure, general)) = put_one(client, url, item, settings) {
                        let _line = said.lock().unwrap_or_else(PoisonError::into_inner);
                        eprintln!("railfs: {failure}");
                        failed.fetch_add(1, Ordering::Relaxed);
                        code.store(failure.code, Ordering::Relaxed);
                        stop.fetch_or(general, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    match failed.into_inner() {
        0 => Ok(()),
        failed => {
            let stopped = if stop.into_inner() { ", the rest was not tried" } else { "" };
            let message = format!("{failed} of {} files were not put{stopped}", items.len());
            Err(Failure { message, code: code.into_inner() })
        }
    }
}

/// Puts one file. The failure says whether it would meet the others too.
fn put_one(client: &Arc<Client>, url: &Url, item: &Item, settings: &Settings) -> Result<(), (Failure, bool)> {
    let shown = item.path.display();
    let local = |error: std::io::Error| (io(&shown, &error), false);
    let file = File::open(&item.path).map_err(local)?;
    let before = file.metadata().map_err(local)?;
    if !before.is_file() {
        return Err((Failure::failed(format!("{shown}: is no longer a file")), false));
    }
    let watch = file.try_clone().map_err(local)?;
    let name = ObjectName { namespace: url.namespace.clone(), key: item.key.clone() };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let options = PutOptions {
        attributes: Attributes {
            mode: before.mode() & 0o7777,
            mtime_seconds: i64::try_from(now.as_secs()).unwrap_or(0),
            mtime_nanoseconds: now.subsec_nanos(),
        },
        stripe_size: settings.stripe_size,
        page_size: settings.page_size,
        width: settings.width,
        if_version: settings.if_version,
    };
    let source = Arc::new(FileSource { size: before.len(), file });
    let done = client.put(&name, source, options).map_err(|error| {
        let general = matches!(
            error,
            Error::Unreachable { .. }
                | Error::TimedOut { .. }
                | Error::NoSpace(_)
                | Error::ReadOnly(_)
                | Error::Denied(_)
        );
        let failure = Failure::from(error);
        (Failure { message: format!("{shown}: {}", failure.message), ..failure }, general)
    })?;
    let after = watch.metadata().map_err(local)?;
    let state = |metadata: &std::fs::Metadata| (metadata.len(), metadata.mtime(), metadata.mtime_nsec());
    if state(&after) != state(&before) {
        return Err((Failure::failed(format!("{shown}: was changed while it was put: put it again")), false));
    }
    if done.superseded {
        eprintln!("railfs: {name}: a newer put came first, this one (version {}) is just before it", done.version);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_a_file_goes() {
        let key = |source: &str, url: &str| {
            key_of_file(Path::new(source), &Url::parse(url).unwrap()).map(|key| key.to_string()).map_err(|f| f.code)
        };
        assert_eq!(key("/a/f", "railfs://h/ns/k"), Ok("k".to_owned()));
        assert_eq!(key("/a/f", "railfs://h/ns/k/"), Ok("k/f".to_owned()));
        assert_eq!(key("f", "railfs://h/ns"), Ok("f".to_owned()));
        assert_eq!(key("..", "railfs://h/ns"), Err(2));
    }

    #[test]
    fn a_source_that_shrank_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, "abc").unwrap();
        let source = FileSource { file: File::open(&path).unwrap(), size: 10 };
        let mut buffer = [0; 2];
        source.read_exact_at(1, &mut buffer).unwrap();
        assert_eq!(&buffer, b"bc");
        assert!(source.read_exact_at(2, &mut buffer).is_err());
    }
}
