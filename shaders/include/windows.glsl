// Constants of convolution windows: what a sequence's cell holds of the inputs of a causal convolution.

const uint RING = 8u;                 // positions held by a cell's convolution window (a ring buffer)
// Sentinel in place of a cell number: the prompt continues no stored state.
const uint NO_CELL = 0xffffffffu;
