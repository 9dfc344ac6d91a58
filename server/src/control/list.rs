//! Lists, in pages that fit a message.

use crate::access::{Identity, Need};
use crate::catalog::{Entry, List};
use crate::node::Node;
use prost::Message;
use railfs_proto::limits::{MAX_KEY, MAX_LIST, PAGE_BYTES};
use railfs_proto::name::Namespace;
use railfs_proto::reply::{Refusal, ok_outcome};
use railfs_proto::v1::{self, Code};

/// Entries of a page where the client names no limit.
const DEFAULT_LIMIT: u32 = 1000;
/// One page.
///
/// # Errors
/// `Invalid`, `NotFound` (nobody ever wrote to the namespace), a wrong scope, `Denied`, `Unavailable`.
pub async fn list(node: &Node, request: v1::ListRequest, who: Option<&Identity>) -> Result<v1::ListReply, Refusal> {
    node.check_scope(request.scope.as_ref())?;
    let namespace =
        Namespace::new(&request.namespace).map_err(|error| Refusal::new(Code::Invalid, error.to_string()))?;
    node.check_access(who, &namespace, Need::Read)?;
    for (what, bytes) in [("prefix", &request.prefix), ("cursor", &request.after)] {
        if bytes.len() > MAX_KEY + 1 {
            let message = format!("the {what} has {} bytes, more than a key and a '/'", bytes.len());
            return Err(Refusal::new(Code::Invalid, message));
        }
    }
    let limit = if request.limit == 0 { DEFAULT_LIMIT } else { request.limit.min(MAX_LIST) };
    let list = List {
        namespace: namespace.clone(),
        prefix: request.prefix.to_vec(),
        delimited: request.delimited,
        after: request.after.to_vec(),
        limit: limit as usize,
    };
    let page = node.publisher.catalog().list(&list).await;
    let page = page.map_err(|error| Refusal::new(Code::Unavailable, error.to_string()))?;
    let Some(mtime) = page.namespace_mtime else {
        return Err(Refusal::new(Code::NotFound, format!("namespace {namespace}: nobody ever wrote to it")));
    };
    let mut next = page.next_after;
    let mut entries = Vec::with_capacity(page.entries.len());
    let (mut bytes, total) = (0usize, page.entries.len());
    for entry in page.entries {
        let (entry, cursor) = match entry {
            Entry::Object { key, descriptor } => {
                let message = v1::ListEntry {
                    key: key.clone().into(),
                    directory: false,
                    descriptor: Some(descriptor.to_message()),
                };
                (message, key)
            }
            Entry::Directory { key } => {
                let cursor = [key.as_slice(), b"/"].concat();
                (v1::ListEntry { key: key.into(), directory: true, descriptor: None }, cursor)
            }
        };
        bytes = bytes.saturating_add(entry.encoded_len());
        entries.push(entry);
        if bytes >= PAGE_BYTES && entries.len() < total {
            next = Some(cursor);
            break;
        }
    }
    Ok(v1::ListReply {
        outcome: Some(ok_outcome()),
        entries,
        more: next.is_some(),
        next_after: next.unwrap_or_default().into(),
        directory_mtime_seconds: mtime.seconds,
        directory_mtime_nanoseconds: mtime.nanoseconds,
    })
}
