//! The amount of free device-local memory as the driver currently reports it.

/// The state of the largest device-local heap at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryBudget {
    /// The heap's size in bytes.
    pub heap_bytes: u64,
    /// The bytes that this process may use in total.
    pub budget_bytes: u64,
    /// The bytes that this process already uses.
    pub used_bytes: u64,
    /// Whether the driver reported budget and usage (`VK_EXT_memory_budget`). If not, the budget is the heap's size,
    /// and the usage is unknown and given as 0.
    pub reported: bool,
}

impl MemoryBudget {
    /// The bytes that this process may still allocate.
    pub fn free_bytes(&self) -> u64 {
        self.budget_bytes.saturating_sub(self.used_bytes)
    }
}
