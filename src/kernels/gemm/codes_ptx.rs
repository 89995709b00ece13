//! `skinny_codes.ptx`: `skinny_codes` for 1 to 8 rows of x, as a program in PTX for NVIDIA GPUs of compute capability 9.0:
//! `y = epilogue( W · prologue(x) )` for quantised weights in fragment order. The arguments, the prologue, the epilogue and the
//! tags are those of `skinny_codes`; a program's text is made for the constants of a call. `expert_skinny.codes.ptx` is the same for the two
//! products of experts, with the arguments of `expert_skinny`; what only it has is in `experts`.
//!
//! Affine codes are multiplied as 8-bit integers without signs by `mma.m16n8k32`, which SPIR-V reaches only with many instructions
//! for each byte. The same bits of a word's four bytes are four codes of one row, so one instruction makes an operand of four codes
//! of 4 bits, for row v 16 times as large. 32 columns of x, or a group of 128, have a common factor and become integers of 16
//! bits, 256 · high + low, two bytes with signs: a product with codes is exact, and rounding changes an element of x by at most
//! 2⁻¹⁶ of the largest of the 32 or 128.
//!
//! A block of x has eight columns: high and low for each of four pairs of a row of x and a group of columns of W. A *set* is the
//! groups that a block of x has columns for: 4 groups of 16 or of 32 of one row of x, 2 of two rows, one of four rows; eight rows
//! are two blocks. Other numbers of rows repeat the last one up to four or eight, and do not store the products of those. x of a
//! block of 32 columns of W is zero in the columns of other groups, so that lane 4g + t, which receives columns 2t and 2t + 1 of rows u and v of W, has the sums of row t % rows of x and group t / rows of the set, and applies the
//! group's scale and minimum to them: `(sum · scale · 2⁻²⁴ · factor - minimum · Σx)`, once for each set. With groups of 128, there
//! is one set, and pairs of columns beyond the rows repeat them. Weights need no scaling.
//!
//! Codes in e2m1 become 12 plus twice the number by permutations of bytes, and are affine from there on.
//!
//! Codes in e4m3 become f16 by an instruction for two, and are multiplied by `mma.m16n8k16`. A row of x has a factor for each 128
//! columns; its columns of a block are f16, most and rest, whose sum has 22 bits, or with four and more rows most alone.
//!
//! A workgroup has one group of 32 lanes more than [`CodesPtxConfig::groups`], and computes blocks of 16 rows of W: block
//! `workgroup + i · workgroups`. The groups split the units of columns. Each has `slots` places in shared memory for a unit,
//! which its first lane fills by bulk copies, in the order of blocks, of words that leave the L2 cache first; a place is filled
//! again as soon as the group has multiplied its unit, also across blocks, and no registers hold weights on their way. Of several
//! places, at least one stays empty until x has come: the more a waiting call copies, the later the call before it ends. A group
//! stores its sums of a block in one of `PLACES` places; the last group adds up those of all groups, finishes them and stores y.
//! In the first stage of experts, whose blocks have few units, four groups finish blocks in turns.
//!
//! If x of several rows does not fit in shared memory, each group's units are divided into *sections*: all blocks are multiplied
//! with x of one section, then x of the next takes its place. Each block keeps its place of sums then, to which a section adds.
//!
//! All workgroups ask for at least `LEAST_SHARED_BYTES`, so that a processor has one of them at a time. If one call asked for
//! twice as much as the next one, some processors would get two of the next call's workgroups, which take twice as long, and
//! others none: by all measurements, a processor keeps as much shared memory as the largest program of late asked for.
//!
//! Traffic: W once; x once per workgroup, from the L2 cache.
//!
//! Polls for tagged words are bounded as in `tags.glsl`, and a wait for a copy by a trap, which loses the device. A wait for
//! another group of the workgroup ends after these.

mod experts;

pub use self::experts::{MOST_GROUPS as MOST_EXPERT_GROUPS, MOST_ROWS as MOST_EXPERT_ROWS};

use self::experts::Experts;
use super::codes::{CodesConfig, ProductColumns, skinny_codes, units};
use super::skinny::Matrices;
use super::{Epilogue, Product};
use crate::device::MOST_SHARED_BYTES;
use crate::kernels::format_of_word;
use crate::kernels::ptx::{PtxProgram, PtxText, float, line, registers};
use crate::kernels::recording::{Call, Range};
use crate::kernels::shaders::{self, EXPERT_SKINNY_PTX, ExpertSkinnyConstants, SKINNY_CODES_PTX, SkinnyCodesConstants};
use crate::kernels::tags::{CALL_SHIFT, Flow, TAG_MASK};
use crate::memory::pack::Format;
use crate::memory::pack::codes::{BLOCK_HEADER, fragment_unit_bytes, unit_cols};
use crate::quant::number::Number;
use crate::quant::{Codes, Minimum};

/// The shape of the workgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CodesPtxConfig {
    /// The number of groups of 32 lanes that multiply: 1 to 31.
    pub groups: u32,
    /// The number of units that a group has on their way or multiplies.
    pub slots: u32,
    /// The maximum number of workgroups; each computes as many blocks of 16 rows, but for the last ones.
    pub workgroups: u32,
}

impl CodesPtxConfig {
    /// Whether a workgroup has enough shared memory for a matrix of `n` rows and `units` units of columns of a format, with
    /// `rows` rows of x. If x fits only in sections, it adds to its blocks' sums section by section, so that each needs a place.
    pub fn fits(self, codes: Codes, (n, units): (u32, u32), rows: u32) -> bool {
        let CodesPtxConfig { groups, slots, workgroups } = self;
        let (norm, bias, epilogue, tagged, devices) = (false, false, 0, 0, false);
        let (stored_rows, rows) = (rows, rows.next_power_of_two());
        let size = Variant {
            codes,
            rows,
            stored_rows,
            sections: 1,
            groups,
            slots,
            units,
            norm,
            bias,
            epilogue,
            tagged,
            devices,
            experts: None,
        };
        let blocks = n.div_ceil(16).div_ceil(workgroups);
        size.in_sections().is_some_and(|v| v.sections == 1 || blocks <= PLACES)
    }

    /// Returns the shape for a stage of experts whose matrices have `n` rows: with as many of its slots as a workgroup has shared
    /// memory for. `None` if that is not even one, or if the second stage has no places for its blocks' sums while it multiplies more
    /// experts than its groups do at once.
    pub fn of_experts(self, n: u32, constants: &ExpertSkinnyConstants) -> Option<CodesPtxConfig> {
        let shapes = (1..=self.slots).rev().map(|slots| CodesPtxConfig { slots, ..self });
        let fits = |shape: &CodesPtxConfig| {
            let threads = expert_threads(self, constants.stage == 1);
            let constants = ExpertSkinnyConstants { threads, ahead: shape.slots, ..*constants };
            let v = Variant::of_experts_call(&constants);
            let places = n.div_ceil(16).div_ceil(self.workgroups) <= v.most_expert_blocks();
            v.groups.is_multiple_of(v.splits())
                && v.groups >= v.stored_rows
                && v.threads() <= 1024
                && places
                && v.shared_bytes() <= MOST_SHARED_BYTES
        };
        shapes.into_iter().find(fits)
    }
}

/// Returns the number of threads of a workgroup of `expert_skinny.codes.ptx` for a stage of experts.
pub fn expert_threads(config: CodesPtxConfig, down: bool) -> u32 {
    (config.groups + Experts::finishers(down)) * 32
}

/// Whether the program serves a stage of experts with these constants, of weights in this format, which [`serves`] must be true of.
pub fn serves_experts(format: Format, constants: &ExpertSkinnyConstants) -> bool {
    let c = constants;
    serves(format)
        && c.rows <= MOST_EXPERT_ROWS
        && c.chosen <= experts::MOST_CHOSEN
        && c.shared != 1
        && c.columns.is_multiple_of(4)
}

/// Whether the program multiplies with weights of a format.
pub fn serves(format: Format) -> bool {
    let Some(codes) = format.codes() else { return false };
    let whole = codes.group == 128 && unit_cols(codes) == 128;
    match codes.number {
        Number::Affine => codes.group <= 32 || whole,
        Number::E4m3 => whole && codes.minimum == Minimum::Zero { halves: 0 },
        Number::E2m1 => codes.group <= 32 && codes.minimum == Minimum::Zero { halves: 0 },
        Number::E5m2 => false,
    }
}

/// Returns the call of a product of 1 to [`MOST_ROWS`] rows of x: that of `skinny_codes` for these workgroups, with the program in PTX.
/// `flow` gives the tagged operands.
///
/// # Panics
/// If the program does not serve the format of W or the number of rows, or a workgroup has not enough shared memory.
pub fn skinny_codes_ptx(product: &Product, rows: u32, config: CodesPtxConfig, flow: Flow, fault: Range) -> Call {
    let format = product.weight.format;
    assert!(serves(format) && (1..=MOST_ROWS).contains(&rows), "{rows} rows, {format:?} of \"{}\"", product.label);
    let codes = format.codes().expect("it is served");
    let fits = config.fits(codes, (product.weight.rows, units(&product.weight)), rows);
    assert!(fits, "{config:?} for {rows} rows of \"{}\"", product.label);
    let CodesPtxConfig { groups, slots, workgroups } = config;
    let config = CodesConfig { threads: (groups + 1) * 32, tiles: 1, ahead: slots, workgroups };
    let columns = ProductColumns::Of(0..units(&product.weight));
    let call = skinny_codes(product, rows, Matrices::Cooperative, config, columns, flow, fault);
    Call { kernel: SKINNY_CODES_PTX.name, ..call }
}

/// The maximum number of rows of x.
pub const MOST_ROWS: u32 = 8;
/// The most rows of x in a block of x.
const BLOCK_ROWS: u32 = 4;
/// The most groups of a workgroup that multiply.
pub const MOST_GROUPS: u32 = 31;
/// The most slots of a group.
pub const MOST_SLOTS: u32 = 16;
/// The places for blocks' sums in shared memory.
const PLACES: u32 = 4;
/// The polls after which a reader looks at the fault word, and after which it sets it (`tags.glsl`).
const POLLS_BETWEEN_LOOKS: u32 = 256;
const MOST_POLLS: u32 = 30_000;
/// The largest integer that a column of x becomes.
const MOST: f32 = 32639.0;
/// 1.5 · 2²³ + 128 in f32: an integer that is added to it, plus 128, is in the lowest bits of the fraction. Of that sum, the
/// second byte is `high`, and the first one is `low` with its sign inverted.
const MAGIC: u32 = 0x4b40_0080;
/// The value of code 1 of affine codes, and of the number 1 of e4m3 (`memory::pack::codes`).
const CODE_VALUE: f32 = 5.960_464_5e-8;
/// The value of 1/2 in e2m1, whose numbers are multiples of that, and the integer that they are added to as integers, so that none
/// is negative. Twice the magnitudes of codes 0 to 7, one in a byte.
const E2M1_HALF: f32 = 1.0 / 32768.0;
const E2M1_ZERO: u32 = 12;
const E2M1_MAGNITUDES: [u32; 2] = [0x0302_0100, 0x0c08_0604];
const E4M3_VALUE: f32 = 1.0 / 256.0;
/// The least shared memory of a workgroup in bytes: with the 1 KiB that each workgroup takes besides, more than half of the
/// 228 KiB that a processor has at most.
const LEAST_SHARED_BYTES: u32 = 114 << 10;

/// What a program is made for.
#[derive(Clone, Copy, Debug)]
struct Variant {
    codes: Codes,
    /// The number of rows of x in shared memory: 1, 2, 4 or 8. Those from `stored_rows` on repeat the last one. In the second stage
    /// of experts, they are those of an entry of the list.
    rows: u32,
    /// The number of rows of y.
    stored_rows: u32,
    /// The number of sections of a group's units; x of one of them is in shared memory at a time.
    sections: u32,
    groups: u32,
    slots: u32,
    units: u32,
    norm: bool,
    bias: bool,
    epilogue: u32,
    /// The code of the tags: 1 for those of x, 3 for those of y too.
    tagged: u32,
    devices: bool,
    /// What a program for experts has besides.
    experts: Option<Experts>,
}

impl Variant {
    fn of(kernel: &str, constants: &[u32]) -> Variant {
        match kernel == EXPERT_SKINNY_PTX.name {
            true => Variant::of_experts_call(&ExpertSkinnyConstants::from_values(constants)),
            false => Variant::of_product(constants),
        }
    }

    fn of_experts_call(c: &ExpertSkinnyConstants) -> Variant {
        let codes = format_of_word(c.codes).codes().expect("a format of codes");
        let rows = c.rows.next_power_of_two();
        Variant {
            codes,
            rows: if c.stage == 0 { rows } else { rows.min(BLOCK_ROWS) },
            stored_rows: c.rows,
            sections: 1,
            groups: c.threads / 32 - Experts::finishers(c.stage == 1),
            slots: c.ahead,
            units: c.columns.div_ceil(unit_cols(codes)),
            norm: c.stage == 0,
            bias: c.bias == 1,
            epilogue: if c.stage == 0 { c.glu } else { c.add },
            tagged: 3 * c.tagged,
            devices: c.devices == 1,
            experts: Some(Experts::of(c)),
        }
    }

    fn of_product(constants: &[u32]) -> Variant {
        let c = SkinnyCodesConstants::from_values(constants);
        let whole = Variant {
            codes: format_of_word(c.codes).codes().expect("a format of codes"),
            rows: c.rows.next_power_of_two(),
            stored_rows: c.rows,
            sections: 1,
            groups: c.threads / 32 - 1,
            slots: c.ahead,
            units: c.units,
            norm: c.norm == 1,
            bias: c.bias == 1,
            epilogue: c.epilogue,
            tagged: c.tagged,
            devices: c.devices == 1,
            experts: None,
        };
        whole.in_sections().expect("x fits in shared memory, as its call was made for it")
    }

    /// Returns the variant with as few sections as leave room for x in shared memory. With several, each group has units of all; one
    /// row has one section.
    fn in_sections(self) -> Option<Variant> {
        let with = |sections| Variant { sections, ..self };
        let most = if self.rows == 1 { 1 } else { (self.units / self.groups).max(1) };
        (1..=most).map(with).find(|v| v.shared_bytes() <= MOST_SHARED_BYTES)
    }

    fn threads(&self) -> u32 {
        (self.groups + self.finishers()) * 32
    }

    /// The number of groups of lanes that finish blocks, in turns.
    fn finishers(&self) -> u32 {
        self.experts.map_or(1, |experts| Experts::finishers(experts.down))
    }

    fn interface(&self) -> &'static shaders::Shader {
        if self.experts.is_some() { &EXPERT_SKINNY_PTX } else { &SKINNY_CODES_PTX }
    }

    /// Returns the offset of an argument.
    fn argument(&self, name: &str) -> u32 {
        let field = self.interface().fields.iter().find(|field| field.name == name);
        field.expect("an argument of the program").offset
    }

    /// Whether it is the first stage of experts, whose blocks are those of all that any row chose.
    fn is_first_stage(&self) -> bool {
        self.experts.is_some_and(|experts| !experts.down)
    }

    /// Whether it is the second stage of experts, whose sections are the experts that the groups do not multiply at once.
    fn is_second_stage(&self) -> bool {
        self.experts.is_some_and(|experts| experts.down)
    }

    /// Whether there may be more than one section.
    fn has_sections(&self) -> bool {
        self.sections > 1 || self.is_second_stage()
    }

    /// The number of groups of lanes that share the units of a block.
    fn splits(&self) -> u32 {
        match self.experts {
            Some(experts) if experts.down => experts.splits(self.groups, self.units),
            _ => self.groups,
        }
    }

    /// Whether a section has sums of some rows only: in the second stage of experts, those that chose an expert.
    fn adds_some_rows(&self) -> bool {
        self.is_second_stage() && self.rows > 1
    }

    /// Whether two rows of W make one value of y.
    fn halves(&self) -> bool {
        Epilogue::of_code(self.epilogue).halves()
    }

    /// What the codes of row v are multiplied by: codes of 4 bits stay in the upper half of their bytes.
    fn times_of_v(&self) -> f32 {
        if self.codes.number == Number::Affine && self.codes.bits == 4 { 16.0 } else { 1.0 }
    }

    /// Whether the columns of a block of x are those of groups of columns of W: not in groups of 128, which have one scale, so
    /// that all lanes with the same g have sums of the same group and rows of W.
    fn has_sets(&self) -> bool {
        self.is_integer() && self.codes.group < 128
    }

    fn is_integer(&self) -> bool {
        matches!(self.codes.number, Number::Affine | Number::E2m1)
    }

    /// The value of code 1, of integers.
    fn code_value(&self) -> f32 {
        if self.codes.number == Number::E2m1 { E2M1_HALF } else { CODE_VALUE }
    }

    /// The number of halves that are subtracted from all integers, unless each group has a minimum.
    fn zero_halves(&self) -> u32 {
        match (self.codes.number, self.codes.minimum) {
            (Number::E2m1, _) => 2 * E2M1_ZERO,
            (_, Minimum::Zero { halves }) => halves.into(),
            (_, Minimum::Stored) => 0,
        }
    }

    /// The most units of a group.
    fn own_units(&self) -> u32 {
        self.units.div_ceil(self.splits())
    }

    /// The number of 128 columns of a unit.
    fn parts(&self) -> u32 {
        unit_cols(self.codes) / 128
    }

    /// The number of rows of x in a block of x, and of blocks for all rows.
    fn block_rows(&self) -> u32 {
        self.rows.min(BLOCK_ROWS)
    }
    /// Of experts, one block has the rows of an entry of the list.
    fn row_blocks(&self) -> u32 {
        if self.experts.is_some() { 1 } else { self.rows / self.block_rows() }
    }
    /// The number of rows that a place has sums of: of y or, in the first stage of experts, of an entry of the list.
    fn sum_rows(&self) -> u32 {
        match self.experts {
            Some(experts) if experts.down => self.stored_rows.next_power_of_two(),
            Some(_) => self.block_rows(),
            None => self.rows,
        }
    }
    /// The number of groups of columns of a set: a block of x has four pairs of columns, one for each row of x and group.
    fn set_groups(&self) -> u32 {
        if self.has_sets() { 4 / self.block_rows() } else { 1 }
    }
    /// The number of sets of 128 columns.
    fn part_sets(&self) -> u32 {
        128 / self.codes.group / self.set_groups()
    }
    /// The number of blocks of 32 columns of a set; a set of one group of 16 has half a block.
    fn set_blocks(&self) -> u32 {
        (self.set_groups() * self.codes.group).div_ceil(32)
    }

    fn unit_bytes(&self) -> u32 {
        fragment_unit_bytes(self.codes)
    }
    /// The bytes of a slot: bulk copies to multiples of 128 bytes are faster.
    fn slot_bytes(&self) -> u32 {
        (self.factors_in_slot() + if self.is_second_stage() { BLOCK_HEADER as u32 } else { 0 }).next_multiple_of(128)
    }
    /// Where the factors of the rows of W are in a slot, in the second stage of experts.
    fn factors_in_slot(&self) -> u32 {
        self.unit_bytes()
    }
    /// The number of slots of a group that are filled before x has come.
    fn early_slots(&self) -> u32 {
        // Groups of 128 were measured to be faster with one of three.
        if self.is_integer() && !self.has_sets() { 1 } else { (self.slots - 1).max(1) }
    }
    fn block_bytes(&self) -> u32 {
        BLOCK_HEADER as u32 + self.units * self.unit_bytes()
    }

    /// The number of rows that are finished.
    fn finished_rows(&self) -> u32 {
        self.stored_rows.min(self.sum_rows())
    }
    /// The number of passes in which the last group finishes a block of W: two rows each.
    fn passes(&self) -> u32 {
        self.finished_rows().div_ceil(2)
    }
    /// Whether a pass has one row, which half of the lanes have: the last one of an odd number of rows.
    fn is_half(&self, pass: u32) -> bool {
        2 * pass + 1 == self.finished_rows()
    }
    /// Whether a row of x has two columns of a block, high and low or most and rest: of four rows of floats, the rest would take as
    /// much shared memory again.
    fn has_two_columns(&self) -> bool {
        self.is_integer() || self.rows < 4
    }
    /// The bytes of the factors of a row and a group of columns.
    fn factor_bytes(&self) -> u32 {
        if self.is_integer() { 8 } else { 4 }
    }
    /// The bytes of a column of a block of x, of 32 columns of W.
    fn column_bytes(&self) -> u32 {
        if self.is_integer() { 32 } else { 64 }
    }
    /// The bytes of a block of 32 columns of one row of x.
    fn row_bytes(&self) -> u32 {
        self.column_bytes() * if self.has_two_columns() { 2 } else { 1 }
    }
    /// The bytes of 128 columns of all rows of x without their factors, which follow, and with them.
    fn x_bytes(&self) -> u32 {
        4 * self.rows * self.row_bytes()
    }
    fn part_bytes(&self) -> u32 {
        let factors = if self.is_integer() { 128 / self.codes.group * 8 } else { 4 };
        self.x_bytes() + (self.rows * factors).next_multiple_of(16)
    }
    /// The number of 128 columns of x that a group polls for together, in all rows, with their norm's weights: of one row all, if
    /// there are registers for them; otherwise few.
    fn batch(&self) -> u32 {
        let own = self.section_parts();
        match self.rows {
            1 if own <= if self.norm { 3 } else { 6 } => own,
            1 => 2,
            // Several rows are read by a loop. Of a group with an odd number, the last 128 columns are zeros, for which there is room.
            2 if self.sections == 1 && own.is_multiple_of(2) => 2,
            _ => 1,
        }
    }

    // The shared memory, behind bytes that are not used: the groups' slots, then their x, the places of sums, the groups' sums of
    // squares, the barriers of full places, of empty places and of the groups' slots, and what is known about experts.
    fn unused_bytes(&self) -> u32 {
        LEAST_SHARED_BYTES.saturating_sub(self.used_bytes()).next_multiple_of(128)
    }
    fn x_at(&self) -> u32 {
        self.groups * self.slots * self.slot_bytes()
    }
    fn sums_at(&self) -> u32 {
        self.x_at() + self.groups * self.section_bytes()
    }
    /// The bytes of x of a group's section.
    fn section_bytes(&self) -> u32 {
        self.section_parts() * self.part_bytes()
    }
    /// The most 128 columns of a section.
    fn section_parts(&self) -> u32 {
        self.own_units().div_ceil(self.sections) * self.parts()
    }
    fn squares_at(&self) -> u32 {
        self.sums_at() + PLACES * self.groups * self.sum_rows() * 64
    }
    fn full_places_at(&self) -> u32 {
        (self.squares_at() + self.rows * self.groups * 4).next_multiple_of(8)
    }
    fn slot_barriers_at(&self) -> u32 {
        self.full_places_at() + 2 * PLACES * 8
    }
    fn experts_at(&self) -> u32 {
        (self.slot_barriers_at() + self.groups * self.slots * 8).next_multiple_of(16)
    }
    fn used_bytes(&self) -> u32 {
        self.experts_at() + self.experts.map_or(0, |experts| experts.bytes(self.stored_rows))
    }
    fn shared_bytes(&self) -> u32 {
        self.unused_bytes() + self.used_bytes()
    }
}

/// Returns the number of threads and of bytes of shared memory of a workgroup.
pub fn workgroup(kernel: &str, constants: &[u32]) -> (u32, u32) {
    let v = Variant::of(kernel, constants);
    (v.threads(), v.shared_bytes())
}

/// Returns the most blocks of 16 rows of W of a workgroup of `skinny_codes.ptx`: as many as there are places, if x is in sections.
pub fn most_blocks(constants: &[u32]) -> u32 {
    if Variant::of_product(constants).sections > 1 { PLACES } else { u32::MAX }
}

/// Returns the most blocks of a workgroup of `expert_skinny.codes.ptx`: in the second stage as many as there are places, if rows may
/// choose more experts than its groups multiply at once.
pub fn most_expert_blocks(constants: &[u32]) -> u32 {
    Variant::of(EXPERT_SKINNY_PTX.name, constants).most_expert_blocks()
}

/// Returns the program of a kernel for the constants of a call.
pub fn program(kernel: &str, constants: &[u32]) -> PtxProgram {
    let v = Variant::of(kernel, constants);
    let mut text = Text { ptx: PtxText::default(), v };
    text.write();
    PtxProgram { text: text.ptx.out, entry: ENTRY, threads: v.threads(), shared_bytes: v.shared_bytes() }
}

/// The name of the program's entry.
const ENTRY: &str = "skinny_codes";

struct Text {
    ptx: PtxText,
    v: Variant,
}

impl Text {
    fn write(&mut self) {
        let v = self.v;
        self.ptx.head(ENTRY, v.interface().push_bytes, v.threads());
        if v.experts.is_some() {
            self.expert_registers();
        }
        line!(
            self,
            ".reg .pred %p<8>, %mine<4>, %half, %first, %lead;
.reg .b16 %h<4>;
.reg .b32 %r<16>, %q<8>, %w<32>, %a<4>, %b<8>, %c<8>, %x<{xs}>, %polls, %looks;
.reg .b64 %l<4>, %from, %policy, %row<8>, %old_at<4>, %gains_at, %first_from;
.reg .f32 %f<16>, %gain<{gains}>, %d<8>, %sum_u<2>, %sum_v<2>, %least_v<2>, %fx<2>, %fs<2>, %squares<8>, %factor, %bias_of_row, %norm_scale<4>;
.reg .b32 %thread, %lane, %group, %g, %t, %base, %n, %k, %x_tag, %y_tag, %old_tag;
.reg .b32 %own, %first_unit, %copies, %of_block, %slots, %slot_at, %barriers, %barrier_at, %phase, %left;
.reg .b32 %own_x, %x_at, %factors_at, %own_scales, %turn, %old<4>, %no_x;
.reg .b32 %x_start, %x_to, %factors_start, %factors_to, %quad, %parts_left;
.reg .b32 %section, %of_section, %copied_section, %copies_of_section, %blocks, %block, %total_blocks, %split;
.reg .b64 %weight, %x, %norm, %bias, %y, %fault;",
            xs = v.batch() * v.block_rows() * 4,
            gains = v.batch() * 4,
        );
        for name in ["weight", "x", "norm", "bias", "y", "fault"] {
            line!(self, "ld.param.u64 %{name}, [args+{}];", v.argument(name));
        }
        for name in ["n", "x_tag", "old_tag", "y_tag"] {
            line!(self, "ld.param.u32 %{name}, [args+{}];", v.argument(name));
        }
        match v.experts {
            Some(experts) => line!(self, "mov.u32 %k, {};", experts.columns()),
            None => line!(self, "ld.param.u32 %k, [args+{}];", v.argument("k")),
        }
        line!(
            self,
            "and.b32 %no_x, %x_tag, {TAG_MASK};
mov.u32 %base, shared;
add.u32 %base, %base, {unused};
mov.u32 %thread, %tid.x;
shr.u32 %group, %thread, 5;
// NVIDIA's assembler sees by the shuffle that it is the same in all lanes, and so what follows from it.
shfl.sync.idx.b32 %group, %group, 0, 31, 0xffffffff;
and.b32 %lane, %thread, 31;
shr.u32 %g, %lane, 2;
and.b32 %t, %lane, 3;
mov.u32 %polls, 0;
mov.u32 %turn, 0;
setp.eq.u32 %lead, %lane, 0;
setp.ge.u32 %p0, %group, {groups};
@%p0 bra FINISHER;",
            groups = v.groups,
            unused = v.unused_bytes(),
        );
        self.begin_group();
        if v.names_rows() {
            line!(self, "bar.sync 0, {};", v.threads());
        }
        if v.is_first_stage() {
            // x comes before the router's logits.
            self.begin_x();
            self.read_x();
            self.list_experts();
            self.begin_copies();
            self.fill(0..v.slots);
        } else {
            if v.is_second_stage() {
                self.list_experts();
            }
            self.begin_copies();
            self.fill(0..v.early_slots());
            if v.experts.is_none() {
                line!(self, "bar.sync 0, {};", v.threads());
            }
            self.begin_x();
            self.read_x();
            self.fill(v.early_slots()..v.slots);
        }
        self.begin_products();
        if v.has_sections() {
            line!(self, "bra SECTION;\nNEXTSECTION:");
            self.section("%section", "%of_section");
            self.read_x();
            line!(self, "SECTION:");
        }
        self.products();
        if v.has_sections() {
            line!(
                self,
                "mov.u32 %turn, 0;
add.u32 %section, %section, 1;
setp.le.u32 %p0, %section, {};
@%p0 bra NEXTSECTION;",
                self.last_section()
            );
        }
        line!(self, "ret;\nFINISHER:");
        self.finisher();
        line!(self, "ret;\n}}");
    }

    /// Sets the registers that say which units the group multiplies, and makes its slots, with all lanes of the group.
    fn begin_group(&mut self) {
        let v = self.v;
        match v.is_second_stage() {
            true => self.split_groups(),
            false => line!(self, "mov.u32 %split, %group;"),
        }
        line!(
            self,
            "mul.lo.u32 %r0, %split, {units};
div.u32 %first_unit, %r0, {splits};
add.u32 %r0, %r0, {units};
div.u32 %own, %r0, {splits};
sub.u32 %own, %own, %first_unit;
mad.lo.u32 %slots, %group, {slots_bytes}, %base;
mad.lo.u32 %barriers, %group, {barriers_bytes}, %base;
add.u32 %barriers, %barriers, {barriers_at};
mov.u32 %section, 0;
mov.u32 %of_section, %own;
@!%lead bra INITIAL;",
            units = v.units,
            splits = v.splits(),
            slots_bytes = v.slots * v.slot_bytes(),
            barriers_bytes = v.slots * 8,
            barriers_at = v.slot_barriers_at(),
        );
        for slot in 0..v.slots {
            line!(self, "mbarrier.init.shared::cta.b64 [%barriers+{}], 1;", slot * 8);
        }
        line!(
            self,
            "fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\nINITIAL:\nbar.warp.sync 0xffffffff;"
        );
    }

    /// Sets the registers of the copies to slots.
    fn begin_copies(&mut self) {
        let v = self.v;
        if v.experts.is_none() {
            line!(self, "add.u32 %total_blocks, %n, 15;\nshr.u32 %total_blocks, %total_blocks, 4;");
        }
        line!(
            self,
            "// The units of the workgroup's blocks.
mov.u32 %r1, %ctaid.x;
mov.u32 %r2, %nctaid.x;
sub.u32 %r0, %total_blocks, %r1;
add.u32 %r0, %r0, %r2;
sub.u32 %r0, %r0, 1;
div.u32 %blocks, %r0, %r2;
mul.lo.u32 %copies, %blocks, %own;
mov.u32 %block, %blocks;
mov.u32 %copied_section, 0;
mul.wide.u32 %first_from, %first_unit, {unit_bytes};
add.u64 %first_from, %first_from, %weight;
add.u64 %first_from, %first_from, {BLOCK_HEADER};",
            unit_bytes = v.unit_bytes(),
        );
        match v.experts {
            None => self.first_unit_of("%r1"),
            Some(experts) if experts.down => {
                self.count_copies();
                line!(
                    self,
                    "mul.wide.u32 %header, %first_unit, {};\nadd.u64 %header, %header, {BLOCK_HEADER};",
                    v.unit_bytes()
                );
                self.source();
            }
            Some(_) => {
                self.first_listed("%copy_entry", "%copy_block", 1);
                self.source();
            }
        }
        if v.has_sections() {
            self.section("%section", "%of_section");
        }
        line!(
            self,
            "mov.u32 %copies_of_section, %of_section;
mov.u32 %of_block, %of_section;
createpolicy.fractional.L2::evict_first.b64 %policy;"
        );
    }

    /// Sets %from to the group's first unit of a block of the weights' buffer.
    fn first_unit_of(&mut self, block: &str) {
        let block_bytes = self.v.block_bytes();
        line!(self, "mul.wide.u32 %from, {block}, {block_bytes};\nadd.u64 %from, %from, %first_from;");
    }

    /// Returns the number of the last section: a number or a register.
    fn last_section(&self) -> String {
        match self.v.is_second_stage() {
            true => "%last_section".to_owned(),
            false => (self.v.sections - 1).to_string(),
        }
    }

    /// Sets the register `count` to the number of units of the group's section in the register `section`. %r0 and %r1 change, in the
    /// second stage of experts %e0 and %p1.
    fn section(&mut self, section: &str, count: &str) {
        if self.v.is_second_stage() {
            return self.section_units(section, count);
        }
        let sections = self.v.sections;
        line!(
            self,
            "mul.lo.u32 %r0, %own, {section};
add.u32 %r1, %r0, %own;
div.u32 %r0, %r0, {sections};
div.u32 %r1, %r1, {sections};
sub.u32 {count}, %r1, %r0;"
        );
    }

    /// Copies the group's next units, as far as there are any, to empty slots.
    fn fill(&mut self, slots: std::ops::Range<u32>) {
        let slot_bytes = self.v.slot_bytes();
        for slot in slots {
            line!(
                self,
                "add.u32 %slot_at, %slots, {};\nadd.u32 %barrier_at, %barriers, {};",
                slot * slot_bytes,
                slot * 8
            );
            self.copy(false);
        }
    }

    /// Copies the group's next unit, if there is one, to the slot at %slot_at, whose barrier is at %barrier_at: to an empty slot
    /// or, with `read`, to one that all lanes have read before a `bar.warp.sync` in front of this. A fence then orders their reads
    /// before the copy's writes. The first lane copies; all lanes count, so that most counters and addresses are in registers
    /// that the lanes share.
    fn copy(&mut self, read: bool) {
        let (label, unit_bytes, block_bytes) = (self.ptx.label(), self.v.unit_bytes(), self.v.block_bytes());
        line!(self, "setp.eq.u32 %p0, %copies, 0;\n@%p0 bra NONE{label};\n@!%lead bra COPIED{label};");
        if read {
            line!(self, "fence.proxy.async.shared::cta;");
        }
        let mut bytes = unit_bytes.to_string();
        if self.v.is_second_stage() {
            // With the first unit of a block, the factors of its rows are copied.
            bytes = "%r0".to_owned();
            line!(
                self,
                "setp.eq.u32 %p1, %of_block, %copies_of_section;
selp.b32 %r0, {both}, {unit_bytes}, %p1;
sub.u64 %l0, %from, %header;
add.u32 %r1, %slot_at, {factors};",
                both = unit_bytes + BLOCK_HEADER as u32,
                factors = self.v.factors_in_slot(),
            );
        }
        line!(self, "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%barrier_at], {bytes};");
        if self.v.is_second_stage() {
            line!(
                self,
                "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%r1], [%l0], {BLOCK_HEADER}, [%barrier_at], %policy;"
            );
        }
        line!(
            self,
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%slot_at], [%from], {unit_bytes}, [%barrier_at], %policy;
COPIED{label}:
bar.warp.sync 0xffffffff;
sub.u32 %copies, %copies, 1;
add.u64 %from, %from, {unit_bytes};
sub.u32 %of_block, %of_block, 1;
setp.ne.u32 %p0, %of_block, 0;
@%p0 bra NONE{label};"
        );
        if self.v.experts.is_some() {
            line!(self, "setp.eq.u32 %p0, %copies, 0;\n@%p0 bra NONE{label};");
        }
        if self.v.is_first_stage() {
            self.next_listed("%copy_entry", "%copy_block");
            self.source();
            line!(self, "mov.u32 %of_block, %copies_of_section;\nNONE{label}:");
            return;
        }
        line!(
            self,
            "mov.u32 %r0, %nctaid.x;
mul.wide.u32 %l0, %r0, {block_bytes};
add.u64 %from, %from, %l0;
mul.wide.u32 %l1, %copies_of_section, {unit_bytes};
sub.u64 %from, %from, %l1;
mov.u32 %of_block, %copies_of_section;"
        );
        if self.v.has_sections() {
            // Behind the last block, the next section of the first one follows.
            line!(
                self,
                "sub.u32 %block, %block, 1;
setp.ne.u32 %p0, %block, 0;
@%p0 bra NONE{label};
mov.u32 %block, %blocks;"
            );
        }
        if self.v.is_second_stage() {
            line!(self, "add.u32 %copied_section, %copied_section, 1;");
            self.source();
        }
        if self.v.sections > 1 {
            line!(
                self,
                "mul.lo.u32 %r0, %r0, %blocks;
mul.wide.u32 %l0, %r0, {block_bytes};
sub.u64 %from, %from, %l0;
add.u64 %from, %from, %l1;
add.u32 %copied_section, %copied_section, 1;"
            );
            self.section("%copied_section", "%copies_of_section");
            line!(self, "mov.u32 %of_block, %copies_of_section;");
        }
        line!(self, "NONE{label}:");
    }

    /// Jumps to `again` if a lane has a stale word, unless the wait is given up. %r0 has the bits in which the lane's words differ
    /// from `tag`, their awaited tag.
    fn poll_again(&mut self, again: &str, tag: &str) {
        let label = self.ptx.label();
        line!(
            self,
            "and.b32 %r0, %r0, {TAG_MASK};
setp.ne.u32 %p0, %r0, 0;
vote.sync.any.pred %p0, %p0, 0xffffffff;
@!%p0 bra FRESH{label};
add.u32 %polls, %polls, 1;
and.b32 %looks, %polls, {};
setp.ne.u32 %p0, %looks, 0;
@%p0 bra {again};",
            POLLS_BETWEEN_LOOKS - 1
        );
        if self.v.devices {
            // Time in which a call waits for another device does not count.
            line!(
                self,
                "ld.volatile.global.u32 %looks, [%fault+4];
setp.ne.u32 %p0, %looks, 0;
@%p0 mov.u32 %polls, 0;"
            );
        }
        line!(
            self,
            "setp.lt.u32 %p0, %polls, {MOST_POLLS};
@%p0 bra LOOK{label};
shr.u32 %looks, {tag}, {CALL_SHIFT};
max.u32 %looks, %looks, 1;
st.volatile.global.u32 [%fault], %looks;
LOOK{label}:
ld.volatile.global.u32 %looks, [%fault];
setp.eq.u32 %p0, %looks, 0;
@%p0 bra {again};
FRESH{label}:"
        );
    }

    /// Prepares the reading of x.
    fn begin_x(&mut self) {
        let v = self.v;
        for row in 0..v.rows {
            line!(self, "mov.f32 %squares{row}, 0f00000000;");
        }
        line!(
            self,
            "mad.lo.u32 %own_x, %group, {x_bytes}, %base;
add.u32 %own_x, %own_x, {x_at};
// The lane has 4 columns of block %r8 of 32: 8 columns for each %r9, 4 for each %r10. Their place is %x_start.
shr.u32 %r8, %lane, 3;
shr.u32 %r9, %lane, 1;
and.b32 %r9, %r9, 3;
and.b32 %r10, %lane, 1;
mad.lo.u32 %x_start, %r8, {block_bytes}, %own_x;
mad.lo.u32 %x_start, %r9, {quarter}, %x_start;
mad.lo.u32 %x_start, %r10, {eighth}, %x_start;
// Its first 16 bytes of x.
mul.lo.u32 %quad, %first_unit, {unit_quads};
add.u32 %quad, %quad, %lane;",
            x_bytes = v.section_bytes(),
            x_at = v.x_at(),
            block_bytes = v.rows * v.row_bytes(),
            quarter = v.column_bytes() / 4,
            eighth = v.column_bytes() / 8,
            unit_quads = unit_cols(v.codes) / 4,
        );
        // The place of the factors of the lane's columns, and whether it is the lane that writes them.
        match v.codes.group {
            16 => line!(
                self,
                "shr.u32 %r0, %lane, 2;\nand.b32 %r1, %lane, 3;\nmad.lo.u32 %factors_start, %r0, {}, %own_x;",
                8 * v.rows
            ),
            32 => line!(self, "and.b32 %r1, %lane, 7;\nmad.lo.u32 %factors_start, %r8, {}, %own_x;", 8 * v.rows),
            _ => line!(self, "mov.u32 %r1, %lane;\nmov.u32 %factors_start, %own_x;"),
        }
        line!(
            self,
            "setp.eq.u32 %first, %r1, 0;
mul.wide.u32 %l1, %quad, 16;
add.u64 %row0, %x, %l1;
add.u64 %gains_at, %norm, %l1;"
        );
        if v.is_second_stage() {
            return;
        }
        for row in 1..v.rows {
            if row >= v.stored_rows {
                line!(self, "mov.u64 %row{row}, %row{};", row - 1);
                continue;
            }
            line!(
                self,
                "ld.param.u32 %r0, [args+{stride}];\nmul.wide.u32 %l2, %r0, 4;\nadd.u64 %row{row}, %row{}, %l2;",
                row - 1,
                stride = v.argument("x_stride")
            );
        }
    }

    /// Writes the columns of x of the group's section to shared memory, and the sums of the squares of all so far.
    fn read_x(&mut self) {
        let v = self.v;
        let (parts, batch) = (v.section_parts(), v.batch());
        if v.is_second_stage() {
            self.section_rows();
        }
        line!(
            self,
            "mov.u32 %x_to, %x_start;\nmov.u32 %factors_to, %factors_start;\nmul.lo.u32 %parts_left, %of_section, {};",
            v.parts()
        );
        if v.rows == 1 {
            for first in (0..parts).step_by(batch as usize) {
                self.read_parts(first..(first + batch).min(parts), 0..1);
            }
        } else {
            // A loop: the code for all parts would fill the instruction cache.
            let label = self.ptx.label();
            line!(self, "setp.eq.u32 %p0, %parts_left, 0;\n@%p0 bra READ{label};\nPARTS{label}:");
            for first in (0..v.rows).step_by(v.block_rows() as usize) {
                self.read_parts(0..batch, first..first + v.block_rows());
            }
            for row in 0..v.rows {
                line!(self, "add.u64 %row{row}, %row{row}, {};", batch * 512);
            }
            line!(
                self,
                "add.u64 %gains_at, %gains_at, {columns};
add.u32 %quad, %quad, {quads};
add.u32 %x_to, %x_to, {bytes};
add.u32 %factors_to, %factors_to, {bytes};
setp.gt.u32 %p0, %parts_left, {batch};
sub.u32 %parts_left, %parts_left, {batch};
@%p0 bra PARTS{label};
READ{label}:",
                columns = batch * 512,
                quads = batch * 32,
                bytes = batch * v.part_bytes(),
            );
        }
        if v.norm {
            line!(self, "mad.lo.u32 %r0, %group, 4, %base;");
            for row in 0..v.rows {
                line!(self, "mov.f32 %f1, %squares{row};");
                for mask in [1, 2, 4, 8, 16] {
                    line!(self, "shfl.sync.bfly.b32 %f0, %f1, {mask}, 31, 0xffffffff;\nadd.f32 %f1, %f1, %f0;");
                }
                let at = v.squares_at() + row * v.groups * 4;
                line!(self, "@%lead st.shared.f32 [%r0+{at}], %f1;");
            }
        }
        line!(self, "bar.warp.sync 0xffffffff;");
    }

    /// Reads 128 columns each of `parts` behind %row0 and the others, of some rows, and writes them behind %x_to.
    fn read_parts(&mut self, parts: std::ops::Range<u32>, rows: std::ops::Range<u32>) {
        let v = self.v;
        let count = rows.end - rows.start;
        let first_of = |i: u32, row: u32| (i * count + row - rows.start) * 4;
        // Columns that do not exist are not loaded: they are zeros with the awaited tag, subnormal numbers.
        for (i, part) in (0..).zip(parts.clone()) {
            line!(
                self,
                "add.u32 %r0, %quad, {quads};
setp.gt.u32 %p{there}, %parts_left, {part};
shl.b32 %r1, %r0, 2;
setp.lt.and.u32 %p{there}, %r1, %k, %p{there};",
                quads = part * 32,
                there = i + 1,
            );
            for e in i * count * 4..(i + 1) * count * 4 {
                line!(self, "mov.b32 %x{e}, %no_x;");
            }
            if v.norm {
                for e in i * 4..i * 4 + 4 {
                    line!(self, "mov.f32 %gain{e}, 0f00000000;");
                }
                line!(
                    self,
                    "@%p{} ld.global.nc.v4.f32 {{{}}}, [%gains_at+{}];",
                    i + 1,
                    registers("gain", i * 4..i * 4 + 4),
                    part * 512
                );
            }
        }
        let label = self.ptx.label();
        line!(self, "POLL{label}:");
        for (i, part) in (0..).zip(parts.clone()) {
            for row in rows.clone() {
                let mut there = i + 1;
                if v.is_second_stage() {
                    line!(self, "and.pred %p7, %p{there}, %chose{row};");
                    there = 7;
                }
                line!(
                    self,
                    "@%p{there} ld.volatile.global.v4.u32 {{{}}}, [%row{row}+{}];",
                    registers("x", first_of(i, row)..first_of(i, row) + 4),
                    part * 512
                );
            }
        }
        if v.tagged > 0 {
            line!(self, "mov.u32 %r0, 0;");
            for i in 0..(parts.end - parts.start) * count * 4 {
                line!(self, "xor.b32 %r1, %x{i}, %x_tag;\nor.b32 %r0, %r0, %r1;");
            }
            self.poll_again(&format!("POLL{label}"), "%x_tag");
        }
        for (i, part) in (0..).zip(parts) {
            for row in rows.clone() {
                // x of rows that did not choose the expert is not multiplied: their sums are not added up.
                let label = self.ptx.label();
                let some = v.adds_some_rows();
                if some {
                    line!(self, "@!%chose{row} bra ABSENT{label};");
                }
                self.prepare_x((first_of(i, row), i * 4), part, row);
                if some {
                    line!(self, "ABSENT{label}:");
                }
            }
        }
    }

    /// Writes the lane's four columns of a row of x, of the `part`-th 128 columns; they are in the registers %x from `x` on, and their
    /// norm's weights in %gain from `gain` on.
    fn prepare_x(&mut self, (x, gain): (u32, u32), part: u32, row: u32) {
        let v = self.v;
        for e in 0..4 {
            line!(self, "mov.b32 %f{e}, %x{};", x + e);
        }
        if v.norm {
            for e in 0..4 {
                line!(
                    self,
                    "fma.rn.f32 %squares{row}, %f{e}, %f{e}, %squares{row};\nmul.f32 %f{e}, %f{e}, %gain{};",
                    gain + e
                );
            }
        }
        // As integers, NaN is larger than infinity.
        for e in 0..4 {
            line!(self, "abs.f32 %f{a}, %f{e};\nmov.b32 %r{e}, %f{a};", a = 4 + e);
        }
        line!(self, "max.u32 %r0, %r0, %r1;\nmax.u32 %r2, %r2, %r3;\nmax.u32 %r0, %r0, %r2;");
        if v.has_sets() {
            for mask in [1, 2, 4] {
                line!(self, "shfl.sync.bfly.b32 %r1, %r0, {mask}, 31, 0xffffffff;\nmax.u32 %r0, %r0, %r1;");
            }
        } else {
            line!(self, "redux.sync.max.u32 %r0, %r0, 0xffffffff;");
        }
        // %f9 scales x; %f10 undoes it. Below 1e-30 the inverse could overflow; of the largest numbers it is subnormal. The
        // factor is NaN if a column is not finite: infinity times 0 is NaN.
        let most = if v.is_integer() { MOST } else { 1.0 };
        line!(
            self,
            "max.u32 %r0, %r0, {least:#x};
mov.b32 %f8, %r0;
rcp.approx.f32 %f9, %f8;
mul.f32 %f9, %f9, {most};
mul.f32 %f10, %f8, {inverse};
fma.rn.f32 %f10, %f8, 0f00000000, %f10;",
            most = float(most),
            inverse = float(1.0 / most),
            least = 1e-30f32.to_bits(),
        );
        let x_at = part * v.part_bytes() + row * v.row_bytes();
        let factors_at = part * v.part_bytes() + v.x_bytes() + row * v.factor_bytes();
        if !v.is_integer() {
            for e in 0..4 {
                line!(self, "mul.f32 %f{e}, %f{e}, %f9;");
            }
            // Bytes 0 and 2 of a word of W become a pair of f16, and bytes 1 and 3: see `words`.
            for (to, [a, b]) in [(0, [0, 2]), (1, [1, 3])] {
                line!(self, "cvt.rn.f16x2.f32 %r{to}, %f{b}, %f{a};");
                if v.has_two_columns() {
                    line!(
                        self,
                        "mov.b32 {{%h0, %h1}}, %r{to};
cvt.f32.f16 %f4, %h0;
cvt.f32.f16 %f5, %h1;
sub.f32 %f4, %f{a}, %f4;
sub.f32 %f5, %f{b}, %f5;
cvt.rn.f16x2.f32 %r{rest}, %f5, %f4;",
                        rest = to + 2,
                    );
                }
            }
            line!(self, "st.shared.v2.b32 [%x_to+{x_at}], {{%r0, %r1}};");
            if v.has_two_columns() {
                line!(self, "st.shared.v2.b32 [%x_to+{}], {{%r2, %r3}};", x_at + v.column_bytes());
            }
            line!(
                self,
                "mul.f32 %f10, %f10, {value};
@%lead st.shared.f32 [%factors_to+{factors_at}], %f10;",
                value = float(E4M3_VALUE),
            );
            return;
        }
        for e in 0..4 {
            line!(self, "fma.rn.f32 %f{e}, %f{e}, %f9, {};\nmov.b32 %r{e}, %f{e};", float(f32::from_bits(MAGIC)));
        }
        // %r4: the sum. %r5 and %r6: the low and the high bytes, in the order of the codes in a word of W: see `words`.
        line!(
            self,
            "add.u32 %r4, %r0, %r1;
add.u32 %r5, %r2, %r3;
add.u32 %r4, %r4, %r5;
sub.u32 %r4, %r4, {all_magic};
prmt.b32 %r5, %r0, %r2, 0x0040;
prmt.b32 %r6, %r1, %r3, 0x0040;
prmt.b32 %r5, %r5, %r6, 0x5410;
xor.b32 %r5, %r5, 0x80808080;
prmt.b32 %r6, %r0, %r2, 0x0051;
prmt.b32 %r7, %r1, %r3, 0x0051;
prmt.b32 %r6, %r6, %r7, 0x5410;
st.shared.b32 [%x_to+{x_at}], %r6;
st.shared.b32 [%x_to+{low}], %r5;",
            all_magic = MAGIC.wrapping_mul(4),
            low = x_at + v.column_bytes(),
        );
        if v.has_sets() {
            for mask in [1, 2, 4].into_iter().filter(|mask| mask * 4 < v.codes.group) {
                line!(self, "shfl.sync.bfly.b32 %r5, %r4, {mask}, 31, 0xffffffff;\nadd.u32 %r4, %r4, %r5;");
            }
        } else {
            line!(self, "redux.sync.add.s32 %r4, %r4, 0xffffffff;");
        }
        line!(
            self,
            "cvt.rn.f32.s32 %f11, %r4;
mul.f32 %f11, %f11, %f10;
neg.f32 %f11, %f11;
mul.f32 %f10, %f10, {value};
@%first st.shared.v2.f32 [%factors_to+{factors_at}], {{%f10, %f11}};",
            value = float(v.code_value()),
        );
    }

    /// Sets the registers that say what the lane multiplies.
    fn begin_products(&mut self) {
        let v = self.v;
        let (unit_groups, log_rows) = (unit_cols(v.codes) / v.codes.group, v.block_rows().ilog2());
        // The lane's sums are those of row t % rows of each block of x and of group t / rows of a set. The column of x that it
        // gives to the products is that of row %r2 and of group %r1.
        line!(
            self,
            "shr.u32 %r0, %t, {log_rows};
and.b32 %r0, %r0, {scale_mask};
mad.lo.u32 %r0, %g, {unit_groups}, %r0;
shl.b32 %own_scales, %r0, 2;
shr.u32 %r1, %g, 1;
and.b32 %r2, %r1, {last_row};
shr.u32 %r1, %r1, {log_rows};
and.b32 %r3, %g, 1;
mad.lo.u32 %x_at, %r3, {second_column}, %own_x;
mad.lo.u32 %x_at, %t, {quarter}, %x_at;
add.u32 %factors_at, %own_x, {x_bytes};",
            scale_mask = v.set_groups() - 1,
            last_row = v.block_rows() - 1,
            second_column = v.row_bytes() - v.column_bytes(),
            quarter = v.column_bytes() / 4,
            x_bytes = v.x_bytes(),
        );
        // Rows that an entry names are added for each block.
        let named = v.is_first_stage() && v.names_rows();
        if named {
            line!(self, "mov.u32 %first_x, %x_at;\nmov.u32 %first_factors, %factors_at;\nmov.u32 %row_of_column, %r2;");
        } else {
            line!(self, "mad.lo.u32 %x_at, %r2, {}, %x_at;", v.row_bytes());
        }
        if v.has_sets() {
            if !named {
                line!(self, "mad.lo.u32 %factors_at, %t, 8, %factors_at;");
            }
            if v.codes.group == 16 {
                // Group %r1 is in block %r1 / 2, in the columns of two of the four lanes of a column.
                line!(
                    self,
                    "shr.u32 %r0, %t, 1;
and.b32 %r3, %r1, 1;
setp.eq.u32 %half, %r0, %r3;
shr.u32 %r1, %r1, 1;"
                );
            }
            let first = if named { "%first_x" } else { "%x_at" };
            line!(self, "mad.lo.u32 {first}, %r1, {}, {first};", v.rows * v.row_bytes());
            for c in 0..v.set_blocks() {
                match v.codes.group {
                    16 => line!(self, "setp.eq.and.u32 %mine{c}, %r1, {c}, %half;"),
                    _ => line!(self, "setp.eq.u32 %mine{c}, %r1, {c};"),
                }
            }
        } else if !named {
            line!(
                self,
                "and.b32 %r0, %t, {};\nmad.lo.u32 %factors_at, %r0, {}, %factors_at;",
                v.block_rows() - 1,
                v.factor_bytes()
            );
        }
        line!(self, "mov.u32 %slot_at, %slots;\nmov.u32 %barrier_at, %barriers;\nmov.u32 %phase, 0;");
    }

    /// Computes the sums of the group's section of all blocks.
    fn products(&mut self) {
        let v = self.v;
        let named = v.is_first_stage() && v.names_rows();
        if named {
            self.first_listed("%listed", "%of_listed", 1);
        }
        line!(self, "BLOCK:");
        if named {
            self.named_rows();
        }
        for of in 0..v.row_blocks() {
            line!(
                self,
                "mov.f32 %sum_u{of}, 0f00000000;\nmov.f32 %sum_v{of}, 0f00000000;\nmov.f32 %least_v{of}, 0f00000000;"
            );
        }
        line!(
            self,
            "mov.u32 %left, %of_section;
setp.eq.u32 %p0, %left, 0;
@%p0 bra SUMMED;
UNIT:"
        );
        self.ptx.wait_counting("%barrier_at", "%phase", "%looks", "%p0");
        if v.is_second_stage() {
            // The factors of the lane's rows of W, u and v, come with the block's first unit.
            line!(
                self,
                "setp.eq.u32 %p0, %left, %of_section;
shr.u32 %r0, %lane, 3;
mad.lo.u32 %r0, %r0, 16, %slot_at;
bfe.u32 %r1, %lane, 2, 1;
mad.lo.u32 %r0, %r1, 4, %r0;
@%p0 ld.shared.f32 %factor_u, [%r0+{at}];
@%p0 ld.shared.f32 %factor_v, [%r0+{at_v}];",
                at = v.factors_in_slot(),
                at_v = v.factors_in_slot() + 8,
            );
        }
        line!(self, "mad.lo.u32 %r13, %lane, 16, %slot_at;\nadd.u32 %r14, %slot_at, %own_scales;");
        match v.is_integer() {
            true => self.integer_unit(),
            false => self.float_unit(),
        }
        line!(self, "bar.warp.sync 0xffffffff;");
        self.copy(true);
        line!(
            self,
            "add.u32 %x_at, %x_at, {unit_x};
add.u32 %factors_at, %factors_at, {unit_x};
add.u32 %slot_at, %slot_at, {slot_bytes};
add.u32 %barrier_at, %barrier_at, 8;
add.u32 %r0, %slots, {slots_bytes};
setp.eq.u32 %p0, %slot_at, %r0;
@%p0 mov.u32 %slot_at, %slots;
@%p0 mov.u32 %barrier_at, %barriers;
@%p0 xor.b32 %phase, %phase, 1;
sub.u32 %left, %left, 1;
setp.ne.u32 %p0, %left, 0;
@%p0 bra UNIT;
mul.lo.u32 %r0, %of_section, {unit_x};
sub.u32 %x_at, %x_at, %r0;
sub.u32 %factors_at, %factors_at, %r0;
SUMMED:",
            unit_x = v.parts() * v.part_bytes(),
            slot_bytes = v.slot_bytes(),
            slots_bytes = v.slots * v.slot_bytes(),
        );
        for of in 0..v.row_blocks() {
            if v.is_integer() {
                line!(self, "fma.rn.f32 %sum_v{of}, %sum_v{of}, {}, %least_v{of};", float(1.0 / v.times_of_v()));
            }
            if v.has_sets() {
                for mask in [1, 2].into_iter().filter(|mask| *mask >= v.block_rows()) {
                    line!(
                        self,
                        "shfl.sync.bfly.b32 %f0, %sum_u{of}, {mask}, 31, 0xffffffff;
shfl.sync.bfly.b32 %f1, %sum_v{of}, {mask}, 31, 0xffffffff;
add.f32 %sum_u{of}, %sum_u{of}, %f0;
add.f32 %sum_v{of}, %sum_v{of}, %f1;"
                    );
                }
            }
        }
        if v.is_second_stage() {
            line!(self, "setp.ne.u32 %p0, %of_section, 0;");
            for of in 0..v.row_blocks() {
                line!(
                    self,
                    "@%p0 mul.f32 %sum_u{of}, %sum_u{of}, %factor_u;\n@%p0 mul.f32 %sum_v{of}, %sum_v{of}, %factor_v;"
                );
            }
        }
        // A place is empty at first, as after the second phase of its barrier.
        self.place();
        line!(self, "xor.b32 %r2, %r2, 1;\nadd.u32 %r1, %r1, {};", PLACES * 8);
        self.ptx.wait_for_group("%r1", "%r2", "%p0");
        line!(
            self,
            "mad.lo.u32 %r0, %r0, {groups}, %group;
mad.lo.u32 %r0, %r0, {group_bytes}, %base;
// The first of the lane's rows of W, u.
shr.u32 %r2, %lane, 3;
mad.lo.u32 %r0, %r2, 16, %r0;
bfe.u32 %r2, %lane, 2, 1;
mad.lo.u32 %r0, %r2, 4, %r0;",
            groups = v.groups,
            group_bytes = v.sum_rows() * 64,
        );
        match v.adds_some_rows() {
            true => self.place_of_row(),
            false => {
                line!(self, "mad.lo.u32 %r0, %t, 64, %r0;\nsetp.lt.u32 %p0, %t, {};", v.block_rows());
            }
        }
        let sums = |of: u32| v.sums_at() + of * v.block_rows() * 64;
        let (mut full, mut arrives) = (String::new(), "%lead");
        if v.has_sections() {
            // All sections but the first add to the place; it is full with the last one.
            match v.adds_some_rows() {
                true => line!(self, "and.pred %p1, %p0, %p0;"),
                false => line!(self, "setp.ne.and.u32 %p1, %section, 0, %p0;"),
            }
            for of in 0..v.row_blocks() {
                for (sum, at) in [("%sum_u", sums(of)), ("%sum_v", sums(of) + 8)] {
                    line!(self, "@%p1 ld.shared.f32 %f0, [%r0+{at}];\n@%p1 add.f32 {sum}{of}, {sum}{of}, %f0;");
                }
            }
            full = format!("setp.eq.and.u32 %p1, %section, {}, %lead;\n", self.last_section());
            arrives = "%p1";
        }
        for of in 0..v.row_blocks() {
            line!(
                self,
                "@%p0 st.shared.f32 [%r0+{}], %sum_u{of};\n@%p0 st.shared.f32 [%r0+{}], %sum_v{of};",
                sums(of),
                sums(of) + 8
            );
        }
        line!(
            self,
            "{full}bar.warp.sync 0xffffffff;
sub.u32 %r1, %r1, {places};
@{arrives} mbarrier.arrive.shared::cta.b64 _, [%r1];",
            places = PLACES * 8,
        );
        if named {
            self.next_listed("%listed", "%of_listed");
        }
        self.next_turn("BLOCK", 1);
    }

    /// Sets %r0 to the place of the block's sums, %r1 to the barrier that says when it is full, and %r2 to the barrier's phase.
    fn place(&mut self) {
        line!(
            self,
            "and.b32 %r0, %turn, {};
mad.lo.u32 %r1, %r0, 8, %base;
add.u32 %r1, %r1, {};
shr.u32 %r2, %turn, {};
and.b32 %r2, %r2, 1;",
            PLACES - 1,
            self.v.full_places_at(),
            PLACES.ilog2(),
        );
    }

    /// Adds the products of affine codes of the unit in the slot, whose words for the lane begin at %r13 and scales at %r14.
    fn integer_unit(&mut self) {
        let v = self.v;
        let codes = v.codes;
        let unit_groups = unit_cols(codes) / codes.group;
        let block_bytes = v.rows * v.row_bytes();
        let scales = self.load_codes();
        for set in 0..v.parts() * v.part_sets() {
            let scale = scales + set * v.set_groups() * 4;
            let (part, of_part) = (set / v.part_sets() * v.part_bytes(), set % v.part_sets());
            // The first of the set's blocks in the 128 columns, and whether it is the second half of one.
            let first_column = of_part * v.set_groups() * codes.group;
            let (block, second) = (first_column / 32, !first_column.is_multiple_of(32));
            let set_factors = v.set_groups() * v.rows * v.factor_bytes();
            let (x, factors) = (part + block * block_bytes, part + of_part * set_factors);
            let of_rows = |of: u32| of * v.block_rows() * v.row_bytes();
            line!(self, "ld.shared.b32 %q2, [%r14+{scale}];");
            if codes.minimum == Minimum::Stored {
                line!(self, "ld.shared.b32 %q3, [%r14+{}];", scale + 32 * unit_groups);
            }
            for of in 0..v.row_blocks() {
                line!(self, "ld.shared.v2.f32 {{%fx{of}, %fs{of}}}, [%factors_at+{}];", factors + of * 32);
                if v.has_sets() && !second {
                    let q = 4 + 2 * of;
                    line!(self, "ld.shared.v2.b32 {{%q{q}, %q{}}}, [%x_at+{}];", q + 1, x + of_rows(of));
                }
            }
            for c in 0..v.set_blocks() {
                if !second {
                    self.words(set / v.part_sets() * 4 + block + c);
                }
                if c == 0 {
                    line!(self, "mov.b32 %b4, 0;");
                }
                for of in 0..v.row_blocks() {
                    let [b, q] = [2 * of, 4 + 2 * of].map(|first| [first, first + 1]);
                    match (v.has_sets(), second) {
                        (true, false) => {
                            line!(self, "selp.b32 %b{}, %q{}, 0, %mine{c};", b[0], q[0]);
                            line!(self, "selp.b32 %b{}, %q{}, 0, %mine{c};", b[1], q[1]);
                        }
                        (true, true) => {
                            line!(self, "selp.b32 %b{}, 0, %q{}, %mine{c};", b[0], q[0]);
                            line!(self, "selp.b32 %b{}, 0, %q{}, %mine{c};", b[1], q[1]);
                        }
                        (false, _) => {
                            let at = x + c * block_bytes + of_rows(of);
                            line!(self, "ld.shared.v2.b32 {{%b{}, %b{}}}, [%x_at+{at}];", b[0], b[1]);
                        }
                    }
                    let sums = registers("c", 4 * of..4 * of + 4);
                    let before = if c == 0 { "%b4, %b4, %b4, %b4" } else { &sums };
                    line!(
                        self,
                        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {{{sums}}}, {{%a0, %a1, %a2, %a3}}, {{%b{}, %b{}}}, {{{before}}};",
                        b[0],
                        b[1]
                    );
                }
            }
            line!(self, "mov.b32 {{%h0, %h1}}, %q2;\ncvt.f32.f16 %f2, %h0;\ncvt.f32.f16 %f3, %h1;");
            if codes.minimum == Minimum::Stored {
                line!(self, "mov.b32 {{%h0, %h1}}, %q3;\ncvt.f32.f16 %f4, %h0;\ncvt.f32.f16 %f5, %h1;");
            }
            for of in 0..v.row_blocks() {
                let c = 4 * of;
                line!(
                    self,
                    "mad.lo.s32 %r0, %c{}, 256, %c{};
mad.lo.s32 %r1, %c{}, 256, %c{};
cvt.rn.f32.s32 %f0, %r0;
cvt.rn.f32.s32 %f1, %r1;
mul.f32 %f0, %f0, %fx{of};
mul.f32 %f1, %f1, %fx{of};",
                    c,
                    c + 1,
                    c + 2,
                    c + 3
                );
                if v.zero_halves() > 0 {
                    // %fs is -Σx.
                    let zero = v.zero_halves() as f32 * 0.5 * v.code_value();
                    line!(
                        self,
                        "fma.rn.f32 %f0, %fs{of}, {}, %f0;\nfma.rn.f32 %f1, %fs{of}, {}, %f1;",
                        float(zero),
                        float(zero * v.times_of_v())
                    );
                }
                line!(
                    self,
                    "fma.rn.f32 %sum_u{of}, %f0, %f2, %sum_u{of};\nfma.rn.f32 %sum_v{of}, %f1, %f3, %sum_v{of};"
                );
                if codes.minimum == Minimum::Stored {
                    line!(
                        self,
                        "fma.rn.f32 %sum_u{of}, %fs{of}, %f4, %sum_u{of};
fma.rn.f32 %least_v{of}, %fs{of}, %f5, %least_v{of};"
                    );
                }
            }
        }
    }

    /// Like [`Text::integer_unit`] for codes in e4m3.
    fn float_unit(&mut self) {
        let v = self.v;
        let scales = self.load_codes();
        line!(self, "ld.shared.b32 %q2, [%r14+{scales}];");
        for of in 0..v.row_blocks() {
            line!(self, "ld.shared.f32 %fx{of}, [%factors_at+{}];", of * 16);
        }
        // Two chains of sums, which hide the latency of the matrix units.
        let chains = 2 / v.row_blocks();
        for i in 0..8 {
            line!(self, "mov.f32 %d{i}, 0f00000000;");
        }
        for c in 0..4 {
            for of in 0..v.row_blocks() {
                let at = (c * v.rows + of * v.block_rows()) * v.row_bytes();
                line!(self, "ld.shared.v4.b32 {{{}}}, [%x_at+{at}];", registers("b", of * 4..of * 4 + 4));
            }
            for h in 0..2 {
                for (row, [most, other]) in [(0, [0, 2]), (1, [1, 3])] {
                    line!(
                        self,
                        "mov.b32 {{%h0, %h1}}, %w{};
cvt.rn.f16x2.e4m3x2 %a{most}, %h0;
cvt.rn.f16x2.e4m3x2 %a{other}, %h1;",
                        c * 4 + 2 * h + row
                    );
                }
                for of in 0..v.row_blocks() {
                    let chain = of * chains + h % chains;
                    let sums = registers("d", chain * 4..chain * 4 + 4);
                    line!(
                        self,
                        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{{sums}}}, {{%a0, %a1, %a2, %a3}}, {{%b{}, %b{}}}, {{{sums}}};",
                        of * 4 + h * 2,
                        of * 4 + h * 2 + 1
                    );
                }
            }
        }
        line!(self, "mov.b32 {{%h0, %h1}}, %q2;\ncvt.f32.f16 %f2, %h0;\ncvt.f32.f16 %f3, %h1;");
        for of in 0..v.row_blocks() {
            let d: [u32; 4] = std::array::from_fn(|i| of * chains * 4 + i as u32);
            for i in d.into_iter().filter(|_| chains == 2) {
                line!(self, "add.f32 %d{i}, %d{i}, %d{};", i + 4);
            }
            if v.has_two_columns() {
                line!(self, "add.f32 %d{0}, %d{0}, %d{1};\nadd.f32 %d{2}, %d{2}, %d{3};", d[0], d[1], d[2], d[3]);
            }
            line!(
                self,
                "mul.f32 %d{0}, %d{0}, %fx{of};
mul.f32 %d{1}, %d{1}, %fx{of};
fma.rn.f32 %sum_u{of}, %d{0}, %f2, %sum_u{of};
fma.rn.f32 %sum_v{of}, %d{1}, %f3, %sum_v{of};",
                d[0],
                d[2]
            );
        }
    }

    /// Loads the lane's words of the unit's planes to %w; returns the offset of the unit's scales.
    fn load_codes(&mut self) -> u32 {
        let loads = unit_cols(self.v.codes) * self.v.codes.bits / 256;
        for load in 0..loads {
            let at = load * 512;
            line!(self, "ld.shared.v4.b32 {{{}}}, [%r13+{at}];", registers("w", load * 4..load * 4 + 4));
        }
        loads * 512
    }

    /// Sets %a0 to %a3 to the integers of a block of 32 columns of the unit: of four columns of row u, of v, and of the other four
    /// columns of both. The order of columns in a word is 0, 2, 1, 3, that of x.
    fn words(&mut self, c: u32) {
        let codes = self.v.codes;
        if codes.number == Number::E2m1 {
            return (0..2).for_each(|h| self.e2m1_words(2 * h, c / 2 * 4 + c % 2 * 2 + h));
        }
        let four_loads = if codes.bits & 4 != 0 { unit_cols(codes) / 64 } else { 0 };
        let two_loads = if codes.bits & 2 != 0 { unit_cols(codes) / 128 } else { 0 };
        for (h, second) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let a = 2 * h + second;
            if codes.bits & 8 != 0 {
                line!(self, "mov.b32 %a{a}, %w{};", c * 4 + a);
            }
            if codes.bits & 4 != 0 {
                let word = c / 2 * 4 + c % 2 * 2 + h;
                match self.v.times_of_v() > 1.0 && second == 1 {
                    true => line!(self, "and.b32 %a{a}, %w{word}, 0xf0f0f0f0;"),
                    false => self.put_plane(a, word, (4, 4 * second), 0),
                }
            }
            if codes.bits & 2 != 0 {
                let word = (four_loads + c / 4) * 4 + c % 4;
                self.put_plane(a, word, (2, 4 * h + 2 * second), codes.bits & 4);
            }
            if codes.bits & 1 != 0 {
                let word = (four_loads + two_loads + c / 8) * 4 + (c / 2 % 4);
                self.put_plane(a, word, (1, 4 * (c % 2) + 2 * h + second), codes.bits & 6);
            }
        }
    }

    /// Sets %a`a` and the next one to the integers of a word of codes in e2m1, of row u and of row v: [`E2M1_ZERO`] plus twice the
    /// number.
    fn e2m1_words(&mut self, a: u32, word: u32) {
        let [low, high] = E2M1_MAGNITUDES;
        let zeros = E2M1_ZERO * 0x0101_0101;
        // %r0 to %r3: the magnitudes of the codes of u and v in turn, then of each. %r4 and %r5: bytes of ones where one is negative.
        line!(
            self,
            "and.b32 %r2, %w{word}, 0x77777777;
shr.u32 %r3, %r2, 16;
mov.b32 %r4, {low:#x};
mov.b32 %r5, {high:#x};
prmt.b32 %r0, %r4, %r5, %r2;
prmt.b32 %r1, %r4, %r5, %r3;
shl.b32 %r4, %w{word}, 4;
prmt.b32 %r4, %r4, 0, 0xba98;
prmt.b32 %r5, %w{word}, 0, 0xba98;
prmt.b32 %r2, %r0, %r1, 0x6420;
prmt.b32 %r3, %r0, %r1, 0x7531;"
        );
        for (to, magnitudes, negative) in [(a, 2, 4), (a + 1, 3, 5)] {
            // Negative where the mask has ones: (b & c) | (a & ~c).
            line!(
                self,
                "add.u32 %r6, %r{magnitudes}, {zeros:#x};
sub.u32 %r7, {zeros:#x}, %r{magnitudes};
lop3.b32 %a{to}, %r6, %r7, %r{negative}, 0xd8;"
            );
        }
    }

    /// Puts a plane's `bits` of four codes of a row, at bit `from` of the bytes of word `word`, to bit `to` of the bytes of %a`a`,
    /// which has their lower bits; with `to` 0 it has none.
    fn put_plane(&mut self, a: u32, word: u32, (bits, from): (u32, u32), to: u32) {
        let mask = (((1u32 << bits) - 1) << to) * 0x0101_0101;
        match from >= to {
            true => line!(self, "shr.u32 %r0, %w{word}, {};", from - to),
            false => line!(self, "shl.b32 %r0, %w{word}, {};", to - from),
        }
        match to > 0 {
            true => line!(self, "lop3.b32 %a{a}, %r0, {mask:#x}, %a{a}, 0xea;"),
            false => line!(self, "and.b32 %a{a}, %r0, {mask:#x};"),
        }
    }

    /// Sets %r0 to the number of the turn's block.
    fn block(&mut self) {
        line!(self, "mov.u32 %r0, %nctaid.x;\nmov.u32 %r1, %ctaid.x;\nmad.lo.u32 %r0, %turn, %r0, %r1;");
    }

    /// Goes on at `label` with the workgroup's block that is `turns` later, if there is one.
    fn next_turn(&mut self, label: &str, turns: u32) {
        line!(self, "add.u32 %turn, %turn, {turns};");
        self.block();
        line!(self, "setp.lt.u32 %p0, %r0, %total_blocks;\n@%p0 bra {label};");
    }

    /// The last group adds up all groups' sums of each block, finishes them and stores y: lanes i and i + 16 have row i of W, of
    /// one row of x half of the groups each, of several rows two rows of y in a pass.
    fn finisher(&mut self) {
        let v = self.v;
        line!(self, "sub.u32 %turn, %group, {};\nsetp.eq.and.u32 %p0, %turn, 0, %lead;\n@!%p0 bra READY;", v.groups);
        for place in 0..PLACES {
            let full = v.full_places_at() + place * 8;
            line!(
                self,
                "mbarrier.init.shared::cta.b64 [%base+{full}], {groups};
mbarrier.init.shared::cta.b64 [%base+{empty}], 1;",
                groups = v.groups,
                empty = full + PLACES * 8
            );
        }
        line!(
            self,
            "READY:
bar.warp.sync 0xffffffff;
setp.lt.u32 %first, %lane, 16;
// The lane's turn among the two rows of y of a pass.
shr.u32 %g, %lane, 4;"
        );
        if v.names_rows() {
            self.clear_choices();
        }
        match v.experts.is_some() {
            true => self.list_of_finishers(),
            false => line!(
                self,
                "bar.sync 0, {};
add.u32 %total_blocks, %n, 15;
shr.u32 %total_blocks, %total_blocks, 4;",
                v.threads()
            ),
        }
        for pass in 0..v.passes() {
            line!(self, "mov.f32 %norm_scale{pass}, 0f00000000;\nmov.u64 %row{pass}, %y;");
            if v.stored_rows > 1 && !(v.is_first_stage() && v.names_rows()) {
                line!(
                    self,
                    "ld.param.u32 %r0, [args+{stride}];
add.u32 %r1, %g, {};
mul.lo.u32 %r0, %r0, %r1;
mul.wide.u32 %l0, %r0, 4;
add.u64 %row{pass}, %row{pass}, %l0;",
                    pass * 2,
                    stride = v.argument("y_stride"),
                );
            }
        }
        if v.finishers() > 1 {
            self.block();
            line!(self, "setp.ge.u32 %p0, %r0, %total_blocks;\n@%p0 bra FINISHED;");
        }
        if v.is_first_stage() {
            self.first_listed("%listed", "%of_listed", v.finishers());
        }
        line!(self, "FINISH:");
        let mut of_block = "%r0";
        if v.is_first_stage() {
            self.block_in_buffer("%listed", "%of_listed");
            line!(self, "mov.u32 %r0, %of_listed;");
            of_block = "%e2";
        } else {
            self.block();
        }
        line!(self, "and.b32 %r1, %lane, 15;\nmul.wide.u32 %l1, %r1, 4;");
        line!(
            self,
            "// %r5 is the row of W, and %l1 the offset of its result in a row of y or, if it does not exist, that of the last one.
mad.lo.u32 %r5, %r0, 16, %r1;"
        );
        if v.is_second_stage() {
            line!(self, "mov.f32 %factor, {};", float(1.0));
        } else {
            line!(
                self,
                "mul.wide.u32 %l0, {of_block}, {block_bytes};
add.u64 %l0, %l0, %l1;
add.u64 %l0, %l0, %weight;
ld.global.nc.f32 %factor, [%l0];",
                block_bytes = v.block_bytes(),
            );
        }
        line!(
            self,
            "sub.u32 %r0, %n, 1;
min.u32 %r0, %r5, %r0;
mul.wide.u32 %l1, %r0, 4;"
        );
        if v.experts.is_some_and(|experts| experts.shared) {
            line!(
                self,
                "ld.param.u64 %l2, [args+{}];\nld.param.u32 %e1, [args+{}];",
                v.argument("shared_weight"),
                v.argument("shared_tag")
            );
            for pass in 0..v.passes() {
                line!(
                    self,
                    "sub.u64 %shared_at{pass}, %row{pass}, %y;
add.u64 %shared_at{pass}, %shared_at{pass}, %l2;
add.u64 %shared_at{pass}, %shared_at{pass}, %l1;
mov.u32 %shared{pass}, %e1;"
                );
                self.load_shared(pass);
            }
        }
        match v.experts {
            Some(_) if v.bias => self.load_biases(),
            None if v.bias => line!(self, "add.u64 %l0, %bias, %l1;\nld.global.nc.f32 %bias_of_row, [%l0];"),
            _ => {}
        }
        if v.epilogue == 1 {
            for pass in 0..v.passes() {
                line!(self, "add.u64 %old_at{pass}, %row{pass}, %l1;\nmov.u32 %old{pass}, %old_tag;");
                self.load_old(pass);
            }
        }
        self.place();
        self.ptx.wait_for_group("%r1", "%r2", "%p0");
        line!(
            self,
            "mad.lo.u32 %r4, %r0, {place_bytes}, %base;
mad.lo.u32 %r4, %lane, 4, %r4;",
            place_bytes = v.groups * v.sum_rows() * 64
        );
        for pass in 0..v.passes() {
            line!(self, "mov.f32 %d{pass}, 0f00000000;");
        }
        // With one row of x, half of the lanes add up every second group; that half has one group more, or one fewer.
        let step = if v.sum_rows() == 1 { 2 } else { 1 };
        for group in (0..v.groups).step_by(step) {
            let there = if step == 2 && group + 1 == v.groups { "@%first " } else { "" };
            for pass in 0..v.passes() {
                let at = v.sums_at() + group * v.sum_rows() * 64 + pass * 128;
                line!(self, "{there}ld.shared.f32 %f1, [%r4+{at}];\n{there}add.f32 %d{pass}, %d{pass}, %f1;");
            }
        }
        if v.sum_rows() == 1 {
            line!(self, "shfl.sync.bfly.b32 %f1, %d0, 16, 31, 0xffffffff;\nadd.f32 %d0, %d0, %f1;");
        }
        if v.norm {
            line!(self, "setp.ge.u32 %p0, %turn, {};\n@%p0 bra NORMED;", v.finishers());
            if v.names_rows() {
                self.norm_scales();
            } else {
                let of_lane = if v.rows == 1 { 0 } else { v.groups * 4 };
                line!(self, "mad.lo.u32 %r2, %g, {of_lane}, %base;");
                for pass in 0..v.passes() {
                    self.norm_scale(2 * pass, &format!("%norm_scale{pass}"));
                }
            }
            line!(self, "NORMED:");
        }
        line!(
            self,
            "bar.warp.sync 0xffffffff;
@%lead mbarrier.arrive.shared::cta.b64 _, [%r1+{}];
setp.lt.u32 %p1, %r5, %n;",
            PLACES * 8
        );
        if v.halves() {
            // Even rows of W are gates, and the next ones are their up projections.
            line!(
                self,
                "and.b32 %r0, %lane, 1;
setp.eq.and.u32 %p1, %r0, 0, %p1;
add.u32 %r0, %r5, 1;
setp.lt.and.u32 %p1, %r0, %n, %p1;
shr.u32 %r0, %r5, 1;
mul.wide.u32 %l1, %r0, 4;"
            );
        }
        for pass in 0..v.passes() {
            self.finish(pass);
        }
        if v.is_first_stage() {
            self.next_listed("%listed", "%of_listed");
        }
        self.next_turn("FINISH", v.finishers());
        line!(self, "FINISHED:");
    }

    /// Sets the register `to` to the factor of a row's norm: of the row of x `row` whose groups' sums of squares begin behind %r2.
    fn norm_scale(&mut self, row: u32, to: &str) {
        let v = self.v;
        line!(self, "mov.f32 %f2, 0f00000000;");
        for group in 0..v.groups {
            let at = v.squares_at() + (row * v.groups + group) * 4;
            line!(self, "ld.shared.f32 %f1, [%r2+{at}];\nadd.f32 %f2, %f2, %f1;");
        }
        line!(
            self,
            "cvt.rn.f32.u32 %f1, %k;
div.rn.f32 %f2, %f2, %f1;
ld.param.f32 %f1, [args+{epsilon}];
add.f32 %f2, %f2, %f1;
rsqrt.approx.f32 {to}, %f2;",
            epsilon = v.argument("epsilon"),
        );
    }

    /// Finishes the sums of a pass and stores them at offset %l1 of its rows of y, where %p1 holds.
    fn finish(&mut self, pass: u32) {
        let v = self.v;
        if v.is_first_stage() && v.names_rows() {
            self.row_of_pass(pass);
        }
        if v.norm {
            line!(self, "mul.f32 %d{pass}, %d{pass}, %norm_scale{pass};");
        }
        line!(self, "mul.f32 %f0, %d{pass}, %factor;");
        if v.is_second_stage() && v.bias {
            line!(self, "add.f32 %f0, %f0, %biases{pass};");
        } else if v.bias {
            line!(self, "add.f32 %f0, %f0, %bias_of_row;");
        }
        if v.epilogue == 1 {
            if v.tagged == 3 {
                let label = self.ptx.label();
                line!(
                    self,
                    "bra CHECK{label};
POLLOLD{label}:"
                );
                self.load_old(pass);
                line!(self, "CHECK{label}:\nxor.b32 %r0, %old{pass}, %old_tag;");
                self.poll_again(&format!("POLLOLD{label}"), "%old_tag");
            }
            line!(self, "mov.b32 %f1, %old{pass};\nadd.f32 %f0, %f0, %f1;");
        }
        if v.experts.is_some_and(|experts| experts.shared) {
            self.add_shared(pass);
        }
        match Epilogue::of_code(v.epilogue) {
            Epilogue::Store | Epilogue::Residual => {}
            Epilogue::Gated(_) => {
                line!(self, "shfl.sync.bfly.b32 %f1, %f0, 1, 31, 0xffffffff;");
                self.ptx.glu(v.epilogue, ["%f0", "%f1"], "%f0", ["%f2", "%f3"]);
            }
            Epilogue::SquaredRelu => self.ptx.squared_relu("%f0"),
        }
        if v.is_first_stage() {
            self.place_of_choice(pass);
            line!(self, "mul.f32 %f0, %f0, %share;");
        }
        line!(self, "mov.b32 %r0, %f0;");
        if v.tagged == 3 {
            // `tagged` of `tags.glsl`.
            line!(
                self,
                "and.b32 %r1, %r0, 0x7fffffff;
and.b32 %r2, %y_tag, {TAG_MASK};
add.u32 %r4, %r1, {half};
max.u32 %r4, %r4, %r2;
sub.u32 %r4, %r4, %r2;
setp.lt.u32 %p2, %r1, 0x7f800000;
selp.b32 %r1, %r4, %r1, %p2;
and.b32 %r1, %r1, {untagged:#x};
and.b32 %r0, %r0, 0x80000000;
or.b32 %r0, %r0, %r1;
or.b32 %r0, %r0, %r2;",
                half = TAG_MASK.div_ceil(2),
                untagged = !TAG_MASK,
            );
        }
        let (exists, to) = if v.is_first_stage() { ("%stores", "%to") } else { ("%p1", "%l1") };
        line!(self, "add.u64 %l0, %row{pass}, {to};");
        let stores = if v.is_half(pass) { "%p2" } else { exists };
        if v.is_half(pass) {
            line!(self, "and.pred %p2, {exists}, %first;");
        }
        line!(self, "@{stores} st.volatile.global.u32 [%l0], %r0;");
    }

    /// Loads what y holds where a pass adds to it, unless the lane has no row in the pass.
    fn load_old(&mut self, pass: u32) {
        let first = if self.v.is_half(pass) { "@%first " } else { "" };
        line!(self, "{first}ld.volatile.global.u32 %old{pass}, [%old_at{pass}];");
    }
}
