#version 460
#extension GL_GOOGLE_include_directive : require
#pragma use_vulkan_memory_model
// Flash attention for decode (flash-decoding), on matrix blocks, with split-K over the context, for one new token per
// row, or with NEW_TOKENS for so many rows with the next tokens of one sequence:
//   o[r, h] = softmax(q[r, h] · Kᵀ / sqrt(D)) · V    over the pages of row r's sequence up to the row's position
// Variants of the scores, which are all constants: `scores.glsl`.
// The kernel also normalizes q, k and v, rotates q and k and appends k and v to the cache: the same result as
// `attention.comp` with FUSED 1.
//
// qkv    [rows][stride] f32: q heads, k heads, v heads. GATED 1: then a gate for each value of the output, which is
//        multiplied by the gate's sigmoid
// k, v   KV cache pages of f16, or with KV 2 of 8-bit codes: `kv.glsl`;  pages [slots][max_pages];  rope [positions][ROT/2] of cos, sin
// output [rows][output_stride] f32. PACKED 1: 16-bit blocks as `pack_rows` writes them, `output_stride` in blocks of
//        32 columns. PACKED 2: as its variant SWIZZLED writes them, for `output_stride` rows
// TAGGED 3: qkv and output are tagged (`tags.glsl`). With tagged or packed output, a row without a sequence writes zeros
// PLANNED 1: `rows` is the work list of `plan_splits`, which gives a row a number of splits according to its length
//
// One workgroup serves G (at most 8) query heads (GQA) of one KV head of one row, or one split of its context. PARTS
// workgroups serve all G · PARTS query heads of the KV head, each with the same keys and values. A
// group of 32 lanes processes one page of 16 tokens at a time and keeps its own maximum, sum and output; the groups are
// combined at the end. Scores are the product of Q (16 rows: the two f16 parts of head g are rows g and g + 8) and a
// page of keys, 16 × 32 dimensions in two loads per lane. A lane's sums are then its part of Pᵀ, column g of a block of up to 8
// heads: the output is computed transposed, Vᵀ · Pᵀ, once for each of the two f16 parts of P, so that its blocks have as many
// columns as heads. The first page is loaded, and its values are in shared memory, before the workgroup polls for q. The new
// token, and those of the rows before it of the same sequence, are not read from pages, which other workgroups write meanwhile:
// split 0 adds them when the groups are combined.
// If there are several splits, they write {m, l, o} to `partials`. With WAITS 1 (tagged words only), workgroups that were
// launched later poll for these results and combine them: with COMBINERS 0 the split with the highest number, otherwise
// COMBINERS further workgroups, each of which combines a part of the output. With WAITS 0 the last split to arrive
// combines them. With either value of WAITS the output has the same bits.
// With 8-bit codes, a page's codes are multiplied as f16 integers: the scale of a key multiplies its score, and that of a
// value its weight. Weights are kept relative to the largest scale so far, so that their f16 parts lose no bits to small
// scales. q and the new key are multiplied by the Hadamard matrix of `kv.glsl`.
// Traffic: 4·D bytes per token and KV head (f16), 2·D + 8 (codes).
#extension GL_KHR_shader_subgroup_shuffle : require
#define WEIGHT 1
#define CACHE_BY_16_BYTES
#include "common.glsl"
#include "kv.glsl"
#define DEVICES_ID 20
#include "tags.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint LANES = 256;   // the workgroup's size
layout(constant_id = 2) const uint D = 128;       // a multiple of 32
layout(constant_id = 3) const uint ROT = 128;
layout(constant_id = 4) const uint G = 2;
layout(constant_id = 5) const uint KV_HEADS = 8;
layout(constant_id = 6) const uint QK_NORM = 0;
layout(constant_id = 7) const uint TAGGED = 0;
layout(constant_id = 8) const uint PLANNED = 0;
layout(constant_id = 9) const uint PACKED = 0;
layout(constant_id = 10) const uint GATED = 0;
layout(constant_id = 11) const uint WAITS = 0;
layout(constant_id = 12) const uint COMBINERS = 0; // workgroups after the splits of a row, or after all rows' splits
layout(constant_id = 13) const uint SCALE = 0;
layout(constant_id = 14) const uint WINDOW = 0;
layout(constant_id = 15) const uint SOFT_CAP = 0;
layout(constant_id = 16) const uint SINKS = 0;
layout(constant_id = 17) const uint QUERY_SCALES = 0;
layout(constant_id = 18) const uint V_NORM = 0;
layout(constant_id = 19) const uint PARTS = 1;
layout(constant_id = 21) const uint NEW_TOKENS = 1; // rows of a sequence: rows NEW_TOKENS · n to NEW_TOKENS · (n + 1) - 1

#include "fragments.glsl"
#include "swizzled.glsl"
const uint BOTH = 0u; // a row sees no later token
#include "scores.glsl"
#if KV == 2
#include "code_halves.glsl"
#endif

layout(buffer_reference, std430, buffer_reference_align = 16) buffer Partials { coherent volatile uvec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer Counters { coherent uint v[]; };
#if KV != 2
layout(buffer_reference, std430, buffer_reference_align = 8) writeonly restrict buffer Words2Out { uvec2 v[]; };
#endif

layout(push_constant) uniform Args {
    TaggedIn qkv;
    Words4In rows;
    FloatsIn q_norm;
    FloatsIn k_norm;
    FloatsIn rope;
    WordsIn pages;
    CacheInOut k;
    CacheInOut v;
    Partials partials;   // [rows][HEAD_GROUPS][splits][G·(D + 4)] or [units][HEAD_GROUPS][G·(D + 4)]: m, l, 0, 0 of each head, then o
    Counters counters;   // [rows][HEAD_GROUPS], zero between uses
    TaggedOut o;
    Fault fault;
    FloatsIn sinks;      // [q heads], with SINKS 1
    uint stride;
    uint output_stride;
    uint max_pages;
    float epsilon;
    uint qkv_tag;
    uint o_tag;
};

const uint GROUPS = LANES / 32u;
const uint HEAD_GROUPS = KV_HEADS * PARTS;        // groups of G query heads
const uint Q_HEADS = HEAD_GROUPS * G;
const uint QUADS = D / 4u;
const uint HALF = ROT / 2u;
const uint BLOCKS = D / 16u;
const uint ROW = D / 8u + 1u;                     // 16-byte words per staged token; spreads over the banks
const uint STAGED = 16u * ROW;                    // words per group; also as large as its output, with G at most 8
const uint OUTPUT_ROW = QUADS + 1u;               // 16-byte words per head of a group's output; spreads over the banks
// The heads that a workgroup reads: queries of its row, then keys and values of its sequence's new tokens, then gates.
const uint VALUES = G + NEW_TOKENS;
const uint GATES = VALUES + NEW_TOKENS;
const uint RAW = (GATES + GATED * G) * QUADS;
const uint RAW_LOADS = (RAW + LANES - 1u) / LANES;
const uint TURNED = VALUES * QUADS;               // quads of q and k
const uint TURNED_LOADS = (TURNED + LANES - 1u) / LANES;
// The number of quads whose squares are added by shuffles: a power of two that divides a head's number of quads.
#if MATRIX == 1
const uint LOW_BIT = QUADS & (~QUADS + 1u);
const uint JOINED = LOW_BIT < 32u ? LOW_BIT : 32u;
#else
const uint JOINED = 1u;
#endif
const uint ITEMS = G * QUADS;
// Invocations per part of the output of a combining workgroup, and the number of partial sums over the splits.
const uint SHARE = COMBINERS > 0u ? ITEMS / COMBINERS : LANES;
const uint SUMS = LANES / SHARE;
const uint TURNS = (ITEMS + LANES - 1u) / LANES;
const uint AHEAD = 8u;                            // splits whose words are in flight in the combination
const uint PART = G * (QUADS + 1u);               // 16-byte words that a split writes
const uint MOST_SPLITS = 32u;
const uint LOADS = KV == 2 ? BLOCKS / 2u : BLOCKS; // 16-byte words of a page's keys, or values, per lane
const float LOWEST = -3.0e38;

shared vec4 raw_s[RAW];
shared float squares_s[RAW / JOINED];
shared uvec4 q_s[G * QUADS];
#if KV == 2
shared vec4 new_k_s[NEW_TOKENS * QUADS];          // as computed; the value stays in raw_s
shared uint key_tops_s[NEW_TOKENS * QUADS / JOINED]; // largest magnitudes, as bits
shared uint value_tops_s[NEW_TOKENS * QUADS / JOINED];
#else
shared uvec2 new_k_s[NEW_TOKENS * QUADS];
shared uvec2 new_v_s[NEW_TOKENS * QUADS];
#endif
shared uvec4 stage_s[GROUPS * STAGED];            // values of a page, then outputs
shared vec2 state_s[GROUPS * G];                  // m, l
shared float correction_s[GROUPS * 8u];           // the factors of the outputs so far, of each head
#if MATRIX == 1
shared float most_s[MOST_SPLITS];                 // of each split, in a combining workgroup: m, l and exp(m - the largest m)
shared float sum_s[MOST_SPLITS];
shared float weight_s[MOST_SPLITS];
#endif
shared float new_score_s[NEW_TOKENS * G * QUADS / JOINED];
shared uint last_s;

#if MATRIX == 1
// Loads Vᵀ of 16 tokens and of the block's 16 dimensions, in the element order of the matrix units.
#define SET_VALUES(m, block) coopMatLoad(m, stage_s, LANE_GROUP * STAGED + (block) * 2u, ROW, gl_CooperativeMatrixLayoutColumnMajor);
#else
uint half_at(uint token, uint dim) {
    uvec4 word = stage_s[LANE_GROUP * STAGED + token * ROW + dim / 8u];
    return (word[dim % 8u / 2u] >> (16u * (dim % 2u))) & 0xffffu;
}
uint pair_at(uint token, uint dim) { return half_at(token, dim) | (half_at(token + 1u, dim) << 16); }
#define SET_VALUES(m, block) { uint t_ = (LANE & 3u) * 2u, d_ = (block) * 16u + (LANE >> 2); \
    m = uvec4(pair_at(t_, d_), pair_at(t_ + 8u, d_), pair_at(t_, d_ + 8u), pair_at(t_ + 8u, d_ + 8u)); }
#endif
// Stores dimension `dim_` of a head's output in the group's part of shared memory.
#if MATRIX == 1
#define PUT_OUTPUT(head_, dim_, value_) stage_s[LANE_GROUP * STAGED + (head_) * OUTPUT_ROW + (dim_) / 4u][(dim_) % 4u] = floatBitsToUint(value_);
#else
#define PUT_OUTPUT(head_, dim_, value_) \
    PUT_COMPONENT(stage_s[LANE_GROUP * STAGED + (head_) * OUTPUT_ROW + (dim_) / 4u], (dim_) % 4u, floatBitsToUint(value_))
#endif

#if KV == 2
// The scale of a new token's key or value, from the largest magnitudes of its parts.
#define SCALE_OF_TOPS(scale, tops, token) {                                                                     \
        uint top_ = 0u;                                                                                         \
        for (uint i_ = 0u; i_ < QUADS / JOINED; i_++) top_ = max(top_, tops[(token) * (QUADS / JOINED) + i_]);  \
        scale = scale_of(top_);                                                                                 \
    }

// Stores word `at` of the cache.
#define PUT_CODES(cache, at, word) { uint at_ = at; PUT_COMPONENT(cache.v[at_ / 4u], at_ % 4u, word) }

// Stores four values to the cache.
#elif MATRIX == 1
#define PUT_FOUR(cache, at, words) Words2Out(cache).v[at] = words;
#else
#define PUT_FOUR(cache, at, words) if ((at) % 2u == 0u) cache.v[(at) / 2u].xy = words; else cache.v[(at) / 2u].zw = words;
#endif

// Iterate over the items of an invocation. Without cooperative matrices, every subgroup runs the same number of
// iterations of every loop, repeating the last item where it has none of its own. Reason: lavapipe suspends a subgroup
// at a barrier one extra time for each additional loop iteration that it ran before the barrier, and from then on the
// subgroups meet at different barriers.
// A repeated item is not stored (IF_OWN, in EACH with `turn_`): two invocations that store the same word race, even with
// the same value.
#if MATRIX == 1
#define ITEM(n, count) (i0 + (n) * LANES)
#define EACH(i, count) for (uint i = i0; i < (count); i += LANES)
#define IS_ITEM(n, count) (ITEM(n, count) < (count))
#define IF_OWN(n, count)
#else
#define ITEM(n, count) min(i0 + (n) * LANES, (count) - 1u)
#define EACH(i, count) for (uint turn_ = 0u, i = ITEM(0u, count); turn_ < ((count) + LANES - 1u) / LANES; turn_++, i = ITEM(turn_, count))
#define IS_ITEM(n, count) (i0 + (n) * LANES < (count))
#define IF_OWN(n, count) if (IS_ITEM(n, count))
#endif

// Rounds two values to bfloat16 and packs them into one word.
uint round_pair(float a, float b) {
    return (round_bfloat(floatBitsToUint(a)) >> 16) | (round_bfloat(floatBitsToUint(b)) & 0xffff0000u);
}

float raw(uint head, uint dim) { return raw_s[head * QUADS + dim / 4u][dim % 4u]; }

// The number of the row's token among the new ones of its sequence.
uint newest(uint row) { return row % NEW_TOKENS; }

// Returns where four dimensions of the KV head's query heads, new keys, new values or gates begin in qkv, in 16-byte words. The
// row's own token stands in for later ones.
uint head_quad(uint row, uint head_group, uint item) {
    uint head = item / QUADS;
    if (head >= G && head < GATES) row += min((head - G) % NEW_TOKENS, newest(row)) - newest(row);
    return row * stride / 4u + item % QUADS
        + (head < G ? head_group * G + head : head < VALUES ? Q_HEADS + head_group / PARTS
            : head < GATES ? Q_HEADS + KV_HEADS + head_group / PARTS
            : Q_HEADS + 2u * KV_HEADS + head_group * G + head - GATES) * QUADS;
}

// Returns the factor of a new token's value.
float value_factor(uint token) {
    if (V_NORM == 0u) return 1.0;
    float sum = 0.0;
    for (uint i = 0u; i < QUADS / JOINED; i++) sum += squares_s[(VALUES + token) * (QUADS / JOINED) + i];
    return inversesqrt(sum / float(D) + epsilon);
}

// Writes quad `quad` of the KV head's query heads to the output.
void write_output(uint row, uint head_group, uint quad, vec4 value) {
    if (GATED == 1u) value /= 1.0 + exp(-raw_s[GATES * QUADS + quad]);
    if (PACKED == 0u) {
        o.v[(row * output_stride + head_group * G * D) / 4u + quad] = TAGGED != 0u ? tagged(value, o_tag) : floatBitsToUint(value);
        return;
    }
    uint column = head_group * G * QUADS + quad;
    if (PACKED == 2u) {
        uvec2 words = uvec2(round_pair(value.x, value.y), round_pair(value.z, value.w));
        PUT_SWIZZLED(o, row, column, output_stride, words)
        return;
    }
    uint word = (((row / 16u * output_stride + column / 8u) * 2u + column % 2u) * 32u + row % 8u * 4u + column % 8u / 2u);
    uvec2 pairs = uvec2(round_pair(value.x, value.y), round_pair(value.z, value.w));
    // The components are constants: some drivers implement a store to a dynamically indexed component as a store of the
    // whole vector.
    if (row % 16u < 8u) {
        o.v[word].x = pairs.x;
        o.v[word].z = pairs.y;
    } else {
        o.v[word].y = pairs.x;
        o.v[word].w = pairs.y;
    }
}

#if MATRIX == 1
// Combines the results of `live` splits for part `combiner` of the output, while those splits are running. SUMS groups of
// SHARE invocations divide the splits among themselves, so that all words of an invocation are in flight at once.
void combine(uint row, uint head_group, uint combiner, uint live, uint parts, uint each) {
    const uint MOST = (MOST_SPLITS + SUMS - 1u) / SUMS;
    uint i0 = gl_LocalInvocationIndex, sum = i0 / SHARE, item = combiner * SHARE + i0 % SHARE, h = item / QUADS, polls = 0u;
    // `partials` is not cleared: until an earlier layer of this step has written it, it holds what this layer wrote a step
    // before, if this is the last one. A word of this layer's qkv (with GATED 1 a gate) says that the layers before are done.
    uint at = head_quad(row, head_group, item + GATED * GATES * QUADS);
    uvec4 own = qkv.v[at];
    while (poll_again(stale(own, qkv_tag) != 0u, polls, fault, qkv_tag)) own = qkv.v[at];
    if (GATED == 1u && sum == 0u) raw_s[GATES * QUADS + item] = uintBitsToFloat(own);
    uvec4 words[MOST], state = uvec4(0u);
    uint bad;
    do {
        bad = 0u;
        [[unroll]] for (uint n = 0u; n < MOST; n++)
            words[n] = partials.v[parts + min(sum + n * SUMS, live - 1u) * each + G + item];
        if (i0 < live) state = partials.v[parts + i0 * each + h];
        [[unroll]] for (uint n = 0u; n < MOST; n++) bad |= stale(words[n], o_tag);
        if (i0 < live) bad |= stale(state, o_tag);
    } while (poll_again(bad != 0u, polls, fault, o_tag));
    if (i0 < live) {
        most_s[i0] = uintBitsToFloat(state.x);
        sum_s[i0] = uintBitsToFloat(state.y);
    }
    barrier();
    float top = LOWEST;
    for (uint other = 0u; other < live; other++) top = max(top, most_s[other]);
    if (i0 < live) weight_s[i0] = exp(most_s[i0] - top);
    barrier();
    vec4 result = vec4(0.0);
    [[unroll]] for (uint n = 0u; n < MOST; n++)
        if (sum + n * SUMS < live) result += weight_s[sum + n * SUMS] * uintBitsToFloat(words[n]);
    stage_s[i0] = floatBitsToUint(result);
    barrier();
    if (sum > 0u) return;
    [[unroll]] for (uint n = 1u; n < SUMS; n++) result += uintBitsToFloat(stage_s[n * SHARE + i0]);
    float l = 0.0;
    for (uint s = 0u; s < live; s++) l += weight_s[s] * sum_s[s];
    write_output(row, head_group, item, result * (1.0 / l));
}
#endif

void main() {
    uint row = gl_WorkGroupID.z, head_group = gl_WorkGroupID.y, split = gl_WorkGroupID.x, planned = 0u;
    uint kvh = head_group / PARTS;
    uint i0 = gl_LocalInvocationIndex, g = LANE >> 2, t = LANE & 3u;
    uvec4 info = rows.v[PLANNED == 0u ? row : split];
    if (PLANNED != 0u) {
        if (info.w == 0u) return;
        row = info.x;
        split = info.w & 255u;
        planned = info.w >> 8 & 255u;
#if MATRIX == 1
        if (WAITS == 1u && COMBINERS > 0u && split >= MOST_SPLITS) {
            combine(row, head_group, split - MOST_SPLITS, planned, (info.y * HEAD_GROUPS + head_group) * PART, HEAD_GROUPS * PART);
            return;
        }
#endif
        info.w >>= 16;
    }
    uint position = info.y;
    uint polls = 0u;
    if (info.w == 0u) {
        if (split == 0u && (TAGGED != 0u || PACKED != 0u)) {
            // A consumer that polls the output assumes that the heads were polled before.
            if (TAGGED != 0u) EACH(i, RAW) {
                uint at = head_quad(row, head_group, i);
                while (poll_again(stale(qkv.v[at], qkv_tag) != 0u, polls, fault, qkv_tag)) {}
            }
            // The output is zero, so the gates are ignored and set to zero.
            EACH(i, GATED * G * QUADS) IF_OWN(turn_, GATED * G * QUADS) raw_s[GATES * QUADS + i] = vec4(0.0);
            barrier();
            for (uint i = i0; i < G * QUADS; i += LANES) write_output(row, head_group, i, vec4(0.0));
        }
        return;
    }
    // The new tokens begin at `past`; the row's is at `position`. All tokens before them are in pages.
    uint own_token = newest(row), past = position - own_token;
    uint full = (past + 15u) / 16u;
    uint low = first_visible(position), seen = full - low / 16u; // pages with tokens of the window
    uint end = NEW_TOKENS > 1u ? max(past, low) : past;          // of the tokens in pages that the row sees
    uint splits = gl_NumWorkGroups.x - COMBINERS;
    uint live = PLANNED != 0u ? planned : clamp((seen + GROUPS - 1u) / GROUPS, 1u, splits);
    uint slot = row * HEAD_GROUPS + head_group;
    // The offset of the row's first split in `partials`, and the distance from one split to the next.
    uint parts = (PLANNED == 0u ? slot * splits : (gl_WorkGroupID.x - split) * HEAD_GROUPS + head_group) * PART;
    const uint each = PLANNED == 0u ? PART : HEAD_GROUPS * PART;
#if MATRIX == 1
    if (WAITS == 1u && PLANNED == 0u && COMBINERS > 0u && split >= splits && live > 1u) combine(row, head_group, split - splits, live, parts, each);
#endif
    if (split >= live) return;
    uint table = info.z * max_pages;
    uint rounds = (seen + live * GROUPS - 1u) / (live * GROUPS);
    uint step_pages = live * GROUPS;
    uint own_page = low / 16u + split * GROUPS + LANE_GROUP;

    // A page's keys: dimensions from 8t on of each chunk of 32, of tokens g and g + 8. Its values: rows of D, in order.
    uvec4 key[LOADS], value[LOADS];
#if KV == 2
    // The scales of tokens 2t, 2t + 1, 2t + 8 and 2t + 9.
    uvec4 key_scale, value_scale;
#define LOAD_KEYS(page_) { uint base_ = (page_) * PAGE_WORDS;                                       \
    key_scale = k.v[base_ + KV_HEADS * D + kvh * 4u + t];                                           \
    [[unroll]] for (uint c = 0u; c < LOADS; c++)                                                    \
        key[c] = k.v[base_ + kvh * D + (4u * c + t) * 8u + g]; }
#define LOAD_VALUES(page_) { uint base_ = (page_) * PAGE_WORDS;                                     \
    value_scale = v.v[base_ + KV_HEADS * D + kvh * 4u + t];                                         \
    [[unroll]] for (uint c = 0u; c < LOADS; c++) value[c] = v.v[base_ + kvh * D + LANE + c * 32u]; }
#else
#define LOAD_KEYS(page_) { uint base_ = ((page_) * KV_HEADS + kvh) * 2u * D;                        \
    [[unroll]] for (uint c = 0u; c < BLOCKS / 2u; c++) {                                            \
        key[2u * c] = k.v[base_ + (4u * c + t) * 16u + g];                                          \
        key[2u * c + 1u] = k.v[base_ + (4u * c + t) * 16u + g + 8u];                                \
    } }
#define LOAD_VALUES(page_) { uint base_ = ((page_) * KV_HEADS + kvh) * 2u * D + LANE;               \
    [[unroll]] for (uint c = 0u; c < BLOCKS; c++) value[c] = v.v[base_ + c * 32u]; }
#endif
    // Stores a page's values to shared memory. Codes of tokens that are not written yet are finite, and their weight is zero; f16
    // of tokens that are not written yet, or are before the window, may be anything, also NaN, and are replaced by zeros.
#if KV == 2
#define STAGE_VALUES(index_) { \
    [[unroll]] for (uint c = 0u; c < LOADS; c++) { \
        uint word_ = c * 32u + LANE, at_ = LANE_GROUP * STAGED + word_ / (D / 8u) * ROW + word_ % (D / 8u); \
        uvec4 both_ = value[c]; \
        stage_s[at_] = uvec4(halves_of(both_.x), halves_of(both_.y)); \
        stage_s[at_ + 8u * ROW] = uvec4(halves_of(both_.z), halves_of(both_.w)); \
    } }
#else
#define STAGE_VALUES(index_) { \
    uint from_ = (index_) * 16u; \
    if (from_ + 16u > past || WINDOW > 0u && from_ < low) { \
        [[unroll]] for (uint c = 0u; c < BLOCKS; c++) { \
            uint token_ = from_ + (c * 32u + LANE) / (D / 8u); \
            if (token_ >= past || WINDOW > 0u && token_ < low) value[c] = uvec4(0u); \
        } \
    } \
    [[unroll]] for (uint c = 0u; c < BLOCKS; c++) { \
        uint word_ = c * 32u + LANE; \
        stage_s[LANE_GROUP * STAGED + word_ / (D / 8u) * ROW + word_ % (D / 8u)] = value[c]; \
    } }
#endif
    uint last_page = max(full, 1u) - 1u;
    uint page = pages.v[table + min(own_page, last_page)];
    LOAD_KEYS(page)
    LOAD_VALUES(page)

    // The rotary factors and norm weights of this invocation's quads of q and k.
    vec4 turn_c[TURNED_LOADS], turn_s[TURNED_LOADS], weight_own[TURNED_LOADS], weight_other[TURNED_LOADS];
    [[unroll]] for (uint n = 0u; n < TURNED_LOADS; n++) {
        uint item = min(i0 + n * LANES, TURNED - 1u);
        uint turned_at = item < G * QUADS ? position : past + min(item / QUADS - G, own_token);
#if MATRIX == 1
        // Four consecutive dimensions are on the same side of the rotation, and their factors are contiguous.
        if (HALF % 4u == 0u) {
            uint first = item % QUADS * 4u;
            bool turns = first < ROT, low = first < HALF;
            uint at = (turned_at * HALF + first % max(HALF, 1u)) / 2u;
            vec4 a = turns ? Floats4In(rope).v[at] : vec4(1.0, 0.0, 1.0, 0.0);
            vec4 b = turns ? Floats4In(rope).v[at + 1u] : vec4(1.0, 0.0, 1.0, 0.0);
            turn_c[n] = vec4(a.xz, b.xz);
            turn_s[n] = low ? -vec4(a.yw, b.yw) : vec4(a.yw, b.yw);
            weight_own[n] = vec4(1.0);
            weight_other[n] = vec4(1.0);
            if (QK_NORM != 0u) {
                uint own = first / 4u, other = !turns || QK_NORM == 2u ? own : low ? own + HALF / 4u : own - HALF / 4u;
                weight_own[n] = item < G * QUADS ? Floats4In(q_norm).v[own] : Floats4In(k_norm).v[own];
                weight_other[n] = item < G * QUADS ? Floats4In(q_norm).v[other] : Floats4In(k_norm).v[other];
            }
            continue;
        }
#endif
        [[unroll]] for (uint e = 0u; e < 4u; e++) {
            uint dim = item % QUADS * 4u + e;
            bool turns = dim < ROT;
            uint other = !turns || QK_NORM == 2u ? dim : dim < HALF ? dim + HALF : dim - HALF;
            uint at = (turned_at * HALF + dim % max(HALF, 1u)) * 2u;
            turn_c[n][e] = turns ? rope.v[at] : 1.0;
            turn_s[n][e] = !turns ? 0.0 : dim < HALF ? -rope.v[at + 1u] : rope.v[at + 1u];
            weight_own[n][e] = QK_NORM == 0u ? 1.0 : item < G * QUADS ? q_norm.v[dim] : k_norm.v[dim];
            weight_other[n][e] = QK_NORM == 0u ? 1.0 : item < G * QUADS ? q_norm.v[other] : k_norm.v[other];
        }
    }

    // The words of qkv are on their way while the values are stored. Those that are stale are loaded again.
    uvec4 raw_words[RAW_LOADS];
    [[unroll]] for (uint n = 0u; n < RAW_LOADS; n++) raw_words[n] = qkv.v[head_quad(row, head_group, min(ITEM(n, RAW), RAW - 1u))];
    STAGE_VALUES(own_page)
    [[unroll]] for (uint n = 0u; n < RAW_LOADS; n++) {
        uint item = ITEM(n, RAW);
        if (item < RAW) {
            uint at = head_quad(row, head_group, item);
            uvec4 words = raw_words[n];
            if (TAGGED != 0u) while (poll_again(stale(words, qkv_tag) != 0u, polls, fault, qkv_tag)) words = qkv.v[at];
            vec4 x = uintBitsToFloat(words);
            IF_OWN(n, RAW) raw_s[item] = x;
            if (QK_NORM != 0u || V_NORM == 1u) {
                float square = dot(x, x);
                [[unroll]] for (uint distance = 1u; distance < JOINED; distance *= 2u) square += subgroupShuffleXor(square, distance);
                IF_OWN(n, RAW) if (item % JOINED == 0u) squares_s[item / JOINED] = square;
            }
        }
    }
    barrier();
    // Stores four dimensions `x` of q or of the new key.
#if KV == 2
#define STORE_TOP(tops, i, x) {                                                                     \
        uint top_ = top_bits(x);                                                                    \
        [[unroll]] for (uint distance = 1u; distance < JOINED; distance *= 2u) top_ = max(top_, subgroupShuffleXor(top_, distance)); \
        if ((i) % JOINED == 0u) tops[(i) / JOINED] = top_;                                          \
    }
#define STORE_NEW_KEY new_k_s[item - G * QUADS] = x; STORE_TOP(key_tops_s, item - G * QUADS, x)
#else
#define STORE_NEW_KEY new_k_s[item - G * QUADS] = uvec2(packHalf2x16(x.xy), packHalf2x16(x.zw));
#endif
#define STORE_TURNED                                                                                \
    if (head < G) {                                                                                 \
        uvec4 parts;                                                                                \
        split_pair(x.x, x.y, max_pages >> 31, parts.x, parts.z);                                    \
        split_pair(x.z, x.w, max_pages >> 31, parts.y, parts.w);                                    \
        q_s[item] = parts;                                                                          \
    } else {                                                                                        \
        STORE_NEW_KEY                                                                               \
    }
#if KV == 2 && MATRIX == 0
    vec4 turned[TURNED_LOADS];
#endif
    [[unroll]] for (uint n = 0u; n < TURNED_LOADS; n++) {
        uint item = ITEM(n, TURNED), head = item / QUADS, quad = item % QUADS;
        if (item < TURNED) {
            float scale = 1.0;
            if (QK_NORM != 0u) {
                float sum = 0.0;
                for (uint i = 0u; i < QUADS / JOINED; i++) sum += squares_s[head * (QUADS / JOINED) + i];
                scale = inversesqrt(sum / float(D) + epsilon);
            }
            vec4 x;
            if (HALF % 4u == 0u) {
                uint other = quad >= ROT / 4u ? quad : quad < HALF / 4u ? quad + HALF / 4u : quad - HALF / 4u;
                x = (raw_s[head * QUADS + quad] * weight_own[n]) * turn_c[n] + (raw_s[head * QUADS + other] * weight_other[n]) * turn_s[n];
            } else {
                [[unroll]] for (uint e = 0u; e < 4u; e++) {
                    uint dim = quad * 4u + e, other = dim >= ROT ? dim : dim < HALF ? dim + HALF : dim - HALF;
                    x[e] = (raw(head, dim) * weight_own[n][e]) * turn_c[n][e] + (raw(head, other) * weight_other[n][e]) * turn_s[n][e];
                }
            }
            x *= scale;
            if (head < G) {
                x *= score_scale(D);
                if (QUERY_SCALES > 0u) x *= rope.v[QUERY_SCALES + position];
            }
#if KV == 2 && MATRIX == 1
            // The lanes that hold a block of the Hadamard matrix are neighbours.
            x = hadamard_four(x);
            [[unroll]] for (uint distance = 1u; distance < JOINED; distance *= 2u) {
                vec4 other = subgroupShuffleXor(x, distance);
                x = (quad & distance) == 0u ? x + other : other - x;
            }
            x *= inversesqrt(float(HADAMARD));
#endif
#if KV == 2 && MATRIX == 0
            turned[n] = hadamard_four(x);
#else
            IF_OWN(n, TURNED) { STORE_TURNED }
#endif
        }
    }
#if KV == 2 && MATRIX == 0
    barrier();
    [[unroll]] for (uint n = 0u; n < TURNED_LOADS; n++) IF_OWN(n, TURNED) raw_s[ITEM(n, TURNED)] = turned[n];
    barrier();
    [[unroll]] for (uint n = 0u; n < TURNED_LOADS; n++) {
        const uint BLOCK = HADAMARD / 4u;
        uint item = ITEM(n, TURNED), head = item / QUADS, quad = item % QUADS;
        vec4 x = vec4(0.0);
        for (uint i = 0u; i < BLOCK; i++) {
            vec4 other = raw_s[item / BLOCK * BLOCK + i];
            x += (bitCount(i & item % BLOCK) & 1) == 0 ? other : -other;
        }
        x *= inversesqrt(float(HADAMARD));
        IF_OWN(n, TURNED) { STORE_TURNED }
    }
#endif
    EACH(i, NEW_TOKENS * QUADS) {
        vec4 x = value_factor(i / QUADS) * raw_s[VALUES * QUADS + i];
#if KV == 2
        IF_OWN(turn_, NEW_TOKENS * QUADS) STORE_TOP(value_tops_s, i, x)
#else
        IF_OWN(turn_, NEW_TOKENS * QUADS) new_v_s[i] = uvec2(packHalf2x16(x.xy), packHalf2x16(x.zw));
#endif
    }
    barrier();

    float most = LOWEST, sum = 0.0;
    // The transposed output: dimensions g and g + 8 of each block, of heads 2t and 2t + 1.
    FewSums outputs[BLOCKS];
    [[unroll]] for (uint j = 0u; j < BLOCKS; j++) outputs[j] = NO_FEW_SUMS;
    uint head = min(g, G - 1u);
    if (split == 0u) {
        uint in_page = position % 16u;
        // One of the KV head's workgroups appends.
        bool appends = PARTS == 1u || head_group % PARTS == 0u;
        uint first_quad = own_token * QUADS;
#if KV == 2
        uint new_page = pages.v[table + position / 16u];
        float new_k_scale, new_v_scale;
        SCALE_OF_TOPS(new_k_scale, key_tops_s, own_token)
        SCALE_OF_TOPS(new_v_scale, value_tops_s, own_token)
        float v_factor = value_factor(own_token);
        EACH(i, QUADS) IF_OWN(turn_, QUADS) if (appends) {
            PUT_CODES(k, KEY_AT(new_page, kvh, i / 2u, in_page) * 2u + i % 2u, to_codes(new_k_s[first_quad + i], new_k_scale))
            PUT_CODES(v, VALUE_AT(new_page, kvh, in_page, i / 2u) * 2u + i % 2u, to_codes(v_factor * raw_s[VALUES * QUADS + first_quad + i], new_v_scale))
        }
        if (i0 == 0u && appends) {
            uint at = SCALE_AT(new_page, kvh, in_page);
            PUT_CODES(k, at, floatBitsToUint(new_k_scale))
            PUT_CODES(v, at, floatBitsToUint(new_v_scale))
        }
#else
        uint own = pages.v[table + position / 16u] * KV_HEADS + kvh;
        EACH(i, QUADS) IF_OWN(turn_, QUADS) if (appends) {
            PUT_FOUR(k, (own * 2u * D + i / 2u * 16u + in_page) * 2u + i % 2u, new_k_s[first_quad + i])
            PUT_FOUR(v, (own * 16u + in_page) * QUADS + i, new_v_s[first_quad + i])
        }
#endif
        // The new tokens' scores, from the same f16 parts of q that are multiplied with the pages' keys.
        EACH(i, NEW_TOKENS * G * QUADS) {
            uvec4 x = q_s[i % (G * QUADS)];
            uint key_quad = i / (G * QUADS) * QUADS + i % QUADS;
#if KV == 2
            float scale;
            SCALE_OF_TOPS(scale, key_tops_s, i / (G * QUADS))
            vec4 y = scale * codes_of(to_codes(new_k_s[key_quad], scale));
            float dots = dot(unpackHalf2x16(x.x) + unpackHalf2x16(x.z), y.xy) + dot(unpackHalf2x16(x.y) + unpackHalf2x16(x.w), y.zw);
#else
            uvec2 y = new_k_s[key_quad];
            float dots = dot(unpackHalf2x16(x.x) + unpackHalf2x16(x.z), unpackHalf2x16(y.x))
                + dot(unpackHalf2x16(x.y) + unpackHalf2x16(x.w), unpackHalf2x16(y.y));
#endif
            [[unroll]] for (uint distance = 1u; distance < JOINED; distance *= 2u) dots += subgroupShuffleXor(dots, distance);
            IF_OWN(turn_, NEW_TOKENS * G * QUADS) if (i % JOINED == 0u) new_score_s[i / JOINED] = dots;
        }
    }

#if KV == 2
    float unit = LEAST_VALUE; // the largest scale of values so far: outputs are sums in this unit
#endif
    uint index = own_page, round = 0u;
    [[dont_unroll]] do {
        uint next = pages.v[table + min(index + step_pages, last_page)];
        Sums scores = NO_SUMS;
        UNROLL_PRODUCTS for (uint c = 0u; c < BLOCKS / 2u; c++) {
            UNROLL_PRODUCTS for (uint h = 0u; h < 2u; h++) {
                uvec4 parts = q_s[head * QUADS + c * 8u + t * 2u + h];
                Tokens a;
                SET_TOKENS(a, parts.xy, parts.zw)
                Weights m;
#if KV == 2
                uvec4 both = key[c];
                uvec2 first_token = halves_of(h == 0u ? both.x : both.y), second_token = halves_of(h == 0u ? both.z : both.w);
                SET_WEIGHTS(m, uvec4(first_token, second_token))
#else
                uvec4 low = key[2u * c], high = key[2u * c + 1u];
                SET_WEIGHTS(m, (h == 0u ? uvec4(low.xy, high.xy) : uvec4(low.zw, high.zw)))
#endif
                MULTIPLY_ADD(scores, a, m)
            }
        }
        vec4 sums = SUMS_LOW(scores) + SUMS_HIGH(scores);
#if KV == 2
        sums *= uintBitsToFloat(key_scale);
#endif
        if (round + 1u < rounds) LOAD_KEYS(next)
        vec4 score = soft_cap(sums);
        uint first = index * 16u + t * 2u;
        uvec4 tokens = uvec4(first, first + 1u, first + 8u, first + 9u);
        bvec4 there = lessThan(tokens, uvec4(end));
        if (WINDOW > 0u) there = lessThan(tokens - low, uvec4(end - low)); // a token before the window wraps around
        score = mix(vec4(LOWEST), score, there);
        float top = max(max(score.x, score.y), max(score.z, score.w));
        top = max(top, subgroupShuffleXor(top, 1u));
        top = max(most, max(top, subgroupShuffleXor(top, 2u)));
        float correction = exp(most - top);
        most = top;
        vec4 p = mix(vec4(0.0), exp(score - top), there);
        sum = sum * correction + p.x + p.y + p.z + p.w;
#if KV == 2
        // The scale of a token that is not there may be anything, also NaN.
        vec4 scales = mix(vec4(0.0), uintBitsToFloat(value_scale), there);
        float largest = max(max(scales.x, scales.y), max(scales.z, scales.w));
        largest = max(largest, subgroupShuffleXor(largest, 1u));
        largest = max(unit, max(largest, subgroupShuffleXor(largest, 2u)));
        correction *= largest > unit ? unit / largest : 1.0;
        unit = largest;
        p *= scales * (1.0 / largest);
#endif
        if (t == 0u) correction_s[LANE_GROUP * 8u + g] = correction;
        uvec2 p_most, p_rest;
        split_pair(p.x, p.y, max_pages >> 31, p_most.x, p_rest.x);
        split_pair(p.z, p.w, max_pages >> 31, p_most.y, p_rest.y);

        LANES_BARRIER
        float first_head = correction_s[LANE_GROUP * 8u + 2u * t], second_head = correction_s[LANE_GROUP * 8u + 2u * t + 1u];
        [[unroll]] for (uint j = 0u; j < BLOCKS; j++) SCALE_FEW_SUMS(outputs[j], first_head, second_head)
        FewTokens a_most, a_rest;
        SET_FEW_TOKENS(a_most, p_most)
        SET_FEW_TOKENS(a_rest, p_rest)
        UNROLL_PRODUCTS for (uint j = 0u; j < BLOCKS; j++) {
            RowWeights m;
            SET_VALUES(m, j)
            MULTIPLY_ADD_FEW_PARTS(outputs[j], a_most, a_rest, m)
        }
        LANES_BARRIER
        round++;
        index += step_pages;
        if (round < rounds) {
            LOAD_VALUES(next)
            STAGE_VALUES(index)
        }
    } while (round < rounds);
    sum += subgroupShuffleXor(sum, 1u);
    sum += subgroupShuffleXor(sum, 2u);

    // The groups' outputs side by side.
    [[unroll]] for (uint j = 0u; j < BLOCKS; j++) {
        vec4 part = FEW_SUMS(outputs[j]);
#if KV == 2
        part *= unit;
#endif
        if (2u * t < G) {
            PUT_OUTPUT(2u * t, j * 16u + g, part.x)
            PUT_OUTPUT(2u * t, j * 16u + g + 8u, part.z)
        }
        if (2u * t + 1u < G) {
            PUT_OUTPUT(2u * t + 1u, j * 16u + g, part.y)
            PUT_OUTPUT(2u * t + 1u, j * 16u + g + 8u, part.w)
        }
    }
    if (g < G && t == 0u) state_s[LANE_GROUP * G + g] = vec2(most, sum);
    barrier();
    uint part = parts + split * each;
    // The workgroup's results: the heads' outputs, the largest scores and the sums of weights.
    vec4 results[TURNS];
    vec2 states[TURNS];
    [[unroll]] for (uint turn = 0u; turn < TURNS; turn++) {
        uint i = ITEM(turn, ITEMS), h = i / QUADS;
        if (i >= ITEMS) continue;
        float sink = SINKS == 1u && split == 0u ? sinks.v[head_group * G + h] : LOWEST;
        float top = sink, own[NEW_TOKENS];
        [[unroll]] for (uint token = 0u; token < NEW_TOKENS; token++) {
            own[token] = LOWEST;
            if (split == 0u && token <= own_token && (WINDOW == 0u || past + token >= low)) {
                own[token] = 0.0;
                for (uint n = 0u; n < QUADS / JOINED; n++) own[token] += new_score_s[(token * G + h) * (QUADS / JOINED) + n];
                own[token] = soft_cap(own[token]);
            }
            top = max(top, own[token]);
        }
        [[unroll]] for (uint n = 0u; n < GROUPS; n++) top = max(top, state_s[n * G + h].x);
        float l = 0.0;
        vec4 result = vec4(0.0);
        [[unroll]] for (uint token = 0u; token < NEW_TOKENS; token++) {
            float scale = split == 0u && own[token] != LOWEST ? exp(own[token] - top) : 0.0;
            l += scale;
#if KV == 2
            float new_v_scale;
            SCALE_OF_TOPS(new_v_scale, value_tops_s, token)
            vec4 x = value_factor(token) * raw_s[(VALUES + token) * QUADS + i % QUADS];
            result += (scale * new_v_scale) * codes_of(to_codes(x, new_v_scale));
#else
            uvec2 x = new_v_s[token * QUADS + i % QUADS];
            result += scale * vec4(unpackHalf2x16(x.x), unpackHalf2x16(x.y));
#endif
        }
        if (SINKS == 1u && split == 0u) l += exp(sink - top);
        [[unroll]] for (uint n = 0u; n < GROUPS; n++) {
            vec2 state = state_s[n * G + h];
            float share = state.y > 0.0 ? exp(state.x - top) : 0.0;
            l += share * state.y;
            result += share * uintBitsToFloat(stage_s[n * STAGED + h * OUTPUT_ROW + i % QUADS]);
        }
        results[turn] = result;
        states[turn] = vec2(top, l);
    }
    if (live > 1u) {
        uvec4 own_words[TURNS], own_states[TURNS];
        [[unroll]] for (uint turn = 0u; turn < TURNS; turn++) {
            uint i = ITEM(turn, ITEMS), at = part + i / QUADS;
            if (i >= ITEMS) continue;
            vec4 state = vec4(states[turn], 0.0, 0.0);
            own_words[turn] = TAGGED != 0u ? tagged(results[turn], o_tag) : floatBitsToUint(results[turn]);
            own_states[turn] = TAGGED != 0u ? tagged(state, o_tag) : floatBitsToUint(state);
            if (WAITS == 0u || COMBINERS > 0u || split + 1u < live) {
                IF_OWN(turn, ITEMS) partials.v[part + G + i] = own_words[turn];
                IF_OWN(turn, ITEMS) if (i % QUADS == 0u) partials.v[at] = own_states[turn];
            }
        }
        if (WAITS == 1u) {
            // Every workgroup that the last one polls for was launched before it. A workgroup must never poll for a later
            // one: a device that preempts a context launches no new workgroups and lets the running ones finish.
            if (COMBINERS > 0u || split + 1u < live) return;
        } else {
            // Release the partial results and count; the last workgroup to arrive acquires all of them.
            memoryBarrierBuffer();
            barrier();
            if (i0 == 0u) last_s = atomicAdd(counters.v[slot], 1u) + 1u;
            barrier();
            if (last_s != live) return;
            memoryBarrierBuffer();
            if (i0 == 0u) {
                counters.v[slot] = 0u;
                // The reset must be visible before the output: where the output is tagged, it alone orders the next use of
                // the counter.
                memoryBarrierBuffer();
            }
        }
        // Combine the splits' results in order, AHEAD at a time. Each invocation computes the weights of its head's splits.
        [[unroll]] for (uint turn = 0u; turn < TURNS; turn++) {
            uint i = ITEM(turn, ITEMS), h = i / QUADS;
            if (i >= ITEMS) continue;
            float top = LOWEST, l = 0.0;
            vec4 result = vec4(0.0);
            if (COMBINERS > 0u) {
                // In the order of `combine`.
                for (uint s = 0u; s < live; s++) top = max(top, uintBitsToFloat(partials.v[parts + s * each + h].x));
                for (uint sum_of = 0u; sum_of < SUMS; sum_of++) {
                    vec4 partial = vec4(0.0);
                    for (uint s = sum_of; s < live; s += SUMS)
                        partial += exp(uintBitsToFloat(partials.v[parts + s * each + h].x) - top) * uintBitsToFloat(partials.v[parts + s * each + G + i]);
                    result = sum_of == 0u ? partial : result + partial;
                }
                for (uint s = 0u; s < live; s++) {
                    uvec2 state = partials.v[parts + s * each + h].xy;
                    l += exp(uintBitsToFloat(state.x) - top) * uintBitsToFloat(state.y);
                }
            } else [[dont_unroll]] for (uint first = 0u; first < live; first += AHEAD) {
                uvec4 words[AHEAD];
                uvec2 split_states[AHEAD];
                uint bad;
                do {
                    bad = 0u;
                    [[unroll]] for (uint n = 0u; n < AHEAD; n++) {
                        uint at = parts + min(first + n, live - 1u - WAITS) * each;
                        words[n] = partials.v[at + G + i];
                        split_states[n] = partials.v[at + h].xy;
                    }
                    if (WAITS == 1u) [[unroll]] for (uint n = 0u; n < AHEAD; n++)
                        bad |= stale(words[n], o_tag) | stale(split_states[n].xyxy, o_tag);
                } while (poll_again(bad != 0u, polls, fault, o_tag));
                // With WAITS 1 the last split is this one, whose results are rounded as those of the others are.
                if (WAITS == 1u) [[unroll]] for (uint n = 0u; n < AHEAD; n++) if (first + n + 1u == live) {
                    words[n] = own_words[turn];
                    split_states[n] = own_states[turn].xy;
                }
                float most_of = top;
                [[unroll]] for (uint n = 0u; n < AHEAD; n++)
                    if (first + n < live) most_of = max(most_of, uintBitsToFloat(split_states[n].x));
                float scale = exp(top - most_of);
                l *= scale;
                result *= scale;
                [[unroll]] for (uint n = 0u; n < AHEAD; n++) if (first + n < live) {
                    float weight = exp(uintBitsToFloat(split_states[n].x) - most_of);
                    l += weight * uintBitsToFloat(split_states[n].y);
                    result += weight * uintBitsToFloat(words[n]);
                }
                top = most_of;
            }
            results[turn] = result;
            states[turn].y = l;
        }
    }
    [[unroll]] for (uint turn = 0u; turn < TURNS; turn++) {
        uint i = ITEM(turn, ITEMS);
        IF_OWN(turn, ITEMS) if (i < ITEMS) write_output(row, head_group, i, results[turn] * (1.0 / states[turn].y));
    }
}
