//! The test at start of steps without barriers, decode steps and those that verify drafts: sequences decode a few tokens as in
//! normal operation, with several submissions in flight, once without and once with barriers. Tokens and logits must be equal;
//! a step that fails is removed.
//! Not here: faults at run time (`gpu::executor`, `gpu::overlap`).

use crate::device::Point;
use crate::gpu::build::Build;
use crate::gpu::error::StartError;
use crate::gpu::executor::{DecodeRegion, DecodeRegions, Inbox};
use crate::kernels::recording::{Op, Recording};
use crate::kernels::region::{Pipelines, Region};
use crate::kernels::sampling::{Patch, patch_inbox};
use crate::kernels::state::{self, RingEntry, SlotInit};
use crate::memory::{Buffer, BufferTable};
use crate::model::decoder::{Decoder, stride};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The maximum difference between the logits of both runs, relative to their norm. The arithmetic is the same.
const TOLERANCE: f64 = 1e-6;
/// The number of submissions in flight.
const SUBMISSIONS: u32 = 2;
/// The number of steps per submission.
const STEPS: u32 = 4;
/// The number of pages of context before the tested tokens, if a slot can hold that many: enough to split attention.
const CONTEXT_PAGES: u32 = 40;

/// The buffers and regions by which the test writes the device state and reads the results.
pub(crate) struct Probe<'a> {
    pub(crate) inbox: &'a Inbox,
    pub(crate) ring: &'a Buffer,
    pub(crate) dump_region: &'a Arc<Region>,
    pub(crate) dump: &'a Buffer,
    /// The points that the first submission waits for.
    pub(crate) ready: &'a [Point],
    /// The number of tokens per page.
    pub(crate) page_tokens: u32,
}

/// The result of a run of a few steps.
struct Outcome {
    tokens: Vec<Option<u32>>,
    logits: Vec<f32>,
    /// The call that timed out.
    fault: Option<u32>,
}

/// The steps of decoding of some numbers of sequences.
type Buckets = BTreeMap<u32, DecodeRegions>;

/// Tests every bucket that has a step without barriers, and removes that step from buckets that fail: of decode steps, and of
/// those that verify drafts, by drafts per sequence. Returns the number of buckets that failed.
pub(crate) fn test_overlap(
    build: &Build<'_>,
    decoder: &Decoder<'_>,
    table: &BufferTable,
    probe: &Probe<'_>,
    (decode, verify): (&mut Buckets, &mut BTreeMap<u32, Buckets>),
) -> Result<u32, StartError> {
    let all = || decode.values().chain(verify.values().flat_map(BTreeMap::values));
    if all().all(|regions| regions.carried.is_none()) {
        return Ok(0);
    }
    let mut test = Test { build, decoder, probe, steps: 0 };
    // All tokens of a test lie in one page behind the context.
    let most = probe.page_tokens.min(decoder.context);
    // Recurrent state is only treated as empty at position 0, so both runs must begin there.
    let context = match decoder.config.is_recurrent() {
        true => 0,
        false => CONTEXT_PAGES.min((decoder.context - most) / probe.page_tokens).min(decoder.state.max_pages - 1),
    };
    if context > 0 {
        // Page 0 is the context of all sequences; one sequence fills it.
        let single = decode[&1].plain.clone();
        let fill = test.patch(1, 0, |_, _| 0);
        test.run((&single, probe.dump_region), 1, fill, probe.page_tokens)?;
    }
    let mut failed = 0;
    let plain: BTreeMap<u32, DecodeRegion> = decode.iter().map(|(rows, of)| (*rows, of.plain.clone())).collect();
    // A draft model also writes the token before the first, which would lie in the page that all sequences share.
    let drafter = decoder.drafter_catches_up();
    let verify = verify.iter_mut().flat_map(|(drafts, buckets)| buckets.iter_mut().map(|of| (*drafts, of)));
    for (drafts, (bucket, regions)) in decode.iter_mut().map(|of| (0, of)).chain(verify) {
        let Some(carried) = &regions.carried else { continue };
        build.wanted()?;
        let each = drafts + 1;
        // A drafting pass behind a step has tokens behind those of the step.
        let room = most.saturating_sub(drafts) / each;
        let (rows, steps) = (bucket * each, room.min(SUBMISSIONS * STEPS) / SUBMISSIONS * SUBMISSIONS);
        let context = if drafts > 0 && drafter { 0 } else { context };
        let what = || match drafts {
            0 => format!("the decode step of {rows} rows"),
            _ => format!("the step that verifies {drafts} drafts of {bucket} sequences"),
        };
        if steps == 0 {
            regions.carried = None;
            regions.broken.clear();
            continue;
        }
        // Each sequence has its own page after the context.
        let own_pages = decoder.window_pages.map_or(decoder.pages, |pages| pages.min(decoder.pages)) - 1;
        let sequences = (*bucket).min(own_pages).min(decoder.state.slots);
        let pages = |slot: u32, index: u32| if index == context { slot + 1 } else { 0 };
        let mut begin = test.patch(sequences, context * probe.page_tokens, pages);
        let first_row = Arc::clone(probe.dump_region);
        let mut dump = Arc::clone(&first_row);
        if let (1.., Some(alone)) = (drafts, plain.get(bucket)) {
            // The drafts of the first step are right, so that its tokens come from all rows (a draft model replaces them); and the
            // logits that are compared are those of the last row of the first sequence, which depend on all of its rows.
            let steps = (most / SUBMISSIONS * SUBMISSIONS).min(state::MOST_DRAFTS.next_multiple_of(SUBMISSIONS));
            let drawn = test.run((alone, &first_row), *bucket, begin, steps)?.tokens;
            begin = test.patch(sequences, context * probe.page_tokens, pages);
            for slot in 0..sequences {
                let drawn = drawn.iter().skip(slot as usize).step_by(*bucket as usize);
                let right: Vec<u32> = drawn.take(drafts as usize).map(|token| token.unwrap_or(0)).collect();
                begin.set_all(decoder.state.slot_word(slot, state::SLOT_DRAFTS), &right);
            }
            dump = test.dump_of(table, drafts)?;
        }
        let mut run = |region: &DecodeRegion| test.run((region, &dump), rows, begin.clone(), steps);
        let found = run(carried)?;
        let why = match found.fault {
            Some(call) => Some(format!(
                "call {} waited too long",
                carried.whole.label(call.wrapping_sub(1)).unwrap_or("of an unknown number")
            )),
            None => {
                let wanted = run(&regions.plain)?;
                if let Some(call) = wanted.fault {
                    let call = regions.plain.whole.label(call.wrapping_sub(1)).unwrap_or("unknown");
                    return Err(build.unsupported(format!("{call} of {} waits in spite of barriers", what())));
                }
                difference(&wanted, &found)
            }
        };
        if let Some(why) = why {
            build.progress.warning(&format!(
                "\"{}\": {} without barriers failed its test ({why}): it runs with barriers",
                build.name,
                what()
            ));
            regions.carried = None;
            regions.broken.clear();
            failed += 1;
        }
    }
    test.reset(table)?;
    Ok(failed)
}

/// Returns a description of the difference between two runs; `None` if they agree.
fn difference(wanted: &Outcome, found: &Outcome) -> Option<String> {
    if wanted.tokens != found.tokens {
        return Some("it draws other tokens".to_owned());
    }
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v) * f64::from(v)).sum::<f64>();
    let norm = square(&mut wanted.logits.iter().copied()).sqrt();
    let difference = square(&mut wanted.logits.iter().zip(&found.logits).map(|(a, b)| a - b)).sqrt();
    (difference.is_nan() || difference > TOLERANCE * norm)
        .then(|| format!("its logits differ by {:.1e} of their size", difference / norm))
}

struct Test<'a> {
    build: &'a Build<'a>,
    decoder: &'a Decoder<'a>,
    probe: &'a Probe<'a>,
    /// The number of steps that have run; the device counts them too.
    steps: u32,
}

impl Test<'_> {
    /// Returns a patch that assigns rows to `sequences` sequences, all at position `position`. `page` gives the KV page
    /// for a slot and an index in the slot's page tables.
    fn patch(&self, sequences: u32, position: u32, page: impl Fn(u32, u32) -> u32) -> Patch {
        let layout = self.decoder.state;
        let mut patch = Patch::default();
        for row in 0..layout.rows {
            patch.set(layout.batch_word(row), if row < sequences { row } else { u32::MAX });
        }
        let init = SlotInit { remaining: u32::MAX, prompt_tokens: position, ..SlotInit::default() };
        for slot in 0..sequences {
            patch.set_all(layout.slot_word(slot, 0), &init.words());
            let token = (slot * 97 + 1) % self.decoder.config.vocab;
            patch.set(layout.slot_word(slot, state::SLOT_TOKEN), token);
            patch.set(layout.slot_word(slot, state::SLOT_POSITION), position);
            patch.set(layout.slot_word(slot, state::SLOT_SETTLED), position);
            for index in 0..=position / self.probe.page_tokens {
                let page = page(slot, index);
                patch.set(layout.page_word(slot, index), page);
                if layout.windows {
                    patch.set(layout.window_word(slot, index), page);
                }
            }
        }
        patch.set(layout.fault_word(), 0);
        patch
    }

    /// Runs `steps` steps of a region after applying a patch, split into as many submissions in flight as plans are in
    /// normal operation, and `dump` behind them.
    fn run(
        &mut self,
        (region, dump): (&DecodeRegion, &Arc<Region>),
        rows: u32,
        patch: Patch,
        steps: u32,
    ) -> Result<Outcome, StartError> {
        let inbox = self.probe.inbox;
        let mut pairs = patch.into_pairs();
        // If the patch exceeds an inbox, its first part is applied in advance.
        let last = pairs.split_off(pairs.len().saturating_sub(super::PATCH_PAIRS as usize));
        for part in pairs.chunks(super::PATCH_PAIRS as usize) {
            inbox.patch.write(0, bytemuck::cast_slice(&patch_inbox(part)));
            self.build.run_all(vec![vec![Arc::clone(&inbox.apply)]], self.probe.ready)?;
        }
        inbox.patch.write(0, bytemuck::cast_slice(&patch_inbox(&last)));
        let share = steps / SUBMISSIONS;
        let mut submissions = vec![vec![Arc::clone(&region.whole); share as usize]; SUBMISSIONS as usize];
        submissions[0].insert(0, Arc::clone(&inbox.apply));
        submissions[SUBMISSIONS as usize - 1].push(Arc::clone(dump));
        self.build.run_all(submissions, self.probe.ready)?;
        let first = self.steps;
        self.steps += share * SUBMISSIONS;

        let ring = self.decoder.ring;
        let mut outcome = Outcome { tokens: Vec::new(), logits: Vec::new(), fault: None };
        for (step, row) in (first..self.steps).flat_map(|step| (0..rows).map(move |row| (step, row))) {
            let mut words = [0u32; state::ENTRY_WORDS as usize];
            let at = RingEntry::at(step, row, ring.steps, ring.rows) as u64 * 4;
            self.probe.ring.read(at, bytemuck::cast_slice_mut(&mut words));
            let entry = RingEntry::read(&words, || [0; state::TOP_WORDS as usize]);
            if entry.done == state::DONE_FAULT {
                outcome.fault = outcome.fault.or(Some(entry.fault));
            }
            outcome.tokens.push(entry.token);
        }
        outcome.logits = vec![0f32; self.decoder.config.vocab as usize];
        self.probe.dump.read(0, bytemuck::cast_slice_mut(&mut outcome.logits));
        Ok(outcome)
    }

    /// Returns the region that copies the logits of a row to `dump`.
    fn dump_of(&self, table: &BufferTable, row: u32) -> Result<Arc<Region>, StartError> {
        let mut dump = Recording::new("dump of a row");
        let (row_bytes, bytes) =
            (u64::from(stride(self.decoder.config.vocab)) * 4, u64::from(self.decoder.config.vocab) * 4);
        let logits = dump.buffer("logits", u64::from(row + 1) * row_bytes);
        let (from, to) = (logits.part(u64::from(row) * row_bytes, bytes), dump.buffer("dump", bytes));
        dump.ops.push(Op::Copy { from, to });
        self.without_calls(dump, table)
    }

    /// Resets the device state to zero, as before the test.
    fn reset(&self, table: &BufferTable) -> Result<(), StartError> {
        let mut reset = Recording::new("reset after test");
        let to = [self.decoder.state.all(&mut reset), reset.buffer("step", 4)];
        reset.ops.extend(to.map(|to| Op::Fill { to, word: 0 }));
        self.build.run_all(vec![vec![self.without_calls(reset, table)?]], &[])
    }

    /// Returns the region of a recording of copies and fills, which need no pipelines.
    fn without_calls(&self, recording: Recording, table: &BufferTable) -> Result<Arc<Region>, StartError> {
        let device = &self.build.opened.device;
        let pipelines = Pipelines::build(device, None, &[&recording], &|_, _| {})?;
        Ok(Arc::new(Region::build(device, &recording, table, &pipelines)?))
    }
}
