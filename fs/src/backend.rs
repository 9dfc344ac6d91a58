//! What the file system asks of the store, so that it can be tested without one.
//!
//! Guarantees (of every implementation): no call blocks; each `done` is called exactly once, on this thread or another,
//! by its deadline at the latest.

use railfs_engine::client::{Client, Done, Found, Freshness, ListQuery, Listing, Object, ReadReply, Status};
use railfs_engine::error::Error;
use railfs_proto::name::ObjectName;
use railfs_proto::v1::StatusReply;
use std::sync::Arc;

/// The calls of [`Client`] that a mount uses; see there.
pub trait Backend: Send + Sync + 'static {
    /// What the name means now.
    fn lookup(&self, name: &ObjectName, done: Done<Found>);
    /// One page of a list.
    fn list(&self, query: ListQuery, done: Done<Listing>);
    /// Whether the object's version is current, by a check that begins now.
    fn check(&self, object: &Arc<Object>, done: Done<()>);
    /// Bytes of the version, all that were asked for (fewer only at its end); with `Freshness::Current` seen current after
    /// the call began.
    fn read(&self, object: &Arc<Object>, handle: u64, offset: u64, length: u32, freshness: Freshness, reply: ReadReply);
    /// The version is needed until [`Backend::unpin`], whatever the answer: `Ok` once it stays readable although it may be
    /// superseded.
    fn pin(&self, object: &Arc<Object>, done: Done<()>);
    /// One who needed the version does not any more.
    fn unpin(&self, version: u64);
    /// Whether the store keeps what is pinned.
    fn keeps_pins(&self) -> bool;
    /// The handle is closed.
    fn release(&self, handle: u64);
    /// The server's own account.
    fn server_status(&self, done: Done<StatusReply>);
    /// This side's account.
    fn status(&self) -> Status;
    /// The error that says so, while another store answers where this one was.
    fn wrong_store(&self) -> Option<Error> {
        None
    }
    /// Answers once what a read needs of this side has done something; never, when that hangs.
    fn pulse(&self, done: Done<()>);
    /// Ends everything within a second or two.
    fn close(&self);
}

impl Backend for Client {
    fn lookup(&self, name: &ObjectName, done: Done<Found>) {
        Client::lookup(self, name, done);
    }
    fn list(&self, query: ListQuery, done: Done<Listing>) {
        Client::list(self, query, done);
    }
    fn check(&self, object: &Arc<Object>, done: Done<()>) {
        Client::check(self, object, done);
    }
    fn read(
        &self,
        object: &Arc<Object>,
        handle: u64,
        offset: u64,
        length: u32,
        freshness: Freshness,
        reply: ReadReply,
    ) {
        Client::read_as(self, object, handle, offset, length, freshness, reply);
    }
    fn pin(&self, object: &Arc<Object>, done: Done<()>) {
        Client::pin(self, object, done);
    }
    fn unpin(&self, version: u64) {
        Client::unpin(self, version);
    }
    fn keeps_pins(&self) -> bool {
        self.server_pins()
    }
    fn release(&self, handle: u64) {
        Client::release(self, handle);
    }
    fn server_status(&self, done: Done<StatusReply>) {
        self.server_status_then(done);
    }
    fn status(&self) -> Status {
        Client::status(self)
    }
    fn wrong_store(&self) -> Option<Error> {
        Client::wrong_store(self)
    }
    fn pulse(&self, done: Done<()>) {
        Client::pulse(self, done);
    }
    fn close(&self) {
        Client::close(self);
    }
}
