//! Mixtures of experts (MoE): the routing and the MLP of the chosen experts.
//!
//! - A few rows, weights in fragment order: [`Mlp::few_gate_up`] and [`Mlp::few_down`], which include the routing. If the
//!   weights are codes, only without a shared expert.
//! - Row-major weights: [`Mlp::choose`], then [`Mlp::gemv_gate_up`] and [`Mlp::gemv_down`], for any number of rows; or, for
//!   many rows, [`Mlp::choose`], [`Mlp::plan`], [`super::gemm::matmul::block_rows`], [`Mlp::matmul_gate_up`],
//!   [`Mlp::matmul_down`] and [`Mlp::combine`].
//! - Many rows, weights in fragment order: [`Mlp::choose`], [`Mlp::plan`], [`super::gemm::tiled::pack_sorted`],
//!   [`Mlp::sorted_gate_up`], [`Mlp::sorted_down`] and [`Mlp::combine`]. If the weights are codes and there is a shared expert, for any number of rows.
//!
//! A call that reads the experts' weights reads one [`Stack`] of them. Experts that no single buffer holds are several stacks,
//! each with a call of its own.
//!
//! Not here: the router's product and, for many rows, the shared expert's products, which are ordinary products
//! (`skinny`, `gemm`, `panel`, `tiled`).

use super::attention::gate;
use super::deterministic::{key_of, value_of};
use super::gemm::codes_ptx::{self, CodesPtxConfig};
use super::gemm::matmul::{Blocked, MatmulConfig, MatmulRows, Scratch};
use super::gemm::panel;
use super::gemm::skinny::{Matrices, SkinnyConfig};
use super::gemm::tiled::{Output, Packed, PackedOrder, TILE_TOKENS, Tile, Tiled};
use super::gemm::wgmma::{self, WgmmaTile};
use super::gemm::{Activations, Epilogue, Matrix, Product};
use super::host_memory::{HostMemory, PackedMatrix};
use super::recording::{Call, Range};
use super::shaders::{
    EXPERT_SKINNY_PTX, ExpertChooseArgs, ExpertChooseConstants, ExpertCombineArgs, ExpertCombineConstants,
    ExpertGemvArgs, ExpertGemvConstants, ExpertPlanArgs, ExpertPlanConstants, ExpertRouteArgs, ExpertRouteConstants,
    ExpertSkinnyArgs, ExpertSkinnyConstants,
};
use super::tags::{Flow, tagged};
use super::{Format, codes_word, fold, format_of, format_of_word, format_word};
use crate::memory::pack::codes::unit_cols;
use crate::memory::pack::{FRAGMENT_COLS, FRAGMENT_ROWS};
use std::collections::BTreeMap;

/// Sentinel: no expert, or no row.
pub const NOBODY: u32 = u32::MAX;
/// The maximum number of experts per row.
pub const MOST_CHOSEN: u32 = 16;
/// The maximum number of rows of [`Mlp::few_gate_up`] and [`Mlp::few_down`]. From about six rows on, sorting the rows
/// by expert is faster.
pub const MOST_FEW_ROWS: u32 = 16;
/// Like [`MOST_FEW_ROWS`], for experts of codes, whose rows share the columns of a fragment with the rests of their values.
pub const MOST_FEW_CODED_ROWS: u32 = 4;

/// The sizes of an MoE layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertsShape {
    /// The number of experts.
    pub count: u32,
    /// The number of experts per row (top-k), at most [`MOST_CHOSEN`].
    pub chosen: u32,
    /// The number of values between an expert's two products (the intermediate size), a multiple of 8; of 16 without a gate.
    pub inner: u32,
    /// The number of values of a row (the hidden size), a multiple of 16.
    pub hidden: u32,
    /// The intermediate size of the shared expert, which every row uses, if there is one.
    pub shared_inner: Option<u32>,
    /// Whether the shares of a row's chosen experts are divided by their sum.
    pub normalise: bool,
    /// What an expert's first product does with its results: a gated linear unit, or an activation without a gate.
    pub epilogue: Epilogue,
    /// Whether the shared expert's output is multiplied by the sigmoid of a gate, a further row of the router.
    pub gated: bool,
}

/// A selection of experts that is more than the greatest logits, `expert_route`.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// Whether an expert's score is the sigmoid of its logit; otherwise the softmax over all logits.
    pub sigmoid: bool,
    /// The bias that is added to the scores for the choice of experts, but not for their shares: `[count]`.
    pub bias: Option<Range>,
    /// The number of groups of experts with adjacent ids; divides the number of experts.
    pub groups: u32,
    /// The number of groups from which experts are chosen.
    pub kept: u32,
    /// The number of experts whose scores make a group's score.
    pub best: u32,
    /// What is added to the sum of the chosen experts' scores, by which their shares are divided if they are normalised.
    pub sum_offset: f32,
    /// The factor of the shares.
    pub factor: f32,
    /// The factor of the logits.
    pub logit_scale: f32,
    /// A factor of each expert's shares: `[count]`.
    pub scales: Option<Range>,
}

/// Which experts a buffer of weights has the matrices of: the constants FIRST_EXPERT and PART_EXPERTS of `expert_part.glsl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertPart {
    /// The first expert.
    pub first: u32,
    /// The number of experts; 0 for all.
    pub count: u32,
}

impl ExpertPart {
    /// All experts.
    pub const ALL: ExpertPart = ExpertPart { first: 0, count: 0 };

    /// Whether the matrix of an expert is not among them.
    pub fn lacks(self, expert: u32) -> bool {
        self.count != 0 && !(self.first..self.first + self.count).contains(&expert)
    }
}

/// The matrices of adjacent experts of a layer, one behind the other in one buffer: of all experts, or of some if no buffer
/// holds all.
#[derive(Clone, Copy, Debug)]
pub struct Stack {
    /// `[experts · rows of one][columns]`.
    pub matrix: Matrix,
    /// The first expert.
    pub first: u32,
}

/// Whether the stages for a few rows ([`Mlp::few_gate_up`]) serve a selection with these scores, with or without a bias, from
/// `kept` of `groups` groups: the choice is not restricted to some groups, and it is by the logits unless the scores are
/// sigmoids.
pub fn few_serve(sigmoid: bool, bias: bool, (groups, kept): (u32, u32)) -> bool {
    kept == groups && (sigmoid || !bias)
}

impl Route {
    /// The value of the constant ROUTED of `choose.glsl`.
    fn code(&self) -> u32 {
        if self.sigmoid { 2 } else { 1 }
    }
}

impl ExpertsShape {
    /// The number of rows of the router: the experts, and the gate of the shared expert.
    pub fn logits(&self) -> u32 {
        self.count + if self.gated { self.shared() } else { 0 }
    }

    fn shared(&self) -> u32 {
        u32::from(self.shared_inner.is_some())
    }

    /// The number of rows of a first matrix with `inner` outputs: gate and up projections, or up projections only.
    pub fn first_rows(&self, inner: u32) -> u32 {
        if self.epilogue.halves() { 2 * inner } else { inner }
    }

    /// Whether the first product of sorted rows can pack its outputs for the second one, which takes rows in this order.
    pub fn packs_middle(&self, order: PackedOrder) -> bool {
        self.epilogue.halves() && order.is_written_by_products()
    }

    /// The number of floats per choice in rows of [`ExpertsShape::middle_stride`].
    fn part(&self) -> u32 {
        self.inner.next_multiple_of(FRAGMENT_COLS)
    }

    /// The number of floats of a row between the two products: those of each chosen expert and of the shared one, each
    /// padded to 32.
    pub fn middle_stride(&self) -> u32 {
        self.chosen * self.part() + self.shared_inner.unwrap_or(0).next_multiple_of(FRAGMENT_COLS)
    }

    /// Whether [`ExpertsShape::middle_stride`] contains no padding; tagged words must not have padding.
    pub fn middle_is_whole(&self) -> bool {
        self.inner.is_multiple_of(FRAGMENT_COLS) && self.shared_inner.unwrap_or(0).is_multiple_of(FRAGMENT_COLS)
    }

    /// Returns the size in bytes of the choices of `rows` rows: `[rows][chosen and shared]` of expert and share.
    pub fn choices_bytes(&self, rows: u32) -> u64 {
        u64::from(rows) * u64::from(self.chosen + self.shared()) * 8
    }

    /// Returns the size in bytes of the chosen experts' outputs for `rows` rows of `stride` floats:
    /// `[rows][chosen][stride]`.
    pub fn parts_bytes(&self, rows: u32, stride: u32) -> u64 {
        u64::from(rows) * u64::from(self.chosen) * u64::from(stride) * 4
    }

    /// Returns the maximum number of tiles of `tile` rows for the choices of `rows` rows.
    pub fn most_tiles(&self, rows: u32, tile: u32) -> u32 {
        let pairs = rows * self.chosen;
        // Each expert that is chosen may leave all but one row of its last tile empty.
        (pairs + self.count.min(pairs) * (tile - 1)) / tile
    }

    /// Returns the rows and columns of an expert's first matrix, or of its second one.
    pub fn matrix(&self, down: bool) -> (u32, u32) {
        if down { (self.hidden, self.inner) } else { (self.first_rows(self.inner), self.hidden) }
    }

    /// Whether `expert_skinny.codes.ptx` can compute a stage of this number of rows with experts in a format, by these workgroups.
    pub fn program_serves(&self, config: CodesPtxConfig, format: Format, rows: u32, down: bool) -> bool {
        let (n, columns) = self.matrix(down);
        // What else a program is made for changes neither its shared memory nor what it serves.
        let constants = ExpertSkinnyConstants {
            stage: down.into(),
            count: self.count,
            chosen: self.chosen,
            rows,
            columns,
            codes: codes_word(format),
            ..ExpertSkinnyConstants::default()
        };
        codes_ptx::serves_experts(format, &constants) && config.of_experts(n, &constants).is_some()
    }

    fn assert_served(&self) {
        assert!(
            self.chosen <= self.count.min(MOST_CHOSEN)
                && self.first_rows(self.inner).is_multiple_of(16)
                && self.hidden.is_multiple_of(FRAGMENT_ROWS)
                && self.shared_inner.is_none_or(|inner| inner.is_multiple_of(8)),
            "experts of {self:?}"
        );
    }
}

/// The choices of many rows, sorted by expert into tiles of rows.
#[derive(Clone, Copy, Debug)]
pub struct Sorted {
    /// `[most + 1]`: the expert of each tile; [`NOBODY`] beyond the last tile. The last word is the number of tiles in use.
    pub tiles: Range,
    /// `[most][tile]`: row · chosen + the index of the row's choice, or [`NOBODY`].
    pub slots: Range,
    /// The number of rows of a tile, a multiple of 16.
    pub tile: u32,
    /// The maximum number of tiles.
    pub most: u32,
    /// The number of choices per row.
    pub chosen: u32,
    /// The experts whose rows a product computes; it leaves the tiles of others unchanged.
    pub part: ExpertPart,
}

impl Sorted {
    /// Returns the sizes of `tiles` and of `slots` for `rows` rows, in bytes.
    pub fn bytes(shape: &ExpertsShape, rows: u32, tile: u32) -> [u64; 2] {
        let most = u64::from(shape.most_tiles(rows, tile));
        [(most + 1) * 4, most * u64::from(tile) * 4]
    }

    /// Creates the description for `rows` rows, with ranges of [`Sorted::bytes`].
    pub fn new(shape: &ExpertsShape, rows: u32, tile: u32, tiles: Range, slots: Range) -> Sorted {
        let (most, chosen) = (shape.most_tiles(rows, tile), shape.chosen);
        Sorted { tiles, slots, tile, most, chosen, part: ExpertPart::ALL }
    }

    /// The number of rows of all tiles.
    pub fn slot_count(&self) -> u32 {
        self.most * self.tile
    }

    /// Returns the size in bytes of packed rows of `cols` columns, one for each slot.
    pub fn packed_bytes(&self, order: PackedOrder, cols: u32) -> u64 {
        order.bytes(self.slot_count(), cols)
    }
}

/// The kernel that multiplies sorted rows (grouped GEMM).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouped {
    /// `panel`, for a few rows per expert: the workgroup shapes of both products, which have the same number of blocks.
    Panel(Matrices, [panel::PanelConfig; 2]),
    /// `tiled`, for many, in tiles of [`super::gemm::tiled::TILE_TOKENS`] rows in this order.
    Tiled(Tile, PackedOrder),
    /// `wgmma`, for many: the tiles of both products, which have the same number of rows of x, the number of workgroups that
    /// run at once, and the order of the packed rows.
    Wgmma([WgmmaTile; 2], u32, PackedOrder),
}

impl Grouped {
    /// The order of the packed rows.
    pub fn order(self) -> PackedOrder {
        match self {
            Grouped::Wgmma(.., order) | Grouped::Tiled(_, order) => order,
            Grouped::Panel(..) => PackedOrder::Fragments,
        }
    }

    /// Returns the number of rows of a tile, and the `wgmma` variant for up to `rows` rows on a device with
    /// `processors` compute units; `None` if `wgmma` does not serve the experts, whose two matrices have these
    /// `formats`. `tiles` has tiles by rows and columns of an expert's matrix, which are used where they fit. `fp8`: whether
    /// rows are packed in e4m3 if it serves both matrices with such rows.
    pub fn wgmma(
        shape: &ExpertsShape,
        rows: u32,
        processors: u32,
        formats: [Format; 2],
        tiles: &BTreeMap<(u32, u32), WgmmaTile>,
        fp8: bool,
    ) -> Option<(u32, Grouped)> {
        let [gate_up, down] =
            [(shape.first_rows(shape.inner), shape.hidden, formats[0]), (shape.hidden, shape.inner, formats[1])];
        let serves = |(n, k, format)| wgmma::serves(format, n, k);
        let alike = formats[0] == formats[1] || !formats.contains(&Format::F16);
        let packs = !shape.epilogue.halves() || wgmma::packs(gate_up.0);
        if !serves(gate_up) || !serves(down) || !packs || !alike {
            return None;
        }
        let e4m3 = fp8 && [gate_up, down].into_iter().all(|(n, k, format)| wgmma::serves_e4m3(format, n, k));
        let each = (rows * shape.chosen / shape.count).max(1);
        let choose =
            |(n, _, format), tokens| wgmma::choose_sorted((each, shape.count), n, tokens, processors, (format, e4m3));
        let own = |(n, k, format)| {
            let tile = tiles.get(&(n, k)).filter(|tile| tile.splits == 1);
            tile.and_then(|tile| tile.for_format(format_word(format), e4m3, false))
        };
        let order = wgmma::order_of(formats[0], e4m3);
        let first = own(gate_up).unwrap_or_else(|| choose(gate_up, None));
        let second = own(down).filter(|tile| tile.tokens == first.tokens);
        let second = second.unwrap_or_else(|| choose(down, Some(first.tokens)));
        Some((first.tokens, Grouped::Wgmma([first, second], processors, order)))
    }

    /// Returns the number of rows of a tile, for which [`Sorted`] must be made, and the fastest of the other kernels
    /// for up to `rows` rows of experts whose two matrices have these `formats`. `shapes` has workgroup shapes of `panel` by rows
    /// and columns of an expert's matrix, which are used where tiles have as many rows. `in_f16`: whether `panel` may multiply codes in f16.
    pub fn choose(
        shape: &ExpertsShape,
        rows: u32,
        matrices: Matrices,
        formats: [Format; 2],
        shapes: &BTreeMap<(u32, u32), panel::PanelConfig>,
        in_f16: bool,
    ) -> (u32, Grouped) {
        let panels = |[first, second]: [(u32, u32, u32); 2], blocks| {
            let sizes = [(shape.first_rows(shape.inner), shape.hidden, first), (shape.hidden, shape.inner, second)];
            let configs = sizes.map(|(n, k, (threads, tiles, ahead))| {
                let own = shapes.get(&(n, k)).filter(|own| own.blocks == blocks);
                let rule = panel::PanelConfig { threads, tiles, ahead, blocks, in_f16: blocks == 1 };
                let config = own.copied().unwrap_or(rule);
                panel::PanelConfig { in_f16: config.in_f16 && in_f16, ..config }
            });
            (16 * blocks, Grouped::Panel(matrices, configs))
        };
        let panel = |threads, tiles, ahead, blocks| panels([(threads, tiles, ahead); 2], blocks);
        // Measured for experts with a hidden size of 2048 and an intermediate size of 768 or 512 on an H200, by rows
        // per expert.
        let each = rows * shape.chosen / shape.count;
        // `panel` dequantises codes once for all rows of a tile, and `tiled` reads numbers only.
        if formats[0].codes().is_some() {
            return match (matrices, each) {
                (Matrices::Emulated, ..=16) => panel(64, 1, 1, 1),
                (Matrices::Emulated, _) => panel(64, 1, 1, 2),
                // A workgroup converts x once for both its tiles.
                (Matrices::Cooperative, 0) if in_f16 => panels([(128, 2, 1), (64, 2, 1)], 1),
                (Matrices::Cooperative, ..=12) if in_f16 => panel(64, 2, 1, 1),
                (Matrices::Cooperative, ..=12) => panel(128, 1, 1, 1),
                (Matrices::Cooperative, ..=24) => panel(128, 1, 1, 2),
                (Matrices::Cooperative, _) => panel(128, 2, 1, 4),
            };
        }
        // The order of rows for `tiled`; if the matrices need two, `panel` multiplies rows in bfloat16 with both.
        let order = match formats {
            [Format::Bf16, Format::Bf16] => Some(PackedOrder::Fragments),
            [Format::F16, Format::F16] => Some(PackedOrder::HalfFragments),
            _ => None,
        };
        match (matrices, each) {
            (Matrices::Emulated, ..=32) => panel(64, 1, 1, 1),
            (Matrices::Emulated, _) => {
                order.map_or(panel(64, 1, 1, 2), |order| (TILE_TOKENS, Grouped::Tiled(Tile::Plain, order)))
            }
            (Matrices::Cooperative, ..=12) => panel(128, 2, 4, 1),
            (Matrices::Cooperative, ..=24) => panel(128, 4, 1, 2),
            (Matrices::Cooperative, _) => {
                order.map_or(panel(128, 2, 1, 4), |order| (TILE_TOKENS, Grouped::Tiled(Tile::Wide, order)))
            }
        }
    }
}

/// The number of rows of x: fixed, or read from a chunk descriptor.
#[derive(Clone, Copy, Debug)]
pub struct Used {
    /// The maximum number of rows.
    pub rows: u32,
    /// The descriptor; its word 2 is the number of rows in use.
    pub count: Option<Range>,
}

impl Used {
    /// The value of the kernels' constant: 0 if the descriptor holds the number.
    fn constant(self) -> u32 {
        if self.count.is_some() { 0 } else { self.rows }
    }
}

/// The rows of a stage on row-major weights.
#[derive(Clone, Copy, Debug)]
pub struct GemvRows {
    /// The rows in use.
    pub used: Used,
    /// Their choices, which [`Mlp::choose`] writes.
    pub choices: Range,
    /// The number of invocations of a workgroup.
    pub threads: u32,
}

/// The MLP of an MoE layer.
#[derive(Clone, Debug)]
pub struct Mlp {
    /// The prefix of the calls' labels, for example `layers.3.`.
    pub label: String,
    /// The sizes.
    pub shape: ExpertsShape,
    /// `[count · first_rows(inner)][hidden]`; the rows of gate and up alternate. One stack of all experts, or several in the
    /// order of the experts.
    pub gate_up: Vec<Stack>,
    /// `[count · hidden][inner]`, likewise; its stacks need not be those of `gate_up`.
    pub down: Vec<Stack>,
    /// The shared expert's two matrices (gate/up and down), if there is one: in the experts' format, or in any format
    /// beside experts of codes.
    pub shared: Option<(Matrix, Matrix)>,
    /// The biases of the experts' two products, in the order of their rows; the shared expert has none.
    pub biases: [Option<Range>; 2],
    /// The MLP's input, which is normed first.
    pub x: Activations,
    /// The activations to which the MLP's output is added, mostly the residual stream.
    pub y: Activations,
    /// Whether [`Mlp::few_down`] adds the output to y; otherwise it replaces y. The other stages always add.
    pub adds: bool,
    /// How the experts are selected; `None`: the greatest logits, with softmax shares.
    pub routing: Option<Route>,
    /// The norm before the MLP: its weight and epsilon.
    pub norm: (Range, f32),
    /// The router's product with the normalized rows: [`ExpertsShape::logits`] floats per row.
    pub logits: Activations,
}

/// The operands of a stage for a few rows.
#[derive(Clone, Copy, Debug)]
pub struct FewRows {
    /// The values between the two products: [`ExpertsShape::middle_stride`] floats per row.
    pub middle: Activations,
    /// The number of rows.
    pub rows: u32,
    /// How the kernel multiplies matrices.
    pub matrices: Matrices,
    /// The workgroup shape.
    pub config: SkinnyConfig,
    /// The workgroups of `expert_skinny.codes.ptx`, which computes the stage if it serves it and a workgroup has enough shared memory.
    pub ptx: Option<CodesPtxConfig>,
    /// The tags of the stage's input and output: of x and `middle`, or of `middle` and y.
    pub flow: Flow,
    /// The tags of the logits, which are tagged if and only if the input and the output are.
    pub logits: Flow,
    /// The shared expert's output and its tags, if products of its own compute it, as beside experts of codes:
    /// [`Mlp::few_down`] adds it, times its gate. Its rows have the stride of those of y.
    pub shared: Option<(Activations, Flow)>,
    /// The fault word.
    pub fault: Range,
}

/// One of the two products of the MLP.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    GateUp,
    Down,
}

impl Mlp {
    /// Whether each of the experts' two matrices is in one buffer.
    pub fn is_whole(&self) -> bool {
        self.gate_up.len() == 1 && self.down.len() == 1
    }

    /// Returns both matrices of a stage's call for a stack (the experts' and, with the first stack, the shared expert's) and
    /// the number of rows of one expert of each.
    fn matrices(&self, stage: Stage, stack: &Stack) -> (Matrix, Option<Matrix>, u32, u32) {
        self.shape.assert_served();
        let (experts, shared) = match stage {
            Stage::GateUp => (stack.matrix, self.shared.map(|s| s.0)),
            Stage::Down => (stack.matrix, self.shared.map(|s| s.1)),
        };
        let (rows, cols) = self.shape.matrix(stage == Stage::Down);
        let shared_rows = match stage {
            Stage::GateUp => self.shape.first_rows(self.shape.shared_inner.unwrap_or(0)),
            Stage::Down => self.shape.hidden,
        };
        let own = experts.rows / rows;
        assert_eq!((experts.rows, experts.cols), (own * rows, cols), "{} of experts", self.label);
        let end = stack.first + own;
        assert!(own > 0 && end <= self.shape.count, "{} of {own} experts from {} on", self.label, stack.first);
        assert_eq!(shared.is_some(), self.shape.shared_inner.is_some(), "{}: the shared expert", self.label);
        (experts, shared.filter(|_| stack.first == 0), rows, shared_rows)
    }

    /// Returns the experts of a stack whose matrices have `rows` rows each.
    fn part(&self, stack: &Stack, rows: u32) -> ExpertPart {
        let count = stack.matrix.rows / rows;
        if count == self.shape.count { ExpertPart::ALL } else { ExpertPart { first: stack.first, count } }
    }

    /// Returns the call of the first stage for a few rows, on weights in fragment order: it writes the chosen experts'
    /// values between the two products, times their shares, to `middle`. The logits must be computed from this x: when
    /// they are complete, so is x. The calls of several stacks write the same generation of `middle`.
    pub fn few_gate_up(&self, stack: &Stack, few: FewRows) -> Call {
        self.few((Stage::GateUp, stack), self.x, few.middle, few)
    }

    /// Returns the call of the second stage: y += the sum of the experts' outputs for `middle`. The calls of several stacks
    /// each write a generation of y: a call adds its experts' outputs to what the one before has left.
    pub fn few_down(&self, stack: &Stack, few: FewRows) -> Call {
        self.few((Stage::Down, stack), few.middle, self.y, few)
    }

    fn few(&self, (stage, stack): (Stage, &Stack), x: Activations, y: Activations, few: FewRows) -> Call {
        let FewRows { rows, matrices, config, flow, logits, fault, .. } = few;
        let shape = &self.shape;
        let (weight, shared, n, shared_n) = self.matrices(stage, stack);
        let shared = shared.filter(|_| few.shared.is_none());
        let output = few.shared.filter(|_| stage == Stage::Down && stack.first == 0);
        let part = self.part(stack, n);
        assert!(output.is_none_or(|(rows, _)| rows.stride == y.stride), "rows of {}'s shared expert", self.label);
        let alike = shared.is_none_or(|shared| shared.format == weight.format);
        assert!(alike, "{:?} of the shared expert beside {:?}", shared.map(|s| s.format), weight.format);
        let run = run_of(&weight);
        assert!(config.ahead.is_multiple_of(run), "{config:?} for units of {run} chunks");
        let columns = weight.cols;
        let served = |of: Route| few_serve(of.sigmoid, of.bias.is_some(), (of.groups, of.kept));
        assert!(self.routing.is_none_or(served), "{:?} of {shape:?}", self.routing);
        let [choice_bias, scales] = [|r: Route| r.bias, |r: Route| r.scales].map(|of| self.routing.and_then(of));
        let tagged = flow.code() != 0;
        assert!(!tagged || (flow.code() == 3 && logits.input_carried && shape.middle_is_whole()), "tags of {shape:?}");
        let mut constants = ExpertSkinnyConstants {
            threads: config.threads,
            lanes: config.threads,
            stage: u32::from(stage == Stage::Down),
            count: shape.count,
            chosen: shape.chosen,
            normalise: u32::from(shape.normalise),
            shared: if output.is_some() { 2 } else { u32::from(shared.is_some()) },
            tiles: config.tiles,
            ahead: config.ahead,
            rows,
            columns,
            shared_columns: shared.map_or(FRAGMENT_COLS, |s| s.cols),
            tagged: u32::from(tagged),
            glu: shape.epilogue.code(),
            bias: u32::from(self.bias(stage).is_some()),
            add: u32::from(stage == Stage::Down && (self.adds || part.first > 0)),
            routed: self.routing.map_or(0, |routing| routing.code()),
            choice_bias: u32::from(choice_bias.is_some()),
            expert_scales: u32::from(scales.is_some()),
            sum_offset: self.routing.map_or(0, |routing| routing.sum_offset.to_bits()),
            gated: u32::from(shape.gated),
            devices: 0,
            first_expert: part.first,
            part_experts: part.count,
            codes: codes_word(weight.format),
            logit_scale: self.routing.map_or(1.0, |routing| routing.logit_scale).to_bits(),
        };
        let args = ExpertSkinnyArgs {
            weight: weight.range,
            shared_weight: output
                .map(|(rows, _)| rows.range)
                .or(shared.map(|s| s.range))
                .unwrap_or(weight.range.none()),
            x: x.range,
            norm: if stage == Stage::GateUp { self.norm.0 } else { x.range.none() },
            logits: self.logits.range,
            y: y.range,
            // An empty range, so that no barrier is derived: calls may set and read the fault word in any order.
            fault: fault.none(),
            bias: self.bias(stage).unwrap_or(x.range.none()),
            choice_bias: choice_bias.unwrap_or(x.range.none()),
            expert_scales: scales.unwrap_or(x.range.none()),
            n,
            shared_n,
            x_stride: x.stride,
            logits_stride: self.logits.stride,
            y_stride: y.stride,
            epsilon: self.norm.1,
            factor: self.routing.map_or(1.0, |routing| routing.factor),
            shared_tag: output.map_or(0, |(_, flow)| flow.input),
            x_tag: flow.input,
            logits_tag: logits.input,
            old_tag: flow.old,
            y_tag: flow.output.unwrap_or(0),
        };
        let served = codes_ptx::serves_experts(weight.format, &constants);
        let ptx = few.ptx.filter(|_| served).and_then(|ptx| ptx.of_experts(n, &constants));
        if let Some(ptx) = ptx {
            let threads = codes_ptx::expert_threads(ptx, stage == Stage::Down);
            constants = ExpertSkinnyConstants { threads, lanes: threads, tiles: 1, ahead: ptx.slots, ..constants };
        } else {
            let most = match weight.format {
                Format::Bf16 | Format::F16 => MOST_FEW_ROWS,
                Format::Codes(_) if shared.is_none() => MOST_FEW_CODED_ROWS,
                _ => 0,
            };
            assert!(rows <= most, "{rows} rows of {:?}", weight.format);
            assert!(rows * shape.chosen <= config.threads, "{rows} rows of {shape:?} for {} threads", config.threads);
        }
        let each = n.div_ceil(16 * constants.tiles);
        let groups = match stage {
            Stage::GateUp => {
                let of_shared = if shared.is_some() { shared_n.div_ceil(16 * constants.tiles) } else { 0 };
                let experts = if part == ExpertPart::ALL { shape.count } else { part.count };
                (rows * shape.chosen).min(experts) * each + of_shared
            }
            Stage::Down => each,
        };
        // Each row chooses as many experts, so with all of them no workgroup of the program is without a block: it would read x
        // although no later call waits for it.
        let most = if stage == Stage::GateUp && part == ExpertPart::ALL { shape.chosen * each } else { groups };
        let groups = ptx.map_or(groups, |ptx| most.min(ptx.workgroups));
        let call = Call {
            kernel: match (weight.format, matrices) {
                _ if ptx.is_some() => EXPERT_SKINNY_PTX.name,
                (Format::Bf16, Matrices::Emulated) => "expert_skinny.bf16.plain",
                (Format::Bf16, Matrices::Cooperative) => "expert_skinny.bf16",
                (Format::F16, Matrices::Emulated) => "expert_skinny.f16.plain",
                (Format::F16, Matrices::Cooperative) => "expert_skinny.f16",
                (Format::Codes(_), Matrices::Emulated) => "expert_skinny.codes.plain",
                (Format::Codes(_), Matrices::Cooperative) => "expert_skinny.codes",
                (Format::F32, _) => panic!("f32 of {}experts in fragments", self.label),
            },
            label: self.label_of(stage),
            constants: constants.into_values(),
            args: args.into_args(),
            groups: fold(groups, 1),
        };
        let call = flow.mark(call, x.range, y.range);
        let carried = [Some(self.logits.range), output.map(|(rows, _)| rows.range)];
        carried.into_iter().flatten().filter(|_| tagged).fold(call, Call::carry)
    }

    /// Returns the workgroup shapes of [`Mlp::few_gate_up`] and [`Mlp::few_down`] for `rows` rows, within `limit` bytes
    /// of shared memory.
    pub fn few_configs(&self, rows: u32, matrices: Matrices, limit: u32) -> [SkinnyConfig; 2] {
        let config = |threads: u32, tiles, ahead| SkinnyConfig { threads, tiles, ahead };
        let runs = [run_of(&self.gate_up[0].matrix), run_of(&self.down[0].matrix)];
        let mut configs = match (matrices, rows) {
            (Matrices::Emulated, _) if runs != [1, 1] => [config(64, 1, runs[0]), config(64, 1, runs[1])],
            (Matrices::Cooperative, _) if runs != [1, 1] => [config(128, 2, runs[0]), config(512, 1, runs[1])],
            (Matrices::Emulated, _) => [config(64, 1, 2); 2],
            (Matrices::Cooperative, 1) => [config(256, 4, 2), config(512, 1, 4)],
            (Matrices::Cooperative, 2..=4) => [config(128, 2, 4), config(512, 1, 4)],
            (Matrices::Cooperative, _) => [config(128, 4, 4), config(512, 1, 2)],
        };
        for (config, run) in configs.iter_mut().zip(runs) {
            // One invocation per choice of a row.
            let least = (rows * self.shape.chosen).next_multiple_of(32);
            config.threads = config.threads.max(least);
            while self.few_shared_bytes(rows, matrices, *config) > limit {
                if config.ahead > run {
                    config.ahead /= 2;
                } else if config.threads / 2 >= least {
                    config.threads /= 2;
                } else {
                    break;
                }
            }
        }
        configs
    }

    /// Returns the shared memory in bytes of a workgroup of the stages for a few rows.
    pub fn few_shared_bytes(&self, rows: u32, matrices: Matrices, config: SkinnyConfig) -> u32 {
        let (groups, blocks, tokens, quads) = (config.threads / 32, rows.div_ceil(8), rows.min(8), config.ahead * 8);
        let squares = match matrices {
            Matrices::Emulated => quads,
            Matrices::Cooperative => quads.div_ceil(32),
        };
        let emulated = config.threads * 36 + self.shape.count * 4;
        let emulated = if matrices == Matrices::Emulated { emulated } else { 0 };
        // Of codes, the sums of both parts of x.
        let parts = if self.gate_up[0].matrix.format.codes().is_some() { 2 } else { 1 };
        let (sums, x) = (config.tiles * blocks * tokens * parts * 4 * 16, tokens * quads * 16);
        groups * (sums + x + blocks * tokens * squares * 4) + rows * self.shape.chosen * 28 + rows * 4 + 16 + emulated
    }

    fn bias(&self, stage: Stage) -> Option<Range> {
        self.biases[usize::from(stage == Stage::Down)]
    }

    fn epilogue(&self, stage: Stage) -> Epilogue {
        match stage {
            Stage::GateUp => self.shape.epilogue,
            Stage::Down => Epilogue::Store,
        }
    }

    fn label_of(&self, stage: Stage) -> String {
        let name = match stage {
            Stage::GateUp => "experts.gate_up",
            Stage::Down => "experts.down",
        };
        format!("{}{name}", self.label)
    }

    /// Returns the call that selects the experts: it writes `choices` ([`ExpertsShape::choices_bytes`]) of the rows in use.
    /// `valid` is a decode step's table of rows (token, position, slot, valid); rows that are not valid choose
    /// [`NOBODY`].
    pub fn choose(&self, used: Used, valid: Option<Range>, choices: Range) -> Call {
        match &self.routing {
            None => self.choose_greatest(used, valid, choices),
            Some(routing) => self.route(routing, used, valid, choices),
        }
    }

    fn choose_greatest(&self, used: Used, valid: Option<Range>, choices: Range) -> Call {
        const EACH: u32 = 4;
        self.shape.assert_served();
        let constants = ExpertChooseConstants {
            threads: 32 * EACH,
            count: self.shape.count,
            chosen: self.shape.chosen,
            normalise: u32::from(self.shape.normalise),
            shared: self.shape.shared(),
            rows: used.constant(),
            valid: u32::from(valid.is_some()),
            each: EACH,
        };
        let args = ExpertChooseArgs {
            logits: self.logits.range,
            rows: valid.unwrap_or(choices.none()),
            count: used.count.unwrap_or(choices.none()),
            choices: choices.part(0, self.shape.choices_bytes(used.rows)),
            logits_stride: self.logits.stride,
        };
        Call {
            kernel: "expert_choose",
            label: format!("{}experts.choose", self.label),
            constants: constants.into_values(),
            args: args.into_args(),
            groups: fold(used.rows.div_ceil(EACH), 1),
        }
    }

    fn route(&self, routing: &Route, used: Used, valid: Option<Range>, choices: Range) -> Call {
        self.shape.assert_served();
        let shape = &self.shape;
        let each = shape.count / routing.groups;
        assert!(
            shape.count.is_multiple_of(routing.groups)
                && (1..=routing.groups).contains(&routing.kept)
                && (1..=each).contains(&routing.best)
                && routing.kept * each >= shape.chosen,
            "{routing:?} of {shape:?}"
        );
        let constants = ExpertRouteConstants {
            threads: shape.count.next_power_of_two().clamp(64, 256),
            count: shape.count,
            chosen: shape.chosen,
            normalise: u32::from(shape.normalise),
            shared: shape.shared(),
            rows: used.constant(),
            valid: u32::from(valid.is_some()),
            sigmoid: u32::from(routing.sigmoid),
            bias: u32::from(routing.bias.is_some()),
            gate: u32::from(shape.gated),
            groups: routing.groups,
            kept: routing.kept,
            best: routing.best,
            scales: u32::from(routing.scales.is_some()),
            sum_offset: routing.sum_offset.to_bits(),
        };
        let args = ExpertRouteArgs {
            logits: self.logits.range,
            bias: routing.bias.unwrap_or(choices.none()),
            scales: routing.scales.unwrap_or(choices.none()),
            rows: valid.unwrap_or(choices.none()),
            count: used.count.unwrap_or(choices.none()),
            choices: choices.part(0, shape.choices_bytes(used.rows)),
            logits_stride: self.logits.stride,
            factor: routing.factor,
            logit_scale: routing.logit_scale,
        };
        Call {
            kernel: "expert_route",
            label: format!("{}experts.route", self.label),
            constants: constants.into_values(),
            args: args.into_args(),
            groups: fold(used.rows, 1),
        }
    }

    /// Returns the call of the first stage on row-major weights; see [`Mlp::few_gate_up`].
    pub fn gemv_gate_up(&self, stack: &Stack, rows: GemvRows, middle: Activations) -> Call {
        self.gemv((Stage::GateUp, stack), self.x, middle, rows)
    }

    /// Returns the call of the second stage; see [`Mlp::few_down`].
    pub fn gemv_down(&self, stack: &Stack, rows: GemvRows, middle: Activations) -> Call {
        self.gemv((Stage::Down, stack), middle, self.y, rows)
    }

    fn gemv(&self, (stage, stack): (Stage, &Stack), x: Activations, y: Activations, rows: GemvRows) -> Call {
        const ROWS: u32 = 4;
        let GemvRows { used, choices, threads } = rows;
        let shape = &self.shape;
        let (weight, shared, n, shared_n) = self.matrices(stage, stack);
        // Choices include the shared expert, also where another stack's call computes it.
        let shared_n = if shared.is_some() { shared_n } else { 0 };
        let part = self.part(stack, n);
        assert!(
            shared.is_none_or(|s| s.format == weight.format || weight.format.codes().is_some()),
            "{}: experts of {:?} and a shared expert of {shared:?}",
            self.label,
            weight.format
        );
        let constants = ExpertGemvConstants {
            threads,
            stage: u32::from(stage == Stage::Down),
            chosen: shape.chosen,
            shared: shape.shared(),
            used: used.constant(),
            rows: ROWS,
            codes: codes_word(weight.format),
            shared_codes: shared.map_or(0, |s| format_word(s.format)),
            glu: shape.epilogue.code(),
            bias: u32::from(self.bias(stage).is_some()),
            first_expert: part.first,
            part_experts: part.count,
        };
        let args = ExpertGemvArgs {
            weight: weight.range,
            shared_weight: shared.map_or(weight.range.none(), |s| s.range),
            x: x.range,
            norm: if stage == Stage::GateUp { self.norm.0 } else { x.range.none() },
            choices: choices.part(0, shape.choices_bytes(used.rows)),
            count: used.count.unwrap_or(choices.none()),
            y: y.range,
            bias: self.bias(stage).unwrap_or(x.range.none()),
            n,
            shared_n,
            k: weight.cols,
            chunks: weight.cols.div_ceil(8),
            shared_chunks: shared.map_or(0, |s| s.cols.div_ceil(8)),
            part: shape.part(),
            x_stride: x.stride,
            y_stride: y.stride,
            epsilon: self.norm.1,
        };
        let (blocks, rows) = match stage {
            Stage::GateUp => (n.max(shared_n).div_ceil(ROWS), used.rows * (shape.chosen + shape.shared())),
            Stage::Down => (n.div_ceil(ROWS), used.rows),
        };
        assert!(rows <= 65_535, "{rows} rows of a dispatch");
        Call {
            kernel: match weight.format {
                Format::Bf16 => "expert_gemv.bf16",
                Format::F16 => "expert_gemv.f16",
                Format::F32 => "expert_gemv.f32",
                Format::Codes(_) => "expert_gemv.codes",
            },
            label: self.label_of(stage),
            constants: constants.into_values(),
            args: args.into_args(),
            groups: fold(blocks, rows),
        }
    }

    /// Returns the call that sorts the choices of many rows by expert.
    pub fn plan(&self, used: Used, choices: Range, sorted: &Sorted) -> Call {
        let threads = 256;
        let constants = ExpertPlanConstants {
            threads,
            lanes: threads,
            count: self.shape.count,
            chosen: self.shape.chosen,
            shared: self.shape.shared(),
            tile: sorted.tile,
            most: sorted.most,
            rows: used.constant(),
        };
        let args = ExpertPlanArgs {
            choices: choices.part(0, self.shape.choices_bytes(used.rows)),
            count: used.count.unwrap_or(choices.none()),
            tiles: sorted.tiles,
            slots: sorted.slots,
        };
        Call {
            kernel: "expert_plan",
            label: format!("{}experts.plan", self.label),
            constants: constants.into_values(),
            args: args.into_args(),
            groups: [self.shape.count, 1, 1],
        }
    }

    /// Returns the call that computes the experts' values between their products for sorted packed rows, packed
    /// likewise.
    pub fn sorted_gate_up(&self, stack: &Stack, x: Packed, middle: Output, sorted: &Sorted, how: Grouped) -> Call {
        self.grouped((Stage::GateUp, stack), x, middle, sorted, how)
    }

    /// Returns the call that computes each chosen expert's output for a row: `parts`, of [`ExpertsShape::parts_bytes`].
    pub fn sorted_down(
        &self,
        stack: &Stack,
        middle: Packed,
        parts: Activations,
        sorted: &Sorted,
        how: Grouped,
    ) -> Call {
        self.grouped((Stage::Down, stack), middle, Output::Rows(parts), sorted, how)
    }

    fn grouped(&self, (stage, stack): (Stage, &Stack), x: Packed, y: Output, sorted: &Sorted, how: Grouped) -> Call {
        let (weight, _, rows, _) = self.matrices(stage, stack);
        let sorted = &Sorted { part: self.part(stack, rows), ..*sorted };
        let product = Tiled {
            label: self.label_of(stage),
            weight: Matrix { rows, ..weight },
            x,
            bias: self.bias(stage),
            epilogue: self.epilogue(stage),
            y,
        };
        match how {
            Grouped::Panel(matrices, configs) => {
                panel::panel_sorted(&product, sorted, matrices, configs[usize::from(stage == Stage::Down)])
            }
            Grouped::Tiled(tile, _) => product.sorted(tile, sorted),
            Grouped::Wgmma(tiles, processors, _) => {
                wgmma::wgmma_sorted(&product, tiles[usize::from(stage == Stage::Down)], sorted, processors)
            }
        }
    }

    /// Returns the call that computes the experts' values between their products on row-major weights. `x` are the rows
    /// that [`super::gemm::matmul::block_rows`] has prepared for [`MatmulRows::Sorted`], `middle` has a row for each slot.
    pub fn matmul_gate_up(
        &self,
        stack: &Stack,
        x: Blocked,
        middle: Activations,
        sorted: &Sorted,
        config: MatmulConfig,
    ) -> Call {
        self.matmul((Stage::GateUp, stack), x, middle, sorted, config)
    }

    /// Returns the call that computes each chosen expert's output for a row: `parts`, of [`ExpertsShape::parts_bytes`].
    /// `middle` are the rows that were prepared for [`MatmulRows::Slots`].
    pub fn matmul_down(
        &self,
        stack: &Stack,
        middle: Blocked,
        parts: Activations,
        sorted: &Sorted,
        config: MatmulConfig,
    ) -> Call {
        self.matmul((Stage::Down, stack), middle, parts, sorted, config)
    }

    fn matmul(
        &self,
        (stage, stack): (Stage, &Stack),
        x: Blocked,
        y: Activations,
        sorted: &Sorted,
        config: MatmulConfig,
    ) -> Call {
        let (weight, _, each, _) = self.matrices(stage, stack);
        let sorted = &Sorted { part: self.part(stack, each), ..*sorted };
        let rows = match stage {
            Stage::GateUp => MatmulRows::Slots(sorted),
            Stage::Down => MatmulRows::Sorted(sorted),
        };
        let (label, bias, epilogue) = (self.label_of(stage), self.bias(stage), self.epilogue(stage));
        let product = Product { label, weight, x: y, norm: None, bias, epilogue, y };
        // There are many tiles, so their columns are not divided.
        let none = Scratch { partials: y.range.none(), counters: y.range.none() };
        product.matmul(x, rows, each, MatmulConfig { splits: 1, ..config }, none)
    }

    /// Returns the call of y += the chosen experts' outputs, times their shares, plus `shared`, the shared expert's
    /// output, times its gate.
    pub fn combine(&self, used: Used, choices: Range, parts: Activations, shared: Option<Activations>) -> Call {
        assert_eq!(shared.is_some(), self.shape.shared_inner.is_some(), "{}: the shared expert", self.label);
        let threads = 128;
        let constants = ExpertCombineConstants {
            threads,
            chosen: self.shape.chosen,
            shared: self.shape.shared(),
            rows: used.constant(),
        };
        let args = ExpertCombineArgs {
            choices: choices.part(0, self.shape.choices_bytes(used.rows)),
            parts: parts.range,
            shared_rows: shared.map_or(parts.range.none(), |s| s.range),
            x: self.y.range,
            count: used.count.unwrap_or(choices.none()),
            columns: self.shape.hidden,
            parts_stride: parts.stride,
            shared_stride: shared.map_or(0, |s| s.stride),
            x_stride: self.y.stride,
        };
        Call {
            kernel: "expert_combine",
            label: format!("{}experts.combine", self.label),
            constants: constants.into_values(),
            args: args.into_args(),
            groups: [(self.shape.hidden / 4).div_ceil(threads), used.rows, 1],
        }
    }
}

/// Returns the number of chunks of 32 columns that a group of 32 lanes loads at a time: a unit of codes, or one of numbers.
fn run_of(matrix: &Matrix) -> u32 {
    matrix.format.codes().map_or(1, |codes| unit_cols(codes) / FRAGMENT_COLS)
}

/// A selection of experts as the references compute it.
struct Selection {
    count: u32,
    chosen: u32,
    normalise: bool,
    sigmoid: bool,
    bias: Option<Range>,
    scales: Option<Range>,
    groups: u32,
    kept: u32,
    best: u32,
    sum_offset: f32,
    factor: f32,
    logit_scale: f32,
}

impl Selection {
    /// Returns the selection of the greatest logits.
    fn greatest(count: u32, chosen: u32, normalise: u32) -> Selection {
        Selection {
            count,
            chosen,
            normalise: normalise == 1,
            sigmoid: false,
            bias: None,
            scales: None,
            groups: 1,
            kept: 1,
            best: 1,
            sum_offset: 0.0,
            factor: 1.0,
            logit_scale: 1.0,
        }
    }

    /// Returns the experts that the logits from float `first` on select, with their shares, the first choice first.
    fn of(&self, memory: &HostMemory, logits: Range, first: u32) -> Vec<(u32, f64)> {
        let logits: Vec<f32> = (0..self.count).map(|id| memory.f32(logits, first + id) * self.logit_scale).collect();
        let plain = |logit: f32| f64::from(value_of(key_of(logit)));
        let most = logits.iter().copied().map(plain).fold(f64::MIN, f64::max);
        let total: f64 = logits.iter().map(|logit| (plain(*logit) - most).exp()).sum();
        let score = |logit: f32| if self.sigmoid { sigmoid(logit) } else { (plain(logit) - most).exp() / total };
        let scores: Vec<f64> = logits.iter().map(|logit| score(*logit)).collect();
        // A choice is between numbers as the kernels round them. Softmax without bias and groups chooses by the logits.
        let by_logits = !self.sigmoid && self.bias.is_none() && self.kept == self.groups;
        let key = |id: u32| match by_logits {
            true => key_of(logits[id as usize]),
            false => key_of(scores[id as usize] as f32 + self.bias.map_or(0.0, |bias| memory.f32(bias, id))),
        };
        let mut keys: Vec<(u32, u32)> = (0..self.count).map(|id| (key(id).max(1), id)).collect();
        let order = |keys: &mut [(u32, u32)]| keys.sort_by_key(|(key, id)| (std::cmp::Reverse(*key), *id));
        if self.kept < self.groups {
            let each = (self.count / self.groups) as usize;
            let mut groups: Vec<(u32, u32)> = (0..)
                .zip(keys.chunks_exact(each))
                .map(|(group, keys)| {
                    let mut keys = keys.to_vec();
                    order(&mut keys);
                    (key_of(keys[..self.best as usize].iter().map(|(key, _)| value_of(*key)).sum()), group)
                })
                .collect();
            order(&mut groups);
            let kept: Vec<u32> = groups[..self.kept as usize].iter().map(|(_, group)| *group).collect();
            keys.retain(|(_, id)| kept.contains(&(id / each as u32)));
        }
        order(&mut keys);
        let chosen: Vec<u32> = keys[..self.chosen as usize].iter().map(|(_, id)| *id).collect();
        let sum: f64 = chosen.iter().map(|id| scores[*id as usize]).sum();
        let divisor =
            if self.normalise { sum + if self.sigmoid { f64::from(self.sum_offset) } else { 0.0 } } else { 1.0 };
        let own = |id: u32| self.scales.map_or(1.0, |scales| f64::from(memory.f32(scales, id)));
        let share = |id: &u32| (*id, scores[*id as usize] / divisor * f64::from(self.factor) * own(*id));
        chosen.iter().map(share).collect()
    }
}

fn sigmoid(x: f32) -> f64 {
    1.0 / (1.0 + (-f64::from(x)).exp())
}

/// Returns the product of row `row` of a matrix with x, which has as many columns.
fn dot(memory: &HostMemory, matrix: &PackedMatrix, row: u32, x: &[f64]) -> f64 {
    (0..matrix.cols).zip(x).map(|(i, x)| f64::from(memory.element(matrix, row, i)) * x).sum()
}

/// The parameters that the references of both kernels share, for both stages.
struct Stages {
    down: bool,
    weights: PackedMatrix,
    /// The experts of `weights`; the others are left out.
    part: ExpertPart,
    shared: Option<PackedMatrix>,
    x: Activations,
    norm: (Range, f32),
    y: Activations,
    tag: Option<u32>,
    n: u32,
    shared_n: u32,
    glu: u32,
    bias: Option<Range>,
    /// Whether the second stage adds to y.
    adds: bool,
    /// The shared expert's output, in rows as y's, if the second stage adds that instead of computing it.
    output: Option<Range>,
}

impl Stages {
    /// Computes one row of a stage. `choices`: the experts with their shares; the shared expert (`None`) is last.
    fn row(&self, memory: &mut HostMemory, row: u32, choices: &[(Option<u32>, f64)]) {
        // Choices keep their places where others are left out.
        let choices: Vec<(u32, Option<u32>, f64)> = (0..)
            .zip(choices)
            .map(|(place, (expert, share))| (place, *expert, *share))
            .filter(|(_, expert, _)| {
                expert.map_or(self.shared.is_some() || self.output.is_some(), |id| !self.part.lacks(id))
            })
            .collect();
        let of = |expert: Option<u32>| match expert {
            Some(id) => (&self.weights, (id - self.part.first) * self.n, self.n),
            None => (self.shared.as_ref().expect("a shared expert"), 0, self.shared_n),
        };
        // Biases are those of all experts; the shared expert has none.
        let bias = |memory: &HostMemory, expert: Option<u32>, row: u32| match (self.bias, expert) {
            (Some(bias), Some(id)) => f64::from(memory.f32(bias, id * self.n + row)),
            _ => 0.0,
        };
        let set = |memory: &mut HostMemory, at: u32, value: f64| match self.tag {
            Some(tag) => memory.set_u32(self.y.range, at, tagged(value as f32, tag)),
            None => memory.set_f32(self.y.range, at, value as f32),
        };
        let line = |memory: &HostMemory, first: u32, count: u32| -> Vec<f64> {
            (first..first + count).map(|i| f64::from(memory.f32(self.x.range, row * self.x.stride + i))).collect()
        };
        if self.down {
            let old = |i| if self.adds { f64::from(memory.f32(self.y.range, row * self.y.stride + i)) } else { 0.0 };
            let mut sums: Vec<f64> = (0..self.n).map(old).collect();
            for (place, expert, share) in choices {
                if let (None, Some(output)) = (expert, self.output) {
                    for (i, sum) in (row * self.y.stride..).zip(&mut sums) {
                        *sum += share * f64::from(memory.f32(output, i));
                    }
                    continue;
                }
                let (weights, first, n) = of(expert);
                let x = line(memory, place * self.weights.cols.next_multiple_of(FRAGMENT_COLS), weights.cols);
                for r in 0..n {
                    sums[r as usize] += dot(memory, weights, first + r, &x) + share * bias(memory, expert, r);
                }
            }
            for (i, sum) in (0..).zip(sums) {
                set(memory, row * self.y.stride + i, sum);
            }
            return;
        }
        let x = super::gemm::normed(memory, line(memory, 0, self.weights.cols), self.norm.0, self.norm.1);
        for (place, expert, share) in choices {
            let (weights, first, n) = of(expert);
            let v: Vec<f64> =
                (0..n).map(|row| dot(memory, weights, first + row, &x) + bias(memory, expert, row)).collect();
            let epilogue = Epilogue::of_code(self.glu);
            let each = if epilogue.halves() { self.n / 2 } else { self.n };
            let to = row * self.y.stride + place * each.next_multiple_of(FRAGMENT_COLS);
            for (i, value) in (to..).zip(epilogue.of_sums(&v)) {
                set(memory, i, value * share);
            }
        }
    }
}

pub(super) fn reference_expert_skinny(call: &Call, memory: &mut HostMemory) {
    let a = ExpertSkinnyArgs::from_args(&call.args);
    let c = ExpertSkinnyConstants::from_values(&call.constants);
    let weights = |range, cols| PackedMatrix { range, format: format_of(call.kernel, c.codes), fragments: true, cols };
    let stages = Stages {
        down: c.stage == 1,
        weights: weights(a.weight, c.columns),
        part: ExpertPart { first: c.first_expert, count: c.part_experts },
        shared: (c.shared == 1)
            .then(|| weights(a.shared_weight, if c.stage == 1 { c.shared_columns } else { c.columns })),
        x: Activations { range: a.x, stride: a.x_stride },
        norm: (a.norm, a.epsilon),
        y: Activations { range: a.y, stride: a.y_stride },
        tag: (c.tagged == 1).then_some(a.y_tag),
        n: a.n,
        shared_n: a.shared_n,
        glu: c.glu,
        bias: (c.bias == 1).then_some(a.bias),
        adds: c.add == 1,
        output: (c.shared == 2).then_some(a.shared_weight),
    };
    let selection = Selection {
        sigmoid: c.routed == 2,
        bias: (c.choice_bias == 1).then_some(a.choice_bias),
        scales: (c.expert_scales == 1).then_some(a.expert_scales),
        sum_offset: f32::from_bits(c.sum_offset),
        factor: a.factor,
        logit_scale: f32::from_bits(c.logit_scale),
        ..Selection::greatest(c.count, c.chosen, c.normalise)
    };
    for row in 0..c.rows {
        let first = row * a.logits_stride;
        let chosen = selection.of(memory, a.logits, first);
        let mut choices: Vec<(Option<u32>, f64)> = chosen.into_iter().map(|(id, share)| (Some(id), share)).collect();
        if c.shared != 0 {
            choices.push((None, gate(c.gated, memory, a.logits, first + c.count)));
        }
        stages.row(memory, row, &choices);
    }
}

pub(super) fn reference_expert_gemv(call: &Call, memory: &mut HostMemory) {
    let a = ExpertGemvArgs::from_args(&call.args);
    let c = ExpertGemvConstants::from_values(&call.constants);
    let weights = |range, cols, format| PackedMatrix { range, format, fragments: false, cols };
    let format = format_of(call.kernel, c.codes);
    let shared_format = if format.codes().is_some() { format_of_word(c.shared_codes) } else { format };
    let shared_columns = if c.stage == 1 { a.shared_chunks * 8 } else { a.k };
    let stages = Stages {
        down: c.stage == 1,
        weights: weights(a.weight, a.k, format),
        part: ExpertPart { first: c.first_expert, count: c.part_experts },
        shared: (a.shared_chunks > 0).then(|| weights(a.shared_weight, shared_columns, shared_format)),
        x: Activations { range: a.x, stride: a.x_stride },
        norm: (a.norm, a.epsilon),
        y: Activations { range: a.y, stride: a.y_stride },
        tag: None,
        n: a.n,
        shared_n: a.shared_n,
        glu: c.glu,
        bias: (c.bias == 1).then_some(a.bias),
        adds: true,
        output: None,
    };
    let used = if c.used == 0 { memory.u32(a.count, 2) } else { c.used };
    for row in 0..used {
        let at = row * (c.chosen + c.shared);
        if memory.u32(a.choices, at * 2) == NOBODY {
            continue;
        }
        let choices: Vec<(Option<u32>, f64)> = (0..c.chosen + c.shared)
            .map(|j| {
                let id = (j < c.chosen).then(|| memory.u32(a.choices, (at + j) * 2));
                (id, f64::from(memory.f32(a.choices, (at + j) * 2 + 1)))
            })
            .collect();
        stages.row(memory, row, &choices);
    }
}

pub(super) fn reference_expert_choose(call: &Call, memory: &mut HostMemory) {
    let a = ExpertChooseArgs::from_args(&call.args);
    let c = ExpertChooseConstants::from_values(&call.constants);
    let used = if c.rows == 0 { memory.u32(a.count, 2) } else { c.rows };
    for row in 0..used {
        let first = row * a.logits_stride;
        let mut chosen = Selection::greatest(c.count, c.chosen, c.normalise).of(memory, a.logits, first);
        if c.shared == 1 {
            chosen.push((c.count, sigmoid(memory.f32(a.logits, first + c.count))));
        }
        let valid = c.valid == 0 || memory.u32(a.rows, row * 4 + 3) != 0;
        set_choices(memory, a.choices, row, valid, &chosen);
    }
}

/// Writes a row's experts with their shares; of a row that is not valid, [`NOBODY`] and 0.
fn set_choices(memory: &mut HostMemory, choices: Range, row: u32, valid: bool, chosen: &[(u32, f64)]) {
    let first = row * chosen.len() as u32 * 2;
    for (at, (id, share)) in (first..).step_by(2).zip(chosen) {
        memory.set_u32(choices, at, if valid { *id } else { NOBODY });
        memory.set_f32(choices, at + 1, if valid { *share as f32 } else { 0.0 });
    }
}

pub(super) fn reference_expert_route(call: &Call, memory: &mut HostMemory) {
    let a = ExpertRouteArgs::from_args(&call.args);
    let c = ExpertRouteConstants::from_values(&call.constants);
    let used = if c.rows == 0 { memory.u32(a.count, 2) } else { c.rows };
    let selection = Selection {
        count: c.count,
        chosen: c.chosen,
        normalise: c.normalise == 1,
        sigmoid: c.sigmoid == 1,
        bias: (c.bias == 1).then_some(a.bias),
        scales: (c.scales == 1).then_some(a.scales),
        groups: c.groups,
        kept: c.kept,
        best: c.best,
        sum_offset: f32::from_bits(c.sum_offset),
        factor: a.factor,
        logit_scale: a.logit_scale,
    };
    for row in 0..used {
        let first = row * a.logits_stride;
        let mut choices = selection.of(memory, a.logits, first);
        if c.shared == 1 {
            choices.push((c.count, gate(c.gate, memory, a.logits, first + c.count)));
        }
        let valid = c.valid == 0 || memory.u32(a.rows, row * 4 + 3) != 0;
        set_choices(memory, a.choices, row, valid, &choices);
    }
}

pub(super) fn reference_expert_plan(call: &Call, memory: &mut HostMemory) {
    let a = ExpertPlanArgs::from_args(&call.args);
    let c = ExpertPlanConstants::from_values(&call.constants);
    let used = if c.rows == 0 { memory.u32(a.count, 2) } else { c.rows };
    let mut tile = 0;
    for expert in 0..c.count {
        let pairs: Vec<u32> = (0..used * c.chosen)
            .filter(|pair| {
                let at = pair / c.chosen * (c.chosen + c.shared) + pair % c.chosen;
                memory.u32(a.choices, at * 2) == expert
            })
            .collect();
        for rows in pairs.chunks(c.tile as usize) {
            memory.set_u32(a.tiles, tile, expert);
            for i in 0..c.tile {
                memory.set_u32(a.slots, tile * c.tile + i, rows.get(i as usize).copied().unwrap_or(NOBODY));
            }
            tile += 1;
        }
    }
    memory.set_u32(a.tiles, c.most, tile);
    for tile in tile..c.most {
        memory.set_u32(a.tiles, tile, NOBODY);
    }
}

pub(super) fn reference_expert_combine(call: &Call, memory: &mut HostMemory) {
    let a = ExpertCombineArgs::from_args(&call.args);
    let c = ExpertCombineConstants::from_values(&call.constants);
    let used = if c.rows == 0 { memory.u32(a.count, 2) } else { c.rows };
    for row in 0..used {
        let first = row * (c.chosen + c.shared);
        if memory.u32(a.choices, first * 2) == NOBODY {
            continue;
        }
        let share = |memory: &HostMemory, j: u32| f64::from(memory.f32(a.choices, (first + j) * 2 + 1));
        for column in 0..a.columns {
            let mut sum = f64::from(memory.f32(a.x, row * a.x_stride + column));
            for j in 0..c.chosen {
                let part = memory.f32(a.parts, (row * c.chosen + j) * a.parts_stride + column);
                sum += share(memory, j) * f64::from(part);
            }
            if c.shared == 1 {
                sum += share(memory, c.chosen) * f64::from(memory.f32(a.shared_rows, row * a.shared_stride + column));
            }
            memory.set_f32(a.x, row * a.x_stride + column, sum as f32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::gemm::Glu;

    #[test]
    fn no_choice_of_rows_takes_more_tiles_than_are_counted() {
        let shape = ExpertsShape {
            count: 4,
            chosen: 2,
            inner: 8,
            hidden: 16,
            shared_inner: None,
            normalise: true,
            epilogue: Epilogue::Gated(Glu::Silu),
            gated: true,
        };
        assert_eq!(shape.most_tiles(1, 16), 2);
        // 20 choices of four experts, each of which may have begun a tile with its last row.
        assert_eq!(shape.most_tiles(10, 16), 5);
        assert_eq!(shape.most_tiles(64, 64), 5);
        assert_eq!(ExpertsShape { count: 128, chosen: 8, ..shape }.most_tiles(2048, 64), 382);
    }
}
