// MoE routing inside a consumer kernel: every workgroup selects the top-k experts of all ROWS rows for itself, so that
// no dispatch of its own is needed. Included by `expert_skinny.comp`.
//
// `choose_for_rows` writes `ids_s` and `shares_s` ([ROWS][CHOSEN]) and, with SHARED 1 or 2, the shared expert's gate to
// `gates_s` ([ROWS]): the sigmoid of its logit, or 1 with GATED 0. The caller executes a barrier before it reads them.
// The shares are still unnormalized: `share_of` returns the final ones, which the caller multiplies by the experts' own
// factors (EXPERT_SCALES). With SHARES false the caller needs no shares, and the softmax sums are skipped. With TAGGED 1
// the function polls until all logits have arrived. It needs `logits` [ROWS][logits_stride] and what `experts.glsl` needs.
// With MATRIX 0, call it in uniform control flow.
//
// ROUTED 0  the greatest logits, with softmax shares (`experts.glsl`)
// ROUTED 1  likewise, of the logits times LOGIT_SCALE; the shares times `factor`
// ROUTED 2  the greatest sigmoids of the logits times LOGIT_SCALE, with CHOICE_BIAS 1 plus `choice_bias`; the shares are
//           the sigmoids (NORMALISE 1: divided by their sum plus SUM_OFFSET) times `factor`
// These are the selections of `expert_route` without groups of experts.
//
// `totals_s`: per row, the softmax denominator over all experts; used only with NORMALISE 0.
shared float totals_s[ROWS];
#if MATRIX == 1
#include "experts.glsl"
#else
shared uint keys_s[COUNT];
#endif

// Returns the share of a row's choice without the expert's own factor.
float share_of(uint row, uint choice) {
    float total = NORMALISE == 1u ? 0.0 : ROUTED == 2u ? 1.0 : totals_s[row];
    if (NORMALISE == 1u) [[unroll]] for (uint j = 0u; j < CHOSEN; j++) total += shares_s[row * CHOSEN + j];
    if (ROUTED == 2u && NORMALISE == 1u) total += uintBitsToFloat(SUM_OFFSET);
    float share = shares_s[row * CHOSEN + choice] / total;
    return ROUTED == 0u ? share : share * factor;
}

// Returns the number that is compared, or whose sigmoid is.
float scaled(float logit) { return ROUTED == 0u ? logit : logit * uintBitsToFloat(LOGIT_SCALE); }
float sigmoid(float z) { return 1.0 / (1.0 + exp(-z)); }

#if MATRIX == 1
// Selects the experts of all rows. Each group of 32 lanes takes every GROUPS-th row.
void choose_for_rows(inout uint polls) {
    for (uint row = LANE_GROUP; row < ROWS; row += GROUPS) {
        uint base = row * logits_stride, gate = 0u, bad;
        Candidates keys;
        Scores scores, biases;
        [[unroll]] for (uint i = 0u; i < CANDIDATES; i++)
            biases[i] = CHOICE_BIAS == 1u ? choice_bias.v[min(CANDIDATE(i), COUNT - 1u)] : 0.0;
        do {
            bad = 0u;
            [[unroll]] for (uint i = 0u; i < CANDIDATES; i++) {
                uint word = TaggedIn1(logits).v[base + min(CANDIDATE(i), COUNT - 1u)];
                if (TAGGED == 1u) bad |= stale(word, logits_tag);
                float z = scaled(uintBitsToFloat(word));
                scores[i] = ROUTED == 2u ? sigmoid(z) : z;
                keys[i] = CANDIDATE(i) < COUNT ? key_of(ROUTED == 2u ? scores[i] + biases[i] : z) : 0u;
            }
            if (SHARED != 0u && GATED == 1u) gate = TaggedIn1(logits).v[base + COUNT];
            if (SHARED != 0u && GATED == 1u && TAGGED == 1u) bad |= stale(gate, logits_tag);
        } while (TAGGED == 1u && poll_again(subgroupAny(bad != 0u), polls, fault, logits_tag));
        choose_experts(keys, scores, row, row * CHOSEN);
        if (SHARED != 0u && LANE == 0u) gates_s[row] = GATED == 1u ? sigmoid(uintBitsToFloat(gate)) : 1.0;
    }
}
#else
uint logit(uint at, inout uint polls) {
    uvec4 words = logits.v[at / 4u];
    uint word = at % 4u == 0u ? words.x : at % 4u == 1u ? words.y : at % 4u == 2u ? words.z : words.w;
    while (TAGGED == 1u && poll_again(stale(word, logits_tag) != 0u, polls, fault, logits_tag)) {
        words = logits.v[at / 4u];
        word = at % 4u == 0u ? words.x : at % 4u == 1u ? words.y : at % 4u == 2u ? words.z : words.w;
    }
    return word;
}

// Selects the experts row by row: a candidate is chosen if fewer than CHOSEN candidates precede it in the order (key
// descending, id ascending). Every invocation runs the same number of iterations, repeating the last candidate where it
// has none of its own, without storing it: a CPU driver counts loop iterations between barriers (see EACH in
// `flash_decode.comp`).
void choose_for_rows(inout uint polls) {
    for (uint row = 0u; row < ROWS; row++) {
        barrier();
        for (uint turn = 0u; turn < COUNT; turn += LANES) {
            uint id = min(turn + gl_LocalInvocationIndex, COUNT - 1u);
            float z = scaled(uintBitsToFloat(logit(row * logits_stride + id, polls)));
            if (ROUTED == 2u) z = sigmoid(z) + (CHOICE_BIAS == 1u ? choice_bias.v[id] : 0.0);
            uint key = key_of(z);
            if (turn + gl_LocalInvocationIndex < COUNT) keys_s[id] = key;
        }
        if (SHARED != 0u) {
            float gate = 1.0;
            if (GATED == 1u) gate = sigmoid(uintBitsToFloat(logit(row * logits_stride + COUNT, polls)));
            if (gl_LocalInvocationIndex == 0u) gates_s[row] = gate;
        }
        barrier();
        for (uint turn = 0u; turn < COUNT; turn += LANES) {
            uint id = min(turn + gl_LocalInvocationIndex, COUNT - 1u), key = keys_s[id], before = 0u;
            for (uint other = 0u; other < COUNT; other++)
                before += keys_s[other] > key || (keys_s[other] == key && other < id) ? 1u : 0u;
            if (before < CHOSEN && turn + gl_LocalInvocationIndex < COUNT) ids_s[row * CHOSEN + before] = id;
        }
        barrier();
        float most = value_of(keys_s[ids_s[row * CHOSEN]]), total = 0.0;
        if (SHARES && NORMALISE == 0u && ROUTED != 2u) {
            for (uint i = 0u; i < COUNT; i++) total += exp(value_of(keys_s[i]) - most);
            if (gl_LocalInvocationIndex == 0u) totals_s[row] = total;
        }
        uint place = row * CHOSEN + min(gl_LocalInvocationIndex, CHOSEN - 1u);
        float share = exp(value_of(keys_s[ids_s[place]]) - most);
        if (ROUTED == 2u) share = sigmoid(scaled(uintBitsToFloat(logit(row * logits_stride + ids_s[place], polls))));
        if (gl_LocalInvocationIndex < CHOSEN) shares_s[place] = share;
    }
}
#endif
