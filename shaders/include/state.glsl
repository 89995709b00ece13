// Device state of the slots and the ring, in 32-bit words. Mirrored by `kernels::state`, and a
// test there compares every name and number with this file.
//
//   state  [slots][SLOT_WORDS]       what a slot runs and how it samples; patched by the host, advanced by `sample`
//   bias   [slots][BIAS_ENTRIES][2]  token id, f32 bits; distinct ids
//   masks  [slots][mask words]       bit i % 32 of word i / 32: token i may be drawn; host-visible, with FLAG_MASK only
//   counts [slots][vocabulary]       bit 31: in the prompt; the rest: times in the output
//   rows   [rows][4]                 token, position, slot, valid
//   step   [1]                       number of the region in flight
//   fault  [1]                       the number of a call that waited too long for tagged words; 0: none did
//   score  [SCORE_STATE_WORDS]       which rows of a prompt's chunk are scored next, and how; patched by the host
//   scores [2][chunk rows][SCORE_WORDS]  host-visible: the halves in turn, one chunk each
//   ring   [ring_steps][ring_rows][ENTRY_WORDS], then [ring_steps][ring_rows][TOP_WORDS]  host-visible

const uint SLOT_WORDS = 64u;
const uint SLOT_ACTIVE = 0u;          // 0 idle, 1 running, 2 done
const uint SLOT_TOKEN = 1u;           // the next input
const uint SLOT_POSITION = 2u;        // of that token
const uint SLOT_REMAINING = 3u;       // output tokens until done
const uint SLOT_GENERATED = 4u;       // output tokens so far: the draw's counter
const uint SLOT_MIN_LEFT = 5u;        // output tokens until stop ids count
const uint SLOT_FLAGS = 6u;
const uint SLOT_TOP_N = 7u;           // alternatives of a log probability, at most TOP_ENTRIES
const uint SLOT_TEMPERATURE = 8u;     // f32; 0 is greedy
const uint SLOT_TOP_K = 9u;           // 0 keeps all
const uint SLOT_TOP_P = 10u;          // f32; 1 keeps all
const uint SLOT_MIN_P = 11u;          // f32; 0 keeps all
const uint SLOT_REPETITION = 12u;     // f32; 1 changes nothing
const uint SLOT_PRESENCE = 13u;       // f32
const uint SLOT_FREQUENCY = 14u;      // f32
const uint SLOT_SEED_LOW = 15u;
const uint SLOT_SEED_HIGH = 16u;
const uint SLOT_STOP_COUNT = 17u;
const uint SLOT_STOP_IDS = 18u;       // 16 words
const uint SLOT_BIAS_COUNT = 34u;
// Divisions and logarithms are the host's: only + and * round alike on every device.
const uint SLOT_TEMPERATURE_INVERSE = 35u; // f32: 1 / temperature
const uint SLOT_REPETITION_INVERSE = 36u;  // f32: 1 / repetition
const uint SLOT_MIN_P_LOG = 37u;           // f32: ln min_p, -inf for 0
const uint SLOT_PROMPT_TOKENS = 38u;       // tokens from this position on are output (penalties, after a recompute)

const uint SLOT_SETTLED = 39u;             // tokens that recurrent state in memory has taken in
const uint SLOT_DRAFTS = 40u;              // 3 tokens drafted to follow SLOT_TOKEN

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
const uint ENTRY_STEP = 0u;           // written last
const uint ENTRY_SLOT = 1u;
const uint ENTRY_TOKEN = 2u;          // TOKEN_NONE: the row was inactive
const uint ENTRY_DONE = 3u;
const uint ENTRY_LOGPROB = 4u;        // f32
const uint ENTRY_TOP_COUNT = 5u;      // with DONE_FAULT the fault word
const uint TOP_WORDS = 40u;           // pairs of id and f32 log probability, best first

const uint TOKEN_NONE = 0xffffffffu;
const uint DONE_NO = 0u;
const uint DONE_STOP = 1u;
const uint DONE_LENGTH = 2u;
const uint DONE_FAULT = 3u;

const uint SCORE_STATE_WORDS = 4u;
const uint SCORE_TURN = 0u;           // rows of the chunk go to the LM head so many at a time; counted up by `advance`
const uint SCORE_NEXT = 1u;           // the token behind the chunk's last row, or TOKEN_NONE
const uint SCORE_TOP_N = 2u;          // alternatives, at most TOP_ENTRIES
const uint SCORE_FIRST = 3u;          // the entry of the chunk's first row

const uint SCORE_WORDS = 44u;
const uint SCORE_TOKEN = 0u;          // the token behind the row
const uint SCORE_LOGPROB = 1u;        // f32
const uint SCORE_TOP_COUNT = 2u;
const uint SCORE_TOP = 4u;            // pairs of id and f32 log probability, best first
