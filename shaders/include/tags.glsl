// Tagged activations: the low TAG_BITS bits of each word are a generation number of its buffer. A reader polls the word
// until it carries the generation that the reader expects, so that no barrier is needed between the call that writes a
// word and the call that reads it. The words are still f32 values, with a relative error of at most 2^-17.
//
// A step zeroes its tagged buffers first (`clear_tags`), so that a reader never mistakes a word of an earlier step for
// one of its own step. A workgroup polls only for words of workgroups that were launched before it: those of earlier
// calls, or those with smaller numbers in its own call. Polling therefore ends even if the device launches no new
// workgroups, as a device does before it switches to another program's context.
//
// Vulkan does not guarantee forward progress between workgroups, so a reader polls at most MOST_POLLS times. After that
// it sets the fault word to the number of its call and continues with the words that it has. Once the fault word is
// set, every reader stops polling. While a call waits for another device (`all_reduce`), the word behind the fault word is
// set, and readers that find it set begin to count anew. Polls are counted instead of time because a workgroup does not poll while another
// program's context is on the device. Words are polled with `volatile` loads, and a lane issues all of its loads before
// it checks any of them: a check between two loads would cost a round trip to the L2 cache.

const uint TAG_BITS = 7u;
const uint TAG_MASK = (1u << TAG_BITS) - 1u;
// The tag argument of a call holds the call's number in the bits from CALL_SHIFT on (`kernels::tags::number_calls`).
const uint CALL_SHIFT = 8u;
// A poll takes nearly 1 µs, so this limit is about 20 ms. A step takes far less. The fault word is read at every
// POLLS_BETWEEN_LOOKS-th poll.
const uint MOST_POLLS = 30000u;
const uint POLLS_BETWEEN_LOOKS = 256u;

layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer TaggedIn { volatile uvec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer TaggedIn1 { volatile uint v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) writeonly buffer TaggedOut { volatile uvec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) buffer TaggedInOut { volatile uvec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) writeonly buffer TaggedOut2 { volatile uvec2 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) writeonly buffer TaggedOut1 { volatile uint v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer Fault { volatile uint v[]; };

// Returns the word of generation `tag` whose float value is nearest to `value`.
uint tagged(float value, uint tag) {
    tag &= TAG_MASK;
    uint bits = floatBitsToUint(value), magnitude = bits & 0x7fffffffu;
    // Infinity and NaN become NaN: without this exception a carry could turn them into finite numbers.
    if (magnitude < 0x7f800000u) magnitude = max(magnitude + (TAG_MASK + 1u) / 2u, tag) - tag;
    return (bits & 0x80000000u) | (magnitude & ~TAG_MASK) | tag;
}
uvec4 tagged(vec4 v, uint tag) { return uvec4(tagged(v.x, tag), tagged(v.y, tag), tagged(v.z, tag), tagged(v.w, tag)); }

// Returns zero if the words are of generation `tag`.
uint stale(uint word, uint tag) { return (word ^ tag) & TAG_MASK; }
uint stale(uvec4 w, uint tag) { return ((w.x ^ tag) | (w.y ^ tag) | (w.z ^ tag) | (w.w ^ tag)) & TAG_MASK; }

#ifdef DEVICES_ID
// Whether the step waits for other devices (`all_reduce`). A constant of its own: to look at the second word costs a step of
// a small model on one device 1 to 4 % of its time.
layout(constant_id = DEVICES_ID) const uint DEVICES = 0;

// Returns whether to poll again: a word was stale, and no reader has reached the poll limit.
bool poll_again(bool waiting, inout uint polls, Fault fault, uint tag) {
    if (!waiting) return false;
    polls++;
    if (polls % POLLS_BETWEEN_LOOKS != 0u) return true;
    // Time in which a call waits for another device does not count.
    if (DEVICES != 0u && fault.v[1] != 0u) polls = 0u;
    else if (polls >= MOST_POLLS) fault.v[0] = max(tag >> CALL_SHIFT, 1u);
    return fault.v[0] == 0u;
}
#endif
