//! The program in PTX of a call. Not here: how its text is written (`gemm::wgmma`, `attention::flash_wgmma`).

use super::attention::flash_wgmma;
use super::gemm::{codes_ptx, wgmma};
use super::ptx::PtxProgram;
use super::shaders::{EXPERT_SKINNY_PTX, FLASH_WGMMA, SKINNY_CODES_PTX, WGMMA};

/// Returns the program of a kernel for the constants of a call.
///
/// # Panics
/// If the kernel is none in PTX.
pub fn program(kernel: &str, constants: &[u32]) -> PtxProgram {
    if kernel == FLASH_WGMMA.name {
        return flash_wgmma::program(constants);
    }
    if is_of_codes(kernel) {
        return codes_ptx::program(kernel, constants);
    }
    assert_eq!(kernel, WGMMA.name, "a kernel in PTX");
    let variant = wgmma::variant_of(constants);
    PtxProgram {
        text: wgmma::text::text(&variant),
        entry: wgmma::text::ENTRY,
        threads: variant.tile.threads(),
        shared_bytes: variant.shared_bytes(),
    }
}

/// Whether a kernel in PTX multiplies codes with few rows of x: those of `gemm::codes_ptx`.
pub fn is_of_codes(kernel: &str) -> bool {
    [SKINNY_CODES_PTX.name, EXPERT_SKINNY_PTX.name].contains(&kernel)
}

/// Returns the number of threads and of bytes of shared memory of a kernel's workgroup.
///
/// # Panics
/// Like [`program`].
pub fn workgroup(kernel: &str, constants: &[u32]) -> (u32, u32) {
    if kernel == FLASH_WGMMA.name {
        return flash_wgmma::workgroup(constants);
    }
    if is_of_codes(kernel) {
        return codes_ptx::workgroup(kernel, constants);
    }
    assert_eq!(kernel, WGMMA.name, "a kernel in PTX");
    let variant = wgmma::variant_of(constants);
    (variant.tile.threads(), variant.shared_bytes())
}
