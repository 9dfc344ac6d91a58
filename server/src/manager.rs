//! What the service manager hears of a server: that it serves, how it fares, that it ends.
//!
//! Guarantees: the watchdog is fed only after the runtime that answers RPCs and a thread for disk work have done something
//! once more ([`railfs_engine::notify::rounds`] decides); a disk that fails is no reason not to feed it: the rest is served.

use crate::node::lock;
use crate::serve::Server;
use railfs_engine::notify::Notifier;
use railfs_engine::notify::keeper::{Answer, Ask, Keeper, Witness};
use std::sync::Arc;

/// Goes on telling until what it gives is dropped; `None`: nobody listens.
///
/// # Errors
/// There is no thread to be had.
pub fn keep(notifier: &Arc<Notifier>, server: &Arc<Server>) -> std::io::Result<Option<Keeper>> {
    if !notifier.is_heard() {
        return Ok(None);
    }
    let (watched, shown) = (Arc::clone(server), Arc::clone(server));
    let ask: Ask = Box::new(move |answer| {
        pulse(&watched, answer);
        Ok(())
    });
    let witnesses = vec![Witness { name: "the threads that serve", ask }];
    Keeper::start(Arc::clone(notifier), witnesses, move || summary(&shown)).map(Some)
}

/// Answers once a task has run, has had the table of sessions, and a thread for disk work has run as well.
fn pulse(server: &Arc<Server>, answer: Answer) {
    let node = Arc::clone(&server.node);
    server.node.runtime.spawn(async move {
        drop(lock(&node.sessions));
        tokio::task::spawn_blocking(move || answer(Ok(())));
    });
}

/// One line for people.
pub fn summary(server: &Server) -> String {
    let node = &server.node;
    format!(
        "store {}, node {}, incarnation {}, {} directories",
        node.store.id(),
        node.name,
        node.incarnation,
        node.store.directories().len()
    )
}
