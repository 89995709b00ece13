//! What a device gets and lacks: the path of its kernels, and the features that the program can use and that it does not have,
//! each with the consequence. Not here: how a device's arithmetic is tested (`matrix_units`).

use crate::device::{Adapter, AdapterKind};
use crate::gpu::matrix_units::unpromised;
use crate::kernels::gemm::matmul::Arithmetic;
use crate::kernels::gemm::skinny::Matrices;
use crate::model::decoder::Tuning;

/// The size of an allocation, in bytes, above which weights of common models are split.
const LARGE_ALLOCATION: u64 = 4 << 30;

/// The layout of weights in memory, and the way in which they are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelPath {
    /// Weights in fragments, multiplied on matrix units.
    MatrixUnits,
    /// Weights in fragments, multiplied on matrix units that scalar arithmetic emulates.
    Emulated,
    /// Weights row after row; many rows of activations are multiplied in this arithmetic.
    RowMajor(Arithmetic),
}

impl KernelPath {
    /// Returns the path of a model with a tuning.
    pub(crate) fn of_tuning(tuning: &Tuning) -> KernelPath {
        KernelPath::of(tuning.fragments, tuning.arithmetic)
    }

    /// Returns the path for weights in fragments that are multiplied as stated, or for row-major weights without.
    pub(crate) fn of(fragments: Option<Matrices>, arithmetic: Arithmetic) -> KernelPath {
        match fragments {
            None => KernelPath::RowMajor(arithmetic),
            Some(Matrices::Emulated) => KernelPath::Emulated,
            Some(Matrices::Cooperative) => KernelPath::MatrixUnits,
        }
    }

    /// Returns the path's name for programs.
    pub fn name(self) -> &'static str {
        match self {
            KernelPath::MatrixUnits => "matrix_units",
            KernelPath::Emulated => "emulated",
            KernelPath::RowMajor(_) => "row_major",
        }
    }

    /// Returns the path in words.
    pub fn words(self) -> String {
        match self {
            KernelPath::MatrixUnits => "weights in fragments, multiplied on matrix units".to_owned(),
            KernelPath::Emulated => "weights in fragments, multiplied on emulated matrix units".to_owned(),
            KernelPath::RowMajor(arithmetic) => {
                let how = match arithmetic {
                    Arithmetic::F32 => "in f32".to_owned(),
                    Arithmetic::F16 => "in pairs of f16".to_owned(),
                    Arithmetic::Matrices(of) => {
                        format!("on matrix units of {}x{}x{} in f16, by subgroups of {}", of.m, of.n, of.k, of.subgroup)
                    }
                };
                format!("weights row after row, many rows multiplied {how}")
            }
        }
    }
}

/// The number of processors that is assumed of a device that does not report it: Intel's integrated GPUs have 4 to 8 Xe cores
/// and its discrete ones 20 to 32, Apple's GPUs have 8 to 40 cores, and Qualcomm's 2 to 6. The key `processors` sets another.
pub(crate) fn assumed_processors(kind: AdapterKind) -> u32 {
    if kind == AdapterKind::Integrated { 8 } else { 32 }
}

/// A feature that a device lacks, and the consequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// The feature that the device lacks.
    pub what: String,
    /// The consequence for models on the device.
    pub cost: &'static str,
}

/// Returns the features that the program can use and that an adapter lacks, each with the consequence.
pub fn lacks(adapter: &Adapter) -> Vec<Missing> {
    let capabilities = &adapter.capabilities;
    let mut missing = Vec::new();
    let mut lacks = |lacks: bool, what: &str, cost: &'static str| {
        if lacks {
            missing.push(Missing { what: what.to_owned(), cost });
        }
    };
    let matrices = unpromised(capabilities);
    lacks(
        !matrices.is_empty(),
        &matrices.join(", "),
        "weights are stored row after row: prompts and batches are slower than with weights in fragments",
    );
    lacks(
        matrices.is_empty() && !adapter.is_nvidia(),
        "a known order in which workgroups start",
        "the stages of a decode step run one after the other: 3.3 us a stage on an H200",
    );
    lacks(adapter.is_cpu(), "a GPU", "a CPU driver is for tests");
    lacks(
        capabilities.processors.is_none() && !adapter.is_cpu(),
        "its number of processors",
        match assumed_processors(adapter.kind) {
            8 => "8 are assumed, so work may be divided among too few or too many workgroups (--tune processors=N)",
            _ => "32 are assumed, so work may be divided among too few or too many workgroups (--tune processors=N)",
        },
    );
    lacks(
        capabilities.max_allocation_bytes.min(capabilities.max_buffer_bytes) < LARGE_ALLOCATION,
        "buffers of 4 GiB",
        "larger weights are split; an expert whose matrix is larger is refused",
    );
    lacks(
        !capabilities.bar && !capabilities.unified_memory,
        "device memory that the host can write (resizable BAR)",
        "what changes from step to step is read from the host's memory",
    );
    lacks(
        !capabilities.memory_budget,
        "a budget of free memory",
        "memory that other programs use is not known: set memory_limit beside them",
    );
    lacks(capabilities.timestamp_bits == 0, "timestamps", "profiles and traces have no times of GPU work");
    lacks(
        capabilities.timestamp_bits > 0 && !capabilities.calibrated_timestamps,
        "calibrated timestamps",
        "traces cannot place GPU work on the host's clock",
    );
    missing
}
