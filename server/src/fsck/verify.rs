//! One component file, read to its last byte.
//!
//! Guarantees: it is good only if header, size, every table block and every page are what was written for this very
//! component; what is bad is named by page and stripe.

use crate::serve::files::{Component, Key, ReadError};
use railfs_proto::checksum::{PageId, page_checksum};
use railfs_proto::descriptor::Descriptor;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes that are read at once, where pages are no larger.
const PIECE: u64 = 1 << 20;
/// Pages that are named; of more only the number is told.
const NAMED: usize = 8;

/// What is wrong with a component.
#[derive(Debug)]
pub(super) enum Bad {
    /// There is no such file.
    Missing,
    /// It is not what was written.
    Damaged {
        /// What, and where.
        detail: String,
        /// Bytes of it that are good.
        good: u64,
    },
}

/// Pages that are bad for one reason.
struct BadPages {
    pages: Vec<u64>,
    count: u64,
    why: String,
}

/// The component's bytes, all good.
pub(super) fn component(path: &Path, key: Key, descriptor: &Descriptor) -> Result<u64, Bad> {
    let component = match Component::open_at(path, key, descriptor, false) {
        Ok(component) => component,
        Err(ReadError::Missing) => return Err(Bad::Missing),
        Err(error) => return Err(Bad::Damaged { detail: error.to_string(), good: 0 }),
    };
    let geometry = *component.geometry();
    let size = geometry.page_size();
    let together = (PIECE / size).max(1);
    let mut buffer = vec![0; usize::try_from(together * size).unwrap_or(0)];
    let (mut bad, mut good): (Vec<BadPages>, u64) = (Vec::new(), 0);
    let mut page = 0;
    while page < geometry.pages() {
        let count = together.min(geometry.pages() - page);
        match pieces(&component, page, count, &mut buffer) {
            Ok((bytes, wrong)) => {
                good += bytes;
                for page in wrong {
                    add(&mut bad, page, "bytes do not match their checksum".to_owned());
                }
            }
            // Which of them it is: each by itself.
            Err(_) => {
                for page in page..page + count {
                    match pieces(&component, page, 1, &mut buffer) {
                        Ok((bytes, wrong)) => {
                            good += bytes;
                            for page in wrong {
                                add(&mut bad, page, "bytes do not match their checksum".to_owned());
                            }
                        }
                        Err(error) => add(&mut bad, page, error.to_string()),
                    }
                }
            }
        }
        page += count;
    }
    if bad.is_empty() {
        return Ok(good);
    }
    let striping = component.striping();
    let stripe = |page: &u64| {
        let in_component = page * size / u64::from(striping.stripe_size());
        in_component * u64::from(striping.width()) + u64::from(key.component)
    };
    let say = |bad: &BadPages| {
        let pages: Vec<String> = bad.pages.iter().map(u64::to_string).collect();
        let mut stripes: Vec<u64> = bad.pages.iter().map(stripe).collect();
        stripes.dedup();
        let stripes: Vec<String> = stripes.iter().map(u64::to_string).collect();
        let more = bad.count.saturating_sub(bad.pages.len() as u64);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("page {} of the component{more} (stripe {}): {}", pages.join(", "), stripes.join(", "), bad.why)
    };
    Err(Bad::Damaged { detail: bad.iter().map(say).collect::<Vec<_>>().join("; "), good })
}

fn add(bad: &mut Vec<BadPages>, page: u64, why: String) {
    match bad.iter_mut().find(|bad| bad.why == why) {
        Some(bad) => {
            bad.count += 1;
            if bad.pages.len() < NAMED {
                bad.pages.push(page);
            }
        }
        None => bad.push(BadPages { pages: vec![page], count: 1, why }),
    }
}

/// Good bytes among these pages, and the pages whose bytes are wrong.
fn pieces(component: &Component, first: u64, count: u64, buffer: &mut [u8]) -> Result<(u64, Vec<u64>), ReadError> {
    let geometry = component.geometry();
    let key = component.key();
    let sums = component.sums(first, usize::try_from(count).unwrap_or(usize::MAX))?;
    let places = (first..first + count).map_while(|page| geometry.page(page).map(|place| (page, place)));
    let places: Vec<(u64, (u64, u64))> = places.collect();
    let Some(&(_, (start, _))) = places.first() else { return Ok((0, Vec::new())) };
    let length: u64 = places.iter().map(|(_, (_, length))| length).sum();
    let buffer = &mut buffer[..usize::try_from(length).unwrap_or(usize::MAX)];
    component.file().read_exact_at(buffer, start)?;
    let (mut good, mut wrong, mut rest) = (0, Vec::new(), &*buffer);
    for ((page, (_, length)), sum) in places.into_iter().zip(sums) {
        let (bytes, behind) = rest.split_at(usize::try_from(length).unwrap_or(usize::MAX).min(rest.len()));
        rest = behind;
        if page_checksum(PageId { version: key.version, component: key.component, page }, bytes) == sum {
            good += length;
        } else {
            wrong.push(page);
        }
    }
    Ok((good, wrong))
}
