//! Who may do what: identities, and the readers and writers of namespaces.
//!
//! Guarantees: deciding is pure; an identity comes from a certificate that was verified before, and is of characters that can be
//! shown; where rights are configured, whoever is not named by them may do nothing; a change of the rights holds for the next
//! request, also of sessions that are there.

use railfs_proto::reply::Refusal;
use railfs_proto::v1::Code;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

/// Longest identity, bytes.
pub const MAX_IDENTITY: usize = 255;
/// In a list: everybody who got in. As a namespace: every one that has no entry of its own.
pub const ANY: &str = "*";

/// Who a client is: what its certificate says.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Identity(Arc<str>);

impl Identity {
    /// A name that can be shown and compared.
    ///
    /// # Errors
    /// It is empty, longer than [`MAX_IDENTITY`], `*`, or has control characters in it.
    pub fn new(name: &str) -> Result<Identity, String> {
        if name.is_empty() || name.len() > MAX_IDENTITY || name.chars().any(char::is_control) || name == ANY {
            let shown: String = name.chars().take(MAX_IDENTITY).collect();
            return Err(format!(
                "\"{}\" is no name of a client: 1 to {MAX_IDENTITY} bytes without control characters, and not \"{ANY}\"",
                shown.escape_debug()
            ));
        }
        Ok(Identity(name.into()))
    }

    /// The name in a verified certificate (DER): the common name of its subject; without one the first DNS name, else the first
    /// URI among its alternative names.
    ///
    /// # Errors
    /// It names nobody, or several; or what it names is no identity.
    pub fn of_certificate(der: &[u8]) -> Result<Identity, String> {
        let (_, certificate) = X509Certificate::from_der(der).map_err(|error| format!("unreadable: {error}"))?;
        let mut names = certificate.subject().iter_common_name();
        match (names.next(), names.next()) {
            (Some(name), None) => {
                let name = name.as_str().map_err(|_| "the common name of its subject is no UTF-8".to_owned())?;
                Identity::new(name)
            }
            (Some(_), Some(_)) => Err("its subject has several common names".to_owned()),
            (None, _) => {
                let other = certificate.subject_alternative_name().map_err(|error| error.to_string())?;
                let other = other.map(|extension| &extension.value.general_names[..]).unwrap_or_default();
                let dns = other.iter().find_map(|name| match name {
                    GeneralName::DNSName(name) => Some(*name),
                    _ => None,
                });
                let uri = other.iter().find_map(|name| match name {
                    GeneralName::URI(name) => Some(*name),
                    _ => None,
                });
                let name = dns.or(uri).ok_or("it names nobody: neither a common name, nor a DNS name, nor a URI")?;
                Identity::new(name)
            }
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What somebody wants to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Look up, list, watch, fetch.
    Read,
    /// Put and delete.
    Write,
}

/// One `[[namespace]]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceConfig {
    /// A namespace, or [`ANY`].
    pub name: String,
    /// Identities, or [`ANY`].
    pub readers: Vec<String>,
    /// They may read as well.
    pub writers: Vec<String>,
}

impl NamespaceConfig {
    fn gives(&self, who: &str, need: Need) -> bool {
        let named = |list: &[String]| list.iter().any(|name| name == who || name == ANY);
        named(&self.writers) || (need == Need::Read && named(&self.readers))
    }
}

/// What the configuration says; nothing: everybody may do all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rights(BTreeMap<String, NamespaceConfig>);

impl Rights {
    /// Names are taken to differ.
    pub fn new(namespaces: &[NamespaceConfig]) -> Rights {
        Rights(namespaces.iter().map(|entry| (entry.name.clone(), entry.clone())).collect())
    }

    /// Whether there are any, so that who is not named may do nothing.
    pub fn is_restricted(&self) -> bool {
        !self.0.is_empty()
    }

    /// Whether somebody may. `None`: a client without a certificate.
    pub fn may(&self, who: Option<&Identity>, namespace: &str, need: Need) -> bool {
        if !self.is_restricted() {
            return true;
        }
        let (Some(who), Some(entry)) = (who, self.0.get(namespace).or_else(|| self.0.get(ANY))) else { return false };
        entry.gives(who.as_str(), need)
    }

    /// Whether somebody may read or write anything at all.
    pub fn may_anything(&self, who: Option<&Identity>) -> bool {
        let gives = |who: &Identity| self.0.values().any(|entry| entry.gives(who.as_str(), Need::Read));
        !self.is_restricted() || who.is_some_and(gives)
    }
}

/// The rights in force.
#[derive(Debug, Default)]
pub struct Access {
    /// Most servers have none: they are not asked for then.
    restricted: AtomicBool,
    rights: RwLock<Rights>,
}

fn shown(who: Option<&Identity>) -> String {
    who.map_or_else(|| "a client without a certificate".to_owned(), |who| format!("\"{who}\""))
}

impl Access {
    /// From the next request on.
    pub fn replace(&self, rights: Rights) {
        let mut held = self.rights.write().unwrap_or_else(PoisonError::into_inner);
        self.restricted.store(rights.is_restricted(), Ordering::Release);
        *held = rights;
    }

    fn with<T>(&self, ask: impl FnOnce(&Rights) -> T) -> Option<T> {
        let asked = self.restricted.load(Ordering::Acquire);
        asked.then(|| ask(&self.rights.read().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Lets somebody do something in a namespace, or says what is missing.
    ///
    /// # Errors
    /// `Denied`, naming identity, namespace and what is missing. It does not say whether anything is there.
    pub fn check(&self, who: Option<&Identity>, namespace: &str, need: Need) -> Result<(), Refusal> {
        if self.with(|rights| rights.may(who, namespace, need)).unwrap_or(true) {
            return Ok(());
        }
        let (verb, lists) = match need {
            Need::Read => ("read", "neither among its readers nor among its writers"),
            Need::Write => ("write to", "not among its writers"),
        };
        let message = format!(
            "{} may not {verb} namespace {namespace}: {lists} ([[namespace]] in the server's configuration)",
            shown(who)
        );
        Err(Refusal::new(Code::Denied, message))
    }

    /// The same for what is of no namespace: whoever may read one of them may.
    ///
    /// # Errors
    /// `Denied`.
    pub fn check_any(&self, who: Option<&Identity>) -> Result<(), Refusal> {
        if self.with(|rights| rights.may_anything(who)).unwrap_or(true) {
            return Ok(());
        }
        let message =
            format!("{} may read no namespace here ([[namespace]] in the server's configuration)", shown(who));
        Err(Refusal::new(Code::Denied, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SanType};

    fn entry(name: &str, readers: &[&str], writers: &[&str]) -> NamespaceConfig {
        let list = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        NamespaceConfig { name: name.to_owned(), readers: list(readers), writers: list(writers) }
    }

    fn is(name: &str) -> Option<Identity> {
        Some(Identity::new(name).unwrap())
    }

    #[test]
    fn who_may_read_and_write_what() {
        let rights =
            Rights::new(&[entry("models", &["alice"], &["bob"]), entry("open", &[ANY], &[]), entry("shut", &[], &[])]);
        for (who, namespace, read, write) in [
            ("alice", "models", true, false),
            ("bob", "models", true, true),
            ("carol", "models", false, false),
            ("carol", "open", true, false),
            ("bob", "open", true, false),
            ("alice", "shut", false, false),
            ("alice", "other", false, false),
        ] {
            let may = |need| rights.may(is(who).as_ref(), namespace, need);
            assert_eq!((may(Need::Read), may(Need::Write)), (read, write), "{who} {namespace}");
        }
        assert!(!rights.may(None, "open", Need::Read), "whoever shows no certificate is nobody");
        assert!(rights.may_anything(is("carol").as_ref()) && !rights.may_anything(None));
        let others = Rights::new(&[entry("models", &[], &["bob"]), entry(ANY, &["carol"], &[])]);
        assert!(others.may(is("carol").as_ref(), "anything", Need::Read));
        assert!(
            !others.may(is("carol").as_ref(), "models", Need::Read),
            "an entry of its own takes the place of the others'"
        );
        assert!(Rights::new(&[]).may(None, "anything", Need::Write), "without any everybody may do all");
    }

    #[test]
    fn a_refusal_names_who_what_and_what_is_missing() {
        let access = Access::default();
        assert_eq!(access.check(None, "ns", Need::Write), Ok(()));
        access.replace(Rights::new(&[entry("ns", &["alice"], &[])]));
        assert_eq!(access.check(is("alice").as_ref(), "ns", Need::Read), Ok(()));
        let said = access.check(is("alice").as_ref(), "ns", Need::Write).unwrap_err();
        assert_eq!(said.code, Code::Denied);
        assert!(
            said.message.starts_with("\"alice\" may not write to namespace ns: not among its writers"),
            "{}",
            said.message
        );
        let said = access.check(is("bob").as_ref(), "ns", Need::Read).unwrap_err().message;
        assert!(said.starts_with("\"bob\" may not read namespace ns: neither among its readers nor"), "{said}");
        assert!(access.check_any(is("bob").as_ref()).is_err() && access.check_any(is("alice").as_ref()).is_ok());
        access.replace(Rights::default());
        assert_eq!(access.check(None, "ns", Need::Write), Ok(()));
    }

    fn certificate(common: &[&str], other: Vec<SanType>) -> Vec<u8> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        for name in common {
            params.distinguished_name.push(DnType::CommonName, *name);
        }
        params.subject_alt_names = other;
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
    }

    #[test]
    fn an_identity_is_the_common_name_else_the_first_dns_name_else_the_first_uri() {
        let dns = |name: &str| SanType::DnsName(name.try_into().unwrap());
        let uri = |name: &str| SanType::URI(name.try_into().unwrap());
        let of = |der: Vec<u8>| Identity::of_certificate(&der).map(|identity| identity.to_string());
        assert_eq!(of(certificate(&["alice"], vec![dns("x.example")])), Ok("alice".to_owned()));
        assert_eq!(of(certificate(&[], vec![uri("spiffe://a/b"), dns("x.example")])), Ok("x.example".to_owned()));
        assert_eq!(of(certificate(&[], vec![uri("spiffe://a/b")])), Ok("spiffe://a/b".to_owned()));
        assert!(of(certificate(&[], vec![])).unwrap_err().contains("names nobody"));
        for wrong in ["*", "a\nb", "\u{1b}[2J"] {
            assert!(of(certificate(&[wrong], vec![])).unwrap_err().contains("is no name of a client"), "{wrong:?}");
        }
        assert!(Identity::new(&"x".repeat(MAX_IDENTITY + 1)).is_err() && Identity::new("").is_err());
        assert!(Identity::of_certificate(b"\x30\x03abc").unwrap_err().contains("unreadable"));
    }
}
