//! The choice of a queue for each role. Pure functions.

use crate::device::adapter::QueueFamilyInfo;
use ash::vk;

/// A hardware queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueueSlot {
    /// The queue family.
    pub(super) family: u32,
    /// The queue's index within the family.
    pub(super) index: u32,
}

/// The queues of both roles; equal if the roles share one queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    /// The queue that serves compute.
    pub(super) compute: QueueSlot,
    /// The queue that serves transfers.
    pub(super) transfer: QueueSlot,
}

/// Chooses the queues of both roles. Returns `None` if no family supports compute.
///
/// Compute uses a family without graphics if one exists, otherwise any compute family. Transfer uses, in order of
/// preference: a family that supports neither compute nor graphics, a second queue of the compute family, a queue of
/// another family, the compute queue itself.
pub(super) fn choose(families: &[QueueFamilyInfo]) -> Option<Choice> {
    let there = || families.iter().filter(|f| f.count > 0);
    let compute_family = there().find(|f| f.compute() && !f.graphics()).or_else(|| there().find(|f| f.compute()))?;
    let compute = QueueSlot { family: compute_family.index, index: 0 };
    // Video families support transfers too. The copy engines are the family with the fewest other capabilities.
    let copies = there()
        .filter(|f| f.transfer() && !f.compute() && !f.graphics())
        .min_by_key(|f| (f.flags & !(vk::QueueFlags::TRANSFER | vk::QueueFlags::SPARSE_BINDING)).as_raw().count_ones());
    let transfer = if let Some(family) = copies {
        QueueSlot { family: family.index, index: 0 }
    } else if compute_family.count > 1 {
        QueueSlot { family: compute_family.index, index: 1 }
    } else if let Some(family) = there().find(|f| f.index != compute_family.index && f.transfer()) {
        QueueSlot { family: family.index, index: 0 }
    } else {
        compute
    };
    Some(Choice { compute, transfer })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn family(index: u32, count: u32, flags: vk::QueueFlags) -> QueueFamilyInfo {
        QueueFamilyInfo { index, count, flags, timestamp_bits: 64 }
    }

    const G: vk::QueueFlags = vk::QueueFlags::GRAPHICS;
    const C: vk::QueueFlags = vk::QueueFlags::COMPUTE;
    const T: vk::QueueFlags = vk::QueueFlags::TRANSFER;
    const S: vk::QueueFlags = vk::QueueFlags::SPARSE_BINDING;

    fn slots(families: &[QueueFamilyInfo]) -> Option<((u32, u32), (u32, u32))> {
        choose(families).map(|c| ((c.compute.family, c.compute.index), (c.transfer.family, c.transfer.index)))
    }

    #[test]
    fn a_large_gpu_gives_its_async_compute_and_its_copy_engine() {
        let video = family(1, 1, T | vk::QueueFlags::from_raw(0x20));
        let families = [family(0, 16, G | C | T | S), video, family(2, 8, C | T | S), family(3, 2, T | S)];
        assert_eq!(slots(&families), Some(((2, 0), (3, 0))));
    }

    #[test]
    fn without_a_copy_engine_a_second_queue_then_another_family_then_the_same_queue() {
        assert_eq!(slots(&[family(0, 1, G | C | T), family(1, 4, C | T)]), Some(((1, 0), (1, 1))));
        assert_eq!(slots(&[family(0, 1, G | C | T), family(1, 1, C)]), Some(((1, 0), (0, 0))));
        assert_eq!(slots(&[family(0, 1, G | C | T)]), Some(((0, 0), (0, 0))));
    }

    #[test]
    fn nothing_that_computes_is_no_choice() {
        assert_eq!(slots(&[family(0, 1, G | T), family(1, 0, C)]), None);
    }
}
