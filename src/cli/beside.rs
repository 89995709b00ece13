//! `ostinato bench --beside`: measures how long decoding streams wait for a token while a prompt is processed. Runs in
//! this process, without a server.

use super::bench::{request, tokens};
use crate::engine::request::{Event, FinishReason, SinkClosed};
use crate::replica::Replica;
use anyhow::bail;
use crossbeam_channel::{Receiver, unbounded};
use std::time::Instant;

/// Prompt length of each stream, tokens.
pub(super) const OWN_PROMPT: u32 = 128;
/// The number of gaps that are measured for every stream before the prompt is submitted.
const BEFORE: usize = 48;
/// Context that a stream needs in addition to the tokens that it may produce while the prompt is processed.
pub(super) const ROOM: u32 = OWN_PROMPT + 2 * BEFORE as u32 + 16;

/// Result of one run.
pub(super) struct Beside {
    /// Mean time between tokens of a stream before the prompt, seconds.
    pub(super) step: f64,
    /// The longest time between two tokens of a stream until the prompt's first token, seconds.
    pub(super) longest: f64,
    /// Time from the submission of the prompt to its first token, seconds.
    pub(super) first_token: f64,
}

fn ask(replica: &Replica, id: String, prompt: Vec<u32>, output: u32) -> anyhow::Result<Receiver<(Instant, Event)>> {
    let (sender, events) = unbounded();
    let sink = Box::new(move |event| sender.send((Instant::now(), event)).map_err(|_| SinkClosed));
    replica.submit(request(id, prompt, output), sink)?;
    Ok(events)
}

/// Waits for the next token and returns its arrival time.
fn token(events: &Receiver<(Instant, Event)>) -> anyhow::Result<Instant> {
    loop {
        match events.recv()? {
            (at, Event::Token(_)) => return Ok(at),
            (_, Event::Started(_) | Event::Prompt(_) | Event::Embedding(_)) => {}
            (_, Event::Finished(finished)) => match finished.reason {
                FinishReason::Error(why) => bail!("the run failed: {why}"),
                reason => bail!("a stream ended ({reason:?}) before the prompt was taken in"),
            },
        }
    }
}

/// Runs `streams` decoding streams and then submits a prompt of `prompt` tokens. Each stream may produce at most `room`
/// tokens. `run` selects the random prompts and the request ids.
pub(super) fn beside(
    replica: &Replica,
    vocabulary: u32,
    streams: u32,
    prompt: u32,
    room: u32,
    run: u32,
) -> anyhow::Result<Beside> {
    let ids: Vec<String> = (0..streams).map(|stream| format!("beside-{streams}-{run}-{stream}")).collect();
    let events: Vec<_> = ids
        .iter()
        .zip(0..)
        .map(|(id, stream)| ask(replica, id.clone(), tokens(OWN_PROMPT, vocabulary, run * 1000 + stream), room))
        .collect::<anyhow::Result<_>>()?;
    let mut last = Vec::new();
    for events in &events {
        last.push(token(events)?);
    }
    // From this moment on, all streams decode.
    let from = *last.iter().max().expect("there are streams");
    let mut gaps = Vec::new();
    for (events, last) in events.iter().zip(&mut last) {
        let mut counted = 0;
        while counted < BEFORE {
            let at = token(events)?;
            if *last >= from {
                gaps.push((at - *last).as_secs_f64());
                counted += 1;
            }
            *last = at;
        }
    }
    // The tokens of one report arrive together, so the time per token is the mean over all gaps.
    let step = gaps.iter().sum::<f64>() / gaps.len().max(1) as f64;
    let begin = Instant::now();
    let first = token(&ask(replica, format!("prompt-{streams}-{run}"), tokens(prompt, vocabulary, run), 1)?)?;
    for id in &ids {
        replica.abort(id);
    }
    let mut longest = 0f64;
    for (events, last) in events.iter().zip(&mut last) {
        while let Ok((at, event)) = events.recv() {
            match event {
                Event::Token(_) => {
                    if *last <= first && at >= begin {
                        longest = longest.max((at - *last).as_secs_f64());
                    }
                    *last = at;
                }
                Event::Finished(_) => break,
                Event::Started(_) | Event::Prompt(_) | Event::Embedding(_) => {}
            }
        }
    }
    Ok(Beside { step, longest, first_token: (first - begin).as_secs_f64() })
}
