//! All recordings that a replica's executor runs, made from the decoder for each bucket.

use crate::engine::variants::{Fallback, Variants};
use crate::gpu::build::defaults::{INBOXES, PATCH_PAIRS, SEEN_ROWS};
use crate::kernels::embed::rows_bytes;
use crate::kernels::gemm::skinny::Matrices;
use crate::kernels::recording::{Op, Recording};
use crate::kernels::sampling;
use crate::kernels::shaders::{ClearCountsArgs, MarkPromptArgs, PatchArgs};
use crate::kernels::tags;
use crate::model::decoder::{Decoder, StepShape};
use std::collections::BTreeMap;

/// Returns the kernels of a model's regions and the fallbacks in use. `failed` is the number of buckets whose decode
/// step without barriers failed its test.
pub(super) fn variants(decoder: &Decoder<'_>, recordings: &Recordings, failed: u32) -> Variants {
    let variants = Variants::of(recordings.of_steps());
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
    /// For tests: by number of rows, the decode steps without barriers in which one call waits for words that are never
    /// written.
    pub(crate) broken: BTreeMap<u32, Recording>,
    /// The verification steps, by drafts per sequence and number of sequences.
    pub(crate) verify: Vec<(u32, u32, Recording)>,
    /// The prefill steps, by number of rows.
    pub(crate) prefill: Vec<(u32, Recording)>,
    /// The recordings that draw the first tokens of prompts, by number of prompts.
    pub(crate) first: Vec<(u32, Recording)>,
    /// The recording that scores prompt tokens, with its number of rows.
    pub(crate) score: (u32, Recording),
    /// The recording that pools rows of prompts that are embedded.
    pub(crate) pool: Recording,
    pub(crate) inboxes: Vec<InboxRecordings>,
    pub(crate) dump: Recording,
}

/// The recordings that apply the changes in an inbox.
pub(crate) struct InboxRecordings {
    /// Writes words of the device state.
    pub(crate) apply: Recording,
    /// Clears token counts.
    pub(crate) clear: Recording,
    /// Adds tokens to token counts.
    pub(crate) mark: Recording,
}

impl Recordings {
    pub(crate) fn new(decoder: &Decoder<'_>, buckets: &[u32], draft_sequences: u32) -> Recordings {
        let mut decode = Vec::new();
        let mut broken = BTreeMap::new();
        let tuning = &decoder.tuning;
        let mut rows = 1;
        while rows <= decoder.state.rows {
            let mut recording = decoder.record(StepShape::Decode { rows });
            // If words are tagged, the same step with barriers is kept as a fallback.
            let plain = recording.with_barriers();
            let plain = (plain != recording).then_some(plain);
            if plain.is_some() && tuning.broken_call > 0 {
                let mut other = recording.clone();
                if tags::break_call(&mut other, tuning.broken_call) {
                    match tuning.broken_step + tuning.broken_every {
                        0 => recording = other,
                        _ => {
                            broken.insert(rows, other);
                        }
                    }
                }
            }
            decode.push((rows, recording, plain));
            rows *= 2;
        }
        let mut verify = Vec::new();
        for drafts in 1..=decoder.drafts {
            let mut sequences = 1;
            while sequences <= draft_sequences {
                verify.push((drafts, sequences, decoder.record(StepShape::Verify { sequences, drafts })));
                sequences *= 2;
            }
        }
        let prefill = buckets.iter().map(|&rows| (rows, decoder.record(StepShape::Prefill { rows }))).collect();
        let sizes = (0..).map(|power| 1 << power).take_while(|rows| *rows <= decoder.state.prompts);
        let first = sizes.map(|rows| (rows, decoder.record(StepShape::Head { rows }))).collect();
        let inboxes = (0..INBOXES).map(|index| inbox_recordings(decoder, index)).collect();
        let mut dump = Recording::new("dump");
        let bytes = u64::from(decoder.config.vocab) * 4;
        let from = dump.buffer("logits", bytes);
        let to = dump.buffer("dump", bytes);
        dump.ops.push(Op::Copy { from, to });
        let rows = decoder.score_rows();
        let score = (rows, decoder.record(StepShape::Score { rows }));
        let pool = decoder.record(StepShape::Pool { prompts: decoder.state.prompts });
        Recordings { decode, broken, verify, prefill, first, score, pool, inboxes, dump }
    }

    /// Returns the recordings that steps normally use, without the fallbacks with barriers.
    fn of_steps(&self) -> impl Iterator<Item = &Recording> {
        let decode = self.decode.iter().map(|(_, recording, _)| recording);
        let verify = self.verify.iter().map(|(.., recording)| recording);
        let prompts = self.prefill.iter().chain(&self.first).chain([&self.score]).map(|(_, recording)| recording);
        let prompts = prompts.chain([&self.pool]);
        decode.chain(verify).chain(prompts)
    }

    pub(crate) fn all(&self) -> Vec<&Recording> {
        let decode = self.decode.iter().flat_map(|(_, recording, plain)| std::iter::once(recording).chain(plain));
        let prompts = self.prefill.iter().chain(&self.first).chain([&self.score]).map(|(_, recording)| recording);
        let prompts = prompts.chain([&self.pool]);
        let verify = self.verify.iter().map(|(.., recording)| recording);
        let inboxes = self.inboxes.iter().flat_map(|inbox| [&inbox.apply, &inbox.clear, &inbox.mark]);
        decode.chain(verify).chain(prompts).chain(inboxes).chain([&self.dump]).collect()
    }
}

fn inbox_recordings(decoder: &Decoder<'_>, index: usize) -> InboxRecordings {
    let mut apply = Recording::new("patch");
    let inbox = apply.buffer(&format!("inbox.{index}.patch"), sampling::patch_bytes(PATCH_PAIRS));
    let target = decoder.state.all(&mut apply);
    let args = PatchArgs { inbox, target, capacity: PATCH_PAIRS, words: (target.bytes / 4) as u32 };
    let call = sampling::patch("patch".to_owned(), args);
    apply.call(call);

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
    if decoder.looks_up() {
        decoder.note_tokens(&mut mark, rows, SEEN_ROWS);
    }
    InboxRecordings { apply, clear, mark }
}
