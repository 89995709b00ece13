#version 460
#extension GL_GOOGLE_include_directive : require
// Prefill: QK-norm, RoPE and KV cache append, before `flash` or `attention`. For each row:
//   q = rope(norm(q)), in place;  K page ← rope(norm(k));  V page ← v, or with V_NORM 1 v · rsqrt(mean v² + eps)
// With QK_NORM 0 without norm, with 1 as written, with 2 norm(rope(q)) and norm(rope(k)).
// With 8-bit codes (KV 2), q and k are then multiplied by a Hadamard matrix (`kv.glsl`), and k and v get their scales.
//
// qkv   [rows][stride] f32: q heads, k heads, v heads
// k, v  KV cache pages: `kv.glsl`
// QUERY_SCALES  where in the rotary table the factor of each position's query begins, in floats; 0 for none
// One workgroup processes one head of one row. Traffic: one head read, one head written.
#include "common.glsl"
#include "kv.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint D = 128;
layout(constant_id = 2) const uint ROT = 128;
layout(constant_id = 3) const uint Q_HEADS = 16;
layout(constant_id = 4) const uint KV_HEADS = 8;
layout(constant_id = 5) const uint QK_NORM = 0;
layout(constant_id = 6) const uint QUERY_SCALES = 0;
layout(constant_id = 7) const uint V_NORM = 0;

layout(push_constant) uniform Args {
    FloatsInOut qkv;
    Words4In rows;
    FloatsIn q_norm;
    FloatsIn k_norm;
    FloatsIn rope;
    WordsIn pages;
    CacheInOut k;
    CacheInOut v;
    uint stride;
    uint max_pages;
    float epsilon;
};

shared float head[D];
shared float rotated[D];
shared float partial[256];

void main() {
    uint row = gl_WorkGroupID.y;
    uint h = gl_WorkGroupID.x;
    uvec4 info = rows.v[row];
    if (info.w == 0u) return;
    uint t = gl_LocalInvocationID.x;
    uint base = row * stride + h * D;
    float square = 0.0;
    for (uint i = t; i < D; i += gl_WorkGroupSize.x) {
        float value = qkv.v[base + i];
        head[i] = value;
        square += value * value;
    }
    bool is_v = h >= Q_HEADS + KV_HEADS;
    bool is_k = h >= Q_HEADS && !is_v;
    if (is_v ? V_NORM == 1u : QK_NORM != 0u) {
        square = subgroupAdd(square);
        if (subgroupElect()) partial[gl_SubgroupID] = square;
        barrier();
        float sum = 0.0;
        for (uint i = 0u; i < gl_NumSubgroups; i++) sum += partial[i];
        float scale = inversesqrt(sum / float(D) + epsilon);
        for (uint i = t; i < D; i += gl_WorkGroupSize.x)
            head[i] *= scale * (is_v || QK_NORM == 2u ? 1.0 : is_k ? k_norm.v[i] : q_norm.v[i]);
    }
    barrier();
    for (uint i = t; i < D; i += gl_WorkGroupSize.x) {
        float value = head[i];
        if (!is_v && i < ROT) {
            bool low = i < ROT / 2u;
            uint j = low ? i : i - ROT / 2u;
            uint at = (info.y * (ROT / 2u) + j) * 2u;
            value = value * rope.v[at] + (low ? -head[j + ROT / 2u] : head[j]) * rope.v[at + 1u];
        }
        // Rotation keeps the mean square, so only the weights come after it.
        if (QK_NORM == 2u && !is_v) value *= is_k ? k_norm.v[i] : q_norm.v[i];
        if (h < Q_HEADS && QUERY_SCALES > 0u) value *= rope.v[QUERY_SCALES + info.y];
#if KV != 2
        if (h < Q_HEADS) qkv.v[base + i] = value;
        else
#endif
        rotated[i] = value;
    }
#if KV == 2
    barrier();
    if (!is_v) {
        for (uint distance = 1u; distance < HADAMARD; distance *= 2u) {
            HADAMARD_STAGE(float, rotated, D, distance, t, gl_WorkGroupSize.x)
            barrier();
        }
    }
    const float unit = is_v ? 1.0 : inversesqrt(float(HADAMARD));
    if (h < Q_HEADS) {
        for (uint i = t; i < D; i += gl_WorkGroupSize.x) qkv.v[base + i] = rotated[i] * unit;
        return;
    }
    // Every subgroup finds the largest magnitude for itself.
    uint top = 0u;
    for (uint i = gl_SubgroupInvocationID; i < D; i += gl_SubgroupSize)
        top = max(top, floatBitsToUint(rotated[i] * unit) & 0x7fffffffu);
    float scale = scale_of(subgroupMax(top));
#else
    const float unit = 1.0, scale = 1.0;
    if (h < Q_HEADS) return;
    barrier();
#endif
    uint kvh = h - Q_HEADS - (is_v ? KV_HEADS : 0u);
    uint page = pages.v[info.z * max_pages + info.y / 16u];
    uint in_page = info.y % 16u;
#if KV == 2
    if (t == 0u) {
        uint at = SCALE_AT(page, kvh, in_page);
        if (is_v) STORE_SCALE(v, at, scale) else STORE_SCALE(k, at, scale)
    }
#endif
    for (uint i = t; i < D / 8u; i += gl_WorkGroupSize.x) {
        uint d = i * 8u;
        Eight eight = pack_eight(unit * vec4(rotated[d], rotated[d + 1u], rotated[d + 2u], rotated[d + 3u]),
                                 unit * vec4(rotated[d + 4u], rotated[d + 5u], rotated[d + 6u], rotated[d + 7u]), scale);
        if (is_v) { STORE_EIGHT(v, VALUE_AT(page, kvh, in_page, i), eight); }
        else { STORE_EIGHT(k, KEY_AT(page, kvh, i, in_page), eight); }
    }
}
