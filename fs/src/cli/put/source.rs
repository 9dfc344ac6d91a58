//! Where the bytes of a put come from: a file, or standard input.
//!
//! Guarantees: a source has a size before the put begins (the layout needs it) and can be read at any place and again (a
//! server that was restarted asks again). So standard input is read to its end first: up to [`IN_MEMORY`] bytes are kept in
//! memory, more in a file without a name in the directory for temporary files, which is gone with the process.

use crate::cli::report::Report;
use crate::failure::{Failure, io};
use railfs_engine::client::Source;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

/// Standard input that is not longer needs no file.
const IN_MEMORY: usize = 4 << 20;

/// A file, as long as it was when it was opened.
pub struct FileSource {
    /// Open for reading.
    pub file: File,
    /// Bytes.
    pub size: u64,
    /// Told of what was read.
    pub report: Arc<Report>,
}

impl Source for FileSource {
    fn size(&self) -> u64 {
        self.size
    }
    fn read_exact_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        self.file.read_exact_at(buffer, offset)?;
        self.report.moved(buffer.len() as u64);
        Ok(())
    }
}

struct Bytes {
    bytes: Vec<u8>,
    report: Arc<Report>,
}

impl Source for Bytes {
    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }
    fn read_exact_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        let piece = usize::try_from(offset).ok().and_then(|start| self.bytes.get(start..)?.get(..buffer.len()));
        buffer.copy_from_slice(piece.ok_or(std::io::ErrorKind::UnexpectedEof)?);
        self.report.moved(buffer.len() as u64);
        Ok(())
    }
}

/// Reads to the end.
///
/// # Errors
/// Reading failed, or there is no room for it: names the directory, and how to choose another.
pub fn standard_input(report: &Arc<Report>) -> Result<Arc<dyn Source>, Failure> {
    spool("standard input", &mut std::io::stdin().lock(), IN_MEMORY, report)
}

/// Whether the size that a file is said to have says nothing: those of /proc and /sys are made as they are read.
pub fn has_no_size(metadata: &std::fs::Metadata) -> bool {
    metadata.blocks() == 0 && metadata.len() <= 1 << 20
}

/// Reads a file without a size of its own to its end.
///
/// # Errors
/// As of [`standard_input`].
pub fn to_the_end(mut file: &File, shown: &str, report: &Arc<Report>) -> Result<Arc<dyn Source>, Failure> {
    spool(shown, &mut file, IN_MEMORY, report)
}

fn spool(
    shown: &str,
    input: &mut dyn Read,
    in_memory: usize,
    report: &Arc<Report>,
) -> Result<Arc<dyn Source>, Failure> {
    let failed = |error: std::io::Error| io(shown, &error);
    let mut bytes = Vec::new();
    let limit = u64::try_from(in_memory).unwrap_or(u64::MAX).saturating_add(1);
    input.take(limit).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() <= in_memory {
        return Ok(Arc::new(Bytes { bytes, report: Arc::clone(report) }));
    }
    let directory = std::env::temp_dir();
    let no_room = |error: std::io::Error| {
        Failure::failed(format!(
            "{shown} is kept in {} until it is put: {error}; TMPDIR names another directory",
            directory.display()
        ))
    };
    let mut file = tempfile::tempfile_in(&directory).map_err(no_room)?;
    let mut size = 0;
    loop {
        file.write_all(&bytes).map_err(no_room)?;
        size += bytes.len() as u64;
        bytes.clear();
        if input.take(1 << 20).read_to_end(&mut bytes).map_err(failed)? == 0 {
            break;
        }
    }
    Ok(Arc::new(FileSource { file, size, report: Arc::clone(report) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::report::Wanted;

    fn report() -> Arc<Report> {
        Arc::new(Report::new(Wanted { quiet: true, json: false }, false))
    }

    #[test]
    fn a_source_that_shrank_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, "abc").unwrap();
        let source = FileSource { file: File::open(&path).unwrap(), size: 10, report: report() };
        let mut buffer = [0; 2];
        source.read_exact_at(1, &mut buffer).unwrap();
        assert_eq!(&buffer, b"bc");
        assert!(source.read_exact_at(2, &mut buffer).is_err());
    }

    #[test]
    fn standard_input_is_kept_whole_in_memory_or_in_a_file() {
        let all: Vec<u8> = (0..3_000_007u32).map(|n| (n * 7 % 251) as u8).collect();
        for (length, in_memory) in [(0, 10), (10, 10), (11, 10), (3_000_007, 1 << 20), (3_000_007, 4 << 20)] {
            let source = spool("x", &mut &all[..length], in_memory, &report()).unwrap();
            assert_eq!(source.size(), length as u64);
            let mut back = vec![0; length];
            for (start, piece) in (0u64..).step_by(65_536).zip(back.chunks_mut(65_536)) {
                source.read_exact_at(start, piece).unwrap();
            }
            assert!(back == all[..length], "{length} of {in_memory}");
            assert!(source.read_exact_at(length as u64, &mut [0]).is_err());
            assert!(source.read_exact_at(u64::MAX, &mut [0]).is_err());
        }
    }

    #[test]
    fn input_that_fails_is_an_error() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
                Err(std::io::Error::other("gone"))
            }
        }
        let failure = spool("standard input", &mut Broken, 10, &report()).err().unwrap();
        assert_eq!((failure.message.as_str(), failure.code), ("standard input: gone", 1));
    }
}
