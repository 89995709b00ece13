// Codes of the KV cache as f16 integers for matrix products (`fragments.glsl` with WEIGHT 1). Include after both.
// Returns four codes as two pairs of f16 integers.
#if MATRIX == 1
uvec2 halves_of(uint codes) {
    // Under the exponent of 1024, a code with its sign inverted is 1024 + 128 + code.
    const f16vec2 zero = f16vec2(1152.0hf);
    return uvec2(packFloat2x16(unpackFloat2x16((codes & 0x00ff00ffu) ^ 0x64806480u) - zero),
                 packFloat2x16(unpackFloat2x16((codes >> 8 & 0x00ff00ffu) ^ 0x64806480u) - zero));
}
#else
uvec2 halves_of(uint codes) {
    vec4 x = codes_of(codes);
    return uvec2(packHalf2x16(x.xy), packHalf2x16(x.zw));
}
#endif
