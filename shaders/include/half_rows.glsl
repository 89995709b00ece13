// Rows of floats as f16 operands of products with weights in f16 (`fragments.glsl` with WEIGHT 1; include after it). A value is
// the sum of two f16, `most` and `rest` / 1024: 22 bits of it, or multiples of 2^-34 if that is less exact. They are two rows of
// a fragment, whose sums are joined.
//
// A value beyond 65,504 is infinite in f16, and so are the sums, or no numbers. A lane group that finds such sums multiplies
// its columns once more, times a power of two that makes the largest a large f16, and scales the sums back.
#if MATRIX == 1
#extension GL_KHR_shader_subgroup_vote : require
// f16 arithmetic keeps subnormal numbers.
#extension GL_EXT_spirv_intrinsics : require
spirv_execution_mode(extensions = ["SPV_KHR_float_controls"], capabilities = [4464], 4459, 16);
#endif

struct HalfScale {
    float most; // the largest magnitude of the lane's values so far
    float down; // what they are multiplied by
    float up;   // what their sums are multiplied by; 0 if neither is
};
#define NO_HALF_SCALE HalfScale(0.0, 1.0, 0.0)

// Splits four values: the pairs of `most` in x and y, of `rest` in z and w. `zero`: `widened`.
uvec4 split_halves(vec4 v, uint zero, inout HalfScale scale) {
    vec4 size = abs(v);
    scale.most = max(scale.most, max(max(size.x, size.y), max(size.z, size.w)));
    v *= scale.down;
    uvec2 most = uvec2(packHalf2x16(v.xy), packHalf2x16(v.zw));
    vec2 low = (v.xy - widened(most.x, zero)) * 1024.0, high = (v.zw - widened(most.y, zero)) * 1024.0;
    return uvec4(most, packHalf2x16(low), packHalf2x16(high));
}

vec4 join_halves(Sums sums, HalfScale scale) {
    vec4 sum = SUMS_LOW(sums) + SUMS_HIGH(sums) * (1.0 / 1024.0);
    return scale.up == 0.0 ? sum : sum * scale.up;
}

// Whether some of the lane's sums are infinite or not numbers.
bool overflows(Sums sums) {
    uvec4 most = max(floatBitsToUint(SUMS_LOW(sums)) & 0x7fffffffu, floatBitsToUint(SUMS_HIGH(sums)) & 0x7fffffffu);
    return any(greaterThanEqual(most, uvec4(0x7f800000u)));
}

// Whether a lane of the group has such sums: without cooperative matrices, whose products have barriers, of the workgroup.
// And the lane group's largest value.
#if MATRIX == 1
bool any_overflows(bool own) { return subgroupAny(own); }
uint largest_bits(float own) { return subgroupMax(floatBitsToUint(own)); }
#else
bool any_overflows(bool own) {
    barrier();
    exchange_tokens[gl_LocalInvocationIndex].x = own ? 1u : 0u;
    barrier();
    uint any = 0u;
    for (uint i = 0u; i < LANES; i++) any |= exchange_tokens[i].x;
    return any != 0u;
}
uint largest_bits(float own) {
    barrier();
    exchange_tokens[gl_LocalInvocationIndex].x = floatBitsToUint(own);
    barrier();
    uint most = 0u;
    for (uint i = 0u; i < 32u; i++) most = max(most, exchange_tokens[LANE_GROUP * 32u + i].x);
    return most;
}
#endif

// Chooses the power of two with which the exponent of the lane group's largest value becomes 14.
void set_half_scale(inout HalfScale scale) {
    uint exponent = clamp(largest_bits(scale.most) >> 23, 16u, 254u);
    scale.down = uintBitsToFloat((268u - exponent) << 23);
    scale.up = uintBitsToFloat((exponent - 14u) << 23);
}
