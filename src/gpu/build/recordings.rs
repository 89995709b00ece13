//! All recordings that a replica's executor runs, made from the decoder for each bucket.

use crate::engine::injection::{Injections, Wait};
use crate::engine::variants::{Fallback, Variants};
use crate::gpu::build::defaults::{INBOXES, PATCH_PAIRS, RUN_AHEAD, SEEN_ROWS};
use crate::gpu::executor::exchange::{self, PassedRows, RETURNED};
use crate::kernels::attention::flash;
use crate::kernels::delta;
use crate::kernels::embed::rows_bytes;
use crate::kernels::exchange::{AWAITED_BYTES, GateOf, await_gate};
use crate::kernels::gemm::skinny::Matrices;
use crate::kernels::layout::StateLayout;
use crate::kernels::recording::{Op, Recording};
use crate::kernels::sampling;
use crate::kernels::shaders::{ClearCountsArgs, MarkPromptArgs, PatchArgs};
use crate::model::decoder::stage::output_tag;
use crate::model::decoder::{Decoder, StepShape};
use std::collections::{BTreeMap, BTreeSet};

/// Returns the kernels of a model's regions and the fallbacks in use. `failed` is the number of buckets whose decode
/// step without barriers failed its test; `waits` are the places that tests break.
pub(super) fn variants(decoder: &Decoder<'_>, recordings: &Recordings, failed: u32, waits: Vec<Wait>) -> Variants {
    let injections = Injections::new(waits, decoder.tuning.broken_every);
    let variants = Variants::of(recordings.of_steps()).with_injections(injections);
    match decoder.tuning.fragments {
        None => variants.fell_back(Fallback::RowLayout),
        Some(Matrices::Emulated) => variants.fell_back(Fallback::Emulated),
        Some(Matrices::Cooperative) => {}
    }
    if !decoder.tuning.tags {
        variants.fell_back(Fallback::NoOverlap);
    }
    (0..failed).for_each(|_| variants.fell_back(Fallback::OverlapTest));
    variants
}

/// All recordings of a replica.
pub(crate) struct Recordings {
    /// The decode steps, by number of rows; the second recording is the same step with barriers, if the first one
    /// differs from it.
    pub(crate) decode: Vec<(u32, Recording, Option<Recording>)>,
    /// The verification steps, by drafts per sequence and number of sequences, with the same step with barriers if it differs.
    pub(crate) verify: Vec<(u32, u32, Recording, Option<Recording>)>,
    /// The prefill steps, by number of rows.
    pub(crate) prefill: Vec<(u32, Recording)>,
    /// Those of prefill steps in two microbatches, with tensor parallelism.
    pub(crate) microbatches: Vec<(u32, Recording)>,
    /// Those of prefill steps with more sequences than [`StateLayout::prompts`], most of which decode in them; empty if there are
    /// none.
    pub(crate) wide: Vec<(u32, Recording)>,
    /// The passes in which a draft model computes tokens that it has not computed, by number of rows.
    pub(crate) catch_up: Vec<(u32, Recording)>,
    /// The recording that completes the description of a prefill step in which slots decode; `None` where slots decode in
    /// steps of their own.
    pub(crate) decode_rows: Option<Recording>,
    pub(crate) inboxes: Vec<InboxRecordings>,
    /// The recordings around the sampler; `None` in all stages of a split model but the last.
    pub(crate) head: Option<HeadRecordings>,
    /// The recordings that compute logits behind the layers of a prefill step; `None` in stages that compute none.
    pub(crate) logits: Option<LogitRecordings>,
    /// The recordings with which a stage of a split model exchanges activations and slots with the others.
    pub(crate) exchange: ExchangeRecordings,
}

/// The recordings that compute logits behind the layers of a prefill step: all of them, or a part for the device that draws
/// the tokens.
pub(crate) struct LogitRecordings {
    /// The recordings that draw the first tokens of prompts, by number of prompts.
    pub(crate) first: Vec<(u32, Recording)>,
    /// Those for steps in which slots decode, by number of prompts and slots, where `first` has none or drafts.
    pub(crate) mixed: Vec<(u32, Recording)>,
    /// The recording that scores prompt tokens, with its number of rows.
    pub(crate) score: (u32, Recording),
}

/// The recordings of a replica, or of the last stage of a split one, beside its layers.
pub(crate) struct HeadRecordings {
    /// The recording that pools rows of prompts that are embedded.
    pub(crate) pool: Recording,
    pub(crate) dump: Recording,
}

/// Recordings, one for each buffer through which a stage exchanges data (`gpu::executor::exchange`); recordings at the
/// end that are never used are left out.
pub(crate) type OfBuffers = Vec<Recording>;

/// The recordings by which a stage of a split model exchanges data with other stages; empty for a model on one device.
#[derive(Default)]
pub(crate) struct ExchangeRecordings {
    /// The recordings that receive a step's rows from the stage before; empty in the first stage.
    pub(crate) receive: BTreeMap<PassedRows, OfBuffers>,
    /// The recordings that send a step's rows to the next stage; empty in the last stage.
    pub(crate) send: BTreeMap<PassedRows, OfBuffers>,
    /// The recordings that apply the changes of slots that the last stage has made; empty in the last stage.
    pub(crate) apply: OfBuffers,
    /// The recordings that copy all slots to the host; empty in all stages but the last.
    pub(crate) publish: OfBuffers,
    /// The recordings that keep the device busy while it waits for the gate of messages, and for that of slots' changes; `None` if
    /// the device waits idle.
    pub(crate) awaits: Option<[Recording; 2]>,
}

impl ExchangeRecordings {
    fn all(&self) -> impl Iterator<Item = &Recording> {
        let rows = self.receive.values().chain(self.send.values());
        rows.flatten().chain(&self.apply).chain(&self.publish).chain(self.awaits.iter().flatten())
    }
}

/// Returns the name of an exchange buffer.
pub(crate) fn exchange_buffer(what: &str, index: usize) -> String {
    format!("{EXCHANGE}{what}.{index}")
}

/// The exchange buffer through which the host tells a device how far it has opened its gates.
pub(crate) const AWAITED: &str = "exchange.awaited";

/// The prefix of the names of exchange buffers.
pub(crate) const EXCHANGE: &str = "exchange.";

/// The recordings that apply the changes in an inbox.
pub(crate) struct InboxRecordings {
    /// Writes words of the device state.
    pub(crate) apply: Recording,
    /// Clears token counts; only where tokens are drawn.
    pub(crate) clear: Option<Recording>,
    /// Adds tokens to token counts; only where tokens are drawn.
    pub(crate) mark: Option<Recording>,
}

impl Recordings {
    pub(crate) fn new(decoder: &Decoder<'_>, buckets: &[u32], draft_sequences: u32) -> Recordings {
        // If words are tagged, the same step with barriers is kept as a fallback.
        let both = |shape| {
            let recording = decoder.record(shape);
            let plain = recording.with_barriers();
            let plain = (plain != recording).then_some(plain);
            (recording, plain)
        };
        let mut decode = Vec::new();
        let mut rows = 1;
        while rows <= decoder.state.rows {
            let (recording, plain) = both(StepShape::Decode { rows });
            decode.push((rows, recording, plain));
            rows *= 2;
        }
        let mut verify = Vec::new();
        for drafts in 1..=decoder.drafts {
            let mut sequences = 1;
            while sequences <= draft_sequences {
                let (recording, plain) = both(StepShape::Verify { sequences, drafts });
                verify.push((drafts, sequences, recording, plain));
                sequences *= 2;
            }
        }
        let prefill: Vec<(u32, Recording)> =
            buckets.iter().map(|&rows| (rows, decoder.record(StepShape::Prefill { rows }))).collect();
        let microbatches = buckets.iter().filter(|rows| decoder.has_microbatches(**rows));
        let microbatches = microbatches.map(|&rows| (rows, decoder.record_in_microbatches(rows))).collect();
        let more = decoder.state.sequences - decoder.state.prompts;
        let wide = prefill.iter().filter(|(rows, _)| more > 0 && *rows > decoder.state.prompts);
        let wide = wide.map(|(rows, step)| (*rows, with_room(step, more))).collect();
        // The parts of a batch of a split model take turns in the batch's rows, so each of their steps has a change.
        let parts = exchange::parts(decoder.stage.stages);
        // So have those of tensor parallelism, for the number of their first exchange.
        let each_step = parts > 1 || decoder.stage.rank.is_some();
        let inboxes = if each_step { INBOXES + RUN_AHEAD as usize * parts } else { INBOXES };
        let inboxes = (0..inboxes).map(|index| inbox_recordings(decoder, index)).collect();
        let head = decoder.stage.is_last().then(|| head_recordings(decoder));
        let logits = decoder.stage.has_logits().then(|| logit_recordings(decoder));
        let decode_rows = decoder.mixed_steps().map(|_| decoder.decode_rows());
        let catch_up = buckets.iter().filter_map(|&rows| Some((rows, decoder.catch_up(rows)?))).collect();
        let exchange = ExchangeRecordings::default();
        let mut recordings = Recordings {
            decode,
            verify,
            prefill,
            microbatches,
            wide,
            catch_up,
            decode_rows,
            inboxes,
            head,
            logits,
            exchange,
        };
        recordings.exchange = exchange_recordings(decoder, &recordings);
        recordings
    }

    /// Returns the numbers of rows of the steps, and which of them are tagged.
    pub(crate) fn rows(&self) -> BTreeSet<PassedRows> {
        // Those of split models are not tagged.
        let verify = self.verify.iter().map(|(drafts, sequences, ..)| sequences * (drafts + 1));
        let others = verify.chain(self.prefill.iter().map(|(rows, _)| *rows));
        self.decode_rows().chain(others.map(|rows| PassedRows { rows, tagged: false })).collect()
    }

    fn decode_rows(&self) -> impl Iterator<Item = PassedRows> {
        self.decode.iter().map(|(rows, _, plain)| PassedRows { rows: *rows, tagged: plain.is_some() })
    }

    /// Returns the tags of the words that decode steps hand on, by number of rows (`Decoder::output_tags`).
    pub(crate) fn output_tags(&self) -> BTreeMap<u32, u32> {
        self.decode.iter().filter_map(|(rows, step, _)| Some((*rows, output_tag(step)?))).collect()
    }

    /// Returns the rows of the steps of parts of a batch: of each part but the first, in its own buffers.
    fn part_rows(&self) -> BTreeSet<PassedRows> {
        let most = self.decode.iter().map(|(rows, ..)| *rows).max().unwrap_or(0).div_ceil(2);
        self.decode_rows().filter(|of| of.rows <= most).collect()
    }

    /// Returns the numbers of rows of the largest message of each buffer: of those of whole steps, and of those of parts.
    pub(crate) fn message_rows(&self) -> [u32; 2] {
        [self.rows(), self.part_rows()].map(|rows| rows.iter().map(|of| of.rows).max().unwrap_or(0))
    }

    /// Returns the recordings that run all layers.
    pub(crate) fn layers(&self) -> impl Iterator<Item = &Recording> {
        let decode = self.decode.iter().map(|(_, recording, _)| recording);
        let verify = self.verify.iter().map(|(.., recording, _)| recording);
        decode.chain(verify).chain(self.prefill.iter().map(|(_, recording)| recording))
    }

    /// Returns the recordings of steps of prompts, and of what completes them.
    fn of_prompts(&self) -> impl Iterator<Item = &Recording> {
        let steps = self.prefill.iter().chain(&self.microbatches).chain(&self.wide).chain(&self.catch_up);
        steps.map(|(_, recording)| recording).chain(&self.decode_rows)
    }

    /// Returns the recordings that steps normally use, without the fallbacks with barriers.
    fn of_steps(&self) -> impl Iterator<Item = &Recording> {
        let decode = self.decode.iter().map(|(_, recording, _)| recording);
        let verify = self.verify.iter().map(|(.., recording, _)| recording);
        let logits = self.logits.iter().flat_map(LogitRecordings::all);
        decode.chain(verify).chain(self.of_prompts()).chain(logits).chain(self.head.iter().map(|head| &head.pool))
    }

    pub(crate) fn all(&self) -> Vec<&Recording> {
        let decode = self.decode.iter().flat_map(|(_, recording, plain)| std::iter::once(recording).chain(plain));
        let verify = self.verify.iter().flat_map(|(.., recording, plain)| std::iter::once(recording).chain(plain));
        let inboxes =
            self.inboxes.iter().flat_map(|inbox| std::iter::once(&inbox.apply).chain(&inbox.clear).chain(&inbox.mark));
        let head = self.head.iter().flat_map(|head| [&head.pool, &head.dump]);
        let head = self.logits.iter().flat_map(LogitRecordings::all).chain(head);
        decode.chain(verify).chain(self.of_prompts()).chain(head).chain(inboxes).chain(self.exchange.all()).collect()
    }
}

impl LogitRecordings {
    fn all(&self) -> impl Iterator<Item = &Recording> {
        self.first.iter().chain(&self.mixed).chain([&self.score]).map(|(_, recording)| recording)
    }
}

/// Returns the recording of a prefill step with room for `more` further sequences that decode in it.
fn with_room(step: &Recording, more: u32) -> Recording {
    let mut wide = Recording { name: format!("{}.wide", step.name), ..step.clone() };
    for op in &mut wide.ops {
        if let Op::Call(call) = op {
            flash::add_prompts(call, more);
            delta::add_decoding_rows(call, more);
        }
    }
    wide
}

fn logit_recordings(decoder: &Decoder<'_>) -> LogitRecordings {
    let sizes = || (0..).map(|power| 1u32 << power);
    let StateLayout { prompts, sequences, .. } = decoder.state;
    let firsts = sizes().take_while(|rows| *rows <= prompts);
    let first = firsts.map(|rows| (rows, decoder.record(StepShape::Head { rows }))).collect();
    let mixed = match decoder.mixed_steps() {
        None => Vec::new(),
        Some(_) => {
            // Rows that decode beside prompts are too many for drafts, or drafts do not pay.
            let drafts = decoder.drafts > 0;
            let plain = Decoder { drafts: 0, drafter: None, ..decoder.clone() };
            let sizes = sizes().take_while(|rows| *rows <= sequences).filter(|rows| drafts || *rows > prompts);
            let head = |rows| {
                let recording = plain.record(StepShape::Head { rows });
                (rows, Recording { name: format!("{}.mixed", recording.name), ..recording })
            };
            sizes.map(head).collect()
        }
    };
    let rows = decoder.score_rows();
    LogitRecordings { first, mixed, score: (rows, decoder.record(StepShape::Score { rows })) }
}

fn head_recordings(decoder: &Decoder<'_>) -> HeadRecordings {
    let mut dump = Recording::new("dump");
    let bytes = u64::from(decoder.config.vocab) * 4;
    let from = dump.buffer("logits", bytes);
    let to = dump.buffer("dump", bytes);
    dump.ops.push(Op::Copy { from, to });
    let pool = decoder.record(StepShape::Pool { prompts: decoder.state.prompts });
    HeadRecordings { pool, dump }
}

/// Returns the recordings with which a stage exchanges data with the others.
fn exchange_recordings(decoder: &Decoder<'_>, recordings: &Recordings) -> ExchangeRecordings {
    let (first, last) = (decoder.stage.is_first(), decoder.stage.is_last());
    if decoder.stage.is_whole() {
        return ExchangeRecordings::default();
    }
    // Devices with a part of every layer begin each step together, and only sums pass between them.
    let passes_on = decoder.stage.rank.is_none();
    let layouts = recordings.message_rows().map(|most| decoder.message(most));
    let buffers = exchange::buffers(decoder.stage.stages);
    let passes = |name: &str, sends: bool| {
        let of = |&PassedRows { rows, tagged }: &PassedRows, buffer: usize| {
            let layout = &layouts[usize::from(exchange::is_of_part(buffer))];
            let mut recording = Recording::new(format!("{name}{}.{rows}", if tagged { ".tagged" } else { "" }));
            let message = recording.buffer(&exchange_buffer(name, buffer), layout.bytes);
            for passed in &layout.buffers {
                let range = recording.buffer(&passed.name_in(tagged), u64::from(rows) * passed.row_bytes);
                let place = message.part(passed.at, range.bytes);
                let (from, to) = if sends { (range, place) } else { (place, range) };
                recording.ops.push(Op::Copy { from, to });
            }
            match sends {
                _ if !decoder.tuning.tags => {}
                true => {
                    let (from, to) = (decoder.state.fault(&mut recording), message.part(layout.fault, 4));
                    recording.ops.push(Op::Copy { from, to });
                }
                // A fault word of this stage stays set whatever the message says.
                false => {
                    let inbox = message.part(layout.inbox, sampling::patch_bytes(1));
                    let target = decoder.state.all(&mut recording);
                    let args = PatchArgs { inbox, target, capacity: 1, words: (target.bytes / 4) as u32 };
                    recording.call(sampling::patch("take_over_fault".to_owned(), args));
                }
            }
            recording
        };
        let part_rows = recordings.part_rows();
        let fits = |rows: &PassedRows, buffer: &usize| !exchange::is_of_part(*buffer) || part_rows.contains(rows);
        let all =
            |rows: &PassedRows| buffers.clone().filter(|buffer| fits(rows, buffer)).map(|at| of(rows, at)).collect();
        recordings.rows().iter().map(|rows| (*rows, all(rows))).collect()
    };
    let apply = |buffer: usize| {
        let mut recording = Recording::new("apply_slots");
        let capacity = decoder.state.rows.max(decoder.state.prompts) * RETURNED.len() as u32;
        let inbox = recording.buffer(&exchange_buffer("apply", buffer), sampling::patch_bytes(capacity));
        let target = decoder.state.all(&mut recording);
        let args = PatchArgs { inbox, target, capacity, words: (target.bytes / 4) as u32 };
        recording.call(sampling::patch("apply_slots".to_owned(), args));
        recording
    };
    let publish = |buffer: usize| {
        let mut recording = Recording::new("publish_slots");
        let from = decoder.state.slots(&mut recording);
        let to = recording.buffer(&exchange_buffer("publish", buffer), from.bytes);
        recording.ops.push(Op::Copy { from, to });
        recording
    };
    let awaits = |gate: GateOf| {
        let mut recording = Recording::new("await_gate");
        let numbers = recording.buffer(AWAITED, AWAITED_BYTES);
        recording.call(await_gate("await_gate".to_owned(), gate, numbers, decoder.tuning.gate_polls));
        recording
    };
    let waits_busy = passes_on && decoder.tuning.gate_polls > 0;
    ExchangeRecordings {
        awaits: waits_busy.then(|| [GateOf::Messages, GateOf::Returns].map(awaits)),
        receive: if first { BTreeMap::new() } else { passes("receive", false) },
        send: if last || !passes_on { BTreeMap::new() } else { passes("send", true) },
        apply: if last { Vec::new() } else { buffers.clone().map(apply).collect() },
        publish: if last { buffers.clone().map(publish).collect() } else { Vec::new() },
    }
}

fn inbox_recordings(decoder: &Decoder<'_>, index: usize) -> InboxRecordings {
    let mut apply = Recording::new("patch");
    let inbox = apply.buffer(&format!("inbox.{index}.patch"), sampling::patch_bytes(PATCH_PAIRS));
    let target = decoder.state.all(&mut apply);
    let args = PatchArgs { inbox, target, capacity: PATCH_PAIRS, words: (target.bytes / 4) as u32 };
    let call = sampling::patch("patch".to_owned(), args);
    apply.call(call);
    if !decoder.stage.is_last() {
        return InboxRecordings { apply, clear: None, mark: None };
    }

    let slots = decoder.state.slots;
    let vocabulary = decoder.config.vocab;
    let mut clear = Recording::new("clear_counts");
    let inbox = clear.buffer(&format!("inbox.{index}.clear"), sampling::clear_bytes(slots));
    let counts = clear.buffer("sampling.counts", sampling::counts_bytes(slots, vocabulary));
    let args = ClearCountsArgs { inbox, counts, slots, vocabulary };
    let call = sampling::clear_counts("clear_counts".to_owned(), slots, args);
    clear.call(call);

    let mut mark = Recording::new("mark_seen");
    let rows = mark.buffer(&format!("inbox.{index}.seen"), rows_bytes(SEEN_ROWS));
    let counts = mark.buffer("sampling.counts", sampling::counts_bytes(slots, vocabulary));
    let args = MarkPromptArgs { rows, state: decoder.state.slots(&mut mark), counts, row_count: SEEN_ROWS, vocabulary };
    mark.call(sampling::mark_prompt("mark_seen".to_owned(), args));
    if decoder.keeps_tokens() {
        decoder.note_tokens(&mut mark, rows, SEEN_ROWS);
    }
    InboxRecordings { apply, clear: Some(clear), mark: Some(mark) }
}
