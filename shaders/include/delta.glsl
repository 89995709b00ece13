// Definitions shared by the gated delta rule kernels: scalar functions and the constants of the recurrent state's
// buffers.
#include "windows.glsl"

const uint TAPS = 4u;                 // taps of the causal convolution
const uint BLOCK_ROWS = 64u;          // rows of a prompt that the chunked scan processes per step
// The key head that a value head uses, and whether it is the first value head that uses it. Value heads that share a key
// head are adjacent, or (TILED 1) key heads take turns. The shader must declare KEY_HEADS, VALUE_HEADS and TILED.
#define KEY_HEAD(h) (TILED == 1u ? (h) % KEY_HEADS : (h) / (VALUE_HEADS / KEY_HEADS))
#define FIRST_OF_KEY_HEAD(h) (TILED == 1u ? (h) < KEY_HEADS : (h) % (VALUE_HEADS / KEY_HEADS) == 0u)
const float L2_EPSILON = 1e-6;

vec4 silu(vec4 x) { return x / (1.0 + exp(-x)); }

float sigmoid(float x) { return 1.0 / (1.0 + exp(-x)); }

// Returns ln(1 + e^x), accurate to the last bits also where the result is small: for arguments near 1 the drivers' log
// is accurate only to 2^-21.
float softplus(float x) {
    float y = exp(-abs(x)), s = y / (2.0 + y), z = s * s;
    float series = 1.0 + z * (1.0 / 3.0 + z * (1.0 / 5.0 + z * (1.0 / 7.0 + z * (1.0 / 9.0 + z * (1.0 / 11.0 + z * (1.0 / 13.0))))));
    return max(x, 0.0) + 2.0 * s * series;
}

// Returns ln α of a token, which is at most zero and finite.
float log_decay(float a, float a_log, float dt_bias) { return max(-exp(a_log) * softplus(a + dt_bias), -1000.0); }
