#version 460
#extension GL_GOOGLE_include_directive : require
// MoE routing: top-k selection with softmax shares. choices[r] = the experts that the router logits of row r select,
// and their shares (`experts.glsl`).
//
// logits   [rows][logits_stride] f32: COUNT logits, then the shared expert's gate if there is one
// rows     [rows][4] token, position, slot, valid of a decode step; with VALID 0 every row is valid
// choices  [rows][CHOSEN + SHARED] of (expert, share as f32 bits); the shared expert's entry is (COUNT, sigmoid(gate)).
//          A row that is not valid gets NOBODY in every entry. Rows not below `count[2]` (the number of rows of the
//          prompt step) are left unchanged
//
// One workgroup processes EACH rows, one subgroup per row. Traffic: the logits once, 8 bytes per choice.
#include "common.glsl"
#include "deterministic.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint COUNT = 8;
layout(constant_id = 2) const uint CHOSEN = 2;
layout(constant_id = 3) const uint NORMALISE = 0;
layout(constant_id = 4) const uint SHARED = 0;
layout(constant_id = 5) const uint ROWS = 0;      // rows in use; 0: `count` holds the number
layout(constant_id = 6) const uint VALID = 0;
layout(constant_id = 7) const uint EACH = 4;

layout(buffer_reference, std430, buffer_reference_align = 8) writeonly restrict buffer ChoicesOut { uvec2 v[]; };

layout(push_constant) uniform Args {
    FloatsIn logits;
    WordsIn rows;
    WordsIn count;    // descriptor of the prompt step; word 2 is the number of rows in use
    ChoicesOut choices;
    uint logits_stride;
};

const uint NOBODY = 0xffffffffu;

shared uint keys_s[EACH * COUNT];
shared uint ids_s[EACH * CHOSEN];
shared float shares_s[EACH * CHOSEN];

#define MATRIX 0
#include "experts.glsl"

void main() {
    uint used = ROWS != 0u ? ROWS : count.v[2];
    for (uint turn = 0u; turn < EACH; turn += gl_NumSubgroups) {
        uint own = turn + gl_SubgroupID, row = (gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x) * EACH + own;
        if (own < EACH && row < used) {
            uint base = row * logits_stride, to = row * (CHOSEN + SHARED);
            bool valid = VALID == 0u || rows.v[row * 4u + 3u] != 0u;
            for (uint i = 0u; i < CANDIDATES; i++)
                if (CANDIDATE(i) < COUNT) keys_s[own * COUNT + CANDIDATE(i)] = key_of(logits.v[base + CANDIDATE(i)]);
            choose_experts(own * COUNT, own * CHOSEN);
            if (subgroupElect()) {
                for (uint j = 0u; j < CHOSEN; j++)
                    choices.v[to + j] = valid ? uvec2(ids_s[own * CHOSEN + j], floatBitsToUint(shares_s[own * CHOSEN + j])) : uvec2(NOBODY, 0u);
                if (SHARED == 1u) {
                    float gate = 1.0 / (1.0 + exp(-logits.v[base + COUNT]));
                    choices.v[to + CHOSEN] = valid ? uvec2(COUNT, floatBitsToUint(gate)) : uvec2(NOBODY, 0u);
                }
            }
        }
    }
}
