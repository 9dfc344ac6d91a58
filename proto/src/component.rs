//! The component file `<version>.<component>`: every W-th stripe of one version, on disk.
//!
//! Guarantees: the arithmetic is exact and cannot overflow, a header or table block is believed only if it carries its
//! own checksum, and a right block in a wrong place or file fails. The header names no node: a replica is a byte copy.
//!
//! ```text
//! 0     header, 4 KiB, written last
//! 4096  data: `length` bytes, then zeros up to a multiple of 4 KiB
//! ...   checksum table: blocks of 4 KiB, each 511 page checksums and the block's own
//! ```
//! The file ends there: its size is exactly [`Geometry::file_size`]. An empty component is its header alone.
//!
//! Header (all numbers little endian):
//! ```text
//! 0    magic "RLFCOMP\n"            8    format number (u32), 1
//! 12   reserved (u32)               16   version (u64)
//! 24   component index (u32)        28   width (u32)
//! 32   stripe size (u32)            36   page size (u32)
//! 40   component's length (u64)     48   object's size (u64)
//! 56   mtime, seconds (i64)         64   mtime, nanoseconds (u32)
//! 68   mode (u32)                   72   key length (u32)
//! 76   namespace length (u32)       80   key's xxh3-128 (16 bytes)
//! 96   namespace (64 bytes, zeros after it)
//! 160  key, its first 3840 bytes (zeros after it)
//! 4000 reserved                     4088 xxh3-64 of bytes 0..4088
//! ```
//! A key longer than 3840 bytes does not fit beside the rest: its beginning, its full length and its hash are kept. The
//! log is what names objects; a header has only to show whether a file is the one that the log means. Reserved bytes are
//! written as zeros and not looked at.
//!
//! Table block: 511 checksums (u64; zeros where there is no page), then the xxh3-64 of those 4088 bytes with a seed that
//! is the xxh3-64 of "RLFTABLE", version (u64), component (u32), block number (u64).

use crate::descriptor::{Attributes, Descriptor};
use crate::layout::{LayoutError, Striping};
use crate::limits::{LAST_UNUSED_VERSION, MAX_NAMESPACE, MAX_OBJECT, MAX_PAGE, MAX_VERSION, MAX_WIDTH, MIN_PAGE};
use crate::name::{Escaped, Key, NameError, Namespace, ObjectName};
use std::fmt;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed, xxh3_128};

/// Bytes of a header, of a table block, and the grid that everything in the file lies on.
pub const BLOCK: usize = 4096;
/// Where the data starts.
pub const DATA_OFFSET: u64 = BLOCK as u64;
/// Page checksums in one table block.
pub const SUMS_PER_BLOCK: usize = 511;
/// The format that this build writes, and the only one it reads.
pub const FORMAT: u32 = 1;

const MAGIC: [u8; 8] = *b"RLFCOMP\n";
const CHECKED: usize = BLOCK - 8;
const NAMESPACE_AT: usize = 96;
const KEY_AT: usize = 160;
/// Bytes of a key that a header keeps.
pub const KEPT_KEY: usize = 3840;

/// Why a component file, or a part of one, is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ComponentError {
    /// See the message.
    #[error("'{0}' is not the name of a component file (VERSION.COMPONENT)")]
    FileName(String),
    /// See the message.
    #[error("component of {length} bytes in pages of {page_size} is out of bounds")]
    Geometry {
        /// Bytes.
        length: u64,
        /// Bytes.
        page_size: u32,
    },
    /// See the message.
    #[error("{0} checksums do not fit a table block of {SUMS_PER_BLOCK}")]
    TooManySums(usize),
    /// See the message.
    #[error("table block {block} of component {component} of version {version} is damaged, or belongs elsewhere")]
    BlockDamaged {
        /// Whose it should be.
        version: u64,
        /// Whose it should be.
        component: u32,
        /// Which it should be.
        block: u64,
    },
    /// See the message.
    #[error("no component header (it begins with '{found}')", found = .0.escape_ascii())]
    Magic([u8; 8]),
    /// See the message.
    #[error("component format {0} is not known to this software, which reads format {FORMAT}: use a newer railfsd")]
    Format(u32),
    /// See the message.
    #[error("component header is damaged")]
    HeaderDamaged,
    /// See the message.
    #[error("component header has a {field} that is out of bounds: {value}")]
    Field {
        /// Which.
        field: &'static str,
        /// What it says.
        value: u64,
    },
    /// See the message.
    #[error("component header: {0}")]
    Layout(#[from] LayoutError),
    /// See the message.
    #[error("component header: {0}")]
    Name(#[from] NameError),
    /// The file is not the one that the descriptor means.
    #[error("component header has another {field} than the object's record: {found}, not {wanted}")]
    Disagrees {
        /// Which.
        field: &'static str,
        /// In the header.
        found: u64,
        /// In the record.
        wanted: u64,
    },
}

/// The name of a component file: decimal version, a dot, decimal component index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileName {
    /// A version that may be handed out.
    pub version: u64,
    /// Below the largest width.
    pub component: u32,
}

impl FileName {
    /// Accepts exactly what [`fmt::Display`] writes: no sign, no leading zeros.
    ///
    /// # Errors
    /// `FileName`.
    pub fn parse(name: &[u8]) -> Result<FileName, ComponentError> {
        let parsed = || {
            let (version, component) = std::str::from_utf8(name).ok()?.split_once('.')?;
            let name = FileName { version: version.parse().ok()?, component: component.parse().ok()? };
            let valid = is_version(name.version) && name.component < MAX_WIDTH;
            (valid && canonical(version) && canonical(component)).then_some(name)
        };
        parsed().ok_or_else(|| ComponentError::FileName(Escaped(name).to_string()))
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.version, self.component)
    }
}

fn canonical(number: &str) -> bool {
    number.bytes().all(|b| b.is_ascii_digit()) && (number == "0" || !number.starts_with('0'))
}

fn is_version(version: u64) -> bool {
    (LAST_UNUSED_VERSION + 1..=MAX_VERSION).contains(&version)
}

/// Where things lie in a component file. All values are bytes from the start of the file unless said otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    length: u64,
    page: u64,
    table: u64,
    blocks: u64,
    end: u64,
}

impl Geometry {
    /// Of a component with `length` bytes of data in pages of `page_size` bytes.
    ///
    /// # Errors
    /// `Geometry` when a number is out of bounds.
    pub fn new(length: u64, page_size: u32) -> Result<Geometry, ComponentError> {
        let valid = page_size.is_power_of_two() && (MIN_PAGE..=MAX_PAGE).contains(&page_size) && length <= MAX_OBJECT;
        let arithmetic = || {
            let page = u64::from(page_size);
            let table = length.checked_next_multiple_of(DATA_OFFSET)?.checked_add(DATA_OFFSET)?;
            let blocks = length.div_ceil(page).div_ceil(SUMS_PER_BLOCK as u64);
            let end = blocks.checked_mul(BLOCK as u64)?.checked_add(table)?;
            (end <= i64::MAX as u64).then_some(Geometry { length, page, table, blocks, end })
        };
        valid.then(arithmetic).flatten().ok_or(ComponentError::Geometry { length, page_size })
    }

    /// Of one component of a striped object.
    ///
    /// # Errors
    /// `Field` when there is no such component.
    pub fn of(striping: &Striping, component: u32) -> Result<Geometry, ComponentError> {
        if component >= striping.width() {
            return Err(ComponentError::Field { field: "component index", value: component.into() });
        }
        Geometry::new(striping.component_length(component), striping.page_size())
    }

    /// Bytes of data.
    pub fn length(&self) -> u64 {
        self.length
    }
    /// Bytes of a page.
    pub fn page_size(&self) -> u64 {
        self.page
    }
    /// Number of pages; 0 for an empty component.
    pub fn pages(&self) -> u64 {
        self.length.div_ceil(self.page)
    }
    /// Where the zeros after the data begin; they end at [`Geometry::table_offset`].
    pub fn data_end(&self) -> u64 {
        DATA_OFFSET + self.length
    }
    /// Where the table begins.
    pub fn table_offset(&self) -> u64 {
        self.table
    }
    /// Number of table blocks.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }
    /// The size that the file must have.
    pub fn file_size(&self) -> u64 {
        self.end
    }
    /// Where page `page` begins and how many valid bytes it has; `None` when there is no such page.
    pub fn page(&self, page: u64) -> Option<(u64, u64)> {
        let start = page.checked_mul(self.page).filter(|&start| start < self.length)?;
        Some((DATA_OFFSET + start, (self.length - start).min(self.page)))
    }
    /// Where table block `block` begins; `None` when there is no such block.
    pub fn block_offset(&self, block: u64) -> Option<u64> {
        (block < self.blocks).then(|| self.table + block * BLOCK as u64)
    }
    /// How many page checksums table block `block` holds, at most 511; `None` when there is no such block.
    pub fn block_sums(&self, block: u64) -> Option<usize> {
        let before = block.checked_mul(SUMS_PER_BLOCK as u64)?;
        let left = self.pages().checked_sub(before).filter(|&left| left > 0)?;
        usize::try_from(left.min(SUMS_PER_BLOCK as u64)).ok()
    }
    /// The table block that holds a page's checksum, and the place in it.
    pub fn sum_place(page: u64) -> (u64, usize) {
        (page / SUMS_PER_BLOCK as u64, (page % SUMS_PER_BLOCK as u64) as usize)
    }
}

/// Which table block of which component of which version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockId {
    /// The version.
    pub version: u64,
    /// Index of the component.
    pub component: u32,
    /// Number of the block in the table.
    pub block: u64,
}

impl BlockId {
    fn seed(self) -> u64 {
        let mut bytes = [0u8; 28];
        bytes[..8].copy_from_slice(b"RLFTABLE");
        bytes[8..16].copy_from_slice(&self.version.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.component.to_le_bytes());
        bytes[20..].copy_from_slice(&self.block.to_le_bytes());
        xxh3_64(&bytes)
    }
}

/// A table block that passed its check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableBlock {
    sums: [u64; SUMS_PER_BLOCK],
}

impl TableBlock {
    /// The block that holds these checksums.
    ///
    /// # Errors
    /// `TooManySums` for more than 511.
    pub fn encode(id: BlockId, sums: &[u64]) -> Result<[u8; BLOCK], ComponentError> {
        if sums.len() > SUMS_PER_BLOCK {
            return Err(ComponentError::TooManySums(sums.len()));
        }
        let mut out = [0u8; BLOCK];
        for (place, sum) in out.chunks_exact_mut(8).zip(sums) {
            place.copy_from_slice(&sum.to_le_bytes());
        }
        let check = xxh3_64_with_seed(&out[..CHECKED], id.seed());
        out[CHECKED..].copy_from_slice(&check.to_le_bytes());
        Ok(out)
    }

    /// The block, if it is whole and the one that was meant.
    ///
    /// # Errors
    /// `BlockDamaged`.
    pub fn decode(id: BlockId, bytes: &[u8; BLOCK]) -> Result<TableBlock, ComponentError> {
        if xxh3_64_with_seed(&bytes[..CHECKED], id.seed()) != long(bytes, CHECKED) {
            let BlockId { version, component, block } = id;
            return Err(ComponentError::BlockDamaged { version, component, block });
        }
        let mut sums = [0u64; SUMS_PER_BLOCK];
        for (sum, place) in sums.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *sum = u64::from_le_bytes(*place);
        }
        Ok(TableBlock { sums })
    }

    /// The checksums; zeros where there is no page ([`Geometry::block_sums`] says how many are meant).
    pub fn sums(&self) -> &[u64; SUMS_PER_BLOCK] {
        &self.sums
    }
}

/// The whole table of a component: its blocks in order.
pub fn encode_table(version: u64, component: u32, sums: &[u64]) -> impl Iterator<Item = [u8; BLOCK]> {
    sums.chunks(SUMS_PER_BLOCK)
        .zip(0u64..)
        .filter_map(move |(sums, block)| TableBlock::encode(BlockId { version, component, block }, sums).ok())
}

/// What a header keeps of the object's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeptKey {
    /// All of it.
    Whole(Key),
    /// The beginning of a key longer than [`KEPT_KEY`] bytes.
    Cut {
        /// Its first [`KEPT_KEY`] bytes, for people only.
        start: Vec<u8>,
        /// Its length, bytes.
        length: u32,
        /// Its xxh3-128.
        hash: u128,
    },
}

impl KeptKey {
    fn of(key: &Key) -> KeptKey {
        match key.as_bytes().get(..KEPT_KEY) {
            Some(start) if key.as_bytes().len() > KEPT_KEY => KeptKey::Cut {
                start: start.to_vec(),
                length: key.as_bytes().len() as u32,
                hash: xxh3_128(key.as_bytes()),
            },
            _ => KeptKey::Whole(key.clone()),
        }
    }

    /// Whether this is what a header keeps of `key`.
    pub fn is_of(&self, key: &Key) -> bool {
        *self == KeptKey::of(key)
    }
}

impl fmt::Display for KeptKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeptKey::Whole(key) => key.fmt(f),
            KeptKey::Cut { start, length, .. } => write!(f, "{}... ({length} bytes)", Escaped(start)),
        }
    }
}

/// What a component file says of itself, checked: the layout is valid and the length is what the arithmetic gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The version.
    pub version: u64,
    /// The object's namespace.
    pub namespace: Namespace,
    /// The object's key, or what there is room for.
    pub key: KeptKey,
    /// Index of the component, below the width.
    pub component: u32,
    /// Size and layout of the object.
    pub striping: Striping,
    /// Mode and time.
    pub attributes: Attributes,
}

impl Header {
    /// The header of one component of an object.
    ///
    /// # Errors
    /// `Field` when there is no such component.
    pub fn new(name: &ObjectName, descriptor: &Descriptor, component: u32) -> Result<Header, ComponentError> {
        let header = Header {
            version: descriptor.version,
            namespace: name.namespace.clone(),
            key: KeptKey::of(&name.key),
            component,
            striping: descriptor.striping,
            // Whose it is stands in the log alone: an owner is no mark of a file's identity.
            attributes: Attributes { owner: None, ..descriptor.attributes },
        };
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<(), ComponentError> {
        let field = |field, value| Err(ComponentError::Field { field, value });
        if !is_version(self.version) {
            return field("version", self.version);
        }
        if self.component >= self.striping.width() {
            return field("component index", self.component.into());
        }
        if self.attributes.mode > 0o7777 {
            return field("mode", self.attributes.mode.into());
        }
        if self.attributes.mtime_nanoseconds >= 1_000_000_000 {
            return field("mtime", self.attributes.mtime_nanoseconds.into());
        }
        Ok(())
    }

    /// Bytes of data in this component.
    pub fn length(&self) -> u64 {
        self.striping.component_length(self.component)
    }

    /// Where things lie in this file.
    ///
    /// # Errors
    /// None for a header that was decoded.
    pub fn geometry(&self) -> Result<Geometry, ComponentError> {
        Geometry::of(&self.striping, self.component)
    }

    /// The name that the file must have.
    pub fn file_name(&self) -> FileName {
        FileName { version: self.version, component: self.component }
    }

    /// Whether this is the file that `descriptor` means by `component`.
    ///
    /// # Errors
    /// `Disagrees`, naming the first field that differs.
    pub fn agree(&self, descriptor: &Descriptor, component: u32) -> Result<(), ComponentError> {
        let (found, wanted) = (&self.striping, &descriptor.striping);
        let fields = [
            ("version", self.version, descriptor.version),
            ("component index", self.component.into(), component.into()),
            ("width", found.width().into(), wanted.width().into()),
            ("stripe size", found.stripe_size().into(), wanted.stripe_size().into()),
            ("page size", found.page_size().into(), wanted.page_size().into()),
            ("object size", found.size(), wanted.size()),
        ];
        match fields.into_iter().find(|(_, found, wanted)| found != wanted) {
            Some((field, found, wanted)) => Err(ComponentError::Disagrees { field, found, wanted }),
            None => Ok(()),
        }
    }

    /// As it lies on disk.
    pub fn encode(&self) -> [u8; BLOCK] {
        let (kept, length, hash) = match &self.key {
            KeptKey::Whole(key) => (key.as_bytes(), key.as_bytes().len() as u32, xxh3_128(key.as_bytes())),
            KeptKey::Cut { start, length, hash } => (start.as_slice(), *length, *hash),
        };
        let namespace = self.namespace.as_str().as_bytes();
        let mut out = [0u8; BLOCK];
        let mut put = |at: usize, bytes: &[u8]| {
            out[at..].iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
        };
        put(0, &MAGIC);
        put(8, &FORMAT.to_le_bytes());
        put(16, &self.version.to_le_bytes());
        put(24, &self.component.to_le_bytes());
        put(28, &self.striping.width().to_le_bytes());
        put(32, &self.striping.stripe_size().to_le_bytes());
        put(36, &self.striping.page_size().to_le_bytes());
        put(40, &self.length().to_le_bytes());
        put(48, &self.striping.size().to_le_bytes());
        put(56, &self.attributes.mtime_seconds.to_le_bytes());
        put(64, &self.attributes.mtime_nanoseconds.to_le_bytes());
        put(68, &self.attributes.mode.to_le_bytes());
        put(72, &length.to_le_bytes());
        put(76, &(namespace.len() as u32).to_le_bytes());
        put(80, &hash.to_le_bytes());
        put(NAMESPACE_AT, namespace);
        put(KEY_AT, &kept[..kept.len().min(KEPT_KEY)]);
        let check = xxh3_64(&out[..CHECKED]);
        out[CHECKED..].copy_from_slice(&check.to_le_bytes());
        out
    }

    /// Checks every claim.
    ///
    /// # Errors
    /// What is wrong. `Magic` and `HeaderDamaged` mean that no header was ever completed here; `Format` that a newer
    /// software wrote it.
    pub fn decode(bytes: &[u8; BLOCK]) -> Result<Header, ComponentError> {
        let [m0, m1, m2, m3, m4, m5, m6, m7, ..] = *bytes;
        let magic = [m0, m1, m2, m3, m4, m5, m6, m7];
        if magic != MAGIC {
            return Err(ComponentError::Magic(magic));
        }
        if long(bytes, CHECKED) != xxh3_64(&bytes[..CHECKED]) {
            return Err(ComponentError::HeaderDamaged);
        }
        if word(bytes, 8) != FORMAT {
            return Err(ComponentError::Format(word(bytes, 8)));
        }
        let striping = Striping::new(long(bytes, 48), word(bytes, 36), word(bytes, 32), word(bytes, 28))?;
        let header = Header {
            version: long(bytes, 16),
            namespace: decode_namespace(bytes)?,
            key: decode_key(bytes)?,
            component: word(bytes, 24),
            striping,
            attributes: Attributes {
                mode: word(bytes, 68),
                mtime_seconds: long(bytes, 56).cast_signed(),
                mtime_nanoseconds: word(bytes, 64),
                owner: None,
            },
        };
        header.check()?;
        if header.length() != long(bytes, 40) {
            return Err(ComponentError::Field { field: "length", value: long(bytes, 40) });
        }
        Ok(header)
    }
}

fn decode_namespace(bytes: &[u8; BLOCK]) -> Result<Namespace, ComponentError> {
    let length = word(bytes, 76);
    let bad = ComponentError::Field { field: "namespace length", value: length.into() };
    let area = &bytes[NAMESPACE_AT..KEY_AT];
    let Some((name, rest)) = usize::try_from(length).ok().and_then(|length| area.split_at_checked(length)) else {
        return Err(bad);
    };
    if name.len() > MAX_NAMESPACE || rest.iter().any(|&b| b != 0) {
        return Err(bad);
    }
    let name = std::str::from_utf8(name).map_err(|error| {
        let at = error.valid_up_to();
        NameError::NamespaceByte { byte: name.get(at).copied().unwrap_or(0), at }
    })?;
    Ok(Namespace::new(name)?)
}

fn decode_key(bytes: &[u8; BLOCK]) -> Result<KeptKey, ComponentError> {
    let length = word(bytes, 72);
    let bad = |field| ComponentError::Field { field, value: length.into() };
    let area = &bytes[KEY_AT..KEY_AT + KEPT_KEY];
    let hash = u128::from(long(bytes, 80)) | u128::from(long(bytes, 88)) << 64;
    let whole = usize::try_from(length).map_err(|_| bad("key length"))?;
    if whole > crate::limits::MAX_KEY {
        return Err(bad("key length"));
    }
    let Some((key, rest)) = area.split_at_checked(whole) else {
        return Ok(KeptKey::Cut { start: area.to_vec(), length, hash });
    };
    if rest.iter().any(|&b| b != 0) {
        return Err(bad("key length"));
    }
    if xxh3_128(key) != hash {
        return Err(bad("key hash"));
    }
    Ok(KeptKey::Whole(Key::new(key.to_vec())?))
}

fn word(bytes: &[u8; BLOCK], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn long(bytes: &[u8; BLOCK], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

#[cfg(test)]
#[path = "component_tests.rs"]
mod tests;
