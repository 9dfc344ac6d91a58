//! Making a connection to one control address: plain, or by mutual TLS.
//!
//! Guarantees: with TLS nothing is sent before the server has shown a certificate of our authorities with the right name in
//! it; the files are read at each connect, so what was replaced is used from the next connection on; a side that speaks TLS
//! and one that does not are told apart, and what is wrong with a certificate is said in words that help.

use crate::error::{Error, Result};
use crate::tls::{self, Files, SAYS, TlsError, WANTS_TLS};
use hyper_util::rt::TokioIo;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};

/// A silent connection is asked for a sign of life this often,
const KEEPALIVE: Duration = Duration::from_secs(1);
/// and given up after this long without one.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(2);
/// What rustls says before the name of an alert that came from the other side.
const ALERT: &str = "received fatal alert: ";

/// What is wrong with one's own files, or with the other side.
#[derive(Debug, thiserror::Error)]
enum DialError {
    #[error("{0}")]
    Files(#[from] TlsError),
    #[error("{0}")]
    Name(String),
    #[error("{0}")]
    Connect(io::Error),
    #[error("{0}")]
    Handshake(io::Error),
    #[error("the files of the certificate were not read: {0}")]
    Reading(tokio::task::JoinError),
}

/// Makes the connections of one channel, the first and those after it.
#[derive(Clone, Debug)]
struct Dialer {
    files: Arc<Files>,
    address: String,
    /// The address whose host must stand in the server's certificate.
    named: String,
}

impl Service<Uri> for Dialer {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = DialError;
    type Future = Pin<Box<dyn Future<Output = std::result::Result<Self::Response, DialError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<std::result::Result<(), DialError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let Dialer { files, address, named } = self.clone();
        Box::pin(async move {
            // A disk may hang: not on the runtime's own thread.
            let config = tokio::task::spawn_blocking(move || files.client()).await.map_err(DialError::Reading)??;
            let name = tls::server_name(&named).map_err(DialError::Name)?;
            let stream = TcpStream::connect(&address).await.map_err(DialError::Connect)?;
            stream.set_nodelay(true).map_err(DialError::Connect)?;
            let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await;
            stream.map(TokioIo::new).map_err(DialError::Handshake)
        })
    }
}

fn endpoint(address: &str, deadline: Duration) -> Result<Endpoint> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| Error::Invalid(format!("\"{address}\" is not an address (HOST:PORT): {error}")))?;
    Ok(endpoint
        .connect_timeout(deadline)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true))
}

/// The whole chain of causes: tonic's own words say little. Those of the other side are shown as a literal, and so escaped.
pub(super) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let more = cause.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        next = cause.source();
    }
    text
}

/// A channel to an address. With TLS the host of `named` must be in the server's certificate.
///
/// # Errors
/// `Invalid` (no address), `Denied` (one side speaks TLS and the other does not), `Unreachable`.
pub(super) async fn channel(
    address: &str,
    named: &str,
    files: Option<&Arc<Files>>,
    deadline: Duration,
) -> Result<Channel> {
    let endpoint = endpoint(address, deadline)?;
    let connected = match files {
        None => endpoint.connect().await,
        Some(files) => {
            let (address, named) = (address.to_owned(), named.to_owned());
            endpoint.connect_with_connector(Dialer { files: Arc::clone(files), address, named }).await
        }
    };
    connected.map_err(|error| explain(address, &error, files))
}

/// What a connection that failed, or ended before it brought an answer, is to the caller.
pub(super) fn explain(address: &str, error: &(dyn std::error::Error + 'static), files: Option<&Arc<Files>>) -> Error {
    let mut next = Some(error);
    while let Some(cause) = next {
        if let Some(error) = cause.downcast_ref::<DialError>() {
            return dial_error(address, error);
        }
        next = cause.source();
    }
    let text = causes(error);
    if let Some(refused) = refusal(address, &text, files) {
        return refused;
    }
    Error::Unreachable { peer: address.to_owned(), detail: text }
}

/// What the other side's words mean, where they are about TLS.
pub(super) fn refusal(address: &str, text: &str, files: Option<&Arc<Files>>) -> Option<Error> {
    if files.is_none() && text.contains(WANTS_TLS) {
        return Some(Error::Denied(format!(
            "{address} takes only TLS connections: name a certificate, its key and the server's authority (cert, key and \
             ca: options of a mount, flags of a command, or RAILFS_CERT, RAILFS_KEY and RAILFS_CA)"
        )));
    }
    if let Some(said) = text.find(SAYS).and_then(|at| text.get(at + SAYS.len()..)) {
        // Its bytes are shown as a literal, which ends where it ends.
        let said: String = said.chars().take_while(|c| *c != '"').collect();
        return Some(Error::Denied(format!("{address}: {said}")));
    }
    let (files, (_, alert)) = (files?, text.split_once(ALERT)?);
    let alert: String = alert.chars().take_while(char::is_ascii_alphanumeric).collect();
    let (cert, what) = (files.cert.display(), "the server does not accept this client's certificate");
    let why = match alert.as_str() {
        "UnknownCA" => "it is not signed by an authority of the server's client_ca",
        "CertificateExpired" => "it has expired, or is not valid yet: make a new one (or set the clock)",
        "CertificateRequired" => "none was sent",
        _ => "it is not one for clients that the server's client_ca has signed",
    };
    Some(Error::Denied(format!("{address}: {what} ({cert}): {why} ({alert})")))
}

fn dial_error(address: &str, error: &DialError) -> Error {
    let unreachable = |detail: String| Error::Unreachable { peer: address.to_owned(), detail };
    let DialError::Handshake(io) = error else { return unreachable(error.to_string()) };
    match io.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        // Not TLS at all: what a plain server says first.
        Some(rustls::Error::InvalidMessage(_)) => Error::Denied(format!(
            "{address} answers without TLS: this client has a certificate and does not talk to such a server; give the server \
             one (cert, key and client_ca under [security]), or leave cert, key and ca out"
        )),
        Some(rustls::Error::InvalidCertificate(why)) => {
            unreachable(format!("the server's certificate is not accepted: {}", certificate(why)))
        }
        _ => match io.kind() {
            io::ErrorKind::UnexpectedEof => unreachable(
                "it ended the connection during the TLS handshake: is that the control port of a railfsd?".into(),
            ),
            _ => unreachable(format!("TLS handshake: {io}")),
        },
    }
}

fn certificate(why: &rustls::CertificateError) -> String {
    use rustls::CertificateError as C;
    match why {
        C::UnknownIssuer => "it is not signed by an authority that `ca` names".to_owned(),
        C::Expired | C::ExpiredContext { .. } => "it has expired".to_owned(),
        C::NotValidYet | C::NotValidYetContext { .. } => "it is not valid yet (is the clock right?)".to_owned(),
        C::NotValidForName | C::NotValidForNameContext { .. } => {
            format!("the host of the URL is not among its names: {why}")
        }
        other => other.to_string(),
    }
}
