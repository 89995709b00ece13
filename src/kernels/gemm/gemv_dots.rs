//! `gemv_dots`, the product of row-major quantised weights with few rows of activations by integer dot products: the result
//! of `gemv`, with x rounded to integers of 16 bits. Not here: other weights, and weights in fragment order.

use super::{Product, row_major_product};
use crate::kernels::host_memory::HostMemory;
use crate::kernels::recording::Call;
use crate::kernels::shaders::GemvDotsConstants;
use crate::kernels::{Format, codes_word, fold, format_of};
use crate::quant::number::Number;

/// The workgroups of `gemv_dots`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DotsConfig {
    /// The number of groups of invocations, each of which computes [`DotsConfig::weight_rows`] rows of W.
    pub groups: u32,
    /// The number of invocations of a group, a multiple of the size of a subgroup.
    pub lanes: u32,
    /// The number of rows of W of a group, an even number.
    pub weight_rows: u32,
}

/// Whether weights of a format are multiplied by integer dot products: affine codes.
pub fn serves(format: Format) -> bool {
    format.codes().is_some_and(|codes| codes.number == Number::Affine)
}

impl Product {
    /// Returns the call for a few rows of x, each of which reads W anew.
    ///
    /// # Panics
    /// If the weights are no affine codes.
    pub fn gemv_dots(&self, rows: u32, config: DotsConfig) -> Call {
        let DotsConfig { groups, lanes, weight_rows } = config;
        assert!(serves(self.weight.format), "integer dot products of {:?}", self.weight.format);
        let threads = groups * lanes;
        let constants = GemvDotsConstants {
            threads,
            norm: u32::from(self.norm.is_some()),
            bias: u32::from(self.bias.is_some()),
            epilogue: self.epilogue.code(),
            rows: weight_rows,
            lanes: threads,
            spans: lanes,
            codes: codes_word(self.weight.format),
        };
        Call {
            kernel: "gemv_dots",
            label: self.label.clone(),
            constants: constants.into_values(),
            args: self.gemv_args(rows).into_args(),
            groups: fold(self.weight.rows.div_ceil(groups * weight_rows) * rows, 1),
        }
    }
}

pub(crate) fn reference_gemv_dots(call: &Call, memory: &mut HostMemory) {
    let c = GemvDotsConstants::from_values(&call.constants);
    row_major_product(call, memory, format_of("codes", c.codes), [c.norm, c.bias, c.epilogue]);
}
