// Variants of attention scores. All are constants of a kernel, so that a variant that a model does not use costs nothing:
//   SCALE         bits of the f32 that multiplies q · k; 0 for 1 / sqrt(D)
//   WINDOW        number of tokens that a token sees, itself included; 0 for all
//   BOTH          1: a token also sees the later tokens of its prompt's rows in the step: all of them, or with WINDOW as
//                 many as earlier ones (the distance to each is below WINDOW)
//   SOFT_CAP      bits of the f32 c in  score ← c · tanh(score / c);  0 for none
//   SINKS         1: each query head has a further score, which has no value and only takes a share of the softmax
//   QUERY_SCALES  where in the rotary table the factor of each position's query begins, in floats; 0 for none
// Include after these constants.
float score_scale(uint dim) { return SCALE == 0u ? inversesqrt(float(dim)) : uintBitsToFloat(SCALE); }

// Returns the first token that the token at `position` sees.
uint first_visible(uint position) { return WINDOW > 0u && position >= WINDOW ? position + 1u - WINDOW : 0u; }

// Returns the last token that the token at `position` sees, if the last row of its prompt in the step is at `end`.
uint last_visible(uint position, uint end) {
    if (BOTH == 0u) return position;
    return WINDOW > 0u ? min(position + WINDOW - 1u, end) : end;
}

// tanh(x) = 1 - 2 / (exp(2x) + 1), which needs no bounds: exp may overflow to infinity.
float soft_cap(float score) {
    if (SOFT_CAP == 0u) return score;
    float cap = uintBitsToFloat(SOFT_CAP);
    return cap * (1.0 - 2.0 / (exp(2.0 * score / cap) + 1.0));
}
vec4 soft_cap(vec4 score) {
    if (SOFT_CAP == 0u) return score;
    float cap = uintBitsToFloat(SOFT_CAP);
    return cap * (1.0 - 2.0 / (exp(2.0 * score / cap) + 1.0));
}
