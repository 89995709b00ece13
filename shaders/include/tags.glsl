// Tagged activations: the low TAG_BITS bits of a word are a generation number of its buffer, which a reader polls, so
// that no barrier stands between the call that writes the word and the call that reads it. The words are still f32
// values, exact to 2^-17 of their size.
//
// A step zeroes its tagged buffers first (`clear_tags`), so that a reader never takes a word of an earlier step for one
// of its own. A workgroup waits only for words of workgroups that were launched before it: earlier calls, or smaller
// numbers within its own call. So it ends even if the device launches nothing new, as a device does before it switches
// to another program's context.
//
// Vulkan promises no progress between workgroups: a reader polls at most MOST_POLLS times. Then it sets the fault word
// to the number of its call and continues with what it has; once the fault word is set, no reader waits any more.
// Polls are counted, not time: a workgroup does not poll while another program's context is on the device.
// Words are polled with `volatile` loads, all of a lane's at once: a check between two would cost a round
// trip through the far cache.

const uint TAG_BITS = 7u;
const uint TAG_MASK = (1u << TAG_BITS) - 1u;
// The tag that a call waits for has the call's number in its upper bits (`kernels::tags::number_calls`).
const uint CALL_SHIFT = 8u;
// A poll takes most of a microsecond, so this is some 20 ms. A step takes far less.
const uint MOST_POLLS = 30000u;
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
    tag &= TAG_MASK;
    uint bits = floatBitsToUint(value), magnitude = bits & 0x7fffffffu;
    // Infinity and NaN become NaN: no carry may make them numbers.
    if (magnitude < 0x7f800000u) magnitude = max(magnitude + (TAG_MASK + 1u) / 2u, tag) - tag;
    return (bits & 0x80000000u) | (magnitude & ~TAG_MASK) | tag;
}
uvec4 tagged(vec4 v, uint tag) { return uvec4(tagged(v.x, tag), tagged(v.y, tag), tagged(v.z, tag), tagged(v.w, tag)); }

// Zero if the words are of generation `tag`.
uint stale(uint word, uint tag) { return (word ^ tag) & TAG_MASK; }
uint stale(uvec4 w, uint tag) { return ((w.x ^ tag) | (w.y ^ tag) | (w.z ^ tag) | (w.w ^ tag)) & TAG_MASK; }

// Whether to poll once more: a word was stale, and neither this reader nor another has waited too long.
bool poll_again(bool waiting, inout uint polls, Fault fault, uint tag) {
    if (!waiting) return false;
    polls++;
    if (polls % POLLS_BETWEEN_LOOKS != 0u) return true;
    if (polls >= MOST_POLLS) fault.v[0] = max(tag >> CALL_SHIFT, 1u);
    return fault.v[0] == 0u;
}
