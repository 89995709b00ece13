//! The choices of a decoder's recordings that depend on the device and not on the model, and how to change them by
//! name.
//!
//! Not here: the choices that follow from a product's shape (`products`).

use crate::kernels::attention::flash::SHARING_PROMPTS;
use crate::kernels::gemm::codes::CodesConfig;
use crate::kernels::gemm::codes_ptx::{self, CodesPtxConfig};
use crate::kernels::gemm::gemv_dots::DotsConfig;
use crate::kernels::gemm::matmul::{Arithmetic, MatmulConfig, MatrixUnits};
use crate::kernels::gemm::panel;
use crate::kernels::gemm::skinny::{self, Matrices};
use crate::kernels::gemm::tiled::Tile;
use crate::kernels::gemm::wgmma::WgmmaTile;
use std::collections::BTreeMap;

/// The maximum number of processors that a change may set.
const MOST_PROCESSORS: u32 = 4096;

/// The number of rows from which on the workgroups of `matmul` for a shape are used for every larger number of rows too.
const MANY_ROWS: u32 = 512;

/// The choices that depend on the device and not on the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// The maximum number of threads of a `gemv` workgroup.
    pub gemv_threads: u32,
    /// The number of rows of W from which a `gemv` workgroup computes four rows instead of two.
    pub gemv_wide_from: u32,
    /// The largest workgroups of `gemv_dots`, which multiplies few rows of activations with row-major codes; `None` if `gemv` and
    /// `matmul` do that. The numbers of their groups are powers of two.
    pub dots: Option<DotsConfig>,
    /// The maximum number of rows of activations for which products with row-major codes use `gemv_dots`.
    pub dots_most: u32,
    /// The maximum number of rows of activations for which other products with row-major weights use `gemv`; more use `matmul`.
    pub gemv_most: u32,
    /// The arithmetic of `matmul`, and on cooperative matrices of prompts' attention with row-major weights.
    pub arithmetic: Arithmetic,
    /// The device's cooperative matrices for `matmul`, `flash_matrix`, `delta_blocks_matrix` and `delta_scan_matrix`, if it has
    /// any.
    pub matrix_units: Option<MatrixUnits>,
    /// Whether prompts' attention with row-major weights uses `flash_matrix`, where `arithmetic` is cooperative matrices.
    pub flash_matrix: bool,
    /// Whether prompts' attention with row-major weights uses `flash_f32`, where it is not on matrices.
    pub flash_f32: bool,
    /// Whether prompts' delta rule with row-major weights uses `delta_blocks_matrix` and `delta_scan_matrix`, where `arithmetic` is
    /// cooperative matrices.
    pub delta_matrix: bool,
    /// Whether tiles of `matmul` are small and are not split, as suits CPU drivers, which compile few sums per invocation
    /// much faster.
    pub small_tiles: bool,
    /// The maximum number of workgroups of an exchange with other devices, which wait for each other: no more than the device
    /// runs at once.
    pub exchange_workgroups: u32,
    /// The number of polls after which a wait for another device ends even if the host does not end it; 0 if steps do not wait
    /// for other devices, but are divided there.
    pub exchange_polls: u32,
    /// Whether the parts of sums of prompt steps pass between devices as bfloat16, in blocks. `None`: where products round
    /// prompts' activations so too.
    pub exchange_halves: Option<bool>,
    /// With layers on several devices, the maximum number of polls with which a device keeps itself busy while it waits for another
    /// one; 0 if it waits idle.
    pub gate_polls: u32,
    /// With tensor parallelism, the minimum size of a bucket of prompt steps whose rows are computed in two microbatches; 0 for
    /// none.
    pub microbatch_rows: u32,
    /// Whether the devices of a replica with tensor parallelism each have a part of the LM head's rows, where it can be divided:
    /// not (0), where that saves more time than the exchange of logits takes (1), or always (2).
    pub vocabulary_rows: u32,
    /// The workgroups of `matmul`, by a minimum number of rows of activations. Overrides the default rule.
    pub matmul: BTreeMap<u32, MatmulConfig>,
    /// The workgroups of `matmul` for products of one shape, by rows and columns of W (of one expert's part) and rows of
    /// activations. Overrides `matmul`; see [`Tuning::matmul_of`].
    pub matmul_shapes: BTreeMap<(u32, u32, u32), MatmulConfig>,
    /// For tests: the maximum size in bytes of a buffer of weights, where the device has larger ones; 0 changes nothing.
    pub weight_buffer: u32,
    /// The minimum size of the buffer for `matmul`'s partial sums, in KiB: room for workgroups with more splits than those of
    /// the recordings.
    pub matmul_room: u32,
    /// The maximum number of threads of an `attention` workgroup.
    pub attention_threads: u32,
    /// The maximum number of threads of a `flash_decode` workgroup; a multiple of 32.
    pub flash_threads: u32,
    /// Like `flash_threads`, for batches with more than one workgroup per compute unit (rows times KV heads).
    pub flash_threads_many: u32,
    /// The number of workgroups per compute unit into which a batch's attention is split along its contexts, if they
    /// are long enough, where the rows have shares of the workgroups (`flash_decode::SpreadBy`).
    pub spread: u32,
    /// The minimum number of KV pages per 32 invocations of a `flash_decode` workgroup that a split along a context
    /// leaves to the workgroup.
    pub spread_pages: u32,
    /// The number of compute units (SMs) of the device, which run workgroups concurrently.
    pub processors: u32,
    /// The maximum shared memory of a workgroup, in bytes.
    pub shared_bytes: u32,
    /// The number of splits of a decoding sequence's attention along its context; each KV head has one workgroup per
    /// split.
    pub splits: u32,
    /// The number of threads of an `argmax` workgroup.
    pub argmax_threads: u32,
    /// The number of threads of a sampler workgroup.
    pub sample_threads: u32,
    /// How blocks of weights in fragment order are multiplied; `None` for row-major weights.
    pub fragments: Option<Matrices>,
    /// The workgroup shapes of `skinny` for one row of activations, by rows and columns of W. Overrides the default
    /// rule.
    pub skinny: BTreeMap<(u32, u32), skinny::SkinnyConfig>,
    /// The workgroup shapes of `skinny_codes`, by bits of a code, rows and columns of W and rows of x. Overrides the default
    /// rule.
    pub codes: BTreeMap<(u32, u32, u32, u32), CodesConfig>,
    /// Whether products of few rows of x with codes use `skinny_codes.ptx` where `ptx` allows and it serves the format.
    pub codes_ptx: bool,
    /// Whether the few rows' products of experts use `expert_skinny.codes.ptx`, likewise.
    pub expert_ptx: bool,
    /// The workgroup shapes of `expert_skinny.codes.ptx`, by bits of a code, rows and columns of an expert's matrix. Overrides the
    /// default rule; a stage for which a shape does not fit in shared memory does not use the program.
    pub expert_ptx_shapes: BTreeMap<(u32, u32, u32), CodesPtxConfig>,
    /// The workgroup shapes of `skinny_codes.ptx` for one row of x, by bits of a code, rows and columns of W. Overrides the default
    /// rule.
    pub codes_ptx_shapes: BTreeMap<(u32, u32, u32), CodesPtxConfig>,
    /// The workgroup shapes of `panel`, by rows and columns of W. Overrides the default rule.
    pub panel: BTreeMap<(u32, u32), panel::PanelConfig>,
    /// Whether `panel` multiplies codes in f16 where x allows.
    pub panel_f16: bool,
    /// The tiles for products of a batch that use `tiled` instead of `panel`, by rows and columns of W.
    pub tiles: BTreeMap<(u32, u32), Tile>,
    /// Whether products of many rows use `wgmma`, whose programs are PTX, if its rules allow.
    pub ptx: bool,
    /// The minimum number of rows for `wgmma` with weights of 16 bits, and in narrow models with all.
    pub wgmma_rows: u32,
    /// The same with weights of codes in other models.
    pub wgmma_code_rows: u32,
    /// Whether decode steps fold norms into the products that `wgmma` computes.
    pub wgmma_folds: bool,
    /// Whether prompts' attention uses `flash_wgmma` where `ptx` allows and it serves the heads.
    pub flash_wgmma: bool,
    /// Whether `wgmma` multiplies weights in e4m3 with rows that are rounded to e4m3, where it can, in steps of at least
    /// `e4m3_rows` rows.
    pub fp8_activations: bool,
    /// The minimum number of rows that are rounded to e4m3. With fewer, products wait for the weights, and rows that are not
    /// rounded need no stage for it.
    pub e4m3_rows: u32,
    /// The minimum number of rows that are packed in f16 for products with weights in f16, of `wgmma` and, where that is not
    /// used, of `tiled`; with fewer, `panel` multiplies rows in bfloat16 with them. `None`: by the rule of the decoder.
    pub half_rows: Option<u32>,
    /// The minimum number of rows for each expert, on average, for `wgmma` with rows sorted by expert.
    pub wgmma_each: u32,
    /// The tiles of `wgmma`, by rows and columns of W. Overrides the default rule.
    pub wgmma: BTreeMap<(u32, u32), WgmmaTile>,
    /// The maximum number of rows of a batch for which norms are folded into the products around them that `panel` computes.
    /// The limit is twice as large for narrow models.
    pub fold_rows: u32,
    /// The time of a decode step in microseconds from which sequences decode in prompt steps while there are prompts, where
    /// the model allows ([`Decoder::mixed_steps`](super::Decoder::mixed_steps)); 0 for never. `None`: by the device's rule.
    pub mixed_steps: Option<u32>,
    /// The maximum number of prompts that share a step, a power of two.
    pub prompts: u32,
    /// Whether the activations of a decode step carry generation tags that their consumers poll, so that no barriers
    /// are needed between them.
    pub tags: bool,
    /// For tests: the number, counted from 1, of the call in a decode step that waits for words that are never written;
    /// 0 for none. It applies to all steps, including the self-test at start, unless `broken_step` or `broken_every`
    /// selects some.
    pub broken_call: u32,
    /// For tests: with 1, each broken step breaks another call in turn, of all that wait for tagged words; `broken_step` or
    /// `broken_every` says which steps these are. 0 changes nothing.
    pub broken_calls: u32,
    /// For tests: the number, counted from 1, of the step without barriers that contains the broken call; 0 for
    /// none.
    pub broken_step: u32,
    /// For tests: every `broken_every`-th step without barriers contains a broken call; 0 for none.
    pub broken_every: u32,
    /// The time in milliseconds for which steps run with barriers after a first fault.
    pub retry_ms: u32,
    /// Whether steps are queued before their token masks are available, behind a gate. Not suitable for drivers where
    /// reading a timestamp waits for all queued work, unless nothing is timed.
    pub gates: bool,
    /// For tests: the number, counted from 1, of the decode plan before which the fault word is set; 0 for never.
    pub fault_at: u32,
    /// For tests: the test at start of the kernels of quantised weights fails for weights in fragments (1), for all (2), or for
    /// weights in fragments and with integer dot products (3); 0 changes nothing.
    pub broken_codes: u32,
    /// Whether quantised weights of large models that load alone are packed on the device (1), or those of all models (2); 0:
    /// the host packs them.
    pub device_packing: u32,
    /// For tests: the test at start of the kernels that pack on the device fails (1); 0 changes nothing.
    pub broken_packing: u32,
    /// For tests: the test at start of `wgmma` fails (1); 0 changes nothing.
    pub broken_ptx: u32,
    /// Whether the results of a small model of the same kind are compared with those of plain Rust at start: with weights
    /// row after row (1) or with all (2); 0 for never.
    pub reference_test: u32,
    /// For tests: that test fails for weights in fragments (1) or for all (2); 0 changes nothing.
    pub broken_reference: u32,
}

impl Tuning {
    /// Sets the arithmetic of products of many rows and, if it is another one, from how many rows on it is used.
    pub fn set_arithmetic(&mut self, arithmetic: Arithmetic) {
        if self.arithmetic != arithmetic {
            self.arithmetic = arithmetic;
            self.gemv_most = most_gemv_rows(arithmetic);
            self.dots_most = most_dots_rows(arithmetic);
        }
    }

    /// Returns the workgroups of `matmul` that a change has set for `rows` rows of activations by `n` rows of W of `cols`
    /// columns: of the shape's largest number of rows that is not above `rows`, if `rows` is less than twice as many, or if it
    /// is at least 512.
    pub fn matmul_of(&self, rows: u32, n: u32, cols: u32) -> Option<MatmulConfig> {
        let (&(_, _, from), config) = self.matmul_shapes.range((n, cols, 0)..=(n, cols, rows)).next_back()?;
        (from >= MANY_ROWS || rows / 2 < from).then_some(*config)
    }

    /// Applies a change `key=value`. Returns false, without a change, if the key is unknown or the value is invalid.
    /// Values are numbers, except: `skinny.ROWSxCOLUMNS` (of W) takes `threads/tiles/ahead`, `codes.BITSxROWSxCOLUMNS`, which
    /// may end in the number of rows of x (`x8`), takes these and the number of workgroups per compute unit,
    /// `codes_ptx.BITSxROWSxCOLUMNS` (one row of x) takes `groups/slots` of [`CodesPtxConfig`] and that number (parts of a weight
    /// that run side by side share the compute units), `expert_ptx.BITSxROWSxCOLUMNS` (of an expert's matrix) the same,
    /// `panel.ROWSxCOLUMNS` takes `threads/tiles/ahead/blocks`, `tiles.ROWSxCOLUMNS` takes a tile's name (`wide`, `half`
    /// or `square`), and `wgmma.ROWSxCOLUMNS` takes `groups/blocks/tokens/stages/splits` (`splits` may be left out).
    /// `matmul.ROWS` (from that number of rows of activations on) takes `tokens/features/words/each/splits` and replaces
    /// what was set for shapes from that number on; `matmul.TOKENSxROWSxCOLUMNS` takes the same for one shape of W and from
    /// TOKENS rows of activations on, to less than twice as many, or without an end from 512 on. `arithmetic` takes 0 for
    /// f32, 1 for f16 and 2 for [`Tuning::matrix_units`], and sets `gemv_most` and `dots_most` to their defaults if it
    /// changes. `dots` takes `groups/lanes/weight_rows/batch` of [`DotsConfig`] and the number of workgroups per compute unit,
    /// and `dots_batch` the `batch` alone, where the device has integer dot products.
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
            self.panel.insert((rows, cols), panel::PanelConfig { threads, tiles, ahead, blocks, in_f16: true });
            return true;
        }
        if key == "dots" {
            let numbers: Vec<u32> = value.split('/').filter_map(|n| n.parse().ok()).collect();
            let (&[groups, lanes, weight_rows, batch, each], Some(dots)) = (&numbers[..], self.dots) else {
                return false;
            };
            let workgroups = each.saturating_mul(self.processors);
            let config = DotsConfig { groups, lanes, weight_rows, batch, workgroups, ..dots };
            if !config.is_possible() {
                return false;
            }
            self.dots = Some(config);
            return true;
        }
        if key == "dots_batch" {
            let (Ok(batch), Some(dots)) = (value.parse(), self.dots) else { return false };
            let config = DotsConfig { batch, ..dots };
            if !config.is_possible() {
                return false;
            }
            self.dots = Some(config);
            return true;
        }
        if let Some(shape) = key.strip_prefix("matmul.") {
            let numbers: Vec<u32> = value.split('/').filter_map(|n| n.parse().ok()).collect();
            let shape: Result<Vec<u32>, _> = shape.split('x').map(str::parse).collect();
            let (Ok(shape), &[tokens, features, words, each, splits]) = (shape, &numbers[..]) else {
                return false;
            };
            let config = MatmulConfig { tokens, features, words, each, splits };
            if numbers.contains(&0) || !config.fits(self.arithmetic) {
                return false;
            }
            match shape[..] {
                [from] => {
                    self.matmul_shapes.retain(|(_, _, rows), _| *rows < from);
                    self.matmul.insert(from, config);
                }
                [from, rows, cols] => {
                    self.matmul_shapes.insert((rows, cols, from), config);
                }
                _ => return false,
            }
            return true;
        }
        if let Some((rows, cols)) = key.strip_prefix("wgmma.").and_then(|shape| shape.split_once('x')) {
            let numbers: Vec<u32> = value.split('/').filter_map(|n| n.parse().ok()).collect();
            let (Ok(rows), Ok(cols), &[groups, blocks, tokens, stages, ref splits @ ..]) =
                (rows.parse(), cols.parse(), &numbers[..])
            else {
                return false;
            };
            let splits = match splits {
                [] => 1,
                [splits] => *splits,
                _ => return false,
            };
            let tile = WgmmaTile { groups, blocks, tokens, stages, splits };
            if !tile.is_possible() {
                return false;
            }
            self.wgmma.insert((rows, cols), tile);
            return true;
        }
        if let Some((rows, cols)) = key.strip_prefix("skinny.").and_then(|shape| shape.split_once('x')) {
            let (Ok(rows), Ok(cols), Some(config)) = (rows.parse(), cols.parse(), skinny_config(value)) else {
                return false;
            };
            self.skinny.insert((rows, cols), config);
            return true;
        }
        let of_experts = key.strip_prefix("expert_ptx.");
        if let Some(shape) = key.strip_prefix("codes_ptx.").or(of_experts) {
            let shape: Result<Vec<u32>, _> = shape.split('x').map(str::parse).collect();
            let numbers: Vec<u32> = value.split('/').filter_map(|n| n.parse().ok()).collect();
            let (Ok(shape), &[groups, slots, each]) = (shape, &numbers[..]) else { return false };
            let &[bits, rows, cols] = &shape[..] else { return false };
            let most = if of_experts.is_some() { codes_ptx::MOST_EXPERT_GROUPS } else { codes_ptx::MOST_GROUPS };
            if !(1..=most).contains(&groups) || !(1..=codes_ptx::MOST_SLOTS).contains(&slots) {
                return false;
            }
            let workgroups = each.max(1).saturating_mul(self.processors);
            let shapes = if of_experts.is_some() { &mut self.expert_ptx_shapes } else { &mut self.codes_ptx_shapes };
            shapes.insert((bits, rows, cols), CodesPtxConfig { groups, slots, workgroups });
            return true;
        }
        if let Some(shape) = key.strip_prefix("codes.") {
            let numbers: Result<Vec<u32>, _> = shape.split('x').map(str::parse).collect();
            let Some((config, each)) = value.rsplit_once('/') else { return false };
            let (Ok(numbers), Some(config), Ok(each)) = (numbers, skinny_config(config), each.parse::<u32>()) else {
                return false;
            };
            let skinny::SkinnyConfig { threads, tiles, ahead } = config;
            let config = CodesConfig { threads, tiles, ahead, workgroups: each.max(1).saturating_mul(self.processors) };
            let shape = match numbers[..] {
                [bits, rows, cols] => (bits, rows, cols, 1),
                [bits, rows, cols, tokens] => (bits, rows, cols, tokens),
                _ => return false,
            };
            self.codes.insert(shape, config);
            return true;
        }
        let Ok(value) = value.parse() else { return false };
        let place = match key {
            "gemv_threads" => &mut self.gemv_threads,
            "gemv_wide_from" => &mut self.gemv_wide_from,
            "gemv_most" => &mut self.gemv_most,
            "dots_most" => &mut self.dots_most,
            "matmul_room" => &mut self.matmul_room,
            "weight_buffer" => &mut self.weight_buffer,
            "vocabulary_rows" => &mut self.vocabulary_rows,
            "attention_threads" => &mut self.attention_threads,
            "flash_threads" => &mut self.flash_threads,
            "flash_threads_many" => &mut self.flash_threads_many,
            "spread" => &mut self.spread,
            "processors" if (1..=MOST_PROCESSORS).contains(&value) => &mut self.processors,
            "fold_rows" => &mut self.fold_rows,
            "prompts" if value.is_power_of_two() && value <= SHARING_PROMPTS => &mut self.prompts,
            "wgmma_rows" => &mut self.wgmma_rows,
            "e4m3_rows" => &mut self.e4m3_rows,
            "wgmma_code_rows" => &mut self.wgmma_code_rows,
            "wgmma_each" => &mut self.wgmma_each,
            "broken_ptx" => &mut self.broken_ptx,
            "broken_reference" => &mut self.broken_reference,
            "reference_test" => &mut self.reference_test,
            "spread_pages" => &mut self.spread_pages,
            "splits" => &mut self.splits,
            "exchange_workgroups" => &mut self.exchange_workgroups,
            "gate_polls" => &mut self.gate_polls,
            "microbatch_rows" => &mut self.microbatch_rows,
            "exchange_polls" => &mut self.exchange_polls,
            "sample_threads" => &mut self.sample_threads,
            "fault_at" => &mut self.fault_at,
            "broken_codes" => &mut self.broken_codes,
            "device_packing" => &mut self.device_packing,
            "broken_packing" => &mut self.broken_packing,
            "broken_call" => &mut self.broken_call,
            "broken_calls" => &mut self.broken_calls,
            "broken_step" => &mut self.broken_step,
            "broken_every" => &mut self.broken_every,
            "retry_ms" => &mut self.retry_ms,
            "ptx" => {
                self.ptx = value != 0;
                return true;
            }
            "codes_ptx" => {
                self.codes_ptx = value != 0;
                return true;
            }
            "expert_ptx" => {
                self.expert_ptx = value != 0;
                return true;
            }
            "panel_f16" => {
                self.panel_f16 = value != 0;
                return true;
            }
            "exchange_halves" => {
                self.exchange_halves = Some(value != 0);
                return true;
            }
            "half_rows" => {
                self.half_rows = Some(value);
                return true;
            }
            "mixed_steps" => {
                self.mixed_steps = Some(value);
                return true;
            }
            "fp8_activations" => {
                self.fp8_activations = value != 0;
                return true;
            }
            "integer_dots" => {
                self.dots = (value != 0).then(|| {
                    self.dots.unwrap_or(DotsConfig {
                        groups: 1,
                        lanes: 64,
                        weight_rows: 2,
                        batch: 2,
                        workgroups: self.processors,
                        subgroup: 4,
                        shared_bytes: self.shared_bytes,
                    })
                });
                return true;
            }
            "tags" => {
                self.tags = value != 0;
                return true;
            }
            "arithmetic" => {
                self.set_arithmetic(match value {
                    0 => Arithmetic::F32,
                    1 => Arithmetic::F16,
                    _ => match self.matrix_units {
                        Some(units) => Arithmetic::Matrices(units),
                        None => return false,
                    },
                });
                return true;
            }
            "gates" => {
                self.gates = value != 0;
                return true;
            }
            "wgmma_folds" => {
                self.wgmma_folds = value != 0;
                return true;
            }
            "flash_wgmma" => {
                self.flash_wgmma = value != 0;
                return true;
            }
            "flash_f32" => {
                self.flash_f32 = value != 0;
                return true;
            }
            "flash_matrix" => {
                self.flash_matrix = value != 0;
                return true;
            }
            "delta_matrix" => {
                self.delta_matrix = value != 0;
                return true;
            }
            "fragments" => {
                self.fragments = match value {
                    0 => None,
                    1 => Some(Matrices::Emulated),
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

/// Returns the default of [`Tuning::gemv_most`], by the times of Qwen3-8B with 4, 8 and 16 rows on an H200: with matrix units and
/// in f16, 8 rows are faster by `matmul`, in f32 16 rows.
pub fn most_gemv_rows(arithmetic: Arithmetic) -> u32 {
    match arithmetic {
        Arithmetic::Matrices(_) | Arithmetic::F16 => 7,
        Arithmetic::F32 => 10,
    }
}

/// Returns the default of [`Tuning::dots_most`], by the same times of codes of 4 and 6 bits.
pub fn most_dots_rows(arithmetic: Arithmetic) -> u32 {
    match arithmetic {
        Arithmetic::Matrices(_) => 4,
        Arithmetic::F16 => 7,
        Arithmetic::F32 => 10,
    }
}

/// Parses `threads/tiles/ahead`.
fn skinny_config(value: &str) -> Option<skinny::SkinnyConfig> {
    let numbers: Vec<u32> = value.split('/').filter_map(|n| n.parse().ok()).collect();
    let &[threads, tiles, ahead] = &numbers[..] else { return None };
    let valid = threads.is_multiple_of(32) && ![threads, tiles, ahead].contains(&0);
    valid.then_some(skinny::SkinnyConfig { threads, tiles, ahead })
}
