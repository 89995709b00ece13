// Definitions shared by all kernels: buffer reference types and number formats. Buffers are loaded as 32-bit words
// only, and 16-bit values are unpacked with bit operations, so that the kernels run on every Vulkan 1.3 driver.
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require

layout(buffer_reference, std430, buffer_reference_align = 16) readonly restrict buffer Words4In { uvec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) readonly restrict buffer Floats4In { vec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) readonly restrict buffer WordsIn { uint v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) readonly restrict buffer FloatsIn { float v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) writeonly restrict buffer FloatsOut { float v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) restrict buffer FloatsInOut { float v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) writeonly restrict buffer WordsOut { uint v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) restrict buffer WordsInOut { uint v[]; };

// Stores component `part` of a 16-byte word. Each branch names a constant component: some drivers implement a store to a
// dynamically indexed component as a store of the whole vector.
#define PUT_COMPONENT(four, part, word) { uint part_ = part, word_ = word; \
    if (part_ == 0u) four.x = word_; else if (part_ == 1u) four.y = word_; \
    else if (part_ == 2u) four.z = word_; else four.w = word_; }

// NVIDIA's compiler takes a float that is rounded to f16 and widened again for the float itself, so that no remainder would be
// left of it. Functions that split floats into two f16 widen `most ^ zero`: a zero that the compiler does not know, such as
// the upper bit of a push constant that is a number of things.
vec2 widened(uint most, uint zero) { return unpackHalf2x16(most ^ zero); }

float bf16_low(uint w) { return uintBitsToFloat(w << 16); }
float bf16_high(uint w) { return uintBitsToFloat(w & 0xffff0000u); }

// The weight format of the shader variant: 0 is bfloat16, 1 is float16, 2 is float32, 3 is codes (`codes.glsl`).
#ifndef WEIGHT
#define WEIGHT 0
#endif
#if WEIGHT == 2
#define WORDS4_PER_8 2u
#else
#define WORDS4_PER_8 1u
#endif

// Unpacks a 16-byte word of eight 16-bit weights into eight floats.
void unpack8(uvec4 w, out vec4 a, out vec4 b) {
#if WEIGHT == 1
    a = vec4(unpackHalf2x16(w.x), unpackHalf2x16(w.y));
    b = vec4(unpackHalf2x16(w.z), unpackHalf2x16(w.w));
#else
    a = vec4(bf16_low(w.x), bf16_high(w.x), bf16_low(w.y), bf16_high(w.y));
    b = vec4(bf16_low(w.z), bf16_high(w.z), bf16_low(w.w), bf16_high(w.w));
#endif
}
