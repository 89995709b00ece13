#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "state.glsl"
#include "deterministic.glsl"

// Prompt logprobs from the parts of several devices, each of which has the logits of a part of the vocabulary (`score_part`):
//   sum = Σ over devices of e^(its log sum);  logprob = logit - ln sum
// The most probable tokens are the best of those of all devices, by logit, the lowest id first among equal ones.
//
//   parts  [rows][RANKS][SCORE_WORDS] words: row r is row turn * rows + r of the chunk
//   rows   [chunk rows][4] and chunk: of the prompt step; score, scores: `state.glsl`
//
// One workgroup processes one row. Traffic: 4 · RANKS · SCORE_WORDS bytes.

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint RANKS = 2;
const uint THREADS = gl_WorkGroupSize.x;

layout(push_constant) uniform Args {
    WordsIn parts;
    WordsIn rows;
    WordsIn chunk;
    WordsIn score;
    WordsOut scores;
    uint vocabulary;
};

float float_at(uint at) { return uintBitsToFloat(parts.v[at]); }

// The number of the best tokens of a part. After a fault its words may be anything.
uint count_of(uint part) { return min(parts.v[part + SCORE_TOP_COUNT], TOP_ENTRIES); }

void main() {
    uint row = score.v[SCORE_TURN] * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint count = chunk.v[2];
    if (row >= count) return;
    uint token = score.v[SCORE_NEXT];
    if (row + 1u < count) token = rows.v[(row + 1u) * 4u];
    // The token that follows is not known yet.
    if (token >= vocabulary) return;

    uint first = gl_WorkGroupID.x * RANKS * SCORE_WORDS;
    uint most = KEY_MINUS_INFINITY, target = KEY_MINUS_INFINITY, all = 0u;
    for (uint rank = 0u; rank < RANKS; rank++) {
        uint part = first + rank * SCORE_WORDS;
        most = max(most, key_of(float_at(part + SCORE_LOG_SUM)));
        target = max(target, key_of(float_at(part + SCORE_LOGPROB)));
        all += count_of(part);
    }
    bool none = most <= KEY_MINUS_INFINITY;
    float sum = 0.0;
    for (uint rank = 0u; rank < RANKS; rank++) {
        uint key = key_of(float_at(first + rank * SCORE_WORDS + SCORE_LOG_SUM));
        if (key > KEY_MINUS_INFINITY) sum += exp_negative(value_of(key) - value_of(most));
    }
    float norm = none ? 0.0 : log_positive(sum);
    uint wanted = min(min(score.v[SCORE_TOP_N], TOP_ENTRIES), all);
    uint entry = (score.v[SCORE_FIRST] + row) * SCORE_WORDS;
    for (uint i = gl_LocalInvocationID.x; i < RANKS * TOP_ENTRIES; i += THREADS) {
        uint own = first + i / TOP_ENTRIES * SCORE_WORDS, index = i % TOP_ENTRIES;
        if (index >= count_of(own)) continue;
        uint at = own + SCORE_TOP + 2u * index, id = parts.v[at];
        uint key = key_of(float_at(at + 1u)), rank = 0u;
        for (uint other = 0u; other < RANKS; other++) {
            uint part = first + other * SCORE_WORDS;
            for (uint j = 0u; j < count_of(part); j++) {
                uint place = part + SCORE_TOP + 2u * j;
                uint key_of_other = key_of(float_at(place + 1u));
                rank += uint(key_of_other > key || (key_of_other == key && parts.v[place] < id));
            }
        }
        if (rank < wanted) {
            scores.v[entry + SCORE_TOP + 2u * rank] = id;
            scores.v[entry + SCORE_TOP + 2u * rank + 1u] = floatBitsToUint(value_of(key) - value_of(most) - norm);
        }
    }
    if (gl_LocalInvocationID.x != 0u) return;
    bool possible = !none && target > KEY_MINUS_INFINITY;
    float logprob = possible ? value_of(target) - value_of(most) - norm : uintBitsToFloat(0xff800000u);
    scores.v[entry + SCORE_TOKEN] = token;
    scores.v[entry + SCORE_LOGPROB] = floatBitsToUint(logprob);
    scores.v[entry + SCORE_TOP_COUNT] = wanted;
}
