//! The pages of layers with a sliding window: a sequence takes them as its tokens are queued, and gives back those that no
//! unfinished or later token of it sees. They are named like the other pages, so that the prefix cache finds them as long
//! as nobody takes them.
//! Not here: which sequence holds which page (`sequence`), and when (`scheduler`).

use crate::engine::page_pool::PagePool;
use crate::engine::plan::{Capacity, Page, WindowCapacity};
use crate::engine::prefix::PageKey;
use crate::kernels::attention::PAGE_TOKENS;

/// The window pages of a replica.
#[derive(Debug)]
pub struct WindowPages {
    /// The number of tokens that a token sees, itself included.
    tokens: u32,
    /// The pages.
    pub pool: PagePool,
    /// The maximum number of pages of a sequence of the longest context, apart from those of its prompt's chunks in
    /// flight.
    each: u32,
    /// The maximum number of pages of the chunks in flight of all sequences.
    chunks: u32,
}

impl WindowPages {
    /// Creates the free pages of a capacity; `None` if windows have no pages of their own.
    ///
    /// # Panics
    /// If there are fewer pages than one sequence needs.
    pub fn new(capacity: &Capacity) -> Option<WindowPages> {
        let WindowCapacity { tokens, pages } = capacity.window?;
        let each = WindowCapacity::pages_each(tokens, capacity.context, capacity.run_ahead, capacity.drafts.most);
        let chunks = WindowCapacity::pages_of_chunks(capacity.prefill_chunk);
        assert!(each + chunks <= pages, "{pages} window pages, a sequence needs {}", each + chunks);
        Some(WindowPages { tokens, pool: PagePool::new(pages), each, chunks })
    }

    /// Returns the index of the first page that a token at `position` sees.
    pub fn first_seen(&self, position: u32) -> u32 {
        (position + 1).saturating_sub(self.tokens) / PAGE_TOKENS
    }

    /// Returns the number of pages that a sequence of at most `tokens` tokens holds at most, apart from those of its chunks.
    pub fn share(&self, tokens: u32) -> u32 {
        tokens.div_ceil(PAGE_TOKENS).min(self.each)
    }

    /// Whether sequences with these shares together always find the pages that they need.
    pub fn serves(&self, shares: u32) -> bool {
        shares + self.chunks <= self.pool.total()
    }

    /// Returns the length of the longest prefix of `names` after which a sequence can continue, with the pages that it
    /// then sees; the first of them is the page of [`WindowPages::first_seen`].
    pub fn find(&self, names: &[PageKey]) -> (usize, Vec<Page>) {
        // The number of pages with a key, one after the other, that end before each index.
        let mut runs = vec![0; names.len() + 1];
        for (index, name) in names.iter().enumerate() {
            runs[index + 1] = if self.pool.named(*name).is_some() { runs[index] + 1 } else { 0 };
        }
        let first = |count: usize| self.first_seen(count as u32 * PAGE_TOKENS) as usize;
        let fits = |count: &usize| runs[*count] >= count - first(*count).min(*count);
        let count = (0..=names.len()).rev().find(fits).unwrap_or(0);
        let pages = names[first(count).min(count)..count].iter().filter_map(|name| self.pool.named(*name)).collect();
        (count, pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::plan::Drafts;

    fn window(tokens: u32, pages: u32) -> WindowPages {
        let capacity = Capacity {
            slots: 2,
            pages: 100,
            window: Some(WindowCapacity { tokens, pages }),
            context: 400,
            prefill_chunk: 32,
            causal: true,
            prompts: 4,
            sequences: 4,
            mixed_steps: None,
            buckets: vec![1, 2],
            run_ahead: 16,
            gates: true,
            vocabulary: 100,
            drafts: Drafts::default(),
            snapshots: None,
            plan_limit: None,
        };
        WindowPages::new(&capacity).expect("it has a window")
    }

    #[test]
    fn a_token_sees_as_many_tokens_as_the_window_has() {
        let window = window(20, 40);
        let found: Vec<u32> = [0, 19, 20, 34, 35, 36, 51].iter().map(|position| window.first_seen(*position)).collect();
        assert_eq!(found, [0, 0, 0, 0, 1, 1, 2]);
        assert_eq!((window.share(17), window.share(400)), (2, 6));
    }

    #[test]
    fn a_beginning_is_found_if_what_its_next_token_sees_is_there() {
        let mut window = window(20, 40);
        let names: Vec<PageKey> = (1..=6).map(PageKey).collect();
        let pages = window.pool.take(6).unwrap();
        for index in [2, 3, 5] {
            window.pool.name(pages[index], names[index]);
        }
        // The token at 64 sees those from 45 on: pages 2 and 3. That at 96 sees page 4 too, which has no name.
        assert_eq!(window.find(&names), (4, pages[2..4].to_vec()));
        assert_eq!(window.find(&names[..3]), (0, vec![]));
        window.pool.name(pages[4], names[4]);
        assert_eq!(window.find(&names), (6, pages[4..].to_vec()));
    }
}
