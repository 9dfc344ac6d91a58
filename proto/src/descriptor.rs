//! Descriptors and proofs as values that have been checked. What arrives as a message is turned into these or refused.

use crate::layout::{LayoutError, Striping};
use crate::limits::{LAST_UNUSED_VERSION, MAX_REPLICAS, MAX_VERSION};
use crate::name::{NameError, check_node_name};
use crate::v1;

/// A 16-byte id of a store or of a stripe directory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(pub [u8; 16]);

impl Id {
    /// Refuses anything that is not 16 bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Id> {
        bytes.try_into().ok().map(Id)
    }
    /// For messages.
    pub fn to_bytes(self) -> bytes::Bytes {
        bytes::Bytes::copy_from_slice(&self.0)
    }
}

impl std::fmt::Display for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
impl std::fmt::Debug for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

/// Why a descriptor or a proof is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DescriptorError {
    /// See the message.
    #[error("descriptor lacks its {0}")]
    Missing(&'static str),
    /// See the message.
    #[error("version {0} is outside {first}..={MAX_VERSION}", first = LAST_UNUSED_VERSION + 1)]
    Version(u64),
    /// See the message.
    #[error("object kind {0} is not known")]
    Kind(i32),
    /// See the message.
    #[error("mode {0:o} has bits beyond 7777")]
    Mode(u32),
    /// See the message.
    #[error("{0} nanoseconds are more than a second")]
    Nanoseconds(u32),
    /// See the message.
    #[error("owner {uid:?}, group {gid:?}: both or neither, and not {none}", none = u32::MAX)]
    Owner {
        /// As sent.
        uid: Option<u32>,
        /// As sent.
        gid: Option<u32>,
    },
    /// See the message.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// See the message.
    #[error("{got} components listed where the width is {width}")]
    Components {
        /// Listed.
        got: usize,
        /// From the layout.
        width: u32,
    },
    /// See the message.
    #[error("component {index} stands at place {place} of the list")]
    Order {
        /// Its own index.
        index: u32,
        /// Where it stands.
        place: usize,
    },
    /// See the message.
    #[error("component {index} is {got} bytes long where the arithmetic gives {want}")]
    Length {
        /// Component.
        index: u32,
        /// Listed.
        got: u64,
        /// Computed.
        want: u64,
    },
    /// See the message.
    #[error("component {index} has {got} replicas, not 1 to {MAX_REPLICAS}")]
    Replicas {
        /// Component.
        index: u32,
        /// Listed.
        got: usize,
    },
    /// See the message.
    #[error("component {0} names a directory id that is not 16 bytes, or a node that cannot be one")]
    Replica(u32),
    /// See the message.
    #[error("component {0} names one replica twice")]
    ReplicaTwice(u32),
    /// See the message.
    #[error("proof: {0}")]
    ProofNode(NameError),
    /// See the message.
    #[error("proof has {0} slots where this version reads one")]
    Proof(usize),
}

/// Whose a file was when it was put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// User id; not `u32::MAX`, which means nobody at all.
    pub uid: u32,
    /// Group id; not `u32::MAX`.
    pub gid: u32,
}

impl Owner {
    /// Both, or neither.
    ///
    /// # Errors
    /// One without the other, or an id that none can have.
    pub fn from_message(uid: Option<u32>, gid: Option<u32>) -> Result<Option<Owner>, DescriptorError> {
        match (uid, gid) {
            (None, None) => Ok(None),
            (Some(uid), Some(gid)) if uid != u32::MAX && gid != u32::MAX => Ok(Some(Owner { uid, gid })),
            _ => Err(DescriptorError::Owner { uid, gid }),
        }
    }
}

/// Mode, modification time, owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Permission bits.
    pub mode: u32,
    /// Seconds since 1970.
    pub mtime_seconds: i64,
    /// And nanoseconds, below a billion.
    pub mtime_nanoseconds: u32,
    /// `None`: the put did not say.
    pub owner: Option<Owner>,
}

impl Attributes {
    /// Checks every claim of the message; its size is not part of them.
    ///
    /// # Errors
    /// The first that is wrong.
    pub fn from_message(message: &v1::Attributes) -> Result<Attributes, DescriptorError> {
        if message.mode > 0o7777 {
            return Err(DescriptorError::Mode(message.mode));
        }
        if message.mtime_nanoseconds >= 1_000_000_000 {
            return Err(DescriptorError::Nanoseconds(message.mtime_nanoseconds));
        }
        Ok(Attributes {
            mode: message.mode,
            mtime_seconds: message.mtime_seconds,
            mtime_nanoseconds: message.mtime_nanoseconds,
            owner: Owner::from_message(message.uid, message.gid)?,
        })
    }

    /// The message that says the same of an object of `size` bytes.
    pub fn to_message(&self, size: u64) -> v1::Attributes {
        v1::Attributes {
            mode: self.mode,
            mtime_seconds: self.mtime_seconds,
            mtime_nanoseconds: self.mtime_nanoseconds,
            size,
            uid: self.owner.map(|owner| owner.uid),
            gid: self.owner.map(|owner| owner.gid),
        }
    }
}

/// One copy of a component.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replica {
    /// The node that holds it.
    pub node: String,
    /// The stripe directory that holds it.
    pub directory: Id,
}

/// What lookup says of an object, checked: components in order, lengths as the arithmetic has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// It alone identifies content; also the inode number.
    pub version: u64,
    /// Mode and time.
    pub attributes: Attributes,
    /// Size and layout.
    pub striping: Striping,
    /// Replicas of each component, by index.
    pub components: Vec<Vec<Replica>>,
}

impl Descriptor {
    /// Checks every claim of the message.
    pub fn from_message(message: &v1::Descriptor) -> Result<Descriptor, DescriptorError> {
        use DescriptorError as E;
        if message.version <= LAST_UNUSED_VERSION || message.version > MAX_VERSION {
            return Err(E::Version(message.version));
        }
        if message.kind != v1::Kind::File as i32 {
            return Err(E::Kind(message.kind));
        }
        let claimed = message.attributes.as_ref().ok_or(E::Missing("attributes"))?;
        let attributes = Attributes::from_message(claimed)?;
        let layout = message.layout.as_ref().ok_or(E::Missing("layout"))?;
        let striping = Striping::new(claimed.size, layout.page_size, layout.stripe_size, layout.width)?;
        if message.components.len() != layout.width as usize {
            return Err(E::Components { got: message.components.len(), width: layout.width });
        }
        let mut components = Vec::with_capacity(message.components.len());
        for (place, component) in message.components.iter().enumerate() {
            let index = component.index;
            if index as usize != place {
                return Err(E::Order { index, place });
            }
            let want = striping.component_length(index);
            if component.length != want {
                return Err(E::Length { index, got: component.length, want });
            }
            let got = component.replicas.len();
            if got == 0 || got > MAX_REPLICAS {
                return Err(E::Replicas { index, got });
            }
            let replicas = component.replicas.iter().map(|replica| {
                let directory = Id::from_bytes(&replica.directory).filter(|_| check_node_name(&replica.node).is_ok());
                directory.map(|directory| Replica { node: replica.node.clone(), directory }).ok_or(E::Replica(index))
            });
            let replicas: Vec<Replica> = replicas.collect::<Result<_, _>>()?;
            if (1..replicas.len()).any(|i| replicas[..i].contains(&replicas[i])) {
                return Err(E::ReplicaTwice(index));
            }
            components.push(replicas);
        }
        Ok(Descriptor { version: message.version, attributes, striping, components })
    }

    /// The message that says the same.
    pub fn to_message(&self) -> v1::Descriptor {
        let striping = &self.striping;
        v1::Descriptor {
            version: self.version,
            kind: v1::Kind::File as i32,
            attributes: Some(self.attributes.to_message(striping.size())),
            layout: Some(v1::Layout {
                page_size: striping.page_size(),
                stripe_size: striping.stripe_size(),
                width: striping.width(),
            }),
            components: (0u32..)
                .zip(&self.components)
                .map(|(index, replicas)| v1::Component {
                    index,
                    length: striping.component_length(index),
                    replicas: replicas
                        .iter()
                        .map(|r| v1::Replica { node: r.node.clone(), directory: r.directory.to_bytes() })
                        .collect(),
                })
                .collect(),
        }
    }
}

/// Under which slot value a lookup's answer is current.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Proof {
    /// Who keeps the slot.
    pub node: String,
    /// In which run.
    pub incarnation: u64,
    /// Which slot.
    pub slot: u32,
    /// Its value.
    pub value: u64,
    /// The server's hash of the name.
    pub name_tag: u64,
}

impl Proof {
    /// One slot is what this version evaluates.
    pub fn from_message(message: &v1::Proof) -> Result<Proof, DescriptorError> {
        let [slot] = message.slots.as_slice() else { return Err(DescriptorError::Proof(message.slots.len())) };
        check_node_name(&slot.node).map_err(DescriptorError::ProofNode)?;
        Ok(Proof {
            node: slot.node.clone(),
            incarnation: slot.incarnation,
            slot: slot.slot,
            value: slot.value,
            name_tag: slot.name_tag,
        })
    }

    /// As a list of one.
    pub fn to_message(&self) -> v1::Proof {
        v1::Proof { slots: vec![self.to_slot()] }
    }

    /// As it goes into a check or a fetch.
    pub fn to_slot(&self) -> v1::SlotProof {
        v1::SlotProof {
            node: self.node.clone(),
            incarnation: self.incarnation,
            slot: self.slot,
            value: self.value,
            name_tag: self.name_tag,
        }
    }
}

#[cfg(test)]
#[path = "descriptor_tests.rs"]
pub(crate) mod tests;
