#version 460
#extension GL_GOOGLE_include_directive : require
// Work scheduling for flash decode: distributes a batch's attention workgroups over its rows. A unit is one split of a row's
// context: one workgroup of `flash_decode` per KV head. A row has at least one unit, and at most MOST.
//
// TURN 0: a row gets spread · pages / (the pages of all rows) units, rounded down, at most one per `least` pages.
// TURN > 0: so many units run at a time, and each attends to GROUPS pages at a time. A row gets a unit for each `size` pages,
// rounded up. Of the sizes for which the longest row has 1 to 32 units, of at least `least` pages, the one is taken by which the
// last unit ends first:
//   ⌈units / TURN⌉ · (⌈size / GROUPS⌉ + FIXED)    where what a unit does besides takes as long as FIXED rounds of GROUPS pages
//
// rows   [rows][4] token, position, slot, valid
// work   [units][4] row, position, slot, split | live << 8 | valid << 16, where `live` is the row's number of units;
//        all zero beyond the last unit. A row's units are consecutive. Rows with several units come first, because they
//        take longest. Then [rows][COMBINERS][4] row, its first unit, slot, MOST + combiner | live << 8 | valid << 16: the
//        workgroups that combine a row's units; all zero for a row that has one, or no sequence
// One workgroup plans all rows. Traffic: 16 bytes per row and 16 bytes per unit.
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint ROWS = 1;
layout(constant_id = 2) const uint UNITS = 1;     // at least ROWS + `spread`
layout(constant_id = 3) const uint MOST = 32;     // the maximum number of units of a row
layout(constant_id = 4) const uint WINDOW = 0;    // number of tokens that a token sees, itself included; 0 for all
layout(constant_id = 5) const uint COMBINERS = 0; // workgroups that combine the units of a row
layout(constant_id = 6) const uint TURN = 0;      // units that run at a time
layout(constant_id = 7) const uint GROUPS = 4;    // pages to which a unit attends at a time

layout(buffer_reference, std430, buffer_reference_align = 16) writeonly restrict buffer Words4Out { uvec4 v[]; };

layout(push_constant) uniform Args {
    Words4In rows;
    Words4Out work;
    uint spread;
    uint least;       // minimum number of pages per unit
};

// Iterates over the rows. Every invocation runs the same number of iterations, repeating the last row where it has none
// of its own, which it does not store: a CPU driver counts loop iterations between barriers (see EACH in
// `flash_decode.comp`).
#define EACH_ROW(r) for (uint turn_ = 0u, r = min(first, ROWS - 1u); turn_ < ROWS; turn_ += step_, r = min(first + turn_, ROWS - 1u))
#define IS_OWN_ROW (first + turn_ < ROWS)

const uint SIZES = 32u;                           // the least number of invocations
const uint FIXED = 3u;

shared uint pages_s[ROWS];
shared uint live_s[ROWS];
shared uint cost_s[SIZES];

// Returns the number of pages of a unit, if the longest row, of so many pages, has so many units.
uint size_of(uint longest, uint units) { return max((longest + units - 1u) / units, max(least, 1u)); }

void main() {
    uint first = gl_LocalInvocationID.x, step_ = gl_WorkGroupSize.x;
    EACH_ROW(r) {
        uvec4 info = rows.v[r];
        uint low = WINDOW > 0u && info.y >= WINDOW ? info.y + 1u - WINDOW : 0u;
        uint pages = info.w == 0u ? 0u : (info.y + 15u) / 16u - low / 16u;
        if (IS_OWN_ROW) pages_s[r] = pages;
    }
    barrier();
    uint all = 0u, longest = 0u;
    for (uint r = 0u; r < ROWS; r++) {
        all += pages_s[r];
        longest = max(longest, pages_s[r]);
    }
    uint size = 1u;
    if (TURN > 0u) {
        uint own = size_of(longest, min(first, SIZES - 1u) + 1u), units = 0u, empty = 0u;
        for (uint r = 0u; r < ROWS; r++) {
            uint pages = pages_s[r];
            units += min((pages + own - 1u) / own, MOST);
            empty += pages == 0u ? 1u : 0u; // a unit without work
        }
        uint cost = (units + TURN - 1u) / TURN * ((own + GROUPS - 1u) / GROUPS + FIXED);
        if (first < SIZES) cost_s[first] = units + empty > UNITS ? 0xffffffffu : cost;
        barrier();
        uint best = 0u;
        for (uint i = 1u; i < SIZES; i++) best = cost_s[i] < cost_s[best] ? i : best;
        size = size_of(longest, best + 1u);
    }
    EACH_ROW(r) {
        uint pages = pages_s[r];
        uint most = clamp(pages / max(least, 1u), 1u, MOST);
        uint live = clamp(spread * pages / max(all, 1u), 1u, most);
        if (TURN > 0u) live = clamp((pages + size - 1u) / size, 1u, MOST);
        if (IS_OWN_ROW) live_s[r] = live;
    }
    barrier();
    uint used = 0u;
    for (uint r = 0u; r < ROWS; r++) used += live_s[r];
    EACH_ROW(r) {
        uint live = live_s[r], at = 0u;
        for (uint i = 0u; i < ROWS; i++) {
            uint other = live_s[i];
            bool several = other > 1u;
            bool before = several == (live > 1u) ? i < r : several;
            at += before ? other : 0u;
        }
        uvec4 info = rows.v[r];
        uint valid = info.w == 0u ? 0u : 1u;
        if (IS_OWN_ROW) {
            uint code = live << 8 | valid << 16;
            for (uint s = 0u; s < live; s++) work.v[at + s] = uvec4(r, info.y, info.z, s | code);
            bool combined = live > 1u && valid == 1u;
            for (uint c = 0u; c < COMBINERS; c++)
                work.v[UNITS + r * COMBINERS + c] = combined ? uvec4(r, at, info.z, (MOST + c) | code) : uvec4(0u);
        }
    }
    for (uint u = used + first; u < UNITS; u += step_) work.v[u] = uvec4(0u);
}
