//! Certificates and rights, loaded again without a restart.
//!
//! Guarantees: the files are looked at every [`EVERY`] (and at SIGHUP); what is good is used from the next connection (certificates)
//! or the next request (rights) on; what is bad is said once, by the log and by status, and the old ones stay, until a look finds
//! good ones: it is tried at every look. Nothing else of the configuration is taken.

use crate::access::Rights;
use crate::config::{Config, host_name, parse};
use crate::control::handshake::Guard;
use crate::node::{Node, lock};
use railfs_engine::tls::{Stamp, stamp};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval};

/// Between two looks.
pub const EVERY: Duration = Duration::from_secs(2);

/// What was seen of the files when they were last loaded well; `None`: never.
type Seen = Option<(Stamp, Option<[Stamp; 3]>)>;

#[derive(Debug)]
struct State {
    config: Config,
    seen: Seen,
    /// What is wrong with each: the configuration, the certificates.
    wrong: [Option<String>; 2],
}

/// Looks at the files.
#[derive(Debug)]
pub struct Reload {
    node: Arc<Node>,
    guard: Option<Arc<Guard>>,
    state: Mutex<State>,
}

impl Reload {
    /// After a start with this configuration, whose certificates were loaded when the files were so.
    pub fn new(config: Config, guard: Option<Arc<Guard>>, node: Arc<Node>, seen: Option<[Stamp; 3]>) -> Arc<Reload> {
        // What the file says may have changed since it was parsed: the first look parses it.
        let seen = seen.map(|seen| (None, Some(seen)));
        Arc::new(Reload { node, guard, state: Mutex::new(State { config, seen, wrong: [None, None] }) })
    }

    /// Loads what has changed. Reads the disk.
    pub fn look(&self) {
        let mut state = lock(&self.state);
        let state = &mut *state;
        let file = state.config.file.clone();
        let (of_file, of_files) = state.seen.unwrap_or_default();
        // Before anything is read: what is written meanwhile has another one.
        let now = file.as_deref().and_then(stamp);
        if file.is_some() && (now != of_file || state.wrong[0].is_some()) {
            let parsed = self.parse(&state.config);
            let parsed = parsed.and_then(|config| self.take(&mut state.config, config));
            say(&mut state.wrong[0], parsed.err(), "the configuration was not loaded again: rights stay as they were");
        }
        let (Some(files), Some(guard)) = (&state.config.tls, &self.guard) else {
            state.seen = Some((now, None));
            return self.tell(state);
        };
        let stamps = files.stamps();
        if Some(stamps) != of_files || state.wrong[1].is_some() {
            let loaded = files.server().map_err(|error| error.to_string()).map(|config| {
                guard.replace(config);
                tracing::info!(cert = %files.cert.display(), "certificates were loaded again: new connections use them");
            });
            say(&mut state.wrong[1], loaded.err(), "certificates were not loaded again: the old ones stay");
        }
        state.seen = Some((now, Some(stamps)));
        self.tell(state);
    }

    fn parse(&self, config: &Config) -> Result<Config, String> {
        let Some(path) = &config.file else { return Ok(config.clone()) };
        let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        let parsed = parse(&text, &path.display().to_string(), &host_name());
        parsed.map(|(new, _)| Config { file: Some(path.clone()), ..new }).map_err(|error| error.to_string())
    }

    /// Takes over what can change while the server runs.
    fn take(&self, current: &mut Config, new: Config) -> Result<(), String> {
        still_closed(current, &new)?;
        if new.namespaces != current.namespaces {
            self.node.access.replace(Rights::new(&new.namespaces));
            tracing::info!(namespaces = new.namespaces.len(), "readers and writers of namespaces were loaded again");
            current.namespaces.clone_from(&new.namespaces);
        }
        match (&current.tls, &new.tls) {
            (Some(before), Some(after)) if before != after => current.tls.clone_from(&new.tls),
            _ => {}
        }
        if new != *current {
            tracing::info!("what else has changed in the configuration takes effect at the next start");
        }
        Ok(())
    }

    fn tell(&self, state: &State) {
        *lock(&self.node.reload_trouble) = state.wrong.iter().flatten().cloned().collect();
    }
}

/// Without any entry everybody may do everything: a file that is being written, and was read half, must not say so.
fn still_closed(current: &Config, new: &Config) -> Result<(), String> {
    if new.namespaces.is_empty() && !current.namespaces.is_empty() {
        return Err(
            "it has no [[namespace]] any more, so that everybody could do everything: that takes a restart".to_owned()
        );
    }
    Ok(())
}

/// Once for each new thing that is wrong.
fn say(wrong: &mut Option<String>, now: Option<String>, what: &str) {
    let now = now.map(|why| format!("{what}: {why}"));
    if *wrong == now {
        return;
    }
    match &now {
        Some(why) => tracing::error!("{why}"),
        None => tracing::info!("files that could not be loaded again are good now"),
    }
    *wrong = now;
}

/// Looks now and then, for as long as the server runs.
pub async fn run(reload: Arc<Reload>) {
    let mut tick = interval(EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let reload = Arc::clone(&reload);
        // A disk that hangs holds up the next look alone.
        if tokio::task::spawn_blocking(move || reload.look()).await.is_err() {
            tracing::error!("certificates and rights are not looked at any more");
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_read_half_does_not_open_what_was_closed() {
        let head =
            "stripe_dirs = [\"/a\"]\nnode = \"n\"\n[security]\ncert = \"/c\"\nkey = \"/k\"\nclient_ca = \"/ca\"\n";
        let whole = format!("{head}[[namespace]]\nname = \"models\"\nreaders = [\"alice\"]\n");
        let of = |text: &str| parse(text, "test", "n").unwrap_or_else(|error| panic!("{error}")).0;
        let (closed, open) = (of(&whole), of(head));
        assert!(still_closed(&closed, &open).unwrap_err().contains("restart"));
        assert!(still_closed(&open, &closed).is_ok() && still_closed(&closed, &closed).is_ok());
    }
}
