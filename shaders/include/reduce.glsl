// Workgroup reductions for kernels whose invocations each own parts of a row of logits. Include `state.glsl` and
// `deterministic.glsl` first.

// Subgroups have at least 4 invocations and workgroups at most 1,024.
const uint MAX_SUBGROUPS = 256u;
// The capacity of a row's list of best tokens (`top.glsl`).
const uint LIST = 1024u;

shared uint reduce_a[MAX_SUBGROUPS];
shared uint reduce_b[MAX_SUBGROUPS];
// The result of the latest reduction.
shared uvec2 found;

// Returns to every invocation the greatest key of the workgroup and the lowest token that has it.
uvec2 reduce_best(uvec2 best) {
    uint key = subgroupMax(best.x);
    uint token = subgroupMin(best.x == key ? best.y : TOKEN_NONE);
    barrier();
    if (subgroupElect()) {
        reduce_a[gl_SubgroupID] = key;
        reduce_b[gl_SubgroupID] = token;
    }
    barrier();
    if (gl_SubgroupID == 0u) {
        key = 0u;
        token = TOKEN_NONE;
        for (uint base = 0u; base < gl_NumSubgroups; base += gl_SubgroupSize) {
            uint i = base + gl_SubgroupInvocationID;
            if (i < gl_NumSubgroups) {
                if (reduce_a[i] > key || (reduce_a[i] == key && reduce_b[i] < token)) {
                    key = reduce_a[i];
                    token = reduce_b[i];
                }
            }
        }
        uint most = subgroupMax(key);
        token = subgroupMin(key == most ? token : TOKEN_NONE);
        if (subgroupElect()) found = uvec2(most, token);
    }
    barrier();
    return found;
}

// Returns to every invocation the sum over the workgroup.
float reduce_sum(float value) {
    float sum = subgroupAdd(value);
    barrier();
    if (subgroupElect()) reduce_a[gl_SubgroupID] = floatBitsToUint(sum);
    barrier();
    if (gl_SubgroupID == 0u) {
        sum = 0.0;
        for (uint base = 0u; base < gl_NumSubgroups; base += gl_SubgroupSize) {
            uint i = base + gl_SubgroupInvocationID;
            if (i < gl_NumSubgroups) sum += uintBitsToFloat(reduce_a[i]);
        }
        sum = subgroupAdd(sum);
        if (subgroupElect()) found.x = floatBitsToUint(sum);
    }
    barrier();
    return uintBitsToFloat(found.x);
}
