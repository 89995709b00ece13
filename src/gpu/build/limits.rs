//! The limits of what a replica's configuration may request, and its memory plan.

use crate::engine::plan::{STATE_TOKENS, WindowCapacity};
use crate::gpu::build::Build;
use crate::gpu::build::defaults::RUN_AHEAD;
use crate::gpu::build::recordings::{EXCHANGE, Recordings};
use crate::gpu::devices::staging;
use crate::gpu::error::StartError;
use crate::gpu::matrix_units::unpromised;
use crate::kernels::attention::PAGE_TOKENS;
use crate::kernels::gemm::skinny::Matrices;
use crate::kernels::region::buffer_sizes;
use crate::kernels::state::MOST_DRAFTS;
use crate::memory::pack::Packing;
use crate::memory::plan::{
    self, KvRequest, MemoryLimits, Pages, Plan, PlanEntry, PlanError, Purpose, Side, WindowRequest,
};
use crate::model::decoder::drafter::{DRAFTER, TOKEN_IDS};
use crate::model::decoder::{self, Decoder, Part, ROPE};
use std::collections::HashSet;
use std::sync::atomic::Ordering;

/// The KV pages of the smallest context to which a model's own context is reduced where memory is short.
pub(crate) const LEAST_CONTEXT_PAGES: u64 = 16;
/// The default size of the KV pool, if memory suffices, is the maximum context for every slot, but at most the larger
/// of `DEFAULT_CONTEXTS` maximum contexts and [`DEFAULT_KV_TOKENS`] tokens.
const DEFAULT_CONTEXTS: u64 = 16;

/// The lower bound, in tokens, of the limit that [`DEFAULT_CONTEXTS`] sets.
const DEFAULT_KV_TOKENS: u64 = 1 << 19;

/// The maximum number of slots: the rows of one decode step.
pub(crate) const MOST_SLOTS: u32 = 1024;

/// The maximum number of snapshots of recurrent state. The scheduler has an entry for each, however much memory the
/// device has.
const MOST_SNAPSHOTS: u32 = 65_536;

/// The maximum number of KV pages, for the same reason: 64 million tokens.
pub(crate) const MOST_PAGES: u32 = 1 << 22;

/// The maximum number of tokens of a prompt chunk. A submission with a larger chunk could run longer than a driver's
/// watchdog allows.
pub(crate) const MOST_CHUNK: u32 = 16_384;

/// Returns the purpose of a buffer in the memory plan, by the buffer's name. Those of a draft model have the purposes of the
/// model's.
pub(crate) fn purpose(name: &str) -> Purpose {
    match name.strip_prefix(DRAFTER).unwrap_or(name) {
        "state" | "sampling.counts" | "step" | "orders" | "history" | TOKEN_IDS => Purpose::State,
        name if name.starts_with(ROPE) => Purpose::State,
        name if name.starts_with(decoder::RECURRENT) => Purpose::Recurrent,
        "ring" | "dump" | "scores" | "pooled" => Purpose::Ring,
        name if name.starts_with(EXCHANGE) => Purpose::Exchange,
        name if name.starts_with("kv.") => Purpose::KvPages,
        _ => Purpose::Scratch,
    }
}

impl Build<'_> {
    /// Refuses experts of which not even one fits in a buffer, in which their kernels read it, and shared experts that do not
    /// fit in one.
    pub(crate) fn check_experts(&self, decoder: &Decoder<'_>) -> Result<(), StartError> {
        let most = decoder.max_buffer_bytes;
        let drafting = decoder.drafter.iter().map(|drafter| &*drafter.decoder);
        for (decoder, weight) in
            [decoder].into_iter().chain(drafting).flat_map(|of| of.weights.iter().map(move |w| (of, w)))
        {
            let packing = decoder.packing(weight);
            let (rows, each) = match decoder.expert_rows(weight) {
                Some(rows) => (rows, " for each expert"),
                None if weight.is_of_shared_expert() => (weight.rows, ""),
                None => continue,
            };
            let bytes = Packing { rows, ..packing }.bytes();
            if bytes > most {
                let name = &weight.name;
                return Err(self.unsupported(format!(
                    "\"{name}\" has {bytes} bytes{each}, the device's buffers have at most {most}"
                )));
            }
        }
        Ok(())
    }

    pub(crate) fn check(&self) -> Result<(), StartError> {
        let c = &self.checkpoint.config;
        let lacks = unpromised(&self.adapter.capabilities);
        if self.tuning(c.context).fragments == Some(Matrices::Cooperative) && !lacks.is_empty() {
            return Err(self.unsupported(format!(
                "tuning fragments=2 is asked for, device \"{}\" does not offer {}",
                self.adapter.name,
                lacks.join(", ")
            )));
        }
        if let Some(asked) = self.model.context.filter(|asked| *asked > c.context) {
            return Err(StartError::Context { model: self.model.name.clone(), asked, own: c.context });
        }
        for (what, asked, most) in [
            ("slots", self.model.slots, MOST_SLOTS),
            ("prefill_chunk", self.model.prefill_chunk, MOST_CHUNK),
            ("snapshots", self.model.snapshots, MOST_SNAPSHOTS),
        ] {
            if let Some(asked) = asked.filter(|asked| *asked > most) {
                return Err(self.unsupported(format!("{what} is {asked}, at most {most} are possible")));
            }
        }
        if !c.causal {
            self.check_whole_prompts()?;
        }
        let drafts = self.model.drafts.unwrap_or(0);
        if drafts > MOST_DRAFTS {
            return Err(self.unsupported(format!("drafts is {drafts}, at most {MOST_DRAFTS} are possible")));
        }
        if drafts > 0 && self.model.draft.is_none() && !self.checkpoint.has_mtp() {
            return Err(self.unsupported(format!(
                "drafts is {drafts}, the checkpoint has no block that drafts tokens (multi-token prediction): only 0 is \
                 possible, or draft = \"lookup\", a draft model or a draft head"
            )));
        }
        if let Some(chunk) =
            self.model.prefill_chunk.filter(|chunk| c.is_recurrent() && !chunk.is_multiple_of(STATE_TOKENS))
        {
            return Err(self
                .unsupported(format!("prefill_chunk is {chunk}, recurrent state takes a multiple of {STATE_TOKENS}")));
        }
        let drafting = self.draft.iter().flat_map(|draft| &draft.config.attention_kinds);
        for head_dim in c.attention_kinds.iter().chain(drafting).map(|kind| kind.head_dim) {
            if !head_dim.is_multiple_of(8) {
                return Err(self.unsupported(format!("head_dim is {head_dim}, kernels need a multiple of 8")));
            }
            if head_dim / 8 > self.adapter.capabilities.max_invocations {
                return Err(self.unsupported(format!(
                    "head_dim is {head_dim}, the device's workgroups have {} invocations and need an eighth of it",
                    self.adapter.capabilities.max_invocations
                )));
            }
        }
        Ok(())
    }

    /// Checks what is asked of a model whose prompts cannot be divided, and which draws no tokens.
    fn check_whole_prompts(&self) -> Result<(), StartError> {
        const WHY: &str = "attention of the model is not causal";
        let chunk = self.model.prefill_chunk.unwrap_or(MOST_CHUNK);
        if let Some(context) = self.model.context.filter(|context| *context > chunk) {
            return Err(self.unsupported(format!(
                "context is {context}, {WHY}, so that a prompt is one chunk of at most {chunk} tokens"
            )));
        }
        if self.model.draft.is_some() || self.model.drafts.is_some_and(|drafts| drafts > 0) {
            return Err(self.unsupported(format!("drafts are asked for, {WHY}: it draws no tokens")));
        }
        Ok(())
    }

    pub(crate) fn plan(
        &self,
        probe: &Decoder<'_>,
        buckets: &[u32],
        context: u32,
        asked: bool,
    ) -> Result<Plan, StartError> {
        let budget = self.opened.device.budget();
        let capabilities = &self.adapter.capabilities;
        let limits = MemoryLimits {
            device: self.adapter.name.clone(),
            free_bytes: self.opened.free_bytes(&budget),
            total_bytes: budget.heap_bytes,
            limit_bytes: self.limit,
            max_allocation_bytes: capabilities.max_allocation_bytes.min(capabilities.max_buffer_bytes),
            unified: capabilities.unified_memory,
            reserve_bytes: plan::default_reserve(budget.heap_bytes),
        };
        let recordings = Recordings::new(probe, buckets, self.draft_sequences());
        let placed = probe.placed_weights();
        let packer_bytes = self.packer_bytes(&placed, &probe.tuning);
        let weights: Vec<Part> = placed.into_iter().flat_map(|placed| placed.parts).collect();
        let names: HashSet<&str> = weights.iter().map(|part| part.name.as_str()).collect();
        let sizes: Vec<(String, u64)> = buffer_sizes(&recordings.all())
            .into_iter()
            .filter(|(name, _)| !names.contains(name.as_str()) && purpose(name) != Purpose::KvPages)
            .collect();
        let (slots, bytes) = staging(self.adapter);
        let of_weights = |purpose: Purpose, drafting: bool| {
            let of = weights.iter().filter(|part| part.name.starts_with(DRAFTER) == drafting);
            PlanEntry::of_buffers(purpose, Side::Device, of.map(|part| (part.name.as_str(), part.bytes)))
        };
        let mut entries = vec![
            of_weights(Purpose::Weights, false),
            of_weights(Purpose::DraftWeights, true),
            PlanEntry::of_buffers(Purpose::Staging, Side::Host, [("staging", (slots * bytes) as u64)]),
        ];
        entries
            .extend(packer_bytes.map(|bytes| PlanEntry::of_buffers(Purpose::Staging, Side::Device, [("raw", bytes)])));
        for (wanted, side) in [
            (Purpose::State, Side::Device),
            (Purpose::Recurrent, Side::Device),
            (Purpose::Scratch, Side::Device),
            (Purpose::Exchange, Side::Device),
            (Purpose::Ring, Side::Host),
        ] {
            let of =
                sizes.iter().filter(|(name, _)| purpose(name) == wanted).map(|(name, bytes)| (name.as_str(), *bytes));
            let mut entry = PlanEntry::of_buffers(wanted, side, of);
            if wanted == Purpose::Recurrent {
                let (slots, cells) = (probe.state.slots, u64::from(probe.cells));
                let of = |count: u64, name: &str| format!("{count} {name}{}", if count == 1 { "" } else { "s" });
                let (slots, snapshots) = (of(slots.into(), "slot"), of(cells - u64::from(slots), "snapshot"));
                entry.things = Some((cells, format!("{slots} and {snapshots}")));
            }
            entries.push(entry);
        }
        // The bytes of a page of K, or of V, of each layer. The drafting block, or the layers of a draft model, have KV pages
        // of their own.
        let of = |layer: u32| probe.heads(probe.config.attention_of[layer as usize]).page_bytes();
        let windowed = |layer: &u32| probe.window_pages.is_some() && probe.config.attention(*layer).window.is_some();
        let own = probe.config.cached_layers().filter(|layer| probe.stage.layers.contains(layer));
        let (windows, layers): (Vec<u32>, Vec<u32>) = own.partition(windowed);
        let [windows, layers] = [windows, layers].map(|layers| layers.into_iter().map(of).collect::<Vec<u64>>());
        let drafting: Vec<u64> = match &probe.drafter {
            Some(drafter) => drafter.decoder.cache_page_bytes(),
            None => probe.drafts().then(|| probe.heads(probe.config.mtp_attention).page_bytes()).into_iter().collect(),
        };
        let context_pages = u64::from(context.div_ceil(PAGE_TOKENS));
        let page_bytes = 2 * layers.iter().chain(&drafting).sum::<u64>();
        let page_bytes_in_largest_buffer = layers.iter().chain(&drafting).copied().max().unwrap_or(0);
        let mut window = (!windows.is_empty()).then(|| {
            let tokens = probe.config.recycled_window().unwrap_or(context);
            let each = u64::from(WindowCapacity::pages_each(tokens, context, RUN_AHEAD, probe.drafts));
            let least = each + u64::from(WindowCapacity::pages_of_chunks(probe.state.chunk));
            WindowRequest {
                page_bytes: 2 * windows.iter().sum::<u64>(),
                page_bytes_in_largest_buffer: windows.iter().copied().max().unwrap_or(0),
                each,
                least,
                most: match self.part.and_then(|part| part.window_pages) {
                    Some(agreed) => u64::from(agreed).max(least),
                    None => least + each * u64::from(probe.state.slots - 1),
                },
                typical: context_pages.div_ceil(2),
            }
        });
        let pages = match (self.model.kv_pages, self.model.kv_memory) {
            (Some(pages), _) => Pages::Exactly(u64::from(pages)),
            (None, Some(bytes)) => match &mut window {
                None => Pages::Exactly(bytes.0 / page_bytes.max(1)),
                // Divided as sequences of typical length need them.
                Some(window) => {
                    let (own, other) = (window.each * window.page_bytes, window.typical * page_bytes);
                    let first = bytes.0.saturating_sub((window.least - window.each) * window.page_bytes);
                    let pages = first / (own + other).max(1) * window.typical;
                    let rest = bytes.0.saturating_sub(pages * page_bytes) / window.page_bytes;
                    window.most = window.most.min(rest).max(window.least);
                    Pages::Exactly(pages)
                }
            },
            (None, None) => {
                let most = (context_pages * DEFAULT_CONTEXTS).max(DEFAULT_KV_TOKENS / u64::from(PAGE_TOKENS));
                Pages::UpTo((context_pages * u64::from(probe.state.slots)).min(most).min(MOST_PAGES.into()))
            }
        };
        // A configured context is kept or refused; the model's own context may be reduced to fit into memory.
        let least = if asked { context_pages } else { context_pages.min(LEAST_CONTEXT_PAGES) };
        let kv = KvRequest { page_bytes, page_bytes_in_largest_buffer, pages, least, window };
        match Plan::new(limits, entries, Some(kv)) {
            // What the load alone needs is no reason to refuse a model.
            Err(PlanError::DoesNotFit { .. }) if packer_bytes.is_some() => {
                self.fallbacks.no_device_packing.store(true, Ordering::Relaxed);
                self.plan(probe, buckets, context, asked)
            }
            plan => plan.map_err(|source| StartError::Plan { model: self.model.name.clone(), source }),
        }
    }
}
