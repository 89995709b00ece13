//! The exchange of data between the stages of a split replica: the work around a stage's steps by which activations
//! pass from a device to the next one, and slots return from the last stage to the others after sampling.
//! Not here: which steps run (`split`).

use crate::actors::proxy::Exchanges;
use crate::actors::watcher::Then;
use crate::device::{DeviceError, Gate};
use crate::engine::executor::ExecuteError;
use crate::engine::plan::{Change, PLANS_IN_FLIGHT, Ticket, Work};
use crate::gpu::executor::submit::fitting;
use crate::gpu::executor::{Around, GpuExecutor, Link, Pending};
use crate::kernels::exchange::{GateOf, awaited_offset};
use crate::kernels::region::Region;
use crate::kernels::sampling::patch_inbox;
use crate::kernels::state;
use crate::memory::Buffer;
use crate::model::decoder::stage::MessageLayout;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// The words of a slot that a step may change and that stages before the last read.
pub const RETURNED: [u32; 9] = [
    state::SLOT_ACTIVE,
    state::SLOT_TOKEN,
    state::SLOT_POSITION,
    state::SLOT_GENERATED,
    state::SLOT_MIN_LEFT,
    state::SLOT_SETTLED,
    state::SLOT_DRAFTS,
    state::SLOT_DRAFTS + 1,
    state::SLOT_DRAFTS + 2,
];

/// The rows of a step that pass from a stage to the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PassedRows {
    /// The number of rows.
    pub rows: u32,
    /// Whether the stage's activations are tagged in this step.
    pub tagged: bool,
}

/// The number of low bits of a fault word that hold the number of a call. In the words of later stages, the bits above
/// hold the index of the call's stage plus one.
const CALL_BITS: u32 = 24;

/// Returns the stage of the call in the last of `stages` stages' fault word, and the number of the call.
pub(super) fn faulted_call(word: u32, stages: usize) -> (usize, u32) {
    let stage = match word >> CALL_BITS {
        0 => stages - 1,
        number => number as usize - 1,
    };
    (stage, word & ((1 << CALL_BITS) - 1))
}

/// The maximum number of parts of a batch that are on different stages at a time.
pub const MOST_PARTS: u32 = 4;

/// The minimum number of sequences of a part. Two sequences in two parts were slower than in one step.
pub(super) const LEAST_ROWS: usize = 2;

/// Returns the number of parts into which a split model of `stages` stages divides a batch, so that each stage has one.
pub fn parts(stages: u32) -> usize {
    stages.min(MOST_PARTS) as usize
}

/// Returns the indices of the buffers of each kind through which stages exchange data: one for each plan in flight, and one
/// more for each further part of its batch.
pub fn buffers(stages: u32) -> Range<usize> {
    0..PLANS_IN_FLIGHT * parts(stages)
}

/// Returns the buffer that part `part` of the batch of plan `of_plan` uses.
pub(super) fn buffer_of(of_plan: usize, part: usize) -> usize {
    part * PLANS_IN_FLIGHT + of_plan
}

/// Whether a buffer belongs to a part of a batch other than the first.
pub fn is_of_part(buffer: usize) -> bool {
    buffer >= PLANS_IN_FLIGHT
}

/// Regions or buffers, one for each index in [`buffers`]; regions at the end that are never used are left out.
pub type OfBuffers<T> = Vec<Arc<T>>;

/// The buffers, regions and gates by which a stage of a split replica exchanges data with the others.
#[derive(Debug)]
pub struct Exchange {
    /// The layouts of the messages that pass from a stage to the next: of whole steps, and of further parts of batches.
    pub layouts: [MessageLayout; 2],
    /// Whether messages carry the fault word: whether steps may fault.
    pub carries_faults: bool,
    /// By number of rows, the tags of the words that decode steps hand on (`Decoder::input_tags` of the next stage).
    pub output_tags: BTreeMap<u32, u32>,
    /// The receiving side of a step's rows; `None` in the first stage.
    pub receive: Option<MessagesIn>,
    /// The sending side of a step's rows; `None` in the last stage.
    pub send: Option<MessagesOut>,
    /// The receiving side of sampled tokens; `None` in the last stage.
    pub apply: Option<SlotsIn>,
    /// The sending side of sampled tokens; `None` in all stages but the last.
    pub publish: Option<SlotsOut>,
    /// What keeps the device busy while a step waits for another stage; `None` if the device waits idle.
    pub busy_wait: Option<BusyWait>,
    /// With tensor parallelism, the exchanges within a step.
    pub sums: Option<Sums>,
}

/// The regions that keep a device busy while it waits at a gate: at that of the messages from the stage before, and at that of the
/// slots' changes.
#[derive(Debug)]
pub struct BusyWait {
    /// The numbers of `kernels::exchange::await_gate`, in memory of the device to which the host writes.
    numbers: Arc<Buffer>,
    regions: [Arc<Region>; 2],
    /// The number of runs that were queued.
    turns: AtomicU32,
}

impl BusyWait {
    /// Creates it with a region of [`await_gate`](crate::kernels::exchange::await_gate) for messages, one for slots' changes, and
    /// their numbers, which are zeros.
    pub fn new(numbers: Arc<Buffer>, regions: [Arc<Region>; 2]) -> BusyWait {
        BusyWait { numbers, regions, turns: AtomicU32::new(0) }
    }

    /// Returns the memory through which the device is told of its gates.
    pub(super) fn numbers(&self) -> Arc<Buffer> {
        Arc::clone(&self.numbers)
    }

    /// Tells the device of the number up to which a gate is about to be opened.
    pub(super) fn tell(numbers: &Buffer, gate: GateOf, number: u64) {
        numbers.store_u32(gate.offset(), number as u32);
        // The store leaves the processor's write buffers now.
        fence(Ordering::SeqCst);
    }

    /// Returns the region that waits for a gate's value `number`. It must be the next one that is queued; if that fails, so has the
    /// executor.
    fn region(&self, gate: GateOf, number: u64) -> Arc<Region> {
        let turn = self.turns.fetch_add(1, Ordering::Relaxed);
        self.numbers.store_u32(awaited_offset(turn), number as u32);
        let [messages, returns] = &self.regions;
        Arc::clone(if gate == GateOf::Messages { messages } else { returns })
    }
}

/// The exchanges of a device within a step, by which the parts of all devices are summed, and logits are collected.
#[derive(Debug)]
pub struct Sums {
    /// The parts for the other devices, in mapped memory.
    pub outbox: Arc<Buffer>,
    /// The parts of the other devices, in mapped memory of the device.
    pub inbox: Arc<Buffer>,
    /// The number of words of each slot of both.
    pub slot_words: u32,
    /// The number of words of the slot for the greatest logits of a step's rows.
    pub best_words: u32,
    /// The number of sums of a step.
    pub each_step: u32,
    /// Whether the rows of a step that draw tokens, or are scored, have exchanges of logits.
    pub gathers: bool,
    /// The number of floats of a row that are exchanged.
    pub row_floats: u32,
    /// Whether the floats of prompt steps are rounded to bfloat16.
    pub rounds_prompts: bool,
    /// If steps are divided where the host carries sums, how.
    pub divided: Option<DividedSteps>,
}

/// Steps that are divided where the host carries sums.
#[derive(Debug)]
pub struct DividedSteps {
    /// The gate whose value is the number of the last exchange whose words have come.
    pub gate: Arc<Gate>,
    /// The further parts of the regions that have sums, by the names of these.
    pub rest: BTreeMap<Arc<str>, Vec<Arc<Region>>>,
}

/// The buffers, regions and gate by which a stage receives a step's rows.
#[derive(Debug)]
pub struct MessagesIn {
    /// The messages, in mapped memory.
    pub messages: OfBuffers<Buffer>,
    /// The regions that copy a message to the step's buffers, and set the fault word if the message carries one.
    pub regions: BTreeMap<PassedRows, OfBuffers<Region>>,
    /// The gate whose value is the number of the last message that has arrived.
    pub gate: Arc<Gate>,
}

/// The buffers and regions by which a stage sends a step's rows to the next stage.
#[derive(Debug)]
pub struct MessagesOut {
    /// The messages, in mapped memory.
    pub messages: OfBuffers<Buffer>,
    /// The regions that copy the step's buffers to a message.
    pub regions: BTreeMap<PassedRows, OfBuffers<Region>>,
}

/// The buffers, regions and gate by which a stage receives the tokens that the last stage sampled.
#[derive(Debug)]
pub struct SlotsIn {
    /// The patches of the slots, in mapped memory.
    pub inboxes: OfBuffers<Buffer>,
    /// The regions that apply a patch.
    pub regions: OfBuffers<Region>,
    /// The gate whose value is the number of the last patch that has arrived.
    pub gate: Arc<Gate>,
}

/// The buffers and regions by which the last stage publishes the tokens that it sampled.
#[derive(Debug)]
pub struct SlotsOut {
    /// The words of all slots, in mapped memory.
    pub slots: OfBuffers<Buffer>,
    /// The regions that copy the slots.
    pub regions: OfBuffers<Region>,
}

/// A step of a stage within a split replica.
#[derive(Debug, Default)]
pub(super) struct StageStep {
    /// The buffers that the step uses.
    pub(super) buffer: usize,
    /// The buffers of the patches to apply first, and the gate value at which all of them have come; none in the last stage.
    pub(super) apply: Vec<usize>,
    pub(super) applied_at: u64,
    /// The number of the message that the step waits for, unless it is the first stage's.
    pub(super) message: u64,
    /// Whether tokens are drawn.
    pub(super) draws: bool,
    /// Whether a decode step runs with barriers.
    pub(super) barriers: bool,
    /// Whether tests may break the step.
    pub(super) breaks: bool,
    /// The value that the fault word has before the step, if it is set.
    pub(super) fault: Option<u32>,
    /// The step's exchanges, if it has any.
    pub(super) exchanges: Option<Exchanges>,
    /// The action that follows when the step has finished.
    pub(super) then: Option<Then>,
}

impl Exchange {
    /// Whether the words of other devices come to host memory.
    pub fn lacks_bar(&self) -> bool {
        self.sums.as_ref().is_some_and(|sums| !sums.inbox.device_local())
    }

    /// Returns the function that carries a message of `rows` rows from stage `stage` to the next one and lets that begin.
    /// `fault_word` is the offset of the fault word in the device state, in words.
    pub(super) fn carry(
        &self,
        next: &Exchange,
        stage: usize,
        (rows, fault_word): (u32, u32),
        buffer: usize,
        number: u64,
    ) -> Then {
        let (Some(send), Some(receive)) = (&self.send, &next.receive) else {
            panic!("the next stage takes over what this one hands on")
        };
        let (from, to) = (Arc::clone(&send.messages[buffer]), Arc::clone(&receive.messages[buffer]));
        let gate = Arc::clone(&receive.gate);
        let busy_wait = next.busy_wait.as_ref().map(BusyWait::numbers);
        let MessageLayout { buffers, fault, inbox, .. } = self.layouts[usize::from(is_of_part(buffer))].clone();
        let parts: Vec<(u64, u64)> =
            buffers.iter().map(|passed| (passed.at, u64::from(rows) * passed.row_bytes)).collect();
        let carries_faults = self.carries_faults;
        Then::new(move || {
            parts.iter().for_each(|(at, bytes)| copy(&from, &to, *at, *bytes));
            if carries_faults {
                let mut word = 0u32;
                from.read(fault, bytemuck::bytes_of_mut(&mut word));
                if word != 0 && word >> CALL_BITS == 0 {
                    word |= (stage as u32 + 1) << CALL_BITS;
                }
                let faults = [[fault_word, word]];
                let faults = &faults[..usize::from(word != 0)];
                to.write(inbox, bytemuck::cast_slice(&patch_inbox(faults)));
            }
            if let Some(numbers) = &busy_wait {
                BusyWait::tell(numbers, GateOf::Messages, number);
            }
            gate.open(number)
        })
    }
}

/// Copies the same range from a mapped buffer to another one, in pieces that stay in the processor's cache.
fn copy(from: &Buffer, to: &Buffer, at: u64, bytes: u64) {
    let mut piece = [0u8; 16 << 10];
    let mut done = 0;
    while done < bytes {
        let size = (bytes - done).min(piece.len() as u64) as usize;
        from.read(at + done, &mut piece[..size]);
        to.write(at + done, &piece[..size]);
        done += size as u64;
    }
}

impl GpuExecutor {
    /// Returns the buffers, regions and gates of the stage's exchange with the others.
    ///
    /// # Panics
    /// If the replica is not split.
    pub(super) fn exchange(&self) -> &Exchange {
        self.parts.exchange.as_ref().expect("a stage of a split replica")
    }

    /// Returns the number of rows of the region that runs a step's layers.
    pub(super) fn step_rows(&self, work: &Work) -> u32 {
        match work {
            Work::Prefill { .. } => fitting(&self.parts.prefill, work.prompt_rows()).0,
            Work::CatchUp { .. } => panic!("the draft model of a split model computes every step"),
            Work::Decode { slots, drafts: 0, .. } => fitting(&self.parts.decode, slots.len() as u32).0,
            Work::Decode { slots, drafts, .. } => {
                fitting(&self.parts.verify[drafts], slots.len() as u32).0 * (drafts + 1)
            }
        }
    }

    /// Returns the rows that pass in a step.
    fn passed_rows(&self, work: &Work) -> PassedRows {
        let rows = self.step_rows(work);
        let tagged = matches!(work, Work::Decode { drafts: 0, .. }) && self.parts.decode[&rows].tagged;
        PassedRows { rows, tagged }
    }

    /// Queues a step of a stage, or changes only, behind all earlier work. `work` has one step and no gate of its own.
    /// Returns the wait that a test breaks in the step, if it breaks one.
    pub(super) fn submit_step(
        &mut self,
        changes: &[Change],
        work: Option<Work>,
        step: StageStep,
    ) -> Result<Option<usize>, ExecuteError> {
        let StageStep { buffer, apply, applied_at, message, draws, barriers, breaks, fault, exchanges, then } = step;
        let ticket = Ticket(self.next);
        self.next += 1;
        let exchange = self.exchange();
        let (mut before, mut gate) = (Vec::new(), None);
        if let Some(own) = exchange.apply.as_ref().filter(|_| !apply.is_empty()) {
            let regions = apply.iter().map(|buffer| Arc::clone(&own.regions[*buffer])).collect();
            let own = Some((Arc::clone(&own.gate), applied_at));
            if changes.is_empty() && work.is_some() {
                (before, gate) = (regions, own);
            } else {
                // The plan's own changes of slots come after those by earlier steps.
                let gates = own.map(|gate| (1, gate)).into_iter().collect();
                let busy_wait = exchange.busy_wait.as_ref().filter(|_| work.is_some());
                let ahead = busy_wait.map(|busy_wait| busy_wait.region(GateOf::Returns, applied_at));
                self.hand_over(Pending::changes(ticket, Vec::new()), (ahead, vec![regions]), Vec::new(), (gates, None));
            }
        }
        let mut posts = self.changes(changes);
        if let Some(word) = fault {
            posts.patch.set(self.parts.layout.fault_word(), word);
        }
        if let Some(exchanges) = exchanges {
            // The words of an exchange have the low bits of its number.
            let firsts = [exchanges.first, exchanges.first_turn(), exchanges.first_of_head()].map(|first| first as u32);
            posts.patch.set_all(self.parts.layout.exchange_word(), &firsts);
        }
        self.first_sum = exchanges.map(|exchanges| exchanges.first);
        let Some(work) = work else {
            self.enqueue(ticket, None, posts, None)?;
            return Ok(None);
        };
        let rows = self.passed_rows(&work);
        let exchange = self.exchange();
        if let Some(receive) = &exchange.receive {
            before.push(Arc::clone(&receive.regions[&rows][buffer]));
            // The patches of slots have come before the message: the first stage has waited for them.
            gate = Some((Arc::clone(&receive.gate), message));
        }
        let busy_wait = exchange.busy_wait.as_ref().zip(gate.as_ref());
        let of = if exchange.receive.is_some() { GateOf::Messages } else { GateOf::Returns };
        let ahead = busy_wait.map(|(busy_wait, (_, number))| busy_wait.region(of, *number));
        let sent = exchange.send.as_ref().map(|send| &send.regions[&rows]);
        let published = exchange.publish.as_ref().filter(|_| draws).map(|publish| &publish.regions);
        let after = sent.or(published).map(|regions| Arc::clone(&regions[buffer])).into_iter().collect();
        (self.repeats, self.breaks) = (barriers, breaks);
        let queued =
            self.enqueue(ticket, Some(work), posts, Some(Around { ahead, before, after, link: Link { gate, then } }));
        (self.repeats, self.breaks) = (false, true);
        queued?;
        let broken = self.pending.back().and_then(|pending| pending.steps.broken.first());
        Ok(broken.map(|(_, wait)| *wait))
    }

    /// Opens all gates, so that queued work runs without waiting for messages; its results are not used any more.
    pub(super) fn open_all(&self, last: u64) -> Result<(), DeviceError> {
        let exchange = self.exchange();
        if let Some(busy_wait) = &exchange.busy_wait {
            for gate in [GateOf::Messages, GateOf::Returns] {
                BusyWait::tell(&busy_wait.numbers, gate, last);
            }
        }
        let gates = [exchange.receive.as_ref().map(|of| &of.gate), exchange.apply.as_ref().map(|of| &of.gate)];
        gates.into_iter().flatten().try_for_each(|gate| gate.open(last))
    }
}
