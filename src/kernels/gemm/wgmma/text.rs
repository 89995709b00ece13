//! The text of `wgmma`, a GEMM of many rows for NVIDIA GPUs of compute capability 9.0, in PTX: `y[r] = epilogue( W · x[r] )`.
//! A program's text is made for a [`WgmmaVariant`]: tile, stages and epilogue are numbers in it.
//!
//! ```text
//! epilogue   0 store: y = Wx + b. 1 residual: y += Wx + b. 2 and more: a gated linear unit: the rows of W
//!            alternate gate and up; y[N/2] = glu(gate, up); or squared ReLU: y = max(Wx + b, 0)² (`glu.glsl`)
//! weight     [N padded to 16][K] bfloat16 or f16, `memory::pack::Layout::Fragments`: a block of 16 rows × 64 columns is 2 KiB; or
//!            codes with scales (`memory::pack::codes`), of which K is whole units
//! x          [K / 64][x_rows][64] bfloat16 in the order of `tiled::swizzled_index`: 128 bytes for 64 columns of a row. Or, for
//!            weights in e4m3, [K / 128][x_rows][128] e4m3 in the order of `tiled::e4m3_index`, then [x_rows] f32, the scales.
//!            For weights in f16, f16 in the order for bfloat16, then scales
//! bias       [N] f32
//! y          not packed: [rows][y_stride] f32. Packed: like x, [N / 128][y_rows][64] bfloat16, as x of the next product
//! count      if `rows` is 0, the third word here is the number of rows
//! squares    an RMSNorm before or after the product that is folded into it: [columns / 64][x_rows, or y_rows] f32, the sums of
//!            the squares of 64 columns of a row that is normed
//! norm       FOLD 2: [N] f32, the weight of the norm of y
//! next       FOLD 2: y ⊙ norm in bfloat16, packed like x, [N / 64][y_rows][64]
//! partials   the sums of shares of a tile, if several workgroups share its columns: [tiles][splits][sums / 4][threads][4] f32
//! counters   [tiles]: the number of shares that are stored; 0 between calls
//! tiles      experts (MoE): the expert of each tile of TOKENS rows of x, then the number of tiles in use (`expert_plan`). W
//!            and the bias have N rows for each expert
//! slots      experts, y not packed: row i of the product is row `slots[i]` of y, or is dropped if that is `NOBODY`
//! ```
//!
//! A workgroup has GROUPS + 1 warpgroups of 128 threads and computes tiles of GROUPS · BLOCKS · 64 rows of W by TOKENS rows
//! of x, one after the other: tile `workgroup + i · workgroups`, with the tiles of x counted first. The last warpgroup
//! copies, one thread of each of its four warps: for each 64 columns (a unit of codes) it fills one of STAGES places in
//! shared memory, as soon as all consumers have left it (`empty`), by one bulk copy for each 16 rows of W and one for all
//! rows of x and 64 columns, which count their bytes on the place's `full` barrier.
//!
//! Where tiles are few, SPLITS workgroups share the columns of a tile: each stores its sums, and the last to arrive adds
//! those of all in the order of their numbers and goes on with them.
//!
//! An RMSNorm of x between two products is folded into both. The first, which adds to y (FOLD 2), also writes y ⊙ norm, packed,
//! and the sums of y²; the second (FOLD 1) has these rows as x, and scales its products of a row with 1 / sqrt(mean + epsilon),
//! which its warpgroups compute while their first columns are on the way.
//!
//! The other warpgroups multiply. Operand A, the weights, comes from registers: in fragment order, the 16 bytes of a lane
//! are its registers of `m64k16`, with the rows of W and the columns in another order than the instruction's. Lane
//! 4g + t has rows 4(g / 2) + g % 2 and + 2 of a warp's 16, and number e of its four columns of step s of 64 columns is
//! column 32(s / 2) + 8t + 4(s % 2) + e. Operand B, the rows of x, is read from shared memory with the 128-byte swizzle;
//! its columns have been put in the same order. One group of instructions stays in flight while the next one's weights
//! are loaded, so there are two sets of registers for weights.
//!
//! Codes are dequantised between shared memory and the registers of operand A, 64 columns at a time: code · scale - minimum
//! in f16, rounded to bfloat16. A lane's bits are its fragment's. The rows' factors are multiplied with the sums.
//!
//! Rows in e4m3 are multiplied with codes in e4m3 as they are, `m64k32`: the 16 bytes of a lane are its registers of 32 columns.
//! The sums of 128 columns, which have one scale a row of W, are complete before they are multiplied with it and added to the
//! tile's sums in f32, because the matrix units keep few bits of a sum. At most 128 rows of x are in flight at a
//! time, while another warpgroup scales its sums. The scales of the rows of x, also in f16, are multiplied at the end.
//!
//! A lane's sums are those of rows 4a + b and 4a + b + 2 (g = 2a + b) for rows 2t and 2t + 1 of each 8 rows of x. It
//! exchanges half of them with lane `lane ^ 4`, and then has rows 4a .. 4a + 3 of row 2t + b of x: 16 bytes of y, or two
//! gated outputs.
//!
//! Traffic: W (codes as they are) is read rows / TOKENS times and x N / (rows of a tile) times, mostly from the L2 cache; y once.
//! All waits are bounded; one that is given up ends the program with a trap, which loses the device.

use crate::device::MOST_SHARED_BYTES;
use crate::kernels::format_of_word;
use crate::kernels::gemm::Epilogue;
use crate::kernels::moe::NOBODY;
use crate::kernels::ptx::{PtxText, float, line, registers};
use crate::kernels::shaders::WGMMA;
use crate::memory::pack::Format;
use crate::memory::pack::codes::{BLOCK_HEADER, fragment_unit_bytes, unit_cols};
use crate::quant::number::Number;
use crate::quant::{Codes, Minimum};
use half::f16;

/// The size of a tile, and how its work is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WgmmaTile {
    /// The number of warpgroups that multiply: 1 to 3.
    pub groups: u32,
    /// The number of blocks of 64 rows of W of each of them.
    pub blocks: u32,
    /// The number of rows of x: a multiple of 8, at most 256.
    pub tokens: u32,
    /// The number of places for 64 columns in shared memory.
    pub stages: u32,
    /// The number of workgroups that share the columns of a tile: 1 to 8.
    pub splits: u32,
}

impl WgmmaTile {
    /// Whether there are programs for the tile with weights in bfloat16: whether the numbers are in range, and it fits a
    /// processor.
    pub fn is_possible(self) -> bool {
        WgmmaVariant::of(self, 0, false).is_possible()
    }

    /// The number of rows of W.
    pub const fn weight_rows(self) -> u32 {
        self.groups * self.blocks * 64
    }

    /// The size of a share's sums in bytes, if a tile has several.
    pub const fn share_bytes(self) -> u32 {
        self.weight_rows() * self.tokens * 4
    }

    /// Whether shares can be joined without spilling registers.
    const fn joins(self) -> bool {
        self.blocks == 1 && self.tokens <= 128
    }

    /// Whether norms can be folded into products without spilling registers.
    const fn folds(self) -> bool {
        self.joins() && (self.splits == 1 || self.groups == 1 || self.tokens < 128)
    }

    /// The number of tiles of at most `rows` rows of x by `n` rows of W.
    pub const fn tiles(self, rows: u32, n: u32) -> u32 {
        rows.div_ceil(self.tokens) * n.div_ceil(self.weight_rows())
    }

    /// The number of threads of a workgroup.
    pub const fn threads(self) -> u32 {
        (self.groups + 1) * 128
    }

    /// Returns the tile with as many stages as it has and as fit with weights in a format (`kernels::format_word`), if
    /// `e4m3` with rows in e4m3, and if `folds` with a norm that is folded into the product; `None` if two do not fit.
    pub fn for_format(self, codes: u32, e4m3: bool, folds: bool) -> Option<WgmmaTile> {
        let fits = |stages: &u32| {
            let plain = WgmmaVariant::of(WgmmaTile { stages: *stages, ..self }, codes, e4m3);
            let with = |fold: u32| WgmmaVariant { epilogue: fold - 1, fold, ..plain }.is_possible();
            plain.is_possible() && (!folds || with(1) && with(2))
        };
        (2..=self.stages).rev().find(fits).map(|stages| WgmmaTile { stages, ..self })
    }

    /// The number of rows of x that one instruction multiplies with rows in e4m3: with three warpgroups, registers are few.
    fn e4m3_tokens(self) -> u32 {
        self.tokens.min(if self.groups == 3 { 64 } else { 128 })
    }
}

/// The parameters that a program is generated for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WgmmaVariant {
    /// The tile.
    pub tile: WgmmaTile,
    /// The epilogue's number (`Epilogue::code`).
    pub epilogue: u32,
    /// Whether a bias is added.
    pub bias: bool,
    /// Whether y is packed; only with a gated linear unit.
    pub packed: bool,
    /// The format of the weights (`kernels::format_word`); 0 for bfloat16.
    pub codes: u32,
    /// Whether each tile of rows has an expert of its own.
    pub experts: bool,
    /// Whether rows of x are in e4m3; only with weights that [`multiplies_e4m3`] says.
    pub e4m3: bool,
    /// The part of an RMSNorm that is folded into the product: 0 for none, 1 to scale the products, 2 to prepare the norm of y.
    pub fold: u32,
}

impl WgmmaVariant {
    /// Returns the plain product of a tile.
    fn of(tile: WgmmaTile, codes: u32, e4m3: bool) -> WgmmaVariant {
        WgmmaVariant { tile, epilogue: 0, bias: false, packed: false, codes, experts: false, e4m3, fold: 0 }
    }

    /// Whether there is a program: whether the tile's numbers are in range, and it fits a processor.
    pub fn is_possible(&self) -> bool {
        let WgmmaTile { groups, blocks, tokens, stages, splits } = self.tile;
        (1..=3).contains(&groups)
            && blocks >= 1
            && groups * blocks <= 4
            && [32, 64, 128, 256].contains(&tokens)
            && (2..=64).contains(&stages)
            && (1..=8).contains(&splits)
            // Where larger tiles are chosen, neither shares nor folded norms would pay.
            && (splits == 1 || !self.experts && self.tile.joins())
            && (self.fold == 0 || !self.experts && self.tile.folds())
            && (self.fold != 2 || self.epilogue == 1 && !self.packed)
            && (splits == 1 && self.fold == 0 || !self.e4m3)
            && (self.fold == 0 && !self.packed || !self.is_half())
            && self.least_registers() <= if self.e4m3 { E4M3_REGISTERS } else { REGISTERS }[groups as usize - 1]
            && (!self.e4m3 || self.format().is_some_and(multiplies_e4m3))
            && self.shared_bytes() <= MOST_SHARED_BYTES
    }

    /// The shared memory of a workgroup in bytes, with room to align it.
    pub fn shared_bytes(&self) -> u32 {
        ALIGNMENT
            + self.tile.stages * (self.stage_bytes() + 16)
            + self.tile.groups * STAGING_BYTES
            + 16
            + self.fold_bytes()
    }

    /// The shared memory of a folded norm: each row's factor and the parts of its sum, or the sums of each warp's columns.
    fn fold_bytes(&self) -> u32 {
        let WgmmaTile { groups, tokens, .. } = self.tile;
        match self.fold {
            0 => 0,
            1 => (groups * 128 + tokens) * 4,
            _ => groups * 4 * tokens * 4,
        }
    }

    /// The format of weights of codes.
    fn format(&self) -> Option<Codes> {
        format_of_word(self.codes).codes()
    }

    /// Whether weights and rows of x are in f16.
    fn is_half(&self) -> bool {
        format_of_word(self.codes) == Format::F16
    }

    /// Whether each row of x has a scale, which [`pack_rows`](crate::kernels::gemm::tiled::pack_rows) alone can give it.
    fn has_scales(&self) -> bool {
        self.e4m3 || self.is_half()
    }

    /// The number of columns of a stage: a multiple of 64.
    fn columns(&self) -> u32 {
        self.format().map_or(64, unit_cols)
    }

    /// The bytes of 16 rows of W of a stage.
    fn block_bytes(&self) -> u32 {
        self.format().map_or(2048, fragment_unit_bytes)
    }

    /// The number of columns of x in 128 bytes.
    fn x_columns(&self) -> u32 {
        if self.e4m3 { 128 } else { 64 }
    }

    /// The number of blocks of 128 bytes of a row of x in a stage.
    fn x_blocks(&self) -> u32 {
        self.columns() / self.x_columns()
    }

    /// The bytes of a stage's rows of x, with which the stage begins.
    fn rows_bytes(&self) -> u32 {
        self.tile.tokens * self.x_blocks() * 128
    }

    /// The number of registers of a thread that multiplies, at least, without addresses: sums, and two sets of weights; or
    /// with rows in e4m3 sums, those in flight, and one set of weights of one block.
    fn least_registers(&self) -> u32 {
        let WgmmaTile { blocks, tokens, .. } = self.tile;
        match self.e4m3 {
            true => blocks * tokens / 2 + self.tile.e4m3_tokens() / 2 + 16,
            false => blocks * (tokens / 2 + 32),
        }
    }

    /// The bytes of a stage.
    fn stage_bytes(&self) -> u32 {
        (self.rows_bytes() + self.tile.weight_rows() / 16 * self.block_bytes()).next_multiple_of(ALIGNMENT)
    }
}

/// Whether codes are multiplied with rows in e4m3: numbers in e4m3 with a scale for each 128 columns.
pub fn multiplies_e4m3(codes: Codes) -> bool {
    codes == Codes { bits: 8, group: 128, number: Number::E4m3, minimum: Minimum::Zero { halves: 0 } }
}

/// The most that [`WgmmaVariant::least_registers`] may be with 1, 2 and 3 warpgroups: with more, programs spill.
const REGISTERS: [u32; 3] = [255, 200, 128];
/// The same with rows in e4m3, which need fewer addresses.
const E4M3_REGISTERS: [u32; 3] = [210, 208, 128];

/// The name of the program's entry.
pub const ENTRY: &str = "wgmma";

/// The alignment of stages in shared memory, which the swizzle needs.
const ALIGNMENT: u32 = 1024;
/// The number of tokens whose packed outputs pass through shared memory at once.
const STAGED_TOKENS: u32 = 64;
/// The shared memory of a warpgroup for packed outputs: 32 of them for [`STAGED_TOKENS`] tokens.
const STAGING_BYTES: u32 = STAGED_TOKENS * 64;
/// The upper bits of a descriptor of shared memory: rows of 128 bytes, swizzled, 8 rows in 1,024 bytes.
const DESCRIPTOR: u64 = 1 << 62 | 64 << 32 | 1 << 16;

/// Returns the text of a program.
pub fn text(variant: &WgmmaVariant) -> String {
    let mut program = Text { ptx: PtxText::default(), variant: *variant };
    program.write();
    program.ptx.out
}

struct Text {
    ptx: PtxText,
    variant: WgmmaVariant,
}

impl Text {
    fn write(&mut self) {
        let WgmmaVariant { tile, .. } = self.variant;
        let WgmmaTile { groups, stages, splits, .. } = tile;
        let sums = tile.blocks * tile.tokens / 2;
        let weights = tile.blocks * 32;
        let staging = stages * self.variant.stage_bytes();
        let barriers = staging + groups * STAGING_BYTES;
        self.ptx.head(ENTRY, WGMMA.push_bytes, tile.threads());
        line!(
            self,
            ".reg .pred %p<8>, %none, %accumulate, %all, %release, %odd, %valid, %last;
.reg .b32 %r<32>, %i<8>;
.reg .b64 %l<16>;
.reg .f32 %v<8>, %b<4>, %c<4>, %f<8>;
.reg .b32 %thread, %lane, %warp, %base, %bars, %n, %k, %rows, %x_rows, %y_stride, %y_rows, %steps, %step;
.reg .b32 %tile, %tiles, %token_tiles, %weight_tile, %token_tile, %slot, %slot8, %phase, %polls, %full, %empty, %previous;
.reg .b32 %group, %quarter, %a, %t, %first, %left, %row, %staged, %bytes, %rest, %columns;
.reg .b64 %weight, %x, %bias, %y, %count, %expert_tiles, %slots, %from<4>, %advance, %descriptor, %at, %pitch, %block_bytes;
.reg .f32 %sum<{sums}>, %raw<{raw}>, %scale_u, %scale_v;
.reg .b64 %x_scales, %partials, %counters, %squares, %norm, %next, %place<2>;
.reg .b32 %fold, %squared;
.reg .f32 %epsilon, %g<4>;
.reg .pred %lead;
.reg .b32 %whole, %share, %first_step, %end_step;
.reg .b32 %w<{weights}>, %q<{codes}>, %d<4>, %s<4>, %scale, %scales_at, %expert;
.reg .b16 %h<2>;
ld.param.u64 %weight, [args];
ld.param.u64 %x, [args+8];
ld.param.u64 %bias, [args+16];
ld.param.u64 %y, [args+24];
ld.param.u64 %count, [args+32];
ld.param.u64 %expert_tiles, [args+40];
ld.param.u64 %slots, [args+48];
ld.param.u32 %n, [args+96];
ld.param.u32 %k, [args+100];
ld.param.u32 %rows, [args+104];
ld.param.u32 %x_rows, [args+108];
ld.param.u32 %y_stride, [args+112];
ld.param.u32 %y_rows, [args+116];
// The rows in use, and the tiles.
setp.ne.u32 %p0, %rows, 0;
@%p0 bra HAVE_ROWS;
ld.global.u32 %rows, [%count+8];
HAVE_ROWS:
add.u32 %r0, %rows, {tokens_less};
div.u32 %token_tiles, %r0, {tokens};
{experts}add.u32 %r0, %n, {rows_less};
div.u32 %r0, %r0, {weight_rows};
mul.lo.u32 %tiles, %r0, %token_tiles;
{all_shares}shr.u32 %columns, %k, {columns_shift};
add.u32 %r0, %k, {columns_less};
div.u32 %steps, %r0, {columns};
mul.wide.u32 %block_bytes, %steps, {block_bytes};
add.u64 %block_bytes, %block_bytes, {header};
mov.u32 %thread, %tid.x;
and.b32 %lane, %thread, 31;
shr.u32 %r0, %thread, 5;
shfl.sync.idx.b32 %warp, %r0, 0, 31, 0xffffffff;
mov.u32 %base, shared;
add.u32 %base, %base, 1023;
and.b32 %base, %base, 0xfffffc00;
add.u32 %bars, %base, {barriers};
mov.u32 %tile, %ctaid.x;
mov.u32 %slot, 0;
mov.u32 %slot8, 0;
mov.u32 %phase, 0;
// Barriers: `full` for each stage, then `empty` for each stage.
setp.ne.u32 %p0, %thread, 0;
@%p0 bra BARRIERS;",
            codes = tile.blocks * 8,
            experts = if self.variant.experts {
                "mul.wide.u32 %l0, %token_tiles, 4;\nadd.u64 %l0, %expert_tiles, %l0;\nld.global.u32 %token_tiles, [%l0];\n"
            } else {
                ""
            },
            raw = tile.e4m3_tokens() / 2,
            all_shares = if splits > 1 { format!("mul.lo.u32 %tiles, %tiles, {splits};\n") } else { String::new() },
            columns_shift = self.variant.x_columns().ilog2(),
            columns = self.variant.columns(),
            columns_less = self.variant.columns() - 1,
            block_bytes = self.variant.block_bytes(),
            header = if self.variant.format().is_some() { BLOCK_HEADER } else { 0 },
            tokens = tile.tokens,
            tokens_less = tile.tokens - 1,
            weight_rows = tile.weight_rows(),
            rows_less = tile.weight_rows() - 1,
        );
        for stage in 0..stages {
            line!(self, "mbarrier.init.shared::cta.b64 [%bars+{}], 4;", stage * 8);
            line!(self, "mbarrier.init.shared::cta.b64 [%bars+{}], {};", (stages + stage) * 8, groups * 4);
        }
        line!(
            self,
            "fence.mbarrier_init.release.cluster;
fence.proxy.async;
BARRIERS:
bar.sync 0;
setp.ge.u32 %p0, %warp, {};
@%p0 bra PRODUCER;",
            groups * 4
        );
        self.consumer(staging);
        line!(self, "PRODUCER:");
        self.producer();
        line!(self, "END:\nret;\n}}");
    }

    /// Goes on to the next stage.
    fn advance(&mut self) {
        let tile = self.variant.tile;
        line!(
            self,
            "add.u32 %slot8, %slot8, 8;
add.u32 %slot, %slot, {stage};
setp.eq.u32 %p0, %slot8, {end};
selp.u32 %slot8, 0, %slot8, %p0;
selp.u32 %slot, 0, %slot, %p0;
selp.u32 %r0, 1, 0, %p0;
xor.b32 %phase, %phase, %r0;",
            stage = self.variant.stage_bytes(),
            end = tile.stages * 8,
        );
    }

    /// Begins a loop over the workgroup's tiles; `name` begins its labels.
    fn each_tile(&mut self, name: &str) {
        line!(
            self,
            "{name}_TILE:
setp.ge.u32 %p0, %tile, %tiles;
@%p0 bra END;
{share}div.u32 %weight_tile, {tile}, %token_tiles;
mul.lo.u32 %r0, %weight_tile, %token_tiles;
sub.u32 %token_tile, {tile}, %r0;",
            share = self.share(),
            tile = if self.variant.tile.splits > 1 { "%whole" } else { "%tile" },
        );
        if self.variant.experts {
            line!(
                self,
                "mul.wide.u32 %l0, %token_tile, 4;
add.u64 %l0, %expert_tiles, %l0;
ld.global.u32 %expert, [%l0];"
            );
        }
    }

    /// Returns the instructions that find the share's tile, its first step, and the one behind its last.
    fn share(&self) -> String {
        match self.variant.tile.splits {
            1 => String::new(),
            splits => format!(
                "div.u32 %whole, %tile, {splits};
mul.lo.u32 %r0, %whole, {splits};
sub.u32 %share, %tile, %r0;
mul.lo.u32 %r0, %share, %steps;
div.u32 %first_step, %r0, {splits};
add.u32 %r0, %r0, %steps;
div.u32 %end_step, %r0, {splits};
"
            ),
        }
    }

    /// The first step of a workgroup's share of a tile, and the one behind its last.
    fn steps(&self) -> (&'static str, &'static str) {
        if self.variant.tile.splits > 1 { ("%first_step", "%end_step") } else { ("0", "%steps") }
    }

    fn next_tile(&mut self, name: &str) {
        line!(self, "mov.u32 %r0, %nctaid.x;\nadd.u32 %tile, %tile, %r0;\nbra {name}_TILE;");
    }

    /// Four warps, one thread of each: each copies a quarter of the blocks of 16 rows of W, and the first one the rows of x.
    fn producer(&mut self) {
        let WgmmaVariant { tile, experts, .. } = self.variant;
        let (tokens, each) = (tile.tokens, self.variant.block_bytes());
        let (blocks, share) = (tile.weight_rows() / 16, tile.weight_rows() / 64);
        if let Some((few, _)) = self.registers() {
            line!(self, "setmaxnreg.dec.sync.aligned.u32 {few};");
        }
        line!(
            self,
            "elect.sync %r1|%p0, 0xffffffff;
@!%p0 bra END;
sub.u32 %quarter, %warp, {first};
setp.eq.u32 %last, %quarter, 0;
mad.lo.u32 %first, %quarter, {share_bytes}, %base;
add.u32 %first, %first, {rows_bytes};
mul.wide.u32 %advance, %x_rows, 128;",
            first = tile.groups * 4,
            share_bytes = share * each,
            rows_bytes = self.variant.rows_bytes(),
        );
        self.each_tile("PRODUCER");
        let x_blocks = self.variant.x_blocks();
        line!(
            self,
            "// Rows of x are copied up to a multiple of 8.
mul.lo.u32 %r1, %token_tile, {tokens};
add.u32 %r2, %rows, 7;
and.b32 %r2, %r2, 0xfffffff8;
sub.u32 %r2, %r2, %r1;
min.u32 %r2, %r2, {tokens};
mul.lo.u32 %bytes, %r2, 128;
selp.u32 %rest, %bytes, 0, %last;
mul.wide.u32 %l0, %r1, 128;
add.u64 %at, %x, %l0;
// Blocks beyond the last row of W are copies of the last one.
mul.lo.u32 %r3, %weight_tile, {blocks};
mad.lo.u32 %r3, %quarter, {share}, %r3;
shr.u32 %r7, %n, 4;
sub.u32 %r4, %r7, 1;",
        );
        for block in 0..share {
            line!(self, "add.u32 %r5, %r3, {block};\nmin.u32 %r5, %r5, %r4;");
            if experts {
                line!(self, "mad.lo.u32 %r5, %expert, %r7, %r5;");
            }
            line!(
                self,
                "cvt.u64.u32 %l2, %r5;
mad.lo.u64 %from{block}, %l2, %block_bytes, %weight;"
            );
            if self.variant.format().is_some() {
                line!(self, "add.u64 %from{block}, %from{block}, {BLOCK_HEADER};");
            }
            if tile.splits > 1 {
                line!(self, "mul.wide.u32 %l3, %first_step, {each};\nadd.u64 %from{block}, %from{block}, %l3;");
            }
        }
        if tile.splits > 1 {
            line!(
                self,
                "mul.wide.u32 %l3, %first_step, {x_blocks};
mul.lo.u64 %l3, %l3, %advance;
add.u64 %at, %at, %l3;"
            );
        }
        let (first_step, end_step) = self.steps();
        line!(
            self,
            "mov.u32 %step, {first_step};
PRODUCER_STEP:
.pragma \"nounroll\";
add.u32 %full, %bars, %slot8;
add.u32 %empty, %full, {empty};
xor.b32 %r5, %phase, 1;",
            empty = tile.stages * 8,
        );
        self.ptx.wait("%empty", "%r5");
        // The last stage may have fewer columns of x.
        line!(
            self,
            "mul.lo.u32 %r1, %step, {x_blocks};
sub.u32 %r1, %columns, %r1;
min.u32 %r2, %r1, {x_blocks};
mul.lo.u32 %r2, %r2, %rest;
add.u32 %r2, %r2, {share_bytes};
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%full], %r2;
add.u32 %r6, %first, %slot;",
            share_bytes = share * each,
        );
        const COPY: &str = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes";
        for block in 0..share {
            line!(
                self,
                "{COPY} [%r6], [%from{block}], {each}, [%full];
add.u32 %r6, %r6, {each};
add.u64 %from{block}, %from{block}, {each};"
            );
        }
        line!(self, "@!%last bra COPIED;\nadd.u32 %r6, %base, %slot;");
        for part in 0..x_blocks {
            if part > 0 {
                line!(self, "setp.le.u32 %p0, %r1, {part};\n@%p0 bra COPIED;");
            }
            line!(
                self,
                "{COPY} [%r6], [%at], %bytes, [%full];
add.u32 %r6, %r6, {};
add.u64 %at, %at, %advance;",
                tokens * 128
            );
        }
        line!(self, "COPIED:");
        self.advance();
        line!(
            self,
            "add.u32 %step, %step, 1;
setp.lt.u32 %p0, %step, {end_step};
@%p0 bra PRODUCER_STEP;"
        );
        self.next_tile("PRODUCER");
    }

    /// Returns the registers of a thread that copies and of one that multiplies, where they are not shared out evenly.
    fn registers(&self) -> Option<(u32, u32)> {
        match self.variant.tile.groups {
            2 => Some((40, 232)),
            3 => Some((32, 160)),
            _ => None,
        }
    }

    fn consumer(&mut self, staging: u32) {
        let tile = self.variant.tile;
        if let Some((_, many)) = self.registers() {
            line!(self, "setmaxnreg.inc.sync.aligned.u32 {many};");
        }
        line!(
            self,
            "shr.u32 %group, %warp, 2;
and.b32 %quarter, %warp, 3;
shr.u32 %a, %lane, 3;
and.b32 %t, %lane, 3;
bfe.u32 %r1, %lane, 2, 1;
setp.ne.u32 %odd, %r1, 0;
shl.b32 %t, %t, 1;
add.u32 %t, %t, %r1;
setp.eq.u32 %release, %lane, 0;
setp.eq.u32 %all, %lane, %lane;
// The lane's weights in a stage, and the descriptor of the rows of x.
mad.lo.u32 %r1, %group, {group_bytes}, %base;
mad.lo.u32 %r1, %quarter, {block_bytes}, %r1;
add.u32 %r1, %r1, {rows_bytes};
mad.lo.u32 %first, %lane, 16, %r1;
{scales}and.b32 %r1, %base, 0x3ffff;
shr.u32 %r1, %r1, 4;
cvt.u64.u32 %descriptor, %r1;
or.b64 %descriptor, %descriptor, {DESCRIPTOR:#x};
mad.lo.u32 %staged, %group, {STAGING_BYTES}, %base;
add.u32 %staged, %staged, {staging};",
            group_bytes = tile.blocks * 4 * self.variant.block_bytes(),
            block_bytes = self.variant.block_bytes(),
            rows_bytes = self.variant.rows_bytes(),
            scales = self.variant.format().map_or_else(String::new, scales_at),
        );
        self.each_tile("CONSUMER");
        if self.variant.fold == 1 {
            self.row_factors();
        }
        if self.variant.e4m3 {
            self.multiply_e4m3();
            self.finish();
            self.next_tile("CONSUMER");
            return;
        }
        let (first_step, end_step) = self.steps();
        line!(self, "mov.u32 %step, {first_step};\nCONSUMER_STEP:\n.pragma \"nounroll\";");
        // An even number of groups of products, which take turns with the two sets of weights.
        let sixty_fours = self.variant.x_blocks();
        for stage in 0..2u32.div_ceil(sixty_fours) {
            for part in 0..sixty_fours {
                if part > 0 {
                    line!(
                        self,
                        "mad.lo.u32 %r1, %step, {sixty_fours}, {part};
setp.ge.u32 %p0, %r1, %columns;
@%p0 bra LAST;"
                    );
                }
                self.multiply(part, (stage + part) % 2);
            }
            self.advance();
            line!(self, "add.u32 %step, %step, 1;\nsetp.ge.u32 %p0, %step, {end_step};\n@%p0 bra SUMS;");
        }
        line!(
            self,
            "bra CONSUMER_STEP;
LAST:"
        );
        self.advance();
        line!(
            self,
            "SUMS:
wgmma.wait_group.sync.aligned 0;
@%release mbarrier.arrive.shared::cta.b64 _, [%previous];"
        );
        self.join();
        self.finish();
        line!(self, "SHARED:");
        self.next_tile("CONSUMER");
    }

    /// The offset of the word with the number of a tile's shares that were stored before, from that of the barriers.
    fn arrived_at(&self) -> u32 {
        self.variant.tile.stages * 16
    }

    /// The offset of the shared memory of a folded norm from that of the barriers.
    fn fold_at(&self) -> u32 {
        self.arrived_at() + 16
    }

    /// Puts the factor of each row of the tile into shared memory: 1 / sqrt(mean of squares + epsilon).
    fn row_factors(&mut self) {
        let WgmmaTile { groups, tokens, .. } = self.variant.tile;
        let threads = groups * 128;
        let parts = threads / tokens;
        const AHEAD: u32 = 8;
        line!(
            self,
            "// The factors of the tile before have been read. Each thread sums a part of the squares of a row.
bar.sync 14, {threads};
ld.param.u64 %squares, [args+72];
ld.param.f32 %epsilon, [args+120];
add.u32 %fold, %bars, {fold_at};
and.b32 %r0, %thread, {last_token};
shr.u32 %r1, %thread, {shift};
mad.lo.u32 %r2, %token_tile, {tokens}, %r0;
setp.lt.u32 %valid, %r2, %rows;
mul.wide.u32 %l0, %r2, 4;
add.u64 %l0, %squares, %l0;
mul.wide.u32 %l1, %x_rows, 4;
cvt.u64.u32 %l2, %r1;
mad.lo.u64 %l0, %l2, %l1, %l0;
mul.lo.u64 %l1, %l1, {parts};
shr.u32 %r3, %k, 6;
mov.f32 %f0, 0f00000000;
SQUARES:
.pragma \"nounroll\";",
            fold_at = self.fold_at(),
            last_token = tokens - 1,
            shift = tokens.ilog2(),
        );
        for i in 0..AHEAD {
            line!(
                self,
                "add.u32 %r4, %r1, {};
setp.lt.and.u32 %p1, %r4, %r3, %valid;
mov.f32 %v{i}, 0f00000000;
@%p1 ld.global.nc.f32 %v{i}, [%l0];
add.u64 %l0, %l0, %l1;",
                i * parts
            );
        }
        (0..AHEAD).for_each(|i| line!(self, "add.f32 %f0, %f0, %v{i};"));
        line!(
            self,
            "add.u32 %r1, %r1, {step};
setp.lt.u32 %p0, %r1, %r3;
@%p0 bra SQUARES;
mad.lo.u32 %r4, %thread, 4, %fold;
st.shared.f32 [%r4+{at}], %f0;
bar.sync 14, {threads};
setp.ge.u32 %p0, %thread, {tokens};
@%p0 bra FACTORS;
mov.f32 %f0, 0f00000000;",
            step = AHEAD * parts,
            at = tokens * 4,
        );
        for part in 0..parts {
            line!(self, "ld.shared.f32 %f1, [%r4+{}];\nadd.f32 %f0, %f0, %f1;", (part + 1) * tokens * 4);
        }
        line!(
            self,
            "cvt.rn.f32.u32 %f1, %k;
div.full.f32 %f0, %f0, %f1;
add.f32 %f0, %f0, %epsilon;
rsqrt.approx.f32 %f0, %f0;
st.shared.f32 [%r4], %f0;
FACTORS:
bar.sync 14, {threads};"
        );
    }

    /// Stores the sums of a share, and goes on to the next tile unless it is the last one of its tile that is stored; then
    /// sets the sums to those of all shares.
    fn join(&mut self) {
        let WgmmaTile { groups, splits, .. } = self.variant.tile;
        if splits == 1 {
            return;
        }
        let (threads, bytes) = (groups * 128, self.variant.tile.share_bytes());
        let (sums, arrived) = (self.variant.tile.blocks * self.variant.tile.tokens / 2, self.arrived_at());
        debug_assert_eq!(threads * sums * 4, bytes);
        line!(
            self,
            "ld.param.u64 %partials, [args+56];
ld.param.u64 %counters, [args+64];
mul.wide.u32 %l0, %tile, {bytes};
add.u64 %l0, %partials, %l0;
mul.wide.u32 %l1, %thread, 16;
add.u64 %l0, %l0, %l1;"
        );
        for first in (0..sums).step_by(4) {
            let list = registers("sum", first..first + 4);
            line!(self, "st.global.v4.f32 [%l0+{}], {{{list}}};", first / 4 * threads * 16);
        }
        line!(
            self,
            "// All threads' sums are stored before the share is counted, and the others' are read after that.
bar.sync 15, {threads};
setp.ne.u32 %p0, %thread, 0;
@%p0 bra COUNTED;
mul.wide.u32 %l2, %whole, 4;
add.u64 %l2, %counters, %l2;
fence.acq_rel.gpu;
atom.global.add.u32 %r2, [%l2], 1;
fence.acq_rel.gpu;
mov.u32 %r3, 0;
setp.eq.u32 %p1, %r2, {last};
@%p1 st.global.b32 [%l2], %r3;
st.shared.b32 [%bars+{arrived}], %r2;
COUNTED:
bar.sync 15, {threads};
ld.shared.b32 %r2, [%bars+{arrived}];
setp.ne.u32 %p0, %r2, {last};
@%p0 bra SHARED;
sub.u32 %r1, %tile, %share;
mul.wide.u32 %l0, %r1, {bytes};
add.u64 %l0, %partials, %l0;
add.u64 %l0, %l0, %l1;",
            last = splits - 1,
        );
        for share in 0..splits {
            for first in (0..sums).step_by(4) {
                let at = share * bytes + first / 4 * threads * 16;
                if share == 0 {
                    let list = registers("sum", first..first + 4);
                    line!(self, "ld.global.cg.v4.f32 {{{list}}}, [%l0+{at}];");
                    continue;
                }
                line!(self, "ld.global.cg.v4.f32 {{%f0, %f1, %f2, %f3}}, [%l0+{at}];");
                for i in 0..4 {
                    line!(self, "add.f32 %sum{}, %sum{}, %f{i};", first + i, first + i);
                }
            }
        }
    }

    /// Sets the sums of a tile to the products with rows in e4m3.
    fn multiply_e4m3(&mut self) {
        let WgmmaTile { blocks, tokens, stages, .. } = self.variant.tile;
        let n = self.variant.tile.e4m3_tokens();
        line!(self, "setp.ne.u32 %none, %lane, %lane;");
        (0..blocks * tokens / 2).for_each(|sum| line!(self, "mov.f32 %sum{sum}, 0f00000000;"));
        line!(
            self,
            "mov.u32 %step, 0;
CONSUMER_STEP:
.pragma \"nounroll\";
add.u32 %full, %bars, %slot8;"
        );
        self.ptx.wait("%full", "%phase");
        line!(
            self,
            "add.u32 %r1, %first, %slot;
add.u32 %r2, %scales_at, %slot;
shr.u32 %r3, %slot, 4;
cvt.u64.u32 %l0, %r3;
add.u64 %l0, %l0, %descriptor;"
        );
        let each = 4 * self.variant.block_bytes();
        for (block, part) in (0..blocks).flat_map(|block| (0..tokens / n).map(move |part| (block, part))) {
            if part == 0 {
                for c in 0..4 {
                    let (w, at) = (4 * c, block * each + c * 512);
                    line!(self, "ld.shared.v4.b32 {{%w{w}, %w{}, %w{}, %w{}}}, [%r1+{at}];", w + 1, w + 2, w + 3);
                }
                line!(
                    self,
                    "ld.shared.b32 %scale, [%r2+{}];
mov.b32 {{%h0, %h1}}, %scale;
cvt.f32.f16 %scale_u, %h0;
cvt.f32.f16 %scale_v, %h1;",
                    block * each
                );
            }
            line!(self, "wgmma.fence.sync.aligned;");
            let sums = registers("raw", 0..n / 2);
            for c in 0..4u32 {
                let w = 4 * c;
                line!(
                    self,
                    "add.u64 %l1, %l0, {};
wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{{}}}, {{%w{w}, %w{}, %w{}, %w{}}}, %l1, {}, 1, 1;",
                    part * n * 8 + c * 2,
                    sums,
                    w + 1,
                    w + 2,
                    w + 3,
                    if c == 0 { "%none" } else { "%all" }
                );
            }
            line!(self, "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;");
            if (block + 1, (part + 1) * n) == (blocks, tokens) {
                line!(self, "@%release mbarrier.arrive.shared::cta.b64 _, [%full+{}];", stages * 8);
            }
            for i in 0..n / 2 {
                let (sum, row) = (block * tokens / 2 + part * n / 2 + i, if i % 4 < 2 { "u" } else { "v" });
                line!(self, "fma.rn.f32 %sum{sum}, %raw{i}, %scale_{row}, %sum{sum};");
            }
        }
        self.advance();
        line!(
            self,
            "add.u32 %step, %step, 1;
setp.lt.u32 %p0, %step, %steps;
@%p0 bra CONSUMER_STEP;"
        );
    }

    /// Multiplies 64 columns, the `part`-th of a stage, with the weights in register set `set`.
    fn multiply(&mut self, part: u32, set: u32) {
        let tile = self.variant.tile;
        if part == 0 {
            line!(self, "add.u32 %full, %bars, %slot8;");
            self.ptx.wait("%full", "%phase");
        }
        let weights = |block: u32, sixteen: u32| ((set * tile.blocks + block) * 4 + sixteen) * 4;
        match self.variant.format() {
            Some(codes) => self.dequantise(codes, part, &weights),
            None => {
                line!(self, "add.u32 %r1, %first, %slot;");
                for (block, sixteen) in (0..tile.blocks).flat_map(|block| (0..4).map(move |sixteen| (block, sixteen))) {
                    let w = weights(block, sixteen);
                    // Words 1 and 2 change places: the instruction has both rows' first columns before their last ones.
                    line!(
                        self,
                        "ld.shared.v4.b32 {{%w{}, %w{}, %w{}, %w{}}}, [%r1+{}];",
                        w,
                        w + 2,
                        w + 1,
                        w + 3,
                        block * 8192 + sixteen * 512
                    );
                }
            }
        }
        line!(
            self,
            "shr.u32 %r2, %slot, 4;
cvt.u64.u32 %l0, %r2;
add.u64 %l0, %l0, %descriptor;"
        );
        if part > 0 {
            line!(self, "add.u64 %l0, %l0, {};", part * tile.tokens * 8);
        } else {
            line!(self, "setp.ne.u32 %accumulate, %step, {};", self.steps().0);
        }
        line!(self, "wgmma.fence.sync.aligned;");
        for sixteen in 0..4u32 {
            if sixteen > 0 {
                line!(self, "add.u64 %l{}, %l0, {};", sixteen, sixteen * 2);
            }
            for block in 0..tile.blocks {
                let w = weights(block, sixteen);
                let each = tile.tokens / 2;
                let sums = registers("sum", block * each..(block + 1) * each);
                let kind = if self.variant.is_half() { "f16" } else { "bf16" };
                line!(
                    self,
                    "wgmma.mma_async.sync.aligned.m64n{}k16.f32.{kind}.{kind} {{{}}}, {{%w{}, %w{}, %w{}, %w{}}}, %l{sixteen}, {}, 1, 1, 0;",
                    tile.tokens,
                    sums,
                    w,
                    w + 1,
                    w + 2,
                    w + 3,
                    if sixteen == 0 && part == 0 { "%accumulate" } else { "%all" }
                );
            }
        }
        line!(self, "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;");
        // The stage before is left once the last products with it are complete.
        if part == 0 {
            line!(
                self,
                "and.pred %p1, %release, %accumulate;
@%p1 mbarrier.arrive.shared::cta.b64 _, [%previous];
add.u32 %previous, %full, {};",
                tile.stages * 8
            );
        }
    }

    /// Loads the codes and scales of 64 columns, the `part`-th of a stage, and sets the registers `weights` to the weights
    /// in bfloat16, without the rows' factors (`code_fragments.glsl`).
    fn dequantise(&mut self, codes: Codes, part: u32, weights: &dyn Fn(u32, u32) -> u32) {
        let (tile, bits, unit) = (self.variant.tile, codes.bits, unit_cols(codes));
        let each = 4 * self.variant.block_bytes();
        line!(self, "add.u32 %r1, %first, %slot;\nadd.u32 %r2, %scales_at, %slot;");
        // A lane's words of these 64 columns: eight of a plane of 8 bits, four of 4 bits, two of 2 bits, one of 1 bit.
        let two_at = if bits & 4 != 0 { unit * 8 } else { 0 };
        let one_at = two_at + if bits & 2 != 0 { unit * 4 } else { 0 };
        for block in 0..tile.blocks {
            let (q, at) = (block * 8, block * each);
            match bits {
                8 => {
                    for c in 0..2 {
                        let (q, at) = (q + 4 * c, at + (part * 2 + c) * 512);
                        line!(self, "ld.shared.v4.b32 {{%q{q}, %q{}, %q{}, %q{}}}, [%r1+{at}];", q + 1, q + 2, q + 3);
                    }
                }
                _ => {
                    if bits & 4 != 0 {
                        let at = at + part * 512;
                        line!(self, "ld.shared.v4.b32 {{%q{q}, %q{}, %q{}, %q{}}}, [%r1+{at}];", q + 1, q + 2, q + 3);
                    }
                    if bits & 2 != 0 {
                        let at = at + two_at + part / 2 * 512 + part % 2 * 8;
                        line!(self, "ld.shared.v2.b32 {{%q{}, %q{}}}, [%r1+{at}];", q + 4, q + 5);
                    }
                    if bits & 1 != 0 {
                        line!(self, "ld.shared.b32 %q{}, [%r1+{}];", q + 6, at + one_at + part * 4);
                    }
                }
            }
        }
        let groups = unit / codes.group;
        let stored = codes.minimum == Minimum::Stored;
        for block in 0..tile.blocks {
            for c in 0..2 {
                let column = part * 64 + c * 32;
                if c == 0 || codes.group < 64 {
                    let at = block * each + column / codes.group * 4;
                    self.scales(codes, at, stored.then_some(at + groups * 32));
                }
                for half in 0..2 {
                    self.pairs(codes, block * 8, part * 2 + c, c, half);
                    let w = weights(block, c * 2 + half);
                    // The instruction has both rows' first columns before their last ones.
                    for (pair, register) in [w, w + 2, w + 1, w + 3].into_iter().enumerate() {
                        // %s0 and %s1 are the scales of the rows u and v, %s2 and %s3 their minimums.
                        let row = pair / 2;
                        match has_minimum(codes) {
                            true => line!(self, "fma.rn.f16x2 %d{pair}, %d{pair}, %s{row}, %s{};", 2 + row),
                            false => line!(self, "mul.rn.f16x2 %d{pair}, %d{pair}, %s{row};"),
                        }
                        line!(
                            self,
                            "mov.b32 {{%h0, %h1}}, %d{pair};
cvt.f32.f16 %f0, %h0;
cvt.f32.f16 %f1, %h1;
cvt.rn.bf16x2.f32 %w{register}, %f1, %f0;"
                        );
                    }
                }
            }
        }
    }

    /// Loads a group's scales, and sets %s0 and %s1 to pairs of those of the rows u and v, as their codes are left by
    /// [`Text::pairs`], and %s2 and %s3 to the negative minimums.
    fn scales(&mut self, codes: Codes, at: u32, minimum_at: Option<u32>) {
        let pairs = |of: u32| {
            format!("prmt.b32 %s{of}, %scale, %scale, 0x1010;\nprmt.b32 %s{}, %scale, %scale, 0x3232;", of + 1)
        };
        line!(self, "ld.shared.b32 %scale, [%r2+{at}];\n{}", pairs(0));
        if high_v(codes) {
            line!(self, "mov.b32 %s2, {:#x};\nmul.rn.f16x2 %s1, %s1, %s2;", pair_of(0.0625));
        }
        match (codes.minimum, minimum_at) {
            (_, Some(at)) => {
                line!(self, "ld.shared.b32 %scale, [%r2+{at}];\nxor.b32 %scale, %scale, 0x80008000;\n{}", pairs(2));
            }
            (Minimum::Zero { halves }, None) if halves > 0 => {
                // A code's bits count in the smallest f16, which cannot be halved.
                if halves % 2 == 1 {
                    line!(self, "mov.b32 %s2, {:#x};\nmul.rn.f16x2 %scale, %scale, %s2;", pair_of(0.5));
                }
                let zero = u32::from(if halves % 2 == 1 { halves } else { halves / 2 });
                line!(
                    self,
                    "mov.b32 %s2, {:#x};
mul.rn.f16x2 %scale, %scale, %s2;
xor.b32 %scale, %scale, 0x80008000;
{}",
                    zero | zero << 16,
                    pairs(2)
                );
            }
            _ => {}
        }
    }

    /// Sets %d0 to %d3 to the f16 values of four pairs of codes: (u0, u1), (u2, u3), (v0, v1) and (v2, v3) of half `half` of
    /// the 32 columns number `c` of the unit, the `second`-th of 64. The bits are in %q from `q` on.
    fn pairs(&mut self, codes: Codes, q: u32, c: u32, second: u32, half: u32) {
        let bits = codes.bits;
        // A sign and a magnitude: the place of a code's highest bit in 16 is that of an f16, and the others move to the right.
        let signed = match (codes.number, bits) {
            (Number::E4m3, 8) => Some((0x7f00_7f00, 1)),
            (Number::E2m1, 4) => Some((0x7000_7000, 3)),
            _ => None,
        };
        if let Some((magnitude, right)) = signed {
            for pair in 0..4u32 {
                let (word, by) = match bits {
                    8 => (q + second * 4 + half * 2 + pair / 2, 8 - 8 * (pair % 2)),
                    _ => (q + second * 2 + half, [12, 4, 8, 0][pair as usize]),
                };
                line!(
                    self,
                    "shl.b32 %r3, %q{word}, {by};
and.b32 %d{pair}, %r3, {magnitude:#x};
shr.u32 %d{pair}, %d{pair}, {right};
and.b32 %r3, %r3, 0x80008000;
or.b32 %d{pair}, %d{pair}, %r3;"
                );
            }
            return;
        }
        // Shifts a word to the right by `by` bits, or to the left by as many if that is negative.
        let shifted = |to: &str, from: u32, by: i32| match by {
            0 => format!("mov.b32 {to}, %q{from};"),
            1.. => format!("shr.u32 {to}, %q{from}, {by};"),
            _ => format!("shl.b32 {to}, %q{from}, {};", -by),
        };
        let mut begun = false;
        // Takes the bits of a plane from a word, at another place for each pair.
        let mut plane = |program: &mut Text, words: [u32; 4], by: [i32; 4], masks: [u32; 4]| {
            for pair in 0..4 {
                let (word, mask) = (words[pair], masks[pair]);
                match begun {
                    false => {
                        line!(
                            program,
                            "{}\nand.b32 %d{pair}, %d{pair}, {mask:#x};",
                            shifted(&format!("%d{pair}"), word, by[pair])
                        );
                    }
                    true => line!(
                        program,
                        "{}\nand.b32 %r3, %r3, {mask:#x};\nor.b32 %d{pair}, %d{pair}, %r3;",
                        shifted("%r3", word, by[pair])
                    ),
                }
            }
            begun = true;
        };
        if bits == 8 {
            let word = q + second * 4 + half * 2;
            plane(self, [word, word, word + 1, word + 1], [0, 8, 0, 8], [0x00ff_00ff; 4]);
        }
        if bits & 4 != 0 {
            let word = [q + second * 2 + half; 4];
            match high_v(codes) {
                true => plane(self, word, [0, 8, 0, 8], [0x000f_000f, 0x000f_000f, 0x00f0_00f0, 0x00f0_00f0]),
                false => plane(self, word, [0, 8, 4, 12], [0x000f_000f; 4]),
            }
        }
        let lower = |plane: u32| (bits & !(2 * plane - 1) & 7) as i32;
        if bits & 2 != 0 {
            let by = [0, 8, 2, 10].map(|by| by + 4 * half as i32 - lower(2));
            plane(self, [q + 4 + second; 4], by, [0x0003_0003 << lower(2); 4]);
        }
        if bits & 1 != 0 {
            let by = [0, 8, 1, 9].map(|by| by + 4 * (c % 2) as i32 + 2 * half as i32 - lower(1));
            plane(self, [q + 6; 4], by, [0x0001_0001 << lower(1); 4]);
        }
        match codes.number {
            Number::Affine => {}
            Number::E5m2 => (0..4).for_each(|pair| line!(self, "shl.b32 %d{pair}, %d{pair}, 8;")),
            Number::E4m3 | Number::E2m1 => panic!("{codes:?} are not of a whole plane"),
        }
    }

    /// Stores the sums of a tile.
    fn finish(&mut self) {
        let WgmmaVariant { tile, bias, packed, experts, e4m3, .. } = self.variant;
        line!(
            self,
            "// %t: the lane's row of x among 8; %left: the rows in use from there on.
mad.lo.u32 %r1, %token_tile, {}, %t;
sub.u32 %left, %rows, %r1;",
            tile.tokens
        );
        if self.variant.has_scales() {
            line!(
                self,
                "// The scale of the lane's first row of x, behind the rows.
mul.wide.u32 %l0, %x_rows, %k;
shl.b64 %l0, %l0, {};
mul.wide.u32 %l1, %r1, 4;
add.u64 %l0, %l0, %l1;
add.u64 %x_scales, %x, %l0;",
                u32::from(!e4m3)
            );
        }
        match self.variant.fold {
            0 => {}
            1 => line!(self, "mad.lo.u32 %squared, %t, 4, %bars;\nadd.u32 %squared, %squared, {};", self.fold_at()),
            _ => line!(self, "setp.eq.u32 %lead, %a, 0;\nadd.u32 %fold, %bars, {};", self.fold_at()),
        }
        for block in 0..tile.blocks {
            let label = self.ptx.label();
            line!(
                self,
                "mad.lo.u32 %row, %weight_tile, {rows}, {at};
mad.lo.u32 %row, %group, {group_rows}, %row;
mad.lo.u32 %row, %quarter, 16, %row;
setp.ge.u32 %p0, %row, %n;
@%p0 bra STORED{label};",
                rows = tile.weight_rows(),
                at = block * 64,
                group_rows = tile.blocks * 64,
            );
            // %r1: the row of W.
            match experts {
                true => line!(self, "mad.lo.u32 %r1, %expert, %n, %row;"),
                false => line!(self, "mov.u32 %r1, %row;"),
            }
            if self.variant.format().is_some() {
                line!(
                    self,
                    "shr.u32 %r2, %r1, 4;
cvt.u64.u32 %l0, %r2;
mad.lo.u64 %l0, %l0, %block_bytes, %weight;
mul.wide.u32 %l1, %a, 16;
add.u64 %l0, %l0, %l1;
ld.global.nc.v4.f32 {{%c0, %c1, %c2, %c3}}, [%l0];"
                );
            }
            line!(self, "mad.lo.u32 %r1, %a, 4, %r1;\nmad.lo.u32 %row, %a, 4, %row;");
            if bias {
                line!(
                    self,
                    "mul.wide.u32 %l0, %r1, 4;
add.u64 %l0, %bias, %l0;
ld.global.nc.v4.f32 {{%b0, %b1, %b2, %b3}}, [%l0];"
                );
            }
            match packed {
                true => self.store_packed(block),
                false => self.store_rows(block),
            }
            line!(self, "STORED{label}:");
        }
    }

    /// Sets %v0 to %v3 to the products of rows 4a .. 4a + 3 of W with the lane's row of the `eight`-th 8 rows of x.
    fn exchange(&mut self, block: u32, eight: u32) {
        let s = block * self.variant.tile.tokens / 2 + eight * 4;
        line!(
            self,
            "selp.f32 %f0, %sum{}, %sum{}, %odd;
selp.f32 %f1, %sum{}, %sum{}, %odd;
selp.f32 %f2, %sum{}, %sum{}, %odd;
selp.f32 %f3, %sum{}, %sum{}, %odd;
shfl.sync.bfly.b32 %f0, %f0, 4, 31, 0xffffffff;
shfl.sync.bfly.b32 %f1, %f1, 4, 31, 0xffffffff;
selp.f32 %v0, %f0, %f2, %odd;
selp.f32 %v1, %f2, %f0, %odd;
selp.f32 %v2, %f1, %f3, %odd;
selp.f32 %v3, %f3, %f1, %odd;",
            s,
            s + 1,
            s + 2,
            s + 3,
            s + 1,
            s,
            s + 3,
            s + 2
        );
        if self.variant.format().is_some() {
            (0..4).for_each(|i| line!(self, "mul.f32 %v{i}, %v{i}, %c{i};"));
        }
        if self.variant.has_scales() {
            // The row of x may be beyond the last one.
            line!(
                self,
                "setp.gt.s32 %p2, %left, {};
mov.f32 %f4, 0f00000000;
@%p2 ld.global.nc.f32 %f4, [%x_scales+{}];",
                eight * 8,
                eight * 32
            );
            // A weight's scale counts in 2^-8 (`memory::pack::codes`).
            if self.variant.e4m3 {
                line!(self, "mul.f32 %f4, %f4, {};", float(2f32.powi(-8)));
            }
            (0..4).for_each(|i| line!(self, "mul.f32 %v{i}, %v{i}, %f4;"));
        }
        if self.variant.fold == 1 {
            line!(self, "ld.shared.f32 %f4, [%squared+{}];", eight * 32);
            (0..4).for_each(|i| line!(self, "mul.f32 %v{i}, %v{i}, %f4;"));
        }
        if self.variant.bias {
            (0..4).for_each(|i| line!(self, "add.f32 %v{i}, %v{i}, %b{i};"));
        }
        let kind = self.variant.epilogue;
        match Epilogue::of_code(kind) {
            Epilogue::Store | Epilogue::Residual => {}
            Epilogue::Gated(_) => {
                self.ptx.glu(kind, ["%v0", "%v1"], "%v0", ["%f4", "%f5"]);
                self.ptx.glu(kind, ["%v2", "%v3"], "%v1", ["%f4", "%f5"]);
            }
            Epilogue::SquaredRelu => (0..4).for_each(|i| self.ptx.squared_relu(&format!("%v{i}"))),
        }
    }

    /// Stores rows of floats: four of a row of W each, or two gated ones.
    fn store_rows(&mut self, block: u32) {
        let WgmmaVariant { tile, epilogue, experts, e4m3, .. } = self.variant;
        if experts {
            self.store_choices(block);
            return;
        }
        line!(
            self,
            "mad.lo.u32 %r1, %token_tile, {}, %t;
mul.wide.u32 %l0, %r1, %y_stride;
cvt.u64.u32 %l1, %row;",
            tile.tokens
        );
        if Epilogue::of_code(epilogue).halves() {
            line!(self, "shr.u64 %l1, %l1, 1;");
        }
        line!(
            self,
            "add.u64 %l0, %l0, %l1;
shl.b64 %l0, %l0, 2;
add.u64 %at, %y, %l0;
mul.wide.u32 %pitch, %y_stride, 32;"
        );
        let folds = self.variant.fold == 2;
        if folds {
            self.begin_norm(block);
        }
        // A residual's loads are issued for some rows before the first of them is needed; two sets of sums, or sums in
        // flight, leave fewer registers for them.
        let ahead = if e4m3 { 2 } else { 4 / tile.blocks.min(2) };
        for first in (0..tile.tokens / 8).step_by(ahead as usize) {
            let eights = first..(first + ahead).min(tile.tokens / 8);
            if epilogue == 1 {
                line!(self, "mov.u64 %l1, %at;");
                for eight in eights.clone() {
                    let r = (eight - first) * 4;
                    line!(self, "setp.gt.s32 %p1, %left, {};", eight * 8);
                    line!(
                        self,
                        "@%p1 ld.global.v4.b32 {{%r{}, %r{}, %r{}, %r{}}}, [%l1];\nadd.u64 %l1, %l1, %pitch;",
                        8 + r,
                        9 + r,
                        10 + r,
                        11 + r
                    );
                }
            }
            for eight in eights {
                self.exchange(block, eight);
                line!(self, "setp.gt.s32 %p1, %left, {};", eight * 8);
                match Epilogue::of_code(epilogue) {
                    Epilogue::Store | Epilogue::SquaredRelu => {
                        line!(self, "@%p1 st.global.v4.f32 [%at], {{%v0, %v1, %v2, %v3}};");
                    }
                    Epilogue::Residual => {
                        for i in 0..4 {
                            line!(self, "mov.b32 %f{i}, %r{};", 8 + (eight - first) * 4 + i);
                            line!(self, "add.f32 %v{i}, %v{i}, %f{i};");
                        }
                        line!(self, "@%p1 st.global.v4.f32 [%at], {{%v0, %v1, %v2, %v3}};");
                        if folds {
                            self.norm_four(eight);
                        }
                    }
                    Epilogue::Gated(_) => line!(self, "@%p1 st.global.v2.f32 [%at], {{%v0, %v1}};"),
                }
                line!(self, "add.u64 %at, %at, %pitch;");
            }
        }
        if folds {
            self.end_norm(block);
        }
    }

    /// Returns the instructions that set a register to the number of a warpgroup's block among all blocks of 64 rows of W.
    fn block_number(&self, to: &str, block: u32) -> String {
        let WgmmaTile { groups, blocks, .. } = self.variant.tile;
        format!(
            "mad.lo.u32 {to}, %weight_tile, {}, {block};\nmad.lo.u32 {to}, %group, {blocks}, {to};",
            groups * blocks
        )
    }

    /// Loads the norm's weights of the lane's four columns of y, and sets the places of its packed outputs and of its sums.
    fn begin_norm(&mut self, block: u32) {
        let tokens = self.variant.tile.tokens;
        line!(
            self,
            "ld.param.u64 %norm, [args+80];
ld.param.u64 %next, [args+88];
mul.wide.u32 %l2, %row, 4;
add.u64 %l2, %norm, %l2;
ld.global.nc.v4.f32 {{%g0, %g1, %g2, %g3}}, [%l2];
{block_number}
mad.lo.u32 %r2, %token_tile, {tokens}, %t;
mul.wide.u32 %l2, %r1, %y_rows;
cvt.u64.u32 %l3, %r2;
add.u64 %l2, %l2, %l3;
shl.b64 %l2, %l2, 7;
add.u64 %l2, %next, %l2;
// The lane's two words of 16 bytes, and its place in them.
shr.u32 %r2, %quarter, 1;
shl.b32 %r2, %r2, 2;
and.b32 %r3, %a, 1;
shl.b32 %r3, %r3, 1;
add.u32 %r2, %r2, %r3;
and.b32 %r3, %quarter, 1;
shl.b32 %r3, %r3, 1;
shr.u32 %r4, %a, 1;
add.u32 %r3, %r3, %r4;
mul.wide.u32 %l3, %r3, 4;
add.u64 %l2, %l2, %l3;
xor.b32 %r4, %r2, %t;
mul.wide.u32 %l3, %r4, 16;
add.u64 %place0, %l2, %l3;
add.u32 %r2, %r2, 1;
xor.b32 %r4, %r2, %t;
mul.wide.u32 %l3, %r4, 16;
add.u64 %place1, %l2, %l3;
mad.lo.u32 %r2, %group, 4, %quarter;
mad.lo.u32 %r2, %r2, {tokens}, %t;
mad.lo.u32 %squared, %r2, 4, %fold;
// The sums of the block before have been read.
add.u32 %r2, %group, 1;
bar.sync %r2, 128;",
            block_number = self.block_number("%r1", block),
        );
    }

    /// Stores %v0 to %v3 times the norm's weights, and the sum of their squares over 16 columns.
    fn norm_four(&mut self, eight: u32) {
        line!(self, "mul.f32 %f0, %v0, %v0;");
        (1..4).for_each(|i| line!(self, "fma.rn.f32 %f0, %v{i}, %v{i}, %f0;"));
        for lanes in [8, 16] {
            line!(self, "shfl.sync.bfly.b32 %f1, %f0, {lanes}, 31, 0xffffffff;\nadd.f32 %f0, %f0, %f1;");
        }
        line!(self, "@%lead st.shared.f32 [%squared+{}], %f0;", eight * 32);
        (0..4).for_each(|i| line!(self, "mul.f32 %v{i}, %v{i}, %g{i};"));
        for pair in 0..2 {
            line!(
                self,
                "cvt.rn.bf16x2.f32 %r1, %v{}, %v{};
@%p1 st.global.b32 [%place{pair}+{}], %r1;",
                2 * pair + 1,
                2 * pair,
                eight * 1024
            );
        }
    }

    /// Stores the sums of squares over the 64 columns of a warpgroup.
    fn end_norm(&mut self, block: u32) {
        let tokens = self.variant.tile.tokens;
        let label = self.ptx.label();
        line!(
            self,
            "add.u32 %r2, %group, 1;
bar.sync %r2, 128;
and.b32 %r1, %thread, 127;
setp.ge.u32 %p0, %r1, {tokens};
@%p0 bra SQUARED{label};
mul.lo.u32 %r2, %group, {group_tokens};
add.u32 %r2, %r2, %r1;
mad.lo.u32 %r2, %r2, 4, %fold;
ld.shared.f32 %f0, [%r2];",
            group_tokens = 4 * tokens,
        );
        for quarter in 1..4 {
            line!(self, "ld.shared.f32 %f1, [%r2+{}];\nadd.f32 %f0, %f0, %f1;", quarter * tokens * 4);
        }
        line!(
            self,
            "ld.param.u64 %squares, [args+72];
{block_number}
mul.wide.u32 %l2, %r2, %y_rows;
mad.lo.u32 %r2, %token_tile, {tokens}, %r1;
setp.lt.u32 %p1, %r2, %rows;
cvt.u64.u32 %l3, %r2;
add.u64 %l2, %l2, %l3;
shl.b64 %l2, %l2, 2;
add.u64 %l2, %squares, %l2;
@%p1 st.global.f32 [%l2], %f0;
SQUARED{label}:",
            block_number = self.block_number("%r2", block),
        );
    }

    /// Stores rows of floats, each at the place of its choice.
    fn store_choices(&mut self, block: u32) {
        let WgmmaVariant { tile, epilogue, .. } = self.variant;
        let halves = Epilogue::of_code(epilogue).halves();
        let shift = if halves { 1 } else { 2 };
        line!(
            self,
            "mad.lo.u32 %r1, %token_tile, {}, %t;
mul.wide.u32 %l0, %r1, 4;
add.u64 %at, %slots, %l0;
mul.wide.u32 %l1, %row, {row_bytes};
add.u64 %pitch, %y, %l1;",
            tile.tokens,
            row_bytes = 1 << shift,
        );
        let all = tile.tokens / 8;
        for first in (0..all).step_by(4) {
            let eights = first..(first + 4).min(all);
            for eight in eights.clone() {
                line!(self, "ld.global.u32 %r{}, [%at+{}];", 8 + eight - first, eight * 32);
            }
            for eight in eights {
                self.exchange(block, eight);
                line!(
                    self,
                    "setp.ne.u32 %p1, %r{slot}, {NOBODY:#x};
mul.wide.u32 %l0, %r{slot}, %y_stride;
shl.b64 %l0, %l0, 2;
add.u64 %l0, %pitch, %l0;",
                    slot = 8 + eight - first
                );
                match halves {
                    false => line!(self, "@%p1 st.global.v4.f32 [%l0], {{%v0, %v1, %v2, %v3}};"),
                    true => line!(self, "@%p1 st.global.v2.f32 [%l0], {{%v0, %v1}};"),
                }
            }
        }
    }

    /// Stores packed outputs: the four warps of a warpgroup put together the 32 outputs of each token in shared memory.
    fn store_packed(&mut self, block: u32) {
        let WgmmaVariant { tile, .. } = self.variant;
        let staged = STAGED_TOKENS.min(tile.tokens);
        line!(
            self,
            "add.u32 %r1, %group, 1;
mad.lo.u32 %r2, %t, 64, %staged;
mad.lo.u32 %r2, %a, 16, %r2;
mad.lo.u32 %r2, %quarter, 4, %r2;
// The block's 32 outputs: %r4 is their half of 64, %r5 these 64; %r6 is the thread's token of 32, %r7 its 16 bytes.
{block_number}
and.b32 %r4, %r3, 1;
shr.u32 %r5, %r3, 1;
and.b32 %r3, %thread, 127;
shr.u32 %r6, %r3, 2;
and.b32 %r7, %r3, 3;
mad.lo.u32 %r8, %r6, 64, %staged;
mad.lo.u32 %r8, %r7, 16, %r8;
mad.lo.u32 %r7, %r4, 4, %r7;
and.b32 %r3, %r6, 7;
xor.b32 %r7, %r7, %r3;
mad.lo.u32 %r6, %token_tile, {tokens}, %r6;
mul.wide.u32 %l0, %r5, %y_rows;
cvt.u64.u32 %l1, %r6;
add.u64 %l0, %l0, %l1;
shl.b64 %l0, %l0, 7;
mul.wide.u32 %l1, %r7, 16;
add.u64 %l0, %l0, %l1;
add.u64 %at, %y, %l0;",
            block_number = self.block_number("%r3", block),
            tokens = tile.tokens,
        );
        for first in (0..tile.tokens).step_by(staged as usize) {
            line!(self, "bar.sync %r1, 128;");
            for eight in 0..staged / 8 {
                self.exchange(block, first / 8 + eight);
                line!(self, "cvt.rn.bf16x2.f32 %r9, %v1, %v0;\nst.shared.b32 [%r2+{}], %r9;", eight * 8 * 64);
            }
            line!(self, "bar.sync %r1, 128;");
            for part in 0..staged / 32 {
                line!(
                    self,
                    "add.u32 %r9, %r6, {};
setp.lt.u32 %p1, %r9, %rows;
ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r8+{}];
@%p1 st.global.v4.b32 [%at+{}], {{%r10, %r11, %r12, %r13}};",
                    first + part * 32,
                    part * 32 * 64,
                    (first + part * 32) * 128
                );
            }
        }
    }
}

/// Whether row v's codes are left 4 bits higher, as numbers 16 times as large: two shifts less.
fn high_v(codes: Codes) -> bool {
    codes.bits == 4 && codes.number == Number::Affine
}

/// Whether weights have minimums other than 0.
fn has_minimum(codes: Codes) -> bool {
    codes.minimum != Minimum::Zero { halves: 0 }
}

/// Returns a pair of the same f16.
fn pair_of(value: f32) -> u32 {
    u32::from(f16::from_f32(value).to_bits()) * 0x0001_0001
}

/// Returns the instructions that set %scales_at to the place of a lane's scales in a stage, for %r1, that of its block of
/// 16 rows.
fn scales_at(codes: Codes) -> String {
    let unit = unit_cols(codes);
    let mut text = format!(
        "shr.u32 %r2, %lane, 2;
mad.lo.u32 %scales_at, %r2, {}, %r1;
add.u32 %scales_at, %scales_at, {};
",
        unit / codes.group * 4,
        unit * codes.bits * 2
    );
    // Groups of 16: the lanes of columns 16 .. 32 have another.
    if codes.group == 16 {
        text += "bfe.u32 %r2, %lane, 1, 1;\nmad.lo.u32 %scales_at, %r2, 4, %scales_at;\n";
    }
    text
}
