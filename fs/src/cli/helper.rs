//! `mount.railfs`: what mount(8) runs for `mount -t railfs` and for lines of fstab.
//!
//! Guarantees: takes what mount(8) hands to every helper; options that are about fstab, or that say of any file system what
//! is so or does not matter here, are tolerated; one that is neither of those nor of railfs is refused, with the nearest
//! right one (with `-s` it is left out, and said so). Exit codes are mount(8)'s: 0 mounted, 1 usage, 32 not mounted.

use super::{MountArguments, start};
use crate::failure::Failure;
use crate::mount::options::{KEYS, Options, split};
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;

/// What mount(8) calls its helpers begins so.
pub(super) const PREFIX: &str = "mount.";
/// What mount(8) says of a call that was wrong, and of a mount that failed.
const USAGE: u8 = 1;
const FAILED: u8 = 32;

/// Options that mount(8), fstab and systemd keep for themselves, or that hold of every mount of ours or make no difference.
const TOLERATED: [&str; 43] = [
    "defaults",
    "auto",
    "noauto",
    "user",
    "nouser",
    "users",
    "nousers",
    "owner",
    "noowner",
    "group",
    "nogroup",
    "_netdev",
    "nofail",
    "rw",
    "dev",
    "suid",
    "exec",
    "async",
    "sync",
    "dirsync",
    "atime",
    "noatime",
    "diratime",
    "nodiratime",
    "relatime",
    "norelatime",
    "strictatime",
    "nostrictatime",
    "lazytime",
    "nolazytime",
    "mand",
    "nomand",
    "silent",
    "loud",
    "iversion",
    "noiversion",
    "symfollow",
    "quiet",
    "nolock",
    "intr",
    "hard",
    "fsname",
    "subtype",
];
/// The same for those with a value or a name of their own behind.
const TOLERATED_PREFIXES: [&str; 8] =
    ["x-", "X-", "comment=", "context=", "fscontext=", "defcontext=", "rootcontext=", "uhelper="];

const HELP: &str = "\
mount.railfs URL DIRECTORY [-sfnv] [-o OPTIONS]

mount(8) calls this for `mount -t railfs URL DIRECTORY` and for lines of fstab:
  railfs://HOST/NAMESPACE/ /mnt/data railfs _netdev,nofail 0 0

  -o OPTIONS  those of `railfs mount` (railfs(1)), and those that fstab has for every file system
  -s          leave out unknown options, do not fail for them
  -f          check everything and mount nothing
  -v          say what is done
  -n          nothing: no table of mounts is written";

/// What is to be done.
#[derive(Debug, Default, PartialEq, Eq)]
struct Call {
    source: String,
    place: PathBuf,
    options: Vec<String>,
    fake: bool,
    verbose: bool,
    sloppy: bool,
}

/// Runs the helper; `arguments` without the program's name.
pub(super) fn main(arguments: impl Iterator<Item = OsString>) -> u8 {
    let mut arguments = arguments.peekable();
    match arguments.peek().and_then(|first| first.to_str()) {
        Some("-h" | "--help") => {
            say(HELP);
            return 0;
        }
        Some("-V" | "--version") => {
            say(concat!("mount.railfs ", env!("CARGO_PKG_VERSION")));
            return 0;
        }
        _ => {}
    }
    match parse(arguments).and_then(run) {
        Ok(()) => 0,
        Err(failure) => {
            if !failure.message.is_empty() {
                eprintln!("mount.railfs: {}", failure.message);
            }
            if failure.code == 2 { USAGE } else { FAILED }
        }
    }
}

/// Nothing is the worse for a reader that has gone.
fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

fn run(call: Call) -> Result<(), Failure> {
    let (options, left_out) = ours(&call.options, call.sloppy)?;
    for option in left_out {
        eprintln!("mount.railfs: option {option} is unknown and left out (-s)");
    }
    Options::parse(&options)?;
    if call.verbose {
        say(&format!("mount.railfs: {} on {} ({})", call.source, call.place.display(), options.join(",")));
    }
    let arguments =
        MountArguments { url: call.source, mountpoint: call.place, foreground: false, options, serve_with_log: None };
    if call.fake {
        return super::parse(&arguments.url).map(drop);
    }
    start(&arguments)
}

fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Call, Failure> {
    let usage = |problem: &str| {
        Failure::usage(format!("{problem}; this is called by mount(8): mount -t railfs URL DIRECTORY [-o OPTIONS]"))
    };
    let (mut call, mut plain) = (Call::default(), Vec::new());
    let mut arguments = arguments.peekable();
    let text = |argument: Option<OsString>| argument.and_then(|argument| argument.into_string().ok());
    while let Some(argument) = arguments.next() {
        let flags = argument.to_str().and_then(|flags| flags.strip_prefix('-')).filter(|flags| !flags.is_empty());
        let Some(flags) = flags else {
            plain.push(argument);
            continue;
        };
        for (at, flag) in flags.char_indices() {
            match flag {
                'f' => call.fake = true,
                'v' => call.verbose = true,
                's' => call.sloppy = true,
                // No table of mounts is written.
                'n' => {}
                'o' | 't' | 'N' => {
                    let rest = &flags[at + 1..];
                    let value = if rest.is_empty() { text(arguments.next()) } else { Some(rest.to_owned()) };
                    let value = value.ok_or_else(|| usage(&format!("-{flag} needs a value, as text")))?;
                    match flag {
                        'o' => call.options.push(value),
                        'N' => return Err(usage("-N: mounting in another namespace is not supported: use nsenter")),
                        _ => {}
                    }
                    break;
                }
                other => return Err(usage(&format!("there is no flag -{other}"))),
            }
        }
    }
    let mut plain = plain.into_iter();
    let (Some(source), Some(place), None) = (plain.next(), plain.next(), plain.next()) else {
        return Err(usage("a URL and a directory are wanted"));
    };
    call.source = text(Some(source)).ok_or_else(|| usage("the URL is not text"))?;
    call.place = place.into();
    Ok(call)
}

/// The options that are for the mount itself, escaped again, and those that were left out though nobody knows them.
fn ours(lists: &[String], sloppy: bool) -> Result<(Vec<String>, Vec<String>), Failure> {
    let (mut ours, mut left_out) = (Vec::new(), Vec::new());
    // mount(8) separates by commas and knows quotes, but no escapes; an option that is empty is one comma too many.
    for option in lists.iter().flat_map(|list| split(list)).filter(|option| !option.is_empty()) {
        let key = option.split('=').next().unwrap_or_default();
        if key == "remount" {
            return Err(Failure::failed("a railfs mount cannot be changed in place: unmount it and mount it again"));
        }
        let tolerated = TOLERATED_PREFIXES.iter().any(|prefix| option.starts_with(prefix)) || TOLERATED.contains(&key);
        if KEYS.contains(&key) {
            ours.push(option.replace('\\', "\\\\").replace(',', "\\,"));
        } else if !tolerated && sloppy {
            left_out.push(option);
        } else if !tolerated {
            // Says what is nearest.
            Options::parse(&[option])?;
        }
    }
    Ok((ours, left_out))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(arguments: &[&str]) -> Result<Call, Failure> {
        parse(arguments.iter().map(OsString::from))
    }

    #[test]
    fn what_mount_hands_over() {
        let url = "railfs://h/ns/";
        let want =
            Call { source: url.into(), place: "/mnt".into(), options: vec!["rw,arena=1GiB".into()], ..Call::default() };
        assert_eq!(call(&[url, "/mnt", "-o", "rw,arena=1GiB"]).unwrap(), want);
        assert_eq!(call(&["-orw,arena=1GiB", "-n", "-t", "railfs", url, "/mnt"]).unwrap(), want);
        let want = Call { fake: true, verbose: true, sloppy: true, ..want };
        assert_eq!(call(&[url, "/mnt", "-sfnv", "-o", "rw,arena=1GiB"]).unwrap(), want);
        for wrong in [&["-o"][..], &[url], &[url, "/a", "/b"], &[url, "/mnt", "-x"], &[url, "/mnt", "-N", "/proc/1/ns"]]
        {
            assert_eq!(call(wrong).unwrap_err().code, 2, "{wrong:?}");
        }
    }

    #[test]
    fn s04_options_of_fstab_are_tolerated_and_typing_errors_are_not() {
        let of = |list: &str, sloppy| ours(&[list.to_owned()], sloppy);
        let fstab = "ro,_netdev,nofail,noatime,x-systemd.automount,x-systemd.requires=network-online.target,arena=1GiB,\
                     comment=a,defaults,user,allow_other,";
        assert_eq!(of(fstab, false), Ok((vec!["ro".into(), "arena=1GiB".into(), "allow_other".into()], vec![])));
        let failure = of("ro,arean=1GiB", false).unwrap_err();
        assert!(failure.message.contains("did you mean arena?"), "{failure}");
        assert_eq!(of("ro,arean=1GiB", true), Ok((vec!["ro".into()], vec!["arean=1GiB".into()])));
        assert_eq!(of("log=/a\\,b", false), Ok((vec!["log=/a\\,b".into()], vec![])));
        assert!(of("remount,ro", false).unwrap_err().message.contains("mount it again"));
        for key in TOLERATED {
            assert!(!KEYS.contains(&key), "{key} is an option of railfs, and must not be dropped");
        }
    }
}
