#version 460
#extension GL_GOOGLE_include_directive : require
// Prompt look-up: drafts what followed the last tokens of a sequence where they occurred before. With the tokens
// h[0 .. p) and the next one, h[p]:
//   n(j) = number of i in 0 .. TAIL-1 with h[j - i'] = h[p - i'] for all i' <= i
//   best = the j < p with the greatest n(j) > 0, the last one of several
//   draft[i] = h[best + 1 + i], where tokens behind p are the drafts themselves; h[p] if there is no such j
//
// rows     [sequences·EACH] of token, position, slot, valid: the first row of a sequence names its slot
// slots    `state.glsl`: SLOT_TOKEN is h[p], SLOT_POSITION is p
// history  [slots][stride] u32: h, from `note_tokens`
// One workgroup processes one sequence. Traffic: 4 bytes per token of the sequence.
#include "common.glsl"
#include "state.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint EACH = 1;
layout(constant_id = 2) const uint DRAFTS = 1;

// The most tokens that are compared, and the bits of a position beside their number.
const uint TAIL = 3u;
const uint POSITION_BITS = 28u;

layout(push_constant) uniform Args {
    Words4In rows;
    WordsIn history;
    WordsInOut slots;
    uint stride;      // positions of a slot
};

shared uint partial[256];

void main() {
    uvec4 info = rows.v[gl_WorkGroupID.x * EACH];
    uint slot = info.z, t = gl_LocalInvocationID.x, at = slot * SLOT_WORDS;
    if (info.w == 0u || slots.v[at + SLOT_ACTIVE] != ACTIVE_RUNNING) return;
    uint position = slots.v[at + SLOT_POSITION], token = slots.v[at + SLOT_TOKEN], base = slot * stride;
    uint before = position >= 1u ? history.v[base + position - 1u] : TOKEN_NONE;
    uint first = position >= 2u ? history.v[base + position - 2u] : TOKEN_NONE;
    uint best = 0u;
    for (uint block = 0u; block < position; block += gl_WorkGroupSize.x) {
        uint j = block + t;
        if (j < position && history.v[base + j] == token) {
            uint same = 1u;
            if (j >= 1u && history.v[base + j - 1u] == before) {
                same = 2u;
                if (j >= 2u && history.v[base + j - 2u] == first) same = TAIL;
            }
            best = max(best, same << POSITION_BITS | j);
        }
    }
    best = subgroupMax(best);
    if (subgroupElect()) partial[gl_SubgroupID] = best;
    barrier();
    if (t != 0u) return;
    for (uint i = 0u; i < gl_NumSubgroups; i++) best = max(best, partial[i]);
    uint from = (best & ((1u << POSITION_BITS) - 1u)) + 1u;
    uint drafts[MOST_DRAFTS];
    for (uint i = 0u; i < DRAFTS; i++) {
        uint place = from + i;
        uint draft = token;
        if (best != 0u && place < position) draft = history.v[base + place];
        if (best != 0u && place > position) draft = drafts[place - position - 1u];
        drafts[i] = draft;
        slots.v[at + SLOT_DRAFTS + i] = draft;
    }
}
