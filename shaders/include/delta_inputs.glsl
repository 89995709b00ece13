// The inputs of the convolution of a prompt's rows, for the kernels of part 1 of the chunked gated delta rule. The shader must
// declare the arguments `x`, `stride`, `chunk`, `cells` and `window`, and CHANNEL_QUADS.

// The prompt: its first row in the step, its start position, the cell with what precedes its chunk, its number of rows.
uint first_row, start, from, in_use;

// Finds the prompt of a block of the step, and returns the block's first row in the prompt's chunk. Slots that decode in the
// step, the last of its prompts, have no blocks: `delta_step` serves them.
uint find_prompt(uint block) {
    uint prompts = chunk.v[0].x, low = 0u, high = prompts - chunk.v[0].w;
    while (high - low > 1u) {
        uint middle = (low + high) / 2u;
        if (cells.v[2u * middle + 1u].y <= block) low = middle; else high = middle;
    }
    uvec4 prompt = chunk.v[1u + low];
    start = prompt.y;
    first_row = prompt.z;
    from = cells.v[2u * low].x;
    in_use = (low + 1u < prompts ? chunk.v[2u + low].z : chunk.v[0].z) - first_row;
    return (block - cells.v[2u * low + 1u].y) * BLOCK_ROWS;
}

// Returns the convolution's input of row `index` of the prompt's chunk; a negative index is a position before the
// chunk.
vec4 raw(int index, uint quad) {
    if (index >= 0) return x.v[(first_row + uint(index)) * (stride / 4u) + quad];
    if (from == NO_CELL || int(start) + index < 0) return vec4(0.0);
    return window.v[(from * RING + uint(int(start) + index) % RING) * CHANNEL_QUADS + quad];
}
