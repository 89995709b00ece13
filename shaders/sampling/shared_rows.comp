#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "state.glsl"

// Lists rows of a step whose tokens the devices of a replica draw together, each with the logits of a part of the vocabulary
// (`all_gather`). Of a greedy row without conditions, the maxima of all parts suffice (`argmax`). The token of another row
// without conditions is drawn from shortlists, if these suffice (`draw_shortlisted`); all others are drawn from all logits.
// All devices have the same slots and shortlists, so all list the same rows.
//
//   SHORT 1: the rows that are drawn from shortlists
//   SHORT 0: the rows that are drawn from all logits, after shortlists were tried
//
//   rows, state: `state.glsl`
//   best  [row_count][best_stride] pairs: pair best_count of a row becomes (TOKEN_NONE, 0) with SHORT 1, `draw_shortlisted`
//         replaces it
//   list  {whether any row is not greedy or has conditions, the number of listed rows, their indices in ascending order}
//
// One workgroup; at most 1,024 rows. An invocation looks at every THREADS-th row.

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint SHORT = 0;
const uint THREADS = gl_WorkGroupSize.x;
const uint MOST_ROWS = 1024u;

layout(buffer_reference, std430, buffer_reference_align = 8) buffer PairsInOut { uvec2 v[]; };

layout(push_constant) uniform Args {
    Words4In rows;
    WordsIn state;
    PairsInOut best;
    WordsOut list;
    uint row_count;
    uint best_count;
    uint best_stride;
};

shared uint listed[MOST_ROWS / 32u];
shared uint others;

void main() {
    uint thread = gl_LocalInvocationIndex;
    for (uint i = thread; i < MOST_ROWS / 32u; i += THREADS) listed[i] = 0u;
    if (thread == 0u) others = 0u;
    barrier();
    for (uint row = thread; row < row_count; row += THREADS) {
        uint pair = row * best_stride + best_count;
        uint drawn = SHORT == 1u ? 0u : best.v[pair].y;
        if (SHORT == 1u) best.v[pair] = uvec2(TOKEN_NONE, 0u);
        uvec4 info = rows.v[row];
        if (info.w == 0u) continue;
        uint at = info.z * SLOT_WORDS;
        bool greedy = uintBitsToFloat(state.v[at + SLOT_TEMPERATURE]) <= 0.0;
        bool mask_stops = state.v[at + SLOT_MIN_LEFT] > 0u && state.v[at + SLOT_STOP_COUNT] > 0u;
        bool conditions = state.v[at + SLOT_FLAGS] != 0u || mask_stops;
        if (greedy && !conditions) continue;
        atomicOr(others, 1u);
        if (SHORT == 1u ? !conditions : drawn == 0u) atomicOr(listed[row / 32u], 1u << row % 32u);
    }
    barrier();
    uint before = 0u, counted = 0u;
    for (uint row = thread; row < row_count; row += THREADS) {
        for (; counted < row / 32u; counted++) before += bitCount(listed[counted]);
        uint bits = listed[row / 32u], bit = 1u << row % 32u;
        if ((bits & bit) != 0u) list.v[2u + before + bitCount(bits & (bit - 1u))] = row;
    }
    if (thread != 0u) return;
    uint count = 0u;
    for (uint i = 0u; i < MOST_ROWS / 32u; i++) count += bitCount(listed[i]);
    list.v[0] = others;
    list.v[1] = count;
}
