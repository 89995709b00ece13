#version 460
#extension GL_GOOGLE_include_directive : require
// o[r, h] = softmax(q[r, h] · Kᵀ / sqrt(D)) · V over the row's pages up to its position.
//
// qkv    [rows][stride] f32: q heads (, k heads, v heads)
// k      [pages][kv_heads][D/8][16 tokens][8];  v [pages][kv_heads][16][D]; f16, or f32 with KV 1
// output [rows][output_stride] f32
// FUSED  1 (decode): q and k come raw; this kernel normalises and rotates them and appends k and v
//        0 (prompt): `append` has done so
//
// One workgroup serves all G query heads of one KV head of one row, so that K and V are read once, and
// every SPLITS-th block of `threads` tokens. Scores: one token a thread. Values: a pair of dims a thread.
// Several active splits leave {m, l, o} in `partials`; the last to arrive (an atomic count) combines
// them. Traffic: 4·D bytes a token and KV head (f16).
#include "common.glsl"
#include "kv.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint D = 128;
layout(constant_id = 2) const uint ROT = 128;
layout(constant_id = 3) const uint G = 2;
layout(constant_id = 4) const uint KV_HEADS = 8;
layout(constant_id = 5) const uint QK_NORM = 0;
layout(constant_id = 6) const uint FUSED = 1;
layout(constant_id = 7) const uint WORKERS = 128; // the same as the workgroup's size

#include "heads.glsl"

layout(buffer_reference, std430, buffer_reference_align = 4) buffer Partials { coherent float v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer Counters { coherent uint v[]; };

layout(push_constant) uniform Args {
    FloatsIn qkv;
    Words4In rows;
    FloatsIn q_norm;
    FloatsIn k_norm;
    FloatsIn rope;
    WordsIn pages;
    KeysInOut k;
    ValuesInOut v;
    Partials partials;   // [rows][kv_heads][splits][G·(D + 2)]
    Counters counters;   // [rows][kv_heads], zero between uses
    FloatsOut o;
    uint stride;
    uint output_stride;
    uint max_pages;
    float epsilon;
};

const uint PAIRS = D / 2u;
const uint LANES = WORKERS / PAIRS;     // groups of threads that share the tokens of a block

shared float q_s[G * D];
shared float k_s[D];
shared float v_s[D];
shared float p_s[G * WORKERS];
shared float reduce_s[LANES * G * D];
shared float m_s[G];
shared float l_s[G];
shared float correction_s[G];
shared float head_scale[G + 1u];
shared uint page_s[(WORKERS + 15u) / 16u];
shared uint last_s;

#define Q_AT(i) q_s[head_base + (i)]
#define K_AT(i) k_s[i]

// q_s ← rope(norm(q)) / sqrt(D); with FUSED also k_s and v_s, rounded as the cache holds them.
void prepare(uint row, uint kvh, uint position) {
    uint t = gl_LocalInvocationID.x;
    uint q_base = row * stride + kvh * G * D;
    for (uint i = t; i < G * D; i += WORKERS) q_s[i] = qkv.v[q_base + i];
    if (FUSED == 1u) {
        uint k_base = row * stride + (KV_HEADS * G + kvh) * D;
        for (uint i = t; i < D; i += WORKERS) {
            k_s[i] = qkv.v[k_base + i];
            v_s[i] = qkv.v[k_base + KV_HEADS * D + i];
        }
    }
    barrier();
    if (FUSED == 1u && QK_NORM == 1u) {
        for (uint g = gl_SubgroupID; g < G + 1u; g += gl_NumSubgroups) {
            float square = 0.0;
            for (uint i = gl_SubgroupInvocationID; i < D; i += gl_SubgroupSize) {
                float value = g < G ? q_s[g * D + i] : k_s[i];
                square += value * value;
            }
            square = subgroupAdd(square);
            if (subgroupElect()) head_scale[g] = inversesqrt(square / float(D) + epsilon);
        }
        barrier();
        for (uint i = t; i < G * D; i += WORKERS) q_s[i] *= head_scale[i / D] * q_norm.v[i % D];
        for (uint i = t; i < D; i += WORKERS) k_s[i] *= head_scale[G] * k_norm.v[i];
        barrier();
    }
    float inverse = inversesqrt(float(D));
    if (FUSED == 1u) {
        // A pair (i, i + ROT/2) is rotated by the thread that owns i, so that no thread reads what
        // another has already overwritten.
        uint half_dim = ROT / 2u;
        for (uint i = t; i < (G + 1u) * half_dim; i += WORKERS) {
            uint g = i / half_dim, j = i % half_dim;
            uint ro = (position * half_dim + j) * 2u;
            float c = rope.v[ro], s = rope.v[ro + 1u];
            if (g < G) {
                float a = q_s[g * D + j], b = q_s[g * D + j + half_dim];
                q_s[g * D + j] = a * c - b * s;
                q_s[g * D + j + half_dim] = b * c + a * s;
            } else {
                float a = k_s[j], b = k_s[j + half_dim];
                k_s[j] = a * c - b * s;
                k_s[j + half_dim] = b * c + a * s;
            }
        }
        barrier();
    }
    for (uint i = t; i < G * D; i += WORKERS) q_s[i] *= inverse;
    if (FUSED == 1u) {
        for (uint i = t; i < PAIRS; i += WORKERS) {
            vec2 kr = ROUND_KV(vec2(k_s[2u * i], k_s[2u * i + 1u]));
            vec2 vr = ROUND_KV(vec2(v_s[2u * i], v_s[2u * i + 1u]));
            k_s[2u * i] = kr.x;
            k_s[2u * i + 1u] = kr.y;
            v_s[2u * i] = vr.x;
            v_s[2u * i + 1u] = vr.y;
        }
    }
    barrier();
}

void main() {
    uint row = gl_WorkGroupID.z;
    uint kvh = gl_WorkGroupID.y;
    uint split = gl_WorkGroupID.x;
    uvec4 info = rows.v[row];
    uint position = info.y;
    uint blocks = position / WORKERS + 1u;
    uint parts_live = min(blocks, gl_NumWorkGroups.x);
    if (info.w == 0u || split >= parts_live) return;
    uint t = gl_LocalInvocationID.x;
    uint table = info.z * max_pages;
    prepare(row, kvh, position);

    uint lane = t / PAIRS, pair = t % PAIRS;
    vec2 acc[G];
    [[unroll]] for (uint g = 0u; g < G; g++) acc[g] = vec2(0.0);
    for (uint g = t; g < G; g += WORKERS) {
        m_s[g] = -3.0e38;
        l_s[g] = 0.0;
    }

    for (uint block = split; block < blocks; block += gl_NumWorkGroups.x) {
        uint first = block * WORKERS;
        uint count = min(WORKERS, position + 1u - first);
        bool has_new = FUSED == 1u && first + count == position + 1u;
        for (uint i = t; i < (count + 15u) / 16u; i += WORKERS) page_s[i] = pages.v[table + first / 16u + i];
        barrier();

        // Scores: thread t has token first + t.
        float score[G];
        [[unroll]] for (uint g = 0u; g < G; g++) score[g] = -3.0e38;
        if (t < count) {
            [[unroll]] for (uint g = 0u; g < G; g++) score[g] = 0.0;
            if (has_new && t == count - 1u) {
                for (uint i = 0u; i < D; i++) {
                    float value = k_s[i];
                    [[unroll]] for (uint g = 0u; g < G; g++) score[g] += q_s[g * D + i] * value;
                }
            } else {
                uint base = (page_s[t / 16u] * KV_HEADS + kvh) * 2u * D + (t % 16u);
                for (uint j = 0u; j < D / 8u; j++) {
                    vec4 ka, kb;
                    LOAD_K(k, base + j * 16u, ka, kb)
                    [[unroll]] for (uint g = 0u; g < G; g++) {
                        uint qo = g * D + j * 8u;
                        score[g] += q_s[qo] * ka.x + q_s[qo + 1u] * ka.y + q_s[qo + 2u] * ka.z + q_s[qo + 3u] * ka.w
                                  + q_s[qo + 4u] * kb.x + q_s[qo + 5u] * kb.y + q_s[qo + 6u] * kb.z + q_s[qo + 7u] * kb.w;
                    }
                }
            }
        }
        [[unroll]] for (uint g = 0u; g < G; g++) p_s[g * WORKERS + t] = score[g];
        barrier();

        // Softmax of the block: a subgroup takes a head.
        for (uint g = gl_SubgroupID; g < G; g += gl_NumSubgroups) {
            float m = m_s[g], top = m;
            for (uint i = gl_SubgroupInvocationID; i < WORKERS; i += gl_SubgroupSize) top = max(top, p_s[g * WORKERS + i]);
            top = subgroupMax(top);
            float sum = 0.0;
            for (uint i = gl_SubgroupInvocationID; i < WORKERS; i += gl_SubgroupSize) {
                float p = i < count ? exp(p_s[g * WORKERS + i] - top) : 0.0;
                p_s[g * WORKERS + i] = p;
                sum += p;
            }
            sum = subgroupAdd(sum);
            if (subgroupElect()) {
                float correction = exp(m - top);
                correction_s[g] = correction;
                l_s[g] = l_s[g] * correction + sum;
                m_s[g] = top;
            }
        }
        barrier();

        // Values: thread (lane, pair) sums tokens lane, lane + LANES, … for two dims.
        [[unroll]] for (uint g = 0u; g < G; g++) acc[g] *= correction_s[g];
        uint cached = has_new ? count - 1u : count;
        if (lane < LANES) {
            for (uint i = lane; i < cached; i += LANES) {
                vec2 value;
                LOAD_V(v, ((page_s[i / 16u] * KV_HEADS + kvh) * 16u + i % 16u) * PAIRS + pair, value)
                [[unroll]] for (uint g = 0u; g < G; g++) acc[g] += p_s[g * WORKERS + i] * value;
            }
            if (has_new && lane == 0u) {
                vec2 value = vec2(v_s[2u * pair], v_s[2u * pair + 1u]);
                [[unroll]] for (uint g = 0u; g < G; g++) acc[g] += p_s[g * WORKERS + count - 1u] * value;
            }
        }
        if (has_new) {
            // Append after every read of the block: no other workgroup reads this token in this dispatch.
            uint page = page_s[(count - 1u) / 16u], in_page = position % 16u;
            uint head_base = (page * KV_HEADS + kvh) * 16u;
            for (uint i = t; i < D / 8u; i += WORKERS) {
                uint d = i * 8u;
                STORE_K(k, (page * KV_HEADS + kvh) * 2u * D + i * 16u + in_page,
                        vec4(k_s[d], k_s[d + 1u], k_s[d + 2u], k_s[d + 3u]),
                        vec4(k_s[d + 4u], k_s[d + 5u], k_s[d + 6u], k_s[d + 7u]))
            }
            for (uint i = t; i < PAIRS; i += WORKERS)
                STORE_V(v, (head_base + in_page) * PAIRS + i, vec2(v_s[2u * i], v_s[2u * i + 1u]))
        }
        barrier();
    }

    // Sum over the lanes.
    if (lane < LANES) {
        [[unroll]] for (uint g = 0u; g < G; g++) {
            reduce_s[(lane * G + g) * D + 2u * pair] = acc[g].x;
            reduce_s[(lane * G + g) * D + 2u * pair + 1u] = acc[g].y;
        }
    }
    barrier();
    uint out_base = row * output_stride + kvh * G * D;
    uint slot = (row * KV_HEADS + kvh);
    uint part = (slot * gl_NumWorkGroups.x + split) * G * (D + 2u);
    for (uint i = t; i < G * D; i += WORKERS) {
        float sum = 0.0;
        for (uint n = 0u; n < LANES; n++) sum += reduce_s[n * G * D + i];
        if (parts_live == 1u) o.v[out_base + i] = sum / l_s[i / D];
        else partials.v[part + 2u * G + i] = sum;
    }
    if (parts_live == 1u) return;
    for (uint g = t; g < G; g += WORKERS) {
        partials.v[part + 2u * g] = m_s[g];
        partials.v[part + 2u * g + 1u] = l_s[g];
    }
    // Release the partials, count; the last to arrive acquires all of them.
    memoryBarrierBuffer();
    barrier();
    if (t == 0u) last_s = atomicAdd(counters.v[slot], 1u) + 1u;
    barrier();
    if (last_s != parts_live) return;
    memoryBarrierBuffer();
    if (t == 0u) counters.v[slot] = 0u;
    uint parts = slot * gl_NumWorkGroups.x * G * (D + 2u);
    for (uint i = t; i < G * D; i += WORKERS) {
        uint g = i / D;
        float m = -3.0e38;
        for (uint s = 0u; s < parts_live; s++) m = max(m, partials.v[parts + s * G * (D + 2u) + 2u * g]);
        float l = 0.0, sum = 0.0;
        for (uint s = 0u; s < parts_live; s++) {
            uint p = parts + s * G * (D + 2u);
            float w = exp(partials.v[p + 2u * g] - m);
            l += w * partials.v[p + 2u * g + 1u];
            sum += w * partials.v[p + 2u * G + i];
        }
        o.v[out_base + i] = sum / l;
    }
}
