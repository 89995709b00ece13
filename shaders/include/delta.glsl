// What the kernels of the gated delta rule share: its scalar functions and the numbers of its memory.

const uint RING = 8u;                 // positions of a cell's window
const uint TAPS = 4u;                 // of the convolution
const uint BLOCK_ROWS = 64u;          // rows of a prompt that are one step of its scan
// Tokens of a cell that its state may have to take in still; of each k̂, δ, and α with three words of padding.
const uint NO_CELL = 0xffffffffu;
const float L2_EPSILON = 1e-6;

vec4 silu(vec4 x) { return x / (1.0 + exp(-x)); }

float sigmoid(float x) { return 1.0 / (1.0 + exp(-x)); }

// ln(1 + e^x) to the last bits, also where it is small: the drivers' log knows values near 1 to 2^-21 only.
float softplus(float x) {
    float y = exp(-abs(x)), s = y / (2.0 + y), z = s * s;
    float series = 1.0 + z * (1.0 / 3.0 + z * (1.0 / 5.0 + z * (1.0 / 7.0 + z * (1.0 / 9.0 + z * (1.0 / 11.0 + z * (1.0 / 13.0))))));
    return max(x, 0.0) + 2.0 * s * series;
}

// ln α of a token: at most zero, and finite.
float log_decay(float a, float a_log, float dt_bias) { return max(-exp(a_log) * softplus(a + dt_bias), -1000.0); }
