//! GPU memory as owned values: the plan printed at start, arenas, the staging ring, the
//! KV page pool. Deliberately absent: Vulkan calls other than through `device`.
