//! A table of buffers by name, which gives the names in a recording their buffers on one replica.
//! Not here: the creation of the buffers.

use super::MemoryError;
use super::arena::Buffer;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Names and their buffers. Several names may refer to one buffer.
#[derive(Clone, Debug, Default)]
pub struct BufferTable {
    by_name: BTreeMap<String, Arc<Buffer>>,
}

impl BufferTable {
    /// Creates an empty table.
    pub fn new() -> BufferTable {
        BufferTable::default()
    }

    /// Adds a buffer under its own name, which must not be in the table yet.
    pub fn add(&mut self, buffer: Arc<Buffer>) -> Result<(), MemoryError> {
        let name = buffer.name().to_owned();
        self.alias(name, buffer)
    }

    /// Adds a buffer under the given name, which must not be in the table yet.
    pub fn alias(&mut self, name: String, buffer: Arc<Buffer>) -> Result<(), MemoryError> {
        match self.by_name.entry(name) {
            std::collections::btree_map::Entry::Vacant(place) => {
                place.insert(buffer);
                Ok(())
            }
            std::collections::btree_map::Entry::Occupied(place) => {
                Err(MemoryError::Duplicate { name: place.key().clone() })
            }
        }
    }

    /// Returns the buffer with this name.
    pub fn get(&self, name: &str) -> Option<&Arc<Buffer>> {
        self.by_name.get(name)
    }

    /// Returns the buffer with this name, or an error that contains the name.
    pub fn require(&self, name: &str) -> Result<&Arc<Buffer>, MemoryError> {
        self.get(name).ok_or_else(|| MemoryError::Missing { name: name.to_owned() })
    }

    /// Iterates over names and buffers, ordered by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Arc<Buffer>)> {
        self.by_name.iter().map(|(name, buffer)| (name.as_str(), buffer))
    }

    /// The number of names.
    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Whether the table is empty.
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }
}
