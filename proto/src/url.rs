//! `railfs://HOST[:PORT]/NAMESPACE[/KEY]`.
//!
//! Guarantees: a [`Url`] shows as text that parses to the same value; whatever does not parse is refused with what is
//! wrong and at which byte. Bytes outside unreserved and `/` must be percent-encoded, so a URL means one thing only.

use crate::limits::DEFAULT_CONTROL_PORT;
use crate::name::{Key, NameError, Namespace, ObjectName};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use std::fmt;
use std::net::Ipv6Addr;

const SCHEME: &str = "railfs://";
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');
const MAX_HOST: usize = 253;

/// A store's address, a namespace in it, and perhaps a key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Url {
    /// A name, an IPv4 address, or an IPv6 address without its brackets.
    pub host: String,
    /// Of the control plane, 1 to 65535.
    pub port: u16,
    /// The namespace.
    pub namespace: Namespace,
    /// `None`: the whole namespace.
    pub key: Option<Key>,
    /// A `/` at the end: the directory is meant, not an object of this name. Always true without a key.
    pub directory: bool,
}

/// What is wrong with a URL, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("URL, at byte {at}: {problem} (the form is railfs://HOST[:PORT]/NAMESPACE[/KEY])")]
pub struct UrlError {
    /// Offset of the offending byte or part in the text.
    pub at: usize,
    /// What is wrong.
    pub problem: UrlProblem,
}

/// See [`UrlError`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlProblem {
    /// See the message.
    #[error("it does not begin with railfs://")]
    Scheme,
    /// See the message.
    #[error("the host is missing")]
    HostMissing,
    /// See the message.
    #[error("the host is longer than {MAX_HOST} bytes")]
    HostLong,
    /// See the message.
    #[error("'{byte}' cannot be part of a host", byte = .0.escape_ascii())]
    HostByte(u8),
    /// See the message.
    #[error("what is in brackets is not an IPv6 address")]
    Ipv6,
    /// See the message.
    #[error("an IPv6 address stands in brackets, as in railfs://[::1]:{DEFAULT_CONTROL_PORT}/NAMESPACE")]
    Brackets,
    /// See the message.
    #[error("the port is not a number from 1 to 65535")]
    Port,
    /// See the message.
    #[error("the namespace is missing")]
    NamespaceMissing,
    /// See the message.
    #[error("'{byte}' must be written as %{byte_value:02X}", byte = .0.escape_ascii(), byte_value = .0)]
    Unencoded(u8),
    /// See the message.
    #[error("'%' must be followed by two hexadecimal digits")]
    Percent,
    /// See the message.
    #[error("a part of a key cannot hold a '/' (%2F)")]
    EncodedSlash,
    /// See the message.
    #[error(transparent)]
    Name(NameError),
}

impl Url {
    /// Parses the text.
    ///
    /// # Errors
    /// What is wrong, and at which byte.
    pub fn parse(text: &str) -> Result<Url, UrlError> {
        let fail = |at: usize, problem: UrlProblem| Err(UrlError { at, problem });
        let Some((scheme, rest)) = text.split_at_checked(SCHEME.len()) else { return fail(0, UrlProblem::Scheme) };
        if !scheme.eq_ignore_ascii_case(SCHEME) {
            return fail(0, UrlProblem::Scheme);
        }
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (host, port) = parse_authority(authority, SCHEME.len())?;
        let path_at = SCHEME.len() + authority.len() + 1;

        let (namespace, key_text) = match path.split_once('/') {
            Some((namespace, key)) => (namespace, Some(key)),
            None => (path, None),
        };
        if namespace.is_empty() {
            return fail(path_at.min(text.len()), UrlProblem::NamespaceMissing);
        }
        let key_at = path_at + namespace.len() + 1;
        let namespace = Namespace::new(namespace).map_err(|error| {
            let at = path_at + if let NameError::NamespaceByte { at, .. } = error { at } else { 0 };
            UrlError { at, problem: UrlProblem::Name(error) }
        })?;
        let key_text = key_text.unwrap_or("");
        if key_text.is_empty() {
            return Ok(Url { host, port, namespace, key: None, directory: true });
        }
        let (key_text, directory) = match key_text.strip_suffix('/') {
            Some(shorter) => (shorter, true),
            None => (key_text, false),
        };
        let bytes = decode(key_text, key_at)?;
        let key = Key::new(bytes).map_err(|error| UrlError { at: key_at, problem: UrlProblem::Name(error) })?;
        Ok(Url { host, port, namespace, key: Some(key), directory })
    }

    /// `HOST:PORT`, an IPv6 host in brackets: what a resolver or a connector takes.
    pub fn address(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// The object that is named; `None` for a namespace.
    pub fn object(&self) -> Option<ObjectName> {
        self.key.clone().map(|key| ObjectName { namespace: self.namespace.clone(), key })
    }

    /// The same place with another key.
    pub fn with_key(&self, key: Key) -> Url {
        Url { key: Some(key), directory: false, ..self.clone() }
    }
}

impl std::str::FromStr for Url {
    type Err = UrlError;
    fn from_str(text: &str) -> Result<Self, UrlError> {
        Url::parse(text)
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(SCHEME)?;
        if self.host.contains(':') {
            write!(f, "[{}]", self.host)?;
        } else {
            f.write_str(&self.host)?;
        }
        if self.port != DEFAULT_CONTROL_PORT {
            write!(f, ":{}", self.port)?;
        }
        write!(f, "/{}", self.namespace)?;
        if let Some(key) = &self.key {
            write!(f, "/{}", percent_encode(key.as_bytes(), ENCODED))?;
        }
        if self.directory { f.write_str("/") } else { Ok(()) }
    }
}

fn parse_authority(authority: &str, start: usize) -> Result<(String, u16), UrlError> {
    let fail = |at: usize, problem: UrlProblem| Err(UrlError { at: start + at, problem });
    if let Some(inner) = authority.strip_prefix('[') {
        let Some((address, after)) = inner.split_once(']') else { return fail(0, UrlProblem::Ipv6) };
        let Ok(address_value) = address.parse::<Ipv6Addr>() else { return fail(1, UrlProblem::Ipv6) };
        let after_at = address.len() + 2;
        let port = match after.strip_prefix(':') {
            Some(port) => parse_port(port, start + after_at + 1)?,
            None if after.is_empty() => DEFAULT_CONTROL_PORT,
            None => return fail(after_at, UrlProblem::HostByte(after.as_bytes()[0])),
        };
        return Ok((address_value.to_string(), port));
    }
    if authority.parse::<Ipv6Addr>().is_ok() {
        return fail(0, UrlProblem::Brackets);
    }
    let (host, port) = match authority.split_once(':') {
        Some((host, port)) => (host, parse_port(port, start + host.len() + 1)?),
        None => (authority, DEFAULT_CONTROL_PORT),
    };
    if host.is_empty() {
        return fail(0, UrlProblem::HostMissing);
    }
    if host.len() > MAX_HOST {
        return fail(MAX_HOST, UrlProblem::HostLong);
    }
    let bad = |b: u8| !(b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_'));
    match host.bytes().enumerate().find(|&(_, b)| bad(b)) {
        Some((at, byte)) => fail(at, UrlProblem::HostByte(byte)),
        None => Ok((host.to_owned(), port)),
    }
}

fn parse_port(text: &str, at: usize) -> Result<u16, UrlError> {
    let digits = (1..=5).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
    let port = if digits { text.parse::<u16>().ok() } else { None };
    port.filter(|&port| port > 0).ok_or(UrlError { at, problem: UrlProblem::Port })
}

fn decode(text: &str, start: usize) -> Result<Vec<u8>, UrlError> {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let fail = |problem| Err(UrlError { at: start + at, problem });
        match byte {
            b'%' => {
                let digit = |i: usize| bytes.get(at + i).and_then(|&b| hex(b));
                let (Some(high), Some(low)) = (digit(1), digit(2)) else { return fail(UrlProblem::Percent) };
                match high << 4 | low {
                    b'/' => return fail(UrlProblem::EncodedSlash),
                    value => out.push(value),
                }
                at += 3;
            }
            b'/' | b'-' | b'.' | b'_' | b'~' => {
                out.push(byte);
                at += 1;
            }
            _ if byte.is_ascii_alphanumeric() => {
                out.push(byte);
                at += 1;
            }
            _ => return fail(UrlProblem::Unencoded(byte)),
        }
    }
    Ok(out)
}

fn hex(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn key() -> impl Strategy<Value = Key> {
        let part = vec(prop_oneof![1u8..=b'.', b'0'..=255u8], 1..20).prop_filter("dots", |p| p != b"." && p != b"..");
        vec(part, 1..5).prop_map(|parts| Key::new(parts.join(&b'/')).unwrap())
    }

    fn host() -> impl Strategy<Value = String> {
        prop_oneof![
            "[a-zA-Z0-9_-]{1,20}(\\.[a-z0-9]{1,8}){0,3}",
            any::<[u8; 16]>().prop_map(|a| Ipv6Addr::from(a).to_string()),
            any::<[u8; 4]>().prop_map(|a| std::net::Ipv4Addr::from(a).to_string()),
        ]
    }

    proptest! {
        #[test]
        fn what_is_shown_parses_to_the_same(
            host in host(), port in 1u16.., namespace in "[a-z0-9-]{1,63}",
            key in proptest::option::of(key()), slash in any::<bool>(),
        ) {
            let directory = slash || key.is_none();
            let url = Url { host, port, namespace: Namespace::new(&namespace).unwrap(), key, directory };
            let text = url.to_string();
            prop_assert!(text.is_ascii());
            prop_assert_eq!(Url::parse(&text), Ok(url));
        }

        #[test]
        fn any_text_gives_a_url_or_an_error(text in "(railfs://)?[\\[\\]:/%a-f0-9.\\PC]{0,60}") {
            match Url::parse(&text) {
                Ok(url) => prop_assert_eq!(Url::parse(&url.to_string()), Ok(url)),
                Err(error) => prop_assert!(error.at <= text.len()),
            }
        }
    }

    fn parse(text: &str) -> Url {
        Url::parse(text).unwrap()
    }

    #[test]
    fn the_forms_of_the_documentation() {
        let url = parse("railfs://host/ns");
        assert_eq!((url.host.as_str(), url.port, url.namespace.as_str()), ("host", 7420, "ns"));
        assert_eq!((url.key.clone(), url.directory), (None, true));
        assert_eq!(parse("railfs://host/ns/"), url);
        assert_eq!(parse("railfs://host:7420/ns").to_string(), "railfs://host/ns/");
        let url = parse("railfs://[fd00::1]:9/ns/a%20b/c%ff");
        assert_eq!((url.host.as_str(), url.port), ("fd00::1", 9));
        assert_eq!(url.address(), "[fd00::1]:9");
        assert_eq!(url.key.as_ref().unwrap().as_bytes(), b"a b/c\xff");
        assert!(!url.directory);
        assert_eq!(url.to_string(), "railfs://[fd00::1]:9/ns/a%20b/c%FF");
        assert!(parse("railfs://h/ns/d/").directory);
        assert_eq!(parse("railfs://h/ns/d").object(), Some(ObjectName::new("ns", &b"d"[..]).unwrap()));
    }

    #[test]
    fn errors_say_what_and_where() {
        use UrlProblem as P;
        let fails =
            |text: &str, at: usize, problem: P| assert_eq!(Url::parse(text), Err(UrlError { at, problem }), "{text}");
        fails("http://h/ns", 0, P::Scheme);
        fails("railfs", 0, P::Scheme);
        fails("railfs://", 9, P::HostMissing);
        fails("railfs:///ns", 9, P::HostMissing);
        fails("railfs://u@h/ns", 10, P::HostByte(b'@'));
        fails("railfs://::1/ns", 9, P::Brackets);
        fails("railfs://[::1/ns", 9, P::Ipv6);
        fails("railfs://[::g]/ns", 10, P::Ipv6);
        fails("railfs://[::1]x/ns", 14, P::HostByte(b'x'));
        fails("railfs://h:/ns", 11, P::Port);
        fails("railfs://h:0/ns", 11, P::Port);
        fails("railfs://h:65536/ns", 11, P::Port);
        fails("railfs://h", 10, P::NamespaceMissing);
        fails("railfs://h/", 11, P::NamespaceMissing);
        fails("railfs://h//k", 11, P::NamespaceMissing);
        fails("railfs://h/nS", 12, P::Name(NameError::NamespaceByte { byte: b'S', at: 1 }));
        fails("railfs://h/ns/a b", 15, P::Unencoded(b' '));
        fails("railfs://h/ns/a?b", 15, P::Unencoded(b'?'));
        fails("railfs://h/ns/a%2", 15, P::Percent);
        fails("railfs://h/ns/a%2Fb", 15, P::EncodedSlash);
        fails("railfs://h/ns/a//", 14, P::Name(NameError::KeyTrailingSlash));
        fails("railfs://h/ns/%2e%2e/x", 14, P::Name(NameError::PartDots(0)));
        fails("railfs://h/ns/%00", 14, P::Name(NameError::Nul(0)));
        let message = Url::parse("railfs://h/ns/a b").unwrap_err().to_string();
        assert!(message.starts_with("URL, at byte 15: ' ' must be written as %20"), "{message}");
    }
}
