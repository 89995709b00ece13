//! Choices of a decoder's recordings that depend on the device and not on the model, and how they are changed by name.
//! Deliberately absent: the choices that follow from a product's shape (`products`).

use crate::kernels::panel;
use crate::kernels::skinny::{self, Matrices};
use crate::kernels::tiled::Tile;
use std::collections::BTreeMap;

/// Choices that depend on the device and not on the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Most threads of a `gemv` workgroup.
    pub gemv_threads: u32,
    /// Rows of a weight matrix from which on a `gemv` workgroup computes four of them, not two.
    pub gemv_wide_from: u32,
    /// Most threads of an `attention` workgroup.
    pub attention_threads: u32,
    /// Most threads of a `flash_decode` workgroup, a multiple of 32.
    pub flash_threads: u32,
    /// As `flash_threads`, for batches that give every processor a workgroup.
    pub flash_threads_many: u32,
    /// Workgroups a processor that a batch's attention is split in along its contexts, where they are long enough.
    pub spread: u32,
    /// Pages for each 32 invocations of a `flash_decode` workgroup that a split along a context leaves it, at least.
    pub spread_pages: u32,
    /// Processors that run workgroups side by side.
    pub processors: u32,
    /// Shared memory of a workgroup, bytes.
    pub shared_bytes: u32,
    /// Workgroups that a decoding sequence's attention is split in along its context.
    pub splits: u32,
    /// Threads of an `argmax` workgroup.
    pub argmax_threads: u32,
    /// Threads of the sampler.
    pub sample_threads: u32,
    /// Weights in fragment order, and how their blocks are multiplied; `None`: row after row.
    pub fragments: Option<Matrices>,
    /// Shapes of `skinny`'s workgroups for one row, by rows and columns of W, where the rule's are not the best.
    pub skinny: BTreeMap<(u32, u32), skinny::Config>,
    /// Shapes of `panel`'s workgroups by rows and columns of W, where the rule's are not the best.
    pub panel: BTreeMap<(u32, u32), panel::Config>,
    /// Tiles of `tiled` for a batch, by rows and columns of W, in place of `panel`.
    pub tiles: BTreeMap<(u32, u32), Tile>,
    /// Rows of a batch up to which norms are folded into the products around them; narrow models take twice as many.
    pub fold_rows: u32,
    /// Whether a decode step's activations carry their readiness instead of waiting at barriers.
    pub tags: bool,
    /// For tests: the call of this number in a decode step, counted from 1, waits for words that are never written; 0:
    /// none. In all steps, the start's test too, unless `broken_step` or `broken_every` names some.
    pub broken_call: u32,
    /// For tests: the decode step without barriers, counted from 1, that has the broken call.
    pub broken_step: u32,
    /// For tests: every so manieth decode step without barriers has the broken call.
    pub broken_every: u32,
    /// Milliseconds for which steps run with barriers after a first fault.
    pub retry_ms: u32,
    /// Steps are queued before their masks are there. Not on drivers that wait for all that is queued when a timestamp is
    /// read, unless nothing is timed.
    pub gates: bool,
    /// For tests: the fault word is set before this decode plan, counted from 1; 0 never.
    pub fault_at: u32,
}

impl Tuning {
    /// Applies `key=value`; false if there is no such key or the value is no number. The key
    /// `skinny.ROWSxCOLUMNS` of W takes `threads/tiles/ahead`, `panel.ROWSxCOLUMNS` takes
    /// `threads/tiles/ahead/blocks`, `tiles.ROWSxCOLUMNS` a tile's name.
    pub fn set(&mut self, change: &str) -> bool {
        let Some((key, value)) = change.split_once('=') else { return false };
        if let Some((rows, cols)) = key.strip_prefix("tiles.").and_then(|shape| shape.split_once('x')) {
            let tile = match value {
                "wide" => Tile::Wide,
                "half" => Tile::Half,
                "square" => Tile::Square,
                _ => return false,
            };
            let (Ok(rows), Ok(cols)) = (rows.parse(), cols.parse()) else { return false };
            self.tiles.insert((rows, cols), tile);
            return true;
        }
        if let Some((rows, cols)) = key.strip_prefix("panel.").and_then(|shape| shape.split_once('x')) {
            let numbers: Vec<u32> = value.split('/').filter_map(|n| n.parse().ok()).collect();
            let (Ok(rows), Ok(cols), &[threads, tiles, ahead, blocks]) = (rows.parse(), cols.parse(), &numbers[..])
            else {
                return false;
            };
            if threads % 32 != 0 || [threads, tiles, ahead, blocks].contains(&0) {
                return false;
            }
            self.panel.insert((rows, cols), panel::Config { threads, tiles, ahead, blocks });
            return true;
        }
        if let Some((rows, cols)) = key.strip_prefix("skinny.").and_then(|shape| shape.split_once('x')) {
            let numbers: Vec<u32> = value.split('/').filter_map(|n| n.parse().ok()).collect();
            let (Ok(rows), Ok(cols), &[threads, tiles, ahead]) = (rows.parse(), cols.parse(), &numbers[..]) else {
                return false;
            };
            if threads % 32 != 0 || [threads, tiles, ahead].contains(&0) {
                return false;
            }
            self.skinny.insert((rows, cols), skinny::Config { threads, tiles, ahead });
            return true;
        }
        let Ok(value) = value.parse() else { return false };
        let place = match key {
            "gemv_threads" => &mut self.gemv_threads,
            "gemv_wide_from" => &mut self.gemv_wide_from,
            "attention_threads" => &mut self.attention_threads,
            "flash_threads" => &mut self.flash_threads,
            "flash_threads_many" => &mut self.flash_threads_many,
            "spread" => &mut self.spread,
            "fold_rows" => &mut self.fold_rows,
            "spread_pages" => &mut self.spread_pages,
            "splits" => &mut self.splits,
            "sample_threads" => &mut self.sample_threads,
            "fault_at" => &mut self.fault_at,
            "broken_call" => &mut self.broken_call,
            "broken_step" => &mut self.broken_step,
            "broken_every" => &mut self.broken_every,
            "retry_ms" => &mut self.retry_ms,
            "tags" => {
                self.tags = value != 0;
                return true;
            }
            "gates" => {
                self.gates = value != 0;
                return true;
            }
            "fragments" => {
                self.fragments = match value {
                    0 => None,
                    1 => Some(Matrices::ByHand),
                    _ => Some(Matrices::Cooperative),
                };
                return true;
            }
            _ => return false,
        };
        *place = value;
        true
    }
}
