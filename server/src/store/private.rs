//! Files and folders that are for their owner alone.
//!
//! Guarantees: what is created here has mode 0600 or 0700 from its first moment, whatever the umask; a folder of ours that others can
//! enter (an earlier version made it) is closed to them.

use std::fs::{DirBuilder, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// What nobody but the owner has.
const OTHERS: u32 = 0o077;

/// For files that may have to be created: with mode 0600.
pub(crate) fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    options
}

/// Takes away what others may, where they may anything. A failure is in the log: it is no reason not to serve.
pub(crate) fn close(path: &Path) {
    let Ok(metadata) = std::fs::metadata(path) else { return };
    let mode = metadata.permissions().mode();
    if mode & OTHERS == 0 {
        return;
    }
    if let Err(error) = std::fs::set_permissions(path, Permissions::from_mode(mode & 0o7700)) {
        let path = path.display();
        tracing::warn!(%path, %error, "others than this user have rights there, and they cannot be taken away");
    }
}

/// Makes a folder, or closes the one that is there.
///
/// # Errors
/// What the system said; that it is there is none.
pub(crate) fn folder(path: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            close(path);
            Ok(())
        }
        other => other,
    }
}

/// Makes a directory and those above it that are missing. One that is there stays as it is: it may serve others, too.
///
/// # Errors
/// What the system said.
pub(crate) fn directories(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).recursive(true).create(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn what_is_made_is_for_its_owner_alone_and_what_is_ours_is_closed() {
        let dir = tempfile::tempdir().unwrap();
        let (made, old, deep) = (dir.path().join("made"), dir.path().join("old"), dir.path().join("a/b"));
        folder(&made).unwrap();
        std::fs::create_dir(&old).unwrap();
        std::fs::set_permissions(&old, Permissions::from_mode(0o755)).unwrap();
        folder(&old).unwrap();
        directories(&deep).unwrap();
        directories(dir.path()).unwrap();
        let file = dir.path().join("file");
        options().write(true).create(true).truncate(false).open(&file).unwrap();
        assert_eq!([mode(&made), mode(&old), mode(&deep), mode(&file)], [0o700, 0o700, 0o700, 0o600]);
        assert!(folder(&file.join("x")).is_err());
    }
}
