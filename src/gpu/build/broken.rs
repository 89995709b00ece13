//! The steps of decoding in which tests have one call wait for words that are never written, as a tuning asks for them.
//! Not here: which steps of a run these are (`gpu::executor`), and the count of what they broke (`engine::injection`).

use crate::engine::injection::Wait;
use crate::gpu::build::recordings::Recordings;
use crate::kernels::recording::{Op, Recording};
use crate::kernels::tags;
use crate::model::decoder::Tuning;
use std::collections::BTreeMap;

/// The broken steps; empty unless the tuning asks for them.
#[derive(Default)]
pub(super) struct BrokenSteps {
    /// The broken steps that replace the step without barriers, also in its test at start, by drafts per sequence and number of
    /// sequences.
    pub(super) always: BTreeMap<(u32, u32), Recording>,
    /// The broken steps that run only sometimes.
    pub(super) sometimes: Vec<(Wait, Recording)>,
}

/// Returns the broken steps. Fails with a description if a call cannot be broken, or none has the number that the
/// tuning names.
pub(super) fn broken_steps(recordings: &Recordings, tuning: &Tuning) -> Result<BrokenSteps, String> {
    let mut steps = BrokenSteps::default();
    if tuning.broken_call == 0 && tuning.broken_calls == 0 {
        return Ok(steps);
    }
    let decode = recordings.decode.iter().map(|(rows, step, plain)| (0, *rows, step, plain));
    let verify = recordings.verify.iter().map(|(drafts, sequences, step, plain)| (*drafts, *sequences, step, plain));
    let carried = decode.chain(verify).filter(|(.., plain)| plain.is_some());
    for (drafts, sequences, recording, _) in carried.clone() {
        let mut polls = tags::polls(recording);
        if tuning.broken_calls == 0 {
            // With some numbers of rows the first calls of a step wait for nothing.
            let own = polls.iter().find(|poll| poll.number == tuning.broken_call && poll.tag != "old_tag").copied();
            polls = own.into_iter().collect();
        }
        for poll in polls {
            let broken = tags::break_poll(recording, poll)?;
            if tuning.broken_calls == 0 && tuning.broken_step == 0 && tuning.broken_every == 0 {
                steps.always.insert((drafts, sequences), broken);
                continue;
            }
            let Op::Call(call) = &recording.ops[poll.number as usize - 1] else { unreachable!("only calls poll") };
            let rows = sequences * (drafts + 1);
            let wait = Wait { rows, drafts, number: poll.number, call: call.label.clone(), tag: poll.tag };
            steps.sometimes.push((wait, broken));
        }
    }
    if steps.always.is_empty() && steps.sometimes.is_empty() && carried.count() > 0 {
        return Err(match tuning.broken_calls {
            0 => format!("call {} of no decode step waits for tagged words", tuning.broken_call),
            _ => "no call of a decode step waits for tagged words".to_owned(),
        });
    }
    Ok(steps)
}
