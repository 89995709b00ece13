#version 460
#extension GL_GOOGLE_include_directive : require
// Packs rows of a file's quantised weights as `memory::pack::pack` does, bit for bit: planes of codes, scales and minimums
// in f16, and a factor for each row (`memory::pack::codes` defines the layouts and the factor).
//
// raw      32-bit words: for each packed row the byte in `raw` at which its blocks begin, or ABSENT or BEYOND; somewhere
//          behind them the rows' blocks as the file has them (`quant::blocks`), each row at an even byte. Of AWQ and GPTQ,
//          two words for each row: the byte, a multiple of 16, at which its strip begins, or ABSENT or BEYOND, and the row's
//          index in the strip; a strip (`kernels::pack_codes`) has adjacent rows of a matrix
// target   `rows` packed rows, row-major or in blocks of 16 rows
// faults   one word: the smallest `part` in which a scale or a minimum is infinite or not a number; otherwise unchanged
//
// A workgroup packs 16 rows: it finds the largest scale and minimum of each row, then writes 16 bytes an invocation. Rows of
// row-major tensors take turns, since eight rows of AWQ are in the same words. Scales and minimums are products of an f16 and a small integer, which f32 represents; they are computed
// in integers, since devices may flush small numbers and round halves as they like.
// Traffic: the file's bytes about twice, the packed bytes once.
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint FRAGMENTS = 1; // 1: blocks of 16 rows in fragment order; 0: row-major
layout(constant_id = 2) const uint CODES = 0x4024; // the packed format
#include "codes.glsl"

layout(buffer_reference, std430, buffer_reference_align = 16) writeonly restrict buffer Words4Out { uvec4 v[]; };

layout(push_constant) uniform Args {
    WordsIn raw;
    Words4Out target;
    WordsInOut faults;
    uint rows;    // with those beyond the last one of a block of 16
    uint cols;    // of the file's rows: a multiple of a block's or group's
    uint units;   // units of columns of a packed row
    uint part;
};

const uint ABSENT = 0xfffffffeu; // a row without a source: zeros
const uint BEYOND = 0xffffffffu; // a row beyond the last one: zeros, and so is its factor
const uint ROWS = 16u;

shared uint row_at_s[16];
// Of a row in a strip: its index, the strip's rows, and where the codes (words), scales (halves) and zeros (words) begin.
shared uint index_s[16];
shared uvec4 strip_s[16];
shared uint scale_s[16];    // the largest size of a row's scales
shared uint minimum_s[16];  // the largest size of a row's minimums
shared uint differs_s[16];  // not zero: the row's scales are not all the same
shared int power_s[16];     // the factor's power of two
shared uint digits_s[16];   // the factor's significant digits behind the first one: those of the scale of all groups

uint byte_at(uint at) { return raw.v[at >> 2] >> 8u * (at & 3u) & 255u; }
// `at` is even.
uint half_at(uint at) { return raw.v[at >> 2] >> 8u * (at & 2u) & 0xffffu; }
uint word_at(uint at) {
    uint word = raw.v[at >> 2];
    if ((at & 2u) == 0u) return word;
    return word >> 16 | raw.v[(at >> 2) + 1u] << 16;
}

// Each type of block, by its number in GGUF files: columns and bytes of a block, columns of a group, and of the block at
// byte `at`: the f16s D and, if the type stores minimums, LEAST; the integers by which they are multiplied for group g; four
// codes from column j on, a byte each. The minimum of types with a constant zero is D · integer · ZERO_CODE.
//
// For AWQ (SOURCE 100) and GPTQ of 4 bits (101, and 102 with zeros as they are stored), a block is a group of columns of a
// row: the row of the workgroup, and the group. A strip begins with the number of its rows, a multiple of 8, and the bytes
// behind its first one at which its scales and zeros begin. From byte 16 on it has the codes, a line of words for each column
// (AWQ: eight rows in a word) or for eight columns (GPTQ: eight columns in a word); then, for each group, lines of scales,
// f16, and of zeros, eight in a word.
#if SOURCE >= 100
#define Block uvec2
#define BLOCK_COLS GROUP
#define SOURCE_GROUP GROUP
#define TABLE_WORDS 2u
uint D(Block b) {
    uvec4 strip = strip_s[b.x];
    uint half_ = strip.z + b.y * strip.x + index_s[b.x];
    return raw.v[half_ >> 1] >> 16u * (half_ & 1u) & 0xffffu;
}
// The nibble of a word that holds each of eight rows: of AWQ 0, 4, 1, 5, 2, 6, 3, 7.
#if SOURCE == 100
uint nibble_of(uint row) { return (row & 7u) >> 1 | (row & 1u) << 2; }
#define PLUS 0u
#else
uint nibble_of(uint row) { return row & 7u; }
// The first version has taken 1 from each of a word's zeros in one subtraction.
#define PLUS (SOURCE == 101 ? 0x11111111u : 0u)
#endif
int zero_of(Block b) {
    uvec4 strip = strip_s[b.x];
    uint index = index_s[b.x];
    return int(raw.v[strip.w + (b.y * strip.x + index) / 8u] + PLUS >> 4u * nibble_of(index) & 15u);
}
int scale_integer(Block b, uint g) { return 1; }
#define LEAST(b) D(b)
#define LEAST_INTEGER(b, g) zero_of(b)
#if SOURCE == 100
uint four_codes(Block b, uint j) {
    uvec4 strip = strip_s[b.x];
    uint index = index_s[b.x], width = strip.x / 8u, at = strip.y + (b.y * GROUP + j) * width + index / 8u;
    uvec4 words = uvec4(raw.v[at], raw.v[at + width], raw.v[at + 2u * width], raw.v[at + 3u * width]);
    words = words >> 4u * nibble_of(index) & 15u;
    return words.x | words.y << 8 | words.z << 16 | words.w << 24;
}
#else
// A constant zero is the same in all groups.
#define IS_WRONG(b) (STORED == 0u && zero_of(b) != 8)
uint four_codes(Block b, uint j) {
    uint at = strip_s[b.x].y + (b.y * GROUP + j) / 8u * strip_s[b.x].x + index_s[b.x];
    uint nibbles = raw.v[at] >> 4u * (j & 4u) & 0xffffu;
    nibbles = (nibbles | nibbles << 8) & 0x00ff00ffu;
    return (nibbles | nibbles << 4) & 0x0f0f0f0fu;
}
#endif
#else
#define Block uint
#define TABLE_WORDS 1u
#endif
#if SOURCE == 2 || SOURCE == 3 || SOURCE == 6 || SOURCE == 7 || SOURCE == 8
#define BLOCK_COLS 32u
#define SOURCE_GROUP 32u
#define D(at) half_at(at)
int scale_integer(uint at, uint g) { return 1; }
int minimum_integer(uint at, uint g) { return 1; }
#elif SOURCE < 100
#define BLOCK_COLS 256u
#endif
uint nibbles(uint at, uint j) { return word_at(at + (j & 15u)) >> (j >> 4) * 4u & 0x0f0f0f0fu; }
// Bit 4 of four codes, from the lowest four bits of a word.
uint fifth_bits(uint bits) { return (bits & 1u) << 4 | (bits & 2u) << 11 | (bits & 4u) << 18 | (bits & 8u) << 25; }
#if SOURCE == 2       // Q4_0
#define BLOCK_BYTES 18u
#define ZERO_CODE 8
uint four_codes(uint at, uint j) { return nibbles(at + 2u, j); }
#elif SOURCE == 3     // Q4_1
#define BLOCK_BYTES 20u
#define LEAST(at) (half_at(at + 2u) ^ 0x8000u)
uint four_codes(uint at, uint j) { return nibbles(at + 4u, j); }
#elif SOURCE == 6     // Q5_0
#define BLOCK_BYTES 22u
#define ZERO_CODE 16
uint four_codes(uint at, uint j) { return nibbles(at + 6u, j) | fifth_bits(word_at(at + 2u) >> j); }
#elif SOURCE == 7     // Q5_1
#define BLOCK_BYTES 24u
#define LEAST(at) (half_at(at + 2u) ^ 0x8000u)
uint four_codes(uint at, uint j) { return nibbles(at + 8u, j) | fifth_bits(word_at(at + 4u) >> j); }
#elif SOURCE == 8     // Q8_0
#define BLOCK_BYTES 34u
#define ZERO_CODE 128
uint four_codes(uint at, uint j) { return word_at(at + 2u + j) ^ 0x80808080u; }
#elif SOURCE == 10    // Q2_K
#define BLOCK_BYTES 84u
#define SOURCE_GROUP 16u
#define D(at) half_at(at + 80u)
#define LEAST(at) half_at(at + 82u)
int scale_integer(uint at, uint g) { return int(byte_at(at + g) & 15u); }
int minimum_integer(uint at, uint g) { return int(byte_at(at + g) >> 4); }
uint four_codes(uint at, uint j) {
    return word_at(at + 16u + j / 128u * 32u + j % 32u) >> 2u * (j % 128u / 32u) & 0x03030303u;
}
#elif SOURCE == 11    // Q3_K
#define BLOCK_BYTES 110u
#define SOURCE_GROUP 16u
#define ZERO_CODE 4
#define D(at) half_at(at + 108u)
int scale_integer(uint at, uint g) {
    uint low = byte_at(at + 96u + g % 8u) >> 4u * (g / 8u) & 15u;
    return int(low | (byte_at(at + 104u + g % 4u) >> 2u * (g / 4u) & 3u) << 4) - 32;
}
uint four_codes(uint at, uint j) {
    uint n = j / 128u, k = j % 128u / 32u;
    uint low = word_at(at + 32u + n * 32u + j % 32u) >> 2u * k & 0x03030303u;
    return low | (word_at(at + j % 32u) >> (4u * n + k) & 0x01010101u) << 2;
}
#elif SOURCE == 12 || SOURCE == 13
#define SOURCE_GROUP 32u
#define D(at) half_at(at)
#define LEAST(at) half_at(at + 2u)
int scale_integer(uint at, uint g) {
    uint s = byte_at(at + 4u + g % 4u);
    return int(g < 4u ? s & 63u : byte_at(at + 8u + g) & 15u | s >> 6 << 4);
}
int minimum_integer(uint at, uint g) {
    uint m = byte_at(at + 8u + g % 4u);
    return int(g < 4u ? m & 63u : byte_at(at + 8u + g) >> 4 | m >> 6 << 4);
}
#if SOURCE == 12      // Q4_K
#define BLOCK_BYTES 144u
uint four_codes(uint at, uint j) {
    return word_at(at + 16u + j / 64u * 32u + j % 32u) >> (j & 32u) / 8u & 0x0f0f0f0fu;
}
#else                 // Q5_K
#define BLOCK_BYTES 176u
uint four_codes(uint at, uint j) {
    uint low = word_at(at + 48u + j / 64u * 32u + j % 32u) >> (j & 32u) / 8u & 0x0f0f0f0fu;
    return low | (word_at(at + 16u + j % 32u) >> j / 32u & 0x01010101u) << 4;
}
#endif
#elif SOURCE == 14    // Q6_K
#define BLOCK_BYTES 210u
#define SOURCE_GROUP 16u
#define ZERO_CODE 32
#define D(at) half_at(at + 208u)
int scale_integer(uint at, uint g) { return int(byte_at(at + 192u + g) << 24) >> 24; }
uint four_codes(uint at, uint j) {
    uint n = j / 128u, k = j % 128u / 32u;
    uint low = word_at(at + 64u * n + 32u * (k & 1u) + j % 32u) >> 4u * (k >> 1) & 0x0f0f0f0fu;
    return low | (word_at(at + 128u + 32u * n + j % 32u) >> 2u * k & 0x03030303u) << 4;
}
#endif
#if SOURCE >= 100
#elif defined(LEAST)
#define LEAST_INTEGER(at, g) minimum_integer(at, g)
#else
#define LEAST(at) D(at)
#define LEAST_INTEGER(at, g) scale_integer(at, g) * ZERO_CODE
#endif

#ifndef IS_WRONG
#define IS_WRONG(b) false
#endif

// The bits of the f32 that is the product of an f16 and an integer of at most 12 bits.
uint product(uint half_, int integer) {
    uint sign = (half_ << 16 ^ uint(integer)) & 0x80000000u, exponent = half_ >> 10 & 31u;
    uint digits = (half_ & 1023u | (exponent > 0u ? 1024u : 0u)) * uint(abs(integer));
    if (digits == 0u) return sign;
    // The last digit of an f16 stands for at least 2^-24, also of those with an exponent of 0.
    int top = findMSB(digits);
    return sign | uint(int(max(exponent, 1u)) - 25 + top + 127) << 23 | digits << uint(23 - top) & 0x7fffffu;
}

// The block of a column of row `r` of the workgroup.
Block block_at(uint r, uint col) {
#if SOURCE >= 100
    return uvec2(r, col / BLOCK_COLS);
#else
    return row_at_s[r] + col / BLOCK_COLS * BLOCK_BYTES;
#endif
}
// The scale and the minimum of a column's group.
uint scale_at(uint r, uint col) {
    Block block = block_at(r, col);
    return product(D(block), scale_integer(block, col % BLOCK_COLS / SOURCE_GROUP));
}
uint minimum_at(uint r, uint col) {
    Block block = block_at(r, col);
    return product(LEAST(block), LEAST_INTEGER(block, col % BLOCK_COLS / SOURCE_GROUP));
}

// The f16 nearest to an f32, ties to even. The f32 is less than 2^15.
uint round_half(uint bits) {
    uint sign = bits >> 16 & 0x8000u, digits = bits & 0x7fffffu | 0x800000u;
    int exponent = int(bits >> 23 & 255u) - 127;
    if (exponent < -25) return sign;
    // An f16 below 2^-14 has fewer digits.
    uint shift = 13u + uint(max(-14 - exponent, 0));
    uint rounded = digits >> shift, rest = digits & (1u << shift) - 1u, half_ = 1u << (shift - 1u);
    if (rest > half_ || rest == half_ && (rounded & 1u) == 1u) rounded++;
    // The first digit counts one for the exponent.
    return sign | rounded + (uint(max(exponent + 14, 0)) << 10);
}

// The f32 nearest to a number, not zero, by digits · 2^power, ties to even, where `digits` are those behind the first one of
// a number from 1 to 2.
uint quotient(uint bits, uint digits, int power) {
    uint rest = bits & 0x7fffffu | 0x800000u, by = digits | 0x800000u, found = 0u;
    int exponent = int(bits >> 23 & 255u) - power;
    if (rest < by) {
        rest <<= 1;
        exponent--;
    }
    // Two digits more than an f32 has.
    [[dont_unroll]] for (uint i = 0u; i < 26u; i++) {
        found <<= 1;
        if (rest >= by) {
            rest -= by;
            found |= 1u;
        }
        rest <<= 1;
    }
    uint behind = found & 3u;
    found >>= 2;
    if (behind == 3u || behind == 2u && (rest != 0u || (found & 1u) == 1u)) found++;
    return bits & 0x80000000u | (uint(exponent) << 23) + found - 0x800000u;
}

// The scale of group `g` of row `r` of the workgroup, as it is stored: an f16.
uint stored_scale(uint r, uint g) {
    uint col = g * GROUP;
    if (row_at_s[r] >= ABSENT || col >= cols) return 0u;
    uint scale = scale_at(r, col);
    if ((scale & 0x7fffffffu) == 0u) return scale >> 16;
    // The factor has the digits of a scale that all groups share. Affine codes count 2^-24.
    if (digits_s[r] != 0u) scale &= 0xff800000u;
    return round_half(scale + (uint(24 - power_s[r]) << 23));
}

uint stored_minimum(uint r, uint g) {
    uint col = g * GROUP;
    if (row_at_s[r] >= ABSENT || col >= cols) return 0u;
    uint minimum = minimum_at(r, col);
    if ((minimum & 0x7fffffffu) == 0u) return minimum >> 16;
    uint digits = digits_s[r];
    return round_half(digits == 0u ? minimum - (uint(power_s[r]) << 23) : quotient(minimum, digits, power_s[r]));
}

uint stored_factor(uint r) {
    return row_at_s[r] == BEYOND ? 0u : uint(power_s[r] + 127) << 23 | digits_s[r];
}

// Four codes of row `r` from a column on, a byte each.
uint codes_at(uint r, uint col) {
    if (row_at_s[r] >= ABSENT || col >= cols) return 0u;
    return four_codes(block_at(r, col), col % BLOCK_COLS);
}

// Bits `shift` and on of four codes, those of a plane of `bits` bits, next to each other.
uint joined(uint codes, const uint bits, uint shift) {
    uint x = codes >> shift;
    if (bits == 8u) return x;
    if (bits == 4u) {
        x &= 0x0f0f0f0fu;
        x |= x >> 4;
        return x & 0xffu | x >> 8 & 0xff00u;
    }
    if (bits == 2u) {
        x &= 0x03030303u;
        x |= x >> 6;
        return (x | x >> 12) & 0xffu;
    }
    x &= 0x01010101u;
    x |= x >> 7;
    return (x | x >> 14) & 15u;
}

// 16 bytes of a plane of row `r`, row-major, from column `col` on.
uvec4 row_words(uint r, const uint bits, uint shift, uint col) {
    uvec4 words = uvec4(0u);
    [[unroll]] for (uint k = 0u; k < 4u; k++)
        [[unroll]] for (uint i = 0u; i < 8u / bits; i++)
            words[k] |= joined(codes_at(r, col + (k * (8u / bits) + i) * 4u), bits, shift) << 4u * bits * i;
    return words;
}

// Four codes of row `r` in the order of a word's bytes in fragments: the second and the third change places.
uint in_order(uint r, uint col) {
    uint codes = codes_at(r, col);
    return codes & 0xff0000ffu | codes >> 8 & 0xff00u | codes << 8 & 0xff0000u;
}

// Four columns of a lane's rows u and v in a plane of less than 8 bits.
uint lane_half(uint u, uint col, const uint bits, uint shift) {
    uint mask = ((1u << bits) - 1u) * 0x01010101u;
    return in_order(u, col) >> shift & mask | (in_order(u + 2u, col) >> shift & mask) << bits;
}

// 16 bytes of a plane of a unit of columns that begins at column `col`: load `at` of lane `lane`.
uvec4 lane_words(const uint bits, uint shift, uint col, uint at, uint lane) {
    uint g = lane >> 2, u = 4u * (g >> 1) + (g & 1u);
    col += at * (256u / bits) + 8u * (lane & 3u);
    uvec4 words;
    [[unroll]] for (uint k = 0u; k < 4u; k++) {
        if (bits == 8u) {
            words[k] = in_order(u + 2u * (k & 1u), col + 4u * (k >> 1));
        } else if (bits == 4u) {
            words[k] = lane_half(u, col + 32u * (k >> 1) + 4u * (k & 1u), 4u, shift);
        } else if (bits == 2u) {
            uint of = col + 32u * k;
            words[k] = lane_half(u, of, 2u, shift) | lane_half(u, of + 4u, 2u, shift) << 4;
        } else {
            uint of = col + 64u * k;
            uint first = lane_half(u, of, 1u, shift) | lane_half(u, of + 4u, 1u, shift) << 2;
            words[k] = first | (lane_half(u, of + 32u, 1u, shift) | lane_half(u, of + 36u, 1u, shift) << 2) << 4;
        }
    }
    return words;
}

// 16 bytes of a block of 16 rows: its word `at` of 16 bytes.
uvec4 block_words(uint at) {
    if (at < 4u)
        return uvec4(stored_factor(at * 4u), stored_factor(at * 4u + 1u), stored_factor(at * 4u + 2u), stored_factor(at * 4u + 3u));
    if (at < BLOCK_HEADER) return uvec4(0u);
    uint unit = (at - BLOCK_HEADER) / UNIT_WORDS, in_unit = (at - BLOCK_HEADER) % UNIT_WORDS, col = unit * UNIT_COLS, lane = in_unit % 32u;
    uint load = in_unit / 32u;
    if (load < PLANE_LOADS) {
        if ((BITS & 8u) != 0u) return lane_words(8u, 0u, col, load, lane);
        if ((BITS & 4u) != 0u) {
            if (load < UNIT_COLS / 64u) return lane_words(4u, 0u, col, load, lane);
            load -= UNIT_COLS / 64u;
        }
        if ((BITS & 2u) != 0u) {
            if (load < UNIT_COLS / 128u) return lane_words(2u, BITS & 4u, col, load, lane);
            load -= UNIT_COLS / 128u;
        }
        return lane_words(1u, BITS & 6u, col, load, lane);
    }
    // The scales of 8 pairs of rows, then their minimums.
    uint pair = (in_unit - PLANE_LOADS * 32u) * 4u;
    uvec4 words;
    [[unroll]] for (uint k = 0u; k < 4u; k++) {
        uint g = (pair + k) / UNIT_GROUPS, group = unit * UNIT_GROUPS + (pair + k) % UNIT_GROUPS;
        uint u = 4u * (g % 8u >> 1) + (g & 1u);
        words[k] = g < 8u ? stored_scale(u, group) | stored_scale(u + 2u, group) << 16
                          : stored_minimum(u, group) | stored_minimum(u + 2u, group) << 16;
    }
    return words;
}

// 16 bytes of row `r`, row-major: its word `at` of 16 bytes.
uvec4 line_words(uint r, uint at) {
    if (at == 0u) return uvec4(stored_factor(r), 0u, 0u, 0u);
    at--;
    uint padded = units * UNIT_COLS;
    if ((BITS & 8u) != 0u) {
        if (at < padded / 16u) return row_words(r, 8u, 0u, at * 16u);
        at -= padded / 16u;
    }
    if ((BITS & 4u) != 0u) {
        if (at < padded / 32u) return row_words(r, 4u, 0u, at * 32u);
        at -= padded / 32u;
    }
    if ((BITS & 2u) != 0u) {
        if (at < padded / 64u) return row_words(r, 2u, BITS & 4u, at * 64u);
        at -= padded / 64u;
    }
    if ((BITS & 1u) != 0u) {
        if (at < padded / 128u) return row_words(r, 1u, BITS & 6u, at * 128u);
        at -= padded / 128u;
    }
    uint groups = padded / GROUP;
    uvec4 words = uvec4(0u);
    [[unroll]] for (uint i = 0u; i < 8u; i++) {
        uint index = at * 8u + i, half_ = 0u;
        if (index < groups) half_ = stored_scale(r, index);
        else if (STORED == 1u && index < 2u * groups) half_ = stored_minimum(r, index - groups);
        words[i / 2u] |= half_ << 16u * (i % 2u);
    }
    return words;
}

void main() {
    uint i = gl_LocalInvocationID.x, unit = gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (unit * ROWS >= rows) return;
    if (i < ROWS) {
        uint row = unit * ROWS + i, entry = row * TABLE_WORDS;
        row_at_s[i] = row < rows ? raw.v[entry] : BEYOND;
#if SOURCE >= 100
        if (row_at_s[i] < ABSENT) {
            uint at = row_at_s[i], word = at >> 2;
            index_s[i] = raw.v[entry + 1u];
            strip_s[i] = uvec4(raw.v[word], word + 4u, (at + raw.v[word + 1u]) / 2u, (at + raw.v[word + 2u]) / 4u);
        }
#endif
        scale_s[i] = 0u;
        minimum_s[i] = 0u;
        differs_s[i] = 0u;
    }
    barrier();
    uint lanes = gl_WorkGroupSize.x / ROWS, r = i / lanes;
    if (row_at_s[r] < ABSENT) {
        uint first = scale_at(r, 0u), scale = 0u, minimum = 0u, differs = 0u, bad = 0u;
        for (uint col = i % lanes * BLOCK_COLS; col < cols; col += lanes * BLOCK_COLS) {
            Block block = block_at(r, col);
            uint d = D(block), least = LEAST(block);
            bad |= uint((d & 0x7c00u) == 0x7c00u || (least & 0x7c00u) == 0x7c00u || IS_WRONG(block));
            for (uint g = 0u; g < BLOCK_COLS / SOURCE_GROUP; g++) {
                uint bits = product(d, scale_integer(block, g));
                scale = max(scale, bits & 0x7fffffffu);
                differs |= bits ^ first;
                if (STORED == 1u) minimum = max(minimum, product(least, LEAST_INTEGER(block, g)) & 0x7fffffffu);
            }
        }
        atomicMax(scale_s[r], scale);
        atomicMax(minimum_s[r], minimum);
        atomicOr(differs_s[r], differs);
        if (bad != 0u) atomicMin(faults.v[0], part);
    }
    barrier();
    if (i < ROWS) {
        // The largest scale becomes an f16 from 2^14 to 2^15, or the largest minimum, if that is larger beside it.
        int by_scale = int(scale_s[i] >> 23) - 127 + 10, by_minimum = int(minimum_s[i] >> 23) - 127 - 14;
        int power = scale_s[i] != 0u ? by_scale : by_minimum;
        if (minimum_s[i] != 0u) power = max(power, by_minimum);
        power_s[i] = scale_s[i] == 0u && minimum_s[i] == 0u ? 0 : power;
        digits_s[i] = differs_s[i] == 0u ? scale_s[i] & 0x7fffffu : 0u;
    }
    barrier();
    if (FRAGMENTS == 1u) {
        uint words = BLOCK_HEADER + units * UNIT_WORDS, base = unit * words;
        for (uint at = i; at < words; at += gl_WorkGroupSize.x) target.v[base + at] = block_words(at);
    } else {
        uint padded = units * UNIT_COLS, groups = padded / GROUP * (1u + STORED);
        uint words = 1u + padded * BITS / 128u + (groups + 7u) / 8u;
        for (uint turn = i; turn < (words + 31u) / 32u * 32u * ROWS; turn += gl_WorkGroupSize.x) {
            uint at = turn / (32u * ROWS) * 32u + turn % 32u, of = turn / 32u % ROWS, row = unit * ROWS + of;
            if (at < words && row < rows) target.v[row * words + at] = line_words(of, at);
        }
    }
}
