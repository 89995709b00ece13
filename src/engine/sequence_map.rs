//! A map from sequence ids to values, with constant-time access: with hundreds of rows, a step accesses each of them
//! several times. Not here: any order except that of arrival.

use crate::engine::sequence::SequenceId;
use std::collections::VecDeque;
use std::ops::Index;

/// Values by sequence id. Ids grow with arrivals, so the map is an array from the oldest sequence to the youngest, with
/// eight bytes for each sequence in between that was removed.
#[derive(Debug)]
pub struct SequenceMap<T> {
    /// The id of the first place.
    base: u64,
    /// The values by id, from `base` on; the first place is never empty.
    places: VecDeque<Option<Box<T>>>,
    /// The number of places in use.
    len: usize,
}

impl<T> Default for SequenceMap<T> {
    fn default() -> SequenceMap<T> {
        SequenceMap { base: 0, places: VecDeque::new(), len: 0 }
    }
}

impl<T> SequenceMap<T> {
    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the map is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn place(&self, id: SequenceId) -> Option<usize> {
        id.0.checked_sub(self.base).map(|at| at as usize).filter(|at| *at < self.places.len())
    }

    /// Returns the value of a sequence, if there is one.
    pub fn get(&self, id: SequenceId) -> Option<&T> {
        self.places[self.place(id)?].as_deref()
    }

    /// Returns the value of a sequence for modification, if there is one.
    pub fn get_mut(&mut self, id: SequenceId) -> Option<&mut T> {
        let at = self.place(id)?;
        self.places[at].as_deref_mut()
    }

    /// Inserts a value.
    ///
    /// # Panics
    /// If the map is not empty and the sequence is older than all in it, or if the sequence has a value.
    pub fn insert(&mut self, id: SequenceId, value: T) {
        if self.places.is_empty() {
            self.base = id.0;
        }
        let at = id.0.checked_sub(self.base).expect("sequences come in the order of their numbers") as usize;
        while self.places.len() <= at {
            self.places.push_back(None);
        }
        let before = self.places[at].replace(Box::new(value));
        assert!(before.is_none(), "{id:?} is kept already");
        self.len += 1;
    }

    /// Removes and returns the value of a sequence, if there is one.
    pub fn remove(&mut self, id: SequenceId) -> Option<T> {
        let at = self.place(id)?;
        let value = self.places[at].take()?;
        self.len -= 1;
        while let Some(None) = self.places.front() {
            self.places.pop_front();
            self.base += 1;
        }
        Some(*value)
    }

    /// Returns the ids of all sequences with values, oldest first.
    pub fn ids(&self) -> Vec<SequenceId> {
        let kept = (self.base..).zip(&self.places).filter(|(_, place)| place.is_some());
        kept.map(|(id, _)| SequenceId(id)).collect()
    }
}

impl<T> Index<SequenceId> for SequenceMap<T> {
    type Output = T;

    fn index(&self, id: SequenceId) -> &T {
        self.get(id).unwrap_or_else(|| panic!("{id:?} is not kept"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_until_they_are_removed_in_any_order() {
        let mut kept = SequenceMap::default();
        for id in [5, 6, 8, 9] {
            kept.insert(SequenceId(id), id * 10);
        }
        assert_eq!((kept.len(), kept.get(SequenceId(7)), kept.get(SequenceId(4))), (4, None, None));
        assert_eq!(kept[SequenceId(8)], 80);
        assert_eq!(kept.remove(SequenceId(6)), Some(60));
        assert_eq!(kept.remove(SequenceId(6)), None);
        assert_eq!(kept.remove(SequenceId(5)), Some(50));
        assert_eq!(kept.ids(), [SequenceId(8), SequenceId(9)]);
        assert_eq!(kept.places.len(), 2, "places before the oldest are given up");
        *kept.get_mut(SequenceId(9)).unwrap() += 1;
        assert_eq!(kept.remove(SequenceId(8)), Some(80));
        assert_eq!(kept.remove(SequenceId(9)), Some(91));
        assert!(kept.is_empty());
        kept.insert(SequenceId(20), 1);
        assert_eq!(kept.ids(), [SequenceId(20)]);
    }
}
