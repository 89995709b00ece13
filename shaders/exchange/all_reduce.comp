#version 460
#extension GL_GOOGLE_include_directive : require
// All-reduce of a product whose parts the devices of a replica with tensor parallelism have computed:
//   y[i] = Σ_k part_k[i]            ADD 0
//   y[i] = y[i] + Σ_k part_k[i]     ADD 1
// The sum is taken in the order of the devices, so that all of them get the same bits.
//
// x       [floats] f32: this device's part; tagged with TAGGED 3 (`tags.glsl`), and then sent with its tags
// y       [floats] f32, with x's stride; tagged with TAGGED 3
// outbox  [2][slot_words] uvec4, in host memory: this device's part for the others. Host threads copy each word to the
//         other devices' inboxes (`actors::proxy`).
// inbox   [RANKS - 1][2][slot_words] uvec4, then one uvec4: the parts of the others in their order, and a word that is
//         not zero once the host has given up. It must be in memory of this device: some GPUs keep a line of host memory
//         in their cache for as long as a submission runs.
// number  [1]: the number of the step's first exchange; this one has number[0] + index
// count   descriptor of a prompt step, whose rows are exchanged; only with COUNTED 1
// fault   `tags.glsl`
//
// A word is three floats and a check that contains the number of the exchange. With HALVES 1 it has six floats, rounded to
// bfloat16; the device's own part is rounded too. A word whose check is right is complete and of this exchange, whatever
// was in its place before. Exchanges use the two slots in turn. No word is overwritten before it was read: a device begins
// exchange n + 2 after it has got all words of exchange n + 1, which the others send after they have got all words of n.
//
// With PHASE 1 a call only sends. With PHASE 2 it only receives words that have come, in work that the host releases
// then. With PHASE 0 it does both.
//
// All invocations send before any one polls, and there are no more workgroups than the device runs at once, so that no
// workgroup waits for one that has not been launched, on either device. A poll ends when the word is there, when the host
// has given up or after EXCHANGE_POLLS. The call then sets the fault word; where a part has not come, y keeps its value. A
// call that finds the fault word set does not poll, and sends words that tell the host to give up, because what the device
// computes from then on is wrong.
//
// Traffic: RANKS · 16/3 bytes per float over the bus, with HALVES 1 half as many, and 8 to 12 bytes in memory.
#include "common.glsl"
#define DEVICES_ID 9
#include "tags.glsl"
#include "exchange.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint RANKS = 2;
layout(constant_id = 2) const uint RANK = 0;
layout(constant_id = 3) const uint ADD = 1;
layout(constant_id = 4) const uint COUNTED = 0;
layout(constant_id = 5) const uint EXCHANGE_POLLS = 1;
layout(constant_id = 6) const uint PHASE = 0;
layout(constant_id = 7) const uint TAGGED = 0;
layout(constant_id = 8) const uint HALVES = 0;

layout(buffer_reference, std430, buffer_reference_align = 4) buffer SumInOut { volatile uint v[]; };

layout(push_constant) uniform Args {
    TaggedIn1 x;
    SumInOut y;       // may be x
    Outbox outbox;
    Inbox inbox;
    WordsIn number;
    WordsIn count;
    Fault fault;
    uint row_count;   // the number of rows; with COUNTED, the most
    uint stride;      // floats of a row
    uint slot_words;
    uint index;
    uint x_tag;
    uint old_tag;
    uint y_tag;
};

// The number of floats in a word.
const uint WORD_FLOATS = HALVES == 1u ? 6u : 3u;

// Returns the bits of a float rounded to bfloat16, ties to even.
uint half_of(uint bits) {
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40u;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

uint load_float(uint at, uint floats) { return at < floats ? x.v[at] : 0u; }

// Returns a word of this device's part; zeros beyond the last float.
uvec3 load_part(uint word, uint floats) {
    uvec3 part = uvec3(0u);
    [[unroll]] for (uint i = 0u; i < 3u; i++) {
        uint at = word * WORD_FLOATS + i * (WORD_FLOATS / 3u);
        part[i] = load_float(at, floats);
        if (HALVES == 1u) part[i] = half_of(part[i]) | half_of(load_float(at + 1u, floats)) << 16;
    }
    return part;
}

// Returns float i of a word.
float float_of(uvec3 part, uint i) {
    if (HALVES == 0u) return uintBitsToFloat(part[i]);
    return i % 2u == 0u ? bf16_low(part[i / 2u]) : bf16_high(part[i / 2u]);
}

// Returns a word of this device's part after the product's call has written it.
uvec3 part_of(uint word, uint floats) {
    uvec3 part = load_part(word, floats);
    if (TAGGED != 3u) return part;
    // A float beyond the last one is never stale.
    uvec3 here = uvec3(TAG_MASK) * uvec3(1u, uint(3u * word + 1u < floats), uint(3u * word + 2u < floats));
    uint polls = 0u;
    while (true) {
        uvec3 stale = (part ^ uvec3(x_tag)) & here;
        if (!poll_again((stale.x | stale.y | stale.z) != 0u, polls, fault, x_tag)) return part;
        part = load_part(word, floats);
    }
}

void main() {
    uint rows = COUNTED == 1u ? min(count.v[2], row_count) : row_count;
    uint floats = rows * stride, words = (floats + WORD_FLOATS - 1u) / WORD_FLOATS;
    uint exchange = number.v[0] + index;
    uint slot = (exchange & 1u) * slot_words;
    uint invocations = gl_NumWorkGroups.x * gl_WorkGroupSize.x, first = gl_GlobalInvocationID.x;
    for (uint word = first; PHASE != 2u && word < words; word += invocations) {
        uvec3 part = part_of(word, floats);
        outbox.v[slot + word] = exchange_word(part, exchange, fault.v[0] != 0u);
    }
    if (PHASE == 1u) return;
    barrier();
    uint stop = (RANKS - 1u) * 2u * slot_words;
    bool failed = fault.v[0] != 0u, waited = false;
    for (uint word = first; word < words; word += invocations) {
        uvec3 own = load_part(word, floats);
        float sum[6] = float[6](0.0, 0.0, 0.0, 0.0, 0.0, 0.0);
        for (uint rank = 0u; rank < RANKS; rank++) {
            if (rank == RANK) {
                [[unroll]] for (uint i = 0u; i < WORD_FLOATS; i++) sum[i] += float_of(own, i);
                continue;
            }
            uint at = (rank - uint(rank > RANK)) * 2u * slot_words + slot + word;
            uvec4 got = inbox.v[at];
            bool complete = is_complete(got, exchange);
            for (uint polls = 1u; !complete && !failed; polls++) {
                got = inbox.v[at];
                complete = is_complete(got, exchange);
                if (polls % POLLS_BETWEEN_EXCHANGE_LOOKS == 0u) {
                    failed = polls >= EXCHANGE_POLLS || inbox.v[stop].x != 0u || fault.v[0] != 0u;
                    // Calls that poll for this one's words do not give up meanwhile.
                    fault.v[1] = 1u;
                    waited = true;
                }
            }
            if (!complete) {
                fault.v[0] = EXCHANGE_FAULT;
                failed = true;
            }
            [[unroll]] for (uint i = 0u; i < WORD_FLOATS; i++) sum[i] += float_of(got.xyz, i);
        }
        if (failed) continue;
        [[unroll]] for (uint i = 0u; i < WORD_FLOATS; i++) {
            uint at = WORD_FLOATS * word + i;
            if (at >= floats) continue;
            float value = sum[i];
            if (ADD == 1u) {
                uint old = y.v[at], polls = 0u;
                if (TAGGED == 3u) {
                    while (poll_again(stale(old, old_tag) != 0u, polls, fault, old_tag)) old = y.v[at];
                }
                value = uintBitsToFloat(old) + value;
            }
            y.v[at] = TAGGED == 3u ? tagged(value, y_tag) : floatBitsToUint(value);
        }
    }
    if (waited) fault.v[1] = 0u;
}
