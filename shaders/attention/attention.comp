#version 460
#extension GL_GOOGLE_include_directive : require
// Paged attention without matrix units, for decode and prefill, with split-K over the context:
//   o[r, h] = softmax(q[r, h] · Kᵀ / sqrt(D)) · V    over the pages of row r's sequence up to the row's position, or to
//                                                    that of the last row of its prompt
// Variants of the scores, which are all constants: `scores.glsl`.
//
// qkv    [rows][stride] f32: q heads, k heads, v heads. GATED 1: then a gate for each value of the output, which is
//        multiplied by the gate's sigmoid
// k, v   KV cache pages: `kv.glsl`;  pages [slots][max_pages];  rope [positions][ROT/2] of cos, sin
// output [rows][output_stride] f32
// TAGGED 3: qkv and output are tagged (`tags.glsl`); a row without a sequence then still writes zeros
// rows   [rows] uvec4: token, position, slot, and 0 or the number of rows from this one to its prompt's last in the step
// FUSED  1 (decode): q, k and v are raw; this kernel normalizes them (QK_NORM, V_NORM; `append.comp`), rotates q and k and
//        appends k and v to the cache. 0 (prefill): `append` has done that
//
// One workgroup serves G query heads (GQA) of one KV head of one row. PARTS workgroups serve all G · PARTS query heads of
// the KV head, one of them if shared memory is large enough, so that K and V are read once. Split s of the S splits (S = gl_NumWorkGroups.x) processes blocks s, s + S, … of WORKERS tokens. In the score phase an invocation
// computes one token; in the value phase it accumulates eight dimensions. Keys are loaded before they are needed: the
// first block's while q is prepared, the next block's while values are accumulated. If several splits have work, each
// writes {m, l, o} (maximum, sum, output) to `partials`, and the last one to arrive (an atomic counter) combines them.
// With 8-bit codes (KV 2), the scale of a key multiplies its score and that of a value its weight; q and the new key are
// multiplied by the Hadamard matrix of `kv.glsl` (FUSED 0: `append` has done it).
// Traffic: 4·D bytes per token and KV head (f16), 2·D + 8 (codes).
#include "common.glsl"
#include "kv.glsl"
#define DEVICES_ID 17
#include "tags.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint D = 128;
layout(constant_id = 2) const uint ROT = 128;
layout(constant_id = 3) const uint G = 2;          // query heads of a workgroup
layout(constant_id = 4) const uint KV_HEADS = 8;
layout(constant_id = 5) const uint QK_NORM = 0;
layout(constant_id = 6) const uint FUSED = 1;
layout(constant_id = 7) const uint WORKERS = 128; // the workgroup's size
layout(constant_id = 8) const uint TAGGED = 0;
layout(constant_id = 9) const uint GATED = 0;
layout(constant_id = 10) const uint SCALE = 0;
layout(constant_id = 11) const uint WINDOW = 0;
layout(constant_id = 12) const uint SOFT_CAP = 0;
layout(constant_id = 13) const uint SINKS = 0;
layout(constant_id = 14) const uint QUERY_SCALES = 0;
layout(constant_id = 15) const uint PARTS = 1;
layout(constant_id = 16) const uint V_NORM = 0;
layout(constant_id = 18) const uint BOTH = 0;

#include "scores.glsl"

layout(buffer_reference, std430, buffer_reference_align = 4) buffer Partials { coherent float v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer Counters { coherent uint v[]; };

layout(push_constant) uniform Args {
    TaggedIn qkv;
    Words4In rows;
    FloatsIn q_norm;
    FloatsIn k_norm;
    FloatsIn rope;
    WordsIn pages;
    CacheInOut k;
    CacheInOut v;
    Partials partials;   // [rows][kv_heads · PARTS][splits][G·(D + 2)]: m and l of each head, then o
    Counters counters;   // [rows][kv_heads · PARTS], zero between uses
    TaggedOut1 o;
    Fault fault;
    FloatsIn sinks;      // [q heads], with SINKS 1
    uint stride;
    uint output_stride;
    uint max_pages;
    float epsilon;
    uint qkv_tag;
    uint o_tag;
};

const uint EIGHTS = D / 8u;
const uint Q_HEADS = KV_HEADS * PARTS * G;
const uint LANES = WORKERS / EIGHTS;    // tokens processed at a time in the value phase
const uint HALF = ROT / 2u;
const uint ITEMS = ((G + 1u) * (D / 2u) + WORKERS - 1u) / WORKERS; // pairs of q and k dimensions per invocation
const uint AHEAD = 4u;                  // number of tokens whose values are in flight
const uint HELD = D <= 256u ? EIGHTS : 8u; // 16-byte words of a token's key in registers: wider heads' are loaded in turns
const float LOWEST = -3.0e38;

shared vec4 q_s[G * D / 4u];
shared vec4 k_s[D / 4u];
shared vec4 v_s[D / 4u];
shared float p_s[G * WORKERS];
shared vec4 reduce_s[LANES * G * D / 4u];
shared float m_s[G];
shared float l_s[G];
shared float correction_s[G];
shared float scale_s[G + 1u];
#if KV == 2
shared float value_scale_s[WORKERS]; // of the block's values
#endif
shared uint page_s[(WORKERS + 15u) / 16u];
shared uint last_s;

// Loads the raw heads to shared memory: the G heads of q of part `part` and, with FUSED, the new k and v.
void load_heads(uint row, uint part) {
    const uint QUADS = D / 4u;
    const uint LOADS = (G + (FUSED == 1u ? 2u : 0u)) * QUADS;
    uint base = row * stride / 4u;
    uint polls = 0u;
    for (uint i = gl_LocalInvocationID.x; i < LOADS; i += WORKERS) {
        uint head = i / QUADS;
        uint at = base + i % QUADS
            + (head < G ? part * G + head : Q_HEADS + (head == G ? 0u : KV_HEADS) + part / PARTS) * QUADS;
        uvec4 words = qkv.v[at];
        if (TAGGED != 0u) while (poll_again(stale(words, qkv_tag) != 0u, polls, fault, qkv_tag)) words = qkv.v[at];
        vec4 value = uintBitsToFloat(words);
        if (head < G) q_s[i] = value;
        else if (head == G) k_s[i % QUADS] = value;
        else v_s[i % QUADS] = value;
    }
    barrier();
}

float head_value(uint g, uint i) { return g < G ? q_s[(g * D + i) / 4u][i % 4u] : k_s[i / 4u][i % 4u]; }

void set_head_value(uint g, uint i, float value) {
    if (g < G) q_s[(g * D + i) / 4u][i % 4u] = value;
    else k_s[i / 4u][i % 4u] = value;
}

// Returns the dimensions of pair `j` of a head: two that are rotated together, or two neighbours beyond the rotated
// ones.
void pair_of(uint j, out uint first, out uint second) {
    bool rotated = j < HALF;
    first = rotated ? j : ROT + (j - HALF) * 2u;
    second = rotated ? j + HALF : first + 1u;
}

// q_s ← rope(norm(q)) / sqrt(D), k_s ← rope(norm(k)), v_s ← norm(v). One invocation owns both values of a rotated pair, so that no
// invocation reads what another has overwritten.
void prepare_heads(uint position, float turn_c[ITEMS], float turn_s[ITEMS], float weight_a[ITEMS], float weight_b[ITEMS]) {
    uint t = gl_LocalInvocationID.x;
    float inverse = score_scale(D);
    if (FUSED == 0u) {
        for (uint i = t; i < G * D; i += WORKERS) q_s[i / 4u][i % 4u] *= inverse;
        barrier();
        return;
    }
    if (QUERY_SCALES > 0u) inverse *= rope.v[QUERY_SCALES + position];
    if (V_NORM == 1u) {
        // Every subgroup computes the factor for itself.
        float square = 0.0;
        for (uint i = gl_SubgroupInvocationID; i < D / 4u; i += gl_SubgroupSize) square += dot(v_s[i], v_s[i]);
        float factor = inversesqrt(subgroupAdd(square) / float(D) + epsilon);
        barrier();
        for (uint i = t; i < D / 4u; i += WORKERS) v_s[i] *= factor;
    }
    if (QK_NORM != 0u) {
        for (uint g = gl_SubgroupID; g < G + 1u; g += gl_NumSubgroups) {
            float square = 0.0;
            for (uint i = gl_SubgroupInvocationID; i < D; i += gl_SubgroupSize) {
                float value = head_value(g, i);
                square += value * value;
            }
            square = subgroupAdd(square);
            if (subgroupElect()) scale_s[g] = inversesqrt(square / float(D) + epsilon);
        }
        barrier();
    }
    [[unroll]] for (uint n = 0u; n < ITEMS; n++) {
        uint i = t + n * WORKERS;
        if (i >= (G + 1u) * (D / 2u)) break;
        uint g = i / (D / 2u), first, second;
        pair_of(i % (D / 2u), first, second);
        float a = head_value(g, first), b = head_value(g, second);
        if (QK_NORM != 0u) {
            float scale = scale_s[g];
            a *= QK_NORM == 1u ? scale * weight_a[n] : scale;
            b *= QK_NORM == 1u ? scale * weight_b[n] : scale;
        }
        float turned = a * turn_c[n] - b * turn_s[n];
        b = b * turn_c[n] + a * turn_s[n];
        a = turned;
        // Rotation keeps the mean square, so only the weights come after it.
        if (QK_NORM == 2u) {
            a *= weight_a[n];
            b *= weight_b[n];
        }
        if (g < G) {
            a *= inverse;
            b *= inverse;
        }
        set_head_value(g, first, a);
        set_head_value(g, second, b);
    }
    barrier();
}

#if KV == 2
// Multiplies q_s and k_s by the Hadamard matrix.
void spread_heads() {
    uint t = gl_LocalInvocationID.x;
    float unit = inversesqrt(float(HADAMARD));
    for (uint turn = 0u; turn < (G * D / 4u + WORKERS - 1u) / WORKERS; turn++) {
        uint i = t + turn * WORKERS;
        if (i < G * D / 4u) q_s[i] = unit * hadamard_four(q_s[i]);
        if (i < D / 4u) k_s[i] = unit * hadamard_four(k_s[i]);
    }
    barrier();
    for (uint distance = 1u; distance < HADAMARD / 4u; distance *= 2u) {
        HADAMARD_STAGE(vec4, q_s, G * D / 4u, distance, t, WORKERS)
        HADAMARD_STAGE(vec4, k_s, D / 4u, distance, t, WORKERS)
        barrier();
    }
}

// The scale of the new key or value. Every subgroup computes it for itself.
#define SCALE_OF_HEAD(scale, head) {                                                                \
        uint top_ = 0u;                                                                             \
        for (uint i_ = gl_SubgroupInvocationID; i_ < D / 4u; i_ += gl_SubgroupSize) top_ = max(top_, top_bits(head[i_])); \
        scale = scale_of(subgroupMax(top_));                                                        \
    }
#endif

// Rounds the new key or value as the cache will hold it, to codes if the cache has them.
void rounded(vec4 low, vec4 high, float scale, out vec4 a, out vec4 b) {
    Eight eight = pack_eight(low, high, scale);
#if KV == 0
    // A zero that the compiler does not know, as for `widened`: it would take the values that are not rounded.
    eight.all ^= max_pages >> 31;
#endif
    unpack_eight(eight, a, b);
}

// Loads values of AHEAD tokens of this lane from `from` on. Tokens beyond the last cached one, or before the window, are
// replaced by the nearest token of the window: their own values may be anything.
#define LOAD_VALUES(from)                                                                           \
    [[unroll]] for (uint n = 0u; n < AHEAD; n++) {                                                   \
        uint token_ = min(max((from) + n * LANES, hidden), max(cached, 1u) - 1u);                    \
        value[n] = LOAD_EIGHT(v, VALUE_AT(page_s[token_ / 16u], kvh, token_ % 16u, column));                            \
    }

// Adds the products of eight dimensions, from dimension 8j on, to the scores of this invocation's token, whose cached key
// has `eight` there.
#define SCORE_EIGHT(j, eight) {                                                                              \
        vec4 a_, b_;                                                                                         \
        if (is_new) rounded(k_s[(j) * 2u], k_s[(j) * 2u + 1u], new_k_scale, a_, b_);                                      \
        else unpack_eight(eight, a_, b_);                                                                    \
        [[unroll]] for (uint g = 0u; g < G; g++)                                                             \
            score[g] += dot(q_s[g * (D / 4u) + (j) * 2u], a_) + dot(q_s[g * (D / 4u) + (j) * 2u + 1u], b_);  \
    }

// Writes value `i` of the part's query heads to the output.
void write_output(uint row, uint part, uint i, float value) {
    if (GATED == 1u) {
        uint from = row * stride + (Q_HEADS + 2u * KV_HEADS + part * G) * D + i, polls = 0u;
        uvec4 words = qkv.v[from / 4u];
        if (TAGGED != 0u) while (poll_again(stale(words, qkv_tag) != 0u, polls, fault, qkv_tag)) words = qkv.v[from / 4u];
        // A row without a sequence has polled for its gates but ignores them: they may be anything, and its output is
        // zero.
        if (value != 0.0) value /= 1.0 + exp(-uintBitsToFloat(words[from % 4u]));
    }
    o.v[row * output_stride + part * G * D + i] = TAGGED != 0u ? tagged(value, o_tag) : floatBitsToUint(value);
}

uint token_page(uint table, uint token) { return pages.v[table + token / 16u]; }

void main() {
    uint row = gl_WorkGroupID.z;
    uint part = gl_WorkGroupID.y; // of all query heads
    uint kvh = part / PARTS;
    uint split = gl_WorkGroupID.x;
    uvec4 info = rows.v[row];
    uint position = info.y;
    uint low = first_visible(position);
    uint last = last_visible(position, position + max(info.w, 1u) - 1u); // a row that is new, FUSED, is its prompt's last
    uint first_block = low / WORKERS;
    uint blocks = last / WORKERS + 1u;
    uint live = min(blocks - first_block, gl_NumWorkGroups.x);
    uint t = gl_LocalInvocationID.x;
    if (info.w == 0u) {
        if (TAGGED != 0u && split == 0u) {
            // A consumer that polls the output assumes that the heads were polled before.
            load_heads(row, part);
            for (uint i = t; i < G * D; i += WORKERS) write_output(row, part, i, 0.0);
        }
        return;
    }
    if (split >= live) return;
    uint table = info.z * max_pages;

    // The keys of this invocation's token in the first block. Tokens past the end read the last token's.
    Eight key[HELD];
    float k_scale = 1.0, v_scale = 1.0, new_k_scale = 1.0, new_v_scale = 1.0;
#if KV == 2
#define LOAD_SCALES(token) { uint at_ = SCALE_AT(page, kvh, token); k_scale = LOAD_SCALE(k, at_); v_scale = LOAD_SCALE(v, at_); }
#else
#define LOAD_SCALES(token)
#endif
    uint page = token_page(table, min((first_block + split) * WORKERS + t, last));
    {
        uint token = min((first_block + split) * WORKERS + t, last);
        uint base = KEY_AT(page, kvh, 0u, token % 16u);
        if (HELD == EIGHTS) { [[unroll]] for (uint j = 0u; j < HELD; j++) key[j] = LOAD_EIGHT(k, base + j * 16u); }
        LOAD_SCALES(token % 16u)
    }
    // The rotary factors and norm weights of the heads, loaded before the first barrier.
    float turn_c[ITEMS], turn_s[ITEMS], weight_a[ITEMS], weight_b[ITEMS];
    if (FUSED == 1u) {
        [[unroll]] for (uint n = 0u; n < ITEMS; n++) {
            uint i = min(t + n * WORKERS, (G + 1u) * (D / 2u) - 1u), first, second;
            uint j = i % (D / 2u);
            pair_of(j, first, second);
            turn_c[n] = 1.0;
            turn_s[n] = 0.0;
            if (j < HALF) {
                turn_c[n] = rope.v[(position * HALF + j) * 2u];
                turn_s[n] = rope.v[(position * HALF + j) * 2u + 1u];
            }
            if (QK_NORM != 0u) {
                bool is_q = i < G * (D / 2u);
                weight_a[n] = is_q ? q_norm.v[first] : k_norm.v[first];
                weight_b[n] = is_q ? q_norm.v[second] : k_norm.v[second];
            }
        }
    }
    load_heads(row, part);
    prepare_heads(position, turn_c, turn_s, weight_a, weight_b);
#if KV == 2
    if (FUSED == 1u) {
        spread_heads();
        SCALE_OF_HEAD(new_k_scale, k_s)
        SCALE_OF_HEAD(new_v_scale, v_s)
    }
#endif

    uint lane = t / EIGHTS, column = t % EIGHTS;
    vec4 acc_a[G], acc_b[G];
    [[unroll]] for (uint g = 0u; g < G; g++) acc_a[g] = acc_b[g] = vec4(0.0);
    for (uint g = t; g < G; g += WORKERS) {
        // A sink is a score without a value: the first split begins with it.
        bool sink = SINKS == 1u && split == 0u;
        m_s[g] = sink ? sinks.v[part * G + g] : LOWEST;
        l_s[g] = sink ? 1.0 : 0.0;
    }

    for (uint block = first_block + split; block < blocks; block += gl_NumWorkGroups.x) {
        uint first = block * WORKERS;
        uint count = min(WORKERS, last + 1u - first);
        bool has_new = FUSED == 1u && first + count == last + 1u;
        // The new token's value is not in the cache yet: its place there may hold anything.
        uint cached = has_new ? count - 1u : count;
        uint hidden = max(low, first) - first; // tokens of the block before the window
        if (t % 16u == 0u) page_s[t / 16u] = page;

        // Scores: invocation t computes token first + t.
        float score[G];
        [[unroll]] for (uint g = 0u; g < G; g++) score[g] = 0.0;
        bool is_new = has_new && t == count - 1u;
        if (HELD == EIGHTS) {
            [[unroll]] for (uint j = 0u; j < HELD; j++) SCORE_EIGHT(j, key[j])
        } else {
            uint base = KEY_AT(page, kvh, 0u, min(first + t, last) % 16u);
            [[dont_unroll]] for (uint from = 0u; from < EIGHTS; from += HELD) {
                [[unroll]] for (uint j = 0u; j < HELD; j++) key[j] = LOAD_EIGHT(k, base + min(from + j, EIGHTS - 1u) * 16u);
                [[unroll]] for (uint j = 0u; j < HELD; j++) if (from + j < EIGHTS) SCORE_EIGHT(from + j, key[j])
            }
        }
#if KV == 2
        float key_scale = is_new ? new_k_scale : k_scale;
        [[unroll]] for (uint g = 0u; g < G; g++) score[g] *= key_scale;
        value_scale_s[t] = is_new ? new_v_scale : v_scale;
#endif
        [[unroll]] for (uint g = 0u; g < G; g++) p_s[g * WORKERS + t] = t < count && t >= hidden ? soft_cap(score[g]) : LOWEST;
        // The next block's keys are loaded while values are accumulated.
        uint next = block + gl_NumWorkGroups.x;
        if (next < blocks) {
            uint token = min(next * WORKERS + t, last);
            page = token_page(table, token);
            uint base = KEY_AT(page, kvh, 0u, token % 16u);
            if (HELD == EIGHTS) { [[unroll]] for (uint j = 0u; j < HELD; j++) key[j] = LOAD_EIGHT(k, base + j * 16u); }
            LOAD_SCALES(token % 16u)
        }
        barrier();
        // The first values are loaded during the softmax.
        Eight value[AHEAD];
        LOAD_VALUES(lane)

        // The softmax of the block: one subgroup per head.
        for (uint g = gl_SubgroupID; g < G; g += gl_NumSubgroups) {
            // Only one lane reads and writes m_s and l_s, so that no lane can read what another one writes already.
            bool elected = subgroupElect();
            float m = LOWEST;
            if (elected) m = m_s[g];
            float top = m;
            for (uint i = gl_SubgroupInvocationID; i < WORKERS; i += gl_SubgroupSize) top = max(top, p_s[g * WORKERS + i]);
            top = subgroupMax(top);
            float sum = 0.0;
            for (uint i = gl_SubgroupInvocationID; i < WORKERS; i += gl_SubgroupSize) {
                bool seen = i < count && i >= hidden;
                float p = seen ? exp(p_s[g * WORKERS + i] - top) : 0.0;
#if KV == 2
                // The scale of a token that is not seen may be anything, also NaN.
                p_s[g * WORKERS + i] = seen ? p * value_scale_s[i] : 0.0;
#else
                p_s[g * WORKERS + i] = p;
#endif
                sum += p;
            }
            sum = subgroupAdd(sum);
            if (elected) {
                float correction = exp(m - top);
                correction_s[g] = correction;
                l_s[g] = l_s[g] * correction + sum;
                m_s[g] = top;
            }
        }
        barrier();

        // Values: invocation (lane, column) accumulates tokens lane, lane + LANES, … for eight dimensions.
        [[unroll]] for (uint g = 0u; g < G; g++) {
            acc_a[g] *= correction_s[g];
            acc_b[g] *= correction_s[g];
        }
        if (lane < LANES) {
            for (uint i = lane; i < cached; i += LANES * AHEAD) {
                [[unroll]] for (uint n = 0u; n < AHEAD; n++) {
                    uint token = i + n * LANES;
                    vec4 a, b;
                    unpack_eight(value[n], a, b);
                    [[unroll]] for (uint g = 0u; g < G; g++) {
                        float p = token < cached ? p_s[g * WORKERS + token] : 0.0;
                        acc_a[g] += p * a;
                        acc_b[g] += p * b;
                    }
                }
                if (i + LANES * AHEAD < cached) LOAD_VALUES(i + LANES * AHEAD)
            }
            if (has_new && lane == 0u) {
                vec4 a, b;
                rounded(v_s[column * 2u], v_s[column * 2u + 1u], new_v_scale, a, b);
                [[unroll]] for (uint g = 0u; g < G; g++) {
                    float p = p_s[g * WORKERS + count - 1u];
                    acc_a[g] += p * a;
                    acc_b[g] += p * b;
                }
            }
        }
        if (has_new && part % PARTS == 0u) {
            // No other workgroup uses this token's cached key or value in this dispatch, and no invocation of this one does.
            uint own = page_s[(count - 1u) / 16u], in_page = position % 16u;
            for (uint i = t; i < EIGHTS; i += WORKERS) {
                STORE_EIGHT(k, KEY_AT(own, kvh, i, in_page), pack_eight(k_s[i * 2u], k_s[i * 2u + 1u], new_k_scale));
                STORE_EIGHT(v, VALUE_AT(own, kvh, in_page, i), pack_eight(v_s[i * 2u], v_s[i * 2u + 1u], new_v_scale));
            }
#if KV == 2
            if (t == 0u) {
                uint at = SCALE_AT(own, kvh, in_page);
                STORE_SCALE(k, at, new_k_scale)
                STORE_SCALE(v, at, new_v_scale)
            }
#endif
        }
        barrier();
    }

    // Add the sums of all lanes.
    if (lane < LANES) {
        [[unroll]] for (uint g = 0u; g < G; g++) {
            reduce_s[(lane * G + g) * (D / 4u) + column * 2u] = acc_a[g];
            reduce_s[(lane * G + g) * (D / 4u) + column * 2u + 1u] = acc_b[g];
        }
    }
    barrier();
    uint slot = row * KV_HEADS * PARTS + part;
    uint splits = slot * gl_NumWorkGroups.x * G * (D + 2u);
    uint own_split = splits + split * G * (D + 2u);
    for (uint i = t; i < G * D; i += WORKERS) {
        float sum = 0.0;
        for (uint n = 0u; n < LANES; n++) sum += reduce_s[(n * G * D + i) / 4u][i % 4u];
        if (live == 1u) write_output(row, part, i, sum / l_s[i / D]);
        else partials.v[own_split + 2u * G + i] = sum;
    }
    if (live == 1u) return;
    for (uint g = t; g < G; g += WORKERS) {
        partials.v[own_split + 2u * g] = m_s[g];
        partials.v[own_split + 2u * g + 1u] = l_s[g];
    }
    // Release the partial results and count; the last workgroup to arrive acquires all of them.
    memoryBarrierBuffer();
    barrier();
    if (t == 0u) last_s = atomicAdd(counters.v[slot], 1u) + 1u;
    barrier();
    if (last_s != live) return;
    memoryBarrierBuffer();
    if (t == 0u) {
        counters.v[slot] = 0u;
        // The reset must be visible before the output: where the output is tagged, it alone orders the next use of the
        // counter.
        memoryBarrierBuffer();
    }
    // The weight of each split relative to the common maximum, and the common sum: one subgroup per head.
    for (uint g = gl_SubgroupID; g < G; g += gl_NumSubgroups) {
        float top = LOWEST;
        for (uint s = gl_SubgroupInvocationID; s < live; s += gl_SubgroupSize)
            top = max(top, partials.v[splits + s * G * (D + 2u) + 2u * g]);
        top = subgroupMax(top);
        float sum = 0.0;
        for (uint s = gl_SubgroupInvocationID; s < live; s += gl_SubgroupSize) {
            uint p = splits + s * G * (D + 2u) + 2u * g;
            float w = exp(partials.v[p] - top);
            p_s[g * WORKERS + s] = w;
            sum += w * partials.v[p + 1u];
        }
        sum = subgroupAdd(sum);
        if (subgroupElect()) l_s[g] = sum;
    }
    barrier();
    for (uint i = t; i < G * D; i += WORKERS) {
        uint g = i / D;
        float sum = 0.0;
        for (uint s = 0u; s < live; s++) sum += p_s[g * WORKERS + s] * partials.v[splits + s * G * (D + 2u) + 2u * G + i];
        write_output(row, part, i, sum / l_s[g]);
    }
}
