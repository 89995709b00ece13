//! The pool of KV pages: which are free, and how many sequences hold each of the others.
//! Deliberately absent: what is in a page.

use super::executor::Page;
use std::collections::VecDeque;

/// Pages by holders. A page is free exactly if nobody holds it.
#[derive(Debug)]
pub struct PagePool {
    /// Holders by page.
    holders: Vec<u32>,
    /// Free pages, the longest free first: what was written last stays longest.
    free: VecDeque<Page>,
}

impl PagePool {
    /// All of `pages` free.
    pub fn new(pages: u32) -> PagePool {
        PagePool { holders: vec![0; pages as usize], free: (0..pages).map(Page).collect() }
    }

    /// Pages in all.
    pub fn total(&self) -> u32 {
        self.holders.len() as u32
    }

    /// Pages that nobody holds.
    pub fn free(&self) -> u32 {
        self.free.len() as u32
    }

    /// Pages that somebody holds.
    pub fn used(&self) -> u32 {
        self.total() - self.free()
    }

    /// `count` free pages, each with one holder from now on; `None`, and nothing taken, if
    /// there are fewer.
    pub fn take(&mut self, count: u32) -> Option<Vec<Page>> {
        if count > self.free() {
            return None;
        }
        let pages: Vec<Page> = self.free.drain(..count as usize).collect();
        for page in &pages {
            let holders = &mut self.holders[page.0 as usize];
            assert_eq!(*holders, 0, "a free page is held");
            *holders = 1;
        }
        Some(pages)
    }

    /// One more holder of a page that is held.
    pub fn share(&mut self, page: Page) {
        let holders = &mut self.holders[page.0 as usize];
        assert!(*holders > 0, "a free page cannot be shared");
        *holders += 1;
    }

    /// One holder less; the last one frees it.
    pub fn release(&mut self, page: Page) {
        let holders = &mut self.holders[page.0 as usize];
        assert!(*holders > 0, "a free page cannot be released");
        *holders -= 1;
        if *holders == 0 {
            self.free.push_back(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taking_is_all_or_nothing() {
        let mut pool = PagePool::new(3);
        let two = pool.take(2).unwrap();
        assert_ne!(two[0], two[1]);
        assert_eq!(pool.take(2), None);
        assert_eq!((pool.free(), pool.used(), pool.total()), (1, 2, 3));
        assert_eq!(pool.take(0), Some(vec![]));
    }

    #[test]
    fn a_shared_page_is_free_after_its_last_holder() {
        let mut pool = PagePool::new(1);
        let page = pool.take(1).unwrap()[0];
        pool.share(page);
        pool.release(page);
        assert_eq!(pool.free(), 0);
        pool.release(page);
        assert_eq!(pool.free(), 1);
    }

    #[test]
    fn the_longest_free_page_is_taken_first() {
        let mut pool = PagePool::new(2);
        let first = pool.take(1).unwrap()[0];
        pool.release(first);
        assert_ne!(pool.take(1).unwrap()[0], first);
    }
}
