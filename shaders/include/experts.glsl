// MoE top-k selection: the CHOSEN experts with the greatest router logits of a row (the lowest id first among equal
// logits), each with its share. The share is the softmax over all COUNT experts, or over the chosen ones only with
// NORMALISE 1. A NaN logit counts as -inf, so that the result is always CHOSEN different experts below COUNT, whatever
// the logits are.
//
// One subgroup selects for one row, on ordered integer keys (`deterministic.glsl`). The constants COUNT, CHOSEN and
// NORMALISE must be defined.
//
// MATRIX 1  (subgroups of 32): the keys are in registers, as `Candidates`. The ids are written to `ids_s` and the
//           shares to `shares_s` from index `to` on. The shares are not normalized yet: the caller divides them by the
//           sum of the chosen ones, or by `totals_s[row]` with NORMALISE 0. With ROUTED 2 the shares are the chosen
//           experts' `scores`, and there is no total.
// MATRIX 0  (subgroups of any width): the keys are in `keys_s` from index `at` on. Each invocation accesses only its
//           own keys, so no barrier is needed. One invocation writes the ids and the normalized shares.

#if MATRIX == 1
// The keys of a lane's candidates; the i-th belongs to expert CANDIDATE(i).
const uint CANDIDATES = (COUNT + 31u) / 32u;
#define CANDIDATE(i) ((i) * 32u + gl_SubgroupInvocationID)
#define Candidates uint[CANDIDATES]
#define Scores float[CANDIDATES]

void choose_experts(Candidates keys, Scores scores, uint row, uint to) {
    float most = 0.0;
    [[dont_unroll]] for (uint j = 0u; j < CHOSEN; j++) {
        uint key = 0u, id = COUNT;
        [[unroll]] for (uint i = 0u; i < CANDIDATES; i++) {
            // Expert ids ascend, so that of equal keys the lowest id is kept.
            if (keys[i] > key) {
                key = keys[i];
                id = CANDIDATE(i);
            }
        }
        uint best = subgroupMax(key);
        id = min(subgroupMin(key == best ? id : COUNT), COUNT - 1u);
        if (j == 0u) {
            most = value_of(best);
            if (SHARES && NORMALISE == 0u && ROUTED != 2u) {
                float total = 0.0;
                [[unroll]] for (uint i = 0u; i < CANDIDATES; i++)
                    if (keys[i] != 0u) total += exp(value_of(keys[i]) - most);
                total = subgroupAdd(total);
                if (subgroupElect()) totals_s[row] = total;
            }
        }
        [[unroll]] for (uint i = 0u; i < CANDIDATES; i++) {
            if (CANDIDATE(i) != id) continue;
            keys[i] = 0u;
            if (SHARES && ROUTED == 2u) shares_s[to + j] = scores[i];
        }
        if (subgroupElect()) {
            ids_s[to + j] = id;
            if (SHARES && ROUTED != 2u) shares_s[to + j] = exp(value_of(best) - most);
        }
    }
}

#else
// The number of an invocation's candidates; the i-th is expert CANDIDATE(i).
#define CANDIDATES ((COUNT + gl_SubgroupSize - 1u) / gl_SubgroupSize)
#define CANDIDATE(i) ((i) * gl_SubgroupSize + gl_SubgroupInvocationID)

void choose_experts(uint at, uint to) {
    float most = 0.0, total = 0.0;
    for (uint j = 0u; j < CHOSEN; j++) {
        uint key = 0u, id = COUNT;
        for (uint i = 0u; i < CANDIDATES; i++) {
            uint other = CANDIDATE(i) < COUNT ? keys_s[at + min(CANDIDATE(i), COUNT - 1u)] : 0u;
            // Expert ids ascend, so that of equal keys the lowest id is kept.
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
