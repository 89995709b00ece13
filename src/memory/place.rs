//! The memory type of a buffer: a pure choice among the types that the driver lists.
//! Not here: allocation.

use ash::vk;
use std::fmt;

/// The memory in which a buffer is placed, by its use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Device-local memory without host access.
    DeviceLocal,
    /// Memory that the host writes and the device reads.
    Upload {
        /// Prefer device-local memory if the host can map it; otherwise host memory is used.
        bar: bool,
    },
    /// Cached host memory that the device writes and the host reads.
    Readback,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Place::DeviceLocal => "device memory",
            Place::Upload { .. } => "memory that the host writes",
            Place::Readback => "memory that the host reads",
        })
    }
}

/// Returns the index of the best memory type among those in `bits`; the driver's order breaks ties. With
/// `must_be_local`, [`Place::DeviceLocal`] accepts only device-local types.
pub(super) fn choose(types: &[vk::MemoryType], bits: u32, place: Place, must_be_local: bool) -> Option<usize> {
    use vk::MemoryPropertyFlags as Flags;
    let host = Flags::HOST_VISIBLE | Flags::HOST_COHERENT;
    // Buffers cannot use protected or lazily allocated memory, and AMD's uncached debug types are slow.
    let never = Flags::PROTECTED | Flags::LAZILY_ALLOCATED | Flags::DEVICE_COHERENT_AMD | Flags::DEVICE_UNCACHED_AMD;
    // The required flags, the preferred flags with the most important first, and the flags to avoid.
    let (needs, wants, rather_not) = match place {
        Place::DeviceLocal if must_be_local => {
            (Flags::DEVICE_LOCAL, [Flags::DEVICE_LOCAL, Flags::empty()], Flags::HOST_VISIBLE)
        }
        Place::DeviceLocal => (Flags::empty(), [Flags::DEVICE_LOCAL, Flags::empty()], Flags::HOST_VISIBLE),
        Place::Upload { bar: true } => (host, [Flags::DEVICE_LOCAL, Flags::empty()], Flags::HOST_CACHED),
        Place::Upload { bar: false } => (host, [Flags::empty(), Flags::empty()], Flags::DEVICE_LOCAL),
        Place::Readback => (host, [Flags::HOST_CACHED, Flags::empty()], Flags::DEVICE_LOCAL),
    };
    let score = |flags: Flags| {
        let wanted: u32 = wants.iter().rev().enumerate().map(|(i, w)| u32::from(flags.contains(*w)) << (i + 1)).sum();
        wanted + u32::from(!flags.intersects(rather_not))
    };
    types
        .iter()
        .enumerate()
        .filter(|(i, t)| {
            bits & (1 << i) != 0 && t.property_flags.contains(needs) && !t.property_flags.intersects(never)
        })
        // `min_by_key` returns the first of equal elements.
        .min_by_key(|(_, t)| std::cmp::Reverse(score(t.property_flags)))
        .map(|(i, _)| i)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vk::MemoryPropertyFlags as Flags;

    fn types(flags: &[Flags]) -> Vec<vk::MemoryType> {
        flags.iter().map(|f| vk::MemoryType { property_flags: *f, heap_index: 0 }).collect()
    }

    const HOST: Flags = Flags::from_raw(Flags::HOST_VISIBLE.as_raw() | Flags::HOST_COHERENT.as_raw());

    /// The memory types that an NVIDIA GPU with a full BAR lists.
    fn discrete() -> Vec<vk::MemoryType> {
        types(&[Flags::empty(), Flags::DEVICE_LOCAL, HOST, HOST | Flags::HOST_CACHED, HOST | Flags::DEVICE_LOCAL])
    }

    #[test]
    fn a_discrete_gpu_has_a_type_for_each_place() {
        let t = discrete();
        assert_eq!(choose(&t, !0, Place::DeviceLocal, true), Some(1));
        assert_eq!(choose(&t, !0, Place::Upload { bar: false }, true), Some(2));
        assert_eq!(choose(&t, !0, Place::Upload { bar: true }, true), Some(4));
        assert_eq!(choose(&t, !0, Place::Readback, true), Some(3));
    }

    #[test]
    fn a_discrete_gpu_never_spills_to_the_host() {
        let t = discrete();
        assert_eq!(choose(&t, 0b01101, Place::DeviceLocal, true), None);
        assert_eq!(choose(&t, 0b01101, Place::DeviceLocal, false), Some(0));
        assert_eq!(choose(&t, 0b10000, Place::DeviceLocal, true), Some(4));
    }

    #[test]
    fn without_a_bar_uploads_go_through_the_host() {
        let t = types(&[Flags::DEVICE_LOCAL, HOST, HOST | Flags::HOST_CACHED]);
        assert_eq!(choose(&t, !0, Place::Upload { bar: true }, true), Some(1));
    }

    #[test]
    fn one_type_serves_all_on_a_cpu() {
        let t = types(&[HOST | Flags::HOST_CACHED | Flags::DEVICE_LOCAL]);
        for place in [Place::DeviceLocal, Place::Upload { bar: false }, Place::Upload { bar: true }, Place::Readback] {
            assert_eq!(choose(&t, !0, place, false), Some(0), "{place}");
        }
    }

    #[test]
    fn memory_that_is_not_coherent_is_not_for_the_host() {
        let t = types(&[Flags::DEVICE_LOCAL, Flags::HOST_VISIBLE | Flags::HOST_CACHED]);
        assert_eq!(choose(&t, !0, Place::Readback, true), None);
        assert_eq!(choose(&t, !0, Place::Upload { bar: false }, true), None);
    }

    #[test]
    fn debug_and_protected_types_are_left_alone() {
        let t = types(&[
            Flags::DEVICE_LOCAL | Flags::PROTECTED,
            Flags::DEVICE_LOCAL | Flags::DEVICE_COHERENT_AMD | Flags::DEVICE_UNCACHED_AMD,
            Flags::DEVICE_LOCAL | HOST,
        ]);
        assert_eq!(choose(&t, !0, Place::DeviceLocal, true), Some(2));
    }
}
