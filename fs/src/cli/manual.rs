//! Manual pages: of the command line from its own definition, of the files from their page in docs/.
//!
//! Guarantees: nothing is said twice: what a page lists is what the parser knows, or what docs/configuration.md says, which
//! tests compare with the code.

use crate::failure::{Failure, io};
use clap::CommandFactory;
use clap_mangen::roff::{Roff, bold, roman};
use std::path::Path;

/// The page that both files of configuration are described on.
const PAGE: &str = include_str!("../../../docs/configuration.md");

/// Writes `railfs.1`, a page for each subcommand, and `railfs.toml.5`.
pub(super) fn write(directory: &Path) -> Result<(), Failure> {
    let failed = |error| io(directory.display(), &error);
    std::fs::create_dir_all(directory).map_err(failed)?;
    clap_mangen::generate_to(super::Cli::command(), directory).map_err(failed)?;
    let text = options_page().to_roff();
    std::fs::write(directory.join("railfs.toml.5"), text).map_err(failed)
}

/// A cell of a table in Markdown as plain text.
fn plain(cell: &str) -> String {
    cell.replace('`', "").replace("\\|", "|").trim().to_owned()
}

/// The rows of the first table below a heading.
fn rows(heading: &str) -> Vec<Vec<String>> {
    let below = PAGE.split_once(&format!("\n## {heading}\n")).map_or("", |(_, below)| below);
    let table = below.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    table.skip(2).map(|line| line.trim_matches('|').split(" | ").map(plain).collect()).collect()
}

fn options_page() -> Roff {
    let mut page = Roff::new();
    page.control("TH", ["RAILFS.TOML", "5", "", "railfs", "File Formats"]);
    page.control("SH", ["NAME"]).text([roman("railfs.toml - a railfs mount as a service")]);
    page.control("SH", ["DESCRIPTION"]);
    page.text([roman(
        "/etc/railfs/mounts/NAME.toml describes the mount that the unit railfs@NAME.service makes. It is TOML: url (what to \
         mount), mountpoint (where, an absolute path) and a table [options]. Unknown keys are errors.",
    )]);
    page.control("SH", ["OPTIONS"]);
    page.text([roman("In [options], and in a list after -o of railfs mount and of mount(8).")]);
    for row in rows("Mount") {
        let cell = |place: usize| row.get(place).map_or("", String::as_str);
        page.control("TP", []).text([bold(cell(0)), roman(format!(" (default: {})", cell(1)))]);
        let range = if cell(2).is_empty() { String::new() } else { format!(" Values: {}.", cell(2)) };
        page.text([roman(format!("{}{range}", cell(3)))]);
    }
    page.control("SH", ["SEE ALSO"]).text([roman("railfs(1), mount.railfs(8)")]);
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_made_of_everything_there_is() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path()).unwrap();
        let page = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
        assert!(page("railfs.1").contains("mount"));
        assert!(page("railfs-mount.1").contains("config"));
        assert!(page("railfs-umount.1").contains("lazy"));
        assert!(!dir.path().join("railfs-probe.1").exists(), "what is hidden has no page");
        let options = page("railfs.toml.5");
        for key in crate::mount::options::KEYS {
            assert!(options.contains(&format!("\\fB{key}\\fR")), "{key} is missing in {options}");
        }
    }
}
