//! Where the bytes of an object lie: pure arithmetic over a validated layout.
//!
//! Stripe i lies in component `i mod W` at `(i div W) * S`. A [`Striping`] exists only if its numbers are in bounds, so
//! nothing here overflows.

use crate::limits::{MAX_EXTENT, MAX_OBJECT, MAX_PAGE, MAX_STRIPE, MAX_WIDTH, MIN_PAGE};

/// Why a layout is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// See the message.
    #[error("page size {0} is not a power of two from {MIN_PAGE} to {MAX_PAGE}")]
    Page(u32),
    /// See the message.
    #[error("stripe size {stripe} is not a power of two from the page size ({page}) to {MAX_STRIPE}")]
    Stripe {
        /// Bytes.
        stripe: u32,
        /// Bytes.
        page: u32,
    },
    /// See the message.
    #[error("width {0} is not from 1 to {MAX_WIDTH}")]
    Width(u32),
    /// See the message.
    #[error("size {0} is larger than {MAX_OBJECT}")]
    Size(u64),
    /// See the message.
    #[error("width {width} is larger than the number of stripes, {stripes}")]
    TooWide {
        /// Components.
        width: u32,
        /// Stripes of the object (1 for an empty one).
        stripes: u64,
    },
}

/// Size and striping of one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Striping {
    size: u64,
    page: u32,
    stripe: u32,
    width: u32,
}

/// A run of an object's bytes that lies in one stripe of one component.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index of the component.
    pub component: u32,
    /// Offset in the component.
    pub offset: u64,
}

impl Striping {
    /// Checks the numbers. The stripe size must be a power of two, so that extents tile stripes.
    pub fn new(size: u64, page: u32, stripe: u32, width: u32) -> Result<Self, LayoutError> {
        if !page.is_power_of_two() || !(MIN_PAGE..=MAX_PAGE).contains(&page) {
            return Err(LayoutError::Page(page));
        }
        if !stripe.is_power_of_two() || stripe < page || stripe > MAX_STRIPE {
            return Err(LayoutError::Stripe { stripe, page });
        }
        if width == 0 || width > MAX_WIDTH {
            return Err(LayoutError::Width(width));
        }
        if size > MAX_OBJECT {
            return Err(LayoutError::Size(size));
        }
        let striping = Striping { size, page, stripe, width };
        if u64::from(width) > striping.stripes().max(1) {
            return Err(LayoutError::TooWide { width, stripes: striping.stripes().max(1) });
        }
        Ok(striping)
    }

    /// Bytes of the object.
    pub fn size(&self) -> u64 {
        self.size
    }
    /// Bytes of a page.
    pub fn page_size(&self) -> u32 {
        self.page
    }
    /// Bytes of a stripe.
    pub fn stripe_size(&self) -> u32 {
        self.stripe
    }
    /// Number of components.
    pub fn width(&self) -> u32 {
        self.width
    }
    /// Bytes of a large extent: the stripe, at most [`MAX_EXTENT`], on the object's own grid.
    pub fn extent_size(&self) -> u32 {
        self.stripe.min(MAX_EXTENT)
    }
    /// Number of stripes; 0 for an empty object.
    pub fn stripes(&self) -> u64 {
        self.size.div_ceil(u64::from(self.stripe))
    }
    /// Number of pages; 0 for an empty object.
    pub fn pages(&self) -> u64 {
        self.size.div_ceil(u64::from(self.page))
    }

    /// Bytes of data in a component. The sum over all components is the object's size.
    pub fn component_length(&self, component: u32) -> u64 {
        let (stripe, width, component) = (u64::from(self.stripe), u64::from(self.width), u64::from(component));
        let full = self.size / stripe;
        let tail = self.size % stripe;
        let whole = full / width + u64::from(component < full % width);
        whole * stripe + if tail > 0 && full % width == component { tail } else { 0 }
    }

    /// Where the byte at `offset` of the object lies.
    pub fn place(&self, offset: u64) -> Place {
        let stripe = offset / u64::from(self.stripe);
        let within = offset % u64::from(self.stripe);
        Place {
            component: (stripe % u64::from(self.width)) as u32,
            offset: stripe / u64::from(self.width) * u64::from(self.stripe) + within,
        }
    }

    /// The object's offset of a component's byte: the inverse of [`Striping::place`].
    pub fn object_offset(&self, place: Place) -> u64 {
        let row = place.offset / u64::from(self.stripe);
        let within = place.offset % u64::from(self.stripe);
        (row * u64::from(self.width) + u64::from(place.component)) * u64::from(self.stripe) + within
    }

    /// The identity of the object's page `page` inside its component: component and page number there.
    pub fn page_place(&self, page: u64) -> (u32, u64) {
        let place = self.place(page * u64::from(self.page));
        (place.component, place.offset / u64::from(self.page))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    prop_compose! {
        fn striping()(page in 12u32..=18, extra in 0u32..=8, width in 1u32..=7, size in 0u64..(64 << 20)) -> Striping {
            let (page, stripe) = (1 << page, 1 << (page + extra).min(26));
            let width = (u64::from(width)).min(size.div_ceil(stripe).max(1)) as u32;
            Striping::new(size, page, stripe as u32, width).unwrap()
        }
    }

    proptest! {
        #[test]
        fn components_cover_the_object_exactly(s in striping()) {
            let sum: u64 = (0..s.width()).map(|c| s.component_length(c)).sum();
            prop_assert_eq!(sum, s.size());
        }

        #[test]
        fn place_has_an_inverse_and_stays_in_its_component(s in striping(), at in 0.0f64..1.0) {
            if s.size() > 0 {
                let offset = ((s.size() - 1) as f64 * at) as u64;
                let place = s.place(offset);
                prop_assert_eq!(s.object_offset(place), offset);
                prop_assert!(place.offset < s.component_length(place.component));
            }
        }
    }

    #[test]
    fn bad_numbers_are_refused() {
        let m = 1 << 20;
        assert!(matches!(Striping::new(0, 5000, m, 1), Err(LayoutError::Page(5000))));
        assert!(matches!(Striping::new(0, 65536, 4096, 1), Err(LayoutError::Stripe { .. })));
        assert!(matches!(Striping::new(0, 65536, 3 << 16, 1), Err(LayoutError::Stripe { .. })));
        assert!(matches!(Striping::new(u64::MAX, 65536, m, 1), Err(LayoutError::Size(_))));
        assert!(matches!(Striping::new(1, 65536, m, 2), Err(LayoutError::TooWide { .. })));
        assert!(matches!(Striping::new(1, 65536, m, 0), Err(LayoutError::Width(0))));
        assert!(Striping::new(0, 65536, m, 1).is_ok());
    }
}
