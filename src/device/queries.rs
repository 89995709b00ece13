//! Timestamps that the GPU writes and the host reads in nanoseconds.

use crate::device::error::DeviceError;
use crate::device::handle::Device;
use crate::device::logical::Logical;
use ash::vk;
use std::sync::Arc;

/// A pool of timestamps; clones share it. Recorded commands and submissions keep it alive.
#[derive(Clone)]
pub struct Queries(Arc<Inner>);

struct Inner {
    raw: vk::QueryPool,
    count: u32,
    logical: Arc<Logical>,
}

impl std::fmt::Debug for Queries {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queries").field("count", &self.0.count).finish()
    }
}

impl Queries {
    /// Creates a pool of `count` timestamps (at least 1), ready to be written. Returns `Unsupported` if the compute
    /// queue has no timestamps.
    pub fn new(device: &Device, count: u32) -> Result<Queries, DeviceError> {
        let logical = device.logical();
        if device.adapter().capabilities.timestamp_bits == 0 {
            return Err(DeviceError::Unsupported { device: device.adapter().name.clone(), what: "timestamps" });
        }
        let info = vk::QueryPoolCreateInfo::default().query_type(vk::QueryType::TIMESTAMP).query_count(count.max(1));
        // SAFETY: a plain timestamp pool.
        let raw = logical.check("vkCreateQueryPool", unsafe { logical.raw.create_query_pool(&info, None) })?;
        let queries = Queries(Arc::new(Inner { raw, count: count.max(1), logical: logical.clone() }));
        queries.reset();
        Ok(queries)
    }

    /// The number of timestamps in the pool.
    pub fn count(&self) -> u32 {
        self.0.count
    }

    /// Resets all timestamps from the host, so that they can be written again. No work that writes them may be in
    /// flight: the caller must have seen the point of that work reached. [`crate::device::Encoder::reset`] does the
    /// same in command order.
    pub fn reset(&self) {
        self.reset_range(0, self.0.count);
    }

    /// Resets `count` timestamps from `first` on, as [`Queries::reset`] does. Does nothing on a lost device.
    ///
    /// # Panics
    /// If the range does not lie in the pool.
    pub fn reset_range(&self, first: u32, count: u32) {
        self.assert_has(first, count);
        // Work in flight on a lost device may still write the timestamps, and nothing will use them later.
        if self.0.logical.alive().is_err() {
            return;
        }
        // SAFETY: hostQueryReset is a required feature. The range lies in the pool, checked above.
        unsafe { self.0.logical.raw.reset_query_pool(self.0.raw, first, count) };
    }

    /// Returns the timestamps `first .. first + count` in nanoseconds of the device's clock; `None` for a timestamp
    /// that is not written yet. Does not wait.
    ///
    /// # Panics
    /// If the range does not lie in the pool.
    pub fn read(&self, first: u32, count: u32) -> Result<Vec<Option<u64>>, DeviceError> {
        self.assert_has(first, count);
        let logical = &self.0.logical;
        let mut values = vec![[0u64; 2]; count as usize];
        let flags = vk::QueryResultFlags::TYPE_64 | vk::QueryResultFlags::WITH_AVAILABILITY;
        // SAFETY: the range lies in the pool. Each element holds a value and its availability.
        let result = unsafe { logical.raw.get_query_pool_results(self.0.raw, first, &mut values, flags) };
        match result {
            Ok(()) | Err(vk::Result::NOT_READY) => {}
            Err(e) => logical.check("vkGetQueryPoolResults", Err(e))?,
        }
        let capabilities = &logical.adapter.capabilities;
        let ns = |ticks| nanoseconds(ticks, capabilities.timestamp_bits, capabilities.timestamp_period_ns);
        Ok(values.into_iter().map(|[ticks, written]| (written != 0).then(|| ns(ticks))).collect())
    }

    pub(super) fn raw(&self) -> vk::QueryPool {
        self.0.raw
    }

    pub(super) fn assert_has(&self, first: u32, count: u32) {
        assert!(
            first.checked_add(count).is_some_and(|end| end <= self.0.count),
            "timestamps {first}..+{count} of a pool of {}",
            self.0.count
        );
    }

    pub(super) fn assert_of(&self, logical: &Arc<Logical>) {
        assert!(Arc::ptr_eq(&self.0.logical, logical), "a query pool of another device");
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: recorded commands and submissions in flight hold clones, so no use is left.
        unsafe { self.logical.raw.destroy_query_pool(self.raw, None) };
    }
}

/// Converts timestamp ticks, of which only the lowest `bits` bits are valid, into nanoseconds.
pub(super) fn nanoseconds(ticks: u64, bits: u32, period_ns: f32) -> u64 {
    let valid = if bits >= 64 { ticks } else { ticks & ((1 << bits) - 1) };
    if period_ns == 1.0 {
        return valid;
    }
    // The whole and the fractional part of the period are multiplied separately: one product in f64 would lose
    // nanoseconds after days.
    let whole = period_ns.trunc();
    (valid.wrapping_mul(whole as u64)).wrapping_add((valid as f64 * f64::from(period_ns - whole)) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_become_nanoseconds() {
        assert_eq!(nanoseconds(u64::MAX, 64, 1.0), u64::MAX);
        // Of the 36 valid bits only the lowest is set.
        assert_eq!(nanoseconds(0xff00_0000_0001, 36, 10.0), 10);
        assert_eq!(nanoseconds(1000, 64, 52.5), 52_500);
    }
}
