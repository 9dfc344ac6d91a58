//! What a command is about: a URL, and how its server is talked to.

use crate::failure::Failure;
use crate::tls;
use clap::Args;
use railfs_engine::client::{Client, Config};
use railfs_engine::tls::Files;
use railfs_proto::url::Url;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;

/// Bytes of transfer memory of a command that is not a mount.
const COMMAND_ARENA: u64 = 64 << 20;

/// The files of mutual TLS.
#[derive(Clone, Debug, Default, Args)]
pub(super) struct TlsArguments {
    /// Certificate of this client, in PEM, for a server that wants one (else RAILFS_CERT)
    #[arg(long, value_name = "FILE")]
    cert: Option<PathBuf>,
    /// Its private key (else RAILFS_KEY)
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// The authorities that sign servers' certificates (else RAILFS_CA)
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
}

/// See the module. Everything that a URL can be asked, this can.
#[derive(Clone, Debug)]
pub(super) struct Target {
    url: Url,
    tls: Option<Files>,
}

impl Target {
    /// # Errors
    /// Exit code 2: no URL, or files that are of no use.
    pub(super) fn new(url: &str, arguments: TlsArguments) -> Result<Target, Failure> {
        let url = super::parse(url)?;
        let tls = tls::files([arguments.cert, arguments.key, arguments.ca], false, tls::environment)?;
        if let Some(files) = &tls {
            // What is wrong with one's own files is said before anybody is asked anything.
            files.client().map_err(|error| Failure::usage(error.to_string()))?;
        }
        Ok(Target { url, tls })
    }

    /// # Errors
    /// As `Client::connect`.
    pub(super) fn connect(&self) -> Result<Arc<Client>, Failure> {
        let config = Config {
            addresses: vec![self.url.address()],
            arena: COMMAND_ARENA,
            readahead: 0,
            tls: self.tls.clone(),
            ..Config::default()
        };
        Ok(Client::connect(config)?)
    }
}

impl Deref for Target {
    type Target = Url;
    fn deref(&self) -> &Url {
        &self.url
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.url.fmt(f)
    }
}
