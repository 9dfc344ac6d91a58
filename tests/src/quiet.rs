//! What must hold when a test is over: nothing in flight, nothing held, nothing on disk that no record names.
//!
//! Guarantees: each is waited for (deadlines of what died must run out), and named if it does not come true.

use crate::cluster::Cluster;
use crate::mount::Mount;
use crate::process::{descriptors, threads};
use crate::wait::eventually;
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::Duration;

/// A put whose client died is aborted after 30 s without progress; what it left is gone soon after.
const LIMIT: Duration = Duration::from_secs(60);

/// Components that a record names, as files are named: version and number of components.
fn named(cluster: &Cluster) -> Result<BTreeMap<u64, String>, String> {
    let output = cluster.cli(&["ls", "-R", "--json", &cluster.url("")]);
    match output.code {
        Some(0) => {}
        Some(3) => return Ok(BTreeMap::new()), // Nobody has put anything yet.
        _ => return Err(format!("ls: {}", output.err())),
    }
    let mut versions = BTreeMap::new();
    for line in output.out().lines() {
        let entry: Value = serde_json::from_str(line).map_err(|error| format!("{error}: {line}"))?;
        let version = entry["version"].as_u64().ok_or_else(|| format!("no version: {line}"))?;
        versions.insert(version, entry["url"].to_string());
    }
    Ok(versions)
}

/// Component files in the stripe directories (outside of `lost/`), by version.
///
/// # Errors
/// A directory cannot be read.
pub fn components(cluster: &Cluster) -> Result<BTreeMap<u64, Vec<String>>, String> {
    let mut found: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    for directory in &cluster.directories {
        let folder = directory.join("components");
        let entries = std::fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        for entry in entries {
            let name = entry.map_err(|error| error.to_string())?.file_name().to_string_lossy().into_owned();
            let version = name.split('.').next().and_then(|version| version.parse().ok()).unwrap_or(0);
            found.entry(version).or_default().push(folder.join(name).display().to_string());
        }
    }
    Ok(found)
}

/// Component files that no record names, and versions of which no component is there. The server must be quiet; superseded
/// versions count until their retention is over.
///
/// # Errors
/// Either cannot be asked for.
pub fn debris(cluster: &Cluster) -> Result<Vec<String>, String> {
    let files = components(cluster)?;
    let named = named(cluster)?;
    let mut wrong: Vec<String> =
        files.iter().filter(|(version, _)| !named.contains_key(version)).flat_map(|(_, files)| files.clone()).collect();
    wrong.extend(
        named
            .iter()
            .filter(|(version, _)| !files.contains_key(version))
            .map(|(v, url)| format!("missing: {url} ({v})")),
    );
    Ok(wrong)
}

fn zero(value: &Value, paths: &[&str]) -> Result<(), String> {
    for path in paths {
        let found = value.pointer(path).ok_or_else(|| format!("{path} is not in the status"))?;
        if found != 0 {
            return Err(format!("{path} is {found}"));
        }
    }
    Ok(())
}

fn quiet_mount(mount: &Mount) -> Result<(), String> {
    let status = mount.try_status()?;
    zero(
        &status,
        &[
            "/arena/exposed",
            "/arena/quarantined",
            "/counters/reads_now",
            "/counters/fetches_now",
            "/counters/checks_now",
            "/counters/reads_waiting_now",
            "/counters/committed_bytes_now",
            "/counters/put_bytes_now",
            "/counters/pins_now",
            "/counters/pins_unsaid_now",
            "/mount/open_files",
            "/mount/filled_versions",
            "/mount/open_directories",
            "/mount/in_flight",
        ],
    )?;
    for rail in status["rails"].as_array().into_iter().flatten() {
        zero(rail, &["/in_flight", "/held_bytes"]).map_err(|why| format!("rail {}: {why}", rail["name"]))?;
        if rail["state"] != "up" {
            return Err(format!("rail {} is {}: {}", rail["name"], rail["state"], rail["reason"]));
        }
    }
    let (files, tasks) = mount.base();
    let now = (descriptors(mount.pid()), threads(mount.pid()));
    // Connections come and go by one or two; what leaks does not stop there.
    if now.0 > files + 4 || now.1 > tasks + 4 {
        return Err(format!("descriptors and threads: {now:?}, {:?} when it was new", mount.base()));
    }
    Ok(())
}

fn quiet_server(cluster: &Cluster) -> Result<(), String> {
    let status = cluster.try_status()?;
    zero(&status, &["/server/puts", "/server/memory_used_bytes", "/server/counters/superseded_versions"])?;
    zero(&status, &["/server/counters/pins", "/server/counters/pin_leases"])?;
    if status["server"]["publishing"] != "ok" {
        return Err(format!("publishing: {}", status["server"]["publishing"]));
    }
    for directory in status["directories"].as_array().into_iter().flatten() {
        if directory["state"] != "ok" {
            return Err(format!("directory {} is {}", directory["path"], directory["state"]));
        }
    }
    let debris = debris(cluster)?;
    if debris.is_empty() { Ok(()) } else { Err(format!("debris: {}", debris.join(", "))) }
}

/// All of it, of the server and these mounts.
///
/// # Panics
/// Something is not, and does not become so.
pub fn assert_quiet(cluster: &Cluster, mounts: &[&Mount]) {
    for mount in mounts {
        eventually(&format!("{} is quiet", mount.path.display()), LIMIT, || quiet_mount(mount));
    }
    eventually("the server is quiet", LIMIT, || quiet_server(cluster));
}
