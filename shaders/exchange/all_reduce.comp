#version 460
#extension GL_GOOGLE_include_directive : require
// All-reduce of a product whose parts the devices of a replica with tensor parallelism have computed:
//   y[i] = Σ_k part_k[i]            ADD 0
//   y[i] = y[i] + Σ_k part_k[i]     ADD 1
// The sum is taken in the order of the devices, so that all of them get the same bits.
//
// x       [floats] f32: this device's part; tagged with TAGGED 3 (`tags.glsl`), and then sent with its tags
// y       [floats] f32, with x's stride; tagged with TAGGED 3
// outbox  [SLOTS][slot_words] uvec4, in host memory: this device's part for the others. Host threads copy each word to the
//         other devices' inboxes (`actors::proxy`).
// inbox   [RANKS - 1][SLOTS][slot_words] uvec4, then one uvec4: the parts of the others in their order, and a word that is
//         not zero once the host has given up. It must be in memory of this device: some GPUs keep a line of host memory
//         in their cache for as long as a submission runs.
// number  [1]: the number of the step's first exchange; this one has number[0] + index
// count   descriptor of a prompt step, whose rows are exchanged; only with COUNTED 1
// fault   `tags.glsl`
//
// A word is three floats and a check that contains the number of the exchange. A word whose check is right is complete and
// of this exchange, whatever was in its place before. Exchanges use the four slots in turn. No word is overwritten before it
// was read: at most two exchanges of sums are on the way at a time. A device sends words of exchange n + 4 only after it has got
// all words of n + 2, and the others have sent those after they had got all words of n. Exchanges of logits that do not take
// place leave their slots free.
//
// With HALVES 1 the floats are rounded to bfloat16, those of the device's own part too, and pass in blocks, which the host
// copies with less work: a workgroup sends up to 4 · threads words of eight floats each, and a header. Word w of a block of n
// words has the floats w, w + n, …, w + 7 n of the block. The header is a word like those above, with the sums of the
// block's words in place of floats. A block is whole if its words have these sums, so they may come in any order. Blocks
// have places at the slot's end, that of the first block the last: 4 · threads words, and four of which the first is the
// header. No words like those above are ever in the place of a block's words, nor the reverse.
//
// With PHASE 1 a call only sends. With PHASE 2 it only receives: words that have come, in work that the host releases then,
// or, with polls, those that come while work between both calls runs. With PHASE 0 it does both.
//
// All invocations of a call send before any one polls, and there are no more workgroups than the device runs at once, so
// that no workgroup waits for one that has not been launched, on either device. A poll ends when the word is there, when the host
// has given up or after EXCHANGE_POLLS. The call then sets the fault word; where a part has not come, y keeps its value. A
// call that finds the fault word set does not poll, and sends words that tell the host to give up, because what the device
// computes from then on is wrong.
//
// Traffic: RANKS · 16/3 bytes per float over the bus, with HALVES 1 RANKS · 2, and 8 to 12 bytes in memory.
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

// The words of a block that an invocation sends and receives.
const uint BLOCK_EACH = 4u;

// Returns the bits of a float rounded to bfloat16, ties to even.
uint half_of(uint bits) {
    uint rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded;
}

uint load_float(uint at, uint floats) { return at < floats ? x.v[at] : 0u; }

// Returns a word of this device's part; zeros beyond the last float.
uvec3 load_part(uint word, uint floats) {
    uvec3 part;
    [[unroll]] for (uint i = 0u; i < 3u; i++) part[i] = load_float(3u * word + i, floats);
    return part;
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

// This invocation's words of a block of one device.
uvec4 part[BLOCK_EACH];
shared uvec4 shared_sums[128];  // of each subgroup; at least one invocation each
shared uvec3 header_sums;
shared uint header_came;  // 1 if a header has come

// Returns the data of a block's header, given the sums of each invocation's words.
uvec3 block_sums(uvec4 own) {
    uvec4 sums = subgroupAdd(own);
    if (subgroupElect()) shared_sums[gl_SubgroupID] = sums;
    barrier();
    sums = uvec4(0u);
    for (uint i = 0u; i < gl_NumSubgroups; i++) sums += shared_sums[i];
    barrier();
    return uvec3(sums.x ^ rotated(sums.w, 11u), sums.y ^ rotated(sums.w, 22u), sums.z);
}

// Returns the place of a block's first word in a slot.
uint block_place(uint block) { return slot_words - (BLOCK_EACH * gl_WorkGroupSize.x + 4u) * (block + 1u); }

// Returns a word of this device's part as it is sent in a block of `count` words, the first of which is word `first` of all.
uvec4 load_halves(uint first, uint count, uint word) {
    uvec4 bits;
    [[unroll]] for (uint i = 0u; i < 4u; i++) {
        uint at = 8u * first + 2u * i * count + word;
        bits[i] = half_of(x.v[at]) | half_of(x.v[at + count]) << 16;
    }
    return bits;
}

// Receives a block of another device into `part`: its `count` words, from word `first` of the inbox on. Returns false if
// exchanges have ended before it has come. Called by whole workgroups.
bool receive_block(uint first, uint count, uint exchange) {
    uint header = first + BLOCK_EACH * gl_WorkGroupSize.x;
    uint stop = (RANKS - 1u) * SLOTS * slot_words, torn = 0u;
    bool came = true, whole = false;
    while (came && !whole) {
        if (gl_LocalInvocationIndex == 0u) {
            uvec4 got = inbox.v[header];
            bool complete = is_complete(got, exchange), failed = fault.v[0] != 0u;
            for (uint polls = 1u; !complete && !failed; polls++) {
                got = inbox.v[header];
                complete = is_complete(got, exchange);
                if (polls % POLLS_BETWEEN_EXCHANGE_LOOKS == 0u) {
                    failed = polls >= EXCHANGE_POLLS || inbox.v[stop].x != 0u || fault.v[0] != 0u;
                }
            }
            // Words of a torn block are on their way, unless exchanges have ended.
            bool ended = torn != 0u && (inbox.v[stop].x != 0u || fault.v[0] != 0u);
            header_sums = got.xyz;
            header_came = uint(complete && !ended && torn < max(EXCHANGE_POLLS, POLLS_BETWEEN_EXCHANGE_LOOKS));
        }
        barrier();
        came = header_came == 1u;
        uvec3 wanted = header_sums;
        uvec4 sums = uvec4(0u);
        [[unroll]] for (uint i = 0u; i < BLOCK_EACH; i++) {
            uint word = i * gl_WorkGroupSize.x + gl_LocalInvocationIndex;
            part[i] = came && word < count ? inbox.v[first + word] : uvec4(0u);
            sums += part[i];
        }
        // It has a barrier: all have read the header before it is read again.
        whole = block_sums(sums) == wanted;
        torn++;
    }
    return came;
}

// The exchange with HALVES 1.
void exchange_blocks(uint floats, uint exchange) {
    uint threads = gl_WorkGroupSize.x, each = BLOCK_EACH * threads;
    uint words = floats / 8u, blocks = (words + each - 1u) / each;
    uint slot = exchange % SLOTS * slot_words;
    for (uint block = gl_WorkGroupID.x; PHASE != 2u && block < blocks; block += gl_NumWorkGroups.x) {
        uint first = block * each, count = min(each, words - first), place = slot + block_place(block);
        uvec4 sums = uvec4(0u);
        [[unroll]] for (uint i = 0u; i < BLOCK_EACH; i++) {
            uint word = i * threads + gl_LocalInvocationIndex;
            uvec4 sent = uvec4(0u);
            if (word < count) {
                sent = load_halves(first, count, word);
                outbox.v[place + word] = sent;
            }
            sums += sent;
        }
        // A header that overtakes words of its block costs the host a second look.
        memoryBarrierBuffer();
        uvec3 header = block_sums(sums);
        if (gl_LocalInvocationIndex == 0u) outbox.v[place + each] = exchange_word(header, exchange, fault.v[0]);
    }
    if (PHASE == 1u) return;
    for (uint block = gl_WorkGroupID.x; block < blocks; block += gl_NumWorkGroups.x) {
        uint first = block * each, count = min(each, words - first);
        float sum[8u * BLOCK_EACH];
        [[unroll]] for (uint i = 0u; i < 8u * BLOCK_EACH; i++) sum[i] = 0.0;
        bool failed = false;
        for (uint rank = 0u; rank < RANKS && !failed; rank++) {
            if (rank == RANK) {
                [[unroll]] for (uint i = 0u; i < BLOCK_EACH; i++) {
                    uint word = i * threads + gl_LocalInvocationIndex;
                    part[i] = word < count ? load_halves(first, count, word) : uvec4(0u);
                }
            } else {
                uint from = (rank - uint(rank > RANK)) * SLOTS * slot_words + slot;
                failed = !receive_block(from + block_place(block), count, exchange);
            }
            [[unroll]] for (uint i = 0u; i < 4u * BLOCK_EACH; i++) {
                sum[2u * i] += bf16_low(part[i / 4u][i % 4u]);
                sum[2u * i + 1u] += bf16_high(part[i / 4u][i % 4u]);
            }
        }
        if (failed && gl_LocalInvocationIndex == 0u) fault.v[0] = EXCHANGE_FAULT;
        [[unroll]] for (uint i = 0u; i < 8u * BLOCK_EACH; i++) {
            uint word = i / 8u * threads + gl_LocalInvocationIndex, at = 8u * first + i % 8u * count + word;
            if (!failed && word < count) {
                float value = ADD == 1u ? uintBitsToFloat(y.v[at]) + sum[i] : sum[i];
                y.v[at] = floatBitsToUint(value);
            }
        }
    }
}

void main() {
    uint rows = COUNTED == 1u ? min(count.v[2], row_count) : row_count;
    uint floats = rows * stride, words = (floats + 2u) / 3u;
    uint exchange = number.v[0] + index;
    if (HALVES == 1u) {
        exchange_blocks(floats, exchange);
        return;
    }
    uint slot = exchange % SLOTS * slot_words;
    uint invocations = gl_NumWorkGroups.x * gl_WorkGroupSize.x, first = gl_GlobalInvocationID.x;
    for (uint word = first; PHASE != 2u && word < words; word += invocations) {
        uvec3 part = part_of(word, floats);
        outbox.v[slot + word] = exchange_word(part, exchange, fault.v[0]);
    }
    if (PHASE == 1u) return;
    barrier();
    uint stop = (RANKS - 1u) * SLOTS * slot_words;
    bool failed = fault.v[0] != 0u, waited = false;
    for (uint word = first; word < words; word += invocations) {
        uvec3 own = load_part(word, floats);
        vec3 sum = vec3(0.0);
        for (uint rank = 0u; rank < RANKS; rank++) {
            if (rank == RANK) {
                sum += uintBitsToFloat(own);
                continue;
            }
            uint at = (rank - uint(rank > RANK)) * SLOTS * slot_words + slot + word;
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
            sum += uintBitsToFloat(got.xyz);
        }
        if (failed) continue;
        [[unroll]] for (uint i = 0u; i < 3u; i++) {
            uint at = 3u * word + i;
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
