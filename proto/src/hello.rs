//! A server's hello, checked, and the choice of a protocol version.
//!
//! Guarantees: a [`Hello`] has bounded lists, whole ids and addresses that can be connected to. What a newer server adds
//! (transports, capabilities) is kept by name and otherwise left alone.

use crate::descriptor::Id;
use crate::limits::{
    MAX_CAPABILITIES, MAX_CONTROL_ADDRESSES, MAX_EXTENT, MAX_LISTENERS, MAX_SOFTWARE, MAX_TICKETS, MAX_WORD, MIN_PAGE,
    TICKET_BYTES,
};
use crate::name::{Escaped, NameError, check_node_name};
use crate::reply::{Refusal, check_outcome};
use crate::{PROTOCOL_MAX, PROTOCOL_MIN, v1};
use bytes::Bytes;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// Client and server have no protocol version in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no common protocol version: the client speaks {client_min} to {client_max}, the server {server_min} to {server_max}; upgrade {}",
    self.older()
)]
pub struct NoCommonProtocol {
    /// Lowest the client speaks.
    pub client_min: u32,
    /// Highest the client speaks.
    pub client_max: u32,
    /// Lowest the server speaks.
    pub server_min: u32,
    /// Highest the server speaks.
    pub server_max: u32,
}

impl NoCommonProtocol {
    fn older(&self) -> &'static str {
        if self.client_max < self.server_max { "the client (railfs)" } else { "the server (railfsd)" }
    }
}

/// The highest protocol version that both speak.
///
/// # Errors
/// When there is none; the message names both ranges.
pub fn negotiate(client_min: u32, client_max: u32, server_min: u32, server_max: u32) -> Result<u32, NoCommonProtocol> {
    let highest = client_max.min(server_max);
    if highest >= client_min.max(server_min) && client_min <= client_max && server_min <= server_max {
        Ok(highest)
    } else {
        Err(NoCommonProtocol { client_min, client_max, server_min, server_max })
    }
}

/// Why a hello is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// The server said no.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// See the message.
    #[error(transparent)]
    Protocol(#[from] NoCommonProtocol),
    /// See the message.
    #[error("another store answers at this address: {found}, not {wanted}")]
    WrongStore {
        /// Who answers.
        found: Id,
        /// Who was asked for.
        wanted: Id,
    },
    /// See the message.
    #[error("server's hello: {0} is not 16 bytes long")]
    Id(&'static str),
    /// See the message.
    #[error("server's hello: {0}")]
    Node(#[from] NameError),
    /// See the message.
    #[error("server's hello: {0} is 0")]
    Zero(&'static str),
    /// See the message.
    #[error("server's hello lists {got} {what}, more than {limit}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many.
        got: usize,
        /// Allowed.
        limit: usize,
    },
    /// See the message.
    #[error("server's hello: ticket of {0} bytes, not {first} to {last}", first = TICKET_BYTES.start(), last = TICKET_BYTES.end())]
    Ticket(usize),
    /// See the message.
    #[error("server's hello: '{text}' is not a usable {what} (at most {MAX_WORD} printable characters without spaces)")]
    Word {
        /// What it should be.
        what: &'static str,
        /// What it says, escaped and cut.
        text: String,
    },
    /// See the message.
    #[error("server's hello: '{text}' is not an address that can be connected to ({what})")]
    Address {
        /// Whose.
        what: &'static str,
        /// What it says, escaped and cut.
        text: String,
    },
    /// See the message.
    #[error("server's hello lists listener {0} twice")]
    ListenerTwice(u32),
    /// See the message.
    #[error("server's hello: lease of {0} ms is not from 1 to {MAX_LEASE_MILLISECONDS}")]
    Lease(u32),
    /// See the message.
    #[error("server's hello: largest fetch of {0} bytes is not from {MIN_PAGE} to {MAX_EXTENT}")]
    MaxFetch(u32),
}

/// Longest server lease that is believed, milliseconds.
pub const MAX_LEASE_MILLISECONDS: u32 = 600_000;

/// How a listener is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transport {
    /// By TCP at this address.
    Tcp(SocketAddr),
    /// By RDMA queue pairs, over the device with this address.
    Rdma(IpAddr),
    /// A transport that this software does not know.
    Other {
        /// Its name.
        name: String,
        /// Its address, as it came (escaped, cut).
        address: String,
    },
}

/// The server's end of a fabric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// Its place in the server's configuration; no two are equal.
    pub id: u32,
    /// The fabric's name; may be empty.
    pub fabric: String,
    /// Transport and address.
    pub transport: Transport,
    /// Megabits per second; 0: not known.
    pub speed_mbps: u64,
    /// What it can do beyond the base protocol.
    pub capabilities: Vec<String>,
}

/// What a server said of itself, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The version to speak, one that both do.
    pub protocol: u32,
    /// The server's software, for people (escaped, cut).
    pub software: String,
    /// The store.
    pub store: Id,
    /// The node.
    pub node: String,
    /// This run of the node's server; not 0.
    pub incarnation: u64,
    /// The session; not 0.
    pub session: u64,
    /// Rail tickets, 16 to 64 bytes each.
    pub tickets: Vec<Bytes>,
    /// The server's listeners, at most 256.
    pub listeners: Vec<Listener>,
    /// Where the control plane can be reached as well, at most 64.
    pub control_addresses: Vec<SocketAddr>,
    /// How long the server lease lasts.
    pub lease: Duration,
    /// What the server can do beyond the base protocol.
    pub capabilities: Vec<String>,
    /// Most that one fetch may ask for, bytes; 4 KiB to 1 MiB.
    pub max_fetch_bytes: u32,
}

impl Hello {
    /// Checks every claim of the reply, and that it answers the request (protocol range, store).
    ///
    /// # Errors
    /// The server's refusal, or the first claim that is wrong.
    pub fn check(request: &v1::HelloRequest, reply: &v1::HelloReply) -> Result<Hello, HelloError> {
        let no_common = NoCommonProtocol {
            client_min: request.protocol_min,
            client_max: request.protocol_max,
            server_min: reply.protocol_min,
            server_max: reply.protocol_max,
        };
        match check_outcome(reply.outcome.as_ref()) {
            // A server that does not say what it speaks has words that do.
            Err(refusal) if refusal.code == v1::Code::Protocol && reply.protocol_max > 0 => {
                return Err(no_common.into());
            }
            other => other?,
        }
        if !(request.protocol_min..=request.protocol_max).contains(&reply.protocol) {
            return Err(no_common.into());
        }
        let hello = Hello::from_message(reply)?;
        match Id::from_bytes(&request.store) {
            Some(wanted) if wanted != hello.store => Err(HelloError::WrongStore { found: hello.store, wanted }),
            _ => Ok(hello),
        }
    }

    /// Checks every claim of a reply. For one that answers a request at hand use [`Hello::check`].
    ///
    /// # Errors
    /// The server's refusal, or the first claim that is wrong.
    pub fn from_message(reply: &v1::HelloReply) -> Result<Hello, HelloError> {
        use HelloError as E;
        check_outcome(reply.outcome.as_ref())?;
        if !(PROTOCOL_MIN..=PROTOCOL_MAX).contains(&reply.protocol) {
            let (server_min, server_max) = (reply.protocol_min, reply.protocol_max);
            let (client_min, client_max) = (PROTOCOL_MIN, PROTOCOL_MAX);
            return Err(NoCommonProtocol { client_min, client_max, server_min, server_max }.into());
        }
        let store = Id::from_bytes(&reply.store).ok_or(E::Id("the store's id"))?;
        check_node_name(&reply.node)?;
        for (what, value) in [("the incarnation", reply.incarnation), ("the session", reply.session)] {
            if value == 0 {
                return Err(E::Zero(what));
            }
        }
        at_most("tickets", reply.tickets.len(), MAX_TICKETS)?;
        at_most("listeners", reply.listeners.len(), MAX_LISTENERS)?;
        at_most("control addresses", reply.control_addresses.len(), MAX_CONTROL_ADDRESSES)?;
        if let Some(ticket) = reply.tickets.iter().find(|ticket| !TICKET_BYTES.contains(&ticket.len())) {
            return Err(E::Ticket(ticket.len()));
        }
        let mut ids = std::collections::BTreeSet::new();
        for listener in &reply.listeners {
            if !ids.insert(listener.id) {
                return Err(E::ListenerTwice(listener.id));
            }
        }
        if !(1..=MAX_LEASE_MILLISECONDS).contains(&reply.lease_milliseconds) {
            return Err(E::Lease(reply.lease_milliseconds));
        }
        if !(MIN_PAGE..=MAX_EXTENT).contains(&reply.max_fetch_bytes) {
            return Err(E::MaxFetch(reply.max_fetch_bytes));
        }
        let addresses = reply.control_addresses.iter().map(|text| address("control address", text));
        Ok(Hello {
            protocol: reply.protocol,
            software: shown(&reply.software, MAX_SOFTWARE),
            store,
            node: reply.node.clone(),
            incarnation: reply.incarnation,
            session: reply.session,
            tickets: reply.tickets.clone(),
            listeners: reply.listeners.iter().map(listener).collect::<Result<_, _>>()?,
            control_addresses: addresses.collect::<Result<_, _>>()?,
            lease: Duration::from_millis(reply.lease_milliseconds.into()),
            capabilities: capabilities(&reply.capabilities)?,
            max_fetch_bytes: reply.max_fetch_bytes,
        })
    }
}

fn listener(message: &v1::Listener) -> Result<Listener, HelloError> {
    let transport = match message.transport.as_str() {
        "tcp" => Transport::Tcp(address("listener's address", &message.address)?),
        "rdma" => Transport::Rdma(device_address(message)?),
        "" => return Err(HelloError::Word { what: "transport", text: String::new() }),
        other => Transport::Other { name: word("transport", other)?, address: shown(&message.address, MAX_SOFTWARE) },
    };
    Ok(Listener {
        id: message.id,
        fabric: word("fabric", &message.fabric)?,
        transport,
        speed_mbps: message.speed_mbps,
        capabilities: capabilities(&message.capabilities)?,
    })
}

/// Of a listener of queue pairs: an address that can be reached, and the GID of that address where one is said.
fn device_address(message: &v1::Listener) -> Result<IpAddr, HelloError> {
    let wrong = || HelloError::Address { what: "rdma listener's address", text: shown(&message.address, MAX_WORD) };
    let address: IpAddr = message.address.parse().map_err(|_| wrong())?;
    let gid = match address {
        IpAddr::V4(four) => four.to_ipv6_mapped().octets(),
        IpAddr::V6(six) => six.octets(),
    };
    let agrees = message.gid.is_empty() || message.gid[..] == gid;
    if address.is_unspecified() || address.is_multicast() || !agrees { Err(wrong()) } else { Ok(address) }
}

fn at_most(what: &'static str, got: usize, limit: usize) -> Result<(), HelloError> {
    if got > limit { Err(HelloError::TooMany { what, got, limit }) } else { Ok(()) }
}

fn capabilities(list: &[String]) -> Result<Vec<String>, HelloError> {
    at_most("capabilities", list.len(), MAX_CAPABILITIES)?;
    list.iter().map(|text| word("capability", text)).collect()
}

fn word(what: &'static str, text: &str) -> Result<String, HelloError> {
    if text.len() <= MAX_WORD && text.bytes().all(|b| b.is_ascii_graphic()) {
        Ok(text.to_owned())
    } else {
        Err(HelloError::Word { what, text: shown(text, MAX_WORD) })
    }
}

/// An address with a port that one can connect to: not a wildcard, not port 0.
fn address(what: &'static str, text: &str) -> Result<SocketAddr, HelloError> {
    let usable = |address: &SocketAddr| address.port() != 0 && !address.ip().is_unspecified();
    let parsed = text.parse().ok().filter(usable);
    parsed.ok_or_else(|| HelloError::Address { what, text: shown(text, MAX_WORD) })
}

/// A peer's text for people: at most `limit` bytes of it, escaped.
pub fn shown(text: &str, limit: usize) -> String {
    Escaped(&text.as_bytes()[..text.floor_char_boundary(limit)]).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use prost::Message;

    fn request() -> v1::HelloRequest {
        v1::HelloRequest { protocol_min: PROTOCOL_MIN, protocol_max: PROTOCOL_MAX, ..Default::default() }
    }

    fn listener(id: u32, transport: &str, address: &str) -> v1::Listener {
        v1::Listener {
            id,
            fabric: "lan".into(),
            transport: transport.into(),
            address: address.into(),
            ..Default::default()
        }
    }

    fn reply() -> v1::HelloReply {
        v1::HelloReply {
            outcome: Some(v1::Outcome { code: v1::Code::Ok.into(), message: String::new() }),
            protocol: 1,
            protocol_min: 1,
            protocol_max: 1,
            software: "railfsd 0.1.0".into(),
            store: vec![7; 16].into(),
            node: "n1".into(),
            incarnation: 3,
            session: 9,
            tickets: vec![vec![1; 16].into(), vec![2; 32].into()],
            listeners: vec![listener(0, "tcp", "10.0.0.1:7421"), listener(1, "tcp", "[fd00::1]:7421")],
            control_addresses: vec!["127.0.0.1:7420".into()],
            lease_milliseconds: 2000,
            capabilities: vec!["watch".into()],
            max_fetch_bytes: 1 << 20,
        }
    }

    #[test]
    fn a_right_hello_is_read_whole() {
        let hello = Hello::check(&request(), &reply()).unwrap();
        assert_eq!((hello.store, hello.session, hello.lease), (Id([7; 16]), 9, Duration::from_secs(2)));
        assert_eq!(hello.listeners[1].transport, Transport::Tcp("[fd00::1]:7421".parse().unwrap()));
    }

    #[test]
    fn i12_a_transport_of_a_newer_server_is_kept_by_name() {
        let mut message = reply();
        message.listeners.push(listener(2, "verbs2", "gid:fe80::1"));
        let hello = Hello::check(&request(), &message).unwrap();
        assert!(matches!(&hello.listeners[2].transport, Transport::Other { name, .. } if name == "verbs2"));
    }

    #[test]
    fn an_rdma_listener_has_an_address_and_its_gid() {
        let with = |address: &str, gid: &[u8]| {
            let mut message = reply();
            let listener = v1::Listener { gid: gid.to_vec().into(), ..listener(2, "rdma", address) };
            message.listeners.push(listener);
            Hello::check(&request(), &message).map(|hello| hello.listeners[2].transport.clone())
        };
        let mapped = std::net::Ipv4Addr::new(10, 9, 0, 1).to_ipv6_mapped().octets();
        assert_eq!(with("10.9.0.1", &mapped), Ok(Transport::Rdma("10.9.0.1".parse().unwrap())));
        assert_eq!(with("fd00::1", &[]), Ok(Transport::Rdma("fd00::1".parse().unwrap())));
        for (address, gid) in [
            ("10.9.0.1:7421", &mapped[..]),
            ("0.0.0.0", &[]),
            ("host", &[]),
            ("10.9.0.2", &mapped),
            ("10.9.0.1", &[1; 3]),
        ] {
            assert!(with(address, gid).is_err(), "{address} {gid:?}");
        }
    }

    type Case = (&'static str, fn(&mut v1::HelloReply));

    #[test]
    fn each_wrong_claim_is_refused() {
        let cases: &[Case] = &[
            ("outcome", |r| r.outcome = None),
            ("denied", |r| r.outcome.as_mut().unwrap().code = v1::Code::Denied.into()),
            ("protocol 0", |r| r.protocol = 0),
            ("protocol 2", |r| r.protocol = 2),
            ("store", |r| r.store = vec![7; 15].into()),
            ("node", |r| r.node.clear()),
            ("node byte", |r| r.node = "a\nb".into()),
            ("node long", |r| r.node = "a".repeat(256)),
            ("incarnation", |r| r.incarnation = 0),
            ("session", |r| r.session = 0),
            ("ticket short", |r| r.tickets[0] = vec![1; 15].into()),
            ("ticket long", |r| r.tickets[0] = vec![1; 65].into()),
            ("tickets", |r| r.tickets = vec![vec![1; 16].into(); 257]),
            ("listeners", |r| r.listeners = (0..257).map(|id| listener(id, "tcp", "10.0.0.1:1")).collect()),
            ("listener twice", |r| r.listeners[1].id = 0),
            ("listener address", |r| r.listeners[0].address = "host:1".into()),
            ("listener wildcard", |r| r.listeners[0].address = "0.0.0.0:7421".into()),
            ("listener port", |r| r.listeners[0].address = "10.0.0.1:0".into()),
            ("transport", |r| r.listeners[0].transport.clear()),
            ("transport long", |r| r.listeners[0].transport = "t".repeat(64)),
            ("fabric", |r| r.listeners[0].fabric = "a b".into()),
            ("listener capability", |r| r.listeners[0].capabilities = vec!["\u{7f}".into()]),
            ("control address", |r| r.control_addresses[0] = "[::]:7420".into()),
            ("control addresses", |r| r.control_addresses = vec!["10.0.0.1:1".into(); 65]),
            ("lease 0", |r| r.lease_milliseconds = 0),
            ("lease", |r| r.lease_milliseconds = MAX_LEASE_MILLISECONDS + 1),
            ("capabilities", |r| r.capabilities = vec!["x".into(); 65]),
            ("fetch small", |r| r.max_fetch_bytes = 4095),
            ("fetch large", |r| r.max_fetch_bytes = (1 << 20) + 1),
        ];
        for (name, change) in cases {
            let mut message = reply();
            change(&mut message);
            assert!(Hello::check(&request(), &message).is_err(), "{name}");
        }
    }

    #[test]
    fn a_mount_is_bound_to_its_store() {
        let bound = v1::HelloRequest { store: vec![8; 16].into(), ..request() };
        assert!(matches!(Hello::check(&bound, &reply()), Err(HelloError::WrongStore { .. })));
    }

    #[test]
    fn i12_no_common_protocol_names_both_versions() {
        assert_eq!(negotiate(1, 3, 2, 5), Ok(3));
        assert_eq!(negotiate(1, 1, 1, 1), Ok(1));
        let message = negotiate(1, 2, 3, 4).unwrap_err().to_string();
        assert!(message.contains("client speaks 1 to 2, the server 3 to 4; upgrade the client"), "{message}");
        let message = negotiate(3, 4, 1, 2).unwrap_err().to_string();
        assert!(message.ends_with("upgrade the server (railfsd)"), "{message}");
        assert!(negotiate(2, 1, 1, 2).is_err() && negotiate(1, 2, 2, 1).is_err());
        let refused = v1::HelloReply {
            outcome: Some(v1::Outcome { code: v1::Code::Protocol.into(), message: "x".into() }),
            protocol_min: 7,
            protocol_max: 8,
            ..Default::default()
        };
        let message = Hello::check(&request(), &refused).unwrap_err().to_string();
        assert!(message.contains("server 7 to 8"), "{message}");
        let silent = v1::HelloReply { protocol_min: 0, protocol_max: 0, ..refused };
        assert!(matches!(Hello::check(&request(), &silent), Err(HelloError::Refused(_))));
    }

    proptest! {
        #[test]
        fn negotiation_gives_a_version_in_both_ranges(a in 0u32..6, b in 0u32..6, c in 0u32..6, d in 0u32..6) {
            match negotiate(a, b, c, d) {
                Ok(v) => prop_assert!((a..=b).contains(&v) && (c..=d).contains(&v)),
                Err(_) => prop_assert!((0..6).all(|v| !((a..=b).contains(&v) && (c..=d).contains(&v)))),
            }
        }

        #[test]
        fn random_bytes_give_a_hello_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(message) = v1::HelloReply::decode(&bytes[..]) {
                let _ = Hello::check(&request(), &message);
            }
        }

        #[test]
        fn a_damaged_hello_gives_a_value_or_an_error(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let mut bytes = reply().encode_to_vec();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            if let Ok(message) = v1::HelloReply::decode(&bytes[..]) {
                let _ = Hello::check(&request(), &message);
            }
        }
    }
}
