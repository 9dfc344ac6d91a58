//! Hands out versions one at a time from blocks that were reserved durably before: none is ever handed out twice.

use super::{Catalog, CatalogError};
use std::sync::Arc;
use tokio::sync::Mutex;

/// How many versions are reserved by one record.
pub const BLOCK: u64 = 1024;

/// The versions of one incarnation.
#[derive(Debug)]
pub struct Versions {
    catalog: Arc<dyn Catalog>,
    /// The next one, and how many are left of the block.
    block: Mutex<(u64, u64)>,
}

impl Versions {
    /// Reserves nothing until the first version is asked for.
    pub fn new(catalog: Arc<dyn Catalog>) -> Versions {
        Versions { catalog, block: Mutex::new((0, 0)) }
    }

    /// A version higher than every one that was handed out before.
    pub async fn next(&self) -> Result<u64, CatalogError> {
        let mut block = self.block.lock().await;
        if block.1 == 0 {
            let range = self.catalog.reserve_versions(BLOCK).await?;
            *block = (*range.start(), range.end().saturating_sub(*range.start()).saturating_add(1));
        }
        let version = block.0;
        *block = (version.saturating_add(1), block.1 - 1);
        Ok(version)
    }
}
