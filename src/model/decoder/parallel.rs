//! Tensor parallelism: the exchanges of a step with the other devices that compute parts of the same layers and of the LM
//! head.
//!
//! Not here: which part of each weight a device has (`checkpoint::shard`).

use super::{Decoder, LayerKind, Step, StepShape, stride};
use crate::kernels::exchange::{
    self, Blocks, Columns, ExchangeBuffers, ExchangeShape, Gathered, GatheredRows, Phase, Rank, Summed,
};
use crate::kernels::gemm::Activations;
use crate::kernels::recording::{Call, Op, Range, Recording};
use crate::kernels::sampling::score;
use crate::kernels::sampling::shared::{self, ListedRows};
use crate::kernels::shaders::{DrawShortlistedArgs, ScorePartArgs, SharedRowsArgs, ShortlistArgs};
use crate::kernels::state::SCORE_TURN;
use std::collections::BTreeSet;

/// The buffer with what the other devices need of sums and logits.
pub const OUTBOX: &str = "exchange.send_parts";
/// The buffer with what the other devices have of sums and logits.
pub const INBOX: &str = "exchange.receive_parts";

/// The buffers of the residual stream and of the row table.
const X: &str = "x";
const ROWS: &str = "rows";

/// The number of exchanges of the rows of a step that draw tokens, if the LM head is divided: of the greatest logits of each
/// part, and, unless all rows are greedy and without conditions, of shortlists and of all logits of some rows.
pub const HEAD_EXCHANGES: u32 = 3;

/// The rows of a step whose tokens the devices draw together.
pub(super) struct SharedDraw {
    /// The arguments of the call that lists those that are drawn from shortlists.
    short: SharedRowsArgs,
    /// The list of those that are drawn from all logits.
    whole: Range,
}

impl Decoder<'_> {
    /// Returns the number of words of each slot of the exchange's buffers: those of the rows of any step.
    pub fn exchange_words(&self) -> u32 {
        let rows = self.decoding_rows();
        let rows = if self.rounds_prompts() { rows } else { rows.max(self.state.chunk) };
        let sums = exchange::words_of(u64::from(rows) * u64::from(stride(self.config.hidden)));
        let logits = self.stage.own_vocabulary().map(|(columns, rank, _)| {
            let lists = shared::shortlist_columns(rank).words(self.head_rows(), rank.of);
            let scores = score::part_columns(rank).words(self.score_rows(), rank.of);
            columns.words(self.head_rows(), rank.of).max(lists).max(scores)
        });
        // Slots, and their blocks, begin with a cache line of the host's.
        (sums.max(logits.unwrap_or(0)) as u32).next_multiple_of(4) + self.block_words()
    }

    /// Whether the parts of prompt steps' sums are rounded to bfloat16 and pass in blocks.
    pub fn rounds_prompts(&self) -> bool {
        self.tuning.exchange_halves == Some(true)
    }

    /// Returns the number of words of each slot that are for the rows of prompt steps, if these pass in blocks.
    fn block_words(&self) -> u32 {
        match self.rounds_prompts() {
            true => Blocks::of(self.state.chunk * stride(self.config.hidden)).slot_words(),
            false => 0,
        }
    }

    /// Returns the number of words of the slot for the greatest logits of a step's rows; 0 if the LM head is not divided.
    pub fn best_words(&self) -> u32 {
        let words = |(_, rank, _): (_, Rank, _)| shared::best_columns(rank).words(self.head_rows(), rank.of) as u32;
        self.stage.own_vocabulary().map_or(0, words)
    }

    /// Returns the maximum number of rows of a step that draw tokens.
    fn head_rows(&self) -> u32 {
        self.decoding_rows().max(self.state.prompts)
    }

    fn exchange_buffers(&self, r: &mut Recording, number: Range, fault: Range, rank: Rank) -> ExchangeBuffers {
        let (slot_words, best_words) = (self.exchange_words(), self.best_words());
        let best = u64::from(best_words) * exchange::WORD_BYTES;
        ExchangeBuffers {
            outbox: r.buffer(OUTBOX, exchange::outbox_bytes(slot_words) + best),
            inbox: r.buffer(INBOX, exchange::inbox_bytes(slot_words, rank.of) + u64::from(rank.of - 1) * best),
            number,
            fault,
            slot_words,
            block_words: self.block_words(),
            best_words,
        }
    }

    fn exchange_shape(&self, rank: Rank) -> ExchangeShape {
        // In a divided step, no workgroup waits for another one.
        let divided = self.tuning.exchange_polls == 0;
        let workgroups = if divided { u32::MAX } else { self.tuning.exchange_workgroups };
        ExchangeShape { rank, workgroups, most_polls: self.tuning.exchange_polls.max(1) }
    }

    /// Returns the calls of an exchange: without polls, the step is divided there, and the host lets the rest begin.
    fn exchange_phases(&self) -> &'static [Phase] {
        match self.tuning.exchange_polls {
            0 => &[Phase::Send, Phase::Receive],
            _ => &[Phase::Both],
        }
    }

    /// Records the sum over all devices of `x`, into it or onto the residual stream.
    pub(super) fn all_reduce(
        &self,
        r: &mut Recording,
        shape: StepShape,
        step: &Step,
        name: &str,
        (x, y): (Activations, Activations),
    ) {
        let rank = self.stage.rank.expect("a device with a part of every layer");
        // The exchanges of the two microbatches of a step take turns.
        let index = step.microbatch.map_or(exchanges(r), |own| 2 * exchanges(r) + own);
        let number = self.state.exchange(r);
        let buffers = self.exchange_buffers(r, number, step.fault, rank);
        let count = matches!(shape, StepShape::Prefill { .. }).then_some(step.chunk);
        let summed = Summed {
            rows: shape.rows(),
            count,
            x,
            y,
            adds: y.range.buffer == step.x.range.buffer,
            halves: count.is_some() && self.rounds_prompts(),
            flow: step.flow(Some(x.range), Some(y.range)),
        };
        let phases = if step.microbatch.is_some() { &[Phase::Send, Phase::Receive] } else { self.exchange_phases() };
        for phase in phases {
            let label = format!("{name}_{}", if *phase == Phase::Send { "send" } else { "sum" });
            r.call(exchange::all_reduce(label, summed, (self.exchange_shape(rank), *phase), index, buffers));
        }
    }

    /// Whether prompt steps of the bucket `rows` are also recorded in two microbatches, of half of the bucket's rows and of the
    /// others. Recurrent layers, draft heads and inputs that depend on the tokens take all rows of a step, and so does attention
    /// to later tokens, whose keys the second half would write too late.
    pub fn has_microbatches(&self, rows: u32) -> bool {
        let least = self.tuning.microbatch_rows;
        self.stage.rank.is_some()
            && least > 0
            && rows >= least
            && rows.is_multiple_of(2)
            && self.config.causal
            && self.config.layer_inputs.is_none()
            && self.draft_head().is_none()
            && self.config.layer_kinds.iter().all(|kind| *kind == LayerKind::Attention)
    }

    /// Returns the recording of a prompt step of the bucket `rows` in two microbatches: while the sums of one of them pass
    /// between devices, the device computes the other one. The first one has `rows / 2` rows.
    pub fn record_in_microbatches(&self, rows: u32) -> Recording {
        let whole = self.recorded(StepShape::Prefill { rows }, true);
        Recording { name: format!("{}.microbatches", whole.name), ..whole }
    }

    /// Records the layers of a prompt step in two microbatches: in turn, what each computes between two exchanges. What the
    /// second one writes, apart from the residual stream and the KV pages, has buffers of its own.
    pub(super) fn microbatches(&self, r: &mut Recording, shape: StepShape, step: &Step) {
        let half = StepShape::Prefill { rows: shape.rows() / 2 };
        let [first, second] = [0, 1].map(|index| {
            let mut own = Recording::new("");
            let chunk = self.state.microbatch(&mut own, index);
            let buffers = self.buffers(&mut own, half, half.rows(), chunk, false);
            let part = |own: &mut Recording, name: &str, whole: Range| {
                let bytes = whole.bytes / 2;
                own.buffer(name, whole.bytes).part(u64::from(index) * bytes, bytes)
            };
            let x = Activations { range: part(&mut own, X, step.x.range), ..step.x };
            let rows = part(&mut own, ROWS, step.rows);
            self.layers(&mut own, half, &Step { rows, x, microbatch: Some(index), ..buffers });
            own
        });
        let own: BTreeSet<String> =
            second.written().into_iter().filter(|name| !is_shared(name)).map(str::to_owned).collect();
        let named = |name: &str| if own.contains(name) { format!("{name}.second") } else { name.to_owned() };
        for (of_first, of_second) in pieces(&first).into_iter().zip(pieces(&second)) {
            r.append(of_first, str::to_owned);
            r.append(of_second, named);
        }
    }

    fn gather(&self, r: &mut Recording, name: &str, gathered: Gathered, number: Range, step: &Step) {
        let rank = self.stage.rank.expect("a device with a part of the vocabulary");
        let buffers = self.exchange_buffers(r, number, step.fault, rank);
        for phase in self.exchange_phases() {
            let label = format!("{name}_{}", if *phase == Phase::Send { "send" } else { "gather" });
            r.call(exchange::all_gather(label, gathered, (self.exchange_shape(rank), *phase), buffers));
        }
    }

    /// Records the list of the rows of a step that are drawn from shortlists, and which [`Decoder::draw_together`] takes. It needs
    /// no logits.
    pub(super) fn list_rows(&self, r: &mut Recording, rows: u32, of_rows: Range) -> SharedDraw {
        let rank = self.stage.rank.expect("a device with a part of the vocabulary");
        let [short, whole] = ["sampling.short_rows", "sampling.whole_rows"]
            .map(|name| r.buffer(name, shared::list_bytes(self.head_rows())));
        let best_count = shared::best_columns(rank).count / 2;
        let best_stride = best_count + 1;
        let best = r.buffer("sampling.best", u64::from(rows) * u64::from(best_stride) * 8);
        let args = SharedRowsArgs {
            rows: of_rows,
            state: self.state.slots(r),
            best,
            list: short,
            row_count: rows,
            best_count,
            best_stride,
        };
        r.call(shared::shared_rows("short_rows".to_owned(), ListedRows::Short, args));
        SharedDraw { short: args, whole }
    }

    /// Records the draw of the tokens of a step's rows, each row being for one of `every` tokens of a sequence, as far as it
    /// needs all devices: the exchange of the greatest logits of each part of the vocabulary, then of shortlists and of all
    /// logits of those rows that need them. Returns the greatest logits of all parts, with each row's token behind them if it
    /// was drawn from shortlists.
    pub(super) fn draw_together(
        &self,
        r: &mut Recording,
        step: &Step,
        every: u32,
        draw: SharedDraw,
        partials: Range,
    ) -> Range {
        let (columns, rank, own) = self.stage.own_vocabulary().expect("a device with a part of the vocabulary");
        let number = self.state.head_exchange(r);
        let SharedRowsArgs { rows: of_rows, state, best, list: short, row_count: rows, best_count, best_stride } =
            draw.short;
        let best_columns = shared::best_columns(rank);
        let gathered = Gathered {
            rows,
            columns: best_columns,
            x: (partials, best_columns.unit),
            y: Some((best, 2 * best_stride)),
            in_place: false,
            from: GatheredRows::BeforeList(short),
            index: 0,
        };
        self.gather(r, "best", gathered, number, step);

        let (logits, of_lists) = (self.own_logits(step.logits), shared::shortlist_columns(rank));
        let own_list = r.buffer("sampling.shortlist", u64::from(rows) * u64::from(of_lists.unit) * 4);
        let shortlists = r.buffer("sampling.shortlists", u64::from(rows) * u64::from(of_lists.count) * 4);
        let args = ShortlistArgs {
            logits: logits.range,
            best,
            list: short,
            rows: of_rows,
            state,
            shortlists: own_list,
            vocabulary: own.len() as u32,
            row_stride: logits.stride,
            first: own.start,
            whole_vocabulary: self.config.vocab,
            best_count,
            best_stride,
            every,
        };
        r.call(shared::shortlist("shortlist".to_owned(), rows, self.tuning.sample_threads, rank, args));
        let gathered = Gathered {
            rows,
            columns: of_lists,
            x: (own_list, of_lists.unit),
            y: Some((shortlists, of_lists.count)),
            in_place: false,
            from: GatheredRows::List(short),
            index: 1,
        };
        self.gather(r, "shortlists", gathered, number, step);
        let args = DrawShortlistedArgs {
            shortlists,
            best,
            list: short,
            rows: of_rows,
            state,
            whole_vocabulary: self.config.vocab,
            best_count,
            best_stride,
            every,
        };
        r.call(shared::draw_shortlisted("draw_shortlisted".to_owned(), rows, rank, args));

        let whole = SharedRowsArgs { list: draw.whole, ..draw.short };
        r.call(shared::shared_rows("whole_rows".to_owned(), ListedRows::Whole, whole));
        let from = GatheredRows::List(draw.whole);
        self.gather(r, "logits", self.gathered_logits(step, rows, columns, from, 2), number, step);
        best
    }

    /// Records the device's part of the scores of a repetition of the region that scores rows, and the exchange of all parts,
    /// which it returns.
    pub(super) fn gather_scores(&self, r: &mut Recording, step: &Step, rows: u32) -> Range {
        let (_, rank, own) = self.stage.own_vocabulary().expect("a device with a part of the vocabulary");
        let (columns, logits, score) = (score::part_columns(rank), self.own_logits(step.logits), self.state.score(r));
        let part = r.buffer("scores.part", u64::from(rows) * u64::from(columns.unit) * 4);
        let parts = r.buffer("scores.parts", u64::from(rows) * u64::from(columns.count) * 4);
        let args = ScorePartArgs {
            logits: logits.range,
            rows: step.rows,
            chunk: step.chunk,
            score,
            parts: part,
            vocabulary: own.len() as u32,
            row_stride: logits.stride,
            first: own.start,
        };
        r.call(score::score_part("score_part".to_owned(), rows, self.tuning.sample_threads, args));
        let gathered = Gathered {
            rows,
            columns,
            x: (part, columns.unit),
            y: self.stage.is_last().then_some((parts, columns.count)),
            in_place: false,
            from: GatheredRows::Turn(score.part(u64::from(SCORE_TURN) * 4, 4)),
            index: 0,
        };
        let number = self.state.score_exchange(r);
        self.gather(r, "scores", gathered, number, step);
        parts
    }

    fn gathered_logits(&self, step: &Step, rows: u32, columns: Columns, from: GatheredRows, index: u32) -> Gathered {
        let (all, own) = (step.logits, self.own_logits(step.logits));
        let y = self.stage.is_last().then_some((all.range, all.stride));
        Gathered { rows, columns, x: (own.range, own.stride), y, in_place: true, from, index }
    }
}

/// Returns the number of sums of a step.
pub fn exchanges(recording: &Recording) -> u32 {
    phases(recording, |call| call.kernel == "all_reduce").filter(|(_, phase)| *phase != Phase::Send).count() as u32
}

/// Returns a step in parts, each of which but the first begins with a call that only receives what other devices have sent;
/// the whole step, if it has none.
pub fn pieces(recording: &Recording) -> Vec<Recording> {
    let begins = phases(recording, |_| true).filter(|(_, phase)| *phase == Phase::Receive).map(|(index, _)| index);
    recording.cut(&begins.collect::<Vec<_>>())
}

/// Whether both microbatches of a step write the same buffer: other parts of it, or in order.
fn is_shared(name: &str) -> bool {
    [X, ROWS, "state"].contains(&name) || ["kv.", "exchange."].iter().any(|prefix| name.starts_with(prefix))
}

/// Returns the exchanges of a recording that `are` among the wanted ones: the index of the operation, and the part of the
/// exchange that it does.
fn phases(recording: &Recording, are: impl Fn(&Call) -> bool) -> impl Iterator<Item = (usize, Phase)> {
    recording.ops.iter().enumerate().filter_map(move |(index, op)| match op {
        Op::Call(call) => Some((index, Phase::of(call).filter(|_| are(call))?)),
        Op::Copy { .. } | Op::Fill { .. } => None,
    })
}
