#version 460
#extension GL_GOOGLE_include_directive : require
// MoE row sorting (vLLM's moe_align_block_size): sorts the choices of many rows by expert, into tiles of TILE rows that
// belong to one expert each.
//
// choices  [rows][CHOSEN + SHARED] of (expert, share), as `expert_choose` writes them; the shared expert's are left out
// tiles    [MOST]: the expert of each tile. Experts are in ascending order, the tiles of an expert are consecutive;
//          NOBODY beyond the last tile. Then, at MOST, the number of tiles in use
// slots    [MOST][TILE]: row · CHOSEN + the index of the row's choice, ascending within an expert; NOBODY beyond an
//          expert's last. The slots of tiles without an expert are left unchanged
// Rows not below `count[2]` (the number of rows of the prompt step) and rows that chose NOBODY do not take part.
//
// One workgroup places the choices of one expert. It counts the choices of all experts, which gives the first tile of
// each expert.
// Traffic: the choices twice per workgroup, from the L2 cache.
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint LANES = 256;   // the workgroup's size
layout(constant_id = 2) const uint COUNT = 8;
layout(constant_id = 3) const uint CHOSEN = 2;
layout(constant_id = 4) const uint SHARED = 0;
layout(constant_id = 5) const uint TILE = 16;
layout(constant_id = 6) const uint MOST = 1;
layout(constant_id = 7) const uint ROWS = 0;      // rows in use; 0: `count` holds the number

layout(buffer_reference, std430, buffer_reference_align = 8) readonly restrict buffer ChoicesIn { uvec2 v[]; };

layout(push_constant) uniform Args {
    ChoicesIn choices;
    WordsIn count;    // descriptor of the prompt step; word 2 is the number of rows in use
    WordsOut tiles;
    WordsOut slots;
};

const uint NOBODY = 0xffffffffu;

shared uint counts_s[COUNT];
shared uint own_s[LANES];

void main() {
    uint expert = gl_WorkGroupID.x, t = gl_LocalInvocationIndex;
    uint used = ROWS != 0u ? ROWS : count.v[2];
    // Each invocation takes a run of consecutive pairs (row, choice), in the order of the invocations. All invocations
    // run the same number of iterations.
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
    if (expert == 0u && t == 0u) tiles.v[MOST] = total;
    for (uint i = total + expert * LANES + t; i < MOST; i += COUNT * LANES) tiles.v[i] = NOBODY;
}
