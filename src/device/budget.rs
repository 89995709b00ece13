//! How much of the device's own memory is free, as the driver sees it now.

/// The largest device-local heap at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryBudget {
    /// The heap's size in bytes.
    pub heap_bytes: u64,
    /// What this process may use in all, in bytes.
    pub budget_bytes: u64,
    /// What this process uses already, in bytes.
    pub used_bytes: u64,
    /// Whether the driver told (`VK_EXT_memory_budget`); else the budget is the heap and the
    /// use is unknown and given as 0.
    pub reported: bool,
}

impl MemoryBudget {
    /// What this process may still take, in bytes.
    pub fn free_bytes(&self) -> u64 {
        self.budget_bytes.saturating_sub(self.used_bytes)
    }
}
