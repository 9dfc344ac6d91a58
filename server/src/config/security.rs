//! `[security]` and `[[namespace]]`: pure, as the rest of the parser.

use super::parse::{Section, Source, Value, absolute};
use super::{ConfigError, MAX_NAMESPACES};
use crate::access::{ANY, Identity, NamespaceConfig};
use railfs_engine::tls::Files;
use railfs_proto::name::Namespace;

/// Whether plain connections are accepted from everywhere; the files of mutual TLS.
pub(super) fn security(section: &Section<'_>) -> Result<(bool, Option<Files>), ConfigError> {
    let insecure = section.boolean("insecure")?.unwrap_or(false);
    let names = ["cert", "key", "client_ca"];
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        if let Some((text, value)) = section.string(name, "the absolute path of a PEM file")? {
            found.push((name, value, absolute(section, value, name, text)?));
        }
    }
    if let (Some((name, value, _)), Some(missing)) =
        (found.first(), names.iter().find(|name| found.iter().all(|(there, ..)| there != *name)))
    {
        return Err(section.error(value, name, format!("needs the others beside it, and {missing} is missing")));
    }
    let mut paths = found.into_iter();
    let (Some((_, value, cert)), Some((_, _, key)), Some((_, _, ca))) = (paths.next(), paths.next(), paths.next())
    else {
        return Ok((insecure, None));
    };
    if insecure {
        let problem = "with it the control plane takes only TLS connections: leave `insecure = true` out";
        return Err(section.error(value, "cert", problem));
    }
    Ok((false, Some(Files { cert, key, ca })))
}

/// Readers and writers.
pub(super) fn namespaces(
    source: &Source<'_>,
    top: &Section<'_>,
    tls: bool,
) -> Result<Vec<NamespaceConfig>, ConfigError> {
    let Some(value) = top.get("namespace") else { return Ok(Vec::new()) };
    let list = value.get_ref().as_array().ok_or_else(|| top.wrong(value, "namespace", "written as [[namespace]]"))?;
    if !tls && !list.is_empty() {
        let problem = "without TLS nobody can tell who a client is: set cert, key and client_ca under [security]";
        return Err(top.error(value, "namespace", problem));
    }
    if list.len() > MAX_NAMESPACES {
        return Err(top.error(value, "namespace", format!("there are more than {MAX_NAMESPACES}")));
    }
    let mut all: Vec<NamespaceConfig> = Vec::with_capacity(list.len());
    for item in list.iter() {
        let table = item.get_ref().as_table().ok_or_else(|| top.wrong(item, "namespace", "a table, [[namespace]]"))?;
        let section = Section::new(source, "namespace", Some(table))?;
        let want = "the name of a namespace, or \"*\" for those without an entry";
        let Some((name, value)) = section.string("name", want)? else {
            return Err(source.error(Some(item.span()), "namespace.name", format!("is missing; it must be {want}")));
        };
        if name != ANY {
            Namespace::new(name).map_err(|error| section.error(value, "name", error.to_string()))?;
        }
        if all.iter().any(|other| other.name == name) {
            return Err(section.error(value, "name", format!("\"{name}\" has an entry already: put both into one")));
        }
        let (readers, writers) = (identities(&section, "readers")?, identities(&section, "writers")?);
        all.push(NamespaceConfig { name: name.to_owned(), readers, writers });
    }
    Ok(all)
}

fn identities(section: &Section<'_>, key: &str) -> Result<Vec<String>, ConfigError> {
    let Some(value) = section.get(key) else { return Ok(Vec::new()) };
    let want = "a list of names of clients, or of \"*\" for all of them";
    let list = value.get_ref().as_array().ok_or_else(|| section.wrong(value, key, want))?;
    let name = |item: Value<'_>| {
        let name = item.get_ref().as_str().ok_or_else(|| section.wrong(item, key, want))?;
        if name != ANY {
            Identity::new(name).map_err(|problem| section.error(item, key, problem))?;
        }
        Ok(name.to_owned())
    };
    list.iter().map(name).collect()
}
