// Activations that carry their own readiness: the low TAG_BITS bits of a word are the generation of its
// buffer, which a reader polls, so that no barrier stands between writer and reader. The words stay f32
// values, right to 2^-17 of themselves.
//
// Vulkan promises no progress between workgroups: a reader waits a bounded number of polls, then raises the
// device's fault word and goes on with what it has; once it is raised, nobody waits any more.
// Words are polled with `volatile` loads, each lane's all at once: a check between two would cost a round
// trip through the far cache.

const uint TAG_BITS = 7u;
const uint TAG_MASK = (1u << TAG_BITS) - 1u;
// A poll takes most of a microsecond; a whole step takes far less than this many.
const uint MOST_POLLS = 20000u;
const uint POLLS_BETWEEN_LOOKS = 256u;

layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer TaggedIn { volatile uvec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer TaggedIn1 { volatile uint v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) writeonly buffer TaggedOut { volatile uvec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) buffer TaggedInOut { volatile uvec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) writeonly buffer TaggedOut2 { volatile uvec2 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) writeonly buffer TaggedOut1 { volatile uint v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer Fault { volatile uint v[]; };

// The word of generation `tag` that is nearest to a value.
uint tagged(float value, uint tag) {
    uint bits = floatBitsToUint(value), magnitude = bits & 0x7fffffffu;
    // Infinity and NaN become NaN: no carry may make them numbers.
    if (magnitude < 0x7f800000u) magnitude = max(magnitude + (TAG_MASK + 1u) / 2u, tag) - tag;
    return (bits & 0x80000000u) | (magnitude & ~TAG_MASK) | tag;
}
uvec4 tagged(vec4 v, uint tag) { return uvec4(tagged(v.x, tag), tagged(v.y, tag), tagged(v.z, tag), tagged(v.w, tag)); }

// Zero where the words are of generation `tag`.
uint stale(uint word, uint tag) { return (word ^ tag) & TAG_MASK; }
uint stale(uvec4 w, uint tag) { return ((w.x ^ tag) | (w.y ^ tag) | (w.z ^ tag) | (w.w ^ tag)) & TAG_MASK; }

// Whether to poll once more: something was stale, and neither has this reader waited too long nor another.
bool poll_again(bool waiting, inout uint polls, Fault fault) {
    if (!waiting) return false;
    polls++;
    if (polls % POLLS_BETWEEN_LOOKS != 0u) return true;
    if (polls >= MOST_POLLS) fault.v[0] = 1u;
    return fault.v[0] == 0u;
}
