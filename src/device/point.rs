//! Points: the one meaning of "done" in the whole program. Plain data; no Vulkan here.

use std::fmt;

/// Which of a device's two timelines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Dispatches, and copies that belong to them.
    Compute,
    /// Copies between the host and the device.
    Transfer,
}

impl Role {
    /// Both roles, in the order of [`Role::index`].
    pub const ALL: [Role; 2] = [Role::Compute, Role::Transfer];

    /// 0 for compute, 1 for transfer.
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

/// A value of one role's timeline: reached when everything submitted up to it has finished.
/// Value 0 was reached before anything ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Point {
    /// The timeline.
    pub role: Role,
    /// Its value; grows by one an entry.
    pub value: u64,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.role, self.value)
    }
}
