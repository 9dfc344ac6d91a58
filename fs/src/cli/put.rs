//! `railfs put`.
//!
//! Guarantees: what cannot be put is refused before anything is; each file is put whole or not at all; a file that
//! changes meanwhile is reported; with several files, one failure does not hold up the others unless it would meet
//! them too.

mod source;

use super::format;
use super::report::Report;
use super::target::Target;
use super::walk::{self, Item, Source as Kind};
use crate::failure::{Failure, io};
use railfs_engine::client::{Client, PutDone, PutOptions};
use railfs_engine::error::Error;
use railfs_proto::descriptor::{Attributes, Owner};
use railfs_proto::limits::{MAX_PAGE, MAX_STRIPE, MIN_PAGE};
use railfs_proto::name::{Key, ObjectName};
use railfs_proto::units::format_size;
use railfs_proto::url::Url;
use serde_json::json;
use source::FileSource;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// The mode of what comes by standard input.
const STANDARD_INPUT_MODE: u32 = 0o644;

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
    /// Keep owner, group and time too.
    pub archive: bool,
    /// Files that are put at once.
    pub jobs: usize,
}

impl Settings {
    /// What no server would take, found before one is asked.
    ///
    /// # Errors
    /// Exit code 2: the flag, and what it takes.
    pub fn check(&self) -> Result<(), Failure> {
        for (flag, size, most) in
            [("--stripe-size", self.stripe_size, MAX_STRIPE), ("--page-size", self.page_size, MAX_PAGE)]
        {
            if size != 0 && !(size.is_power_of_two() && (MIN_PAGE..=most).contains(&size)) {
                let (least, most) = (format_size(MIN_PAGE.into()), format_size(most.into()));
                return Err(Failure::usage(format!("{flag}: {size} is not a power of two from {least} to {most}")));
            }
        }
        if self.stripe_size != 0 && self.page_size > self.stripe_size {
            return Err(Failure::usage(format!(
                "--page-size: a page of {} does not fit a stripe of {}",
                format_size(self.page_size.into()),
                format_size(self.stripe_size.into())
            )));
        }
        Ok(())
    }
}

/// Puts a file, standard input (`-`), or everything in a directory below the URL.
///
/// # Errors
/// See the module.
pub(super) fn put(source: &Path, url: &Target, settings: &Settings, report: &Arc<Report>) -> Result<(), Failure> {
    let put = if source.as_os_str() == "-" { put_standard_input } else { put_path };
    let result = put(source, url, settings, report);
    let said = report.end();
    result.and(said)
}

fn put_standard_input(_: &Path, url: &Target, settings: &Settings, report: &Arc<Report>) -> Result<(), Failure> {
    let name = url.object().filter(|_| !url.directory).ok_or_else(|| {
        Failure::usage(format!("{url} names a directory: standard input has no name, so the URL must name the object"))
    })?;
    if settings.archive {
        return Err(Failure::usage("-a: standard input has no owner and no time that could be kept"));
    }
    let source = source::standard_input(report)?;
    let size = source.size();
    report.expect(size);
    let options = options(settings, STANDARD_INPUT_MODE, now(), None);
    let client = url.connect()?;
    let result = client.put(&name, source, options);
    client.close();
    let done = result.map_err(|error| named("standard input", error))?;
    say(report, url, &name, "-", size, &done);
    Ok(())
}

fn put_path(source: &Path, url: &Target, settings: &Settings, report: &Arc<Report>) -> Result<(), Failure> {
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
                let empty = walk.empty;
                report.say(&format!("{empty} empty directories are not put: a directory exists by what lies below it"));
            }
            walk.items
        }
    };
    let client = url.connect()?;
    let result = put_all(&client, url, &items, settings, report);
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

fn put_all(
    client: &Arc<Client>,
    url: &Url,
    items: &[Item],
    settings: &Settings,
    report: &Arc<Report>,
) -> Result<(), Failure> {
    if let [item] = items {
        return put_one(client, url, item, settings, report).map_err(|(failure, _)| failure);
    }
    let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let (code, stop) = (AtomicU8::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..settings.jobs.min(items.len()) {
            scope.spawn(|| {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    if let Err((failure, general)) = put_one(client, url, item, settings, report) {
                        report.say(&failure.message);
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

fn now() -> (i64, u32) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (i64::try_from(now.as_secs()).unwrap_or(0), now.subsec_nanos())
}

fn options(settings: &Settings, mode: u32, mtime: (i64, u32), owner: Option<Owner>) -> PutOptions {
    PutOptions {
        attributes: Attributes { mode: mode & 0o7777, mtime_seconds: mtime.0, mtime_nanoseconds: mtime.1, owner },
        stripe_size: settings.stripe_size,
        page_size: settings.page_size,
        width: settings.width,
        if_version: settings.if_version,
    }
}

fn named(what: impl std::fmt::Display, error: Error) -> Failure {
    let failure = Failure::from(error);
    Failure { message: format!("{what}: {}", failure.message), ..failure }
}

/// Puts one file. The failure says whether it would meet the others too.
fn put_one(
    client: &Arc<Client>,
    url: &Url,
    item: &Item,
    settings: &Settings,
    report: &Arc<Report>,
) -> Result<(), (Failure, bool)> {
    let shown = item.path.display();
    let local = |error: std::io::Error| (io(&shown, &error), false);
    let file = File::open(&item.path).map_err(local)?;
    let before = file.metadata().map_err(local)?;
    if !before.is_file() {
        return Err((Failure::failed(format!("{shown}: is no longer a file")), false));
    }
    let watch = file.try_clone().map_err(local)?;
    let name = ObjectName { namespace: url.namespace.clone(), key: item.key.clone() };
    let source: Arc<dyn railfs_engine::client::Source> = match source::has_no_size(&before) {
        true => source::to_the_end(&file, &shown.to_string(), report).map_err(|failure| (failure, false))?,
        false => Arc::new(FileSource { size: before.len(), file, report: Arc::clone(report) }),
    };
    let size = source.size();
    let kept = || (before.mtime(), u32::try_from(before.mtime_nsec()).unwrap_or(0));
    let (mtime, owner) = match settings.archive {
        true => (kept(), Some(Owner { uid: before.uid(), gid: before.gid() })),
        false => (now(), None),
    };
    let options = options(settings, before.mode(), mtime, owner);
    report.expect(size);
    let done = client.put(&name, source, options).map_err(|error| {
        let general = matches!(
            error,
            Error::Unreachable { .. }
                | Error::TimedOut { .. }
                | Error::NoSpace(_)
                | Error::ReadOnly(_)
                | Error::Denied(_)
        );
        (named(&shown, error), general)
    })?;
    let after = watch.metadata().map_err(local)?;
    let state = |metadata: &std::fs::Metadata| (metadata.len(), metadata.mtime(), metadata.mtime_nsec());
    if state(&after) != state(&before) {
        return Err((Failure::failed(format!("{shown}: was changed while it was put: put it again")), false));
    }
    say(report, url, &name, &shown.to_string(), size, &done);
    Ok(())
}

fn say(report: &Report, url: &Url, name: &ObjectName, source: &str, size: u64, done: &PutDone) {
    if done.superseded {
        report.say(&format!("{name}: a newer put came first, this one (version {}) is just before it", done.version));
    }
    let line = || format!("{source} -> {name} ({}, version {})", format::size(size), done.version).into_bytes();
    report.done(line, || {
        json!({
            "source": source,
            "url": url.with_key(name.key.clone()).to_string(),
            "size": size,
            "version": done.version,
            "superseded": done.superseded,
        })
    });
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
    fn layouts_that_none_can_be_are_refused_by_the_flag_that_says_them() {
        let check = |stripe_size, page_size| {
            let settings = Settings { stripe_size, page_size, width: 0, if_version: None, archive: false, jobs: 4 };
            settings.check().map_err(|failure| (failure.message, failure.code))
        };
        assert_eq!(check(0, 0), Ok(()));
        assert_eq!(check(1 << 20, 1 << 16), Ok(()));
        let (message, code) = check(12345, 0).unwrap_err();
        assert_eq!((message.as_str(), code), ("--stripe-size: 12345 is not a power of two from 4 KiB to 64 MiB", 2));
        assert!(check(2048, 0).unwrap_err().0.starts_with("--stripe-size: 2048"));
        assert!(check(1 << 27, 0).unwrap_err().0.starts_with("--stripe-size"));
        assert!(check(0, 1 << 20).unwrap_err().0.starts_with("--page-size: 1048576"));
        assert!(check(4096, 8192).unwrap_err().0.contains("does not fit a stripe of 4 KiB"));
    }
}
