// A causal convolution of TAPS tokens over four channels. The shader must declare the constants TAPS, from 2 to 5, and BIAS,
// and the arguments `conv` and `bias`.

vec4 weight[TAPS];                    // of the oldest token to the current one
vec4 offset;
vec4 past[TAPS - 1u];                 // the inputs of the tokens before, the oldest first

// Loads the weights of channels 4 * quad to 4 * quad + 3.
void load_weights(uint quad) {
    vec4 words[TAPS];
    [[unroll]] for (uint n = 0u; n < TAPS; n++) words[n] = conv.v[quad * TAPS + n];
#define TAP(channel, j) words[((channel) * TAPS + (j)) / 4u][((channel) * TAPS + (j)) % 4u]
    [[unroll]] for (uint j = 0u; j < TAPS; j++) weight[j] = vec4(TAP(0u, j), TAP(1u, j), TAP(2u, j), TAP(3u, j));
    offset = BIAS == 1u ? bias.v[quad] : vec4(0.0);
}

// Returns the result for the token whose input is u, and takes the input in for the next one.
vec4 convolve(vec4 u) {
    vec4 sum = offset;
    [[unroll]] for (uint j = 0u; j < TAPS - 1u; j++) sum += weight[j] * past[j];
    sum += weight[TAPS - 1u] * u;
    [[unroll]] for (uint j = 0u; j + 1u < TAPS - 1u; j++) past[j] = past[j + 1u];
    past[TAPS - 2u] = u;
    return sum;
}
