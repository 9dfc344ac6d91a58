//! Which certificate a client shows, and whom it believes: from options or flags, else from the environment.
//!
//! Guarantees: all three files or none, so that nobody who named a certificate talks to a server without TLS.

use crate::failure::Failure;
use railfs_engine::tls::Files;
use std::ffi::OsString;
use std::path::PathBuf;

/// The files' names as options and flags, in this order, and the variables that name those which are not given.
pub const NAMES: [(&str, &str); 3] = [("cert", "RAILFS_CERT"), ("key", "RAILFS_KEY"), ("ca", "RAILFS_CA")];

/// What was given (in the order of [`NAMES`]), filled up from the environment.
///
/// # Errors
/// Exit code 2: some of them and not all; a path that is not absolute where it must be.
pub fn files(
    given: [Option<PathBuf>; 3],
    absolute: bool,
    environment: impl Fn(&str) -> Option<OsString>,
) -> Result<Option<Files>, Failure> {
    let mut paths: [Option<PathBuf>; 3] = Default::default();
    for ((path, given), (name, variable)) in paths.iter_mut().zip(given).zip(NAMES) {
        let named = given.is_some();
        *path = given.or_else(|| environment(variable).filter(|value| !value.is_empty()).map(PathBuf::from));
        if let Some(path) = path.as_ref().filter(|path| absolute && !path.is_absolute()) {
            let what = if named { format!("option {name}") } else { variable.to_owned() };
            let problem = format!("{what}: \"{}\" is a relative path: write it from / on", path.display());
            return Err(Failure::usage(problem));
        }
    }
    match paths {
        [None, None, None] => Ok(None),
        [Some(cert), Some(key), Some(ca)] => Ok(Some(Files { cert, key, ca })),
        paths => {
            let names = |there: bool| {
                let of = paths.iter().zip(NAMES).filter(move |(path, _)| path.is_some() == there);
                of.map(|(_, (name, variable))| format!("{name} ({variable})")).collect::<Vec<_>>().join(", ")
            };
            let (there, missing) = (names(true), names(false));
            Err(Failure::usage(format!("cert, key and ca go together: {there} given, and not {missing}")))
        }
    }
}

/// The variables of this process.
pub fn environment(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_three_or_none_and_what_is_given_goes_before_the_environment() {
        let path = |text: &str| Some(PathBuf::from(text));
        let none = |_: &str| None;
        let all = |name: &str| Some(OsString::from(format!("/env/{name}")));
        assert_eq!(files([None, None, None], true, none), Ok(None));
        let of_all = files([None, None, None], true, all).unwrap().unwrap();
        assert_eq!(of_all.key, PathBuf::from("/env/RAILFS_KEY"));
        let mixed = files([path("/c"), path("/k"), None], true, all).unwrap().unwrap();
        assert_eq!((mixed.cert, mixed.ca), (PathBuf::from("/c"), PathBuf::from("/env/RAILFS_CA")));
        let said = files([path("/c"), None, None], true, none).unwrap_err();
        assert_eq!(said.code, 2);
        let want = "cert, key and ca go together: cert (RAILFS_CERT) given, and not key (RAILFS_KEY), ca (RAILFS_CA)";
        assert_eq!(said.message, want);
        let said = files([path("c"), path("/k"), path("/a")], true, none).unwrap_err().message;
        assert_eq!(said, "option cert: \"c\" is a relative path: write it from / on");
        assert!(files([path("c"), path("k"), path("a")], false, none).unwrap().is_some());
        assert_eq!(files([None, None, None], true, |_| Some(OsString::new())), Ok(None), "empty is not set");
    }
}
