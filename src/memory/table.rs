//! Buffers by name: what a recording's names mean on one replica.
//! Deliberately absent: making the buffers.

use super::MemoryError;
use super::arena::Buffer;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Names and their buffers. Several names may mean one buffer.
#[derive(Clone, Debug, Default)]
pub struct Table {
    by_name: BTreeMap<String, Arc<Buffer>>,
}

impl Table {
    /// An empty table.
    pub fn new() -> Table {
        Table::default()
    }

    /// Adds a buffer under its own name, which must be new.
    pub fn add(&mut self, buffer: Arc<Buffer>) -> Result<(), MemoryError> {
        let name = buffer.name().to_owned();
        self.alias(name, buffer)
    }

    /// Adds a buffer under a name of choice, which must be new.
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

    /// The buffer of that name.
    pub fn get(&self, name: &str) -> Option<&Arc<Buffer>> {
        self.by_name.get(name)
    }

    /// The buffer of that name, or an error that says it.
    pub fn require(&self, name: &str) -> Result<&Arc<Buffer>, MemoryError> {
        self.get(name).ok_or_else(|| MemoryError::Missing { name: name.to_owned() })
    }

    /// Names and buffers, in the names' order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Arc<Buffer>)> {
        self.by_name.iter().map(|(name, buffer)| (name.as_str(), buffer))
    }

    /// How many names.
    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Whether there are no names.
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }
}
