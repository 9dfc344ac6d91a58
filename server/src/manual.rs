//! Manual pages: `railfsd.8` from the command line's own definition, `railfsd.toml.5` from the page in docs/.
//!
//! Guarantees: nothing is said twice: tests compare docs/configuration.md with the parser.

use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use std::io;
use std::path::Path;

const PAGE: &str = include_str!("../../docs/configuration.md");

/// Writes both pages.
///
/// # Errors
/// A file cannot be written.
pub fn write(command: Command, directory: &Path) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    let mut text = Vec::new();
    Man::new(command).section("8").render(&mut text)?;
    std::fs::write(directory.join("railfsd.8"), text)?;
    std::fs::write(directory.join("railfsd.toml.5"), keys_page().to_roff())
}

fn keys_page() -> Roff {
    let plain = |cell: &str| cell.replace('`', "").replace("\\|", "|").trim().to_owned();
    let below = PAGE.split_once("\n## Server\n").map_or("", |(_, below)| below);
    let table = below.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    let mut page = Roff::new();
    page.control("TH", ["RAILFSD.TOML", "5", "", "railfs", "File Formats"]);
    page.control("SH", ["NAME"]).text([roman("railfsd.toml - the configuration of the railfs storage server")]);
    page.control("SH", ["DESCRIPTION"]).text([roman(
        "TOML; a key a.b stands as b in the table [a], one of rail in a table [[rail]], of which there may be several. \
         Unknown keys are errors; railfsd check --config FILE names them, and prints what the file comes to.",
    )]);
    page.control("SH", ["KEYS"]);
    for line in table.skip(2) {
        let row: Vec<String> = line.trim_matches('|').split(" | ").map(plain).collect();
        let cell = |place: usize| row.get(place).map_or("", String::as_str);
        page.control("TP", []).text([bold(cell(0)), roman(format!(" (default: {})", cell(1)))]);
        page.text([roman(format!("{} Values: {}.", cell(3), cell(2)))]);
    }
    page.control("SH", ["SEE ALSO"]).text([roman("railfsd(8)")]);
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_the_file_has_every_key() {
        let dir = tempfile::tempdir().unwrap();
        write(Command::new("railfsd"), dir.path()).unwrap();
        let page = std::fs::read_to_string(dir.path().join("railfsd.toml.5")).unwrap();
        for key in ["node", "stripe_dirs", "control.listen", "memory.max_registered", "security.insecure"] {
            assert!(page.contains(&format!("\\fB{key}\\fR")), "{key}: {page}");
        }
        assert!(dir.path().join("railfsd.8").exists());
    }
}
