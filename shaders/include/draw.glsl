// Draws from lists of a row's best tokens: the filters (top_k, top_p) and the choice among the tokens that they keep, as
// `sample` defines them. Include `state.glsl`, `deterministic.glsl` and `reduce.glsl` first. The including shader must
// define:
//  thread, THREADS                         this invocation, and the number of invocations
//  LIST_KEYS, LIST_TOKENS                  shared arrays of at least 2 · LIST and LIST words
//  args.state                              the slots
//  DRAW_VOCABULARY                         the number of all tokens

shared uvec2 list_above[LIST];

// 64-bit sums as (low, high).
uvec2 add64(uvec2 a, uvec2 b) {
    uint low = a.x + b.x;
    return uvec2(low, a.y + b.y + uint(low < a.x));
}

bool at_least(uvec2 a, uvec2 b) {
    return a.y != b.y ? a.y > b.y : a.x >= b.x;
}

// Returns ceil(a * fraction / 2^32), at least 1.
uvec2 share(uvec2 a, uint fraction) {
    uint high0, low0, high1, low1;
    umulExtended(a.x, fraction, high0, low0);
    umulExtended(a.y, fraction, high1, low1);
    uvec2 whole = add64(uvec2(low1, high1), uvec2(high0, 0u));
    if (low0 != 0u) whole = add64(whole, uvec2(1u, 0u));
    return whole == uvec2(0u) ? uvec2(1u, 0u) : whole;
}

// Returns to every invocation the sum of 64-bit values over the workgroup.
uvec2 reduce_sum64(uvec2 value) {
    // The sums are computed in limbs of 24 bits, so that the sum over 64 lanes fits in 30 bits.
    uint a = subgroupAdd(value.x & 0xffffffu);
    uint b = subgroupAdd((value.x >> 24) | ((value.y & 0xffffu) << 8));
    uint c = subgroupAdd(value.y >> 16);
    barrier();
    if (thread == 0u) found = uvec2(0u);
    barrier();
    if (subgroupElect()) {
        uvec2 sum = add64(uvec2(a, c << 16), uvec2(b << 24, b >> 8));
        uint before = atomicAdd(found.x, sum.x);
        atomicAdd(found.y, sum.y + uint(before + sum.x < before));
    }
    barrier();
    return found;
}

float distance(uint key, float most, float temperature_inverse) {
    precise float d = value_of(key) - most;
    d = d * temperature_inverse;
    return d;
}

// Returns the least key whose distance is still >= bound, by bisection: the distance never decreases as keys grow.
uint key_at_distance(float bound, uint best, float most, float temperature_inverse) {
    uint low = KEY_MINUS_INFINITY + 1u;
    uint high = best;
    while (low < high) {
        uint middle = low + (high - low) / 2u;
        if (distance(middle, most, temperature_inverse) >= bound) high = middle;
        else low = middle + 1u;
    }
    return low;
}

// The sampling parameters of one row.
struct Draw {
    uint least;                // tokens with smaller keys are not drawn
    uint top_k;                // a number above LIST keeps all tokens
    bool by_count;             // whether top_k leaves out tokens
    bool by_mass;
    uint fraction;             // top_p in units of 2^-32, read if `by_mass`
    float most;                // the row's greatest value
    float temperature_inverse;
    uvec2 key;                 // of the random bits
};

// Returns the parameters of the slot whose words begin at `at`, for its token number `ahead` from its next one on. `best` is
// the row's best token.
Draw draw_of(uint at, uvec2 best, uint ahead) {
    uint top_k = args.state.v[at + SLOT_TOP_K];
    float top_p = uintBitsToFloat(args.state.v[at + SLOT_TOP_P]);
    float min_p = uintBitsToFloat(args.state.v[at + SLOT_MIN_P]);
    float min_p_log = uintBitsToFloat(args.state.v[at + SLOT_MIN_P_LOG]);
    uvec2 seed = uvec2(args.state.v[at + SLOT_SEED_LOW], args.state.v[at + SLOT_SEED_HIGH]);
    Draw draw;
    draw.by_count = top_k > 0u && top_k < DRAW_VOCABULARY;
    draw.temperature_inverse = uintBitsToFloat(args.state.v[at + SLOT_TEMPERATURE_INVERSE]);
    draw.most = value_of(best.x);
    draw.least = KEY_MINUS_INFINITY + 1u;
    if (min_p > 0.0) draw.least = key_at_distance(min_p_log, best.x, draw.most, draw.temperature_inverse);
    draw.top_k = draw.by_count ? top_k : LIST + 1u;
    draw.by_mass = top_p < 1.0;
    draw.fraction = uint(clamp(top_p, 0.0, 0.99999994) * 4294967296.0);
    draw.key = philox(args.state.v[at + SLOT_GENERATED] + ahead, seed);
    return draw;
}

// Replaces `winner`, a pair of a key and a token, by a token whose score is greater, or equal and the token lower.
void compete(inout uvec2 winner, float score, uint token) {
    uint key = key_of(score);
    if (key > winner.x || (key == winner.x && token < winner.y)) winner = uvec2(key, token);
}

// Returns the mass of all of the row's tokens with keys >= draw.least.
uvec2 row_mass(Draw draw);

// Lets this invocation's part of the n listed tokens compete. Returns false if the list does not hold all tokens that top_p
// keeps. `complete`: no token outside the list has a key >= least. The list holds all tokens that top_k keeps, unless it
// keeps all.
bool draw_listed(Draw draw, uint n, bool complete, inout uvec2 winner) {
    for (uint i = thread; i < n; i += THREADS) {
        LIST_KEYS[LIST + i] = mass_of(distance(LIST_KEYS[i], draw.most, draw.temperature_inverse));
    }
    barrier();
    uvec2 kept_mass = uvec2(0u);
    for (uint i = thread; i < n; i += THREADS) {
        uint key = LIST_KEYS[i];
        uint rank = 0u;
        uvec2 above_it = uvec2(0u);
        for (uint j = 0u; j < n; j++) {
            if (LIST_KEYS[j] > key) {
                rank++;
                above_it = add64(above_it, uvec2(LIST_KEYS[LIST + j], 0u));
            }
        }
        bool keep = rank < draw.top_k;
        if (keep) kept_mass = add64(kept_mass, uvec2(LIST_KEYS[LIST + i], 0u));
        list_above[i] = keep ? above_it : uvec2(0xffffffffu);
    }
    uvec2 wanted = uvec2(0xffffffffu);
    if (draw.by_mass) {
        uvec2 listed = reduce_sum64(kept_mass);
        uvec2 total = listed;
        if (!complete && draw.top_k > LIST) total = row_mass(draw);
        wanted = share(total, draw.fraction);
        // The tokens that top_p keeps are all in the list only if the list weighs at least that much.
        if (!at_least(listed, wanted)) return false;
    }
    for (uint i = thread; i < n; i += THREADS) {
        // A token is kept if the tokens better than it weigh less than wanted.
        if (!at_least(list_above[i], wanted)) {
            uint token = LIST_TOKENS[i];
            precise float score = distance(LIST_KEYS[i], draw.most, draw.temperature_inverse);
            score = score + gumbel(token_bits(token, draw.key));
            compete(winner, score, token);
        }
    }
    return true;
}
