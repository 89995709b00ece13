#version 460
#extension GL_GOOGLE_include_directive : require
// Sorts the choices of many rows by expert, in tiles of TILE rows that are of one expert each.
//
// choices [rows][CHOSEN + SHARED] of (expert, share), as `expert_choose` leaves them; the shared expert is left out
// tiles   [MOST]: the expert of a tile, tiles of an expert one behind the other and experts in order; NOBODY behind
//         the last
// slots   [MOST][TILE]: row · CHOSEN + which of its choices, in order inside an expert; NOBODY behind its last. Those
//         of tiles that nobody has are left as they are.
// Rows not below `count[2]` (the chunk's length) and rows that chose NOBODY do not take part.
//
// One workgroup does one expert: it counts all choices, which says where each expert's tiles begin, and places its
// own. Traffic: the choices twice a workgroup, from the far cache.
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint LANES = 256;   // the same as the workgroup's size
layout(constant_id = 2) const uint COUNT = 8;
layout(constant_id = 3) const uint CHOSEN = 2;
layout(constant_id = 4) const uint SHARED = 0;
layout(constant_id = 5) const uint TILE = 16;
layout(constant_id = 6) const uint MOST = 1;
layout(constant_id = 7) const uint ROWS = 0;      // in use; 0: as many as `count` says

layout(buffer_reference, std430, buffer_reference_align = 8) readonly restrict buffer ChoicesIn { uvec2 v[]; };

layout(push_constant) uniform Args {
    ChoicesIn choices;
    WordsIn count;    // chunk descriptor; word 2 is the number of rows in use
    WordsOut tiles;
    WordsOut slots;
};

const uint NOBODY = 0xffffffffu;

shared uint counts_s[COUNT];
shared uint own_s[LANES];

void main() {
    uint expert = gl_WorkGroupID.x, t = gl_LocalInvocationIndex;
    uint used = ROWS != 0u ? ROWS : count.v[2];
    // Pairs of neighbouring invocations follow one another; as many turns for each.
    uint pairs = used * CHOSEN, each = (pairs + LANES - 1u) / LANES;
    for (uint turn = 0u; turn < COUNT; turn += LANES) if (turn + t < COUNT) counts_s[turn + t] = 0u;
    barrier();
    uint own = 0u;
    for (uint i = 0u; i < each; i++) {
        uint pair = t * each + i;
        if (pair < pairs) {
            uint id = choices.v[pair / CHOSEN * (CHOSEN + SHARED) + pair % CHOSEN].x;
            if (id < COUNT) atomicAdd(counts_s[id], 1u);
            own += id == expert ? 1u : 0u;
        }
    }
    own_s[t] = own;
    barrier();
    uint place = 0u;
    for (uint i = 0u; i < LANES; i++) place += i < t ? own_s[i] : 0u;
    uint first = 0u, total = 0u;
    for (uint i = 0u; i < COUNT; i++) {
        uint some = (counts_s[i] + TILE - 1u) / TILE;
        first += i < expert ? some : 0u;
        total += some;
    }
    for (uint i = 0u; i < each; i++) {
        uint pair = t * each + i;
        if (pair < pairs && choices.v[pair / CHOSEN * (CHOSEN + SHARED) + pair % CHOSEN].x == expert) {
            slots.v[first * TILE + place] = pair;
            place++;
        }
    }
    uint mine = (counts_s[expert] + TILE - 1u) / TILE;
    for (uint i = counts_s[expert] + t; i < mine * TILE; i += LANES) slots.v[first * TILE + i] = NOBODY;
    for (uint i = t; i < mine; i += LANES) tiles.v[first + i] = expert;
    for (uint i = total + expert * LANES + t; i < MOST; i += COUNT * LANES) tiles.v[i] = NOBODY;
}
