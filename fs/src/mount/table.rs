//! The kernel's table of mounts, read without touching any mount.
//!
//! Guarantees: parsing is total; nothing here walks into a mount, so a dead or hung one cannot block it.

use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// The file system type under which railfs mounts show.
pub const FSTYPE: &str = "fuse.railfs";

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    /// The kernel's number of it.
    pub id: u64,
    /// Of the device; also the number of the FUSE connection.
    pub minor: u32,
    /// Where.
    pub point: PathBuf,
    /// Which type.
    pub fstype: String,
    /// What; of ours the URL.
    pub source: String,
    /// Of a FUSE mount: the user who mounted it.
    pub owner: Option<u32>,
}

/// The bytes that a field of the table stands for.
fn unescape(field: &str) -> Vec<u8> {
    let bytes = field.as_bytes();
    let (mut out, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while let Some(&byte) = bytes.get(at) {
        let octal = bytes.get(at + 1..at + 4).filter(|_| byte == b'\\');
        let value = octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        out.push(value.unwrap_or(byte));
        at += if value.is_some() { 4 } else { 1 };
    }
    out
}

fn line(line: &str) -> Option<Mounted> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ');
    let (id, _parent, device, _root) = (left.next()?, left.next()?, left.next()?, left.next()?);
    let point = unescape(left.next()?);
    let mut right = right.split(' ');
    let (fstype, source, options) = (right.next()?, right.next()?, right.next().unwrap_or(""));
    Some(Mounted {
        id: id.parse().ok()?,
        minor: device.split_once(':')?.1.parse().ok()?,
        point: PathBuf::from(std::ffi::OsString::from_vec(point)),
        fstype: fstype.to_owned(),
        source: String::from_utf8_lossy(&unescape(source)).into_owned(),
        owner: options.split(',').find_map(|option| option.strip_prefix("user_id=")?.parse().ok()),
    })
}

/// Parses `/proc/self/mountinfo`; lines that make no sense are left out.
pub fn parse(text: &str) -> Vec<Mounted> {
    text.lines().filter_map(line).collect()
}

/// All mounts, in the order they were made.
///
/// # Errors
/// `/proc` is not there.
pub fn read() -> std::io::Result<Vec<Mounted>> {
    let bytes = std::fs::read("/proc/self/mountinfo")?;
    Ok(parse(&String::from_utf8_lossy(&bytes)))
}

/// The mount that a walk to this path would meet there.
///
/// # Errors
/// `/proc` is not there.
pub fn top_at(path: &Path) -> std::io::Result<Option<Mounted>> {
    let here = |mounted: &Mounted| mounted.point.as_os_str().as_bytes() == path.as_os_str().as_bytes();
    Ok(read()?.into_iter().rev().find(here))
}

/// The same, when it is one of railfs.
///
/// # Errors
/// As [`top_at`].
pub fn railfs_at(path: &Path) -> std::io::Result<Option<Mounted>> {
    Ok(top_at(path)?.filter(|mounted| mounted.fstype == FSTYPE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel() {
        let text = "36 35 98:0 / / rw,noatime shared:1 - ext3 /dev/root rw,errors=continue\n\
                    91 36 0:47 / /mnt/a\\040b ro,nosuid - fuse.railfs railfs://h/ns/ ro,user_id=0\n\
                    nonsense\n92 36 0:x / /c - a b\n";
        let mounts = parse(text);
        assert_eq!(mounts.len(), 2);
        assert_eq!((mounts[1].id, mounts[1].minor), (91, 47));
        assert_eq!(mounts[1].point, PathBuf::from("/mnt/a b"));
        assert_eq!((mounts[0].owner, mounts[1].owner), (None, Some(0)));
        assert_eq!((mounts[1].fstype.as_str(), mounts[1].source.as_str()), (FSTYPE, "railfs://h/ns/"));
        assert_eq!(unescape("\\0\\04\\999\\134"), b"\\0\\04\\999\\");
    }

    #[test]
    fn this_machines_table_reads() {
        assert!(read().unwrap().iter().any(|mounted| mounted.point == Path::new("/")));
        assert_eq!(railfs_at(Path::new("/")).unwrap(), None);
    }
}
