//! What reads of a mount mean, and in which of two forms the kernel brings them: what was asked for, and what is chosen.
//!
//! Guarantees: pure. In `strict` every read(2) is checked, in either form; in `snapshot` none is, and the version that was
//! opened stays readable. A form is chosen only where the kernel can do what programs need of it, and the reason is told.

use std::fmt::{self, Display};
use std::time::Duration;

/// What programs' reads see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// The current version, or ESTALE.
    #[default]
    Strict,
    /// The version that was opened, until it is closed.
    Snapshot,
}

/// How reads are to reach the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Io {
    /// What suits the mode and the kernel.
    #[default]
    Auto,
    /// Each read is a request.
    Direct,
    /// By the kernel's page cache.
    Cached,
}

/// What was chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// Each read(2) is a READ, which carries its check (strict).
    #[default]
    Direct,
    /// The kernel answers from its page cache; in strict it asks for the attributes before each read(2), which is the check.
    Cached,
}

/// What the kernel can do, as said at INIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Direct-I/O files can be mapped shared (6.6 and newer).
    pub direct_mmap: bool,
    /// It asks for attributes before it answers a read from its cache.
    pub auto_inval: bool,
}

/// The choice, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// See there.
    pub mode: Mode,
    /// See there.
    pub form: Form,
    /// One line: why this form.
    pub reason: String,
    /// What programs have to do without, if anything.
    pub lacks: Option<String>,
}

impl Mode {
    /// The names, as in `-o mode=`.
    pub const NAMES: [(&'static str, Mode); 2] = [("strict", Mode::Strict), ("snapshot", Mode::Snapshot)];
}

impl Io {
    /// The names, as in `-o io=`.
    pub const NAMES: [(&'static str, Io); 3] = [("auto", Io::Auto), ("direct", Io::Direct), ("cached", Io::Cached)];
}

impl Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mode::Strict => "strict",
            Mode::Snapshot => "snapshot",
        })
    }
}

impl Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Form::Direct => "direct",
            Form::Cached => "cached",
        })
    }
}

/// The form for a mount.
pub fn choose(mode: Mode, io: Io, kernel: Kernel) -> Choice {
    let (form, reason) = match (io, mode) {
        (Io::Direct, _) => (Form::Direct, "asked for".to_owned()),
        (Io::Cached, Mode::Strict) if !kernel.auto_inval => {
            (Form::Direct, "this kernel does not ask before it answers from its cache".to_owned())
        }
        (Io::Cached, _) => (Form::Cached, "asked for".to_owned()),
        (Io::Auto, Mode::Snapshot) => {
            (Form::Cached, "a snapshot's pages stay right for as long as it is open".to_owned())
        }
        (Io::Auto, Mode::Strict) if !kernel.direct_mmap && kernel.auto_inval => {
            (Form::Cached, "a kernel before 6.6 cannot map direct-I/O files shared".to_owned())
        }
        (Io::Auto, Mode::Strict) => (Form::Direct, "the faster one for cold reads, see docs/performance.md".to_owned()),
    };
    let lacks = (form == Form::Direct && !kernel.direct_mmap)
        .then(|| "kernel before 6.6: mmap with MAP_SHARED fails with ENODEV (use io=cached)".to_owned());
    Choice { mode, form, reason, lacks }
}

impl Choice {
    /// How long the kernel may trust a file's attributes: in `cached` strict the check hangs on its asking each time.
    pub fn attributes_ttl(&self, wanted: Duration) -> Duration {
        match (self.mode, self.form) {
            (Mode::Strict, Form::Cached) => Duration::ZERO,
            _ => wanted,
        }
    }

    /// Whether a READ is to be checked. `fill`: it comes for the kernel's page cache (mmap, exec, sendfile, splice, readahead),
    /// not for a read(2) of its own.
    pub fn checks(&self, fill: bool) -> bool {
        self.mode == Mode::Strict && !fill
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_combination_has_its_form() {
        let new = Kernel { direct_mmap: true, auto_inval: true };
        let old = Kernel { direct_mmap: false, ..new };
        let form = |mode, io, kernel| {
            let choice = choose(mode, io, kernel);
            assert!(!choice.reason.is_empty());
            (choice.form, choice.lacks.is_some())
        };
        use {Form::Cached, Form::Direct, Mode::Snapshot, Mode::Strict};
        assert_eq!(form(Strict, Io::Auto, new), (Direct, false));
        assert_eq!(form(Strict, Io::Auto, old), (Cached, false), "MAP_SHARED works on old kernels too");
        assert_eq!(form(Strict, Io::Direct, new), (Direct, false));
        assert_eq!(form(Strict, Io::Direct, old), (Direct, true), "asked for, and said what it lacks");
        assert_eq!(form(Strict, Io::Cached, new), (Cached, false));
        assert_eq!(form(Snapshot, Io::Auto, old), (Cached, false));
        assert_eq!(form(Snapshot, Io::Direct, new), (Direct, false));
        let ancient = Kernel { direct_mmap: false, auto_inval: false };
        assert_eq!(form(Strict, Io::Cached, ancient), (Direct, true), "never a form whose check does not happen");
        assert_eq!(form(Strict, Io::Auto, ancient), (Direct, true));
        assert_eq!(form(Snapshot, Io::Cached, ancient), (Cached, false));
    }

    #[test]
    fn i3_the_check_of_cached_hangs_on_attributes_that_are_never_trusted() {
        let second = Duration::from_secs(1);
        let kernel = Kernel { direct_mmap: true, auto_inval: true };
        let ttl = |mode, io| choose(mode, io, kernel).attributes_ttl(second);
        assert_eq!(ttl(Mode::Strict, Io::Cached), Duration::ZERO);
        assert_eq!((ttl(Mode::Strict, Io::Direct), ttl(Mode::Snapshot, Io::Cached)), (second, second));
        assert!(choose(Mode::Strict, Io::Cached, kernel).checks(false), "an O_DIRECT read is a READ of its own");
        assert!(!choose(Mode::Strict, Io::Direct, kernel).checks(true));
        assert!(!choose(Mode::Snapshot, Io::Direct, kernel).checks(false));
    }
}
