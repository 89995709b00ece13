// Top-n search in a row of keys that the invocations of a workgroup own in parts. Include `reduce.glsl` first. The
// including shader must define:
//  thread, THREADS, quads                  this invocation, the number of invocations, the row's number of groups of
//                                          four tokens
//  load_block(base, out uvec4 block[4])    the keys of this invocation's four groups from `base` on; 0 outside the
//                                          vocabulary
//  args.vocabulary
//  LIST_KEYS, LIST_TOKENS                  shared arrays of LIST words
// It may define:
//  TOP_VALUE(key, most, norm)              the value of a key in `top_values`

#ifndef TOP_VALUE
#define TOP_VALUE(key, most, norm) (value_of(key) - (most) - (norm))
#endif

shared uint list_length;
shared uint top_ids[TOP_ENTRIES];
shared float top_values[TOP_ENTRIES];

uint own_best; // the greatest key of this invocation's tokens, from the latest `own_best_after`

// Returns the best key, and the lowest token that has it, of this invocation's tokens that follow `last` in the order
// (key descending, token ascending). `reduce_best` finds the row's.
uvec2 own_best_after(uvec2 last) {
    uvec2 best = uvec2(0u, TOKEN_NONE);
    for (uint base = 0u; base < quads; base += 4u * THREADS) {
        uvec4 block[4];
        load_block(base, block);
        [[unroll]] for (uint j = 0u; j < 4u; j++) {
            uvec4 keys = block[j];
            // Tokens ascend, so that of equal keys the lowest token is kept.
            if (max(max(keys.x, keys.y), max(keys.z, keys.w)) > best.x) {
                for (uint c = 0u; c < 4u; c++) {
                    uint token = 4u * (base + j * THREADS + thread) + c;
                    bool after = keys[c] < last.x || (keys[c] == last.x && token > last.y);
                    if (after && keys[c] > best.x) best = uvec2(keys[c], token);
                }
            }
        }
    }
    own_best = best.x;
    return best;
}

// Guesses a key that probably some hundred tokens exceed: the mean of the invocations' greatest values. Returns `least`
// if the whole vocabulary fits into the list.
uint guess_bound(uint least) {
    if (args.vocabulary <= LIST) return least;
    bool any = own_best > KEY_MINUS_INFINITY;
    float sum = reduce_sum(any ? value_of(own_best) : 0.0);
    float count = reduce_sum(any ? 1.0 : 0.0);
    return max(least, key_of(sum / count));
}

void list(uint key, uint token) {
    uint at = atomicAdd(list_length, 1u);
    if (at < LIST) {
        LIST_KEYS[at] = key;
        LIST_TOKENS[at] = token;
    }
}

// Lists the tokens whose keys are at least `bound`.
void gather(uint bound) {
    barrier();
    if (thread == 0u) list_length = 0u;
    barrier();
    for (uint base = 0u; base < quads; base += 4u * THREADS) {
        uvec4 block[4];
        load_block(base, block);
        uvec4 most = max(max(block[0], block[1]), max(block[2], block[3]));
        if (max(max(most.x, most.y), max(most.z, most.w)) >= bound) {
            [[unroll]] for (uint j = 0u; j < 4u; j++) {
                uvec4 keys = block[j];
                for (uint c = 0u; c < 4u; c++) {
                    if (keys[c] >= bound) list(keys[c], 4u * (base + j * THREADS + thread) + c);
                }
            }
        }
    }
    barrier();
}

// Returns this invocation's part of the sum of e^(value - most) over all tokens.
float total(float most) {
    float sum = 0.0;
    for (uint base = 0u; base < quads; base += 4u * THREADS) {
        uvec4 block[4];
        load_block(base, block);
        [[unroll]] for (uint j = 0u; j < 4u; j++) {
            [[unroll]] for (uint c = 0u; c < 4u; c++) {
                if (block[j][c] > KEY_MINUS_INFINITY) sum += exp(value_of(block[j][c]) - most);
            }
        }
    }
    return sum;
}

// Writes the `wanted` best tokens (the lowest id first among equal keys) to `top_ids` and their value - most - norm,
// where `most` is the value of `best`, or what TOP_VALUE says, to `top_values`. Returns how many were found. The latest call of
// `own_best_after` must have had `best`, the row's best token, as its result.
uint find_top(uint wanted, uvec2 best, float norm) {
    float most = value_of(best.x);
    uint least = KEY_MINUS_INFINITY + 1u;
    uint bound = guess_bound(least);
    gather(bound);
    uint n = list_length;
    if (n <= LIST && (bound == least || n >= wanted)) {
        for (uint i = thread; i < n; i += THREADS) {
            uint key = LIST_KEYS[i];
            uint id = LIST_TOKENS[i];
            uint rank = 0u;
            for (uint j = 0u; j < n; j++) {
                rank += uint(LIST_KEYS[j] > key || (LIST_KEYS[j] == key && LIST_TOKENS[j] < id));
            }
            if (rank < wanted) {
                top_ids[rank] = id;
                top_values[rank] = TOP_VALUE(key, most, norm);
            }
        }
        barrier();
        return min(n, wanted);
    }
    uint count = 0u;
    uvec2 last = best;
    while (count < wanted && last.x > KEY_MINUS_INFINITY) {
        if (thread == 0u) {
            top_ids[count] = last.y;
            top_values[count] = TOP_VALUE(last.x, most, norm);
        }
        count++;
        if (count < wanted) last = reduce_best(own_best_after(last));
    }
    barrier();
    return count;
}
