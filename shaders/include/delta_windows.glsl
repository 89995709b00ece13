// What the scan of a prompt writes to convolution windows: the inputs u of the last three positions. The shader must declare
// the arguments `x`, `stride` and `window`, the constants of the heads, KEY_QUADS, QUADS, CHANNEL_QUADS, and THREADS, the
// workgroup's size.

// The prompt: its first row in the step, its start position, the cell with what precedes its chunk, its number of rows.
uint first_row, start, from, in_use;

// Stores `count` quads of channels of the window in a cell, as it is after `end` rows of the prompt's chunk.
void write_window(uint cell, uint end, uint first_quad, uint count) {
    for (uint n = 0u; n < (3u * count + THREADS - 1u) / THREADS; n++) {
        uint item = n * THREADS + gl_LocalInvocationIndex;
        int index = int(end) - 1 - int(item / count), position = int(start) + index;
        if (item >= 3u * count || position < 0) continue;
        uint quad = first_quad + item % count, in_ring = uint(position) % RING;
        vec4 u = vec4(0.0);
        if (index >= 0) {
            u = x.v[(first_row + uint(index)) * (stride / 4u) + quad];
        } else if (from == cell || from == NO_CELL) {
            continue;
        } else {
            u = window.v[(from * RING + in_ring) * CHANNEL_QUADS + quad];
        }
        window.v[(cell * RING + in_ring) * CHANNEL_QUADS + quad] = u;
    }
}

void write_windows(uint h, uint slot, uvec4 keeps) {
    uint ends[3] = uint[](in_use, keeps.x, keeps.z), to[3] = uint[](slot, keeps.y, keeps.w);
    uint kh = KEY_HEAD(h);
    for (uint n = 0u; n < 3u; n++) {
        if (ends[n] == 0u) continue;
        write_window(to[n], ends[n], 2u * KEY_HEADS * KEY_QUADS + h * QUADS, QUADS);
        if (FIRST_OF_KEY_HEAD(h)) {
            write_window(to[n], ends[n], kh * KEY_QUADS, KEY_QUADS);
            write_window(to[n], ends[n], (KEY_HEADS + kh) * KEY_QUADS, KEY_QUADS);
        }
    }
}
