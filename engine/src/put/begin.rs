//! A put from its beginning to its end, over whatever happens to connections and servers meanwhile.

use super::{Entry, Puts, Registered, lock};
use crate::client::{PutDone, PutOptions, Source};
use crate::control::{BeginPut, Begun, CommitFailure, Control};
use crate::error::{Error, Result};
use railfs_proto::limits::PUT_IDLE;
use railfs_proto::name::ObjectName;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Between two tries.
const AGAIN: Duration = Duration::from_millis(100);
/// Between two looks at the progress.
const LOOK: Duration = Duration::from_secs(1);
/// A server that has every byte may take this long to make them durable, beyond the limit of progress.
const SEALING: Duration = Duration::from_secs(60);
/// A put that is begun anew this often, because the server was restarted, is given up.
const RESTARTS: usize = 8;

/// Takes the put back at the server if it is dropped: on every path but success.
struct TakeBack {
    control: Arc<Control>,
    runtime: tokio::runtime::Handle,
    begun: Option<Begun>,
    _registered: Registered,
}

impl Drop for TakeBack {
    fn drop(&mut self) {
        if let Some(begun) = self.begun.take() {
            let control = Arc::clone(&self.control);
            self.runtime.spawn(async move { control.abort_put(&begun).await });
        }
    }
}

enum Ended {
    Done(PutDone),
    /// The server was restarted: from the beginning.
    Anew,
}

/// Puts an object and waits until it is durable and visible. Dropping the future takes the put back.
///
/// # Errors
/// `Conflict`, `NoSpace`, `ReadOnly`, `Aborted`, `Io` (the source failed), `TimedOut` (no progress for
/// `limits::PUT_IDLE`), `Unreachable`, and as the control connection's calls.
pub async fn put(
    control: &Arc<Control>,
    puts: &Arc<Puts>,
    name: &ObjectName,
    source: Arc<dyn Source>,
    options: PutOptions,
) -> Result<PutDone> {
    let mut request = [0u8; 16];
    getrandom::fill(&mut request)
        .map_err(|error| Error::Io { what: "random bytes for a request id".to_owned(), detail: error.to_string() })?;
    let begin = BeginPut {
        name: name.clone(),
        attributes: options.attributes,
        size: source.size(),
        stripe_size: options.stripe_size,
        page_size: options.page_size,
        width: options.width,
    };
    let mut progress = Instant::now();
    let mut restarts = 0;
    loop {
        let beginning = puts.beginning();
        let begun = match control.begin_put(&begin).await {
            Ok(begun) => begun,
            Err(Error::Unreachable { .. } | Error::TimedOut { .. }) if progress.elapsed() < PUT_IDLE => {
                sleep(AGAIN).await;
                continue;
            }
            Err(error) => return Err(error),
        };
        let entry = Arc::new(Entry {
            source: Arc::clone(&source),
            descriptor: begun.descriptor.clone(),
            incarnation: begun.session.incarnation,
            progress: Mutex::new(Instant::now()),
            given: Mutex::default(),
            error: Mutex::default(),
        });
        let registered = puts.register(begun.put, Arc::clone(&entry));
        let registered = registered
            .map_err(|error| Error::Io { what: "threads for a put".to_owned(), detail: error.to_string() })?;
        drop(beginning);
        let mut take_back = TakeBack {
            control: Arc::clone(control),
            runtime: tokio::runtime::Handle::current(),
            begun: Some(begun.clone()),
            _registered: registered,
        };
        let ended = commit(control, name, &begun, request, options.if_version, &entry).await;
        if let Some(detail) = lock(&entry.error).take() {
            // What this side knows says more than what the server makes of it.
            return Err(Error::Io { what: name.to_string(), detail });
        }
        match ended? {
            Ended::Done(done) => {
                take_back.begun = None;
                return Ok(done);
            }
            Ended::Anew => {
                take_back.begun = None;
                progress = progress.max(*lock(&entry.progress));
                restarts += 1;
                if restarts > RESTARTS || progress.elapsed() >= PUT_IDLE {
                    let detail = format!("the server was restarted {restarts} times meanwhile");
                    return Err(Error::Unreachable { peer: name.to_string(), detail });
                }
                sleep(AGAIN).await;
            }
        }
    }
}

async fn commit(
    control: &Arc<Control>,
    name: &ObjectName,
    begun: &Begun,
    request: [u8; 16],
    if_version: Option<u64>,
    entry: &Entry,
) -> Result<Ended> {
    let mut last = None;
    let size = entry.descriptor.striping.size();
    loop {
        let asked = control.commit_put(name, begun, request, if_version);
        let idle = async {
            loop {
                sleep(LOOK).await;
                let all = lock(&entry.given).bytes() >= size;
                let limit = if all { PUT_IDLE + SEALING } else { PUT_IDLE };
                if lock(&entry.progress).elapsed() >= limit {
                    return limit;
                }
            }
        };
        let timed_out = |after, last: Option<Error>| {
            let detail = last.map(|error| format!(": {error}")).unwrap_or_default();
            Error::TimedOut { what: format!("put of {name}: no progress"), after, detail }
        };
        tokio::select! {
            answer = asked => match answer {
                Ok(done) => return Ok(Ended::Done(done)),
                Err(CommitFailure::OtherRun) => return Ok(Ended::Anew),
                Err(CommitFailure::Final(error)) => return Err(error),
                Err(CommitFailure::Again(error)) => {
                    if lock(&entry.progress).elapsed() >= PUT_IDLE {
                        return Err(timed_out(PUT_IDLE, Some(error)));
                    }
                    last = Some(error);
                    sleep(AGAIN).await;
                }
            },
            limit = idle => return Err(timed_out(limit, last)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever spawns these needs them to be `Send`: compiled, never run.
    #[allow(dead_code)]
    fn calls_can_be_spawned(
        control: &Arc<Control>,
        puts: &Arc<Puts>,
        name: &ObjectName,
        source: Arc<dyn Source>,
        options: PutOptions,
        query: &crate::client::ListQuery,
    ) {
        fn send(_: impl Send) {}
        send(put(control, puts, name, source, options));
        send(control.lookup(name));
        send(control.list(query));
        send(control.delete(name, [0; 16], None));
        send(control.status());
        send(control.connect());
    }
}
