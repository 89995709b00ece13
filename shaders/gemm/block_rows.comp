#version 460
#extension GL_GOOGLE_include_directive : require
// Prepares rows of activations for `matmul`: an optional RMSNorm, scaling, rounding and reordering.
//
//   y[r] = round( x[r] ⊙ norm · 2^-e(r) ),  scales[r] = 2^e(r) · rsqrt(mean x[r]² + eps)
//
// norm       NORM 0: norm is 1, and scales[r] = 2^e(r)
// ORDER 0    y is f32, and e(r) = 0: [rows/4][cols][4 rows]
// ORDER 1    y is f16, and 2^e(r) the power of two at or below the row's largest magnitude, so that nothing overflows and
//            elements below 2^-14 of the largest are subnormal: [rows][cols]
// x          [rows][x_stride] f32;  cols is k padded to 32. Columns from k on and rows beyond those in use, up to a multiple
//            of eight, are zeros
// slots      EACH > 0 (MoE): row r of y is row slots[r] / EACH of x, or zeros where the slot is NOBODY; tiles without an
//            expert are left unchanged (`expert_plan`). With EACH = ALL, row r of y is row r of x
//
// One workgroup prepares GROUP rows. It reads them twice: for the largest magnitude and the squares, then to write them;
// the second time they are in the caches.
// Traffic: x once, 4·rows·k bytes; y once, 4 or 2 bytes a value.
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint LANES = 128;   // the workgroup's size
layout(constant_id = 2) const uint NORM = 0;
layout(constant_id = 3) const uint ORDER = 0;
layout(constant_id = 4) const uint EACH = 0;      // choices per row
layout(constant_id = 5) const uint TILE = 16;     // rows of a tile of sorted rows
layout(constant_id = 6) const uint GROUP = 8;     // rows of a workgroup: 8, with ORDER 1 fewer

layout(buffer_reference, std430, buffer_reference_align = 16) writeonly restrict buffer Words4Out { uvec4 v[]; };

layout(push_constant) uniform Args {
    Floats4In x;
    Floats4In norm;
    WordsIn count;    // descriptor of the prompt step; word 2 is the number of rows in use
    WordsIn slots;
    WordsIn tiles;
    Words4Out y;
    FloatsOut scales;
    uint k;
    uint x_stride;    // in floats
    float epsilon;
    uint rows;        // in use; 0: `count` holds the number
};

const uint NOBODY = 0xffffffffu;
const uint ALL = 0xffffffffu;
const uint PADDED = 8u;     // rows to a multiple of which y is padded

// The largest magnitudes and the sums of squares of each subgroup, which has at least four invocations.
shared vec2 stats_s[(LANES + 3u) / 4u * GROUP];
shared float factor_s[GROUP];

// Returns four values from column 4q on, with zeros from column k on.
vec4 before_k(vec4 values, uint q) { return mix(vec4(0.0), values, lessThan(q * 4u + uvec4(0u, 1u, 2u, 3u), uvec4(k))); }

// Returns four values of a row, from column 4q on; zeros from column k on.
vec4 raw_values(uint row, uint q, bool there) {
    if (!there || q * 4u >= k) return vec4(0.0);
    return before_k(x.v[row * (x_stride / 4u) + q], q);
}

// Returns the factors of four columns, from column 4q on; zeros from column k on.
vec4 factors(uint q) {
    if (NORM == 0u) return vec4(1.0);
    if (q * 4u >= k) return vec4(0.0);
    return before_k(norm.v[q], q);
}

// Returns four values of a row with the factors of their columns. A row that is not there has positive zeros.
vec4 scaled_values(uint row, uint q, bool there, vec4 weight) {
    return raw_values(row, q, there) * (there ? weight : vec4(0.0));
}

void main() {
    uint used = rows != 0u ? rows : count.v[2];
    uint first = (gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x) * GROUP;
    if (first >= (used + PADDED - 1u) / PADDED * PADDED) return;
    if (EACH > 0u) {
        if (tiles.v[first / TILE] == NOBODY) return;
    }
    uint t = gl_LocalInvocationID.x;
    uint source[GROUP];
    bool there[GROUP];
    [[unroll]] for (uint r = 0u; r < GROUP; r++) {
        source[r] = first + r;
        there[r] = first + r < used;
        if (EACH > 0u && EACH != ALL) {
            uint slot = slots.v[min(first + r, used - 1u)];
            there[r] = there[r] && slot != NOBODY;
            source[r] = there[r] ? slot / max(EACH, 1u) : 0u;
        }
    }
    uint quads = (k + 3u) / 4u, chunks = (k + 31u) / 32u * 4u;

    if (NORM == 1u || ORDER > 0u) {
        vec2 stats[GROUP];
        [[unroll]] for (uint r = 0u; r < GROUP; r++) stats[r] = vec2(0.0);
        for (uint q = t; q < quads; q += LANES) {
            vec4 weight = factors(q);
            [[unroll]] for (uint r = 0u; r < GROUP; r++) {
                vec4 raw = raw_values(source[r], q, there[r]);
                vec4 v = abs(raw * weight);
                stats[r].x = max(stats[r].x, max(max(v.x, v.y), max(v.z, v.w)));
                if (NORM == 1u) stats[r].y += dot(raw, raw);
            }
        }
        [[unroll]] for (uint r = 0u; r < GROUP; r++) {
            vec2 all = vec2(subgroupMax(stats[r].x), subgroupAdd(stats[r].y));
            if (subgroupElect()) stats_s[gl_SubgroupID * GROUP + r] = all;
        }
        barrier();
        for (uint r = t; r < GROUP; r += LANES) {
            float most = 0.0, square = 0.0;
            for (uint i = 0u; i < gl_NumSubgroups; i++) {
                most = max(most, stats_s[i * GROUP + r].x);
                square += stats_s[i * GROUP + r].y;
            }
            // The exponent's bits are at most those of 2^126, so that its inverse is no subnormal.
            uint bits = ORDER > 0u ? min(floatBitsToUint(most) & 0x7f800000u, 253u << 23) : 127u << 23;
            factor_s[r] = uintBitsToFloat((254u << 23) - bits);
            float scale = uintBitsToFloat(bits);
            if (NORM == 1u) scale *= inversesqrt(square / float(k) + epsilon);
            scales.v[first + r] = scale;
        }
        barrier();
    } else {
        for (uint r = t; r < GROUP; r += LANES) scales.v[first + r] = 1.0;
    }

    float factor[GROUP];
    [[unroll]] for (uint r = 0u; r < GROUP; r++) factor[r] = ORDER > 0u ? factor_s[r] : 1.0;
    for (uint c = t; c < chunks; c += LANES) {
        if (ORDER == 1u) {
            vec4 weight_a = factors(c * 2u), weight_b = factors(c * 2u + 1u);
            [[unroll]] for (uint r = 0u; r < GROUP; r++) {
                vec4 a = scaled_values(source[r], c * 2u, there[r], weight_a) * factor[r];
                vec4 b = scaled_values(source[r], c * 2u + 1u, there[r], weight_b) * factor[r];
                y.v[(first + r) * chunks + c] =
                    uvec4(packHalf2x16(a.xy), packHalf2x16(a.zw), packHalf2x16(b.xy), packHalf2x16(b.zw));
            }
            continue;
        }
        for (uint h = 0u; h < 2u; h++) {
            vec4 weight = factors(c * 2u + h);
            vec4 v[PADDED]; // GROUP is 8 here
            [[unroll]] for (uint r = 0u; r < PADDED; r++) {
                uint of_ = min(r, GROUP - 1u);
                v[r] = scaled_values(source[of_], c * 2u + h, there[of_], weight) * factor[of_];
            }
            [[unroll]] for (uint i = 0u; i < 4u; i++) {
                uint column = c * 8u + h * 4u + i;
                uint at = first / 4u * (chunks * 8u) + column;
                y.v[at] = floatBitsToUint(vec4(v[0][i], v[1][i], v[2][i], v[3][i]));
                y.v[at + chunks * 8u] = floatBitsToUint(vec4(v[4][i], v[5][i], v[6][i], v[7][i]));
            }
        }
    }
}
