//! The products of a step: which kernel multiplies a weight with a step's rows, in workgroups of which shape, and
//! the packing of rows between them. Deliberately absent: which weights a layer has.

use super::{Decoder, Shape, Step, floats_from, outputs_from};
use crate::kernels::gemm::{Activations, Epilogue, Matrix, Product};
use crate::kernels::panel::{self, Fold, Unscaled};
use crate::kernels::recording::{Range, Recording};
use crate::kernels::skinny::{self, Matrices};
use crate::kernels::tiled::{self, Output, Packed, Tile, Tiled};
use crate::memory::pack::Format;
use crate::model::config::MlpKind;

/// Rows up to which products take rows of floats: every workgroup reads all of them, which narrow models
/// bear longer than the packing of rows as a stage of its own.
const MOST_SKINNY_ROWS: u32 = 8;
/// As [`MOST_SKINNY_ROWS`], for models of at most [`NARROW`] hidden values; but each row of a few reads its experts for
/// itself, so that many rows are sorted by expert from there on.
const MOST_SKINNY_ROWS_NARROW: u32 = 16;
/// See [`MOST_SKINNY_ROWS_NARROW`].
const NARROW: u32 = 2048;
/// Rows of a prompt chunk up to which its products are those of a decode batch.
const MOST_PANEL_ROWS: u32 = 64;

impl Decoder<'_> {
    pub(super) fn gemv_threads(&self, cols: u32) -> u32 {
        cols.div_ceil(8).next_power_of_two().clamp(32.min(self.tuning.gemv_threads), self.tuning.gemv_threads)
    }

    /// Rows of W a workgroup: four share each load of x, and of the norm's weights, where there are enough of
    /// them to fill the device.
    pub(super) fn gemv_rows(&self, rows: u32, norm: bool) -> u32 {
        let from = if norm { self.tuning.gemv_wide_from / 4 } else { self.tuning.gemv_wide_from };
        if rows >= from { 4 } else { 2 }
    }

    /// The shape of `skinny`'s workgroups for a product.
    pub(super) fn skinny_config(&self, weight: &Matrix, rows: u32, matrices: Matrices) -> skinny::Config {
        if let (1, Some(config)) = (rows, self.tuning.skinny.get(&(weight.rows, weight.cols))) {
            return *config;
        }
        let chunks = weight.cols.div_ceil(32);
        let blocks = weight.rows.div_ceil(16);
        let (threads, tiles, ahead) = match (matrices, rows) {
            // No more threads than every device runs.
            (Matrices::ByHand, _) => (128, if blocks >= 256 { 2 } else { 1 }, 2),
            (Matrices::Cooperative, 1) => match (chunks, blocks) {
                (256.., _) => (512, 1, 8),
                (128.., ..4096) => (512, 1, 4),
                (128.., _) => (512, 2, 4),
                (_, 512..) => (256, 2, 4),
                // About as many workgroups as there are processors, with all of K in flight.
                (_, 170..) => (512, (blocks / 85).min(4), 2),
                _ => (512, 1, 4),
            },
            // Several rows of x are read again by every workgroup: the more rows of W it has, the better.
            (Matrices::Cooperative, 2..) => {
                let (threads, tiles) = match blocks {
                    1024.. => (256, 4),
                    512.. => (256, 2),
                    256.. => (512, 2),
                    _ => (512, 1),
                };
                (threads, tiles, if rows <= 8 { 2 } else { 1 })
            }
            (Matrices::Cooperative, 0) => unreachable!("a step has rows"),
        };
        let ahead = ahead.min(chunks.div_ceil(threads / 32).next_power_of_two());
        let mut config = skinny::Config { threads, tiles, ahead };
        while config.shared_bytes(rows, matrices) > self.tuning.shared_bytes && config.threads > 32 {
            match config.ahead {
                1 => config.threads /= 2,
                _ => config.ahead /= 2,
            }
        }
        config
    }

    /// A product with every part of a weight.
    #[expect(clippy::too_many_arguments, reason = "a matrix product's operands; each call names all of them")]
    pub(super) fn product(
        &self,
        recording: &mut Recording,
        shape: Shape,
        name: &str,
        step: &Step,
        x: Activations,
        y: Activations,
        norm: Option<Range>,
        epilogue: Epilogue,
    ) {
        let bias = self.vector(recording, &format!("{name}.bias"));
        let fragments = self.weight(name).is_some_and(|w| self.in_fragments(w));
        // Logits are for kernels that wait at barriers.
        let flow = step.flow(Some(x.range), (!step.is_logits(y.range)).then_some(y.range));
        for (first, weight) in self.matrix(recording, name) {
            let product = Product {
                label: label_of(name),
                weight,
                x,
                norm: norm.map(|n| (n, self.config.rms_eps)),
                bias: bias.map(|bias| floats_from(bias, first)),
                epilogue,
                y: outputs_from(y, first, epilogue),
            };
            recording.call(match (shape, self.tuning.fragments.filter(|_| fragments)) {
                (_, Some(matrices)) if !self.packs(shape) => {
                    let config = self.skinny_config(&weight, shape.rows(), matrices);
                    skinny::skinny(&product, shape.rows(), matrices, config, flow, step.fault)
                }
                (Shape::Prefill { rows }, _) => product.matmul(rows, step.chunk),
                (shape, _) => product.gemv(
                    shape.rows(),
                    self.gemv_threads(weight.cols),
                    self.gemv_rows(weight.rows, norm.is_some()),
                ),
            });
        }
    }

    /// Whether a shape's products take rows of activations that are packed for them.
    pub(super) fn packs(&self, shape: Shape) -> bool {
        let narrow = self.config.hidden <= NARROW && self.config.experts.is_none();
        let most = if narrow { MOST_SKINNY_ROWS_NARROW } else { MOST_SKINNY_ROWS };
        self.tuning.fragments.is_some() && shape.rows() > most
    }

    /// Whether a shape's product with this weight does.
    pub(super) fn packs_for(&self, shape: Shape, name: &str) -> bool {
        self.packs(shape) && self.weight(name).is_some_and(|w| self.in_fragments(w))
    }

    /// The shape of `panel`'s workgroups for a product.
    pub(super) fn panel_config(&self, weight: &Matrix, rows: u32, matrices: Matrices) -> panel::Config {
        if let Some(config) = self.tuning.panel.get(&(weight.rows, weight.cols)) {
            return *config;
        }
        let (n, long) = (weight.rows, weight.cols >= 8192);
        // As `bench --stages --try` found them for the products of an 8B model; by hand, what every device runs.
        let (threads, tiles, ahead, blocks) = match (matrices, rows) {
            (Matrices::ByHand, _) => (256, if n < 2048 || rows <= 32 { 1 } else { 2 }, 1, rows.div_ceil(16).min(4)),
            (_, ..=16) => (if n <= 8192 { 512 } else { 256 }, 1, 4, 1),
            (_, ..=32) => (256, 1, 4, 2),
            (_, ..=64) if n >= 65_536 => (128, 2, 1, 4),
            (_, ..=64) => (256, 1, 2, 4),
            _ if n < 2048 => (256, 1, 2, 4),
            (_, ..=128) if long => (256, 4, 2, 4),
            (_, ..=128) if n <= 4096 => (128, 2, 2, 4),
            (_, ..=128) if n <= 8192 => (128, 3, 2, 4),
            (_, 129..) if n <= 4096 => (128, 4, 2, 4),
            (_, 129..) if n <= 8192 => (64, 3, 2, 4),
            _ => (128, 2, 1, 8),
        };
        let ahead = ahead.min(weight.cols.div_ceil(32).div_ceil(threads / 32).next_power_of_two());
        let mut config = panel::Config { threads, tiles, ahead, blocks };
        while config.threads > 32 && config.shared_bytes(matrices) > self.tuning.shared_bytes {
            config.threads /= 2;
        }
        config
    }

    /// The tile of a batch's product, where that is `tiled` and not `panel`.
    pub(super) fn batch_tile(&self, weight: &Matrix, rows: u32, fold: Fold) -> Option<Tile> {
        if !matches!(fold, Fold::None) {
            return None;
        }
        if let Some(tile) = self.tuning.tiles.get(&(weight.rows, weight.cols)) {
            return Some(*tile);
        }
        // As `bench --stages --try` found them for the products of an 8B model.
        match (self.tuning.fragments, rows, weight.rows) {
            (Some(Matrices::Cooperative), 65.., 65_536..) => Some(Tile::Wide),
            (Some(Matrices::Cooperative), 65..=128, 16_384..) => Some(Tile::Square),
            (Some(Matrices::Cooperative), 129.., 16_384..) => Some(Tile::Half),
            _ => None,
        }
    }

    /// A product of packed rows with every part of a weight; `fold`: a norm before or behind it that is no stage of its own.
    #[expect(clippy::too_many_arguments, reason = "a matrix product's operands; each call names all of them")]
    pub(super) fn tiled(
        &self,
        recording: &mut Recording,
        shape: Shape,
        name: &str,
        step: &Step,
        x: Packed,
        y: Output,
        epilogue: Epilogue,
        fold: Fold,
    ) {
        let rows = shape.rows();
        let matrices = self.tuning.fragments.unwrap_or(Matrices::ByHand);
        let bias = self.vector(recording, &format!("{name}.bias"));
        for (first, weight) in self.matrix(recording, name) {
            let product = Tiled {
                label: label_of(name),
                weight,
                x,
                bias: bias.map(|bias| floats_from(bias, first)),
                epilogue,
                y: match y {
                    Output::Rows(y) => Output::Rows(outputs_from(y, first, epilogue)),
                    packed => packed,
                },
            };
            let batch_tile = self.batch_tile(&weight, rows, fold);
            recording.call(match (shape, batch_tile) {
                (Shape::Prefill { .. }, _) if rows > MOST_PANEL_ROWS => {
                    let tile = match matrices {
                        Matrices::Cooperative => tiled::choose(rows, weight.rows, self.tuning.processors),
                        Matrices::ByHand => Tile::Plain,
                    };
                    product.call(tile, rows, step.chunk)
                }
                (Shape::Decode { .. } | Shape::Score { .. }, Some(tile)) => product.batch(tile, rows),
                // Rows behind a chunk's end are zero.
                _ => panel::panel(&product, rows, matrices, self.panel_config(&weight, rows, matrices), fold),
            });
        }
    }

    /// Rows packed for the next products.
    #[expect(clippy::too_many_arguments, reason = "what is packed, how, and where from")]
    pub(super) fn pack(
        &self,
        recording: &mut Recording,
        shape: Shape,
        step: &Step,
        label: String,
        x: Activations,
        cols: u32,
        norm: Option<Range>,
    ) -> Packed {
        let packed = Self::packed(recording, &format!("packed.{cols}"), shape.rows(), cols);
        let norm = norm.map(|norm| (norm, self.config.rms_eps));
        let count = matches!(shape, Shape::Prefill { .. }).then_some(step.chunk);
        recording.call(tiled::pack_rows(label, x, norm, packed, shape.rows(), count));
        packed
    }

    pub(super) fn packed(recording: &mut Recording, name: &str, rows: u32, cols: u32) -> Packed {
        Packed { range: recording.buffer(name, Packed::bytes(rows, cols)), format: Format::Bf16, cols }
    }

    /// Where the rows of a decode step wait for a norm that the products around it fold in: each workgroup sums the
    /// squares of all its rows again, which costs more than a stage where there are many.
    pub(super) fn unscaled(&self, r: &mut Recording, shape: Shape) -> Option<Unscaled> {
        let (rows, hidden) = (shape.rows(), self.config.hidden);
        let whole = |name: &str| self.weight(name).is_some_and(|w| self.in_fragments(w) && self.parts(w).len() == 1);
        let folds = matches!(shape, Shape::Decode { .. })
            && self.packs(shape)
            && rows <= if hidden <= NARROW { 2 * self.tuning.fold_rows } else { self.tuning.fold_rows }
            && hidden.is_multiple_of(32)
            && self.config.mlp_kinds.iter().all(|kind| *kind == MlpKind::Dense)
            && whole("layers.0.o")
            && whole("layers.0.down");
        folds.then(|| Unscaled {
            rows: Self::packed(r, "unscaled", rows, hidden),
            squares: r.buffer("unscaled.squares", Unscaled::square_bytes(rows, hidden)),
        })
    }

    /// What a product leaves to the norm behind it.
    pub(super) fn leaves(unscaled: Option<Unscaled>, norm: Option<Range>) -> Fold {
        match (unscaled, norm) {
            (Some(unscaled), Some(norm)) => Fold::Next(unscaled, norm),
            _ => Fold::None,
        }
    }
}

/// What a product is called: by its weight, but for tied embeddings, whose product is the head all the same.
fn label_of(weight: &str) -> String {
    if weight == "embed" { "lm_head" } else { weight }.to_owned()
}
