//! Bytes into an exposed extent: from a socket, or copied. The only place of the rails with unsafe code.
//!
//! Guarantees: nothing is written outside `offset..offset + length` nor outside the extent; no reference to memory that
//! others may write to is ever made (raw pointers only); the call has stopped writing when it returns, so that whoever
//! owns the extent and is not inside one of these calls has its TCP fence (I4).
#![allow(unsafe_code)]

use crate::memory::Exposed;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;

/// `offset` and `length` cut to the extent; none where nothing fits.
fn place(extent: &Exposed, offset: u32, length: usize) -> Option<(NonNull<u8>, usize)> {
    let base = extent.landing()?;
    let room = extent.size().checked_sub(offset)?;
    let length = length.min(room as usize);
    // SAFETY: `offset` is at most the extent's size (checked_sub), so the pointer stays inside its slot or one past it.
    (length > 0).then(|| (unsafe { base.add(offset as usize) }, length))
}

/// Where an exposed extent lies, for a key over it.
pub(crate) fn address(extent: &Exposed) -> Option<NonNull<u8>> {
    place(extent, 0, 1).map(|(pointer, _)| pointer)
}

/// Receives what is there now, at most `length` bytes, to `offset`. `Ok(0)`: the other side has closed. Never blocks.
///
/// Takes the extent mutably: two receives into it at once cannot be written down.
pub(crate) fn receive(socket: impl AsFd, extent: &mut Exposed, offset: u32, length: usize) -> io::Result<usize> {
    let Some((to, length)) = place(extent, offset, length) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "landing outside its extent"));
    };
    loop {
        // SAFETY: `to` and the next `length` bytes lie inside the extent's slot (see `place`), which is mapped for as long
        // as `extent` lives and is held by us alone (`&mut`). The kernel writes there only until the call returns.
        let got = unsafe { libc::recv(socket.as_fd().as_raw_fd(), to.as_ptr().cast(), length, libc::MSG_DONTWAIT) };
        match usize::try_from(got) {
            Ok(got) => return Ok(got),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

/// Copies `bytes` to `offset`, as far as they fit; says how many did.
pub(crate) fn copy(extent: &mut Exposed, offset: u32, bytes: &[u8]) -> usize {
    let Some((to, length)) = place(extent, offset, bytes.len()) else { return 0 };
    // SAFETY: `to` and the next `length` bytes lie inside the extent's slot (see `place`), which we hold alone (`&mut`);
    // `bytes` cannot overlap it: no slice of an exposed slot exists. `length` is at most `bytes.len()`.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), length) };
    length
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Arena, Fence};
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    #[test]
    fn stays_inside_the_extent() {
        let arena = Arena::new(1 << 20).unwrap();
        let neighbour = arena.allocate(4096).unwrap().filled(&[7; 4096]).unwrap();
        let mut extent = arena.allocate(4096).unwrap().expose();
        let after = arena.allocate(4096).unwrap().filled(&[9; 4096]).unwrap();
        assert_eq!(copy(&mut extent, 4000, &[1; 200]), 96);
        assert_eq!(copy(&mut extent, 4096, &[1; 200]), 0);
        assert_eq!(copy(&mut extent, 5000, &[1; 200]), 0);
        let (mut from, to) = UnixStream::pair().unwrap();
        from.write_all(&[2; 5000]).unwrap();
        assert_eq!(receive(&to, &mut extent, 96, usize::MAX).unwrap(), 4000);
        assert!(receive(&to, &mut extent, 4096, 10).is_err());
        assert_eq!(receive(&to, &mut extent, 0, 96).unwrap(), 96);
        drop(from);
        while receive(&to, &mut extent, 0, 4096).unwrap() > 0 {}
        let fenced = extent.fenced(Fence::proved()).unwrap();
        assert!(fenced.bytes().iter().all(|byte| *byte == 2));
        assert!(neighbour.bytes().iter().all(|byte| *byte == 7));
        assert!(after.bytes().iter().all(|byte| *byte == 9));
    }

    #[test]
    fn nothing_there_does_not_block() {
        let arena = Arena::new(1 << 20).unwrap();
        let mut extent = arena.allocate(4096).unwrap().expose();
        let (from, to) = UnixStream::pair().unwrap();
        assert_eq!(receive(&to, &mut extent, 0, 10).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(from);
        assert_eq!(receive(&to, &mut extent, 0, 10).unwrap(), 0);
        extent.fenced(Fence::proved()).unwrap();
    }
}
