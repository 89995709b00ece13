// Keys and values as the cache holds them: KV 0 is f16, KV 1 is f32.
// A key index counts groups of eight dimensions, a value index pairs.
#ifndef KV
#define KV 0
#endif

layout(buffer_reference, std430, buffer_reference_align = 16) restrict buffer KeysInOut { uvec4 v[]; };
#if KV == 1
layout(buffer_reference, std430, buffer_reference_align = 8) restrict buffer ValuesInOut { uvec2 v[]; };
#define LOAD_K(keys, at, a, b) { a = uintBitsToFloat(keys.v[(at) * 2u]); b = uintBitsToFloat(keys.v[(at) * 2u + 1u]); }
#define STORE_K(keys, at, a, b) { keys.v[(at) * 2u] = floatBitsToUint(a); keys.v[(at) * 2u + 1u] = floatBitsToUint(b); }
#define LOAD_V(values, at, pair) { pair = uintBitsToFloat(values.v[at]); }
#define STORE_V(values, at, pair) { values.v[at] = floatBitsToUint(pair); }
#define ROUND_KV(pair) (pair)
#else
layout(buffer_reference, std430, buffer_reference_align = 4) restrict buffer ValuesInOut { uint v[]; };
#define LOAD_K(keys, at, a, b) { uvec4 w_ = keys.v[at]; \
    a = vec4(unpackHalf2x16(w_.x), unpackHalf2x16(w_.y)); b = vec4(unpackHalf2x16(w_.z), unpackHalf2x16(w_.w)); }
#define STORE_K(keys, at, a, b) { vec4 a_ = a, b_ = b; \
    keys.v[at] = uvec4(packHalf2x16(a_.xy), packHalf2x16(a_.zw), packHalf2x16(b_.xy), packHalf2x16(b_.zw)); }
#define LOAD_V(values, at, pair) { pair = unpackHalf2x16(values.v[at]); }
#define STORE_V(values, at, pair) { values.v[at] = packHalf2x16(pair); }
#define ROUND_KV(pair) unpackHalf2x16(packHalf2x16(pair))
#endif
