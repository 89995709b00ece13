//! The layout of the `state` buffer: slots, batch list, prompt step descriptors, page tables, logit biases, single
//! words. They share one buffer so that one patch kernel can update all of it. Not here: the meaning of a slot's words
//! (`state`).

use super::embed::ChunkLayout;
use super::recording::{Range, Recording};
use super::state;
use super::stream::pool_words;

/// The sizes that determine the layout of a replica's device state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateLayout {
    /// The maximum number of sequences that run at the same time.
    pub slots: u32,
    /// The number of rows of the largest decode bucket.
    pub rows: u32,
    /// The maximum number of prompt tokens per step.
    pub chunk: u32,
    /// The maximum number of prompts per step.
    pub prompts: u32,
    /// The maximum number of sequences of a prompt step: prompts, and slots that decode in it. At least `prompts`.
    pub sequences: u32,
    /// The number of pages of the longest sequence.
    pub max_pages: u32,
    /// Whether a step's prompts have words about their cells and about the token behind them: in models with recurrent state,
    /// or with a block or a head that drafts from hidden states.
    pub cells: bool,
    /// Whether layers with a sliding window have page tables of their own.
    pub windows: bool,
}

/// The alignment of the parts in bytes; 16-byte loads need at least 16.
const ALIGN: u64 = 64;

impl StateLayout {
    fn offsets(&self) -> [u64; 12] {
        let bytes = [
            u64::from(self.slots) * u64::from(state::SLOT_WORDS) * 4,
            u64::from(self.rows) * 4,
            self.chunk_layout().bytes(self.chunk),
            u64::from(self.slots) * u64::from(self.max_pages) * 4,
            u64::from(self.slots) * u64::from(state::BIAS_ENTRIES) * 8,
            8,
            u64::from(state::SCORE_STATE_WORDS) * 4,
            pool_words(self.prompts) * 4,
            if self.windows { u64::from(self.slots) * u64::from(self.max_pages) * 4 } else { 0 },
            12,
            2 * self.microbatch_bytes(),
        ];
        let mut offsets = [0; 12];
        for (i, b) in bytes.iter().enumerate() {
            offsets[i + 1] = (offsets[i] + b).next_multiple_of(ALIGN);
        }
        offsets
    }

    /// The size of the whole buffer in bytes.
    pub fn bytes(&self) -> u64 {
        self.offsets()[11]
    }

    fn range(&self, recording: &mut Recording, part: usize) -> Range {
        let offsets = self.offsets();
        recording.buffer("state", self.bytes()).part(offsets[part], offsets[part + 1] - offsets[part])
    }

    /// The whole buffer, for patches.
    pub fn all(&self, recording: &mut Recording) -> Range {
        recording.buffer("state", self.bytes())
    }

    /// The slots: `[slots][SLOT_WORDS]`.
    pub fn slots(&self, recording: &mut Recording) -> Range {
        self.range(recording, 0)
    }

    /// The batch list: `[rows]`, the slot of each row, or `u32::MAX`.
    pub fn batch(&self, recording: &mut Recording) -> Range {
        self.range(recording, 1)
    }

    /// The layout of the descriptor of a prompt step.
    pub fn chunk_layout(&self) -> ChunkLayout {
        ChunkLayout { prompts: self.sequences, cells: self.cells }
    }

    fn microbatch_bytes(&self) -> u64 {
        (u64::from(ChunkLayout::microbatch_words(self.sequences)) * 4).next_multiple_of(ALIGN)
    }

    /// The descriptor of one of the two microbatches of a prompt step: see [`ChunkLayout::microbatch_words`].
    pub fn microbatch(&self, recording: &mut Recording, index: u32) -> Range {
        let bytes = self.microbatch_bytes();
        self.range(recording, 10).part(u64::from(index) * bytes, bytes)
    }

    /// The word offset of the descriptor of a microbatch.
    pub fn microbatch_word(&self, index: u32) -> u32 {
        ((self.offsets()[10] + u64::from(index) * self.microbatch_bytes()) / 4) as u32
    }

    /// The part of the descriptor of a prompt step about its prompts' cells.
    pub fn cells(&self, recording: &mut Recording) -> Range {
        let layout = self.chunk_layout();
        let first = u64::from(layout.cells(0)) * 4;
        self.chunk(recording).part(first, u64::from(layout.last(0)) * 4 - first)
    }

    /// The descriptor of a prompt step: see [`ChunkLayout`].
    pub fn chunk(&self, recording: &mut Recording) -> Range {
        self.range(recording, 2)
    }

    /// The page tables: `[slots][max_pages]`.
    pub fn pages(&self, recording: &mut Recording) -> Range {
        self.range(recording, 3)
    }

    /// The page tables of layers with a sliding window: `[slots][max_pages]`. If windows have no pages of their own,
    /// the page tables of the other layers.
    pub fn window_pages(&self, recording: &mut Recording) -> Range {
        self.range(recording, if self.windows { 8 } else { 3 })
    }

    /// The logit biases: `[slots][BIAS_ENTRIES]` of token, bias.
    pub fn bias(&self, recording: &mut Recording) -> Range {
        self.range(recording, 4)
    }

    /// The fault word: nonzero after a kernel has polled too long for tagged words; and the word behind it, nonzero while a
    /// kernel waits for another device.
    pub fn fault(&self, recording: &mut Recording) -> Range {
        self.range(recording, 5)
    }

    /// The number of a step's first exchange with other devices ([`super::exchange`]).
    pub fn exchange(&self, recording: &mut Recording) -> Range {
        self.range(recording, 9).part(0, 4)
    }

    /// The number of a step's first exchange of scored rows.
    pub fn score_exchange(&self, recording: &mut Recording) -> Range {
        self.range(recording, 9).part(4, 4)
    }

    /// The number of the first exchange of the rows of a step that draw tokens.
    pub fn head_exchange(&self, recording: &mut Recording) -> Range {
        self.range(recording, 9).part(8, 4)
    }

    /// The word offset of the numbers of a step's first exchanges: of all, of those of scored rows, and of those of the rows
    /// that draw tokens.
    pub fn exchange_word(&self) -> u32 {
        (self.offsets()[9] / 4) as u32
    }

    /// The scoring state: `[SCORE_STATE_WORDS]`, which rows of a chunk are scored next, and how.
    pub fn score(&self, recording: &mut Recording) -> Range {
        self.range(recording, 6).part(0, u64::from(state::SCORE_STATE_WORDS) * 4)
    }

    /// The pooling state: which rows of a prompt step are pooled ([`super::stream::pool_words`]).
    pub fn pool(&self, recording: &mut Recording) -> Range {
        self.range(recording, 7).part(0, pool_words(self.prompts) * 4)
    }

    /// The word offset of the first word of `pool`.
    pub fn pool_word(&self) -> u32 {
        (self.offsets()[7] / 4) as u32
    }

    /// The word offset of the first word of `score`.
    pub fn score_word(&self) -> u32 {
        (self.offsets()[6] / 4) as u32
    }

    /// The word offset of the fault word.
    pub fn fault_word(&self) -> u32 {
        (self.offsets()[5] / 4) as u32
    }

    /// The word offset of word `word` of a slot.
    pub fn slot_word(&self, slot: u32, word: u32) -> u32 {
        slot * state::SLOT_WORDS + word
    }

    /// The word offset of a row of the batch list.
    pub fn batch_word(&self, row: u32) -> u32 {
        (self.offsets()[1] / 4) as u32 + row
    }

    /// The word offset of a word of the prompt step's descriptor.
    pub fn chunk_word(&self, word: u32) -> u32 {
        (self.offsets()[2] / 4) as u32 + word
    }

    /// The word offset of an entry of a slot's page table.
    pub fn page_word(&self, slot: u32, index: u32) -> u32 {
        (self.offsets()[3] / 4) as u32 + slot * self.max_pages + index
    }

    /// The word offset of an entry of a slot's page table of layers with a sliding window.
    pub fn window_word(&self, slot: u32, index: u32) -> u32 {
        (self.offsets()[8] / 4) as u32 + slot * self.max_pages + index
    }

    /// The word offset of a word of a slot's bias table.
    pub fn bias_word(&self, slot: u32, word: u32) -> u32 {
        (self.offsets()[4] / 4) as u32 + slot * state::BIAS_ENTRIES * 2 + word
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other_without_overlap() {
        let layout = StateLayout {
            slots: 3,
            rows: 5,
            chunk: 17,
            prompts: 3,
            sequences: 4,
            max_pages: 9,
            cells: true,
            windows: true,
        };
        let mut recording = Recording::new("test");
        let parts = [
            layout.slots(&mut recording),
            layout.batch(&mut recording),
            layout.chunk(&mut recording),
            layout.pages(&mut recording),
            layout.bias(&mut recording),
            layout.fault(&mut recording),
        ];
        for pair in parts.windows(2) {
            assert_eq!(pair[0].offset + pair[0].bytes, pair[1].offset);
            assert_eq!(pair[1].offset % ALIGN, 0);
        }
        assert_eq!(u64::from(layout.page_word(2, 8)) * 4 + 4, parts[3].offset + 3 * 9 * 4);
        assert!(u64::from(layout.bias_word(2, state::BIAS_ENTRIES * 2 - 1)) * 4 + 4 <= layout.bytes());
        let windows = layout.window_pages(&mut recording);
        assert_eq!(u64::from(layout.window_word(2, 8)) * 4 + 4, windows.offset + 3 * 9 * 4);
        assert!(windows.offset + windows.bytes <= layout.bytes());
        let score = layout.score(&mut recording);
        assert!(score.offset >= parts[5].offset + parts[5].bytes && score.offset + score.bytes <= layout.bytes());
        assert_eq!(u64::from(layout.score_word()) * 4, score.offset);
        let pool = layout.pool(&mut recording);
        assert!(pool.offset >= score.offset + score.bytes && pool.offset + pool.bytes <= layout.bytes());
        assert_eq!(u64::from(layout.pool_word()) * 4, pool.offset);
        let token = layout.chunk_word(layout.chunk_layout().token(16));
        assert_eq!(u64::from(token) * 4 + 4, parts[2].offset + layout.chunk_layout().bytes(17));
        let microbatches = [0, 1].map(|index| layout.microbatch(&mut recording, index));
        let exchange = layout.exchange(&mut recording);
        assert!(exchange.offset + 12 <= microbatches[0].offset && !microbatches[0].overlaps(&microbatches[1]));
        assert_eq!(microbatches[1].offset + microbatches[1].bytes, layout.bytes());
        for (range, index) in microbatches.iter().zip(0..) {
            assert_eq!(u64::from(layout.microbatch_word(index)) * 4, range.offset);
            assert!(u64::from(ChunkLayout::microbatch_words(4)) * 4 <= range.bytes);
        }
    }
}
