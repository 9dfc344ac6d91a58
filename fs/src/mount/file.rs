//! The file that describes a mount for a service: `/etc/railfs/mounts/NAME.toml`.
//!
//! Guarantees: parsing is pure; an unknown key, a missing one and a value that is not wanted are errors that name the file,
//! the line, the key and what would be right; options are those of `-o`, by the same parser.

use super::options::{KEYS, Options};
use crate::failure::Failure;
use railfs_proto::url::Url;
use std::ops::Range;
use std::path::{Path, PathBuf};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Keys at the top of the file.
pub const TOP: [&str; 3] = ["url", "mountpoint", "options"];

/// What a file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountFile {
    /// What to mount; it parses.
    pub url: String,
    /// Where, from / on.
    pub mountpoint: PathBuf,
    /// How, each as one option of `-o` with its commas escaped; they parse.
    pub options: Vec<String>,
}

struct Source<'a> {
    text: &'a str,
    file: &'a str,
}

type Value<'a> = Spanned<DeValue<'a>>;

impl Source<'_> {
    fn error(&self, span: Option<Range<usize>>, key: &str, problem: impl std::fmt::Display) -> Failure {
        let line = span.map(|span| self.text.as_bytes().iter().take(span.start).filter(|b| **b == b'\n').count() + 1);
        let line = line.map(|line| format!(":{line}")).unwrap_or_default();
        let key = if key.is_empty() { String::new() } else { format!(": {key}") };
        Failure::usage(format!("{}{line}{key}: {problem}", self.file))
    }

    fn string<'t>(&self, table: &'t DeTable<'t>, key: &str, want: &str) -> Result<(&'t str, Range<usize>), Failure> {
        let value = table.iter().find(|(known, _)| known.get_ref().as_ref() == key).map(|(_, value)| value);
        let value = value.ok_or_else(|| self.error(None, key, format!("is missing; it must be {want}")))?;
        match value.get_ref().as_str() {
            Some(text) if !text.is_empty() => Ok((text, value.span())),
            Some(_) => Err(self.error(Some(value.span()), key, format!("is empty; it must be {want}"))),
            None => Err(self.wrong(value, key, want)),
        }
    }

    fn wrong(&self, value: &Value<'_>, key: &str, want: &str) -> Failure {
        let kind = value.get_ref().type_str();
        self.error(Some(value.span()), key, format!("is a TOML {kind}; it must be {want}"))
    }
}

/// The nearest right key, with its table.
fn nearest(wrong: &str, in_options: bool) -> String {
    let far = |key: &str, elsewhere: bool| strsim::damerau_levenshtein(wrong, key) + usize::from(elsewhere);
    let top = TOP.iter().map(|key| (far(key, in_options), (*key).to_owned()));
    let options = KEYS.iter().map(|key| (far(key, !in_options), format!("options.{key}")));
    top.chain(options).min().map(|(_, key)| key).unwrap_or_default()
}

/// Parses a file's text; `file` is only named.
///
/// # Errors
/// Exit code 2; see the module.
pub fn parse(text: &str, file: &str) -> Result<MountFile, Failure> {
    let source = Source { text, file };
    let document = DeTable::parse(text).map_err(|error| source.error(error.span(), "", error.message()))?;
    let top = document.get_ref();
    for (key, _) in top.iter() {
        let word: &str = key.get_ref();
        if !TOP.contains(&word) {
            let problem = format!("there is no such key; did you mean {}?", nearest(word, false));
            return Err(source.error(Some(key.span()), word, problem));
        }
    }
    let (url, span) = source.string(top, "url", "a URL, such as \"railfs://host/namespace/\"")?;
    Url::parse(url).map_err(|error| source.error(Some(span), "url", error))?;
    let (mountpoint, span) = source.string(top, "mountpoint", "an absolute path")?;
    if !mountpoint.starts_with('/') {
        let problem = format!("\"{mountpoint}\" is a relative path: write it from / on");
        return Err(source.error(Some(span), "mountpoint", problem));
    }
    let mut options = Vec::new();
    for (key, value) in top.iter().filter(|(key, _)| key.get_ref().as_ref() == "options") {
        let want = "a table, [options]";
        let table = value.get_ref().as_table().ok_or_else(|| source.wrong(value, key.get_ref(), want))?;
        for (key, value) in table.iter() {
            options.extend(option(&source, key, value)?);
        }
    }
    Options::parse(&options).map_err(|failure| source.error(None, "options", failure.message))?;
    Ok(MountFile { url: url.to_owned(), mountpoint: PathBuf::from(mountpoint), options })
}

/// A number of TOML as its option is written: in decimal, a `umask` as the octal digits it consists of. One that is written
/// plainly stays as it is: `umask = 22` are these digits, as on a command line.
fn digits(name: &str, text: &str, radix: u32) -> String {
    match u64::from_str_radix(text, radix) {
        Ok(value) if radix != 10 && name == "umask" => format!("{value:o}"),
        Ok(value) if radix != 10 => value.to_string(),
        _ => text.to_owned(),
    }
}

/// One option as `-o` takes it; `None`: it is off.
fn option(
    source: &Source<'_>,
    key: &Spanned<std::borrow::Cow<'_, str>>,
    value: &Value<'_>,
) -> Result<Option<String>, Failure> {
    let name: &str = key.get_ref();
    let path = format!("options.{name}");
    if !KEYS.contains(&name) {
        let problem = format!("there is no such option; did you mean {}?", nearest(name, true));
        return Err(source.error(Some(key.span()), &path, problem));
    }
    let escaped = |text: &str| format!("{name}={}", text.replace('\\', "\\\\").replace(',', "\\,"));
    let given = match value.get_ref() {
        DeValue::Boolean(true) => Some(name.to_owned()),
        DeValue::Boolean(false) => None,
        DeValue::String(text) => Some(escaped(text)),
        DeValue::Integer(number) => Some(escaped(&digits(name, number.as_str(), number.radix()))),
        _ => return Err(source.wrong(value, &path, "true, false, a string or a whole number")),
    };
    // What is off is checked as well: "arena = false" is no option.
    let checked = given.clone().unwrap_or_else(|| name.to_owned());
    let problem = |failure: Failure| {
        let prefix = format!("option {name}: ");
        let text = failure.message.strip_prefix(&prefix).unwrap_or(&failure.message).to_owned();
        source.error(Some(value.span()), &path, text)
    };
    Options::parse(&[checked]).map_err(problem)?;
    Ok(given)
}

impl MountFile {
    /// Reads and parses a file.
    ///
    /// # Errors
    /// As [`parse`], and when it cannot be read.
    pub fn load(path: &Path) -> Result<MountFile, Failure> {
        let file = path.display().to_string();
        let text = std::fs::read_to_string(path);
        parse(&text.map_err(|error| Failure::usage(format!("{file}: cannot be read: {error}")))?, &file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "url = \"railfs://h/ns/\"\nmountpoint = \"/mnt/a b\"\n";

    #[test]
    fn numbers_mean_what_toml_says_however_they_are_written() {
        for (written, want) in [
            ("uid = 0x10", "uid=16"),
            ("gid = 0o17", "gid=15"),
            ("workers = 0b11", "workers=3"),
            ("umask = 0o22", "umask=22"),
            ("umask = 0x1b", "umask=33"),
            ("umask = 22", "umask=22"),
            ("arena = 0x1000_0000", "arena=268435456"),
        ] {
            let text = format!("url = \"railfs://h/ns/\"\nmountpoint = \"/m\"\n[options]\n{written}\n");
            assert_eq!(parse(&text, "m.toml").unwrap().options, [want], "{written}");
        }
    }

    #[test]
    fn a_file_says_what_the_command_line_would() {
        let plain = parse(GOOD, "m.toml").unwrap();
        let want = MountFile { url: "railfs://h/ns/".into(), mountpoint: "/mnt/a b".into(), options: vec![] };
        assert_eq!(plain, want);
        let text = format!(
            "{GOOD}[options]\nallow_other = true\nnoexec = false\narena = \"64 MiB\"\nthreads = 3\nlog = \"/a,b\\\\c\"\n"
        );
        let mut options = parse(&text, "m.toml").unwrap().options;
        options.sort();
        assert_eq!(options, ["allow_other", "arena=64 MiB", "log=/a\\,b\\\\c", "threads=3"]);
        let parsed = Options::parse(&options).unwrap();
        assert_eq!((parsed.arena, parsed.threads, parsed.log), (64 << 20, 3, Some("/a,b\\c".into())));
    }

    #[test]
    fn s19_what_is_wrong_is_named_with_file_line_key_and_what_would_be_right() {
        let cases = [
            ("", "m.toml: url: is missing"),
            ("url = \"railfs://h/ns/\"\n", "m.toml: mountpoint: is missing; it must be an absolute path"),
            ("url = 7\n", "m.toml:1: url: is a TOML integer"),
            ("url = \"\"\n", "m.toml:1: url: is empty"),
            ("url = \"http://h/\"\n", "m.toml:1: url: "),
            ("\nurll = \"railfs://h/ns/\"\n", "m.toml:2: urll: there is no such key; did you mean url?"),
            ("arena = \"1 GiB\"\n", "m.toml:1: arena: there is no such key; did you mean options.arena?"),
            ("url = \"railfs://h/ns/\"\nmountpoint = \"mnt\"\n", "m.toml:2: mountpoint: \"mnt\" is a relative path"),
            ("url = \n", "m.toml:1: "),
        ];
        let options = [
            ("arean = \"1 GiB\"", "m.toml:4: options.arean: there is no such option; did you mean options.arena?"),
            ("urll = \"x\"", "m.toml:4: options.urll: there is no such option; did you mean url?"),
            ("arena = \"1 GiBB\"", "m.toml:4: options.arena: "),
            ("arena = 1048576", "m.toml:4: options.arena: 1 MiB is too small"),
            ("arena = true", "m.toml:4: options.arena: needs a value"),
            ("arena = false", "m.toml:4: options.arena: needs a value"),
            ("nonempty = 1", "m.toml:4: options.nonempty: takes no value"),
            ("threads = -1", "m.toml:4: options.threads: \"-1\" is not a number from 1 to 64"),
            ("threads = [1]", "m.toml:4: options.threads: is a TOML array"),
        ];
        let options = options.map(|(line, want)| (format!("{GOOD}[options]\n{line}\n"), want));
        for (text, want) in cases.map(|(text, want)| (text.to_owned(), want)).into_iter().chain(options) {
            let failure = parse(&text, "m.toml").unwrap_err();
            assert!(failure.message.starts_with(want), "{text:?}: {failure}");
            assert_eq!(failure.code, 2);
        }
        let gone = MountFile::load(Path::new("/nonexistent/m.toml")).unwrap_err();
        assert!(gone.message.starts_with("/nonexistent/m.toml: cannot be read: "), "{gone}");
    }

    #[test]
    fn the_page_and_the_example_say_the_same_keys() {
        let page = include_str!("../../../docs/operations.md");
        for key in TOP {
            assert!(page.contains(&format!("| `{key}` |")), "docs/operations.md does not list {key}");
        }
        let example = include_str!("../../../packaging/mount.toml");
        parse(example, "mount.toml").unwrap();
        // Every line that is commented out is right as well.
        let all: String =
            example.lines().map(|line| format!("{}\n", line.strip_prefix("#= ").unwrap_or(line))).collect();
        assert!(!parse(&all, "mount.toml").unwrap().options.is_empty());
    }
}
