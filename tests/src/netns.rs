//! A network of a test's own: two namespaces, joined by one pair of virtual links for each rail.
//!
//! Guarantees: names are unique on the machine; both namespaces (and so their links) are removed when the value is
//! dropped. The server has 10.77.R.1, the client 10.77.R.2, for rail R from 1 on.

use crate::process::run;
use std::net::IpAddr;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(20);
static NEXT: AtomicU32 = AtomicU32::new(0);

/// See the module.
#[derive(Debug)]
pub struct Network {
    server: String,
    client: String,
}

/// Which side a program runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// `railfsd`.
    Server,
    /// `railfs`.
    Client,
}

/// What is wrong with a rail that is up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// A few megabytes a second, and late.
    Slow,
    /// One packet in twelve is lost.
    Lossy,
}

fn tool(name: &str, arguments: &[&str]) -> Result<(), String> {
    let shown = format!("{name} {}", arguments.join(" "));
    let output = run(Command::new(name).args(arguments), LIMIT);
    if output.code == Some(0) { Ok(()) } else { Err(format!("{shown}: {}", output.err().trim())) }
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    tool("ip", arguments)
}

/// Why this machine cannot have one; `None`: it can.
pub fn cannot() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("network namespaces need root".to_owned());
    }
    for program in ["ip", "nsenter"] {
        if Command::new(program).arg("--version").output().is_err() && Command::new(program).arg("-V").output().is_err()
        {
            return Some(format!("{program} is not installed"));
        }
    }
    Network::new(1).err().map(|error| format!("network namespaces with virtual links: {error}"))
}

impl Network {
    /// For so many rails, all up.
    ///
    /// # Errors
    /// What the kernel or `ip` said.
    pub fn new(rails: usize) -> Result<Network, String> {
        let name = format!("railfs-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let network = Network { server: format!("{name}-s"), client: format!("{name}-c") };
        for namespace in [&network.server, &network.client] {
            ip(&["netns", "add", namespace])?;
            ip(&["-n", namespace, "link", "set", "lo", "up"])?;
        }
        for rail in 1..=rails {
            let (ours, theirs) = (format!("s{rail}"), format!("c{rail}"));
            let pair = ["link", "add", &ours, "netns", &network.server, "type", "veth"];
            ip(&[&pair[..], &["peer", "name", &theirs, "netns", &network.client]].concat())?;
            let ends = [(&network.server, &ours, 1), (&network.client, &theirs, 2)];
            for (namespace, link, host) in ends {
                ip(&["-n", namespace, "addr", "add", &format!("10.77.{rail}.{host}/24"), "dev", link])?;
                ip(&["-n", namespace, "link", "set", link, "up"])?;
            }
        }
        Ok(network)
    }

    /// The server's address of a rail.
    pub fn address(rail: usize) -> IpAddr {
        let rail = u8::try_from(rail).unwrap_or(0);
        IpAddr::from([10, 77, rail, 1])
    }

    /// A command that runs inside; only its network is another, mounts and files are everybody's.
    pub fn command(&self, side: Side, program: &std::path::Path) -> Command {
        let namespace = if side == Side::Server { &self.server } else { &self.client };
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/var/run/netns/{namespace}")).arg("--").arg(program);
        command
    }

    /// Takes the server's link of a rail down, or up again.
    ///
    /// # Panics
    /// `ip` failed.
    pub fn link(&self, rail: usize, up: bool) {
        let state = if up { "up" } else { "down" };
        ip(&["-n", &self.server, "link", "set", &format!("s{rail}"), state]).unwrap_or_else(|error| panic!("{error}"));
    }

    /// Makes what comes over a rail slow or incomplete: by `netem`, and where the kernel lacks it by a filter of the same end.
    ///
    /// # Errors
    /// What `tc` and `nft` said: the kernel has neither way.
    pub fn trouble(&self, rail: usize, trouble: Trouble) -> Result<(), String> {
        let link = format!("s{rail}");
        let root = ["-n", &self.server, "qdisc", "add", "dev", &link, "root"];
        let netem: &[&str] = match trouble {
            Trouble::Slow => &["netem", "delay", "40ms", "10ms", "rate", "80mbit"],
            Trouble::Lossy => &["netem", "loss", "8%"],
        };
        let Err(first) = tool("tc", &[&root[..], netem].concat()) else { return Ok(()) };
        let second = match trouble {
            Trouble::Slow => {
                tool("tc", &[&root[..], &["tbf", "rate", "24mbit", "burst", "16kb", "latency", "100ms"]].concat())
            }
            Trouble::Lossy => {
                let rules = format!(
                    "add table inet lossy; add chain inet lossy in {{ type filter hook input priority 0; }}; \
                     add rule inet lossy in iifname c{rail} numgen random mod 100 < 8 drop"
                );
                tool("ip", &["netns", "exec", &self.client, "nft", &rules])
            }
        };
        second.map_err(|second| format!("{first}; {second}"))
    }

    /// Ends every trouble of a rail.
    ///
    /// # Panics
    /// It cannot be ended.
    pub fn no_trouble(&self, rail: usize, trouble: Trouble) {
        let link = format!("s{rail}");
        let mut ended = tool("tc", &["-n", &self.server, "qdisc", "del", "dev", &link, "root"]);
        if trouble == Trouble::Lossy && ended.is_err() {
            ended = tool("ip", &["netns", "exec", &self.client, "nft", "delete table inet lossy"]);
        }
        ended.unwrap_or_else(|error| panic!("{error}"));
    }

    /// Takes the server's address of a rail away, or gives it back.
    ///
    /// # Panics
    /// `ip` failed.
    pub fn have_address(&self, rail: usize, there: bool) {
        let verb = if there { "add" } else { "del" };
        let address = format!("10.77.{rail}.1/24");
        ip(&["-n", &self.server, "addr", verb, &address, "dev", &format!("s{rail}")])
            .unwrap_or_else(|error| panic!("{error}"));
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for namespace in [&self.server, &self.client] {
            let _ = Command::new("ip").args(["netns", "del", namespace]).output();
        }
    }
}
