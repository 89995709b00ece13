// What the kernels of prompts' attention share: a workgroup's tile of (row, query head) pairs, and blocks of the KV cache
// in shared memory. Pair i of a prompt is row i / G of the prompt and head i % G of the GQA group.
//
// Include after `kv.glsl` with CACHE_BY_16_BYTES, `scores.glsl`, the arguments, `code_halves.glsl` with KV 2, and these:
//   ROWS, BLOCK             pairs of a tile; tokens of a block, a multiple of 16
//   LANES, SPLITS           the workgroup's size; the maximum number of workgroups per tile
//   UNROLL                  before loops
//   KEY_PLACE(word, token)  where a 16-byte word of a key lies in shared memory, `k_s`: `word` is (page of the block) · D/8 +
//                           (dimension / 8), `token` that of the page
//   VALUE_PLACE(token, eight) where a 16-byte word of a value lies, `v_s`: token of the block, dimension / 8

const uint EIGHTS = D / 8u;
const uint PARTS = BLOCK / 16u;                        // pages of a block
const uint WORDS = BLOCK * EIGHTS;                     // 16-byte words of a block's keys, and of its values
#if KV == 2
const uint LOADED = WORDS / 2u;                        // as the cache has them
#else
const uint LOADED = WORDS;
#endif
const uint STAGED = (LOADED + LANES - 1u) / LANES;     // of those, words per invocation
// The minimum number of blocks per workgroup where several workgroups share a tile.
const uint LEAST_BLOCKS = 4u;
// The maximum number of prompts of a step whose tiles are shared.
const uint SHARING_PROMPTS = 64u;

#if KV == 2
shared vec4 scale_s[BLOCK / 2u];                       // of the block's keys, then values: [page][t] of tokens 2t, 2t + 1, 2t + 8, 2t + 9
#endif

// Executes `body` for each word that this invocation stages: `w_` is the word's number in the block, `i_` its index
// among the invocation's words.
#define EACH_STAGED(body)                                                       \
    UNROLL for (uint i_ = 0u; i_ < STAGED; i_++) {                              \
        uint w_ = i_ * LANES + gl_LocalInvocationIndex;                         \
        if (LOADED % LANES == 0u || w_ < LOADED) { body }                       \
    }

// Returns the page that holds part of a block. Pages beyond the one that holds token `last` are replaced by it.
uint page_of(uint table, uint last, uint block, uint part) { return pages.v[table + min(block * PARTS + part, last / 16u)]; }

#if KV == 2
// Returns the index of word `w` of block `block` in either cache.
uint cached(uint table, uint kvh, uint last, uint block, uint w) {
    return page_of(table, last, block, w / D) * PAGE_WORDS + kvh * D + w % D;
}
// A word holds eight dimensions of token n and of token n + 8 of a page.
#define STORE_KEYS                                                                                  \
    EACH_STAGED(                                                                                    \
        k_s[KEY_PLACE(w_ / 8u, w_ % 8u)] = uvec4(halves_of(staged[i_].x), halves_of(staged[i_].y)); \
        k_s[KEY_PLACE(w_ / 8u, w_ % 8u + 8u)] = uvec4(halves_of(staged[i_].z), halves_of(staged[i_].w));) \
    if (gl_LocalInvocationIndex < BLOCK / 2u) scale_s[gl_LocalInvocationIndex] = scales;
// Codes of tokens that no row sees are finite, and their scales are zero.
#define STORE_VALUES(first)                                                                         \
    EACH_STAGED(                                                                                    \
        uint token_ = w_ / D * 16u + w_ % D / EIGHTS;                                               \
        v_s[VALUE_PLACE(token_, w_ % EIGHTS)] = uvec4(halves_of(staged[i_].x), halves_of(staged[i_].y)); \
        v_s[VALUE_PLACE(token_ + 8u, w_ % EIGHTS)] = uvec4(halves_of(staged[i_].z), halves_of(staged[i_].w));)

// Loads this invocation's scales of a block: four of keys, or four of values. Those of tokens past `last`, or before the
// first that a row of the tile sees, may be anything and are replaced by zeros.
#define LOAD_SCALES(block) {                                                                        \
        uint i_ = min(gl_LocalInvocationIndex, BLOCK / 2u - 1u), at_ = i_ % (BLOCK / 4u);           \
        uint word_ = page_of(table, last, block, at_ / 4u) * PAGE_WORDS + KV_HEADS * D + kvh * 4u + at_ % 4u; \
        uvec4 words_ = i_ < BLOCK / 4u ? k.v[word_] : v.v[word_];                                   \
        uvec4 tokens_ = (block) * BLOCK + at_ / 4u * 16u + at_ % 4u * 2u + uvec4(0u, 1u, 8u, 9u);   \
        bvec4 there_ = lessThanEqual(tokens_, uvec4(last));                                         \
        if (WINDOW > 0u) there_ = lessThanEqual(tokens_ - low, uvec4(last - low));                  \
        scales = mix(vec4(0.0), uintBitsToFloat(words_), there_);                                   \
    }
#else
// Returns the index of word `w` of block `block` in either cache.
uint cached(uint table, uint kvh, uint last, uint block, uint w) {
    return (page_of(table, last, block, w / (2u * D)) * KV_HEADS + kvh) * 2u * D + w % (2u * D);
}
#define STORE_KEYS EACH_STAGED(k_s[KEY_PLACE(w_ / 16u, w_ % 16u)] = staged[i_];)
// Tokens past `last` and tokens that no row sees may hold anything, also NaN or infinity, whose product with a zero weight
// is not zero. They are replaced by zeros.
#define STORE_VALUES(first)                                                                         \
    EACH_STAGED(                                                                                    \
        bool there_ = (first) + BLOCK <= last + 1u || (first) + w_ / EIGHTS <= last;                \
        if (WINDOW > 0u) there_ = there_ && (first) + w_ / EIGHTS >= low;                           \
        v_s[VALUE_PLACE(w_ / EIGHTS, w_ % EIGHTS)] = there_ ? staged[i_] : uvec4(0u);)
#define LOAD_SCALES(block)
#endif

#define LOAD(cache, block) EACH_STAGED(staged[i_] = cache.v[cached(table, kvh, last, block, w_)];)

// A tile, and the blocks of tokens that this workgroup of it processes.
struct Tile {
    uint number;       // among those of all prompts
    uint row;          // the prompt's first row in the step
    uint in_use;       // the number of the prompt's rows
    uint start;        // the position of the prompt's first row
    uint table;        // where its pages begin
    uint first;        // the tile's first pair
    uint end;          // the position of the prompt's last row in the step
    uint last;         // the last token that a row of the tile sees
    uint open;         // the last token that all of its rows see; no mask up to this token
    uint low;          // the first token that a row of the tile sees
    uint first_part;   // the first of the parts that are reserved for the tile
    uint sharers;      // the number of workgroups that share it
    uint block_begin;
    uint block_end;
};

// Returns the number of the first tile of prompt `index`, whose first row is `row` of the step. The tiles of the prompts
// before it have lower numbers, as each prompt has at most one tile that is not full; some numbers are of no tile.
uint first_tile(uint index, uint row) { return row * G / ROWS + index; }

// The number of a prompt's tiles, and the number of blocks that the last of them sees; 0 for a prompt without a slot.
shared uvec2 size_s[SHARING_PROMPTS];

// Returns the maximum number of workgroups that share a tile of `blocks` blocks, if each should have `share` of them.
uint sharers_of(uint blocks, uint share) { return clamp((blocks + share - 1u) / share, 1u, SPLITS); }

// Returns the maximum number of workgroups that share a tile of prompt `index`, and the first of the prompt's parts. All
// workgroups have about the same number of blocks, as far as there are parts: a tile that is shared needs a part for each of
// its workgroups. Call in uniform control flow.
uvec2 share_tiles(uint prompts, uint index) {
    if (prompts > SHARING_PROMPTS) return uvec2(1u, 0u);
    for (uint i = gl_LocalInvocationIndex; i < SHARING_PROMPTS; i += LANES) {
        uvec4 prompt = chunk.v[1u + min(i, prompts - 1u)];
        uint rows = (i + 1u < prompts ? chunk.v[2u + i].z : chunk.v[0].z) - prompt.z;
        uint tiles = (rows * G + ROWS - 1u) / ROWS, end = prompt.y + rows - 1u;
        uint blocks = last_visible(end, end) / BLOCK + 1u - first_visible(prompt.y + (tiles - 1u) * ROWS / G) / BLOCK;
        size_s[i] = i < prompts && prompt.x != 0xffffffffu ? uvec2(tiles, blocks) : uvec2(0u);
    }
    barrier();
    uint tiles = 0u, blocks = 0u;
    for (uint i = 0u; i < prompts; i++) {
        tiles += size_s[i].x;
        blocks += size_s[i].x * size_s[i].y;
    }
    // A tile of b blocks has at most b / share + 1 workgroups, and, where there are several, at most 2b / share.
    uint share = (2u * blocks + parts - 1u) / parts;
    if (tiles < parts) share = min(share, (blocks + parts - tiles - 1u) / (parts - tiles));
    share = max(share, LEAST_BLOCKS);
    uint first = 0u;
    for (uint i = 0u; i < index; i++) {
        uint sharers = sharers_of(size_s[i].y, share);
        first += sharers > 1u ? size_s[i].x * sharers : 0u;
    }
    return uvec2(sharers_of(size_s[index].y, share), first);
}

// Returns whether this workgroup has a tile.
bool find_tile(out Tile tile) {
    // A prompt's last tiles have the longest contexts, so they come first.
    tile.number = gl_NumWorkGroups.y - 1u - gl_WorkGroupID.y;
    uint prompts = chunk.v[0].x, index = 0u, end = prompts;
    while (end - index > 1u) {
        uint middle = (index + end) / 2u;
        if (first_tile(middle, chunk.v[1u + middle].z) <= tile.number) index = middle; else end = middle;
    }
    uvec4 prompt = chunk.v[1u + index]; // slot, position of the first row, first row
    tile.row = prompt.z;
    tile.start = prompt.y;
    tile.in_use = (index + 1u < prompts ? chunk.v[2u + index].z : chunk.v[0].z) - prompt.z;
    tile.first = (tile.number - first_tile(index, prompt.z)) * ROWS;
    if (tile.first >= tile.in_use * G || prompt.x == 0xffffffffu) return false;
    tile.table = prompt.x * max_pages;
    tile.end = tile.start + tile.in_use - 1u;
    tile.last = last_visible(min(tile.start + (tile.first + ROWS - 1u) / G, tile.end), tile.end);
    tile.open = last_visible(tile.start + tile.first / G, tile.end);
    tile.low = first_visible(tile.start + tile.first / G);
    uint first_block = tile.low / BLOCK;
    uint blocks = tile.last / BLOCK + 1u - first_block;
    uint most = 1u;
    if (SPLITS > 1u) {
        uvec2 shared_ = share_tiles(prompts, index);
        most = shared_.x;
        tile.first_part = shared_.y + tile.first / ROWS * most;
    }
    uint share = max((blocks + most - 1u) / most, LEAST_BLOCKS);
    tile.sharers = (blocks + share - 1u) / share;
    if (gl_WorkGroupID.z >= tile.sharers) return false;
    tile.block_begin = first_block + gl_WorkGroupID.z * share;
    tile.block_end = min(tile.block_begin + share, first_block + blocks);
    return true;
}

// Whether this workgroup is the last of a tile's `sharers` to arrive at a counter, which is then zero again: releases its
// partial results and acquires the others'.
#define IS_LAST(last, counter, sharers) {                                                           \
        memoryBarrierBuffer();                                                                      \
        barrier();                                                                                  \
        if (gl_LocalInvocationIndex == 0u) arrived_s = atomicAdd(counters.v[counter], 1u) + 1u;     \
        barrier();                                                                                  \
        last = arrived_s == (sharers);                                                              \
        memoryBarrierBuffer();                                                                      \
        if (last && gl_LocalInvocationIndex == 0u) counters.v[counter] = 0u;                        \
    }
shared uint arrived_s;
