// The KV cache's element formats and layout, accessed eight dimensions at a time: KV 0 stores f16, KV 1 stores f32.
//   keys   [pages][kv_heads][D/8][16 tokens][8]     values [pages][kv_heads][16 tokens][D/8][8]
#ifndef KV
#define KV 0
#endif

layout(buffer_reference, std430, buffer_reference_align = 16) restrict buffer CacheInOut { uvec4 v[]; };

#if KV == 1
#define CACHE_WORDS 2u
struct Eight { uvec4 low; uvec4 high; };
#define LOAD_EIGHT(cache, at) Eight(cache.v[(at) * 2u], cache.v[(at) * 2u + 1u])
void unpack_eight(Eight e, out vec4 a, out vec4 b) {
    a = uintBitsToFloat(e.low);
    b = uintBitsToFloat(e.high);
}
Eight pack_eight(vec4 a, vec4 b) { return Eight(floatBitsToUint(a), floatBitsToUint(b)); }
#define STORE_EIGHT(cache, at, e) { cache.v[(at) * 2u] = (e).low; cache.v[(at) * 2u + 1u] = (e).high; }
#else
struct Eight { uvec4 all; };
#define LOAD_EIGHT(cache, at) Eight(cache.v[at])
void unpack_eight(Eight e, out vec4 a, out vec4 b) {
    a = vec4(unpackHalf2x16(e.all.x), unpackHalf2x16(e.all.y));
    b = vec4(unpackHalf2x16(e.all.z), unpackHalf2x16(e.all.w));
}
Eight pack_eight(vec4 a, vec4 b) {
    return Eight(uvec4(packHalf2x16(a.xy), packHalf2x16(a.zw), packHalf2x16(b.xy), packHalf2x16(b.zw)));
}
#define STORE_EIGHT(cache, at, e) cache.v[at] = (e).all
#endif
