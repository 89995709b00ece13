#version 460
#extension GL_GOOGLE_include_directive : require
// All-gather of rows whose columns the devices of a replica with tensor parallelism have computed:
//   y[r][first(k) + i] = x_k[r][i]    for each device k and i < first(k + 1) - first(k)
// first(k) = min(⌊units · k / RANKS⌋ · unit, columns): every device has whole units of columns.
//
// x       [rows][x_stride] words: this device's columns
// y       [rows][y_stride] words. KEEPS 0: not written; 1: the columns of the others, x being in its place; 2: all columns
// list    {whether rows are listed, their number, their indices}. LISTED 1: only these rows are exchanged, and nothing at
//         all if the first word is 0, as then every device knows. LISTED 0: the first row_count rows
// turn    [1]: with TURNED 1, exchanges of the region's repetitions follow each other
// outbox, inbox, fault: `all_reduce.comp`;  number: that of the first exchange of scored rows, or of those that draw. With
//         BEST 1 the exchange has a slot of its own, behind those of
//         `all_reduce`: [best_words] in the outbox, [RANKS - 1][best_words] in the inbox.
//
// The first word of an exchange has the number of words that follow it, so that the host learns it, and whether a further
// exchange of the same step's rows has words (the list's first word). A word of a row has three words of x.
//
// Phases, polls and faults are those of `all_reduce`. All devices wait for all words, also those that do not keep them: no
// slot is used again before everybody has what was in it.
//
// Traffic: RANKS · 16/3 bytes per word over the bus, and 8 bytes in memory.
#include "common.glsl"
#include "tags.glsl"
#include "exchange.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint RANKS = 2;
layout(constant_id = 2) const uint RANK = 0;
layout(constant_id = 3) const uint LISTED = 0;
layout(constant_id = 4) const uint TURNED = 0;
layout(constant_id = 5) const uint EXCHANGE_POLLS = 1;
layout(constant_id = 6) const uint PHASE = 0;
layout(constant_id = 7) const uint KEEPS = 0;
layout(constant_id = 8) const uint BEST = 0;

layout(push_constant) uniform Args {
    WordsIn x;
    WordsOut y;
    Outbox outbox;
    Inbox inbox;
    WordsIn number;
    WordsIn turn;
    WordsIn list;
    Fault fault;
    uint row_count;
    uint columns;
    uint units;
    uint unit;
    uint x_stride;
    uint y_stride;
    uint slot_words;
    uint best_words;
    uint index;
};

uint first_of(uint rank) { return min(units * rank / RANKS * unit, columns); }

// The number of words of a row, the same for each device.
uint row_words() { return ((units + RANKS - 1u) / RANKS * unit + 2u) / 3u; }

uint row_of(uint at) { return LISTED == 1u ? list.v[2u + at] : at; }

// Returns the data of a word of this device.
uvec3 load_part(uint word, uint rows) {
    if (word == 0u) return uvec3(rows * row_words(), list.v[0], 0u);
    uint each = row_words(), row = row_of((word - 1u) / each), at = (word - 1u) % each * 3u;
    uint width = first_of(RANK + 1u) - first_of(RANK);
    uvec3 part = uvec3(0u);
    [[unroll]] for (uint i = 0u; i < 3u; i++) {
        if (at + i < width) part[i] = x.v[row * x_stride + at + i];
    }
    return part;
}

void store(uint rank, uint word, uvec3 part) {
    if (word == 0u) return;
    uint each = row_words(), row = row_of((word - 1u) / each), at = (word - 1u) % each * 3u;
    uint first = first_of(rank), width = first_of(rank + 1u) - first;
    [[unroll]] for (uint i = 0u; i < 3u; i++) {
        if (at + i < width) y.v[row * y_stride + first + at + i] = part[i];
    }
}

void main() {
    if (LISTED == 1u && list.v[0] == 0u) return;
    uint rows = LISTED == 1u ? min(list.v[1], row_count) : row_count;
    uint words = 1u + rows * row_words();
    uint exchange = number.v[0] + index;
    if (TURNED == 1u) exchange += turn.v[0];
    uint own_slot = BEST == 1u ? SLOTS * slot_words : exchange % SLOTS * slot_words;
    uint invocations = gl_NumWorkGroups.x * gl_WorkGroupSize.x, first = gl_GlobalInvocationID.x;
    for (uint word = first; PHASE != 2u && word < words; word += invocations) {
        outbox.v[own_slot + word] = exchange_word(load_part(word, rows), exchange, fault.v[0]);
    }
    if (PHASE == 1u) return;
    barrier();
    uint stop = (RANKS - 1u) * SLOTS * slot_words;
    bool failed = fault.v[0] != 0u, waited = false;
    for (uint word = first; word < words; word += invocations) {
        for (uint rank = 0u; rank < RANKS; rank++) {
            if (rank == RANK) {
                if (KEEPS == 2u) store(rank, word, load_part(word, rows));
                continue;
            }
            uint place = rank - uint(rank > RANK);
            uint at = (BEST == 1u ? stop + 1u + place * best_words : place * SLOTS * slot_words + own_slot) + word;
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
            } else if (KEEPS != 0u) {
                store(rank, word, got.xyz);
            }
        }
    }
    if (waited) fault.v[1] = 0u;
}
