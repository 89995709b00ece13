//! Loops with wide vector instructions, which the compiler makes of plain ones where it may. Not here: such loops.

#[cfg(target_arch = "x86_64")]
use fearless_simd::{Avx2, Level, Simd};
#[cfg(target_arch = "x86_64")]
use std::sync::LazyLock;

#[cfg(target_arch = "x86_64")]
static AVX2: LazyLock<Option<Avx2>> = LazyLock::new(|| Level::new().as_avx2());

/// Calls `work`, which is compiled a second time for processors with AVX2. This holds only for code that is inlined: the
/// closure and the functions that it calls should be `#[inline(always)]`.
#[inline(always)]
pub fn wide<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    if let Some(avx2) = *AVX2 {
        return avx2.vectorize(work);
    }
    work()
}
