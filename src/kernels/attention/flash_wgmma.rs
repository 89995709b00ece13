//! `flash_wgmma`, the prefill attention of `flash` over a cache of f16 on the matrix units of NVIDIA's compute capability
//! 9.0, as a program in PTX: o[r, h] = softmax(q[r, h] · Kᵀ · scale) · V over the tokens of row r's prompt up to the position
//! of row r. Arguments and constants are those of `flash` (`shaders/attention/flash.comp`); `partials`, `counters` and `parts`
//! are not used, each tile has one workgroup, and scores are not capped. A further constant says whether o is packed for the
//! next product: `[columns / 64][output_stride][64]` bfloat16 in the order of `tiled::swizzled_index`.
//!
//! A workgroup has two warpgroups that multiply, each for 64 (row, query head) pairs of one prompt and one KV head, and one
//! that copies. Pair i of a prompt is row i / G and head i % G of the GQA group. The workgroup takes the tokens in blocks of
//! 128 (64 with heads of 256 dimensions), from the first that its first row sees to the last row's position.
//!
//! The copying threads fill two places for keys and two for values in shared memory, 16 bytes at a time, as soon as both
//! multiplying warpgroups have left a place (`empty`), and say when one is full (`full`):
//!
//! ```text
//! keys     [D / 8][tokens][8] f16: as they lie in a page, so that 8 tokens × 8 dimensions are 128 consecutive bytes. Operand B
//!          of the scores without a swizzle
//! values   [D / 64][tokens][64] f16, of which 16-byte word w of a token lies at place w ^ (token % 8): operand B of the
//!          output, transposed, with the 128-byte swizzle. Tokens that no row of the tile sees are zero
//! ```
//!
//! Queries, multiplied by the scale and log2(e) and rounded to f16, are operand A of the scores: in registers, or in shared
//! memory in the order of the keys for heads of more than 128 dimensions. A lane's scores have the layout of operand A of the
//! output, so the softmax weights never leave their lane. The scores of a block are multiplied before the output of the block
//! before it, which the matrix units compute while the lane takes exponentials. The maxima and sums of the online softmax stay
//! in registers.
//!
//! Lane 4g + t has the sums of pairs g and g + 8 of its warp's 16: columns 8i + 2t and + 1 of each 8.
//!
//! Lane t's columns of 32 are a 16-byte word of packed rows.
//!
//! Traffic: 4·D bytes per token and tile of 128 pairs, mostly from the L2 cache; q once, o once.
//! All waits are bounded; one that is given up ends the program with a trap, which loses the device.

use crate::config::KvFormat;
use crate::kernels::attention::{Heads, PAGE_TOKENS};
use crate::kernels::ptx::{PtxProgram, PtxText, float, line, registers};
use crate::kernels::shaders::{FLASH_WGMMA, FlashConstants};

/// The number of (row, query head) pairs of a tile.
pub const PAIRS: u32 = GROUPS * 64;
/// The number of threads of a workgroup.
pub const THREADS: u32 = (GROUPS + 1) * 128;

/// The number of warpgroups that multiply.
const GROUPS: u32 = 2;
/// The registers of a thread that copies, and of one that multiplies.
const REGISTERS: (u32, u32) = (40, 232);
/// The alignment of places in shared memory, which the swizzle needs.
const ALIGNMENT: u32 = 1024;
/// The score of a token that a row does not see.
const LOWEST: f32 = -3.0e38;
const ENTRY: &str = "flash_wgmma";

/// Whether the kernel computes the attention of these heads.
pub fn serves(heads: Heads) -> bool {
    // Masks are those of causal attention.
    let scores = heads.scores.soft_cap.is_none() && !heads.scores.both;
    heads.kv_format == KvFormat::F16 && [64, 128, 256].contains(&heads.dim) && scores
}

/// The number of tokens of a block.
const fn block_tokens(dim: u32) -> u32 {
    if dim > 128 { 64 } else { 128 }
}

/// Whether queries are in shared memory.
const fn queries_in_shared(dim: u32) -> bool {
    dim > 128
}

/// The size of a place for the keys or the values of a block in bytes.
const fn place_bytes(dim: u32) -> u32 {
    block_tokens(dim) * dim * 2
}

/// The size of a warpgroup's queries in shared memory in bytes.
const fn queries_bytes(dim: u32) -> u32 {
    if queries_in_shared(dim) { 64 * dim * 2 } else { 0 }
}

/// Returns the number of threads of a workgroup and its shared memory in bytes.
pub fn workgroup(constants: &[u32]) -> (u32, u32) {
    let FlashConstants { d, .. } = FlashConstants::from_values(constants);
    (THREADS, ALIGNMENT + 4 * place_bytes(d) + GROUPS * queries_bytes(d) + 8 * 8)
}

/// Whether a call with these constants packs its output.
pub fn packs(constants: &[u32]) -> bool {
    constants[12] == 1
}

/// Returns the program for the constants of a call.
pub fn program(constants: &[u32]) -> PtxProgram {
    let (threads, shared_bytes) = workgroup(constants);
    let of = FlashConstants::from_values(constants);
    let mut program = Program { ptx: PtxText::default(), of, packed: packs(constants) };
    program.write();
    PtxProgram { text: program.ptx.out, entry: ENTRY, threads, shared_bytes }
}

struct Program {
    ptx: PtxText,
    of: FlashConstants,
    packed: bool,
}

impl Program {
    fn write(&mut self) {
        let FlashConstants { d, g, kv_heads, .. } = self.of;
        let n = block_tokens(d);
        self.ptx.head(ENTRY, FLASH_WGMMA.push_bytes, THREADS);
        line!(
            self,
            ".reg .pred %p<8>, %all, %none, %started, %release;
.reg .b32 %r<32>;
.reg .b64 %l<16>;
.reg .f32 %f<16>;
.reg .b32 %thread, %lane, %warp, %base, %bars, %polls, %tile_number, %kvh, %prompts, %index, %row, %in_use, %start, %table;
.reg .b32 %first, %last, %open, %low, %block, %end, %slot, %phase, %at, %group, %quarter, %g, %t, %tokens_at, %previous;
.reg .b32 %pair_a, %pair_b, %row_a, %row_b, %head_a, %head_b, %position_a, %position_b, %delta_a, %delta_b;
.reg .b32 %stride, %page<{pages}>, %keys_at, %values_at, %values_at_odd, %token, %previous_place;
.reg .b64 %qkv, %chunk, %pages, %k, %v, %o, %sinks, %from_a, %from_b, %to_a, %to_b, %further_a, %further_b, %keys, %values, %queries;
.reg .f32 %sum<{sums}>, %s<{scores}>, %max_a, %max_b, %top_a, %top_b, %sum_a, %sum_b, %factor_a, %factor_b;
.reg .b32 %q<{queries}>, %w<{weights}>;
ld.param.u64 %qkv, [args];
ld.param.u64 %chunk, [args+8];
ld.param.u64 %pages, [args+16];
ld.param.u64 %k, [args+24];
ld.param.u64 %v, [args+32];
ld.param.u64 %o, [args+40];
ld.param.u64 %sinks, [args+64];
ld.param.u32 %stride, [args+72];
mov.u32 %thread, %tid.x;
and.b32 %lane, %thread, 31;
shr.u32 %r0, %thread, 5;
shfl.sync.idx.b32 %warp, %r0, 0, 31, 0xffffffff;
mov.u32 %base, shared;
add.u32 %base, %base, 1023;
and.b32 %base, %base, 0xfffffc00;
add.u32 %bars, %base, {bars};
// A prompt's last tiles have the longest contexts, so they come first.
mov.u32 %r0, %ctaid.x;
div.u32 %r1, %r0, {kv_heads};
mul.lo.u32 %r2, %r1, {kv_heads};
sub.u32 %kvh, %r0, %r2;
mov.u32 %r2, %nctaid.x;
div.u32 %r2, %r2, {kv_heads};
sub.u32 %r2, %r2, %r1;
sub.u32 %tile_number, %r2, 1;
// The tile's prompt: the last one whose first tile has no higher number. %r7 is its end.
ld.global.v4.b32 {{%prompts, %r1, %r7, %r2}}, [%chunk];
mov.u32 %index, 0;
FIND:
add.u32 %r0, %index, 1;
setp.ge.u32 %p0, %r0, %prompts;
@%p0 bra FOUND;
mul.wide.u32 %l0, %r0, 16;
add.u64 %l0, %chunk, %l0;
ld.global.u32 %r1, [%l0+24];
mul.lo.u32 %r2, %r1, {g};
shr.u32 %r2, %r2, {pairs_shift};
add.u32 %r2, %r2, %r0;
setp.gt.u32 %p0, %r2, %tile_number;
@%p0 bra ENDS;
mov.u32 %index, %r0;
bra FIND;
ENDS:
mov.u32 %r7, %r1;
FOUND:
mul.wide.u32 %l0, %index, 16;
add.u64 %l0, %chunk, %l0;
ld.global.v4.b32 {{%r0, %start, %row, %r1}}, [%l0+16];
setp.eq.u32 %p0, %r0, 0xffffffff;
@%p0 bra END;
ld.param.u32 %r1, [args+80];
mul.lo.u32 %table, %r0, %r1;
sub.u32 %in_use, %r7, %row;
mul.lo.u32 %r1, %row, {g};
shr.u32 %r1, %r1, {pairs_shift};
add.u32 %r1, %r1, %index;
sub.u32 %r1, %tile_number, %r1;
mul.lo.u32 %first, %r1, {PAIRS};
mul.lo.u32 %r1, %in_use, {g};
setp.ge.u32 %p0, %first, %r1;
@%p0 bra END;
// The positions of the tile's first and last row, and the blocks of tokens.
add.u32 %r1, %first, {pairs_less};
div.u32 %r1, %r1, {g};
sub.u32 %r2, %in_use, 1;
min.u32 %r1, %r1, %r2;
add.u32 %last, %start, %r1;
div.u32 %r1, %first, {g};
add.u32 %open, %start, %r1;
{low}shr.u32 %block, %low, {block_shift};
shr.u32 %r1, %last, {block_shift};
add.u32 %end, %r1, 1;
mov.u32 %slot, 0;
mov.u32 %phase, 0;
setp.ne.u32 %p0, %thread, 0;
@%p0 bra BARRIERS;",
            pages = n / PAGE_TOKENS,
            sums = d / 2,
            scores = n / 2,
            queries = if queries_in_shared(d) { 4 } else { d / 4 },
            weights = n / 4,
            bars = 4 * place_bytes(d) + GROUPS * queries_bytes(d),
            pairs_shift = PAIRS.ilog2(),
            pairs_less = PAIRS - 1,
            block_shift = n.ilog2(),
            low = self.first_visible("%open", "%low"),
        );
        // Keys' full and empty, then values': two places each.
        for (at, count) in [(0, 128), (16, GROUPS * 4), (32, 128), (48, GROUPS * 4)] {
            for place in 0..2 {
                line!(self, "mbarrier.init.shared::cta.b64 [%bars+{}], {count};", at + place * 8);
            }
        }
        line!(
            self,
            "fence.mbarrier_init.release.cluster;
BARRIERS:
bar.sync 0;
setp.ge.u32 %p0, %warp, {};
@%p0 bra PRODUCER;",
            GROUPS * 4
        );
        self.consumer();
        line!(self, "PRODUCER:");
        self.producer();
        line!(self, "END:\nret;\n}}");
    }

    /// Returns the instructions that set `to` to the first token that the token at `position` sees.
    fn first_visible(&self, position: &str, to: &str) -> String {
        match self.of.window {
            0 => format!("mov.u32 {to}, 0;\n"),
            window => format!(
                "max.u32 {to}, {position}, {less};
sub.u32 {to}, {to}, {less};
",
                less = window - 1
            ),
        }
    }

    /// Goes on to the next place.
    fn advance(&mut self) {
        line!(
            self,
            "xor.b32 %slot, %slot, 1;\nsetp.eq.u32 %p0, %slot, 0;\nselp.u32 %r0, 1, 0, %p0;\nxor.b32 %phase, %phase, %r0;"
        );
    }

    /// Copies the keys and values of each block.
    fn producer(&mut self) {
        let FlashConstants { d, kv_heads, .. } = self.of;
        let (n, row_words) = (block_tokens(d), d / 8);
        line!(
            self,
            "setmaxnreg.dec.sync.aligned.u32 {few};
and.b32 %r0, %thread, 127;
// The thread's first word of keys: 8 dimensions of a token of a page.
shr.u32 %r1, %r0, 4;
and.b32 %r2, %r0, 15;
mul.lo.u32 %keys_at, %r1, {key_row};
mad.lo.u32 %keys_at, %r2, 16, %keys_at;
add.u32 %keys_at, %keys_at, %base;
// The first of values: token %token of a page, word %r2.
shr.u32 %token, %r0, {row_shift};
and.b32 %r2, %r0, {row_mask};
shr.u32 %r3, %r2, 3;
mul.lo.u32 %values_at, %r3, {value_row};
mad.lo.u32 %values_at, %token, 128, %values_at;
and.b32 %r2, %r2, 7;
and.b32 %r3, %token, 7;
xor.b32 %r2, %r2, %r3;
mad.lo.u32 %values_at, %r2, 16, %values_at;
add.u32 %values_at, %values_at, %base;
add.u32 %values_at, %values_at, {values};
xor.b32 %values_at_odd, %values_at, 64;
// Where the thread's words begin in the pages of its KV head.
mul.lo.u32 %r1, %kvh, {head_bytes};
mad.lo.u32 %r1, %r0, 16, %r1;
cvt.u64.u32 %l0, %r1;
add.u64 %k, %k, %l0;
add.u64 %v, %v, %l0;
shr.u32 %previous, %last, 4;
setp.ne.u32 %started, %lane, %lane;
PRODUCER_BLOCK:
.pragma \"nounroll\";
xor.b32 %previous_place, %slot, 1;",
            few = REGISTERS.0,
            key_row = n * 16,
            row_shift = row_words.ilog2(),
            row_mask = row_words - 1,
            value_row = n * 128,
            values = 2 * place_bytes(d),
            head_bytes = 32 * d,
        );
        // Pages beyond the last token's are replaced by it.
        for page in 0..n / PAGE_TOKENS {
            line!(
                self,
                "mad.lo.u32 %r1, %block, {}, {page};
min.u32 %r1, %r1, %previous;
add.u32 %r1, %r1, %table;
mul.wide.u32 %l0, %r1, 4;
add.u64 %l0, %pages, %l0;
ld.global.u32 %page{page}, [%l0];",
                n / PAGE_TOKENS
            );
        }
        let words = n * row_words / 128;
        let page_words = 2 * d;
        let page_bytes = kv_heads * d * 32;
        for values in [false, true] {
            let (what, empty) = if values { ("v", 48) } else { ("k", 16) };
            if values {
                // The block's keys are still on their way; the values before them are complete first.
                self.signal(32, 1, "%previous_place", true);
                self.signal(0, 0, "%slot", false);
            }
            line!(self, "mad.lo.u32 %at, %slot, 8, %bars;\nadd.u32 %at, %at, {empty};\nxor.b32 %r0, %phase, 1;");
            self.ptx.wait("%at", "%r0");
            line!(self, "mul.lo.u32 %tokens_at, %slot, {};", place_bytes(d));
            if values {
                line!(self, "mad.lo.u32 %r4, %block, {n}, %token;\nadd.u32 %r5, %tokens_at, %values_at_odd;");
                line!(self, "add.u32 %tokens_at, %tokens_at, %values_at;");
            } else {
                line!(self, "add.u32 %tokens_at, %tokens_at, %keys_at;");
            }
            for word in 0..words {
                let (page, first) = (word * 128 / page_words, word * 128 % page_words);
                if first == 0 {
                    line!(self, "mul.wide.u32 %l1, %page{page}, {page_bytes};\nadd.u64 %l1, %{what}, %l1;");
                }
                if !values {
                    let to = first / 16 * n * 16 + page * 256;
                    line!(self, "add.u32 %r1, %tokens_at, {to};\nadd.u64 %l2, %l1, {};", first * 16);
                    line!(self, "cp.async.cg.shared.global [%r1], [%l2], 16;");
                    continue;
                }
                // The word's token, from the thread's first one on. Four tokens on, the swizzle is another.
                let token = page * 16 + first / row_words;
                let place = if token % 8 == 0 { "%tokens_at" } else { "%r5" };
                line!(
                    self,
                    "add.u32 %r2, %r4, {token};
setp.le.u32 %p1, %r2, %last;
{above}selp.u32 %r3, 16, 0, %p1;
add.u32 %r1, {place}, {};
add.u64 %l2, %l1, {};
cp.async.cg.shared.global [%r1], [%l2], 16, %r3;",
                    token * 128,
                    first * 16,
                    above = if self.of.window > 0 { "setp.ge.and.u32 %p1, %r2, %low, %p1;\n" } else { "" },
                );
            }
            line!(self, "cp.async.commit_group;");
        }
        line!(self, "setp.eq.u32 %started, %lane, %lane;");
        self.advance();
        line!(
            self,
            "add.u32 %block, %block, 1;
setp.lt.u32 %p0, %block, %end;
@%p0 bra PRODUCER_BLOCK;"
        );
        line!(self, "xor.b32 %previous_place, %slot, 1;");
        self.signal(32, 0, "%previous_place", false);
        line!(self, "bra END;");
    }

    /// Waits until at most `pending` of the thread's groups of copies are on their way, and says that a place is full, whose
    /// barriers begin at `full`; with `after`, only behind the first block.
    fn signal(&mut self, full: u32, pending: u32, place: &str, after: bool) {
        let label = self.ptx.label();
        if after {
            line!(self, "@!%started bra SIGNALLED{label};");
        }
        line!(
            self,
            "cp.async.wait_group {pending};
fence.proxy.async;
mad.lo.u32 %r0, {place}, 8, %bars;
mbarrier.arrive.shared::cta.b64 _, [%r0+{full}];
SIGNALLED{label}:"
        );
    }

    fn consumer(&mut self) {
        let FlashConstants { d, g, sinks, .. } = self.of;
        line!(
            self,
            "setmaxnreg.inc.sync.aligned.u32 {many};
shr.u32 %group, %warp, 2;
and.b32 %quarter, %warp, 3;
shr.u32 %g, %lane, 2;
and.b32 %t, %lane, 3;
setp.eq.u32 %release, %lane, 0;
setp.eq.u32 %all, %lane, %lane;
setp.ne.u32 %none, %lane, %lane;
// The lane's two pairs. Pairs past the end repeat the last row.
mad.lo.u32 %pair_a, %group, 64, %first;
div.u32 %r0, %pair_a, {g};
sub.u32 %r2, %in_use, 1;
min.u32 %r0, %r0, %r2;
add.u32 %open, %start, %r0;
mad.lo.u32 %pair_a, %quarter, 16, %pair_a;
add.u32 %pair_a, %pair_a, %g;
add.u32 %pair_b, %pair_a, 8;",
            many = REGISTERS.1,
        );
        for of in ["a", "b"] {
            line!(
                self,
                "div.u32 %r0, %pair_{of}, {g};
mul.lo.u32 %r1, %r0, {g};
sub.u32 %r1, %pair_{of}, %r1;
mad.lo.u32 %head_{of}, %kvh, {g}, %r1;
min.u32 %row_{of}, %r0, %r2;
add.u32 %position_{of}, %start, %row_{of};
add.u32 %row_{of}, %row, %row_{of};"
            );
            self.address(of, "%qkv", "%stride", "from");
        }
        self.load_queries();
        line!(self, "mov.f32 %max_a, {low};\nmov.f32 %max_b, {low};", low = float(LOWEST));
        line!(self, "mov.f32 %sum_a, {zero};\nmov.f32 %sum_b, {zero};", zero = float(0.0));
        if sinks == 1 {
            // A sink is a score without a value.
            line!(
                self,
                "setp.eq.u32 %p0, %t, 0;\nselp.f32 %sum_a, {one}, {zero}, %p0;\nmov.f32 %sum_b, %sum_a;",
                one = float(1.0),
                zero = float(0.0)
            );
            for of in ["a", "b"] {
                line!(
                    self,
                    "mul.wide.u32 %l0, %head_{of}, 4;
add.u64 %l0, %sinks, %l0;
ld.global.f32 %max_{of}, [%l0];
mul.f32 %max_{of}, %max_{of}, {};",
                    float(std::f32::consts::LOG2_E)
                );
            }
        }
        line!(
            self,
            "// The descriptors of the first places.
and.b32 %r0, %base, 0x3ffff;
shr.u32 %r0, %r0, 4;
cvt.u64.u32 %l0, %r0;
or.b64 %keys, %l0, {keys:#x};
add.u64 %l0, %l0, {values_at};
or.b64 %values, %l0, {values:#x};
setp.ne.u32 %started, %lane, %lane;",
            keys = descriptor(block_tokens(d) * 16, 128, false),
            values_at = 2 * place_bytes(d) / 16,
            values = descriptor(block_tokens(d) * 128, 1024, true),
        );
        self.scores();
        line!(self, "wgmma.wait_group.sync.aligned 0;");
        self.release(16, "%slot");
        self.weigh();
        self.pack_weights();
        line!(
            self,
            "CONSUMER_BLOCK:
.pragma \"nounroll\";
add.u32 %block, %block, 1;
setp.ge.u32 %p0, %block, %end;
@%p0 bra LAST;
mov.u32 %previous, %slot;
mov.u32 %at, %phase;"
        );
        self.advance();
        self.scores();
        self.outputs("%at");
        line!(self, "wgmma.wait_group.sync.aligned 1;");
        self.release(16, "%slot");
        self.weigh();
        line!(self, "wgmma.wait_group.sync.aligned 0;");
        self.release(48, "%previous");
        for sum in 0..d / 2 {
            line!(self, "mul.f32 %sum{sum}, %sum{sum}, %factor_{};", if sum % 4 < 2 { "a" } else { "b" });
        }
        self.pack_weights();
        line!(self, "bra CONSUMER_BLOCK;\nLAST:\nmov.u32 %previous, %slot;");
        self.outputs("%phase");
        line!(self, "wgmma.wait_group.sync.aligned 0;");
        self.store();
        line!(self, "bra END;");
    }

    /// Sets register %`to`_`of` to the address of a pair's row, head and the lane's first column, in rows of `stride` floats
    /// at `base`.
    fn address(&mut self, of: &str, base: &str, stride: &str, to: &str) {
        line!(
            self,
            "mul.wide.u32 %l0, %row_{of}, {stride};
mul.lo.u32 %r0, %head_{of}, {};
mad.lo.u32 %r0, %t, 2, %r0;
cvt.u64.u32 %l1, %r0;
add.u64 %l0, %l0, %l1;
shl.b64 %l0, %l0, 2;
add.u64 %{to}_{of}, {base}, %l0;",
            self.of.d
        );
    }

    /// Loads the queries of the lane's pairs, multiplied by the scale and log2(e).
    fn load_queries(&mut self) {
        let FlashConstants { d, scale, .. } = self.of;
        let scale = if scale == 0 { 1.0 / (d as f32).sqrt() } else { f32::from_bits(scale) };
        let scale = float(scale * std::f32::consts::LOG2_E);
        if queries_in_shared(d) {
            line!(
                self,
                "// Where the lane's words of the first row and 16 dimensions lie in the order of the keys.
mad.lo.u32 %at, %group, {bytes}, %base;
add.u32 %at, %at, {places};
and.b32 %r0, %at, 0x3ffff;
shr.u32 %r0, %r0, 4;
cvt.u64.u32 %queries, %r0;
or.b64 %queries, %queries, {descriptor:#x};
mad.lo.u32 %at, %quarter, 256, %at;
mad.lo.u32 %at, %g, 16, %at;
mad.lo.u32 %at, %t, 4, %at;",
                bytes = queries_bytes(d),
                places = 4 * place_bytes(d),
                descriptor = descriptor(64 * 16, 128, false),
            );
        }
        for step in 0..d / 16 {
            let q = if queries_in_shared(d) { 0 } else { step * 4 };
            let at = step * 64;
            line!(
                self,
                "ld.global.v2.f32 {{%f0, %f1}}, [%from_a+{at}];
ld.global.v2.f32 {{%f2, %f3}}, [%from_b+{at}];
ld.global.v2.f32 {{%f4, %f5}}, [%from_a+{}];
ld.global.v2.f32 {{%f6, %f7}}, [%from_b+{}];",
                at + 32,
                at + 32
            );
            (0..8).for_each(|i| line!(self, "mul.f32 %f{i}, %f{i}, {scale};"));
            for i in 0..4 {
                line!(self, "cvt.rn.f16x2.f32 %q{}, %f{}, %f{};", q + i, 2 * i + 1, 2 * i);
            }
            if queries_in_shared(d) {
                // 8 dimensions of 64 rows are 1,024 bytes; row g + 8 is 128 bytes on.
                for (i, to) in [(0, 0), (1, 128), (2, 1024), (3, 1024 + 128)] {
                    line!(self, "st.shared.b32 [%at+{}], %q{i};", step * 2048 + to);
                }
            }
        }
        if queries_in_shared(d) {
            line!(self, "fence.proxy.async;\nadd.u32 %r0, %group, 1;\nbar.sync %r0, 128;");
        }
    }

    /// Begins to multiply the queries with the keys of the current place, as soon as it is full.
    fn scores(&mut self) {
        let FlashConstants { d, .. } = self.of;
        let n = block_tokens(d);
        line!(self, "mad.lo.u32 %r1, %slot, 8, %bars;");
        self.ptx.wait("%r1", "%phase");
        line!(
            self,
            "mul.lo.u32 %r1, %slot, {};
cvt.u64.u32 %l0, %r1;
add.u64 %l0, %keys, %l0;
wgmma.fence.sync.aligned;",
            place_bytes(d) / 16
        );
        for step in 0..d / 16 {
            let (sums, adds) = (registers("s", 0..n / 2), if step == 0 { "%none" } else { "%all" });
            // 16 dimensions are two columns of 8.
            line!(self, "add.u64 %l1, %l0, {};", step * 2 * n);
            let instruction = format!("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16");
            if queries_in_shared(d) {
                line!(self, "add.u64 %l2, %queries, {};", step * 2 * 64);
                line!(self, "{instruction} {{{sums}}}, %l2, %l1, {adds}, 1, 1, 0, 0;");
            } else {
                let q = registers("q", step * 4..step * 4 + 4);
                line!(self, "{instruction} {{{sums}}}, {{{q}}}, %l1, {adds}, 1, 1, 0;");
            }
        }
        line!(self, "wgmma.commit_group.sync.aligned;");
    }

    /// Begins to add the products of the weights and the values of place %previous, in the phase with parity `phase`, to the
    /// outputs.
    fn outputs(&mut self, phase: &str) {
        let FlashConstants { d, .. } = self.of;
        line!(self, "mad.lo.u32 %r1, %previous, 8, %bars;\nadd.u32 %r1, %r1, 32;");
        self.ptx.wait("%r1", phase);
        line!(
            self,
            "mul.lo.u32 %r1, %previous, {};
cvt.u64.u32 %l0, %r1;
add.u64 %l0, %values, %l0;
wgmma.fence.sync.aligned;",
            place_bytes(d) / 16
        );
        for step in 0..block_tokens(d) / 16 {
            let (sums, w) = (registers("sum", 0..d / 2), registers("w", step * 4..step * 4 + 4));
            let adds = if step == 0 { "%started" } else { "%all" };
            // 16 tokens of 128 bytes.
            line!(self, "add.u64 %l1, %l0, {};", step * 128);
            line!(
                self,
                "wgmma.mma_async.sync.aligned.m64n{d}k16.f32.f16.f16 {{{sums}}}, {{{w}}}, %l1, {adds}, 1, 1, 1;"
            );
        }
        line!(self, "wgmma.commit_group.sync.aligned;\nsetp.eq.u32 %started, %lane, %lane;");
    }

    /// Leaves a place, whose barriers begin at `empty`.
    fn release(&mut self, empty: u32, place: &str) {
        line!(self, "mad.lo.u32 %r1, {place}, 8, %bars;\n@%release mbarrier.arrive.shared::cta.b64 _, [%r1+{empty}];");
    }

    /// Replaces the scores of the current block by weights relative to the largest score so far, adds them up, and sets the
    /// factors by which what was added before is multiplied.
    fn weigh(&mut self) {
        let FlashConstants { d, window, .. } = self.of;
        let n = block_tokens(d);
        let [open, seen] = [self.ptx.label(), self.ptx.label()];
        // Which token of the block a lane's pairs see last, counted from the lane's first one.
        line!(
            self,
            "mul.lo.u32 %r1, %block, {n};
mad.lo.u32 %r2, %t, 2, %r1;
sub.u32 %delta_a, %position_a, %r2;
sub.u32 %delta_b, %position_b, %r2;
add.u32 %r2, %r1, {};
setp.le.u32 %p0, %r2, %open;
@%p0 bra OPEN{open};",
            n - 1
        );
        let hides = |program: &mut Program, comparison: &str| {
            for i in 0..n / 2 {
                let (of, token) = (if i % 4 < 2 { "a" } else { "b" }, i / 4 * 8 + i % 2);
                line!(
                    program,
                    "setp.{comparison}.s32 %p1, %delta_{of}, {token};\nselp.f32 %s{i}, {}, %s{i}, %p1;",
                    float(LOWEST)
                );
            }
        };
        hides(self, "lt");
        line!(self, "OPEN{open}:");
        if window > 0 {
            // A pair sees `window` tokens, up to its own.
            line!(
                self,
                "add.u32 %r2, %r1, {window};
setp.gt.u32 %p0, %r2, %last;
@%p0 bra SEEN{seen};
sub.u32 %delta_a, %delta_a, {window};
sub.u32 %delta_b, %delta_b, {window};"
            );
            hides(self, "ge");
            line!(self, "SEEN{seen}:");
        }
        for of in ["a", "b"] {
            line!(self, "mov.f32 %top_{of}, %max_{of};");
        }
        for i in 0..n / 2 {
            let of = if i % 4 < 2 { "a" } else { "b" };
            line!(self, "max.f32 %top_{of}, %top_{of}, %s{i};");
        }
        for of in ["a", "b"] {
            for distance in [1, 2] {
                line!(
                    self,
                    "shfl.sync.bfly.b32 %f0, %top_{of}, {distance}, 31, 0xffffffff;\nmax.f32 %top_{of}, %top_{of}, %f0;"
                );
            }
            line!(
                self,
                "sub.f32 %f0, %max_{of}, %top_{of};
ex2.approx.ftz.f32 %factor_{of}, %f0;
mov.f32 %max_{of}, %top_{of};
mul.f32 %sum_{of}, %sum_{of}, %factor_{of};"
            );
        }
        for i in 0..n / 2 {
            let of = if i % 4 < 2 { "a" } else { "b" };
            line!(
                self,
                "sub.f32 %s{i}, %s{i}, %top_{of};
ex2.approx.ftz.f32 %s{i}, %s{i};
add.f32 %sum_{of}, %sum_{of}, %s{i};"
            );
        }
    }

    /// Rounds the weights to f16.
    fn pack_weights(&mut self) {
        for i in 0..block_tokens(self.of.d) / 4 {
            line!(self, "cvt.rn.f16x2.f32 %w{i}, %s{}, %s{};", 2 * i + 1, 2 * i);
        }
    }

    /// Stores the outputs of the lane's pairs.
    fn store(&mut self) {
        let FlashConstants { d, g, .. } = self.of;
        line!(self, "ld.param.u32 %r3, [args+76];\nmul.lo.u32 %r4, %in_use, {g};");
        for (of, predicate) in [("a", "%p2"), ("b", "%p3")] {
            for distance in [1, 2] {
                line!(
                    self,
                    "shfl.sync.bfly.b32 %f0, %sum_{of}, {distance}, 31, 0xffffffff;\nadd.f32 %sum_{of}, %sum_{of}, %f0;"
                );
            }
            line!(self, "rcp.approx.ftz.f32 %factor_{of}, %sum_{of};\nsetp.lt.u32 {predicate}, %pair_{of}, %r4;");
            if self.packed {
                // The row's first 64 columns of the head, and the places of the lane's first two words in its 128 bytes.
                line!(
                    self,
                    "mul.lo.u32 %r0, %head_{of}, {};
mul.wide.u32 %l0, %r0, %r3;
cvt.u64.u32 %l1, %row_{of};
add.u64 %l0, %l0, %l1;
shl.b64 %l0, %l0, 7;
add.u64 %l0, %o, %l0;
and.b32 %r0, %row_{of}, 7;
xor.b32 %r0, %r0, %t;
mul.wide.u32 %l1, %r0, 16;
add.u64 %to_{of}, %l0, %l1;
xor.b32 %r0, %r0, 4;
mul.wide.u32 %l1, %r0, 16;
add.u64 %further_{of}, %l0, %l1;",
                    d / 64
                );
                continue;
            }
            self.address(of, "%o", "%r3", "to");
        }
        if self.packed {
            line!(self, "mul.wide.u32 %l0, %r3, 128;");
        }
        for first in (0..d / 8).step_by(4) {
            for (of, predicate, second) in [("a", "%p2", 0), ("b", "%p3", 2)] {
                for eight in first..first + 4 {
                    self.finish_pair(eight, of, second);
                    match self.packed {
                        true => line!(self, "cvt.rn.bf16x2.f32 %r{}, %f1, %f0;", 8 + eight - first),
                        false => line!(self, "@{predicate} st.global.v2.f32 [%to_{of}+{}], {{%f0, %f1}};", eight * 32),
                    }
                }
                if self.packed {
                    let to = if first % 8 == 0 { "to" } else { "further" };
                    line!(self, "@{predicate} st.global.v4.b32 [%{to}_{of}], {{%r8, %r9, %r10, %r11}};");
                    // The next 64 columns.
                    line!(self, "add.u64 %{to}_{of}, %{to}_{of}, %l0;");
                }
            }
        }
    }

    /// Sets %f0 and %f1 to the outputs of a lane's pair in its two columns of the `eight`-th 8.
    fn finish_pair(&mut self, eight: u32, of: &str, second: u32) {
        let FlashConstants { d, g, kv_heads, gated, .. } = self.of;
        let sum = eight * 4 + second;
        line!(self, "mul.f32 %f0, %sum{sum}, %factor_{of};\nmul.f32 %f1, %sum{}, %factor_{of};", sum + 1);
        if gated == 1 {
            // The gates of all heads lie behind the keys and values of all.
            let at = (kv_heads * (g + 2) * d + eight * 8) * 4;
            line!(self, "ld.global.v2.f32 {{%f2, %f3}}, [%from_{of}+{at}];");
            for (value, gate) in [(0, 2), (1, 3)] {
                line!(
                    self,
                    "mul.f32 %f{gate}, %f{gate}, {};
ex2.approx.ftz.f32 %f{gate}, %f{gate};
add.f32 %f{gate}, %f{gate}, {};
div.full.f32 %f{value}, %f{value}, %f{gate};",
                    float(-std::f32::consts::LOG2_E),
                    float(1.0)
                );
            }
        }
    }
}

/// Returns the upper bits of a descriptor of shared memory: the distances in bytes between groups of 8 along the operand's
/// contiguous direction (without a swizzle: of dimensions; with it: of 64 dimensions), and along the other one; and whether
/// rows of 128 bytes are swizzled.
fn descriptor(leading: u32, strided: u32, swizzled: bool) -> u64 {
    u64::from(leading / 16) << 16 | u64::from(strided / 16) << 32 | u64::from(swizzled) << 62
}
