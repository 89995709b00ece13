#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// Flash attention for prefill, on matrix blocks, optionally with split-K over the context:
//   o[r, h] = softmax(q[r, h] · Kᵀ / sqrt(D)) · V    over the pages of row r's prompt up to the position of row r
// Variants of the scores, which are all constants: `scores.glsl`.
//
// qkv    [rows][stride] f32: q heads, normalized and rotated; k and v heads, which are not read. GATED 1: then a gate
//        for each value of the output, which is multiplied by the gate's sigmoid
// chunk  descriptor of the prompt step: `kernels::embed::ChunkLayout`; the rows of a prompt are consecutive positions.
//        The rows of a prompt without a slot are not in use
// k, v   KV cache pages of f16, or with KV 2 of 8-bit codes: `kv.glsl`;  pages [slots][max_pages]
// o      [rows][output_stride] f32; rows that are not in use are left unchanged
//
// One workgroup serves a tile of ROWS (row, query head) pairs of one prompt and one KV head: pair i is row i / G of the
// prompt and head i % G of the GQA group. Each group of 32 lanes has 16 pairs. The workgroup iterates in blocks over
// all tokens up to the tile's last row. Keys and values go through shared memory: the next block's keys are loaded
// while values are accumulated, and values while scores are computed. The online softmax's maxima and sums stay in
// registers from block to block. A lane's scores have the layout of the second product's first operand, so the softmax
// weights never leave their lane. q and the weights are rounded to f16; all sums are f32. D is a multiple of 32.
// Where tiles are few and contexts are long (the end of a prompt whose beginning was in the prefix cache), several
// workgroups share a tile's tokens: each writes the maximum, sum and output of every lane to `partials`, and the last
// to arrive combines them in the order of their numbers.
// With 8-bit codes, shared memory has the codes as f16 integers, and the scales: that of a key multiplies its score, and
// that of a value its weight. Weights are kept relative to the largest scale so far, so that their f16 parts lose no bits
// to small scales. `append` has multiplied q by the Hadamard matrix of `kv.glsl`.
// Traffic: 4·D bytes per token and tile (f16), 2·D + 8 (codes).
#define WEIGHT 1
#define CACHE_BY_16_BYTES
#include "common.glsl"
#include "kv.glsl"
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
layout(constant_id = 4) const uint LANES = 128; // the workgroup's size, a multiple of 32
layout(constant_id = 5) const uint SPLITS = 1;  // maximum number of workgroups per tile
layout(constant_id = 6) const uint GATED = 0;
layout(constant_id = 7) const uint SCALE = 0;
layout(constant_id = 8) const uint WINDOW = 0;
layout(constant_id = 9) const uint SOFT_CAP = 0;
layout(constant_id = 10) const uint SINKS = 0;
const uint QUERY_SCALES = 0u; // `append` has applied them

#include "fragments.glsl"
#include "scores.glsl"
#if KV == 2
#include "code_halves.glsl"
#endif

layout(buffer_reference, std430, buffer_reference_align = 8) writeonly restrict buffer Floats2Out { vec2 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) buffer Partials { coherent vec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer Counters { coherent uint v[]; };

layout(push_constant) uniform Args {
    Floats4In qkv;
    Words4In chunk;
    WordsIn pages;
    Words4In k;
    Words4In v;
    Floats2Out o;
    Partials partials;   // [kv heads][parts][D / 8 + 1][LANES]: outputs of two pairs, then their m and l
    Counters counters;   // [kv heads][parts], zero between uses
    FloatsIn sinks;      // [q heads], with SINKS 1
    uint stride;
    uint output_stride;
    uint max_pages;
    uint parts;          // maximum number of tiles times workgroups per tile
};

// The number of tokens in a block: as many as shared memory holds.
#if MATRIX == 1
const uint BLOCK = D <= 128u ? 64u : 32u;
#else
const uint BLOCK = D <= 128u ? 32u : 16u;
#endif
const uint ROWS = LANES / 2u;
const uint EIGHTS = D / 8u;
const uint PARTS = BLOCK / 16u;                        // pages of a block
const uint WORDS = BLOCK * EIGHTS;                     // 16-byte words of a block's keys, and of its values
#if KV == 2
const uint LOADED = WORDS / 2u;                        // as the cache has them
#else
const uint LOADED = WORDS;
#endif
const uint STAGED = (LOADED + LANES - 1u) / LANES;     // of those, words per invocation
// Strides in 16-byte words: from eight dimensions of 16 tokens to the next eight, and from a token's values to the next
// token's. They are chosen so that addresses that are read at the same time are in different banks.
const uint K_STRIDE = 18u;
const uint V_STRIDE = EIGHTS + 1u;
const float LOWEST = -3.0e38;
const float LOG2_E = 1.4426950408889634;
// The minimum number of blocks per workgroup where several workgroups share a tile.
const uint LEAST_BLOCKS = 4u;

shared uint arrived_s;
shared uvec4 k_s[PARTS * EIGHTS * K_STRIDE];           // [page][D/8][16 tokens]
shared uvec4 v_s[BLOCK * V_STRIDE];                    // [token][D/8]
#if KV == 2
shared vec4 scale_s[BLOCK / 2u];                       // of the block's keys, then values: [page][t] of tokens 2t, 2t + 1, 2t + 8, 2t + 9
#endif

// Executes `body` for each word that this invocation stages: `w_` is the word's number in the block, `i_` its index
// among the invocation's words.
#define EACH_STAGED(body)                                                       \
    UNROLL for (uint i_ = 0u; i_ < STAGED; i_++) {                              \
        uint w_ = i_ * LANES + gl_LocalInvocationIndex;                         \
        if (LOADED % LANES == 0u || w_ < LOADED) { body }                       \
    }

// Returns the page that holds part of a block. Pages beyond the one that holds token `last` are replaced by it.
uint page_of(uint table, uint last, uint block, uint part) { return pages.v[table + min(block * PARTS + part, last / 16u)]; }

#if KV == 2
// Returns the index of word `w` of block `block` in either cache.
uint cached(uint table, uint kvh, uint last, uint block, uint w) {
    return page_of(table, last, block, w / D) * PAGE_WORDS + kvh * D + w % D;
}
// A word holds eight dimensions of token n and of token n + 8 of a page.
#define STORE_KEYS                                                                                  \
    EACH_STAGED(                                                                                    \
        uint at_ = (w_ / 8u) * K_STRIDE + w_ % 8u;                                                  \
        k_s[at_] = uvec4(halves_of(staged[i_].x), halves_of(staged[i_].y));                         \
        k_s[at_ + 8u] = uvec4(halves_of(staged[i_].z), halves_of(staged[i_].w));)                   \
    if (gl_LocalInvocationIndex < BLOCK / 2u) scale_s[gl_LocalInvocationIndex] = scales;
// Codes of tokens that no row sees are finite, and their scales are zero.
#define STORE_VALUES(first)                                                                         \
    EACH_STAGED(                                                                                    \
        uint at_ = (w_ / D * 16u + w_ % D / EIGHTS) * V_STRIDE + w_ % EIGHTS;                       \
        v_s[at_] = uvec4(halves_of(staged[i_].x), halves_of(staged[i_].y));                         \
        v_s[at_ + 8u * V_STRIDE] = uvec4(halves_of(staged[i_].z), halves_of(staged[i_].w));)

// Loads this invocation's scales of a block: four of keys, or four of values. Those of tokens past `last`, or before the
// first that a row of the tile sees, may be anything and are replaced by zeros.
#define LOAD_SCALES(block) {                                                                        \
        uint i_ = min(gl_LocalInvocationIndex, BLOCK / 2u - 1u), at_ = i_ % (BLOCK / 4u);           \
        uint word_ = page_of(table, last, block, at_ / 4u) * PAGE_WORDS + KV_HEADS * D + kvh * 4u + at_ % 4u; \
        uvec4 words_ = i_ < BLOCK / 4u ? k.v[word_] : v.v[word_];                                   \
        uvec4 tokens_ = (block) * BLOCK + at_ / 4u * 16u + at_ % 4u * 2u + uvec4(0u, 1u, 8u, 9u);   \
        bvec4 there_ = lessThanEqual(tokens_, uvec4(last));                                         \
        if (WINDOW > 0u) there_ = lessThanEqual(tokens_ - low, uvec4(last - low));                  \
        scales = mix(vec4(0.0), uintBitsToFloat(words_), there_);                                   \
    }
#else
// Returns the index of word `w` of block `block` in either cache.
uint cached(uint table, uint kvh, uint last, uint block, uint w) {
    return (page_of(table, last, block, w / (2u * D)) * KV_HEADS + kvh) * 2u * D + w % (2u * D);
}
#define STORE_KEYS EACH_STAGED(k_s[(w_ / 16u) * K_STRIDE + w_ % 16u] = staged[i_];)
// Tokens past `last` and tokens that no row sees may hold anything, also NaN or infinity, whose product with a zero weight
// is not zero. They are replaced by zeros.
#define STORE_VALUES(first)                                                                         \
    EACH_STAGED(                                                                                    \
        bool there_ = (first) + BLOCK <= last + 1u || (first) + w_ / EIGHTS <= last;                \
        if (WINDOW > 0u) there_ = there_ && (first) + w_ / EIGHTS >= low;                           \
        v_s[(w_ / EIGHTS) * V_STRIDE + w_ % EIGHTS] = there_ ? staged[i_] : uvec4(0u);)
#define LOAD_SCALES(block)
#endif

#define LOAD(cache, block) EACH_STAGED(staged[i_] = cache.v[cached(table, kvh, last, block, w_)];)

// Loads values of 16 tokens from `token` on and 16 dimensions from `dim` on. The dimensions take the place of the rows
// of W: a lane has the sums of dimensions 2t, 2t + 1, 2t + 8 and 2t + 9.
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

// Reductions over the four lanes that share two pairs.
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
// Call in uniform control flow, like the products.
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

// Returns the number of the first tile of prompt `index`, whose first row is `row` of the step. The tiles of the prompts
// before it have lower numbers, as each prompt has at most one tile that is not full; some numbers are of no tile.
uint first_tile(uint index, uint row) { return row * G / ROWS + index; }

float max4(vec4 x) { return max(max(x.x, x.y), max(x.z, x.w)); }
float sum4(vec4 x) { return (x.x + x.y) + (x.z + x.w); }
uvec2 pack4(vec4 x) { return uvec2(pack_pair(x.x, x.y), pack_pair(x.z, x.w)); }

// Returns the index of this invocation's first word in part `part` of `partials`.
uint part_at(uint part) { return part * (D / 8u + 1u) * LANES + gl_LocalInvocationIndex; }

// Returns 1 + exp(-gate), the divisor of the output, for dimensions 2t, 2t + 1, 2t + 8 and 2t + 9 of the 16 from
// `first` on of a row.
vec4 gate(uint row, uint first, uint t) {
    uint at = (row * stride + first + t * 2u) / 4u;
    vec4 a = qkv.v[at], b = qkv.v[at + 2u];
    return 1.0 + exp(-(t % 2u == 0u ? vec4(a.xy, b.xy) : vec4(a.zw, b.zw)));
}

// Writes the lane's dimensions of the 16 from 16i on, for its first and its second pair.
#define WRITE_OUTPUT(i, low_, high_) {                                                       \
        uvec2 at_ = ((prompt.z + row) * output_stride + head * D) / 2u + t + (i) * 8u;       \
        vec4 a_ = (low_) / l.x, b_ = (high_) / l.y;                                          \
        if (GATED == 1u) {                                                                   \
            uvec2 gates_ = (KV_HEADS * (G + 2u) + head) * D + (i) * 16u;                     \
            a_ /= gate(prompt.z + row.x, gates_.x, t);                                       \
            b_ /= gate(prompt.z + row.y, gates_.y, t);                                       \
        }                                                                                    \
        if (pair.x < in_use * G) { o.v[at_.x] = a_.xy; o.v[at_.x + 4u] = a_.zw; }            \
        if (pair.y < in_use * G) { o.v[at_.y] = b_.xy; o.v[at_.y + 4u] = b_.zw; }            \
    }

void main() {
    uint kvh = gl_WorkGroupID.x;
    // A prompt's last tiles have the longest contexts, so they come first.
    uint number = gl_NumWorkGroups.y - 1u - gl_WorkGroupID.y;
    uint prompts = chunk.v[0].x, index = 0u, end = prompts;
    while (end - index > 1u) {
        uint middle = (index + end) / 2u;
        if (first_tile(middle, chunk.v[1u + middle].z) <= number) index = middle; else end = middle;
    }
    uvec4 prompt = chunk.v[1u + index]; // slot, position of the first row, first row
    uint in_use = (index + 1u < prompts ? chunk.v[2u + index].z : chunk.v[0].z) - prompt.z;
    uint tile = (number - first_tile(index, prompt.z)) * ROWS;
    if (tile >= in_use * G || prompt.x == 0xffffffffu) return;
    uint start = prompt.y;
    uint table = prompt.x * max_pages;
    uint last = start + min((tile + ROWS - 1u) / G, in_use - 1u); // position of the tile's last row
    uint open = start + tile / G;                                 // its first row's position; no mask up to this token
    uint low = first_visible(open);                        // the first token that a row of the tile sees
    uint first_block = low / BLOCK;
    uint blocks = last / BLOCK + 1u - first_block;
    uint final_row = chunk.v[prompts].z; // the last prompt's first row
    uint tiles = first_tile(prompts - 1u, final_row) + ((chunk.v[0].z - final_row) * G + ROWS - 1u) / ROWS;
    uint most_sharers = SPLITS > 1u ? min(SPLITS, max(parts / max(tiles, 1u), 1u)) : 1u;
    uint sharers = min(most_sharers, max(blocks / LEAST_BLOCKS, 1u));
    uint share = (blocks + sharers - 1u) / sharers;
    sharers = (blocks + share - 1u) / share;
    if (gl_WorkGroupID.z >= sharers) return;
    uint block_begin = first_block + gl_WorkGroupID.z * share, block_end = min(block_begin + share, first_block + blocks);
    uint g = LANE >> 2, t = LANE & 3u;
    // The lane's two pairs. Pairs past the end repeat the last row.
    uvec2 pair = tile + LANE_GROUP * 16u + g + uvec2(0u, 8u);
    uvec2 row = min(pair / G, uvec2(in_use - 1u));
    uvec2 position = start + row;
    uvec2 head = kvh * G + pair % G;

    uvec4 staged[STAGED];
#if KV == 2
    vec4 scales;
    float unit = LEAST_VALUE; // the largest scale of values so far: sums are in this unit
#endif
    LOAD(k, block_begin)
    LOAD_SCALES(block_begin)
    // The factor log2(e) is part of the scale, so that the softmax uses exp2, which the hardware provides. Scores that are
    // capped get it afterwards.
    float scale = (SOFT_CAP == 0u ? LOG2_E : 1.0) * score_scale(D);
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
    vec2 m = vec2(LOWEST); // maxima of the lane's two pairs
    vec2 l = vec2(0.0);    // the lane's part of their sums
    if (SINKS == 1u && gl_WorkGroupID.z == 0u) {
        // A sink is a score without a value: the first workgroup of a tile begins with it.
        m = LOG2_E * vec2(sinks.v[head.x], sinks.v[head.y]);
        l = vec2(t == 0u ? 1.0 : 0.0);
    }
    for (uint block = block_begin; block < block_end; block++) {
        uint first = block * BLOCK;
        barrier();
        LOAD(v, block)

        Sums scores[PARTS];
        UNROLL for (uint j = 0u; j < PARTS; j++) scores[j] = NO_SUMS;
        UNROLL_PRODUCTS for (uint c = 0u; c < D / 32u; c++) {
            UNROLL_PRODUCTS for (uint j = 0u; j < PARTS; j++) {
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
        vec4 above[PARTS], below[PARTS]; // of the lane's first and second pair
        UNROLL for (uint j = 0u; j < PARTS; j++) {
            above[j] = SUMS_LOW(scores[j]);
            below[j] = SUMS_HIGH(scores[j]);
#if KV == 2
            above[j] *= scale_s[j * 4u + t];
            below[j] *= scale_s[j * 4u + t];
#endif
            if (SOFT_CAP != 0u) {
                above[j] = LOG2_E * soft_cap(above[j]);
                below[j] = LOG2_E * soft_cap(below[j]);
            }
        }
        if (first + BLOCK > open + 1u) {
            UNROLL for (uint j = 0u; j < PARTS; j++) {
                uvec4 token = first + j * 16u + 2u * t + uvec4(0u, 1u, 8u, 9u);
                above[j] = mix(above[j], vec4(LOWEST), greaterThan(token, uvec4(position.x)));
                below[j] = mix(below[j], vec4(LOWEST), greaterThan(token, uvec4(position.y)));
            }
        }
        if (WINDOW > 0u && first + WINDOW <= last) {
            uvec2 from = uvec2(first_visible(position.x), first_visible(position.y));
            UNROLL for (uint j = 0u; j < PARTS; j++) {
                uvec4 token = first + j * 16u + 2u * t + uvec4(0u, 1u, 8u, 9u);
                above[j] = mix(above[j], vec4(LOWEST), lessThan(token, uvec4(from.x)));
                below[j] = mix(below[j], vec4(LOWEST), lessThan(token, uvec4(from.y)));
            }
        }
        vec2 top = m;
        UNROLL for (uint j = 0u; j < PARTS; j++) top = max(top, vec2(max4(above[j]), max4(below[j])));
        top = max_of_pairs(top);
        vec2 correction = exp2(m - top);
        m = top;
        l *= correction;
#if KV == 2
        // The largest scale of the block's values: each of four lanes has a part of its tokens.
        float largest = unit;
        UNROLL for (uint j = 0u; j < PARTS; j++) largest = max(largest, max4(scale_s[BLOCK / 4u + j * 4u + t]));
        largest = max_of_pairs(vec2(largest)).x;
        correction *= largest > unit ? unit / largest : 1.0;
        unit = largest;
#endif
        Tokens weights[PARTS];
        UNROLL for (uint j = 0u; j < PARTS; j++) {
            above[j] = exp2(above[j] - top.x);
            below[j] = exp2(below[j] - top.y);
            l += vec2(sum4(above[j]), sum4(below[j]));
#if KV == 2
            vec4 value_scales = scale_s[BLOCK / 4u + j * 4u + t] * (1.0 / largest);
            above[j] *= value_scales;
            below[j] *= value_scales;
#endif
            uvec2 a = pack4(above[j]), b = pack4(below[j]);
            SET_TOKENS(weights[j], a, b)
        }
        UNROLL for (uint i = 0u; i < D / 16u; i++) SCALE_SUMS(sums[i], correction.x, correction.y)

        STORE_VALUES(first)
        barrier();
        // After the last block this loads the page of token `last` again: a branch here would make the invocation wait
        // for the load.
        LOAD(k, block + 1u)
        LOAD_SCALES(block + 1u)
        UNROLL_PRODUCTS for (uint j = 0u; j < PARTS; j++) {
            UNROLL_PRODUCTS for (uint i = 0u; i < D / 16u; i++) {
                Weights value;
                LOAD_VALUES(value, j * 16u, i * 16u)
                MULTIPLY_ADD(sums[i], weights[j], value)
            }
        }
        STORE_KEYS
    }

#if KV == 2
    UNROLL for (uint i = 0u; i < D / 16u; i++) SCALE_SUMS(sums[i], unit, unit)
#endif
    l = sum_of_pairs(l);
    if (SPLITS > 1u && sharers > 1u) {
        uint first_part = kvh * parts + number * most_sharers;
        uint own = part_at(first_part + gl_WorkGroupID.z);
        UNROLL for (uint i = 0u; i < D / 16u; i++) {
            partials.v[own + 2u * i * LANES] = SUMS_LOW(sums[i]);
            partials.v[own + (2u * i + 1u) * LANES] = SUMS_HIGH(sums[i]);
        }
        partials.v[own + D / 8u * LANES] = vec4(m, l);
        // Release the partial results and count; the last workgroup to arrive acquires all of them.
        memoryBarrierBuffer();
        barrier();
        if (gl_LocalInvocationIndex == 0u) arrived_s = atomicAdd(counters.v[first_part], 1u) + 1u;
        barrier();
        if (arrived_s != sharers) return;
        memoryBarrierBuffer();
        if (gl_LocalInvocationIndex == 0u) counters.v[first_part] = 0u;
        vec2 top = vec2(LOWEST);
        for (uint s = 0u; s < sharers; s++) top = max(top, partials.v[part_at(first_part + s) + D / 8u * LANES].xy);
        l = vec2(0.0);
        for (uint s = 0u; s < sharers; s++) {
            vec4 state = partials.v[part_at(first_part + s) + D / 8u * LANES];
            l += exp2(state.xy - top) * state.zw;
        }
        for (uint i = 0u; i < D / 16u; i++) {
            vec4 a = vec4(0.0), b = vec4(0.0);
            for (uint s = 0u; s < sharers; s++) {
                uint at = part_at(first_part + s);
                // A pair that sees none of a share's tokens has weight zero there.
                vec2 weight = exp2(partials.v[at + D / 8u * LANES].xy - top);
                a += weight.x * partials.v[at + 2u * i * LANES];
                b += weight.y * partials.v[at + (2u * i + 1u) * LANES];
            }
            WRITE_OUTPUT(i, a, b)
        }
        return;
    }
    UNROLL for (uint i = 0u; i < D / 16u; i++) WRITE_OUTPUT(i, SUMS_LOW(sums[i]), SUMS_HIGH(sums[i]))
}
