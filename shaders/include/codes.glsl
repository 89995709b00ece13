// Quantised weights (WEIGHT 3): unsigned codes of 2 to 8 bits in planes, with an f16 scale and, if stored, an f16 minimum
// for each group of adjacent columns, and an f32 factor for each row. `memory::pack::codes` defines the layouts:
//
//   weight = factor · (value(code) · scale - minimum)
//
// The shader must declare the specialization constant CODES, the format in one word (`kernels::codes_word`).
const uint BITS = CODES & 15u;                       // of a code: 2, 3, 4, 5, 6 or 8
const uint GROUP = CODES >> 4 & 255u;                // columns with a common scale: 16, 32, 64 or 128
const uint NUMBER = CODES >> 12 & 3u;                // 0 affine, 1 e4m3, 2 e2m1, 3 e5m2
const uint STORED = CODES >> 14 & 1u;                // 1: minimums are stored; 0: they are scale · ZERO
#define ZERO (float(CODES >> 16) * 0.5)              // in codes
const uint UNIT_COLS = (BITS & 1u) == 1u ? 256u : 128u;

// A 32-bit word of a buffer of 16-byte words. CASTS 1: through another reference type, which some drivers do not support.
layout(buffer_reference, std430, buffer_reference_align = 4) readonly restrict buffer CodeWordsIn { uint v[]; };
#if CASTS == 1
#define CODE_WORD(buffer_, at) CodeWordsIn(buffer_).v[at]
#else
uint code_word(Words4In buffer_, uint at) { return buffer_.v[at / 4u][at % 4u]; }
#define CODE_WORD(buffer_, at) code_word(buffer_, at)
#endif

// The f16 bits that stand for a code of a number format, except for affine codes, which are small integers.
uint value_bits(uint number, uint code) {
    if (number == 3u) return code << 8;
    return number == 1u ? (code & 0x80u) << 8 | (code & 0x7fu) << 7 : (code & 8u) << 12 | (code & 7u) << 9;
}

// The value of a code; affine codes are returned as multiples of the smallest f16, 2^-24: the last bit of numbers from 0.5
// to 1. Many devices convert integers more slowly than they subtract.
float value(uint number, uint code) {
    return number == 0u ? uintBitsToFloat(0x3f000000u | code) - 0.5 : unpackHalf2x16(value_bits(number, code)).x;
}

// Returns 1 if a format's zero point lies between two codes, otherwise 0. Where it does, codes are doubled and the scale is
// halved: a compiler may subtract the zero point and the 0.5 of `value` as one constant, which cannot hold half a code.
uint between_codes(uint codes) { return codes >> 16 & 1u; }

// Reads eight weights of a row-major matrix in the format `codes`, whose rows have `chunks` chunks of eight columns:
// chunk `c` of row `row`.
void load_codes8_of(uint codes, Words4In weight, uint row, uint c, uint chunks, out vec4 a, out vec4 b) {
    uint bits = codes & 15u, columns = codes >> 4 & 255u, number = codes >> 12 & 3u, stored = codes >> 14 & 1u;
    uint unit_cols = (bits & 1u) == 1u ? 256u : 128u;
    uint cols = (chunks * 8u + unit_cols - 1u) / unit_cols * unit_cols;
    uint first = row * (4u + cols * bits / 32u + (cols / columns * (1u + stored) * 2u + 15u) / 16u * 4u), at = first + 4u;
    uint code[8];
    [[unroll]] for (uint i = 0u; i < 8u; i++) code[i] = 0u;
    if ((bits & 8u) != 0u) {
        uint low = CODE_WORD(weight, at + c * 2u), high = CODE_WORD(weight, at + c * 2u + 1u);
        [[unroll]] for (uint i = 0u; i < 4u; i++) {
            code[i] = low >> 8u * i & 255u;
            code[i + 4u] = high >> 8u * i & 255u;
        }
        at += cols / 4u;
    }
    if ((bits & 4u) != 0u) {
        uint plane = CODE_WORD(weight, at + c);
        [[unroll]] for (uint i = 0u; i < 8u; i++) code[i] = plane >> 4u * i & 15u;
        at += cols / 8u;
    }
    if ((bits & 2u) != 0u) {
        uint plane = CODE_WORD(weight, at + c / 2u) >> c % 2u * 16u;
        [[unroll]] for (uint i = 0u; i < 8u; i++) code[i] |= (plane >> 2u * i & 3u) << (bits & 4u);
        at += cols / 16u;
    }
    if ((bits & 1u) != 0u) {
        uint plane = CODE_WORD(weight, at + c / 4u) >> c % 4u * 8u;
        [[unroll]] for (uint i = 0u; i < 8u; i++) code[i] |= (plane >> i & 1u) << (bits & 6u);
        at += cols / 32u;
    }
    uint half_ = at * 2u + c * 8u / columns;
    float factor = uintBitsToFloat(CODE_WORD(weight, first));
    float scale = unpackHalf2x16(CODE_WORD(weight, half_ / 2u) >> half_ % 2u * 16u).x * factor;
    float minimum = scale * (float(codes >> 16) * 0.5) * 5.9604644775390625e-8;
    if (stored == 1u) {
        half_ += cols / columns;
        minimum = unpackHalf2x16(CODE_WORD(weight, half_ / 2u) >> half_ % 2u * 16u).x * factor;
    }
    uint twice = between_codes(codes);
    if (twice == 1u) scale *= 0.5;
    [[unroll]] for (uint i = 0u; i < 4u; i++) {
        a[i] = value(number, code[i] << twice) * scale - minimum;
        b[i] = value(number, code[i + 4u] << twice) * scale - minimum;
    }
}

// The first word of row `row` of a matrix in the shader's format, whose rows have `chunks` chunks of eight columns: its factor.
uint row_word(uint row, uint chunks) {
    uint cols = (chunks * 8u + UNIT_COLS - 1u) / UNIT_COLS * UNIT_COLS;
    return row * (4u + cols * BITS / 32u + (cols / GROUP * (1u + STORED) * 2u + 15u) / 16u * 4u);
}

// Returns `word` with `bits` of its bits, from bit `from` on, at bit `to`, and zeros elsewhere.
uint moved(uint word, uint bits, uint from, uint to) {
    return (to >= from ? word << (to - from) : word >> (from - to)) & ((1u << bits) - 1u) << to;
}

// Eight columns of a row of a row-major matrix, as they are loaded; a scale and a minimum are in the lower half of a word.
struct Chunk { uvec2 eights; uint four; uint two; uint one; uint scale; uint minimum; };

// Loads the scale and the minimum of a column into the lower halves of words, from the scales of a row of `cols` columns, which
// begin at word `at`. The upper half of the scale of the first column of 32 in groups of 16 is the scale of the second group.
void load_scale(Words4In weight, uint at, uint column, uint cols, out uint scale, out uint minimum) {
    uint half_ = at * 2u + column / GROUP;
    scale = CODE_WORD(weight, half_ / 2u) >> half_ % 2u * 16u;
    minimum = 0u;
    if (STORED == 1u) {
        half_ += cols / GROUP;
        minimum = CODE_WORD(weight, half_ / 2u) >> half_ % 2u * 16u;
    }
}

// Loads chunk `c` of the row that begins at word `first`.
Chunk load_chunk(Words4In weight, uint first, uint c, uint chunks) {
    uint cols = (chunks * 8u + UNIT_COLS - 1u) / UNIT_COLS * UNIT_COLS, at = first + 4u;
    Chunk w = Chunk(uvec2(0u), 0u, 0u, 0u, 0u, 0u);
    if ((BITS & 8u) != 0u) {
        w.eights = uvec2(CODE_WORD(weight, at + c * 2u), CODE_WORD(weight, at + c * 2u + 1u));
        at += cols / 4u;
    }
    if ((BITS & 4u) != 0u) {
        w.four = CODE_WORD(weight, at + c);
        at += cols / 8u;
    }
    if ((BITS & 2u) != 0u) {
        w.two = CODE_WORD(weight, at + c / 2u) >> c % 2u * 16u;
        at += cols / 16u;
    }
    if ((BITS & 1u) != 0u) {
        w.one = CODE_WORD(weight, at + c / 4u) >> c % 4u * 8u;
        at += cols / 32u;
    }
    load_scale(weight, at, c * 8u, cols, w.scale, w.minimum);
    return w;
}

// Loads `count` adjacent chunks (1, 2 or 4) from chunk `c` on, a multiple of `count`, of the row that begins at word `first`.
void load_chunks(Words4In weight, uint first, uint c, uint chunks, const uint count, out Chunk w[4]) {
    uint cols = (chunks * 8u + UNIT_COLS - 1u) / UNIT_COLS * UNIT_COLS, at = first + 4u;
    uvec4 low = uvec4(0u), high = uvec4(0u), four = uvec4(0u);
    uvec2 two = uvec2(0u);
    uint one = 0u, scale, minimum;
    if ((BITS & 8u) != 0u) {
        low = weight.v[at / 4u + c / 2u];
        if (count == 1u && c % 2u == 1u) low.xy = low.zw;
        if (count == 4u) high = weight.v[at / 4u + c / 2u + 1u];
        at += cols / 4u;
    }
    if ((BITS & 4u) != 0u) {
        if (count == 1u) four.x = CODE_WORD(weight, at + c);
        else four = weight.v[at / 4u + c / 4u];
        if (count == 2u && c % 4u == 2u) four.xy = four.zw;
        at += cols / 8u;
    }
    if ((BITS & 2u) != 0u) {
        two.x = CODE_WORD(weight, at + c / 2u) >> c % 2u * 16u;
        if (count == 4u) two.y = CODE_WORD(weight, at + c / 2u + 1u);
        at += cols / 16u;
    }
    if ((BITS & 1u) != 0u) {
        one = CODE_WORD(weight, at + c / 4u) >> c % 4u * 8u;
        at += cols / 32u;
    }
    load_scale(weight, at, c * 8u, cols, scale, minimum);
    [[unroll]] for (uint i = 0u; i < count; i++) {
        uvec4 eights = i < 2u ? low : high;
        w[i] = Chunk(i % 2u == 0u ? eights.xy : eights.zw, four[i], two[i / 2u] >> i % 2u * 16u, one >> i * 8u, scale, minimum);
        // The second group of 16 columns.
        if (GROUP == 16u && i >= 2u) {
            w[i].scale >>= 16u;
            w[i].minimum >>= 16u;
        }
    }
}

// Returns numbers that stand for the codes of a chunk: 1 + code · 2^-BITS for affine codes, whose bits are the first of the
// fraction, which takes no conversion; else the codes' values.
void numbers_of(Chunk w, out vec4 a, out vec4 b) {
    const uint LOW = NUMBER == 0u ? 23u - BITS : 0u;
    [[unroll]] for (uint i = 0u; i < 8u; i++) {
        uint code = 0u;
        if ((BITS & 8u) != 0u) code = moved(w.eights[i / 4u], 8u, i % 4u * 8u, LOW);
        if ((BITS & 4u) != 0u) code = moved(w.four, 4u, i * 4u, LOW);
        if ((BITS & 2u) != 0u) code |= moved(w.two, 2u, i * 2u, LOW + (BITS & 4u));
        if ((BITS & 1u) != 0u) code |= moved(w.one, 1u, i, LOW + (BITS & 6u));
        float number = NUMBER == 0u ? uintBitsToFloat(0x3f800000u | code) : value(NUMBER, code);
        if (i < 4u) a[i] = number; else b[i - 4u] = number;
    }
}

// Returns the weights of a chunk of a row with the given factor.
void weights_of(Chunk w, float factor, out vec4 a, out vec4 b) {
    float scale = unpackHalf2x16(w.scale).x * factor;
    float minimum = STORED == 1u ? unpackHalf2x16(w.minimum).x * factor : scale * ZERO * 5.9604644775390625e-8;
    numbers_of(w, a, b);
    if (NUMBER == 0u) {
        scale *= float(1u << BITS) * 5.9604644775390625e-8;
        minimum += scale;
    }
    a = a * scale - minimum;
    b = b * scale - minimum;
}

// Returns the product of a chunk by x, without the row's factor: `of_numbers` is that of the chunk's numbers, and `of_ones` the
// sum of x.
float scaled(Chunk w, float of_numbers, float of_ones) {
    float scale = unpackHalf2x16(w.scale).x;
    // 2^-24 is the value of code 1.
    float minimum = STORED == 1u ? unpackHalf2x16(w.minimum).x : scale * ZERO * 5.9604644775390625e-8;
    if (NUMBER == 0u) of_numbers = (of_numbers - of_ones) * (float(1u << BITS) * 5.9604644775390625e-8);
    return of_numbers * scale - of_ones * minimum;
}

// Reads eight weights of a row-major matrix in the shader's format.
void load_codes8(Words4In weight, uint row, uint c, uint chunks, out vec4 a, out vec4 b) {
    load_codes8_of(CODES, weight, row, c, chunks, a, b);
}

// Fragments: blocks of 16 rows, each with 16 factors, zeros, and then units of UNIT_COLS columns. All sizes are in 16-byte words.
const uint BLOCK_HEADER = 8u;                        // of a block before its units
const uint UNIT_GROUPS = UNIT_COLS / GROUP;
const uint PLANE_LOADS = UNIT_COLS * BITS / 256u;    // 16-byte loads of a lane for a unit's codes
const uint UNIT_WORDS = PLANE_LOADS * 32u + UNIT_GROUPS * 2u * (1u + STORED);
#define BLOCK_WORDS (BLOCK_HEADER + UNITS * UNIT_WORDS)
// Reads eight weights of a matrix in fragment order: chunk `c` of row `row`. `chunks` are those of a row without padding.
void load_fragment_codes8(Words4In weight, uint row, uint c, uint chunks, out vec4 a, out vec4 b) {
    uint units = (chunks * 8u + UNIT_COLS - 1u) / UNIT_COLS, unit = c * 8u / UNIT_COLS;
    uint base = row / 16u * (BLOCK_HEADER + units * UNIT_WORDS) * 4u, at = base + (BLOCK_HEADER + unit * UNIT_WORDS) * 4u;
    uint r = row % 16u, g = 2u * (r / 4u) + r % 2u, second = r / 2u % 2u, block = c * 8u % UNIT_COLS / 32u;
    uint lane = g * 4u + c % 4u;
    uint code[8];
    [[unroll]] for (uint i = 0u; i < 8u; i++) {
        // The two halves have four columns each, which are in bytes 0, 2, 1 and 3 of a word.
        uint h = i / 4u, byte = i % 4u / 2u * 8u + i % 2u * 16u, from = at;
        code[i] = 0u;
        if ((BITS & 8u) != 0u)
            code[i] = CODE_WORD(weight, from + (block * 32u + lane) * 4u + h * 2u + second) >> byte & 255u;
        if ((BITS & 4u) != 0u) {
            code[i] = CODE_WORD(weight, from + (block / 2u * 32u + lane) * 4u + block % 2u * 2u + h) >> (byte + 4u * second) & 15u;
            from += UNIT_COLS * 2u;
        }
        if ((BITS & 2u) != 0u) {
            uint bits = CODE_WORD(weight, from + (block / 4u * 32u + lane) * 4u + block % 4u) >> (byte + 4u * h + 2u * second);
            code[i] |= (bits & 3u) << (BITS & 4u);
            from += UNIT_COLS;
        }
        if ((BITS & 1u) != 0u) {
            uint bits = CODE_WORD(weight, from + (block / 8u * 32u + lane) * 4u + block / 2u % 4u);
            code[i] |= (bits >> (byte + 4u * (block % 2u) + 2u * h + second) & 1u) << (BITS & 6u);
        }
    }
    uint half_ = (at + PLANE_LOADS * 128u) * 2u + (g * UNIT_GROUPS + c * 8u % UNIT_COLS / GROUP) * 2u + second;
    float factor = uintBitsToFloat(CODE_WORD(weight, base + r));
    float scale = unpackHalf2x16(CODE_WORD(weight, half_ / 2u) >> half_ % 2u * 16u).x * factor;
    float minimum = scale * ZERO * 5.9604644775390625e-8;
    if (STORED == 1u) {
        half_ += 16u * UNIT_GROUPS;
        minimum = unpackHalf2x16(CODE_WORD(weight, half_ / 2u) >> half_ % 2u * 16u).x * factor;
    }
    uint twice = between_codes(CODES);
    if (twice == 1u) scale *= 0.5;
    [[unroll]] for (uint i = 0u; i < 4u; i++) {
        a[i] = value(NUMBER, code[i] << twice) * scale - minimum;
        b[i] = value(NUMBER, code[i + 4u] << twice) * scale - minimum;
    }
}
