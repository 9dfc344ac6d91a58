//! Requests as bytes, replies as checked values.

use crate::error::Error;
use bytes::Bytes;
use prost::Message;
use railfs_proto::name::ObjectName;
use railfs_proto::reply::{Refusal, check_outcome};
use railfs_proto::v1;
use std::time::Duration;

pub(super) fn request(scope: &v1::Scope, left: Duration, body: v1::rail_request::Body) -> Bytes {
    let request = v1::RailRequest {
        scope: Some(scope.clone()),
        time_left_microseconds: u64::try_from(left.as_micros()).unwrap_or(u64::MAX),
        body: Some(body),
    };
    Bytes::from(request.encode_to_vec())
}

/// Why a reply is of no use.
#[derive(Debug)]
pub(super) enum Bad {
    Refused(Refusal),
    Malformed(String),
}

pub(super) fn reply(message: &Bytes) -> Result<v1::rail_reply::Body, Bad> {
    let reply = v1::RailReply::decode(message.clone()).map_err(|error| Bad::Malformed(error.to_string()))?;
    check_outcome(reply.outcome.as_ref()).map_err(Bad::Refused)?;
    reply.body.ok_or_else(|| Bad::Malformed("reply without a body".into()))
}

/// The error where the server says that this client may not.
pub(super) fn denied(object: &ObjectName, detail: &str) -> Error {
    Error::Denied(format!("{object}: {detail}"))
}
