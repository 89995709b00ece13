// The experts that a row's router logits choose: the CHOSEN greatest, the lowest of equals first, each with its
// share: softmax over all COUNT experts, over the chosen ones alone where NORMALISE is 1. A NaN counts as -inf, so
// that whatever the logits are, the chosen are CHOSEN different experts below COUNT.
//
// One subgroup chooses for one row. Its candidates are keys (`determinate.glsl`) as `Candidates`, which each
// invocation fills with PUT_CANDIDATE: with MATRIX 1 (subgroups of 32) in registers, else in `keys_s` from `at` on,
// where nobody but the invocation touches them, so that nothing needs a barrier. What was chosen goes to `ids_s` and
// `shares_s` from `to` on, written by one invocation.
// Needs constants COUNT, CHOSEN and NORMALISE.

#if MATRIX == 1
#extension GL_KHR_shader_subgroup_ballot : require
#define CHOICE_WIDTH 32u
#else
#define CHOICE_WIDTH gl_SubgroupSize
#endif

// Candidates of an invocation, and the i-th of them: neighbours have neighbouring experts.
#if MATRIX == 1
const uint CANDIDATES = (COUNT + CHOICE_WIDTH - 1u) / CHOICE_WIDTH;
#else
#define CANDIDATES ((COUNT + CHOICE_WIDTH - 1u) / CHOICE_WIDTH)
#endif
#define CANDIDATE(i) ((i) * CHOICE_WIDTH + gl_SubgroupInvocationID)

#if MATRIX == 1
#define Candidates uint[CANDIDATES]
#define PUT_CANDIDATE(keys, at, i, key_) keys[i] = key_;
#define GET_CANDIDATE(keys, at, i) keys[i]
#define EACH_CANDIDATE [[unroll]]
#else
#define Candidates uint
#define PUT_CANDIDATE(keys, at, i, key_) if (CANDIDATE(i) < COUNT) keys_s[(at) + CANDIDATE(i)] = key_;
#define GET_CANDIDATE(keys, at, i) (CANDIDATE(i) < COUNT ? keys_s[(at) + min(CANDIDATE(i), COUNT - 1u)] : 0u)
#define EACH_CANDIDATE [[dont_unroll]]
#endif

void choose_experts(inout Candidates keys, uint at, uint to) {
    float most = 0.0, total = 0.0;
    [[dont_unroll]] for (uint j = 0u; j < CHOSEN; j++) {
        uint key = 0u, id = COUNT;
        EACH_CANDIDATE for (uint i = 0u; i < CANDIDATES; i++) {
            uint other = GET_CANDIDATE(keys, at, i);
            // Experts ascend, so an equal one later never wins.
            if (other > key) {
                key = other;
                id = CANDIDATE(i);
            }
        }
        uint best = subgroupMax(key);
        id = subgroupMin(key == best ? id : COUNT);
        float value = value_of(best);
        if (j == 0u) {
            most = value;
            if (NORMALISE == 0u) {
                EACH_CANDIDATE for (uint i = 0u; i < CANDIDATES; i++) {
                    uint other = GET_CANDIDATE(keys, at, i);
                    if (other != 0u) total += exp(value_of(other) - most);
                }
                total = subgroupAdd(total);
            }
        }
        float part = exp(value - most);
        if (NORMALISE == 1u) total += part;
        EACH_CANDIDATE for (uint i = 0u; i < CANDIDATES; i++)
            if (CANDIDATE(i) == id) PUT_CANDIDATE(keys, at, i, 0u)
        if (subgroupElect()) {
            ids_s[to + j] = min(id, COUNT - 1u);
            shares_s[to + j] = part;
        }
    }
    if (subgroupElect())
        for (uint j = 0u; j < CHOSEN; j++) shares_s[to + j] /= total;
}
