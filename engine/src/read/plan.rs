//! From offsets to pages to fetches: pure arithmetic.
//!
//! An object is a row of *cells* of `extent_size` bytes (the stripe, at most 1 MiB), so a cell lies in one stripe of one
//! component. A fetch is a run of pages of one cell and lands in one extent.

use railfs_proto::layout::Striping;
use std::ops::Range;

/// Pages of one cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellPages {
    /// Cell number.
    pub cell: u64,
    /// First page wanted, numbered in the object.
    pub first: u64,
    /// The page after the last one.
    pub end: u64,
}

/// Pages per cell.
pub fn pages_per_cell(striping: &Striping) -> u64 {
    u64::from(striping.extent_size() / striping.page_size())
}

/// The part of `offset..offset + length` that the object has.
pub fn clamp(striping: &Striping, offset: u64, length: u32) -> Range<u64> {
    let start = offset.min(striping.size());
    start..offset.saturating_add(u64::from(length)).min(striping.size()).max(start)
}

/// The cells that the byte range touches, with the pages it touches in each. The range lies inside the object.
pub fn cells(striping: &Striping, bytes: Range<u64>) -> Vec<CellPages> {
    if bytes.is_empty() {
        return Vec::new();
    }
    let (page, per_cell) = (u64::from(striping.page_size()), pages_per_cell(striping));
    let (first, end) = (bytes.start / page, bytes.end.div_ceil(page));
    (first / per_cell..=(end - 1) / per_cell)
        .map(|cell| CellPages { cell, first: first.max(cell * per_cell), end: end.min((cell + 1) * per_cell) })
        .collect()
}

/// All the pages of a cell that the object has.
pub fn whole_cell(striping: &Striping, cell: u64) -> CellPages {
    let per_cell = pages_per_cell(striping);
    CellPages { cell, first: cell * per_cell, end: ((cell + 1) * per_cell).min(striping.pages()) }
}

/// The runs of pages in `first..end` for which `present` is false.
pub fn missing(first: u64, end: u64, present: impl Fn(u64) -> bool) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for page in (first..end).filter(|&page| !present(page)) {
        match runs.last_mut() {
            Some(run) if run.end == page => run.end += 1,
            _ => runs.push(page..page + 1),
        }
    }
    runs
}

/// The pages that a byte range touches.
pub fn pages(striping: &Striping, bytes: &Range<u64>) -> Range<u64> {
    let page = u64::from(striping.page_size());
    if bytes.is_empty() { 0..0 } else { bytes.start / page..bytes.end.div_ceil(page) }
}

/// Runs of pages cut so that none is longer than `most` bytes (a page is never cut; 0: no limit).
pub fn limited(striping: &Striping, runs: Vec<Range<u64>>, most: u32) -> Vec<Range<u64>> {
    let pages = u64::from((most / striping.page_size()).max(1));
    if most == 0 || runs.iter().all(|run| run.end - run.start <= pages) {
        return runs;
    }
    let cut = |run: Range<u64>| {
        let end = run.end;
        (run.start..end).step_by(usize::try_from(pages).unwrap_or(usize::MAX)).map(move |at| at..end.min(at + pages))
    };
    runs.into_iter().flat_map(cut).collect()
}

/// Where a run of pages of one cell lies, and what it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Component.
    pub component: u32,
    /// Offset in the component, bytes.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
    /// Bytes of the extent it lands in: the next power of two, 4 KiB or more.
    pub extent: u32,
}

/// The run must be a non-empty run of one cell of the object.
pub fn geometry(striping: &Striping, pages: &Range<u64>) -> Geometry {
    let page = u64::from(striping.page_size());
    let start = pages.start * page;
    let end = (pages.end * page).min(striping.size());
    let place = striping.place(start);
    // A run of one cell is at most MAX_EXTENT, which is a u32.
    let length = end.saturating_sub(start).min(u64::from(striping.extent_size())) as u32;
    let extent = length.max(railfs_proto::limits::MIN_PAGE).next_power_of_two();
    Geometry { component: place.component, offset: place.offset, length, extent }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn fetches_cover_exactly_the_pages_and_stay_in_one_stripe(
            page in 12u32..=18, extra in 0u32..=6, width in 1u32..5, size in 1u64..(20 << 20),
            from in 0.0f64..1.0, length in 1u32..(2 << 20),
        ) {
            let stripe = 1u32 << (page + extra);
            let width = u64::from(width).min(size.div_ceil(u64::from(stripe))) as u32;
            let s = Striping::new(size, 1 << page, stripe, width).unwrap();
            let bytes = clamp(&s, (size as f64 * from) as u64, length);
            let mut next = bytes.start / u64::from(s.page_size());
            for cell in cells(&s, bytes.clone()) {
                prop_assert_eq!(cell.first, next);
                prop_assert!(cell.end > cell.first);
                let whole = whole_cell(&s, cell.cell);
                prop_assert!(whole.first <= cell.first && cell.end <= whole.end);
                let g = geometry(&s, &(cell.first..cell.end));
                prop_assert_eq!(g.offset / u64::from(stripe), (g.offset + u64::from(g.length) - 1) / u64::from(stripe));
                prop_assert!(g.offset + u64::from(g.length) <= s.component_length(g.component));
                prop_assert!(g.length <= g.extent && g.extent <= railfs_proto::limits::MAX_EXTENT);
                next = cell.end;
            }
            if !bytes.is_empty() {
                prop_assert_eq!(next, bytes.end.div_ceil(u64::from(s.page_size())));
            }
        }
    }

    #[test]
    fn runs_of_missing_pages() {
        assert_eq!(missing(3, 9, |page| page == 5 || page == 8), vec![3..5, 6..8]);
        assert!(missing(3, 9, |_| true).is_empty());
        let s = Striping::new(100, 4096, 4096, 1).unwrap();
        assert_eq!(clamp(&s, 100, 10), 100..100);
        assert_eq!(clamp(&s, u64::MAX, 10), 100..100);
        assert_eq!(clamp(&s, 90, u32::MAX), 90..100);
        assert_eq!((pages(&s, &(0..0)), pages(&s, &(1..100))), (0..0, 0..1));
        let s = Striping::new(100 << 12, 4096, 32 << 12, 1).unwrap();
        let cut = |most| limited(&s, vec![2..9, 12..13], most);
        assert_eq!(cut(3 * 4096 + 5), vec![2..5, 5..8, 8..9, 12..13]);
        assert_eq!((cut(0), cut(1 << 20)), (vec![2..9, 12..13], vec![2..9, 12..13]));
        assert_eq!(cut(1).len(), 8, "a page is never cut");
    }
}
