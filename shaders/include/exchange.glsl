// The words that pass between the devices of a replica with tensor parallelism: three words of data and a check that
// contains the number of the exchange. A word whose check is right is complete and of this exchange, whatever was in its
// place before. Include `tags.glsl` first.

layout(buffer_reference, std430, buffer_reference_align = 16) writeonly buffer Outbox { volatile uvec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Inbox { volatile uvec4 v[]; };

// The number of slots for exchanges; `all_reduce.comp` tells why they suffice.
const uint SLOTS = 4u;
// The number of polls between two reads of the host's word and of the fault word.
const uint POLLS_BETWEEN_EXCHANGE_LOOKS = 64u;
// In the fault word: no call of this step polled too long for tagged words, but an exchange did not end.
const uint EXCHANGE_FAULT = 0xfffffeu;
// In the words that a device sends whose fault word is set.
const uint FAILED = 0x5bd1e995u;

uint rotated(uint bits, uint by) { return bits << by | bits >> (32u - by); }

// The factor spreads the difference between the numbers of two exchanges over all bits.
uint check_of(uvec3 bits, uint exchange) {
    return exchange * 0x9e3779b1u ^ bits.x ^ rotated(bits.y, 11u) ^ rotated(bits.z, 22u);
}

// Returns the word that carries `bits`, or that tells the host of a fault: `fault` is the fault word.
uvec4 exchange_word(uvec3 bits, uint exchange, uint fault) {
    bool failed = fault != 0u;
    if (failed) bits = uvec3(FAILED, exchange, fault);
    return uvec4(bits, check_of(bits, exchange) ^ (failed ? FAILED : 0u));
}

bool is_complete(uvec4 word, uint exchange) { return word.w == check_of(word.xyz, exchange); }
