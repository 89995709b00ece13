//! The parts of `expert_skinny.codes.ptx` that products of codes in PTX have for experts only: the choice of the experts, the list of
//! those that any row chose, and which blocks and columns a workgroup multiplies.
//!
//! Each workgroup chooses for itself, as in `choose.glsl`: the group of lanes `groups - r` for row r, so that the first
//! group that finishes blocks chooses for one row while the others prepare x. An entry of the list is an expert's number in the weights' buffer, and the rows
//! that chose it: for each of four rows the place of the expert among the row's choices, or [`NO_CHOICE`]. With more than four rows,
//! or more than 32 choices of all rows, a row's choice sets its bit in the expert's word of `chosen`, and that group then makes
//! an entry for each four rows of an expert, which has the rows' numbers too ([`Variant::names_rows`]).
//!
//! Gate and up (stage 0): the blocks of all entries one after the other, with x of the entry's rows; a row's sums for an expert that
//! it did not choose are not stored. Down (stage 1): the groups of lanes are divided among the experts of `at_once` entries, and those
//! of one entry share its columns; an expert's sums are multiplied by the factors of its rows in the group, and the last group adds
//! up those of all. More entries than `at_once` are sections, as those of long rows in `skinny_codes.ptx`.

use super::{BLOCK_ROWS, Text, Variant};
use crate::kernels::ptx::{float, line};
use crate::kernels::shaders::ExpertSkinnyConstants;
use crate::memory::pack::FRAGMENT_COLS;
use crate::memory::pack::codes::unit_cols;

/// The most pairs of a row of x and one of its choices for which each lane of a group has one.
const MOST_PAIRS: u32 = 32;
/// The most rows of x.
pub const MOST_ROWS: u32 = 8;
/// The most choices of a row.
pub(super) const MOST_CHOSEN: u32 = 16;
/// The most candidates of a lane whose biases are loaded before the logits come.
const MOST_EARLY_BIASES: u32 = 8;
/// The place of an expert that a row did not choose.
const NO_CHOICE: u32 = u32::MAX;
/// The same in an entry that names its rows: as if it were that of row 0.
const NO_NAMED_CHOICE: u32 = (1 << ROW_SHIFT) - 1;
/// The bytes of an entry of the list; the places are behind its first 16. Those of entries that name their rows have a row's number
/// from bit `ROW_SHIFT` on.
const ENTRY_BYTES: u32 = 32;
const ROW_SHIFT: u32 = 8;
/// A word of `chosen` has a bit for each row, and from this bit on the number of the expert's first entry.
const FIRST_ENTRY_SHIFT: u32 = 16;
/// The groups of lanes of the first stage that finish blocks, in turns: it has a block of few units for each expert.
const FINISHERS: u32 = 4;
/// The most groups of lanes that multiply: a workgroup has at most 32.
pub const MOST_GROUPS: u32 = 32 - FINISHERS;
const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// What a program for experts is made for besides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Experts {
    /// Whether it is the second stage.
    pub(super) down: bool,
    count: u32,
    chosen: u32,
    normalise: bool,
    /// Whether the second stage adds the shared expert's output.
    pub(super) shared: bool,
    gated: bool,
    routed: u32,
    choice_bias: bool,
    scales: bool,
    sum_offset: f32,
    logit_scale: f32,
    first: u32,
    part: u32,
    /// The columns of an expert's matrix.
    columns: u32,
}

impl Experts {
    pub(super) fn of(c: &ExpertSkinnyConstants) -> Experts {
        Experts {
            down: c.stage == 1,
            count: c.count,
            chosen: c.chosen,
            normalise: c.normalise == 1,
            shared: c.shared == 2,
            gated: c.gated == 1,
            routed: c.routed,
            choice_bias: c.choice_bias == 1,
            scales: c.expert_scales == 1,
            sum_offset: f32::from_bits(c.sum_offset),
            logit_scale: f32::from_bits(c.logit_scale),
            first: c.first_expert,
            part: c.part_experts,
            columns: c.columns,
        }
    }

    /// Returns the number of groups of lanes that share the columns of an expert in the second stage, of `units` units: as many as
    /// there are groups for each choice of a row.
    pub(super) fn splits(&self, groups: u32, units: u32) -> u32 {
        (groups / self.chosen).clamp(1, units)
    }

    /// The columns of an expert's matrix.
    pub(super) fn columns(&self) -> u32 {
        self.columns
    }

    /// The number of candidates of a lane.
    fn candidates(&self) -> u32 {
        self.count.div_ceil(32)
    }

    /// Returns the number of groups of lanes that finish blocks.
    pub(super) fn finishers(down: bool) -> u32 {
        if down { 1 } else { FINISHERS }
    }

    /// See [`Variant::names_rows`].
    fn names_rows(&self, rows: u32) -> bool {
        rows > BLOCK_ROWS || rows * self.chosen > MOST_PAIRS
    }

    /// Returns the places for a number of rows from `list` on, a multiple of 16.
    fn places(&self, rows: u32, list: u32) -> Places {
        let names = self.names_rows(rows);
        let (entries, rows) = if names { (rows * self.chosen, rows) } else { (MOST_PAIRS, BLOCK_ROWS) };
        let distinct = list + entries * ENTRY_BYTES;
        let ids = distinct + 16;
        let shares = ids + rows * MOST_CHOSEN * 4;
        let gates = shares + rows * MOST_CHOSEN * 4;
        let norms = gates + rows * 4;
        let chosen = (norms + if names { rows * 4 } else { 0 }).next_multiple_of(16);
        let end = chosen + if names { self.candidates() * 128 } else { 0 };
        Places { list, distinct, ids, shares, gates, norms, chosen, end }
    }

    /// The bytes of what a workgroup knows about its experts.
    pub(super) fn bytes(&self, rows: u32) -> u32 {
        self.places(rows, 0).end
    }
}

/// Where the parts of what a workgroup knows about its experts begin in shared memory: the list, its length, for each row the
/// choices, their shares, the gate and the factor of the norm, and the rows that chose each expert.
struct Places {
    list: u32,
    distinct: u32,
    ids: u32,
    shares: u32,
    gates: u32,
    norms: u32,
    chosen: u32,
    end: u32,
}

impl Variant {
    fn places(&self) -> Places {
        self.of_experts().places(self.stored_rows, self.experts_at())
    }

    /// What an entry has in place of a choice.
    fn no_choice(&self) -> u32 {
        if self.names_rows() { NO_NAMED_CHOICE } else { NO_CHOICE }
    }

    /// Whether the entries of the list have the numbers of their rows: an entry has four rows at most, and each lane one choice.
    pub(super) fn names_rows(&self) -> bool {
        self.experts.is_some_and(|experts| experts.names_rows(self.stored_rows))
    }

    /// The number of experts that the groups of lanes multiply at once in the second stage.
    fn at_once(&self) -> u32 {
        self.groups / self.splits()
    }

    /// See [`super::most_expert_blocks`].
    pub(super) fn most_expert_blocks(&self) -> u32 {
        let experts = self.of_experts();
        let several = experts.down && self.stored_rows * experts.chosen > self.at_once();
        if several { super::PLACES } else { u32::MAX }
    }

    fn of_experts(&self) -> Experts {
        self.experts.expect("a program for experts")
    }
}

impl Text {
    /// Begins the groups of lanes' part of the first stage or of the second one, with all lanes: up to the list.
    pub(super) fn list_experts(&mut self) {
        let v = self.v;
        if v.stored_rows > 1 {
            // The last group has chosen for the first row.
            let label = self.ptx.label();
            line!(
                self,
                "sub.u32 %e0, {}, %group;\nsetp.ge.u32 %p0, %e0, {};\n@%p0 bra CHOSEN{label};",
                v.groups,
                v.stored_rows
            );
            self.choose();
            line!(self, "CHOSEN{label}:\nbar.sync 0, {};", v.threads());
        }
        self.listed();
    }

    /// Lists the experts with the groups of lanes that finish blocks: the first of them chooses for the first row and makes the list.
    pub(super) fn list_of_finishers(&mut self) {
        let v = self.v;
        if v.finishers() > 1 {
            line!(self, "setp.eq.u32 %p0, %turn, 0;\n@%p0 bra MAKELIST;");
            if v.stored_rows > 1 {
                line!(self, "bar.sync 0, {};", v.threads());
            }
            line!(self, "bra LISTED;\nMAKELIST:");
        }
        self.make_list();
        line!(self, "LISTED:");
        self.listed();
    }

    /// Chooses for the first row and makes the list.
    fn make_list(&mut self) {
        let v = self.v;
        let e = v.of_experts();
        line!(self, "mov.u32 %e0, 0;");
        self.choose();
        match v.stored_rows {
            1 => line!(self, "bar.warp.sync 0xffffffff;"),
            _ => line!(self, "bar.sync 0, {};", v.threads()),
        }
        if v.names_rows() {
            return self.make_entries();
        }
        let Places { list, distinct, ids, .. } = v.places();
        // A lane has a pair of row %e1 and its choice %e2. Lanes without one, or with an expert that is elsewhere, have numbers
        // that no other lane has.
        line!(
            self,
            "div.u32 %e1, %lane, {chosen};
mul.lo.u32 %e2, %e1, {chosen};
sub.u32 %e2, %lane, %e2;
setp.lt.u32 %p1, %lane, {pairs};
add.u32 %e3, %lane, 0x80000000;
mad.lo.u32 %e4, %e1, {row_bytes}, %base;
mad.lo.u32 %e4, %e2, 4, %e4;
@%p1 ld.shared.u32 %e3, [%e4+{ids}];",
            chosen = e.chosen,
            pairs = v.stored_rows * e.chosen,
            row_bytes = MOST_CHOSEN * 4,
        );
        if e.part > 0 {
            line!(
                self,
                "@%p1 sub.u32 %e3, %e3, {first};
setp.lt.and.u32 %p1, %e3, {part}, %p1;
add.u32 %e4, %lane, 0x80000000;
selp.b32 %e3, %e3, %e4, %p1;",
                first = e.first,
                part = e.part,
            );
        }
        line!(
            self,
            "match.any.sync.b32 %e4, %e3, 0xffffffff;
// The first lane with the same expert writes its entry.
sub.u32 %e5, 0, %e4;
and.b32 %e5, %e5, %e4;
sub.u32 %e5, %e5, 1;
popc.b32 %e5, %e5;
setp.eq.and.u32 %p2, %e5, %lane, %p1;
vote.sync.ballot.b32 %e4, %p2, 0xffffffff;
mov.u32 %e6, 1;
shl.b32 %e6, %e6, %lane;
sub.u32 %e6, %e6, 1;
and.b32 %e6, %e6, %e4;
popc.b32 %e6, %e6;
popc.b32 %e4, %e4;
@%lead st.shared.u32 [%base+{distinct}], %e4;
shfl.sync.idx.b32 %e6, %e6, %e5, 31, 0xffffffff;
mad.lo.u32 %e6, %e6, {ENTRY_BYTES}, %base;
mov.u32 %e7, {NO_CHOICE:#x};
@%p2 st.shared.u32 [%e6+{list}], %e3;
@%p2 st.shared.v4.u32 [%e6+{choices}], {{%e7, %e7, %e7, %e7}};
bar.warp.sync 0xffffffff;
mad.lo.u32 %e6, %e1, 4, %e6;
@%p1 st.shared.u32 [%e6+{choices}], %e2;",
            choices = list + 16,
        );
    }

    /// Sets the words of `chosen` to 0, with all groups of lanes that finish blocks, before any group chooses.
    pub(super) fn clear_choices(&mut self) {
        let v = self.v;
        let chosen = v.places().chosen;
        line!(self, "mov.u32 %e0, 0;\nmad.lo.u32 %e1, %lane, 4, %base;");
        for i in 0..v.of_experts().candidates() {
            line!(self, "st.shared.u32 [%e1+{}], %e0;", chosen + i * 128);
        }
        line!(self, "bar.sync 0, {};", v.threads());
    }

    /// Makes the entries, which name their rows, from the words of `chosen`, with one group of lanes. An expert has as many
    /// entries as it needs for its rows, and the experts are in order.
    fn make_entries(&mut self) {
        let v = self.v;
        let e = v.of_experts();
        let Places { list, distinct, ids, chosen, .. } = v.places();
        let most_entries = v.stored_rows.div_ceil(BLOCK_ROWS);
        line!(
            self,
            "mov.u32 %e0, 1;
shl.b32 %e0, %e0, %lane;
sub.u32 %e0, %e0, 1;
mov.u32 %distinct, 0;
mov.u32 %listed, {NO_NAMED_CHOICE};"
        );
        for i in 0..e.candidates() {
            // %e2: the lane's expert in the weights' buffer. %e1: its rows.
            line!(
                self,
                "mad.lo.u32 %e3, %lane, 4, %base;
ld.shared.u32 %e1, [%e3+{at}];
add.u32 %e2, %lane, {of_lane};",
                at = chosen + i * 128,
                of_lane = (i * 32).wrapping_sub(e.first),
            );
            if e.part > 0 {
                line!(self, "setp.lt.u32 %p1, %e2, {};\nselp.b32 %e1, %e1, 0, %p1;", e.part);
            }
            // %e4: the number of the expert's first entry, behind those of lower lanes.
            line!(self, "popc.b32 %e5, %e1;\nmov.u32 %e4, %distinct;");
            for entry in 0..most_entries {
                line!(
                    self,
                    "setp.gt.u32 %p{has}, %e5, {before};
vote.sync.ballot.b32 %e6, %p{has}, 0xffffffff;
popc.b32 %e7, %e6;
add.u32 %distinct, %distinct, %e7;
and.b32 %e6, %e6, %e0;
popc.b32 %e6, %e6;
add.u32 %e4, %e4, %e6;",
                    has = entry + 1,
                    before = entry * BLOCK_ROWS,
                );
            }
            line!(
                self,
                "shl.b32 %e6, %e4, {FIRST_ENTRY_SHIFT};
or.b32 %e1, %e1, %e6;
st.shared.u32 [%e3+{at}], %e1;
mad.lo.u32 %e4, %e4, {ENTRY_BYTES}, %base;",
                at = chosen + i * 128,
            );
            for entry in 0..most_entries {
                let at = list + entry * ENTRY_BYTES;
                line!(
                    self,
                    "@%p{has} st.shared.u32 [%e4+{at}], %e2;
@%p{has} st.shared.v4.u32 [%e4+{places}], {{%listed, %listed, %listed, %listed}};",
                    has = entry + 1,
                    places = at + 16,
                );
            }
        }
        line!(self, "@%lead st.shared.u32 [%base+{distinct}], %distinct;\nbar.warp.sync 0xffffffff;");
        let pairs = v.stored_rows * e.chosen;
        for first in (0..pairs).step_by(32) {
            // A lane has a pair of row %e1 and its choice %e2, of expert %e3.
            line!(
                self,
                "add.u32 %e4, %lane, {first};
setp.lt.u32 %p1, %e4, {pairs};
div.u32 %e1, %e4, {chosen};
mul.lo.u32 %e2, %e1, {chosen};
sub.u32 %e2, %e4, %e2;
mad.lo.u32 %e4, %e1, {row_bytes}, %base;
mad.lo.u32 %e4, %e2, 4, %e4;
mov.u32 %e3, 0;
@%p1 ld.shared.u32 %e3, [%e4+{ids}];",
                chosen = e.chosen,
                row_bytes = MOST_CHOSEN * 4,
            );
            if e.part > 0 {
                line!(self, "sub.u32 %e4, %e3, {};\nsetp.lt.and.u32 %p1, %e4, {}, %p1;", e.first, e.part);
            }
            // %e6: the number of the expert's rows before this one.
            line!(
                self,
                "mad.lo.u32 %e4, %e3, 4, %base;
ld.shared.u32 %e4, [%e4+{chosen}];
mov.u32 %e6, 1;
shl.b32 %e6, %e6, %e1;
sub.u32 %e6, %e6, 1;
and.b32 %e6, %e6, %e4;
popc.b32 %e6, %e6;
shr.u32 %e4, %e4, {FIRST_ENTRY_SHIFT};
shr.u32 %e5, %e6, {entry_shift};
add.u32 %e4, %e4, %e5;
and.b32 %e6, %e6, {last};
mad.lo.u32 %e4, %e4, {ENTRY_BYTES}, %base;
mad.lo.u32 %e4, %e6, 4, %e4;
shl.b32 %e1, %e1, {ROW_SHIFT};
or.b32 %e1, %e1, %e2;
@%p1 st.shared.u32 [%e4+{places}], %e1;",
                entry_shift = BLOCK_ROWS.ilog2(),
                last = BLOCK_ROWS - 1,
                places = list + 16,
            );
        }
    }

    /// Sets the register `to` to the row that place `place` of the entry at `entry` names, or to 0 if it names none.
    fn named_row(&mut self, entry: &str, place: &str, to: &str) {
        line!(
            self,
            "mad.lo.u32 {to}, {place}, 4, {entry};
ld.shared.u32 {to}, [{to}+{places}];
shr.u32 {to}, {to}, {ROW_SHIFT};",
            places = self.v.places().list + 16,
        );
    }

    /// Sets %x_at and %factors_at to x of the rows that the entry of the turn's block names: in the first stage.
    pub(super) fn named_rows(&mut self) {
        let v = self.v;
        self.named_row("%listed", "%row_of_column", "%e1");
        self.named_row("%listed", "%t", "%e2");
        line!(
            self,
            "mad.lo.u32 %x_at, %e1, {}, %first_x;\nmad.lo.u32 %factors_at, %e2, {}, %first_factors;",
            v.row_bytes(),
            v.factor_bytes()
        );
    }

    /// Sets %r0, the group's sums of a block, to those of the row of the lane's place in the section's entry; %p0 says whether there is
    /// one. In the first section of the second stage, all rows' sums become 0 first. %e0, %e1 and %p1 change.
    pub(super) fn place_of_row(&mut self) {
        let v = self.v;
        let label = self.ptx.label();
        line!(
            self,
            "setp.ne.u32 %p0, %section, 0;
@%p0 bra CLEARED{label};
shr.u32 %e0, %lane, 3;
mul.lo.u32 %e0, %e0, 16;
bfe.u32 %e1, %lane, 2, 1;
mad.lo.u32 %e0, %e1, 4, %e0;
sub.u32 %e0, %r0, %e0;
mad.lo.u32 %e0, %lane, 8, %e0;
mov.u32 %e1, 0;"
        );
        // Lanes store 8 bytes each.
        line!(self, "setp.lt.u32 %p1, %lane, {};", v.sum_rows() * 8);
        for four in 0..v.sum_rows().div_ceil(BLOCK_ROWS) {
            line!(self, "@%p1 st.shared.v2.u32 [%e0+{}], {{%e1, %e1}};", v.sums_at() + four * BLOCK_ROWS * 64);
        }
        line!(
            self,
            "bar.warp.sync 0xffffffff;
CLEARED{label}:
setp.lt.u32 %p1, %t, {};
setp.ne.and.u32 %p0, %named, {}, %p1;",
            v.block_rows(),
            v.no_choice(),
        );
        match v.names_rows() {
            true => line!(self, "shr.u32 %e0, %named, {ROW_SHIFT};\nmad.lo.u32 %r0, %e0, 64, %r0;"),
            false => line!(self, "mad.lo.u32 %r0, %t, 64, %r0;"),
        }
    }

    /// Sets the factors of the norm of all rows, with a group of lanes that finishes blocks.
    pub(super) fn norm_scales(&mut self) {
        let v = self.v;
        line!(
            self,
            "min.u32 %e0, %lane, {last};\nmad.lo.u32 %r2, %e0, {row_bytes}, %base;",
            last = v.stored_rows - 1,
            row_bytes = v.groups * 4,
        );
        self.norm_scale(0, "%f3");
        line!(
            self,
            "mad.lo.u32 %e0, %e0, 4, %base;\nst.shared.f32 [%e0+{}], %f3;\nbar.warp.sync 0xffffffff;",
            v.places().norms
        );
    }

    /// Sets the row of y of a pass of the first stage to the one that the entry at %listed names, and the factor of its norm. %e0 and %e1
    /// change.
    pub(super) fn row_of_pass(&mut self, pass: u32) {
        let v = self.v;
        line!(self, "add.u32 %e1, %g, {};", pass * 2);
        self.named_row("%listed", "%e1", "%e0");
        line!(
            self,
            "mad.lo.u32 %e1, %e0, 4, %base;
ld.shared.f32 %norm_scale{pass}, [%e1+{norms}];
ld.param.u32 %e1, [args+{stride}];
mul.lo.u32 %e0, %e0, %e1;
mul.wide.u32 %l0, %e0, 4;
add.u64 %row{pass}, %y, %l0;",
            norms = v.places().norms,
            stride = v.argument("y_stride"),
        );
    }

    /// Waits for the list, and ends lanes of workgroups without a block. With the first stage, %total_blocks is the number of all
    /// workgroups' blocks.
    fn listed(&mut self) {
        let v = self.v;
        line!(
            self,
            "bar.sync 0, {threads};
ld.shared.u32 %distinct, [%base+{distinct}];
add.u32 %expert_blocks, %n, 15;
shr.u32 %expert_blocks, %expert_blocks, 4;",
            threads = v.threads(),
            distinct = v.places().distinct,
        );
        if !v.of_experts().down {
            let label = self.ptx.label();
            line!(
                self,
                "mul.lo.u32 %total_blocks, %distinct, %expert_blocks;
mov.u32 %e0, %ctaid.x;
setp.lt.u32 %p0, %e0, %total_blocks;
@%p0 bra USED{label};
ret;
USED{label}:"
            );
            return;
        }
        line!(
            self,
            "mov.u32 %total_blocks, %expert_blocks;
add.u32 %e0, %distinct, {round};
div.u32 %e0, %e0, {at_once};
max.u32 %e0, %e0, 1;
sub.u32 %last_section, %e0, 1;",
            round = v.at_once() - 1,
            at_once = v.at_once(),
        );
    }

    /// Chooses the experts of row %e0, with the lanes of a group.
    fn choose(&mut self) {
        let v = self.v;
        let e = v.of_experts();
        let Places { ids, shares, gates, .. } = v.places();
        let label = self.ptx.label();
        let candidates = e.candidates();
        let gated = e.shared && e.gated;
        line!(
            self,
            "ld.param.u64 %l0, [args+{logits}];
ld.param.u32 %e1, [args+{stride}];
mul.lo.u32 %e1, %e1, %e0;
mul.wide.u32 %l1, %e1, 4;
add.u64 %l0, %l0, %l1;",
            logits = v.argument("logits"),
            stride = v.argument("logits_stride"),
        );
        if e.choice_bias {
            line!(self, "ld.param.u64 %l1, [args+{}];", v.argument("choice_bias"));
        }
        // Candidates beyond the last one repeat it.
        let at = |i: u32| {
            let last =
                if (i + 1) * 32 > e.count { format!("min.u32 %e1, %e1, {};\n", e.count - 1) } else { String::new() };
            format!("add.u32 %e1, %lane, {};\n{last}mul.wide.u32 %l2, %e1, 4;", i * 32)
        };
        // Biases of more candidates take registers that large workgroups do not have while they wait.
        let bias = |i: u32| format!("{}\nadd.u64 %l2, %l2, %l1;\nld.global.nc.f32 %bias{i}, [%l2];", at(i));
        let early = candidates <= MOST_EARLY_BIASES;
        if e.choice_bias && early {
            for i in 0..candidates {
                line!(self, "{}", bias(i));
            }
        }
        line!(self, "CHOOSE{label}:");
        for i in 0..candidates {
            line!(self, "{}\nadd.u64 %l2, %l2, %l0;\nld.volatile.global.u32 %key{i}, [%l2];", at(i));
        }
        if gated {
            line!(self, "ld.volatile.global.u32 %gate, [%l0+{}];", e.count * 4);
        }
        if v.tagged > 0 {
            line!(self, "ld.param.u32 %logits_tag, [args+{}];\nmov.u32 %r0, 0;", v.argument("logits_tag"));
            let words = (0..candidates).map(|i| format!("%key{i}")).chain(gated.then(|| "%gate".to_owned()));
            for word in words {
                line!(self, "xor.b32 %e1, {word}, %logits_tag;\nor.b32 %r0, %r0, %e1;");
            }
            self.poll_again(&format!("CHOOSE{label}"), "%logits_tag");
        }
        for i in 0..candidates {
            line!(self, "mov.b32 %f0, %key{i};");
            if e.routed > 0 {
                line!(self, "mul.f32 %f0, %f0, {};", float(e.logit_scale));
            }
            if e.routed == 2 {
                self.sigmoid("%f0");
                line!(self, "mov.f32 %score{i}, %f0;");
                if e.choice_bias {
                    if !early {
                        line!(self, "{}", bias(i));
                    }
                    line!(self, "add.f32 %f0, %f0, %bias{i};");
                }
            }
            self.key_of("%f0", &format!("%key{i}"));
            if (i + 1) * 32 > e.count {
                line!(
                    self,
                    "add.u32 %e1, %lane, {};\nsetp.ge.u32 %p0, %e1, {};\n@%p0 mov.u32 %key{i}, 0;",
                    i * 32,
                    e.count
                );
            }
            // Softmax over all candidates needs their keys, of which the choice removes the chosen ones.
            line!(self, "mov.u32 %all{i}, %key{i};");
        }
        // Lane j gets the j-th choice: %id, %best, its key, and %score_of_lane, its score.
        line!(
            self,
            "mov.u32 %id, 0;
mov.u32 %best, 0;
mov.u32 %most, 0;
mov.f32 %score_of_lane, 0f00000000;
mov.u32 %e1, 0;
CHOICE{label}:
mov.u32 %e2, 0;
mov.u32 %e3, {count};",
            count = e.count,
        );
        for i in 0..candidates {
            line!(
                self,
                "setp.gt.u32 %p0, %key{i}, %e2;
@%p0 mov.u32 %e2, %key{i};
@%p0 add.u32 %e3, %lane, {};",
                i * 32
            );
        }
        line!(
            self,
            "redux.sync.max.u32 %e4, %e2, 0xffffffff;
setp.ne.u32 %p0, %e2, %e4;
@%p0 mov.u32 %e3, {count};
redux.sync.min.u32 %e5, %e3, 0xffffffff;
min.u32 %e5, %e5, {last};
setp.eq.u32 %p1, %e1, 0;
@%p1 mov.u32 %most, %e4;
setp.eq.u32 %p1, %e1, %lane;
@%p1 mov.u32 %id, %e5;
@%p1 mov.u32 %best, %e4;
sub.u32 %e6, %e5, %lane;",
            count = e.count,
            last = e.count - 1,
        );
        for i in 0..candidates {
            line!(self, "setp.eq.u32 %p0, %e6, {};\n@%p0 mov.u32 %key{i}, 0;", i * 32);
            if e.routed == 2 {
                line!(self, "@%p0 mov.f32 %f2, %score{i};");
            }
        }
        if e.routed == 2 {
            line!(
                self,
                "and.b32 %e6, %e5, 31;
mov.b32 %e7, %f2;
shfl.sync.idx.b32 %e7, %e7, %e6, 31, 0xffffffff;
@%p1 mov.b32 %score_of_lane, %e7;"
            );
        }
        line!(
            self,
            "add.u32 %e1, %e1, 1;
setp.lt.u32 %p0, %e1, {chosen};
@%p0 bra CHOICE{label};
setp.lt.u32 %p1, %lane, {chosen};
mad.lo.u32 %e1, %e0, {row_bytes}, %base;
mad.lo.u32 %e1, %lane, 4, %e1;
@%p1 st.shared.u32 [%e1+{ids}], %id;",
            chosen = e.chosen,
            row_bytes = MOST_CHOSEN * 4,
        );
        if v.names_rows() {
            line!(
                self,
                "mov.u32 %e2, 1;
shl.b32 %e2, %e2, %e0;
mad.lo.u32 %e3, %id, 4, %base;
@%p1 red.shared.or.b32 [%e3+{}], %e2;",
                v.places().chosen
            );
        }
        if !e.down || v.bias {
            self.shares();
            line!(self, "@%p1 st.shared.f32 [%e1+{shares}], %score_of_lane;");
        }
        if e.shared {
            if e.gated {
                line!(self, "mov.b32 %f0, %gate;");
                self.sigmoid("%f0");
            } else {
                line!(self, "mov.f32 %f0, {};", float(1.0));
            }
            line!(self, "mad.lo.u32 %e1, %e0, 4, %base;\n@%lead st.shared.f32 [%e1+{gates}], %f0;");
        }
    }

    /// Sets %score_of_lane, where %p1 holds, to the share of the lane's choice: its key is %best, and with sigmoids its score is in
    /// %score_of_lane. Other lanes have no choice.
    fn shares(&mut self) {
        let e = self.v.of_experts();
        if e.routed != 2 {
            self.value_of("%most", "%f1");
            self.value_of("%best", "%f0");
            self.power("%f0");
            line!(self, "mov.f32 %score_of_lane, %f0;");
        }
        line!(self, "@!%p1 mov.f32 %score_of_lane, 0f00000000;\nmov.f32 %f2, %score_of_lane;");
        if !e.normalise && e.routed != 2 {
            line!(self, "mov.f32 %f2, 0f00000000;");
            for i in 0..e.candidates() {
                self.value_of(&format!("%all{i}"), "%f0");
                self.power("%f0");
                line!(self, "setp.ne.u32 %p0, %all{i}, 0;\n@%p0 add.f32 %f2, %f2, %f0;");
            }
        }
        if e.normalise || e.routed != 2 {
            for mask in [1, 2, 4, 8, 16] {
                line!(self, "shfl.sync.bfly.b32 %f0, %f2, {mask}, 31, 0xffffffff;\nadd.f32 %f2, %f2, %f0;");
            }
            if e.routed == 2 {
                line!(self, "add.f32 %f2, %f2, {};", float(e.sum_offset));
            }
            line!(self, "div.rn.f32 %score_of_lane, %score_of_lane, %f2;");
        }
        if e.routed > 0 {
            line!(
                self,
                "ld.param.f32 %f0, [args+{}];\nmul.f32 %score_of_lane, %score_of_lane, %f0;",
                self.v.argument("factor")
            );
        }
        if e.scales {
            line!(
                self,
                "ld.param.u64 %l0, [args+{}];
mul.wide.u32 %l1, %id, 4;
add.u64 %l0, %l0, %l1;
ld.global.nc.f32 %f0, [%l0];
mul.f32 %score_of_lane, %score_of_lane, %f0;",
                self.v.argument("expert_scales")
            );
        }
    }

    /// Sets the register `of` to e to the power of its difference from %f1.
    fn power(&mut self, of: &str) {
        line!(
            self,
            "sub.f32 {of}, {of}, %f1;\nmul.f32 {of}, {of}, {log2_e};\nex2.approx.f32 {of}, {of};",
            log2_e = float(LOG2_E)
        );
    }

    /// Sets the register `of` to its sigmoid. %f3 changes.
    fn sigmoid(&mut self, of: &str) {
        line!(
            self,
            "mul.f32 %f3, {of}, {scale};
ex2.approx.f32 %f3, %f3;
add.f32 %f3, %f3, {one};
mov.f32 {of}, {one};
div.rn.f32 {of}, {of}, %f3;",
            scale = float(-LOG2_E),
            one = float(1.0),
        );
    }

    /// Sets the register `to` to the key of a float, by which floats are in order as integers (`deterministic.glsl`). %e1, %e2,
    /// %p0 and %p1 change.
    fn key_of(&mut self, of: &str, to: &str) {
        line!(
            self,
            "mov.b32 {to}, {of};
and.b32 %e1, {to}, 0x7fffffff;
setp.eq.u32 %p0, {to}, 0x7f800000;
@%p0 mov.u32 {to}, 0x7f7fffff;
setp.eq.u32 %p0, %e1, 0;
@%p0 mov.u32 {to}, 0;
and.b32 %e2, {to}, 0x80000000;
setp.ne.u32 %p1, %e2, 0;
xor.b32 %e2, {to}, 0xffffffff;
or.b32 {to}, {to}, 0x80000000;
selp.b32 {to}, %e2, {to}, %p1;
setp.gt.u32 %p0, %e1, 0x7f800000;
@%p0 mov.u32 {to}, 0x007fffff;"
        );
    }

    /// Sets the register `to` to the float of a key. %e2, %e3 and %p0 change.
    fn value_of(&mut self, key: &str, to: &str) {
        line!(
            self,
            "and.b32 %e2, {key}, 0x80000000;
setp.ne.u32 %p0, %e2, 0;
xor.b32 %e2, {key}, 0x80000000;
xor.b32 %e3, {key}, 0xffffffff;
selp.b32 %e2, %e2, %e3, %p0;
mov.b32 {to}, %e2;"
        );
    }

    /// Sets %split to the group's turn among those that share the columns of an expert, and %own_expert to the expert's turn among
    /// those that are multiplied at once: in the second stage.
    pub(super) fn split_groups(&mut self) {
        let splits = self.v.splits();
        line!(
            self,
            "div.u32 %own_expert, %group, {splits};
mul.lo.u32 %split, %own_expert, {splits};
sub.u32 %split, %group, %split;"
        );
    }

    /// Sets %from to the group's first unit of a block: in the first stage of the block %copy_block of the entry at %copy_entry, in
    /// the second one of the workgroup's first block of the expert of the section %copied_section. %e0 to %e3, %p1 and %l0 change.
    pub(super) fn source(&mut self) {
        let v = self.v;
        match v.of_experts().down {
            false => self.block_in_buffer("%copy_entry", "%copy_block"),
            true => {
                self.section_expert("%copied_section");
                line!(self, "mov.u32 %e1, %ctaid.x;\nmad.lo.u32 %e2, %e2, %expert_blocks, %e1;");
            }
        }
        self.first_unit_of("%e2");
    }

    /// Sets %e2 to the number in the weights' buffer of a block of an entry's expert.
    pub(super) fn block_in_buffer(&mut self, entry: &str, block: &str) {
        line!(
            self,
            "ld.shared.u32 %e2, [{entry}+{list}];\nmad.lo.u32 %e2, %e2, %expert_blocks, {block};",
            list = self.v.places().list,
        );
    }

    /// Sets the register `entry` to the place of the entry, and `block` to the number in its expert's matrix, of the workgroup's block
    /// %turn of the first stage, and %step_entry and %step_block to what [`Text::next_listed`] adds to them. %e0 and %e1 change.
    pub(super) fn first_listed(&mut self, entry: &str, block: &str, turns: u32) {
        line!(
            self,
            "mov.u32 %e1, %nctaid.x;
mov.u32 %e0, %ctaid.x;
mad.lo.u32 %e0, %turn, %e1, %e0;
div.u32 {entry}, %e0, %expert_blocks;
mul.lo.u32 {block}, {entry}, %expert_blocks;
sub.u32 {block}, %e0, {block};
mad.lo.u32 {entry}, {entry}, {ENTRY_BYTES}, %base;
mul.lo.u32 %e1, %e1, {turns};
div.u32 %step_entry, %e1, %expert_blocks;
mul.lo.u32 %step_block, %step_entry, %expert_blocks;
sub.u32 %step_block, %e1, %step_block;
mul.lo.u32 %step_entry, %step_entry, {ENTRY_BYTES};"
        );
    }

    /// Goes on to the entry and the block of a later turn.
    pub(super) fn next_listed(&mut self, entry: &str, block: &str) {
        line!(
            self,
            "add.u32 {entry}, {entry}, %step_entry;
add.u32 {block}, {block}, %step_block;
setp.ge.u32 %p0, {block}, %expert_blocks;
@%p0 sub.u32 {block}, {block}, %expert_blocks;
@%p0 add.u32 {entry}, {entry}, {ENTRY_BYTES};"
        );
    }

    /// Sets %e2 to the number of the group's expert of a section in the second stage, and %e3 to the place of its entry. %p1 says
    /// whether there is one; otherwise they are those of the last one. %e0 changes.
    fn section_expert(&mut self, section: &str) {
        line!(
            self,
            "mad.lo.u32 %e0, {section}, {at_once}, %own_expert;
setp.lt.u32 %p1, %e0, %distinct;
max.u32 %e3, %distinct, 1;
sub.u32 %e3, %e3, 1;
min.u32 %e0, %e0, %e3;
mad.lo.u32 %e3, %e0, {ENTRY_BYTES}, %base;
mov.u32 %e2, 0;
@%p1 ld.shared.u32 %e2, [%e3+{list}];",
            at_once = self.v.at_once(),
            list = self.v.places().list,
        );
    }

    /// Sets the register `count` to the number of the group's units in a section of the second stage: all of its own, if there is
    /// an expert. %e0 and %p1 change.
    pub(super) fn section_units(&mut self, section: &str, count: &str) {
        line!(
            self,
            "mad.lo.u32 %e0, {section}, {}, %own_expert;
setp.lt.u32 %p1, %e0, %distinct;
selp.b32 {count}, %own, 0, %p1;",
            self.v.at_once()
        );
    }

    /// Sets %copies to the number of the group's units of all sections and %blocks blocks.
    pub(super) fn count_copies(&mut self) {
        let at_once = self.v.at_once();
        line!(
            self,
            "add.u32 %e0, %distinct, {};
sub.u32 %e0, %e0, %own_expert;
div.u32 %e0, %e0, {at_once};
mul.lo.u32 %copies, %blocks, %own;
mul.lo.u32 %copies, %copies, %e0;",
            at_once - 1
        );
    }

    /// Sets %row0 and the others to the group's first 16 bytes of a section's rows of x in the second stage, and %chose0 and the
    /// others to whether the row chose the expert.
    pub(super) fn section_rows(&mut self) {
        let v = self.v;
        let list = v.places().list;
        self.section_expert("%section");
        line!(self, "mul.lo.u32 %quad, %first_unit, {};\nadd.u32 %quad, %quad, %lane;", unit_cols(v.codes) / 4);
        line!(self, "ld.param.u32 %e1, [args+{}];", v.argument("x_stride"));
        let (names, no_choice) = (v.names_rows(), v.no_choice());
        if v.adds_some_rows() {
            // The place of the lane's sums.
            line!(
                self,
                "and.b32 %e4, %t, {};
mad.lo.u32 %e4, %e4, 4, %e3;
mov.u32 %named, {no_choice};
@%p1 ld.shared.u32 %named, [%e4+{}];",
                v.block_rows() - 1,
                list + 16
            );
        }
        for row in 0..v.rows {
            if row >= v.stored_rows {
                line!(self, "mov.u64 %row{row}, %row{};\nsetp.ne.u32 %chose{row}, %e4, {no_choice};", row - 1);
                continue;
            }
            // %e6: the row. %e7: the expert's place among its choices.
            let split = match names {
                true => format!(
                    "selp.b32 %e7, %e4, 0, %chose{row};\nshr.u32 %e6, %e7, {ROW_SHIFT};\nand.b32 %e7, %e7, {};\n",
                    (1 << ROW_SHIFT) - 1
                ),
                false => String::new(),
            };
            line!(
                self,
                "mov.u32 %e4, {no_choice};
@%p1 ld.shared.u32 %e4, [%e3+{place}];
setp.ne.u32 %chose{row}, %e4, {no_choice};
{split}mov.u32 %e5, 0;
@%chose{row} mov.u32 %e5, {choice};
mul.lo.u32 %e5, %e5, {quads};
add.u32 %e5, %e5, %quad;
mul.lo.u32 %e6, %e1, {of_x};
shr.u32 %e6, %e6, 2;
add.u32 %e5, %e5, %e6;
mul.wide.u32 %l1, %e5, 16;
add.u64 %row{row}, %x, %l1;",
                place = list + 16 + row * 4,
                choice = if names { "%e7" } else { "%e4" },
                of_x = if names { "%e6".to_owned() } else { row.to_string() },
                quads = v.of_experts().columns.next_multiple_of(FRAGMENT_COLS) / 4,
            );
        }
    }

    /// Sets the offset %to of a pass in y, and the predicate %stores: in the first stage, where the lane's row of y has chosen the expert
    /// of the block whose entry is at %listed. %share is the choice's share. The block's row of W of the lane is %r5.
    pub(super) fn place_of_choice(&mut self, pass: u32) {
        let v = self.v;
        let places = v.places();
        let halves = v.halves();
        let split = if v.names_rows() {
            format!("shr.u32 %e1, %e3, {ROW_SHIFT};\nand.b32 %e3, %e3, {};\n", (1 << ROW_SHIFT) - 1)
        } else {
            String::new()
        };
        // Rows of y: the part of each choice, padded.
        line!(
            self,
            "add.u32 %e1, %g, {row};
mad.lo.u32 %e2, %e1, 4, %listed;
mov.u32 %e3, {no_choice};
setp.lt.u32 %p2, %e1, {rows};
@%p2 ld.shared.u32 %e3, [%e2+{choices}];
setp.ne.and.u32 %stores, %e3, {no_choice}, %p1;
{split}mov.f32 %share, 0f00000000;
mad.lo.u32 %e1, %e1, {row_bytes}, %base;
mad.lo.u32 %e1, %e3, 4, %e1;
@%stores ld.shared.f32 %share, [%e1+{shares}];
shr.u32 %e1, %n, {halves};
add.u32 %e1, %e1, {pad};
and.b32 %e1, %e1, {whole:#x};
shr.u32 %e2, %r5, {halves};
mad.lo.u32 %e1, %e3, %e1, %e2;
mul.wide.u32 %to, %e1, 4;",
            row = if v.rows == 1 { 0 } else { pass * 2 },
            no_choice = v.no_choice(),
            rows = v.finished_rows(),
            choices = places.list + 16,
            row_bytes = MOST_CHOSEN * 4,
            shares = places.shares,
            halves = u32::from(halves),
            pad = FRAGMENT_COLS - 1,
            whole = !(FRAGMENT_COLS - 1),
        );
    }

    /// Loads the biases: in the first stage %bias_of_row, of the expert's row %r5 whose entry is at %listed; in the second one %biases0
    /// and the others, the sums over a row's choices of their shares times the bias of the lane's row of W, whose offset is %l1.
    pub(super) fn load_biases(&mut self) {
        let v = self.v;
        let e = v.of_experts();
        let Places { list, ids, shares, .. } = v.places();
        if !e.down {
            line!(
                self,
                "ld.shared.u32 %e1, [%listed+{list}];
add.u32 %e1, %e1, {first};
mul.wide.u32 %l0, %e1, %n;
shl.b64 %l0, %l0, 2;
mul.wide.u32 %l2, %r5, 4;
add.u64 %l0, %l0, %l2;
add.u64 %l0, %bias, %l0;
ld.global.nc.f32 %bias_of_row, [%l0];",
                first = e.first,
            );
            return;
        }
        for pass in 0..v.passes() {
            // A pass with one row of y has it in all lanes.
            line!(
                self,
                "add.u32 %e1, %g, {row};
min.u32 %e1, %e1, {last};
mad.lo.u32 %e1, %e1, {row_bytes}, %base;
mov.f32 %biases{pass}, 0f00000000;",
                row = pass * 2,
                last = v.stored_rows - 1,
                row_bytes = MOST_CHOSEN * 4,
            );
            for j in 0..e.chosen {
                line!(
                    self,
                    "ld.shared.u32 %e2, [%e1+{id}];
ld.shared.f32 %f1, [%e1+{share}];
mul.wide.u32 %l0, %e2, %n;
shl.b64 %l0, %l0, 2;
add.u64 %l0, %l0, %l1;
add.u64 %l0, %l0, %bias;
mov.f32 %f2, 0f00000000;",
                    id = ids + j * 4,
                    share = shares + j * 4,
                );
                // Other calls add the biases of experts that are elsewhere.
                let mut here = "";
                if e.part > 0 {
                    here = "@%p0 ";
                    line!(self, "sub.u32 %e2, %e2, {};\nsetp.lt.u32 %p0, %e2, {};", e.first, e.part);
                }
                line!(self, "{here}ld.global.nc.f32 %f2, [%l0];\nfma.rn.f32 %biases{pass}, %f1, %f2, %biases{pass};");
            }
        }
    }

    /// Loads the shared expert's output for a pass.
    pub(super) fn load_shared(&mut self, pass: u32) {
        let first = if self.v.is_half(pass) { "@%first " } else { "" };
        line!(self, "{first}ld.volatile.global.u32 %shared{pass}, [%shared_at{pass}];");
    }

    /// Adds the shared expert's output, times its gate, to %f0.
    pub(super) fn add_shared(&mut self, pass: u32) {
        let v = self.v;
        if v.tagged > 0 {
            let label = self.ptx.label();
            line!(
                self,
                "ld.param.u32 %e1, [args+{}];
bra CHECK{label};
POLLSHARED{label}:",
                v.argument("shared_tag")
            );
            self.load_shared(pass);
            line!(self, "CHECK{label}:\nxor.b32 %r0, %shared{pass}, %e1;");
            self.poll_again(&format!("POLLSHARED{label}"), "%e1");
        }
        line!(
            self,
            "add.u32 %e2, %g, {row};
min.u32 %e2, %e2, {last};
mad.lo.u32 %e2, %e2, 4, %base;
ld.shared.f32 %f1, [%e2+{gates}];
mov.b32 %f2, %shared{pass};
fma.rn.f32 %f0, %f1, %f2, %f0;",
            row = pass * 2,
            last = v.stored_rows - 1,
            gates = v.places().gates,
        );
    }

    /// Declares the registers of a program for experts.
    pub(super) fn expert_registers(&mut self) {
        let candidates = self.v.of_experts().candidates();
        line!(
            self,
            ".reg .pred %chose<4>, %stores;
.reg .b32 %e<8>, %key<{candidates}>, %all<{candidates}>, %id, %best, %most, %gate, %logits_tag, %shared<4>;
.reg .b32 %distinct, %expert_blocks, %own_expert, %last_section, %copy_entry, %copy_block, %listed, %of_listed, %step_entry, %step_block;
.reg .b32 %first_x, %first_factors, %row_of_column, %named;
.reg .f32 %bias<{candidates}>, %score<{candidates}>, %score_of_lane, %share, %factor_u, %factor_v, %biases<4>;
.reg .b64 %shared_at<4>, %to, %header;"
        );
    }
}
