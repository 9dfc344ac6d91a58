//! Rails that are named by hand, in place of what discovery finds.
//!
//! Guarantees: pure; what can be said is said in one way, `FROM~TO[#N]`: from `tcp` or an RDMA device, with `@` and its address
//! where that is to be a certain one, to the address of a listener, or to a fabric of those that the server announces. An
//! error says what of it is wrong and what would be right.

use railfs_proto::limits::{MAX_LISTENERS, MAX_WORD};
use std::fmt::{self, Display};
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

/// What a rail is made of at this end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Via {
    /// A TCP connection.
    Tcp,
    /// Queue pairs of the device with this name.
    Device(String),
}

/// Where a rail leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum To {
    /// A TCP listener.
    Tcp(SocketAddr),
    /// A listener of queue pairs, by its device's address.
    Device(IpAddr),
    /// Every listener of that kind in this fabric that the server announces.
    Fabric(String),
}

/// One rail (or those to one fabric).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManualRail {
    /// See [`Via`].
    pub via: Via,
    /// The address at this end; `None`: of TCP whatever the kernel chooses, of a device the one that reaches the listener.
    pub local: Option<IpAddr>,
    /// See [`To`].
    pub to: To,
    /// The listener's number, its place among the server's rails, from 0; `None`: as announced, else the place in this list.
    pub listener: Option<u32>,
}

/// The form, for messages.
const FORM: &str = "FROM~TO[#N], such as mlx5_0@10.0.0.2~10.0.0.1, mlx5_0~FABRIC or tcp~10.0.0.1:7421";

fn word(text: &str) -> bool {
    !text.is_empty() && text.len() <= MAX_WORD && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
}

impl FromStr for ManualRail {
    type Err = String;

    fn from_str(text: &str) -> Result<ManualRail, String> {
        let wrong = |what: String| format!("\"{}\" {what}; a rail is {FORM}", text.escape_debug());
        let (from, to) = text.split_once('~').ok_or_else(|| wrong("has no ~".to_owned()))?;
        let (name, local) =
            match from.split_once('@') {
                Some((name, local)) => {
                    let address: Option<IpAddr> =
                        local.parse().ok().filter(|ip: &IpAddr| !ip.is_unspecified() && !ip.is_multicast());
                    (
                        name,
                        Some(address.ok_or_else(|| {
                            wrong(format!("has no IP address after @ (\"{}\")", local.escape_debug()))
                        })?),
                    )
                }
                None => (from, None),
            };
        let via = match name {
            "tcp" => Via::Tcp,
            device if word(device) => Via::Device(device.to_owned()),
            other => {
                return Err(wrong(format!(
                    "begins with neither tcp nor the name of a device (\"{}\")",
                    other.escape_debug()
                )));
            }
        };
        let (to, listener) = match to.split_once('#') {
            Some((to, number)) => {
                let number: Option<u32> = number.parse().ok().filter(|number| (*number as usize) < MAX_LISTENERS);
                let number =
                    number.ok_or_else(|| wrong(format!("has no number from 0 to {} after #", MAX_LISTENERS - 1)))?;
                (to, Some(number))
            }
            None => (to, None),
        };
        let usable = |ip: IpAddr| !ip.is_unspecified() && !ip.is_multicast();
        let address = match via {
            Via::Tcp => to.parse().ok().filter(|at: &SocketAddr| usable(at.ip()) && at.port() != 0).map(To::Tcp),
            Via::Device(_) => to.parse().ok().filter(|ip| usable(*ip)).map(To::Device),
        };
        let to = match address {
            Some(address) => address,
            None if via == Via::Tcp && to.parse::<IpAddr>().is_ok() => {
                return Err(wrong(format!("leads to {to} without a port")));
            }
            None if via != Via::Tcp && to.parse::<SocketAddr>().is_ok() => {
                return Err(wrong(format!("leads to {to}: a device's address has no port")));
            }
            None if !word(to) => {
                return Err(wrong(format!("leads to neither an address nor a fabric (\"{}\")", to.escape_debug())));
            }
            None if listener.is_some() => return Err(wrong("has a number although it leads to a fabric".to_owned())),
            None => To::Fabric(to.to_owned()),
        };
        let family = match &to {
            To::Tcp(address) => Some(address.is_ipv4()),
            To::Device(address) => Some(address.is_ipv4()),
            To::Fabric(_) => None,
        };
        if let (Some(local), Some(family)) = (local, family)
            && local.is_ipv4() != family
        {
            return Err(wrong("leads from IPv4 to IPv6 or the reverse".to_owned()));
        }
        Ok(ManualRail { via, local, to, listener })
    }
}

impl Display for ManualRail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.via {
            Via::Tcp => f.write_str("tcp")?,
            Via::Device(device) => f.write_str(device)?,
        }
        if let Some(local) = self.local {
            write!(f, "@{local}")?;
        }
        match &self.to {
            To::Tcp(address) => write!(f, "~{address}")?,
            To::Device(address) => write!(f, "~{address}")?,
            To::Fabric(fabric) => write!(f, "~{fabric}")?,
        }
        self.listener.map_or(Ok(()), |number| write!(f, "#{number}"))
    }
}

impl ManualRail {
    /// Several, parted by `+`.
    ///
    /// # Errors
    /// Names the one that is wrong, twice there, or one too many.
    pub fn list(text: &str) -> Result<Vec<ManualRail>, String> {
        let mut rails: Vec<ManualRail> = Vec::new();
        for text in text.split('+') {
            let rail: ManualRail = text.parse()?;
            if rails.contains(&rail) {
                return Err(format!("{rail} is listed twice"));
            }
            if rails.len() == MAX_LISTENERS {
                return Err(format!("there are more than {MAX_LISTENERS} rails"));
            }
            rails.push(rail);
        }
        Ok(rails)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_list_says_what_it_was_made_from() {
        let text = "mlx5_0@10.0.0.2~10.0.0.1+mlx5_1~fabric-b+rocep1s0f0@fd00::2~fd00::1#3+tcp~10.0.0.1:7421+tcp@10.0.0.2~[fd00::1]:7421";
        assert!(ManualRail::list(text).unwrap_err().contains("from IPv4 to IPv6"));
        let text = text.replace("tcp@10.0.0.2", "tcp@fd00::2");
        let rails = ManualRail::list(&text).unwrap();
        let again: Vec<String> = rails.iter().map(ToString::to_string).collect();
        assert_eq!(again.join("+"), text);
        assert_eq!(rails[0].via, Via::Device("mlx5_0".into()));
        assert_eq!((rails[0].local, &rails[0].to), ("10.0.0.2".parse().ok(), &To::Device("10.0.0.1".parse().unwrap())));
        assert_eq!((&rails[1].to, rails[2].listener), (&To::Fabric("fabric-b".into()), Some(3)));
        assert_eq!(
            rails[3],
            ManualRail { via: Via::Tcp, local: None, to: To::Tcp("10.0.0.1:7421".parse().unwrap()), listener: None }
        );
    }

    #[test]
    fn what_is_wrong_is_said_with_the_form() {
        for (text, what) in [
            ("", "has no ~"),
            ("mlx5_0", "has no ~"),
            ("~10.0.0.1", "neither tcp nor the name of a device"),
            ("a/b~10.0.0.1", "neither tcp nor the name of a device"),
            ("mlx5_0@x~10.0.0.1", "no IP address after @"),
            ("mlx5_0@0.0.0.0~10.0.0.1", "no IP address after @"),
            ("mlx5_0~10.0.0.1:7421", "has no port"),
            ("tcp~10.0.0.1", "without a port"),
            ("tcp~10.0.0.1:0", "neither an address nor a fabric"),
            ("mlx5_0~", "neither an address nor a fabric"),
            ("mlx5_0~10.0.0.1#256", "number from 0 to 255"),
            ("mlx5_0~fabric#1", "although it leads to a fabric"),
            ("mlx5_0~10.0.0.1+mlx5_0~10.0.0.1", "is listed twice"),
            ("mlx5_0~10.0.0.1+", "has no ~"),
        ] {
            let error = ManualRail::list(text).unwrap_err();
            assert!(error.contains(what), "{text}: {error}");
            assert!(error.contains("FROM~TO") || error.contains("twice"), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_list_that_prints_itself_or_an_error(text in "[a-z0-9_.:~@#+\\[\\]\u{e9}]{0,40}") {
            if let Ok(rails) = ManualRail::list(&text) {
                let printed: Vec<String> = rails.iter().map(ToString::to_string).collect();
                prop_assert_eq!(ManualRail::list(&printed.join("+")), Ok(rails));
            }
        }
    }
}
