// The maximum over a group of 32 lanes (`fragments.glsl`). Without cooperative matrices, whose devices' subgroups may be of
// any size, it takes barriers: call it in uniform control flow of the whole workgroup.
#if MATRIX == 1
uint group_max(uint x) { return subgroupMax(x); }
#else
shared uint exchange_s[LANES];
uint group_max(uint x) {
    barrier();
    exchange_s[gl_LocalInvocationIndex] = x;
    barrier();
    uint most = 0u;
    for (uint i = 0u; i < 32u; i++) most = max(most, exchange_s[LANE_GROUP * 32u + i]);
    return most;
}
#endif
