#version 460
#extension GL_GOOGLE_include_directive : require
// o[r, h] = softmax(q[r, h] · Kᵀ / sqrt(D)) · V over the pages of row r's prompt up to the position of row r.
//
// qkv    [rows][stride] f32: q heads, normalised and rotated; what follows them is not read
// chunk  descriptor of the step: `kernels::embed::ChunkLayout`; rows of a prompt are consecutive positions
// k, v   cache pages of f16: `kv.glsl`;  pages [slots][max_pages]
// o      [rows][output_stride] f32; rows that are not in use are left as they are
//
// A workgroup serves a tile of ROWS pairs of (row, query head) of one prompt and one KV head, counted through: pair
// i is row i / G of the prompt, head i % G of the group. 32 lanes have 16 pairs. It goes over all tokens up to its last row's in blocks,
// whose keys and values come through shared memory: keys of the next block are on their way while values
// are summed, values while scores are. Maxima and sums of the softmax are kept in registers from block to
// block. A lane's scores are what it needs as tokens of the second product, so weights of tokens never move.
// q and the weights are rounded to f16, all sums are f32. D is a multiple of 32.
// Traffic: 4·D bytes a token and workgroup.
#define WEIGHT 1
#include "common.glsl"
#if MATRIX == 1
#extension GL_KHR_shader_subgroup_shuffle : require
#define UNROLL [[unroll]]
#else
#define UNROLL
#endif

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint D = 128;
layout(constant_id = 2) const uint G = 4;
layout(constant_id = 3) const uint KV_HEADS = 8;
layout(constant_id = 4) const uint LANES = 128; // the same as the workgroup's size; a multiple of 32

#include "fragments.glsl"

layout(buffer_reference, std430, buffer_reference_align = 8) writeonly restrict buffer Floats2Out { vec2 v[]; };

layout(push_constant) uniform Args {
    Floats4In qkv;
    Words4In chunk;
    WordsIn pages;
    Words4In k;
    Words4In v;
    Floats2Out o;
    uint stride;
    uint output_stride;
    uint max_pages;
};

// Tokens of a block: as many as shared memory holds.
#if MATRIX == 1
const uint BLOCK = D <= 128u ? 64u : 32u;
#else
const uint BLOCK = D <= 128u ? 32u : 16u;
#endif
const uint ROWS = LANES / 2u;
const uint EIGHTS = D / 8u;
const uint PARTS = BLOCK / 16u;                        // pages of a block
const uint WORDS = BLOCK * EIGHTS;                     // 16-byte words of a block's keys, and of its values
const uint STAGED = (WORDS + LANES - 1u) / LANES;      // of these, a thread's
// 16-byte words from eight dims of 16 tokens to the next, and from a token's values to the next: no two
// of the addresses that are read at a time share a bank.
const uint K_STRIDE = 18u;
const uint V_STRIDE = EIGHTS + 1u;
const float LOWEST = -3.0e38;

shared uvec4 k_s[PARTS * EIGHTS * K_STRIDE];           // [page][D/8][16 tokens]
shared uvec4 v_s[BLOCK * V_STRIDE];                    // [token][D/8]

// Calls `body` with the number `w_` in a block of each word that the thread stages, which is its `i_`-th.
#define EACH_STAGED(body)                                                       \
    UNROLL for (uint i_ = 0u; i_ < STAGED; i_++) {                              \
        uint w_ = i_ * LANES + gl_LocalInvocationIndex;                         \
        if (WORDS % LANES == 0u || w_ < WORDS) { body }                         \
    }

// Word `w` of block `block` in either cache. Pages past the one that holds token `last` read that.
uint cached(uint table, uint kvh, uint last, uint block, uint w) {
    uint page = pages.v[table + min(block * PARTS + w / (2u * D), last / 16u)];
    return (page * KV_HEADS + kvh) * 2u * D + w % (2u * D);
}

#define LOAD(cache, block) EACH_STAGED(staged[i_] = cache.v[cached(table, kvh, last, block, w_)];)
#define STORE_KEYS EACH_STAGED(k_s[(w_ / 16u) * K_STRIDE + w_ % 16u] = staged[i_];)
// Tokens past `last` may hold anything, and zero times that is not always zero.
#define STORE_VALUES(first)                                                                         \
    EACH_STAGED(                                                                                    \
        bool there_ = (first) + BLOCK <= last + 1u || (first) + w_ / EIGHTS <= last;                \
        v_s[(w_ / EIGHTS) * V_STRIDE + w_ % EIGHTS] = there_ ? staged[i_] : uvec4(0u);)

// Values of 16 tokens from `token` on and 16 dims from `dim` on; dims take the place of W's rows: a lane
// has sums of dims 2t, 2t + 1, 2t + 8 and 2t + 9.
#if MATRIX == 1
#define LOAD_VALUES(m, token, dim) \
    coopMatLoad(m, v_s, (token) * V_STRIDE + (dim) / 8u, V_STRIDE, gl_CooperativeMatrixLayoutRowMajor);
#else
uint value_bits(uint token, uint dim) {
    uint word = v_s[token * V_STRIDE + dim / 8u][(dim % 8u) / 2u];
    return (dim & 1u) == 0u ? word & 0xffffu : word >> 16;
}
uint value_pair(uint token, uint dim) { return value_bits(token, dim) | value_bits(token + 1u, dim) << 16; }
uvec4 values(uint token, uint dim) {
    token += 2u * (LANE & 3u);
    dim += LANE >> 2;
    return uvec4(value_pair(token, dim), value_pair(token + 8u, dim),
                 value_pair(token, dim + 8u), value_pair(token + 8u, dim + 8u));
}
#define LOAD_VALUES(m, token, dim) m = values(token, dim);
#endif

// Over the four lanes that share two pairs.
#if MATRIX == 1
vec2 max_of_pairs(vec2 x) {
    x = max(x, subgroupShuffleXor(x, 1u));
    return max(x, subgroupShuffleXor(x, 2u));
}
vec2 sum_of_pairs(vec2 x) {
    x += subgroupShuffleXor(x, 1u);
    return x + subgroupShuffleXor(x, 2u);
}
#else
// In uniform control flow, as products are.
void exchange(vec2 x, out vec2 others[4]) {
    barrier();
    exchange_tokens[gl_LocalInvocationIndex].xy = floatBitsToUint(x);
    barrier();
    for (uint i = 0u; i < 4u; i++) others[i] = uintBitsToFloat(exchange_tokens[(gl_LocalInvocationIndex & ~3u) + i].xy);
}
vec2 max_of_pairs(vec2 x) {
    vec2 of[4];
    exchange(x, of);
    return max(max(of[0], of[1]), max(of[2], of[3]));
}
vec2 sum_of_pairs(vec2 x) {
    vec2 of[4];
    exchange(x, of);
    return of[0] + of[1] + of[2] + of[3];
}
#endif

float max4(vec4 x) { return max(max(x.x, x.y), max(x.z, x.w)); }
float sum4(vec4 x) { return (x.x + x.y) + (x.z + x.w); }
uvec2 pack4(vec4 x) { return uvec2(pack_pair(x.x, x.y), pack_pair(x.z, x.w)); }

void main() {
    uint kvh = gl_WorkGroupID.x;
    // The longest of a prompt first.
    uint number = gl_NumWorkGroups.y - 1u - gl_WorkGroupID.y;
    uint prompts = chunk.v[0].x, low = 0u, high = prompts;
    while (high - low > 1u) {
        uint middle = (low + high) / 2u;
        if (chunk.v[1u + middle].w <= number) low = middle; else high = middle;
    }
    uvec4 prompt = chunk.v[1u + low]; // slot, position of the first row, first row, first tile
    uint in_use = (low + 1u < prompts ? chunk.v[2u + low].z : chunk.v[0].z) - prompt.z;
    uint tile = (number - prompt.w) * ROWS;
    if (tile >= in_use * G) return;
    uint start = prompt.y;
    uint table = prompt.x * max_pages;
    uint last = start + min((tile + ROWS - 1u) / G, in_use - 1u); // the last row's position
    uint open = start + tile / G;                                 // the first row's: no pair masks tokens up to it
    uint g = LANE >> 2, t = LANE & 3u;
    // The lane's two pairs; those past the end repeat the last row.
    uvec2 pair = tile + LANE_GROUP * 16u + g + uvec2(0u, 8u);
    uvec2 row = min(pair / G, uvec2(in_use - 1u));
    uvec2 position = start + row;
    uvec2 head = kvh * G + pair % G;

    uvec4 staged[STAGED];
    LOAD(k, 0u)
    // Powers of two are what the hardware knows.
    float scale = 1.4426950408889634 * inversesqrt(float(D));
    Tokens q[D / 16u];
    UNROLL for (uint c = 0u; c < D / 32u; c++) {
        uvec2 at = ((prompt.z + row) * stride + head * D + c * 32u + t * 8u) / 4u;
        uvec2 a = pack4(qkv.v[at.x] * scale), b = pack4(qkv.v[at.x + 1u] * scale);
        uvec2 e = pack4(qkv.v[at.y] * scale), f = pack4(qkv.v[at.y + 1u] * scale);
        SET_TOKENS(q[2u * c], a, e)
        SET_TOKENS(q[2u * c + 1u], b, f)
    }
    STORE_KEYS

    Sums sums[D / 16u];
    UNROLL for (uint i = 0u; i < D / 16u; i++) sums[i] = NO_SUMS;
    vec2 m = vec2(LOWEST); // of the lane's two pairs
    vec2 l = vec2(0.0);    // the lane's part
    uint blocks = last / BLOCK + 1u;
    for (uint block = 0u; block < blocks; block++) {
        uint first = block * BLOCK;
        barrier();
        LOAD(v, block)

        Sums scores[PARTS];
        UNROLL for (uint j = 0u; j < PARTS; j++) scores[j] = NO_SUMS;
        UNROLL for (uint c = 0u; c < D / 32u; c++) {
            UNROLL for (uint j = 0u; j < PARTS; j++) {
                uint at = (j * EIGHTS + c * 4u + t) * K_STRIDE + g;
                uvec4 a = k_s[at], b = k_s[at + 8u];
                Weights key;
                SET_WEIGHTS(key, uvec4(a.xy, b.xy))
                MULTIPLY_ADD(scores[j], q[2u * c], key)
                SET_WEIGHTS(key, uvec4(a.zw, b.zw))
                MULTIPLY_ADD(scores[j], q[2u * c + 1u], key)
            }
        }

        // The lane has tokens 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16.
        vec4 low[PARTS], high[PARTS];
        UNROLL for (uint j = 0u; j < PARTS; j++) {
            low[j] = SUMS_LOW(scores[j]);
            high[j] = SUMS_HIGH(scores[j]);
        }
        if (first + BLOCK > open + 1u) {
            UNROLL for (uint j = 0u; j < PARTS; j++) {
                uvec4 token = first + j * 16u + 2u * t + uvec4(0u, 1u, 8u, 9u);
                low[j] = mix(low[j], vec4(LOWEST), greaterThan(token, uvec4(position.x)));
                high[j] = mix(high[j], vec4(LOWEST), greaterThan(token, uvec4(position.y)));
            }
        }
        vec2 top = m;
        UNROLL for (uint j = 0u; j < PARTS; j++) top = max(top, vec2(max4(low[j]), max4(high[j])));
        top = max_of_pairs(top);
        vec2 correction = exp2(m - top);
        m = top;
        l *= correction;
        Tokens weights[PARTS];
        UNROLL for (uint j = 0u; j < PARTS; j++) {
            low[j] = exp2(low[j] - top.x);
            high[j] = exp2(high[j] - top.y);
            l += vec2(sum4(low[j]), sum4(high[j]));
            uvec2 a = pack4(low[j]), b = pack4(high[j]);
            SET_TOKENS(weights[j], a, b)
        }
        UNROLL for (uint i = 0u; i < D / 16u; i++) SCALE_SUMS(sums[i], correction.x, correction.y)

        STORE_VALUES(first)
        barrier();
        // Past the last block this reads its last page once more: a branch here would make it wait.
        LOAD(k, block + 1u)
        UNROLL for (uint j = 0u; j < PARTS; j++) {
            UNROLL for (uint i = 0u; i < D / 16u; i++) {
                Weights value;
                LOAD_VALUES(value, j * 16u, i * 16u)
                MULTIPLY_ADD(sums[i], weights[j], value)
            }
        }
        STORE_KEYS
    }

    vec2 inverse = 1.0 / sum_of_pairs(l);
    uvec2 at = ((prompt.z + row) * output_stride + head * D) / 2u + t;
    bvec2 there = lessThan(pair, uvec2(in_use * G));
    UNROLL for (uint i = 0u; i < D / 16u; i++) {
        vec4 a = SUMS_LOW(sums[i]) * inverse.x, b = SUMS_HIGH(sums[i]) * inverse.y;
        if (there.x) {
            o.v[at.x + i * 8u] = a.xy;
            o.v[at.x + i * 8u + 4u] = a.zw;
        }
        if (there.y) {
            o.v[at.y + i * 8u] = b.xy;
            o.v[at.y + i * 8u + 4u] = b.zw;
        }
    }
}
