// Activations of an MLP's first product. The kind is a constant of a kernel, from `Epilogue::code`. Gated linear units, the
// activation of a gate, times an up projection:
//   2  SwiGLU   gate · sigmoid(gate) · up
//   3  GeGLU    gelu(gate) · up, with GELU's approximation by tanh:  ½x (1 + tanh u) = x · sigmoid(2u),
//               u = sqrt(2/π) (x + 0.044715 x³)
//   4  clamped  g · sigmoid(1.702 g) · (u + 1),  g = min(gate, limit), u = clamp(up, -limit, limit); the upper 24 bits of
//               the kind are those of the limit, an f32
// and without a gate:
//   5  squared ReLU  max(v, 0)²
const uint SQUARED_RELU = 5u;

// Whether an output is made of two rows of W.
#define IS_GATED(kind) ((kind) >= 2u && (kind) != SQUARED_RELU)
// Returns the outputs of rows of W without a gate.
#define ACTIVATED(kind, v) ((kind) == SQUARED_RELU ? max(v, 0.0) * max(v, 0.0) : (v))

float glu(uint kind, float gate, float up) {
    if (kind == 3u) return gate / (1.0 + exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up;
    if ((kind & 255u) == 4u) {
        float limit = uintBitsToFloat(kind & 0xffffff00u);
        gate = min(gate, limit);
        return gate / (1.0 + exp(-1.702 * gate)) * (clamp(up, -limit, limit) + 1.0);
    }
    return gate / (1.0 + exp(-gate)) * up;
}
vec2 glu(uint kind, vec2 gate, vec2 up) { return vec2(glu(kind, gate.x, up.x), glu(kind, gate.y, up.y)); }
