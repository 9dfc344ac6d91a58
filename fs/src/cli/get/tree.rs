//! Getting everything below a URL.
//!
//! Guarantees: the list is read page by page while files are got, in bounded memory; each file is as [`super::get`]
//! promises; one failure does not hold up the others, unless it would meet them too.

use super::place::{Kept, Root};
use super::{AHEAD, MOST_AHEAD, Reader, Settings, say};
use crate::cli::list::Pages;
use crate::cli::report::Report;
use crate::failure::{Failure, io};
use railfs_engine::client::{Client, Found};
use railfs_engine::error::Error;
use railfs_proto::name::{Key, ObjectName};
use railfs_proto::url::Url;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

/// Keys that wait to be got.
const WAITING: usize = 256;

/// What the workers share.
struct Job<'a> {
    client: &'a Arc<Client>,
    url: &'a Url,
    root: Root,
    prefix: Vec<u8>,
    settings: &'a Settings,
    report: &'a Report,
    keys: Mutex<Receiver<Vec<u8>>>,
    got: AtomicU64,
    failed: AtomicU64,
    code: AtomicU8,
    stop: AtomicBool,
}

/// Everything below the URL goes into the directory `into`, which is made if it is missing.
///
/// # Errors
/// Not found (3): nothing lies there. Of files that failed the last one's code.
pub fn get(client: &Arc<Client>, url: &Url, into: &Path, settings: &Settings, report: &Report) -> Result<(), Failure> {
    let mut pages = Pages::begin(client, url, true);
    let Some(first) = pages.next()? else { return Err(Pages::nothing(url)) };
    let (send, keys) = sync_channel(WAITING);
    let job = Job {
        client,
        url,
        root: Root::open(into)?,
        prefix: pages.prefix().to_vec(),
        settings,
        report,
        keys: Mutex::new(keys),
        got: AtomicU64::new(0),
        failed: AtomicU64::new(0),
        code: AtomicU8::new(0),
        stop: AtomicBool::new(false),
    };
    let listed = std::thread::scope(|scope| {
        for number in (1u64..).take(settings.jobs) {
            let job = &job;
            scope.spawn(move || job.work(number));
        }
        let mut page = Some(first);
        while let Some(entries) = page {
            for entry in entries {
                // Nobody takes any more: all have stopped.
                if job.stop.load(Ordering::Relaxed) || send.send(entry.key).is_err() {
                    drop(send);
                    return Ok(());
                }
            }
            page = pages.next()?;
        }
        drop(send);
        Ok(())
    });
    let (got, failed) = (job.got.into_inner(), job.failed.into_inner());
    match (failed, listed) {
        (0, listed) => listed,
        (failed, _) => {
            let stopped = if job.stop.into_inner() { ", the rest was not tried" } else { "" };
            let message = format!("{failed} of {} files were not got{stopped}", got + failed);
            Err(Failure { message, code: job.code.into_inner() })
        }
    }
}

impl Job<'_> {
    fn work(&self, number: u64) {
        let ahead = (AHEAD / self.settings.jobs.max(1)).clamp(1, MOST_AHEAD);
        let reader = Reader { client: self.client, number, ahead, report: self.report };
        while !self.stop.load(Ordering::Relaxed) {
            let key = self.keys.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok(key) = key else { return };
            match self.one(&reader, key) {
                Ok(()) => {
                    self.got.fetch_add(1, Ordering::Relaxed);
                }
                Err((failure, general)) => {
                    self.report.say(&failure.message);
                    self.failed.fetch_add(1, Ordering::Relaxed);
                    self.code.store(failure.code, Ordering::Relaxed);
                    self.stop.fetch_or(general, Ordering::Relaxed);
                }
            }
        }
        // Whoever lists must not wait for room.
        let keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        while keys.recv().is_ok() {}
    }

    /// The failure says whether it would meet the others too.
    fn one(&self, reader: &Reader<'_>, key: Vec<u8>) -> Result<(), (Failure, bool)> {
        let local = |failure: Failure| (failure, false);
        let key = Key::new(key).map_err(|error| local(Failure::failed(format!("list: {error}"))))?;
        let name = ObjectName { namespace: self.url.namespace.clone(), key: key.clone() };
        let object = match Client::wait(|done| self.client.lookup(&name, done)) {
            Ok(Found::Object(object)) => object,
            Ok(_) => return Err(local(Failure::failed(format!("{name} was deleted meanwhile")))),
            Err(error) => {
                let general = matches!(error, Error::Unreachable { .. } | Error::TimedOut { .. } | Error::Denied(_));
                let failure = Failure::from(error);
                return Err((Failure { message: format!("{name}: {}", failure.message), ..failure }, general));
            }
        };
        let attributes = &object.descriptor.attributes;
        self.report.expect(object.descriptor.striping.size());
        let below = key.as_bytes().strip_prefix(&*self.prefix).unwrap_or(key.as_bytes());
        let parts: Vec<&[u8]> = below.split(|&byte| byte == b'/').collect();
        let (mut file, pending) = self.root.create(&parts, attributes.mode & 0o777).map_err(local)?;
        let shown = pending.path.display().to_string();
        reader
            .copy(&object, &mut |bytes| file.write_all(bytes).map_err(|error| io(&shown, &error)))
            .map_err(|failure| (failure.clone(), failure.code == 5))?;
        if self.settings.archive {
            Kept::of(attributes).give(&file).map_err(|error| local(io(&shown, &error)))?;
        }
        let target = pending.finish().map_err(local)?;
        say(self.report, self.url, &object, &target);
        Ok(())
    }
}
