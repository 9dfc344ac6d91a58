//! Certificates for tests: an authority of a test's own, and files of servers and clients that it signs.
//!
//! Guarantees: nothing is shared between tests; keys have mode 0600; a file is replaced as a whole.

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// When a certificate is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Now.
    Now,
    /// It was.
    Before,
}

/// Signs.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

/// Paths of a certificate, its key, and whom it believes.
#[derive(Clone, Debug)]
pub struct Held {
    /// Certificate.
    pub cert: PathBuf,
    /// Key.
    pub key: PathBuf,
    /// Authorities.
    pub ca: PathBuf,
}

impl Held {
    /// As options of a mount.
    pub fn options(&self) -> String {
        format!("cert={},key={},ca={}", self.cert.display(), self.key.display(), self.ca.display())
    }
    /// As flags of a command.
    pub fn flags(&self) -> [String; 6] {
        let of = |name: &str, path: &Path| [format!("--{name}"), path.display().to_string()];
        let ([a, b], [c, d], [e, f]) = (of("cert", &self.cert), of("key", &self.key), of("ca", &self.ca));
        [a, b, c, d, e, f]
    }
    /// As variables of a client.
    pub fn environment(&self) -> Vec<(&'static str, PathBuf)> {
        vec![("RAILFS_CERT", self.cert.clone()), ("RAILFS_KEY", self.key.clone()), ("RAILFS_CA", self.ca.clone())]
    }
    /// As `[security]` of a server.
    pub fn security(&self) -> String {
        format!("[security]\ncert = {:?}\nkey = {:?}\nclient_ca = {:?}\n", self.cert, self.key, self.ca)
    }
}

/// Puts a file in place as a whole.
///
/// # Panics
/// It cannot be written.
pub fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    let written = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new);
    let written = written.and_then(|mut file| file.write_all(text.as_bytes()));
    written.and_then(|()| std::fs::rename(&new, path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

fn params(name: &str, names: &[&str], when: When) -> CertificateParams {
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    let mut params = CertificateParams::new(names).unwrap_or_else(|error| panic!("{name}: {error}"));
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = date_time_ymd(2020, 1, 1);
    params.not_after = if when == When::Now { date_time_ymd(2120, 1, 1) } else { date_time_ymd(2020, 2, 1) };
    params
}

fn pair() -> KeyPair {
    KeyPair::generate().unwrap_or_else(|error| panic!("{error}"))
}

impl Authority {
    /// A new one.
    ///
    /// # Panics
    /// It cannot be made.
    pub fn new(name: &str) -> Authority {
        let mut params = params(name, &[], When::Now);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let issuer = CertifiedIssuer::self_signed(params, pair()).unwrap_or_else(|error| panic!("{error}"));
        Authority { issuer }
    }

    /// Its certificate.
    pub fn pem(&self) -> String {
        self.issuer.pem()
    }

    fn hold(&self, directory: &Path, file: &str, params: CertificateParams, believes: &Authority) -> Held {
        let key = pair();
        let cert = params.signed_by(&key, &self.issuer).unwrap_or_else(|error| panic!("{file}: {error}"));
        let at = |ending: &str| directory.join(format!("{file}.{ending}"));
        let held = Held { cert: at("pem"), key: at("key"), ca: at("ca") };
        replace(&held.key, &key.serialize_pem());
        replace(&held.cert, &cert.pem());
        replace(&held.ca, &believes.pem());
        held
    }

    /// A server's files, in place of those that were there: its names (or addresses), and the authority of its clients.
    ///
    /// # Panics
    /// They cannot be written.
    pub fn server(&self, directory: &Path, names: &[&str], clients: &Authority) -> Held {
        let mut params = params("a server", names, When::Now);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.hold(directory, "server", params, clients)
    }

    /// A client's files, in place of those that were there: its name, and the authority of its servers.
    ///
    /// # Panics
    /// They cannot be written.
    pub fn client(&self, directory: &Path, name: &str, when: When, servers: &Authority) -> Held {
        let mut params = params(name, &[], when);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.hold(directory, name, params, servers)
    }
}
