//! The words of device memory that control a decode step: what a slot runs and its sampling parameters, and the result
//! of a sampled row. The same names and numbers as `shaders/include/state.glsl`. Not here: page tables (`attention`),
//! and when the words are written.

/// The number of words of a slot in `state`.
pub const SLOT_WORDS: u32 = 64;
/// An `ACTIVE_*` value: 0 idle, 1 running, 2 done.
pub const SLOT_ACTIVE: u32 = 0;
/// The next input token.
pub const SLOT_TOKEN: u32 = 1;
/// The position of that token.
pub const SLOT_POSITION: u32 = 2;
/// The number of output tokens left until the slot is done.
pub const SLOT_REMAINING: u32 = 3;
/// The number of output tokens so far, the counter of the random generator.
pub const SLOT_GENERATED: u32 = 4;
/// The number of output tokens left until stop ids count; until then they are not drawn either.
pub const SLOT_MIN_LEFT: u32 = 5;
/// The `FLAG_*` bits.
pub const SLOT_FLAGS: u32 = 6;
/// The number of logprob alternatives, at most `TOP_ENTRIES`.
pub const SLOT_TOP_N: u32 = 7;
/// f32: the temperature; 0 selects greedy decoding.
pub const SLOT_TEMPERATURE: u32 = 8;
/// The top-k limit; 0 keeps all tokens.
pub const SLOT_TOP_K: u32 = 9;
/// f32: the top-p limit; 1 keeps all tokens.
pub const SLOT_TOP_P: u32 = 10;
/// f32: the min-p limit; 0 keeps all tokens.
pub const SLOT_MIN_P: u32 = 11;
/// f32: the repetition penalty; 1 has no effect.
pub const SLOT_REPETITION: u32 = 12;
/// f32: the presence penalty.
pub const SLOT_PRESENCE: u32 = 13;
/// f32: the frequency penalty.
pub const SLOT_FREQUENCY: u32 = 14;
/// The low half of the seed.
pub const SLOT_SEED_LOW: u32 = 15;
/// The high half of the seed.
pub const SLOT_SEED_HIGH: u32 = 16;
/// The number of stop ids in use.
pub const SLOT_STOP_COUNT: u32 = 17;
/// The stop ids, `STOP_ENTRIES` words.
pub const SLOT_STOP_IDS: u32 = 18;
/// The number of entries in use in the slot's row of `bias`.
pub const SLOT_BIAS_COUNT: u32 = 34;
/// f32: 1 / temperature.
pub const SLOT_TEMPERATURE_INVERSE: u32 = 35;
/// f32: 1 / repetition.
pub const SLOT_REPETITION_INVERSE: u32 = 36;
/// f32: ln min_p, -inf for 0.
pub const SLOT_MIN_P_LOG: u32 = 37;
/// Tokens from this position on count as output for the penalties (in a recomputed sequence).
pub const SLOT_PROMPT_TOKENS: u32 = 38;
/// The number of tokens that the recurrent state in memory includes; more are known if drafts were accepted.
pub const SLOT_SETTLED: u32 = 39;
/// [`MOST_DRAFTS`] draft tokens that are proposed to follow `SLOT_TOKEN`.
pub const SLOT_DRAFTS: u32 = 40;

/// The maximum number of draft tokens per step.
pub const MOST_DRAFTS: u32 = 3;

/// No sequence runs in the slot.
pub const ACTIVE_IDLE: u32 = 0;
/// The slot draws tokens.
pub const ACTIVE_RUNNING: u32 = 1;
/// The slot has drawn its last token; further steps do not change it.
pub const ACTIVE_DONE: u32 = 2;

/// The slot has a repetition, presence or frequency penalty: `counts` is updated and read.
pub const FLAG_PENALTIES: u32 = 1;
/// The slot's row of `bias` is read.
pub const FLAG_BIAS: u32 = 2;
/// Log probabilities are computed.
pub const FLAG_LOGPROBS: u32 = 4;
/// The host copies the logits; no kernel reads this flag.
pub const FLAG_DUMP_LOGITS: u32 = 8;
/// Only tokens that the slot's row in `masks` allows are drawn.
pub const FLAG_MASK: u32 = 16;

/// The maximum number of stop ids of a slot.
pub const STOP_ENTRIES: u32 = 16;
/// The maximum number of logit-bias entries of a slot.
pub const BIAS_ENTRIES: u32 = 300;
/// The maximum number of logprob alternatives.
pub const TOP_ENTRIES: u32 = 20;
/// The bit of a count that means that the token is in the prompt. The other bits are the number of times in the output.
pub const COUNT_PROMPT: u32 = 0x8000_0000;

/// The number of words of a ring entry; few, so that the entries of a step are close together.
pub const ENTRY_WORDS: u32 = 8;
/// The step's number, written last.
pub const ENTRY_STEP: u32 = 0;
/// The slot of the row.
pub const ENTRY_SLOT: u32 = 1;
/// The token, or `TOKEN_NONE`.
pub const ENTRY_TOKEN: u32 = 2;
/// A `DONE_*` value.
pub const ENTRY_DONE: u32 = 3;
/// f32: the token's log probability.
pub const ENTRY_LOGPROB: u32 = 4;
/// The number of alternatives; with `DONE_FAULT`, the fault word.
pub const ENTRY_TOP_COUNT: u32 = 5;
/// The number of words of an entry's alternatives, which follow all entries: pairs of token and f32 log probability,
/// best first.
pub const TOP_WORDS: u32 = 40;

/// In place of a token: the row was inactive.
pub const TOKEN_NONE: u32 = 0xffff_ffff;
/// The slot continues.
pub const DONE_NO: u32 = 0;
/// The token is a stop id.
pub const DONE_STOP: u32 = 1;
/// No output tokens are left.
pub const DONE_LENGTH: u32 = 2;
/// Nothing was drawn: a kernel of this step or of an earlier one polled too long.
pub const DONE_FAULT: u32 = 3;

/// The number of words of the scoring state of a prompt chunk.
pub const SCORE_STATE_WORDS: u32 = 4;
/// The number of LM head batches of the chunk's rows that are scored.
pub const SCORE_TURN: u32 = 0;
/// The token that follows the chunk's last row, or `TOKEN_NONE`.
pub const SCORE_NEXT: u32 = 1;
/// The number of logprob alternatives, at most `TOP_ENTRIES`.
pub const SCORE_TOP_N: u32 = 2;
/// The index of the entry of the chunk's first row in `scores`.
pub const SCORE_FIRST: u32 = 3;

/// The number of words of a row's entry in `scores`.
pub const SCORE_WORDS: u32 = 44;
/// The token that follows the row.
pub const SCORE_TOKEN: u32 = 0;
/// f32: the token's log probability.
pub const SCORE_LOGPROB: u32 = 1;
/// The number of alternatives in the entry.
pub const SCORE_TOP_COUNT: u32 = 2;
/// f32: of a device's part of an entry, the logarithm of the sum of e^logit over its tokens (`score_part`).
pub const SCORE_LOG_SUM: u32 = 3;
/// The first alternative: pairs of token and f32 log probability, best first.
pub const SCORE_TOP: u32 = 4;

/// Temperatures below this are treated as greedy: the inverse of a much smaller one would overflow f32.
pub const LEAST_TEMPERATURE: f32 = 1e-5;

/// The initial state of a slot.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotInit {
    /// The number of output tokens until the slot is done; at least 1.
    pub remaining: u32,
    /// The number of output tokens drawn before (in a recomputed sequence); the random generator's counter continues
    /// from here.
    pub generated: u32,
    /// The number of output tokens until stop ids count.
    pub min_left: u32,
    /// The temperature; below [`LEAST_TEMPERATURE`] is greedy.
    pub temperature: f32,
    /// The top-k limit; 0 keeps all tokens.
    pub top_k: u32,
    /// The top-p limit; 1 keeps all tokens.
    pub top_p: f32,
    /// The min-p limit; 0 keeps all tokens.
    pub min_p: f32,
    /// The repetition penalty, above 0; 1 has no effect.
    pub repetition: f32,
    /// The presence penalty; 0 has no effect.
    pub presence: f32,
    /// The frequency penalty; 0 has no effect.
    pub frequency: f32,
    /// The seed of the random generator.
    pub seed: u64,
    /// The stop ids, at most [`STOP_ENTRIES`]; more are ignored (requests are validated before).
    pub stop_ids: Vec<u32>,
    /// The number of entries in the slot's row of `bias`, at most [`BIAS_ENTRIES`].
    pub bias_count: u32,
    /// `Some(n)`: the log probabilities of the token and of the `n` best tokens are computed.
    pub logprobs: Option<u32>,
    /// Whether the host copies the logits of every step.
    pub dump_logits: bool,
    /// Whether only tokens that the slot's mask allows are drawn.
    pub masked: bool,
    /// The number of tokens of the original prompt; `u32::MAX` if all tokens that prefill processes are prompt tokens.
    pub prompt_tokens: u32,
}

impl Default for SlotInit {
    fn default() -> SlotInit {
        SlotInit {
            remaining: 1,
            generated: 0,
            min_left: 0,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition: 1.0,
            presence: 0.0,
            frequency: 0.0,
            seed: 0,
            stop_ids: Vec::new(),
            bias_count: 0,
            logprobs: None,
            dump_logits: false,
            masked: false,
            prompt_tokens: u32::MAX,
        }
    }
}

impl SlotInit {
    /// Whether the slot's `counts` are used: they must be cleared before it starts.
    pub fn has_penalties(&self) -> bool {
        self.repetition != 1.0 || self.presence != 0.0 || self.frequency != 0.0
    }

    /// Returns the slot's words, in the running state, with token and position 0.
    pub fn words(&self) -> [u32; SLOT_WORDS as usize] {
        let mut words = [0; SLOT_WORDS as usize];
        let greedy = self.temperature < LEAST_TEMPERATURE;
        let temperature = if greedy { 0.0 } else { self.temperature };
        let mut flags = 0;
        if self.has_penalties() {
            flags |= FLAG_PENALTIES;
        }
        if self.bias_count > 0 {
            flags |= FLAG_BIAS;
        }
        if self.logprobs.is_some() {
            flags |= FLAG_LOGPROBS;
        }
        if self.dump_logits {
            flags |= FLAG_DUMP_LOGITS;
        }
        if self.masked {
            flags |= FLAG_MASK;
        }
        let stops = &self.stop_ids[..self.stop_ids.len().min(STOP_ENTRIES as usize)];
        let mut set = |at: u32, word: u32| words[at as usize] = word;
        set(SLOT_ACTIVE, ACTIVE_RUNNING);
        set(SLOT_REMAINING, self.remaining);
        set(SLOT_GENERATED, self.generated);
        set(SLOT_MIN_LEFT, self.min_left);
        set(SLOT_FLAGS, flags);
        set(SLOT_TOP_N, self.logprobs.unwrap_or(0).min(TOP_ENTRIES));
        set(SLOT_TEMPERATURE, temperature.to_bits());
        set(SLOT_TOP_K, self.top_k);
        set(SLOT_TOP_P, self.top_p.to_bits());
        set(SLOT_MIN_P, self.min_p.to_bits());
        set(SLOT_REPETITION, self.repetition.to_bits());
        set(SLOT_PRESENCE, self.presence.to_bits());
        set(SLOT_FREQUENCY, self.frequency.to_bits());
        set(SLOT_SEED_LOW, self.seed as u32);
        set(SLOT_SEED_HIGH, (self.seed >> 32) as u32);
        set(SLOT_STOP_COUNT, stops.len() as u32);
        for (at, stop) in (SLOT_STOP_IDS..).zip(stops) {
            set(at, *stop);
        }
        set(SLOT_BIAS_COUNT, self.bias_count.min(BIAS_ENTRIES));
        set(SLOT_TEMPERATURE_INVERSE, if greedy { 0.0 } else { 1.0 / temperature }.to_bits());
        set(SLOT_REPETITION_INVERSE, (1.0 / self.repetition).to_bits());
        set(SLOT_MIN_P_LOG, (f64::from(self.min_p).ln() as f32).to_bits());
        set(SLOT_PROMPT_TOKENS, self.prompt_tokens);
        words
    }
}

/// Returns the words of a slot's row in `bias`, for at most [`BIAS_ENTRIES`] distinct tokens; the values of several
/// entries with the same token are added. The number of pairs is [`SlotInit::bias_count`].
pub fn bias_words(entries: &[(u32, f32)]) -> Vec<u32> {
    let mut sums: Vec<(u32, f32)> = Vec::with_capacity(entries.len());
    for &(token, value) in entries {
        match sums.iter_mut().find(|(t, _)| *t == token) {
            Some((_, sum)) => *sum += value,
            None => sums.push((token, value)),
        }
    }
    sums.truncate(BIAS_ENTRIES as usize);
    sums.iter().flat_map(|(token, value)| [*token, value.to_bits()]).collect()
}

/// The result of a row of a step, read from the ring buffer.
#[derive(Clone, Debug, PartialEq)]
pub struct RingEntry {
    /// The step's number.
    pub step: u32,
    /// The slot of the row.
    pub slot: u32,
    /// The token; `None` if the row was inactive.
    pub token: Option<u32>,
    /// A `DONE_*` value.
    pub done: u32,
    /// With `DONE_FAULT` the fault word, which is the number of the call that polled too long; else 0.
    pub fault: u32,
    /// The token's log probability; 0 if the slot has no `FLAG_LOGPROBS`.
    pub logprob: f32,
    /// The most probable tokens, best first.
    pub top: Vec<(u32, f32)>,
}

impl RingEntry {
    fn place(step: u32, row: u32, ring_steps: u32, ring_rows: u32) -> usize {
        (step % ring_steps) as usize * ring_rows as usize + row as usize
    }

    /// The word index of the entry of a step's row.
    pub fn at(step: u32, row: u32, ring_steps: u32, ring_rows: u32) -> usize {
        RingEntry::place(step, row, ring_steps, ring_rows) * ENTRY_WORDS as usize
    }

    /// The word index of the alternatives of a step's row.
    pub fn top_at(step: u32, row: u32, ring_steps: u32, ring_rows: u32) -> usize {
        let entries = ring_steps as usize * ring_rows as usize * ENTRY_WORDS as usize;
        entries + RingEntry::place(step, row, ring_steps, ring_rows) * TOP_WORDS as usize
    }

    /// Decodes an entry of `ENTRY_WORDS` words. `top` is called for the `TOP_WORDS` words of its alternatives if it has
    /// any.
    pub fn read(words: &[u32], top: impl FnOnce() -> [u32; TOP_WORDS as usize]) -> RingEntry {
        let words: &[u32; ENTRY_WORDS as usize] = words.try_into().expect("the words of an entry");
        let word = |at: u32| words[at as usize];
        let token = word(ENTRY_TOKEN);
        let running = token != TOKEN_NONE;
        let count = if running { word(ENTRY_TOP_COUNT).min(TOP_ENTRIES) } else { 0 };
        let pair = |pair: &[u32]| (pair[0], f32::from_bits(pair[1]));
        RingEntry {
            step: word(ENTRY_STEP),
            slot: word(ENTRY_SLOT),
            token: running.then_some(token),
            done: word(ENTRY_DONE),
            fault: if word(ENTRY_DONE) == DONE_FAULT { word(ENTRY_TOP_COUNT) } else { 0 },
            logprob: if running { f32::from_bits(word(ENTRY_LOGPROB)) } else { 0.0 },
            top: match count {
                0 => Vec::new(),
                count => top().chunks_exact(2).take(count as usize).map(pair).collect(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Returns every constant of a file by name, from lines of the form `const uint NAME = VALUE` or `const NAME:
    /// u32 = VALUE`.
    fn constants(text: &str) -> BTreeMap<String, u64> {
        let mut found = BTreeMap::new();
        for line in text.lines() {
            let line = line.trim().trim_start_matches("pub ");
            let Some(rest) = line.strip_prefix("const ") else {
                continue;
            };
            let Some((left, right)) = rest.split_once('=') else {
                continue;
            };
            let name = left.trim().trim_start_matches("uint ").split(':').next().expect("a name").trim().to_owned();
            let value: String = right.split(';').next().expect("a value").trim().trim_end_matches('u').replace('_', "");
            let value = match value.strip_prefix("0x") {
                Some(hex) => u64::from_str_radix(hex, 16),
                None => value.parse(),
            };
            if let Ok(value) = value {
                found.insert(name, value);
            }
        }
        found
    }

    #[test]
    fn shader_and_host_name_the_same_words() {
        let shader = constants(include_str!("../../shaders/include/state.glsl"));
        let text = include_str!("state.rs");
        let host = constants(text.split("mod tests").next().expect("the file has a head"));
        assert!(shader.len() > 40, "only {} constants were read", shader.len());
        assert_eq!(shader, host);
    }

    #[test]
    fn a_slot_is_laid_out_by_its_names() {
        let words = SlotInit {
            seed: 0x1234_5678_9abc_def0,
            temperature: 0.5,
            stop_ids: (100..130).collect(),
            logprobs: Some(99),
            presence: 0.25,
            min_p: 1.0,
            ..SlotInit::default()
        }
        .words();
        assert_eq!(words[SLOT_SEED_LOW as usize], 0x9abc_def0);
        assert_eq!(words[SLOT_SEED_HIGH as usize], 0x1234_5678);
        assert_eq!(words[SLOT_FLAGS as usize], FLAG_PENALTIES | FLAG_LOGPROBS);
        assert_eq!(words[SLOT_TOP_N as usize], TOP_ENTRIES);
        assert_eq!(words[SLOT_STOP_COUNT as usize], STOP_ENTRIES);
        assert_eq!(words[SLOT_STOP_IDS as usize + 15], 115);
        assert_eq!(words[SLOT_BIAS_COUNT as usize], 0);
        assert_eq!(f32::from_bits(words[SLOT_TEMPERATURE_INVERSE as usize]), 2.0);
        assert_eq!(f32::from_bits(words[SLOT_MIN_P_LOG as usize]), 0.0);
        let tiny = SlotInit { temperature: 1e-40, min_p: 0.0, ..SlotInit::default() }.words();
        assert_eq!(tiny[SLOT_TEMPERATURE as usize], 0);
        assert_eq!(f32::from_bits(tiny[SLOT_MIN_P_LOG as usize]), f32::NEG_INFINITY);
    }

    #[test]
    fn biases_of_one_token_add_up() {
        assert_eq!(bias_words(&[(7, 1.0), (9, -2.0), (7, 0.5)]), vec![7, 1.5f32.to_bits(), 9, (-2.0f32).to_bits()]);
    }
}
