//! Mutual TLS of control connections: certificates and keys in files, configurations of rustls out.
//!
//! Guarantees: both sides prove who they are or there is no connection (TLS 1.3 only; nothing is resumed, so that every connection
//! is checked against the certificates of now); a key that others than its owner can read is refused, with the cure; every error
//! names the file. Files are read anew for each configuration: whoever wants what is on the disk now makes another one.

use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Longest file that is read, bytes: a list of some hundred authorities.
const MAX_FILE: u64 = 1 << 20;
/// What is spoken inside.
const ALPN: &[u8] = b"h2";

/// So begins what a server says to a client that it ends the connection with, in HTTP/2's word for that (GOAWAY).
pub const SAYS: &str = "railfsd: ";
/// What it says to whoever speaks to it without TLS.
pub const WANTS_TLS: &str = "railfsd: only TLS connections with a client certificate are taken here";

/// Who one is, and whom one believes: three PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// The certificate, and after it those that lead to the other side's authority.
    pub cert: PathBuf,
    /// Its private key; only its owner may be able to read it.
    pub key: PathBuf,
    /// The authorities that sign the other side's certificates, one or more.
    pub ca: PathBuf,
}

/// Which of the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// [`Files::cert`], or that together with the key.
    Cert,
    /// [`Files::key`].
    Key,
    /// [`Files::ca`].
    Ca,
}

/// Why files are no use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {problem}", .path.display())]
pub struct TlsError {
    /// Which it is about.
    pub which: Which,
    /// Its path.
    pub path: PathBuf,
    /// What is wrong, and what would be right.
    pub problem: String,
}

/// Tells two states of a file apart: device, inode, bytes, and when it was changed.
pub type Stamp = Option<(u64, u64, u64, i64, i64)>;

/// The state of a file now; `None`: it is not there.
pub fn stamp(path: &Path) -> Stamp {
    let metadata = std::fs::metadata(path).ok()?;
    // The time of change covers the mode as well: a key that was made private counts as another one.
    Some((metadata.dev(), metadata.ino(), metadata.size(), metadata.ctime(), metadata.ctime_nsec()))
}

fn read(path: &Path, which: Which) -> Result<Vec<u8>, TlsError> {
    let wrong = |problem: String| TlsError { which, path: path.to_owned(), problem };
    // Before it is opened: opening a pipe would wait for whoever writes into it.
    if std::fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        return Err(wrong("is not a file".to_owned()));
    }
    let file = File::open(path).map_err(|error| wrong(format!("cannot be read: {error}")))?;
    let metadata = file.metadata().map_err(|error| wrong(format!("cannot be read: {error}")))?;
    if which == Which::Key && metadata.mode() & 0o077 != 0 {
        let (mode, path) = (metadata.mode() & 0o7777, path.display());
        return Err(wrong(format!("the key can be read or changed by others (mode {mode:04o}): `chmod 600 {path}`")));
    }
    let mut bytes = Vec::new();
    let taken = file.take(MAX_FILE + 1).read_to_end(&mut bytes);
    taken.map_err(|error| wrong(format!("cannot be read: {error}")))?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > MAX_FILE {
        return Err(wrong(format!("has more than {MAX_FILE} bytes: that is no certificate and no key")));
    }
    Ok(bytes)
}

fn certificates(path: &Path, which: Which) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wrong = |problem: String| TlsError { which, path: path.to_owned(), problem };
    let bytes = read(path, which)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    match found {
        Ok(found) if found.is_empty() => Err(wrong("has no certificate in it (PEM is wanted)".to_owned())),
        Ok(found) => Ok(found),
        Err(error) => Err(wrong(format!("is no list of certificates in PEM: {error}"))),
    }
}

type Parts = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>, RootCertStore);

impl Files {
    /// The states of all of them now.
    pub fn stamps(&self) -> [Stamp; 3] {
        [stamp(&self.cert), stamp(&self.key), stamp(&self.ca)]
    }

    fn wrong(&self, which: Which, problem: impl std::fmt::Display) -> TlsError {
        let path = match which {
            Which::Cert => &self.cert,
            Which::Key => &self.key,
            Which::Ca => &self.ca,
        };
        TlsError { which, path: path.clone(), problem: problem.to_string() }
    }

    fn parts(&self) -> Result<Parts, TlsError> {
        let chain = certificates(&self.cert, Which::Cert)?;
        let key = PrivateKeyDer::from_pem_slice(&read(&self.key, Which::Key)?)
            .map_err(|error| self.wrong(Which::Key, format!("is no private key in PEM: {error}")))?;
        let mut roots = RootCertStore::empty();
        for authority in certificates(&self.ca, Which::Ca)? {
            roots.add(authority).map_err(|error| self.wrong(Which::Ca, format!("cannot be used: {error}")))?;
        }
        Ok((chain, key, roots))
    }

    /// How a client connects, from what the files hold now. Reads the disk.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn client(&self) -> Result<ClientConfig, TlsError> {
        let (chain, key, roots) = self.parts()?;
        let config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| self.wrong(Which::Cert, error))?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key);
        let mut config = config.map_err(|error| self.unfit(&error))?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.resumption = Resumption::disabled();
        Ok(config)
    }

    /// How a server accepts, from what the files hold now: whoever has no certificate of these authorities is refused. Reads the disk.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn server(&self) -> Result<ServerConfig, TlsError> {
        let (chain, key, roots) = self.parts()?;
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider()).build();
        let verifier = verifier.map_err(|error| self.wrong(Which::Ca, format!("cannot be used: {error}")))?;
        let config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| self.wrong(Which::Cert, error))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key);
        let mut config = config.map_err(|error| self.unfit(&error))?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        // A connection that resumes an earlier one would not be checked again.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }

    fn unfit(&self, error: &rustls::Error) -> TlsError {
        match error {
            rustls::Error::InconsistentKeys(_) => {
                self.wrong(Which::Key, format!("is not the key of the certificate in {}", self.cert.display()))
            }
            other => self.wrong(Which::Cert, format!("cannot be used: {other}")),
        }
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// The host of "host:port" or "[v6]:port".
fn host_of(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// The name that must stand in the certificate of a server at this address: its host, by name or by address.
///
/// # Errors
/// The host is neither a DNS name nor an address.
pub fn server_name(address: &str) -> Result<ServerName<'static>, String> {
    let host = host_of(address);
    ServerName::try_from(host.to_owned()).map_err(|_| format!("\"{host}\" is neither a DNS name nor an address"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_name_to_look_for_is_the_host_of_the_address() {
        for (address, host) in
            [("a.example:7420", "a.example"), ("10.0.0.1:1", "10.0.0.1"), ("[fd00::1]:7420", "fd00::1"), ("b", "b")]
        {
            assert_eq!(host_of(address), host);
            assert_eq!(server_name(address).unwrap().to_str(), host);
        }
        assert!(server_name("a b:1").is_err() && server_name(":1").is_err());
    }

    #[test]
    fn files_that_are_no_use_are_named_with_the_cure() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let files = Files { cert: at("cert"), key: at("key"), ca: at("ca") };
        let said = || {
            let (client, server) = (files.client().unwrap_err(), files.server().unwrap_err());
            assert_eq!(client, server);
            client
        };
        let error = said();
        assert_eq!((error.which, error.path.clone()), (Which::Cert, at("cert")));
        assert!(error.to_string().contains("cannot be read: No such file"), "{error}");
        std::fs::write(at("cert"), "nothing").unwrap();
        assert!(said().to_string().ends_with("has no certificate in it (PEM is wanted)"));
        std::fs::write(at("cert"), "-----BEGIN CERTIFICATE-----\n*\n-----END CERTIFICATE-----\n").unwrap();
        assert!(said().to_string().contains("is no list of certificates"));
        std::fs::write(at("cert"), "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
        std::fs::write(at("key"), "x").unwrap();
        std::fs::set_permissions(at("key"), std::fs::Permissions::from_mode(0o640)).unwrap();
        let error = said();
        assert_eq!(error.which, Which::Key);
        assert!(error.to_string().ends_with(&format!("(mode 0640): `chmod 600 {}`", at("key").display())), "{error}");
        std::fs::set_permissions(at("key"), std::fs::Permissions::from_mode(0o600)).unwrap();
        assert!(said().to_string().contains("is no private key in PEM"));
        std::fs::remove_file(at("key")).unwrap();
        std::fs::create_dir(at("key")).unwrap();
        assert!(said().to_string().ends_with("is not a file"));
        std::fs::remove_dir(at("key")).unwrap();
        std::fs::File::create(at("cert")).unwrap().set_len(MAX_FILE + 1).unwrap();
        assert!(said().to_string().contains("has more than"));
    }

    #[test]
    fn a_file_that_was_replaced_or_whose_mode_was_changed_has_another_stamp() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        assert_eq!(stamp(&path), None);
        std::fs::write(&path, "a").unwrap();
        let first = stamp(&path);
        assert_eq!(stamp(&path), first);
        std::fs::write(dir.path().join("g"), "b").unwrap();
        std::fs::rename(dir.path().join("g"), &path).unwrap();
        let second = stamp(&path);
        assert!(second.is_some() && second != first);
    }
}
