#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "state.glsl"
#include "deterministic.glsl"
#include "reduce.glsl"

// Sampling: draws the next token of every row and advances the state of its slot.
//
//   l    = logit + bias; then the repetition penalty (prompt and output) and the frequency and presence penalties
//        (output). Stop ids are -inf until min_tokens is reached, and so are tokens that the slot's mask forbids. NaN
//        counts as -inf
//   logprobs: log softmax(l), of the token and the top n
//   temperature 0: argmax l, the lowest id on ties; otherwise
//   d    = (l - max l) / temperature
//   kept = the tokens with d >= ln min_p; of them the top_k best; of them the fewest best that hold top_p of the
//   remaining mass. Values equal to the last one kept are kept as well. This is vLLM's order; every filter is a
//   threshold on the key
//   token = argmax over the kept tokens of d + gumbel(seed, tokens generated, token id)
//
// Masses are integers in units of 2^-31 of the greatest, and the arithmetic is that of `deterministic.glsl`: the token
// depends neither on the device, nor on the workgroup's size, nor on the other rows.
//
//   logits    [rows][row_stride] f32, row_stride a multiple of 4
//   partials  [rows][partial_count] of (f32 bits, token): maxima over parts of the row, from `argmax`; not read with
//             partial_count 0. With OPTION_DRAWN, a further pair in each row: a token, and 1 if `draw_shortlisted` has
//             drawn it, from the devices' parts of the row
//   keys      [rows][row_stride] u32: scratch, the adjusted logits as ordered integers
//   masks     [slots][(vocabulary + 31) / 32] u32: read if a slot has FLAG_MASK
//   rows, state, counts, bias, step, ring, fault: `state.glsl`
//
// One workgroup processes one row. An invocation owns every THREADS-th group of four tokens in all passes, so that
// invocations exchange data through shared memory only. Traffic, with V the vocabulary's size and P = partial_count:
// greedy from partials 8·P bytes; greedy 4·V; sampled 8·V; penalties, bias and masks add 12·V, logprobs 4·V; from the
// L2 cache after the first pass. A mask is V / 8 bytes of host memory.
//
// top_k, top_p and the logprob alternatives work on a list in shared memory of the best few hundred tokens, gathered
// above a guessed key (the mean of the invocations' maxima). The rank of each element and the mass above it come from
// comparing it with all others. If the guess was bad, so that the list is too long or too short, the same result is
// computed by radix descents over the row (4·V bytes for each 8 bits of the key) and repeated scans.

// All that differs between the steps of a model is an argument instead of a constant, and each helper with a large body
// has one call: drivers inline helpers, some compile this kernel for seconds, and a start waits for it.

layout(local_size_x_id = 0) in;
const uint THREADS = gl_WorkGroupSize.x;

layout(buffer_reference, std430, buffer_reference_align = 16) buffer KeysInOut { uvec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer PartialsIn { uvec2 v[]; };

layout(push_constant) uniform Args {
    Floats4In logits;
    PartialsIn partials;
    Words4In rows;
    WordsInOut state;
    WordsInOut counts;
    WordsIn bias;
    KeysInOut keys;
    WordsInOut step_number;
    WordsOut ring;
    WordsIn fault;
    WordsIn masks;
    uint vocabulary;
    uint row_stride;
    uint partial_count;
    uint ring_steps;
    uint ring_rows;
    uint every;        // the number of rows of each sequence
    // This call draws from the row with this index of each sequence. The rows after the first hold draft tokens: a token
    // is drawn from one only if the row before it drew exactly the token that it holds, so that the output is the same as
    // without drafts.
    uint first;
    uint options;      // OPTION_ bits
} args;

// No token is drawn while the fault word is set: this step, or an earlier one in the queue, polled too long for tagged
// words.
const uint OPTION_HEEDS_FAULT = 1u;
// The only row also increments the step number.
const uint OPTION_COUNTS_STEP = 2u;
// Tokens may be drawn from parts of rows before: this device has no logits of other devices then.
const uint OPTION_DRAWN = 8u;
// The step left its tokens pending instead of adding them to the recurrent state (`delta_step`).
const uint OPTION_LAGS = 4u;

const uint BINS = 256u;
// Copies of the histogram, so that lanes that increment the same bin collide less often.
const uint COPIES = 8u;
const uint GROUPS = 16u;

shared uint histogram_low[BINS * COPIES];
shared uint histogram_high[BINS * COPIES];
// The list of a row's best tokens reuses the histograms' memory: the two are never used at the same time.
#define LIST_KEYS histogram_low
#define LIST_TOKENS histogram_high
shared uvec2 bin_sums[BINS];
shared uvec2 group_sums[GROUPS];
shared uvec2 above;
shared uvec2 target;
shared uint prefix;
shared bool exact;
shared uint chosen_key;

uint thread;
uint row;
uint quads;      // groups of four tokens; the last may be partly outside the vocabulary
uint first_quad; // the row's first group
bool adjusted;   // `adjust` has written the keys: they are read instead of the logits

// Returns the keys of a group of logits; 0, which is less than any key, outside the vocabulary.
uvec4 keys_of(vec4 l, uint quad) {
    uvec4 k = uvec4(key_of(l.x), key_of(l.y), key_of(l.z), key_of(l.w));
    if (quad + 1u < quads) return k;
    uint left = quad < quads ? args.vocabulary - 4u * quad : 0u;
    return uvec4(left > 0u ? k.x : 0u, left > 1u ? k.y : 0u, left > 2u ? k.z : 0u, left > 3u ? k.w : 0u);
}

// Returns the keys of a group of four tokens.
uvec4 load_keys(uint quad) {
    if (adjusted) return args.keys.v[first_quad + quad];
    return keys_of(args.logits.v[first_quad + quad], quad);
}

// Returns the keys of four groups that this invocation owns. The loads come first and are unconditional, so that all
// are in flight at the same time.
void load_block(uint base, out uvec4 block[4]) {
    uint last = quads - 1u;
    if (adjusted) {
        [[unroll]] for (uint j = 0u; j < 4u; j++) {
            // Reads nothing past the end: another invocation's keys there may not be written completely.
            uint quad = base + j * THREADS + thread;
            block[j] = quad <= last ? args.keys.v[first_quad + quad] : uvec4(0u);
        }
        return;
    }
    vec4 l[4];
    [[unroll]] for (uint j = 0u; j < 4u; j++) l[j] = args.logits.v[first_quad + min(base + j * THREADS + thread, last)];
    [[unroll]] for (uint j = 0u; j < 4u; j++) block[j] = keys_of(l[j], base + j * THREADS + thread);
}

#define DRAW_VOCABULARY args.vocabulary
#include "top.glsl"
#include "draw.glsl"

// Returns the greatest key K such that the tokens with keys >= K, of those with keys >= least, weigh at least as much
// as wanted. Method: radix descent, eight bits per pass. A token weighs 1 (`by_mass` false: `wanted` is a count) or its
// mass (`wanted` is the fraction, in units of 2^-32, of the total mass). If all of the tokens together weigh less than
// wanted, all are kept.
uint select_key(uint least, bool by_mass, uint wanted, float most, float temperature_inverse) {
    barrier(); // all invocations have read the previous search's result
    if (thread == 0u) {
        prefix = 0u;
        above = uvec2(0u);
        target = uvec2(wanted, 0u);
        exact = false;
    }
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (uint i = thread; i < BINS * COPIES; i += THREADS) {
            histogram_low[i] = 0u;
            histogram_high[i] = 0u;
        }
        barrier();
        uint known = prefix;
        uint copy = thread % COPIES;
        for (uint base = 0u; base < quads; base += THREADS) {
            uint quad = base + thread;
            if (quad < quads) {
                uvec4 keys = load_keys(quad);
                for (uint c = 0u; c < 4u; c++) {
                    uint key = keys[c];
                    bool in_prefix = shift == 24 || (key >> (shift + 8)) == known;
                    if (key >= least && in_prefix) {
                        uint weight = by_mass ? mass_of(distance(key, most, temperature_inverse)) : 1u;
                        uint at = ((key >> shift) & 255u) * COPIES + copy;
                        uint before = atomicAdd(histogram_low[at], weight);
                        if (before + weight < before) atomicAdd(histogram_high[at], 1u);
                    }
                }
            }
        }
        barrier();
        for (uint bin = thread; bin < BINS; bin += THREADS) {
            uvec2 sum = uvec2(0u);
            for (uint c = 0u; c < COPIES; c++) {
                sum = add64(sum, uvec2(histogram_low[bin * COPIES + c], histogram_high[bin * COPIES + c]));
            }
            bin_sums[bin] = sum;
        }
        barrier();
        for (uint group = thread; group < GROUPS; group += THREADS) {
            uvec2 sum = uvec2(0u);
            for (uint i = 0u; i < BINS / GROUPS; i++) sum = add64(sum, bin_sums[group * (BINS / GROUPS) + i]);
            group_sums[group] = sum;
        }
        barrier();
        if (thread == 0u) {
            if (shift == 24) {
                uvec2 total = uvec2(0u);
                for (uint group = 0u; group < GROUPS; group++) total = add64(total, group_sums[group]);
                if (by_mass) target = share(total, wanted);
                if (!at_least(total, target)) target = total;
            }
            // Descends from the best group, then within it; the target is always found.
            uvec2 sum = above;
            uint group = GROUPS - 1u;
            while (group > 0u) {
                uvec2 next = add64(sum, group_sums[group]);
                if (at_least(next, target)) break;
                sum = next;
                group--;
            }
            uint bin = group * (BINS / GROUPS) + BINS / GROUPS - 1u;
            uvec2 with = add64(sum, bin_sums[bin]);
            while (bin > 0u && !at_least(with, target)) {
                sum = with;
                bin--;
                with = add64(sum, bin_sums[bin]);
            }
            above = sum;
            prefix = (known << 8) | bin;
            exact = with == target;
        }
        barrier();
        // The whole bin is wanted: its first key is as good a threshold as the exact one.
        if (exact) return max(prefix << shift, least);
    }
    return max(prefix, least);
}

float penalised(float value, uint count, float repetition, float repetition_inverse, float presence, float frequency) {
    precise float l = value;
    if (count != 0u) l = l > 0.0 ? l * repetition_inverse : l * repetition;
    uint times = count & ~COUNT_PROMPT;
    if (times != 0u) {
        l = l - frequency * float(times);
        l = l - presence;
    }
    return l;
}

// Writes the row's adjusted keys.
void adjust(uint slot, uint at, uint flags, bool mask_stops) {
    float repetition = uintBitsToFloat(args.state.v[at + SLOT_REPETITION]);
    float repetition_inverse = uintBitsToFloat(args.state.v[at + SLOT_REPETITION_INVERSE]);
    float presence = uintBitsToFloat(args.state.v[at + SLOT_PRESENCE]);
    float frequency = uintBitsToFloat(args.state.v[at + SLOT_FREQUENCY]);
    bool penalties = (flags & FLAG_PENALTIES) != 0u;
    bool masked = (flags & FLAG_MASK) != 0u;
    uint mask = slot * ((args.vocabulary + 31u) / 32u);
    for (uint base = 0u; base < quads; base += THREADS) {
        uint quad = base + thread;
        if (quad < quads) {
            vec4 l = args.logits.v[first_quad + quad];
            uint allowed = masked ? args.masks.v[mask + quad / 8u] >> (quad % 8u * 4u) : 15u;
            uvec4 k = uvec4(0u);
            for (uint c = 0u; c < 4u; c++) {
                uint token = 4u * quad + c;
                if (token < args.vocabulary) {
                    float value = value_of(key_of(l[c]));
                    uint count = penalties ? args.counts.v[slot * args.vocabulary + token] : 0u;
                    k[c] = (allowed >> c & 1u) == 0u ? KEY_MINUS_INFINITY : key_of(penalised(value, count, repetition, repetition_inverse, presence, frequency));
                }
            }
            args.keys.v[first_quad + quad] = k;
        }
    }
    // The owner of a token's group also wrote its key above, so no barrier is needed.
    uint biases = (flags & FLAG_BIAS) != 0u ? min(args.state.v[at + SLOT_BIAS_COUNT], BIAS_ENTRIES) : 0u;
    for (uint i = 0u; i < biases; i++) {
        uint token = args.bias.v[(slot * BIAS_ENTRIES + i) * 2u];
        uint quad = token / 4u;
        bool allowed = !masked || (token < args.vocabulary && (args.masks.v[mask + token / 32u] >> (token % 32u) & 1u) != 0u);
        if (allowed && token < args.vocabulary && quad % THREADS == thread) {
            precise float value = value_of(key_of(args.logits.v[first_quad + quad][token % 4u]));
            value = value + uintBitsToFloat(args.bias.v[(slot * BIAS_ENTRIES + i) * 2u + 1u]);
            uint count = penalties ? args.counts.v[slot * args.vocabulary + token] : 0u;
            uvec4 k = args.keys.v[first_quad + quad];
            k[token % 4u] = key_of(penalised(value, count, repetition, repetition_inverse, presence, frequency));
            args.keys.v[first_quad + quad] = k;
        }
    }
    uint stops = mask_stops ? min(args.state.v[at + SLOT_STOP_COUNT], STOP_ENTRIES) : 0u;
    for (uint i = 0u; i < stops; i++) {
        uint token = args.state.v[at + SLOT_STOP_IDS + i];
        uint quad = token / 4u;
        if (token < args.vocabulary && quad % THREADS == thread) {
            uvec4 k = args.keys.v[first_quad + quad];
            k[token % 4u] = KEY_MINUS_INFINITY;
            args.keys.v[first_quad + quad] = k;
        }
    }
}

uvec2 row_mass(Draw draw) {
    uvec2 sum = uvec2(0u);
    for (uint base = 0u; base < quads; base += THREADS) {
        uint quad = base + thread;
        if (quad < quads) {
            uvec4 keys = load_keys(quad);
            for (uint c = 0u; c < 4u; c++) {
                if (keys[c] >= draw.least) {
                    sum = add64(sum, uvec2(mass_of(distance(keys[c], draw.most, draw.temperature_inverse)), 0u));
                }
            }
        }
    }
    return reduce_sum64(sum);
}

// Lets this invocation's part of all tokens with keys >= least compete. A token whose bound cannot beat the winner is
// skipped without computing a logarithm.
void draw_row(Draw draw, inout uvec2 winner) {
    for (uint base = 0u; base < quads; base += THREADS) {
        uint quad = base + thread;
        if (quad < quads) {
            uvec4 keys = load_keys(quad);
            for (uint c = 0u; c < 4u; c++) {
                if (keys[c] >= draw.least) {
                    uint token = 4u * quad + c;
                    precise float d = distance(keys[c], draw.most, draw.temperature_inverse);
                    uint bits = token_bits(token, draw.key);
                    if (d + gumbel_bound(bits) >= value_of(winner.x)) {
                        precise float score = d + gumbel(bits);
                        compete(winner, score, token);
                    }
                }
            }
        }
    }
}

// Returns the token that is drawn from the row of the slot whose words begin at `at`. `best` is the row's best token.
uint draw_token(uint at, uvec2 best) {
    Draw draw = draw_of(at, best, 0u);

    // The most probable token is always kept.
    uvec2 winner = uvec2(key_of(gumbel(token_bits(best.y, draw.key))), best.y);
    bool drawn = false;
    if (draw.by_count || draw.by_mass) {
        uint bound = guess_bound(draw.least);
        gather(bound);
        uint n = list_length;
        if (n <= LIST && (bound == draw.least || !draw.by_count || n >= draw.top_k)) {
            drawn = draw_listed(draw, n, bound == draw.least, winner);
        }
        if (!drawn) {
            // First the tokens that top_k keeps, then those of them that top_p keeps.
            [[dont_unroll]] for (uint stage = 0u; stage < 2u; stage++) {
                bool mass = stage == 1u;
                if (mass ? !draw.by_mass : !draw.by_count) continue;
                uint wanted = mass ? draw.fraction : draw.top_k;
                draw.least = select_key(draw.least, mass, wanted, draw.most, draw.temperature_inverse);
            }
        }
    }
    if (!drawn) draw_row(draw, winner);
    return reduce_best(winner).y;
}

void main() {
    thread = gl_LocalInvocationIndex;
    row = gl_WorkGroupID.x * args.every + args.first;
    quads = (args.vocabulary + 3u) / 4u;
    first_quad = row * (args.row_stride / 4u);
    adjusted = false;

    uvec4 input_row = args.rows.v[row];
    uint slot = input_row.z;
    uint at = slot * SLOT_WORDS;
    uint number = args.step_number.v[0];
    uint place = (number % args.ring_steps) * args.ring_rows + row;
    uint entry = place * ENTRY_WORDS;
    bool running = input_row.w != 0u && args.state.v[at + SLOT_ACTIVE] == ACTIVE_RUNNING;
    if (running && args.first != 0u)
        running = args.state.v[at + SLOT_TOKEN] == input_row.x && args.state.v[at + SLOT_POSITION] == input_row.y;
    bool fault = (args.options & OPTION_HEEDS_FAULT) != 0u && args.fault.v[0] != 0u;
    if (!running || fault) {
        if (thread == 0u) {
            args.ring.v[entry + ENTRY_SLOT] = slot;
            args.ring.v[entry + ENTRY_TOKEN] = TOKEN_NONE;
            args.ring.v[entry + ENTRY_DONE] = fault ? DONE_FAULT : DONE_NO;
            args.ring.v[entry + ENTRY_TOP_COUNT] = fault ? args.fault.v[0] : 0u;
            memoryBarrierBuffer();
            args.ring.v[entry + ENTRY_STEP] = number;
            if ((args.options & OPTION_COUNTS_STEP) != 0u) args.step_number.v[0] = number + 1u;
        }
        return;
    }

    uint flags = args.state.v[at + SLOT_FLAGS];
    bool greedy = uintBitsToFloat(args.state.v[at + SLOT_TEMPERATURE]) <= 0.0;
    bool mask_stops = args.state.v[at + SLOT_MIN_LEFT] > 0u && args.state.v[at + SLOT_STOP_COUNT] > 0u;
    bool logprobs = (flags & FLAG_LOGPROBS) != 0u;
    bool change = (flags & (FLAG_PENALTIES | FLAG_BIAS | FLAG_MASK)) != 0u || mask_stops;

    bool shared_rows = (args.options & OPTION_DRAWN) != 0u;
    uint first_partial = row * (args.partial_count + uint(shared_rows));
    bool plain = !change && !logprobs && args.partial_count > 0u;
    uvec2 drawn = uvec2(TOKEN_NONE, 0u);
    if (shared_rows && !greedy && plain) drawn = args.partials.v[first_partial + args.partial_count];
    uvec2 best = uvec2(0u, TOKEN_NONE);
    if (drawn.y != 0u) {
        best = uvec2(0u, drawn.x);
    } else if (greedy && plain) {
        for (uint base = 0u; base < args.partial_count; base += THREADS) {
            uint i = base + thread;
            if (i < args.partial_count) {
                uvec2 partial = args.partials.v[first_partial + i];
                uint key = key_of(uintBitsToFloat(partial.x));
                if (key > best.x || (key == best.x && partial.y < best.y)) best = uvec2(key, partial.y);
            }
        }
    } else {
        if (change) {
            adjust(slot, at, flags, mask_stops);
            adjusted = true;
        }
        best = own_best_after(uvec2(TOKEN_NONE, 0u));
    }
    best = reduce_best(best);
    uint token = best.y;
    if (!greedy && drawn.y == 0u && best.x > KEY_MINUS_INFINITY) token = draw_token(at, best);

    float logprob = 0.0;
    uint top_count = 0u;
    if (logprobs) {
        float most = value_of(best.x);
        bool none = best.x <= KEY_MINUS_INFINITY;
        uint wanted = none ? 0u : min(args.state.v[at + SLOT_TOP_N], TOP_ENTRIES);
        float sum = total(most);
        if (token / 4u % THREADS == thread) chosen_key = load_keys(token / 4u)[token % 4u];
        float norm = log_positive(reduce_sum(sum));
        logprob = none ? uintBitsToFloat(0xff800000u) : value_of(chosen_key) - most - norm;
        if (wanted > 0u) top_count = find_top(wanted, best, norm);
    }

    if (thread != 0u) return;
    uint done = DONE_NO;
    uint min_left = args.state.v[at + SLOT_MIN_LEFT];
    if (min_left == 0u) {
        uint stops = min(args.state.v[at + SLOT_STOP_COUNT], STOP_ENTRIES);
        for (uint i = 0u; i < stops; i++) {
            if (args.state.v[at + SLOT_STOP_IDS + i] == token) done = DONE_STOP;
        }
    } else {
        args.state.v[at + SLOT_MIN_LEFT] = min_left - 1u;
    }
    uint remaining = args.state.v[at + SLOT_REMAINING];
    remaining = remaining > 0u ? remaining - 1u : 0u;
    if (done == DONE_NO && remaining == 0u) done = DONE_LENGTH;
    if ((flags & FLAG_PENALTIES) != 0u) args.counts.v[slot * args.vocabulary + token] += 1u;
    args.state.v[at + SLOT_TOKEN] = token;
    args.state.v[at + SLOT_POSITION] = input_row.y + 1u;
    args.state.v[at + SLOT_REMAINING] = remaining;
    args.state.v[at + SLOT_GENERATED] += 1u;
    if (args.first == 0u) {
        bool lags = (args.options & OPTION_LAGS) != 0u;
        args.state.v[at + SLOT_SETTLED] = lags ? input_row.y : input_row.y + 1u;
    }
    if (done != DONE_NO) args.state.v[at + SLOT_ACTIVE] = ACTIVE_DONE;

    args.ring.v[entry + ENTRY_SLOT] = slot;
    args.ring.v[entry + ENTRY_TOKEN] = token;
    args.ring.v[entry + ENTRY_DONE] = done;
    args.ring.v[entry + ENTRY_LOGPROB] = floatBitsToUint(logprob);
    args.ring.v[entry + ENTRY_TOP_COUNT] = top_count;
    uint top = args.ring_steps * args.ring_rows * ENTRY_WORDS + place * TOP_WORDS;
    for (uint i = 0u; i < top_count; i++) {
        args.ring.v[top + 2u * i] = top_ids[i];
        args.ring.v[top + 2u * i + 1u] = floatBitsToUint(top_values[i]);
    }
    memoryBarrierBuffer();
    args.ring.v[entry + ENTRY_STEP] = number;
    if ((args.options & OPTION_COUNTS_STEP) != 0u) args.step_number.v[0] = number + 1u;
}
