//! Points, the only meaning of "done" in the whole program. Plain data without Vulkan.

use std::fmt;

/// One of a device's two timelines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Dispatches, and the copies that belong to them.
    Compute,
    /// Copies between the host and the device.
    Transfer,
}

impl Role {
    /// Both roles, in the order of [`Role::index`].
    pub const ALL: [Role; 2] = [Role::Compute, Role::Transfer];

    /// Returns 0 for compute and 1 for transfer.
    pub fn index(self) -> usize {
        match self {
            Role::Compute => 0,
            Role::Transfer => 1,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Compute => "compute",
            Role::Transfer => "transfer",
        })
    }
}

/// A value of one role's timeline. It is reached when all work submitted up to this value has finished. Value 0 is
/// reached from the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Point {
    /// The timeline.
    pub role: Role,
    /// The timeline's value; it grows by one per batch entry.
    pub value: u64,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.role, self.value)
    }
}
