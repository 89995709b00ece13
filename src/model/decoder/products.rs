//! The matrix products of a step: the choice of the kernel and of its workgroup shape for each product, and the packing
//! of rows between products.
//!
//! Not here: which weights a layer has.

use super::{Decoder, Part, Step, StepShape, floats_from, outputs_from};
use crate::kernels::format_word;
use crate::kernels::gemm::codes::{CodesConfig, ProductColumns};
use crate::kernels::gemm::codes_ptx::{self, CodesPtxConfig};
use crate::kernels::gemm::gemv_dots::{self, DotsConfig};
use crate::kernels::gemm::matmul::{self, Blocked, MatmulConfig, MatmulRows, Scratch};
use crate::kernels::gemm::panel::{self, Fold, Unscaled};
use crate::kernels::gemm::skinny::{self, Matrices};
use crate::kernels::gemm::tiled::{self, Output, Packed, PackedOrder, SWIZZLED_COLS, Tile, Tiled};
use crate::kernels::gemm::wgmma::{self, Shares, WgmmaOptions};
use crate::kernels::gemm::{Activations, Epilogue, GemvConfig, Matrix, Product, codes, order};
use crate::kernels::recording::{BufferId, Call, Range, Recording};
use crate::kernels::tags::Flow;
use crate::memory::pack::Format;
use crate::memory::pack::codes::unit_cols;
use crate::model::checkpoint::WeightSpec;
use crate::model::config::{BlockNorms, LayerKind, MlpKind};
use crate::quant::number::Number;
use crate::quant::{Codes, Minimum};
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

/// The maximum number of rows for which products read rows of floats (`skinny`). Every workgroup reads all rows, so
/// with more rows it is faster to pack them first in a stage of its own; narrow models reach that point later.
const MOST_SKINNY_ROWS: u32 = 8;
/// Like [`MOST_SKINNY_ROWS`], for models without experts of at most [`NARROW`] hidden values.
/// Models with experts use [`MOST_SKINNY_ROWS`], because a step of few rows reads the experts' weights separately for
/// each row, whereas a larger step sorts its rows by expert.
const MOST_SKINNY_ROWS_NARROW: u32 = 16;
/// The maximum hidden size of a narrow model; see [`MOST_SKINNY_ROWS_NARROW`].
const NARROW: u32 = 2048;
/// Like [`MOST_SKINNY_ROWS`], for models with weights of codes that programs in PTX do not serve.
const MOST_CODES_ROWS: u32 = 4;
/// The maximum number of rows of a prompt chunk for which its products are computed like those of a decode batch.
const MOST_PANEL_ROWS: u32 = 64;

/// The minimum number of rows that are packed in f16 for `wgmma`, which serves no fewer.
const LEAST_HALF_ROWS: u32 = 64;

/// The maximum number of chunks of 32 columns that a workgroup of `skinny` loads in a round.
const MOST_ROUND: u32 = 144;
/// The maximum number of groups of 32 invocations of a workgroup of `skinny`.
const MOST_GROUPS: u32 = 24;

/// The numbers of groups of lanes that a workgroup of `skinny_codes.ptx` may have. In models whose rows have fewer units of columns,
/// it has one for each unit.
pub(super) const CODES_PTX_GROUPS: RangeInclusive<u32> = 12..=24;
/// The minimum number of units of columns of a matrix for `skinny_codes.ptx`, and of the model's rows: of 128 columns, and of 256
/// with an odd number of bits, of which fewer were not measured.
const LEAST_CODES_PTX_UNITS: u32 = 8;
const LEAST_CODES_PTX_UNITS_ODD: u32 = 32;

/// Returns the number of groups of 32 invocations, and of chunks that each loads in a round, with which a workgroup loads
/// `chunks` chunks in `rounds` rounds and multiplies the fewest zeros; of equals, those with the most groups.
fn even_rounds(chunks: u32, rounds: u32) -> (u32, u32) {
    let round = chunks.div_ceil(rounds);
    let shapes = (1..=MOST_GROUPS).map(|groups| (groups, round.div_ceil(groups)));
    let fitting = shapes.filter(|(_, ahead)| *ahead <= skinny::MOST_AHEAD);
    let best = fitting.min_by_key(|(groups, ahead)| (groups * ahead, Reverse(*groups)));
    best.unwrap_or((16, skinny::MOST_AHEAD))
}

/// Returns the threads of a workgroup of `skinny`, its blocks of 16 rows of W, and the chunks that each of its groups loads in a
/// round, for one row of x and a matrix of `blocks` blocks and `chunks` chunks of 32 columns. Measured on H200s with the
/// matrices of Qwen3, Qwen3.5, Qwen2.5 and Llama models of up to 14 billion weights.
fn skinny_rule(blocks: u32, chunks: u32) -> (u32, u32, u32) {
    match (chunks, blocks) {
        (128..256, 4096..) => (512, 2, 4),
        // With 129 to 255 chunks, two rounds of more than 512 threads leave little room for the next call's workgroups. Only
        // products of few rows are faster so.
        (128 | 256.., _) | (129..256, ..256) => {
            let (groups, ahead) = even_rounds(chunks, chunks.div_ceil(MOST_ROUND).max(2));
            (groups * 32, 1, ahead)
        }
        // At least two rounds, so that registers are left for the next call's weights.
        (..64, 512..4096) => (256, 3, 2),
        (_, 512..4096) => (evenest(8..=12, chunks, 4, 8) * 32, 2, 4),
        (_, 512..) => (256, 2, 4),
        // About as many workgroups as compute units.
        (..64, 256..) => (512, (blocks / 85).min(4), 2),
        (_, 256..) => (evenest(10..=18, chunks, 2, 16) * 32, (blocks / 85).min(4), 2),
        (..=64, 170..) => (512, 1, 2),
        (_, 170..) => (384, 1, 2),
        _ => {
            let (groups, ahead) = even_rounds(chunks, 1);
            (groups * 32, 1, ahead)
        }
    }
}

/// Returns the number of groups out of `groups` whose rounds, in which each group loads `ahead` chunks, multiply the fewest
/// zeros behind the last of `chunks` chunks; of equals, the one nearest to `near`.
fn evenest(groups: RangeInclusive<u32>, chunks: u32, ahead: u32, near: u32) -> u32 {
    let best = groups.min_by_key(|&groups| (left_over(chunks, groups * ahead), groups.abs_diff(near)));
    best.expect("there are groups")
}

/// Returns by how many places the last round of `each` places reaches past `count` of them.
pub(super) fn left_over(count: u32, each: u32) -> u32 {
    count.next_multiple_of(each) - count
}

/// The operands of a product: y is the epilogue of W · x.
pub(super) struct Operands<'a, X, Y> {
    /// The name of W.
    pub(super) weight: &'a str,
    pub(super) x: X,
    pub(super) y: Y,
    pub(super) epilogue: Epilogue,
}

/// Rows that are to be packed.
pub(super) struct Unpacked {
    /// The label of the call.
    pub(super) label: String,
    pub(super) x: Activations,
    /// The number of columns of x that are packed.
    pub(super) cols: u32,
    /// The norm that is applied first.
    pub(super) norm: Option<Range>,
    pub(super) order: PackedOrder,
}

impl Decoder<'_> {
    pub(super) fn gemv_threads(&self, cols: u32) -> u32 {
        cols.div_ceil(8).next_power_of_two().clamp(32.min(self.tuning.gemv_threads), self.tuning.gemv_threads)
    }

    /// Returns the number of rows of W per workgroup: four, which share each load of x and of the norm's weights, if
    /// there are enough rows to fill the device; otherwise two.
    pub(super) fn gemv_rows(&self, rows: u32, norm: bool) -> u32 {
        let from = if norm { self.tuning.gemv_wide_from / 4 } else { self.tuning.gemv_wide_from };
        if rows >= from { 4 } else { 2 }
    }

    /// Returns the workgroup shape of `skinny` for a product.
    pub(super) fn skinny_config(&self, weight: &Matrix, rows: u32, matrices: Matrices) -> skinny::SkinnyConfig {
        if let (1, Some(config)) = (rows, self.tuning.skinny.get(&(weight.rows, weight.cols))) {
            return *config;
        }
        let chunks = weight.cols.div_ceil(32);
        let blocks = weight.rows.div_ceil(16);
        let (threads, tiles, ahead) = match (matrices, rows) {
            // Two groups of lanes, as CPU drivers take longer for more.
            (Matrices::Emulated, _) => (64, if blocks >= 256 { 2 } else { 1 }, 2),
            (Matrices::Cooperative, 1) => skinny_rule(blocks, chunks),
            // Every workgroup reads all rows of x again, so each should compute many rows of W.
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
        let mut config = skinny::SkinnyConfig { threads, tiles, ahead };
        while config.shared_bytes(rows, matrices) > self.tuning.shared_bytes && config.threads > 32 {
            match config.ahead {
                1 => config.threads = config.threads / 64 * 32,
                _ => config.ahead /= 2,
            }
        }
        config
    }

    /// Returns the workgroup shape of `skinny_codes` for a product with `units` of a matrix's units of columns. `normed`:
    /// whether it has a norm of x.
    fn codes_config(
        &self,
        weight: &Matrix,
        units: u32,
        (rows, normed): (u32, bool),
        matrices: Matrices,
    ) -> CodesConfig {
        let codes = weight.format.codes();
        let bits = codes.map_or(16, |codes| codes.bits);
        if let Some(config) = self.tuning.codes.get(&(bits, weight.rows, weight.cols, rows)) {
            return *config;
        }
        let blocks = weight.rows.div_ceil(16);
        codes_rule(codes, (blocks, units), (rows, normed), matrices, self.tuning.processors.max(1))
    }

    /// Returns the workgroups of `skinny_codes.ptx` for a matrix of codes and `rows` rows of x; `None` if `skinny_codes`
    /// multiplies them.
    fn codes_ptx_config(&self, weight: &Matrix, rows: u32) -> Option<CodesPtxConfig> {
        let served = self.tuning.ptx
            && self.tuning.codes_ptx
            && rows <= codes_ptx::MOST_ROWS
            && codes_ptx::serves(weight.format);
        let codes = weight.format.codes().filter(|_| served && self.tuning.fragments == Some(Matrices::Cooperative))?;
        // Eight rows are faster packed, unless experts have to be sorted then.
        if codes.number == Number::E2m1 && rows > MOST_CODES_ROWS && self.config.experts.is_none() {
            return None;
        }
        let units = codes::units(weight);
        let fits = |config: &CodesPtxConfig| config.fits(codes, (weight.rows, units), rows);
        let tuned = self.tuning.codes_ptx_shapes.get(&(codes.bits, weight.rows, weight.cols));
        let tuned = tuned.copied().filter(|config| rows == 1 && fits(config));
        let rule = || codes_ptx_rule(codes, units, self.config.hidden, self.tuning.processors.max(1), fits);
        tuned.or_else(rule)
    }

    /// Returns the number of parts of a matrix's columns whose products are added up one after the other.
    fn column_parts(&self, weight: &Matrix, rows: u32, matrices: Matrices) -> u32 {
        match self.codes_ptx_config(weight, rows) {
            Some(_) => 1,
            None => self.skinny_parts(weight, rows, matrices),
        }
    }

    /// Like [`Decoder::column_parts`] for `skinny_codes`: x of a part must fit in shared memory.
    fn skinny_parts(&self, weight: &Matrix, rows: u32, matrices: Matrices) -> u32 {
        let Some(codes) = weight.format.codes() else { return 1 };
        let units = codes::units(weight);
        let fits = |parts: &u32| {
            let own = units.div_ceil(*parts);
            let config = self.codes_config(weight, own, (rows, false), matrices);
            let bytes = config.shared_bytes(weight.format, own * unit_cols(codes), rows, matrices);
            bytes <= self.tuning.shared_bytes
        };
        (1..=units).find(fits).unwrap_or(units)
    }

    /// Returns the number of sums for a row of x that workgroups with parts of a matrix's columns pass on: the most of all
    /// products. `skinny_codes.ptx` passes none on.
    pub(super) fn column_sums(&self, shape: StepShape) -> u32 {
        let Some(matrices) = self.tuning.fragments.filter(|_| !self.packs(shape)) else { return 0 };
        let range = Range { buffer: BufferId(0), offset: 0, bytes: 0 };
        let sums = |w: &WeightSpec| {
            let weight = Matrix { range, format: w.format, rows: w.rows, cols: w.cols };
            let as_ptx =
                |part: &Part| self.codes_ptx_config(&Matrix { rows: part.rows, ..weight }, shape.rows()).is_some();
            if self.parts(w).iter().all(as_ptx) {
                return 0;
            }
            match self.skinny_parts(&weight, shape.rows(), matrices) - 1 {
                0 => 0,
                others => {
                    let merged = self.weights.iter().filter(|other| other.merged == w.merged);
                    others * merged.map(|other| other.rows).sum::<u32>().next_multiple_of(4)
                }
            }
        };
        let of_codes = self.weights.iter().filter(|w| w.format.codes().is_some() && self.in_fragments(w));
        of_codes.map(sums).max().unwrap_or(0)
    }

    /// Whether `skinny_codes` serves a step of a number of rows. With more than one row, every workgroup scales more of x; with
    /// more than [`MOST_CODES_ROWS`] that pays where the programs in PTX serve all weights of codes.
    /// Parts of the columns pay for up to two rows; products with a norm, whose inputs are of the hidden size or a state space's
    /// output, have none, so that even one row is packed if such an input is larger than shared memory.
    fn codes_fit(&self, rows: u32) -> bool {
        if rows > MOST_SKINNY_ROWS {
            return false;
        }
        fn block(w: &WeightSpec) -> &str {
            w.merged.split(".experts.").next().unwrap_or_default()
        }
        // The blocks with experts of codes. Experts of numbers, such as a drafting block's, are multiplied row by row in all such steps.
        let of_codes = |w: &&WeightSpec| rows > MOST_CODES_ROWS && w.is_of_experts() && w.format.codes().is_some();
        let coded: BTreeSet<&str> = self.weights.iter().filter(of_codes).map(block).collect();
        // `skinny_codes` multiplies matrices of too few columns for a program, if experts had to be sorted otherwise.
        let beside_experts = |weight: &Matrix| {
            let few = self.config.experts.is_some() && codes::units(weight) < LEAST_CODES_PTX_UNITS;
            few && self.tuning.fragments.is_none_or(|matrices| self.column_parts(weight, rows, matrices) == 1)
        };
        let fits = |w: &WeightSpec| {
            if rows > MOST_CODES_ROWS && self.expert_rows(w).is_some() {
                return !coded.contains(block(w)) || self.programs_serve(w, rows);
            }
            let range = Range { buffer: BufferId(0), offset: 0, bytes: 0 };
            let weight = Matrix { range, format: w.format, rows: w.rows, cols: w.cols };
            let whole = |matrices| self.column_parts(&weight, rows, matrices) == 1;
            let normed = w.cols == self.config.hidden || self.follows_row_norm(&w.merged);
            match rows {
                ..=MOST_CODES_ROWS => rows <= 2 && !normed || self.tuning.fragments.is_none_or(whole),
                _ => {
                    w.format.codes().is_none()
                        || self.codes_ptx_config(&weight, rows).is_some()
                        || beside_experts(&weight)
                }
            }
        };
        self.weights.iter().all(fits)
    }

    /// Whether a weight is the output projection of a state space, whose input has a norm over the whole row.
    fn follows_row_norm(&self, name: &str) -> bool {
        let kind = || {
            let layer: usize = name.strip_prefix("layers.")?.strip_suffix(".o")?.parse().ok()?;
            self.config.layer_kinds.get(layer).copied()
        };
        self.config.delta.is_some_and(|net| net.norms_rows()) && kind() == Some(LayerKind::GatedDelta)
    }

    /// Records a product with every part of a weight, after an optional norm of x.
    pub(super) fn product(
        &self,
        recording: &mut Recording,
        shape: StepShape,
        step: &Step,
        operands: Operands<'_, Activations, Activations>,
        norm: Option<Range>,
    ) {
        let Operands { weight: name, x, y, epilogue } = operands;
        let bias = self.vector(recording, &format!("{name}.bias"));
        let fragments = self.named_in_fragments(name);
        // Logits are not tagged: the kernels that read them use barriers.
        let flow = || step.flow(Some(x.range), (!step.is_logits(y.range)).then_some(y.range));
        let parts = self.factors(recording, name);
        let most = match self.tuning.fragments.filter(|_| fragments && !self.packs(shape)) {
            Some(matrices) => parts.iter().map(|(_, weight)| self.column_parts(weight, shape.rows(), matrices)).max(),
            None => None,
        };
        let most = most.unwrap_or(1);
        // Tagged words pass between workgroups of one call, plain ones from call to call.
        let flow_count = if most > 1 && step.generations.is_some() && !step.is_logits(y.range) { 1 } else { most };
        let flows: Vec<Flow> = (0..flow_count).map(|_| flow()).collect();
        let shares = self.shares(recording, shape, name, &parts);
        for (index, ((first, weight), share)) in parts.into_iter().zip(shares).enumerate() {
            let codes = fragments && weight.format.codes().is_some();
            let (x, norm) = self.in_order(recording, shape, (name, first), x, norm);
            let product = Product {
                label: label_of(name),
                weight,
                x,
                norm: norm.map(|n| (n, self.config.rms_eps)),
                bias: bias.map(|bias| floats_from(bias, first)),
                epilogue,
                y: outputs_from(y, first, epilogue),
            };
            let flow = flows[0];
            let call = match (shape, self.tuning.fragments.filter(|_| fragments)) {
                (_, Some(matrices)) if codes && !self.packs(shape) => {
                    self.codes_product(recording, shape, (product, first, share), matrices, (most, &flows), step)
                }
                (_, Some(matrices)) if !self.packs(shape) => {
                    let config = self.skinny_config(&weight, shape.rows(), matrices);
                    skinny::skinny(&product, shape.rows(), matrices, config, flow, step.fault)
                }
                (StepShape::Prefill { rows }, _) => {
                    self.many_rows(recording, &product, MatmulRows::Counted(rows, step.chunk))
                }
                (shape, _) => {
                    let rows = shape.rows();
                    match self.dots_config(&weight, rows) {
                        Some(config) => product.gemv_dots(rows, config),
                        None if rows > self.tuning.gemv_most => {
                            self.many_rows(recording, &product, MatmulRows::All(rows))
                        }
                        None => product.gemv(rows, self.gemv_config(&weight, rows, norm.is_some())),
                    }
                }
            };
            // With several flows, several calls for one part add to the same words.
            let beside = index > 0 && flows.len() == 1;
            recording.call(if beside { call.beside(y.range) } else { call });
        }
    }

    /// Returns the number of processors for each part of a weight: the calls of parts run side by side and share them, if
    /// `skinny_codes.ptx` serves all of them and none takes x in an order of its own, which all orders write to one place.
    fn shares(&self, recording: &mut Recording, shape: StepShape, name: &str, parts: &[(u32, Matrix)]) -> Vec<u32> {
        let processors = self.tuning.processors.max(1);
        let side_by_side = parts.iter().all(|(first, weight)| {
            self.codes_ptx_config(weight, shape.rows()).is_some() && self.order(recording, name, *first).is_none()
        });
        match side_by_side {
            true => {
                let size = |(_, weight): &(u32, Matrix)| (weight.rows.div_ceil(16), weight.range.bytes);
                share_processors(&parts.iter().map(size).collect::<Vec<_>>(), processors)
            }
            false => vec![processors; parts.len()],
        }
    }

    /// Records the preparation of the rows of x for `matmul`, and returns the product's call.
    fn many_rows(&self, recording: &mut Recording, product: &Product, rows: MatmulRows<'_>) -> Call {
        let (most, cols) = (rows.most(), product.weight.cols);
        let arithmetic = self.tuning.arithmetic.of(product.weight.format);
        let x = Blocked::declare(recording, &format!("blocked.{cols}"), arithmetic, most, cols);
        let label = format!("{}.block", product.label);
        recording.call(matmul::block_rows(label, product.x, product.norm, x, rows));
        let config = self.matmul_config(&product.weight, most, product.weight.rows);
        Scratch::reserve(recording, u64::from(self.tuning.matmul_room) << 10);
        let scratch = Scratch::declare(recording, config, most, product.weight.rows);
        product.matmul(x, rows, 0, config, scratch)
    }

    /// Returns the workgroups of `matmul` for at most `rows` rows by `n` rows of a weight.
    pub(super) fn matmul_config(&self, weight: &Matrix, rows: u32, n: u32) -> MatmulConfig {
        let arithmetic = self.tuning.arithmetic.of(weight.format);
        let of_all = || self.tuning.matmul.range(..=rows).next_back().map(|(_, config)| *config);
        if let Some(config) = self.tuning.matmul_of(rows, n, weight.cols).or_else(of_all)
            && config.fits(arithmetic)
        {
            return config;
        }
        let (processors, small) = (self.tuning.processors, self.tuning.small_tiles);
        MatmulConfig::choose(arithmetic, rows, (n, weight.cols), processors, small)
    }

    /// Returns the workgroups of `gemv` for a product. Rows of codes are fewer bytes than x: four share it wherever they leave
    /// two workgroups for each compute unit.
    fn gemv_config(&self, weight: &Matrix, rows: u32, norm: bool) -> GemvConfig {
        let shares = weight.format.codes().is_some() && weight.rows / 4 >= 2 * self.tuning.processors;
        let threads = self.gemv_threads(weight.cols);
        let weight_rows = match rows {
            1 if !shares => self.gemv_rows(weight.rows, norm),
            _ => 4,
        };
        GemvConfig { threads, weight_rows, batch: rows.min(8).min(threads / (weight_rows / 2)) }
    }

    /// Returns the workgroups of `gemv_dots` for a product; `None` if another kernel computes it.
    fn dots_config(&self, weight: &Matrix, rows: u32) -> Option<DotsConfig> {
        let most = self.tuning.dots.filter(|_| rows <= self.tuning.dots_most && gemv_dots::serves(weight.format))?;
        // Groups share the rounding of x, but each compute unit should have a workgroup.
        let groups = (weight.rows / (most.weight_rows * self.tuning.processors)).clamp(1, most.groups);
        Some(DotsConfig { groups: 1 << groups.ilog2(), batch: most.batch.min(rows), ..most })
    }

    /// Records the product of a few rows with a matrix of codes, in `count` parts of its columns, but for the last call, which it
    /// returns. Each part's product is added to those of the parts before it, by calls with a flow each or, with one flow, by
    /// the workgroups of one call. The matrix begins at row `first_row` of its weight, and `share` processors are for it.
    fn codes_product(
        &self,
        recording: &mut Recording,
        shape: StepShape,
        (product, first_row, share): (Product, u32, u32),
        matrices: Matrices,
        (count, flows): (u32, &[Flow]),
        step: &Step,
    ) -> Call {
        let (units, rows) = (codes::units(&product.weight), shape.rows());
        let kind = (rows, product.norm.is_some());
        let unit = product.weight.format.codes().map_or(1, unit_cols);
        assert!(count <= units, "{count} parts of {units} units of \"{}\"", product.label);
        if let Some(config) = self.codes_ptx_config(&product.weight, rows)
            && let &[flow] = flows
        {
            let each = config.workgroups / self.tuning.processors.max(1);
            let shared = CodesPtxConfig { workgroups: each * share, ..config };
            let codes = product.weight.format.codes().expect("weights of codes");
            let config = if shared.fits(codes, (product.weight.rows, units), rows) { shared } else { config };
            return codes_ptx::skinny_codes_ptx(&product, rows, config, flow, step.fault);
        }
        if let &[flow] = flows
            && count > 1
        {
            let config = self.codes_config(&product.weight, units.div_ceil(count), kind, matrices);
            // Each part of the rows has words of its own: all are of the same generation.
            let [before, own] = [first_row, product.weight.rows].map(|n| codes::partial_bytes(count, rows, n));
            let count = units.div_ceil(units.div_ceil(count));
            let columns = ProductColumns::Parts { count, partials: step.column_sums.range.part(before, own) };
            return codes::skinny_codes(&product, rows, matrices, config, columns, flow, step.fault);
        }
        let call = |(flow, index): (&Flow, u32)| {
            let first = units * index / count;
            let own = units * (index + 1) / count - first;
            let config = self.codes_config(&product.weight, own, kind, matrices);
            let part = match first {
                0 => product.clone(),
                _ => Product {
                    x: Activations { range: floats_from(product.x.range, first * unit), ..product.x },
                    epilogue: Epilogue::Residual,
                    bias: None,
                    ..product.clone()
                },
            };
            let columns = ProductColumns::Of(first..first + own);
            codes::skinny_codes(&part, rows, matrices, config, columns, *flow, step.fault)
        };
        let mut calls: Vec<Call> = flows.iter().zip(0..).map(call).collect();
        let last = calls.pop().expect("a product has a flow");
        calls.into_iter().for_each(|call| recording.call(call));
        last
    }

    /// Records the input of a product in the order of the columns of its weight, where that is another one. Returns the
    /// input, and the norm if it is still to be applied.
    fn in_order(
        &self,
        recording: &mut Recording,
        shape: StepShape,
        (name, row): (&str, u32),
        x: Activations,
        norm: Option<Range>,
    ) -> (Activations, Option<Range>) {
        let Some((order, cols)) = self.order(recording, name, row) else { return (x, norm) };
        let y = Self::activations(recording, &format!("ordered.{cols}"), shape.rows(), cols);
        let label = format!("{}.order", label_of(name));
        let norm = norm.map(|norm| (norm, self.config.rms_eps));
        recording.call(order::order_rows(label, x, norm, order, y, (shape.rows(), cols)));
        (y, None)
    }

    /// Whether the products of a step of this shape take rows of activations that were packed for them.
    pub(super) fn packs(&self, shape: StepShape) -> bool {
        let narrow = self.config.hidden <= NARROW && self.config.experts.is_none();
        let most = if narrow { MOST_SKINNY_ROWS_NARROW } else { MOST_SKINNY_ROWS };
        let few = if self.has_codes() { self.codes_fit(shape.rows()) } else { shape.rows() <= most };
        self.tuning.fragments.is_some() && !few
    }

    /// Whether the product of a step of this shape with this weight takes packed rows.
    pub(super) fn packs_for(&self, shape: StepShape, name: &str) -> bool {
        self.packs(shape) && self.named_in_fragments(name)
    }

    /// Returns the workgroup shape of `panel` for a product with rows of x, of which `whole` says that all are in use.
    pub(super) fn panel_config(
        &self,
        weight: &Matrix,
        rows: u32,
        matrices: Matrices,
        whole: bool,
    ) -> panel::PanelConfig {
        // Rows of zeros, as behind the end of a prompt, take another look at x in f16.
        let in_f16 = self.tuning.panel_f16 && whole;
        if let Some(config) = self.tuning.panel.get(&(weight.rows, weight.cols)) {
            return panel::PanelConfig { in_f16: config.in_f16 && in_f16, ..*config };
        }
        if let Some(codes) = weight.format.codes() {
            return self.panel_codes_config(weight, codes, rows, matrices, in_f16);
        }
        let (n, long) = (weight.rows, weight.cols >= 8192);
        // Measured with `bench --stages --try` for the products of an 8B model. `Emulated` uses shapes that every device
        // supports.
        let (threads, tiles, ahead, blocks) = match (matrices, rows) {
            (Matrices::Emulated, _) => (64, if n < 2048 || rows <= 32 { 1 } else { 2 }, 1, rows.div_ceil(16).min(4)),
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
        let mut config = panel::PanelConfig { threads, tiles, ahead, blocks, in_f16: false };
        while config.threads > 32 && config.shared_bytes(matrices) > self.tuning.shared_bytes {
            config.threads /= 2;
        }
        config
    }

    /// Returns the workgroup shape of `panel` for a product with a matrix of codes.
    fn panel_codes_config(
        &self,
        weight: &Matrix,
        codes: Codes,
        rows: u32,
        matrices: Matrices,
        in_f16: bool,
    ) -> panel::PanelConfig {
        let units = codes::units(weight);
        // The 16-byte words of codes that a lane loads for a unit.
        let words = unit_cols(codes) * codes.bits / 256;
        let blocks = rows.div_ceil(16).min(4);
        // A workgroup converts x once for all its tiles: with more rows, that costs more than it saves for the weights.
        let wide = weight.rows >= 16_384;
        let in_f16 = in_f16 && blocks <= if wide { 2 } else { 1 };
        let (threads, tiles, most_words) = match (matrices, blocks) {
            (Matrices::Emulated, _) => (64, 1, 1),
            _ if in_f16 && wide => (128, 4, words),
            (_, 1) if in_f16 && weight.cols >= 8192 => (512, 1, 2 * words),
            (_, 1) if in_f16 => (if weight.rows <= 4096 { 512 } else { 256 }, 1, words),
            (_, 1) => (if weight.cols >= 8192 { 512 } else { 256 }, 1, 4),
            (_, 2) => (256, 1, 4),
            (_, _) if wide => (128, 2, 4),
            _ => (256, 1, 4),
        };
        let threads: u32 = threads.min(units.next_power_of_two() * 32);
        let rounds = units.div_ceil(threads / 32 * (most_words / words / tiles).max(1));
        let ahead = units.div_ceil(threads / 32 * rounds);
        let mut config = panel::PanelConfig { threads, tiles, ahead, blocks, in_f16 };
        while config.threads > 32 && config.shared_bytes(matrices) > self.tuning.shared_bytes {
            config.threads /= 2;
        }
        config
    }

    /// Returns the tile if the product of a batch uses `tiled`, or `None` if it uses `panel`.
    pub(super) fn batch_tile(&self, weight: &Matrix, rows: u32, fold: Fold) -> Option<Tile> {
        if weight.format != Format::Bf16 || !matches!(fold, Fold::None) {
            return None;
        }
        if let Some(tile) = self.tuning.tiles.get(&(weight.rows, weight.cols)) {
            return Some(*tile);
        }
        // Measured with `bench --stages --try` for the products of an 8B model.
        match (self.tuning.fragments, rows, weight.rows) {
            (Some(Matrices::Cooperative), 65.., 65_536..) => Some(Tile::Wide),
            (Some(Matrices::Cooperative), 65..=128, 16_384..) => Some(Tile::Square),
            (Some(Matrices::Cooperative), 129.., 16_384..) => Some(Tile::Half),
            _ => None,
        }
    }

    /// Records a product of packed rows with every part of a weight. `fold` is a norm before or after the product that
    /// is folded into it instead of being a stage of its own.
    pub(super) fn tiled(
        &self,
        recording: &mut Recording,
        shape: StepShape,
        step: &Step,
        operands: Operands<'_, Packed, Output>,
        fold: Fold,
    ) {
        let Operands { weight: name, x: input, y, epilogue } = operands;
        let rows = shape.rows();
        let matrices = self.tuning.fragments.unwrap_or(Matrices::Emulated);
        let bias = self.vector(recording, &format!("{name}.bias"));
        let mut parts = Vec::new();
        for (first, weight) in self.factors(recording, name) {
            match self.expands_part(shape, input.order, &weight) {
                true => parts.extend(self.expanded(&weight).into_iter().map(|rows| (first, weight, Some(rows)))),
                false => parts.push((first, weight, None)),
            }
        }
        let mut x = input;
        for (index, (first, weight, run)) in parts.into_iter().enumerate() {
            // All runs of a part have one order.
            if run.is_none_or(|(from, _)| from == 0) {
                x = input;
                if let Some((order, cols)) = self.order(recording, name, first) {
                    x = Self::packed(recording, &format!("packed.ordered.{cols}"), rows, cols);
                    let label = format!("{}.order", label_of(name));
                    recording.call(order::order_packed(label, input, order, x.range, rows));
                }
            }
            let (first, weight) = match run {
                None => (first, weight),
                Some((from, rows)) => {
                    let to = recording.buffer("expanded", codes::expanded_bytes(rows, weight.cols));
                    let label = format!("{}.expand", label_of(name));
                    recording.call(codes::expand_codes(label, &weight, (from, rows), matrices, to));
                    (first + from, Matrix { range: to, format: Format::Bf16, rows, cols: weight.cols })
                }
            };
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
            let tiles = rows > MOST_PANEL_ROWS || product.x.order == PackedOrder::HalfFragments;
            let batch_tile = self.batch_tile(&weight, rows, fold);
            let count = matches!(shape, StepShape::Prefill { .. }).then_some(step.chunk);
            let call = match (shape, batch_tile) {
                _ if product.x.order.is_of_wgmma() => {
                    let processors = self.tuning.processors;
                    let e4m3 = product.x.order == PackedOrder::E4m3;
                    let tile = self.tuning.wgmma.get(&(weight.rows, weight.cols));
                    let size = (weight.rows, weight.cols);
                    let folds = !matches!(fold, Fold::None);
                    let tile = tile.filter(|tile| tile.splits <= wgmma::most_splits(weight.cols, weight.format));
                    let tile = tile.and_then(|tile| tile.for_format(format_word(weight.format), e4m3, folds));
                    let chosen = || wgmma::choose(rows, size, processors, (weight.format, e4m3), folds);
                    let tile = tile.unwrap_or_else(chosen);
                    let shares = Shares::declare(recording, tile, rows, weight.rows);
                    wgmma::wgmma(&product, tile, (rows, count), WgmmaOptions { processors, shares, fold })
                }
                (StepShape::Prefill { .. }, _) if tiles && weight.format == product.x.order.format() => {
                    let tile = match matrices {
                        Matrices::Cooperative => tiled::choose(rows, weight.rows, self.tuning.processors),
                        Matrices::Emulated => Tile::Plain,
                    };
                    product.call(tile, rows, step.chunk)
                }
                (StepShape::Decode { .. } | StepShape::Score { .. }, Some(tile)) => product.batch(tile, rows),
                // Rows after the end of a chunk are zero.
                _ => {
                    let config = self.panel_config(&weight, rows, matrices, count.is_none());
                    panel::panel(&product, rows, matrices, config, fold)
                }
            };
            recording.call(match y {
                Output::Rows(y) if index > 0 => call.beside(y.range),
                _ => call,
            });
        }
    }

    /// Returns the order in which the product of a step with this weight takes its rows, if it takes packed rows.
    pub(super) fn packed_order(&self, shape: StepShape, name: &str) -> PackedOrder {
        let rounds = self.tuning.fp8_activations && shape.rows() >= self.tuning.e4m3_rows;
        let halves = self.takes_halves(shape, name);
        match (self.wgmma_serves(shape, name, wgmma::serves), rounds) {
            (true, true) if self.wgmma_serves(shape, name, wgmma::serves_e4m3) => PackedOrder::E4m3,
            (true, _) if halves => PackedOrder::HalfSwizzled,
            (true, _) => PackedOrder::Swizzled,
            (false, _) if halves && matches!(shape, StepShape::Prefill { .. }) => PackedOrder::HalfFragments,
            (false, _) => PackedOrder::Fragments,
        }
    }

    /// Returns the minimum number of rows that are packed in f16 for products with weights in f16. Without programs in PTX none
    /// are by default: `panel` with rows in bfloat16 is faster than `tiled` with rows in f16.
    pub(super) fn half_rows(&self) -> u32 {
        let rule = if self.tuning.ptx { LEAST_HALF_ROWS } else { u32::MAX };
        self.tuning.half_rows.unwrap_or(rule)
    }

    /// Whether the product of a step with this weight may take rows in f16: the weight is f16, and there are so many rows that a
    /// stage of their own, which finds their scales, pays. Other products with f16 take rows in bfloat16 (`panel`).
    pub(super) fn takes_halves(&self, shape: StepShape, name: &str) -> bool {
        let half = |w: &WeightSpec| self.packed_format(w) == Format::F16 && w.order.is_none();
        shape.rows() >= self.half_rows() && self.weights.iter().filter(|w| w.merged == name).all(half)
    }

    /// Whether `wgmma` computes the product of a step with this weight, if it takes packed rows, where it serves a matrix of
    /// this format with so many rows and columns.
    pub(super) fn wgmma_serves(&self, shape: StepShape, name: &str, serves: fn(Format, u32, u32) -> bool) -> bool {
        self.suits_wgmma(shape, name, serves) && !self.folds_in_panels(shape)
    }

    /// Like [`Decoder::wgmma_serves`], whether or not `panel` computes the step because it folds norms.
    fn suits_wgmma(&self, shape: StepShape, name: &str, serves: fn(Format, u32, u32) -> bool) -> bool {
        let parts = || self.weights.iter().filter(|w| w.merged == name);
        let whole = |w: &WeightSpec| {
            let served = |part: &Part| serves(self.packed_format(w), part.rows, w.cols);
            w.order.is_none() && self.in_fragments(w) && self.parts(w).iter().all(served)
        };
        let coded = self.config.hidden > NARROW && parts().any(|w| self.packed_format(w).codes().is_some());
        let least = if coded { self.tuning.wgmma_code_rows } else { self.tuning.wgmma_rows };
        let any_half = || parts().any(|w| self.packed_format(w) == Format::F16);
        let halves = || !any_half() || self.takes_halves(shape, name);
        self.tuning.ptx && shape.rows() >= least && parts().all(whole) && halves()
    }

    /// Whether the products of packed rows of a step of this shape expand codes to bfloat16 first, unless `wgmma` serves
    /// them. Otherwise each workgroup of `panel` dequantises its own, once for all rows.
    pub(super) fn expands(shape: StepShape) -> bool {
        shape.rows() > MOST_PANEL_ROWS
    }

    /// Whether the product of packed rows in this order with a weight expands its codes first. `wgmma` dequantises codes
    /// itself.
    fn expands_part(&self, shape: StepShape, order: PackedOrder, weight: &Matrix) -> bool {
        weight.format.codes().is_some() && Self::expands(shape) && order == PackedOrder::Fragments
    }

    /// Records the packing of rows for the next products.
    pub(super) fn pack(&self, recording: &mut Recording, shape: StepShape, step: &Step, rows: Unpacked) -> Packed {
        let Unpacked { label, x, cols, norm, order } = rows;
        let bytes = order.bytes(Packed::padded_rows(shape.rows()), cols).max(Packed::bytes(shape.rows(), cols));
        let range = recording.buffer(&format!("{}.{cols}", Self::rows_name("packed", order)), bytes);
        let packed = Packed { range, cols, order };
        let norm = norm.map(|norm| (norm, self.config.rms_eps));
        let count = matches!(shape, StepShape::Prefill { .. }).then_some(step.chunk);
        recording.call(tiled::pack_rows(label, x, norm, packed, shape.rows(), count));
        packed
    }

    /// Returns the name of a buffer of rows in this order. What rows in other formats leave in the buffer would not be numbers
    /// in bfloat16 to rows of smaller steps, which are not written.
    pub(super) fn rows_name(name: &str, order: PackedOrder) -> String {
        match order {
            PackedOrder::Fragments | PackedOrder::Swizzled => name.to_owned(),
            PackedOrder::HalfFragments | PackedOrder::HalfSwizzled => format!("{name}.f16"),
            PackedOrder::E4m3 => format!("{name}.e4m3"),
        }
    }

    pub(super) fn packed(recording: &mut Recording, name: &str, rows: u32, cols: u32) -> Packed {
        let range = recording.buffer(name, Packed::bytes(rows, cols));
        Packed { range, cols, order: PackedOrder::Fragments }
    }

    /// Returns the buffers of unscaled rows if the products of a decode step fold the norms between them, otherwise
    /// `None`. Looks at all weights for each layer: once a recording.
    pub(super) fn unscaled(&self, r: &mut Recording, shape: StepShape) -> Option<Unscaled> {
        let (rows, hidden) = (shape.rows(), self.config.hidden);
        let order = match (self.folds_in_panels(shape), self.folds_in_wgmma(shape)) {
            (true, _) => PackedOrder::Fragments,
            (false, true) => PackedOrder::Swizzled,
            (false, false) => return None,
        };
        Some(Unscaled {
            rows: Packed { order, ..Self::packed(r, "unscaled", rows, hidden) },
            squares: r.buffer("unscaled.squares", Unscaled::square_bytes(order, rows, hidden)),
        })
    }

    /// Whether each norm of a decode step is between two products that could fold it.
    fn has_norms_between_products(&self, shape: StepShape) -> bool {
        matches!(shape, StepShape::Decode { .. })
            && self.packs(shape)
            && self.config.norms == BlockNorms::BEFORE
            && !self.config.has_branch_stages()
            && self.stage.rank.is_none()
            && self.config.mlp_kinds.iter().all(|kind| *kind == MlpKind::Dense)
    }

    /// Whether the products of a decode step fold the norms between them with `panel`. Each workgroup then sums the squares of
    /// all its rows again, which costs more than a separate stage if there are many rows.
    fn folds_in_panels(&self, shape: StepShape) -> bool {
        let (rows, hidden) = (shape.rows(), self.config.hidden);
        let whole = |name: &str| {
            let fits = |w| self.in_fragments(w) && self.parts(w).len() == 1;
            self.weight(name).is_some_and(fits)
        };
        let in_wgmma = || {
            let names = self.norm_products(self.stage.layers.start);
            names.iter().all(|name| self.suits_wgmma(shape, name, wgmma::serves))
        };
        self.has_norms_between_products(shape)
            && rows <= if hidden <= NARROW { 2 * self.tuning.fold_rows } else { self.tuning.fold_rows }
            && hidden.is_multiple_of(32)
            // Any layer may have codes, whose products of many rows are in parts.
            && (!self.has_codes() || !Self::expands(shape))
            && whole(&format!("layers.{}.o", self.stage.layers.start))
            && whole(&format!("layers.{}.down", self.stage.layers.start))
            // In a model that is not narrow, products of codes are faster with `wgmma`.
            && !(hidden > NARROW && self.has_codes() && in_wgmma())
    }

    /// Returns the names of a layer's products before and after norms: of the mixer's input, of its output, and of the dense
    /// MLP's two.
    fn norm_products(&self, layer: u32) -> [String; 4] {
        let input = match self.config.layer_kinds[layer as usize] {
            LayerKind::Attention => "qkv",
            LayerKind::GatedDelta => "in_proj",
            LayerKind::ShortConv => "conv_in",
            LayerKind::None => panic!("layer {layer} has no mixer"),
        };
        [input, "o", "gate_up", "down"].map(|part| format!("layers.{layer}.{part}"))
    }

    /// Whether the products of a decode step fold the norms between them with `wgmma`: if it computes all products before and
    /// after them, and those before them whole.
    fn folds_in_wgmma(&self, shape: StepShape) -> bool {
        let swizzled =
            |name: &String| self.weight(name).is_some() && self.packed_order(shape, name) == PackedOrder::Swizzled;
        let whole = |name: &String| {
            let mut weights = self.weights.iter().filter(|w| w.merged == *name);
            weights.next().is_some_and(|w| self.parts(w).len() == 1) && weights.next().is_none()
        };
        let layer = |layer: u32| {
            let names = self.norm_products(layer);
            let [_, output, _, down] = &names;
            names.iter().all(swizzled) && whole(output) && whole(down)
        };
        self.tuning.wgmma_folds
            && self.has_norms_between_products(shape)
            && self.config.hidden.is_multiple_of(SWIZZLED_COLS)
            && self.stage.layers.clone().all(layer)
    }

    /// Returns the folding of the norm that follows a product.
    pub(super) fn leaves(unscaled: Option<Unscaled>, norm: Option<Range>) -> Fold {
        match (unscaled, norm) {
            (Some(unscaled), Some(norm)) => Fold::Next(unscaled, norm),
            _ => Fold::None,
        }
    }
}

/// Divides the processors among products that run side by side, so that all have ended as early as possible. `parts` has the
/// number of blocks of rows of each product and their size in bytes. Returns each product's number of processors: all of them if
/// there are more products than processors.
fn share_processors(parts: &[(u32, u64)], processors: u32) -> Vec<u32> {
    let shares = |time: u64| -> Option<Vec<u32>> {
        let share = |(blocks, bytes): &(u32, u64)| match time * u64::from(*blocks) / bytes {
            0 => None,
            each => Some(u64::from(*blocks).div_ceil(each) as u32),
        };
        let shares: Vec<u32> = parts.iter().map(share).collect::<Option<_>>()?;
        (shares.iter().sum::<u32>() <= processors).then_some(shares)
    };
    if parts.len() == 1 {
        return vec![processors];
    }
    // The last product ends when a workgroup of one of them has computed a number of blocks.
    let time_of = |each: u32, (blocks, bytes): (u32, u64)| (u64::from(each) * bytes).div_ceil(u64::from(blocks));
    let times = parts.iter().flat_map(|part| (1..=part.0).map(|each| time_of(each, *part)));
    let mut times: Vec<u64> = times.collect();
    times.sort_unstable();
    let first = times.partition_point(|time| shares(*time).is_none());
    times.get(first).and_then(|time| shares(*time)).unwrap_or_else(|| vec![processors; parts.len()])
}

/// Returns the workgroups of `skinny_codes.ptx` for a matrix of codes with `units` units of columns, in a model of `hidden` hidden
/// values: one for each processor, of the best shape that `fits` in shared memory. `None` for few units, and for affine codes in
/// groups of 128 with other than four bits, which were not compared with `skinny_codes`.
fn codes_ptx_rule(
    codes: Codes,
    units: u32,
    hidden: u32,
    processors: u32,
    fits: impl Fn(&CodesPtxConfig) -> bool,
) -> Option<CodesPtxConfig> {
    let of_rows = hidden.div_ceil(unit_cols(codes));
    let long_groups = codes.number == Number::Affine && codes.group == 128;
    let least = if codes.bits.is_multiple_of(2) { LEAST_CODES_PTX_UNITS } else { LEAST_CODES_PTX_UNITS_ODD };
    if units.min(hidden / unit_cols(codes)) < least || (long_groups && codes.bits != 4) {
        return None;
    }
    // The groups of lanes share the columns of the model's rows equally, or nearly so.
    let few = of_rows < *CODES_PTX_GROUPS.start();
    let mut groups: Vec<u32> = if few { vec![of_rows] } else { CODES_PTX_GROUPS.collect() };
    groups.sort_by_key(|&groups| (left_over(of_rows, groups), Reverse(groups)));
    let mut shapes = groups.into_iter().flat_map(|groups| {
        // Few groups, 8 bits and long rows need more on their way. So do the smaller units of long groups in 16 groups of lanes.
        let two = codes.bits < 8 && groups >= 16 && hidden < 4 * groups * 128 && !(long_groups && groups == 16);
        let slots = if two { 2..=2 } else { 2..=3 };
        slots.rev().map(move |slots| CodesPtxConfig { groups, slots, workgroups: processors })
    });
    shapes.find(fits)
}

/// Returns the workgroup shape of `skinny_codes` for a matrix of `blocks` blocks of 16 rows and `units` units of columns, as it
/// is without tuning.
fn codes_rule(
    codes: Option<Codes>,
    (blocks, units): (u32, u32),
    (rows, normed): (u32, bool),
    matrices: Matrices,
    processors: u32,
) -> CodesConfig {
    let bits = codes.map_or(16, |codes| codes.bits);
    // The 16-byte words of codes that a lane loads for a unit.
    let words = codes.map_or(2, |codes| unit_cols(codes) * codes.bits / 256);
    // Twelve lane groups, if few of their steps are empty.
    let by_twelve = units.next_multiple_of(12) * 8 <= units * 9;
    let k_quants = codes.is_some_and(|of| of.bits == 4 && of.group == 32 && of.minimum == Minimum::Stored);
    // AWQ and GPTQ: few scales, so that more words are in flight in as many registers.
    let long_groups = codes.is_some_and(|of| of.bits == 4 && of.group == 128);
    // Two steps are in flight: more words would leave no registers for the next call's workgroups, which load their
    // weights while they wait. Measured with the matrices of Qwen3-8B, Mistral-Small-24B and Llama-3.3-70B on an H200:
    // which workgroups of the next call fit beside those of a product matters as much as the product's own time.
    let (threads, tiles, most_words, each) = match (matrices, rows) {
        (Matrices::Emulated, _) => (64, 1, 1, 4),
        // Several blocks of rows share a barrier, where each workgroup has at least four such groups.
        (Matrices::Cooperative, 1)
            if units >= 64 && bits == 4 && (16 * processors..32 * processors).contains(&blocks) =>
        {
            (256, 4, words, 1)
        }
        (Matrices::Cooperative, 1) if units >= 64 && blocks >= 16 * processors => (512, 2, words, 1),
        (Matrices::Cooperative, 1) if units >= 64 && long_groups && blocks <= 2 * processors => (512, 2, words, 2),
        (Matrices::Cooperative, _) if units >= 64 => (512, 1, words, 1),
        (Matrices::Cooperative, 2..) => (256, 1, 4, 2),
        (Matrices::Cooperative, _) if words <= 3 && blocks <= processors && units < 32 => (512, 1, words, 1),
        (Matrices::Cooperative, _) if words <= 3 && blocks <= processors => {
            let threads = match (by_twelve, words) {
                (false, _) => 256,
                (true, 3) => 384,
                (true, _) => 512,
            };
            (threads, 1, words, 1)
        }
        (Matrices::Cooperative, _) if words <= 3 && blocks <= 2 * processors && by_twelve => {
            if long_groups {
                (256, 1, words, 3)
            } else {
                (384, 1, words, 2)
            }
        }
        (Matrices::Cooperative, _) if words > 3 || blocks <= 2 * processors => (256, 1, words, 2),
        (Matrices::Cooperative, _) if blocks <= 4 * processors && units <= 32 && long_groups && normed => {
            (256, 1, 2 * words, 2)
        }
        // Whole turns of the processors.
        (Matrices::Cooperative, _) if blocks <= 4 * processors && units <= 32 => {
            (if normed { 128 } else { 256 }, 1, words, 4)
        }
        (Matrices::Cooperative, _) if blocks <= 4 * processors => (256, 2, words, 4),
        (Matrices::Cooperative, _) if k_quants && units <= 32 && blocks <= 12 * processors => (256, 1, words, 3),
        (Matrices::Cooperative, _) => (256, 2, words, 2),
    };
    let threads: u32 = match (matrices, rows, units) {
        // Half of eight lane groups multiplies zeros: with four groups, an earlier form of the kernel gave NaN on an H100.
        (Matrices::Cooperative, 2.., 3..=4) => threads,
        _ => threads.min(units.next_power_of_two() * 32),
    };
    // As few steps as the words in flight allow, of equal lengths.
    let rounds = units.div_ceil(threads / 32 * (most_words / (words * tiles)).max(1));
    let ahead = units.div_ceil(threads / 32 * rounds);
    CodesConfig { threads, tiles, ahead, workgroups: each * processors }
}

/// Returns the label of a product: its weight's name, except that a tied embedding's product is labelled as the LM
/// head.
fn label_of(weight: &str) -> String {
    if weight == "embed" { "lm_head" } else { weight }.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: rounds have all chunks, with few zeros, in shapes that registers allow; narrow outputs of the measured models have
    /// the fastest shapes.
    #[test]
    fn rounds_come_out_even() {
        for chunks in 1..2000u32 {
            let rounds = if chunks < 128 { 1 } else { chunks.div_ceil(MOST_ROUND).max(2) };
            let (groups, ahead) = even_rounds(chunks, rounds);
            assert!((1..=MOST_GROUPS).contains(&groups) && (1..=skinny::MOST_AHEAD).contains(&ahead), "{chunks}");
            let loaded = rounds * groups * ahead;
            assert!(loaded >= chunks && 20 * (loaded - chunks) <= chunks + 20, "{chunks}: {loaded}");
        }
        assert_eq!([96, 112, 64].map(|chunks| even_rounds(chunks, 1)), [(24, 4), (16, 7), (16, 4)]);
        assert_eq!([128, 192, 288].map(|chunks| even_rounds(chunks, 2)), [(16, 4), (24, 4), (24, 6)]);
        assert_eq!(even_rounds(384, 3), (16, 8));
    }

    /// Goal: matrices of the measured models have the fastest shapes, or nearly so.
    #[test]
    fn rows_have_the_fastest_shapes_of_measured_models() {
        let rule = |rows: u32, cols: u32| skinny_rule(rows.div_ceil(16), cols.div_ceil(32));
        // Qwen2.5-7B: queries, keys and values; output; gate/up; down.
        assert_eq!([rule(4608, 3584), rule(3584, 3584)], [(448, 3, 2), (384, 1, 2)]);
        assert_eq!([rule(37_888, 3584), rule(3584, 18_944)], [(320, 2, 4), (544, 1, 7)]);
        // Qwen3-4B: queries, keys and values; output; gate/up.
        assert_eq!([rule(6144, 2560), rule(2560, 4096), rule(19_456, 2560)], [(320, 4, 2), (512, 1, 4), (320, 2, 4)]);
        // Llama-3.2-3B: queries, keys and values; output; gate/up.
        assert_eq!([rule(5120, 3072), rule(3072, 3072), rule(16_384, 3072)], [(512, 3, 2), (384, 1, 2), (256, 2, 4)]);
        // Qwen3-14B: queries, keys and values; output; gate/up; LM head.
        assert_eq!([rule(7168, 5120), rule(5120, 5120)], [(512, 4, 2), (512, 3, 2)]);
        assert_eq!([rule(34_816, 5120), rule(151_936, 5120)], [(256, 2, 4), (512, 2, 4)]);
        // Llama-2-13B: queries, keys and values.
        assert_eq!(rule(15_360, 5120), (256, 2, 4));
        // Qwen3-8B: queries, keys and values; output; gate/up; down.
        assert_eq!([rule(6144, 4096), rule(4096, 4096), rule(24_576, 4096)], [(512, 1, 4); 3]);
        assert_eq!(rule(4096, 12_288), (512, 1, 8));
        // Qwen3-1.7B: down. Llama-3.2-1B: queries, keys and values. Qwen3-0.6B: gate/up; down.
        assert_eq!([rule(2048, 6144), rule(3072, 2048)], [(768, 1, 4), (512, 1, 2)]);
        assert_eq!([rule(6144, 1024), rule(1024, 3072)], [(512, 4, 2), (768, 1, 4)]);
    }

    /// Goal: up to eight rows of models that people run are multiplied by programs in PTX, also where the shape that is the fastest
    /// for one row does not fit in shared memory. Method: the widest matrices of models in several formats.
    #[test]
    fn eight_rows_of_popular_models_use_programs_in_ptx() {
        let affine = |bits, group, minimum| Codes { bits, group, number: Number::Affine, minimum };
        let fp8 = Codes { bits: 8, group: 128, number: Number::E4m3, minimum: Minimum::Zero { halves: 0 } };
        let formats = [
            ("Q4_K", affine(4, 32, Minimum::Stored)),
            ("Q6_K", affine(6, 16, Minimum::Zero { halves: 64 })),
            ("Q8_0", affine(8, 32, Minimum::Zero { halves: 256 })),
            ("AWQ", affine(4, 128, Minimum::Stored)),
            ("FP8", fp8),
        ];
        // Hidden sizes, inner values and vocabularies of Qwen3-0.6B, Qwen2.5-1.5B, Qwen3-1.7B, Qwen3-4B, Llama-3.2-3B, Qwen2.5-7B,
        // Gemma-3-12B, Qwen3-8B, Qwen3-14B, Mistral-Small-24B, Nemotron-4-15B and Llama-3.3-70B.
        let models: [(u32, u32, u32); 12] = [
            (1024, 3072, 151_936),
            (1536, 8960, 151_936),
            (2048, 6144, 151_936),
            (2560, 9728, 151_936),
            (3072, 8192, 128_256),
            (3584, 18_944, 152_064),
            (3840, 15_360, 262_208),
            (4096, 12_288, 151_936),
            (5120, 17_408, 151_936),
            (5120, 32_768, 131_072),
            (6144, 24_576, 256_000),
            (8192, 28_672, 128_256),
        ];
        let mut missing = Vec::new();
        for (hidden, inner, vocabulary) in models {
            for (name, codes) in formats {
                for (rows, cols) in [(2 * inner, hidden), (hidden, inner), (vocabulary, hidden)] {
                    let units = cols.div_ceil(unit_cols(codes));
                    let served = |tokens: &u32| {
                        codes_ptx_rule(codes, units, hidden, 132, |config| config.fits(codes, (rows, units), *tokens))
                            .is_some()
                    };
                    let most = [8, 4, 2, 1].into_iter().find(served).unwrap_or(0);
                    if most < 8 {
                        missing.push((name, rows, cols, most));
                    }
                }
            }
        }
        // x of eight rows leaves too little room for wide units.
        let wide = |name| [(name, 57_344, 8192, 4), (name, 128_256, 8192, 4)];
        assert_eq!(missing, [wide("Q6_K"), wide("Q8_0")].concat());
    }

    /// Goal: matrices of codes of the measured models have the fastest shapes, which depend on what fits beside them.
    #[test]
    fn codes_have_the_fastest_shapes_of_measured_models() {
        let of_groups = |bits: u32, group: u32, minimum: Minimum, (rows, normed): (u32, bool), cols: u32| {
            let codes = Codes { bits, group, number: Number::Affine, minimum };
            let units = cols.div_ceil(unit_cols(codes));
            let CodesConfig { threads, tiles, ahead, workgroups } =
                codes_rule(Some(codes), (rows.div_ceil(16), units), (1, normed), Matrices::Cooperative, 132);
            (threads, tiles, ahead, workgroups / 132)
        };
        let shape =
            |bits, minimum, product, cols| of_groups(bits, if bits == 6 { 16 } else { 32 }, minimum, product, cols);
        let q4 = |rows, cols| shape(4, Minimum::Stored, (rows, true), cols);
        let q6 = |rows, cols| shape(6, Minimum::Zero { halves: 64 }, (rows, true), cols);
        let output = |rows| shape(4, Minimum::Stored, (rows, false), 4096);
        // Qwen3-8B: values; queries and keys; output; gate/up.
        assert_eq!([q6(1024, 4096), q4(5120, 4096)], [(384, 1, 1, 1), (128, 1, 1, 4)]);
        assert_eq!([output(4096), q4(24_576, 4096)], [(384, 1, 1, 2), (256, 1, 1, 3)]);
        // The same in AWQ: queries, keys and values; output; down.
        let awq = |product, cols| of_groups(4, 128, Minimum::Stored, product, cols);
        assert_eq!([awq((6144, true), 4096), awq((4096, false), 4096)], [(256, 1, 2, 2), (256, 1, 1, 3)]);
        assert_eq!([awq((4096, false), 12_288), awq((24_576, true), 4096)], [(512, 2, 1, 2), (256, 2, 1, 2)]);
        // Qwen3-30B-A3B: output.
        assert_eq!(output(2048), (512, 1, 1, 1));
        // Mistral-Small-24B: values; queries and keys; all three; output; gate/up.
        assert_eq!([q6(1024, 5120), q4(5120, 5120)], [(256, 1, 1, 1), (256, 2, 1, 4)]);
        assert_eq!([q4(6144, 5120), output(5120), q4(65_536, 5120)], [(256, 2, 1, 4), (256, 1, 1, 4), (256, 2, 1, 2)]);
        // Llama-3.3-70B: gate/up, in codes with and without minimums.
        let without = shape(4, Minimum::Zero { halves: 16 }, (57_344, true), 8192);
        assert_eq!([q4(57_344, 8192), without], [(256, 4, 1, 1); 2]);
    }

    /// Goal: the parts of a weight end at about the same time, each with at least one workgroup and together with no more than there
    /// are processors. Method: measured models' queries and keys beside values, and numbers of parts and blocks of all kinds.
    #[test]
    fn parts_of_a_weight_share_the_processors() {
        // Qwen3-8B and Mistral-Small-24B: queries and keys with 4 bits, values with 6 bits.
        assert_eq!(share_processors(&[(320, 320 * 41), (64, 64 * 57)], 132), [80, 32]);
        assert_eq!(share_processors(&[(320, 320 * 51), (64, 64 * 71)], 132), [80, 32]);
        assert_eq!(share_processors(&[(384, 7)], 132), [132]);
        assert_eq!(share_processors(&[(1, 1), (1, 1), (1, 1)], 2), [2, 2, 2]);
        for (first, second, third) in (1..60u32).flat_map(|n| [(n, 61 - n, 1), (n * n, 7, n), (5 * n, 5 * n, 1000)]) {
            let parts =
                [(first, 10 * u64::from(first)), (second, 15 * u64::from(second)), (third, 3 * u64::from(third))];
            let shares = share_processors(&parts, 33);
            assert!(shares.iter().sum::<u32>() <= 33 && !shares.contains(&0), "{parts:?}: {shares:?}");
            // The last part could not end earlier with the processors that are left.
            let time =
                |i: usize, share: u32| u64::from(parts[i].0.div_ceil(share)) * parts[i].1 / u64::from(parts[i].0);
            let last = (0..3).map(|i| time(i, shares[i])).max().expect("three");
            let before = (1..last).rev().find_map(|time| {
                let needed = parts.iter().map(|(blocks, bytes)| {
                    let each = time * u64::from(*blocks) / bytes;
                    (each > 0).then(|| u64::from(*blocks).div_ceil(each))
                });
                needed.sum::<Option<u64>>().filter(|sum| *sum <= 33)
            });
            assert_eq!(before, None, "{parts:?}: {shares:?}");
        }
    }

    /// Goal: programs in PTX multiply one row where they were measured to be faster. Method: formats and widths of models.
    #[test]
    fn one_row_uses_programs_in_ptx_where_they_are_faster() {
        let codes = |bits, group, number, minimum| Codes { bits, group, number, minimum };
        let k_quant = codes(4, 32, Number::Affine, Minimum::Stored);
        let shape = |codes: Codes, cols: u32, hidden: u32| {
            let config = codes_ptx_rule(codes, cols.div_ceil(unit_cols(codes)), hidden, 132, |_| true)?;
            Some([config.groups, config.slots, config.workgroups])
        };
        let q6 = codes(6, 16, Number::Affine, Minimum::Zero { halves: 64 });
        let fp8 = codes(8, 128, Number::E4m3, Minimum::Zero { halves: 0 });
        let awq = codes(4, 128, Number::Affine, Minimum::Stored);
        // Qwen3-8B; Mistral-Small-24B; Llama-3.3-70B.
        for (codes, cols, hidden, groups, slots) in [
            (k_quant, 4096, 4096, 16, 2),
            (q6, 12_288, 4096, 16, 2),
            (fp8, 4096, 4096, 16, 3),
            (codes(8, 32, Number::Affine, Minimum::Zero { halves: 256 }), 4096, 4096, 16, 3),
            (k_quant, 4096, 5120, 20, 2),
            (k_quant, 32_768, 5120, 20, 2),
            (k_quant, 28_672, 8192, 16, 3),
            (awq, 4096, 4096, 16, 3),
            (awq, 32_768, 5120, 20, 2),
            // Qwen2.5-7B; Llama-3.2-3B; Qwen3-4B; Qwen2.5-3B; Gemma-3-12B's width; Qwen2.5-1.5B.
            (k_quant, 18_944, 3584, 14, 3),
            (q6, 8192, 3072, 24, 2),
            (k_quant, 4096, 2560, 20, 2),
            (k_quant, 2048, 2048, 16, 2),
            (k_quant, 2048, 3840, 15, 3),
            (q6, 1536, 1536, 12, 3),
            // Qwen3-0.6B. A width that no number of groups divides.
            (k_quant, 3072, 1024, 8, 3),
            (k_quant, 3712, 3712, 15, 3),
        ] {
            assert_eq!(shape(codes, cols, hidden), Some([groups, slots, 132]), "{codes:?} of {cols} columns");
        }
        // GPTQ with 8 bits; a narrow model; few columns of a wider one.
        let gptq8 = codes(8, 128, Number::Affine, Minimum::Stored);
        for (codes, cols, hidden) in [(gptq8, 4096, 4096), (k_quant, 3072, 896), (k_quant, 896, 4096)] {
            assert_eq!(shape(codes, cols, hidden), None, "{codes:?} of {cols} columns");
        }
    }
}
