//! Replies, checked before anything in them is used: outcomes, lookups, lists, fetches, checks, pulls, puts.
//!
//! Guarantees: what comes out answers the request it was checked against, in bounds and complete; anything else is a
//! typed error, never a guess.

use crate::descriptor::{Descriptor, DescriptorError, Proof};
use crate::hello::shown;
use crate::limits::{MAX_KEY, MAX_LIST, MAX_REFUSAL};
use crate::name::{Escaped, Key, NameError};
use crate::v1;
use bytes::Bytes;

/// The peer said no. What to do follows from the code; the message is for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} ({})", self.message, self.code.as_str_name())]
pub struct Refusal {
    /// Why. `Unspecified` when the reply lacks its outcome or the code is of a newer peer; never `Ok`.
    pub code: v1::Code,
    /// The peer's words, escaped, at most 1024 bytes of them.
    pub message: String,
}

impl Refusal {
    /// For a reply.
    pub fn new(code: v1::Code, message: impl Into<String>) -> Refusal {
        Refusal { code, message: message.into() }
    }

    /// The outcome that says the same.
    pub fn to_outcome(&self) -> v1::Outcome {
        v1::Outcome { code: self.code.into(), message: self.message.clone() }
    }
}

/// The outcome of work that was done.
pub fn ok_outcome() -> v1::Outcome {
    v1::Outcome { code: v1::Code::Ok.into(), message: String::new() }
}

/// Whether the peer did what was asked.
///
/// # Errors
/// The peer's refusal.
pub fn check_outcome(outcome: Option<&v1::Outcome>) -> Result<(), Refusal> {
    let unspecified = v1::Code::Unspecified;
    let Some(outcome) = outcome else { return Err(Refusal::new(unspecified, "the reply lacks its outcome")) };
    let message = shown(&outcome.message, MAX_REFUSAL);
    match v1::Code::try_from(outcome.code) {
        Ok(v1::Code::Ok) => Ok(()),
        Ok(code) => Err(Refusal { code, message }),
        Err(_) => Err(Refusal::new(unspecified, format!("code {}, unknown here: {message}", outcome.code))),
    }
}

/// Why a reply is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplyError {
    /// The peer said no.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// See the message.
    #[error("reply: {0}")]
    Descriptor(#[from] DescriptorError),
    /// See the message.
    #[error("reply: {0}")]
    Name(#[from] NameError),
    /// See the message.
    #[error("reply lacks its {0}")]
    Missing(&'static str),
    /// See the message.
    #[error("reply: '{0}' is both an object and a directory")]
    Both(String),
    /// See the message.
    #[error("reply has a time with {0} nanoseconds")]
    Time(u32),
    /// See the message.
    #[error("reply has {field} {found} where {wanted} was asked for")]
    Differs {
        /// Which field.
        field: &'static str,
        /// In the reply.
        found: u64,
        /// In the request.
        wanted: u64,
    },
    /// See the message.
    #[error("list has {got} entries, more than the {limit} asked for")]
    TooManyEntries {
        /// Listed.
        got: usize,
        /// Allowed.
        limit: usize,
    },
    /// See the message.
    #[error("list: '{key}' {problem}")]
    Entry {
        /// The key, escaped.
        key: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// See the message.
    #[error("watch: change {sequence} {problem}")]
    Change {
        /// Its number.
        sequence: u64,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// See the message.
    #[error("list: the cursor for the next page '{0}' lies before the end of this one, or is too long")]
    Cursor(String),
    /// See the message.
    #[error("list: a page without entries says that more follow it")]
    EmptyPage,
}

/// A point in time, since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time {
    /// Seconds.
    pub seconds: i64,
    /// And nanoseconds, below a billion.
    pub nanoseconds: u32,
}

impl Time {
    pub(crate) fn new(seconds: i64, nanoseconds: u32) -> Result<Time, ReplyError> {
        if nanoseconds < 1_000_000_000 { Ok(Time { seconds, nanoseconds }) } else { Err(ReplyError::Time(nanoseconds)) }
    }
}

/// What has a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// An object.
    Object(Descriptor, Proof),
    /// Something lies below this name; no object has it. The proof covers the object's absence only.
    Directory {
        /// The namespace's last commit.
        mtime: Time,
        /// Under which no object has this name.
        proof: Proof,
    },
    /// Nothing.
    Absent(Proof),
}

impl Lookup {
    /// Checks every claim of the reply.
    ///
    /// # Errors
    /// The server's refusal, or the first claim that is wrong.
    pub fn from_message(reply: &v1::LookupReply) -> Result<Lookup, ReplyError> {
        check_outcome(reply.outcome.as_ref())?;
        let proof = Proof::from_message(reply.proof.as_ref().ok_or(ReplyError::Missing("proof"))?)?;
        match (&reply.descriptor, reply.directory) {
            (Some(_), true) => Err(ReplyError::Both("the name".into())),
            (Some(descriptor), false) => Ok(Lookup::Object(Descriptor::from_message(descriptor)?, proof)),
            (None, true) => {
                let mtime = Time::new(reply.directory_mtime_seconds, reply.directory_mtime_nanoseconds)?;
                Ok(Lookup::Directory { mtime, proof })
            }
            (None, false) => Ok(Lookup::Absent(proof)),
        }
    }

    /// The reply that says the same.
    pub fn to_message(&self) -> v1::LookupReply {
        let mut reply = v1::LookupReply { outcome: Some(ok_outcome()), ..Default::default() };
        match self {
            Lookup::Object(descriptor, proof) => {
                reply.descriptor = Some(descriptor.to_message());
                reply.proof = Some(proof.to_message());
            }
            Lookup::Directory { mtime, proof } => {
                reply.directory = true;
                reply.directory_mtime_seconds = mtime.seconds;
                reply.directory_mtime_nanoseconds = mtime.nanoseconds;
                reply.proof = Some(proof.to_message());
            }
            Lookup::Absent(proof) => reply.proof = Some(proof.to_message()),
        }
        reply
    }

    /// The proof, whatever was found.
    pub fn proof(&self) -> &Proof {
        match self {
            Lookup::Object(_, proof) | Lookup::Directory { proof, .. } | Lookup::Absent(proof) => proof,
        }
    }
}

/// One line of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListEntry {
    /// An object.
    Object {
        /// Its whole key.
        key: Key,
        /// What lookup would say of it.
        descriptor: Descriptor,
    },
    /// What lies below this key, folded (delimited lists only).
    Directory {
        /// The directory's key.
        key: Key,
    },
}

impl ListEntry {
    /// The whole key.
    pub fn key(&self) -> &Key {
        match self {
            ListEntry::Object { key, .. } | ListEntry::Directory { key } => key,
        }
    }

    /// Where it stands in the order of a list, and the cursor that leads past it: the key, of a directory with a `/`.
    pub fn sort_key(&self) -> Bytes {
        match self {
            ListEntry::Object { key, .. } => key.to_bytes(),
            ListEntry::Directory { key } => key.below().into(),
        }
    }
}

/// One page of a list, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListPage {
    /// In strictly rising order of [`ListEntry::sort_key`].
    pub entries: Vec<ListEntry>,
    /// `after` of the next request; `None` at the end. Greater than this request's; a page that has one has entries.
    pub next_after: Option<Bytes>,
    /// The namespace's last commit.
    pub mtime: Time,
}

/// Checks a list's page against its request: sorted, no more than asked for, each key valid, under the prefix, after the
/// cursor, folded as asked, and getting on when there is more.
///
/// # Errors
/// The server's refusal (`NotFound`: nobody ever wrote to this namespace), or the first claim that is wrong.
pub fn check_list_reply(request: &v1::ListRequest, reply: &v1::ListReply) -> Result<ListPage, ReplyError> {
    check_outcome(reply.outcome.as_ref())?;
    let limit = if request.limit == 0 { MAX_LIST } else { request.limit.min(MAX_LIST) } as usize;
    if reply.entries.len() > limit {
        return Err(ReplyError::TooManyEntries { got: reply.entries.len(), limit });
    }
    let mtime = Time::new(reply.directory_mtime_seconds, reply.directory_mtime_nanoseconds)?;
    let mut entries: Vec<ListEntry> = Vec::with_capacity(reply.entries.len());
    let mut last = request.after.clone();
    for message in &reply.entries {
        let wrong = |problem| ReplyError::Entry { key: Escaped(cut(&message.key)).to_string(), problem };
        let key = Key::new(message.key.clone())?;
        let entry = match (&message.descriptor, message.directory) {
            (None, true) => ListEntry::Directory { key },
            (Some(descriptor), false) => ListEntry::Object { key, descriptor: Descriptor::from_message(descriptor)? },
            (Some(_), true) => return Err(ReplyError::Both(key.to_string())),
            (None, false) => return Err(wrong("is neither an object nor a directory")),
        };
        let sort_key = entry.sort_key();
        let Some(rest) = sort_key.strip_prefix(&*request.prefix) else { return Err(wrong("lacks the prefix")) };
        if sort_key <= last {
            return Err(wrong("is not in order, or not after the cursor"));
        }
        let inner = rest.strip_suffix(b"/").unwrap_or(rest);
        match entry {
            ListEntry::Directory { .. } if !request.delimited => {
                return Err(wrong("is folded where nothing should be"));
            }
            // A prefix that ends in '/' folds what is below it, not itself.
            ListEntry::Directory { .. } if rest.is_empty() => return Err(wrong("is the prefix itself")),
            _ if request.delimited && inner.contains(&b'/') => return Err(wrong("should be folded")),
            ListEntry::Directory { ref key } if object_at(&entries, key) => {
                return Err(ReplyError::Both(key.to_string()));
            }
            _ => {}
        }
        last = sort_key;
        entries.push(entry);
    }
    let next_after = reply.more.then(|| reply.next_after.clone());
    if let Some(cursor) = &next_after {
        // Whoever follows such pages would follow them for ever.
        if entries.is_empty() {
            return Err(ReplyError::EmptyPage);
        }
        if *cursor < last || cursor.len() > MAX_KEY + 1 {
            return Err(ReplyError::Cursor(Escaped(cut(cursor)).to_string()));
        }
    }
    Ok(ListPage { entries, next_after, mtime })
}

fn object_at(entries: &[ListEntry], key: &Key) -> bool {
    let found = entries.binary_search_by(|entry| (*entry.sort_key()).cmp(key.as_bytes()));
    found.ok().and_then(|at| entries.get(at)).is_some_and(|entry| matches!(entry, ListEntry::Object { .. }))
}

fn cut(bytes: &[u8]) -> &[u8] {
    bytes.get(..MAX_REFUSAL).unwrap_or(bytes)
}

/// Checks that a fetch's reply is of this request and whole: same version, component, offset and length, as many bytes of
/// bulk, and a checksum for each page. Returns the checksums. `page_size` is the object's, bytes.
///
/// # Errors
/// The first difference.
pub fn check_fetch_reply(
    request: &v1::FetchRequest,
    reply: &v1::FetchReply,
    bulk: u32,
    page_size: u32,
) -> Result<Vec<u64>, ReplyError> {
    same(&[
        ("version", reply.version, request.version),
        ("component", reply.component.into(), request.component.into()),
        ("offset", reply.offset, request.offset),
        ("length", reply.length.into(), request.length.into()),
        ("bulk length", bulk.into(), request.length.into()),
        ("number of checksums", reply.checksums.len() as u64, pages(request.length, page_size)),
    ])?;
    Ok(reply.checksums.clone())
}

/// The same for a pull, which the client of a put answers.
///
/// # Errors
/// The first difference.
pub fn check_pull_reply(
    request: &v1::PullRequest,
    reply: &v1::PullReply,
    bulk: u32,
    page_size: u32,
) -> Result<Vec<u64>, ReplyError> {
    same(&[
        ("put", reply.put, request.put),
        ("offset", reply.offset, request.offset),
        ("length", reply.length.into(), request.length.into()),
        ("bulk length", bulk.into(), request.length.into()),
        ("number of checksums", reply.checksums.len() as u64, pages(request.length, page_size)),
    ])?;
    Ok(reply.checksums.clone())
}

/// Checks that every proof of a check was answered. Results are in the order of the proofs.
///
/// # Errors
/// `Differs` when the numbers are not equal.
pub fn check_check_reply<'a>(
    request: &v1::CheckRequest,
    reply: &'a v1::CheckReply,
) -> Result<&'a [v1::CheckResult], ReplyError> {
    same(&[("number of checks", reply.results.len() as u64, request.proofs.len() as u64)])?;
    Ok(&reply.results)
}

/// What BeginPut promised, checked against what was asked: put id (not 0) and descriptor.
///
/// # Errors
/// The server's refusal, or the first claim that is wrong.
pub fn check_begin_put_reply(
    request: &v1::BeginPutRequest,
    reply: &v1::BeginPutReply,
) -> Result<(u64, Descriptor), ReplyError> {
    check_outcome(reply.outcome.as_ref())?;
    let descriptor = Descriptor::from_message(reply.descriptor.as_ref().ok_or(ReplyError::Missing("descriptor"))?)?;
    if reply.put == 0 {
        return Err(ReplyError::Missing("put id"));
    }
    let striping = &descriptor.striping;
    let size = request.attributes.as_ref().map_or(0, |attributes| attributes.size);
    let asked = |asked: u32, got: u32| if asked == 0 { got.into() } else { u64::from(asked) };
    same(&[
        ("size", striping.size(), size),
        ("stripe size", striping.stripe_size().into(), asked(request.stripe_size, striping.stripe_size())),
        ("page size", striping.page_size().into(), asked(request.page_size, striping.page_size())),
    ])?;
    Ok((reply.put, descriptor))
}

fn same(fields: &[(&'static str, u64, u64)]) -> Result<(), ReplyError> {
    match fields.iter().find(|(_, found, wanted)| found != wanted) {
        Some(&(field, found, wanted)) => Err(ReplyError::Differs { field, found, wanted }),
        None => Ok(()),
    }
}

/// Pages of `length` bytes; more than any reply can list when the page size makes no sense.
fn pages(length: u32, page_size: u32) -> u64 {
    if page_size == 0 { u64::MAX } else { length.div_ceil(page_size).into() }
}

#[cfg(test)]
#[path = "reply_tests.rs"]
mod tests;
