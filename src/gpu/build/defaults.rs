//! The default sizes and kernel choices of a replica, where its configuration sets none.

use crate::config::KvFormat;
use crate::device::{Adapter, AdapterKind, Capabilities};
use crate::engine::plan::WindowCapacity;
use crate::gpu::abilities::assumed_processors;
use crate::gpu::build::Build;
use crate::gpu::error::StartError;
use crate::gpu::executor::exchange::MOST_PARTS;
use crate::gpu::matrix_units::promised;
use crate::kernels::attention::PAGE_TOKENS;
use crate::kernels::attention::flash::SHARING_PROMPTS;
use crate::kernels::gemm::gemv_dots::DotsConfig;
use crate::kernels::gemm::matmul::MatrixUnits;
use crate::kernels::gemm::skinny::Matrices;
use crate::kernels::layout::StateLayout;
use crate::kernels::sampling;
use crate::model::checkpoint::WeightSpec;
use crate::model::config::ModelConfig;
use crate::model::decoder::drafter::{Drafter, DrafterKind};
use crate::model::decoder::stage::LayerStage;
use crate::model::decoder::{self, Decoder, RingLayout, Tuning, most_dots_rows, most_gemv_rows};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The maximum number of decode steps that are queued and not yet reported.
pub(crate) const RUN_AHEAD: u32 = 32;

/// The number of steps in the token ring, at least the number of steps that can be queued; a split model queues one for
/// each part of a batch.
pub(crate) const RING_STEPS: u32 = 128;
const _: () = assert!(RUN_AHEAD * MOST_PARTS <= RING_STEPS);

/// The capacity of a patch, in pairs of offset and value: enough for the tokens of a prefill step, its pages and the
/// words of some slots. Larger changes take several patches.
pub(crate) const PATCH_PAIRS: u32 = 4096;

/// The number of rows of an inbox's `seen`.
pub(crate) const SEEN_ROWS: u32 = 1024;

/// The maximum number of sequences of a prompt step: prompts, and slots that decode in it.
pub(crate) const MOST_SEQUENCES: u32 = 256;

/// The maximum number of prompts that share a step; others wait for the next one.
pub(crate) const MOST_PROMPTS: u32 = 64;

// `flash` shares the workgroups of a step's tiles by what each sees only if it has no more prompts than that.
const _: () = assert!(MOST_PROMPTS <= SHARING_PROMPTS);

/// The default number of slots on a CPU driver.
pub(crate) const CPU_SLOTS: u32 = 4;

/// The device memory, in bytes, for which a GPU gets one slot by default. The number of slots is rounded down to a
/// power of two.
pub(crate) const SLOT_MEMORY: u64 = 512 << 20;

/// Whether devices take programs in PTX unless the configuration says otherwise.
pub(crate) const PTX: bool = true;

/// Returns whether a device with these changes of the tuning takes programs in PTX.
pub(crate) fn takes_ptx(tune: &[String]) -> bool {
    let last = tune.iter().rev().find(|change| change.starts_with("ptx="));
    last.map_or(PTX, |change| change != "ptx=0")
}

/// Refuses a change of the tuning that a device does not take: it would be ignored.
pub(crate) fn check_tuning(adapter: &Adapter, tune: &[String]) -> Result<(), StartError> {
    let mut any = tuning(adapter, None, 1, 1);
    match tune.iter().find(|change| !any.set(change)) {
        Some(change) => Err(StartError::Tuning { change: change.clone() }),
        None => Ok(()),
    }
}

/// The minimum and maximum of the default number of slots on a GPU.
pub(crate) const GPU_SLOTS: (u32, u32) = (8, 256);

/// The time that a plan should not exceed on a GPU: a desktop that the same GPU draws may stand still for as long.
pub(crate) const PLAN_LIMIT: Duration = Duration::from_millis(100);

/// The default number of draft tokens per sequence and step on a GPU.
pub(crate) const GPU_DRAFTS: u32 = 3;

/// The maximum number of sequences of a verification step on a GPU. With more sequences, the rows of drafts would cost
/// as much as rows of other sequences.
pub(crate) const GPU_DRAFT_SEQUENCES: u32 = 4;

/// The default number of draft tokens per sequence and step on a CPU driver, where building each recording takes time.
pub(crate) const CPU_DRAFTS: u32 = 1;

/// The maximum number of sequences of a verification step on a CPU driver, for the same reason.
pub(crate) const CPU_DRAFT_SEQUENCES: u32 = 1;

/// The default number of snapshots of recurrent state on a CPU driver.
pub(crate) const CPU_SNAPSHOTS: u32 = 8;

/// By default, snapshots take at most 1/SNAPSHOT_SHARE of a GPU's memory; their number is clamped to [`GPU_SNAPSHOTS`].
pub(crate) const SNAPSHOT_SHARE: u64 = 32;

/// The minimum and maximum of the default number of snapshots on a GPU.
pub(crate) const GPU_SNAPSHOTS: (u32, u32) = (8, 64);

/// The number of inboxes: enough for two plans in flight and for submissions of changes only. A stage of a split model has
/// more (`gpu::build::recordings`).
pub(crate) const INBOXES: usize = 16;

/// The maximum context, in tokens, that is planned if the configuration sets none; a model with a shorter context, or a
/// lack of memory, reduces it.
pub(crate) const DEFAULT_CONTEXT: u32 = 32_768;

/// The maximum length of a prompt, in tokens, that is planned if the configuration sets neither a context nor a chunk, for
/// models whose prompts cannot be divided. Memory for that many rows is planned.
const WHOLE_PROMPT: u32 = 2048;

/// The number of polls after which a wait for another device ends even if the host does not end it: about a minute on a
/// GPU.
const EXCHANGE_POLLS: u32 = 1 << 26;

/// The number of polls with which a GPU keeps itself busy while it waits for another one: some 45 ms of an H200 (half as
/// many took 23), longer than a decode step of a 70B model in 16 bits takes.
const GATE_POLLS: u32 = 1 << 18;

/// The maximum shared memory of a workgroup of `gemv_dots`, in bytes: more would keep other workgroups away.
const DOTS_SHARED_BYTES: u32 = 32 << 10;

/// Returns the largest workgroups of `gemv_dots` for devices that have instructions for its products; CPU drivers, which may say
/// that they do, use `gemv`.
fn dots(adapter: &Adapter, processors: u32) -> Option<DotsConfig> {
    let capabilities = &adapter.capabilities;
    let lanes = capabilities.subgroup_max.max(32);
    let most = capabilities.max_invocations.min(capabilities.max_workgroup_size[0]);
    let subgroups = capabilities.full_subgroups && capabilities.subgroup_min >= 4 && lanes <= most;
    let serves = capabilities.int_dot_accelerated && !adapter.is_cpu() && subgroups;
    serves.then(|| DotsConfig {
        groups: 1 << (most.min(256) / lanes).max(1).ilog2(),
        lanes,
        weight_rows: 2,
        batch: 2,
        workgroups: 2 * processors,
        subgroup: capabilities.subgroup_min,
        shared_bytes: DOTS_SHARED_BYTES.min(capabilities.max_shared_bytes),
    })
}

/// Returns the default choices for a device's capabilities.
pub fn tuning(adapter: &Adapter, matrices: Option<Matrices>, kv_heads: u32, context: u32) -> Tuning {
    let (capabilities, cpu) = (&adapter.capabilities, adapter.is_cpu());
    let most = capabilities.max_invocations.min(capabilities.max_workgroup_size[0]);
    let processors = capabilities.processors.unwrap_or(assumed_processors(adapter.kind));
    let arithmetic = promised(adapter)[0];
    Tuning {
        // A CPU driver runs a workgroup of several subgroups in turns, one subgroup until the next barrier and then another,
        // which costs more than the products of a small matrix.
        gemv_threads: if cpu { capabilities.subgroup_max.clamp(4, 32) } else { 128.min(most) },
        gemv_wide_from: if cpu { 0 } else { 12_000 },
        gemv_most: most_gemv_rows(arithmetic),
        dots: dots(adapter, processors),
        dots_most: most_dots_rows(arithmetic),
        arithmetic,
        matrix_units: MatrixUnits::of(capabilities),
        flash_matrix: true,
        flash_f32: !cpu,
        delta_matrix: true,
        small_tiles: cpu,
        // A workgroup that waits occupies a thread of a CPU driver.
        exchange_workgroups: if cpu { 1 } else { processors },
        // Some CPU drivers end loops after a few thousand turns, and a thread that waits for another device may keep it from
        // running.
        exchange_polls: if cpu { 0 } else { EXCHANGE_POLLS },
        exchange_halves: None,
        gate_polls: if adapter.is_nvidia() && adapter.kind == AdapterKind::Discrete { GATE_POLLS } else { 0 },
        microbatch_rows: if cpu { 16 } else { 256 },
        vocabulary_rows: 1,
        matmul: BTreeMap::new(),
        matmul_shapes: BTreeMap::new(),
        matmul_room: 0,
        weight_buffer: 0,
        // Larger workgroups are faster on long contexts and cost half a microsecond on short ones.
        attention_threads: if cpu { 32 } else { if context >= 8192 { 256 } else { 128 }.min(most) },
        flash_threads: if cpu { 64 } else { 256.min(most) },
        flash_threads_many: if cpu { 64 } else { 128.min(most) },
        spread: 2,
        spread_pages: 2,
        processors,
        shared_bytes: capabilities.max_shared_bytes,
        splits: if cpu { 4 } else { (processors / kv_heads).clamp(4, 32) },
        argmax_threads: if cpu { 32 } else { 256.min(most) },
        sample_threads: sampling::sample_threads(if cpu { 128 } else { most }),
        fragments: matrices,
        skinny: BTreeMap::new(),
        codes: BTreeMap::new(),
        panel: BTreeMap::new(),
        panel_f16: true,
        tiles: BTreeMap::new(),
        ptx: false,
        wgmma_rows: 64,
        wgmma_code_rows: 32,
        e4m3_rows: 128,
        half_rows: None,
        wgmma_folds: true,
        // On a CPU, a step of more rows takes as much longer.
        mixed_steps: cpu.then_some(0),
        prompts: MOST_PROMPTS,
        flash_wgmma: true,
        codes_ptx: true,
        expert_ptx: true,
        expert_ptx_shapes: BTreeMap::new(),
        codes_ptx_shapes: BTreeMap::new(),
        fp8_activations: false,
        wgmma_each: 16,
        wgmma: BTreeMap::new(),
        fold_rows: 32,
        // Workgroups of later calls poll for words of earlier calls, so tags are only used where workgroups of earlier
        // calls are known to start first.
        tags: matrices == Some(Matrices::Cooperative) && adapter.is_nvidia(),
        fault_at: 0,
        broken_call: 0,
        broken_calls: 0,
        broken_step: 0,
        broken_every: 0,
        broken_codes: 0,
        // The cores that would pack are those that a CPU driver computes on.
        device_packing: u32::from(!cpu),
        broken_packing: 0,
        broken_ptx: 0,
        // Compiling the small model's kernels takes a CPU driver longer than a start may last. Weights in fragments have
        // other tests at start: of each kernel of codes, of programs in PTX, and of steps without barriers.
        reference_test: u32::from(!adapter.is_cpu()),
        broken_reference: 0,
        retry_ms: 1000,
        gates: !cpu,
    }
}

/// Returns the maximum size in bytes of a buffer of weights.
pub(crate) fn most_weight_bytes(capabilities: &Capabilities, tuning: &Tuning) -> u64 {
    let own = capabilities.max_allocation_bytes.min(capabilities.max_buffer_bytes);
    if tuning.weight_buffer > 0 { own.min(tuning.weight_buffer.into()) } else { own }
}

impl Build<'_> {
    /// Whether sizes have the defaults of CPU drivers: if one of a split model's devices is such a driver, for all.
    fn sized_for_cpu(&self) -> bool {
        self.part.map_or(self.adapter.is_cpu(), |part| part.on_cpu)
    }

    /// Returns the size of the device memory that determines default sizes: of a split model's devices, the smallest.
    fn heap_bytes(&self) -> u64 {
        self.part.map_or_else(|| self.opened.device.budget().heap_bytes, |part| part.heap_bytes)
    }

    /// Returns the maximum number of prompt tokens of a step. Steps of models whose prompts cannot be divided hold the whole
    /// context.
    fn chunk(&self) -> u32 {
        let config = &self.checkpoint.config;
        self.model.prefill_chunk.unwrap_or_else(|| match config.causal {
            true if self.sized_for_cpu() => 64,
            true => 2048,
            false => self.model.context.unwrap_or(config.context.min(WHOLE_PROMPT)),
        })
    }

    /// Returns the context to plan for, in tokens.
    pub(crate) fn wanted_context(&self) -> u32 {
        let config = &self.checkpoint.config;
        let most = if config.causal { DEFAULT_CONTEXT } else { DEFAULT_CONTEXT.min(self.chunk()) };
        self.model.context.unwrap_or(config.context.min(most))
    }

    pub(crate) fn buckets(&self) -> Vec<u32> {
        let most = self.chunk();
        // Many prefill steps are as large as the permitted delay of decode steps allows; in that range the bucket sizes
        // are close together.
        let sizes: &[u32] = if self.sized_for_cpu() {
            &[16, 64, 256, 1024]
        } else {
            &[16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1536, 2048]
        };
        let mut buckets: Vec<u32> = sizes.iter().copied().filter(|rows| *rows < most).collect();
        buckets.push(most);
        buckets
    }

    /// Returns the number of sequences that can run at once.
    pub(crate) fn slots(&self) -> u32 {
        self.model.slots.unwrap_or_else(|| {
            if self.sized_for_cpu() {
                return CPU_SLOTS;
            }
            let fit = u32::try_from(self.heap_bytes() / SLOT_MEMORY).unwrap_or(u32::MAX);
            1 << fit.clamp(GPU_SLOTS.0, GPU_SLOTS.1).ilog2()
        })
    }

    /// Returns the number of snapshots of recurrent state; `None` for models without recurrent state.
    pub(crate) fn snapshots(&self) -> Option<u32> {
        if !self.checkpoint.config.is_recurrent() {
            return None;
        }
        let finds = self.model.prefix_cache.unwrap_or(true);
        let own = || {
            if self.sized_for_cpu() {
                return CPU_SNAPSHOTS;
            }
            let bytes = decoder::cell_bytes(&self.checkpoint.config).max(1);
            let fit = self.heap_bytes() / SNAPSHOT_SHARE / bytes;
            u32::try_from(fit).unwrap_or(u32::MAX).clamp(GPU_SNAPSHOTS.0, GPU_SNAPSHOTS.1)
        };
        Some(if finds { self.model.snapshots.unwrap_or_else(own) } else { 0 })
    }

    /// Returns the greatest window of layers whose pages are given back when no token sees them any more, in a context of this
    /// many tokens: windows that are hardly shorter have no pages of their own.
    pub(crate) fn recycled_window(&self, context: u32) -> Option<u32> {
        let each = |window: u32| WindowCapacity::pages_each(window, u32::MAX, RUN_AHEAD, self.drafts());
        let window = self.checkpoint.config.recycled_window()?;
        Some(window).filter(|window| each(*window) < context.div_ceil(PAGE_TOKENS))
    }

    /// Returns the maximum number of draft tokens per sequence and step.
    pub(crate) fn drafts(&self) -> u32 {
        if self.model.draft.is_none() && !self.checkpoint.has_mtp() {
            return 0;
        }
        self.model.drafts.unwrap_or(if self.sized_for_cpu() { CPU_DRAFTS } else { GPU_DRAFTS })
    }

    /// Returns the maximum number of sequences of a verification step, a power of two.
    pub(crate) fn draft_sequences(&self) -> u32 {
        let most = if self.sized_for_cpu() { CPU_DRAFT_SEQUENCES } else { GPU_DRAFT_SEQUENCES };
        1 << most.min(self.slots()).ilog2()
    }

    /// Returns the weights of all of the model.
    pub(crate) fn all_weights(&self) -> &[WeightSpec] {
        match (self.drafts(), &self.model.draft) {
            (1.., None) => self.checkpoint.weights(),
            _ => self.checkpoint.weights_without_mtp(),
        }
    }

    /// Returns the decoder of the model with `pages` KV pages and, if windows have pages of their own, `window_pages`.
    pub(crate) fn decoder(&self, context: u32, pages: u32, window_pages: Option<u32>, chunk: u32) -> Decoder<'_> {
        let slots = self.slots();
        let config = &self.checkpoint.config;
        let tuning = self.tuning(context);
        let mut decoder = Decoder {
            config,
            weights: match self.part {
                Some(part) => &part.weights,
                None => self.all_weights(),
            },
            stage: self.part.map_or_else(|| LayerStage::whole(config), |part| part.stage.clone()),
            input_tags: self.part.map_or_else(BTreeMap::new, |part| part.input_tags.clone()),
            max_buffer_bytes: most_weight_bytes(&self.adapter.capabilities, &tuning),
            state: StateLayout {
                slots,
                rows: slots.next_power_of_two(),
                chunk,
                // Steps that draw tokens from several prompts have a power of two as their number of rows.
                prompts: slots.next_power_of_two().min(tuning.prompts),
                sequences: slots.next_power_of_two().min(tuning.prompts),
                max_pages: context.div_ceil(PAGE_TOKENS),
                cells: config.is_recurrent() || self.draft.is_some_and(|draft| draft.config.draft_head.is_some()),
                windows: window_pages.is_some(),
            },
            cells: slots + self.snapshots().unwrap_or(0),
            drafts: self.drafts(),
            drafter: None,
            pages,
            window_pages,
            kv_format: self.model.kv_format.unwrap_or(KvFormat::F16),
            ring: RingLayout {
                steps: RING_STEPS,
                rows: slots.next_power_of_two().max(self.draft_sequences() * (self.drafts() + 1)),
            },
            context,
            tuning,
        };
        if decoder.mixed_steps().is_some() {
            decoder.state.sequences = slots.next_power_of_two().min(MOST_SEQUENCES);
        }
        // The device that draws the tokens drafts.
        if let Some(draft) = self.draft.filter(|_| decoder.drafts > 0 && decoder.stage.is_last()) {
            let tuning = self.tuning_of(&draft.config, context);
            let own = Decoder {
                config: &draft.config,
                weights: draft.weights_without_mtp(),
                stage: LayerStage::whole(&draft.config),
                input_tags: BTreeMap::new(),
                cells: 0,
                drafts: 0,
                // Its windows are in the pages of layers that see all tokens: they are given back with the sequence.
                window_pages: None,
                // Its passes fault with the step that they are in, which only whole models run again without drafts.
                tuning: Tuning { tags: decoder.tuning.tags && decoder.stage.is_whole(), ..tuning },
                ..decoder.clone()
            };
            let kind = match draft.config.draft_head {
                Some(_) => DrafterKind::Head { token_ids: &draft.draft_tokens },
                None => DrafterKind::Model,
            };
            decoder.drafter = Some(Drafter { kind, decoder: Box::new(own), sequences: self.draft_sequences() });
        }
        decoder
    }

    pub(crate) fn tuning(&self, context: u32) -> Tuning {
        self.tuning_of(&self.checkpoint.config, context)
    }

    /// Returns the choices for a model of this replica: the model itself, or its draft model.
    fn tuning_of(&self, config: &ModelConfig, context: u32) -> Tuning {
        let mut adapter = self.adapter.clone();
        // Other choices follow from the number of processors, so a change of it comes first.
        if let Some(count) = self.tune.iter().rev().find_map(|change| change.strip_prefix("processors=")) {
            adapter.capabilities.processors = count.parse().ok().or(adapter.capabilities.processors);
        }
        let kv_heads = config.least_kv_heads();
        let mut tuning = tuning(&adapter, self.opened.multiplies.matrices, kv_heads, context);
        tuning.set_arithmetic(self.opened.multiplies.arithmetic);
        tuning.flash_matrix = self.opened.multiplies.attention;
        tuning.flash_f32 &= self.opened.multiplies.attention_in_f32;
        tuning.delta_matrix = self.opened.multiplies.recurrence;
        tuning.ptx = self.opened.ptx.is_ok();
        tuning.fp8_activations = self.model.fp8_activations == Some(true);
        for change in self.tune {
            tuning.set(change);
        }
        // The configured changes are applied before the kept entries, because the entries depend on them, and again
        // after them, because they take precedence.
        self.tuned.apply(&mut tuning);
        for change in self.tune {
            tuning.set(change);
        }
        if self.fallbacks.row_major.load(Ordering::Relaxed) {
            tuning.fragments = None;
        }
        if self.fallbacks.no_dots.load(Ordering::Relaxed) {
            tuning.dots = None;
        }
        if self.fallbacks.no_ptx.load(Ordering::Relaxed) || self.opened.ptx.is_err() {
            tuning.ptx = false;
        }
        if self.fallbacks.no_flash_wgmma.load(Ordering::Relaxed) {
            tuning.flash_wgmma = false;
        }
        if self.fallbacks.no_codes_ptx.load(Ordering::Relaxed) {
            tuning.codes_ptx = false;
        }
        if self.fallbacks.no_expert_ptx.load(Ordering::Relaxed) {
            tuning.expert_ptx = false;
        }
        if !self.self_test {
            tuning.reference_test = 0;
        }
        if let Some(part) = self.part {
            // A gate between a step's logits and its sampling would be behind another.
            (tuning.tags, tuning.gates) = (tuning.tags && part.tags, false);
            if !part.polls {
                tuning.exchange_polls = 0;
            }
            tuning.exchange_halves.get_or_insert(part.halves);
            tuning.microbatch_rows = part.microbatch_rows;
            if !part.mixes {
                tuning.mixed_steps = Some(0);
            }
        }
        tuning
    }
}
