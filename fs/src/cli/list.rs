//! Lists, page by page.
//!
//! Guarantees: of a list of any length at most two pages are held: one that is being looked at, and the next, which is on
//! its way meanwhile.

use crate::failure::Failure;
use railfs_engine::client::{Client, ListEntry, ListQuery, Listing};
use railfs_engine::error::Error;
use railfs_proto::limits::MAX_LIST;
use railfs_proto::name::Key;
use railfs_proto::url::Url;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

/// What lies below a URL.
pub struct Pages<'a> {
    client: &'a Arc<Client>,
    query: ListQuery,
    coming: Option<Receiver<Result<Listing, Error>>>,
}

impl<'a> Pages<'a> {
    /// Asks for the first page. `recursive`: everything below, not only the next level.
    pub fn begin(client: &'a Arc<Client>, url: &Url, recursive: bool) -> Pages<'a> {
        let query = ListQuery {
            namespace: url.namespace.as_str().to_owned(),
            prefix: url.key.as_ref().map(Key::below).unwrap_or_default(),
            delimited: !recursive,
            after: Vec::new(),
            limit: MAX_LIST,
            within: None,
        };
        let mut pages = Pages { client, query, coming: None };
        pages.ask();
        pages
    }

    /// What every key of the list begins with.
    pub fn prefix(&self) -> &[u8] {
        &self.query.prefix
    }

    fn ask(&mut self) {
        let (send, receive) = sync_channel(1);
        let done = move |listing| {
            // Whoever asked may have gone.
            let _ = send.send(listing);
        };
        self.client.list(self.query.clone(), Box::new(done));
        self.coming = Some(receive);
    }

    /// The next page, never empty; `None` at the end. The one behind it is asked for.
    ///
    /// # Errors
    /// Not found (3): nobody ever wrote to the namespace. Unreachable (5).
    pub fn next(&mut self) -> Result<Option<Vec<ListEntry>>, Failure> {
        while let Some(coming) = self.coming.take() {
            let listing = coming.recv().unwrap_or(Err(Error::Closed)).map_err(|error| match error {
                Error::NotFound(_) => {
                    Failure::not_found(format!("namespace {}: nobody has put anything there", self.query.namespace))
                }
                error => error.into(),
            })?;
            match listing.next {
                Some(next) if next > self.query.after => {
                    self.query.after = next;
                    self.ask();
                }
                Some(_) => return Err(Failure::failed("list: the server's cursor does not advance")),
                None => {}
            }
            if !listing.entries.is_empty() {
                return Ok(Some(listing.entries));
            }
        }
        Ok(None)
    }

    /// What is said of a list without entries.
    pub fn nothing(url: &Url) -> Failure {
        match &url.key {
            Some(key) => Failure::not_found(format!("{}/{key}/: nothing lies below it", url.namespace)),
            None => Failure::not_found(format!("namespace {}: it is empty", url.namespace)),
        }
    }
}
