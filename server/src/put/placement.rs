//! Where a new object's components go: pure.
//!
//! Guarantees: as many components as writable directories (or as asked for), never more than stripes; the first lies
//! where most room is, the others follow in the order of the directories, so that all of them share the load.

use railfs_proto::descriptor::Id;
use railfs_proto::layout::{LayoutError, Striping};

/// A stripe directory that takes new components.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Which one.
    pub directory: Id,
    /// Bytes that are free in it.
    pub available: u64,
}

/// Why there is no place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// See the message.
    #[error(
        "no stripe directory takes new components: all are suspect, read-only or missing (`railfs status` says why); restart railfsd when their disks are well"
    )]
    NoDirectory,
    /// The layout that was asked for is not one.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// The layout, and the directory of each component. `width` is what was asked for; `None`: one per writable directory.
/// With more components than directories some directories take several.
///
/// # Errors
/// See [`PlacementError`].
pub fn place(
    rooms: &[Room],
    size: u64,
    page: u32,
    stripe: u32,
    width: Option<u32>,
) -> Result<(Striping, Vec<Id>), PlacementError> {
    // Bounds of the numbers first; the width is settled after.
    let narrow = Striping::new(size, page, stripe, 1)?;
    let Some(start) = (0..rooms.len()).max_by_key(|&place| (rooms[place].available, std::cmp::Reverse(place))) else {
        return Err(PlacementError::NoDirectory);
    };
    let wanted = width.map_or(rooms.len() as u64, u64::from);
    let width = wanted.min(narrow.stripes().max(1)).max(1);
    let width = u32::try_from(width).unwrap_or(u32::MAX).min(railfs_proto::limits::MAX_WIDTH);
    let striping = Striping::new(size, page, stripe, width)?;
    let places = (0..width as usize).map(|component| rooms[(start + component) % rooms.len()].directory).collect();
    Ok((striping, places))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn room(id: u8, available: u64) -> Room {
        Room { directory: Id([id; 16]), available }
    }
    fn ids(places: &[Id]) -> Vec<u8> {
        places.iter().map(|id| id.0[0]).collect()
    }
    const M: u32 = 1 << 20;

    #[test]
    fn starts_where_most_room_is_and_goes_round() {
        let rooms = [room(1, 10), room(2, 30), room(3, 20)];
        let (striping, places) = place(&rooms, 9 << 20, 65536, M, None).unwrap();
        assert_eq!((striping.width(), ids(&places)), (3, vec![2, 3, 1]));
        assert_eq!(ids(&place(&rooms, 9 << 20, 65536, M, Some(2)).unwrap().1), [2, 3]);
        assert_eq!(ids(&place(&rooms, 9 << 20, 65536, M, Some(4)).unwrap().1), [2, 3, 1, 2]);
    }

    #[test]
    fn no_wider_than_there_are_stripes() {
        let rooms = [room(1, 10), room(2, 10)];
        assert_eq!(ids(&place(&rooms, 0, 65536, M, None).unwrap().1), [1]);
        assert_eq!(ids(&place(&rooms, 1 << 20, 65536, M, Some(2)).unwrap().1), [1]);
        assert_eq!(ids(&place(&rooms, (1 << 20) + 1, 65536, M, None).unwrap().1), [1, 2]);
        assert_eq!(place(&[], 1, 65536, M, None), Err(PlacementError::NoDirectory));
        assert!(matches!(place(&rooms, 1, 5000, M, None), Err(PlacementError::Layout(_))));
    }

    proptest! {
        #[test]
        fn every_answer_is_a_valid_layout(
            rooms in proptest::collection::vec(any::<u64>(), 0..9),
            size in any::<u64>(), page in any::<u32>(), stripe in any::<u32>(), width in proptest::option::of(any::<u32>()),
        ) {
            let rooms: Vec<Room> = rooms.iter().zip(0u8..).map(|(&available, id)| room(id, available)).collect();
            if let Ok((striping, places)) = place(&rooms, size, page, stripe, width) {
                prop_assert_eq!(places.len(), striping.width() as usize);
                prop_assert_eq!(striping.size(), size);
            }
        }
    }
}
