//! The pool of KV cache pages: which are free, how many sequences hold each of the others, and which can be reused by a
//! sequence with the same tokens (the prefix cache).
//! Not here: how a page's key is computed (`prefix`).

use crate::engine::plan::Page;
use crate::engine::prefix::PageKey;
use crate::kernels::attention::PAGE_TOKENS;
use std::collections::{BTreeMap, HashMap, VecDeque};

/// The content of a page that can be found in the prefix cache: its key, its tokens, and the page that it follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// The key of this page.
    pub name: PageKey,
    /// The key of the page before it; `None` for the first page of a sequence.
    pub behind: Option<PageKey>,
    /// The page's tokens.
    pub tokens: [u32; PAGE_TOKENS as usize],
    /// Whether the key does not depend on a salt, so that all requests without a salt can find the page.
    pub shared: bool,
}

/// A change of the prefix cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PageChange {
    /// The page can be found from now on.
    Stored(Content),
    /// The page can no longer be found.
    Removed(PageKey),
    /// No page can be found any more.
    Cleared,
}

/// The pages and their reference counts. A page is free exactly if no sequence holds it. A free page keeps its key and
/// its content until it is taken for something else; pages that have been free longest are taken first.
#[derive(Debug)]
pub struct PagePool {
    /// The number of holders, by page.
    holders: Vec<u32>,
    /// The keys, by page.
    names: Vec<Option<PageKey>>,
    /// Pages by key; if several have the same content, the first of them.
    named: HashMap<PageKey, Page>,
    /// By page: the content of pages that have a key, as far as the pool was given it.
    contents: Vec<Option<Content>>,
    /// The changes since they were last taken; `None` if they are not collected.
    changes: Option<Vec<PageChange>>,
    /// Free pages without a key.
    blank: VecDeque<Page>,
    /// Free pages with a key, by the time of their release.
    kept: BTreeMap<u64, Page>,
    /// By page: whether a draft model has computed the keys and values of all of its tokens.
    drafted: Vec<bool>,
    /// By page: its key in `kept`, if it is there.
    released: Vec<u64>,
    /// Incremented whenever a page with a key becomes free.
    clock: u64,
}

impl PagePool {
    /// Creates a pool of `pages` free pages.
    pub fn new(pages: u32) -> PagePool {
        PagePool {
            holders: vec![0; pages as usize],
            names: vec![None; pages as usize],
            named: HashMap::new(),
            contents: vec![None; pages as usize],
            changes: None,
            blank: (0..pages).map(Page).collect(),
            kept: BTreeMap::new(),
            drafted: vec![false; pages as usize],
            released: vec![0; pages as usize],
            clock: 0,
        }
    }

    /// Returns the total number of pages.
    pub fn total(&self) -> u32 {
        self.holders.len() as u32
    }

    /// Returns the number of pages without a holder.
    pub fn free(&self) -> u32 {
        (self.blank.len() + self.kept.len()) as u32
    }

    /// Returns the number of pages with a holder.
    pub fn used(&self) -> u32 {
        self.total() - self.free()
    }

    /// Returns the number of free pages that can still be found.
    pub fn cached(&self) -> u32 {
        self.kept.len() as u32
    }

    /// Returns the number of sequences that hold a page.
    pub fn holders(&self, page: Page) -> u32 {
        self.holders[page.0 as usize]
    }

    /// Takes `count` free pages, which then have one holder and no key. Pages without a key are taken first. Returns
    /// `None` and takes nothing if there are fewer.
    pub fn take(&mut self, count: u32) -> Option<Vec<Page>> {
        if count > self.free() {
            return None;
        }
        let mut pages = Vec::with_capacity(count as usize);
        for _ in 0..count {
            let page = match self.blank.pop_front() {
                Some(page) => page,
                None => {
                    let (_, page) = self.kept.pop_first().expect("the free pages were counted");
                    let name = self.names[page.0 as usize].take().expect("a kept page has a name");
                    self.named.remove(&name);
                    if let (Some(content), Some(changes)) =
                        (self.contents[page.0 as usize].take(), self.changes.as_mut())
                        && content.shared
                    {
                        changes.push(PageChange::Removed(content.name));
                    }
                    page
                }
            };
            let holders = &mut self.holders[page.0 as usize];
            assert_eq!(*holders, 0, "a free page is held");
            *holders = 1;
            self.drafted[page.0 as usize] = false;
            pages.push(page);
        }
        Some(pages)
    }

    /// Returns the pages of the longest prefix of `names` of which every key has a page, and how many of these pages
    /// are free.
    pub fn find(&self, names: &[PageKey]) -> (Vec<Page>, u32) {
        let pages: Vec<Page> = names.iter().map_while(|name| self.named.get(name).copied()).collect();
        let free = self.free_among(&pages);
        (pages, free)
    }

    /// Returns the page with a key.
    pub fn named(&self, name: PageKey) -> Option<Page> {
        self.named.get(&name).copied()
    }

    /// Notes that a draft model has computed the keys and values of all tokens of a page, or will have done so before another
    /// plan reads them.
    pub fn set_drafted(&mut self, page: Page) {
        self.drafted[page.0 as usize] = true;
    }

    /// Whether a draft model has computed the keys and values of all tokens of a page since it was taken.
    pub fn is_drafted(&self, page: Page) -> bool {
        self.drafted[page.0 as usize]
    }

    /// Returns how many of the pages have no holder.
    pub fn free_among(&self, pages: &[Page]) -> u32 {
        pages.iter().filter(|page| self.holders(**page) == 0).count() as u32
    }

    /// Adds a holder to a page that [`PagePool::find`] returned.
    pub fn share(&mut self, page: Page) {
        let at = page.0 as usize;
        assert!(self.names[at].is_some(), "a page without a name cannot be shared");
        if self.holders[at] == 0 {
            let kept = self.kept.remove(&self.released[at]);
            assert_eq!(kept, Some(page), "a free page with a name is kept");
        }
        self.holders[at] += 1;
    }

    /// Like [`PagePool::name`], and stores the content that the key stands for.
    pub fn name_content(&mut self, page: Page, content: Content) {
        if !self.name(page, content.name) {
            return;
        }
        if let Some(changes) = self.changes.as_mut().filter(|_| content.shared) {
            changes.push(PageChange::Stored(content.clone()));
        }
        self.contents[page.0 as usize] = Some(content);
    }

    /// Starts or stops the collection of changes for [`PagePool::take_changes`]. Only changes of pages without a salt
    /// are collected.
    pub fn watch(&mut self, watched: bool) {
        self.changes = watched.then(|| self.changes.take().unwrap_or_default());
    }

    /// Returns the changes since the last call, in order.
    pub fn take_changes(&mut self) -> Vec<PageChange> {
        self.changes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Returns the contents of all pages that can be found without a salt, each after the page that precedes it in its
    /// sequence.
    pub fn contents(&self) -> Vec<Content> {
        let contents: HashMap<PageKey, &Content> =
            self.contents.iter().flatten().filter(|content| content.shared).map(|one| (one.name, one)).collect();
        let mut depths: Vec<(usize, PageKey)> = contents
            .keys()
            .map(|name| {
                let chain = std::iter::successors(contents.get(name), |one| contents.get(&one.behind?));
                (chain.count(), *name)
            })
            .collect();
        depths.sort_unstable();
        depths.into_iter().map(|(_, name)| contents[&name].clone()).collect()
    }

    /// Sets the key of a held page, by which it can be found from now on. Returns false, and leaves the page without a
    /// key, if another page already has this key.
    pub fn name(&mut self, page: Page, name: PageKey) -> bool {
        let at = page.0 as usize;
        assert!(self.holders[at] > 0, "a free page is named");
        assert!(self.names[at].is_none(), "a page is named twice");
        let std::collections::hash_map::Entry::Vacant(entry) = self.named.entry(name) else { return false };
        entry.insert(page);
        self.names[at] = Some(name);
        true
    }

    /// Removes a holder; a page without holders is free.
    pub fn release(&mut self, page: Page) {
        let at = page.0 as usize;
        let holders = &mut self.holders[at];
        assert!(*holders > 0, "a free page cannot be released");
        *holders -= 1;
        if *holders > 0 {
            return;
        }
        if self.names[at].is_some() {
            self.released[at] = self.clock;
            self.kept.insert(self.clock, page);
            self.clock += 1;
        } else {
            self.blank.push_back(page);
        }
    }

    /// Removes the keys of all pages, so that none can be found any more. Only allowed while no page is held.
    pub fn forget(&mut self) {
        assert_eq!(self.used(), 0, "a held page would lose its name");
        self.blank.extend(std::mem::take(&mut self.kept).into_values());
        self.names.fill(None);
        self.named.clear();
        self.contents.fill(None);
        if let Some(changes) = &mut self.changes {
            changes.push(PageChange::Cleared);
        }
    }

    /// Panics if redundant state is inconsistent.
    pub fn assert_consistent(&self) {
        let free = self.holders.iter().filter(|holders| **holders == 0).count();
        assert_eq!(free as u32, self.free(), "a page is neither free nor held, or both");
        let named = self.names.iter().flatten().count();
        assert_eq!(named, self.named.len(), "a name without a page, or with two");
        for (name, page) in &self.named {
            assert_eq!(self.names[page.0 as usize], Some(*name), "{page:?} has another name");
        }
        for (content, name) in self.contents.iter().zip(&self.names) {
            assert!(content.as_ref().is_none_or(|content| Some(content.name) == *name), "{content:?} is {name:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u128) -> PageKey {
        PageKey(number)
    }

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
        pool.name(page, key(1));
        pool.share(page);
        pool.release(page);
        assert_eq!(pool.free(), 0);
        pool.release(page);
        assert_eq!((pool.free(), pool.cached()), (1, 1));
        pool.assert_consistent();
    }

    #[test]
    fn a_free_page_is_found_until_it_is_taken_and_blank_ones_go_first() {
        let mut pool = PagePool::new(3);
        let pages = pool.take(2).unwrap();
        pool.name(pages[0], key(1));
        pool.name(pages[1], key(2));
        pool.release(pages[1]);
        pool.release(pages[0]);
        assert_eq!(pool.find(&[key(1), key(2), key(3)]), (pages.clone(), 2));
        assert_eq!(pool.find(&[key(3), key(1)]), (vec![], 0), "a name behind a gap is of no use");
        // The page without a key goes first, then the one that was released first.
        let taken = pool.take(2).unwrap();
        assert!(!taken.contains(&pages[0]));
        assert_eq!(taken[1], pages[1]);
        assert_eq!(pool.find(&[key(1), key(2)]), (vec![pages[0]], 1));
        pool.share(pages[0]);
        assert_eq!(pool.find(&[key(1)]), (vec![pages[0]], 0));
        assert_eq!((pool.free(), pool.cached()), (0, 0));
        pool.assert_consistent();
    }

    #[test]
    fn what_is_forgotten_is_not_found_and_every_page_can_be_taken() {
        let mut pool = PagePool::new(3);
        let pages = pool.take(2).unwrap();
        pool.name(pages[0], key(1));
        pool.name(pages[1], key(2));
        pages.iter().for_each(|page| pool.release(*page));
        assert_eq!(pool.cached(), 2);
        pool.forget();
        assert_eq!((pool.free(), pool.cached(), pool.find(&[key(1)]).0.len()), (3, 0, 0));
        pool.assert_consistent();
        let again = pool.take(3).unwrap();
        pool.name(again[0], key(1));
        assert_eq!(pool.find(&[key(1)]).0, [again[0]]);
        pool.assert_consistent();
    }

    #[test]
    fn what_can_be_found_is_told_as_it_comes_and_goes() {
        let content = |name, behind: Option<u128>, shared| Content {
            name: key(name),
            behind: behind.map(key),
            tokens: [name as u32; PAGE_TOKENS as usize],
            shared,
        };
        let mut pool = PagePool::new(4);
        let pages = pool.take(4).unwrap();
        pool.name_content(pages[0], content(9, None, true));
        assert!(pool.take_changes().is_empty(), "nobody asks");
        pool.watch(true);
        // The order of the keys' values is not the order of the pages.
        pool.name_content(pages[1], content(1, Some(9), true));
        pool.name_content(pages[2], content(5, None, false));
        pool.name_content(pages[3], content(1, Some(9), true));
        assert_eq!(pool.take_changes(), [PageChange::Stored(content(1, Some(9), true))]);
        assert_eq!(pool.contents(), [content(9, None, true), content(1, Some(9), true)]);
        pool.assert_consistent();
        for page in [1, 0, 2, 3] {
            pool.release(pages[page]);
        }
        assert!(pool.take_changes().is_empty(), "free pages are found too");
        pool.take(2).unwrap();
        assert_eq!(pool.take_changes(), [PageChange::Removed(key(1))]);
        let rest = pool.take(1).unwrap();
        assert_eq!(pool.take_changes(), [PageChange::Removed(key(9))]);
        assert!(pool.contents().is_empty());
        pool.name_content(rest[0], content(7, None, true));
        pool.assert_consistent();
        pool.watch(false);
        assert!(pool.take_changes().is_empty());
    }

    #[test]
    fn of_two_pages_with_one_content_the_first_is_found() {
        let mut pool = PagePool::new(2);
        let pages = pool.take(2).unwrap();
        pool.name(pages[0], key(1));
        pool.name(pages[1], key(1));
        assert_eq!(pool.find(&[key(1)]).0, [pages[0]]);
        pool.release(pages[1]);
        assert_eq!(pool.cached(), 0, "nobody can find it");
        pool.assert_consistent();
    }
}
