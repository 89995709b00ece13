// The layout, in 32-bit words, of the device state of the slots and of the result ring buffer. `kernels::state` mirrors
// it, and a test there compares every name and number with this file.
//
//  state  [slots][SLOT_WORDS]       what a slot runs and its sampling parameters; patched by the host, advanced by
//                                   `sample`
//  bias   [slots][BIAS_ENTRIES][2]  logit biases: token id, f32 bits; the ids of a slot are distinct
//  masks  [slots][mask words]       bit i % 32 of word i / 32: token i may be drawn; host-visible; read with FLAG_MASK
//                                   only
//  counts [slots][vocabulary]       bit 31: the token is in the prompt; other bits: how often it is in the output
//  rows   [rows][4]                 the batch rows: token, position, slot, valid (0: no sequence)
//  step   [1]                       number of the region (command buffer) in flight
//  fault  [1]                       number of a call that polled too long for tagged words; 0 if none did
//  score  [SCORE_STATE_WORDS]       which rows of a prompt chunk are scored next, and how; patched by the host
//  scores [2][chunk rows][SCORE_WORDS]  host-visible; the two halves are used alternately, one chunk each
//  ring   [ring_steps][ring_rows][ENTRY_WORDS], then [ring_steps][ring_rows][TOP_WORDS]  host-visible

const uint SLOT_WORDS = 64u;
const uint SLOT_ACTIVE = 0u;          // 0 idle, 1 running, 2 done
const uint SLOT_TOKEN = 1u;           // the next input token
const uint SLOT_POSITION = 2u;        // the position of that token
const uint SLOT_REMAINING = 3u;       // output tokens left until the slot is done
const uint SLOT_GENERATED = 4u;       // output tokens so far, the counter of the random generator
const uint SLOT_MIN_LEFT = 5u;        // output tokens left until stop ids end the sequence (min_tokens)
const uint SLOT_FLAGS = 6u;
const uint SLOT_TOP_N = 7u;           // number of logprob alternatives, at most TOP_ENTRIES
const uint SLOT_TEMPERATURE = 8u;     // f32; 0 selects greedy decoding
const uint SLOT_TOP_K = 9u;           // 0 keeps all tokens
const uint SLOT_TOP_P = 10u;          // f32; 1 keeps all tokens
const uint SLOT_MIN_P = 11u;          // f32; 0 keeps all tokens
const uint SLOT_REPETITION = 12u;     // f32; 1 has no effect
const uint SLOT_PRESENCE = 13u;       // f32
const uint SLOT_FREQUENCY = 14u;      // f32
const uint SLOT_SEED_LOW = 15u;
const uint SLOT_SEED_HIGH = 16u;
const uint SLOT_STOP_COUNT = 17u;
const uint SLOT_STOP_IDS = 18u;       // STOP_ENTRIES words
const uint SLOT_BIAS_COUNT = 34u;
// The host computes divisions and logarithms, because only + and * round identically on every device.
const uint SLOT_TEMPERATURE_INVERSE = 35u; // f32: 1 / temperature
const uint SLOT_REPETITION_INVERSE = 36u;  // f32: 1 / repetition
const uint SLOT_MIN_P_LOG = 37u;           // f32: ln min_p, -inf for 0
const uint SLOT_PROMPT_TOKENS = 38u;       // tokens from here on are output for penalties (recomputed sequences)

const uint SLOT_SETTLED = 39u;             // number of tokens that the recurrent state in memory includes
const uint SLOT_DRAFTS = 40u;              // MOST_DRAFTS draft tokens that are proposed to follow SLOT_TOKEN

const uint MOST_DRAFTS = 3u;

const uint ACTIVE_IDLE = 0u;
const uint ACTIVE_RUNNING = 1u;
const uint ACTIVE_DONE = 2u;

const uint FLAG_PENALTIES = 1u;
const uint FLAG_BIAS = 2u;
const uint FLAG_LOGPROBS = 4u;
const uint FLAG_DUMP_LOGITS = 8u;
const uint FLAG_MASK = 16u;

const uint STOP_ENTRIES = 16u;
const uint BIAS_ENTRIES = 300u;
const uint TOP_ENTRIES = 20u;
const uint COUNT_PROMPT = 0x80000000u;

const uint ENTRY_WORDS = 8u;
const uint ENTRY_STEP = 0u;           // the step's number, written last
const uint ENTRY_SLOT = 1u;
const uint ENTRY_TOKEN = 2u;          // TOKEN_NONE if the row was inactive
const uint ENTRY_DONE = 3u;
const uint ENTRY_LOGPROB = 4u;        // f32
const uint ENTRY_TOP_COUNT = 5u;      // number of alternatives; with DONE_FAULT, the fault word
const uint TOP_WORDS = 40u;           // pairs of token id and f32 logprob, best first

const uint TOKEN_NONE = 0xffffffffu;
const uint DONE_NO = 0u;
const uint DONE_STOP = 1u;
const uint DONE_LENGTH = 2u;
const uint DONE_FAULT = 3u;

const uint SCORE_STATE_WORDS = 4u;
const uint SCORE_TURN = 0u;           // number of LM head batches of the chunk that are scored; `advance` increments it
const uint SCORE_NEXT = 1u;           // the token that follows the chunk's last row, or TOKEN_NONE
const uint SCORE_TOP_N = 2u;          // number of logprob alternatives, at most TOP_ENTRIES
const uint SCORE_FIRST = 3u;          // index of the entry of the chunk's first row in `scores`

const uint SCORE_WORDS = 44u;
const uint SCORE_TOKEN = 0u;          // the token that follows the row
const uint SCORE_LOGPROB = 1u;        // f32
const uint SCORE_TOP_COUNT = 2u;
const uint SCORE_LOG_SUM = 3u;        // f32: of a device's part of an entry, see `score_part`
const uint SCORE_TOP = 4u;            // pairs of token id and f32 logprob, best first
