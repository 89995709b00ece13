//! The layout of a decoder's weights in memory, and their buffers in a recording.
//!
//! Not here: where the weights come from (`checkpoint`).

use super::{Decoder, Part, stride};
use crate::kernels::gemm::{Matrix, codes, order};
use crate::kernels::recording::{Range, Recording};
use crate::memory::pack::{Format, Layout, Packing};
use crate::model::checkpoint::{WeightKind, WeightSpec};

/// The name of the buffer with the orders of columns.
pub(super) const ORDERS: &str = "orders";

/// The maximum size in bytes of a part of a matrix of codes that is expanded at once.
const MOST_EXPANDED: u64 = 128 << 20;

impl Decoder<'_> {
    /// Whether a weight is packed in fragment order. If the device supports that, it applies to all matrices, unless all of
    /// them are f32.
    pub(super) fn in_fragments(&self, weight: &WeightSpec) -> bool {
        let narrow = |w: &WeightSpec| matches!(w.kind, WeightKind::Matrix) && w.format != Format::F32;
        let is_matrix = matches!(weight.kind, WeightKind::Matrix);
        self.tuning.fragments.is_some() && is_matrix && self.weights.iter().any(narrow)
    }

    /// Like [`Decoder::in_fragments`], for the weight of a name; false if there is none.
    pub(super) fn named_in_fragments(&self, name: &str) -> bool {
        self.weight(name).is_some_and(|weight| self.in_fragments(weight))
    }

    /// Whether any weight is of codes.
    pub(super) fn has_codes(&self) -> bool {
        self.weights.iter().any(|weight| weight.format.codes().is_some())
    }

    /// Returns the format of a weight in memory. In fragment order, f32 matrices are rounded to the format of 16 bits of the
    /// checkpoint: to f16 if it has matrices of that and none of bfloat16, otherwise to bfloat16. GGUF files keep routers in
    /// f32, whose numbers come from such a format; other files' f32 matrices are rounded by all who load them in it.
    pub(super) fn packed_format(&self, weight: &WeightSpec) -> Format {
        let of = |format| self.weights.iter().any(|w| matches!(w.kind, WeightKind::Matrix) && w.format == format);
        match weight.format {
            Format::F32 if self.in_fragments(weight) => match of(Format::F16) && !of(Format::Bf16) {
                true => Format::F16,
                false => Format::Bf16,
            },
            format => format,
        }
    }

    /// Whether the experts are of codes.
    pub(super) fn has_coded_experts(&self) -> bool {
        self.weights.iter().any(|weight| weight.is_of_experts() && weight.format.codes().is_some())
    }

    /// Whether a weight is of codes in fragment order.
    pub(super) fn in_code_fragments(&self, weight: &WeightSpec) -> bool {
        weight.format.codes().is_some() && self.in_fragments(weight)
    }

    /// Returns the runs of rows, first and count, in which the products of many rows expand a matrix of codes.
    pub(super) fn expanded(&self, weight: &Matrix) -> Vec<(u32, u32)> {
        let row_bytes = codes::expanded_bytes(16, weight.cols) / 16;
        let most = u32::try_from(MOST_EXPANDED / row_bytes).unwrap_or(u32::MAX).max(64) / 64 * 64;
        (0..weight.rows).step_by(most as usize).map(|first| (first, most.min(weight.rows - first))).collect()
    }

    /// Returns the packing of a weight.
    pub fn packing(&self, weight: &WeightSpec) -> Packing {
        let row_major = |columns_multiple| Layout::RowMajor { columns_multiple };
        let (rows, cols, layout, format) = match weight.kind {
            WeightKind::Matrix if self.in_fragments(weight) => {
                (weight.rows, weight.cols, Layout::Fragments, self.packed_format(weight))
            }
            WeightKind::Matrix => (weight.rows, weight.cols, row_major(8), weight.format),
            // Each row holds one value, so that sources can interleave. The padding becomes zero and extends as far as
            // that of activations.
            WeightKind::Vector if weight.cols == 1 => (stride(weight.rows), 1, row_major(1), Format::F32),
            // Rows of matrices one after the other. Their number of elements is a multiple of what kernels read at a time.
            WeightKind::Vector => (weight.rows, weight.cols, row_major(1), Format::F32),
        };
        Packing { rows, cols, layout, format }
    }

    /// Returns the number of rows of an expert in a weight that stacks one matrix of each; `None` for other weights.
    pub fn expert_rows(&self, weight: &WeightSpec) -> Option<u32> {
        let stacked = weight.is_of_experts() && matches!(weight.kind, WeightKind::Matrix);
        self.config.experts.filter(|_| stacked).map(|experts| weight.rows / experts.count)
    }

    /// Whether experts of some layer are in several buffers.
    pub fn divides_experts(&self) -> bool {
        self.weights.iter().any(|weight| self.expert_rows(weight).is_some() && self.parts(weight).len() > 1)
    }

    /// Returns the buffers of a weight. Those of a matrix are no larger than the device's largest buffer, if that holds an
    /// expert; kernels read vectors from one buffer.
    pub fn parts(&self, weight: &WeightSpec) -> Vec<Part> {
        let packing = self.packing(weight);
        // Parts consist of whole fragments and of an even number of rows, so that gate and up rows stay together. Those of
        // experts consist of whole experts.
        let unit = self.expert_rows(weight).unwrap_or_else(|| packing.rows_of_unit().max(2));
        let fit = u32::try_from(self.max_buffer_bytes / packing.row_bytes()).unwrap_or(u32::MAX) / unit * unit;
        let fit = fit.max(unit);
        let part = |name: String, first_row: u32, rows: u32| {
            let bytes = Packing { rows, ..packing }.bytes();
            Part { name, first_row, rows, bytes }
        };
        // A tied LM head's rows of a device are in buffers of their own.
        let own = self.stage.own_vocabulary().filter(|_| self.config.tied && weight.merged == "embed");
        let (first, end) = own.map_or((0, packing.rows), |(.., own)| (own.start, own.end.min(packing.rows)));
        if packing.rows <= fit && (first, end) == (0, packing.rows) || matches!(weight.kind, WeightKind::Vector) {
            return vec![part(weight.name.clone(), 0, packing.rows)];
        }
        let runs = [0..first, first..end, end..packing.rows];
        let starts = runs.into_iter().flat_map(|run| run.clone().step_by(fit as usize).map(move |at| (at, run.end)));
        let rows = starts.map(|(at, end)| (at, fit.min(end - at)));
        rows.zip(0..).map(|((at, rows), i)| part(format!("{}.part{i}", weight.name), at, rows)).collect()
    }

    /// Returns the tables of all orders of columns, one after the other: the content of the buffer `orders`.
    pub fn orders(&self) -> Vec<u32> {
        self.weights.iter().filter_map(|weight| weight.order.as_deref()).flat_map(order::table).collect()
    }

    /// Returns the table of the order of the columns in row `row` of a merged weight, and their number; `None` if they are
    /// in the order of their inputs.
    pub(super) fn order(&self, recording: &mut Recording, name: &str, row: u32) -> Option<(Range, u32)> {
        let bytes = |cols: u32| 4 * u64::from(order::table_words(cols));
        let (mut all, mut found) = (0, None);
        for weight in self.weights.iter().filter(|weight| weight.order.is_some()) {
            if weight.merged == name && (weight.first_row..weight.first_row + weight.rows).contains(&row) {
                found = Some((all, weight.cols));
            }
            all += bytes(weight.cols);
        }
        let (at, cols) = found?;
        Some((recording.buffer(ORDERS, all).part(at, bytes(cols)), cols))
    }

    pub(super) fn weight(&self, name: &str) -> Option<&WeightSpec> {
        self.weights.iter().find(|w| w.name == name)
    }

    pub(super) fn vector(&self, recording: &mut Recording, name: &str) -> Option<Range> {
        self.weight(name).map(|w| recording.buffer(name, u64::from(stride(w.rows * w.cols)) * 4))
    }

    /// Returns the parts of a matrix that the device multiplies, each with its first row: those of a tied LM head that is
    /// divided among devices are the rows of the embedding that the device has of it, counted from the first of them.
    pub(super) fn factors(&self, recording: &mut Recording, name: &str) -> Vec<(u32, Matrix)> {
        let parts = self.matrix(recording, name);
        let Some((.., own)) = self.stage.own_vocabulary().filter(|_| name == "embed") else { return parts };
        parts.into_iter().filter(|(first, _)| own.contains(first)).map(|(first, of)| (first - own.start, of)).collect()
    }

    /// Returns the parts of a matrix, each with its first row. Ranges of rows of different formats are parts of their
    /// own.
    pub(super) fn matrix(&self, recording: &mut Recording, name: &str) -> Vec<(u32, Matrix)> {
        let mut parts = Vec::new();
        for weight in self.weights.iter().filter(|weight| weight.merged == name) {
            let format = self.packed_format(weight);
            parts.extend(self.parts(weight).into_iter().map(|part| {
                let range = recording.buffer(&part.name, part.bytes);
                let matrix = Matrix { range, format, rows: part.rows, cols: weight.cols };
                (weight.first_row + part.first_row, matrix)
            }));
        }
        assert!(!parts.is_empty(), "the checkpoint was opened with \"{name}\"");
        parts
    }
}
