// The experts that a row's router logits choose: the CHOSEN greatest, the lowest of equals first, each with its
// share: softmax over all COUNT experts, over the chosen ones alone where NORMALISE is 1. A NaN counts as -inf, so that
// whatever the logits are, the chosen are CHOSEN different experts below COUNT.
//
// One subgroup chooses for one row, among keys (`determinate.glsl`). Needs constants COUNT, CHOSEN and NORMALISE.
//
// MATRIX 1 (subgroups of 32): keys are in registers, as `Candidates`; ids go to `ids_s` and shares to `shares_s` from
//     `to` on, the shares still to be divided by the sum of the chosen ones' or, with NORMALISE 0, by `totals_s[row]`
// MATRIX 0 (subgroups of any width): keys are in `keys_s` from `at` on, where nobody touches those of an invocation but
//     itself, so that nothing needs a barrier; what was chosen is written by one invocation, shares are divided

#if MATRIX == 1
// Candidates of a lane; the i-th is expert CANDIDATE(i).
const uint CANDIDATES = (COUNT + 31u) / 32u;
#define CANDIDATE(i) ((i) * 32u + gl_SubgroupInvocationID)
#define Candidates uint[CANDIDATES]

void choose_experts(Candidates keys, uint row, uint to) {
    float most = 0.0;
    [[dont_unroll]] for (uint j = 0u; j < CHOSEN; j++) {
        uint key = 0u, id = COUNT;
        [[unroll]] for (uint i = 0u; i < CANDIDATES; i++) {
            // Experts ascend, so an equal one later never wins.
            if (keys[i] > key) {
                key = keys[i];
                id = CANDIDATE(i);
            }
        }
        uint best = subgroupMax(key);
        id = min(subgroupMin(key == best ? id : COUNT), COUNT - 1u);
        if (j == 0u) {
            most = value_of(best);
            if (SHARES && NORMALISE == 0u) {
                float total = 0.0;
                [[unroll]] for (uint i = 0u; i < CANDIDATES; i++)
                    if (keys[i] != 0u) total += exp(value_of(keys[i]) - most);
                total = subgroupAdd(total);
                if (subgroupElect()) totals_s[row] = total;
            }
        }
        [[unroll]] for (uint i = 0u; i < CANDIDATES; i++) if (CANDIDATE(i) == id) keys[i] = 0u;
        if (subgroupElect()) {
            ids_s[to + j] = id;
            if (SHARES) shares_s[to + j] = exp(value_of(best) - most);
        }
    }
}

#else
// Candidates of an invocation; the i-th is expert CANDIDATE(i).
#define CANDIDATES ((COUNT + gl_SubgroupSize - 1u) / gl_SubgroupSize)
#define CANDIDATE(i) ((i) * gl_SubgroupSize + gl_SubgroupInvocationID)

void choose_experts(uint at, uint to) {
    float most = 0.0, total = 0.0;
    for (uint j = 0u; j < CHOSEN; j++) {
        uint key = 0u, id = COUNT;
        for (uint i = 0u; i < CANDIDATES; i++) {
            uint other = CANDIDATE(i) < COUNT ? keys_s[at + min(CANDIDATE(i), COUNT - 1u)] : 0u;
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
                for (uint i = 0u; i < CANDIDATES; i++)
                    if (CANDIDATE(i) < COUNT) total += exp(value_of(keys_s[at + CANDIDATE(i)]) - most);
                total = subgroupAdd(total);
            }
        }
        float part = exp(value - most);
        if (NORMALISE == 1u) total += part;
        for (uint i = 0u; i < CANDIDATES; i++) if (CANDIDATE(i) == id) keys_s[at + id] = 0u;
        if (subgroupElect()) {
            ids_s[to + j] = min(id, COUNT - 1u);
            shares_s[to + j] = part;
        }
    }
    if (subgroupElect())
        for (uint j = 0u; j < CHOSEN; j++) shares_s[to + j] /= total;
}
#endif
