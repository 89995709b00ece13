#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// What `expert_skinny` does in its first stage, for a single row:
//     y[j] = share(j) · swiglu( Wgu[e(j)] · (x ⊙ norm) · rsqrt(mean x² + eps) ) for each of its experts,
// and the shared expert's behind them. Buffers are as there.
//
// One workgroup computes every so manieth block of 16 rows of the chosen experts' W. It splits x once, all of it, into
// shared memory before it waits for the logits; its groups of 32 lanes split K, AHEAD chunks of 32 columns in flight
// each, and ask for the next block's weights before they add up and store what they have of this one.
// Traffic: each chosen expert's weights once, x once a workgroup from the far cache.
#extension GL_KHR_shader_subgroup_vote : require
#include "common.glsl"
#include "determinate.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint LANES = 256;   // the same as the workgroup's size
layout(constant_id = 2) const uint COUNT = 8;
layout(constant_id = 3) const uint CHOSEN = 2;    // at most 16
layout(constant_id = 4) const uint NORMALISE = 0;
layout(constant_id = 5) const uint SHARED = 0;
layout(constant_id = 6) const uint AHEAD = 2;
layout(constant_id = 7) const uint COLUMNS = 32;
layout(constant_id = 8) const uint TAGGED = 0;

#include "fragments.glsl"
#include "tags.glsl"

layout(push_constant) uniform Args {
    Words4In weight;
    Words4In shared_weight;
    TaggedIn x;
    Floats4In norm;
    TaggedIn logits;
    TaggedInOut y;
    Fault fault;
    uint n;           // rows of an expert's matrix, a multiple of 16
    uint shared_n;    // of the shared expert's
    float epsilon;
    uint x_tag;
    uint logits_tag;
    uint y_tag;
};

const uint ROWS = 1u;
const uint logits_stride = 0u;
const uint GROUPS = LANES / 32u;
const uint CHUNKS = (COLUMNS + 31u) / 32u;
const uint ROUNDS = (CHUNKS + GROUPS * AHEAD - 1u) / (GROUPS * AHEAD);
const uint QUADS = CHUNKS * 8u;
const uint WORDS = AHEAD * 2u;                    // of weights in flight, a lane
const uint LOADS = (QUADS + LANES - 1u) / LANES;
// Sums of squares that invocations leave each other.
#if MATRIX == 1
const uint SQUARES = GROUPS;
#else
const uint SQUARES = GROUPS * 32u;
#endif

shared uvec4 x_s[QUADS];                          // both parts of four columns
shared vec4 sums_s[2u * GROUPS * 4u];
shared float squares_s[SQUARES];
shared uint ids_s[CHOSEN];
shared float shares_s[CHOSEN];
shared float gates_s[1];

const bool SHARES = true;
#include "choose.glsl"

#if MATRIX == 1
#define PUT_TWO(at, words) TaggedOut2(y).v[(at) / 2u] = words;
#else
// Components are constant: some drivers store a chosen one by way of the whole vector.
#define PUT_TWO(at, words) if ((at) % 4u == 0u) y.v[(at) / 4u].xy = words; else y.v[(at) / 4u].zw = words;
#endif

// Words of the shared expert's weights or of the others'. Not every driver knows a chosen address; on others a chosen
// word would be a load of its own behind a branch.
#if MATRIX == 1
#define WEIGHTS_OF(other) Words4In from_ = SHARED == 1u && (other) ? shared_weight : weight;
#define LOAD_WEIGHT(other, at) from_.v[at]
#else
#define WEIGHTS_OF(other)
#define LOAD_WEIGHT(other, at) load_weight(other, at)
uvec4 load_weight(bool other, uint at) {
    uvec4 word;
    if (SHARED == 1u && other) word = shared_weight.v[at];
    else word = weight.v[at];
    return word;
}
#endif

uint shared_blocks() { return SHARED == 1u ? shared_n / 16u : 0u; }

// Weights of a round of a block: those of the shared expert come first.
void load(out uvec4 w[WORDS], uint block, uint round) {
    uint first = shared_blocks(), each = n / 16u;
    bool other = block < first;
    uint inside = block - first;
    uint row_block = other ? block : ids_s[min(inside / each, CHOSEN - 1u)] * each + inside % each;
    WEIGHTS_OF(other)
    [[unroll]] for (uint u = 0u; u < AHEAD; u++) {
        // Past the last chunk the last one's weights meet zeros.
        uint chunk = min((round * AHEAD + u) * GROUPS + LANE_GROUP, CHUNKS - 1u);
        uint at = (row_block * CHUNKS + chunk) * 64u + LANE;
        w[u * 2u] = LOAD_WEIGHT(other, at);
        w[u * 2u + 1u] = LOAD_WEIGHT(other, at + 32u);
    }
}

void multiply(inout Sums sums, uvec4 w[WORDS], uint round) {
    [[unroll]] for (uint u = 0u; u < AHEAD; u++) {
        uint chunk = (round * AHEAD + u) * GROUPS + LANE_GROUP;
        bool there = CHUNKS % (GROUPS * AHEAD) == 0u || chunk < CHUNKS;
        [[unroll]] for (uint h = 0u; h < 2u; h++) {
            uvec4 parts = x_s[min(chunk, CHUNKS - 1u) * 8u + (LANE & 3u) * 2u + h];
            if (!there) parts = uvec4(0u);
            Tokens a;
            SET_TOKENS(a, parts.xy, parts.zw)
            Weights m;
            SET_WEIGHTS(m, w[u * 2u + h])
            MULTIPLY_ADD(sums, a, m)
        }
    }
}

// Adds up what the groups have of a block and stores it.
void finish(Sums sums, uint block, uint turn, float scale) {
    uint half_ = (turn & 1u) * GROUPS * 4u;
    // The same sums stand for every token: those of the first are kept.
    if (LANE < 4u) sums_s[half_ + LANE_GROUP * 4u + LANE] = SUMS_LOW(sums) + SUMS_HIGH(sums);
    barrier();
    if (gl_LocalInvocationIndex < 4u) {
        vec4 v = vec4(0.0);
        [[unroll]] for (uint i = 0u; i < GROUPS; i++) v += sums_s[half_ + i * 4u + gl_LocalInvocationIndex];
        uint first = shared_blocks(), each = n / 16u, inside = block - first;
        bool other = block < first;
        uint choice = other ? CHOSEN : inside / each;
        uint row = (other ? block : inside % each) * 16u + gl_LocalInvocationIndex * 4u;
        v *= scale;
        vec2 result = v.xz / (1.0 + exp(-v.xz)) * v.yw;
        result *= SHARED == 1u && other ? gates_s[0] : shares_s[min(choice, CHOSEN - 1u)] / total_of(0u);
        uint to = choice * ((n / 2u + 31u) / 32u * 32u) + row / 2u;
        uvec2 words = TAGGED == 1u ? uvec2(tagged(result.x, y_tag), tagged(result.y, y_tag)) : floatBitsToUint(result);
        PUT_TWO(to, words)
    }
}

void main() {
    uint polls = 0u;
    uint blocks = shared_blocks() + CHOSEN * (n / 16u);
    uint step_ = gl_NumWorkGroups.x, block = gl_WorkGroupID.x;

    uvec4 words[LOADS];
    vec4 weights[LOADS];
    uint column[LOADS];
    [[unroll]] for (uint i = 0u; i < LOADS; i++) {
        column[i] = min(i * LANES + gl_LocalInvocationIndex, COLUMNS / 4u - 1u);
        weights[i] = norm.v[column[i]];
    }
#if MATRIX == 1
    if (TAGGED == 0u) {
        // Loads that the near cache may serve: nobody writes x meanwhile where it is not tagged.
        [[unroll]] for (uint i = 0u; i < LOADS; i++) words[i] = Words4In(x).v[column[i]];
    } else
#endif
    {
        uint bad;
        do {
            bad = 0u;
            [[unroll]] for (uint i = 0u; i < LOADS; i++) words[i] = x.v[column[i]];
            if (TAGGED == 1u) [[unroll]] for (uint i = 0u; i < LOADS; i++) bad |= stale(words[i], x_tag);
        } while (TAGGED == 1u && poll_again(subgroupAny(bad != 0u), polls, fault));
    }
    float square = 0.0;
    [[unroll]] for (uint i = 0u; i < LOADS; i++) {
        uint quad = i * LANES + gl_LocalInvocationIndex;
        vec4 value = quad * 4u < COLUMNS ? uintBitsToFloat(words[i]) : vec4(0.0);
        square += dot(value, value);
        value = quad * 4u < COLUMNS ? value * weights[i] : vec4(0.0);
        uvec4 parts;
        split_pair(value.x, value.y, parts.x, parts.z);
        split_pair(value.z, value.w, parts.y, parts.w);
        if (quad < QUADS) x_s[quad] = parts;
    }
#if MATRIX == 1
    square = subgroupAdd(square);
    if (LANE == 0u) squares_s[LANE_GROUP] = square;
#else
    squares_s[gl_LocalInvocationIndex] = square;
#endif
    choose_for_rows(polls);
    barrier();
    if (block >= blocks) return;
    square = 0.0;
    for (uint i = 0u; i < SQUARES; i++) square += squares_s[i];
    float scale = inversesqrt(square / float(COLUMNS) + epsilon);

    uvec4 w[WORDS];
    load(w, block, 0u);
    Sums sums = NO_SUMS;
    uint turn = 0u, round = 0u;
    [[dont_unroll]] while (true) {
        multiply(sums, w, round);
        bool ended = round == ROUNDS - 1u;
        uint this_block = block;
        if (ended) block += step_;
        round = ended ? 0u : round + 1u;
        if (block >= blocks) break;
        load(w, block, round);
        if (ended) {
            finish(sums, this_block, turn, scale);
            sums = NO_SUMS;
            turn++;
        }
    }
    finish(sums, block - step_, turn, scale);
}
