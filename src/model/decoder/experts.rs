//! MoE layers: the router and the products of the chosen experts. A few rows are computed one by one; many are sorted by expert.
//!
//! Not here: the choice of experts, which kernels make (`kernels::moe`).

use super::products::{CODES_PTX_GROUPS, Operands, Unpacked, left_over};
use super::{Block, Decoder, Step, StepShape};
use crate::kernels::gemm::codes_ptx::CodesPtxConfig;
use crate::kernels::gemm::matmul::{Arithmetic, Blocked, MatmulConfig, MatmulRows, block_rows};
use crate::kernels::gemm::panel::Fold;
use crate::kernels::gemm::skinny::Matrices;
use crate::kernels::gemm::tiled::{self, Output, Packed, PackedOrder};
use crate::kernels::gemm::{Activations, Epilogue, Matrix, wgmma};
use crate::kernels::moe::{self, FewRows, GemvRows, Grouped, Mlp, Sorted, Stack, Used};
use crate::kernels::recording::{Op, Range, Recording};
use crate::kernels::stream::{self, Beside, Branch, BranchFlow};
use crate::kernels::tags::Flow;
use crate::memory::pack::Format;
use crate::memory::pack::codes::unit_cols;
use crate::model::checkpoint::WeightSpec;
use crate::model::config::{self, Experts};
use crate::quant::Codes;
use std::cmp::Reverse;

/// The maximum number of groups of lanes of the second stage of experts in `expert_skinny.codes.ptx`.
const MOST_EXPERT_GROUPS: u32 = 20;

impl Decoder<'_> {
    /// Returns the dimensions of an MoE layer.
    pub(super) fn expert_shape(&self, experts: Experts) -> moe::ExpertsShape {
        moe::ExpertsShape {
            count: experts.count,
            chosen: experts.chosen,
            inner: experts.inner,
            hidden: self.config.hidden,
            shared_inner: experts.shared_inner,
            normalise: experts.normalise,
            epilogue: self.activated(),
            gated: experts.shared_gate,
        }
    }

    /// Whether the experts' products of a few rows, on weights in fragment order, choose the experts themselves.
    pub(super) fn chooses_alone(&self) -> bool {
        let plain = |of: config::Routing| moe::few_serve(of.sigmoid, of.choice_bias, (of.groups, of.kept));
        self.config.experts.is_some_and(|experts| experts.routing.is_none_or(plain))
    }

    /// Whether a step of this shape runs the kernels for a few rows in fragments, which choose the experts themselves.
    fn chooses_few(&self, shape: StepShape, block: &Block) -> bool {
        let router = block.name("router");
        self.named_in_fragments(&router) && self.chooses_alone() && !self.packs_for(shape, &router)
    }

    /// Whether products of its own compute a shared expert in a step of few rows: beside experts of codes, whose format may be
    /// another one.
    pub(super) fn shared_is_apart(&self) -> bool {
        let shared = self.config.experts.is_some_and(|experts| experts.shared_inner.is_some());
        shared && self.has_coded_experts() && self.tuning.fragments.is_some() && self.chooses_alone()
    }

    /// Returns the workgroups of `expert_skinny.codes.ptx` for the two stages of a number of rows, if it computes them.
    fn expert_programs(&self, mlp: &Mlp, rows: u32) -> [Option<CodesPtxConfig>; 2] {
        let programs = [(&mlp.gate_up, false), (&mlp.down, true)]
            .map(|(stacks, down)| self.expert_program(stacks[0].matrix.format, mlp.shape, rows, down));
        // Both stages choose the experts. The shader's sigmoids may be rounded in another way than the program's, by which
        // two experts could be in another order.
        match mlp.routing.is_some_and(|routing| routing.sigmoid) && programs.contains(&None) {
            true => [None; 2],
            false => programs,
        }
    }

    /// Returns the workgroups of `expert_skinny.codes.ptx` for a stage of a number of rows with weights in a format, if it serves
    /// them.
    fn expert_program(
        &self,
        format: Format,
        shape: moe::ExpertsShape,
        rows: u32,
        down: bool,
    ) -> Option<CodesPtxConfig> {
        let t = &self.tuning;
        let codes = format.codes().filter(|_| t.ptx && t.expert_ptx && t.fragments == Some(Matrices::Cooperative))?;
        let (n, cols) = shape.matrix(down);
        let (units, processors) = (cols.div_ceil(unit_cols(codes)), t.processors.max(1));
        let rule = || expert_rule(codes, units, shape.chosen, down, processors);
        let program = t.expert_ptx_shapes.get(&(codes.bits, n, cols)).copied().unwrap_or_else(rule);
        shape.program_serves(program, format, rows, down).then_some(program)
    }

    /// Whether `expert_skinny.codes.ptx` multiplies the experts of a weight with a number of rows.
    pub(super) fn programs_serve(&self, weight: &WeightSpec, rows: u32) -> bool {
        // A block that drafts is not divided among devices.
        let experts = if weight.is_mtp() { self.config.mtp_experts } else { self.config.experts };
        experts.is_some_and(|experts| {
            let (shape, down) = (self.expert_shape(experts), weight.merged.ends_with("experts.down"));
            self.chooses_alone() && self.expert_program(weight.format, shape, rows, down).is_some()
        })
    }

    fn one_matrix(&self, r: &mut Recording, name: &str) -> Matrix {
        match self.matrix(r, name)[..] {
            [(_, matrix)] => matrix,
            ref parts => panic!("\"{name}\" is in {} parts: the start refuses that", parts.len()),
        }
    }

    /// Returns the stacks of the experts of a weight, whose matrices have `rows` rows each.
    fn stacks(&self, r: &mut Recording, name: &str, rows: u32) -> Vec<Stack> {
        self.matrix(r, name).into_iter().map(|(first, matrix)| Stack { matrix, first: first / rows }).collect()
    }

    /// Records a dense MLP and experts with the same input, whose normed outputs are added: x += norm(norm(MLP(x)) +
    /// norm(experts(x))), times the layer's factor.
    pub(super) fn experts_beside_dense(&self, r: &mut Recording, shape: StepShape, step: &Step, block: &Block) {
        let c = self.config;
        let hidden = self.mlp_hidden(r, shape, step, block);
        let down = block.name("down");
        let operands = Operands { weight: &down, x: hidden, y: step.branch, epilogue: Epilogue::Store };
        self.output(r, shape, step, operands, (None, Fold::None));
        // A device must have got all words of an exchange before it begins the next one. The second sum does not depend on the
        // first, but there are barriers between the calls of the experts.
        if self.stage.rank.is_some() {
            self.all_reduce(r, shape, step, &down, (step.branch, step.branch));
        }
        self.experts_into(r, shape, step, block, step.of_experts);
        if self.stage.rank.is_some() {
            self.all_reduce(r, shape, step, &block.name("experts"), (step.of_experts, step.of_experts));
        }
        let mut norm = |name: &str| self.vector(r, &block.name(name)).expect("both branches and their sum have norms");
        let beside = Beside { x: step.of_experts, norm: norm("experts.post_norm"), sum_norm: norm("mlp_post_norm") };
        let branch = Branch {
            x: step.branch,
            norm: Some(norm("dense_post_norm")),
            beside: Some(beside),
            epsilon: c.rms_eps,
            scale: c.residual_scale,
        };
        let factor = self.layer_factor(r, block, true);
        let tags = BranchFlow {
            beside: step.flow(Some(step.of_experts.range), None),
            flow: step.flow(Some(step.branch.range), Some(step.x.range)),
        };
        let (label, size) = (block.name("mlp_add"), (shape.rows(), c.hidden));
        r.call(stream::add_branch(label, size, branch, (step.x, factor), tags, step.fault));
    }

    /// Records a router and its experts, whose output is added to the residual stream: directly, or as a sum over all devices,
    /// times the model's factor.
    pub(super) fn add_experts(&self, r: &mut Recording, shape: StepShape, step: &Step, block: &Block) {
        let (staged, shared) = (self.config.residual_scale != 1.0, self.stage.rank.is_some());
        if !staged && !shared {
            return self.experts(r, shape, step, block, step.x);
        }
        self.experts_into(r, shape, step, block, step.branch);
        if shared {
            let to = if staged { step.summed } else { step.x };
            self.all_reduce(r, shape, step, &block.name("experts"), (step.branch, to));
        }
        if staged {
            let x = if shared { step.summed } else { step.branch };
            self.add_branch(r, shape, step, block.name("experts_add"), (x, None, None));
        }
    }

    /// Records a router and its experts, whose output replaces `y`.
    pub(super) fn experts_into(&self, r: &mut Recording, shape: StepShape, step: &Step, block: &Block, y: Activations) {
        // Experts of few rows replace y themselves, others add to it.
        if !self.chooses_few(shape, block) {
            r.ops.push(Op::Fill { to: y.range, word: 0 });
        }
        self.experts(r, shape, step, block, y);
    }

    /// Records a router and its experts, whose output is added to `y`: the residual stream, or a buffer that
    /// [`Decoder::experts_into`] clears.
    pub(super) fn experts(&self, r: &mut Recording, shape: StepShape, step: &Step, block: &Block, y: Activations) {
        let c = self.config;
        let experts = self.expert_shape(block.experts.expect("a layer of this kind has a configuration"));
        let rows = shape.rows();
        let shared = experts.shared_inner.map(|_| {
            (self.one_matrix(r, &block.name("shared.gate_up")), self.one_matrix(r, &block.name("shared.down")))
        });
        let own = self.vector(r, &block.name("experts.norm"));
        let norm = own.or_else(|| self.vector(r, &block.name("mlp_norm"))).expect("a layer has a norm");
        let router_norm = self.vector(r, &block.name("router.norm")).unwrap_or(norm);
        let mlp = Mlp {
            label: format!("{}.", block.prefix),
            shape: experts,
            gate_up: self.stacks(r, &block.name("experts.gate_up"), experts.first_rows(experts.inner)),
            down: self.stacks(r, &block.name("experts.down"), c.hidden),
            shared,
            biases: [
                self.vector(r, &block.name("experts.gate_up.bias")),
                self.vector(r, &block.name("experts.down.bias")),
            ],
            x: step.x,
            y,
            adds: y.range == step.x.range,
            routing: self.routing(r, block),
            norm: (norm, c.rms_eps),
            logits: step.router,
        };
        let router = block.name("router");
        let few = self.chooses_few(shape, block);
        if self.named_in_fragments(&router) && !few {
            self.many_experts(r, shape, step, block, &mlp, router_norm);
            return;
        }
        let operands = Operands { weight: &router, x: step.x, y: step.router, epilogue: Epilogue::Store };
        self.product(r, shape, step, operands, Some(router_norm));
        match self.tuning.fragments.filter(|_| few) {
            Some(matrices) => {
                let [gate_up, down] = mlp.few_configs(rows, matrices, self.tuning.shared_bytes);
                let in_ptx = self.expert_programs(&mlp, rows);
                let apart = mlp.shared.is_some() && self.shared_is_apart();
                let logits = step.flow(Some(step.router.range), None);
                if apart {
                    let weight = block.name("shared.gate_up");
                    let operands = Operands { weight: &weight, x: step.x, y: step.mlp, epilogue: self.activated() };
                    self.product(r, shape, step, operands, Some(norm));
                }
                let few = |(config, ptx), from: Activations, to: Activations, shared| {
                    let flow = step.flow(Some(from.range), Some(to.range));
                    let (middle, fault) = (step.middle, step.fault);
                    FewRows { middle, rows, matrices, config, ptx, flow, logits, fault, shared }
                };
                let output = apart.then_some((step.of_shared, Flow::NONE));
                let first = few((gate_up, in_ptx[0]), step.x, step.middle, output);
                for stack in &mlp.gate_up {
                    r.call(mlp.few_gate_up(stack, first));
                }
                let output = apart.then(|| {
                    let weight = block.name("shared.down");
                    let operands =
                        Operands { weight: &weight, x: step.mlp, y: step.of_shared, epilogue: Epilogue::Store };
                    self.product(r, shape, step, operands, None);
                    (step.of_shared, step.flow(Some(step.of_shared.range), None))
                });
                for stack in &mlp.down {
                    r.call(mlp.few_down(stack, few((down, in_ptx[1]), step.middle, y, output)));
                }
            }
            None => {
                let (used, valid) = Self::used(shape, step);
                let choices = r.buffer("experts.choices", experts.choices_bytes(rows));
                r.call(mlp.choose(used, valid, choices));
                let configs = self.sorted_configs(&mlp, rows);
                if rows > self.most_unsorted() && configs[0].tokens == configs[1].tokens {
                    self.sorted_experts(r, shape, step, block, &mlp, choices);
                    return;
                }
                let rows = |cols| GemvRows { used, choices, threads: self.gemv_threads(cols) };
                for stack in &mlp.gate_up {
                    r.call(mlp.gemv_gate_up(stack, rows(c.hidden), step.middle));
                }
                for stack in &mlp.down {
                    r.call(mlp.gemv_down(stack, rows(experts.inner), step.middle));
                }
            }
        }
    }

    /// Returns the maximum number of rows that read their experts' row-major weights each on its own. Few sorted rows leave most of
    /// a tile empty, so without matrix units it is more than that of other products.
    fn most_unsorted(&self) -> u32 {
        match self.tuning.arithmetic {
            Arithmetic::Matrices(_) => self.tuning.gemv_most,
            Arithmetic::F32 | Arithmetic::F16 => self.tuning.gemv_most.max(16),
        }
    }

    /// Returns the number of rows of one expert of `count`, on average, of which each of `rows` rows chooses `chosen`; at most
    /// as many as tiles of sorted rows have.
    pub fn rows_of_expert(rows: u32, chosen: u32, count: u32) -> u32 {
        (rows * chosen / count).clamp(1, 64)
    }

    /// Returns the workgroups of `matmul` for the two products of sorted rows, with tiles of about as many rows as an
    /// expert has.
    fn sorted_configs(&self, mlp: &Mlp, rows: u32) -> [MatmulConfig; 2] {
        let each = Self::rows_of_expert(rows, mlp.shape.chosen, mlp.shape.count);
        [(&mlp.gate_up, mlp.shape.first_rows(mlp.shape.inner)), (&mlp.down, mlp.shape.hidden)]
            .map(|(stacks, n)| self.matmul_config(&stacks[0].matrix, each, n))
    }

    /// Records the experts' products for many rows sorted by expert, on row-major weights, after the choice of experts.
    fn sorted_experts(
        &self,
        r: &mut Recording,
        shape: StepShape,
        step: &Step,
        block: &Block,
        mlp: &Mlp,
        choices: Range,
    ) {
        let (c, rows, experts) = (self.config, shape.rows(), mlp.shape);
        let [gate_up, down] = self.sorted_configs(mlp, rows);
        let (used, _) = Self::used(shape, step);
        let sorted = Self::sorted(r, mlp, used, choices, gate_up.tokens);
        let mut blocked = |name: &str, stacks: &[Stack]| {
            let weight = stacks[0].matrix;
            let arithmetic = self.tuning.arithmetic.of(weight.format);
            Blocked::declare(r, name, arithmetic, sorted.slot_count(), weight.cols)
        };
        let (x, packed) = (blocked("blocked.experts", &mlp.gate_up), blocked("blocked.inner", &mlp.down));
        let middle = Self::activations(r, "experts.sorted", sorted.slot_count(), experts.inner);
        let stride = step.x.stride;
        let parts = Activations { range: r.buffer("experts.parts", experts.parts_bytes(rows, stride)), stride };
        r.call(block_rows(block.name("experts.block"), step.x, Some(mlp.norm), x, MatmulRows::Sorted(&sorted)));
        for stack in &mlp.gate_up {
            r.call(mlp.matmul_gate_up(stack, x, middle, &sorted, gate_up));
        }
        r.call(block_rows(block.name("experts.down_block"), middle, None, packed, MatmulRows::Slots(&sorted)));
        for stack in &mlp.down {
            r.call(mlp.matmul_down(stack, packed, parts, &sorted, down));
        }
        let shared = experts.shared_inner.map(|inner| {
            let hidden = Self::activations(r, "shared.hidden", rows, inner);
            let output = Self::activations(r, "shared.output", rows, c.hidden);
            let (gate_up, down) = (block.name("shared.gate_up"), block.name("shared.down"));
            let operands = Operands { weight: &gate_up, x: step.x, y: hidden, epilogue: self.activated() };
            self.product(r, shape, step, operands, Some(mlp.norm.0));
            let operands = Operands { weight: &down, x: hidden, y: output, epilogue: Epilogue::Store };
            self.product(r, shape, step, operands, None);
            output
        });
        r.call(mlp.combine(used, choices, parts, shared));
    }

    /// Returns how a layer's router selects experts, if not by the greatest logits.
    fn routing(&self, r: &mut Recording, block: &Block) -> Option<moe::Route> {
        let routing = self.config.experts.and_then(|experts| experts.routing)?;
        let bias = routing.choice_bias.then(|| self.vector(r, &block.name("router.choice_bias"))).flatten();
        let scales = routing.expert_scales.then(|| self.vector(r, &block.name("router.scales"))).flatten();
        let config::Routing { sigmoid, groups, kept, best, sum_offset, factor, logit_scale, .. } = routing;
        Some(moe::Route { sigmoid, bias, groups, kept, best, sum_offset, factor, logit_scale, scales })
    }

    /// Returns the rows of a step, and the row table that marks valid rows. For a prefill step it returns no table: the
    /// chunk descriptor gives the number of valid rows.
    fn used(shape: StepShape, step: &Step) -> (Used, Option<Range>) {
        let prompts = matches!(shape, StepShape::Prefill { .. });
        (Used { rows: shape.rows(), count: prompts.then_some(step.chunk) }, (!prompts).then_some(step.rows))
    }

    /// Records the sorting of rows by expert into tiles of `tile` rows.
    fn sorted(r: &mut Recording, mlp: &Mlp, used: Used, choices: Range, tile: u32) -> Sorted {
        let [tiles, slots] = Sorted::bytes(&mlp.shape, used.rows, tile);
        let (tiles, slots) = (r.buffer("experts.tiles", tiles), r.buffer("experts.slots", slots));
        let sorted = Sorted::new(&mlp.shape, used.rows, tile, tiles, slots);
        r.call(mlp.plan(used, choices, &sorted));
        sorted
    }

    /// Records an MoE layer for many rows sorted by expert, with weights in fragment order.
    fn many_experts(
        &self,
        r: &mut Recording,
        shape: StepShape,
        step: &Step,
        block: &Block,
        mlp: &Mlp,
        router_norm: Range,
    ) {
        let c = self.config;
        let rows = shape.rows();
        let experts = mlp.shape;
        let matrices = self.tuning.fragments.unwrap_or(Matrices::Emulated);
        let (used, valid) = Self::used(shape, step);
        // The shared expert's products read the same rows.
        assert!(mlp.shared.is_none() || router_norm == mlp.norm.0, "a shared expert has the router's norm");
        // The router's rows are also those of the shared expert, both of whose products must take them.
        let names = ["router", "shared.gate_up", "shared.down"].map(|name| block.name(name));
        let names = &names[..if mlp.shared.is_some() { 3 } else { 1 }];
        let orders: Vec<PackedOrder> = names.iter().map(|name| self.packed_order(shape, name)).collect();
        let halves = |order: &PackedOrder| order.format() == Format::F16;
        let swizzled = names.iter().all(|name| self.wgmma_serves(shape, name, wgmma::serves));
        let gated = experts.epilogue.halves();
        let order = match swizzled && mlp.shared.is_none_or(|(gate_up, _)| !gated || wgmma::packs(gate_up.rows)) {
            _ if halves(&orders[0]) && orders.iter().all(|order| *order == orders[0]) => orders[0],
            true if !orders.iter().any(halves) => PackedOrder::Swizzled,
            _ => PackedOrder::Fragments,
        };
        let (label, norm) = (block.name("router_pack"), Some(router_norm));
        let packed = self.pack(r, shape, step, Unpacked { label, x: step.x, cols: c.hidden, norm, order });
        let (router, y) = (block.name("router"), Output::Rows(step.router));
        self.tiled(r, shape, step, Operands { weight: &router, x: packed, y, epilogue: Epilogue::Store }, Fold::None);
        let choices = r.buffer("experts.choices", experts.choices_bytes(rows));
        r.call(mlp.choose(used, valid, choices));

        let many = rows * experts.chosen / experts.count >= self.tuning.wgmma_each;
        let formats = [&mlp.gate_up, &mlp.down].map(|stacks| stacks[0].matrix.format);
        // The programs of `wgmma` read one matrix of all experts.
        let fills = !formats.contains(&Format::F16) || rows >= self.half_rows();
        let wgmma = (self.tuning.ptx && many && fills && mlp.is_whole())
            .then(|| {
                let (processors, fp8) =
                    (self.tuning.processors, self.tuning.fp8_activations && rows >= self.tuning.e4m3_rows);
                Grouped::wgmma(&experts, rows, processors, formats, &self.tuning.wgmma, fp8)
            })
            .flatten();
        let (tile, how) = wgmma.unwrap_or_else(|| {
            let (shapes, in_f16) = (&self.tuning.panel, self.tuning.panel_f16);
            Grouped::choose(&experts, rows, matrices, formats, shapes, in_f16)
        });
        let sorted = Self::sorted(r, mlp, used, choices, tile);
        let mut packed_rows = |name: &str, cols: u32| Packed {
            range: r.buffer(&Self::rows_name(name, how.order()), sorted.packed_bytes(how.order(), cols)),
            cols,
            order: how.order(),
        };
        let (x, middle) = (packed_rows("experts.x", c.hidden), packed_rows("experts.packed", experts.inner));
        let stride = step.x.stride;
        let parts = Activations { range: r.buffer("experts.parts", experts.parts_bytes(rows, stride)), stride };
        r.call(tiled::pack_sorted(block.name("experts.pack"), step.x, Some(mlp.norm), x, &sorted));
        if experts.packs_middle(how.order()) {
            for stack in &mlp.gate_up {
                r.call(mlp.sorted_gate_up(stack, x, Output::Packed(middle), &sorted, how));
            }
        } else {
            let bytes = u64::from(rows) * u64::from(experts.chosen) * u64::from(experts.inner) * 4;
            let hidden = Activations { range: r.buffer("experts.hidden", bytes), stride: experts.inner };
            for stack in &mlp.gate_up {
                r.call(mlp.sorted_gate_up(stack, x, Output::Rows(hidden), &sorted, how));
            }
            // Each choice has a row of its own.
            let sorted = Sorted { chosen: 1, ..sorted };
            r.call(tiled::pack_sorted(block.name("experts.hidden_pack"), hidden, None, middle, &sorted));
        }
        for stack in &mlp.down {
            r.call(mlp.sorted_down(stack, middle, parts, &sorted, how));
        }
        let shared = experts.shared_inner.map(|inner| {
            let output = Self::activations(r, "shared.output", rows, c.hidden);
            let (gate_up, down) = (block.name("shared.gate_up"), block.name("shared.down"));
            let first = |y: Output| Operands { weight: &gate_up, x: packed, y, epilogue: self.activated() };
            let hidden = match experts.packs_middle(order) {
                true => {
                    let hidden = Packed { order, ..Self::packed(r, "shared.packed", rows, inner) };
                    self.tiled(r, shape, step, first(Output::Packed(hidden)), Fold::None);
                    hidden
                }
                false => {
                    let x = Self::activations(r, "shared.hidden", rows, inner);
                    self.tiled(r, shape, step, first(Output::Rows(x)), Fold::None);
                    let label = block.name("shared.down_pack");
                    self.pack(r, shape, step, Unpacked { label, x, cols: inner, norm: None, order })
                }
            };
            let y = Output::Rows(output);
            let operands = Operands { weight: &down, x: hidden, y, epilogue: Epilogue::Store };
            self.tiled(r, shape, step, operands, Fold::None);
            output
        });
        r.call(mlp.combine(used, choices, parts, shared));
    }
}

/// Returns the workgroups of `expert_skinny.codes.ptx` for a stage of experts whose matrices have `units` units of columns: one for
/// each processor. Measured on H200s with the experts of Qwen3-30B-A3B, GLM-4.5-Air and Nemotron 3 Nano.
fn expert_rule(codes: Codes, units: u32, chosen: u32, down: bool, processors: u32) -> CodesPtxConfig {
    let groups = match down {
        // The experts that a row chooses are multiplied at once, each by an equal number of groups of lanes.
        true => {
            let each = (MOST_EXPERT_GROUPS / chosen).clamp(1, units);
            let even = (1..=each).rev().find(|each| units.is_multiple_of(*each)).filter(|even| even * 2 > each);
            chosen * even.unwrap_or(each)
        }
        // The groups share the columns equally, or nearly so.
        false => {
            let best = CODES_PTX_GROUPS.min_by_key(|groups| (left_over(units, *groups), Reverse(*groups)));
            units.min(best.expect("there are groups"))
        }
    };
    let slots = if codes.bits == 8 { 3 } else { 2 };
    CodesPtxConfig { groups, slots, workgroups: processors }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::Minimum;
    use crate::quant::number::Number;

    /// Goal: the stages of measured models have the shapes that were measured, and the groups of others divide their work equally.
    #[test]
    fn experts_of_codes_have_the_shapes_of_measured_models() {
        let shape = |bits, (units, chosen, down): (u32, u32, bool)| {
            let codes = Codes { bits, group: 32, number: Number::Affine, minimum: Minimum::Stored };
            let CodesPtxConfig { groups, slots, workgroups } = expert_rule(codes, units, chosen, down, 132);
            assert_eq!(workgroups, 132);
            (groups, slots)
        };
        // Qwen3-30B-A3B; GLM-4.5-Air; Nemotron 3 Nano.
        assert_eq!([shape(4, (16, 8, false)), shape(4, (6, 8, true)), shape(6, (6, 8, true))], [(16, 2); 3]);
        assert_eq!([shape(4, (32, 8, false)), shape(4, (11, 8, true))], [(16, 2); 2]);
        assert_eq!([shape(4, (21, 6, false)), shape(4, (15, 6, true))], [(21, 2), (18, 2)]);
        assert_eq!([shape(8, (16, 8, false)), shape(8, (6, 8, true))], [(16, 3); 2]);
        for (units, chosen) in (1..80).flat_map(|units| (1..=16).map(move |chosen| (units, chosen))) {
            let (groups, _) = shape(4, (units, chosen, true));
            assert!(groups.is_multiple_of(chosen) && groups / chosen <= units && groups <= 20, "{units} {chosen}");
            assert!(shape(4, (units, chosen, false)).0 <= units.min(24), "{units}");
        }
    }
}
