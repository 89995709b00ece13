#version 460
#extension GL_GOOGLE_include_directive : require
// MoE top-k selection with scores, groups and a bias of the choice, as in DeepSeek-V2, DeepSeek-V3 and GLM-4.5:
//   z = logits · logit_scale
//   s = softmax(z) or, with SIGMOID 1, sigmoid(z);   c = s + bias
//   of GROUPS groups of experts with adjacent ids, the KEPT groups with the greatest sums of their BEST greatest c stay
//   the CHOSEN experts of these groups with the greatest c are chosen, each with the share  s · factor
//   (NORMALISE 1: s / (the sum of the chosen s + SUM_OFFSET) · factor), with SCALES 1 times the expert's own factor
// Softmax without bias and groups chooses by the logits, whose order is that of c, as the kernels for a few rows do.
// Among equal scores, the lowest id wins. A NaN counts as less than every number.
//
// logits   [rows][logits_stride] f32: COUNT router logits. GATE 1: then the shared expert's gate
// choices  [rows][CHOSEN + SHARED] of (expert, share as f32 bits). The shared expert's share is the sigmoid of its gate,
//          or 1 without a gate
// Rows not below `count[2]` (the number of rows of the prompt step) are left unchanged; with VALID 1, rows that are not
// valid choose NOBODY.
//
// One workgroup selects for one row. Traffic: 4 bytes per logit and 8 per choice.
#include "common.glsl"
#include "deterministic.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint COUNT = 8;
layout(constant_id = 2) const uint CHOSEN = 2;
layout(constant_id = 3) const uint NORMALISE = 0;
layout(constant_id = 4) const uint SHARED = 0;
layout(constant_id = 5) const uint ROWS = 0;      // rows in use; 0: `count` holds the number
layout(constant_id = 6) const uint VALID = 0;
layout(constant_id = 7) const uint SIGMOID = 0;
layout(constant_id = 8) const uint BIAS = 0;
layout(constant_id = 9) const uint GATE = 0;
layout(constant_id = 10) const uint GROUPS = 1;   // divides COUNT
layout(constant_id = 11) const uint KEPT = 1;
layout(constant_id = 12) const uint BEST = 1;     // at most COUNT / GROUPS
layout(constant_id = 13) const uint SCALES = 0;
layout(constant_id = 14) const uint SUM_OFFSET = 0x1e3ce508; // the bits of an f32; above 0, since all sigmoids may be 0

layout(buffer_reference, std430, buffer_reference_align = 8) writeonly restrict buffer ChoicesOut { uvec2 v[]; };

layout(push_constant) uniform Args {
    FloatsIn logits;
    FloatsIn bias;    // [COUNT]
    FloatsIn scales;  // [COUNT]
    WordsIn rows;
    WordsIn count;    // descriptor of the prompt step; word 2 is the number of rows in use
    ChoicesOut choices;
    uint logits_stride;
    float factor;
    float logit_scale;
};

const uint NOBODY = 0xffffffffu;
const uint EACH = COUNT / GROUPS;
const bool BY_LOGITS = SIGMOID == 0u && BIAS == 0u && KEPT == GROUPS;

shared float scores_s[COUNT];
shared uint keys_s[COUNT];       // of c, in the order of `deterministic.glsl`; 0 if the expert is out
shared uint groups_s[GROUPS];    // keys of the groups' scores
shared uint ids_s[CHOSEN];
shared float partial_s[256];

// Returns the sum, or the greatest, of all invocations' values.
#define OF_ALL(result, own, of_subgroup, combine, neutral) {                                        \
        float own_ = of_subgroup(own);                                                              \
        if (subgroupElect()) partial_s[gl_SubgroupID] = own_;                                       \
        barrier();                                                                                  \
        result = neutral;                                                                           \
        for (uint i_ = 0u; i_ < gl_NumSubgroups; i_++) result = combine(result, partial_s[i_]);     \
        barrier();                                                                                  \
    }
float plus(float a, float b) { return a + b; }

void main() {
    uint used = ROWS != 0u ? ROWS : count.v[2];
    uint row = gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x, t = gl_LocalInvocationID.x;
    if (row >= used) return;
    uint base = row * logits_stride;
    float most = value_of(KEY_MINUS_INFINITY), total = 1.0;
    for (uint i = t; i < COUNT; i += gl_WorkGroupSize.x) {
        float logit = logits.v[base + i] * logit_scale;
        scores_s[i] = logit;
        most = max(most, value_of(key_of(logit)));
    }
    if (SIGMOID == 0u) {
        float sum = 0.0;
        OF_ALL(most, most, subgroupMax, max, value_of(KEY_MINUS_INFINITY))
        for (uint i = t; i < COUNT; i += gl_WorkGroupSize.x) sum += exp(value_of(key_of(scores_s[i])) - most);
        OF_ALL(total, sum, subgroupAdd, plus, 0.0)
    }
    // Each invocation has its own experts until the next barrier.
    for (uint i = t; i < COUNT; i += gl_WorkGroupSize.x) {
        float logit = scores_s[i];
        float score = SIGMOID == 1u ? 1.0 / (1.0 + exp(-logit)) : exp(value_of(key_of(logit)) - most) / total;
        scores_s[i] = score;
        keys_s[i] = max(key_of(BY_LOGITS ? logit : BIAS == 1u ? score + bias.v[i] : score), 1u);
    }
    barrier();
    if (KEPT < GROUPS) {
        for (uint g = t; g < GROUPS; g += gl_WorkGroupSize.x) {
            float sum = 0.0;
            uint last_key = 0xffffffffu, last_id = 0u;
            for (uint n = 0u; n < BEST; n++) {
                // The greatest that follows the last one in the order (key descending, id ascending).
                uint key = 0u, id = 0u;
                for (uint i = g * EACH; i < (g + 1u) * EACH; i++) {
                    uint other = keys_s[i];
                    bool follows = n == 0u || other < last_key || (other == last_key && i > last_id);
                    if (follows && other > key) {
                        key = other;
                        id = i;
                    }
                }
                sum += value_of(key);
                last_key = key;
                last_id = id;
            }
            groups_s[g] = key_of(sum);
        }
        barrier();
        for (uint i = t; i < COUNT; i += gl_WorkGroupSize.x) {
            uint g = i / EACH, before = 0u;
            for (uint other = 0u; other < GROUPS; other++)
                before += groups_s[other] > groups_s[g] || (groups_s[other] == groups_s[g] && other < g) ? 1u : 0u;
            if (before >= KEPT) keys_s[i] = 0u;
        }
        barrier();
    }
    // An expert is chosen if fewer than CHOSEN experts precede it in the order (key descending, id ascending).
    for (uint i = t; i < COUNT; i += gl_WorkGroupSize.x) {
        uint key = keys_s[i], before = 0u;
        for (uint other = 0u; other < COUNT; other++)
            before += keys_s[other] > key || (keys_s[other] == key && other < i) ? 1u : 0u;
        if (before < CHOSEN) ids_s[before] = i;
    }
    barrier();
    bool valid = VALID == 0u || rows.v[row * 4u + 3u] != 0u;
    uint to = row * (CHOSEN + SHARED);
    for (uint j = t; j < CHOSEN; j += gl_WorkGroupSize.x) {
        float divisor = 1.0;
        if (NORMALISE == 1u) {
            divisor = uintBitsToFloat(SUM_OFFSET);
            for (uint other = 0u; other < CHOSEN; other++) divisor += scores_s[ids_s[other]];
        }
        float share = scores_s[ids_s[j]] / divisor * factor;
        if (SCALES == 1u) share *= scales.v[ids_s[j]];
        choices.v[to + j] = valid ? uvec2(ids_s[j], floatBitsToUint(share)) : uvec2(NOBODY, 0u);
    }
    if (SHARED == 1u && t == 0u) {
        float share = GATE == 1u ? 1.0 / (1.0 + exp(-logits.v[base + COUNT])) : 1.0;
        choices.v[to + CHOSEN] = valid ? uvec2(COUNT, floatBitsToUint(share)) : uvec2(NOBODY, 0u);
    }
}
